//! Jobs that wait for other jobs.
//!
//! The one primitive is an *edge*: a job waits for another one ([`NewJob::waits_for`]). Groups, barriers, pipelines and maps are made of edges,
//! and nest. A [`Graph`] is a set of new jobs with edges, which is enqueued whole or not at all.
//!
//! ```
//! # use recruiter_common::{bson::doc, graphs::{Edge, Graph}, NewJob};
//! # let page = |url: &str| NewJob::of_class("fetch", doc! { "url": url });
//! let mut graph = Graph::new();
//! let pages = graph.group(["a", "b", "c"].map(page)); // run in parallel
//! let index = graph.add(NewJob::of_class("index", doc! {}).waits_for_all(pages)); // when all are done
//! graph.add(NewJob::of_class("publish", doc! {}).waits_for(index));
//! graph.add(NewJob::of_class("call-for-help", doc! {}).waits_for_all([Edge::failed(index)]));
//! graph.add(NewJob::of_class("clean-up", doc! {}).waits_for_all([Edge::ended(index)]));
//! // graph.enqueue(&store).await?;
//! ```
//!
//! A job whose edges can no longer be satisfied is cancelled: it is archived as `cancelled`, with the error class `parent-failed`,
//! `not-needed` or `parent-gone`. The jobs that wait for it see that end.
//!
//! A job can also end by becoming other jobs, in one transaction. Jobs that wait for it then wait for those.
//!
//! | file | content |
//! |---|---|
//! | `edge` | an edge, and whether the end of a job satisfies it |
//! | `connect` | the edges among new jobs: no cycles |
//! | `builder` | [`Graph`] |
//! | `file` | a graph as JSON |
//! | `operations` | the jobs of a graph and their states; the inputs of a job |

mod builder;
mod connect;
mod edge;
mod file;
mod operations;

use bson::Document;

pub(crate) use self::connect::{connect, outside};
pub use self::{
    builder::Graph,
    edge::{Edge, End, InvalidEdge, NOT_NEEDED, PARENT_FAILED, PARENT_GONE, Unsatisfiable, When, edges_of},
    operations::{GraphJob, GraphState},
};
use crate::{
    enqueue::{EnqueueError, NewJob},
    ids::JobId,
    instant::{DUE_MS, Instant},
    job::Job,
    telemetry::of_bson,
};

/// Maximum number of jobs in one enqueueing call if some of them wait for others: they are one transaction.
pub const MOST_JOBS: usize = 20_000;
/// Maximum number of edges of one job. They are stored in its document.
pub const MOST_EDGES: usize = 20_000;

/// Maximum size of the jobs that one job becomes, in bytes: they are written together with ends of other jobs.
pub const MOST_CONTINUATION_BYTES: usize = 4 * 1024 * 1024;

/// Why jobs cannot wait for each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidGraph {
    /// Jobs wait for each other in a circle.
    #[error("job {job} would wait for itself, directly or through other jobs: leave out one of these edges")]
    Cycle {
        /// One of these jobs.
        job: JobId,
    },
    /// A job that does not exist.
    #[error("a job would wait for job {job}, which is neither scheduled nor archived")]
    UnknownJob {
        /// Its id.
        job: JobId,
    },
    /// A job waits twice for the same job.
    #[error("job {job} would wait twice for job {parent}: give one edge only")]
    TwoEdges {
        /// The job that waits.
        job: JobId,
        /// The job that it waits for.
        parent: JobId,
    },
    /// A graph with a unique job.
    #[error(
        "a job of a graph cannot be unique, because a graph is enqueued whole or not at all: make the job unique that enqueues the graph"
    )]
    Unique,
    /// A job of which nothing would be left after its success.
    #[error(
        "a job would wait for job {job}, of which nothing is kept after a success, so its end would not be seen: enqueue both in one graph, or leave out its `keep`"
    )]
    NotKept {
        /// The job.
        job: JobId,
    },
    /// A job in a line.
    #[error("a job that waits for others cannot be in a line: its place could be in front of a job that it waits for")]
    Line,
    /// A job that continues another one and waits for a job that is not part of the continuation.
    #[error("the jobs that a job becomes can wait for each other only, not for job {job}")]
    OutsideOfContinuation {
        /// The job that is waited for.
        job: JobId,
    },
    /// A job that continues another one under an id of the application.
    #[error("the jobs that a job becomes get new ids: leave out `with_id`")]
    ContinuationWithId,
    /// Jobs that are too large for one transaction with the end of the job that becomes them.
    #[error(
        "the jobs that a job becomes would have {bytes} bytes together, {MOST_CONTINUATION_BYTES} is the limit: enqueue a graph, or references to the data"
    )]
    ContinuationTooLarge {
        /// Their size.
        bytes: usize,
    },
    /// More jobs than fit into a transaction.
    #[error("a graph of {jobs} jobs is too large, {MOST_JOBS} is the limit: let one of its jobs add further jobs")]
    TooManyJobs {
        /// Their number.
        jobs: usize,
    },
    /// A job with too many edges.
    #[error("job {job} would wait for {edges} jobs, {MOST_EDGES} is the limit: put jobs between them, each for a part")]
    TooManyEdges {
        /// The job.
        job: JobId,
        /// Their number.
        edges: usize,
    },
    /// Jobs of which only a part exists already.
    #[error("job {job} exists already, but not the whole graph: enqueue a graph with new ids")]
    PartlyKnown {
        /// One of the existing jobs.
        job: JobId,
    },
    /// The indexes for jobs that wait for others cannot be made.
    #[error("the indexes for jobs that wait for others cannot be made: {0}")]
    NoIndexes(String),
    /// An edge in a form that cannot be read.
    #[error(transparent)]
    Edge(#[from] InvalidEdge),
}

/// Makes the document of a new job one of a job that waits. It is due in the year 9999, so no search finds it.
pub(crate) fn make_wait(document: &mut Document, edges: &[Edge], due: Instant, now: Instant) {
    document.insert("waits_for", edges.iter().copied().map(bson::Bson::from).collect::<Vec<_>>());
    document.insert("waiting", true);
    if due > now {
        document.insert("due_after", bson::DateTime::from_chrono(due));
    }
    document.insert("scheduled_at", bson::DateTime::from_millis(*DUE_MS.end()));
}

/// The documents of the jobs that `job` becomes: in its graph, and followed by those that wait for it.
///
/// # Errors
/// The first invalid one.
pub fn continuation(jobs: Vec<NewJob>, job: &Job, now: Instant) -> Result<Vec<Document>, EnqueueError> {
    let mut documents = Vec::with_capacity(jobs.len());
    for new in jobs {
        if new.is_unique() {
            return Err(InvalidGraph::Unique.into());
        }
        if new.has_own_id() {
            return Err(InvalidGraph::ContinuationWithId.into());
        }
        let (_, mut document) = new.into_document(now)?;
        if let Some(graph) = job.graph
            && !document.contains_key("graph")
        {
            document.insert("graph", graph);
        }
        if job.is_followed {
            document.insert("followed", true);
        }
        documents.push(document);
    }
    connect(&mut documents)?;
    // A job outside could wait for `job`, and so for these jobs: they would wait for each other.
    if let Some(job) = outside(&documents)?.first() {
        return Err(InvalidGraph::OutsideOfContinuation { job: *job }.into());
    }
    match documents.iter().map(|job| job.to_vec().map_or(MOST_CONTINUATION_BYTES, |bytes| bytes.len())).sum() {
        bytes if bytes > MOST_CONTINUATION_BYTES => Err(InvalidGraph::ContinuationTooLarge { bytes }.into()),
        _ => Ok(documents),
    }
}

/// A job that waits for others, as the recruiter reads it.
#[derive(Clone, Debug)]
pub struct Waiting {
    /// The job.
    pub id: JobId,
    /// Its edges.
    pub edges: Result<Vec<Edge>, InvalidEdge>,
    /// Its due date, if it is not due as soon as it need not wait any more.
    pub due_after: Option<Instant>,
    /// What an assignment needs. Its date is that of a waiting job.
    pub job: crate::store::ScheduledJob,
}

impl Waiting {
    /// `None` if the document is not a job.
    pub(crate) fn of_document(document: &Document) -> Option<Self> {
        Some(Self {
            id: document.get_object_id("_id").ok()?.into(),
            edges: edges_of(document.get("waits_for")),
            due_after: document
                .get_datetime("due_after")
                .ok()
                .filter(|at| DUE_MS.contains(&at.timestamp_millis()))
                .map(|at| at.to_chrono()),
            job: crate::store::ScheduledJob::of_document(document)?,
        })
    }
}

/// The inputs of a job: the results of the jobs that it waited for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InputError {
    /// A job whose result cannot be read any more.
    #[error("the result of job {job} is gone: it was deleted from the archive")]
    Gone {
        /// The job.
        job: JobId,
    },
    /// The job has waited for none or for several jobs.
    #[error("the job has waited for {count} jobs, not for one: use `inputs`")]
    NotOne {
        /// Their number.
        count: usize,
    },
    /// A result of another type.
    #[error("the result of job {job} is not of the expected type: {reason}")]
    Type {
        /// The job.
        job: JobId,
        /// The error of serde.
        reason: String,
    },
    /// An error of MongoDB.
    #[error(transparent)]
    Store(#[from] crate::StoreError),
}

impl InputError {
    pub(crate) fn of_type(job: JobId, error: &bson::error::Error) -> Self {
        Self::Type { job, reason: of_bson(error) }
    }
}
