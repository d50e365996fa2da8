//! Jobs that wait for other jobs: their insert, the ends of those jobs, and their release.
//!
//! A job that waits is unlocked, has `waiting: true`, and is due in the year 9999. The leading recruiter releases it with one write when all
//! of its edges are satisfied, however many there are. No end of a job writes to the jobs that wait for it.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use bson::{Bson, Document, RawDocumentBuf, doc};
use futures_util::{FutureExt as _, StreamExt as _, TryStreamExt};
use mongodb::{ClientSession, error::Error, options::ReadConcern};

use super::{
    CommitSession, Store, StoreError,
    batch::cut,
    call, id_of,
    readable::{Readable, readable},
    schema::{Feature, GRAPH_JOBS, WAITING_JOBS},
    session::{commit, require_transaction},
};
use crate::{
    graphs::{End, InvalidGraph, NOT_NEEDED, Waiting},
    ids::{GraphId, JobId},
    instant::Instant,
    job::FinishReason,
};

/// Maximum number of documents in one `insert` command of a transaction.
const BATCH: usize = 1_000;
/// Maximum size of one `insert` command, in bytes.
const BATCH_BYTES: usize = 8 * 1024 * 1024;
/// The fields that say what a job of a graph is and how it has ended.
const JOB_OF_GRAPH: [&str; 14] = [
    "workable.class",
    "group",
    "locked",
    "scheduled_at",
    "waiting",
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
/// Maximum number of ids in one query.
const IDS: usize = 10_000;
/// Maximum number of jobs of a graph that are read in one call.
const PORTION: usize = 10_000;

/// The outcome of the insert of a graph.
#[derive(Debug)]
pub(crate) enum Inserted {
    /// All jobs are inserted.
    New,
    /// All jobs exist already, by an earlier call.
    Known,
    /// Nothing is inserted.
    Refused(InvalidGraph),
}

impl Store {
    /// Makes the indexes for jobs that wait for others, unless they exist. An enqueueing call does it by itself, but not in a transaction of
    /// the caller.
    ///
    /// Index: none. Invariant: none.
    ///
    /// # Errors
    /// When MongoDB refuses or cannot be reached.
    pub async fn prepare_graphs(&self) -> Result<(), StoreError> {
        self.prepare(Feature::Graphs).await
    }

    /// Whether any job of this database has ever waited for another one.
    ///
    /// Index: `_id`. Invariant: none.
    ///
    /// # Errors
    /// When MongoDB cannot be reached.
    pub async fn has_graphs(&self) -> Result<bool, StoreError> {
        self.is_in_use(Feature::Graphs).await
    }

    /// Inserts the jobs of a graph, unless it exists, if these other jobs exist that its jobs wait for.
    ///
    /// One transaction at majority. Index: `_id`. Invariant: I1, and the graph is inserted whole or not at all.
    pub(crate) async fn insert_graph(&self, jobs: Vec<Document>, parents: Vec<JobId>) -> Result<Inserted, StoreError> {
        let (store, jobs, parents): (_, Arc<[Document]>, Arc<[JobId]>) = (self.clone(), jobs.into(), parents.into());
        let (sent, mut session) = (jobs.clone(), CommitSession::default());
        let inserted = self.transaction("insert_graph", &mut session, move |open| {
            let (store, jobs, parents) = (store.clone(), sent.clone(), parents.clone());
            async move {
                let inserted = store.insert_graph_into(open, &jobs, &parents).await?;
                match inserted {
                    Inserted::New => commit(open).await?,
                    Inserted::Known | Inserted::Refused(_) => open.abort_transaction().await?,
                }
                Ok(inserted)
            }
            .boxed()
        });
        match inserted.await {
            // One of them is in `scheduled`: by an earlier call, or under an id of the application.
            Err(error) if error.is_duplicate() => {
                let ids: Vec<JobId> = jobs.iter().filter_map(id_of).collect();
                let known = self.known_among(&ids).await?;
                match ids.iter().find(|id| known.contains(id)) {
                    Some(_) if known.len() == ids.len() => Ok(Inserted::Known),
                    Some(job) => Ok(Inserted::Refused(InvalidGraph::PartlyKnown { job: *job })),
                    // A foreign unique index.
                    None => Err(error),
                }
            }
            other => {
                if let Ok(Inserted::New) = other {
                    self.tell_inserted(jobs.iter());
                }
                other
            }
        }
    }

    /// The same in the caller's transaction.
    ///
    /// Index: `_id`. Invariant: as above, once the caller's commit is acknowledged by a majority.
    ///
    /// # Errors
    /// The caller must then abort the transaction. [`StoreError::NoTransaction`] if the caller has not started one.
    pub(crate) async fn insert_graph_in(
        &self,
        session: &mut ClientSession,
        jobs: Vec<Document>,
        parents: Vec<JobId>,
    ) -> Result<Inserted, StoreError> {
        let operation = "insert_graph_in";
        require_transaction(session, operation).await?;
        let inserted = self.insert_graph_into(session, &jobs, &parents).await;
        inserted.map_err(|source| StoreError::Mongo { operation, source: source.into() })
    }

    async fn insert_graph_into(&self, session: &mut ClientSession, jobs: &[Document], parents: &[JobId]) -> Result<Inserted, Error> {
        if let Some(problem) = self.problem_with_parents(session, parents).await? {
            return Ok(Inserted::Refused(problem));
        }
        let ids: Vec<JobId> = jobs.iter().filter_map(id_of).collect();
        let mut archived = 0;
        for some in ids.chunks(IDS) {
            let these = doc! { "_id": { "$in": some.to_vec() } };
            archived += self.archived.count_documents(these).session(&mut *session).await?;
        }
        if archived > 0 {
            // The others may be in `scheduled`.
            let known = self.known_in(session, &ids).await?;
            let some = ids.iter().find(|id| known.contains(id));
            return Ok(match some {
                Some(job) if known.len() < ids.len() => Inserted::Refused(InvalidGraph::PartlyKnown { job: *job }),
                Some(_) | None => Inserted::Known,
            });
        }
        for batch in cut(jobs.to_vec(), BATCH, BATCH_BYTES, |job| job.to_vec().map_or(BATCH_BYTES, |bytes| bytes.len())) {
            self.scheduled.insert_many(batch).session(&mut *session).await?;
        }
        Ok(Inserted::New)
    }

    /// Why jobs cannot wait for these: one does not exist, or nothing would be left of it.
    async fn problem_with_parents(&self, session: &mut ClientSession, parents: &[JobId]) -> Result<Option<InvalidGraph>, Error> {
        if parents.is_empty() {
            return Ok(None);
        }
        let known = self.known_in(session, parents).await?;
        if let Some(job) = parents.iter().find(|parent| !known.contains(parent)) {
            return Ok(Some(InvalidGraph::UnknownJob { job: *job }));
        }
        // Its worker may not know that others wait for it.
        let fleeting = doc! { "_id": { "$in": parents.to_vec() }, "keep": "failures", "followed": { "$ne": true } };
        let found = self.scheduled.find_one(fleeting).projection(doc! { "_id": 1 }).session(session).await?;
        Ok(found.and_then(|job| id_of(&job)).map(|job| InvalidGraph::NotKept { job }))
    }

    /// Notes that other jobs wait for these, so that their ends are announced. The recruiter looks up the ends of jobs without this mark,
    /// for example of running ones.
    ///
    /// Filter: ids, unlocked, not one of which nothing would be left: its worker may have read it already. Index: `_id`. Invariant: none.
    pub(crate) async fn note_followed(&self, jobs: &[JobId]) -> Result<(), StoreError> {
        if jobs.is_empty() {
            return Ok(());
        }
        let waiting = doc! { "_id": { "$in": jobs.to_vec() }, "locked": false, "keep": { "$ne": "failures" } };
        let scheduled = self.scheduled.clone();
        let followed = doc! { "$set": { "followed": true } };
        call("note_followed", async move { scheduled.update_many(waiting, followed).await }).await.map(drop)
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
        Ok(found.iter().filter_map(|job| super::raw_id_of(job)).collect())
    }

    /// Those of these jobs that wait for others, with their edges, and the ids of those whose documents are not jobs.
    ///
    /// Filter: ids, waiting. Index: `_id`. Invariant: none, the release has a guard.
    pub async fn waiting_among(&self, jobs: &[JobId]) -> Result<(Vec<Waiting>, Vec<JobId>), StoreError> {
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
            match Document::try_from(&**job).ok().and_then(|job| Waiting::of_document(&job)) {
                Some(job) => waiting.push(job),
                None => invalid.extend(super::raw_id_of(job)),
            }
        }
        Ok((waiting, invalid))
    }

    /// The ends of those of these jobs that are archived.
    ///
    /// Filter: ids. Index: `_id`. Invariant: none, an end never changes.
    pub async fn ends_of(&self, jobs: &[JobId]) -> Result<HashMap<JobId, End>, StoreError> {
        let mut ends = HashMap::new();
        for some in jobs.chunks(IDS) {
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
        for some in jobs.chunks(IDS) {
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
            let release =
                doc! { "$set": { "scheduled_at": bson::DateTime::from_chrono(*at) }, "$unset": { "waiting": "", "due_after": "" } };
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
        Ok(found.into_iter().filter_map(|job| Some((super::raw_id_of(&job)?, job))).collect())
    }

    /// The jobs of a graph, from both collections, without what may be large.
    ///
    /// Reads `scheduled`, `archived`, and `scheduled` again. A job that moves to the archive is in one of the first two reads, and the job that
    /// repeats an archived one is in one of the last two. A job counts as the first of these reads has found it: jobs that it has added or
    /// become since, before its end, may be in no read. So a graph without an open job had none when the first read began.
    /// Filter: the graph. Index: `graph_jobs`. Invariant: I1, each is in one of them.
    pub(crate) async fn jobs_of_graph(&self, graph: GraphId) -> Result<Vec<Document>, StoreError> {
        let mut jobs: BTreeMap<JobId, Document> = BTreeMap::new();
        if !self.has_graphs().await? {
            return Ok(Vec::new());
        }
        for collection in [&self.scheduled, &self.archived, &self.scheduled] {
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
                    if let Some(id) = id_of(&job) {
                        jobs.entry(id).or_insert(job);
                    }
                }
                if is_last {
                    break;
                }
                cursor = rest;
            }
        }
        Ok(jobs.into_values().collect())
    }

    /// The results of archived jobs: those that are there, and the jobs that others continue.
    ///
    /// Filter: ids. Index: `_id`. Invariant: none.
    pub(crate) async fn results_of(&self, jobs: &[JobId]) -> Result<HashMap<JobId, StoredResult>, StoreError> {
        let mut results = HashMap::new();
        for some in jobs.chunks(IDS) {
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
