//! Admission: may a job of this lane start now, and with which permit?
//!
//! The settings decide: pauses, maintenance windows, and the limits of the lane's resources and of its group. [`Settings::admit`] decides, here
//! with what the leader knows, and in `recruiter jobs why` with what another process can read. The plan asks here before it gives a job to a worker.
//!
//! **Capacity.** [`Holders`] has the permits that workers hold, and this state chooses others. If it is wrong, MongoDB refuses the assignment,
//! because a unique index has the permits of all workers. So two leaders can both believe that they lead. While all permits of a resource are
//! held, its jobs go ahead to workers that hold some: a job that returns there passes its permits on.
//!
//! Four jobs for each permit at most go ahead (`holders`). None go ahead if the lane is a line or has a rate, if its group is about to close,
//! if more permits are held than the capacity allows, or if an earlier job waits for one of the resources: then permits are returned, and
//! the earlier job gets them.
//!
//! **Rates.** [`Cells`] has the interval in which a rate allows the next start.

pub(crate) mod ageing;
pub(crate) mod cells;
mod closures;
mod holders;
pub(crate) mod shares;

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
};

use chrono::TimeDelta;
use recruiter_common::{
    ids::{JobId, WorkerId},
    instant::Instant,
    limits::{Limit, Pause, Rate, Settings},
    store::{
        AvailableWorker, InUse, KeptCells, Lane, LaneLimits, NotAdmitted, Permit, PermitHolder, ScheduledJob, group_of_resource,
        line_of_gate, permit_name, resource_of_group,
    },
};

use self::{
    ageing::Ageing,
    cells::Cells,
    closures::Closures,
    holders::{Holders, PermitLane},
    shares::{Pass, Shares},
};

/// Maximum number of known paused lines. Each search finds the others again.
const HALTED: usize = 10_000;

/// How a job can be assigned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// To a free slot, or ahead.
    Unlimited,
    /// To a free slot, with permits.
    Permits,
    /// All permits are held: ahead, to a worker that holds some.
    PermitsOfOthers,
}

/// How many jobs of a lane can be assigned now. One of the two numbers is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Room {
    /// Those that fill slots of any workers: `usize::MAX` if the lane has no limit.
    pub(crate) in_slots: usize,
    /// Those that wait for the permits of others, in the workers that hold some.
    pub(crate) ahead: usize,
}

/// The settings, the permits in use, and the cells that were taken.
#[derive(Clone, Debug, Default)]
pub(crate) struct Admission {
    settings: Settings,
    holders: Holders,
    /// Whether permits may be held or free that `holders` does not know of.
    is_unsure: bool,
    /// Paused lines, by their gates: those that a search has found.
    halted: HashMap<String, Pause>,
    /// Running jobs without a permit, in groups whose limit may be newer than their start. A group leaves when there are none.
    without_permit: HashMap<String, u32>,
    /// When each rate allows the next start.
    pub(crate) cells: Cells,
    /// Which groups are in a maintenance window.
    pub(crate) closures: Closures,
    /// The groups whose jobs age.
    pub(crate) ageing: Ageing,
    shares: Shares,
    /// Whether groups share the slots by weights.
    has_weights: bool,
}

impl Admission {
    /// The state at the beginning of a term.
    pub(crate) fn begin(settings: Settings, holders: &[PermitHolder], kept: KeptCells, now: Instant) -> Self {
        let mut admission = Self { cells: Cells::begin(kept, now), ..Self::default() };
        admission.change(settings, now);
        admission.confirm(holders);
        admission
    }

    /// Whether groups share the slots by weights.
    pub(crate) fn has_weights(&self) -> bool {
        self.has_weights
    }

    /// The position of a group among the others: the lowest comes first.
    pub(crate) fn pass(&self, group: &str) -> Pass {
        if self.has_weights { self.shares.pass(group) } else { 0 }
    }

    /// How a job of this lane can be assigned now, or why it must wait.
    pub(crate) fn way(&self, lane: &Lane, now: Instant) -> Result<Way, NotAdmitted> {
        match self.check(lane, now) {
            Ok((usize::MAX, _)) => Ok(Way::Unlimited),
            Ok(_) => Ok(Way::Permits),
            Err(NotAdmitted::Full { .. }) => Ok(Way::PermitsOfOthers),
            Err(refusal) => Err(refusal),
        }
    }

    /// Whether this job may only go to a free slot, and not ahead, even if it needs no permit: a maintenance window begins soon, or it was
    /// overtaken for long.
    pub(crate) fn needs_free_slot(&self, lane: &Lane, job: &ScheduledJob, now: Instant) -> bool {
        self.closures.closes_soon(&lane.group, now).is_some() || self.ageing.bonus(job, now) > 0
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
        self.cells.change(|resource| rate_of(&settings, resource), now);
        let of_limits = settings.limits.iter().filter_map(|(name, limit)| Some((name.clone(), limit.rate?)));
        let of_groups = settings.groups.iter().filter_map(|(group, settings)| Some((resource_of_group(group), settings.limit.rate?)));
        self.cells.set_limits(of_limits.chain(of_groups), now);
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

    /// Permits may be held or free that are not known.
    pub(crate) fn doubt(&mut self) {
        self.is_unsure = true;
    }

    /// Whether all permits must be read: in a full scan and after a doubt, if any is held.
    pub(crate) fn must_confirm(&mut self, is_full_scan: bool) -> bool {
        self.is_unsure &= !self.holders.is_empty();
        self.is_unsure || (is_full_scan && !self.holders.is_empty())
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

    /// Replaces all known permits by those of a complete read. Returns the permits that are free since then.
    pub(crate) fn confirm(&mut self, holders: &[PermitHolder]) -> Vec<String> {
        self.is_unsure = false;
        let listed: HashSet<WorkerId> = holders.iter().map(|holder| holder.worker).collect();
        let mut returned = self.holders.retain(|worker| listed.contains(&worker));
        returned.extend(holders.iter().flat_map(|holder| self.holders.replace(holder.worker, &holder.permits, &holder.jobs)));
        returned
    }

    /// Updates the permits of these workers from a read of the roster. Returns the permits that they have returned.
    pub(crate) fn read(&mut self, workers: &[AvailableWorker]) -> Vec<String> {
        let read = |worker: &AvailableWorker| {
            self.holders.replace(worker.id, worker.held_permits.as_deref().unwrap_or_default(), &worker.prefetched)
        };
        workers.iter().flat_map(read).collect()
    }

    /// How many permits of the lane's resources are held: as many of its first jobs may be in flight.
    pub(crate) fn held(&self, lane: &Lane) -> usize {
        let limits = self.settings.limits_of(lane).unwrap_or_default();
        limits.iter().map(|(resource, _)| self.holders.count(resource)).max().unwrap_or(0)
    }

    /// How many jobs of this lane can be assigned now: `usize::MAX` if it has no limit. While a resource is full, some can wait for the permits
    /// of others.
    pub(crate) fn room(&self, lane: &Lane, now: Instant) -> usize {
        let Room { in_slots, ahead } = self.room_of(lane, now);
        in_slots + ahead
    }

    /// The same, by where these jobs wait.
    pub(crate) fn room_of(&self, lane: &Lane, now: Instant) -> Room {
        match self.check(lane, now) {
            Ok((in_slots, _)) => Room { in_slots, ahead: 0 },
            Err(NotAdmitted::Full { .. }) => Room { in_slots: 0, ahead: self.room_ahead(lane, now) },
            Err(_) => Room::default(),
        }
    }

    /// How many further jobs of this full lane can wait for permits, in the workers that hold some.
    fn room_ahead(&self, lane: &Lane, now: Instant) -> usize {
        let Some(resource) = self.passes_on(lane, now) else { return 0 };
        let lane = permit_lane(lane);
        self.holders.of(&resource).into_iter().map(|worker| self.holders.room_ahead(worker, &lane) as usize).sum()
    }

    /// The first resource of a full lane, if a worker may pass the permits of its jobs on: the lane is not a line, it has no rate, and no
    /// resource has more jobs than its capacity allows.
    fn passes_on(&self, lane: &Lane, now: Instant) -> Option<String> {
        if lane.gate.as_deref().is_some_and(|gate| line_of_gate(gate).is_some()) || self.closures.closes_soon(&lane.group, now).is_some() {
            return None;
        }
        let limits = self.settings.limits_of(lane).ok()?;
        let may_go_on = |(resource, limit): &(Cow<'_, str>, Limit)| {
            limit.rate.is_none() && limit.capacity.is_none_or(|capacity| self.used(resource) <= capacity as usize)
        };
        let has_capacity = |(_, limit): &&(Cow<'_, str>, Limit)| limit.capacity.is_some();
        let first = limits.iter().find(has_capacity).map(|(resource, _)| resource.to_string())?;
        limits.iter().all(may_go_on).then_some(first)
    }

    /// Number of jobs that use a resource.
    fn used(&self, resource: &str) -> usize {
        self.holders.count(resource) + self.without_permit.get(resource).map_or(0, |count| *count as usize)
    }

    /// The limited resources of a lane.
    pub(crate) fn resources(&self, lane: &Lane) -> impl Iterator<Item = String> {
        self.settings.limits_of(lane).unwrap_or_default().into_iter().map(|(resource, _)| resource.into_owned())
    }

    /// The workers in which a further job of this full lane can wait for permits.
    pub(crate) fn can_wait_in(&self, lane: &Lane, now: Instant) -> HashSet<WorkerId> {
        let Some(resource) = self.passes_on(lane, now) else { return HashSet::new() };
        let lane = permit_lane(lane);
        let has_room = |worker: &WorkerId| self.holders.room_ahead(*worker, &lane) > 0;
        self.holders.of(&resource).into_iter().filter(has_room).collect()
    }

    /// Lets a job of a full lane wait in this worker.
    pub(crate) fn wait_in(&mut self, worker: WorkerId, lane: &Lane, job: &ScheduledJob) -> Permit {
        self.holders.add_ahead(worker, job.id, permit_lane(lane));
        self.serve(&lane.group);
        Permit { gate: lane.gate.clone(), is_ahead: true, ..Permit::default() }
    }

    /// Counts a start of this group, if groups have weights.
    fn serve(&mut self, group: &str) {
        if self.has_weights {
            let weight = self.settings.groups.get(group).and_then(|group| group.weight);
            self.shares.serve(group, weight.unwrap_or(1.0));
        }
    }

    /// When a rate allows the next job of this lane, or its maintenance window ends, if nothing else refuses it.
    pub(crate) fn opens_at(&self, lane: &Lane, now: Instant) -> Option<Instant> {
        match self.way(lane, now).err()? {
            NotAdmitted::Rate { until, .. } | NotAdmitted::Maintenance { until, .. } => Some(until),
            NotAdmitted::Paused(..) | NotAdmitted::Undefined(_) | NotAdmitted::Invalid(_) | NotAdmitted::Full { .. } => None,
        }
    }

    /// Takes permits for a job of this lane and this worker: `None` if the lane has no limit.
    pub(crate) fn admit(&mut self, worker: WorkerId, lane: &Lane, job: &ScheduledJob, now: Instant) -> Result<Option<Permit>, NotAdmitted> {
        let (room, resources) = self.check(lane, now)?;
        self.serve(&lane.group);
        let closes_at = self.closures.closes_soon(&lane.group, now);
        if room == usize::MAX && closes_at.is_none() {
            return Ok(None);
        }
        // The last millisecond before the window.
        let between = closes_at.map(|at| (Instant::UNIX_EPOCH, at - TimeDelta::milliseconds(1)));
        let mut permit = Permit { gate: lane.gate.clone(), between, ..Permit::default() };
        for (resource, limit) in resources {
            if limit.capacity.is_some() {
                let name = permit_name(&resource, self.holders.free_number(&resource));
                let is_first = permit.names.is_empty();
                self.holders.add(worker, &name, is_first.then(|| permit_lane(lane)).as_ref());
                permit.names.push(name);
            }
            if let Some(rate) = limit.rate {
                let (from, until) = self.cells.take(&resource, rate, job, now);
                permit.between = Some(permit.between.map_or((from, until), |(after, before)| (after.max(from), before.min(until))));
            }
        }
        Ok(Some(permit))
    }

    /// Takes the permits of a job back that was not assigned to this worker.
    pub(crate) fn take_back(&mut self, worker: WorkerId, job: JobId, permit: &Permit) {
        permit.names.iter().for_each(|name| self.holders.remove(worker, name));
        self.holders.remove_ahead(worker, job);
        self.cells.was_not_assigned(job);
    }

    /// How many jobs of this lane may start, and the limits that apply to it.
    fn check<'a>(&self, lane: &'a Lane, now: Instant) -> Result<(usize, LaneLimits<'a>), NotAdmitted> {
        self.settings.admit(lane, &Now(self, now))
    }
}

/// What the leader knows at an instant.
struct Now<'a>(&'a Admission, Instant);

impl InUse for Now<'_> {
    fn halt_of(&self, gate: &str) -> Option<&Pause> {
        self.0.halted.get(gate)
    }

    fn closed_until(&self, group: &str) -> Option<Instant> {
        self.0.closures.closed_until(group)
    }

    fn used(&self, resource: &str) -> usize {
        self.0.used(resource)
    }

    fn starts(&self, resource: &str, rate: Rate) -> Result<usize, Instant> {
        self.0.cells.room(resource, rate, self.1)
    }
}

fn permit_lane(lane: &Lane) -> PermitLane {
    (lane.group.clone(), lane.gate.clone())
}

/// The rate of a resource or group.
fn rate_of(settings: &Settings, resource: &str) -> Option<Rate> {
    settings.limit_of(resource).or_else(|| Some(settings.groups.get(group_of_resource(resource)?)?.limit))?.rate
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use recruiter_common::{
        limits::{GroupSettings, Paused},
        store::RateCell,
    };

    use super::*;

    fn at(ms: i64) -> Instant {
        Instant::from_timestamp_millis(1_700_000_000_000 + ms).expect("a date")
    }

    fn lane(gate: &str) -> Lane {
        Lane { gate: (!gate.is_empty()).then(|| gate.into()), ..Lane::new("mail", "Send") }
    }

    fn job() -> ScheduledJob {
        let [group, class] = ["mail", "Send"].map(str::to_owned);
        ScheduledJob { id: JobId::new(), group, class, gate: None, priority: 5, scheduled_at: at(0) }
    }

    fn capacity(capacity: u32) -> Limit {
        Limit::capacity(capacity)
    }

    fn limited<const N: usize>(limits: [(&str, Limit); N]) -> Admission {
        let limits = limits.map(|(name, limit)| (name.to_owned(), limit)).into();
        Admission::begin(Settings { limits, ..Settings::default() }, &[], KeptCells::default(), at(-1_000_000_000))
    }

    fn names(admitted: Result<Option<Permit>, NotAdmitted>) -> String {
        match admitted {
            Ok(Some(permit)) => permit.names.join(" "),
            Ok(None) => "unlimited".into(),
            Err(reason) => format!("{reason:?}"),
        }
    }

    fn holder(worker: WorkerId, permits: &[&str]) -> PermitHolder {
        PermitHolder { worker, permits: permits.iter().map(|name| (*name).to_owned()).collect(), jobs: Vec::new() }
    }

    #[test]
    fn a_capacity_gives_each_number_once_until_it_is_returned() {
        let (mut admission, worker) = (limited([("printer", capacity(2)), ("customer:*", capacity(1))]), WorkerId::new());
        let mut admit = |gate: &str| names(admission.admit(worker, &lane(gate), &job(), at(0)));
        assert_eq!(admit(""), "unlimited");
        assert_eq!(admit("customer:1,printer"), "customer:1#0 printer#0");
        assert_eq!(admit("customer:1,printer"), r#"Full { resource: "customer:1", capacity: 1 }"#);
        assert_eq!(admit("customer:2,printer"), "customer:2#0 printer#1");
        assert_eq!(admit("customer:3,printer"), r#"Full { resource: "printer", capacity: 2 }"#);
        assert_eq!(admit("scanner"), r#"Undefined("scanner")"#);
        assert_eq!(admission.way(&lane("printer"), at(0)), Ok(Way::PermitsOfOthers));
        assert_eq!(admission.confirm(&[holder(worker, &["printer#1"])]).len(), 3);
        assert_eq!((admission.room(&lane("printer"), at(0)), admission.room(&lane(""), at(0))), (1, usize::MAX));
        assert_eq!(names(admission.admit(worker, &lane("printer"), &job(), at(0))), "printer#0");
        assert!(admission.confirm(&[]).len() == 2 && !admission.must_confirm(true));
    }

    #[test]
    fn a_lowered_capacity_takes_nothing_away_and_admits_no_job() {
        let (mut admission, worker) = (limited([("printer", capacity(3))]), WorkerId::new());
        (0..3).for_each(|_| _ = admission.admit(worker, &lane("printer"), &job(), at(0)).unwrap());
        assert_eq!(admission.can_wait_in(&lane("printer"), at(0)), [worker].into());
        let settings = Settings { limits: [("printer".into(), capacity(2))].into(), ..Settings::default() };
        assert!(!admission.change(settings, at(0)));
        assert!(admission.can_wait_in(&lane("printer"), at(0)).is_empty(), "no permit is passed on");
        admission.confirm(&[holder(worker, &["printer#1", "printer#2"])]);
        assert_eq!(admission.way(&lane("printer"), at(0)), Ok(Way::PermitsOfOthers));
        admission.confirm(&[holder(worker, &["printer#1"])]);
        assert_eq!(names(admission.admit(worker, &lane("printer"), &job(), at(0))), "printer#0");
    }

    #[test]
    fn jobs_of_a_full_resource_wait_in_the_workers_that_hold_its_permits() {
        let rate = Limit::new(Some(1), Some(Rate::new(1, Duration::from_secs(1), 1).unwrap()));
        let (mut admission, worker) = (limited([("printer", capacity(1)), ("api", rate), ("customer:*", capacity(1))]), WorkerId::new());
        admission.confirm(&[holder(worker, &["printer#0"])]);
        assert_eq!(admission.room(&lane("printer"), at(0)), 0, "an earlier leader has granted it");
        admission.confirm(&[]);
        for gate in ["printer", "api", ">line"] {
            admission.admit(worker, &lane(gate), &job(), at(0)).unwrap();
        }
        assert_eq!(admission.room(&lane("printer"), at(0)), 4);
        let permit = admission.wait_in(worker, &lane("printer"), &job());
        assert_eq!(permit, Permit { gate: Some("printer".into()), is_ahead: true, ..Permit::default() });
        assert_eq!(admission.room(&lane("printer"), at(0)), 3);
        for other in ["api", ">line", "customer:1,printer"] {
            assert!(admission.can_wait_in(&lane(other), at(0)).is_empty(), "{other}");
        }
        assert!(admission.can_wait_in(&Lane { gate: Some("printer".into()), ..Lane::new("mail", "Other") }, at(0)).contains(&worker));
        let pause = Pause { by: "ada".into(), reason: None, at: None };
        let limits = [("printer".into(), capacity(1))].into();
        admission.change(Settings { limits, pauses: [(Paused::Everything, pause)].into(), ..Settings::default() }, at(0));
        assert!(admission.way(&lane("printer"), at(0)).is_err() && admission.room(&lane("printer"), at(0)) == 0);
    }

    #[test]
    fn a_group_has_a_limit_of_its_own_and_pauses_come_first() {
        let group = GroupSettings { limit: capacity(2), ..GroupSettings::default() };
        let settings = Settings { groups: [("mail".into(), group)].into(), ..Settings::default() };
        let mut admission = Admission::begin(settings.clone(), &[], KeptCells::default(), at(0));
        assert_eq!((admission.groups_to_count(), admission.room(&lane(""), at(0))), (vec!["mail".to_owned()], 0));
        admission.set_without_permit("mail", 1);
        assert_eq!(names(admission.admit(WorkerId::new(), &lane(""), &job(), at(0))), "@mail#0");
        assert_eq!(admission.way(&lane(""), at(0)), Ok(Way::PermitsOfOthers), "one was started before there was a limit");
        admission.set_without_permit("mail", 0);
        assert_eq!((admission.room(&lane(""), at(0)), admission.room(&Lane::new("other", "Send"), at(0))), (1, usize::MAX));
        let pause = Pause { by: "ada".into(), reason: None, at: None };
        assert!(admission.change(Settings { pauses: [(Paused::Everything, pause.clone())].into(), ..settings.clone() }, at(0)));
        assert_eq!(admission.way(&lane(""), at(0)).err(), Some(NotAdmitted::Paused(Paused::Everything, pause)));
        let invalid = Settings { invalid: ["@mail".into(), "printer".into()].into(), ..Settings::default() };
        admission.change(invalid, at(0));
        assert_eq!(admission.way(&lane(""), at(0)).err(), Some(NotAdmitted::Invalid("@mail".into())));
        assert_eq!(
            admission.way(&Lane { gate: Some("printer".into()), ..Lane::new("a", "b") }, at(0)).err(),
            Some(NotAdmitted::Invalid("printer".into()))
        );
    }

    #[test]
    fn a_new_leader_goes_on_with_a_slow_rate_where_the_last_one_was() {
        let hourly = Limit::rate(Rate::new(1, Duration::from_secs(3_600), 1).unwrap());
        let settings = Settings { limits: [("api".into(), hourly)].into(), ..Settings::default() };
        let begin = |kept: KeptCells, ms: i64| Admission::begin(settings.clone(), &[], kept, at(ms));
        let mut first = begin(KeptCells::default(), 0);
        let permit = first.admit(WorkerId::new(), &lane("api"), &job(), at(0)).unwrap().unwrap();
        let kept: HashMap<String, RateCell> = first.cells.to_keep().into_iter().collect();
        assert!(first.cells.to_keep().len() == 1, "until they are kept");
        first.cells.are_kept();
        assert!(first.cells.to_keep().is_empty());
        let next = |admission: &Admission, ms: i64| match admission.way(&lane("api"), at(ms)).err() {
            Some(NotAdmitted::Rate { until, .. }) => (until - at(0)).num_seconds(),
            other => panic!("{other:?}"),
        };
        let second = begin(KeptCells { cells: kept, since: Some(at(-9_000_000)), ..KeptCells::default() }, 1_800_000);
        let hour = 3_600..=3_603;
        assert!(permit.between.unwrap().1 < at(2_000) && hour.contains(&next(&second, 1_800_000)), "{}", next(&second, 1_800_000));
        let new = begin(KeptCells { since: Some(at(-9_000_000)), ..KeptCells::default() }, 0);
        assert_eq!(new.way(&lane("api"), at(0)).err(), None, "no leader has taken one");
        let upgraded = begin(KeptCells { since: Some(at(0)), ..KeptCells::default() }, 0);
        assert!(next(&upgraded, 0) > 3_600, "a leader of an earlier release may have");
    }

    #[test]
    fn a_faster_rate_holds_at_once() {
        let rate = |starts, per| Limit::rate(Rate::new(starts, Duration::from_secs(per), starts).unwrap());
        let mut admission = limited([("api", rate(1, 3_600))]);
        admission.admit(WorkerId::new(), &lane("api"), &job(), at(0)).unwrap();
        assert!(matches!(admission.way(&lane("api"), at(10)).err(), Some(NotAdmitted::Rate { until, .. }) if until > at(3_000_000)));
        admission.change(Settings { limits: [("api".into(), rate(100, 1))].into(), ..Settings::default() }, at(10));
        assert!(admission.room(&lane("api"), at(30)) > 0);
    }
}
