//! The traits that an application implements to run jobs of a class.

use std::{future::Future, time::Duration};

use recruiter_common::{enqueue::Workable, failure::Failure};

use crate::{context::Context, outcome::NotDone};

/// A [`Workable`] that this process can execute.
///
/// Each execution gets a value of its own, decoded from the stored parameters. An earlier attempt may already have had the same side
/// effects, because a worker can die between a side effect and the record of its outcome.
pub trait Executable: Workable {
    /// The state that all executions share: connection pools, clients, caches. `()` for no state.
    type State: Send + Sync + 'static;

    /// Does the work and returns its result, which is kept in the archive.
    ///
    /// # Errors
    /// `?` converts any error into [`NotDone::Failed`], also `anyhow::Error` and boxed errors. The error class is the name of the type; set
    /// another one with [`OrNotDone`](crate::OrNotDone). Return [`NotDone::GiveUp`] if another attempt is pointless, and [`NotDone::Snooze`] if it is
    /// too early for the work.
    fn execute(&self, state: &Self::State, job: &Context) -> impl Future<Output = Result<Self::Output, NotDone>> + Send;

    /// How long an execution may take: the time limit of the class, or no limit unless the worker has one. An execution that ends later
    /// fails with the class `timeout`, also if it returns a result.
    fn time_limit(&self) -> Option<Duration> {
        Self::defaults().given_time_limit()
    }

    /// Called once the success is in the archive. The call is lost if the process dies before or during it.
    ///
    /// Each hook is aborted after a minute. A job that was snoozed, interrupted, released or cancelled calls none. For a bundle, the
    /// hooks are called for each item that has succeeded or failed, in order, once the end of the whole run is recorded.
    fn after_success(&self, _state: &Self::State, _job: &Context) -> impl Future<Output = ()> + Send {
        async {}
    }

    /// Called once a failure is recorded, whether or not the job will be retried.
    fn after_failure(&self, _state: &Self::State, _job: &Context, _failure: &Failure) -> impl Future<Output = ()> + Send {
        async {}
    }

    /// Called after `after_failure` when the failure moved the job to the archive. A cleaner that ends the job of a dead worker cannot
    /// call it.
    fn after_last_failure(&self, _state: &Self::State, _job: &Context, _failure: &Failure) -> impl Future<Output = ()> + Send {
        async {}
    }
}

/// A [`Workable`] that blocks its thread (computation, synchronous I/O). Each execution has a thread of its own, with the class as its
/// name. The code may use the runtime of the worker, for example with `Handle::current`.
///
/// A thread cannot be killed. A job that exceeds its time limit is cancelled, and its slot becomes free when `execute` returns.
/// [`Worker::run`](crate::Worker::run) returns after the grace period even if threads still run: they end with `execute` or with the
/// process. After a cleaner has declared the worker dead, threads that still run keep their slots until they end.
pub trait BlockingExecutable: Workable + Clone {
    /// The state that all executions share.
    type State: Send + Sync + 'static;

    /// Does the work. Long loops should check [`Context::is_cancelled`].
    ///
    /// # Errors
    /// As for [`Executable::execute`].
    fn execute(&self, state: &Self::State, job: &Context) -> Result<Self::Output, NotDone>;

    /// How long an execution may take: the time limit of the class, or no limit unless the worker has one. An execution that ends later
    /// fails with the class `timeout`, also if it returns a result.
    fn time_limit(&self) -> Option<Duration> {
        Self::defaults().given_time_limit()
    }

    /// Whether the hooks are called, each time in a thread of its own. Set it to true where you write one of them: a class without hooks
    /// should not pay for threads.
    const HAS_HOOKS: bool = false;

    /// Called once the success is in the archive, as [`Executable::after_success`] is, if [`Self::HAS_HOOKS`]. It may block. After a
    /// minute nothing waits for it any more.
    fn after_success(&self, _state: &Self::State, _job: &Context) {}

    /// Called once a failure is recorded, whether or not the job will be retried.
    fn after_failure(&self, _state: &Self::State, _job: &Context, _failure: &Failure) {}

    /// Called after `after_failure` when the failure moved the job to the archive.
    fn after_last_failure(&self, _state: &Self::State, _job: &Context, _failure: &Failure) {}
}
