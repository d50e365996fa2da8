//! Optimistic execution: the process that enqueues a job executes it. Its jobs have the guarantees of all jobs, also if it dies.

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use bson::doc;
use recruiter_common::{
    EnqueueError, JobId, Limit, NewJob, RetryManyTimes, Workable, limits::Paused, shutdown::pause, store::Store, workers::Wanted,
};
use recruiter_testing::Drain;
use recruiter_tests::{
    diary::Diary,
    fail_points::FailPoint,
    local::{self, Local, connect_args, prepared, store_behind_a_proxy},
    mongo::TestDatabase,
    processes::Process,
    promise,
    proxy::Action,
    wait::{SOON, wait_until},
    workable,
};
use recruiter_worker::{
    Attempted, Context, Executable, Failure, FinishReason, NotDone, Optimistic, Ran, TransactionSession, Unique, Worker, WorkerConfig,
    WorkerError,
};
use serde::{Deserialize, Serialize};

use super::kit::counts;

/// Its first attempts fail, and its first takes some time, or until the diary has the line `go`.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Errand {
    name: String,
    fails: u32,
    ms: u64,
}

fn errand(name: &str) -> Errand {
    Errand { name: name.into(), fails: 0, ms: 0 }
}
workable!(Errand -> String);

impl Executable for Errand {
    type State = Diary;

    async fn execute(&self, diary: &Diary, job: &Context) -> Result<String, NotDone> {
        diary.write(format!("{} {}", self.name, job.attempt()));
        match self.name.as_str() {
            "gives up" => return Err(NotDone::give_up("Hopeless", "it never will")),
            "becomes" => return Err(NotDone::continue_as([errand("next").as_job()])),
            "commits" => {
                let store = job.client().clone();
                let commits = move |mut session: TransactionSession| {
                    let store = store.clone();
                    async move {
                        NewJob::of_class("other", doc! {}).enqueue_in(&store, &mut session).await?;
                        Ok("committed".to_owned())
                    }
                };
                return job.transaction(commits).await;
            }
            _ => {}
        }
        if job.attempt() == 1 && self.ms > 0 {
            let goes = async {
                while !diary.lines().contains(&"go".into()) {
                    pause(Duration::from_millis(10)).await;
                }
            };
            tokio::select! {
                () = pause(Duration::from_millis(self.ms)) => {}
                () = goes => {}
                () = job.cancelled() => diary.write("cancelled"),
            }
            if job.is_cancelled() {
                return Err(NotDone::failed("stopped", "it was cancelled"));
            }
        }
        if job.retries() < self.fails { Err(NotDone::failed("too-early", "not yet")) } else { Ok(self.name.to_uppercase()) }
    }

    async fn after_last_failure(&self, diary: &Diary, _job: &Context, failure: &Failure) {
        diary.write(format!("last failure {}", failure.class));
    }
}

fn worker(diary: &Arc<Diary>) -> Worker {
    Worker::new().register::<Errand>(diary.clone()).unwrap()
}

fn config() -> WorkerConfig {
    WorkerConfig::default().concurrency(2).heartbeat(Duration::from_millis(250)).lease(SOON * 5)
}

fn cleaner(database: &TestDatabase, dead_after: &str) -> Process {
    Process::on(database, "recruiter-cleaner", &["--dead-after", dead_after, "--every", "150ms", "--sweep-every", "500ms"])
}

async fn optimistic(store: &Store, diary: &Arc<Diary>) -> Optimistic {
    worker(diary).optimistic(store, config()).await.unwrap()
}

async fn is_queued(here: &Optimistic, job: NewJob) -> bool {
    matches!(here.execute(job).await.unwrap(), Attempted::Queued(queued) if queued.is_new)
}

#[tokio::test]
async fn a_job_is_executed_where_it_is_enqueued_and_archived_like_any_other() {
    let ((database, store), diary) = (prepared().await, Arc::new(Diary::default()));
    let here = optimistic(&store, &diary).await;
    let began = store.now();
    let attempted = here.execute(errand("a").as_job()).await.unwrap();
    let Attempted::Here { id, ran } = attempted else { panic!("{attempted:?}") };
    assert_eq!((ran.result::<String>().as_deref(), diary.lines()), (Some("A"), vec!["a 1".into()]));
    let done = database.only("archived", doc! {}).await;
    assert_eq!((done.get_str("why").unwrap(), done.get_str("result").unwrap()), ("done", "A"));
    assert_eq!((done.get_i32("attempts").unwrap(), done.get("_id")), (1, Some(&id.into())));
    let execution = done.get_document("last_execution").unwrap();
    let [due, started, ended] = ["scheduled_at", "started_at", "ended_at"].map(|field| execution.get_datetime(field).unwrap().to_chrono());
    assert!(due <= started && started <= ended && began - due < chrono::TimeDelta::seconds(1), "{execution}");

    let gave_up = here.execute(errand("gives up").as_job().retry(&RetryManyTimes::new(2, SOON).unwrap())).await.unwrap();
    let Attempted::Here { id, ran: Ran::Archived { why, failure } } = gave_up else { panic!("{gave_up:?}") };
    assert!(why == FinishReason::GAVE_UP && failure.class == "Hopeless");
    let dead = database.only("archived", doc! { "_id": id }).await;
    assert_eq!((dead.get_str("why").unwrap(), dead.get_i32("attempts").unwrap()), ("gave-up", 1));
    assert_eq!(dead.get_document("last_execution").unwrap().get_str("class").unwrap(), "Hopeless");
    // After the record.
    wait_until(SOON, "the hook is called", async || diary.lines().contains(&"last failure Hopeless".into())).await;

    let became = here.execute(errand("becomes").as_job()).await.unwrap();
    assert!(matches!(&became, Attempted::Here { ran: Ran::Became { jobs }, .. } if jobs.len() == 1), "{became:?}");
    let committed = here.execute(errand("commits").as_job()).await.unwrap();
    assert!(matches!(&committed, Attempted::Here { ran, .. } if ran.result::<String>().as_deref() == Some("committed")), "{committed:?}");
    assert_eq!(counts(&database).await, [2, 4], "the continuation, and the job of the transaction");
    assert_eq!(database.count("roster", doc! { "available": false }).await, 1);
    here.stop().await.unwrap();
    assert_eq!(database.count("roster", doc! {}).await, 0);
}

#[tokio::test]
async fn after_a_failure_the_policy_decides_and_workers_run_the_next_attempt() {
    let (database, store) = prepared().await;
    let (diary, elsewhere) = (Arc::new(Diary::default()), Arc::new(Diary::default()));
    let here = optimistic(&store, &diary).await;
    let processes = Local::pair(&database, &[], worker(&elsewhere), &[]);
    let job = Errand { fails: 1, ..errand("a") }.as_job().retry(&RetryManyTimes::new(2, Duration::from_millis(300)).unwrap());
    let attempted = here.execute(job).await.unwrap();
    let Attempted::Here { id, ran: Ran::Again { counts: true, failure, .. } } = attempted else { panic!("{attempted:?}") };
    assert_eq!(failure.class, "too-early");
    let done = database.archived(id).await;
    assert_eq!((diary.lines(), elsewhere.lines()), (vec!["a 1".to_owned()], vec!["a 2".to_owned()]));
    assert_eq!((done.get_i32("attempts").unwrap(), done.get_array("executions").unwrap().len()), (2, 2));

    let last = here.execute(Errand { fails: 1, ..errand("b") }.as_job()).await.unwrap();
    let Attempted::Here { id, ran: Ran::Archived { failure, .. } } = last else { panic!("{last:?}") };
    assert_eq!(failure.class, "too-early");
    assert_eq!(database.only("archived", doc! { "_id": id }).await.get_i32("attempts").unwrap(), 1);
    here.stop().await.unwrap();
    local::stop(processes).await;
}

#[tokio::test]
async fn a_job_that_only_a_recruiter_can_admit_is_queued() {
    let ((database, store), diary) = (prepared().await, Arc::new(Diary::default()));
    store.limits().set("@small", Limit::capacity(1)).await.unwrap();
    let here = optimistic(&store, &diary).await;
    let job = || errand("a").as_job();
    let id = JobId::new();
    let jobs = [
        NewJob::of_class("unknown", doc! {}),
        job().limit("printer"),
        job().in_line("k"),
        job().after(SOON).with_id(id),
        job().expires_after(SOON),
        job().unique(Unique::by_key("k")),
        job().in_group("small"),
    ];
    let count = jobs.len() as u64;
    for job in jobs {
        assert!(is_queued(&here, job.clone()).await, "{job:?}");
    }
    assert_eq!(counts(&database).await, [count, 0]);
    let known = here.execute(job().with_id(id)).await.unwrap();
    assert!(matches!(&known, Attempted::Queued(known) if !known.is_new && known.id == id), "{known:?}");
    assert!(here.execute(job().in_group("")).await.is_err());

    // What an operator decides counts from the next heartbeat on.
    store.pauses().pause(&Paused::Class("Errand".into()), "test", None).await.unwrap();
    wait_until(SOON, "the class is paused", async || is_queued(&here, job()).await).await;
    store.pauses().resume(&Paused::Class("Errand".into())).await.unwrap();
    wait_until(SOON, "the class is resumed", async || !is_queued(&here, job()).await).await;
    let roster = database.only("roster", doc! {}).await;
    store.ask_worker(roster.get_object_id("_id").unwrap().into(), Wanted::Quiet, "test").await.unwrap();
    wait_until(SOON, "the process is quiet", async || is_queued(&here, job()).await).await;
    // A job that is not executed here is due at once.
    let due = doc! { "scheduled_at": { "$lte": bson::DateTime::from_chrono(store.now()) } };
    let later = doc! { "_id": { "$ne": id }, "scheduled_at": { "$gt": bson::DateTime::from_chrono(store.now()) } };
    assert!(database.count("scheduled", due).await >= count);
    assert_eq!(database.count("scheduled", later).await, 0);
    here.stop().await.unwrap();
}

#[tokio::test]
async fn jobs_above_the_concurrency_are_queued_and_a_caller_that_leaves_ends_no_job() {
    let ((database, store), diary) = (prepared().await, Arc::new(Diary::default()));
    let here = Arc::new(optimistic(&store, &diary).await);
    let slow = |name: &str| Errand { ms: 600_000, ..errand(name) }.as_job();
    let leaving = tokio::spawn({
        let (here, job) = (here.clone(), slow("left"));
        async move { here.execute(job).await }
    });
    wait_until(SOON, "it runs", async || diary.lines() == ["left 1"]).await;
    leaving.abort();
    let other = tokio::spawn({
        let (here, job) = (here.clone(), slow("other"));
        async move { here.execute(job).await.unwrap() }
    });
    wait_until(SOON, "both run", async || diary.lines().len() == 2).await;
    // The place of the caller that left is free, but its slot is not.
    assert!(is_queued(&here, errand("third").as_job()).await);
    diary.write("go");
    assert!(matches!(other.await.unwrap(), Attempted::Here { .. }));
    wait_until(SOON, "both are recorded", async || counts(&database).await == [1, 2]).await;
    assert_eq!(diary.lines(), ["left 1", "other 1", "go"]);
    Arc::into_inner(here).unwrap().stop().await.unwrap();
}

/// The process has two slots, and one for jobs of this class.
#[tokio::test]
async fn jobs_above_the_concurrency_of_their_class_are_queued() {
    let (_database, store) = prepared().await;
    let diary = Arc::new(Diary::default());
    let here = worker(&diary).class_concurrency(Errand::CLASS, NonZeroU32::MIN).unwrap().optimistic(&store, config()).await.unwrap();
    let here = Arc::new(here);
    let long = tokio::spawn({
        let here = here.clone();
        async move { here.execute(Errand { ms: 600_000, ..errand("long") }.as_job()).await.unwrap() }
    });
    wait_until(SOON, "it runs", async || diary.lines() == ["long 1"]).await;
    assert!(is_queued(&here, errand("second").as_job()).await);
    diary.write("go");
    assert!(matches!(long.await.unwrap(), Attempted::Here { .. }));
    assert!(matches!(here.execute(errand("third").as_job()).await.unwrap(), Attempted::Here { .. }));
    assert_eq!(diary.lines(), ["long 1", "go", "third 1"]);
    Arc::into_inner(here).unwrap().stop().await.unwrap();
}

/// With a recruiter, a worker and a cleaner that would all like to have the job, and an execution that takes longer than the lease, the time
/// after which a silent process is dead, and the time for which the job is kept from the workers. The first two are as long as possible,
/// because a machine that stalls makes the process silent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_else_runs_the_job_of_a_process_that_lives() {
    let (database, store) = prepared().await;
    let (diary, elsewhere) = (Arc::new(Diary::default()), Arc::new(Diary::default()));
    let cleaner = cleaner(&database, "10s");
    let processes = Local::pair(&database, &[], worker(&elsewhere), &[]);
    let here = worker(&diary).optimistic(&store, config().lease(Duration::from_secs(6))).await.unwrap();
    let ran = here.execute(Errand { ms: 12_000, ..errand("long") }.as_job().retry(&RetryManyTimes::new(3, SOON).unwrap())).await.unwrap();
    assert!(matches!(&ran, Attempted::Here { ran: Ran::Done { .. }, .. }), "{ran:?}");
    promise!((diary.lines(), elsewhere.lines()) == (vec!["long 1".to_owned()], Vec::new()), "it ran elsewhere: {:?}", elsewhere.lines());
    assert_eq!(database.only("archived", doc! {}).await.get_i32("attempts").unwrap(), 1);
    here.stop().await.unwrap();
    local::stop(processes).await;
    drop(cleaner);
}

/// The process dies in the middle of an execution: the policy decides, as for every worker that dies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_job_of_a_process_that_dies_is_rescued_once() {
    let database = TestDatabase::new().await;
    let (diary, elsewhere) = (Arc::new(Diary::default()), Arc::new(Diary::default()));
    let processes = Local::pair(&database, &[], worker(&elsewhere), &[]);
    let (again, never) = (JobId::new(), JobId::new());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.spawn({
        let (connect, diary) = (connect_args(&database), diary.clone());
        async move {
            let store = Store::connect(&connect, "test").await.unwrap();
            let here = worker(&diary).optimistic(&store, config()).await.unwrap();
            let job = |name: &str| Errand { ms: 600_000, ..errand(name) }.as_job();
            let retried = job("again").with_id(again).retry(&RetryManyTimes::new(3, Duration::from_millis(100)).unwrap());
            tokio::join!(here.execute(retried), here.execute(job("never").with_id(never)))
        }
    });
    wait_until(SOON, "both run", async || diary.lines().len() == 2).await;
    runtime.shutdown_background();
    // From now on it is silent. Its long lease would delay the rescue.
    let lease = doc! { "$set": { "lease_ms": 900_i64 } };
    let shortened = database.raw("roster").update_one(doc! { "work_on": { "$size": 0 } }, lease).await.unwrap();
    assert_eq!(shortened.matched_count, 1);
    let cleaner = cleaner(&database, "1500ms");
    wait_until(SOON, "both are archived", async || counts(&database).await == [0, 2]).await;
    let (again, never) = (database.only("archived", doc! { "_id": again }).await, database.only("archived", doc! { "_id": never }).await);
    assert_eq!((again.get_str("why").unwrap(), again.get_i32("attempts").unwrap()), ("done", 2));
    assert_eq!((never.get_str("why").unwrap(), never.get_i32("attempts").unwrap()), ("worker-died", 1));
    assert_eq!((diary.lines().len(), elsewhere.lines()), (2, vec!["again 2".to_owned()]));
    database.until("roster", doc! {}, 1, "the roster has the worker alone").await;
    local::stop(processes).await;
    drop(cleaner);
}

/// The process dies after it has enqueued the job and before it has started it.
#[tokio::test]
async fn a_job_that_was_not_started_is_left_to_the_workers() {
    let database = TestDatabase::new().await;
    let (proxy, store) = store_behind_a_proxy(&database).await;
    let (diary, elsewhere) = (Arc::new(Diary::default()), Arc::new(Diary::default()));
    let here = optimistic(&store, &diary).await;
    let processes = Local::pair(&database, &[], worker(&elsewhere), &[]);
    let held = proxy.arm(Action::Hold, 1..=1, |request| request.is("insert", "scheduled"));
    tokio::select! {
        attempted = here.execute(errand("left").as_job()) => panic!("{attempted:?}"),
        () = held.fired() => {}
    }
    held.release();
    wait_until(SOON, "a worker has done it", async || counts(&database).await == [0, 1]).await;
    assert_eq!((diary.lines(), elsewhere.lines()), (Vec::new(), vec!["left 1".to_owned()]));
    here.stop().await.unwrap();
    local::stop(processes).await;
}

#[tokio::test]
async fn a_job_that_cannot_be_enqueued_is_not_executed() {
    let ((database, store), diary) = (prepared().await, Arc::new(Diary::default()));
    let here = optimistic(&store, &diary).await;
    {
        let insert = FailPoint::new("test", &["insert"]).namespace(database.name(), "scheduled").error_code(13);
        let _armed = insert.arm(database.uri()).await;
        let refused = here.execute(errand("a").as_job()).await;
        assert!(matches!(refused, Err(EnqueueError::Store(_))), "{refused:?}");
    }
    assert_eq!(counts(&database).await, [0, 0]);
    // A start whose reply is lost: it is searched for at once, and again with each heartbeat.
    {
        let update = FailPoint::new("test", &["update"]).namespace(database.name(), "scheduled").write_concern_error(64).times(1);
        let _armed = update.arm(database.uri()).await;
        let ran = here.execute(errand("b").as_job()).await.unwrap();
        if matches!(&ran, Attempted::Queued(_)) {
            database.until("scheduled", doc! { "locked": false }, 1, "it is released").await;
            // It still has the date for which it was kept from the workers.
            Drain::new(&worker(&diary), &store).ahead(SOON).run().await.unwrap();
        } else {
            assert!(matches!(&ran, Attempted::Here { ran: Ran::Done { .. }, .. }), "{ran:?}");
        }
    }
    let lines = diary.lines();
    assert!(lines == ["b 1"] || lines == ["b 2"], "{lines:?}");
    assert_eq!(counts(&database).await, [0, 1]);
    here.stop().await.unwrap();
}

#[tokio::test]
async fn a_job_that_runs_here_can_be_cancelled() {
    let ((database, store), diary) = (prepared().await, Arc::new(Diary::default()));
    let here = optimistic(&store, &diary).await;
    let id = JobId::new();
    let (attempted, ()) = tokio::join!(here.execute(Errand { ms: 600_000, ..errand("a") }.as_job().with_id(id)), async {
        wait_until(SOON, "it runs", async || diary.lines() == ["a 1"]).await;
        assert_eq!(store.request_cancel_if_started(&[id]).await.unwrap().len(), 1);
    });
    let attempted = attempted.unwrap();
    assert!(
        matches!(&attempted, Attempted::Here { ran: Ran::Archived { why, .. }, .. } if *why == FinishReason::CANCELLED),
        "{attempted:?}"
    );
    assert_eq!(database.only("archived", doc! {}).await.get_str("why").unwrap(), "cancelled");
    here.stop().await.unwrap();
}

/// I3: a process that was declared dead records nothing, and goes on under another id.
#[tokio::test]
async fn a_process_that_was_declared_dead_records_nothing_and_returns() {
    let ((database, store), diary) = (prepared().await, Arc::new(Diary::default()));
    let here = optimistic(&store, &diary).await;
    let (attempted, ()) = tokio::join!(here.execute(Errand { ms: 600_000, ..errand("a") }.as_job()), async {
        wait_until(SOON, "it runs", async || diary.lines() == ["a 1"]).await;
        database.raw("roster").update_many(doc! {}, doc! { "$set": { "retired": true } }).await.unwrap();
    });
    assert!(matches!(attempted.unwrap(), Attempted::NotRecorded { .. }));
    assert_eq!(diary.lines(), ["a 1", "cancelled"]);
    let held = database.only("scheduled", doc! {}).await;
    assert!(held.get_bool("locked").unwrap() && held.get_document("last_execution").unwrap().get("ended_at").is_none());
    wait_until(SOON, "it has returned", async || !is_queued(&here, errand("b").as_job()).await).await;
    here.stop().await.unwrap();
}

#[tokio::test]
async fn a_worker_without_classes_and_a_wrong_setting_are_refused() {
    let (_database, store) = prepared().await;
    let refused = async |worker: Worker, config: WorkerConfig| worker.optimistic(&store, config).await.unwrap_err();
    assert!(matches!(refused(Worker::new(), config()).await, WorkerError::NoClasses));
    let diary = Arc::new(Diary::default());
    assert!(matches!(refused(worker(&diary), config().concurrency(0)).await, WorkerError::Config(_)));
}
