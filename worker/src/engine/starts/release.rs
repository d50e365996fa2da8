//! Releases the jobs of [unconfirmed starts](crate::engine::held): they are unlocked as they were before the start.
//!
//! A start is unconfirmed if its reply was lost or arrived after the end of the lease, or if the archive could not be read. A start whose
//! reply was lost may lock its jobs later. Therefore the session searches for them until 30 s after the end of the start's lease.

use std::collections::HashMap;

use recruiter_common::{
    ids::{JobId, StartId, WorkerId},
    instant::Instant,
    store::{Archival, CommitSession, Held, Recorded, Rescheduling, StoreError},
    telemetry::chain,
};

use crate::engine::{dependencies::Dependencies, environment::Environment};

/// Number of jobs that are released in one step. The whole jobs are in memory then.
const STEP: usize = 50;

/// Releases the jobs that unconfirmed starts have locked by now. Returns whether the set of jobs that may be locked has changed: the roster
/// must list them, because a cleaner rescues the listed jobs when this process dies.
pub(crate) async fn release_unconfirmed(environment: &Environment, worker: WorkerId, now: Instant) -> bool {
    let held = &environment.held;
    let before = held.unconfirmed();
    let starts = held.begin_release();
    match release_locked(environment, worker, &starts).await {
        Ok(has_refused) => held.end_release(now, has_refused),
        Err(error) => {
            let count = starts.values().map(Vec::len).sum::<usize>();
            tracing::warn!(
                count,
                error = chain(&error),
                "failed to release jobs that were locked and not run; the next heartbeat repeats it"
            );
        }
    }
    held.unconfirmed() != before
}

/// Releases the locked jobs. Returns whether MongoDB refused to release some of them.
async fn release_locked(environment: &Environment, worker: WorkerId, starts: &HashMap<StartId, Vec<JobId>>) -> Result<bool, StoreError> {
    let Dependencies { store, watchdog, .. } = &*environment.dependencies;
    let claims = store.claims_of_starts_at_majority(starts).await?;
    let mut has_unreleased = false;
    for claims in claims.chunks(STEP) {
        watchdog.progress();
        let jobs: Vec<JobId> = claims.iter().map(|claim| claim.job()).collect();
        let (mut released, mut damaged) = (Vec::new(), Vec::new());
        for Held { holder, claim, job } in store.held_by(worker, &jobs).await? {
            match job {
                _ if !claims.contains(&claim) => {}
                Ok(job) => released.push(Rescheduling::release(&job, claim)),
                Err((document, error)) => damaged.push(Archival::undecodable(claim, holder, &document, &error, store.now())),
            }
        }
        let mut session = CommitSession::default();
        let mut recorded = store.finish(&mut session, &released).await?;
        recorded.extend(store.finish(&mut session, &damaged).await?);
        tracing::info!(count = recorded.len(), "released jobs that were locked and not run");
        if recorded.contains(&Recorded::Refused) {
            has_unreleased = true;
        } else {
            environment.held.note_released(claims);
        }
    }
    Ok(has_unreleased)
}
