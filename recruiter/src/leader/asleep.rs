//! Lanes that have jobs and no window yet.
//!
//! Each customer may have a gate of their own, and so a hundred thousand of them a hundred thousand lanes, while each round starts some tens
//! of jobs. A round must not look at all of them. So there are only as many windows as the next rounds need. The other lanes that a full scan
//! has listed sleep here. Each round looks at the next ones in turn, and wakes those whose jobs may start now.

use std::{collections::BTreeSet, ops::Bound};

use recruiter_common::store::Lane;

/// Maximum number of lanes that one round looks at.
const LOOKED_AT: usize = 1_000;

/// What to do with a lane that was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// It gets a window.
    Wake,
    /// It sleeps on.
    Next,
    /// All lanes of its group and class sleep on.
    NextClass,
}

/// Listed lanes without a window, and which of them is next.
#[derive(Clone, Debug, Default)]
pub(super) struct Asleep {
    lanes: BTreeSet<Lane>,
    /// The lane that was looked at last.
    last: Option<Lane>,
    /// Number of lanes that were not looked at since they came here, at most.
    unseen: usize,
}

impl Asleep {
    pub(super) fn insert(&mut self, lane: Lane) {
        self.unseen += usize::from(self.lanes.insert(lane));
    }

    #[cfg(test)]
    pub(super) fn contains(&self, lane: &Lane) -> bool {
        self.lanes.contains(lane)
    }

    pub(super) fn remove(&mut self, lane: &Lane) -> bool {
        self.lanes.remove(lane)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// Whether some lanes were not looked at since they came here.
    pub(super) fn has_unseen(&self) -> bool {
        self.unseen > 0
    }

    /// Takes the lanes out for which this is false.
    pub(super) fn retain(&mut self, stays: impl FnMut(&Lane) -> bool) -> BTreeSet<Lane> {
        let removed;
        (self.lanes, removed) = std::mem::take(&mut self.lanes).into_iter().partition(stays);
        self.unseen = self.lanes.len();
        removed
    }

    /// Looks at the next lanes, each at most once, and returns those that wake.
    pub(super) fn wake(&mut self, mut look: impl FnMut(&Lane) -> Look) -> Vec<Lane> {
        let (mut woken, mut left) = (Vec::new(), self.lanes.len());
        for _ in 0..LOOKED_AT {
            let Some(lane) = self.next().filter(|_| left > 0) else { break };
            let mut seen = 1;
            match look(&lane) {
                Look::Wake => {
                    self.lanes.remove(&lane);
                    woken.push(lane.clone());
                    self.last = Some(lane);
                }
                Look::Next => self.last = Some(lane),
                Look::NextClass => {
                    let end = after_class(&lane);
                    seen = self.lanes.range(&lane..&end).count();
                    self.last = Some(end);
                }
            }
            left = left.saturating_sub(seen);
            self.unseen = self.unseen.saturating_sub(seen);
        }
        if left == 0 {
            self.unseen = 0;
        }
        woken
    }

    /// The lane after the last one, from the beginning after the end.
    fn next(&self) -> Option<Lane> {
        let after = self.last.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        self.lanes.range((after, Bound::Unbounded)).next().or_else(|| self.lanes.first()).cloned()
    }
}

/// Comes after all lanes of this group and class, and before all others.
fn after_class(lane: &Lane) -> Lane {
    Lane::new(&lane.group, format!("{}\0", lane.class))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(group: &str, gate: usize) -> Lane {
        Lane { gate: Some(format!("{gate:05}")), ..Lane::new(group, "c") }
    }

    fn asleep(lanes: impl IntoIterator<Item = Lane>) -> Asleep {
        let mut asleep = Asleep::default();
        lanes.into_iter().for_each(|lane| asleep.insert(lane));
        asleep
    }

    #[test]
    fn each_lane_has_its_turn() {
        let mut asleep = asleep((0..LOOKED_AT * 2 + 1).map(|gate| lane("g", gate)));
        let mut seen = Vec::new();
        for has_unseen in [true, true, false] {
            assert!(asleep.has_unseen());
            let before = seen.len();
            assert!(
                asleep
                    .wake(|lane| {
                        seen.push(lane.clone());
                        Look::Next
                    })
                    .is_empty()
            );
            assert_eq!((asleep.has_unseen(), seen.len() - before), (has_unseen, LOOKED_AT));
        }
        let all: BTreeSet<&Lane> = seen.iter().collect();
        assert_eq!(all.len(), LOOKED_AT * 2 + 1);
        assert_eq!(seen[LOOKED_AT * 2 + 1], lane("g", 0), "after the end it goes on at the beginning");
        asleep.insert(lane("g", 0));
        assert!(!asleep.has_unseen(), "it was here");
        asleep.insert(lane("h", 0));
        assert!(asleep.has_unseen());
    }

    #[test]
    fn a_lane_that_wakes_is_no_longer_here_and_a_class_can_be_left_out() {
        let mut asleep = asleep((0..5).flat_map(|gate| [lane("a", gate), lane("b", gate), lane("b2", gate)]));
        let mut seen = Vec::new();
        let woken = asleep.wake(|found| {
            seen.push(found.clone());
            match found.group.as_str() {
                "b" => Look::NextClass,
                _ if found.gate.as_deref() == Some("00003") => Look::Wake,
                _ => Look::Next,
            }
        });
        assert_eq!(woken, [lane("a", 3), lane("b2", 3)]);
        assert_eq!(seen.len(), 11, "one of the group b: {seen:?}");
        assert!(!asleep.has_unseen() && !asleep.contains(&lane("a", 3)) && asleep.contains(&lane("b", 3)));
        assert_eq!(asleep.retain(|lane| lane.group == "b").len(), 8);
        assert!(asleep.remove(&lane("b", 4)) && !asleep.remove(&lane("b", 4)) && asleep.contains(&lane("b", 0)));
        asleep.insert(lane("a", 0));
        assert_eq!(asleep.wake(|_| Look::Wake).len(), 5);
        assert!(asleep.wake(|_| Look::Wake).is_empty() && asleep.next().is_none());
    }
}
