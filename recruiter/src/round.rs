//! One round: find who is free and what is due, plan, assign with one command, tell the workers.
//!
//! A round needs no hint about what changed and does nothing twice: what it assigned is remembered as *in flight* until
//! the worker has had its turn. Forgetting too early is harmless, since only a start under its own guard counts. For the same
//! reason it need not look for what it has seen: a search finds more than fits, and the rest is assigned in the next rounds.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    time::{Duration, Instant as Monotonic},
};

use chrono::TimeDelta;
use recruiter_common::{
    ids::{JobId, LeaseTerm, RoundId, WorkerId},
    instant::Instant,
    roster::{AvailableWorker, WorkOn},
    store::{Assignment, Channel, DueJob, Hint, Store, StoreError},
};

use crate::matching::{in_order, plan_assignments};

/// How long an assigned job is left alone at most. A worker takes an assignment within milliseconds, or within the poll
/// fallback when its hint was lost.
const IN_FLIGHT_FOR: Duration = Duration::from_secs(5);
/// How many more jobs than there are free places a search finds, for each of these places.
const AHEAD: usize = 3;
/// The same in all: nobody waits for them.
const AHEAD_AT_MOST: usize = 5_000;
/// How long workers that have places need not be looked for while hints are heard.
const WORKERS_KNOWN_FOR: Duration = Duration::from_secs(10);
/// Of how many groups, at most, it is looked up when their next jobs become due: each costs a search of its own.
const GROUPS_TO_FORESEE: usize = 100;
/// How much later than was said a job may be due: clocks differ by less. Whatever is due later still, the poll finds in time.
const A_LITTLE: TimeDelta = TimeDelta::seconds(1);
/// Jobs that are remembered, at most: more than there are places to give.
const REMEMBERED: usize = 100_000;

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

    fn jobs(&self) -> HashSet<JobId> {
        self.by_worker.values().flat_map(|given| given.jobs.iter().copied()).collect()
    }

    /// A worker that is available again has had its turn, whatever it made of it.
    fn settle(&mut self, available: &[AvailableWorker]) {
        for worker in available {
            if self.by_worker.get(&worker.id).is_some_and(|given| worker.round == Some(given.round)) {
                self.by_worker.remove(&worker.id);
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

/// What a round has to look at, because somebody said so or nobody has said anything for a while.
#[derive(Clone, Debug, Default)]
pub(crate) struct Look {
    /// At everything.
    pub(crate) thorough: bool,
    /// Somebody may have places.
    pub(crate) workers: bool,
    /// Jobs may be due that are not known, in any group.
    pub(crate) jobs: bool,
    /// The same, in these groups.
    pub(crate) groups: BTreeSet<String>,
    /// Jobs that are due. They need not be there yet: a worker that does not find them says so.
    pub(crate) announced: Vec<DueJob>,
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
    /// Groups that have or had jobs: enumerated for workers that take every group.
    pub(crate) groups: BTreeSet<String>,
    /// Workers that had places left after the last round; nothing when they must be looked for.
    workers: Option<Vec<AvailableWorker>>,
    /// When the workers were last looked for.
    workers_at: Option<Monotonic>,
    /// Channels that workers listen on.
    pub(crate) channels: BTreeSet<Channel>,
    /// Thorough rounds until workers hear that there was nothing to say.
    rounds_to_beat: usize,
    /// When workers were not told what they were assigned.
    untold_since: Option<Monotonic>,
    due: Due,
}

impl Memory {
    /// Forgets a worker that left: it takes nothing any more.
    pub(crate) fn left(&mut self, worker: WorkerId) {
        self.in_flight.by_worker.remove(&worker);
        if let Some(workers) = &mut self.workers {
            workers.retain(|known| known.id != worker);
        }
    }

    /// Forgets what may not be so any more after a round that was not completed.
    pub(crate) fn doubt(&mut self) {
        (self.workers, self.due) = (None, Due::default());
    }

    /// Notes that a job becomes due later.
    pub(crate) fn due_later(&mut self, at: Instant) {
        self.due.next = Some(self.due.next.map_or(at, |next| next.min(at)));
    }

    /// What says to idle workers, once in each thorough round, that they have been told everything; nothing for a while after
    /// that was not so. The more of them there are, the rarer, so that all together cost the same.
    pub(crate) fn beats(&mut self, every: Duration) -> Vec<(Channel, Hint)> {
        let rounds = self.channels.len().max(1);
        self.rounds_to_beat = self.rounds_to_beat.checked_sub(1).unwrap_or(rounds - 1);
        let told = self.untold_since.is_none_or(|since| since.elapsed() > every * 2);
        if self.rounds_to_beat > 0 || !told {
            return Vec::new();
        }
        let again_in = every * u32::try_from(rounds).unwrap_or(u32::MAX);
        self.channels.iter().map(|channel| (*channel, Hint::Beat { again_in })).collect()
    }
}

/// Jobs that are due and not assigned, the first of them first.
#[derive(Debug, Default)]
struct Due {
    jobs: Vec<DueJob>,
    /// Whether nothing else was due for anybody with places when it was searched for.
    complete: bool,
    /// Where was searched, and for whom: what they work on, and their classes.
    groups: BTreeSet<String>,
    kinds: Vec<(WorkOn, Vec<String>)>,
    /// Jobs that were found and left out as in flight. Most are about to be started; one may have been started and be due again.
    hidden: HashSet<JobId>,
    /// Whether one of these is in flight no more.
    doubtful: bool,
    /// When the next job becomes due.
    next: Option<Instant>,
}

impl Due {
    /// Adds what was found in some groups.
    fn extend(&mut self, found: Self, in_flight: &InFlight) {
        self.complete &= found.complete;
        self.next = found.next;
        self.announce(&found.jobs, in_flight);
        self.groups.extend(found.groups);
        self.hidden.extend(found.hidden);
    }

    /// Whatever was left out is looked for again once it is in flight no more.
    fn doubt_hidden(&mut self, in_flight: &InFlight) {
        if !self.hidden.is_empty() && !self.hidden.is_subset(&in_flight.jobs()) {
            self.hidden.clear();
            self.doubtful = true;
        }
    }

    fn announce(&mut self, announced: &[DueJob], in_flight: &InFlight) {
        if announced.is_empty() {
            return;
        }
        let known: HashSet<JobId> = self.jobs.iter().map(|job| job.id).chain(in_flight.jobs()).collect();
        self.jobs.extend(announced.iter().filter(|job| !known.contains(&job.id)).cloned());
        self.groups.extend(announced.iter().map(|job| job.group.clone()));
        self.sort();
    }

    fn sort(&mut self) {
        self.jobs.sort_by(in_order);
        if self.jobs.len() > REMEMBERED {
            self.jobs.truncate(REMEMBERED);
            self.complete = false;
        }
    }

    /// Whether this is still all that can be known about what these workers could be given.
    fn covers(&self, groups: &BTreeSet<String>, workers: &[AvailableWorker], now: Instant) -> bool {
        self.next.is_none_or(|next| now < next) && self.groups.is_superset(groups) && workers.iter().all(|worker| self.is_for(worker))
    }

    fn is_for(&self, worker: &AvailableWorker) -> bool {
        self.kinds.iter().any(|(work_on, classes)| *work_on == worker.work_on && *classes == worker.classes)
    }

    /// Looks in these groups for what these workers could be given; and for when there will be more, `until` then or, if that does
    /// not fill their places and it is not known, ever.
    async fn search(
        store: &Store,
        groups: BTreeSet<String>,
        workers: &[AvailableWorker],
        in_flight: &InFlight,
        now: Instant,
        until: Instant,
        next: Option<Option<Instant>>,
    ) -> Result<Self, StoreError> {
        // Together only what the same workers take: a backlog of some then hides nothing from others.
        let mut alike: BTreeMap<Vec<usize>, Vec<String>> = BTreeMap::new();
        for group in &groups {
            let able = (0..workers.len()).filter(|index| workers[*index].work_on.includes(group)).collect();
            alike.entry(able).or_default().push(group.clone());
        }
        let in_flight = in_flight.jobs();
        let mut due = Self { complete: true, ..Self::default() };
        let mut soon = None;
        for (able, groups) in &alike {
            let able: Vec<&AvailableWorker> = able.iter().map(|index| &workers[*index]).collect();
            match due_in(store, groups, &able, &in_flight, now, until).await {
                Ok(found) => {
                    due.jobs.extend(found.jobs);
                    due.hidden.extend(found.hidden);
                    due.complete &= found.complete;
                    soon = soon.into_iter().chain(found.soon).min();
                }
                // Some groups' backlog stops none of the others.
                Err(error) if error.is_too_slow() => {
                    tracing::warn!(?groups, "looking for due jobs took too long; going on with other groups");
                    due.complete = false;
                }
                Err(error) => return Err(error),
            }
        }
        due.sort();
        let places: usize = workers.iter().map(|worker| worker.free as usize).sum();
        due.next = match next {
            Some(next) => next.into_iter().chain(soon).min(),
            None if !due.complete || due.jobs.len() >= places => {
                due.complete = false;
                None
            }
            // Found by the poll.
            None if groups.len() > GROUPS_TO_FORESEE => None,
            None => {
                let classes: BTreeSet<&str> = workers.iter().flat_map(|worker| &worker.classes).map(String::as_str).collect();
                let (groups, classes) = (groups.iter().cloned().collect::<Vec<_>>(), classes.into_iter().collect::<Vec<_>>());
                store.next_due(&groups, &classes, now).await?
            }
        };
        due.groups = groups;
        for worker in workers {
            if !due.is_for(worker) {
                due.kinds.push((worker.work_on.clone(), worker.classes.clone()));
            }
        }
        Ok(due)
    }
}

/// One round.
pub(crate) async fn tick(store: &Store, term: LeaseTerm, memory: &mut Memory, now: Instant, look: Look) -> Result<Summary, StoreError> {
    let old = memory.workers_at.is_none_or(|at| at.elapsed() >= WORKERS_KNOWN_FOR);
    let workers = match memory.workers.take() {
        Some(workers) if !look.workers && !(look.thorough && (old || workers.is_empty())) => workers,
        _ => {
            memory.workers_at = Some(Monotonic::now());
            store.available_workers(term).await?
        }
    };
    memory.channels.extend(workers.iter().map(|worker| worker.channel));
    memory.in_flight.settle(&workers);
    if look.thorough {
        memory.in_flight.verify(store).await?;
    }
    memory.due.doubt_hidden(&memory.in_flight);
    let mut search = look.jobs || look.thorough;
    if workers.is_empty() {
        if search || !look.groups.is_empty() {
            memory.due = Due::default();
        }
        memory.due.announce(&look.announced, &memory.in_flight);
        memory.workers = Some(workers);
        return Ok(Summary::default());
    }
    let groups = groups_of(&workers, &memory.groups);
    let news: BTreeSet<String> = look.groups.intersection(&groups).cloned().collect();
    if !search && !news.is_empty() {
        let found = Due::search(store, news, &workers, &memory.in_flight, now, now + A_LITTLE, Some(memory.due.next)).await?;
        memory.due.extend(found, &memory.in_flight);
    }
    let places = workers.iter().map(|worker| worker.free as usize).sum();
    let mut plan = Vec::new();
    if !search {
        memory.due.announce(&look.announced, &memory.in_flight);
        plan = plan_assignments(&workers, &memory.due.jobs);
        search = !memory.due.covers(&groups, &workers, now) || (!memory.due.complete || memory.due.doubtful) && jobs_in(&plan) < places;
    }
    if search {
        let next = (!look.thorough && memory.due.complete && memory.due.covers(&groups, &workers, now)).then_some(memory.due.next);
        let takes_all = workers.iter().any(|worker| worker.work_on == WorkOn::All);
        let mut with_jobs = groups;
        if takes_all || with_jobs.len() > 1 {
            // In each of the others a search would walk over all that lately left the index.
            let waiting: BTreeSet<String> = store.groups().await?.into_iter().collect();
            with_jobs = groups_of(&workers, &waiting).intersection(&waiting).cloned().collect();
            memory.groups = waiting;
        } else {
            memory.groups.clear();
        }
        memory.due = Due::search(store, with_jobs, &workers, &memory.in_flight, now, now, next).await?;
        memory.due.groups.extend(groups_of(&workers, &memory.groups));
        memory.due.announce(&look.announced, &memory.in_flight);
        plan = plan_assignments(&workers, &memory.due.jobs);
    }
    let won = assign(store, term, memory, &workers, &plan).await?;
    let assigned: HashSet<JobId> = won.iter().flat_map(|given| given.jobs.iter().copied()).collect();
    memory.due.jobs.retain(|job| !assigned.contains(&job.id));
    // Whoever was given something has his turn now. Whoever could not be given anything is not what he was.
    let given: HashSet<WorkerId> = plan.iter().map(|given| given.worker).collect();
    memory.workers = (won.len() == plan.len()).then(|| workers.into_iter().filter(|worker| !given.contains(&worker.id)).collect());
    let next_due = memory.due.next.filter(|_| assigned.len() < places);
    Ok(Summary { assigned: assigned.len(), places, next_due })
}

fn jobs_in(plan: &[Assignment]) -> usize {
    plan.iter().map(|given| given.jobs.len()).sum()
}

/// What a search in some groups has found.
struct Found {
    jobs: Vec<DueJob>,
    hidden: HashSet<JobId>,
    /// When the next becomes due, if that is before the end of the search.
    soon: Option<Instant>,
    complete: bool,
}

/// Jobs of these groups that are due at `now` and not in flight, more than enough to fill the places of every class of these workers;
/// and when others are due, `until` then.
///
/// A class with a long backlog can fill the answer with more than its own workers can take. It is then left out, and the
/// question asked again for the classes that still have places.
async fn due_in(
    store: &Store,
    groups: &[String],
    able: &[&AvailableWorker],
    in_flight: &HashSet<JobId>,
    now: Instant,
    until: Instant,
) -> Result<Found, StoreError> {
    let mut places: HashMap<&str, usize> = HashMap::new();
    for worker in able {
        for class in &worker.classes {
            *places.entry(class).or_default() += worker.free as usize;
        }
    }
    let (mut jobs, mut hidden, mut soon, mut complete) = (Vec::new(), HashSet::new(), None, true);
    while !places.is_empty() {
        let classes: Vec<&str> = places.keys().copied().collect();
        let able = able.iter().filter(|worker| worker.classes.iter().any(|class| places.contains_key(class.as_str())));
        let places_of_all = able.map(|worker| worker.free as usize).sum::<usize>();
        let limit = places_of_all + (places_of_all * AHEAD).min(AHEAD_AT_MOST) + in_flight.len();
        let found = store.due_jobs(groups, &classes, until, limit).await?;
        let (left_alone, fresh): (Vec<DueJob>, Vec<DueJob>) = found.jobs.into_iter().partition(|job| in_flight.contains(&job.id));
        hidden.extend(left_alone.iter().map(|job| job.id));
        let (fresh, later): (Vec<DueJob>, Vec<DueJob>) = fresh.into_iter().partition(|job| job.scheduled_at <= now);
        soon = soon.into_iter().chain(later.iter().map(|job| job.scheduled_at)).min();
        places.retain(|class, places| fresh.iter().filter(|job| job.class == *class).count() < *places);
        let left_out = places.len() < classes.len();
        jobs.extend(fresh);
        if found.are_all {
            break;
        }
        complete = false;
        if !left_out {
            break;
        }
    }
    // A class that was asked for twice was found twice.
    let mut seen = HashSet::new();
    jobs.retain(|job: &DueJob| seen.insert(job.id));
    Ok(Found { jobs, hidden, soon, complete })
}

/// Writes a plan and tells the workers; returns what became of it.
async fn assign(
    store: &Store,
    term: LeaseTerm,
    memory: &mut Memory,
    workers: &[AvailableWorker],
    plan: &[Assignment],
) -> Result<Vec<Assignment>, StoreError> {
    if plan.is_empty() {
        return Ok(Vec::new());
    }
    let round = RoundId::new();
    let won = store.assign_if_available(term, round, plan).await?;
    let assignments: Vec<Assignment> = plan.iter().filter(|given| won.contains(&given.worker)).cloned().collect();
    for given in &assignments {
        memory.in_flight.insert(round, given.clone());
    }
    let channels: HashMap<WorkerId, Channel> = workers.iter().map(|worker| (worker.id, worker.channel)).collect();
    let mut by_channel: BTreeMap<Channel, Vec<Assignment>> = BTreeMap::new();
    for given in &assignments {
        by_channel.entry(channels.get(&given.worker).copied().unwrap_or_default()).or_default().push(given.clone());
    }
    let hints = by_channel.into_iter().map(|(channel, assignments)| (channel, Hint::Assigned { round, assignments })).collect();
    if !store.announce_hints_to(hints).await {
        memory.untold_since = Some(Monotonic::now());
    }
    Ok(assignments)
}

/// The groups that these workers work on, named one by one: a search in an open group would read the collection.
fn groups_of(workers: &[AvailableWorker], known: &BTreeSet<String>) -> BTreeSet<String> {
    let mut groups = BTreeSet::new();
    for worker in workers {
        match &worker.work_on {
            WorkOn::All => groups.extend(known.iter().cloned()),
            WorkOn::Groups(named) => groups.extend(named.iter().cloned()),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_workers_are_woken_the_rarer_the_more_they_are() {
        const EVERY: Duration = Duration::from_secs(1);
        let check = |channels: u32| {
            let mut memory = Memory { channels: (0..channels).map(Channel).collect(), ..Memory::default() };
            let beats = |_| {
                let beats = memory.beats(EVERY);
                beats.iter().for_each(|(_, hint)| assert_eq!(*hint, Hint::Beat { again_in: EVERY * channels.max(1) }));
                beats.len()
            };
            (0..8).map(beats).collect::<Vec<_>>()
        };
        assert_eq!(check(1), [1; 8]);
        assert_eq!(check(3), [0, 0, 3, 0, 0, 3, 0, 0], "as many in all");
    }

    #[test]
    fn nobody_is_called_told_who_was_not() {
        let mut memory = Memory { channels: [Channel(0)].into(), untold_since: Some(Monotonic::now()), ..Memory::default() };
        assert!(memory.beats(Duration::from_secs(60)).is_empty());
        assert_eq!(memory.beats(Duration::ZERO).len(), 1, "a while ago");
    }
}
