//! Starts, initiates and stops one mongod.

use std::{
    env, fs, io,
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use bson::{Bson, doc};
use mongodb::{
    Client, Database,
    error::{Error, ErrorKind},
    options::{ClientOptions, ServerAddress},
};
use nix::sys::signal::Signal;
use tokio::time::{interval, timeout};

use super::{
    super::watchdog::{Watched, how},
    EmbeddedError,
};

/// Maximum time from the start until the mongod is primary. A new one needs a second; one that was killed first replays
/// its journal.
const START_WITHIN: Duration = Duration::from_secs(60);
/// How often a starting mongod is checked.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How many times a start without a given port is tried, when another process takes the chosen port first.
const PORT_ATTEMPTS: u32 = 5;
/// The option of mongod for the size of its cache, in GB.
const CACHE: &str = "--wiredTigerCacheSizeGB";
/// The option of mongod for the size of its oplog, in MB.
const OPLOG: &str = "--oplogSize";

/// How to run the mongod. [`Options::new`] has the defaults of a development database.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The program, from [`find_or_fetch`](super::find_or_fetch).
    pub mongod: PathBuf,
    /// Directory of its data and its log; created when missing. The data of an earlier run is reused, even on another
    /// port.
    pub data_dir: PathBuf,
    /// The port on 127.0.0.1; `None` takes the one of the last run with this data if it is free, otherwise another one.
    pub port: Option<u16>,
    /// Enables fail points and other test commands (`enableTestCommands`).
    pub test_commands: bool,
    /// The data directory is deleted when the mongod ends, and the mongod is ended by force. The whole directory is
    /// deleted: it must contain nothing else.
    pub temporary: bool,
    /// Runs without a replica set, to test that Recruiter refuses such a server.
    pub standalone: bool,
    /// The start is complete as soon as the mongod listens. Its owner initiates the replica set, which has several
    /// members.
    pub member: bool,
    /// Further command-line arguments of mongod. A cache size among them replaces the default.
    pub arguments: Vec<String>,
    /// Additional environment variables of mongod.
    pub environment: Vec<(String, String)>,
}

impl Options {
    /// A replica set on a free port that keeps its data in `data_dir`, without test commands.
    pub fn new(mongod: impl Into<PathBuf>, data_dir: impl Into<PathBuf>) -> Self {
        Self { mongod: mongod.into(), data_dir: data_dir.into(), ..Self::default() }
    }

    /// The same in a new temporary directory, which is deleted when the mongod ends.
    pub fn temporary(mongod: impl Into<PathBuf>) -> Result<Self, EmbeddedError> {
        Self::temporary_in(&env::temp_dir(), mongod)
    }

    /// The same in a new directory within this one.
    pub fn temporary_in(parent: &Path, mongod: impl Into<PathBuf>) -> Result<Self, EmbeddedError> {
        let made = tempfile::Builder::new().prefix("recruiter-mongod-").tempdir_in(parent);
        let dir = made.map_err(|source| EmbeddedError::DataDir { path: parent.to_owned(), source })?;
        Ok(Self { temporary: true, ..Self::new(mongod, dir.keep()) })
    }

    fn log(&self) -> PathBuf {
        self.data_dir.join("mongod.log")
    }

    /// The file with the port of the last run.
    fn port_file(&self) -> PathBuf {
        self.data_dir.join("recruiter-port")
    }

    /// The port of the last run, if it is free now.
    fn last_port(&self) -> Option<u16> {
        let port = fs::read_to_string(self.port_file()).ok()?.trim().parse().ok().filter(|port| *port > 0)?;
        TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok().then_some(port)
    }

    /// Makes the paths absolute and creates the data directory.
    fn settle(&mut self) -> io::Result<()> {
        fs::create_dir_all(&self.data_dir)?;
        self.data_dir = self.data_dir.canonicalize()?;
        self.mongod = std::path::absolute(&self.mongod)?;
        Ok(())
    }

    fn spawn(&self, port: u16, log: fs::File) -> Result<Watched, EmbeddedError> {
        let mut arguments: Vec<String> = [
            ["--bind_ip", "127.0.0.1"],
            ["--port", &port.to_string()],
            ["--setParameter", "diagnosticDataCollectionEnabled=false"],
            ["--setParameter", if self.test_commands { "enableTestCommands=1" } else { "enableTestCommands=0" }],
        ]
        .as_flattened()
        .iter()
        .map(ToString::to_string)
        .collect();
        arguments.extend(["--nounixsocket".into(), format!("--dbpath={}", self.data_dir.display())]);
        if !self.arguments.iter().any(|given| given.starts_with(CACHE)) {
            arguments.extend([CACHE, "0.25"].map(str::to_owned));
        }
        if !self.standalone {
            arguments.push("--replSet=rs0".into());
            if !self.arguments.iter().any(|given| given.starts_with(OPLOG)) {
                arguments.push(format!("{OPLOG}=256"));
            }
        }
        arguments.extend_from_slice(&self.arguments);
        let mut mongod = Command::new(&self.mongod);
        mongod.args(arguments).envs(self.environment.iter().map(|(name, value)| (name, value)));
        Watched::spawn(&mongod, log, self.temporary.then_some(&self.data_dir))
            .map_err(|source| EmbeddedError::System { operation: "run `sh`, which watches over mongod", source })
    }
}

/// A running mongod, the single node of the replica set `rs0`. It ends on [`stop`](Self::stop), when this value is
/// dropped, and when this process ends for any reason. A Ctrl-C in the terminal does not reach it, so its owner can use
/// it until the owner ends.
#[derive(Debug)]
pub struct EmbeddedMongo {
    options: Options,
    port: u16,
    process: Option<Watched>,
}

impl EmbeddedMongo {
    /// Starts a mongod and waits, for a minute at most, until it is primary (a standalone or a member: until it
    /// listens). Dropping the future ends the mongod.
    pub async fn start(mut options: Options) -> Result<Self, EmbeddedError> {
        options.settle().map_err(|source| EmbeddedError::DataDir { path: options.data_dir.clone(), source })?;
        let mut attempts = if options.port.is_some() { 1 } else { PORT_ATTEMPTS };
        let mut last_port = options.last_port();
        let mut this = Self { options, port: 0, process: None };
        loop {
            this.port = this.options.port.or(last_port.take()).map_or_else(free_port, Ok)?;
            attempts -= 1;
            match this.launch().await {
                Err(EmbeddedError::PortTaken(_)) if attempts > 0 => {}
                done => {
                    done?;
                    let noted = fs::write(this.options.port_file(), format!("{}\n", this.port));
                    noted.map_err(|source| EmbeddedError::DataDir { path: this.options.data_dir.clone(), source })?;
                    return Ok(this);
                }
            }
        }
    }

    async fn launch(&mut self) -> Result<(), EmbeddedError> {
        let in_data_dir = |source| EmbeddedError::DataDir { path: self.options.data_dir.clone(), source };
        // A file with a process id belongs to a mongod that is running or did not end cleanly: keep its log.
        let keep_log = fs::metadata(self.options.data_dir.join("mongod.lock")).is_ok_and(|lock| lock.len() > 0);
        let log = self.options.log();
        if !keep_log {
            fs::write(&log, "").map_err(in_data_dir)?;
        }
        let file = fs::OpenOptions::new().append(true).create(true).open(&log).map_err(in_data_dir)?;
        let earlier = file.metadata().map_err(in_data_dir)?.len();
        let mut process = self.options.spawn(self.port, file)?;

        let mut refusal = None;
        let started = async {
            self.listening(&mut process, usize::try_from(earlier).unwrap_or(usize::MAX)).await?;
            if !self.options.standalone && !self.options.member {
                self.primary(&mut refusal).await;
            }
            Ok(())
        };
        match timeout(START_WITHIN, started).await {
            Ok(result) => result?,
            Err(_) => return Err(EmbeddedError::NotPrimary { waited: START_WITHIN, source: refusal }),
        }
        self.process = Some(process);
        Ok(())
    }

    /// Waits for "Waiting for connections" in the log of this mongod, after its first `earlier` bytes. Connecting to
    /// the port proves less: if this mongod did not get the port, another one may answer.
    async fn listening(&self, process: &mut Watched, earlier: usize) -> Result<(), EmbeddedError> {
        let mut look = interval(LOOK_EVERY);
        loop {
            look.tick().await;
            let running = process.is_running();
            let log = fs::read(self.options.log()).unwrap_or_default();
            let log = String::from_utf8_lossy(log.get(earlier..).unwrap_or_default());
            if !running {
                return Err(self.cause_of_death(&log));
            }
            if log.contains(r#""id":23016,"#) {
                return Ok(());
            }
        }
    }

    fn cause_of_death(&self, log: &str) -> EmbeddedError {
        if log.contains("Address already in use") {
            EmbeddedError::PortTaken(self.port)
        } else if log.contains("DBPathInUse") {
            EmbeddedError::DataDirInUse(self.options.data_dir.clone())
        } else {
            EmbeddedError::Died { last_words: last_words(log) }
        }
    }

    /// Initiates the replica set as far as needed, and waits until this node is primary. A refused command is tried
    /// again, and its error is kept in `refusal`.
    async fn primary(&self, refusal: &mut Option<Error>) {
        let address = ServerAddress::Tcp { host: Ipv4Addr::LOCALHOST.to_string(), port: Some(self.port) };
        let options = ClientOptions::builder()
            .hosts(vec![address.clone()])
            .direct_connection(true)
            .app_name("recruiter-embedded".to_owned())
            .server_selection_timeout(START_WITHIN)
            .build();
        let admin = Client::with_options(options).expect("these options do not contradict each other").database("admin");
        let mut look = interval(LOOK_EVERY);
        loop {
            look.tick().await;
            match is_primary_or_made_so(&admin, &address.to_string()).await {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => *refusal = Some(error),
            }
        }
    }

    /// The connection string: `mongodb://127.0.0.1:PORT/?replicaSet=rs0`.
    pub fn uri(&self) -> String {
        self.uri_for("")
    }

    /// The connection string with a default database: `mongodb://127.0.0.1:PORT/DATABASE?replicaSet=rs0`.
    pub fn uri_for(&self, database: &str) -> String {
        let topology = if self.options.standalone { "directConnection=true" } else { "replicaSet=rs0" };
        format!("mongodb://127.0.0.1:{}/{database}?{topology}", self.port)
    }

    /// The port on 127.0.0.1 that it listens on.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The process id of the mongod itself, not of its watchdog.
    pub fn pid(&self) -> u32 {
        self.process.as_ref().map_or(0, Watched::pid)
    }

    /// Ends the mongod cleanly, or by force if that takes too long, and waits until it is gone.
    pub async fn stop(mut self) -> Result<(), EmbeddedError> {
        self.process().let_go();
        self.ended().await
    }

    /// Ends the mongod cleanly, if it is running, and starts it again with the same data on the same port.
    pub async fn restart(&mut self) -> Result<(), EmbeddedError> {
        if self.process().is_running() {
            self.signal(Signal::SIGTERM, "end mongod")?;
            self.signal(Signal::SIGCONT, "continue mongod")?;
            self.ended().await?;
        }
        self.launch().await
    }

    /// Ends the mongod by force (`SIGKILL`) and waits until it is gone. The data is kept for
    /// [`restart`](Self::restart).
    pub async fn kill(&mut self) -> Result<(), EmbeddedError> {
        self.signal(Signal::SIGKILL, "kill mongod")?;
        self.ended().await
    }

    /// Freezes the mongod (`SIGSTOP`). Its sockets stay open.
    pub fn pause(&mut self) -> Result<(), EmbeddedError> {
        self.signal(Signal::SIGSTOP, "pause mongod")
    }

    /// Resumes a frozen mongod (`SIGCONT`).
    pub fn resume(&mut self) -> Result<(), EmbeddedError> {
        self.signal(Signal::SIGCONT, "continue mongod")
    }

    /// The error of a mongod that has ended by itself; `None` while it runs.
    pub fn ended_by_itself(&mut self) -> Option<EmbeddedError> {
        let status = self.process().exit()?;
        Some(EmbeddedError::Ended { how: how(status), log: self.options.log() })
    }

    fn process(&mut self) -> &mut Watched {
        self.process.as_mut().expect("a server is only returned after its launch")
    }

    fn signal(&mut self, signal: Signal, operation: &'static str) -> Result<(), EmbeddedError> {
        self.process().signal(signal).map_err(|source| EmbeddedError::System { operation, source })
    }

    async fn ended(&mut self) -> Result<(), EmbeddedError> {
        self.process().ended().await.map_err(|source| EmbeddedError::System { operation: "end mongod", source })
    }
}

impl Drop for EmbeddedMongo {
    /// Makes the watchdog end the mongod. If a temporary mongod has ended already, its directory is deleted here,
    /// because no watchdog is left to do it.
    fn drop(&mut self) {
        if self.options.temporary && !self.process.as_mut().is_some_and(Watched::is_running) {
            let _ = fs::remove_dir_all(&self.options.data_dir);
        }
    }
}

/// One step towards a primary. Returns whether this node is primary.
async fn is_primary_or_made_so(admin: &Database, host: &str) -> Result<bool, Error> {
    if admin.run_command(doc! { "hello": 1 }).await?.get_bool("isWritablePrimary").unwrap_or(false) {
        return Ok(true);
    }
    let member = doc! { "_id": 0, "host": host };
    match admin.run_command(doc! { "replSetInitiate": { "_id": "rs0", "members": [member.clone()] } }).await {
        Err(error) if code(&error) == Some(ALREADY_INITIALIZED) => {}
        // With access control MongoDB accepts this command only on a new server. A used one becomes primary by itself
        // on its old port.
        Err(error) if code(&error) == Some(UNAUTHORIZED) => return Ok(false),
        done => return done.map(|_| false),
    }
    let reply = admin.run_command(doc! { "replSetGetConfig": 1 }).await?;
    let mut config = reply.get_document("config").cloned().unwrap_or_default();
    let members = [Bson::from(member)];
    if let Ok([Bson::Document(known)]) = config.get_array("members").map(Vec::as_slice)
        && known.get_str("host").ok() != Some(host)
    {
        // The data was last served on another port, so this node is not in its own configuration.
        config.insert("members", members.to_vec());
        admin.run_command(doc! { "replSetReconfig": config, "force": true }).await?;
    }
    Ok(false)
}

const UNAUTHORIZED: i32 = 13;
const ALREADY_INITIALIZED: i32 = 23;

fn code(error: &Error) -> Option<i32> {
    if let ErrorKind::Command(refused) = error.kind.as_ref() { Some(refused.code) } else { None }
}

/// Returns the first error in a log of mongod (lines of JSON; later errors are about its own abort). Without one,
/// returns the plain lines of the dynamic loader or the option parser.
fn last_words(log: &str) -> String {
    let (json, plain): (Vec<_>, Vec<_>) = log.lines().filter(|line| !line.trim().is_empty()).partition(|line| line.starts_with('{'));
    let mut json = json.iter().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    if let Some(line) = json.find(|line| line["s"] == "E" || line["s"] == "F") {
        let error = &line["attr"]["error"];
        let why = error.as_str().or(error["errmsg"].as_str()).map_or_else(|| line["attr"].to_string(), str::to_owned);
        format!("{}: {why}", line["msg"].as_str().unwrap_or_default())
    } else if plain.is_empty() {
        "no reason in its log".to_owned()
    } else {
        plain.join(" ")
    }
}

fn free_port() -> Result<u16, EmbeddedError> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .and_then(|listener| listener.local_addr())
        .map(|address| address.port())
        .map_err(|source| EmbeddedError::System { operation: "give a free port on 127.0.0.1", source })
}
