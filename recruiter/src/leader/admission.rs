//! Admission: may a job of this lane start now, and with which permit?
//!
//! The settings decide: pauses, maintenance windows, and the limits of the lane's resources and of its group. Every refusal has a [`Reason`]. The plan asks here
//! before it gives a job to a worker, and `recruiter jobs why` asks the same functions.
//!
//! **Capacity.** This state only chooses permits that are probably free. If it is wrong, MongoDB refuses the start, because a unique index has
//! the permits of all running jobs. So the state may forget a permit too early, and two leaders can both believe that they lead.
//!
//! **Rates.** The starts of a resource with a rate take the *cells* of a clock, one after the other. A start that takes the cell at `c` is
//! allowed from `c - tolerance` to `c` by the server's clock, and MongoDB refuses it outside of this interval. A period of length T overlaps
//! the intervals of at most `(T + tolerance) / interval + 1` cells. With a tolerance of `burst - 1` intervals this is the burst and what the
//! rate allows in T. A new leader takes no cell that an earlier leader can have taken. For slow rates the next free cell is kept in the database.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use chrono::{SubsecRound as _, TimeDelta};
use recruiter_common::{
    ids::JobId,
    instant::Instant,
    limits::{
        Limit, Pause, Paused, Permit, Rate, Settings, group_of_resource, line_of_gate, permit_name, resource_and_number, resource_of_group,
        resources_in,
    },
    store::{KeptCells, Lane, ScheduledJob},
};

use super::{
    ageing::Ageing,
    closures::Closures,
    shares::{Pass, Shares},
};

/// How long before its cell a start is assigned at the latest: an assignment travels to a worker and is started within this time.
const TRAVEL: TimeDelta = TimeDelta::milliseconds(100);
/// Clocks differ by less than this.
const CLOCK_MARGIN: TimeDelta = TimeDelta::seconds(1);
/// If starts are further apart, the next free cell is kept for the next leader.
const SLOW: TimeDelta = TimeDelta::seconds(5);
/// Maximum number of resources with a known cell. Above it, those whose cell has passed are dropped.
const RATES: usize = 10_000;
/// Maximum number of known paused lines. Each search finds the others again.
const HALTED: usize = 10_000;

/// Why a job of a lane may not start now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// A pause covers it.
    Paused(Paused, Pause),
    /// It needs a resource without a limit.
    Undefined(String),
    /// The document of a limit or group is not valid.
    Invalid(String),
    /// As many jobs as a resource allows are running or assigned.
    Full { resource: String, capacity: u32 },
    /// The group is in a maintenance window until `until`.
    Maintenance { group: String, until: Instant },
    /// The rate of a resource allows the next start at `until`.
    Rate { resource: String, until: Instant },
}

/// The settings, the permits in use, and the cells that were taken.
#[derive(Clone, Debug, Default)]
pub(crate) struct Admission {
    settings: Settings,
    /// When the term began. Earlier leaders may have taken cells before it.
    began: Option<Instant>,
    /// The permits of running and assigned jobs: the numbers of each resource. The job is known if this leader has assigned it.
    held: HashMap<String, BTreeMap<u32, Option<JobId>>>,
    /// Paused lines, by their gates: those that a search has found.
    halted: HashMap<String, Pause>,
    /// Running jobs without a permit, in groups whose limit may be newer than their start. A group leaves when there are none.
    without_permit: HashMap<String, u32>,
    /// The first cell of each resource that no start has taken.
    cells: HashMap<String, Instant>,
    /// Earlier leaders have kept the cells of slow rates since this instant. `None`: there was no leader before.
    kept_since: Option<Instant>,
    /// The resources with slow rates of which a cell was taken and is not kept yet.
    to_keep: BTreeSet<String>,
    closures: Closures,
    ageing: Ageing,
    shares: Shares,
    /// Whether groups share the slots by weights.
    has_weights: bool,
}

impl Admission {
    /// The state at the beginning of a term.
    pub(crate) fn begin(settings: Settings, held: &BTreeSet<String>, kept: KeptCells, now: Instant) -> Self {
        let mut admission = Self { began: Some(now), kept_since: kept.since, cells: kept.cells, ..Self::default() };
        admission.change(settings, now);
        admission.confirm(held, |_| false);
        admission
    }

    /// The state as another process sees it: it does not know which cells were taken.
    pub(crate) fn seen_from_outside(settings: Settings, held: &BTreeSet<String>, now: Instant) -> Self {
        let mut admission = Self::default();
        admission.change(settings, now);
        admission.confirm(held, |_| false);
        admission
    }

    /// The rates that apply to this lane.
    pub(crate) fn rates(&self, lane: &Lane) -> impl Iterator<Item = (String, Rate)> {
        let limits = self.limits_of(lane).unwrap_or_default();
        limits.into_iter().filter_map(|(resource, limit)| Some((resource, limit.rate?)))
    }

    /// Whether groups share the slots by weights.
    pub(crate) fn has_weights(&self) -> bool {
        self.has_weights
    }

    /// The position of a group among the others: the lowest comes first.
    pub(crate) fn pass(&self, group: &str) -> Pass {
        if self.has_weights { self.shares.pass(group) } else { 0 }
    }

    /// The ageing of groups.
    pub(crate) fn ageing(&self) -> &Ageing {
        &self.ageing
    }

    /// Updates which groups are in a maintenance window. Returns whether a window has begun: jobs that are assigned ahead must wait.
    pub(crate) fn refresh(&mut self, now: Instant) -> bool {
        self.closures.refresh(now)
    }

    /// When the next maintenance window begins or ends.
    pub(crate) fn next_change(&self) -> Option<Instant> {
        self.closures.next_change()
    }

    /// Whether this job may only go to a free slot, and not ahead: it must start at once or not at all, or it was overtaken for long.
    pub(crate) fn needs_free_slot(&self, lane: &Lane, job: &ScheduledJob, now: Instant) -> bool {
        let is_limited = self.room(lane, now) != usize::MAX;
        is_limited || self.closures.closes_soon(&lane.group, now).is_some() || self.ageing.bonus(job, now) > 0
    }

    /// Replaces the settings. Returns whether jobs that are assigned ahead may have to wait now: there is a new pause or maintenance window,
    /// or a group that had no capacity has one.
    pub(crate) fn change(&mut self, settings: Settings, now: Instant) -> bool {
        let is_paused = settings.pauses.keys().any(|paused| !self.settings.pauses.contains_key(paused));
        let has_capacity =
            |settings: &Settings, group: &String| settings.groups.get(group).is_some_and(|group| group.limit.capacity.is_some());
        let limited: Vec<&String> =
            settings.groups.keys().filter(|group| has_capacity(&settings, group) && !has_capacity(&self.settings, group)).collect();
        let is_limited = !limited.is_empty();
        // Until they are counted, the group counts as full.
        self.without_permit.extend(limited.into_iter().map(|group| (resource_of_group(group), u32::MAX)));
        self.without_permit
            .retain(|resource, _| group_of_resource(resource).is_some_and(|group| has_capacity(&settings, &group.to_owned())));
        for (resource, cell) in &mut self.cells {
            let limit = settings.limit_of(resource).or_else(|| Some(settings.groups.get(group_of_resource(resource)?)?.limit));
            if let Some(rate) = limit.and_then(|limit| limit.rate) {
                // If the rate was slower before, the cell may be far away.
                *cell = (*cell).min(now + tolerance(rate) + interval(rate));
            }
        }
        self.has_weights = settings.has_weights();
        self.ageing = Ageing::of(&settings);
        let is_closed = self.closures.change(&settings, now);
        self.settings = settings;
        is_paused || is_limited || is_closed
    }

    /// Notes that a line is paused: its lanes have no room.
    pub(crate) fn halt(&mut self, gate: &str, pause: Pause) {
        if self.halted.len() < HALTED {
            self.halted.insert(gate.to_owned(), pause);
        }
    }

    /// The gates of the known paused lines.
    pub(crate) fn halted(&self) -> Vec<&str> {
        self.halted.keys().map(String::as_str).collect()
    }

    /// Replaces the known paused lines by those that still are. Returns whether others were resumed.
    pub(crate) fn set_halted(&mut self, halted: HashMap<String, Pause>) -> bool {
        let are_fewer = halted.len() < self.halted.len();
        self.halted = halted;
        are_fewer
    }

    /// Whether any permit is held.
    pub(crate) fn holds_permits(&self) -> bool {
        !self.held.is_empty()
    }

    /// Groups with a capacity whose running jobs may have no permit.
    pub(crate) fn groups_to_count(&self) -> Vec<String> {
        self.without_permit.keys().filter_map(|resource| group_of_resource(resource)).map(str::to_owned).collect()
    }

    /// Sets the number of running jobs of a group that have no permit.
    pub(crate) fn set_without_permit(&mut self, group: &str, count: u64) {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        if count == 0 {
            self.without_permit.remove(&resource_of_group(group));
        } else {
            self.without_permit.insert(resource_of_group(group), count);
        }
    }

    /// Replaces the permits in use by those of running jobs, and those of jobs that are in flight.
    pub(crate) fn confirm(&mut self, running: &BTreeSet<String>, is_in_flight: impl Fn(JobId) -> bool) {
        for numbers in self.held.values_mut() {
            numbers.retain(|_, job| job.is_some_and(&is_in_flight));
        }
        for (resource, number) in running.iter().filter_map(|permit| resource_and_number(permit)) {
            self.held.entry(resource.to_owned()).or_default().entry(number).or_insert(None);
        }
        self.held.retain(|_, numbers| !numbers.is_empty());
    }

    /// Notes permits of ended jobs.
    pub(crate) fn release<'a>(&mut self, permits: impl IntoIterator<Item = &'a String>) {
        for (resource, number) in permits.into_iter().filter_map(|permit| resource_and_number(permit)) {
            if let Some(numbers) = self.held.get_mut(resource) {
                numbers.remove(&number);
                if numbers.is_empty() {
                    self.held.remove(resource);
                }
            }
        }
    }

    /// How many permits of the lane's resources are in use: as many of its first jobs may be in flight.
    pub(crate) fn held(&self, lane: &Lane) -> usize {
        let limits = self.limits_of(lane).unwrap_or_default();
        limits.iter().filter_map(|(resource, _)| self.held.get(resource)).map(BTreeMap::len).max().unwrap_or(0)
    }

    /// How many jobs of this lane may start now: `usize::MAX` if it has no limit.
    pub(crate) fn room(&self, lane: &Lane, now: Instant) -> usize {
        self.check(lane, now).map_or(0, |(room, _)| room)
    }

    /// Why no job of this lane may start now.
    pub(crate) fn why(&self, lane: &Lane, now: Instant) -> Option<Reason> {
        self.check(lane, now).err()
    }

    /// When a rate allows the next job of this lane, or its maintenance window ends, if nothing else refuses it.
    pub(crate) fn opens_at(&self, lane: &Lane, now: Instant) -> Option<Instant> {
        match self.why(lane, now)? {
            Reason::Rate { until, .. } | Reason::Maintenance { until, .. } => Some(until),
            Reason::Paused(..) | Reason::Undefined(_) | Reason::Invalid(_) | Reason::Full { .. } => None,
        }
    }

    /// Takes a permit for a job of this lane: `None` if the lane has no limit.
    pub(crate) fn admit(&mut self, lane: &Lane, job: JobId, now: Instant) -> Result<Option<Permit>, Reason> {
        let (room, resources) = self.check(lane, now)?;
        if self.has_weights {
            let weight = self.settings.groups.get(&lane.group).and_then(|group| group.weight);
            self.shares.serve(&lane.group, weight.unwrap_or(1.0));
        }
        let closes_at = self.closures.closes_soon(&lane.group, now);
        if room == usize::MAX && closes_at.is_none() {
            return Ok(None);
        }
        // The last millisecond before the window.
        let between = closes_at.map(|at| (Instant::UNIX_EPOCH, at - TimeDelta::milliseconds(1)));
        let mut permit = Permit { gate: lane.gate.clone(), names: Vec::new(), between };
        for (resource, limit) in resources {
            if limit.capacity.is_some() {
                let numbers = self.held.entry(resource.clone()).or_default();
                let number = (0..).find(|number| !numbers.contains_key(number)).unwrap_or_default();
                numbers.insert(number, Some(job));
                permit.names.push(permit_name(&resource, number));
            }
            if let Some(rate) = limit.rate {
                let cell = self.next_cell(&resource, rate, now);
                // Rounded so that the interval becomes shorter.
                let (from, until) = ((cell - tolerance(rate) + TimeDelta::nanoseconds(999_999)).trunc_subsecs(3), cell.trunc_subsecs(3));
                permit.between = Some(permit.between.map_or((from, until), |(after, before)| (after.max(from), before.min(until))));
                if interval(rate) > SLOW {
                    self.to_keep.insert(resource.clone());
                }
                self.cells.insert(resource, cell + interval(rate));
            }
        }
        if self.cells.len() > RATES {
            self.cells.retain(|_, cell| *cell > now);
        }
        Ok(Some(permit))
    }

    /// The next free cells of slow rates, to keep them before the assignments that take the cells before them. If that fails, they are
    /// returned again.
    pub(crate) fn cells_to_keep(&self) -> Vec<(String, Instant)> {
        self.to_keep.iter().filter_map(|resource| Some((resource.clone(), *self.cells.get(resource)?))).collect()
    }

    /// Notes that these cells are kept.
    pub(crate) fn cells_are_kept(&mut self) {
        self.to_keep.clear();
    }

    /// How many jobs of this lane may start, and the limits that apply to it.
    fn check(&self, lane: &Lane, now: Instant) -> Result<(usize, Vec<(String, Limit)>), Reason> {
        if let Some((paused, pause)) = self.settings.pause_of(&lane.group, &lane.class) {
            return Err(Reason::Paused(paused.clone(), pause.clone()));
        }
        if let Some((line, pause)) = lane.gate.as_ref().and_then(|gate| Some((line_of_gate(gate)?, self.halted.get(gate)?))) {
            return Err(Reason::Paused(Paused::Line(line.to_owned()), pause.clone()));
        }
        if let Some(until) = self.closures.closed_until(&lane.group) {
            return Err(Reason::Maintenance { group: lane.group.clone(), until });
        }
        let limits = self.limits_of(lane)?;
        let mut room = usize::MAX;
        for (resource, limit) in &limits {
            if let Some(capacity) = limit.capacity {
                let without_permit = self.without_permit.get(resource).map_or(0, |count| *count as usize);
                let used = self.held.get(resource).map_or(0, BTreeMap::len) + without_permit;
                room = room.min((capacity as usize).saturating_sub(used));
                if room == 0 {
                    return Err(Reason::Full { resource: resource.clone(), capacity });
                }
            }
            if let Some(rate) = limit.rate {
                let early = self.next_cell(resource, rate, now) - tolerance(rate) - now;
                if early > TimeDelta::zero() {
                    return Err(Reason::Rate { resource: resource.clone(), until: now + early });
                }
                let (early, interval) = (early.num_nanoseconds().unwrap_or(i64::MIN), interval(rate).num_nanoseconds().unwrap_or(i64::MAX));
                room = room.min(usize::try_from(-early / interval.max(1)).unwrap_or(usize::MAX).saturating_add(1));
            }
        }
        Ok((room, limits))
    }

    /// The limits of the lane's resources and of its group.
    fn limits_of(&self, lane: &Lane) -> Result<Vec<(String, Limit)>, Reason> {
        let mut limits = Vec::new();
        for resource in lane.gate.iter().flat_map(|gate| resources_in(gate)) {
            if self.settings.invalid.contains(resource) {
                return Err(Reason::Invalid(resource.to_owned()));
            }
            let Some(limit) = self.settings.limit_of(resource) else { return Err(Reason::Undefined(resource.to_owned())) };
            limits.push((resource.to_owned(), limit));
        }
        if self.settings.groups.is_empty() && self.settings.invalid.is_empty() {
            return Ok(limits);
        }
        let resource = resource_of_group(&lane.group);
        if self.settings.invalid.contains(&resource) {
            return Err(Reason::Invalid(resource));
        }
        if let Some(group) = self.settings.groups.get(&lane.group).filter(|group| group.limit != Limit::default()) {
            limits.push((resource, group.limit));
        }
        Ok(limits)
    }

    /// The next cell of this resource that a start can take.
    fn next_cell(&self, resource: &str, rate: Rate, now: Instant) -> Instant {
        let tolerance = tolerance(rate);
        // A later first cell leaves more time to travel, and an earlier one leaves more cells for this round.
        let soon = now + if rate.burst > 1 { (tolerance / 2).min(TRAVEL) } else { tolerance };
        // An earlier leader has taken no cell less than an interval before this one, except cells that it has kept.
        let others_until = if interval(rate) > SLOW { self.kept_since } else { self.began };
        let after_others = || others_until.map(|until| until + tolerance + interval(rate) + CLOCK_MARGIN);
        let first = self.cells.get(resource).copied().or_else(after_others);
        first.map_or(soon, |first| first.max(soon))
    }
}

/// How long before its cell a start is allowed.
fn tolerance(rate: Rate) -> TimeDelta {
    let interval = delta(rate.interval());
    if rate.burst > 1 { interval * i32::try_from(rate.burst - 1).unwrap_or(i32::MAX) } else { travel(interval) }
}

/// The time from one cell to the next. Without a burst it is longer than the interval of the rate, by the time in which a start is allowed.
fn interval(rate: Rate) -> TimeDelta {
    let interval = delta(rate.interval());
    if rate.burst > 1 { interval } else { interval + travel(interval) }
}

fn travel(interval: TimeDelta) -> TimeDelta {
    (interval / 10).clamp(TRAVEL / 5, TRAVEL * 10)
}

fn delta(duration: std::time::Duration) -> TimeDelta {
    TimeDelta::from_std(duration).unwrap_or(TimeDelta::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
    use recruiter_common::limits::GroupSettings;

    use super::*;

    fn at(ms: i64) -> Instant {
        Instant::from_timestamp_millis(1_700_000_000_000 + ms).expect("a date")
    }

    fn lane(gate: &str) -> Lane {
        Lane { gate: (!gate.is_empty()).then(|| gate.into()), ..Lane::new("mail", "Send") }
    }

    fn capacity(capacity: u32) -> Limit {
        Limit { capacity: Some(capacity), rate: None }
    }

    fn limited<const N: usize>(limits: [(&str, Limit); N]) -> Admission {
        let limits = limits.map(|(name, limit)| (name.to_owned(), limit)).into();
        Admission::begin(Settings { limits, ..Settings::default() }, &BTreeSet::new(), KeptCells::default(), at(-1_000_000_000))
    }

    fn names(admitted: Result<Option<Permit>, Reason>) -> String {
        match admitted {
            Ok(Some(permit)) => permit.names.join(" "),
            Ok(None) => "unlimited".into(),
            Err(reason) => format!("{reason:?}"),
        }
    }

    #[test]
    fn a_capacity_gives_each_number_once_until_it_is_released() {
        let mut admission = limited([("printer", capacity(2)), ("customer:*", capacity(1))]);
        let mut admit = |gate: &str| names(admission.admit(&lane(gate), JobId::new(), at(0)));
        assert_eq!(admit(""), "unlimited");
        assert_eq!(admit("customer:1,printer"), "customer:1#0 printer#0");
        assert_eq!(admit("customer:1,printer"), r#"Full { resource: "customer:1", capacity: 1 }"#);
        assert_eq!(admit("customer:2,printer"), "customer:2#0 printer#1");
        assert_eq!(admit("customer:3,printer"), r#"Full { resource: "printer", capacity: 2 }"#);
        assert_eq!(admit("scanner"), r#"Undefined("scanner")"#);
        assert_eq!(admission.room(&lane("printer"), at(0)), 0);
        admission.release(&["printer#0".to_owned(), "printer#7".to_owned()]);
        assert_eq!((admission.room(&lane("printer"), at(0)), admission.room(&lane(""), at(0))), (1, usize::MAX));
        assert_eq!(names(admission.admit(&lane("printer"), JobId::new(), at(0))), "printer#0");
    }

    #[test]
    fn what_runs_and_what_is_in_flight_is_held() {
        let mut admission = limited([("printer", capacity(9))]);
        let jobs = [JobId::new(), JobId::new()];
        for job in jobs {
            admission.admit(&lane("printer"), job, at(0)).unwrap();
        }
        let running = ["printer#5".to_owned(), "elsewhere#1".to_owned(), "not a permit".to_owned()].into();
        admission.confirm(&running, |job| job == jobs[1]);
        assert_eq!(admission.room(&lane("printer"), at(0)), 7);
        assert_eq!(names(admission.admit(&lane("printer"), JobId::new(), at(0))), "printer#0");
        admission.confirm(&BTreeSet::new(), |_| false);
        assert!(!admission.holds_permits());
    }

    #[test]
    fn a_lowered_capacity_takes_nothing_away_and_admits_nobody() {
        let mut admission = limited([("printer", capacity(3))]);
        (0..3).for_each(|_| _ = admission.admit(&lane("printer"), JobId::new(), at(0)).unwrap());
        let settings = Settings { limits: [("printer".into(), capacity(2))].into(), ..Settings::default() };
        assert!(!admission.change(settings, at(0)));
        admission.release(&["printer#0".to_owned()]);
        assert_eq!(admission.room(&lane("printer"), at(0)), 0);
        admission.release(&["printer#2".to_owned()]);
        assert_eq!(names(admission.admit(&lane("printer"), JobId::new(), at(0))), "printer#0");
    }

    #[test]
    fn a_group_has_a_limit_of_its_own_and_pauses_come_first() {
        let group = GroupSettings { limit: capacity(2), ..GroupSettings::default() };
        let settings = Settings { groups: [("mail".into(), group)].into(), ..Settings::default() };
        let mut admission = Admission::begin(settings.clone(), &BTreeSet::new(), KeptCells::default(), at(0));
        assert_eq!((admission.groups_to_count(), admission.room(&lane(""), at(0))), (vec!["mail".to_owned()], 0));
        admission.set_without_permit("mail", 1);
        assert_eq!(names(admission.admit(&lane(""), JobId::new(), at(0))), "@mail#0");
        assert_eq!(admission.room(&lane(""), at(0)), 0, "one was started before there was a limit");
        admission.set_without_permit("mail", 0);
        assert_eq!((admission.room(&lane(""), at(0)), admission.room(&Lane::new("other", "Send"), at(0))), (1, usize::MAX));
        let pause = Pause { by: "ada".into(), reason: None, at: None };
        assert!(admission.change(Settings { pauses: [(Paused::Everything, pause.clone())].into(), ..settings.clone() }, at(0)));
        assert_eq!(admission.why(&lane(""), at(0)), Some(Reason::Paused(Paused::Everything, pause)));
        let invalid = Settings { invalid: ["@mail".into(), "printer".into()].into(), ..Settings::default() };
        admission.change(invalid, at(0));
        assert_eq!(admission.why(&lane(""), at(0)), Some(Reason::Invalid("@mail".into())));
        assert_eq!(
            admission.why(&Lane { gate: Some("printer".into()), ..Lane::new("a", "b") }, at(0)),
            Some(Reason::Invalid("printer".into()))
        );
    }

    #[test]
    fn a_new_leader_goes_on_with_a_slow_rate_where_the_last_one_was() {
        let hourly = Limit { capacity: None, rate: Some(Rate::new(1, Duration::from_secs(3_600), 1).unwrap()) };
        let settings = Settings { limits: [("api".into(), hourly)].into(), ..Settings::default() };
        let begin = |kept: KeptCells, ms: i64| Admission::begin(settings.clone(), &BTreeSet::new(), kept, at(ms));
        let mut first = begin(KeptCells::default(), 0);
        let permit = first.admit(&lane("api"), JobId::new(), at(0)).unwrap().unwrap();
        let kept: HashMap<String, Instant> = first.cells_to_keep().into_iter().collect();
        assert!(first.cells_to_keep().len() == 1, "until they are kept");
        first.cells_are_kept();
        assert!(first.cells_to_keep().is_empty());
        let next = |admission: &Admission, ms: i64| match admission.why(&lane("api"), at(ms)) {
            Some(Reason::Rate { until, .. }) => (until - at(0)).num_seconds(),
            other => panic!("{other:?}"),
        };
        let second = begin(KeptCells { cells: kept, since: Some(at(-9_000_000)) }, 1_800_000);
        let hour = 3_600..=3_603;
        assert!(permit.between.unwrap().1 < at(2_000) && hour.contains(&next(&second, 1_800_000)), "{}", next(&second, 1_800_000));
        let new = begin(KeptCells { since: Some(at(-9_000_000)), ..KeptCells::default() }, 0);
        assert_eq!(new.why(&lane("api"), at(0)), None, "no leader has taken one");
        let upgraded = begin(KeptCells { since: Some(at(0)), ..KeptCells::default() }, 0);
        assert!(next(&upgraded, 0) > 3_600, "a leader of an earlier release may have");
    }

    #[test]
    fn a_faster_rate_holds_at_once() {
        let rate = |starts, per| Limit { capacity: None, rate: Some(Rate::new(starts, Duration::from_secs(per), starts).unwrap()) };
        let mut admission = limited([("api", rate(1, 3_600))]);
        admission.admit(&lane("api"), JobId::new(), at(0)).unwrap();
        assert!(matches!(admission.why(&lane("api"), at(10)), Some(Reason::Rate { until, .. }) if until > at(3_000_000)));
        admission.change(Settings { limits: [("api".into(), rate(100, 1))].into(), ..Settings::default() }, at(10));
        assert!(admission.room(&lane("api"), at(30)) > 0);
    }

    /// Starts are late by chance, and leaders change. In no period are there more than the rate allows, and in the long run about as many.
    #[test]
    fn no_period_has_more_starts_than_the_rate_allows() {
        for (seed, (starts, per, burst)) in
            [(100, 1_000, 100), (10, 1_000, 3), (5, 1_000, 1), (7, 60_000, 7), (1, 100, 2), (1_000, 1_000, 21)].into_iter().enumerate()
        {
            let rate = Rate::new(starts, Duration::from_millis(per), burst).unwrap();
            let mut random = StdRng::seed_from_u64(seed as u64);
            let settings = Settings { limits: [("api".into(), Limit { capacity: None, rate: Some(rate) })].into(), ..Settings::default() };
            let mut kept = KeptCells::default();
            let mut admission = Admission::begin(settings.clone(), &BTreeSet::new(), kept.clone(), at(0));
            let mut started: Vec<Instant> = Vec::new();
            let length = i64::try_from(per).unwrap() * 200;
            let mut now = 0;
            while now < length {
                if random.random_range(0..2_000) == 0 {
                    admission = Admission::begin(settings.clone(), &BTreeSet::new(), kept.clone(), at(now));
                }
                while random.random_range(0..50) > 0
                    && let Ok(Some(permit)) = admission.admit(&lane("api"), JobId::new(), at(now))
                {
                    kept.cells.extend(admission.cells_to_keep());
                    let (from, until) = permit.between.unwrap();
                    let late =
                        at(now + if random.random_range(0..20) == 0 { random.random_range(0..5_000) } else { random.random_range(1..8) });
                    if (from..=until).contains(&late) {
                        started.push(late);
                    }
                }
                now += random.random_range(1..10);
            }
            started.sort();
            for (index, first) in started.iter().enumerate() {
                for (more, last) in started[index..].iter().enumerate().take(3 * burst as usize + 50) {
                    let allowed = f64::from(burst) + (*last - *first).num_milliseconds() as f64 * f64::from(starts) / per as f64;
                    assert!((more + 1) as f64 <= allowed + 1e-6, "{rate}: {} starts within {}", more + 1, *last - *first);
                }
            }
            let wanted = length as f64 * f64::from(starts) / per as f64;
            assert!(started.len() as f64 > wanted * 0.5, "{rate}: {} of {wanted} starts", started.len());
        }
    }
}
