//! One round: read the workers with free slots, fill the stale windows, plan, assign with one command, notify the workers.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    time::{Duration, Instant as Monotonic},
};

use chrono::TimeDelta;
use recruiter_common::{
    ids::{JobId, LeaseTerm, RoundId, WorkerId},
    instant::Instant,
    limits::resource_and_number,
    store::{AssignedJobs, Channel, DueJobs, Hint, Lane, Planned, ScheduledJob, StoreError},
};

use super::{
    admission::Admission,
    database::Database,
    discover::Discovery,
    fleet::{Fleet, FreeWorker, KindId},
    in_flight::{InFlight, Turn},
    keep_alive::KeepAlive,
    lanes::{Lanes, Search, StaleLanes, is_of_line},
    past_assignments::PastAssignments,
    plan::{Plan, plan},
    trigger::{Alarms, Trigger},
};

/// Maximum number of jobs that a search asks for beyond those that the workers accept now.
const MOST_SURPLUS: usize = 5_000;
/// A search finds jobs that become due within two scan intervals and this margin. Clocks differ by less than the margin.
const HORIZON: Duration = Duration::from_secs(1);
/// Maximum number of groups with news that are kept while no worker accepts jobs. If there are more, a full scan costs less.
const NEWS: usize = 100;
/// Minimum number of jobs that a search asks for, however slow MongoDB is.
const FEWEST: usize = 10;
/// Minimum time for which an unannounced job has been due when a scan finds it. The hint of an announced job arrives earlier.
const ANNOUNCED_AFTER: TimeDelta = TimeDelta::milliseconds(20);
/// Number of jobs that a search of a limited lane asks for, for each job that may start now or runs already.
const SURPLUS_OF_EACH: usize = 8;
/// Number of limited lanes that are searched in one round: for each slot, and the bounds.
const LANES_PER_SLOT: usize = 4;
const FEWEST_LANES: usize = 20;
const MOST_LANES: usize = 500;
/// Maximum number of jobs that one search of limited lanes asks for.
const MOST_ENTRIES: usize = 20_000;
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
    pub(super) lanes: Lanes,
    pub(super) in_flight: InFlight,
    pub(super) past_assignments: PastAssignments,
    discovery: Discovery,
    pub(crate) admission: Admission,
    /// Whether permits may be in use or free that `admission` does not know of.
    is_admission_unsure: bool,
    /// Whether limited lanes with room are left to search.
    has_unsearched: bool,
    pub(crate) keep_alive: KeepAlive,
    pub(crate) alarms: Alarms,
    /// Groups that were announced and not searched yet, because no worker accepted jobs.
    news: BTreeSet<String>,
    /// Groups that hints had named when the scan of this round began.
    hinted: BTreeSet<String>,
    /// Jobs that the searches of this round have found, and that were due without a hint.
    unannounced: HashSet<JobId>,
    /// Maximum number of jobs in one search; `None` while MongoDB is fast enough.
    at_most: Option<usize>,
}

impl Assigning {
    /// Adds an assignment of an earlier leader.
    pub(crate) fn inherit(&mut self, round: RoundId, assignment: AssignedJobs) {
        let jobs = assignment.jobs.into_iter().map(|job| (job, None)).collect();
        // The worker's channel is unknown, so its hint cannot be sent again. Without keep-alives the worker polls.
        self.keep_alive.failed(Monotonic::now());
        self.in_flight.begin(round, (assignment.worker, Channel::default()), jobs, Monotonic::now());
        self.in_flight.add_permits(assignment.worker, assignment.permits, false);
    }

    /// Drops the caches that a failed round may have made wrong.
    pub(crate) fn forget(&mut self) {
        self.fleet.forget();
        self.lanes.forget();
        self.unannounced.clear();
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
            let has_new_worker = self.fleet.read(store.available_workers(term).await?, at);
            self.in_flight.read_ahead(self.fleet.workers(), at);
            if has_new_worker {
                self.past_assignments.end_pauses(at);
                self.lanes.end_pauses();
                self.mark_recent_lanes();
            }
            let unlinked = self.fleet.workers().iter().filter(|worker| !store.is_linked(worker.id));
            self.keep_alive.channels.extend(unlinked.map(|worker| worker.channel));
        }
        if trigger.full_scan {
            self.keep_alive.read_channels(store, at).await;
        }
        self.end_turns(store, &trigger, at).await?;
        self.read_settings(store, &trigger, at).await?;
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
        self.fill(store, &slots, now, now + every * 2 + HORIZON, at).await?;
        self.lanes.forget_before();
        self.hinted.clear();
        trigger.announced.iter().for_each(|job| _ = self.unannounced.remove(&job.id));
        self.announce(trigger.announced, at);
        self.lanes.learn_kinds(self.fleet.kinds());
        let plan = plan(self.fleet.workers(), self.lanes.waiting(), &self.past_assignments, &mut self.admission, now);
        let assigned = self.assign(store, term, plan).await?;
        let unannounced = std::mem::take(&mut self.unannounced).intersection(&assigned).count();
        let slots_before = slots.values().sum();
        let slots = self.fleet.slots();
        let (next_due, retry_at) = self.lanes.next_round(&slots, &self.admission, now);
        let next_due = next_due.into_iter().chain(self.admission.next_change()).min();
        // Another round follows at once if the cached roster was stale, or if some lanes are not listed or searched yet.
        let is_incomplete = self.fleet.is_unknown() || self.discovery.is_incomplete() || (self.has_unsearched && !slots.is_empty());
        let retry_at = if is_incomplete { Some(at) } else { retry_at };
        Ok(Summary { assigned: assigned.len(), unannounced, slots: slots_before, next_due, retry_at })
    }

    /// Ends the turns of workers that have answered, have left, or take too long. Marks lanes as stale in which jobs of these turns may
    /// wait again.
    async fn end_turns(&mut self, store: &impl Database, trigger: &Trigger, at: Monotonic) -> Result<(), StoreError> {
        for turn in self.in_flight.end_answered(self.fleet.workers()) {
            if let Some(travel) = turn.travel(at) {
                self.admission.cells().observe(travel);
            }
            self.past_assignments.add(&turn, false);
            // If the worker did not start one of the jobs that a search has skipped, the hint about it follows.
            turn.skipped_in.iter().for_each(|lane| self.past_assignments.add_lane(lane));
            turn.due_again_in.iter().for_each(|lane| self.lanes.mark_stale(lane.clone()));
        }
        if !trigger.left.is_empty() {
            self.fleet.remove(&trigger.left.iter().copied().collect());
            for turn in trigger.left.iter().filter_map(|worker| self.in_flight.remove_worker(*worker, at)).collect::<Vec<_>>() {
                self.end_turn(&turn, false);
            }
            self.mark_recent_lanes();
        }
        if trigger.full_scan {
            let workers = self.in_flight.workers();
            if !workers.is_empty() {
                let rounds = store.rounds_of(&workers).await?;
                for turn in self.in_flight.expire(&rounds, at) {
                    self.end_turn(&turn, true);
                }
                self.remind(store, at).await;
            }
            self.past_assignments.drop_old(at);
            // A scan that takes several rounds is completed first.
            if !self.discovery.is_incomplete() {
                self.lanes.end_scan();
            }
        }
        self.is_admission_unsure |= trigger.refused || !trigger.left.is_empty() || !trigger.returned.is_empty();
        for (worker, jobs) in &trigger.returned {
            self.in_flight.returned(*worker, jobs);
            jobs.iter().for_each(|job| self.admission.cells().was_not_assigned(*job));
            self.past_assignments.remove(jobs);
        }
        if trigger.refused || !trigger.returned.is_empty() {
            self.mark_recent_lanes();
        }
        Ok(())
    }

    /// Reads the settings in a full scan and after a change of them, and the permits in use when they are unsure.
    async fn read_settings(&mut self, store: &impl Database, trigger: &Trigger, at: Monotonic) -> Result<(), StoreError> {
        self.admission.release(&trigger.released);
        let ended = trigger.released.iter().filter_map(|permit| resource_and_number(permit)).map(|(resource, _)| resource).collect();
        self.lanes.mark_lines_stale(&ended);
        let mut must_recall = self.admission.refresh(store.now());
        if trigger.full_scan || trigger.settings {
            must_recall |= self.admission.change(store.settings().await?, store.now());
            if self.lanes.set_ageing(self.admission.ageing().groups()) {
                self.discovery.forget();
            }
            self.read_halted_lines(store).await?;
            for group in self.admission.groups_to_count() {
                self.admission.set_without_permit(&group, store.running_without_permit(&group).await?);
            }
        }
        if must_recall {
            // Jobs ahead that a new pause, maintenance window or limit covers must not start.
            let recalls = self.keep_alive.channels.iter().map(|channel| (*channel, Hint::Recall)).collect();
            store.announce_hints_to(recalls).await;
        }
        if (trigger.full_scan || self.is_admission_unsure) && self.admission.holds_permits() {
            let running = store.held_permits().await?;
            self.admission.confirm(&running, |job| self.in_flight.holds(job, at));
        }
        self.is_admission_unsure = false;
        Ok(())
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

    fn end_turn(&mut self, turn: &Turn, unanswered: bool) {
        self.is_admission_unsure |= unanswered && !turn.permits.is_empty();
        self.past_assignments.add(turn, unanswered);
        // A search has skipped jobs of this turn in these lanes. A job that was not started is still due there.
        turn.skipped_in.iter().chain(&turn.due_again_in).for_each(|lane| self.lanes.mark_stale(lane.clone()));
    }

    /// Marks the lanes as stale in which jobs were assigned recently.
    fn mark_recent_lanes(&mut self) {
        self.past_assignments.recent_lanes().for_each(|lane| self.lanes.mark_stale(lane.clone()));
    }

    fn announce(&mut self, jobs: Vec<ScheduledJob>, at: Monotonic) {
        if !jobs.is_empty() {
            let is_new = |job: &ScheduledJob| !self.in_flight.contains(job, at) && !self.past_assignments.contains(job);
            self.lanes.announce(jobs.into_iter().filter(is_new));
        }
    }

    /// Finds the lanes that may have jobs: all of them in a full scan, otherwise those of new kinds of workers and of announced groups.
    async fn discover(&mut self, store: &impl Database, now: Instant, until: Instant) -> Result<(), StoreError> {
        // Includes kinds whose workers are busy now: a stale lane is searched when they accept jobs.
        let kinds = self.fleet.kinds();
        let all: Vec<KindId> = (0..kinds.len()).collect();
        if self.discovery.is_incomplete() {
            let lanes = self.discovery.list_some(store, kinds).await?;
            lanes.into_iter().for_each(|lane| self.lanes.mark_stale(lane));
        } else if self.lanes.needs_scan(now) {
            let lanes = self.discovery.lanes_of_all(store, kinds, &all, until).await?;
            self.lanes.begin_scan(lanes, all.iter().copied(), until, |lane| self.discovery.will_list(lane));
            self.hinted = std::mem::take(&mut self.news);
        } else {
            let unscanned = self.lanes.unscanned(all.iter().copied());
            if !unscanned.is_empty() {
                let lanes = self.discovery.lanes_of_all(store, kinds, &unscanned, until).await?;
                lanes.into_iter().for_each(|lane| self.lanes.mark_stale(lane));
                self.lanes.scanned_for(unscanned);
            }
        }
        if !self.news.is_empty() {
            let lanes = self.discovery.lanes_of_groups(store, kinds, &all, &std::mem::take(&mut self.news), until).await?;
            lanes.into_iter().for_each(|lane| self.lanes.mark_stale(lane));
        }
        self.lanes.learn_kinds(self.fleet.kinds());
        Ok(())
    }

    /// Fills the stale windows of lanes that workers which accept jobs take.
    async fn fill(
        &mut self,
        store: &impl Database,
        slots: &HashMap<KindId, usize>,
        now: Instant,
        until: Instant,
        at: Monotonic,
    ) -> Result<(), StoreError> {
        self.has_unsearched = false;
        let sets = self.lanes.stale(slots, &self.admission, now, at);
        if sets.is_empty() {
            return Ok(());
        }
        let searched: HashSet<Lane> = sets.iter().flat_map(|(_, lanes)| lanes).cloned().collect();
        self.search_sets(store, sets, slots, (now, until), at).await?;
        // The first searches may have removed jobs from windows, so that further lanes are needed to fill the slots.
        let mut sets = self.lanes.stale(slots, &self.admission, now, at);
        sets.iter_mut().for_each(|(_, lanes)| lanes.retain(|lane| !searched.contains(lane)));
        self.search_sets(store, sets, slots, (now, until), at).await
    }

    /// Searches limited lanes, and all lanes if groups have weights, each by itself, so that a long backlog behind one limit hides no job. In one round only some of many lanes are
    /// searched.
    async fn search_each(
        &mut self,
        store: &impl Database,
        mut lanes: Vec<(Lane, usize)>,
        slots: &HashMap<KindId, usize>,
        (now, until): (Instant, Instant),
        at: Monotonic,
    ) -> Result<(), StoreError> {
        let slots: usize = slots.values().sum();
        let most = (slots * LANES_PER_SLOT).clamp(FEWEST_LANES, MOST_LANES);
        // If only some are searched, the most urgent ones come first.
        lanes.sort_by_key(|(lane, _)| Reverse(lane.priority));
        self.has_unsearched |= lanes.len() > most;
        lanes.truncate(most);
        let (lines, mut lanes): (Vec<_>, Vec<_>) = lanes.into_iter().partition(|(lane, _)| is_of_line(lane));
        self.search_lines(store, lines.into_iter().map(|(lane, _)| lane).collect(), until, at).await?;
        let (refused, share) = (self.past_assignments.refused_count(), (MOST_ENTRIES / lanes.len().max(1)).max(FEWEST));
        for (lane, limit) in &mut lanes {
            // The first jobs of the lane may be in flight or paused. A permit in use will be free for another job soon.
            let held = self.admission.held(lane);
            *limit = (((*limit).min(slots).max(1) + held) * SURPLUS_OF_EACH + held + refused).min(share);
        }
        let lanes = lanes.into_iter().map(|(lane, limit)| (lane, limit, None)).collect();
        let Some(full) = self.fill_each(store, lanes, until, now, at).await? else { return Ok(()) };
        // Their answers were full of jobs that are due later, in flight or paused.
        self.fill_each(store, full, now, now, at).await.map(drop)
    }

    /// Searches each of these lanes for its number of jobs. Returns those whose answer is full and has no job that can start now; `None` if
    /// MongoDB takes too long. The date of a lane is that of the next job that an earlier search has found.
    async fn fill_each(
        &mut self,
        store: &impl Database,
        lanes: Vec<(Lane, usize, Option<Instant>)>,
        until: Instant,
        now: Instant,
        at: Monotonic,
    ) -> Result<Option<Vec<(Lane, usize, Option<Instant>)>>, StoreError> {
        if lanes.is_empty() {
            return Ok(Some(Vec::new()));
        }
        let asked: Vec<(Lane, usize)> = lanes.iter().map(|(lane, limit, _)| (lane.clone(), *limit)).collect();
        let answers = match store.due_jobs_of_each(&asked, until).await {
            Ok(answers) => answers,
            Err(error) if error.is_too_slow() => {
                tracing::warn!(lanes = lanes.len(), "a search for due jobs of limited lanes took too long; the next full scan repeats it");
                self.has_unsearched = false;
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let mut full = Vec::new();
        for ((lane, limit, next_due), answer) in lanes.into_iter().zip(answers) {
            let was_full = answer.end.is_some();
            let mut search = self.sort(store, answer, until, at);
            search.is_fruitless = was_full && !search.fills(1, std::slice::from_ref(&lane), now);
            search.next_due = next_due.into_iter().chain(search.first_after(now)).min();
            if search.is_fruitless && until > now {
                full.push((lane.clone(), limit, search.next_due));
            }
            self.lanes.fill(&[lane], &mut search, at);
        }
        Ok(Some(full))
    }

    /// Finds the heads of lines. The window of a line has at most one job: its head, if that is in this lane and does not run, and the line is
    /// not paused. Nothing behind it may start, even if it is due later.
    async fn search_lines(&mut self, store: &impl Database, lanes: Vec<Lane>, until: Instant, at: Monotonic) -> Result<(), StoreError> {
        if lanes.is_empty() {
            return Ok(());
        }
        let gates: BTreeSet<&str> = lanes.iter().filter_map(|lane| lane.gate.as_deref()).collect();
        let heads = store.heads_of_lines(&gates.into_iter().collect::<Vec<_>>()).await?;
        for (gate, head) in &heads {
            if let Some(pause) = &head.halt {
                self.admission.halt(gate, pause.clone());
            }
        }
        for lane in lanes {
            let head = lane.gate.as_ref().and_then(|gate| heads.get(gate));
            let head = head.filter(|head| !head.is_locked && head.halt.is_none() && head.job.lane() == lane);
            let jobs: Vec<ScheduledJob> = head.map(|head| head.job.clone()).into_iter().collect();
            // Behind the head there may be others. If the head is elsewhere, its end marks this lane as stale.
            let end = jobs.first().map(ScheduledJob::position);
            let mut search = self.sort(store, DueJobs { jobs, end }, until, at);
            self.lanes.fill(&[lane], &mut search, at);
        }
        Ok(())
    }

    /// Searches lanes, by the kinds of workers that take them, and fills their windows.
    ///
    /// The first query covers all these lanes. If its answer is full and has too few due jobs for some workers, the lanes of these workers
    /// are searched alone, so that a long backlog in other lanes hides no job. If that answer is full of jobs that are due later, a third
    /// query asks for due jobs only.
    async fn search_sets(
        &mut self,
        store: &impl Database,
        mut sets: StaleLanes,
        slots: &HashMap<KindId, usize>,
        (now, until): (Instant, Instant),
        at: Monotonic,
    ) -> Result<(), StoreError> {
        let mut limited = Vec::new();
        for (_, lanes) in &mut sets {
            lanes.retain(|lane| {
                let room = self.admission.room(lane, now);
                let is_alone = room < usize::MAX || self.admission.has_weights() || lane.priority.is_some();
                if is_alone {
                    limited.push((lane.clone(), room));
                }
                !is_alone
            });
        }
        self.search_each(store, limited, slots, (now, until), at).await?;
        sets.retain(|(_, lanes)| !lanes.is_empty());
        if sets.is_empty() {
            return Ok(());
        }
        let slots_of = |kinds: &mut dyn Iterator<Item = &KindId>| kinds.map(|kind| slots[kind]).sum::<usize>();
        let all: HashSet<KindId> = sets.iter().flat_map(|(able, _)| able).copied().collect();
        let lanes: Vec<Lane> = sets.iter().flat_map(|(_, lanes)| lanes).cloned().collect();
        let Some(mut together) = self.search(store, &lanes, until, slots_of(&mut all.iter()), at).await? else { return Ok(()) };
        let is_one = sets.len() == 1;
        for (able, lanes) in sets {
            let wanted = slots_of(&mut able.iter());
            if together.is_enough(wanted, &lanes, now) {
                self.lanes.fill(&lanes, &mut together, at);
                continue;
            }
            let mut search = if is_one {
                std::mem::take(&mut together)
            } else {
                let Some(alone) = self.search(store, &lanes, until, wanted, at).await? else { return Ok(()) };
                alone
            };
            if !search.is_enough(wanted, &lanes, now) {
                // The answer is full, but many of its jobs are due later, in flight or paused.
                let next_due = search.first_after(now);
                let Some(due) = self.search(store, &lanes, now, wanted, at).await? else { return Ok(()) };
                let is_fruitless = !due.fills(wanted, &lanes, now);
                search = Search { next_due, is_fruitless, ..due };
            }
            self.lanes.fill(&lanes, &mut search, at);
        }
        Ok(())
    }

    /// Searches these lanes for enough jobs to fill `slots`. Returns `None` if MongoDB takes too long. The next search then asks for fewer
    /// jobs.
    async fn search(
        &mut self,
        store: &impl Database,
        lanes: &[Lane],
        until: Instant,
        slots: usize,
        at: Monotonic,
    ) -> Result<Option<Search>, StoreError> {
        let limit =
            slots + (slots * store.surplus_per_slot()).min(MOST_SURPLUS) + self.in_flight.len() + self.past_assignments.refused_count();
        let limit = limit.min(self.at_most.unwrap_or(usize::MAX));
        let answer = match store.due_jobs(lanes, until, limit).await {
            Ok(answer) => answer,
            Err(error) if error.is_too_slow() => {
                self.at_most = Some((limit / 2).max(FEWEST));
                tracing::warn!(limit, lanes = lanes.len(), "a search for due jobs took too long; the next search asks for fewer jobs");
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        self.at_most = self.at_most.map(|most| most * 2).filter(|most| *most < MOST_SURPLUS * 4);
        Ok(Some(self.sort(store, answer, until, at)))
    }

    /// Divides the jobs of an answer among their lanes, without those that are in flight or paused.
    fn sort(&mut self, store: &impl Database, answer: DueJobs, until: Instant, at: Monotonic) -> Search {
        let mut search = Search { end: answer.end, horizon: until, found: HashMap::new(), next_due: None, is_fruitless: false };
        let due_before = store.now() - ANNOUNCED_AFTER;
        for job in answer.jobs {
            let is_in_flight = self.in_flight.skip(&job, at);
            let pause_ends_at = if is_in_flight { None } else { self.past_assignments.pause(&job, at) };
            let found = search.found.entry(self.lanes.lane_of(&job)).or_default();
            match pause_ends_at {
                _ if is_in_flight => {}
                Some(again) => found.pause_ends_at = found.pause_ends_at.into_iter().chain([again]).min(),
                None => {
                    if job.scheduled_at <= due_before && self.is_unannounced(&job) {
                        self.unannounced.insert(job.id);
                    }
                    found.jobs.push_back(job);
                }
            }
        }
        search
    }

    /// Whether the scan of this round is the first that has found this job, and no hint has named the job's group since the last scan.
    fn is_unannounced(&self, job: &ScheduledJob) -> bool {
        self.lanes.had_missed(job, self.fleet.kinds()) && !self.hinted.contains(&job.group) && !self.past_assignments.was_refused(job)
    }

    /// Writes a plan and notifies the workers. Returns the assigned jobs.
    async fn assign(&mut self, store: &impl Database, term: LeaseTerm, plan: Plan) -> Result<HashSet<JobId>, StoreError> {
        if plan.given.is_empty() {
            return Ok(HashSet::new());
        }
        if plan.permits.values().any(|permit| !permit.names.is_empty()) {
            // Without its index MongoDB would not refuse a permit twice.
            store.prepare_limited_jobs().await?;
        }
        let cells = self.admission.cells().to_keep();
        if !cells.is_empty() {
            // Before the assignment: the next leader must not take these cells again.
            store.keep_cells(&cells).await?;
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
            Planned { assignment: assigned_to(id, jobs), for_slots: jobs.len().min(free as usize) }
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
                self.in_flight.begin(round, (*id, *channel), jobs.iter().map(|(job, due)| (*job, Some(*due))).collect(), at);
                let assignment = assigned_to(*id, jobs);
                self.in_flight.add_permits(*id, assignment.permits.clone(), jobs.len() < *free as usize);
                by_channel.entry(*channel).or_default().push(assignment);
            } else {
                let permits = jobs.iter().filter_map(|(job, _)| Some((*job, plan.permits.get(job)?)));
                permits.for_each(|(job, permit)| self.admission.take_back(job, permit));
            }
        }
        plan.lanes.iter().for_each(|lane| self.past_assignments.add_lane(lane));
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
        for turn in self.in_flight.older_than(REMIND_AFTER, at) {
            let jobs = turn.jobs.iter().map(|(job, _)| *job).collect();
            by_round.entry((turn.channel, turn.round)).or_default().push(AssignedJobs {
                worker: turn.worker,
                jobs,
                permits: turn.permits.clone(),
            });
        }
        let hints = by_round.into_iter().map(|((channel, round), assignments)| (channel, Hint::Assigned { round, assignments }));
        store.announce_hints_to(hints.collect()).await;
    }
}
