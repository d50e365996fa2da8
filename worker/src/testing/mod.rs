//! A test kit for applications, with the feature `testing`: as a dev-dependency,
//! `recruiter-worker = { …, features = ["testing"] }`.
//!
//! - [`run_inline`] and [`Inline`] execute a job by the classes, the policies and the layers of a worker, without MongoDB.
//! - [`enqueued`] lists the jobs of a class that the code under test has enqueued.
//! - [`Drain`] executes all due jobs of a database, one after the other, as of now or of a later time.
//!
//! The last two need a MongoDB: the replica set that `recruiter dev` starts, or the one that `MONGODB_URI` names.
//!
//! A workable alone is tested with [`Context::for_tests`](crate::Context::for_tests).

mod drain;
mod enqueued;
mod inline;

pub use self::{
    drain::{Drain, DrainError, Drained},
    enqueued::{EnqueuedError, EnqueuedJob, enqueued},
    inline::{Inline, InlineError, run_inline},
};
pub use crate::engine::{ran::Ran, solo::NotAlone};
