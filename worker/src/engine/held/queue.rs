//! The queue of jobs to start, in their order.
//!
//! Every assigned job goes through this queue, also one for a free slot: the next start takes it out at once. The other queued jobs are the
//! jobs *ahead*. A limited job that was assigned ahead waits for the permits of another job before it enters the queue.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{ids::JobId, store::Position};

use super::{
    permits::Permits,
    startable::{PermitLane, Startable},
};

/// The jobs that wait for their start.
#[derive(Default)]
pub(super) struct Queue {
    ready: BTreeMap<Position, Waiting>,
    /// Limited jobs that were assigned ahead. Each waits for the permits of another job.
    limited: BTreeMap<Position, Waiting>,
    bytes: usize,
}

struct Waiting {
    job: Startable,
    since: Monotonic,
}

impl Queue {
    pub(super) fn add(&mut self, job: Startable, now: Monotonic) {
        self.bytes += job.bytes();
        let queue = if job.waits_for_permits() { &mut self.limited } else { &mut self.ready };
        queue.insert(job.position(), Waiting { job, since: now });
    }

    /// The size of all jobs.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Gives these permits to the first job that waits for permits of their lane.
    pub(super) fn give(&mut self, permits: &Permits) -> Option<JobId> {
        let position = *self.limited.iter().find(|(_, waiting)| waiting.job.is_of(&permits.lane))?.0;
        let mut waiting = self.limited.remove(&position)?;
        waiting.job.take_permits(&permits.names);
        self.ready.insert(position, waiting);
        Some(position.2)
    }

    /// Removes the first job that can start, if it is like this.
    pub(super) fn pop_if(&mut self, is_wanted: impl Fn(&Startable) -> bool) -> Option<Startable> {
        let first = self.ready.first_entry().filter(|first| is_wanted(&first.get().job))?.remove().job;
        self.bytes = self.bytes.saturating_sub(first.bytes());
        Some(first)
    }

    /// Whether jobs wait for permits.
    pub(super) fn has_limited(&self) -> bool {
        !self.limited.is_empty()
    }

    /// Removes the jobs that wait for permits of other lanes than these.
    pub(super) fn without_permits(&mut self, has_permits: impl Fn(&PermitLane) -> bool) -> Vec<JobId> {
        let stranded = self.limited.extract_if(.., |_, waiting| !has_permits(&waiting.job.permit_lane())).map(|(_, waiting)| waiting);
        let stranded = stranded.collect();
        self.removed(stranded)
    }

    /// Removes the jobs that have waited for so long.
    pub(super) fn overdue(&mut self, limit: Duration, now: Monotonic) -> Vec<JobId> {
        let mut overdue = Vec::new();
        for queue in [&mut self.ready, &mut self.limited] {
            overdue.extend(queue.extract_if(.., |_, waiting| now.duration_since(waiting.since) >= limit).map(|(_, waiting)| waiting));
        }
        self.removed(overdue)
    }

    /// Since when the first of them waits.
    pub(super) fn oldest(&self) -> Option<Monotonic> {
        self.ready.values().chain(self.limited.values()).map(|waiting| waiting.since).min()
    }

    /// Removes all jobs.
    pub(super) fn clear(&mut self) -> Vec<JobId> {
        self.ready.append(&mut self.limited);
        let jobs = std::mem::take(&mut self.ready).into_values().collect();
        self.removed(jobs)
    }

    fn removed(&mut self, jobs: Vec<Waiting>) -> Vec<JobId> {
        let removed = jobs.into_iter().map(|waiting| {
            self.bytes = self.bytes.saturating_sub(waiting.job.bytes());
            waiting.job.id()
        });
        removed.collect()
    }
}
