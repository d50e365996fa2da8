//! The state of a job: waiting, locked (ahead, or running), or archived.

use super::{Claim, FinishReason, Job};
use crate::base::{Instant, WorkerId, words};

/// The state of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
#[expect(missing_docs, reason = "each variant says what its fields are")]
pub enum JobState {
    /// Waiting for `at` and a worker.
    Waiting { at: Instant },
    /// Locked by a worker: running there, or locked ahead. The claim is the proof of the start.
    Locked { worker: WorkerId, claim: Claim },
    /// Archived, with this finish reason.
    Archived { why: FinishReason },
}

words! {
    /// The state of a job in one word: as the lists show it, and as their filters take it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    #[cfg_attr(not(feature = "protocol"), non_exhaustive)]
    pub enum Stage {
        /// It waits for the ends of other jobs.
        Waits = "waits",
        /// Its date is in the future.
        Postponed = "postponed",
        /// It is due.
        Queued = "queued",
        /// It is locked: it runs, or is locked ahead.
        Running = "running",
        /// It is locked, and its cancellation is requested.
        Cancelling = "cancelling",
        /// It has ended with success.
        Done = "done",
        /// It was cancelled.
        Cancelled = "cancelled",
        /// It has failed for the last time.
        Failed = "failed",
    }

    /// The word.
    fn word;
}

impl Stage {
    /// Whether the job has ended.
    pub fn is_finished(self) -> bool {
        matches!(self, Self::Done | Self::Cancelled | Self::Failed)
    }

    /// The stage of a job at `now`.
    pub fn of(job: &Job, now: Instant) -> Self {
        match &job.state {
            JobState::Waiting { .. } if job.is_waiting || job.predecessor_key().is_some() => Self::Waits,
            JobState::Waiting { at } if *at > now => Self::Postponed,
            JobState::Waiting { .. } => Self::Queued,
            JobState::Locked { .. } if job.cancel_requested => Self::Cancelling,
            JobState::Locked { .. } => Self::Running,
            JobState::Archived { why } => Self::of_end(why),
        }
    }

    /// The stage of a job that has ended with this reason.
    pub fn of_end(why: &FinishReason) -> Self {
        match why.as_str() {
            "done" => Self::Done,
            "cancelled" => Self::Cancelled,
            _ => Self::Failed,
        }
    }
}
