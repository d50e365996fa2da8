//! Starts on their way to MongoDB.
//!
//! A start locks a batch of jobs with one guarded command, and then looks those of them up in the archive that may be copies of archived jobs.
//! Several starts are on their way at once, so that a slot that falls free waits for its own start and not for an earlier one as well. Each
//! has an id of its own and jobs of its own. Only the session runs what they have locked.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use recruiter_common::{
    ids::{JobId, StartId, WorkerId},
    job::Claim,
    store::{Start, Store, StoreError, ToStart},
    telemetry::chain,
};
use tokio::task::JoinSet;

use super::{
    environment::Environment,
    intake::Startable,
    slots::{Slots, TaskPanicked},
};

/// The most starts on their way at once. With more, each would lock fewer jobs at a higher cost for each job.
const MOST: usize = 2;

/// The starts of a session that MongoDB has not answered yet.
pub(crate) struct Starts {
    environment: Arc<Environment>,
    worker: WorkerId,
    tasks: JoinSet<Answered>,
}

/// A start that was answered, or whose answer was lost.
pub(crate) struct Answered {
    pub(crate) start: Start,
    pub(crate) startable: HashMap<JobId, Startable>,
    /// The jobs that it has locked.
    pub(crate) claims: Vec<Claim>,
    /// Jobs that MongoDB cannot start.
    pub(crate) refused: Vec<JobId>,
    /// Jobs whose start has an unknown outcome.
    pub(crate) unanswered: Vec<JobId>,
    /// Those of the locked jobs that are in the archive already.
    pub(crate) archived: Result<HashSet<JobId>, StoreError>,
}

impl Starts {
    pub(crate) fn new(environment: Arc<Environment>, worker: WorkerId) -> Self {
        Self { environment, worker, tasks: JoinSet::new() }
    }

    /// Whether another start may be sent now.
    pub(crate) fn has_room(&self) -> bool {
        self.tasks.len() < MOST
    }

    /// Whether no start is on its way.
    pub(crate) fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Reserves slots for these jobs and sends a start that locks them. Returns the ids of jobs that cannot be started now, because the
    /// lease is over: they stay due.
    pub(crate) fn send(&mut self, jobs: Vec<Startable>, slots: &Slots) -> Vec<JobId> {
        let Some(lease_until) = self.environment.lease.until() else {
            tracing::warn!(count = jobs.len(), "not starting jobs: no heartbeat was acknowledged for too long");
            return jobs.iter().map(Startable::id).collect();
        };
        let (process, now) = (&self.environment.dependencies.process, self.environment.dependencies.store.now());
        let start =
            Start { id: StartId::new(), worker: self.worker, hostname: process.hostname.clone(), pid: process.pid, lease_until, now };
        let startable: HashMap<JobId, Startable> = jobs.into_iter().map(|job| (job.id(), job)).collect();
        slots.reserve(startable.keys().copied());
        let store = Store::clone(&self.environment.dependencies.store);
        self.tasks.spawn(async move { lock(&store, start, startable).await });
        Vec::new()
    }

    /// Waits for the next answer. `None` when no start is on its way.
    pub(crate) async fn next(&mut self) -> Option<Result<Answered, TaskPanicked>> {
        Some(self.tasks.join_next().await?.map_err(TaskPanicked::from))
    }
}

/// Locks jobs, and looks up in the archive what may have been archived before.
///
/// The archive is read after the start, not beside it: a job may have been archived and enqueued again after it was read and before it was
/// locked.
async fn lock(store: &Store, start: Start, startable: HashMap<JobId, Startable>) -> Answered {
    let mut answered =
        Answered { start, startable, claims: Vec::new(), refused: Vec::new(), unanswered: Vec::new(), archived: Ok(HashSet::new()) };
    answered.lock(store).await;
    let can_be_resent = |id: &JobId| answered.startable.get(id).is_none_or(|startable| startable.can_be_resent(answered.start.now));
    let resendable: Vec<JobId> = answered.claims.iter().map(|claim| claim.job()).filter(can_be_resent).collect();
    if !resendable.is_empty() {
        answered.archived = store.already_archived(&resendable).await;
    }
    answered
}

impl Answered {
    /// Locks the jobs. Halves the batch around jobs that MongoDB refuses.
    async fn lock(&mut self, store: &Store) {
        let Self { start, startable, claims, refused, unanswered, .. } = self;
        let to_start: Vec<ToStart> = startable.values().map(|startable| startable.to_start(start.now)).collect();
        let mut pieces = vec![to_start.as_slice()];
        while let Some(piece) = pieces.pop() {
            let ids = || piece.iter().map(|job| job.job).collect::<Vec<_>>();
            match store.start_if_unlocked(start, piece).await {
                Ok(locked) => claims.extend(locked),
                Err(error) if error.is_transient() => {
                    tracing::warn!(count = piece.len(), error = chain(&error), "the outcome of a start is unknown; searching for its jobs");
                    unanswered.extend(ids());
                    let locked = store.claims_of_starts_at_majority(&HashMap::from([(start.id, ids())])).await.unwrap_or_default();
                    claims.extend(locked);
                }
                Err(_) if piece.len() > 1 => {
                    let (first, second) = piece.split_at(piece.len() / 2);
                    pieces.extend([first, second]);
                }
                Err(error) => {
                    tracing::error!(job.id = %piece[0].job, error = chain(&error), "a job cannot be started");
                    refused.extend(ids());
                }
            }
        }
    }

    /// Whether MongoDB has answered and locked none of the jobs.
    pub(crate) fn is_fruitless(&self) -> bool {
        self.claims.is_empty() && self.refused.is_empty() && self.unanswered.is_empty()
    }

    /// The jobs that may be locked now or later, whether they are run or not.
    pub(crate) fn may_be_locked(&self) -> HashSet<JobId> {
        self.unanswered.iter().copied().chain(self.claims.iter().map(|claim| claim.job())).collect()
    }
}
