//! Records the notes of running jobs: progress, checkpoint and log. The end of an attempt contains them again.

use super::{
    Store, StoreError,
    finish::{GuardedWrite, Recorded, size_of},
    session::CommitSession,
};
use crate::{
    ids::JobId,
    job::{ending::Progress, notes::Notes},
};

impl GuardedWrite for Notes {
    const NEEDS_SESSION: bool = false;
    const IS_END: bool = false;

    /// One command for all jobs, under the same guard as the outcomes of items: only the latest start records notes.
    async fn write(store: &Store, _session: &mut CommitSession, batch: &[Self]) -> Result<Vec<Recorded>, StoreError> {
        let batch: Vec<Progress> = batch.iter().map(|notes| Progress { claim: notes.claim, set: notes.set.clone() }).collect();
        store.record_items_if_claimed(&batch).await
    }

    /// Nothing can be left out: the caller must know that its checkpoint is not stored.
    fn reduced(self) -> Option<Self> {
        None
    }

    /// Does nothing: the caller gives up these notes.
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
