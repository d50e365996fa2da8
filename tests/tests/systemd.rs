//! The units in `systemd/`: systemd understands them, they stay as tight as they are, and they run the real programs.
//!
//! Built with the feature `systemd` only: the last test boots a systemd, for which it must be root.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use recruiter::embedded::{EmbeddedMongo, Options, find_or_fetch};
use tempfile::TempDir;

/// Each program's service, as one would start it.
const SERVICES: [&str; 3] = ["recruiter.service", "recruiter-cleaner.service", "recruiter-worker@main.service"];
/// Highest exposure of a service by `systemd-analyze security`, in tenths. Measured with systemd 252: recruiter 13,
/// cleaner 14, worker 19, whose programs may do more.
const EXPOSURE: &str = "--threshold=20";
/// For whatever systemd is asked; starting everything takes a second or two.
const PATIENCE: Duration = Duration::from_secs(30);

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
async fn installed_services_start_work_come_back_and_stop_cleanly() {
    let stage = tempfile::tempdir().expect("a directory");
    let mongod = find_or_fetch(None, &|_| ()).expect("a mongod");
    let mongo = EmbeddedMongo::start(Options { temporary: true, ..Options::new(mongod, stage.path().join("mongo")) }).await.expect("MongoDB starts");
    let uri = mongo.uri_for("recruiter");

    let machine = Machine::boot(stage);
    let mut install = install_commands();
    let start = install.pop().expect("the last command starts everything");
    for command in install {
        machine.run(&command);
    }
    machine.run(&format!("sed -i 's|^MONGODB_URI=.*|MONGODB_URI={uri}|' /etc/recruiter/recruiter.env"));
    machine.run(&start);
    for service in SERVICES {
        assert_eq!(machine.show(service, "ActiveState"), "active", "{service}");
    }

    machine.run("systemctl kill --signal=KILL recruiter-worker@main.service");
    machine.wait_until("the killed worker is back", || machine.show("recruiter-worker@main.service", "NRestarts,ActiveState") == "1 active");

    machine.run("systemctl stop recruiter.target");
    for service in SERVICES {
        assert_eq!(machine.show(service, "ActiveState,Result,ExecMainStatus"), "inactive success 0", "{service}");
    }
}

/// A directory with the units, whatever they refer to, and stand-ins for the programs: what `systemd-analyze` looks at.
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
    for program in ["recruiter", "recruiter-cleaner", "recruiter-worker"] {
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
    stage: TempDir,
}

impl Machine {
    fn boot(stage: TempDir) -> Self {
        copy_programs_and_units(stage.path());
        let mut holder = Command::new("unshare")
            .args(["--mount", "--propagation", "private"])
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/systemd/boot.sh"))
            .arg(stage.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare runs");
        let mut pid = String::new();
        BufReader::new(holder.stdout.take().expect("piped")).read_line(&mut pid).expect("text");
        let machine = Self { holder, pid: pid.trim().to_owned(), stage };
        assert!(!machine.pid.is_empty(), "systemd does not boot (see above): this test needs root, overlayfs and cgroup2");
        machine.wait_until("systemd has booted", || machine.output("systemctl is-system-running").0);
        machine
    }

    /// Runs a shell command inside, in the directory of the units.
    fn run(&self, command: &str) -> String {
        let (success, printed) = self.output(command);
        if !success {
            self.explain();
        }
        assert!(success, "{command}\n{printed}");
        printed
    }

    fn output(&self, command: &str) -> (bool, String) {
        let output = Command::new("timeout")
            .arg(PATIENCE.as_secs().to_string())
            .args(["nsenter", "--all", "--target", &self.pid, "sh", "-c"])
            .arg(format!("exec 2>&1; cd /run/stage/systemd && {command}"))
            .stdin(Stdio::null())
            .output()
            .expect("nsenter runs");
        (output.status.success(), String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// Values of a unit's properties, in the order of their names.
    fn show(&self, unit: &str, properties: &str) -> String {
        let values: Vec<_> = properties.split(',').map(|property| self.run(&format!("systemctl show --value -p {property} {unit}"))).collect();
        values.join(" ")
    }

    fn wait_until(&self, what: &str, condition: impl Fn() -> bool) {
        let begun = Instant::now();
        while !condition() {
            if begun.elapsed() > PATIENCE {
                self.explain();
                panic!("waited in vain: {what}");
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Prints what helps to read a failure.
    fn explain(&self) {
        println!("{}", self.output("systemctl status --no-pager recruiter.service recruiter-cleaner.service 'recruiter-worker@*'; tail /run/stage/*.log").1);
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        let ended = self.holder.wait();
        println!("systemd's holder ended: {ended:?}");
    }
}

/// Lays out what is to be installed as it lies in a checkout, because that is where the install commands look.
fn copy_programs_and_units(stage: &Path) {
    let (units, programs) = (stage.join("systemd"), stage.join("target/release"));
    fs::create_dir_all(&units).expect("a directory");
    fs::create_dir_all(&programs).expect("a directory");
    for file in fs::read_dir(workspace().join("systemd")).expect("the units are there") {
        let file = file.expect("readable");
        fs::copy(file.path(), units.join(file.file_name())).expect("readable");
    }
    for program in ["recruiter", "recruiter-cleaner", "recruiter-worker"] {
        std::os::unix::fs::symlink(built().join(program), programs.join(program)).expect("a link");
    }
}

/// Where cargo puts the programs of the profile that this test was built with.
fn built() -> PathBuf {
    let test = std::env::current_exe().expect("this test is a file");
    test.ancestors().nth(2).expect("target/debug/deps/systemd-…").to_owned()
}
