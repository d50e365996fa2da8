//! Wrong clocks: a process whose wall clock is ahead or behind, and jumps, while its monotonic clock is right.
//!
//! This is libfaketime's work, loaded into the process by the variables of [`Clock::environment`]; programs that the process starts
//! have the same clock. The library is fetched once with Python's pip.

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

/// The clock of those who are started with its [`environment`](Self::environment); they need it for as long as they run.
#[derive(Debug)]
pub struct Clock {
    file: TempPath,
}

impl Clock {
    /// A clock that differs from the right one by this: `+1h`, `-30m`, `+90` (seconds), `+2d`.
    pub fn offset(offset: &str) -> Self {
        sweep();
        let clock =
            Self { file: NamedTempFile::with_prefix("recruiter-clock-").expect("the temporary directory is writable").into_temp_path() };
        clock.step(offset);
        clock
    }

    /// Lets it differ by something else. Within a second whoever has this clock jumps; what a thread reads at that very moment may
    /// be neither the old nor the new time.
    pub fn step(&self, offset: &str) {
        assert!(offset.starts_with(['+', '-']), "`{offset}` is no difference: the clock would stand still");
        // Whole or not at all, and without a line feed: its readers do not wait for each other.
        let next = self.file.with_extension("next");
        fs::write(&next, offset).expect("the temporary directory is writable");
        fs::rename(next, &self.file).expect("the temporary directory is writable");
    }

    /// What a process that has this clock is started with.
    pub fn environment(&self) -> [(&str, &str); 6] {
        [
            ("LD_PRELOAD", path(&LIBRARY)),
            ("FAKETIME_TIMESTAMP_FILE", path(&self.file)),
            // Looked at again when the second is over.
            ("FAKETIME_CACHE_DURATION", "0"),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
            // Without this, waits for a condition on the monotonic clock, as MongoDB's storage has them, end at once, for ever.
            ("FAKETIME_FORCE_MONOTONIC_FIX", "0"),
            // The times of files are right.
            ("NO_FAKE_STAT", "1"),
        ]
    }
}

fn path(path: &Path) -> &str {
    path.to_str().expect("caches and temporary directories have plain names")
}

static LIBRARY: LazyLock<PathBuf> =
    LazyLock::new(|| cache::installed("libfaketime-3.0.1", |target| cache::pip(target, PACKAGE)).join(IN_PACKAGE));

/// Removes the shared memory of processes that were killed before they could.
fn sweep() {
    for file in fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
        let name = file.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix("faketime_shm_").or(name.strip_prefix("sem.faketime_sem_")));
        if pid.and_then(|pid| pid.parse().ok()).is_some_and(|pid| !is_alive(pid)) {
            // Somebody else may do the same.
            let _ = fs::remove_file(file.path());
        }
    }
}
