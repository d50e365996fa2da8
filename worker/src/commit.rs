//! Group commit of outcomes: while one batch is on its way to MongoDB, the next gathers. There is no delay but that.
//!
//! An outcome is never given up while this worker may still write it: an unreachable MongoDB is waited for, a batch
//! that MongoDB refuses is halved until the one bad outcome stands alone, and that one is reduced until it fits.

use std::{sync::Arc, time::Duration};

use recruiter_common::{
    shutdown::pause,
    store::{Archival, CommitSession, Recorded, Rescheduling, Store},
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
        if !archivals.is_empty() {
            let (archivals, waiting): (Vec<Archival>, Vec<_>) = archivals.into_iter().unzip();
            tell(waiting, record(&store, &mut session, archivals).await);
            // Another one after a call that was given up.
            shared.commits_in(session.id());
        }
        if !reschedulings.is_empty() {
            let (reschedulings, waiting): (Vec<Rescheduling>, Vec<_>) = reschedulings.into_iter().unzip();
            let hint = Rescheduling::hint(&reschedulings, store.now());
            tell(waiting, record(&store, &mut session, reschedulings).await);
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

/// Writes all, for as long as it takes.
async fn record<T: recruiter_common::store::Outcome>(store: &Store, session: &mut CommitSession, batch: Vec<T>) -> Vec<Recorded> {
    let mut recorded = Vec::with_capacity(batch.len());
    let mut pieces = vec![(batch, 0)];
    while let Some((piece, tries)) = pieces.pop() {
        match store.record(session, &piece).await {
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
