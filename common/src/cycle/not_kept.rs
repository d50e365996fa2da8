//! The number of jobs that were deleted after their success, for statistics. One document in `metadata` for each group and period.
//!
//! Jobs are counted after their deletion, with a write that is not repeated and that only the primary acknowledges. The number is never too
//! high. It is too low if a process dies between the two writes, if the write of a count fails, or after a failover.

use std::collections::BTreeMap;

use bson::{Document, RawDocumentBuf, doc};
use chrono::TimeDelta;
use mongodb::{ClientSession, error::Error};

use crate::{
    base::{Instant, JobId, chain, integer},
    mongo::{Readable, Store, StoreError, call},
};

/// The length of a period, in milliseconds.
const PERIOD_MS: i64 = 10_000;

/// Jobs that succeeded, and of which nothing was kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NotKept {
    /// Number of these jobs in each group.
    pub groups: BTreeMap<String, u64>,
    /// Begin of the first period that is counted.
    pub since: Instant,
}

/// The begin of the period of this instant.
fn period_of(at: Instant) -> Instant {
    at - TimeDelta::milliseconds(at.timestamp_millis().rem_euclid(PERIOD_MS))
}

/// The id of the count of a group in a period.
fn count_of(group: &str, at: Instant) -> Document {
    doc! { "not_kept_since": period_of(at), "group": group }
}

impl Store {
    /// Counts deleted jobs by their groups. A failure is only logged.
    ///
    /// Filter: group and period. Update: one more for each job; the first one inserts the count. Index: `_id`.
    /// Invariant: none, the number is for people. Not repeated: the outcome may be unknown.
    pub(crate) async fn count_not_kept(&self, groups: impl Iterator<Item = &str>) {
        let mut counts: BTreeMap<&str, i64> = BTreeMap::new();
        groups.for_each(|group| *counts.entry(group).or_default() += 1);
        if counts.is_empty() {
            return;
        }
        let now = self.now();
        let statement = |(group, count): (&str, i64)| {
            let id = count_of(group, now);
            doc! { "q": { "_id": id }, "u": { "$inc": { "count": count } }, "upsert": true }
        };
        let updates: Vec<Document> = counts.into_iter().map(statement).collect();
        let command = doc! { "update": self.metadata.name(), "updates": updates, "ordered": false, "writeConcern": { "w": 1 } };
        if let Err(error) = self.write("count_not_kept", command).await {
            tracing::debug!(error = chain(&error), "successes of which nothing is kept were not counted");
        }
    }

    /// Counts one deleted job as part of the caller's own transaction. This count is exact. It is a separate document, so the transaction
    /// conflicts with no other.
    ///
    /// Index: `_id`. Invariant: none, the number is for people.
    pub(crate) async fn count_not_kept_in(&self, session: &mut ClientSession, job: JobId, group: &str) -> Result<(), Error> {
        let mut id = count_of(group, self.now());
        id.insert("job", job);
        self.metadata.insert_one(doc! { "_id": id, "count": 1 }).session(session).await.map(drop)
    }

    /// The jobs that were deleted after their success, since the begin of the period that has `since`.
    ///
    /// Filter: counts of this period and later ones. Index: `_id`. Invariant: none.
    pub async fn not_kept(&self, since: Instant) -> Result<NotKept, StoreError> {
        let since = period_of(since);
        let (metadata, first) = (self.metadata.clone(), doc! { "not_kept_since": since });
        let counted: Vec<Document> =
            call("not_kept", async move { metadata.find(doc! { "_id": { "$gte": first } }).batch_size(10_000).await?.readable().await })
                .await?;
        let mut groups = BTreeMap::new();
        for counted in &counted {
            let count = integer(counted.get("count"));
            if let (Ok(Ok(group)), Some(count)) = (counted.get_document("_id").map(|id| id.get_str("group")), count) {
                *groups.entry(group.to_owned()).or_default() += u64::try_from(count).unwrap_or(0);
            }
        }
        Ok(NotKept { groups, since })
    }

    /// Deletes the counts of the periods before the one that has `before`. Writes only if there are some: while MongoDB blocks writes, a
    /// cleaner must go on to read the roster.
    ///
    /// Filter: counts of earlier periods. Index: `_id`. Invariant: none.
    pub async fn prune_not_kept(&self, before: Instant) -> Result<(), StoreError> {
        let first = doc! { "not_kept_since": period_of(before) };
        let metadata = self.metadata.clone();
        let old = async move {
            let old = doc! { "_id": { "$lt": first }, "_id.not_kept_since": { "$type": "date" } };
            let found = metadata.clone_with_type::<RawDocumentBuf>().find_one(old.clone()).projection(doc! { "_id": 1 }).await?;
            if found.is_some() { metadata.delete_many(old).await.map(drop) } else { Ok(()) }
        };
        call("prune_not_kept", old).await
    }
}
