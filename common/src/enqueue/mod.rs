//! The public interface for applications: describe a job and enqueue it now, at a later time, together with other jobs,
//! or in the application's own transaction.
//!
//! | file | content |
//! |---|---|
//! | `workable` | kinds of work that are Rust types |
//! | `defaults` | the default settings of a class |
//! | `classes` | what workers declare about the jobs of a class |
//! | `new_job` | a job that is not enqueued yet, and its settings |
//! | `document` | its document: every setting is validated |
//! | `error` | why a job was not enqueued |
//! | `outcome` | what a call has done with a job |
//! | `insert` | enqueues jobs |
//! | `conflicts` | jobs with unique keys |
//! | `graph`, `edges`, `insert_graph` | jobs that wait for others: the call, the checks of their edges, the insert |
//! | `invalid_graph` | why jobs cannot wait for each other |
//! | `waiting` | the document of a job that waits for others |
//! | `spec` | a job as JSON |
//! | `backlog` | groups in which a limited number of jobs may wait |

mod backlog;
pub(crate) mod classes;
mod conflicts;
mod defaults;
mod document;
pub(crate) mod edges;
mod error;
mod graph;
mod insert;
pub(crate) mod insert_graph;
pub(crate) mod invalid_graph;
mod new_job;
mod outcome;
pub(crate) mod spec;
pub(crate) mod waiting;
mod workable;

pub use self::{
    defaults::{AnyPriority, Defaults, Retry},
    error::EnqueueError,
    new_job::NewJob,
    outcome::{Enqueued, Outcome},
    workable::Workable,
};
pub use crate::base::names::LONGEST_NAME;
