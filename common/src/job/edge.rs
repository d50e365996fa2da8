//! An edge from a job to one that waits for it.

use bson::{Bson, doc};

use super::FinishReason;
use crate::base::{Failure, JobId};

/// The error class of a job that was cancelled because a job that it waited for failed.
pub const PARENT_FAILED: &str = "parent-failed";
/// The error class of a job that was cancelled because the failure that it waited for did not happen.
pub const NOT_NEEDED: &str = "not-needed";
/// The error class of a job that was cancelled because a job that it waited for was deleted.
pub const PARENT_GONE: &str = "parent-gone";

/// The end of a job that another one waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub enum When {
    /// It has succeeded.
    Done,
    /// It has ended in any way.
    Ended,
    /// It has ended without success: it failed for the last time, was cancelled or has expired.
    Failed,
}

impl When {
    /// The word in documents and in JSON.
    pub fn word(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Ended => "ended",
            Self::Failed => "failed",
        }
    }

    /// The end with this word.
    pub fn of_word(word: &str) -> Option<Self> {
        [Self::Done, Self::Ended, Self::Failed].into_iter().find(|when| when.word() == word)
    }
}

/// A job waits for the end of `job`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub struct Edge {
    /// The job that is waited for.
    pub job: JobId,
    /// Which end of it.
    pub when: When,
}

impl Edge {
    /// Waits until the job is done.
    pub fn done(job: JobId) -> Self {
        Self { job, when: When::Done }
    }

    /// Waits until the job has ended in any way.
    pub fn ended(job: JobId) -> Self {
        Self { job, when: When::Ended }
    }

    /// Waits until the job has ended without success. If it succeeds, the waiting job is not needed.
    pub fn failed(job: JobId) -> Self {
        Self { job, when: When::Failed }
    }
}

impl From<JobId> for Edge {
    fn from(job: JobId) -> Self {
        Self::done(job)
    }
}

/// The stored form: the id alone, or `{job, when}`.
impl From<Edge> for Bson {
    fn from(edge: Edge) -> Self {
        match edge.when {
            When::Done => edge.job.into(),
            When::Ended | When::Failed => Bson::Document(doc! { "job": edge.job, "when": edge.when.word() }),
        }
    }
}

/// Why `waits_for` of a stored job cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`waits_for` must be an array of ids of jobs, or of documents {{job, when}} with `done`, `ended` or `failed`; not {found:.80}")]
pub struct InvalidEdge {
    found: String,
}

/// The edges in a stored `waits_for`.
///
/// # Errors
/// When one of them is neither an id nor a document `{job, when}`.
pub fn edges_of(stored: Option<&Bson>) -> Result<Vec<Edge>, InvalidEdge> {
    let invalid = |found: &Bson| InvalidEdge { found: found.to_string() };
    let edge = |stored: &Bson| {
        if let Some(job) = stored.as_object_id() {
            return Some(Edge::done(job.into()));
        }
        let edge = stored.as_document()?;
        let when = edge.get_str("when").map_or(Some(When::Done), When::of_word)?;
        Some(Edge { job: edge.get_object_id("job").ok()?.into(), when })
    };
    let Some(stored) = stored.filter(|stored| **stored != Bson::Null) else { return Ok(Vec::new()) };
    let edges = stored.as_array().ok_or_else(|| invalid(stored))?;
    edges.iter().map(|stored| edge(stored).ok_or_else(|| invalid(stored))).collect()
}

/// How a job has ended, as far as jobs that wait for it are concerned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// It succeeded.
    Done,
    /// It ended without success, for this reason.
    Failed(FinishReason),
    /// It was not needed, because a failure did not happen.
    NotNeeded,
    /// It has become other jobs.
    ContinuedAs(Vec<JobId>),
    /// It is in neither collection: it was deleted.
    Gone,
}

/// Why a job that waits will never be released: its error class and message.
pub type Unsatisfiable = Failure;

impl Edge {
    /// Whether this end satisfies the edge. An end by becoming other jobs does not: the job waits for those.
    ///
    /// # Errors
    /// When it makes the waiting job unnecessary or impossible.
    pub fn is_satisfied_by(self, end: &End) -> Result<bool, Unsatisfiable> {
        let job = self.job;
        match (self.when, end) {
            (_, End::ContinuedAs(jobs)) => Ok(jobs.is_empty()),
            (When::Ended, _) | (When::Done, End::Done) | (When::Failed, End::Failed(_)) => Ok(true),
            (When::Done, End::Failed(why)) => Err(Failure::new(PARENT_FAILED, format!("job {job}, which it waited for, ended as `{why}`"))),
            (When::Failed, End::Done) => Err(Failure::new(NOT_NEEDED, format!("it waited for a failure of job {job}, which succeeded"))),
            (When::Done | When::Failed, End::NotNeeded) => {
                Err(Failure::new(NOT_NEEDED, format!("it waited for job {job}, which was not needed")))
            }
            (When::Done | When::Failed, End::Gone) => {
                Err(Failure::new(PARENT_GONE, format!("job {job}, which it waited for, is neither scheduled nor archived: it was deleted")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_end_satisfies_an_edge_or_makes_the_job_impossible() {
        let check = |when, end: &End| match (Edge { job: JobId::new(), when }).is_satisfied_by(end) {
            Ok(true) => "released".to_owned(),
            Ok(false) => "waits".into(),
            Err(failure) => failure.class,
        };
        let failed = End::Failed(FinishReason::CANCELLED);
        let ends = [End::Done, failed, End::NotNeeded, End::Gone, End::ContinuedAs(vec![JobId::new()]), End::ContinuedAs(vec![])];
        let row = |when| ends.iter().map(|end| check(when, end)).collect::<Vec<_>>().join(" ");
        assert_eq!(row(When::Done), "released parent-failed not-needed parent-gone waits released");
        assert_eq!(row(When::Ended), "released released released released waits released");
        assert_eq!(row(When::Failed), "not-needed released not-needed parent-gone waits released");
    }

    #[test]
    fn an_edge_is_stored_as_an_id_or_with_its_end() {
        let job = JobId::new();
        for edge in [Edge::done(job), Edge::ended(job), Edge::failed(job)] {
            assert_eq!(edges_of(Some(&Bson::Array(vec![edge.into()]))), Ok(vec![edge]));
        }
        assert_eq!(Bson::from(Edge::done(job)), Bson::from(job));
        assert_eq!(edges_of(None), Ok(vec![]));
        for wrong in [Bson::Int32(1), Bson::Array(vec!["x".into()]), Bson::Array(vec![doc! { "job": job, "when": "later" }.into()])] {
            assert!(edges_of(Some(&wrong)).is_err_and(|error| error.to_string().contains("{job, when}")), "{wrong}");
        }
    }
}
