//! How a worker works: the same settings for the stock worker, for a program of one's own, and inside an application.

use std::time::Duration;

use recruiter_common::{enqueue::LONGEST_NAME, roster::WorkOn};

/// Jobs at a time when nothing is said.
pub const DEFAULT_CONCURRENCY: u32 = 10;
/// The most jobs at a time.
pub const MOST_CONCURRENCY: u32 = 10_000;
/// How long running jobs may go on after a stop was asked for, when nothing is said.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(30);
/// Heartbeat interval when nothing is said.
pub const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(5);
/// Lease when nothing is said.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(20);
/// Poll interval when nothing is said.
pub const DEFAULT_POLL: Duration = Duration::from_secs(1);

/// How a worker works.
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

/// Settings of a worker that cannot be used. The text names them by the flags of the stock worker.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidConfig {
    /// Too few or too many jobs at a time.
    #[error("--concurrency must be 1 to {MOST_CONCURRENCY}")]
    Concurrency,
    /// An interval of zero.
    #[error("--heartbeat and --poll must be above zero")]
    NoInterval,
    /// A lease that a single slow heartbeat would end.
    #[error(
        "--lease ({}) must be at least three heartbeats (--heartbeat {}), or one slow answer would stop the work",
        humantime::format_duration(*lease),
        humantime::format_duration(*heartbeat)
    )]
    ShortLease {
        /// The lease.
        lease: Duration,
        /// The heartbeat interval.
        heartbeat: Duration,
    },
    /// A lease after which nobody would notice a death.
    #[error("--lease must be at most a day: nobody would notice a death before")]
    LongLease,
    /// A text that is no name of a group.
    #[error("--work-on: {group:?} cannot be the name of a group (1 to {LONGEST_NAME} bytes, no NUL)")]
    Group {
        /// The text.
        group: String,
    },
    /// A memory limit where the memory of a process cannot be read.
    #[error("a memory limit needs Linux, where a process can read how much memory it has")]
    MemoryLimit,
}

impl WorkerConfig {
    /// Works on these groups only; on every group when nothing is said, or when one of them is `*`.
    #[must_use]
    pub fn groups(mut self, groups: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.groups = groups.into_iter().map(Into::into).collect();
        self
    }

    /// Runs so many jobs at a time, at most [`MOST_CONCURRENCY`]; [`DEFAULT_CONCURRENCY`] when nothing is said.
    #[must_use]
    pub fn concurrency(mut self, jobs: u32) -> Self {
        self.concurrency = jobs;
        self
    }

    /// Limits jobs whose workable has no time limit of its own; none when nothing is said.
    #[must_use]
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = Some(limit);
        self
    }

    /// Ends the worker when the process has more resident memory than so many bytes ([`Ended::MemoryLimit`](crate::Ended::MemoryLimit)); never
    /// when nothing is said. For Linux.
    #[must_use]
    pub fn memory_limit(mut self, bytes: u64) -> Self {
        self.memory_limit = Some(bytes);
        self
    }

    /// Lets running jobs go on for so long after a stop was asked for; [`DEFAULT_GRACE`] when nothing is said. Then they are interrupted.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Sends heartbeats so often; [`DEFAULT_HEARTBEAT`] when nothing is said.
    #[must_use]
    pub fn heartbeat(mut self, interval: Duration) -> Self {
        self.heartbeat = interval;
        self
    }

    /// Trusts for so long after a heartbeat that no cleaner retires this worker; [`DEFAULT_LEASE`] when nothing is said. Cleaners wait longer.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Starts an assigned job within this time even if every hint is lost; [`DEFAULT_POLL`] when nothing is said.
    #[must_use]
    pub fn poll(mut self, interval: Duration) -> Self {
        self.poll = interval;
        self
    }

    /// Checks what single settings cannot know of each other. [`Worker::run`](crate::Worker::run) does it as well.
    ///
    /// # Errors
    /// With what to change.
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
        match self.groups.iter().find(|group| group.is_empty() || group.len() > LONGEST_NAME || group.contains('\0')) {
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
