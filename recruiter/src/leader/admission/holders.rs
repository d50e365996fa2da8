//! Which worker holds which permit, and which limited jobs wait for the permits of others in a worker.
//!
//! Known from the roster, and from this leader's own assignments. MongoDB refuses a permit to a second worker, so an error here costs a round
//! and breaks no limit.

use std::collections::{BTreeMap, HashMap, HashSet};

use recruiter_common::{
    ids::{JobId, WorkerId},
    store::resource_and_number,
};

/// Number of jobs that may wait in a worker for each permit that it holds.
const AHEAD_PER_PERMIT: u32 = 4;

/// Group and gate of jobs. A worker passes permits on among jobs that have both in common.
pub(crate) type PermitLane = (String, Option<String>);

/// The permits of one worker.
#[derive(Clone, Debug, Default)]
struct Holder {
    /// The names, each with the jobs that it was granted for. Unknown for permits that an earlier leader has granted, and for all but the
    /// first of those that were granted together.
    names: HashMap<String, Option<PermitLane>>,
    /// How many jobs have permits, for each lane.
    count: HashMap<PermitLane, u32>,
    /// The jobs that wait in this worker.
    ahead: HashMap<JobId, PermitLane>,
    /// The number of these jobs, for each lane.
    count_ahead: HashMap<PermitLane, u32>,
}

/// All permits that are held.
#[derive(Clone, Debug, Default)]
pub(crate) struct Holders {
    /// The numbers of each resource that are held, and by which worker.
    numbers: HashMap<String, BTreeMap<u32, WorkerId>>,
    workers: HashMap<WorkerId, Holder>,
}

impl Holders {
    /// Whether no permit is held.
    pub(crate) fn is_empty(&self) -> bool {
        self.numbers.is_empty()
    }

    /// Number of permits of a resource that are held.
    pub(crate) fn count(&self, resource: &str) -> usize {
        self.numbers.get(resource).map_or(0, BTreeMap::len)
    }

    /// The workers that hold permits of a resource, each once.
    pub(crate) fn of(&self, resource: &str) -> HashSet<WorkerId> {
        self.numbers.get(resource).into_iter().flat_map(BTreeMap::values).copied().collect()
    }

    /// The lowest number of a resource that is free.
    pub(crate) fn free_number(&self, resource: &str) -> u32 {
        let taken = self.numbers.get(resource);
        (0..).find(|number| taken.is_none_or(|taken| !taken.contains_key(number))).unwrap_or_default()
    }

    /// Notes that a worker gets this permit, the first one for a job of this lane.
    pub(crate) fn add(&mut self, worker: WorkerId, name: &str, lane: Option<&PermitLane>) {
        let Some((resource, number)) = resource_and_number(name) else { return };
        let holder = self.workers.entry(worker).or_default();
        holder.remove(name);
        holder.names.insert(name.to_owned(), lane.cloned());
        if let Some(lane) = lane {
            *holder.count.entry(lane.clone()).or_default() += 1;
        }
        self.numbers.entry(resource.to_owned()).or_default().insert(number, worker);
    }

    /// Notes that a worker no longer has this permit.
    pub(crate) fn remove(&mut self, worker: WorkerId, name: &str) {
        let Some((resource, number)) = resource_and_number(name) else { return };
        if let Some(holder) = self.workers.get_mut(&worker) {
            holder.remove(name);
        }
        if let Some(numbers) = self.numbers.get_mut(resource)
            && numbers.get(&number) == Some(&worker)
        {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.numbers.remove(resource);
            }
        }
    }

    /// Replaces what is known of a worker by what its roster document says: the permits that it holds, and the jobs that it has not started.
    /// Returns the permits that it has returned.
    pub(crate) fn replace(&mut self, worker: WorkerId, names: &[String], prefetched: &[JobId]) -> Vec<String> {
        let Some(holder) = self.workers.get_mut(&worker) else {
            names.iter().for_each(|name| self.add(worker, name, None));
            return Vec::new();
        };
        if !holder.ahead.is_empty() {
            let waiting: HashSet<&JobId> = prefetched.iter().collect();
            for (_, lane) in holder.ahead.extract_if(|job, _| !waiting.contains(job)) {
                take_one(&mut holder.count_ahead, &lane);
            }
        }
        let now: HashSet<&str> = names.iter().map(String::as_str).collect();
        let returned: Vec<String> = holder.names.keys().filter(|name| !now.contains(name.as_str())).cloned().collect();
        let is_new = |name: &&String| !holder.names.contains_key(*name);
        let added: Vec<&String> = names.iter().filter(is_new).collect();
        added.into_iter().for_each(|name| self.add(worker, name, None));
        returned.iter().for_each(|name| self.remove(worker, name));
        self.workers.retain(|_, holder| !holder.names.is_empty() || !holder.ahead.is_empty());
        returned
    }

    /// Removes the workers that are not among these. Returns the permits that they held.
    pub(crate) fn retain(&mut self, holds: impl Fn(WorkerId) -> bool) -> Vec<String> {
        let gone: Vec<WorkerId> = self.workers.keys().filter(|worker| !holds(**worker)).copied().collect();
        gone.into_iter().flat_map(|worker| self.replace(worker, &[], &[])).collect()
    }

    /// How many more jobs of a lane may wait in this worker for the permits of others.
    pub(crate) fn room_ahead(&self, worker: WorkerId, lane: &PermitLane) -> u32 {
        let Some(holder) = self.workers.get(&worker) else { return 0 };
        let count = |counts: &HashMap<PermitLane, u32>| counts.get(lane).copied().unwrap_or(0);
        (count(&holder.count) * AHEAD_PER_PERMIT).saturating_sub(count(&holder.count_ahead))
    }

    /// Notes that a job of a lane waits in this worker for the permits of others.
    pub(crate) fn add_ahead(&mut self, worker: WorkerId, job: JobId, lane: PermitLane) {
        let holder = self.workers.entry(worker).or_default();
        if holder.ahead.insert(job, lane.clone()).is_none() {
            *holder.count_ahead.entry(lane).or_default() += 1;
        }
    }

    /// Notes that a job does not wait in this worker.
    pub(crate) fn remove_ahead(&mut self, worker: WorkerId, job: JobId) {
        if let Some(holder) = self.workers.get_mut(&worker)
            && let Some(lane) = holder.ahead.remove(&job)
        {
            take_one(&mut holder.count_ahead, &lane);
        }
    }
}

impl Holder {
    fn remove(&mut self, name: &str) {
        if let Some(Some(lane)) = self.names.remove(name) {
            take_one(&mut self.count, &lane);
        }
    }
}

fn take_one(counts: &mut HashMap<PermitLane, u32>, lane: &PermitLane) {
    if let Some(count) = counts.get_mut(lane) {
        *count -= 1;
        if *count == 0 {
            counts.remove(lane);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names<const N: usize>(names: [&str; N]) -> Vec<String> {
        names.map(str::to_owned).into()
    }

    #[test]
    fn what_the_roster_says_replaces_what_was_known_of_a_worker() {
        let (a, b, mut holders) = (WorkerId::new(), WorkerId::new(), Holders::default());
        holders.add(a, "printer#0", None);
        assert_eq!(holders.replace(b, &names(["printer#1", "scanner#0", "not a permit"]), &[]), Vec::<String>::new());
        assert_eq!((holders.count("printer"), holders.free_number("printer"), holders.of("printer").len()), (2, 2, 2));
        assert_eq!(holders.replace(a, &names(["printer#3"]), &[]), ["printer#0"]);
        assert_eq!((holders.count("printer"), holders.free_number("printer")), (2, 0));
        let mut returned = holders.retain(|worker| worker == a);
        returned.sort_unstable();
        assert_eq!((returned, holders.count("scanner")), (names(["printer#1", "scanner#0"]), 0));
        holders.remove(a, "printer#3");
        assert!(holders.is_empty());
    }

    #[test]
    fn a_permit_that_two_workers_may_hold_is_freed_by_the_last_one_only() {
        let (a, b, mut holders) = (WorkerId::new(), WorkerId::new(), Holders::default());
        holders.add(a, "printer#0", None);
        holders.add(b, "printer#0", None);
        assert_eq!(holders.replace(a, &[], &[]), ["printer#0"]);
        assert_eq!(holders.of("printer"), [b].into());
    }

    #[test]
    fn a_few_jobs_wait_for_each_permit_of_their_worker() {
        let (a, b, jobs, mut holders) = (WorkerId::new(), WorkerId::new(), [JobId::new(), JobId::new()], Holders::default());
        let [lane, other]: [PermitLane; 2] = ["mail", "other"].map(|group| (group.into(), Some("printer".into())));
        holders.add(a, "printer#0", Some(&lane));
        holders.add(a, "printer#1", None);
        assert_eq!((holders.room_ahead(a, &lane), holders.room_ahead(a, &other), holders.room_ahead(b, &lane)), (4, 0, 0));
        jobs.iter().for_each(|job| holders.add_ahead(a, *job, lane.clone()));
        assert_eq!(holders.room_ahead(a, &lane), 2);
        holders.remove_ahead(a, jobs[0]);
        assert_eq!(holders.room_ahead(a, &lane), 3);
        holders.replace(a, &names(["printer#0"]), &[]);
        assert_eq!(holders.room_ahead(a, &lane), 4, "it has started");
        holders.replace(a, &[], &[]);
        assert_eq!(holders.room_ahead(a, &lane), 0);
    }
}
