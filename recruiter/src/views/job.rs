//! A job as JSON, why it waits, and how it has ended.

use std::time::{Duration, Instant as Monotonic};

use bson::{Bson, Document, RawDocumentBuf, doc};
use recruiter_common::{
    Why,
    ids::JobId,
    instant::Instant,
    job::{CorruptJob, FinishReason, Job, Stage},
    store::{Store, StoredJob, lossy},
    wait::WaitError,
};
use serde_json::Value;

use super::with_state;

/// The state of a document that is not a job.
pub(crate) const MALFORMED: &str = "malformed";

/// A job, or a document that is none.
pub(crate) type Read = Result<Job, (RawDocumentBuf, CorruptJob)>;

/// The stored document, with its state.
pub(crate) fn to_json(job: &Read, now: Instant) -> Value {
    match job {
        Ok(job) => with_state(lossy(&job.document), Stage::of(job, now).word()),
        Err((document, _)) => with_state(lossy(document), MALFORMED),
    }
}

/// A reason why a job waits.
pub(crate) fn why_to_document(why: &Why) -> Document {
    doc! { "reason": why.reason.name(), "text": &why.text, "until": why.until.map(bson::DateTime::from_chrono) }
}

/// How a job has ended: its result, or its failure.
pub(crate) struct End {
    pub(crate) id: JobId,
    pub(crate) why: FinishReason,
    pub(crate) result: Bson,
    /// The class, message and trace of the last execution. `None` of a job that is done.
    pub(crate) failure: Option<Document>,
}

impl End {
    pub(crate) fn of(id: JobId, archived: &Document) -> Self {
        let why = FinishReason::custom(archived.get_str("why").unwrap_or_default());
        let result = archived.get("result").cloned().unwrap_or(Bson::Null);
        let failure = if why == FinishReason::DONE { None } else { failure_in(archived) };
        Self { id, why, result, failure }
    }

    /// That of a job of which nothing is kept, since it was done.
    pub(crate) fn not_kept(id: JobId) -> Document {
        let mut end = begin(id, &FinishReason::DONE);
        end.extend(doc! { "result": Bson::Null, "kept": false });
        end
    }

    pub(crate) fn to_document(&self) -> Document {
        let mut end = begin(self.id, &self.why);
        match &self.failure {
            Some(failure) => end.insert("failure", failure.clone()),
            None => end.insert("result", self.result.clone()),
        };
        end
    }
}

fn begin(id: JobId, why: &FinishReason) -> Document {
    doc! { "id": id.to_string(), "state": Stage::of_end(why).word(), "why": why.as_str() }
}

fn failure_in(job: &Document) -> Option<Document> {
    let execution = job.get_document("last_execution").ok()?;
    let fields = ["class", "message", "trace"];
    Some(fields.iter().filter_map(|field| Some(((*field).to_owned(), execution.get(*field)?.clone()))).collect())
}

/// Waits for a job, or for the job that it has become, and so on. A job that became several jobs has ended.
pub(crate) async fn last_of_chain(store: &Store, mut id: JobId, timeout: Duration) -> Result<(JobId, StoredJob), WaitError> {
    let begun = Monotonic::now();
    loop {
        let stored = store.wait_for_end(id, timeout.saturating_sub(begun.elapsed())).await?;
        let next = stored.document.get_array("continued_as").ok().map(|jobs| jobs.into_iter().flatten().collect::<Vec<_>>());
        match next.as_deref() {
            Some([next]) if next.as_object_id().is_some() => id = next.as_object_id().map_or(id, JobId::from),
            Some(_) | None => return Ok((id, stored)),
        }
    }
}
