//! Executes all due jobs of a database.

use std::{sync::Arc, time::Duration};

use recruiter_common::{
    Client,
    ids::JobId,
    instant::Instant,
    job::Job,
    store::{CommitSession, Lane, Recorded, Store, StoreError},
};

use recruiter_worker::{
    Ran, Worker,
    solo::{NotAlone, Solo, has_class},
};

/// Maximum number of executions. More are taken for jobs that enqueue each other without an end.
const MOST: usize = 10_000;
/// Maximum number of classes of one group.
const CLASSES: usize = 10_000;

/// Executes the due jobs of a database by the classes of a worker that need not run: one after the other, in the order in which a recruiter
/// assigns them (priority, then date), until none is due. Jobs that these enqueue are executed as well. Each start and each end is recorded
/// as by a worker.
///
/// For tests, on a database where neither a worker nor a recruiter runs: limits, pauses and weights are not observed, no schedule becomes
/// due, and jobs that wait for others are not released. Classes that the worker does not have are left alone.
/// [`Context::transaction`](recruiter_worker::Context::transaction) is not available.
///
/// ```no_run
/// use std::time::Duration;
///
/// use recruiter_testing::{Drain, Ran};
/// use recruiter_worker::{Client, Worker};
///
/// # async fn example(worker: Worker, client: Client) -> Result<(), Box<dyn std::error::Error>> {
/// let drained = Drain::new(&worker, &client).run().await?;
/// assert!(drained.iter().all(|job| matches!(job.ran, Ran::Done { .. })), "{drained:?}");
/// // What is due within the next day, also retries:
/// let later = Drain::new(&worker, &client).ahead(Duration::from_secs(86_400)).run().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use = "nothing happens until `run` is called"]
pub struct Drain<'a> {
    worker: &'a Worker,
    store: Store,
    clock: Clock,
}

/// The clock of a drain.
#[derive(Clone, Copy, Debug)]
enum Clock {
    /// It goes on, so far ahead of the server's.
    Ahead(Duration),
    /// It stands.
    At(Instant),
}

impl Clock {
    fn now(self, server: Instant) -> Instant {
        match self {
            Self::Ahead(time) => {
                let ahead = chrono::TimeDelta::from_std(time).unwrap_or(chrono::TimeDelta::MAX);
                server.checked_add_signed(ahead).unwrap_or(Instant::MAX_UTC)
            }
            Self::At(instant) => instant,
        }
    }
}

/// A job that was executed.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Drained {
    /// The id of the job.
    pub id: JobId,
    /// The class of its workable.
    pub class: String,
    /// The end of this execution.
    pub ran: Ran,
}

/// Why the jobs of a database were not drained.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DrainError {
    /// MongoDB cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A due job cannot be executed alone.
    #[error("the job {id} cannot be drained")]
    NotAlone {
        /// The id of the job.
        id: JobId,
        /// Why.
        source: NotAlone,
    },
    /// A document is not a valid job.
    #[error("the document {id} is not a job: {problem}")]
    Malformed {
        /// Its id.
        id: JobId,
        /// The problem.
        problem: String,
    },
    /// A job was started or changed by something else.
    #[error("the job {0} was started or changed by something else: drain a database on which nothing else runs")]
    Overtaken(JobId),
    /// A due job has expired. A worker would archive it as `expired`.
    #[error("the job {0} has expired: a worker would archive it and not execute it")]
    Expired(JobId),
    /// The jobs do not end.
    #[error("after {MOST} executions there are still due jobs: they may enqueue each other without an end")]
    Endless,
}

impl<'a> Drain<'a> {
    /// What is due now.
    pub fn new(worker: &'a Worker, client: &Client) -> Self {
        Self { worker, store: client.clone().into(), clock: Clock::Ahead(Duration::ZERO) }
    }

    /// Sets how far the clock of the drain is ahead: what is due until then is executed, and retries count from there.
    pub fn ahead(mut self, time: Duration) -> Self {
        self.clock = Clock::Ahead(time);
        self
    }

    /// Sets the clock of the drain to this instant, where it stands: what is due then is executed, and retries count exactly from there.
    pub fn at(mut self, instant: Instant) -> Self {
        self.clock = Clock::At(instant);
        self
    }

    /// Executes what is due, and returns it in order. A job that is retried is there several times if its retry is due as well.
    ///
    /// # Errors
    /// When MongoDB cannot be used, or a due job cannot be executed alone.
    pub async fn run(self) -> Result<Vec<Drained>, DrainError> {
        let clock = || self.clock.now(self.store.now());
        let (mut drained, mut session) = (Vec::new(), CommitSession::default());
        while let Some(job) = self.next(clock()).await? {
            if drained.len() == MOST {
                return Err(DrainError::Endless);
            }
            let id = job.id;
            if job.is_expired(clock()) {
                return Err(DrainError::Expired(id));
            }
            let solo =
                Solo::new(self.worker, Some(Arc::new(self.store.clone())), job).map_err(|source| DrainError::NotAlone { id, source })?;
            let mut execution = solo.execute(self.store.now(), clock).await;
            if execution.record(&self.store, &mut session, &solo).await? != Recorded::Yes {
                return Err(DrainError::Overtaken(id));
            }
            execution.hooks().await;
            drained.push(Drained { id, class: solo.job.class.clone(), ran: execution.ran() });
        }
        Ok(drained)
    }

    /// The first due job of a class that the worker has.
    async fn next(&self, now: Instant) -> Result<Option<Arc<Job>>, DrainError> {
        let mut lanes: Vec<Lane> = Vec::new();
        for group in self.store.ungated_groups().await? {
            lanes.extend(self.store.lanes_of(&group, CLASSES).await?.0);
        }
        for group in self.store.gated_groups().await? {
            lanes.extend(self.store.gated_lanes_of(&group).await?);
        }
        lanes.retain(|lane| has_class(self.worker, &lane.class));
        let due = if lanes.is_empty() { None } else { self.store.due_jobs(&lanes, now, 1).await?.jobs.into_iter().next() };
        let Some(due) = due else { return Ok(None) };
        match self.store.unlocked(&[due.id]).await?.into_iter().next() {
            Some(Ok(job)) => Ok(Some(job)),
            Some(Err((id, _, problem))) => Err(DrainError::Malformed { id, problem: problem.to_string() }),
            None => Err(DrainError::Overtaken(due.id)),
        }
    }
}

impl std::fmt::Debug for Drain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Drain").field("clock", &self.clock).finish_non_exhaustive()
    }
}
