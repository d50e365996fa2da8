//! `recruiter dev` gives a URI on which everything works, keeps it working, and takes everything away with it.

use std::{fs, net::TcpListener, path::Path, time::Duration};

use bson::{Document, doc};
use futures_util::TryStreamExt as _;
use mongodb::{Client, Collection};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use recruiter_tests::{
    mongo::mongod,
    processes::{Process, mentioning},
    wait::{SOON, Stopwatch, best_of_three, wait_for, wait_until},
};
use serde_json::Value;

/// Everything that descends from it mentions its data directory, in the environment or on the command line.
fn start(data_dir: &Path, args: &[&str]) -> Process {
    let mongod = mongod();
    let [data_dir, mongod] = [data_dir, &mongod].map(|path| path.to_str().unwrap());
    let env = [("RECRUITER_DATA_DIR", data_dir), ("RECRUITER_MONGOD", mongod), ("RECRUITER_DEV_WEB_PORT", "0")];
    Process::start("recruiter", &[&["dev"], args].concat(), &env)
}

/// The URI, once everything is ready.
async fn uri(dev: &Process) -> String {
    let line = wait_for(SOON, "it is ready", async || dev.stdout().strip_suffix('\n').map(str::to_owned)).await;
    serde_json::from_str::<Value>(&line).unwrap()["uri"].as_str().unwrap().to_owned()
}

#[expect(clippy::disallowed_methods, reason = "tests look beneath the operations of common::store")]
async fn collection(uri: &str, name: &str) -> Collection<Document> {
    Client::with_uri_str(uri).await.unwrap().default_database().unwrap().collection(name)
}

async fn enqueue(uri: &str) {
    let args = ["enqueue", "--class", "sleep", "--parameters", r#"{"ms":1}"#];
    let mut enqueue = Process::start("recruiter", &args, &[("MONGODB_URI", uri)]);
    assert!(enqueue.wait_exit(SOON).await.success(), "{}", enqueue.stderr());
}

async fn pids(roster: &Collection<Document>) -> Vec<i32> {
    let workers: Vec<Document> = roster.find(doc! {}).await.unwrap().try_collect().await.unwrap();
    workers.iter().map(|worker| worker.get_i32("pid").unwrap()).collect()
}

pub(super) async fn until_nothing_mentions(data_dir: &Path) {
    wait_until(SOON, "all processes are gone", async || mentioning(data_dir.to_str().unwrap()).is_empty()).await;
}

#[tokio::test]
async fn its_pages_are_there_and_may_change_everything() {
    let dir = tempfile::tempdir().unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut dev = start(dir.path(), &["--json", "--workers=1", "--web-port", &port.to_string()]);
    let uri = uri(&dev).await;
    let web = format!("http://127.0.0.1:{port}/");
    assert!(dev.stdout().contains(&format!(r#""web":"{web}""#)), "{}", dev.stdout());
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let seen = async || match client.get(format!("{web}workers")).send().await {
        Ok(page) => page.text().await.unwrap().contains("/quiet"),
        Err(_) => false,
    };
    wait_until(SOON, "an operator sees the worker", seen).await;
    dev.signal(Signal::SIGINT);
    assert!(dev.wait_exit(SOON).await.success(), "{}", dev.stderr());
    assert_eq!(mentioning(&uri), Vec::<String>::new());
}

#[tokio::test]
async fn its_uri_works_and_everything_ends_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let data_dir = dir.path().join("not/yet/there");
    for jobs_before in 0..2 {
        let mut dev = start(&data_dir, &["--json"]);
        let uri = uri(&dev).await;
        // All are ready already.
        assert_eq!(pids(&collection(&uri, "roster").await).await.len(), 2);
        let archived = collection(&uri, "archived").await;
        assert_eq!(archived.count_documents(doc! {}).await.unwrap(), jobs_before, "the data is kept");
        enqueue(&uri).await;
        wait_until(SOON, "the job is done", async || archived.count_documents(doc! { "why": "done" }).await.unwrap() == jobs_before + 1)
            .await;
        dev.signal(Signal::SIGINT);
        assert!(dev.wait_exit(SOON).await.success());
        assert_eq!(dev.stdout().lines().count(), 1, "{}", dev.stdout());
        assert!(dev.stderr().contains("leading") && dev.stderr().contains("ready for work"), "{}", dev.stderr());
        assert_eq!(mentioning(data_dir.to_str().unwrap()), Vec::<String>::new());
    }
}

/// Its window was closed.
#[tokio::test]
async fn hup_ends_it_cleanly() {
    let dir = tempfile::tempdir().unwrap();
    let mut dev = start(dir.path(), &["--json", "--workers=1"]);
    let uri = uri(&dev).await;
    let sleep = ["enqueue", "--class", "sleep", "--parameters", r#"{"ms":600000}"#];
    assert!(Process::start("recruiter", &sleep, &[("MONGODB_URI", &uri)]).wait_exit(SOON).await.success());
    let scheduled = collection(&uri, "scheduled").await;
    wait_until(SOON, "the job runs", async || scheduled.count_documents(doc! { "locked": true }).await.unwrap() == 1).await;
    dev.signal(Signal::SIGHUP);
    assert_eq!(dev.wait_exit(SOON).await.code(), Some(0), "{}", dev.stderr());
    assert!(!dev.stderr().contains("not everything ended in time"), "{}", dev.stderr());
    assert_eq!(mentioning(dir.path().to_str().unwrap()), Vec::<String>::new());
}

#[tokio::test]
async fn a_dead_worker_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let mut dev = start(dir.path(), &["--json", "--workers=1"]);
    let uri = uri(&dev).await;
    let roster = collection(&uri, "roster").await;
    let dead = pids(&roster).await[0];
    kill(Pid::from_raw(dead), Signal::SIGKILL).unwrap();
    wait_until(SOON, "another worker is there, and the dead one is not", async || matches!(pids(&roster).await[..], [pid] if pid != dead))
        .await;
    let told = format!("recruiter-worker (pid {dead}) was killed by SIGKILL; restarted");
    wait_until(SOON, &told, async || dev.stderr().contains(&told)).await;
    enqueue(&uri).await;
    let archived = collection(&uri, "archived").await;
    wait_until(SOON, "the job is done", async || archived.count_documents(doc! { "why": "done" }).await.unwrap() == 1).await;
    dev.stop().await;
}

#[tokio::test]
async fn killed_it_leaves_no_process() {
    let dir = tempfile::tempdir().unwrap();
    let mut dev = start(dir.path(), &["--json"]);
    uri(&dev).await;
    assert!(mentioning(dir.path().to_str().unwrap()).len() > 5);
    dev.kill();
    dev.wait_exit(SOON).await;
    until_nothing_mentions(dir.path()).await;
}

#[tokio::test]
async fn asked_twice_it_ends_at_once() {
    best_of_three(Duration::from_secs(10), "the end after a second Ctrl-C", async || {
        let dir = tempfile::tempdir().unwrap();
        let mut dev = start(dir.path(), &["--json"]);
        let uri = uri(&dev).await;
        // A frozen worker would be waited for.
        let worker = Pid::from_raw(pids(&collection(&uri, "roster").await).await[0]);
        let sleep = ["enqueue", "--class", "sleep", "--parameters", r#"{"ms":600000}"#];
        assert!(Process::start("recruiter", &sleep, &[("MONGODB_URI", &uri)]).wait_exit(SOON).await.success());
        kill(worker, Signal::SIGSTOP).unwrap();
        dev.signal(Signal::SIGINT);
        wait_until(SOON, "it has received the signal", async || dev.stderr().contains("stop requested")).await;
        let begin = Stopwatch::start();
        dev.signal(Signal::SIGINT);
        assert_eq!(dev.wait_exit(SOON).await.code(), Some(130));
        let took = begin.elapsed();
        until_nothing_mentions(dir.path()).await;
        took
    })
    .await;
}

#[tokio::test]
async fn people_are_told_how_to_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let mut dev = start(dir.path(), &["--workers=0"]);
    wait_until(SOON, "it is ready", async || dev.stdout().contains("kept in")).await;
    for line in ["export MONGODB_URI='mongodb://127.0.0.1:", "recruiter enqueue --class sleep", "mongosh \"$MONGODB_URI\""] {
        assert!(dev.stdout().contains(line), "{}", dev.stdout());
    }
    dev.stop().await;
}

/// Its processes would wait for MongoDB for long. So it asks them a second time to stop.
#[tokio::test]
async fn it_ends_at_once_with_its_mongod() {
    ends_with_its_mongod(false).await;
}

/// An orderly stop that has begun is given up.
#[tokio::test]
async fn it_ends_at_once_if_it_is_asked_to_when_its_mongod_has_ended() {
    ends_with_its_mongod(true).await;
}

/// Kills the mongod with its data in this directory or below.
pub(super) fn kill_mongod(dir: &Path) {
    for process in mentioning(&format!("--dbpath={}", dir.canonicalize().unwrap().display())) {
        let pid = process.split(':').next().unwrap().parse().unwrap();
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        if name.trim() == "mongod" {
            kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
        }
    }
}

async fn ends_with_its_mongod(is_asked: bool) {
    let dir = tempfile::tempdir().unwrap();
    let mut dev = start(dir.path(), &["--json"]);
    uri(&dev).await;
    kill_mongod(dir.path());
    if is_asked {
        dev.signal(Signal::SIGINT);
    }
    assert_eq!(dev.wait_exit(SOON).await.code(), Some(69), "{}", dev.stderr());
    for said in ["mongod was killed by SIGKILL", "second stop request: stopping at once"] {
        assert!(dev.stderr().contains(said), "{}", dev.stderr());
    }
    until_nothing_mentions(dir.path()).await;
}

#[tokio::test]
async fn it_keeps_its_port_and_shows_what_programs_print() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("workables.toml");
    fs::write(&config, "[workables.a]\ncommand = [\"sh\", \"-c\", \"echo hello from a handler >&2\"]\n").unwrap();
    let data_dir = dir.path().join("data");
    let mut uris = Vec::new();
    for _ in 0..2 {
        let mut dev = start(&data_dir, &["--json", "--workers=1", &format!("--worker-config={}", config.display())]);
        uris.push(uri(&dev).await);
        let mut enqueue = Process::start("recruiter", &["enqueue", "--class", "a"], &[("MONGODB_URI", &uris[0])]);
        assert!(enqueue.wait_exit(SOON).await.success(), "{}", enqueue.stderr());
        wait_until(SOON, "the output is shown", async || dev.stderr().contains("hello from a handler")).await;
        dev.stop().await;
    }
    assert_eq!(uris[0], uris[1]);
    let port = uris[0].split(':').nth(2).unwrap().split('/').next().unwrap();
    // MongoDB asks the old address whether that is itself.
    let taken = TcpListener::bind(format!("127.0.0.1:{port}")).unwrap();
    std::thread::spawn(move || taken.incoming().for_each(drop));
    let mut dev = start(&data_dir, &["--json", "--workers=0"]);
    assert_ne!(uri(&dev).await, uris[0]);
    dev.stop().await;
}

/// Its error messages when it cannot start.
async fn complaint(data_dir: &Path, args: &[&str]) -> String {
    let mut dev = start(data_dir, args);
    assert_eq!(dev.wait_exit(SOON).await.code(), Some(1), "{}", dev.stderr());
    assert_eq!(dev.stdout(), "");
    until_nothing_mentions(data_dir).await;
    dev.stderr()
}

#[tokio::test]
async fn what_it_cannot_start_on_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let said = complaint(&dir.path().join("data"), &[&format!("--port={port}")]).await;
    assert!(said.contains(&format!("port {port} on 127.0.0.1 is in use")), "{said}");

    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let below = file.join("data");
    let said = complaint(&below, &[]).await;
    assert!(said.contains(below.to_str().unwrap()) && said.contains("choose a directory"), "{said}");

    let config = dir.path().join("workables.toml");
    fs::write(&config, "[workables.a]\ncommand = [\"no-such-program\"]\n").unwrap();
    let said = complaint(&dir.path().join("data"), &[&format!("--worker-config={}", config.display())]).await;
    assert!(said.contains("recruiter-worker ended with exit code 78 before it was ready") && said.contains("no-such-program"), "{said}");
}
