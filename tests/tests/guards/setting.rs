//! A database of its own for each test, the documents in it, and the inputs of the operations.

use std::{collections::BTreeSet, time::Duration};

use bson::{Bson, Document, doc};
use recruiter_common::{
    Failure, FinishReason, JobId, Keep, NewJob, Unique, WorkerId,
    ids::{LeaseTerm, RoundId},
    instant::Instant,
    job::{Claim, Job},
    store::{Archival, AssignedJobs, CommitSession, Ending, Offer, Planned, Recorded, Rescheduling, Store},
};
use recruiter_tests::{
    factory::{announcement, started},
    local::{self, store},
    mongo::TestDatabase,
};

pub(crate) use recruiter_tests::wait::SOON;
pub(crate) const HOUR: Duration = Duration::from_secs(3_600);

/// The term in which workers become available while no recruiter leads.
pub(crate) const TERM: LeaseTerm = LeaseTerm(0);

pub(crate) struct Setting {
    pub(crate) database: TestDatabase,
    pub(crate) store: Store,
}

impl Setting {
    pub(crate) async fn new() -> Self {
        let database = TestDatabase::new().await;
        Self { store: store(&database).await, database }
    }

    /// Due jobs.
    pub(crate) async fn jobs<const COUNT: usize>(&self) -> [JobId; COUNT] {
        let jobs = (0..COUNT).map(|_| NewJob::of_class("x", doc! {}));
        local::ids(self.store.enqueue_many(jobs).await.unwrap()).try_into().unwrap()
    }

    /// Due jobs of which nothing is kept if they succeed.
    pub(crate) async fn fleeting<const COUNT: usize>(&self) -> [JobId; COUNT] {
        let jobs = (0..COUNT).map(|_| NewJob::of_class("x", doc! {}).keep(Keep::Failures));
        local::ids(self.store.enqueue_many(jobs).await.unwrap()).try_into().unwrap()
    }

    /// Starts these jobs together; in their order.
    pub(crate) async fn start<const COUNT: usize>(&self, worker: WorkerId, jobs: [JobId; COUNT]) -> [(Job, Claim); COUNT] {
        let held = started(&self.store, worker, &jobs).await;
        jobs.map(|id| held.iter().find(|(job, _)| job.id == id).cloned().unwrap())
    }

    /// Changes a document as no operation would.
    pub(crate) async fn set(&self, collection: &str, id: impl Into<Bson>, set: Document) {
        let changed = self
            .database
            .raw(collection)
            .update_one(doc! { "_id": id.into() }, doc! { "$set": set })
            .bypass_document_validation(true)
            .await
            .unwrap();
        assert_eq!(changed.matched_count, 1);
    }

    pub(crate) async fn found(&self, collection: &str, id: impl Into<Bson>) -> Option<Document> {
        self.database.raw(collection).find_one(doc! { "_id": id.into() }).await.unwrap()
    }

    /// A job that is there.
    pub(crate) async fn scheduled(&self, id: JobId) -> Document {
        self.found("scheduled", id).await.unwrap()
    }

    pub(crate) async fn count(&self, collection: &str, filter: Document) -> u64 {
        self.database.raw(collection).count_documents(filter).await.unwrap()
    }

    /// A worker with free slots.
    pub(crate) async fn worker(&self, slots: u32) -> WorkerId {
        let announcement = announcement(10);
        self.store.register(&announcement).await.unwrap();
        assert!(self.store.make_available(announcement.id, slots).await.unwrap());
        announcement.id
    }

    /// One of the worker's own jobs for it, in a round that it is told.
    pub(crate) async fn assign(&self, worker: WorkerId) -> (RoundId, Vec<JobId>) {
        let (round, given) = (RoundId::new(), give(worker, 1));
        assert_eq!(self.store.assign_if_available(TERM, round, std::slice::from_ref(&given)).await.unwrap(), [worker]);
        (round, given.assignment.jobs)
    }

    pub(crate) async fn archive(&self, batch: &[Archival]) -> Vec<Recorded> {
        let mut session = CommitSession::default();
        self.store.archive(&mut session, batch).await.unwrap()
    }

    pub(crate) fn done(&self, (job, claim): &(Job, Claim)) -> Archival {
        let execution = job.last_execution.clone().unwrap().ended(self.store.now(), None);
        Archival::ended(job, *claim, Ending::new(execution, FinishReason::DONE))
    }

    pub(crate) fn retry(&self, (job, claim): &(Job, Claim), at: Instant) -> Rescheduling {
        let execution = job.last_execution.clone().unwrap().ended(self.store.now(), Some(&Failure::new("x", "")));
        Rescheduling::retry(job, *claim, &execution, at, true)
    }

    pub(crate) async fn reschedule(&self, batch: &[Rescheduling]) -> Vec<Recorded> {
        self.store.reschedule_if_claimed(batch).await.unwrap()
    }
}

pub(crate) fn give(worker: WorkerId, count: usize) -> Planned {
    Planned::for_slots(AssignedJobs::new(worker, (0..count).map(|_| JobId::new()).collect()))
}

pub(crate) fn free(slots: u32, working_on: &[JobId]) -> Offer {
    Offer { slots, working_on: working_on.to_vec(), ..Offer::default() }
}

pub(crate) fn keyed(unique: Unique) -> NewJob {
    NewJob::of_class("x", doc! {}).unique(unique)
}

pub(crate) fn set_of<T: Ord>(all: impl IntoIterator<Item = T>) -> BTreeSet<T> {
    all.into_iter().collect()
}

pub(crate) fn date(at: Instant) -> bson::DateTime {
    bson::DateTime::from_chrono(at)
}
