//! Which windows are stale: by events, by the ends of pauses, or because more jobs are needed.

use std::{
    collections::{HashMap, HashSet},
    time::Instant as Monotonic,
};

use recruiter_common::{
    instant::Instant,
    store::{Lane, ScheduledJob},
};

use super::{
    Windows,
    window::{Window, is_of_line},
};
use crate::leader::{
    admission::{Admission, Room},
    fleet::KindId,
};

/// What lanes that are compared with each other have in common: the kinds of workers that take them; their group, if groups have weights; and
/// a lane that is divided by priority is compared with no other.
type Alike<'a> = (Vec<KindId>, Option<&'a str>, Option<&'a Lane>);

/// Sets of lanes to search, each with the kinds of workers that take them.
pub(crate) type StaleLanes = Vec<(Vec<KindId>, Vec<Lane>)>;

impl Windows {
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
            let room = admission.room_of(lane, now);
            if room != Room::default() {
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
}

/// A lane that may be searched, and how many of its jobs may start now.
#[derive(Clone, Copy)]
struct Candidate<'a> {
    lane: &'a Lane,
    window: &'a Window,
    room: Room,
}

impl<'a> Candidate<'a> {
    /// The number of due jobs that are wanted. Those of a full lane fill no slots, so one is enough until it is assigned ahead.
    fn wanted(self) -> usize {
        self.room.in_slots.max(1)
    }

    /// The known due jobs among these.
    fn due(self, now: Instant) -> impl Iterator<Item = &'a ScheduledJob> {
        self.window.jobs.iter().filter(move |job| job.scheduled_at <= now).take(self.wanted())
    }

    /// Whether a search may find further due jobs that may start now.
    fn is_unsure(self, now: Instant, at: Monotonic) -> bool {
        // Behind the head of a line no job may start.
        let has_head = self.wanted() == 1 && is_of_line(self.lane) && !self.window.jobs.is_empty();
        self.window.may_have_more(now, at) && !has_head && self.due(now).count() < self.wanted()
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
    lanes
        .iter()
        .filter(|lane| lane.room.in_slots > 0)
        .flat_map(|lane| lane.due(now))
        .filter(|job| job.position() <= end)
        .take(slots)
        .count()
        < slots
}
