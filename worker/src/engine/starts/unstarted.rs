//! Documents that are archived without a start: they are not jobs, or have expired.

use std::collections::HashMap;

use bson::RawDocument;
use recruiter_common::{
    failure::Failure,
    ids::JobId,
    instant::Instant,
    job::{FinishReason, Job},
    store::{Archival, Recorded},
};
use tokio::sync::oneshot::{self, error::TryRecvError};

use crate::engine::record::{ending::JobEnd, recorder::Recorder};

/// Documents whose move to the archive is not written yet. They have no slot. The recruiter may assign them again until then.
pub(super) struct Unstarted {
    recorder: Recorder,
    archiving: HashMap<JobId, oneshot::Receiver<Recorded>>,
}

impl Unstarted {
    pub(super) fn new(recorder: Recorder) -> Self {
        Self { recorder, archiving: HashMap::new() }
    }

    /// Archives a document that is not a job, without a start.
    pub(super) fn malformed(&mut self, id: JobId, document: &RawDocument, failure: &Failure, now: Instant) {
        if self.archive(id, document, &FinishReason::MALFORMED, failure, now) {
            tracing::warn!(job.id = %id, reason = failure.message, "a document in `scheduled` is not a job; archiving it as malformed");
        }
    }

    /// Archives a job that was not started in time.
    pub(super) fn expired(&mut self, job: &Job, now: Instant) {
        if self.archive(job.id, &job.document, &FinishReason::EXPIRED, &Failure::expired(), now) {
            tracing::info!(job.id = %job.id, job.class, "a job was not started before it expired; archiving it");
        }
    }

    /// Archives a document without a start. The recorder gets each document once: a second entry in the same batch would find the document
    /// deleted, and the whole batch would fail. Returns whether this is the first entry.
    fn archive(&mut self, id: JobId, document: &RawDocument, why: &FinishReason, failure: &Failure, now: Instant) -> bool {
        self.archiving.retain(|_, answer| matches!(answer.try_recv(), Err(TryRecvError::Empty)));
        if self.archiving.contains_key(&id) {
            return false;
        }
        let archival = Archival::unstarted(id, document, why, failure, now);
        self.archiving.insert(id, self.recorder.record_later(JobEnd::Archive(Box::new(archival))));
        true
    }
}
