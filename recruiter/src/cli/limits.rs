//! `recruiter limits`: lists, sets and removes the limits of resources. `recruiter pause`, `resume` and `pauses`: the pauses.

use std::io::Write;

use anyhow::anyhow;
use clap::{Args, Subcommand, builder::BoolishValueParser};
use recruiter_common::{
    flags::{name_of_text, variable},
    limits::{LARGEST_CAP, LARGEST_CAPACITY, Limit, Paused, Rate, SettingError, check_limit_name},
    store::{ConnectArgs, PermitHolder, Store, group_of_resource, paused_by},
};

use super::{
    connected,
    exit::usage,
    output::{Format, printable},
    view::{Row, View, json_line, left, line, or_dash, print, right},
};
use crate::views::{
    self,
    limits::{HOLDERS, LINES, ListedLimit, ListedPause, ShownLimit, all, described, no_limit, paused_of_text},
    outcome_of as outcome,
};

#[derive(Subcommand, Clone, Debug)]
pub(super) enum LimitsCommand {
    /// List the limits, with the number of permits in use
    List(Format),
    /// Show a limit, and the workers and jobs that hold its permits
    Show {
        /// Name of the resource or group, such as printer, customer:17 or @mail
        #[arg(value_parser = name_of_text)]
        name: String,
        #[command(flatten)]
        format: Format,
    },
    /// Set the limit of a resource, new or changed; it holds at once, and ends no running job
    Set {
        /// Name of the resource; a prefix that ends in *, such as customer:*, which limits each customer by itself; or @ and a group
        #[arg(value_parser = name_of_text)]
        name: String,
        #[command(flatten)]
        limit: LimitArgs,
        /// How many jobs that need the same resources may wait: further ones are refused when they are enqueued [default: any number]
        #[arg(long, env = "RECRUITER_LIMIT_MOST_WAITING", value_name = "N", value_parser = clap::value_parser!(u64).range(1..=LARGEST_CAP))]
        most_waiting: Option<u64>,
        #[command(flatten)]
        format: Format,
    },
    /// Remove a limit: jobs that name the resource wait until it has a limit again
    Remove {
        /// Name or prefix of the limit
        #[arg(value_parser = name_of_text)]
        name: String,
        /// Only show what would be removed
        #[arg(long, env = "RECRUITER_DRY_RUN", value_parser = BoolishValueParser::new())]
        dry_run: bool,
        #[command(flatten)]
        format: Format,
    },
}

/// A limit, as flags.
#[derive(Args, Clone, Copy, Debug)]
#[group(required = true, multiple = true)]
pub(super) struct LimitArgs {
    /// How many jobs may run at a time
    #[arg(long, env = "RECRUITER_LIMIT_CAPACITY", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(LARGEST_CAPACITY)))]
    capacity: Option<u32>,
    /// How often jobs may start: 100/1s, or '100/1s burst 20'
    #[arg(long, env = "RECRUITER_LIMIT_RATE", value_name = "RATE")]
    rate: Option<Rate>,
}

#[derive(Args, Clone, Debug)]
pub(super) struct PauseArgs {
    /// What to pause: everything, group:NAME, class:NAME or line:KEY
    #[arg(value_name = "WHAT", value_parser = paused_of_text)]
    paused: Paused,
    /// Why, for others
    #[arg(long, env = "RECRUITER_PAUSE_REASON", value_name = "TEXT")]
    reason: Option<String>,
    /// Who pauses [default: the user and the host]
    #[arg(long, env = "RECRUITER_PAUSE_BY", value_name = "NAME")]
    by: Option<String>,
    #[command(flatten)]
    format: Format,
}

#[derive(Args, Clone, Debug)]
pub(super) struct ResumeArgs {
    /// What to resume: everything, group:NAME, class:NAME or line:KEY
    #[arg(value_name = "WHAT", value_parser = resumed_of_text)]
    paused: Resumed,
    #[command(flatten)]
    format: Format,
}

pub(super) async fn run(command: LimitsCommand, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    match command {
        LimitsCommand::List(format) => list(&connected(connect, "recruiter limits", true).await?, format, out).await,
        LimitsCommand::Show { name, format } => show(&connected(connect, "recruiter limits", true).await?, &name, format, out).await,
        LimitsCommand::Set { name, limit, most_waiting, format } => {
            check_limit_name(&name).map_err(usage)?;
            if most_waiting.is_some()
                && let Some(group) = group_of_resource(&name)
            {
                return Err(usage(anyhow!("`recruiter groups set --most-waiting N {group}` sets how many jobs may wait in a group")));
            }
            let store = Store::connect(connect, "recruiter limits").await?;
            let limit = Limit::new(limit.capacity, limit.rate);
            store.limits().set(&name, limit).await.map_err(refused)?;
            if group_of_resource(&name).is_none() {
                store.limits().set_most_waiting(&name, most_waiting).await.map_err(refused)?;
            }
            let text = format!("{} has a limit: {}{}", printable(&name, 256), described(limit), and_waiting(most_waiting));
            Ok(line(out, format, &outcome(&name, "set", false), text)?)
        }
        LimitsCommand::Remove { name, dry_run, format } => {
            let store = connected(connect, "recruiter limits", dry_run).await?;
            let limit = all(&store.settings().await?).find(|(other, _)| *other == name).map(|(_, limit)| limit);
            let Some(limit) = limit else { return Err(anyhow!(no_limit(printable(&name, 256)))) };
            let text = if dry_run {
                format!("would remove the limit of {}: {}", printable(&name, 256), described(limit))
            } else {
                store.limits().remove(&name).await.map_err(refused)?;
                let effect = if group_of_resource(&name).is_some() { "its jobs have no limit" } else { "jobs that name it wait" };
                format!("removed the limit of {}: {effect}", printable(&name, 256))
            };
            Ok(line(out, format, &outcome(&name, "removed", dry_run), text)?)
        }
    }
}

pub(super) fn refused(error: SettingError) -> anyhow::Error {
    if let SettingError::Invalid(problem) = error { usage(problem) } else { error.into() }
}

fn and_waiting(most: Option<u64>) -> String {
    most.map_or_else(String::new, |most| format!(", and at most {most} jobs may wait"))
}

async fn list(store: &Store, format: Format, out: &mut impl Write) -> anyhow::Result<()> {
    let (limits, invalid) = ListedLimit::all(store).await?;
    name_invalid(invalid.iter())?;
    Ok(print(out, format, "no resource has a limit", limits)?)
}

/// Names documents of `limits` and `groups` that are not valid.
pub(super) fn name_invalid<'a>(names: impl Iterator<Item = &'a String>) -> std::io::Result<()> {
    for name in names {
        let name = printable(name, 256);
        writeln!(std::io::stderr(), "the setting {name} is not valid: what it would limit waits; correct or delete its document")?;
    }
    Ok(())
}

impl View for ListedLimit {
    fn row(self) -> Row {
        let Self { name, capacity, rate, in_use, most_waiting, .. } = self;
        Row::from([
            left("NAME", printable(&name, 80)).cut_to(10),
            right("CAPACITY", or_dash(capacity)),
            right("IN USE", in_use),
            left("RATE", or_dash(rate)),
            right("MOST WAITING", or_dash(most_waiting)),
        ])
    }
}

async fn show(store: &Store, name: &str, format: Format, out: &mut impl Write) -> anyhow::Result<()> {
    let shown = ShownLimit::read(store, name).await?;
    if format.json {
        return Ok(json_line(out, &shown.to_view(store).await?)?);
    }
    match shown.limit {
        Some(limit) => writeln!(out, "{}: {}{}", printable(name, 256), described(limit), and_waiting(shown.most_waiting))?,
        None => writeln!(out, "{} has no limit: jobs that name it wait; see `recruiter limits set --help`", printable(name, 256))?,
    }
    write_holders(&shown.holders, out)
}

/// Writes which workers hold permits, and for which jobs.
pub(super) fn write_holders(holders: &[PermitHolder], out: &mut impl Write) -> anyhow::Result<()> {
    for PermitHolder { worker, permits, jobs } in holders {
        let (permits, jobs) = (printable(&listed(permits), 1_000), listed(jobs));
        let of = if jobs.is_empty() { String::new() } else { format!(" for {jobs}") };
        writeln!(out, "  worker {worker} holds {permits}{of}")?;
    }
    Ok(())
}

/// The first of these, separated by commas.
fn listed(all: &[impl ToString]) -> String {
    let named: Vec<String> = all.iter().take(HOLDERS).map(ToString::to_string).collect();
    let more = if all.len() > HOLDERS { format!(" and {} more", all.len() - HOLDERS) } else { String::new() };
    named.join(", ") + &more
}

/// Pauses jobs.
pub(super) async fn pause(args: PauseArgs, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let PauseArgs { paused, reason, by, format } = args;
    let store = Store::connect(connect, "recruiter pause").await?;
    let by = by.unwrap_or_else(this_operator);
    let (name, is_new) = (paused.to_string(), store.pauses().pause(&paused, &by, reason.as_deref()).await?);
    let (done, shown) = (if is_new { "paused" } else { "paused-before" }, printable(&name, 256));
    let text = if is_new {
        format!("paused {shown}: its jobs wait, and running jobs continue")
    } else {
        format!("{shown} was paused before; `recruiter pauses` shows by whom")
    };
    Ok(line(out, format, &outcome(&name, done, false), text)?)
}

/// What to resume: exactly what is given, if that is paused. A failed job may have halted a line whose key ends in a line break.
#[derive(Clone, Debug)]
struct Resumed {
    exact: Paused,
    trimmed: Paused,
}

fn resumed_of_text(text: &str) -> Result<Resumed, String> {
    let trimmed = paused_of_text(text)?;
    Ok(Resumed { exact: text.parse().unwrap_or_else(|_| trimmed.clone()), trimmed })
}

/// The user and the host.
pub(super) fn this_operator() -> String {
    let user = variable("USER").or_else(|| variable("LOGNAME")).unwrap_or_else(|| "unknown".into());
    format!(
        "{}@{}",
        user.to_string_lossy(),
        nix::unistd::gethostname().map_or_else(|_| "unknown".into(), |host| host.to_string_lossy().into_owned())
    )
}

/// Ends a pause.
pub(super) async fn resume(args: ResumeArgs, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = Store::connect(connect, "recruiter resume").await?;
    let Resumed { exact, trimmed } = args.paused;
    let is_exact = exact != trimmed && store.pauses().resume(&exact).await?;
    let was_paused = is_exact || store.pauses().resume(&trimmed).await?;
    let name = if is_exact { exact } else { trimmed }.to_string();
    let (done, shown) = (if was_paused { "resumed" } else { "not-paused" }, printable(&name, 256));
    let text = if was_paused { format!("resumed {shown}") } else { format!("{shown} was not paused") };
    Ok(line(out, args.format, &outcome(&name, done, false), text)?)
}

/// Lists the pauses.
pub(super) async fn pauses(format: Format, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = Store::connect_to_ask(connect, "recruiter pauses").await?;
    let (pauses, invalid) = views::limits::pauses(&store).await?;
    for name in &invalid {
        let (name, known) = (printable(name, 256), "everything, group:NAME, class:NAME or line:KEY");
        writeln!(
            std::io::stderr(),
            "the document {name} in `pauses` pauses nothing: its `_id` must be {known}; delete it, or pause again"
        )?;
    }
    if pauses.is_empty() && !format.json {
        return Ok(writeln!(out, "nothing is paused")?);
    }
    let count = pauses.len();
    for (paused, pause) in pauses {
        let text = format!("{}: {}", printable(&paused.to_string(), 256), paused_by(&pause, store.now()));
        line(out, format, &ListedPause::of((paused, pause)), text)?;
    }
    if !format.json && count >= usize::try_from(LINES)? {
        writeln!(out, "(of the lines, the first {LINES} are shown)")?;
    }
    Ok(())
}
