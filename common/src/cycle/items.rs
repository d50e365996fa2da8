//! Records item outcomes of running bundles. The end of a bundle contains all outcomes again.

use std::collections::{HashMap, HashSet};

use bson::{Document, doc};
use mongodb::options::ReadConcern;

use super::{GuardedWrite, finish::size_of};
use crate::{
    base::{JobId, StartId},
    job::{Claim, Recorded, ending::Progress},
    mongo::{CommitSession, Store, StoreError},
};

impl GuardedWrite for Progress {
    const IS_END: bool = false;

    async fn write(store: &Store, _session: &mut CommitSession, batch: &[Self]) -> Result<Vec<Recorded>, StoreError> {
        store.record_items_if_claimed(batch).await
    }

    /// An update without outcomes, because the bundle's end contains all of them. It still tests whether the claim holds.
    fn reduced(self) -> Option<Self> {
        (!self.set.is_empty()).then(|| Self { claim: self.claim, set: doc! {} })
    }

    fn job(&self) -> JobId {
        self.claim.job
    }

    fn size(&self) -> usize {
        size_of(&self.set)
    }
}

impl Store {
    /// Records item outcomes of started bundles: one batch of allowed size. Returns for each bundle, in order, whether they were recorded.
    ///
    /// Filter: id, locked, this start. Update: one command for all, acknowledged by a majority.
    /// Index: `_id`. Invariant: I3, only the latest start records an item; harmless to repeat.
    /// Loses when the bundle was rescued in the meantime; the caller must then stop it.
    pub async fn record_items_if_claimed(&self, batch: &[Progress]) -> Result<Vec<Recorded>, StoreError> {
        let statement = |bundle: &Progress| {
            let filter = doc! { "_id": bundle.claim.job, "locked": true, "last_execution.start": bundle.claim.start };
            doc! { "q": filter, "u": { "$set": bundle.set.clone() } }
        };
        let statements = batch.iter().map(statement).collect();
        self.record_if_claimed("record_items_if_claimed", statements, batch.iter().map(|bundle| bundle.claim)).await
    }

    /// Runs updates of started jobs as one command, acknowledged by a majority. An update that meets no document loses if its claim does
    /// not hold.
    pub(crate) async fn record_if_claimed(
        &self,
        operation: &'static str,
        updates: Vec<Document>,
        claims: impl Iterator<Item = Claim> + Clone,
    ) -> Result<Vec<Recorded>, StoreError> {
        let count = updates.len();
        let command =
            doc! { "update": self.scheduled.name(), "updates": updates, "ordered": false, "writeConcern": { "w": "majority", "j": true } };
        if self.write(operation, command).await? == count {
            return Ok(vec![Recorded::Yes; count]);
        }
        let mut starts: HashMap<StartId, Vec<JobId>> = HashMap::new();
        for claim in claims.clone() {
            starts.entry(claim.start).or_default().push(claim.job);
        }
        let held: HashSet<Claim> = self.claims_of_starts_with(&starts, ReadConcern::local()).await?.into_iter().collect();
        Ok(claims.map(|claim| if held.contains(&claim) { Recorded::Yes } else { Recorded::ClaimLost }).collect())
    }
}
