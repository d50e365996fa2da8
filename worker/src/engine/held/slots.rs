//! Jobs from their start to the end of their hooks: the slots in which they run.

use std::{sync::Arc, time::Instant as Monotonic};

use recruiter_common::ids::JobId;
use tokio::sync::oneshot;

use super::{Held, Phase, known::Known};
use crate::cancellation::{Cancel, Cancellation};

impl Held {
    /// Notes that a job is started. It runs in the slot that was reserved for it, or waits for a slot if it is locked ahead. Returns its
    /// cancellation, and where the slot arrives that it waits for.
    pub(crate) fn fill(&self, job: JobId) -> (Arc<Cancel>, Option<oneshot::Receiver<()>>) {
        let mut known = self.known.lock();
        let Some((phase, cancel)) = known.get(job) else {
            debug_assert!(false, "a job is started that the session does not hold");
            return Default::default();
        };
        let cancel = cancel.clone();
        if !Phase::AHEAD.contains(&phase) && phase != Phase::Recalled {
            known.set(job, Phase::Running);
            return (cancel, None);
        }
        let slot = known.wait(job);
        known.give_slots();
        (cancel, Some(slot))
    }

    /// A job that is locked ahead no longer waits for a slot. Returns whether it has got one.
    pub(crate) fn stop_waiting(&self, job: JobId) -> bool {
        let mut known = self.known.lock();
        let has_slot = known.get(job).is_some_and(|(phase, _)| Phase::IN_SLOTS.contains(&phase));
        if !has_slot {
            self.leave_slot(&mut known, job, Phase::Recalled);
        }
        has_slot
    }

    /// Notes that a started job is not executed: its slot is free for another job.
    pub(crate) fn note_not_executed(&self, job: JobId) {
        self.leave_slot(&mut self.known.lock(), job, Phase::Ended);
    }

    /// Moves a job that is not executed into a phase in which it needs no slot and no permits.
    fn leave_slot(&self, known: &mut Known, job: JobId, phase: Phase) {
        let has_permits = known.has_permits(job);
        known.set(job, phase);
        known.give_slots();
        if has_permits {
            self.has_ended.notify_one();
        }
    }

    /// Notes that a job that was locked ahead is released.
    pub(crate) fn note_unlocked(&self, job: JobId) {
        self.known.lock().set(job, Phase::Unlocked);
    }

    /// Notes that a job was executed: its slot is free for another job.
    pub(crate) fn note_ended(&self, job: JobId) {
        let mut known = self.known.lock();
        if known.set(job, Phase::Ended) {
            known.ended += 1;
            known.give_slots();
            self.has_ended.notify_one();
        }
    }

    /// Notes that the end of a job is recorded: the worker no longer holds the job, but its hooks still run. The permit of a job in a line
    /// is free now.
    pub(crate) fn note_recorded(&self, job: JobId) {
        let mut known = self.known.lock();
        let has_permits = known.has_permits(job);
        known.set(job, Phase::Recorded);
        if has_permits {
            self.has_ended.notify_one();
        }
    }

    /// Removes jobs that are not run.
    pub(crate) fn remove(&self, jobs: &[JobId]) {
        let mut known = self.known.lock();
        for job in jobs {
            known.remove(*job);
        }
        known.give_slots();
    }

    /// Removes a job whose task has ended. Returns whether the recruiter must be notified that the job is not locked any more: then no jobs
    /// are accepted ahead until one ends.
    pub(crate) fn remove_ended(&self, job: JobId) -> bool {
        let mut known = self.known.lock();
        let is_unlocked = known.remove(job) == Some(Phase::Unlocked);
        if is_unlocked {
            known.pace.stall();
        }
        is_unlocked
    }

    /// Gives free slots to jobs that are locked ahead, and measures the pace.
    pub(crate) fn slots_changed(&self, now: Monotonic) {
        let known = &mut *self.known.lock();
        known.give_slots();
        known.pace.ended(std::mem::take(&mut known.ended), now);
    }

    /// Notes that the machine lacked a resource to start a job.
    pub(crate) fn note_shortage(&self, reason: &str) {
        let is_new = {
            let known = &mut *self.known.lock();
            known.shortage.observe(known.number(&Phase::IN_SLOTS), Monotonic::now())
        };
        if is_new {
            tracing::warn!(
                reason,
                "the machine cannot start more jobs: they are released without counting, and this worker runs fewer jobs for a while"
            );
        }
    }

    /// When more slots are free because a shortage has eased.
    pub(crate) fn eases_at(&self, now: Monotonic) -> Option<Monotonic> {
        let known = self.known.lock();
        known.shortage.eases_at(known.capacity, now)
    }

    /// Cancels a job that runs, waits for its slot, or whose start is on its way. Returns whether there is such a job.
    pub(crate) fn cancel(&self, job: JobId, why: Cancellation) -> bool {
        let cancel = self.known.lock().get(job).filter(|(phase, _)| phase.is_cancellable()).map(|(_, cancel)| cancel.clone());
        // Not under the lock: it wakes tasks.
        cancel.inspect(|cancel| cancel.cancel(why)).is_some()
    }

    /// Calls `apply` with the cancellation of every job.
    pub(crate) fn for_each_job(&self, apply: impl Fn(&Cancel)) {
        let jobs: Vec<Arc<Cancel>> = self.known.lock().cancels().cloned().collect();
        jobs.iter().for_each(|cancel| apply(cancel));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bson::doc;

    use super::*;
    use crate::{engine::held::startable::tests::limited, threads::Threads};

    impl Held {
        /// Starts as many jobs, in slots that are reserved for them.
        pub(crate) fn start_for_tests<const COUNT: usize>(&self) -> [JobId; COUNT] {
            let jobs: Vec<_> = (0..COUNT).map(|_| limited(doc! {}, None)).collect();
            let ids = std::array::from_fn(|index| jobs[index].id());
            assert_eq!(self.queue(jobs, Monotonic::now()), []);
            assert_eq!(self.next(false, Monotonic::now()).jobs.len(), COUNT);
            ids
        }
    }

    /// So many slots, and jobs that are locked ahead: the last is the most urgent one.
    fn locked_ahead<const COUNT: usize>(slots: u32) -> (Held, [JobId; COUNT]) {
        let held = Held::new(slots, Threads::default(), Vec::new());
        let jobs = std::array::from_fn(|index| {
            let job = limited(doc! { "priority": i64::try_from(index).expect("small") }, None);
            let (id, mut known) = (job.id(), held.known.lock());
            assert!(
                known.add(job, Monotonic::now()).is_none() && known.queue.pop_if(|_| true).is_some() && known.set(id, Phase::LockedAhead)
            );
            id
        });
        (held, jobs)
    }

    fn phase(held: &Held, job: JobId) -> Option<Phase> {
        held.known.lock().get(job).map(|(phase, _)| phase)
    }

    fn runs(held: &Held, job: JobId) -> bool {
        phase(held, job) == Some(Phase::Running)
    }

    fn free(held: &Held) -> u32 {
        Known::free(&held.known.lock())
    }

    #[test]
    fn slots_are_given_in_the_order_of_jobs_also_if_their_starts_are_answered_in_another() {
        let (held, [last, second, first]) = locked_ahead(1);
        let slots = [last, second].map(|job| held.fill(job).1.expect("it waits"));
        assert_eq!((free(&held), held.known.lock().number(&[Phase::LockedAhead])), (1, 3), "the start of the first is not answered");
        let mut slot = held.fill(first).1.expect("it waits");
        assert!(slot.try_recv().is_ok() && runs(&held, first) && free(&held) == 0);
        held.note_ended(first);
        assert!(runs(&held, second) && !runs(&held, last));
        held.remove(&[second]);
        assert!(runs(&held, last) && slots.into_iter().all(|mut slot| slot.try_recv().is_ok()));
    }

    #[test]
    #[cfg_attr(debug_assertions, should_panic(expected = "does not hold"))]
    fn a_job_that_the_session_does_not_hold_is_not_started_silently() {
        Held::new(1, Threads::default(), Vec::new()).fill(JobId::new());
    }

    #[test]
    fn a_start_that_locked_nothing_lets_the_others_pass() {
        let (held, [second, first]) = locked_ahead(1);
        let mut slot = held.fill(second).1.expect("it waits");
        held.remove(&[first]);
        assert!(slot.try_recv().is_ok() && runs(&held, second));
    }

    #[test]
    fn a_recall_covers_jobs_that_wait_and_jobs_whose_start_is_on_its_way_and_none_with_a_slot() {
        let (held, [on_its_way, waits, has_slot]) = locked_ahead(1);
        let (mut runs_already, mut waiting) = (held.fill(has_slot).1.expect("a slot"), held.fill(waits).1.expect("it waits"));
        assert_eq!(held.recall(), [], "they are locked");
        assert!(runs_already.try_recv().is_ok() && held.stop_waiting(has_slot));
        let mut later = held.fill(on_its_way).1.expect("it waits");
        held.note_ended(has_slot);
        assert!([&mut waiting, &mut later].into_iter().all(|slot| slot.try_recv().is_err()));
        assert!([waits, on_its_way].into_iter().all(|job| !held.stop_waiting(job)) && free(&held) == 1);
    }

    #[test]
    fn a_job_that_stops_waiting_gets_no_slot_and_one_that_is_not_executed_passes_it_on() {
        let (held, [third, second, first]) = locked_ahead(1);
        let slots = [first, second, third].map(|job| held.fill(job).1.expect("it waits"));
        assert!(!held.stop_waiting(second) && held.stop_waiting(first));
        held.note_not_executed(first);
        assert!(runs(&held, third) && !runs(&held, second) && held.known.lock().ended == 0);
        drop(slots);
        held.note_unlocked(second);
        assert!(held.holds(second), "until its task has ended");
        assert!(held.remove_ended(second) && !held.remove_ended(first) && !held.holds(second));
    }

    /// What is counted beside the map is what is in it, after any transitions.
    #[test]
    fn the_indexes_agree_with_the_map() {
        let held = Held::new(2, Threads::default(), Vec::new());
        let [first, second] = held.start_for_tests();
        let all = [
            Phase::Starting,
            Phase::LockedAhead,
            Phase::LimitedAhead,
            Phase::Recalled,
            Phase::Running,
            Phase::Ended,
            Phase::Unlocked,
            Phase::Recorded,
        ];
        for (before, after) in all.iter().flat_map(|before| all.map(|after| (*before, after))) {
            held.known.lock().set(first, before);
            held.known.lock().set(first, after);
            let known = held.known.lock();
            let count = |wanted: Phase| u32::try_from(known.jobs(|phase| phase == wanted).count()).expect("small");
            assert!(all.iter().all(|phase| known.number(&[*phase]) == count(*phase)), "{before:?} {after:?}");
        }
        assert_eq!((held.remove_ended(first), phase(&held, second)), (false, Some(Phase::Starting)));
        held.remove(&[second]);
        assert_eq!(free(&held), 2);
        assert_eq!(held.returns_in(), None::<Duration>, "no job and no permit is left");
    }
}
