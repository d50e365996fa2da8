//! Full scans: which lanes have windows after one, which sleep, and which jobs the windows before it had missed.

use std::collections::{BTreeSet, HashMap, HashSet};

use recruiter_common::{
    instant::Instant,
    store::{Lane, Position, ScheduledJob},
};

use super::{Windows, window::Window};
use crate::leader::fleet::{Kind, KindId};

/// The last full scan.
#[derive(Clone, Debug)]
pub(super) struct Scan {
    /// The kinds of workers that it covered.
    pub(super) kinds: HashSet<KindId>,
    /// The scan listed lanes with jobs that are due at this date.
    pub(super) horizon: Instant,
}

/// The last full scan and its windows, as they were when the current scan began.
#[derive(Clone, Debug)]
pub(super) struct Before {
    pub(super) scan: Scan,
    pub(super) windows: HashMap<Lane, Window>,
    pub(super) asleep: BTreeSet<Lane>,
}

impl Windows {
    /// Requests a full scan. The windows stay until then.
    pub(crate) fn request_scan(&mut self) {
        (self.scan, self.ended) = (None, None);
    }

    /// Requests an audit: a full scan after which [`had_missed`](Self::had_missed) finds the jobs that were not known before.
    pub(crate) fn request_audit(&mut self) {
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
    pub(super) fn open(&mut self, lane: Lane, crowd: usize) {
        if let Some(window) = self.windows.get_mut(&lane) {
            window.is_stale = true;
        } else if lane.gate.is_some() && self.windows.len() >= crowd {
            self.asleep.insert(lane);
        } else {
            self.asleep.remove(&lane);
            self.windows.insert(lane, Window::stale(self.horizon()));
        }
    }

    /// Records that the lanes of these kinds of workers were listed as well.
    pub(crate) fn scanned_for(&mut self, kinds: impl IntoIterator<Item = KindId>) {
        if let Some(scan) = &mut self.scan {
            scan.kinds.extend(kinds);
        }
    }
}
