//! Retention: deletes jobs from the archive that ended long ago, in bounded batches.

use recruiter_common::{
    instant::Instant,
    shutdown::Shutdown,
    store::{Store, StoreError},
};

/// Maximum number of documents that one command deletes. It is small, so that other operations do not wait long.
const BATCH: i64 = 1_000;

/// Maximum number of batches in one pass. Between two passes the cleaner polls the roster.
const BATCHES: usize = 10;

/// Deletes jobs that ended before `before`. Returns whether none are left.
pub(crate) async fn tick(store: &Store, before: Instant, shutdown: &Shutdown) -> Result<bool, StoreError> {
    let (mut count, mut all) = (0, false);
    for _ in 0..BATCHES {
        if shutdown.is_requested() {
            break;
        }
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
