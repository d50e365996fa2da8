//! The units in `systemd/`: systemd understands them, they stay as tight as they are, and they run the real programs.
//!
//! Run only when it is named (`--test systemd`): the last test boots a systemd, for which it must be root.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
};

use bson::doc;
use recruiter_tests::{
    mongo::TestDatabase,
    processes::{Process, binary},
    wait::{SOON, wait_for, wait_until},
};
use tempfile::TempDir;

/// Each program's service, as one would start it.
const SERVICES: [&str; 3] = ["recruiter.service", "recruiter-cleaner.service", "recruiter-worker@main.service"];
/// Highest exposure of a service by `systemd-analyze security`, in tenths. Measured with systemd 252: recruiter 13,
/// cleaner 14, worker 19, whose programs may do more.
const EXPOSURE: &str = "--threshold=20";
const PROGRAMS: [&str; 3] = ["recruiter", "recruiter-cleaner", "recruiter-worker"];

#[test]
fn systemd_understands_every_line() {
    let root = root_with_units();
    let verified = Command::new("systemd-analyze")
        .args(["verify", "--man=no"])
        .arg(format!("--root={}", root.path().display()))
        .arg("recruiter.target")
        .args(SERVICES)
        .output()
        .expect("systemd-analyze runs");
    // A key that it does not know is a warning only.
    assert_eq!(String::from_utf8_lossy(&verified.stderr), "");
    assert!(verified.status.success());
}

#[test]
fn services_stay_as_tight_as_they_are() {
    let root = root_with_units();
    for service in SERVICES {
        let analysed = Command::new("systemd-analyze")
            .args(["security", "--offline=true", "--no-pager", EXPOSURE, service])
            .arg(format!("--root={}", root.path().display()))
            .output()
            .expect("systemd-analyze runs");
        assert!(analysed.status.success(), "{service} is exposed more:\n{}", String::from_utf8_lossy(&analysed.stdout));
    }
}

/// Installs as the comment in `recruiter.target` says, line by line, on a systemd of its own; then a day in the life.
#[tokio::test(flavor = "multi_thread")]
async fn installed_services_work_come_back_and_stop_cleanly() {
    let database = TestDatabase::new().await;
    let machine = Machine::boot().await;
    let mut install = install_commands();
    let start = install.pop().expect("the last command starts everything");
    for command in install {
        machine.run(&command);
    }
    machine.run(&format!("echo 'MONGODB_URI={}' >>/etc/recruiter/recruiter.env", database.uri()));
    // A death that is found sooner is found by looking at the process.
    machine.run("echo RECRUITER_DEAD_AFTER=10m >>/etc/recruiter/recruiter.env");
    machine.run("printf '[workables.nap]\ncommand = [\"sleep\", \"1000\"]\n' >>/etc/recruiter/workables.toml");
    machine.run("printf '[workables.here]\ncommand = [\"cat\", \"workables.toml\"]\n' >>/etc/recruiter/workables.toml");
    machine.run("printf '[workables.files]\ncommand = [\"sh\", \"-c\", \"ulimit -n; echo > $HOME/x && echo > $STATE_DIRECTORY/y\"]\n' >>/etc/recruiter/workables.toml");
    machine.run(&start);
    for service in SERVICES {
        assert_eq!(machine.show(service, "ActiveState"), "active", "{service}");
    }

    enqueue(&database, "checksum", r#"{"path": "/etc/passwd"}"#).await;
    assert_eq!(archived(&database, "checksum").await, "done");
    machine.run("test -S /run/recruiter/hints-*.sock");
    wait_until(SOON, "the worker is connected to the recruiter", async || database.tails().await == 0).await;

    // Relative paths start at the file, and a home to write to is there all the same.
    for class in ["here", "files"] {
        enqueue(&database, class, "{}").await;
        assert_eq!(archived(&database, class).await, "done", "{class}");
    }

    enqueue(&database, "nap", "{}").await;
    wait_until(SOON, "the nap is taken", async || machine.count("sleep") == 1).await;
    machine.run("systemctl kill --kill-who=main --signal=KILL recruiter-worker@main.service");
    // The cleaner, for all its hardening, sees that the process is gone.
    assert_eq!(archived(&database, "nap").await, "worker-died");
    wait_until(SOON, "the worker is back", async || machine.show(SERVICES[2], "ActiveState,NRestarts") == "active 1").await;
    assert_eq!(machine.count("sleep"), 0, "programs of a killed worker are killed, too");
    enqueue(&database, "checksum", r#"{"path": "/etc/group"}"#).await;
    assert_eq!(archived(&database, "checksum").await, "done");

    machine.run("echo RECRUITER_WORKER_CONFIG=/nowhere >/etc/recruiter/worker-wrong.env; ! systemctl start recruiter-worker@wrong");
    assert_eq!(machine.show("recruiter-worker@wrong", "ActiveState,ExecMainStatus,NRestarts"), "failed 78 0", "only an edit can help");

    machine.run("echo RECRUITER_CONCURRENCY=none >/etc/recruiter/worker-flags.env; ! systemctl start recruiter-worker@flags");
    assert_eq!(machine.show("recruiter-worker@flags", "ActiveState,ExecMainStatus,NRestarts"), "failed 2 0", "nor here");
    assert_eq!(machine.show(SERVICES[2], "LimitNOFILE"), "65536");

    machine.run("systemctl stop recruiter.target");
    for service in SERVICES {
        // The target does not wait for its parts.
        wait_until(SOON, service, async || machine.show(service, "ActiveState") == "inactive").await;
        assert_eq!(machine.show(service, "Result,ExecMainStatus"), "success 0", "{service}");
    }
}

async fn enqueue(database: &TestDatabase, class: &str, parameters: &str) {
    let mut process = Process::on(database, "recruiter", &["enqueue", "--class", class, "--parameters", parameters]);
    let status = process.wait_exit(SOON).await;
    assert!(status.success(), "{}", process.stderr());
}

/// Waits for a job of this class in the archive, deletes it, and returns its finish reason.
async fn archived(database: &TestDatabase, class: &str) -> String {
    let look = async || database.raw("archived").find_one_and_delete(doc! { "workable.class": class }).await.expect("MongoDB answers");
    let job = wait_for(SOON, &format!("a job of class {class} is archived"), look).await;
    job.get_str("why").expect("an archived job has a finish reason").to_owned()
}

/// A directory with the units, what they refer to, and stand-ins for the programs: what `systemd-analyze` looks at.
fn root_with_units() -> TempDir {
    let root = tempfile::tempdir().expect("a directory");
    let (units, programs) = (root.path().join("etc/systemd/system"), root.path().join("usr/bin"));
    fs::create_dir_all(&units).expect("a directory");
    fs::create_dir_all(&programs).expect("a directory");
    for unit in ["recruiter.target", "recruiter.service", "recruiter-cleaner.service", "recruiter-worker@.service"] {
        fs::copy(workspace().join("systemd").join(unit), units.join(unit)).expect("the unit is there");
    }
    for target in ["sysinit", "basic", "shutdown", "network-online", "multi-user"] {
        fs::write(units.join(target).with_extension("target"), "[Unit]\nDefaultDependencies=no\n").expect("a file");
    }
    for program in PROGRAMS {
        fs::write(programs.join(program), "#!/bin/sh\n").expect("a file");
        fs::set_permissions(programs.join(program), fs::Permissions::from_mode(0o755)).expect("our own file");
    }
    root
}

/// The indented lines of the comment at the top of `recruiter.target`.
fn install_commands() -> Vec<String> {
    let target = fs::read_to_string(workspace().join("systemd/recruiter.target")).expect("the unit is there");
    target.lines().filter_map(|line| line.strip_prefix("#   ")).map(ToOwned::to_owned).collect()
}

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace")
}

/// A systemd that runs as process 1 of its own namespaces. Dropped, it is gone with everything in it.
struct Machine {
    holder: Child,
    /// Number of its process 1 outside.
    pid: String,
    _stage: TempDir,
}

impl Machine {
    async fn boot() -> Self {
        let stage = checkout();
        let mut holder = Command::new("unshare")
            .args(["--mount", "--propagation", "private"])
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/systemd/boot.sh"))
            .arg(stage.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare runs");
        let mut pid = String::new();
        BufReader::new(holder.stdout.take().expect("it is a pipe")).read_line(&mut pid).expect("a line");
        let machine = Self { holder, pid: pid.trim().to_owned(), _stage: stage };
        assert!(!machine.pid.is_empty(), "systemd does not boot (see above): this test needs root, overlayfs and cgroup2");
        wait_until(SOON, "systemd has booted", async || machine.output("systemctl is-system-running").0).await;
        machine
    }

    /// Runs a shell command inside, in the directory of the units.
    fn run(&self, command: &str) -> String {
        let (success, printed) = self.output(command);
        assert!(success, "{command}\n{printed}");
        printed
    }

    fn output(&self, command: &str) -> (bool, String) {
        let output = Command::new("timeout")
            .arg(SOON.as_secs().to_string())
            .args(["nsenter", "--all", "--target", &self.pid, "sh", "-c"])
            .arg(format!("exec 2>&1; cd /run/stage/systemd && {command}"))
            .stdin(Stdio::null())
            .output()
            .expect("nsenter runs");
        (output.status.success(), String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// Values of a unit's properties, in this order.
    fn show(&self, unit: &str, properties: &str) -> String {
        let values: Vec<_> =
            properties.split(',').map(|property| self.run(&format!("systemctl show --value -p {property} {unit}"))).collect();
        values.join(" ")
    }

    /// How many processes of this name run inside.
    fn count(&self, name: &str) -> usize {
        let names = self.run("cat /proc/[0-9]*/comm 2>/dev/null || true");
        names.lines().filter(|line| *line == name).count()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        #[expect(clippy::print_stderr, reason = "the test runner shows it with the failed test")]
        if thread::panicking() {
            eprintln!("{}", self.output("systemctl status --no-pager 'recruiter*'; tail -n 30 /run/stage/*.log").1);
        }
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}

/// The files to be installed, in the layout of a checkout, where the install commands expect them.
fn checkout() -> TempDir {
    let stage = tempfile::tempdir().expect("a directory");
    let (units, programs) = (stage.path().join("systemd"), stage.path().join("target/release"));
    fs::create_dir_all(&units).expect("a directory");
    fs::create_dir_all(&programs).expect("a directory");
    for file in fs::read_dir(workspace().join("systemd")).expect("the units are there") {
        let file = file.expect("readable");
        fs::copy(file.path(), units.join(file.file_name())).expect("readable");
    }
    for program in PROGRAMS {
        fs::copy(binary(program), programs.join(program)).expect("it was built");
    }
    stage
}
