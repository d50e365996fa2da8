//! The jobs that a job becomes.

use bson::Document;

use crate::{
    base::Instant,
    enqueue::{
        EnqueueError, NewJob,
        edges::{connect, outside},
        invalid_graph::{InvalidGraph, MOST_CONTINUATION_BYTES},
    },
    job::Job,
};

/// The documents of the jobs that `job` becomes: in its graph, and followed by those that wait for it.
///
/// # Errors
/// The first invalid one.
pub fn continuation(jobs: Vec<NewJob>, job: &Job, now: Instant) -> Result<Vec<Document>, EnqueueError> {
    let mut documents = Vec::with_capacity(jobs.len());
    for new in jobs {
        if new.is_unique() {
            return Err(InvalidGraph::Unique.into());
        }
        if new.has_own_id() {
            return Err(InvalidGraph::ContinuationWithId.into());
        }
        let (_, mut document) = new.into_document(now)?;
        if let Some(graph) = job.graph
            && !document.contains_key("graph")
        {
            document.insert("graph", graph);
        }
        if job.is_followed {
            document.insert("followed", true);
        }
        documents.push(document);
    }
    connect(&mut documents)?;
    // A job outside could wait for `job`, and so for these jobs: they would wait for each other.
    if let Some(job) = outside(&documents)?.first() {
        return Err(InvalidGraph::OutsideOfContinuation { job: *job }.into());
    }
    match documents.iter().map(|job| job.to_vec().map_or(MOST_CONTINUATION_BYTES, |bytes| bytes.len())).sum() {
        bytes if bytes > MOST_CONTINUATION_BYTES => Err(InvalidGraph::ContinuationTooLarge { bytes }.into()),
        _ => Ok(documents),
    }
}
