//! Resident memory of this process.

/// In bytes; zero where `/proc` does not say.
pub(crate) fn resident() -> u64 {
    procfs::process::Process::myself().and_then(|this| this.statm()).map_or(0, |memory| memory.resident * procfs::page_size())
}
