//! The lease: at most one recruiter leads at a time.
//!
//! The lease is one document that its holder renews.
//!
//! - A standby takes the lease over when it has observed the same renewal for the whole lease, measured on its own monotonic clock. The
//!   length is the holder's, which the document states, or the standby's own if that is longer. A released lease is taken over at once.
//! - The holder trusts a renewal for two thirds of the lease. The time counts from before the request and includes the time that the machine
//!   sleeps. The holder has therefore stopped assigning before a standby begins. (The trust window is River's.)
//! - Wall clocks are never compared.
//!
//! The argument fails when a process freezes in the middle of a round and continues later. Then the new leader's term is in the roster, and
//! the old leader's assignments match no worker. A job that is assigned twice is still started once.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    clock::Uptime,
    ids::LeaseTerm,
    service::Watchdog,
    shutdown::{Shutdown, Wake, pause},
    store::{Lease, Observed, Store, StoreError},
    telemetry::chain,
};

/// Between two attempts to renew.
const RETRY: Duration = Duration::from_millis(500);

/// A held lease and how long it may be trusted.
#[derive(Debug)]
pub(crate) struct Leadership {
    lease: Lease,
    duration: Duration,
    renewed: Mutex<Uptime>,
}

impl Leadership {
    /// Waits until this process leads; `None` if a stop is requested first.
    pub(crate) async fn acquire(
        store: &Store,
        duration: Duration,
        holder_at: &str,
        watchdog: &Watchdog,
        shutdown: &mut Shutdown,
    ) -> Option<Self> {
        let mut seen: Option<(Option<Observed>, Monotonic)> = None;
        let mut is_logged = false;
        while !shutdown.is_requested() {
            watchdog.progress();
            let asked = Uptime::now();
            match try_acquire(store, duration, holder_at, &mut seen).await {
                Ok(Some(lease)) => return Some(Self { lease, duration, renewed: Mutex::new(asked) }),
                Ok(None) if !is_logged => {
                    is_logged = true;
                    let leader = seen.as_ref().and_then(|(lease, _)| Some(lease.as_ref()?.holder_at.clone())).unwrap_or_default();
                    tracing::info!(leader, "standing by: another recruiter leads");
                    recruiter_common::service::ready("standing by");
                }
                Ok(None) => {}
                Err(error) => {
                    // An observation with a gap proves nothing.
                    seen = None;
                    tracing::warn!(error = chain(&error), "cannot read the lease; retrying");
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

    /// Whether this process may still assign.
    pub(crate) fn is_trusted(&self) -> bool {
        self.age() < self.duration / 3 * 2
    }

    /// Time since the last renewal.
    fn age(&self) -> Duration {
        Uptime::now().since(*self.renewed.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Renews the lease three times in its length, until another recruiter leads. A renewal without a reply is repeated.
    ///
    /// This runs beside the duties, so that a long round does not cost the lease. Each renewal stamps the term on the roster again: a worker
    /// whose stamp was lost, to a failover or to an edit by hand, gets jobs again soon.
    pub(crate) async fn keep(&self, store: &Store) {
        loop {
            pause((self.duration / 3).saturating_sub(self.age())).await;
            match self.renew(store).await {
                Ok(true) => {
                    if let Err(error) = store.stamp_term(self.term()).await {
                        tracing::debug!(error = chain(&error), "cannot stamp the term on the roster; retrying with the next renewal");
                    }
                }
                Ok(false) => {
                    tracing::warn!(lease.term = self.term().0, "another recruiter leads; standing by");
                    return;
                }
                Err(error) => {
                    tracing::warn!(error = chain(&error), trusted = self.is_trusted(), "cannot renew the lease; retrying");
                    pause(RETRY).await;
                }
            }
        }
    }

    /// Renews; false when another recruiter leads.
    async fn renew(&self, store: &Store) -> Result<bool, StoreError> {
        let asked = Uptime::now();
        let held = store.renew_if_held(&self.lease).await?;
        if held {
            *self.renewed.lock().unwrap_or_else(PoisonError::into_inner) = asked;
        }
        Ok(held)
    }

    /// Releases the lease, so that a standby takes over at once.
    pub(crate) async fn release(self, store: &Store) {
        if let Err(error) = store.release_if_held(&self.lease).await {
            tracing::warn!(error = chain(&error), "cannot release the lease; a standby takes over when it expires");
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
    // The holder renews at its own interval, and its lease may be longer than ours.
    let silent = |lease: &Observed| since.elapsed() >= duration.max(lease.duration());
    let free = now.as_ref().is_none_or(|lease| lease.released || silent(lease));
    *seen = Some((now.clone(), since));
    if free { store.acquire_if_unchanged(now.as_ref(), holder_at, duration).await } else { Ok(None) }
}
