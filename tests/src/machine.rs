//! A systemd of its own, in namespaces: units and packages are installed there, and the machine does not change. It needs root, overlayfs
//! and cgroup2.

use std::{
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
};

use bson::doc;
use tempfile::TempDir;

use crate::{
    mongo::TestDatabase,
    processes::Process,
    wait::{SOON, wait_for, wait_until},
};

/// The programs that are installed.
pub const PROGRAMS: [&str; 3] = ["recruiter", "recruiter-cleaner", "recruiter-worker"];
/// Each program's service, as one would start it.
pub const SERVICES: [&str; 3] = ["recruiter.service", "recruiter-cleaner.service", "recruiter-worker@main.service"];
/// The service that not every installation starts.
pub const WEB: &str = "recruiter-web.service";

/// A systemd that runs as process 1 of its own namespaces. Dropped, it is gone with everything in it.
#[derive(Debug)]
pub struct Machine {
    holder: Child,
    /// Number of its process 1 outside.
    pid: String,
    stage: TempDir,
}

impl Machine {
    /// Boots it. The directory is `/run/stage` inside.
    pub async fn boot(stage: TempDir) -> Self {
        let mut holder = Command::new("unshare")
            .args(["--mount", "--propagation", "private"])
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/boot.sh"))
            .arg(stage.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare runs");
        let mut pid = String::new();
        BufReader::new(holder.stdout.take().expect("it is a pipe")).read_line(&mut pid).expect("a line");
        let machine = Self { holder, pid: pid.trim().to_owned(), stage };
        assert!(!machine.pid.is_empty(), "systemd does not boot (see above): this test needs root, overlayfs and cgroup2");
        wait_until(SOON, "systemd has booted", async || machine.output("systemctl is-system-running").0).await;
        machine
    }

    /// The directory that is `/run/stage` inside.
    pub fn stage(&self) -> &Path {
        self.stage.path()
    }

    /// Runs a shell command inside, in `/run/stage`, and returns its output.
    pub fn run(&self, command: &str) -> String {
        let (success, printed) = self.output(command);
        assert!(success, "{command}\n{printed}");
        printed
    }

    /// Whether a shell command succeeds inside, and its output.
    pub fn output(&self, command: &str) -> (bool, String) {
        let output = Command::new("timeout")
            .arg(SOON.as_secs().to_string())
            .args(["nsenter", "--all", "--target", &self.pid, "sh", "-c"])
            .arg(format!("exec 2>&1; cd /run/stage && {command}"))
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::null())
            .output()
            .expect("nsenter runs");
        (output.status.success(), String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// Values of a unit's properties, in this order.
    pub fn show(&self, unit: &str, properties: &str) -> String {
        let values: Vec<_> =
            properties.split(',').map(|property| self.run(&format!("systemctl show --value -p {property} {unit}"))).collect();
        values.join(" ")
    }

    /// How many processes of this name run inside.
    pub fn count(&self, name: &str) -> usize {
        let names = self.run("cat /proc/[0-9]*/comm 2>/dev/null || true");
        names.lines().filter(|line| *line == name).count()
    }

    /// How the processes of services have ended since this was asked last: unit, result and exit code, sorted.
    pub fn exits(&self) -> Vec<String> {
        let printed = self.run("touch exits; cat exits; rm exits");
        let mut exits: Vec<_> = printed.lines().map(str::to_owned).collect();
        exits.sort();
        exits
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        #[expect(clippy::print_stderr, reason = "the test runner shows it with the failed test")]
        if thread::panicking() {
            eprintln!("{}", self.output("systemctl status --no-pager 'recruiter*'; tail -n 30 *.log").1);
        }
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}

/// The last of the commands in `recruiter.target` that install the units starts everything.
///
/// # Panics
/// When there are none.
pub fn install_commands() -> (Vec<String>, String) {
    let target = std::fs::read_to_string(workspace().join("systemd/recruiter.target")).expect("the unit is there");
    let mut commands: Vec<_> = target.lines().filter_map(|line| line.strip_prefix("#   ")).map(ToOwned::to_owned).collect();
    let start = commands.pop().expect("there are commands");
    (commands, start)
}

/// The root of this repository.
///
/// # Panics
/// Never: this package is in a workspace.
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_owned()
}

/// Enqueues a job by the command line, with further arguments.
pub async fn enqueue(database: &TestDatabase, class: &str, parameters: &str, more: &[&str]) {
    let arguments = [&["enqueue", "--class", class, "--parameters", parameters], more].concat();
    let mut process = Process::on(database, "recruiter", &arguments);
    let status = process.wait_exit(SOON).await;
    assert!(status.success(), "{}", process.stderr());
}

/// Waits for a job of this class in the archive, deletes it, and returns its finish reason.
pub async fn archived(database: &TestDatabase, class: &str) -> String {
    let look = async || database.raw("archived").find_one_and_delete(doc! { "workable.class": class }).await.expect("MongoDB answers");
    let job = wait_for(SOON, &format!("a job of class {class} is archived"), look).await;
    job.get_str("why").expect("an archived job has a finish reason").to_owned()
}
