//! The classes that are there for trying and testing, in the real worker: those that do it harm.

use std::time::Duration;

use bson::doc;
use recruiter_common::{NewJob, RetryManyTimes};
use recruiter_tests::{
    local::prepared,
    oracle::number,
    processes::{Process, Setup, System},
    wait::SOON,
};

use super::bad_input::why;

/// I6: a job that kills its worker is tried as often as its policy allows and no more.
#[tokio::test]
async fn a_job_that_ends_its_process_honours_its_policy() {
    let (database, store) = prepared().await;
    let mut system = System::start(&database, Setup::default());
    let policy = RetryManyTimes::new(1, Duration::ZERO).unwrap();
    let id = NewJob::of_class("exit-abruptly", doc! {}).retry(&policy).enqueue(&store).await.unwrap().id;
    for _ in 0..2 {
        let mut worker = system.workers.pop().unwrap();
        assert!(!worker.wait_exit(SOON).await.success());
        system.workers.push(Process::on(&database, "recruiter-worker", &["--builtins"]));
    }
    let ended = database.archived(id).await;
    assert_eq!((why(&ended), number(&ended, "attempts"), number(&ended, "deaths")), ("worker-died", 2, 2));
    let next = NewJob::of_class("sleep", doc! {}).enqueue(&store).await.unwrap().id;
    assert_eq!(why(&database.archived(next).await), "done", "the next worker goes on");
    system.stop().await;
}

/// What is done when the limit is passed is recorded as done.
#[tokio::test]
async fn a_leaking_worker_ends_itself_with_its_work_recorded() {
    let (database, store) = prepared().await;
    let mut system = System::start(&database, Setup { worker: &["--builtins", "--memory-limit", "150MiB"], ..Setup::default() });
    let freed = NewJob::of_class("leak", doc! { "mib": 40, "keep": false }).enqueue(&store).await.unwrap().id;
    assert_eq!(why(&database.archived(freed).await), "done");
    assert!(system.workers[0].try_exit().is_none(), "below the limit it stays");
    let kept = NewJob::of_class("leak", doc! { "mib": 200 }).enqueue(&store).await.unwrap().id;
    let mut worker = system.workers.pop().unwrap();
    assert_eq!(worker.wait_exit(SOON).await.code(), Some(75));
    assert_eq!(why(&database.archived(kept).await), "done");
    assert_eq!(database.count("roster", doc! {}).await, 0);
    system.stop().await;
}
