//! Starts on their way: starts that MongoDB has not answered yet.
//!
//! A start locks a batch of jobs with one guarded command. Then it searches the archive for those that may be copies of archived jobs. Up
//! to two starts are on their way at once, so that a free slot need not wait for the answer of an earlier start. Each start has its own id
//! and its own jobs, and runs in a task of its own. The session gets the answers and runs the locked jobs.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::{JobId, StartId, WorkerId},
    job::Claim,
    store::{Start, Store, StoreError, ToStart},
    telemetry::chain,
};
use tokio::task::JoinSet;

use crate::engine::{
    environment::Environment,
    held::{Next, Startable},
    run::tasks::TaskPanicked,
};

/// The most starts on their way at once. With more, each would lock fewer jobs at a higher cost for each job.
const MOST: usize = 2;

/// The starts of a session that MongoDB has not answered yet.
pub(crate) struct InFlight {
    environment: Arc<Environment>,
    worker: WorkerId,
    tasks: JoinSet<Answered>,
}

/// A start with its answer, or with the result of a search if the answer was lost.
pub(crate) struct Answered {
    pub(crate) start: Start,
    pub(crate) startable: HashMap<JobId, Startable>,
    /// The jobs that it has locked.
    pub(crate) claims: Vec<Claim>,
    /// Jobs whose start MongoDB refuses, because of an error of the document. They are archived as malformed.
    pub(crate) refused: Vec<JobId>,
    /// Jobs for which the answer was lost. The start may have locked them, or may still lock them.
    pub(crate) unanswered: Vec<JobId>,
    /// The locked jobs that are already in the archive.
    pub(crate) archived: Result<HashSet<JobId>, StoreError>,
    /// How long the answer took.
    pub(crate) took: Duration,
}

impl InFlight {
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

    /// Sends a start that locks these jobs. If the lease is over, nothing is sent, and the ids of the jobs are returned: they stay due.
    pub(crate) fn send(&mut self, next: Next) -> Vec<JobId> {
        let Next { jobs, ahead } = next;
        let dependencies = &self.environment.dependencies;
        let Some(lease_until) = self.environment.lease.until() else {
            tracing::warn!(count = jobs.len(), "not starting jobs: no heartbeat was acknowledged within the lease");
            let jobs: Vec<JobId> = jobs.iter().chain(&ahead).map(Startable::id).collect();
            self.environment.held.remove(&jobs);
            return jobs;
        };
        let (process, now) = (&dependencies.process, dependencies.store.now());
        let start =
            Start { id: StartId::new(), worker: self.worker, hostname: process.hostname.clone(), pid: process.pid, lease_until, now };
        let startable: HashMap<JobId, Startable> = jobs.into_iter().chain(ahead).map(|job| (job.id(), job)).collect();
        let store = Store::clone(&dependencies.store);
        self.tasks.spawn(async move { lock(&store, start, startable).await });
        Vec::new()
    }

    /// Waits for the next answer. `None` when no start is on its way.
    pub(crate) async fn next(&mut self) -> Option<Result<Answered, TaskPanicked>> {
        Some(self.tasks.join_next().await?.map_err(TaskPanicked::from))
    }
}

/// Locks jobs, and then searches the archive for those that may have been archived before.
///
/// The archive is read after the start and not beside it, because a job can be archived and enqueued again until it is locked.
async fn lock(store: &Store, start: Start, startable: HashMap<JobId, Startable>) -> Answered {
    let sent = Monotonic::now();
    let (claims, refused, unanswered) = (Vec::new(), Vec::new(), Vec::new());
    let mut answered = Answered { start, startable, claims, refused, unanswered, archived: Ok(HashSet::new()), took: Duration::ZERO };
    answered.lock(store).await;
    let can_be_resent = |id: &JobId| answered.startable.get(id).is_none_or(|startable| startable.can_be_resent(answered.start.now));
    let resendable: Vec<JobId> = answered.claims.iter().map(|claim| claim.job()).filter(can_be_resent).collect();
    if !resendable.is_empty() {
        answered.archived = store.already_archived(&resendable).await;
    }
    answered.took = sent.elapsed();
    answered
}

impl Answered {
    /// Locks the jobs. A batch that MongoDB refuses is halved until the refused job is alone.
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
                    tracing::error!(job.id = %piece[0].job, error = chain(&error), "MongoDB refuses the start of a job");
                    refused.extend(ids());
                }
            }
        }
    }

    /// Whether MongoDB has answered and locked no job.
    pub(crate) fn is_fruitless(&self) -> bool {
        self.claims.is_empty() && self.refused.is_empty() && self.unanswered.is_empty()
    }

    /// The jobs that this start has locked or may still lock.
    pub(crate) fn may_be_locked(&self) -> HashSet<JobId> {
        self.unanswered.iter().copied().chain(self.claims.iter().map(|claim| claim.job())).collect()
    }
}
