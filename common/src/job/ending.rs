//! The end of a job, as a value: what is archived of it. `rescheduling` is the end of a start after which the job runs again.
//!
//! Pure: this file has no database calls. `cycle` writes these values, each under its guard. For a document that
//! MongoDB refuses, this file also creates reduced forms.

use std::sync::Arc;

use bson::{
    Bson, Document, RawArrayBuf, RawBson, RawBsonRef, RawDocument, RawDocumentBuf, doc,
    oid::ObjectId,
    raw::{CStr, cstr},
    rawdoc,
};

use super::{
    Claim, CorruptJob, Execution, FinishReason, Job,
    bundle::OUTCOMES,
    effects::{Effects, EndedJob, Ending},
    execution::{count, deaths_with, history_with},
    notes::{CHECKPOINT, with_notes},
    priority::DEFAULT_PRIORITY,
    raw::{LARGEST_DOCUMENT, completed},
    rescheduling::{REDUCED, Rescheduling},
    stored_policy::DEFAULT_POLICY,
};
use crate::base::{Failure, Instant, JobId, WorkerId, failure};

/// Stored in place of a result that was dropped.
const NO_RESULT: &str = "the result did not fit into the document or cannot be stored";

/// Stored as `reduced` in place of a document that MongoDB refused.
const WITHOUT_CONTENT: &str = "MongoDB refused the whole document";

/// Whether an archived job has no parameters and settings any more, because MongoDB refused its whole document.
pub(crate) fn has_lost_content(job: &Job) -> bool {
    job.field(REDUCED) == Some(WITHOUT_CONTENT.into())
}

/// The end of a job: it is moved from `scheduled` to `archived`, or deleted if it succeeded and nothing of a success is kept.
#[derive(Clone, Debug)]
pub struct Archival {
    pub(crate) guard: Guard,
    /// The holder of the start. As long as it lives, no other process deletes the job.
    pub(crate) holder: Option<WorkerId>,
    /// Whether a cleaner ends the start, after the death of its worker.
    pub(crate) is_of_rescue: bool,
    /// Shared, because a batch is kept until its write is acknowledged.
    pub(crate) effects: Arc<Effects>,
}

/// The condition under which a job is archived or deleted.
#[derive(Clone, Debug)]
pub(crate) enum Guard {
    /// Locked by this start.
    Claimed(Claim),
    /// Unlocked, with the same number of starts, the same content and the same expiry as when it was read.
    Unlocked(Box<Unlocked>),
}

/// An unlocked job, as it was read.
#[derive(Clone, Debug)]
pub(crate) struct Unlocked {
    pub(crate) job: JobId,
    pub(crate) attempts: Option<Bson>,
    pub(crate) replaced: Option<Bson>,
    pub(crate) expires_at: Option<Bson>,
    /// A job that waits for others may have been released since.
    pub(crate) waiting: Option<Bson>,
}

impl Guard {
    pub(crate) fn job(&self) -> JobId {
        match self {
            Self::Claimed(claim) => claim.job,
            Self::Unlocked(unlocked) => unlocked.job,
        }
    }
}

/// Whether the end of a start was recorded. A lost claim is not an error: the job was rescued in the meantime, and the outcome of this
/// execution is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Recorded {
    /// The end was recorded.
    Yes,
    /// The job is no longer locked by this start.
    ClaimLost,
    /// MongoDB refuses the end, even in its reduced form. The job stays locked by this start. The caller keeps the end and writes it
    /// again later.
    Refused,
}

impl Archival {
    /// A started job that ended. It is deleted if it succeeded and nothing of a success is kept, unless other jobs wait for it.
    pub fn ended(job: &Job, claim: Claim, ending: Ending) -> Self {
        let (holder, is_of_rescue) = (ending.execution.worker, ending.execution.is_of_rescue());
        let effects = Effects::of(EndedJob::from(job), ending, |ending| archived_document(job, ending));
        Self { guard: Guard::Claimed(claim), holder, is_of_rescue, effects: Arc::new(effects) }
    }

    /// A job of which only the document is known.
    fn of_document(guard: Guard, document: &RawDocument, ending: Ending, more: &[(&CStr, RawBsonRef<'_>)]) -> Self {
        let (document, is_of_rescue) = (finished(document, guard.job(), &ending, more), ending.execution.is_of_rescue());
        let effects = Effects::of(EndedJob::of_document(&document), ending, |_| document);
        Self { guard, holder: None, is_of_rescue, effects: Arc::new(effects) }
    }

    /// An unlocked job that is archived without being started: it was cancelled or has expired, or its document is not a job.
    pub fn unstarted(job: JobId, document: &RawDocument, why: &FinishReason, failure: &Failure, now: Instant) -> Self {
        let as_read = |field: &str| document.get(field).ok().flatten().and_then(|value| value.try_into().ok());
        let unlocked = Unlocked {
            job,
            attempts: as_read("attempts"),
            replaced: as_read("replaced"),
            expires_at: as_read("expires_at"),
            waiting: as_read("waiting"),
        };
        let scheduled_at = document.get_datetime("scheduled_at").ok().map(|at| at.to_chrono());
        let execution = Execution { scheduled_at, ..Execution::default() }.ended(now, Some(failure));
        Self::of_document(Guard::Unlocked(Box::new(unlocked)), document, Ending::new(execution, why.clone()), &[])
    }

    /// A document that a dead worker has locked and that is not a valid job, so its history and policy cannot be read.
    pub fn undecodable(claim: Claim, holder: WorkerId, document: &RawDocument, error: &CorruptJob, now: Instant) -> Self {
        let execution = Execution { worker: Some(holder), start: Some(claim.start), crashed: Some(true), ..Execution::default() };
        let execution = execution.ended(now, Some(&Failure::new(failure::MALFORMED, error.to_string())));
        Self::of_document(Guard::Claimed(claim), document, Ending::new(execution, FinishReason::MALFORMED), &[])
    }

    /// A started job that cannot be unlocked, because MongoDB refuses every change of its document, which may be older than the
    /// validator. The archived document is `document` as stored, with the history of the refused update.
    pub(crate) fn not_unlockable(refused: Rescheduling, document: &RawDocument, reason: &str, now: Instant) -> Self {
        let ended = refused.last.unwrap_or_default();
        let mut message = format!("MongoDB refuses to unlock it for another attempt: {reason}");
        if let (Some(class), Some(said)) = (&ended.class, &ended.message) {
            message.push_str(&format!(" (it ended as `{class}`: {said})"));
        }
        let ended_at = ended.ended_at.unwrap_or(now);
        let execution = ended.ended(ended_at, Some(&Failure::new(failure::MALFORMED, message)));
        let history = refused.history.map(raw_history);
        let items = refused.items.and_then(array);
        let mut more = vec![(cstr!("interruptions"), count(refused.interruptions)), (cstr!("deaths"), count(refused.deaths))];
        more.extend(items.as_ref().map(|items| (cstr!("item_outcomes"), items.as_raw_bson_ref())));
        more.extend(history.iter().flat_map(history_fields));
        Self::of_document(Guard::Claimed(refused.claim), document, Ending::new(execution, FinishReason::MALFORMED), &more)
    }

    /// The same end with only the fields that identify the job, for an outcome that MongoDB refuses. A deletion has nothing to leave out.
    pub(crate) fn without_details(self) -> Option<Self> {
        let whole: Document = (&**self.document()?).try_into().unwrap_or_else(|_| doc! { "_id": self.job() });
        let mut document = Document::new();
        for field in [
            "_id",
            "done",
            "created_at",
            "locked",
            "attempts",
            "interruptions",
            "deaths",
            "group",
            "priority",
            "why",
            "graph",
            "continued_as",
            OUTCOMES,
        ] {
            document.extend(whole.get(field).map(|value| (field.to_owned(), value.clone())));
        }
        if let Ok(class) = whole.get_document("workable").and_then(|workable| workable.get_str("class")) {
            document.insert("workable", doc! { "class": class });
        }
        if let Ok(execution) = whole.get_document("last_execution") {
            let kept = execution.iter().filter(|(field, _)| !matches!(field.as_str(), "message" | "trace"));
            document.insert("last_execution", kept.map(|(field, value)| (field.clone(), value.clone())).collect::<Document>());
        }
        document.insert(REDUCED, WITHOUT_CONTENT);
        let archived = Some(RawDocumentBuf::try_from(&document).ok()?);
        Some(Self { effects: Arc::new(Effects { archived, ..Arc::unwrap_or_clone(self.effects) }), ..self })
    }

    /// The job.
    pub fn job(&self) -> JobId {
        self.guard.job()
    }

    /// The archived document; `None` if the job is deleted.
    pub(crate) fn document(&self) -> Option<&RawDocumentBuf> {
        self.effects.archived.as_ref()
    }
}

/// The archived document of a job that was started. What does not fit is left out: the notes, then the result, then the history.
fn archived_document(job: &Job, mut ending: Ending) -> RawDocumentBuf {
    let result = ending.result.take().map(RawBson::try_from);
    let items = ending.items.take().and_then(array);
    let notes = std::mem::take(&mut ending.notes);
    let becomes: Vec<Bson> = ending.becomes.iter().filter_map(|job| job.get("_id").cloned()).collect();
    let becomes = if becomes.is_empty() { None } else { array(becomes) };
    // The `last_execution` of a job that was done at its first attempt is its complete history.
    let has_history = ending.why != FinishReason::DONE || !job.executions.is_empty();
    let history = has_history.then(|| raw_history(history_with(job, &ending.execution)));
    let document = |with_result: bool, with_history: bool| {
        let mut more = vec![(cstr!("attempts"), count(job.attempts)), (cstr!("deaths"), count(deaths_with(job, &ending.execution)))];
        more.extend(items.as_ref().map(|outcomes| (cstr!("item_outcomes"), outcomes.as_raw_bson_ref())));
        more.extend(becomes.as_ref().map(|jobs| (cstr!("continued_as"), jobs.as_raw_bson_ref())));
        match &result {
            Some(Ok(result)) if with_result => more.push((cstr!("result"), result.as_raw_bson_ref())),
            Some(_) => more.push((cstr!("result_dropped"), NO_RESULT.into())),
            None => {}
        }
        more.extend(history.iter().filter(|_| with_history).flat_map(history_fields));
        finished(&job.document, job.id, &ending, &more)
    };
    let fits = |document: &RawDocumentBuf| document.as_bytes().len() <= LARGEST_DOCUMENT;
    let fitting = Some(document(true, true)).filter(fits).or_else(|| Some(document(false, true)).filter(fits));
    let document = fitting.unwrap_or_else(|| document(false, false));
    // Only an attempt after the first can find a checkpoint, which a success removes.
    let may_have_checkpoint = || job.attempts > 1 && matches!(document.get(CHECKPOINT), Ok(Some(_)));
    let noted = if !notes.is_empty() || may_have_checkpoint() { with_notes(&document, notes) } else { None };
    noted.unwrap_or(document)
}

fn array(values: Vec<Bson>) -> Option<RawBson> {
    RawBson::try_from(Bson::Array(values)).ok()
}

fn raw_history((executions, dropped): (Vec<Execution>, u32)) -> (RawArrayBuf, u32) {
    (executions.iter().map(Execution::to_raw).collect(), dropped)
}

fn history_fields((executions, dropped): &(RawArrayBuf, u32)) -> [(&'static CStr, RawBsonRef<'_>); 2] {
    [(cstr!("executions"), RawBsonRef::Array(executions)), (cstr!("executions_dropped"), count(*dropped))]
}

/// The archived document of a finished job: the stored document with `more`, its end, and defaults for missing fields.
///
/// Raw, for speed, because every job passes here. Of a truncated document, which no driver stores, only the id is kept.
fn finished(document: &RawDocument, job: JobId, ending: &Ending, more: &[(&CStr, RawBsonRef<'_>)]) -> RawDocumentBuf {
    let (execution, why) = (ending.execution.to_raw(), &ending.why);
    let end = [
        (cstr!("done"), RawBsonRef::Boolean(*why == FinishReason::DONE)),
        (cstr!("locked"), RawBsonRef::Boolean(false)),
        (cstr!("why"), RawBsonRef::String(why.as_str())),
        (cstr!("last_execution"), RawBsonRef::Document(&execution)),
    ];
    let fields = [more, &end].concat();
    let policy = rawdoc! { "class": DEFAULT_POLICY, "parameters": {} };
    let defaults = [
        (cstr!("created_at"), RawBsonRef::DateTime(bson::DateTime::from_chrono(job.made_at()))),
        (cstr!("attempts"), RawBsonRef::Int32(0)),
        (cstr!("interruptions"), RawBsonRef::Int32(0)),
        (cstr!("deaths"), RawBsonRef::Int32(0)),
        (cstr!("priority"), RawBsonRef::Int32(DEFAULT_PRIORITY.into())),
        (cstr!("retry_policy"), RawBsonRef::Document(&policy)),
    ];
    completed(document, &fields, &defaults).unwrap_or_else(|_| {
        let mut only = RawDocumentBuf::new();
        only.append(cstr!("_id"), ObjectId::from(job));
        fields.iter().for_each(|(field, value)| only.append(field, *value));
        only
    })
}

/// Item outcomes of a bundle that is still running.
#[derive(Clone, Debug)]
pub struct Progress {
    pub(crate) claim: Claim,
    pub(crate) set: Document,
}

impl Progress {
    /// The outcomes of all items, null for those without one. Afterwards the array in the document has an entry for each item.
    pub fn whole(claim: Claim, outcomes: &[Bson]) -> Self {
        Self { claim, set: doc! { OUTCOMES: outcomes } }
    }

    /// The outcomes of some items, for a bundle whose document has an entry for each item.
    pub fn of_items(claim: Claim, outcomes: impl IntoIterator<Item = (usize, Bson)>) -> Self {
        Self { claim, set: outcomes.into_iter().map(|(index, outcome)| (format!("{OUTCOMES}.{index}"), outcome)).collect() }
    }
}
