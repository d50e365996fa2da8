//! Refused jobs: jobs that were assigned and not started. Each gets a growing pause, and other workers are tried first.
//!
//! A job was not started if a search finds it again with the due date at which it was assigned: a start that ends in a retry or an
//! interruption changes the date. The worker may not have seen the insert yet, may not know the retry policy, may be unable to lock the job,
//! or may be dead.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::{JobId, WorkerId},
    instant::Instant,
    store::{Lane, ScheduledJob},
};

use super::in_flight::Turn;

/// Pause before a refused job is assigned to another worker.
const TRY_ANOTHER_AFTER: Duration = Duration::from_millis(20);
/// Pause before it is assigned again to a worker that refused it. Doubled each time.
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(50);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Limit of the refused jobs in memory, and how long they stay there after their pause.
const REMEMBERED: usize = 10_000;
const REMEMBERED_FOR: Duration = Duration::from_secs(300);
/// Pause of a job for which there is no room in memory.
const WHEN_FORGOTTEN: Duration = Duration::from_secs(1);
/// Limit of the workers in memory for each refused job.
const WORKERS: usize = 1_000;

/// An assignment that is over.
#[derive(Clone, Copy, Debug)]
struct Tried {
    worker: WorkerId,
    due: Instant,
    /// Whether the worker did not answer.
    unanswered: bool,
}

/// A job that was not started.
#[derive(Clone, Debug)]
struct Refused {
    due: Instant,
    by: HashSet<WorkerId>,
    /// Whether the last worker did not answer.
    unanswered: bool,
    /// How often it was refused by a worker that had refused it before.
    repeats: u32,
    until: Monotonic,
}

/// The recruiter's memory of assignments that are over and may have come to nothing.
#[derive(Clone, Debug, Default)]
pub(crate) struct PastAssignments {
    /// Assignments that ended since the last full scan, and those since the scan before.
    tried: [HashMap<JobId, Tried>; 2],
    /// The lanes of these jobs.
    lanes: [HashSet<Lane>; 2],
    refused: HashMap<JobId, Refused>,
}

impl PastAssignments {
    /// A worker has answered an assignment, or has not answered for too long.
    pub(crate) fn turn_over(&mut self, turn: &Turn, unanswered: bool) {
        let tried = turn.jobs.iter().filter_map(|(job, due)| Some((*job, Tried { worker: turn.worker, due: (*due)?, unanswered })));
        self.tried[0].extend(tried);
    }

    /// Workers have returned jobs that were assigned ahead, which is no refusal.
    pub(crate) fn returned(&mut self, jobs: &[JobId]) {
        for job in jobs {
            self.tried.iter_mut().for_each(|tried| _ = tried.remove(job));
            self.refused.remove(job);
        }
    }

    /// Jobs of this lane were assigned.
    pub(crate) fn assigned_in(&mut self, lane: &Lane) {
        if !self.lanes[0].contains(lane) {
            self.lanes[0].insert(lane.clone());
        }
    }

    /// The lanes in which jobs were assigned lately.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = &Lane> {
        self.lanes.iter().flatten()
    }

    /// Whether an assignment of this job has ended lately. Then its announcement is outdated.
    pub(crate) fn was_tried(&self, job: &ScheduledJob) -> bool {
        self.tried.iter().any(|tried| tried.get(&job.id).is_some_and(|tried| tried.due == job.scheduled_at))
    }

    /// A search has found this job, which is not in flight. Returns the end of its pause, if it has one.
    pub(crate) fn found(&mut self, job: &ScheduledJob, at: Monotonic) -> Option<Monotonic> {
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

    fn refuse(&mut self, job: &ScheduledJob, tried: Tried, at: Monotonic) {
        let fresh = || Refused { due: job.scheduled_at, by: HashSet::new(), unanswered: false, repeats: 0, until: at };
        let refused = self.refused.entry(job.id).or_insert_with(fresh);
        if refused.due != job.scheduled_at {
            *refused = fresh();
        }
        refused.unanswered = tried.unanswered;
        let is_first = refused.by.is_empty();
        let is_another = refused.by.len() < WORKERS && refused.by.insert(tried.worker);
        if is_another || tried.unanswered {
            // The first refusal may only have been too early, and a worker that does not answer proves nothing about the job.
            refused.until = if is_first || tried.unanswered { at } else { at + TRY_ANOTHER_AFTER };
        } else {
            refused.repeats += 1;
            refused.until = at + (TRY_AGAIN_AFTER * 2_u32.saturating_pow(refused.repeats.min(16) - 1)).min(LONGEST_PAUSE);
            if refused.until - at >= LONGEST_PAUSE / 2 {
                tracing::warn!(job.id = %job.id, job.group = job.group, job.class = job.class, "a job is due, but no worker starts it; the log of the workers says why");
            }
        }
    }

    /// A new worker has registered, which may start the refused jobs: ends all pauses.
    pub(crate) fn worker_is_new(&mut self, at: Monotonic) {
        self.refused.values_mut().for_each(|refused| refused.until = refused.until.min(at));
    }

    /// Whether this worker has refused this job.
    pub(crate) fn by(&self, job: JobId, worker: WorkerId) -> bool {
        self.refused.get(&job).is_some_and(|refused| refused.by.contains(&worker))
    }

    /// Whether the last worker did not answer the assignment of this job.
    pub(crate) fn unanswered(&self, job: JobId) -> bool {
        self.refused.get(&job).is_some_and(|refused| refused.unanswered)
    }

    /// Number of refused jobs that a search may find.
    pub(crate) fn len(&self) -> usize {
        self.refused.len()
    }

    /// Drops old entries. Called by each full scan.
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

    fn job() -> ScheduledJob {
        ScheduledJob { id: JobId::new(), group: "g".into(), class: "c".into(), gate: None, priority: 5, scheduled_at: Instant::UNIX_EPOCH }
    }

    fn turn(job: &ScheduledJob, worker: WorkerId) -> Turn {
        let mut flight = InFlight::default();
        flight.begin(RoundId::new(), (worker, Channel(0)), vec![(job.id, Some(job.scheduled_at))], Monotonic::now());
        flight.end(worker).expect("just begun")
    }

    /// For how many milliseconds the job is left alone after each of these workers did not start it.
    fn pauses(workers: &[WorkerId], unanswered: bool) -> Vec<u128> {
        let (mut past_assignments, job, mut at) = (PastAssignments::default(), job(), Monotonic::now());
        let mut refused = |worker: &WorkerId| {
            past_assignments.turn_over(&turn(&job, *worker), unanswered);
            let until = past_assignments.found(&job, at).unwrap_or(at);
            let pause = (until - at).as_millis();
            assert!(past_assignments.by(job.id, *worker) && past_assignments.unanswered(job.id) == unanswered);
            assert_eq!(past_assignments.found(&job, at).is_some(), pause > 0, "it is no refusal to be found twice");
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
        assert_eq!(pauses(&[a, b, a], true), [0, 0, 0], "what unanswered is given to another at once");
    }

    #[test]
    fn another_date_is_another_start() {
        let (mut past_assignments, mut job, worker, at) = (PastAssignments::default(), job(), WorkerId::new(), Monotonic::now());
        for _ in 0..3 {
            past_assignments.turn_over(&turn(&job, worker), false);
            past_assignments.found(&job, at);
        }
        assert!(past_assignments.found(&job, at).is_some());
        job.scheduled_at += Duration::from_millis(1);
        assert!(past_assignments.found(&job, at).is_none() && !past_assignments.by(job.id, worker), "it was retried");
        past_assignments.turn_over(&turn(&job, worker), false);
        assert!(past_assignments.was_tried(&job));
        job.scheduled_at += Duration::from_millis(1);
        assert!(!past_assignments.was_tried(&job) && past_assignments.found(&job, at).is_none());
    }

    #[test]
    fn what_is_old_is_forgotten() {
        let (mut past_assignments, job, at) = (PastAssignments::default(), job(), Monotonic::now());
        past_assignments.assigned_in(&job.lane());
        past_assignments.turn_over(&turn(&job, WorkerId::new()), false);
        past_assignments.age(at);
        assert!(past_assignments.was_tried(&job) && past_assignments.lanes().eq([&job.lane()]));
        past_assignments.age(at);
        assert!(!past_assignments.was_tried(&job) && past_assignments.lanes().next().is_none());
        past_assignments.turn_over(&turn(&job, WorkerId::new()), false);
        past_assignments.found(&job, at);
        assert_eq!(past_assignments.len(), 1);
        past_assignments.age(at + REMEMBERED_FOR);
        assert_eq!(past_assignments.len(), 0);
    }

    #[test]
    fn a_worker_that_is_new_ends_every_pause_and_more_refusals_than_can_be_remembered_pause_all_the_same() {
        let (mut past_assignments, mut at, worker, job) = (PastAssignments::default(), Monotonic::now(), WorkerId::new(), job());
        for _ in 0..8 {
            past_assignments.turn_over(&turn(&job, worker), false);
            at = past_assignments.found(&job, at).unwrap_or(at);
        }
        past_assignments.turn_over(&turn(&job, worker), false);
        assert!(past_assignments.found(&job, at).is_some_and(|until| until > at + Duration::from_secs(1)));
        past_assignments.worker_is_new(at);
        assert!(past_assignments.found(&job, at).is_none());
        for _ in 0..REMEMBERED + 10 {
            let other = self::job();
            past_assignments.turn_over(&turn(&other, worker), false);
            past_assignments.found(&other, at);
        }
        let other = self::job();
        past_assignments.turn_over(&turn(&other, worker), false);
        assert!(past_assignments.len() == REMEMBERED && past_assignments.found(&other, at) == Some(at + WHEN_FORGOTTEN));
        assert!(turn(&job, WorkerId::new()).met_in == BTreeSet::new());
    }
}
