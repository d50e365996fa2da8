//! Past assignments, and the jobs that were refused: assigned and not started. A refused job goes to other workers first, and gets a
//! growing pause.
//!
//! A job was refused if a search finds it again with the due date at which it was assigned, because a retry or an interruption changes the
//! date. The worker may not have seen the insert yet, may not know the retry policy, may be unable to lock the job, or may be dead. The
//! release of a start without a reply keeps the date as well, and counts as a refusal.

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

/// Pause before a job that two or more workers have refused is assigned to another worker. The first refusal causes no pause.
const TRY_ANOTHER_AFTER: Duration = Duration::from_millis(20);
/// Pause before a job is assigned again to a worker that has refused it. Doubled each time.
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(50);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Maximum number of refused jobs in memory.
const REMEMBERED: usize = 10_000;
/// How long a refused job stays in memory after its pause.
const REMEMBERED_FOR: Duration = Duration::from_secs(300);
/// Pause of a refused job for which there is no room in memory.
const PAUSE_WITHOUT_ROOM: Duration = Duration::from_secs(1);
/// Maximum number of workers in memory for each refused job.
const WORKERS: usize = 1_000;

/// An assignment that has ended.
#[derive(Clone, Copy, Debug)]
struct Ended {
    worker: WorkerId,
    /// The due date of the job when it was assigned.
    due: Instant,
    /// Whether the worker did not answer.
    unanswered: bool,
}

/// A job that was assigned and not started.
#[derive(Clone, Debug)]
struct Refused {
    /// The due date at which it was refused.
    due: Instant,
    /// The workers that have refused it.
    by: HashSet<WorkerId>,
    /// Whether the last worker did not answer.
    unanswered: bool,
    /// How many times a worker refused it that had refused it before.
    repeated: u32,
    pause_ends_at: Monotonic,
}

/// Recent assignments that have ended, and the refused jobs among them.
#[derive(Clone, Debug, Default)]
pub(crate) struct PastAssignments {
    /// Assignments that ended since the last full scan, and those that ended between the two last full scans.
    ended: [HashMap<JobId, Ended>; 2],
    /// Lanes in which jobs were assigned in the same two periods.
    lanes: [HashSet<Lane>; 2],
    refused: HashMap<JobId, Refused>,
}

impl PastAssignments {
    /// Adds an assignment that has ended: the worker has answered it, has left, or has not answered in time (`unanswered`).
    pub(crate) fn add(&mut self, turn: &Turn, unanswered: bool) {
        let ended = turn.jobs.iter().filter_map(|(job, due)| Some((*job, Ended { worker: turn.worker, due: (*due)?, unanswered })));
        self.ended[0].extend(ended);
    }

    /// Removes jobs that a worker has returned. A job that was assigned ahead and returned was not refused.
    pub(crate) fn remove(&mut self, jobs: &[JobId]) {
        for job in jobs {
            self.ended.iter_mut().for_each(|ended| _ = ended.remove(job));
            self.refused.remove(job);
        }
    }

    /// Adds a lane in which jobs were assigned.
    pub(crate) fn add_lane(&mut self, lane: &Lane) {
        if !self.lanes[0].contains(lane) {
            self.lanes[0].insert(lane.clone());
        }
    }

    /// The lanes in which jobs were assigned since the full scan before the last one.
    pub(crate) fn recent_lanes(&self) -> impl Iterator<Item = &Lane> {
        self.lanes.iter().flatten()
    }

    /// Whether an assignment of this job at this date has ended recently. An announcement of the job is then outdated.
    pub(crate) fn contains(&self, job: &ScheduledJob) -> bool {
        self.ended.iter().any(|ended| ended.get(&job.id).is_some_and(|ended| ended.due == job.scheduled_at))
    }

    /// Returns when the pause of this job ends, if it has one. The job was found by a search and is not in flight: if it was assigned at
    /// this date before, it was refused.
    pub(crate) fn pause(&mut self, job: &ScheduledJob, at: Monotonic) -> Option<Monotonic> {
        let ended = self.ended.iter_mut().find_map(|ended| ended.remove(&job.id)).filter(|ended| ended.due == job.scheduled_at);
        if let Some(ended) = ended {
            if self.refused.len() >= REMEMBERED && !self.refused.contains_key(&job.id) {
                return Some(at + PAUSE_WITHOUT_ROOM);
            }
            self.refuse(job, ended, at);
        }
        let refused = self.refused.get(&job.id)?;
        if refused.due != job.scheduled_at {
            self.refused.remove(&job.id);
            return None;
        }
        (refused.pause_ends_at > at).then_some(refused.pause_ends_at)
    }

    fn refuse(&mut self, job: &ScheduledJob, ended: Ended, at: Monotonic) {
        let fresh = || Refused { due: job.scheduled_at, by: HashSet::new(), unanswered: false, repeated: 0, pause_ends_at: at };
        let refused = self.refused.entry(job.id).or_insert_with(fresh);
        if refused.due != job.scheduled_at {
            *refused = fresh();
        }
        refused.unanswered = ended.unanswered;
        let is_first = refused.by.is_empty();
        let is_another = refused.by.len() < WORKERS && refused.by.insert(ended.worker);
        if is_another || ended.unanswered {
            // After the first refusal the insert may just have been invisible. A worker that does not answer has not judged the job.
            refused.pause_ends_at = if is_first || ended.unanswered { at } else { at + TRY_ANOTHER_AFTER };
        } else {
            refused.repeated += 1;
            refused.pause_ends_at = at + (TRY_AGAIN_AFTER * 2_u32.saturating_pow(refused.repeated.min(16) - 1)).min(LONGEST_PAUSE);
            if refused.pause_ends_at - at >= LONGEST_PAUSE / 2 {
                tracing::warn!(job.id = %job.id, job.group = job.group, job.class = job.class, "a job is due, but no worker starts it; the logs of the workers contain the reason");
            }
        }
    }

    /// Ends all pauses: a new worker may start the refused jobs.
    pub(crate) fn end_pauses(&mut self, at: Monotonic) {
        self.refused.values_mut().for_each(|refused| refused.pause_ends_at = refused.pause_ends_at.min(at));
    }

    /// Whether a worker has refused this job at its present date.
    pub(crate) fn was_refused(&self, job: &ScheduledJob) -> bool {
        self.refused.get(&job.id).is_some_and(|refused| refused.due == job.scheduled_at)
    }

    /// Whether this worker has refused this job.
    pub(crate) fn was_refused_by(&self, job: JobId, worker: WorkerId) -> bool {
        self.refused.get(&job).is_some_and(|refused| refused.by.contains(&worker))
    }

    /// Whether the last worker did not answer the assignment of this job.
    pub(crate) fn was_unanswered(&self, job: JobId) -> bool {
        self.refused.get(&job).is_some_and(|refused| refused.unanswered)
    }

    /// Number of refused jobs in memory.
    pub(crate) fn refused_count(&self) -> usize {
        self.refused.len()
    }

    /// Drops old entries. Called by each full scan.
    pub(crate) fn drop_old(&mut self, at: Monotonic) {
        self.ended.swap(0, 1);
        self.ended[0].clear();
        self.lanes.swap(0, 1);
        self.lanes[0].clear();
        self.refused.retain(|_, refused| at.saturating_duration_since(refused.pause_ends_at) < REMEMBERED_FOR);
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

    /// The pauses in milliseconds after each of these workers did not start the job.
    fn pauses(workers: &[WorkerId], unanswered: bool) -> Vec<u128> {
        let (mut past_assignments, job, mut at) = (PastAssignments::default(), job(), Monotonic::now());
        let mut refused = |worker: &WorkerId| {
            past_assignments.add(&turn(&job, *worker), unanswered);
            let until = past_assignments.pause(&job, at).unwrap_or(at);
            let pause = (until - at).as_millis();
            assert!(past_assignments.was_refused_by(job.id, *worker) && past_assignments.was_unanswered(job.id) == unanswered);
            assert_eq!(past_assignments.pause(&job, at).is_some(), pause > 0, "it is no refusal to be found twice");
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
            past_assignments.add(&turn(&job, worker), false);
            past_assignments.pause(&job, at);
        }
        assert!(past_assignments.pause(&job, at).is_some());
        job.scheduled_at += Duration::from_millis(1);
        assert!(past_assignments.pause(&job, at).is_none() && !past_assignments.was_refused_by(job.id, worker), "it was retried");
        past_assignments.add(&turn(&job, worker), false);
        assert!(past_assignments.contains(&job));
        job.scheduled_at += Duration::from_millis(1);
        assert!(!past_assignments.contains(&job) && past_assignments.pause(&job, at).is_none());
    }

    #[test]
    fn what_is_old_is_forgotten() {
        let (mut past_assignments, job, at) = (PastAssignments::default(), job(), Monotonic::now());
        past_assignments.add_lane(&job.lane());
        past_assignments.add(&turn(&job, WorkerId::new()), false);
        past_assignments.drop_old(at);
        assert!(past_assignments.contains(&job) && past_assignments.recent_lanes().eq([&job.lane()]));
        past_assignments.drop_old(at);
        assert!(!past_assignments.contains(&job) && past_assignments.recent_lanes().next().is_none());
        past_assignments.add(&turn(&job, WorkerId::new()), false);
        past_assignments.pause(&job, at);
        assert_eq!(past_assignments.refused_count(), 1);
        past_assignments.drop_old(at + REMEMBERED_FOR);
        assert_eq!(past_assignments.refused_count(), 0);
    }

    #[test]
    fn a_worker_that_is_new_ends_every_pause_and_more_refusals_than_can_be_remembered_pause_all_the_same() {
        let (mut past_assignments, mut at, worker, job) = (PastAssignments::default(), Monotonic::now(), WorkerId::new(), job());
        for _ in 0..8 {
            past_assignments.add(&turn(&job, worker), false);
            at = past_assignments.pause(&job, at).unwrap_or(at);
        }
        past_assignments.add(&turn(&job, worker), false);
        assert!(past_assignments.pause(&job, at).is_some_and(|until| until > at + Duration::from_secs(1)));
        past_assignments.end_pauses(at);
        assert!(past_assignments.pause(&job, at).is_none());
        for _ in 0..REMEMBERED + 10 {
            let other = self::job();
            past_assignments.add(&turn(&other, worker), false);
            past_assignments.pause(&other, at);
        }
        let other = self::job();
        past_assignments.add(&turn(&other, worker), false);
        assert!(past_assignments.refused_count() == REMEMBERED && past_assignments.pause(&other, at) == Some(at + PAUSE_WITHOUT_ROOM));
        assert!(turn(&job, WorkerId::new()).skipped_in == BTreeSet::new());
    }
}
