//! Which lanes have jobs, for workers of some kinds: only lanes that exist are searched, never every pair of a group and a class.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    instant::Instant,
    roster::WorkOn,
    store::{Lane, Store, StoreError},
};

use super::fleet::{Kind, KindId};

/// So few lanes are searched whether they have jobs or not: that costs less than to list those that have.
const FEW: usize = 200;
/// The lanes of so few groups are listed group by group.
const FEW_GROUPS: usize = 20;
/// After a walk over the whole index that took too long, lanes are listed group by group for this long.
const TOO_LONG_FOR: Duration = Duration::from_secs(60);

/// How lanes are listed best.
#[derive(Debug, Default)]
pub(crate) struct Discovery {
    /// Until when the whole index is too long to walk.
    too_long_until: Option<Monotonic>,
}

/// The lanes that may have jobs which are due at `until`, in these groups or in all, and that workers of these kinds take.
pub(crate) async fn lanes_for(
    store: &Store,
    discovery: &mut Discovery,
    all: &[Kind],
    kinds: &[KindId],
    groups: Option<&BTreeSet<String>>,
    until: Instant,
) -> Result<Vec<Lane>, StoreError> {
    let kinds: Vec<&Kind> = kinds.iter().map(|kind| &all[*kind]).collect();
    let news = groups;
    let groups = match news {
        Some(news) => serves(&kinds, news.iter().cloned()),
        None => groups_with_jobs(store, &kinds).await?,
    };
    if let Some(few) = every_pair(&kinds, &groups) {
        return Ok(few);
    }
    let walked = if news.is_some_and(|news| news.len() <= FEW_GROUPS) { None } else { walk(store, discovery).await? };
    let lanes: BTreeSet<Lane> = match walked {
        Some(lanes) => lanes.into_iter().filter(|(_, first)| *first <= until).map(|(lane, _)| lane).collect(),
        None => store.lanes_of(groups.iter().cloned()).await?,
    };
    let is_wanted = |lane: &Lane| groups.contains(&lane.group) && kinds.iter().any(|kind| kind.takes(lane));
    Ok(lanes.into_iter().filter(is_wanted).collect())
}

/// The groups that workers of these kinds serve and that have waiting jobs: in each of the others a search would walk over
/// everything that lately left the index.
async fn groups_with_jobs(store: &Store, kinds: &[&Kind]) -> Result<BTreeSet<String>, StoreError> {
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
    for kind in kinds {
        let served = groups.iter().filter(|group| kind.work_on.includes(group));
        for group in served {
            for class in &kind.classes {
                lanes.insert(Lane { group: group.clone(), class: class.clone() });
                if lanes.len() > FEW {
                    return None;
                }
            }
        }
    }
    Some(lanes.into_iter().collect())
}

/// Every lane that has jobs, with the date of the first; nothing when that takes too long.
async fn walk(store: &Store, discovery: &mut Discovery) -> Result<Option<BTreeMap<Lane, Instant>>, StoreError> {
    if discovery.too_long_until.is_some_and(|until| Monotonic::now() < until) {
        return Ok(None);
    }
    match store.waiting_lanes().await {
        Ok(lanes) => Ok(Some(lanes)),
        Err(error) if error.is_too_slow() => {
            discovery.too_long_until = Some(Monotonic::now() + TOO_LONG_FOR);
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leader::fleet::tests::{available, fleet};

    #[test]
    fn a_few_lanes_are_searched_without_being_listed() {
        let fleet = fleet(vec![available(&["a", "b"], &["x", "y"], 1), available(&["*"], &["z"], 1)]);
        let kinds: Vec<&Kind> = fleet.kinds().iter().collect();
        let groups = |names: &[&str]| names.iter().map(ToString::to_string).collect::<BTreeSet<_>>();
        let mut few = every_pair(&kinds, &groups(&["a", "c"])).unwrap();
        few.sort();
        let lanes = [("a", "x"), ("a", "y"), ("a", "z"), ("c", "z")];
        assert_eq!(few, lanes.map(|(group, class)| Lane { group: group.into(), class: class.into() }));
        let many: BTreeSet<String> = (0..=FEW).map(|n| format!("group-{n}")).collect();
        assert!(every_pair(&kinds, &many).is_none());
        assert_eq!(serves(&kinds[..1], groups(&["a", "c"])), groups(&["a"]));
        assert_eq!(serves(&kinds, groups(&["a", "c"])), groups(&["a", "c"]));
        assert_eq!((named_groups(&kinds[..1]).map(|named| named.len()), named_groups(&kinds)), (Some(2), None));
    }
}
