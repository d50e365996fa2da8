//! The program of `recruiter dev`, `demo` and `bench`: everything is in the library.

use recruiter_common::exit::{Exit, report};
use recruiter_dev::cli::Config;

#[tokio::main]
async fn main() {
    let config = recruiter::cli::parsed::<Config>(std::env::args_os()).unwrap_or_else(|error| error.exit());
    let done = config.run().await;
    done.map_or_else(|error| report("recruiter", &error), |()| Exit::Success).now()
}
