//! The `recruiter` command: everything is in the library.

use recruiter::cli::{Config, parsed};
use recruiter_common::exit::{Exit, report};

#[tokio::main]
async fn main() {
    let config = parsed::<Config>(std::env::args_os()).unwrap_or_else(|error| error.exit());
    let done = config.run().await;
    done.map_or_else(|error| report("recruiter", &error), |()| Exit::Success).now()
}
