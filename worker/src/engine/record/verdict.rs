//! The verdict on an ended attempt, or on one ended item of a bundle. A pure function of the end and the job's history.

use std::time::Duration;

use bson::{Bson, Document};
use recruiter_common::{
    failure::{self, Failure},
    instant::{Instant, later},
    job::FinishReason,
    retry_policy::{Decision, History, RetryPolicy},
};

use crate::{
    cancellation::Cancellation,
    outcome::{Done, NotDone},
    panics::guarded,
};

/// The delay of a snooze when neither the workable nor the policy gives one.
const SNOOZED_FOR: Duration = Duration::from_secs(30);
/// The delay of a job that could not be started because the machine lacks a resource.
const RELEASED_FOR: Duration = Duration::from_secs(2);

/// What is recorded about an ended attempt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Verdict {
    /// The job goes to the archive.
    Archive { why: FinishReason, failure: Option<Failure>, result: Option<Bson> },
    /// The job goes to the archive as done, and these jobs take its place.
    Become { jobs: Vec<Document> },
    /// The job runs again at `at`.
    Retry { failure: Failure, at: Instant, again: Again },
    /// The job is unlocked as it was before this start, and is due at `at`: its workable did not run.
    Release { failure: Failure, at: Instant },
    /// Nothing is recorded: this worker was declared dead, and the claim is lost.
    ClaimLost,
}

/// Why a job runs again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Again {
    Failed,
    Snoozed,
    /// Its worker stops.
    Interrupted,
}

impl Again {
    /// Whether the attempt counts against the retry policy.
    pub(crate) fn counts(self) -> bool {
        self == Self::Failed
    }
}

impl Verdict {
    /// The same with the delay that the execution has asked for, if it failed and runs again.
    pub(crate) fn put_off(self, delay: Option<Duration>, now: Instant) -> Self {
        match (self, delay) {
            (Self::Retry { failure, again: Again::Failed, .. }, Some(delay)) => {
                Self::Retry { failure, at: later(now, delay), again: Again::Failed }
            }
            (verdict, _) => verdict,
        }
    }

    /// The arguments of a job's hooks: the failure, if there is one, and whether it is the last. `None` when the job has neither
    /// succeeded nor failed.
    pub(crate) fn for_hooks(&self) -> Option<(Option<&Failure>, bool)> {
        match self {
            Self::Archive { failure: None, .. } => Some((None, false)),
            Self::Archive { why, failure, .. } => Some((failure.as_ref(), true)).filter(|_| *why != FinishReason::CANCELLED),
            Self::Retry { failure, again, .. } => Some((Some(failure), false)).filter(|_| again.counts()),
            Self::Become { .. } | Self::Release { .. } | Self::ClaimLost => None,
        }
    }
}

/// The verdict on an attempt, or on one item of a bundle. A policy that panics ends the job as malformed.
pub(crate) fn verdict(
    history: &History<'_>,
    policy: &dyn RetryPolicy,
    ended: Result<Done, NotDone>,
    cancelled: Option<Cancellation>,
    now: Instant,
) -> Verdict {
    let archive = |why: FinishReason, failure: Failure| Verdict::Archive { why, failure: Some(failure), result: None };
    let later = |delay: Duration| later(now, delay);
    let by_policy = |failure: Failure| match policy.decide(history, &failure, now) {
        Decision::RetryAfter(delay) => Verdict::Retry { failure, at: later(delay), again: Again::Failed },
        Decision::Archive(why) => archive(why, failure),
    };
    let decided = guarded(|| match (ended, cancelled) {
        (_, Some(Cancellation::ClaimLost)) => Verdict::ClaimLost,
        (Ok(done), _) => Verdict::Archive { why: FinishReason::DONE, failure: None, result: done.result },
        (Err(NotDone::GiveUp(failure)), _) => archive(FinishReason::GAVE_UP, failure),
        (Err(not_done), Some(Cancellation::Requested)) => {
            archive(FinishReason::CANCELLED, Failure { class: failure::CANCELLED.into(), ..not_done.failure().clone() })
        }
        (Err(NotDone::NoResources(failure)), _) => Verdict::Release { failure, at: later(RELEASED_FOR) },
        (Err(not_done), Some(Cancellation::WorkerStopping)) => {
            let failure = Failure { class: failure::INTERRUPTED.into(), ..not_done.failure().clone() };
            match policy.decide(&uncounted(history), &failure, now) {
                Decision::RetryAfter(_) => Verdict::Retry { failure, at: now, again: Again::Interrupted },
                Decision::Archive(_) => archive(FinishReason::INTERRUPTED, failure),
            }
        }
        (Err(not_done), Some(Cancellation::MemoryLimit)) => {
            by_policy(Failure { class: failure::MEMORY_LIMIT.into(), ..not_done.failure().clone() })
        }
        (Err(NotDone::Snooze { after, reason, .. }), _) => {
            let delay = || match policy.decide(&uncounted(history), &reason, now) {
                Decision::RetryAfter(delay) => delay,
                Decision::Archive(_) => SNOOZED_FOR,
            };
            let at = later(after.unwrap_or_else(delay));
            Verdict::Retry { failure: reason, at, again: Again::Snoozed }
        }
        (Err(NotDone::Failed(failure) | NotDone::Stopped(failure)), _) => by_policy(failure),
        // The attempt makes a job become others. Only the items of bundles get here.
        (Err(NotDone::ContinueAs(_)), _) => {
            archive(FinishReason::GAVE_UP, Failure::new("continuation", "an item of a bundle cannot become other jobs"))
        }
    });
    decided.unwrap_or_else(|failure| archive(FinishReason::MALFORMED, failure))
}

/// The history as if the present start did not count. A policy that allows any attempt but the first then allows this attempt again.
fn uncounted<'a>(history: &History<'a>) -> History<'a> {
    History { attempts: history.attempts.saturating_sub(1).max(1), ..history.clone() }
}

#[cfg(test)]
mod tests {
    use recruiter_common::{
        ids::JobId,
        retry_policy::{DoNotDoItAgain, RetryManyTimes},
    };

    use super::*;

    fn now() -> Instant {
        Instant::from_timestamp_millis(1_000_000).expect("a date")
    }

    fn check(attempts: u32, policy: &dyn RetryPolicy, ended: Result<Done, NotDone>, cancelled: Option<Cancellation>) -> String {
        let history = History { job: JobId::new(), created_at: now(), attempts, deaths: 0, group: "generic", tags: &[], executions: &[] };
        match verdict(&history, policy, ended, cancelled, now()) {
            Verdict::Archive { why, failure, .. } => format!("archive {why} {}", failure.map_or_else(String::new, |failure| failure.class)),
            Verdict::Retry { failure, at, again } => format!("retry {} +{} {again:?}", failure.class, (at - now()).num_seconds()),
            Verdict::Release { failure, at } => format!("release {} +{}", failure.class, (at - now()).num_seconds()),
            Verdict::Become { jobs } => format!("become {}", jobs.len()),
            Verdict::ClaimLost => "nothing".into(),
        }
    }

    #[test]
    fn an_end_has_its_verdict() {
        let never = DoNotDoItAgain;
        let once = RetryManyTimes::new(1, Duration::from_secs(60)).expect("valid");
        let failed = || Err(NotDone::failed("exit:1", ""));
        let stopped = || Err(NotDone::Stopped(Failure::new("x", "")));
        let snoozed = |after: Option<u64>| {
            let reason = Failure::new("exit:75", "");
            Err(NotDone::Snooze { after: after.map(Duration::from_secs), reason, at_most: None })
        };
        assert_eq!(check(1, &never, Ok(Done::default()), None), "archive done ");
        assert_eq!(check(1, &never, failed(), None), "archive not-scheduled-by-retry-policy exit:1");
        assert_eq!(check(1, &once, failed(), None), "retry exit:1 +60 Failed");
        assert_eq!(check(2, &once, failed(), None), "archive tried-too-many-times exit:1");
        assert_eq!(check(1, &once, Err(NotDone::GiveUp(Failure::new("x", ""))), None), "archive gave-up x");
        assert_eq!(check(1, &once, failed(), Some(Cancellation::Requested)), "archive cancelled cancelled");
        assert_eq!(check(1, &never, stopped(), Some(Cancellation::WorkerStopping)), "archive interrupted interrupted");
        assert_eq!(check(1, &once, stopped(), Some(Cancellation::WorkerStopping)), "retry interrupted +0 Interrupted");
        assert_eq!(check(2, &once, stopped(), Some(Cancellation::WorkerStopping)), "retry interrupted +0 Interrupted", "it does not count");
        assert_eq!(check(1, &once, Ok(Done::default()), Some(Cancellation::WorkerStopping)), "archive done ");
        assert_eq!(check(1, &once, stopped(), Some(Cancellation::MemoryLimit)), "retry memory-limit +60 Failed");
        assert_eq!(check(2, &once, stopped(), Some(Cancellation::MemoryLimit)), "archive tried-too-many-times memory-limit");
        assert_eq!(check(1, &once, Ok(Done::default()), Some(Cancellation::MemoryLimit)), "archive done ");
        assert_eq!(check(1, &once, Ok(Done::default()), Some(Cancellation::ClaimLost)), "nothing");
        assert_eq!(check(1, &never, snoozed(None), None), "retry exit:75 +30 Snoozed");
        assert_eq!(check(2, &once, snoozed(None), None), "retry exit:75 +60 Snoozed");
        assert_eq!(check(1, &once, snoozed(Some(5)), None), "retry exit:75 +5 Snoozed");
        assert_eq!(check(1, &once, snoozed(Some(u64::MAX)), None), "retry exit:75 +253402299799 Snoozed", "the latest date");
        let short = || Err(NotDone::NoResources(Failure::new("spawn", "")));
        assert_eq!(check(1, &never, short(), None), "release spawn +2");
        assert_eq!(check(1, &never, short(), Some(Cancellation::WorkerStopping)), "release spawn +2", "it was not started");
        assert_eq!(check(1, &never, short(), Some(Cancellation::MemoryLimit)), "release spawn +2");
        assert_eq!(check(1, &once, short(), Some(Cancellation::Requested)), "archive cancelled cancelled");
        assert_eq!(check(1, &once, short(), Some(Cancellation::ClaimLost)), "nothing");
    }

    #[test]
    fn a_failure_that_runs_again_can_choose_when() {
        let second = Duration::from_secs(1);
        let at = |again: Again, delay: Option<Duration>| {
            let verdict = Verdict::Retry { failure: Failure::new("x", ""), at: later(now(), second * 60), again };
            let Verdict::Retry { at, .. } = verdict.put_off(delay, now()) else { panic!("it runs again") };
            at
        };
        assert_eq!(at(Again::Failed, None), later(now(), second * 60));
        assert_eq!(at(Again::Failed, Some(second * 7)), later(now(), second * 7));
        assert_eq!(at(Again::Failed, Some(Duration::MAX)).timestamp_millis(), 253_402_300_799_999, "the latest date");
        assert_eq!(at(Again::Interrupted, Some(second * 7)), later(now(), second * 60));
        assert_eq!(at(Again::Snoozed, Some(second * 7)), later(now(), second * 60));
    }
}
