//! The processes as their surroundings see them: signals, terminals, exit codes, logs, what others can read of them, what they reap.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    process::{Command, Stdio},
    time::Duration,
};

use bson::{Document, doc};
use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, getuid},
};
use recruiter_common::{JobId, NewJob, RetryManyTimes};
use recruiter_tests::{
    local::store,
    mongo::TestDatabase,
    processes::{Process, binary, can_run, is_alive},
    wait::{SOON, wait_for, wait_until},
};
use serde_json::Value;

use super::bad_input::why;

const BINARIES: [(&str, &[&str], &str); 3] =
    [("recruiter", &["run"], "leading"), ("recruiter-cleaner", &[], "watching"), ("recruiter-worker", &["--builtins"], "ready for work")];

async fn enqueue(database: &TestDatabase, class: &str, parameters: Document) -> JobId {
    NewJob::of_class(class, parameters).enqueue(&*store(database).await).await.unwrap().id
}

/// Waits until a job has started. It may have ended before this looks.
async fn until_started(database: &TestDatabase) {
    database.until("scheduled", doc! { "locked": false }, 0, "the job is started").await;
}

/// A process of ours that a shell script becomes, by `exec "$@"`.
fn by(script: &str, database: &TestDatabase, name: &str, args: &[&str]) -> Process {
    let program = binary(name);
    let command = [&["-c", script, "sh", program.to_str().unwrap()], args].concat();
    Process::start("/bin/sh", &command, &[("MONGODB_URI", database.uri())])
}

/// The child processes of all threads of a process.
fn children(pid: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap().filter_map(Result::ok);
    let of_thread = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    of_thread.flat_map(|ids| ids.split_whitespace().map(|id| id.parse().unwrap()).collect::<Vec<_>>()).collect()
}

async fn until_it_says(process: &Process, words: &str) {
    wait_until(SOON, words, async || process.stderr().contains(words)).await;
}

/// I8. A terminal sends it more than once when it is closed.
#[tokio::test]
async fn hup_stops_as_term_does_and_is_no_second_signal() {
    let database = TestDatabase::new().await;
    let mut processes = Vec::new();
    for (name, args, ready) in BINARIES {
        let process = Process::on(&database, name, args);
        until_it_says(&process, ready).await;
        processes.push(process);
    }
    let job = enqueue(&database, "sleep", doc! { "ms": 2_000 }).await;
    until_started(&database).await;
    while let Some(mut process) = processes.pop() {
        process.signal(Signal::SIGHUP);
        until_it_says(&process, "stop requested").await;
        if processes.len() == 2 {
            process.signal(Signal::SIGHUP);
        }
        assert_eq!(process.wait_exit(SOON).await.code(), Some(0), "{}", process.stderr());
        assert!(!process.stderr().contains("draining"), "{}", process.stderr());
    }
    assert_eq!(why(&database.archived(job).await), "done");
    assert_eq!(database.count("roster", doc! {}).await, 0);
}

/// As `nohup` starts it.
#[tokio::test]
async fn hup_that_was_ignored_at_the_start_stays_ignored() {
    let database = TestDatabase::new().await;
    let mut worker = by("trap '' HUP; exec \"$@\"", &database, "recruiter-worker", &["--builtins"]);
    until_it_says(&worker, "ready for work").await;
    worker.signal(Signal::SIGHUP);
    worker.stop().await;
    assert_eq!(worker.stderr().matches("stop requested").count(), 1, "{}", worker.stderr());
}

/// Then no process reads its log any more, and it still drains.
#[tokio::test]
async fn a_worker_whose_terminal_is_closed_ends_its_jobs() {
    if !can_run(&["script", "--quiet", "--command", "true", "/dev/null"]) {
        return;
    }
    let database = TestDatabase::new().await;
    let _recruiter = Process::on(&database, "recruiter", &["run"]);
    let worker = format!("exec '{}' --builtins", binary("recruiter-worker").display());
    // The tests may run with HUP ignored, as under nohup, and the worker would inherit that.
    let mut terminal = Command::new("/usr/bin/env")
        .args(["--default-signal=HUP", "script", "--quiet", "--command", &worker, "/dev/null"])
        .env("MONGODB_URI", database.uri())
        .env("SHELL", "/bin/sh")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let worker = wait_for(SOON, "the worker is there", async || database.raw("roster").find_one(doc! {}).await.unwrap()).await;
    let job = enqueue(&database, "sleep", doc! { "ms": 2_000 }).await;
    until_started(&database).await;
    terminal.kill().unwrap();
    terminal.wait().unwrap();
    assert_eq!(why(&database.archived(job).await), "done");
    let pid = worker.get_i32("pid").unwrap().cast_unsigned();
    wait_until(SOON, "it has left the roster and is gone", async || database.count("roster", doc! {}).await == 0 && !is_alive(pid)).await;
}

/// Exit codes, logs and help of the worker that a reader copies from the README, and the jobs of the other program.
#[tokio::test]
async fn the_readmes_worker_is_a_process_like_the_stock_worker() {
    let ended = async |args: &[&str], uri: &str| {
        let mut process = Process::start("examples/mailer", args, &[("MONGODB_URI", uri)]);
        let code = process.wait_exit(SOON).await.code();
        (code, process.stdout(), process.stderr())
    };
    let nowhere = "mongodb://127.0.0.1:1/x";
    let (code, help, _) = ended(&["--help"], nowhere).await;
    assert_eq!(code, Some(0));
    assert!(help.starts_with("Sends the mail of the shop.\n\nUsage: mailer [OPTIONS]\n"), "{help}");
    assert!(help.contains("--concurrency") && help.contains("--log") && help.contains("Exit codes: 0 stopped"), "{help}");
    let (code, _, said) = ended(&["--connect-timeout", "100ms"], nowhere).await;
    assert_eq!(code, Some(69), "{said}");
    assert!(said.contains("mailer: MongoDB at 127.0.0.1:1 could not be reached"), "{said}");
    let (code, _, said) = ended(&["--lease", "1s"], nowhere).await;
    assert_eq!(
        (code, said.as_str()),
        (
            Some(2),
            "mailer: --lease (1s) must be at least three heartbeats (--heartbeat 5s), so that one slow reply does not stop the work\n"
        )
    );
    assert_eq!(ended(&["--concurrency", "none"], nowhere).await.0, Some(2));

    let database = TestDatabase::new().await;
    let (code, _, said) = ended(&["--memory-limit", "1MiB"], database.uri()).await;
    assert_eq!(code, Some(75), "{said}");
    let _recruiter = Process::on(&database, "recruiter", &["run"]);
    let mut mailer = Process::on(&database, "examples/mailer", &[]);
    let mut website = Process::start("examples/website", &[], &[("MONGODB_URI", database.uri())]);
    assert!(website.wait_exit(SOON).await.success(), "{}", website.stderr());
    let done = doc! { "workable.class": "SendMail", "why": "done", "group": "mail" };
    database.until("archived", done, 2, "a mail and a bundle of mails are sent").await;
    assert!(mailer.stderr().contains("ready for work"), "{}", mailer.stderr());
    mailer.stop().await;
}

/// Programs belong to the user of the worker, and often of the other processes.
#[tokio::test]
async fn programs_cannot_read_the_credentials_of_the_processes() {
    let database = TestDatabase::new().await;
    // Others can read the file in this directory, with every TMPDIR and umask.
    let directory = tempfile::tempdir_in("/tmp").unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let config = directory.path().join("workables.toml");
    fs::write(&config, "[workables.spy]\ncommand = [\"cat\", \"/proc/{pid}/environ\"]\n[workables.nap]\ncommand = [\"sleep\", \"600\"]\n")
        .unwrap();
    fs::set_permissions(&config, fs::Permissions::from_mode(0o644)).unwrap();
    // Nothing is hidden from root.
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    if getuid().is_root() && !can_run(&[&nobody[..], &["true"]].concat()) {
        return;
    }
    let drop_root = &if getuid().is_root() { format!("exec {} \"$@\"", nobody.join(" ")) } else { "exec \"$@\"".into() };
    let recruiter = by(drop_root, &database, "recruiter", &["run"]);
    let cleaner = by(drop_root, &database, "recruiter-cleaner", &["--dead-after", "10m"]);
    let worker = by(drop_root, &database, "recruiter-worker", &["--config", config.to_str().unwrap()]);
    for process in [&recruiter, &cleaner, &worker] {
        wait_until(SOON, "all are there", async || process.stderr().contains("connected to MongoDB")).await;
        let spy = enqueue(&database, "spy", doc! { "pid": i64::from(process.pid()) }).await;
        let execution = database.archived(spy).await.get_document("last_execution").unwrap().clone();
        assert!(execution.get_str("message").is_ok_and(|message| message.contains("Permission denied")), "{execution}");
    }
    let nap = enqueue(&database, "nap", doc! {}).await;
    let naps = wait_for(SOON, "the program runs", async || Some(children(worker.pid())).filter(|naps| !naps.is_empty())).await;
    worker.kill();
    // A program outlives a worker that was killed.
    naps.iter().for_each(|nap| kill(Pid::from_raw(nap.cast_signed()), Signal::SIGKILL).unwrap());
    assert_eq!(why(&database.archived(nap).await), "worker-died", "the cleaner still sees that the process is gone");
}

/// As a container starts it that has no init.
#[tokio::test]
async fn a_worker_that_is_process_1_reaps_what_programs_leave_behind() {
    const JOBS: usize = 100;
    let container = ["unshare", "--user", "--map-root-user", "--fork", "--pid", "--kill-child", "--mount-proc"];
    if !can_run(&[&container[..], &["true"]].concat()) {
        return;
    }
    let (database, directory) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
    let config = directory.path().join("workables.toml");
    fs::write(
        &config,
        "[workables.leave]\ncommand = [\"sh\", \"-c\", \"(sleep 0.1; true) >/dev/null 2>&1 & exit $1\", \"sh\", \"{code}\"]\n",
    )
    .unwrap();
    let _recruiter = Process::on(&database, "recruiter", &["run"]);
    let container = format!("exec {} \"$@\"", container.join(" "));
    let holder = by(&container, &database, "recruiter-worker", &["--config", config.to_str().unwrap(), "--concurrency", "20"]);
    until_it_says(&holder, "ready for work").await;
    let jobs = (0..JOBS).map(|n| NewJob::of_class("leave", doc! { "code": i64::try_from(n % 3).unwrap() }));
    store(&database).await.enqueue_many(jobs).await.unwrap();
    database.until("archived", doc! {}, JOBS as u64, "all is done").await;
    // The reaper has not taken their exit statuses away.
    for (class, jobs) in [("exit:1", 33), ("exit:2", 33)] {
        assert_eq!(database.count("archived", doc! { "last_execution.class": class }).await, jobs);
    }
    assert_eq!(database.count("archived", doc! { "why": "done" }).await, 34);
    let worker = children(holder.pid())[0];
    wait_until(SOON, "no child is left, dead or alive", async || children(worker).is_empty()).await;
    kill(Pid::from_raw(worker.cast_signed()), Signal::SIGTERM).unwrap();
}

/// The jobs of a worker without a recruiter wait for ever, and its log is where one looks.
#[tokio::test]
async fn a_worker_says_once_that_no_recruiter_leads_and_when_one_does() {
    let database = TestDatabase::new().await;
    let worker = Process::on(&database, "recruiter-worker", &["--builtins", "--heartbeat", "200ms"]);
    let said = |words: &str| worker.stderr().matches(words).count();
    until_it_says(&worker, "no recruiter leads").await;
    let mut recruiter = Process::on(&database, "recruiter", &["run"]);
    until_it_says(&worker, "a recruiter leads again").await;
    recruiter.stop().await;
    wait_until(SOON, "it logs that again", async || said("no recruiter leads") == 2).await;
    assert_eq!(said("a recruiter leads again"), 1, "{}", worker.stderr());
}

/// Which a stop would interrupt.
#[tokio::test]
async fn a_worker_warns_once_of_a_class_whose_jobs_often_outlive_the_grace() {
    let database = TestDatabase::new().await;
    let _recruiter = Process::on(&database, "recruiter", &["run"]);
    let mut worker = Process::on(&database, "recruiter-worker", &["--builtins", "--grace", "100ms"]);
    for _ in 0..5 {
        let long = enqueue(&database, "sleep", doc! { "ms": 300 }).await;
        database.archived(long).await;
    }
    worker.stop().await;
    let said = worker.stderr();
    let warnings: Vec<&str> = said.lines().filter(|line| line.contains("often run longer than the grace")).collect();
    assert_eq!(warnings.len(), 1, "{said}");
    for named in ["sleep", "--grace", "service manager", "checkpoint"] {
        assert!(warnings[0].contains(named), "{said}");
    }
}

/// Final failures are logged as warnings, and numbers are logged as numbers.
#[tokio::test]
async fn logs_tell_final_failures_from_others_and_numbers_from_text() {
    let database = TestDatabase::new().await;
    let mut recruiter = Process::on(&database, "recruiter", &["run", "--log-format=json"]);
    let mut worker = Process::on(&database, "recruiter-worker", &["--builtins", "--log-format=json"]);
    let twice = RetryManyTimes::new(1, Duration::ZERO).unwrap();
    let job = NewJob::of_class("fail", doc! { "class": "broken" }).retry(&twice).enqueue(&*store(&database).await).await.unwrap().id;
    database.archived(job).await;
    until_it_says(&worker, "job failed\"").await;
    worker.stop().await;
    recruiter.stop().await;
    let lines = |log: String| -> Vec<Value> { log.lines().map(|line| serde_json::from_str(line).unwrap()).collect() };
    let (of_worker, of_recruiter) = (lines(worker.stderr()), lines(recruiter.stderr()));
    let line = |lines: &[Value], message: &str| lines.iter().find(|line| line["fields"]["message"] == message).cloned().unwrap();
    for (message, level, attempt) in [("job failed; retrying", "INFO", 1), ("job failed", "WARN", 2)] {
        let line = line(&of_worker, message);
        let fields = &line["fields"];
        assert_eq!((line["level"].as_str().unwrap(), fields["job.attempt"].as_i64().unwrap()), (level, attempt), "{line}");
        assert_eq!((fields["error.class"].as_str().unwrap(), fields["job.id"].as_str().unwrap()), ("broken", job.to_string().as_str()));
        assert!(fields["duration_ms"].is_u64() && fields["error.message"].is_string(), "{line}");
    }
    assert!(line(&of_worker, "taking no more jobs")["fields"]["grace_ms"] == 20_000);
    assert!(line(&of_recruiter, "leading")["fields"]["lease.term"] == 1);
}
