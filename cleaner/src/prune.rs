//! Retention: what ended long ago leaves the archive, in bounded batches.

use recruiter_common::{
    instant::Instant,
    shutdown::Shutdown,
    store::{Store, StoreError},
};

/// Documents deleted at a time: short enough not to hold anybody up.
const BATCH: i64 = 1_000;

/// Deletes everything that ended before `before`.
pub(crate) async fn tick(store: &Store, before: Instant, shutdown: &Shutdown) -> Result<(), StoreError> {
    let mut count = 0;
    while !shutdown.is_requested() {
        match store.prune_archived(before, BATCH).await? {
            0 => break,
            pruned => count += pruned,
        }
    }
    if count > 0 {
        tracing::info!(count, "pruned the archive");
    }
    Ok(())
}
