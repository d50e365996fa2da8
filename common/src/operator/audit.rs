//! What was done through `recruiter web`: documents in `audit`.
//!
//! An entry is written before its action, and the outcome is added to it afterwards. If the first write fails, the action is refused: nothing
//! happens without an entry. If the second fails, or the process ends in between, the entry stays without an outcome, which says that the action
//! was intended, and that what came out is not known. One document is enough for this; with two of them, a list would have to join them.

use std::sync::atomic::Ordering;

use bson::{Document, RawDocumentBuf, doc, oid::ObjectId};
use chrono::TimeDelta;
use futures_util::TryStreamExt;

use crate::mongo::{Store, StoreError, call, lossy, schema::refuse_foreign_audit};

/// How long an entry is kept: a year, and time to look at it.
const KEPT_FOR: TimeDelta = TimeDelta::days(400);

/// An action that is about to be done.
#[derive(Clone, Debug)]
pub struct Intended<'a> {
    /// The name of the token or the person; `None` without one.
    pub caller: Option<&'a str>,
    /// The address of the client.
    pub address: String,
    /// What is done, for example `jobs.cancel`.
    pub action: &'a str,
    /// To what, and with which values.
    pub target: Document,
}

/// The id of an entry.
#[derive(Clone, Copy, Debug)]
pub struct AuditId(ObjectId);

impl Store {
    /// Writes an action before it is done.
    ///
    /// # Errors
    /// [`StoreError::Foreign`] if the collection is an application's.
    ///
    /// Filter: none, an insert with a new id. Index: `expired_audit`. Invariant: no action of `recruiter web` without an entry.
    pub async fn intend(&self, action: Intended<'_>) -> Result<AuditId, StoreError> {
        if !self.has_audit.load(Ordering::Relaxed) {
            refuse_foreign_audit(self).await?;
            self.has_audit.store(true, Ordering::Relaxed);
        }
        let Intended { caller, address, action, target } = action;
        let (id, now, audit) = (ObjectId::new(), self.now(), self.audit.clone());
        let entry = doc! {
            "_id": id, "at": now, "caller": caller, "address": address, "action": action, "target": target, "expires_at": now + KEPT_FOR,
        };
        call("intend", async move { audit.insert_one(entry).await }).await.map(|_| AuditId(id))
    }

    /// Adds what came out of an action.
    ///
    /// Filter: id, and that there is no outcome yet. Index: `_id`. Invariant: an outcome does not change.
    pub async fn note_outcome(&self, AuditId(id): AuditId, outcome: Document) -> Result<(), StoreError> {
        let (audit, open) = (self.audit.clone(), doc! { "_id": id, "outcome": { "$exists": false } });
        let ended = doc! { "$set": { "outcome": outcome, "ended_at": self.now() } };
        call("note_outcome", async move { audit.update_one(open, ended).await }).await.map(drop)
    }

    /// Entries, newest first: at most this many, behind this one.
    ///
    /// Filter: an id below the given one. Index: `_id`. Invariant: none. Entries of two processes in one second have no order.
    pub async fn audited(&self, limit: u16, after: Option<ObjectId>) -> Result<Vec<Document>, StoreError> {
        let audit = self.audit.clone_with_type::<RawDocumentBuf>();
        let older = after.map_or_else(|| doc! { "_id": { "$type": "objectId" } }, |after| doc! { "_id": { "$lt": after } });
        let found: Vec<RawDocumentBuf> =
            call("audited", async move { audit.find(older).sort(doc! { "_id": -1 }).limit(limit.into()).await?.try_collect().await })
                .await?;
        Ok(found.iter().map(|entry| lossy(entry)).collect())
    }
}
