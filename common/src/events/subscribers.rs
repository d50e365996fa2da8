//! The ring of events (`events`), and who subscribes to them (`metadata`, the document `subscribers`).
//!
//! One document of the ring has events of one process in their order, and the ids of jobs that have ended: `{at, by, first, events, ended}`.

use std::time::Duration;

use bson::{Bson, Document, RawDocumentBuf, Timestamp, doc, oid::ObjectId};
use chrono::TimeDelta;
use futures_util::TryStreamExt;
use mongodb::{
    Cursor,
    options::{Acknowledgment, CursorType, ReadConcern, WriteConcern},
};

use super::Wanted;
use crate::{
    base::Pattern,
    mongo::{Store, StoreError, call, readable, schema},
};

/// The document in `metadata` that names what subscribers ask for.
const SUBSCRIBERS: &str = "subscribers";
/// How long the server holds a tailing read open before it returns an empty reply.
const AWAIT: Duration = Duration::from_secs(10);
/// Maximum number of documents that are read of the past.
const PAST: i64 = 100_000;

/// What a reader of the ring is interested in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingPart {
    /// Events.
    Events,
    /// The ids of jobs that have ended.
    Ends,
}

impl RingPart {
    /// What is read of a document. Documents without this part arrive as well, and are small.
    fn fields(self) -> Document {
        match self {
            Self::Events => doc! { "at": 1, "by": 1, "first": 1, "events": 1 },
            Self::Ends => doc! { "ended": 1 },
        }
    }
}

impl Store {
    /// Creates the ring of events if it is missing, with this size in bytes; 16 MiB by default. An existing ring keeps its size.
    ///
    /// Index: none. Invariant: none.
    pub async fn prepare_events(&self, size: Option<i64>) -> Result<(), StoreError> {
        schema::prepare_events(self, size).await
    }

    /// Adds a document to the ring, acknowledged by the primary only.
    ///
    /// Index: none. Invariant: none.
    pub(crate) async fn insert_events(&self, document: Document) -> Result<(), StoreError> {
        let events = self.events.clone();
        let fast = WriteConcern::builder().w(Acknowledgment::Nodes(1)).build();
        call("insert_events", async move { events.insert_one(document).write_concern(fast).await }).await.map(drop)
    }

    /// What the present subscribers ask for.
    ///
    /// Filter: the subscribers. Index: `_id`. Invariant: none.
    pub(crate) async fn wanted_events(&self) -> Result<Wanted, StoreError> {
        let found = self.subscribers().await?;
        let now = bson::DateTime::from_chrono(self.now());
        let mut wanted = Wanted::default();
        for (_, entry) in found.iter().filter(|(_, entry)| !is_over(entry, now)) {
            let Some(entry) = entry.as_document() else { continue };
            wanted.ends |= entry.get_bool("ends").unwrap_or(false);
            let topics = entry.get_array("topics").into_iter().flatten().filter_map(Bson::as_str);
            wanted.patterns.extend(topics.filter_map(|topic| Pattern::new(topic).ok()));
        }
        Ok(wanted)
    }

    /// Adds or renews a subscription, and removes those that are over.
    ///
    /// Filter: the subscribers. Index: `_id`. Invariant: none.
    pub(crate) async fn subscribe(&self, id: ObjectId, wanted: &Wanted, lasts: Duration) -> Result<(), StoreError> {
        let now = self.now();
        let until = now + TimeDelta::from_std(lasts).unwrap_or_default();
        let topics: Vec<&str> = wanted.patterns.iter().map(Pattern::as_str).collect();
        let entry = doc! { "topics": topics, "ends": wanted.ends, "until": until };
        let lasting = doc! { "$and": [
            { "$eq": [{ "$type": "$$this.v.until" }, "date"] },
            { "$gt": ["$$this.v.until", now] },
        ] };
        // Anything else was written by hand.
        let by = doc! { "$cond": [{ "$eq": [{ "$type": "$by" }, "object"] }, "$by", {}] };
        let known = doc! { "$objectToArray": by };
        let others = doc! { "$arrayToObject": { "$filter": { "input": known, "cond": lasting } } };
        let by = doc! { "$mergeObjects": [others, { id.to_hex(): { "$literal": entry } }] };
        let (metadata, update) = (self.metadata.clone(), vec![doc! { "$set": { "by": by } }]);
        call("subscribe", async move { metadata.update_one(doc! { "_id": SUBSCRIBERS }, update).upsert(true).await }).await.map(drop)
    }

    /// Removes a subscription.
    ///
    /// Filter: the subscribers. Index: `_id`. Invariant: none.
    pub(crate) async fn unsubscribe(&self, id: ObjectId) -> Result<(), StoreError> {
        let (metadata, update) = (self.metadata.clone(), doc! { "$unset": { format!("by.{id}"): "" } });
        call("unsubscribe", async move { metadata.update_one(doc! { "_id": SUBSCRIBERS }, update).await }).await.map(drop)
    }

    async fn subscribers(&self) -> Result<Document, StoreError> {
        let metadata = self.metadata.clone_with_type::<RawDocumentBuf>();
        let read = async move { metadata.find_one(doc! { "_id": SUBSCRIBERS }).read_concern(ReadConcern::local()).await };
        let found = call("subscribers", read).await?;
        Ok(found.and_then(|found| readable(&found).remove("by")?.as_document().cloned()).unwrap_or_default())
    }

    /// The time of the newest document in the ring.
    ///
    /// Index: none, a capped collection is read in its own order. Invariant: none.
    pub(crate) async fn newest_event(&self) -> Result<Option<Timestamp>, StoreError> {
        let events = self.events.clone_with_type::<RawDocumentBuf>();
        let newest = async move { events.find_one(doc! {}).sort(doc! { "$natural": -1 }).read_concern(ReadConcern::local()).await };
        Ok(call("newest_event", newest).await?.and_then(|document| document.get_timestamp("at").ok()))
    }

    /// The documents with events since a time, the oldest first. Those that cannot be decoded are left out.
    ///
    /// Index: none, a capped collection is read in its own order. Invariant: none.
    pub(crate) async fn events_since(&self, from: Timestamp) -> Result<Vec<Document>, StoreError> {
        let events = self.events.clone_with_type::<RawDocumentBuf>();
        let filter = doc! { "at": { "$gte": from } };
        let found: Vec<RawDocumentBuf> =
            call(
                "events_since",
                async move { events.find(filter).limit(PAST).read_concern(ReadConcern::local()).await?.try_collect().await },
            )
            .await?;
        Ok(found.iter().filter_map(|document| Document::try_from(&**document).ok()).collect())
    }

    /// Opens a tailing cursor on one part of the ring.
    ///
    /// Index: none, a capped collection is read in its own order. Invariant: none.
    pub(crate) async fn tail_events(&self, from: Timestamp, part: RingPart) -> Result<Cursor<RawDocumentBuf>, StoreError> {
        let events = self.events.clone_with_type::<RawDocumentBuf>();
        let filter = doc! { "at": { "$gte": from } };
        let fields = part.fields();
        call("tail_events", async move {
            let tail = events.find(filter).projection(fields).cursor_type(CursorType::TailableAwait).max_await_time(AWAIT);
            tail.read_concern(ReadConcern::local()).await
        })
        .await
    }
}

fn is_over(entry: &Bson, now: bson::DateTime) -> bool {
    entry.as_document().and_then(|entry| entry.get_datetime("until").ok()).is_none_or(|until| *until <= now)
}
