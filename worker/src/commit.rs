//! Group commit of outcomes: while one batch is on its way to MongoDB, the next gathers. There is no delay but that.
//!
//! An outcome is never given up while this worker may still write it: an unreachable MongoDB is waited for, a batch
//! that MongoDB refuses is halved until the one bad outcome stands alone, and that one is reduced until it fits. One that fails
//! again and again, or that MongoDB refuses even reduced, is tried alone and ever more rarely: it holds up no other. Its job keeps its
//! place in this worker, so that it is never locked without a holder.

use std::time::{Duration, Instant as Monotonic};

use recruiter_common::{
    ids::WorkerId,
    shutdown::pause,
    store::{BATCH_BYTES, CommitSession, End, Recorded, Rescheduling, Store, StoreError},
    telemetry::chain,
};
use tokio::sync::{mpsc, oneshot};

use crate::{execute::Outcome, portion::Portion};

/// Outcomes in one batch, at most: enough that the round trip no longer matters.
const BATCH: usize = 1_000;
/// Between attempts while MongoDB cannot be reached.
const PAUSE: Duration = Duration::from_millis(250);
/// Attempts at an outcome together with others. After that it goes its own way, in case it is what fails.
const TOGETHER: u32 = 8;
/// The longest that such a one waits for its next attempt.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// An outcome and who waits for it to be written.
pub(crate) struct ToRecord {
    pub(crate) outcome: Outcome,
    pub(crate) recorded: oneshot::Sender<Recorded>,
}

/// An outcome that is to be written, and how often that failed.
struct Waiting<T> {
    outcome: T,
    recorded: oneshot::Sender<Recorded>,
    tries: u32,
    again_at: Monotonic,
}

/// Writes a worker's outcomes until nobody can send any more and all are written.
pub(crate) async fn run(store: Store, worker: WorkerId, session: CommitSession, mut queue: mpsc::Receiver<ToRecord>) {
    let mut writer = Writer { store, worker, session, portion: Portion::new(BATCH_BYTES) };
    let mut batch = Vec::with_capacity(BATCH);
    let (mut archivals, mut reschedulings) = (Vec::new(), Vec::new());
    loop {
        let again_at = archivals.iter().map(Waiting::again_at).chain(reschedulings.iter().map(Waiting::again_at)).min();
        match again_at {
            None => {
                if queue.recv_many(&mut batch, BATCH).await == 0 {
                    return;
                }
            }
            // MongoDB is away, or nobody can send any more.
            Some(at) if at <= Monotonic::now() + PAUSE || queue.is_closed() => {
                pause(PAUSE).await;
                while batch.len() < BATCH
                    && let Ok(more) = queue.try_recv()
                {
                    batch.push(more);
                }
            }
            // What is tried ever more rarely delays no other.
            Some(at) => {
                tokio::select! {
                    _ = queue.recv_many(&mut batch, BATCH) => {}
                    () = pause(at.saturating_duration_since(Monotonic::now())) => {}
                }
            }
        }
        for ToRecord { outcome, recorded } in batch.drain(..) {
            match outcome {
                Outcome::Archive(archival) => archivals.push(Waiting::new(*archival, recorded)),
                Outcome::Reschedule(rescheduling) => reschedulings.push(Waiting::new(*rescheduling, recorded)),
            }
        }
        archivals = writer.record(archivals).await;
        if !reschedulings.is_empty() {
            let hint = Rescheduling::hint(reschedulings.iter().map(|waiting| &waiting.outcome), writer.store.now());
            reschedulings = writer.record(reschedulings).await;
            writer.store.announce_hint(hint).await;
        }
    }
}

impl<T> Waiting<T> {
    fn new(outcome: T, recorded: oneshot::Sender<Recorded>) -> Self {
        Self { outcome, recorded, tries: 0, again_at: Monotonic::now() }
    }

    /// When it is tried again: at once while it is tried with others.
    fn again_at(&self) -> Monotonic {
        self.again_at
    }

    /// MongoDB refuses it, whatever it is written with.
    fn refused(mut self) -> Self {
        self.tries = self.tries.max(TOGETHER);
        self.failed()
    }

    fn failed(mut self) -> Self {
        self.tries += 1;
        if self.tries > TOGETHER {
            self.again_at = Monotonic::now() + (PAUSE * 2_u32.saturating_pow(self.tries - TOGETHER)).min(LONGEST_PAUSE);
        }
        self
    }
}

struct Writer {
    store: Store,
    worker: WorkerId,
    session: CommitSession,
    portion: Portion,
}

impl Writer {
    /// Writes these, together and then those that failed together too often; returns what could not be written yet.
    async fn record<T: End>(&mut self, waiting: Vec<Waiting<T>>) -> Vec<Waiting<T>> {
        let (mut together, alone): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|waiting| waiting.tries < TOGETHER);
        let mut left = Vec::new();
        while !together.is_empty() {
            let batch = together.drain(..together.len().min(BATCH)).collect();
            left.extend(self.record_batch(batch).await);
        }
        for one in alone {
            if one.again_at <= Monotonic::now() {
                left.extend(self.record_batch(vec![one]).await);
            } else {
                left.push(one);
            }
        }
        left
    }

    async fn record_batch<T: End>(&mut self, batch: Vec<Waiting<T>>) -> Vec<Waiting<T>> {
        let outcomes: Vec<T> = batch.iter().map(|waiting| waiting.outcome.clone()).collect();
        match self.try_record(&outcomes).await {
            Ok(recorded) => {
                let mut refused = Vec::new();
                for (waiting, recorded) in batch.into_iter().zip(recorded) {
                    if recorded == Recorded::Refused {
                        refused.push(waiting.refused());
                    } else {
                        // Nobody waits any more when the worker gave up on its jobs.
                        let _ = waiting.recorded.send(recorded);
                    }
                }
                refused
            }
            Err(error) => {
                // Over a slow line less comes through in time.
                if matches!(error, StoreError::TimedOut { .. }) {
                    self.portion.halve();
                }
                tracing::warn!(count = batch.len(), error = chain(&error), "outcomes are waiting for MongoDB");
                batch.into_iter().map(Waiting::failed).collect()
            }
        }
    }

    /// In another session after a call that was given up, once the roster names it.
    async fn try_record<T: End>(&mut self, batch: &[T]) -> Result<Vec<Recorded>, StoreError> {
        if T::NEEDS_SESSION && self.session.is_closed() {
            let session = self.store.open_session(&mut self.session).await?;
            if !self.store.commit_in(self.worker, session).await? {
                // Declared dead: the jobs are somebody else's.
                return Ok(vec![Recorded::ClaimLost; batch.len()]);
            }
        }
        self.store.finish_in_portions(&mut self.session, batch, self.portion.bytes()).await
    }
}
