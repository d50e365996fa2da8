//! Writes entries of the recorder in batches.

use std::time::Instant as Monotonic;

use recruiter_common::{
    ids::WorkerId,
    store::{BATCH_BYTES, CommitSession, GuardedWrite, Recorded, Store, StoreError},
    telemetry::chain,
};

use super::{
    pending::{After, Record, TOGETHER, Unwritten},
    portion::Portion,
};

/// Maximum number of entries in one batch. The cost of the round trip is then negligible.
pub(super) const BATCH: usize = 1_000;

/// Writes batches in one session.
pub(super) struct Writer {
    store: Store,
    worker: WorkerId,
    session: CommitSession,
    portion: Portion,
}

impl Writer {
    pub(super) fn new(store: Store, worker: WorkerId, session: CommitSession) -> Self {
        Self { store, worker, session, portion: Portion::new(BATCH_BYTES) }
    }

    /// Writes entries: first those that are written together, then each due entry that is written alone. Returns those that are not written
    /// yet.
    pub(super) async fn write<R: Record>(&mut self, mut waiting: Vec<Unwritten<R>>) -> Vec<Unwritten<R>> {
        waiting.retain(|waiting| !waiting.record.is_finished());
        let (mut together, alone): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|waiting| waiting.tries < TOGETHER);
        let mut unwritten = Vec::new();
        while !together.is_empty() {
            let batch = together.drain(..together.len().min(BATCH)).collect();
            unwritten.extend(self.write_batch(batch).await);
        }
        for one in alone {
            if one.due <= Monotonic::now() {
                unwritten.extend(self.write_batch(vec![one]).await);
            } else {
                unwritten.push(one);
            }
        }
        unwritten
    }

    async fn write_batch<R: Record>(&mut self, batch: Vec<Unwritten<R>>) -> Vec<Unwritten<R>> {
        let writes: Vec<R::Write> = batch.iter().map(|waiting| waiting.record.to_write()).collect();
        match self.try_write(&writes).await {
            Ok(recorded) => {
                let answered = batch.into_iter().zip(recorded).filter_map(|(waiting, recorded)| {
                    let Unwritten { record, tries, due } = waiting;
                    match record.written(recorded) {
                        After::Finished => None,
                        After::Again(record) => Some(Unwritten::new(record)),
                        After::Refused(record) => Some(Unwritten { record, tries, due }.refused()),
                    }
                });
                answered.collect()
            }
            Err(error) => {
                // Over a slow connection, fewer bytes arrive in time.
                if matches!(error, StoreError::TimedOut { .. }) {
                    self.portion.halve();
                }
                tracing::warn!(count = batch.len(), error = chain(&error), "{} are waiting for MongoDB", R::NAME);
                batch.iter().for_each(|waiting| waiting.record.not_written());
                batch.into_iter().map(Unwritten::failed).collect()
            }
        }
    }

    /// Writes a batch. If the session was closed after a call with an unknown outcome, opens another one, and records it in the roster
    /// before the write.
    async fn try_write<T: GuardedWrite>(&mut self, batch: &[T]) -> Result<Vec<Recorded>, StoreError> {
        if T::NEEDS_SESSION && self.session.is_closed() {
            let session = self.store.open_session(&mut self.session).await?;
            if !self.store.record_commit_session(self.worker, session).await? {
                // This worker was declared dead: a cleaner rescues its jobs.
                return Ok(vec![Recorded::ClaimLost; batch.len()]);
            }
        }
        self.store.finish_in_portions(&mut self.session, batch, self.portion.bytes()).await
    }
}
