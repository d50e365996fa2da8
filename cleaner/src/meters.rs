//! What the cleaner measures: its duties, and what they have found and done.

use std::time::Duration;

use recruiter_common::meters::{
    Counter, DUTIES_FAILED, DUTY_SECONDS, FILES_PRUNED, Histogram, JOBS_EXPIRED, JOBS_PRUNED, JOBS_RESCUED, RESCUES_FAILED, WORKERS_RETIRED,
};

/// The handles of a cleaner.
pub(crate) struct Meters {
    pub(crate) poll: DutyMeters,
    pub(crate) sweep: DutyMeters,
    pub(crate) expiry: DutyMeters,
    pub(crate) pruning: DutyMeters,
    pub(crate) retired_gone: Counter,
    pub(crate) retired_silent: Counter,
    rescued_retried: Counter,
    rescued_archived: Counter,
    pub(crate) rescues_failed: Counter,
    expired: Counter,
    jobs_pruned: Counter,
    files_pruned: Counter,
}

/// The handles of one duty.
pub(crate) struct DutyMeters {
    seconds: Histogram,
    failed: Counter,
}

impl Meters {
    pub(crate) fn new() -> Self {
        Self {
            poll: DutyMeters::new("poll"),
            sweep: DutyMeters::new("sweep"),
            expiry: DutyMeters::new("expiry"),
            pruning: DutyMeters::new("pruning"),
            retired_gone: WORKERS_RETIRED.counter(&["gone"]),
            retired_silent: WORKERS_RETIRED.counter(&["silent"]),
            rescued_retried: JOBS_RESCUED.counter(&["retried"]),
            rescued_archived: JOBS_RESCUED.counter(&["archived"]),
            rescues_failed: RESCUES_FAILED.counter(&[]),
            expired: JOBS_EXPIRED.counter(&[]),
            jobs_pruned: JOBS_PRUNED.counter(&[]),
            files_pruned: FILES_PRUNED.counter(&[]),
        }
    }

    /// Notes the jobs of dead workers that run again, and those that were archived.
    pub(crate) fn rescued(&self, again: usize, archived: usize) {
        add(&self.rescued_retried, again);
        add(&self.rescued_archived, archived);
    }

    /// Notes jobs that were archived because they were not started in time.
    pub(crate) fn expired(&self, jobs: usize) {
        add(&self.expired, jobs);
    }

    /// Notes jobs that were deleted from the archive.
    pub(crate) fn pruned(&self, jobs: u64) {
        self.jobs_pruned.increment(jobs);
    }

    /// Notes files and uploads that were deleted.
    pub(crate) fn pruned_files(&self, files: u64) {
        self.files_pruned.increment(files);
    }
}

impl DutyMeters {
    fn new(duty: &str) -> Self {
        Self { seconds: DUTY_SECONDS.histogram(&[duty]), failed: DUTIES_FAILED.counter(&[duty]) }
    }

    /// Notes one pass.
    pub(crate) fn passed(&self, took: Duration, has_failed: bool) {
        self.seconds.record(took);
        add(&self.failed, has_failed.into());
    }
}

fn add(counter: &Counter, count: usize) {
    counter.increment(u64::try_from(count).unwrap_or(u64::MAX));
}
