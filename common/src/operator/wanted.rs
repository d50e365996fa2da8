//! What operators want of workers: three fields of the roster document that only operators write.
//!
//! [`workers`](crate::operator::workers) decides, and this file writes. Neither the recruiter's nor the worker's own writes touch these fields, so an
//! operator needs no turn.

use bson::doc;
use mongodb::options::ReadConcern;

use crate::{
    base::WorkerId,
    mongo::{Store, StoreError, any_worker, call, readable},
    roster::{Request, Wanted},
};

impl Store {
    /// Writes what is wanted of a worker. Returns whether it was written.
    ///
    /// Filter: id, a worker's, not retired, not wanted before, and not to stop. Index: `_id`. Invariant: a worker that was stopped stays so.
    /// Loses when the worker left or was retired, or when another operator was first.
    pub async fn ask_worker(&self, worker: WorkerId, wanted: Wanted, by: &str) -> Result<bool, StoreError> {
        let roster = self.roster.clone();
        let not_yet = doc! { "$nin": [wanted.as_str(), Wanted::Stop.as_str()] };
        let filter = doc! { "_id": worker, "retired": { "$ne": true }, "wanted": not_yet, "$and": [any_worker()] };
        let update = doc! { "$set": { "wanted": wanted.as_str(), "wanted_by": by, "wanted_at": self.now() } };
        let written = call("ask_worker", async move { roster.update_one(filter, update).await }).await?;
        Ok(written.matched_count == 1)
    }

    /// Lets a quiet worker take jobs again. Returns whether it was quiet.
    ///
    /// Filter: id, a worker's, not retired, quiet. Index: `_id`. Invariant: a worker that was stopped stays so.
    pub async fn resume_if_quiet(&self, worker: WorkerId) -> Result<bool, StoreError> {
        let roster = self.roster.clone();
        let filter = doc! { "_id": worker, "retired": { "$ne": true }, "wanted": Wanted::Quiet.as_str(), "$and": [any_worker()] };
        let update = doc! { "$unset": { "wanted": "", "wanted_by": "", "wanted_at": "" } };
        let written = call("resume_if_quiet", async move { roster.update_one(filter, update).await }).await?;
        Ok(written.matched_count == 1)
    }

    /// What is wanted of a worker, for the worker itself after a hint.
    ///
    /// Filter: id. Index: `_id`. Invariant: none, a heartbeat reads the same.
    pub async fn wanted(&self, worker: WorkerId) -> Result<Option<Request>, StoreError> {
        let roster = self.roster_as_it_is();
        let found = call("wanted", async move {
            let fields = doc! { "wanted": 1, "wanted_by": 1, "wanted_at": 1 };
            roster.find_one(doc! { "_id": worker }).projection(fields).read_concern(ReadConcern::local()).await
        })
        .await?;
        Ok(found.and_then(|worker| Request::of(&readable(&worker))))
    }
}
