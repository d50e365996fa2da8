//! Expiry: archives jobs that no worker has started before their `expires_at`, and releases jobs whose predecessor has ended unnoticed.
//!
//! A worker archives an expired job itself when it gets one. This duty is for the others: their groups have no worker, or all are busy.

use std::collections::VecDeque;

use recruiter_common::{
    failure::Failure,
    ids::JobId,
    job::{FinishReason, Job, JobState},
    store::{Archival, BATCH_BYTES, CommitSession, Recorded, Store, StoreError, cut},
};

use crate::Pass;

/// Maximum number of jobs that one search finds.
const MOST: i64 = 10_000;
/// Maximum number of jobs in one transaction.
const BATCH: usize = 500;

/// The expired jobs that were found and are still to be archived, a batch for each transaction.
#[derive(Default)]
pub(crate) struct Expiry {
    session: CommitSession,
    found: VecDeque<Vec<JobId>>,
}

impl Expiry {
    /// Archives expired jobs, and releases waiting successors. Harmless to repeat, also by several cleaners. Returns whether it has ended all
    /// that it has found.
    pub(crate) async fn tick(&mut self, store: &Store, pass: &Pass<'_>) -> Result<bool, StoreError> {
        if self.found.is_empty() {
            self.search(store).await?;
        }
        let mut count = 0;
        for _ in pass.steps() {
            let Some(batch) = self.found.pop_front() else { break };
            count += self.archive(store, &batch).await?;
        }
        pass.meters.expired(count);
        if count > 0 {
            tracing::info!(count, "archived jobs that were not started before they expired");
        }
        Ok(self.found.is_empty())
    }

    async fn search(&mut self, store: &Store) -> Result<(), StoreError> {
        let released = store.release_orphaned_successors().await?;
        if released > 0 {
            tracing::info!(count = released, "released jobs that waited for the end of another one");
        }
        let batches = cut(store.expired_jobs(store.now(), MOST).await?, BATCH, BATCH_BYTES, |found| found.bytes);
        self.found = batches.into_iter().map(|batch| batch.iter().map(|found| found.job).collect()).collect();
        Ok(())
    }

    /// Archives those of these jobs that have expired. Returns their number.
    async fn archive(&mut self, store: &Store, batch: &[JobId]) -> Result<usize, StoreError> {
        let now = store.now();
        let unstarted = store.jobs_by_id(batch).await?.into_values().filter(|stored| !stored.is_archived).filter_map(|stored| {
            // A document that is not a job is left to a worker.
            let job = Job::try_from(stored.document).ok()?;
            let is_waiting = matches!(job.state, JobState::Waiting { .. });
            let archival = || Archival::unstarted(job.id, &job.document, &FinishReason::EXPIRED, &Failure::expired(), now);
            (is_waiting && job.is_expired(now)).then(archival)
        });
        let recorded = store.finish(&mut self.session, &unstarted.collect::<Vec<_>>()).await?;
        Ok(recorded.iter().filter(|recorded| **recorded == Recorded::Yes).count())
    }
}
