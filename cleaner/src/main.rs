//! The executable of the cleaner: everything is in the library.

use clap::CommandFactory as _;
use recruiter_cleaner::cli::Config;
use recruiter_common::{exit, flags::without_empty_variables, settings};

#[tokio::main]
async fn main() {
    let (command, arguments) = (without_empty_variables(Config::command()), std::env::args_os().collect::<Vec<_>>());
    let config = settings::parsed::<Config>(&command, &arguments).unwrap_or_else(|error| error.exit());
    config.run().await.unwrap_or_else(|error| exit::report("recruiter-cleaner", &error)).now()
}
