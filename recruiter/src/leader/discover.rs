//! Which lanes have jobs, for workers of some kinds. Only lanes that exist are searched, never every pair of a group and a class.
//!
//! Few pairs are searched without being listed. Else one walk over the index lists all lanes without a gate. Where the walk would take too
//! long, the lanes are listed group by group, in steps, so that one round never takes long. Lanes with a gate are always listed.

use std::{
    collections::{BTreeSet, HashSet},
    time::{Duration, Instant as Monotonic},
};

use futures_util::{StreamExt, TryStreamExt, stream};
use recruiter_common::{
    instant::Instant,
    roster::WorkOn,
    store::{Lane, StoreError},
};

use super::{
    database::Database,
    fleet::{Kind, KindId},
};

/// Up to so many lanes are searched without a listing, which would cost more.
const FEW: usize = 200;
/// The lanes of so few groups are listed group by group.
const FEW_GROUPS: usize = 20;
/// After a walk that took too long, no walk is tried for this long.
const TOO_LONG_FOR: Duration = Duration::from_secs(60);

/// With more classes the lanes of a group are not listed one by one.
const MANY_CLASSES: usize = 20;
/// Groups that are listed at the same time.
const AT_A_TIME: usize = 4;
/// How long one round lists lanes group by group. The next round goes on.
const STEP: Duration = Duration::from_millis(100);
/// Groups in one part of a step.
const GROUPS_AT_ONCE: usize = 16;

/// Which lanes exist, and how they are listed best.
#[derive(Clone, Debug, Default)]
pub(crate) struct Discovery {
    /// Until when the whole index is too long to walk.
    too_long_until: Option<Monotonic>,
    /// Groups that had jobs with a gate in the last full scan.
    gated: BTreeSet<String>,
    /// Groups whose lanes the present full scan has not listed yet.
    unlisted: BTreeSet<String>,
}

impl Discovery {
    /// Whether the present full scan goes on in the next round.
    pub(crate) fn is_behind(&self) -> bool {
        !self.unlisted.is_empty()
    }

    /// Whether the present full scan has this lane still before it.
    pub(crate) fn will_list(&self, lane: &Lane) -> bool {
        self.unlisted.contains(&lane.group)
    }

    /// Gives up the present full scan.
    pub(crate) fn forget(&mut self) {
        self.unlisted.clear();
    }

    /// The lanes that may have jobs which are due at `until` and that workers of these kinds take. With more jobs than one walk over the
    /// index can pass, these are the first of them, and [`list_some`](Self::list_some) returns the others.
    pub(crate) async fn lanes_of_all(
        &mut self,
        store: &impl Database,
        all: &[Kind],
        kinds: &[KindId],
        until: Instant,
    ) -> Result<Vec<Lane>, StoreError> {
        let kinds: Vec<&Kind> = kinds.iter().map(|kind| &all[*kind]).collect();
        let (mut groups, gated) = tokio::try_join!(groups_with_jobs(store, &kinds), store.gated_groups())?;
        groups.extend(serves(&kinds, gated.iter().cloned()));
        self.gated = gated;
        self.list(store, all, &kinds, groups, until).await
    }

    /// The same in these groups alone.
    pub(crate) async fn lanes_of_groups(
        &mut self,
        store: &impl Database,
        all: &[Kind],
        kinds: &[KindId],
        groups: &BTreeSet<String>,
        until: Instant,
    ) -> Result<Vec<Lane>, StoreError> {
        let kinds: Vec<&Kind> = kinds.iter().map(|kind| &all[*kind]).collect();
        let groups = serves(&kinds, groups.iter().cloned());
        self.list(store, all, &kinds, groups, until).await
    }

    async fn list(
        &mut self,
        store: &impl Database,
        all: &[Kind],
        kinds: &[&Kind],
        groups: BTreeSet<String>,
        until: Instant,
    ) -> Result<Vec<Lane>, StoreError> {
        let gated: BTreeSet<String> = groups.intersection(&self.gated).cloned().collect();
        if gated.len() <= FEW_GROUPS {
            let without_gate = if let Some(few) = every_pair(kinds, &groups) {
                Some(few)
            } else if groups.len() <= FEW_GROUPS {
                Some(lanes_without_gate(store, kinds, &groups).await?)
            } else {
                self.walk(store, until).await?.map(|lanes| lanes.filter(|lane| groups.contains(&lane.group)).collect())
            };
            if let Some(mut lanes) = without_gate {
                lanes.extend(lanes_with_gate(store, &gated).await?);
                lanes.retain(|lane| is_taken(kinds, lane));
                return Ok(lanes);
            }
        }
        self.unlisted.extend(groups);
        self.list_some(store, all).await
    }

    /// The lanes of the next groups of the present full scan, as many as can be listed in a short time: hints and free workers are not kept
    /// waiting by thousands of groups.
    pub(crate) async fn list_some(&mut self, store: &impl Database, kinds: &[Kind]) -> Result<Vec<Lane>, StoreError> {
        let (began, kinds) = (Monotonic::now(), kinds.iter().collect::<Vec<_>>());
        let mut lanes = Vec::new();
        while self.is_behind() && began.elapsed() < STEP {
            let groups = self.next_groups();
            lanes.extend(lanes_without_gate(store, &kinds, &groups).await?);
            lanes.extend(lanes_with_gate(store, groups.intersection(&self.gated)).await?);
            self.unlisted.retain(|group| !groups.contains(group));
        }
        lanes.retain(|lane| is_taken(&kinds, lane));
        Ok(lanes)
    }

    /// The next groups to be listed.
    fn next_groups(&self) -> BTreeSet<String> {
        self.unlisted.iter().take(GROUPS_AT_ONCE).cloned().collect()
    }

    /// Every lane without a gate that has jobs which are due at `until`; `None` when the walk takes too long.
    async fn walk(&mut self, store: &impl Database, until: Instant) -> Result<Option<impl Iterator<Item = Lane>>, StoreError> {
        if self.too_long_until.is_some_and(|until| Monotonic::now() < until) {
            return Ok(None);
        }
        match store.waiting_lanes().await {
            Ok(lanes) => Ok(Some(lanes.into_iter().filter(move |(_, first)| *first <= until).map(|(lane, _)| lane))),
            Err(error) if error.is_too_slow() => {
                self.too_long_until = Some(Monotonic::now() + TOO_LONG_FOR);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// The lanes without a gate in these groups. A group with very many classes has every lane that a worker may take.
async fn lanes_without_gate(store: &impl Database, kinds: &[&Kind], groups: &BTreeSet<String>) -> Result<Vec<Lane>, StoreError> {
    let of = |group: String| async move {
        let (lanes, is_all) = store.lanes_of(&group, MANY_CLASSES).await?;
        Ok(if is_all { lanes } else { pairs(kinds, &BTreeSet::from([group])).collect() })
    };
    let lanes: Vec<Vec<Lane>> = stream::iter(groups.iter().cloned()).map(of).buffer_unordered(AT_A_TIME).try_collect().await?;
    Ok(lanes.into_iter().flatten().collect())
}

async fn lanes_with_gate(store: &impl Database, groups: impl IntoIterator<Item = &String>) -> Result<Vec<Lane>, StoreError> {
    let groups: Vec<String> = groups.into_iter().cloned().collect();
    let of = |group: String| async move { store.gated_lanes_of(&group).await };
    let lanes: Vec<Vec<Lane>> = stream::iter(groups).map(of).buffer_unordered(AT_A_TIME).try_collect().await?;
    Ok(lanes.into_iter().flatten().collect())
}

fn is_taken(kinds: &[&Kind], lane: &Lane) -> bool {
    kinds.iter().any(|kind| kind.takes(lane))
}

/// The groups that workers of these kinds serve and that have waiting jobs: in each of the others a search would walk over
/// everything that lately left the index.
async fn groups_with_jobs(store: &impl Database, kinds: &[&Kind]) -> Result<BTreeSet<String>, StoreError> {
    let named = named_groups(kinds);
    if let Some(named) = named.filter(|named| named.len() <= 1) {
        return Ok(named.into_iter().map(str::to_owned).collect());
    }
    Ok(serves(kinds, store.groups().await?))
}

fn serves(kinds: &[&Kind], groups: impl IntoIterator<Item = String>) -> BTreeSet<String> {
    let named = named_groups(kinds);
    groups.into_iter().filter(|group| named.as_ref().is_none_or(|named| named.contains(group.as_str()))).collect()
}

/// The groups that these kinds name; nothing when one of them takes every group.
fn named_groups<'a>(kinds: &[&'a Kind]) -> Option<HashSet<&'a str>> {
    let mut named = HashSet::new();
    for kind in kinds {
        match &kind.work_on {
            WorkOn::All => return None,
            WorkOn::Groups(groups) => named.extend(groups.iter().map(String::as_str)),
        }
    }
    Some(named)
}

/// Every pair of these groups and the classes that are served there, if they are few.
fn every_pair(kinds: &[&Kind], groups: &BTreeSet<String>) -> Option<Vec<Lane>> {
    let mut lanes = HashSet::new();
    for lane in pairs(kinds, groups) {
        lanes.insert(lane);
        if lanes.len() > FEW {
            return None;
        }
    }
    Some(lanes.into_iter().collect())
}

/// The same, with repetitions.
fn pairs<'a>(kinds: &'a [&Kind], groups: &'a BTreeSet<String>) -> impl Iterator<Item = Lane> {
    kinds.iter().flat_map(|kind| {
        let served = groups.iter().filter(|group| kind.work_on.includes(group));
        served.flat_map(|group| kind.classes.iter().map(move |class| Lane::new(group, class)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leader::fleet::tests::{available, fleet};

    #[test]
    fn very_many_groups_are_listed_in_parts() {
        let lane = |group: &str| Lane::new(group, "c");
        let mut discovery = Discovery { unlisted: (10..60).map(|number| format!("group-{number}")).collect(), ..Discovery::default() };
        let first = discovery.next_groups();
        assert!(first.len() == GROUPS_AT_ONCE && first.contains("group-10") && !first.contains("group-59"));
        discovery.unlisted.retain(|group| !first.contains(group));
        assert!(discovery.is_behind() && discovery.will_list(&lane("group-59")) && !discovery.will_list(&lane("group-10")));
        discovery.forget();
        assert!(!discovery.is_behind() && !discovery.will_list(&lane("group-59")));
    }

    #[test]
    fn a_few_lanes_are_searched_without_being_listed() {
        let fleet = fleet(vec![available(&["a", "b"], &["x", "y"], 1), available(&["*"], &["z"], 1)]);
        let kinds: Vec<&Kind> = fleet.kinds().iter().collect();
        let groups = |names: &[&str]| names.iter().map(ToString::to_string).collect::<BTreeSet<_>>();
        let mut few = every_pair(&kinds, &groups(&["a", "c"])).unwrap();
        few.sort();
        let lanes = [("a", "x"), ("a", "y"), ("a", "z"), ("c", "z")];
        assert_eq!(few, lanes.map(|(group, class)| Lane::new(group, class)));
        let many: BTreeSet<String> = (0..=FEW).map(|n| format!("group-{n}")).collect();
        assert!(every_pair(&kinds, &many).is_none());
        assert_eq!(serves(&kinds[..1], groups(&["a", "c"])), groups(&["a"]));
        assert_eq!(serves(&kinds, groups(&["a", "c"])), groups(&["a", "c"]));
        assert_eq!((named_groups(&kinds[..1]).map(|named| named.len()), named_groups(&kinds)), (Some(2), None));
    }
}
