//! Flags of the programs: what an empty environment variable means, and names with blanks around them.
//!
//! Used by the three programs, and by applications that flatten our flags.

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
    let value = argument.get_env().and_then(std::env::var_os);
    let is_empty = value.is_some_and(|value| value.to_str().is_some_and(|value| value.trim().is_empty()));
    if is_empty { argument.env(None::<&'static str>) } else { argument }
}

/// A name in a list, without the blanks and line breaks around it.
pub fn name_of_text(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => Err("a name is empty: separate names by single commas".into()),
        name => Ok(name.to_owned()),
    }
}
