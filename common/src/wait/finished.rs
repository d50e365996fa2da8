//! The outcome of a job, with its result in the type that its class declares.
//!
//! Used by applications. The worker stores the result as BSON when the workable returns it.

use bson::{Bson, RawDocument};

use crate::{
    base::{Failure, JobId, of_bson},
    enqueue::Workable,
    job::{FinishReason, StoredJob},
    mongo::{Client, StoreError, lossy},
};

/// The outcome of a job so far.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum JobResult<T> {
    /// No job has this id: it was never enqueued, its transaction is not committed, the cleaner has deleted it from
    /// the archive, or it succeeded and nothing is kept of a success ([`Keep::Failures`](crate::job::Keep::Failures)).
    Unknown,
    /// It is waiting or running.
    Unfinished,
    /// It was successful, with this result.
    Done(T),
    /// It has become these jobs ([`graphs`](crate::graphs)).
    ContinuedAs(Vec<JobId>),
    /// It ended without success.
    Failed {
        /// The reason why it was archived.
        why: FinishReason,
        /// The failure of its last execution; `None` if it was never started.
        failure: Option<Failure>,
    },
}

impl<T> JobResult<T> {
    /// The result of a job that was successful.
    pub fn done(self) -> Option<T> {
        if let Self::Done(result) = self { Some(result) } else { None }
    }
}

/// Why the result of a job cannot be returned.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
#[non_exhaustive]
pub enum ResultError {
    /// The job has another class.
    #[error("the job is of class `{found}`, not `{asked}`")]
    OtherClass { found: String, asked: &'static str },
    /// The stored result does not match the type that the class declares.
    #[error("the result of a `{class}` job cannot be decoded: {reason}")]
    Undecodable { class: &'static str, reason: String },
    /// An error of MongoDB.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Client {
    /// Returns the outcome of a job of this class. [`Client::job`] describes the read. Of a job with
    /// [`Keep::Failures`](crate::job::Keep::Failures) that has succeeded, nothing remains, and the outcome is [`JobResult::Unknown`].
    ///
    /// ```no_run
    /// # use recruiter_common::{Client, JobId, JobResult, Workable};
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct Sum { numbers: Vec<i64> }
    /// impl Workable for Sum {
    ///     const CLASS: &'static str = "Sum";
    ///     type Output = i64;
    /// }
    ///
    /// # async fn example(client: Client, id: JobId) -> Result<(), Box<dyn std::error::Error>> {
    /// match client.result_of::<Sum>(id).await? {
    ///     JobResult::Done(sum) => println!("it is {sum}"),
    ///     other => println!("{other:?}"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ResultError`].
    pub async fn result_of<W: Workable>(&self, job: JobId) -> Result<JobResult<W::Output>, ResultError> {
        self.job(job).await?.map_or(Ok(JobResult::Unknown), |stored| result_in::<W>(&stored))
    }
}

/// The outcome of a job that was read.
pub(crate) fn result_in<W: Workable>(stored: &StoredJob) -> Result<JobResult<W::Output>, ResultError> {
    let class = class_of(&stored.document);
    if class != W::CLASS {
        return Err(ResultError::OtherClass { found: class, asked: W::CLASS });
    }
    if !stored.is_archived {
        return Ok(JobResult::Unfinished);
    }
    let why = FinishReason::custom(text(&stored.document, "why"));
    if why != FinishReason::DONE {
        return Ok(JobResult::Failed { why, failure: last_failure(&stored.document) });
    }
    if let Ok(jobs) = stored.document.get_array("continued_as") {
        let ids = jobs.into_iter().filter_map(|job| job.ok()?.as_object_id());
        return Ok(JobResult::ContinuedAs(ids.map(JobId::from).collect()));
    }
    let undecodable = |error: bson::error::Error| ResultError::Undecodable { class: W::CLASS, reason: of_bson(&error) };
    let result = stored.document.get("result").map_err(undecodable)?.map_or(Ok(Bson::Null), Bson::try_from).map_err(undecodable)?;
    bson::deserialize_from_bson(result).map(JobResult::Done).map_err(undecodable)
}

fn class_of(job: &RawDocument) -> String {
    job.get_document("workable").map(|workable| text(workable, "class")).unwrap_or_default()
}

fn last_failure(job: &RawDocument) -> Option<Failure> {
    let execution = job.get_document("last_execution").ok()?;
    let failure = Failure::new(text(execution, "class"), text(execution, "message"));
    Some(match execution.get_str("trace") {
        Ok(trace) => failure.with_trace(trace),
        Err(_) => failure,
    })
}

/// A string field, with invalid UTF-8 replaced.
fn text(of: &RawDocument, field: &str) -> String {
    of.get_str(field).map_or_else(|_| lossy(of).get_str(field).unwrap_or_default().to_owned(), str::to_owned)
}
