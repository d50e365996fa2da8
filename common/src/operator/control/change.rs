//! A change to jobs, and its outcome for one job.

use super::{Alteration, Revision};
use crate::{
    base::{Instant, JobId, WorkerId},
    job::FinishReason,
};

/// A change to jobs.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub enum Change {
    /// Enqueues an archived job again under another id, which its archived document stores as `retried_as`. Makes a
    /// waiting job due now.
    Retry {
        /// Whether jobs that were retried before are retried as well.
        again: bool,
        /// What the new job has in place of the former content. A job that is not finished is refused unless this is empty.
        with: Box<Revision>,
    },
    /// Gives waiting jobs another priority, group or date.
    Alter(Alteration),
    /// Archives a waiting job without running it. Asks the worker of a running job to end it.
    Cancel,
    /// Deletes an archived job permanently.
    Delete,
}

/// The outcome of a change for one job. In a dry run, the outcome that the change would have.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
#[expect(missing_docs, reason = "each variant says what its fields are")]
pub enum Changed {
    /// It is in the archive for this reason, and is enqueued again under a new id (`None` in a dry run).
    EnqueuedAgain { new: Option<JobId>, why: FinishReason },
    /// It was due then and is due now.
    DueNow { instead_of: Instant },
    /// It is waiting and already due.
    AlreadyDue { since: Instant },
    /// It is waiting and has the new values.
    Altered,
    /// It is waiting, and had these values before.
    Unchanged,
    /// It was waiting and is archived now.
    Cancelled,
    /// It is running. Its cancellation was requested.
    CancelRequested,
    /// It was archived and is deleted.
    Deleted,
    /// It matched the filter, but its state changed before the write.
    Meanwhile,
    /// It is unchanged.
    Refused(Refusal),
}

impl Changed {
    /// The outcome as one word, for programs and for counts.
    pub fn word(&self) -> &'static str {
        match self {
            Self::EnqueuedAgain { .. } => "enqueued-again",
            Self::DueNow { .. } => "due-now",
            Self::AlreadyDue { .. } => "already-due",
            Self::Altered => "changed",
            Self::Unchanged => "unchanged",
            Self::Cancelled => "cancelled",
            Self::CancelRequested => "asked",
            Self::Deleted => "deleted",
            Self::Meanwhile => "changed-meanwhile",
            Self::Refused(Refusal::RetriedBefore { .. }) => "retried-before",
            Self::Refused(_) => "refused",
        }
    }
}

/// The reason why a job was not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub enum Refusal {
    /// There is no job with this id.
    #[error("no job has this id, neither in `scheduled` nor in `archived`")]
    Unknown,
    /// It was retried before.
    #[error("it was retried before, as {new}")]
    RetriedBefore { new: String },
    /// A running job cannot be retried.
    #[error("it is running in worker {worker}; its retry policy decides when it ends")]
    Running { worker: WorkerId },
    /// A running job keeps its priority, its group and its date.
    #[error("it has started: worker {worker} runs it, and only waiting jobs are changed")]
    Started { worker: WorkerId },
    /// An archived job can be neither changed nor cancelled.
    #[error("it is archived already, as {why}")]
    Archived { why: String },
    /// A job that is not archived cannot be deleted.
    #[error("it is not archived, and only archived jobs are deleted: cancel it first")]
    NotArchived,
    /// Its document is not a valid job.
    #[error("{0}")]
    Malformed(String),
    /// A job with its unique key is waiting or running.
    #[error("another job with its unique key is waiting or running; cancel that one first, or wait until it is finished")]
    KeyIsTaken,
    /// It waits until another job is finished.
    #[error("it waits until the running job with the unique key `{key}` is finished")]
    WaitsForAnother { key: String },
    /// Only archived jobs are retried with new content.
    #[error("it is not finished, and only finished jobs are retried with new content: cancel it first")]
    NotFinished,
    /// It waits for other jobs.
    #[error("it waits for other jobs, and cannot be changed until they end; `recruiter jobs why` names them")]
    WaitsForJobs,
    /// It cannot be enqueued again.
    #[error("it cannot be enqueued again: {0}")]
    Unstorable(String),
    /// Its `locked` field is invalid.
    #[error("its field `locked` is neither true nor false; repair the document by hand")]
    NeitherLockedNorNot,
    /// The retry of its graph has ended before it.
    #[error("the retry was given up before it came to this job: the graph was cancelled, or another retry of it has begun")]
    GivenUp,
    /// It changed between each read and write.
    #[error("it changed each time it was read; try again")]
    KeepsChanging,
}

impl Refusal {
    /// Whether the job changed its state after it matched: it has started or ended, or was deleted.
    pub(crate) fn is_caused_by_a_change(&self) -> bool {
        matches!(
            self,
            Self::Unknown | Self::Running { .. } | Self::Started { .. } | Self::Archived { .. } | Self::NotArchived | Self::NotFinished
        )
    }
}
