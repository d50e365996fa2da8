//! The fleet: a cache of the workers that accept jobs, from the last read of the roster.
//!
//! Workers that take the same groups and classes are of one *kind*. Searches are made for kinds of workers.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::{JobId, RoundId, WorkerId},
    store::{AvailableWorker, Channel, ClassSlots, Lane, WorkOn},
};

/// Tolerance before a heartbeat is overdue: by default the roster is read at least once per second.
const HEARTBEAT_LATE: Duration = Duration::from_secs(2);
/// Maximum number of workers whose last heartbeat is in memory. If it is exceeded, all of them are dropped.
const REMEMBERED: usize = 100_000;

/// The number of a kind of workers: an index of [`Fleet::kinds`].
pub(crate) type KindId = usize;

/// The groups and classes that workers of this kind take.
#[derive(Clone, Debug)]
pub(crate) struct Kind {
    pub(crate) work_on: WorkOn,
    pub(crate) classes: HashSet<String>,
}

impl Kind {
    pub(crate) fn takes(&self, lane: &Lane) -> bool {
        self.work_on.includes(&lane.group) && self.classes.contains(&lane.class)
    }
}

/// A worker that accepts jobs.
#[derive(Clone, Debug)]
pub(crate) struct FreeWorker {
    pub(crate) id: WorkerId,
    pub(crate) kind: KindId,
    /// Number of free slots.
    pub(crate) free: u32,
    /// How many jobs it accepts ahead, beyond the free slots.
    pub(crate) prefetch: u32,
    /// How many more jobs it accepts of the classes that have a limit.
    pub(crate) class_slots: Vec<ClassSlots>,
    /// Jobs that were assigned to it ahead and are not started yet, until the book has them.
    pub(crate) prefetched: Vec<JobId>,
    /// Whether it gets limited jobs: it is of a release that returns their permits.
    pub(crate) takes_limited: bool,
    /// The last round that it took.
    pub(crate) round: Option<RoundId>,
    pub(crate) channel: Channel,
    /// When a change of its roster document was last observed.
    pub(crate) changed_at: Monotonic,
    /// Whether its heartbeat is overdue. The worker may be dead.
    pub(crate) is_overdue: bool,
}

/// The last observed change of a worker's roster document.
#[derive(Clone, Debug)]
struct Observed {
    last_seen_at: Option<bson::DateTime>,
    round: Option<RoundId>,
    at: Monotonic,
}

/// The cache. It is empty before the first read of the roster, and after an event that makes it stale.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fleet {
    workers: Option<Vec<FreeWorker>>,
    kinds: Vec<Kind>,
    kind_ids: HashMap<(WorkOn, Vec<String>), KindId>,
    observed: HashMap<WorkerId, Observed>,
}

impl Fleet {
    /// Replaces the cache with workers that were read at `at`. Returns whether one of them is new.
    pub(crate) fn read(&mut self, available: Vec<AvailableWorker>, at: Monotonic) -> bool {
        if self.observed.len() > REMEMBERED {
            self.observed.clear();
        }
        let before = self.observed.len();
        let accepts = |worker: &AvailableWorker| worker.free > 0 || worker.prefetch > 0;
        let workers = available.into_iter().filter(accepts).map(|worker| self.free_worker(worker, at)).collect();
        self.workers = Some(workers);
        self.observed.len() > before
    }

    fn free_worker(&mut self, worker: AvailableWorker, at: Monotonic) -> FreeWorker {
        let AvailableWorker {
            id,
            work_on,
            classes,
            class_slots,
            free,
            prefetch,
            prefetched,
            held_permits,
            round,
            channel,
            last_seen_at,
            lease,
        } = worker;
        let takes_limited = held_permits.is_some();
        let observed = self.observed.entry(id).or_insert(Observed { last_seen_at, round, at });
        if observed.last_seen_at != last_seen_at || observed.round != round {
            *observed = Observed { last_seen_at, round, at };
        }
        let changed_at = observed.at;
        // The worker's configuration guarantees at least three heartbeats per lease.
        let is_overdue = at.duration_since(changed_at) > lease / 3 + HEARTBEAT_LATE;
        let next = self.kinds.len();
        let kind = *self.kind_ids.entry((work_on, classes)).or_insert_with_key(|(work_on, classes)| {
            self.kinds.push(Kind { work_on: work_on.clone(), classes: classes.iter().cloned().collect() });
            next
        });
        FreeWorker { id, kind, free, prefetch, class_slots, prefetched, takes_limited, round, channel, changed_at, is_overdue }
    }

    /// Whether the cache was dropped: the roster must be read before a plan is made.
    pub(crate) fn is_unknown(&self) -> bool {
        self.workers.is_none()
    }

    /// Drops the cache.
    pub(crate) fn forget(&mut self) {
        self.workers = None;
    }

    /// The workers that accept jobs.
    pub(crate) fn workers(&self) -> &[FreeWorker] {
        self.workers.as_deref().unwrap_or_default()
    }

    /// Takes the reports of these workers about the jobs that they hold ahead.
    pub(crate) fn take_prefetched(&mut self) -> impl Iterator<Item = (WorkerId, Vec<JobId>)> {
        self.workers.iter_mut().flatten().map(|worker| (worker.id, std::mem::take(&mut worker.prefetched)))
    }

    /// Removes workers that accept no more jobs, or left the roster.
    pub(crate) fn remove(&mut self, gone: &HashSet<WorkerId>) {
        if let Some(workers) = &mut self.workers {
            workers.retain(|worker| !gone.contains(&worker.id));
        }
    }

    /// All kinds, in the order in which they were first seen.
    pub(crate) fn kinds(&self) -> &[Kind] {
        &self.kinds
    }

    /// Number of jobs that the workers of each kind accept, in free slots and ahead.
    pub(crate) fn slots(&self) -> HashMap<KindId, usize> {
        let mut slots = HashMap::new();
        for worker in self.workers() {
            *slots.entry(worker.kind).or_default() += (worker.free + worker.prefetch) as usize;
        }
        slots
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    impl Fleet {
        pub(crate) fn workers_mut(&mut self) -> &mut [FreeWorker] {
            self.workers.as_deref_mut().unwrap_or_default()
        }
    }

    pub(crate) fn available(groups: &[&str], classes: &[&str], free: u32) -> AvailableWorker {
        let work_on = if groups == ["*"] { WorkOn::All } else { WorkOn::Groups(groups.iter().map(ToString::to_string).collect()) };
        AvailableWorker {
            id: WorkerId::new(),
            work_on,
            classes: classes.iter().map(ToString::to_string).collect(),
            free,
            prefetch: 0,
            class_slots: Vec::new(),
            prefetched: Vec::new(),
            held_permits: Some(Vec::new()),
            round: None,
            channel: Channel::default(),
            last_seen_at: None,
            lease: Duration::from_secs(20),
        }
    }

    pub(crate) fn fleet(workers: Vec<AvailableWorker>) -> Fleet {
        let mut fleet = Fleet::default();
        fleet.read(workers, Monotonic::now());
        fleet
    }

    #[test]
    fn workers_that_take_the_same_are_of_one_kind() {
        let fleet = fleet(vec![available(&["*"], &["a"], 2), available(&["*"], &["a"], 3), available(&["*"], &["a", "b"], 1)]);
        assert_eq!(fleet.kinds().len(), 2);
        assert_eq!(fleet.slots(), HashMap::from([(0, 5), (1, 1)]));
    }

    #[test]
    fn a_worker_is_overdue_two_seconds_after_its_heartbeat_was_due() {
        let mut fleet = Fleet::default();
        let (start, worker) = (Monotonic::now(), available(&["*"], &["a"], 1));
        let mut check = |seconds: u64, last_seen_at: i64| {
            let last_seen_at = Some(bson::DateTime::from_millis(last_seen_at));
            fleet.read(vec![AvailableWorker { last_seen_at, ..worker.clone() }], start + Duration::from_secs(seconds));
            fleet.workers()[0].is_overdue
        };
        assert!(!check(0, 1));
        assert!(!check(8, 1), "20 s / 3, and two seconds more");
        assert!(check(9, 1));
        assert!(!check(10, 2), "it has sent a heartbeat");
    }
}
