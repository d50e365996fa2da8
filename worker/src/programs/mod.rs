//! The stock worker's workables: programs that a file names, and test workables.
//!
//! | module | what it is |
//! |---|---|
//! | [`stock`] | the workables file |
//! | [`cli`] | the command line |
//! | [`settings`] | the settings of a program |
//! | [`program`] | one execution of a program |
//! | [`group`], [`streams`] | its processes and their standard streams |
//! | [`long_lived`] | programs whose processes run many jobs |
//! | [`said`] | what such a process says in one line |
//! | [`messages`] | what a program reports while it runs |
//! | [`template`] | its arguments |
//! | [`output`] | its output |
//! | [`orphans`] | the orphaned processes that it leaves in a container |
//! | [`files`] | the number of programs that the limit of open files allows |
//! | [`builtin`] | test workables |

pub(crate) mod builtin;
pub mod cli;
pub(crate) mod files;
mod group;
pub(crate) mod long_lived;
mod messages;
pub(crate) mod orphans;
mod output;
mod program;
mod said;
mod settings;
pub mod stock;
mod streams;
mod template;

use recruiter_common::failure::{self, Failure};

use crate::{cancellation::Cancellation, context::Context, outcome::NotDone};

/// The outcome of an execution that stopped because it was cancelled.
fn stopped_by(job: &Context) -> NotDone {
    NotDone::Stopped(match job.cancellation() {
        Some(Cancellation::Requested) => Failure::new(failure::CANCELLED, "the job was cancelled while it ran"),
        Some(Cancellation::TimeLimit) => Failure::new(failure::TIMEOUT, "the time limit passed"),
        Some(Cancellation::MemoryLimit) => Failure::new(failure::MEMORY_LIMIT, "the worker reached its memory limit while the job ran"),
        Some(Cancellation::ClaimLost) => Failure::new(failure::INTERRUPTED, "the worker was declared dead"),
        Some(Cancellation::WorkerStopping) | None => Failure::new(failure::INTERRUPTED, "the worker stopped while the job ran"),
    })
}
