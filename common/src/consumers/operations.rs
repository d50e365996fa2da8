//! Consumer groups: documents in `consumers`.
//!
//! The leading recruiter moves the position of a group. All others change its definition, and each such change has a new revision. A move
//! has the position and the revision in its filter.

use std::sync::Arc;

use bson::{Document, RawDocumentBuf, doc};
use futures_util::{FutureExt as _, TryStreamExt};
use mongodb::options::ReadConcern;

use crate::mongo::{CommitSession, Feature, Store, StoreError, call, commit, write_in};

/// Maximum number of consumer groups.
pub const MOST_CONSUMERS: u32 = 100;

impl Store {
    /// All consumer groups, by name, as they are stored: one that cannot be decoded does not hide the others. None, if the database has no
    /// messages.
    ///
    /// Filter: a text as the name. Index: `_id`. Invariant: none, the filter of each move has the position that was read.
    pub async fn stored_consumers(&self) -> Result<Vec<RawDocumentBuf>, StoreError> {
        if !self.is_in_use(Feature::Messages).await? {
            return Ok(Vec::new());
        }
        let consumers = self.consumers.clone_with_type::<RawDocumentBuf>();
        call("stored_consumers", async move {
            consumers
                .find(doc! { "_id": { "$gte": "" } })
                .sort(doc! { "_id": 1 })
                .limit(MOST_CONSUMERS.into())
                .read_concern(ReadConcern::local())
                .await?
                .try_collect()
                .await
        })
        .await
    }

    /// Writes the definition of a consumer group. Only a new group gets the position.
    ///
    /// Filter: name. Index: `_id`. Invariant: each message becomes one job: a change of the definition keeps the position.
    pub(crate) async fn put_consumer(&self, name: &str, definition: Document, position: &str) -> Result<(), StoreError> {
        let new = doc! { "created_at": self.now(), "forwarded": 0_i64, "position": position };
        let update = doc! { "$set": definition, "$setOnInsert": new, "$unset": { "problem": "" }, "$inc": { "revision": 1_i64 } };
        self.mend_numbers(name).await?;
        let (consumers, id) = (self.consumers.clone(), doc! { "_id": name });
        call("put_consumer", async move { consumers.update_one(id, update).upsert(true).await }).await.map(drop)
    }

    /// Replaces numbers of a consumer group that were given another type by hand: `$inc` would be refused for ever. The revision becomes one
    /// that no process has read.
    async fn mend_numbers(&self, name: &str) -> Result<(), StoreError> {
        let number = |field: &str, otherwise: i64| {
            let field = format!("${field}");
            doc! { "$cond": [{ "$in": [{ "$type": &field }, ["long", "missing"]] }, &field, otherwise] }
        };
        let (revision, none) = (number("revision", self.now().timestamp_millis()), |field| number(field, 0));
        let numbers = doc! { "$set": { "revision": revision, "forwarded": none("forwarded"), "skipped": none("skipped") } };
        let (consumers, id) = (self.consumers.clone(), doc! { "_id": name });
        call("mend_consumer", async move { consumers.update_one(id, vec![numbers]).await }).await.map(drop)
    }

    /// Moves the position of a consumer group. Returns false if there is none.
    ///
    /// Filter: name. Index: `_id`. Invariant: none, an operator decides it.
    pub(crate) async fn move_consumer(&self, name: &str, position: &str) -> Result<bool, StoreError> {
        self.mend_numbers(name).await?;
        let (consumers, id) = (self.consumers.clone(), doc! { "_id": name });
        let update = doc! { "$set": { "position": position }, "$unset": { "problem": "" }, "$inc": { "revision": 1_i64 } };
        Ok(call("move_consumer", async move { consumers.update_one(id, update).await }).await?.matched_count == 1)
    }

    /// Removes a consumer group. There is none, if the database has no messages.
    ///
    /// Filter: name. Index: `_id`. Invariant: none.
    pub(crate) async fn remove_consumer(&self, name: &str) -> Result<bool, StoreError> {
        if !self.is_in_use(Feature::Messages).await? {
            return Ok(false);
        }
        let (consumers, id) = (self.consumers.clone(), doc! { "_id": name });
        Ok(call("remove_consumer", async move { consumers.delete_one(id).await }).await?.deleted_count == 1)
    }

    /// Notes why a consumer group has stopped, for people.
    ///
    /// Filter: name, and the revision as it was read. Index: `_id`. Invariant: none.
    /// Loses when the group was changed or moved: the problem may be over.
    pub async fn note_consumer_problem(&self, name: &str, revision: i64, problem: &str) -> Result<(), StoreError> {
        let (consumers, as_read) = (self.consumers.clone(), doc! { "_id": name, "revision": revision });
        let problem = doc! { "text": problem, "at": self.now() };
        let update = doc! { "$set": { "problem": problem } };
        call("note_consumer_problem", async move { consumers.update_one(as_read, update).await }).await.map(drop)
    }

    /// Moves the position of a consumer group past messages of which none becomes a job. Returns whether the group was as it was read.
    ///
    /// Filter: name, position and revision as they were read. Index: `_id`. Invariant: one job for each message.
    /// Loses when another leader has moved it, or the group was changed, reset or removed.
    pub(crate) async fn pass_messages(&self, name: &str, (position, revision): (String, i64), to: &str) -> Result<bool, StoreError> {
        let consumers = self.consumers.clone();
        let as_read = doc! { "_id": name, "position": position, "revision": revision };
        let update = doc! { "$set": { "position": to } };
        Ok(call("pass_messages", async move { consumers.update_one(as_read, update).await }).await?.matched_count == 1)
    }

    /// Inserts the jobs of messages and moves the position of their consumer group, in one transaction. Returns whether the group was as it
    /// was read; if not, nothing is changed.
    ///
    /// Filter: name, position and revision as they were read. Index: `_id`. Invariant: one job for each message. Harmless to repeat: after an
    /// unknown outcome it matches nothing.
    /// Loses when another leader has made these messages jobs, or the group was changed, moved or removed.
    pub(crate) async fn forward_messages(
        &self,
        session: &mut CommitSession,
        name: &str,
        (position, revision): (String, i64),
        to: &str,
        jobs: Vec<Document>,
        skipped: i64,
    ) -> Result<bool, StoreError> {
        let as_read = doc! { "_id": name, "position": position, "revision": revision };
        let count = i64::try_from(jobs.len()).unwrap_or(i64::MAX);
        let counts = doc! { "forwarded": count, "skipped": skipped };
        let update = doc! { "$set": { "position": to }, "$inc": counts, "$unset": { "problem": "" } };
        let command = doc! { "update": self.consumers.name(), "updates": [{ "q": as_read, "u": update }] };
        let jobs = Arc::<[Document]>::from(jobs);
        let with = (self.clone(), jobs.clone(), command);
        let forwarded = self.transaction("forward_messages", session, with, |open, (store, jobs, command)| {
            async move {
                if write_in(open, &store.database, command).await? != 1 {
                    open.abort_transaction().await?;
                    return Ok(false);
                }
                if !jobs.is_empty() {
                    store.scheduled.insert_many(jobs.iter()).session(&mut *open).await?;
                }
                commit(open).await.map(|()| true)
            }
            .boxed()
        });
        let is_forwarded = forwarded.await?;
        if is_forwarded {
            self.tell_inserted(jobs.iter());
        }
        Ok(is_forwarded)
    }
}
