//! The command-line arguments of the cleaner.

use std::time::Duration;

use clap::Args;
use recruiter_common::exit::Exit;

/// The settings of the cleaner.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Cleaning")]
pub struct CleanerArgs {
    /// Time without a new heartbeat after which a worker is dead. A worker on this cleaner's machine is dead as soon as
    /// its process is gone
    #[arg(long, env = "RECRUITER_DEAD_AFTER", value_name = "DURATION", default_value = "30s", value_parser = humantime::parse_duration)]
    pub dead_after: Duration,
    /// Interval between polls of the roster
    #[arg(long, env = "RECRUITER_CLEAN_EVERY", value_name = "DURATION", default_value = "1s", value_parser = humantime::parse_duration)]
    pub every: Duration,
    /// Interval between sweeps for locked jobs whose worker is not in the roster
    #[arg(long, env = "RECRUITER_SWEEP_EVERY", value_name = "DURATION", default_value = "1m", value_parser = humantime::parse_duration)]
    pub sweep_every: Duration,
    /// Time for which finished jobs stay in the archive
    #[arg(long, env = "RECRUITER_KEEP_ARCHIVED", value_name = "DURATION", default_value = "5d", value_parser = humantime::parse_duration)]
    pub keep_archived: Duration,
    /// Interval between deletions of old jobs from the archive
    #[arg(long, env = "RECRUITER_PRUNE_EVERY", value_name = "DURATION", default_value = "1m", value_parser = humantime::parse_duration)]
    pub prune_every: Duration,
}

impl CleanerArgs {
    /// Checks the arguments against each other.
    ///
    /// # Errors
    /// The error names the flag to change and carries [`Exit::Usage`].
    pub fn validate(&self) -> anyhow::Result<()> {
        let refuse = |text: String| Err(anyhow::anyhow!(text).context(Exit::Usage));
        if self.every.is_zero() {
            return refuse("--every must be above zero".into());
        }
        if self.dead_after < self.every * 3 {
            return refuse(format!(
                "--dead-after ({}) must be at least three polls of the roster (--every {}), so that one late poll cannot declare a worker dead",
                humantime::format_duration(self.dead_after),
                humantime::format_duration(self.every)
            ));
        }
        Ok(())
    }
}
