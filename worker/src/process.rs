//! A worker as a process of its own: flags, logs, signals, exit codes. The stock worker is one of them.

use std::{env, path::Path, time::Duration};

use anyhow::Context as _;
use bytesize::ByteSize;
use clap::{Args, CommandFactory, FromArgMatches, Parser};
use recruiter_common::{
    exit::{self, Exit},
    flags,
    logging::{self, LogArgs},
    monitoring::MetricsArgs,
    secrets, service,
    shutdown::{Shutdown, pause},
    store::ConnectArgs,
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};

use crate::{
    ABORT_WITHIN, Ended, Worker, WorkerError,
    config::{DEFAULT_CONCURRENCY, DEFAULT_GRACE, DEFAULT_HEARTBEAT, DEFAULT_LEASE, DEFAULT_POLL, MOST_CONCURRENCY, WorkerConfig},
    generations::{self, Settled},
};

/// Exit codes of every worker process, for the end of its `--help`.
pub const EXIT_CODES: &str = "Exit codes: 0 stopped, 1 failure, 2 wrong flags, 69 MongoDB unreachable, 75 memory limit reached,
  77 refused by MongoDB, 78 a file cannot be used, 130 stopped at once by a second signal";

/// The flags and environment variables of [`WorkerConfig`].
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Work", about = None, long_about = None, mut_args = flags::unless_empty)]
pub struct WorkerArgs {
    /// Groups to work on, separated by commas or given several times; all groups if none is given
    #[arg(long, env = "RECRUITER_WORK_ON", value_name = "GROUP", value_delimiter = ',', value_parser = flags::name_of_text)]
    work_on: Vec<String>,
    /// Number of slots: jobs to run at a time
    #[arg(long, env = "RECRUITER_CONCURRENCY", value_name = "N", default_value_t = DEFAULT_CONCURRENCY, value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_CONCURRENCY)))]
    concurrency: u32,
    /// Time limit of each job whose workable sets none [default: none]
    #[arg(long, env = "RECRUITER_TIME_LIMIT", value_name = "DURATION", value_parser = humantime::parse_duration)]
    time_limit: Option<Duration>,
    /// Resident memory above which the worker drains and exits with code 75, to be restarted [default: none]
    #[arg(long, env = "RECRUITER_MEMORY_LIMIT", value_name = "SIZE")]
    memory_limit: Option<ByteSize>,
    /// Time for running jobs to end after TERM, INT or HUP, before they are interrupted. Keep systemd's TimeoutStopSec
    /// above it
    #[arg(long, env = "RECRUITER_GRACE", value_name = "DURATION", default_value_t = DEFAULT_GRACE.into())]
    grace: humantime::Duration,
    /// Heartbeat interval
    #[arg(long, env = "RECRUITER_HEARTBEAT", value_name = "DURATION", default_value_t = DEFAULT_HEARTBEAT.into())]
    heartbeat: humantime::Duration,
    /// Time after a heartbeat for which this worker may start jobs; cleaners wait longer before they retire it
    #[arg(long, env = "RECRUITER_WORKER_LEASE", value_name = "DURATION", default_value_t = DEFAULT_LEASE.into())]
    lease: humantime::Duration,
    /// Maximum delay of an assigned job if hints are lost; without keep-alives the worker polls twice in this time
    #[arg(long, env = "RECRUITER_POLL", value_name = "DURATION", default_value_t = DEFAULT_POLL.into())]
    poll: humantime::Duration,
}

impl From<WorkerArgs> for WorkerConfig {
    fn from(args: WorkerArgs) -> Self {
        Self {
            groups: args.work_on,
            concurrency: args.concurrency,
            time_limit: args.time_limit,
            memory_limit: args.memory_limit.map(|size| size.as_u64()),
            grace: *args.grace,
            heartbeat: *args.heartbeat,
            lease: *args.lease,
            poll: *args.poll,
        }
    }
}

/// Reads the settings once more.
pub(crate) type Again = Box<dyn Fn() -> anyhow::Result<(ProcessArgs, Worker)> + Send>;

/// The flags of every worker process. A program with its own flags flattens them; [`Worker::main`] uses them alone.
#[derive(Args, Clone, Debug)]
// Otherwise clap would use the lines above as the description of the program.
#[command(about = None, long_about = None)]
pub struct ProcessArgs {
    /// The settings of the worker.
    #[command(flatten)]
    pub worker: WorkerArgs,
    /// The connection to MongoDB.
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// The settings of the logs.
    #[command(flatten)]
    pub log: LogArgs,
    /// Where metrics are served.
    #[command(flatten)]
    pub metrics: MetricsArgs,
}

impl ProcessArgs {
    /// Creates the worker with `make`, runs jobs until TERM, INT or HUP requests a stop, and ends the process with one of the [`Exit`]
    /// codes. An error is printed. An error of `make` can have the exit code in its context.
    pub async fn run(self, make: impl FnOnce() -> anyhow::Result<Worker>) -> ! {
        self.work(make, None).await.unwrap_or_else(|error| exit::report(&program(), &error)).now()
    }

    /// The same, and as a service reads the settings `again` at HUP.
    pub(crate) async fn run_reloading(self, make: impl FnOnce() -> anyhow::Result<Worker>, again: Again) -> ! {
        self.work(make, Some(again)).await.unwrap_or_else(|error| exit::report(&program(), &error)).now()
    }

    /// Checks the settings and the worker. Nothing is connected.
    pub fn checks(&self, make: impl FnOnce() -> anyhow::Result<Worker>) -> Vec<anyhow::Result<()>> {
        let worker = make().and_then(|worker| Ok(worker.validate(&self.worker.clone().into())?));
        vec![self.log.check().map_err(Into::into), self.connect.check().map_err(Into::into), worker]
    }

    async fn work(self, make: impl FnOnce() -> anyhow::Result<Worker>, again: Option<Again>) -> anyhow::Result<Exit> {
        logging::init(&self.log)?;
        secrets::hide();
        let _monitoring = self.metrics.serve("recruiter-worker").await?;
        let first = self.settled(make()?);
        // From a terminal, which may be closed, HUP is a request to stop.
        let (shutdown, reloads) = match again.filter(|_| service::is_managed()) {
            None => (Shutdown::on_signals()?, mpsc::channel(1).1),
            Some(again) => {
                (Shutdown::on_stop_signals()?, generations::reload_at(signal(SignalKind::hangup())?, move || self.reloaded(again()?)))
            }
        };
        let mut abort = shutdown.clone();
        let ended = tokio::select! {
            ended = generations::run(first, shutdown, reloads) => match ended {
                Ok(ended) => ended.into(),
                Err(error) => {
                    let exit = Exit::from(&error);
                    return Err(error).context(exit);
                }
            },
            () = async { abort.aborted().await; pause(ABORT_WITHIN).await } => Exit::Aborted,
        };
        Ok(if abort.is_aborted() { Exit::Aborted } else { ended })
    }

    fn settled(&self, worker: Worker) -> Settled {
        Settled { worker, connect: (&self.connect).into(), config: self.worker.clone().into() }
    }

    /// A worker with new settings. Logs and metrics are of the process.
    fn reloaded(&self, (new, worker): (Self, Worker)) -> anyhow::Result<Settled> {
        if (&new.log, &new.metrics) != (&self.log, &self.metrics) {
            tracing::warn!("the settings of logs and metrics are not read again: restart the process for them");
        }
        Ok(new.settled(worker))
    }
}

impl From<Ended> for Exit {
    fn from(ended: Ended) -> Self {
        match ended {
            Ended::Stopped => Self::Success,
            Ended::MemoryLimit => Self::MemoryLimit,
        }
    }
}

impl From<&WorkerError> for Exit {
    fn from(error: &WorkerError) -> Self {
        match error {
            WorkerError::NoClasses | WorkerError::Config(_) => Self::Usage,
            WorkerError::Connect(error) => error.exit(),
            WorkerError::Process(_) | WorkerError::Panicked(_) => Self::Failure,
        }
    }
}

/// The command line of a worker without flags of its own.
#[derive(Parser)]
#[command(max_term_width = 100, after_help = EXIT_CODES)]
struct Cli {
    #[command(flatten)]
    process: ProcessArgs,
}

impl Worker {
    /// Sets the one-sentence description of this worker, which begins its `--help`.
    #[must_use]
    pub fn about(mut self, about: impl Into<String>) -> Self {
        self.about = Some(about.into());
        self
    }

    /// The complete `main` of a worker: reads the command line and the environment, starts logging, runs jobs until TERM, INT or HUP
    /// requests a stop, and ends the process with one of the [`Exit`] codes.
    ///
    /// Use [`ProcessArgs`] if the program has its own flags, and [`Worker::run`] if the process does more than run jobs.
    pub async fn main(self) -> ! {
        let about = self.about.clone().unwrap_or_else(|| {
            let classes: Vec<&str> = self.registry.classes().collect();
            format!("Runs background jobs of these classes: {}", classes.join(", "))
        });
        let mut command = Cli::command().about(about);
        let cli = Cli::from_arg_matches(&command.get_matches_mut()).unwrap_or_else(|error| error.format(&mut command).exit());
        cli.process.run(|| Ok(self)).await
    }
}

/// The name of this program, for its messages.
fn program() -> String {
    let path = env::args_os().next().unwrap_or_default();
    Path::new(&path).file_name().map_or_else(|| "worker".into(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mails.
    #[derive(Parser)]
    struct Own {
        #[command(flatten)]
        process: ProcessArgs,
    }

    #[derive(Parser)]
    struct Bare {
        #[command(flatten)]
        _process: ProcessArgs,
    }

    #[derive(Parser)]
    struct Parts {
        #[command(flatten)]
        _worker: WorkerArgs,
        #[command(flatten)]
        _log: LogArgs,
        #[command(flatten)]
        _connect: ConnectArgs,
    }

    /// clap uses the documentation of a flattened group as the description of the program, unless the group disables that.
    #[test]
    fn the_help_says_what_the_program_does() {
        let help = |mut command: clap::Command| command.render_help().to_string();
        assert!(help(Own::command()).starts_with("Mails\n"), "{}", help(Own::command()));
        assert!(help(Bare::command()).starts_with("Usage: "), "{}", help(Bare::command()));
        assert!(help(Parts::command()).starts_with("Usage: "), "{}", help(Parts::command()));
        assert!(help(Cli::command().about("Sends.")).starts_with("Sends.\n"));
        let own = Own::try_parse_from(["own", "--concurrency", "3"]).map(|own| WorkerConfig::from(own.process.worker).concurrency);
        assert_eq!(own.ok(), Some(3));
    }

    #[test]
    fn a_worker_without_flags_has_the_defaults() {
        let own = Own::try_parse_from(["own"]).map(|own| WorkerConfig::from(own.process.worker));
        assert_eq!(own.ok(), Some(WorkerConfig::default()));
    }
}
