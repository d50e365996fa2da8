//! `recruiter demo` keeps what it promises: every file's digest is right although a worker was killed, and nothing is left.

use std::{
    ffi::OsStr,
    fs,
    os::unix::{ffi::OsStrExt as _, fs::symlink},
    path::Path,
    time::Duration,
};

use nix::sys::signal::Signal;
use rand::{Rng as _, RngExt as _, SeedableRng as _, rngs::StdRng};
use recruiter_tests::{
    mongo::mongod,
    processes::{Process, binary, mentioning},
    wait::{SOON, best_of_three, in_a_few_tries, wait_until},
};
use serde_json::Value;
use tempfile::TempDir;

/// Names that shells, programs, configuration files and BSON trip over.
const HOSTILE: [&[u8]; 14] = [
    b"a b",
    b"it's",
    b"\"quoted\"",
    b"-rf",
    b"--help",
    b"--",
    b"new\nline",
    b"back\\slash",
    b"\\n",
    b"\xff\xfe.bin",
    b"\xff\n\\",
    b"$HOME",
    b"{path}",
    b".hidden",
];

/// A demonstration of `dir`, with its temporary files in `temporary`.
fn start(dir: &Path, temporary: &TempDir, args: &[&str]) -> Process {
    let mongod = mongod();
    let env = [("TMPDIR", temporary.path().to_str().unwrap()), ("RECRUITER_MONGOD", mongod.to_str().unwrap())];
    // Would keep the workers from the demonstration's jobs, if it reached them.
    let env = [&env[..], &[("RECRUITER_WORK_ON", "another-group"), ("RECRUITER_JSON", "true")]].concat();
    Process::start("recruiter", &[&["demo", "--dir", dir.to_str().unwrap()], args].concat(), &env)
}

fn summary(process: &Process) -> Value {
    let stdout = process.stdout();
    assert_eq!(stdout.lines().count(), 1, "{stdout}");
    serde_json::from_str(&stdout).unwrap()
}

/// Neither processes nor files.
async fn assert_nothing_left(temporary: &TempDir) {
    let path = temporary.path();
    assert_eq!(mentioning(path.to_str().unwrap()), Vec::<String>::new());
    assert_eq!(fs::read_dir(path).unwrap().count(), 0, "files are left in {}", path.display());
}

fn five_hundred_files() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut random = StdRng::seed_from_u64(500);
    for number in 0..500 {
        let plain = format!("sub{}/{number}.txt", number % 7);
        let name = HOSTILE.get(number).map_or(OsStr::new(&plain), |name| OsStr::from_bytes(name));
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let mut content = vec![0; random.random_range(0..4096)];
        random.fill_bytes(&mut content);
        fs::write(path, content).unwrap();
    }
    dir
}

#[tokio::test]
async fn a_killed_worker_loses_none_of_500_files() {
    let files = five_hundred_files();
    let recovered_within = async || {
        let temporary = tempfile::tempdir().unwrap();
        let mut demo = start(files.path(), &temporary, &[]);
        let status = demo.wait_exit(SOON).await;
        assert!(status.success(), "{status}");
        let summary = summary(&demo);
        let number = |field: &str| summary[field].as_u64().unwrap_or_else(|| panic!("{field} in {summary}"));
        assert_eq!((number("files"), number("archived"), number("skipped"), number("mismatches")), (500, 500, 0, 0));
        assert!(number("executions") >= 500 + number("recovered"), "{summary}");
        assert!(summary["jobs_per_second"].as_f64().unwrap() > 0.0, "{summary}");
        assert!(number("latency_p50_ms") <= number("latency_p99_ms"), "{summary}");
        assert_nothing_left(&temporary).await;
        summary["recovered_within_ms"].as_u64().filter(|_| number("recovered") > 0).map(Duration::from_millis)
    };
    // On a busy machine the killed worker may hold no job any more: then nothing is measured.
    let recovered = async || in_a_few_tries("the killed worker holds jobs", &recovered_within).await;
    best_of_three(Duration::from_secs(3), "the recovery of the jobs of a killed worker", recovered).await;
}

#[tokio::test]
async fn it_works_on_what_git_would_keep_and_on_all_else_elsewhere() {
    let (dir, temporary) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for path in ["repository/.git", "elsewhere", "linked"] {
        fs::create_dir_all(dir.path().join(path)).unwrap();
    }
    for path in ["repository/.git/config", "repository/ignored", "repository/kept", "elsewhere/ignored", "elsewhere/.hidden"] {
        fs::write(dir.path().join(path), path).unwrap();
    }
    for path in ["repository/.gitignore", "elsewhere/.gitignore"] {
        fs::write(dir.path().join(path), "ignored\n").unwrap();
    }
    symlink("../elsewhere", dir.path().join("linked/directory")).unwrap();
    symlink("../elsewhere/.hidden", dir.path().join("linked/file")).unwrap();
    let mut demo = start(dir.path(), &temporary, &["--workers", "1"]);
    assert!(demo.wait_exit(SOON).await.success());
    let summary = summary(&demo);
    // repository: .gitignore and kept; elsewhere: .gitignore, ignored and .hidden.
    assert_eq!((&summary["files"], &summary["archived"], &summary["mismatches"]), (&5.into(), &5.into(), &0.into()), "{summary}");
    assert_nothing_left(&temporary).await;
}

#[tokio::test]
async fn kept_running_it_tells_how_to_look_inside() {
    let (dir, temporary) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(dir.path().join("one"), "1").unwrap();
    let mut demo = start(dir.path(), &temporary, &["--keep"]);
    // Not asked by its flag: RECRUITER_JSON is set.
    wait_until(SOON, "the summary is there", async || demo.stdout().contains("\"archived\":1")).await;
    assert!(demo.try_exit().is_none());
    demo.signal(Signal::SIGINT);
    assert!(demo.wait_exit(SOON).await.success());
    assert_eq!(mentioning(temporary.path().to_str().unwrap()), Vec::<String>::new());
    let kept = fs::read_dir(temporary.path()).unwrap().next().unwrap().unwrap().path();
    assert!(demo.stderr().contains(kept.to_str().unwrap()), "{}", demo.stderr());
    let log = fs::read_to_string(kept.join("processes.log")).unwrap();
    assert!(log.contains("leading") && log.contains("ready for work") && kept.join("mongod").is_dir(), "{log}");
}

/// Also while it only waits for Ctrl-C.
#[tokio::test]
async fn it_ends_at_once_with_its_mongod() {
    let (dir, temporary) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(dir.path().join("one"), "1").unwrap();
    let mut demo = start(dir.path(), &temporary, &["--keep"]);
    wait_until(SOON, "the summary is there", async || demo.stdout().contains("\"archived\":1")).await;
    super::dev::kill_mongod(temporary.path());
    assert_eq!(demo.wait_exit(SOON).await.code(), Some(69), "{}", demo.stderr());
    assert!(demo.stderr().contains("mongod was killed by SIGKILL"), "{}", demo.stderr());
    super::dev::until_nothing_mentions(temporary.path()).await;
}

#[tokio::test]
async fn stopped_in_the_middle_it_leaves_nothing_and_says_so() {
    let (files, temporary) = (five_hundred_files(), tempfile::tempdir().unwrap());
    // On a busy machine the signal may come when all is done.
    wait_until(SOON * 2, "it is stopped in the middle", async || {
        let mut demo = start(files.path(), &temporary, &[]);
        wait_until(SOON, "there is work to do", async || demo.stderr().contains("500 jobs enqueued")).await;
        demo.signal(Signal::SIGINT);
        let code = demo.wait_exit(SOON).await.code();
        assert!(code == Some(0) || (code, demo.stdout().as_str()) == (Some(130), ""), "{code:?}");
        assert_nothing_left(&temporary).await;
        code == Some(130)
    })
    .await;
}

/// The error messages of a demonstration that cannot begin.
async fn complaint(dir: &Path, env: &[(&str, &str)]) -> String {
    let mut demo = Process::start("recruiter", &["demo", "--dir", dir.to_str().unwrap()], env);
    assert_eq!(demo.wait_exit(SOON).await.code(), Some(1));
    assert_eq!(demo.stdout(), "");
    demo.stderr()
}

#[tokio::test]
async fn what_it_cannot_begin_on_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let (missing, file) = (dir.path().join("missing"), dir.path().join("file"));
    let said = complaint(dir.path(), &[]).await;
    assert!(said.contains("no readable file below") && said.contains(dir.path().to_str().unwrap()), "{said}");
    fs::write(&file, "").unwrap();
    let said = complaint(&missing, &[]).await;
    assert!(said.contains(missing.to_str().unwrap()) && said.contains("No such file"), "{said}");
    let said = complaint(&file, &[]).await;
    assert!(said.contains("is not a directory"), "{said}");
    let said = complaint(dir.path(), &[("PATH", "/nowhere")]).await;
    assert!(said.contains("`sha256sum`") && said.contains("install"), "{said}");
}

#[tokio::test]
async fn a_missing_program_is_named_before_anything_is_started() {
    let dir = tempfile::tempdir().unwrap();
    // By a process of its own: a child of another test might hold the file open for writing, so that it could not be executed.
    let copied = |name: &str| std::process::Command::new("cp").arg(binary(name)).arg(dir.path()).status().unwrap().success();
    assert!(copied("recruiter"));
    for (command, missing) in [("demo", "recruiter-dev"), ("demo", "recruiter-worker"), ("dev", "recruiter-worker")] {
        assert!(missing == "recruiter-dev" || copied("recruiter-dev"));
        let output = std::process::Command::new(dir.path().join("recruiter"))
            .arg(command)
            .env("TMPDIR", dir.path())
            .env("RECRUITER_DATA_DIR", dir.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(dir.path().join(missing).to_str().unwrap()), "{said}");
        assert!(said.contains("cargo build --release --workspace"), "{said}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "something was begun");
}
