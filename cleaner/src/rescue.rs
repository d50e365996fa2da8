//! Ending the jobs of the dead as crashed executions, each by the verdict that was stored at its start.

use std::collections::{HashMap, HashSet};

use bson::Document;
use recruiter_common::{
    failure::{self, Failure},
    ids::{JobId, WorkerId},
    job::{Claim, CorruptJob, IfWorkerDies, Job, JobState, Why},
    roster::RegisteredWorker,
    shutdown::Shutdown,
    store::{Archival, CommitSession, Hint, Recorded, Rescheduling, Store, StoreError},
};

/// Jobs read and ended in one step: they are in memory whole.
const STEP: usize = 50;

/// Ends jobs in the name of dead workers.
pub(crate) struct Rescuer {
    store: Store,
    session: CommitSession,
}

impl Rescuer {
    pub(crate) fn new(store: Store) -> Self {
        Self { store, session: CommitSession::default() }
    }

    /// The session that jobs are archived in, for the roster.
    pub(crate) async fn session(&mut self) -> Result<Document, StoreError> {
        self.store.open_session(&mut self.session).await
    }

    /// Ends every job that a retired worker holds. Its roster document names all it can have locked.
    pub(crate) async fn rescue_jobs_of(&mut self, worker: &RegisteredWorker) -> Result<(), StoreError> {
        for step in worker.jobs.chunks(STEP) {
            let held = self.store.held_by(worker.id, step).await?;
            self.end_all(held).await?;
        }
        Ok(())
    }

    /// Ends started jobs whose worker is dead.
    async fn end_all(&mut self, held: Vec<(Job, Claim)>) -> Result<(), StoreError> {
        let (mut archivals, mut reschedulings, mut groups) = (Vec::new(), Vec::new(), HashSet::new());
        let now = self.store.now();
        for (job, claim) in held {
            match verdict(&job) {
                IfWorkerDies::RetryAfterMs(delay) => {
                    let at = now.checked_add_signed(chrono::TimeDelta::milliseconds(delay)).unwrap_or(now);
                    reschedulings.push(Rescheduling::retry(&job, claim, &crashed(&job, now), at, true));
                    groups.insert(job.group);
                }
                IfWorkerDies::Archive(why) => archivals.push(Archival::ended(&job, claim, crashed(&job, now), &why, None)),
            }
        }
        let rescheduled = self.store.record(&mut self.session, &reschedulings).await?;
        let archived = self.store.record(&mut self.session, &archivals).await?;
        let count = |recorded: &[Recorded]| recorded.iter().filter(|recorded| **recorded == Recorded::Yes).count();
        let (again, ended) = (count(&rescheduled), count(&archived));
        if again + ended > 0 {
            tracing::info!(again, ended, "rescued the jobs of a dead worker");
        }
        if again > 0 {
            self.store.announce_hint(Hint::Jobs { groups: groups.into_iter().collect(), at: None }).await;
        }
        Ok(())
    }
}

/// What was decided when the job was started. One that somebody wanted cancelled is not tried again.
fn verdict(job: &Job) -> IfWorkerDies {
    let stored = job.last_execution.as_ref().and_then(|execution| execution.if_worker_dies.clone());
    match stored {
        _ if job.cancel_requested => IfWorkerDies::Archive(Why::CANCELLED),
        Some(verdict) => verdict,
        // Started by something that stored none: whatever does not run twice by mistake.
        None => IfWorkerDies::Archive(Why::WORKER_DIED),
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

/// The slow sweep: jobs that are locked in the name of nobody in the roster (hand-deleted or rolled-back documents), and
/// jobs that are locked by nobody at all.
///
/// The locked jobs are read first and the roster second: a worker is in the roster before it locks anything and until
/// it holds nothing.
pub(crate) async fn sweep(store: &Store, rescuer: &mut Rescuer, shutdown: &Shutdown) -> Result<(), StoreError> {
    let mut after: Option<JobId> = None;
    while !shutdown.is_requested() {
        let (locked, next) = store.locked_jobs(after).await?;
        let mut by_holder: HashMap<WorkerId, Vec<(Job, Claim)>> = HashMap::new();
        for document in locked {
            sort_in(store, document, &mut by_holder).await?;
        }
        if !by_holder.is_empty() {
            let registered = store.registered_ids().await?;
            let orphans: Vec<(Job, Claim)> =
                by_holder.into_iter().filter(|(holder, _)| !registered.contains(holder)).flat_map(|(_, jobs)| jobs).collect();
            if !orphans.is_empty() {
                tracing::warn!(count = orphans.len(), "jobs are locked by workers that are not in the roster");
                rescuer.end_all(orphans).await?;
            }
        }
        match next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    Ok(())
}

/// Puts a locked job with its holder, or unlocks it when it has none.
async fn sort_in(store: &Store, document: Document, by_holder: &mut HashMap<WorkerId, Vec<(Job, Claim)>>) -> Result<(), StoreError> {
    let id = document.get_object_id("_id").ok().map(JobId::from);
    match (Job::try_from(document), id) {
        (Ok(job), _) => {
            if let JobState::Started { worker, claim } = job.state {
                by_holder.entry(worker).or_default().push((job, claim));
            }
        }
        (Err(CorruptJob::LockedByNobody), Some(id)) => {
            if store.unlock_if_held_by_nobody(id).await? {
                tracing::warn!(job.id = %id, "a job was locked by nobody: unlocked it");
            }
        }
        (Err(error), id) => tracing::warn!(job.id = ?id, %error, "a locked document is no job; leaving it alone"),
    }
    Ok(())
}
