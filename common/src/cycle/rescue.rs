//! Rescue: reads the jobs of dead workers, sweeps for locked jobs without a holder, and ends the open sessions of dead processes.

use std::collections::HashSet;

use bson::{Document, RawDocumentBuf, doc};
use futures_util::TryStreamExt;

use crate::{
    base::{JobId, WorkerId},
    job::Held,
    mongo::{Store, StoreError, call, raw_id_of},
};

/// Number of jobs that one step of the sweep examines.
const SWEEP_STEP: u64 = 5_000;

/// The findings of one step of the sweep.
#[derive(Clone, Debug)]
pub struct LockedJobs {
    /// Locked documents: their ids and holders.
    pub documents: Vec<RawDocumentBuf>,
    /// All registered workers.
    pub registered: HashSet<WorkerId>,
    /// The last examined job, after which the next step continues; `None` after the last step.
    pub next: Option<JobId>,
}

impl Store {
    /// Those of these jobs that this worker has locked.
    ///
    /// Filter: id, locked, this holder. Index: `_id`; the roster lists the jobs, so an index on the holder is not needed.
    /// Invariant: none, each job is ended under its own start.
    pub async fn held_by(&self, worker: WorkerId, jobs: &[JobId]) -> Result<Vec<Held>, StoreError> {
        let scheduled = self.scheduled.clone_with_type::<RawDocumentBuf>();
        let filter = doc! { "_id": { "$in": jobs.to_vec() }, "locked": true, "last_execution.worker": worker };
        let found: Vec<RawDocumentBuf> = call("held_by", async move { scheduled.find(filter).await?.try_collect().await }).await?;
        Ok(found.into_iter().filter_map(|document| Held::try_from(document).ok()).collect())
    }

    /// One step of the slow sweep: the locked documents among the next few thousand jobs after `after`, in order of their ids.
    ///
    /// The locked jobs are read first, and then the roster, from the same or a later state, even after a failover. A worker is in the
    /// roster before it locks its first job and until it has released its last one.
    /// Index: `_id`, in steps with a bounded number of documents, locked or not. Invariant: I4 and I5, no live worker is treated as dead,
    /// even if its roster document is damaged.
    pub async fn locked_jobs(&self, after: Option<JobId>) -> Result<LockedJobs, StoreError> {
        let (store, scheduled) = (self.clone(), self.scheduled.clone_with_type::<RawDocumentBuf>());
        let roster = self.roster.clone_with_type::<RawDocumentBuf>();
        call("locked_jobs", async move {
            // Causally consistent, like every session of the driver.
            let mut session = store.start_session().await?;
            let mut range = after.map_or(doc! {}, |after| doc! { "$gt": after });
            let from = if range.is_empty() {
                doc! {}
            } else {
                doc! { "_id": range.clone() }
            };
            let bound = scheduled.find_one(from).sort(doc! { "_id": 1 }).skip(SWEEP_STEP).projection(doc! { "_id": 1 });
            let bound = bound.session(&mut session).await?.and_then(|job| raw_id_of(&job));
            if let Some(bound) = bound {
                range.insert("$lte", bound);
            }
            let mut filter = doc! { "locked": true };
            if !range.is_empty() {
                filter.insert("_id", range);
            }
            let holder = doc! { "last_execution.worker": 1, "last_execution.start": 1 };
            let mut locked = scheduled.find(filter).sort(doc! { "_id": 1 }).projection(holder).session(&mut session).await?;
            let documents: Vec<RawDocumentBuf> = locked.stream(&mut session).try_collect().await?;
            let mut registered = roster.find(doc! {}).projection(doc! { "_id": 1 }).batch_size(10_000).session(&mut session).await?;
            let registered: Vec<RawDocumentBuf> = registered.stream(&mut session).try_collect().await?;
            let registered = registered.iter().filter_map(|worker| Some(WorkerId::from(worker.get_object_id("_id").ok()?))).collect();
            Ok(LockedJobs { documents, registered, next: bound })
        })
        .await
    }

    /// Unlocks a job that is locked without a holder. No worker can have started it, so no execution has crashed.
    ///
    /// Filter: id, locked, still without a holder. Index: `_id`. Invariant: I8.
    pub async fn unlock_if_unheld(&self, job: JobId) -> Result<bool, StoreError> {
        let scheduled = self.scheduled.clone();
        let filter = doc! { "_id": job, "locked": true, "$or": [{ "last_execution.worker": null }, { "last_execution.start": null }] };
        let unlocked =
            call("unlock_if_unheld", async move { scheduled.update_one(filter, doc! { "$set": { "locked": false } }).await }).await?;
        Ok(unlocked.modified_count == 1)
    }

    /// Ends the transactions that a dead process may have left open. They would delay the rescue of its jobs by up to a minute. MongoDB
    /// ends only sessions of this process's MongoDB user, and reports no error for other sessions.
    ///
    /// Index: none. Invariant: none, MongoDB ends these transactions later by itself.
    pub async fn kill_sessions(&self, sessions: &[Document]) -> Result<(), StoreError> {
        if sessions.is_empty() {
            return Ok(());
        }
        let (database, command) = (self.database.clone(), doc! { "killSessions": sessions.to_vec() });
        call("kill_sessions", async move { database.run_command(command).await }).await.map(drop)
    }
}
