//! The cells of slow rates: when the next start is allowed, kept for the next leader.
//!
//! A leader does not know the cells that earlier leaders have taken. For a fast rate it waits for one interval. For a slow one it reads the
//! next free cell, which each leader writes before the assignment that takes the cell before it.

use std::collections::HashMap;

use bson::{Document, doc};
use chrono::TimeDelta;
use futures_util::TryStreamExt;
use mongodb::options::ReadConcern;

use super::{Store, StoreError, call};
use crate::{ids::LeaseTerm, instant::Instant};

/// The begin of the `_id` of a cell.
const CELL: &str = "rate:";
/// Cells that have passed for this time are deleted.
const PASSED: TimeDelta = TimeDelta::minutes(10);

/// What earlier leaders have kept of slow rates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptCells {
    /// The next free cell of each resource.
    pub cells: HashMap<String, Instant>,
    /// Leaders have kept cells since this instant. `None`: there was no leader before.
    pub since: Option<Instant>,
}

/// The `_id` of a cell: a text, because documents as ids are counts, which cleaners delete when they are old.
fn id_of_cell(resource: &str) -> String {
    format!("{CELL}{resource}")
}

fn any_cell() -> Document {
    // `;` follows `:`.
    doc! { "$gte": CELL, "$lt": "rate;" }
}

impl Store {
    /// The cells that earlier leaders have kept. Notes that cells are kept from now on, and deletes those that have passed.
    ///
    /// Filter: ids of cells. Index: `_id`. Invariant: a rate; the caller has written its term before, so no earlier leader assigns any more.
    pub async fn kept_cells(&self, term: LeaseTerm) -> Result<KeptCells, StoreError> {
        let (metadata, now) = (self.metadata.clone(), self.now());
        let note = doc! { "$setOnInsert": { "kept_since": bson::DateTime::from_chrono(now), "term": term } };
        let noted = call("note_cells", async move {
            let noted = metadata.find_one_and_update(doc! { "_id": "rates" }, note);
            noted.upsert(true).return_document(mongodb::options::ReturnDocument::After).await
        })
        .await?
        .unwrap_or_default();
        self.delete_passed_cells(now - PASSED).await?;
        let metadata = self.metadata.clone();
        let found: Vec<Document> = call("kept_cells", async move {
            let found = metadata.find(doc! { "_id": any_cell() }).batch_size(100_000).read_concern(ReadConcern::local());
            found.await?.try_collect().await
        })
        .await?;
        let cell = |document: &Document| {
            let resource = document.get_str("_id").ok()?.strip_prefix(CELL)?;
            Some((resource.to_owned(), document.get_datetime("cell").ok()?.to_chrono()))
        };
        // The first term of a database has no leader before it.
        let is_first = noted.get_i64("term").is_ok_and(|term| term <= 1);
        let since = noted.get_datetime("kept_since").map_or(now, |since| since.to_chrono());
        Ok(KeptCells { cells: found.iter().filter_map(cell).collect(), since: (!is_first).then_some(since) })
    }

    /// Deletes cells that have passed at `before`.
    ///
    /// Filter: ids of cells, passed. Index: `_id`. Invariant: none, no start can take such a cell.
    async fn delete_passed_cells(&self, before: Instant) -> Result<(), StoreError> {
        let (metadata, before) = (self.metadata.clone(), bson::DateTime::from_chrono(before));
        let passed = doc! { "_id": any_cell(), "cell": { "$lt": before } };
        call("delete_passed_cells", async move { metadata.delete_many(passed).await }).await.map(drop)
    }

    /// Keeps the next free cells of slow rates, acknowledged by a majority.
    ///
    /// Filter: id. Index: `_id`. Invariant: a rate: no failover and no change of the leader forgets a cell that was taken. A later cell that
    /// another leader has written stays.
    pub async fn keep_cells(&self, cells: &[(String, Instant)]) -> Result<(), StoreError> {
        for (resource, cell) in cells {
            // Rounded up.
            let cell = bson::DateTime::from_chrono(*cell + TimeDelta::nanoseconds(999_999));
            let (metadata, id) = (self.metadata.clone(), doc! { "_id": id_of_cell(resource) });
            call("keep_cells", async move { metadata.update_one(id, doc! { "$max": { "cell": cell } }).upsert(true).await }).await?;
        }
        Ok(())
    }
}
