//! The `recruiter` command: everything is in the library.

use recruiter::cli::configured;
use recruiter_common::exit::{Exit, report};

#[tokio::main]
async fn main() {
    let config = configured(std::env::args_os()).unwrap_or_else(|error| error.exit());
    let done = config.run().await;
    done.map_or_else(|error| report("recruiter", &error), |()| Exit::Success).now()
}
