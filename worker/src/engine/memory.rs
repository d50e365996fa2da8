//! Resident memory of this process.

use std::{fs::File, os::unix::fs::FileExt as _, sync::LazyLock};

use procfs::{FromRead as _, process::StatM};

/// Stays open after the first use, so that a process without free file descriptors can still read its memory.
static STATM: LazyLock<Option<File>> = LazyLock::new(|| File::open("/proc/self/statm").ok());

/// Resident memory in bytes; zero when `/proc` cannot be read.
pub(crate) fn resident() -> u64 {
    let mut text = [0; 256];
    let read = STATM.as_ref().and_then(|statm| statm.read_at(&mut text, 0).ok()).unwrap_or(0);
    StatM::from_read(&text[..read]).map_or(0, |memory| memory.resident * procfs::page_size())
}
