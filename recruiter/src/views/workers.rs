//! A worker, and what a request to it has done.

use bson::Document;
use recruiter_common::workers::{Answer, Asked, Wanted, Worker, WorkerChange};
use serde_json::Value;

use super::{
    outcome::{Outcome, Process},
    with_state,
};

/// The stored document, with its state.
pub(crate) fn to_json(worker: &Worker) -> Value {
    with_state(worker.document.clone(), state(worker))
}

/// The state of a worker in one word.
pub(crate) fn state(worker: &Worker) -> &'static str {
    let document = &worker.document;
    let is_worker = document.get_object_id("_id").is_ok() && worker.work_on.is_some();
    match document.get_bool("available") {
        _ if !is_worker => "malformed",
        _ if worker.is_retired => "dead",
        _ if worker.silent_for.is_some() => "silent",
        _ if worker.request.as_ref().is_some_and(|request| request.wanted == Wanted::Stop) => "stopping",
        _ if worker.request.is_some() => "quiet",
        Ok(true) => "available",
        // A process that executes its own jobs is never available for others.
        _ if document.get_array("work_on").is_ok_and(Vec::is_empty) && !is_working(document) => "idle",
        _ => "busy",
    }
}

fn is_working(document: &Document) -> bool {
    document.get_array("working_on").is_ok_and(|jobs| !jobs.is_empty())
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
