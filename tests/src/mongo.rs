//! A real MongoDB for each test process, and a database of its own for each test.

use std::{
    env, fs,
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::LazyLock,
    thread,
    time::Duration,
};

use bson::{Bson, Document, doc, oid::ObjectId};
use futures_util::TryStreamExt as _;
use mongodb::{Client, Collection, Database, options::ClientOptions};
use nix::sys::{
    resource::{Resource, getrlimit},
    statvfs::statvfs,
};
use procfs::{Current as _, Meminfo};
use recruiter_common::ConnectArgs;
use recruiter_dev::embedded::{self, EmbeddedMongo, Options};
use tokio::sync::OnceCell;

use crate::wait::{SOON, wait_for, wait_until};

/// Names the variable with the connection string of a replica set for the tests, instead of the embedded mongod. It
/// needs `enableTestCommands=1`, and `authSource` in the connection string if it has credentials.
pub const URI_VARIABLE: &str = "RECRUITER_TEST_MONGODB_URI";
/// The user of [`mongod_with_access_control`].
pub const USER: &str = "root";
/// Its password, which must appear in no output.
pub const PASSWORD: &str = "never-to-be-logged";

/// The options by which MongoDB closes the files of a dropped database within seconds, for a low limit of open files. By default it keeps them
/// open for five minutes, and the databases of all tests in that time need thousands.
const CLOSE_DROPPED: [&str; 4] = ["--setParameter", "minSnapshotHistoryWindowInSeconds=1", "--syncdelay", "3"];
/// `tests/run` has the same number.
const FEW_FILES: u64 = 4_096;
/// A file system in memory.
const SHARED_MEMORY: &str = "/dev/shm";
/// Bytes that are free in memory when the tests may keep their databases there, several times what they need at a time.
const PLENTY: u64 = 12 << 30;
const PREFIX: &str = "rec_test_";
/// A test database older than this is a leftover of a crashed run, because no test takes so long.
const LEFTOVER_AFTER: Duration = Duration::from_secs(3600);
/// The time within which a server must be found.
pub(crate) const SELECTION_LIMIT: Duration = Duration::from_secs(30);
/// The same at the end of a test, whose server may be gone for good.
const LAST_SELECTION_LIMIT: Duration = Duration::from_secs(5);

/// The mongod to run, downloaded if necessary.
pub fn mongod() -> PathBuf {
    static FOUND: LazyLock<PathBuf> = LazyLock::new(|| {
        let progress = |line: &str| writeln!(io::stderr(), "{line}").unwrap_or_default();
        embedded::find_or_fetch(None, &progress).expect("the tests need a mongod")
    });
    FOUND.clone()
}

/// Options of a mongod with test commands, whose data directory is deleted when it ends. It is in memory if there is plenty: a disk that has
/// to confirm each write is the slowest part of many tests, and no test ends the machine.
pub fn temporary() -> Options {
    static IN_MEMORY: LazyLock<Option<&Path>> = LazyLock::new(|| {
        let free = Meminfo::current().ok()?.mem_available?;
        let shared = statvfs(SHARED_MEMORY).ok()?;
        let room = shared.blocks_available() * shared.fragment_size();
        (free.min(room) >= PLENTY).then_some(Path::new(SHARED_MEMORY))
    });
    let parent = IN_MEMORY.map_or_else(env::temp_dir, Path::to_owned);
    Options { test_commands: true, ..Options::temporary_in(&parent, mongod()).expect("the directory is writable") }
}

/// A separate mongod for a test that kills, freezes or restarts it, or that needs fail points of its own.
pub async fn own_mongod() -> EmbeddedMongo {
    EmbeddedMongo::start(temporary()).await.expect("mongod starts")
}

/// A separate mongod without a replica set.
pub async fn standalone_mongod() -> EmbeddedMongo {
    EmbeddedMongo::start(Options { standalone: true, ..temporary() }).await.expect("mongod starts")
}

/// A separate mongod with access control (`--auth`), and the connection string of its only user, [`USER`], who has all
/// rights.
pub async fn mongod_with_access_control() -> (EmbeddedMongo, String) {
    let mut options = temporary();
    let key = options.data_dir.join("key");
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&key).expect("the data directory is new");
    file.write_all(b"the members of a replica set know each other by this").expect("the data directory is writable");
    options.arguments = vec!["--auth".to_owned(), format!("--keyFile={}", key.display())];
    let mongo = EmbeddedMongo::start(options).await.expect("mongod starts");
    // MongoDB lets a client on the same host create the first user.
    let made = doc! { "createUser": USER, "pwd": PASSWORD, "roles": ["root"] };
    client(&mongo.uri(), SELECTION_LIMIT).await.database("admin").run_command(made).await.expect("there is no user yet");
    let uri = mongo.uri().replacen("://", &format!("://{USER}:{PASSWORD}@"), 1) + "&authSource=admin";
    (mongo, uri)
}

/// An empty database, dropped with this value. Its client belongs to the runtime of the test that created it.
#[derive(Debug)]
pub struct TestDatabase {
    uri: String,
    database: Database,
    /// The server of this database alone, which ends after it.
    _server: Option<EmbeddedMongo>,
}

impl TestDatabase {
    /// Creates a database on the MongoDB that all tests of this process share.
    pub async fn new() -> Self {
        Self::on(shared().await).await
    }

    /// Creates a database on a MongoDB of its own, which ends with it.
    pub async fn of_its_own() -> Self {
        let server = own_mongod().await;
        let mut database = Self::on(&server.uri()).await;
        database._server = Some(server);
        database
    }

    /// Creates a database on a MongoDB of its own, with access control. Its connection string has the credentials of [`USER`].
    pub async fn with_access_control() -> Self {
        Self::with_access_control_named(&format!("{PREFIX}{}", ObjectId::new())).await
    }

    /// The same with this name.
    pub async fn with_access_control_named(name: &str) -> Self {
        let (server, uri) = mongod_with_access_control().await;
        let mut database = Self::named(&uri, name).await;
        database._server = Some(server);
        database
    }

    /// Creates a database on another MongoDB, for example a test's [`own_mongod`].
    pub async fn on(server: &str) -> Self {
        Self::named(server, &format!("{PREFIX}{}", ObjectId::new())).await
    }

    /// Creates a database of this name on a MongoDB of a test's own.
    pub async fn named(server: &str, name: &str) -> Self {
        let uri = ConnectArgs::to(server).database(&in_uri(name)).uri;
        let database = client(&uri, SELECTION_LIMIT).await.database(name);
        Self { uri, database, _server: None }
    }

    /// The connection string for processes, with this database.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// The name of this database.
    pub fn name(&self) -> &str {
        self.database.name()
    }

    /// The database itself.
    pub fn database(&self) -> &Database {
        &self.database
    }

    /// A collection of plain documents, for factories that create documents of any age and for tests that read them.
    #[expect(clippy::disallowed_methods, reason = "tests look beneath the operations of common::store")]
    pub fn raw(&self, collection: &str) -> Collection<Document> {
        self.database.collection(collection)
    }

    /// Number of documents in a collection that match.
    ///
    /// # Panics
    /// When MongoDB does not answer.
    pub async fn count(&self, collection: &str, filter: Document) -> u64 {
        self.raw(collection).count_documents(filter).await.expect("MongoDB answers")
    }

    /// The documents in a collection that match.
    ///
    /// # Panics
    /// When MongoDB does not answer.
    pub async fn all(&self, collection: &str, filter: Document) -> Vec<Document> {
        self.raw(collection).find(filter).await.expect("MongoDB answers").try_collect().await.expect("MongoDB answers")
    }

    /// The only document in a collection that matches.
    ///
    /// # Panics
    /// When there is another number of them.
    pub async fn only(&self, collection: &str, filter: Document) -> Document {
        assert_eq!(self.count(collection, filter.clone()).await, 1, "{collection} {filter}");
        self.raw(collection).find_one(filter).await.expect("MongoDB answers").expect("it was counted")
    }

    /// Waits until this number of documents in a collection match.
    #[track_caller]
    pub fn until(&self, collection: &str, filter: Document, count: u64, what: &str) -> impl Future<Output = ()> {
        wait_until(SOON, what, async move || self.count(collection, filter.clone()).await == count)
    }

    /// Waits until a job is archived, and returns it.
    #[track_caller]
    pub fn archived(&self, job: impl Into<Bson>) -> impl Future<Output = Document> {
        let this = doc! { "_id": job };
        let find = async move || self.raw("archived").find_one(this.clone()).await.expect("MongoDB answers");
        wait_for(SOON, "the job is archived", find)
    }

    /// Limits the duration of a transaction on this MongoDB, one of a test's own. The transaction that a killed process has left open
    /// keeps its locks until then, by default for a minute.
    ///
    /// # Panics
    /// When MongoDB does not answer.
    pub async fn limit_transactions(&self, seconds: i32) {
        let limit = doc! { "setParameter": 1, "transactionLifetimeLimitSeconds": seconds };
        self.database.client().database("admin").run_command(limit).await.expect("MongoDB answers");
    }

    /// The number of open cursors on the collections of hints to workers.
    ///
    /// # Panics
    /// When MongoDB does not answer.
    pub async fn tails(&self) -> usize {
        let operations = doc! { "$currentOp": { "allUsers": true, "idleCursors": true } };
        let tails = doc! { "$match": { "ns": { "$regex": format!("^{}\\.signals_", self.name()) } } };
        let found = self.database.client().database("admin").aggregate([operations, tails]).await.expect("MongoDB answers");
        found.try_collect::<Vec<_>>().await.expect("MongoDB answers").len()
    }
}

impl Drop for TestDatabase {
    fn drop(&mut self) {
        // A server that the test has killed or frozen is discarded with its databases. A server with an open
        // transaction of a killed process would delay this by a minute, hence the time limit.
        let _ = command_at_once(&self.uri, self.name(), doc! { "dropDatabase": 1, "maxTimeMS": 2_000 }, LAST_SELECTION_LIMIT);
    }
}

/// A name in a connection string.
pub fn in_uri(name: &str) -> String {
    let part =
        |byte: u8| if byte.is_ascii_alphanumeric() || b"_-".contains(&byte) { char::from(byte).into() } else { format!("%{byte:02X}") };
    name.bytes().map(part).collect()
}

/// The connection string of the MongoDB that all tests of this process share. Its watchdog ends it with the process.
async fn shared() -> &'static str {
    static SHARED: OnceCell<(String, Option<EmbeddedMongo>)> = OnceCell::const_new();
    let (uri, _) = SHARED
        .get_or_init(async || match env::var(URI_VARIABLE) {
            Ok(uri) => {
                sweep(&uri).await;
                (uri, None)
            }
            Err(_) => {
                let (_, most_files) = getrlimit(Resource::RLIMIT_NOFILE).expect("each process has a limit");
                let arguments = if most_files < FEW_FILES { CLOSE_DROPPED.map(str::to_owned).to_vec() } else { Vec::new() };
                let mongo = EmbeddedMongo::start(Options { arguments, ..temporary() }).await.expect("mongod starts");
                (mongo.uri(), Some(mongo))
            }
        })
        .await;
    uri
}

/// Drops databases of crashed runs on a MongoDB that outlives the tests.
async fn sweep(uri: &str) {
    let client = client(uri, SELECTION_LIMIT).await;
    let now = ObjectId::new().timestamp().timestamp_millis();
    for name in client.list_database_names().await.expect("the databases can be listed") {
        let Some(made) = name.strip_prefix(PREFIX).and_then(|id| ObjectId::parse_str(id).ok()) else { continue };
        if u128::try_from(now - made.timestamp().timestamp_millis()).is_ok_and(|age| age > LEFTOVER_AFTER.as_millis()) {
            client.database(&name).drop().await.expect("a leftover can be dropped");
        }
    }
}

/// A client of a test, whose connections outlast a machine that stands still, unless the connection string says otherwise.
pub(crate) async fn client(uri: &str, selection_limit: Duration) -> Client {
    let mut options = ClientOptions::parse(uri).await.expect("the URI is good");
    options.server_selection_timeout = Some(selection_limit);
    options.connect_timeout.get_or_insert(SOON);
    Client::with_options(options).expect("the options are good")
}

/// Runs one command where nothing can be awaited, as in `drop`: on a thread and a runtime of its own.
pub(crate) fn command_at_once(uri: &str, database: &str, command: Document, within: Duration) -> mongodb::error::Result<Document> {
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be made");
        runtime.block_on(async { client(uri, within).await.database(database).run_command(command).await })
    };
    thread::scope(|scope| scope.spawn(run).join().expect("the thread did not panic"))
}
