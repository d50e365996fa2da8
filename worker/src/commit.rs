//! Group commit of outcomes: while one batch is on its way to MongoDB, the next gathers. There is no delay but that.
//!
//! An outcome is never given up while this worker may still write it: an unreachable MongoDB is waited for, a batch
//! that MongoDB refuses is halved until the one bad outcome stands alone, and that one is reduced until it fits.

use std::{sync::Arc, time::Duration};

use recruiter_common::{
    ids::WorkerId,
    shutdown::pause,
    store::{Archival, CommitSession, Recorded, Rescheduling, Store, StoreError},
    telemetry::chain,
};
use tokio::sync::{mpsc, oneshot};

use crate::{execute::Outcome, heartbeat::Shared};

/// Outcomes in one batch, at most: enough that the round trip no longer matters.
const BATCH: usize = 500;
/// Between attempts while MongoDB cannot be reached.
const PAUSE: Duration = Duration::from_millis(250);
/// Attempts at a whole batch. After that its halves go their own ways, in case one outcome is what fails.
const TOGETHER: u32 = 8;

/// An outcome and who waits for it to be written.
pub(crate) struct ToRecord {
    pub(crate) outcome: Outcome,
    pub(crate) recorded: oneshot::Sender<Recorded>,
}

/// Writes a worker's outcomes until nobody can send any more.
pub(crate) async fn run(store: Store, worker: WorkerId, session: CommitSession, shared: Arc<Shared>, mut queue: mpsc::Receiver<ToRecord>) {
    let mut writer = Writer { store: store.clone(), worker, session, shared };
    let mut batch = Vec::with_capacity(BATCH);
    while queue.recv_many(&mut batch, BATCH).await > 0 {
        let (mut archivals, mut reschedulings) = (Vec::new(), Vec::new());
        for ToRecord { outcome, recorded } in batch.drain(..) {
            match outcome {
                Outcome::Archive(archival) => archivals.push((*archival, recorded)),
                Outcome::Reschedule(rescheduling) => reschedulings.push((rescheduling, recorded)),
            }
        }
        if !archivals.is_empty() {
            let (archivals, waiting): (Vec<Archival>, Vec<_>) = archivals.into_iter().unzip();
            tell(waiting, writer.record(archivals).await);
        }
        if !reschedulings.is_empty() {
            let (reschedulings, waiting): (Vec<Rescheduling>, Vec<_>) = reschedulings.into_iter().unzip();
            let hint = Rescheduling::hint(&reschedulings, store.now());
            tell(waiting, writer.record(reschedulings).await);
            store.announce_hint(hint).await;
        }
    }
}

fn tell(waiting: Vec<oneshot::Sender<Recorded>>, recorded: Vec<Recorded>) {
    for (waiting, recorded) in waiting.into_iter().zip(recorded) {
        // Nobody waits any more when the worker gave up on its jobs.
        let _ = waiting.send(recorded);
    }
}

struct Writer {
    store: Store,
    worker: WorkerId,
    session: CommitSession,
    shared: Arc<Shared>,
}

impl Writer {
    /// Writes all, for as long as it takes.
    async fn record<T: recruiter_common::store::Outcome>(&mut self, batch: Vec<T>) -> Vec<Recorded> {
        let mut recorded = Vec::with_capacity(batch.len());
        let mut pieces = vec![(batch, 0)];
        while let Some((piece, tries)) = pieces.pop() {
            match self.try_record(&piece).await {
                Ok(done) => recorded.extend(done),
                Err(error) => {
                    tracing::warn!(count = piece.len(), error = chain(&error), "outcomes are waiting for MongoDB");
                    pause(PAUSE).await;
                    if tries < TOGETHER || piece.len() == 1 {
                        pieces.push((piece, tries + 1));
                    } else {
                        let (first, second) = piece.split_at(piece.len() / 2);
                        pieces.extend([(second.to_vec(), 0), (first.to_vec(), 0)]);
                    }
                }
            }
        }
        recorded
    }

    /// In another session after a call that was given up, as soon as the roster names it.
    async fn try_record<T: recruiter_common::store::Outcome>(&mut self, batch: &[T]) -> Result<Vec<Recorded>, StoreError> {
        if self.session.is_closed() {
            self.shared.commits_in(self.store.open_session(&mut self.session).await?);
            // Whoever is retired finds out when nothing is recorded.
            self.store.heartbeat(self.worker, &self.shared.working_on(), &self.shared.sessions()).await?;
        }
        self.store.record(&mut self.session, batch).await
    }
}
