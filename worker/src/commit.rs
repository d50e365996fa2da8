//! Group commit of outcomes: while one batch is on its way to MongoDB, the next gathers. There is no delay but that.
//!
//! An outcome is never given up while this worker may still write it: an unreachable MongoDB is waited for, a batch
//! that MongoDB refuses is halved until the one bad outcome stands alone, and that one is reduced until it fits.

use std::{sync::Arc, time::Duration};

use recruiter_common::{
    shutdown::pause,
    store::{Archival, CommitSession, Recorded, Rescheduling, Store, StoreError},
    telemetry::chain,
};
use tokio::sync::{mpsc, oneshot};

use crate::{execute::Outcome, heartbeat::Shared};

/// Outcomes in one batch, at most: enough that the round trip no longer matters.
const BATCH: usize = 500;
/// Bytes in one batch, at most, far below what one transaction can hold.
const BATCH_BYTES: usize = 8 * 1024 * 1024;
/// Between attempts while MongoDB cannot be reached.
const PAUSE: Duration = Duration::from_millis(250);

/// An outcome and who waits for it to be written.
pub(crate) struct ToRecord {
    pub(crate) outcome: Outcome,
    pub(crate) recorded: oneshot::Sender<Recorded>,
}

/// Writes outcomes until nobody can send any more. The session's id is shared for the roster.
pub(crate) async fn run(store: Store, mut session: CommitSession, shared: Arc<Shared>, mut queue: mpsc::Receiver<ToRecord>) {
    let mut batch = Vec::with_capacity(BATCH);
    while queue.recv_many(&mut batch, BATCH).await > 0 {
        let (mut archivals, mut reschedulings) = (Vec::new(), Vec::new());
        for ToRecord { outcome, recorded } in batch.drain(..) {
            match outcome {
                Outcome::Archive(archival) => archivals.push((*archival, recorded)),
                Outcome::Reschedule(rescheduling) => reschedulings.push((rescheduling, recorded)),
            }
        }
        for (archivals, waiting) in cut_by_bytes(archivals) {
            tell(waiting, record(&store, &mut session, archivals).await);
            // Another one after a call that was given up.
            shared.commits_in(session.id());
        }
        if !reschedulings.is_empty() {
            let (reschedulings, waiting): (Vec<_>, Vec<_>) = reschedulings.into_iter().unzip();
            let hint = Rescheduling::hint(&reschedulings, store.now());
            tell(waiting, record(&store, &mut session, reschedulings).await);
            store.announce_hint(hint).await;
        }
    }
}

/// An outcome that is written in batches.
trait Record: Clone + Send + Sync {
    fn write(store: &Store, session: &mut CommitSession, batch: &[Self]) -> impl Future<Output = Result<Vec<Recorded>, StoreError>> + Send;
    /// Less of it, when MongoDB refuses the whole.
    fn reduced(self) -> Option<Self>;
}

impl Record for Archival {
    async fn write(store: &Store, session: &mut CommitSession, batch: &[Self]) -> Result<Vec<Recorded>, StoreError> {
        store.archive(session, batch).await
    }

    fn reduced(self) -> Option<Self> {
        Archival::reduced(self)
    }
}

impl Record for Rescheduling {
    async fn write(store: &Store, _session: &mut CommitSession, batch: &[Self]) -> Result<Vec<Recorded>, StoreError> {
        store.reschedule_if_claimed(batch).await
    }

    fn reduced(self) -> Option<Self> {
        Rescheduling::reduced(self)
    }
}

fn tell(waiting: Vec<oneshot::Sender<Recorded>>, recorded: Vec<Recorded>) {
    for (waiting, recorded) in waiting.into_iter().zip(recorded) {
        // Nobody waits any more when the worker gave up on its jobs.
        let _ = waiting.send(recorded);
    }
}

type Batch = (Vec<Archival>, Vec<oneshot::Sender<Recorded>>);

fn cut_by_bytes(archivals: Vec<(Archival, oneshot::Sender<Recorded>)>) -> Vec<Batch> {
    let mut batches: Vec<Batch> = Vec::new();
    let mut bytes = 0;
    for (archival, recorded) in archivals {
        let size = archival.size();
        if batches.is_empty() || bytes + size > BATCH_BYTES {
            batches.push(Batch::default());
            bytes = 0;
        }
        bytes += size;
        if let Some((archivals, waiting)) = batches.last_mut() {
            archivals.push(archival);
            waiting.push(recorded);
        }
    }
    batches
}

/// Writes all, waiting for MongoDB when it is away and halving the batch around what it refuses.
async fn record<T: Record>(store: &Store, session: &mut CommitSession, batch: Vec<T>) -> Vec<Recorded> {
    let mut recorded = Vec::with_capacity(batch.len());
    let mut pieces = vec![batch];
    while let Some(piece) = pieces.pop() {
        match T::write(store, session, &piece).await {
            Ok(done) => recorded.extend(done),
            Err(error) if error.is_transient() => {
                wait(&error, piece.len()).await;
                pieces.push(piece);
            }
            Err(_) if piece.len() > 1 => {
                let (first, second) = piece.split_at(piece.len() / 2);
                pieces.push(second.to_vec());
                pieces.push(first.to_vec());
            }
            Err(error) => {
                tracing::error!(error = chain(&error), "an outcome cannot be stored as it is; storing less of it");
                match piece.into_iter().next().and_then(T::reduced) {
                    Some(reduced) => pieces.push(vec![reduced]),
                    None => recorded.push(Recorded::ClaimLost),
                }
            }
        }
    }
    recorded
}

async fn wait(error: &StoreError, count: usize) {
    tracing::warn!(count, error = chain(error), "outcomes are waiting for MongoDB");
    pause(PAUSE).await;
}
