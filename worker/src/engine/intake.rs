//! The intake: decides which assigned jobs can be started, and which locked jobs are run.
//!
//! It reads the assigned jobs, and later takes the answer of their start. Jobs that were locked and are not run are released as they were.

use std::{
    cmp::Reverse,
    collections::{HashMap, HashSet},
    sync::Arc,
};

use bson::RawDocument;
use chrono::TimeDelta;
use recruiter_common::{
    failure::{self, Failure},
    ids::{JobId, WorkerId},
    instant::Instant,
    job::{Claim, FinishReason, IfWorkerDies, Job},
    retry_policy::Decision,
    roster::WorkOn,
    store::{Archival, Position, Recorded, Start, Store, StoreError, ToStart},
    telemetry::chain,
};
use tokio::sync::oneshot::{self, error::TryRecvError};

use super::{
    attempt::StartedJob,
    dependencies::{Dependencies, Policy},
    environment::Environment,
    reading::{Reading, Unlocked},
    recorder::JobEnd,
    starts::Answered,
    unconfirmed::UnconfirmedStarts,
};
use crate::panics::guarded;

/// A job that is sent once and is younger than this is not looked up in the archive. Dumps that are restored are older.
const YOUNG: TimeDelta = TimeDelta::minutes(10);
/// Classes of unknown retry policies that are remembered, so that each is logged once.
const UNKNOWN_POLICIES: usize = 100;

/// Turns assignments into started jobs.
pub(crate) struct Intake {
    environment: Arc<Environment>,
    work_on: WorkOn,
    reading: Reading,
    unconfirmed: UnconfirmedStarts,
    /// Classes of retry policies that jobs have and this worker does not know.
    unknown_policies: HashSet<String>,
    /// Documents that are no jobs, on their way to the archive. They hold no slot, and the recruiter assigns them again meanwhile.
    archiving: HashMap<JobId, oneshot::Receiver<Recorded>>,
}

/// What has become of the jobs of one start.
pub(crate) struct StartResult {
    pub(crate) started: Vec<StartedJob>,
    /// Jobs whose slots are free again.
    pub(crate) not_run: Vec<JobId>,
}

/// A job that may be started.
pub(crate) struct Startable {
    job: Arc<Job>,
    policy: Policy,
    /// The policy's verdict for the case that this worker dies during this attempt.
    if_worker_dies: IfWorkerDies,
}

impl Intake {
    pub(crate) fn new(environment: Arc<Environment>, worker: WorkerId) -> Self {
        let dependencies = &environment.dependencies;
        let work_on = dependencies.config.work_on();
        let (reading, unconfirmed) = (Reading::new(dependencies.clone()), UnconfirmedStarts::new(dependencies.clone(), worker));
        Self { environment, work_on, reading, unconfirmed, unknown_policies: HashSet::new(), archiving: HashMap::new() }
    }

    /// Reads those of these jobs that this worker can start. The others stay due.
    pub(crate) async fn read(&mut self, jobs: &[JobId]) -> Result<Vec<Startable>, StoreError> {
        if jobs.is_empty() {
            return Ok(Vec::new());
        }
        let now = self.store().now();
        let unlocked = self.reading.unlocked(jobs).await?;
        self.dependencies().watchdog.progress();
        Ok(self.startable(unlocked, now))
    }

    /// Decides which jobs of an answered start are run. Deletes those that were archived before, and releases the others.
    pub(crate) async fn confirm(&mut self, answered: Answered) -> StartResult {
        if answered.is_fruitless() {
            self.environment.lease.request_heartbeat();
        }
        let Answered { start, mut startable, claims, refused, unanswered, archived } = answered;
        for Startable { job, .. } in refused.iter().filter_map(|id| startable.get(id)) {
            self.archive_malformed(job.id, &job.document, &Failure::new(failure::MALFORMED, "MongoDB cannot start it"), start.now);
        }
        // Jobs without an answer may still be locked by this start. All others are locked by now or never.
        let claimed: HashSet<JobId> = claims.iter().map(|claim| claim.job()).collect();
        let mut not_run: HashSet<JobId> = unanswered.into_iter().filter(|id| !claimed.contains(id)).collect();
        let (again, mut claims): (Vec<Claim>, Vec<Claim>) = match &archived {
            Ok(archived) => claims.into_iter().partition(|claim| archived.contains(&claim.job())),
            Err(_) => (Vec::new(), claims),
        };
        not_run.extend(self.discard(&again).await);
        if self.environment.lease.is_over() || archived.is_err() {
            // The answer came too late, or the jobs may have run before.
            not_run.extend(claims.drain(..).map(|claim| claim.job()));
        }
        if !not_run.is_empty() {
            self.unconfirmed.add(start.id, not_run, start.lease_until);
            self.release_unconfirmed(start.now).await;
        }
        let started = claims.into_iter().filter_map(|claim| Some(startable.remove(&claim.job())?.started(claim, &start))).collect();
        StartResult { started, not_run: startable.into_keys().collect() }
    }

    /// Notes an answered start none of whose jobs is run: what it has locked is released.
    pub(crate) fn drop_start(&mut self, answered: &Answered) {
        self.unconfirmed.add(answered.start.id, answered.may_be_locked(), answered.start.lease_until);
    }

    /// Releases jobs that earlier starts have locked and that are not run; whether the roster is to list others than before. A cleaner finds
    /// the listed jobs at once when this process is killed.
    pub(crate) async fn release_unconfirmed(&mut self, now: Instant) -> bool {
        self.unconfirmed.release(now).await;
        self.environment.table.set_unconfirmed(self.unconfirmed.jobs(now).collect())
    }

    /// Jobs that are not run and may be locked at `now` or later.
    pub(crate) fn unconfirmed(&self, now: Instant) -> impl Iterator<Item = JobId> {
        self.unconfirmed.jobs(now)
    }

    fn dependencies(&self) -> &Dependencies {
        &self.environment.dependencies
    }

    fn store(&self) -> &Store {
        &self.environment.dependencies.store
    }

    /// The jobs that this worker can start, of its classes, groups and policies. A document that is no job is archived.
    fn startable(&mut self, unlocked: Vec<Unlocked>, now: Instant) -> Vec<Startable> {
        let mut startable = Vec::with_capacity(unlocked.len());
        let died = Failure::new(failure::WORKER_DIED, "the worker died");
        for found in unlocked {
            match found {
                Ok(job) if self.dependencies().registry.has(&job.class) && self.work_on.includes(&job.group) => {
                    match self.dependencies().policy(&job) {
                        Ok(policy) => startable.push(Startable::new(job, policy, &died, now)),
                        Err(unknown) => self.skip_unknown_policy(job.id, unknown),
                    }
                }
                Ok(job) => tracing::debug!(job.id = %job.id, "the job is not for this worker; leaving it to others"),
                Err((id, document, error)) => {
                    self.archive_malformed(id, &document, &Failure::new(failure::MALFORMED, error.to_string()), now)
                }
            }
        }
        startable
    }

    /// Leaves a job to a worker that knows its policy: one of a newer release, or one with custom policies.
    fn skip_unknown_policy(&mut self, job: JobId, class: String) {
        tracing::debug!(job.id = %job, policy = class, "the job is not for this worker; leaving it to others");
        if self.unknown_policies.len() < UNKNOWN_POLICIES && !self.unknown_policies.contains(&class) {
            tracing::warn!(job.id = %job, policy = class, "this worker does not know the retry policy of a job; leaving such jobs to workers that know it");
            self.unknown_policies.insert(class);
        }
    }

    /// Deletes jobs that were enqueued again after they had been archived; returns those that could not be deleted.
    async fn discard(&self, again: &[Claim]) -> Vec<JobId> {
        if again.is_empty() {
            return Vec::new();
        }
        tracing::info!(count = again.len(), "jobs that were enqueued again after they were archived are not run again");
        match self.store().discard_if_claimed(again).await {
            Ok(_) => Vec::new(),
            Err(error) => {
                tracing::warn!(error = chain(&error), "failed to delete re-enqueued jobs that are already archived");
                again.iter().map(|claim| claim.job()).collect()
            }
        }
    }

    /// Archives a document that is no job, without a start. Each is handed to the recorder once: a second copy in the same batch would find
    /// the document deleted, and fail the whole batch.
    fn archive_malformed(&mut self, id: JobId, document: &RawDocument, failure: &Failure, now: Instant) {
        self.archiving.retain(|_, answer| matches!(answer.try_recv(), Err(TryRecvError::Empty)));
        if self.archiving.contains_key(&id) {
            return;
        }
        tracing::warn!(job.id = %id, reason = failure.message, "a document in `scheduled` is no job; archiving it as malformed");
        let archival = Archival::unstarted(id, document, &FinishReason::MALFORMED, failure, now);
        self.archiving.insert(id, self.environment.recorder.record_later(JobEnd::Archive(Box::new(archival))));
    }
}

impl Startable {
    fn new(job: Arc<Job>, policy: Policy, died: &Failure, now: Instant) -> Self {
        let mut history = job.history();
        history.attempts += 1;
        let decision = policy.as_ref().ok().and_then(|policy| guarded(|| policy.decide(&history, died, now)).ok());
        let if_worker_dies = decision.unwrap_or(Decision::Archive(FinishReason::WORKER_DIED)).into();
        Self { job, policy, if_worker_dies }
    }

    pub(crate) fn id(&self) -> JobId {
        self.job.id
    }

    /// Its position in the order of jobs.
    pub(crate) fn position(&self) -> Position {
        (Reverse(self.job.priority.get().into()), self.job.due().unwrap_or_default(), self.job.id)
    }

    /// The size of its document.
    pub(crate) fn bytes(&self) -> usize {
        self.job.document.as_bytes().len()
    }

    /// Whether the document may be a copy of a job that was archived: its enqueuer has sent it again, or an old dump was restored.
    pub(crate) fn can_be_resent(&self, now: Instant) -> bool {
        !self.job.is_sent_once || now - self.job.created_at > YOUNG
    }

    pub(crate) fn to_start(&self, now: Instant) -> ToStart {
        let Self { job, if_worker_dies, .. } = self;
        ToStart { job: job.id, attempts: job.attempts, due: job.due().unwrap_or(now), if_worker_dies: if_worker_dies.clone() }
    }

    /// The job as the start has stored it.
    fn started(self, claim: Claim, start: &Start) -> StartedJob {
        let Self { mut job, policy, if_worker_dies } = self;
        // No other holder exists yet, so that the job is not copied.
        let started = Arc::make_mut(&mut job);
        let previous = started.last_execution.take().map(Arc::new);
        start.mark_started(started, if_worker_dies);
        StartedJob { job, claim, policy, previous }
    }
}
