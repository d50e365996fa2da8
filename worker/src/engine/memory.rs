//! Resident memory of this process.

#[cfg(target_os = "linux")]
use std::{fs::File, os::unix::fs::FileExt as _, sync::LazyLock};

/// Stays open after the first use, so that a process without free file descriptors can still read its memory.
#[cfg(target_os = "linux")]
static STATM: LazyLock<Option<File>> = LazyLock::new(|| File::open("/proc/self/statm").ok());

/// Resident memory in bytes; zero when `/proc` cannot be read.
#[cfg(target_os = "linux")]
pub(crate) fn resident() -> u64 {
    let mut text = [0; 256];
    let read = STATM.as_ref().and_then(|statm| statm.read_at(&mut text, 0).ok()).unwrap_or(0);
    let resident = std::str::from_utf8(&text[..read]).ok().and_then(|text| text.split(' ').nth(1)?.parse::<u64>().ok());
    resident.unwrap_or(0) * rustix::param::page_size() as u64
}

/// Zero, because it cannot be read: [`WorkerConfig::validate`](crate::WorkerConfig::validate) refuses a limit here.
#[cfg(not(target_os = "linux"))]
pub(crate) fn resident() -> u64 {
    0
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_process_knows_its_memory() {
        let before = resident();
        let more = std::hint::black_box(vec![1_u8; 64 * 1024 * 1024]);
        assert!(before > 0 && resident() >= before + more.len() as u64 / 2, "{before}, then {}", resident());
    }
}
