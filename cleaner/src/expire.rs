//! Expiry: archives jobs that no worker has started before their `expires_at`, and releases jobs whose predecessor has ended unnoticed.
//!
//! A worker archives an expired job itself when it gets one. This duty is for the others: their groups have no worker, or all are busy.

use recruiter_common::{
    failure::Failure,
    job::{FinishReason, Job, JobState},
    shutdown::Shutdown,
    store::{Archival, BATCH_BYTES, CommitSession, Recorded, Store, StoreError, cut},
};

use crate::Pass;

/// Maximum number of jobs that one pass archives.
const MOST: i64 = 10_000;
/// Maximum number of jobs in one transaction.
const BATCH: usize = 500;

/// Archives expired jobs, and releases waiting successors. Harmless to repeat, also by several cleaners. Returns whether it has ended all
/// that it has found.
pub(crate) async fn tick(store: &Store, session: &mut CommitSession, shutdown: &Shutdown) -> Result<bool, StoreError> {
    let released = store.release_orphaned_successors().await?;
    if released > 0 {
        tracing::info!(count = released, "released jobs that waited for the end of another one");
    }
    let expired = store.expired_jobs(store.now(), MOST).await?;
    let mut count = 0;
    let mut batches = cut(expired, BATCH, BATCH_BYTES, |found| found.bytes).into_iter();
    let pass = Pass::begin(shutdown);
    while pass.goes_on()
        && let Some(batch) = batches.next()
    {
        let batch: Vec<_> = batch.iter().map(|found| found.job).collect();
        let now = store.now();
        let unstarted = store.jobs_by_id(&batch).await?.into_values().filter(|stored| !stored.is_archived).filter_map(|stored| {
            // A document that is not a job is left to a worker.
            let job = Job::try_from(stored.document).ok()?;
            let is_waiting = matches!(job.state, JobState::Scheduled { .. });
            let archival = || Archival::unstarted(job.id, &job.document, &FinishReason::EXPIRED, &Failure::expired(), now);
            (is_waiting && job.is_expired(now)).then(archival)
        });
        let recorded = store.finish(session, &unstarted.collect::<Vec<_>>()).await?;
        count += recorded.iter().filter(|recorded| **recorded == Recorded::Yes).count();
    }
    if count > 0 {
        tracing::info!(count, "archived jobs that were not started before they expired");
    }
    Ok(batches.len() == 0)
}
