//! Lanes that have jobs and no window yet.
//!
//! Each customer may have a gate of their own, and so a hundred thousand of them a hundred thousand lanes, while each round starts some tens
//! of jobs. A round must not examine all of them. So there are only as many windows as the next rounds need. The other lanes that a full scan
//! has listed sleep here. Each round examines the next ones in turn, and wakes those whose jobs may start now.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
};

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
    /// No lane of its group and class may start a job.
    Closed,
    /// No more lanes of its group and class are wanted in this round. Later, this one is the next.
    Enough,
}

type Class = (String, String);

/// Listed lanes without a window, by group and class.
#[derive(Clone, Debug, Default)]
pub(super) struct Asleep {
    classes: BTreeMap<Class, Turns>,
    /// The class that was looked at last.
    last: Option<Class>,
}

/// The sleeping lanes of one group and class.
#[derive(Clone, Debug, Default)]
struct Turns {
    lanes: BTreeSet<Lane>,
    /// The lane that was looked at last. It survives full scans.
    last: Option<Lane>,
    /// Number of lanes that were not looked at since they came here, at most.
    unseen: usize,
}

impl Asleep {
    pub(super) fn insert(&mut self, lane: Lane) {
        let turns = self.classes.entry(class_of(&lane)).or_default();
        turns.unseen += usize::from(turns.lanes.insert(lane));
    }

    pub(super) fn remove(&mut self, lane: &Lane) -> bool {
        self.classes.get_mut(&class_of(lane)).is_some_and(|turns| turns.lanes.remove(lane))
    }

    #[cfg(test)]
    pub(super) fn contains(&self, lane: &Lane) -> bool {
        self.classes.get(&class_of(lane)).is_some_and(|turns| turns.lanes.contains(lane))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.classes.values().all(|turns| turns.lanes.is_empty())
    }

    /// Takes the lanes out for which this is false. Whose turn it is stays known until the next call.
    pub(super) fn retain(&mut self, stays: impl Fn(&Lane) -> bool) -> BTreeSet<Lane> {
        let mut removed = BTreeSet::new();
        self.classes.retain(|_, turns| !turns.lanes.is_empty());
        for turns in self.classes.values_mut() {
            let (kept, out): (_, BTreeSet<Lane>) = std::mem::take(&mut turns.lanes).into_iter().partition(&stays);
            turns.unseen = kept.len();
            turns.lanes = kept;
            removed.extend(out);
        }
        removed
    }

    /// Looks at the next lanes of each group and class, each at most once. Returns those that wake, and whether lanes are left that were never
    /// looked at and could have woken.
    pub(super) fn wake(&mut self, mut look: impl FnMut(&Lane) -> Look) -> (Vec<Lane>, bool) {
        let (mut woken, mut looks) = (Vec::new(), LOOKED_AT);
        for _ in 0..self.classes.len() {
            if looks == 0 {
                break;
            }
            let Some((class, turns)) = next_class(&mut self.classes, self.last.as_ref()) else { break };
            self.last = Some(class);
            for _ in 0..turns.lanes.len() {
                if looks == 0 {
                    return (woken, turns.unseen > 0);
                }
                looks -= 1;
                let Some(lane) = turns.next() else { break };
                match look(&lane) {
                    Look::Wake => {
                        turns.lanes.remove(&lane);
                        woken.push(lane.clone());
                    }
                    Look::Next => {}
                    Look::Closed => {
                        turns.unseen = 0;
                        break;
                    }
                    Look::Enough => break,
                }
                turns.last = Some(lane);
                turns.unseen = turns.unseen.saturating_sub(1);
            }
        }
        (woken, false)
    }
}

impl Turns {
    fn next(&self) -> Option<Lane> {
        let after = self.last.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        self.lanes.range((after, Bound::Unbounded)).next().or_else(|| self.lanes.first()).cloned()
    }
}

fn class_of(lane: &Lane) -> Class {
    (lane.group.clone(), lane.class.clone())
}

/// The class after this one, and the first one after the last.
fn next_class<'a>(classes: &'a mut BTreeMap<Class, Turns>, last: Option<&Class>) -> Option<(Class, &'a mut Turns)> {
    let after = last.map_or(Bound::Unbounded, Bound::Excluded);
    let next = classes.range((after, Bound::Unbounded)).next().or_else(|| classes.first_key_value())?.0.clone();
    let turns = classes.get_mut(&next)?;
    Some((next, turns))
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
        let all: Vec<Lane> = (0..LOOKED_AT * 2 + 1).map(|gate| lane("g", gate)).collect();
        let mut asleep = asleep(all.clone());
        let mut seen = Vec::new();
        for is_left in [true, true, false] {
            let before = seen.len();
            let woken = asleep.wake(|lane| {
                seen.push(lane.clone());
                Look::Next
            });
            assert_eq!((woken, seen.len() - before), ((vec![], is_left), LOOKED_AT));
            // A full scan lists them all again.
            if is_left {
                let unseen = asleep.classes.values().map(|turns| turns.unseen).sum::<usize>();
                asleep.retain(|_| false).into_iter().for_each(|lane| asleep.insert(lane));
                asleep.classes.values_mut().for_each(|turns| turns.unseen = unseen);
            }
        }
        assert_eq!(seen[..all.len()], all);
        assert_eq!(seen[all.len()], all[0], "after the end it goes on at the beginning");
        asleep.insert(lane("g", 0));
        asleep.insert(lane("g", 99_999));
        assert!(!asleep.wake(|_| Look::Next).1 && asleep.contains(&lane("g", 99_999)), "one was not seen, and then all were");
    }

    #[test]
    fn a_lane_that_wakes_is_no_longer_here_and_each_class_has_turns_of_its_own() {
        let mut asleep = asleep((0..5).flat_map(|gate| [lane("a", gate), lane("b", gate), lane("c", gate)]));
        let mut looked = |wake: &str, enough: &str| {
            let mut seen = Vec::new();
            let (woken, is_left) = asleep.wake(|found| {
                seen.push(found.clone());
                match found.group.as_str() {
                    "b" => Look::Closed,
                    _ if found.gate.as_deref() == Some(wake) => Look::Wake,
                    _ if found.gate.as_deref() == Some(enough) => Look::Enough,
                    _ => Look::Next,
                }
            });
            assert!(!is_left);
            (woken, seen.len())
        };
        assert_eq!(looked("00001", "00003"), (vec![lane("a", 1), lane("c", 1)], 4 + 1 + 4), "one of the group b");
        assert_eq!(looked("00003", "00004"), (vec![lane("a", 3), lane("c", 3)], 2 + 1 + 2), "they go on where there were enough");
        assert_eq!(looked("", "").1, 3 + 1 + 3);
        assert!(!asleep.contains(&lane("a", 3)) && asleep.contains(&lane("b", 3)) && !asleep.is_empty());
        assert_eq!(asleep.retain(|lane| lane.group == "b").len(), 6);
        assert!(asleep.remove(&lane("b", 4)) && !asleep.remove(&lane("b", 4)) && asleep.contains(&lane("b", 0)));
        assert_eq!(asleep.wake(|_| Look::Wake).0.len(), 4);
        assert!(asleep.is_empty() && asleep.wake(|_| Look::Wake).0.is_empty());
    }

    #[test]
    fn many_classes_take_turns_as_well() {
        let mut asleep = asleep((0..LOOKED_AT + 10).map(|group| lane(&format!("{group:05}"), 0)));
        let mut seen = BTreeSet::new();
        for _ in 0..2 {
            asleep.wake(|lane| {
                seen.insert(lane.clone());
                Look::Next
            });
        }
        assert_eq!(seen.len(), LOOKED_AT + 10);
    }
}
