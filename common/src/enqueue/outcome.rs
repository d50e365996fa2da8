//! What an enqueueing call has done with a job.

use crate::base::JobId;

/// The result of enqueueing one job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Enqueued {
    /// The id of the job. If nothing was enqueued, the id of the existing job.
    pub id: JobId,
    /// Whether this call has enqueued the job. If not, a scheduled or archived job already had its id ([`NewJob::with_id`](crate::enqueue::new_job::NewJob::with_id)) or its unique
    /// key ([`NewJob::unique`](crate::enqueue::new_job::NewJob::unique)).
    pub is_new: bool,
    /// What has happened.
    pub outcome: Outcome,
}

impl Enqueued {
    pub(super) fn new(id: JobId, outcome: Outcome) -> Self {
        Self { id, is_new: matches!(outcome, Outcome::New | Outcome::RunsOnceMore), outcome }
    }
}

/// What has happened to a job that was to be enqueued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// It is enqueued.
    New,
    /// A job with its id is scheduled or archived.
    KnownId,
    /// A job has its unique key. Nothing was changed.
    Duplicate,
    /// The waiting job that has its unique key has its content now.
    Replaced,
    /// The waiting job that has its unique key has its date now, or the latest possible one.
    Postponed,
    /// The job that has its unique key was to be replaced or postponed, and has started. Nothing was changed.
    AlreadyStarted,
    /// It is enqueued and waits until the running job with its unique key is finished.
    RunsOnceMore,
}

impl Outcome {
    /// The outcome as one word, for programs.
    pub fn word(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::KnownId => "known-id",
            Self::Duplicate => "duplicate",
            Self::Replaced => "replaced",
            Self::Postponed => "postponed",
            Self::AlreadyStarted => "already-started",
            Self::RunsOnceMore => "runs-once-more",
        }
    }
}
