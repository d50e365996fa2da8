//! Who is dead, and what follows.
//!
//! A worker is dead when this cleaner has itself seen its last heartbeat unchanged for the whole period, on its own
//! monotonic clock and over uninterrupted reads. `last_seen_at` is never compared with any clock: after a failover to a
//! member whose clock is ahead, an outage, or a laptop's sleep, that would kill the whole living fleet.

use std::{
    collections::HashMap,
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::WorkerId,
    instant::Instant,
    roster::{Place, RegisteredWorker},
    store::{Hint, Store, StoreError},
    telemetry::chain,
};

use crate::{liveness::is_gone, rescue::Rescuer};

/// What this cleaner has seen, and since when.
pub(crate) struct Observations {
    here: Place,
    last_seen: HashMap<WorkerId, (Option<Instant>, Monotonic)>,
}

/// How a worker died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Death {
    /// Its process on this machine is gone.
    Gone,
    /// Its heartbeat did not change for too long.
    Silent,
}

impl Observations {
    /// Forgets all: silence that was not watched without a gap proves nothing.
    pub(crate) fn clear(&mut self) {
        self.last_seen.clear();
    }

    pub(crate) fn new(here: Place) -> Self {
        Self { here, last_seen: HashMap::new() }
    }

    /// Who of these is dead. A worker that trusts itself for longer than `dead_after` is waited for as much longer.
    fn dead(&mut self, workers: &[RegisteredWorker], now: Monotonic, dead_after: Duration) -> Vec<(WorkerId, Option<Instant>, Death)> {
        let before = std::mem::take(&mut self.last_seen);
        let mut dead = Vec::new();
        for worker in workers {
            let since = match before.get(&worker.id) {
                Some((last_seen_at, since)) if *last_seen_at == worker.last_seen_at => *since,
                _ => now,
            };
            self.last_seen.insert(worker.id, (worker.last_seen_at, since));
            let lease = Duration::from_millis(u64::try_from(worker.lease_ms).unwrap_or(0));
            let silent = now.duration_since(since) >= dead_after.max(lease + lease / 2);
            if worker.place.as_ref().is_some_and(|there| is_gone(&self.here, there)) {
                dead.push((worker.id, worker.last_seen_at, Death::Gone));
            } else if silent {
                dead.push((worker.id, worker.last_seen_at, Death::Silent));
            }
        }
        dead
    }
}

/// One look at the roster: retires the dead and rescues their jobs. Goes on where another cleaner died.
pub(crate) async fn tick(
    store: &Store,
    rescuer: &mut Rescuer,
    observations: &mut Observations,
    dead_after: Duration,
) -> Result<(), StoreError> {
    let workers = store.registered_workers().await?;
    for (worker, last_seen_at, death) in observations.dead(&workers, Monotonic::now(), dead_after) {
        if let Some(retired) = store.retire_if_silent_since(worker, last_seen_at).await? {
            tracing::warn!(worker.id = %worker, ?death, "a worker is dead: retiring it");
            bury_or_leave(store, rescuer, &retired).await;
        }
    }
    for retired in workers.iter().filter(|worker| worker.retired) {
        bury_or_leave(store, rescuer, retired).await;
    }
    Ok(())
}

/// Buries a worker; one that cannot be buried now is met again at the next look, and stops no other.
async fn bury_or_leave(store: &Store, rescuer: &mut Rescuer, worker: &RegisteredWorker) {
    if let Err(error) = bury(store, rescuer, worker).await {
        tracing::warn!(worker.id = %worker.id, error = chain(&error), "the jobs of a dead worker could not be rescued yet; trying again");
    }
}

/// Rescues a retired worker's jobs, then deletes its document: last, so that another cleaner can go on.
async fn bury(store: &Store, rescuer: &mut Rescuer, worker: &RegisteredWorker) -> Result<(), StoreError> {
    if let Err(error) = store.kill_sessions(&worker.sessions).await {
        tracing::warn!(worker.id = %worker.id, error = chain(&error), "the sessions of a dead worker could not be ended; MongoDB does it within a minute");
    }
    rescuer.rescue_jobs_of(worker).await?;
    store.delete_if_retired(worker.id).await?;
    store.announce_hint(Hint::Left { worker: worker.id }).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEAD_AFTER: Duration = Duration::from_secs(30);

    fn worker(id: WorkerId, last_seen_at: i64, lease: u64) -> RegisteredWorker {
        RegisteredWorker {
            id,
            last_seen_at: Instant::from_timestamp_millis(last_seen_at),
            lease_ms: i64::try_from(lease * 1000).expect("small"),
            place: None,
            sessions: Vec::new(),
            jobs: Vec::new(),
            retired: false,
        }
    }

    /// Looks at heartbeats, each with the second it is seen at; says whether the last look found a death.
    fn check(lease: u64, looks: &[(u64, i64)]) -> bool {
        let mut observations = Observations::new(Place::of_this_process().expect("/proc"));
        let (id, begin) = (WorkerId::new(), Monotonic::now());
        let looks =
            looks.iter().map(|(at, seen)| observations.dead(&[worker(id, *seen, lease)], begin + Duration::from_secs(*at), DEAD_AFTER));
        looks.last().is_some_and(|dead| {
            dead == [(id, Instant::from_timestamp_millis(worker(id, 0, 0).last_seen_at.map_or(0, |_| 0)), Death::Silent)]
                || !dead.is_empty()
        })
    }

    #[test]
    fn silence_is_what_was_watched() {
        assert!(!check(20, &[(0, 1)]), "a first look proves nothing, however old the heartbeat");
        assert!(!check(20, &[(0, 1), (29, 1)]));
        assert!(check(20, &[(0, 1), (30, 1)]));
        assert!(!check(20, &[(0, 1), (29, 2), (58, 2)]), "any change is a sign of life");
        assert!(!check(20, &[(0, 9), (29, 1), (58, 1)]), "even one back in time");
        assert!(!check(60, &[(0, 1), (80, 1)]), "it trusts itself for a minute");
        assert!(check(60, &[(0, 1), (90, 1)]));
    }
}
