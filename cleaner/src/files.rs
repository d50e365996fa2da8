//! Files of jobs: deletes those whose job is gone, and uploads that were never finished. Both are walked by their ids, some in each pass.

use bson::oid::ObjectId;
use chrono::TimeDelta;
use recruiter_common::{
    shutdown::Shutdown,
    store::{Store, StoreError},
};

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

/// The id of the last file that was examined; `None` at the begin.
#[derive(Debug, Default)]
struct Walk(Option<ObjectId>);

#[derive(Clone, Copy)]
enum Examined {
    Files,
    Uploads,
}

impl Files {
    /// Goes on with both walks. Returns whether they are at their ends: then they begin again with the next pass.
    pub(crate) async fn tick(&mut self, store: &Store, shutdown: &Shutdown) -> Result<bool, StoreError> {
        let files = self.files.go_on(Examined::Files, store, shutdown).await?;
        let uploads = self.uploads.go_on(Examined::Uploads, store, shutdown).await?;
        if files + uploads > 0 {
            tracing::info!(files, uploads, "deleted files without a job, and uploads that were never finished");
        }
        Ok(self.files.0.is_none() && self.uploads.0.is_none())
    }
}

impl Walk {
    /// Returns the number of deleted files.
    async fn go_on(&mut self, examined: Examined, store: &Store, shutdown: &Shutdown) -> Result<u64, StoreError> {
        let (before, mut deleted) = (store.now() - OLDER_THAN, 0);
        let pass = Pass::begin(shutdown);
        while pass.goes_on() {
            let step = match examined {
                Examined::Files => store.prune_files(self.0, before, STEP).await?,
                Examined::Uploads => store.prune_chunks(self.0, before, STEP).await?,
            };
            self.0 = step.next;
            deleted += step.deleted;
            if step.next.is_none() {
                break;
            }
        }
        Ok(deleted)
    }
}
