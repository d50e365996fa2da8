//! The `recruiter` command: everything is in the library.

use clap::Parser;
use recruiter::config::Config;
use recruiter_common::exit::{Exit, report};

fn main() {
    let config = Config::parse();
    let done = match tokio::runtime::Runtime::new() {
        // Not dropped, but ended with the process: a read of standard input may never return, and the driver's tasks
        // panic when they are taken apart under each other.
        Ok(runtime) => std::mem::ManuallyDrop::new(runtime).block_on(config.run()),
        Err(error) => Err(error.into()),
    };
    let exit = done.map_or_else(|error| report("recruiter", &error), |()| Exit::Success);
    std::process::exit(exit as i32)
}
