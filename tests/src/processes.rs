//! The real binaries as real processes: built once, started, signalled, and their output read.

use std::{
    env,
    fmt::Debug,
    fs,
    io::{self, Read, Write as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc, LazyLock, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use bson::doc;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use recruiter_common::shutdown::pause;
use tempfile::TempDir;

use crate::{
    mongo::TestDatabase,
    wait::{SOON, wait_until},
};

/// A directory for sockets, whose paths have at most 107 bytes: below `TMPDIR` if that leaves room for their names.
pub fn directory_for_sockets() -> TempDir {
    let parent = if env::temp_dir().as_os_str().len() < 48 { env::temp_dir() } else { "/tmp".into() };
    tempfile::tempdir_in(parent).expect("the temporary directory is writable")
}

/// Says on standard error why a test is skipped: that is shown also of a test that passes.
pub fn skipped(why: &str) {
    say(&format!("skipped: {why}"));
}

/// Says what a test has found, also if it passes.
pub fn say(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Whether this command succeeds here. Otherwise its test is skipped.
pub fn can_run(command: &[&str]) -> bool {
    let ended = Command::new(command[0]).args(&command[1..]).stdin(Stdio::null()).output();
    let can = ended.is_ok_and(|ended| ended.status.success());
    if !can {
        skipped(&format!("a test needs `{}`, which fails here", command.join(" ")));
    }
    can
}

/// Maximum duration of a clean stop: more than the default drain of any process.
const STOP_WITHIN: Duration = SOON;

/// How often to look, with [`READ_AGAIN_AFTER`] between, whether the last output of a process is read. Not a time: this process may stall.
const READ_TRIES: usize = 2_000;
const READ_AGAIN_AFTER: Duration = Duration::from_millis(5);

/// A started binary of this workspace. It is killed when dropped. If its test fails, its output is in the report.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    stdout: Arc<Mutex<Vec<u8>>>,
    stderr: Arc<Mutex<Vec<u8>>>,
    harmed: AtomicBool,
}

impl Process {
    /// Starts `recruiter`, `recruiter-worker`, `recruiter-cleaner` or an example. Its environment is that of this
    /// process, without the variables that would change its configuration, plus `env`.
    pub fn start(name: &str, args: &[&str], env: &[(&str, &str)]) -> Self {
        // The tests may run with HUP ignored, as under nohup, and a process would inherit that.
        let mut child = Command::new("/usr/bin/env")
            .arg("--default-signal=HUP")
            .arg(binary(name))
            .args(args)
            .env_remove("MONGODB_URI")
            .env_remove("NOTIFY_SOCKET")
            // Commands wait for a busy machine longer than for people.
            .env("RECRUITER_CONNECT_TIMEOUT", "1m")
            .envs(["RECRUITER_SETTINGS", "RECRUITER_WORKER_SETTINGS", "RECRUITER_CLEANER_SETTINGS"].map(|name| (name, "/dev/null")))
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{name} does not start: {error}"));
        let stdout = collect(child.stdout.take().expect("standard output is a pipe"));
        let stderr = collect(child.stderr.take().expect("standard error is a pipe"));
        Self { name: [&[name], args].concat().join(" "), child, stdout, stderr, harmed: AtomicBool::new(false) }
    }

    /// Starts a binary that uses this database.
    pub fn on(database: &TestDatabase, name: &str, args: &[&str]) -> Self {
        Self::start(name, args, &[("MONGODB_URI", database.uri())])
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its standard output so far.
    pub fn stdout(&self) -> String {
        text(&self.stdout)
    }

    /// Its standard error so far: its log.
    pub fn stderr(&self) -> String {
        text(&self.stderr)
    }

    /// Requests a stop (`SIGTERM`).
    pub fn terminate(&self) {
        self.signal(Signal::SIGTERM);
    }

    /// Ends it by force (`SIGKILL`).
    pub fn kill(&self) {
        self.signal(Signal::SIGKILL);
    }

    /// Freezes it (`SIGSTOP`).
    pub fn pause(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Resumes it (`SIGCONT`).
    pub fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Sends a signal. It has no effect on a process that has ended and is not reaped yet.
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid().cast_signed());
        self.harmed.fetch_or([Signal::SIGKILL, Signal::SIGSTOP].contains(&signal), Ordering::Relaxed);
        kill(pid, signal).unwrap_or_else(|error| panic!("{signal} does not reach {}, which was waited for: {error}", self.name));
    }

    /// Whether a test has ever killed or frozen it.
    pub fn was_harmed(&self) -> bool {
        self.harmed.load(Ordering::Relaxed)
    }

    /// Whether it is stopped by a signal.
    pub fn is_stopped(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('T'))
    }

    /// Its exit status, or `None` while it runs.
    pub fn try_exit(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("it is a child of this process")
    }

    /// Requests a stop, and checks that it ends cleanly.
    pub async fn stop(&mut self) {
        self.terminate();
        let status = self.wait_exit(STOP_WITHIN).await;
        assert!(status.success(), "{} ended with {status}", self.name);
    }

    /// Waits for its end. Panics with all its output at the deadline.
    pub async fn wait_exit(&mut self, deadline: Duration) -> ExitStatus {
        let what = format!("{} ends", self.name);
        wait_until(deadline, &what, async || self.child.try_wait().is_ok_and(|status| status.is_some())).await;
        // A child process that it left behind may keep its output open forever.
        let read = || Arc::strong_count(&self.stdout) + Arc::strong_count(&self.stderr) == 2;
        for _ in 0..READ_TRIES {
            if read() {
                break;
            }
            pause(READ_AGAIN_AFTER).await;
        }
        self.try_exit().expect("it has ended")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            report(self);
        }
    }
}

#[expect(clippy::print_stderr, reason = "the test runner shows it with the failed test")]
fn report(process: &Process) {
    eprintln!("--- {} wrote to standard output:\n{}\n--- and to standard error:\n{}", process.name, process.stdout(), process.stderr());
}

/// Stops them, one after the other.
pub async fn stop(processes: impl IntoIterator<Item = Process>) {
    for mut process in processes {
        process.stop().await;
    }
}

/// All three programs: one recruiter, one cleaner, some workers. A test that passed must [`System::stop`] it at its
/// end.
#[derive(Debug)]
pub struct System {
    /// `recruiter run`.
    pub recruiter: Process,
    /// `recruiter-cleaner`.
    pub cleaner: Process,
    /// The `recruiter-worker` processes.
    pub workers: Vec<Process>,
}

/// The parameters of a [`System`].
#[derive(Clone, Copy, Debug)]
pub struct Setup<'a> {
    /// Number of workers.
    pub workers: usize,
    /// Further arguments of `recruiter run`.
    pub recruiter: &'a [&'a str],
    /// Arguments of `recruiter-cleaner`.
    pub cleaner: &'a [&'a str],
    /// Arguments of each `recruiter-worker`.
    pub worker: &'a [&'a str],
}

impl Default for Setup<'_> {
    fn default() -> Self {
        Self { workers: 1, recruiter: &[], cleaner: &[], worker: &["--builtins"] }
    }
}

impl System {
    /// Starts all processes on this database. They become ready by themselves.
    pub fn start(database: &TestDatabase, setup: Setup<'_>) -> Self {
        Self {
            recruiter: Process::on(database, "recruiter", &[&["run"], setup.recruiter].concat()),
            cleaner: Process::on(database, "recruiter-cleaner", setup.cleaner),
            workers: (0..setup.workers).map(|_| Process::on(database, "recruiter-worker", setup.worker)).collect(),
        }
    }

    /// Requests a stop of all running processes, and checks that they end cleanly. Processes that a test has already
    /// ended are skipped.
    pub async fn stop(self) {
        let mut running: Vec<_> = self.workers.into_iter().chain([self.recruiter, self.cleaner]).collect();
        running.retain_mut(|process| process.try_exit().is_none());
        running.iter().for_each(Process::terminate);
        for process in &mut running {
            let status = process.wait_exit(STOP_WITHIN).await;
            assert!(status.success(), "{} ended with {status}", process.name);
        }
    }
}

/// Two `recruiter run` processes: the leader, which a test kills again and again, and its standby.
#[derive(Debug)]
pub struct Recruiters<'a> {
    database: &'a TestDatabase,
    processes: [Process; 2],
}

impl<'a> Recruiters<'a> {
    /// Starts both, with a lease of one second.
    pub fn start(database: &'a TestDatabase) -> Self {
        Self { database, processes: [Self::recruiter(database), Self::recruiter(database)] }
    }

    /// Kills the leader and starts a new standby. Returns `false` and does nothing if the lease still names a leader that was killed before.
    ///
    /// # Panics
    /// When no recruiter has led yet.
    pub async fn kill_leader(&mut self) -> bool {
        let lease = self.database.raw("metadata").find_one(doc! { "_id": "recruiter" }).await.expect("MongoDB answers");
        let lease = lease.expect("a recruiter has led");
        let (_, pid) = lease.get_str("holder_at").ok().and_then(|holder| holder.rsplit_once(':')).expect("the lease names its holder");
        let pid: u32 = pid.parse().expect("the holder is named by its host and process id");
        let Some(leader) = self.processes.iter_mut().find(|process| process.pid() == pid) else { return false };
        leader.kill();
        *leader = Self::recruiter(self.database);
        true
    }

    /// Stops both: what they are doing is completed.
    pub async fn stop(self) {
        stop(self.processes).await;
    }

    fn recruiter(database: &TestDatabase) -> Process {
        Process::on(database, "recruiter", &["run", "--lease", "1s", "--poll", "300ms"])
    }
}

/// Whether a process with this id is running. A process that has ended and is not reaped yet does not count.
pub fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with(['Z', 'X']))
}

/// Whether a process handles SIGTERM. Before it does, the signal kills it.
pub fn handles_term(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigCgt:")?.trim(), 16).ok());
    caught.is_some_and(|caught| caught & (1 << (Signal::SIGTERM as u64 - 1)) != 0)
}

/// The command lines of all processes with this text in their arguments or their environment. Descendants of a process
/// inherit its environment, so they are found as well.
pub fn mentioning(text: &str) -> Vec<String> {
    let read = |pid: &str, file: &str| {
        let content = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        String::from_utf8_lossy(&content).replace('\0', " ")
    };
    let entries = fs::read_dir("/proc").expect("/proc is there").filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let pids = entries.filter(|name| name.parse::<u32>().is_ok());
    let mentions = |pid: String| {
        let command = read(&pid, "cmdline");
        (command.contains(text) || read(&pid, "environ").contains(text)).then(|| format!("{pid}: {command}"))
    };
    pids.filter_map(mentions).collect()
}

/// The path of a binary of this workspace, built with the profile of this test, or of an example (`examples/NAME`). All
/// are built once per test process, because cargo builds no binaries of other packages for a test. An absolute path stays as it is.
pub fn binary(name: &str) -> PathBuf {
    static DIRECTORY: LazyLock<PathBuf> = LazyLock::new(|| {
        let this = env::current_exe().expect("a test knows its own program");
        let directory = this.ancestors().nth(2).expect("a test is in TARGET/PROFILE/deps").to_owned();
        build(&directory);
        directory
    });
    DIRECTORY.join(name)
}

fn build(directory: &Path) {
    let profile = directory.file_name().and_then(|name| name.to_str()).expect("the directory of a profile has a name");
    let output = cargo()
        .args(["build", "--workspace", "--bins", "--examples", "--quiet", "--profile"])
        .args([if profile == "debug" { "dev" } else { profile }, "--target-dir"])
        .arg(directory.parent().expect("the directory of a profile is in the target directory"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "the binaries do not build:\n{}", String::from_utf8_lossy(&output.stderr));
}

/// Cargo, without the variables that a test has of it.
pub fn cargo() -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // They would look like changes to the build scripts, and rebuild many packages.
    for (name, _) in env::vars_os()
        .filter(|(name, _)| name.to_string_lossy().starts_with("CARGO_PKG_") || name.to_string_lossy().starts_with("CARGO_MANIFEST_"))
    {
        cargo.env_remove(name);
    }
    // Of `tests/soak`, for the time of each test. It would rebuild everything.
    cargo.env_remove("RUSTC_BOOTSTRAP");
    cargo
}

/// Reads a pipe to its end on a thread, so that its writer never blocks.
fn collect(mut pipe: impl Read + Send + 'static) -> Arc<Mutex<Vec<u8>>> {
    let collected = Arc::new(Mutex::new(Vec::new()));
    let into = Arc::clone(&collected);
    thread::spawn(move || {
        let mut part = [0; 8192];
        while let Ok(length @ 1..) = pipe.read(&mut part) {
            into.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(&part[..length]);
        }
    });
    collected
}

fn text(collected: &Mutex<Vec<u8>>) -> String {
    String::from_utf8_lossy(&collected.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
}
