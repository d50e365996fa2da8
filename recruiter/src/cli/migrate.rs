//! `recruiter migrate`: makes the schema of this release, as the start of a program does, and says what was changed.

use std::io::Write;

use anyhow::anyhow;
use clap::{Args, builder::BoolishValueParser};
use recruiter_common::store::{
    ConnectArgs, Store,
    schema::{Action, Change, Part},
};
use serde_json::json;

use super::{
    output::{Format, printable},
    view::line,
};

pub(super) const EXAMPLES: &str = "\
Examples:
  recruiter migrate --dry-run
  recruiter migrate --dry-run --json | jq -s 'map(select(.part == \"index\"))'
  recruiter migrate

Programs of the previous release go on meanwhile. The exit code is 1 if something could not be
changed, and 77 if a newer release has made the schema and this program is too old for it.";

/// The name of this command in the logs of MongoDB.
const APP_NAME: &str = "recruiter migrate";

#[derive(Args, Clone, Copy, Debug)]
pub(super) struct MigrateArgs {
    /// Say what would be changed, and change nothing
    #[arg(long, env = "RECRUITER_DRY_RUN", value_parser = BoolishValueParser::new())]
    dry_run: bool,
    #[command(flatten)]
    format: Format,
}

pub(super) async fn run(args: MigrateArgs, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let changes = Store::connect_to_compare(connect, APP_NAME).await?.schema_changes().await?;
    let left = if args.dry_run { changes.clone() } else { Store::connect(connect, APP_NAME).await?.schema_changes().await? };
    for change in &changes {
        let is_done = !left.iter().any(|left| left.is(change));
        let view = json!({
            "part": change.part.name(),
            "action": change.action.name(),
            "collection": change.collection,
            "name": change.name,
            "documents": change.documents,
            "done": is_done,
        });
        line(out, args.format, &view, text(change, is_done, args.dry_run))?;
    }
    if !args.format.json {
        let summary = match (changes.len(), args.dry_run) {
            (0, _) => "the schema is that of this release".to_owned(),
            (count, true) => format!("changes: {count}; nothing was changed"),
            (count, false) => format!("changes: {count}"),
        };
        writeln!(out, "{summary}")?;
    }
    out.flush()?;
    // What a running program has begun to make since then is not one of them.
    let refused = changes.iter().filter(|change| change.action != Action::Drop && left.iter().any(|left| left.is(change))).count();
    if args.dry_run || refused == 0 {
        return Ok(());
    }
    Err(anyhow!(
        "changes that were not made: {refused}; the log says why. Run it as a MongoDB user with the role recruiterOperator, or with the actions collMod and createIndex"
    ))
}

fn text(change: &Change, is_done: bool, dry_run: bool) -> String {
    let name = printable(change.name.as_deref().unwrap_or_default(), 120);
    let what = match change.part {
        Part::Version => format!("version {name}"),
        Part::Collection => "the collection".to_owned(),
        Part::Validator => "the validator".to_owned(),
        Part::Index => format!("the index `{name}`"),
    };
    let verb = match (change.part, change.action) {
        (Part::Version, _) => "noted",
        (_, Action::Make) => "made",
        (_, Action::Replace) => "replaced",
        (_, Action::Drop) => "dropped by the first leading recruiter of this release",
    };
    let tense = match (is_done, dry_run || change.action == Action::Drop) {
        (true, _) => "",
        (false, true) => "would be ",
        (false, false) => "not ",
    };
    format!("{:<16} {what}: {tense}{verb} (documents: {})", printable(&change.collection, 120), change.documents)
}
