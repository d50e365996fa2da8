//! Limits, who holds their permits, and pauses.

use std::{
    collections::{BTreeSet, HashMap},
    fmt::Display,
};

use bson::{Document, doc};
use recruiter_common::{
    StoreError,
    instant::Instant,
    limits::{Limit, Pause, Paused, Settings},
    store::{PermitHolder, Store, group_of_resource, resource_and_number, resource_of_group},
};
use serde::Serialize;
use serde_json::Value;

use super::{date, extended, texts};

/// Maximum number of jobs, and of permits of each worker, that are shown.
pub(crate) const HOLDERS: usize = 50;
/// Maximum number of paused lines shown.
pub(crate) const LINES: i64 = 1_000;
/// Maximum number of waiting jobs that are counted where no setting says how many may wait.
pub(crate) const COUNTED: u64 = 100_000;

/// The limit of a resource or group.
#[derive(Serialize)]
pub(crate) struct ListedLimit {
    pub(crate) name: String,
    /// Only asked for by name, it may have no limit.
    is_defined: bool,
    pub(crate) capacity: Option<u32>,
    pub(crate) rate: Option<String>,
    pub(crate) in_use: usize,
    pub(crate) most_waiting: Option<u64>,
    /// How many jobs of the group wait, or need this resource only; not of a prefix, and not in lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    waiting: Option<u64>,
    /// Not in lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    holders: Option<Value>,
}

impl ListedLimit {
    fn of(name: &str, limit: Option<Limit>, most_waiting: Option<u64>, holders: &[PermitHolder]) -> Self {
        let is_of = |resource: &str| name.strip_suffix('*').map_or(resource == name, |prefix| resource.starts_with(prefix));
        let permits = holders.iter().flat_map(|holder| &holder.permits);
        let in_use = permits.filter_map(|permit| resource_and_number(permit)).filter(|(resource, _)| is_of(resource)).count();
        let Limit { capacity, rate, .. } = limit.unwrap_or_default();
        let rate = rate.map(|rate| rate.to_string());
        Self { name: name.into(), is_defined: limit.is_some(), capacity, rate, in_use, most_waiting, waiting: None, holders: None }
    }

    /// All limits, and the ids of documents that are none.
    pub(crate) async fn all(store: &Store) -> Result<(Vec<Self>, BTreeSet<String>), StoreError> {
        let (settings, holders) = (store.settings().await?, store.permit_holders().await?);
        let waiting = store.limit_backlogs().await?.into_iter().filter_map(|(name, most)| Some((name, most?)));
        let waiting: HashMap<String, u64> = waiting.collect();
        let limits = all(&settings).map(|(name, limit)| Self::of(&name, Some(limit), waiting.get(&name).copied(), &holders));
        Ok((limits.collect(), settings.invalid))
    }
}

/// One limit, with what holds its permits.
pub(crate) struct ShownLimit {
    name: String,
    pub(crate) limit: Option<Limit>,
    pub(crate) most_waiting: Option<u64>,
    pub(crate) holders: Vec<PermitHolder>,
    pub(crate) waiting: Option<u64>,
}

impl ShownLimit {
    pub(crate) async fn read(store: &Store, name: &str) -> Result<Self, StoreError> {
        let settings = store.settings().await?;
        let limit = all(&settings).find(|(other, _)| other == name).map(|(_, limit)| limit).or_else(|| settings.limit_of(name));
        let holders = store.holders_of_resource(name, HOLDERS).await?;
        let most_waiting = store.limit_backlogs().await?.into_iter().find(|(other, _)| other == name).and_then(|(_, most)| most);
        let waiting = match group_of_resource(name) {
            Some(group) => Some(store.waiting_in(group, COUNTED).await?),
            None if name.ends_with('*') => None,
            None => Some(store.waiting_at(name, COUNTED).await?),
        };
        Ok(Self { name: name.into(), limit, most_waiting, holders, waiting })
    }

    pub(crate) async fn to_view(&self, store: &Store) -> Result<ListedLimit, StoreError> {
        let listed = ListedLimit::of(&self.name, self.limit, self.most_waiting, &store.permit_holders().await?);
        let holders: Vec<Document> = self.holders.iter().map(holder_to_document).collect();
        Ok(ListedLimit { holders: Some(extended(holders)), waiting: self.waiting, ..listed })
    }
}

/// A limit in words.
pub(crate) fn described(limit: Limit) -> String {
    let capacity = limit.capacity.map(|capacity| format!("at most {capacity} at a time"));
    let rate = limit.rate.map(|rate| format!("at most {rate}"));
    capacity.into_iter().chain(rate).collect::<Vec<_>>().join(", ")
}

/// The limits of resources and of groups, by the name of their permits.
pub(crate) fn all(settings: &Settings) -> impl Iterator<Item = (String, Limit)> {
    let groups = settings.groups.iter().filter(|(_, group)| group.limit != Limit::default());
    let groups = groups.map(|(name, group)| (resource_of_group(name), group.limit));
    settings.limits.iter().map(|(name, limit)| (name.clone(), *limit)).chain(groups)
}

/// Why there is nothing to remove.
pub(crate) fn no_limit(name: impl Display) -> String {
    format!("{name} has no limit")
}

/// A worker that holds permits.
pub(crate) fn holder_to_document(holder: &PermitHolder) -> Document {
    doc! { "worker": holder.worker.to_string(), "permits": &holder.permits, "jobs": texts(&holder.jobs) }
}

/// A pause.
#[derive(Serialize)]
pub(crate) struct ListedPause {
    name: String,
    by: String,
    reason: Option<String>,
    #[serde(serialize_with = "date")]
    at: Option<Instant>,
}

impl ListedPause {
    pub(crate) fn of((paused, pause): (Paused, Pause)) -> Self {
        let Pause { by, reason, at, .. } = pause;
        Self { name: paused.to_string(), by, reason, at }
    }
}

/// The pauses, those of the first [`LINES`] lines among them, and the ids of documents that are none.
pub(crate) async fn pauses(store: &Store) -> Result<(Vec<(Paused, Pause)>, BTreeSet<String>), StoreError> {
    let Settings { pauses, invalid_pauses, .. } = store.settings().await?;
    Ok((pauses.into_iter().chain(store.pauses_of_lines(LINES).await?).collect(), invalid_pauses))
}

/// What can be paused and was given: a group or class with a blank at its end has no jobs, so its pause would pause nothing. The key of a line
/// may have one.
pub(crate) fn paused_of_text(text: &str) -> Result<Paused, String> {
    let text = text.trim_start();
    let text = if text.starts_with("line:") { text.trim_end_matches(char::is_control) } else { text.trim_end() };
    let paused = text.parse::<Paused>().map_err(|problem| problem.to_string())?;
    match &paused {
        Paused::Group(name) | Paused::Class(name) if name.trim() != name => Err(format!("{name:?} begins with a blank: remove it")),
        Paused::Everything | Paused::Group(_) | Paused::Class(_) | Paused::Line(_) => Ok(paused),
    }
}
