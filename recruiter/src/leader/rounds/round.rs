//! One round: due jobs are assigned to the available workers.
//!
//! 1. Read the available workers of this term: in a full scan, after a hint that a worker accepts jobs, and when the cached roster is stale.
//!    Other rounds use the cache.
//! 2. Fill the stale windows of lanes (`search`).
//! 3. Plan (`plan`): a pure function gives jobs to free slots, and to workers that accept jobs ahead.
//! 4. Assign with one `update` command (`assign`).
//! 5. Send one hint with the assignments to each channel that they concern, and to connected workers.
//!
//! A full scan also lists all lanes that have jobs, reads the settings, and sends the hints of assignments again that have been in flight for
//! a while. It searches jobs that become due within the next two scans.

use std::time::{Duration, Instant as Monotonic};

use recruiter_common::{
    ids::{LeaseTerm, RoundId},
    instant::Instant,
    store::{AssignedJobs, Channel, ScheduledJob, StoreError},
};

use super::{
    keep_alive::KeepAlive,
    trigger::{Alarms, Trigger},
};
use crate::leader::{
    admission::Admission,
    book::{Book, Turn},
    database::Database,
    fleet::Fleet,
    lanes::{Lanes, search::Searching},
    plan::plan,
};

/// A search finds jobs that become due within two scan intervals and this margin. Clocks differ by less than the margin.
const HORIZON: Duration = Duration::from_secs(1);

/// The result of a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    /// Number of assigned jobs.
    pub(crate) assigned: usize,
    /// Number of assigned jobs that a scan has found, and that were due without a hint.
    pub(crate) unannounced: usize,
    /// Number of jobs that the workers accepted before the round: in free slots and ahead.
    pub(crate) slots: usize,
    /// When the next known job becomes due, if a worker accepts it.
    pub(crate) next_due: Option<Instant>,
    /// When the next round is due even without a trigger.
    pub(crate) retry_at: Option<Monotonic>,
    /// A later term was found: this one is over.
    pub(crate) is_over: bool,
}

/// The leader's caches between rounds. No cache is needed for safety.
#[derive(Clone, Debug, Default)]
pub(crate) struct Assigning {
    /// The workers that accept jobs.
    pub(super) fleet: Fleet,
    /// The jobs that wait.
    pub(crate) lanes: Lanes,
    /// The jobs that are assigned.
    pub(crate) book: Book,
    /// The settings, and the permits in use.
    pub(crate) admission: Admission,
    pub(crate) keep_alive: KeepAlive,
    pub(crate) alarms: Alarms,
    /// How many jobs of which group the last round has assigned; a group may be there several times.
    pub(super) assigned: Vec<(String, usize)>,
}

impl Assigning {
    /// Adds assignments of earlier leaders, in their order. If two workers have a job, it is in flight to the one that got it last.
    pub(crate) fn inherit(&mut self, assignments: Vec<(RoundId, AssignedJobs)>, at: Monotonic) {
        for (round, assignment) in assignments {
            // The worker's channel is unknown, so its hint cannot be sent again. Without keep-alives the worker polls.
            self.keep_alive.failed(at);
            self.book.begin(Turn::new(round, assignment, Channel::default(), false, at), std::iter::repeat(None));
        }
    }

    /// Drops the caches that a failed round may have made wrong.
    pub(crate) fn forget(&mut self) {
        self.fleet.forget();
        self.lanes.forget();
        self.admission.cells.forget();
        // The failed round may have written an assignment without a hint.
        self.keep_alive.failed(Monotonic::now());
    }

    /// One round. The next full scan is due after `every`.
    pub(crate) async fn tick(
        &mut self,
        store: &impl Database,
        term: LeaseTerm,
        trigger: Trigger,
        every: Duration,
    ) -> Result<Summary, StoreError> {
        self.assigned.clear();
        let at = store.monotonic();
        self.read(store, term, &trigger, at).await?;
        let now = store.now();
        let slots = self.fleet.slots();
        self.lanes.add_groups(trigger.groups);
        if slots.is_empty() {
            self.lanes.without_slots(trigger.full_scan);
            self.announce(trigger.announced, at);
            return Ok(Summary { next_due: self.admission.closures.next_change(), ..Summary::default() });
        }
        if trigger.unannounced && !trigger.full_scan {
            self.lanes.request_audit();
        }
        let mut searching = Searching {
            store,
            slots: &slots,
            kinds: self.fleet.kinds(),
            lanes: &mut self.lanes,
            admission: &mut self.admission,
            book: &mut self.book,
            now,
            until: now + every * 2 + HORIZON,
            at,
        };
        searching.run().await?;
        self.announce(trigger.announced, at);
        self.lanes.windows.learn_kinds(self.fleet.kinds());
        let plan = plan(self.fleet.workers(), self.lanes.windows.waiting(), &self.book.refusals, &mut self.admission, now);
        let Some(assigned) = self.assign(store, term, plan).await? else { return Ok(Summary { is_over: true, ..Summary::default() }) };
        let unannounced = self.lanes.count_unannounced(&assigned);
        let slots_before = slots.values().sum();
        let slots = self.fleet.slots();
        let (next_due, retry_at) = self.lanes.windows.next_round(&slots, &self.admission, now);
        let next_due = next_due.into_iter().chain(self.admission.closures.next_change()).min();
        // Another round follows at once if the cached roster was stale, or if some lanes are not listed or searched yet.
        let is_incomplete = self.fleet.is_unknown() || self.lanes.are_incomplete(!slots.is_empty());
        let retry_at = if is_incomplete { Some(at) } else { retry_at };
        Ok(Summary { assigned: assigned.len(), unannounced, slots: slots_before, next_due, retry_at, is_over: false })
    }

    /// Adds announced jobs, except those of which the book knows more.
    fn announce(&mut self, jobs: Vec<ScheduledJob>, at: Monotonic) {
        self.lanes.announce(jobs, |job| !self.book.is_assigned(job, at));
    }
}
