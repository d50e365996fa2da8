//! The events of an attempt for the application, one at the start and one at the end; its span, and its line in the log.

use std::{sync::Arc, time::Duration};

use recruiter_common::{
    job::{FinishReason, Job},
    store::Store,
};

use crate::{
    context::Context,
    engine::{
        environment::Environment,
        meters::{ClassMeters, Outcome},
        record::verdict::{Again, Verdict},
    },
    event::WorkerEvent,
    panics::guarded,
};

/// The events of one attempt. If this value is dropped before [`Events::end`], it reports that the claim is lost.
pub(super) struct Events<'a> {
    environment: &'a Environment,
    context: &'a Arc<Context>,
    meters: &'a ClassMeters,
    has_ended: bool,
}

impl<'a> Events<'a> {
    /// Reports that the workable is about to be called.
    pub(super) fn of_start(environment: &'a Environment, context: &'a Arc<Context>) -> Self {
        let (store, meters) = (&environment.dependencies.store, environment.dependencies.meters.of(&context.job.class));
        meters.started(&context.job, store.now());
        emit(environment, &WorkerEvent::Started { job: context });
        store.tell_started(&context.job);
        Self { environment, context, meters, has_ended: false }
    }

    /// Notes how long the execution has taken.
    pub(super) fn executed(&self, took: Duration) {
        self.meters.executed(took);
    }

    /// Reports the recorded end.
    pub(super) fn end(mut self, verdict: &Verdict) {
        self.has_ended = true;
        self.meters.ended(outcome(verdict));
        emit(self.environment, &event(self.context, verdict));
    }
}

impl Drop for Events<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.meters.ended(Outcome::ClaimLost);
            emit(self.environment, &WorkerEvent::ClaimLost { job: self.context });
        }
    }
}

/// Reports an event to the application.
fn emit(environment: &Environment, event: &WorkerEvent<'_>) {
    if let Some(Err(failure)) = environment.dependencies.listener.as_ref().map(|listener| guarded(|| listener(event))) {
        tracing::error!(error = failure.message, "an event listener panicked");
    }
}

fn event<'a>(job: &'a Context, verdict: &'a Verdict) -> WorkerEvent<'a> {
    match verdict {
        Verdict::Archive { failure: None, .. } | Verdict::Become { .. } => WorkerEvent::Done { job },
        Verdict::Archive { why, failure: Some(reason), .. } if *why == FinishReason::CANCELLED => WorkerEvent::Cancelled { job, reason },
        Verdict::Archive { failure: Some(failure), .. } => WorkerEvent::Failed { job, failure, last: true },
        Verdict::Retry { failure, again: Again::Failed, .. } => WorkerEvent::Failed { job, failure, last: false },
        Verdict::Retry { failure: reason, again: Again::Snoozed, .. } => WorkerEvent::Snoozed { job, reason },
        Verdict::Retry { failure: reason, again: Again::Interrupted, .. } => WorkerEvent::Interrupted { job, reason },
        Verdict::Release { failure: reason, .. } => WorkerEvent::Released { job, reason },
        Verdict::ClaimLost => WorkerEvent::ClaimLost { job },
    }
}

/// What is counted about a verdict.
fn outcome(verdict: &Verdict) -> Outcome {
    match verdict {
        Verdict::Archive { failure: None, .. } | Verdict::Become { .. } => Outcome::Done,
        Verdict::Archive { why, failure: Some(_), .. } if *why == FinishReason::CANCELLED => Outcome::Cancelled,
        Verdict::Archive { failure: Some(_), .. } => Outcome::Failed,
        Verdict::Retry { again: Again::Failed, .. } => Outcome::Retried,
        Verdict::Retry { again: Again::Snoozed, .. } => Outcome::Snoozed,
        Verdict::Retry { again: Again::Interrupted, .. } => Outcome::Interrupted,
        Verdict::Release { .. } => Outcome::Released,
        Verdict::ClaimLost => Outcome::ClaimLost,
    }
}

/// Logs how an attempt ended. A final failure is a warning, a failure that is retried is not.
pub(super) fn log(store: &Store, job: &Job, duration_ms: u64, verdict: &Verdict) {
    macro_rules! ended {
        ($level:ident, $failure:expr, $text:literal) => {
            tracing::$level!(
                job.id = %job.id,
                job.class = job.class,
                job.attempt = job.attempts,
                duration_ms,
                error.class = $failure.class,
                error.message = store.may_log(&job.class, &$failure.message),
                $text
            )
        };
    }
    match verdict {
        Verdict::Archive { why, failure: Some(failure), .. } if *why == FinishReason::CANCELLED => ended!(info, failure, "job cancelled"),
        Verdict::Archive { failure: Some(failure), .. } => ended!(warn, failure, "job failed"),
        Verdict::Retry { failure, again: Again::Failed, .. } => ended!(info, failure, "job failed; retrying"),
        Verdict::Retry { failure, again: Again::Snoozed, .. } => {
            ended!(info, failure, "job snoozed: it runs again, and the attempt does not count")
        }
        Verdict::Retry { failure, again: Again::Interrupted, .. } => {
            ended!(info, failure, "job interrupted: it runs again, and the attempt does not count")
        }
        Verdict::Release { failure, .. } => ended!(debug, failure, "job released: its workable did not run"),
        Verdict::Archive { failure: None, .. } => tracing::debug!(job.id = %job.id, job.class = job.class, duration_ms, "job done"),
        Verdict::Become { jobs } => {
            tracing::debug!(job.id = %job.id, job.class = job.class, duration_ms, count = jobs.len(), "job became others");
        }
        Verdict::ClaimLost => {}
    }
}

/// The span of the job: its fields are in each line that the workable logs.
pub(super) fn span_of(job: &Job) -> tracing::Span {
    let worker = job.last_execution.as_ref().and_then(|execution| execution.worker);
    let span = tracing::info_span!(
        "job",
        job.id = %job.id,
        job.class = job.class,
        job.attempt = job.attempts,
        worker.id = worker.map(tracing::field::display),
        otel.kind = tracing::field::Empty,
    );
    #[cfg(feature = "opentelemetry")]
    super::traces::begin(&span, job);
    span
}
