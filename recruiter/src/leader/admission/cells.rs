//! Rates: when the next start of a resource is allowed.
//!
//! The generic cell rate algorithm (ITU-T I.371), for starts of which the leader knows only the interval: MongoDB refuses a start before
//! `from` and after `until` by the server's clock. Each start moves the *cell* of its resource to `until + interval`, and the next one is
//! allowed from `cell - tolerance`, with a tolerance of `burst - 1` intervals. So the `n`th start after another one is at least
//! `n × interval - tolerance` later, wherever in their intervals the two are: in any period of length T there are at most
//! `burst + T / interval` starts.
//!
//! **Lead.** An assignment travels to a worker before its job starts, so an interval lasts for some time after the assignment: the *lead* of
//! the resource. It is at least twice the time in which workers have answered their assignments lately. If it is too short all the same, the
//! job comes back unstarted, and the lead is doubled. With each other assignment it is halved again, so that it does not outlive its cause. A
//! long lead costs starts, but no rate is exceeded, and no job waits for ever.
//!
//! A new leader takes no cell that an earlier leader can have taken. It knows those of slow rates, and of leads of more than two seconds, from
//! the database.
//!
//! **A changed rate.** The starts that are not paid off yet count at the new rate, but no more of them than its burst: a cell that is n
//! intervals ahead is n new intervals ahead afterwards. A start that is on its way may still come until the end of its interval. Therefore the
//! new intervals begin there, and an interval is no longer than a second or its lead, even if the next cell is far away.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};

use chrono::{SubsecRound as _, TimeDelta};
use recruiter_common::{
    ids::JobId,
    instant::Instant,
    limits::Rate,
    store::{FastLimits, KeptCells, RateCell, ScheduledJob},
};

/// The longest lead of a rate with a burst at the beginning.
const LEAD: TimeDelta = TimeDelta::milliseconds(100);
/// Longer leads are kept for the next leader.
const USUAL_LEAD: TimeDelta = TimeDelta::seconds(2);
/// The longest lead: a worker starts a job within this time after its assignment, or MongoDB does not answer.
const LONGEST_LEAD: TimeDelta = TimeDelta::seconds(10);
/// A start is allowed for at least this time, as far as its cell is away.
const SPAN: TimeDelta = TimeDelta::seconds(1);
/// Clocks differ by less than this.
const CLOCK_MARGIN: TimeDelta = TimeDelta::seconds(1);
/// If starts are further apart, the next free cell is kept for the next leader.
const SLOW: TimeDelta = TimeDelta::seconds(5);
/// No start counts for longer: the longest burst, and the longest interval.
const LONGEST: TimeDelta = TimeDelta::days(366 + 30);
/// Maximum number of resources with a known cell. Above it, those whose cell has passed are dropped. And of jobs with a known lead, and of
/// limits that are known to be fast.
const MOST: usize = 10_000;

/// The cells of all resources with a rate.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cells {
    /// When the term began. Earlier leaders may have taken cells before it.
    began: Option<Instant>,
    /// The first cell of each resource that no start has taken.
    cells: HashMap<String, RateCell>,
    /// Earlier leaders have kept the cells of slow rates since this instant. `None`: there was no leader before.
    kept_since: Option<Instant>,
    /// Limits that were fast until then, under earlier leaders: these have kept no cells of them.
    fast_before: BTreeMap<String, Instant>,
    /// The limits that are fast, for the next leader, and those that were until then.
    fast: FastLimits,
    /// Whether the next leader must know of the fast limits before the assignment.
    is_fast_new: bool,
    /// Starts that a change did not count, because the new burst has no room for them, and until when they may still be on their way.
    uncounted: HashMap<String, (u128, Instant)>,
    /// The cells of which the next leader must know before the assignment.
    to_keep: BTreeSet<String>,
    /// Leads that are longer than needed for the usual travel.
    leads: HashMap<String, TimeDelta>,
    /// The time in which workers have answered lately.
    travel: TimeDelta,
    /// The due date of each assigned job, and its lead for each resource.
    assigned: HashMap<JobId, (Instant, Vec<(String, TimeDelta)>)>,
}

impl Cells {
    /// The cells at the beginning of a term.
    pub(super) fn begin(kept: KeptCells, now: Instant) -> Self {
        let fast_before = kept.fast.iter().map(|(name, until)| (name.clone(), until.unwrap_or(now))).collect();
        Self { began: Some(now), kept_since: kept.since, cells: kept.cells, fast_before, fast: kept.fast, ..Self::default() }
    }

    /// Notes that a worker has answered an assignment within this time.
    pub(crate) fn observe(&mut self, travel: Duration) {
        let travel = TimeDelta::from_std(travel).unwrap_or(LONGEST_LEAD).min(LONGEST_LEAD / 2);
        self.travel = travel.max(self.travel / 2);
    }

    /// How many starts of this resource may be assigned now, or when the next one may be.
    pub(super) fn room(&self, resource: &str, rate: Rate, now: Instant) -> Result<usize, Instant> {
        let opens = self.cell(resource, rate) - tolerance(rate);
        if opens > now {
            return Err(opens);
        }
        let more = (now + tolerance(rate) - self.until(resource, rate, now)).num_nanoseconds().unwrap_or(i64::MAX);
        let interval = interval(rate).num_nanoseconds().unwrap_or(i64::MAX).max(1);
        Ok(usize::try_from(more.max(0) / interval).unwrap_or(usize::MAX).saturating_add(1))
    }

    /// Takes the next cell for the start of this job. Returns when the start is allowed.
    pub(super) fn take(&mut self, resource: &str, rate: Rate, job: &ScheduledJob, now: Instant) -> (Instant, Instant) {
        let lead = self.learn(resource, rate, job);
        let (from, cell) = (self.cell(resource, rate) - tolerance(rate), self.until(resource, rate, now));
        let until = cell.min(now + lead.max(SPAN));
        if interval(rate) > SLOW || lead > USUAL_LEAD.max(tolerance(rate)) {
            self.to_keep.insert(resource.to_owned());
        }
        let last = self.cells.get(resource).map_or(until, |before| before.until.max(until));
        self.cells.insert(resource.to_owned(), RateCell { at: cell + interval(rate), until: last, rate: Some(rate) });
        if self.cells.len() > MOST {
            self.cells.retain(|_, cell| cell.at > now);
        }
        // Rounded so that the interval becomes shorter.
        ((from.max(Instant::UNIX_EPOCH) + TimeDelta::nanoseconds(999_999)).trunc_subsecs(3), until.trunc_subsecs(3))
    }

    /// Adjusts the lead of the resource. The job comes back with the same due date if it was not started.
    fn learn(&mut self, resource: &str, rate: Rate, job: &ScheduledJob) -> TimeDelta {
        let (before, shortest) = (self.lead(resource, rate), self.shortest_lead(rate));
        if self.assigned.len() >= MOST {
            self.assigned.clear();
        }
        let (due, leads) = self.assigned.entry(job.id).or_insert_with(|| (job.scheduled_at, Vec::new()));
        if *due != job.scheduled_at {
            // It was started since, and is retried.
            (*due, *leads) = (job.scheduled_at, Vec::new());
        }
        let last = leads.iter().position(|(other, _)| other == resource).map(|index| leads.swap_remove(index).1);
        let lead = match last {
            Some(last) => before.max(last * 2).min(LONGEST_LEAD),
            None => (before / 2).max(shortest),
        };
        leads.push((resource.to_owned(), lead));
        if lead > shortest {
            self.leads.insert(resource.to_owned(), lead);
        } else {
            self.leads.remove(resource);
        }
        lead
    }

    /// A start that was not assigned says nothing about the lead.
    pub(crate) fn was_not_assigned(&mut self, job: JobId) {
        self.assigned.remove(&job);
    }

    /// Forgets which jobs were assigned: the leader does not know whether they were started.
    pub(crate) fn forget(&mut self) {
        self.assigned.clear();
    }

    /// Applies changed rates to the starts that were assigned before, also by an earlier leader.
    pub(super) fn change(&mut self, rate_of: impl Fn(&str) -> Option<Rate>, now: Instant) {
        for (resource, cell) in &mut self.cells {
            let Some(rate) = rate_of(resource).filter(|rate| cell.rate != Some(*rate)) else { continue };
            if [cell.rate, Some(rate)].into_iter().flatten().any(|rate| interval(rate) > SLOW) {
                self.to_keep.insert(resource.clone());
            }
            let uncounted = self.uncounted.remove(resource).filter(|(_, until)| *until > now).map_or(0, |(count, _)| count);
            let (at, uncounted) = changed(*cell, uncounted, rate, now);
            if uncounted > 0 && cell.until > now {
                self.uncounted.insert(resource.clone(), (uncounted, cell.until));
            }
            (cell.at, cell.rate) = (at, Some(rate));
        }
    }

    /// Notes which limits there are now, and their rates.
    pub(super) fn set_limits(&mut self, rates: impl Iterator<Item = (String, Rate)>, now: Instant) {
        let are_fast: BTreeSet<String> = rates.filter(|(_, rate)| interval(*rate) <= SLOW).map(|(name, _)| name).collect();
        let mut fast = self.fast.clone();
        for until in fast.iter_mut().filter(|(name, _)| !are_fast.contains(*name)).map(|(_, until)| until) {
            *until = until.or(Some(now));
        }
        fast.extend(are_fast.into_iter().map(|name| (name, None)));
        fast.retain(|_, until| until.is_none_or(|until| until > now - LONGEST));
        if fast.len() > MOST {
            // Every limit may have been fast.
            fast = [("*".to_owned(), None)].into();
        }
        self.is_fast_new |= fast != self.fast;
        self.fast = fast;
    }

    /// The limits that are fast, or were until then, if the next leader must know them before the next assignment.
    pub(crate) fn fast_to_keep(&self) -> Option<FastLimits> {
        self.is_fast_new.then(|| self.fast.clone())
    }

    /// The cells that the next leader must know, to keep them before the assignments that take the cells before them. If that fails, they are
    /// returned again.
    pub(crate) fn to_keep(&self) -> Vec<(String, RateCell)> {
        self.to_keep.iter().filter_map(|resource| Some((resource.clone(), *self.cells.get(resource)?))).collect()
    }

    /// Notes that these cells are kept.
    pub(crate) fn are_kept(&mut self) {
        self.to_keep.clear();
        self.is_fast_new = false;
    }

    /// The first cell of this resource that no start can have taken.
    fn cell(&self, resource: &str, rate: Rate) -> Instant {
        // An earlier leader has taken no later cell, except cells that it has kept.
        let others_until = if interval(rate) > SLOW { self.kept_since.max(self.fast_until(resource)) } else { self.began };
        let after_others = others_until.map(|until| until + tolerance(rate).max(USUAL_LEAD) + interval(rate) + CLOCK_MARGIN);
        // A kept cell of a rate that is no longer kept may be older.
        self.cells.get(resource).map(|cell| cell.at).into_iter().chain(after_others).max().unwrap_or(Instant::UNIX_EPOCH)
    }

    /// Until when this resource may have had a fast rate under earlier leaders.
    fn fast_until(&self, resource: &str) -> Option<Instant> {
        let is_of = |name: &str| name == resource || name.strip_suffix('*').is_some_and(|prefix| resource.starts_with(prefix));
        self.fast_before.iter().filter(|(name, _)| is_of(name)).map(|(_, until)| *until).max()
    }

    /// The end of the interval of the next start.
    fn until(&self, resource: &str, rate: Rate, now: Instant) -> Instant {
        self.cell(resource, rate).max(now + self.lead(resource, rate))
    }

    fn lead(&self, resource: &str, rate: Rate) -> TimeDelta {
        self.leads.get(resource).copied().unwrap_or_default().max(self.shortest_lead(rate))
    }

    fn shortest_lead(&self, rate: Rate) -> TimeDelta {
        shortest_lead(rate).max(self.travel * 2)
    }
}

/// The cell at another rate, if so many further starts are on their way. And how many starts it does not count.
fn changed(cell: RateCell, uncounted: u128, rate: Rate, now: Instant) -> (Instant, u128) {
    let owed = cell.at - now;
    let Some(before) = cell.rate else {
        // An earlier release has kept it, perhaps at a slower rate.
        return (cell.at.min(now + tolerance(rate).max(LONGEST_LEAD) + interval(rate)), 0);
    };
    if owed <= TimeDelta::zero() {
        return (cell.at, 0);
    }
    let nanos = |time: TimeDelta| u128::try_from(time.num_nanoseconds().unwrap_or(i64::MAX)).unwrap_or(0);
    let [new, old] = [rate, before].map(|rate| nanos(interval(rate)).max(1));
    let owed = (nanos(owed) * new).div_ceil(old) + uncounted * new;
    let counted = owed.min(nanos(interval(rate) + tolerance(rate)));
    let at = cell.until.max(now) + TimeDelta::nanoseconds(i64::try_from(counted).unwrap_or(i64::MAX));
    (at, (owed - counted).div_ceil(new))
}

/// How much earlier than its cell a start is allowed.
fn tolerance(rate: Rate) -> TimeDelta {
    interval(rate) * i32::try_from(rate.burst - 1).unwrap_or(i32::MAX)
}

/// The time from one cell to the next.
fn interval(rate: Rate) -> TimeDelta {
    TimeDelta::from_std(rate.interval()).unwrap_or(TimeDelta::MAX)
}

/// The lead at the beginning. With a burst a longer one leaves fewer starts to a round; without a burst it delays the next start.
fn shortest_lead(rate: Rate) -> TimeDelta {
    if rate.burst > 1 { (tolerance(rate) / 2).min(LEAD) } else { (interval(rate) / 10).clamp(LEAD / 5, LEAD * 10) }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

    use super::*;

    fn at(ms: i64) -> Instant {
        Instant::from_timestamp_millis(1_700_000_000_000 + ms).expect("a date")
    }

    fn job() -> ScheduledJob {
        let [group, class] = ["mail", "Send"].map(str::to_owned);
        ScheduledJob { id: JobId::new(), group, class, gate: None, priority: 5, scheduled_at: at(0) }
    }

    fn rate(starts: u32, per_ms: u64, burst: u32) -> Rate {
        Rate::new(starts, Duration::from_millis(per_ms), burst).unwrap()
    }

    /// In no period are there more starts than the rate allows.
    fn check(rate: Rate, started: Vec<Instant>) {
        check_with(rate, started, 0);
    }

    /// The same, if so many starts were on their way when the rate was changed.
    fn check_with(rate: Rate, mut started: Vec<Instant>, on_their_way: usize) {
        let burst = on_their_way.max(rate.burst as usize);
        started.sort();
        for (index, first) in started.iter().enumerate() {
            for (more, last) in started[index..].iter().enumerate().take(3 * burst + 50) {
                let time = (*last - *first).num_milliseconds() as f64;
                let allowed = burst as f64 + time * f64::from(rate.starts) / rate.per.as_millis() as f64;
                assert!((more + 1) as f64 <= allowed + 1e-6, "{rate}: {} starts within {time} ms", more + 1);
            }
        }
    }

    /// Starts are late by chance, and leaders change: the rate holds, and in the long run there are about as many starts as it allows.
    #[test]
    fn no_period_has_more_starts_than_the_rate_allows() {
        let rates = [(100, 1_000, 100), (10, 1_000, 3), (5, 1_000, 1), (7, 60_000, 7), (1, 100, 2), (1_000, 1_000, 21)];
        for (seed, (starts, per, burst)) in rates.into_iter().enumerate() {
            let rate = rate(starts, per, burst);
            let mut random = StdRng::seed_from_u64(seed as u64);
            let mut kept = KeptCells::default();
            let mut cells = Cells::begin(kept.clone(), at(0));
            let (mut started, mut back) = (Vec::new(), Vec::new());
            let length = i64::try_from(per).unwrap() * 200;
            let mut now = 0;
            while now < length {
                if random.random_range(0..4_000) == 0 {
                    cells = Cells::begin(kept.clone(), at(now));
                }
                while random.random_range(0..50) > 0 && cells.room("api", rate, at(now)).is_ok() {
                    let job = if random.random_range(0..9) == 0 { back.pop() } else { None }.unwrap_or_else(job);
                    let (from, until) = cells.take("api", rate, &job, at(now));
                    kept.cells.extend(cells.to_keep());
                    cells.are_kept();
                    let late = if random.random_range(0..20) == 0 { random.random_range(0..5_000) } else { random.random_range(1..8) };
                    if (from..=until).contains(&at(now + late)) {
                        started.push(at(now + late));
                    } else {
                        back.push(job);
                    }
                }
                now += random.random_range(1..10);
            }
            let wanted = length as f64 * f64::from(starts) / per as f64;
            assert!(started.len() as f64 > wanted * 0.25, "{rate}: {} of {wanted} starts", started.len());
            check(rate, started);
        }
    }

    /// Each start arrives far later than the first leads. The jobs start all the same, also under a new leader, and the rate holds.
    #[test]
    fn jobs_start_over_a_slow_network() {
        for (starts, per, burst, travel) in [(5, 1_000, 1, 700), (1_000, 1_000, 21, 300), (10, 1_000, 3, 4_000), (1, 8_000, 1, 3_000)] {
            let rate = rate(starts, per, burst);
            let mut kept = KeptCells::default();
            let mut cells = Cells::begin(kept.clone(), at(0));
            let (mut started, mut now) = (Vec::new(), 0);
            let mut waiting = [job(), job()];
            while started.len() < 40 {
                assert!(now < 2_000_000, "{rate}: {} starts", started.len());
                if now % 100_000 == 99_990 {
                    cells = Cells::begin(kept.clone(), at(now));
                }
                if cells.room("api", rate, at(now)).is_ok() {
                    let (from, until) = cells.take("api", rate, &waiting[0], at(now));
                    kept.cells.extend(cells.to_keep());
                    cells.are_kept();
                    if (from..=until).contains(&at(now + travel)) {
                        started.push(at(now + travel));
                        waiting[0] = job();
                    }
                    waiting.swap(0, 1);
                }
                now += 10;
            }
            check(rate, started);
        }
    }

    #[test]
    fn a_lead_covers_the_time_in_which_workers_answer() {
        let rate = rate(5, 1_000, 1);
        let mut cells = Cells::begin(KeptCells::default(), at(-10_000));
        let lead = |cells: &Cells| cells.lead("api", rate).num_milliseconds();
        cells.observe(Duration::from_millis(3));
        assert_eq!(lead(&cells), 20);
        cells.observe(Duration::from_millis(400));
        assert_eq!(lead(&cells), 800);
        cells.observe(Duration::from_millis(3));
        assert_eq!(lead(&cells), 400);
        cells.take("api", rate, &job(), at(0));
        assert!(cells.to_keep().is_empty());
        cells.observe(Duration::from_secs(3_600));
        assert_eq!(lead(&cells), 10_000);
        cells.take("api", rate, &job(), at(100_000));
        assert_eq!(cells.to_keep().len(), 1, "the next leader does not know this lead");
    }

    #[test]
    fn a_lead_grows_when_a_job_comes_back_and_shrinks_again() {
        let rate = rate(5, 1_000, 1);
        let mut cells = Cells::begin(KeptCells::default(), at(-10_000));
        let mut now = 0;
        let mut lead = |cells: &mut Cells, job: &ScheduledJob| {
            now += 100_000;
            (cells.take("api", rate, job, at(now)).1 - at(now)).num_milliseconds()
        };
        let late = job();
        assert_eq!([lead(&mut cells, &late), lead(&mut cells, &late), lead(&mut cells, &late)], [20, 40, 80]);
        assert!(cells.to_keep().is_empty(), "the next leader waits for as long");
        cells.was_not_assigned(late.id);
        assert_eq!(lead(&mut cells, &late), 40, "it was not on its way");
        let again = ScheduledJob { scheduled_at: at(1), ..late };
        assert_eq!(lead(&mut cells, &again), 20, "it was started, and is retried");
        assert_eq!((0..40).map(|_| lead(&mut cells, &job())).last(), Some(20));
        let other = job();
        let longest = (0..40).map(|_| lead(&mut cells, &other)).last();
        assert_eq!(longest, Some(LONGEST_LEAD.num_milliseconds()));
    }

    /// Each rate of a job has a lead of its own, and a first assignment is no return.
    #[test]
    fn a_job_with_two_rates_changes_no_lead_by_being_assigned_once() {
        let rate = rate(5, 1_000, 1);
        let mut cells = Cells::begin(KeptCells::default(), at(-10_000));
        for number in 0..20 {
            let job = job();
            let now = at(100_000 * number);
            let until = ["api", "mail"].map(|resource| (cells.take(resource, rate, &job, now).1 - now).num_milliseconds());
            assert_eq!(until, [20, 20]);
        }
        let job = job();
        let now = at(10_000_000);
        ["api", "mail"].iter().for_each(|resource| _ = cells.take(resource, rate, &job, now));
        let again = at(10_100_000);
        assert_eq!(["api", "mail"].map(|resource| (cells.take(resource, rate, &job, again).1 - again).num_milliseconds()), [40, 40]);
    }

    /// The cell of a start that may still happen is not moved by settings that are the same, nor by a new term.
    #[test]
    fn a_change_counts_the_starts_that_are_not_paid_off() {
        let (slow, fast) = (rate(1, 60_000, 1), rate(10, 1_000, 1));
        let mut cells = Cells::begin(KeptCells::default(), at(-1_000_000));
        let until = cells.take("api", slow, &job(), at(0)).1;
        cells.change(|_| Some(slow), at(0));
        assert_eq!(cells.room("api", slow, until), Err(until + interval(slow)));
        cells.change(|_| None, at(0));
        cells.change(|_| Some(fast), at(0));
        assert_eq!(cells.room("api", fast, at(0)), Err(until + interval(fast)));
        // A long lead: the next leader waits for the start that may still happen.
        cells.observe(Duration::from_secs(4));
        let until = cells.take("api", fast, &job(), at(100_000)).1;
        let kept: HashMap<String, RateCell> = cells.to_keep().into_iter().collect();
        let begin = |rate: Rate| {
            let mut next = Cells::begin(KeptCells { cells: kept.clone(), since: Some(at(0)), ..KeptCells::default() }, at(100_500));
            next.change(|_| Some(rate), at(100_500));
            next.room("api", rate, at(100_500))
        };
        assert_eq!(begin(fast), Err(until + interval(fast)));
        assert!(begin(slow).is_err_and(|opens| opens >= until + interval(slow)));
    }

    /// 100 starts in an hour are used up.
    #[test]
    fn a_rate_that_is_raised_allows_the_next_start_soon() {
        let (hourly, minutely) = (rate(100, 3_600_000, 100), rate(100, 60_000, 100));
        let mut cells = Cells::begin(KeptCells::default(), at(-1_000_000_000));
        (0..100).for_each(|_| _ = cells.take("api", hourly, &job(), at(0)));
        let open = |cells: &Cells, rate, now| match cells.room("api", rate, at(now)) {
            Ok(_) => 0,
            Err(opens) => (opens - at(now)).num_milliseconds(),
        };
        let wait = open(&cells, hourly, 10_000);
        assert!((20_000..36_100).contains(&wait), "{wait}");
        let kept: HashMap<String, RateCell> = cells.to_keep().into_iter().collect();
        let mut next = Cells::begin(KeptCells { cells: kept, since: Some(at(-2_000_000_000)), ..KeptCells::default() }, at(10_000));
        for cells in [&mut cells, &mut next] {
            cells.change(|_| Some(minutely), at(10_000));
            let wait = open(cells, minutely, 10_000);
            assert!((100..2_000).contains(&wait), "{wait}");
            for _ in 0..50 {
                assert!(cells.room("api", minutely, at(45_000)).is_ok());
                cells.take("api", minutely, &job(), at(45_000));
            }
            assert_eq!(cells.to_keep().len(), 1, "the next leader does not go back to the old cell");
        }
    }

    /// What a leader writes before an assignment.
    fn keep(kept: &mut KeptCells, cells: &mut Cells) {
        kept.cells.extend(cells.to_keep());
        if let Some(fast) = cells.fast_to_keep() {
            kept.fast = fast;
        }
        cells.are_kept();
    }

    /// 100 starts in a minute are used up, the leader dies, and the limit is 100 in an hour. The next leader knows no cell of the fast rate.
    #[test]
    fn a_rate_that_is_lowered_without_a_leader_begins_without_a_burst() {
        let (minutely, hourly) = (rate(100, 60_000, 100), rate(100, 3_600_000, 100));
        for (name, resource) in [("api", "api"), ("customer:*", "customer:17"), ("@mail", "@mail")] {
            let mut kept = KeptCells { since: Some(at(-1_000_000_000)), ..KeptCells::default() };
            let mut cells = Cells::begin(kept.clone(), at(-1_000_000_000));
            cells.set_limits([(name.to_owned(), minutely)].into_iter(), at(0));
            (0..100).for_each(|_| _ = cells.take(resource, minutely, &job(), at(0)));
            keep(&mut kept, &mut cells);
            // Neither the next leader nor the one after it.
            for began in [10_000, 15_000] {
                cells = Cells::begin(kept.clone(), at(began));
                cells.set_limits([(name.to_owned(), hourly)].into_iter(), at(began));
                assert!(cells.room(resource, hourly, at(began)).is_err_and(|opens| opens < at(60_000)), "{name}");
                assert!(cells.room("other", hourly, at(began)).is_ok_and(|room| room > 90));
                keep(&mut kept, &mut cells);
            }
            cells.set_limits([(name.to_owned(), hourly)].into_iter(), at(20_000));
            assert_eq!(cells.fast_to_keep(), None, "written once");
            cells.set_limits([].into_iter(), at(0) + LONGEST * 2);
            assert_eq!(cells.fast_to_keep(), Some(FastLimits::new()));
            cells.set_limits((0..=MOST).map(|number| (number.to_string(), minutely)), at(0));
            assert_eq!(cells.fast_to_keep(), Some([("*".to_owned(), None)].into()));
        }
    }

    /// Rates are raised and lowered at random, while starts are on their way and leaders change. From each change to the next there are in no
    /// period more starts than the new rate allows; the starts that were on their way count, but are not taken back.
    #[test]
    fn no_period_after_a_change_has_more_starts_than_the_new_rate_allows() {
        let rates =
            [(100, 3_600_000, 100), (100, 60_000, 100), (10, 1_000, 3), (1, 8_000, 1), (1, 8_000, 5), (1_000, 1_000, 100), (5, 1_000, 1)];
        let rates = rates.map(|(starts, per, burst)| rate(starts, per, burst));
        let mut soon = 0;
        for seed in 0..20 {
            let mut random = StdRng::seed_from_u64(seed);
            let mut rate = rates[random.random_range(0..rates.len())];
            let mut cells = Cells::begin(KeptCells::default(), at(-1_000_000_000));
            let mut kept = KeptCells { since: Some(at(-1_000_000_000)), ..KeptCells::default() };
            cells.set_limits([("api".to_owned(), rate)].into_iter(), at(0));
            let mut now = 0;
            let mut starts: Vec<Instant> = Vec::new();
            for _ in 0..10 {
                let on_their_way = starts.iter().filter(|start| **start >= at(now)).count();
                let changed_at = now;
                let length = if random.random_range(0..2) == 0 { random.random_range(1..200) } else { random.random_range(1..10_000) };
                while now < changed_at + length {
                    while random.random_range(0..50) > 0 && cells.room("api", rate, at(now)).is_ok() {
                        let (from, until) = cells.take("api", rate, &job(), at(now));
                        keep(&mut kept, &mut cells);
                        let late = if random.random_range(0..2) == 0 { until } else { at(now + random.random_range(0..8)) };
                        if (from..=until).contains(&late) {
                            starts.push(late.max(at(now)));
                        }
                    }
                    now += random.random_range(1..50);
                }
                let since = starts.iter().copied().filter(|start| *start >= at(changed_at)).collect();
                check_with(rate, since, on_their_way);
                rate = rates[random.random_range(0..rates.len())];
                if random.random_range(0..4) == 0 {
                    cells = Cells::begin(kept.clone(), at(now));
                }
                cells.change(|_| Some(rate), at(now));
                cells.set_limits([("api".to_owned(), rate)].into_iter(), at(now));
                soon += usize::from(cells.room("api", rate, at(now) + interval(rate) + SPAN).is_ok());
            }
        }
        assert!(soon > 130, "after only {soon} of 200 changes the next start is allowed within a second and an interval");
    }
}
