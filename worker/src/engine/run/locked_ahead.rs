//! Jobs that are locked ahead: their start is written before a slot is free.
//!
//! Otherwise each slot is idle while the start of its next job is on its way, and each start locks at most as many jobs as there are slots.
//! A job is locked ahead only if a death of this worker would reschedule it, at its first start, and without a `unique` key, expiry or items.
//! So a death costs it one attempt at most. A limited job may be locked before it has permits, unless it is in a line or has a rate. The worker
//! locks as many ahead as end while a few starts are answered, so none of long jobs. A job that waits much longer for its slot than was meant is
//! released, and so is every such job when the worker stops or a pause begins. A release does not count as an attempt.

use std::{sync::Arc, time::Duration};

use recruiter_common::{
    ids::JobId,
    job::Claim,
    shutdown::pause,
    store::{Recorded, Rescheduling},
};
use tokio::sync::oneshot;

use super::attempt;
use crate::{
    cancellation::{Cancel, Cancellation},
    engine::{environment::Environment, held::Started, record::ending::JobEnd},
};

/// How long a job waits for its slot at most.
const WAITS_AT_MOST: Duration = Duration::from_millis(100);

/// Runs a started job in the slot that is reserved for it; or, if it is locked ahead, once it has its slot, or releases it.
pub(crate) async fn run(
    environment: &Environment,
    started: Started,
    claim: Claim,
    (cancel, slot): (Arc<Cancel>, Option<oneshot::Receiver<()>>),
) -> JobId {
    let has_slot = match slot {
        Some(slot) => gets_slot(environment, started.job.id, &cancel, slot).await,
        None => true,
    };
    if has_slot { attempt::run(environment, started, claim, cancel).await } else { release(environment, &started, claim, &cancel).await }
}

/// Waits until the job can be run, or must be released.
async fn gets_slot(environment: &Environment, job: JobId, cancel: &Cancel, mut slot: oneshot::Receiver<()>) -> bool {
    tokio::select! {
        biased;
        _ = &mut slot => {}
        () = cancel.cancelled() => {}
        () = pause(WAITS_AT_MOST) => {}
    }
    let has_slot = environment.held.stop_waiting(job);
    match cancel.why() {
        // It ends without being entered.
        Some(Cancellation::Requested) => true,
        Some(Cancellation::TimeLimit | Cancellation::WorkerStopping | Cancellation::MemoryLimit | Cancellation::ClaimLost) => false,
        None => has_slot && !environment.lease.is_over(),
    }
}

/// Unlocks the job as it was before its start.
async fn release(environment: &Environment, started: &Started, claim: Claim, cancel: &Cancel) -> JobId {
    let job = started.job.id;
    environment.held.note_not_executed(job);
    if cancel.why() != Some(Cancellation::ClaimLost) {
        tracing::debug!(job.id = %job, "releasing a job that was locked ahead");
        let released = Rescheduling::release(&started.job, claim);
        match environment.recorder.record(JobEnd::Reschedule(Box::new(released))).await {
            Some(Recorded::Yes | Recorded::ClaimLost) => environment.held.note_unlocked(job),
            Some(Recorded::Refused) | None => tracing::error!(job.id = %job, "failed to release a job; a cleaner will end it"),
        }
    }
    job
}
