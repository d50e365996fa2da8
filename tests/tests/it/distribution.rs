//! Which worker gets which job: all their share, and none is idle while there is something that it can do.

use bson::{Document, doc};
use futures_util::TryStreamExt;
use recruiter_common::NewJob;
use recruiter_tests::{
    local::{ids, prepared},
    oracle::number,
    processes::{Process, Setup, System},
    wait::{SOON, within},
};

fn sleep(ms: i64) -> NewJob {
    NewJob::of_class("sleep", doc! { "ms": ms })
}

#[tokio::test]
async fn work_spreads_over_workers_of_equal_capacity() {
    let (database, store) = prepared().await;
    let system = System::start(&database, Setup { workers: 2, ..Setup::default() });
    database.until("roster", doc! { "available": true, "term": { "$gt": 0 } }, 2, "both are there").await;
    let mut shares: Vec<Document> = Vec::new();
    // A worker that gets too little of a busy machine does fewer jobs: then they are enqueued again.
    let even = async || {
        database.raw("archived").delete_many(doc! {}).await.unwrap();
        store.enqueue_many((0..1_000).map(|_| sleep(10))).await.unwrap();
        database.until("archived", doc! {}, 1_000, "all is done").await;
        let group = [doc! { "$group": { "_id": "$last_execution.worker", "jobs": { "$sum": 1 } } }];
        shares = database.raw("archived").aggregate(group).await.unwrap().try_collect().await.unwrap();
        shares.len() == 2 && shares.iter().all(|share| (400..=600).contains(&number(share, "jobs")))
    };
    assert!(within(SOON, even).await, "{shares:?}");
    system.stop().await;
}

/// I7: a class with a long backlog does not keep another class's workers idle.
#[tokio::test]
async fn a_backlog_of_one_class_leaves_the_others_their_workers() {
    let ((database, store), directory) = (prepared().await, tempfile::tempdir().unwrap());
    let config = directory.path().join("workables.toml");
    std::fs::write(&config, "[workables.other]\ncommand = [\"true\"]\n").unwrap();
    let mut system = System::start(&database, Setup { worker: &["--builtins", "--concurrency", "1", "--grace", "1s"], ..Setup::default() });
    store.enqueue_many((0..3_000).map(|_| sleep(600_000))).await.unwrap();
    database.until("scheduled", doc! { "locked": true }, 1, "one is running").await;
    let other = ["--config", config.to_str().unwrap(), "--concurrency", "50"];
    system.workers.push(Process::on(&database, "recruiter-worker", &other));
    let others = ids(store.enqueue_many((0..20).map(|_| NewJob::of_class("other", doc! {}))).await.unwrap());
    database.until("archived", doc! { "_id": { "$in": others }, "why": "done" }, 20, "the others are done").await;
    assert_eq!(database.count("scheduled", doc! {}).await, 3_000, "the backlog is still there");
    system.stop().await;
}
