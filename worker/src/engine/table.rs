//! The table of the jobs that a session holds: one entry for each job, with its phase.
//!
//! The session reserves a slot before it locks a job, unless it locks the job ahead. The slot is free for another job as soon as the first
//! has been executed: a job that is locked ahead gets it at once. The entry of a job stays until its end is recorded and its hooks have
//! returned. The number of such entries is limited. Reports and heartbeats write the jobs of the table into the roster, where a cleaner
//! finds them.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant as Monotonic,
};

use recruiter_common::ids::JobId;
use tokio::sync::{Notify, oneshot};

use super::{
    phases::{Phase, Phases},
    shortage::Shortage,
};
use crate::{cancellation::Cancel, threads::Threads};

/// Maximum number of jobs without a slot whose ends are not recorded yet or whose hooks still run; with more slots than this, their number.
const UNRECORDED: u32 = 64;

/// The table. The session, its heartbeat and its running jobs share it.
#[derive(Debug, Default)]
pub(crate) struct Table {
    /// The number of slots.
    capacity: u32,
    /// The threads of the worker's blocking jobs.
    threads: Threads,
    phases: Mutex<Phases>,
    /// Jobs of unconfirmed starts. They have no slot.
    unconfirmed: Mutex<HashSet<JobId>>,
    /// Queued jobs, which are not started yet. They have no slot.
    prefetched: Mutex<HashSet<JobId>>,
    /// Number of executions that have ended since [`Table::take_ended`] was called.
    ended: AtomicUsize,
    pub(crate) has_ended: Notify,
    shortage: Mutex<Shortage>,
    /// Jobs that were locked ahead and are released, since [`Table::take_unlocked`] was called.
    unlocked: Mutex<Vec<JobId>>,
}

impl Table {
    pub(crate) fn new(capacity: u32, threads: Threads) -> Self {
        Self { capacity, threads, ..Self::default() }
    }

    /// The jobs that this worker may have locked before its next report, for the roster.
    pub(crate) fn working_on(&self) -> Vec<JobId> {
        // In the order in which a job moves, so that a job that moves meanwhile is not missed.
        let mut jobs: HashSet<JobId> = self.prefetched.lock().unwrap_or_else(PoisonError::into_inner).clone();
        jobs.extend(self.jobs());
        jobs.extend(self.unconfirmed().iter());
        jobs.into_iter().collect()
    }

    /// Sets the jobs of unconfirmed starts. Returns whether they have changed.
    pub(crate) fn set_unconfirmed(&self, jobs: HashSet<JobId>) -> bool {
        let mut unconfirmed = self.unconfirmed();
        let has_changed = *unconfirmed != jobs;
        *unconfirmed = jobs;
        has_changed
    }

    /// Sets the queued jobs.
    pub(crate) fn set_prefetched(&self, jobs: impl Iterator<Item = JobId>) {
        *self.prefetched.lock().unwrap_or_else(PoisonError::into_inner) = jobs.collect();
    }

    /// The jobs with an entry, without those whose end is recorded.
    pub(crate) fn jobs(&self) -> Vec<JobId> {
        self.phases().iter().filter(|(_, phase, _)| *phase != Phase::Recorded).map(|(job, ..)| job).collect()
    }

    /// The jobs whose start may be on its way.
    pub(crate) fn reserved(&self) -> Vec<JobId> {
        let is_reserved = |phase| matches!(phase, Phase::Reserved | Phase::LockedAhead(_) | Phase::Recalled);
        self.phases().iter().filter(|(_, phase, _)| is_reserved(*phase)).map(|(job, ..)| job).collect()
    }

    /// Notes that a job is started. It runs in the slot that was reserved for it, or waits for a slot if it is locked ahead. Returns its
    /// cancellation, and where the slot arrives that it waits for.
    pub(crate) fn fill(&self, job: JobId) -> (Arc<Cancel>, Option<oneshot::Receiver<()>>) {
        let mut phases = self.phases();
        match phases.get(job).map(|(phase, cancel)| (phase, cancel.clone())) {
            Some((Phase::LockedAhead(_) | Phase::Recalled, cancel)) => {
                let slot = phases.wait(job);
                self.give_slots(&mut phases);
                (cancel, Some(slot))
            }
            Some((Phase::Reserved | Phase::Running | Phase::Ended | Phase::Recorded, _)) | None => (phases.set(job, Phase::Running), None),
        }
    }

    /// Gives free slots to jobs that are locked ahead.
    pub(crate) fn fill_slots(&self) {
        self.give_slots(&mut self.phases());
    }

    fn give_slots(&self, phases: &mut Phases) {
        while phases.is_waiting() && self.count_free_of(phases) > 0 {
            phases.give_slot();
        }
    }

    /// A job that is locked ahead no longer waits for a slot. Returns whether it has got one.
    pub(crate) fn stop_waiting(&self, job: JobId) -> bool {
        let mut phases = self.phases();
        let has_slot = phases.recall(job);
        self.give_slots(&mut phases);
        has_slot
    }

    /// Releases all jobs that are locked ahead.
    pub(crate) fn recall(&self) {
        self.phases().recall_all();
    }

    /// Notes that a started job is not executed: its slot is free for another job.
    pub(crate) fn note_not_executed(&self, job: JobId) {
        let mut phases = self.phases();
        phases.change(job, Phase::Ended);
        self.give_slots(&mut phases);
    }

    /// Notes that a job that was locked ahead is released.
    pub(crate) fn note_unlocked(&self, job: JobId) {
        self.unlocked.lock().unwrap_or_else(PoisonError::into_inner).push(job);
        self.has_ended.notify_one();
    }

    /// Returns the jobs that were locked ahead and have been released since the last call.
    pub(crate) fn take_unlocked(&self) -> Vec<JobId> {
        std::mem::take(&mut self.unlocked.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Notes that a job was executed: its slot is free for another job.
    pub(crate) fn note_ended(&self, job: JobId) {
        let mut phases = self.phases();
        if phases.change(job, Phase::Ended) {
            self.ended.fetch_add(1, Ordering::Relaxed);
            self.give_slots(&mut phases);
            self.has_ended.notify_one();
        }
    }

    /// Returns the number of executions that have ended since the last call.
    pub(crate) fn take_ended(&self) -> usize {
        self.ended.swap(0, Ordering::Relaxed)
    }

    /// Notes that the end of a job is recorded: the worker no longer holds the job, but its hooks still run. The permit of a job in a line
    /// is free now.
    pub(crate) fn note_recorded(&self, job: JobId, is_in_line: bool) {
        self.phases().change(job, Phase::Recorded);
        if is_in_line {
            self.has_ended.notify_one();
        }
    }

    /// The number of jobs of which only the hooks still run.
    pub(crate) fn count_recorded(&self) -> usize {
        self.phases().iter().filter(|(_, phase, _)| *phase == Phase::Recorded).count()
    }

    /// Notes that the machine lacked a resource to start a job.
    pub(crate) fn note_shortage(&self, reason: &str) {
        let in_use = self.count();
        let is_new = self.shortage().observe(in_use, Monotonic::now());
        if is_new {
            tracing::warn!(
                reason,
                "the machine cannot start more jobs: they are released without counting, and this worker runs fewer jobs for a while"
            );
        }
    }

    /// The number of slots in use.
    pub(crate) fn count(&self) -> u32 {
        self.phases().in_slots()
    }

    /// The number of free slots. A shortage of a resource, threads of an earlier session, and too many unrecorded ends reduce it.
    pub(crate) fn count_free(&self) -> u32 {
        self.count_free_of(&self.phases())
    }

    fn count_free_of(&self, phases: &Phases) -> u32 {
        let slots = self.shortage().allowed(self.capacity, Monotonic::now()).saturating_sub(self.threads.abandoned());
        let unrecorded = slots.saturating_add(slots.max(UNRECORDED)).saturating_sub(phases.in_slots() + phases.ending());
        slots.saturating_sub(phases.in_slots()).min(unrecorded)
    }

    pub(crate) fn phases(&self) -> MutexGuard<'_, Phases> {
        self.phases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unconfirmed(&self) -> MutexGuard<'_, HashSet<JobId>> {
        self.unconfirmed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn shortage(&self) -> MutexGuard<'_, Shortage> {
        self.shortage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;

    use recruiter_common::{instant::Instant, store::Position};

    use super::*;

    /// A table with this number of slots, and jobs that are locked ahead, in their order.
    fn table<const COUNT: usize>(slots: u32) -> (Table, [JobId; COUNT]) {
        let (table, jobs) = (Table::new(slots, Threads::default()), std::array::from_fn(|_| JobId::new()));
        // The later ids are the more urgent ones.
        let position = |(urgency, job): (i64, &JobId)| -> Position { (Reverse(urgency), Instant::default(), *job) };
        (0..).zip(&jobs).map(position).for_each(|position| drop(table.phases().set(position.2, Phase::LockedAhead(position))));
        (table, jobs)
    }

    fn runs(table: &Table, job: JobId) -> bool {
        table.phases().get(job).is_some_and(|(phase, _)| phase == Phase::Running)
    }

    #[test]
    fn slots_are_given_in_the_order_of_jobs_also_if_their_starts_are_answered_in_another() {
        let (table, [last, second, first]) = table(1);
        let slots = [last, second].map(|job| table.fill(job).1.expect("it waits"));
        assert_eq!((table.count_free(), table.phases().locked_ahead()), (1, 3), "the start of the first is not answered");
        let mut slot = table.fill(first).1.expect("it waits");
        assert!(slot.try_recv().is_ok() && runs(&table, first) && table.count_free() == 0);
        table.note_ended(first);
        assert!(runs(&table, second) && !runs(&table, last));
        table.phases().remove(second);
        table.fill_slots();
        assert!(runs(&table, last) && slots.into_iter().all(|mut slot| slot.try_recv().is_ok()));
    }

    #[test]
    fn a_start_that_locked_nothing_lets_the_others_pass() {
        let (table, [second, first]) = table(1);
        let mut slot = table.fill(second).1.expect("it waits");
        table.phases().remove(first);
        table.fill_slots();
        assert!(slot.try_recv().is_ok() && runs(&table, second));
    }

    #[test]
    fn a_recall_covers_jobs_that_wait_and_jobs_whose_start_is_on_its_way_and_none_with_a_slot() {
        let (table, [on_its_way, waits, has_slot]) = table(1);
        let (mut runs_already, mut waiting) = (table.fill(has_slot).1.expect("a slot"), table.fill(waits).1.expect("it waits"));
        table.recall();
        assert!(runs_already.try_recv().is_ok() && table.stop_waiting(has_slot));
        let mut later = table.fill(on_its_way).1.expect("it waits");
        table.note_ended(has_slot);
        assert!([&mut waiting, &mut later].into_iter().all(|slot| slot.try_recv().is_err()));
        assert!([waits, on_its_way].into_iter().all(|job| !table.stop_waiting(job)) && table.count_free() == 1);
    }

    #[test]
    fn a_job_that_stops_waiting_gets_no_slot_and_one_that_is_not_executed_passes_it_on() {
        let (table, [third, second, first]) = table(1);
        let slots = [first, second, third].map(|job| table.fill(job).1.expect("it waits"));
        assert!(!table.stop_waiting(second) && table.stop_waiting(first));
        table.note_not_executed(first);
        assert!(runs(&table, third) && !runs(&table, second) && table.take_ended() == 0);
        drop(slots);
    }
}
