//! The cache of due jobs: one window per lane, and the rules that make a window stale.
//!
//! **A window** holds the first jobs of its lane. A search fills it with every job of the lane that is due at its `horizon` and is not
//! after its `end`. Jobs that are in flight or paused are left out. A job leaves the window when it is assigned, and enters it when it is
//! announced. A window is *stale*, and is filled again before the next plan, when
//!
//! 1. an event concerns the lane but is not in the window: a hint without the job itself, or an assignment whose jobs were not all started;
//! 2. the pause of a refused job is over;
//! 3. it may be incomplete (it has an end, or its horizon has passed) and has fewer due jobs than its lane has room for, and the known due
//!    jobs of all lanes of the same workers, up to the first such end, are fewer than these workers accept. After a fruitless search this
//!    rule does not apply for 100 ms. The window of a line has its head only, and is complete while it has one. While the head is in
//!    another lane, the window is empty and complete, and stays: the end of the head is rule 1.
//!
//! A lane without room is not searched at all.
//!
//! **A lane without a window** had no jobs that are due at the horizon of the last full scan, if the scan covered the kinds of workers that
//! take the lane. A full scan drops all windows and lists all lanes that have jobs. If there are very many with a gate, some of them are
//! [asleep]: nothing is known of them but that they have jobs.
//!
//! Safety does not depend on this cache. If a job in the cache was started by another worker or archived, its start fails. If a job is
//! missing in the cache, the next full scan finds it.

mod asleep;
pub(crate) mod discover;
pub(crate) mod search;

use std::{
    collections::{BTreeSet, HashMap, HashSet, VecDeque},
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::JobId,
    instant::Instant,
    limits::{Refusal, line_of_gate},
    store::{Lane, Position, ScheduledJob},
};

use self::asleep::{Asleep, Look};
use crate::leader::{
    admission::{Admission, ageing::by_priority},
    fleet::{Kind, KindId},
};

/// Maximum number of jobs in all windows while jobs are announced. It is above the number of slots of a large fleet.
const REMEMBERED: usize = 100_000;
/// From this number of lanes on, those with a gate take turns; those that an event concerns, only from four times as many windows on.
const CROWD: usize = 1_000;
/// Pause after a fruitless search: its answer was full, but had too few jobs that can be assigned now.
const FRUITLESS_FOR: Duration = Duration::from_millis(100);

/// The first jobs of one lane.
#[derive(Clone, Debug)]
struct Window {
    /// Sorted by position.
    jobs: VecDeque<ScheduledJob>,
    /// The position up to which no job is missing. `None`: no job is missing.
    end: Option<Position>,
    /// The search left out jobs that are due later.
    horizon: Instant,
    /// Rule 1 of staleness.
    is_stale: bool,
    /// When the first pause of a refused job of this lane ends.
    pause_ends_at: Option<Monotonic>,
    /// After a fruitless search: rule 3 of staleness does not apply before this instant.
    search_again_at: Option<Monotonic>,
    /// The first due date after the horizon, if it is known.
    next_due: Option<Instant>,
    /// In a line: its head is in another lane. The end of that one makes this window stale.
    is_behind: bool,
    /// The kinds of workers that take the lane, among the first `known_kinds` kinds.
    able: Vec<KindId>,
    known_kinds: usize,
}

/// The part of a search's answer that belongs to one lane.
#[derive(Clone, Debug, Default)]
pub(crate) struct Found {
    /// Jobs that are neither in flight nor paused, sorted by position.
    pub(crate) jobs: VecDeque<ScheduledJob>,
    /// When the first pause of a refused job ends.
    pub(crate) pause_ends_at: Option<Monotonic>,
}

/// The answer to one query over some lanes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Search {
    /// The jobs of each lane. Lanes without jobs are absent.
    pub(crate) found: HashMap<Lane, Found>,
    /// The query found every job up to this position. `None`: it found every job.
    pub(crate) end: Option<Position>,
    /// The query left out jobs that are due later.
    pub(crate) horizon: Instant,
    /// The first due date after the horizon, if it is known.
    pub(crate) next_due: Option<Instant>,
    /// Whether the search was fruitless: the answer is full, but has too few jobs that can be assigned now.
    pub(crate) is_fruitless: bool,
    /// Whether the lane is one of a line whose head is in another lane.
    pub(crate) is_behind: bool,
}

impl Search {
    /// Whether the due jobs of these lanes fill `slots`.
    pub(crate) fn fills(&self, slots: usize, lanes: &[Lane], now: Instant) -> bool {
        let due = lanes.iter().filter_map(|lane| self.found.get(lane)).flat_map(|found| &found.jobs).filter(|job| job.scheduled_at <= now);
        due.take(slots).count() >= slots
    }

    /// Whether the answer is complete, or its due jobs of these lanes fill `slots`.
    pub(crate) fn is_enough(&self, slots: usize, lanes: &[Lane], now: Instant) -> bool {
        self.end.is_none() || self.fills(slots, lanes, now)
    }

    /// The first due date after `now`.
    pub(crate) fn first_after(&self, now: Instant) -> Option<Instant> {
        self.found.values().flat_map(|found| &found.jobs).map(|job| job.scheduled_at).filter(|at| *at > now).min()
    }
}

impl Window {
    fn stale(horizon: Instant) -> Self {
        Self {
            jobs: VecDeque::new(),
            end: None,
            horizon,
            is_stale: true,
            pause_ends_at: None,
            search_again_at: None,
            next_due: None,
            is_behind: false,
            able: Vec::new(),
            known_kinds: 0,
        }
    }

    /// Rules 1 and 2 of staleness.
    fn is_stale(&self, at: Monotonic) -> bool {
        self.is_stale || self.pause_ends_at.is_some_and(|again| again <= at)
    }

    /// Whether a search now may find due jobs that are not in the window.
    fn may_have_more(&self, now: Instant, at: Monotonic) -> bool {
        (self.end.is_some() || self.horizon <= now) && self.search_again_at.is_none_or(|until| until <= at)
    }

    /// Whether the missing window of an empty lane would mean the same.
    fn is_redundant(&self, scanned_until: Instant) -> bool {
        let is_empty = self.jobs.is_empty() && self.end.is_none() && !self.is_behind;
        is_empty && !self.is_stale && self.pause_ends_at.is_none() && self.horizon >= scanned_until
    }

    fn learn_kinds(&mut self, lane: &Lane, kinds: &[Kind]) {
        self.able.extend((self.known_kinds..kinds.len()).filter(|kind| kinds[*kind].takes(lane)));
        self.known_kinds = kinds.len();
    }
}

/// The last full scan.
#[derive(Clone, Debug)]
struct Scan {
    /// The kinds of workers that it covered.
    kinds: HashSet<KindId>,
    /// The scan listed lanes with jobs that are due at this date.
    horizon: Instant,
}

/// The last full scan and its windows, as they were when the current scan began.
#[derive(Clone, Debug)]
struct Before {
    scan: Scan,
    windows: HashMap<Lane, Window>,
    asleep: BTreeSet<Lane>,
}

/// All windows, and the last full scan.
#[derive(Clone, Debug)]
pub(crate) struct Lanes {
    windows: HashMap<Lane, Window>,
    asleep: Asleep,
    /// When the first of the sleeping lanes that were looked at last may start a job.
    asleep_until: Option<Instant>,
    /// [`CROWD`], or less in a model.
    pub(super) crowd: usize,
    scan: Option<Scan>,
    /// The last full scan, after the next one was requested and before it begins.
    ended: Option<Scan>,
    /// The windows from before the current scan. `None` except while its windows are filled.
    before: Option<Before>,
    /// The groups whose lanes are divided by priority.
    ageing: BTreeSet<String>,
    /// Lanes in which jobs were assigned since the last full scan, and between the two last full scans.
    recent: [HashSet<Lane>; 2],
}

/// What lanes that are compared with each other have in common: the kinds of workers that take them; their group, if groups have weights; and
/// a lane that is divided by priority is compared with no other.
type Alike<'a> = (Vec<KindId>, Option<&'a str>, Option<&'a Lane>);

/// Sets of lanes to search, each with the kinds of workers that take them.
pub(crate) type StaleLanes = Vec<(Vec<KindId>, Vec<Lane>)>;

/// The known jobs of a lane and the kinds of workers that take it.
pub(crate) struct Waiting<'a> {
    pub(crate) lane: &'a Lane,
    pub(crate) jobs: &'a VecDeque<ScheduledJob>,
    pub(crate) able: &'a [KindId],
}

impl Default for Lanes {
    fn default() -> Self {
        Self {
            windows: HashMap::new(),
            asleep: Asleep::default(),
            asleep_until: None,
            crowd: CROWD,
            scan: None,
            ended: None,
            before: None,
            ageing: BTreeSet::new(),
            recent: Default::default(),
        }
    }
}

impl Lanes {
    /// Drops all windows and the last full scan. The next round that can assign jobs begins with a full scan.
    pub(crate) fn forget(&mut self) {
        let (ageing, recent) = (std::mem::take(&mut self.ageing), std::mem::take(&mut self.recent));
        *self = Self { ageing, recent, crowd: self.crowd, ..Self::default() };
    }

    /// Sets the groups whose lanes are divided by priority. Returns whether they have changed: the next round begins with a full scan.
    pub(crate) fn set_ageing(&mut self, groups: BTreeSet<String>) -> bool {
        let has_changed = self.ageing != groups;
        if has_changed {
            self.ageing = groups;
            self.forget();
        }
        has_changed
    }

    /// The lane of a job, as it is divided here.
    pub(crate) fn lane_of(&self, job: &ScheduledJob) -> Lane {
        let lane = job.lane();
        let priority = self.is_divided(&lane).then_some(job.priority);
        Lane { priority, ..lane }
    }

    /// Whether this lane is divided by priority. The place of a job in a line does not depend on its priority.
    fn is_divided(&self, lane: &Lane) -> bool {
        !self.ageing.is_empty() && lane.priority.is_none() && self.ageing.contains(&lane.group) && !is_of_line(lane)
    }

    /// The parts of a lane.
    fn parts(&self, lane: Lane) -> Vec<Lane> {
        if self.is_divided(&lane) { by_priority(&lane).collect() } else { vec![lane] }
    }

    /// Requests a full scan. The windows stay until then.
    pub(crate) fn forget_scan(&mut self) {
        (self.scan, self.ended) = (None, None);
    }

    /// Requests a full scan after which [`had_missed`](Self::had_missed) finds the jobs that were not known before.
    pub(crate) fn end_scan(&mut self) {
        self.ended = self.scan.take().or(self.ended.take());
    }

    /// Whether this job was not known before the current scan, although all jobs of its lane up to its position should have been known.
    pub(crate) fn had_missed(&self, job: &ScheduledJob, kinds: &[Kind]) -> bool {
        let Some(Before { scan, windows, asleep }) = &self.before else { return false };
        let lane = self.lane_of(job);
        match windows.get(&lane) {
            Some(window) => {
                let is_unknown = window.is_stale || window.is_behind || window.pause_ends_at.is_some();
                let is_complete = !is_unknown && job.scheduled_at <= window.horizon;
                let is_within = window.end.is_none_or(|end| job.position() < end);
                is_complete && is_within && window.jobs.binary_search_by_key(&job.position(), ScheduledJob::position).is_err()
            }
            None if asleep.contains(&lane) => false,
            None => {
                job.scheduled_at <= scan.horizon && scan.kinds.iter().any(|kind| kinds.get(*kind).is_some_and(|kind| kind.takes(&lane)))
            }
        }
    }

    /// Drops the windows from before the current scan.
    pub(crate) fn forget_before(&mut self) {
        self.before = None;
    }

    /// Whether a full scan is due.
    pub(crate) fn needs_scan(&self, now: Instant) -> bool {
        self.scan.as_ref().is_none_or(|scan| scan.horizon < now)
    }

    /// Those of these kinds that the last full scan did not cover.
    pub(crate) fn unscanned(&self, kinds: impl Iterator<Item = KindId>) -> Vec<KindId> {
        kinds.filter(|kind| self.scan.as_ref().is_none_or(|scan| !scan.kinds.contains(kind))).collect()
    }

    /// Begins a full scan. `lanes` are the listed lanes that have jobs which are due at `horizon` and that workers of these kinds take. A
    /// lane that the same scan lists in a later round keeps its window until then.
    pub(crate) fn begin_scan(
        &mut self,
        lanes: impl IntoIterator<Item = Lane>,
        kinds: impl IntoIterator<Item = KindId>,
        horizon: Instant,
        will_be_listed: impl Fn(&Lane) -> bool,
    ) {
        let windows = std::mem::take(&mut self.windows);
        let slept = self.asleep.retain(&will_be_listed);
        let listed: Vec<Lane> = lanes.into_iter().flat_map(|lane| self.parts(lane)).collect();
        let favourites = self.favourites(&windows, &listed, &will_be_listed);
        let may_stay = |lane: &Lane| lane.gate.is_none() || favourites.as_ref().is_none_or(|favourites| favourites.contains(lane));
        let (kept, windows): (HashMap<Lane, Window>, _) = windows.into_iter().partition(|(lane, _)| will_be_listed(lane));
        let (kept, others): (_, HashMap<Lane, Window>) = kept.into_iter().partition(|(lane, _)| may_stay(lane));
        let (awake, asleep): (Vec<Lane>, Vec<Lane>) = listed.into_iter().partition(may_stay);
        self.windows = kept;
        self.windows.extend(awake.into_iter().map(|lane| (lane, Window::stale(horizon))));
        others.into_keys().chain(asleep).for_each(|lane| self.asleep.insert(lane));
        self.scan = Some(Scan { kinds: kinds.into_iter().collect(), horizon });
        self.before = self.ended.take().map(|scan| Before { scan, windows, asleep: slept });
    }

    /// If there are too many lanes with a gate, those of them that stay awake: the most urgent known ones. The others take turns.
    fn favourites(
        &self,
        windows: &HashMap<Lane, Window>,
        listed: &[Lane],
        will_be_listed: &impl Fn(&Lane) -> bool,
    ) -> Option<HashSet<Lane>> {
        // Each lane once: those that a later round lists are not listed in this one.
        let left = windows.keys().filter(|lane| will_be_listed(lane));
        if listed.iter().chain(left).filter(|lane| lane.gate.is_some()).count() <= self.crowd && self.asleep.is_empty() {
            return None;
        }
        let first = |(lane, window): (&Lane, &Window)| Some((window.jobs.front()?.position(), lane.clone()));
        let mut known: Vec<(Position, Lane)> = windows.iter().filter(|(lane, _)| lane.gate.is_some()).filter_map(first).collect();
        known.sort();
        Some(known.into_iter().take(self.crowd / 2).map(|(_, lane)| lane).collect())
    }

    /// A scan has found jobs in this lane, or may find some.
    pub(crate) fn list(&mut self, lane: Lane) {
        self.parts(lane).into_iter().for_each(|part| self.open(part, self.crowd));
    }

    /// This lane, or this part of one, may have jobs that are not known. If it has a gate, it sleeps while there are that many windows.
    fn open(&mut self, lane: Lane, crowd: usize) {
        if let Some(window) = self.windows.get_mut(&lane) {
            window.is_stale = true;
        } else if lane.gate.is_some() && self.windows.len() >= crowd {
            self.asleep.insert(lane);
        } else {
            self.asleep.remove(&lane);
            self.windows.insert(lane, Window::stale(self.horizon()));
        }
    }

    /// Wakes sleeping lanes whose jobs may start now and that the workers of the kinds in `free` take, while few lanes are ready: less than
    /// [`CROWD`], or fewer than the slots of these workers. Returns whether others are left that may wake at once.
    pub(crate) fn wake(
        &mut self,
        free: &HashMap<KindId, usize>,
        kinds: &[Kind],
        admission: &Admission,
        now: Instant,
        at: Monotonic,
    ) -> bool {
        self.asleep_until = self.asleep_until.filter(|until| *until > now);
        if self.asleep.is_empty() {
            return false;
        }
        // Lanes that are not compared with each other are counted separately.
        let alike = |kind: KindId, lane: &Lane| (kind, admission.has_weights().then(|| lane.group.clone()), lane.priority);
        let is_ready = |lane: &Lane, window: &Window| {
            let may_start = window.is_stale(at) || window.jobs.front().is_some_and(|job| job.scheduled_at <= now);
            lane.gate.is_some() && may_start && admission.room(lane, now) > 0
        };
        let (mut all, mut ready) = (0, HashMap::new());
        for (lane, window) in self.windows.iter().filter(|(lane, window)| is_ready(lane, window)) {
            all += 1;
            for kind in window.able.iter().filter(|kind| free.contains_key(kind)) {
                *ready.entry(alike(*kind, lane)).or_insert(0) += 1;
            }
        }
        let (crowd, ageing, mut opens_at) = (self.crowd, &self.ageing, self.asleep_until);
        let (woken, are_left) = self.asleep.wake(|lane| {
            let able: Vec<KindId> = free.keys().copied().filter(|kind| kinds[*kind].takes(lane)).collect();
            let has_few = |kind: &KindId| ready.get(&alike(*kind, lane)).is_none_or(|ready| *ready < free[kind]);
            let is_wanted = all < crowd || (all < crowd.saturating_mul(4).max(1) && able.iter().any(has_few));
            if able.is_empty() || !is_wanted {
                // The parts of a lane differ in their priorities.
                return if ageing.contains(&lane.group) { Look::Next } else { Look::Enough };
            }
            if admission.room(lane, now) == 0 {
                opens_at = opens_at.into_iter().chain(admission.opens_at(lane, now)).min();
                // A full group may have room for those that pass permits on.
                let refusal = admission.why(&Lane::new(&lane.group, &lane.class), now);
                return if refusal.is_none_or(|refusal| matches!(refusal, Refusal::Full { .. })) { Look::Next } else { Look::Closed };
            }
            all += 1;
            able.iter().for_each(|kind| *ready.entry(alike(*kind, lane)).or_insert(0) += 1);
            Look::Wake
        });
        let horizon = self.horizon();
        for lane in woken {
            let mut window = Window::stale(horizon);
            window.learn_kinds(&lane, kinds);
            self.windows.insert(lane, window);
        }
        self.asleep_until = opens_at;
        are_left
    }

    /// Records that the lanes of these kinds of workers were listed as well.
    pub(crate) fn scanned_for(&mut self, kinds: impl IntoIterator<Item = KindId>) {
        if let Some(scan) = &mut self.scan {
            scan.kinds.extend(kinds);
        }
    }

    /// Rule 1 of staleness: an event concerns this lane.
    pub(crate) fn mark_stale(&mut self, lane: Lane) {
        self.parts(lane).into_iter().for_each(|part| self.open(part, self.crowd.saturating_mul(4)));
    }

    /// Adds a lane in which jobs were assigned.
    pub(crate) fn add_recent(&mut self, lane: &Lane) {
        if !self.recent[0].contains(lane) {
            self.recent[0].insert(lane.clone());
        }
    }

    /// Marks the lanes as stale in which jobs were assigned since the full scan before the last one.
    pub(crate) fn mark_recent_stale(&mut self) {
        self.recent.iter().flatten().cloned().collect::<Vec<_>>().into_iter().for_each(|lane| self.mark_stale(lane));
    }

    /// Forgets the recent lanes of the period before the last full scan. Called by each full scan.
    pub(crate) fn drop_old(&mut self) {
        self.recent.swap(0, 1);
        self.recent[0].clear();
    }

    /// Marks the lanes of these lines as stale: their heads have ended.
    pub(crate) fn mark_lines_stale(&mut self, gates: &HashSet<&str>) {
        let has_ended = |lane: &Lane| lane.gate.as_deref().is_some_and(|gate| gates.contains(gate));
        let lines = self.windows.iter_mut().filter(|(lane, _)| is_of_line(lane) && has_ended(lane));
        lines.for_each(|(_, window)| window.is_stale = true);
    }

    /// Marks the lanes of all lines as stale: a pause may cover their heads.
    pub(crate) fn mark_every_line_stale(&mut self) {
        let lines = self.windows.iter_mut().filter(|(lane, _)| is_of_line(lane));
        lines.for_each(|(_, window)| window.is_stale = true);
    }

    /// Ends all pauses of refused jobs: their windows are stale.
    pub(crate) fn end_pauses(&mut self) {
        self.windows.values_mut().for_each(|window| window.is_stale |= window.pause_ends_at.is_some());
    }

    /// The horizon of the last full scan.
    fn horizon(&self) -> Instant {
        self.scan.as_ref().map_or(Instant::MIN_UTC, |scan| scan.horizon)
    }

    /// Adds announced jobs. Their inserts need not be visible yet. Returns whether some of them are in lanes that must be searched.
    pub(crate) fn announce(&mut self, jobs: impl IntoIterator<Item = ScheduledJob>) -> bool {
        let mut must_search = false;
        let mut known: usize = self.windows.values().map(|window| window.jobs.len()).sum();
        let (horizon, is_scanned) = (self.horizon(), self.scan.is_some());
        for job in jobs {
            let lane = self.lane_of(&job);
            if known >= REMEMBERED && !self.windows.contains_key(&lane) {
                // The next full scan finds it.
                continue;
            }
            let is_known = self.windows.contains_key(&lane);
            if !is_known && lane.gate.is_some() && self.windows.len() >= self.crowd.saturating_mul(4) {
                self.asleep.insert(lane);
                must_search = true;
                continue;
            }
            let is_stale = self.asleep.remove(&lane) || !is_scanned;
            let is_in_line = is_of_line(&lane);
            let window = self.windows.entry(lane).or_insert_with(|| Window { is_stale, ..Window::stale(horizon) });
            if known >= REMEMBERED || is_in_line {
                // Another job may be before it in its line.
                window.is_stale = true;
                must_search |= is_in_line;
                known += 1;
            } else if window.end.is_none_or(|end| job.position() < end)
                && let Err(index) = window.jobs.binary_search_by_key(&job.position(), ScheduledJob::position)
            {
                window.jobs.insert(index, job);
                known += 1;
            }
        }
        must_search
    }

    /// Removes assigned jobs.
    pub(crate) fn remove(&mut self, lanes: &HashSet<Lane>, jobs: &HashSet<JobId>) {
        let horizon = self.horizon();
        for lane in lanes {
            if let Some(window) = self.windows.get_mut(lane) {
                window.jobs.retain(|job| !jobs.contains(&job.id));
                if window.is_redundant(horizon) {
                    self.windows.remove(lane);
                }
            }
        }
    }

    /// Updates which kinds of workers take each lane.
    pub(crate) fn learn_kinds(&mut self, kinds: &[Kind]) {
        for (lane, window) in &mut self.windows {
            window.learn_kinds(lane, kinds);
        }
    }

    /// The stale lanes that workers of the kinds in `free` take, grouped by these kinds. `free` has the number of jobs that the workers of
    /// a kind accept. The same workers take all lanes of one group, so one query over the group hides no job from a worker.
    ///
    /// Admission says how many jobs of a lane may start now. A lane without room is not searched, and its jobs fill no slots. If groups have
    /// weights, the jobs of one group hide no job of another. If the jobs of a group age, those of one priority hide no other.
    pub(crate) fn stale(&self, free: &HashMap<KindId, usize>, admission: &Admission, now: Instant, at: Monotonic) -> StaleLanes {
        let mut alike: HashMap<Alike<'_>, Vec<Candidate<'_>>> = HashMap::new();
        for (lane, window) in &self.windows {
            let able: Vec<KindId> = window.able.iter().copied().filter(|kind| free.contains_key(kind)).collect();
            if able.is_empty() {
                continue;
            }
            let room = admission.room(lane, now);
            if room > 0 {
                let group = admission.has_weights().then_some(lane.group.as_str());
                let divided = lane.priority.is_some().then_some(lane);
                alike.entry((able, group, divided)).or_default().push(Candidate { lane, window, room });
            }
        }
        let mut stale = StaleLanes::new();
        for ((able, ..), lanes) in alike {
            let slots = able.iter().map(|kind| free[kind]).sum();
            let more = more_is_needed(&lanes, slots, now, at);
            let must_be_searched = |lane: &&Candidate<'_>| lane.window.is_stale(at) || (more && lane.is_unsure(now, at));
            let mut searched: Vec<&Candidate<'_>> = lanes.iter().filter(must_be_searched).collect();
            // An event concerns these: they come first if there are too many.
            searched.sort_by_key(|lane| !lane.window.is_stale(at));
            let lanes: Vec<Lane> = searched.into_iter().map(|lane| lane.lane.clone()).collect();
            if !lanes.is_empty() {
                stale.push((able, lanes));
            }
        }
        stale
    }

    /// Replaces the contents of the windows of these lanes by the answer of a search.
    pub(crate) fn fill(&mut self, lanes: &[Lane], search: &mut Search, at: Monotonic) {
        let scanned_until = self.horizon();
        for lane in lanes {
            let Some(window) = self.windows.get_mut(lane) else { continue };
            let found = search.found.remove(lane).unwrap_or_default();
            (window.jobs, window.pause_ends_at) = (found.jobs, found.pause_ends_at);
            (window.end, window.horizon, window.next_due) = (search.end, search.horizon, search.next_due);
            (window.is_stale, window.is_behind) = (false, search.is_behind);
            window.search_again_at = search.is_fruitless.then_some(at + FRUITLESS_FOR);
            if window.is_redundant(scanned_until) {
                self.windows.remove(lane);
            }
        }
    }

    /// Every lane with known jobs.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = Waiting<'_>> {
        let with_jobs = self.windows.iter().filter(|(_, window)| !window.jobs.is_empty());
        with_jobs.map(|(lane, window)| Waiting { lane, jobs: &window.jobs, able: &window.able })
    }

    /// When the next round is due for workers of these kinds: a date of the server's clock, and an instant of this process's clock.
    ///
    /// A lane without room needs no round, unless a rate gives it room at a known date.
    pub(crate) fn next_round(
        &self,
        free: &HashMap<KindId, usize>,
        admission: &Admission,
        now: Instant,
    ) -> (Option<Instant>, Option<Monotonic>) {
        let (mut date, mut instant) = (self.asleep_until, None);
        let is_taken = |window: &Window| window.able.iter().any(|kind| free.contains_key(kind));
        for (lane, window) in self.windows.iter().filter(|(_, window)| is_taken(window)) {
            if admission.room(lane, now) == 0 {
                date = date.into_iter().chain(admission.opens_at(lane, now)).min();
                continue;
            }
            let later = window.jobs.iter().map(|job| job.scheduled_at).chain(window.next_due).filter(|at| *at > now).min();
            date = date.into_iter().chain(later).min();
            let search_again_at = window.search_again_at.filter(|_| window.end.is_some() || window.horizon <= now);
            instant = instant.into_iter().chain(window.pause_ends_at).chain(search_again_at).min();
        }
        (date, instant)
    }
}

/// Whether the jobs of this lane are in a line.
pub(crate) fn is_of_line(lane: &Lane) -> bool {
    lane.gate.as_deref().is_some_and(|gate| line_of_gate(gate).is_some())
}

/// A lane that may be searched, and how many of its jobs may start now.
#[derive(Clone, Copy)]
struct Candidate<'a> {
    lane: &'a Lane,
    window: &'a Window,
    room: usize,
}

impl<'a> Candidate<'a> {
    /// The known due jobs that may start now.
    fn due(self, now: Instant) -> impl Iterator<Item = &'a ScheduledJob> {
        self.window.jobs.iter().filter(move |job| job.scheduled_at <= now).take(self.room)
    }

    /// Whether a search may find further due jobs that may start now.
    fn is_unsure(self, now: Instant, at: Monotonic) -> bool {
        // Behind the head of a line no job may start.
        let has_head = self.room == 1 && is_of_line(self.lane) && !self.window.jobs.is_empty();
        self.window.may_have_more(now, at) && !has_head && self.due(now).count() < self.room
    }
}

/// Rule 3 of staleness: whether the jobs before the first position at which one may be missing do not fill the slots.
fn more_is_needed(lanes: &[Candidate<'_>], slots: usize, now: Instant, at: Monotonic) -> bool {
    let unsure = || lanes.iter().filter(|lane| lane.is_unsure(now, at)).map(|lane| lane.window);
    // After the horizon of a window has passed, the first due job of the lane may be missing.
    if unsure().any(|window| window.end.is_none()) {
        return true;
    }
    let Some(end) = unsure().filter_map(|window| window.end).min() else { return false };
    lanes.iter().flat_map(|lane| lane.due(now)).filter(|job| job.position() <= end).take(slots).count() < slots
}

#[cfg(test)]
mod tests {
    use recruiter_common::{
        ids::WorkerId,
        limits::{GroupSettings, Limit, Rate, Settings, gate_of_line},
        store::KeptCells,
    };

    use super::*;
    use crate::leader::fleet::tests::{available, fleet};

    impl Lanes {
        /// Whether nothing is known of the job's lane.
        pub(crate) fn sleeps(&self, job: &ScheduledJob) -> bool {
            self.sleep(&self.lane_of(job))
        }

        fn sleep(&self, lane: &Lane) -> bool {
            self.asleep.contains(lane)
        }

        /// Whether a window has a job after its end: another job may be missing before it.
        pub(crate) fn has_job_behind_end(&self) -> bool {
            let is_behind = |window: &Window| window.jobs.back().is_some_and(|job| window.end.is_some_and(|end| job.position() > end));
            self.windows.values().any(is_behind)
        }
    }

    const NOW: i64 = 1_000_000;

    fn date(ms: i64) -> Instant {
        Instant::from_timestamp_millis(ms).expect("a date")
    }

    fn lane(class: &str) -> Lane {
        Lane::new("g", class)
    }

    fn job(class: &str, priority: i64, scheduled_at: i64) -> ScheduledJob {
        ScheduledJob { id: JobId::new(), group: "g".into(), class: class.into(), gate: None, priority, scheduled_at: date(scheduled_at) }
    }

    /// A search that has found these jobs, all of one lane, with this job at its end.
    fn found(jobs: &[&ScheduledJob], end: Option<&ScheduledJob>) -> Search {
        let in_lane =
            |lane| Found { jobs: jobs.iter().filter(|job| job.lane() == lane).map(|job| (*job).clone()).collect(), pause_ends_at: None };
        let found = jobs.iter().map(|job| (job.lane(), in_lane(job.lane()))).collect();
        Search { found, end: end.map(ScheduledJob::position), horizon: date(NOW + 2_000), ..Search::default() }
    }

    fn fill(lanes: &mut Lanes, class: &str, mut search: Search) {
        lanes.fill(&[lane(class)], &mut search, Monotonic::now());
    }

    /// Lanes after a full scan that has found these jobs in lane `a`.
    fn scanned(jobs: &[&ScheduledJob], end: Option<&ScheduledJob>) -> Lanes {
        let fleet = fleet(vec![available(&["*"], &["a", "b"], 1)]);
        let mut lanes = Lanes::default();
        lanes.begin_scan([lane("a")], [0], date(NOW + 2_000), |_| false);
        lanes.learn_kinds(fleet.kinds());
        fill(&mut lanes, "a", found(jobs, end));
        lanes.learn_kinds(fleet.kinds());
        lanes
    }

    fn is_stale(lanes: &mut Lanes, now: i64, after: Duration) -> bool {
        lanes.learn_kinds(fleet(vec![available(&["*"], &["a", "b"], 1)]).kinds());
        !lanes.stale(&HashMap::from([(0, 1)]), &Admission::default(), date(now), Monotonic::now() + after).is_empty()
    }

    fn take(lanes: &mut Lanes, job: &ScheduledJob) {
        lanes.remove(&[job.lane()].into(), &[job.id].into());
    }

    #[test]
    fn a_window_is_stale_when_it_may_not_tell_everything() {
        let (first, second) = (job("a", 5, NOW - 10), job("a", 5, NOW - 5));
        let never = Duration::ZERO;
        let mut whole = scanned(&[&first, &second], None);
        assert!(!is_stale(&mut whole, NOW, never));
        take(&mut whole, &first);
        take(&mut whole, &second);
        assert!(!is_stale(&mut whole, NOW, never) && whole.windows.is_empty(), "all was there, and nothing is left");
        let mut part = scanned(&[&first, &second], Some(&second));
        take(&mut part, &first);
        assert!(!is_stale(&mut part, NOW, never), "one is left");
        take(&mut part, &second);
        assert!(is_stale(&mut part, NOW, never), "there are more behind it");
        let mut said = scanned(&[&first], None);
        said.mark_stale(lane("a"));
        assert!(is_stale(&mut said, NOW, never));
        let mut other = scanned(&[], None);
        assert!(other.windows.is_empty(), "an empty lane needs no window");
        other.mark_stale(lane("b"));
        assert!(is_stale(&mut other, NOW, never));
    }

    #[test]
    fn a_lane_is_not_searched_while_others_of_the_same_workers_have_enough_before_its_end() {
        let mut lanes = scanned(&[], None);
        lanes.begin_scan([lane("a"), lane("b")], [0], date(NOW + 2_000), |_| false);
        let (first, second, end) = (job("b", 5, NOW - 10), job("b", 5, NOW - 7), job("b", 5, NOW - 5));
        fill(&mut lanes, "a", found(&[], Some(&end)));
        fill(&mut lanes, "b", found(&[&first, &second, &end], Some(&end)));
        lanes.learn_kinds(fleet(vec![available(&["*"], &["a", "b"], 1)]).kinds());
        let stale = |lanes: &Lanes, slots: usize| {
            lanes
                .stale(&HashMap::from([(0, slots)]), &Admission::default(), date(NOW), Monotonic::now())
                .iter()
                .flat_map(|(_, lanes)| lanes)
                .count()
        };
        assert_eq!((stale(&lanes, 3), stale(&lanes, 4)), (0, 2));
        take(&mut lanes, &first);
        assert_eq!((stale(&lanes, 2), stale(&lanes, 3)), (0, 2));
        let behind = job("b", 5, NOW - 1);
        fill(&mut lanes, "b", found(&[&second, &end, &behind], Some(&behind)));
        assert_eq!((stale(&lanes, 2), stale(&lanes, 3)), (0, 2), "between them the other lane may have one");
    }

    #[test]
    fn a_scan_in_steps_keeps_what_it_has_not_reached_yet() {
        let job = job("a", 5, NOW);
        let mut lanes = scanned(&[&job], None);
        lanes.begin_scan([lane("b")], [0], date(NOW + 3_000), |lane| lane.class == "a");
        assert_eq!(lanes.waiting().map(|waiting| waiting.jobs.len()).sum::<usize>(), 1);
        assert!(lanes.windows[&lane("b")].is_stale && !lanes.windows[&lane("a")].is_stale);
        lanes.mark_stale(lane("a"));
        assert!(lanes.windows[&lane("a")].is_stale, "once it is listed");
        lanes.begin_scan([lane("b")], [0], date(NOW + 3_000), |_| false);
        assert!(!lanes.windows.contains_key(&lane("a")));
    }

    #[test]
    fn a_scan_shows_which_jobs_nobody_has_announced() {
        let (known, last) = (job("a", 5, NOW - 10), job("a", 5, NOW - 5));
        let (between, behind, urgent, elsewhere) = (job("a", 5, NOW - 7), job("a", 5, NOW - 1), job("a", 9, NOW), job("b", 5, NOW - 1));
        let fleet = fleet(vec![available(&["*"], &["a", "b"], 1)]);
        let missed = |mut lanes: Lanes, job: &ScheduledJob| {
            lanes.end_scan();
            lanes.begin_scan([lane("a"), lane("b")], [0], date(NOW + 2_000), |_| false);
            let missed = lanes.had_missed(job, fleet.kinds());
            lanes.forget_before();
            assert!(!lanes.had_missed(job, fleet.kinds()), "only during the scan");
            missed
        };
        let whole = || scanned(&[&known, &last], None);
        assert!([&between, &behind, &urgent, &elsewhere].into_iter().all(|job| missed(whole(), job)));
        assert!(!missed(whole(), &known), "it was known");
        assert!(!missed(whole(), &job("b", 5, NOW + 2_001)), "the last scan did not look so far ahead");
        assert!(!missed(whole(), &job("c", 5, NOW)), "no worker takes it");
        let part = || scanned(&[&known, &last], Some(&last));
        assert!(missed(part(), &between) && missed(part(), &urgent));
        assert!(!missed(part(), &behind) && !missed(part(), &last), "it may have been behind the end");
        let mut announced = whole();
        announced.announce([between.clone()]);
        assert!(!missed(announced, &between));
        let mut stale = whole();
        stale.mark_stale(lane("a"));
        stale.mark_stale(lane("b"));
        assert!(!missed(stale.clone(), &between) && !missed(stale, &elsewhere), "an event concerned the lane");
        let mut forgotten = whole();
        forgotten.forget_scan();
        assert!(!missed(forgotten, &between) && !missed(Lanes::default(), &between), "nothing was known");
    }

    #[test]
    fn the_lane_of_a_line_is_searched_again_when_its_head_has_ended() {
        let line = |key: &str| Lane { gate: Some(gate_of_line(key)), ..lane("a") };
        let mut lanes = Lanes::default();
        let is_stale = |lanes: &Lanes, key: &str| lanes.windows[&line(key)].is_stale;
        let limited = Lane { gate: Some("printer".into()), ..lane("a") };
        lanes.begin_scan([line("x"), line("y"), limited.clone()], [0], date(NOW + 2_000), |_| false);
        let searched = |lanes: &mut Lanes| lanes.windows.values_mut().for_each(|window| window.is_stale = false);
        searched(&mut lanes);
        lanes.mark_lines_stale(&HashSet::from([gate_of_line("x").as_str(), "printer"]));
        assert!(is_stale(&lanes, "x") && !is_stale(&lanes, "y"));
        assert!(!lanes.windows[&limited].is_stale, "a free permit changes nothing about which jobs are due");
        searched(&mut lanes);
        lanes.mark_every_line_stale();
        assert!(is_stale(&lanes, "x") && is_stale(&lanes, "y"));
        // A search has found the head of `x` in another class, and nothing in `y`.
        for (key, is_behind) in [("x", true), ("y", false)] {
            lanes.fill(&[line(key)], &mut Search { is_behind, ..found(&[], None) }, Monotonic::now());
        }
        assert!(!is_stale(&lanes, "x") && !lanes.windows.contains_key(&line("y")));
        let mut scanned = lanes.clone();
        scanned.end_scan();
        scanned.begin_scan([line("x")], [0], date(NOW + 2_000), |_| false);
        let behind = ScheduledJob { gate: Some(gate_of_line("x")), ..job("a", 5, NOW) };
        assert!(!scanned.had_missed(&behind, fleet(vec![available(&["*"], &["a"], 1)]).kinds()), "another one was the head");
        lanes.mark_lines_stale(&HashSet::from([gate_of_line("x").as_str()]));
        assert!(is_stale(&lanes, "x"));
    }

    #[test]
    fn the_lanes_of_a_group_that_ages_are_divided_by_priority() {
        let mut lanes = Lanes::default();
        assert!(lanes.set_ageing(["g".to_owned()].into()) && !lanes.set_ageing(["g".to_owned()].into()));
        let part = |priority| Lane { priority: Some(priority), ..lane("a") };
        assert_eq!(lanes.lane_of(&job("a", 7, NOW)), part(7));
        lanes.begin_scan([lane("a"), Lane::new("other", "a")], [0], date(NOW + 2_000), |_| false);
        assert_eq!(lanes.windows.len(), 11);
        lanes.windows.clear();
        lanes.announce([job("a", 7, NOW)]);
        lanes.mark_stale(lane("a"));
        assert!(lanes.windows.len() == 10 && lanes.windows[&part(7)].jobs.len() == 1);
        assert!(lanes.set_ageing(BTreeSet::new()) && lanes.windows.is_empty() && lanes.scan.is_none());
        let line = Lane { gate: Some(gate_of_line("x")), ..lane("a") };
        assert_eq!(lanes.parts(line.clone()), [line]);
    }

    #[test]
    fn a_job_that_is_due_later_is_waited_for() {
        let later = job("a", 5, NOW + 500);
        let mut lanes = scanned(&[&later], None);
        assert!(!is_stale(&mut lanes, NOW, Duration::ZERO));
        let free = HashMap::from([(0, 1)]);
        assert_eq!(lanes.next_round(&free, &Admission::default(), date(NOW)), (Some(date(NOW + 500)), None));
        assert_eq!(lanes.next_round(&HashMap::new(), &Admission::default(), date(NOW)), (None, None), "no worker could take it");
        assert!(!is_stale(&mut lanes, NOW + 1_500, Duration::ZERO), "it is due, and nothing else can be");
        take(&mut lanes, &later);
        assert!(lanes.needs_scan(date(NOW + 2_001)) && !lanes.needs_scan(date(NOW + 2_000)), "the horizon");
    }

    #[test]
    fn jobs_that_are_left_alone_do_not_hide_others_for_long() {
        let last = job("a", 5, NOW - 5);
        let mut lanes = scanned(&[], Some(&last));
        fill(&mut lanes, "a", Search { is_fruitless: true, ..found(&[], Some(&last)) });
        assert!(!is_stale(&mut lanes, NOW, Duration::ZERO), "the same search would find the same");
        assert!(is_stale(&mut lanes, NOW, FRUITLESS_FOR));
        assert!(lanes.next_round(&HashMap::from([(0, 1)]), &Admission::default(), date(NOW)).1.is_some());
        let at = Monotonic::now();
        let mut again = found(&[&last], None);
        again.found.get_mut(&lane("a")).unwrap().pause_ends_at = Some(at + Duration::from_secs(60));
        fill(&mut lanes, "a", again);
        assert!(!is_stale(&mut lanes, NOW, Duration::from_secs(59)));
        assert!(is_stale(&mut lanes, NOW, Duration::from_secs(61)));
    }

    #[test]
    fn what_is_announced_is_known_once_and_only_where_nothing_can_be_missing_before_it() {
        let (first, last, behind) = (job("a", 5, NOW - 10), job("a", 5, NOW - 5), job("a", 4, NOW - 20));
        let mut lanes = scanned(&[&last], Some(&last));
        lanes.announce([&first, &first, &behind].map(ScheduledJob::clone));
        let known: Vec<JobId> = lanes.waiting().flat_map(|waiting| waiting.jobs).map(|job| job.id).collect();
        assert_eq!(known, [first.id, last.id], "behind the end others may come first");
        let elsewhere = job("b", 5, NOW);
        lanes.announce([elsewhere]);
        assert!(!is_stale(&mut lanes, NOW, Duration::ZERO), "the scan found nothing there");
        lanes.forget_scan();
        lanes.announce([job("c", 5, NOW)]);
        assert!(lanes.windows[&lane("c")].is_stale, "nothing is known there");
        lanes.announce((0..REMEMBERED + 10).map(|number| job(&format!("class-{number}"), 5, NOW)));
        assert!(lanes.windows.len() <= REMEMBERED, "a scan finds what does not fit");
    }

    #[test]
    fn a_new_kind_of_worker_is_scanned_for() {
        let mut lanes = scanned(&[], None);
        assert_eq!(lanes.unscanned([0, 1].into_iter()), [1]);
        lanes.scanned_for([1]);
        assert!(lanes.unscanned([0, 1].into_iter()).is_empty());
        lanes.forget();
        assert_eq!(lanes.unscanned([0].into_iter()), [0]);
    }

    #[test]
    fn lanes_are_searched_together_that_the_same_workers_take() {
        let both = fleet(vec![available(&["*"], &["a", "b"], 1), available(&["*"], &["b"], 1)]);
        let mut lanes = Lanes::default();
        lanes.begin_scan([lane("a"), lane("b"), lane("c")], [0, 1], date(NOW), |_| false);
        lanes.learn_kinds(both.kinds());
        let stale = |free: &[KindId]| {
            let free = free.iter().map(|kind| (*kind, 1)).collect();
            let mut stale: Vec<_> = lanes.stale(&free, &Admission::default(), date(NOW), Monotonic::now()).into_iter().collect();
            stale.sort();
            stale
        };
        assert_eq!(stale(&[0, 1]), [(vec![0], vec![lane("a")]), (vec![0, 1], vec![lane("b")])]);
        assert_eq!(stale(&[1]), [(vec![1], vec![lane("b")])]);
    }

    /// Lanes of one group and class with these gates, of which two may be awake.
    fn crowded(gates: &[&str]) -> (Lanes, Vec<Lane>) {
        let all: Vec<Lane> = gates.iter().map(|gate| Lane { gate: Some(gate_of_line(gate)), ..lane("a") }).collect();
        let mut lanes = Lanes { crowd: 2, ..Lanes::default() };
        lanes.begin_scan(all.iter().cloned(), [0], date(NOW + 2_000), |_| false);
        (lanes, all)
    }

    /// Returns the gates of the lanes that have windows then.
    fn wake(lanes: &mut Lanes) -> Vec<String> {
        let fleet = fleet(vec![available(&["*"], &["a"], 1)]);
        let are_left = lanes.wake(&HashMap::from([(0, 1)]), fleet.kinds(), &Admission::default(), date(NOW), Monotonic::now());
        assert!(!are_left);
        let mut awake: Vec<String> = lanes.windows.keys().map(|lane| lane.gate.clone().unwrap_or_default()).collect();
        awake.sort();
        awake
    }

    /// A search has found this job in its lane.
    fn searched(lanes: &mut Lanes, lane: &Lane, scheduled_at: i64) {
        let job = ScheduledJob { gate: lane.gate.clone(), ..job("a", 5, scheduled_at) };
        let jobs = Found { jobs: [job.clone()].into(), pause_ends_at: None };
        let mut search = Search { found: [(lane.clone(), jobs)].into(), end: Some(job.position()), ..found(&[], None) };
        lanes.fill(std::slice::from_ref(lane), &mut search, Monotonic::now());
    }

    #[test]
    fn very_many_lanes_with_a_gate_take_turns() {
        let (mut lanes, all) = crowded(&["v", "w", "x", "y", "z"]);
        assert!(lanes.windows.is_empty());
        assert_eq!(wake(&mut lanes), [">v", ">w"]);
        assert!(lanes.windows.values().all(|window| window.is_stale && window.able == [0]));
        assert_eq!(wake(&mut lanes), [">v", ">w"], "two are ready");
        searched(&mut lanes, &all[0], NOW - 1);
        searched(&mut lanes, &all[1], NOW - 2);
        assert_eq!(wake(&mut lanes), [">v", ">w"]);
        // In a scan the most urgent known one stays awake, and another one has its turn.
        lanes.begin_scan(all.iter().cloned(), [0], date(NOW + 2_000), |_| false);
        assert_eq!(wake(&mut lanes), [">w", ">x"]);
        // What is due later fills no place.
        searched(&mut lanes, &all[1], NOW + 1_000);
        assert_eq!(wake(&mut lanes), [">w", ">x", ">y"]);
        lanes.mark_stale(lane("b"));
        assert_eq!(wake(&mut lanes), ["", ">w", ">x", ">y"], "a lane without a gate neither sleeps nor counts");
        lanes.begin_scan(all[..2].iter().cloned(), [0], date(NOW + 2_000), |_| false);
        assert_eq!(lanes.windows.len(), 2, "there are few, each of which counts once");
    }

    #[test]
    fn lanes_of_other_workers_and_groups_with_weights_do_not_keep_others_asleep() {
        let of = |group: &str, class: &str, gate: &str| Lane { gate: Some(gate_of_line(gate)), ..Lane::new(group, class) };
        let all = ["1", "2", "3"].map(|gate| [of("g", "a", gate), of("h", "a", gate), of("g", "b", gate)]).concat();
        let fleet = fleet(vec![available(&["*"], &["a"], 1), available(&["*"], &["b"], 1)]);
        let awake = |weights: &[(&str, f64)]| {
            let groups = weights
                .iter()
                .map(|(group, weight)| ((*group).to_owned(), GroupSettings { weight: Some(*weight), ..GroupSettings::default() }));
            let settings = Settings { groups: groups.collect(), ..Settings::default() };
            let admission = Admission::begin(settings, &[], KeptCells::default(), date(NOW));
            let mut lanes = Lanes { crowd: 1, ..Lanes::default() };
            lanes.begin_scan(all.iter().cloned(), [0, 1], date(NOW + 2_000), |_| false);
            lanes.wake(&HashMap::from([(0, 1), (1, 1)]), fleet.kinds(), &admission, date(NOW), Monotonic::now());
            let mut awake: Vec<(String, String)> = lanes.windows.keys().map(|lane| (lane.group.clone(), lane.class.clone())).collect();
            awake.sort();
            awake
        };
        let pair = |group: &str, class: &str| (group.to_owned(), class.to_owned());
        assert_eq!(awake(&[]), [pair("g", "a"), pair("g", "b")]);
        assert_eq!(awake(&[("g", 2.0)]), [pair("g", "a"), pair("g", "b"), pair("h", "a")]);
    }

    #[test]
    fn an_event_in_a_sleeping_lane_wakes_it_and_does_not_make_it_known() {
        let (lanes, all) = crowded(&["v", "w", "x"]);
        let announced = ScheduledJob { gate: all[0].gate.clone(), ..job("a", 5, NOW) };
        let limited = ScheduledJob { gate: Some("printer".into()), ..announced.clone() };
        let mut announcing = lanes.clone();
        announcing.asleep.insert(limited.lane());
        assert!(announcing.announce([announced.clone(), limited.clone()]), "a line must be searched");
        for lane in [&all[0], &limited.lane()] {
            assert!(announcing.windows[lane].is_stale && !announcing.sleep(lane), "others may come first");
        }
        let mut marked = lanes.clone();
        marked.mark_stale(all[0].clone());
        assert!(marked.windows[&all[0]].is_stale && !marked.sleep(&all[0]));
        // From four times as many windows on, these lanes sleep as well.
        let mut full = lanes;
        (0..8).for_each(|class| full.mark_stale(lane(&class.to_string())));
        assert!(full.announce([announced, limited.clone()]));
        full.mark_stale(all[0].clone());
        assert!(full.windows.len() == 8 && full.sleep(&all[0]) && full.sleep(&limited.lane()));
        // A list wakes fewer.
        full.windows.retain(|lane, _| ["0", "1"].contains(&lane.class.as_str()));
        full.list(all[0].clone());
        assert!(full.sleep(&all[0]));
        full.windows.clear();
        full.list(all[0].clone());
        assert!(!full.sleep(&all[0]) && full.windows[&all[0]].is_stale);
    }

    #[test]
    fn a_job_of_a_sleeping_lane_was_not_missed() {
        let (mut lanes, all) = crowded(&["x", "y", "z"]);
        let sleeping = all[0].clone();
        let fleet = fleet(vec![available(&["*"], &["a"], 1)]);
        let found = |gate: Option<String>| ScheduledJob { gate, ..job("a", 5, NOW) };
        lanes.end_scan();
        lanes.begin_scan(all, [0], date(NOW + 2_000), |_| false);
        assert!(!lanes.had_missed(&found(sleeping.gate), fleet.kinds()) && lanes.had_missed(&found(Some(">new".into())), fleet.kinds()));
    }

    #[test]
    fn sleeping_lanes_that_may_not_start_a_job_are_passed_over_and_their_dates_are_known() {
        let limit = |rate| Limit { capacity: None, rate };
        let rate = Rate::new(1, Duration::from_secs(60), 1).unwrap();
        let settings = Settings { limits: [("slow".into(), limit(Some(rate)))].into(), ..Settings::default() };
        let mut admission = Admission::begin(settings, &[], KeptCells::default(), date(NOW));
        let slow = Lane { gate: Some("slow".into()), ..lane("a") };
        let taken = ScheduledJob { gate: slow.gate.clone(), ..job("a", 5, NOW) };
        admission.admit(WorkerId::new(), &slow, &taken, date(NOW)).unwrap();
        let fleet = fleet(vec![available(&["*"], &["a"], 1)]);
        let mut lanes = Lanes { crowd: 0, ..Lanes::default() };
        let undefined = Lane { gate: Some("undefined".into()), ..lane("a") };
        let line = Lane { gate: Some(gate_of_line("x")), ..lane("a") };
        let other = Lane { gate: Some(gate_of_line("x")), ..lane("nobody") };
        lanes.begin_scan([&slow, &undefined, &line, &other].map(Clone::clone), [0], date(NOW + 2_000), |_| false);
        let free = HashMap::from([(0, 1)]);
        let wake = |lanes: &mut Lanes, now| lanes.wake(&free, fleet.kinds(), &admission, now, Monotonic::now());
        assert!(lanes.windows.is_empty() && !wake(&mut lanes, date(NOW)));
        assert_eq!(lanes.windows.keys().collect::<Vec<_>>(), [&line], "it alone may start, and a worker takes it");
        lanes.windows.clear();
        assert!(!wake(&mut lanes, date(NOW)) && lanes.windows.is_empty());
        let opens_at = admission.opens_at(&slow, date(NOW)).unwrap();
        assert_eq!(lanes.next_round(&free, &admission, date(NOW)).0, Some(opens_at));
        wake(&mut lanes, opens_at);
        assert_eq!(lanes.windows.keys().collect::<Vec<_>>(), [&slow]);
    }
}
