//! Where a job stands: it waits, runs, or is in the archive.

use super::{execution::Claim, why::Why};
use crate::{ids::WorkerId, instant::Instant};

/// Where a job stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobState {
    /// Waits for `at` and a worker.
    Scheduled {
        /// When it is due.
        at: Instant,
    },
    /// Runs in this worker.
    Started {
        /// Who holds it.
        worker: WorkerId,
        /// Proof of the start.
        claim: Claim,
    },
    /// Is in the archive.
    Archived {
        /// For this reason.
        why: Why,
    },
}
