//! What the view reads from MongoDB, again and again. Each reading is bounded, and waits for [`RARER`] times its own duration before the
//! next one, so that a view left open costs a busy database little.

use std::collections::BTreeMap;

use chrono::TimeDelta;
use recruiter_common::{
    JobFilter, Page,
    ids::JobId,
    instant::Instant,
    job::{Job, JobState},
    store::{FollowedRedaction, Redaction, Store, StoreError},
    workers::{Leader, Worker},
};

use super::history::{History, Point};
use crate::views::counts::{GroupCounts, counted};

/// The next reading begins after this many times the time that the last one took.
pub(super) const RARER: u32 = 10;
/// Maximum number of failures shown: the newest ones.
const FAILURES: u16 = 50;
/// Period whose failures are read at first.
const FAILURES_SINCE: TimeDelta = TimeDelta::minutes(10);
/// Failures of this period are read again, because a job may be written later than it ended.
const OVERLAP: TimeDelta = TimeDelta::seconds(10);

/// A job that has failed.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Failed {
    pub(super) job: JobId,
    pub(super) class: String,
    pub(super) group: String,
    pub(super) error: String,
    pub(super) ended_at: Instant,
}

impl Failed {
    fn of(job: &Job) -> Option<Self> {
        let JobState::Archived { why } = &job.state else { return None };
        let execution = job.last_execution.as_ref()?;
        let message = execution.message.as_deref().unwrap_or_default();
        let error = execution.class.as_ref().map_or_else(|| why.to_string(), |class| format!("{class}: {message}"));
        Some(Self { job: job.id, class: job.class.clone(), group: job.settings.group().into(), error, ended_at: execution.ended_at? })
    }
}

/// The state of everything at one time.
#[derive(Clone, Debug)]
pub(super) struct Reading {
    pub(super) at: Instant,
    pub(super) leader: Leader,
    pub(super) groups: Vec<GroupCounts>,
    pub(super) workers: Vec<Worker>,
    pub(super) failures: Vec<Failed>,
    /// The last seconds, newest first.
    pub(super) points: Vec<Point>,
    /// Median and 99th percentile in milliseconds.
    pub(super) latency: Option<(u64, u64)>,
}

/// Reads, and remembers what it has read before.
pub(super) struct Reader {
    store: Store,
    redaction: FollowedRedaction,
    /// By which the failures below are shown.
    redacted_by: Redaction,
    history: History,
    failures: Vec<Failed>,
    failures_until: Option<Instant>,
}

impl Reader {
    pub(super) fn new(store: Store, redaction: FollowedRedaction) -> Self {
        Self {
            store,
            redaction,
            redacted_by: Redaction::default(),
            history: History::default(),
            failures: Vec::new(),
            failures_until: None,
        }
    }

    pub(super) async fn next(&mut self) -> Result<Reading, StoreError> {
        let store = &self.store;
        let now = store.now();
        let ended = store.finished(self.history.since(now)).await?;
        let not_kept = store.not_kept(now - TimeDelta::seconds(10)).await?;
        self.history.add(now, &ended, &not_kept);
        let (groups, _) = counted(store, now, &self.history.rates()).await?;
        self.read_failures(now).await?;
        Ok(Reading {
            at: now,
            leader: self.store.leader().await?,
            groups,
            workers: self.store.workers().list().await?.0,
            failures: self.failures.clone(),
            points: self.history.points(),
            latency: self.history.latency(),
        })
    }

    /// Reads the failures since the last reading. In a large archive with few failures the first search may be too long: it is made shorter.
    async fn read_failures(&mut self, now: Instant) -> Result<(), StoreError> {
        let redaction = self.redaction.current().await;
        if self.redacted_by != *redaction {
            self.redacted_by = redaction.clone();
            self.failures.clear();
            self.failures_until = None;
        }
        let since = self.failures_until.unwrap_or(now - FAILURES_SINCE) - OVERLAP;
        let found = match self.store.jobs(&JobFilter::default().failed().since(since), Page::first(FAILURES)).await {
            Err(error) if error.is_too_slow() => Vec::new(),
            found => found?.jobs,
        };
        let new = found.into_iter().filter_map(|job| Failed::of(&Job::try_from(self.redacted_by.job(job)).ok()?));
        let mut all: BTreeMap<JobId, Failed> = new.chain(self.failures.drain(..)).map(|failed| (failed.job, failed)).collect();
        self.failures = std::mem::take(&mut all).into_values().collect();
        self.failures.sort_by_key(|failed| std::cmp::Reverse((failed.ended_at, failed.job)));
        self.failures.truncate(FAILURES.into());
        self.failures_until = Some(now);
        Ok(())
    }
}
