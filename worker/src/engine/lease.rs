//! The lease of a session: until when the worker may trust that no cleaner has declared it dead.
//!
//! The heartbeat renews it. The intake reads it before a start, and a bundle before each item.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use recruiter_common::{clock::Uptime, instant::Instant};
use tokio::sync::Notify;

/// The lease of a session. There is none before the first acknowledged heartbeat.
#[derive(Debug, Default)]
pub(crate) struct Lease {
    term: Mutex<Option<Term>>,
    doubted: Notify,
}

#[derive(Clone, Copy, Debug)]
struct Term {
    /// By the clock of this machine, which counts a sleep; from before the heartbeat was sent.
    until: Uptime,
    /// By the server's clock, from the time that the heartbeat wrote.
    server_until: Instant,
}

impl Lease {
    /// Until when, by the server's clock, a start may be carried out; `None` when the lease is over.
    pub(crate) fn until(&self) -> Option<Instant> {
        self.until_at(Uptime::now())
    }

    pub(crate) fn is_over(&self) -> bool {
        self.until().is_none()
    }

    /// Renews the lease for `duration` after an acknowledged heartbeat that was sent at `sent` and written as `at`.
    pub(crate) fn renew(&self, sent: Uptime, at: Instant, duration: Duration) {
        *self.term() = Some(Term { until: sent + duration, server_until: at + duration });
    }

    /// Asks for a heartbeat now: a start was refused, perhaps because the server's clock was put forward, beyond the end of the lease.
    pub(crate) fn doubt(&self) {
        self.doubted.notify_one();
    }

    /// Waits until the lease is doubted.
    pub(crate) async fn doubted(&self) {
        self.doubted.notified().await;
    }

    fn until_at(&self, now: Uptime) -> Option<Instant> {
        self.term().filter(|term| now < term.until).map(|term| term.server_until)
    }

    fn term(&self) -> MutexGuard<'_, Option<Term>> {
        self.term.lock().unwrap_or_else(PoisonError::into_inner)
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
