//! The stock worker: runs programs that a local file names, and nothing else. Everything is in the library.

use clap::CommandFactory as _;
use mimalloc::MiMalloc;
use recruiter_common::{flags::without_empty_variables, settings};
use recruiter_worker::cli::Config;

/// With glibc's allocator, a third of the worker's processor time was in `malloc` and `free`.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

#[tokio::main]
async fn main() {
    let (command, arguments) = (without_empty_variables(Config::command()), std::env::args_os().collect::<Vec<_>>());
    let config = settings::parsed::<Config>(&command, &arguments).unwrap_or_else(|error| error.exit());
    config.run(move || settings::again(&command, &arguments)).await
}
