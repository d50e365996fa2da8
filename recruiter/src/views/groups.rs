//! Groups, with their settings.

use std::collections::{BTreeMap, BTreeSet};

use recruiter_common::{
    StoreError,
    limits::{GroupSettings, Settings},
    store::{Store, group_of_resource},
};
use serde::Serialize;

use super::{limits::COUNTED, texts};

/// A group, with its settings.
#[derive(Serialize)]
pub(crate) struct Group {
    pub(crate) name: String,
    pub(crate) most_waiting: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) capacity: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rate: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) weight: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ageing: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) maintenance: Vec<String>,
    /// The number of waiting jobs, if they were counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) waiting: Option<u64>,
}

impl Group {
    /// The groups that have settings, and the ids of documents that are none.
    pub(crate) async fn all(store: &Store) -> Result<(Vec<Self>, BTreeSet<String>), StoreError> {
        let Settings { mut groups, mut invalid, .. } = store.settings().await?;
        invalid.retain(|name| group_of_resource(name).is_some());
        groups.retain(|_, settings| *settings != GroupSettings::default());
        let most = store.group_backlogs().await?.into_iter().filter_map(|backlog| Some((backlog.group, backlog.most_waiting?)));
        let most: BTreeMap<String, u64> = most.collect();
        for name in most.keys() {
            groups.entry(name.clone()).or_default();
        }
        Ok((groups.into_iter().map(|(name, settings)| Self::of(most.get(&name).copied(), name, settings)).collect(), invalid))
    }

    /// The same, each with the number of its waiting jobs.
    pub(crate) async fn all_counted(store: &Store) -> Result<(Vec<Self>, BTreeSet<String>), StoreError> {
        let (mut groups, invalid) = Self::all(store).await?;
        for group in &mut groups {
            let counted = group.most_waiting.map_or(COUNTED, |most| most.saturating_add(1));
            group.waiting = Some(store.waiting_in(&group.name, counted).await?);
        }
        Ok((groups, invalid))
    }

    /// One group, which may have no settings.
    pub(crate) async fn find(store: &Store, name: &str) -> Result<Option<Self>, StoreError> {
        Ok(Self::all(store).await?.0.into_iter().find(|group| group.name == name))
    }

    fn of(most_waiting: Option<u64>, name: String, settings: GroupSettings) -> Self {
        let GroupSettings { limit, weight, ageing, maintenance, .. } = settings;
        let rate = limit.rate.map(|rate| rate.to_string());
        let ageing = ageing.map(|ageing| humantime::format_duration(ageing).to_string());
        Self { name, most_waiting, capacity: limit.capacity, rate, weight, ageing, maintenance: texts(&maintenance), waiting: None }
    }
}
