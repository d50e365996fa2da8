//! The searches of a round: they fill the stale windows of lanes with due jobs.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap, HashSet},
    time::Instant as Monotonic,
};

use chrono::TimeDelta;
use recruiter_common::{
    instant::Instant,
    store::{DueJobs, Lane, ScheduledJob, StoreError},
};

use super::{
    Lanes,
    windows::{Search, StaleLanes, is_of_line},
};
use crate::leader::{
    admission::Admission,
    book::{Book, Whereabouts},
    database::Database,
    fleet::{Kind, KindId},
};

/// Maximum number of jobs that a search asks for beyond those that the workers accept now.
const MOST_SURPLUS: usize = 5_000;
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

/// The searches of one round.
pub(crate) struct Searching<'a, D> {
    pub(crate) store: &'a D,
    /// Number of jobs that the workers of each kind accept.
    pub(crate) slots: &'a HashMap<KindId, usize>,
    pub(crate) kinds: &'a [Kind],
    pub(crate) lanes: &'a mut Lanes,
    pub(crate) admission: &'a mut Admission,
    pub(crate) book: &'a mut Book,
    pub(crate) now: Instant,
    /// A search finds jobs that become due until then.
    pub(crate) until: Instant,
    pub(crate) at: Monotonic,
}

impl<D: Database> Searching<'_, D> {
    /// Lists the lanes that may have jobs, and fills their windows.
    pub(crate) async fn run(&mut self) -> Result<(), StoreError> {
        self.lanes.discover(self.store, self.kinds, self.now, self.until).await?;
        self.fill().await?;
        self.lanes.has_unsearched |= self.lanes.windows.has_woken_in_vain(self.now);
        self.lanes.windows.forget_before();
        self.lanes.hinted.clear();
        Ok(())
    }

    /// Fills the stale windows of lanes that workers which accept jobs take.
    async fn fill(&mut self) -> Result<(), StoreError> {
        self.lanes.has_unsearched = self.lanes.windows.wake(self.slots, self.kinds, self.admission, self.now, self.at);
        let sets = self.lanes.windows.stale(self.slots, self.admission, self.now, self.at);
        if sets.is_empty() {
            return Ok(());
        }
        let searched: HashSet<Lane> = sets.iter().flat_map(|(_, lanes)| lanes).cloned().collect();
        self.search_sets(sets).await?;
        // The first searches may have removed jobs from windows, so that further lanes are needed to fill the slots.
        let mut sets = self.lanes.windows.stale(self.slots, self.admission, self.now, self.at);
        sets.iter_mut().for_each(|(_, lanes)| lanes.retain(|lane| !searched.contains(lane)));
        self.search_sets(sets).await
    }

    /// Searches limited lanes, and all lanes if groups have weights, each by itself, so that a long backlog behind one limit hides no job. In
    /// one round only some of many lanes are searched.
    async fn search_each(&mut self, mut lanes: Vec<(Lane, usize)>) -> Result<(), StoreError> {
        let slots: usize = self.slots.values().sum();
        let most = (slots * LANES_PER_SLOT).clamp(FEWEST_LANES, MOST_LANES);
        // If only some are searched, the most urgent ones come first.
        lanes.sort_by_key(|(lane, _)| Reverse(lane.priority));
        self.lanes.has_unsearched |= lanes.len() > most;
        lanes.truncate(most);
        let (lines, mut lanes): (Vec<_>, Vec<_>) = lanes.into_iter().partition(|(lane, _)| is_of_line(lane));
        self.search_lines(lines.into_iter().map(|(lane, _)| lane).collect()).await?;
        let (refused, share) = (self.book.refusals.len(), (MOST_ENTRIES / lanes.len().max(1)).max(FEWEST));
        for (lane, limit) in &mut lanes {
            // The first jobs of the lane may be in flight or paused. A permit in use will be free for another job soon.
            let held = self.admission.held(lane);
            *limit = (((*limit).min(slots).max(1) + held) * SURPLUS_OF_EACH + held + refused).min(share);
        }
        let lanes = lanes.into_iter().map(|(lane, limit)| (lane, limit, None)).collect();
        let Some(full) = self.fill_each(lanes, self.until).await? else { return Ok(()) };
        // Their answers were full of jobs that are due later, in flight or paused.
        self.fill_each(full, self.now).await.map(drop)
    }

    /// Searches each of these lanes for its number of jobs. Returns those whose answer is full and has no job that can start now; `None` if
    /// MongoDB takes too long. The date of a lane is that of the next job that an earlier search has found.
    async fn fill_each(
        &mut self,
        lanes: Vec<(Lane, usize, Option<Instant>)>,
        until: Instant,
    ) -> Result<Option<Vec<(Lane, usize, Option<Instant>)>>, StoreError> {
        if lanes.is_empty() {
            return Ok(Some(Vec::new()));
        }
        let asked: Vec<(Lane, usize)> = lanes.iter().map(|(lane, limit, _)| (lane.clone(), *limit)).collect();
        let answers = match self.store.due_jobs_of_each(&asked, until).await {
            Ok(answers) => answers,
            Err(error) if error.is_too_slow() => {
                tracing::warn!(lanes = lanes.len(), "a search for due jobs of limited lanes took too long; the next full scan repeats it");
                self.lanes.has_unsearched = false;
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let mut full = Vec::new();
        for ((lane, limit, next_due), answer) in lanes.into_iter().zip(answers) {
            let was_full = answer.end.is_some();
            let mut search = self.sort(answer, until);
            search.is_fruitless = was_full && !search.fills(1, std::slice::from_ref(&lane), self.now);
            search.next_due = next_due.into_iter().chain(search.first_after(self.now)).min();
            if search.is_fruitless && until > self.now {
                full.push((lane.clone(), limit, search.next_due));
            }
            self.lanes.windows.fill(&[lane], &mut search, self.at);
        }
        Ok(Some(full))
    }

    /// Finds the heads of lines. The window of a line has at most one job: its head, if that is in this lane and does not run, and the line is
    /// not paused. Nothing behind it may start, even if it is due later.
    async fn search_lines(&mut self, lanes: Vec<Lane>) -> Result<(), StoreError> {
        if lanes.is_empty() {
            return Ok(());
        }
        let gates: BTreeSet<&str> = lanes.iter().filter_map(|lane| lane.gate.as_deref()).collect();
        let heads = match self.store.heads_of_lines(&gates.into_iter().collect::<Vec<_>>()).await {
            Ok(heads) => heads,
            Err(error) if error.is_too_slow() => {
                tracing::warn!(lines = lanes.len(), "a search for the first jobs of lines took too long; the next full scan repeats it");
                self.lanes.has_unsearched = false;
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        for (gate, head) in &heads {
            if let Some(pause) = &head.halt {
                self.admission.halt(gate, pause.clone());
            }
        }
        for lane in lanes {
            let head = lane.gate.as_ref().and_then(|gate| heads.get(gate));
            // A head that is due after the next full scan is found by a later one, and needs no window.
            let head = head.filter(|head| !head.is_locked && head.halt.is_none() && head.job.scheduled_at <= self.until);
            // If the head is elsewhere, its end marks this lane as stale.
            let is_behind = head.is_some_and(|head| head.job.lane() != lane);
            let jobs: Vec<ScheduledJob> = head.filter(|_| !is_behind).map(|head| head.job.clone()).into_iter().collect();
            // Behind the head there may be others.
            let end = jobs.first().map(ScheduledJob::position);
            let mut search = Search { is_behind, ..self.sort(DueJobs { jobs, end }, self.until) };
            self.lanes.windows.fill(&[lane], &mut search, self.at);
        }
        Ok(())
    }

    /// Searches lanes, by the kinds of workers that take them, and fills their windows.
    ///
    /// The first query covers all these lanes. If its answer is full and has too few due jobs for some workers, the lanes of these workers
    /// are searched alone, so that a long backlog in other lanes hides no job. If that answer is full of jobs that are due later, a third
    /// query asks for due jobs only.
    async fn search_sets(&mut self, mut sets: StaleLanes) -> Result<(), StoreError> {
        let mut limited = Vec::new();
        for (_, lanes) in &mut sets {
            lanes.retain(|lane| {
                let room = self.admission.room(lane, self.now);
                let is_alone = room < usize::MAX || self.admission.has_weights() || lane.priority.is_some();
                if is_alone {
                    limited.push((lane.clone(), room));
                }
                !is_alone
            });
        }
        self.search_each(limited).await?;
        sets.retain(|(_, lanes)| !lanes.is_empty());
        if sets.is_empty() {
            return Ok(());
        }
        let slots = self.slots;
        let slots_of = |kinds: &mut dyn Iterator<Item = &KindId>| kinds.map(|kind| slots[kind]).sum::<usize>();
        let all: HashSet<KindId> = sets.iter().flat_map(|(able, _)| able).copied().collect();
        let lanes: Vec<Lane> = sets.iter().flat_map(|(_, lanes)| lanes).cloned().collect();
        let Some(mut together) = self.search(&lanes, self.until, slots_of(&mut all.iter())).await? else { return Ok(()) };
        let is_one = sets.len() == 1;
        for (able, lanes) in sets {
            let wanted = slots_of(&mut able.iter());
            if together.is_enough(wanted, &lanes, self.now) {
                self.lanes.windows.fill(&lanes, &mut together, self.at);
                continue;
            }
            let mut search = if is_one {
                std::mem::take(&mut together)
            } else {
                let Some(alone) = self.search(&lanes, self.until, wanted).await? else { return Ok(()) };
                alone
            };
            if !search.is_enough(wanted, &lanes, self.now) {
                // The answer is full, but many of its jobs are due later, in flight or paused.
                let next_due = search.first_after(self.now);
                let Some(due) = self.search(&lanes, self.now, wanted).await? else { return Ok(()) };
                let is_fruitless = !due.fills(wanted, &lanes, self.now);
                search = Search { next_due, is_fruitless, ..due };
            }
            self.lanes.windows.fill(&lanes, &mut search, self.at);
        }
        Ok(())
    }

    /// Searches these lanes for enough jobs to fill `slots`. Returns `None` if MongoDB takes too long. The next search then asks for fewer
    /// jobs.
    async fn search(&mut self, lanes: &[Lane], until: Instant, slots: usize) -> Result<Option<Search>, StoreError> {
        let limit = slots + (slots * self.store.surplus_per_slot()).min(MOST_SURPLUS) + self.book.in_flight() + self.book.refusals.len();
        let limit = limit.min(self.lanes.at_most.unwrap_or(usize::MAX));
        let answer = match self.store.due_jobs(lanes, until, limit).await {
            Ok(answer) => answer,
            Err(error) if error.is_too_slow() => {
                self.lanes.at_most = Some((limit / 2).max(FEWEST));
                tracing::warn!(limit, lanes = lanes.len(), "a search for due jobs took too long; the next search asks for fewer jobs");
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        self.lanes.at_most = self.lanes.at_most.map(|most| most * 2).filter(|most| *most < MOST_SURPLUS * 4);
        Ok(Some(self.sort(answer, until)))
    }

    /// Divides the jobs of an answer among their lanes, without those that are in flight or paused.
    fn sort(&mut self, answer: DueJobs, until: Instant) -> Search {
        let mut search = Search { end: answer.end, horizon: until, ..Search::default() };
        let due_before = self.store.now() - ANNOUNCED_AFTER;
        for job in answer.jobs {
            let found = search.found.entry(self.lanes.windows.lane_of(&job)).or_default();
            match self.book.find(&job, self.at) {
                Whereabouts::InFlight => {}
                Whereabouts::PausedUntil(again) => found.pause_ends_at = found.pause_ends_at.into_iter().chain([again]).min(),
                Whereabouts::Waiting => {
                    if job.scheduled_at <= due_before && self.is_unannounced(&job) {
                        self.lanes.unannounced.insert(job.id);
                    }
                    found.jobs.push_back(job);
                }
            }
        }
        search
    }

    /// Whether the scan of this round is the first that has found this job, and no hint has named the job's group since the last scan.
    fn is_unannounced(&self, job: &ScheduledJob) -> bool {
        self.lanes.windows.had_missed(job, self.kinds) && !self.lanes.hinted.contains(&job.group) && !self.book.refusals.was_refused(job)
    }
}
