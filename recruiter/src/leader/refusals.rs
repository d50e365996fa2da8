//! Jobs that were assigned and not started: they are left alone for a growing while, and other workers are tried first.
//!
//! A job that is found again under the very date at which it was assigned was not started: a start that ends in a retry or an
//! interruption changes the date. The worker may not have found it (its insert was still on its way), may not know its retry
//! policy, may not be able to lock it, or may be dead.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::{JobId, WorkerId},
    instant::Instant,
    store::{DueJob, Lane},
};

use super::in_flight::Turn;

/// Before a job is assigned to another worker after the first one that did not start it.
const TRY_ANOTHER_AFTER: Duration = Duration::from_millis(20);
/// Before it is assigned again to a worker that did not start it; doubled each time.
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(50);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Refused jobs that are remembered, at most, and for how long after their pause.
const REMEMBERED: usize = 10_000;
const REMEMBERED_FOR: Duration = Duration::from_secs(300);
/// How long a job is left alone that cannot be remembered.
const WHEN_FORGOTTEN: Duration = Duration::from_secs(1);
/// Workers that are remembered of each.
const WORKERS: usize = 1_000;

/// An assignment whose turn is over.
#[derive(Clone, Copy, Debug)]
struct Tried {
    worker: WorkerId,
    due: Instant,
    /// Whether the worker let it lie.
    lay: bool,
}

/// A job that was not started.
#[derive(Debug)]
struct Refused {
    due: Instant,
    by: HashSet<WorkerId>,
    /// Whether the last worker let it lie instead of answering.
    lay: bool,
    /// How often a worker that had refused it before refused it again.
    repeats: u32,
    until: Monotonic,
}

/// What the recruiter remembers of assignments that came to nothing.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    /// Assignments whose turn is over since the last full scan, and those of the scan before.
    tried: [HashMap<JobId, Tried>; 2],
    /// Where these are.
    lanes: [HashSet<Lane>; 2],
    refused: HashMap<JobId, Refused>,
}

impl Refusals {
    /// Notes that a worker is done with its jobs, or has let them lie.
    pub(crate) fn turn_over(&mut self, turn: &Turn, lay: bool) {
        let tried = turn.jobs.iter().filter_map(|(job, due)| Some((*job, Tried { worker: turn.worker, due: (*due)?, lay })));
        self.tried[0].extend(tried);
    }

    /// Notes where jobs were assigned.
    pub(crate) fn assigned_in(&mut self, lane: &Lane) {
        if !self.lanes[0].contains(lane) {
            self.lanes[0].insert(lane.clone());
        }
    }

    /// Where jobs were assigned lately.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = &Lane> {
        self.lanes.iter().flatten()
    }

    /// Whether an assignment of this job has ended lately: an announcement of it is old.
    pub(crate) fn was_tried(&self, job: &DueJob) -> bool {
        self.tried.iter().any(|tried| tried.get(&job.id).is_some_and(|tried| tried.due == job.scheduled_at))
    }

    /// A search has found this job, which is in flight no more; says until when it is to be left alone, if it is.
    pub(crate) fn found(&mut self, job: &DueJob, at: Monotonic) -> Option<Monotonic> {
        let tried = self.tried.iter_mut().find_map(|tried| tried.remove(&job.id)).filter(|tried| tried.due == job.scheduled_at);
        if let Some(tried) = tried {
            if self.refused.len() >= REMEMBERED && !self.refused.contains_key(&job.id) {
                return Some(at + WHEN_FORGOTTEN);
            }
            self.refuse(job, tried, at);
        }
        let refused = self.refused.get(&job.id)?;
        if refused.due != job.scheduled_at {
            self.refused.remove(&job.id);
            return None;
        }
        (refused.until > at).then_some(refused.until)
    }

    fn refuse(&mut self, job: &DueJob, tried: Tried, at: Monotonic) {
        let fresh = || Refused { due: job.scheduled_at, by: HashSet::new(), lay: false, repeats: 0, until: at };
        let refused = self.refused.entry(job.id).or_insert_with(fresh);
        if refused.due != job.scheduled_at {
            *refused = fresh();
        }
        refused.lay = tried.lay;
        let is_first = refused.by.is_empty();
        let is_another = refused.by.len() < WORKERS && refused.by.insert(tried.worker);
        if is_another || tried.lay {
            // It may merely have been too early, and a worker that lets it lie says nothing about the job.
            refused.until = if is_first || tried.lay { at } else { at + TRY_ANOTHER_AFTER };
        } else {
            refused.repeats += 1;
            refused.until = at + (TRY_AGAIN_AFTER * 2_u32.saturating_pow(refused.repeats.min(16) - 1)).min(LONGEST_PAUSE);
            if refused.until - at >= LONGEST_PAUSE / 2 {
                tracing::warn!(job.id = %job.id, job.group = job.group, job.class = job.class, "a job is due, but no worker starts it; the log of the workers says why");
            }
        }
    }

    /// A worker has come that may start what the others did not.
    pub(crate) fn somebody_is_new(&mut self, at: Monotonic) {
        self.refused.values_mut().for_each(|refused| refused.until = refused.until.min(at));
    }

    /// Whether this worker did not start this job before.
    pub(crate) fn by(&self, job: JobId, worker: WorkerId) -> bool {
        self.refused.get(&job).is_some_and(|refused| refused.by.contains(&worker))
    }

    /// Whether the last worker let this job lie.
    pub(crate) fn lay(&self, job: JobId) -> bool {
        self.refused.get(&job).is_some_and(|refused| refused.lay)
    }

    /// How many jobs a search may meet that are left alone.
    pub(crate) fn len(&self) -> usize {
        self.refused.len()
    }

    /// Forgets what is old, at each full scan.
    pub(crate) fn age(&mut self, at: Monotonic) {
        self.tried.swap(0, 1);
        self.tried[0].clear();
        self.lanes.swap(0, 1);
        self.lanes[0].clear();
        self.refused.retain(|_, refused| at.saturating_duration_since(refused.until) < REMEMBERED_FOR);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use recruiter_common::{ids::RoundId, store::Channel};

    use super::*;
    use crate::leader::in_flight::InFlight;

    fn job() -> DueJob {
        DueJob { id: JobId::new(), group: "g".into(), class: "c".into(), priority: 5, scheduled_at: Instant::UNIX_EPOCH }
    }

    fn turn(job: &DueJob, worker: WorkerId) -> Turn {
        let mut flight = InFlight::default();
        flight.begin(RoundId::new(), (worker, Channel(0)), vec![(job.id, Some(job.scheduled_at))], Monotonic::now());
        flight.end(worker).expect("just begun")
    }

    /// For how many milliseconds the job is left alone after each of these workers did not start it.
    fn pauses(workers: &[WorkerId], lay: bool) -> Vec<u128> {
        let (mut refusals, job, mut at) = (Refusals::default(), job(), Monotonic::now());
        let mut refused = |worker: &WorkerId| {
            refusals.turn_over(&turn(&job, *worker), lay);
            let until = refusals.found(&job, at).unwrap_or(at);
            let pause = (until - at).as_millis();
            assert!(refusals.by(job.id, *worker) && refusals.lay(job.id) == lay);
            assert_eq!(refusals.found(&job, at).is_some(), pause > 0, "it is no refusal to be found twice");
            at = until;
            pause
        };
        workers.iter().map(&mut refused).collect()
    }

    #[test]
    fn a_job_that_nobody_starts_is_left_alone_for_a_growing_while() {
        let (a, b, c) = (WorkerId::new(), WorkerId::new(), WorkerId::new());
        assert_eq!(pauses(&[a, a, a, a, a], false), [0, 50, 100, 200, 400]);
        assert_eq!(pauses(&[a; 30], false).last(), Some(&60_000));
        assert_eq!(pauses(&[a, b, c, a, b], false), [0, 20, 20, 50, 100]);
        assert_eq!(pauses(&[a, b, a], true), [0, 0, 0], "what lay is given to another at once");
    }

    #[test]
    fn another_date_is_another_start() {
        let (mut refusals, mut job, worker, at) = (Refusals::default(), job(), WorkerId::new(), Monotonic::now());
        for _ in 0..3 {
            refusals.turn_over(&turn(&job, worker), false);
            refusals.found(&job, at);
        }
        assert!(refusals.found(&job, at).is_some());
        job.scheduled_at += Duration::from_millis(1);
        assert!(refusals.found(&job, at).is_none() && !refusals.by(job.id, worker), "it was retried");
        refusals.turn_over(&turn(&job, worker), false);
        assert!(refusals.was_tried(&job));
        job.scheduled_at += Duration::from_millis(1);
        assert!(!refusals.was_tried(&job) && refusals.found(&job, at).is_none());
    }

    #[test]
    fn what_is_old_is_forgotten() {
        let (mut refusals, job, at) = (Refusals::default(), job(), Monotonic::now());
        refusals.assigned_in(&job.lane());
        refusals.turn_over(&turn(&job, WorkerId::new()), false);
        refusals.age(at);
        assert!(refusals.was_tried(&job) && refusals.lanes().eq([&job.lane()]));
        refusals.age(at);
        assert!(!refusals.was_tried(&job) && refusals.lanes().next().is_none());
        refusals.turn_over(&turn(&job, WorkerId::new()), false);
        refusals.found(&job, at);
        assert_eq!(refusals.len(), 1);
        refusals.age(at + REMEMBERED_FOR);
        assert_eq!(refusals.len(), 0);
    }

    #[test]
    fn a_worker_that_is_new_ends_every_pause_and_more_refusals_than_can_be_remembered_pause_all_the_same() {
        let (mut refusals, mut at, worker, job) = (Refusals::default(), Monotonic::now(), WorkerId::new(), job());
        for _ in 0..8 {
            refusals.turn_over(&turn(&job, worker), false);
            at = refusals.found(&job, at).unwrap_or(at);
        }
        refusals.turn_over(&turn(&job, worker), false);
        assert!(refusals.found(&job, at).is_some_and(|until| until > at + Duration::from_secs(1)));
        refusals.somebody_is_new(at);
        assert!(refusals.found(&job, at).is_none());
        for _ in 0..REMEMBERED + 10 {
            let other = self::job();
            refusals.turn_over(&turn(&other, worker), false);
            refusals.found(&other, at);
        }
        let other = self::job();
        refusals.turn_over(&turn(&other, worker), false);
        assert!(refusals.len() == REMEMBERED && refusals.found(&other, at) == Some(at + WHEN_FORGOTTEN));
        assert!(turn(&job, WorkerId::new()).met_in == BTreeSet::new());
    }
}
