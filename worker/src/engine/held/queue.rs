//! The queue of jobs to start, in their order.
//!
//! Every assigned job goes through this queue, also one for a free slot: the next start takes it out at once. The other queued jobs are the
//! jobs *ahead*. A limited job that was assigned ahead waits for the permits of another job before it enters the queue, unless it is locked
//! ahead of them.

use std::{
    collections::{BTreeMap, HashMap},
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
    ready: BTreeMap<Position, Queued>,
    /// Limited jobs that were assigned ahead. Each waits for the permits of another job of its lane.
    limited: HashMap<PermitLane, BTreeMap<Position, Queued>>,
    bytes: usize,
    /// No job waits since before this instant.
    oldest: Option<Monotonic>,
}

struct Queued {
    job: Startable,
    since: Monotonic,
}

impl Queue {
    pub(super) fn add(&mut self, job: Startable, now: Monotonic) {
        if self.is_empty() {
            self.oldest = Some(now);
        }
        self.bytes += job.bytes();
        let queue = if job.waits_for_permits() { self.limited.entry(job.permit_lane()).or_default() } else { &mut self.ready };
        queue.insert(job.position(), Queued { job, since: now });
    }

    /// The size of all jobs.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Gives these permits to the first job that waits for permits of their lane.
    pub(super) fn give(&mut self, permits: &Permits) -> Option<JobId> {
        let of_lane = self.limited.get_mut(&permits.lane)?;
        let (position, mut queued) = of_lane.pop_first()?;
        if of_lane.is_empty() {
            self.limited.remove(&permits.lane);
        }
        queued.job.take_permits(&permits.names);
        self.ready.insert(position, queued);
        Some(position.2)
    }

    /// The place of the first job that waits for permits of this lane.
    pub(super) fn first_of(&self, lane: &PermitLane) -> Option<Position> {
        self.limited.get(lane)?.first_key_value().map(|(position, _)| *position)
    }

    /// Removes the first job that waits for permits of this lane, if it may be locked ahead. It is started under these permits, and gets them
    /// later.
    pub(super) fn pop_of(&mut self, lane: &PermitLane, names: &[String]) -> Option<Startable> {
        let of_lane = self.limited.get_mut(lane)?;
        let mut job = of_lane.first_entry().filter(|first| first.get().job.may_be_locked_ahead())?.remove().job;
        if of_lane.is_empty() {
            self.limited.remove(lane);
        }
        self.bytes = self.bytes.saturating_sub(job.bytes());
        job.take_permits(names);
        Some(job)
    }

    /// The place of the first job that can start.
    pub(super) fn first(&self) -> Option<Position> {
        self.ready.first_key_value().map(|(position, _)| *position)
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
    pub(super) fn without_permits(&mut self, has_permits: impl Fn(&PermitLane) -> bool) -> Vec<Startable> {
        let stranded = self.limited.extract_if(|lane, _| !has_permits(lane)).flat_map(|(_, of_lane)| of_lane.into_values());
        let stranded = stranded.collect();
        self.removed(stranded)
    }

    /// Removes the jobs that have waited for so long.
    pub(super) fn overdue(&mut self, limit: Duration, now: Monotonic) -> Vec<Startable> {
        if self.oldest().is_none_or(|oldest| now.duration_since(oldest) < limit) {
            return Vec::new();
        }
        let mut overdue = Vec::new();
        for queue in self.limited.values_mut().chain([&mut self.ready]) {
            let old = queue.extract_if(.., |_, queued| now.duration_since(queued.since) >= limit);
            overdue.extend(old.map(|(_, queued)| queued));
        }
        self.limited.retain(|_, of_lane| !of_lane.is_empty());
        self.oldest = self.limited.values().flatten().chain(&self.ready).map(|(_, queued)| queued.since).min();
        self.removed(overdue)
    }

    /// No job waits since before this instant. It is when the first of them was added, once [`overdue`](Self::overdue) has looked.
    pub(super) fn oldest(&self) -> Option<Monotonic> {
        self.oldest.filter(|_| !self.is_empty())
    }

    fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.limited.is_empty()
    }

    /// Removes all jobs.
    pub(super) fn clear(&mut self) -> Vec<Startable> {
        let limited = std::mem::take(&mut self.limited).into_values();
        let jobs = limited.chain([std::mem::take(&mut self.ready)]).flat_map(BTreeMap::into_values).collect();
        self.removed(jobs)
    }

    fn removed(&mut self, jobs: Vec<Queued>) -> Vec<Startable> {
        let removed: Vec<Startable> = jobs.into_iter().map(|queued| queued.job).collect();
        self.bytes = self.bytes.saturating_sub(removed.iter().map(Startable::bytes).sum());
        removed
    }
}
