//! Tools that the tests need and that a machine may not have, and the programs of the previous release: downloaded or built once into the
//! user's cache, beside the embedded mongod.

use std::{
    env, fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
};

use etcetera::BaseStrategy as _;
use tempfile::NamedTempFile;

/// The directory of this name in the cache. If it is missing, `fill` fills a temporary directory, which is then
/// renamed. Therefore the directory is complete or missing, even if several processes do this at the same time.
pub fn installed(name: &str, fill: impl FnOnce(&Path)) -> PathBuf {
    let cache = etcetera::choose_base_strategy().expect("the user has a home").cache_dir().join("recruiter");
    let directory = cache.join(name);
    if directory.exists() {
        return directory;
    }
    fs::create_dir_all(&cache).expect("the cache is writable");
    let half = tempfile::Builder::new().prefix(".install-").tempdir_in(&cache).expect("the cache is writable");
    let target = half.path().join("whole");
    fs::create_dir(&target).expect("the cache is writable");
    fill(&target);
    if let Err(error) = fs::rename(&target, &directory) {
        assert!(directory.exists(), "{} cannot be put in its place: {error}", directory.display());
    }
    directory
}

/// The path of a program on `PATH`.
pub fn on_path(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|directory| directory.join(program)).find(|file| file.is_file())
}

/// Unpacks one Python package without its dependencies. A requirement is a package, its version, and the checksums of
/// its possible files: `name==1.2.3 --hash=sha256:…`.
pub fn pip(target: &Path, requirement: &str) {
    let mut requirements = NamedTempFile::with_prefix("recruiter-requirement-").expect("the temporary directory is writable");
    writeln!(requirements, "{requirement}").expect("the temporary directory is writable");
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--require-hashes"]);
    run(pip.arg("--target").arg(target).arg("--requirement").arg(requirements.path()));
}

/// Runs a command and returns its standard output. Panics with its standard error.
pub fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?} cannot be run: {error}"));
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert!(output.status.success(), "{command:?} failed with {}:\n{stdout}\n{stderr}", output.status);
    stdout
}
