//! The embedded MongoDB keeps its promises: it starts on what it finds, says plainly when it cannot, and never outlives
//! its owner.

use std::{fs, net::TcpListener, path::Path};

use bson::{Document, doc};
use mongodb::Client;
use recruiter_dev::embedded::{EmbeddedError, EmbeddedMongo, Options, find_or_fetch};
use recruiter_tests::{
    mongo::mongod,
    processes::is_alive,
    wait::{SOON, wait_until},
};

fn options(data_dir: &Path) -> Options {
    Options { test_commands: true, ..Options::new(mongod(), data_dir) }
}

async fn command(uri: &str, command: Document) -> mongodb::error::Result<Document> {
    Client::with_uri_str(uri).await?.database("test").run_command(command).await
}

async fn count(mongo: &EmbeddedMongo) -> i32 {
    command(&mongo.uri(), doc! { "count": "kept" }).await.unwrap().get_i32("n").unwrap()
}

fn process_group(pid: u32) -> i32 {
    nix::unistd::getpgid(Some(nix::unistd::Pid::from_raw(pid.cast_signed()))).unwrap().as_raw()
}

async fn insert(mongo: &EmbeddedMongo) {
    let insert = doc! { "insert": "kept", "documents": [{}], "writeConcern": { "w": "majority" } };
    command(&mongo.uri(), insert).await.unwrap();
}

#[tokio::test]
async fn data_is_served_again_on_another_port() {
    let dir = tempfile::tempdir().unwrap();
    let first = EmbeddedMongo::start(options(dir.path())).await.unwrap();
    let (uri, port) = (first.uri(), first.port());
    insert(&first).await;
    first.stop().await.unwrap();

    // MongoDB asks the old address whether that is itself.
    let taken = TcpListener::bind(("127.0.0.1", port)).unwrap();
    std::thread::spawn(move || taken.incoming().for_each(drop));
    let second = EmbeddedMongo::start(options(dir.path())).await.unwrap();
    assert_ne!(second.uri(), uri);
    assert_eq!(count(&second).await, 1);
    second.stop().await.unwrap();
}

#[tokio::test]
async fn it_survives_kill_restart_and_pause() {
    let dir = tempfile::tempdir().unwrap();
    let mut mongo = EmbeddedMongo::start(options(dir.path())).await.unwrap();
    let (uri, pid) = (mongo.uri(), mongo.pid());
    insert(&mongo).await;

    mongo.kill().await.unwrap();
    assert!(!is_alive(pid));
    assert!(mongo.pause().is_err());
    mongo.restart().await.unwrap();
    mongo.restart().await.unwrap();
    assert_eq!(mongo.uri(), uri);
    assert_ne!(mongo.pid(), pid);
    assert_ne!(process_group(mongo.pid()), process_group(std::process::id()), "a Ctrl-C meant for its owner reaches it");
    assert_eq!(count(&mongo).await, 1);

    mongo.pause().unwrap();
    let status = format!("/proc/{}/status", mongo.pid());
    wait_until(SOON, "mongod is frozen", async || fs::read_to_string(&status).unwrap().contains("T (stopped)")).await;
    mongo.resume().unwrap();
    assert_eq!(count(&mongo).await, 1);
    mongo.pause().unwrap();
    mongo.stop().await.unwrap();
}

#[tokio::test]
async fn a_taken_port_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let refused = EmbeddedMongo::start(Options { port: Some(port), ..options(dir.path()) }).await.unwrap_err();
    assert!(matches!(refused, EmbeddedError::PortTaken(taken) if taken == port), "{refused:?}");
}

#[tokio::test]
async fn a_data_dir_in_use_is_named_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let first = EmbeddedMongo::start(options(dir.path())).await.unwrap();
    let refused = EmbeddedMongo::start(options(dir.path())).await.unwrap_err();
    assert!(matches!(refused, EmbeddedError::DataDirInUse(_)), "{refused:?}");
    insert(&first).await;
    first.stop().await.unwrap();
}

#[tokio::test]
async fn an_unwritable_data_dir_is_named() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let refused = EmbeddedMongo::start(options(&file.path().join("data"))).await.unwrap_err();
    assert!(matches!(refused, EmbeddedError::DataDir { .. }), "{refused:?}");
}

#[tokio::test]
async fn a_mongod_that_ends_at_once_is_quoted() {
    let dir = tempfile::tempdir().unwrap();
    let refused = EmbeddedMongo::start(Options { arguments: vec!["--bogus".into()], ..options(dir.path()) }).await.unwrap_err();
    assert!(refused.to_string().contains("unrecognised option '--bogus'"), "{refused}");

    fs::write(dir.path().join("storage.bson"), "nonsense").unwrap();
    let refused = EmbeddedMongo::start(options(dir.path())).await.unwrap_err();
    assert!(matches!(refused, EmbeddedError::Died { .. }), "{refused:?}");
    assert!(refused.to_string().contains("metadata file"), "{refused}");
}

#[tokio::test]
async fn a_mongod_that_is_none_is_named() {
    let refused = find_or_fetch(Some(Path::new("/nowhere/mongod")), &|_| ()).unwrap_err();
    assert!(refused.to_string().contains("/nowhere/mongod"), "{refused}");
}

#[tokio::test]
async fn a_temporary_one_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let temporary = || Options { temporary: true, ..options(&data) };

    EmbeddedMongo::start(temporary()).await.unwrap().stop().await.unwrap();
    assert!(!data.exists());

    let dropped = EmbeddedMongo::start(temporary()).await.unwrap();
    let pid = dropped.pid();
    drop(dropped);
    wait_until(SOON, "the dropped mongod and its data are gone", async || !is_alive(pid) && !data.exists()).await;

    let mut killed = EmbeddedMongo::start(temporary()).await.unwrap();
    killed.kill().await.unwrap();
    assert!(data.exists());
    drop(killed);
    assert!(!data.exists());
}

/// The owner is this very test binary, started once more with only [`owner`] in it.
#[tokio::test]
async fn mongod_dies_with_its_killed_owner() {
    let dir = tempfile::tempdir().unwrap();
    let mut owner = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "embedded::owner"])
        .env("OWNER_DATA_DIR", dir.path())
        .spawn()
        .unwrap();
    let pid_file = dir.path().join("started");
    wait_until(SOON, "the owner has started a mongod", async || pid_file.exists()).await;
    let pid = fs::read_to_string(&pid_file).unwrap().parse().unwrap();
    assert!(is_alive(pid));

    owner.kill().unwrap();
    owner.wait().unwrap();
    wait_until(SOON, "mongod is gone", async || !is_alive(pid)).await;
    // A clean end empties the lock file, and an end by force does not.
    assert_eq!(fs::metadata(dir.path().join("data/mongod.lock")).unwrap().len(), 0);
}

#[tokio::test]
#[ignore = "the owner that mongod_dies_with_its_killed_owner kills"]
async fn owner() {
    let Some(dir) = std::env::var_os("OWNER_DATA_DIR").map(std::path::PathBuf::from) else { return };
    let mongo = EmbeddedMongo::start(options(&dir.join("data"))).await.unwrap();
    let half = dir.join("half");
    fs::write(&half, mongo.pid().to_string()).unwrap();
    fs::rename(half, dir.join("started")).unwrap();
    let _ = tokio::time::timeout(SOON, std::future::pending::<()>()).await;
}

/// The output of [`fetcher`] on a machine whose `python3` is this shell script.
fn fetch(python: Option<&str>, cache: &Path) -> String {
    let path = tempfile::tempdir().unwrap();
    if let Some(script) = python {
        // By a process of its own: a child of another test might hold the file open for writing, so that it could not be executed.
        let write = r#"printf '#!/bin/sh\n%s\n' "$1" >"$0" && chmod 755 "$0""#;
        let mut shell = std::process::Command::new("sh");
        assert!(shell.args(["-c", write]).arg(path.path().join("python3")).arg(script).status().unwrap().success());
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "embedded::fetcher", "--nocapture"])
        .env("FETCHER", "yes")
        .env("PATH", path.path())
        .env("XDG_CACHE_HOME", cache)
        .output()
        .unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
#[ignore = "runs in the environment that failed_fetches_say_what_to_do makes"]
fn fetcher() {
    if std::env::var_os("FETCHER").is_some() {
        println!("{:?}", find_or_fetch(None, &|line| println!("{line}")).map_err(|error| error.to_string()));
    }
}

#[test]
fn failed_fetches_say_what_to_do() {
    let cache = tempfile::tempdir().unwrap();
    let offline = "echo 'ERROR: first' >&2; echo 'ERROR: no network' >&2; exit 1";
    // The directory follows `--dest`.
    let forged = r#"until [ "$1" = --dest ]; do shift; done; echo forged >"$2/some.whl""#;
    for (python, expected) in
        [(None, "python3 cannot be run"), (Some(offline), "ERROR: no network"), (Some(forged), "has the wrong SHA-256")]
    {
        let said = fetch(python, cache.path());
        assert!(said.contains("downloading MongoDB 6.0.5 (42 MB), once"), "{said}");
        assert!(said.contains(expected) && said.contains("--mongod") && said.contains("MONGODB_URI"), "{said}");
    }
    let left: Vec<_> = fs::read_dir(cache.path().join("recruiter/mongod-6.0.5")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");

    let file = tempfile::NamedTempFile::new().unwrap();
    let said = fetch(Some(forged), file.path());
    assert!(said.contains("cannot be stored in") && said.contains("XDG_CACHE_HOME"), "{said}");
}
