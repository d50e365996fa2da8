//! One attempt at a job: context, run, verdict, record, hooks.

use std::{
    sync::Arc,
    time::{Duration, Instant as Monotonic},
};

use bson::{Bson, Document};
use futures_util::FutureExt as _;
use recruiter_common::{
    failure::{self, Failure},
    ids::JobId,
    instant::Instant,
    job::{Claim, Execution, FinishReason, Job},
    limits::line_of_gate,
    store::{Archival, Ending, Recorded, Rescheduling},
    telemetry::milliseconds,
};
use tracing::Instrument as _;

use super::{
    bundle::Bundle,
    continuation::{self, Ended},
    dependencies::Policy,
    environment::Environment,
    events::{Events, log},
    ran::Ran,
    recorder::JobEnd,
    verdict::{Verdict, verdict},
};
use crate::{
    cancellation::{Cancel, Cancellation},
    context::{Context, NotesCell, RetryAfter},
    deadline::Deadline,
    notes,
    outcome::{Done, NotDone},
    panics::guarded,
    registry::{Ready, decode},
};

/// A job that this worker has started.
pub(crate) struct StartedJob {
    pub(crate) job: Arc<Job>,
    pub(crate) claim: Claim,
    pub(crate) policy: Policy,
    pub(crate) previous: Option<Arc<Execution>>,
}

/// Runs one attempt, from its context to its hooks. Returns after the hooks. [`Table::note_ended`](super::table::Table::note_ended) has
/// freed the slot before.
///
/// This future exists once for each running job. Large and rarely used parts are boxed to keep it small.
pub(crate) async fn run(environment: &Environment, mut attempt: Box<Attempt>) -> JobId {
    let job = attempt.job.id;
    let context = attempt.context(environment);
    let started = Monotonic::now();
    let events = Events::of_start(environment, &context);
    let span = span_of(&attempt.job);
    #[cfg(feature = "opentelemetry")]
    let traced = span.clone();
    let ended = attempt.execute(environment, &context).instrument(span).await;
    environment.table.note_ended(job);
    let now = environment.now().await;
    let committed = context.own_end.settled().await;
    let verdict = match &committed {
        Some(done) => Verdict::Archive { why: FinishReason::DONE, failure: None, result: done.result.clone() },
        None => attempt.verdict(continuation::prepared(ended, &attempt.job, Some(&environment.dependencies.store), now).await, now),
    };
    let verdict = verdict.put_off(context.retry_after.get(), now);
    #[cfg(feature = "opentelemetry")]
    super::traces::end(traced, &verdict);
    let duration_ms = milliseconds(started.elapsed());
    let notes = notes::at_the_end(&context);
    let recorded = match attempt.end(&verdict, now, notes) {
        _ if committed.is_some() => Some(Recorded::Yes),
        Some(end) => environment.recorder.record(end).await,
        None => Some(Recorded::ClaimLost),
    };
    if let Some(own) = &environment.dependencies.own {
        own.note_ended(job, recorded.filter(|recorded| *recorded == Recorded::Yes).and_then(|_| Ran::of(&verdict)));
    }
    match recorded {
        Some(Recorded::Yes) => {}
        Some(Recorded::ClaimLost) => {
            // The first write may have succeeded and lost its reply, and the job may have been started or deleted since.
            tracing::warn!(job.id = %job, "this start no longer holds the job: it was rescued, or an earlier write has recorded its end");
            return job;
        }
        Some(Recorded::Refused) | None => {
            tracing::error!(job.id = %job, "failed to record the end of a job; a cleaner will end it");
            return job;
        }
    }
    environment.table.note_recorded(job, attempt.job.gate.as_deref().is_some_and(|gate| line_of_gate(gate).is_some()));
    log(&attempt.job, duration_ms, &verdict);
    events.end(&verdict);
    attempt.hooks(&context, &verdict).await;
    job
}

/// A started job with everything that its execution needs.
pub(crate) struct Attempt {
    job: Arc<Job>,
    claim: Claim,
    policy: Policy,
    /// Whether a failure of this attempt would be the last.
    is_last_attempt: bool,
    payload: Payload,
    cancel: Arc<Cancel>,
    previous: Option<Arc<Execution>>,
}

/// What an attempt executes.
enum Payload {
    One {
        workable: Arc<dyn Ready>,
        limit: Option<Duration>,
    },
    Bundle(Box<Bundle>),
    /// Nothing, for this reason.
    Unusable(Failure),
}

impl Attempt {
    /// Prepares an attempt. Decodes the workable and calls the retry policy: both are code of users.
    pub(crate) fn new(environment: &Environment, started: StartedJob, cancel: Arc<Cancel>) -> Box<Self> {
        let StartedJob { mut job, claim, policy, previous } = started;
        let dependencies = &environment.dependencies;
        let asked = policy.and_then(|policy| {
            let is_last = guarded(|| policy.is_last_attempt(&job.history(), dependencies.store.now()))?;
            Ok((policy, is_last))
        });
        let (policy, is_last_attempt) = match asked {
            Ok((policy, is_last)) => (Ok(policy), is_last),
            Err(failure) => (Err(failure), false),
        };
        // The job's document has the parameters as well: one copy is enough.
        let parameters = std::mem::take(&mut Arc::make_mut(&mut job).parameters);
        let payload = match (&policy, dependencies.registry.handler(&job.class), &job.bundle) {
            (Err(failure), ..) => Payload::Unusable(failure.clone()),
            (_, Err(failure), _) => Payload::Unusable(failure),
            (Ok(_), Ok(handler), Some(items)) => Payload::Bundle(Box::new(Bundle::new(&job, items, claim, handler, &cancel))),
            (Ok(_), Ok(handler), None) => match decode(handler, parameters) {
                Ok((workable, limit)) => Payload::One { workable, limit: limit.or(dependencies.config.time_limit) },
                Err(failure) => Payload::Unusable(failure),
            },
        };
        Box::new(Self { job, claim, policy, is_last_attempt, payload, cancel, previous })
    }

    fn context(&self, environment: &Environment) -> Arc<Context> {
        Arc::new(Context {
            job: self.job.clone(),
            store: Some(environment.dependencies.store.clone()),
            ends: Some((self.claim, environment.transactions.clone())),
            own_end: Arc::default(),
            start: self.claim.start(),
            is_last_attempt: self.is_last_attempt,
            last_execution: self.previous.clone(),
            item: None,
            deadline: Deadline::default(),
            cancel: self.cancel.clone(),
            notes: NotesCell::new(self.claim, environment.recorder.notes_queue()),
            retry_after: RetryAfter::default(),
        })
    }

    /// Executes the workable, unless its policy cannot be used or its cancellation was requested before. A bundle always ends with
    /// [`Done`]: its verdict follows from its items.
    async fn execute(&mut self, environment: &Environment, context: &Arc<Context>) -> Result<Done, NotDone> {
        let policy = match &self.policy {
            Ok(policy) => policy.as_ref(),
            Err(failure) => return Err(NotDone::GiveUp(failure.clone())),
        };
        if self.job.cancel_requested || self.cancel.why() == Some(Cancellation::Requested) {
            self.cancel.cancel(Cancellation::Requested);
            return Err(NotDone::Stopped(Failure::new(failure::CANCELLED, "cancelled before it was entered")));
        }
        if environment.lease.is_over() && !environment.may_begin(&self.cancel).boxed().await {
            return Err(NotDone::NoResources(Failure::new(failure::INTERRUPTED, "the lease of its worker was over before it was entered")));
        }
        match &mut self.payload {
            Payload::One { workable, limit } => environment.execute(workable.clone(), context, *limit).await,
            Payload::Bundle(bundle) => {
                bundle.execute(environment, policy, context).boxed().await;
                Ok(Done::default())
            }
            Payload::Unusable(failure) => Err(NotDone::Failed(failure.clone())),
        }
    }

    fn verdict(&self, ended: Result<Ended, NotDone>, now: Instant) -> Verdict {
        let ended = match ended {
            Ok(Ended::Become(_)) if self.cancel.why() == Some(Cancellation::ClaimLost) => return Verdict::ClaimLost,
            Ok(Ended::Become(_)) if self.cancel.why() == Some(Cancellation::Requested) => {
                Err(NotDone::Stopped(Failure::new(failure::CANCELLED, "cancelled before it became other jobs")))
            }
            Ok(Ended::Become(jobs)) => return Verdict::Become { jobs },
            Ok(Ended::Done(done)) => Ok(done),
            Err(not_done) => Err(not_done),
        };
        match (&self.policy, &self.payload) {
            (Ok(_), Payload::Bundle(bundle)) if ended.is_ok() => bundle.verdict(self.cancel.why(), now),
            (Ok(policy), _) => verdict(&self.job.history(), policy.as_ref(), ended, self.cancel.why(), now),
            (Err(failure), _) => Verdict::Archive { why: FinishReason::MALFORMED, failure: Some(failure.clone()), result: None },
        }
    }

    /// The write that records the verdict; `None` when the claim is lost.
    fn end(&self, verdict: &Verdict, now: Instant, notes: Document) -> Option<JobEnd> {
        let items = match &self.payload {
            Payload::Bundle(bundle) => Some(bundle.outcomes()),
            Payload::One { .. } | Payload::Unusable(_) => None,
        };
        end_of(verdict, &self.job, self.claim, (items, notes), now)
    }

    /// Calls the hooks of a job that has succeeded or failed; of a bundle, those of each item that has.
    async fn hooks(&mut self, context: &Arc<Context>, verdict: &Verdict) {
        match (&mut self.payload, verdict.for_hooks()) {
            (Payload::One { workable, .. }, Some((failure, last))) => workable.after(context, failure, last).await,
            (Payload::Bundle(bundle), _) => bundle.after(context, matches!(verdict, Verdict::Archive { .. })).boxed().await,
            (Payload::One { .. }, None) | (Payload::Unusable(_), _) => {}
        }
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

/// The outcomes of the items of a bundle, and the notes of a job.
type Made = (Option<Vec<Bson>>, Document);

/// The write that records the verdict; `None` when the claim is lost.
pub(super) fn end_of(verdict: &Verdict, job: &Job, claim: Claim, (items, notes): Made, now: Instant) -> Option<JobEnd> {
    let execution = |failure: Option<&Failure>| job.last_execution.clone().unwrap_or_default().ended(now, failure);
    let archive = |ending| Some(JobEnd::Archive(Box::new(Archival::ended(job, claim, ending))));
    let reschedule = |end| Some(JobEnd::Reschedule(Box::new(end)));
    match verdict {
        Verdict::Archive { why, failure, result } => {
            archive(Ending { result: result.clone(), items, notes, ..Ending::new(execution(failure.as_ref()), why.clone()) })
        }
        Verdict::Become { jobs } => {
            archive(Ending { becomes: jobs.as_slice().into(), notes, ..Ending::new(execution(None), FinishReason::DONE) })
        }
        Verdict::Retry { failure, at, again } => {
            reschedule(Rescheduling::retry(job, claim, &execution(Some(failure)), *at, again.counts()).with(items, notes))
        }
        Verdict::Release { at, .. } => reschedule(Rescheduling::release_until(job, claim, *at).with(None, notes)),
        Verdict::ClaimLost => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of_future<'a, F: Future>(_: impl FnOnce(&'a Environment, Box<Attempt>) -> F) -> usize {
        size_of::<F>()
    }

    /// The future is moved when its task begins, so each part that is not boxed costs every job.
    #[test]
    fn the_future_of_an_attempt_is_small() {
        assert!(size_of_future(run) <= 1_024, "{}", size_of_future(run));
    }
}
