//! Notes of a running job: its progress, its checkpoint and its log, and which of them are not written yet.
//!
//! A job does not wait until its notes are written. The recorder writes the newest of them at most once per second, those of all jobs of
//! the process in one command. A caller that waits for its checkpoint is written at once. The end of the attempt contains all notes.

use std::sync::Arc;

use bson::{Bson, Document};
use recruiter_common::{
    job::{
        JobProgress,
        notes::{LARGEST_CHECKPOINT, LogLine},
    },
    json::bson_of,
    telemetry::of_bson,
};
use serde::{Serialize, de::DeserializeOwned};
use tokio::sync::oneshot;

use crate::context::{
    CheckpointError, Context, Notes,
    unwritten::{Fields, stored_checkpoint},
};

/// The notes for the end of an attempt. Most jobs have none.
pub(crate) fn at_the_end(context: &Context) -> Document {
    last(context, |notes| notes.close())
}

/// The notes for an end of the job in a transaction of its execution. If the transaction is aborted, the execution goes on.
pub(crate) fn in_a_transaction(context: &Context) -> Document {
    last(context, |notes| notes.known.lock().may_have_ended = true)
}

fn last(context: &Context, before: impl FnOnce(&Notes)) -> Document {
    let Some(notes) = context.notes.made.get() else { return Document::new() };
    before(notes);
    let known = notes.known.lock();
    known.fields(known.noted)
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
        self.notes.made.get()?.known.lock().progress.as_ref().map(|(progress, _)| progress.clone())
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
        let value = bson_of(&value).map_err(|error| CheckpointError::Unstorable(error.to_string()))?;
        let size = size_of(&value)?;
        if size > LARGEST_CHECKPOINT {
            return Err(CheckpointError::TooLarge(size));
        }
        let notes = self.notes();
        if notes.known.lock().is_claim_lost {
            return Err(CheckpointError::ClaimLost);
        }
        if waiting.is_some() && notes.known.lock().is_held {
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
            Some(notes) => notes.known.lock().checkpoint.clone(),
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
        self.notes().known.lock().log.lines().map(|line| line.line.clone()).collect()
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

#[cfg(test)]
mod tests {
    use bson::doc;
    use recruiter_common::store::Recorded;

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
        let unwritten = std::mem::take(&mut job.notes().known.lock().unwritten);
        job.notes().known.lock().in_flight = unwritten;
        job.checkpoint(2).unwrap();
        job.notes().written(Recorded::Refused);
        assert_eq!(at_the_end(&job), doc! { "checkpoint": 2 });
    }

    #[test]
    fn the_end_has_what_was_noted_and_nothing_else() {
        let job = Context::for_tests().checkpoint(1).build();
        assert_eq!(at_the_end(&job), doc! {});
        assert_eq!(job.last_checkpoint(), Ok(Some(1)));
        assert_eq!(at_the_end(&job), doc! {}, "reading is no note");
        job.checkpoint(2).unwrap();
        assert_eq!(at_the_end(&job), doc! { "checkpoint": 2 });
    }
}
