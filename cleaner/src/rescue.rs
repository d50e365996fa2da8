//! Ends the jobs of dead workers as crashed executions, by the verdicts that were stored when the jobs were started.
//!
//! A rescue, after the worker was retired (`retire`):
//!
//! 1. Read which jobs the retired document names.
//! 2. End the worker's MongoDB sessions with `killSessions`, which MongoDB allows only if worker and cleaner have the same MongoDB user.
//! 3. Add the session in which this cleaner ends the jobs to the document. Another cleaner that takes the rescue over ends it, because an open
//!    transaction would keep the jobs locked for a minute.
//! 4. End the jobs. A job whose cancellation was requested is archived as `cancelled`.
//! 5. Delete the document last.
//!
//! The sweep finds what no document names any more. Its orphans are rescued in the same way. It reads the locked jobs first and then the roster, in one causally consistent session.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use bson::RawDocument;
use futures_util::FutureExt as _;
use recruiter_common::{
    failure::{self, Failure},
    ids::{JobId, WorkerId},
    instant::later,
    job::{FinishReason, IfWorkerDies, Job},
    service::Watchdog,
    shutdown::Shutdown,
    store::{
        Archival, BATCH_BYTES, CommitSession, Ending, Held, Hint, LockedJobs, Recorded, RegisteredWorker, Rescheduling, Store, StoreError,
        cut, holder_of,
    },
    telemetry::chain,
};

use crate::{
    Pass,
    meters::Meters,
    rescues::{Cause, Failed, Rescue, Rescues},
};

/// Maximum number of jobs that are read and ended in one step.
const STEP: usize = 50;
/// Maximum number of ids in `skipped`. When it is reached, the set is cleared, and the warnings repeat.
const REMEMBERED: usize = 10_000;

/// Ends jobs on behalf of dead workers.
pub(crate) struct Rescuer {
    store: Store,
    rescues: Rescues,
    /// Ids of documents that cannot be unlocked and for which a warning was logged. Each sweep finds them again.
    skipped: HashSet<String>,
    watchdog: Watchdog,
    pub(crate) meters: Arc<Meters>,
    /// The MongoDB user of this cleaner. Unset until it is first compared with a worker's.
    user: Option<String>,
    /// MongoDB users of workers that were already compared with this cleaner's.
    compared: HashSet<String>,
    /// Workers of another MongoDB user.
    of_others: HashSet<WorkerId>,
}

impl Rescuer {
    pub(crate) fn new(store: Store, watchdog: Watchdog, meters: Arc<Meters>, shutdown: Shutdown) -> Self {
        Self {
            store,
            rescues: Rescues::new(shutdown),
            skipped: HashSet::new(),
            watchdog,
            meters,
            user: None,
            compared: HashSet::new(),
            of_others: HashSet::new(),
        }
    }

    /// Begins to finish the retirement of a worker, if that is not going on.
    pub(crate) fn begin(&mut self, worker: RegisteredWorker) {
        let (store, meters) = (self.store.clone(), self.meters.clone());
        self.rescues.begin(worker.id, move |rescue| async move { finish_retirement(&store, rescue, &worker, &meters).await }.boxed());
    }

    /// Collects the rescues that have ended: after an error or a panic the next poll tries again. Then notifies the watchdog of the
    /// progress of the main loop, unless a rescue hangs: the service manager must end this process then.
    pub(crate) fn progress(&mut self) {
        for failed in self.rescues.collect() {
            self.meters.rescues_failed.increment(1);
            self.note(&failed);
        }
        if !self.rescues.one_hangs() {
            self.watchdog.progress();
        }
    }

    /// Waits until the rescues have ended, each after its present step, because a stop is requested.
    pub(crate) async fn end(&mut self) {
        self.rescues.end().await;
    }

    /// Forgets the failures of workers that are not in the roster any more: another cleaner has ended them.
    pub(crate) fn forget_all_but(&mut self, registered: &[RegisteredWorker]) {
        self.rescues.forget_all_but(|failed| registered.iter().any(|worker| worker.id == failed));
    }

    /// Warns about workers whose MongoDB user is not this cleaner's, once for each user: the cleaner cannot end their transactions.
    pub(crate) async fn compare_users(&mut self, workers: &[RegisteredWorker]) -> Result<(), StoreError> {
        for theirs in workers.iter().filter_map(|worker| worker.mongodb_user.as_ref()) {
            if self.compared.contains(theirs) {
                continue;
            }
            let own = match &self.user {
                Some(own) => own.clone(),
                None => self.store.user().await?,
            };
            if own != *theirs {
                tracing::warn!(
                    mongodb.user = own,
                    worker.mongodb_user = theirs,
                    "workers use another MongoDB user than this cleaner. MongoDB lets a user end its own transactions only: a job in the open transaction of a dead worker stays locked for up to a minute, until MongoDB ends the transaction. Use one user in the MONGODB_URI of workers and cleaners"
                );
            }
            self.user = Some(own);
            self.compared.insert(theirs.clone());
        }
        let is_other = |worker: &&RegisteredWorker| worker.mongodb_user.is_some() && worker.mongodb_user != self.user;
        self.of_others = workers.iter().filter(is_other).map(|worker| worker.id).collect();
        Ok(())
    }

    /// Only the first failure of a worker logs a warning.
    fn note(&self, Failed { worker, is_first, cause }: &Failed) {
        let error = match cause {
            Cause::Store(error) => chain(error),
            Cause::Panic => return tracing::error!(worker.id = %worker, "the rescue of the jobs of a dead worker panicked; trying again"),
        };
        match (is_first, self.of_others.contains(worker)) {
            (true, true) => tracing::warn!(
                worker.id = %worker,
                error,
                "the jobs of a dead worker could not be rescued yet, probably because its MongoDB user, which is not this cleaner's, has an open transaction; trying again"
            ),
            (true, false) => tracing::warn!(worker.id = %worker, error, "the jobs of a dead worker could not be rescued yet; trying again"),
            (false, _) => tracing::debug!(worker.id = %worker, error, "the jobs of a dead worker still cannot be rescued; trying again"),
        }
    }
}

/// Rescues the jobs of a retired worker, then deletes its document. The deletion is last, so that another cleaner can
/// continue.
async fn finish_retirement(store: &Store, rescue: &mut Rescue, worker: &RegisteredWorker, meters: &Meters) -> Result<(), StoreError> {
    if let Err(error) = store.kill_sessions(&worker.sessions).await {
        tracing::warn!(worker.id = %worker.id, error = chain(&error), "the sessions of a dead worker could not be ended; MongoDB ends their transactions within a minute");
    }
    // This cleaner can also die during a transaction. The cleaner that continues finds its session in this document.
    let ended = rescue.session.given_up();
    let session = store.open_session(&mut rescue.session).await?;
    store.record_rescue_session(worker.id, session, ended).await?;
    // Its roster document lists every job that it can have locked.
    if end_held(store, rescue, worker.id, &worker.jobs, meters).await? {
        store.delete_if_retired(worker.id).await?;
        store.announce_hint(Hint::Left { worker: worker.id }).await;
    }
    Ok(())
}

/// Ends those of these jobs that a dead worker has locked, in steps: the jobs of a step are in memory. Returns whether that was all; not if a
/// stop is requested.
async fn end_held(store: &Store, rescue: &mut Rescue, worker: WorkerId, jobs: &[JobId], meters: &Meters) -> Result<bool, StoreError> {
    for some in jobs.chunks(STEP) {
        if !rescue.goes_on() {
            return Ok(false);
        }
        let sizes = store.sizes_by_id(some).await?;
        for step in cut(some.to_vec(), STEP, BATCH_BYTES, |job| sizes.get(job).copied().unwrap_or_default()) {
            if !rescue.goes_on() {
                return Ok(false);
            }
            let held = store.held_by(worker, &step).await?;
            end_all(store, &mut rescue.session, held, meters).await?;
        }
    }
    Ok(true)
}

/// Ends these jobs of dead workers, each by its stored verdict.
async fn end_all(store: &Store, session: &mut CommitSession, held: Vec<Held>, meters: &Meters) -> Result<(), StoreError> {
    let (mut archivals, mut reschedulings) = (Vec::new(), Vec::new());
    let now = store.now();
    for Held { holder, claim, job } in held {
        let job = match job {
            Ok(job) => job,
            Err((document, error)) => {
                tracing::warn!(job.id = %claim.job(), %error, "a locked document is not a valid job; archiving it");
                archivals.push(Archival::undecodable(claim, holder, &document, &error, now));
                continue;
            }
        };
        match verdict(&job) {
            IfWorkerDies::RetryAfterMs(delay) => {
                // The stored delay can be any number.
                let at = later(now, Duration::from_millis(u64::try_from(delay).unwrap_or(0)));
                reschedulings.push(Rescheduling::retry(&job, claim, &crashed(&job, now), at, true));
            }
            IfWorkerDies::Archive(why) => archivals.push(Archival::ended(&job, claim, Ending::new(crashed(&job, now), why))),
        }
    }
    let rescheduled = store.finish(session, &reschedulings).await?;
    let archived = store.finish(session, &archivals).await?;
    let count = |recorded: &[Recorded]| recorded.iter().filter(|recorded| **recorded == Recorded::Yes).count();
    let (again, ended) = (count(&rescheduled), count(&archived));
    meters.rescued(again, ended);
    if again + ended > 0 {
        tracing::info!(again, ended, "rescued the jobs of a dead worker");
    }
    Ok(())
}

impl Rescuer {
    /// Goes on with the sweep after this job, and adds the locked jobs whose holder is not in the roster. Returns how far it got; `None` at the
    /// end.
    async fn find_orphans(
        &mut self,
        mut after: Option<JobId>,
        pass: &Pass<'_>,
        orphans: &mut HashMap<WorkerId, Vec<JobId>>,
    ) -> Result<Option<JobId>, StoreError> {
        for _ in pass.steps() {
            self.progress();
            let LockedJobs { documents, registered, next } = self.store.locked_jobs(after).await?;
            for document in documents {
                match holder_of(&document) {
                    Some((holder, _)) if registered.contains(&holder) => {}
                    Some((holder, claim)) => orphans.entry(holder).or_default().push(claim.job()),
                    None => self.unlock(&document).await?,
                }
            }
            after = next;
            if after.is_none() {
                break;
            }
        }
        Ok(after)
    }

    /// Unlocks a job that is locked without a holder, so no worker can have started it. Skips a document that cannot be
    /// unlocked.
    async fn unlock(&mut self, document: &RawDocument) -> Result<(), StoreError> {
        let reason = match document.get_object_id("_id") {
            Ok(id) => match self.store.unlock_if_unheld(id.into()).await {
                Ok(true) => {
                    tracing::warn!(job.id = %id, "a job was locked without a holder: unlocked it");
                    return Ok(());
                }
                // Another cleaner unlocked it first.
                Ok(false) => return Ok(()),
                Err(error) if error.is_transient() => return Err(error),
                Err(error) => chain(&error),
            },
            Err(error) => error.to_string(),
        };
        let id = document.get("_id").ok().flatten().map_or_else(|| "none".into(), |id| format!("{id:?}"));
        if self.skipped.len() >= REMEMBERED {
            self.skipped.clear();
        }
        if self.skipped.insert(id.clone()) {
            tracing::warn!(
                job.id = id,
                reason,
                "a locked document in `scheduled` is not a valid job and cannot be unlocked: skipping it; delete it or repair it"
            );
        }
        Ok(())
    }
}

/// The verdict that was stored when the job was started. A job with a cancel request is archived and not retried.
fn verdict(job: &Job) -> IfWorkerDies {
    let stored = job.last_execution.as_ref().and_then(|execution| execution.if_worker_dies.clone());
    match stored {
        _ if job.cancel_requested => IfWorkerDies::Archive(FinishReason::CANCELLED),
        Some(verdict) => verdict,
        // The worker that started the job stored no verdict. The job is archived, so that it does not run twice by mistake.
        None => IfWorkerDies::Archive(FinishReason::WORKER_DIED),
    }
}

/// The execution of this job as ended by the death of its worker.
fn crashed(job: &Job, now: recruiter_common::instant::Instant) -> recruiter_common::job::Execution {
    let execution = job.last_execution.clone().unwrap_or_default();
    let place = format!("{} (pid {})", execution.hostname.as_deref().unwrap_or("an unknown host"), execution.pid.unwrap_or_default());
    let mut ended =
        execution.ended(now, Some(&Failure::new(failure::WORKER_DIED, format!("the worker on {place} died while it ran the job"))));
    ended.crashed = Some(true);
    ended
}

/// The slow sweep over all locked jobs, some in each pass: the last job that was examined.
#[derive(Debug, Default)]
pub(crate) struct Sweep(Option<JobId>);

impl Sweep {
    /// Goes on. Has the jobs rescued whose holder is not in the roster: the roster document was deleted by hand or rolled back. Unlocks jobs
    /// that have no holder. Returns whether the sweep is at its end: then it begins again with the next pass, as it does after an error.
    pub(crate) async fn tick(&mut self, store: &Store, rescuer: &mut Rescuer, pass: &Pass<'_>) -> Result<bool, StoreError> {
        let mut orphans = HashMap::new();
        let position = rescuer.find_orphans(self.0.take(), pass, &mut orphans).await;
        if !orphans.is_empty() {
            let count: usize = orphans.values().map(Vec::len).sum();
            tracing::warn!(count, "jobs are locked by workers that are not in the roster");
        }
        for (worker, jobs) in orphans {
            let (store, meters) = (store.clone(), rescuer.meters.clone());
            rescuer
                .rescues
                .begin(worker, move |rescue| async move { end_held(&store, rescue, worker, &jobs, &meters).await.map(drop) }.boxed());
        }
        self.0 = position?;
        Ok(self.0.is_none())
    }
}
