//! A whole Recruiter on this machine for `dev` and `demo`: an embedded MongoDB, and the three programs as real processes.
//!
//! The programs are the ones that run in production, found beside this one. They get the URI by their environment, and
//! end with their owner, however it ends. Never used by a production start: there the service manager starts, restarts and
//! stops them.

use std::{
    collections::HashSet,
    env,
    ffi::OsString,
    fs::File,
    io::{self, Write},
    path::PathBuf,
    process::{Command, ExitStatus, Stdio},
    time::{Duration, Instant as Monotonic},
};

use anyhow::Context as _;
use nix::sys::signal::Signal;
use recruiter_common::{
    ids::WorkerId,
    shutdown::pause,
    store::{ConnectArgs, DEFAULT_DATABASE, Store, StoreError},
    telemetry::chain,
};

use super::{
    embedded::{EmbeddedMongo, Options, find_or_fetch},
    watchdog::Watched,
};

/// How often the processes are looked at.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long a start may take: a lease that a killed recruiter left behind runs out first.
const READY_WITHIN: Duration = Duration::from_secs(60);
/// A process that ends sooner after its start waits for the rest of it until it is started again.
const RESTART_AFTER: Duration = Duration::from_secs(1);
/// Shorter than in production, so that nobody waits long for a lease that a killed recruiter left behind.
pub(crate) const SHORT_LEASE: &str = "--lease=5s";
/// Whoever presses Ctrl-C does not want to wait; the watchdog uses force after fifteen seconds.
const WORKER_GRACE: &str = "--grace=5s";

/// One of the programs; in the order in which they are stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Worker,
    Cleaner,
    Recruiter,
}

impl Role {
    const ALL: [Role; 3] = [Role::Worker, Role::Cleaner, Role::Recruiter];

    fn program(self) -> &'static str {
        match self {
            Self::Worker => "recruiter-worker",
            Self::Cleaner => "recruiter-cleaner",
            Self::Recruiter => "recruiter",
        }
    }
}

/// The directory that has the programs: the one that this program is in.
#[derive(Clone, Debug)]
pub(crate) struct Programs(PathBuf);

impl Programs {
    /// # Errors
    /// When one is missing, with where it should be.
    pub(crate) fn find() -> anyhow::Result<Self> {
        let this = env::current_exe().context("the system does not say where this program is")?;
        let programs = Self(this.parent().unwrap_or(&this).to_owned());
        for program in Role::ALL.map(|role| programs.path(role)) {
            anyhow::ensure!(
                program.is_file(),
                "{} is missing, and it belongs beside this program; build all of them with `cargo build --release`",
                program.display()
            );
        }
        Ok(programs)
    }

    fn path(&self, role: Role) -> PathBuf {
        self.0.join(role.program())
    }
}

/// What to start the processes with.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) programs: Programs,
    /// How many workers.
    pub(crate) workers: u32,
    /// Arguments of each worker.
    pub(crate) worker_arguments: Vec<OsString>,
    /// Arguments of the recruiter.
    pub(crate) recruiter_arguments: Vec<OsString>,
    /// Arguments that say how to log, of each process.
    pub(crate) log_arguments: Vec<String>,
    /// Where they log; our own standard error when there is none.
    pub(crate) log: Option<File>,
    /// Whether `RECRUITER_*` of our own environment is meant for them too.
    pub(crate) pass_settings: bool,
}

impl Plan {
    fn spawn(&self, role: Role, uri: &str) -> anyhow::Result<Member> {
        let mut command = Command::new(self.programs.path(role));
        match role {
            Role::Worker => drop(command.arg(WORKER_GRACE).args(&self.worker_arguments)),
            Role::Cleaner => {}
            Role::Recruiter => drop(command.arg("run").args(&self.recruiter_arguments)),
        }
        command.args(&self.log_arguments).env("MONGODB_URI", uri);
        // Our service manager, if there is one, waits for us to be ready, not for them.
        command.env_remove("NOTIFY_SOCKET");
        for (name, _) in env::vars_os().filter(|(name, _)| !self.pass_settings && name.to_string_lossy().starts_with("RECRUITER_")) {
            command.env_remove(name);
        }
        let output = self.log.as_ref().map_or_else(|| Ok(Stdio::inherit()), |log| log.try_clone().map(Stdio::from));
        let process = output.and_then(|output| Watched::spawn(&command, output, None));
        let process = process.with_context(|| format!("{} cannot be started", role.program()))?;
        Ok(Member { role, process, started: Monotonic::now() })
    }
}

/// One process of the fleet.
#[derive(Debug)]
struct Member {
    role: Role,
    process: Watched,
    started: Monotonic,
}

/// The processes. Dropping them ends them by force.
#[derive(Debug)]
pub(crate) struct Fleet {
    plan: Plan,
    uri: String,
    members: Vec<Member>,
}

impl Fleet {
    /// Starts a recruiter, a cleaner and the workers of the plan on the MongoDB at `uri`.
    pub(crate) fn start(plan: Plan, uri: String) -> anyhow::Result<Self> {
        let workers = plan.workers;
        let mut fleet = Self { plan, uri, members: Vec::new() };
        for role in [Role::Recruiter, Role::Cleaner] {
            fleet.members.push(fleet.plan.spawn(role, &fleet.uri)?);
        }
        fleet.add_workers(workers)?;
        Ok(fleet)
    }

    /// Starts so many workers more.
    pub(crate) fn add_workers(&mut self, count: u32) -> anyhow::Result<()> {
        for _ in 0..count {
            self.members.push(self.plan.spawn(Role::Worker, &self.uri)?);
        }
        Ok(())
    }

    /// Waits until the recruiter leads and every worker can be given jobs. A process that ends before is an error.
    pub(crate) async fn ready(&mut self, store: &Store) -> anyhow::Result<()> {
        let begun = Monotonic::now();
        while let Some(missing) = self.not_ready(store).await? {
            if let Some((role, status)) = self.members.iter_mut().find_map(|member| Some((member.role, member.process.exit()?))) {
                anyhow::bail!("{} {} before it was ready; its log says why", role.program(), how(status));
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

    /// The first of them that cannot do its work yet, as the documents say.
    async fn not_ready(&self, store: &Store) -> Result<Option<Role>, StoreError> {
        let pids = |role: Role| self.members.iter().filter(move |member| member.role == role).map(|member| member.process.pid());
        let lease = store.observe_lease().await?.filter(|lease| !lease.released);
        let Some(lease) = lease.filter(|lease| pids(Role::Recruiter).any(|pid| lease.holder_at.ends_with(&format!(":{pid}")))) else {
            return Ok(Some(Role::Recruiter));
        };
        let available: HashSet<WorkerId> = store.available_workers(lease.term).await?.into_iter().map(|worker| worker.id).collect();
        let registered = store.registered_workers().await?;
        // One that has jobs of an earlier run already need not be available.
        let working = registered.iter().filter(|worker| available.contains(&worker.id) || !worker.jobs.is_empty());
        let working: HashSet<u32> = working.filter_map(|worker| Some(worker.place.as_ref()?.pid.cast_unsigned())).collect();
        Ok((!pids(Role::Worker).all(|pid| working.contains(&pid))).then_some(Role::Worker))
    }

    /// Starts those again that have ended; says which, a line for each.
    pub(crate) fn tend(&mut self) -> anyhow::Result<Vec<String>> {
        let mut told = Vec::new();
        for member in &mut self.members {
            let Some(status) = member.process.exit().filter(|_| member.started.elapsed() >= RESTART_AFTER) else { continue };
            let ended = format!("{} (pid {}) {}", member.role.program(), member.process.pid(), how(status));
            *member = self.plan.spawn(member.role, &self.uri)?;
            told.push(format!("{ended}; started again (pid {})", member.process.pid()));
        }
        Ok(told)
    }

    /// The program and the process id of each.
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

    /// Ends all cleanly: first who works, last who assigns. Dropping the future ends them by force.
    pub(crate) async fn stop(mut self) {
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
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for member in &mut self.members {
            // One that has ended already is as good.
            let _ = member.process.signal(Signal::SIGKILL);
        }
    }
}

fn how(status: ExitStatus) -> String {
    let code = status.code().unwrap_or_default();
    match Signal::try_from(code - 128) {
        Ok(signal) => format!("was ended by {signal}"),
        Err(_) => format!("ended with exit code {code}"),
    }
}

/// A MongoDB of its own and a fleet that works on it.
#[derive(Debug)]
pub(crate) struct Installation {
    pub(crate) fleet: Fleet,
    pub(crate) store: Store,
    mongo: EmbeddedMongo,
}

impl Installation {
    /// Starts MongoDB, then the fleet; returns when jobs that are enqueued now would be run. Dropping the future ends what
    /// was started.
    pub(crate) async fn start(mongod: Option<PathBuf>, options: impl FnOnce(PathBuf) -> Options, plan: Plan) -> anyhow::Result<Self> {
        let mongod = tokio::task::spawn_blocking(move || find_or_fetch(mongod.as_deref(), &tell)).await??;
        let mongo = EmbeddedMongo::start(options(mongod)).await?;
        let uri = mongo.uri_for(DEFAULT_DATABASE);
        let connect = ConnectArgs { connect_timeout: Some(READY_WITHIN), ..ConnectArgs::to(uri.clone()) };
        let store = Store::connect(&connect, "recruiter").await?;
        let mut this = Self { fleet: Fleet::start(plan, uri)?, store, mongo };
        match this.fleet.ready(&this.store).await {
            Ok(()) => Ok(this),
            Err(failed) => {
                this.stop().await?;
                Err(failed)
            }
        }
    }

    /// Where to connect.
    pub(crate) fn uri(&self) -> &str {
        &self.fleet.uri
    }

    /// Ends everything cleanly.
    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        self.fleet.stop().await;
        Ok(self.mongo.stop().await?)
    }
}

/// Says something to whoever watches; standard output is for results.
pub(crate) fn tell(line: &str) {
    // Whoever has closed standard error does not want to know.
    let _ = writeln!(io::stderr(), "{line}");
}
