//! The test kit's own system: a recruiter, a cleaner and a worker in the process of a test, on a database of their own.

use std::{
    env, fs,
    path::Path,
    process::{Command, Output},
    sync::{Arc, Mutex},
    time::Duration,
};

use recruiter_common::{
    FinishReason, JobResult, NewJob, RetryManyTimes, WaitError, Workable,
    workers::{Chosen, WorkerChange},
};
use recruiter_testing::{System, SystemError, TestDatabase};
use recruiter_tests::{
    mongo,
    processes::mentioning,
    wait::{SOON, wait_until},
};
use recruiter_worker::{Context, Executable, NotDone, Worker, WorkerConfig};
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;

type Diary = Mutex<Vec<String>>;

/// Fails a few times, and then enqueues the next ones.
#[derive(Clone, Serialize, Deserialize)]
struct Step {
    name: String,
    fails: u32,
    next: Vec<Step>,
}

impl Workable for Step {
    const CLASS: &'static str = "Step";
    type Output = String;

    fn defaults() -> recruiter_common::Defaults {
        recruiter_common::Defaults::default().retry(RetryManyTimes::new(2, Duration::from_millis(300)))
    }
}

impl Executable for Step {
    type State = Diary;

    async fn execute(&self, diary: &Diary, job: &Context) -> Result<String, NotDone> {
        diary.lock().unwrap().push(format!("{} {}", self.name, job.attempt()));
        if job.retries() < self.fails {
            return Err(NotDone::failed("too-early", "not yet"));
        }
        for next in &self.next {
            next.as_job().enqueue(job.client()).await?;
        }
        Ok(self.name.to_uppercase())
    }
}

fn step(name: &str, fails: u32) -> Step {
    Step { name: name.into(), fails, next: Vec::new() }
}

fn worker(diary: &Arc<Diary>) -> Worker {
    Worker::new().register::<Step>(diary.clone()).unwrap()
}

fn lines(diary: &Diary) -> Vec<String> {
    std::mem::take(&mut *diary.lock().unwrap())
}

/// On the MongoDB that the other tests use, with a connection string that this driver alone would refuse.
async fn system(diary: &Arc<Diary>) -> System {
    let other = mongo::TestDatabase::new().await;
    let join = if other.uri().contains('?') { '&' } else { '?' };
    let database =
        TestDatabase::on(format!("{}{join}uuidRepresentation=standard&socketTimeoutMS=0&maxPoolSize=0\n", other.uri())).await.unwrap();
    System::over(database, worker(diary), WorkerConfig::default().concurrency(1)).await.unwrap()
}

/// Those of these databases that exist.
async fn existing(names: &[String]) -> Vec<String> {
    let other = mongo::TestDatabase::new().await;
    let found = other.database().client().list_database_names().await.unwrap();
    names.iter().filter(|name| found.contains(name)).cloned().collect()
}

#[tokio::test]
async fn jobs_run_end_to_end() {
    let diary = Arc::new(Diary::default());
    let system = System::start(worker(&diary), WorkerConfig::default().concurrency(1)).await.unwrap();
    assert_eq!(system.run::<Step>(step("retried", 2).as_job(), SOON).await.unwrap(), "RETRIED");
    assert_eq!(lines(&diary), ["retried 1", "retried 2", "retried 3"]);

    let failed = system.run::<Step>(step("fails", 9).as_job(), SOON).await.unwrap_err();
    let SystemError::Wait(WaitError::Failed { why, failure, .. }) = failed else { panic!("{failed:?}") };
    assert_eq!((why, failure.unwrap().class.as_str()), (FinishReason::TRIED_TOO_MANY_TIMES, "too-early"));
    lines(&diary);

    // What is due, and what that enqueues; not what is due later, and what waits for that.
    let parent = Step { next: vec![step("child", 0)], ..step("parent", 0) };
    parent.as_job().enqueue(system.client()).await.unwrap();
    let tomorrow = step("tomorrow", 0).as_job().after(Duration::from_secs(86_400)).enqueue(system.client()).await.unwrap();
    step("follows", 0).as_job().waits_for(tomorrow.id).enqueue(system.client()).await.unwrap();
    system.until_idle(SOON).await.unwrap();
    assert_eq!(lines(&diary), ["parent 1", "child 1"]);

    let soon = step("soon", 0).as_job().after(Duration::from_millis(500)).enqueue(system.client()).await.unwrap();
    let follower = step("follower", 0).as_job().waits_for(soon.id).enqueue(system.client()).await.unwrap();
    assert_eq!(soon.wait::<Step>(system.client(), SOON).await.unwrap(), "SOON");
    system.until_idle(SOON).await.unwrap();
    assert_eq!(lines(&diary), ["soon 1", "follower 1"]);
    assert_eq!(system.client().result_of::<Step>(follower.id).await.unwrap(), JobResult::Done("FOLLOWER".into()));
    system.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn systems_in_parallel_do_not_see_each_other() {
    let diaries = [(); 2].map(|()| Arc::new(Diary::default()));
    let (a, b) = tokio::join!(system(&diaries[0]), system(&diaries[1]));
    assert_ne!(a.client().database().name(), b.client().database().name());
    let many = async |system: &System, name: &str| {
        system.client().enqueue_many((0..50).map(|n| step(&format!("{name}{n}"), 0).as_job())).await.unwrap();
        system.until_idle(SOON).await.unwrap();
    };
    tokio::join!(many(&a, "a"), many(&b, "b"));
    for (diary, name) in diaries.iter().zip(["a", "b"]) {
        let lines = lines(diary);
        assert!(lines.len() == 50 && lines.iter().all(|line| line.starts_with(name)), "{lines:?}");
    }
    let (a, b) = tokio::join!(a.stop(), b.stop());
    a.and(b).unwrap();
}

#[tokio::test]
async fn nothing_is_left_of_a_system_that_is_stopped_or_dropped() {
    let diary = Arc::new(Diary::default());
    let [stopped, dropped] = [system(&diary).await, system(&diary).await];
    let names = [&stopped, &dropped].map(|system| system.client().database().name().to_owned());
    for system in [&stopped, &dropped] {
        system.run::<Step>(step("done", 0).as_job(), SOON).await.unwrap();
    }
    assert_eq!(existing(&names).await, names);
    stopped.stop().await.unwrap();
    drop(dropped);
    assert_eq!(existing(&names).await, [""; 0]);
    // The driver's tasks end when the server has answered once more, within 10 s.
    let tasks = Handle::current().metrics();
    wait_until(SOON, "no task is left", async || tasks.num_alive_tasks() == 0).await;
    assert_eq!(Arc::strong_count(&diary), 1, "the workers are gone");
    assert_eq!(existing(&names).await, [""; 0], "no task has created them again");
}

#[tokio::test]
async fn what_prevents_an_end_is_named() {
    let system = system(&Arc::default()).await;
    system.run::<Step>(step("a", 0).as_job(), SOON).await.unwrap();
    let unknown = NewJob::of_class("Unknown", bson::doc! {}).enqueue(system.client()).await.unwrap();
    let expected = format!("after 300ms not all jobs have ended (1 left: {} (Unknown, due))", unknown.id);
    // Of a stalled MongoDB it may not know yet which jobs are left.
    let is_named = async || system.until_idle(Duration::from_millis(300)).await.unwrap_err().to_string().starts_with(&expected);
    wait_until(SOON, &expected, is_named).await;
    let error = system.run::<Step>(step("a", 9).as_job(), Duration::from_millis(10)).await.unwrap_err();
    assert!(matches!(error, SystemError::Wait(WaitError::TimedOut { .. })), "{error:?}");
    system.client().workers().change(WorkerChange::Stop, &Chosen::All, "test", false).await.unwrap();
    let error = system.until_idle(SOON).await.unwrap_err();
    assert!(matches!(error, SystemError::Ended("worker")), "{error:?}");
    system.stop().await.unwrap();
}

#[tokio::test]
async fn a_worker_that_cannot_run_is_refused_before_mongodb_is_looked_for() {
    let refused = System::start(Worker::new(), WorkerConfig::default()).await.unwrap_err();
    assert!(refused.to_string().contains("register at least one workable"), "{refused}");
    let refused = System::start(worker(&Arc::default()), WorkerConfig::default().concurrency(0)).await.unwrap_err();
    assert!(matches!(refused, SystemError::Worker(_)), "{refused:?}");
}

/// The output of [`child`], this test binary once more, with this environment.
fn run_child(temporary: &Path, environment: &[(&str, &str)]) -> Output {
    Command::new(env::current_exe().unwrap())
        .args(["--ignored", "--exact", "kit_system::child", "--nocapture"])
        .env_remove("MONGODB_URI")
        .env("TMPDIR", temporary)
        .env("KIT_CHILD", "yes")
        .envs(environment.iter().copied())
        .output()
        .unwrap()
}

#[tokio::test]
#[ignore = "runs in the environment that the next tests make"]
async fn child() {
    let Ok(wish) = env::var("KIT_CHILD") else { return };
    match System::start(worker(&Arc::default()), WorkerConfig::default()).await {
        Err(error) => println!("refused: {error}"),
        Ok(system) => {
            println!("on {}", system.database().connect_args().uri);
            system.run::<Step>(step("a", 0).as_job(), SOON).await.unwrap();
            if wish == "killed" {
                let this = nix::unistd::getpid();
                nix::sys::signal::kill(this, nix::sys::signal::Signal::SIGKILL).unwrap();
            }
            system.stop().await.unwrap();
        }
    }
}

#[test]
fn a_mongodb_that_cannot_be_used_is_named_with_the_remedy() {
    let temporary = tempfile::tempdir().unwrap();
    let cases = [
        ("MONGODB_URI", "mongodb://127.0.0.1:1/", "MongoDB at 127.0.0.1:1 could not be reached within 10s"),
        ("MONGODB_URI", "127.0.0.1", "the MongoDB connection string is not valid"),
        ("RECRUITER_MONGOD", "/nowhere/mongod", "/nowhere/mongod is not an executable program: correct --mongod or RECRUITER_MONGOD"),
        ("RECRUITER_MONGOD", "/bin/false", "mongod ended by itself"),
    ];
    for (name, value, expected) in cases {
        let said = String::from_utf8_lossy(&run_child(temporary.path(), &[(name, value)]).stdout).into_owned();
        assert!(said.contains("refused: ") && said.contains(expected), "{name}={value}: {said}");
    }
    assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn the_mongodb_of_the_environment_is_used() {
    let temporary = tempfile::tempdir().unwrap();
    let other = mongo::TestDatabase::new().await;
    let output = run_child(temporary.path(), &[("MONGODB_URI", other.uri())]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let host = other.uri().rsplit_once('/').unwrap().0;
    assert!(output.status.success() && said.contains(&format!("on {host}/recruiter_test_")), "{said}");
}

#[tokio::test]
async fn the_mongodb_of_the_kit_ends_with_its_process() {
    for wish in ["stopped", "killed"] {
        let temporary = tempfile::tempdir().unwrap();
        // Empty variables are as if they were not set.
        let mongod = env::var("RECRUITER_MONGOD").unwrap_or_default();
        let output = run_child(temporary.path(), &[("KIT_CHILD", wish), ("MONGODB_URI", " "), ("RECRUITER_MONGOD", &mongod)]);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(said.contains("on mongodb://127.0.0.1:") && output.status.success() == (wish == "stopped"), "{said}");
        wait_until(SOON, "mongod and its data are gone", async || {
            mentioning(temporary.path().to_str().unwrap()).is_empty() && fs::read_dir(temporary.path()).unwrap().count() == 0
        })
        .await;
    }
}
