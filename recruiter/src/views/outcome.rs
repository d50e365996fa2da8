//! What a change has done to a job or a worker.

use recruiter_common::{
    control::{Changed, Refusal},
    ids::JobId,
    text::{moment, printable},
};
use serde::Serialize;

/// What a change has done to one job or worker.
#[derive(Serialize)]
pub(crate) struct Outcome {
    pub(crate) id: String,
    #[serde(flatten)]
    pub(crate) process: Option<Process>,
    pub(crate) outcome: &'static str,
    pub(crate) message: String,
    pub(crate) dry_run: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) new_id: Option<String>,
}

/// The process of a worker.
#[derive(Serialize)]
pub(crate) struct Process {
    pub(crate) hostname: String,
    pub(crate) pid: Option<i64>,
}

impl Outcome {
    pub(crate) fn of(job: JobId, changed: &Changed, dry_run: bool) -> Self {
        let new_id = if let Changed::EnqueuedAgain { new, .. } = changed { new.map(|new| new.to_string()) } else { None };
        Self { id: job.to_string(), process: None, outcome: changed.word(), message: message(changed, dry_run), dry_run, new_id }
    }
}

/// The outcome of one job, as a sentence.
pub(crate) fn message(changed: &Changed, dry_run: bool) -> String {
    let by = |done: &str, would: &str| if dry_run { would.to_owned() } else { done.to_owned() };
    match changed {
        Changed::EnqueuedAgain { new: Some(new), why } => {
            format!("was archived as {}, enqueued again as {new}", printable(why.as_str(), 80))
        }
        Changed::EnqueuedAgain { new: None, why } => format!("was archived as {}, would be enqueued again", printable(why.as_str(), 80)),
        Changed::DueNow { instead_of } => format!("{} now instead of {}", by("due", "would be due"), moment(*instead_of)),
        Changed::AlreadyDue { since } => format!("has already been due since {}", moment(*since)),
        Changed::Altered => by("changed", "would be changed"),
        Changed::Unchanged => "has these values already".into(),
        Changed::Cancelled => by("was not running; archived as cancelled", "is not running; would be archived as cancelled"),
        Changed::CancelRequested => by("is running; cancellation requested", "is running; its cancellation would be requested"),
        Changed::Deleted => by("deleted", "would be deleted"),
        Changed::Meanwhile => "changed in the meantime; skipped".into(),
        Changed::Refused(refusal @ Refusal::RetriedBefore { .. }) => format!("{refusal}; --again enqueues it once more"),
        Changed::Refused(refusal) => printable(&refusal.to_string(), 400),
    }
}
