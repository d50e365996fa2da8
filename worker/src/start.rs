//! Starting assigned jobs: read them, lock them with one guarded command, enter those that this start got.
//!
//! Jobs that this worker has locked and does not enter are handed back as they were. A start whose reply was lost may lock its jobs
//! later: it is asked for until its lease forbids it.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant as Monotonic},
};

use bson::RawDocumentBuf;
use recruiter_common::{
    failure::{self, Failure},
    ids::{JobId, RoundId, StartId},
    instant::Instant,
    job::{Claim, CorruptJob, Held, IfWorkerDies, Job, Why},
    retry_policy::{Decision, RetryPolicy},
    store::{Archival, CommitSession, Hint, Recorded, Rescheduling, Start, StoreError, ToStart},
    telemetry::chain,
};
use tokio::sync::oneshot;

use crate::{
    carry_out::carry_out,
    commit::ToRecord,
    execute::{Outcome, guarded},
    runner::Incarnation,
    workable::Cancel,
};

/// How long after its lease a start whose reply was lost is still looked for: it may have begun in time and be slow.
const UNCONFIRMED_FOR: Duration = Duration::from_secs(30);
/// Bytes of jobs that are read without asking for their sizes first: as much as MongoDB sends in one reply.
pub(crate) const READ_AT_ONCE: usize = 16 * 1024 * 1024;
/// How long one round's jobs are read, if their sizes were asked for: then those that were read are started.
const READ_FOR: Duration = Duration::from_secs(5);
/// Classes of unknown policies that are remembered, so that each is warned about once.
const UNKNOWN_POLICIES: usize = 100;
/// Jobs handed back in one step: they are in memory whole.
const STEP: usize = 50;

/// Starts that may have locked jobs, or may lock them yet, which this worker will not enter. Ids only: the jobs may be large.
#[derive(Default)]
pub(crate) struct Unconfirmed {
    starts: HashMap<StartId, NotEntered>,
    /// Whether jobs that these starts have locked may not be handed back yet.
    is_behind: bool,
}

struct NotEntered {
    jobs: HashSet<JobId>,
    /// By the server's clock: after this the start can no longer happen.
    until: Instant,
}

impl Unconfirmed {
    /// The jobs that may be locked at `now` or later.
    pub(crate) fn jobs(&self, now: Instant) -> impl Iterator<Item = JobId> {
        self.starts.values().filter(move |start| self.is_behind || start.until > now).flat_map(|start| start.jobs.iter().copied())
    }

    fn as_asked(&self) -> HashMap<StartId, Vec<JobId>> {
        self.starts.iter().map(|(start, NotEntered { jobs, .. })| (*start, jobs.iter().copied().collect())).collect()
    }

    fn is_settled(&mut self, claim: Claim) {
        if let Some(start) = self.starts.get_mut(&claim.start()) {
            start.jobs.remove(&claim.job());
        }
    }
}

/// An unlocked job; or a document that is none, and why.
type Unlocked = Result<Arc<Job>, (JobId, RawDocumentBuf, CorruptJob)>;

/// A job that may be started.
struct Startable {
    job: Arc<Job>,
    /// Its policy, or why that cannot be used.
    policy: Result<Arc<dyn RetryPolicy>, Failure>,
    /// The policy's verdict for the case that this worker dies in this start.
    if_worker_dies: IfWorkerDies,
}

/// What became of a bulk start.
#[derive(Default)]
struct Locked {
    claims: Vec<Claim>,
    /// MongoDB cannot carry out their start.
    refused: Vec<JobId>,
    /// It is not known whether their start was, or will be, carried out.
    unanswered: Vec<JobId>,
}

impl Startable {
    fn new(job: Arc<Job>, policy: Result<Arc<dyn RetryPolicy>, Failure>, died: &Failure, now: Instant) -> Self {
        let mut history = job.history();
        history.attempts += 1;
        let decision = policy.as_ref().ok().and_then(|policy| guarded(|| policy.decide(&history, died, now)).ok());
        let if_worker_dies = decision.unwrap_or(Decision::Archive(Why::WORKER_DIED)).into();
        Self { job, policy, if_worker_dies }
    }

    fn to_start(&self, now: Instant) -> ToStart {
        let Self { job, if_worker_dies, .. } = self;
        ToStart { job: job.id, attempts: job.attempts, due: job.due().unwrap_or(now), if_worker_dies: if_worker_dies.clone() }
    }
}

impl Incarnation {
    /// Starts jobs of a round.
    pub(crate) async fn start(&mut self, round: RoundId, jobs: &[JobId]) -> Result<(), StoreError> {
        if jobs.is_empty() {
            return Ok(());
        }
        let store = self.store().clone();
        let now = store.now();
        let mut readable = self.read(jobs, now).await?;
        self.progress();
        if readable.is_empty() {
            return Ok(());
        }
        let Some(lease_until) = self.shared.lease_until() else {
            tracing::warn!(count = readable.len(), "not starting jobs: no heartbeat was acknowledged for too long");
            return Ok(());
        };
        let place = &self.equipment.place;
        let start = Start { id: StartId::new(), worker: self.id, hostname: place.hostname.clone(), pid: place.pid, lease_until, now };
        let to_start: Vec<ToStart> = readable.values().map(|startable| startable.to_start(now)).collect();
        self.shared.work_on(readable.keys().copied());
        let free = self.free();
        let locked = self.lock(&start, &to_start).await;
        self.progress();
        // After the start, not beside it: what was read may have been archived and sent again before it was locked; and a round that met this
        // worker available before its jobs are locked would give them to another.
        let claimed: Vec<JobId> = locked.claims.iter().map(|claim| claim.job()).collect();
        let archived = async { if claimed.is_empty() { Ok(HashSet::new()) } else { store.already_archived(&claimed).await } };
        let (archived, taken) = tokio::join!(archived, store.take_if_assigned(self.id, round, &free));
        self.progress();
        let told = taken.unwrap_or_else(|error| {
            tracing::debug!(error = chain(&error), "could not tell the roster; trying again");
            false
        });
        let mut entered = 0;
        for claim in self.sort_out(&start, &readable, locked, archived).await {
            if let Some(startable) = readable.remove(&claim.job()) {
                entered += 1;
                self.enter(startable, claim, &start);
            }
        }
        for not_entered in readable.keys() {
            self.shared.done_with(*not_entered);
        }
        if told && entered == jobs.len() {
            self.roster_is_behind = false;
            if free.places > 0 {
                store.announce_hint(Hint::Free).await;
            }
        }
        Ok(())
    }

    /// The jobs that can be read and are for this worker, whatever a hint said. What is no job is archived, alone.
    async fn read(&mut self, jobs: &[JobId], now: Instant) -> Result<HashMap<JobId, Startable>, StoreError> {
        let mut readable = HashMap::with_capacity(jobs.len());
        let died = Failure::new(failure::WORKER_DIED, "the worker died");
        let work_on = self.equipment.args.work_on();
        for found in self.read_documents(jobs).await? {
            match found {
                Ok(job) if self.equipment.registry.has(&job.class) && work_on.includes(&job.group) => match self.equipment.policy(&job) {
                    Ok(policy) => drop(readable.insert(job.id, Startable::new(job, policy, &died, now))),
                    Err(unknown) => self.leave_unknown_policy(job.id, unknown),
                },
                Ok(job) => tracing::debug!(job.id = %job.id, "not for this worker: left to others"),
                Err((id, document, error)) => {
                    self.archive_malformed(id, &document, &Failure::new(failure::MALFORMED, error.to_string()), now)
                }
            }
        }
        Ok(readable)
    }

    /// A worker of a newer release, or with a policy of its own, will start the job.
    fn leave_unknown_policy(&mut self, job: JobId, class: String) {
        tracing::debug!(job.id = %job, policy = class, "not for this worker: left to others");
        if self.unknown_policies.len() < UNKNOWN_POLICIES && !self.unknown_policies.contains(&class) {
            tracing::warn!(job.id = %job, policy = class, "this worker does not know the retry policy of a job; leaving such jobs to workers that know it");
            self.unknown_policies.insert(class);
        }
    }

    /// Reads jobs. What does not arrive in time stays due and is left to the next round: over a slow line the sizes of the jobs are asked for
    /// first, and they are read in portions, the smallest jobs first, so that a large job delays no small one.
    async fn read_documents(&mut self, jobs: &[JobId]) -> Result<Vec<Unlocked>, StoreError> {
        if self.reading.is_whole() {
            return self.in_time(self.store().unlocked(jobs).await);
        }
        let sizes = self.store().sizes_of_unlocked(jobs).await?;
        let portion = self.reading.bytes();
        let until = Monotonic::now() + READ_FOR;
        let mut found = Vec::with_capacity(sizes.len());
        let mut left = sizes.as_slice();
        while !left.is_empty() && (found.is_empty() || Monotonic::now() < until) {
            let mut bytes = 0_usize;
            let fits = left
                .iter()
                .take_while(|(_, size)| {
                    bytes = bytes.saturating_add(*size);
                    bytes <= portion
                })
                .count();
            let (now, later) = left.split_at(fits.max(1));
            let ids: Vec<JobId> = now.iter().map(|(id, _)| *id).collect();
            self.progress();
            match self.in_time(self.store().unlocked(&ids).await) {
                Ok(read) if read.is_empty() => {}
                Ok(read) => found.extend(read),
                // What was read before is started.
                Err(error) if !found.is_empty() => {
                    tracing::debug!(error = chain(&error), "not all assigned jobs could be read in time; the others stay due");
                    break;
                }
                Err(error) => return Err(error),
            }
            left = later;
        }
        Ok(found)
    }

    /// Reads less from now on if that took too long.
    fn in_time<T>(&mut self, read: Result<T, StoreError>) -> Result<T, StoreError> {
        if matches!(read, Err(StoreError::TimedOut { .. })) {
            self.reading.halve();
        }
        read
    }

    /// Decides what may be entered. The rest of what was locked is deleted (archived before) or handed back.
    async fn sort_out(
        &mut self,
        start: &Start,
        readable: &HashMap<JobId, Startable>,
        locked: Locked,
        archived: Result<HashSet<JobId>, StoreError>,
    ) -> Vec<Claim> {
        let Locked { claims, refused, unanswered } = locked;
        // What was answered is locked by now or never. The rest may still be locked by this start.
        let claimed: HashSet<JobId> = claims.iter().map(|claim| claim.job()).collect();
        let mut not_entered: HashSet<JobId> = unanswered.into_iter().filter(|id| !claimed.contains(id)).collect();
        for Startable { job, .. } in refused.iter().filter_map(|id| readable.get(id)) {
            self.archive_malformed(job.id, &job.document, &Failure::new(failure::MALFORMED, "MongoDB cannot start it"), start.now);
        }
        let (again, mut claims): (Vec<Claim>, Vec<Claim>) = match &archived {
            Ok(archived) => claims.into_iter().partition(|claim| archived.contains(&claim.job())),
            Err(_) => (Vec::new(), claims),
        };
        if !again.is_empty() {
            tracing::info!(count = again.len(), "jobs that were enqueued again after they were archived are not run again");
            if let Err(error) = self.store().discard_if_claimed(&again).await {
                tracing::warn!(error = chain(&error), "they could not be deleted either");
                not_entered.extend(again.iter().map(|claim| claim.job()));
            }
        }
        if self.shared.lease_until().is_none() || archived.is_err() {
            // The answer took too long, or it is not known whether they ran before.
            not_entered.extend(claims.drain(..).map(|claim| claim.job()));
        }
        if !not_entered.is_empty() {
            self.unconfirmed.starts.insert(start.id, NotEntered { jobs: not_entered, until: start.lease_until });
            self.hand_back_unconfirmed(start.now).await;
        }
        claims
    }

    /// Locks jobs, halving the batch around what MongoDB refuses.
    async fn lock(&self, start: &Start, jobs: &[ToStart]) -> Locked {
        let mut locked = Locked::default();
        let mut pieces = vec![jobs];
        while let Some(piece) = pieces.pop() {
            let ids = || piece.iter().map(|job| job.job).collect::<Vec<_>>();
            self.progress();
            match self.store().start_if_unlocked(start, piece).await {
                _ if piece.is_empty() => {}
                Ok(claims) => locked.claims.extend(claims),
                Err(error) if error.is_transient() => {
                    tracing::warn!(count = piece.len(), error = chain(&error), "it is not known whether jobs were started; looking");
                    locked.unanswered.extend(ids());
                    let claims = self.store().claims_of_start(&HashMap::from([(start.id, ids())])).await.unwrap_or_default();
                    locked.claims.extend(claims);
                }
                Err(_) if piece.len() > 1 => {
                    let (first, second) = piece.split_at(piece.len() / 2);
                    pieces.extend([first, second]);
                }
                Err(error) => {
                    tracing::error!(job.id = %piece[0].job, error = chain(&error), "a job cannot be started");
                    locked.refused.extend(ids());
                }
            }
        }
        locked
    }

    /// Enters the workable of a started job, in a task of its own that ends when its outcome is recorded.
    fn enter(&mut self, Startable { mut job, policy, if_worker_dies }: Startable, claim: Claim, start: &Start) {
        let cancel = Arc::new(Cancel::under(self.shared.clone()));
        self.cancels.insert(job.id, cancel.clone());
        // Nobody else has it yet, so that it is not copied.
        let started = Arc::make_mut(&mut job);
        let previous = started.last_execution.take().map(Arc::new);
        start.mark_started(started, if_worker_dies);
        let (equipment, outcomes) = (self.equipment.clone(), self.outcomes.clone());
        self.running.spawn(async move { carry_out(&equipment, equipment.attempt(job, policy, claim, previous, cancel), outcomes).await });
    }

    /// Archives a document that is no job, alone.
    fn archive_malformed(&self, id: JobId, document: &bson::RawDocument, failure: &Failure, now: Instant) {
        tracing::warn!(job.id = %id, reason = failure.message, "a document in `scheduled` is no job; archiving it as malformed");
        let archival = Archival::unstarted(id, document, &Why::MALFORMED, failure, now);
        let (recorded, _) = oneshot::channel();
        // A full queue: the document stays and will be met again.
        let _ = self.outcomes.try_send(ToRecord { outcome: Outcome::Archive(Box::new(archival)), recorded });
    }

    /// Hands back, as they were, jobs that this worker has locked and will not enter: started after the reply had been
    /// given up, or too late. All unconfirmed starts are asked for in one query; those that can no longer happen are forgotten.
    pub(crate) async fn hand_back_unconfirmed(&mut self, now: Instant) {
        self.unconfirmed.is_behind = true;
        match self.hand_back().await {
            Ok(is_behind) => {
                self.unconfirmed.is_behind = is_behind;
                self.unconfirmed.starts.retain(|_, start| !start.jobs.is_empty() && (is_behind || now <= start.until + UNCONFIRMED_FOR));
            }
            Err(error) => {
                let count = self.unconfirmed.starts.values().map(|start| start.jobs.len()).sum::<usize>();
                tracing::warn!(count, error = chain(&error), "could not hand back jobs that were not entered; trying again");
            }
        }
    }

    /// Whether some are still to be handed back.
    async fn hand_back(&mut self) -> Result<bool, StoreError> {
        let store = self.store().clone();
        let claims = store.claims_of_start(&self.unconfirmed.as_asked()).await?;
        let mut is_behind = false;
        for claims in claims.chunks(STEP) {
            self.progress();
            let jobs: Vec<JobId> = claims.iter().map(|claim| claim.job()).collect();
            let (mut back, mut damaged) = (Vec::new(), Vec::new());
            for Held { holder, claim, job } in store.held_by(self.id, &jobs).await? {
                match job {
                    _ if !claims.contains(&claim) => {}
                    Ok(job) => back.push(Rescheduling::release(&job, claim)),
                    Err((document, error)) => damaged.push(Archival::undecodable(claim, holder, &document, &error, store.now())),
                }
            }
            let mut session = CommitSession::default();
            let mut recorded = store.finish(&mut session, &back).await?;
            recorded.extend(store.finish(&mut session, &damaged).await?);
            tracing::info!(count = recorded.len(), "handed back jobs that were not entered");
            store.announce_hint(Rescheduling::hint(back.iter(), store.now())).await;
            if recorded.contains(&Recorded::Refused) {
                is_behind = true;
            } else {
                claims.iter().for_each(|claim| self.unconfirmed.is_settled(*claim));
            }
        }
        Ok(is_behind)
    }
}
