//! Starts, initiates and stops one mongod.

use std::{
    fs, io,
    net::{Ipv4Addr, TcpListener},
    path::PathBuf,
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

use super::{super::watchdog::Watched, EmbeddedError};

/// How long a start may take until the mongod is primary. A fresh one takes a second; one that was killed replays its
/// journal first.
const START_WITHIN: Duration = Duration::from_secs(60);
/// How often a starting mongod is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How often a start without a given port is tried when somebody else was given the same port meanwhile.
const PORT_ATTEMPTS: u32 = 5;
/// Memory for the cache, in GB.
const CACHE: &str = "--wiredTigerCacheSizeGB";

/// How to run the mongod. [`Options::new`] has the defaults of a development database.
#[derive(Clone, Debug)]
pub struct Options {
    /// The program, from [`find_or_fetch`](super::find_or_fetch).
    pub mongod: PathBuf,
    /// Where its data and its log are; created when missing. The data of an earlier run, even on another port, is used again.
    pub data_dir: PathBuf,
    /// The port on 127.0.0.1; `None` takes a free one.
    pub port: Option<u16>,
    /// Allows fail points and the like (`enableTestCommands`).
    pub test_commands: bool,
    /// The data directory goes with the mongod, which is then ended by force. It is removed whole: name one that holds
    /// nothing else.
    pub temporary: bool,
    /// Runs without a replica set; to test that Recruiter refuses such a server.
    pub standalone: bool,
    /// Is ready as soon as it listens: its owner initiates the replica set, of which it is one member of several.
    pub member: bool,
    /// Further arguments of mongod, as on its command line; one that says how large the cache is replaces ours.
    pub arguments: Vec<String>,
    /// What it has in its environment besides ours.
    pub environment: Vec<(String, String)>,
}

impl Options {
    /// A replica set on a free port, its data kept in `data_dir`, without test commands.
    pub fn new(mongod: impl Into<PathBuf>, data_dir: impl Into<PathBuf>) -> Self {
        Self {
            mongod: mongod.into(),
            data_dir: data_dir.into(),
            port: None,
            test_commands: false,
            temporary: false,
            standalone: false,
            member: false,
            arguments: Vec::new(),
            environment: Vec::new(),
        }
    }

    fn log(&self) -> PathBuf {
        self.data_dir.join("mongod.log")
    }

    /// Makes the paths mean the same wherever they are used, and sees that there is a directory to write in.
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
            arguments.extend(["--replSet=rs0".into(), "--oplogSize=256".into()]);
        }
        arguments.extend_from_slice(&self.arguments);
        let mut mongod = Command::new(&self.mongod);
        mongod.args(arguments).envs(self.environment.iter().map(|(name, value)| (name, value)));
        Watched::spawn(&mongod, log, self.temporary.then_some(&self.data_dir))
            .map_err(|source| EmbeddedError::System { operation: "run `sh`, which watches over mongod", source })
    }
}

/// A running mongod, the single node of the replica set `rs0`. It ends with its owner: on [`stop`](Self::stop), when this value
/// is dropped, and when this process ends, however it ends. A Ctrl-C in the terminal does not reach it, so that its owner
/// can use it to the last.
#[derive(Debug)]
pub struct EmbeddedMongo {
    options: Options,
    port: u16,
    process: Option<Watched>,
}

impl EmbeddedMongo {
    /// Starts a mongod and waits until it is primary (a standalone or a member: until it listens), for a minute at most.
    /// Dropping the future ends what was started.
    pub async fn start(mut options: Options) -> Result<Self, EmbeddedError> {
        options.settle().map_err(|source| EmbeddedError::DataDir { path: options.data_dir.clone(), source })?;
        let mut attempts = if options.port.is_some() { 1 } else { PORT_ATTEMPTS };
        let mut this = Self { options, port: 0, process: None };
        loop {
            this.port = this.options.port.map_or_else(free_port, Ok)?;
            attempts -= 1;
            match this.launch().await {
                Err(EmbeddedError::PortTaken(_)) if attempts > 0 => {}
                done => return done.map(|()| this),
            }
        }
    }

    async fn launch(&mut self) -> Result<(), EmbeddedError> {
        let in_data_dir = |source| EmbeddedError::DataDir { path: self.options.data_dir.clone(), source };
        // This file holds the process id of a mongod that runs here, or did not end cleanly; then its log is worth keeping.
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

    /// Waits for "Waiting for connections" in its own log, after the `earlier` bytes: another mongod might answer on a port
    /// that this one did not get.
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

    /// Initiates the replica set as far as needed until this node is primary. What is refused on the way is tried again, and
    /// kept for the report.
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

    /// Where to connect: `mongodb://127.0.0.1:PORT/?replicaSet=rs0`.
    pub fn uri(&self) -> String {
        self.uri_for("")
    }

    /// Where to connect, with a default database: `mongodb://127.0.0.1:PORT/DATABASE?replicaSet=rs0`.
    pub fn uri_for(&self, database: &str) -> String {
        let topology = if self.options.standalone { "directConnection=true" } else { "replicaSet=rs0" };
        format!("mongodb://127.0.0.1:{}/{database}?{topology}", self.port)
    }

    /// The port on 127.0.0.1 that it listens on.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The process id of the mongod itself.
    pub fn pid(&self) -> u32 {
        self.process.as_ref().map_or(0, Watched::pid)
    }

    /// Ends the mongod, cleanly unless that takes too long, and waits until it is gone.
    pub async fn stop(mut self) -> Result<(), EmbeddedError> {
        self.process().let_go();
        self.ended().await
    }

    /// Ends the mongod cleanly, if it still runs, and starts it again with the same data on the same port.
    pub async fn restart(&mut self) -> Result<(), EmbeddedError> {
        if self.process().is_running() {
            self.signal(Signal::SIGTERM, "end mongod")?;
            self.signal(Signal::SIGCONT, "continue mongod")?;
            self.ended().await?;
        }
        self.launch().await
    }

    /// Ends the mongod by force (`SIGKILL`) and waits until it is gone. The data stays, for [`restart`](Self::restart).
    pub async fn kill(&mut self) -> Result<(), EmbeddedError> {
        self.signal(Signal::SIGKILL, "kill mongod")?;
        self.ended().await
    }

    /// Freezes the mongod with its sockets open (`SIGSTOP`).
    pub fn pause(&mut self) -> Result<(), EmbeddedError> {
        self.signal(Signal::SIGSTOP, "pause mongod")
    }

    /// Lets a frozen mongod go on (`SIGCONT`).
    pub fn resume(&mut self) -> Result<(), EmbeddedError> {
        self.signal(Signal::SIGCONT, "continue mongod")
    }

    fn process(&mut self) -> &mut Watched {
        self.process.as_mut().expect("nobody gets hold of one that was not launched")
    }

    fn signal(&mut self, signal: Signal, operation: &'static str) -> Result<(), EmbeddedError> {
        self.process().signal(signal).map_err(|source| EmbeddedError::System { operation, source })
    }

    async fn ended(&mut self) -> Result<(), EmbeddedError> {
        self.process().ended().await.map_err(|source| EmbeddedError::System { operation: "end mongod", source })
    }
}

impl Drop for EmbeddedMongo {
    /// Lets the watchdog end the mongod. The directory of a temporary one that runs no more has nobody else to remove it.
    fn drop(&mut self) {
        if self.options.temporary && !self.process.as_mut().is_some_and(Watched::is_running) {
            let _ = fs::remove_dir_all(&self.options.data_dir);
        }
    }
}

/// One step towards a primary; true when nothing is left to do.
async fn is_primary_or_made_so(admin: &Database, host: &str) -> Result<bool, Error> {
    if admin.run_command(doc! { "hello": 1 }).await?.get_bool("isWritablePrimary").unwrap_or(false) {
        return Ok(true);
    }
    let member = doc! { "_id": 0, "host": host };
    match admin.run_command(doc! { "replSetInitiate": { "_id": "rs0", "members": [member.clone()] } }).await {
        Err(error) if code(&error) == Some(ALREADY_INITIALIZED) => {}
        // Under access control only a fresh server lets itself be initiated; a used one needs no help on its own port.
        Err(error) if code(&error) == Some(UNAUTHORIZED) => return Ok(false),
        done => return done.map(|_| false),
    }
    let reply = admin.run_command(doc! { "replSetGetConfig": 1 }).await?;
    let mut config = reply.get_document("config").cloned().unwrap_or_default();
    let members = [Bson::from(member)];
    if let Ok([Bson::Document(known)]) = config.get_array("members").map(Vec::as_slice)
        && known.get_str("host").ok() != Some(host)
    {
        // The data was last served on another port: this node does not find itself in its own configuration.
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

/// The first complaint in a log of mongod (lines of JSON; later ones are about its own abort), or else what the loader or the option
/// parser said in plain lines.
fn last_words(log: &str) -> String {
    let (json, plain): (Vec<_>, Vec<_>) = log.lines().filter(|line| !line.trim().is_empty()).partition(|line| line.starts_with('{'));
    let mut json = json.iter().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    if let Some(line) = json.find(|line| line["s"] == "E" || line["s"] == "F") {
        let error = &line["attr"]["error"];
        let why = error.as_str().or(error["errmsg"].as_str()).map_or_else(|| line["attr"].to_string(), str::to_owned);
        format!("{}: {why}", line["msg"].as_str().unwrap_or_default())
    } else if plain.is_empty() {
        "it gave no reason".to_owned()
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
