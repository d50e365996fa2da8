//! Collections of an application that have our names: they are neither replaced nor emptied.

use bson::{Document, RawDocumentBuf, doc};
use mongodb::{Collection, options::ReadConcern};

use super::{Store, StoreError, call};

impl Store {
    /// Refuses an ordinary collection `events` with documents that no publisher has inserted.
    ///
    /// Filter: documents that are neither of a publisher nor the first one. Index: none, the first foreign document ends the read.
    /// Invariant: none of jobs; documents of an application are never dropped.
    pub(super) async fn refuse_foreign_events(&self) -> Result<(), StoreError> {
        refuse(self.events.clone(), no_event()).await
    }

    /// Refuses a collection `messages` with documents that are no envelopes. MongoDB would delete those with an `expires_at`.
    ///
    /// Filter: documents without the fields of an envelope. Index: none, the first foreign document ends the read. Invariant: none of jobs;
    /// documents of an application are never deleted.
    pub(super) async fn refuse_foreign_messages(&self) -> Result<(), StoreError> {
        refuse(self.messages.clone(), no_envelope()).await
    }
}

fn no_event() -> Document {
    let (seed, event) = (doc! { "kind": "seed" }, doc! { "at": { "$type": "timestamp" }, "by": { "$type": "objectId" } });
    doc! { "$nor": [seed, event] }
}

fn no_envelope() -> Document {
    let envelope = doc! { "at": { "$type": "date" }, "expires_at": { "$type": "date" }, "messages": { "$type": "array" } };
    doc! { "$nor": [envelope] }
}

async fn refuse(collection: Collection<Document>, foreign: Document) -> Result<(), StoreError> {
    let name = collection.name().to_owned();
    let found = call("foreign_documents", async move {
        collection
            .clone_with_type::<RawDocumentBuf>()
            .find_one(foreign)
            .projection(doc! { "_id": 1 })
            .read_concern(ReadConcern::local())
            .await
    })
    .await?;
    found.map_or(Ok(()), |_| Err(StoreError::Foreign { collection: name }))
}
