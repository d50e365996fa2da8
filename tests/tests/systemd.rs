//! The units in `systemd/`: systemd understands them, they stay as tight as they are, and they run the real programs.
//!
//! Run only when it is named (`--test systemd`): the last tests boot a systemd, for which they must be root.

use std::{fs, os::unix::fs::PermissionsExt as _, process::Command};

use bson::doc;
use recruiter_common::NewJob;
use recruiter_tests::{
    local::store,
    machine::{Machine, PROGRAMS, SERVICES, WEB, archived, enqueue, install_commands, workspace},
    mongo::TestDatabase,
    processes::binary,
    tls::{Authority, between, section},
    wait::{SOON, wait_until},
};
use tempfile::TempDir;

/// Highest exposure of a service by `systemd-analyze security`, in tenths. Measured with systemd 252: recruiter 13,
/// cleaner 14, worker 19, whose programs may do more.
const EXPOSURE: &str = "--threshold=20";

#[test]
fn systemd_understands_every_line() {
    let root = root_with_units();
    let verified = Command::new("systemd-analyze")
        .args(["verify", "--man=no"])
        .arg(format!("--root={}", root.path().display()))
        .arg("recruiter.target")
        .args(SERVICES)
        .arg(WEB)
        .output()
        .expect("systemd-analyze runs");
    // A key that it does not know is a warning only.
    assert_eq!(String::from_utf8_lossy(&verified.stderr), "");
    assert!(verified.status.success());
}

#[test]
fn services_stay_as_tight_as_they_are() {
    let root = root_with_units();
    for service in SERVICES.into_iter().chain([WEB]) {
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
    let machine = Machine::boot(checkout()).await;
    let (install, start) = install_commands();
    for command in install {
        machine.run(&format!("cd systemd && {command}"));
    }
    machine.run(&format!("echo 'MONGODB_URI={}' >>/etc/recruiter/recruiter.env", database.uri()));
    // A death that is found sooner is found by looking at the process.
    machine.run("echo RECRUITER_DEAD_AFTER=10m >>/etc/recruiter/recruiter.env");
    machine.run("printf '[workables.nap]\ncommand = [\"sleep\", \"1000\"]\n' >>/etc/recruiter/workables.toml");
    machine.run("printf '[workables.here]\ncommand = [\"cat\", \"workables.toml\"]\n' >>/etc/recruiter/workables.toml");
    machine.run("printf '[workables.files]\ncommand = [\"sh\", \"-c\", \"ulimit -n; echo > $HOME/x && echo > $STATE_DIRECTORY/y\"]\n' >>/etc/recruiter/workables.toml");
    machine.run("printf '[Service]\nType=notify\nExecStart=/lib/systemd/systemd-journald\n' >/run/systemd/system/journald.service && systemctl start journald");
    machine.run("mkdir /etc/systemd/system/recruiter-worker@.service.d && printf '[Service]\nStandardError=journal\n' >/etc/systemd/system/recruiter-worker@.service.d/journal.conf && systemctl daemon-reload");
    machine.run(&start);
    for service in SERVICES {
        assert_eq!(machine.show(service, "ActiveState"), "active", "{service}");
    }

    enqueue(&database, "checksum", r#"{"path": "/etc/passwd"}"#, &[]).await;
    assert_eq!(archived(&database, "checksum").await, "done");
    machine.run("test -S /run/recruiter/hints-*.sock");
    wait_until(SOON, "the worker is connected to the recruiter", async || database.tails().await == 0).await;

    machine.run(&format!("echo RECRUITER_WEB_LISTEN=127.0.0.1:0 >>/etc/recruiter/recruiter.env && systemctl start {WEB}"));
    let status = machine.show(WEB, "StatusText");
    let at = status.strip_prefix("serving ").unwrap_or_else(|| panic!("{status}"));
    let client = reqwest::Client::builder().no_proxy().build().expect("a client");
    let listed = client.get(format!("{at}/api/v1/jobs?class=checksum")).send().await.expect("it serves");
    let listed = listed.text().await.expect("it answers");
    assert!(listed.starts_with("{\"jobs\":["), "{listed}");

    // Relative paths start at the file, and a home to write to is there all the same.
    for class in ["here", "files"] {
        enqueue(&database, class, "{}", &[]).await;
        assert_eq!(archived(&database, class).await, "done", "{class}");
    }

    // A reload interrupts nothing, and knows the new class.
    machine.run(
        "printf '[workables.wrong]\ncommand = [\"false\"]\n' >>/etc/recruiter/workables.toml && systemctl reload recruiter-worker@main",
    );
    let id = NewJob::of_class("wrong", doc! {}).enqueue(&*store(&database).await).await.expect("it is enqueued").id;
    assert_eq!(archived(&database, "wrong").await, "not-scheduled-by-retry-policy");
    assert_eq!(machine.show(SERVICES[2], "ActiveState,NRestarts"), "active 0");
    // An entry of the journal has a priority, and fields.
    let shown = format!("journalctl --quiet --output cat --priority warning --unit recruiter-worker@main JOB_CLASS=wrong JOB_ID={id}");
    wait_until(SOON, "the journal has the failure", async || machine.output(&shown).1.contains(&format!("job.id={id}"))).await;

    enqueue(&database, "nap", "{}", &[]).await;
    wait_until(SOON, "the nap is taken", async || machine.count("sleep") == 1).await;
    machine.run("systemctl kill --kill-who=main --signal=KILL recruiter-worker@main.service");
    // The cleaner, for all its hardening, sees that the process is gone.
    assert_eq!(archived(&database, "nap").await, "worker-died");
    wait_until(SOON, "the worker is back", async || machine.show(SERVICES[2], "ActiveState,NRestarts") == "active 1").await;
    assert_eq!(machine.count("sleep"), 0, "programs of a killed worker are killed, too");
    enqueue(&database, "checksum", r#"{"path": "/etc/group"}"#, &[]).await;
    assert_eq!(archived(&database, "checksum").await, "done");

    machine.run("echo RECRUITER_WORKER_CONFIG=/nowhere >/etc/recruiter/worker-wrong.env; ! systemctl start recruiter-worker@wrong");
    assert_eq!(machine.show("recruiter-worker@wrong", "ActiveState,ExecMainStatus,NRestarts"), "failed 78 0", "only an edit can help");

    machine.run("echo RECRUITER_CONCURRENCY=none >/etc/recruiter/worker-flags.env; ! systemctl start recruiter-worker@flags");
    assert_eq!(machine.show("recruiter-worker@flags", "ActiveState,ExecMainStatus,NRestarts"), "failed 2 0", "nor here");
    assert_eq!(machine.show(SERVICES[2], "LimitNOFILE"), "65536");

    machine.run("systemctl stop recruiter.target");
    for service in SERVICES.into_iter().chain([WEB]) {
        // The target does not wait for its parts.
        wait_until(SOON, service, async || machine.show(service, "ActiveState") == "inactive").await;
        assert_eq!(machine.show(service, "Result,ExecMainStatus"), "success 0", "{service}");
    }
    machine.run("test -d /run/recruiter"); // which a container may have mounted
}

/// The drop-in of the page about operating: only root may read the file, and each service gets its own copy.
#[tokio::test(flavor = "multi_thread")]
async fn credentials_of_systemd_give_the_services_their_certificate() {
    let authority = Authority::default();
    let (mongo, root) = authority.replica_set().await;
    authority.make_users(&root).await;
    let database = TestDatabase::named(&root, "jobs").await;
    let stage = checkout();
    for file in ["ca.pem", "workers.pem"] {
        fs::copy(authority.file(file), stage.path().join(file)).expect("it was signed");
    }
    let page = section();
    let unit = format!("[Service]\n{}", between(&page, "```ini\n[Service]\n", "```"));
    let hosts = unit.replace("db1.example.org,db2.example.org", &format!("127.0.0.1:{}", mongo.port()));
    fs::write(stage.path().join("tls.conf"), hosts).expect("writable");
    let machine = Machine::boot(stage).await;
    let (install, start) = install_commands();
    for command in install {
        machine.run(&format!("cd systemd && {command}"));
    }
    machine.run("sed -i /^MONGODB_URI/d /etc/recruiter/recruiter.env");
    machine.run("install -m 644 ca.pem /etc/recruiter && install -m 600 -o root workers.pem /etc/recruiter");
    for service in ["recruiter.service", "recruiter-cleaner.service", "recruiter-worker@.service"] {
        machine.run(&format!("install -D -m 644 tls.conf /etc/systemd/system/{service}.d/tls.conf"));
    }
    machine.run("systemctl daemon-reload");
    machine.run(&start);
    enqueue(&database, "checksum", r#"{"path": "/etc/passwd"}"#, &[]).await;
    assert_eq!(archived(&database, "checksum").await, "done");
    machine.run("! setpriv --reuid=recruiter --clear-groups cat /etc/recruiter/workers.pem");
    machine.run("systemctl stop recruiter.target");
    for service in SERVICES {
        wait_until(SOON, service, async || machine.show(service, "ActiveState") == "inactive").await;
        assert_eq!(machine.show(service, "Result,ExecMainStatus"), "success 0", "{service}");
    }
}

/// A directory with the units, what they refer to, and stand-ins for the programs: what `systemd-analyze` looks at.
fn root_with_units() -> TempDir {
    let root = tempfile::tempdir().expect("a directory");
    let (units, programs) = (root.path().join("etc/systemd/system"), root.path().join("usr/bin"));
    fs::create_dir_all(&units).expect("a directory");
    fs::create_dir_all(&programs).expect("a directory");
    for unit in ["recruiter.target", "recruiter.service", "recruiter-cleaner.service", "recruiter-worker@.service", WEB] {
        fs::copy(workspace().join("systemd").join(unit), units.join(unit)).expect("the unit is there");
    }
    for target in ["sysinit", "basic", "shutdown", "network-online", "multi-user"] {
        fs::write(units.join(target).with_extension("target"), "[Unit]\nDefaultDependencies=no\n").expect("a file");
    }
    for program in PROGRAMS.map(|program| programs.join(program)).into_iter().chain([root.path().join("bin/kill")]) {
        fs::create_dir_all(program.parent().expect("a directory")).expect("a directory");
        fs::write(&program, "#!/bin/sh\n").expect("a file");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("our own file");
    }
    root
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
