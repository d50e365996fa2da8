//! The jobs that a job becomes: validated before its end is written.

use bson::Document;
use recruiter_common::{failure::Failure, graphs::InvalidGraph, instant::Instant, job::Job, store::Store};

use crate::outcome::{Continuation, MOST_CONTINUATIONS, NotDone};

/// The error class of a job that cannot become the jobs that its workable has named.
const CONTINUATION: &str = "continuation";

/// The documents of the jobs that the job becomes. If one of them is invalid, the job gives up: another attempt would name the same jobs.
pub(super) async fn documents(
    continuation: Continuation,
    job: &Job,
    store: Option<&Store>,
    now: Instant,
) -> Result<Vec<Document>, NotDone> {
    let refused = |problem: String| NotDone::GiveUp(Failure::new(CONTINUATION, problem));
    let count = continuation.jobs.len();
    if !(1..=MOST_CONTINUATIONS).contains(&count) {
        return Err(refused(format!("a job cannot become {count} jobs: name 1 to {MOST_CONTINUATIONS}, or enqueue a graph")));
    }
    let documents = recruiter_common::store::continuation(continuation.jobs, job, now).map_err(|problem| refused(problem.to_string()))?;
    let need_indexes = documents.iter().any(|job| job.contains_key("waiting") || job.contains_key("graph"));
    if let Some(store) = store.filter(|_| need_indexes) {
        // Once the indexes exist, this reads nothing.
        store
            .prepare_graphs()
            .await
            .map_err(|error| NotDone::failed(CONTINUATION, InvalidGraph::NoIndexes(error.to_string()).to_string()))?;
    }
    Ok(documents)
}
