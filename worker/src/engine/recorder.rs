//! The recorder: writes the ends of a session's jobs, the progress of its bundles and the notes of its jobs in batches.
//!
//! The recorder writes one batch at a time. After a batch of fewer than 100 entries it waits as long as the write took, at most 5 ms, so
//! that entries gather. An entry that arrives after this wait is written at once.
//!
//! An end is kept until it is written or its claim is lost. While MongoDB is unreachable, the recorder repeats the write. The store halves
//! a batch that MongoDB refuses until the refused end is alone, and reduces that end until it fits. An end that fails again and again, or
//! is refused even when reduced, is written alone and at growing intervals, so that it delays no other. Its job stays in the table, so the
//! roster names the holder of the locked job.

use std::{
    sync::Arc,
    time::{Duration, Instant as Monotonic},
};

use bson::Bson;
use recruiter_common::{
    ids::WorkerId,
    job::notes::Notes as NotesWrite,
    shutdown::pause,
    store::{Archival, BATCH_BYTES, CommitSession, GuardedWrite, Progress, Recorded, Rescheduling, Store, StoreError},
    telemetry::chain,
};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};

use super::{items::Items, portion::Portion};
use crate::context::{Notes, NotesQueue};

/// Maximum number of entries in one batch. The cost of the round trip is then negligible.
const BATCH: usize = 1_000;
/// After a batch of this many entries the next is written without a wait.
const NO_WAIT_FROM: usize = 100;
/// The longest wait after a batch.
const LONGEST_REST: Duration = Duration::from_millis(5);
/// The time between attempts while MongoDB is unreachable.
const PAUSE: Duration = Duration::from_millis(250);
/// Number of failed attempts after which an entry is written alone, because it may be the cause.
const TOGETHER: u32 = 8;
/// The longest time between two attempts at one entry. A transaction that a dead process has left open keeps a document locked for up to a
/// minute: the attempt after it must come soon.
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

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

/// The end of a job, as a write.
#[derive(Clone, Debug)]
pub(crate) enum JobEnd {
    Archive(Box<Archival>),
    Reschedule(Box<Rescheduling>),
}

enum Entry {
    End(JobEnd, oneshot::Sender<Recorded>),
    Items(Arc<Items>),
    Notes(Arc<Notes>),
    /// Notes that are queued have become due.
    Urgent,
}

impl Recorder {
    /// Starts the recorder's task, which archives in `session`. The task ends when every clone of this recorder is dropped and every entry
    /// is written.
    pub(crate) fn start(store: Store, worker: WorkerId, session: CommitSession) -> (Self, JoinHandle<()>) {
        let (sender, queue) = mpsc::unbounded_channel();
        let progress = Writer::new(store.clone(), worker, CommitSession::default());
        let ends = Writer::new(store, worker, session);
        (Self(sender), tokio::spawn(run(ends, progress, queue)))
    }

    /// Where the notes of a job are queued.
    pub(crate) fn notes_queue(&self) -> Arc<dyn NotesQueue> {
        Arc::new(WeakRecorder(self.0.downgrade()))
    }

    /// Records the end of a job. `None` if the recorder's task has ended.
    pub(crate) async fn record(&self, end: JobEnd) -> Option<Recorded> {
        let (recorded, answer) = oneshot::channel();
        self.0.send(Entry::End(end, recorded)).ok()?;
        answer.await.ok()
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

type Archivals = Vec<Waiting<PendingEnd<Archival>>>;
type Reschedulings = Vec<Waiting<PendingEnd<Rescheduling>>>;

/// Entries that are not written yet.
#[derive(Default)]
struct Pending {
    archivals: Archivals,
    reschedulings: Reschedulings,
    items: Vec<Waiting<Arc<Items>>>,
    notes: Vec<Waiting<Arc<Notes>>>,
}

/// The recorder's task. A progress write and the end of the same job never overlap: both writers finish before the next batch, and
/// `Items::close` and `Notes::close` precede the end in the queue.
async fn run(mut ends: Writer, mut progress: Writer, mut queue: mpsc::UnboundedReceiver<Entry>) {
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
        if written < NO_WAIT_FROM {
            rest_until = Monotonic::now() + began.elapsed().min(LONGEST_REST);
        }
    }
}

/// Waits until an entry can be written, and takes the gathered entries from the queue. Returns false if every entry is written and all
/// senders are dropped.
async fn gather(pending: &Pending, queue: &mut mpsc::UnboundedReceiver<Entry>, batch: &mut Vec<Entry>) -> bool {
    let notes_wait = pending.notes_due().map(|due| due.saturating_duration_since(Monotonic::now()));
    let Some(next) = pending.next() else {
        // When all senders are dropped, no job is left whose end would write its notes: nobody would read them.
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
    while batch.len() < BATCH
        && let Ok(entry) = queue.try_recv()
    {
        batch.push(entry);
    }
    true
}

impl Pending {
    fn add(&mut self, entries: impl Iterator<Item = Entry>) {
        for entry in entries {
            match entry {
                Entry::End(JobEnd::Archive(write), recorded) => self.archivals.push(Waiting::new(PendingEnd { write: *write, recorded })),
                Entry::End(JobEnd::Reschedule(write), recorded) => {
                    self.reschedulings.push(Waiting::new(PendingEnd { write: *write, recorded }))
                }
                Entry::Items(items) => self.items.push(Waiting::new(items)),
                Entry::Notes(notes) => self.notes.push(Waiting::new(notes)),
                Entry::Urgent => {}
            }
        }
    }

    /// Removes the notes that may be written now.
    fn take_due_notes(&mut self) -> Vec<Waiting<Arc<Notes>>> {
        let now = Monotonic::now();
        self.notes.extract_if(.., |waiting| waiting.notes_due(now) <= now).collect()
    }

    /// When the next notes may be written.
    fn notes_due(&self) -> Option<Monotonic> {
        let now = Monotonic::now();
        self.notes.iter().map(|waiting| waiting.notes_due(now)).min()
    }

    /// When the next entry is due, apart from notes.
    fn next(&self) -> Option<Monotonic> {
        fn first<T>(waiting: &[Waiting<T>]) -> Option<Monotonic> {
            waiting.iter().map(|waiting| waiting.due).min()
        }
        [first(&self.archivals), first(&self.reschedulings), first(&self.items)].into_iter().flatten().min()
    }
}

/// An entry that is written in a batch with others of its kind.
trait Record: Sized + Send {
    type Write: GuardedWrite;
    /// The name of such entries, for the log.
    const NAME: &'static str;

    /// Whether the entry has nothing to write any more.
    fn is_finished(&self) -> bool;
    /// The next write of the entry.
    fn to_write(&self) -> Self::Write;
    /// Handles MongoDB's answer.
    fn written(self, recorded: Recorded) -> After<Self>;
    /// Notes that the last write failed or has an unknown outcome.
    fn not_written(&self) {}
}

/// What is done with an entry after an answer.
enum After<R> {
    Finished,
    /// The entry may have more to write.
    Again(R),
    /// MongoDB refuses the entry even in its reduced form.
    Refused(R),
}

/// The end of a job, and the task that waits until it is recorded.
struct PendingEnd<T> {
    write: T,
    recorded: oneshot::Sender<Recorded>,
}

impl<T: GuardedWrite> Record for PendingEnd<T> {
    type Write = T;
    const NAME: &'static str = "ends of jobs";

    fn is_finished(&self) -> bool {
        false
    }

    fn to_write(&self) -> T {
        self.write.clone()
    }

    fn written(self, recorded: Recorded) -> After<Self> {
        if recorded == Recorded::Refused {
            return After::Refused(self);
        }
        // The task no longer waits if the session has dropped its jobs.
        let _ = self.recorded.send(recorded);
        After::Finished
    }
}

impl Record for Arc<Items> {
    type Write = Progress;
    const NAME: &'static str = "outcomes of items";

    fn is_finished(&self) -> bool {
        self.leave_queue()
    }

    fn to_write(&self) -> Progress {
        Items::to_write(self)
    }

    /// After a refusal, the end of the bundle writes the refused outcomes.
    fn written(self, recorded: Recorded) -> After<Self> {
        Items::written(&self, recorded);
        After::Again(self)
    }

    fn not_written(&self) {
        Items::not_written(self);
    }
}

impl Record for Arc<Notes> {
    type Write = NotesWrite;
    const NAME: &'static str = "notes of jobs";

    fn is_finished(&self) -> bool {
        self.leave_queue()
    }

    fn to_write(&self) -> NotesWrite {
        Notes::to_write(self)
    }

    fn written(self, recorded: Recorded) -> After<Self> {
        Notes::written(&self, recorded);
        After::Again(self)
    }

    fn not_written(&self) {
        Notes::not_written(self);
    }
}

impl Waiting<Arc<Notes>> {
    /// When they may be written: after a failed attempt, and for the rate.
    fn notes_due(&self, now: Monotonic) -> Monotonic {
        if self.tries > 0 { self.due } else { self.record.due(now) }
    }
}

/// An entry that must be written at `due`.
struct Waiting<R> {
    record: R,
    /// Failed attempts.
    tries: u32,
    due: Monotonic,
}

impl<R> Waiting<R> {
    fn new(record: R) -> Self {
        Self { record, tries: 0, due: Monotonic::now() }
    }

    /// Notes a refusal: the entry is written alone from now on.
    fn refused(mut self) -> Self {
        self.tries = self.tries.max(TOGETHER);
        self.failed()
    }

    fn failed(mut self) -> Self {
        self.tries += 1;
        let doublings = self.tries.saturating_sub(TOGETHER);
        self.due = Monotonic::now() + (PAUSE * 2_u32.saturating_pow(doublings)).min(LONGEST_PAUSE);
        self
    }
}

/// Writes batches in one session.
struct Writer {
    store: Store,
    worker: WorkerId,
    session: CommitSession,
    portion: Portion,
}

impl Writer {
    fn new(store: Store, worker: WorkerId, session: CommitSession) -> Self {
        Self { store, worker, session, portion: Portion::new(BATCH_BYTES) }
    }

    /// Writes entries: first those that are written together, then each due entry that is written alone. Returns those that are not written
    /// yet.
    async fn write<R: Record>(&mut self, mut waiting: Vec<Waiting<R>>) -> Vec<Waiting<R>> {
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

    async fn write_batch<R: Record>(&mut self, batch: Vec<Waiting<R>>) -> Vec<Waiting<R>> {
        let writes: Vec<R::Write> = batch.iter().map(|waiting| waiting.record.to_write()).collect();
        match self.try_write(&writes).await {
            Ok(recorded) => {
                let answered = batch.into_iter().zip(recorded).filter_map(|(waiting, recorded)| {
                    let Waiting { record, tries, due } = waiting;
                    match record.written(recorded) {
                        After::Finished => None,
                        After::Again(record) => Some(Waiting::new(record)),
                        After::Refused(record) => Some(Waiting { record, tries, due }.refused()),
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
                batch.into_iter().map(Waiting::failed).collect()
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
