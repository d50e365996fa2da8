//! Runs jobs: a [`Worker`] has workables, and runs the jobs that a recruiter assigns to it.
//!
//! ```no_run
//! use recruiter_common::enqueue::Workable;
//! use recruiter_worker::{Context, Done, Executable, NotDone, Worker};
//!
//! #[derive(serde::Serialize, serde::Deserialize)]
//! struct Greet {
//!     name: String,
//! }
//!
//! impl Workable for Greet {
//!     const CLASS: &'static str = "Greet";
//! }
//!
//! impl Executable for Greet {
//!     type State = ();
//!
//!     async fn execute(&self, _state: &(), _job: &Context) -> Result<Done, NotDone> {
//!         Done::with(format!("hello, {}", self.name))
//!     }
//! }
//!
//! #[tokio::main]
//! async fn main() -> anyhow::Result<()> {
//!     Worker::new().register::<Greet>(())?.main().await
//! }
//! ```
//!
//! [`Worker::main`] is a whole process: it reads flags, starts logging, handles signals and returns an exit code. Use [`Worker::run`] in a
//! process that does more than run jobs.
//!
//! The stock worker, `recruiter-worker`, is this library with the programs of a workables file.
//!
//! | module | what it is |
//! |---|---|
//! | `workable`, `context`, `event` | what an application implements and receives |
//! | `registry` | the classes of a worker |
//! | `config`, `process` | flags, and a worker as a process |
//! | `engine` | takes jobs, runs them, records how they end |
//! | `programs` | the stock worker's workables |
//! | `panics` | calls into code of users |

mod config;
mod context;
mod engine;
mod event;
mod panics;
mod process;
mod programs;
mod registry;
mod workable;

use std::sync::Arc;

use recruiter_common::{
    exit::Exit,
    retry_policy::{InvalidPolicy, Parameters, RetryPolicies, RetryPolicy},
    roster::Place,
    service::Watchdog,
    shutdown::Shutdown,
    store::{ConnectArgs, Store},
    task::as_task,
};
use tokio_util::task::AbortOnDropHandle;

pub use crate::{
    config::WorkerArgs,
    context::{Cancellation, Context, Item},
    event::WorkerEvent,
    process::{EXIT_CODES, ProcessArgs},
    programs::stock,
    registry::DuplicateClass,
    workable::{BlockingExecutable, Done, Executable, NotDone},
};
use crate::{
    engine::{dependencies::Dependencies, memory},
    event::Listener,
    programs::{builtin, files, orphans},
    registry::{Asynchronous, Blocking, Registry},
};

/// How long a process waits after a second signal, for killing programs and writing to MongoDB.
pub const ABORT_WITHIN: std::time::Duration = std::time::Duration::from_secs(2);

/// A worker that does not run yet: its classes, its retry policies and its event listener.
#[derive(Default)]
pub struct Worker {
    registry: Registry,
    policies: RetryPolicies,
    listener: Option<Arc<Listener>>,
    has_programs: bool,
    about: Option<String>,
}

impl Worker {
    /// A worker without classes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a class, with the state that all its executions share.
    ///
    /// # Errors
    /// When the worker has the class already.
    pub fn register<W: Executable>(mut self, state: impl Into<Arc<W::State>>) -> Result<Self, DuplicateClass> {
        self.registry.add(W::CLASS, Arc::new(Asynchronous::<W>(state.into())))?;
        Ok(self)
    }

    /// Adds a class that blocks its thread.
    ///
    /// # Errors
    /// When the worker has the class already.
    pub fn register_blocking<W: BlockingExecutable>(mut self, state: impl Into<Arc<W::State>>) -> Result<Self, DuplicateClass> {
        self.registry.add(W::CLASS, Arc::new(Blocking::<W>(state.into())))?;
        Ok(self)
    }

    /// Adds the programs of a workables file, each as a class.
    ///
    /// # Errors
    /// When the worker has one of the classes already.
    pub fn register_programs(mut self, programs: stock::Programs) -> Result<Self, DuplicateClass> {
        self.has_programs = true;
        for (class, program) in programs.0 {
            self.registry.add(&class, Arc::new(program))?;
        }
        Ok(self)
    }

    /// Adds classes for trying and testing: `noop`, `sleep`, `fail`, `panic`, `exit-abruptly`, `leak`.
    ///
    /// # Errors
    /// When the worker has one of the classes already.
    pub fn register_builtins(mut self) -> Result<Self, DuplicateClass> {
        for (class, handler) in builtin::all() {
            self.registry.add(class, handler)?;
        }
        Ok(self)
    }

    /// Adds a custom retry policy, which `decode` makes from its stored parameters. A worker leaves jobs with an unknown policy to workers
    /// that know it. A job whose policy parameters `decode` refuses is archived as malformed without being run.
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

    /// Calls `listener` with every event of a job in this worker. It should be quick and must not panic.
    #[must_use]
    pub fn listen(mut self, listener: impl Fn(&WorkerEvent<'_>) + Send + Sync + 'static) -> Self {
        self.listener = Some(Arc::new(listener));
        self
    }

    /// Runs jobs until a stop is requested ([`Exit::Success`]) or the memory limit is reached ([`Exit::MemoryLimit`]).
    ///
    /// While MongoDB is away, the worker waits for it.
    ///
    /// # Errors
    /// When the arguments contradict each other, no class is registered, or MongoDB cannot be used at the start. Also when a task of the
    /// worker panics: its jobs are then rescued as after the death of a process.
    pub async fn run(self, connect: &ConnectArgs, mut args: WorkerArgs, mut shutdown: Shutdown) -> anyhow::Result<Exit> {
        args.validate()?;
        if self.registry.classes().next().is_none() {
            return Err(anyhow::anyhow!("this worker has no classes: name programs with --config, or try --builtins").context(Exit::Usage));
        }
        if self.has_programs {
            files::raise_limit();
            args.concurrency = files::enough_for(args.concurrency);
        }
        if args.memory_limit.is_some() {
            // Opens the file that it reads, while there are free file descriptors.
            let _ = memory::resident();
        }
        let store = tokio::select! {
            connected = Store::connect(connect, "recruiter-worker") => connected?,
            () = shutdown.requested() => return Ok(Exit::Success),
        };
        let heartbeat_store = store.with_own_connections("recruiter-worker-heartbeat")?;
        let Self { registry, policies, listener, has_programs, about: _ } = self;
        let reaping = (has_programs && orphans::are_inherited()).then(|| AbortOnDropHandle::new(tokio::spawn(orphans::reap())));
        let (place, watchdog) = (Place::of_this_process()?, Watchdog::of_this_process());
        let dependencies = Arc::new(Dependencies { store, heartbeat_store, args, place, registry, policies, listener, watchdog });
        let exit = as_task(engine::run(dependencies, shutdown)).await;
        drop(reaping);
        exit
    }
}
