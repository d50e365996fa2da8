//! The default settings of a class.

use std::time::Duration;

use crate::{
    job::{Keep, Priority, Settings, StoredPolicy},
    retry_policy::{InvalidPolicy, RetryPolicy},
};

/// Default settings of the jobs of a class. A setting that is missing here too has the default of all jobs.
#[derive(Clone, Debug, Default)]
#[must_use = "these are the defaults of a class only when `Workable::defaults` returns them"]
pub struct Defaults {
    /// Without the priority and the retry policy, which may be invalid.
    pub(super) settings: Settings,
    pub(super) priority: Option<AnyPriority>,
    pub(super) retry: Option<Retry>,
    pub(super) time_limit: Option<Duration>,
}

impl Defaults {
    /// Sets the group: only workers that work on it get these jobs.
    pub fn group(mut self, group: impl Into<String>) -> Self {
        self.settings.group = Some(group.into());
        self
    }

    /// Sets the priority, a [`Priority`] or a number from 0 to 9.
    pub fn priority(mut self, priority: impl Into<AnyPriority>) -> Self {
        self.priority = Some(priority.into());
        self
    }

    /// Sets the retry policy, which decides what follows a failure.
    pub fn retry(mut self, policy: impl Into<Retry>) -> Self {
        self.retry = Some(policy.into());
        self
    }

    /// Sets what is kept of a job after its end. With [`Keep::Failures`] nothing is kept of a success.
    pub fn keep(mut self, keep: Keep) -> Self {
        self.settings.keep = Some(keep);
        self
    }

    /// Sets the time limit of one execution. A worker asks the workable for the limit, and the workable returns this
    /// one by default.
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = Some(limit);
        self
    }

    /// The time limit of one execution, if one was set.
    pub fn given_time_limit(&self) -> Option<Duration> {
        self.time_limit
    }
}

/// A priority for a job: a [`Priority`], or a number. If the number is not from 0 to 9, the enqueueing call returns an error.
#[derive(Clone, Copy, Debug)]
pub struct AnyPriority(pub(super) Result<Priority, i64>);

impl From<Priority> for AnyPriority {
    fn from(priority: Priority) -> Self {
        Self(Ok(priority))
    }
}

impl From<i32> for AnyPriority {
    fn from(number: i32) -> Self {
        Self(u8::try_from(number).ok().and_then(Priority::new).ok_or(number.into()))
    }
}

impl From<u8> for AnyPriority {
    fn from(number: u8) -> Self {
        i32::from(number).into()
    }
}

/// A retry policy for a job: a reference to a policy, or the result of a policy's constructor. If the constructor
/// failed, the enqueueing call returns its error.
#[derive(Clone, Debug)]
pub struct Retry(pub(super) Result<StoredPolicy, InvalidPolicy>);

impl<P: RetryPolicy + ?Sized> From<&P> for Retry {
    fn from(policy: &P) -> Self {
        Self(Ok(StoredPolicy::from(policy)))
    }
}

impl<P: RetryPolicy> From<Result<P, InvalidPolicy>> for Retry {
    fn from(made: Result<P, InvalidPolicy>) -> Self {
        match made {
            Ok(policy) => Self::from(&policy),
            Err(problem) => Self(Err(problem)),
        }
    }
}
