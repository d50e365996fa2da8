//! The `recruiter` command: everything is in the library.

use clap::Parser;
use recruiter::config::Config;
use recruiter_common::exit::{Exit, report};

#[tokio::main]
async fn main() {
    let done = Config::parse().run().await;
    done.map_or_else(|error| report("recruiter", &error), |()| Exit::Success).now()
}
