//! One attempt at a job in a session: executes it, records its end, and calls its hooks.

use std::{sync::Arc, time::Instant as Monotonic};

use recruiter_common::{ids::JobId, job::Claim, store::Recorded, telemetry::milliseconds};

use super::{
    events::{Events, log},
    place::Place,
    unit::{Ended, Payload, Unit},
};
use crate::{
    cancellation::Cancel,
    engine::{
        environment::Environment,
        held::Started,
        record::ending::{JobEnd, end_of},
    },
    notes,
};

/// Runs a job that has a slot. Returns after the hooks. [`Held::note_ended`](crate::engine::held::Held::note_ended) has freed the slot
/// before.
pub(super) async fn run(environment: &Environment, started: Started, claim: Claim, cancel: Arc<Cancel>) -> JobId {
    let unit = Unit::new(Place::Session(environment), started, Some(claim), cancel);
    run_unit(environment, unit).await
}

/// This future exists once for each running job. Large and rarely used parts are boxed to keep it small.
async fn run_unit(environment: &Environment, mut unit: Box<Unit>) -> JobId {
    let context = unit.context.clone();
    let job = context.job.id;
    let began = Monotonic::now();
    let events = Events::of_start(environment, &context);
    let ended = unit.execute(Place::Session(environment)).await;
    let took = began.elapsed();
    events.executed(took);
    let recorded = match write_of(&unit, &ended) {
        _ if ended.is_recorded => Some(Recorded::Yes),
        Some(end) => environment.recorder.record(end).await,
        None => Some(Recorded::ClaimLost),
    };
    let verdict = &ended.verdict;
    environment.dependencies.source.note_ended(job, verdict, recorded);
    match recorded {
        Some(Recorded::Yes) => {}
        Some(Recorded::ClaimLost) => {
            // It was rescued. Or the first write has succeeded and lost its reply, and the job was started or deleted since.
            tracing::warn!(job.id = %job, "this start no longer holds the job: it was rescued, or an earlier write has recorded its end");
            return job;
        }
        Some(Recorded::Refused) | None => {
            tracing::error!(job.id = %job, "failed to record the end of a job; a cleaner will end it");
            return job;
        }
    }
    environment.held.note_recorded(job);
    log(&environment.dependencies.store, &context.job, milliseconds(took), verdict);
    events.end(verdict);
    unit.hooks(verdict).await;
    job
}

/// The write that records an end; `None` if the claim is lost.
fn write_of(unit: &Unit, ended: &Ended) -> Option<JobEnd> {
    let items = match &unit.payload {
        Payload::Bundle(bundle) => Some(bundle.outcomes()),
        Payload::One { .. } | Payload::Unusable(_) => None,
    };
    let (claim, _) = unit.context.ends.as_ref()?;
    end_of(&ended.verdict, &unit.context.job, *claim, (items, notes::at_the_end(&unit.context)), ended.at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of_future<'a, F: Future>(_: impl FnOnce(&'a Environment, Box<Unit>) -> F) -> usize {
        size_of::<F>()
    }

    /// The future is moved when its task begins, so each part that is not boxed costs every job.
    #[test]
    fn the_future_of_an_attempt_is_small() {
        assert!(size_of_future(run_unit) <= 1_024, "{}", size_of_future(run_unit));
    }
}
