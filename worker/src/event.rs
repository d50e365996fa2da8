//! The events that a worker reports about its jobs to its application.

use recruiter_common::failure::Failure;

use crate::context::Context;

/// The application's function that receives events.
pub(crate) type Listener = dyn Fn(&WorkerEvent<'_>) + Send + Sync;

/// An event of a job in this worker.
#[derive(Debug)]
#[non_exhaustive]
pub enum WorkerEvent<'a> {
    /// The job's workable is about to be called.
    Started {
        /// The job.
        job: &'a Context,
    },
    /// The job succeeded and is in the archive.
    Done {
        /// The job.
        job: &'a Context,
    },
    /// The job failed and its failure is recorded.
    Failed {
        /// The job.
        job: &'a Context,
        /// The failure.
        failure: &'a Failure,
        /// Whether the failure moved the job to the archive.
        last: bool,
    },
}
