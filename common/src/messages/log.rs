//! Messages of applications (`messages`): envelopes are inserted, and change streams read them.

use std::time::Duration;

use bson::{Bson, Document, RawDocumentBuf, Timestamp, doc};
use mongodb::{
    change_stream::{ChangeStream, event::ResumeToken},
    options::ReadConcern,
};

use crate::{
    base::Pattern,
    mongo::{Feature, Store, StoreError, call, schema::LARGEST_KEY},
};

/// How long the server holds a read open before it returns an empty reply, which has the present position.
const AWAIT: Duration = Duration::from_secs(1);
/// Number of events in one reply.
const BATCH: u32 = 1_000;

/// The event of a larger key does not even fit without its envelope. Only a collection without the validator has one.
const LARGEST_NAMED_KEY: i64 = 4 * 1024 * 1024;

/// A change stream over the envelopes. Its events are not decoded, so one that cannot be decoded does not end it.
pub(crate) type MessageStream = ChangeStream<RawDocumentBuf>;

/// Where a change stream begins.
#[derive(Clone, Debug)]
pub(crate) enum MessageStart {
    Now,
    At(Timestamp),
    After(ResumeToken),
    /// After the collection was dropped.
    AfterDrop(ResumeToken),
}

impl Store {
    /// Makes the index by which MongoDB deletes old messages, unless it exists. Publishers and subscribers do it by themselves.
    ///
    /// Index: `expired_messages`. Invariant: none.
    pub async fn prepare_messages(&self) -> Result<(), StoreError> {
        self.prepare(Feature::Messages).await
    }

    /// Inserts an envelope, acknowledged by a majority. Harmless to repeat: an id is inserted once. A duplicate key is reported only if a
    /// majority has the first copy: of one document, the driver does not tell a write concern error that comes with a duplicate key.
    ///
    /// Index: `_id`. Invariant: none of jobs; an acknowledged message is never lost.
    pub(crate) async fn insert_envelope(&self, document: Document) -> Result<(), StoreError> {
        let messages = self.messages.clone();
        call("insert_envelope", async move { messages.insert_many([document]).await }).await.map(drop)
    }

    /// The position at this time: before the first event since then. A stream that is opened by a time has none until its first event was
    /// read, and then a place within that envelope could not be named.
    ///
    /// Index: none, nothing is read. Invariant: none.
    pub(crate) async fn message_position_at(&self, at: Timestamp) -> Result<Option<ResumeToken>, StoreError> {
        let messages = self.messages.clone();
        let opened = async move { messages.watch().batch_size(0).start_at_operation_time(at).read_concern(ReadConcern::majority()).await };
        Ok(call("message_position_at", opened).await?.resume_token())
    }

    /// Opens a change stream over the envelopes with messages of these topics. The event of an envelope with a key that is too large comes
    /// without it.
    ///
    /// Index: none, the oplog is read in its own order. Invariant: I9; every envelope once, in the order of commits.
    pub(crate) async fn watch_messages(&self, patterns: &[Pattern], start: MessageStart) -> Result<MessageStream, StoreError> {
        let topics: Vec<Document> =
            patterns.iter().map(|pattern| doc! { "fullDocument.messages.topic": { "$regex": pattern.to_regex() } }).collect();
        let wanted = doc! { "$match": { "$or": [
            { "operationType": "insert", "$or": topics },
            { "operationType": "invalidate" },
        ] } };
        let key = doc! { "$bsonSize": "$documentKey" };
        let named = doc! { "$match": { "$expr": { "$lte": [key.clone(), LARGEST_NAMED_KEY] } } };
        let is_too_large = doc! { "$gt": [key, LARGEST_KEY] };
        let left_out = |field: &str| doc! { "$cond": [is_too_large.clone(), Bson::Null, format!("${field}")] };
        let fitting = doc! { "$set": { "fullDocument": left_out("fullDocument"), "documentKey": left_out("documentKey") } };
        let (messages, stages) = (self.messages.clone(), [wanted, named, fitting]);
        call("watch_messages", async move {
            let watch = messages.watch().pipeline(stages).max_await_time(AWAIT).batch_size(BATCH).read_concern(ReadConcern::majority());
            let opened = match start {
                MessageStart::Now => watch.await,
                MessageStart::At(at) => watch.start_at_operation_time(at).await,
                MessageStart::After(token) => watch.resume_after(token).await,
                MessageStart::AfterDrop(token) => watch.start_after(token).await,
            };
            opened.map(ChangeStream::with_type)
        })
        .await
    }
}
