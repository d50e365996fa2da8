//! Lanes: what is known of the jobs that are due, one window for each range of the index, and the rules of when to look again.
//!
//! **What a window says.** When it was filled, no job of the lane before its end that is due at its horizon was missing. Jobs leave
//! it when they are assigned and join it when they are announced. It is *stale*, and is filled again before the lane is planned
//! for, when
//!
//! 1. something was said of the lane that is not in the window: a hint without the job, a turn that came to nothing;
//! 2. a job that was left alone may be assigned again;
//! 3. more jobs may be due behind its end or after its horizon, and those that are known up to there, in all lanes of the same workers, do not
//!    fill the free slots.
//!
//! **What a lane without a window says.** It was empty up to the horizon of the last full scan, for the kinds of workers
//! that the scan was made for. A full scan drops every window and asks for every lane that has jobs. Nothing here is needed for safety: a job that
//! is known and gone is refused by its start, and one that is not known is found by the next full scan.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::JobId,
    instant::Instant,
    store::{DueJob, Lane, Position},
};

use super::fleet::{Kind, KindId};

/// Jobs in all windows, at most: more than there are slots to give.
const REMEMBERED: usize = 100_000;
/// After a search that has found nothing but jobs that cannot be assigned now, although there are others behind them.
const FRUITLESS_FOR: Duration = Duration::from_millis(100);

/// The first jobs of one lane.
#[derive(Debug)]
struct Window {
    /// In their order.
    jobs: VecDeque<DueJob>,
    /// The position up to which no job is missing; none when none is missing at all.
    end: Option<Position>,
    /// The date up to which the lane was searched.
    until: Instant,
    is_stale: bool,
    /// When a job that was left alone may be assigned.
    look_again_at: Option<Monotonic>,
    /// Until when another search would find nothing either.
    fruitless_until: Option<Monotonic>,
    /// A date after its horizon at which a job is known to become due.
    next: Option<Instant>,
    /// The kinds of workers that take the lane, among the first so many kinds.
    able: Vec<KindId>,
    known_kinds: usize,
}

/// What a search has found for one lane.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// Jobs that can be assigned when they are due, in their order.
    pub(crate) jobs: VecDeque<DueJob>,
    /// When the first of the jobs that are left alone may be assigned.
    pub(crate) look_again_at: Option<Monotonic>,
}

/// The answer to one question about some lanes.
#[derive(Debug, Default)]
pub(crate) struct Search {
    /// What it found in each lane; nothing in the others.
    pub(crate) found: HashMap<Lane, Found>,
    /// The position up to which it found all jobs; none when it found all there are.
    pub(crate) end: Option<Position>,
    /// The date up to which it looked.
    pub(crate) until: Instant,
    /// A date after that at which a job is known to become due.
    pub(crate) next: Option<Instant>,
    /// Whether it found too few jobs that can be assigned now, and would again.
    pub(crate) is_fruitless: bool,
}

impl Search {
    /// Whether its jobs of these lanes that are due fill so many slots.
    pub(crate) fn fills(&self, slots: usize, lanes: &[Lane], now: Instant) -> bool {
        let due = lanes.iter().filter_map(|lane| self.found.get(lane)).flat_map(|found| &found.jobs).filter(|job| job.scheduled_at <= now);
        due.take(slots).count() >= slots
    }

    /// Whether it tells all there is to know of these lanes, or fills so many slots from them.
    pub(crate) fn is_enough(&self, slots: usize, lanes: &[Lane], now: Instant) -> bool {
        self.end.is_none() || self.fills(slots, lanes, now)
    }

    /// The first date after this one at which one of its jobs becomes due.
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
            look_again_at: None,
            fruitless_until: None,
            next: None,
            able: Vec::new(),
            known_kinds: 0,
        }
    }

    /// The first two rules of staleness.
    fn is_stale(&self, at: Monotonic) -> bool {
        self.is_stale || self.look_again_at.is_some_and(|again| again <= at)
    }

    /// Whether jobs may be due that are not in it, and a search would find them.
    fn may_have_more(&self, now: Instant, at: Monotonic) -> bool {
        (self.end.is_some() || self.until <= now) && self.fruitless_until.is_none_or(|until| until <= at)
    }

    /// Whether it says no more than a lane without a window.
    fn says_nothing(&self, scanned_until: Instant) -> bool {
        self.jobs.is_empty() && self.end.is_none() && !self.is_stale && self.look_again_at.is_none() && self.until >= scanned_until
    }

    fn learn_kinds(&mut self, lane: &Lane, kinds: &[Kind]) {
        self.able.extend((self.known_kinds..kinds.len()).filter(|kind| kinds[*kind].takes(lane)));
        self.known_kinds = kinds.len();
    }
}

/// The last full scan.
#[derive(Debug)]
struct Scan {
    kinds: HashSet<KindId>,
    until: Instant,
}

/// Everything that is known of jobs that are due.
#[derive(Debug, Default)]
pub(crate) struct Lanes {
    windows: HashMap<Lane, Window>,
    scan: Option<Scan>,
}

/// The jobs of a lane and who could take them.
pub(crate) struct Waiting<'a> {
    pub(crate) lane: &'a Lane,
    pub(crate) jobs: &'a VecDeque<DueJob>,
    pub(crate) able: &'a [KindId],
}

impl Lanes {
    /// Forgets everything: the next round begins with a full scan.
    pub(crate) fn forget(&mut self) {
        *self = Self::default();
    }

    /// Asks for a full scan. What was announced stays known until then.
    pub(crate) fn forget_scan(&mut self) {
        self.scan = None;
    }

    /// Whether everything must be looked at.
    pub(crate) fn needs_scan(&self, now: Instant) -> bool {
        self.scan.as_ref().is_none_or(|scan| scan.until < now)
    }

    /// Which of these kinds of workers the last full scan was not made for.
    pub(crate) fn unscanned(&self, kinds: impl Iterator<Item = KindId>) -> Vec<KindId> {
        kinds.filter(|kind| self.scan.as_ref().is_none_or(|scan| !scan.kinds.contains(kind))).collect()
    }

    /// Begins anew with these lanes: all that have jobs which are due at `until` and which these kinds of workers take.
    pub(crate) fn begin_scan(&mut self, lanes: impl IntoIterator<Item = Lane>, kinds: impl IntoIterator<Item = KindId>, until: Instant) {
        self.windows = lanes.into_iter().map(|lane| (lane, Window::stale(until))).collect();
        self.scan = Some(Scan { kinds: kinds.into_iter().collect(), until });
    }

    /// The lanes of these kinds of workers were listed, too.
    pub(crate) fn scanned_for(&mut self, kinds: impl IntoIterator<Item = KindId>) {
        if let Some(scan) = &mut self.scan {
            scan.kinds.extend(kinds);
        }
    }

    /// Something was said of this lane that is not in its window.
    pub(crate) fn mark_stale(&mut self, lane: Lane) {
        let until = self.horizon();
        self.windows.entry(lane).or_insert_with(|| Window::stale(until)).is_stale = true;
    }

    fn horizon(&self) -> Instant {
        self.scan.as_ref().map_or(Instant::MIN_UTC, |scan| scan.until)
    }

    /// Takes in jobs that were announced and need not be visible yet.
    pub(crate) fn announce(&mut self, jobs: impl IntoIterator<Item = DueJob>) {
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
                && let Err(place) = window.jobs.binary_search_by_key(&job.position(), DueJob::position)
            {
                window.jobs.insert(place, job);
                known += 1;
            }
        }
    }

    /// Takes out jobs that were assigned.
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

    /// Notes the kinds of workers that there are.
    pub(crate) fn learn_kinds(&mut self, kinds: &[Kind]) {
        for (lane, window) in &mut self.windows {
            window.learn_kinds(lane, kinds);
        }
    }

    /// The stale lanes that one of these kinds of workers takes, by the kinds that do: workers of the same kinds can stand in for
    /// each other, so that a lane of theirs hides nothing that another worker could take.
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

    /// Fills the windows of these lanes with what a search has found in them.
    pub(crate) fn fill(&mut self, lanes: &[Lane], search: &mut Search, at: Monotonic) {
        let scanned_until = self.horizon();
        for lane in lanes {
            let Some(window) = self.windows.get_mut(lane) else { continue };
            let found = search.found.remove(lane).unwrap_or_default();
            (window.jobs, window.look_again_at) = (found.jobs, found.look_again_at);
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

    /// When a round should look again, for workers of these kinds that have free slots: at this date, or at this instant.
    pub(crate) fn next(&self, free: &HashMap<KindId, usize>, now: Instant) -> (Option<Instant>, Option<Monotonic>) {
        let (mut date, mut instant) = (None, None);
        for window in self.windows.values().filter(|window| window.able.iter().any(|kind| free.contains_key(kind))) {
            let later = window.jobs.iter().map(|job| job.scheduled_at).chain(window.next).filter(|at| *at > now).min();
            date = date.into_iter().chain(later).min();
            let fruitless_until = window.fruitless_until.filter(|_| window.end.is_some() || window.until <= now);
            instant = instant.into_iter().chain(window.look_again_at).chain(fruitless_until).min();
        }
        (date, instant)
    }
}

/// The third rule of staleness: whether the jobs that are known in these lanes, up to where the first of them may miss some, are too few.
fn more_is_needed(lanes: &[(&Lane, &Window)], slots: usize, now: Instant, at: Monotonic) -> bool {
    let unsure = || lanes.iter().filter(|(_, window)| window.may_have_more(now, at));
    // After its horizon a lane may miss its very first job.
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

    const NOW: i64 = 1_000_000;

    fn date(ms: i64) -> Instant {
        Instant::from_timestamp_millis(ms).expect("a date")
    }

    fn lane(class: &str) -> Lane {
        Lane { group: "g".into(), class: class.into() }
    }

    fn job(class: &str, priority: i64, scheduled_at: i64) -> DueJob {
        DueJob { id: JobId::new(), group: "g".into(), class: class.into(), priority, scheduled_at: date(scheduled_at) }
    }

    /// A search that has found these jobs, all of one lane, and nothing missing up to the end.
    fn found(jobs: &[&DueJob], end: Option<&DueJob>) -> Search {
        let in_lane =
            |lane| Found { jobs: jobs.iter().filter(|job| job.lane() == lane).map(|job| (*job).clone()).collect(), look_again_at: None };
        let found = jobs.iter().map(|job| (job.lane(), in_lane(job.lane()))).collect();
        Search { found, end: end.map(DueJob::position), until: date(NOW + 2_000), next: None, is_fruitless: false }
    }

    fn fill(lanes: &mut Lanes, class: &str, mut search: Search) {
        lanes.fill(&[lane(class)], &mut search, Monotonic::now());
    }

    /// Lanes after a full scan that has found these jobs in lane `a`.
    fn scanned(jobs: &[&DueJob], end: Option<&DueJob>) -> Lanes {
        let fleet = fleet(vec![available(&["*"], &["a", "b"], 1)]);
        let mut lanes = Lanes::default();
        lanes.begin_scan([lane("a")], [0], date(NOW + 2_000));
        lanes.learn_kinds(fleet.kinds());
        fill(&mut lanes, "a", found(jobs, end));
        lanes.learn_kinds(fleet.kinds());
        lanes
    }

    fn is_stale(lanes: &mut Lanes, now: i64, after: Duration) -> bool {
        lanes.learn_kinds(fleet(vec![available(&["*"], &["a", "b"], 1)]).kinds());
        !lanes.stale(&HashMap::from([(0, 1)]), date(now), Monotonic::now() + after).is_empty()
    }

    fn take(lanes: &mut Lanes, job: &DueJob) {
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
        lanes.begin_scan([lane("a"), lane("b")], [0], date(NOW + 2_000));
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
        again.found.get_mut(&lane("a")).unwrap().look_again_at = Some(at + Duration::from_secs(60));
        fill(&mut lanes, "a", again);
        assert!(!is_stale(&mut lanes, NOW, Duration::from_secs(59)));
        assert!(is_stale(&mut lanes, NOW, Duration::from_secs(61)));
    }

    #[test]
    fn what_is_announced_is_known_once_and_only_where_nothing_can_be_missing_before_it() {
        let (first, last, behind) = (job("a", 5, NOW - 10), job("a", 5, NOW - 5), job("a", 4, NOW - 20));
        let mut lanes = scanned(&[&last], Some(&last));
        lanes.announce([&first, &first, &behind].map(DueJob::clone));
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
        lanes.begin_scan([lane("a"), lane("b"), lane("c")], [0, 1], date(NOW));
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
