//! Refused jobs: assigned and not started. A refused job goes to other workers first, and gets a growing pause.
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
    store::ScheduledJob,
};

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

/// The refused jobs in memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Refusals(HashMap<JobId, Refused>);

impl Refusals {
    /// Returns when the pause of this job ends, if it has one. `refused`: this worker has just refused it, perhaps without an answer.
    pub(super) fn pause(&mut self, job: &ScheduledJob, refused: Option<(WorkerId, bool)>, at: Monotonic) -> Option<Monotonic> {
        if let Some((worker, unanswered)) = refused {
            if self.0.len() >= REMEMBERED && !self.0.contains_key(&job.id) {
                return Some(at + PAUSE_WITHOUT_ROOM);
            }
            self.refuse(job, worker, unanswered, at);
        }
        let refused = self.0.get(&job.id)?;
        if refused.due != job.scheduled_at {
            self.0.remove(&job.id);
            return None;
        }
        (refused.pause_ends_at > at).then_some(refused.pause_ends_at)
    }

    fn refuse(&mut self, job: &ScheduledJob, worker: WorkerId, unanswered: bool, at: Monotonic) {
        let fresh = || Refused { due: job.scheduled_at, by: HashSet::new(), unanswered: false, repeated: 0, pause_ends_at: at };
        let refused = self.0.entry(job.id).or_insert_with(fresh);
        if refused.due != job.scheduled_at {
            *refused = fresh();
        }
        refused.unanswered = unanswered;
        let is_first = refused.by.is_empty();
        let is_another = refused.by.len() < WORKERS && refused.by.insert(worker);
        if is_another || unanswered {
            // After the first refusal the insert may just have been invisible. A worker that does not answer has not judged the job.
            refused.pause_ends_at = if is_first || unanswered { at } else { at + TRY_ANOTHER_AFTER };
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
        self.0.values_mut().for_each(|refused| refused.pause_ends_at = refused.pause_ends_at.min(at));
    }

    /// Whether a worker has refused this job at its present date.
    pub(crate) fn was_refused(&self, job: &ScheduledJob) -> bool {
        self.0.get(&job.id).is_some_and(|refused| refused.due == job.scheduled_at)
    }

    /// Whether the answers below may be true for this job.
    pub(crate) fn knows(&self, job: JobId) -> bool {
        self.0.contains_key(&job)
    }

    /// Whether this worker has refused this job.
    pub(crate) fn was_refused_by(&self, job: JobId, worker: WorkerId) -> bool {
        self.0.get(&job).is_some_and(|refused| refused.by.contains(&worker))
    }

    /// Whether the last worker did not answer the assignment of this job.
    pub(crate) fn was_unanswered(&self, job: JobId) -> bool {
        self.0.get(&job).is_some_and(|refused| refused.unanswered)
    }

    /// Their number.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Removes a job that was returned.
    pub(super) fn remove(&mut self, job: JobId) {
        self.0.remove(&job);
    }

    /// Drops the jobs whose pause has ended long ago.
    pub(super) fn drop_old(&mut self, at: Monotonic) {
        self.0.retain(|_, refused| at.saturating_duration_since(refused.pause_ends_at) < REMEMBERED_FOR);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leader::book::{
        Book, Whereabouts,
        tests::{found, refuse},
    };

    fn job() -> ScheduledJob {
        found(JobId::new(), 0)
    }

    /// Returns when the pause of the job ends, if it has one.
    fn refused(book: &mut Book, job: &ScheduledJob, worker: WorkerId, at: Monotonic) -> Option<Monotonic> {
        pause_in(refuse(book, job, worker, false, at))
    }

    fn pause_in(whereabouts: Whereabouts) -> Option<Monotonic> {
        if let Whereabouts::PausedUntil(until) = whereabouts { Some(until) } else { None }
    }

    /// The pauses in milliseconds after each of these workers did not start the job.
    fn pauses(workers: &[WorkerId], unanswered: bool) -> Vec<u128> {
        let (mut book, job, mut at) = (Book::default(), job(), Monotonic::now());
        let mut refused = |worker: &WorkerId| {
            let until = pause_in(refuse(&mut book, &job, *worker, unanswered, at)).unwrap_or(at);
            let pause = (until - at).as_millis();
            assert!(book.refusals.was_refused_by(job.id, *worker) && book.refusals.was_unanswered(job.id) == unanswered);
            assert_eq!(pause_in(book.find(&job, at)).is_some(), pause > 0, "it is no refusal to be found twice");
            at = until;
            pause
        };
        workers.iter().map(&mut refused).collect()
    }

    #[test]
    fn a_job_that_no_worker_starts_is_left_alone_for_a_growing_while() {
        let (a, b, c) = (WorkerId::new(), WorkerId::new(), WorkerId::new());
        assert_eq!(pauses(&[a, a, a, a, a], false), [0, 50, 100, 200, 400]);
        assert_eq!(pauses(&[a; 30], false).last(), Some(&60_000));
        assert_eq!(pauses(&[a, b, c, a, b], false), [0, 20, 20, 50, 100]);
        assert_eq!(pauses(&[a, b, a], true), [0, 0, 0], "what unanswered is given to another at once");
    }

    #[test]
    fn another_date_is_another_start() {
        let (mut book, mut job, worker, at) = (Book::default(), job(), WorkerId::new(), Monotonic::now());
        (0..3).for_each(|_| _ = refused(&mut book, &job, worker, at));
        assert!(pause_in(book.find(&job, at)).is_some());
        job.scheduled_at += Duration::from_millis(1);
        assert_eq!(book.find(&job, at), Whereabouts::Waiting);
        assert!(!book.refusals.was_refused_by(job.id, worker), "it was retried");
    }

    #[test]
    fn what_is_old_or_returned_is_forgotten() {
        let (mut book, job, worker, at) = (Book::default(), job(), WorkerId::new(), Monotonic::now());
        refused(&mut book, &job, worker, at);
        book.drop_old(at);
        assert!(book.refusals.was_refused(&job));
        book.drop_old(at + REMEMBERED_FOR);
        assert_eq!(book.refusals.len(), 0);
        refused(&mut book, &job, worker, at);
        book.returned(worker, &[job.id]);
        assert_eq!(book.refusals.len(), 0);
    }

    #[test]
    fn a_worker_that_is_new_ends_every_pause_and_more_refusals_than_can_be_remembered_pause_all_the_same() {
        let (mut book, mut at, worker, job) = (Book::default(), Monotonic::now(), WorkerId::new(), job());
        (0..8).for_each(|_| at = refused(&mut book, &job, worker, at).unwrap_or(at));
        assert!(refused(&mut book, &job, worker, at).is_some_and(|until| until > at + Duration::from_secs(1)));
        book.refusals.end_pauses(at);
        assert_eq!(book.find(&job, at), Whereabouts::Waiting);
        (0..REMEMBERED + 10).for_each(|_| _ = refused(&mut book, &self::job(), worker, at));
        assert!(book.refusals.len() == REMEMBERED);
        assert_eq!(refused(&mut book, &self::job(), worker, at), Some(at + PAUSE_WITHOUT_ROOM));
    }
}
