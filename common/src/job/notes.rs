//! The notes of a running job: what it reports about itself while it runs. They are its progress, its checkpoint and its log.
//!
//! A checkpoint is a cursor that the next attempt continues from. Pure: `store` writes the notes, under the guard of the
//! start. After the death of a worker, a job that runs again keeps its notes. A job that the cleaner archives has the notes that the cleaner
//! has read.

use std::{collections::VecDeque, fmt, sync::Arc};

use bson::{Bson, Document, RawBson, RawDocumentBuf, doc, raw::cstr};

use super::{Claim, Job, raw::LARGEST_DOCUMENT};
use crate::base::{Instant, failure::keep_start, integer};

/// The field with the progress of a job.
pub const PROGRESS: &str = "progress";
/// The field with the checkpoint of a job.
pub const CHECKPOINT: &str = "checkpoint";
/// The field with the log of a job.
pub const LOG: &str = "log";

/// Maximum length of the text of a progress, in bytes.
pub const LONGEST_TEXT: usize = 1024;
/// Maximum size of a checkpoint, in bytes of BSON: it is written again with each change.
pub const LARGEST_CHECKPOINT: usize = 64 * 1024;
/// Maximum number of lines in the log of a job: the newest.
pub const LOG_LINES: usize = 100;
/// Maximum length of a line of the log, in bytes.
pub const LONGEST_LINE: usize = 1024;
/// Maximum length of all lines of the log together, in bytes.
pub const LOG_BYTES: usize = 32 * 1024;

/// Notes of a started job, as a write: the fields that have changed.
#[derive(Clone, Debug)]
pub struct Notes {
    pub(crate) claim: Claim,
    /// The writes of one start are numbered in their order.
    pub(crate) number: i64,
    pub(crate) set: Document,
    /// The job, for events.
    pub(crate) job: Option<Arc<Job>>,
}

impl Notes {
    /// These fields of the job with this claim. A write with a lower number than one that MongoDB has changes nothing.
    pub fn new(claim: Claim, number: i64, set: Document) -> Self {
        Self { claim, number, set, job: None }
    }

    /// The same write. Subscribers learn of the progress in it.
    #[must_use]
    pub fn of_job(self, job: &Arc<Job>) -> Self {
        Self { job: Some(job.clone()), ..self }
    }
}

/// How far a job is.
///
/// ```
/// use recruiter_common::job::JobProgress;
///
/// assert_eq!(JobProgress::from(40).to_string(), "40 %");
/// assert_eq!(JobProgress::from((3, 12)).text("page 3").to_string(), "3 of 12 (25 %), page 3");
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct JobProgress {
    /// From 0 to 100.
    pub percent: Option<f64>,
    /// How many are done, and of how many.
    pub done_of: Option<(u64, u64)>,
    /// One sentence for people.
    pub text: Option<String>,
}

impl JobProgress {
    /// The same with a text for people. A text that is too long is cut.
    #[must_use]
    pub fn text(mut self, text: impl Into<String>) -> Self {
        self.text = Some(keep_start(text.into(), LONGEST_TEXT));
        self
    }

    /// The stored form.
    pub fn to_document(&self, at: Instant, attempt: u32) -> Document {
        let mut stored = doc! {};
        let mut set = |field: &str, value: Option<Bson>| stored.extend(value.map(|value| (field.to_owned(), value)));
        let count = |count: u64| Bson::Int64(i64::try_from(count).unwrap_or(i64::MAX));
        set("percent", self.percent.map(Bson::Double));
        set("done", self.done_of.map(|(done, _)| count(done)));
        set("of", self.done_of.map(|(_, of)| count(of)));
        set("text", self.text.clone().map(Bson::String));
        set("at", Some(at.into()));
        set("attempt", Some(attempt.into()));
        stored
    }

    /// The stored progress of a job; `None` if there is none that can be read.
    pub fn of_job(job: &Job) -> Option<Self> {
        let Bson::Document(stored) = job.field(PROGRESS)? else { return None };
        let count = |field: &str| u64::try_from(integer(stored.get(field))?).ok();
        let percent = stored.get_f64("percent").ok();
        Some(Self { percent, done_of: count("done").zip(count("of")), text: stored.get_str("text").ok().map(str::to_owned) })
    }
}

/// So many percent, from 0 to 100. Other numbers count as the nearest of these, and a value that is not a number as none.
impl From<f64> for JobProgress {
    fn from(percent: f64) -> Self {
        Self { percent: (!percent.is_nan()).then_some(percent.clamp(0.0, 100.0)), ..Self::default() }
    }
}

/// So many percent.
impl From<i32> for JobProgress {
    fn from(percent: i32) -> Self {
        f64::from(percent).into()
    }
}

/// So many of so many. The second number may be an estimate: the first may be larger.
impl From<(u64, u64)> for JobProgress {
    #[expect(clippy::cast_precision_loss, reason = "a percentage needs no more than 52 bits")]
    fn from((done, of): (u64, u64)) -> Self {
        let percent = (of > 0).then(|| (done as f64 * 100.0 / of as f64).min(100.0));
        Self { percent, done_of: Some((done, of)), text: None }
    }
}

impl fmt::Display for JobProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = self.percent.map(|percent| format!("{} %", (percent * 10.0).round() / 10.0));
        let known = match (self.done_of, percent) {
            (Some((done, of)), Some(percent)) => Some(format!("{done} of {of} ({percent})")),
            (Some((done, of)), None) => Some(format!("{done} of {of}")),
            (None, percent) => percent,
        };
        let parts: Vec<&str> = [known.as_deref(), self.text.as_deref()].into_iter().flatten().collect();
        f.write_str(&parts.join(", "))
    }
}

/// The log of a job: its newest lines.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Log {
    lines: VecDeque<LogLine>,
    bytes: usize,
}

/// One line of the log of a job.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub struct LogLine {
    /// When it was written.
    pub at: Instant,
    /// The attempt that has written it.
    pub attempt: u32,
    /// The item of the bundle that has written it.
    pub item: Option<u32>,
    /// The text.
    pub line: String,
}

impl Log {
    /// The stored log of a job, without entries that cannot be read.
    pub fn of_job(job: &Job) -> Self {
        let mut log = Self::default();
        if let Some(Bson::Array(stored)) = job.field(LOG) {
            stored.iter().filter_map(LogLine::of_stored).for_each(|line| log.push(line));
        }
        log
    }

    /// Adds a line. Drops the oldest lines that have no room any more.
    pub fn push(&mut self, line: LogLine) {
        let line = LogLine { line: keep_start(line.line, LONGEST_LINE), ..line };
        self.bytes += line.line.len();
        self.lines.push_back(line);
        while self.lines.len() > LOG_LINES || self.bytes > LOG_BYTES {
            let Some(dropped) = self.lines.pop_front() else { return };
            self.bytes -= dropped.line.len();
        }
    }

    /// The lines, oldest first.
    pub fn lines(&self) -> impl Iterator<Item = &LogLine> {
        self.lines.iter()
    }

    /// The stored form.
    pub fn to_bson(&self) -> Bson {
        Bson::Array(self.lines.iter().map(LogLine::to_bson).collect())
    }
}

impl LogLine {
    fn of_stored(stored: &Bson) -> Option<Self> {
        let stored = stored.as_document()?;
        let count = |field: &str| u32::try_from(integer(stored.get(field))?).ok();
        Some(Self {
            at: stored.get_datetime("at").ok()?.to_chrono(),
            attempt: count("attempt")?,
            item: count("item"),
            line: stored.get_str("line").ok()?.to_owned(),
        })
    }

    fn to_bson(&self) -> Bson {
        let mut stored = doc! { "at": self.at, "attempt": self.attempt };
        stored.extend(self.item.map(|item| ("item".to_owned(), Bson::from(item))));
        stored.insert("line", self.line.clone());
        stored.into()
    }
}

/// A copy of an archived document with these notes. A job that succeeded has no checkpoint any more. `None` if the notes do not fit.
pub(crate) fn with_notes(document: &RawDocumentBuf, notes: Document) -> Option<RawDocumentBuf> {
    let is_done = document.get_bool("done").unwrap_or(false);
    let mut copy = RawDocumentBuf::new();
    for element in document {
        let (key, value) = element.ok()?;
        let is_left_out = notes.contains_key(key.as_str()) || (is_done && key.as_str() == CHECKPOINT);
        if !is_left_out {
            copy.append(key, value);
        }
    }
    for (field, value) in notes {
        let value = RawBson::try_from(value).ok()?;
        match field.as_str() {
            PROGRESS => copy.append(cstr!("progress"), value),
            LOG => copy.append(cstr!("log"), value),
            CHECKPOINT if !is_done => copy.append(cstr!("checkpoint"), value),
            _ => {}
        }
    }
    (copy.as_bytes().len() <= LARGEST_DOCUMENT).then_some(copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: i64) -> Instant {
        Instant::from_timestamp_millis(ms).expect("a date")
    }

    fn job(more: Document) -> Job {
        let mut document = doc! { "_id": bson::oid::ObjectId::new(), "locked": false, "group": "g", "workable": { "class": "c" },
        "scheduled_at": bson::DateTime::from_millis(1) };
        document.extend(more);
        Job::try_from(document).unwrap()
    }

    #[test]
    fn a_progress_is_read_as_it_was_written() {
        for (progress, shown) in [
            (JobProgress::from(40), "40 %"),
            (JobProgress::from(-3), "0 %"),
            (JobProgress::from(f64::INFINITY), "100 %"),
            (JobProgress::from(f64::NAN).text("soon"), "soon"),
            (JobProgress::from(33.333), "33.3 %"),
            (JobProgress::from((3, 10)).text("page 3"), "3 of 10 (30 %), page 3"),
            (JobProgress::from((12, 10)), "12 of 10 (100 %)"),
            (JobProgress::from((0, 0)), "0 of 0"),
        ] {
            assert_eq!(progress.to_string(), shown);
            assert_eq!(JobProgress::of_job(&job(doc! { PROGRESS: progress.to_document(at(5), 2) })), Some(progress));
        }
        let huge = JobProgress::from((u64::MAX, u64::MAX)).text("x".repeat(5_000));
        assert_eq!(huge.text.as_ref().map(String::len), Some(LONGEST_TEXT));
        assert!(JobProgress::of_job(&job(doc! { PROGRESS: huge.to_document(at(5), 2) })).is_some());
        assert_eq!(JobProgress::of_job(&job(doc! { PROGRESS: 5 })), None, "written by hand");
    }

    #[test]
    fn a_log_keeps_its_newest_lines_within_its_bounds() {
        let line = |text: String| LogLine { at: at(7), attempt: 1, item: Some(3), line: text };
        let mut log = Log::default();
        (0..250).for_each(|n| log.push(line(n.to_string())));
        let kept: Vec<&str> = log.lines().map(|line| line.line.as_str()).collect();
        assert_eq!((kept.len(), kept[0], kept[99]), (LOG_LINES, "150", "249"));
        assert_eq!(Log::of_job(&job(doc! { LOG: log.to_bson() })), log);
        (0..250).for_each(|_| log.push(line("é".repeat(5_000))));
        assert_eq!(log.lines().count(), LOG_BYTES / LONGEST_LINE);
        assert!(log.lines().all(|line| line.line.len() <= LONGEST_LINE && line.line.ends_with('…')));
        for odd in [Bson::from(5), vec![Bson::from(5), doc! { "line": 7 }.into()].into()] {
            assert_eq!(Log::of_job(&job(doc! { LOG: odd })), Log::default(), "written by hand");
        }
    }

    #[test]
    fn an_archived_document_gets_the_notes_that_fit() {
        let archived = |done: bool, ballast: usize| {
            RawDocumentBuf::try_from(&doc! { "_id": 1, "done": done, "checkpoint": 4, "progress": 1, "ballast": "x".repeat(ballast) })
                .unwrap()
        };
        let notes = || doc! { PROGRESS: 2, CHECKPOINT: 5, LOG: ["a"] };
        let read = |document: Option<RawDocumentBuf>| document.map(|document| Document::try_from(&*document).unwrap());
        let failed = read(with_notes(&archived(false, 0), notes())).unwrap();
        assert_eq!(failed, doc! { "_id": 1, "done": false, "ballast": "", "progress": 2, "checkpoint": 5, "log": ["a"] });
        let done = read(with_notes(&archived(true, 0), doc! {})).unwrap();
        assert_eq!(done, doc! { "_id": 1, "done": true, "progress": 1, "ballast": "" });
        assert_eq!(read(with_notes(&archived(false, LARGEST_DOCUMENT), notes())), None);
    }
}
