//! The lease of a session: until when the worker may start jobs. No cleaner declares it dead before.
//!
//! The heartbeat renews it. The intake reads it before a start, and a job and each item of a bundle directly before the
//! workable.

pub(super) mod heartbeat;

use std::time::Duration;

use parking_lot::Mutex;
use recruiter_common::{clock::Uptime, instant::Instant, shutdown::pause};
use tokio::sync::Notify;

use crate::cancellation::Cancel;

/// Time between two checks of a lease that is over.
const CHECK_EVERY: Duration = Duration::from_millis(50);

/// The lease of a session. There is none before the first acknowledged heartbeat.
#[derive(Debug, Default)]
pub(crate) struct Lease {
    validity: Mutex<Option<Validity>>,
    heartbeat_requested: Notify,
}

/// The end of the lease, by two clocks.
#[derive(Clone, Copy, Debug)]
struct Validity {
    /// By the clock of this machine, which counts sleep. Measured from the instant before the heartbeat was sent.
    until: Uptime,
    /// By the server's clock. Measured from the time that the heartbeat wrote.
    server_until: Instant,
}

impl Lease {
    /// Until when MongoDB may begin a start, by the server's clock. `None` if the lease is over.
    pub(crate) fn until(&self) -> Option<Instant> {
        self.until_at(Uptime::now())
    }

    pub(crate) fn is_over(&self) -> bool {
        self.until().is_none()
    }

    /// Whether a lease has ended since the last acknowledged heartbeat: no start succeeds before the next one.
    pub(crate) fn has_lapsed(&self) -> bool {
        self.validity.lock().is_some_and(|validity| Uptime::now() >= validity.until)
    }

    /// Waits while the lease is over: then no job and no item begins, because another worker may be about to run it. Returns false if it
    /// must not begin at all. Asked directly before the workable, so that a process that was frozen after the start does not enter it.
    pub(crate) async fn may_begin(&self, cancel: &Cancel) -> bool {
        while self.is_over() {
            if !cancel.allows_items() {
                return false;
            }
            tokio::select! { () = cancel.cancelled() => {} () = pause(CHECK_EVERY) => {} }
        }
        true
    }

    /// Renews the lease for `duration` after an acknowledged heartbeat that was sent at `sent` and written as `at`.
    pub(crate) fn renew(&self, sent: Uptime, at: Instant, duration: Duration) {
        *self.validity.lock() = Some(Validity { until: sent + duration, server_until: at + duration });
    }

    /// Requests an early heartbeat: a start locked no job, perhaps because the server's clock was set forward, beyond the end of the lease.
    pub(crate) fn request_heartbeat(&self) {
        self.heartbeat_requested.notify_one();
    }

    /// Waits until a heartbeat is requested.
    pub(crate) async fn heartbeat_requested(&self) {
        self.heartbeat_requested.notified().await;
    }

    fn until_at(&self, now: Uptime) -> Option<Instant> {
        self.validity.lock().filter(|validity| now < validity.until).map(|validity| validity.server_until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_over_when_the_machine_has_slept_for_longer() {
        let (lease, sent) = (Lease::default(), Uptime::now());
        let (at, duration) = (Instant::from_timestamp_millis(1_700_000_000_000).expect("a date"), Duration::from_secs(20));
        assert_eq!(lease.until_at(sent), None, "no heartbeat was acknowledged yet");
        lease.renew(sent, at, duration);
        assert_eq!(lease.until_at(sent + Duration::from_secs(19)), Some(at + duration));
        assert_eq!(lease.until_at(sent + duration), None);
        assert_eq!(lease.until_at(sent + Duration::from_secs(8 * 3_600)), None, "a night asleep");
    }
}
