//! The events that a worker reports about its jobs to its application.

use recruiter_common::failure::Failure;

use crate::context::Context;

/// The application's function that receives events.
pub(crate) type Listener = dyn Fn(&WorkerEvent<'_>) + Send + Sync;

/// An event of a job in this worker. Each [`WorkerEvent::Started`] is followed by exactly one other event of the same start,
/// unless the process dies.
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
    /// The job was cancelled and is in the archive.
    Cancelled {
        /// The job.
        job: &'a Context,
        /// How its workable ended.
        reason: &'a Failure,
    },
    /// The job asked to be run again later. The attempt does not count.
    Snoozed {
        /// The job.
        job: &'a Context,
        /// The reason.
        reason: &'a Failure,
    },
    /// The worker stops before the job has ended. The job runs again, and the attempt does not count.
    Interrupted {
        /// The job.
        job: &'a Context,
        /// How its workable ended.
        reason: &'a Failure,
    },
    /// The machine lacked a resource. The job was put back as if it had not been started.
    Released {
        /// The job.
        job: &'a Context,
        /// What was missing.
        reason: &'a Failure,
    },
    /// This worker does not record the end of this start. The worker was declared dead or ends before the job, and a cleaner decides about
    /// the job; or an earlier write, whose reply was lost, has recorded the end.
    ClaimLost {
        /// The job.
        job: &'a Context,
    },
}
