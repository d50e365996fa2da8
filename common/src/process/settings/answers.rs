//! What `check-config` and `config show` write.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fmt::Write as _,
    io::{self, Write as _},
    path::Path,
};

use clap::{
    Arg, ArgMatches, Command,
    error::{ContextKind, ContextValue, ErrorKind},
    parser::ValueSource,
};
use serde_json::{Value, json};

use super::{Program, all_settings, file::Settings, matches, name, program_of, settings_of};
use crate::{
    base::{causes, printable},
    mongo::uri::redacted,
    process::{exit::Exit, toml_file::FileError},
};

/// What the answers are made of.
pub(super) struct Answers<'a> {
    /// With the values of the file as defaults.
    pub(super) command: &'a Command,
    pub(super) arguments: &'a [OsString],
    pub(super) settings: &'a Settings,
}

impl Answers<'_> {
    /// Whether the arguments ask for a check, also if they, or the environment, cannot be understood.
    pub(super) fn asked_to_check(arguments: &[OsString]) -> bool {
        let asked = |word: &OsString| word.to_str().is_some_and(|word| ["check-config", "--check-config"].contains(&word));
        arguments.iter().skip(1).any(asked)
    }

    /// Ends a check at a value that cannot be understood. Other errors are about the call.
    pub(super) fn refuse(command: &Command, error: clap::Error) -> clap::Error {
        if !is_about_a_value(&error) {
            return error;
        }
        complain(command.get_name(), &[sentence(command, &error)]);
        Exit::Config.now()
    }

    /// Says what is wrong with the file.
    pub(super) fn say(&self, problems: &[FileError]) -> Exit {
        complain(self.command.get_name(), &said_of(problems));
        Exit::Config
    }

    /// Says everything that is wrong, or that nothing is.
    pub(super) fn check<P: Program>(&self, named: Option<&Path>, problems: Vec<FileError>, json: bool) -> Exit {
        let mut wrong = said_of(&problems);
        for command_line in [self.arguments.to_vec()].into_iter().chain(self.as_tables::<P>().map(|(_, line)| line)) {
            match program_of::<P>(self.command, &command_line) {
                // The values of a wrong file are not there.
                Ok(_) if !problems.is_empty() => {}
                Ok(program) => wrong.extend(program.checks().into_iter().filter_map(Result::err).map(|error| of_check(&error))),
                Err(error) => wrong.push(sentence(self.command, &error)),
            }
        }
        let mut seen = BTreeSet::new();
        wrong.retain(|sentence| seen.insert(sentence.clone()));
        let file = named.unwrap_or(Path::new(P::FILE));
        let warnings: Vec<String> = self.settings.warnings().into_iter().collect();
        if json {
            let answer = json!({ "file": file, "right": wrong.is_empty(), "problems": wrong, "warnings": warnings });
            write(&format!("{answer}\n"));
        } else {
            complain(self.command.get_name(), &[warnings, wrong.clone()].concat());
            match &self.settings.path {
                Some(file) if wrong.is_empty() => write(&format!("{} is right\n", file.display())),
                None if wrong.is_empty() => write(&format!("the settings are right; there is no file {}\n", file.display())),
                Some(_) | None => {}
            }
        }
        if wrong.is_empty() { Exit::Success } else { Exit::Config }
    }

    /// Writes all settings.
    pub(super) fn show<P: Program>(&self, json: bool) -> Result<Exit, clap::Error> {
        let top = matches(self.command, self.arguments)?;
        let tables = self.as_tables::<P>().map(|(table, line)| Ok((table, matches(self.command, &line)?)));
        let tables = tables.collect::<Result<Vec<_>, clap::Error>>()?;
        let of = |within| tables.iter().find(|(table, _)| Some(*table) == within).and_then(|(table, line)| line.subcommand_matches(table));
        let rows: Vec<Row> = all_settings(self.command, P::TABLES)
            .map(|(within, arg)| Row::of(within, arg, of(within).unwrap_or(&top), self.settings))
            .collect();
        let width = |of: &dyn Fn(&Row) -> usize| rows.iter().map(of).max().unwrap_or_default();
        let (names, values) = (width(&|row| row.name.len()), width(&|row| row.shown().chars().count()));
        let mut out = String::new();
        for row in &rows {
            let from = row.from.as_deref().unwrap_or(row.source);
            let _ =
                if json { writeln!(out, "{}", row.json()) } else { writeln!(out, "{:names$}  {:values$}  {from}", row.name, row.shown()) };
        }
        write(&out);
        Ok(Exit::Success)
    }

    /// The command line of each command that has a table.
    fn as_tables<P: Program>(&self) -> impl Iterator<Item = (&'static str, Vec<OsString>)> {
        P::TABLES.iter().map(|table| (*table, vec![self.command.get_name().into(), table.into()]))
    }
}

/// One setting.
struct Row {
    name: String,
    value: Option<String>,
    source: &'static str,
    from: Option<String>,
}

impl Row {
    fn of(within: Option<&'static str>, arg: &Arg, matches: &ArgMatches, settings: &Settings) -> Self {
        let raw = matches.get_raw(arg.get_id().as_str());
        let value = raw.map(|values| values.map(|value| value.to_string_lossy()).collect::<Vec<_>>().join(","));
        let (source, from) = match matches.value_source(arg.get_id().as_str()) {
            Some(ValueSource::CommandLine) => ("flag", Some(format!("--{}", name(arg)))),
            Some(ValueSource::EnvVariable) => ("environment", arg.get_env().map(|name| name.to_string_lossy().into_owned())),
            Some(_) | None => settings.place(within, arg.get_id()).map_or(("default", None), |place| ("file", Some(place))),
        };
        Self {
            name: within.map_or_else(|| name(arg).to_owned(), |table| format!("{table}.{}", name(arg))),
            value: value.map(|value| if arg.is_hide_env_values_set() { redacted(&value) } else { value }).filter(|value| !value.is_empty()),
            source,
            from,
        }
    }

    fn shown(&self) -> String {
        self.value.as_ref().map_or_else(|| "-".into(), |value| printable(value, 200))
    }

    fn json(&self) -> Value {
        json!({ "name": self.name, "value": self.value, "source": self.source, "from": self.from })
    }
}

/// Each problem with its causes.
pub(super) fn said_of(problems: &[FileError]) -> Vec<String> {
    problems.iter().map(|problem| causes(problem).join(": ")).collect()
}

/// The causes of an error without its exit code.
fn of_check(error: &anyhow::Error) -> String {
    let exit = error.downcast_ref::<Exit>().map(ToString::to_string);
    causes(error.as_ref()).into_iter().filter(|cause| Some(cause) != exit.as_ref()).collect::<Vec<_>>().join(": ")
}

fn is_about_a_value(error: &clap::Error) -> bool {
    matches!(error.kind(), ErrorKind::ValueValidation | ErrorKind::InvalidValue | ErrorKind::InvalidUtf8)
}

/// What clap says about a wrong value, with the variable that has it.
fn sentence(command: &Command, error: &clap::Error) -> String {
    let text = error.to_string();
    let text = text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ").split_whitespace().collect::<Vec<_>>().join(" ");
    let Some(ContextValue::String(named)) = error.get(ContextKind::InvalidArg) else { return text };
    // Before it is built, a flag has no text.
    let mut command = command.clone();
    command.build();
    let all = [&command].into_iter().chain(command.get_subcommands()).flat_map(settings_of);
    let variable =
        all.filter(|arg| arg.to_string() == *named).find_map(|arg| arg.get_env().filter(|name| std::env::var_os(name).is_some()));
    variable.map_or(text.clone(), |variable| format!("{}: {text}", variable.display()))
}

fn complain(program: &str, sentences: &[String]) {
    // The terminal may be closed.
    sentences.iter().for_each(|sentence| drop(writeln!(io::stderr(), "{program}: {sentence}")));
}

fn write(text: &str) {
    let _ = io::stdout().write_all(text.as_bytes());
}
