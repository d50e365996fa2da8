//! Notes of a running job: its progress, its checkpoint and its log, and which of them are not written yet.
//!
//! A job does not wait until its notes are written. The recorder writes the newest of them at most once per second, those of all jobs of
//! the process in one command. A caller that waits for its checkpoint is written at once. The end of the attempt contains all notes.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant as Monotonic},
};

use bson::{Bson, Document};
use recruiter_common::{
    job::{
        Claim, Job, JobProgress,
        notes::{CHECKPOINT, LARGEST_CHECKPOINT, LOG, Log, LogLine, Notes as Write, PROGRESS},
    },
    store::Recorded,
    telemetry::of_bson,
};
use serde::{Serialize, de::DeserializeOwned};
use tokio::sync::{Notify, oneshot};

use crate::{
    context::{Cancel, Cancellation, Context},
    engine::recorder::WeakRecorder,
};

/// The shortest time between two writes of the notes of one job.
const EVERY: Duration = Duration::from_secs(1);

/// Why a checkpoint was not stored, or cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// It is too large.
    #[error("a checkpoint has at most {LARGEST_CHECKPOINT} bytes of BSON, this one has {0}: store the data elsewhere, and its place here")]
    TooLarge(usize),
    /// It cannot be expressed in BSON.
    #[error("the checkpoint cannot be stored: {0}")]
    Unstorable(String),
    /// The stored checkpoint is not of this type.
    #[error("the stored checkpoint cannot be decoded: {0}; read it as a `bson::Bson`, or begin from the start")]
    Undecodable(String),
    /// The job is a bundle.
    #[error("a bundle has no checkpoint: the outcome of each item is stored, and an item that is done does not run again")]
    Bundle,
    /// The worker no longer holds the job, which may already run elsewhere.
    #[error("this execution no longer holds the job, so its checkpoint was not stored: stop")]
    ClaimLost,
    /// MongoDB refuses the checkpoint.
    #[error("MongoDB refuses the checkpoint: the document of the job would be too large, or the value too deeply nested")]
    Refused,
    /// A transaction of this execution is open.
    #[error(
        "a checkpoint cannot be saved while a transaction of the job is open, because the transaction would conflict with it: save it before, \
         or note it with `checkpoint`"
    )]
    InTransaction,
    /// The execution has ended.
    #[error("the execution has ended before its checkpoint was stored")]
    Ended,
}

/// The notes of one execution. They are made when the job takes its first note: most jobs take none.
#[derive(Default)]
pub(crate) struct NotesCell {
    made: OnceLock<Arc<Notes>>,
    destination: Option<(Claim, WeakRecorder)>,
}

impl NotesCell {
    /// For the execution with this claim, whose notes the recorder writes.
    pub(crate) fn new(claim: Claim, recorder: WeakRecorder) -> Self {
        Self { made: OnceLock::new(), destination: Some((claim, recorder)) }
    }

    /// For an item of a bundle: its notes are those of the bundle.
    pub(crate) fn of_item(bundle: &Arc<Notes>) -> Self {
        Self { made: OnceLock::from(bundle.clone()), destination: None }
    }

    fn made(&self, job: &Job, cancel: &Arc<Cancel>) -> &Arc<Notes> {
        self.made.get_or_init(|| {
            let known = Known { checkpoint: stored_checkpoint(job), log: Log::of_job(job), ..Known::default() };
            Arc::new(Notes {
                destination: self.destination.clone(),
                cancel: cancel.clone(),
                known: Mutex::new(known),
                settled: Notify::new(),
            })
        })
    }
}

fn stored_checkpoint(job: &Job) -> Option<Bson> {
    job.field(CHECKPOINT).filter(|checkpoint| *checkpoint != Bson::Null)
}

/// A set of the three fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Fields {
    progress: bool,
    checkpoint: bool,
    log: bool,
}

impl Fields {
    fn any(self) -> bool {
        self.progress || self.checkpoint || self.log
    }

    fn add(&mut self, more: Self) {
        self.progress |= more.progress;
        self.checkpoint |= more.checkpoint;
        self.log |= more.log;
    }
}

/// The notes of a running job, shared by its execution and the recorder.
pub(crate) struct Notes {
    /// `None` in a unit test.
    destination: Option<(Claim, WeakRecorder)>,
    cancel: Arc<Cancel>,
    known: Mutex<Known>,
    /// Notified when a write is answered or has failed.
    settled: Notify,
}

/// Holds back the writes of notes while a transaction of the job is open: each would change the job's document, and the transaction could
/// not end the job. Dropping it lets them go on.
pub(crate) struct Held(Arc<Notes>);

#[derive(Default)]
struct Known {
    /// In the form in which it is stored.
    progress: Option<(JobProgress, Document)>,
    checkpoint: Option<Bson>,
    log: Log,
    /// What this execution has noted.
    noted: Fields,
    /// What no write contains yet.
    unwritten: Fields,
    /// What the write contains that is not answered yet.
    in_flight: Fields,
    /// Who waits until the checkpoint is stored: by the next write, and by the one that is not answered yet.
    waiting: Vec<oneshot::Sender<Result<(), CheckpointError>>>,
    awaiting: Vec<oneshot::Sender<Result<(), CheckpointError>>>,
    last_write: Option<Monotonic>,
    is_queued: bool,
    /// Whether an open transaction of the execution holds the writes back.
    is_held: bool,
    /// Whether the end of the execution writes all further notes.
    is_closed: bool,
    is_claim_lost: bool,
    /// A transaction of the execution may have ended the job: then a lost claim is no reason to stop.
    may_have_ended: bool,
}

impl Notes {
    fn note(self: &Arc<Self>, fields: Fields, change: impl FnOnce(&mut Known)) {
        let mut known = self.known();
        let somebody_waited = !known.waiting.is_empty();
        change(&mut known);
        known.noted.add(fields);
        known.unwritten.add(fields);
        if known.is_held {
            return;
        }
        let is_new = !std::mem::replace(&mut known.is_queued, true);
        let is_urgent = !somebody_waited && !known.waiting.is_empty();
        if let Some((_, recorder)) = self.destination.as_ref().filter(|_| !known.is_closed && (is_new || is_urgent)) {
            recorder.note(is_new.then(|| self.clone()));
        }
    }

    /// Ends the writes: the end of the execution writes all notes that no write contains yet.
    fn close(&self) {
        let mut known = self.known();
        known.is_closed = true;
        known.waiting.clear();
    }

    /// Holds back all writes, once none is on its way and nobody waits for one.
    pub(crate) async fn hold(self: &Arc<Self>) -> Held {
        loop {
            let settled = self.settled.notified();
            {
                let mut known = self.known();
                if known.is_closed || (!known.in_flight.any() && known.waiting.is_empty()) {
                    known.is_held = true;
                    return Held(self.clone());
                }
            }
            settled.await;
        }
    }

    /// Lets the writes go on.
    fn release(self: &Arc<Self>) {
        let mut known = self.known();
        known.is_held = false;
        if let Some((_, recorder)) = self.destination.as_ref().filter(|_| !known.is_closed && !known.is_queued && known.unwritten.any()) {
            known.is_queued = true;
            recorder.note(Some(self.clone()));
        }
    }

    /// When the next write may happen: `now`, or later.
    pub(crate) fn due(&self, now: Monotonic) -> Monotonic {
        let known = self.known();
        known.last_write.filter(|_| known.waiting.is_empty()).map_or(now, |last| (last + EVERY).max(now))
    }

    /// Removes the notes from the recorder's queue if there is nothing to write. Returns whether they were removed.
    pub(crate) fn leave_queue(&self) -> bool {
        let mut known = self.known();
        known.is_queued = !known.is_closed && !known.is_held && known.unwritten.any();
        !known.is_queued
    }

    /// The next write. It is empty if a transaction began meanwhile.
    ///
    /// # Panics
    /// Without a claim, which only a unit test does not have.
    pub(crate) fn to_write(&self) -> Write {
        let (claim, _) = self.destination.as_ref().expect("the recorder has only notes with a claim");
        let mut known = self.known();
        if known.is_held {
            return Write::new(*claim, Document::new());
        }
        known.last_write = Some(Monotonic::now());
        known.in_flight = std::mem::take(&mut known.unwritten);
        known.awaiting = std::mem::take(&mut known.waiting);
        Write::new(*claim, known.fields(known.in_flight))
    }

    /// Handles the answer to the last write. Refused notes are given up: they would also make the end of the job too large.
    pub(crate) fn written(&self, recorded: Recorded) {
        let mut known = self.known();
        let fields = std::mem::take(&mut known.in_flight);
        let answer = match recorded {
            Recorded::Yes => Ok(()),
            Recorded::ClaimLost => {
                (known.is_closed, known.is_claim_lost) = (true, true);
                if !known.may_have_ended {
                    self.cancel.cancel(Cancellation::ClaimLost);
                }
                Err(CheckpointError::ClaimLost)
            }
            Recorded::Refused => {
                let Known { noted, unwritten, .. } = &mut *known;
                // What was noted again meanwhile is another value.
                noted.progress &= !fields.progress || unwritten.progress;
                noted.checkpoint &= !fields.checkpoint || unwritten.checkpoint;
                noted.log &= !fields.log || unwritten.log;
                Err(CheckpointError::Refused)
            }
        };
        // Its receiver may be gone: the caller no longer waits.
        known.awaiting.drain(..).for_each(|waiting| drop(waiting.send(answer.clone())));
        self.settled.notify_waiters();
    }

    /// Notes that the last write failed or has an unknown outcome. It is repeated.
    pub(crate) fn not_written(&self) {
        let mut known = self.known();
        let (again, mut awaiting) = (std::mem::take(&mut known.in_flight), std::mem::take(&mut known.awaiting));
        known.unwritten.add(again);
        known.waiting.append(&mut awaiting);
        self.settled.notify_waiters();
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held {
    /// The transaction has ended the job: nothing is written any more.
    pub(crate) fn close(&self) {
        self.0.close();
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.release();
    }
}

impl Known {
    /// These fields, as they are stored.
    fn fields(&self, fields: Fields) -> Document {
        let progress = || self.progress.as_ref().map(|(_, stored)| (PROGRESS, stored.clone().into()));
        let checkpoint = || Some((CHECKPOINT, self.checkpoint.clone().unwrap_or(Bson::Null)));
        let log = || Some((LOG, self.log.to_bson()));
        let chosen =
            [fields.progress.then(progress).flatten(), fields.checkpoint.then(checkpoint).flatten(), fields.log.then(log).flatten()];
        chosen.into_iter().flatten().map(|(field, value)| (field.to_owned(), value)).collect()
    }
}

/// The notes for the end of an attempt. `None` if there are none, as for most jobs.
pub(crate) fn at_the_end(context: &Context) -> Option<Document> {
    let notes = context.notes.made.get()?;
    notes.close();
    let known = notes.known();
    Some(known.fields(known.noted)).filter(|fields| !fields.is_empty())
}

/// The notes for an end of the job in a transaction of its execution. If the transaction is aborted, the execution goes on. `None` if there
/// are none.
pub(crate) fn in_a_transaction(context: &Context) -> Option<Document> {
    let notes = context.notes.made.get();
    let fields = notes.map(|notes| {
        let mut known = notes.known();
        known.may_have_ended = true;
        known.fields(known.noted)
    });
    let mut fields = fields.filter(|fields| !fields.is_empty());
    if has_checkpoint(&context.job) {
        fields.get_or_insert_default();
    }
    fields
}

/// Whether the document of a job has a checkpoint, which its success removes. Only an attempt after the first can find one.
pub(crate) fn has_checkpoint(job: &Job) -> bool {
    job.attempts > 1 && matches!(job.document.get(CHECKPOINT), Ok(Some(_)))
}

impl Context {
    /// The notes of this execution.
    pub(crate) fn notes(&self) -> &Arc<Notes> {
        self.notes.made(&self.job, &self.cancel)
    }

    /// Reports how far this job is: a percentage, or how many of how many, with an optional text.
    ///
    /// It is visible in the job's document (`progress`) and in `recruiter jobs show` while the job runs, and is kept in the archive. The
    /// newest progress is written at most once per second, so this call is cheap. The progress of a bundle follows from the outcomes of
    /// its items, so a call in an item does nothing.
    ///
    /// ```
    /// # use recruiter_worker::{Context, JobProgress};
    /// let job = Context::for_tests().build();
    /// job.progress(40);
    /// job.progress((3, 10));
    /// job.progress(JobProgress::from((4, 10)).text("importing page 4"));
    /// assert_eq!(job.last_progress().unwrap().to_string(), "4 of 10 (40 %), importing page 4");
    /// ```
    pub fn progress(&self, progress: impl Into<JobProgress>) {
        if self.item.is_some() {
            return;
        }
        let progress = progress.into();
        let progress = match progress.text.clone() {
            // The fields are public: the text may be too long.
            Some(text) => progress.text(text),
            None => progress,
        };
        let stored = progress.to_document(self.now(), self.job.attempts);
        self.notes().note(Fields { progress: true, ..Fields::default() }, |known| known.progress = Some((progress, stored)));
    }

    /// The progress that this execution has reported last.
    pub fn last_progress(&self) -> Option<JobProgress> {
        self.notes.made.get()?.known().progress.as_ref().map(|(progress, _)| progress.clone())
    }

    /// Stores a checkpoint: a cursor that the next attempt reads with [`Context::last_checkpoint`] and continues from. `None` removes it.
    ///
    /// This call does not wait. The newest checkpoint is written at most once per second, so the last second of it may be lost if the
    /// worker dies. [`Context::save_checkpoint`] waits until it is durable. A success removes the checkpoint.
    ///
    /// ```
    /// # use recruiter_worker::{CheckpointError, Context};
    /// # fn main() -> Result<(), CheckpointError> {
    /// let job = Context::for_tests().checkpoint(7).build();
    /// let from: u64 = job.last_checkpoint()?.unwrap_or(0);
    /// job.checkpoint(from + 1)?;
    /// assert_eq!(job.last_checkpoint()?, Some(8));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it is too large or cannot be expressed in BSON, and in a bundle.
    pub fn checkpoint(&self, value: impl Serialize) -> Result<(), CheckpointError> {
        self.note_checkpoint(value, None)
    }

    /// Stores a checkpoint like [`Context::checkpoint`], and returns when it is durable: it survives the death of the worker and every
    /// failover. While MongoDB is unreachable, this call waits.
    ///
    /// Each call is a write of its own, which waits for a majority.
    ///
    /// # Errors
    /// As [`Context::checkpoint`]. Also [`CheckpointError::ClaimLost`] when the job may already run elsewhere: the execution should stop; and
    /// [`CheckpointError::InTransaction`] while a [transaction](Context::transaction) of the job is open.
    pub async fn save_checkpoint(&self, value: impl Serialize) -> Result<(), CheckpointError> {
        let (stored, answer) = oneshot::channel();
        self.note_checkpoint(value, Some(stored))?;
        answer.await.unwrap_or(Err(CheckpointError::Ended))
    }

    fn note_checkpoint(
        &self,
        value: impl Serialize,
        waiting: Option<oneshot::Sender<Result<(), CheckpointError>>>,
    ) -> Result<(), CheckpointError> {
        if self.item.is_some() {
            return Err(CheckpointError::Bundle);
        }
        let value = bson::serialize_to_bson(&value).map_err(|error| CheckpointError::Unstorable(of_bson(&error)))?;
        let size = size_of(&value)?;
        if size > LARGEST_CHECKPOINT {
            return Err(CheckpointError::TooLarge(size));
        }
        let notes = self.notes();
        if notes.known().is_claim_lost {
            return Err(CheckpointError::ClaimLost);
        }
        if waiting.is_some() && notes.known().is_held {
            return Err(CheckpointError::InTransaction);
        }
        notes.note(Fields { checkpoint: true, ..Fields::default() }, |known| {
            known.checkpoint = Some(value).filter(|value| *value != Bson::Null);
            match waiting {
                Some(waiting) if notes.destination.is_none() => drop(waiting.send(Ok(()))),
                Some(waiting) if !known.is_closed => known.waiting.push(waiting),
                Some(_) | None => {}
            }
        });
        Ok(())
    }

    /// The newest checkpoint: of this execution, or of an earlier attempt. `None` if there is none.
    ///
    /// # Errors
    /// When it is not of this type.
    pub fn last_checkpoint<T: DeserializeOwned>(&self) -> Result<Option<T>, CheckpointError> {
        let stored = match self.notes.made.get() {
            Some(notes) => notes.known().checkpoint.clone(),
            None => stored_checkpoint(&self.job),
        };
        stored.map(bson::deserialize_from_bson).transpose().map_err(|error| CheckpointError::Undecodable(of_bson(&error)))
    }

    /// Adds a line to the log of the job, which its document has (`log`) and the archive keeps: the newest 100 lines, of 1 KiB each and
    /// 32 KiB together. It is written at most once per second.
    ///
    /// ```
    /// # use recruiter_worker::Context;
    /// let job = Context::for_tests().build();
    /// job.log("3 of 40 rows have no address");
    /// assert_eq!(job.log_lines(), ["3 of 40 rows have no address"]);
    /// ```
    pub fn log(&self, text: impl AsRef<str>) {
        let (at, attempt) = (self.now(), self.job.attempts);
        let item = self.item.and_then(|item| u32::try_from(item.index).ok());
        self.notes().note(Fields { log: true, ..Fields::default() }, |known| {
            text.as_ref().lines().for_each(|line| known.log.push(LogLine { at, attempt, item, line: line.to_owned() }));
        });
    }

    /// The lines of the job's log, oldest first, with those of earlier attempts.
    pub fn log_lines(&self) -> Vec<String> {
        self.notes().known().log.lines().map(|line| line.line.clone()).collect()
    }

    fn now(&self) -> recruiter_common::Instant {
        self.store.as_ref().map_or_else(|| bson::DateTime::now().to_chrono(), |store| store.now())
    }
}

fn size_of(value: &Bson) -> Result<usize, CheckpointError> {
    let mut alone = Document::new();
    alone.insert("", value.clone());
    // Of a document with one field without a name: its length, the type, the name, and the end.
    alone.to_vec().map(|bytes| bytes.len() - 7).map_err(|error| CheckpointError::Unstorable(of_bson(&error)))
}

impl fmt::Debug for NotesCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NotesCell").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    #[tokio::test]
    async fn notes_of_a_context_for_tests_can_be_asserted() {
        let job = Context::for_tests().attempt(2).checkpoint(doc! { "row": 7 }).build();
        assert_eq!(job.last_checkpoint::<Document>(), Ok(Some(doc! { "row": 7 })));
        assert!(matches!(job.last_checkpoint::<u32>(), Err(CheckpointError::Undecodable(_))));
        assert_eq!((job.last_progress(), job.log_lines()), (None, Vec::new()));
        job.progress((1, 3));
        job.log("one\ntwo");
        assert_eq!(job.save_checkpoint(8).await, Ok(()));
        assert_eq!(job.last_checkpoint(), Ok(Some(8)));
        assert_eq!(job.last_progress(), Some((1, 3).into()));
        assert_eq!(job.log_lines(), ["one", "two"]);
        job.checkpoint(None::<u32>).unwrap();
        assert_eq!(job.last_checkpoint::<u32>(), Ok(None));
        let too_large = vec![0_u8; LARGEST_CHECKPOINT];
        assert!(matches!(job.checkpoint(too_large), Err(CheckpointError::TooLarge(_))));
        assert_eq!(job.checkpoint("x".repeat(LARGEST_CHECKPOINT - 5)), Ok(()), "its length and its end");
        assert_eq!(job.checkpoint("x".repeat(LARGEST_CHECKPOINT - 4)), Err(CheckpointError::TooLarge(LARGEST_CHECKPOINT + 1)));
        assert!(matches!(job.checkpoint(u64::MAX), Err(CheckpointError::Unstorable(_))));
    }

    #[test]
    fn an_item_of_a_bundle_has_only_a_log() {
        let job = Context::for_tests().item(3, 9).build();
        job.progress(50);
        assert_eq!(job.checkpoint(1), Err(CheckpointError::Bundle));
        job.log("a line");
        assert_eq!((job.last_progress(), job.log_lines()), (None, vec!["a line".to_owned()]));
    }

    #[test]
    fn a_refusal_takes_back_nothing_that_was_noted_after_it() {
        let job = Context::for_tests().build();
        job.checkpoint(1).unwrap();
        job.log("a line");
        let unwritten = std::mem::take(&mut job.notes().known().unwritten);
        job.notes().known().in_flight = unwritten;
        job.checkpoint(2).unwrap();
        job.notes().written(Recorded::Refused);
        assert_eq!(at_the_end(&job), Some(doc! { "checkpoint": 2 }));
    }

    #[test]
    fn the_end_has_what_was_noted_and_nothing_else() {
        let job = Context::for_tests().checkpoint(1).build();
        assert_eq!(at_the_end(&job), None);
        assert_eq!(job.last_checkpoint(), Ok(Some(1)));
        assert_eq!(at_the_end(&job), None, "reading is no note");
        job.checkpoint(2).unwrap();
        assert_eq!(at_the_end(&job), Some(doc! { "checkpoint": 2 }));
    }
}
