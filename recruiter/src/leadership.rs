//! Who leads: at most one recruiter assigns at a time.
//!
//! The lease is one document that its holder renews. A standby takes over when it has itself seen the same renewal for
//! the whole lease (the holder's, which its document tells, or its own if that is longer), on its own monotonic clock, or at once
//! when the holder released it. The holder trusts a renewal for two thirds of the lease, counted from before it was asked for and
//! including the time that its machine sleeps, so that it has stopped assigning before another recruiter begins. (The trust window
//! is River's.) Wall clocks are never compared. When the argument fails all the same (a frozen
//! process, continued in the middle of a round), the new leader's term stands in the roster and the old one's rounds
//! match nobody; and whatever is assigned twice is still started once.

use std::time::{Duration, Instant as Monotonic};

use recruiter_common::{
    clock::Uptime,
    ids::LeaseTerm,
    service::Watchdog,
    shutdown::{Shutdown, Wake},
    store::{Lease, Observed, Store, StoreError},
    telemetry::chain,
};

/// A held lease and how long it may be trusted.
#[derive(Debug)]
pub(crate) struct Leadership {
    lease: Lease,
    duration: Duration,
    renewed: Uptime,
}

impl Leadership {
    /// Waits until this process leads; nothing when it was asked to stop first.
    pub(crate) async fn acquire(
        store: &Store,
        duration: Duration,
        holder_at: &str,
        watchdog: &Watchdog,
        shutdown: &mut Shutdown,
    ) -> Option<Self> {
        let mut seen: Option<(Option<Observed>, Monotonic)> = None;
        let mut told = false;
        while !shutdown.is_requested() {
            watchdog.progress();
            let asked = Uptime::now();
            match try_acquire(store, duration, holder_at, &mut seen).await {
                Ok(Some(lease)) => return Some(Self { lease, duration, renewed: asked }),
                Ok(None) if !told => {
                    told = true;
                    let leader = seen.as_ref().and_then(|(lease, _)| Some(lease.as_ref()?.holder_at.clone())).unwrap_or_default();
                    tracing::info!(leader, "standing by: another recruiter leads");
                    recruiter_common::service::ready("standing by");
                }
                Ok(None) => {}
                Err(error) => {
                    // What was not seen without a gap proves nothing.
                    seen = None;
                    tracing::warn!(error = chain(&error), "the lease cannot be read; trying again");
                }
            }
            if shutdown.sleep((duration / 30).min(watchdog.next_in())).await == Wake::Stop {
                break;
            }
        }
        None
    }

    pub(crate) fn term(&self) -> LeaseTerm {
        self.lease.term
    }

    /// Whether assigning is still this process's business.
    pub(crate) fn is_trusted(&self) -> bool {
        Uptime::now().since(self.renewed) < self.duration / 3 * 2
    }

    /// When to renew next.
    pub(crate) fn renew_in(&self) -> Duration {
        (self.duration / 3).saturating_sub(Uptime::now().since(self.renewed))
    }

    /// Renews; false when another leads by now.
    pub(crate) async fn renew(&mut self, store: &Store) -> Result<bool, StoreError> {
        let asked = Uptime::now();
        let held = store.renew_if_held(&self.lease).await?;
        if held {
            self.renewed = asked;
        }
        Ok(held)
    }

    /// Gives the lease up, so that a standby takes over at once.
    pub(crate) async fn release(self, store: &Store) {
        if let Err(error) = store.release_if_held(&self.lease).await {
            tracing::warn!(error = chain(&error), "the lease could not be released; it will run out");
        }
    }
}

async fn try_acquire(
    store: &Store,
    duration: Duration,
    holder_at: &str,
    seen: &mut Option<(Option<Observed>, Monotonic)>,
) -> Result<Option<Lease>, StoreError> {
    let now = store.observe_lease().await?;
    let since = match seen {
        Some((before, since)) if *before == now => *since,
        _ => Monotonic::now(),
    };
    // The holder renews by its own length of a lease, which may be longer than ours.
    let silent = |lease: &Observed| since.elapsed() >= duration.max(lease.duration());
    let free = now.as_ref().is_none_or(|lease| lease.released || silent(lease));
    *seen = Some((now.clone(), since));
    if free { store.acquire_if_unchanged(now.as_ref(), holder_at, duration).await } else { Ok(None) }
}
