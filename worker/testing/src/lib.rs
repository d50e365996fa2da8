//! A test kit for applications: a dev-dependency.
//!
//! - [`run_inline`] and [`Inline`] execute a job by the classes, the policies and the layers of a worker, without MongoDB.
//! - [`enqueued`] lists the jobs of a class that the code under test has enqueued.
//! - [`Drain`] executes all due jobs of a database, one after the other, as of now, of a later time, or at an exact instant.
//!
//! The last two need a MongoDB: the replica set that `recruiter dev` starts, or the one that `MONGODB_URI` names. With the feature
//! `system`, for Linux, a test brings it:
//!
//! - `TestDatabase` is an empty database for one test, on a MongoDB that the test's process starts.
//! - `System` is a recruiter, a cleaner and a worker in the test's process, on such a database.
//!
//! A workable alone is tested with [`Context::for_tests`](recruiter_worker::Context::for_tests).

#[cfg(feature = "system")]
mod database;
mod drain;
mod enqueued;
mod inline;
#[cfg(feature = "system")]
mod system;

#[cfg(feature = "system")]
pub use self::{
    database::{TestDatabase, TestDatabaseError},
    system::{System, SystemError},
};
pub use self::{
    drain::{Drain, DrainError, Drained},
    enqueued::{EnqueuedError, EnqueuedJob, enqueued},
    inline::{Inline, InlineError, run_inline},
};
pub use recruiter_worker::{Ran, solo::NotAlone};
