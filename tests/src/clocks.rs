//! Wrong clocks: a process whose wall clock is ahead, behind or jumping, while its monotonic clock is right.
//!
//! libfaketime does this. The variables of [`Clock::environment`] load it into the process. Child processes have the
//! same clock. The library is downloaded once with Python's pip.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use tempfile::{NamedTempFile, TempPath};

use crate::{cache, processes::is_alive};

/// The Python package that carries the library, built for x86-64 Linux, and its checksum.
const PACKAGE: &str = "libfaketime==3.0.1 --hash=sha256:5eed7c17f3d4ba0f6f828de4975f69a622b06b1e792674e6c1b069c0689fab79";
const IN_PACKAGE: &str = "libfaketime/vendor/libfaketime/src/libfaketime.so.1";

/// The clock of all processes started with its [`environment`](Self::environment). It must exist as long as they run.
#[derive(Debug)]
pub struct Clock {
    file: TempPath,
}

impl Clock {
    /// A clock with this difference from the right one: `+1h`, `-30m`, `+90` (seconds), `+2d`.
    pub fn offset(offset: &str) -> Self {
        sweep();
        let clock =
            Self { file: NamedTempFile::with_prefix("recruiter-clock-").expect("the temporary directory is writable").into_temp_path() };
        clock.step(offset);
        clock
    }

    /// Changes the difference. Every process with this clock jumps within a second. A thread that reads the clock at
    /// that moment may get a value that is neither the old nor the new time.
    pub fn step(&self, offset: &str) {
        assert!(offset.starts_with(['+', '-']), "`{offset}` is no difference: the clock would stand still");
        // Replaced atomically, because readers take no lock, and without a line feed.
        let next = self.file.with_extension("next");
        fs::write(&next, offset).expect("the temporary directory is writable");
        fs::rename(next, &self.file).expect("the temporary directory is writable");
    }

    /// The environment of a process with this clock.
    pub fn environment(&self) -> [(&str, &str); 7] {
        [
            // By its name alone: blanks divide the list of libraries, and the cache of a user may have some in its path.
            ("LD_PRELOAD", path(Path::new(LIBRARY.file_name().expect("a file")))),
            ("LD_LIBRARY_PATH", path(LIBRARY.parent().expect("its directory"))),
            ("FAKETIME_TIMESTAMP_FILE", path(&self.file)),
            // The file is read again after a second.
            ("FAKETIME_CACHE_DURATION", "0"),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
            // Without this, MongoDB's storage engine breaks: its waits for a condition on the monotonic clock return at
            // once, forever.
            ("FAKETIME_FORCE_MONOTONIC_FIX", "0"),
            // Times of files stay right.
            ("NO_FAKE_STAT", "1"),
        ]
    }
}

fn path(path: &Path) -> &str {
    path.to_str().expect("caches and temporary directories have plain names")
}

static LIBRARY: LazyLock<PathBuf> =
    LazyLock::new(|| cache::installed("libfaketime-3.0.1", |target| cache::pip(target, PACKAGE)).join(IN_PACKAGE));

/// Deletes the shared memory of processes that were killed before they could delete it.
fn sweep() {
    for file in fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
        let name = file.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix("faketime_shm_").or(name.strip_prefix("sem.faketime_sem_")));
        if pid.and_then(|pid| pid.parse().ok()).is_some_and(|pid| !is_alive(pid)) {
            // Another process may delete it at the same time.
            let _ = fs::remove_file(file.path());
        }
    }
}
