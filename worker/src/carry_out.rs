//! One attempt at one job in this worker: from its workable and policy over execution and record to the hooks.

use std::{
    panic::AssertUnwindSafe,
    sync::Arc,
    time::{Duration, Instant as Monotonic},
};

use futures_util::FutureExt as _;
use recruiter_common::{
    failure::Failure,
    ids::JobId,
    job::{Claim, Execution, Job, Why},
    retry_policy::RetryPolicy,
    store::Recorded,
    telemetry::milliseconds,
};
use tokio::sync::{mpsc, oneshot};

use crate::{
    WorkerEvent,
    bundle::{Bundle, decode},
    commit::ToRecord,
    execute::{Attempt, Next, guarded},
    progress::Record,
    registry::Ready,
    runner::Equipment,
    workable::Cancel,
};

/// How long a hook may take before its place is given to another job.
const HOOKS_MAY_TAKE: Duration = Duration::from_secs(60);

/// One attempt from entry to record.
///
/// Whatever it keeps while it waits is kept for each running job: hence the boxes.
pub(crate) async fn carry_out(equipment: &Equipment, attempt: Box<Attempt>, outcomes: mpsc::Sender<ToRecord>) -> JobId {
    let (job, store) = (attempt.job.id, &equipment.store);
    let context = attempt.context();
    let started = Monotonic::now();
    equipment.tell(&WorkerEvent::Started { job: &context });
    let ended = attempt.execute(&context).await;
    // A retry is put off by the clock of who is the primary now. Without an answer the estimate must do.
    let _ = store.fresh_clock().await;
    let now = store.now();
    let next = attempt.next(ended, now);
    let duration_ms = milliseconds(started.elapsed());
    let recorded = match attempt.outcome(&next, now) {
        Some(outcome) => {
            let (recorded, answer) = oneshot::channel();
            match outcomes.send(ToRecord { outcome, recorded }).await {
                Ok(()) => answer.await.ok(),
                Err(_) => None,
            }
        }
        None => Some(Recorded::ClaimLost),
    };
    match recorded {
        Some(Recorded::Yes) => {}
        Some(Recorded::ClaimLost) => {
            tracing::warn!(job.id = %job, "the job was rescued meanwhile; its outcome is dropped");
            return job;
        }
        Some(Recorded::Refused) | None => {
            tracing::error!(job.id = %job, "the outcome of the job could not be written: the cleaner will end it");
            return job;
        }
    }
    log(&attempt.job, duration_ms, &next);
    let (failure, last) = match &next {
        Next::Archive { failure, .. } => (failure.as_ref(), true),
        Next::Retry { failure, .. } => (Some(failure), false),
        // Nothing happened to the job.
        Next::Release { .. } | Next::Nothing => return job,
    };
    equipment.tell(&match failure {
        None => WorkerEvent::Done { job: &context },
        Some(failure) => WorkerEvent::Failed { job: &context, failure, last },
    });
    if let Ok(workable) = &attempt.workable {
        // A hook's panic is its own: the job has been recorded.
        let hooks = AssertUnwindSafe(workable.after(&context, failure, last)).catch_unwind();
        match tokio::time::timeout(HOOKS_MAY_TAKE, hooks).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => tracing::error!(job.id = %job, "a hook panicked"),
            Err(_) => tracing::error!(job.id = %job, "a hook takes too long; its place is given to another job"),
        }
    }
    job
}

/// Says how an attempt ended: a failure for good is a warning, one that is retried is not.
fn log(job: &Job, duration_ms: u64, next: &Next) {
    macro_rules! ended {
        ($level:ident, $failure:expr, $text:literal) => {
            tracing::$level!(
                job.id = %job.id,
                job.class = job.class,
                job.attempt = job.attempts,
                duration_ms,
                error.class = $failure.class,
                error.message = $failure.message,
                $text
            )
        };
    }
    match next {
        Next::Archive { why, failure: Some(failure), .. } if *why == Why::CANCELLED => ended!(info, failure, "job cancelled"),
        Next::Archive { failure: Some(failure), .. } => ended!(warn, failure, "job failed"),
        Next::Retry { failure, counts: true, .. } => ended!(info, failure, "job failed; retrying"),
        Next::Retry { failure, counts: false, .. } => {
            ended!(info, failure, "job not finished; it runs again, and this attempt does not count")
        }
        Next::Release { failure, .. } => ended!(debug, failure, "job released: it was not entered"),
        Next::Archive { failure: None, .. } => tracing::debug!(job.id = %job.id, job.class = job.class, duration_ms, "job done"),
        Next::Nothing => {}
    }
}

impl Equipment {
    /// The policy of a job, made by code of users; or the class that this worker does not know.
    pub(crate) fn policy(&self, job: &Job) -> Result<Result<Arc<dyn RetryPolicy>, Failure>, String> {
        let unusable = |error: &dyn std::fmt::Display| Failure::new("retry-policy", format!("the retry policy cannot be used: {error}"));
        match guarded(|| self.policies.decode(&job.retry_policy)) {
            Ok(Ok(policy)) => Ok(Ok(policy)),
            Ok(Err(error)) => match error.unknown_class() {
                Some(class) => Err(class.to_owned()),
                None => Ok(Err(unusable(&error))),
            },
            Err(panicked) => Ok(Err(panicked)),
        }
    }

    /// A started job with its workable, made by code of users as well.
    pub(crate) fn attempt(
        &self,
        mut job: Arc<Job>,
        policy: Result<Arc<dyn RetryPolicy>, Failure>,
        claim: Claim,
        previous: Option<Arc<Execution>>,
        cancel: Arc<Cancel>,
    ) -> Box<Attempt> {
        let is_last = |policy: &Arc<dyn RetryPolicy>| guarded(|| policy.is_last_attempt(&job.history(), self.store.now()));
        let (policy, is_last_attempt) = match policy.and_then(|policy| Ok((is_last(&policy)?, policy))) {
            Ok((is_last, policy)) => (Ok(policy), is_last),
            Err(failure) => (Err(failure), false),
        };
        // Only here: what is stored stays in the document.
        let parameters = std::mem::take(&mut Arc::make_mut(&mut job).parameters);
        let handler = self.registry.handler(&job.class);
        let (bundle, workable) = match (&job.bundle, &policy, handler) {
            // Its items have time limits, each its own.
            (Some(known), Ok(policy), Ok(handler)) => {
                let record = Arc::new(Record::new(claim, known, cancel.clone()));
                let bundle = Bundle::new(self, job.clone(), handler, policy, record);
                (Some(bundle.clone()), Ok((bundle as Arc<dyn Ready>, None)))
            }
            (Some(_), Err(unusable), _) => (None, Err(unusable.clone())),
            (_, _, Err(unknown)) => (None, Err(unknown)),
            (None, _, Ok(handler)) => (None, decode(handler, parameters).map(|(ready, own)| (ready, own.or(self.args.time_limit)))),
        };
        let (workable, time_limit) = match workable {
            Ok((workable, limit)) => (Ok(workable), limit),
            Err(failure) => (Err(failure), None),
        };
        Box::new(Attempt { job, claim, workable, bundle, policy, is_last_attempt, time_limit, cancel, previous })
    }

    fn tell(&self, event: &WorkerEvent<'_>) {
        if let Some(Err(failure)) = self.listener.as_ref().map(|listener| guarded(|| listener(event))) {
            tracing::error!(error = failure.message, "a listener failed");
        }
    }
}
