//! Programs run by the real stock worker: the effects of the machine, of the worker's end, and of the workables file.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use bson::{Document, doc};
use nix::unistd::getuid;
use recruiter_common::{
    JobId, NewJob,
    ids::{LeaseTerm, RoundId},
    store::{AssignedJobs, Hint, Planned},
};
use recruiter_tests::{
    local::store,
    mongo::TestDatabase,
    oracle::number,
    processes::{Process, binary, skipped},
    promise,
    wait::{SOON, wait_until},
};
use serde_json::json;

async fn archived(database: &TestDatabase) -> Vec<Document> {
    database.all("archived", doc! {}).await
}

async fn until_archived(database: &TestDatabase, jobs: u64) -> Vec<Document> {
    database.until("archived", doc! {}, jobs, "all is archived").await;
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
    let (database, directory) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
    let config = workables(directory.path(), "[workables.trace]\ncommand = [\"printenv\", \"TRACEPARENT\"]\n");
    let (_recruiter, _worker) = (recruiter(&database), worker(&database, &["--config", &config]));
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    super::cli::recruiter(&database, &["enqueue", "--class", "trace", "--traceparent", trace]).succeeded();
    let job = until_archived(&database, 1).await.remove(0);
    assert_eq!((job.get_str("result").unwrap(), job.get_str("traceparent").unwrap()), (trace, trace), "{job}");
    let refused = super::cli::recruiter(&database, &["enqueue", "--class", "trace", "--traceparent", "00-short"]);
    assert!(refused.code == 2 && refused.err.contains("traceparent"), "{}", refused.err);
    let refused = NewJob::of_class("trace", doc! {}).traceparent("").enqueue(&*store(&database).await).await.unwrap_err();
    assert!(refused.to_string().contains("W3C"), "{refused}");
}

/// In each process, with any number of slots. The other slots run other classes meanwhile.
#[tokio::test]
async fn a_class_runs_as_many_jobs_at_a_time_as_its_workables_file_says() {
    let (database, directory) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
    let (log, go) = (directory.path().join("log"), directory.path().join("go"));
    let class = |name: &str, more: &str| {
        let note = |event: &str| format!("echo {event} {name} $PPID $(date +%s%N) >> \"$0\"");
        let script = format!("{}; while ! [ -e \"$1\" ]; do sleep 0.1; done; {}", note("begin"), note("end"));
        format!("[workables.{name}]\ncommand = {}\n{more}\n", json!(["sh", "-c", script, log, go]))
    };
    let config = workables(directory.path(), &[class("convert", "concurrency = 2"), class("other", "")].concat());
    let args = ["--config", &config, "--concurrency", "6"];
    let (_recruiter, _workers) = (recruiter(&database), [(); 2].map(|()| worker(&database, &args)));
    enqueue(&database, "convert", 40).await;
    enqueue(&database, "other", 40).await;
    let lines = async || fs::read_to_string(&log).unwrap_or_default().lines().count();
    wait_until(SOON, "all slots are in use", async || lines().await == 12).await;
    fs::write(&go, "").unwrap();
    assert!(until_archived(&database, 80).await.iter().all(|job| job.get_str("why").unwrap() == "done"));

    let mut lines: Vec<(i64, String, String, bool)> = fs::read_to_string(&log).unwrap().lines().map(event).collect();
    lines.sort();
    let (mut running, mut most, mut beside) = (BTreeMap::<(String, String), i32>::new(), BTreeMap::<(String, String), i32>::new(), 0);
    for (_, class, process, begins) in lines {
        let key = (class, process.clone());
        *running.entry(key.clone()).or_default() += if begins { 1 } else { -1 };
        let now = most.entry(key.clone()).or_default();
        *now = (*now).max(running[&key]);
        let of = |class: &str| running.get(&(class.to_owned(), process.clone())).copied().unwrap_or_default();
        beside = beside.max(if of("convert") == 2 { of("other") } else { 0 });
    }
    let of_class = |class: &str| most.iter().filter(|((of, _), _)| of == class).map(|(_, most)| *most).collect::<Vec<_>>();
    assert_eq!(of_class("convert"), [2, 2], "in each of two processes");
    assert_eq!(beside, 4, "others run in the other slots");
    database.until("roster", doc! { "available": true, "class_slots.0.free": 2 }, 2, "both offer the slots of the class again").await;
}

/// Jobs that were assigned by a recruiter that did not know of the limit, or by hand.
#[tokio::test]
async fn a_worker_starts_no_job_beyond_the_limit_of_its_class() {
    let (database, directory) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
    let config = workables(directory.path(), "[workables.convert]\ncommand = [\"sleep\", \"600\"]\nconcurrency = 2\n");
    let mut worker = worker(&database, &["--config", &config, "--concurrency", "6", "--grace", "100ms"]);
    until_ready(&worker).await;
    let (id, store) =
        (database.raw("roster").find_one(doc! {}).await.unwrap().unwrap().get_object_id("_id").unwrap(), store(&database).await);
    let enqueued = store.enqueue_many((0..4).map(|_| NewJob::of_class("convert", doc! {}))).await.unwrap();
    let jobs = enqueued.iter().map(|job| job.id).collect();
    let (round, assignment) = (RoundId::new(), AssignedJobs::new(id.into(), jobs));
    let planned = Planned::for_slots(assignment.clone());
    assert_eq!(store.assign_if_available(LeaseTerm(0), round, &[planned]).await.unwrap(), [id.into()]);
    store.publish(&Hint::Assigned { round, assignments: vec![assignment] }).await.unwrap();
    let are_started = async || {
        let offers_none = database.count("roster", doc! { "class_slots.0.free": 0 }).await == 1;
        offers_none && database.count("scheduled", doc! { "locked": true }).await >= 2
    };
    wait_until(SOON, "jobs are started", are_started).await;
    let left = doc! { "kind": { "$in": ["not_started", "returned"] } };
    wait_until(SOON, "it leaves the others", async || database.count("signals", left.clone()).await > 0).await;
    promise!(database.count("scheduled", doc! { "locked": true }).await == 2, "more jobs than the class allows");
    let offer = database.raw("roster").find_one(doc! {}).await.unwrap().unwrap();
    let of_class = offer.get_array("class_slots").unwrap()[0].as_document().unwrap();
    assert_eq!((number(&offer, "free"), of_class.get_str("class").unwrap(), number(of_class, "free")), (4, "convert", 0), "{offer}");
    worker.terminate();
    worker.wait_exit(SOON).await;
}

/// A flag of the command, or a field of a line, comes before the default of the class.
#[tokio::test]
async fn jobs_have_the_defaults_that_the_workables_file_declares_for_their_class() {
    let (database, directory) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
    let defaults = "group = \"media\"\npriority = 8\nretry = { class = \"RetryManyTimes\", parameters = { retry_how_many_times = 4, seconds_to_wait_before_retry = 1 } }\n\
                    keep = \"failures\"\nlimits = [\"converter\"]\n";
    let file = |defaults: &str| format!("[workables.convert]\ncommand = [\"true\"]\n{defaults}[workables.other]\ncommand = [\"true\"]\n");
    let config = workables(directory.path(), &file(defaults));
    let mut first = worker(&database, &["--config", &config]);
    until_ready(&first).await;
    first.terminate();
    first.wait_exit(SOON).await;

    let enqueued = async |args: &[&str]| {
        let said = super::cli::recruiter(&database, &[&["enqueue", "--json"], args].concat());
        let id: JobId = said.objects()[0]["id"].as_str().unwrap().parse().unwrap();
        let job = database.raw("scheduled").find_one(doc! { "_id": id }).await.unwrap().unwrap();
        let policy = job.get_document("retry_policy").unwrap().get_str("class").unwrap().to_owned();
        let text = |field| job.get_str(field).unwrap_or_default().to_owned();
        (text("group"), number(&job, "priority"), policy, text("keep"), text("gate"))
    };
    let of =
        |group: &str, priority, policy: &str, keep: &str, gate: &str| (group.into(), priority, policy.into(), keep.into(), gate.into());
    assert_eq!(enqueued(&["--class", "convert"]).await, of("media", 8, "RetryManyTimes", "failures", "converter"));
    let flags = ["--class", "convert", "--group", "fast", "--priority", "1", "--keep", "all", "--limit", "printer"];
    assert_eq!(enqueued(&flags).await, of("fast", 1, "RetryManyTimes", "", "printer"));
    assert_eq!(enqueued(&["--class", "convert", "--line", "a"]).await, of("media", 8, "RetryManyTimes", "failures", ">a"));
    assert_eq!(enqueued(&["--class", "other"]).await, of("generic", 5, "DoNotDoItAgain", "", ""));
    let lines = directory.path().join("jobs");
    fs::write(&lines, "{\"class\": \"convert\", \"priority\": 2}\n").unwrap();
    assert_eq!(enqueued(&["--from", lines.to_str().unwrap()]).await, of("media", 2, "RetryManyTimes", "failures", "converter"));

    let (graph, schedules) = (directory.path().join("graph"), directory.path().join("schedules"));
    fs::write(&graph, r#"{"jobs": {"a": {"class": "convert", "priority": 7}}}"#).unwrap();
    fs::write(&schedules, "namespace = \"n\"\n[schedules.nightly]\ncron = \"0 3 * * *\"\njob = { class = \"convert\", priority = 6 }\n")
        .unwrap();
    let declares: [&[&str]; 3] = [
        &["graph", "enqueue", graph.to_str().unwrap()],
        &["schedules", "apply", schedules.to_str().unwrap()],
        &["consumers", "set", "c", "--topic", "t", "--job", r#"{"class": "convert", "priority": 4}"#],
    ];
    declares.iter().for_each(|args| _ = super::cli::recruiter(&database, args));
    let in_graph = database.raw("scheduled").find_one(doc! { "priority": 7 }).await.unwrap().unwrap();
    assert_eq!((in_graph.get_str("group").unwrap(), in_graph.get_str("gate").unwrap()), ("media", "converter"));
    for (collection, priority) in [("schedulers", 6), ("consumers", 4)] {
        let declared = database.raw(collection).find_one(doc! { "job.priority": priority }).await.unwrap().unwrap();
        let job = declared.get_document("job").unwrap();
        assert_eq!((job.get_str("group").unwrap(), job.get_str("keep").unwrap()), ("media", "failures"));
        assert_eq!(job.get_array("limits").unwrap()[..], ["converter".into()]);
    }

    let config = workables(directory.path(), &file(""));
    until_ready(&worker(&database, &["--config", &config])).await;
    assert_eq!(enqueued(&["--class", "convert"]).await, of("generic", 5, "DoNotDoItAgain", "", ""), "the file no longer declares them");
}

/// A line of the log: its time, its class, its process, and whether the job begins.
fn event(line: &str) -> (i64, String, String, bool) {
    let [what, class, process, at]: [&str; 4] = line.split_whitespace().collect::<Vec<_>>().try_into().unwrap();
    (at.parse().unwrap(), class.to_owned(), process.to_owned(), what == "begin")
}

/// I5, I6: jobs do not pay for a worker that was given more of them than it can open files for.
#[tokio::test]
async fn a_worker_runs_no_more_programs_than_its_files_are_enough_for() {
    let (database, directory) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
    let config = workables(directory.path(), "[workables.nap]\ncommand = [\"sleep\", \"0.2\"]\n");
    let _recruiter = recruiter(&database);
    let worker = worker_by("ulimit -n 200; exec \"$@\"", &database, &["--config", &config, "--concurrency", "120", "--grace", "100ms"]);
    enqueue(&database, "nap", 100).await;
    for job in until_archived(&database, 100).await {
        promise!((job.get_str("why").unwrap(), number(&job, "attempts")) == ("done", 1), "done at its first start: {job}");
    }
    let said = worker.stderr();
    assert!(said.contains("the limit of open files is too low for --concurrency 120: running at most 25 jobs"), "{said}");
    assert!(!said.contains("cannot start more jobs"), "{said}");
    assert_eq!(said.matches("often run longer than the grace").count(), 1, "{said}");
}

/// The soft limit that a service has unless its unit says more.
#[tokio::test]
async fn a_worker_raises_its_soft_limit_of_open_files() {
    let (database, directory) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
    let config = workables(directory.path(), "[workables.limit]\ncommand = [\"sh\", \"-c\", \"ulimit -n\"]\n");
    let _recruiter = recruiter(&database);
    let worker = worker_by("ulimit -Sn 100; ulimit -Hn 1000; exec \"$@\"", &database, &["--config", &config, "--concurrency", "200"]);
    enqueue(&database, "limit", 1).await;
    assert_eq!(until_archived(&database, 1).await[0].get_str("result").unwrap(), "1000");
    assert!(!worker.stderr().contains("too low"), "{}", worker.stderr());
}

/// The machine runs out of what programs need while the worker runs: its jobs are as they were, and are done when it has more.
#[tokio::test]
async fn a_program_that_the_machine_cannot_start_costs_its_job_nothing() {
    if !getuid().is_root() {
        skipped("a worker hides its credentials, and with them its files and their limit, from all but root");
        return;
    }
    let (database, directory) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
    let config = workables(directory.path(), "[workables.fast]\ncommand = [\"true\"]\n");
    let _recruiter = recruiter(&database);
    let worker = worker(&database, &["--config", &config, "--heartbeat", "500ms", "--memory-limit", "1GiB"]);
    until_ready(&worker).await;
    let open = fs::read_dir(format!("/proc/{}/fd", worker.pid())).unwrap().count();
    limit_files(&worker, open);
    enqueue(&database, "fast", 20).await;
    let released = doc! { "interruptions": { "$gte": 1 }, "locked": false, "last_execution": null, "executions": null };
    wait_until(SOON, "jobs are released as they were", async || database.count("scheduled", released.clone()).await > 0).await;
    assert!(archived(&database).await.is_empty(), "nothing was done, nothing has failed");
    limit_files(&worker, 1_000);
    for job in until_archived(&database, 20).await {
        promise!(
            job.get_str("why").unwrap() == "done" && number(&job, "attempts") - number(&job, "interruptions") == 1,
            "done once: {job}"
        );
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
command = ["sh", "-c", 'trap "echo TERM >> \"\$0\"; exit 0" TERM; echo started > "$0"; sleep 600 & wait', "{file}"]
[workables.in-time]
command = ["sh", "-c", 'trap "echo TERM >> \"\$0\"; exit 0" TERM; echo started > "$0"; sleep 600 & wait', "{file}"]
timeout = "5s"
[workables.deaf]
command = ["sh", "-c", 'trap "echo TERM >> \"\$0\"" TERM; echo started > "$0"; sleep 600 & while :; do wait; done', "{file}"]
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
        Self { id: job.enqueue(&*store(database).await).await.unwrap().id, file }
    }

    fn lines(&self) -> Vec<String> {
        fs::read_to_string(&self.file).unwrap_or_default().lines().map(str::to_owned).collect()
    }

    async fn until_started(&self) {
        wait_until(SOON, "the program runs", async || !self.lines().is_empty()).await;
    }

    /// The error class of its last execution, once it is archived.
    async fn ended(&self, database: &TestDatabase) -> String {
        let job = database.archived(self.id).await;
        job.get_document("last_execution").unwrap().get_str("class").unwrap().to_owned()
    }
}

/// At its time limit, when the job is cancelled, at the end of the grace.
#[tokio::test]
async fn a_program_that_must_end_hears_term_first() {
    let (database, directory) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
    let config = workables(directory.path(), SIGNALLED);
    let _recruiter = recruiter(&database);
    let mut worker = worker(&database, &["--config", &config, "--grace", "100ms"]);
    let in_time = Signalled::enqueue(&database, directory.path(), "in-time", "limit").await;
    let cancelled = Signalled::enqueue(&database, directory.path(), "hears", "cancelled").await;
    cancelled.until_started().await;
    let mut cancel = Process::on(&database, "recruiter", &["jobs", "cancel", &cancelled.id.to_string()]);
    assert!(cancel.wait_exit(SOON).await.success(), "{}", cancel.stderr());
    assert_eq!(cancelled.ended(&database).await, "cancelled");
    let stopped = Signalled::enqueue(&database, directory.path(), "hears", "stopped").await;
    stopped.until_started().await;
    assert_eq!(in_time.ended(&database).await, "timeout");
    worker.stop().await;
    assert_eq!(stopped.ended(&database).await, "interrupted");
    assert!(worker.stderr().contains("interrupting jobs that did not end within the grace; if this happens often, raise it"));
    for job in [in_time, cancelled, stopped] {
        assert_eq!(job.lines(), ["started", "TERM"], "{}", job.file.display());
    }
}

/// I8: it has no time for `kill_after` then, and the outcome is recorded all the same.
#[tokio::test]
async fn a_second_signal_kills_programs_at_once() {
    let (database, directory) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
    let config = workables(directory.path(), SIGNALLED);
    let _recruiter = recruiter(&database);
    let stops_at_once = async || {
        let mut worker = worker(&database, &["--config", &config, "--grace", "10m"]);
        let deaf = Signalled::enqueue(&database, directory.path(), "deaf", &JobId::new().to_string()).await;
        deaf.until_started().await;
        worker.terminate();
        wait_until(SOON, "it has heard", async || worker.stderr().contains("taking no more jobs")).await;
        worker.terminate();
        worker.wait_exit(SOON).await;
        // If the machine stalls for two seconds, the process ends before the outcome is recorded.
        let left = database.raw("roster").delete_many(doc! {}).await.unwrap().deleted_count;
        left == 0 && deaf.ended(&database).await == "interrupted"
    };
    wait_until(SOON, "nothing is left to the cleaner", stops_at_once).await;
}

/// One rule for the program and its arguments: they start where the file is, wherever the worker does.
#[tokio::test]
async fn relative_paths_start_at_the_workables_file() {
    let (database, directory) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
    fs::write(directory.path().join("data.txt"), "beside the file").unwrap();
    fs::write(directory.path().join("show"), "#!/bin/sh\ncat \"$1\"\n").unwrap();
    fs::set_permissions(directory.path().join("show"), fs::Permissions::from_mode(0o755)).unwrap();
    workables(directory.path(), "[workables.show]\ncommand = [\"./show\", \"data.txt\"]\n");
    let _recruiter = recruiter(&database);
    let relative = format!("{}/workables.toml", directory.path().file_name().unwrap().to_str().unwrap());
    let _worker = worker_by("cd \"${TMPDIR:-/tmp}\"; exec \"$@\"", &database, &["--config", &relative]);
    enqueue(&database, "show", 1).await;
    assert_eq!(until_archived(&database, 1).await[0].get_str("result").unwrap(), "beside the file");
}

/// I6: a program cannot put its job off for ever; after the limit its policy decides.
#[tokio::test]
async fn a_program_that_is_always_too_early_fails_in_the_end() {
    let (database, directory) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
    let early = "[workables.early]\ncommand = [\"sh\", \"-c\", \"exit 75\"]\ntry_again_after = \"10ms\"\n";
    let config = workables(directory.path(), early);
    let _recruiter = recruiter(&database);
    let _worker = worker(&database, &["--config", &config]);
    enqueue(&database, "early", 1).await;
    let job = &until_archived(&database, 1).await[0];
    assert_eq!(job.get_str("why").unwrap(), "not-scheduled-by-retry-policy");
    promise!((number(job, "attempts"), number(job, "interruptions")) == (26, 25), "only the last start counts: {job}");
    let execution = job.get_document("last_execution").unwrap();
    assert_eq!(execution.get_str("class").unwrap(), "exit:75");
    assert!(execution.get_str("message").unwrap().contains("25 times, the limit of this class"), "{execution}");
}

/// Sets the soft limit of open files of a running process.
fn limit_files(process: &Process, limit: usize) {
    let done = Command::new("prlimit").args(["--pid", &process.pid().to_string(), &format!("--nofile={limit}:")]).status().unwrap();
    assert!(done.success());
}
