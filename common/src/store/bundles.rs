//! What is recorded of a running bundle, and what its end says of its items.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use bson::{Bson, Document, RawBson, doc, raw::cstr};
use mongodb::options::ReadConcern;

use super::{
    CommitSession, Store, StoreError,
    outcome::{Archival, End, Recorded, Rescheduling, replaced, size_of},
};
use crate::{
    ids::{JobId, StartId},
    job::Claim,
};

/// Where in a bundle's document the outcomes of its items are.
pub(super) const OUTCOMES: &str = "item_outcomes";

/// Outcomes of items of a bundle that goes on.
#[derive(Clone, Debug)]
pub struct Progress {
    claim: Claim,
    set: Document,
}

impl Progress {
    /// The outcomes of all items, null for those that have none: the document has a place for each from now on.
    pub fn whole(claim: Claim, outcomes: &[Bson]) -> Self {
        Self { claim, set: doc! { OUTCOMES: outcomes } }
    }

    /// The outcomes of some items of a bundle whose document has a place for each.
    pub fn of_items(claim: Claim, outcomes: impl IntoIterator<Item = (usize, Bson)>) -> Self {
        Self { claim, set: outcomes.into_iter().map(|(index, outcome)| (format!("{OUTCOMES}.{index}"), outcome)).collect() }
    }
}

impl End for Progress {
    const NEEDS_SESSION: bool = false;

    async fn write(store: &Store, _session: &mut CommitSession, batch: &[Self]) -> Result<Vec<Recorded>, StoreError> {
        store.record_items_if_claimed(batch).await
    }

    /// Nothing of it: the end of the bundle says it again, and whether the claim still holds is worth knowing.
    fn reduced(self) -> Option<Self> {
        (!self.set.is_empty()).then(|| Self { claim: self.claim, set: doc! {} })
    }

    /// Nothing: the end of the bundle says it again.
    async fn refused(self, _store: &Store, _session: &mut CommitSession, _reason: &StoreError) -> Result<Recorded, StoreError> {
        Ok(Recorded::Refused)
    }

    fn job(&self) -> JobId {
        self.claim.job
    }

    fn size(&self) -> usize {
        size_of(&self.set)
    }
}

impl Archival {
    /// With the outcomes of all items of the bundle.
    #[must_use]
    pub fn with_items(mut self, outcomes: Vec<Bson>) -> Self {
        // Bounded one by one, so that they can be stored.
        let with_them = RawBson::try_from(Bson::Array(outcomes))
            .and_then(|all| replaced(&self.document, &[(cstr!("item_outcomes"), all.as_raw_bson_ref())]));
        if let Ok(document) = with_them {
            self.document = Arc::new(document);
        }
        self
    }
}

impl Rescheduling {
    /// With the outcomes of all items of the bundle.
    #[must_use]
    pub fn with_items(mut self, outcomes: Vec<Bson>) -> Self {
        if let Ok(set) = self.update.get_document_mut("$set") {
            set.insert(OUTCOMES, outcomes);
        }
        self
    }
}

impl Store {
    /// Records outcomes of items of started bundles, in batches that fit; says for each bundle, in order, whether they were recorded.
    ///
    /// Index: `_id`. Invariant: I9, no outcome stops another.
    ///
    /// # Errors
    /// When MongoDB is away or its answer is lost.
    pub async fn record_items(&self, batch: &[Progress]) -> Result<Vec<Recorded>, StoreError> {
        self.finish(&mut CommitSession::default(), batch).await
    }

    /// Records outcomes of items of started bundles; says for each bundle, in order, whether they were recorded.
    ///
    /// Filter: id, locked, this start. Update: one command for all, acknowledged by a majority.
    /// Index: `_id`. Invariant: I3, only the latest start says what became of an item; harmless to repeat.
    /// Loses when the bundle was rescued meanwhile; the caller must then stop it.
    pub async fn record_items_if_claimed(&self, batch: &[Progress]) -> Result<Vec<Recorded>, StoreError> {
        let statement = |bundle: &Progress| {
            let filter = doc! { "_id": bundle.claim.job, "locked": true, "last_execution.start": bundle.claim.start };
            doc! { "q": filter, "u": { "$set": bundle.set.clone() } }
        };
        let command = doc! {
            "update": "scheduled",
            "updates": batch.iter().map(statement).collect::<Vec<_>>(),
            "ordered": false,
            "writeConcern": { "w": "majority", "j": true },
        };
        if self.write("record_items_if_claimed", command).await? == batch.len() {
            return Ok(vec![Recorded::Yes; batch.len()]);
        }
        let mut starts: HashMap<StartId, Vec<JobId>> = HashMap::new();
        for Progress { claim, .. } in batch {
            starts.entry(claim.start).or_default().push(claim.job);
        }
        let held: HashSet<Claim> = self.claims_of_starts(&starts, ReadConcern::local()).await?.into_iter().collect();
        let recorded = |claim: Claim| if held.contains(&claim) { Recorded::Yes } else { Recorded::ClaimLost };
        Ok(batch.iter().map(|bundle| recorded(bundle.claim)).collect())
    }
}
