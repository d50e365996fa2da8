//! The command line of the three commands.

use std::io::Write as _;

use clap::{Parser, Subcommand};
use recruiter::cli::{output, until_stopped};
use recruiter_common::{events, logging::LogArgs, shutdown::Shutdown};

use crate::{bench, command as dev, demo, package_files};

/// Runs Recruiter with a MongoDB of its own: to develop, to try it out, to measure it.
#[derive(Parser, Clone, Debug)]
#[command(name = "recruiter-dev", bin_name = "recruiter", version)]
pub struct Config {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    log: LogArgs,
}

#[derive(Subcommand, Clone, Debug)]
enum Command {
    /// Run MongoDB and a complete Recruiter on this machine, for development
    Dev(dev::DevArgs),
    /// Run one job for each of your files, kill a worker, and check that no job is lost
    Demo(demo::DemoArgs),
    /// Measure speed and resource use, by default on an embedded MongoDB
    Bench(bench::BenchArgs),
    /// Write man pages, scripts for shells, and examples of settings, of all programs
    #[command(hide = true)]
    PackageFiles(package_files::PackageFilesArgs),
}

impl Config {
    /// Runs the command, [`until_stopped`].
    pub async fn run(self) -> anyhow::Result<()> {
        let log = if matches!(self.command, Command::Dev(_)) { self.log.clone() } else { self.log.clone().or("warn") };
        until_stopped(&log, |shutdown| self.dispatch(shutdown)).await
    }

    async fn dispatch(self, shutdown: Shutdown) -> anyhow::Result<()> {
        let out = &mut output::stdout();
        let done = match self.command {
            Command::Dev(args) => dev::run(args, &self.log, shutdown, out).await,
            Command::Demo(args) => demo::run(args, shutdown, out).await,
            Command::Bench(args) => bench::run(args, shutdown, out).await,
            Command::PackageFiles(args) => package_files::run(&args, out),
        };
        // Output and events that were produced before an error are written as well.
        let written = out.flush();
        events::flush().await;
        done.and(written.map_err(Into::into))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Config::command().debug_assert();
    }

    #[test]
    fn every_flag_can_be_set_in_the_environment() {
        fn check(command: &clap::Command) {
            for argument in command.get_arguments().filter(|argument| !argument.is_positional()) {
                let variable = argument.get_env().and_then(|name| name.to_str()).unwrap_or_default();
                assert!(variable.starts_with("RECRUITER_"), "{} --{}: {variable:?}", command.get_name(), argument.get_id());
            }
            command.get_subcommands().for_each(check);
        }
        check(&Config::command());
    }
}
