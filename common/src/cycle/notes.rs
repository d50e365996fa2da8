//! Records the notes of running jobs: progress, checkpoint and log. The end of an attempt contains them again.

use bson::doc;

use super::{GuardedWrite, finish::size_of};
use crate::{
    base::JobId,
    job::{Recorded, notes::Notes},
    mongo::{CommitSession, Store, StoreError},
};

impl GuardedWrite for Notes {
    const IS_END: bool = false;

    async fn write(store: &Store, _session: &mut CommitSession, batch: &[Self]) -> Result<Vec<Recorded>, StoreError> {
        store.record_notes_if_claimed(batch).await
    }

    /// Nothing can be left out: the caller must know that its checkpoint is not stored.
    fn reduced(self) -> Option<Self> {
        None
    }

    fn job(&self) -> JobId {
        self.claim.job
    }

    fn size(&self) -> usize {
        size_of(&self.set)
    }
}

impl Store {
    /// Records notes of started jobs.
    ///
    /// Filter: id, locked, this start, no later write of its notes. Update: one command for all, acknowledged by a majority.
    /// Index: `_id`. Invariant: I3, only the latest start records notes. A write whose reply is lost may arrive after the next one: it
    /// changes nothing then.
    /// Loses when the job was rescued in the meantime; the caller must then stop it.
    pub async fn record_notes_if_claimed(&self, batch: &[Notes]) -> Result<Vec<Recorded>, StoreError> {
        let statement = |notes: &Notes| {
            let filter = doc! {
                "_id": notes.claim.job,
                "locked": true,
                "last_execution.start": notes.claim.start,
                "last_execution.notes": { "$not": { "$gte": notes.number } },
            };
            let mut set = notes.set.clone();
            // Without notes the write only tests the claim: a change could conflict with a transaction of the job.
            if !set.is_empty() {
                set.insert("last_execution.notes", notes.number);
            }
            doc! { "q": filter, "u": { "$set": set } }
        };
        let statements = batch.iter().map(statement).collect();
        let recorded = self.record_if_claimed("record_notes_if_claimed", statements, batch.iter().map(|notes| notes.claim)).await?;
        self.tell_progress(batch, &recorded);
        Ok(recorded)
    }
}
