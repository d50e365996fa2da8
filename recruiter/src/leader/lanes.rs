//! The cache of due jobs: one window per lane, and the rules that make a window stale.
//!
//! **A window** holds the first due jobs of its lane. When it was filled, it held every job of the lane that comes before its `end` and is due
//! at its horizon (`until`). A job leaves the window when it is assigned and enters it when it is announced. A window is *stale*, and is
//! filled again before the next plan, when
//!
//! 1. an event concerns the lane but is not in the window: a hint that does not carry the job, or an assignment that came to nothing;
//! 2. the pause of a refused job is over;
//! 3. more jobs may be due after its end or after its horizon, and the known jobs before that point, in all lanes of the same workers, do not
//!    fill the free slots.
//!
//! **A lane without a window** was empty up to the horizon of the last full scan, for the kinds of workers that the scan was made for. A full
//! scan drops all windows and lists all lanes that have jobs.
//!
//! Safety does not depend on this cache. The start of a job that is gone fails, and a job that is missing here is found by the next full scan.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::JobId,
    instant::Instant,
    store::{Lane, Position, ScheduledJob},
};

use super::fleet::{Kind, KindId};

/// Limit of jobs in all windows: more than the slots of a large fleet.
const REMEMBERED: usize = 100_000;
/// Pause after a search whose full answer held only jobs that cannot be assigned now.
const FRUITLESS_FOR: Duration = Duration::from_millis(100);

/// The first jobs of one lane.
#[derive(Clone, Debug)]
struct Window {
    /// Sorted by position.
    jobs: VecDeque<ScheduledJob>,
    /// Up to this position no job is missing. `None`: no job is missing.
    end: Option<Position>,
    /// The horizon: jobs that are due later were not searched.
    until: Instant,
    is_stale: bool,
    /// When the first pause of a refused job is over.
    retry_at: Option<Monotonic>,
    /// Until then another search would find nothing new.
    fruitless_until: Option<Monotonic>,
    /// The due date of a known job after the horizon.
    next: Option<Instant>,
    /// The kinds of workers that take the lane, among the first `known_kinds` kinds.
    able: Vec<KindId>,
    known_kinds: usize,
}

/// The part of a search's answer that belongs to one lane.
#[derive(Clone, Debug, Default)]
pub(crate) struct Found {
    /// Jobs that can be assigned once they are due, sorted by position.
    pub(crate) jobs: VecDeque<ScheduledJob>,
    /// When the first pause of a refused job is over.
    pub(crate) retry_at: Option<Monotonic>,
}

/// The answer to one query over some lanes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Search {
    /// By lane. Lanes without jobs are absent.
    pub(crate) found: HashMap<Lane, Found>,
    /// The query found every job up to this position. `None`: it found every job.
    pub(crate) end: Option<Position>,
    /// The horizon of the query.
    pub(crate) until: Instant,
    /// The due date of a known job after the horizon.
    pub(crate) next: Option<Instant>,
    /// Whether the same query would again find too few jobs that can be assigned now.
    pub(crate) is_fruitless: bool,
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
    fn stale(until: Instant) -> Self {
        Self {
            jobs: VecDeque::new(),
            end: None,
            until,
            is_stale: true,
            retry_at: None,
            fruitless_until: None,
            next: None,
            able: Vec::new(),
            known_kinds: 0,
        }
    }

    /// Rules 1 and 2 of staleness.
    fn is_stale(&self, at: Monotonic) -> bool {
        self.is_stale || self.retry_at.is_some_and(|again| again <= at)
    }

    /// Whether a search may find due jobs that are not in the window.
    fn may_have_more(&self, now: Instant, at: Monotonic) -> bool {
        (self.end.is_some() || self.until <= now) && self.fruitless_until.is_none_or(|until| until <= at)
    }

    /// Whether the window holds no more information than its absence.
    fn says_nothing(&self, scanned_until: Instant) -> bool {
        self.jobs.is_empty() && self.end.is_none() && !self.is_stale && self.retry_at.is_none() && self.until >= scanned_until
    }

    fn learn_kinds(&mut self, lane: &Lane, kinds: &[Kind]) {
        self.able.extend((self.known_kinds..kinds.len()).filter(|kind| kinds[*kind].takes(lane)));
        self.known_kinds = kinds.len();
    }
}

/// The last full scan.
#[derive(Clone, Debug)]
struct Scan {
    kinds: HashSet<KindId>,
    until: Instant,
}

/// All windows, and the last full scan.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lanes {
    windows: HashMap<Lane, Window>,
    scan: Option<Scan>,
}

/// The known jobs of a lane and the kinds of workers that take it.
pub(crate) struct Waiting<'a> {
    pub(crate) lane: &'a Lane,
    pub(crate) jobs: &'a VecDeque<ScheduledJob>,
    pub(crate) able: &'a [KindId],
}

impl Lanes {
    /// Drops everything. The next round begins with a full scan.
    pub(crate) fn forget(&mut self) {
        *self = Self::default();
    }

    /// Requests a full scan. Announced jobs stay known until then.
    pub(crate) fn forget_scan(&mut self) {
        self.scan = None;
    }

    /// Whether a full scan is due.
    pub(crate) fn needs_scan(&self, now: Instant) -> bool {
        self.scan.as_ref().is_none_or(|scan| scan.until < now)
    }

    /// The kinds among these that the last full scan did not cover.
    pub(crate) fn unscanned(&self, kinds: impl Iterator<Item = KindId>) -> Vec<KindId> {
        kinds.filter(|kind| self.scan.as_ref().is_none_or(|scan| !scan.kinds.contains(kind))).collect()
    }

    /// Begins a full scan with these lanes: all that have jobs which are due at `until` and which these kinds of workers take. Only lanes
    /// that will be listed later keep their windows until then.
    pub(crate) fn begin_scan(
        &mut self,
        lanes: impl IntoIterator<Item = Lane>,
        kinds: impl IntoIterator<Item = KindId>,
        until: Instant,
        will_be_listed: impl Fn(&Lane) -> bool,
    ) {
        self.windows.retain(|lane, _| will_be_listed(lane));
        self.windows.extend(lanes.into_iter().map(|lane| (lane, Window::stale(until))));
        self.scan = Some(Scan { kinds: kinds.into_iter().collect(), until });
    }

    /// The lanes of these kinds of workers were listed as well.
    pub(crate) fn scanned_for(&mut self, kinds: impl IntoIterator<Item = KindId>) {
        if let Some(scan) = &mut self.scan {
            scan.kinds.extend(kinds);
        }
    }

    /// Rule 1 of staleness: an event concerns this lane.
    pub(crate) fn mark_stale(&mut self, lane: Lane) {
        let until = self.horizon();
        self.windows.entry(lane).or_insert_with(|| Window::stale(until)).is_stale = true;
    }

    /// Rule 2 of staleness: all pauses are over.
    pub(crate) fn end_pauses(&mut self) {
        self.windows.values_mut().for_each(|window| window.is_stale |= window.retry_at.is_some());
    }

    fn horizon(&self) -> Instant {
        self.scan.as_ref().map_or(Instant::MIN_UTC, |scan| scan.until)
    }

    /// Adds announced jobs. Their inserts need not be visible yet.
    pub(crate) fn announce(&mut self, jobs: impl IntoIterator<Item = ScheduledJob>) {
        let mut known: usize = self.windows.values().map(|window| window.jobs.len()).sum();
        let (until, is_scanned) = (self.horizon(), self.scan.is_some());
        for job in jobs {
            if known >= REMEMBERED && !self.windows.contains_key(&job.lane()) {
                // The next full scan finds it.
                continue;
            }
            let window = self.windows.entry(job.lane()).or_insert_with(|| Window { is_stale: !is_scanned, ..Window::stale(until) });
            if known >= REMEMBERED {
                window.is_stale = true;
            } else if window.end.is_none_or(|end| job.position() < end)
                && let Err(index) = window.jobs.binary_search_by_key(&job.position(), ScheduledJob::position)
            {
                window.jobs.insert(index, job);
                known += 1;
            }
        }
    }

    /// Removes assigned jobs.
    pub(crate) fn remove(&mut self, lanes: &HashSet<Lane>, jobs: &HashSet<JobId>) {
        let until = self.horizon();
        for lane in lanes {
            if let Some(window) = self.windows.get_mut(lane) {
                window.jobs.retain(|job| !jobs.contains(&job.id));
                if window.says_nothing(until) {
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

    /// The stale lanes that workers with free slots take, grouped by the kinds that take them. Lanes of one group are interchangeable: any of
    /// their workers could take a job of any of them, so one query over the group hides no job from a worker.
    pub(crate) fn stale(&self, free: &HashMap<KindId, usize>, now: Instant, at: Monotonic) -> HashMap<Vec<KindId>, Vec<Lane>> {
        let mut alike: HashMap<Vec<KindId>, Vec<(&Lane, &Window)>> = HashMap::new();
        for (lane, window) in &self.windows {
            let able: Vec<KindId> = window.able.iter().copied().filter(|kind| free.contains_key(kind)).collect();
            if !able.is_empty() {
                alike.entry(able).or_default().push((lane, window));
            }
        }
        let mut stale = HashMap::new();
        for (able, lanes) in alike {
            let slots = able.iter().map(|kind| free[kind]).sum();
            let more = more_is_needed(&lanes, slots, now, at);
            let is_stale = |window: &Window| window.is_stale(at) || (more && window.may_have_more(now, at));
            let lanes: Vec<Lane> = lanes.into_iter().filter(|(_, window)| is_stale(window)).map(|(lane, _)| lane.clone()).collect();
            if !lanes.is_empty() {
                stale.insert(able, lanes);
            }
        }
        stale
    }

    /// Replaces the windows of these lanes by the answer of a search.
    pub(crate) fn fill(&mut self, lanes: &[Lane], search: &mut Search, at: Monotonic) {
        let scanned_until = self.horizon();
        for lane in lanes {
            let Some(window) = self.windows.get_mut(lane) else { continue };
            let found = search.found.remove(lane).unwrap_or_default();
            (window.jobs, window.retry_at) = (found.jobs, found.retry_at);
            (window.end, window.until, window.next) = (search.end, search.until, search.next);
            window.is_stale = false;
            window.fruitless_until = search.is_fruitless.then_some(at + FRUITLESS_FOR);
            if window.says_nothing(scanned_until) {
                self.windows.remove(lane);
            }
        }
    }

    /// Every lane that has jobs.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = Waiting<'_>> {
        let with_jobs = self.windows.iter().filter(|(_, window)| !window.jobs.is_empty());
        with_jobs.map(|(lane, window)| Waiting { lane, jobs: &window.jobs, able: &window.able })
    }

    /// When the next round is due for workers of these kinds: at a date of the server, or at an instant of this process.
    pub(crate) fn next(&self, free: &HashMap<KindId, usize>, now: Instant) -> (Option<Instant>, Option<Monotonic>) {
        let (mut date, mut instant) = (None, None);
        for window in self.windows.values().filter(|window| window.able.iter().any(|kind| free.contains_key(kind))) {
            let later = window.jobs.iter().map(|job| job.scheduled_at).chain(window.next).filter(|at| *at > now).min();
            date = date.into_iter().chain(later).min();
            let fruitless_until = window.fruitless_until.filter(|_| window.end.is_some() || window.until <= now);
            instant = instant.into_iter().chain(window.retry_at).chain(fruitless_until).min();
        }
        (date, instant)
    }
}

/// Rule 3 of staleness: whether the jobs before the first position at which one may be missing do not fill the slots.
fn more_is_needed(lanes: &[(&Lane, &Window)], slots: usize, now: Instant, at: Monotonic) -> bool {
    let unsure = || lanes.iter().filter(|(_, window)| window.may_have_more(now, at));
    // After its horizon a lane may miss its first job.
    if unsure().any(|(_, window)| window.end.is_none()) {
        return true;
    }
    let Some(end) = unsure().filter_map(|(_, window)| window.end).min() else { return false };
    let known = lanes.iter().flat_map(|(_, window)| &window.jobs).filter(|job| job.scheduled_at <= now && job.position() <= end);
    known.take(slots).count() < slots
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leader::fleet::tests::{available, fleet};

    impl Lanes {
        /// Whether a window has a job behind its end, before which another job may be missing.
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

    /// A search that has found these jobs, all of one lane, and nothing missing up to the end.
    fn found(jobs: &[&ScheduledJob], end: Option<&ScheduledJob>) -> Search {
        let in_lane =
            |lane| Found { jobs: jobs.iter().filter(|job| job.lane() == lane).map(|job| (*job).clone()).collect(), retry_at: None };
        let found = jobs.iter().map(|job| (job.lane(), in_lane(job.lane()))).collect();
        Search { found, end: end.map(ScheduledJob::position), until: date(NOW + 2_000), next: None, is_fruitless: false }
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
        !lanes.stale(&HashMap::from([(0, 1)]), date(now), Monotonic::now() + after).is_empty()
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
        let stale =
            |lanes: &Lanes, slots: usize| lanes.stale(&HashMap::from([(0, slots)]), date(NOW), Monotonic::now()).values().flatten().count();
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
    fn a_job_that_is_due_later_is_waited_for() {
        let later = job("a", 5, NOW + 500);
        let mut lanes = scanned(&[&later], None);
        assert!(!is_stale(&mut lanes, NOW, Duration::ZERO));
        let free = HashMap::from([(0, 1)]);
        assert_eq!(lanes.next(&free, date(NOW)), (Some(date(NOW + 500)), None));
        assert_eq!(lanes.next(&HashMap::new(), date(NOW)), (None, None), "nobody could take it");
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
        assert!(lanes.next(&HashMap::from([(0, 1)]), date(NOW)).1.is_some());
        let at = Monotonic::now();
        let mut again = found(&[&last], None);
        again.found.get_mut(&lane("a")).unwrap().retry_at = Some(at + Duration::from_secs(60));
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
            let mut stale: Vec<_> = lanes.stale(&free, date(NOW), Monotonic::now()).into_iter().collect();
            stale.sort();
            stale
        };
        assert_eq!(stale(&[0, 1]), [(vec![0], vec![lane("a")]), (vec![0, 1], vec![lane("b")])]);
        assert_eq!(stale(&[1]), [(vec![1], vec![lane("b")])]);
    }
}
