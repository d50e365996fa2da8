//! The file: its keys and values, and what is wrong with them.

use std::{
    any::TypeId,
    error::Error as _,
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use clap::{
    Arg, ArgAction, Command, Id,
    error::{ContextKind, ContextValue},
};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{OF_A_CALL, Program, all_settings, name, settings_of};
use crate::{
    base::printable,
    mongo::uri::redacted,
    process::toml_file::{FileError, Problem, place, text_of},
};

/// What a file says.
#[derive(Debug, Default)]
pub(super) struct Settings {
    pub(super) path: Option<PathBuf>,
    said: Vec<Said>,
}

/// What a file says about one setting.
#[derive(Debug, PartialEq, Eq)]
struct Said {
    table: Option<&'static str>,
    id: Id,
    values: Vec<String>,
    line: usize,
    is_secret: bool,
}

impl Settings {
    /// Reads the file that is named, or the usual one if it exists.
    pub(super) fn of<P: Program>(command: &Command, named: Option<&Path>) -> Result<Self, Vec<FileError>> {
        let path = named.unwrap_or(Path::new(P::FILE));
        let text = match text_of("the settings", path) {
            Err(FileError::Unreadable { source, .. }) if named.is_none() && is_absent(&source) => return Ok(Self::default()),
            read => read.map_err(|error| vec![error])?,
        };
        let said = understood(&text, command, P::TABLES);
        let said = said.map_err(|problems| problems.into_iter().map(|problem| problem.in_file(path, &text)).collect::<Vec<_>>())?;
        Ok(Self { path: Some(path.into()), said })
    }

    /// The command, whose flags have the values of the file as their defaults.
    pub(super) fn below(&self, command: Command) -> Command {
        self.said.iter().fold(command, |command, Said { table, id, values, .. }| {
            // A default lives as long as the process.
            let set = |arg: Arg| arg.default_values(values.iter().map(|value| &*value.clone().leak()));
            match table {
                Some(table) => command.mut_subcommand(table, |command| command.mut_arg(id, set)),
                None => command.mut_arg(id, set),
            }
        })
    }

    /// Where the file has this setting.
    pub(super) fn place(&self, table: Option<&str>, id: &Id) -> Option<String> {
        let said = self.said.iter().find(|said| said.table == table && said.id == *id)?;
        Some(format!("{}:{}", self.path.as_ref()?.display(), said.line))
    }

    /// A password that others may read.
    pub(super) fn warnings(&self) -> Option<String> {
        let path = self.path.as_ref()?;
        let said = self.said.iter().find(|said| said.is_secret && said.values.iter().any(|value| redacted(value).contains(":****@")))?;
        let mode = fs::metadata(path).ok().filter(fs::Metadata::is_file)?.permissions().mode();
        (mode & 0o077 != 0).then(|| {
            format!(
                "{}:{}: other users may read the password in it: `chmod 600` the file, or set MONGODB_URI in a file that only root reads, such as /etc/recruiter/recruiter.env",
                path.display(),
                said.line
            )
        })
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// What a text says about the settings of this command.
fn understood(text: &str, command: &Command, tables: &[&'static str]) -> Result<Vec<Said>, Vec<Problem>> {
    let document = DeTable::parse(text).map_err(|error| vec![Problem::from(error)])?;
    let (mut said, mut problems) = (Vec::new(), Vec::new());
    let mut one = |within: Option<&'static str>, key: &Spanned<_>, value: &Spanned<_>| match setting(command, tables, within, key, value) {
        Ok((arg, values)) if !values.is_empty() => {
            let (id, line) = (arg.get_id().clone(), place(text, key.span().start).0);
            said.push(Said { table: within, id, values, line, is_secret: arg.is_hide_env_values_set() });
        }
        // As an empty variable: as if it were not there.
        Ok(_) => {}
        Err(problem) => problems.push(problem),
    };
    for (key, value) in document.get_ref() {
        if let DeValue::Table(entries) = value.get_ref()
            && let Some(table) = tables.iter().find(|table| **table == key.get_ref().as_ref())
        {
            entries.iter().for_each(|(key, value)| one(Some(table), key, value));
        } else {
            one(None, key, value);
        }
    }
    problems.sort_by_key(|problem| problem.0.start);
    if problems.is_empty() { Ok(said) } else { Err(problems) }
}

/// The setting that this key names, and its values.
fn setting<'a, K: AsRef<str>>(
    command: &'a Command,
    tables: &[&'static str],
    within: Option<&'static str>,
    key: &Spanned<K>,
    value: &Spanned<DeValue<'_>>,
) -> Result<(&'a Arg, Vec<String>), Problem> {
    let known = all_settings(command, tables).find(|(place, arg)| *place == within && name(arg) == key.get_ref().as_ref());
    let (_, arg) = known.ok_or_else(|| Problem::of(key, unknown(command, tables, within, key.get_ref().as_ref())))?;
    Ok((arg, values(arg, value)?))
}

/// Why there is no such key, and which one may be meant.
fn unknown(command: &Command, tables: &[&'static str], within: Option<&'static str>, key: &str) -> String {
    let shown = printable(key, 80);
    if OF_A_CALL.contains(&key) {
        return format!("`{shown}` cannot be in a file: it is a flag of the command line only");
    }
    match all_settings(command, tables).find(|(place, arg)| *place != within && name(arg) == key) {
        Some((Some(table), _)) => return format!("`{shown}` belongs below the line [{table}]"),
        Some((None, _)) => return format!("`{shown}` belongs above the line [{}]", within.unwrap_or_default()),
        None if within.is_none() && tables.contains(&key) => return format!("`{shown}` is a table: write [{shown}], and its keys below"),
        None => {}
    }
    let of_place = within.and_then(|table| command.find_subcommand(table)).unwrap_or(command);
    let mut known: Vec<&str> = settings_of(of_place).map(name).chain(tables.iter().copied().filter(|_| within.is_none())).collect();
    known.sort_unstable();
    let alike = known.iter().map(|name| (strsim::jaro_winkler(name, key), name)).filter(|(alike, _)| *alike > 0.8);
    match alike.max_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((_, name)) => format!("unknown key `{shown}`: did you mean `{name}`?"),
        None => format!("unknown key `{shown}`; the keys here are {}", known.join(", ")),
    }
}

/// The values of a setting, each of which its flag would take. None for an empty text or list.
fn values(arg: &Arg, value: &Spanned<DeValue<'_>>) -> Result<Vec<String>, Problem> {
    let list = value.get_ref().as_array().filter(|_| is_list(arg));
    let is_array = list.is_some();
    let entries: Vec<&Spanned<DeValue<'_>>> = list.map_or_else(|| vec![value], |list| list.iter().collect());
    let mut values = Vec::with_capacity(entries.len());
    for entry in entries {
        let value = text(arg, entry.get_ref()).map_err(|problem| Problem::of(entry, problem))?;
        let delimiter = arg.get_value_delimiter().filter(|delimiter| is_array && value.contains(*delimiter));
        let problem = delimiter.map(|delimiter| format!("an entry of a list cannot contain `{delimiter}`: write two entries"));
        let problem = problem.or_else(|| if value.is_empty() && !is_array { None } else { refusal(arg, &value) });
        match problem {
            Some(problem) => return Err(Problem::of(entry, format!("`{}`: {problem}", name(arg)))),
            None if value.is_empty() => {}
            None => values.push(value),
        }
    }
    Ok(values)
}

fn is_list(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
}

/// A value as a flag would have it, without the blanks and line breaks around it.
fn text(arg: &Arg, value: &DeValue<'_>) -> Result<String, String> {
    let of = |types: &[TypeId]| types.iter().any(|of| arg.get_value_parser().type_id() == *of);
    let is_number = of(&[TypeId::of::<u16>(), TypeId::of::<u32>(), TypeId::of::<u64>(), TypeId::of::<i64>(), TypeId::of::<usize>()]);
    let is_switch = of(&[TypeId::of::<bool>()]) || matches!(arg.get_action(), ArgAction::SetTrue);
    match value {
        DeValue::String(text) => return Ok(text.trim().to_owned()),
        DeValue::Boolean(value) if is_switch => return Ok(value.to_string()),
        DeValue::Integer(number) if is_number => {
            return i128::from_str_radix(number.as_str(), number.radix())
                .map(|number| number.to_string())
                .map_err(|error| error.to_string());
        }
        DeValue::Boolean(_) | DeValue::Integer(_) | DeValue::Float(_) | DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => {}
    }
    let expected = match (is_switch, is_number, is_list(arg)) {
        (true, ..) => "true or false",
        (_, true, _) => "a whole number",
        (.., true) => "a text in quotes, or a list of texts",
        (.., false) => "a text in quotes",
    };
    Err(format!("`{}` is {expected}, and not of the type {}", name(arg), value.type_str()))
}

/// Why the flag would not take this value. The value of a secret is not repeated.
fn refusal(arg: &Arg, value: &str) -> Option<String> {
    let probe = Arg::new("value").long("value").require_equals(true).action(ArgAction::Append).value_parser(arg.get_value_parser().clone());
    let probe = arg.get_value_delimiter().into_iter().fold(probe, Arg::value_delimiter);
    let command = Command::new("probe").no_binary_name(true).disable_help_flag(true).arg(probe);
    let error = command.try_get_matches_from([format!("--value={value}")]).err()?;
    let problem = match (error.source(), error.get(ContextKind::ValidValue)) {
        (Some(source), _) => source.to_string(),
        (None, Some(ContextValue::Strings(valid))) if !valid.is_empty() => format!("write one of {}", valid.join(", ")),
        (None, _) => "it is not possible".into(),
    };
    Some(if arg.is_hide_env_values_set() { problem } else { format!("`{}`: {problem}", printable(value, 80)) })
}
