//! Why the inputs of a job cannot be read.

use crate::base::{JobId, of_bson};

/// The inputs of a job: the results of the jobs that it waited for.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
#[non_exhaustive]
pub enum InputError {
    /// A job whose result cannot be read any more.
    #[error("the result of job {job} is gone: it was deleted from the archive")]
    Gone { job: JobId },
    /// The job has waited for none or for several jobs.
    #[error("the job has waited for {count} jobs, not for one: use `inputs`")]
    NotOne { count: usize },
    /// A result of another type.
    #[error("the result of job {job} is not of the expected type: {reason}")]
    Type { job: JobId, reason: String },
    /// An error of MongoDB.
    #[error(transparent)]
    Store(#[from] crate::mongo::StoreError),
}

impl InputError {
    pub(crate) fn of_type(job: JobId, error: &bson::error::Error) -> Self {
        Self::Type { job, reason: of_bson(error) }
    }
}
