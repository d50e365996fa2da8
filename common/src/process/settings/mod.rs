//! The settings of the three programs: flags, then environment variables, then one file of TOML, then what is built in.
//!
//! Used by `main` of each program. Which settings there are, and which values they take, is known from the command line of the program only:
//! the keys of the file are the names of its flags. What the file says becomes the default of a flag, after the value has been checked as
//! that of the flag would be.
//!
//! | file | content |
//! |---|---|
//! | `file` | the file: its keys and values, and what is wrong with them |
//! | `answers` | what `check-config` and `config show` write |
//! | `example` | an example of the file, with all keys |

mod answers;
mod example;
mod file;

use std::{
    ffi::OsString,
    io,
    path::{Path, PathBuf},
};

use clap::{Arg, ArgMatches, Args, Command, Parser, builder::BoolishValueParser};

pub use self::example::example;
use self::{answers::Answers, file::Settings};
use super::{early, toml_file::FileError};

/// A program with settings.
pub trait Program: Parser {
    /// The file of its settings, unless another one is named.
    const FILE: &'static str;
    /// The commands whose flags are in tables of their names. A program without commands has none.
    const TABLES: &'static [&'static str] = &[];

    /// The file that the command line or the environment names.
    fn file(&self) -> Option<&Path>;

    /// What is asked about the settings, in place of running.
    fn question(&self) -> Option<Question>;

    /// Whether it keeps running. Then the usual file must be readable, if it exists: without it, the program would do something else than
    /// its administrator wants. The user of a command may have no right to read it.
    fn is_service(&self) -> bool {
        true
    }

    /// Checks the values against each other, and the files that they name. Nothing is connected.
    fn checks(&self) -> Vec<anyhow::Result<()>>;
}

/// What is asked about the settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// What is wrong with them.
    Check {
        /// Whether the answer is JSON.
        json: bool,
    },
    /// What they are, and where they come from.
    Show {
        /// Whether the answer is JSON.
        json: bool,
    },
}

/// The flags about the settings, of a program without commands.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Settings", about = None, long_about = None)]
pub struct SettingsArgs {
    /// File of settings
    #[arg(long, value_name = "FILE")]
    settings: Option<PathBuf>,
    /// Check the settings and the files that they name, without MongoDB, and end
    #[arg(long, conflicts_with = "show_config")]
    check_config: bool,
    /// Show all settings, without passwords, and where each comes from, and end
    #[arg(long)]
    show_config: bool,
    /// Write JSON for programs with `--check-config` and `--show-config`
    #[arg(long, env = "RECRUITER_JSON", value_parser = BoolishValueParser::new())]
    json: bool,
}

impl SettingsArgs {
    /// For [`Program::file`].
    pub fn file(&self) -> Option<&Path> {
        self.settings.as_deref()
    }

    /// For [`Program::question`].
    pub fn question(&self) -> Option<Question> {
        let Self { json, .. } = *self;
        let check = self.check_config.then_some(Question::Check { json });
        check.or(self.show_config.then_some(Question::Show { json }))
    }
}

/// The flag `--settings` of a program: its variable, and the file that is read without it.
#[must_use]
pub fn flag(flag: Arg, variable: &'static str, file: &str) -> Arg {
    flag.env(variable).help(format!(
        "File of settings, in TOML. Its keys are the names of flags; flags and environment variables come before it [default: {file}, if it exists]"
    ))
}

/// Reads the settings of a program: its command line, above the environment, above its file. Ends the process with [`Exit::Config`](crate::exit::Exit::Config) if the file
/// is wrong, and after the answer to a [`Question`].
///
/// # Errors
/// When the command line or the environment is wrong.
pub fn parsed<P: Program>(command: &Command, arguments: &[OsString]) -> Result<P, clap::Error> {
    // The help, and a mistake in the command line, do not depend on the file.
    let program = program_of::<P>(command, arguments)
        .map_err(|error| if Answers::asked_to_check(arguments) { Answers::refuse(command, error) } else { error })?;
    let (read, is_needed) = (Settings::of::<P>(command, program.file()), program.is_service() || program.question().is_some());
    let (settings, problems) = match read {
        Ok(settings) => (settings, Vec::new()),
        Err(problems) => match problems.as_slice() {
            [FileError::Unreadable { source, .. }] if program.file().is_none() && !is_needed && is_denied(source) => {
                early::warn(format!("{} exists, and this user may not read it: going on without it", P::FILE));
                (Settings::default(), Vec::new())
            }
            _ => (Settings::default(), problems),
        },
    };
    let layered = settings.below(command.clone());
    let answers = Answers { command: &layered, arguments, settings: &settings };
    match program.question() {
        Some(Question::Check { json }) => answers.check::<P>(program.file(), problems, json).now(),
        Some(Question::Show { .. }) | None if !problems.is_empty() => answers.say(&problems).now(),
        Some(Question::Show { json }) => answers.show::<P>(json)?.now(),
        None => {
            settings.warnings().into_iter().for_each(early::warn);
            program_of(&layered, arguments)
        }
    }
}

/// Reads the settings again, in a process that runs. Flags and environment are those with which it began.
///
/// # Errors
/// When the file is wrong, with all problems.
pub fn again<P: Program>(command: &Command, arguments: &[OsString]) -> anyhow::Result<P> {
    let named = program_of::<P>(command, arguments)?;
    let settings = Settings::of::<P>(command, named.file());
    let settings = settings.map_err(|problems| anyhow::anyhow!("{}", answers::said_of(&problems).join("; ")))?;
    settings.warnings().into_iter().for_each(|warning| tracing::warn!("{warning}"));
    let program = program_of::<P>(&settings.below(command.clone()), arguments)?;
    program.checks().into_iter().collect::<anyhow::Result<Vec<()>>>()?;
    Ok(program)
}

fn is_denied(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied
}

fn matches(command: &Command, arguments: &[OsString]) -> Result<ArgMatches, clap::Error> {
    command.clone().try_get_matches_from(arguments)
}

fn program_of<P: Program>(command: &Command, arguments: &[OsString]) -> Result<P, clap::Error> {
    P::from_arg_matches(&matches(command, arguments)?).map_err(|error| error.format(&mut command.clone()))
}

/// Flags that are about this call only, and not in a file.
const OF_A_CALL: [&str; 6] = ["settings", "check-config", "show-config", "json", "help", "version"];

/// The settings of a command, without those of its commands.
fn settings_of(command: &Command) -> impl Iterator<Item = &Arg> {
    command.get_arguments().filter(|arg| arg.get_long().is_some_and(|name| !OF_A_CALL.contains(&name)))
}

/// The settings of the program, and those of its tables.
fn all_settings<'a>(command: &'a Command, tables: &[&'static str]) -> impl Iterator<Item = (Option<&'static str>, &'a Arg)> {
    let below = tables.iter().filter_map(|name| Some((*name, command.find_subcommand(name)?)));
    let of_tables = below.flat_map(|(name, command)| settings_of(command).map(move |arg| (Some(name), arg)));
    settings_of(command).map(|arg| (None, arg)).chain(of_tables)
}

fn name(arg: &Arg) -> &str {
    arg.get_long().unwrap_or_default()
}
