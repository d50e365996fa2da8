//! Expiry: a job that has not started by then is archived as `expired`, and never starts.

use std::time::Duration;

use bson::{Document, doc};
use chrono::TimeDelta;
use recruiter_common::{
    EnqueueError, Failure, JobId, NewJob, WorkerId,
    instant::Instant,
    store::{CommitSession, Rescheduling, Store},
};
use recruiter_tests::{
    factory::{in_ms, minimal_job, read, start, started, to_start},
    local::prepared,
    mongo::TestDatabase,
    processes::{Process, Setup, System},
    wait::SOON,
};

use super::cli::recruiter;

const HOUR: Duration = Duration::from_secs(3_600);

fn job() -> NewJob {
    NewJob::of_class("noop", doc! {})
}

/// Changes the expiry, as no operation would.
async fn expire_at(database: &TestDatabase, id: JobId, at: Instant) {
    let set = doc! { "$set": { "expires_at": bson::DateTime::from_chrono(at) } };
    database.raw("scheduled").update_one(doc! { "_id": id }, set).await.unwrap();
}

async fn starts(store: &Store, ids: &[JobId]) -> usize {
    let jobs = read(store, ids).await;
    store.start_if_unlocked(&start(store, WorkerId::new()), &to_start(&jobs)).await.unwrap().len()
}

/// No worker takes it: the cleaner archives it. A worker takes it: that worker does.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_expired_job_is_archived_by_a_worker_or_by_a_cleaner() {
    let (database, store) = prepared().await;
    let soon = Duration::from_millis(300);
    let by_cleaner = job().expires_after(soon).enqueue(&store).await.unwrap().id;
    let later = job().after(HOUR).expires_after(HOUR * 2).enqueue(&store).await.unwrap().id;
    let mut cleaner = Process::on(&database, "recruiter-cleaner", &["--sweep-every", "100ms"]);
    database.until("archived", doc! { "_id": by_cleaner, "why": "expired" }, 1, "it is archived").await;
    cleaner.stop().await;
    let archived = database.only("archived", doc! {}).await;
    assert_eq!(archived.get_document("last_execution").unwrap().get_str("class").unwrap(), "expired");
    assert!(!archived.get_bool("done").unwrap() && archived.get_i32("attempts").unwrap() == 0);

    // Enqueued by another language, and expired before any process runs. No cleaner runs.
    // The index is not needed for that.
    database.raw("scheduled").drop_index("expiring_jobs").await.unwrap();
    let mut by_worker = minimal_job("noop");
    by_worker.insert("expires_at", bson::DateTime::from_chrono(store.now()));
    let id = by_worker.get_object_id("_id").unwrap();
    database.raw("scheduled").insert_one(by_worker).await.unwrap();
    let recruiter = Process::on(&database, "recruiter", &["run"]);
    let worker = Process::on(&database, "recruiter-worker", &["--builtins"]);
    database.until("archived", doc! { "_id": id, "why": "expired" }, 1, "it is archived").await;
    assert_eq!(database.count("scheduled", doc! { "_id": later }).await, 1);
    for mut process in [recruiter, worker] {
        process.stop().await;
    }
}

/// Jobs that expire while others run before them.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn of_a_backlog_that_expires_each_job_runs_in_time_or_expires() {
    let (database, store) = prepared().await;
    // On a slow machine all of those that expire soon may expire.
    let expires = |n: u32| if n.is_multiple_of(3) { HOUR } else { Duration::from_secs(3) };
    let jobs = (0..60).map(|n| NewJob::of_class("sleep", doc! { "ms": 100 }).expires_after(expires(n)));
    store.enqueue_many(jobs).await.unwrap();
    let setup = Setup { worker: &["--builtins", "--concurrency", "1"], cleaner: &["--sweep-every", "200ms"], ..Setup::default() };
    let system = System::start(&database, setup);
    database.until("archived", doc! {}, 60, "all are ended").await;
    let in_time = doc! { "why": "done", "$expr": { "$lt": ["$last_execution.started_at", "$expires_at"] } };
    let (done, in_time) = (database.count("archived", doc! { "why": "done" }).await, database.count("archived", in_time).await);
    let expired = database.count("archived", doc! { "why": "expired", "attempts": 0 }).await;
    assert!(done >= 20 && done == in_time && done + expired == 60, "{done} done, {in_time} in time, {expired} expired");
    system.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_retry_expires_with_its_history() {
    let (database, store) = prepared().await;
    let id = job().expires_after(HOUR).enqueue(&store).await.unwrap().id;
    let (held, claim) = started(&store, WorkerId::new(), &[id]).await.remove(0);
    let execution = held.last_execution.clone().unwrap().ended(store.now(), Some(&Failure::new("SmtpDown", "x")));
    let retry = Rescheduling::retry(&held, claim, &execution, in_ms(&store, 3_600_000), true);
    drop(store.finish(&mut CommitSession::default(), &[retry]).await.unwrap());
    expire_at(&database, id, store.now() - TimeDelta::milliseconds(1)).await;
    assert_eq!(starts(&store, &[id]).await, 0);
    let mut cleaner = Process::on(&database, "recruiter-cleaner", &[]);
    database.until("archived", doc! { "_id": id, "why": "expired" }, 1, "it is archived").await;
    cleaner.terminate();
    cleaner.wait_exit(SOON).await;
    let archived = database.only("archived", doc! {}).await;
    let first: &Document = archived.get_array("executions").unwrap()[0].as_document().unwrap();
    assert_eq!((first.get_str("class").unwrap(), archived.get_i32("attempts").unwrap()), ("SmtpDown", 1));
    // It is a dead letter. Its retry does not expire at once.
    recruiter(&database, &["jobs", "retry", "--why", "expired", "--yes"]).succeeded();
    assert!(!database.only("scheduled", doc! {}).await.contains_key("expires_at"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_expiry_that_cannot_be_is_refused() {
    let (database, store) = prepared().await;
    let now = store.now();
    for early in
        [job().at(now).expires_at(now), job().expires_after(Duration::ZERO), job().after(HOUR).expires_after(HOUR), job().expires_at(now)]
    {
        assert!(matches!(early.enqueue(&store).await, Err(EnqueueError::ExpiresTooEarly)));
    }
    assert!(matches!(job().expires_at(Instant::MAX_UTC).enqueue(&store).await, Err(EnqueueError::ExpiryDate)));
    for (args, part) in [
        (["--expires-after", "1h", "--after", "2h"], "expire before it is due"),
        (["--expires-at", "2001-01-01T00:00:00Z", "--group", "g"], "expire before it is due"),
        (["--expires-after", "1h", "--expires-at", "2030-01-01T00:00:00Z"], "cannot be used with"),
        (["--expires-at", "noon", "--group", "g"], "is not an instant"),
    ] {
        let said = recruiter(&database, &[&["enqueue", "--class", "c"], args.as_slice()].concat());
        assert!(said.code == 2 && said.err.contains(part), "{}", said.err);
    }
    assert_eq!(database.count("scheduled", doc! {}).await, 0);
    recruiter(&database, &["enqueue", "--class", "c", "--expires-after", "1h"]).succeeded();
    let stored = database.only("scheduled", doc! {}).await.get_datetime("expires_at").unwrap().to_chrono();
    assert!((stored - store.now()).num_minutes() >= 58);
}
