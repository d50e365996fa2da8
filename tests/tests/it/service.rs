//! Notifications of the real binaries to the service manager: ready, and progress of their main loops.

use std::{fs, os::unix::net::UnixDatagram, path::Path};

use bson::doc;
use nix::sys::signal::Signal;
use recruiter_common::NewJob;
use recruiter_tests::{
    faults::NOTES,
    ledger::LEDGER,
    local::{Local, store},
    mongo::TestDatabase,
    processes::{Process, directory_for_sockets},
    wait::{SOON, wait_until},
};
use tempfile::TempDir;

/// As with `WatchdogSec=500ms` in systemd.
const INTERVAL_US: &str = "500000";

/// A service manager that receives notifications.
struct Manager {
    socket: UnixDatagram,
    directory: TempDir,
    heard: Vec<String>,
}

impl Manager {
    fn new() -> Self {
        let directory = directory_for_sockets();
        let socket = UnixDatagram::bind(directory.path().join("notify")).unwrap();
        socket.set_nonblocking(true).unwrap();
        Self { socket, directory, heard: Vec::new() }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Starts a process that this manager listens to.
    fn start(&self, database: &TestDatabase, name: &str, args: &[&str]) -> Process {
        let socket = self.path().join("notify").display().to_string();
        let directory = self.path().to_str().unwrap();
        let environment = [
            ("MONGODB_URI", database.uri()),
            ("NOTIFY_SOCKET", &socket),
            ("WATCHDOG_USEC", INTERVAL_US),
            (NOTES, directory),
            (LEDGER, directory),
        ];
        Process::start(name, args, &environment)
    }

    /// Reads what has arrived.
    fn listen(&mut self) {
        let mut buffer = [0; 4096];
        while let Ok(length) = self.socket.recv(&mut buffer) {
            self.heard.extend(String::from_utf8_lossy(&buffer[..length]).lines().map(str::to_owned));
        }
    }

    /// Waits until this notification has arrived `times` times from now on.
    async fn hears(&mut self, word: &str, times: usize) {
        self.heard.clear();
        wait_until(SOON, &format!("the service manager hears {word} {times} times"), async || {
            self.listen();
            self.heard.iter().filter(|line| *line == word).count() >= times
        })
        .await;
    }
}

/// An idle process has few turns of its own: it takes more for the service manager.
#[tokio::test]
async fn the_watchdog_hears_of_a_main_loop_that_goes_on_also_while_a_worker_drains() {
    let database = TestDatabase::new().await;
    let mut leading = Manager::new();
    let mut leader = leading.start(&database, "recruiter", &["run"]);
    leading.hears("STATUS=leading", 1).await;
    leading.hears("WATCHDOG=1", 3).await;
    leader.terminate();
    leader.wait_exit(SOON).await;
    let recruiter = Local::recruiter(&database, &[]);
    let processes: [(&str, &[&str]); 3] =
        [("recruiter", &["run"]), ("recruiter-cleaner", &[]), ("recruiter-worker", &["--builtins", "--grace", "60s"])];
    for (name, args) in processes {
        let mut manager = Manager::new();
        let mut process = manager.start(&database, name, args);
        manager.hears("READY=1", 1).await;
        manager.hears("WATCHDOG=1", 3).await;
        if name == "recruiter-worker" {
            NewJob::of_class("sleep", doc! { "ms": 600_000 }).enqueue(&*store(&database).await).await.unwrap();
            database.until("scheduled", doc! { "locked": true }, 1, "the job runs").await;
            process.terminate();
            manager.hears("STOPPING=1", 1).await;
            manager.hears("WATCHDOG=1", 3).await;
            process.terminate();
        } else {
            process.terminate();
        }
        process.wait_exit(SOON).await;
    }
    recruiter.stop().await;
}

/// A service reads its settings again at HUP: jobs that run go on, and the next have new settings. Wrong ones change nothing.
#[tokio::test(flavor = "multi_thread")]
async fn new_settings_interrupt_no_job_and_wrong_ones_are_not_used() {
    let database = TestDatabase::new().await;
    let _recruiter = Local::recruiter(&database, &[]);
    let mut manager = Manager::new();
    let (settings, workables) = (manager.path().join("worker.toml"), manager.path().join("workables.toml"));
    let write = |slots: u32, classes: &[&str]| {
        let class = |name: &&str| {
            format!("[workables.{name}]\ncommand = [\"sh\", \"-c\", \"echo {slots}; while test -e {{file}}; do sleep 0.1; done\"]\n")
        };
        fs::write(&workables, classes.iter().map(class).collect::<String>()).unwrap();
        fs::write(&settings, format!("concurrency = {slots}\nconfig = {workables:?}\ngrace = \"1s\"\n")).unwrap();
    };
    write(1, &["old", "both"]);
    let worker = manager.start(&database, "recruiter-worker", &["--settings", settings.to_str().unwrap()]);
    manager.hears("READY=1", 1).await;
    let file = manager.path().join("waits").display().to_string();
    fs::write(&file, "").unwrap();
    let enqueue =
        async |class: &str, file: &str| NewJob::of_class(class, doc! { "file": file }).enqueue(&*store(&database).await).await.unwrap().id;
    let old = enqueue("old", &file).await;
    database.until("scheduled", doc! { "locked": true }, 1, "the job runs").await;

    fs::write(&workables, "[workables.old]\ncomand = 5\n").unwrap();
    worker.signal(Signal::SIGHUP);
    manager.hears("STATUS=the new settings are wrong and not used", 1).await;
    assert!(manager.heard.contains(&"RELOADING=1".into()) && manager.heard.contains(&"READY=1".into()), "{:?}", manager.heard);
    wait_until(SOON, "the worker says what is wrong", async || worker.stderr().contains("workables.toml:2:1: unknown key `comand`")).await;
    assert_eq!(database.count("roster", doc! { "capacity": 1 }).await, 1);

    write(2, &["new", "both"]);
    worker.signal(Signal::SIGHUP);
    manager.hears("STATUS=waiting for jobs", 1).await;
    assert_eq!(database.count("roster", doc! { "classes": "new", "capacity": 2 }).await, 1);
    // The worker with the old settings takes no more jobs, and has not interrupted the one that it has after its grace period of 1 s.
    for class in ["new", "both", "both"] {
        let job = enqueue(class, "/nowhere").await;
        assert_eq!(database.archived(job).await.get_str("result").unwrap().trim(), "2", "{class}");
    }
    let unknown = enqueue("old", "/nowhere").await;
    manager.hears("WATCHDOG=1", 12).await;
    assert!(database.only("scheduled", doc! { "_id": old }).await.get_bool("locked").unwrap(), "it goes on");
    fs::remove_file(&file).unwrap();
    let job = database.archived(old).await;
    assert_eq!((job.get_str("result").unwrap().trim(), job.get_str("why").unwrap()), ("1", "done"));
    database.until("roster", doc! {}, 1, "the worker with the old settings has left").await;
    assert_eq!(database.count("scheduled", doc! { "_id": unknown, "locked": false }).await, 1);
    assert!(!manager.heard.contains(&"STOPPING=1".into()), "{:?}", manager.heard);
}

/// All workers of a process stop together: those with older settings have the same grace period.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_is_for_workers_with_older_settings_too() {
    let database = TestDatabase::new().await;
    let _recruiter = Local::recruiter(&database, &[]);
    let mut manager = Manager::new();
    let mut worker = manager.start(&database, "recruiter-worker", &["--builtins", "--grace", "1s"]);
    manager.hears("READY=1", 1).await;
    let job = NewJob::of_class("sleep", doc! { "ms": 3_600_000 }).enqueue(&*store(&database).await).await.unwrap().id;
    database.until("scheduled", doc! { "locked": true }, 1, "the job runs").await;
    for _ in 0..2 {
        worker.signal(Signal::SIGHUP);
        manager.hears("STATUS=waiting for jobs", 1).await;
    }
    database.until("roster", doc! {}, 2, "the second worker, which has no job, has left").await;
    worker.terminate();
    manager.hears("STOPPING=1", 1).await;
    assert!(worker.wait_exit(SOON).await.success(), "{}", worker.stderr());
    assert_eq!(database.count("roster", doc! {}).await, 0);
    assert_eq!(database.archived(job).await.get_str("why").unwrap(), "interrupted");
}

/// An application notifies its service manager itself: a worker inside of it is not ready, stopping or hanging for it. The feature `process`
/// is on here.
#[tokio::test]
async fn a_worker_inside_an_application_does_not_speak_for_it() {
    let database = TestDatabase::new().await;
    let mut manager = Manager::new();
    let mut process = manager.start(&database, "examples/faulty", &["worker"]);
    wait_until(SOON, "the worker is ready", async || process.stderr().contains("ready for work")).await;
    let mut beside = Manager::new();
    let _recruiter = beside.start(&database, "recruiter", &["run"]);
    beside.hears("WATCHDOG=1", 3).await;
    process.terminate();
    assert!(process.wait_exit(SOON).await.success(), "{}", process.stderr());
    manager.listen();
    assert!(manager.heard.is_empty(), "{:?}", manager.heard);
}
