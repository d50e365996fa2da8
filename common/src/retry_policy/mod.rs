//! Retry policies: pure functions that decide when a failed job is retried. They are stored as `{class, parameters}`.
//!
//! An enqueuer chooses the policy of a job. The worker calls it after each failure. The worker also calls it before
//! each start and stores the verdict for a crash, so that a cleaner can end the jobs of a dead worker without any policy
//! code. The policies and their names come from the PHP Recruiter;
//! caps, jitter and the error classes of programs are new. A policy has no access to a clock, a database or random
//! numbers: the same history gives the same decision, including jitter.
//!
//! | policy | a failed job is retried | otherwise archived as |
//! |---|---|---|
//! | [`DoNotDoItAgain`] | never | `not-scheduled-by-retry-policy` |
//! | [`RetryManyTimes`] | n times, after a constant wait | `tried-too-many-times` |
//! | [`RetryForever`] | always, after a constant wait | |
//! | [`ExponentialBackoff`] | n times, after a wait that doubles | `tried-too-many-times` |
//! | [`TimeTable`] | until it reaches an age, after a wait that depends on its age | `tried-too-many-times` |
//! | [`RetriableExceptionFilter`] | as another policy decides, for listed error classes | `non-retriable-exception` |
//! | [`SelectByException`] | as the policy for its error class decides | `non-retriable-exception` |

use std::{fmt, sync::Arc, time::Duration};

use bson::Document;

use crate::{
    base::{Failure, Instant, JobId},
    job::{Execution, FinishReason, IfWorkerDies, Job, StoredPolicy},
};

mod built_in;
mod do_not_do_it_again;
mod error_classes;
mod exponential_backoff;
mod parameters;
mod registry;
mod retriable_exception_filter;
mod retry_forever;
mod retry_many_times;
mod select_by_exception;
mod time_table;

pub use self::do_not_do_it_again::DoNotDoItAgain;
pub use self::exponential_backoff::ExponentialBackoff;
pub use self::parameters::{InvalidPolicy, LONGEST_WAIT, Parameters};
pub use self::registry::RetryPolicies;
pub use self::retriable_exception_filter::RetriableExceptionFilter;
pub use self::retry_forever::RetryForever;
pub use self::retry_many_times::RetryManyTimes;
pub use self::select_by_exception::SelectByException;
pub use self::time_table::TimeTable;

/// The input of a policy: a job and the executions that ended before the current one.
#[derive(Clone, Debug)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub struct History<'a> {
    /// The id of the job, from which jitter is computed.
    pub job: JobId,
    /// When the job was enqueued.
    pub created_at: Instant,
    /// Number of counted starts, including the current one: 1 in the first run. Interrupted, snoozed and released starts
    /// do not count.
    pub attempts: u32,
    /// Number of earlier starts that ended with the death of their worker. The job may be the cause.
    pub deaths: u32,
    /// The group of the job.
    pub group: &'a str,
    /// The job's tags.
    pub tags: &'a [String],
    /// Earlier executions, oldest first. A long history contains only the first and the newest ones.
    pub executions: &'a [Execution],
}

/// The decision for a job that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub enum Decision {
    /// Retry it this long after the failure.
    RetryAfter(Duration),
    /// Do not retry it; archive it with this reason.
    Archive(FinishReason),
}

impl Job {
    /// The input for a retry policy in the current start of the job.
    pub fn history(&self) -> History<'_> {
        History {
            job: self.id,
            created_at: self.created_at,
            attempts: self.attempts.saturating_sub(self.interruptions),
            deaths: self.deaths,
            group: self.settings.group(),
            tags: &self.settings.tags,
            executions: &self.executions,
        }
    }
}

impl From<Decision> for IfWorkerDies {
    /// The verdict for a crash. If the policy does not retry the job, the job is archived as [`FinishReason::WORKER_DIED`]. The reason that
    /// the policy gives for an ordinary failure is not used. A delay longer than [`LONGEST_WAIT`] is cut to it.
    fn from(decision: Decision) -> Self {
        match decision {
            Decision::RetryAfter(delay) => Self::RetryAfterMs(i64::try_from(delay.min(LONGEST_WAIT).as_millis()).unwrap_or(i64::MAX)),
            Decision::Archive(_) => Self::Archive(FinishReason::WORKER_DIED),
        }
    }
}

/// Decides when a failed job is retried.
///
/// An implementation is validated when it is created. It decides without side effects.
pub trait RetryPolicy: fmt::Debug + Send + Sync {
    /// The class name under which the policy is stored and registered.
    fn class(&self) -> &str;

    /// The parameters stored with the class. The policy can be decoded from them.
    fn parameters(&self) -> Document;

    /// Decides about a job that failed at `failed_at`.
    fn decide(&self, job: &History<'_>, failure: &Failure, failed_at: Instant) -> Decision;

    /// Whether every failure of the current attempt, now or later, archives the job.
    fn is_last_attempt(&self, job: &History<'_>, now: Instant) -> bool;
}

/// Allows a shared policy wherever a policy is expected.
impl<P: RetryPolicy + ?Sized> RetryPolicy for Arc<P> {
    fn class(&self) -> &str {
        (**self).class()
    }

    fn parameters(&self) -> Document {
        (**self).parameters()
    }

    fn decide(&self, job: &History<'_>, failure: &Failure, failed_at: Instant) -> Decision {
        (**self).decide(job, failure, failed_at)
    }

    fn is_last_attempt(&self, job: &History<'_>, now: Instant) -> bool {
        (**self).is_last_attempt(job, now)
    }
}

impl<P: RetryPolicy + ?Sized> From<&P> for StoredPolicy {
    fn from(policy: &P) -> Self {
        Self { class: policy.class().into(), parameters: policy.parameters().into() }
    }
}

#[cfg(test)]
mod testing {
    //! Shared helpers for the tests of all policies.

    pub(super) use std::time::Duration;

    pub(super) use bson::Bson;
    use bson::oid::ObjectId;

    use super::*;

    /// A job in its `attempts`-th run, always the same job.
    pub(super) fn job(attempts: u32) -> History<'static> {
        History {
            job: ObjectId::from_bytes([7; 12]).into(),
            created_at: Instant::UNIX_EPOCH,
            attempts,
            deaths: 0,
            group: "generic",
            tags: &[],
            executions: &[],
        }
    }

    pub(super) fn failure(class: &str) -> Failure {
        Failure::new(class, "it did not work")
    }

    /// Checks that a job that fails at this age with this error class is retried after this wait, or archived with this
    /// reason.
    #[track_caller]
    pub(super) fn check(policy: &dyn RetryPolicy, job: &History<'_>, class: &str, age: Duration, expected: Result<Duration, FinishReason>) {
        let decision = policy.decide(job, &failure(class), job.created_at + age);
        assert_eq!(
            decision,
            expected.map_or_else(Decision::Archive, Decision::RetryAfter),
            "{policy:?}, attempt {}, {class}, {age:?}",
            job.attempts
        );
    }

    pub(super) fn decoded(class: &str, parameters: Bson) -> Result<Arc<dyn RetryPolicy>, InvalidPolicy> {
        RetryPolicies::default().decode(&StoredPolicy { class: class.into(), parameters })
    }

    /// Checks that a policy is unchanged after it is stored, decoded and stored again.
    #[track_caller]
    pub(super) fn survives(class: &str, parameters: Bson) {
        let policy = decoded(class, parameters.clone()).expect("valid");
        assert_eq!(StoredPolicy::from(&policy), StoredPolicy { class: class.into(), parameters });
    }

    #[track_caller]
    pub(super) fn refused(class: &str, parameters: Bson, message: &str) {
        let refused = decoded(class, parameters).expect_err("nonsense").to_string();
        assert!(refused.contains(message), "{refused:?} does not contain {message:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::{testing::*, *};

    /// For each built-in policy, over attempts and ages: `is_last_attempt` is true if and only if every failure
    /// archives the job.
    #[test]
    fn the_last_attempt_is_the_one_after_which_every_failure_archives() {
        let classes = ["timeout", "exit:1", "panic"];
        let minute = Duration::from_secs(60);
        let check = |policy: Result<Arc<dyn RetryPolicy>, InvalidPolicy>| {
            let policy = policy.expect("valid");
            for (attempts, age) in
                (0..6).chain([u32::MAX]).flat_map(|attempts| [0, 299, 300, 86_399, 86_400, 1 << 33].map(|age| (attempts, age)))
            {
                let (job, now) = (job(attempts), Instant::UNIX_EPOCH + Duration::from_secs(age));
                let archives = |class: &&str| matches!(policy.decide(&job, &failure(class), now), Decision::Archive(_));
                assert_eq!(policy.is_last_attempt(&job, now), classes.iter().all(archives), "{policy:?}, attempt {attempts}, {age} s");
            }
        };
        check(Ok(Arc::new(DoNotDoItAgain)));
        check(RetryManyTimes::new(3, minute).map(|policy| Arc::new(policy) as _));
        check(RetryManyTimes::new(u32::MAX, Duration::ZERO).map(|policy| Arc::new(policy) as _));
        check(RetryForever::new(minute).map(|policy| Arc::new(policy) as _));
        check(ExponentialBackoff::new(4, minute).and_then(|policy| policy.with_jitter(1.0)).map(|policy| Arc::new(policy) as _));
        check(Ok(Arc::new(TimeTable::default())));
        check(RetriableExceptionFilter::new(TimeTable::default(), ["exit:*"]).map(|policy| Arc::new(policy) as _));
        let select = RetryManyTimes::new(2, minute).and_then(|policy| SelectByException::when(["timeout"], policy));
        check(select.and_then(|select| select.or_when(["panic"], TimeTable::default())).map(|policy| Arc::new(policy) as _));
    }
}
