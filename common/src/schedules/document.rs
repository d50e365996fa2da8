//! The stored form of a schedule, written by this library, by people and by other languages.

use std::time::Duration;

use bson::{Document, RawDocumentBuf, doc};

use super::{InvalidSchedule, Missed, Overlap, Schedule, Timing, fields::Fields, template::job_of};
use crate::base::{Instant, JobId, integer};

/// A schedule as it is stored.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoredSchedule {
    /// Its name.
    pub name: String,
    /// When it runs, and the job that it enqueues.
    pub schedule: Schedule,
    /// Its namespace: who may change it.
    pub namespace: Option<String>,
    /// Who has paused it, and why.
    pub paused: Option<Paused>,
    /// The slots up to this instant are handled. `None` until a recruiter has seen it, if it was written by hand.
    pub last_slot: Option<Instant>,
    /// Its newest runs, oldest first.
    pub runs: Vec<Run>,
    /// Number of slots without a run.
    pub skipped: Skipped,
    /// Grows with each change by this library.
    pub revision: i64,
    /// The document.
    pub document: Document,
}

/// A pause.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Paused {
    /// Who has paused it.
    pub by: Option<String>,
    /// Why.
    pub reason: Option<String>,
    /// Since when.
    pub at: Option<Instant>,
}

/// A run of a schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Run {
    /// Its slot; `None` for a manual run.
    pub slot: Option<Instant>,
    /// The job that it has enqueued.
    pub job: JobId,
    /// When the job was enqueued.
    pub at: Instant,
}

/// How many slots had no run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Skipped {
    /// Because the job of an earlier run was not finished.
    pub overlap: i64,
    /// Because they were missed. After a very long time it is a lower bound.
    pub missed: i64,
}

impl Run {
    /// A run of a slot.
    pub fn of_slot(slot: Instant, job: JobId, at: Instant) -> Self {
        Self { slot: Some(slot), job, at }
    }

    /// The entry in the history.
    pub fn stored(&self) -> Document {
        match self.slot {
            Some(slot) => doc! { "slot": slot, "job": self.job, "at": self.at },
            None => doc! { "job": self.job, "at": self.at, "manual": true },
        }
    }

    fn of_document(run: &Document) -> Option<Self> {
        let date = |field: &str| run.get_datetime(field).ok().map(|at| at.to_chrono());
        Some(Self { slot: date("slot"), job: run.get_object_id("job").ok()?.into(), at: date("at")? })
    }
}

impl StoredSchedule {
    /// When its next run is due; `None` while it is paused or not seen by a recruiter.
    pub fn next_run(&self) -> Option<Instant> {
        let last = self.last_slot.filter(|_| self.paused.is_none())?;
        self.schedule.next_runs(&self.name, last).next()
    }

    /// Its next runs after this instant. None while it is paused.
    pub fn next_runs(&self, now: Instant, count: usize) -> Vec<Instant> {
        let after = self.last_slot.map_or(now, |last| last.max(now));
        if self.paused.is_some() { Vec::new() } else { self.schedule.next_runs(&self.name, after).take(count).collect() }
    }
}

/// A text that is not UTF-8 makes a schedule invalid, because its job would get another text.
impl TryFrom<RawDocumentBuf> for StoredSchedule {
    type Error = InvalidSchedule;

    fn try_from(stored: RawDocumentBuf) -> Result<Self, InvalidSchedule> {
        Document::try_from(stored).map_err(|error| InvalidSchedule::Undecodable { reason: error.to_string() }).and_then(Self::try_from)
    }
}

impl TryFrom<Document> for StoredSchedule {
    type Error = InvalidSchedule;

    fn try_from(document: Document) -> Result<Self, InvalidSchedule> {
        let fields = Fields { document: &document, within: "" };
        let name = fields.text("_id")?.unwrap_or_default().to_owned();
        let namespace = fields.text("source")?.map(str::to_owned);
        let mut schedule = Schedule::at(timing_of(&fields)?);
        schedule.namespace.clone_from(&namespace);
        schedule.jitter = Duration::from_millis(fields.count("jitter_ms")?.unwrap_or(0));
        schedule.overlap = fields.text("overlap")?.map_or(Ok(Overlap::default()), str::parse)?;
        let limit = fields.count("missed_limit")?.map(|limit| u16::try_from(limit).unwrap_or(u16::MAX));
        schedule.missed = match (fields.text("missed")?, limit) {
            (Some(word), limit) => Missed::of_word(word, limit)?,
            (None, None) => Missed::default(),
            (None, Some(_)) => return Err(InvalidSchedule::LimitWithoutAll),
        };
        if let Some(template) = fields.document("job")? {
            schedule.job = Some(job_of(template)?);
        }
        // An earlier release accepted a blank around the name.
        schedule.stored(&name)?;
        let paused = fields.document("paused")?.map(|paused| {
            let fields = Fields { document: paused, within: "paused." };
            Ok(Paused {
                by: fields.text("by")?.map(str::to_owned),
                reason: fields.text("reason")?.map(str::to_owned),
                at: fields.date("at")?,
            })
        });
        let skipped = |why: &str| document.get_document("skipped").ok().and_then(|skipped| integer(skipped.get(why))).unwrap_or(0);
        Ok(Self {
            name,
            schedule,
            namespace,
            paused: paused.transpose()?,
            last_slot: fields.date("last_slot")?,
            runs: document.get_array("runs").into_iter().flatten().filter_map(|run| Run::of_document(run.as_document()?)).collect(),
            skipped: Skipped { overlap: skipped("overlap"), missed: skipped("missed") },
            revision: integer(document.get("revision")).unwrap_or(0),
            document,
        })
    }
}

fn timing_of(fields: &Fields<'_>) -> Result<Timing, InvalidSchedule> {
    match (fields.text("cron")?, fields.count("every_ms")?) {
        (Some(expression), None) => Timing::cron(expression, fields.text("zone")?.unwrap_or("UTC")),
        (None, Some(every)) => Timing::every(Duration::from_millis(every)),
        (Some(_), Some(_)) | (None, None) => Err(InvalidSchedule::NoTiming),
    }
}

/// The name of a stored schedule, for people. It may have any type.
pub(super) fn name_of(document: &Document) -> String {
    document.get("_id").map_or_else(String::new, |id| id.as_str().map_or_else(|| id.to_string(), str::to_owned))
}

#[cfg(test)]
mod tests {
    use bson::Bson;

    use super::*;

    fn problem(of: Document) -> String {
        let mut document = doc! { "_id": "a", "every_ms": 60_000, "job": { "class": "c" } };
        document.extend(of);
        let document: Document = document.into_iter().filter(|(_, value)| *value != Bson::Null).collect();
        StoredSchedule::try_from(document).map_or_else(|problem| problem.to_string(), |_| "valid".into())
    }

    #[test]
    fn a_document_written_by_hand_needs_little_and_its_problem_has_a_name() {
        let check = |of: Document, expected: &str| {
            let problem = problem(of.clone());
            assert!(problem.contains(expected), "{of}: {problem}");
        };
        check(doc! {}, "valid");
        check(doc! { "_id": "a " }, "valid");
        check(doc! { "every_ms": null, "cron": "0 3 * * *" }, "valid");
        check(doc! { "job": { "class": "c", "parameters": [], "priority": 9_i64 } }, "valid");
        check(doc! { "cron": "0 3 * * *" }, "either `cron` or `every`");
        check(doc! { "every_ms": null }, "either `cron` or `every`");
        check(doc! { "every_ms": 10 }, "an interval of 10ms is not possible");
        check(doc! { "every_ms": "60" }, "its field `every_ms` is not valid: it must be an integer from 0");
        check(doc! { "zone": 5, "cron": "0 3 * * *", "every_ms": null }, "`zone` is not valid");
        check(doc! { "overlap": "maybe" }, "`overlap` is `maybe`; it must be `allow` or `skip`");
        check(doc! { "missed": "some" }, "must be `skip`, `one` or `all`");
        check(doc! { "missed_limit": 5 }, "needs `missed = \"all\"`");
        check(doc! { "job": null }, "has no job");
        check(doc! { "job": {} }, "`class` is missing");
        check(doc! { "job": { "class": "c", "priority": 10 } }, "`job.priority` is not valid");
        check(doc! { "job": { "class": "c", "parameters": 5 } }, "`job.parameters` is not valid: it must be a document");
        check(doc! { "job": { "class": "c", "after": "5m" } }, "does not know its field `after`");
        check(doc! { "job": { "class": "c", "retry_policy": { "class": "RetryForever" } } }, "`seconds_to_wait_before_retry` is missing");
        check(doc! { "paused": true }, "`paused` is not valid");
        check(doc! { "last_slot": bson::DateTime::MAX }, "`last_slot` is not valid: it must be a date from the year 1");
    }
}
