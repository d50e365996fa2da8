//! Jobs in flight. A job is in flight from its assignment until its worker answers the assignment, and while a worker holds it ahead.
//!
//! It is harmless to remove a job too early: the start of a job has its own guard.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::{JobId, RoundId, WorkerId},
    instant::Instant,
    roster::Permits,
    store::{Channel, Lane, ScheduledJob},
};

use super::fleet::FreeWorker;

/// How long an assigned job stays in flight without an answer. The next full scan then ends the turn, so this is at most five seconds with
/// the default poll interval. A worker takes an assignment within milliseconds, or within its poll interval if the hint was lost.
const IN_FLIGHT_FOR: Duration = Duration::from_secs(4);

/// One assignment to one worker, until the worker answers it by offering slots again.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    pub(crate) worker: WorkerId,
    pub(crate) round: RoundId,
    /// The channel that the worker reads hints from.
    pub(crate) channel: Channel,
    /// The jobs, and their due dates if known.
    pub(crate) jobs: Vec<(JobId, Option<Instant>)>,
    /// The permits of those that are limited.
    pub(crate) permits: Permits,
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
    /// The time since the assignment was written.
    fn age(&self, at: Monotonic) -> Duration {
        at.duration_since(self.since)
    }

    /// The time until the worker had started the jobs, if it was answered at `at`. Unknown for a worker whose slots were all filled: it
    /// answers when a job ends.
    pub(crate) fn travel(&self, at: Monotonic) -> Option<Duration> {
        let has_interval = self.permits.values().any(|permit| permit.between.is_some());
        (self.leaves_slots && has_interval).then(|| self.age(at))
    }
}

/// A job that a worker holds ahead.
#[derive(Clone, Copy, Debug)]
struct Ahead {
    /// When the roster first listed it.
    since: Monotonic,
    /// The due date at which it was assigned, if known. A job that has another date now was started in between.
    due: Option<Instant>,
}

/// All jobs in flight.
#[derive(Clone, Debug, Default)]
pub(crate) struct InFlight {
    turns: HashMap<WorkerId, Turn>,
    /// The worker of each job in a turn, and the date at which the job was assigned, if known.
    assignees: HashMap<JobId, (WorkerId, Option<Instant>)>,
    /// The jobs that each worker holds ahead, from its last report in the roster.
    ahead: HashMap<WorkerId, HashMap<JobId, Ahead>>,
    /// The worker of each job that is held ahead.
    holders: HashMap<JobId, WorkerId>,
}

impl InFlight {
    /// Adds an assignment that was written at `since`.
    pub(crate) fn begin(
        &mut self,
        round: RoundId,
        (worker, channel): (WorkerId, Channel),
        jobs: Vec<(JobId, Option<Instant>)>,
        since: Monotonic,
    ) {
        // A worker has one turn at a time.
        self.end(worker);
        self.assignees.extend(jobs.iter().map(|(job, due)| (*job, (worker, *due))));
        self.turns.insert(
            worker,
            Turn {
                worker,
                round,
                channel,
                jobs,
                permits: Permits::new(),
                leaves_slots: false,
                since,
                skipped_in: BTreeSet::new(),
                due_again_in: BTreeSet::new(),
            },
        );
    }

    /// Adds the permits of the jobs of a turn, and whether the worker has more free slots than these jobs.
    pub(crate) fn add_permits(&mut self, worker: WorkerId, permits: Permits, leaves_slots: bool) {
        if let Some(turn) = self.turns.get_mut(&worker) {
            (turn.permits, turn.leaves_slots) = (permits, leaves_slots);
        }
    }

    /// Ends the turn of a worker.
    pub(crate) fn end(&mut self, worker: WorkerId) -> Option<Turn> {
        let turn = self.turns.remove(&worker)?;
        for (job, _) in &turn.jobs {
            if self.assignees.get(job).is_some_and(|(assignee, _)| *assignee == worker) {
                self.assignees.remove(job);
            }
        }
        Some(turn)
    }

    /// Maximum number of jobs in flight: a job that is held ahead for too long still counts.
    pub(crate) fn len(&self) -> usize {
        self.assignees.len() + self.holders.len()
    }

    pub(crate) fn contains(&self, job: &ScheduledJob, at: Monotonic) -> bool {
        self.assignees.contains_key(&job.id) || self.is_ahead(job, at)
    }

    /// Whether a worker holds the job ahead. After [`IN_FLIGHT_FOR`] it does not count: a live worker would have started or returned the
    /// job.
    fn is_ahead(&self, job: &ScheduledJob, at: Monotonic) -> bool {
        let ahead = self.holders.get(&job.id).and_then(|worker| self.ahead.get(worker)?.get(&job.id));
        ahead.is_some_and(|ahead| at.duration_since(ahead.since) < IN_FLIGHT_FOR && ahead.due.is_none_or(|due| due == job.scheduled_at))
    }

    /// Updates the jobs that these workers hold ahead, from a read of the roster at `at`.
    pub(crate) fn read_ahead(&mut self, workers: &[FreeWorker], at: Monotonic) {
        workers.iter().for_each(|worker| self.set_ahead(worker.id, &worker.prefetched, at));
    }

    /// Replaces the jobs that a worker holds ahead.
    fn set_ahead(&mut self, worker: WorkerId, jobs: &[JobId], at: Monotonic) {
        let before = self.ahead.remove(&worker).unwrap_or_default();
        before.keys().for_each(|job| self.drop_holder(*job, worker));
        if jobs.is_empty() {
            return;
        }
        let assigned = self.turns.get(&worker).map_or(&[][..], |turn| &turn.jobs);
        let due: HashMap<JobId, Option<Instant>> = assigned.iter().copied().collect();
        let ahead = |job: &JobId| {
            let new = || Ahead { since: at, due: due.get(job).copied().flatten() };
            (*job, before.get(job).copied().unwrap_or_else(new))
        };
        self.ahead.insert(worker, jobs.iter().map(ahead).collect());
        self.holders.extend(jobs.iter().map(|job| (*job, worker)));
    }

    fn drop_holder(&mut self, job: JobId, worker: WorkerId) {
        if self.holders.get(&job) == Some(&worker) {
            self.holders.remove(&job);
        }
    }

    /// Removes jobs that a worker has returned, even in the middle of its turn.
    pub(crate) fn returned(&mut self, worker: WorkerId, jobs: &[JobId]) {
        let jobs: HashSet<JobId> = jobs.iter().copied().collect();
        for job in &jobs {
            self.drop_holder(*job, worker);
            if self.assignees.get(job).is_some_and(|(assignee, _)| *assignee == worker) {
                self.assignees.remove(job);
            }
        }
        if let Some(turn) = self.turns.get_mut(&worker) {
            turn.jobs.retain(|(job, _)| !jobs.contains(job));
        }
        if let Some(ahead) = self.ahead.get_mut(&worker) {
            ahead.retain(|job, _| !jobs.contains(job));
            if ahead.is_empty() {
                self.ahead.remove(&worker);
            }
        }
    }

    /// Removes a worker that has left: its turn, which is returned, and the jobs that it held ahead.
    pub(crate) fn remove_worker(&mut self, worker: WorkerId, at: Monotonic) -> Option<Turn> {
        self.set_ahead(worker, &[], at);
        self.end(worker)
    }

    /// Returns whether a search must skip this job, because it is in flight. If it is in a turn, the turn records the lane.
    pub(crate) fn skip(&mut self, job: &ScheduledJob, at: Monotonic) -> bool {
        let Some((worker, due)) = self.assignees.get(&job.id) else { return self.is_ahead(job, at) };
        let Some(turn) = self.turns.get_mut(worker) else { return self.is_ahead(job, at) };
        let lanes = if *due == Some(job.scheduled_at) { &mut turn.skipped_in } else { &mut turn.due_again_in };
        lanes.insert(job.lane());
        true
    }

    /// Ends and returns the turns of workers that accept jobs again. The jobs that these workers hold ahead stay in flight.
    pub(crate) fn end_answered(&mut self, workers: &[FreeWorker]) -> Vec<Turn> {
        let is_over = |worker: &&FreeWorker| self.turns.get(&worker.id).is_some_and(|turn| worker.round == Some(turn.round));
        let over: Vec<WorkerId> = workers.iter().filter(is_over).map(|worker| worker.id).collect();
        over.into_iter().filter_map(|worker| self.end(worker)).collect()
    }

    /// The workers that have a turn, or hold jobs ahead.
    pub(crate) fn workers(&self) -> Vec<WorkerId> {
        let workers: HashSet<WorkerId> = self.turns.keys().chain(self.ahead.keys()).copied().collect();
        workers.into_iter().collect()
    }

    /// The turns that are older than `age`.
    pub(crate) fn older_than(&self, age: Duration, at: Monotonic) -> impl Iterator<Item = &Turn> {
        self.turns.values().filter(move |turn| turn.age(at) > age)
    }

    /// Ends and returns the turns of workers that have left the roster, have another round, or take too long. `rounds` has the registered
    /// workers.
    pub(crate) fn expire(&mut self, rounds: &HashMap<WorkerId, Option<RoundId>>, at: Monotonic) -> Vec<Turn> {
        let is_over = |turn: &&Turn| turn.age(at) >= IN_FLIGHT_FOR || rounds.get(&turn.worker) != Some(&Some(turn.round));
        let over: Vec<WorkerId> = self.turns.values().filter(is_over).map(|turn| turn.worker).collect();
        let gone: Vec<WorkerId> = self.ahead.keys().filter(|worker| !rounds.contains_key(worker)).copied().collect();
        gone.into_iter().for_each(|worker| self.set_ahead(worker, &[], at));
        over.into_iter().filter_map(|worker| self.end(worker)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn a_turn_is_over_when_its_worker_says_so_or_cannot() {
        let (a, b, job, start) = (WorkerId::new(), WorkerId::new(), JobId::new(), Monotonic::now());
        let (first, second) = (RoundId::new(), RoundId::new());
        let mut flight = InFlight::default();
        flight.begin(first, (a, Channel(0)), vec![(job, None)], start);
        assert!(flight.contains(&found(job, 0), start) && flight.len() == 1);
        assert!(flight.end_answered(&[worker(a, None), worker(b, Some(first))]).is_empty(), "it offers slots of before; another worker");
        assert_eq!(flight.end_answered(&[worker(a, Some(first))]).len(), 1);
        assert!(!flight.contains(&found(job, 0), start));
        let mut expired = |rounds: &[(WorkerId, Option<RoundId>)], seconds: u64| {
            flight.begin(first, (a, Channel(0)), vec![(job, None)], start);
            flight.expire(&rounds.iter().copied().collect(), start + Duration::from_secs(seconds)).len()
        };
        assert_eq!(expired(&[(a, Some(first))], 3), 0);
        assert_eq!(expired(&[(a, Some(first))], 4), 1, "it takes too long");
        assert_eq!(expired(&[(a, Some(second))], 0), 1, "it was given something else");
        assert_eq!(expired(&[], 0), 1, "it is gone");
    }

    #[test]
    fn a_second_turn_takes_the_place_of_the_first() {
        let (worker, one, two) = (WorkerId::new(), JobId::new(), JobId::new());
        let mut flight = InFlight::default();
        flight.begin(RoundId::new(), (worker, Channel(0)), vec![(one, None)], Monotonic::now());
        flight.begin(RoundId::new(), (worker, Channel(0)), vec![(two, None)], Monotonic::now());
        assert!(!flight.contains(&found(one, 0), Monotonic::now()) && flight.contains(&found(two, 0), Monotonic::now()));
    }

    fn found(id: JobId, due: i64) -> ScheduledJob {
        let scheduled_at = Instant::from_timestamp_millis(due).expect("a date");
        ScheduledJob { id, group: "g".into(), class: "c".into(), gate: None, priority: 5, scheduled_at }
    }

    #[test]
    fn a_search_that_skips_a_job_tells_whether_it_is_due_again() {
        let (worker, job, start) = (WorkerId::new(), JobId::new(), Monotonic::now());
        let mut flight = InFlight::default();
        let mut skipped = |due: Option<i64>, found_at: i64| {
            let due = due.map(|due| found(job, due).scheduled_at);
            flight.begin(RoundId::new(), (worker, Channel(0)), vec![(job, due)], start);
            assert!(flight.skip(&found(job, found_at), start));
            let turn = flight.end(worker).expect("it has a turn");
            (turn.skipped_in.len(), turn.due_again_in.len())
        };
        assert_eq!([skipped(Some(7), 7), skipped(Some(7), 8), skipped(None, 7)], [(1, 0), (0, 1), (0, 1)]);
    }

    #[test]
    fn what_a_worker_holds_ahead_is_in_flight_until_it_says_otherwise_or_hangs() {
        let (a, b, start) = (WorkerId::new(), WorkerId::new(), Monotonic::now());
        let [one, two, three] = [JobId::new(), JobId::new(), JobId::new()];
        let (round, mut flight) = (RoundId::new(), InFlight::default());
        let due = Some(found(one, 7).scheduled_at);
        flight.begin(round, (a, Channel(0)), vec![(one, due), (two, due), (three, None)], start);
        let report = |jobs: &[JobId], flight: &mut InFlight, seconds: u64| {
            let reports = [FreeWorker { prefetched: jobs.to_vec(), ..worker(a, Some(round)) }];
            flight.read_ahead(&reports, start + Duration::from_secs(seconds));
            flight.end_answered(&reports).len()
        };
        assert_eq!(report(&[two, three], &mut flight, 0), 1);
        let held = |flight: &InFlight, seconds: u64| {
            [one, two, three].map(|job| flight.contains(&found(job, 7), start + Duration::from_secs(seconds)))
        };
        assert_eq!((held(&flight, 3), flight.len()), ([false, true, true], 2));
        assert!(!flight.contains(&found(two, 8), start), "it was started, and is due again");
        assert_eq!(held(&flight, 4), [false; 3], "a worker that lives would have returned them");
        report(&[three], &mut flight, 3);
        assert_eq!((held(&flight, 3), held(&flight, 4)), ([false, false, true], [false; 3]), "a repeated report makes it no younger");
        flight.returned(b, &[three]);
        assert_eq!(held(&flight, 3), [false, false, true], "it was not that worker's any more");
        flight.returned(a, &[three]);
        assert_eq!((held(&flight, 0), flight.len(), flight.workers().len()), ([false; 3], 0, 0));
        report(&[one], &mut flight, 0);
        assert!(flight.workers() == [a] && flight.remove_worker(a, start).is_none() && flight.len() == 0);
        report(&[one], &mut flight, 0);
        assert!(flight.expire(&HashMap::new(), start).is_empty() && flight.len() == 0, "it is gone");
        flight.begin(round, (a, Channel(0)), vec![(one, due), (two, due)], start);
        flight.returned(a, &[two]);
        assert_eq!(held(&flight, 0), [true, false, false], "in the middle of its turn, with no room for another report");
    }
}
