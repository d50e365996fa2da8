//! The command line of the cleaner.

use std::path::Path;

use clap::Parser;
use recruiter_common::{
    events,
    exit::Exit,
    logging::{self, LogArgs},
    monitoring::MetricsArgs,
    secrets,
    settings::{self, Program, Question, SettingsArgs},
    shutdown::Shutdown,
    store::ConnectArgs,
};

use crate::config::CleanerArgs;

const EXIT_CODES: &str = "Exit codes: 0 stopped, 1 failure, 2 wrong flags, 69 MongoDB unreachable, 77 refused by MongoDB,
  78 a file cannot be used, 130 stopped at once by a second signal";

/// Retires dead workers of Recruiter, rescues their jobs, and deletes old jobs from the archive.
#[derive(Parser, Clone, Debug)]
#[command(name = "recruiter-cleaner", version, max_term_width = 100, after_help = EXIT_CODES)]
#[command(mut_arg("settings", |flag| settings::flag(flag, "RECRUITER_CLEANER_SETTINGS", Config::FILE)))]
pub struct Config {
    #[command(flatten)]
    cleaner: CleanerArgs,
    #[command(flatten)]
    connect: ConnectArgs,
    #[command(flatten)]
    log: LogArgs,
    #[command(flatten)]
    metrics: MetricsArgs,
    #[command(flatten)]
    settings: SettingsArgs,
}

impl Program for Config {
    const FILE: &'static str = "/etc/recruiter/cleaner.toml";

    fn file(&self) -> Option<&Path> {
        self.settings.file()
    }

    fn question(&self) -> Option<Question> {
        self.settings.question()
    }

    fn checks(&self) -> Vec<anyhow::Result<()>> {
        vec![self.log.check().map_err(Into::into), self.connect.check().map_err(Into::into), self.cleaner.validate()]
    }
}

impl Config {
    /// Runs until a signal stops the process. A second one ends it at once.
    ///
    /// # Errors
    /// Those of [`crate::run`], and when logs cannot be written as wished.
    pub async fn run(self) -> anyhow::Result<Exit> {
        logging::init(&self.log)?;
        secrets::hide();
        let _monitoring = self.metrics.serve("recruiter-cleaner").await?;
        let shutdown = Shutdown::on_signals()?;
        let mut abort = shutdown.clone();
        tokio::select! {
            ended = crate::run(self.cleaner, &self.connect, shutdown) => {
                events::flush().await;
                ended.map(|()| Exit::Success)
            }
            () = abort.aborted() => Ok(Exit::Aborted),
        }
    }
}
