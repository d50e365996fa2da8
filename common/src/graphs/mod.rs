//! Jobs that wait for other jobs.
//!
//! The one primitive is an *edge*: a job waits for another one ([`NewJob::waits_for`](crate::enqueue::NewJob::waits_for)). Groups, barriers, pipelines and maps are made of edges,
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
//! // graph.enqueue(&client).await?;
//! ```
//!
//! A job whose edges can no longer be satisfied is cancelled: it is archived as `cancelled`, with the error class `parent-failed`,
//! `not-needed` or `parent-gone`. The jobs that wait for it see that end.
//!
//! A job can also end by becoming other jobs, in one transaction. Jobs that wait for it then wait for those.
//!
//! | file | content |
//! |---|---|
//! | `builder` | [`Graph`] |
//! | `file` | a graph as JSON |
//! | `continuation` | the jobs that a job becomes |
//! | `ends` | the ends that waiting jobs wait for, and their release by the leader |
//! | `operations` | the jobs of a graph and their states; the inputs of a job |
//! | `inputs` | why the inputs of a job cannot be read |
//!
//! An edge is part of a job (`job/edge`). How jobs that wait are enqueued, and that edges have no cycles, is in `enqueue`.

mod builder;
pub(crate) mod continuation;
pub(crate) mod ends;
mod file;
mod inputs;
mod operations;

pub use self::{builder::Graph, inputs::InputError, operations::GraphJob};
pub use crate::{
    enqueue::invalid_graph::{InvalidGraph, MOST_CONTINUATION_BYTES, MOST_EDGES, MOST_JOBS},
    job::edge::{Edge, InvalidEdge, NOT_NEEDED, PARENT_FAILED, PARENT_GONE, When},
};
