//! The `recruiter` command: everything is in the library.

use std::process::ExitCode;

use clap::Parser;
use recruiter::config::Config;
use recruiter_common::exit::{Exit, report};

fn main() -> ExitCode {
    let config = Config::parse();
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => return report("recruiter", &error.into()).into(),
    };
    let done = runtime.block_on(config.run());
    // Not waiting for a read of standard input that may never return.
    runtime.shutdown_background();
    done.map_or_else(|error| report("recruiter", &error), |()| Exit::Success).into()
}
