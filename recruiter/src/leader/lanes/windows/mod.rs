//! The cache of due jobs: one window per lane, and the rules that make a window stale.
//!
//! **A window** holds the first jobs of its lane. A search fills it with every job of the lane that is due at its `horizon` and is not
//! after its `end`. Jobs that are in flight or paused are left out. A job leaves the window when it is assigned, and enters it when it is
//! announced. A window is *stale*, and is filled again before the next plan, when
//!
//! 1. an event concerns the lane but is not in the window: a hint without the job itself, or an assignment whose jobs were not all started;
//! 2. the pause of a refused job is over;
//! 3. it may be incomplete (it has an end, or its horizon has passed) and has fewer due jobs than its lane has room for, and the known due
//!    jobs of all lanes of the same workers, up to the first such end, are fewer than these workers accept. Jobs of a full lane wait for the
//!    permits of others and fill no slots: one known job is enough there. After a fruitless search this rule does not apply for 100 ms. The
//!    window of a line has its head only, and is complete while it has one. While the head is in another lane, the window is empty and
//!    complete, and stays: the end of the head is rule 1.
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
mod scan;
mod stale;
mod wake;
mod window;

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::JobId,
    instant::Instant,
    store::{Lane, ScheduledJob},
};

use self::{
    asleep::Asleep,
    scan::{Before, Scan},
    window::Window,
};
pub(crate) use self::{
    stale::StaleLanes,
    window::{KnownJobs, Search, is_of_line},
};
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

/// All windows, and the last full scan.
#[derive(Clone, Debug)]
pub(crate) struct Windows {
    windows: HashMap<Lane, Window>,
    asleep: Asleep,
    /// When the first of the sleeping lanes that were looked at last may start a job.
    asleep_until: Option<Instant>,
    /// The lanes that this round has woken to fill slots, if others sleep.
    woken: Vec<Lane>,
    /// The number of rounds, the last ones, that have woken lanes without jobs.
    woken_in_vain: u32,
    /// [`CROWD`], or less in a model.
    pub(crate) crowd: usize,
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

impl Default for Windows {
    fn default() -> Self {
        Self {
            windows: HashMap::new(),
            asleep: Asleep::default(),
            asleep_until: None,
            woken: Vec::new(),
            woken_in_vain: 0,
            crowd: CROWD,
            scan: None,
            ended: None,
            before: None,
            ageing: BTreeSet::new(),
            recent: Default::default(),
        }
    }
}

impl Windows {
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

    /// Every lane with known jobs.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = KnownJobs<'_>> {
        let with_jobs = self.windows.iter().filter(|(_, window)| !window.jobs.is_empty());
        with_jobs.map(|(lane, window)| KnownJobs { lane, jobs: &window.jobs, able: &window.able })
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

    /// Removes assigned jobs. Returns the groups of these lanes, and how many jobs were removed.
    pub(crate) fn remove<'a>(&mut self, lanes: impl Iterator<Item = &'a Lane>, jobs: &HashSet<JobId>) -> Vec<(String, usize)> {
        let (horizon, mut removed) = (self.horizon(), Vec::new());
        for lane in lanes {
            if let Some(window) = self.windows.get_mut(lane) {
                let before = window.jobs.len();
                window.jobs.retain(|job| !jobs.contains(&job.id));
                removed.push((lane.group.clone(), before - window.jobs.len()));
                if window.is_redundant(horizon) {
                    self.windows.remove(lane);
                }
            }
        }
        removed
    }

    /// Updates which kinds of workers take each lane.
    pub(crate) fn learn_kinds(&mut self, kinds: &[Kind]) {
        for (lane, window) in &mut self.windows {
            window.learn_kinds(lane, kinds);
        }
    }

    /// The horizon of the last full scan.
    fn horizon(&self) -> Instant {
        self.scan.as_ref().map_or(Instant::MIN_UTC, |scan| scan.horizon)
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

#[cfg(test)]
pub(super) mod tests {
    use recruiter_common::{
        ids::WorkerId,
        limits::{Limit, Settings},
        store::{KeptCells, gate_of_line},
    };

    use super::{window::Found, *};
    use crate::leader::fleet::tests::{available, fleet};

    impl Windows {
        /// Whether nothing is known of the job's lane: it sleeps, or an announcement has woken it and it was not searched yet.
        pub(crate) fn sleeps(&self, job: &ScheduledJob) -> bool {
            let lane = self.lane_of(job);
            let is_woken = |window: &Window| window.is_stale && lane.gate.is_some() && self.crowd < usize::MAX;
            self.sleep(&lane) || self.windows.get(&lane).is_some_and(is_woken)
        }

        /// Whether as many lanes are ready as may be, so that no other wakes.
        pub(crate) fn is_crowded(&self, now: Instant) -> bool {
            let is_due = |window: &Window| window.jobs.front().is_some_and(|job| job.scheduled_at <= now);
            let ready = self.windows.iter().filter(|(lane, window)| lane.gate.is_some() && is_due(window)).count();
            ready >= self.crowd.saturating_mul(4).max(1)
        }

        pub(super) fn sleep(&self, lane: &Lane) -> bool {
            self.asleep.contains(lane)
        }

        /// Whether a window has a job after its end: another job may be missing before it.
        pub(crate) fn has_job_behind_end(&self) -> bool {
            let is_behind = |window: &Window| window.jobs.back().is_some_and(|job| window.end.is_some_and(|end| job.position() > end));
            self.windows.values().any(is_behind)
        }
    }

    pub(super) const NOW: i64 = 1_000_000;

    pub(super) fn date(ms: i64) -> Instant {
        Instant::from_timestamp_millis(ms).expect("a date")
    }

    pub(super) fn lane(class: &str) -> Lane {
        Lane::new("g", class)
    }

    pub(super) fn job(class: &str, priority: i64, scheduled_at: i64) -> ScheduledJob {
        ScheduledJob { id: JobId::new(), group: "g".into(), class: class.into(), gate: None, priority, scheduled_at: date(scheduled_at) }
    }

    /// A search that has found these jobs, all of one lane, with this job at its end.
    pub(super) fn found(jobs: &[&ScheduledJob], end: Option<&ScheduledJob>) -> Search {
        let in_lane =
            |lane| Found { jobs: jobs.iter().filter(|job| job.lane() == lane).map(|job| (*job).clone()).collect(), pause_ends_at: None };
        let found = jobs.iter().map(|job| (job.lane(), in_lane(job.lane()))).collect();
        Search { found, end: end.map(ScheduledJob::position), horizon: date(NOW + 2_000), ..Search::default() }
    }

    fn fill(lanes: &mut Windows, class: &str, mut search: Search) {
        lanes.fill(&[lane(class)], &mut search, Monotonic::now());
    }

    /// Windows after a full scan that has found these jobs in lane `a`.
    fn scanned(jobs: &[&ScheduledJob], end: Option<&ScheduledJob>) -> Windows {
        let fleet = fleet(vec![available(&["*"], &["a", "b"], 1)]);
        let mut lanes = Windows::default();
        lanes.begin_scan([lane("a")], [0], date(NOW + 2_000), |_| false);
        lanes.learn_kinds(fleet.kinds());
        fill(&mut lanes, "a", found(jobs, end));
        lanes.learn_kinds(fleet.kinds());
        lanes
    }

    fn is_stale(lanes: &mut Windows, now: i64, after: Duration) -> bool {
        lanes.learn_kinds(fleet(vec![available(&["*"], &["a", "b"], 1)]).kinds());
        !lanes.stale(&HashMap::from([(0, 1)]), &Admission::default(), date(now), Monotonic::now() + after).is_empty()
    }

    fn take(lanes: &mut Windows, job: &ScheduledJob) {
        lanes.remove([&job.lane()].into_iter(), &[job.id].into());
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
        let stale = |lanes: &Windows, slots: usize| {
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
    fn a_full_lane_is_searched_again_when_no_due_job_of_it_is_known() {
        let full = Lane { gate: Some("printer".into()), ..lane("a") };
        let job = ScheduledJob { gate: full.gate.clone(), ..job("a", 5, NOW - 1) };
        let settings = Settings { limits: [("printer".into(), Limit::capacity(1))].into(), ..Settings::default() };
        let mut admission = Admission::begin(settings, &[], KeptCells::default(), date(NOW));
        admission.admit(WorkerId::new(), &full, &job, date(NOW)).unwrap();
        let mut lanes = Windows::default();
        lanes.begin_scan([full.clone()], [0], date(NOW + 2_000), |_| false);
        lanes.learn_kinds(fleet(vec![available(&["*"], &["a"], 1)]).kinds());
        let mut is_stale = |known: &[&ScheduledJob]| {
            lanes.fill(std::slice::from_ref(&full), &mut found(known, Some(&job)), Monotonic::now());
            !lanes.stale(&HashMap::from([(0, 4)]), &admission, date(NOW), Monotonic::now()).is_empty()
        };
        assert_eq!((admission.room(&full, date(NOW)), is_stale(&[&job]), is_stale(&[])), (4, false, true));
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
    fn a_scan_shows_which_jobs_were_not_announced() {
        let (known, last) = (job("a", 5, NOW - 10), job("a", 5, NOW - 5));
        let (between, behind, urgent, elsewhere) = (job("a", 5, NOW - 7), job("a", 5, NOW - 1), job("a", 9, NOW), job("b", 5, NOW - 1));
        let fleet = fleet(vec![available(&["*"], &["a", "b"], 1)]);
        let missed = |mut lanes: Windows, job: &ScheduledJob| {
            lanes.request_audit();
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
        forgotten.request_scan();
        assert!(!missed(forgotten, &between) && !missed(Windows::default(), &between), "nothing was known");
    }

    #[test]
    fn the_lane_of_a_line_is_searched_again_when_its_head_has_ended() {
        let line = |key: &str| Lane { gate: Some(gate_of_line(key)), ..lane("a") };
        let mut lanes = Windows::default();
        let is_stale = |lanes: &Windows, key: &str| lanes.windows[&line(key)].is_stale;
        let limited = Lane { gate: Some("printer".into()), ..lane("a") };
        lanes.begin_scan([line("x"), line("y"), limited.clone()], [0], date(NOW + 2_000), |_| false);
        let searched = |lanes: &mut Windows| lanes.windows.values_mut().for_each(|window| window.is_stale = false);
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
        scanned.request_audit();
        scanned.begin_scan([line("x")], [0], date(NOW + 2_000), |_| false);
        let behind = ScheduledJob { gate: Some(gate_of_line("x")), ..job("a", 5, NOW) };
        assert!(!scanned.had_missed(&behind, fleet(vec![available(&["*"], &["a"], 1)]).kinds()), "another one was the head");
        lanes.mark_lines_stale(&HashSet::from([gate_of_line("x").as_str()]));
        assert!(is_stale(&lanes, "x"));
    }

    #[test]
    fn the_lanes_of_a_group_that_ages_are_divided_by_priority() {
        let mut lanes = Windows::default();
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
        lanes.request_scan();
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
        let mut lanes = Windows::default();
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
}
