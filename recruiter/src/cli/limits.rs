//! `recruiter limits`: lists, sets and removes the limits of resources. `recruiter pause`, `resume` and `pauses`: the pauses.

use std::{collections::HashMap, io::Write};

use anyhow::anyhow;
use bson::{Document, doc};
use clap::{Args, Subcommand, builder::BoolishValueParser};
use recruiter_common::{
    flags::{name_of_text, variable},
    instant::Instant,
    limits::{LARGEST_CAP, LARGEST_CAPACITY, Limit, Pause, Paused, Rate, SettingError, Settings, check_limit_name},
    store::{ConnectArgs, PermitHolder, Store, group_of_resource, paused_by, resource_and_number, resource_of_group},
};
use serde::Serialize;
use serde_json::Value;

use super::{
    connected,
    exit::usage,
    output::{Format, printable},
    view::{Row, View, date, extended, json_line, left, line, or_dash, outcome, print, right, texts},
};

/// Maximum number of jobs, and of permits of each worker, that are shown.
const HOLDERS: usize = 50;
/// Maximum number of paused lines shown.
const LINES: i64 = 1_000;

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
            let Some(limit) = limit else { return Err(anyhow!("{} has no limit", printable(&name, 256))) };
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

/// A limit in words.
pub(super) fn described(limit: Limit) -> String {
    let capacity = limit.capacity.map(|capacity| format!("at most {capacity} at a time"));
    let rate = limit.rate.map(|rate| format!("at most {rate}"));
    capacity.into_iter().chain(rate).collect::<Vec<_>>().join(", ")
}

fn and_waiting(most: Option<u64>) -> String {
    most.map_or_else(String::new, |most| format!(", and at most {most} jobs may wait"))
}

/// The limits of resources and of groups, by the name of their permits.
fn all(settings: &Settings) -> impl Iterator<Item = (String, Limit)> {
    let groups = settings.groups.iter().filter(|(_, group)| group.limit != Limit::default());
    let groups = groups.map(|(name, group)| (resource_of_group(name), group.limit));
    settings.limits.iter().map(|(name, limit)| (name.clone(), *limit)).chain(groups)
}

async fn list(store: &Store, format: Format, out: &mut impl Write) -> anyhow::Result<()> {
    let (settings, holders) = (store.settings().await?, store.permit_holders().await?);
    let waiting = store.limit_backlogs().await?.into_iter().filter_map(|(name, most)| Some((name, most?)));
    let waiting: HashMap<String, u64> = waiting.collect();
    name_invalid(settings.invalid.iter())?;
    let limits = all(&settings).map(|(name, limit)| ListedLimit::of(&name, Some(limit), waiting.get(&name).copied(), &holders));
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

/// The limit of a resource or group.
#[derive(Serialize)]
struct ListedLimit {
    name: String,
    /// Only asked for by name, it may have no limit.
    is_defined: bool,
    capacity: Option<u32>,
    rate: Option<String>,
    in_use: usize,
    most_waiting: Option<u64>,
    /// Not in lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    holders: Option<Value>,
}

impl ListedLimit {
    fn of(name: &str, limit: Option<Limit>, most_waiting: Option<u64>, holders: &[PermitHolder]) -> Self {
        let is_of = |resource: &str| name.strip_suffix('*').map_or(resource == name, |prefix| resource.starts_with(prefix));
        let permits = holders.iter().flat_map(|holder| &holder.permits);
        let in_use = permits.filter_map(|permit| resource_and_number(permit)).filter(|(resource, _)| is_of(resource)).count();
        let Limit { capacity, rate, .. } = limit.unwrap_or_default();
        let rate = rate.map(|rate| rate.to_string());
        Self { name: name.into(), is_defined: limit.is_some(), capacity, rate, in_use, most_waiting, holders: None }
    }
}

impl View for ListedLimit {
    fn row(self) -> Row {
        let Self { name, is_defined: _, capacity, rate, in_use, most_waiting, holders: _ } = self;
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
    let settings = store.settings().await?;
    let limit = all(&settings).find(|(other, _)| other == name).map(|(_, limit)| limit).or_else(|| settings.limit_of(name));
    let holders = store.holders_of_resource(name, HOLDERS).await?;
    let most_waiting = store.limit_backlogs().await?.into_iter().find(|(other, _)| other == name).and_then(|(_, most)| most);
    if format.json {
        let listed = ListedLimit::of(name, limit, most_waiting, &store.permit_holders().await?);
        let holders: Vec<Document> = holders.iter().map(holder_to_document).collect();
        return Ok(json_line(out, &ListedLimit { holders: Some(extended(holders)), ..listed })?);
    }
    match limit {
        Some(limit) => writeln!(out, "{}: {}{}", printable(name, 256), described(limit), and_waiting(most_waiting))?,
        None => writeln!(out, "{} has no limit: jobs that name it wait; see `recruiter limits set --help`", printable(name, 256))?,
    }
    write_holders(&holders, out)
}

/// A worker that holds permits, for programs.
pub(super) fn holder_to_document(holder: &PermitHolder) -> Document {
    doc! { "worker": holder.worker.to_string(), "permits": &holder.permits, "jobs": texts(&holder.jobs) }
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

/// A group or class with a blank at its end has no jobs, so its pause would pause nothing. The key of a line may have one.
fn paused_of_text(text: &str) -> Result<Paused, String> {
    let text = text.trim_start();
    let text = if text.starts_with("line:") { text.trim_end_matches(char::is_control) } else { text.trim_end() };
    let paused = text.parse::<Paused>().map_err(|problem| problem.to_string())?;
    match &paused {
        Paused::Group(name) | Paused::Class(name) if name.trim() != name => Err(format!("{name:?} begins with a blank: remove it")),
        Paused::Everything | Paused::Group(_) | Paused::Class(_) | Paused::Line(_) => Ok(paused),
    }
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

/// A pause.
#[derive(Serialize)]
struct ListedPause {
    name: String,
    by: String,
    reason: Option<String>,
    #[serde(serialize_with = "date")]
    at: Option<Instant>,
}

/// Lists the pauses.
pub(super) async fn pauses(format: Format, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = Store::connect_to_ask(connect, "recruiter pauses").await?;
    let Settings { pauses, invalid_pauses, .. } = store.settings().await?;
    for name in &invalid_pauses {
        let (name, known) = (printable(name, 256), "everything, group:NAME, class:NAME or line:KEY");
        writeln!(
            std::io::stderr(),
            "the document {name} in `pauses` pauses nothing: its `_id` must be {known}; delete it, or pause again"
        )?;
    }
    let pauses = pauses.into_iter();
    let pauses: Vec<(Paused, Pause)> = pauses.chain(store.pauses_of_lines(LINES).await?).collect();
    if pauses.is_empty() && !format.json {
        return Ok(writeln!(out, "nothing is paused")?);
    }
    let count = pauses.len();
    for (paused, pause) in pauses {
        let text = format!("{}: {}", printable(&paused.to_string(), 256), paused_by(&pause, store.now()));
        let Pause { by, reason, at, .. } = pause;
        line(out, format, &ListedPause { name: paused.to_string(), by, reason, at }, text)?;
    }
    if !format.json && count >= usize::try_from(LINES)? {
        writeln!(out, "(of the lines, the first {LINES} are shown)")?;
    }
    Ok(())
}
