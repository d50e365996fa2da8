//! `recruiter schedules`: lists, shows, applies, pauses, resumes, runs and removes schedules of periodic jobs.

use std::{collections::BTreeSet, io::Write, path::PathBuf};

use anstyle::AnsiColor;
use anyhow::{Context, bail};
use clap::{Args, Subcommand, builder::BoolishValueParser};
use recruiter_common::{
    NewJob,
    exit::Exit,
    flags::name_of_text,
    instant::Instant,
    schedules::{InvalidSchedule, ScheduleError, StoredSchedule},
    shutdown::Shutdown,
    store::ConnectArgs,
};
use serde_json::json;

use super::{
    connected,
    exit::{or_stopped, usage},
    limits::this_operator,
    output::{Format, briefly_apart, moment, printable},
    presence::{Needs, warn_of_unmet},
    redaction::Reveal,
    retries::unknown_policies,
    schedules_file,
    view::{Row, Stored, dry, fields, json_line, left, line, or_dash, print, right},
};
use crate::views::{
    outcome_of,
    schedules::{SHOWN_NEXT, pause_of, redact, run_of, skipped_of, state, to_json},
};

/// The name of this command in the logs of MongoDB.
const NAME: &str = "recruiter schedules";
/// Width of the names of fields, in characters.
const NAMES: usize = 10;
pub(super) const APPLY_EXAMPLES: &str = "\
Creates and changes the schedules in the file, and removes those that an earlier file of the same
namespace has created and that are no longer in it. All other schedules are left alone. The whole
file is checked before anything is written.

  namespace = \"shop\"

  [schedules.nightly-report]
  cron = \"0 3 * * *\"            # minute, hour, day of month, month, day of week
  zone = \"Europe/Berlin\"        # default: UTC
  overlap = \"skip\"              # no run while the last one is unfinished
  missed = \"one\"                # missed runs: one, skip, or all
  job = { class = \"report\", parameters = { kind = \"daily\" }, group = \"reports\" }

  [schedules.ping]
  every = \"30s\"
  jitter = \"10s\"                # each run is late by up to this time
  job = { class = \"ping\" }

Examples:
  recruiter schedules apply schedules.toml --dry-run
  recruiter schedules apply schedules.toml";

#[derive(Subcommand, Clone, Debug)]
pub(super) enum SchedulesCommand {
    /// List schedules with their next and last runs
    List {
        #[command(flatten)]
        format: Format,
        #[command(flatten)]
        reveal: Reveal,
    },
    /// Show a schedule, its next runs and its last ones
    Show {
        #[command(flatten)]
        schedule: OneSchedule,
        #[command(flatten)]
        reveal: Reveal,
    },
    /// Make the schedules of a namespace those of a file
    #[command(after_help = APPLY_EXAMPLES)]
    Apply(ApplyArgs),
    /// Pause a schedule: its runs are left out until it is resumed
    Pause {
        /// Name of the schedule
        #[arg(value_parser = name_of_text)]
        name: String,
        /// Why it is paused, for the people who list it
        #[arg(long, env = "RECRUITER_PAUSE_REASON", value_name = "TEXT", default_value = "", hide_default_value = true)]
        reason: String,
        #[command(flatten)]
        format: Format,
    },
    /// Resume a paused schedule with its next run
    Resume(OneSchedule),
    /// Run a schedule once, now, and write the id of the job
    Run(OneSchedule),
    /// Remove schedules; jobs that they have enqueued stay
    Remove {
        /// Names of the schedules
        #[arg(required = true, value_name = "NAME", value_parser = name_of_text)]
        names: Vec<String>,
        /// Dry run: report the changes without making them
        #[arg(long, env = "RECRUITER_DRY_RUN", value_parser = BoolishValueParser::new())]
        dry_run: bool,
        #[command(flatten)]
        format: Format,
    },
}

#[derive(Args, Clone, Debug)]
pub(super) struct OneSchedule {
    /// Name of the schedule
    #[arg(value_parser = name_of_text)]
    name: String,
    #[command(flatten)]
    format: Format,
}

#[derive(Args, Clone, Debug)]
pub(super) struct ApplyArgs {
    /// The file
    file: PathBuf,
    /// Dry run: report the changes without making them
    #[arg(long, env = "RECRUITER_DRY_RUN", value_parser = BoolishValueParser::new())]
    dry_run: bool,
    /// Remove all schedules of the namespace if the file has none
    #[arg(long, env = "RECRUITER_YES", value_parser = BoolishValueParser::new())]
    yes: bool,
    /// Accept retry policies that only your workers know, not this program
    #[arg(long, env = "RECRUITER_SCHEDULES_CUSTOM_POLICY", value_parser = BoolishValueParser::new())]
    custom_policy: bool,
    #[command(flatten)]
    format: Format,
}

pub(super) async fn run(command: SchedulesCommand, connect: &ConnectArgs, shutdown: Shutdown, out: &mut impl Write) -> anyhow::Result<()> {
    match command {
        SchedulesCommand::List { format, reveal } => or_stopped(shutdown, list(format, reveal, connect, out)).await,
        SchedulesCommand::Show { schedule, reveal } => or_stopped(shutdown, show(&schedule, reveal, connect, out)).await,
        SchedulesCommand::Apply(args) => apply(args, connect, out).await,
        SchedulesCommand::Pause { name, reason, format } => {
            let changed =
                connected(connect, NAME, false).await?.schedules().pause(&name, &this_operator(), &reason).await.map_err(refused)?;
            report(out, format, &name, if changed { "paused" } else { "paused-before" }, false)
        }
        SchedulesCommand::Resume(OneSchedule { name, format }) => {
            let changed = connected(connect, NAME, false).await?.schedules().resume(&name).await.map_err(refused)?;
            report(out, format, &name, if changed { "resumed" } else { "not-paused" }, false)
        }
        SchedulesCommand::Run(OneSchedule { name, format }) => run_now(&name, format, connect, out).await,
        SchedulesCommand::Remove { names, dry_run, format } => remove(&names, dry_run, format, connect, out).await,
    }
}

/// An invalid value is an error of the user.
fn refused(error: ScheduleError) -> anyhow::Error {
    if let ScheduleError::Invalid(problem) = error { usage(problem) } else { error.into() }
}

fn report(out: &mut impl Write, format: Format, name: &str, outcome: &str, dry_run: bool) -> anyhow::Result<()> {
    let text = format!("{}{}: {outcome}", dry(dry_run), printable(name, 256));
    Ok(line(out, format, &outcome_of(name, outcome, dry_run), text)?)
}

async fn list(format: Format, reveal: Reveal, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = connected(connect, NAME, true).await?;
    let (mut listed, now, redaction) = (store.schedules().list().await?, store.now(), reveal.of(&store).await?);
    listed.iter_mut().filter_map(|(_, schedule)| schedule.as_mut().ok()).for_each(|schedule| redact(schedule, &redaction));
    Ok(print(out, format, "there are no schedules", listed.iter().map(|(name, schedule)| view(name, schedule.as_ref(), now)))?)
}

/// A schedule, or why its document is none.
fn view(name: &str, schedule: Result<&StoredSchedule, &InvalidSchedule>, now: Instant) -> Stored {
    let state = state(schedule);
    let dash = || "-".to_owned();
    let (colour, [shown, next, last], below) = match schedule {
        Err(problem) => (AnsiColor::Red, [dash(), dash(), dash()], printable(&problem.to_string(), 1_000)),
        Ok(schedule) => {
            let colour = if schedule.paused.is_some() { AnsiColor::Yellow } else { AnsiColor::Green };
            let next = or_dash(schedule.next_runs(now, 1).first().map(|next| moment(*next)));
            let last = schedule.runs.last().map_or_else(|| "never".into(), |run| format!("{} ago", briefly_apart(run.at, now)));
            (colour, [printable(&schedule.schedule.to_string(), 256), next, last], below(schedule))
        }
    };
    let cells = [
        left("NAME", printable(name, 256)).cut_to(12),
        left("STATE", state).coloured(Some(colour)),
        left("SCHEDULE", shown).cut_to(12),
        left("NEXT", next),
        right("LAST", last),
    ];
    Stored { document: to_json(name, schedule, now), row: Row::from(cells).below(Some(below)) }
}

/// The second line of a row.
fn below(schedule: &StoredSchedule) -> String {
    let (class, group) = schedule.schedule.enqueues().map(NewJob::class_and_group).unwrap_or_default();
    let mut parts = vec![format!("class {}, group {}", printable(class, 80), printable(group, 80))];
    parts.extend(schedule.namespace.as_ref().map(|namespace| format!("namespace {}", printable(namespace, 80))));
    parts.extend(pause_of(schedule));
    parts.extend(skipped_of(schedule));
    parts.join("; ")
}

async fn show(
    OneSchedule { name, format }: &OneSchedule,
    reveal: Reveal,
    connect: &ConnectArgs,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let store = connected(connect, NAME, true).await?;
    let (mut schedule, now) = (store.schedules().find(name).await?, store.now());
    redact(&mut schedule, &reveal.of(&store).await?);
    if format.json {
        return Ok(json_line(out, &view(name, Ok(&schedule), now))?);
    }
    let (what, stored) = (&schedule.schedule, |field: &str| schedule.document.get(field));
    let known = [
        ("name", Some(schedule.name.clone())),
        ("schedule", Some(what.to_string())),
        ("jitter", stored("jitter_ms").map(|jitter| format!("{jitter} ms"))),
        ("overlap", Some(what.overlap_policy().word().into())),
        ("missed", Some(what.missed_policy().word().into())),
        ("job", stored("job").map(|job| job.clone().into_relaxed_extjson().to_string())),
        ("namespace", schedule.namespace.clone()),
        ("state", pause_of(&schedule)),
        ("skipped", skipped_of(&schedule)),
    ];
    let known = known.into_iter().filter_map(|(field, text)| Some((field, text?)));
    let next = schedule.next_runs(now, SHOWN_NEXT).into_iter().map(|at| ("next run", moment(at)));
    let runs = schedule.runs.iter().rev().map(|run| ("run", run_of(run)));
    Ok(fields(out, NAMES, known.chain(next).chain(runs).map(|(field, text)| (field, printable(&text, 4_000))))?)
}

async fn run_now(name: &str, format: Format, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = connected(connect, NAME, false).await?;
    let job = store.schedules().run_now(name).await.map_err(refused)?;
    line(out, format, &json!({ "id": job.to_string() }), job)?;
    out.flush()?;
    warn_of_unmet(&store, &Needs::of_stored(&store, &[job]).await).await;
    Ok(())
}

async fn remove(names: &[String], dry_run: bool, format: Format, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = connected(connect, NAME, dry_run).await?;
    let known: BTreeSet<String> = store.schedules().list().await?.into_iter().map(|(name, _)| name).collect();
    let unknown: Vec<&String> = names.iter().filter(|name| !known.contains(*name)).collect();
    if let Some(name) = unknown.first() {
        bail!("there is no schedule `{}`; nothing was removed", printable(name, 80));
    }
    for name in names {
        let is_removed = dry_run || store.schedules().remove(name, None).await?;
        report(out, format, name, if is_removed { "removed" } else { "removed-before" }, dry_run)?;
    }
    Ok(())
}

async fn apply(args: ApplyArgs, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let unknown = unknown_policies(args.custom_policy);
    let wanted = schedules_file::load(&args.file, unknown).context(Exit::Config)?;
    let store = connected(connect, NAME, args.dry_run).await?;
    let wanted = wanted.with_defaults(&store.class_defaults().await?, unknown).context(Exit::Config)?;
    // Every conflict is found before the first change.
    for (name, schedule) in &wanted.schedules {
        store.schedules().compare(name, schedule).await.with_context(|| format!("{}: nothing was changed", args.file.display()))?;
    }
    let names: BTreeSet<&String> = wanted.schedules.iter().map(|(name, _)| name).collect();
    let outdated: Vec<String> = store.schedules().names_in(&wanted.name).await?.into_iter().filter(|name| !names.contains(name)).collect();
    if names.is_empty() && !outdated.is_empty() && !args.yes && !args.dry_run {
        return Err(usage(format!(
            "{} has no schedules: it would remove all {} of the namespace `{}`; add --yes to remove them, or --dry-run to list them",
            args.file.display(),
            outdated.len(),
            printable(&wanted.name, 80)
        )));
    }
    for (name, schedule) in &wanted.schedules {
        let declared =
            if args.dry_run { store.schedules().compare(name, schedule).await? } else { store.schedules().declare(name, schedule).await? };
        report(out, args.format, name, declared.word(), args.dry_run)?;
    }
    for name in outdated {
        if args.dry_run || store.schedules().remove(&name, Some(&wanted.name)).await? {
            report(out, args.format, &name, "removed", args.dry_run)?;
        }
    }
    out.flush()?;
    warn_of_unmet(&store, &Needs::of(wanted.schedules.iter().filter_map(|(_, schedule)| schedule.enqueues()))).await;
    Ok(())
}
