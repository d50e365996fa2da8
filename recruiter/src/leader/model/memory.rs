//! The database of the model: jobs, the roster, and which of them the recruiter knows. Checks property (b) of each plan.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    mem,
    time::{Duration, Instant as Monotonic},
};

use bson::oid::ObjectId;
use mongodb::error::{CommandError, Error, ErrorKind};
use recruiter_common::{
    ids::{LeaseTerm, RoundId, WorkerId},
    instant::Instant,
    limits::{Limit, Pause, Settings},
    store::{
        AssignedJobs, AvailableWorker, Channel, DueJobs, FastLimits, Head, Hint, Lane, PermitHolder, Planned, RateCell, ScheduledJob,
        StoreError, WorkOn,
    },
};

use crate::leader::database::Database;

/// For this many milliseconds a job in flight must not be assigned to another worker.
pub(super) const IN_FLIGHT_FOR: i64 = 4_000;
/// Milliseconds from one full scan to the next.
pub(super) const SCAN_AFTER: i64 = 900;

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
    /// Its worker has answered the assignment, has returned the job, or has left, without starting it.
    pub(super) is_left: bool,
    /// It may have another date than in its assignment.
    pub(super) is_moved: bool,
    /// The caches may have it under an earlier date.
    pub(super) is_outdated: bool,
    /// When it was assigned, or was last not in flight.
    pub(super) in_flight_since: i64,
    /// Number of full scans that were due since its last change.
    pub(super) scans: u32,
}

impl Job {
    pub(super) fn new(number: usize, (group, class, gate, priority): JobSpec<'_>) -> Self {
        let (group, class, gate) = (group.into(), class.into(), gate.map(str::to_owned));
        let job = ScheduledJob { id: id(number).into(), group, class, gate, priority, scheduled_at: date(0) };
        let [is_known, is_hinted, is_left, is_moved, is_outdated] = [false; 5];
        Self { job, state: State::Absent, is_new: true, is_known, is_hinted, is_left, is_moved, is_outdated, in_flight_since: 0, scans: 0 }
    }

    /// It is assigned, or a worker does not start it. `has_hint`: a hint about that leads to it.
    pub(super) fn leave(&mut self, has_hint: bool) {
        (self.is_left, self.is_known, self.scans) = (has_hint, false, 0);
    }

    pub(super) fn change(&mut self, state: State, at: Option<i64>) {
        (self.state, self.is_known, self.is_hinted, self.is_left, self.scans) = (state, false, false, false, 0);
        if let Some(at) = at {
            (self.is_moved, self.is_outdated, self.job.scheduled_at) =
                (true, true, date(at).max(self.job.scheduled_at + Duration::from_millis(1)));
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
    /// The most jobs that it holds ahead, and how many it accepts ahead now.
    pub(super) prefetch: u32,
    pub(super) room: u32,
    /// The jobs that it holds ahead, and when each was assigned. Some are locked.
    pub(super) held: BTreeMap<usize, i64>,
    /// Those of its jobs ahead, held or in the assignment, that wait for permits of others.
    pub(super) waiting: BTreeSet<usize>,
    /// Whether it could not start a job that it held.
    pub(super) has_skipped: bool,
    pub(super) round: Option<RoundId>,
    /// The assignment that it has not taken yet.
    pub(super) assigned: Vec<usize>,
    pub(super) assigned_at: i64,
    /// Number of its known free slots.
    pub(super) known: u32,
    /// The jobs that the current round gives to it, except those that the caches may have under an earlier date.
    pub(super) given: Vec<usize>,
    /// Those of them that are not for its free slots, and do not wait for permits.
    pub(super) ahead: Vec<usize>,
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
            prefetch: 0,
            room: 0,
            held: BTreeMap::new(),
            waiting: BTreeSet::new(),
            has_skipped: false,
            round: None,
            assigned: Vec::new(),
            assigned_at: 0,
            known: 0,
            given: Vec::new(),
            ahead: Vec::new(),
            spare: 0,
            permits: BTreeMap::new(),
            is_known_holder: false,
        }
    }

    fn names(&self) -> Vec<String> {
        self.permits.values().flatten().cloned().collect()
    }

    /// Number of its known free slots, without those that get a job in the current round.
    pub(super) fn slots(&self) -> u32 {
        if self.is_available { self.known } else { self.spare }
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
    /// Lets a worker start jobs that it holds in its free slots, and then report what it accepts and returns. Returns its hints.
    pub(super) fn report(&mut self, number: usize, mut returned: Vec<usize>) -> Vec<Hint> {
        let (now, worker) = (self.now, &mut self.workers[number]);
        let free = |jobs: &[Job], worker: &Worker| {
            let runs = |(job, of): &(usize, &Job)| of.state == State::Locked(number) && !worker.held.contains_key(job);
            worker.capacity - u32::try_from(jobs.iter().enumerate().filter(runs).count()).expect("a few")
        };
        while free(&self.jobs, worker) > 0 {
            let ready = worker.held.keys().copied().filter(|job| !worker.waiting.contains(job));
            let Some(next) = ready.min_by_key(|job| self.jobs[*job].job.position()) else { break };
            worker.held.remove(&next);
            let job = &mut self.jobs[next];
            if job.state == State::Due && job.job.scheduled_at <= date(now) {
                job.change(State::Locked(number), None);
            } else if job.state != State::Locked(number) {
                worker.permits.remove(&next);
                worker.has_skipped = true;
            }
        }
        // A worker takes an assignment before it reports.
        if !worker.assigned.is_empty() {
            return Vec::new();
        }
        let lane = |job: usize| (&self.jobs[job].job.group, &self.jobs[job].job.gate);
        let stranded = |job: &usize| !worker.permits.keys().any(|other| lane(*other) == lane(*job));
        returned.extend(worker.waiting.iter().copied().filter(stranded).collect::<Vec<_>>());
        for job in &returned {
            worker.waiting.remove(job);
            worker.permits.remove(job);
            let assigned_at = worker.held.remove(job).unwrap_or(i64::MIN);
            self.jobs[*job].leave(now.saturating_sub(assigned_at) < SCAN_AFTER);
        }
        worker.free = free(&self.jobs, worker);
        let held = u32::try_from(worker.held.len()).expect("a few");
        worker.room = if held <= worker.prefetch / 3 { worker.prefetch - held } else { 0 };
        worker.is_available = worker.free + worker.room > 0;
        let mut hints: Vec<Hint> = worker.is_available.then_some(Hint::Free).into_iter().collect();
        if !returned.is_empty() {
            hints.push(Hint::Returned { worker: id(number).into(), jobs: returned.into_iter().map(|job| id(job).into()).collect() });
        }
        hints.extend(mem::take(&mut worker.has_skipped).then_some(Hint::NotStarted));
        hints
    }

    /// Frees the permit of a job, or passes it on to a job that the worker holds.
    pub(super) fn free_permit(&mut self, worker: usize, job: usize) {
        let (jobs, worker) = (&self.jobs, &mut self.workers[worker]);
        let Some(names) = worker.permits.remove(&job) else { return };
        let lane = |job: usize| (&jobs[job].job.group, &jobs[job].job.gate);
        let next = worker.waiting.iter().copied().find(|other| worker.held.contains_key(other) && lane(*other) == lane(job));
        if let Some(next) = next {
            worker.waiting.remove(&next);
            worker.permits.insert(next, names);
        }
    }
}

/// The database of the model.
#[derive(Clone)]
pub(super) struct Memory {
    pub(super) start: Monotonic,
    pub(super) surplus_per_slot: usize,
    /// The capacity of each gate.
    pub(super) capacity: u32,
    /// Whether a walk over all lanes takes too long.
    pub(super) is_walk_slow: bool,
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
            let Worker { work_on, classes, free, room, round, .. } = worker.clone();
            let (permits, prefetched) = (worker.names(), worker.held.keys().map(|job| self::id(*job).into()).collect());
            let (id, channel, lease) = (id(number).into(), Channel::default(), Duration::from_secs(1_000_000));
            (worker.is_registered && worker.is_available).then_some(AvailableWorker {
                id,
                work_on,
                classes,
                free,
                prefetch: room,
                class_slots: Vec::new(),
                prefetched,
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

    async fn ungated_groups(&self) -> Result<BTreeSet<String>, StoreError> {
        Ok(self.lanes().filter(|lane| lane.gate.is_none()).map(|lane| lane.group).collect())
    }

    async fn gated_groups(&self) -> Result<BTreeSet<String>, StoreError> {
        Ok(self.lanes().filter(|lane| lane.gate.is_some()).map(|lane| lane.group).collect())
    }

    async fn waiting_lanes(&self) -> Result<BTreeMap<Lane, Instant>, StoreError> {
        if self.is_walk_slow {
            let error: CommandError =
                bson::deserialize_from_document(bson::doc! { "code": 50, "codeName": "", "errmsg": "" }).expect("an error");
            return Err(StoreError::Mongo { operation: "waiting_lanes", source: Error::from(ErrorKind::Command(error)).into() });
        }
        Ok(self.lanes().filter(|lane| lane.gate.is_none()).map(|lane| (lane, Instant::MIN_UTC)).collect())
    }

    async fn lanes_of(&self, group: &str, most: usize) -> Result<(Vec<Lane>, bool), StoreError> {
        let mut lanes: Vec<Lane> = self.lanes().filter(|lane| lane.group == group && lane.gate.is_none()).collect();
        let is_all = lanes.len() <= most;
        lanes.truncate(most);
        Ok((lanes, is_all))
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
        let limit = Limit::capacity(self.capacity);
        let gates: BTreeSet<String> = self.data.borrow().jobs.iter().filter_map(|job| job.job.gate.clone()).collect();
        Ok(Settings { limits: gates.into_iter().map(|gate| (gate, limit)).collect(), ..Settings::default() })
    }

    async fn prepare_limited_jobs(&self) -> Result<(), StoreError> {
        Ok(())
    }

    async fn keep_cells(&self, _: LeaseTerm, _: &[(String, RateCell)], _: Option<&FastLimits>) -> Result<bool, StoreError> {
        Ok(true)
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
        for Planned { assignment: AssignedJobs { worker: id, jobs: given, permits }, for_slots } in planned {
            let (this, given): (_, Vec<usize>) = (number(*id), given.iter().map(|job| number(*job)).collect());
            let is_elsewhere = |job: &usize| {
                let has = |worker: &Worker| {
                    let held_since = worker.held.get(job).copied().filter(|_| jobs[*job].state == State::Due);
                    let since = held_since.into_iter().chain(worker.assigned.contains(job).then_some(worker.assigned_at)).max();
                    since.is_some_and(|since| now.saturating_sub(since) < IN_FLIGHT_FOR)
                };
                workers.iter().any(|worker| worker.is_registered && has(worker))
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
            worker.waiting.extend(permits.iter().filter(|(_, permit)| permit.is_ahead).map(|(job, _)| number(*job)));
            if self.capacity == 1 {
                let granted = permits.iter().filter(|(_, permit)| !permit.is_ahead);
                worker.permits.extend(granted.map(|(job, permit)| (number(*job), permit.names.clone())));
                worker.is_known_holder = !worker.permits.is_empty();
            }
            let is_taken = given.iter().all(|job| worker.takes(&jobs[*job].job) && once.insert(*job));
            let ahead = given.len() - for_slots;
            if !is_taken || *for_slots > worker.free as usize || ahead > worker.room as usize || elsewhere.is_some() {
                self.broken(&format!("(b) worker {this} gets {given:?}; {elsewhere:?} is in flight"));
            }
            worker.given = given.iter().copied().filter(|job| !jobs[*job].is_outdated).collect();
            worker.ahead = given.iter().copied().filter(|job| !worker.waiting.contains(job)).skip(*for_slots).collect();
            worker.spare = worker.known.saturating_sub(u32::try_from(*for_slots).expect("a few"));
            for job in &given {
                jobs[*job].leave(false);
                (jobs[*job].is_moved, jobs[*job].in_flight_since) = (jobs[*job].is_outdated, *now);
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
