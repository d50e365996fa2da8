//! Bad days: processes that are killed, frozen or stopped, a MongoDB that goes away, hints that are lost. In each case
//! the executions are counted, not only what is in the archive.

use std::{path::Path, time::Duration};

use bson::{Document, doc};
use futures_util::TryStreamExt;
use recruiter_common::{
    enqueue::NewJob,
    ids::JobId,
    retry_policy::{RetryForever, RetryManyTimes},
    shutdown::pause,
    store::Store,
};
use recruiter_tests::{
    fail_points::FailPoint,
    local::store,
    mongo::{TestDatabase, own_mongod},
    processes::{Process, Setup, System},
    wait::{wait_for, wait_until},
};

const SOON: Duration = Duration::from_secs(20);

fn sleep(ms: i64) -> NewJob {
    NewJob::of_class("sleep", doc! { "ms": ms })
}

async fn archived(database: &TestDatabase, id: JobId) -> Document {
    wait_for(SOON, "the job is archived", async || database.raw("archived").find_one(doc! { "_id": id }).await.ok().flatten()).await
}

async fn count(database: &TestDatabase, collection: &str, filter: Document) -> u64 {
    database.raw(collection).count_documents(filter).await.unwrap()
}

async fn until_started(database: &TestDatabase, jobs: u64) {
    wait_until(SOON, "the jobs are running", async || count(database, "scheduled", doc! { "locked": true }).await >= jobs).await;
}

fn number(document: &Document, field: &str) -> i64 {
    document.get(field).and_then(|n| n.as_i64().or(n.as_i32().map(i64::from))).unwrap_or(0)
}

fn why(document: &Document) -> &str {
    document.get_str("why").unwrap()
}

/// Error classes of all executions but the last, oldest first.
fn earlier(document: &Document) -> Vec<String> {
    let executions = document.get_array("executions").cloned().unwrap_or_default();
    executions.iter().map(|execution| execution.as_document().unwrap().get_str("class").unwrap_or("none").to_owned()).collect()
}

/// A program that notes each time it is entered, then sleeps.
fn counting_worker(directory: &Path, seconds: &str) -> (String, impl Fn() -> usize + use<>) {
    let (log, config) = (directory.join("entered"), directory.join("workables.toml"));
    let script = format!("echo x >> {}; sleep {seconds}", log.display());
    std::fs::write(&config, format!("[workables.count]\ncommand = [\"sh\", \"-c\", \"{script}\"]\n")).unwrap();
    (config.display().to_string(), move || std::fs::read_to_string(&log).unwrap_or_default().lines().count())
}

/// I5: whatever dies, a job that is not to be done again is entered at most once; the others are done again.
#[tokio::test]
async fn the_jobs_of_a_killed_worker_are_ended_by_their_policies_within_three_seconds() {
    let database = TestDatabase::new().await;
    let directory = tempfile::tempdir().unwrap();
    let (config, entered) = counting_worker(directory.path(), "600");
    let mut system = System::start(&database, Setup { worker: &["--builtins", "--config", &config], ..Setup::default() });
    let store = store(&database).await;
    let again = RetryManyTimes::new(1, Duration::ZERO).unwrap();
    let never = NewJob::of_class("count", doc! {}).enqueue(&store).await.unwrap();
    let retried = sleep(1_000).retry(&again).enqueue(&store).await.unwrap();
    until_started(&database, 2).await;
    wait_until(SOON, "the program was entered", async || entered() == 1).await;
    system.workers[0].kill();
    let killed = std::time::Instant::now();
    let dead = archived(&database, never).await;
    wait_until(SOON, "the other is free", async || count(&database, "scheduled", doc! { "locked": false }).await == 1).await;
    assert!(killed.elapsed() < Duration::from_secs(3), "rescued after {:?}", killed.elapsed());
    assert_eq!(why(&dead), "worker-died");
    let execution = dead.get_document("last_execution").unwrap();
    assert!(execution.get_bool("crashed").unwrap() && execution.contains_key("ended_at"), "{execution}");
    system.workers.push(Process::on(&database, "recruiter-worker", &["--builtins", "--config", &config]));
    let done = archived(&database, retried).await;
    assert_eq!((why(&done), number(&done, "attempts"), earlier(&done)), ("done", 2, vec!["worker-died".to_owned()]));
    assert_eq!(entered(), 1);
    system.stop().await;
}

/// A job that kills its worker is tried as often as its policy allows and no more.
#[tokio::test]
async fn a_job_that_ends_its_process_honours_its_policy() {
    let database = TestDatabase::new().await;
    let mut system = System::start(&database, Setup::default());
    let store = store(&database).await;
    let policy = RetryManyTimes::new(1, Duration::ZERO).unwrap();
    let id = NewJob::of_class("exit-abruptly", doc! {}).retry(&policy).enqueue(&store).await.unwrap();
    for _ in 0..2 {
        let mut worker = system.workers.pop().unwrap();
        assert!(!worker.wait_exit(SOON).await.success());
        system.workers.push(Process::on(&database, "recruiter-worker", &["--builtins"]));
    }
    let ended = archived(&database, id).await;
    assert_eq!((why(&ended), number(&ended, "attempts"), earlier(&ended)), ("worker-died", 2, vec!["worker-died".to_owned()]));
    let next = sleep(0).enqueue(&store).await.unwrap();
    assert_eq!(why(&archived(&database, next).await), "done", "the next worker goes on");
    system.stop().await;
}

/// I8: TERM costs no counted attempt and leaves no lock.
#[tokio::test]
async fn a_stopping_worker_interrupts_what_does_not_end_in_its_grace() {
    let database = TestDatabase::new().await;
    let mut system = System::start(&database, Setup { worker: &["--builtins", "--grace", "500ms"], ..Setup::default() });
    let store = store(&database).await;
    let policy = RetryManyTimes::new(1, Duration::from_secs(60)).unwrap();
    let short = sleep(400).enqueue(&store).await.unwrap();
    let long = sleep(3_000).retry(&policy).enqueue(&store).await.unwrap();
    let never = sleep(600_000).enqueue(&store).await.unwrap();
    until_started(&database, 3).await;
    let mut worker = system.workers.pop().unwrap();
    worker.terminate();
    assert_eq!(worker.wait_exit(SOON).await.code(), Some(0));
    assert_eq!(why(&archived(&database, short).await), "done");
    assert_eq!(why(&archived(&database, never).await), "interrupted");
    assert_eq!(count(&database, "scheduled", doc! { "locked": true }).await, 0);
    assert_eq!(count(&database, "roster", doc! {}).await, 0);
    system.workers.push(Process::on(&database, "recruiter-worker", &["--builtins"]));
    let done = archived(&database, long).await;
    assert_eq!((why(&done), number(&done, "attempts"), number(&done, "interruptions")), ("done", 2, 1));
    assert_eq!(earlier(&done), ["interrupted"]);
    system.stop().await;
}

/// A worker that drains for longer than a death takes goes on saying that it lives.
#[tokio::test]
async fn a_draining_worker_is_not_taken_for_dead() {
    let database = TestDatabase::new().await;
    let worker = ["--builtins", "--heartbeat", "200ms", "--lease", "600ms", "--grace", "10s"];
    let mut system =
        System::start(&database, Setup { worker: &worker, cleaner: &["--dead-after", "1s", "--every", "100ms"], ..Setup::default() });
    let store = store(&database).await;
    let id = sleep(4_000).enqueue(&store).await.unwrap();
    until_started(&database, 1).await;
    let mut worker = system.workers.pop().unwrap();
    worker.terminate();
    assert_eq!(worker.wait_exit(SOON).await.code(), Some(0));
    assert_eq!(why(&archived(&database, id).await), "done");
    system.stop().await;
}

/// I3: declared dead while it was frozen, it finds its claim lost and comes back as another worker.
#[tokio::test]
async fn a_worker_frozen_past_its_death_drops_its_outcome_and_comes_back() {
    let database = TestDatabase::new().await;
    let frozen = ["--builtins", "--heartbeat", "300ms", "--lease", "1s"];
    let mut system =
        System::start(&database, Setup { worker: &frozen, cleaner: &["--dead-after", "2s", "--every", "200ms"], ..Setup::default() });
    let store = store(&database).await;
    let again = RetryForever::new(Duration::from_millis(1)).unwrap();
    let id = sleep(500).retry(&again).enqueue(&store).await.unwrap();
    until_started(&database, 1).await;
    system.workers[0].pause();
    wait_until(SOON, "it is retired", async || count(&database, "roster", doc! {}).await == 0).await;
    system.workers.push(Process::on(&database, "recruiter-worker", &["--builtins"]));
    let first = archived(&database, id).await;
    assert_eq!((number(&first, "attempts"), earlier(&first)), (2, vec!["worker-died".to_owned()]));
    system.workers[0].resume();
    wait_until(SOON, "it is back", async || count(&database, "roster", doc! {}).await == 2).await;
    assert!(system.workers[0].stderr().contains("declared dead"));
    assert_eq!(archived(&database, id).await, first, "its late outcome changed nothing");
    system.stop().await;
}

/// A leader that is killed is followed when its lease has run out, one that is stopped at once.
#[tokio::test]
async fn of_two_recruiters_one_leads_and_the_other_follows() {
    let database = TestDatabase::new().await;
    let flags: &[&str] = &["run", "--lease", "3s"];
    let mut system = System::start(&database, Setup { recruiter: &flags[1..], ..Setup::default() });
    let leads = async |process: &Process| wait_until(SOON, "it leads", async || process.stderr().contains("leading")).await;
    leads(&system.recruiter).await;
    let standby = Process::on(&database, "recruiter", flags);
    wait_until(SOON, "it stands by", async || standby.stderr().contains("standing by")).await;
    let store = store(&database).await;
    let jobs = store.enqueue_many((0..50).map(|_| sleep(0))).await.unwrap();
    for id in &jobs {
        assert_eq!(number(&archived(&database, *id).await, "attempts"), 1);
    }
    assert!(!standby.stderr().contains("leading"));
    system.recruiter.kill();
    leads(&standby).await;
    let third = Process::on(&database, "recruiter", flags);
    wait_until(SOON, "it stands by", async || third.stderr().contains("standing by")).await;
    let asked = std::time::Instant::now();
    standby.terminate();
    leads(&third).await;
    assert!(asked.elapsed() < Duration::from_millis(1_500), "it waited for a lease that was released: {:?}", asked.elapsed());
    let id = sleep(0).enqueue(&store).await.unwrap();
    archived(&database, id).await;
    system.recruiter = third;
    system.stop().await;
}

/// I1: `kill -9` of MongoDB itself, in the middle of work.
#[tokio::test]
async fn when_mongodb_goes_away_for_a_while_everything_resumes_and_nothing_is_lost() {
    let mut mongo = own_mongod().await;
    let database = TestDatabase::on(&mongo.uri()).await;
    let system = System::start(&database, Setup { workers: 2, ..Setup::default() });
    let store = store(&database).await;
    let jobs = store.enqueue_many((0..400).map(|_| sleep(20))).await.unwrap();
    wait_until(SOON, "half is done", async || count(&database, "archived", doc! {}).await > 100).await;
    mongo.kill().await.unwrap();
    pause(Duration::from_secs(3)).await;
    mongo.restart().await.unwrap();
    wait_until(SOON * 2, "all is done", async || count(&database, "archived", doc! {}).await == 400).await;
    let found: Vec<Document> = database.raw("archived").find(doc! {}).await.unwrap().try_collect().await.unwrap();
    assert_eq!(found.len(), jobs.len());
    for job in &found {
        assert_eq!(why(job), "done", "{job}");
        let explained = i64::try_from(earlier(job).len()).unwrap() + number(job, "interruptions");
        assert_eq!(number(job, "attempts"), 1 + explained, "I4: every start beyond the first is explained: {job}");
    }
    assert_eq!(count(&database, "scheduled", doc! {}).await, 0);
    system.stop().await;
    mongo.stop().await.unwrap();
}

/// I7: with a collection of hints that cannot be listened to, every hint is lost.
#[tokio::test]
async fn without_any_hint_a_job_starts_within_the_poll_fallback() {
    let database = TestDatabase::new().await;
    let store = store(&database).await;
    database.raw("signals").drop().await.unwrap();
    database.database().create_collection("signals").await.unwrap();
    let system = System::start(&database, Setup::default());
    wait_until(SOON, "the worker is there", async || {
        count(&database, "roster", doc! { "available": true, "term": { "$gt": 0 } }).await == 1
    })
    .await;
    for _ in 0..5 {
        let id = sleep(0).enqueue(&store).await.unwrap();
        let execution = archived(&database, id).await.get_document("last_execution").unwrap().clone();
        let waited = execution.get_datetime("started_at").unwrap().timestamp_millis()
            - execution.get_datetime("scheduled_at").unwrap().timestamp_millis();
        assert!(waited <= 1_000, "it waited for {waited} ms");
    }
    let retry = RetryManyTimes::new(1, Duration::from_millis(100)).unwrap();
    let id = NewJob::of_class("fail", doc! { "times": 1 }).retry(&retry).enqueue(&store).await.unwrap();
    assert_eq!(why(&archived(&database, id).await), "done");
    system.stop().await;
}

/// A start whose reply says that it may not last is looked up by its own id; nothing runs twice and nothing stays locked.
#[tokio::test]
async fn a_start_of_unknown_outcome_is_found_again() {
    let mongo = own_mongod().await;
    let database = TestDatabase::on(&mongo.uri()).await;
    let directory = tempfile::tempdir().unwrap();
    let (config, entered) = counting_worker(directory.path(), "0");
    let system = System::start(&database, Setup { worker: &["--config", &config], ..Setup::default() });
    let store: Store = store(&database).await;
    wait_until(SOON, "the worker is there", async || count(&database, "roster", doc! { "available": true }).await == 1).await;
    let fault = FailPoint::new("recruiter-worker", &["update"])
        .namespace(database.name(), "scheduled")
        .times(2)
        .write_concern_error(91)
        .arm(&mongo.uri())
        .await;
    let jobs = store.enqueue_many((0..5).map(|_| NewJob::of_class("count", doc! {}))).await.unwrap();
    for id in &jobs {
        assert_eq!(why(&archived(&database, *id).await), "done");
    }
    assert!(fault.struck().await >= 1);
    drop(fault);
    let fault = FailPoint::new("recruiter-worker", &["update"])
        .namespace(database.name(), "scheduled")
        .times(1)
        .close_connection()
        .arm(&mongo.uri())
        .await;
    let id = NewJob::of_class("count", doc! {}).enqueue(&store).await.unwrap();
    assert_eq!(why(&archived(&database, id).await), "done");
    assert_eq!(fault.struck().await, 1);
    drop(fault);
    assert_eq!(entered(), 6, "each was entered once");
    system.stop().await;
    mongo.stop().await.unwrap();
}

/// I2: the reply to a commit is lost, or the transaction is aborted behind our back.
#[tokio::test]
async fn a_commit_of_unknown_outcome_is_written_once() {
    let mongo = own_mongod().await;
    let database = TestDatabase::on(&mongo.uri()).await;
    let system = System::start(&database, Setup::default());
    let store = store(&database).await;
    wait_until(SOON, "the worker is there", async || count(&database, "roster", doc! { "available": true }).await == 1).await;
    let faults = [
        FailPoint::new("recruiter-worker", &["commitTransaction"]).times(2).close_connection(),
        FailPoint::new("recruiter-worker", &["commitTransaction"]).times(3).write_concern_error(64),
        FailPoint::new("recruiter-worker", &["commitTransaction"]).times(1).error_code(251).error_labels(&["TransientTransactionError"]),
        FailPoint::new("recruiter-worker", &["insert"]).namespace(database.name(), "archived").times(1).close_connection(),
        FailPoint::new("recruiter-worker", &["delete"]).namespace(database.name(), "scheduled").times(1).error_code(189),
    ];
    for fault in faults {
        let armed = fault.arm(&mongo.uri()).await;
        let jobs = store.enqueue_many((0..20).map(|_| sleep(0))).await.unwrap();
        for id in &jobs {
            let done = archived(&database, *id).await;
            assert_eq!((why(&done), number(&done, "attempts")), ("done", 1));
        }
        assert!(armed.struck().await >= 1);
    }
    assert_eq!(count(&database, "scheduled", doc! {}).await, 0);
    system.stop().await;
    mongo.stop().await.unwrap();
}

#[tokio::test]
async fn a_leaking_worker_ends_itself_with_its_work_recorded() {
    let database = TestDatabase::new().await;
    let mut system = System::start(&database, Setup { worker: &["--builtins", "--memory-limit", "150MiB"], ..Setup::default() });
    let store = store(&database).await;
    let freed = NewJob::of_class("leak", doc! { "mib": 40, "keep": false }).enqueue(&store).await.unwrap();
    assert_eq!(why(&archived(&database, freed).await), "done");
    assert!(system.workers[0].try_exit().is_none(), "below the limit it stays");
    let kept = NewJob::of_class("leak", doc! { "mib": 200 }).enqueue(&store).await.unwrap();
    let mut worker = system.workers.pop().unwrap();
    assert_eq!(worker.wait_exit(SOON).await.code(), Some(75));
    assert_eq!(why(&archived(&database, kept).await), "done");
    assert_eq!(count(&database, "roster", doc! {}).await, 0);
    system.stop().await;
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

/// Hand-deleted roster documents and half-written locks are found by the slow sweep.
#[tokio::test]
async fn jobs_locked_by_nobody_in_the_roster_are_found() {
    let database = TestDatabase::new().await;
    let system = System::start(&database, Setup { workers: 0, cleaner: &["--sweep-every", "200ms"], ..Setup::default() });
    let store = store(&database).await;
    let worker = Process::on(&database, "recruiter-worker", &["--builtins"]);
    let again = RetryForever::new(Duration::from_millis(1)).unwrap();
    let orphan = sleep(600_000).retry(&again).enqueue(&store).await.unwrap();
    until_started(&database, 1).await;
    worker.pause();
    database.raw("roster").delete_many(doc! {}).await.unwrap();
    let half = sleep(0).enqueue(&store).await.unwrap();
    database.raw("scheduled").update_one(doc! { "_id": half }, doc! { "$set": { "locked": true } }).await.unwrap();
    wait_until(SOON, "both are unlocked", async || count(&database, "scheduled", doc! { "locked": false }).await == 2).await;
    let document = database.raw("scheduled").find_one(doc! { "_id": half }).await.unwrap().unwrap();
    assert!(!document.contains_key("last_execution"), "nobody had started it, so nothing crashed");
    let document = database.raw("scheduled").find_one(doc! { "_id": orphan }).await.unwrap().unwrap();
    assert_eq!(earlier(&document), ["worker-died"]);
    drop(worker);
    system.stop().await;
}

#[tokio::test]
async fn a_job_can_be_cancelled_while_it_runs() {
    let database = TestDatabase::new().await;
    let directory = tempfile::tempdir().unwrap();
    let (config, entered) = counting_worker(directory.path(), "600");
    let system = System::start(&database, Setup { worker: &["--config", &config], ..Setup::default() });
    let store = store(&database).await;
    let again = RetryForever::new(Duration::from_millis(1)).unwrap();
    let id = NewJob::of_class("count", doc! {}).retry(&again).enqueue(&store).await.unwrap();
    wait_until(SOON, "it was entered", async || entered() == 1).await;
    assert!(store.request_cancel_if_started(id).await.unwrap());
    store.announce_hint(recruiter_common::store::Hint::Cancel { job: id }).await;
    assert_eq!(why(&archived(&database, id).await), "cancelled");
    system.stop().await;
}

/// I7: a class with a long backlog does not keep another class's workers idle.
#[tokio::test]
async fn a_backlog_of_one_class_leaves_the_others_their_workers() {
    let database = TestDatabase::new().await;
    let directory = tempfile::tempdir().unwrap();
    let (config, _) = counting_worker(directory.path(), "0");
    let store = store(&database).await;
    let mut system = System::start(&database, Setup { worker: &["--builtins", "--concurrency", "1"], ..Setup::default() });
    store.enqueue_many((0..3_000).map(|_| sleep(50))).await.unwrap();
    until_started(&database, 1).await;
    system.workers.push(Process::on(&database, "recruiter-worker", &["--config", &config, "--concurrency", "50"]));
    let others = store.enqueue_many((0..20).map(|_| NewJob::of_class("count", doc! {}))).await.unwrap();
    for id in others {
        assert_eq!(why(&archived(&database, id).await), "done");
    }
    assert!(count(&database, "scheduled", doc! {}).await > 1_000, "the backlog was still there");
    system.stop().await;
}

/// I9: an outcome that cannot be stored stops neither the cleaner nor the rescue of the other jobs.
#[tokio::test]
async fn one_job_that_cannot_be_archived_does_not_stop_the_cleaner() {
    let database = TestDatabase::new().await;
    let store = store(&database).await;
    let mut system = System::start(&database, Setup::default());
    let large = sleep(600_000).enqueue(&store).await.unwrap();
    let others = store.enqueue_many((0..5).map(|_| sleep(600_000))).await.unwrap();
    until_started(&database, 6).await;
    // Just below what a document may have: the end of its history does not fit any more.
    let grow = doc! { "$set": { "note": "x".repeat(16 * 1024 * 1024 - 900) } };
    database.raw("scheduled").update_one(doc! { "_id": large }, grow).await.unwrap();
    system.workers.pop().unwrap().kill();
    for id in others {
        assert_eq!(why(&archived(&database, id).await), "worker-died");
    }
    let ended = archived(&database, large).await;
    assert_eq!(why(&ended), "worker-died");
    assert!(ended.contains_key("reduced") || ended.contains_key("note"));
    wait_until(SOON, "the dead worker is buried", async || count(&database, "roster", doc! {}).await == 0).await;
    system.stop().await;
}

/// A worker whose document cannot be understood still works: its jobs are nobody else's.
#[tokio::test]
async fn the_jobs_of_a_worker_with_a_strange_document_are_left_to_it() {
    let database = TestDatabase::new().await;
    let store = store(&database).await;
    let system = System::start(&database, Setup { cleaner: &["--sweep-every", "100ms"], ..Setup::default() });
    let again = RetryForever::new(Duration::from_millis(1)).unwrap();
    let id = sleep(3_000).retry(&again).enqueue(&store).await.unwrap();
    until_started(&database, 1).await;
    database.raw("roster").update_many(doc! {}, doc! { "$set": { "lease_ms": "long", "classes": 5 } }).await.unwrap();
    let done = archived(&database, id).await;
    assert_eq!((why(&done), number(&done, "attempts")), ("done", 1));
    system.stop().await;
}

/// A leader that loses MongoDB for longer than it may trust its lease goes on as soon as it can renew it.
#[tokio::test]
async fn a_leader_goes_on_at_once_after_an_outage() {
    let mut mongo = own_mongod().await;
    let database = TestDatabase::on(&mongo.uri()).await;
    let system = System::start(&database, Setup { recruiter: &["--lease", "15s"], ..Setup::default() });
    let store = store(&database).await;
    let id = sleep(0).enqueue(&store).await.unwrap();
    archived(&database, id).await;
    mongo.kill().await.unwrap();
    pause(Duration::from_secs(11)).await;
    mongo.restart().await.unwrap();
    let back = std::time::Instant::now();
    let id = wait_for(SOON, "it is enqueued", async || sleep(0).enqueue(&store).await.ok()).await;
    archived(&database, id).await;
    assert!(back.elapsed() < Duration::from_secs(10), "it stood by for a lease of its own: {:?}", back.elapsed());
    system.stop().await;
    mongo.stop().await.unwrap();
}
