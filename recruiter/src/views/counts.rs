//! How many jobs wait and run in each group, counted as far as that is cheap.

use std::collections::{BTreeMap, BTreeSet};

use recruiter_common::{
    instant::Instant,
    limits::Paused,
    store::{Store, StoreError},
};

/// Maximum number of groups: the first ones in alphabetical order.
const GROUPS: usize = 100;
/// Maximum number of waiting jobs without a gate, and of as many with one, that are counted, shared by the groups.
const JOBS: u32 = 200_000;
/// Maximum number of jobs of one group, in the same way.
const JOBS_OF_GROUP: u32 = 20_000;

/// The numbers of one group.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct GroupCounts {
    pub(crate) name: String,
    /// Due jobs that wait.
    pub(crate) due: u64,
    /// Jobs that are due later, or wait for others.
    pub(crate) later: u64,
    /// Whether there are more waiting jobs than were counted.
    pub(crate) has_more: bool,
    pub(crate) oldest: Option<Instant>,
    pub(crate) running: u64,
    pub(crate) done_per_second: f64,
    pub(crate) is_paused: bool,
}

/// The groups that have jobs or a pause, in alphabetical order, and how many more there are behind them.
pub(crate) async fn counted(store: &Store, now: Instant, rates: &BTreeMap<String, f64>) -> Result<(Vec<GroupCounts>, usize), StoreError> {
    let mut waiting: BTreeSet<String> = store.ungated_groups().await?.into_iter().collect();
    waiting.extend(store.gated_groups().await?);
    let running = store.running().await?;
    let paused: BTreeSet<String> = store
        .pauses()
        .list()
        .await?
        .into_keys()
        .filter_map(|paused| match paused {
            Paused::Group(group) => Some(group),
            Paused::Everything | Paused::Class(_) | Paused::Line(_) => None,
        })
        .collect();
    let names: BTreeSet<&String> = waiting.iter().chain(running.keys()).chain(rates.keys()).chain(&paused).collect();
    let share = u32::try_from(waiting.len().clamp(1, GROUPS)).map_or(JOBS, |groups| JOBS / groups).min(JOBS_OF_GROUP);
    let (mut groups, more) = (Vec::new(), names.len().saturating_sub(GROUPS));
    for name in names.into_iter().take(GROUPS) {
        let sample = if waiting.contains(name) { store.sample_group(name, now, share).await? } else { Default::default() };
        let later = sample.later + sample.for_jobs;
        groups.push(GroupCounts {
            name: name.clone(),
            due: sample.due,
            later,
            has_more: sample.due + later >= share.into(),
            oldest: sample.oldest,
            running: running.get(name).copied().unwrap_or_default(),
            done_per_second: rates.get(name).copied().unwrap_or_default(),
            is_paused: paused.contains(name),
        });
    }
    Ok((groups, more))
}
