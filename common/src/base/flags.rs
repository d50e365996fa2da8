//! Flags of the programs: what an empty environment variable means, and names with blanks around them.
//!
//! Used by the three programs, and by applications that flatten our flags.

use std::{
    env,
    ffi::{OsStr, OsString},
};

use clap::{Arg, Command};

/// The command with all its subcommands: an empty environment variable is as if it were not set.
#[must_use]
pub fn without_empty_variables(command: Command) -> Command {
    command.mut_args(unless_empty).mut_subcommands(without_empty_variables)
}

/// The flag, without its environment variable if that is empty or blank. A file of variables, a container or a unit often sets one to
/// nothing.
#[must_use]
pub fn unless_empty(argument: Arg) -> Arg {
    let is_empty = argument.get_env().is_some_and(|name| env::var_os(name).is_some() && variable(name).is_none());
    if is_empty { argument.env(None::<&'static str>) } else { argument }
}

/// The value of an environment variable that belongs to no flag. An empty or blank one is as if it were not set.
pub fn variable(name: impl AsRef<OsStr>) -> Option<OsString> {
    env::var_os(name).filter(|value| value.to_str().is_none_or(|value| !value.trim().is_empty()))
}

/// A value of an application, which may begin and end with blanks, without the line breaks around it.
pub fn value_of_text(text: &str) -> Result<String, String> {
    match text.trim_matches(char::is_control) {
        "" => Err("it is empty".into()),
        value => Ok(value.to_owned()),
    }
}

/// A name in a list, without the blanks and line breaks around it.
pub fn name_of_text(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => Err("a name is empty: separate names by single commas".into()),
        name => Ok(name.to_owned()),
    }
}
