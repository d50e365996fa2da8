//! Files of jobs: deletes those whose job is gone, and uploads that were never finished. Both are walked by their ids, some in each pass.

use bson::oid::ObjectId;
use chrono::TimeDelta;
use recruiter_common::store::{FilesStep, Store, StoreError};

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
        let files = self.files.go_on(pass, |after| store.prune_files(after, before, STEP)).await?;
        let uploads = self.uploads.go_on(pass, |after| store.prune_chunks(after, before, STEP)).await?;
        if files + uploads > 0 {
            tracing::info!(files, uploads, "deleted files without a job, and uploads that were never finished");
        }
        Ok(self.files.is_over && self.uploads.is_over)
    }
}

impl Walk {
    /// Returns the number of deleted files.
    async fn go_on<F>(&mut self, pass: &Pass<'_>, examine: impl Fn(Option<ObjectId>) -> F) -> Result<u64, StoreError>
    where
        F: Future<Output = Result<FilesStep, StoreError>>,
    {
        let mut deleted = 0;
        let mut steps = pass.steps();
        while !self.is_over && steps.next().is_some() {
            let step = examine(self.after).await?;
            (self.after, self.is_over) = (step.next, step.next.is_none());
            deleted += step.deleted;
        }
        Ok(deleted)
    }
}
