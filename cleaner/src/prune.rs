//! Retention: deletes jobs from the archive that ended long ago, in bounded batches.

use recruiter_common::{
    instant::Instant,
    store::{Store, StoreError},
};

use crate::Pass;

/// Maximum number of documents that one command deletes. It is small, so that other operations do not wait long.
const BATCH: i64 = 1_000;

/// Deletes jobs that ended before `before`. Returns whether none are left.
pub(crate) async fn tick(store: &Store, before: Instant, pass: &Pass<'_>) -> Result<bool, StoreError> {
    let (mut count, mut all) = (0, false);
    for _ in pass.steps() {
        match store.prune_archived(before, BATCH).await? {
            0 => {
                all = true;
                break;
            }
            pruned => count += pruned,
        }
    }
    if count > 0 {
        tracing::info!(count, "pruned the archive");
    }
    Ok(all)
}
