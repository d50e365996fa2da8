//! Assignments of jobs to workers, and of the permits of limited jobs: the part of `roster` that the recruiter writes.

use bson::{Bson, Document, RawDocumentBuf, doc};
use futures_util::TryStreamExt;
use mongodb::options::ReadConcern;

use super::roster::worker_of;
use crate::{
    base::{JobId, LeaseTerm, RoundId, WorkerId},
    hints::AssignedJobs,
    mongo::{Store, StoreError, call},
    roster,
    roster::PermitHolder,
};

/// Maximum number of job ids in one piece of the assignment map. A single map for all workers would be written into
/// each of their documents, which is quadratic. One map per worker would need one statement per worker. Measured: 64
/// avoids both costs.
const IDS_PER_PIECE: usize = 64;

/// The assignment of one round to one worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The worker and its jobs.
    pub assignment: AssignedJobs,
    /// How many of the jobs are for free slots. The others are ahead.
    pub for_slots: usize,
}

impl Planned {
    /// An assignment to free slots alone.
    pub fn for_slots(assignment: AssignedJobs) -> Self {
        Self { for_slots: assignment.jobs.len(), assignment }
    }

    fn worker(&self) -> WorkerId {
        self.assignment.worker
    }

    /// The names of the permits that it grants.
    fn granted(&self) -> impl Iterator<Item = &str> {
        self.assignment.permits.values().flat_map(|permit| &permit.names).map(String::as_str)
    }

    fn grants_permits(&self) -> bool {
        self.granted().next().is_some()
    }
}

impl Store {
    /// Assigns jobs to available workers in one command. Returns the workers whose assignment was written.
    ///
    /// Acknowledged by the primary only. If a failover rolls an assignment back, its jobs are still unlocked and due. If permits are granted,
    /// a majority acknowledges the command: a worker must not run a job with a permit that a failover takes back.
    /// Filter: available, this leader's term, room for the jobs, in free slots and ahead, and none of the permits held. Update: `available: false`, the
    /// map from workers to jobs, the round, the permits. Index: `_id`; `held_permits` refuses a permit that another worker holds. Invariant:
    /// single writer by turn.
    /// Loses when the worker withdrew or was retired, when a new leader took over, or when a worker holds one of the permits, this one included.
    pub async fn assign_if_available(&self, term: LeaseTerm, round: RoundId, planned: &[Planned]) -> Result<Vec<WorkerId>, StoreError> {
        let now = self.now();
        let statement = |piece: &[Planned]| {
            let map: Document = piece.iter().map(|given| (given.worker().to_string(), Bson::from(given.assignment.jobs.clone()))).collect();
            let any: Vec<Document> = piece.iter().map(|planned| has_room(planned.worker(), planned)).collect();
            let mut set = doc! { "available": false, "assigned_to": map, "assigned_since": now, "round": round };
            let permits = roster::permits_to_document(piece.iter().flat_map(|planned| &planned.assignment.permits));
            set.extend(permits.map(|permits| (roster::GRANTS.to_owned(), permits.into())));
            let mut update = doc! { "$set": set };
            // Only a piece of one worker has them.
            let granted: Vec<&str> = piece.iter().flat_map(Planned::granted).collect();
            if !granted.is_empty() {
                update.insert("$push", doc! { "held_permits": { "$each": granted } });
            }
            doc! {
                "q": { "available": true, "term": term, "retired": { "$ne": true }, "$or": any },
                "u": update,
                "multi": true,
            }
        };
        let grants_permits = planned.iter().any(Planned::grants_permits);
        let command = doc! {
            "update": self.roster.name(),
            "updates": pieces(planned).map(statement).collect::<Vec<_>>(),
            "ordered": false,
            "writeConcern": if grants_permits { doc! { "w": "majority", "j": true } } else { doc! { "w": 1 } },
        };
        match self.write("assign_if_available", command).await {
            // Another worker holds one of the permits. The statements of the other workers were executed.
            Err(error) if grants_permits && error.is_duplicate() => {}
            Ok(written) if written == planned.len() => return Ok(planned.iter().map(Planned::worker).collect()),
            written => _ = written?,
        }
        let roster = self.roster_as_it_is();
        let found: Vec<RawDocumentBuf> = call("assigned_in", async move {
            roster.find(doc! { "round": round }).projection(doc! { "_id": 1 }).read_concern(ReadConcern::local()).await?.try_collect().await
        })
        .await?;
        Ok(found.iter().filter_map(|document| worker_of(document)).collect())
    }

    /// Assignments in the roster that are not taken yet, with their rounds, for a new leader. They are in the order in which they were made,
    /// by the server's clock: the clocks of the processes that have numbered the rounds may differ.
    ///
    /// Filter: not available, assigned. Index: none, the roster is small. Invariant: none, a missed assignment is harmless.
    pub async fn assigned_and_not_taken(&self) -> Result<Vec<(RoundId, AssignedJobs)>, StoreError> {
        let roster = self.roster_as_it_is();
        let filter = doc! { "available": false, "assigned_to": { "$exists": true }, "retired": { "$ne": true } };
        let found: Vec<RawDocumentBuf> = call("assigned_and_not_taken", async move {
            let assigned = roster.find(filter).sort(doc! { "assigned_since": 1 }).read_concern(ReadConcern::local());
            assigned.await?.try_collect().await
        })
        .await?;
        let not_taken = |document: &RawDocumentBuf| {
            let (worker, document) = (worker_of(document)?, roster::legible(document));
            let assigned = roster::assignment_in(worker, &document)?;
            let working_on = roster::ids_in(document.get("working_on"));
            let jobs: Vec<JobId> = assigned.jobs.into_iter().filter(|job| !working_on.contains(job)).collect();
            let permits = assigned.permits.into_iter().filter(|(job, _)| jobs.contains(job)).collect();
            Some((assigned.round, AssignedJobs { worker, jobs, permits }))
        };
        Ok(found.iter().filter_map(not_taken).collect())
    }

    /// The workers that hold permits, retired ones included: a cleaner deletes the document of such a worker after its jobs.
    ///
    /// Filter: any permit. Index: none, the roster is small. Invariant: none, the index `held_permits` refuses a permit twice.
    pub async fn permit_holders(&self) -> Result<Vec<PermitHolder>, StoreError> {
        let roster = self.roster_as_it_is();
        let filter = doc! { "held_permits.0": { "$exists": true } };
        let found: Vec<RawDocumentBuf> = call("permit_holders", async move {
            let holders = roster.find(filter).projection(doc! { "held_permits": 1, "working_on": 1 });
            holders.batch_size(10_000).read_concern(ReadConcern::local()).await?.try_collect().await
        })
        .await?;
        Ok(found.iter().filter_map(|document| PermitHolder::read(document)).collect())
    }

    /// Writes which permits a worker still holds, while it ends and reports no more.
    ///
    /// Filter: id. Index: `_id`; the names were in the document before. Invariant: none, a permit that is not returned is free when the
    /// document is deleted.
    pub async fn hold_permits(&self, worker: WorkerId, names: &[String]) -> Result<(), StoreError> {
        let (roster, update) = (self.roster.clone(), doc! { "$set": { "held_permits": names.to_vec() } });
        call("hold_permits", async move { roster.update_one(doc! { "_id": worker }, update).await }).await.map(drop)
    }
}

/// The condition that a worker has room for the jobs, and does not hold their permits yet.
fn has_room(worker: WorkerId, planned: &Planned) -> Document {
    let count = |count: usize| doc! { "$gte": i64::try_from(count).unwrap_or(i64::MAX) };
    let mut filter = doc! { "_id": worker, "free": count(planned.for_slots) };
    let ahead = planned.assignment.jobs.len() - planned.for_slots;
    if ahead > 0 {
        filter.insert("prefetch", count(ahead));
    }
    if planned.grants_permits() {
        // A late command. The index does not refuse a name that a document has twice.
        filter.insert("held_permits", doc! { "$nin": planned.granted().collect::<Vec<_>>() });
    }
    filter
}

/// Cuts assignments into pieces of at most [`IDS_PER_PIECE`] job ids. An assignment with more, or with permits, is a piece of its own.
fn pieces(planned: &[Planned]) -> impl Iterator<Item = &[Planned]> {
    let mut rest = planned;
    std::iter::from_fn(move || {
        let mut ids = 0;
        let fits = rest
            .iter()
            .take_while(|given| {
                ids += if given.grants_permits() { IDS_PER_PIECE + 1 } else { given.assignment.jobs.len() };
                ids <= IDS_PER_PIECE
            })
            .count();
        let (piece, left) = rest.split_at(fits.max(1).min(rest.len()));
        rest = left;
        (!piece.is_empty()).then_some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_is_cut_by_the_number_of_job_ids() {
        let check = |sizes: &[usize], expected: &[usize]| {
            let jobs = |size: &usize| (0..*size).map(|_| JobId::new()).collect();
            let given = |size| Planned::for_slots(AssignedJobs::new(WorkerId::new(), jobs(size)));
            let given: Vec<Planned> = sizes.iter().map(given).collect();
            assert_eq!(pieces(&given).map(<[Planned]>::len).collect::<Vec<_>>(), expected, "{sizes:?}");
        };
        check(&[], &[]);
        check(&[1; 64], &[64]);
        check(&[1; 130], &[64, 64, 2]);
        check(&[1000, 1000], &[1, 1]);
        check(&[40, 40, 24, 1], &[1, 2, 1]);
    }
}
