//! `recruiter web password`: what the file of tokens has about a person.

use std::io::{BufRead as _, IsTerminal as _, Write, stdin};

use anyhow::Context as _;
use clap::{Args, builder::BoolishValueParser};
use recruiter_common::{exit::Exit, flags::name_of_text};
use serde_json::json;

use super::{access::Role, password::Hash};

/// The shortest password, in characters.
const SHORTEST: usize = 8;

/// The arguments of `web password`.
#[derive(Args, Clone, Debug)]
pub(super) struct PasswordArgs {
    /// Name with which the person logs in
    #[arg(value_parser = name_of_text)]
    name: String,
    /// What the person may do: viewer reads, client also enqueues, operator also changes and deletes
    #[arg(long, env = "RECRUITER_WEB_PASSWORD_ROLE", value_name = "ROLE", default_value = "viewer")]
    role: Role,
    /// Write one JSON object per line, for programs
    #[arg(long, env = "RECRUITER_JSON", value_parser = BoolishValueParser::new())]
    json: bool,
}

/// Reads a password, and writes what belongs into the file: only its hash.
pub(super) fn run(args: &PasswordArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let PasswordArgs { name, role, json } = args;
    let password = typed()?;
    if password.chars().count() < SHORTEST {
        return Err(anyhow::anyhow!("the password is too short: it has at least {SHORTEST} characters").context(Exit::Usage));
    }
    let hash = Hash::of(&password).map_err(|problem| anyhow::anyhow!("the password cannot be used: {problem}"))?.text();
    if *json {
        return Ok(writeln!(out, "{}", json!({ "name": name, "role": role.to_string(), "password": hash }))?);
    }
    // A TOML key in quotes may have any character.
    Ok(writeln!(out, "[people.{}]\nrole = \"{role}\"\npassword = \"{hash}\"", json!(name))?)
}

/// From the terminal, which does not show it; or the first line of standard input.
fn typed() -> anyhow::Result<String> {
    const UNREADABLE: &str = "the password cannot be read";
    if !stdin().is_terminal() {
        let mut line = String::new();
        stdin().lock().read_line(&mut line).context(UNREADABLE)?;
        return Ok(line.trim_end_matches(['\r', '\n']).to_owned());
    }
    let password = rpassword::prompt_password("Password: ").context(UNREADABLE)?;
    if rpassword::prompt_password("Once more: ").context(UNREADABLE)? != password {
        return Err(anyhow::anyhow!("the two passwords differ").context(Exit::Usage));
    }
    Ok(password)
}
