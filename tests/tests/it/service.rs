//! Notifications of the real binaries to the service manager: ready, and progress of their main loops.

use std::{os::unix::net::UnixDatagram, path::Path};

use bson::doc;
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
