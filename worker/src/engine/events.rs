//! The events of an attempt for the application, one at the start and one at the end, and its line in the log.

use std::sync::Arc;

use recruiter_common::job::{FinishReason, Job};

use super::{
    environment::Environment,
    verdict::{Again, Verdict},
};
use crate::{context::Context, event::WorkerEvent};

/// The events of one attempt. If this value is dropped before [`Events::end`], it reports that the claim is lost.
pub(crate) struct Events<'a> {
    environment: &'a Environment,
    context: &'a Arc<Context>,
    has_ended: bool,
}

impl<'a> Events<'a> {
    /// Reports that the workable is about to be called.
    pub(crate) fn of_start(environment: &'a Environment, context: &'a Arc<Context>) -> Self {
        environment.emit(&WorkerEvent::Started { job: context });
        environment.dependencies.store.tell_started(&context.job);
        Self { environment, context, has_ended: false }
    }

    /// Reports the recorded end.
    pub(crate) fn end(mut self, verdict: &Verdict) {
        self.has_ended = true;
        self.environment.emit(&event(self.context, verdict));
    }
}

impl Drop for Events<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.environment.emit(&WorkerEvent::ClaimLost { job: self.context });
        }
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

/// Logs how an attempt ended. A final failure is a warning, a failure that is retried is not.
pub(crate) fn log(job: &Job, duration_ms: u64, verdict: &Verdict) {
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
