//! Turns of workers.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::RoundId,
    store::{AssignedJobs, Channel, Lane},
};

/// One assignment to one worker, until the worker answers it by offering slots again.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    pub(crate) round: RoundId,
    /// The worker, its jobs, and the permits of those that are limited.
    pub(crate) assignment: AssignedJobs,
    /// The channel that the worker reads hints from.
    pub(crate) channel: Channel,
    /// Whether the worker had more free slots than jobs: then it answers when it has started them, and not when one of its jobs ends.
    leaves_slots: bool,
    /// When the assignment was written.
    since: Monotonic,
    /// Lanes in which a search has skipped a job of this turn that is as it was assigned. If the worker does not start it, a hint says so.
    pub(crate) skipped_in: BTreeSet<Lane>,
    /// Lanes in which a search has skipped a job of this turn that has another date by now: it has run, and is due again.
    pub(crate) due_again_in: BTreeSet<Lane>,
}

impl Turn {
    pub(crate) fn new(round: RoundId, assignment: AssignedJobs, channel: Channel, leaves_slots: bool, since: Monotonic) -> Self {
        let (skipped_in, due_again_in) = (BTreeSet::new(), BTreeSet::new());
        Self { round, assignment, channel, leaves_slots, since, skipped_in, due_again_in }
    }

    /// The time since the assignment was written.
    pub(super) fn age(&self, at: Monotonic) -> Duration {
        at.duration_since(self.since)
    }

    /// The time until the worker had started the jobs, if it was answered at `at`. Unknown for a worker whose slots were all filled: it
    /// answers when a job ends.
    pub(crate) fn travel(&self, at: Monotonic) -> Option<Duration> {
        let has_interval = self.assignment.permits.values().any(|permit| permit.between.is_some());
        (self.leaves_slots && has_interval).then(|| self.age(at))
    }
}
