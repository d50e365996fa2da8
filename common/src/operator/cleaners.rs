//! The notes that cleaners leave of themselves in `metadata`, for people: which ones run, and how long they keep the archive. No program acts
//! on them.

use std::time::Duration;

use bson::{Document, RawDocumentBuf, doc, oid::ObjectId};
use chrono::TimeDelta;
use futures_util::TryStreamExt;

use crate::{
    base::{Instant, integer, printable},
    mongo::{Store, StoreError, call, lossy},
    roster::ProcessIdentity,
};

/// The start of the `_id` of such a note.
pub(crate) const CLEANER: &str = "cleaner:";
/// How often a cleaner writes its note.
pub const NOTED_EVERY: Duration = Duration::from_secs(15);
/// A cleaner whose note is older than this does not run, or hangs.
const SILENT_AFTER: TimeDelta = TimeDelta::seconds(60);
/// Notes of cleaners that were killed are deleted after this time.
const FORGOTTEN_AFTER: TimeDelta = TimeDelta::days(1);

/// What a cleaner notes of itself.
#[derive(Clone, Debug)]
pub struct CleanerNote {
    /// The `_id` is made of this. Each process has another one.
    pub id: ObjectId,
    /// Its machine and process.
    pub process: ProcessIdentity,
    /// How long it keeps which archived jobs. Two cleaners with the same settings have the same text.
    pub keeps: String,
}

/// A cleaner that has left a note. Its texts are safe for a terminal.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Cleaner {
    /// `host:pid`.
    pub name: String,
    /// How long ago it wrote its note.
    pub seen_before: TimeDelta,
    /// Its release.
    pub version: String,
    /// How long it keeps which archived jobs.
    pub keeps: String,
}

impl Cleaner {
    fn of(note: &RawDocumentBuf, now: Instant) -> Option<Self> {
        let note = lossy(note);
        let text = |field| note.get_str(field).map(|text| printable(text, 400)).ok();
        let pid = integer(note.get("pid")).unwrap_or_default();
        Some(Self {
            name: format!("{}:{pid}", text("hostname")?),
            seen_before: now - note.get_datetime("seen_at").ok()?.to_chrono(),
            version: text("version")?,
            keeps: text("keeps")?,
        })
    }

    /// Whether it does not run any more, or hangs.
    pub fn is_silent(&self) -> bool {
        self.seen_before > SILENT_AFTER
    }
}

impl Store {
    /// Writes the note of a cleaner, and deletes those of cleaners that were killed long ago.
    ///
    /// Filter: id; notes with an old date. Index: `_id`. Invariant: none, for people.
    pub async fn note_cleaner(&self, note: &CleanerNote) -> Result<(), StoreError> {
        let (now, metadata) = (self.now(), self.metadata.clone());
        let id = format!("{CLEANER}{}", note.id);
        let fields = doc! {
            "hostname": &note.process.hostname,
            "pid": i64::from(note.process.pid),
            "version": env!("CARGO_PKG_VERSION"),
            "seen_at": now,
            "keeps": &note.keeps,
        };
        let old = doc! { "_id": any_cleaner(), "seen_at": { "$lt": now - FORGOTTEN_AFTER } };
        call("note_cleaner", async move {
            metadata.update_one(doc! { "_id": id }, doc! { "$set": fields }).upsert(true).await?;
            metadata.delete_many(old).await
        })
        .await
        .map(drop)
    }

    /// Deletes the note of a cleaner that stops.
    ///
    /// Filter: id. Index: `_id`. Invariant: none, for people.
    pub async fn forget_cleaner(&self, id: ObjectId) -> Result<(), StoreError> {
        let (metadata, id) = (self.metadata.clone(), doc! { "_id": format!("{CLEANER}{id}") });
        call("forget_cleaner", async move { metadata.delete_one(id).await }).await.map(drop)
    }

    /// The cleaners that have left a readable note, also those that are gone.
    ///
    /// Filter: id. Index: `_id`. Invariant: none, for people.
    pub async fn cleaners(&self) -> Result<Vec<Cleaner>, StoreError> {
        let (metadata, now) = (self.metadata.clone_with_type::<RawDocumentBuf>(), self.now());
        let found: Vec<RawDocumentBuf> =
            call("cleaners", async move { metadata.find(doc! { "_id": any_cleaner() }).await?.try_collect().await }).await?;
        Ok(found.iter().filter_map(|note| Cleaner::of(note, now)).collect())
    }
}

/// The predicate of the ids of notes.
fn any_cleaner() -> Document {
    doc! { "$gte": CLEANER, "$lt": "cleaner;" }
}
