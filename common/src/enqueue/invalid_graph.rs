//! Why jobs cannot wait for each other, and the limits.

use crate::{base::JobId, job::InvalidEdge};

/// Maximum number of jobs in one enqueueing call if some of them wait for others: they are one transaction.
pub const MOST_JOBS: usize = 20_000;
/// Maximum number of edges of one job. They are stored in its document.
pub const MOST_EDGES: usize = 20_000;

/// Maximum size of the jobs that one job becomes, in bytes: they are written together with ends of other jobs.
pub const MOST_CONTINUATION_BYTES: usize = 4 * 1024 * 1024;

/// Why jobs cannot wait for each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
#[non_exhaustive]
pub enum InvalidGraph {
    /// Jobs wait for each other in a circle.
    #[error("job {job} would wait for itself, directly or through other jobs: leave out one of these edges")]
    Cycle { job: JobId },
    /// A job that does not exist.
    #[error("a job would wait for job {job}, which is neither scheduled nor archived")]
    UnknownJob { job: JobId },
    /// A job waits twice for the same job.
    #[error("job {job} would wait twice for job {parent}: give one edge only")]
    TwoEdges { job: JobId, parent: JobId },
    /// A graph with a unique job.
    #[error(
        "a job of a graph cannot be unique, because a graph is enqueued whole or not at all: make the job unique that enqueues the graph"
    )]
    Unique,
    /// A job of which nothing would be left after its success.
    #[error(
        "a job would wait for job {job}, of which nothing is kept after a success, so its end would not be seen: enqueue both in one graph, or leave out its `keep`"
    )]
    NotKept { job: JobId },
    /// A job in a line.
    #[error("a job that waits for others cannot be in a line: its place could be in front of a job that it waits for")]
    Line,
    /// A job that continues another one and waits for a job that is not part of the continuation.
    #[error("the jobs that a job becomes can wait for each other only, not for job {job}")]
    OutsideOfContinuation { job: JobId },
    /// A job that continues another one under an id of the application.
    #[error("the jobs that a job becomes get new ids: leave out `with_id`")]
    ContinuationWithId,
    /// Jobs that are too large for one transaction with the end of the job that becomes them.
    #[error(
        "the jobs that a job becomes would have {bytes} bytes together, {MOST_CONTINUATION_BYTES} is the limit: enqueue a graph, or references to the data"
    )]
    ContinuationTooLarge { bytes: usize },
    /// More jobs than fit into a transaction.
    #[error("a graph of {jobs} jobs is too large, {MOST_JOBS} is the limit: let one of its jobs add further jobs")]
    TooManyJobs { jobs: usize },
    /// A job with too many edges.
    #[error("job {job} would wait for {edges} jobs, {MOST_EDGES} is the limit: put jobs between them, each for a part")]
    TooManyEdges { job: JobId, edges: usize },
    /// Jobs of which only a part exists already.
    #[error("job {job} exists already, but not the whole graph: enqueue a graph with new ids")]
    PartlyKnown { job: JobId },
    /// The indexes for jobs that wait for others cannot be made.
    #[error("the indexes for jobs that wait for others cannot be made: {0}")]
    NoIndexes(String),
    /// An edge in a form that cannot be read.
    #[error(transparent)]
    Edge(#[from] InvalidEdge),
}
