//! The command line of `recruiter`. Each command is one file that reads its flags and prints. The library has the
//! rules.

mod audit;
mod change;
mod completions;
mod config;
mod consumers;
mod dev;
mod doctor;
mod enqueue;
mod events;
mod exit;
mod export;
mod files;
mod filter;
mod graph;
mod groups;
mod import;
mod jobs;
mod limits;
mod messages;
mod migrate;
mod moving;
pub mod output;
mod presence;
mod redaction;
mod retries;
mod revise;
mod roster;
mod schedules;
mod schedules_file;
mod stats;
mod top;
mod units;
pub mod view;
mod wait;
mod why;
mod workers;

use std::{
    ffi::OsString,
    io::Write,
    path::{Path, PathBuf},
};

use clap::{
    CommandFactory as _, Parser, Subcommand,
    error::{ContextKind, ContextValue},
};
use recruiter_common::{
    events as events_of_process,
    exit::Exit,
    flags::without_empty_variables,
    logging::{self, LogArgs},
    secrets,
    settings::{self, Program, Question},
    shutdown::Shutdown,
    store::{ConnectArgs, ConnectError, Store},
};

use self::exit::{exit_codes, or_stopped};
use crate::{run, web};

const EXAMPLES: &str = "  recruiter demo --dir ~/Documents
      run it on your own files, with an embedded MongoDB
  recruiter dev
      run MongoDB and a complete Recruiter for development, until Ctrl-C
  recruiter run
      assign jobs to workers until stopped; a second process stands by
  recruiter enqueue --class checksum --parameters '{\"path\": \"/etc/hostname\"}' \\
      --after 5m
      enqueue one job, due in five minutes
  recruiter enqueue --from jobs.ndjson
      enqueue many jobs, one for each line {\"class\": …, \"parameters\": {…}}
  recruiter jobs list --why tried-too-many-times --since 2h
  recruiter jobs show 65a1b2c3d4e5f60718293a4b
  recruiter jobs retry 65a1b2c3d4e5f60718293a4b
      find a failed job, show its history, and retry it
  recruiter jobs retry --error-class SmtpDown --since 2h --dry-run
      count the jobs that would be retried; with --yes, retry them
  recruiter schedules apply schedules.toml --dry-run
      show what a file of periodic jobs would change
  recruiter roster
      list workers: state, free slots, jobs, last heartbeat, classes
  recruiter stats --json
      show queue depth, throughput and latency
  recruiter doctor
      examine the whole installation; says what is wrong, and what to do";

const ENQUEUE_EXAMPLES: &str = "\
Examples:
  recruiter enqueue --class checksum --parameters '{\"path\": \"/etc/hostname\"}'
  recruiter enqueue --class mail --group mail --priority 9 \\
      --at 2030-01-31T18:00:00Z --tag welcome
  recruiter enqueue --class mail --retry 5 --retry-delay 10s --backoff
  recruiter enqueue --class report --parameters '{\"customer\": 17}' \\
      --unique-by customer --after 1m --on-conflict postpone \\
      --postpone-at-most 10m
  recruiter enqueue --from jobs.ndjson --json | tail -n 1
  generate-jobs | recruiter enqueue --from -

What is not given is as the workables file of the workers says for the class. The defaults of a Rust type
(`Workable::defaults`) are known to its application only: give its group, priority and retry policy here.

Each line of a file is one job. Only `class` is required. Blank lines are skipped:
  {\"class\": \"mail\", \"parameters\": {\"to\": \"a@example.org\"}, \"group\": \"mail\",
   \"priority\": 9, \"after\": \"5m\", \"tags\": [\"welcome\"], \"urn\": \"user:17\",
   \"retry_policy\": {\"class\": \"RetryForever\",
     \"parameters\": {\"seconds_to_wait_before_retry\": 60}},
   \"id\": \"65a1b2c3d4e5f60718293a4b\"}
`scheduled_at` (2030-01-31T18:00:00Z) may replace `after`, and `items` (an array, for a bundle) may
replace `parameters`. Further fields: `expires_at` or `expires_after`, `keep`, and `unique`:
  {\"key\": \"invoice-17\", \"until\": \"started\", \"on_conflict\": \"postpone\",
   \"at_most\": \"1h\"}
with `parameters` (an array of names, [] for all) in place of `key`, and `period` in place of `until`.
An invalid line ends the import: the lines before it are enqueued, and the
error message names the --skip to continue with.";

fn examples() -> String {
    format!(
        "Global options, described by --help: --uri, --connect-timeout, --collection-prefix, --log, --log-format, --settings\n\nExamples:\n{EXAMPLES}"
    )
}

/// Background jobs on MongoDB: assigns due jobs to workers; enqueues, shows and changes jobs.
///
/// Only `run` must keep running. `recruiter-worker` runs the jobs. `recruiter-cleaner` rescues the jobs of dead workers.
#[derive(Parser, Clone, Debug)]
#[command(name = "recruiter", version, after_help = examples(), after_long_help = format!("{}\n\n{}", examples(), exit_codes()))]
#[command(mut_arg("settings", |flag| settings::flag(flag, "RECRUITER_SETTINGS", Config::FILE)))]
pub struct Config {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    connect: ConnectArgs,
    #[command(flatten)]
    log: LogArgs,
    /// File of settings
    #[arg(long, global = true, value_name = "FILE")]
    settings: Option<PathBuf>,
}

impl Program for Config {
    const FILE: &'static str = "/etc/recruiter/recruiter.toml";
    const TABLES: &'static [&'static str] = &["run", "web"];

    fn file(&self) -> Option<&Path> {
        self.settings.as_deref()
    }

    fn question(&self) -> Option<Question> {
        if let Command::CheckConfig(format) = &self.command {
            return Some(Question::Check { json: format.json });
        }
        let Command::Config(config::ConfigCommand::Show(format)) = &self.command else { return None };
        Some(Question::Show { json: format.json })
    }

    fn is_service(&self) -> bool {
        matches!(&self.command, Command::Run(_)) || matches!(&self.command, Command::Web(args) if args.serves())
    }

    fn checks(&self) -> Vec<anyhow::Result<()>> {
        let run = if let Command::Run(args) = &self.command { args.validate() } else { Ok(()) };
        let web = if let Command::Web(args) = &self.command { args.check() } else { Ok(()) };
        vec![self.log.check().map_err(Into::into), self.connect.check().map_err(Into::into), run, web]
    }
}

#[derive(Subcommand, Clone, Debug)]
enum Command {
    /// Assign jobs to workers until stopped
    Run(run::RunArgs),
    /// Serve an HTTP API, for programs in any language, and pages, for people, until stopped
    Web(Box<web::WebArgs>),
    /// Enqueue one job, or many from a file, and write their ids
    #[command(after_help = ENQUEUE_EXAMPLES)]
    Enqueue(Box<enqueue::EnqueueArgs>),
    /// List, show, retry, change, cancel and delete jobs
    #[command(subcommand)]
    Jobs(Box<jobs::JobsCommand>),
    /// List, get, put and delete the files of jobs, which are too large for a document
    #[command(subcommand)]
    Files(files::FilesCommand),
    /// List, set and remove the limits of resources: how many jobs run at a time, how often they start
    #[command(subcommand)]
    Limits(limits::LimitsCommand),
    /// Pause everything, a group or a class: its jobs wait, and running jobs continue
    Pause(limits::PauseArgs),
    /// End a pause
    Resume(limits::ResumeArgs),
    /// List what is paused, by whom and why
    Pauses(output::Format),
    /// List, show, change, run and remove schedules of periodic jobs
    #[command(subcommand)]
    Schedules(Box<schedules::SchedulesCommand>),
    /// Enqueue, show, cancel and retry jobs that wait for each other
    #[command(subcommand)]
    Graph(graph::GraphCommand),
    /// List and change the settings of groups
    #[command(subcommand)]
    Groups(groups::GroupsCommand),
    /// List, set and remove what is not shown of the jobs of some classes
    #[command(subcommand)]
    Redaction(redaction::RedactionCommand),
    /// List what was done through `recruiter web`, newest first
    Audit(audit::AuditArgs),
    /// List workers, and show which recruiter leads
    Roster(output::Format),
    /// Quiet, resume and stop workers, on any machine
    #[command(subcommand)]
    Workers(workers::WorkersCommand),
    /// Show queue depth, throughput and latency
    Stats(stats::StatsArgs),
    /// Watch throughput, groups, workers and failures in the terminal, and act on them
    #[command(after_help = top::EXAMPLES)]
    Top(top::TopArgs),
    /// Examine MongoDB, the schema, the processes and the waiting jobs, and say what to do
    #[command(after_help = doctor::EXAMPLES)]
    Doctor(doctor::DoctorArgs),
    /// Make the collections, validators and indexes of this release, as the start of a program does
    #[command(after_help = migrate::EXAMPLES)]
    Migrate(migrate::MigrateArgs),
    /// Write what happens to jobs and workers
    #[command(after_help = events::EXAMPLES)]
    Events(events::EventsArgs),
    /// Publish a message of an application
    Publish(messages::PublishArgs),
    /// Write the messages of applications, in order
    #[command(after_help = messages::EXAMPLES)]
    Subscribe(messages::SubscribeArgs),
    /// List, set, reset and remove consumer groups, whose messages become jobs
    #[command(subcommand)]
    Consumers(consumers::ConsumersCommand),
    /// Take over the jobs of another job system
    #[command(subcommand)]
    Import(moving::ImportCommand),
    /// Install the units of systemd, on a machine without the Debian package
    #[command(subcommand)]
    Units(units::UnitsCommand),
    /// Check the settings of `run` and of all commands, without MongoDB, and say what is wrong
    #[command(after_help = config::EXAMPLES)]
    CheckConfig(output::Format),
    /// Show settings
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Write a script with which a shell completes commands
    #[command(after_help = completions::EXAMPLES)]
    Completions(completions::CompletionsArgs),
    /// Run MongoDB and a complete Recruiter on this machine, for development
    #[command(disable_help_flag = true, override_help = "`recruiter dev --help` describes it.")]
    Dev(dev::DevArgs),
    /// Run one job for each of your files, kill a worker, and check that no job is lost
    #[command(disable_help_flag = true, override_help = "`recruiter demo --help` describes it.")]
    Demo(dev::DevArgs),
    /// Measure speed and resource use, by default on an embedded MongoDB
    #[command(disable_help_flag = true, override_help = "`recruiter bench --help` describes it.")]
    Bench(dev::DevArgs),
}

impl Config {
    /// The logging options: a long-running process logs what it does, a command only warnings and errors, and one that draws on the whole
    /// terminal nothing.
    pub fn log(&self) -> LogArgs {
        let log = self.log.clone();
        if self.is_service() {
            return log;
        }
        log.or(if matches!(self.command, Command::Top(_)) { "off" } else { "warn" })
    }

    /// Runs the command, [`until_stopped`].
    pub async fn run(self) -> anyhow::Result<()> {
        if matches!(self.command, Command::Dev(_) | Command::Demo(_) | Command::Bench(_)) {
            return Err(dev::become_recruiter_dev());
        }
        until_stopped(&self.log(), |shutdown| self.dispatch(shutdown)).await
    }

    async fn dispatch(self, shutdown: Shutdown) -> anyhow::Result<()> {
        let (connect, out) = (&self.connect, &mut output::stdout());
        let done = match self.command {
            Command::Run(args) => run::run(args, connect, shutdown).await,
            Command::Web(args) => web::run(*args, connect, shutdown, out).await,
            Command::Enqueue(args) => enqueue::run(*args, connect, shutdown, out).await,
            Command::Jobs(command) => jobs::run(*command, connect, shutdown, out).await,
            Command::Files(command) => or_stopped(shutdown, files::run(command, connect, out)).await,
            Command::Limits(command) => or_stopped(shutdown, limits::run(command, connect, out)).await,
            Command::Pause(args) => or_stopped(shutdown, limits::pause(args, connect, out)).await,
            Command::Resume(args) => or_stopped(shutdown, limits::resume(args, connect, out)).await,
            Command::Audit(args) => or_stopped(shutdown, audit::run(args, connect, out)).await,
            Command::Pauses(format) => or_stopped(shutdown, limits::pauses(format, connect, out)).await,
            Command::Schedules(command) => schedules::run(*command, connect, shutdown, out).await,
            Command::Graph(command) => or_stopped(shutdown, graph::run(command, connect, out)).await,
            Command::Groups(command) => or_stopped(shutdown, groups::run(command, connect, out)).await,
            Command::Redaction(command) => or_stopped(shutdown, redaction::run(command, connect, out)).await,
            Command::Roster(format) => or_stopped(shutdown, roster::run(format, connect, out)).await,
            Command::Workers(command) => or_stopped(shutdown, workers::run(command, connect, out)).await,
            Command::Stats(args) => or_stopped(shutdown, stats::run(args, connect, out)).await,
            Command::Top(args) => or_stopped(shutdown, top::run(args, connect)).await,
            Command::Doctor(args) => or_stopped(shutdown, doctor::run(args, connect, out)).await,
            Command::Migrate(args) => or_stopped(shutdown, migrate::run(args, connect, out)).await,
            Command::Consumers(command) => or_stopped(shutdown, consumers::run(command, connect, out)).await,
            Command::Publish(args) => messages::publish(args, connect, out).await,
            Command::Subscribe(args) => messages::subscribe(args, connect, shutdown, out).await,
            Command::Events(args) => events::run(args, connect, shutdown, out).await,
            Command::Import(command) => moving::run(command, connect, &shutdown, out).await,
            Command::Units(command) => units::run(command, out),
            Command::Completions(args) => completions::run(&args, Self::command(), out),
            // These end in `configured`.
            Command::CheckConfig(_) | Command::Config(_) => Ok(()),
            Command::Dev(_) | Command::Demo(_) | Command::Bench(_) => return Err(dev::become_recruiter_dev()),
        };
        // Output and events that were produced before an error are written as well.
        let written = out.flush();
        events_of_process::flush().await;
        done.and(written.map_err(Into::into))
    }
}

/// Connects: for a dry run, and to read, with no more rights than to read, and without creating anything.
async fn connected(connect: &ConnectArgs, name: &str, is_to_ask: bool) -> Result<Store, ConnectError> {
    if is_to_ask { Store::connect_to_ask(connect, name).await } else { Store::connect(connect, name).await }
}

/// Connects to change what is there. A database that is not set up has nothing, and stays as it is.
async fn connected_to_change(connect: &ConnectArgs, name: &str, dry_run: bool) -> Result<Store, ConnectError> {
    let asking = Store::connect_to_ask(connect, name).await?;
    if dry_run { Ok(asking) } else { Store::connect(connect, name).await }
}

/// Parses a command line.
///
/// # Errors
/// Describes what is wrong. Its usage line names only the missing arguments; clap's own would also name those set
/// in the environment.
pub fn parsed<C: Parser>(arguments: impl IntoIterator<Item = OsString>) -> Result<C, clap::Error> {
    parsed_by(arguments, |command, arguments| {
        let matches = command.clone().try_get_matches_from(arguments)?;
        C::from_arg_matches(&matches)
    })
}

/// Parses the command line of `recruiter`, above the environment and the file of settings: [`settings::parsed`].
///
/// # Errors
/// Those of [`parsed`].
pub fn configured(arguments: impl IntoIterator<Item = OsString>) -> Result<Config, clap::Error> {
    parsed_by(arguments, settings::parsed)
}

fn parsed_by<C: Parser>(
    arguments: impl IntoIterator<Item = OsString>,
    parse: impl FnOnce(&clap::Command, &[OsString]) -> Result<C, clap::Error>,
) -> Result<C, clap::Error> {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let command = with_global_options_in_long_help(without_empty_variables(C::command()));
    parse(&command, &arguments).map_err(|mut error| {
        if error.get(ContextKind::Usage).is_some() {
            let mut command = command.clone();
            command.build();
            let words = arguments.iter().skip(1).filter_map(|argument| argument.to_str());
            let meant = words.fold(&command, |command, word| command.find_subcommand(word).unwrap_or(command));
            error.insert(ContextKind::Usage, ContextValue::StyledStr(meant.clone().render_usage()));
        }
        error
    })
}

/// Starts logging and runs a command. A second signal ends it at once.
///
/// # Errors
/// The error of the command, with its [`Exit`] if that is not 1.
pub async fn until_stopped<F: Future<Output = anyhow::Result<()>>>(
    log: &LogArgs,
    command: impl FnOnce(Shutdown) -> F,
) -> anyhow::Result<()> {
    logging::init(log)?;
    secrets::hide();
    let shutdown = Shutdown::on_signals()?;
    let mut at_once = shutdown.clone();
    tokio::select! {
        done = command(shutdown) => done,
        () = at_once.aborted() => Err(anyhow::anyhow!("stopped at once by a second signal").context(Exit::Aborted)),
    }
}

/// Global options are valid after every subcommand. Only the long help lists them, because they would fill most of the
/// short help.
fn with_global_options_in_long_help(command: clap::Command) -> clap::Command {
    let globals: Vec<clap::Id> =
        command.get_arguments().filter(|argument| argument.is_global_set()).map(|argument| argument.get_id().clone()).collect();
    globals.into_iter().fold(command, |command, id| command.mut_arg(id, |argument| argument.hide_short_help(true)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Config::command().debug_assert();
    }

    /// Passes `--uri` as a flag, which clap treats like `MONGODB_URI`. A test must not set an environment variable of
    /// its process.
    #[test]
    fn the_usage_names_what_is_missing_and_not_what_is_there() {
        let usage = |arguments: &str| {
            let words = format!("recruiter {arguments} --uri mongodb://x/y --log info");
            let text = parsed::<Config>(words.split(' ').map(OsString::from)).map(|_| ()).expect_err("it is wrong").to_string();
            text.lines().find(|line| line.starts_with("Usage:")).unwrap_or_default().to_owned()
        };
        assert_eq!(usage("enqueue"), "Usage: recruiter enqueue [OPTIONS]");
        assert_eq!(usage("jobs show"), "Usage: recruiter jobs show [OPTIONS] <ID>");
        assert_eq!(usage("run --poll soon"), "");
    }

    #[test]
    fn the_help_lists_every_exit_code() {
        let help = Config::command().render_long_help().to_string();
        for code in ["  0  ", "  1  ", "  2  ", "  3  ", "124  ", " 69  ", " 75  ", " 77  ", " 78  ", "130  "] {
            assert!(help.contains(code), "{code:?} is missing in\n{help}");
        }
    }

    /// In a terminal of 80 columns, a longer line would break inside of a command. clap wraps the text between the examples at blanks.
    #[test]
    fn no_line_of_an_example_is_too_long_for_a_terminal() {
        fn check(command: &clap::Command) {
            let texts = [command.get_after_help(), command.get_after_long_help(), command.get_before_help()];
            for line in texts.into_iter().flatten().flat_map(|text| text.to_string().lines().map(str::to_owned).collect::<Vec<_>>()) {
                assert!(!line.starts_with(' ') || line.chars().count() <= 80, "{}: {line}", command.get_name());
            }
            command.get_subcommands().for_each(check);
        }
        check(&Config::command());
    }

    #[test]
    fn every_flag_that_is_not_about_a_single_call_can_be_set_in_the_environment() {
        fn check(command: &clap::Command) {
            for argument in command.get_arguments().filter(|argument| !argument.is_positional()) {
                let single =
                    ["help", "version", "id", "from", "skip", "all", "again", "page_after", "reveal"].contains(&argument.get_id().as_str());
                let variable = argument.get_env().and_then(|name| name.to_str()).unwrap_or_default();
                let named = variable.starts_with("RECRUITER_") || variable == "MONGODB_URI";
                assert_eq!(named, !single, "{} --{}: {variable:?}", command.get_name(), argument.get_id());
            }
            command.get_subcommands().for_each(check);
        }
        check(&Config::command());
    }

    /// The others write nothing, a file, or always JSON, or draw on a terminal.
    #[test]
    fn every_command_that_prints_has_json() {
        fn without(command: &clap::Command, path: &str, found: &mut Vec<String>) {
            let mut leaf = true;
            for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
                leaf = false;
                without(sub, &format!("{path} {}", sub.get_name()), found);
            }
            if leaf && command.get_arguments().all(|argument| argument.get_id() != "json") {
                found.push(path.trim().to_owned());
            }
        }
        let mut found = Vec::new();
        without(&Config::command(), "", &mut found);
        found.retain(|path| !path.starts_with("dev") && !path.starts_with("demo") && !path.starts_with("bench"));
        assert_eq!(found, ["run", "jobs export", "files get", "top", "completions"]);
    }

    #[test]
    fn the_short_help_of_a_subcommand_is_about_that_subcommand() {
        let help = |args: &[&str]| {
            let arguments = ["recruiter"].iter().chain(args).map(OsString::from);
            parsed::<Config>(arguments).expect_err("help is shown as an error").to_string()
        };
        assert!(!help(&["jobs", "list", "-h"]).contains("--connect-timeout"), "{}", help(&["jobs", "list", "-h"]));
        assert!(help(&["jobs", "list", "--help"]).contains("--connect-timeout <DURATION>"));
        assert!(help(&["-h"]).contains("--uri, --connect-timeout"));
    }

    #[test]
    fn one_or_many_but_not_both() {
        let check = |args: &[&str], good: bool| {
            let parsed = Config::try_parse_from([&["recruiter", "enqueue"], args].concat());
            assert_eq!(parsed.is_ok(), good, "{args:?}: {:?}", parsed.err().map(|error| error.to_string()));
        };
        check(&["--class", "a"], true);
        check(&["--from", "-"], true);
        check(&["--from", "-", "--skip", "3", "--json"], true);
        check(&[], false);
        check(&["--from", "-", "--class", "a"], false);
        check(&["--from", "-", "--tag", "a"], false);
        check(&["--class", "a", "--skip", "3"], false);
        check(&["--class", "a", "--priority", "12"], false);
        check(&["--class", "a", "--priority", "9"], true);
        check(&["--class", "a", "--at", "2001-01-01T00:00:00Z"], true);
        check(&["--class", "a", "--at", "tomorrow"], false);
        check(&["--class", "a", "--at", "2001-01-01T00:00:00Z", "--after", "5m"], false);
        check(&["--class", "a", "--parameters", "[1]"], false);
        check(&["--class", "a", "--items", "[{}]"], true);
        check(&["--class", "a", "--items", "[{}]", "--parameters", "{}"], false);
    }
}
