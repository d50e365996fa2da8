//! What is due: the searches that the recruiter plans on, all over the index `due_jobs`.
//!
//! They read the primary as it is at the moment. What one search misses the next one finds, and the guard of the start decides
//! about what was found. The index covers all of them, so that their cost does not depend on the size of the payloads.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use bson::{Bson, Document, RawDocument, RawDocumentBuf, doc};
use futures_util::{StreamExt, TryStreamExt, stream};
use mongodb::{
    error::ErrorKind,
    options::{Hint as IndexHint, ReadConcern},
};

use super::{CALL_LIMIT, Store, StoreError, raw_id_of, schema::DUE_JOBS};
use crate::{ids::JobId, instant::Instant, job::Priority};

/// Lanes in one query. MongoDB merges one index scan for each of them.
const LANES_PER_QUERY: usize = 200;
/// Groups whose lanes are listed at the same time.
const GROUPS_AT_A_TIME: usize = 4;
/// How long one walk over the whole index may take: about 250,000 waiting jobs.
const WALK_LIMIT: Duration = Duration::from_millis(250);

/// The jobs of one group and one class: exactly one range of the index `due_jobs`, in the order in which they are to be started.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lane {
    /// Group of the jobs.
    pub group: String,
    /// Class of their workable.
    pub class: String,
}

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

/// Where a job stands among all jobs: by priority, then by date, then by id.
pub type Position = (Reverse<i64>, Instant, JobId);

impl DueJob {
    /// Its place in the order of jobs.
    pub fn position(&self) -> Position {
        (Reverse(self.priority), self.scheduled_at, self.id)
    }

    /// The lane it waits in.
    pub fn lane(&self) -> Lane {
        Lane { group: self.group.clone(), class: self.class.clone() }
    }

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
    /// In their order.
    pub jobs: Vec<DueJob>,
    /// The last position up to which nothing is missing; none when these are all.
    pub end: Option<Position>,
}

impl Store {
    /// The groups that have unlocked jobs, in alphabetical order. A group whose name is not UTF-8 is left out.
    ///
    /// The index is scanned from one group to the next, so that it costs one seek for each group, however many jobs wait.
    /// Index: `due_jobs`. Invariant: I9, one document stops no other.
    pub async fn groups(&self) -> Result<Vec<String>, StoreError> {
        let scheduled = self.scheduled.clone();
        let found: Vec<RawDocumentBuf> = self
            .indexed("groups", async move {
                scheduled
                    .aggregate([doc! { "$sort": { "group": 1 } }, doc! { "$group": { "_id": "$group" } }])
                    .with_type::<RawDocumentBuf>()
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

    /// Every lane that has unlocked jobs, with the date of the first of them.
    ///
    /// One walk over the whole index, which is given up when it takes too long ([`StoreError::is_too_slow`]): see
    /// [`Store::lanes_of`]. Index: `due_jobs`. Invariant: I9, one document stops no other.
    pub async fn waiting_lanes(&self) -> Result<BTreeMap<Lane, Instant>, StoreError> {
        let scheduled = self.scheduled.clone();
        let lanes = doc! { "$group": { "_id": { "group": "$group", "class": "$workable.class" }, "first": { "$min": "$scheduled_at" } } };
        let found: Vec<RawDocumentBuf> = self
            .indexed("waiting_lanes", async move {
                scheduled
                    .aggregate([doc! { "$sort": { "group": 1, "workable.class": 1 } }, lanes])
                    .with_type::<RawDocumentBuf>()
                    .hint(IndexHint::Name(DUE_JOBS.into()))
                    .batch_size(100_000)
                    .max_time(WALK_LIMIT)
                    .read_concern(ReadConcern::local())
                    .await?
                    .try_collect()
                    .await
            })
            .await?;
        let lane = |found: &RawDocumentBuf| {
            let id = found.get_document("_id").ok()?;
            let lane = Lane { group: id.get_str("group").ok()?.into(), class: id.get_str("class").ok()?.into() };
            Some((lane, found.get_datetime("first").ok()?.to_chrono()))
        };
        Ok(found.iter().filter_map(lane).collect())
    }

    /// The lanes of these groups that have unlocked jobs.
    ///
    /// One query for each group, which jumps from class to class: the cost does not depend on how many jobs wait.
    /// Filter: group, unlocked. Index: `due_jobs`. Invariant: I9, one document stops no other.
    pub async fn lanes_of(&self, groups: impl IntoIterator<Item = String>) -> Result<BTreeSet<Lane>, StoreError> {
        let listed: Vec<BTreeSet<Lane>> =
            stream::iter(groups).map(|group| self.lanes_of_group(group)).buffer_unordered(GROUPS_AT_A_TIME).try_collect().await?;
        Ok(listed.into_iter().flatten().collect())
    }

    async fn lanes_of_group(&self, group: String) -> Result<BTreeSet<Lane>, StoreError> {
        let scheduled = self.scheduled.clone();
        let filter = doc! { "group": &group, "locked": false };
        let distinct = filter.clone();
        let classes = match self.indexed("lanes_of", async move { scheduled.distinct("workable.class", distinct).await }).await {
            Ok(classes) => classes.into_iter().filter_map(|class| class.as_str().map(str::to_owned)).collect(),
            // The driver cannot decode the answer: a class is not UTF-8.
            Err(StoreError::Mongo { source, .. }) if matches!(source.kind.as_ref(), ErrorKind::InvalidResponse { .. }) => {
                self.classes_of_group(filter).await?
            }
            Err(error) => return Err(error),
        };
        Ok(classes.into_iter().map(|class| Lane { group: group.clone(), class }).collect())
    }

    /// The classes in a group one of whose classes is not UTF-8: a walk over the whole group.
    async fn classes_of_group(&self, filter: Document) -> Result<Vec<String>, StoreError> {
        let scheduled = self.scheduled.clone();
        let found: Vec<RawDocumentBuf> = self
            .indexed("classes_of_group", async move {
                scheduled
                    .aggregate([doc! { "$match": filter }, doc! { "$group": { "_id": "$workable.class" } }])
                    .with_type::<RawDocumentBuf>()
                    .hint(IndexHint::Name(DUE_JOBS.into()))
                    .read_concern(ReadConcern::local())
                    .await?
                    .try_collect()
                    .await
            })
            .await?;
        Ok(found.iter().filter_map(|class| class.get_str("_id").map(str::to_owned).ok()).collect())
    }

    /// The first unlocked jobs of these lanes that are due at `until`: at least `limit` if there are as many.
    ///
    /// Filter: group, class, unlocked, due. MongoDB merges one scan for each lane, which is in this order and jumps over what is due
    /// later, so that a search costs as much as it finds, however many jobs wait. Index: `due_jobs`. Invariant: none, the start decides.
    pub async fn due_jobs(&self, lanes: &[Lane], until: Instant, limit: usize) -> Result<DueJobs, StoreError> {
        let mut jobs: Vec<DueJob> = Vec::new();
        let mut end: Option<Position> = None;
        for lanes in lanes.chunks(LANES_PER_QUERY) {
            let found = self.due_in_some(lanes, until, limit).await?;
            if found.len() >= limit {
                end = end.into_iter().chain(found.last().map(DueJob::position)).min();
            }
            jobs.extend(found);
            jobs.sort_by_key(DueJob::position);
            if jobs.len() > limit {
                jobs.truncate(limit);
                end = end.into_iter().chain(jobs.last().map(DueJob::position)).min();
            }
        }
        if let Some(end) = end {
            jobs.truncate(jobs.partition_point(|job| job.position() <= end));
        }
        Ok(DueJobs { jobs, end })
    }

    /// The first due jobs of a few lanes, `limit` if there are as many.
    async fn due_in_some(&self, lanes: &[Lane], until: Instant, limit: usize) -> Result<Vec<DueJob>, StoreError> {
        let mut most = limit;
        loop {
            let asked = i64::try_from(most).unwrap_or(i64::MAX);
            let scheduled = self.scheduled.clone_with_type::<RawDocumentBuf>();
            let filter = due_in(lanes, until);
            let found: Vec<RawDocumentBuf> = self
                .indexed("due_jobs", async move {
                    scheduled
                        .find(filter)
                        .sort(doc! { "priority": -1, "scheduled_at": 1, "_id": 1 })
                        .limit(asked)
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
            let jobs: Vec<DueJob> = found.iter().filter_map(|job| DueJob::of_raw(job)).collect();
            // A document that is no job must not stand for the jobs behind it.
            if found.len() < most || jobs.len() >= limit {
                return Ok(jobs);
            }
            most += found.len() - jobs.len();
        }
    }
}

fn due_in(lanes: &[Lane], until: Instant) -> Document {
    let until = bson::DateTime::from_chrono(until);
    let lane =
        |lane: &Lane| doc! { "group": &lane.group, "workable.class": &lane.class, "scheduled_at": { "$lte": until }, "locked": false };
    doc! { "$or": lanes.iter().map(lane).collect::<Vec<_>>() }
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
