//! The executable of the cleaner: everything is in the library.

use clap::{CommandFactory as _, FromArgMatches as _};
use recruiter_cleaner::cli::Config;
use recruiter_common::{exit, flags::without_empty_variables};

#[tokio::main]
async fn main() {
    let mut command = without_empty_variables(Config::command());
    let config = Config::from_arg_matches(&command.get_matches_mut()).unwrap_or_else(|error| error.format(&mut command).exit());
    config.run().await.unwrap_or_else(|error| exit::report("recruiter-cleaner", &error)).now()
}
