//! Jobs that wait for other jobs: their insert, the ends of those jobs, and their release.
//!
//! A job that waits is unlocked, has `waiting: true`, and is due in the year 9999. The leading recruiter releases it with one write when all
//! of its edges are satisfied, however many there are. No end of a job writes to the jobs that wait for it.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use bson::{Bson, Document, RawDocumentBuf, doc};
use futures_util::{StreamExt as _, TryStreamExt};
use mongodb::options::ReadConcern;

use crate::{
    base::{GraphId, Instant, JobId},
    enqueue::waiting::WaitingJob,
    job::{End, FinishReason, NOT_NEEDED},
    mongo::{Client, Feature, GRAPH_JOBS, IDS_PER_QUERY, Readable, Store, StoreError, WAITING_JOBS, call, id_of, readable},
};

/// The fields that say what a job of a graph is and how it has ended.
const JOB_OF_GRAPH: [&str; 15] = [
    "workable.class",
    "group",
    "locked",
    "scheduled_at",
    "waiting",
    "unique_after",
    "waits_for",
    "why",
    "continued_as",
    "recovered_from",
    "retried_as",
    "retrying",
    "last_execution.class",
    "last_execution.message",
    "cancel_requested_at",
];
/// Maximum number of jobs of a graph that are read in one call.
const PORTION: usize = 10_000;

impl Client {
    /// Makes the indexes for jobs that wait for others, unless they exist. An enqueueing call does it by itself, but not in a transaction of
    /// the caller.
    ///
    /// # Errors
    /// When MongoDB refuses or cannot be reached.
    pub async fn prepare_graphs(&self) -> Result<(), StoreError> {
        self.prepare(Feature::Graphs).await
    }
}

impl Store {
    /// Whether any job of this database has ever waited for another one.
    ///
    /// Index: `_id`. Invariant: none.
    pub async fn has_graphs(&self) -> Result<bool, StoreError> {
        self.is_in_use(Feature::Graphs).await
    }

    /// The ids of all jobs that wait for others.
    ///
    /// Filter: waiting. Index: `waiting_jobs`, which covers the query. Invariant: I7, for jobs that wait.
    pub async fn waiting_jobs(&self) -> Result<Vec<JobId>, StoreError> {
        let (scheduled, index) = (self.scheduled.clone_with_type::<RawDocumentBuf>(), self.index(WAITING_JOBS));
        let found: Vec<RawDocumentBuf> = self
            .indexed("waiting_jobs", async move {
                let found = scheduled.find(doc! { "waiting": true }).projection(doc! { "_id": 1 }).read_concern(ReadConcern::local());
                found.hint(index).await?.try_collect().await
            })
            .await?;
        Ok(found.iter().filter_map(|job| crate::mongo::raw_id_of(job)).collect())
    }

    /// Those of these jobs that wait for others, with their edges, and the ids of those whose documents are not jobs.
    ///
    /// Filter: ids, waiting. Index: `_id`. Invariant: none, the release has a guard.
    pub async fn waiting_among(&self, jobs: &[JobId]) -> Result<(Vec<WaitingJob>, Vec<JobId>), StoreError> {
        let (scheduled, filter) =
            (self.scheduled.clone_with_type::<RawDocumentBuf>(), doc! { "_id": { "$in": jobs.to_vec() }, "waiting": true });
        let fields = doc! { "waits_for": 1, "due_after": 1, "group": 1, "workable.class": 1, "gate": 1, "priority": 1, "scheduled_at": 1 };
        // Raw, so that a text that is not UTF-8 concerns one job only.
        let found: Vec<RawDocumentBuf> = call("waiting_among", async move {
            scheduled.find(filter).projection(fields).read_concern(ReadConcern::local()).await?.try_collect().await
        })
        .await?;
        let (mut waiting, mut invalid) = (Vec::with_capacity(found.len()), Vec::new());
        for job in &found {
            match Document::try_from(&**job).ok().and_then(|job| WaitingJob::of_document(&job)) {
                Some(job) => waiting.push(job),
                None => invalid.extend(crate::mongo::raw_id_of(job)),
            }
        }
        Ok((waiting, invalid))
    }

    /// The ends of those of these jobs that are archived.
    ///
    /// Filter: ids. Index: `_id`. Invariant: none, an end never changes.
    pub async fn ends_of(&self, jobs: &[JobId]) -> Result<HashMap<JobId, End>, StoreError> {
        let mut ends = HashMap::new();
        for some in jobs.chunks(IDS_PER_QUERY) {
            let (archived, filter) = (self.archived.clone(), doc! { "_id": { "$in": some.to_vec() } });
            let fields = doc! { "why": 1, "continued_as": 1, "last_execution.class": 1 };
            let found: Vec<Document> =
                call("ends_of", async move { archived.find(filter).projection(fields).await?.readable().await }).await?;
            ends.extend(found.iter().filter_map(|job| Some((id_of(job)?, end_of(job)))));
        }
        Ok(ends)
    }

    /// Those of these jobs that are in neither collection. `scheduled` is read first, because jobs move from there to the archive.
    ///
    /// Filter: ids. Index: `_id`. Invariant: none, a job that is gone never comes back.
    pub async fn gone_among(&self, jobs: &[JobId]) -> Result<HashSet<JobId>, StoreError> {
        let mut gone: HashSet<JobId> = HashSet::new();
        for some in jobs.chunks(IDS_PER_QUERY) {
            let known = self.known_among(some).await?;
            gone.extend(some.iter().copied().filter(|job| !known.contains(job)));
        }
        Ok(gone)
    }

    /// Releases jobs that wait no longer: makes the jobs of each list due at its date.
    ///
    /// Filter: ids, unlocked, waiting. Acknowledged by the primary only: if a failover undoes it, the jobs wait again, and the recruiter finds
    /// them. Index: `_id`. Invariant: I7. Harmless to repeat.
    /// Loses for jobs that were cancelled.
    pub async fn release_if_waiting(&self, due: &[(Instant, Vec<JobId>)]) -> Result<usize, StoreError> {
        let statement = |(at, jobs): &(Instant, Vec<JobId>)| {
            let waiting = doc! { "_id": { "$in": jobs.clone() }, "locked": false, "waiting": true };
            let release = doc! { "$set": { "scheduled_at": *at }, "$unset": { "waiting": "", "due_after": "" } };
            doc! { "q": waiting, "u": release, "multi": true }
        };
        let updates: Vec<Document> = due.iter().map(statement).collect();
        let command = || doc! { "update": self.scheduled.name(), "updates": updates.clone(), "ordered": false, "writeConcern": { "w": 1, "j": false } };
        self.write_repeatable("release_if_waiting", command).await
    }

    /// The documents of those of these jobs that wait for others.
    ///
    /// Filter: ids, unlocked, waiting. Index: `_id`. Invariant: none, the archival has a guard.
    pub async fn waiting_documents(&self, jobs: &[JobId]) -> Result<Vec<(JobId, RawDocumentBuf)>, StoreError> {
        let scheduled = self.scheduled.clone_with_type::<RawDocumentBuf>();
        let filter = doc! { "_id": { "$in": jobs.to_vec() }, "locked": false, "waiting": true };
        let found: Vec<RawDocumentBuf> =
            call("waiting_documents", async move { scheduled.find(filter).await?.try_collect().await }).await?;
        Ok(found.into_iter().filter_map(|job| Some((crate::mongo::raw_id_of(&job)?, job))).collect())
    }

    /// The jobs of a graph, from both collections, without what may be large, and one of those that have ended during the read, if there is
    /// one: jobs that it has added or become before its end may be missing.
    ///
    /// Reads `scheduled`, `archived`, and `scheduled` again. A job that moves to the archive is in one of the first two reads, and the job that
    /// repeats an archived one is in one of the last two. What is in both collections is a copy that was sent late, and has ended.
    /// Filter: the graph. Index: `graph_jobs`. Invariant: I1, each is in one of them.
    pub(crate) async fn jobs_of_graph(&self, graph: GraphId) -> Result<(Vec<Document>, Option<JobId>), StoreError> {
        let (mut jobs, mut ended): (BTreeMap<JobId, Document>, BTreeSet<JobId>) = Default::default();
        if !self.has_graphs().await? {
            return Ok((Vec::new(), None));
        }
        for (collection, is_archive) in [(&self.scheduled, false), (&self.archived, true), (&self.scheduled, false)] {
            let (collection, index) = (collection.clone(), self.index(GRAPH_JOBS));
            let fields = Document::from_iter(JOB_OF_GRAPH.map(|field| (field.to_owned(), Bson::from(1))));
            let find = async move { collection.find(doc! { "graph": graph }).projection(fields).hint(index).await };
            let mut cursor = self.indexed("jobs_of_graph", find).await?.with_type::<RawDocumentBuf>();
            // A graph of any size: no call takes long.
            loop {
                let (rest, portion) = call("jobs_of_graph", async move {
                    let portion: Vec<RawDocumentBuf> = (&mut cursor).take(PORTION).try_collect().await?;
                    Ok((cursor, portion))
                })
                .await?;
                let is_last = portion.len() < PORTION;
                for job in portion.iter().map(|job| readable(job)) {
                    match id_of(&job) {
                        Some(id) if is_archive => ended.extend(jobs.insert(id, job).map(|_| id)),
                        Some(id) => {
                            ended.remove(&id);
                            jobs.entry(id).or_insert(job);
                        }
                        None => {}
                    }
                }
                if is_last {
                    break;
                }
                cursor = rest;
            }
        }
        Ok((jobs.into_values().collect(), ended.pop_last()))
    }

    /// The results of archived jobs: those that are there, and the jobs that others continue.
    ///
    /// Filter: ids. Index: `_id`. Invariant: none.
    pub(crate) async fn results_of(&self, jobs: &[JobId]) -> Result<HashMap<JobId, StoredResult>, StoreError> {
        let mut results = HashMap::new();
        for some in jobs.chunks(IDS_PER_QUERY) {
            let (archived, filter) = (self.archived.clone(), doc! { "_id": { "$in": some.to_vec() } });
            let fields = doc! { "result": 1, "why": 1, "continued_as": 1 };
            let found: Vec<Document> =
                call("results_of", async move { archived.find(filter).projection(fields).await?.readable().await }).await?;
            results.extend(found.into_iter().filter_map(|mut job| {
                let id = id_of(&job)?;
                let stored = match end_of(&job) {
                    End::ContinuedAs(jobs) => StoredResult::ContinuedAs(jobs),
                    End::Done | End::Failed(_) | End::NotNeeded | End::Gone => {
                        StoredResult::Value(job.remove("result").unwrap_or(Bson::Null))
                    }
                };
                Some((id, stored))
            }));
        }
        Ok(results)
    }
}

/// What an archived job has in place of a result, or its result.
#[derive(Clone, Debug)]
pub(crate) enum StoredResult {
    /// Its result; null if it has none.
    Value(Bson),
    /// It has become these jobs.
    ContinuedAs(Vec<JobId>),
}

fn end_of(archived: &Document) -> End {
    let is_done = archived.get_str("why").is_ok_and(|why| why == "done");
    if let (true, Ok(jobs)) = (is_done, archived.get_array("continued_as")) {
        return End::ContinuedAs(jobs.iter().filter_map(Bson::as_object_id).map(JobId::from).collect());
    }
    let class = archived.get_document("last_execution").ok().and_then(|execution| execution.get_str("class").ok());
    match archived.get_str("why") {
        Ok("done") => End::Done,
        Ok("cancelled") if class == Some(NOT_NEEDED) => End::NotNeeded,
        Ok(why) => End::Failed(FinishReason::custom(why)),
        // Only a document that was inserted by hand has no reason.
        Err(_) => End::Failed(FinishReason::MALFORMED),
    }
}
