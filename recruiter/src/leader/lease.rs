//! The recruiter's lease: one document that the leader renews. At most one recruiter assigns at a time.
//!
//! - A standby takes over when it has observed the same renewal for the whole length of the lease, measured by its own monotonic clock. The
//!   length is that of the holder, which the document contains, or that of the standby if it is longer. A gap between two looks counts for
//!   at most a third of it: a leader that stalled with the standby gets the time to renew. A standby takes over a released lease at once.
//! - The holder trusts a renewal for two thirds of the lease. The time counts from before the request and includes the time for which the
//!   machine sleeps. Therefore the holder begins no round after a standby has taken over. (River has the same trust window.)
//! - Wall clocks are never compared.
//!
//! If a process freezes in the middle of a round, it can assign after another recruiter has taken over. The new leader has then written its
//! term into the roster, so the assignments of the old leader match no worker. A job that is assigned twice is still started once.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    clock::Uptime,
    ids::LeaseTerm,
    service::Watchdog,
    shutdown::{Shutdown, Wake, pause},
    store::{LeaderLease, Observed, Store, StoreError},
    telemetry::chain,
};
use tokio::sync::Notify;

/// Pause after a failed renewal.
const RETRY: Duration = Duration::from_millis(500);

/// A held lease, and when it was renewed.
#[derive(Debug)]
pub(crate) struct Leadership {
    lease: LeaderLease,
    duration: Duration,
    /// When the last successful renewal was sent.
    renewed: Mutex<Uptime>,
    /// Tells [`keep`](Self::keep) that the term is over.
    given_up: Notify,
}

impl Leadership {
    /// Waits until this process leads. Returns `None` if a stop is requested first.
    pub(crate) async fn acquire(
        store: &Store,
        duration: Duration,
        holder_at: &str,
        watchdog: &Watchdog,
        shutdown: &mut Shutdown,
    ) -> Option<Self> {
        let mut seen: Option<Seen> = None;
        let mut is_logged = false;
        while !shutdown.is_requested() {
            watchdog.progress();
            let asked = Uptime::now();
            match try_acquire(store, duration, holder_at, &mut seen).await {
                Ok(Some(lease)) => return Some(Self { lease, duration, renewed: Mutex::new(asked), given_up: Notify::new() }),
                Ok(None) if !is_logged => {
                    is_logged = true;
                    let leader = seen.as_ref().and_then(|seen| Some(seen.lease.as_ref()?.holder_at.clone())).unwrap_or_default();
                    tracing::info!(leader, "standing by: another recruiter leads");
                    recruiter_common::service::ready("standing by");
                }
                Ok(None) => {}
                Err(error) => {
                    // The observation has a gap: it starts again.
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

    /// Time since the last successful renewal was sent.
    fn age(&self) -> Duration {
        Uptime::now().since(*self.renewed.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Ends the term, because a later one was found: of another recruiter, or written by hand. The next term is later still.
    pub(crate) fn give_up(&self) {
        self.given_up.notify_one();
    }

    /// Renews the lease three times within its length, until another recruiter leads or the term is given up. Returns whether the lease may
    /// still be held. A failed renewal is repeated.
    ///
    /// This runs at the same time as the rounds, so that the lease does not expire during a long round. After each renewal the term is
    /// written into the roster again. If a worker's document has lost the term, by a failover or an edit by hand, the worker gets jobs
    /// again soon.
    pub(crate) async fn keep(&self, store: &Store) -> bool {
        loop {
            tokio::select! {
                () = pause((self.duration / 3).saturating_sub(self.age())) => {}
                () = self.given_up.notified() => {
                    tracing::warn!(lease.term = self.term().0, "a later term is in `metadata`; this one is over");
                    return true;
                }
            }
            match self.renew(store).await {
                Ok(true) => {
                    if let Err(error) = store.stamp_term(self.term()).await {
                        tracing::debug!(error = chain(&error), "cannot write the term into the roster; retrying after the next renewal");
                    }
                }
                Ok(false) => {
                    tracing::warn!(lease.term = self.term().0, "another recruiter leads; standing by");
                    return false;
                }
                Err(error) => {
                    tracing::warn!(error = chain(&error), trusted = self.is_trusted(), "cannot renew the lease; retrying");
                    pause(RETRY).await;
                }
            }
        }
    }

    /// Renews the lease. Returns false if another recruiter leads.
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

/// The lease as a standby has read it last.
struct Seen {
    lease: Option<Observed>,
    at: Monotonic,
    /// For how long it has been the same.
    silence: Duration,
}

impl Seen {
    /// Notes what was read. Returns for how long it has been the same.
    fn note(seen: &mut Option<Self>, lease: Option<Observed>, at: Monotonic, length: Duration) -> Duration {
        let unchanged = seen.take().filter(|before| before.lease == lease);
        // After a longer gap this process stalled, and perhaps the holder too.
        let silence = unchanged.map_or(Duration::ZERO, |before| before.silence + at.duration_since(before.at).min(length / 3));
        *seen = Some(Self { lease, at, silence });
        silence
    }
}

async fn try_acquire(
    store: &Store,
    duration: Duration,
    holder_at: &str,
    seen: &mut Option<Seen>,
) -> Result<Option<LeaderLease>, StoreError> {
    let now = store.observe_lease().await?;
    // The holder may have a longer lease than this process.
    let length = now.as_ref().map_or(duration, |lease| duration.max(lease.duration()));
    let silence = Seen::note(seen, now.clone(), Monotonic::now(), length);
    let free = now.as_ref().is_none_or(|lease| lease.released || silence >= length);
    if free { store.acquire_if_unchanged(now.as_ref(), holder_at, duration).await } else { Ok(None) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_in_what_a_standby_sees_is_at_most_a_third_of_the_silence() {
        let (begin, mut seen) = (Monotonic::now(), None);
        let mut note = |second, renewals| {
            let lease = Some(Observed { renewals, ..Observed::default() });
            Seen::note(&mut seen, lease, begin + Duration::from_secs(second), Duration::from_secs(9)).as_secs()
        };
        assert_eq!([0, 20, 21, 30, 33].map(|second| note(second, 0)), [0, 3, 4, 7, 10]);
        assert_eq!(note(34, 1), 0, "it is renewed");
    }
}
