//! The document of a job that waits for others.

use bson::Document;

use crate::{
    base::{DUE_MS, Instant, JobId, never_due},
    job::{Edge, InvalidEdge, edges_of},
};

/// Makes the document of a new job one of a job that waits. It is due in the year 9999, so no search finds it.
pub(crate) fn make_wait(document: &mut Document, edges: &[Edge], due: Instant, now: Instant) {
    document.insert("waits_for", edges.iter().copied().map(bson::Bson::from).collect::<Vec<_>>());
    document.insert("waiting", true);
    if due > now {
        document.insert("due_after", due);
    }
    document.insert("scheduled_at", never_due());
}

/// A job that waits for others, as the recruiter reads it.
#[derive(Clone, Debug)]
pub struct WaitingJob {
    /// The job.
    pub id: JobId,
    /// Its edges.
    pub edges: Result<Vec<Edge>, InvalidEdge>,
    /// Its due date, if it is not due as soon as it need not wait any more.
    pub due_after: Option<Instant>,
    /// What an assignment needs. Its date is that of a waiting job.
    pub job: crate::job::lane::ScheduledJob,
}

impl WaitingJob {
    /// `None` if the document is not a job.
    pub(crate) fn of_document(document: &Document) -> Option<Self> {
        Some(Self {
            id: document.get_object_id("_id").ok()?.into(),
            edges: edges_of(document.get("waits_for")),
            due_after: document
                .get_datetime("due_after")
                .ok()
                .filter(|at| DUE_MS.contains(&at.timestamp_millis()))
                .map(|at| at.to_chrono()),
            job: crate::job::lane::ScheduledJob::of_document(document)?,
        })
    }
}
