//! Which worker gets which job: all their share, and none is idle while there is something that it can do.

use std::time::Duration;

use bson::{Document, doc};
use futures_util::TryStreamExt;
use recruiter_common::enqueue::NewJob;
use recruiter_tests::{
    local::{ids, store},
    mongo::TestDatabase,
    oracle::number,
    processes::{Process, Setup, System},
    wait::wait_until,
};

const SOON: Duration = Duration::from_secs(20);

fn sleep(ms: i64) -> NewJob {
    NewJob::of_class("sleep", doc! { "ms": ms })
}

async fn count(database: &TestDatabase, collection: &str, filter: Document) -> u64 {
    database.raw(collection).count_documents(filter).await.unwrap()
}

#[tokio::test]
async fn work_spreads_over_workers_of_equal_capacity() {
    let database = TestDatabase::new().await;
    let system = System::start(&database, Setup { workers: 2, ..Setup::default() });
    let store = store(&database).await;
    wait_until(SOON, "both are there", async || count(&database, "roster", doc! { "available": true, "term": { "$gt": 0 } }).await == 2)
        .await;
    store.enqueue_many((0..1_000).map(|_| sleep(10))).await.unwrap();
    wait_until(SOON, "all is done", async || count(&database, "archived", doc! {}).await == 1_000).await;
    let group = [doc! { "$group": { "_id": "$last_execution.worker", "jobs": { "$sum": 1 } } }];
    let shares: Vec<Document> = database.raw("archived").aggregate(group).await.unwrap().try_collect().await.unwrap();
    assert_eq!(shares.len(), 2);
    assert!(shares.iter().all(|share| (400..=600).contains(&number(share, "jobs"))), "{shares:?}");
    system.stop().await;
}

/// I7: a class with a long backlog does not keep another class's workers idle.
#[tokio::test]
async fn a_backlog_of_one_class_leaves_the_others_their_workers() {
    let database = TestDatabase::new().await;
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("workables.toml");
    std::fs::write(&config, "[workables.other]\ncommand = [\"true\"]\n").unwrap();
    let store = store(&database).await;
    let mut system = System::start(&database, Setup { worker: &["--builtins", "--concurrency", "1"], ..Setup::default() });
    store.enqueue_many((0..3_000).map(|_| sleep(50))).await.unwrap();
    wait_until(SOON, "one is running", async || count(&database, "scheduled", doc! { "locked": true }).await == 1).await;
    let other = ["--config", config.to_str().unwrap(), "--concurrency", "50"];
    system.workers.push(Process::on(&database, "recruiter-worker", &other));
    let others = ids(store.enqueue_many((0..20).map(|_| NewJob::of_class("other", doc! {}))).await.unwrap());
    let done = doc! { "_id": { "$in": others }, "why": "done" };
    wait_until(SOON, "the others are done", async || count(&database, "archived", done.clone()).await == 20).await;
    assert!(count(&database, "scheduled", doc! {}).await > 1_000, "the backlog was still there");
    system.stop().await;
}
