//! What a process knows of the backlog caps: the settings, and the room that its counts have granted. Pure.
//!
//! A backlog is the waiting jobs of a group, under the name `@mail`, or of a gate, under its text.

use crate::{job::resources_in, mongo::Store};
use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant as Monotonic},
};

/// How long the settings are cached, and how long a count grants room.
const FRESH: Duration = Duration::from_secs(1);
/// A count grants this fraction of the free room.
const PART: u64 = 16;
/// With more backlogs than this, those whose counts are too old are dropped.
const ROOMS: usize = 10_000;
/// How long a backlog counts as full after a count.
const FULL_FOR: Duration = Duration::from_millis(50);

/// All caps, as this process knows them.
#[derive(Debug, Default)]
pub(crate) struct Caps(Mutex<Known>);

#[derive(Debug, Default)]
pub(crate) struct Known {
    pub(crate) read_at: Option<Monotonic>,
    /// The caps of groups, and of limits: a limit without a cap is here as well, because it hides those with a shorter name.
    pub(crate) caps: HashMap<String, Option<u64>>,
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
    /// The cap of the jobs with this gate: the lowest of its resources, with its name or prefix.
    pub(crate) fn of_gate(&self, gate: &str) -> Option<(&str, u64)> {
        let of_resource = |resource: &str| {
            let prefix = |name: &str| name.strip_suffix('*').is_some_and(|prefix| resource.starts_with(prefix));
            let caps = self.caps.iter().filter(|(name, _)| *name == resource || prefix(name));
            // The name itself, or the longest prefix.
            caps.max_by_key(|(name, _)| (*name == resource, name.len()))
        };
        resources_in(gate).filter_map(of_resource).filter_map(|(name, cap)| Some((name.as_str(), (*cap)?))).min_by_key(|(_, cap)| *cap)
    }

    /// Takes room for these jobs that an earlier count has granted. `None`: a new count is needed.
    pub(crate) fn take(&mut self, backlog: &str, jobs: u64, now: Monotonic) -> Option<bool> {
        let room = self.rooms.get_mut(backlog).filter(|room| now < room.until)?;
        if room.left >= jobs {
            room.left -= jobs;
            return Some(true);
        }
        room.is_full.then_some(false)
    }

    /// Notes a count. Returns whether the jobs may be enqueued.
    pub(crate) fn note(&mut self, backlog: &str, jobs: u64, free: u64, now: Monotonic) -> bool {
        let fits = jobs <= free;
        let left = if fits { (free / PART).max(jobs) - jobs } else { 0 };
        let is_full = free == 0;
        let until = now + if is_full { FULL_FOR } else { FRESH };
        if self.rooms.len() >= ROOMS {
            self.rooms.retain(|_, room| now < room.until);
        }
        self.rooms.insert(backlog.to_owned(), Room { left, is_full, until });
        fits
    }
}

impl Store {
    /// The settings of groups and limits that limit how many jobs wait.
    pub(crate) fn caps(&self) -> &Caps {
        self.part()
    }
}

impl Caps {
    pub(crate) fn known(&self) -> std::sync::MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this caller must read the settings. The others use the old ones meanwhile.
    pub(crate) fn must_read(&self, now: Monotonic) -> bool {
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

    pub(crate) fn set(&self, caps: HashMap<String, Option<u64>>, now: Monotonic) {
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
    fn the_lowest_cap_of_the_resources_of_a_gate_counts() {
        let caps = [
            ("customer:*", Some(5)),
            ("customer:7", Some(9)),
            ("customer:8", None),
            ("cust*", Some(1)),
            ("printer", Some(7)),
            ("@mail", Some(2)),
        ];
        let known = Known { caps: caps.map(|(name, cap)| (name.to_owned(), cap)).into(), ..Known::default() };
        assert_eq!(known.of_gate("customer:1"), Some(("customer:*", 5)));
        assert_eq!(known.of_gate("customer:7"), Some(("customer:7", 9)));
        assert_eq!(known.of_gate("customer:8"), None, "its own limit has no cap");
        assert_eq!(known.of_gate("customer:7,printer,scanner"), Some(("printer", 7)));
        assert_eq!((known.of_gate("scanner"), known.of_gate(">order-7")), (None, None));
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
