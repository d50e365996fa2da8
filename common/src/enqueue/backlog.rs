//! Backlog caps: how many jobs may wait in a group.
//!
//! The settings are cached for about a second, so most calls ask MongoDB
//! nothing. In a group with a cap, a count of the waiting jobs grants this process a part of the free room, which it uses without another
//! count. So the cap is approximate:
//!
//! - Of several processes, each uses at most a sixteenth of the room that it has counted (or what one call needs) before it counts again,
//!   for a second at most. Up to sixteen processes exceed the cap only by the jobs of calls that count at the same time.
//! - A new or lower cap takes effect within about a second.
//! - Retries, rescues and inserts of other programs are not limited.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant as Monotonic},
};

use super::EnqueueError;
use crate::{
    shutdown::pause,
    store::{Store, StoreError},
};

/// How long the settings are cached, and how long a count grants room.
const FRESH: Duration = Duration::from_secs(1);
/// A count grants this fraction of the free room.
const PART: u64 = 16;
/// How long a group counts as full after a count.
const FULL_FOR: Duration = Duration::from_millis(50);
/// Pauses between two attempts to enqueue in a full group: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// The caps of all groups, as this process knows them.
#[derive(Debug, Default)]
pub(crate) struct Caps(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    read_at: Option<Monotonic>,
    caps: HashMap<String, u64>,
    rooms: HashMap<String, Room>,
}

/// What a count has granted.
#[derive(Clone, Copy, Debug)]
struct Room {
    left: u64,
    /// Whether the count found no room.
    is_full: bool,
    until: Monotonic,
}

impl Known {
    /// Takes room for these jobs that an earlier count has granted. `None`: a new count is needed.
    fn take(&mut self, group: &str, jobs: u64, now: Monotonic) -> Option<bool> {
        let room = self.rooms.get_mut(group).filter(|room| now < room.until)?;
        if room.left >= jobs {
            room.left -= jobs;
            return Some(true);
        }
        room.is_full.then_some(false)
    }

    /// Notes a count. Returns whether the jobs may be enqueued.
    fn note(&mut self, group: &str, jobs: u64, free: u64, now: Monotonic) -> bool {
        let fits = jobs <= free;
        let left = if fits { (free / PART).max(jobs) - jobs } else { 0 };
        let is_full = free == 0;
        let until = now + if is_full { FULL_FOR } else { FRESH };
        self.rooms.insert(group.to_owned(), Room { left, is_full, until });
        fits
    }
}

impl Caps {
    fn known(&self) -> std::sync::MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this caller must read the settings. The others use the old ones meanwhile.
    fn must_read(&self, now: Monotonic) -> bool {
        let mut known = self.known();
        match known.read_at {
            Some(read_at) if now.duration_since(read_at) < FRESH => false,
            Some(_) => {
                known.read_at = Some(now);
                true
            }
            None => true,
        }
    }

    fn set(&self, caps: HashMap<String, u64>, now: Monotonic) {
        let mut known = self.known();
        if known.caps != caps {
            known.rooms.clear();
        }
        (known.caps, known.read_at) = (caps, Some(now));
    }

    /// The settings have changed: they are read again.
    pub(crate) fn forget(&self) {
        *self.known() = Known::default();
    }
}

impl Store {
    /// Checks that so many further jobs may wait in these groups.
    pub(crate) async fn admit(&self, jobs: &BTreeMap<String, u64>) -> Result<(), EnqueueError> {
        let now = Monotonic::now();
        if self.caps.must_read(now) {
            self.read_caps(now).await?;
        }
        for (group, jobs) in jobs {
            let Some(cap) = self.caps.known().caps.get(group).copied() else { continue };
            let taken = self.caps.known().take(group, *jobs, now);
            let fits = match taken {
                Some(fits) => fits,
                None => {
                    let free = cap.saturating_sub(self.waiting_in(group, cap + 1).await?);
                    self.caps.known().note(group, *jobs, free, Monotonic::now())
                }
            };
            if !fits {
                return Err(EnqueueError::BacklogFull { group: group.clone(), most_waiting: cap });
            }
        }
        Ok(())
    }

    async fn read_caps(&self, now: Monotonic) -> Result<(), StoreError> {
        match self.group_backlogs().await {
            Ok(settings) => {
                let caps = settings.into_iter().filter_map(|settings| Some((settings.group, settings.most_waiting?)));
                self.caps.set(caps.collect(), now);
                Ok(())
            }
            Err(error) => {
                // The next call reads them.
                self.caps.known().read_at = None;
                Err(error)
            }
        }
    }
}

/// The waits of a caller that waits for room.
pub(crate) struct Patience {
    until: Monotonic,
    pause: Duration,
}

impl Patience {
    pub(crate) fn new(timeout: Duration) -> Self {
        let now = Monotonic::now();
        // A timeout that is longer than the clock can express is as good as none.
        let until = now.checked_add(timeout).unwrap_or(now + Duration::from_secs(365 * 24 * 60 * 60));
        Self { until, pause: PAUSES.0 }
    }

    /// Waits before the next attempt. Returns false if the time is over.
    pub(crate) async fn wait(&mut self) -> bool {
        let left = self.until.saturating_duration_since(Monotonic::now());
        if left.is_zero() {
            return false;
        }
        // Callers that began together do not ask together.
        let jitter = rand::random_range(0.5..1.0);
        pause(self.pause.mul_f64(jitter).min(left)).await;
        self.pause = (self.pause * 2).min(PAUSES.1);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_grants_a_sixteenth_of_the_room() {
        let (mut known, now) = (Known::default(), Monotonic::now());
        assert_eq!(known.take("g", 1, now), None, "nothing is counted yet");
        assert!(known.note("g", 1, 160, now));
        assert_eq!(known.take("g", 9, now), Some(true));
        assert_eq!(known.take("other", 1, now), None);
        assert_eq!(known.take("g", 1, now + FRESH), None, "it is too old");
        assert_eq!(known.take("g", 1, now), None, "that count is used up");
    }

    #[test]
    fn a_full_group_is_counted_again_after_a_moment() {
        let (mut known, now) = (Known::default(), Monotonic::now());
        assert!(!known.note("g", 1, 0, now));
        assert_eq!(known.take("g", 1, now), Some(false));
        assert_eq!(known.take("g", 1, now + FULL_FOR), None);
        assert!(!known.note("g", 3, 2, now), "the jobs of one call are enqueued together");
        assert_eq!(known.take("g", 2, now), None, "smaller calls fit");
        assert!(known.note("g", 2, 2, now));
    }
}
