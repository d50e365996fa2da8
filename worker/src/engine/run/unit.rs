//! A unit: a started job with everything that its execution needs. One function executes each unit, to its verdict.

use std::{sync::Arc, time::Duration};

use bson::Document;
use futures_util::FutureExt as _;
use recruiter_common::{
    failure::{self, Failure},
    instant::Instant,
    job::{Claim, FinishReason},
};
use tracing::Instrument as _;

use super::{bundle::Bundle, continuation, events::span_of, place::Place};
use crate::{
    cancellation::{Cancel, Cancellation},
    context::{Context, NotesCell},
    deadline::Deadline,
    engine::{
        dependencies::Policy,
        held::Started,
        record::verdict::{Verdict, verdict},
    },
    outcome::{Done, NotDone},
    panics::guarded,
    registry::{Ready, decode},
};

/// A started job with everything that its execution needs.
pub(super) struct Unit {
    pub(super) context: Arc<Context>,
    policy: Policy,
    pub(super) payload: Payload,
}

/// What a unit executes.
pub(super) enum Payload {
    One {
        workable: Arc<dyn Ready>,
        limit: Option<Duration>,
    },
    Bundle(Box<Bundle>),
    /// Nothing, for this reason.
    Unusable(Failure),
}

/// The end of a unit. It is boxed: the future of each running job would have room for it.
pub(super) struct Ended {
    pub(super) verdict: Verdict,
    pub(super) at: Instant,
    /// Whether a transaction of the workable has recorded it.
    pub(super) is_recorded: bool,
}

impl Unit {
    /// Prepares a unit. Decodes the workable and calls the retry policy: both are code of users.
    pub(super) fn new(place: Place<'_>, started: Started, claim: Option<Claim>, cancel: Arc<Cancel>) -> Box<Self> {
        let Started { mut job, start, policy, previous } = started;
        let asked = policy.and_then(|policy| {
            let is_last = guarded(|| policy.is_last_attempt(&job.history(), place.now()))?;
            Ok((policy, is_last))
        });
        let (policy, is_last_attempt) = match asked {
            Ok((policy, is_last)) => (Ok(policy), is_last),
            Err(failure) => (Err(failure), false),
        };
        // The job's document has the parameters as well: one copy is enough.
        let parameters = std::mem::take(&mut Arc::make_mut(&mut job).parameters);
        let payload = match (&policy, place.registry().handler(&job.class), job.bundle.as_ref().zip(claim)) {
            (Err(failure), ..) => Payload::Unusable(failure.clone()),
            (_, Err(failure), _) => Payload::Unusable(failure),
            (Ok(_), Ok(handler), Some((items, claim))) => Payload::Bundle(Box::new(Bundle::new(&job, items, claim, handler, &cancel))),
            (Ok(_), Ok(handler), None) => match decode(handler, parameters) {
                Ok((workable, limit)) => Payload::One { workable, limit },
                Err(failure) => Payload::Unusable(failure),
            },
        };
        let (ends, notes) = match (place, claim) {
            (Place::Session(environment), Some(claim)) => {
                (Some((claim, environment.transactions.clone())), NotesCell::new(claim, environment.recorder.notes_queue()))
            }
            (Place::Session(_) | Place::Alone(_), _) => (None, NotesCell::default()),
        };
        let context = Arc::new(Context {
            job,
            store: place.store().cloned(),
            start,
            is_last_attempt,
            last_execution: previous,
            item: None,
            deadline: Deadline::default(),
            cancel,
            ends,
            own_end: Arc::default(),
            notes,
            retry_after: Default::default(),
        });
        Box::new(Self { context, policy, payload })
    }

    /// Executes the unit, and decides what is recorded about it. Its slot is free before this returns.
    pub(super) async fn execute(&mut self, place: Place<'_>) -> Box<Ended> {
        let span = span_of(&self.context.job);
        #[cfg(feature = "opentelemetry")]
        let with_verdict = span.clone();
        let ended = self.enter(place).instrument(span).await;
        let at = place.ended(self.context.job.id).await;
        let committed = self.context.own_end.settled().await;
        let is_recorded = committed.is_some();
        let verdict = match (committed, ended) {
            (Some(done), _) => Verdict::Archive { why: FinishReason::DONE, failure: None, result: done.result },
            (None, Err(NotDone::ContinueAs(continuation))) if self.context.job.bundle.is_none() => {
                let store = place.store().map(Arc::as_ref);
                match continuation::documents(continuation, &self.context.job, store, at).boxed().await {
                    Ok(jobs) => self.becomes(jobs, at),
                    Err(not_done) => self.verdict(Err(not_done), at),
                }
            }
            (None, ended) => self.verdict(ended, at),
        };
        let verdict = verdict.put_off(*self.context.retry_after.lock(), at);
        #[cfg(feature = "opentelemetry")]
        super::traces::end(with_verdict, &self.context, &verdict);
        Box::new(Ended { verdict, at, is_recorded })
    }

    /// Enters the workable, unless its policy cannot be used or its cancellation was requested before. A bundle always ends with
    /// [`Done`]: its verdict follows from its items.
    async fn enter(&mut self, place: Place<'_>) -> Result<Done, NotDone> {
        let Self { context, policy, payload } = self;
        let policy = match policy {
            Ok(policy) => &**policy,
            Err(failure) => return Err(NotDone::GiveUp(failure.clone())),
        };
        let cancel = &context.cancel;
        if context.job.cancel_requested || cancel.why() == Some(Cancellation::Requested) {
            cancel.cancel(Cancellation::Requested);
            return Err(NotDone::Stopped(Failure::new(failure::CANCELLED, "cancelled before it was entered")));
        }
        if let Place::Session(environment) = place
            && environment.lease.is_over()
            && !environment.lease.may_begin(cancel).boxed().await
        {
            return Err(NotDone::NoResources(Failure::new(failure::INTERRUPTED, "the lease of its worker was over before it was entered")));
        }
        match (payload, place) {
            (Payload::One { workable, limit }, _) => place.execute(workable.clone(), context, *limit).await,
            (Payload::Bundle(bundle), Place::Session(environment)) => {
                bundle.execute(environment, policy, context).boxed().await;
                Ok(Done::default())
            }
            (Payload::Bundle(_), Place::Alone(_)) => unreachable!("a bundle has a claim of a session"),
            (Payload::Unusable(failure), _) => Err(NotDone::Failed(failure.clone())),
        }
    }

    fn becomes(&self, jobs: Vec<Document>, at: Instant) -> Verdict {
        match self.context.cancel.why() {
            Some(Cancellation::ClaimLost) => Verdict::ClaimLost,
            Some(Cancellation::Requested) => {
                let cancelled = Failure::new(failure::CANCELLED, "cancelled before it became other jobs");
                self.verdict(Err(NotDone::Stopped(cancelled)), at)
            }
            _ => Verdict::Become { jobs },
        }
    }

    fn verdict(&self, ended: Result<Done, NotDone>, at: Instant) -> Verdict {
        let (job, cancelled) = (&self.context.job, self.context.cancel.why());
        match (&self.policy, &self.payload) {
            (Ok(_), Payload::Bundle(bundle)) if ended.is_ok() => bundle.verdict(cancelled, at),
            (Ok(policy), _) => verdict(&job.history(), policy.as_ref(), ended, cancelled, at),
            (Err(failure), _) => Verdict::Archive { why: FinishReason::MALFORMED, failure: Some(failure.clone()), result: None },
        }
    }

    /// Calls the hooks of a job that has succeeded or failed; of a bundle, those of each item that has.
    pub(super) async fn hooks(&mut self, verdict: &Verdict) {
        let Self { context, payload, .. } = self;
        match (payload, verdict.for_hooks()) {
            (Payload::One { workable, .. }, Some((failure, last))) => workable.after(context, failure, last).await,
            (Payload::Bundle(bundle), _) => bundle.after(context, matches!(verdict, Verdict::Archive { .. })).boxed().await,
            (Payload::One { .. }, None) | (Payload::Unusable(_), _) => {}
        }
    }
}
