//! Logs a warning when no recruiter leads. Without it, nothing in the worker's log would explain why the worker gets no jobs.

use std::time::{Duration, Instant as Monotonic};

use recruiter_common::{
    store::{Observed, Store},
    telemetry::chain,
};

/// A lease that was not renewed for this time, or for its own duration if that is longer, counts as not held.
const STALE_AFTER: Duration = Duration::from_secs(60);

/// The lease of the recruiter, as far as this worker has observed it.
pub(crate) struct Leader {
    /// Time without a hint after which the lease is read.
    silence: Duration,
    last_hint_at: Monotonic,
    /// The lease as it was read last, and when it was first read in this state.
    lease: Option<(Observed, Monotonic)>,
    is_missing: bool,
}

impl Leader {
    pub(crate) fn new(heartbeat: Duration) -> Self {
        Self { silence: heartbeat.saturating_mul(3), last_hint_at: Monotonic::now(), lease: None, is_missing: false }
    }

    /// Notes a hint of the recruiter.
    pub(crate) fn note_hint(&mut self) {
        self.last_hint_at = Monotonic::now();
        self.note(false);
    }

    /// Reads the lease if no hint has arrived for `silence`. A recruiter whose hints are lost still renews its lease.
    pub(crate) async fn check(&mut self, store: &Store) {
        if self.last_hint_at.elapsed() < self.silence {
            return;
        }
        match store.observe_lease().await {
            Ok(lease) => {
                let is_held = self.is_held(lease, Monotonic::now());
                self.note(!is_held);
            }
            Err(error) => tracing::debug!(error = chain(&error), "failed to read the recruiter's lease"),
        }
    }

    fn is_held(&mut self, lease: Option<Observed>, now: Monotonic) -> bool {
        let Some(lease) = lease.filter(|lease| !lease.released) else { return false };
        match &self.lease {
            Some((known, since)) if *known == lease => now < *since + STALE_AFTER.max(known.duration()),
            _ => {
                self.lease = Some((lease, now));
                true
            }
        }
    }

    fn note(&mut self, is_missing: bool) {
        match (std::mem::replace(&mut self.is_missing, is_missing), is_missing) {
            (false, true) => tracing::warn!("no recruiter leads, so no jobs are assigned: check whether `recruiter run` is running"),
            (true, false) => tracing::info!("a recruiter leads again"),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use recruiter_common::ids::LeaseTerm;

    use super::*;

    #[test]
    fn a_lease_is_held_while_it_is_renewed() {
        let mut leader = Leader::new(Duration::from_secs(5));
        let start = Monotonic::now();
        let mut check = |renewals: Option<i64>, released: bool, second: u64| {
            let lease = renewals.map(|renewals| Observed { term: LeaseTerm(1), renewals, released, ..Observed::default() });
            leader.is_held(lease, start + Duration::from_secs(second))
        };
        assert!(!check(None, false, 0), "no recruiter has led");
        assert!(check(Some(0), false, 0));
        assert!(check(Some(0), false, 59));
        assert!(!check(Some(0), false, 60), "it died");
        assert!(check(Some(1), false, 61), "it was frozen");
        assert!(!check(Some(1), true, 62), "it was stopped");
    }
}
