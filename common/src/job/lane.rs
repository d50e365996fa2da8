//! What an assignment needs to know of a waiting job, and the lane it waits in.

use std::cmp::Reverse;

use bson::{Document, RawDocument, RawDocumentBuf};

use crate::base::{Instant, JobId};

/// The fields of an unlocked job that an assignment needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduledJob {
    /// The id of the job.
    pub id: JobId,
    /// The group that a worker must work on.
    pub group: String,
    /// The class that a worker must have.
    pub class: String,
    /// The gate of its lane, if it has one.
    pub gate: Option<String>,
    /// Jobs with a higher priority come first.
    pub priority: i64,
    /// The due date. Among jobs with the same priority, earlier ones come first.
    pub scheduled_at: Instant,
}

/// The position of a job in the order of all jobs: by priority, then by due date, then by id. The searches and the indexes have the same order
/// (`cycle/due`, `mongo/schema/indexes`); lines have their own (`lines`).
pub type Position = (Reverse<i64>, Instant, JobId);

impl ScheduledJob {
    /// Its position in the order of jobs.
    pub fn position(&self) -> Position {
        (Reverse(self.priority), self.scheduled_at, self.id)
    }

    /// The lane it waits in.
    pub fn lane(&self) -> Lane {
        Lane { group: self.group.clone(), class: self.class.clone(), gate: self.gate.clone(), priority: None }
    }

    /// From a job's document, or from a document with these fields of it.
    pub(crate) fn of_document(document: &Document) -> Option<Self> {
        Self::of(&RawDocumentBuf::try_from(document).ok()?, document.get_document("workable").ok()?.get_str("class").ok()?)
    }

    /// From an entry of an index.
    pub(crate) fn of_entry(entry: &RawDocument) -> Option<Self> {
        Self::of(entry, class_of_entry(entry)?)
    }

    pub(crate) fn of(fields: &RawDocument, class: &str) -> Option<Self> {
        let priority = fields.get("priority").ok()??;
        Some(Self {
            id: fields.get_object_id("_id").ok().map(JobId::from)?,
            group: fields.get_str("group").ok()?.into(),
            class: class.into(),
            gate: fields.get_str("gate").ok().map(Into::into),
            priority: priority.as_i64().or(priority.as_i32().map(i64::from))?,
            scheduled_at: fields.get_datetime("scheduled_at").ok()?.to_chrono(),
        })
    }
}

/// The class in an index entry, or in a document.
pub(crate) fn class_of_entry(entry: &RawDocument) -> Option<&str> {
    entry.get_str("workable.class").or_else(|_| entry.get_document("workable")?.get_str("class")).ok()
}

/// The jobs of one group, one class and one gate, and perhaps one priority, in the order of their start: exactly one range of an index.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lane {
    /// The group of the jobs.
    pub group: String,
    /// The class of their workable.
    pub class: String,
    /// Their gate. `None`: the jobs without a gate.
    pub gate: Option<String>,
    /// Their priority. `None`: the jobs of every priority.
    pub priority: Option<i64>,
}

impl Lane {
    /// The lane of the jobs without a gate.
    pub fn new(group: impl Into<String>, class: impl Into<String>) -> Self {
        Self { group: group.into(), class: class.into(), gate: None, priority: None }
    }
}
