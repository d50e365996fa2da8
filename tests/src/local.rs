//! A recruiter and workers of the library inside the test's own process, for tests that need workables of their own.

use clap::Parser;
use recruiter::run::RunArgs;
use recruiter_common::{
    ConnectArgs, Enqueued, JobId,
    exit::Exit,
    shutdown::{Shutdown, Trigger},
    store::Store,
};
use recruiter_worker::{Worker, WorkerArgs};
use tokio::task::JoinHandle;

use crate::{mongo::TestDatabase, proxy::Proxy, wait::SOON};

/// Flags as a person would write them.
#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    worker: WorkerArgs,
}

#[derive(Parser)]
struct RecruiterFlags {
    #[command(flatten)]
    run: RunArgs,
}

/// Connection arguments for a test's database.
pub fn connect_args(database: &TestDatabase) -> ConnectArgs {
    ConnectArgs { connect_timeout: Some(SOON), ..ConnectArgs::to(database.uri()) }
}

/// The store of a test's database. Its connections outlast a machine that stands still, unless the connection string says otherwise.
pub async fn store(database: &TestDatabase) -> Store {
    let mut uri = database.uri().to_owned();
    if !uri.contains("connectTimeoutMS") {
        uri += &format!("&connectTimeoutMS={}", SOON.as_millis());
    }
    Store::connect(&ConnectArgs { uri, ..connect_args(database) }, "test").await.expect("the test's MongoDB is there")
}

/// A database of the shared MongoDB, with its schema, and its store.
pub async fn prepared() -> (TestDatabase, Store) {
    let database = TestDatabase::new().await;
    let store = store(&database).await;
    (database, store)
}

/// The store of a test's database behind a network that can be broken.
pub async fn store_behind_a_proxy(database: &TestDatabase) -> (Proxy, Store) {
    let proxy = Proxy::before(database.uri()).await;
    let connect = ConnectArgs { uri: proxy.uri(database.name()), ..connect_args(database) };
    (proxy, Store::connect(&connect, "test").await.expect("the test's MongoDB is there"))
}

/// The ids of enqueued jobs.
pub fn ids(enqueued: Vec<Enqueued>) -> Vec<JobId> {
    enqueued.into_iter().map(|job| job.id).collect()
}

/// Stops them, one after the other.
pub async fn stop(processes: impl IntoIterator<Item = Local>) {
    for process in processes {
        process.stop().await;
    }
}

/// A process's main function, running in this process until it is stopped.
#[derive(Debug)]
pub struct Local {
    trigger: Trigger,
    task: JoinHandle<anyhow::Result<Exit>>,
}

impl Local {
    /// Starts a recruiter.
    pub fn recruiter(database: &TestDatabase, flags: &[&str]) -> Self {
        Self::recruiter_over(connect_args(database), flags)
    }

    /// Starts a recruiter over a connection that the test has prepared.
    pub fn recruiter_over(connect: ConnectArgs, flags: &[&str]) -> Self {
        let args = RecruiterFlags::parse_from([&["recruiter"], flags].concat()).run;
        let (trigger, shutdown) = Shutdown::manual();
        Self::spawn(trigger, async move { recruiter::run::run(args, &connect, shutdown).await.map(|()| Exit::Success) })
    }

    /// Starts a worker with these classes.
    pub fn worker(database: &TestDatabase, worker: Worker, flags: &[&str]) -> Self {
        Self::worker_over(connect_args(database), worker, flags)
    }

    /// Starts a worker with a connection that the test configures.
    pub fn worker_over(connect: ConnectArgs, worker: Worker, flags: &[&str]) -> Self {
        let args = Flags::parse_from([&["worker"], flags].concat()).worker;
        let (trigger, shutdown) = Shutdown::manual();
        Self::spawn(trigger, async move { Ok(worker.run(connect, args, shutdown).await?.into()) })
    }

    /// Starts a recruiter and a worker with these classes. The worker is the first to be stopped.
    pub fn pair(database: &TestDatabase, recruiter_flags: &[&str], worker: Worker, worker_flags: &[&str]) -> [Self; 2] {
        let recruiter = Self::recruiter(database, recruiter_flags);
        [Self::worker(database, worker, worker_flags), recruiter]
    }

    /// Prints the error with which it ends: a test that waits for what it would have done does not look at the task.
    #[expect(clippy::print_stderr, reason = "for the output of the test")]
    fn spawn(trigger: Trigger, main: impl Future<Output = anyhow::Result<Exit>> + Send + 'static) -> Self {
        let task = tokio::spawn(async {
            let ended = main.await;
            let _ = ended.as_ref().inspect_err(|error| eprintln!("a process within the test ended: {error:#}"));
            ended
        });
        Self { trigger, task }
    }

    /// Requests a stop, without waiting.
    pub fn ask_to_stop(&self) {
        self.trigger.drain();
    }

    /// Stops it and returns its exit code.
    pub async fn stop(self) -> Exit {
        self.trigger.drain();
        self.task.await.expect("it does not panic").expect("it stops without an error")
    }

    /// Waits until it ends by itself.
    ///
    /// # Errors
    /// The error with which it ended.
    pub async fn ended(self) -> anyhow::Result<Exit> {
        self.task.await.expect("it does not panic")
    }

    /// Ends it as a crash would: nothing more is written.
    pub async fn crash(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}
