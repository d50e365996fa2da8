//! A leader whose database is in memory: what rounds cost with very many workers and keys, without MongoDB. For `recruiter bench scale-rounds`.
//!
//! All code of a round is the real code. Workers have one class and start what they get at once. Those that report have ended all their jobs.
//! The time of the database itself is not counted.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    time::{Duration, Instant as Monotonic},
};

use bson::oid::ObjectId;
use recruiter_common::{
    ids::{LeaseTerm, RoundId, WorkerId},
    instant::Instant,
    limits::{Limit, Pause, Settings},
    store::{
        AssignedJobs, AvailableWorker, Channel, DueJobs, FastLimits, Head, Hint, Lane, PermitHolder, Planned, RateCell, ScheduledJob,
        StoreError, WorkOn,
    },
};

use super::{
    database::Database,
    rounds::{round::Assigning, trigger::Trigger},
};

const GROUP: &str = "simulated";
const CLASS: &str = "simulated";
/// The begin of the names of the keys. Each has a capacity of one.
const KEYS: &str = "key:";
/// The simulated time from one round to the next one.
const ROUND_EVERY: Duration = Duration::from_millis(10);
/// The interval of full scans that a round is told.
const SCAN_EVERY: Duration = Duration::from_secs(1);

/// How many workers and jobs are simulated.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Number of workers.
    pub workers: usize,
    /// Slots of each of them.
    pub slots: u32,
    /// Number of keys, of each of which one job may run at a time. Zero: the jobs are not limited.
    pub keys: usize,
    /// Number of jobs; they have the keys in turn.
    pub jobs: usize,
}

/// What one round has cost and done.
#[derive(Clone, Copy, Debug)]
pub struct Simulated {
    /// The time of the leader alone.
    pub took: Duration,
    /// Number of assigned jobs.
    pub assigned: usize,
    /// Number of operations of the database.
    pub operations: usize,
}

/// A leader at work.
pub struct Simulation {
    memory: Memory,
    assigning: Assigning,
    /// The next worker that reports.
    next: usize,
}

impl Simulation {
    /// A fleet without jobs, and the jobs that wait for it.
    pub fn new(size: Size) -> Self {
        Self { memory: Memory::new(size), assigning: Assigning::default(), next: 0 }
    }

    /// Lets so many workers report that they have ended their jobs, one fleet after the other, and then runs a round.
    ///
    /// # Errors
    /// None: the database is in memory.
    pub async fn round(&mut self, reports: usize, full_scan: bool) -> Result<Simulated, StoreError> {
        self.memory.report(self.next, reports);
        self.next += reports;
        let Memory { spent, operations, now, .. } = &self.memory;
        now.set(now.get() + ROUND_EVERY);
        spent.take();
        operations.take();
        let begun = Monotonic::now();
        let trigger = Trigger { full_scan, workers: true, ..Trigger::default() };
        let summary = self.assigning.tick(&self.memory, LeaseTerm(1), trigger, SCAN_EVERY).await?;
        let took = begun.elapsed().saturating_sub(self.memory.spent.get());
        Ok(Simulated { took, assigned: summary.assigned, operations: self.memory.operations.get() })
    }

    /// Number of jobs that wait.
    pub fn waiting(&self) -> usize {
        self.memory.lanes.borrow().values().map(VecDeque::len).sum()
    }
}

/// A worker, and the permits that it holds.
struct Worker {
    id: WorkerId,
    free: u32,
    round: Option<RoundId>,
    permits: Vec<String>,
}

/// The contents of MongoDB.
struct Memory {
    size: Size,
    begun: Monotonic,
    /// The time of both clocks, since the begin.
    now: Cell<Duration>,
    /// The time that operations have taken in this round, and their number.
    spent: Cell<Duration>,
    operations: Cell<usize>,
    workers: RefCell<Vec<Worker>>,
    /// The jobs that wait.
    lanes: RefCell<BTreeMap<Lane, VecDeque<ScheduledJob>>>,
}

/// The id with this number.
fn id(number: usize) -> ObjectId {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&(number as u64).to_be_bytes());
    ObjectId::from_bytes(bytes)
}

fn number(id: impl Into<ObjectId>) -> usize {
    id.into().bytes()[4..].iter().fold(0, |number, byte| number << 8 | usize::from(*byte))
}

impl Memory {
    fn new(size: Size) -> Self {
        let worker = |number| Worker { id: id(number).into(), free: size.slots, round: None, permits: Vec::new() };
        let mut lanes: BTreeMap<Lane, VecDeque<ScheduledJob>> = BTreeMap::new();
        for number in 0..size.jobs {
            let gate = size.gate(number);
            let (group, class, scheduled_at) = (GROUP.to_owned(), CLASS.to_owned(), Instant::UNIX_EPOCH);
            let job = ScheduledJob { id: id(number).into(), group, class, gate, priority: 5, scheduled_at };
            lanes.entry(job.lane()).or_default().push_back(job);
        }
        Self {
            size,
            begun: Monotonic::now(),
            now: Cell::default(),
            spent: Cell::default(),
            operations: Cell::default(),
            workers: RefCell::new((0..size.workers).map(worker).collect()),
            lanes: RefCell::new(lanes),
        }
    }

    fn report(&self, first: usize, count: usize) {
        let mut workers = self.workers.borrow_mut();
        let all = workers.len();
        for number in first..first + count.min(all) {
            let worker = &mut workers[number % all];
            worker.free = self.size.slots;
            worker.permits.clear();
        }
    }

    /// An operation, whose time is not the leader's.
    fn operation<T>(&self, operation: impl FnOnce() -> T) -> T {
        let begun = Monotonic::now();
        let done = operation();
        self.spent.set(self.spent.get() + begun.elapsed());
        self.operations.set(self.operations.get() + 1);
        done
    }

    fn find(&self, lanes: &[Lane], until: Instant, limit: usize) -> DueJobs {
        let waiting = self.lanes.borrow();
        let of = |lane| waiting.get(lane).into_iter().flatten().filter(|job| job.scheduled_at <= until).take(limit).cloned();
        let mut jobs: Vec<ScheduledJob> = lanes.iter().flat_map(of).collect();
        jobs.sort_by_key(ScheduledJob::position);
        jobs.truncate(limit);
        let end = jobs.last().filter(|_| jobs.len() == limit).map(ScheduledJob::position);
        DueJobs { jobs, end }
    }

    /// Starts the jobs of an assignment, unless a permit of them is held or a slot is missing.
    fn start(&self, round: RoundId, Planned { assignment, for_slots }: &Planned) -> bool {
        let AssignedJobs { worker, jobs, permits } = assignment;
        let (mut workers, mut lanes) = (self.workers.borrow_mut(), self.lanes.borrow_mut());
        let worker = &mut workers[number(*worker)];
        let Some(free) = u32::try_from(*for_slots).ok().and_then(|starts| worker.free.checked_sub(starts)) else { return false };
        worker.free = free;
        worker.round = Some(round);
        worker.permits.extend(permits.values().flat_map(|permit| permit.names.iter().cloned()));
        for job in jobs {
            let lane = Lane { gate: self.size.gate(number(*job)), ..Lane::new(GROUP, CLASS) };
            let Some(waiting) = lanes.get_mut(&lane) else { continue };
            if let Some(at) = waiting.iter().position(|other| other.id == *job) {
                waiting.remove(at);
            }
            if waiting.is_empty() {
                lanes.remove(&lane);
            }
        }
        true
    }
}

impl Size {
    fn gate(self, job: usize) -> Option<String> {
        (self.keys > 0).then(|| format!("{KEYS}{}", job % self.keys))
    }
}

impl Database for Memory {
    fn now(&self) -> Instant {
        Instant::UNIX_EPOCH + self.now.get()
    }

    fn monotonic(&self) -> Monotonic {
        self.begun + self.now.get()
    }

    async fn available_workers(&self, _: LeaseTerm) -> Result<Vec<AvailableWorker>, StoreError> {
        let available = |worker: &Worker| AvailableWorker {
            id: worker.id,
            work_on: WorkOn::All,
            classes: vec![CLASS.to_owned()],
            free: worker.free,
            prefetch: 0,
            class_slots: Vec::new(),
            prefetched: Vec::new(),
            held_permits: Some(worker.permits.clone()),
            round: worker.round,
            channel: Channel::default(),
            last_seen_at: None,
            lease: SCAN_EVERY * 20,
        };
        Ok(self.operation(|| self.workers.borrow().iter().filter(|worker| worker.free > 0).map(available).collect()))
    }

    async fn rounds_of(&self, workers: &[WorkerId]) -> Result<HashMap<WorkerId, Option<RoundId>>, StoreError> {
        let known = self.workers.borrow();
        Ok(self.operation(|| workers.iter().map(|worker| (*worker, known[number(*worker)].round)).collect()))
    }

    async fn channels(&self) -> Result<BTreeSet<Channel>, StoreError> {
        Ok(BTreeSet::new())
    }

    async fn ungated_groups(&self) -> Result<BTreeSet<String>, StoreError> {
        Ok(if self.size.keys == 0 { [GROUP.to_owned()].into() } else { BTreeSet::new() })
    }

    async fn gated_groups(&self) -> Result<BTreeSet<String>, StoreError> {
        Ok(if self.size.keys > 0 { [GROUP.to_owned()].into() } else { BTreeSet::new() })
    }

    async fn waiting_lanes(&self) -> Result<BTreeMap<Lane, Instant>, StoreError> {
        let of = |lane: &Lane| lane.gate.is_none().then(|| (lane.clone(), Instant::UNIX_EPOCH));
        Ok(self.operation(|| self.lanes.borrow().keys().filter_map(of).collect()))
    }

    async fn lanes_of(&self, _: &str, _: usize) -> Result<(Vec<Lane>, bool), StoreError> {
        let lane = Lane::new(GROUP, CLASS);
        Ok((Some(lane).filter(|lane| self.lanes.borrow().contains_key(lane)).into_iter().collect(), true))
    }

    async fn gated_lanes_of(&self, _: &str) -> Result<Vec<Lane>, StoreError> {
        Ok(self.operation(|| self.lanes.borrow().keys().filter(|lane| lane.gate.is_some()).cloned().collect()))
    }

    async fn due_jobs(&self, lanes: &[Lane], until: Instant, limit: usize) -> Result<DueJobs, StoreError> {
        Ok(self.operation(|| self.find(lanes, until, limit)))
    }

    async fn due_jobs_of_each(&self, lanes: &[(Lane, usize)], until: Instant) -> Result<Vec<DueJobs>, StoreError> {
        let of = |(lane, limit): &(Lane, usize)| self.find(std::slice::from_ref(lane), until, *limit);
        Ok(self.operation(|| lanes.iter().map(of).collect()))
    }

    async fn heads_of_lines(&self, _: &[&str]) -> Result<HashMap<String, Head>, StoreError> {
        Ok(HashMap::new())
    }

    async fn halted_lines(&self, _: &[&str]) -> Result<HashMap<String, Pause>, StoreError> {
        Ok(HashMap::new())
    }

    async fn settings(&self) -> Result<Settings, StoreError> {
        let one_each = (self.size.keys > 0).then(|| (format!("{KEYS}*"), Limit::capacity(1)));
        Ok(Settings { limits: one_each.into_iter().collect(), ..Settings::default() })
    }

    async fn prepare_limited_jobs(&self) -> Result<(), StoreError> {
        Ok(())
    }

    async fn keep_cells(&self, _: LeaseTerm, _: &[(String, RateCell)], _: Option<&FastLimits>) -> Result<bool, StoreError> {
        Ok(true)
    }

    async fn permit_holders(&self) -> Result<Vec<PermitHolder>, StoreError> {
        let holder = |worker: &Worker| PermitHolder { worker: worker.id, permits: worker.permits.clone(), jobs: Vec::new() };
        Ok(self.operation(|| self.workers.borrow().iter().filter(|worker| !worker.permits.is_empty()).map(holder).collect()))
    }

    async fn running_without_permit(&self, _: &[String]) -> Result<HashMap<String, u64>, StoreError> {
        Ok(HashMap::new())
    }

    async fn assign_if_available(&self, _: LeaseTerm, round: RoundId, planned: &[Planned]) -> Result<Vec<WorkerId>, StoreError> {
        let started = |planned: &&Planned| self.start(round, planned);
        Ok(self.operation(|| planned.iter().filter(started).map(|planned| planned.assignment.worker).collect()))
    }

    async fn announce_hints_to(&self, _: Vec<(Channel, Hint)>) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[tokio::test]
    async fn all_jobs_are_assigned_and_a_key_never_has_two() {
        for keys in [0, 3, 40] {
            let mut simulation = Simulation::new(Size { workers: 10, slots: 4, keys, jobs: 200 });
            let mut assigned = 0;
            for round in 0..400 {
                assigned += simulation.round(3, round % 50 == 0).await.unwrap().assigned;
                let workers = simulation.memory.workers.borrow();
                let held: Vec<&String> = workers.iter().flat_map(|worker| &worker.permits).collect();
                assert_eq!(held.iter().collect::<HashSet<_>>().len(), held.len(), "{held:?}");
            }
            assert_eq!((assigned, simulation.waiting()), (200, 0), "{keys} keys");
        }
    }
}
