//! The command line of the stock worker.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Parser, builder::BoolishValueParser};
use recruiter_common::{
    exit::Exit,
    settings::{self, Program, Question, SettingsArgs},
};

use super::stock;
use crate::{
    Worker,
    process::{EXIT_CODES, ProcessArgs},
};

/// Runs Recruiter jobs as programs, which a workables file names.
#[derive(Parser)]
#[command(name = "recruiter-worker", version, max_term_width = 100, after_help = format!("{EXAMPLE}\n\n{EXIT_CODES}"))]
#[command(mut_arg("settings", |flag| settings::flag(flag, "RECRUITER_WORKER_SETTINGS", Config::FILE)))]
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
    #[command(flatten)]
    settings: SettingsArgs,
}

impl Program for Config {
    const FILE: &'static str = "/etc/recruiter/worker.toml";

    fn file(&self) -> Option<&Path> {
        self.settings.file()
    }

    fn question(&self) -> Option<Question> {
        self.settings.question()
    }

    fn checks(&self) -> Vec<anyhow::Result<()>> {
        self.process.checks(|| self.worker())
    }
}

const EXAMPLE: &str = r#"Example of a workables file:
  [workables.checksum]    # the class a job names
  # {path}: parameters.path, as one argument. There is no shell
  command = ["sha256sum", "--", "{path}"]
  timeout = "30s""#;

impl Config {
    /// Runs the worker until a signal stops the process, and ends the process with its exit code. At HUP, a service reads its settings
    /// `again`.
    pub async fn run(self, again: impl Fn() -> anyhow::Result<Self> + Send + 'static) {
        let again = move || again().and_then(|new| Ok((new.process.clone(), new.worker()?)));
        self.process.clone().run_reloading(|| self.worker(), Box::new(again)).await
    }

    fn worker(&self) -> anyhow::Result<Worker> {
        let mut worker = Worker::new();
        if let Some(file) = &self.config {
            let load = if self.log_stderr { stock::load_logged } else { stock::load };
            worker = worker.register_programs(load(file).context(Exit::Config)?).context(Exit::Config)?;
        }
        if self.builtins {
            worker = worker.register_builtins().context(Exit::Config)?;
        }
        Ok(worker)
    }
}
