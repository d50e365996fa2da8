//! A job that this worker can start: read, of its classes and groups, with a policy that it knows.

use std::{cmp::Reverse, collections::HashMap, sync::Arc};

use chrono::TimeDelta;
use recruiter_common::{
    failure::Failure,
    ids::{JobId, StartId},
    instant::Instant,
    job::{Execution, FinishReason, IfWorkerDies, Job, JobState},
    retry_policy::Decision,
    store::{Conditions, Permit, Position, Start, ToStart, line_of_gate},
};

use crate::{engine::dependencies::Policy, panics::guarded};

/// A job that its enqueuer never sends again, and that is younger than this, is not searched in the archive. The jobs of a restored dump
/// are older.
const YOUNG: TimeDelta = TimeDelta::minutes(10);
/// Group and gate: jobs that have both in common pass permits on to each other.
pub(super) type PermitLane = (String, Option<String>);

/// A job that may be started.
pub(crate) struct Startable {
    job: Arc<Job>,
    policy: Policy,
    /// The policy's verdict for the case that this worker dies during this attempt.
    if_worker_dies: IfWorkerDies,
    /// The permit of a limited job.
    permit: Option<Permit>,
    /// The date of a job that is started before it.
    early: Option<Instant>,
    /// Its place among the jobs of this worker.
    position: Position,
}

impl Startable {
    pub(crate) fn new(job: Arc<Job>, policy: Policy, permit: Option<Permit>, died: &Failure, now: Instant) -> Self {
        let mut history = job.history();
        history.attempts += 1;
        let decision = policy.as_ref().ok().and_then(|policy| guarded(|| policy.decide(&history, died, now)).ok());
        let if_worker_dies = decision.unwrap_or(Decision::Archive(FinishReason::WORKER_DIED)).into();
        let position = (Reverse(job.settings.priority().get().into()), job.due().unwrap_or_default(), job.id);
        Self { job, policy, if_worker_dies, permit, early: None, position }
    }

    /// The same, to be started even before its date. The start repeats that date; for everything else the job is due at `now`.
    pub(crate) fn early(mut self, now: Instant) -> Self {
        if let Some(due) = self.job.due().filter(|due| *due > now) {
            self.early = Some(due);
            self.position.1 = now;
            Arc::make_mut(&mut self.job).state = JobState::Waiting { at: now };
        }
        self
    }

    pub(crate) fn job(&self) -> &Job {
        &self.job
    }

    pub(crate) fn id(&self) -> JobId {
        self.job.id
    }

    /// Its place among the jobs of this worker: its position in the order of all jobs, or what [`keep_order`](Self::keep_order) made of it.
    pub(super) fn position(&self) -> Position {
        self.position
    }

    /// Puts these jobs of one assignment into the order of the recruiter, which knows of ageing and weights. Each gets a place behind `last`,
    /// the last place of the assignments before, which is then its own: of the dates of two assignments the worker knows less than the
    /// recruiter. More urgent jobs overtake those of earlier assignments, except one that must come before an equally urgent one.
    pub(crate) fn keep_order(jobs: &mut [Self], assigned: &[JobId], last: &mut Instant) {
        let order: HashMap<JobId, usize> = assigned.iter().enumerate().map(|(index, job)| (*job, index)).collect();
        jobs.sort_by_key(|job| order.get(&job.id()).copied());
        for job in jobs.iter_mut() {
            *last += TimeDelta::nanoseconds(1);
            job.position.1 = *last;
        }
        let mut most_urgent = Reverse(i64::MIN);
        for job in jobs.iter_mut().rev() {
            most_urgent = most_urgent.min(job.position.0);
            job.position.0 = most_urgent;
        }
    }

    /// Whether it may be locked ahead. A job that others wait for, or that may no longer start later, may not; nor one that has permits.
    pub(super) fn may_be_locked_ahead(&self) -> bool {
        let Job { attempts, gate, unique, expires_at, bundle, .. } = self.job.as_ref();
        let is_limited_only_by_capacity = || self.waits_for_permits() && !self.is_in_line() && !self.has_interval();
        let is_plain = unique.is_none() && expires_at.is_none() && bundle.is_none() && self.early.is_none();
        let may_wait = (gate.is_none() && self.permit.is_none()) || is_limited_only_by_capacity();
        is_plain && may_wait && *attempts == 0 && matches!(self.if_worker_dies, IfWorkerDies::RetryAfterMs(_))
    }

    fn is_in_line(&self) -> bool {
        self.job.gate.as_deref().is_some_and(|gate| line_of_gate(gate).is_some())
    }

    fn has_interval(&self) -> bool {
        self.permit.as_ref().is_some_and(|permit| permit.between.is_some())
    }

    /// The group and the gate that its permits are for.
    pub(super) fn permit_lane(&self) -> PermitLane {
        (self.job.settings.group().to_owned(), self.job.gate.clone())
    }

    /// Whether it must get permits from another job before it can start.
    pub(super) fn waits_for_permits(&self) -> bool {
        self.permit.as_ref().is_some_and(|permit| permit.is_ahead && permit.names.is_empty())
    }

    /// Gets the permits of another job.
    pub(super) fn take_permits(&mut self, names: &[String]) {
        if let Some(permit) = &mut self.permit {
            permit.names = names.to_vec();
        }
    }

    /// The names of its permits, if it has any.
    pub(super) fn permits(&self) -> Option<&[String]> {
        self.permit.as_ref().map(|permit| permit.names.as_slice()).filter(|names| !names.is_empty())
    }

    /// The size of its document.
    pub(super) fn bytes(&self) -> usize {
        self.job.document.as_bytes().len()
    }

    /// Whether the document may be a copy of an archived job: its enqueuer may have sent it again, or an old dump may have been restored.
    pub(crate) fn can_be_resent(&self, now: Instant) -> bool {
        !self.job.is_sent_once || now - self.job.created_at > YOUNG
    }

    pub(crate) fn to_start(&self, now: Instant) -> ToStart {
        let Self { job, if_worker_dies, permit, early, .. } = self;
        let (due, if_worker_dies, permit) = (early.or(job.due()).unwrap_or(now), if_worker_dies.clone(), permit.clone());
        let conditions = Conditions::from(job.as_ref());
        ToStart {
            job: job.id,
            group: job.settings.group().to_owned(),
            attempts: job.attempts,
            due,
            if_worker_dies,
            permit,
            conditions: if early.is_some() { conditions.early() } else { conditions },
        }
    }

    /// The job as this start stores it.
    pub(crate) fn started(self, start: &Start) -> Started {
        let Self { mut job, policy, if_worker_dies, permit, .. } = self;
        // In a worker this is the only reference to the job, so nothing is copied.
        let started = Arc::make_mut(&mut job);
        let previous = started.last_execution.take().map(Arc::new);
        start.mark_started(started, if_worker_dies, permit.as_ref());
        Started { job, start: start.id, policy, previous }
    }
}

/// A job that was started.
pub(crate) struct Started {
    pub(crate) job: Arc<Job>,
    pub(crate) start: StartId,
    pub(crate) policy: Policy,
    /// The execution before this one.
    pub(crate) previous: Option<Arc<Execution>>,
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use bson::{Document, doc};
    use recruiter_common::{DoNotDoItAgain, RetryManyTimes, failure, retry_policy::RetryPolicy};

    use super::*;

    /// A job with these fields that runs at most once; granted this permit.
    pub(in crate::engine::held) fn limited(fields: Document, permit: Option<Permit>) -> Startable {
        limited_repeatable(fields, permit, Arc::new(DoNotDoItAgain))
    }

    /// The same, with this policy.
    pub(in crate::engine::held) fn limited_repeatable(fields: Document, permit: Option<Permit>, policy: Arc<dyn RetryPolicy>) -> Startable {
        Startable { permit, ..startable(fields, policy) }
    }

    pub(in crate::engine::held) fn startable(fields: Document, policy: Arc<dyn RetryPolicy>) -> Startable {
        let mut job = doc! {
            "_id": JobId::new(), "locked": false, "group": "generic", "workable": { "class": "test" }, "scheduled_at": bson::DateTime::now(),
        };
        job.extend(fields);
        let died = Failure::new(failure::WORKER_DIED, "the worker died");
        Startable::new(Arc::new(Job::try_from(job).expect("a job")), Ok(policy), None, &died, bson::DateTime::now().to_chrono())
    }

    #[test]
    fn jobs_start_in_the_order_of_their_assignments_and_more_urgent_ones_overtake_those_of_another() {
        let job = |priority: i32| startable(doc! { "priority": priority }, Arc::new(DoNotDoItAgain));
        let mut last = bson::DateTime::now().to_chrono();
        let mut assign = |mut jobs: Vec<Startable>, order: &[usize]| {
            let assigned: Vec<JobId> = order.iter().map(|index| jobs[*index].id()).collect();
            Startable::keep_order(&mut jobs, &assigned, &mut last);
            assert_eq!(jobs.iter().map(Startable::id).collect::<Vec<_>>(), assigned);
            assert!(jobs.is_sorted_by_key(Startable::position));
            jobs
        };
        let oldest = job(5);
        let aged_second = assign(vec![job(5), job(9), job(5), job(0)], &[1, 3, 0, 2]);
        let next = assign(vec![oldest, job(9), job(0), job(5)], &[2, 1, 0, 3]);
        let mut all: Vec<&Startable> = aged_second.iter().chain(&next).collect();
        all.sort_by_key(|job| job.position());
        // A job of low priority comes before the urgent ones behind it in its assignment, and the oldest stays where the recruiter put it.
        let expected = [&aged_second[0], &next[0], &next[1], &aged_second[1], &aged_second[2], &aged_second[3], &next[2], &next[3]];
        assert_eq!(all.iter().map(|job| job.id()).collect::<Vec<_>>(), expected.map(Startable::id));
    }

    #[test]
    fn only_plain_jobs_that_may_be_repeated_are_locked_ahead_and_only_at_their_first_start() {
        let again = |times: u32| Arc::new(RetryManyTimes::new(times, Duration::ZERO).expect("a policy"));
        let may = |fields: Document| startable(fields, again(3)).may_be_locked_ahead();
        assert!(may(doc! {}) && startable(doc! {}, again(1)).may_be_locked_ahead());
        assert!(!startable(doc! {}, Arc::new(DoNotDoItAgain)).may_be_locked_ahead());
        let tomorrow = bson::DateTime::from_chrono(bson::DateTime::now().to_chrono() + TimeDelta::days(1));
        for fields in [
            doc! { "attempts": 1 },
            doc! { "gate": "printer" },
            doc! { "unique": "key" },
            doc! { "expires_at": tomorrow },
            doc! { "workable": { "class": "test", "items": [{}, {}] } },
        ] {
            assert!(!may(fields.clone()), "{fields}");
        }
        let later = startable(doc! { "scheduled_at": tomorrow }, again(3));
        assert!(!later.early(bson::DateTime::now().to_chrono()).may_be_locked_ahead());
    }
}
