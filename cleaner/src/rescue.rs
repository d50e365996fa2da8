//! Ends the jobs of dead workers as crashed executions, each by the verdict that was stored when it was started.

use std::collections::HashSet;

use bson::{Document, RawDocument};
use recruiter_common::{
    failure::{self, Failure},
    ids::{JobId, WorkerId},
    job::{FinishReason, Held, IfWorkerDies, Job},
    roster::RegisteredWorker,
    service::Watchdog,
    shutdown::Shutdown,
    store::{Archival, CommitSession, Hint, LockedJobs, Recorded, Rescheduling, Store, StoreError},
    telemetry::chain,
};

/// Jobs read and ended in one step. All jobs of one step are in memory.
const STEP: usize = 50;

/// Ends jobs on behalf of dead workers.
pub(crate) struct Rescuer {
    store: Store,
    session: CommitSession,
    /// Ids of documents that cannot be repaired and were already warned about. Each sweep finds them again.
    left_alone: HashSet<String>,
    /// Receives a sign of progress in each step, because rescuing a large fleet takes minutes.
    watchdog: Watchdog,
    /// The MongoDB user of this cleaner. Unset until it is first compared with a worker's.
    user: Option<String>,
    /// MongoDB users of workers that were already compared with this cleaner's.
    compared: HashSet<String>,
    /// Dead workers whose jobs could not be rescued at the first try.
    held_up: HashSet<WorkerId>,
}

/// Maximum number of ids in `left_alone`. When it is reached, the set is cleared, and the warnings repeat.
const REMEMBERED: usize = 10_000;

impl Rescuer {
    pub(crate) fn new(store: Store, watchdog: Watchdog) -> Self {
        Self {
            store,
            session: CommitSession::default(),
            left_alone: HashSet::new(),
            watchdog,
            user: None,
            compared: HashSet::new(),
            held_up: HashSet::new(),
        }
    }

    /// The session that this cleaner archives jobs in, as stored in the roster.
    pub(crate) async fn session(&mut self) -> Result<Document, StoreError> {
        self.store.open_session(&mut self.session).await
    }

    /// Warns once per MongoDB user about workers whose user is not this cleaner's: it cannot end their transactions.
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
                    "workers use another MongoDB user than this cleaner. MongoDB lets a user end its own transactions only: a job in the open transaction of a dead worker stays locked until MongoDB ends that, up to a minute later. Name one user in the MONGODB_URI of workers and cleaners"
                );
            }
            self.user = Some(own);
            self.compared.insert(theirs.clone());
        }
        Ok(())
    }

    /// Records that the jobs of a dead worker could not be rescued yet. Only the first call for a worker logs a
    /// warning.
    pub(crate) fn is_held_up(&mut self, worker: &RegisteredWorker, error: &StoreError) {
        let anothers = worker.mongodb_user.as_ref().is_some_and(|user| self.user.as_ref().is_some_and(|own| own != user));
        let first = self.held_up.insert(worker.id);
        let error = chain(error);
        match (first, anothers) {
            (true, true) => tracing::warn!(
                worker.id = %worker.id,
                error,
                "the jobs of a dead worker could not be rescued yet, probably because of an open transaction of its MongoDB user, which is not this cleaner's; trying again"
            ),
            (true, false) => {
                tracing::warn!(worker.id = %worker.id, error, "the jobs of a dead worker could not be rescued yet; trying again")
            }
            (false, _) => tracing::debug!(worker.id = %worker.id, error, "the jobs of a dead worker can still not be rescued"),
        }
    }

    /// Removes a dead worker from `held_up`, after its jobs were rescued.
    pub(crate) fn is_done_with(&mut self, worker: WorkerId) {
        self.held_up.remove(&worker);
    }

    /// Ends every job that a retired worker holds. Its roster document lists every job that it can have locked.
    pub(crate) async fn rescue_jobs_of(&mut self, worker: &RegisteredWorker) -> Result<(), StoreError> {
        for step in worker.jobs.chunks(STEP) {
            let held = self.store.held_by(worker.id, step).await?;
            self.end_all(held).await?;
        }
        Ok(())
    }

    /// Ends these jobs of dead workers.
    async fn end_all(&mut self, held: Vec<Held>) -> Result<(), StoreError> {
        self.watchdog.progress();
        let (mut archivals, mut reschedulings, mut groups) = (Vec::new(), Vec::new(), HashSet::new());
        let now = self.store.now();
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
                    // The stored delay can be any number. A negative delay becomes zero; a date out of range becomes
                    // `now`.
                    let delay = chrono::TimeDelta::try_milliseconds(delay.max(0));
                    let at = delay.and_then(|delay| now.checked_add_signed(delay)).unwrap_or(now);
                    reschedulings.push(Rescheduling::retry(&job, claim, &crashed(&job, now), at, true));
                    groups.insert(job.group);
                }
                IfWorkerDies::Archive(why) => archivals.push(Archival::ended(&job, claim, crashed(&job, now), &why, None)),
            }
        }
        let rescheduled = self.store.finish(&mut self.session, &reschedulings).await?;
        let archived = self.store.finish(&mut self.session, &archivals).await?;
        let count = |recorded: &[Recorded]| recorded.iter().filter(|recorded| **recorded == Recorded::Yes).count();
        let (again, ended) = (count(&rescheduled), count(&archived));
        if again + ended > 0 {
            tracing::info!(again, ended, "rescued the jobs of a dead worker");
        }
        if again > 0 {
            self.store.announce_hint(Hint::jobs_in(groups)).await;
        }
        Ok(())
    }
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
        if self.left_alone.len() >= REMEMBERED {
            self.left_alone.clear();
        }
        if self.left_alone.insert(id.clone()) {
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
        // The program that started the job stored no verdict. Archive it, so that it does not run twice by mistake.
        None => IfWorkerDies::Archive(FinishReason::WORKER_DIED),
    }
}

fn crashed(job: &Job, now: recruiter_common::instant::Instant) -> recruiter_common::job::Execution {
    let execution = job.last_execution.clone().unwrap_or_default();
    let place = format!("{} (pid {})", execution.hostname.as_deref().unwrap_or("an unknown host"), execution.pid.unwrap_or_default());
    let mut ended =
        execution.ended(now, Some(&Failure::new(failure::WORKER_DIED, format!("the worker on {place} died while it ran the job"))));
    ended.crashed = Some(true);
    ended
}

/// The slow sweep over all locked jobs. It ends jobs whose holder is not in the roster (roster documents deleted by
/// hand or rolled back), and unlocks jobs that have no holder. An error in one step does not stop the steps after it.
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
            failed = failed.and(rescuer.end_all(orphans).await);
        }
        match next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    failed
}
