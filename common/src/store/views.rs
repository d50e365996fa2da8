//! What people ask: lists, single jobs, statistics. Reads only, each bounded, so that a curious person cannot slow
//! the work down.
//!
//! `scheduled` keeps no index for questions (each would cost every job); what no index answers is walked newest first
//! and given up after [`LOOK_LIMIT`].

use std::{
    collections::{BTreeMap, HashSet},
    time::Duration,
};

use bson::{Document, doc};
use clap::ValueEnum;
use futures_util::TryStreamExt;
use mongodb::{Collection, options::Hint as IndexHint};

use super::{
    Store, StoreError, call,
    indexes::{ARCHIVED_BY_END, DUE_JOBS},
    jobs::id_of,
    search::{due_filter, next_due_filter},
};
use crate::{ids::JobId, instant::Instant};

/// How long MongoDB may look for jobs that no index leads to, before it gives up.
const LOOK_LIMIT: Duration = Duration::from_secs(8);
/// Waiting jobs of one group that are counted, at most, about a second's worth: MongoDB 6 reads each job it counts,
/// because the index is partial.
pub const COUNTED: u64 = 1_000_000;
/// Finished jobs that the statistics look at, at most: the newest ones.
pub const SAMPLED: usize = 10_000;
/// Ids in one query, at most.
const IDS_PER_QUERY: usize = 10_000;

/// Where a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum JobPlace {
    /// Waits to be due or for a worker
    Scheduled,
    /// Is being run
    Running,
    /// Is finished
    Archived,
}

/// Which jobs to list. What is not said does not matter.
#[derive(Clone, Debug, Default)]
pub struct JobFilter {
    /// Where it is.
    pub place: Option<JobPlace>,
    /// Its group.
    pub group: Option<String>,
    /// Class of its workable.
    pub class: Option<String>,
    /// One of its tags.
    pub tag: Option<String>,
    /// Its urn.
    pub urn: Option<String>,
    /// Why it is in the archive. Leads there when no place is given.
    pub why: Option<String>,
    /// With parameters, result and history. Without them the list stays small, whatever the jobs carry.
    pub whole: bool,
    /// How many, at most; 0 counts as 1.
    pub limit: u16,
}

impl JobFilter {
    fn fields(&self) -> Document {
        let fields = [("group", &self.group), ("workable.class", &self.class), ("tags", &self.tag), ("urn", &self.urn), ("why", &self.why)];
        fields.into_iter().filter_map(|(field, value)| Some((field.to_owned(), value.as_ref()?.into()))).collect()
    }

    async fn look(&self, collection: &Collection<Document>, more: Document, sort: Document) -> Result<Vec<Document>, StoreError> {
        let mut wanted = self.fields();
        wanted.extend(more);
        let without = if self.whole {
            doc! {}
        } else {
            doc! { "workable.parameters": 0, "result": 0, "executions": 0 }
        };
        let (collection, limit) = (collection.clone(), self.limit.max(1).into());
        let find = async move {
            collection.find(wanted).projection(without).sort(sort).limit(limit).max_time(LOOK_LIMIT).await?.try_collect().await
        };
        call("jobs", find).await
    }
}

/// The unlocked jobs of one group. A count that has reached [`COUNTED`] means "at least".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// Due, without a worker.
    pub queued: u64,
    /// Those of them that have been due for longer than is good.
    pub overdue: u64,
    /// Due later.
    pub postponed: u64,
}

/// One finished job, as far as the statistics need it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    /// The group it was in.
    pub group: String,
    /// When it was due for the last time.
    pub scheduled_at: Option<Instant>,
    /// When it was started for the last time, if ever.
    pub started_at: Option<Instant>,
    /// When it ended.
    pub ended_at: Instant,
}

impl Store {
    /// One job, wherever it is.
    ///
    /// Looks in `scheduled`, then in `archived`, then again: it may have been enqueued, or its archiving been seen by
    /// one look and not by the other, in between. Filter: id. Index: `_id`. Invariant: I1, it is in one of them.
    pub async fn job(&self, job: JobId) -> Result<Option<Document>, StoreError> {
        for collection in [&self.scheduled, &self.archived, &self.scheduled] {
            let collection = collection.clone();
            if let Some(found) = call("job", async move { collection.find_one(doc! { "_id": job }).await }).await? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Jobs as they are stored, newest first: by the end of the last execution in the archive, else by `_id`, which
    /// tells seconds apart.
    ///
    /// Filter: what is asked for, and for the running ones those that the roster names. Index: `_id` or
    /// `archived_by_end` in descending order up to the limit, or for `LOOK_LIMIT`. Invariant: none; a job that moves
    /// meanwhile is listed once, because the archive is read last and believed.
    pub async fn jobs(&self, filter: &JobFilter) -> Result<Vec<Document>, StoreError> {
        let by_id = doc! { "_id": -1 };
        match filter.place.or(filter.why.as_ref().map(|_| JobPlace::Archived)) {
            Some(JobPlace::Scheduled) => filter.look(&self.scheduled, doc! { "locked": false }, by_id).await,
            Some(JobPlace::Archived) => filter.look(&self.archived, doc! {}, doc! { "last_execution.ended_at": -1 }).await,
            Some(JobPlace::Running) => {
                let mut running = Vec::new();
                for jobs in self.held_jobs().await?.chunks(IDS_PER_QUERY) {
                    running.extend(
                        filter.look(&self.scheduled, doc! { "_id": { "$in": jobs.to_vec() }, "locked": true }, by_id.clone()).await?,
                    );
                }
                Ok(newest(running, filter.limit))
            }
            None => {
                let mut all = filter.look(&self.scheduled, doc! {}, by_id.clone()).await?;
                let archived = filter.look(&self.archived, doc! {}, by_id).await?;
                let moved: HashSet<JobId> = archived.iter().filter_map(id_of).collect();
                all.retain(|job| !id_of(job).is_some_and(|id| moved.contains(&id)));
                all.extend(archived);
                Ok(newest(all, filter.limit))
            }
        }
    }

    /// How many jobs wait in each group at `now`; overdue are those that were due before `overdue`.
    ///
    /// Filter: group, unlocked, due before or after. Index: `due_jobs`, up to [`COUNTED`] entries for each number.
    /// Invariant: none.
    pub async fn waiting(&self, now: Instant, overdue: Instant) -> Result<BTreeMap<String, Waiting>, StoreError> {
        let mut waiting = BTreeMap::new();
        for group in self.groups().await? {
            let counts = Waiting {
                queued: self.count_waiting(due_filter(std::slice::from_ref(&group), now)).await?,
                overdue: self.count_waiting(due_filter(std::slice::from_ref(&group), overdue)).await?,
                postponed: self.count_waiting(next_due_filter(std::slice::from_ref(&group), now)).await?,
            };
            waiting.insert(group, counts);
        }
        Ok(waiting)
    }

    async fn count_waiting(&self, filter: Document) -> Result<u64, StoreError> {
        let scheduled = self.scheduled.clone();
        let counted = async move { scheduled.count_documents(filter).limit(COUNTED).hint(IndexHint::Name(DUE_JOBS.into())).await };
        self.indexed("count_waiting", counted).await
    }

    /// How many jobs run in each group.
    ///
    /// Filter: named by the roster, and locked. Index: `_id`; there is none on `locked`, the roster is it.
    /// Invariant: none.
    pub async fn running(&self) -> Result<BTreeMap<String, u64>, StoreError> {
        let mut running = BTreeMap::new();
        for jobs in self.held_jobs().await?.chunks(IDS_PER_QUERY) {
            let (scheduled, filter) = (self.scheduled.clone(), doc! { "_id": { "$in": jobs.to_vec() }, "locked": true });
            let found: Vec<Document> = call("running", async move {
                scheduled.find(filter).projection(doc! { "group": 1 }).batch_size(10_000).await?.try_collect().await
            })
            .await?;
            for group in found.iter().filter_map(|job| job.get_str("group").ok()) {
                *running.entry(group.to_owned()).or_default() += 1;
            }
        }
        Ok(running)
    }

    /// Jobs that ended after `since`, the newest [`SAMPLED`] at most, newest first.
    ///
    /// Filter: ended after. Index: `archived_by_end`, backwards. Invariant: none.
    pub async fn finished(&self, since: Instant) -> Result<Vec<Finished>, StoreError> {
        let archived = self.archived.clone();
        let filter = doc! { "last_execution.ended_at": { "$gt": bson::DateTime::from_chrono(since) } };
        let times = doc! { "group": 1, "last_execution.scheduled_at": 1, "last_execution.started_at": 1, "last_execution.ended_at": 1 };
        let found: Vec<Document> = self
            .indexed("finished", async move {
                archived
                    .find(filter)
                    .projection(times)
                    .sort(doc! { "last_execution.ended_at": -1 })
                    .limit(i64::try_from(SAMPLED).unwrap_or(i64::MAX))
                    .batch_size(10_000)
                    .hint(IndexHint::Name(ARCHIVED_BY_END.into()))
                    .await?
                    .try_collect()
                    .await
            })
            .await?;
        let finished = |job: &Document| {
            let execution = job.get_document("last_execution").ok()?;
            let at = |field| execution.get_datetime(field).ok().map(|at| at.to_chrono());
            Some(Finished {
                group: job.get_str("group").ok()?.to_owned(),
                scheduled_at: at("scheduled_at"),
                started_at: at("started_at"),
                ended_at: at("ended_at")?,
            })
        };
        Ok(found.iter().filter_map(finished).collect())
    }

    /// How many jobs are in the archive.
    ///
    /// Filter: none. Index: none, MongoDB keeps the number. Invariant: none; after an unclean end of mongod it may be off.
    pub async fn archived_count(&self) -> Result<u64, StoreError> {
        let archived = self.archived.clone();
        call("archived_count", async move { archived.estimated_document_count().await }).await
    }

    /// Those of these jobs that are in the archive, as they are stored, in no order.
    ///
    /// Filter: these ids. Index: `_id`. Invariant: I2, what is there is final.
    pub async fn archived_jobs(&self, jobs: &[JobId]) -> Result<Vec<Document>, StoreError> {
        let (archived, filter) = (self.archived.clone(), doc! { "_id": { "$in": jobs.to_vec() } });
        call("archived_jobs", async move { archived.find(filter).batch_size(10_000).await?.try_collect().await }).await
    }

    /// Every job that a worker can have locked, as the roster says.
    async fn held_jobs(&self) -> Result<Vec<JobId>, StoreError> {
        Ok(self.registered_workers().await?.into_iter().flat_map(|worker| worker.jobs).collect())
    }
}

fn newest(mut jobs: Vec<Document>, limit: u16) -> Vec<Document> {
    jobs.sort_by_key(|job| std::cmp::Reverse(id_of(job)));
    jobs.truncate(limit.into());
    jobs
}
