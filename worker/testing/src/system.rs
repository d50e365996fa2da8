//! A whole system in the process of a test: a recruiter, a cleaner and a worker.

use std::{collections::HashSet, error::Error, time::Duration};

use recruiter::run::RunArgs;
use recruiter_cleaner::config::CleanerArgs;
use recruiter_common::{
    Client, EnqueueError, JobId, NewJob, WaitError, Workable,
    monitoring::MetricsArgs,
    shutdown::{Shutdown, Trigger},
    store::{End, Store, StoreError, Unfinished},
};
use recruiter_worker::{Worker, WorkerConfig, WorkerError};
use tokio::time::{interval, timeout};
use tokio_util::task::AbortOnDropHandle;

use crate::{TestDatabase, TestDatabaseError};

/// How often the system is checked while a test waits.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// A job that is due within this time counts as due: two processes' estimates of the server's clock differ by less.
const ABOUT_TO_BE_DUE: Duration = Duration::from_millis(100);
/// Number of jobs that the error of [`System::until_idle`] names.
const NAMED: usize = 5;

/// How a recruiter runs here. It scans often, because a delayed job and a retry start with a scan.
const RECRUITER: RunArgs = RunArgs {
    lease: Duration::from_secs(15),
    poll: Duration::from_millis(200),
    hints_directory: None,
    hints_address: None,
    metrics: MetricsArgs::NONE,
};
/// How a cleaner runs here. It sweeps often, because it looks for expired jobs as often.
const CLEANER: CleanerArgs = CleanerArgs {
    dead_after: Duration::from_secs(30),
    every: Duration::from_secs(1),
    sweep_every: Duration::from_secs(1),
    keep_archived: Duration::from_secs(5 * 86_400),
    keep_failures: None,
    keep_reason: Vec::new(),
    keep: Vec::new(),
    prune_every: Duration::from_secs(60),
};

/// A recruiter, a cleaner and a worker that run in the process of a test, on a database of their own. Limits, lines, graphs, schedules and
/// retries take effect as in production.
///
/// ```no_run
/// use std::time::Duration;
///
/// use recruiter_testing::System;
/// use recruiter_worker::{Context, Executable, NotDone, Workable, Worker, WorkerConfig};
///
/// #[derive(serde::Serialize, serde::Deserialize)]
/// struct Greet {
///     name: String,
/// }
///
/// impl Workable for Greet {
///     const CLASS: &'static str = "Greet";
///     type Output = String;
/// }
///
/// impl Executable for Greet {
///     type State = ();
///
///     async fn execute(&self, (): &(), _: &Context) -> Result<String, NotDone> {
///         Ok(format!("hello, {}", self.name))
///     }
/// }
///
/// // In a test: #[tokio::test]
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// const SOON: Duration = Duration::from_secs(10);
/// let worker = Worker::new().register::<Greet>(())?;
/// let system = System::start(worker, WorkerConfig::default()).await?;
/// // One job, and its result:
/// let greeting = system.run::<Greet>(Greet { name: "Ada".into() }.as_job(), SOON).await?;
/// assert_eq!(greeting, "hello, Ada");
/// // What the code under test enqueues on `system.client()`:
/// Greet { name: "Grace".into() }.as_job().enqueue(system.client()).await?;
/// system.until_idle(SOON).await?;
/// system.stop().await?;
/// # Ok(())
/// # }
/// ```
///
/// All three use the clock of MongoDB, which a test cannot set. To execute what is due tomorrow, use [`Drain`](super::Drain).
///
/// A system that is dropped, for example by a failing test, ends at once: running jobs are interrupted, and its database is removed.
#[derive(Debug)]
pub struct System {
    /// In the order in which they are stopped.
    parts: [Part; 3],
    database: TestDatabase,
}

/// A task that is a process in production. Dropping it ends the task.
#[derive(Debug)]
struct Part {
    name: &'static str,
    stop: Trigger,
    task: AbortOnDropHandle<Result<(), Box<dyn Error + Send + Sync>>>,
}

/// Why a test cannot use its system.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SystemError {
    /// There is no database.
    #[error(transparent)]
    Database(#[from] TestDatabaseError),
    /// The worker cannot run: it has no classes, or its settings contradict each other.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// A job was not enqueued.
    #[error(transparent)]
    Enqueue(#[from] EnqueueError),
    /// A job that was waited for has no result: it failed, or it has not ended in time.
    #[error(transparent)]
    Wait(#[from] WaitError),
    /// MongoDB cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Jobs have not ended in time.
    #[error(
        "after {} not all jobs have ended ({count} left: {named}); has the worker their classes and their groups, or are they limited or paused?",
        recruiter_common::text::in_words(*waited)
    )]
    NotIdle {
        /// How long they were waited for.
        waited: Duration,
        /// Number of jobs.
        count: usize,
        /// Some of the jobs: id, class and state.
        named: String,
    },
    /// A part of the system has ended before it was stopped.
    #[error("the {0} has ended by itself: `System::stop` returns its error, if there was one")]
    Ended(&'static str),
    /// A part of the system has ended with an error or a panic.
    #[error("the {part} has ended with an error")]
    Failed {
        /// The recruiter, the cleaner or the worker.
        part: &'static str,
        /// The error.
        source: Box<dyn Error + Send + Sync>,
    },
}

impl System {
    /// Starts a system on a [new database](TestDatabase::new).
    ///
    /// # Errors
    /// When the worker cannot run, or there is no MongoDB.
    pub async fn start(worker: Worker, config: impl Into<WorkerConfig>) -> Result<Self, SystemError> {
        let config = config.into();
        // Before a MongoDB is started.
        worker.validate(&config)?;
        Self::over(TestDatabase::new().await?, worker, config).await
    }

    /// Starts a system on this database.
    ///
    /// # Errors
    /// When the worker cannot run.
    pub async fn over(database: TestDatabase, worker: Worker, config: impl Into<WorkerConfig>) -> Result<Self, SystemError> {
        let config = config.into();
        worker.validate(&config)?;
        let connect = || database.connect_args().clone();
        let (to_worker, to_cleaner, to_recruiter) = (connect(), connect(), connect());
        let parts = [
            Part::spawn("worker", |shutdown| async move { Ok(worker.run(to_worker, config, shutdown).await.map(drop)?) }),
            Part::spawn("cleaner", |shutdown| async move { Ok(recruiter_cleaner::run(CLEANER, &to_cleaner, shutdown).await?) }),
            Part::spawn("recruiter", |shutdown| async move { Ok(recruiter::run::run(RECRUITER, &to_recruiter, shutdown).await?) }),
        ];
        Ok(Self { parts, database })
    }

    /// The database, for code that enqueues jobs and for tests that look at them.
    pub fn client(&self) -> &Client {
        self.database.client()
    }

    /// The database with its connection, for further workers.
    pub fn database(&self) -> &TestDatabase {
        &self.database
    }

    /// Enqueues a job and waits for its result, through all its retries.
    ///
    /// # Errors
    /// When the job is not enqueued, fails for the last time ([`WaitError::Failed`]) or does not end in time.
    pub async fn run<W: Workable>(&self, job: NewJob, within: Duration) -> Result<W::Output, SystemError> {
        let done = async {
            let enqueued = job.enqueue(self.client()).await?;
            Ok(enqueued.wait::<W>(self.client(), within).await?)
        };
        self.unless_ended(done).await
    }

    /// Waits until all jobs that are due have ended, and those that they have enqueued. Does not wait for jobs and retries that are due
    /// later, and for jobs that wait for these.
    ///
    /// The hooks of the last jobs may still run. [`System::stop`] waits for them.
    ///
    /// # Errors
    /// When jobs have not ended in time. They are named.
    pub async fn until_idle(&self, within: Duration) -> Result<(), SystemError> {
        let mut left = Vec::new();
        let idle = async {
            let mut looks = interval(LOOK_EVERY);
            loop {
                looks.tick().await;
                left = unfinished(&self.client().clone().into()).await?;
                if left.is_empty() {
                    return Ok(());
                }
            }
        };
        match timeout(within, self.unless_ended(idle)).await {
            Ok(done) => done,
            Err(_) => Err(SystemError::NotIdle { waited: within, count: left.len(), named: named(&left) }),
        }
    }

    /// Stops the worker, which waits for its running jobs as long as its configuration says ([`WorkerConfig::grace`]), then the cleaner and
    /// the recruiter. Removes the database.
    ///
    /// # Errors
    /// When a part has ended with an error, or the database cannot be removed.
    pub async fn stop(self) -> Result<(), SystemError> {
        let mut stopped = Ok(());
        for part in self.parts {
            stopped = stopped.and(part.stop().await);
        }
        let removed = self.database.remove().await;
        stopped?;
        Ok(removed?)
    }

    /// Awaits a future. Fails if a part of the system ends before it.
    async fn unless_ended<T>(&self, future: impl Future<Output = Result<T, SystemError>>) -> Result<T, SystemError> {
        let ended = async {
            let mut looks = interval(LOOK_EVERY);
            loop {
                looks.tick().await;
                if let Some(part) = self.parts.iter().find(|part| part.task.is_finished()) {
                    return part.name;
                }
            }
        };
        tokio::select! { biased; done = future => done, name = ended => Err(SystemError::Ended(name)) }
    }
}

impl Part {
    fn spawn<F>(name: &'static str, run: impl FnOnce(Shutdown) -> F) -> Self
    where
        F: Future<Output = Result<(), Box<dyn Error + Send + Sync>>> + Send + 'static,
    {
        let (stop, shutdown) = Shutdown::manual();
        Self { name, stop, task: AbortOnDropHandle::new(tokio::spawn(run(shutdown))) }
    }

    async fn stop(self) -> Result<(), SystemError> {
        self.stop.drain();
        let ended = self.task.await.unwrap_or_else(|died| Err(died.into()));
        ended.map_err(|source| SystemError::Failed { part: self.name, source })
    }
}

/// The jobs that run or are due. If there are none, the jobs that will be due in a moment, because those that they wait for have ended.
async fn unfinished(store: &Store) -> Result<Vec<Unfinished>, StoreError> {
    store.refresh_clock().await?;
    let jobs = store.unfinished_jobs(store.now() + ABOUT_TO_BE_DUE).await?;
    let (waiting, mut unfinished): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|job| !job.waits_for.is_empty());
    if unfinished.is_empty() {
        for job in waiting {
            if have_ended(store, &job.waits_for).await? {
                unfinished.push(job);
            }
        }
    }
    Ok(unfinished)
}

/// Whether these jobs are in the archive, and those that they have become.
async fn have_ended(store: &Store, jobs: &[JobId]) -> Result<bool, StoreError> {
    let mut jobs: HashSet<JobId> = jobs.iter().copied().collect();
    while !jobs.is_empty() {
        let ends = store.ends_of(&jobs.iter().copied().collect::<Vec<_>>()).await?;
        if ends.len() < jobs.len() {
            return Ok(false);
        }
        jobs = ends.into_values().filter_map(|end| if let End::ContinuedAs(jobs) = end { Some(jobs) } else { None }).flatten().collect();
    }
    Ok(true)
}

fn named(jobs: &[Unfinished]) -> String {
    let state = |job: &Unfinished| match job {
        Unfinished { is_locked: true, .. } => "running",
        Unfinished { waits_for, .. } if !waits_for.is_empty() => "waits for other jobs",
        Unfinished { .. } => "due",
    };
    let mut named: Vec<String> = jobs.iter().take(NAMED).map(|job| format!("{} ({}, {})", job.job, job.class, state(job))).collect();
    if jobs.len() > NAMED {
        named.push("…".to_owned());
    }
    named.join(", ")
}
