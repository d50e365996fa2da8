//! Reads for people: single jobs and statistics. Every read is bounded, so that it cannot slow the jobs down. All are
//! read as raw documents: one that cannot be decoded hides no other.

use crate::{
    base::{Instant, JobId, never_due},
    job::{FinishReason, Lane, Priority, ScheduledJob, StoredJob, edges_of},
    mongo::{ARCHIVED_BY_END, Client, DUE_JOBS, GATED_JOBS, IDS_PER_QUERY, Readable, Store, StoreError, call, id_of, lossy, raw_id_of},
    retry_policy::RetryPolicies,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};

use bson::{Bson, Document, RawDocument, RawDocumentBuf, doc};
use futures_util::TryStreamExt;
use mongodb::options::Hint as IndexHint;
use serde::Serialize;

/// Maximum number of waiting jobs counted per group, which takes about a second.
pub const COUNTED: u64 = 1_000_000;
/// Maximum number of archived jobs in the statistics: the newest ones.
pub const SAMPLED: usize = 10_000;
/// Levels of a stored policy that are read. Each nested policy is at most four levels deeper (parameters, list, row,
/// policy).
const LEVELS: usize = RetryPolicies::DEEPEST * 4;

/// Counts of the unlocked jobs of one group. A count of [`COUNTED`] means "at least".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Waiting {
    /// Due and not started.
    pub queued: u64,
    /// Those of the queued jobs that have been due for too long.
    pub overdue: u64,
    /// Due later.
    pub postponed: u64,
    /// Those that wait for the ends of other jobs, or for the job that has their unique key.
    pub waits: u64,
}

/// The fields of an archived job that the statistics use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    /// The group it was in.
    pub group: String,
    /// The reason why it is in the archive.
    pub why: FinishReason,
    /// When it was last due.
    pub scheduled_at: Option<Instant>,
    /// When it was last started; `None` if never.
    pub started_at: Option<Instant>,
    /// When it ended.
    pub ended_at: Instant,
}

/// A job of `scheduled` that runs, is due, or waits for others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfinished {
    /// The id of the job.
    pub job: JobId,
    /// Class of its workable.
    pub class: String,
    /// Whether a start has locked it.
    pub is_locked: bool,
    /// The jobs that it waits for; empty if it waits no longer.
    pub waits_for: Vec<JobId>,
}

/// The numbers of waiting jobs of a lane or a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneCounts {
    /// Those that are due.
    pub due: u64,
    /// Those that are due later.
    pub later: u64,
    /// Those that wait for the ends of other jobs.
    pub for_jobs: u64,
    /// Those that run once more after the job that has their unique key.
    pub for_predecessors: u64,
}

impl Client {
    /// One job, whether it waits, runs or is archived, as its document: [`Job::try_from`](crate::job::Job) decodes it. `None` if there is no
    /// job with this id: it was never enqueued, its transaction is not committed, or it was deleted.
    ///
    /// # Errors
    /// When MongoDB cannot be used.
    pub async fn job(&self, job: JobId) -> Result<Option<StoredJob>, StoreError> {
        Ok(self.store().jobs_by_id(&[job]).await?.remove(&job))
    }
}

impl Store {
    /// Those of these jobs that exist, from either collection.
    ///
    /// Reads `scheduled`, then `archived`, then `scheduled` again. In between a job may be enqueued, or one read may
    /// see its move to the archive and the next one may not.
    /// Filter: these ids. Index: `_id`. Invariant: I1, each is in one of them.
    pub async fn jobs_by_id(&self, jobs: &[JobId]) -> Result<HashMap<JobId, StoredJob>, StoreError> {
        let mut found: HashMap<JobId, StoredJob> = HashMap::new();
        for (collection, is_archived) in [(&self.scheduled, false), (&self.archived, true), (&self.scheduled, false)] {
            let missing: Vec<JobId> = jobs.iter().copied().filter(|job| !found.contains_key(job)).collect();
            for missing in missing.chunks(IDS_PER_QUERY) {
                let (collection, filter) = (collection.clone_with_type::<RawDocumentBuf>(), doc! { "_id": { "$in": missing.to_vec() } });
                let documents: Vec<RawDocumentBuf> =
                    call("jobs_by_id", async move { collection.find(filter).await?.try_collect().await }).await?;
                found.extend(
                    documents.into_iter().filter_map(|document| Some((raw_id_of(&document)?, StoredJob { is_archived, document }))),
                );
            }
        }
        Ok(found)
    }

    /// The sizes in bytes of those of these jobs that exist, to read them in portions. A job that moves in between may be left out.
    ///
    /// Filter: these ids. Index: `_id`. Invariant: none.
    pub async fn sizes_by_id(&self, jobs: &[JobId]) -> Result<HashMap<JobId, usize>, StoreError> {
        let mut sizes = HashMap::new();
        for collection in [&self.scheduled, &self.archived] {
            for some in jobs.chunks(IDS_PER_QUERY) {
                let (collection, filter) = (collection.clone(), doc! { "_id": { "$in": some.to_vec() } });
                let size = doc! { "bytes": { "$bsonSize": "$$ROOT" } };
                let found =
                    call("sizes_by_id", async move { collection.find(filter).projection(size).batch_size(10_000).await?.readable().await });
                sizes.extend(found.await?.iter().filter_map(|job| Some((id_of(job)?, usize::try_from(job.get_i32("bytes").ok()?).ok()?))));
            }
        }
        Ok(sizes)
    }

    /// Number of waiting jobs in each group at `now`. Jobs that were due before `overdue` are overdue.
    ///
    /// Filter: group, due before or after; the jobs that wait for others have the latest date. Index: `due_jobs` and `gated_jobs`, which hold
    /// the unlocked jobs without and with a gate; up to [`COUNTED`] entries for each number. Invariant: none.
    pub async fn waiting(&self, now: Instant, overdue: Instant) -> Result<BTreeMap<String, Waiting>, StoreError> {
        let mut waiting = BTreeMap::new();
        for index in [DUE_JOBS, GATED_JOBS] {
            let groups = if index == DUE_JOBS { self.ungated_groups().await? } else { self.gated_groups().await? };
            for group in groups {
                let these = doc! { "group": &group };
                let LaneCounts { due, later, for_jobs, for_predecessors } = self.counts_by_date(&these, index, now).await?;
                let mut before = these;
                before.extend(doc! { "scheduled_at": { "$lte": overdue } });
                let overdue = self.count_waiting(before, index).await?;
                let counts: &mut Waiting = waiting.entry(group).or_default();
                counts.queued += due;
                counts.overdue += overdue;
                counts.postponed += later;
                counts.waits += for_jobs + for_predecessors;
            }
        }
        Ok(waiting)
    }

    /// Lanes of these groups that have waiting jobs, at most `most`.
    ///
    /// See [`Store::lanes_of`] and [`Store::gated_lanes_of`]. Filter: group. Index: `due_jobs`, `gated_jobs`. Invariant: none.
    pub async fn first_lanes(&self, groups: impl IntoIterator<Item = String>, most: usize) -> Result<Vec<Lane>, StoreError> {
        let mut lanes = Vec::new();
        for group in groups {
            lanes.extend(self.lanes_of(&group, most - lanes.len()).await?.0);
            let gated = self.gated_lanes_of(&group).await?;
            lanes.extend(gated.into_iter().take(most - lanes.len()));
        }
        Ok(lanes)
    }

    /// The first due jobs of these lanes, at most `most`, each with the classes of its retry policies.
    ///
    /// Filter: these ids. Index: `due_jobs`, then `_id`. Invariant: none; a job whose policy no worker knows stays at the front
    /// of its lane.
    pub async fn policies_of_due_jobs(&self, lanes: &[Lane], most: usize) -> Result<Vec<(ScheduledJob, BTreeSet<String>)>, StoreError> {
        let due = self.due_jobs(lanes, self.now(), most).await?.jobs;
        let ids: Vec<JobId> = due.iter().map(|job| job.id).collect();
        let scheduled = self.scheduled.clone_with_type::<RawDocumentBuf>();
        let found: Vec<RawDocumentBuf> = call("policies_of_due_jobs", async move {
            scheduled.find(doc! { "_id": { "$in": ids } }).projection(doc! { "retry_policy": 1 }).await?.try_collect().await
        })
        .await?;
        let policies = |job: &RawDocumentBuf| policies_in(lossy(job).get("retry_policy").cloned().unwrap_or(Bson::Null));
        let mut found: HashMap<JobId, BTreeSet<String>> = found.iter().filter_map(|job| Some((raw_id_of(job)?, policies(job)))).collect();
        Ok(due.into_iter().filter_map(|job| found.remove(&job.id).map(|policies| (job, policies))).collect())
    }

    /// The numbers of waiting jobs of a lane, each counted up to [`COUNTED`].
    ///
    /// Filter: group, class, gate, due before or after; the jobs that wait for others have the latest date. Index: `due_jobs`,
    /// `gated_jobs`. Invariant: none, for people.
    pub async fn waiting_in_lane(&self, lane: &Lane, now: Instant) -> Result<LaneCounts, StoreError> {
        let (filter, index) = in_lane(lane);
        self.counts_by_date(&filter, index, now).await
    }

    async fn counts_by_date(&self, these: &Document, index: &'static str, now: Instant) -> Result<LaneCounts, StoreError> {
        let latest = never_due();
        let of = async |more: Document| {
            let mut filter = these.clone();
            filter.extend(more);
            self.count_waiting(filter, index).await
        };
        let due = of(doc! { "scheduled_at": { "$lte": now } }).await?;
        let later = of(doc! { "scheduled_at": { "$gt": now, "$lt": latest } }).await?;
        let at_latest = of(doc! { "scheduled_at": latest }).await?;
        let (mut for_jobs, mut for_predecessors) = (0, 0);
        if at_latest > 0 {
            for_jobs = of(doc! { "scheduled_at": latest, "waiting": true }).await?;
            for_predecessors = of(doc! { "scheduled_at": latest, "unique_after": { "$gte": "" } }).await?;
        }
        let others = at_latest.saturating_sub(for_jobs + for_predecessors);
        Ok(LaneCounts { due, later: later + others, for_jobs, for_predecessors })
    }

    /// How many due jobs of this lane come before one with this priority and date, counted up to [`COUNTED`].
    ///
    /// Filter: group, class, gate, a higher priority or an earlier date. Index: `due_jobs`, `gated_jobs`. Invariant: none, for people.
    pub async fn count_due_before(&self, lane: &Lane, priority: Priority, at: Instant) -> Result<u64, StoreError> {
        let (mut filter, index) = in_lane(lane);
        let priority = i32::from(priority.get());
        filter.insert(
            "$or",
            vec![
                doc! { "priority": { "$gt": priority }, "scheduled_at": { "$lte": self.now() } },
                doc! { "priority": priority, "scheduled_at": { "$lt": at } },
            ],
        );
        self.count_waiting(filter, index).await
    }

    async fn count_waiting(&self, filter: Document, index: &'static str) -> Result<u64, StoreError> {
        let (scheduled, index) = (self.scheduled.clone(), self.index(index));
        let counted = async move { scheduled.count_documents(filter).limit(COUNTED).hint(index).await };
        self.indexed("count_waiting", counted).await
    }

    /// Number of running jobs in each group.
    ///
    /// Filter: listed in the roster, and locked. Index: `_id`; `locked` has no index, because the roster lists the
    /// locked jobs. Invariant: none.
    pub async fn running(&self) -> Result<BTreeMap<String, u64>, StoreError> {
        let mut running = BTreeMap::new();
        for jobs in self.held_jobs().await?.chunks(IDS_PER_QUERY) {
            let (scheduled, filter) = (self.scheduled.clone(), doc! { "_id": { "$in": jobs.to_vec() }, "locked": true });
            let scheduled = scheduled.clone_with_type::<RawDocumentBuf>();
            let found: Vec<RawDocumentBuf> = call("running", async move {
                scheduled.find(filter).projection(doc! { "group": 1 }).batch_size(10_000).await?.try_collect().await
            })
            .await?;
            for job in &found {
                *running.entry(group_of(job)).or_default() += 1;
            }
        }
        Ok(running)
    }

    /// Jobs that run, are due at `now`, or wait for others. For tests: it reads all jobs of `scheduled`.
    ///
    /// The jobs are read in the order of their inserts. So a job that another one enqueues while it runs is found, even if that one ends
    /// during the read.
    /// Filter: locked, due or waiting. Index: none, a scan. Invariant: none.
    pub async fn unfinished_jobs(&self, now: Instant) -> Result<Vec<Unfinished>, StoreError> {
        let scheduled = self.scheduled.clone_with_type::<RawDocumentBuf>();
        let filter = doc! { "$or": [
            { "locked": true }, { "scheduled_at": { "$lte": now } }, { "waiting": true },
        ] };
        let fields = doc! { "workable.class": 1, "locked": 1, "waiting": 1, "waits_for": 1 };
        let found: Vec<RawDocumentBuf> = call("unfinished_jobs", async move {
            scheduled.find(filter).projection(fields).hint(IndexHint::Keys(doc! { "$natural": 1 })).await?.try_collect().await
        })
        .await?;
        let unfinished = |job: &RawDocumentBuf| {
            let document = lossy(job);
            let is = |field| document.get_bool(field).unwrap_or_default();
            let edges = if is("waiting") { edges_of(document.get("waits_for")).unwrap_or_default() } else { Vec::new() };
            Some(Unfinished {
                job: raw_id_of(job)?,
                class: document.get_document("workable").and_then(|workable| workable.get_str("class")).unwrap_or_default().to_owned(),
                is_locked: is("locked"),
                waits_for: edges.into_iter().map(|edge| edge.job).collect(),
            })
        };
        Ok(found.iter().filter_map(unfinished).collect())
    }

    /// Jobs that ended after `since`, newest first, at most [`SAMPLED`].
    ///
    /// Filter: ended after. Index: `archived_by_end`, backwards. Invariant: none.
    pub async fn finished(&self, since: Instant) -> Result<Vec<Finished>, StoreError> {
        let (archived, index) = (self.archived.clone_with_type::<RawDocumentBuf>(), self.index(ARCHIVED_BY_END));
        let filter = doc! { "last_execution.ended_at": { "$gt": since } };
        let times =
            doc! { "group": 1, "why": 1, "last_execution.scheduled_at": 1, "last_execution.started_at": 1, "last_execution.ended_at": 1 };
        let found: Vec<RawDocumentBuf> = self
            .indexed("finished", async move {
                archived
                    .find(filter)
                    .projection(times)
                    .sort(doc! { "last_execution.ended_at": -1 })
                    .limit(i64::try_from(SAMPLED).unwrap_or(i64::MAX))
                    .batch_size(10_000)
                    .hint(index)
                    .await?
                    .try_collect()
                    .await
            })
            .await?;
        let finished = |job: &RawDocument| {
            let execution = job.get_document("last_execution").ok()?;
            let at = |field| execution.get_datetime(field).ok().map(|at| at.to_chrono());
            Some(Finished {
                group: group_of(job),
                why: FinishReason::custom(job.get_str("why").unwrap_or_default()),
                scheduled_at: at("scheduled_at"),
                started_at: at("started_at"),
                ended_at: at("ended_at")?,
            })
        };
        Ok(found.iter().filter_map(|job| finished(job)).collect())
    }

    /// Number of jobs in the archive.
    ///
    /// Filter: none. Index: none, MongoDB keeps the number. Invariant: none; after an unclean end of mongod the number
    /// may be wrong.
    pub async fn archived_count(&self) -> Result<u64, StoreError> {
        let archived = self.archived.clone();
        call("archived_count", async move { archived.estimated_document_count().await }).await
    }

    /// Those of these jobs that are in the archive, as stored, in any order.
    ///
    /// Filter: these ids. Index: `_id`. Invariant: I2, an archived job does not run again.
    pub async fn archived_jobs(&self, jobs: &[JobId]) -> Result<Vec<Document>, StoreError> {
        let (archived, filter) = (self.archived.clone(), doc! { "_id": { "$in": jobs.to_vec() } });
        call("archived_jobs", async move { archived.find(filter).batch_size(10_000).await?.readable().await }).await
    }
}

/// The unlocked jobs of a lane, and the index that has them.
fn in_lane(lane: &Lane) -> (Document, &'static str) {
    let index = if lane.gate.is_some() { GATED_JOBS } else { DUE_JOBS };
    let gate = lane.gate.as_ref().map_or(Bson::Null, Bson::from);
    (doc! { "group": &lane.group, "workable.class": &lane.class, "gate": gate, "locked": false }, index)
}

/// The classes of a stored policy and of those within it.
pub fn policies_in(policy: Bson) -> BTreeSet<String> {
    let mut classes = BTreeSet::new();
    add_policies(&policy, LEVELS, &mut classes);
    classes
}

/// Collects the classes of a policy and of the policies in its parameters, which are documents {class, parameters} as
/// well.
fn add_policies(value: &Bson, levels: usize, classes: &mut BTreeSet<String>) {
    let Some(levels) = levels.checked_sub(1) else { return };
    if let Some(document) = value.as_document() {
        let is_policy = document.keys().all(|key| matches!(key.as_str(), "class" | "parameters"));
        classes.extend(document.get_str("class").ok().filter(|_| is_policy).map(str::to_owned));
        document.values().for_each(|value| add_policies(value, levels, classes));
    }
    value.as_array().into_iter().flatten().for_each(|value| add_policies(value, levels, classes));
}

/// The group of a job, with invalid UTF-8 replaced.
fn group_of(job: &RawDocument) -> String {
    job.get_str("group").map_or_else(|_| lossy(job).get_str("group").unwrap_or_default().to_owned(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_within_policies_are_found() {
        let case =
            |class: &str| doc! { "when": ["timeout"], "then": { "class": class, "parameters": { "class": "not a policy", "n": 1 } } };
        let filtered = doc! { "class": "SelectByException", "parameters": { "cases": [case("Mine"), case("Yours")] } };
        let policy = doc! { "class": "RetriableExceptionFilter", "parameters": { "filtered_retry_policy": filtered, "retriable_exceptions": ["*"] } };
        let mut classes = BTreeSet::new();
        add_policies(&policy.into(), LEVELS, &mut classes);
        assert_eq!(classes.into_iter().collect::<Vec<_>>(), ["Mine", "RetriableExceptionFilter", "SelectByException", "Yours"]);
        let deep = (0..1_000).fold(Bson::Null, |inner, _| Bson::Document(doc! { "class": "Deep", "parameters": inner }));
        add_policies(&deep, LEVELS, &mut BTreeSet::new());
    }
}
