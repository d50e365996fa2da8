//! `recruiter jobs retry`, `change`, `cancel` and `delete`, for jobs given by id and for all jobs that match a filter.
//!
//! The library has the rules of each change ([`recruiter_common::control`]). This file has the arguments and the
//! output.

use std::{
    io::{IsTerminal, Write},
    ops::ControlFlow,
    time::Duration,
};

use anyhow::{anyhow, bail};
use clap::{Args, builder::BoolishValueParser};
use indicatif::ProgressBar;
use recruiter_common::{
    JobFilter,
    control::{Alteration, Change, Changed, Report},
    exit::Exit,
    ids::JobId,
    instant::{Instant, later},
    job::Priority,
    shutdown::Shutdown,
    spec::{duration_of_text, id_of_text, instant_of_text},
    store::{ConnectArgs, Store},
};
use serde_json::json;

use super::{
    connected_to_change,
    exit::usage,
    filter::check_reason,
    output::{Format, printable, progress},
    presence::{Needs, STORED, warn_of_unmet},
    view::{dry, json_line, line, or_dash},
};
use crate::views::{
    filter::FilterArgs,
    outcome::{Outcome, Process, message},
};

/// Maximum number of unchanged jobs that are listed by id. All of them are counted.
const NAMED: u64 = 20;

pub(crate) const RETRY_EXAMPLES: &str = "\
Retries the jobs with these ids, or all jobs that match the filters. Without --why, and without
another --state than archived, filters match only failed jobs (neither done nor cancelled). A job
that was retried before is skipped: its document names the new job (retried_as). With --again it is
enqueued once more. The new job has the content of the old one, unless you give it new parameters,
another policy, group or priority.

Examples:
  recruiter jobs retry 65a1b2c3d4e5f60718293a4b
  recruiter jobs retry --error-class SmtpDown --since 2030-01-31T12:00:00Z \\
      --dry-run
  recruiter jobs retry --class mail --message 'no such host' \\
      --set '{\"host\": \"mx2\"}' --to-group slow --dry-run
  recruiter jobs retry --class mail --state waiting
      make jobs that wait for a later date due now
  recruiter jobs retry --all --yes
      retry all failed jobs; after an interruption, repeat the command";

pub(crate) const ALTER_EXAMPLES: &str = "\
Changes the waiting jobs with these ids, or all waiting jobs that match the filters. A job that has
started meanwhile is left to its worker.

Examples:
  recruiter jobs change --class mail --group bulk --priority 9 --dry-run
  recruiter jobs change --group mail --to-group mail-slow --yes
  recruiter jobs change --tag import --after 2h --yes
  recruiter jobs change 65a1b2c3d4e5f60718293a4b --at 2030-01-31T18:00:00Z";

pub(crate) const CANCEL_EXAMPLES: &str = "\
Cancels the jobs with these ids, or all waiting and running jobs that match the filters.

Examples:
  recruiter jobs cancel 65a1b2c3d4e5f60718293a4b
  recruiter jobs cancel --class nosuch --dry-run
  recruiter jobs cancel --group mail --state waiting --yes
      cancel waiting jobs only, no running ones";

pub(crate) const DELETE_EXAMPLES: &str = "\
Deletes the archived jobs with these ids, or all that match the filters. A waiting or running job is
never deleted: cancel it first.

Examples:
  recruiter jobs delete --why malformed
  recruiter jobs delete --class nosuch --until 7d --yes";

/// The jobs to change, and how to change them.
#[derive(Args, Clone, Debug)]
pub(crate) struct ChangeArgs {
    /// Ids of the jobs
    #[arg(value_name = "ID", value_parser = id_of_text)]
    ids: Vec<JobId>,
    /// All jobs to which the change applies
    #[arg(long, help_heading = "Which jobs")]
    all: bool,
    /// Dry run: report the changes without making them
    #[arg(long, env = "RECRUITER_DRY_RUN", value_parser = BoolishValueParser::new())]
    dry_run: bool,
    /// Skip the confirmation before many jobs are changed
    #[arg(long, env = "RECRUITER_YES", value_parser = BoolishValueParser::new())]
    yes: bool,
    #[command(flatten)]
    format: Format,
    // Last field, because its heading applies to all arguments after it.
    #[command(flatten)]
    filter: FilterArgs,
}

/// The new values of waiting jobs.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "New values")]
pub(crate) struct NewValues {
    /// New priority from 0 to 9, higher first
    #[arg(long, env = "RECRUITER_JOBS_CHANGE_PRIORITY", value_name = "0-9", allow_negative_numbers = true, value_parser = clap::value_parser!(u8).range(0..=9))]
    priority: Option<u8>,
    /// New group
    #[arg(long, env = "RECRUITER_JOBS_CHANGE_TO_GROUP", value_name = "GROUP")]
    to_group: Option<String>,
    /// New instant at which the jobs are due, for example 2030-01-31T18:00:00Z
    #[arg(long, env = "RECRUITER_JOBS_CHANGE_AT", value_name = "INSTANT", value_parser = instant_of_text, conflicts_with = "after")]
    at: Option<Instant>,
    /// New delay from now on, for example 5m or 1h 30m
    #[arg(long, env = "RECRUITER_JOBS_CHANGE_AFTER", value_name = "DURATION", value_parser = duration_of_text)]
    after: Option<Duration>,
}

impl NewValues {
    fn alteration(&self, now: Instant) -> anyhow::Result<Alteration> {
        let at = self.at.or_else(|| self.after.map(|delay| later(now, delay)));
        Alteration::new(self.priority.and_then(Priority::new), self.to_group.clone(), at).map_err(usage)
    }
}

/// A change that may depend on the present time.
pub(crate) enum Intent {
    /// This change.
    Plain(Change),
    /// New values, with a date or a delay.
    NewValues(NewValues),
}

impl Intent {
    fn at(&self, now: Instant) -> anyhow::Result<Change> {
        match self {
            Self::Plain(change) => Ok(change.clone()),
            Self::NewValues(values) => values.alteration(now).map(Change::Alter),
        }
    }
}

pub(crate) async fn run(
    args: ChangeArgs,
    intent: Intent,
    connect: &ConnectArgs,
    shutdown: &mut Shutdown,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let given = args.filter.clone().at(Instant::UNIX_EPOCH);
    let change = &intent.at(Instant::UNIX_EPOCH)?;
    let filtered = !given.is_empty();
    if !args.ids.is_empty() {
        if args.all || filtered || given.state.is_some() {
            return Err(usage("job ids cannot be combined with filters or --all; use one of them"));
        }
        let store = connected_to_change(connect, "recruiter jobs", args.dry_run).await?;
        return change_named(&args, &intent.at(store.now())?, &store, out).await;
    }
    if args.all && filtered {
        return Err(usage("--all cannot be combined with filters, except --state"));
    }
    // A state is a filter as well; with --all it only narrows.
    if !args.all && !filtered && given.state.is_none() {
        return Err(usage(format!("name the jobs to be {}: by ids, by filters (--help lists them), or by --all", participle(change))));
    }
    given.whenever().narrowed_to(change).map_err(usage)?;
    let asks = !args.yes && !args.dry_run;
    if asks && !(std::io::stdin().is_terminal() && std::io::stderr().is_terminal()) {
        return Err(usage("no terminal to ask for confirmation on: add --yes to make the changes, or --dry-run to report them"));
    }
    let store = connected_to_change(connect, "recruiter jobs", args.dry_run).await?;
    let change = &intent.at(store.now())?;
    let filter = args.filter.clone().at(store.now()).narrowed_to(change).map_err(usage)?;
    if asks {
        ask(&store, change, &filter, shutdown).await?;
    }
    let (mut named, mut written, json) = (0, Vec::new(), args.format.json);
    let report = walk(&store, change, args.dry_run, &filter, shutdown, |changed, bar| {
        for (job, changed) in changed {
            if written.len() < STORED && !args.dry_run {
                written.extend(may_lack_a_worker(*job, changed));
            }
            if json {
                json_line(out, &Outcome::of(*job, changed, args.dry_run))?;
            } else if matches!(changed, Changed::Refused(_)) && named < NAMED {
                named += 1;
                bar.suspend(|| writeln!(std::io::stderr(), "{job}: {}", message(changed, args.dry_run)))?;
            }
        }
        Ok(())
    })
    .await?;
    let told = summary(change, &report);
    let view = json!({ "matched": report.matched(), "outcomes": report.outcomes, "dry_run": args.dry_run, "stopped": report.is_stopped });
    line(out, args.format, &view, format_args!("{}{told}", dry(args.dry_run)))?;
    out.flush()?;
    warn_of_unmet(&store, &Needs::of_stored(&store, &written).await).await;
    if report.is_stopped {
        return Err(anyhow!("stopped by a signal; repeat the command to continue with the rest").context(Exit::Aborted));
    }
    if report.matched() == 0 {
        check_reason(&filter)?;
    }
    match report.count("refused") {
        0 => Ok(()),
        refused => bail!("{refused} of {} jobs could not be {}", report.matched(), participle(change)),
    }
}

/// Counts the jobs, and asks for a confirmation on the terminal.
async fn ask(store: &Store, change: &Change, filter: &JobFilter, shutdown: &mut Shutdown) -> anyhow::Result<()> {
    let counted = walk(store, change, true, filter, shutdown, |_, _| Ok(())).await?;
    if counted.is_stopped {
        return Err(anyhow!("stopped by a signal; nothing was changed").context(Exit::Aborted));
    }
    let wanted = counted.matched() - left_alone(&counted);
    let kinds = if counted.outcomes.len() > 1 { format!(" ({})", summary(change, &counted)) } else { String::new() };
    if wanted > 0 && !is_confirmed(format!("{} {wanted} jobs{kinds}?", imperative(change)), shutdown).await? {
        bail!("not confirmed; nothing was changed");
    }
    Ok(())
}

/// Changes each job separately. A failed job does not stop the others.
async fn change_named(args: &ChangeArgs, change: &Change, store: &Store, out: &mut impl Write) -> anyhow::Result<()> {
    let (mut refused, mut written) = (0, Vec::new());
    for (job, changed) in store.control(args.dry_run).change(change, &args.ids).await? {
        let failed = matches!(changed, Changed::Refused(_));
        refused += usize::from(failed);
        written.extend(may_lack_a_worker(job, &changed).filter(|_| !args.dry_run));
        write_outcome(&Outcome::of(job, &changed, args.dry_run), out, args.format, failed)?;
    }
    warn_of_unmet(store, &Needs::of_stored(store, &written).await).await;
    match refused {
        0 => Ok(()),
        refused => bail!("{refused} of {} jobs could not be {}", args.ids.len(), participle(change)),
    }
}

/// The job that is enqueued, due or in another group now, and that perhaps no worker takes.
fn may_lack_a_worker(job: JobId, changed: &Changed) -> Option<JobId> {
    if let Changed::EnqueuedAgain { new, .. } = changed {
        return *new;
    }
    matches!(changed, Changed::DueNow { .. } | Changed::Altered).then_some(job)
}

/// Changes all jobs that match, or reports what would change in a dry run. The first signal stops it after the current
/// batch.
async fn walk(
    store: &Store,
    change: &Change,
    dry_run: bool,
    filter: &JobFilter,
    shutdown: &Shutdown,
    mut each: impl FnMut(&[(JobId, Changed)], &ProgressBar) -> std::io::Result<()>,
) -> anyhow::Result<Report> {
    // The length is 1 until the number of jobs is known: a bar of length 0 would be shown as complete.
    let bar = progress(ProgressBar::new(1), "{bar:30} {percent:>3} %  {msg}  {elapsed}, {eta} left");
    let (mut last, mut written) = (Report::default(), Ok(()));
    let mut control = store.control(dry_run);
    let walked = control.change_all(change, filter, |report, changed| {
        last = report.clone();
        bar.set_length(report.length);
        bar.set_position(report.looked_at);
        bar.set_message(format!("{} jobs {}", report.matched(), if dry_run { "found" } else { participle(change) }));
        written = each(changed, &bar);
        if written.is_err() || shutdown.is_requested() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let walked = walked.await;
    bar.finish_and_clear();
    written?;
    walked.map_err(|error| {
        anyhow!(error).context(format!("stopped: {}; repeat the command to continue with the rest", summary(change, &last)))
    })
}

/// Asks for confirmation on the terminal.
async fn is_confirmed(question: String, shutdown: &mut Shutdown) -> anyhow::Result<bool> {
    write!(std::io::stderr(), "{question} [y/N] ")?;
    // The reading thread may block until the process ends.
    let answer = tokio::task::spawn_blocking(|| {
        let mut answer = String::new();
        std::io::stdin().read_line(&mut answer).map(|_| answer)
    });
    tokio::select! {
        answer = answer => Ok(matches!(answer??.trim().to_lowercase().as_str(), "y" | "yes")),
        () = shutdown.requested() => Err(anyhow!("stopped by a signal; nothing was changed").context(Exit::Aborted)),
    }
}

fn imperative(change: &Change) -> &'static str {
    match change {
        Change::Retry { .. } => "Retry",
        Change::Alter(_) => "Change",
        Change::Cancel => "Cancel",
        Change::Delete => "Delete",
    }
}

fn participle(change: &Change) -> &'static str {
    match change {
        Change::Retry { .. } => "retried",
        Change::Alter(_) => "changed",
        Change::Cancel => "cancelled",
        Change::Delete => "deleted",
    }
}

/// Number of jobs that matched but were not changed.
fn left_alone(report: &Report) -> u64 {
    ["already-due", "unchanged", "retried-before", "changed-meanwhile", "refused"].into_iter().map(|word| report.count(word)).sum()
}

/// Counts of the outcomes, as text.
fn summary(change: &Change, report: &Report) -> String {
    let said = [
        ("enqueued-again", "enqueued again"),
        ("due-now", "due now"),
        ("already-due", "due already"),
        ("changed", "changed"),
        ("unchanged", "unchanged, because they have these values"),
        ("cancelled", "cancelled"),
        ("asked", "running, cancellation requested"),
        ("deleted", "deleted"),
        ("retried-before", "retried before and skipped (see --again)"),
        ("changed-meanwhile", "changed in the meantime and skipped"),
        ("refused", "refused"),
    ];
    let parts = said.into_iter().map(|(word, text)| (report.count(word), text)).filter(|(count, _)| *count > 0);
    let parts: Vec<String> = parts.map(|(count, text)| format!("{count} {text}")).collect();
    if parts.is_empty() { format!("no matching job can be {}", participle(change)) } else { parts.join(", ") }
}

/// Writes what a change has done. People read a refusal on standard error.
pub(super) fn write_outcome(outcome: &Outcome, out: &mut impl Write, format: Format, is_refused: bool) -> std::io::Result<()> {
    let Outcome { id, process, message, dry_run, .. } = outcome;
    if is_refused && !format.json {
        out.flush()?;
        return writeln!(std::io::stderr(), "{id}: {message}");
    }
    let process = process.as_ref().map(|Process { hostname, pid }| format!(" ({}:{})", printable(hostname, 64), or_dash(*pid)));
    line(out, format, outcome, format_args!("{id}{}: {}{message}", process.unwrap_or_default(), dry(*dry_run)))
}
