//! The cells of slow rates: when the next start is allowed, kept for the next leader.
//!
//! A leader does not know the cells that earlier leaders have taken. For a fast rate it waits for one interval. For a slow one it reads the
//! next free cell, which each leader writes before the assignment that takes the cell before it. The rate of the cell is beside it, because the
//! limit may have another one by then; and the names of the limits with a fast rate are known, because a fast rate may have become a slow one.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use bson::{Document, RawDocumentBuf, doc};
use chrono::TimeDelta;
use mongodb::options::ReadConcern;

use super::Rate;
use crate::{
    base::{Instant, LeaseTerm},
    mongo::{Readable, Store, StoreError, call, readable},
};

/// The begin of the `_id` of a cell: a text, because documents as ids are counts, which cleaners delete when they are old.
const CELL: &str = "rate:";
/// Cells that have passed for this time are deleted.
const PASSED: TimeDelta = TimeDelta::minutes(10);
/// No cell is further ahead: the longest burst, and the longest interval.
const FURTHEST: TimeDelta = TimeDelta::days(366 + 30);
/// Maximum number of cells in one command.
const PER_COMMAND: usize = 1_000;

/// The next free cell of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateCell {
    /// When it begins, by the server's clock.
    pub at: Instant,
    /// The last start that was assigned can happen until this instant.
    pub until: Instant,
    /// The rate that it was computed with. `None`: an earlier release has kept it.
    pub rate: Option<Rate>,
}

/// Limits with a fast rate, of which no cells are kept, by their names (`api`, `customer:*`, `@mail`): `None` while they are fast, otherwise until
/// when they were.
pub type FastLimits = BTreeMap<String, Option<Instant>>;

/// What earlier leaders have kept of slow rates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptCells {
    /// The next free cell of each resource.
    pub cells: HashMap<String, RateCell>,
    /// The limits of which earlier leaders have kept no cells.
    pub fast: FastLimits,
    /// Leaders have kept cells since this instant. `None`: there was no leader before.
    pub since: Option<Instant>,
}

/// The ids of all kept cells.
pub(crate) fn any_cell() -> Document {
    // `;` follows `:`.
    doc! { "$gte": CELL, "$lt": "rate;" }
}

impl Store {
    /// The cells that earlier leaders have kept. Notes that cells are kept from now on, and deletes those that have passed.
    ///
    /// Filter: ids of cells. Index: `_id`. Invariant: a rate; the caller has written its term before, so no earlier leader assigns any more.
    pub async fn kept_cells(&self, term: LeaseTerm) -> Result<KeptCells, StoreError> {
        let (metadata, now) = (self.metadata.clone_with_type::<RawDocumentBuf>(), self.now());
        let note = doc! { "$setOnInsert": { "kept_since": now, "term": term } };
        let noted = call("note_cells", async move {
            metadata.update_one(doc! { "_id": "rates" }, note).upsert(true).await?;
            metadata.find_one(doc! { "_id": "rates" }).await
        })
        .await?
        .map(|noted| readable(&noted))
        .unwrap_or_default();
        self.delete_passed_cells(now - PASSED).await?;
        let mut cells = HashMap::new();
        for (resource, cell) in self.cells("kept_cells").await? {
            match cell {
                Some(cell) => _ = cells.insert(resource, cell),
                None => {
                    tracing::warn!(resource, "the cell of a rate in `metadata` cannot be read; the rate counts as just used up");
                    // Without a rate it is moved back to where the burst of the present rate is used up.
                    cells.insert(resource, RateCell { at: now + FURTHEST, until: now, rate: None });
                }
            }
        }
        // The first term of a database has no leader before it.
        let is_first = noted.get_i64("term").is_ok_and(|term| term <= 1);
        let since = noted.get_datetime("kept_since").map_or(now, |since| since.to_chrono());
        let fast = noted.get_array("fast").into_iter().flatten().filter_map(|limit| {
            let limit = limit.as_document()?;
            Some((limit.get_str("name").ok()?.to_owned(), limit.get_datetime("until").ok().map(|until| until.to_chrono())))
        });
        Ok(KeptCells { cells, fast: fast.collect(), since: (!is_first).then_some(since) })
    }

    /// The cells that leaders have kept, for display.
    ///
    /// Filter: ids of cells. Index: `_id`. Invariant: none, only a leader decides by cells.
    pub async fn rate_cells(&self) -> Result<HashMap<String, RateCell>, StoreError> {
        Ok(self.cells("rate_cells").await?.into_iter().filter_map(|(resource, cell)| Some((resource, cell?))).collect())
    }

    async fn cells(&self, operation: &'static str) -> Result<Vec<(String, Option<RateCell>)>, StoreError> {
        let metadata = self.metadata.clone();
        let found: Vec<Document> = call(operation, async move {
            let found = metadata.find(doc! { "_id": any_cell() }).batch_size(100_000).read_concern(ReadConcern::local());
            found.await?.readable().await
        })
        .await?;
        let cell = |document: &Document| Some((document.get_str("_id").ok()?.strip_prefix(CELL)?.to_owned(), cell_in(document)));
        Ok(found.iter().filter_map(cell).collect())
    }

    /// Deletes cells that have passed at `before`.
    ///
    /// Filter: ids of cells, passed. Index: `_id`. Invariant: none, no start can take such a cell.
    async fn delete_passed_cells(&self, before: Instant) -> Result<(), StoreError> {
        let metadata = self.metadata.clone();
        let passed = doc! { "_id": any_cell(), "cell": { "$lt": before } };
        call("delete_passed_cells", async move { metadata.delete_many(passed).await }).await.map(drop)
    }

    /// Keeps the next free cells of slow rates, and which limits are fast if that is given, acknowledged by a majority.
    ///
    /// Filter: id, and no later term. Index: `_id`. Invariant: a rate: no failover and no change of the leader forgets a cell that was taken.
    /// Harmless to repeat.
    /// Loses when a cell or the term was written by a later leader: then the caller's term is over. The next one is later than that.
    pub async fn keep_cells(&self, term: LeaseTerm, cells: &[(String, RateCell)], fast: Option<&FastLimits>) -> Result<bool, StoreError> {
        let cells = cells.iter().map(|(resource, cell)| {
            let of_no_later = doc! { "_id": format!("{CELL}{resource}"), "$and": [term.no_later_in("term")] };
            let mut set = document_of(*cell);
            set.insert("term", term);
            doc! { "q": of_no_later, "u": { "$set": set }, "upsert": true }
        });
        let fast = fast.map(|fast| {
            let limit = |(name, until): (&String, &Option<Instant>)| doc! { "name": name, "until": until };
            let of_no_later = doc! { "_id": "rates", "$and": [term.no_later_in("fast_term")] };
            doc! { "q": of_no_later, "u": { "$set": { "fast": fast.iter().map(limit).collect::<Vec<_>>(), "fast_term": term } } }
        });
        // The fast limits come last: while a limit that has become slow counts as fast, its kept cell is not needed.
        let statements: Vec<Document> = cells.chain(fast).collect();
        for some in statements.chunks(PER_COMMAND) {
            let command =
                || doc! { "update": self.metadata.name(), "updates": some.to_vec(), "writeConcern": { "w": "majority", "j": true } };
            let kept = match self.write_repeatable("keep_cells", command).await {
                // The document is there, with a later term.
                Err(error) if error.is_duplicate() => return Ok(false),
                kept => kept?,
            };
            // `rates` has a later term, or was deleted.
            if kept < some.len() {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The fields of a kept cell. An earlier release writes `cell` only; then it differs from the one that has a rate.
fn document_of(cell: RateCell) -> Document {
    // Rounded up.
    let [at, until] = [cell.at, cell.until].map(|at| at + TimeDelta::nanoseconds(999_999));
    let rate = cell.rate.map(|rate| {
        let per_ms = i64::try_from(rate.per.as_millis()).unwrap_or(i64::MAX);
        doc! { "cell": at, "until": until, "starts": i64::from(rate.starts), "per_ms": per_ms, "burst": i64::from(rate.burst) }
    });
    doc! { "cell": at, "at_rate": rate }
}

fn cell_in(document: &Document) -> Option<RateCell> {
    let date = |document: &Document, field| document.get_datetime(field).ok().map(|at| at.to_chrono());
    let at = date(document, "cell")?;
    let known = || {
        let of = document.get_document("at_rate").ok().filter(|of| date(of, "cell") == Some(at))?;
        let number = |field| u32::try_from(of.get_i64(field).ok()?).ok();
        let per = Duration::from_millis(u64::try_from(of.get_i64("per_ms").ok()?).ok()?);
        Some((date(of, "until")?, Rate::new(number("starts")?, per, number("burst")?).ok()?))
    };
    let known = known();
    Some(RateCell { at, until: known.map_or(Instant::UNIX_EPOCH, |(until, _)| until), rate: known.map(|(_, rate)| rate) })
}
