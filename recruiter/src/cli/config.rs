//! `recruiter config` and `check-config`: the settings, which [`settings`](recruiter_common::settings) shows and checks.

use clap::Subcommand;

use super::output::Format;

pub(super) const EXAMPLES: &str = "Examples:
  recruiter check-config
  recruiter check-config --settings new.toml
  recruiter-worker --check-config
  recruiter-cleaner --check-config";

/// What about the settings.
#[derive(Subcommand, Clone, Debug)]
pub(super) enum ConfigCommand {
    /// Show all settings, without passwords, and where each comes from: flag, variable, file or default
    Show(Format),
}
