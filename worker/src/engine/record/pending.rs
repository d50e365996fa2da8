//! Entries of the recorder that are not written yet, and when each may be written.

use std::{
    sync::Arc,
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    job::notes::Notes as NotesWrite,
    store::{Archival, GuardedWrite, Progress, Recorded, Rescheduling},
};
use tokio::sync::oneshot;

use super::{ending::JobEnd, items::Items};
use crate::context::Notes;

/// The time between attempts while MongoDB is unreachable.
pub(super) const PAUSE: Duration = Duration::from_millis(250);
/// Number of failed attempts after which an entry is written alone, because it may be the cause.
pub(super) const TOGETHER: u32 = 8;
/// The longest time between two attempts at one entry. A transaction that a dead process has left open keeps a document locked for up to a
/// minute: the attempt after it must come soon.
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

pub(super) enum Entry {
    End(JobEnd, oneshot::Sender<Recorded>),
    Items(Arc<Items>),
    Notes(Arc<Notes>),
    /// Notes that are queued have become due.
    Urgent,
}

/// Entries that are not written yet.
#[derive(Default)]
pub(super) struct Pending {
    pub(super) archivals: Vec<Unwritten<PendingEnd<Archival>>>,
    pub(super) reschedulings: Vec<Unwritten<PendingEnd<Rescheduling>>>,
    pub(super) items: Vec<Unwritten<Arc<Items>>>,
    pub(super) notes: Vec<Unwritten<Arc<Notes>>>,
}

impl Pending {
    pub(super) fn add(&mut self, entries: impl Iterator<Item = Entry>) {
        for entry in entries {
            match entry {
                Entry::End(JobEnd::Archive(write), recorded) => self.archivals.push(Unwritten::new(PendingEnd { write: *write, recorded })),
                Entry::End(JobEnd::Reschedule(write), recorded) => {
                    self.reschedulings.push(Unwritten::new(PendingEnd { write: *write, recorded }))
                }
                Entry::Items(items) => self.items.push(Unwritten::new(items)),
                Entry::Notes(notes) => self.notes.push(Unwritten::new(notes)),
                Entry::Urgent => {}
            }
        }
    }

    /// Removes the notes that may be written now.
    pub(super) fn take_due_notes(&mut self) -> Vec<Unwritten<Arc<Notes>>> {
        let now = Monotonic::now();
        self.notes.extract_if(.., |waiting| waiting.notes_due(now) <= now).collect()
    }

    /// When the next notes may be written.
    pub(super) fn notes_due(&self) -> Option<Monotonic> {
        let now = Monotonic::now();
        self.notes.iter().map(|waiting| waiting.notes_due(now)).min()
    }

    /// When the next entry is due, apart from notes.
    pub(super) fn next(&self) -> Option<Monotonic> {
        fn first<T>(waiting: &[Unwritten<T>]) -> Option<Monotonic> {
            waiting.iter().map(|waiting| waiting.due).min()
        }
        [first(&self.archivals), first(&self.reschedulings), first(&self.items)].into_iter().flatten().min()
    }
}

/// An entry that is written in a batch with others of its kind.
pub(super) trait Record: Sized + Send {
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
pub(super) enum After<R> {
    Finished,
    /// The entry may have more to write.
    Again(R),
    /// MongoDB refuses the entry even in its reduced form.
    Refused(R),
}

/// The end of a job, and the task that waits until it is recorded.
pub(super) struct PendingEnd<T> {
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

/// What grows while its job runs is written again and again. If a write is refused, the end of the job writes the same.
macro_rules! growing {
    ($kind:ident, $write:ty, $name:literal) => {
        impl Record for Arc<$kind> {
            type Write = $write;
            const NAME: &'static str = $name;

            fn is_finished(&self) -> bool {
                self.leave_queue()
            }

            fn to_write(&self) -> $write {
                $kind::to_write(self)
            }

            fn written(self, recorded: Recorded) -> After<Self> {
                $kind::written(&self, recorded);
                After::Again(self)
            }

            fn not_written(&self) {
                $kind::not_written(self);
            }
        }
    };
}

growing!(Items, Progress, "outcomes of items");
growing!(Notes, NotesWrite, "notes of jobs");

impl Unwritten<Arc<Notes>> {
    /// When they may be written: after a failed attempt, and for the rate.
    fn notes_due(&self, now: Monotonic) -> Monotonic {
        if self.tries > 0 { self.due } else { self.record.due(now) }
    }
}

/// An entry that must be written at `due`.
pub(super) struct Unwritten<R> {
    pub(super) record: R,
    /// Failed attempts.
    pub(super) tries: u32,
    pub(super) due: Monotonic,
}

impl<R> Unwritten<R> {
    pub(super) fn new(record: R) -> Self {
        Self { record, tries: 0, due: Monotonic::now() }
    }

    /// Notes a refusal: the entry is written alone from now on.
    pub(super) fn refused(mut self) -> Self {
        self.tries = self.tries.max(TOGETHER);
        self.failed()
    }

    pub(super) fn failed(mut self) -> Self {
        self.tries += 1;
        let doublings = self.tries.saturating_sub(TOGETHER);
        self.due = Monotonic::now() + (PAUSE * 2_u32.saturating_pow(doublings)).min(LONGEST_PAUSE);
        self
    }
}
