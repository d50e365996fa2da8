//! A worker as a process of its own: flags, logs, signals, exit codes. The stock worker is one of them.

use std::{env, path::Path, time::Duration};

use anyhow::Context as _;
use bytesize::ByteSize;
use clap::{Args, CommandFactory, FromArgMatches, Parser};
use recruiter_common::{
    exit::{self, Exit},
    logging::{self, LogArgs},
    secrets,
    service::Notifier,
    shutdown::{Shutdown, pause},
    store::ConnectArgs,
};

use crate::{
    ABORT_WITHIN, Ended, Worker, WorkerError,
    config::{DEFAULT_CONCURRENCY, DEFAULT_GRACE, DEFAULT_HEARTBEAT, DEFAULT_LEASE, DEFAULT_POLL, MOST_CONCURRENCY, WorkerConfig},
};

/// Exit codes of every worker process, for the end of its `--help`.
pub const EXIT_CODES: &str = "Exit codes: 0 stopped, 1 failure, 2 wrong flags, 69 MongoDB unreachable, 75 memory limit reached,
  77 refused by MongoDB, 78 configuration file unusable, 130 stopped at once by a second signal";

/// The flags and environment variables of [`WorkerConfig`].
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Work", about = None, long_about = None)]
pub struct WorkerArgs {
    /// Groups to work on, separated by commas or given several times; every group unless one is named
    #[arg(long, env = "RECRUITER_WORK_ON", value_name = "GROUP", value_delimiter = ',')]
    work_on: Vec<String>,
    /// Jobs to run at a time
    #[arg(long, env = "RECRUITER_CONCURRENCY", value_name = "N", default_value_t = DEFAULT_CONCURRENCY, value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_CONCURRENCY)))]
    concurrency: u32,
    /// Time limit of jobs whose workable has none of its own [default: none]
    #[arg(long, env = "RECRUITER_TIME_LIMIT", value_name = "DURATION", value_parser = humantime::parse_duration)]
    time_limit: Option<Duration>,
    /// Resident memory above which no more jobs are taken and the process ends with exit code 75, to be started
    /// again [default: none]
    #[arg(long, env = "RECRUITER_MEMORY_LIMIT", value_name = "SIZE")]
    memory_limit: Option<ByteSize>,
    /// How long running jobs may go on after TERM, INT or HUP; then they are interrupted. Keep systemd's TimeoutStopSec
    /// above it
    #[arg(long, env = "RECRUITER_GRACE", value_name = "DURATION", default_value_t = DEFAULT_GRACE.into())]
    grace: humantime::Duration,
    /// Heartbeat interval
    #[arg(long, env = "RECRUITER_HEARTBEAT", value_name = "DURATION", default_value_t = DEFAULT_HEARTBEAT.into())]
    heartbeat: humantime::Duration,
    /// How long this worker trusts itself to be alive after a heartbeat; cleaners wait longer before they retire it
    #[arg(long, env = "RECRUITER_WORKER_LEASE", value_name = "DURATION", default_value_t = DEFAULT_LEASE.into())]
    lease: humantime::Duration,
    /// A job starts within this time even if every hint is lost: the recruiter and the worker each look twice as often
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

/// The flags of every worker process: as a clap group beside flags of one's own, or alone by [`Worker::main`].
#[derive(Args, Clone, Debug)]
// Else clap would take the lines above for what the program does.
#[command(about = None, long_about = None)]
pub struct ProcessArgs {
    /// How it works.
    #[command(flatten)]
    pub worker: WorkerArgs,
    /// Where MongoDB is.
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// How it logs.
    #[command(flatten)]
    pub log: LogArgs,
}

impl ProcessArgs {
    /// Makes the worker, works until TERM, INT or HUP asks it to stop, and ends the process with one of the [`Exit`] codes. What goes
    /// wrong is printed, also what goes wrong in `make`, with the [`Exit`] in its context.
    pub async fn run(self, make: impl FnOnce() -> anyhow::Result<Worker>) -> ! {
        self.work(make).await.unwrap_or_else(|error| exit::report(&program(), &error)).now()
    }

    async fn work(self, make: impl FnOnce() -> anyhow::Result<Worker>) -> anyhow::Result<Exit> {
        logging::init(&self.log)?;
        secrets::hide();
        let worker = make()?;
        let shutdown = Shutdown::on_signals()?;
        let mut abort = shutdown.clone();
        let ended = tokio::select! {
            ended = worker.run_notifying((&self.connect).into(), self.worker.into(), shutdown, Notifier::Process) => match ended {
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

/// What is on the command line of a worker without flags of its own.
#[derive(Parser)]
#[command(max_term_width = 100, after_help = EXIT_CODES)]
struct Cli {
    #[command(flatten)]
    process: ProcessArgs,
}

impl Worker {
    /// Says in one sentence what this worker is, for the beginning of its `--help`.
    #[must_use]
    pub fn about(mut self, about: impl Into<String>) -> Self {
        self.about = Some(about.into());
        self
    }

    /// The whole of a worker's `main`: reads the command line and the environment, starts logging, works until TERM, INT or HUP asks it to
    /// stop, and ends the process with one of the [`Exit`] codes.
    ///
    /// Use [`ProcessArgs`] when there are flags of your own, and [`Worker::run`] when the process is more than a worker.
    pub async fn main(self) -> ! {
        let about = self.about.clone().unwrap_or_else(|| {
            let classes: Vec<&str> = self.registry.classes().collect();
            format!("Does background jobs of the classes that it has: {}", classes.join(", "))
        });
        let mut command = Cli::command().about(about);
        let cli = Cli::from_arg_matches(&command.get_matches_mut()).unwrap_or_else(|error| error.format(&mut command).exit());
        cli.process.run(|| Ok(self)).await
    }
}

/// Name of this program, for its messages.
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

    /// clap takes the first words of a group's documentation for those of the program, unless they are told apart.
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
