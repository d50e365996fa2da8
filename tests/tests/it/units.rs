//! `recruiter units install` into a root that is prepared as an image would be. The suite `systemd` installs with it on a running systemd.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use recruiter_tests::{
    machine::{PROGRAMS, workspace},
    processes::binary,
};
use serde_json::Value;
use tempfile::TempDir;

/// The root of a file system, with the programs in this directory of it.
struct Image {
    root: TempDir,
    programs: PathBuf,
}

impl Image {
    fn with_programs_in(directory: &str) -> Self {
        let root = tempfile::tempdir().unwrap();
        let programs = root.path().join(directory);
        fs::create_dir_all(&programs).unwrap();
        for program in PROGRAMS {
            // On another file system, it is copied.
            fs::hard_link(binary(program), programs.join(program))
                .or_else(|_| fs::copy(binary(program), programs.join(program)).map(drop))
                .unwrap();
        }
        Self { root, programs }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.path().join(path)
    }

    /// The exit code, the outcome of each file by its name, and standard error. The umask is that of a cautious root.
    fn install(&self, more: &str) -> (i32, Vec<(String, String)>, String) {
        let command = format!(
            "umask 077; exec {0}/recruiter units install --json --root {1} {more}",
            self.programs.display(),
            self.root.path().display()
        );
        let ended = Command::new("/bin/sh").args(["-c", &command]).output().unwrap();
        let outcomes = String::from_utf8(ended.stdout).unwrap().lines().map(outcome).collect();
        (ended.status.code().unwrap(), outcomes, String::from_utf8(ended.stderr).unwrap())
    }
}

fn outcome(line: &str) -> (String, String) {
    let line: Value = serde_json::from_str(line).unwrap();
    let name = Path::new(line["name"].as_str().unwrap()).file_name().unwrap().to_str().unwrap().to_owned();
    (name, line["outcome"].as_str().unwrap().to_owned())
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn the_units_start_the_programs_where_they_are_and_nothing_of_an_administrator_is_lost() {
    let image = Image::with_programs_in("usr/local/bin");
    let etc = image.path("etc");
    let (code, planned, _) = image.install("--dry-run");
    assert!(code == 0 && planned.iter().all(|(_, outcome)| outcome == "written") && !etc.exists(), "{planned:?}");
    let (code, written, said) = image.install("");
    assert_eq!((code, &written, said.as_str()), (0, &planned, ""));

    let shipped: Vec<PathBuf> = fs::read_dir(workspace().join("systemd")).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(written.len(), shipped.len(), "every file of systemd/ is installed");
    for file in shipped {
        let name = file.file_name().unwrap().to_str().unwrap();
        let (to, mode) = match name {
            "recruiter.sysusers" => ("sysusers.d/recruiter.conf".into(), 0o644),
            "recruiter.tmpfiles" => ("tmpfiles.d/recruiter.conf".into(), 0o644),
            "recruiter.env" => (format!("recruiter/{name}"), 0o600),
            _ if name.ends_with(".toml") => (format!("recruiter/{name}"), 0o644),
            _ => (format!("systemd/system/{name}"), 0o644),
        };
        let installed = etc.join(to);
        assert_eq!(read(&installed), read(&file).replace("ExecStart=/usr/bin/", "ExecStart=/usr/local/bin/"), "{name}");
        assert_eq!(fs::metadata(&installed).unwrap().permissions().mode() & 0o7777, mode, "{name}");
        let directory = fs::metadata(installed.parent().unwrap()).unwrap().permissions().mode();
        assert_eq!(directory & 0o7777, 0o755, "{name}: the services read it");
    }
    assert!(read(&etc.join("systemd/system/recruiter.service")).contains("\nExecStart=/usr/local/bin/recruiter run\n"));

    fs::write(etc.join("recruiter/recruiter.env"), "MONGODB_URI=mongodb://mine/x\n").unwrap();
    fs::write(etc.join("systemd/system/recruiter.service"), "# mine\n").unwrap();
    let (code, again, _) = image.install("");
    let of = |outcome: &str| again.iter().filter(|(_, other)| other == outcome).map(|(name, _)| name.as_str()).collect::<Vec<_>>();
    assert_eq!(
        (code, of("kept"), of("replaced"), of("unchanged").len()),
        (0, vec!["recruiter.env"], vec!["recruiter.service"], again.len() - 2)
    );
    assert_eq!(read(&etc.join("recruiter/recruiter.env")), "MONGODB_URI=mongodb://mine/x\n");
    assert_eq!(read(&etc.join("systemd/system/recruiter.service.old")), "# mine\n");
    let leftovers = ["systemd/system", "recruiter"].map(|directory| fs::read_dir(etc.join(directory)).unwrap().count());
    assert_eq!(leftovers, [6, again.len() - 7], "nothing half written is left");
}

#[test]
fn what_could_not_work_is_refused_before_anything_is_written() {
    let check = |image: &Image, expected: i32, words: &str| {
        let (code, outcomes, said) = image.install("");
        assert!(code == expected && outcomes.is_empty() && said.contains(words), "{code} {said}");
        assert!(!image.path("etc").exists());
    };
    check(&Image::with_programs_in("home/ada/bin"), 78, "the services do not see /home");
    check(&Image::with_programs_in("srv/100%"), 78, "a unit cannot name");
    let alone = Image::with_programs_in("usr/bin");
    fs::remove_file(alone.programs.join("recruiter-cleaner")).unwrap();
    check(&alone, 78, "has no recruiter-cleaner: install the three programs in one directory");
    let packaged = Image::with_programs_in("usr/bin");
    let unit = packaged.path("usr/lib/systemd/system/recruiter.service");
    fs::create_dir_all(unit.parent().unwrap()).unwrap();
    fs::write(unit, "").unwrap();
    check(&packaged, 1, "the package has installed the units");

    let blocked = Image::with_programs_in("usr/bin");
    fs::write(blocked.path("etc"), "").unwrap();
    let (code, _, said) = blocked.install("");
    assert!(code == 1 && said.contains("cannot install") && said.contains("etc/sysusers.d/recruiter.conf"), "{said}");
    let nowhere = Command::new(binary("recruiter")).args(["units", "install", "--root", "/nowhere"]).output().unwrap();
    let said = String::from_utf8(nowhere.stderr).unwrap();
    assert!(nowhere.status.code() == Some(2) && said.contains("--root /nowhere: No such file"), "{said}");
}
