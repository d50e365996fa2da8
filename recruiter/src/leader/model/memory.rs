//! The database of the model: jobs, the roster, and which of them the recruiter knows. Checks property (b) of each plan.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    time::{Duration, Instant as Monotonic},
};

use bson::oid::ObjectId;
use recruiter_common::{
    ids::{LeaseTerm, RoundId, WorkerId},
    instant::Instant,
    limits::{Limit, Pause, Settings},
    roster::{AvailableWorker, PermitHolder, WorkOn},
    store::{AssignedJobs, Channel, DueJobs, FastLimits, Head, Hint, Lane, Planned, RateCell, ScheduledJob, StoreError},
};

use crate::leader::database::Database;

/// For this many milliseconds a job in flight must not be assigned to another worker.
pub(super) const IN_FLIGHT_FOR: i64 = 4_000;

/// Groups, classes and slots of a worker; group, class, gate and priority of a job.
pub(super) type WorkerSpec<'a> = (&'a [&'a str], &'a [&'a str], u32);
pub(super) type JobSpec<'a> = (&'a str, &'a str, Option<&'a str>, i64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Absent,
    /// Announced, not visible yet.
    Announced,
    Due,
    /// Locked by this worker.
    Locked(usize),
}

#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) job: ScheduledJob,
    pub(super) state: State,
    /// It was not inserted yet.
    pub(super) is_new: bool,
    pub(super) is_known: bool,
    /// The last round had a full scan or a hint about it.
    pub(super) is_hinted: bool,
    /// Its worker has answered the assignment, or has left, without starting it.
    pub(super) is_left: bool,
    /// The caches may have it under an earlier date.
    pub(super) is_outdated: bool,
    pub(super) assigned_at: i64,
}

impl Job {
    pub(super) fn new(number: usize, (group, class, gate, priority): JobSpec<'_>) -> Self {
        let (group, class, gate) = (group.into(), class.into(), gate.map(str::to_owned));
        let job = ScheduledJob { id: id(number).into(), group, class, gate, priority, scheduled_at: date(0) };
        let (is_new, is_known, is_hinted, is_left, is_outdated) = (true, false, false, false, false);
        Self { job, state: State::Absent, is_new, is_known, is_hinted, is_left, is_outdated, assigned_at: 0 }
    }

    pub(super) fn change(&mut self, state: State, at: Option<i64>) {
        (self.state, self.is_known, self.is_hinted, self.is_left) = (state, false, false, false);
        if let Some(at) = at {
            (self.is_outdated, self.job.scheduled_at) = (true, date(at).max(self.job.scheduled_at + Duration::from_millis(1)));
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Worker {
    pub(super) work_on: WorkOn,
    pub(super) classes: Vec<String>,
    pub(super) capacity: u32,
    pub(super) is_registered: bool,
    pub(super) has_left: bool,
    pub(super) is_available: bool,
    pub(super) free: u32,
    pub(super) round: Option<RoundId>,
    /// The assignment that it has not taken yet.
    pub(super) assigned: Vec<usize>,
    pub(super) assigned_at: i64,
    /// Number of its known free slots.
    pub(super) known: u32,
    /// The jobs that the current round gives to it, except those that the caches may have under an earlier date.
    pub(super) given: Vec<usize>,
    /// Number of its known slots that stay free.
    pub(super) spare: u32,
    /// The permits of its jobs, if the limits of the gates are one.
    pub(super) permits: BTreeMap<usize, Vec<String>>,
    /// Whether it holds permits, as far as the recruiter knows.
    pub(super) is_known_holder: bool,
}

impl Worker {
    pub(super) fn new((groups, classes, capacity): (&[&str], &[&str], u32)) -> Self {
        let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        Self {
            work_on: if groups == ["*"] { WorkOn::All } else { WorkOn::Groups(names(groups)) },
            classes: names(classes),
            capacity,
            is_registered: false,
            has_left: false,
            is_available: false,
            free: capacity,
            round: None,
            assigned: Vec::new(),
            assigned_at: 0,
            known: 0,
            given: Vec::new(),
            spare: 0,
            permits: BTreeMap::new(),
            is_known_holder: false,
        }
    }

    fn names(&self) -> Vec<String> {
        self.permits.values().flatten().cloned().collect()
    }

    pub(super) fn takes(&self, job: &ScheduledJob) -> bool {
        self.is_registered && self.work_on.includes(&job.group) && self.classes.contains(&job.class)
    }
}

/// The contents of MongoDB.
#[derive(Clone, Debug)]
pub(super) struct Data {
    /// The time of both clocks, in milliseconds.
    pub(super) now: i64,
    pub(super) jobs: Vec<Job>,
    pub(super) workers: Vec<Worker>,
}

impl Data {
    /// Lets a worker report its free slots. Returns its hint.
    pub(super) fn offer(&mut self, worker: usize) -> Option<Hint> {
        let running = self.jobs.iter().filter(|job| job.state == State::Locked(worker)).count();
        let worker = &mut self.workers[worker];
        worker.free = worker.capacity - u32::try_from(running).expect("a few");
        worker.is_available = true;
        (worker.free > 0).then_some(Hint::Free)
    }
}

/// The database of the model.
#[derive(Clone)]
pub(super) struct Memory {
    pub(super) start: Monotonic,
    pub(super) surplus_per_slot: usize,
    /// The capacity of each gate.
    pub(super) capacity: u32,
    /// Number of searches whose answer did not contain all jobs.
    pub(super) cut: RefCell<usize>,
    pub(super) data: RefCell<Data>,
    /// The first property that did not hold.
    pub(super) broken: RefCell<Option<String>>,
}

/// The id with this number.
pub(super) fn id(number: usize) -> ObjectId {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&(number as u64).to_be_bytes());
    ObjectId::from_bytes(bytes)
}

fn number(id: impl Into<ObjectId>) -> usize {
    id.into().bytes()[10..].iter().fold(0, |number, byte| number << 8 | usize::from(*byte))
}

pub(super) fn date(ms: i64) -> Instant {
    Instant::from_timestamp_millis(ms).expect("a date")
}

impl Memory {
    /// The instant of this process's clock at this date.
    pub(super) fn at(&self, ms: i64) -> Monotonic {
        self.start + Duration::from_millis(ms.unsigned_abs())
    }

    pub(super) fn milliseconds(&self, at: Monotonic) -> i64 {
        i64::try_from((at - self.start).as_millis()).expect("milliseconds")
    }

    /// Every lane that has unlocked jobs.
    fn lanes(&self) -> impl Iterator<Item = Lane> {
        let data = self.data.borrow();
        let lanes: BTreeSet<Lane> = data.jobs.iter().filter(|job| job.state == State::Due).map(|job| job.job.lane()).collect();
        lanes.into_iter()
    }

    /// Records the first broken property.
    pub(super) fn broken(&self, what: &str) {
        self.broken.borrow_mut().get_or_insert(what.into());
    }
}

impl Database for Memory {
    fn now(&self) -> Instant {
        date(self.data.borrow().now)
    }

    fn monotonic(&self) -> Monotonic {
        self.at(self.data.borrow().now)
    }

    fn surplus_per_slot(&self) -> usize {
        self.surplus_per_slot
    }

    async fn available_workers(&self, _: LeaseTerm) -> Result<Vec<AvailableWorker>, StoreError> {
        let available = |(number, worker): (usize, &Worker)| {
            let Worker { work_on, classes, free, round, .. } = worker.clone();
            let permits = worker.names();
            let (id, channel, lease) = (id(number).into(), Channel::default(), Duration::from_secs(1_000_000));
            let offers = worker.is_registered && worker.is_available && free > 0;
            offers.then_some(AvailableWorker {
                id,
                work_on,
                classes,
                free,
                prefetch: 0,
                class_slots: Vec::new(),
                prefetched: Vec::new(),
                held_permits: Some(permits),
                round,
                channel,
                last_seen_at: None,
                lease,
            })
        };
        Ok(self.data.borrow().workers.iter().enumerate().filter_map(available).collect())
    }

    async fn rounds_of(&self, workers: &[WorkerId]) -> Result<HashMap<WorkerId, Option<RoundId>>, StoreError> {
        let data = self.data.borrow();
        let registered = workers.iter().filter(|worker| data.workers[number(**worker)].is_registered);
        Ok(registered.map(|worker| (*worker, data.workers[number(*worker)].round)).collect())
    }

    async fn channels(&self) -> Result<BTreeSet<Channel>, StoreError> {
        Ok(BTreeSet::new())
    }

    async fn groups(&self) -> Result<BTreeSet<String>, StoreError> {
        Ok(self.lanes().filter(|lane| lane.gate.is_none()).map(|lane| lane.group).collect())
    }

    async fn gated_groups(&self) -> Result<BTreeSet<String>, StoreError> {
        Ok(self.lanes().filter(|lane| lane.gate.is_some()).map(|lane| lane.group).collect())
    }

    async fn waiting_lanes(&self) -> Result<BTreeMap<Lane, Instant>, StoreError> {
        Ok(self.lanes().filter(|lane| lane.gate.is_none()).map(|lane| (lane, Instant::MIN_UTC)).collect())
    }

    async fn lanes_of(&self, group: &str, _: usize) -> Result<(Vec<Lane>, bool), StoreError> {
        Ok((self.lanes().filter(|lane| lane.group == group && lane.gate.is_none()).collect(), true))
    }

    async fn gated_lanes_of(&self, group: &str) -> Result<Vec<Lane>, StoreError> {
        Ok(self.lanes().filter(|lane| lane.group == group && lane.gate.is_some()).collect())
    }

    async fn due_jobs(&self, lanes: &[Lane], until: Instant, limit: usize) -> Result<DueJobs, StoreError> {
        let data = self.data.borrow();
        let due = data.jobs.iter().filter(|job| job.state == State::Due).map(|job| &job.job);
        let mut jobs: Vec<ScheduledJob> = due.filter(|job| job.scheduled_at <= until && lanes.contains(&job.lane())).cloned().collect();
        jobs.sort_by_key(ScheduledJob::position);
        *self.cut.borrow_mut() += usize::from(jobs.len() > limit);
        let is_full = jobs.len() >= limit;
        jobs.truncate(limit);
        let end = jobs.last().filter(|_| is_full).map(ScheduledJob::position);
        Ok(DueJobs { jobs, end })
    }

    async fn due_jobs_of_each(&self, lanes: &[(Lane, usize)], until: Instant) -> Result<Vec<DueJobs>, StoreError> {
        let mut found = Vec::new();
        for (lane, limit) in lanes {
            found.push(self.due_jobs(std::slice::from_ref(lane), until, *limit).await?);
        }
        Ok(found)
    }

    async fn heads_of_lines(&self, _: &[&str]) -> Result<HashMap<String, Head>, StoreError> {
        Ok(HashMap::new())
    }

    async fn halted_lines(&self, _: &[&str]) -> Result<HashMap<String, Pause>, StoreError> {
        Ok(HashMap::new())
    }

    async fn settings(&self) -> Result<Settings, StoreError> {
        let limit = Limit { capacity: Some(self.capacity), rate: None };
        let gates: BTreeSet<String> = self.data.borrow().jobs.iter().filter_map(|job| job.job.gate.clone()).collect();
        Ok(Settings { limits: gates.into_iter().map(|gate| (gate, limit)).collect(), ..Settings::default() })
    }

    async fn prepare_limited_jobs(&self) -> Result<(), StoreError> {
        Ok(())
    }

    async fn keep_cells(&self, _: LeaseTerm, _: &[(String, RateCell)], _: Option<&FastLimits>) -> Result<(), StoreError> {
        Ok(())
    }

    async fn permit_holders(&self) -> Result<Vec<PermitHolder>, StoreError> {
        let data = self.data.borrow();
        let holders = data.workers.iter().enumerate().filter(|(_, worker)| !worker.permits.is_empty());
        Ok(holders.map(|(number, worker)| PermitHolder { worker: id(number).into(), permits: worker.names(), jobs: Vec::new() }).collect())
    }

    async fn running_without_permit(&self, _: &[String]) -> Result<HashMap<String, u64>, StoreError> {
        Ok(HashMap::new())
    }

    async fn assign_if_available(&self, _: LeaseTerm, round: RoundId, planned: &[Planned]) -> Result<Vec<WorkerId>, StoreError> {
        let mut data = self.data.borrow_mut();
        let Data { now, jobs, workers } = &mut *data;
        let (mut once, mut won) = (HashSet::new(), Vec::new());
        for AssignedJobs { worker: id, jobs: given, permits } in planned.iter().map(|planned| &planned.assignment) {
            let (this, given): (_, Vec<usize>) = (number(*id), given.iter().map(|job| number(*job)).collect());
            let is_elsewhere = |job: &usize| {
                let has = |worker: &Worker| worker.assigned.contains(job) && *now - worker.assigned_at < IN_FLIGHT_FOR;
                workers.iter().enumerate().any(|(other, worker)| other != this && worker.is_registered && has(worker))
            };
            let elsewhere = given.iter().copied().find(is_elsewhere);
            let held: Vec<String> = workers.iter().flat_map(Worker::names).collect();
            let worker = &mut workers[this];
            // The unique index refuses a permit that is held.
            if !(worker.is_registered && worker.is_available)
                || permits.values().flat_map(|permit| &permit.names).any(|name| held.contains(name))
            {
                continue;
            }
            if self.capacity == 1 {
                worker.permits.extend(permits.iter().map(|(job, permit)| (number(*job), permit.names.clone())));
                worker.is_known_holder = !worker.permits.is_empty();
            }
            let is_taken = given.iter().all(|job| worker.takes(&jobs[*job].job) && once.insert(*job));
            if !is_taken || given.len() > worker.free as usize || elsewhere.is_some() {
                self.broken(&format!("(b) worker {this} gets {given:?}; {elsewhere:?} is in flight"));
            }
            worker.given = given.iter().copied().filter(|job| !jobs[*job].is_outdated).collect();
            worker.spare = worker.known.saturating_sub(u32::try_from(given.len()).expect("a few"));
            for job in &given {
                (jobs[*job].is_known, jobs[*job].is_left, jobs[*job].assigned_at) = (false, false, *now);
            }
            (worker.is_available, worker.round, worker.assigned, worker.assigned_at) = (false, Some(round), given, *now);
            won.push(*id);
        }
        Ok(won)
    }

    async fn announce_hints_to(&self, _: Vec<(Channel, Hint)>) -> bool {
        true
    }
}
