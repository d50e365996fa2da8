//! `recruiter jobs`: list them, look at one with its whole history, do one again, cancel one.

use std::io::Write;

use anyhow::{anyhow, bail};
use bson::{Bson, Document, doc};
use clap::{Args, Subcommand, builder::BoolishValueParser};
use recruiter_common::{
    bundle::{failure_of, is_done},
    enqueue::NewJob,
    exit::Exit,
    failure::{CANCELLED, Failure},
    ids::JobId,
    instant::Instant,
    job::{Execution, Job, JobState, Why},
    store::{Archival, CommitSession, ConnectArgs, Hint, JobFilter, JobPlace, Recorded, Store},
};

use crate::{
    enqueue::id_of_text,
    output::{Column, Format, apart, json_line, moment, printable, table},
};

/// How often a job is looked at again when it has changed between look and write.
const LOOKS: u32 = 3;

/// What to do with jobs.
#[derive(Args, Clone, Debug)]
#[command(arg_required_else_help = true)]
pub struct JobsArgs {
    #[command(subcommand)]
    command: JobsCommand,
}

#[derive(Subcommand, Clone, Debug)]
enum JobsCommand {
    /// List jobs, newest first
    List(ListArgs),
    /// Show a job and its history
    Show {
        /// The job
        id: String,
        #[command(flatten)]
        format: Format,
    },
    /// Do jobs again: a waiting one is due now, a finished one is enqueued anew under another id
    Retry(ChangeArgs),
    /// Cancel jobs: a waiting one is archived unrun, a running one is asked to end
    Cancel(ChangeArgs),
}

#[derive(Args, Clone, Debug)]
struct ListArgs {
    /// Where they are [default: anywhere; archived when --why is given]
    #[arg(long, env = "RECRUITER_JOBS_PLACE", value_name = "PLACE", value_enum)]
    place: Option<JobPlace>,
    /// Jobs of this group
    #[arg(long, env = "RECRUITER_JOBS_GROUP", value_name = "GROUP")]
    group: Option<String>,
    /// Jobs of this class
    #[arg(long, env = "RECRUITER_JOBS_CLASS", value_name = "CLASS")]
    class: Option<String>,
    /// Jobs with this tag
    #[arg(long, env = "RECRUITER_JOBS_TAG", value_name = "TAG")]
    tag: Option<String>,
    /// Jobs of this name
    #[arg(long, env = "RECRUITER_JOBS_URN", value_name = "URN")]
    urn: Option<String>,
    /// Jobs that were archived for this reason, like done or tried-too-many-times
    #[arg(long, env = "RECRUITER_JOBS_WHY", value_name = "WHY")]
    why: Option<String>,
    /// How many at most
    #[arg(long, env = "RECRUITER_JOBS_LIMIT", value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=1_000))]
    limit: u16,
    #[command(flatten)]
    format: Format,
}

#[derive(Args, Clone, Debug)]
struct ChangeArgs {
    /// The jobs
    #[arg(required = true, value_name = "ID")]
    ids: Vec<String>,
    /// Only say what would be done
    #[arg(long, env = "RECRUITER_DRY_RUN", value_parser = BoolishValueParser::new())]
    dry_run: bool,
    #[command(flatten)]
    format: Format,
}

/// Does what the arguments say.
///
/// # Errors
/// When MongoDB cannot be used, or when a job is not known or not in a state for what was asked.
pub async fn run(args: JobsArgs, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = match &args.command {
        JobsCommand::List(_) | JobsCommand::Show { .. } => Store::connect_to_ask(connect, "recruiter jobs").await?,
        JobsCommand::Retry(change) | JobsCommand::Cancel(change) if change.dry_run => {
            Store::connect_to_ask(connect, "recruiter jobs").await?
        }
        JobsCommand::Retry(_) | JobsCommand::Cancel(_) => Store::connect(connect, "recruiter jobs").await?,
    };
    match args.command {
        JobsCommand::List(args) => list(args, &store, out).await,
        JobsCommand::Show { id, format } => show(&id, format, &store, out).await,
        JobsCommand::Retry(args) => change(args, Change::Retry, &store, out).await,
        JobsCommand::Cancel(args) => change(args, Change::Cancel, &store, out).await,
    }
}

async fn list(args: ListArgs, store: &Store, out: &mut impl Write) -> anyhow::Result<()> {
    let ListArgs { place, group, class, tag, urn, why, limit, format } = args;
    let jobs = store.jobs(&JobFilter { place, group, class, tag, urn, why, whole: format.json, limit }).await?;
    if format.json {
        return Ok(jobs.into_iter().try_for_each(|job| json_line(out, job))?);
    }
    let now = store.now();
    let rows: Vec<_> = jobs.into_iter().map(|job| row(job, now)).collect();
    let columns = [
        Column::Left("ID"),
        Column::Left("STATE"),
        Column::Left("CLASS"),
        Column::Left("GROUP"),
        Column::Right("PRIORITY"),
        Column::Right("STARTS"),
        Column::Left("WHEN"),
    ];
    Ok(table(out, columns, &rows)?)
}

/// A document that is no job has a row, too: somebody must find it.
fn row(document: Document, now: Instant) -> [String; 7] {
    let id = document.get("_id").map(id_in).unwrap_or_default();
    match Job::try_from(document) {
        Ok(job) => {
            let (state, when) = state(&job, now);
            let (class, group) = (printable(&job.class, 32), printable(&job.group, 24));
            [id, printable(&state, 30), class, group, job.priority.to_string(), job.attempts.to_string(), when]
        }
        Err(error) => [id, "malformed".into(), "-".into(), "-".into(), "-".into(), "-".into(), printable(&error.to_string(), 80)],
    }
}

fn id_in(id: &Bson) -> String {
    id.as_object_id().map_or_else(|| printable(&id.to_string(), 24), |id| id.to_hex())
}

/// Where a job stands and since or until when, in few words.
fn state(job: &Job, now: Instant) -> (String, String) {
    let execution = job.last_execution.as_ref();
    match &job.state {
        JobState::Scheduled { at } if *at <= now => ("queued".into(), format!("due for {}", apart(*at, now))),
        JobState::Scheduled { at } => ("postponed".into(), format!("due in {}", apart(*at, now))),
        JobState::Started { .. } => {
            let since = execution.and_then(|execution| execution.started_at);
            let state = if job.cancel_requested { "running, to be cancelled" } else { "running" };
            (state.into(), since.map_or_else(String::new, |since| format!("for {}", apart(since, now))))
        }
        JobState::Archived { why } => {
            let ended = execution.and_then(|execution| execution.ended_at);
            (why.to_string(), ended.map_or_else(String::new, |ended| format!("{} ago", apart(ended, now))))
        }
    }
}

async fn show(id: &str, format: Format, store: &Store, out: &mut impl Write) -> anyhow::Result<()> {
    let id = id_of_text(id).map_err(|problem| anyhow!(problem).context(Exit::Usage))?;
    let document = existing(id, store).await?;
    if format.json {
        return Ok(json_line(out, document)?);
    }
    let job = match Job::try_from(document.clone()) {
        Ok(job) => job,
        Err(error) => {
            writeln!(out, "{id} is malformed: {}", printable(&error.to_string(), 400))?;
            return Ok(json_line(out, document)?);
        }
    };
    Ok(describe(&job, store.now(), out)?)
}

/// A job for people, with its history, oldest execution first.
fn describe(job: &Job, now: Instant, out: &mut impl Write) -> std::io::Result<()> {
    let json = |value: &Bson| printable(&value.clone().into_relaxed_extjson().to_string(), 400);
    let mut line = |name: &str, value: String| if value.is_empty() { Ok(()) } else { writeln!(out, "{name:<13}{value}") };
    let (state, when) = state(job, now);
    let due = match job.state {
        JobState::Scheduled { at } => format!(" ({})", moment(at)),
        JobState::Started { .. } | JobState::Archived { .. } => String::new(),
    };
    line("job", job.id.to_string())?;
    line("state", format!("{}, {when}{due}", printable(&state, 80)))?;
    line("class", printable(&job.class, 256))?;
    match &job.bundle {
        None => line("parameters", json(&job.parameters))?,
        Some(bundle) => line("items", items(&bundle.outcomes))?,
    }
    line("group", printable(&job.group, 256))?;
    line("priority", job.priority.to_string())?;
    line("urn", job.urn.as_deref().map(|urn| printable(urn, 256)).unwrap_or_default())?;
    line("tags", job.tags.iter().map(|tag| printable(tag, 256)).collect::<Vec<_>>().join(", "))?;
    line("retry policy", format!("{} {}", printable(&job.retry_policy.class, 256), json(&job.retry_policy.parameters)))?;
    line("enqueued", format!("{} ({} ago)", moment(job.created_at), apart(job.created_at, now)))?;
    line(
        "starts",
        format!("{}, {} of them interrupted, {} ended by the death of their worker", job.attempts, job.interruptions, job.deaths),
    )?;
    for field in ["recovered_from", "result"] {
        line(&field.replace('_', " "), job.field(field).as_ref().map(json).unwrap_or_default())?;
    }
    let history: Vec<&Execution> = history(job).collect();
    if history.is_empty() {
        return writeln!(out, "never started");
    }
    writeln!(out, "executions")?;
    for (at, execution) in history.into_iter().enumerate() {
        if at == 1 && job.executions_dropped > 0 {
            writeln!(out, "  … {} more, not kept", job.executions_dropped)?;
        }
        describe_execution(execution, now, out)?;
    }
    Ok(())
}

/// What became of the items of a bundle, in numbers.
fn items(outcomes: &[Bson]) -> String {
    let done = outcomes.iter().filter(|outcome| is_done(outcome)).count();
    let failed: Vec<(usize, Failure)> =
        outcomes.iter().enumerate().filter_map(|(index, outcome)| Some((index, failure_of(outcome)?.0))).collect();
    let first = failed.first().map(|(index, failure)| printable(&format!(", the first of them item {index}: {}", failure.message), 400));
    format!("{done} of {} done, {} failed{}", outcomes.len(), failed.len(), first.unwrap_or_default())
}

/// The executions that ended and the present one. While a job waits for a retry its last one is in both places.
fn history(job: &Job) -> impl Iterator<Item = &Execution> {
    let last = job.last_execution.as_ref().filter(|last| job.executions.last() != Some(last));
    job.executions.iter().chain(last)
}

fn describe_execution(execution: &Execution, now: Instant, out: &mut impl Write) -> std::io::Result<()> {
    let place = match (&execution.hostname, execution.pid) {
        (Some(hostname), Some(pid)) => format!(" on {}:{pid}", printable(hostname, 80)),
        _ => String::new(),
    };
    let ran = match (execution.started_at, execution.ended_at) {
        (Some(started), Some(ended)) => format!("{}{place}, {} ms", moment(started), (ended - started).num_milliseconds().max(0)),
        (Some(started), None) => format!("{}{place}, running for {}", moment(started), apart(started, now)),
        (None, Some(ended)) => format!("{} without being started", moment(ended)),
        (None, None) => "at an unknown time".into(),
    };
    let outcome = match (&execution.class, execution.crashed) {
        (_, Some(true)) => "its worker died",
        (Some(_), _) => "failed",
        (None, _) if execution.ended_at.is_some() => "succeeded",
        (None, _) => "not ended",
    };
    writeln!(out, "  {ran}: {outcome}")?;
    if let Some(class) = &execution.class {
        writeln!(out, "    {}: {}", printable(class, 256), printable(execution.message.as_deref().unwrap_or_default(), 4_096))?;
    }
    execution.trace.iter().flat_map(|trace| trace.lines()).try_for_each(|line| writeln!(out, "    | {}", printable(line, 400)))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Retry,
    Cancel,
}

/// What became (or would become) of one job: a word for programs and a sentence for people.
struct Changed {
    outcome: &'static str,
    message: String,
    new: Option<JobId>,
}

fn changed(outcome: &'static str, message: impl Into<String>) -> Changed {
    Changed { outcome, message: message.into(), new: None }
}

/// Each job on its own: what is wrong with one stops none of the others.
async fn change(args: ChangeArgs, change: Change, store: &Store, out: &mut impl Write) -> anyhow::Result<()> {
    let mut refused = 0;
    for text in &args.ids {
        let done = match id_of_text(text) {
            Ok(id) if change == Change::Retry => retry(id, args.dry_run, store).await,
            Ok(id) => cancel(id, args.dry_run, store).await,
            Err(problem) => Err(anyhow!(problem)),
        };
        let id = printable(text, 80);
        let failed = done.is_err();
        refused += usize::from(failed);
        let Changed { outcome, message, new } = done.unwrap_or_else(|error| changed("refused", format!("{error:#}")));
        if args.format.json {
            let mut line = doc! { "id": id, "outcome": outcome, "message": message, "dry_run": args.dry_run };
            line.extend(new.map(|new| ("new_id".to_owned(), Bson::String(new.to_string()))));
            json_line(out, line)?;
        } else if failed {
            out.flush()?;
            writeln!(std::io::stderr(), "{id}: {message}")?;
        } else {
            writeln!(out, "{id}: {}{message}", if args.dry_run { "(dry run) " } else { "" })?;
        }
    }
    let verb = if change == Change::Retry { "retried" } else { "cancelled" };
    if refused > 0 {
        bail!("{refused} of {} jobs could not be {verb}", args.ids.len());
    }
    Ok(())
}

async fn existing(id: JobId, store: &Store) -> anyhow::Result<Document> {
    store.job(id).await?.ok_or_else(|| anyhow!("there is no job {id}, neither scheduled nor archived"))
}

async fn retry(id: JobId, dry_run: bool, store: &Store) -> anyhow::Result<Changed> {
    for _ in 0..LOOKS {
        let job = Job::try_from(existing(id, store).await?)?;
        match &job.state {
            JobState::Scheduled { at } => {
                let now = store.now();
                if *at > now && !dry_run && !store.reschedule_if_unlocked(id, now).await? {
                    continue;
                }
                if !dry_run {
                    store.announce_jobs([&job.group]).await;
                }
                let message =
                    if *at > now { format!("due now instead of {}", moment(*at)) } else { format!("is due since {} already", moment(*at)) };
                return Ok(changed("due-now", message));
            }
            JobState::Started { worker, .. } => {
                bail!("it is running in worker {worker}; its retry policy decides when it ends (see `recruiter jobs cancel`)")
            }
            JobState::Archived { why } => {
                let message = format!("was archived as {}", printable(why.as_str(), 80));
                if dry_run {
                    return Ok(changed("enqueued-again", format!("{message}, would be enqueued again")));
                }
                let new = JobId::new();
                again(job, new)?.enqueue(store).await?;
                return Ok(Changed { outcome: "enqueued-again", message: format!("{message}, enqueued again as {new}"), new: Some(new) });
            }
        }
    }
    bail!("it changed each time it was looked at; try again")
}

/// The same job under a new id; of a bundle what is not done, unless all is.
fn again(job: Job, id: JobId) -> anyhow::Result<NewJob> {
    let document = |parameters: Bson| {
        let Bson::Document(parameters) = parameters else { bail!("its parameters are no document; enqueue it by hand") };
        Ok(parameters)
    };
    let new = match &job.bundle {
        None => NewJob::of_class(job.class, document(job.parameters)?),
        Some(bundle) => {
            let all_done = bundle.outcomes.iter().all(is_done);
            let items = job.items();
            let wanted = items.iter().zip(&bundle.outcomes).filter(|(_, outcome)| all_done || !is_done(outcome));
            let items: Vec<Document> = wanted.map(|(item, _)| document(item.clone())).collect::<Result<_, _>>()?;
            NewJob::bundle_of_class(job.class, items)
        }
    };
    let new = new.with_id(id).in_group(job.group).priority(job.priority);
    let new = job.tags.into_iter().fold(new, NewJob::tag).retry_stored(job.retry_policy).recovered_from(job.id);
    Ok(match job.urn {
        Some(urn) => new.urn(urn),
        None => new,
    })
}

async fn cancel(id: JobId, dry_run: bool, store: &Store) -> anyhow::Result<Changed> {
    for _ in 0..LOOKS {
        let document = existing(id, store).await?;
        // Asked of the fields: a document that is no job can be got rid of, too.
        match (document.get_str("why"), document.get_bool("locked")) {
            (Ok(why), _) => bail!("it is archived already, as {}", printable(why, 80)),
            (Err(_), Ok(true)) => {
                if !dry_run {
                    if !store.request_cancel_if_started(id).await? {
                        continue;
                    }
                    store.announce_hint(Hint::Cancel { job: id }).await;
                }
                return Ok(changed(
                    "asked",
                    if dry_run {
                        "is running; its worker would be asked to cancel it"
                    } else {
                        "is running; its worker is asked to cancel it"
                    },
                ));
            }
            (Err(_), Ok(false)) => {
                if dry_run {
                    return Ok(changed("cancelled", "is not running; would be archived as cancelled"));
                }
                let failure = Failure::new(CANCELLED, "cancelled by hand before it was started");
                let archival = Archival::malformed(id, &bson::RawDocumentBuf::try_from(&document)?, &Why::CANCELLED, &failure, store.now());
                let recorded = store.archive(&mut CommitSession::default(), &[archival]).await?;
                if recorded == [Recorded::Yes] {
                    return Ok(changed("cancelled", "was not running; archived as cancelled"));
                }
            }
            (Err(_), Err(_)) => bail!("its document says neither that it is locked nor that it is not; mend it by hand"),
        }
    }
    bail!("it changed each time it was looked at; try again")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(more: Document) -> Job {
        let at = bson::DateTime::from_millis(60_000);
        let mut document = doc! {
            "_id": bson::oid::ObjectId::from_bytes([7; 12]), "locked": false, "group": "g", "priority": 3, "scheduled_at": at,
            "workable": { "class": "c", "parameters": { "a": 1 } }, "retry_policy": { "class": "Mine", "parameters": {} },
            "tags": ["t"], "urn": "u",
        };
        document.extend(more);
        if document.contains_key("why") {
            document.remove("scheduled_at");
        }
        Job::try_from(document).unwrap()
    }

    fn described(job: &Job) -> String {
        let mut out = Vec::new();
        describe(job, Instant::UNIX_EPOCH, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn states_are_said_in_few_words() {
        let check = |more: Document, now: i64, expected: (&str, &str)| {
            let (state, when) = state(&job(more), bson::DateTime::from_millis(now).to_chrono());
            assert_eq!((state.as_str(), when.as_str()), expected);
        };
        let at = bson::DateTime::from_millis(10_000);
        let started = doc! { "worker": bson::oid::ObjectId::new(), "start": bson::oid::ObjectId::new(), "started_at": at };
        check(doc! {}, 0, ("postponed", "due in 1m"));
        check(doc! {}, 65_000, ("queued", "due for 5s"));
        check(doc! { "locked": true, "last_execution": started.clone() }, 20_000, ("running", "for 10s"));
        check(
            doc! { "locked": true, "last_execution": started, "cancel_requested_at": at },
            20_000,
            ("running, to be cancelled", "for 10s"),
        );
        check(doc! { "why": "done", "last_execution": { "ended_at": at } }, 20_000, ("done", "10s ago"));
    }

    #[test]
    fn a_bundle_is_shown_in_numbers_and_only_the_rest_of_it_is_done_again() {
        let bundle = |outcomes: Vec<Bson>| {
            let items: Vec<Document> = (0..3).map(|n| doc! { "n": n }).collect();
            job(doc! { "why": "done", "workable": { "class": "c", "items": items }, "item_outcomes": outcomes })
        };
        let failed = Bson::from(doc! { "class": "x", "message": "too hot", "why": "gave-up" });
        let partly = bundle(vec!["done".into(), failed]);
        let shown = described(&partly);
        assert!(
            shown.contains("items        1 of 3 done, 1 failed, the first of them item 1: too hot\n") && !shown.contains("parameters"),
            "{shown}"
        );
        let done_again = |job: Job| format!("{:?}", again(job, JobId::new()).unwrap());
        let rest = done_again(partly);
        assert!(!rest.contains("\"n\": Int32(0)") && rest.contains("\"n\": Int32(1)") && rest.contains("\"n\": Int32(2)"), "{rest}");
        assert!(done_again(bundle(vec!["done".into(); 3])).contains("\"n\": Int32(0)"), "when all is done, all of it");
    }

    #[test]
    fn a_retry_waiting_is_shown_once() {
        let execution = doc! { "started_at": bson::DateTime::from_millis(1), "ended_at": bson::DateTime::from_millis(2), "class": "exit:1", "message": "\u{1b}[31mred" };
        let text = described(&job(doc! { "attempts": 1, "last_execution": execution.clone(), "executions": [execution] }));
        assert_eq!(text.matches("failed").count(), 1, "{text}");
        assert!(text.contains("exit:1: \\u{1b}[31mred"), "{text}");
        assert!(described(&job(doc! {})).ends_with("never started\n"));
    }

    #[test]
    fn what_is_no_job_has_a_row() {
        let row = row(doc! { "_id": "odd\u{7}", "locked": "yes" }, Instant::UNIX_EPOCH);
        assert_eq!((row[0].as_str(), row[1].as_str()), ("\"odd\\u{7}\"", "malformed"));
    }
}
