//! The three processes for the failure tests: the code of the released binaries below `main`, with crash points, and
//! with jobs that write a ledger.

use std::time::Duration;

use clap::{Parser, Subcommand};
use recruiter::run::RunArgs;
use recruiter_cleaner::config::CleanerArgs;
use recruiter_common::{
    exit::{Exit, report},
    logging::{self, LogArgs},
    shutdown::{Shutdown, pause},
    store::ConnectArgs,
};
use recruiter_tests::{faults, ledger};
use recruiter_worker::{ABORT_WITHIN, WorkerArgs};

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    role: Role,
    #[command(flatten)]
    connect: ConnectArgs,
    #[command(flatten)]
    log: LogArgs,
}

#[derive(Subcommand)]
enum Role {
    Recruiter(RunArgs),
    Cleaner(CleanerArgs),
    Worker(WorkerArgs),
}

#[tokio::main]
async fn main() {
    run(Cli::parse()).await.unwrap_or_else(|error| report("faulty", &error)).now()
}

async fn run(cli: Cli) -> anyhow::Result<Exit> {
    logging::init(&cli.log)?;
    let connect = ConnectArgs { commands: Some(faults::striker()), ..cli.connect };
    let shutdown = Shutdown::on_signals()?;
    // As in the released programs.
    let abort_within = if matches!(cli.role, Role::Worker(_)) { ABORT_WITHIN } else { Duration::ZERO };
    let mut abort = shutdown.clone();
    let work = async {
        match cli.role {
            Role::Recruiter(args) => recruiter::run::run(args, &connect, shutdown).await.map(|()| Exit::Success),
            Role::Cleaner(args) => recruiter_cleaner::run(args, &connect, shutdown).await.map(|()| Exit::Success),
            Role::Worker(args) => Ok(ledger::worker()?.run(&connect, args, shutdown).await?.into()),
        }
    };
    tokio::select! {
        ended = work => ended,
        () = async { abort.aborted().await; pause(abort_within).await } => Ok(Exit::Aborted),
    }
}
