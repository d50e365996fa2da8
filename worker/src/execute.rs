//! One attempt at one job: enter the workable, watch its limits, and say what follows from how it ended.
//!
//! Panics are caught here and nowhere else. What follows is decided by pure functions, from the result and the job's
//! history alone.

use std::{
    future::poll_fn,
    panic::AssertUnwindSafe,
    sync::{Arc, OnceLock},
    task::Poll,
    time::{Duration, Instant as Monotonic},
};

use bson::Bson;
use futures_util::FutureExt as _;
use recruiter_common::{
    failure::{self, Failure},
    instant::Instant,
    job::{Claim, Execution, Job, Why},
    retry_policy::{Decision, History, RetryPolicy},
    shutdown::pause,
    store::{Archival, Rescheduling},
};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    bundle::Bundle,
    registry::Ready,
    workable::{Cancel, Cancellation, Context, Done, NotDone},
};

/// How long a workable that is asked to stop may take to do so by itself.
const CANCELLED_FOR: Duration = Duration::from_secs(2);
/// Before another run that a workable asked for without saying when, and whose policy says nothing either.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(30);

/// Before a job is due again that the machine could not start.
const RELEASED_FOR: Duration = Duration::from_secs(2);

/// A started job with everything its execution needs.
pub(crate) struct Attempt {
    pub(crate) job: Arc<Job>,
    pub(crate) claim: Claim,
    /// The workable, or why there is none.
    pub(crate) workable: Result<Arc<dyn Ready>, Failure>,
    /// The same, if it is a bundle.
    pub(crate) bundle: Option<Arc<Bundle>>,
    /// The policy, or why there is none: such a job is not run.
    pub(crate) policy: Result<Arc<dyn RetryPolicy>, Failure>,
    /// Whether a failure of this attempt would be the last.
    pub(crate) is_last_attempt: bool,
    /// How long it may take.
    pub(crate) time_limit: Option<Duration>,
    pub(crate) cancel: Arc<Cancel>,
    pub(crate) previous: Option<Arc<Execution>>,
}

/// What is written about an ended attempt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Next {
    /// To the archive.
    Archive { why: Why, failure: Option<Failure>, result: Option<Bson> },
    /// Another attempt at `at`; it counts unless the end was no fault of the job.
    Retry { failure: Failure, at: Instant, counts: bool },
    /// As it was before this start, but due at `at`: the workable was not entered.
    Release { failure: Failure, at: Instant },
    /// Nothing: this worker was declared dead, and the job is somebody else's.
    Nothing,
}

/// The write itself.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    Archive(Box<Archival>),
    Reschedule(Box<Rescheduling>),
}

impl Attempt {
    /// What the execution is told about its job.
    pub(crate) fn context(&self) -> Arc<Context> {
        Arc::new(Context {
            job: self.job.clone(),
            start: self.claim.start(),
            is_last_attempt: self.is_last_attempt,
            last_execution: self.previous.clone(),
            item: None,
            deadline: OnceLock::new(),
            cancel: self.cancel.clone(),
        })
    }

    /// Enters the workable, unless something forbids it, and waits for its end.
    pub(crate) async fn execute(&self, context: &Arc<Context>) -> Result<Done, NotDone> {
        if let Err(failure) = &self.policy {
            return Err(NotDone::GiveUp(failure.clone()));
        }
        if self.job.cancel_requested {
            self.cancel.cancel(Cancellation::Requested);
            return Err(NotDone::Stopped(Failure::new(failure::CANCELLED, "cancelled before it was entered")));
        }
        enter(self.workable.clone().map_err(NotDone::Failed)?, context, self.time_limit).await
    }

    /// What is to be written, given how it ended.
    pub(crate) fn outcome(&self, next: &Next, now: Instant) -> Option<Outcome> {
        let execution = |failure: Option<&Failure>| self.job.last_execution.clone().unwrap_or_default().ended(now, failure);
        match next {
            Next::Archive { why, failure, result } => {
                let archival = Archival::ended(&self.job, self.claim, execution(failure.as_ref()), why, result.clone());
                let archival = match self.item_outcomes() {
                    Some(outcomes) => archival.with_items(outcomes),
                    None => archival,
                };
                Some(Outcome::Archive(Box::new(archival)))
            }
            Next::Retry { failure, at, counts } => {
                let rescheduling = Rescheduling::retry(&self.job, self.claim, &execution(Some(failure)), *at, *counts);
                Some(Outcome::Reschedule(Box::new(match self.item_outcomes() {
                    Some(outcomes) => rescheduling.with_items(outcomes),
                    None => rescheduling,
                })))
            }
            Next::Release { at, .. } => Some(Outcome::Reschedule(Box::new(Rescheduling::release_until(&self.job, self.claim, *at)))),
            Next::Nothing => None,
        }
    }

    /// What became of the items of a bundle that was entered.
    fn item_outcomes(&self) -> Option<Vec<Bson>> {
        self.bundle.as_ref().map(|bundle| bundle.outcomes())
    }

    /// What follows from how it ended.
    pub(crate) fn next(&self, ended: Result<Done, NotDone>, now: Instant) -> Next {
        match (&self.policy, &self.bundle) {
            (Ok(_), Some(bundle)) if ended.is_ok() => bundle.next(self.cancel.why(), now),
            (Ok(policy), _) => judge(&self.job.history(), policy.as_ref(), ended, self.cancel.why(), now),
            (Err(failure), _) => Next::Archive { why: Why::MALFORMED, failure: Some(failure.clone()), result: None },
        }
    }
}

/// Enters a workable and waits for its end.
///
/// What ends without having to wait for anything ends here. Everything else becomes a task of its own, which can be watched.
pub(crate) async fn enter(workable: Arc<dyn Ready>, context: &Arc<Context>, limit: Option<Duration>) -> Result<Done, NotDone> {
    if let Some(deadline) = limit.and_then(|limit| Monotonic::now().checked_add(limit)) {
        let _ = context.deadline.set(deadline);
    }
    let (blocks, stops_within) = (workable.blocks(), workable.stops_within());
    let mut execution = {
        let context = context.clone();
        let in_time = async move {
            let ended = workable.execute(&context).await;
            match limit {
                // It has seen this for itself, or has let nobody else see it.
                Some(limit) if context.is_late() && context.cancel.why().is_none() => Err(timed_out(limit)),
                _ => ended,
            }
        };
        AssertUnwindSafe(in_time).catch_unwind().boxed()
    };
    let ended = match poll_fn(|task| Poll::Ready(execution.poll_unpin(task))).await {
        Poll::Ready(ended) => without_panic(Ok(ended)),
        Poll::Pending => {
            let task = AbortOnDropHandle::new(tokio::spawn(execution));
            watch(task, &context.cancel, limit, blocks, stops_within).boxed().await
        }
    };
    if let Err(NotDone::NoResources(failure)) = &ended {
        context.cancel.note_shortage(&failure.message);
    }
    ended
}

/// How an execution ended: by itself, or in a panic.
type Ended = std::thread::Result<Result<Done, NotDone>>;

/// Waits for the end, enforcing the time limit and cancellation.
async fn watch(
    mut task: AbortOnDropHandle<Ended>,
    cancel: &Cancel,
    limit: Option<Duration>,
    blocks: bool,
    stops_within: Option<Duration>,
) -> Result<Done, NotDone> {
    let limit_passed = async {
        match limit {
            Some(limit) => pause(limit).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        ended = &mut task => return without_panic(ended),
        () = limit_passed => cancel.cancel(Cancellation::TimeLimit),
        () = cancel.cancelled() => {}
    }
    let ended = if blocks {
        // A thread cannot be killed, and its job must not run twice: wait for it. At a stop the process ends first.
        without_panic((&mut task).await)
    } else {
        let by_reason = if cancel.why() == Some(Cancellation::TimeLimit) { Duration::ZERO } else { CANCELLED_FOR };
        let patience = stops_within.unwrap_or(by_reason);
        tokio::select! {
            ended = &mut task => without_panic(ended),
            () = pause(patience) => {
                task.abort();
                // Its end, so that nothing of it runs on when the outcome is written.
                let _ = (&mut task).await;
                Err(NotDone::Stopped(Failure::new(failure::INTERRUPTED, "it did not stop when asked and was broken off")))
            }
        }
    };
    match (cancel.why(), limit) {
        (Some(Cancellation::TimeLimit), Some(limit)) => Err(timed_out(limit)),
        _ => ended,
    }
}

fn timed_out(limit: Duration) -> NotDone {
    let message = format!("it took longer than its time limit of {}", humantime::format_duration(limit));
    NotDone::Failed(Failure::new(failure::TIMEOUT, message))
}

fn without_panic(joined: Result<Ended, tokio::task::JoinError>) -> Result<Done, NotDone> {
    match joined {
        Ok(Ok(ended)) => ended,
        Ok(Err(panic)) => Err(NotDone::Failed(panicked(panic.as_ref()))),
        Err(_) => Err(NotDone::Stopped(Failure::new(failure::INTERRUPTED, "it was broken off"))),
    }
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> Failure {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string).or_else(|| panic.downcast_ref::<String>().cloned());
    Failure::new(failure::PANIC, format!("it panicked: {}", text.unwrap_or_else(|| "without a message".into())))
}

/// Calls code of users (decoding, policies, listeners) that runs outside of a workable's own task: a panic in it is the
/// job's failure, not the worker's.
pub(crate) fn guarded<T>(code: impl FnOnce() -> T) -> Result<T, Failure> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(code)).map_err(|panic| panicked(panic.as_ref()))
}

/// What follows from how an attempt, or one item of it, ended. A policy that panics ends it.
pub(crate) fn judge(
    history: &History<'_>,
    policy: &dyn RetryPolicy,
    ended: Result<Done, NotDone>,
    cancelled: Option<Cancellation>,
    now: Instant,
) -> Next {
    let decided = guarded(|| next(history, policy, ended, cancelled, now));
    decided.unwrap_or_else(|failure| Next::Archive { why: Why::MALFORMED, failure: Some(failure), result: None })
}

fn next(
    history: &History<'_>,
    policy: &dyn RetryPolicy,
    ended: Result<Done, NotDone>,
    cancelled: Option<Cancellation>,
    now: Instant,
) -> Next {
    let archive = |why: Why, failure: Failure| Next::Archive { why, failure: Some(failure), result: None };
    let later = |delay: Duration| {
        chrono::TimeDelta::from_std(delay).ok().and_then(|delay| now.checked_add_signed(delay)).unwrap_or(Instant::MAX_UTC)
    };
    let by_policy = |failure: Failure| match policy.decide(history, &failure, now) {
        Decision::RetryAfter(delay) => Next::Retry { failure, at: later(delay), counts: true },
        Decision::Archive(why) => archive(why, failure),
    };
    match (ended, cancelled) {
        (_, Some(Cancellation::LeaseLost)) => Next::Nothing,
        (Ok(done), _) => Next::Archive { why: Why::DONE, failure: None, result: done.result },
        (Err(NotDone::GiveUp(failure)), _) => archive(Why::GAVE_UP, failure),
        (Err(not_done), Some(Cancellation::Requested)) => {
            archive(Why::CANCELLED, Failure { class: failure::CANCELLED.into(), ..not_done.failure().clone() })
        }
        (Err(NotDone::NoResources(failure)), _) => Next::Release { failure, at: later(RELEASED_FOR) },
        (Err(not_done), Some(Cancellation::WorkerStopping)) => {
            let failure = Failure { class: failure::INTERRUPTED.into(), ..not_done.failure().clone() };
            match policy.decide(&uncounted(history), &failure, now) {
                Decision::RetryAfter(_) => Next::Retry { failure, at: now, counts: false },
                Decision::Archive(_) => archive(Why::INTERRUPTED, failure),
            }
        }
        (Err(not_done), Some(Cancellation::MemoryLimit)) => {
            by_policy(Failure { class: failure::MEMORY_LIMIT.into(), ..not_done.failure().clone() })
        }
        (Err(NotDone::TryAgain { after, reason }), _) => {
            let delay = || match policy.decide(&uncounted(history), &reason, now) {
                Decision::RetryAfter(delay) => delay,
                Decision::Archive(_) => TRY_AGAIN_AFTER,
            };
            let at = later(after.unwrap_or_else(delay));
            Next::Retry { failure: reason, at, counts: false }
        }
        (Err(NotDone::Failed(failure) | NotDone::Stopped(failure)), _) => by_policy(failure),
    }
}

/// The history as if the present start did not count: a policy that allows any attempt but the first then allows this
/// one again.
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
        match next(&history, policy, ended, cancelled, now()) {
            Next::Archive { why, failure, .. } => format!("archive {why} {}", failure.map_or_else(String::new, |failure| failure.class)),
            Next::Retry { failure, at, counts } => format!("retry {} +{} {counts}", failure.class, (at - now()).num_seconds()),
            Next::Release { failure, at } => format!("release {} +{}", failure.class, (at - now()).num_seconds()),
            Next::Nothing => "nothing".into(),
        }
    }

    #[test]
    fn what_follows_from_an_end() {
        let never = DoNotDoItAgain;
        let once = RetryManyTimes::new(1, Duration::from_secs(60)).expect("valid");
        let failed = || Err(NotDone::failed("exit:1", ""));
        let stopped = || Err(NotDone::Stopped(Failure::new("x", "")));
        let again =
            |after: Option<u64>| Err(NotDone::TryAgain { after: after.map(Duration::from_secs), reason: Failure::new("exit:75", "") });
        assert_eq!(check(1, &never, Ok(Done::default()), None), "archive done ");
        assert_eq!(check(1, &never, failed(), None), "archive not-scheduled-by-retry-policy exit:1");
        assert_eq!(check(1, &once, failed(), None), "retry exit:1 +60 true");
        assert_eq!(check(2, &once, failed(), None), "archive tried-too-many-times exit:1");
        assert_eq!(check(1, &once, Err(NotDone::GiveUp(Failure::new("x", ""))), None), "archive gave-up x");
        assert_eq!(check(1, &once, failed(), Some(Cancellation::Requested)), "archive cancelled cancelled");
        assert_eq!(check(1, &never, stopped(), Some(Cancellation::WorkerStopping)), "archive interrupted interrupted");
        assert_eq!(check(1, &once, stopped(), Some(Cancellation::WorkerStopping)), "retry interrupted +0 false");
        assert_eq!(check(2, &once, stopped(), Some(Cancellation::WorkerStopping)), "retry interrupted +0 false", "it does not count");
        assert_eq!(check(1, &once, Ok(Done::default()), Some(Cancellation::WorkerStopping)), "archive done ");
        assert_eq!(check(1, &once, stopped(), Some(Cancellation::MemoryLimit)), "retry memory-limit +60 true");
        assert_eq!(check(2, &once, stopped(), Some(Cancellation::MemoryLimit)), "archive tried-too-many-times memory-limit");
        assert_eq!(check(1, &once, Ok(Done::default()), Some(Cancellation::MemoryLimit)), "archive done ");
        assert_eq!(check(1, &once, Ok(Done::default()), Some(Cancellation::LeaseLost)), "nothing");
        assert_eq!(check(1, &never, again(None), None), "retry exit:75 +30 false");
        assert_eq!(check(2, &once, again(None), None), "retry exit:75 +60 false");
        assert_eq!(check(1, &once, again(Some(5)), None), "retry exit:75 +5 false");
        let short = || Err(NotDone::NoResources(Failure::new("spawn", "")));
        assert_eq!(check(1, &never, short(), None), "release spawn +2");
        assert_eq!(check(1, &never, short(), Some(Cancellation::WorkerStopping)), "release spawn +2", "it was not entered");
        assert_eq!(check(1, &never, short(), Some(Cancellation::MemoryLimit)), "release spawn +2");
        assert_eq!(check(1, &once, short(), Some(Cancellation::Requested)), "archive cancelled cancelled");
        assert_eq!(check(1, &once, short(), Some(Cancellation::LeaseLost)), "nothing");
    }
}
