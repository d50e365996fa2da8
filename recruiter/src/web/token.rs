//! `recruiter web token`: makes a token, and what the file of tokens has about it.

use std::io::Write;

use clap::{Args, builder::BoolishValueParser};
use recruiter_common::flags::name_of_text;
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::access::Role;

/// The arguments of `web token`.
#[derive(Args, Clone, Debug)]
pub(super) struct TokenArgs {
    /// Name of the program or person that gets the token, for logs
    #[arg(value_parser = name_of_text)]
    name: String,
    /// What it may do: viewer reads, client also enqueues and works, operator also changes and deletes
    #[arg(long, env = "RECRUITER_WEB_TOKEN_ROLE", value_name = "ROLE", default_value = "client")]
    role: Role,
    /// Write one JSON object per line, for programs
    #[arg(long, env = "RECRUITER_JSON", value_parser = BoolishValueParser::new())]
    json: bool,
}

/// Writes what belongs into the file, and the token itself apart from it: only its hash is kept.
pub(super) fn run(args: &TokenArgs, out: &mut impl Write) -> std::io::Result<()> {
    let TokenArgs { name, role, json } = args;
    let token = format!("recruiter_{}", hex::encode(rand::random::<[u8; 32]>()));
    let sha256 = hex::encode(Sha256::digest(&token));
    if *json {
        return writeln!(out, "{}", json!({ "name": name, "role": role.to_string(), "token": token, "sha256": sha256 }));
    }
    // A TOML key in quotes may have any character.
    writeln!(out, "[tokens.{}]\nrole = \"{role}\"\nsha256 = \"{sha256}\"", json!(name))?;
    out.flush()?;
    writeln!(std::io::stderr(), "the token of {name:?}, which is shown only now: {token}")
}
