//! The Debian package: `dpkg` installs it, upgrades it while jobs run, removes and purges it, on a real systemd.
//!
//! Run only when it is named (`--test package`): it boots a systemd, for which it must be root, and needs `lintian` and `dpkg-dev`.

use std::{fs, process::Command};

use bson::{Document, doc};
use recruiter_tests::{
    machine::{Machine, PROGRAMS, SERVICES, WEB, enqueue, install_commands, workspace},
    mongo::TestDatabase,
    processes::{Process, binary, skipped},
    promise,
    wait::{SOON, wait_until},
};
use tempfile::TempDir;

/// The programs of the test package are those of the tests. Releases have the same files, and programs of the profile `dist`.
const VERSIONS: [&str; 2] = ["0.0.1-1", "0.0.2-1"];
/// Jobs that wait when the upgrade begins. Ten run at a time, so the worker has work for a while after it.
const BACKLOG: usize = 300;
/// Further jobs while `dpkg` works: at most so many.
const MOST: usize = 1_000;

/// All of it: installed, configured, upgraded under load, removed and purged.
#[tokio::test(flavor = "multi_thread")]
async fn the_package_is_installed_upgraded_under_load_removed_and_purged() {
    let database = TestDatabase::new().await;
    let machine = Machine::boot(stage()).await;
    let before = files(&machine);

    machine.run(&install(VERSIONS[0]));
    installs_everything_and_starts_nothing(&machine);
    man_pages_are_shown(&machine);
    shells_complete(&machine);

    configure(&machine, &database);
    machine.run(&install_commands().1);
    machine.run("systemctl start recruiter-worker@spare.service");
    for service in SERVICES {
        assert_eq!(machine.show(service, "ActiveState,UnitFileState"), "active enabled", "{service}");
    }
    upgrade_under_load(&machine, &database).await;

    machine.run("dpkg --remove recruiter");
    assert_eq!(machine.exits(), SERVICES_END_CLEANLY, "a removal stops the services");
    for program in PROGRAMS {
        assert!(!machine.output(&format!("command -v {program}")).0, "{program} is still there");
    }
    machine.run("grep MONGODB_URI= /etc/recruiter/recruiter.env && systemctl is-active recruiter.service | grep inactive");

    machine.run("dpkg --purge recruiter");
    let left: Vec<_> = files(&machine).into_iter().filter(|file| !before.contains(file)).collect();
    assert_eq!(left, Vec::<String>::new(), "a purge leaves files");
    machine.run("getent passwd recruiter"); // its number must not become another user's
    assert!(database.raw("archived").count_documents(doc! {}).await.expect("MongoDB answers") > 0, "the database is left alone");
}

/// All services of [`SERVICES`] ended as they should, and no other; in the order of [`Machine::exits`].
const SERVICES_END_CLEANLY: [&str; 3] =
    ["recruiter-cleaner.service success 0", "recruiter-worker@main.service success 0", "recruiter.service success 0"];

fn installs_everything_and_starts_nothing(machine: &Machine) {
    for program in PROGRAMS {
        machine.run(&format!("/usr/bin/{program} --version"));
    }
    assert!(!machine.output("recruiter dev --version").0, "recruiter-dev is no part of the package");
    for unit in ["recruiter.target", SERVICES[0], SERVICES[1], SERVICES[2], WEB] {
        assert_eq!(machine.show(unit, "ActiveState,UnitFileState"), "inactive disabled", "{unit}");
    }
    // With the man pages that the units name.
    let units = ["recruiter.target", "recruiter.service", "recruiter-cleaner.service", "recruiter-worker@.service", WEB];
    let paths = units.map(|unit| format!("/usr/lib/systemd/system/{unit}")).join(" ");
    assert_eq!(machine.run(&format!("systemd-analyze verify {paths}")), "");
    let of = |path: &str| machine.run(&format!("stat -c '%U:%G %a' {path}"));
    assert_eq!(of("/etc/recruiter/recruiter.env"), "root:root 600");
    assert_eq!(of("/run/recruiter"), "recruiter:recruiter 750");
    for script in ["recruiter.js", "roles.js"] {
        assert_eq!(of(&format!("/usr/share/recruiter/{script}")), "root:root 644");
    }
    // A file that was changed is kept in an upgrade.
    let kept = machine.run("dpkg-query --show --showformat '${Conffiles}' recruiter | awk '{ print $1 }' | sort");
    assert_eq!(kept, "/etc/recruiter/recruiter.env\n/etc/recruiter/workables.toml");
    let example = "/usr/share/doc/recruiter/examples/cleaner.toml";
    assert_eq!(machine.run(&format!("recruiter-cleaner --check-config --settings {example}")), format!("{example} is right"));
    let named = machine.run("cat /usr/share/doc/recruiter/copyright");
    assert!(named.contains("\n mongodb 3") && named.contains("\nLicense: Apache-2.0 or MIT\n"), "{named}");
    machine.run("zcat /usr/share/doc/recruiter/licences.txt.gz | grep -q '^ring .*: LICENSE$'");
}

fn man_pages_are_shown(machine: &Machine) {
    let pages = machine.run("dpkg --listfiles recruiter | grep /man1/");
    let pages: Vec<_> = pages.lines().collect();
    assert!(pages.len() > 50 && pages.iter().any(|page| page.ends_with("recruiter-worker.1.gz")), "{pages:?}");
    for page in pages {
        let complaints = machine.run(&format!("MANWIDTH=100 man --warnings --local-file --troff-device=utf8 {page} >/dev/null"));
        assert_eq!(complaints, "", "{page}");
    }
    machine.run("man recruiter-jobs-retry | grep -q -- --to-group");
}

/// Each shell finds the script where its own packages look for scripts.
fn shells_complete(machine: &Machine) {
    let scripts = "/usr/share/bash-completion/completions/recruiter.bash";
    let checks = [
        (
            "bash",
            format!(". {scripts}; COMP_WORDS=(recruiter job) COMP_CWORD=1; _recruiter recruiter job recruiter; echo ${{COMPREPLY[@]}}"),
        ),
        ("fish", "complete --do-complete 'recruiter job'".to_owned()),
        // It completes only on a terminal.
        (
            "zsh",
            "autoload -Uz compinit; compinit -D -u; autoload +X $_comps[recruiter]; functions $_comps[recruiter] | grep -o jobs".to_owned(),
        ),
    ];
    for (shell, check) in checks {
        if !machine.output(&format!("command -v {shell}")).0 {
            skipped(&format!("{shell} is not installed"));
            continue;
        }
        fs::write(machine.stage().join("check"), check).expect("our own directory");
        let completed = machine.run(&format!("HOME=/tmp {shell} check"));
        assert!(completed.lines().any(|line| line.split_whitespace().next() == Some("jobs")), "{shell}: {completed}");
    }
}

/// The programs write down each start, in the directory that is theirs.
fn configure(machine: &Machine, database: &TestDatabase) {
    let workables = r#"
[workables.short]
command = ["sh", "-c", "echo $1 >>$HOME/started; sleep 0.3", "sh", "{n}"]
[workables.long]
command = ["sh", "-c", "test -e $HOME/long && exit; touch $HOME/long; exec sleep 1000"]
"#;
    fs::write(machine.stage().join("workables.toml"), workables).expect("our own directory");
    machine.run("cat workables.toml >>/etc/recruiter/workables.toml");
    machine.run(&format!("echo 'MONGODB_URI={}' >>/etc/recruiter/recruiter.env", database.uri()));
    machine.run("echo RECRUITER_CONCURRENCY=1 >/etc/recruiter/worker-spare.env");
}

/// Short jobs run once, also those that are enqueued meanwhile. A job that runs for longer than the grace runs again, and has not lost an attempt.
async fn upgrade_under_load(machine: &Machine, database: &TestDatabase) {
    // Both workers are stopped by a command. One stays stopped, also after an upgrade.
    let mut stop = Process::on(database, "recruiter", &["workers", "stop", "--all"]);
    assert!(stop.wait_exit(SOON).await.success(), "{}", stop.stderr());
    let workers = ["recruiter-worker@spare.service", SERVICES[2]];
    for worker in workers {
        wait_until(SOON, worker, async || machine.show(worker, "ActiveState") == "inactive").await;
    }
    machine.run(&format!("systemctl start {}", SERVICES[2]));
    machine.exits();

    enqueue(database, "long", "{}", &["--retry", "1", "--retry-delay", "0s"]).await;
    wait_until(SOON, "the long job runs", async || machine.count("sleep") == 1).await;
    let mut enqueued = 0;
    enqueue_short(machine, database, &mut enqueued, BACKLOG).await;
    wait_until(SOON, "short jobs run", async || archived(database, "short").await.len() > 20).await;
    let running = SERVICES.map(|service| machine.show(service, "MainPID"));

    machine.run(&format!("setsid sh -c '{}; echo $? >code' >dpkg.log 2>&1 </dev/null &", install(VERSIONS[1])));
    while !machine.stage().join("code").exists() && enqueued < MOST {
        enqueue_short(machine, database, &mut enqueued, 5).await;
    }
    wait_until(SOON, "dpkg has ended", async || machine.stage().join("code").exists()).await;
    let printed = fs::read_to_string(machine.stage().join("dpkg.log")).expect("it is there");
    assert_eq!(machine.run("cat code"), "0", "{printed}");
    assert!(enqueued > BACKLOG, "nothing was enqueued during the upgrade");

    assert_eq!(machine.run("dpkg-query --show --showformat '${Version}' recruiter"), VERSIONS[1]);
    assert_eq!(machine.exits(), SERVICES_END_CLEANLY, "each was stopped once: {printed}");
    for (service, former) in SERVICES.iter().zip(running) {
        assert_eq!(machine.show(service, "ActiveState,UnitFileState,NRestarts"), "active enabled 0", "{service}: {printed}");
        let pid = machine.show(service, "MainPID");
        assert_ne!(pid, former, "{service} was not restarted");
        let program = machine.run(&format!("readlink /proc/{pid}/exe"));
        assert!(program.starts_with("/usr/bin/") && !program.contains("(deleted)"), "{service} still runs the old program: {program}");
    }
    assert_eq!(machine.show(workers[0], "ActiveState"), "inactive", "what was stopped stays stopped");

    wait_until(SOON, "all jobs have ended", async || archived(database, "short").await.len() == enqueued).await;
    wait_until(SOON, "the long job has ended", async || archived(database, "long").await.len() == 1).await;
    for job in archived(database, "short").await {
        promise!(ended(&job) == (Some("done"), [1, 0, 0]), "a job was not done at its first attempt: {job}");
    }
    let mut started: Vec<usize> =
        machine.run("cat /var/lib/recruiter-worker/main/started").lines().map(|line| line.parse().expect("a number")).collect();
    started.sort_unstable();
    promise!(started == (0..enqueued).collect::<Vec<_>>(), "of {enqueued} jobs, these were started: {started:?}");
    let long = &archived(database, "long").await[0];
    promise!(ended(long) == (Some("done"), [2, 1, 0]), "the interruption cost an attempt: {long}");
}

/// Enqueues further jobs, numbered.
async fn enqueue_short(machine: &Machine, database: &TestDatabase, enqueued: &mut usize, more: usize) {
    let lines: String =
        (*enqueued..*enqueued + more).map(|n| format!("{{\"class\": \"short\", \"parameters\": {{\"n\": {n}}}}}\n")).collect();
    let file = machine.stage().join("jobs.ndjson");
    fs::write(&file, lines).expect("our own directory");
    let mut process = Process::on(database, "recruiter", &["enqueue", "--from", &file.to_string_lossy()]);
    assert!(process.wait_exit(SOON).await.success(), "{}", process.stderr());
    *enqueued += more;
}

async fn archived(database: &TestDatabase, class: &str) -> Vec<Document> {
    use futures_util::TryStreamExt as _;

    let found = database.raw("archived").find(doc! { "workable.class": class }).await.expect("MongoDB answers");
    found.try_collect().await.expect("MongoDB answers")
}

/// The finish reason; all starts, those that do not count, and those that ended with the worker.
fn ended(job: &Document) -> (Option<&str>, [i32; 3]) {
    (job.get_str("why").ok(), ["attempts", "interruptions", "deaths"].map(|field| job.get_i32(field).unwrap_or(-1)))
}

/// Everything that a package could leave.
fn files(machine: &Machine) -> Vec<String> {
    // The last is of `man`.
    let others = "-path /run/stage -prune -o -path /run/overlay -prune -o -path /var/cache/man -prune";
    let found = machine.run(&format!("find /etc /usr /var /run {others} -o -path '*recruiter*' -print"));
    found.lines().map(str::to_owned).collect()
}

fn install(version: &str) -> String {
    format!("dpkg --install recruiter_{version}_*.deb")
}

/// Both versions of the package.
fn stage() -> TempDir {
    let stage = tempfile::tempdir().expect("a directory");
    let built = binary("recruiter");
    for version in VERSIONS {
        let made = Command::new(workspace().join("packaging/deb"))
            .args(["--version", version, "--built"])
            .arg(built.parent().expect("it is in a directory"))
            .env_remove("DEBEMAIL")
            .output()
            .expect("bash runs");
        let printed = [made.stdout, made.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert!(made.status.success(), "{}", printed.concat());
        let path = workspace().join(printed[0].lines().last().expect("it prints the path of the package"));
        fs::copy(&path, stage.path().join(path.file_name().expect("a file"))).expect("it was made");
        fs::remove_file(path).expect("our own file");
    }
    stage
}
