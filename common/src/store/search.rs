//! What is due: the searches that rounds are planned on, all over the index `due_jobs`.
//!
//! Reads of the primary as it is at the moment. Whatever they miss is found by the next, and what they find is decided by the start.

use std::cmp::Reverse;

use bson::{Bson, Document, RawDocument, RawDocumentBuf, doc};
use futures_util::TryStreamExt;
use mongodb::options::{Hint as IndexHint, ReadConcern};

use super::{CALL_LIMIT, Store, StoreError, indexes::DUE_JOBS, jobs::raw_id_of};
use crate::{ids::JobId, instant::Instant, job::Priority};

/// Index scans that MongoDB merges for one sorted query before it gives up and sorts everything in memory: its own default.
const SCANS: usize = 200;

/// A job that is due, as far as matching needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DueJob {
    /// Which.
    pub id: JobId,
    /// Group a worker must work on.
    pub group: String,
    /// Class a worker must have.
    pub class: String,
    /// Higher first.
    pub priority: i64,
    /// Older first.
    pub scheduled_at: Instant,
}

impl DueJob {
    /// From a job's document, or from as much of it.
    pub(crate) fn of_document(document: &Document) -> Option<Self> {
        Self::of_raw(&RawDocumentBuf::try_from(document).ok()?)
    }

    fn of_raw(document: &RawDocument) -> Option<Self> {
        let priority = document.get("priority").ok()??;
        Some(Self {
            id: raw_id_of(document)?,
            group: document.get_str("group").ok()?.into(),
            class: document.get_document("workable").ok()?.get_str("class").ok()?.into(),
            priority: priority.as_i64().or(priority.as_i32().map(i64::from))?,
            scheduled_at: document.get_datetime("scheduled_at").ok()?.to_chrono(),
        })
    }
}

/// What a search for due jobs has found.
#[derive(Clone, Debug)]
pub struct DueJobs {
    /// By priority, oldest first.
    pub jobs: Vec<DueJob>,
    /// Whether there are no others.
    pub are_all: bool,
}

impl Store {
    /// The groups that have unlocked jobs, in alphabetical order.
    ///
    /// The index is scanned from one group to the next, so that it costs one look for each however many jobs wait.
    /// Index: `due_jobs`. Invariant: none, a read that plans are made on.
    pub async fn groups(&self) -> Result<Vec<String>, StoreError> {
        let scheduled = self.scheduled.clone();
        let found: Vec<Document> = self
            .indexed("groups", async move {
                scheduled
                    .aggregate([doc! { "$sort": { "group": 1 } }, doc! { "$group": { "_id": "$group" } }])
                    .hint(IndexHint::Name(DUE_JOBS.into()))
                    .batch_size(10_000)
                    .read_concern(ReadConcern::local())
                    .await?
                    .try_collect()
                    .await
            })
            .await?;
        let mut groups: Vec<String> = found.iter().filter_map(|group| group.get_str("_id").map(str::to_owned).ok()).collect();
        groups.sort_unstable();
        Ok(groups)
    }

    /// The first unlocked jobs of these groups that are due at `now` and of one of these classes: at least `limit` if there are as
    /// many.
    ///
    /// Filter: group, unlocked, due, class. MongoDB merges one scan for each group and class, which is in this order and jumps over
    /// what is due later, so that it costs as much as it finds, however many wait; with a list of priorities it would not.
    /// Index: `due_jobs`. Invariant: none, the start decides.
    pub async fn due_jobs(&self, groups: &[String], classes: &[&str], now: Instant, limit: usize) -> Result<DueJobs, StoreError> {
        let order = |job: &DueJob| (Reverse(job.priority), job.scheduled_at);
        let mut jobs: Vec<DueJob> = Vec::new();
        // What comes after this may not have been told.
        let mut known_to = None;
        let most = i64::try_from(limit).unwrap_or(i64::MAX);
        for (groups, classes) in scans(groups, classes, 1) {
            let scheduled = self.scheduled.clone_with_type::<RawDocumentBuf>();
            let mut filter = due_filter(groups, now);
            filter.insert("workable.class", doc! { "$in": classes.to_vec() });
            let found: Vec<RawDocumentBuf> = self
                .indexed("due_jobs", async move {
                    scheduled
                        .find(filter)
                        .sort(doc! { "priority": -1, "scheduled_at": 1 })
                        .limit(most)
                        .batch_size(10_000)
                        .projection(doc! { "group": 1, "workable.class": 1, "priority": 1, "scheduled_at": 1 })
                        .max_time(CALL_LIMIT / 2)
                        .hint(IndexHint::Name(DUE_JOBS.into()))
                        .read_concern(ReadConcern::local())
                        .await?
                        .try_collect()
                        .await
                })
                .await?;
            let told = found.len();
            jobs.extend(found.iter().filter_map(|job| DueJob::of_raw(job)));
            if told >= limit {
                known_to = known_to.into_iter().chain(jobs.last().map(order)).min();
            }
        }
        jobs.sort_by_key(order);
        if let Some(known_to) = known_to {
            jobs.truncate(jobs.partition_point(|job| order(job) <= known_to));
        }
        Ok(DueJobs { jobs, are_all: known_to.is_none() })
    }

    /// When the next unlocked job of these groups and classes becomes due after `now`.
    ///
    /// Index: `due_jobs`, one range for each group, class and priority, merged. Invariant: none, a timer is set by it.
    pub async fn next_due(&self, groups: &[String], classes: &[&str], now: Instant) -> Result<Option<Instant>, StoreError> {
        let mut next: Option<Instant> = None;
        for (groups, classes) in scans(groups, classes, Priority::all().count()) {
            let scheduled = self.scheduled.clone();
            let mut filter = next_due_filter(groups, now);
            filter.insert("workable.class", doc! { "$in": classes.to_vec() });
            let found = self
                .indexed("next_due", async move {
                    scheduled
                        .find_one(filter)
                        .sort(doc! { "scheduled_at": 1 })
                        .projection(doc! { "scheduled_at": 1 })
                        .hint(IndexHint::Name(DUE_JOBS.into()))
                        .read_concern(ReadConcern::local())
                        .await
                })
                .await?;
            let at = found.and_then(|job| job.get_datetime("scheduled_at").ok().map(|at| at.to_chrono()));
            next = next.into_iter().chain(at).min();
        }
        Ok(next)
    }
}

/// Every pair of these groups and classes, in as many parts as MongoDB needs to merge `each` scans of every pair.
fn scans<'a>(groups: &'a [String], classes: &'a [&'a str], each: usize) -> impl Iterator<Item = (&'a [String], &'a [&'a str])> {
    classes.chunks(SCANS / each).flat_map(move |classes| groups.chunks(SCANS / each / classes.len()).map(move |groups| (groups, classes)))
}

pub(super) fn due_filter(groups: &[String], now: Instant) -> Document {
    doc! {
        "group": { "$in": groups.to_vec() },
        "scheduled_at": { "$lte": bson::DateTime::from_chrono(now) },
        "locked": false,
    }
}

pub(super) fn next_due_filter(groups: &[String], now: Instant) -> Document {
    doc! {
        "group": { "$in": groups.to_vec() },
        "priority": { "$in": Priority::all().map(Bson::from).collect::<Vec<_>>() },
        "scheduled_at": { "$gt": bson::DateTime::from_chrono(now) },
        "locked": false,
    }
}
