//! Ends the jobs of dead workers as crashed executions. The verdict for each job was stored when the job was started.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use bson::RawDocument;
use recruiter_common::{
    failure::{self, Failure},
    ids::{JobId, WorkerId},
    instant::later,
    job::{FinishReason, Held, IfWorkerDies, Job},
    roster::RegisteredWorker,
    service::Watchdog,
    shutdown::Shutdown,
    store::{Archival, CommitSession, Hint, LockedJobs, Recorded, Rescheduling, Store, StoreError},
    telemetry::chain,
};
use tokio::task::JoinSet;

/// Number of jobs that are read and ended in one step. All of them are in memory.
const STEP: usize = 50;
/// Maximum number of retirements that are finished at the same time.
const AT_A_TIME: usize = 4;

/// Ends jobs on behalf of dead workers.
pub(crate) struct Rescuer {
    store: Store,
    /// The session of the sweep.
    session: CommitSession,
    /// The retirements that are being finished.
    begun: JoinSet<Finished>,
    /// Ids of documents that cannot be unlocked and for which a warning was logged. Each sweep finds them again.
    skipped: HashSet<String>,
    /// Notified of progress in each step, because the rescue of a large fleet takes minutes.
    watchdog: Watchdog,
    /// The MongoDB user of this cleaner. Unset until it is first compared with a worker's.
    user: Option<String>,
    /// MongoDB users of workers that were already compared with this cleaner's.
    compared: HashSet<String>,
    /// Dead workers whose jobs could not be rescued yet, and the sessions of these attempts.
    failed: HashMap<WorkerId, CommitSession>,
}

/// The attempt to finish a retirement.
struct Finished {
    worker: RegisteredWorker,
    session: CommitSession,
    /// Whether it was the first attempt.
    is_first: bool,
    result: Result<(), StoreError>,
}

/// Maximum number of ids in `skipped`. When it is reached, the set is cleared, and the warnings repeat.
const REMEMBERED: usize = 10_000;

impl Rescuer {
    pub(crate) fn new(store: Store, watchdog: Watchdog) -> Self {
        Self {
            store,
            session: CommitSession::default(),
            begun: JoinSet::new(),
            skipped: HashSet::new(),
            watchdog,
            user: None,
            compared: HashSet::new(),
            failed: HashMap::new(),
        }
    }

    /// Begins to finish the retirement of a worker, beside others. Each has a session of its own, which another cleaner ends if this one dies.
    pub(crate) async fn begin(&mut self, worker: RegisteredWorker) {
        while self.begun.len() >= AT_A_TIME {
            self.end_one().await;
        }
        let (store, watchdog, before) = (self.store.clone(), self.watchdog.clone(), self.failed.remove(&worker.id));
        self.begun.spawn(async move {
            let (is_first, mut session) = (before.is_none(), before.unwrap_or_default());
            let result = finish_retirement(&store, &watchdog, &mut session, &worker).await;
            Finished { worker, session, is_first, result }
        });
    }

    /// Waits until no retirement is being finished. After an error the next poll tries again; other workers are not affected.
    pub(crate) async fn wait(&mut self) {
        while self.end_one().await {}
    }

    /// Forgets the attempts for workers that are not in the roster any more: another cleaner has ended them.
    pub(crate) fn forget_all_but(&mut self, registered: &[RegisteredWorker]) {
        self.failed.retain(|failed, _| registered.iter().any(|worker| worker.id == *failed));
    }

    /// Waits for one of the retirements. Returns whether there was one.
    async fn end_one(&mut self) -> bool {
        self.watchdog.progress();
        match self.begun.join_next().await {
            None => return false,
            Some(Ok(finished)) => self.note(finished),
            Some(Err(died)) => std::panic::resume_unwind(died.into_panic()),
        }
        true
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
        Ok(())
    }

    /// Keeps the session of an attempt that failed. Only the first failure of a worker logs a warning.
    fn note(&mut self, Finished { worker, session, is_first, result }: Finished) {
        let Err(error) = result else { return };
        let is_other_user = worker.mongodb_user.as_ref().is_some_and(|user| self.user.as_ref().is_some_and(|own| own != user));
        self.failed.insert(worker.id, session);
        let error = chain(&error);
        match (is_first, is_other_user) {
            (true, true) => tracing::warn!(
                worker.id = %worker.id,
                error,
                "the jobs of a dead worker could not be rescued yet, probably because its MongoDB user, which is not this cleaner's, has an open transaction; trying again"
            ),
            (true, false) => {
                tracing::warn!(worker.id = %worker.id, error, "the jobs of a dead worker could not be rescued yet; trying again")
            }
            (false, _) => tracing::debug!(worker.id = %worker.id, error, "the jobs of a dead worker still cannot be rescued; trying again"),
        }
    }
}

/// Rescues the jobs of a retired worker, then deletes its document. The deletion is last, so that another cleaner can
/// continue.
async fn finish_retirement(
    store: &Store,
    watchdog: &Watchdog,
    session: &mut CommitSession,
    worker: &RegisteredWorker,
) -> Result<(), StoreError> {
    if let Err(error) = store.kill_sessions(&worker.sessions).await {
        tracing::warn!(worker.id = %worker.id, error = chain(&error), "the sessions of a dead worker could not be ended; MongoDB ends their transactions within a minute");
    }
    // This cleaner can also die during a transaction. The cleaner that continues finds its session in this document.
    store.record_rescue_session(worker.id, store.open_session(session).await?).await?;
    // Its roster document lists every job that it can have locked.
    for step in worker.jobs.chunks(STEP) {
        let held = store.held_by(worker.id, step).await?;
        end_all(store, watchdog, session, held).await?;
    }
    store.delete_if_retired(worker.id).await?;
    store.announce_hint(Hint::Left { worker: worker.id }).await;
    Ok(())
}

/// Ends these jobs of dead workers, each by its stored verdict.
async fn end_all(store: &Store, watchdog: &Watchdog, session: &mut CommitSession, held: Vec<Held>) -> Result<(), StoreError> {
    watchdog.progress();
    let (mut archivals, mut reschedulings, mut groups) = (Vec::new(), Vec::new(), HashSet::new());
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
                groups.insert(job.settings.group().to_owned());
            }
            IfWorkerDies::Archive(why) => archivals.push(Archival::ended(&job, claim, crashed(&job, now), &why, None)),
        }
    }
    let rescheduled = store.finish(session, &reschedulings).await?;
    let archived = store.finish(session, &archivals).await?;
    let count = |recorded: &[Recorded]| recorded.iter().filter(|recorded| **recorded == Recorded::Yes).count();
    let (again, ended) = (count(&rescheduled), count(&archived));
    if again + ended > 0 {
        tracing::info!(again, ended, "rescued the jobs of a dead worker");
    }
    if again > 0 {
        store.announce_hint(Hint::jobs_in(groups)).await;
    }
    Ok(())
}

impl Rescuer {
    /// Unlocks a job that is locked without a holder, so no worker can have started it. Skips a document that cannot be
    /// unlocked.
    async fn unlock(&mut self, document: &RawDocument) -> Result<(), StoreError> {
        let reason = match document.get_object_id("_id") {
            Ok(id) => match self.store.unlock_if_held_by_nobody(id.into()).await {
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

/// The slow sweep over all locked jobs. It ends jobs whose holder is not in the roster: the roster document was deleted by hand or rolled
/// back. It unlocks jobs that have no holder. If the jobs of one step cannot be ended, the sweep continues with the next step.
pub(crate) async fn sweep(store: &Store, rescuer: &mut Rescuer, shutdown: &Shutdown) -> Result<(), StoreError> {
    let mut after: Option<JobId> = None;
    let mut failed = Ok(());
    while !shutdown.is_requested() {
        rescuer.watchdog.progress();
        let LockedJobs { documents, registered, next } = store.locked_jobs(after).await?;
        let mut orphans = Vec::new();
        for document in documents {
            match Held::try_from(document) {
                Ok(held) if registered.contains(&held.holder) => {}
                Ok(held) => orphans.push(held),
                Err(document) => rescuer.unlock(&document).await?,
            }
        }
        if !orphans.is_empty() {
            tracing::warn!(count = orphans.len(), "jobs are locked by workers that are not in the roster");
            failed = failed.and(end_all(store, &rescuer.watchdog, &mut rescuer.session, orphans).await);
        }
        match next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    failed
}
