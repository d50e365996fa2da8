//! Files of jobs: deletes those whose job is gone, and uploads that were never finished. Both are walked by their ids, some in each pass.

use bson::oid::ObjectId;
use chrono::TimeDelta;
use recruiter_common::store::{Store, StoreError};

use crate::Pass;

/// Maximum number of files that one step examines. Each has its own deletes.
const STEP: i64 = 100;
/// A file is written before its job. It is deleted without one only if it is older than this.
const OLDER_THAN: TimeDelta = TimeDelta::days(1);

/// The walks.
#[derive(Debug, Default)]
pub(crate) struct Files {
    files: Walk,
    uploads: Walk,
}

#[derive(Debug, Default)]
struct Walk {
    /// The last file that was examined; `None` at the begin.
    after: Option<ObjectId>,
    is_over: bool,
}

impl Files {
    /// Goes on with both walks. Returns whether they are at their ends.
    pub(crate) async fn tick(&mut self, store: &Store, pass: &Pass<'_>) -> Result<bool, StoreError> {
        let before = store.now() - OLDER_THAN;
        let (mut files, mut uploads) = (0, 0);
        if !self.files.is_over {
            let step = |after| store.prune_files(after, before, STEP);
            (files, self.files.is_over) = pass.walk(&mut self.files.after, step).await?;
        }
        if !self.uploads.is_over {
            let step = |after| store.prune_chunks(after, before, STEP);
            (uploads, self.uploads.is_over) = pass.walk(&mut self.uploads.after, step).await?;
        }
        pass.meters.pruned_files(files + uploads);
        if files + uploads > 0 {
            tracing::info!(files, uploads, "deleted files without a job, and uploads that were never finished");
        }
        Ok(self.files.is_over && self.uploads.is_over)
    }
}
