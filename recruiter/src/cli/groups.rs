//! `recruiter groups`: lists and changes the settings of groups.

use std::{io::Write, str::FromStr, time::Duration};

use clap::{ArgGroup, Args, Subcommand};
use recruiter_common::{
    flags::name_of_text,
    limits::{self, MaintenanceWindow},
    store::{ConnectArgs, Store},
};
use serde_json::json;

use super::{
    exit::usage,
    limits::{name_invalid, refused},
    output::{Format, printable},
    view::{Row, View, json_line, left, or_dash, print, right},
    why,
};
use crate::views::groups::Group;

/// In place of a value: removes the setting.
const UNSET: &str = "unset";
pub(super) const SET_EXAMPLES: &str = "\
Examples:
  recruiter groups set mail --most-waiting 10000
      refuse further jobs while 10,000 jobs of the group wait
  recruiter groups set mail --weight 3
      three starts for each one of a group with weight 1
  recruiter groups set mail --ageing 10m
      a job counts as one priority higher for each 10 minutes that it has waited
  recruiter groups set mail --maintenance '02:00-03:00 Europe/Berlin' \\
      --maintenance '22:00-06:00 UTC sat,sun'
      start no job in these times
  recruiter groups set mail --weight unset
      remove a setting";

#[derive(Subcommand, Clone, Debug)]
pub(super) enum GroupsCommand {
    /// List the groups that have settings
    List(Format),
    /// Change the settings of a group
    #[command(after_help = SET_EXAMPLES)]
    Set(SetArgs),
    /// Show why the waiting jobs of a group do not run, with the number of jobs for each reason
    Why {
        /// Name of the group
        #[arg(value_parser = name_of_text)]
        group: String,
        #[command(flatten)]
        format: Format,
    },
}

#[derive(Args, Clone, Debug)]
#[command(group = ArgGroup::new("changes").required(true).multiple(true))]
pub(super) struct SetArgs {
    /// Name of the group
    #[arg(value_parser = name_of_text)]
    group: String,
    /// With this many waiting jobs the group accepts no further ones; `unset` for any number
    #[arg(long, env = "RECRUITER_GROUPS_MOST_WAITING", value_name = "N|unset", group = "changes", allow_negative_numbers = true, value_parser = number)]
    most_waiting: Option<Setting<u64>>,
    /// Share of the group in the starts, if any group has a weight; `unset` for 1
    #[arg(long, env = "RECRUITER_GROUPS_WEIGHT", value_name = "WEIGHT|unset", group = "changes", allow_negative_numbers = true, value_parser = weight)]
    weight: Option<Setting<f64>>,
    /// A job counts as one priority higher for each of these times that it has waited, such as 10m; `unset`: priorities stay as they are
    #[arg(long, env = "RECRUITER_GROUPS_AGEING", value_name = "TIME|unset", group = "changes", value_parser = ageing)]
    ageing: Option<Setting<Duration>>,
    /// Start no job in this time: '02:00-03:00 Europe/Berlin', or '22:00-06:00 UTC sat,sun'; may be given several times, and replaces all windows; `unset` removes them
    #[arg(long, env = "RECRUITER_GROUPS_MAINTENANCE", value_name = "WINDOW|unset", group = "changes", value_parser = maintenance)]
    maintenance: Vec<Setting<MaintenanceWindow>>,
    #[command(flatten)]
    format: Format,
}

/// A value, or no setting.
type Setting<T> = Option<T>;

/// The setting that a flag gives: this value, if its text is one, or none.
fn setting<T>(text: &str, value: Option<T>, what: &str) -> Result<Setting<T>, String> {
    match value {
        _ if text == UNSET => Ok(None),
        Some(value) => Ok(Some(value)),
        None => Err(format!("`{text:.80}` is neither {what} nor `{UNSET}`")),
    }
}

fn number(text: &str) -> Result<Setting<u64>, String> {
    setting(text, text.parse().ok().filter(|number| *number > 0), "a number from 1")
}

fn weight(text: &str) -> Result<Setting<f64>, String> {
    let what = format!("a weight from {} to {}", limits::WEIGHTS.start(), limits::WEIGHTS.end());
    setting(text, text.parse().ok().filter(|weight| limits::WEIGHTS.contains(weight)), &what)
}

fn ageing(text: &str) -> Result<Setting<Duration>, String> {
    let time = humantime::parse_duration(text).ok().filter(|time| limits::AGEING.contains(time));
    setting(text, time, "a time from 10ms to 366days, such as 10m,")
}

fn maintenance(text: &str) -> Result<Setting<MaintenanceWindow>, String> {
    if text == UNSET { Ok(None) } else { MaintenanceWindow::from_str(text).map(Some).map_err(|problem| problem.to_string()) }
}

pub(super) async fn run(command: GroupsCommand, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    match command {
        GroupsCommand::List(format) => list(format, connect, out).await,
        GroupsCommand::Set(args) => set(args, connect, out).await,
        GroupsCommand::Why { group, format } => why::run_for_group(&group, format, connect, out).await,
    }
}

impl View for Group {
    fn row(self) -> Row {
        let Self { name, most_waiting, capacity, weight, ageing, maintenance, waiting, .. } = self;
        let windows = Some(maintenance.join("; ")).filter(|windows| !windows.is_empty());
        Row::from([
            left("GROUP", printable(&name, 60)),
            right("WAITING", or_dash(waiting)),
            right("MOST WAITING", or_dash(most_waiting)),
            right("CAPACITY", or_dash(capacity)),
            right("WEIGHT", or_dash(weight)),
            right("AGEING", or_dash(ageing)),
            left("MAINTENANCE", or_dash(windows)),
        ])
    }
}

async fn list(format: Format, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = Store::connect_to_ask(connect, "recruiter groups").await?;
    let (groups, invalid) = Group::all_counted(&store).await?;
    name_invalid(invalid.iter())?;
    Ok(print(out, format, "no group has settings", groups)?)
}

async fn set(args: SetArgs, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    if args.maintenance.len() > 1 && args.maintenance.contains(&None) {
        return Err(usage(format!("give either `{UNSET}` or maintenance windows")));
    }
    let store = Store::connect(connect, "recruiter groups").await?;
    let name = printable(&args.group, 60);
    let mut changed = Vec::new();
    if let Some(most) = args.most_waiting {
        store.groups().set_most_waiting(&args.group, most).await.map_err(refused)?;
        changed.push(match most {
            Some(most) => format!("{name} accepts further jobs while fewer than {most} wait"),
            None => format!("{name} accepts any number of jobs"),
        });
    }
    if let Some(weight) = args.weight {
        store.groups().set_weight(&args.group, weight).await.map_err(refused)?;
        changed.push(match weight {
            Some(weight) => format!("{name} has the weight {weight}"),
            None => format!("{name} has no weight"),
        });
    }
    if let Some(ageing) = args.ageing {
        store.groups().set_ageing(&args.group, ageing).await.map_err(refused)?;
        changed.push(match ageing {
            Some(ageing) => {
                format!("a job of {name} counts as one priority higher for each {} that it has waited", humantime::format_duration(ageing))
            }
            None => format!("the jobs of {name} keep their priorities"),
        });
    }
    if !args.maintenance.is_empty() {
        let windows: Vec<MaintenanceWindow> = args.maintenance.into_iter().flatten().collect();
        store.groups().set_maintenance(&args.group, &windows).await.map_err(refused)?;
        let texts: Vec<String> = windows.iter().map(ToString::to_string).collect();
        changed.push(if texts.is_empty() {
            format!("{name} has no maintenance window")
        } else {
            format!("no job of {name} starts in {}", texts.join("; "))
        });
    }
    if args.format.json {
        let group = Group::find(&store, &args.group).await?;
        return Ok(match group {
            Some(group) => json_line(out, &group),
            None => json_line(out, &json!({ "name": args.group })),
        }?);
    }
    Ok(changed.into_iter().try_for_each(|line| writeln!(out, "{line}"))?)
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

    #[test]
    fn other_settings_are_values_in_their_ranges_or_unset() {
        assert_eq!((weight("0.5"), weight("unset")), (Ok(Some(0.5)), Ok(None)));
        assert!(["0", "-1", "", "NaN", "inf", "1e9", "many"].iter().all(|bad| weight(bad).is_err_and(|problem| problem.contains("unset"))));
        assert_eq!((ageing("10m"), ageing("unset")), (Ok(Some(Duration::from_secs(600))), Ok(None)));
        assert!(["0s", "1ms", "-1s", "", "9999days", "soon"].iter().all(|bad| ageing(bad).is_err_and(|problem| problem.contains("unset"))));
        assert!(maintenance("02:00-03:00 UTC").is_ok_and(|window| window.is_some()) && maintenance("unset") == Ok(None));
        assert!(["", "02:00", "02:00-03:00"].iter().all(|bad| maintenance(bad).is_err()));
    }
}
