//! From a stored document to a [`Job`]: every field is checked here, once, when a job is read.

use bson::{Bson, Document, RawDocument, RawDocumentBuf, doc};
use serde::Deserialize;

use super::{
    Claim, Execution, FinishReason, Job, JobState, Settings,
    bundle::{Bundle, InvalidBundle},
};
use crate::base::{GraphId, Instant, JobId, WorkerId, instant, of_bson};

/// A locked document in `scheduled`: its holder, and the job if the document is valid.
#[derive(Debug)]
pub struct Held {
    /// The worker that has locked it.
    pub holder: WorkerId,
    /// Proof of the start.
    pub claim: Claim,
    /// The job; or the document, and why it is not a valid job.
    pub job: Result<Box<Job>, (RawDocumentBuf, CorruptJob)>,
}

/// A job's document and its collection.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoredJob {
    /// Whether it was in `archived`; otherwise it was in `scheduled`.
    pub is_archived: bool,
    /// The stored document.
    pub document: RawDocumentBuf,
}

impl TryFrom<RawDocumentBuf> for Held {
    /// The document, if it has no holder.
    type Error = RawDocumentBuf;

    fn try_from(document: RawDocumentBuf) -> Result<Self, RawDocumentBuf> {
        match holder_of(&document) {
            Some((holder, claim)) => Ok(Self { holder, claim, job: Job::try_from(document).map(Box::new) }),
            None => Err(document),
        }
    }
}

/// The worker that has locked a document, and its claim.
pub fn holder_of(document: &RawDocument) -> Option<(WorkerId, Claim)> {
    let execution = document.get_document("last_execution").ok()?;
    let (job, start) = (document.get_object_id("_id").ok()?, execution.get_object_id("start").ok()?);
    Some((execution.get_object_id("worker").ok()?.into(), Claim { job: job.into(), start: start.into() }))
}

/// Why a document is not a valid job.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
#[non_exhaustive]
pub enum CorruptJob {
    /// A field is missing or of the wrong type.
    #[error("the document is not a job: {0}")]
    Undecodable(String),
    /// A count is negative or too large.
    #[error("field `{field}` is {value}, which is not a valid count")]
    NotACount { field: &'static str, value: i64 },
    /// `scheduled_at` is outside of the range of dates.
    #[error("`scheduled_at` is {0} ms after 1970, outside of the range of dates")]
    BeyondDates(i64),
    /// `locked` is true, but `last_execution` has no worker or no start.
    #[error("`locked` is true, but `last_execution` names no worker and start")]
    LockedWithoutHolder,
    /// The items or their recorded outcomes are invalid.
    #[error(transparent)]
    Bundle(#[from] InvalidBundle),
    /// The job is neither locked, nor due, nor archived.
    #[error("`scheduled_at` is missing")]
    NeverDue,
}

impl From<bson::error::Error> for CorruptJob {
    fn from(error: bson::error::Error) -> Self {
        Self::Undecodable(without_value(of_bson(&error)))
    }
}

/// The error without the value that it quotes, which may be secret: the class is not known, whose jobs may be redacted.
fn without_value(text: String) -> String {
    let shortened = || {
        let (before, value) = text.split_once("invalid ")?;
        let (kind, quoted) = value.split_once(['"', '`'])?;
        let (_, expected) = quoted.rsplit_once(", expected ")?;
        Some(format!("{before}invalid {}, expected {expected}", kind.trim_end()))
    };
    shortened().unwrap_or(text)
}

/// The stored document without its [`Settings`]. Only the fields that every enqueuer must write have no default. Each field has a row in
/// `docs/protocol.md`.
#[derive(Deserialize)]
struct JobDocument {
    #[serde(rename = "_id")]
    id: JobId,
    #[serde(deserialize_with = "instant::stored", default)]
    created_at: Option<Instant>,
    locked: bool,
    attempts: Option<i64>,
    interruptions: Option<i64>,
    deaths: Option<i64>,
    group: String,
    workable: WorkableDocument,
    #[serde(deserialize_with = "instant::stored", default)]
    scheduled_at: Option<Instant>,
    gate: Option<String>,
    unique: Option<String>,
    unique_while_waiting: Option<String>,
    unique_for_period: Option<String>,
    replaced: Option<i64>,
    #[serde(deserialize_with = "instant::stored", default)]
    expires_at: Option<Instant>,
    once: Option<bool>,
    graph: Option<GraphId>,
    followed: Option<bool>,
    waiting: Option<bool>,
    #[serde(deserialize_with = "instant::stored", default)]
    cancel_requested_at: Option<Instant>,
    last_execution: Option<Execution>,
    executions: Option<Vec<Execution>>,
    executions_dropped: Option<i64>,
    why: Option<FinishReason>,
}

#[derive(Deserialize)]
struct WorkableDocument {
    class: String,
    #[serde(default)]
    parameters: Option<Bson>,
}

impl TryFrom<Document> for Job {
    type Error = CorruptJob;

    fn try_from(document: Document) -> Result<Self, CorruptJob> {
        Self::try_from(RawDocumentBuf::try_from(&document)?).map_err(|(_, error)| error)
    }
}

impl TryFrom<RawDocumentBuf> for Job {
    /// The document, and why it is not a valid job.
    type Error = (RawDocumentBuf, CorruptJob);

    fn try_from(document: RawDocumentBuf) -> Result<Self, Self::Error> {
        match Self::without_document(&document) {
            Ok(job) => Ok(Self { document, ..job }),
            Err(error) => Err((document, error)),
        }
    }
}

impl Job {
    fn without_document(document: &RawDocument) -> Result<Self, CorruptJob> {
        let stored: JobDocument = bson::deserialize_from_slice(document.as_bytes())?;
        let state = match (stored.why, stored.locked, &stored.last_execution) {
            (Some(why), false, _) if stored.scheduled_at.is_none() => JobState::Archived { why },
            (_, true, Some(Execution { worker: Some(worker), start: Some(start), .. })) => {
                JobState::Locked { worker: *worker, claim: Claim { job: stored.id, start: *start } }
            }
            (_, true, _) => return Err(CorruptJob::LockedWithoutHolder),
            // A document that was copied back from the archive by hand may have a `why`.
            (_, false, _) => JobState::Waiting { at: due_date(document, stored.scheduled_at)? },
        };
        let attempts = count("attempts", stored.attempts)?;
        // A running execution was not interrupted. With more interruptions than starts, attempts would never count.
        let ended = attempts - u32::from(matches!(state, JobState::Locked { .. })).min(attempts);
        let is_unique = stored.unique.is_some() || stored.unique_while_waiting.is_some() || stored.unique_for_period.is_some();
        Ok(Self {
            id: stored.id,
            created_at: stored.created_at.unwrap_or_else(|| stored.id.made_at()),
            attempts,
            interruptions: count("interruptions", stored.interruptions)?.min(ended),
            deaths: count("deaths", stored.deaths)?,
            class: stored.workable.class,
            parameters: match stored.workable.parameters {
                // The PHP Recruiter stores a document without fields as an empty array.
                Some(Bson::Array(list)) if list.is_empty() => Bson::Document(doc! {}),
                Some(Bson::Null) | None => Bson::Document(doc! {}),
                Some(parameters) => parameters,
            },
            bundle: Bundle::of(document)?,
            settings: Settings { group: Some(stored.group), ..Settings::of_stored(document)? },
            gate: stored.gate,
            unique: stored.unique,
            replaced: if is_unique { Some(count("replaced", stored.replaced)?) } else { None },
            expires_at: stored.expires_at,
            graph: stored.graph,
            is_followed: stored.followed == Some(true),
            is_waiting: stored.waiting == Some(true),
            is_sent_once: stored.once.unwrap_or(false),
            cancel_requested: stored.cancel_requested_at.is_some(),
            last_execution: stored.last_execution,
            executions: stored.executions.unwrap_or_default(),
            executions_dropped: count("executions_dropped", stored.executions_dropped)?,
            state,
            document: RawDocumentBuf::new(),
        })
    }
}

/// Maximum accepted count: far more than a job can have, and far below the limit of 32 bits.
pub(crate) const LARGEST_COUNT: u32 = 1_000_000_000;

fn count(field: &'static str, value: Option<i64>) -> Result<u32, CorruptJob> {
    let value = value.unwrap_or(0);
    u32::try_from(value).ok().filter(|count| *count <= LARGEST_COUNT).ok_or(CorruptJob::NotACount { field, value })
}

/// The due date of an unlocked job. Some BSON dates have no equal [`Instant`]. They are refused, because the filter of a start repeats the
/// date and would never match.
fn due_date(document: &RawDocument, scheduled_at: Option<Instant>) -> Result<Instant, CorruptJob> {
    let at = scheduled_at.ok_or(CorruptJob::NeverDue)?;
    match document.get_datetime("scheduled_at") {
        Ok(stored) if stored != bson::DateTime::from_chrono(at) => Err(CorruptJob::BeyondDates(stored.timestamp_millis())),
        _ => Ok(at),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::StartId;

    fn check(more: Document) -> String {
        let mut document = doc! { "_id": bson::oid::ObjectId::new(), "locked": false, "group": "g", "workable": { "class": "c" } };
        document.extend(more);
        match Job::try_from(document) {
            Ok(Job { state: JobState::Waiting { .. }, .. }) => "scheduled".into(),
            Ok(Job { state: JobState::Locked { .. }, .. }) => "started".into(),
            Ok(Job { state: JobState::Archived { why }, .. }) => why.to_string(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_document_is_in_exactly_one_state_or_no_job() {
        let due = bson::DateTime::from_millis(1);
        let start = doc! { "worker": WorkerId::new(), "start": StartId::new() };
        assert_eq!(check(doc! { "scheduled_at": due }), "scheduled");
        assert_eq!(check(doc! { "why": "done" }), "done");
        assert_eq!(check(doc! { "why": "done", "scheduled_at": due }), "scheduled", "copied back from the archive by hand");
        assert_eq!(check(doc! { "why": "done", "locked": true, "last_execution": start.clone() }), "started");
        assert_eq!(check(doc! { "locked": true, "last_execution": start }), "started");
        assert_eq!(check(doc! { "locked": true, "scheduled_at": due }), CorruptJob::LockedWithoutHolder.to_string());
        assert_eq!(check(doc! {}), CorruptJob::NeverDue.to_string());
        assert_eq!(check(doc! { "scheduled_at": due, "attempts": -1 }), "field `attempts` is -1, which is not a valid count");
        let problem = "the document is not a job: `priority` is 12; it must be from 0 to 9";
        assert_eq!(check(doc! { "scheduled_at": due, "priority": 12 }), problem);
        for (more, problem) in [
            (doc! { "workable": "a\", expected secret" }, "invalid type: string, expected struct WorkableDocument"),
            (doc! { "workable": { "class": 5 } }, "invalid type: integer, expected a string"),
        ] {
            let shown = check(more);
            assert!(shown.ends_with(problem) && !shown.contains("secret"), "{shown}");
        }
        let scheduled = |ms: i64| check(doc! { "scheduled_at": bson::DateTime::from_millis(ms) });
        for ms in [i64::MIN, -8_640_000_000_000_000, 8_640_000_000_000_000, i64::MAX] {
            assert_eq!(scheduled(ms), CorruptJob::BeyondDates(ms).to_string());
        }
        assert_eq!(scheduled(-62_135_596_800_000), "scheduled", "the year 1");
        assert_eq!(scheduled(253_402_300_799_999), "scheduled", "the year 9999");
    }

    #[test]
    fn counts_that_cannot_be_are_refused_and_interruptions_are_starts() {
        let counts = |more: Document| {
            let mut document = doc! { "_id": bson::oid::ObjectId::new(), "locked": false, "group": "g", "workable": { "class": "c" },
            "scheduled_at": bson::DateTime::from_millis(1) };
            document.extend(more);
            Job::try_from(document).map(|job| (job.attempts, job.interruptions, job.history().attempts))
        };
        assert!(counts(doc! { "attempts": i64::from(u32::MAX) }).is_err_and(|error| error.to_string().contains("4294967295")));
        for field in ["interruptions", "deaths", "executions_dropped"] {
            assert!(counts(doc! { field: 1_000_000_001_i64 }).is_err(), "{field}");
        }
        assert_eq!(counts(doc! { "attempts": 1_000_000_000 }).unwrap(), (1_000_000_000, 0, 1_000_000_000));
        assert_eq!(counts(doc! { "attempts": 5, "interruptions": 2 }).unwrap(), (5, 2, 3));
        assert_eq!(counts(doc! { "attempts": 5, "interruptions": 1_000 }).unwrap(), (5, 5, 0));
        let start = doc! { "worker": WorkerId::new(), "start": StartId::new() };
        let runs = doc! { "attempts": 5, "interruptions": 1_000, "locked": true, "last_execution": start };
        assert_eq!(counts(runs).unwrap(), (5, 4, 1), "the present start is not interrupted");
    }
}
