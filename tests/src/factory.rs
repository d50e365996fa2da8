//! Documents of any age and shape, as other programs or earlier releases may have written them.

use std::{sync::Arc, time::Duration};

use bson::{Document, doc, oid::ObjectId};
use recruiter_common::{
    FinishReason, JobId, RetryManyTimes, WorkerId,
    ids::StartId,
    instant::Instant,
    job::{Claim, IfWorkerDies, Job},
    store::{Channel, ProcessIdentity, Registration, Start, Store, ToStart, WorkOn},
};

use crate::mongo::TestDatabase;

/// The smallest document that is a job by the contract for other languages. It has been due for a minute.
pub fn minimal_job(class: &str) -> Document {
    doc! {
        "_id": ObjectId::new(),
        "workable": { "class": class },
        "locked": false,
        "group": "generic",
        "priority": 5,
        "scheduled_at": bson::DateTime::from_millis(bson::DateTime::now().timestamp_millis() - 60_000),
    }
}

/// A policy with this many retries, each without a wait.
pub fn again(times: u32) -> RetryManyTimes {
    RetryManyTimes::new(times, Duration::from_millis(50)).expect("a policy")
}

/// Inserts documents without the validator, as a release without a validator would have.
pub async fn insert_unvalidated(database: &TestDatabase, documents: Vec<Document>) {
    let scheduled = database.raw("scheduled");
    scheduled.insert_many(documents).bypass_document_validation(true).await.expect("nothing but the validator would refuse them");
}

/// The registration of a worker in this process.
pub fn announcement(capacity: u32) -> Registration {
    Registration {
        id: WorkerId::new(),
        work_on: WorkOn::All,
        classes: vec!["x".into()],
        policies: vec!["DoNotDoItAgain".into()],
        class_slots: Vec::new(),
        capacity,
        lease_ms: 20_000,
        channel: Channel::default(),
        session: None,
        process: ProcessIdentity::of_this_process().expect("/proc can be read"),
    }
}

/// A start by this worker, now, with a lease of one minute.
pub fn start(store: &Store, worker: WorkerId) -> Start {
    Start {
        id: StartId::new(),
        worker,
        hostname: "test".into(),
        pid: 1,
        lease_until: store.now() + chrono::TimeDelta::minutes(1),
        now: store.now(),
    }
}

/// Reads unlocked jobs.
pub async fn read(store: &Store, ids: &[JobId]) -> Vec<Job> {
    let found = store.unlocked(ids).await.expect("MongoDB is there");
    found.into_iter().map(|job| Arc::unwrap_or_clone(job.expect("the job is well-formed"))).collect()
}

/// The input for a start of these jobs.
pub fn to_start(jobs: &[Job]) -> Vec<ToStart> {
    let decided = |job: &Job| ToStart {
        job: job.id,
        group: job.settings.group().to_owned(),
        attempts: job.attempts,
        due: job.due().expect("a job that waits"),
        if_worker_dies: IfWorkerDies::Archive(FinishReason::WORKER_DIED),
        permit: None,
        conditions: job.into(),
    };
    jobs.iter().map(decided).collect()
}

/// Reads and starts jobs for a worker. Jobs that it did not get are not in the result.
pub async fn started(store: &Store, worker: WorkerId, ids: &[JobId]) -> Vec<(Job, Claim)> {
    let jobs = read(store, ids).await;
    let start = start(store, worker);
    let claims = store.start_if_unlocked(&start, &to_start(&jobs)).await.expect("MongoDB is there");
    let verdict = IfWorkerDies::Archive(FinishReason::WORKER_DIED);
    let with_claim = |mut job: Job| {
        let claim = claims.iter().find(|claim| claim.job() == job.id).copied()?;
        start.mark_started(&mut job, verdict.clone(), None);
        Some((job, claim))
    };
    jobs.into_iter().filter_map(with_claim).collect()
}

/// The instant `ms` milliseconds from now, by the store's clock.
pub fn in_ms(store: &Store, ms: i64) -> Instant {
    store.now() + chrono::TimeDelta::milliseconds(ms)
}
