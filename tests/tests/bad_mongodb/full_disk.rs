//! A disk that is full: mongod's data is on a file system of a few hundred megabytes, in a mount namespace that needs no root.

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use recruiter_common::shutdown::pause;
use recruiter_dev::embedded::{EmbeddedMongo, Options};
use recruiter_tests::{
    full_length,
    mongo::temporary,
    processes::{can_run, is_alive},
    proxy::Proxy,
    wait::{SOON, wait_until},
    world::Role,
};
use tempfile::TempDir;

use crate::stage::{PATIENT, Stage};

/// Room for mongod's journal, which it takes at once, and for some data.
const SIZE: &str = "size=400m";
/// How long the disk stays full when mongod has given up.
const OUTAGE: Duration = Duration::from_secs(2);

/// A small file system over a directory. Only those that enter its namespace see it; it goes with this value.
struct Disk {
    keeper: Child,
    directory: PathBuf,
    programs: TempDir,
}

impl Disk {
    fn over(directory: &Path) -> Self {
        // Lives until its input ends: it does not outlive this process.
        let script = format!("mount -t tmpfs -o {SIZE} tmpfs \"$1\" && echo mounted && exec cat >/dev/null");
        let mut unshare = Command::new("unshare");
        unshare.args(["--user", "--map-root-user", "--mount", "sh", "-c", &script, "sh"]).arg(directory);
        let mut keeper = unshare.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("unshare (util-linux) runs");
        let mut said = String::new();
        BufReader::new(keeper.stdout.take().unwrap()).read_line(&mut said).unwrap();
        assert_eq!(said, "mounted\n");
        Self { keeper, directory: directory.to_owned(), programs: tempfile::tempdir().unwrap() }
    }

    /// A program that is this one with the disk in sight.
    fn with(&self, program: &Path) -> PathBuf {
        let path = self.programs.path().join("mongod");
        let enter = format!("nsenter --user --mount --preserve-credentials --target {}", self.keeper.id());
        fs::write(&path, format!("#!/bin/sh\nexec {enter} '{}' \"$@\"\n", program.display())).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn filler(&self) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.keeper.id()));
        root.join(self.directory.strip_prefix("/").unwrap()).join("filler")
    }

    /// Takes all the room that is left.
    fn fill(&self) {
        let mut file = File::create(self.filler()).unwrap();
        for size in [1 << 20, 1 << 12] {
            while file.write_all(&vec![1; size]).is_ok() {}
        }
    }

    fn free(&self) {
        fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_loses_nothing_that_was_acknowledged() {
    if !can_run(&["unshare", "--user", "--map-root-user", "--mount", "true"]) {
        return;
    }
    let options = temporary();
    let disk = Disk::over(&options.data_dir);
    // Its data are written every second, so that it notices soon.
    let mut mongo =
        EmbeddedMongo::start(Options { mongod: disk.with(&options.mongod), arguments: vec!["--syncdelay=1".into()], ..options })
            .await
            .unwrap();
    let mut stage = Stage::on(&mongo.uri()).await;
    let uri = mongo.uri_for(stage.world.database.name());
    stage.start(&uri, PATIENT, &[Role::Recruiter, Role::Cleaner, Role::Worker, Role::Worker]);
    stage.enqueue_by(&uri).await;
    let bad_line = Proxy::before(&uri).await;
    stage.enqueue_on_a_bad_line(&bad_line).await;
    stage.enqueue_some_that_last(8_000).await;
    let mut blows = Vec::new();
    let times = if full_length() { 2 } else { 1 };
    for _ in 0..times {
        let blow = async {
            disk.fill();
            wait_until(SOON, "mongod gives up", async || !is_alive(mongo.pid())).await;
            pause(OUTAGE).await;
            disk.free();
            mongo.restart().await.unwrap();
        };
        blows.push(stage.blow(blow).await);
    }
    stage.close("the disk is full; space is freed; mongod is restarted", &blows).await.without_deaths().end();
    mongo.stop().await.unwrap();
}
