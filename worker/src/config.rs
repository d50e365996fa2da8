//! The settings of a worker: the same for the stock worker, for a custom worker program, and inside an application.

use std::time::Duration;

use recruiter_common::{
    enqueue::LONGEST_NAME,
    store::{WorkOn, check_trimmed_name},
};

/// Default number of jobs at a time.
pub const DEFAULT_CONCURRENCY: u32 = 10;
/// Maximum number of jobs at a time.
pub const MOST_CONCURRENCY: u32 = 10_000;
/// Default time for running jobs to end after a stop was requested. With `kill_after`, it fits into the 30 s of a container platform.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(20);
/// Default heartbeat interval.
pub const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(5);
/// Default lease.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(20);
/// Default poll interval.
pub const DEFAULT_POLL: Duration = Duration::from_secs(1);

/// The settings of a worker.
///
/// ```
/// use std::time::Duration;
///
/// use recruiter_worker::WorkerConfig;
///
/// let config = WorkerConfig::default().groups(["mail", "invoices"]).concurrency(4).grace(Duration::from_secs(10));
/// assert!(config.validate().is_ok());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerConfig {
    pub(crate) groups: Vec<String>,
    pub(crate) concurrency: u32,
    pub(crate) time_limit: Option<Duration>,
    pub(crate) memory_limit: Option<u64>,
    pub(crate) grace: Duration,
    pub(crate) heartbeat: Duration,
    pub(crate) lease: Duration,
    pub(crate) poll: Duration,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        Self {
            groups: Vec::new(),
            concurrency: DEFAULT_CONCURRENCY,
            time_limit: None,
            memory_limit: None,
            grace: DEFAULT_GRACE,
            heartbeat: DEFAULT_HEARTBEAT,
            lease: DEFAULT_LEASE,
            poll: DEFAULT_POLL,
        }
    }
}

/// Invalid settings of a worker. The message names them by the flags of the stock worker.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidConfig {
    /// Too few or too many slots.
    #[error("--concurrency must be 1 to {MOST_CONCURRENCY}")]
    Concurrency,
    /// An interval of zero.
    #[error("--heartbeat and --poll must be above zero")]
    NoInterval,
    /// A lease that would expire because of a single slow heartbeat.
    #[error(
        "--lease ({}) must be at least three heartbeats (--heartbeat {}), so that one slow reply does not stop the work",
        humantime::format_duration(*lease),
        humantime::format_duration(*heartbeat)
    )]
    ShortLease {
        /// The lease.
        lease: Duration,
        /// The heartbeat interval.
        heartbeat: Duration,
    },
    /// A lease that would delay the detection of a death too much.
    #[error("--lease must be at most 1day: cleaners detect a death only after the lease")]
    LongLease,
    /// An invalid name of a group.
    #[error("--work-on: {group:?} is not a valid group name (1 to {LONGEST_NAME} bytes, no NUL, no blank at its begin or end)")]
    Group {
        /// The text.
        group: String,
    },
    /// A memory limit on a system where a process cannot read its memory use.
    #[error("--memory-limit works only on Linux, where a process can read its memory use")]
    MemoryLimit,
}

impl WorkerConfig {
    /// Sets the groups to work on. Default: all groups, also if one of them is `*`.
    #[must_use]
    pub fn groups(mut self, groups: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.groups = groups.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the number of slots: jobs to run at a time, at most [`MOST_CONCURRENCY`]. Default: [`DEFAULT_CONCURRENCY`].
    #[must_use]
    pub fn concurrency(mut self, jobs: u32) -> Self {
        self.concurrency = jobs;
        self
    }

    /// Sets the time limit of each job whose workable sets none. Default: no limit.
    #[must_use]
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = Some(limit);
        self
    }

    /// Sets the resident memory of the process, in bytes, above which the worker ends ([`Ended::MemoryLimit`](crate::Ended::MemoryLimit)).
    /// Default: no limit. Linux only.
    #[must_use]
    pub fn memory_limit(mut self, bytes: u64) -> Self {
        self.memory_limit = Some(bytes);
        self
    }

    /// Sets the time for running jobs to end after a stop was requested, before they are interrupted. Default: [`DEFAULT_GRACE`].
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Sets the heartbeat interval. Default: [`DEFAULT_HEARTBEAT`].
    #[must_use]
    pub fn heartbeat(mut self, interval: Duration) -> Self {
        self.heartbeat = interval;
        self
    }

    /// Sets the time after a heartbeat for which the worker may start jobs. Default: [`DEFAULT_LEASE`]. Cleaners wait longer before they
    /// retire the worker.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Sets the maximum delay of an assigned job if hints are lost. Default: [`DEFAULT_POLL`]. Without keep-alives the worker polls twice
    /// in this time.
    #[must_use]
    pub fn poll(mut self, interval: Duration) -> Self {
        self.poll = interval;
        self
    }

    /// Checks the settings, alone and against each other. [`Worker::run`](crate::Worker::run) calls it as well.
    ///
    /// # Errors
    /// The message names the flag to change.
    pub fn validate(&self) -> Result<(), InvalidConfig> {
        if !(1..=MOST_CONCURRENCY).contains(&self.concurrency) {
            return Err(InvalidConfig::Concurrency);
        }
        if self.heartbeat.is_zero() || self.poll.is_zero() {
            return Err(InvalidConfig::NoInterval);
        }
        if self.lease < self.heartbeat.saturating_mul(3) {
            return Err(InvalidConfig::ShortLease { lease: self.lease, heartbeat: self.heartbeat });
        }
        if self.lease > Duration::from_secs(24 * 3600) {
            return Err(InvalidConfig::LongLease);
        }
        if self.memory_limit.is_some() && !cfg!(target_os = "linux") {
            return Err(InvalidConfig::MemoryLimit);
        }
        match self.groups.iter().find(|group| check_trimmed_name(group).is_err()) {
            Some(group) => Err(InvalidConfig::Group { group: group.clone() }),
            None => Ok(()),
        }
    }

    /// The groups, with `*` for all.
    pub(crate) fn work_on(&self) -> WorkOn {
        if self.groups.is_empty() || self.groups.iter().any(|group| group == "*") {
            WorkOn::All
        } else {
            WorkOn::Groups(self.groups.clone())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_whose_jobs_cannot_be_enqueued_is_refused() {
        for group in ["", "mail ", "\tmail", "a\0b"] {
            let refused = WorkerConfig::default().groups(["mail", group]).validate();
            assert_eq!(refused, Err(InvalidConfig::Group { group: group.into() }));
        }
    }
}
