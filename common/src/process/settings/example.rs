//! An example of the file, with all keys.

use std::fmt::Write as _;

use clap::{Arg, ArgAction, Command};

use super::{Program, all_settings, name};

/// A file with all settings of the program as comments, each with what it means and its default.
pub fn example<P: Program>(command: &Command) -> String {
    let mut text = format!("# {}: settings of {}. Flags and environment variables come before this file.\n", P::FILE, command.get_name());
    let _ = writeln!(text, "# `{}` finds mistakes.", if !P::TABLES.is_empty() { "check-config" } else { "--check-config" });
    let mut table = None;
    for (within, arg) in all_settings(command, P::TABLES) {
        if within != table {
            table = within;
            let _ = writeln!(text, "\n[{}]", within.unwrap_or_default());
        }
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let _ = writeln!(text, "\n# {}\n#{} = {}", help.replace('\n', "\n# "), name(arg), default_of(arg));
    }
    text
}

fn default_of(arg: &Arg) -> String {
    let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    match (arg.get_action(), defaults.as_slice()) {
        (ArgAction::SetTrue, _) => "false".into(),
        (ArgAction::Append, []) => "[]".into(),
        (_, []) => "\"\"".into(),
        (_, [value]) if value.parse::<i64>().is_ok() => value.clone().into_owned(),
        (_, values) => toml::Value::from(values.join(",")).to_string(),
    }
}
