//! Retention: what ended long ago leaves the archive, in bounded batches.

use recruiter_common::{
    instant::Instant,
    shutdown::Shutdown,
    store::{Store, StoreError},
};

/// Documents deleted at a time: short enough not to hold anybody up.
const BATCH: i64 = 1_000;

/// Batches in one pass, at most: between passes the cleaner looks after the living.
const BATCHES: usize = 10;

/// Deletes what ended before `before`; says whether that was all.
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
