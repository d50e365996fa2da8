//! The intake: decides which assigned jobs can be started, and which locked jobs are run.
//!
//! It reads the assigned jobs, and later handles the answer of their start. Jobs that were locked and are not run are released: unlocked as
//! they were before the start.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use bson::RawDocument;
use recruiter_common::{
    failure::{self, Failure},
    ids::{JobId, WorkerId},
    instant::Instant,
    job::{Claim, FinishReason, Job},
    roster::{Permits, WorkOn},
    store::{Archival, Recorded, Store, StoreError},
    telemetry::chain,
};
use tokio::sync::oneshot::{self, error::TryRecvError};

use super::{
    attempt::StartedJob,
    dependencies::Dependencies,
    environment::Environment,
    reading::{Reading, Unlocked},
    recorder::JobEnd,
    startable::Startable,
    starts::Answered,
    unconfirmed::UnconfirmedStarts,
};

/// Maximum number of unknown retry policies in memory. Each of them is logged once.
const UNKNOWN_POLICIES: usize = 100;

/// Turns assignments into started jobs.
pub(crate) struct Intake {
    environment: Arc<Environment>,
    work_on: WorkOn,
    reading: Reading,
    unconfirmed: UnconfirmedStarts,
    /// Classes of retry policies of jobs that this worker does not know.
    unknown_policies: HashSet<String>,
    /// Documents that are not jobs, or have expired, and whose move to the archive is not written yet. They have no slot. The recruiter may assign them again
    /// until then.
    archiving: HashMap<JobId, oneshot::Receiver<Recorded>>,
}

/// Which jobs of an answered start are run.
pub(crate) struct StartResult {
    /// Jobs to run.
    pub(crate) started: Vec<StartedJob>,
    /// The other jobs, locked or not. Their slots become free.
    pub(crate) not_run: Vec<JobId>,
}

impl Intake {
    pub(crate) fn new(environment: Arc<Environment>, worker: WorkerId) -> Self {
        let dependencies = &environment.dependencies;
        let work_on = dependencies.config.work_on();
        let (reading, unconfirmed) = (Reading::new(dependencies.clone()), UnconfirmedStarts::new(dependencies.clone(), worker));
        Self { environment, work_on, reading, unconfirmed, unknown_policies: HashSet::new(), archiving: HashMap::new() }
    }

    /// Reads those of these jobs that this worker can start. The others stay due.
    pub(crate) async fn read(&mut self, jobs: &[JobId], permits: Permits) -> Result<Vec<Startable>, StoreError> {
        if jobs.is_empty() {
            return Ok(Vec::new());
        }
        let now = self.store().now();
        let unlocked = self.reading.unlocked(jobs).await?;
        self.dependencies().watchdog.progress();
        Ok(self.startable(unlocked, permits, now))
    }

    /// Decides which jobs of an answered start are run. Deletes locked jobs that were archived before, archives jobs whose start MongoDB
    /// refused as malformed, and releases the other locked jobs.
    pub(crate) async fn confirm(&mut self, answered: Answered) -> StartResult {
        if answered.is_fruitless() {
            self.environment.lease.request_heartbeat();
        }
        let Answered { start, mut startable, claims, refused, unanswered, archived, took: _ } = answered;
        for job in refused.iter().filter_map(|id| startable.get(id)).map(Startable::job) {
            self.archive_malformed(job.id, &job.document, &Failure::new(failure::MALFORMED, "MongoDB cannot start it"), start.now);
        }
        // This start may still lock jobs without an answer. It locks no other job later.
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
        // They expired between the read and the start. The archival changes nothing if the job is locked.
        let now = self.store().now();
        startable.values().map(Startable::job).filter(|job| job.is_expired(now)).for_each(|job| self.archive_expired(job, now));
        StartResult { started, not_run: startable.into_keys().collect() }
    }

    /// Notes an answered start whose jobs are not run. The jobs that it has locked are released later.
    pub(crate) fn drop_start(&mut self, answered: &Answered) {
        self.unconfirmed.add(answered.start.id, answered.may_be_locked(), answered.start.lease_until);
    }

    /// Releases jobs that unconfirmed starts have locked. Returns whether the set of jobs that may be locked has changed: the roster must
    /// list them, because a cleaner rescues the listed jobs when this process dies.
    pub(crate) async fn release_unconfirmed(&mut self, now: Instant) -> bool {
        self.unconfirmed.release(now).await;
        self.environment.table.set_unconfirmed(self.unconfirmed.jobs(now).collect())
    }

    /// Jobs of unconfirmed starts that may be locked at `now` or later.
    pub(crate) fn unconfirmed(&self, now: Instant) -> impl Iterator<Item = JobId> {
        self.unconfirmed.jobs(now)
    }

    fn dependencies(&self) -> &Dependencies {
        &self.environment.dependencies
    }

    fn store(&self) -> &Store {
        &self.environment.dependencies.store
    }

    /// The jobs whose class, group and retry policy this worker serves. A document that is not a job is archived.
    fn startable(&mut self, unlocked: Vec<Unlocked>, mut permits: Permits, now: Instant) -> Vec<Startable> {
        let mut startable = Vec::with_capacity(unlocked.len());
        let died = Failure::new(failure::WORKER_DIED, "the worker died");
        for found in unlocked {
            match found {
                Ok(job) if job.is_expired(now) => self.archive_expired(&job, now),
                // A recruiter of an earlier release gives no permit, and the job may have been replaced since it was assigned.
                Ok(job)
                    if !permits
                        .get(&job.id)
                        .map_or(job.gate.is_none(), |permit| permit.is_for(job.settings.group(), job.gate.as_deref())) =>
                {
                    tracing::debug!(job.id = %job.id, "the job was assigned without a permit for its limits; skipping it")
                }
                Ok(job) if self.dependencies().registry.has(&job.class) && self.work_on.includes(job.settings.group()) => {
                    match self.dependencies().policy(&job) {
                        Ok(policy) => {
                            let permit = permits.remove(&job.id);
                            startable.push(Startable::new(job, policy, permit, &died, now));
                        }
                        Err(unknown) => self.skip_unknown_policy(job.id, unknown),
                    }
                }
                Ok(job) => tracing::debug!(job.id = %job.id, "this worker does not serve the job; skipping it"),
                Err((id, document, error)) => {
                    self.archive_malformed(id, &document, &Failure::new(failure::MALFORMED, error.to_string()), now)
                }
            }
        }
        startable
    }

    /// Skips a job whose retry policy this worker does not know. A worker of a newer release, or with custom policies, can run it.
    fn skip_unknown_policy(&mut self, job: JobId, class: String) {
        tracing::debug!(job.id = %job, policy = class, "this worker does not serve the job; skipping it");
        if self.unknown_policies.len() < UNKNOWN_POLICIES && !self.unknown_policies.contains(&class) {
            tracing::warn!(job.id = %job, policy = class, "this worker does not know the retry policy of a job; other workers must run such jobs");
            self.unknown_policies.insert(class);
        }
    }

    /// Deletes locked jobs that were enqueued again after they had been archived. Returns those that could not be deleted.
    async fn discard(&self, again: &[Claim]) -> Vec<JobId> {
        if again.is_empty() {
            return Vec::new();
        }
        tracing::info!(count = again.len(), "deleting jobs that were enqueued again after they were archived");
        match self.store().discard_if_claimed(again).await {
            Ok(_) => Vec::new(),
            Err(error) => {
                tracing::warn!(error = chain(&error), "failed to delete re-enqueued jobs that are already archived");
                again.iter().map(|claim| claim.job()).collect()
            }
        }
    }

    /// Archives a document that is not a job, without a start.
    fn archive_malformed(&mut self, id: JobId, document: &RawDocument, failure: &Failure, now: Instant) {
        if self.archive_unstarted(id, document, &FinishReason::MALFORMED, failure, now) {
            tracing::warn!(job.id = %id, reason = failure.message, "a document in `scheduled` is not a job; archiving it as malformed");
        }
    }

    /// Archives a job that was not started in time.
    fn archive_expired(&mut self, job: &Job, now: Instant) {
        if self.archive_unstarted(job.id, &job.document, &FinishReason::EXPIRED, &Failure::expired(), now) {
            tracing::info!(job.id = %job.id, job.class, "a job was not started before it expired; archiving it");
        }
    }

    /// Archives a document without a start. The recorder gets each document once: a second entry in the same batch would find the document
    /// deleted, and the whole batch would fail. Returns whether this is the first entry.
    fn archive_unstarted(&mut self, id: JobId, document: &RawDocument, why: &FinishReason, failure: &Failure, now: Instant) -> bool {
        self.archiving.retain(|_, answer| matches!(answer.try_recv(), Err(TryRecvError::Empty)));
        if self.archiving.contains_key(&id) {
            return false;
        }
        let archival = Archival::unstarted(id, document, why, failure, now);
        self.archiving.insert(id, self.environment.recorder.record_later(JobEnd::Archive(Box::new(archival))));
        true
    }
}
