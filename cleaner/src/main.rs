//! The executable of the cleaner.

use clap::{CommandFactory as _, FromArgMatches as _, Parser};
use recruiter_cleaner::config::CleanerArgs;
use recruiter_common::{
    events,
    exit::{self, Exit},
    flags::without_empty_variables,
    logging::{self, LogArgs},
    secrets,
    shutdown::Shutdown,
    store::ConnectArgs,
};

/// Retires dead workers of Recruiter, rescues their jobs, and deletes old jobs from the archive.
#[derive(Parser)]
#[command(name = "recruiter-cleaner", version, max_term_width = 100, after_help = EXIT_CODES)]
struct Cli {
    #[command(flatten)]
    cleaner: CleanerArgs,
    #[command(flatten)]
    connect: ConnectArgs,
    #[command(flatten)]
    log: LogArgs,
}

const EXIT_CODES: &str = "Exit codes: 0 stopped, 1 failure, 2 wrong flags, 69 MongoDB unreachable, 77 refused by MongoDB,
  78 a file cannot be used, 130 stopped at once by a second signal";

#[tokio::main]
async fn main() {
    let mut command = without_empty_variables(Cli::command());
    let cli = Cli::from_arg_matches(&command.get_matches_mut()).unwrap_or_else(|error| error.format(&mut command).exit());
    run(cli).await.unwrap_or_else(|error| exit::report("recruiter-cleaner", &error)).now()
}

async fn run(cli: Cli) -> anyhow::Result<Exit> {
    logging::init(&cli.log)?;
    secrets::hide();
    let shutdown = Shutdown::on_signals()?;
    let mut abort = shutdown.clone();
    tokio::select! {
        ended = recruiter_cleaner::run(cli.cleaner, &cli.connect, shutdown) => {
            events::flush().await;
            ended.map(|()| Exit::Success)
        }
        () = abort.aborted() => Ok(Exit::Aborted),
    }
}
