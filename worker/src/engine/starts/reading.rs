//! Reads assigned jobs. Over a slow connection they are read in portions that arrive in time.

use std::{
    sync::Arc,
    time::{Duration, Instant as Monotonic},
};

use bson::RawDocumentBuf;
use recruiter_common::{
    ids::JobId,
    job::{CorruptJob, Job},
    store::StoreError,
    telemetry::chain,
};

use crate::engine::{dependencies::Dependencies, record::portion::Portion};

/// Maximum portion in bytes: as much as MongoDB sends in one reply. At this size the jobs are read without reading their sizes first.
const READ_AT_ONCE: usize = 16 * 1024 * 1024;
/// How long the jobs of one assignment are read in portions. The jobs that were read by then are started.
const READ_FOR: Duration = Duration::from_secs(5);

/// An unlocked job; or a document that is not a job, and the reason.
pub(crate) type Unlocked = Result<Arc<Job>, (JobId, RawDocumentBuf, CorruptJob)>;

/// Reads assigned jobs.
pub(crate) struct Reading {
    dependencies: Arc<Dependencies>,
    portion: Portion,
}

impl Reading {
    pub(crate) fn new(dependencies: Arc<Dependencies>) -> Self {
        Self { dependencies, portion: Portion::new(READ_AT_ONCE) }
    }

    /// Reads those of these jobs that are unlocked. A job that does not arrive in time stays due, for a later assignment. After a read has
    /// timed out, the sizes of the jobs are read first, and then the jobs in portions, the smallest first. So a large job delays no small
    /// one.
    pub(crate) async fn unlocked(&mut self, jobs: &[JobId]) -> Result<Vec<Unlocked>, StoreError> {
        if self.portion.is_whole() {
            return self.read(jobs).await;
        }
        let sizes = self.dependencies.store.sizes_of_unlocked(jobs).await?;
        let bytes = self.portion.bytes();
        let until = Monotonic::now() + READ_FOR;
        let mut found = Vec::with_capacity(sizes.len());
        let mut remaining = sizes.as_slice();
        while !remaining.is_empty() && (found.is_empty() || Monotonic::now() < until) {
            let (now, later) = remaining.split_at(fitting(remaining, bytes));
            let ids: Vec<JobId> = now.iter().map(|(id, _)| *id).collect();
            self.dependencies.watchdog.progress();
            match self.read(&ids).await {
                Ok(read) => found.extend(read),
                // The jobs that were read before are started.
                Err(error) if !found.is_empty() => {
                    tracing::debug!(error = chain(&error), "not all assigned jobs could be read in time; the others stay due");
                    break;
                }
                Err(error) => return Err(error),
            }
            remaining = later;
        }
        Ok(found)
    }

    /// Reads jobs with one call. If it times out, later calls read half as many bytes.
    async fn read(&mut self, jobs: &[JobId]) -> Result<Vec<Unlocked>, StoreError> {
        let read = self.dependencies.store.unlocked(jobs).await;
        if let Err(StoreError::TimedOut { .. }) = &read {
            self.portion.halve();
        }
        read
    }
}

/// How many of these jobs fit into `bytes` bytes: at least one.
fn fitting(jobs: &[(JobId, usize)], bytes: usize) -> usize {
    let mut sum = 0_usize;
    let fits = jobs.iter().take_while(|(_, size)| {
        sum = sum.saturating_add(*size);
        sum <= bytes
    });
    fits.count().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_portion_has_the_jobs_that_fit_and_one_at_least() {
        let check = |sizes: &[usize]| fitting(&sizes.iter().map(|size| (JobId::new(), *size)).collect::<Vec<_>>(), 10);
        assert_eq!([check(&[1, 2, 7, 1]), check(&[10, 1]), check(&[11]), check(&[4]), check(&[5, usize::MAX, 1])], [3, 1, 1, 1, 1]);
    }
}
