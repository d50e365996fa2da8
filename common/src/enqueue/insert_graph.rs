//! The insert of jobs that wait for others: whole or not at all.

use std::sync::Arc;

use bson::{Document, doc};
use futures_util::FutureExt as _;
use mongodb::{ClientSession, error::Error};

use super::invalid_graph::InvalidGraph;
use crate::{
    base::JobId,
    mongo::{CommitSession, IDS_PER_QUERY, Store, StoreError, call, commit, cut, id_of, require_transaction},
};

/// Maximum number of documents in one `insert` command of a transaction.
const BATCH: usize = 1_000;
/// Maximum size of one `insert` command, in bytes.
const BATCH_BYTES: usize = 8 * 1024 * 1024;

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
    /// Inserts the jobs of a graph, unless it exists, if these other jobs exist that its jobs wait for.
    ///
    /// One transaction at majority. Index: `_id`. Invariant: I1, and the graph is inserted whole or not at all.
    pub(crate) async fn insert_graph(&self, jobs: Vec<Document>, parents: Vec<JobId>) -> Result<Inserted, StoreError> {
        let (jobs, parents): (Arc<[Document]>, Arc<[JobId]>) = (jobs.into(), parents.into());
        let (with, mut session) = ((self.clone(), jobs.clone(), parents), CommitSession::default());
        let inserted = self.transaction("insert_graph", &mut session, with, |open, (store, jobs, parents)| {
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
        inserted.map_err(StoreError::of(operation))
    }

    async fn insert_graph_into(&self, session: &mut ClientSession, jobs: &[Document], parents: &[JobId]) -> Result<Inserted, Error> {
        if let Some(problem) = self.problem_with_parents(session, parents).await? {
            return Ok(Inserted::Refused(problem));
        }
        let ids: Vec<JobId> = jobs.iter().filter_map(id_of).collect();
        let mut archived = 0;
        for some in ids.chunks(IDS_PER_QUERY) {
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
}
