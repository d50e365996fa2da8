//! The recorder: writes the ends of a session's jobs, the progress of its bundles and the notes of its jobs in batches.
//!
//! The recorder writes one batch at a time. After a batch of fewer than 100 entries it waits as long as the write took, at most 5 ms, so
//! that entries gather. An entry that arrives after this wait is written at once.
//!
//! An end is kept until it is written or its claim is lost. While MongoDB is unreachable, the recorder repeats the write. The store halves
//! a batch that MongoDB refuses until the refused end is alone, and reduces that end until it fits. An end that fails again and again, or
//! is refused even when reduced, is written alone and at growing intervals, so that it delays no other. The session holds its job, so the
//! roster names the holder of the locked job.

use std::{
    sync::Arc,
    time::{Duration, Instant as Monotonic},
};

use bson::Bson;
use recruiter_common::{
    ids::WorkerId,
    shutdown::pause,
    store::{CommitSession, Recorded, Store},
};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};

use super::{
    ending::JobEnd,
    items::Items,
    pending::{Entry, PAUSE, Pending, Record as _},
    writer::{BATCH, Writer},
};
use crate::{
    context::{Notes, NotesQueue},
    engine::meters::CommitMeters,
};

/// After a batch of this many entries the next is written without a wait.
const NO_WAIT_FROM: usize = 100;
/// The longest wait after a batch.
const LONGEST_REST: Duration = Duration::from_millis(5);
/// The sender of entries to the recorder's task.
#[derive(Clone)]
pub(crate) struct Recorder(mpsc::UnboundedSender<Entry>);

/// A sender that does not keep the recorder's task alive: a workable may hold it and never return.
struct WeakRecorder(mpsc::WeakUnboundedSender<Entry>);

impl NotesQueue for WeakRecorder {
    fn queue(&self, notes: Option<Arc<Notes>>) {
        // If the recorder's task has ended, the session has ended too.
        if let Some(sender) = self.0.upgrade() {
            let _ = sender.send(notes.map_or(Entry::Urgent, Entry::Notes));
        }
    }
}

impl Recorder {
    /// Starts the recorder's task, which archives in `session`. The task ends when every clone of this recorder is dropped and every entry
    /// is written.
    pub(crate) fn start(store: Store, worker: WorkerId, session: CommitSession, meters: CommitMeters) -> (Self, JoinHandle<()>) {
        let (sender, queue) = mpsc::unbounded_channel();
        let progress = Writer::new(store.clone(), worker, CommitSession::default());
        let ends = Writer::new(store, worker, session);
        (Self(sender), tokio::spawn(run(ends, progress, queue, meters)))
    }

    /// Where the notes of a job are queued.
    pub(crate) fn notes_queue(&self) -> Arc<dyn NotesQueue> {
        Arc::new(WeakRecorder(self.0.downgrade()))
    }

    /// Records the end of a job. `None` if the recorder's task has ended.
    pub(crate) async fn record(&self, end: JobEnd) -> Option<Recorded> {
        self.record_later(end).await.ok()
    }

    /// Records an end without waiting for it. The answer arrives when it is written.
    pub(crate) fn record_later(&self, end: JobEnd) -> oneshot::Receiver<Recorded> {
        let (recorded, answer) = oneshot::channel();
        // If the recorder's task has ended, the document stays unlocked and due.
        let _ = self.0.send(Entry::End(end, recorded));
        answer
    }

    /// Notes the outcome of an item of a bundle, to be written before the end of the bundle.
    pub(crate) fn note(&self, items: &Arc<Items>, index: usize, outcome: Bson) {
        if items.note(index, outcome) {
            // If the recorder's task has ended, the session ends too.
            let _ = self.0.send(Entry::Items(items.clone()));
        }
    }
}

/// The recorder's task. A progress write and the end of the same job never overlap: both writers finish before the next batch, and
/// `Items::close` and `Notes::close` precede the end in the queue.
async fn run(mut ends: Writer, mut progress: Writer, mut queue: mpsc::UnboundedReceiver<Entry>, meters: CommitMeters) {
    let mut pending = Pending::default();
    let mut batch = Vec::with_capacity(BATCH);
    let mut rest_until = Monotonic::now();
    while gather(&pending, &mut queue, &mut batch).await {
        let rest = rest_until.saturating_duration_since(Monotonic::now());
        if !rest.is_zero() {
            pause(rest).await;
        }
        while batch.len() < BATCH
            && let Ok(entry) = queue.try_recv()
        {
            batch.push(entry);
        }
        let (written, began) = (batch.len(), Monotonic::now());
        pending.add(batch.drain(..));
        let due = pending.take_due_notes();
        let Pending { archivals, reschedulings, items, mut notes } = pending;
        let ended = async { (ends.write(archivals).await, ends.write(reschedulings).await) };
        let in_progress = async { (progress.write(items).await, progress.write(due).await) };
        let ((archivals, reschedulings), (items, unwritten)) = tokio::join!(ended, in_progress);
        notes.extend(unwritten.into_iter().filter(|waiting| !waiting.record.is_finished()));
        pending = Pending { archivals, reschedulings, items, notes };
        meters.written(written, began);
        if written < NO_WAIT_FROM {
            rest_until = Monotonic::now() + began.elapsed().min(LONGEST_REST);
        }
    }
}

/// Waits until an entry can be written. Returns false if every entry is written and all senders are dropped.
async fn gather(pending: &Pending, queue: &mut mpsc::UnboundedReceiver<Entry>, batch: &mut Vec<Entry>) -> bool {
    let notes_wait = pending.notes_due().map(|due| due.saturating_duration_since(Monotonic::now()));
    let Some(next) = pending.next() else {
        // When all senders are dropped, no job is left whose end would write its notes, so they would not be read.
        let Some(wait) = notes_wait.filter(|_| !queue.is_closed()) else { return queue.recv_many(batch, BATCH).await > 0 };
        tokio::select! {
            _ = queue.recv_many(batch, BATCH) => {}
            () = pause(wait) => {}
        }
        return true;
    };
    let wait = next.saturating_duration_since(Monotonic::now());
    if wait <= PAUSE || queue.is_closed() {
        // MongoDB is unreachable, or an entry is due.
        if !wait.is_zero() {
            pause(wait.min(PAUSE)).await;
        }
    } else {
        // An entry with a long pause delays no other.
        tokio::select! {
            _ = queue.recv_many(batch, BATCH) => {}
            () = pause(wait.min(notes_wait.unwrap_or(wait))) => {}
        }
    }
    true
}
