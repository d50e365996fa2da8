//! Expiry: archives jobs that no worker has started before their `expires_at`, and releases jobs whose predecessor has ended unnoticed.
//!
//! A worker archives an expired job itself when it gets one. This duty is for the others: their groups have no worker, or all are busy.

use recruiter_common::{
    failure::Failure,
    job::{FinishReason, Job, JobState},
    shutdown::Shutdown,
    store::{Archival, CommitSession, Recorded, Store, StoreError},
};

/// Maximum number of jobs that one pass archives.
const MOST: i64 = 10_000;
/// Maximum number of jobs in one transaction.
const BATCH: usize = 500;
/// Maximum size of the documents in one transaction, in bytes. A larger document is alone.
const BATCH_BYTES: usize = 8 * 1024 * 1024;

/// Archives expired jobs, and releases waiting successors. Harmless to repeat, also by several cleaners.
pub(crate) async fn tick(store: &Store, session: &mut CommitSession, shutdown: &Shutdown) -> Result<(), StoreError> {
    let released = store.release_orphaned_successors().await?;
    if released > 0 {
        tracing::info!(count = released, "released jobs that waited for the end of another one");
    }
    let mut expired = store.expired_jobs(store.now(), MOST).await?;
    let mut count = 0;
    while !expired.is_empty() && !shutdown.is_requested() {
        let mut bytes = 0;
        let fits = |bytes: &mut usize, more: usize| {
            *bytes += more;
            *bytes <= BATCH_BYTES
        };
        let length = expired.iter().take(BATCH).take_while(|found| fits(&mut bytes, found.bytes)).count().max(1);
        let batch: Vec<_> = expired.drain(..length).map(|found| found.job).collect();
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
    Ok(())
}
