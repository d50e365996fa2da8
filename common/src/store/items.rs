//! What is recorded of the items of a running bundle. Its end carries all their outcomes once more.

use std::collections::{HashMap, HashSet};

use bson::doc;
use mongodb::options::ReadConcern;

use super::{
    Store, StoreError,
    finish::{End, Recorded, size_of},
    session::CommitSession,
};
use crate::{
    ids::{JobId, StartId},
    job::{Claim, ending::Progress},
};

impl End for Progress {
    const NEEDS_SESSION: bool = false;

    async fn write(store: &Store, _session: &mut CommitSession, batch: &[Self]) -> Result<Vec<Recorded>, StoreError> {
        store.record_items_if_claimed(batch).await
    }

    /// Without any outcome, because the bundle's end carries all of them again: it still shows whether the claim holds.
    fn reduced(self) -> Option<Self> {
        (!self.set.is_empty()).then(|| Self { claim: self.claim, set: doc! {} })
    }

    /// Nothing: the bundle's end carries all outcomes again.
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

impl Store {
    /// Records outcomes of items of started bundles, in batches that fit. Returns for each bundle, in order, whether they were recorded.
    ///
    /// Index: `_id`. Invariant: I9, no outcome stops another.
    ///
    /// # Errors
    /// When MongoDB is away or its answer is lost.
    pub async fn record_items(&self, batch: &[Progress]) -> Result<Vec<Recorded>, StoreError> {
        self.finish(&mut CommitSession::default(), batch).await
    }

    /// The same for a batch that fits.
    ///
    /// Filter: id, locked, this start. Update: one command for all, acknowledged by a majority.
    /// Index: `_id`. Invariant: I3, only the latest start records an item; harmless to repeat.
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
