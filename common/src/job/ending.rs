//! The end of a job, as a value: what is archived of it. `rescheduling` is the end of a start after which the job runs again.
//!
//! Pure: this file has no database calls. The [`store`](crate::store) writes these values, each under its guard. For a document that
//! MongoDB refuses, this file also creates reduced forms.

use std::sync::Arc;

use bson::{
    Bson, Document, RawBson, RawBsonRef, RawDocument, RawDocumentBuf, doc,
    oid::ObjectId,
    raw::{CStr, cstr},
    rawdoc,
};

use super::{
    Job,
    document::CorruptJob,
    execution::{Claim, Execution, Executions, count, deaths_with},
    finish_reason::FinishReason,
    gate::line_of_gate,
    keep::Keep,
    notes::with_notes,
    priority::DEFAULT_PRIORITY,
    raw::{LARGEST_DOCUMENT, completed, replaced},
    rescheduling::Rescheduling,
    stored_policy::DEFAULT_POLICY,
};
use crate::base::{
    failure,
    failure::Failure,
    ids::{JobId, WorkerId},
    instant::Instant,
};

/// Stored in place of a result that was dropped.
const NO_RESULT: &str = "the result did not fit into the document or cannot be stored";
/// The field that marks a document of which a part could not be stored.
pub(super) const REDUCED: &str = "reduced";
/// The field of a bundle that holds the outcomes of its items.
pub(super) const OUTCOMES: &str = "item_outcomes";

/// The end of a job: it is moved from `scheduled` to `archived`, or deleted if it succeeded and nothing of a success is kept.
#[derive(Clone, Debug)]
pub struct Archival {
    pub(crate) guard: Guard,
    pub(crate) kept: Kept,
    /// The unique key that its end frees, if that was taken until the job is finished.
    pub(crate) frees: Option<String>,
    /// Whether other jobs are known to wait for its end.
    pub(crate) is_followed: bool,
    /// The jobs that it becomes, which are inserted in the same transaction.
    pub(crate) continuation: Arc<[Document]>,
    /// The line that halts with its end.
    pub(crate) halts: Option<Halt>,
}

/// A line that halts, because one of its jobs has failed for the last time.
#[derive(Clone, Debug)]
pub(crate) struct Halt {
    pub(crate) line: String,
    pub(crate) job: JobId,
    pub(crate) why: FinishReason,
}

impl Halt {
    /// The halt that follows the end of a job with `halt_on_failure`. A cancellation is no failure.
    fn after(gate: Option<&str>, job: JobId, why: &FinishReason) -> Option<Self> {
        if *why == FinishReason::DONE || *why == FinishReason::CANCELLED {
            return None;
        }
        Some(Self { line: line_of_gate(gate?)?.to_owned(), job, why: why.clone() })
    }
}

/// What is kept of a job that ends.
#[derive(Clone, Debug)]
pub(crate) enum Kept {
    /// Its document, in this form. Shared, because a batch is kept until its write is acknowledged.
    Document(Arc<RawDocumentBuf>),
    /// Nothing.
    Nothing {
        /// Its class, for its event.
        class: String,
        /// The group in which it is counted.
        group: String,
        /// The holder of the start. As long as it lives, no other process deletes the job.
        holder: Option<WorkerId>,
    },
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
    fn new(guard: Guard, document: RawDocumentBuf, why: &FinishReason) -> Self {
        let frees = document.get_str("unique").ok().map(str::to_owned);
        let is_followed = document.get_bool("followed").unwrap_or(false);
        let may_halt = document.get_bool("halt_on_failure").unwrap_or(false);
        let halts = if may_halt { Halt::after(document.get_str("gate").ok(), guard.job(), why) } else { None };
        Self { guard, kept: Kept::Document(Arc::new(document)), frees, is_followed, continuation: Arc::default(), halts }
    }

    /// A started job that ended, with the finish reason `why`. It is deleted if it succeeded and nothing of a success is kept, unless other
    /// jobs wait for it.
    pub fn ended(job: &Job, claim: Claim, execution: Execution, why: &FinishReason, result: Option<Bson>) -> Self {
        let kept = if job.settings.keep() == Keep::Failures && *why == FinishReason::DONE && !job.is_followed {
            Kept::Nothing { class: job.class.clone(), group: job.settings.group().to_owned(), holder: execution.worker }
        } else {
            Kept::Document(Arc::new(archived_document(job, &execution, why, result)))
        };
        let (frees, is_followed) = (job.unique.clone(), job.is_followed);
        let halts = if job.settings.halt_on_failure { Halt::after(job.gate.as_deref(), job.id, why) } else { None };
        Self { guard: Guard::Claimed(claim), kept, frees, is_followed, continuation: Arc::default(), halts }
    }

    /// Adds the jobs that it becomes. The archived document names them.
    #[must_use]
    pub fn continued_as(mut self, jobs: Vec<Document>) -> Self {
        let ids: Vec<Bson> = jobs.iter().filter_map(|job| job.get("_id").cloned()).collect();
        if let Some(document) = self.document()
            && let Ok(ids) = RawBson::try_from(Bson::Array(ids))
            && let Ok(document) = replaced(document, &[(cstr!("continued_as"), ids.as_raw_bson_ref())])
        {
            self.kept = Kept::Document(Arc::new(document));
        }
        self.continuation = jobs.into();
        self
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
        Self::new(Guard::Unlocked(Box::new(unlocked)), finished(document, job, &execution, why, &[]), why)
    }

    /// A document that a dead worker has locked and that is not a valid job, so its history and policy cannot be read.
    pub fn undecodable(claim: Claim, holder: WorkerId, document: &RawDocument, error: &CorruptJob, now: Instant) -> Self {
        let execution = Execution { worker: Some(holder), start: Some(claim.start), crashed: Some(true), ..Execution::default() };
        let execution = execution.ended(now, Some(&Failure::new(failure::MALFORMED, error.to_string())));
        let why = &FinishReason::MALFORMED;
        Self::new(Guard::Claimed(claim), finished(document, claim.job, &execution, why, &[]), why)
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
        let executions = refused.executions.as_ref().map(|executions| (executions, executions.to_raw()));
        let items = refused.items.and_then(|outcomes| RawBson::try_from(Bson::Array(outcomes)).ok());
        let mut kept = vec![(cstr!("interruptions"), count(refused.interruptions))];
        if let Some((executions, raw)) = &executions {
            kept.extend(executions.fields(raw));
            kept.push((cstr!("deaths"), count(executions.deaths)));
        }
        kept.extend(items.as_ref().map(|items| (cstr!("item_outcomes"), items.as_raw_bson_ref())));
        let why = &FinishReason::MALFORMED;
        Self::new(Guard::Claimed(refused.claim), finished(document, refused.claim.job, &execution, why, &kept), why)
    }

    /// Adds the outcomes of all items of the bundle, if the bundle is kept.
    #[must_use]
    pub fn with_items(mut self, outcomes: Vec<Bson>) -> Self {
        let Some(document) = self.document() else { return self };
        // Each outcome is limited in size, so all of them can be stored.
        let with_them =
            RawBson::try_from(Bson::Array(outcomes)).and_then(|all| replaced(document, &[(cstr!("item_outcomes"), all.as_raw_bson_ref())]));
        if let Ok(document) = with_them {
            self.kept = Kept::Document(Arc::new(document));
        }
        self
    }

    /// Adds the notes of the job, if it is kept and they fit. A job that succeeded has no checkpoint any more.
    #[must_use]
    pub fn with_notes(mut self, notes: Document) -> Self {
        if let Some(document) = self.document().and_then(|document| with_notes(document, notes)) {
            self.kept = Kept::Document(Arc::new(document));
        }
        self
    }

    /// The same end with only the fields that identify the job, for an outcome that MongoDB refuses. A deletion has nothing to leave out.
    pub(crate) fn without_details(self) -> Option<Self> {
        let whole: Document = (&***self.document()?).try_into().unwrap_or_else(|_| doc! { "_id": self.job() });
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
        document.insert(REDUCED, "MongoDB refused the whole document");
        Some(Self { kept: Kept::Document(Arc::new(RawDocumentBuf::try_from(&document).ok()?)), ..self })
    }

    /// The job.
    pub fn job(&self) -> JobId {
        self.guard.job()
    }

    /// The archived document; `None` if the job is deleted.
    pub(crate) fn document(&self) -> Option<&Arc<RawDocumentBuf>> {
        match &self.kept {
            Kept::Document(document) => Some(document),
            Kept::Nothing { .. } => None,
        }
    }
}

fn archived_document(job: &Job, execution: &Execution, why: &FinishReason, result: Option<Bson>) -> RawDocumentBuf {
    let result = result.map(RawBson::try_from);
    let history = archived_history(job, execution, why).map(|executions| (executions.to_raw(), executions));
    let document = |with_result: bool, with_history: bool| {
        let mut more = vec![(cstr!("attempts"), count(job.attempts)), (cstr!("deaths"), count(deaths_with(job, execution)))];
        match &result {
            Some(Ok(result)) if with_result => more.push((cstr!("result"), result.as_raw_bson_ref())),
            Some(_) => more.push((cstr!("result_dropped"), NO_RESULT.into())),
            None => {}
        }
        if let Some((raw, executions)) = history.as_ref().filter(|_| with_history) {
            more.extend(executions.fields(raw));
        }
        finished(&job.document, job.id, execution, why, &more)
    };
    let fits = |document: &RawDocumentBuf| document.as_bytes().len() <= LARGEST_DOCUMENT;
    let whole = document(true, true);
    if fits(&whole) {
        return whole;
    }
    let without_result = document(false, true);
    if fits(&without_result) { without_result } else { document(false, false) }
}

/// The ended executions including this one. `None` for a job that was done at its first attempt: its `last_execution` is the complete
/// history.
fn archived_history(job: &Job, execution: &Execution, why: &FinishReason) -> Option<Executions> {
    (*why != FinishReason::DONE || !job.executions.is_empty()).then(|| Executions::with(job, execution))
}

/// The archived document of a finished job: the stored document with `more`, its end, and defaults for missing fields.
///
/// Raw, for speed, because every job passes here. Of a truncated document, which no driver stores, only the id is kept.
fn finished(
    document: &RawDocument,
    job: JobId,
    execution: &Execution,
    why: &FinishReason,
    more: &[(&CStr, RawBsonRef<'_>)],
) -> RawDocumentBuf {
    let execution = execution.to_raw();
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
