//! The processor time and memory of processes, as the kernel counts them.

use std::time::Duration;

use bson::{Document, doc};
use procfs::process::Process;

/// The processor time of a process on all cores together. The kernel counts it in hundredths of a second.
pub(super) fn computed(pid: u32) -> anyhow::Result<Duration> {
    let stat = Process::new(pid.cast_signed())?.stat()?;
    Ok(Duration::from_secs(stat.utime + stat.stime).div_f64(ticks_per_second()))
}

#[expect(clippy::cast_precision_loss, reason = "a hundred")]
fn ticks_per_second() -> f64 {
    procfs::ticks_per_second() as f64
}

/// The current and the maximum physical memory of a process, in megabytes.
#[expect(clippy::cast_precision_loss, reason = "a process is far smaller than 2^52 bytes")]
pub(super) fn memory(pid: u32) -> anyhow::Result<Document> {
    let status = Process::new(pid.cast_signed())?.status()?;
    let megabytes = |kibibytes: Option<u64>| kibibytes.map(|kibibytes| (kibibytes * 1_024) as f64 / 1e6);
    Ok(doc! { "now_mb": megabytes(status.vmrss), "peak_mb": megabytes(status.vmhwm) })
}

/// Processor time as a percentage of one core.
pub(super) fn percent_of_a_core(computed: Duration, time: Duration) -> f64 {
    100.0 * computed.as_secs_f64() / time.as_secs_f64()
}
