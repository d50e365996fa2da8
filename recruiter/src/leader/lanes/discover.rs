//! Finds the lanes that have jobs, for workers of some kinds.
//!
//! If there are few pairs of a group with jobs and a class, each pair is searched as a lane, without a list. Otherwise the lanes that have
//! jobs are listed: group by group if there are few groups, else by one walk over the index. If the walk takes too long, the lanes are
//! listed group by group in steps, so that no round takes long. Lanes with a gate are always listed.

use std::{
    collections::{BTreeSet, HashSet},
    ops::Bound,
    time::{Duration, Instant as Monotonic},
};

use futures_util::{StreamExt, TryStreamExt, stream};
use recruiter_common::{
    instant::Instant,
    store::{Lane, StoreError, WorkOn},
};

use crate::leader::{database::Database, fleet::Kind};

/// Pause after a walk that took too long. In this time there is no other walk.
const NO_WALK_FOR: Duration = Duration::from_secs(60);
/// Number of groups that are listed at the same time.
const AT_A_TIME: usize = 4;

/// When lanes are listed, and in which steps. Less in a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Maximum number of pairs of a group and a class that are searched without a list, which would cost more.
    pub(crate) pairs: usize,
    /// Maximum number of groups whose lanes are listed group by group in one round.
    pub(crate) groups: usize,
    /// Maximum number of lanes without a gate that are listed in one group. In a group with more, every class of a worker counts as a lane.
    pub(crate) classes: usize,
    /// Number of groups in one part of a step.
    pub(crate) groups_at_once: usize,
    /// Time for which one round lists lanes group by group. The next round continues.
    pub(crate) step: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { pairs: 200, groups: 20, classes: 20, groups_at_once: 16, step: Duration::from_millis(100) }
    }
}

/// The state of listing lanes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Discovery {
    pub(crate) bounds: Bounds,
    /// After a walk that took too long: there is no other walk before this instant.
    no_walk_before: Option<Monotonic>,
    /// Groups that had jobs with a gate in the last full scan.
    gated: BTreeSet<String>,
    /// Groups whose lanes the current full scan has not listed yet.
    unlisted: BTreeSet<String>,
    /// Groups with news whose lanes are listed in steps beside those of the full scan. So news of many groups do not keep it from ending.
    news: BTreeSet<String>,
    /// The last group with news that was listed. The groups after it come next.
    last_of_news: Option<String>,
}

impl Discovery {
    /// Whether the current full scan has lanes left to list.
    pub(crate) fn is_scanning(&self) -> bool {
        !self.unlisted.is_empty()
    }

    /// Whether lanes are left to list.
    pub(crate) fn is_incomplete(&self) -> bool {
        self.is_scanning() || !self.news.is_empty()
    }

    /// Whether the current full scan will list the group of this lane in a later round.
    pub(crate) fn will_list(&self, lane: &Lane) -> bool {
        self.unlisted.contains(&lane.group)
    }

    /// Ends the current full scan before it is complete.
    pub(crate) fn forget(&mut self) {
        self.unlisted.clear();
        self.news.clear();
    }

    /// Removes the groups with news, because a full scan covers them.
    pub(crate) fn take_news(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.news)
    }

    /// The lanes that may have jobs which are due at `until`, and that workers of these kinds take. If they are listed in steps, returns
    /// those of the first groups. [`list_some`](Self::list_some) then returns the others, for `all` kinds.
    pub(crate) async fn lanes_of_all(
        &mut self,
        store: &impl Database,
        all: &[&Kind],
        kinds: &[&Kind],
        until: Instant,
    ) -> Result<Vec<Lane>, StoreError> {
        let (mut groups, gated) = tokio::try_join!(groups_with_jobs(store, kinds), store.gated_groups())?;
        groups.extend(taken_groups(kinds, gated.iter().cloned()));
        self.gated = gated;
        match self.list(store, kinds, &groups, until).await? {
            Some(lanes) => Ok(lanes),
            None => {
                self.unlisted.extend(groups);
                self.list_some(store, all).await
            }
        }
    }

    /// Like [`lanes_of_all`](Self::lanes_of_all), for all kinds, in these groups only.
    pub(crate) async fn lanes_of_groups(
        &mut self,
        store: &impl Database,
        all: &[&Kind],
        groups: BTreeSet<String>,
        until: Instant,
    ) -> Result<Vec<Lane>, StoreError> {
        let groups = taken_groups(all, groups);
        match self.list(store, all, &groups, until).await? {
            Some(lanes) => Ok(lanes),
            None => {
                self.news.extend(groups.difference(&self.unlisted).cloned());
                self.list_some(store, all).await
            }
        }
    }

    /// The lanes of these groups. `None` if they must be listed in steps.
    async fn list(
        &mut self,
        store: &impl Database,
        kinds: &[&Kind],
        groups: &BTreeSet<String>,
        until: Instant,
    ) -> Result<Option<Vec<Lane>>, StoreError> {
        let gated: BTreeSet<String> = groups.intersection(&self.gated).cloned().collect();
        if gated.len() <= self.bounds.groups {
            let without_gate = if let Some(few) = every_pair(kinds, groups, self.bounds.pairs) {
                Some(few)
            } else if groups.len() <= self.bounds.groups {
                Some(lanes_without_gate(store, kinds, groups, self.bounds.classes).await?)
            } else {
                self.walk(store, until).await?.map(|lanes| lanes.filter(|lane| groups.contains(&lane.group)).collect())
            };
            if let Some(mut lanes) = without_gate {
                lanes.extend(lanes_with_gate(store, &gated).await?);
                lanes.retain(|lane| is_taken(kinds, lane));
                return Ok(Some(lanes));
            }
        }
        Ok(None)
    }

    /// The lanes of the next groups, for about one [`step`](Bounds::step). Hints and free workers need not wait
    /// until thousands of groups are listed.
    pub(crate) async fn list_some(&mut self, store: &impl Database, kinds: &[&Kind]) -> Result<Vec<Lane>, StoreError> {
        let began = Monotonic::now();
        let mut lanes = Vec::new();
        while self.is_incomplete() {
            let groups = self.next_groups();
            lanes.extend(lanes_without_gate(store, kinds, &groups, self.bounds.classes).await?);
            lanes.extend(lanes_with_gate(store, groups.intersection(&self.gated)).await?);
            self.unlisted.retain(|group| !groups.contains(group));
            self.news.retain(|group| !groups.contains(group));
            if began.elapsed() >= self.bounds.step {
                break;
            }
        }
        lanes.retain(|lane| is_taken(kinds, lane));
        Ok(lanes)
    }

    /// The groups of the next part of a step: as many of the full scan as of those with news.
    fn next_groups(&mut self) -> BTreeSet<String> {
        let most = self.bounds.groups_at_once;
        let after = self.last_of_news.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let in_turn = self.news.range::<String, _>((after, Bound::Unbounded)).chain(&self.news);
        let news: Vec<String> = in_turn.take(most.min(self.news.len())).cloned().collect();
        self.last_of_news = news.last().cloned().or(self.last_of_news.take());
        self.unlisted.iter().take(most).cloned().chain(news).collect()
    }

    /// Every lane without a gate that has jobs which are due at `until`. `None` if the walk takes too long.
    async fn walk(&mut self, store: &impl Database, until: Instant) -> Result<Option<impl Iterator<Item = Lane>>, StoreError> {
        if self.no_walk_before.is_some_and(|until| Monotonic::now() < until) {
            return Ok(None);
        }
        match store.waiting_lanes().await {
            Ok(lanes) => Ok(Some(lanes.into_iter().filter(move |(_, first)| *first <= until).map(|(lane, _)| lane))),
            Err(error) if error.is_too_slow() => {
                self.no_walk_before = Some(Monotonic::now() + NO_WALK_FOR);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// The lanes without a gate in these groups. In a group with more than `most` classes, every lane that workers of these kinds take.
async fn lanes_without_gate(
    store: &impl Database,
    kinds: &[&Kind],
    groups: &BTreeSet<String>,
    most: usize,
) -> Result<Vec<Lane>, StoreError> {
    let of = |group: String| async move {
        let (lanes, is_all) = store.lanes_of(&group, most).await?;
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

/// The groups that workers of these kinds take and that have waiting jobs. A search in a group without jobs would read the index entries
/// that were deleted recently. If the kinds name one group only, it is returned without a query.
async fn groups_with_jobs(store: &impl Database, kinds: &[&Kind]) -> Result<BTreeSet<String>, StoreError> {
    let named = named_groups(kinds);
    if let Some(named) = named.filter(|named| named.len() <= 1) {
        return Ok(named.into_iter().map(str::to_owned).collect());
    }
    Ok(taken_groups(kinds, store.ungated_groups().await?))
}

/// Those of these groups that workers of these kinds take.
fn taken_groups(kinds: &[&Kind], groups: impl IntoIterator<Item = String>) -> BTreeSet<String> {
    let named = named_groups(kinds);
    groups.into_iter().filter(|group| named.as_ref().is_none_or(|named| named.contains(group.as_str()))).collect()
}

/// The groups that these kinds name. `None` if one of the kinds takes every group.
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

/// Every pair of one of these groups and a class that the kinds take there. `None` if there are more than `most`.
fn every_pair(kinds: &[&Kind], groups: &BTreeSet<String>, most: usize) -> Option<Vec<Lane>> {
    let mut lanes = HashSet::new();
    for lane in pairs(kinds, groups) {
        lanes.insert(lane);
        if lanes.len() > most {
            return None;
        }
    }
    Some(lanes.into_iter().collect())
}

/// Every pair of one of these groups and a class that the kinds take there, with repetitions.
fn pairs<'a>(kinds: &'a [&Kind], groups: &'a BTreeSet<String>) -> impl Iterator<Item = Lane> {
    kinds.iter().flat_map(|kind| {
        let served = groups.iter().filter(|group| kind.work_on.includes(group));
        served.flat_map(|group| kind.classes.iter().map(move |class| Lane::new(group, class)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leader::{
        fleet::tests::{available, fleet},
        lanes::Lanes,
    };

    #[test]
    fn very_many_groups_are_listed_in_parts() {
        let lane = |group: &str| Lane::new(group, "c");
        let mut discovery = Discovery { unlisted: (10..60).map(|number| format!("group-{number}")).collect(), ..Discovery::default() };
        let first = discovery.next_groups();
        assert!(first.len() == 16 && first.contains("group-10") && !first.contains("group-59"));
        discovery.unlisted.retain(|group| !first.contains(group));
        let mut lanes = Lanes { discovery, ..Lanes::default() };
        lanes.without_slots(true);
        let mut discovery = lanes.discovery;
        assert!(discovery.is_scanning() && discovery.will_list(&lane("group-59")) && !discovery.will_list(&lane("group-10")));
        discovery.forget();
        assert!(!discovery.is_incomplete() && !discovery.will_list(&lane("group-59")));
        // Groups with news have turns of their own, each in its turn.
        discovery.unlisted = ["group-70".to_owned()].into();
        let mut next = || {
            discovery.news = (10..30).map(|number| format!("group-{number}")).collect();
            let groups = discovery.next_groups();
            (groups.len(), groups.contains("group-70") && groups.contains("group-29"))
        };
        assert_eq!([next(), next()], [(17, false), (17, true)]);
        assert_eq!((discovery.take_news().len(), discovery.next_groups().len()), (20, 1));
    }

    #[test]
    fn a_few_lanes_are_searched_without_a_list() {
        let fleet = fleet(vec![available(&["a", "b"], &["x", "y"], 1), available(&["*"], &["z"], 1)]);
        let kinds: Vec<&Kind> = fleet.kinds().iter().collect();
        let groups = |names: &[&str]| names.iter().map(ToString::to_string).collect::<BTreeSet<_>>();
        let mut few = every_pair(&kinds, &groups(&["a", "c"]), 4).unwrap();
        few.sort();
        let lanes = [("a", "x"), ("a", "y"), ("a", "z"), ("c", "z")];
        assert_eq!(few, lanes.map(|(group, class)| Lane::new(group, class)));
        assert!(every_pair(&kinds, &groups(&["a", "c"]), 3).is_none());
        assert_eq!(taken_groups(&kinds[..1], groups(&["a", "c"])), groups(&["a"]));
        assert_eq!(taken_groups(&kinds, groups(&["a", "c"])), groups(&["a", "c"]));
        assert_eq!((named_groups(&kinds[..1]).map(|named| named.len()), named_groups(&kinds)), (Some(2), None));
    }
}
