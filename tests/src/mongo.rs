//! A real MongoDB for each test process, and a database of its own for each test.

use std::{
    env, fs,
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::PathBuf,
    sync::LazyLock,
    thread,
    time::Duration,
};

use bson::{Document, doc, oid::ObjectId};
use mongodb::{Client, Collection, Database, options::ClientOptions};
use recruiter::dev::embedded::{self, EmbeddedMongo, Options};
use tokio::sync::OnceCell;

/// Names a replica set to test on, instead of the embedded mongod; it needs `enableTestCommands=1`, and
/// `authSource` in the URI if it has credentials.
pub const URI_VARIABLE: &str = "RECRUITER_TEST_MONGODB_URI";
/// The user of [`mongod_with_access_control`].
pub const USER: &str = "root";
/// Its password, which should be seen nowhere.
pub const PASSWORD: &str = "never-to-be-logged";

const PREFIX: &str = "rec_test_";
/// After this time a test database is a leftover of a crashed run: no test takes so long.
const LEFTOVER_AFTER: Duration = Duration::from_secs(3600);

/// The mongod to run, fetched if it must be.
pub fn mongod() -> PathBuf {
    static FOUND: LazyLock<PathBuf> = LazyLock::new(|| {
        let progress = |line: &str| writeln!(io::stderr(), "{line}").unwrap_or_default();
        embedded::find_or_fetch(None, &progress).expect("the tests need a mongod")
    });
    FOUND.clone()
}

/// Options of a mongod with test commands whose data directory is removed with it.
pub fn temporary() -> Options {
    let dir = tempfile::Builder::new().prefix("recruiter-tests-").tempdir().expect("the temporary directory is writable");
    Options { test_commands: true, temporary: true, ..Options::new(mongod(), dir.keep()) }
}

/// A mongod of its own for a test that kills, freezes or restarts it, or that needs fail points for itself.
pub async fn own_mongod() -> EmbeddedMongo {
    EmbeddedMongo::start(temporary()).await.expect("mongod starts")
}

/// A mongod of its own without a replica set.
pub async fn standalone_mongod() -> EmbeddedMongo {
    EmbeddedMongo::start(Options { standalone: true, ..temporary() }).await.expect("mongod starts")
}

/// A mongod of its own with access control (`--auth`), and the URI of its only user, [`USER`], who may do everything.
pub async fn mongod_with_access_control() -> (EmbeddedMongo, String) {
    let mut options = temporary();
    let key = options.data_dir.join("key");
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&key).expect("the data directory is new");
    file.write_all(b"the members of a replica set know each other by this").expect("the data directory is writable");
    options.arguments = vec!["--auth".to_owned(), format!("--keyFile={}", key.display())];
    let mongo = EmbeddedMongo::start(options).await.expect("mongod starts");
    // The first user may be made by whoever is on the same host.
    let made = doc! { "createUser": USER, "pwd": PASSWORD, "roles": ["root"] };
    client(&mongo.uri()).await.database("admin").run_command(made).await.expect("there is no user yet");
    let uri = mongo.uri().replacen("://", &format!("://{USER}:{PASSWORD}@"), 1) + "&authSource=admin";
    (mongo, uri)
}

/// An empty database, dropped when this value is. Its client belongs to the runtime of the test that made it.
#[derive(Debug)]
pub struct TestDatabase {
    uri: String,
    database: Database,
}

impl TestDatabase {
    /// A database on the MongoDB that all tests of this process share.
    pub async fn new() -> Self {
        Self::on(shared().await).await
    }

    /// A database on another MongoDB, for instance a test's [`own_mongod`].
    pub async fn on(server: &str) -> Self {
        let name = format!("{PREFIX}{}", ObjectId::new());
        let uri = with_database(server, &name);
        let database = client(&uri).await.database(&name);
        Self { uri, database }
    }

    /// Where processes connect; names this database.
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

    /// A collection as bare documents: the way for factories to make documents of any age, and for tests to look at them.
    #[expect(clippy::disallowed_methods, reason = "tests look beneath the operations of common::store")]
    pub fn raw(&self, collection: &str) -> Collection<Document> {
        self.database.collection(collection)
    }
}

impl Drop for TestDatabase {
    fn drop(&mut self) {
        // A server that the test has killed or frozen takes its databases with it; one with an open transaction of a process
        // that was killed would make us wait for a minute.
        let _ = command_at_once(&self.uri, self.name(), doc! { "dropDatabase": 1, "maxTimeMS": 2_000 });
    }
}

/// The URI of the MongoDB that all tests of this process share. It ends with the process, by its watchdog.
async fn shared() -> &'static str {
    static SHARED: OnceCell<(String, Option<EmbeddedMongo>)> = OnceCell::const_new();
    let (uri, _) = SHARED
        .get_or_init(async || match env::var(URI_VARIABLE) {
            Ok(uri) => {
                sweep(&uri).await;
                (uri, None)
            }
            Err(_) => {
                let mongo = own_mongod().await;
                (mongo.uri(), Some(mongo))
            }
        })
        .await;
    uri
}

/// Drops what crashed runs left on a MongoDB that outlives the tests.
async fn sweep(uri: &str) {
    let client = client(uri).await;
    let now = ObjectId::new().timestamp().timestamp_millis();
    for name in client.list_database_names().await.expect("the databases can be listed") {
        let Some(made) = name.strip_prefix(PREFIX).and_then(|id| ObjectId::parse_str(id).ok()) else { continue };
        if u128::try_from(now - made.timestamp().timestamp_millis()).is_ok_and(|age| age > LEFTOVER_AFTER.as_millis()) {
            client.database(&name).drop().await.expect("a leftover can be dropped");
        }
    }
}

fn with_database(uri: &str, name: &str) -> String {
    let (scheme, rest) = uri.split_once("://").expect("a MongoDB URI has a scheme");
    let (hosts_and_path, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (hosts, _) = hosts_and_path.split_once('/').unwrap_or((hosts_and_path, ""));
    format!("{scheme}://{hosts}/{name}?{query}")
}

async fn client(uri: &str) -> Client {
    let mut options = ClientOptions::parse(uri).await.expect("the URI is good");
    options.server_selection_timeout = Some(Duration::from_secs(5));
    Client::with_options(options).expect("the options are good")
}

/// Runs one command where nothing can be awaited, as in `drop`: on a thread and a runtime of its own.
pub(crate) fn command_at_once(uri: &str, database: &str, command: Document) -> mongodb::error::Result<Document> {
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be made");
        runtime.block_on(async { client(uri).await.database(database).run_command(command).await })
    };
    thread::scope(|scope| scope.spawn(run).join().expect("the thread did not panic"))
}
