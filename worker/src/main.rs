//! The stock worker: runs programs that a local file names, and nothing else. Everything is in the library.

use clap::{CommandFactory as _, FromArgMatches as _};
use mimalloc::MiMalloc;
use recruiter_common::flags::without_empty_variables;
use recruiter_worker::cli::Config;

/// With glibc's allocator, a third of the worker's processor time was in `malloc` and `free`.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

#[tokio::main]
async fn main() {
    let mut command = without_empty_variables(Config::command());
    let config = Config::from_arg_matches(&command.get_matches_mut()).unwrap_or_else(|error| error.format(&mut command).exit());
    config.run().await
}
