//! A MongoDB and the three programs as real processes on this machine, for `dev` and `demo`.
//!
//! The programs are the production programs in the directory of this one. They get the connection string by their
//! environment, and always end with their owner. Production never uses this module: there the service manager starts,
//! restarts and stops the programs.

use std::{
    collections::HashSet,
    env,
    ffi::OsString,
    fs::File,
    io::{self, Write},
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant as Monotonic},
};

use anyhow::Context as _;
use nix::sys::signal::Signal;
use recruiter_common::{
    exit::Exit,
    ids::WorkerId,
    shutdown::pause,
    store::{ConnectArgs, DEFAULT_DATABASE, Store, StoreError},
    telemetry::chain,
};

use tempfile::TempDir;
use tokio::net::TcpStream;

use super::{
    embedded::{EmbeddedError, EmbeddedMongo, Options, find_or_fetch},
    watchdog::{Watched, how},
};

/// The usual port of the pages.
const WEB_PORT: u16 = 7420;
/// How often the processes are checked.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Maximum duration of a start. It includes the time until the lease of a killed recruiter expires.
const READY_WITHIN: Duration = Duration::from_secs(60);
/// Minimum time between two starts of a process. One that ends sooner is restarted when this time is over.
const RESTART_AFTER: Duration = Duration::from_secs(1);
/// Shorter than in production, so that the lease of a killed recruiter expires soon.
pub(crate) const SHORT_LEASE: &str = "--lease=5s";
/// Short, because a user who presses Ctrl-C is waiting. The watchdog uses force after 15 seconds.
const WORKER_GRACE: &str = "--grace=5s";
/// The time between the two signals of [`Fleet::abort`], in which a process receives the first.
const BETWEEN_SIGNALS: Duration = Duration::from_millis(200);
/// How long [`Fleet::abort`] waits after the second signal. A worker gives its programs two seconds.
const ABORT_WITHIN: Duration = Duration::from_secs(4);

/// One of the programs, in the order in which they are stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Web,
    Worker,
    Cleaner,
    Recruiter,
}

impl Role {
    const ALL: [Role; 4] = [Role::Web, Role::Worker, Role::Cleaner, Role::Recruiter];

    fn program(self) -> &'static str {
        match self {
            Self::Worker => "recruiter-worker",
            Self::Cleaner => "recruiter-cleaner",
            Self::Web | Self::Recruiter => "recruiter",
        }
    }

    /// The variable that names the file of its settings.
    fn settings(self) -> &'static str {
        match self {
            Self::Worker => "RECRUITER_WORKER_SETTINGS",
            Self::Cleaner => "RECRUITER_CLEANER_SETTINGS",
            Self::Web | Self::Recruiter => "RECRUITER_SETTINGS",
        }
    }
}

/// The directory with the programs: the directory of this program.
#[derive(Clone, Debug)]
pub(crate) struct Programs(PathBuf);

impl Programs {
    /// # Errors
    /// When a program is missing. The error has the expected path.
    pub(crate) fn find() -> anyhow::Result<Self> {
        let this = env::current_exe().context("cannot find the path of this program")?;
        let programs = Self(this.parent().unwrap_or(&this).to_owned());
        for program in Role::ALL.map(|role| programs.path(role)) {
            anyhow::ensure!(
                program.is_file(),
                "{} is missing; it must be in the same directory as this program: build all programs with `cargo build --release --workspace`",
                program.display()
            );
        }
        Ok(programs)
    }

    fn path(&self, role: Role) -> PathBuf {
        self.0.join(role.program())
    }
}

/// The configuration of the processes.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) programs: Programs,
    /// Port on 127.0.0.1 of the pages and the HTTP API, where everyone is an operator: 0 is the usual one, or a free one. `None`: without.
    pub(crate) web: Option<u16>,
    /// Number of workers.
    pub(crate) workers: u32,
    /// Arguments of each worker.
    pub(crate) worker_arguments: Vec<OsString>,
    /// Arguments of the recruiter.
    pub(crate) recruiter_arguments: Vec<OsString>,
    /// Arguments of each process: for its logs and its metrics.
    pub(crate) log_arguments: Vec<String>,
    /// Log file of the processes; this process's standard error if `None`.
    pub(crate) log: Option<File>,
    /// Whether the processes inherit the `RECRUITER_*` variables of this process.
    pub(crate) pass_settings: bool,
}

impl Plan {
    fn spawn(&self, role: Role, uri: &str, runtime: &Path) -> anyhow::Result<Member> {
        let mut command = Command::new(self.programs.path(role));
        let web = format!("127.0.0.1:{}", self.web.unwrap_or_default());
        match role {
            Role::Web => drop(command.args(["web", "--anonymous", "operator", "--listen"]).arg(&web)),
            Role::Worker => drop(command.arg(WORKER_GRACE).args(&self.worker_arguments)),
            Role::Cleaner => {}
            Role::Recruiter => drop(command.arg("run").args(&self.recruiter_arguments).env("RUNTIME_DIRECTORY", runtime)),
        }
        // The database of the fleet is its own.
        command.args(&self.log_arguments).env("MONGODB_URI", uri).env_remove("RECRUITER_COLLECTION_PREFIX");
        // The service manager of this process, if there is one, must not receive the readiness of child processes.
        command.env_remove("NOTIFY_SOCKET");
        // Only one of the processes could listen there.
        command.env_remove("RECRUITER_METRICS");
        for (name, _) in env::vars_os().filter(|(name, _)| !self.pass_settings && name.to_string_lossy().starts_with("RECRUITER_")) {
            command.env_remove(name);
        }
        // The files in /etc are about another database.
        command.env(role.settings(), "/dev/null");
        let output = self.log.as_ref().map_or_else(|| Ok(Stdio::inherit()), |log| log.try_clone().map(Stdio::from));
        let process = output.and_then(|output| Watched::spawn(&command, output, None));
        let process = process.with_context(|| format!("cannot start {}", role.program()))?;
        Ok(Member { role, process, started: Monotonic::now() })
    }
}

/// This port, or for 0 the usual one, or a free one.
fn free_port(given: u16) -> anyhow::Result<u16> {
    let free = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).and_then(|listener| listener.local_addr());
    let found = if given == 0 { free(WEB_PORT).or_else(|_| free(0)) } else { free(given) };
    Ok(found.with_context(|| format!("the port {given} cannot be used for the web pages: give another one with --web-port"))?.port())
}

/// One process of the fleet.
#[derive(Debug)]
struct Member {
    role: Role,
    process: Watched,
    started: Monotonic,
}

/// The running processes. Dropping this value ends them by force.
#[derive(Debug)]
pub(crate) struct Fleet {
    plan: Plan,
    uri: String,
    /// Where the recruiter's socket is.
    runtime: TempDir,
    members: Vec<Member>,
}

impl Fleet {
    /// Starts a recruiter, a cleaner, the pages and the workers of the plan, with the MongoDB at `uri`.
    pub(crate) fn start(mut plan: Plan, uri: String) -> anyhow::Result<Self> {
        plan.web = plan.web.map(free_port).transpose()?;
        let workers = plan.workers;
        let runtime = tempfile::tempdir().context("cannot create a temporary directory")?;
        let mut fleet = Self { plan, uri, runtime, members: Vec::new() };
        let web = fleet.plan.web.map(|_| Role::Web);
        for role in [Role::Recruiter, Role::Cleaner].into_iter().chain(web) {
            fleet.members.push(fleet.plan.spawn(role, &fleet.uri, fleet.runtime.path())?);
        }
        fleet.add_workers(workers)?;
        Ok(fleet)
    }

    /// Starts `count` more workers.
    pub(crate) fn add_workers(&mut self, count: u32) -> anyhow::Result<()> {
        for _ in 0..count {
            self.members.push(self.plan.spawn(Role::Worker, &self.uri, self.runtime.path())?);
        }
        Ok(())
    }

    /// Waits until the recruiter leads and every worker can receive jobs. Fails if a process ends before that.
    pub(crate) async fn ready(&mut self, store: &Store) -> anyhow::Result<()> {
        let begun = Monotonic::now();
        while let Some(missing) = self.not_ready(store).await? {
            if let Some((role, status)) = self.members.iter_mut().find_map(|member| Some((member.role, member.process.exit()?))) {
                anyhow::bail!("{} {} before it was ready; see its log for the cause", role.program(), how(status));
            }
            anyhow::ensure!(
                begun.elapsed() < READY_WITHIN,
                "{} is not ready after {}",
                missing.program(),
                humantime::format_duration(READY_WITHIN)
            );
            pause(LOOK_EVERY).await;
        }
        Ok(())
    }

    /// The port of the pages.
    pub(crate) fn web(&self) -> Option<u16> {
        self.plan.web
    }

    /// The role of the first process that is not ready, according to the documents in the database, or to its port.
    async fn not_ready(&self, store: &Store) -> Result<Option<Role>, StoreError> {
        if let Some(port) = self.plan.web
            && TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.is_err()
        {
            return Ok(Some(Role::Web));
        }
        let pids = |role: Role| self.members.iter().filter(move |member| member.role == role).map(|member| member.process.pid());
        let lease = store.observe_lease().await?.filter(|lease| !lease.released);
        let Some(lease) = lease.filter(|lease| pids(Role::Recruiter).any(|pid| lease.holder_at.ends_with(&format!(":{pid}")))) else {
            return Ok(Some(Role::Recruiter));
        };
        let available: HashSet<WorkerId> = store.available_workers(lease.term).await?.into_iter().map(|worker| worker.id).collect();
        let registered = store.registered_workers().await?;
        // A worker that already has jobs of an earlier run need not be available.
        let working = registered.iter().filter(|worker| available.contains(&worker.id) || !worker.jobs.is_empty());
        let working: HashSet<u32> = working.filter_map(|worker| Some(worker.process.as_ref()?.pid.cast_unsigned())).collect();
        Ok((!pids(Role::Worker).all(|pid| working.contains(&pid))).then_some(Role::Worker))
    }

    /// Restarts the processes that have ended. Returns one line of text for each.
    pub(crate) fn tend(&mut self) -> anyhow::Result<Vec<String>> {
        let mut told = Vec::new();
        for member in &mut self.members {
            let Some(status) = member.process.exit().filter(|_| member.started.elapsed() >= RESTART_AFTER) else { continue };
            let ended = format!("{} (pid {}) {}", member.role.program(), member.process.pid(), how(status));
            *member = self.plan.spawn(member.role, &self.uri, self.runtime.path())?;
            told.push(format!("{ended}; restarted (pid {})", member.process.pid()));
        }
        Ok(told)
    }

    /// Name and process id of each program.
    pub(crate) fn processes(&self) -> impl Iterator<Item = (&'static str, u32)> {
        self.members.iter().map(|member| (member.role.program(), member.process.pid()))
    }

    /// The recruiter's process.
    pub(crate) fn recruiter(&mut self) -> Option<&mut Watched> {
        self.members.iter_mut().find(|member| member.role == Role::Recruiter).map(|member| &mut member.process)
    }

    /// The workers' processes.
    pub(crate) fn workers(&mut self) -> impl Iterator<Item = &mut Watched> {
        self.members.iter_mut().filter(|member| member.role == Role::Worker).map(|member| &mut member.process)
    }

    /// Ends all processes cleanly: first the pages and the workers, then the cleaner, last the recruiter.
    pub(crate) async fn stop(&mut self) {
        for role in Role::ALL {
            let mut leaving: Vec<&mut Watched> =
                self.members.iter_mut().filter(|member| member.role == role).map(|member| &mut member.process).collect();
            leaving.iter_mut().for_each(|process| process.let_go());
            for process in leaving {
                if let Err(error) = process.ended().await {
                    tracing::warn!(pid = process.pid(), error = chain(&error), "{} does not end", role.program());
                }
            }
        }
    }

    /// Ends all processes at once, because MongoDB is gone: an orderly end would wait for it. A second TERM makes a process end without
    /// waiting for its jobs. What is left then is ended by force.
    async fn abort(mut self) {
        for _ in 0..2 {
            for member in &mut self.members {
                // Fails only if the process has ended already.
                let _ = member.process.signal(Signal::SIGTERM);
            }
            pause(BETWEEN_SIGNALS).await;
        }
        let begun = Monotonic::now();
        while begun.elapsed() < ABORT_WITHIN && self.members.iter_mut().any(|member| member.process.is_running()) {
            pause(LOOK_EVERY).await;
        }
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for member in &mut self.members {
            // Fails only if the process has ended already.
            let _ = member.process.signal(Signal::SIGKILL);
        }
    }
}

/// An embedded MongoDB and a fleet that uses it.
#[derive(Debug)]
pub(crate) struct Installation {
    pub(crate) fleet: Fleet,
    pub(crate) store: Store,
    mongo: EmbeddedMongo,
}

impl Installation {
    /// Starts MongoDB, then the fleet. Returns when the fleet is ready to run jobs. Dropping the future ends the
    /// started processes.
    pub(crate) async fn start(mongod: Option<PathBuf>, options: impl FnOnce(PathBuf) -> Options, plan: Plan) -> anyhow::Result<Self> {
        let mongod = tokio::task::spawn_blocking(move || find_or_fetch(mongod.as_deref(), &tell)).await??;
        let mut mongo = EmbeddedMongo::start(options(mongod)).await?;
        let uri = mongo.uri_for(DEFAULT_DATABASE);
        let connect = ConnectArgs::to(uri.clone()).timeout(READY_WITHIN);
        let store = tokio::select! {
            connected = Store::connect(&connect, "recruiter") => connected?,
            ended = end_of(&mut mongo) => return Err(unavailable(ended)),
        };
        let mut this = Self { fleet: Fleet::start(plan, uri)?, store, mongo };
        match this.unless_mongod_ends(async |fleet, store| fleet.ready(store).await).await {
            Ok(Ok(())) => Ok(this),
            Ok(Err(failed)) => {
                this.stop().await?;
                Err(failed)
            }
            Err(ended) => Err(this.abort(ended).await),
        }
    }

    /// The connection string.
    pub(crate) fn uri(&self) -> &str {
        &self.fleet.uri
    }

    /// The error of a mongod that has ended by itself.
    pub(crate) fn mongod_ended(&mut self) -> Option<EmbeddedError> {
        self.mongo.ended_by_itself()
    }

    /// The output of `work`; the error of mongod, if it ends by itself before that.
    pub(crate) async fn unless_mongod_ends<T>(&mut self, work: impl AsyncFnOnce(&mut Fleet, &Store) -> T) -> Result<T, EmbeddedError> {
        let Self { fleet, store, mongo } = self;
        tokio::select! {
            biased;
            ended = end_of(mongo) => Err(ended),
            done = work(fleet, store) => Ok(done),
        }
    }

    /// Says that mongod has ended, ends the other processes at once, and returns the error.
    pub(crate) async fn abort(self, ended: EmbeddedError) -> anyhow::Error {
        tell("mongod has ended; ending the other processes");
        self.fleet.abort().await;
        unavailable(ended)
    }

    /// Ends all processes and MongoDB cleanly; the processes at once, if mongod ends by itself before them.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        let stopped = self.unless_mongod_ends(async |fleet, _| fleet.stop().await).await;
        match stopped.err().or_else(|| self.mongod_ended()) {
            Some(ended) => Err(self.abort(ended).await),
            None => Ok(self.mongo.stop().await?),
        }
    }
}

/// Returns when mongod has ended by itself.
async fn end_of(mongo: &mut EmbeddedMongo) -> EmbeddedError {
    loop {
        match mongo.ended_by_itself() {
            Some(ended) => return ended,
            None => pause(LOOK_EVERY).await,
        }
    }
}

fn unavailable(ended: EmbeddedError) -> anyhow::Error {
    anyhow::Error::new(ended).context(Exit::Unavailable)
}

/// Writes a line for the user to standard error; standard output is for results.
pub(crate) fn tell(line: &str) {
    // Standard error may be closed: the line is then dropped.
    let _ = writeln!(io::stderr(), "{line}");
}
