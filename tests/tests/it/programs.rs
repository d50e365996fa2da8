//! Programs run by the real stock worker: what the machine, the worker's end and the workables file do to them.

use std::{fs, path::Path, process::Command, time::Duration};

use bson::{Document, doc};
use futures_util::TryStreamExt as _;
use recruiter_common::enqueue::NewJob;
use recruiter_tests::{
    local::store,
    mongo::TestDatabase,
    oracle::number,
    processes::{Process, binary},
    wait::wait_until,
};

const SOON: Duration = Duration::from_secs(30);

async fn count(database: &TestDatabase, collection: &str, filter: Document) -> u64 {
    database.raw(collection).count_documents(filter).await.unwrap()
}

async fn archived(database: &TestDatabase) -> Vec<Document> {
    database.raw("archived").find(doc! {}).await.unwrap().try_collect().await.unwrap()
}

async fn until_archived(database: &TestDatabase, jobs: u64) -> Vec<Document> {
    wait_until(SOON, "all is archived", async || count(database, "archived", doc! {}).await == jobs).await;
    archived(database).await
}

/// Writes a workables file; returns its path.
fn workables(directory: &Path, text: &str) -> String {
    let file = directory.join("workables.toml");
    fs::write(&file, text).unwrap();
    file.to_str().unwrap().to_owned()
}

/// A stock worker that a shell script becomes after it has changed something, by `exec "$@"`.
fn worker_by(script: &str, database: &TestDatabase, args: &[&str]) -> Process {
    let worker = binary("recruiter-worker");
    let command = [&["-c", script, "sh", worker.to_str().unwrap()], args].concat();
    Process::start("/bin/sh", &command, &[("MONGODB_URI", database.uri())])
}

fn worker(database: &TestDatabase, args: &[&str]) -> Process {
    Process::on(database, "recruiter-worker", args)
}

fn recruiter(database: &TestDatabase) -> Process {
    Process::on(database, "recruiter", &["run"])
}

async fn enqueue(database: &TestDatabase, class: &str, jobs: usize) {
    store(database).await.enqueue_many((0..jobs).map(|_| NewJob::of_class(class, doc! {}))).await.unwrap();
}

async fn until_ready(worker: &Process) {
    wait_until(SOON, "the worker is ready", async || worker.stderr().contains("ready for work")).await;
}

/// I5, I6: jobs do not pay for a worker that was given more of them than it can open files for.
#[tokio::test]
async fn a_worker_runs_no_more_programs_than_its_files_are_enough_for() {
    let database = TestDatabase::new().await;
    let directory = tempfile::tempdir().unwrap();
    let config = workables(directory.path(), "[workables.nap]\ncommand = [\"sleep\", \"1\"]\n");
    let _recruiter = recruiter(&database);
    let worker = worker_by("ulimit -n 200; exec \"$@\"", &database, &["--config", &config, "--concurrency", "120"]);
    enqueue(&database, "nap", 100).await;
    for job in until_archived(&database, 100).await {
        assert_eq!((job.get_str("why").unwrap(), number(&job, "attempts")), ("done", 1), "{job}");
    }
    let said = worker.stderr();
    assert!(said.contains("the limit of open files is too low for --concurrency 120: running at most 25 jobs"), "{said}");
    assert!(!said.contains("cannot start more programs"), "{said}");
}

/// The soft limit that a service has unless its unit says more.
#[tokio::test]
async fn a_worker_raises_its_soft_limit_of_open_files() {
    let database = TestDatabase::new().await;
    let directory = tempfile::tempdir().unwrap();
    let config = workables(directory.path(), "[workables.limit]\ncommand = [\"sh\", \"-c\", \"ulimit -n\"]\n");
    let _recruiter = recruiter(&database);
    let worker = worker_by("ulimit -Sn 100; ulimit -Hn 4000; exec \"$@\"", &database, &["--config", &config, "--concurrency", "500"]);
    enqueue(&database, "limit", 1).await;
    assert_eq!(until_archived(&database, 1).await[0].get_str("result").unwrap(), "4000");
    assert!(!worker.stderr().contains("too low"), "{}", worker.stderr());
}

/// The machine runs out of what programs need while the worker runs: its jobs are as they were, and are done when it has more.
#[tokio::test]
async fn a_program_that_the_machine_cannot_start_costs_its_job_nothing() {
    let database = TestDatabase::new().await;
    let directory = tempfile::tempdir().unwrap();
    let config = workables(directory.path(), "[workables.fast]\ncommand = [\"true\"]\n");
    let _recruiter = recruiter(&database);
    let worker = worker(&database, &["--config", &config, "--heartbeat", "500ms", "--memory-limit", "1GiB"]);
    until_ready(&worker).await;
    let open = fs::read_dir(format!("/proc/{}/fd", worker.pid())).unwrap().count();
    limit_files(&worker, open);
    enqueue(&database, "fast", 20).await;
    let released = doc! { "interruptions": { "$gte": 1 }, "locked": false, "last_execution": null, "executions": null };
    wait_until(SOON, "jobs are released as they were", async || count(&database, "scheduled", released.clone()).await > 0).await;
    assert!(archived(&database).await.is_empty(), "nothing was done, nothing has failed");
    limit_files(&worker, 1_000);
    for job in until_archived(&database, 20).await {
        assert_eq!((job.get_str("why").unwrap(), number(&job, "attempts") - number(&job, "interruptions")), ("done", 1), "{job}");
        assert_eq!(job.get("executions"), None, "{job}");
    }
    let said = worker.stderr();
    assert_eq!(said.matches("the machine cannot start more programs").count(), 1, "said once:\n{said}");
}

#[tokio::test]
async fn a_worker_that_is_out_of_files_still_keeps_its_memory_limit() {
    let database = TestDatabase::new().await;
    let _recruiter = recruiter(&database);
    let mut worker = worker(&database, &["--builtins", "--memory-limit", "150MiB"]);
    until_ready(&worker).await;
    limit_files(&worker, 3);
    store(&database).await.enqueue_many([NewJob::of_class("leak", doc! { "mib": 200 })]).await.unwrap();
    assert_eq!(worker.wait_exit(SOON).await.code(), Some(75));
}

/// Sets the soft limit of open files of a running process.
fn limit_files(process: &Process, limit: usize) {
    let done = Command::new("prlimit").args(["--pid", &process.pid().to_string(), &format!("--nofile={limit}:")]).status().unwrap();
    assert!(done.success());
}
