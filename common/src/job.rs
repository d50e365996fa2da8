//! One job: as it is stored and as code uses it.
//!
//! Used by every crate. A job lives in `scheduled` until it is finished and then, whole, in `archived`
//! (`docs/protocol.md` lists every field). Code never edits these values in place of the database: the operations of
//! [`store`](crate::store) do, each under its own guard.

use std::{borrow::Cow, fmt, time::Duration};

use bson::{Bson, Document, RawBsonRef, RawDocument, RawDocumentBuf, doc, raw::cstr, rawdoc};
use serde::{Deserialize, Serialize};

use crate::{
    bundle::Bundle,
    failure::Failure,
    ids::{JobId, StartId, WorkerId},
    instant::{self, Instant},
    retry_policy::{Decision, History},
    telemetry::of_bson,
};

/// Group of a job that names none.
pub const DEFAULT_GROUP: &str = "generic";
/// Retry policy of a job that names none.
pub(crate) const DEFAULT_POLICY: &str = "DoNotDoItAgain";
/// Priority of a job that names none.
pub(crate) const DEFAULT_PRIORITY: u8 = 5;
/// Executions kept in a job's history: the first and the newest. What falls out is counted.
pub const KEPT_EXECUTIONS: usize = 20;

/// How urgent a job is: 0 to 9, higher first, 5 when nothing is said.
///
/// Few, so that finding due jobs is a merge of ten bounded index ranges however many jobs wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Priority(u8);

impl Priority {
    /// The highest.
    pub const MAX: Priority = Priority(9);

    /// This priority, or nothing when it is above 9.
    pub fn new(priority: u8) -> Option<Self> {
        (priority <= Self::MAX.0).then_some(Self(priority))
    }

    /// Every priority, most urgent first.
    pub fn all() -> impl Iterator<Item = Priority> {
        (0..=Self::MAX.0).rev().map(Priority)
    }
}

impl Default for Priority {
    fn default() -> Self {
        Self(DEFAULT_PRIORITY)
    }
}

impl From<Priority> for Bson {
    fn from(priority: Priority) -> Self {
        Bson::Int32(priority.0.into())
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Why a job is in the archive. Policies may give reasons of their own.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Why(Cow<'static, str>);

impl Why {
    /// It succeeded.
    pub const DONE: Why = Why(Cow::Borrowed("done"));
    /// It failed and its policy does not want it again.
    pub const NOT_SCHEDULED_BY_RETRY_POLICY: Why = Why(Cow::Borrowed("not-scheduled-by-retry-policy"));
    /// It failed as often as its policy allows.
    pub const TRIED_TOO_MANY_TIMES: Why = Why(Cow::Borrowed("tried-too-many-times"));
    /// It failed with an error class that its policy does not retry.
    pub const NON_RETRIABLE_EXCEPTION: Why = Why(Cow::Borrowed("non-retriable-exception"));
    /// Its worker died while it ran, and its policy does not want it again.
    pub const WORKER_DIED: Why = Why(Cow::Borrowed("worker-died"));
    /// Its worker stopped while it ran, and its policy does not want it again.
    pub const INTERRUPTED: Why = Why(Cow::Borrowed("interrupted"));
    /// Somebody cancelled it.
    pub const CANCELLED: Why = Why(Cow::Borrowed("cancelled"));
    /// The workable itself gave up.
    pub const GAVE_UP: Why = Why(Cow::Borrowed("gave-up"));
    /// Its document cannot be understood.
    pub const MALFORMED: Why = Why(Cow::Borrowed("malformed"));

    /// The reasons that Recruiter itself gives.
    pub const BUILT_IN: [Why; 9] = [
        Why::DONE,
        Why::NOT_SCHEDULED_BY_RETRY_POLICY,
        Why::TRIED_TOO_MANY_TIMES,
        Why::NON_RETRIABLE_EXCEPTION,
        Why::WORKER_DIED,
        Why::INTERRUPTED,
        Why::CANCELLED,
        Why::GAVE_UP,
        Why::MALFORMED,
    ];

    /// A reason of a policy's own.
    pub fn custom(why: impl Into<String>) -> Self {
        Self(Cow::Owned(why.into()))
    }

    /// The stored word.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<Why> for Bson {
    fn from(why: Why) -> Self {
        Bson::String(why.0.into_owned())
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What the cleaner does with a started job when its worker dies: the retry policy's verdict, computed and stored
/// at the start. In the document `{retry_after_ms: …}` or `{archive: <why>}`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IfWorkerDies {
    /// Schedule it again this many milliseconds after the death was seen.
    RetryAfterMs(i64),
    /// Archive it with this reason.
    Archive(Why),
}

impl IfWorkerDies {
    /// As it is stored.
    pub(crate) fn to_raw(&self) -> RawDocumentBuf {
        match self {
            Self::RetryAfterMs(delay) => rawdoc! { "retry_after_ms": *delay },
            Self::Archive(why) => rawdoc! { "archive": why.as_str() },
        }
    }
}

impl From<Decision> for IfWorkerDies {
    /// A policy that does not want the job again lets it end as [`Why::WORKER_DIED`], whatever word it uses for
    /// ordinary failures.
    fn from(decision: Decision) -> Self {
        match decision {
            Decision::RetryAfter(delay) => Self::RetryAfterMs(milliseconds(delay)),
            Decision::Archive(_) => Self::Archive(Why::WORKER_DIED),
        }
    }
}

/// A duration as stored; beyond what a date can reach it is cut to a century.
pub(crate) fn milliseconds(duration: Duration) -> i64 {
    const CENTURY_MS: i64 = 100 * 365 * 24 * 3_600_000;
    i64::try_from(duration.as_millis()).map_or(CENTURY_MS, |ms| ms.min(CENTURY_MS))
}

/// Proof of a start: whoever holds it may write the outcome, once. Made only by the start operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Claim {
    pub(crate) job: JobId,
    pub(crate) start: StartId,
}

impl Claim {
    /// The job that was started.
    pub fn job(self) -> JobId {
        self.job
    }

    /// The start it belongs to.
    pub fn start(self) -> StartId {
        self.start
    }
}

/// One execution of a job, as kept in its history. Every field but `scheduled_at` is absent until it is known.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Execution {
    /// When it was due.
    #[serde(deserialize_with = "instant::stored", default)]
    pub scheduled_at: Option<Instant>,
    /// When the worker locked it, by the server's clock.
    #[serde(deserialize_with = "instant::stored", default)]
    pub started_at: Option<Instant>,
    /// When it ended or its worker's death was seen, by the estimate of the server's clock.
    #[serde(deserialize_with = "instant::stored", default)]
    pub ended_at: Option<Instant>,
    /// The worker that started it.
    pub worker: Option<WorkerId>,
    /// The start: the fence of the outcome.
    pub start: Option<StartId>,
    /// What a cleaner does if the worker dies; gone once the execution has ended.
    pub if_worker_dies: Option<IfWorkerDies>,
    /// Machine of the worker.
    pub hostname: Option<String>,
    /// Process of the worker.
    pub pid: Option<i64>,
    /// Error class; absent when it succeeded.
    pub class: Option<String>,
    /// Error message; absent when it succeeded.
    pub message: Option<String>,
    /// Error trace, if there is one.
    pub trace: Option<String>,
    /// Set when the worker died in it.
    pub crashed: Option<bool>,
}

impl Execution {
    /// This execution, ended at `ended_at`, with `failure` if it failed.
    #[must_use]
    pub fn ended(mut self, ended_at: Instant, failure: Option<&Failure>) -> Self {
        self.ended_at = Some(ended_at);
        self.if_worker_dies = None;
        if let Some(failure) = failure {
            self.class = Some(failure.class.clone());
            self.message = Some(failure.message.clone());
            self.trace.clone_from(&failure.trace);
        }
        self
    }

    /// As it is stored. By hand, because this is done for every job, and serde's way leads through text.
    pub(crate) fn to_raw(&self) -> RawDocumentBuf {
        let date = |at: Option<Instant>| at.map(|at| RawBsonRef::DateTime(bson::DateTime::from_chrono(at)));
        let verdict = self.if_worker_dies.as_ref().map(IfWorkerDies::to_raw);
        let fields = [
            (cstr!("scheduled_at"), date(self.scheduled_at)),
            (cstr!("started_at"), date(self.started_at)),
            (cstr!("ended_at"), date(self.ended_at)),
            (cstr!("worker"), self.worker.map(|id| RawBsonRef::ObjectId(id.into()))),
            (cstr!("start"), self.start.map(|id| RawBsonRef::ObjectId(id.into()))),
            (cstr!("if_worker_dies"), verdict.as_deref().map(RawBsonRef::Document)),
            (cstr!("hostname"), self.hostname.as_deref().map(RawBsonRef::String)),
            (cstr!("pid"), self.pid.map(RawBsonRef::Int64)),
            (cstr!("class"), self.class.as_deref().map(RawBsonRef::String)),
            (cstr!("message"), self.message.as_deref().map(RawBsonRef::String)),
            (cstr!("trace"), self.trace.as_deref().map(RawBsonRef::String)),
            (cstr!("crashed"), self.crashed.map(RawBsonRef::Boolean)),
        ];
        let mut raw = roomy(256);
        for (field, value) in fields {
            value.into_iter().for_each(|value| raw.append(field, value));
        }
        raw
    }
}

/// A retry policy as stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoredPolicy {
    /// Name of the policy.
    pub class: String,
    /// What it was made with.
    #[serde(default)]
    pub parameters: Bson,
}

impl From<StoredPolicy> for Bson {
    fn from(policy: StoredPolicy) -> Self {
        Bson::Document(doc! { "class": policy.class, "parameters": policy.parameters })
    }
}

/// Where a job stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobState {
    /// Waits for `at` and a worker.
    Scheduled {
        /// When it is due.
        at: Instant,
    },
    /// Runs in this worker.
    Started {
        /// Who holds it.
        worker: WorkerId,
        /// Proof of the start.
        claim: Claim,
    },
    /// Is in the archive.
    Archived {
        /// For this reason.
        why: Why,
    },
}

/// One job, as code uses it.
#[derive(Clone, Debug)]
pub struct Job {
    /// `_id`.
    pub id: JobId,
    /// When it was enqueued, by the enqueuer; the date of its id when it does not say.
    pub created_at: Instant,
    /// Starts so far; never goes down.
    pub attempts: u32,
    /// Starts that do not count against the retry policy.
    pub interruptions: u32,
    /// Starts that ended with the death of their worker. They count against the retry policy, like failures.
    pub deaths: u32,
    /// The group it is in.
    pub group: String,
    /// How urgent it is.
    pub priority: Priority,
    /// Class of the workable.
    pub class: String,
    /// Parameters of the workable: usually a document.
    pub parameters: Bson,
    /// What is known of its items, if it is a bundle.
    pub bundle: Option<Bundle>,
    /// How failures are treated.
    pub retry_policy: StoredPolicy,
    /// Labels for people.
    pub tags: Vec<String>,
    /// A name in the application's own terms; not unique.
    pub urn: Option<String>,
    /// Whether somebody asked for the running job to be cancelled.
    pub cancel_requested: bool,
    /// The execution that runs or ran last.
    pub last_execution: Option<Execution>,
    /// The executions that ended before it; with it once it has ended, but for a job that was done at its first attempt.
    pub executions: Vec<Execution>,
    /// How many executions fell out of the bounded history.
    pub executions_dropped: u32,
    /// Where it stands.
    pub state: JobState,
    /// As stored, fields unknown to this version included.
    pub document: RawDocumentBuf,
}

impl Job {
    /// When it is due, while it waits.
    pub fn due(&self) -> Option<Instant> {
        match self.state {
            JobState::Scheduled { at } => Some(at),
            JobState::Started { .. } | JobState::Archived { .. } => None,
        }
    }

    /// A field as it is stored; nothing when there is none, or none that BSON allows.
    pub fn field(&self, name: &str) -> Option<Bson> {
        self.document.get(name).ok().flatten()?.try_into().ok()
    }

    /// Parameters of the items of a bundle; none of another job.
    pub fn items(&self) -> Vec<Bson> {
        let items = self.document.get_document("workable").and_then(|workable| workable.get_array("items"));
        items.ok().and_then(|items| items.try_into().ok()).unwrap_or_default()
    }

    /// Every execution that is kept, oldest first, each once: the last one is in two places once it has ended.
    pub fn every_execution(&self) -> impl Iterator<Item = &Execution> {
        let last = self.last_execution.as_ref().filter(|last| self.executions.last() != Some(last));
        self.executions.iter().chain(last)
    }

    /// What a retry policy sees while the start that was read as number `attempts` runs.
    pub fn history(&self) -> History<'_> {
        History {
            job: self.id,
            created_at: self.created_at,
            attempts: self.attempts.saturating_sub(self.interruptions),
            deaths: self.deaths,
            group: &self.group,
            tags: &self.tags,
            executions: &self.executions,
        }
    }
}

/// A locked document in `scheduled`: who holds it, and the job, unless it is none.
#[derive(Debug)]
pub struct Held {
    /// Who has locked it.
    pub holder: WorkerId,
    /// By which start.
    pub claim: Claim,
    /// The job; or the document, with what is wrong with it.
    pub job: Result<Box<Job>, (RawDocumentBuf, CorruptJob)>,
}

impl TryFrom<RawDocumentBuf> for Held {
    /// The document, which is locked in nobody's name.
    type Error = RawDocumentBuf;

    fn try_from(document: RawDocumentBuf) -> Result<Self, RawDocumentBuf> {
        let execution = document.get_document("last_execution").ok();
        let id = |field: &str| execution.and_then(|execution| execution.get_object_id(field).ok());
        match (document.get_object_id("_id"), id("worker"), id("start")) {
            (Ok(job), Some(holder), Some(start)) => {
                let claim = Claim { job: job.into(), start: start.into() };
                let job = Job::try_from(document).map(Box::new);
                Ok(Self { holder: holder.into(), claim, job })
            }
            _ => Err(document),
        }
    }
}

/// Why a document is not a job.
#[derive(Debug, thiserror::Error)]
pub enum CorruptJob {
    /// A field is missing or of the wrong type.
    #[error("the document is not a job: {0}")]
    Undecodable(String),
    /// A count is negative or absurd.
    #[error("field `{field}` is {value}, which is no count")]
    NotACount {
        /// The field.
        field: &'static str,
        /// What it holds.
        value: i64,
    },
    /// `scheduled_at` is further from now than dates reach.
    #[error("`scheduled_at` is {0} ms after 1970, which is outside of the range of dates")]
    BeyondDates(i64),
    /// The priority is not between 0 and 9.
    #[error("priority {0} is not between 0 and 9")]
    Priority(i64),
    /// `locked` is true, but no start says by whom.
    #[error("it is locked by nobody")]
    LockedByNobody,
    /// Its items, or what is recorded of them, cannot be understood.
    #[error("it is no bundle: {0}")]
    Bundle(String),
    /// Neither locked, nor due, nor archived.
    #[error("it has no `scheduled_at`")]
    NeverDue,
}

impl From<bson::error::Error> for CorruptJob {
    fn from(error: bson::error::Error) -> Self {
        Self::Undecodable(of_bson(&error))
    }
}

/// Exactly what is stored. Everything but the contract for other languages has a default.
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
    priority: Option<i64>,
    workable: WorkableDocument,
    #[serde(deserialize_with = "instant::stored", default)]
    scheduled_at: Option<Instant>,
    retry_policy: Option<StoredPolicy>,
    tags: Option<Vec<String>>,
    urn: Option<String>,
    #[serde(deserialize_with = "instant::stored", default)]
    cancel_requested_at: Option<Instant>,
    last_execution: Option<Execution>,
    executions: Option<Vec<Execution>>,
    executions_dropped: Option<i64>,
    why: Option<Why>,
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
    /// The document, and why it is no job.
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
                JobState::Started { worker: *worker, claim: Claim { job: stored.id, start: *start } }
            }
            (_, true, _) => return Err(CorruptJob::LockedByNobody),
            // One copied back from the archive by hand may have a `why`.
            (_, false, _) => JobState::Scheduled { at: due_date(document, stored.scheduled_at)? },
        };
        let attempts = count("attempts", stored.attempts)?;
        // An execution that has not ended was not interrupted. More interruptions than starts would be attempts that never count.
        let ended = attempts - u32::from(matches!(state, JobState::Started { .. })).min(attempts);
        let priority = match stored.priority {
            None => Priority::default(),
            Some(value) => u8::try_from(value).ok().and_then(Priority::new).ok_or(CorruptJob::Priority(value))?,
        };
        Ok(Self {
            id: stored.id,
            created_at: stored.created_at.unwrap_or_else(|| stored.id.made_at()),
            attempts,
            interruptions: count("interruptions", stored.interruptions)?.min(ended),
            deaths: count("deaths", stored.deaths)?,
            group: stored.group,
            priority,
            class: stored.workable.class,
            parameters: match stored.workable.parameters {
                // A document without fields is an empty array in what the PHP Recruiter stores.
                Some(Bson::Array(list)) if list.is_empty() => Bson::Document(doc! {}),
                Some(Bson::Null) | None => Bson::Document(doc! {}),
                Some(parameters) => parameters,
            },
            bundle: Bundle::of(document)?,
            retry_policy: stored.retry_policy.unwrap_or_else(|| StoredPolicy { class: DEFAULT_POLICY.into(), parameters: Bson::Null }),
            tags: stored.tags.unwrap_or_default(),
            urn: stored.urn,
            cancel_requested: stored.cancel_requested_at.is_some(),
            last_execution: stored.last_execution,
            executions: stored.executions.unwrap_or_default(),
            executions_dropped: count("executions_dropped", stored.executions_dropped)?,
            state,
            document: RawDocumentBuf::new(),
        })
    }
}

/// A document without fields, as BSON: its length and its end.
const EMPTY: [u8; 5] = [5, 0, 0, 0, 0];

/// An empty document that can grow by so many bytes without being moved.
pub(crate) fn roomy(bytes: usize) -> RawDocumentBuf {
    let mut buffer = Vec::with_capacity(bytes);
    buffer.extend(EMPTY);
    RawDocumentBuf::from_bytes(buffer).expect("an empty document is one")
}

/// The largest count that is believed: far more than there can be, and far from where 32 bits end.
const LARGEST_COUNT: u32 = 1_000_000_000;

fn count(field: &'static str, value: Option<i64>) -> Result<u32, CorruptJob> {
    let value = value.unwrap_or(0);
    u32::try_from(value).ok().filter(|count| *count <= LARGEST_COUNT).ok_or(CorruptJob::NotACount { field, value })
}

/// When an unlocked job is due. BSON has dates of which no [`Instant`] is equal: a start, whose filter repeats the date, would never
/// find the job.
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

    fn check(more: Document) -> String {
        let mut document = doc! { "_id": bson::oid::ObjectId::new(), "locked": false, "group": "g", "workable": { "class": "c" } };
        document.extend(more);
        match Job::try_from(document) {
            Ok(Job { state: JobState::Scheduled { .. }, .. }) => "scheduled".into(),
            Ok(Job { state: JobState::Started { .. }, .. }) => "started".into(),
            Ok(Job { state: JobState::Archived { why }, .. }) => why.to_string(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn an_execution_is_read_as_it_was_written() {
        let at = Instant::from_timestamp_millis(1_700_000_000_123);
        let whole = Execution {
            scheduled_at: at,
            started_at: at,
            ended_at: at,
            worker: Some(WorkerId::new()),
            start: Some(StartId::new()),
            if_worker_dies: Some(IfWorkerDies::RetryAfterMs(7)),
            hostname: Some("host".into()),
            pid: Some(17),
            class: Some("c".into()),
            message: Some("m".into()),
            trace: Some("t".into()),
            crashed: Some(true),
        };
        let archive = Execution { if_worker_dies: Some(IfWorkerDies::Archive(Why::WORKER_DIED)), ..Execution::default() };
        for written in [whole, archive, Execution::default()] {
            let read: Execution = bson::deserialize_from_slice(written.to_raw().as_bytes()).unwrap();
            assert_eq!(read, written);
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
        assert_eq!(check(doc! { "locked": true, "scheduled_at": due }), CorruptJob::LockedByNobody.to_string());
        assert_eq!(check(doc! {}), CorruptJob::NeverDue.to_string());
        assert_eq!(check(doc! { "scheduled_at": due, "attempts": -1 }), "field `attempts` is -1, which is no count");
        assert_eq!(check(doc! { "scheduled_at": due, "priority": 12 }), "priority 12 is not between 0 and 9");
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
