//! The window of a lane, and the answer of a search that fills it.

use std::{
    collections::{HashMap, VecDeque},
    time::Instant as Monotonic,
};

use recruiter_common::{
    instant::Instant,
    store::{Lane, Position, ScheduledJob, line_of_gate},
};

use crate::leader::fleet::{Kind, KindId};

/// The first jobs of one lane.
#[derive(Clone, Debug)]
pub(super) struct Window {
    /// Sorted by position.
    pub(super) jobs: VecDeque<ScheduledJob>,
    /// The position up to which no job is missing. `None`: no job is missing.
    pub(super) end: Option<Position>,
    /// The search left out jobs that are due later.
    pub(super) horizon: Instant,
    /// Rule 1 of staleness.
    pub(super) is_stale: bool,
    /// When the first pause of a refused job of this lane ends.
    pub(super) pause_ends_at: Option<Monotonic>,
    /// After a fruitless search: rule 3 of staleness does not apply before this instant.
    pub(super) search_again_at: Option<Monotonic>,
    /// The first due date after the horizon, if it is known.
    pub(super) next_due: Option<Instant>,
    /// In a line: its head is in another lane. The end of that one makes this window stale.
    pub(super) is_behind: bool,
    /// The kinds of workers that take the lane, among the first `known_kinds` kinds.
    pub(super) able: Vec<KindId>,
    pub(super) known_kinds: usize,
}

impl Window {
    pub(super) fn stale(horizon: Instant) -> Self {
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
    pub(super) fn is_stale(&self, at: Monotonic) -> bool {
        self.is_stale || self.pause_ends_at.is_some_and(|again| again <= at)
    }

    /// Whether a search now may find due jobs that are not in the window.
    pub(super) fn may_have_more(&self, now: Instant, at: Monotonic) -> bool {
        (self.end.is_some() || self.horizon <= now) && self.search_again_at.is_none_or(|until| until <= at)
    }

    /// Whether the missing window of an empty lane would mean the same.
    pub(super) fn is_redundant(&self, scanned_until: Instant) -> bool {
        let is_empty = self.jobs.is_empty() && self.end.is_none() && !self.is_behind;
        is_empty && !self.is_stale && self.pause_ends_at.is_none() && self.horizon >= scanned_until
    }

    pub(super) fn learn_kinds(&mut self, lane: &Lane, kinds: &[Kind]) {
        self.able.extend((self.known_kinds..kinds.len()).filter(|kind| kinds[*kind].takes(lane)));
        self.known_kinds = kinds.len();
    }
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

/// The known jobs of a lane and the kinds of workers that take it.
pub(crate) struct KnownJobs<'a> {
    pub(crate) lane: &'a Lane,
    pub(crate) jobs: &'a VecDeque<ScheduledJob>,
    pub(crate) able: &'a [KindId],
}

/// Whether the jobs of this lane are in a line.
pub(crate) fn is_of_line(lane: &Lane) -> bool {
    lane.gate.as_deref().is_some_and(|gate| line_of_gate(gate).is_some())
}
