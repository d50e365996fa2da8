//! One round: read the workers with free slots, fill the stale windows, plan, assign with one command, notify the workers.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::{JobId, LeaseTerm, RoundId, WorkerId},
    instant::Instant,
    limits::{line_of_gate, resource_and_number},
    store::{AssignedJobs, Channel, Hint, Planned, ScheduledJob, StoreError},
};

use super::{
    keep_alive::KeepAlive,
    trigger::{Alarms, Trigger},
};
use crate::leader::{
    admission::Admission,
    book::{Book, Turn},
    database::Database,
    fleet::{Fleet, FreeWorker, KindId},
    lanes::{
        Lanes,
        discover::Discovery,
        search::{Searches, Searching},
    },
    plan::{Plan, plan},
};

/// A search finds jobs that become due within two scan intervals and this margin. Clocks differ by less than the margin.
const HORIZON: Duration = Duration::from_secs(1);
/// Maximum number of groups with news that are kept while no worker accepts jobs. If there are more, a full scan costs less.
const NEWS: usize = 100;
/// A full scan sends the hint of an assignment again if the assignment has been in flight for longer than this: the first hint may be lost.
const REMIND_AFTER: Duration = Duration::from_millis(100);

/// The result of a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    /// Number of assigned jobs.
    pub(crate) assigned: usize,
    /// Number of assigned jobs that a scan has found, and that were due without a hint.
    pub(crate) unannounced: usize,
    /// Number of jobs that the workers accepted before the round: in free slots and ahead.
    pub(crate) slots: usize,
    /// When the next known job becomes due, if a worker accepts it.
    pub(crate) next_due: Option<Instant>,
    /// When the next round is due even without a trigger.
    pub(crate) retry_at: Option<Monotonic>,
}

/// The leader's caches between rounds. No cache is needed for safety.
#[derive(Clone, Debug, Default)]
pub(crate) struct Assigning {
    fleet: Fleet,
    pub(crate) lanes: Lanes,
    pub(crate) book: Book,
    discovery: Discovery,
    pub(crate) admission: Admission,
    /// Whether permits may be held or free that `admission` does not know of.
    is_admission_unsure: bool,
    pub(crate) keep_alive: KeepAlive,
    pub(crate) alarms: Alarms,
    /// Groups that were announced and not searched yet, because no worker accepted jobs.
    news: BTreeSet<String>,
    searches: Searches,
}

impl Assigning {
    /// Adds an assignment of an earlier leader.
    pub(crate) fn inherit(&mut self, round: RoundId, assignment: AssignedJobs) {
        // The worker's channel is unknown, so its hint cannot be sent again. Without keep-alives the worker polls.
        self.keep_alive.failed(Monotonic::now());
        self.book.begin(Turn::new(round, assignment, Channel::default(), false, Monotonic::now()), std::iter::repeat(None));
    }

    /// Drops the caches that a failed round may have made wrong.
    pub(crate) fn forget(&mut self) {
        self.fleet.forget();
        self.lanes.forget();
        self.searches.unannounced.clear();
        self.discovery.forget();
        self.admission.cells().forget();
        // The failed round may have written an assignment without a hint.
        self.keep_alive.failed(Monotonic::now());
    }

    /// One round. The next full scan is due after `every`.
    pub(crate) async fn tick(
        &mut self,
        store: &impl Database,
        term: LeaseTerm,
        trigger: Trigger,
        every: Duration,
    ) -> Result<Summary, StoreError> {
        let at = store.monotonic();
        if trigger.full_scan || trigger.workers || self.fleet.is_unknown() {
            let workers = store.available_workers(term).await?;
            let returned = self.admission.read(&workers);
            self.note_returned(&returned);
            let has_new_worker = self.fleet.read(workers, at);
            self.book.read_ahead(self.fleet.workers(), at);
            if has_new_worker {
                self.book.end_pauses(at);
                self.lanes.end_pauses();
                self.lanes.mark_recent_stale();
            }
            let unlinked = self.fleet.workers().iter().filter(|worker| !store.is_linked(worker.id));
            self.keep_alive.channels.extend(unlinked.map(|worker| worker.channel));
        }
        if trigger.full_scan {
            self.keep_alive.read_channels(store, at).await;
        }
        self.end_turns(store, &trigger, at).await?;
        self.read_settings(store, &trigger).await?;
        let now = store.now();
        let slots = self.fleet.slots();
        self.news.extend(trigger.groups);
        if slots.is_empty() {
            if trigger.full_scan || self.news.len() > NEWS {
                self.discovery.forget();
                self.lanes.forget_scan();
                self.news.clear();
            }
            self.announce(trigger.announced, at);
            return Ok(Summary { next_due: self.admission.next_change(), ..Summary::default() });
        }
        if trigger.unannounced && !trigger.full_scan && !self.discovery.is_incomplete() {
            self.lanes.end_scan();
        }
        self.discover(store, now, now + every * 2 + HORIZON).await?;
        let mut searching = Searching {
            store,
            slots: &slots,
            kinds: self.fleet.kinds(),
            lanes: &mut self.lanes,
            admission: &mut self.admission,
            book: &mut self.book,
            searches: &mut self.searches,
            now,
            until: now + every * 2 + HORIZON,
            at,
        };
        searching.fill().await?;
        self.lanes.forget_before();
        self.searches.hinted.clear();
        trigger.announced.iter().for_each(|job| _ = self.searches.unannounced.remove(&job.id));
        self.announce(trigger.announced, at);
        self.lanes.learn_kinds(self.fleet.kinds());
        let plan = plan(self.fleet.workers(), self.lanes.waiting(), self.book.refusals(), &mut self.admission, now);
        let assigned = self.assign(store, term, plan).await?;
        let unannounced = std::mem::take(&mut self.searches.unannounced).intersection(&assigned).count();
        let slots_before = slots.values().sum();
        let slots = self.fleet.slots();
        let (next_due, retry_at) = self.lanes.next_round(&slots, &self.admission, now);
        let next_due = next_due.into_iter().chain(self.admission.next_change()).min();
        // Another round follows at once if the cached roster was stale, or if some lanes are not listed or searched yet.
        let is_incomplete =
            self.fleet.is_unknown() || self.discovery.is_incomplete() || (self.searches.has_unsearched && !slots.is_empty());
        let retry_at = if is_incomplete { Some(at) } else { retry_at };
        Ok(Summary { assigned: assigned.len(), unannounced, slots: slots_before, next_due, retry_at })
    }

    /// Ends the turns of workers that have answered, have left, or take too long. Marks lanes as stale in which jobs of these turns may
    /// wait again.
    async fn end_turns(&mut self, store: &impl Database, trigger: &Trigger, at: Monotonic) -> Result<(), StoreError> {
        for turn in self.book.end_answered(self.fleet.workers()) {
            if let Some(travel) = turn.travel(at) {
                self.admission.cells().observe(travel);
            }
            // If the worker did not start one of the jobs that a search has skipped, the hint about it follows.
            turn.skipped_in.iter().for_each(|lane| self.lanes.add_recent(lane));
            turn.due_again_in.iter().for_each(|lane| self.lanes.mark_stale(lane.clone()));
        }
        if !trigger.left.is_empty() {
            self.fleet.remove(&trigger.left.iter().copied().collect());
            for turn in trigger.left.iter().filter_map(|worker| self.book.remove_worker(*worker, at)).collect::<Vec<_>>() {
                self.mark_skipped(&turn);
            }
            self.lanes.mark_recent_stale();
        }
        if trigger.full_scan {
            let workers = self.book.workers();
            if !workers.is_empty() {
                let rounds = store.rounds_of(&workers).await?;
                for turn in self.book.expire(&rounds, at) {
                    self.mark_skipped(&turn);
                }
                self.remind(store, at).await;
            }
            self.book.drop_old(at);
            self.lanes.drop_old();
            // A scan that takes several rounds is completed first.
            if !self.discovery.is_incomplete() {
                self.lanes.end_scan();
            }
        }
        self.is_admission_unsure |= !trigger.left.is_empty();
        for (worker, jobs) in &trigger.returned {
            self.book.returned(*worker, jobs);
            jobs.iter().for_each(|job| self.admission.cells().was_not_assigned(*job));
        }
        if trigger.refused || !trigger.returned.is_empty() {
            self.lanes.mark_recent_stale();
        }
        Ok(())
    }

    /// Reads the settings in a full scan and after a change of them, and the permits in use when they are unsure.
    async fn read_settings(&mut self, store: &impl Database, trigger: &Trigger) -> Result<(), StoreError> {
        let mut must_recall = self.admission.refresh(store.now());
        if trigger.full_scan || trigger.settings {
            must_recall |= self.admission.change(store.settings().await?, store.now());
            if self.lanes.set_ageing(self.admission.ageing().groups()) {
                self.discovery.forget();
            }
            self.read_halted_lines(store).await?;
            let groups = self.admission.groups_to_count();
            let without_permit = store.running_without_permit(&groups).await?;
            for group in groups {
                self.admission.set_without_permit(&group, without_permit.get(&group).copied().unwrap_or(0));
            }
        }
        if must_recall {
            // Jobs ahead that a new pause, maintenance window or limit covers must not start.
            let recalls = self.keep_alive.channels.iter().map(|channel| (*channel, Hint::Recall)).collect();
            store.announce_hints_to(recalls).await;
        }
        if (trigger.full_scan || self.is_admission_unsure) && self.admission.holds_permits() {
            let returned = self.admission.confirm(&store.permit_holders().await?);
            self.note_returned(&returned);
        }
        self.is_admission_unsure = false;
        Ok(())
    }

    /// Notes that workers have returned these permits: the first jobs of their lines may have ended.
    fn note_returned(&mut self, permits: &[String]) {
        let resources = permits.iter().filter_map(|permit| resource_and_number(permit)).map(|(resource, _)| resource);
        self.lanes.mark_lines_stale(&resources.filter(|resource| line_of_gate(resource).is_some()).collect());
    }

    /// Reads which of the paused lines still are. All lanes of the others are listed.
    async fn read_halted_lines(&mut self, store: &impl Database) -> Result<(), StoreError> {
        self.lanes.mark_every_line_stale();
        let halted = self.admission.halted();
        if !halted.is_empty() {
            let still = store.halted_lines(&halted).await?;
            if self.admission.set_halted(still) && !self.discovery.is_incomplete() {
                self.lanes.forget_scan();
            }
        }
        Ok(())
    }

    /// A search has skipped jobs of this turn in these lanes. A job that was not started is still due there.
    fn mark_skipped(&mut self, turn: &Turn) {
        turn.skipped_in.iter().chain(&turn.due_again_in).for_each(|lane| self.lanes.mark_stale(lane.clone()));
    }

    fn announce(&mut self, jobs: Vec<ScheduledJob>, at: Monotonic) {
        if !jobs.is_empty() {
            let is_new = |job: &ScheduledJob| !self.book.is_assigned(job, at);
            self.searches.has_unsearched |= self.lanes.announce(jobs.into_iter().filter(is_new));
        }
    }

    /// Finds the lanes that may have jobs: all of them in a full scan, otherwise those of new kinds of workers and of announced groups.
    async fn discover(&mut self, store: &impl Database, now: Instant, until: Instant) -> Result<(), StoreError> {
        // Includes kinds whose workers are busy now: a stale lane is searched when they accept jobs.
        let kinds = self.fleet.kinds();
        let all: Vec<KindId> = (0..kinds.len()).collect();
        if self.discovery.is_incomplete() {
            let lanes = self.discovery.list_some(store, kinds).await?;
            lanes.into_iter().for_each(|lane| self.lanes.list(lane));
        } else if self.lanes.needs_scan(now) {
            let lanes = self.discovery.lanes_of_all(store, kinds, &all, until).await?;
            self.lanes.begin_scan(lanes, all.iter().copied(), until, |lane| self.discovery.will_list(lane));
            self.searches.hinted = std::mem::take(&mut self.news);
        } else {
            let unscanned = self.lanes.unscanned(all.iter().copied());
            if !unscanned.is_empty() {
                let lanes = self.discovery.lanes_of_all(store, kinds, &unscanned, until).await?;
                lanes.into_iter().for_each(|lane| self.lanes.list(lane));
                self.lanes.scanned_for(unscanned);
            }
        }
        if !self.news.is_empty() {
            let lanes = self.discovery.lanes_of_groups(store, kinds, &all, &std::mem::take(&mut self.news), until).await?;
            lanes.into_iter().for_each(|lane| self.lanes.list(lane));
        }
        self.lanes.learn_kinds(self.fleet.kinds());
        Ok(())
    }

    /// Writes a plan and notifies the workers. Returns the assigned jobs.
    async fn assign(&mut self, store: &impl Database, term: LeaseTerm, plan: Plan) -> Result<HashSet<JobId>, StoreError> {
        if plan.given.is_empty() {
            return Ok(HashSet::new());
        }
        if plan.permits.values().any(|permit| !permit.names.is_empty()) {
            // Without its index MongoDB would not refuse a permit to a second worker.
            store.prepare_limited_jobs().await?;
        }
        let (cells, fast) = (self.admission.cells().to_keep(), self.admission.cells().fast_to_keep());
        if !cells.is_empty() || fast.is_some() {
            // Before the assignment: the next leader must not take these cells again.
            store.keep_cells(term, &cells, fast.as_ref()).await?;
            self.admission.cells().are_kept();
        }
        let round = RoundId::new();
        let workers = self.fleet.workers();
        let ids = |jobs: &[(JobId, Instant)]| jobs.iter().map(|(job, _)| *job).collect();
        let assigned_to = |worker: WorkerId, jobs: &[(JobId, Instant)]| {
            let permits = jobs.iter().filter_map(|(job, _)| Some((*job, plan.permits.get(job)?.clone()))).collect();
            AssignedJobs { worker, jobs: ids(jobs), permits }
        };
        let planned = |(worker, jobs): (&usize, &Vec<(JobId, Instant)>)| {
            let FreeWorker { id, free, .. } = workers[*worker];
            let wait_for_permits = jobs.iter().filter(|(job, _)| plan.permits.get(job).is_some_and(|permit| permit.is_ahead)).count();
            Planned { assignment: assigned_to(id, jobs), for_slots: (jobs.len() - wait_for_permits).min(free as usize) }
        };
        let planned: Vec<Planned> = plan.given.iter().map(planned).collect();
        let won: HashSet<WorkerId> = store.assign_if_available(term, round, &planned).await?.into_iter().collect();
        let at = store.monotonic();
        let mut by_channel: BTreeMap<Channel, Vec<AssignedJobs>> = BTreeMap::new();
        let mut assigned = HashSet::new();
        for (worker, jobs) in &plan.given {
            let FreeWorker { id, channel, free, .. } = &workers[*worker];
            if won.contains(id) {
                assigned.extend(jobs.iter().map(|(job, _)| *job));
                let assignment = assigned_to(*id, jobs);
                let turn = Turn::new(round, assignment.clone(), *channel, jobs.len() < *free as usize, at);
                self.book.begin(turn, jobs.iter().map(|(_, due)| Some(*due)));
                by_channel.entry(*channel).or_default().push(assignment);
            } else {
                let permits = jobs.iter().filter_map(|(job, _)| Some((*job, plan.permits.get(job)?)));
                permits.for_each(|(job, permit)| self.admission.take_back(*id, job, permit));
                self.is_admission_unsure = true;
            }
        }
        plan.lanes.iter().for_each(|lane| self.lanes.add_recent(lane));
        self.lanes.remove(&plan.lanes, &assigned);
        if won.len() == planned.len() {
            self.fleet.remove(&won);
        } else {
            // The cached roster is stale.
            self.fleet.forget();
        }
        let hints = by_channel.into_iter().map(|(channel, assignments)| (channel, Hint::Assigned { round, assignments })).collect();
        if !store.announce_hints_to(hints).await {
            self.keep_alive.failed(Monotonic::now());
        }
        Ok(assigned)
    }

    /// Sends the hints of assignments in flight again. A worker takes each round only once.
    async fn remind(&mut self, store: &impl Database, at: Monotonic) {
        let mut by_round: BTreeMap<(Channel, RoundId), Vec<AssignedJobs>> = BTreeMap::new();
        for turn in self.book.older_than(REMIND_AFTER, at) {
            by_round.entry((turn.channel, turn.round)).or_default().push(turn.assignment.clone());
        }
        let hints = by_round.into_iter().map(|((channel, round), assignments)| (channel, Hint::Assigned { round, assignments }));
        store.announce_hints_to(hints.collect()).await;
    }
}
