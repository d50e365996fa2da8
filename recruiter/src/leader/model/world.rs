//! The world of the model: its events, the loop of rounds, and the properties (a), (c), (d), (e) and (f).

use std::{
    cell::RefCell,
    collections::HashSet,
    future::Future,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    mem,
    pin::pin,
    task::{Context, Poll, Waker},
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::LeaseTerm,
    limits::LARGEST_CAPACITY,
    store::{AssignedJobs, Hint, KeptCells, ScheduledJob},
};

use super::memory::{Data, IN_FLIGHT_FOR, Job, JobSpec, Memory, SCAN_AFTER, State, Worker, WorkerSpec, date, id};
use crate::leader::{
    admission::Admission,
    book::Whereabouts,
    database::Database as _,
    rounds::{
        round::{Assigning, Summary},
        trigger::Trigger,
    },
};

/// The poll interval.
const EVERY: Duration = Duration::from_millis(1_000);
/// Number of milliseconds that a job may be late after a fruitless search.
const FRUITLESS_FOR: i64 = 100;
/// Maximum number of rounds that follow each other at once. More would be an endless loop.
const AT_ONCE: usize = 5;
/// Number of groups, each of which is a step of a full scan.
const GROUPS: u32 = 3;
/// A date in the future, in milliseconds from now.
const LATER: i64 = 60;
/// The time of the first full scan, in milliseconds.
const START: i64 = 1_000_000;

/// An event of a job or a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    Insert(usize),
    /// An insert whose hint contains the job.
    InsertAnnounced(usize),
    /// The hint of an insert, which contains the job. The job is not visible yet.
    Announce(usize),
    Appear(usize),
    /// The hint of an insert arrives late. Not among `events`, because it reports no change.
    AnnounceAgain(usize),
    /// A job gets a date this many milliseconds from now.
    Move(usize, i64),
    Cancel(usize),
    /// A worker takes its assignment: starts jobs that are due and unlocked in its free slots, holds the others ahead, and reports.
    Start(usize),
    /// A worker takes its assignment, starts no job, and reports.
    Refuse(usize),
    /// A worker locks a job that it holds ahead.
    LockAhead(usize, usize),
    /// A worker returns a job that it holds ahead.
    Return(usize, usize),
    Archive(usize),
    Retry(usize, i64),
    Join(usize),
    /// A worker leaves, and its jobs are due again.
    Leave(usize),
    /// Another recruiter leads. Not among `events`, because it can happen at any time.
    Failover,
    /// The next round begins without a hint.
    Wait,
}

impl Event {
    pub(super) fn has_hints(self) -> bool {
        !matches!(self, Self::Appear(_) | Self::Cancel(_) | Self::LockAhead(..) | Self::Wait)
    }
}

/// What happens to the hints of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hints {
    Lost,
    /// They arrive before the next round, which another event causes.
    Heard,
    /// They arrive, and a round follows.
    Round,
    /// The same, and the next event comes before the rounds that should follow at once.
    Step,
}

#[derive(Clone)]
pub(super) struct World {
    pub(super) memory: Memory,
    pub(super) assigning: Assigning,
    /// Jobs whose lanes slept in one of the rounds that followed each other at once.
    slept: HashSet<usize>,
    pub(super) trigger: Trigger,
    summary: Summary,
    scan_at: i64,
    /// Number of further rounds that may follow at once, because lanes are listed or woken in steps.
    pub(super) further_rounds: usize,
    /// The next event comes before the rounds that should follow at once.
    is_interrupted: bool,
    path: Vec<(Event, Hints)>,
}

impl World {
    pub(super) fn new(surplus_per_slot: usize, workers: &[WorkerSpec<'_>], jobs: &[JobSpec<'_>]) -> Self {
        let jobs = jobs.iter().enumerate().map(|(number, job)| Job::new(number, *job)).collect();
        let workers = workers.iter().map(|worker| Worker::new(*worker)).collect();
        let data = RefCell::new(Data { now: START, jobs, workers });
        Self {
            memory: Memory {
                start: Monotonic::now(),
                surplus_per_slot,
                capacity: LARGEST_CAPACITY,
                is_walk_slow: false,
                cut: RefCell::default(),
                data,
                broken: RefCell::default(),
            },
            assigning: Assigning::default(),
            slept: HashSet::new(),
            trigger: Trigger::default(),
            summary: Summary::default(),
            scan_at: START,
            further_rounds: 0,
            is_interrupted: false,
            path: Vec::new(),
        }
    }

    /// Every event that can happen now.
    pub(super) fn events(&self) -> Vec<Event> {
        let data = self.memory.data.borrow();
        let (mut events, mut new) = (vec![Event::Wait], HashSet::new());
        for (number, job) in data.jobs.iter().enumerate() {
            match job.state {
                // Of equal jobs only the first one can be inserted next.
                State::Absent if job.is_new && new.insert((job.job.lane(), job.job.priority)) => {
                    events.extend([Event::Insert(number), Event::InsertAnnounced(number), Event::Announce(number)]);
                }
                State::Absent => {}
                State::Announced => events.push(Event::Appear(number)),
                State::Due => events.extend([Event::Cancel(number), Event::Move(number, 0), Event::Move(number, LATER)]),
                State::Locked(worker) if data.workers[worker].held.contains_key(&number) => {}
                State::Locked(_) => events.extend([Event::Archive(number), Event::Retry(number, 0), Event::Retry(number, LATER)]),
            }
        }
        for (number, worker) in data.workers.iter().enumerate() {
            if !worker.assigned.is_empty() {
                events.extend([Event::Start(number), Event::Refuse(number)]);
            } else {
                events.extend(worker.held.keys().map(|job| Event::Return(number, *job)));
            }
            let may_lock = |job: &Job| job.state == State::Due && job.job.gate.is_none() && job.job.scheduled_at <= date(data.now);
            events.extend(worker.held.keys().filter(|job| may_lock(&data.jobs[**job])).map(|job| Event::LockAhead(number, *job)));
            if worker.is_registered {
                events.push(Event::Leave(number));
            } else if !worker.has_left {
                events.push(Event::Join(number));
            }
        }
        events
    }

    /// Runs an event, and a round if its hints cause one.
    pub(super) fn step(&mut self, event: Event, hints: Hints) {
        let sent = self.happen(event);
        if hints != Hints::Lost {
            sent.into_iter().for_each(|hint| self.trigger.add(hint, &mut self.assigning.alarms));
        }
        if hints == Hints::Round && !self.trigger.is_empty() {
            self.round();
        } else if hints == Hints::Step && !self.trigger.is_empty() {
            self.tick();
            self.is_interrupted = true;
        }
        self.path.push((event, hints));
        let broken = self.memory.broken.borrow();
        let path = || self.path.iter().map(|(event, hints)| format!("  {event:?}, {hints:?}\n")).collect::<String>();
        assert!(
            broken.is_none(),
            "{}; the steps, with a surplus of {} jobs per slot:\n{}",
            broken.as_deref().unwrap_or(""),
            self.memory.surplus_per_slot,
            path()
        );
    }

    /// Changes the database as the event does. Returns its hints.
    fn happen(&mut self, event: Event) -> Vec<Hint> {
        if event == Event::Wait {
            self.wait();
            return Vec::new();
        }
        while !mem::take(&mut self.is_interrupted) && self.trigger.is_empty() && self.wakes_at() <= self.now() {
            self.wait();
        }
        let data = self.memory.data.get_mut();
        data.now += 1;
        let now = data.now;
        let due =
            |job: &Job, by: i64, jobs| vec![Hint::Jobs { groups: vec![job.job.group.clone()], at: (by > 0).then(|| date(now + by)), jobs }];
        match event {
            Event::Insert(job) | Event::InsertAnnounced(job) | Event::Announce(job) => {
                let job = &mut data.jobs[job];
                (job.is_new, job.job.scheduled_at) = (false, date(now));
                job.state = if matches!(event, Event::Announce(_)) { State::Announced } else { State::Due };
                due(job, 0, if matches!(event, Event::Insert(_)) { Vec::new() } else { vec![job.job.clone()] })
            }
            Event::Appear(job) => {
                data.jobs[job].change(State::Due, None);
                Vec::new()
            }
            Event::AnnounceAgain(job) => due(&data.jobs[job], 0, vec![data.jobs[job].job.clone()]),
            Event::Cancel(job) => {
                data.jobs[job].change(State::Absent, None);
                Vec::new()
            }
            Event::Move(job, by) => {
                data.jobs[job].change(State::Due, Some(now + by));
                data.workers.iter_mut().filter_map(|worker| worker.held.get_mut(&job)).for_each(|assigned_at| *assigned_at = i64::MIN);
                due(&data.jobs[job], by, Vec::new())
            }
            Event::Start(worker) | Event::Refuse(worker) => {
                let starts = |job: &Job| event == Event::Start(worker) && job.state == State::Due && job.job.scheduled_at <= date(now);
                let (assigned_at, jobs) = (data.workers[worker].assigned_at, mem::take(&mut data.workers[worker].assigned));
                let (startable, left): (Vec<usize>, Vec<usize>) = jobs.into_iter().partition(|job| starts(&data.jobs[*job]));
                // To the recruiter, a job that has another date was started.
                let ahead_since = |job: usize| (job, if data.jobs[job].is_moved { i64::MIN } else { assigned_at });
                data.workers[worker].held.extend(startable.into_iter().map(ahead_since));
                data.workers[worker].has_skipped |= !left.is_empty();
                for job in left {
                    // If a search has skipped it, its lane is a recent one.
                    let was_skipped = data.jobs[job].is_known;
                    data.jobs[job].leave(was_skipped || now - assigned_at < SCAN_AFTER);
                    data.workers[worker].waiting.remove(&job);
                    data.free_permit(worker, job);
                }
                data.workers[worker].known = 0;
                data.report(worker, Vec::new())
            }
            Event::LockAhead(worker, job) => {
                data.jobs[job].change(State::Locked(worker), None);
                Vec::new()
            }
            Event::Return(worker, job) => {
                let mut hints = Vec::new();
                if data.jobs[job].state == State::Locked(worker) {
                    data.jobs[job].change(State::Due, None);
                    hints = due(&data.jobs[job], 0, Vec::new());
                }
                hints.extend(data.report(worker, vec![job]));
                hints
            }
            Event::Archive(job) | Event::Retry(job, _) => {
                let State::Locked(worker) = data.jobs[job].state else { unreachable!("only a started job ends") };
                let mut hints = Vec::new();
                if let Event::Retry(_, by) = event {
                    data.jobs[job].change(State::Due, Some(now + by));
                    hints = due(&data.jobs[job], by, Vec::new());
                } else {
                    data.jobs[job].change(State::Absent, None);
                }
                data.free_permit(worker, job);
                hints.extend(data.report(worker, Vec::new()));
                hints
            }
            Event::Join(worker) => {
                data.workers[worker].is_registered = true;
                data.report(worker, Vec::new())
            }
            Event::Leave(worker) => {
                let mut hints = vec![Hint::Left { worker: id(worker).into() }];
                for job in data.jobs.iter_mut().filter(|job| job.state == State::Locked(worker)) {
                    job.change(State::Due, Some(now));
                    hints.extend(due(job, 0, Vec::new()));
                }
                let gone = &mut data.workers[worker];
                (gone.is_registered, gone.has_left, gone.is_available) = (false, true, false);
                gone.permits.clear();
                gone.waiting.clear();
                for job in mem::take(&mut gone.assigned) {
                    let was_skipped = data.jobs[job].is_known;
                    data.jobs[job].leave(was_skipped || now - gone.assigned_at < SCAN_AFTER);
                }
                for (job, assigned_at) in mem::take(&mut gone.held) {
                    data.jobs[job].leave(now.saturating_sub(assigned_at) < SCAN_AFTER);
                }
                hints
            }
            Event::Failover => {
                self.fail_over();
                vec![Hint::Seed]
            }
            Event::Wait => Vec::new(),
        }
    }

    /// A new leader knows the settings, the permits in use and the assignments that are not taken yet, and nothing else.
    fn fail_over(&mut self) {
        let at = self.memory.monotonic();
        let settings = at_once(self.memory.settings()).expect("no errors in memory");
        let holders = at_once(self.memory.permit_holders()).expect("no errors in memory");
        let Data { now, jobs, workers } = self.memory.data.get_mut();
        let (crowd, bounds) = (self.assigning.lanes.windows.crowd, self.assigning.lanes.discovery.bounds);
        (self.assigning, self.trigger, self.summary) = Default::default();
        (self.assigning.lanes.windows.crowd, self.assigning.lanes.discovery.bounds) = (crowd, bounds);
        self.assigning.admission = Admission::begin(settings, &holders, KeptCells::default(), date(*now));
        let mut inherited = Vec::new();
        for (number, worker) in workers.iter_mut().enumerate() {
            worker.known = 0;
            worker.held.values_mut().for_each(|assigned_at| *assigned_at = i64::MIN);
            if let Some(round) = worker.round.filter(|_| worker.is_registered && !worker.assigned.is_empty()) {
                let assigned = worker.assigned.iter().map(|job| id(*job).into()).collect();
                inherited.push((worker.assigned_at, (round, AssignedJobs::new(id(number).into(), assigned))));
            }
        }
        inherited.sort_by_key(|(assigned_at, _)| *assigned_at);
        self.assigning.inherit(inherited.into_iter().map(|(_, assignment)| assignment).collect(), at);
        jobs.iter_mut().for_each(|job| (job.is_known, job.is_outdated, job.in_flight_since) = (false, false, *now));
    }

    fn now(&self) -> i64 {
        self.memory.data.borrow().now
    }

    /// When the next round begins without a hint, computed as in `rounds`.
    fn wakes_at(&self) -> i64 {
        let due = self.summary.next_due.into_iter().chain(self.assigning.alarms.next()).min().map(|due| due.timestamp_millis() + 1);
        let retry = self.summary.retry_at.map(|at| self.memory.milliseconds(at));
        due.into_iter().chain(retry).fold(self.scan_at, i64::min)
    }

    fn wait(&mut self) {
        if self.trigger.is_empty() {
            self.memory.data.get_mut().now = self.wakes_at().max(self.now());
        }
        self.round();
    }

    /// Runs a round, and further rounds as long as they are due at once. Checks the properties after the last one.
    fn round(&mut self) {
        self.slept.clear();
        for _ in 0..AT_ONCE + self.further_rounds {
            self.tick();
            if self.wakes_at() > self.now() {
                return self.check();
            }
        }
        self.memory.broken("(f) too many rounds follow each other at once");
    }

    /// Runs a round, and checks property (g).
    fn tick(&mut self) {
        let now = self.now();
        let mut trigger = mem::take(&mut self.trigger);
        trigger.full_scan |= now >= self.scan_at;
        trigger.add_groups(self.assigning.alarms.ring(date(now)));
        if trigger.full_scan {
            self.scan_at = now + SCAN_AFTER;
        }
        self.learn(&trigger);
        self.note_sleeping();
        self.summary = at_once(self.assigning.tick(&self.memory, LeaseTerm::default(), trigger, EVERY)).expect("no errors in memory");
        self.note_sleeping();
        let (refusals, Data { jobs, workers, .. }) = (&self.assigning.book.refusals, &*self.memory.data.borrow());
        for (worker, number) in workers.iter().enumerate().flat_map(|(worker, of)| of.ahead.iter().map(move |job| (worker, *job))) {
            let job = &jobs[number].job;
            let is_preferred = |other: usize| !refusals.was_refused_by(job.id, id(other).into()) && !refusals.was_unanswered(job.id);
            let has_slot = |other: &Worker| other.slots() > 0 && other.takes(job);
            let other = workers.iter().enumerate().position(|(other, of)| has_slot(of) && is_preferred(other));
            if job.gate.is_some() || other.is_some() {
                self.memory.broken(&format!("(g) job {number} goes ahead to worker {worker}, and {other:?} has a free slot"));
            }
        }
    }

    fn note_sleeping(&mut self) {
        let jobs = &self.memory.data.borrow().jobs;
        self.slept.extend((0..jobs.len()).filter(|job| self.assigning.lanes.windows.sleeps(&jobs[*job].job)));
    }

    /// Updates which jobs and slots the recruiter knows after these hints.
    fn learn(&mut self, trigger: &Trigger) {
        let (at, is_listing) = (self.memory.monotonic(), self.assigning.lanes.discovery.is_scanning());
        let Data { jobs, workers, .. } = self.memory.data.get_mut();
        for job in jobs {
            let is_returned = trigger.returned.iter().any(|(_, jobs)| jobs.contains(&job.job.id));
            let is_left = job.is_left && (trigger.refused || !trigger.left.is_empty() || is_returned);
            job.scans += u32::from(trigger.full_scan && job.state == State::Due);
            // A full scan in steps is completed before the next one begins, and each full scan that is due takes a step.
            let is_scanned = trigger.full_scan && (!is_listing || job.scans > GROUPS);
            // A full scan finds the first gated jobs of a group.
            let is_of_group = job.job.gate.is_none() && trigger.groups.contains(&job.job.group);
            let is_announced = is_of_group || trigger.announced.contains(&job.job);
            // The recruiter skips a job that it believes to be in flight. If its worker has refused it, the hint about that counts.
            let is_announced = is_announced && !self.assigning.book.is_in_flight(&job.job, at);
            job.is_hinted = job.state == State::Due && (is_scanned || is_announced || is_left);
            job.is_known |= job.is_hinted;
            let is_old = |announced: &ScheduledJob| announced.id == job.job.id && *announced != job.job;
            job.is_outdated = job.is_outdated && !job.is_hinted || trigger.announced.iter().any(is_old);
        }
        for worker in workers {
            (worker.given, worker.ahead, worker.spare) = (Vec::new(), Vec::new(), 0);
            if trigger.full_scan || !trigger.left.is_empty() || (worker.is_available && trigger.workers) {
                worker.is_known_holder = !worker.permits.is_empty();
            }
            if worker.is_available && (trigger.full_scan || trigger.workers) {
                worker.known = worker.free;
            }
        }
    }

    /// Checks the properties (a), (c), (d) and (e).
    fn check(&self) {
        if self.assigning.lanes.windows.has_job_behind_end() {
            self.memory.broken("(d) a window has a job after its end");
        }
        let (now, wakes_at) = (self.now(), self.wakes_at());
        let (mut book, at) = (self.assigning.book.clone(), self.memory.monotonic());
        let in_flight = |job: &Job| self.assigning.book.is_in_flight(&job.job, at);
        for job in &mut self.memory.data.borrow_mut().jobs {
            job.in_flight_since = if in_flight(job) { job.in_flight_since } else { now };
        }
        let Data { jobs, workers, .. } = &*self.memory.data.borrow();
        // A turn, and then the time for which its worker holds the job ahead.
        let longest = SCAN_AFTER + if workers.iter().any(|worker| worker.prefetch > 0) { IN_FLIGHT_FOR * 2 } else { IN_FLIGHT_FOR };
        if let Some(number) = jobs.iter().position(|job| now - job.in_flight_since > longest) {
            self.memory.broken(&format!("(e) job {number} is in flight for too long"));
        }
        let is_crowded = self.assigning.lanes.windows.is_crowded(date(now));
        // The only permit of each gate. The model has one gate.
        let is_full = self.memory.capacity == 1 && workers.iter().any(|worker| worker.is_known_holder);
        let waits = |job: &Job| job.is_known && job.state == State::Due && !in_flight(job) && !(is_full && job.job.gate.is_some());
        for (number, job) in jobs.iter().enumerate().filter(|(_, job)| waits(job)) {
            let ready_at = match book.find(&job.job, self.memory.at(now)) {
                Whereabouts::PausedUntil(until) => self.memory.milliseconds(until),
                Whereabouts::Waiting | Whereabouts::InFlight => job.job.scheduled_at.timestamp_millis(),
            };
            let late = if job.is_hinted && ready_at <= now { 0 } else { FRUITLESS_FOR };
            // After a fruitless search the next round is due later.
            let idle_until = ready_at + if self.summary.retry_at.is_some() { late } else { 0 };
            for (index, worker) in workers.iter().enumerate().filter(|(_, worker)| worker.takes(&job.job)) {
                let slots = worker.slots();
                // Limited jobs do not go ahead.
                let is_before = |other: usize| job.job.gate.is_none() || !worker.ahead.contains(&other);
                let less_urgent = worker.given.iter().find(|other| jobs[**other].job.position() > job.job.position() && is_before(**other));
                // A worker that gets jobs gets no more of lanes that wake later.
                let is_asleep = self.slept.contains(&number) && (!worker.is_available || is_crowded);
                if slots > 0 && idle_until <= now && !is_asleep {
                    self.memory.broken(&format!("(a) job {number} waits beside a free slot of worker {index}"));
                }
                if slots > 0 && worker.is_available && !is_asleep && wakes_at > idle_until.max(now) + 1 {
                    self.memory.broken(&format!("(a) the next round, at {wakes_at}, is too late for job {number}, at {idle_until}"));
                }
                if let Some(other) = less_urgent.filter(|_| ready_at + late <= now && !self.slept.contains(&number)) {
                    self.memory.broken(&format!("(c) job {number} waits while worker {index} gets job {other}"));
                }
            }
        }
    }

    /// A hash of all state that later events depend on: of its `Debug` text, with the entries of sets and maps in order.
    pub(super) fn fingerprint(&self) -> u64 {
        let Self { memory, assigning, trigger, summary, scan_at, slept: _, further_rounds: _, is_interrupted: _, path: _ } = self;
        let data = &*memory.data.borrow();
        let mut text = format!("{data:?} {assigning:?} {trigger:?} {summary:?} {scan_at},");
        // A round id is only compared with the last round of a worker, so its value does not matter.
        for (number, round) in data.workers.iter().enumerate().filter_map(|(number, worker)| Some((number, worker.round?))) {
            text = text.replace(&round.to_string(), &format!("round {number}"));
        }
        let mut open = vec![vec![String::new()]];
        for piece in text.split_inclusive(['{', '[', '(', '}', ']', ')', ',']) {
            let (piece, mark) = piece.split_at(piece.len() - 1);
            open.last_mut().and_then(|parts| parts.last_mut()).expect("brackets match").push_str(piece);
            match mark {
                "{" | "[" | "(" => open.push(vec![String::new()]),
                "," => open.last_mut().expect("brackets match").push(String::new()),
                _ => {
                    let mut parts = open.pop().expect("brackets match");
                    if mark == "}" {
                        parts.sort();
                    }
                    open.last_mut()
                        .and_then(|parts| parts.last_mut())
                        .expect("brackets match")
                        .push_str(&format!("{{{}}}", parts.join(",")));
                }
            }
        }
        let mut hasher = DefaultHasher::new();
        open.hash(&mut hasher);
        hasher.finish()
    }
}

/// The result of a future that never waits.
fn at_once<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => panic!("memory answers at once"),
    }
}
