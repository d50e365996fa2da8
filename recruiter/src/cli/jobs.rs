//! `recruiter jobs`: lists jobs, shows one with its history, and retries, changes, cancels or deletes jobs. The changes are in
//! `change`.

use std::{io::Write, time::Duration};

use anyhow::anyhow;
use bson::Bson;
use clap::{Args, Subcommand};
use recruiter_common::{
    Page, Why,
    control::Change,
    ids::JobId,
    instant::Instant,
    job::{
        Execution, Job, JobProgress,
        notes::{CHECKPOINT, Log},
    },
    shutdown::Shutdown,
    spec::{duration_of_text, id_of_text},
    store::{ConnectArgs, LOOK_LIMIT, Store, lossy},
};
use serde_json::Value;

use super::{
    change::{self, ALTER_EXAMPLES, CANCEL_EXAMPLES, ChangeArgs, DELETE_EXAMPLES, Intent, NewValues, RETRY_EXAMPLES},
    exit::{or_stopped, usage},
    export::{self, EXPORT_EXAMPLES, ExportArgs},
    filter::check_reason,
    output::{Format, apart, moment, printable},
    redaction::Reveal,
    revise::NewContent,
    view::{Row, Stored, colour, document_line, fields, json_line, left, print, right},
    wait::until_ended,
};
use crate::views::{
    extended,
    filter::FilterArgs,
    job::{Read, to_json, why_to_document},
    story::{Line, ended, id_in, items, log_line, ran, settings, state},
    tone::Tone,
};

/// Width of the names of fields, in characters.
const NAMES: usize = 12;

const LIST_EXAMPLES: &str = "\
Examples:
  recruiter jobs list --class mail --since 2h
  recruiter jobs list --why tried-too-many-times --error-class SmtpDown
  recruiter jobs list --state archived --message 'connection refused' \\
      --limit 1000 --json
  recruiter jobs list --group mail --after 65a1b2c3d4e5f60718293a4b
      the next page, after the last job of the previous page";

#[derive(Subcommand, Clone, Debug)]
pub(super) enum JobsCommand {
    /// List jobs, newest first
    #[command(after_help = LIST_EXAMPLES)]
    List(ListArgs),
    /// Show a job and its history
    Show {
        #[command(flatten)]
        job: OneJob,
        #[command(flatten)]
        reveal: Reveal,
    },
    /// Say why a job does not run, and what to do about it
    Why(OneJob),
    /// Wait until a job has ended, and write its result
    Wait {
        /// Id of the job
        #[arg(value_parser = id_of_text)]
        id: JobId,
        /// Maximum time to wait, after which the command ends with code 124 [default: no limit]
        #[arg(long, env = "RECRUITER_JOBS_WAIT_TIMEOUT", value_name = "DURATION", value_parser = duration_of_text)]
        timeout: Option<Duration>,
        #[command(flatten)]
        format: Format,
        #[command(flatten)]
        reveal: Reveal,
    },
    /// Retry jobs: make a waiting job due now, or enqueue an archived job again under a new id
    #[command(after_help = RETRY_EXAMPLES)]
    Retry {
        /// Include jobs that were retried before
        #[arg(long)]
        again: bool,
        // Before the filters, whose heading applies to all arguments after them.
        #[command(flatten)]
        content: Box<NewContent>,
        #[command(flatten)]
        change: ChangeArgs,
    },
    /// Change waiting jobs: another priority, group or due date
    #[command(after_help = ALTER_EXAMPLES)]
    Change {
        // Before the filters, whose heading applies to all arguments after them.
        #[command(flatten)]
        values: NewValues,
        #[command(flatten)]
        change: ChangeArgs,
    },
    /// Export jobs as lines of JSON that `recruiter enqueue --from` reads
    #[command(after_help = EXPORT_EXAMPLES)]
    Export(ExportArgs),
    /// Cancel jobs: archive a waiting job without running it, or stop a running job
    #[command(after_help = CANCEL_EXAMPLES)]
    Cancel(ChangeArgs),
    /// Delete archived jobs permanently
    #[command(after_help = DELETE_EXAMPLES)]
    Delete(ChangeArgs),
}

#[derive(Args, Clone, Debug)]
pub(super) struct OneJob {
    /// Id of the job
    #[arg(value_parser = id_of_text)]
    id: JobId,
    #[command(flatten)]
    format: Format,
}

#[derive(Args, Clone, Debug)]
pub(super) struct ListArgs {
    /// Maximum number of jobs
    #[arg(long, env = "RECRUITER_JOBS_LIMIT", value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=1_000), help_heading = "Pages")]
    limit: u16,
    /// Continue after this job, the last one of the previous page
    #[arg(long = "after", value_name = "ID", value_parser = id_of_text, help_heading = "Pages")]
    page_after: Option<JobId>,
    #[command(flatten)]
    format: Format,
    #[command(flatten)]
    reveal: Reveal,
    // Last field, because its heading applies to all arguments after it.
    #[command(flatten)]
    filter: FilterArgs,
}

pub(super) async fn run(command: JobsCommand, connect: &ConnectArgs, mut shutdown: Shutdown, out: &mut impl Write) -> anyhow::Result<()> {
    let (args, change): (ChangeArgs, Intent) = match command {
        JobsCommand::List(args) => return or_stopped(shutdown, list(args, connect, out)).await,
        JobsCommand::Show { job: OneJob { id, format }, reveal } => {
            return or_stopped(shutdown, show(id, format, reveal, connect, out)).await;
        }
        JobsCommand::Why(OneJob { id, format }) => return or_stopped(shutdown, super::why::run(id, format, connect, out)).await,
        JobsCommand::Wait { id, timeout, format, reveal } => {
            let waited = async {
                let store = Store::connect_to_ask(connect, "recruiter jobs").await?;
                until_ended(&store, id, timeout, false, (format, reveal), out).await
            };
            return or_stopped(shutdown, waited).await;
        }
        JobsCommand::Export(args) => return export::run(args, connect, &shutdown, out).await,
        JobsCommand::Retry { change, again, content } => (change, Intent::Plain(Change::Retry { again, with: content.revision()?.into() })),
        JobsCommand::Change { values, change } => (change, Intent::NewValues(values)),
        JobsCommand::Cancel(args) => (args, Intent::Plain(Change::Cancel)),
        JobsCommand::Delete(args) => (args, Intent::Plain(Change::Delete)),
    };
    change::run(args, change, connect, &mut shutdown, out).await
}

async fn list(args: ListArgs, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let ListArgs { filter, limit, page_after, format, reveal } = args;
    filter.clone().at(Instant::UNIX_EPOCH).whenever().check().map_err(usage)?;
    let store = Store::connect_to_ask(connect, "recruiter jobs").await?;
    let (now, redaction) = (store.now(), reveal.of(&store).await?);
    let filter = filter.at(now);
    filter.check().map_err(usage)?;
    let mut page = Page::first(limit);
    (page.whole, page.after) = (format.json, page_after);
    let listed = store.jobs(&filter, page).await.map_err(|error| {
        if error.is_too_slow() {
            anyhow!(error).context(format!(
                "the search was stopped after {} s, because no index serves it; narrow it with --state and --since",
                LOOK_LIMIT.as_secs()
            ))
        } else {
            error.into()
        }
    })?;
    let is_empty = listed.jobs.is_empty();
    if is_empty {
        check_reason(&filter)?;
    }
    let last = listed.jobs.last().and_then(|job| job.get_object_id("_id").ok());
    if is_empty && !format.json {
        writeln!(std::io::stderr(), "no job matches")?;
    } else {
        print(out, format, "", listed.jobs.into_iter().map(|job| view(&redaction.job(job).try_into(), now)))?;
    }
    out.flush()?;
    if let Some(last) = last.filter(|_| listed.more) {
        writeln!(std::io::stderr(), "more jobs match; for the next page repeat the command with --after {last}")?;
    }
    Ok(())
}

/// A job, or a document that is none.
fn view(job: &Read, now: Instant) -> Stored {
    let line = Line::of(job, now);
    let cells = [
        left("ID", line.id),
        left("STATE", line.state).coloured(colour(Tone::of_stage(line.stage))),
        left("CLASS", line.class).cut_to(8),
        left("GROUP", line.group).cut_to(6),
        right("PRIORITY", line.priority).if_roomy(),
        right("STARTS", line.starts),
        left("WHEN", line.when),
    ];
    Stored { document: to_json(job, now), row: Row::from(cells).below(line.below) }
}

async fn show(id: JobId, format: Format, reveal: Reveal, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = Store::connect_to_ask(connect, "recruiter jobs").await?;
    let stored = store.job(id).await?.ok_or_else(|| anyhow!("no job has the id {id}, neither in `scheduled` nor in `archived`"))?;
    let held = store.why(id).await?.filter(Why::is_waiting);
    let document = reveal.of(&store).await?.job(stored.document);
    let (job, now) = (Job::try_from(document), store.now());
    if format.json {
        let mut shown = to_json(&job, now);
        shown["held"] = held.as_ref().map(why_to_document).map_or(Value::Null, extended);
        return Ok(json_line(out, &shown)?);
    }
    match job {
        Ok(job) => {
            describe(&job, now, out)?;
            Ok(fields(out, NAMES, held.map(|why| ("why", format!("{}: {}", why.reason, why.text))))?)
        }
        Err((document, error)) => {
            writeln!(out, "{id} is malformed: {}", printable(&error.to_string(), 400))?;
            Ok(document_line(out, lossy(&document))?)
        }
    }
}

/// Writes a job as text, with its history, oldest execution first.
fn describe(job: &Job, now: Instant, out: &mut impl Write) -> std::io::Result<()> {
    let json = |value: &Bson| printable(&value.clone().into_relaxed_extjson().to_string(), 400);
    let field = |name, text: fn(&Bson) -> String| job.field(name).as_ref().map(text).unwrap_or_default();
    let content = match &job.bundle {
        None => ("parameters", json(&job.parameters)),
        Some(bundle) => ("items", items(&bundle.outcomes)),
    };
    fields(out, NAMES, [("job", job.id.to_string()), ("state", state(job, now)), ("class", printable(&job.class, 256)), content])?;
    fields(out, NAMES, settings(&job.settings))?;
    let uncounted = (job.interruptions > 0)
        .then(|| format!("; {} of them not counted by the retry policy (interrupted, released or snoozed)", job.interruptions));
    let deaths = (job.deaths > 0).then(|| format!("; {} ended with the death of the worker", job.deaths));
    fields(
        out,
        NAMES,
        [
            ("expires", job.expires_at.map(moment).unwrap_or_default()),
            ("enqueued", format!("{} ({} ago)", moment(job.created_at), apart(job.created_at, now))),
            ("starts", format!("{}{}{}", job.attempts, uncounted.unwrap_or_default(), deaths.unwrap_or_default())),
            ("retry of", field("recovered_from", id_in)),
            ("retried as", field("retried_as", id_in)),
            ("progress", JobProgress::of_job(job).map(|progress| printable(&progress.to_string(), 400)).unwrap_or_default()),
            ("checkpoint", field(CHECKPOINT, json)),
            ("result", field("result", json)),
        ],
    )?;
    let log = Log::of_job(job);
    if log.lines().next().is_some() {
        writeln!(out, "log")?;
        log.lines().try_for_each(|line| writeln!(out, "  {}", log_line(line)))?;
    }
    let history: Vec<&Execution> = job.every_execution().collect();
    if history.is_empty() {
        return writeln!(out, "never started");
    }
    writeln!(out, "executions")?;
    for (at, execution) in history.into_iter().enumerate() {
        if at == 1 && job.executions_dropped > 0 {
            writeln!(out, "  … {} more, dropped from the history", job.executions_dropped)?;
        }
        describe_execution(execution, now, out)?;
    }
    Ok(())
}

fn describe_execution(execution: &Execution, now: Instant, out: &mut impl Write) -> std::io::Result<()> {
    writeln!(out, "  {}: {}", ran(execution, now), ended(execution))?;
    if let Some(class) = &execution.class {
        writeln!(out, "    {}: {}", printable(class, 256), printable(execution.message.as_deref().unwrap_or_default(), 4_096))?;
    }
    execution.trace.iter().flat_map(|trace| trace.lines()).try_for_each(|line| writeln!(out, "    | {}", printable(line, 400)))
}

#[cfg(test)]
mod tests {
    use bson::{Document, doc};

    use super::{
        super::view::{Screen, table},
        *,
    };

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
    fn every_setting_is_shown() {
        let shown = described(&job(doc! {
            "gate": "customer:17,printer", "keep": "failures", "expires_at": bson::DateTime::from_millis(0), "traceparent": "00-1",
        }));
        for line in [
            "group        g",
            "priority     3",
            "tags         t",
            "urn          u",
            "traceparent  00-1",
            "retry policy Mine {}",
            "keep         failures",
            "limits       customer:17, printer",
            "expires      1970-01-01T00:00:00.000Z",
        ] {
            assert!(shown.lines().any(|shown| shown == line), "{line:?} is not in\n{shown}");
        }
        let line = described(&job(doc! { "gate": recruiter_common::store::gate_of_line("a b"), "halt_on_failure": true }));
        assert!(line.contains("\nline         a b\nhalt on failure true\n"), "{line}");
    }

    #[test]
    fn a_bundle_is_shown_in_numbers() {
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
    }

    #[test]
    fn a_running_job_is_shown_with_its_notes() {
        let at = bson::DateTime::from_millis(7);
        let started = doc! { "worker": bson::oid::ObjectId::new(), "start": bson::oid::ObjectId::new(), "started_at": at };
        let running = job(doc! {
            "locked": true, "last_execution": started, "checkpoint": { "row": 17 }, "progress": { "done": 3, "of": 12, "percent": 25.0, "text": "page\u{7} 3" },
            "log": [{ "at": at, "attempt": 1, "line": "a\u{1b}[31m" }, { "at": at, "attempt": 2, "item": 4, "line": "b" }, 5],
        });
        let shown = described(&running);
        assert!(shown.contains("progress     3 of 12 (25 %), page\\u{7} 3\ncheckpoint   {\"row\":17}\nlog\n"), "{shown}");
        assert!(shown.contains(" attempt 1: a\\u{1b}[31m\n") && shown.contains(" attempt 2 item 4: b\n"), "{shown}");
        let row = listed(120, vec![running.document.try_into().unwrap()]);
        assert!(row.ends_with("\n    3 of 12 (25 %), page\\u{7} 3\n"), "{row}");
    }

    #[test]
    fn a_retry_waiting_is_shown_once() {
        let execution = doc! { "started_at": bson::DateTime::from_millis(1), "ended_at": bson::DateTime::from_millis(2), "class": "exit:1", "message": "\u{1b}[31mred" };
        let text = described(&job(doc! { "attempts": 1, "deaths": 1, "last_execution": execution.clone(), "executions": [execution] }));
        assert!(text.contains("starts       1; 1 ended with the death of the worker\n"), "{text}");
        assert_eq!(text.matches("failed").count(), 1, "{text}");
        assert!(text.contains("exit:1: \\u{1b}[31mred"), "{text}");
        let never = described(&job(doc! {}));
        assert!(never.ends_with("never started\n"), "{never}");
        // The date is the one in the job's id (its bytes are 0x07), not the end of the job and not 1970.
        assert!(never.contains("enqueued     1973-09-"), "{never}");
    }

    fn listed(width: usize, documents: Vec<Document>) -> String {
        let jobs = documents.iter().map(|job| view(&bson::RawDocumentBuf::try_from(job).unwrap().try_into(), Instant::UNIX_EPOCH).row);
        let mut out = Vec::new();
        table(&mut out, Screen { width, colours: false }, &jobs.collect::<Vec<_>>()).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_document_that_is_no_job_has_a_row_with_its_class_and_group() {
        let shown = listed(80, vec![doc! { "_id": "odd\u{7}", "locked": "yes", "group": "g\u{1b}", "workable": { "class": "c" } }]);
        let lines: Vec<&str> = shown.lines().collect();
        assert!(lines[1].starts_with("\"odd\\u{7}\"  malformed  c      g\\u{1b}"), "{shown}");
        assert!(lines[2].starts_with("    the document is not a job: "), "{shown}");
    }

    #[test]
    fn a_list_fits_the_screen_and_says_why_jobs_failed() {
        let at = bson::DateTime::from_millis(-7_200_000);
        let failed = doc! { "class": "SmtpDown", "message": "connection refused\nby example.org", "ended_at": at };
        let mut failed = job(doc! { "why": "not-scheduled-by-retry-policy", "last_execution": failed }).document.try_into().unwrap();
        let waiting: Document =
            job(doc! { "workable": { "class": "x".repeat(200) }, "group": "y".repeat(200) }).document.try_into().unwrap();
        let shown = listed(80, vec![Document::clone(&failed), waiting]);
        assert!(shown.lines().all(|line| line.chars().count() <= 80) && !shown.contains("PRIORITY"), "{shown}");
        let lines: Vec<&str> = shown.lines().collect();
        assert!(lines[1].contains("  failed     c ") && lines[1].ends_with("0  2h ago"), "{shown}");
        assert_eq!(lines[2], "    not-scheduled-by-retry-policy; SmtpDown: connection refused\\nby example.org");
        failed.insert("why", "done");
        let malformed =
            job(doc! { "why": "malformed", "last_execution": { "class": "malformed", "message": "no document", "ended_at": at } });
        let roomy = listed(120, vec![failed, malformed.document.try_into().unwrap()]);
        assert!(roomy.contains("PRIORITY") && roomy.ends_with("\n    malformed: no document\n"), "{roomy}");
    }
}
