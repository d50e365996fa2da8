//! The command line of the stock worker.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Parser, builder::BoolishValueParser};
use recruiter_common::exit::Exit;

use super::stock;
use crate::{
    Worker,
    process::{EXIT_CODES, ProcessArgs},
};

/// Runs Recruiter jobs as programs, which a workables file names.
#[derive(Parser)]
#[command(name = "recruiter-worker", version, max_term_width = 100, after_help = format!("{EXAMPLE}\n\n{EXIT_CODES}"))]
pub struct Config {
    /// Workables file, which names the program of each class
    #[arg(long, env = "RECRUITER_WORKER_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Register the test classes too: noop, sleep, fail, panic, exit-abruptly, leak, count
    #[arg(long, env = "RECRUITER_BUILTINS")]
    builtins: bool,
    /// Log the standard error of every program, as if each workable of the file had `log_stderr = true`
    #[arg(long, env = "RECRUITER_LOG_STDERR", value_parser = BoolishValueParser::new())]
    log_stderr: bool,
    #[command(flatten)]
    process: ProcessArgs,
}

const EXAMPLE: &str = r#"Example of a configuration file:
  [workables.checksum]    # the class a job names
  # {path}: parameters.path, as one argument. There is no shell
  command = ["sha256sum", "--", "{path}"]
  timeout = "30s""#;

impl Config {
    /// Runs the worker until a signal stops the process, and ends the process with its exit code.
    pub async fn run(self) {
        let Self { config, builtins, log_stderr, process } = self;
        process.run(|| worker(config, builtins, log_stderr)).await
    }
}

fn worker(config: Option<PathBuf>, builtins: bool, log_stderr: bool) -> anyhow::Result<Worker> {
    let mut worker = Worker::new();
    if let Some(file) = &config {
        let load = if log_stderr { stock::load_logged } else { stock::load };
        worker = worker.register_programs(load(file).context(Exit::Config)?).context(Exit::Config)?;
    }
    if builtins {
        worker = worker.register_builtins().context(Exit::Config)?;
    }
    Ok(worker)
}
