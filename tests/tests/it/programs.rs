//! Programs run by the real stock worker: the effects of the machine, of the worker's end, and of the workables file.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use bson::{Document, doc};
use futures_util::TryStreamExt as _;
use recruiter_common::{enqueue::NewJob, ids::JobId};
use recruiter_tests::{
    local::store,
    mongo::TestDatabase,
    oracle::number,
    processes::{Process, binary},
    wait::{wait_for, wait_until},
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

/// From the command line to a program, for each job or long-lived; what is no trace is refused.
#[tokio::test]
async fn a_trace_goes_from_the_enqueuer_to_the_program() {
    let database = TestDatabase::new().await;
    let directory = tempfile::tempdir().unwrap();
    let config = workables(directory.path(), "[workables.trace]\ncommand = [\"printenv\", \"TRACEPARENT\"]\n");
    let (_recruiter, _worker) = (recruiter(&database), worker(&database, &["--config", &config]));
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let said = super::cli::recruiter(&database, &["enqueue", "--class", "trace", "--traceparent", trace]);
    assert_eq!(said.code, 0, "{}", said.err);
    let job = until_archived(&database, 1).await.remove(0);
    assert_eq!((job.get_str("result").unwrap(), job.get_str("traceparent").unwrap()), (trace, trace), "{job}");
    let refused = super::cli::recruiter(&database, &["enqueue", "--class", "trace", "--traceparent", "00-short"]);
    assert!(refused.code == 2 && refused.err.contains("traceparent"), "{}", refused.err);
    let refused = NewJob::of_class("trace", doc! {}).traceparent("").enqueue(&store(&database).await).await.unwrap_err();
    assert!(refused.to_string().contains("W3C"), "{refused}");
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
    assert!(!said.contains("cannot start more jobs"), "{said}");
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
    assert_eq!(said.matches("the machine cannot start more jobs").count(), 1, "said once:\n{said}");
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

/// A program that writes the name of each signal that it hears to a file of the job's choice, and goes on for so long after it.
const SIGNALLED: &str = r#"
[workables.hears]
command = ["sh", "-c", 'trap "echo TERM >> \"$0\"; exit 0" TERM; echo started > "$0"; sleep 600 & wait', "{file}"]
[workables.in-time]
command = ["sh", "-c", 'trap "echo TERM >> \"$0\"; exit 0" TERM; echo started > "$0"; sleep 600 & wait', "{file}"]
timeout = "1s"
[workables.deaf]
command = ["sh", "-c", 'trap "echo TERM >> \"$0\"" TERM; echo started > "$0"; sleep 600 & while :; do wait; done', "{file}"]
kill_after = "10m"
"#;

struct Signalled {
    id: JobId,
    file: PathBuf,
}

impl Signalled {
    async fn enqueue(database: &TestDatabase, directory: &Path, class: &str, name: &str) -> Self {
        let file = directory.join(name);
        let job = NewJob::of_class(class, doc! { "file": file.to_str().unwrap() });
        Self { id: job.enqueue(&store(database).await).await.unwrap().id, file }
    }

    fn lines(&self) -> Vec<String> {
        fs::read_to_string(&self.file).unwrap_or_default().lines().map(str::to_owned).collect()
    }

    async fn until_started(&self) {
        wait_until(SOON, "the program runs", async || !self.lines().is_empty()).await;
    }

    /// The error class of its last execution, once it is archived.
    async fn ended(&self, database: &TestDatabase) -> String {
        let job =
            wait_for(SOON, "it is archived", async || database.raw("archived").find_one(doc! { "_id": self.id }).await.unwrap()).await;
        job.get_document("last_execution").unwrap().get_str("class").unwrap().to_owned()
    }
}

/// At its time limit, when the job is cancelled, at the end of the grace.
#[tokio::test]
async fn a_program_that_must_end_hears_term_first() {
    let database = TestDatabase::new().await;
    let directory = tempfile::tempdir().unwrap();
    let config = workables(directory.path(), SIGNALLED);
    let _recruiter = recruiter(&database);
    let mut worker = worker(&database, &["--config", &config, "--grace", "100ms"]);
    let in_time = Signalled::enqueue(&database, directory.path(), "in-time", "limit").await;
    assert_eq!(in_time.ended(&database).await, "timeout");
    let cancelled = Signalled::enqueue(&database, directory.path(), "hears", "cancelled").await;
    cancelled.until_started().await;
    let mut cancel = Process::on(&database, "recruiter", &["jobs", "cancel", &cancelled.id.to_string()]);
    assert!(cancel.wait_exit(SOON).await.success(), "{}", cancel.stderr());
    assert_eq!(cancelled.ended(&database).await, "cancelled");
    let stopped = Signalled::enqueue(&database, directory.path(), "hears", "stopped").await;
    stopped.until_started().await;
    worker.terminate();
    assert!(worker.wait_exit(SOON).await.success());
    assert_eq!(stopped.ended(&database).await, "interrupted");
    for job in [in_time, cancelled, stopped] {
        assert_eq!(job.lines(), ["started", "TERM"], "{}", job.file.display());
    }
}

/// I8: it has no time for `kill_after` then, and the outcome is recorded all the same.
#[tokio::test]
async fn a_second_signal_kills_programs_at_once() {
    let database = TestDatabase::new().await;
    let directory = tempfile::tempdir().unwrap();
    let config = workables(directory.path(), SIGNALLED);
    let _recruiter = recruiter(&database);
    let mut worker = worker(&database, &["--config", &config]);
    let deaf = Signalled::enqueue(&database, directory.path(), "deaf", "deaf").await;
    deaf.until_started().await;
    worker.terminate();
    wait_until(SOON, "it has heard", async || worker.stderr().contains("taking no more jobs")).await;
    worker.terminate();
    let asked = Instant::now();
    worker.wait_exit(SOON).await;
    assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
    assert_eq!(deaf.ended(&database).await, "interrupted");
    assert_eq!(count(&database, "roster", doc! {}).await, 0, "nothing is left to the cleaner");
}

/// One rule for the program and its arguments: they start where the file is, wherever the worker does.
#[tokio::test]
async fn relative_paths_start_at_the_workables_file() {
    let database = TestDatabase::new().await;
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("data.txt"), "beside the file").unwrap();
    fs::write(directory.path().join("show"), "#!/bin/sh\ncat \"$1\"\n").unwrap();
    fs::set_permissions(directory.path().join("show"), fs::Permissions::from_mode(0o755)).unwrap();
    workables(directory.path(), "[workables.show]\ncommand = [\"./show\", \"data.txt\"]\n");
    let _recruiter = recruiter(&database);
    let script = format!("cd {}/..; exec \"$@\"", directory.path().display());
    let relative = format!("{}/workables.toml", directory.path().file_name().unwrap().to_str().unwrap());
    let _worker = worker_by(&script, &database, &["--config", &relative]);
    enqueue(&database, "show", 1).await;
    assert_eq!(until_archived(&database, 1).await[0].get_str("result").unwrap(), "beside the file");
}

/// I6: a program cannot put its job off for ever; after the limit its policy decides.
#[tokio::test]
async fn a_program_that_is_always_too_early_fails_in_the_end() {
    let database = TestDatabase::new().await;
    let directory = tempfile::tempdir().unwrap();
    let early = "[workables.early]\ncommand = [\"sh\", \"-c\", \"exit 75\"]\ntry_again_after = \"10ms\"\n";
    let config = workables(directory.path(), early);
    let _recruiter = recruiter(&database);
    let _worker = worker(&database, &["--config", &config]);
    enqueue(&database, "early", 1).await;
    let job = &until_archived(&database, 1).await[0];
    assert_eq!(job.get_str("why").unwrap(), "not-scheduled-by-retry-policy");
    assert_eq!((number(job, "attempts"), number(job, "interruptions")), (26, 25), "{job}");
    let execution = job.get_document("last_execution").unwrap();
    assert_eq!(execution.get_str("class").unwrap(), "exit:75");
    assert!(execution.get_str("message").unwrap().contains("25 times, the limit of this class"), "{execution}");
}

/// Sets the soft limit of open files of a running process.
fn limit_files(process: &Process, limit: usize) {
    let done = Command::new("prlimit").args(["--pid", &process.pid().to_string(), &format!("--nofile={limit}:")]).status().unwrap();
    assert!(done.success());
}
