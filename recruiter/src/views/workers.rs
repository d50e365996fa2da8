//! A worker, also in words, and what a request to it has done.

use bson::{Bson, Document};
use bytesize::ByteSize;
use recruiter_common::{
    instant::Instant,
    text::{briefly_apart, printable},
    workers::{Answer, Asked, Wanted, Worker, WorkerChange},
};
use serde_json::Value;

use super::{
    outcome::{Outcome, Process},
    tone::Tone,
    with_state,
};

/// The stored document, with its state.
pub(crate) fn to_json(worker: &Worker) -> Value {
    with_state(worker.document.clone(), state(worker).0)
}

/// The state of a worker, and how good it is.
pub(crate) fn state(worker: &Worker) -> (&'static str, Tone) {
    let document = &worker.document;
    let is_worker = document.get_object_id("_id").is_ok() && worker.work_on.is_some();
    match document.get_bool("available") {
        _ if !is_worker => ("malformed", Tone::Bad),
        _ if worker.is_retired => ("dead", Tone::Bad),
        _ if worker.silent_for.is_some() => ("silent", Tone::Warning),
        _ if worker.request.as_ref().is_some_and(|request| request.wanted == Wanted::Stop) => ("stopping", Tone::Warning),
        _ if worker.request.is_some() => ("quiet", Tone::Warning),
        Ok(true) => ("available", Tone::Good),
        // A process that executes its own jobs is never available for others.
        _ if document.get_array("work_on").is_ok_and(Vec::is_empty) && !is_working(document) => ("idle", Tone::Plain),
        _ => ("busy", Tone::Active),
    }
}

fn is_working(document: &Document) -> bool {
    document.get_array("working_on").is_ok_and(|jobs| !jobs.is_empty())
}

/// The groups whose jobs a worker takes.
pub(crate) fn works_on(worker: &Worker) -> String {
    match worker.document.get("work_on") {
        Some(Bson::Array(groups)) if groups.is_empty() => "the jobs that it enqueues itself".into(),
        Some(Bson::Array(groups)) => groups.iter().map(|group| group.as_str().unwrap_or("?")).collect::<Vec<_>>().join(", "),
        Some(Bson::String(group)) if group == "*" => "all groups".into(),
        Some(Bson::String(group)) => group.clone(),
        _ => "nothing".into(),
    }
}

/// How many jobs a worker has.
pub(crate) fn jobs_of(worker: &Worker) -> usize {
    match worker.document.get("working_on") {
        Some(Bson::Array(jobs)) => jobs.len(),
        other => usize::from(other.is_some_and(|job| *job != Bson::Null)),
    }
}

/// The resident memory of its process.
pub(crate) fn memory(worker: &Worker) -> Option<String> {
    let bytes = worker.document.get_i64("memory_bytes").ok().and_then(|bytes| u64::try_from(bytes).ok()).filter(|bytes| *bytes > 0);
    bytes.map(|bytes| ByteSize(bytes).display().iec().to_string())
}

/// What is said if so many workers are dead for long, and no cleaner has rescued their jobs.
pub(crate) fn no_cleaner(overdue: usize) -> Option<String> {
    let text = "workers without a heartbeat for more than twice their lease; start recruiter-cleaner to rescue their jobs";
    (overdue > 0).then(|| format!("No cleaner seems to run: the roster has {overdue} {text}."))
}

/// What an operator wants of a worker.
pub(crate) fn wanted(worker: &Worker, now: Instant) -> Option<String> {
    let request = worker.request.as_ref()?;
    let since = request.at.map_or_else(String::new, |at| format!(", {} ago", briefly_apart(at, now)));
    Some(format!("{} wanted by {}{since}", request.wanted.as_str(), printable(&request.by, 80)))
}

/// What a request to one worker has done.
pub(crate) fn outcome(change: WorkerChange, answer: &Answer, dry_run: bool) -> Outcome {
    let process = Process { hostname: answer.hostname.clone(), pid: answer.pid };
    let (id, outcome, message) = (answer.worker.to_string(), answer.asked.word(), message(change, answer, dry_run));
    Outcome { id, process: Some(process), outcome, message, dry_run, new_id: None }
}

pub(crate) fn participle(change: WorkerChange) -> &'static str {
    match change {
        WorkerChange::Quiet => "made quiet",
        WorkerChange::Resume => "resumed",
        WorkerChange::Stop => "stopped",
    }
}

/// The outcome for one worker, as a sentence.
pub(crate) fn message(change: WorkerChange, answer: &Answer, dry_run: bool) -> String {
    let text = match (answer.asked, change) {
        (Asked::Done, _) if dry_run => return format!("would be {}", participle(change)),
        (Asked::Done, WorkerChange::Quiet) => "takes no more jobs; running jobs continue",
        (Asked::Done, WorkerChange::Resume) => "takes jobs again",
        (Asked::Done, WorkerChange::Stop) => "drains and ends",
        (Asked::Already, WorkerChange::Quiet) => "is quiet already",
        (Asked::Already, WorkerChange::Resume) => "is not quiet",
        (Asked::Already, WorkerChange::Stop) => "is stopped already",
        (Asked::Stops, _) => "was stopped before, which cannot be undone; start it again",
        (Asked::Gone, _) => "no living worker has this id; `recruiter roster` lists them",
        (Asked::Meanwhile, _) => "changed in the meantime; try again",
    };
    text.into()
}
