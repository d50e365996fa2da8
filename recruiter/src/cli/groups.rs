//! `recruiter groups`: lists and changes the settings of groups.

use std::io::Write;

use bson::{Bson, doc};
use clap::{ArgGroup, Args, Subcommand};
use recruiter_common::store::{ConnectArgs, GroupBacklog, InvalidSetting, Store};

use super::{
    exit::usage,
    output::{Column, Format, Row, Screen, json_line, printable, table},
};

/// In place of a value: removes the setting.
const UNSET: &str = "unset";
/// Maximum number of waiting jobs that are counted in a group without a limit.
const COUNTED: u64 = 100_000;

pub(super) const SET_EXAMPLES: &str = "\
Examples:
  recruiter groups set mail --most-waiting 10000
      refuse further jobs while 10,000 jobs of the group wait
  recruiter groups set mail --most-waiting unset
      accept any number of jobs again";

/// The arguments of `groups`.
#[derive(Args, Clone, Debug)]
pub(super) struct GroupsArgs {
    #[command(subcommand)]
    command: GroupsCommand,
}

#[derive(Subcommand, Clone, Debug)]
enum GroupsCommand {
    /// List the groups that have settings
    List(ListArgs),
    /// Change the settings of a group
    #[command(after_help = SET_EXAMPLES)]
    Set(SetArgs),
}

#[derive(Args, Clone, Debug)]
struct ListArgs {
    #[command(flatten)]
    format: Format,
}

#[derive(Args, Clone, Debug)]
#[command(group = ArgGroup::new("settings").required(true).multiple(true))]
struct SetArgs {
    /// Name of the group
    group: String,
    /// With this many waiting jobs the group accepts no further ones; `unset` for any number
    #[arg(long, env = "RECRUITER_GROUPS_MOST_WAITING", value_name = "N|unset", group = "settings", allow_negative_numbers = true, value_parser = number)]
    most_waiting: Option<Setting>,
    #[command(flatten)]
    format: Format,
}

/// A number, or no setting.
type Setting = Option<u64>;

fn number(text: &str) -> Result<Setting, String> {
    match text {
        UNSET => Ok(None),
        text => match text.parse() {
            Ok(number) if number > 0 => Ok(Some(number)),
            _ => Err(format!("`{text:.80}` is neither a number from 1 nor `{UNSET}`")),
        },
    }
}

/// Lists or changes the settings of groups.
///
/// # Errors
/// When a setting is not possible, or MongoDB cannot be used.
pub(super) async fn run(args: GroupsArgs, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    match args.command {
        GroupsCommand::List(args) => list(args, connect, out).await,
        GroupsCommand::Set(args) => set(args, connect, out).await,
    }
}

async fn list(args: ListArgs, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = Store::connect_to_ask(connect, "recruiter groups").await?;
    let mut groups = Vec::new();
    for settings in store.group_backlogs().await?.into_iter().filter(has_settings) {
        let counted = settings.most_waiting.map_or(COUNTED, |most| most.saturating_add(1));
        groups.push((store.waiting_in(&settings.group, counted).await?, settings));
    }
    if args.format.json {
        return Ok(groups.into_iter().try_for_each(|(waiting, settings)| json_line(out, document(&settings, Some(waiting))))?);
    }
    if groups.is_empty() {
        return Ok(writeln!(out, "no group has settings")?);
    }
    let columns = [Column::left("GROUP"), Column::right("WAITING"), Column::right("MOST WAITING")];
    let row = |(waiting, settings): &(u64, GroupBacklog)| {
        let most = settings.most_waiting.map_or_else(|| "-".into(), |most| most.to_string());
        Row::from(vec![printable(&settings.group, 60), waiting.to_string(), most])
    };
    Ok(table(out, Screen::of_stdout(), &columns, &groups.iter().map(row).collect::<Vec<_>>())?)
}

fn has_settings(settings: &GroupBacklog) -> bool {
    settings.most_waiting.is_some()
}

async fn set(args: SetArgs, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = Store::connect(connect, "recruiter groups").await?;
    if let Some(most) = args.most_waiting {
        store.set_most_waiting(&args.group, most).await.map_err(refused)?;
    }
    let settings = store.group_backlogs().await?.into_iter().find(|settings| settings.group == args.group);
    match (args.format.json, settings) {
        (true, Some(settings)) => json_line(out, document(&settings, None))?,
        (true, None) => json_line(out, doc! { "group": args.group })?,
        (false, Some(GroupBacklog { most_waiting: Some(most), .. })) => {
            writeln!(out, "{} accepts further jobs while fewer than {most} wait", printable(&args.group, 60))?;
        }
        (false, _) => writeln!(out, "{} accepts any number of jobs", printable(&args.group, 60))?,
    }
    Ok(())
}

fn refused(problem: InvalidSetting) -> anyhow::Error {
    match problem {
        InvalidSetting::Store(error) => error.into(),
        other @ (InvalidSetting::Group(_) | InvalidSetting::MostWaiting(_) | _) => usage(other.to_string()),
    }
}

fn document(settings: &GroupBacklog, waiting: Option<u64>) -> bson::Document {
    let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    let mut document =
        doc! { "group": &settings.group, "most_waiting": settings.most_waiting.map_or(Bson::Null, |most| number(most).into()) };
    if let Some(waiting) = waiting {
        document.insert("waiting", number(waiting));
    }
    document
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_a_number_from_one_or_unset() {
        assert_eq!((number("1"), number("unset")), (Ok(Some(1)), Ok(None)));
        for bad in ["0", "-1", "", "1.5", "many", "99999999999999999999"] {
            assert!(number(bad).is_err_and(|problem| problem.contains("neither a number from 1 nor `unset`")), "{bad}");
        }
    }
}
