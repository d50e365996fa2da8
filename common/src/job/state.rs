//! The state of a job: waiting, running, or archived.

use super::{execution::Claim, finish_reason::FinishReason};
use crate::{ids::WorkerId, instant::Instant};

/// The state of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobState {
    /// Waiting for `at` and a worker.
    Scheduled {
        /// When it is due.
        at: Instant,
    },
    /// Running in a worker.
    Started {
        /// The worker that holds it.
        worker: WorkerId,
        /// Proof of the start.
        claim: Claim,
    },
    /// Archived.
    Archived {
        /// The finish reason.
        why: FinishReason,
    },
}
