//! Waiting for the result of a job: in every state of the job, with and without hints.

use std::time::Duration;

use bson::doc;
use recruiter_common::{JobId, Keep, NewJob, RetryManyTimes, WaitError, Workable, store::Store};
use recruiter_tests::{
    fail_points::FailPoint,
    local::{self, Local, prepared},
    mongo::TestDatabase,
    wait::{SOON, Stopwatch, best_of_three, wait_until},
    workable,
};
use recruiter_worker::{Context, Executable, NotDone, Worker};
use serde::{Deserialize, Serialize};

use super::cli::{Said, recruiter as command, spawn};

/// Doubles a number, after some failures.
#[derive(Serialize, Deserialize)]
struct Double {
    number: i64,
    failures: u32,
    takes_ms: u64,
}
workable!(Double -> i64);

impl Executable for Double {
    type State = ();

    async fn execute(&self, (): &(), job: &Context) -> Result<i64, NotDone> {
        recruiter_common::shutdown::pause(Duration::from_millis(self.takes_ms)).await;
        if job.retries() < self.failures {
            return Err(NotDone::Failed(recruiter_common::Failure::new("planned", "not yet").with_trace("here")));
        }
        Ok(self.number * 2)
    }
}

fn double(number: i64) -> NewJob {
    failing(number, 0)
}

fn failing(number: i64, failures: u32) -> NewJob {
    Double { number, failures, takes_ms: 20 }.as_job()
}

struct Running {
    database: TestDatabase,
    store: Store,
    processes: [Local; 2],
}

impl Running {
    async fn new() -> Self {
        let (database, store) = prepared().await;
        let processes = Local::pair(&database, &[], Worker::new().register::<Double>(()).unwrap(), &[]);
        Self { database, store, processes }
    }

    async fn stop(self) {
        local::stop(self.processes).await;
    }
}

#[tokio::test]
async fn a_wait_returns_the_result_or_names_the_end() {
    let running = Running::new().await;
    let store = &running.store;
    let done = double(21).enqueue(store).await.unwrap();
    assert_eq!(done.wait::<Double>(store, SOON).await.unwrap(), 42);
    assert_eq!(store.wait_for::<Double>(done.id, SOON).await.unwrap(), 42, "it is archived already");
    let retry = RetryManyTimes::new(5, Duration::from_millis(300)).unwrap();
    let retried = failing(4, 3).retry(&retry).enqueue(store).await.unwrap();
    assert_eq!(retried.wait::<Double>(store, SOON).await.unwrap(), 8, "it was retried in between");
    let failed = failing(1, 1).enqueue(store).await.unwrap().wait::<Double>(store, SOON).await.unwrap_err();
    let WaitError::Failed { why, failure: Some(failure), .. } = failed else { panic!("{failed:?}") };
    assert_eq!((why.as_str(), failure.class.as_str(), failure.message.as_str()), ("not-scheduled-by-retry-policy", "planned", "not yet"));
    assert_eq!(failure.trace.as_deref(), Some("here"));
    let fleeting = double(1).keep(Keep::Failures).after(Duration::from_millis(300)).enqueue(store).await.unwrap();
    let gone = fleeting.wait::<Double>(store, SOON).await.unwrap_err();
    assert!(matches!(gone, WaitError::NotKept { job } if job == fleeting.id), "{gone:?}");
    for (keep, is_followed) in [(Keep::All, false), (Keep::Failures, true)] {
        let is_gone = async || {
            let deleted = double(1).keep(keep).after(Duration::from_secs(3_600)).enqueue(store).await.unwrap();
            let (scheduled, this) = (running.database.raw("scheduled"), doc! { "_id": deleted.id });
            scheduled.update_one(this.clone(), doc! { "$set": { "followed": is_followed } }).await.unwrap();
            let deletes = async {
                recruiter_common::shutdown::pause(Duration::from_millis(500)).await;
                scheduled.delete_one(this).await.unwrap();
            };
            let (gone, ()) = tokio::join!(deleted.wait::<Double>(store, SOON), deletes);
            // On a slow machine it may be deleted before the wait has seen it.
            assert!(matches!(gone, Err(WaitError::Gone { job } | WaitError::Unknown { job }) if job == deleted.id), "{gone:?}");
            matches!(gone, Err(WaitError::Gone { .. }))
        };
        wait_until(SOON, "a wait sees its job and then its deletion", is_gone).await;
    }
    let unknown = store.wait_for::<Double>(JobId::new(), SOON).await.unwrap_err();
    assert!(matches!(unknown, WaitError::Unknown { .. }), "{unknown:?}");
    let later = double(1).after(Duration::from_secs(3_600)).enqueue(store).await.unwrap();
    let late = later.wait::<Double>(store, Duration::from_millis(200)).await.unwrap_err();
    assert!(matches!(late, WaitError::TimedOut { .. }), "{late:?}");
    assert!(matches!(store.wait_for::<Double>(later.id, Duration::ZERO).await, Err(WaitError::TimedOut { .. })));
    let waits = later.wait::<Double>(store, Duration::MAX);
    let cancels = async {
        recruiter_common::shutdown::pause(Duration::from_millis(200)).await;
        command_in_thread(&running.database, &["jobs", "cancel", &later.id.to_string(), "--yes"]).await
    };
    let (cancelled, said) = tokio::join!(waits, cancels);
    assert_eq!(said.code, 0, "{}", said.err);
    assert!(matches!(&cancelled, Err(WaitError::Failed { why, .. }) if why.as_str() == "cancelled"), "{cancelled:?}");
    running.stop().await;
}

/// As in a failover that takes longer than the driver's own repetitions.
#[tokio::test]
async fn a_wait_goes_on_while_its_job_cannot_be_read() {
    let (database, store) = prepared().await;
    let job = double(1).enqueue(&store).await.unwrap().id;
    let waiting = tokio::spawn({
        let store = store.clone();
        async move { store.wait_for_end(job, SOON).await }
    });
    // Its host is unreachable.
    let unreadable = FailPoint::new("test", &["find"]).namespace(database.name(), "archived").error_code(6).arm(database.uri()).await;
    command_in_thread(&database, &["jobs", "cancel", &job.to_string(), "--yes"]).await.succeeded();
    wait_until(SOON, "it tries again", async || unreadable.struck().await > 10 || waiting.is_finished()).await;
    assert!(!waiting.is_finished(), "{:?}", waiting.await);
    drop(unreadable);
    assert!(waiting.await.unwrap().unwrap().is_archived);
}

/// A command while this task goes on.
async fn command_in_thread(database: &TestDatabase, args: &[&str]) -> Said {
    let child = spawn(database, args);
    tokio::task::spawn_blocking(move || Said::of(child.wait_with_output().unwrap())).await.unwrap()
}

/// The end is known by a hint: much sooner than the next look.
#[tokio::test]
async fn hints_end_waits_and_without_them_looks_do() {
    let running = Running::new().await;
    let store = &running.store;
    assert_eq!(double(1).enqueue(store).await.unwrap().wait::<Double>(store, SOON).await.unwrap(), 2);
    // Until every process knows of the waiter.
    recruiter_common::shutdown::pause(Duration::from_millis(2_600)).await;
    let median = async || {
        let mut waits = Vec::new();
        for number in 0..11 {
            let job = Double { number, failures: 0, takes_ms: 100 }.as_job().enqueue(store).await.unwrap();
            let began = Stopwatch::start();
            assert_eq!(job.wait::<Double>(store, SOON).await.unwrap(), number * 2);
            waits.push(began.elapsed());
        }
        waits.sort_unstable();
        waits[5]
    };
    best_of_three(Duration::from_millis(1_500), "the median of the waits", median).await;
    let hints = async || running.database.count("events", doc! { "ended": { "$exists": true } }).await;
    assert!(hints().await >= 11);
    let is_looked_for = async || {
        // No process publishes any more, until the subscription is renewed.
        running.database.raw("metadata").delete_one(doc! { "_id": "subscribers" }).await.unwrap();
        recruiter_common::shutdown::pause(Duration::from_millis(1_500)).await;
        let before = hints().await;
        let job = Double { number: 7, failures: 0, takes_ms: 300 }.as_job().enqueue(store).await.unwrap();
        assert_eq!(job.wait::<Double>(store, SOON).await.unwrap(), 14);
        hints().await == before
    };
    wait_until(SOON, "a wait ends without a hint", is_looked_for).await;
    running.stop().await;
}

/// Also after the ring was dropped, and made an ordinary collection by an insert.
#[tokio::test]
async fn a_dropped_ring_loses_no_wait() {
    let running = Running::new().await;
    let store = &running.store;
    assert_eq!(double(1).enqueue(store).await.unwrap().wait::<Double>(store, SOON).await.unwrap(), 2);
    for number in 0..3 {
        running.database.raw("events").drop().await.unwrap();
        running
            .database
            .raw("events")
            .insert_one(doc! { "at": bson::Timestamp { time: 0, increment: 0 }, "by": bson::oid::ObjectId::new() })
            .await
            .unwrap();
        let job = Double { number, failures: 0, takes_ms: 500 }.as_job().enqueue(store).await.unwrap();
        assert_eq!(job.wait::<Double>(store, SOON).await.unwrap(), number * 2);
    }
    running.stop().await;
}

/// The application has a collection of its own under the name of the ring.
#[tokio::test]
async fn a_collection_of_the_application_is_left_alone() {
    let running = Running::new().await;
    let (store, events) = (&running.store, running.database.raw("events"));
    // Its processes have started: afterwards they are refused.
    double(3).enqueue(store).await.unwrap();
    let archived = running.database.raw("archived");
    let is_done = async || archived.count_documents(doc! {}).await.unwrap() == 1;
    recruiter_tests::wait::wait_until(SOON, "a job is done", is_done).await;
    events.insert_one(doc! { "title": "Concert" }).await.unwrap();
    assert_eq!(double(1).enqueue(store).await.unwrap().wait::<Double>(store, SOON).await.unwrap(), 2);
    let refused = store.events([recruiter_common::Pattern::new("*").unwrap()], None).await.unwrap_err();
    assert!(refused.to_string().contains("`events`"), "{refused}");
    recruiter_common::shutdown::pause(Duration::from_millis(1_500)).await;
    assert_eq!(double(2).enqueue(store).await.unwrap().wait::<Double>(store, SOON).await.unwrap(), 4);
    assert_eq!(events.count_documents(doc! {}).await.unwrap(), 1, "nothing was added");
    assert_eq!(events.count_documents(doc! { "title": "Concert" }).await.unwrap(), 1);
    running.stop().await;
}

#[tokio::test]
async fn jobs_without_waiters_publish_nothing() {
    let running = Running::new().await;
    let jobs: Vec<NewJob> = (0..50).map(double).collect();
    running.store.enqueue_many(jobs).await.unwrap();
    wait_until(SOON, "they are done", async || running.store.archived_count().await.unwrap() == 50).await;
    let collections = running.database.database().list_collection_names().await.unwrap();
    assert!(!collections.contains(&"events".to_owned()), "{collections:?}");
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_ends_with_the_end_of_the_job() {
    let running = Running::new().await;
    let database = &running.database;
    let parameters = |failures: u32| serde_json::json!({ "number": 4, "failures": failures, "takes_ms": 300 }).to_string();
    let enqueue = |failures: u32, more: &[&str]| {
        let parameters = parameters(failures);
        command(database, &[&["enqueue", "--class", "Double", "--parameters", &parameters, "--wait"], more].concat())
    };
    let said = enqueue(0, &[]);
    assert_eq!((said.code, said.out.as_str()), (0, "8\n"), "{}", said.err);
    let said = enqueue(0, &["--json"]);
    assert!(said.objects()[0]["result"] == 8 && said.objects()[0]["state"] == "done", "{}", said.out);
    let id = said.objects()[0]["id"].as_str().unwrap().to_owned();
    let said = enqueue(1, &["--json"]);
    assert_eq!(said.code, 3, "{}", said.err);
    assert!(said.out.contains("planned") && said.err.contains("not yet"), "{} {}", said.out, said.err);
    assert!(said.out.contains(r#""state":"failed""#), "{}", said.out);
    let said = enqueue(0, &["--timeout", "1s", "--after", "1h"]);
    assert_eq!(said.code, 124, "{}", said.err);
    let said = enqueue(0, &["--keep", "failures"]);
    assert_eq!((said.code, said.out.as_str()), (0, ""), "{}", said.err);
    assert!(said.err.contains("nothing of it is kept"), "{}", said.err);
    assert_eq!(command(database, &["jobs", "wait", &id]).out, "8\n");
    let said = command(database, &["jobs", "wait", &JobId::new().to_string()]);
    assert!(said.code == 1 && said.err.contains("there is no job"), "{}", said.err);
    running.stop().await;
}
