//! Why a wait has no result.

use std::time::Duration;

use super::ResultError;
use crate::{
    base::{Failure, JobId, in_words},
    job::FinishReason,
};

/// Why a wait has no result.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
#[non_exhaustive]
pub enum WaitError {
    /// The job had not ended in time. It still waits or runs.
    #[error("job {job} has not ended within {}: wait again, or look at `recruiter jobs why {job}`", in_words(*waited))]
    TimedOut { job: JobId, waited: Duration },
    /// No job has this id.
    #[error(
        "there is no job {job}: it was never enqueued, its transaction is not committed, or it has ended and was deleted from the archive"
    )]
    Unknown { job: JobId },
    /// The job was there and is gone: it succeeded and nothing is kept of a success ([`Keep::Failures`](crate::job::Keep::Failures)).
    #[error("job {job} has ended, and nothing of it is kept: it succeeded with `keep: failures`")]
    NotKept { job: JobId },
    /// The job was deleted during the wait. How it has ended is unknown.
    #[error("job {job} is gone and is not in the archive: it was deleted, and how it has ended is unknown")]
    Gone { job: JobId },
    /// The job became other jobs. Wait for those whose results are wanted.
    #[error("job {job} became other jobs: wait for one of them ({jobs:?})")]
    ContinuedAs { job: JobId, jobs: Vec<JobId> },
    /// The job failed for good, was cancelled, or has expired.
    #[error("job {job} ended as `{why}`{}", said(.failure.as_ref()))]
    Failed {
        job: JobId,
        why: FinishReason,
        /// The failure of its last execution: error class, message and trace. `None` if it was never started.
        failure: Option<Failure>,
    },
    /// The job has another class, or its result cannot be decoded.
    #[error(transparent)]
    Result(#[from] ResultError),
}

fn said(failure: Option<&Failure>) -> String {
    failure.map_or_else(String::new, |failure| format!(": {}: {}", failure.class, failure.message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_in_parts_is_as_long_as_it_was_asked_for() {
        for (waited, said) in [(Duration::from_nanos(2_999_999_970), "within 3s:"), (Duration::from_millis(1_250), "within 1s 250ms:")] {
            let error = WaitError::TimedOut { job: JobId::new(), waited };
            assert!(error.to_string().contains(said), "{error}");
        }
    }
}
