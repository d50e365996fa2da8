//! Reads of graphs: the jobs of a graph with their states, and the results of the jobs that a job waited for.

use std::{
    collections::HashMap,
    time::{Duration, Instant as Monotonic},
};

use bson::{Bson, Document};
use serde::de::DeserializeOwned;

use super::{InputError, ends::StoredResult};
use crate::{
    base::{GraphId, Instant, JobId, pause},
    job::{Edge, FinishReason, NOT_NEEDED, Stage, edges_of},
    mongo::{Client, Store, StoreError},
    wait::{ResultError, WaitError},
};

/// Maximum length of a chain of jobs of which each has become the next.
const LONGEST_CHAIN: usize = 100_000;

/// When a graph is read again whose jobs are being enqueued again, or of which a job has ended during the read.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// One job of a graph.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GraphJob {
    /// Its id.
    pub id: JobId,
    /// Its class.
    pub class: String,
    /// Its group.
    pub group: String,
    /// Its state.
    pub state: Stage,
    /// Its finish reason, if it has ended.
    pub why: Option<String>,
    /// The jobs that it waits for, or has waited for.
    pub waits_for: Vec<Edge>,
    /// The jobs that it has become.
    pub continued_as: Vec<JobId>,
    /// The job that it repeats.
    pub recovered_from: Option<JobId>,
    /// The job that repeats it.
    pub retried_as: Option<JobId>,
    /// Whether it was enqueued again. Its document may name the new job in a way that is no id, for example by hand.
    pub is_retried: bool,
    /// Whether a retry of the graph that has begun has not repeated it yet. If the retry was interrupted, retry the graph again, or cancel it.
    pub is_retrying: bool,
    /// The error class and message of its last execution.
    pub failure: Option<(String, String)>,
}

impl GraphJob {
    /// Whether the graph has not ended because of this job.
    pub fn is_open(&self) -> bool {
        !self.state.is_finished() || self.is_retrying
    }

    /// Whether it has failed or was cancelled, although it was needed, and was not enqueued again. A retry of the graph does that.
    pub fn is_to_repeat(&self) -> bool {
        let has_failed = matches!(self.state, Stage::Failed | Stage::Cancelled) && !self.is_retried;
        has_failed && self.failure.as_ref().is_none_or(|(class, _)| class != NOT_NEEDED)
    }

    /// From a document of either collection. Fields that cannot be read are left out.
    fn of_document(job: &Document, now: Instant) -> Option<Self> {
        let text = |of: &Document, field: &str| of.get_str(field).ok().map(str::to_owned);
        let execution = job.get_document("last_execution").ok();
        let failure = execution.and_then(|execution| Some((text(execution, "class")?, text(execution, "message").unwrap_or_default())));
        let continued_as = job.get_array("continued_as").ok();
        let id = |field: &str| job.get_object_id(field).ok().map(JobId::from);
        let is_retried = job.get("retried_as").is_some_and(|new| *new != Bson::Null);
        Some(Self {
            id: id("_id")?,
            class: job.get_document("workable").ok().and_then(|workable| text(workable, "class")).unwrap_or_default(),
            group: text(job, "group").unwrap_or_default(),
            state: state_of(job, now),
            why: text(job, "why"),
            waits_for: edges_of(job.get("waits_for")).unwrap_or_default(),
            continued_as: continued_as.into_iter().flatten().filter_map(Bson::as_object_id).map(JobId::from).collect(),
            recovered_from: id("recovered_from"),
            retried_as: id("retried_as"),
            is_retried,
            is_retrying: job.contains_key("retrying") && !is_retried,
            failure,
        })
    }
}

/// As [`Stage::of`], from a document that need not be valid.
fn state_of(job: &Document, now: Instant) -> Stage {
    let is = |field| job.get_bool(field).unwrap_or(false);
    match (job.get("scheduled_at"), job.get_str("why")) {
        _ if is("locked") => {
            if job.get_datetime("cancel_requested_at").is_ok() {
                Stage::Cancelling
            } else {
                Stage::Running
            }
        }
        (Some(_), _) if is("waiting") || job.contains_key("unique_after") => Stage::Waits,
        (Some(Bson::DateTime(at)), _) if *at > bson::DateTime::from_chrono(now) => Stage::Postponed,
        (Some(_), _) => Stage::Queued,
        (None, why) => Stage::of_end(&FinishReason::custom(why.unwrap_or_default())),
    }
}

impl Client {
    /// The jobs of a graph, by their ids; empty if no job has this graph.
    ///
    /// # Errors
    /// When MongoDB cannot be reached.
    pub async fn graph(&self, graph: GraphId) -> Result<Vec<GraphJob>, StoreError> {
        Ok(self.store().graph_and_ended(graph).await?.0)
    }

    /// Waits until no job of a graph waits or runs. Returns its jobs.
    ///
    /// The graph is read again after the end of one of its jobs, until a read finds no open job, also none that has ended during that read. So
    /// a job that moves, becomes others, adds jobs or is retried meanwhile does not hide what is still open.
    ///
    /// # Errors
    /// [`WaitError::TimedOut`] with one of the jobs that have not ended; an error of MongoDB.
    pub async fn wait_for_graph(&self, graph: GraphId, timeout: Duration) -> Result<Vec<GraphJob>, WaitError> {
        let begun = Monotonic::now();
        loop {
            let left = timeout.saturating_sub(begun.elapsed());
            let (jobs, ended) = match self.store().graph_and_ended(graph).await {
                Err(error) if error.may_pass() && !left.is_zero() => {
                    pause(AGAIN_AFTER.min(left)).await;
                    continue;
                }
                read => read.map_err(ResultError::from)?,
            };
            // A later job is more probably the last one.
            let open = jobs.iter().rev().filter(|job| job.is_open()).min_by_key(|job| job.is_retrying);
            let open = match (open, ended.as_ref()) {
                (None, None) => return Ok(jobs),
                (Some(open), _) if !open.is_retrying => open,
                (Some(GraphJob { id: job, .. }), _) | (None, Some(job)) if left.is_zero() => {
                    return Err(WaitError::TimedOut { job: *job, waited: timeout });
                }
                (Some(_), _) | (None, Some(_)) => {
                    pause(AGAIN_AFTER.min(left)).await;
                    continue;
                }
            };
            match self.wait_for_end(open.id, timeout.saturating_sub(begun.elapsed())).await {
                Ok(_) | Err(WaitError::NotKept { .. } | WaitError::Gone { .. } | WaitError::Unknown { .. }) => {}
                Err(WaitError::TimedOut { job, .. }) => return Err(WaitError::TimedOut { job, waited: timeout }),
                Err(other) => return Err(other),
            }
        }
    }
}

impl Store {
    /// The same, with a job that has ended during the read.
    async fn graph_and_ended(&self, graph: GraphId) -> Result<(Vec<GraphJob>, Option<JobId>), StoreError> {
        let ((jobs, ended), now) = (self.jobs_of_graph(graph).await?, self.now());
        Ok((jobs.iter().filter_map(|job| GraphJob::of_document(job, now)).collect(), ended))
    }

    /// The results of these archived jobs, in this order. The result of a job that became others is the result of that job, or an array of
    /// the results of those jobs. A job without a result has null.
    ///
    /// # Errors
    /// [`InputError`].
    pub async fn results<T: DeserializeOwned>(&self, jobs: &[JobId]) -> Result<Vec<T>, InputError> {
        let mut known: HashMap<JobId, StoredResult> = HashMap::new();
        let mut unread: Vec<JobId> = jobs.to_vec();
        for _ in 0..LONGEST_CHAIN {
            if unread.is_empty() {
                break;
            }
            let found = self.results_of(&unread).await?;
            if let Some(gone) = unread.iter().find(|job| !found.contains_key(job)) {
                return Err(InputError::Gone { job: *gone });
            }
            let next = |result: &StoredResult| match result {
                StoredResult::ContinuedAs(jobs) => jobs.clone(),
                StoredResult::Value(_) => Vec::new(),
            };
            unread = found.values().flat_map(next).filter(|job| !known.contains_key(job)).collect();
            known.extend(found);
        }
        let result =
            |job: &JobId| bson::deserialize_from_bson(value_of(*job, &known, 0)).map_err(|error| InputError::of_type(*job, &error));
        jobs.iter().map(result).collect()
    }
}

/// Maximum number of times that a job became several jobs, one within the other. Further results are null.
const DEEPEST: usize = 100;

/// The result of a job, from the results of all jobs that continue it. A chain may be long, so only jobs that became several are followed by
/// recursion.
fn value_of(mut job: JobId, known: &HashMap<JobId, StoredResult>, depth: usize) -> Bson {
    for _ in 0..=known.len() {
        match known.get(&job) {
            Some(StoredResult::Value(value)) => return value.clone(),
            Some(StoredResult::ContinuedAs(jobs)) if jobs.len() == 1 => job = jobs[0],
            Some(StoredResult::ContinuedAs(jobs)) if depth < DEEPEST => {
                return jobs.iter().map(|job| value_of(*job, known, depth + 1)).collect();
            }
            Some(StoredResult::ContinuedAs(_)) | None => break,
        }
    }
    Bson::Null
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    #[test]
    fn a_job_that_runs_after_another_with_its_key_waits_for_it() {
        let (now, far) = (bson::DateTime::from_millis(5), bson::DateTime::MAX);
        let job = |fields: Document| state_of(&fields, now.to_chrono());
        assert_eq!(job(doc! { "scheduled_at": far, "unique_after": "key" }), Stage::Waits);
        assert_eq!(job(doc! { "scheduled_at": far }), Stage::Postponed);
    }
}
