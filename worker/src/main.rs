//! The stock worker: runs programs that a local file names, and nothing else.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Parser;
use recruiter_common::{
    exit::{self, Exit},
    shutdown::{Shutdown, pause},
    store::ConnectArgs,
    telemetry::{self, LogArgs},
};
use recruiter_worker::{ABORT_WITHIN, Worker, WorkerArgs, stock};

/// Runs Recruiter jobs whose classes are programs named in a file.
#[derive(Parser)]
#[command(name = "recruiter-worker", version, max_term_width = 100, after_help = EXAMPLE)]
struct Cli {
    /// File that names the program of each class
    #[arg(long, env = "RECRUITER_WORKER_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Have the classes for trying and testing as well: noop, sleep, fail, panic, exit-abruptly, leak
    #[arg(long, env = "RECRUITER_BUILTINS")]
    builtins: bool,
    #[command(flatten)]
    worker: WorkerArgs,
    #[command(flatten)]
    connect: ConnectArgs,
    #[command(flatten)]
    log: LogArgs,
}

const EXAMPLE: &str = r#"Example of a configuration file:
  [workables.checksum]                       # the class a job names
  command = ["sha256sum", "--", "{path}"]    # {path}: parameters.path, one argument, never a shell
  timeout = "30s"

Exit codes: 0 stopped, 1 failure, 2 wrong flags, 69 MongoDB unreachable, 75 memory limit reached,
  77 refused by MongoDB, 78 configuration file unusable, 130 stopped at once by a second signal"#;

#[tokio::main]
async fn main() {
    run(Cli::parse()).await.unwrap_or_else(|error| exit::report("recruiter-worker", &error)).now()
}

async fn run(cli: Cli) -> anyhow::Result<Exit> {
    telemetry::init(&cli.log)?;
    let mut worker = Worker::new();
    if let Some(file) = &cli.config {
        worker = worker.register_programs(stock::load(file).context(Exit::Config)?).context(Exit::Config)?;
    }
    if cli.builtins {
        worker = worker.register_builtins().context(Exit::Config)?;
    }
    let shutdown = Shutdown::on_signals()?;
    let mut abort = shutdown.clone();
    tokio::select! {
        ended = worker.run(&cli.connect, cli.worker, shutdown) => ended,
        () = async { abort.aborted().await; pause(ABORT_WITHIN).await } => Ok(Exit::Aborted),
    }
}
