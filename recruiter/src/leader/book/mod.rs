//! The book: where each job is that this leader has assigned, until it is known to have started.
//!
//! A job that waits is in the window of its lane only ([`lanes`](super::lanes)). From its assignment on it has an [`Entry`] here: it is in the
//! turn of a worker, held ahead by one, or was in a turn that has ended. A job in a turn or ahead is *in flight*. Refused jobs are in
//! [`Refusals`] as well.
//!
//! It is harmless to drop an entry too early: the start of a job has its own guard.

mod refusals;
mod turn;

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::{JobId, RoundId, WorkerId},
    instant::Instant,
    store::{Lane, ScheduledJob},
};

pub(crate) use self::{refusals::Refusals, turn::Turn};
use super::fleet::FreeWorker;

/// How long an assigned job stays in flight without an answer. The next full scan then ends the turn, so this is at most five seconds with
/// the default poll interval. A worker takes an assignment within milliseconds, or within its poll interval if the hint was lost.
const IN_FLIGHT_FOR: Duration = Duration::from_secs(4);

/// Where a job is that a search has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whereabouts {
    /// In its lane: it may be assigned.
    Waiting,
    /// With a worker that has not answered yet, or holds it ahead.
    InFlight,
    /// Refused, and not assigned again before this instant.
    PausedUntil(Monotonic),
}

/// What is known of one job.
#[derive(Clone, Debug, Default)]
struct Entry {
    assigned: Option<Assigned>,
    ahead: Option<Ahead>,
    /// Its assignment that ended since the last full scan, and the one that ended between the two last full scans.
    ended: [Option<Ended>; 2],
}

/// How a job was assigned. It is not known of the assignments of earlier leaders.
#[derive(Clone, Debug)]
pub(crate) struct AssignedAs {
    /// The due date at which it was assigned.
    pub(crate) due: Instant,
    /// Where it waits again if it is returned.
    pub(crate) lane: Arc<Lane>,
}

/// The turn of a worker that a job is in.
#[derive(Clone, Debug)]
struct Assigned {
    worker: WorkerId,
    how: Option<AssignedAs>,
}

/// The worker that holds a job ahead, from its last report in the roster.
#[derive(Clone, Debug)]
struct Ahead {
    worker: WorkerId,
    /// When the roster first listed it.
    since: Monotonic,
    /// A job that has another date now was started in between.
    how: Option<AssignedAs>,
}

/// An assignment that has ended: the worker has answered it, has left, or did not answer in time.
#[derive(Clone, Debug)]
struct Ended {
    worker: WorkerId,
    how: AssignedAs,
    /// Whether the worker did not answer.
    unanswered: bool,
}

/// The jobs in flight of one worker.
#[derive(Clone, Debug, Default)]
struct Desk {
    turn: Option<Turn>,
    ahead: Vec<JobId>,
}

/// All of these jobs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Book {
    jobs: HashMap<JobId, Entry>,
    pub(crate) refusals: Refusals,
    /// The same jobs in flight, by worker.
    desks: HashMap<WorkerId, Desk>,
}

impl Entry {
    fn is_empty(&self) -> bool {
        self.assigned.is_none() && self.ahead.is_none() && self.ended.iter().all(Option::is_none)
    }

    /// Whether the job is in flight. A job that is held ahead counts for [`IN_FLIGHT_FOR`] only: a live worker would have started or
    /// returned it.
    fn is_in_flight(&self, job: &ScheduledJob, at: Monotonic) -> bool {
        let is_same = |how: &AssignedAs| how.due == job.scheduled_at;
        let is_ahead = |ahead: &Ahead| at.duration_since(ahead.since) < IN_FLIGHT_FOR && ahead.how.as_ref().is_none_or(is_same);
        self.assigned.is_some() || self.ahead.as_ref().is_some_and(is_ahead)
    }

    /// The job may have been moved since its assignment. A search has found it in this lane, and the window there leaves it out.
    fn note_lane(&mut self, job: &ScheduledJob) {
        let (assigned, ahead) = (self.assigned.as_mut().and_then(|of| of.how.as_mut()), self.ahead.as_mut().and_then(|of| of.how.as_mut()));
        let is_of_job = |lane: &Lane| (&lane.group, &lane.class, &lane.gate) == (&job.group, &job.class, &job.gate);
        for how in [assigned, ahead].into_iter().flatten().filter(|how| !is_of_job(&how.lane)) {
            how.lane = Arc::new(job.lane());
        }
    }

    /// Takes the job out of the turn of this worker. Returns how it was assigned, if it was in that turn and this is known.
    fn leave(&mut self, worker: WorkerId) -> Option<AssignedAs> {
        self.assigned.take_if(|assigned| assigned.worker == worker)?.how
    }

    /// This worker does not hold the job ahead any more. Returns how it was assigned, if it did and this is known.
    fn drop_ahead(&mut self, worker: WorkerId) -> Option<AssignedAs> {
        self.ahead.take_if(|ahead| ahead.worker == worker)?.how
    }
}

impl Book {
    /// Begins a turn. The jobs were assigned like this, as far as it is known.
    pub(crate) fn begin(&mut self, turn: Turn, how: impl IntoIterator<Item = Option<AssignedAs>>) {
        let worker = turn.assignment.worker;
        // A worker has one turn at a time.
        if let Some(before) = self.take_turn(worker) {
            before.assignment.jobs.into_iter().for_each(|job| self.change(job, |entry| _ = entry.leave(worker)));
        }
        for (job, how) in turn.assignment.jobs.iter().zip(how) {
            self.jobs.entry(*job).or_default().assigned = Some(Assigned { worker, how });
        }
        self.desks.entry(worker).or_default().turn = Some(turn);
    }

    /// Ends the turn of a worker.
    fn end(&mut self, worker: WorkerId, unanswered: bool) -> Option<Turn> {
        let turn = self.take_turn(worker)?;
        for job in &turn.assignment.jobs {
            self.change(*job, |entry| {
                if let Some(how) = entry.leave(worker) {
                    entry.ended[0] = Some(Ended { worker, how, unanswered });
                }
            });
        }
        Some(turn)
    }

    fn take_turn(&mut self, worker: WorkerId) -> Option<Turn> {
        let desk = self.desks.get_mut(&worker)?;
        let turn = desk.turn.take();
        if desk.ahead.is_empty() {
            self.desks.remove(&worker);
        }
        turn
    }

    /// Changes the entry of a job, if it has one.
    fn change(&mut self, job: JobId, change: impl FnOnce(&mut Entry)) {
        if let Some(entry) = self.jobs.get_mut(&job) {
            change(entry);
            if entry.is_empty() {
                self.jobs.remove(&job);
            }
        }
    }

    /// Maximum number of jobs in flight: a job that is held ahead for too long still counts.
    pub(crate) fn in_flight(&self) -> usize {
        self.desks.values().map(|desk| desk.turn.as_ref().map_or(0, |turn| turn.assignment.jobs.len()) + desk.ahead.len()).sum()
    }

    /// Whether the job is in flight, or an assignment of it at this date has ended recently. An announcement of it is then outdated.
    pub(crate) fn is_assigned(&self, job: &ScheduledJob, at: Monotonic) -> bool {
        let is_at_date = |ended: &Ended| ended.how.due == job.scheduled_at;
        self.jobs.get(&job.id).is_some_and(|entry| entry.is_in_flight(job, at) || entry.ended.iter().flatten().any(is_at_date))
    }

    /// Where this job is, which a search has found. If it is in a turn, the turn records the lane. If it is not in flight and was assigned at
    /// this date before, it was refused.
    pub(crate) fn find(&mut self, job: &ScheduledJob, at: Monotonic) -> Whereabouts {
        let mut ended = None;
        if let Some(entry) = self.jobs.get_mut(&job.id) {
            entry.note_lane(job);
            if let Some(Assigned { worker, how }) = &entry.assigned
                && let Some(turn) = self.desks.get_mut(worker).and_then(|desk| desk.turn.as_mut())
            {
                let is_as_assigned = how.as_ref().is_some_and(|how| how.due == job.scheduled_at);
                let lanes = if is_as_assigned { &mut turn.skipped_in } else { &mut turn.due_again_in };
                lanes.insert(job.lane());
            }
            if entry.is_in_flight(job, at) {
                return Whereabouts::InFlight;
            }
            ended = entry.ended.iter_mut().find_map(Option::take);
            if entry.is_empty() {
                self.jobs.remove(&job.id);
            }
        }
        let refused = ended.filter(|ended| ended.how.due == job.scheduled_at);
        let pause = self.refusals.pause(job, refused.map(|ended| (ended.worker, ended.unanswered)), at);
        pause.map_or(Whereabouts::Waiting, Whereabouts::PausedUntil)
    }

    /// Updates the jobs that these workers hold ahead, from a read of the roster at `at`.
    pub(crate) fn read_ahead(&mut self, reports: impl Iterator<Item = (WorkerId, Vec<JobId>)>, at: Monotonic) {
        reports.for_each(|(worker, jobs)| self.set_ahead(worker, jobs, at));
    }

    /// Replaces the jobs that a worker holds ahead.
    fn set_ahead(&mut self, worker: WorkerId, jobs: Vec<JobId>, at: Monotonic) {
        let before = self.desks.get_mut(&worker).map(|desk| std::mem::take(&mut desk.ahead)).unwrap_or_default();
        if !before.is_empty() {
            let still: HashSet<&JobId> = jobs.iter().collect();
            before.iter().filter(|job| !still.contains(job)).for_each(|job| self.change(*job, |entry| _ = entry.drop_ahead(worker)));
        }
        for job in &jobs {
            let Entry { assigned, ahead, .. } = self.jobs.entry(*job).or_default();
            let is_new = ahead.as_ref().is_none_or(|ahead| ahead.worker != worker);
            let new = assigned.as_ref().filter(|assigned| assigned.worker == worker && is_new);
            let new = new.map(|assigned| (at, assigned.how.clone()));
            // A report that is repeated, or that another worker repeats, makes it no younger.
            let known = ahead.take().map(|ahead| (ahead.since, ahead.how));
            let (since, how) = new.or(known).unwrap_or((at, None));
            *ahead = Some(Ahead { worker, since, how });
        }
        if !jobs.is_empty() {
            self.desks.entry(worker).or_default().ahead = jobs;
        } else if self.desks.get(&worker).is_some_and(|desk| desk.turn.is_none()) {
            self.desks.remove(&worker);
        }
    }

    /// Removes jobs that a worker has returned, even in the middle of its turn. They were assigned ahead, and were not refused. Returns the
    /// lanes in which they wait again. Contains `None` if the lane of one of them is not known.
    pub(crate) fn returned(&mut self, worker: WorkerId, jobs: &[JobId]) -> HashSet<Option<Arc<Lane>>> {
        let mut lanes = HashSet::new();
        for job in jobs {
            let mut how = Vec::new();
            self.change(*job, |entry| {
                let ended = std::mem::take(&mut entry.ended).into_iter().flatten().map(|ended| ended.how);
                how.extend([entry.leave(worker), entry.drop_ahead(worker)].into_iter().flatten().chain(ended));
            });
            if how.is_empty() {
                lanes.insert(None);
            }
            lanes.extend(how.into_iter().map(|how| Some(how.lane)));
            self.refusals.remove(*job);
        }
        let Some(desk) = self.desks.get_mut(&worker) else { return lanes };
        let jobs: HashSet<&JobId> = jobs.iter().collect();
        desk.ahead.retain(|job| !jobs.contains(job));
        match &mut desk.turn {
            Some(turn) => turn.assignment.jobs.retain(|job| !jobs.contains(job)),
            None if desk.ahead.is_empty() => _ = self.desks.remove(&worker),
            None => {}
        }
        lanes
    }

    /// Removes a worker that has left: its turn, which is returned, and the jobs that it held ahead.
    pub(crate) fn remove_worker(&mut self, worker: WorkerId, at: Monotonic) -> Option<Turn> {
        self.set_ahead(worker, Vec::new(), at);
        self.end(worker, false)
    }

    /// Ends and returns the turns of workers that accept jobs again. The jobs that these workers hold ahead stay in flight.
    pub(crate) fn end_answered(&mut self, workers: &[FreeWorker]) -> Vec<Turn> {
        let has_answered = |worker: &&FreeWorker| self.turn(worker.id).is_some_and(|turn| worker.round == Some(turn.round));
        let over: Vec<WorkerId> = workers.iter().filter(has_answered).map(|worker| worker.id).collect();
        over.into_iter().filter_map(|worker| self.end(worker, false)).collect()
    }

    fn turn(&self, worker: WorkerId) -> Option<&Turn> {
        self.desks.get(&worker)?.turn.as_ref()
    }

    /// The workers that have a turn, or hold jobs ahead.
    pub(crate) fn workers(&self) -> Vec<WorkerId> {
        self.desks.keys().copied().collect()
    }

    /// The turns that are older than `age`.
    pub(crate) fn older_than(&self, age: Duration, at: Monotonic) -> impl Iterator<Item = &Turn> {
        self.desks.values().filter_map(|desk| desk.turn.as_ref()).filter(move |turn| turn.age(at) > age)
    }

    /// Ends and returns the turns of workers that have left the roster, have another round, or take too long. `rounds` has the registered
    /// workers.
    pub(crate) fn expire(&mut self, rounds: &HashMap<WorkerId, Option<RoundId>>, at: Monotonic) -> Vec<Turn> {
        let workers = self.workers();
        workers.iter().filter(|worker| !rounds.contains_key(worker)).for_each(|worker| self.set_ahead(*worker, Vec::new(), at));
        let is_over = |worker: &WorkerId| {
            self.turn(*worker).is_some_and(|turn| turn.age(at) >= IN_FLIGHT_FOR || rounds.get(worker) != Some(&Some(turn.round)))
        };
        let over: Vec<WorkerId> = workers.into_iter().filter(is_over).collect();
        over.into_iter().filter_map(|worker| self.end(worker, true)).collect()
    }

    /// Drops old entries. Called by each full scan.
    pub(crate) fn drop_old(&mut self, at: Monotonic) {
        self.jobs.retain(|_, entry| {
            entry.ended = [None, entry.ended[0].take()];
            !entry.is_empty()
        });
        self.refusals.drop_old(at);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use recruiter_common::store::{AssignedJobs, Channel};

    use super::*;

    impl Book {
        pub(crate) fn is_in_flight(&self, job: &ScheduledJob, at: Monotonic) -> bool {
            self.jobs.get(&job.id).is_some_and(|entry| entry.is_in_flight(job, at))
        }
    }

    fn worker(id: WorkerId, round: Option<RoundId>) -> FreeWorker {
        FreeWorker {
            id,
            kind: 0,
            free: 1,
            prefetch: 0,
            class_slots: Vec::new(),
            prefetched: Vec::new(),
            takes_limited: true,
            round,
            channel: Channel::default(),
            changed_at: Monotonic::now(),
            is_overdue: false,
        }
    }

    pub(super) fn found(id: JobId, due: i64) -> ScheduledJob {
        let scheduled_at = Instant::from_timestamp_millis(due).expect("a date");
        ScheduledJob { id, group: "g".into(), class: "c".into(), gate: None, priority: 5, scheduled_at }
    }

    fn assigned_as(job: &ScheduledJob) -> AssignedAs {
        AssignedAs { due: job.scheduled_at, lane: Arc::new(job.lane()) }
    }

    fn begin(book: &mut Book, round: RoundId, worker: WorkerId, jobs: &[(JobId, Option<i64>)], since: Monotonic) {
        let assignment = AssignedJobs::new(worker, jobs.iter().map(|(job, _)| *job).collect());
        let how = jobs.iter().map(|(job, due)| due.map(|due| assigned_as(&found(*job, due))));
        book.begin(Turn::new(round, assignment, Channel(0), false, since), how);
    }

    /// This worker gets the job and does not start it. A search finds it again at `at`.
    pub(crate) fn refuse(book: &mut Book, job: &ScheduledJob, worker: WorkerId, unanswered: bool, at: Monotonic) -> Whereabouts {
        let assignment = AssignedJobs::new(worker, vec![job.id]);
        book.begin(Turn::new(RoundId::new(), assignment, Channel(0), false, at), [Some(assigned_as(job))]);
        book.end(worker, unanswered).expect("just begun");
        book.find(job, at)
    }

    #[test]
    fn a_turn_is_over_when_its_worker_says_so_or_cannot() {
        let (a, b, job, start) = (WorkerId::new(), WorkerId::new(), JobId::new(), Monotonic::now());
        let (first, second) = (RoundId::new(), RoundId::new());
        let mut book = Book::default();
        begin(&mut book, first, a, &[(job, None)], start);
        assert!(book.is_in_flight(&found(job, 0), start) && book.in_flight() == 1);
        assert!(book.end_answered(&[worker(a, None), worker(b, Some(first))]).is_empty(), "it offers slots of before; another worker");
        assert_eq!(book.end_answered(&[worker(a, Some(first))]).len(), 1);
        assert!(!book.is_in_flight(&found(job, 0), start) && book.jobs.is_empty() && book.desks.is_empty());
        let mut expired = |rounds: &[(WorkerId, Option<RoundId>)], seconds: u64| {
            begin(&mut book, first, a, &[(job, None)], start);
            book.expire(&rounds.iter().copied().collect(), start + Duration::from_secs(seconds)).len()
        };
        assert_eq!(expired(&[(a, Some(first))], 3), 0);
        assert_eq!(expired(&[(a, Some(first))], 4), 1, "it takes too long");
        assert_eq!(expired(&[(a, Some(second))], 0), 1, "it was given something else");
        assert_eq!(expired(&[], 0), 1, "it is gone");
    }

    #[test]
    fn a_second_turn_takes_the_place_of_the_first() {
        let (worker, one, two, start) = (WorkerId::new(), JobId::new(), JobId::new(), Monotonic::now());
        let mut book = Book::default();
        begin(&mut book, RoundId::new(), worker, &[(one, Some(0))], start);
        begin(&mut book, RoundId::new(), worker, &[(two, Some(0))], start);
        assert!(!book.is_assigned(&found(one, 0), start) && book.is_in_flight(&found(two, 0), start));
    }

    #[test]
    fn a_search_that_skips_a_job_tells_whether_it_is_due_again() {
        let (worker, job, start) = (WorkerId::new(), JobId::new(), Monotonic::now());
        let mut book = Book::default();
        let mut skipped = |due: Option<i64>, found_at: i64| {
            begin(&mut book, RoundId::new(), worker, &[(job, due)], start);
            assert_eq!(book.find(&found(job, found_at), start), Whereabouts::InFlight);
            let turn = book.end(worker, false).expect("it has a turn");
            (turn.skipped_in.len(), turn.due_again_in.len())
        };
        assert_eq!([skipped(Some(7), 7), skipped(Some(7), 8), skipped(None, 7)], [(1, 0), (0, 1), (0, 1)]);
    }

    #[test]
    fn what_a_worker_holds_ahead_is_in_flight_until_it_says_otherwise_or_hangs() {
        let (a, b, start) = (WorkerId::new(), WorkerId::new(), Monotonic::now());
        let [one, two, three] = [JobId::new(), JobId::new(), JobId::new()];
        let (round, mut book) = (RoundId::new(), Book::default());
        begin(&mut book, round, a, &[(one, Some(7)), (two, Some(7)), (three, None)], start);
        let report_of = |worker_id: WorkerId, jobs: &[JobId], book: &mut Book, seconds: u64| {
            book.read_ahead([(worker_id, jobs.to_vec())].into_iter(), start + Duration::from_secs(seconds));
            book.end_answered(&[worker(worker_id, Some(round))]).len()
        };
        let report = |jobs: &[JobId], book: &mut Book, seconds: u64| report_of(a, jobs, book, seconds);
        assert_eq!(report(&[two, three], &mut book, 0), 1);
        let held = |book: &Book, seconds: u64| {
            [one, two, three].map(|job| book.is_in_flight(&found(job, 7), start + Duration::from_secs(seconds)))
        };
        assert_eq!((held(&book, 3), book.in_flight()), ([false, true, true], 2));
        assert!(!book.is_in_flight(&found(two, 8), start), "it was started, and is due again");
        assert_eq!(held(&book, 4), [false; 3], "a worker that lives would have returned them");
        report(&[three], &mut book, 3);
        assert_eq!((held(&book, 3), held(&book, 4)), ([false, false, true], [false; 3]), "a repeated report makes it no younger");
        report_of(b, &[three], &mut book, 3);
        report(&[three], &mut book, 3);
        assert_eq!(held(&book, 4), [false; 3], "nor does that of another worker, which did not get it");
        report_of(b, &[], &mut book, 3);
        assert_eq!(book.returned(b, &[three]), [None].into(), "it may have been assigned by an earlier leader");
        assert_eq!(held(&book, 3), [false, false, true], "it was not that worker's any more");
        assert_eq!(book.returned(a, &[three]), [None].into());
        assert_eq!((held(&book, 0), book.in_flight(), book.workers().len()), ([false; 3], 0, 0));
        report(&[one], &mut book, 0);
        assert!(book.workers() == [a] && book.remove_worker(a, start).is_none() && book.in_flight() == 0);
        report(&[one], &mut book, 0);
        assert!(book.expire(&HashMap::new(), start).is_empty() && book.in_flight() == 0, "it is gone");
        begin(&mut book, round, a, &[(one, Some(7)), (two, Some(7))], start);
        let lane = Arc::new(found(two, 7).lane());
        assert_eq!(book.returned(a, &[two]), [Some(lane.clone())].into());
        assert_eq!(held(&book, 0), [true, false, false], "in the middle of its turn, with no room for another report");
        report(&[one], &mut book, 0);
        assert_eq!(book.returned(a, &[one, three]), [Some(lane), None].into(), "the lane of a job that is held ahead is known");
    }

    #[test]
    fn a_returned_job_waits_where_a_search_has_found_it_last() {
        let (worker, job, at) = (WorkerId::new(), found(JobId::new(), 7), Monotonic::now());
        let moved = ScheduledJob { group: "other".into(), ..job.clone() };
        let mut book = Book::default();
        for is_ahead in [false, true] {
            begin(&mut book, RoundId::new(), worker, &[(job.id, Some(7))], at);
            if is_ahead {
                book.read_ahead([(worker, vec![job.id])].into_iter(), at);
                book.end(worker, false);
            }
            assert_eq!(book.find(&moved, at), Whereabouts::InFlight);
            let lanes = book.returned(worker, &[job.id]);
            assert!(lanes.contains(&Some(Arc::new(moved.lane()))) && !lanes.contains(&None), "{lanes:?}");
        }
    }

    #[test]
    fn an_assignment_that_has_ended_is_known_until_the_scan_after_the_next_one() {
        let (worker, job, at) = (WorkerId::new(), found(JobId::new(), 7), Monotonic::now());
        let again = ScheduledJob { scheduled_at: job.scheduled_at + Duration::from_millis(1), ..job.clone() };
        let mut book = Book::default();
        let ended = |book: &mut Book| {
            begin(book, RoundId::new(), worker, &[(job.id, Some(7))], at);
            book.end(worker, false);
        };
        ended(&mut book);
        assert!(book.is_assigned(&job, at) && !book.is_assigned(&again, at));
        book.drop_old(at);
        assert!(book.is_assigned(&job, at));
        book.drop_old(at);
        assert!(!book.is_assigned(&job, at) && book.jobs.is_empty());
        ended(&mut book);
        assert_eq!((book.find(&again, at), book.find(&job, at)), (Whereabouts::Waiting, Whereabouts::Waiting), "it was retried");
        assert!(book.refusals.len() == 0 && book.jobs.is_empty());
        ended(&mut book);
        assert_eq!(book.returned(worker, &[job.id]), [Some(Arc::new(job.lane()))].into());
        assert!(!book.is_assigned(&job, at));
    }
}
