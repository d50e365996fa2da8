//! The library: typed workables, shared state, context, hooks, policies of one's own, transactions.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use bson::{Document, doc, oid::ObjectId};
use mongodb::event::{EventHandler, command::CommandEvent};
use recruiter_common::{
    ConnectArgs, Decision, Failure, FinishReason, History, JobId, JobResult, NewJob, RetryManyTimes, RetryPolicy, Workable,
    shutdown::pause, store::Store,
};
use recruiter_tests::{
    diary::Diary,
    factory::minimal_job,
    fail_points::FailPoint,
    local::{self, Local, connect_args, prepared, store},
    mongo::TestDatabase,
    promise,
    wait::{SOON, Stopwatch, best_of_three, wait_for, wait_until},
    workable,
};
use recruiter_worker::{BlockingExecutable, Context, Executable, NotDone, Worker};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Greet {
    name: String,
    fail_until_attempt: u32,
}
workable!(Greet -> String);

impl Executable for Greet {
    type State = Diary;

    async fn execute(&self, diary: &Diary, job: &Context) -> Result<String, NotDone> {
        let last = job.last_execution().and_then(|execution| execution.class.clone()).unwrap_or_default();
        diary.write(format!("attempt {} last={} after={last}", job.attempt(), job.is_last_attempt()));
        if job.retries() + 1 < self.fail_until_attempt {
            return Err(NotDone::failed("too-early", "not yet"));
        }
        Ok(format!("hello, {}", self.name))
    }

    async fn after_success(&self, diary: &Diary, _job: &Context) {
        diary.write("success");
    }

    async fn after_failure(&self, diary: &Diary, _job: &Context, failure: &Failure) {
        diary.write(format!("failure {}", failure.class));
    }

    async fn after_last_failure(&self, diary: &Diary, _job: &Context, failure: &Failure) {
        diary.write(format!("last failure {}", failure.class));
    }
}

/// The number of executions.
fn attempts(diary: &Diary) -> usize {
    diary.lines().iter().filter(|line| line.starts_with("attempt")).count()
}

/// Waits for a job in the archive.
/// Waits until a job has ended for the readers of a majority, too.
async fn result_of<W: Workable>(store: &Store, id: JobId) -> JobResult<W::Output> {
    let ended = async || {
        let result = store.result_of::<W>(id).await.unwrap();
        (!matches!(result, JobResult::Unfinished)).then_some(result)
    };
    wait_for(SOON, "the job has ended", ended).await
}

#[tokio::test]
async fn a_job_is_executed_with_its_parameters_and_archived_with_its_result() {
    let ((database, store), diary) = (prepared().await, Arc::new(Diary::default()));
    let processes = Local::pair(&database, &[], Worker::new().register::<Greet>(diary.clone()).unwrap(), &[]);
    let job = Greet { name: "Ada".into(), fail_until_attempt: 0 }.as_job().in_group("mail").tag("a").tag("b").urn("urn:x");
    let id = job.enqueue(&store).await.unwrap().id;
    let archived = database.archived(id).await;
    assert_eq!(archived.get_str("result").unwrap(), "hello, Ada");
    assert_eq!(archived.get_str("why").unwrap(), "done");
    assert_eq!(archived.get_str("group").unwrap(), "mail");
    assert_eq!(archived.get_array("tags").unwrap().len(), 2);
    assert_eq!(archived.get("attempts").and_then(|n| n.as_i64().or(n.as_i32().map(i64::from))), Some(1));
    assert!(database.raw("scheduled").find_one(doc! {}).await.unwrap().is_none());
    wait_until(SOON, "the hook was called", async || diary.lines().len() == 2).await;
    assert_eq!(diary.lines(), ["attempt 1 last=true after=", "success"]);
    local::stop(processes).await;
    assert_eq!(database.count("roster", doc! {}).await, 0, "who stops leaves the roster");
}

#[tokio::test]
async fn a_failed_job_is_tried_again_as_its_policy_says_and_keeps_its_history() {
    let ((database, store), diary) = (prepared().await, Arc::new(Diary::default()));
    let processes = Local::pair(&database, &[], Worker::new().register::<Greet>(diary.clone()).unwrap(), &[]);
    let policy = RetryManyTimes::new(1, Duration::from_millis(50)).unwrap();
    let greet = |fail_until_attempt| Greet { name: "Ada".into(), fail_until_attempt }.as_job().retry(&policy);
    let id = greet(2).enqueue(&store).await.unwrap().id;
    let done = database.archived(id).await;
    wait_until(SOON, "the hooks were called", async || diary.lines().len() == 4).await;
    assert_eq!(diary.lines(), ["attempt 1 last=false after=", "failure too-early", "attempt 2 last=true after=too-early", "success"]);
    let executions = done.get_array("executions").unwrap();
    assert_eq!(executions.len(), 2, "both attempts");
    assert_eq!(executions[0].as_document().unwrap().get_str("class").unwrap(), "too-early");
    assert_eq!(executions[1].as_document().unwrap(), done.get_document("last_execution").unwrap());
    diary.take();
    let id = greet(9).enqueue(&store).await.unwrap().id;
    let failed = database.archived(id).await;
    assert_eq!(failed.get_str("why").unwrap(), FinishReason::TRIED_TOO_MANY_TIMES.as_str());
    assert!(!failed.get_bool("done").unwrap());
    wait_until(SOON, "the hooks were called", async || diary.lines().len() == 5).await;
    assert_eq!(diary.lines()[3..], ["failure too-early", "last failure too-early"]);
    local::stop(processes).await;
}

#[derive(Clone, Serialize, Deserialize)]
struct Compute {
    n: u64,
}
workable!(Compute -> u64);

impl BlockingExecutable for Compute {
    type State = AtomicU32;

    fn execute(&self, entered: &AtomicU32, job: &Context) -> Result<u64, NotDone> {
        entered.fetch_add(1, Ordering::SeqCst);
        if self.n == 0 {
            let number: u64 = "no number".parse()?;
            return Ok(number);
        }
        if self.n == 1 {
            panic!("one is too small");
        }
        while self.n == 2 && !job.is_cancelled() {
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok((1..=self.n).sum())
    }

    fn time_limit(&self) -> Option<Duration> {
        (self.n == 2).then_some(Duration::from_millis(200))
    }
}

#[tokio::test]
async fn a_blocking_workable_may_return_any_error_panic_or_take_too_long() {
    let (database, store) = prepared().await;
    let processes = Local::pair(&database, &[], Worker::new().register_blocking::<Compute>(AtomicU32::new(0)).unwrap(), &[]);
    for (n, class, message) in [(0, "ParseIntError", "invalid digit"), (1, "panic", "one is too small"), (2, "timeout", "200ms")] {
        let id = Compute { n }.as_job().enqueue(&store).await.unwrap().id;
        let ended = database.archived(id).await;
        let execution = ended.get_document("last_execution").unwrap();
        assert_eq!(execution.get_str("class").unwrap(), class);
        assert!(execution.get_str("message").unwrap().contains(message), "{execution}");
        let JobResult::Failed { why, failure: Some(failure) } = result_of::<Compute>(&store, id).await else { panic!("{n}") };
        assert_eq!((why, failure.class.as_str()), (FinishReason::NOT_SCHEDULED_BY_RETRY_POLICY, class));
        assert!(store.result_of::<Greet>(id).await.is_err_and(|error| error.to_string().contains("class `Compute`, not `Greet`")));
    }
    let waiting = Compute { n: 3 }.as_job().after(Duration::from_secs(3_600)).enqueue(&store).await.unwrap();
    assert_eq!(store.result_of::<Compute>(waiting.id).await.unwrap(), JobResult::Unfinished);
    assert_eq!(store.result_of::<Compute>(JobId::new()).await.unwrap(), JobResult::Unknown);
    let id = Compute { n: 100 }.as_job().enqueue(&store).await.unwrap().id;
    assert_eq!(database.archived(id).await.get_i64("result").unwrap(), 5050);
    assert_eq!(result_of::<Compute>(&store, id).await, JobResult::Done(5050));
    local::stop(processes).await;
}

#[derive(Debug)]
struct OnlyOnFriday;

impl RetryPolicy for OnlyOnFriday {
    fn class(&self) -> &str {
        "OnlyOnFriday"
    }

    fn parameters(&self) -> Document {
        doc! {}
    }

    fn decide(&self, job: &History<'_>, _failure: &Failure, _failed_at: recruiter_common::instant::Instant) -> Decision {
        if job.attempts < 3 { Decision::RetryAfter(Duration::ZERO) } else { Decision::Archive(FinishReason::custom("not-friday")) }
    }

    fn is_last_attempt(&self, job: &History<'_>, _now: recruiter_common::instant::Instant) -> bool {
        job.attempts >= 3
    }
}

/// The six fields of the README say nothing of the age: the id does. The date at which the job is due is no age.
#[tokio::test]
async fn a_job_that_says_nothing_of_its_age_is_as_old_as_its_id() {
    let (database, store) = prepared().await;
    let processes = Local::pair(&database, &[], Worker::new().register::<Greet>(Arc::new(Diary::default())).unwrap(), &[]);
    let rows = vec![doc! { "younger_than_seconds": 1_800, "seconds_to_wait": 0.2 }];
    let [young, old] = [0, 3_600].map(|age| ObjectId::from_parts(u32::try_from(store.now().timestamp() - age).unwrap(), [0; 5], [0; 3]));
    for id in [young, old] {
        let mut job = minimal_job("Greet");
        job.extend(doc! {
            "_id": id,
            "workable": { "class": "Greet", "parameters": { "name": "Ada", "fail_until_attempt": 1_000 } },
            "retry_policy": { "class": "TimeTable", "parameters": { "time_table": rows.clone() } },
        });
        database.raw("scheduled").insert_one(&job).await.unwrap();
    }
    let ended = database.archived(old).await;
    assert_eq!((ended.get_str("why").unwrap(), ended.get_i32("attempts").unwrap()), ("tried-too-many-times", 1), "{ended}");
    database.until("scheduled", doc! { "_id": young, "attempts": { "$gt": 1 } }, 1, "it is retried").await;
    local::stop(processes).await;
}

#[tokio::test]
async fn a_policy_of_ones_own_decides_and_a_job_with_an_unknown_one_waits_for_who_knows_it() {
    let database = TestDatabase::new().await;
    let diary = Arc::new(Diary::default());
    let recruiter = Local::recruiter(&database, &[]);
    let worker = Worker::new().register::<Greet>(diary.clone()).unwrap().register_policy("OnlyOnFriday", |_, _| Ok(OnlyOnFriday)).unwrap();
    let worker = Local::worker(&database, worker, &[]);
    let store = store(&database).await;
    let greet = Greet { name: "Ada".into(), fail_until_attempt: 9 };
    let id = greet.as_job().retry(&OnlyOnFriday).enqueue(&store).await.unwrap().id;
    let ended = database.archived(id).await;
    assert_eq!(ended.get_str("why").unwrap(), "not-friday");
    assert_eq!(ended.get_array("executions").unwrap().len(), 3);
    assert_eq!(attempts(&diary), 3);
    let mut unusable = minimal_job(Greet::CLASS);
    unusable.insert("retry_policy", doc! { "class": "RetryManyTimes" });
    let id: JobId = unusable.get_object_id("_id").unwrap().into();
    database.raw("scheduled").insert_one(unusable).await.unwrap();
    let ended = database.archived(id).await;
    assert_eq!(ended.get_str("why").unwrap(), "malformed");
    let message = ended.get_document("last_execution").unwrap().get_str("message").unwrap().to_owned();
    assert!(message.contains("RetryManyTimes") && message.contains("retry_how_many_times"), "{message}");
    assert_eq!(attempts(&diary), 3, "it was not entered");
    // Alone and nested: a newer worker may know a policy that this worker does not.
    let newer = recruiter_common::job::StoredPolicy { class: "OnlyOnSunday".into(), parameters: bson::Bson::Null };
    let within = doc! { "retriable_exceptions": ["x"], "filtered_retry_policy": { "class": "OnlyOnSunday", "parameters": {} } };
    let within = recruiter_common::job::StoredPolicy { class: "RetriableExceptionFilter".into(), parameters: within.into() };
    let mut waiting = Vec::new();
    for policy in [newer, within] {
        waiting.push(greet.as_job().retry_stored(policy).enqueue(&store).await.unwrap().id);
    }
    let known = greet.as_job().enqueue(&store).await.unwrap().id;
    database.archived(known).await;
    for id in &waiting {
        let left = doc! { "_id": id, "locked": false, "attempts": 0 };
        assert_eq!(database.count("scheduled", left).await, 1, "it was left alone");
    }
    worker.stop().await;
    let diary = Arc::new(Diary::default());
    let newer = Worker::new().register::<Greet>(diary.clone()).unwrap().register_policy("OnlyOnSunday", |_, _| Ok(OnlyOnFriday)).unwrap();
    let newer = Local::worker(&database, newer, &[]);
    for (id, why) in waiting.into_iter().zip(["not-friday", "non-retriable-exception"]) {
        assert_eq!(database.archived(id).await.get_str("why").unwrap(), why);
    }
    local::stop([newer, recruiter]).await;
}

/// I1 and I2 for an application that does not know whether its call succeeded.
#[tokio::test]
async fn a_job_sent_again_under_its_id_is_enqueued_and_executed_once() {
    let ((database, store), diary) = (prepared().await, Arc::new(Diary::default()));
    let id = JobId::new();
    let send = || Greet { name: "Ada".into(), fail_until_attempt: 0 }.as_job().with_id(id).enqueue(&store);
    assert!(send().await.unwrap().is_new);
    assert!(!send().await.unwrap().is_new, "it is scheduled");
    let processes = Local::pair(&database, &[], Worker::new().register::<Greet>(diary.clone()).unwrap(), &[]);
    let first = database.archived(id).await;
    assert!(!send().await.unwrap().is_new, "it is archived");
    // As if the look into the archive had been lost: inserted again behind our back.
    let mut copy = first.clone();
    copy.extend(doc! { "done": false, "attempts": 0, "priority": 5, "scheduled_at": bson::DateTime::from_millis(0) });
    copy.remove("why");
    copy.remove("last_execution");
    database.raw("scheduled").insert_one(&copy).await.unwrap();
    store.announce_jobs(["generic"]).await;
    wait_until(SOON, "the copy is gone", async || database.raw("scheduled").find_one(doc! {}).await.unwrap().is_none()).await;
    assert_eq!(database.raw("archived").find_one(doc! { "_id": id }).await.unwrap(), Some(first), "the archive is untouched");
    promise!(attempts(&diary) == 1, "a job ran twice");
    local::stop(processes).await;
}

/// Blocks the thread, like code that computes, from the beginning or after a wait.
#[derive(Serialize, Deserialize)]
struct Greedy {
    waits: bool,
}
workable!(Greedy);

impl Executable for Greedy {
    type State = Diary;

    async fn execute(&self, diary: &Diary, job: &Context) -> Result<(), NotDone> {
        if self.waits {
            tokio::task::yield_now().await;
        }
        let begun = Instant::now();
        while !job.is_cancelled() && begun.elapsed() < SOON / 2 {
            std::thread::sleep(Duration::from_millis(1));
        }
        diary.write(format!("{:?}", job.cancellation()));
        Ok(())
    }

    fn time_limit(&self) -> Option<Duration> {
        Some(Duration::from_millis(200))
    }
}

#[tokio::test]
async fn code_that_computes_learns_that_its_time_is_over_and_has_failed() {
    let database = TestDatabase::new().await;
    let diary = Arc::new(Diary::default());
    let processes = Local::pair(&database, &[], Worker::new().register::<Greedy>(diary.clone()).unwrap(), &[]);
    for waits in [false, true] {
        // If the test is stalled while it waits, its time is over before it computes.
        while diary.lines().is_empty() {
            let id = Greedy { waits }.as_job().enqueue(&*store(&database).await).await.unwrap().id;
            let execution = database.archived(id).await.get_document("last_execution").unwrap().clone();
            assert_eq!(execution.get_str("class").unwrap(), "timeout", "{execution}");
        }
        assert_eq!(diary.take(), ["Some(TimeLimit)"]);
    }
    local::stop(processes).await;
}

/// Its own code panics wherever a user's code can.
#[derive(Serialize)]
struct Explosive {
    decode: bool,
}

impl<'de> Deserialize<'de> for Explosive {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let decode = Document::deserialize(from)?.get_bool("decode").unwrap();
        assert!(!decode, "while it is decoded");
        Ok(Self { decode })
    }
}
workable!(Explosive);

impl Executable for Explosive {
    type State = ();

    async fn execute(&self, _state: &(), _job: &Context) -> Result<(), NotDone> {
        Err(NotDone::failed("planned", "as planned"))
    }

    fn time_limit(&self) -> Option<Duration> {
        panic!("while it is asked for its time limit")
    }

    async fn after_failure(&self, _state: &(), _job: &Context, _failure: &Failure) {
        panic!("in a hook")
    }
}

#[derive(Debug)]
struct ExplosivePolicy;

impl RetryPolicy for ExplosivePolicy {
    fn class(&self) -> &str {
        "ExplosivePolicy"
    }

    fn parameters(&self) -> Document {
        doc! {}
    }

    fn decide(&self, _job: &History<'_>, _failure: &Failure, _failed_at: recruiter_common::instant::Instant) -> Decision {
        panic!("while it decides")
    }

    fn is_last_attempt(&self, _job: &History<'_>, _now: recruiter_common::instant::Instant) -> bool {
        false
    }
}

/// A policy that thinks between the start of a job and its workable, until it is let go.
#[derive(Debug)]
struct Slow(Arc<AtomicBool>);

impl RetryPolicy for Slow {
    fn class(&self) -> &str {
        "Slow"
    }

    fn parameters(&self) -> Document {
        doc! {}
    }

    fn decide(&self, _job: &History<'_>, _failure: &Failure, _failed_at: recruiter_common::instant::Instant) -> Decision {
        Decision::Archive(FinishReason::custom("slow"))
    }

    fn is_last_attempt(&self, _job: &History<'_>, _now: recruiter_common::instant::Instant) -> bool {
        tokio::task::block_in_place(|| {
            while !self.0.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        true
    }
}

/// I3: a process that stood still after the start of a job does not enter it before it knows that it still lives for the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_started_job_is_not_entered_while_the_lease_is_over() {
    let ((database, store), diary) = (prepared().await, Arc::new(Diary::default()));
    let recruiter = Local::recruiter(&database, &[]);
    let let_go = LetGo(Arc::default());
    let policy = let_go.0.clone();
    let worker = Worker::new().register::<Greet>(diary.clone()).unwrap();
    let worker = worker.register_policy("Slow", move |_, _| Ok(Slow(policy.clone()))).unwrap();
    let worker = Local::worker(&database, worker, &["--heartbeat", "250ms", "--lease", "900ms"]);
    database.until("roster", doc! { "available": true }, 1, "the worker is there").await;
    let id = Greet { name: "Ada".into(), fail_until_attempt: 0 }.as_job().retry(&Slow(Arc::default())).enqueue(&store).await.unwrap().id;
    database.until("scheduled", doc! { "_id": id, "locked": true }, 1, "it is started").await;
    let fault = FailPoint::new("recruiter-worker-heartbeat", &["findAndModify"]).namespace(database.name(), "roster").error_code(1);
    let armed = fault.arm(database.uri()).await;
    pause(Duration::from_millis(1_500)).await;
    let fails_again = async || {
        let before = armed.struck().await;
        wait_until(SOON, "heartbeats fail", async || armed.struck().await >= before + 3).await;
    };
    fails_again().await;
    // It refuses one assignment, and is offered no other before its next heartbeat.
    let refused = Greet { name: "Eve".into(), fail_until_attempt: 0 }.as_job().enqueue(&store).await.unwrap().id;
    let entry = async || database.raw("roster").find_one(doc! {}).await.unwrap().unwrap();
    wait_until(SOON, "it refuses", async || entry().await.get_bool("available").is_ok_and(|available| !available)).await;
    let round = entry().await.get("round").cloned();
    fails_again().await;
    assert_eq!(entry().await.get("round"), round.as_ref(), "it was assigned again and again");
    drop(let_go);
    fails_again().await;
    promise!(diary.lines().is_empty(), "entered without a lease: {:?}", diary.lines());
    drop(armed);
    // On a busy machine the short lease may be over once more before the second is entered: then it is released, and started again.
    for job in [id, refused] {
        assert_eq!(database.archived(job).await.get_str("why").unwrap(), "done");
    }
    promise!(attempts(&diary) == 2, "a job ran twice");
    local::stop([worker, recruiter]).await;
}

/// I9: a panic in a user's code is the end of its job, never of the worker.
#[tokio::test]
async fn user_code_that_panics_ends_its_job_alone() {
    let (database, store) = prepared().await;
    let recruiter = Local::recruiter(&database, &[]);
    let worker = Worker::new().register::<Explosive>(()).unwrap().register::<Greet>(Diary::default()).unwrap();
    let worker = worker.register_policy("ExplosivePolicy", |_, _| Ok(ExplosivePolicy)).unwrap().listen(|_| panic!("in a listener"));
    let worker = Local::worker(&database, worker, &[]);
    let message = async |job: NewJob| {
        let id = job.enqueue(&store).await.unwrap().id;
        database.archived(id).await.get_document("last_execution").unwrap().get_str("message").unwrap().to_owned()
    };
    assert!(message(Explosive { decode: true }.as_job()).await.contains("while it is decoded"));
    assert!(message(Explosive { decode: false }.as_job()).await.contains("its time limit"));
    let greet = |n| Greet { name: "Ada".into(), fail_until_attempt: n }.as_job();
    assert!(message(greet(9).retry(&ExplosivePolicy)).await.contains("while it decides"));
    let id = greet(0).enqueue(&store).await.unwrap().id;
    assert_eq!(database.archived(id).await.get_str("why").unwrap(), "done", "the worker goes on");
    local::stop([worker, recruiter]).await;
}

/// I9: the worker watches its internal tasks. A task that panics is not replaced, because its state is lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_own_task_panics_ends_and_leaves_its_jobs_to_the_cleaner() {
    let is_commit: fn(&Document) -> bool = |command| command.contains_key("commitTransaction");
    let is_heartbeat: fn(&Document) -> bool = |command| command.get_str("findAndModify").is_ok_and(|collection| collection == "roster");
    let is_progress: fn(&Document) -> bool = |command| format!("{command}").contains("item_outcomes") && command.contains_key("update");
    for (task, panics_at, holds) in [("commit", is_commit, 1), ("heartbeat", is_heartbeat, 0), ("progress", is_progress, 1)] {
        let database = TestDatabase::new().await;
        // The first heartbeat is part of the registration.
        let spared = AtomicBool::new(task == "heartbeat");
        let handler = EventHandler::callback(move |event| {
            if let CommandEvent::Started(started) = event
                && panics_at(&started.command)
            {
                assert!(spared.swap(false, Ordering::Relaxed), "a panic that this test wants, in {task}");
            }
        });
        let connect = ConnectArgs { commands: Some(handler), ..connect_args(&database) };
        let recruiter = Local::recruiter(&database, &[]);
        let store = store(&database).await;
        let greet = || Greet { name: "Ada".into(), fail_until_attempt: 0 };
        if task == "progress" {
            NewJob::bundle_of_class("sleep", [doc! { "ms": 0 }, doc! { "ms": 600_000 }]).enqueue(&store).await.unwrap();
        } else {
            greet().as_job().enqueue(&store).await.unwrap();
        }
        let worker = Worker::new().register_builtins().unwrap().register::<Greet>(Arc::new(Diary::default())).unwrap();
        let ended = tokio::time::timeout(SOON, Local::worker_over(connect, worker, &["--heartbeat", "500ms"]).ended()).await;
        let error = ended.unwrap_or_else(|_| panic!("{task}: the worker goes on")).expect_err("it has panicked").to_string();
        assert!(error.contains("panicked"), "{error}");
        assert_eq!(database.count("roster", doc! {}).await, 1, "{task}: its document names its jobs for the cleaner");
        let held = database.count("scheduled", doc! { "locked": true }).await;
        assert!(held >= holds, "{task}: nothing was recorded");
        recruiter.stop().await;
    }
}

/// Also against the connection string: a secondary may not know yet what was just written.
#[tokio::test]
async fn reads_go_to_the_primary_even_when_the_uri_prefers_secondaries() {
    let database = TestDatabase::new().await;
    let mut connect = recruiter_tests::local::connect_args(&database);
    connect.uri += if connect.uri.contains('?') { "&readPreference=secondary" } else { "?readPreference=secondary" };
    let store = Store::connect(&connect, "test").await.unwrap();
    let id = NewJob::of_class("x", doc! {}).enqueue(&store).await.unwrap().id;
    // The set has no secondary: a read that asked for one would find no server.
    assert_eq!(store.unlocked(&[id]).await.unwrap().len(), 1);
}

/// Listening for hints takes a connection for as long as nothing is said.
#[tokio::test]
async fn a_connection_string_that_allows_too_few_connections_starves_no_job() {
    let database = TestDatabase::new().await;
    let mut connect = recruiter_tests::local::connect_args(&database);
    connect.uri += if connect.uri.contains('?') { "&maxPoolSize=1" } else { "?maxPoolSize=1" };
    let store = Store::connect(&connect, "test").await.unwrap();
    let hints = store.hints(recruiter_common::store::Listener::Recruiter);
    wait_until(SOON, "it listens", async || hints.is_listening()).await;
    // A connection that listens is free again after ten seconds.
    best_of_three(Duration::from_secs(4), "three commands", async || {
        let began = Stopwatch::start();
        for _ in 0..3 {
            store.refresh_clock().await.unwrap();
        }
        began.elapsed()
    })
    .await;
}

/// Blocks until it is let go, and ignores cancellations.
#[derive(Clone, Serialize, Deserialize)]
struct Stubborn {}
workable!(Stubborn);

impl BlockingExecutable for Stubborn {
    type State = AtomicBool;

    fn execute(&self, let_go: &Self::State, _job: &Context) -> Result<(), NotDone> {
        while !let_go.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

/// Lets the thread go also when the test fails, which would wait for it otherwise.
struct LetGo(Arc<AtomicBool>);

impl Drop for LetGo {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A thread cannot be killed: its job stays locked, and the worker stays in the roster, for the cleaner to end it when
/// the process is gone. Unlocked before, it would run twice at the same time.
#[tokio::test]
async fn a_stopping_worker_keeps_a_job_whose_thread_still_runs() {
    let (database, store) = prepared().await;
    let let_go = LetGo(Arc::default());
    let [worker, recruiter] =
        Local::pair(&database, &[], Worker::new().register_blocking::<Stubborn>(let_go.0.clone()).unwrap(), &["--grace", "100ms"]);
    let again = RetryManyTimes::new(3, Duration::ZERO).unwrap();
    Stubborn {}.as_job().retry(&again).enqueue(&store).await.unwrap();
    let locked = async || database.count("scheduled", doc! { "locked": true }).await;
    wait_until(SOON, "it runs", async || locked().await == 1).await;
    worker.stop().await;
    assert_eq!(locked().await, 1, "no other worker may start it");
    let roster = database.raw("roster").find_one(doc! {}).await.unwrap().expect("the roster names what is left");
    assert_eq!(roster.get_array("working_on").unwrap().len(), 1);
    drop(let_go);
    recruiter.stop().await;
}

/// A worker that was declared dead comes back in another session. Threads of the first session still run, beyond the configured concurrency
/// if the second one offered all slots.
#[tokio::test]
async fn threads_that_outlive_their_session_keep_their_slots() {
    let (database, store) = prepared().await;
    let let_go = LetGo(Arc::default());
    let flags = ["--concurrency", "3", "--heartbeat", "200ms"];
    let processes = Local::pair(&database, &[], Worker::new().register_blocking::<Stubborn>(let_go.0.clone()).unwrap(), &flags);
    for _ in 0..2 {
        Stubborn {}.as_job().enqueue(&store).await.unwrap();
    }
    let roster = database.raw("roster");
    wait_until(SOON, "two run", async || roster.count_documents(doc! { "working_on": { "$size": 2 } }).await.unwrap() == 1).await;
    let dead = roster.find_one_and_delete(doc! {}).await.unwrap().unwrap().get_object_id("_id").unwrap();
    let offers =
        async |free: i32| roster.count_documents(doc! { "_id": { "$ne": dead }, "available": true, "free": free }).await.unwrap() == 1;
    wait_until(SOON, "another session offers the third slot", async || offers(1).await).await;
    drop(let_go);
    wait_until(SOON, "it offers all slots", async || offers(3).await).await;
    local::stop(processes).await;
}

/// Panics when it is dropped.
#[derive(Serialize, Deserialize)]
struct Fragile {}
workable!(Fragile);

impl Executable for Fragile {
    type State = ();

    async fn execute(&self, _state: &(), _job: &Context) -> Result<(), NotDone> {
        Ok(())
    }
}

impl Drop for Fragile {
    fn drop(&mut self) {
        panic!("while it is dropped");
    }
}

/// I9, as above.
#[tokio::test]
async fn a_workable_whose_destructor_panics_is_done_and_its_worker_goes_on() {
    let (database, store) = prepared().await;
    let processes = Local::pair(&database, &[], Worker::new().register::<Fragile>(()).unwrap(), &[]);
    for _ in 0..2 {
        let id = NewJob::of_class(Fragile::CLASS, doc! {}).enqueue(&store).await.unwrap().id;
        assert_eq!(database.archived(id).await.get_str("why").unwrap(), "done");
    }
    local::stop(processes).await;
}

/// Enqueues the next one with its labels.
#[derive(Serialize, Deserialize)]
struct Chain {
    left: u32,
}
workable!(Chain -> String);

impl Executable for Chain {
    type State = ();

    async fn execute(&self, _state: &(), job: &Context) -> Result<String, NotDone> {
        let labels = format!("{:?} {:?}", job.tags(), job.urn());
        if let Some(left) = self.left.checked_sub(1) {
            let next = job.tags().iter().fold(Chain { left }.as_job(), |next, tag| next.tag(tag));
            next.enqueue(job.client()).await?;
        }
        Ok(labels)
    }
}

#[tokio::test]
async fn a_workable_knows_the_labels_of_its_job_and_can_enqueue() {
    let (database, store) = prepared().await;
    let processes = Local::pair(&database, &[], Worker::new().register::<Chain>(()).unwrap(), &[]);
    let first = Chain { left: 1 }.as_job().tag("a").tag("b").urn("urn:x").enqueue(&store).await.unwrap().id;
    assert_eq!(database.archived(first).await.get_str("result").unwrap(), r#"["a", "b"] Some("urn:x")"#);
    let ended = async || database.raw("archived").find_one(doc! { "_id": { "$ne": first } }).await.unwrap();
    let next = wait_for(SOON, "the next one is archived", ended).await;
    assert_eq!(next.get_str("result").unwrap(), r#"["a", "b"] None"#);
    local::stop(processes).await;
}
