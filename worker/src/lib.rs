//! Runs background jobs from MongoDB: register workables with a [`Worker`], and it runs the jobs that a recruiter assigns to it.
//!
//! An application that runs jobs depends on this crate only. It re-exports `recruiter-common`, the API to enqueue jobs, whose
//! documentation also describes the change from bson 2.
//!
//! ```no_run
//! use recruiter_worker::{ConnectArgs, Context, Executable, NotDone, OrNotDone, Shutdown, Workable, Worker, WorkerConfig};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Serialize, Deserialize)]
//! struct Greet {
//!     name: String,
//! }
//!
//! impl Workable for Greet {
//!     const CLASS: &'static str = "Greet";
//!     type Output = usize;
//! }
//!
//! impl Executable for Greet {
//!     type State = std::path::PathBuf;
//!
//!     async fn execute(&self, file: &Self::State, job: &Context) -> Result<usize, NotDone> {
//!         let greeting = format!("hello, {}, for the {}. time", self.name, job.attempt());
//!         tokio::fs::write(file, &greeting).await.or_failed("NoFile")?;
//!         Ok(greeting.len())
//!     }
//! }
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let worker = Worker::new().register::<Greet>(std::path::PathBuf::from("greeting.txt"))?;
//! let (stop, shutdown) = Shutdown::manual();
//! let connect = ConnectArgs::to("mongodb://127.0.0.1:27017/jobs?replicaSet=rs0");
//! let running = tokio::spawn(worker.run(connect, WorkerConfig::default().concurrency(20), shutdown));
//! // Later, when the application ends:
//! stop.drain();
//! running.await??;
//! # Ok(())
//! # }
//! ```
//!
//! A worker needs a recruiter that assigns and a cleaner that rescues: `recruiter run` and `recruiter-cleaner`, or `recruiter dev` on a
//! developer's machine.
//!
//! - [`Executable`] is for `async` code, [`BlockingExecutable`] for code that computes or waits on its thread.
//! - [`Context::for_tests`] makes unit tests of a workable that need no MongoDB.
//! - With the feature `process`, for Linux, a worker is a complete program: `Worker::main` reads flags, logs, handles signals and ends
//!   with an exit code. The stock worker, `recruiter-worker`, is such a program. Its classes are programs that a file names.
//! - With the feature `opentelemetry`, each execution is a span of OpenTelemetry in the trace of its enqueuer.
//! - `recruiter-testing` is a test kit, a dev-dependency.
//!
//! | module | what it is |
//! |---|---|
//! | `workable`, `outcome`, `context`, `event` | what an application implements, returns and receives |
//! | `cancellation`, `deadline` | why and when an execution should stop |
//! | `transaction` | a workable's own transaction, which ends its job |
//! | `registry` | the classes of a worker |
//! | `config` | settings |
//! | `process`, `no_process` | flags, and a worker as a process; without the feature a compiler error that names it |
//! | `handed` | jobs that clients of the process execute, for servers of other protocols |
//! | `generations` | the workers of a process that reads its settings again |
//! | `engine` | takes jobs, runs them, records their outcomes |
//! | `programs` | the stock worker's workables |
//! | `panics` | calls into code of users |
//! | `hooks`, `layer` | calls of hooks; code around executions |
//! | `notes` | progress, checkpoint and log of a running job |
//! | `optimistic` | executes jobs in the process that enqueues them |
//! | `threads` | threads of blocking workables |

mod cancellation;
mod config;
mod context;
mod deadline;
mod engine;
mod event;
#[cfg(feature = "process")]
mod generations;
mod handed;
mod hooks;
mod layer;
#[cfg(not(feature = "process"))]
mod no_process;
mod notes;
mod optimistic;
mod outcome;
mod panics;
#[cfg(feature = "process")]
mod process;
#[cfg(feature = "process")]
mod programs;
mod registry;
mod threads;
mod transaction;
mod workable;

use std::{num::NonZeroU32, sync::Arc};

use recruiter_common::{
    retry_policy::{Parameters, RetryPolicies},
    service::Notifier,
    store::{ProcessIdentity, Store},
    task::as_task,
};

pub use recruiter_common::{
    self as common, Client, ConnectArgs, ConnectError, Decision, Defaults, DoNotDoItAgain, Edge, EnqueueError, Enqueued,
    ExponentialBackoff, Failure, FinishReason, Graph, GraphId, History, Instant, InvalidPolicy, InvalidUnique, JobId, JobResult, Keep,
    Limit, NewJob, OnConflict, Outcome, Pattern, Priority, Rate, ResultError, RetriableExceptionFilter, Retry, RetryForever,
    RetryManyTimes, RetryPolicy, SelectByException, StoreError, TimeTable, Unique, UniqueScope, WaitError, When, Workable, bson,
    job::JobProgress,
    mongodb, schedules,
    shutdown::{Shutdown, Trigger},
};

#[cfg(feature = "testing")]
#[doc(hidden)]
pub use crate::engine::solo;
pub use crate::{
    cancellation::Cancellation,
    config::{
        DEFAULT_CONCURRENCY, DEFAULT_GRACE, DEFAULT_HEARTBEAT, DEFAULT_LEASE, DEFAULT_POLL, InvalidConfig, MOST_CONCURRENCY, WorkerConfig,
    },
    context::{CheckpointError, Context, ForTests, Item},
    engine::Ran,
    event::WorkerEvent,
    handed::{EndOf, HandedJob, Places, TooLate},
    layer::{Layer, Next, Success},
    optimistic::{Attempted, Optimistic},
    outcome::{Continuation, MOST_CONTINUATIONS, NotDone, OrNotDone},
    registry::{InvalidClass, UnknownClass},
    transaction::{Abort, TransactionSession},
    workable::{BlockingExecutable, Executable},
};
use crate::{
    engine::{dependencies::Dependencies, memory, meters::Meters, outliving::Outliving, source::Source},
    event::Listener,
    handed::HandsOut,
    layer::Layers,
    registry::{Asynchronous, Blocking, Registry},
    threads::Threads,
};
#[cfg(feature = "process")]
pub use crate::{
    process::{EXIT_CODES, ProcessArgs, WorkerArgs},
    programs::{cli, stock},
};

/// Maximum time after a second signal, for killing programs and writing to MongoDB.
pub const ABORT_WITHIN: std::time::Duration = std::time::Duration::from_secs(2);

/// A worker before it runs: its classes, its retry policies and its event listener.
#[derive(Default)]
pub struct Worker {
    registry: Registry,
    policies: RetryPolicies,
    layers: Layers,
    listener: Option<Arc<Listener>>,
    /// Where clients wait for its jobs, if it hands them out.
    places: Option<Places>,
    /// Files of a running program; 0 if there are no programs.
    #[cfg(feature = "process")]
    files_of_a_program: u64,
    #[cfg(feature = "process")]
    pools: Vec<Arc<programs::long_lived::Pool>>,
    #[cfg(feature = "process")]
    about: Option<String>,
}

/// How a worker ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ended {
    /// A stop was requested, by the caller or by an operator (`recruiter workers stop`).
    Stopped,
    /// The memory limit was reached, and the running jobs have ended. Start the process again.
    MemoryLimit,
}

/// Why a worker could not start or had to end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// Nothing was registered.
    #[error("this worker has no classes: register at least one workable; the stock worker needs --config or --builtins")]
    NoClasses,
    /// The settings contradict each other.
    #[error(transparent)]
    Config(#[from] InvalidConfig),
    /// MongoDB cannot be used.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The identity of this process could not be read.
    #[error("cannot read the identity of this process from `/proc`")]
    Process(#[source] std::io::Error),
    /// A task of the worker has panicked.
    #[error("{0} has panicked; the cleaner rescues the jobs of this worker")]
    Panicked(&'static str),
}

impl Worker {
    /// A worker without classes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a class, with the state that all its executions share. Classes with the same type of state can share one value:
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use recruiter_worker::{Context, Executable, NotDone, Workable, Worker};
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize)] struct Invoice;
    /// # #[derive(Serialize, Deserialize)] struct Reminder;
    /// # impl Workable for Invoice { const CLASS: &'static str = "Invoice"; type Output = (); }
    /// # impl Workable for Reminder { const CLASS: &'static str = "Reminder"; type Output = (); }
    /// struct Mailer;
    ///
    /// impl Executable for Invoice {
    ///     type State = Mailer;
    /// #   async fn execute(&self, _: &Mailer, _: &Context) -> Result<(), NotDone> { Ok(()) }
    /// }
    /// impl Executable for Reminder {
    ///     type State = Mailer;
    /// #   async fn execute(&self, _: &Mailer, _: &Context) -> Result<(), NotDone> { Ok(()) }
    /// }
    ///
    /// let mailer = Arc::new(Mailer);
    /// let worker = Worker::new().register::<Invoice>(mailer.clone())?.register::<Reminder>(mailer)?;
    /// # Ok::<(), recruiter_worker::InvalidClass>(())
    /// ```
    ///
    /// # Errors
    /// When the worker has the class already, and when no job can have it: see [`InvalidClass`].
    pub fn register<W: Executable>(mut self, state: impl Into<Arc<W::State>>) -> Result<Self, InvalidClass> {
        self.registry.add(W::CLASS, Arc::new(Asynchronous::<W>(state.into())))?;
        Ok(self)
    }

    /// Adds a class that blocks its thread.
    ///
    /// # Errors
    /// When the worker has the class already, and when no job can have it: see [`InvalidClass`].
    pub fn register_blocking<W: BlockingExecutable>(mut self, state: impl Into<Arc<W::State>>) -> Result<Self, InvalidClass> {
        let threads = self.registry.threads.clone();
        self.registry.add(W::CLASS, Arc::new(Blocking::<W> { state: state.into(), threads, hook_threads: Threads::default() }))?;
        Ok(self)
    }

    /// A worker that executes nothing itself: clients of this process take its jobs from `places`, for example over another protocol. It has as
    /// many free slots as clients wait there. Classes that are registered besides have no slots of their own.
    ///
    /// ```
    /// use recruiter_worker::{Places, Worker, bson::Bson};
    ///
    /// async fn serve(places: Places) {
    ///     let job = places.next().await;
    ///     println!("{} {}", job.context().class(), job.parameters());
    ///     if let Err(too_late) = job.end(Ok(Bson::from("sent"))).await {
    ///         println!("{too_late}");
    ///     }
    /// }
    ///
    /// let places = Places::default();
    /// let worker = Worker::handing_out(["mail", "sms"], &places)?;
    /// # Ok::<(), recruiter_worker::InvalidClass>(())
    /// ```
    ///
    /// # Errors
    /// When a class is named twice, and when no job can have it: see [`InvalidClass`].
    pub fn handing_out(classes: impl IntoIterator<Item = impl AsRef<str>>, places: &Places) -> Result<Self, InvalidClass> {
        let mut worker = Self { places: Some(places.clone()), ..Self::default() };
        for class in classes {
            worker.registry.add(class.as_ref(), Arc::new(HandsOut(places.clone())))?;
        }
        Ok(worker)
    }

    /// Runs at most this many jobs of a class at a time in this process. The other slots are for other classes.
    ///
    /// A limit over all processes is a resource: see [`common::limits`].
    ///
    /// # Errors
    /// When the class is not registered.
    pub fn class_concurrency(mut self, class: &str, jobs: NonZeroU32) -> Result<Self, UnknownClass> {
        self.registry.limit(class, jobs)?;
        Ok(self)
    }

    /// Adds the programs of a workables file, each as a class.
    ///
    /// # Errors
    /// When the worker has one of the classes already.
    #[cfg(feature = "process")]
    pub fn register_programs(mut self, programs: stock::Programs) -> Result<Self, InvalidClass> {
        self.files_of_a_program = self.files_of_a_program.max(programs.files());
        for (class, program) in programs.0 {
            self.pools.extend(program.pool.clone());
            let (concurrency, defaults) = (program.concurrency, program.defaults.clone());
            self.registry.add(&class, Arc::new(program))?;
            if let Some(jobs) = concurrency {
                self.registry.limit(&class, jobs).expect("it was registered just now");
            }
            self.registry.defaults.insert(class, defaults);
        }
        Ok(self)
    }

    /// Adds the test classes: `noop`, `sleep`, `fail`, `panic`, `exit-abruptly`, `leak`, `count`.
    ///
    /// # Errors
    /// When the worker has one of the classes already.
    #[cfg(feature = "process")]
    pub fn register_builtins(self) -> Result<Self, InvalidClass> {
        programs::builtin::register(self)
    }

    /// Adds a custom retry policy, which `decode` creates from its stored parameters. A worker skips jobs with an unknown policy; only
    /// workers that know it run them. A job whose policy parameters `decode` refuses is archived as malformed without being run.
    ///
    /// # Errors
    /// When the worker has a policy of this name already.
    pub fn register_policy<P: RetryPolicy + 'static>(
        mut self,
        class: &'static str,
        decode: impl Fn(&Parameters<'_>, &RetryPolicies) -> Result<P, InvalidPolicy> + Send + Sync + 'static,
    ) -> Result<Self, InvalidPolicy> {
        self.policies.register(class, decode)?;
        Ok(self)
    }

    /// Adds code around the execution of every job. The layer that is added first is the outermost.
    #[must_use]
    pub fn layer(mut self, layer: impl Layer) -> Self {
        self.layers.add(layer);
        self
    }

    /// Calls `listener` with every event of a job in this worker. It should be quick and must not panic.
    #[must_use]
    pub fn listen(mut self, listener: impl Fn(&WorkerEvent<'_>) + Send + Sync + 'static) -> Self {
        self.listener = Some(Arc::new(listener));
        self
    }

    /// Runs jobs until a stop is requested, also from afar ([`common::workers`]), or the memory limit is reached.
    ///
    /// While MongoDB is away, the worker waits for it. It makes connections of its own, so that no traffic of the application delays its
    /// heartbeats. It sends nothing to the service manager of the process (`NOTIFY_SOCKET`).
    ///
    /// # Errors
    /// When the settings contradict each other, no class is registered, or MongoDB cannot be used at the start. Also when a task of the
    /// worker panics: its jobs are then rescued as after the death of a process.
    pub async fn run(
        self,
        connect: impl Into<ConnectArgs>,
        config: impl Into<WorkerConfig>,
        mut shutdown: Shutdown,
    ) -> Result<Ended, WorkerError> {
        let config = config.into();
        self.validate(&config)?;
        let store = tokio::select! {
            connected = Store::connect(connect.into(), "recruiter-worker") => Arc::new(connected?),
            () = shutdown.requested() => return Ok(Ended::Stopped),
        };
        let source = self.places.clone().map_or(Source::Roster, Source::Clients);
        self.run_over(store, config, shutdown, Notifier::Silent, source).await
    }

    /// Checks that this worker can run with these settings.
    ///
    /// # Errors
    /// When it has no classes, or the settings contradict each other.
    pub fn validate(&self, config: &WorkerConfig) -> Result<(), WorkerError> {
        config.validate()?;
        if self.registry.classes().next().is_none() {
            return Err(WorkerError::NoClasses);
        }
        Ok(())
    }

    /// Runs sessions over this store, with notifications to the service manager if the process is nothing but workers.
    pub(crate) async fn run_over(
        self,
        store: Arc<Store>,
        config: WorkerConfig,
        shutdown: Shutdown,
        notifier: Notifier,
        source: Source,
    ) -> Result<Ended, WorkerError> {
        self.validate(&config)?;
        #[cfg(feature = "process")]
        let config = if self.files_of_a_program > 0 { programs::files::with_files_for(config, self.files_of_a_program) } else { config };
        // Opens the file that it reads, while there are free file descriptors.
        let _ = memory::resident();
        let heartbeat_store = store.with_own_connections("recruiter-worker-heartbeat")?;
        #[cfg(feature = "process")]
        let _reaping = (self.files_of_a_program > 0 && programs::orphans::are_inherited())
            .then(|| tokio_util::task::AbortOnDropHandle::new(tokio::spawn(programs::orphans::reap())));
        #[cfg(feature = "process")]
        let pools = self.pools;
        let Self { registry, policies, layers, listener, .. } = self;
        let (process, watchdog) = (ProcessIdentity::of_this_process().map_err(WorkerError::Process)?, notifier.watchdog());
        let (outliving, meters) = (Outliving::default(), Meters::new(registry.classes(), notifier.clone()));
        let dependencies = Dependencies {
            store,
            heartbeat_store,
            config,
            process,
            registry,
            policies,
            layers,
            listener,
            source,
            outliving,
            meters,
            notifier,
            watchdog,
        };
        let ended = as_task(engine::run(Arc::new(dependencies), shutdown)).await;
        #[cfg(feature = "process")]
        futures_util::future::join_all(pools.iter().map(|pool| pool.close())).await;
        ended
    }
}
