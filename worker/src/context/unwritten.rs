//! The notes of one execution, and which of them are not written yet.

use std::{
    sync::{Arc, OnceLock},
    time::{Duration, Instant as Monotonic},
};

use bson::{Bson, Document};
use parking_lot::Mutex;
use recruiter_common::{
    job::{
        Claim, Job, JobProgress,
        notes::{CHECKPOINT, LOG, Log, Notes as Write, PROGRESS},
    },
    store::Recorded,
};
use tokio::sync::{Notify, oneshot};

use super::checkpoint_error::CheckpointError;
use crate::cancellation::{Cancel, Cancellation};

/// The shortest time between two writes of the notes of one job.
const EVERY: Duration = Duration::from_secs(1);

/// Where notes wait for their write.
pub(crate) trait NotesQueue: Send + Sync {
    /// Queues notes. Without any, the notes that are queued already have become urgent.
    fn queue(&self, notes: Option<Arc<Notes>>);
}

/// The notes of one execution. They are made when the job takes its first note: most jobs take none.
#[derive(Default)]
pub(crate) struct NotesCell {
    pub(crate) made: OnceLock<Arc<Notes>>,
    destination: Option<(Claim, Arc<dyn NotesQueue>)>,
}

impl NotesCell {
    /// For the execution with this claim, whose notes the recorder writes.
    pub(crate) fn new(claim: Claim, queue: Arc<dyn NotesQueue>) -> Self {
        Self { made: OnceLock::new(), destination: Some((claim, queue)) }
    }

    /// For an item of a bundle: its notes are those of the bundle.
    pub(crate) fn of_item(bundle: &Arc<Notes>) -> Self {
        Self { made: OnceLock::from(bundle.clone()), destination: None }
    }

    pub(crate) fn made(&self, job: &Arc<Job>, cancel: &Arc<Cancel>) -> &Arc<Notes> {
        self.made.get_or_init(|| {
            let known = Known { checkpoint: stored_checkpoint(job), log: Log::of_job(job), ..Known::default() };
            Arc::new(Notes {
                job: job.clone(),
                destination: self.destination.clone(),
                cancel: cancel.clone(),
                known: Mutex::new(known),
                settled: Notify::new(),
            })
        })
    }
}

pub(crate) fn stored_checkpoint(job: &Job) -> Option<Bson> {
    job.field(CHECKPOINT).filter(|checkpoint| *checkpoint != Bson::Null)
}

/// A set of the three fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Fields {
    pub(crate) progress: bool,
    pub(crate) checkpoint: bool,
    pub(crate) log: bool,
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
    job: Arc<Job>,
    /// `None` in a unit test.
    pub(crate) destination: Option<(Claim, Arc<dyn NotesQueue>)>,
    cancel: Arc<Cancel>,
    pub(crate) known: Mutex<Known>,
    /// Notified when a write is answered or has failed.
    settled: Notify,
}

/// Holds back the writes of notes while a transaction of the job is open: each would change the job's document, and the transaction could
/// not end the job. Dropping it lets them go on.
pub(crate) struct Held(Arc<Notes>);

#[derive(Default)]
pub(crate) struct Known {
    /// In the form in which it is stored.
    pub(crate) progress: Option<(JobProgress, Document)>,
    pub(crate) checkpoint: Option<Bson>,
    pub(crate) log: Log,
    /// What this execution has noted.
    pub(crate) noted: Fields,
    /// What no write contains yet.
    pub(crate) unwritten: Fields,
    /// What the write contains that is not answered yet.
    pub(crate) in_flight: Fields,
    /// Who waits until the checkpoint is stored: by the next write, and by the one that is not answered yet.
    pub(crate) waiting: Vec<oneshot::Sender<Result<(), CheckpointError>>>,
    awaiting: Vec<oneshot::Sender<Result<(), CheckpointError>>>,
    last_write: Option<Monotonic>,
    /// The number of writes so far.
    writes: i64,
    is_queued: bool,
    /// Whether an open transaction of the execution holds the writes back.
    pub(crate) is_held: bool,
    /// Whether the end of the execution writes all further notes.
    pub(crate) is_closed: bool,
    pub(crate) is_claim_lost: bool,
    /// A transaction of the execution may have ended the job: then a lost claim is no reason to stop.
    pub(crate) may_have_ended: bool,
}

impl Notes {
    pub(crate) fn note(self: &Arc<Self>, fields: Fields, change: impl FnOnce(&mut Known)) {
        let mut known = self.known.lock();
        let was_waited_for = !known.waiting.is_empty();
        change(&mut known);
        known.noted.add(fields);
        known.unwritten.add(fields);
        if known.is_held {
            return;
        }
        let is_new = !std::mem::replace(&mut known.is_queued, true);
        let is_urgent = !was_waited_for && !known.waiting.is_empty();
        if let Some((_, queue)) = self.destination.as_ref().filter(|_| !known.is_closed && (is_new || is_urgent)) {
            queue.queue(is_new.then(|| self.clone()));
        }
    }

    /// Ends the writes: the end of the execution writes all notes that no write contains yet.
    pub(crate) fn close(&self) {
        let mut known = self.known.lock();
        known.is_closed = true;
        known.waiting.clear();
    }

    /// Holds back all writes, once none is on its way and no job waits for one.
    pub(crate) async fn hold(self: &Arc<Self>) -> Held {
        loop {
            let settled = self.settled.notified();
            {
                let mut known = self.known.lock();
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
        let mut known = self.known.lock();
        known.is_held = false;
        if let Some((_, queue)) = self.destination.as_ref().filter(|_| !known.is_closed && !known.is_queued && known.unwritten.any()) {
            known.is_queued = true;
            queue.queue(Some(self.clone()));
        }
    }

    /// When the next write may happen: `now`, or later.
    pub(crate) fn due(&self, now: Monotonic) -> Monotonic {
        let known = self.known.lock();
        known.last_write.filter(|_| known.waiting.is_empty()).map_or(now, |last| (last + EVERY).max(now))
    }

    /// Removes the notes from the recorder's queue if there is nothing to write. Returns whether they were removed.
    pub(crate) fn leave_queue(&self) -> bool {
        let mut known = self.known.lock();
        known.is_queued = !known.is_closed && !known.is_held && known.unwritten.any();
        !known.is_queued
    }

    /// The next write. It is empty if a transaction began meanwhile.
    pub(crate) fn to_write(&self) -> Write {
        let (claim, _) = self.destination.as_ref().expect("the recorder has only notes with a claim");
        let mut known = self.known.lock();
        known.writes += 1;
        if known.is_held {
            return Write::new(*claim, known.writes, Document::new());
        }
        known.last_write = Some(Monotonic::now());
        known.in_flight = std::mem::take(&mut known.unwritten);
        known.awaiting = std::mem::take(&mut known.waiting);
        Write::new(*claim, known.writes, known.fields(known.in_flight)).of_job(&self.job)
    }

    /// Handles the answer to the last write. Refused notes are given up: they would also make the end of the job too large.
    pub(crate) fn written(&self, recorded: Recorded) {
        let mut known = self.known.lock();
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
        let mut known = self.known.lock();
        let (again, mut awaiting) = (std::mem::take(&mut known.in_flight), std::mem::take(&mut known.awaiting));
        known.unwritten.add(again);
        known.waiting.append(&mut awaiting);
        self.settled.notify_waiters();
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
    pub(crate) fn fields(&self, fields: Fields) -> Document {
        let progress = || self.progress.as_ref().map(|(_, stored)| (PROGRESS, stored.clone().into()));
        let checkpoint = || Some((CHECKPOINT, self.checkpoint.clone().unwrap_or(Bson::Null)));
        let log = || Some((LOG, self.log.to_bson()));
        let chosen =
            [fields.progress.then(progress).flatten(), fields.checkpoint.then(checkpoint).flatten(), fields.log.then(log).flatten()];
        chosen.into_iter().flatten().map(|(field, value)| (field.to_owned(), value)).collect()
    }
}
