//! One round: find who is free and what is due, plan, assign with one command, tell the workers.
//!
//! A round needs no hint about what changed and does nothing twice: what it assigned is remembered as *in flight* until
//! the worker has had its turn. Forgetting too early is harmless, since only a start under its own guard counts.

use std::{
    collections::{BTreeSet, HashMap},
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::{JobId, LeaseTerm, RoundId, WorkerId},
    instant::Instant,
    roster::{AvailableWorker, WorkOn},
    store::{Assignment, DueJob, Hint, Store, StoreError},
};

use crate::matching::plan_assignments;

/// How long an assigned job is left alone at most. A worker takes an assignment within milliseconds, or within the poll
/// fallback when its hint was lost.
const IN_FLIGHT_FOR: Duration = Duration::from_secs(5);

/// What was assigned and not yet seen taken.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    by_worker: HashMap<WorkerId, Given>,
}

#[derive(Debug)]
struct Given {
    round: RoundId,
    jobs: Vec<JobId>,
    since: Monotonic,
}

impl InFlight {
    pub(crate) fn insert(&mut self, round: RoundId, assignment: Assignment) {
        self.by_worker.insert(assignment.worker, Given { round, jobs: assignment.jobs, since: Monotonic::now() });
    }

    /// A worker that left takes nothing any more.
    pub(crate) fn forget(&mut self, worker: WorkerId) {
        self.by_worker.remove(&worker);
    }

    fn has(&self, worker: WorkerId) -> bool {
        self.by_worker.contains_key(&worker)
    }

    fn jobs(&self) -> BTreeSet<JobId> {
        self.by_worker.values().flat_map(|given| given.jobs.iter().copied()).collect()
    }

    /// A worker that is available again has had its turn, whatever it made of it.
    fn settle(&mut self, available: &[AvailableWorker]) {
        for worker in available {
            if self.by_worker.get(&worker.id).is_some_and(|given| worker.round == Some(given.round)) {
                self.forget(worker.id);
            }
        }
    }

    /// Forgets whoever is gone, was given something else, or takes too long.
    async fn verify(&mut self, store: &Store) -> Result<(), StoreError> {
        if self.by_worker.is_empty() {
            return Ok(());
        }
        let workers: Vec<WorkerId> = self.by_worker.keys().copied().collect();
        let rounds = store.rounds_of(&workers).await?;
        self.by_worker.retain(|worker, given| given.since.elapsed() < IN_FLIGHT_FOR && rounds.get(worker) == Some(&Some(given.round)));
        Ok(())
    }
}

/// What a round did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    /// Jobs assigned.
    pub(crate) assigned: usize,
    /// Places that were free before.
    pub(crate) places: usize,
    /// When the next job becomes due, if there are places left for it.
    pub(crate) next_due: Option<Instant>,
}

/// The recruiter's memory between rounds. All of it can be lost.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) in_flight: InFlight,
    /// Workers that had places left when everything that was due had got one. Empty when that is not so.
    idle: Vec<AvailableWorker>,
    /// When the next job becomes due, as the last search found.
    next_due: Option<Instant>,
    /// Groups that have or had jobs: enumerated for workers that take every group.
    pub(crate) groups: BTreeSet<String>,
}

/// One round for jobs that were announced one by one, without a search; nothing when it takes one. Nothing else is due
/// then, so that nobody is passed over, and whatever the announcement said, a job is started under its own guards only.
pub(crate) async fn assign_announced(
    store: &Store,
    term: LeaseTerm,
    memory: &mut Memory,
    mut jobs: Vec<DueJob>,
) -> Result<Option<Summary>, StoreError> {
    let in_flight = memory.in_flight.jobs();
    jobs.retain(|job| !in_flight.contains(&job.id));
    let places = memory.idle.iter().map(|worker| worker.free as usize).sum();
    let (plan, asked) = (plan_assignments(&memory.idle, jobs.clone()), jobs.len());
    if plan.iter().map(|given| given.jobs.len()).sum::<usize>() < asked {
        return Ok(None);
    }
    let assigned = assign(store, term, memory, plan).await?;
    Ok((assigned == asked).then_some(Summary { assigned, places, next_due: memory.next_due }))
}

/// One round. A `thorough` one also looks for groups and verifies what is in flight, which a round after a hint leaves
/// to the next poll.
pub(crate) async fn tick(store: &Store, term: LeaseTerm, memory: &mut Memory, now: Instant, thorough: bool) -> Result<Summary, StoreError> {
    memory.idle.clear();
    let workers = store.available_workers(term).await?;
    memory.in_flight.settle(&workers);
    if thorough {
        store.stamp_term(term).await?;
        memory.in_flight.verify(store).await?;
    }
    if workers.is_empty() {
        return Ok(Summary::default());
    }
    if thorough {
        let takes_all = workers.iter().any(|worker| worker.work_on == WorkOn::All);
        memory.groups = if takes_all { store.groups().await?.into_iter().collect() } else { BTreeSet::new() };
    }
    let groups = groups_of(&workers, &memory.groups);
    let in_flight = memory.in_flight.jobs();
    let mut due = Vec::new();
    for group in &groups {
        match due_in(store, group, &workers, &in_flight, now).await {
            Ok(found) => due.extend(found),
            // One group's backlog stops none of the others.
            Err(error) if error.is_too_slow() => tracing::warn!(group, "looking for due jobs took too long; going on with other groups"),
            Err(error) => return Err(error),
        }
    }
    let places = workers.iter().map(|worker| worker.free as usize).sum();
    let found = due.len();
    let plan = plan_assignments(&workers, due);
    let assigned = assign(store, term, memory, plan).await?;
    let next_due = if assigned < places { store.next_due(&groups, now).await? } else { None };
    if assigned == found {
        memory.idle = workers.into_iter().filter(|worker| !memory.in_flight.has(worker.id)).collect();
        memory.next_due = next_due;
    }
    Ok(Summary { assigned, places, next_due })
}

/// Jobs of a group that are due and not in flight: enough to fill the places of every class.
///
/// A class with a long backlog can fill the answer with more than its own workers can take. It is then left out, and the
/// question asked again for the classes that still have places.
async fn due_in(
    store: &Store,
    group: &str,
    workers: &[AvailableWorker],
    in_flight: &BTreeSet<JobId>,
    now: Instant,
) -> Result<Vec<DueJob>, StoreError> {
    let able: Vec<&AvailableWorker> = workers.iter().filter(|worker| worker.work_on.includes(group)).collect();
    let mut places: HashMap<&str, usize> = HashMap::new();
    for worker in &able {
        for class in &worker.classes {
            *places.entry(class).or_default() += worker.free as usize;
        }
    }
    let mut due: Vec<DueJob> = Vec::new();
    while !places.is_empty() {
        let classes: Vec<&str> = places.keys().copied().collect();
        let wanted: usize = able
            .iter()
            .filter(|worker| worker.classes.iter().any(|class| places.contains_key(class.as_str())))
            .map(|worker| worker.free as usize)
            .sum();
        let limit = wanted + in_flight.len();
        let found = store.due_jobs(group, &classes, now, limit).await?;
        let complete = found.len() < limit;
        let fresh: Vec<DueJob> = found.into_iter().filter(|job| !in_flight.contains(&job.id)).collect();
        places.retain(|class, places| fresh.iter().filter(|job| job.class == *class).count() < *places);
        let left_out = places.len() < classes.len();
        due.extend(fresh);
        if complete || !left_out {
            break;
        }
    }
    // A class that was asked for twice was found twice.
    let mut seen = BTreeSet::new();
    due.retain(|job| seen.insert(job.id));
    Ok(due)
}

/// Writes a plan and tells the workers; returns how many jobs were assigned.
async fn assign(store: &Store, term: LeaseTerm, memory: &mut Memory, plan: Vec<Assignment>) -> Result<usize, StoreError> {
    if plan.is_empty() {
        return Ok(0);
    }
    let round = RoundId::new();
    memory.idle.retain(|worker| plan.iter().all(|given| given.worker != worker.id));
    let won = store.assign_if_available(term, round, &plan).await?;
    let assignments: Vec<Assignment> = plan.into_iter().filter(|given| won.contains(&given.worker)).collect();
    let assigned = assignments.iter().map(|given| given.jobs.len()).sum();
    for given in &assignments {
        memory.in_flight.insert(round, given.clone());
    }
    store.announce_hint(Hint::Assigned { round, assignments }).await;
    Ok(assigned)
}

/// The groups that these workers work on, named one by one: a search in an open group would read the collection.
fn groups_of(workers: &[AvailableWorker], known: &BTreeSet<String>) -> Vec<String> {
    let mut groups = BTreeSet::new();
    for worker in workers {
        match &worker.work_on {
            WorkOn::All => groups.extend(known.iter().cloned()),
            WorkOn::Groups(named) => groups.extend(named.iter().cloned()),
        }
    }
    groups.into_iter().collect()
}
