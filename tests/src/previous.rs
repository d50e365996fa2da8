//! The programs of the previous release, as `tests/previous-version` names it: built once, from its commit in the repository of this checkout.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    cache,
    processes::{cargo, skipped},
};

const NAMED: &str = include_str!("../previous-version");

/// The previous release.
#[derive(Clone, Debug)]
pub struct Previous {
    /// The version of its schema.
    pub schema: i32,
    directory: PathBuf,
}

impl Previous {
    /// Builds it, which takes minutes, unless that was done before. Without its commit the test is skipped.
    ///
    /// # Panics
    /// When it does not build.
    pub fn built() -> Option<Self> {
        let (commit, schema) = named();
        let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package is in the workspace");
        let mut git = Command::new("git");
        git.arg("-C").arg(checkout).args(["cat-file", "-e", &format!("{commit}^{{commit}}")]);
        if !git.output().is_ok_and(|ended| ended.status.success()) {
            skipped(&format!("the commit {commit} of the previous release is not in a git repository at {}", checkout.display()));
            return None;
        }
        let directory = cache::installed(&format!("previous-{}", &commit[..12]), |into| build(checkout, commit, into));
        Some(Self { schema, directory })
    }

    /// Its `recruiter`.
    pub fn recruiter(&self) -> PathBuf {
        self.directory.join("recruiter")
    }

    /// Its program with the three roles of a [`World`](crate::world::World).
    pub fn roles(&self) -> PathBuf {
        self.directory.join("faulty")
    }
}

/// The commit of the previous release, and the version of its schema.
///
/// # Panics
/// When the file has no such line.
pub fn named() -> (&'static str, i32) {
    let line = NAMED.lines().find(|line| !line.starts_with('#')).expect("tests/previous-version has a line");
    let (commit, schema) = line.split_once(' ').expect("a commit and a version");
    (commit, schema.parse().expect("a version"))
}

/// Puts its programs into the directory.
fn build(checkout: &Path, commit: &str, into: &Path) {
    // Beside the directory, which must be on a disk that has room.
    let work = tempfile::tempdir_in(into.parent().expect("it is in the cache")).expect("the cache is writable");
    let (source, target) = (work.path().join("source"), work.path().join("target"));
    fs::create_dir(&source).expect("the directory is new");
    let archive = work.path().join("archive.tar");
    cache::run(Command::new("git").arg("-C").arg(checkout).args(["archive", "--output"]).arg(&archive).arg(commit));
    cache::run(Command::new("tar").arg("--extract").arg("--file").arg(&archive).arg("--directory").arg(&source));
    // Macros are compiled already in the target directory of this test. With another kind of debug information, ours have other names there.
    let shared = env::current_exe().expect("a test knows its own program").ancestors().nth(3).expect("TARGET/PROFILE/deps").to_owned();
    let faulty = if source.join("tests/src/bin/faulty.rs").exists() { "--bin=faulty" } else { "--example=faulty" };
    let mut cargo = cargo();
    cargo.args(["build", "--locked", "--quiet", "--workspace", "--bin=recruiter", faulty]);
    cargo.args(["--config", r#"profile.dev.debug="line-directives-only""#, "--config", r#"profile.dev.package."*".opt-level=0"#]);
    cargo.arg("--target-dir").arg(&target);
    cargo.env("CARGO_BUILD_BUILD_DIR", shared).env("CARGO_INCREMENTAL", "0").current_dir(&source);
    cache::run(&mut cargo);
    for name in ["recruiter", "faulty"] {
        let built = [target.join("debug"), target.join("debug/examples")].map(|place| place.join(name));
        let built = built.iter().find(|path| path.is_file()).unwrap_or_else(|| panic!("{commit} has no program `{name}`"));
        fs::copy(built, into.join(name)).expect("the cache is writable");
    }
}
