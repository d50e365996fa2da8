//! Jobs that were not started before their `expires_at`. The start refuses them, and this file finds those that no worker takes.

use bson::{Document, doc};

use super::{
    Match, Store, StoreError, id_of,
    readable::Readable,
    schema::{EXPIRING_JOBS, Feature, any_date},
};
use crate::instant::Instant;

impl Store {
    /// Unlocked jobs that have expired at `now`, the first `most` by their expiry, with the sizes of their documents.
    ///
    /// None if no process has ever enqueued a job with an expiry.
    /// Filter: unlocked, expired. Index: `expiring_jobs`. Invariant: none, the archival repeats the expiry that was read.
    pub async fn expired_jobs(&self, now: Instant, most: i64) -> Result<Vec<Match>, StoreError> {
        if !self.is_in_use(Feature::Expiry).await? {
            return Ok(Vec::new());
        }
        let (scheduled, index) = (self.scheduled.clone(), self.index(EXPIRING_JOBS));
        let filter = doc! { "locked": false, "expires_at": expired_at(bson::DateTime::from_chrono(now)) };
        let found = self.indexed("expired_jobs", async move {
            let size = doc! { "size": { "$bsonSize": "$$ROOT" } };
            let found = scheduled.find(filter).projection(size).sort(doc! { "expires_at": 1 }).limit(most);
            found.hint(index).await?.readable().await
        });
        let size = |job: &Document| job.get_i32("size").ok().and_then(|size| usize::try_from(size).ok()).unwrap_or_default();
        Ok(found.await?.iter().filter_map(|job| Some(Match { job: id_of(job)?, bytes: size(job) })).collect())
    }
}

/// What the index `expiring_jobs` has of the dates that are over at `now`.
pub(super) fn expired_at(now: bson::DateTime) -> Document {
    let mut expired = any_date();
    expired.insert("$lte", now);
    expired
}
