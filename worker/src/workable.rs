//! What an application implements to run jobs of a class, and the closed set of ways in which an execution ends.

use std::{error::Error, future::Future, time::Duration};

use bson::Bson;
use recruiter_common::{enqueue::Workable, failure::Failure};
use serde::Serialize;

use crate::context::Context;

/// A [`Workable`] that this process can execute.
///
/// Each execution gets a value of its own, decoded from the stored parameters. An earlier attempt may have had the same side effects
/// before: a worker can die between a side effect and its record.
pub trait Executable: Workable {
    /// What all executions share: connection pools, clients, caches. `()` when there is nothing.
    type State: Send + Sync + 'static;

    /// Does the work.
    ///
    /// # Errors
    /// Any error type converts into [`NotDone::Failed`] with its type name as the error class. Return [`NotDone::GiveUp`] when another
    /// attempt is pointless, and [`NotDone::Snooze`] when it is merely too early.
    fn execute(&self, state: &Self::State, job: &Context) -> impl Future<Output = Result<Done, NotDone>> + Send;

    /// How long an execution may take; no limit unless the worker has one. An execution that ends later fails with the class `timeout`,
    /// whatever it returns.
    fn time_limit(&self) -> Option<Duration> {
        None
    }

    /// Called once the success is in the archive. The call is lost if the process dies before or during it.
    ///
    /// For a bundle, the three hooks are called for each item that was executed, in order, once the end of the whole run is recorded.
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

/// A [`Workable`] that blocks its thread (computation, synchronous I/O). Each execution runs on a thread of its own.
///
/// A thread cannot be killed. A job that exceeds its time limit is cancelled, and its slot becomes free when `execute` returns.
pub trait BlockingExecutable: Workable + Clone {
    /// What all executions share.
    type State: Send + Sync + 'static;

    /// Does the work. Long loops should check [`Context::is_cancelled`].
    ///
    /// # Errors
    /// As for [`Executable::execute`].
    fn execute(&self, state: &Self::State, job: &Context) -> Result<Done, NotDone>;

    /// How long an execution may take; no limit unless the worker has one. An execution that ends later fails with the class `timeout`,
    /// whatever it returns.
    fn time_limit(&self) -> Option<Duration> {
        None
    }
}

/// The work is done.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Done {
    /// Kept as `result` in the archive.
    pub result: Option<Bson>,
}

impl Done {
    /// Done, with a result for the archive.
    ///
    /// # Errors
    /// [`NotDone::GiveUp`] when the result cannot be expressed in BSON: another attempt would not help.
    pub fn with(result: impl Serialize) -> Result<Self, NotDone> {
        match bson::serialize_to_bson(&result) {
            Ok(result) => Ok(Self { result: Some(result) }),
            Err(error) => Err(NotDone::GiveUp(Failure::new("result", format!("the result cannot be stored: {error}")))),
        }
    }
}

/// The work is not done.
#[derive(Clone, Debug, PartialEq)]
pub enum NotDone {
    /// The execution failed. The job's retry policy decides whether there is another attempt.
    Failed(Failure),
    /// The execution failed and another attempt is pointless. The retry policy is not asked.
    GiveUp(Failure),
    /// The work cannot be done yet, and that is no failure. The job runs again, and this run does not count against the retry policy.
    Snooze {
        /// How long to wait; when `None`, the policy's delay, or 30 seconds if the policy has none.
        after: Option<Duration>,
        /// The reason, for the history.
        reason: Failure,
    },
    /// Nothing was done, because the machine lacks a resource: open files, processes, memory. The job is released as it was, uncounted and
    /// without an entry in its history. The worker runs fewer jobs for a while.
    NoResources(Failure),
    /// The execution stopped early, as [`Context::cancelled`] had asked.
    Stopped(Failure),
}

impl NotDone {
    /// A failure of this class. Retry policies can select by the class.
    pub fn failed(class: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Failed(Failure::new(class, message))
    }

    /// The failure that goes into the history.
    pub fn failure(&self) -> &Failure {
        match self {
            Self::Failed(failure) | Self::GiveUp(failure) | Self::NoResources(failure) | Self::Stopped(failure) => failure,
            Self::Snooze { reason, .. } => reason,
        }
    }
}

impl<E: Error + 'static> From<E> for NotDone {
    fn from(error: E) -> Self {
        let mut sources = Vec::new();
        let mut next = error.source();
        while let Some(source) = next {
            sources.push(source.to_string());
            next = source.source();
        }
        let failure = Failure::new(std::any::type_name::<E>(), error.to_string());
        Self::Failed(if sources.is_empty() { failure } else { failure.with_trace(sources.join("\n")) })
    }
}
