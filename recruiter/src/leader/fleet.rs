//! The fleet: the workers that have free slots, as the roster showed them last.
//!
//! Workers that take the same groups and classes are of one *kind*: what is due is searched for kinds, not for workers.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::{RoundId, WorkerId},
    roster::{AvailableWorker, WorkOn},
    store::{Channel, Lane},
};

/// How much later than it should a heartbeat may be seen: the roster is read once a second.
const HEARTBEAT_LATE: Duration = Duration::from_secs(2);
/// Workers whose signs of life are remembered, at most.
const REMEMBERED: usize = 100_000;

/// Which kind of worker: an index of [`Fleet::kinds`].
pub(crate) type KindId = usize;

/// What a worker takes.
#[derive(Debug)]
pub(crate) struct Kind {
    pub(crate) work_on: WorkOn,
    pub(crate) classes: HashSet<String>,
}

impl Kind {
    pub(crate) fn takes(&self, lane: &Lane) -> bool {
        self.work_on.includes(&lane.group) && self.classes.contains(&lane.class)
    }
}

/// A worker with free slots.
#[derive(Clone, Debug)]
pub(crate) struct FreeWorker {
    pub(crate) id: WorkerId,
    pub(crate) kind: KindId,
    pub(crate) free: u32,
    /// The round it took last.
    pub(crate) round: Option<RoundId>,
    pub(crate) channel: Channel,
    /// When its roster document was seen to change.
    pub(crate) heard_at: Monotonic,
    /// Whether a heartbeat is overdue: it may be dead.
    pub(crate) is_quiet: bool,
}

/// The last change that was seen in a worker's roster document.
#[derive(Debug)]
struct Heard {
    last_seen_at: Option<bson::DateTime>,
    round: Option<RoundId>,
    at: Monotonic,
}

/// Workers with free slots. Unknown before the first look at the roster and after anything that may have changed it.
#[derive(Debug, Default)]
pub(crate) struct Fleet {
    workers: Option<Vec<FreeWorker>>,
    kinds: Vec<Kind>,
    kind_ids: HashMap<(WorkOn, Vec<String>), KindId>,
    heard: HashMap<WorkerId, Heard>,
}

impl Fleet {
    /// Takes over what the roster shows at `at`; says whether there is a worker that was never seen before.
    pub(crate) fn read(&mut self, available: Vec<AvailableWorker>, at: Monotonic) -> bool {
        if self.heard.len() > REMEMBERED {
            self.heard.clear();
        }
        let before = self.heard.len();
        let workers = available.into_iter().map(|worker| self.free_worker(worker, at)).collect();
        self.workers = Some(workers);
        self.heard.len() > before
    }

    fn free_worker(&mut self, worker: AvailableWorker, at: Monotonic) -> FreeWorker {
        let AvailableWorker { id, work_on, classes, free, round, channel, last_seen_at, lease } = worker;
        let heard = self.heard.entry(id).or_insert(Heard { last_seen_at, round, at });
        if heard.last_seen_at != last_seen_at || heard.round != round {
            *heard = Heard { last_seen_at, round, at };
        }
        let heard_at = heard.at;
        // A worker is made to beat at least three times in a lease.
        let is_quiet = at.duration_since(heard_at) > lease / 3 + HEARTBEAT_LATE;
        let next = self.kinds.len();
        let kind = *self.kind_ids.entry((work_on, classes)).or_insert_with_key(|(work_on, classes)| {
            self.kinds.push(Kind { work_on: work_on.clone(), classes: classes.iter().cloned().collect() });
            next
        });
        FreeWorker { id, kind, free, round, channel, heard_at, is_quiet }
    }

    /// Whether the roster must be read before anything is planned.
    pub(crate) fn is_unknown(&self) -> bool {
        self.workers.is_none()
    }

    /// Forgets who has free slots.
    pub(crate) fn forget(&mut self) {
        self.workers = None;
    }

    /// The workers with free slots.
    pub(crate) fn workers(&self) -> &[FreeWorker] {
        self.workers.as_deref().unwrap_or_default()
    }

    /// Removes workers that are busy or gone.
    pub(crate) fn remove(&mut self, gone: &HashSet<WorkerId>) {
        if let Some(workers) = &mut self.workers {
            workers.retain(|worker| !gone.contains(&worker.id));
        }
    }

    /// All kinds that were ever seen.
    pub(crate) fn kinds(&self) -> &[Kind] {
        &self.kinds
    }

    /// Free slots of each kind that has any.
    pub(crate) fn slots(&self) -> HashMap<KindId, usize> {
        let mut slots = HashMap::new();
        for worker in self.workers() {
            *slots.entry(worker.kind).or_default() += worker.free as usize;
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
    fn a_worker_is_quiet_when_its_heartbeat_is_overdue() {
        let mut fleet = Fleet::default();
        let (start, worker) = (Monotonic::now(), available(&["*"], &["a"], 1));
        let mut check = |seconds: u64, last_seen_at: i64| {
            let last_seen_at = Some(bson::DateTime::from_millis(last_seen_at));
            fleet.read(vec![AvailableWorker { last_seen_at, ..worker.clone() }], start + Duration::from_secs(seconds));
            fleet.workers()[0].is_quiet
        };
        assert!(!check(0, 1));
        assert!(!check(8, 1), "20 s / 3, and two seconds more");
        assert!(check(9, 1));
        assert!(!check(10, 2), "it has beaten");
    }
}
