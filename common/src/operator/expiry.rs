//! Jobs that were not started before their `expires_at`. The start refuses them, and this file finds those that no worker takes.

use std::collections::HashMap;

use bson::{Document, doc};

use super::{COUNTED, Match};
use crate::{
    base::Instant,
    job::Lane,
    mongo::{EXPIRING_JOBS, Feature, Readable, Store, StoreError, any_date, id_of},
};

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
        let filter = doc! { "locked": false, "expires_at": expired_at(now) };
        let found = self.indexed("expired_jobs", async move {
            let size = doc! { "size": { "$bsonSize": "$$ROOT" } };
            let found = scheduled.find(filter).projection(size).sort(doc! { "expires_at": 1 }).limit(most);
            found.hint(index).await?.readable().await
        });
        let size = |job: &Document| job.get_i32("size").ok().and_then(|size| usize::try_from(size).ok()).unwrap_or_default();
        Ok(found.await?.iter().filter_map(|job| Some(Match { job: id_of(job)?, bytes: size(job) })).collect())
    }

    /// Number of due jobs of each lane of this group that have expired at `now`. At most [`COUNTED`] expired jobs of all groups are read.
    ///
    /// Filter: unlocked, expired, group, due. Index: `expiring_jobs`. Invariant: none, for people.
    pub async fn expired_in_group(&self, group: &str, now: Instant) -> Result<HashMap<Lane, u64>, StoreError> {
        if !self.is_in_use(Feature::Expiry).await? {
            return Ok(HashMap::new());
        }
        let (scheduled, index) = (self.scheduled.clone(), self.index(EXPIRING_JOBS));
        let stages = [
            doc! { "$match": { "locked": false, "expires_at": expired_at(now) } },
            doc! { "$limit": i64::try_from(COUNTED).unwrap_or(i64::MAX) },
            doc! { "$match": { "group": group, "scheduled_at": { "$lte": now } } },
            doc! { "$group": { "_id": { "class": "$workable.class", "gate": "$gate" }, "jobs": { "$sum": 1_i64 } } },
        ];
        let found: Vec<Document> = self
            .indexed("expired_in_group", async move { scheduled.aggregate(stages).hint(index).batch_size(100_000).await?.readable().await })
            .await?;
        let count = |found: &Document| {
            let id = found.get_document("_id").ok()?;
            let lane = Lane { gate: id.get_str("gate").ok().map(str::to_owned), ..Lane::new(group, id.get_str("class").ok()?) };
            Some((lane, u64::try_from(found.get_i64("jobs").ok()?).ok()?))
        };
        Ok(found.iter().filter_map(count).collect())
    }
}

/// What the index `expiring_jobs` has of the dates that are over at `now`.
fn expired_at(now: Instant) -> Document {
    let mut expired = any_date();
    expired.insert("$lte", now);
    expired
}
