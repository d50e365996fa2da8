//! Jobs from their assignment to their start: they are queued, and leave the queue for a start or are returned.

use std::{
    collections::HashSet,
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::ids::JobId;

use super::{
    Held, Phase,
    known::Known,
    pace::BYTES,
    startable::{PermitLane, Startable},
};

/// The jobs of the next start.
#[derive(Default)]
pub(crate) struct Next {
    /// Jobs for free slots.
    pub(crate) jobs: Vec<Startable>,
    /// Jobs to be locked ahead.
    pub(crate) ahead: Vec<Startable>,
}

impl Next {
    pub(crate) fn is_empty(&self) -> bool {
        self.jobs.is_empty() && self.ahead.is_empty()
    }
}

impl Held {
    /// Whether the session holds the job, in any phase.
    pub(crate) fn holds(&self, job: JobId) -> bool {
        self.known.lock().get(job).is_some()
    }

    /// Queues jobs that can be started. The first in free slots are always added, each further one if the queue stays within `BYTES`.
    /// Jobs beyond the limit of their class are not: an operator can assign a job by hand. Returns the ids of those that were not added.
    pub(crate) fn queue(&self, mut jobs: Vec<Startable>, now: Monotonic) -> Vec<JobId> {
        jobs.sort_by_key(Startable::position);
        let mut known = self.known.lock();
        let mut for_slots = known.free();
        let mut without_room = Vec::new();
        for job in jobs {
            let bytes = job.bytes();
            known.pace.size(bytes);
            let fits = for_slots > 0 || known.queue.bytes() + bytes <= BYTES;
            match if fits { known.add(job, now) } else { Some(job) } {
                Some(job) => without_room.push(job),
                None => for_slots = for_slots.saturating_sub(1),
            }
        }
        drop(known);
        ids_of(without_room)
    }

    /// The jobs of the next start, in their order: for free slots, and those that are locked ahead, up to `to_lock` of slots and as many of
    /// permits. None of the latter before half of the last ones have got them.
    pub(crate) fn next(&self, locks_ahead: bool, now: Monotonic) -> Next {
        let mut known = self.known.lock();
        let (free, locked, limited) = (known.free(), known.number(&[Phase::LockedAhead]), known.number(&[Phase::LimitedAhead]));
        let to_lock = if locks_ahead { known.pace.to_lock_ahead() } else { 0 };
        let mut next = Next::default();
        if free <= locked && locked > to_lock / 2 {
            known.lock_limited(to_lock, &mut next);
            return next;
        }
        let is_idle = locked + limited + known.number(&Phase::IN_SLOTS) + known.number(&Phase::ENDING) == 0;
        let for_slots = free.saturating_sub(locked) as usize;
        while next.jobs.len() < for_slots
            && let Some(job) = known.queue.pop_if(|_| true)
        {
            known.set(job.id(), Phase::Starting);
            next.jobs.push(job);
        }
        let for_later = to_lock.saturating_sub(locked.saturating_sub(free)) as usize;
        while next.ahead.len() < for_later
            && let Some(job) = known.queue.pop_if(Startable::may_be_locked_ahead)
        {
            known.set(job.id(), Phase::LockedAhead);
            next.ahead.push(job);
        }
        known.lock_limited(to_lock, &mut next);
        if is_idle && !next.jobs.is_empty() {
            known.pace.begin(now);
        }
        next
    }

    /// Removes queued jobs that wait for permits which no job here will pass on.
    pub(crate) fn remove_stranded(&self) -> Vec<JobId> {
        self.take_out(|known| {
            if !known.queue.has_limited() {
                return Vec::new();
            }
            let lanes: HashSet<PermitLane> = known.permits().map(|permits| permits.lane.clone()).collect();
            known.queue.without_permits(|lane| lanes.contains(lane))
        })
    }

    /// Removes the queued jobs that have waited too long. Until a job has ended, no more are accepted ahead.
    pub(crate) fn remove_overdue(&self, now: Monotonic) -> Vec<JobId> {
        self.take_out(|known| {
            let overdue = known.queue.overdue(known.pace.patience(), now);
            if !overdue.is_empty() {
                known.pace.stall();
            }
            overdue
        })
    }

    /// Removes all queued jobs, and recalls those that are locked ahead.
    pub(crate) fn recall(&self) -> Vec<JobId> {
        self.take_out(|known| {
            known.recall();
            known.queue.clear()
        })
    }

    /// Removes the jobs that `unqueue` takes out of the queue.
    fn take_out(&self, unqueue: impl FnOnce(&mut Known) -> Vec<Startable>) -> Vec<JobId> {
        let removed = {
            let known = &mut *self.known.lock();
            let unqueued = unqueue(known);
            known.forget(unqueued)
        };
        ids_of(removed)
    }

    /// Drops permits that no job has needed for a moment, or all free ones. Returns whether a report must return some.
    pub(crate) fn drop_permits(&self, all: bool, now: Monotonic) -> bool {
        self.known.lock().free_permits.drop_old(all, now)
    }

    /// The time until a job has waited too long, or permits must be returned.
    pub(crate) fn returns_in(&self) -> Option<Duration> {
        let known = self.known.lock();
        let overdue_at = known.queue.oldest().map(|since| since + known.pace.patience());
        overdue_at.into_iter().chain(known.free_permits.return_at()).min().map(|at| at.saturating_duration_since(Monotonic::now()))
    }

    /// Notes how long a start took.
    pub(crate) fn note_start_took(&self, took: Duration) {
        self.known.lock().pace.start_took(took);
    }

    /// Notes how long a report took.
    pub(crate) fn note_round_trip(&self, took: Duration) {
        self.known.lock().pace.round_trip(took);
    }
}

impl Known {
    /// Adds jobs to a start that are locked ahead of permits.
    fn lock_limited(&mut self, to_lock: u32, next: &mut Next) {
        if to_lock > 0 && self.queue.has_limited() && self.number(&[Phase::LimitedAhead]) <= to_lock / 2 {
            let jobs = self.pop_limited(to_lock);
            jobs.iter().for_each(|job| _ = self.set(job.id(), Phase::LimitedAhead));
            next.ahead.extend(jobs);
        }
    }
}

/// Drops these jobs. Not under the mutex: they may be large, and the destructors of their policies are code of users.
fn ids_of(jobs: Vec<Startable>) -> Vec<JobId> {
    jobs.into_iter().map(|job| job.id()).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use bson::{Document, doc};
    use recruiter_common::{
        Decision, DoNotDoItAgain, Failure, History, Instant, RetryManyTimes, RetryPolicy,
        store::{ClassSlots, Permit},
    };

    use super::*;
    use crate::{
        engine::held::startable::tests::{limited, limited_repeatable, startable},
        threads::Threads,
    };

    #[test]
    fn jobs_beyond_the_limit_of_their_class_are_returned_until_others_have_ended() {
        let limits = [("a", 2), ("b", 1)].map(|(class, free)| ClassSlots { class: class.to_owned(), free });
        let held = Held::new(100, Threads::default(), limits.to_vec());
        let queue = |class: &str, count: usize| {
            let jobs = (0..count).map(|_| limited(doc! { "workable": { "class": class } }, None));
            held.queue(jobs.collect(), Monotonic::now()).len()
        };
        assert_eq!([queue("a", 1), queue("c", 5), queue("b", 2)], [0, 0, 1]);
        let free = || held.offer(true).class_slots.into_iter().map(|slots| (slots.class, slots.free)).collect::<Vec<_>>();
        assert_eq!(free(), [("a".into(), 1), ("b".into(), 0)]);
        assert_eq!(queue("a", 2), 1);
        let next = held.next(false, Monotonic::now());
        assert_eq!((next.jobs.len(), free()), (8, vec![("a".into(), 0), ("b".into(), 0)]), "they are not executed yet");
        let first = next.jobs.iter().find(|job| job.job().class == "a").expect("two of them").id();
        held.fill(first);
        held.note_ended(first);
        assert_eq!((free(), queue("a", 2)), (vec![("a".into(), 1), ("b".into(), 0)], 1), "the first has ended");
    }

    fn permit(gate: &str, names: &[&str]) -> Permit {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        Permit { gate: Some(gate.to_owned()), is_ahead: names.is_empty(), names, between: None }
    }

    /// A job of a gate, with these permits; without any, it is assigned ahead.
    fn of_gate(gate: &str, names: &[&str]) -> Startable {
        limited(doc! { "gate": gate }, Some(permit(gate, names)))
    }

    #[test]
    fn a_permit_goes_to_the_next_job_of_its_lane_or_is_returned_after_a_moment() {
        let (held, now) = (Held::new(4, Threads::default(), Vec::new()), Monotonic::now());
        let jobs = [of_gate("a", &["a#0"]), of_gate("b", &["b#0"]), of_gate("a", &[]), of_gate("c", &[])];
        let [a, b, next_of_a, stranded] = [0, 1, 2, 3].map(|index: usize| jobs[index].id());
        assert_eq!(held.queue(jobs.into(), now), []);
        assert_eq!(held.remove_stranded(), [stranded], "no job has permits of its lane");
        assert_eq!(held.next(false, now).jobs.len(), 2, "the others wait for permits");
        assert!(!held.drop_permits(true, now), "both are used");
        for job in [a, b] {
            held.fill(job);
            held.note_ended(job);
        }
        let next = held.next(false, now).jobs;
        assert_eq!(next.iter().map(|job| (job.id(), job.permits())).collect::<Vec<_>>(), [(next_of_a, Some(&["a#0".to_owned()][..]))]);
        assert_eq!(held.permit_names().len(), 2, "the roster still names it");
        assert!(held.returns_in().is_some() && !held.drop_permits(false, now));
        assert!(held.drop_permits(false, now + Duration::from_secs(1)));
        assert_eq!(held.permit_names(), ["a#0"]);
        held.remove(&[next_of_a]);
        let later = of_gate("a", &[]);
        let id = later.id();
        held.queue(vec![later], now);
        assert_eq!(held.next(false, now).jobs.first().map(Startable::id), Some(id), "it gets the permit that was kept");
        held.remove(&[id]);
        assert!(held.drop_permits(true, now) && held.permit_names().is_empty(), "a worker that stops keeps none");
    }

    /// The same of jobs that may be repeated; with the interval of a rate if it is given.
    fn repeatable(gate: &str, names: &[&str], between: Option<(Instant, Instant)>) -> Startable {
        let policy = Arc::new(RetryManyTimes::new(3, Duration::ZERO).expect("a policy"));
        limited_repeatable(doc! { "gate": gate }, Some(Permit { between, ..permit(gate, names) }), policy)
    }

    /// A worker of four slots that runs the first of these jobs, after another has returned at once that had its permit.
    fn with_permit(gate: &str, jobs: impl Fn() -> Vec<Startable>) -> (Held, Vec<JobId>) {
        loop {
            let (held, now, jobs) = (Held::new(4, Threads::default(), Vec::new()), Monotonic::now(), jobs());
            let ids: Vec<JobId> = jobs.iter().map(Startable::id).collect();
            let earlier = repeatable(gate, &[&format!("{gate}#0")], None);
            let earlier_id = earlier.id();
            held.queue([earlier].into_iter().chain(jobs).collect(), now);
            let next = held.next(true, now);
            assert_eq!((ids_of(next.jobs), next.ahead.len()), (vec![earlier_id], 0), "how long the jobs take is not known");
            held.fill(earlier_id);
            held.note_ended(earlier_id);
            held.known.lock().pace.ended(1_000, now + Duration::from_millis(10));
            held.remove_ended(earlier_id);
            // A machine that stalls just then would show a long job.
            if held.known.lock().permits().all(|permits| permits.per_second() > 1_000.0) {
                return (held, ids);
            }
        }
    }

    #[test]
    fn jobs_that_wait_for_permits_are_locked_ahead_and_run_one_after_the_other() {
        let (held, jobs) = with_permit("a", || (0..4).map(|_| repeatable("a", &[], None)).collect());
        let next = held.next(true, Monotonic::now());
        assert!(
            next.ahead.iter().all(|job| job.permits() == Some(&["a#0".to_owned()][..])),
            "they are started under the permit of the first"
        );
        assert_eq!((ids_of(next.jobs), ids_of(next.ahead)), (jobs[..1].to_vec(), jobs[1..].to_vec()));
        let offer = held.offer(true);
        assert_eq!((offer.slots, offer.held_permits, offer.prefetched.len()), (3, vec!["a#0".to_owned()], 4), "they need no slots yet");
        let mut slots: Vec<_> = jobs[1..].iter().rev().map(|job| held.fill(*job).1.expect("it waits")).collect();
        assert!(held.fill(jobs[0]).1.is_none());
        held.note_ended(jobs[0]);
        let mut has_slot = |job: usize| slots[3 - job].try_recv().is_ok();
        assert!(has_slot(1) && !has_slot(2) && !has_slot(3), "it runs with the permit of the first");
        assert!(!held.stop_waiting(jobs[2]), "it has waited too long");
        held.note_ended(jobs[1]);
        assert!(has_slot(3) && !has_slot(2));
        assert_eq!(held.permit_names(), ["a#0"]);
        held.note_ended(jobs[3]);
        assert!(held.drop_permits(true, Monotonic::now()) && held.permit_names().is_empty());
    }

    #[test]
    fn jobs_of_lines_and_rates_and_those_that_run_at_most_once_are_not_locked_ahead_of_permits() {
        let ahead = |gate: &str, job: &dyn Fn() -> Startable| {
            let (held, _) = with_permit(gate, || vec![repeatable(gate, &[], None), job()]);
            held.next(true, Monotonic::now()).ahead.len()
        };
        assert_eq!(ahead("a", &|| repeatable("a", &[], None)), 1);
        assert_eq!(ahead(">line", &|| repeatable(">line", &[], None)), 0);
        let now = bson::DateTime::now().to_chrono();
        assert_eq!(ahead("a", &|| repeatable("a", &[], Some((now, now)))), 0);
        assert_eq!(ahead("a", &|| of_gate("a", &[])), 0);
    }

    #[test]
    fn no_job_is_locked_ahead_of_permits_before_one_that_is_ready_and_waits_for_a_slot() {
        let (held, jobs) = with_permit("a", || (0..2).map(|_| repeatable("a", &[], None)).collect());
        let urgent: Vec<Startable> = (0..4).map(|_| limited(doc! { "priority": 9 }, None)).collect();
        let urgent_ids: Vec<JobId> = urgent.iter().map(Startable::id).collect();
        held.queue(urgent, Monotonic::now());
        let next = held.next(true, Monotonic::now());
        assert_eq!((ids_of(next.jobs), next.ahead.len()), (urgent_ids.clone(), 0), "the first of the others waits for a slot");
        held.remove(&urgent_ids);
        let next = held.next(true, Monotonic::now());
        assert_eq!((ids_of(next.jobs), ids_of(next.ahead)), (jobs[..1].to_vec(), jobs[1..].to_vec()));
    }

    #[test]
    fn a_pause_recalls_the_jobs_that_are_locked_ahead_of_permits() {
        let (held, jobs) = with_permit("a", || (0..2).map(|_| repeatable("a", &[], None)).collect());
        held.next(true, Monotonic::now());
        let mut slot = held.fill(jobs[1]).1.expect("it waits");
        held.fill(jobs[0]);
        held.recall();
        assert!(slot.try_recv().is_err());
        held.note_ended(jobs[0]);
        assert!(!held.stop_waiting(jobs[1]));
        assert_eq!(held.permit_names(), ["a#0"], "no job has it");
    }

    /// Until then no other job is the first of the line.
    #[test]
    fn a_job_in_a_line_keeps_its_permit_until_its_end_is_recorded() {
        let (held, now) = (Held::new(1, Threads::default(), Vec::new()), Monotonic::now());
        let job = of_gate(">line", &[">line#0"]);
        let id = job.id();
        held.queue(vec![job], now);
        held.next(false, now);
        held.fill(id);
        held.note_ended(id);
        assert!(!held.drop_permits(true, now));
        held.note_recorded(id);
        assert!(held.drop_permits(true, now));
    }

    /// Jobs for free slots are queued even above the limit of bytes, and jobs that are held already are not queued again.
    #[test]
    fn a_queue_has_room_for_jobs_of_free_slots_and_for_so_many_bytes() {
        let large = || limited(doc! { "workable": { "class": "x", "parameters": "x".repeat(BYTES - 1_000) } }, None);
        let (held, now) = (Held::new(1, Threads::default(), Vec::new()), Monotonic::now());
        let [first, second] = [large(), large()];
        let ids = [first.id(), second.id()];
        assert_eq!(held.queue(vec![first, second], now), [ids[1]]);
        let again = limited(doc! { "_id": ids[0] } as Document, None);
        assert_eq!(held.queue(vec![again], now), [ids[0]]);
        assert_eq!(held.remove_overdue(now + Duration::from_secs(60)), [ids[0]]);
        assert_eq!((held.holds(ids[0]), held.recall()), (false, vec![]));
    }

    /// A policy whose destructor needs the mutex, and counts how often it got it.
    struct Last(Arc<Held>, Arc<AtomicUsize>);

    impl Drop for Last {
        fn drop(&mut self) {
            self.1.fetch_add(usize::from(self.0.known.try_lock().is_some()), Ordering::Relaxed);
        }
    }

    impl std::fmt::Debug for Last {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Last")
        }
    }

    impl RetryPolicy for Last {
        fn class(&self) -> &str {
            "Last"
        }

        fn parameters(&self) -> Document {
            Document::new()
        }

        fn decide(&self, job: &History<'_>, failure: &Failure, failed_at: Instant) -> Decision {
            DoNotDoItAgain.decide(job, failure, failed_at)
        }

        fn is_last_attempt(&self, _: &History<'_>, _: Instant) -> bool {
            true
        }
    }

    #[test]
    fn jobs_that_are_returned_are_not_dropped_under_the_mutex() {
        let (held, dropped, now) = (Arc::new(Held::new(1, Threads::default(), Vec::new())), Arc::default(), Monotonic::now());
        let (id, policy) = (JobId::new(), || Arc::new(Last(held.clone(), Arc::clone(&dropped))));
        held.queue(vec![startable(doc! { "_id": id }, policy()), startable(doc! { "_id": id }, policy())], now);
        assert_eq!((held.recall(), dropped.load(Ordering::Relaxed)), (vec![id], 2));
    }
}
