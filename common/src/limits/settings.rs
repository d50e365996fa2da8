//! The settings that operators change at run time: `limits`, `groups` and `pauses`.

use std::{collections::HashMap, time::Duration};

use bson::{Bson, Document, doc};
use mongodb::{Collection, options::ReadConcern, results::DeleteResult};

use super::{AGEING, GroupSettings, Limit, MaintenanceWindow, Pause, Paused, Rate, Settings, WEIGHTS};
use crate::{
    base::{JobId, integer},
    hints::Hint,
    job::{group_of_resource, line_of_gate, resource_and_number, resources_in},
    mongo::{IDS_PER_QUERY, Readable, Store, StoreError, call, id_of},
    roster::{PermitHolder, ids_in, legible},
};

impl Store {
    /// All settings except the pauses of lines, with one query. A document that is not valid is listed as such. Texts that are not UTF-8 do
    /// not matter where a number is right; in a name, the setting concerns no job.
    ///
    /// Filter: none. Index: none, the collections are small. Invariant: I9, an invalid document hides no other.
    pub async fn settings(&self) -> Result<Settings, StoreError> {
        let from = |collection: &str| doc! { "$set": { "from": collection } };
        let union = |collection: &str, only: Document| {
            doc! { "$unionWith": { "coll": self.named(collection), "pipeline": [{ "$match": only }, from(collection)] } }
        };
        // Every failed job of a line may leave a pause.
        let not_lines = doc! { "$or": [{ "_id": { "$lt": "line:" } }, { "_id": { "$gte": "line;" } }] };
        let stages = [from("limits"), union("groups", doc! {}), union("pauses", not_lines)];
        let limits = self.limits.clone();
        let found: Vec<Document> = call("settings", async move {
            limits.aggregate(stages).batch_size(100_000).read_concern(ReadConcern::local()).await?.readable().await
        })
        .await?;
        let mut settings = Settings::default();
        for document in &found {
            let Some(name) = document.get("_id").and_then(Bson::as_str).map(str::to_owned) else { continue };
            match document.get_str("from") {
                Ok("limits") => match limit_in(document).filter(|limit| *limit != Limit::default()) {
                    Some(limit) => _ = settings.limits.insert(name, limit),
                    None => _ = settings.invalid.insert(name),
                },
                Ok("groups") => match group_in(document) {
                    Some(group) => _ = settings.groups.insert(name, group),
                    None => _ = settings.invalid.insert(format!("@{name}")),
                },
                _ => match name.parse() {
                    Ok(paused) => _ = settings.pauses.insert(paused, pause_in(document)),
                    Err(_) => _ = settings.invalid_pauses.insert(name),
                },
            }
        }
        Ok(settings)
    }

    /// Writes a limit, new or changed, and notifies the recruiter.
    ///
    /// Filter: id. Index: `_id`. Invariant: none.
    pub(crate) async fn put_limit(&self, name: &str, limit: Limit) -> Result<(), StoreError> {
        self.ensure_set_up().await?;
        let mut set = limit_to_document(limit);
        let missing = ["capacity", "rate"].into_iter().filter(|field| !set.contains_key(field));
        let unset: Document = missing.map(|field| (field.to_owned(), "".into())).collect();
        set.insert("changed_at", self.now());
        let update = doc! { "$set": set, "$unset": unset };
        let (collection, id) = self.limit_document(name);
        call("put_limit", async move { collection.update_one(id, update).upsert(true).await }).await?;
        self.announce_hint(Hint::Settings).await;
        self.tell_plain("limit.changed", doc! { "name": name });
        Ok(())
    }

    /// Writes one setting of a group, or removes it, and notifies the recruiter. Other settings stay as they are.
    ///
    /// Filter: id. Index: `_id`. Invariant: none.
    pub(super) async fn put_of_group(&self, group: &str, field: &str, value: Option<Bson>) -> Result<(), StoreError> {
        self.ensure_set_up().await?;
        let is_set = value.is_some();
        let change = match value {
            Some(value) => doc! { "$set": { field: value } },
            None => doc! { "$unset": { field: "" } },
        };
        let (groups, id) = (self.groups.clone(), doc! { "_id": group });
        call("put_of_group", async move { groups.update_one(id, change).upsert(is_set).await }).await?;
        self.announce_hint(Hint::Settings).await;
        self.tell_plain("group.changed", doc! { "name": group });
        Ok(())
    }

    /// Removes a limit, and notifies the recruiter. Returns whether there was one.
    ///
    /// Filter: id. Index: `_id`. Invariant: none.
    pub(crate) async fn delete_limit(&self, name: &str) -> Result<bool, StoreError> {
        let is_removed = if group_of_resource(name).is_none() {
            self.delete_setting(&self.limits, name).await?
        } else {
            // The document has other settings of the group.
            let (groups, id) = self.limit_document(name);
            let update = doc! { "$unset": { "capacity": "", "rate": "" } };
            let changed = call("delete_limit", async move { groups.update_one(id, update).await }).await?;
            self.announce_hint(Hint::Settings).await;
            changed.modified_count > 0
        };
        if is_removed {
            self.tell_plain("limit.removed", doc! { "name": name });
        }
        Ok(is_removed)
    }

    /// The collection and the filter of the document with a limit.
    fn limit_document(&self, name: &str) -> (Collection<Document>, Document) {
        match group_of_resource(name) {
            Some(group) => (self.groups.clone(), doc! { "_id": group }),
            None => (self.limits.clone(), doc! { "_id": name }),
        }
    }

    /// Writes a pause. Returns false if there is one already, which stays as it is.
    ///
    /// Filter: id. Index: `_id`. Invariant: none.
    pub(crate) async fn put_pause(&self, paused: &Paused, by: &str, reason: Option<&str>) -> Result<bool, StoreError> {
        self.ensure_set_up().await?;
        let pauses = self.pauses.clone();
        let mut pause = doc! { "_id": paused.to_string(), "by": by, "at": self.now() };
        pause.extend(reason.map(|reason| ("reason".to_owned(), reason.into())));
        match call("put_pause", async move { pauses.insert_one(pause).await }).await {
            Err(error) if error.is_duplicate() => Ok(false),
            other => {
                other?;
                self.announce_hint(Hint::Settings).await;
                self.tell_plain("pause.added", doc! { "name": paused.to_string(), "by": by });
                Ok(true)
            }
        }
    }

    /// Ends a pause. Returns whether there was one.
    ///
    /// Filter: id. Index: `_id`. Invariant: none.
    pub(crate) async fn delete_pause(&self, paused: &Paused) -> Result<bool, StoreError> {
        let is_removed = self.delete_setting(&self.pauses, &paused.to_string()).await?;
        if is_removed {
            self.tell_plain("pause.removed", doc! { "name": paused.to_string() });
        }
        Ok(is_removed)
    }

    async fn delete_setting(&self, collection: &Collection<Document>, id: &str) -> Result<bool, StoreError> {
        let (collection, id) = (collection.clone(), doc! { "_id": id });
        let DeleteResult { deleted_count, .. } = call("delete_setting", async move { collection.delete_one(id).await }).await?;
        self.announce_hint(Hint::Settings).await;
        Ok(deleted_count > 0)
    }

    /// The workers that hold permits of a resource, with these permits, and with the jobs that they have locked and that need the resource: at
    /// most `most` jobs.
    ///
    /// Filter: the jobs that the roster lists, locked. Index: `_id`. Invariant: none.
    pub async fn holders_of_resource(&self, resource: &str, most: usize) -> Result<Vec<PermitHolder>, StoreError> {
        let mut holders = self.permit_holders().await?;
        for holder in &mut holders {
            holder.permits.retain(|name| resource_and_number(name).is_some_and(|(of, _)| of == resource));
        }
        holders.retain(|holder| !holder.permits.is_empty());
        let mut left = most;
        for holder in &mut holders {
            let listed = std::mem::take(&mut holder.jobs);
            for some in listed.chunks(IDS_PER_QUERY) {
                if left == 0 {
                    break;
                }
                let (scheduled, filter) = (self.scheduled.clone(), doc! { "_id": { "$in": some.to_vec() }, "locked": true });
                let found: Vec<Document> = call("holders_of_resource", async move {
                    scheduled.find(filter).projection(doc! { "gate": 1, "group": 1 }).batch_size(100_000).await?.readable().await
                })
                .await?;
                let needs_it = |job: &&Document| {
                    let of_gate = job.get_str("gate").is_ok_and(|gate| resources_in(gate).any(|of| of == resource));
                    of_gate || job.get_str("group").is_ok_and(|group| group_of_resource(resource) == Some(group))
                };
                let before = holder.jobs.len();
                holder.jobs.extend(found.iter().filter(needs_it).filter_map(id_of).take(left));
                left -= holder.jobs.len() - before;
            }
        }
        Ok(holders)
    }

    /// Number of running jobs of each of these groups that have no permit of the group, because they were started before it had a
    /// capacity. A group without such jobs is not named.
    ///
    /// Filter: the jobs that the roster lists, locked, group, without a permit of the group. Index: `_id`. Invariant: none.
    pub async fn running_without_permit(&self, groups: &[String]) -> Result<HashMap<String, u64>, StoreError> {
        let mut counts = HashMap::new();
        if groups.is_empty() {
            return Ok(counts);
        }
        let documents = self.roster_documents().await?;
        let listed: Vec<JobId> = documents.iter().flat_map(|worker| ids_in(legible(worker).get("working_on"))).collect();
        for some in listed.chunks(IDS_PER_QUERY) {
            let filter = doc! {
                "_id": { "$in": some.to_vec() }, "locked": true, "group": { "$in": groups }, "last_execution.group_permit": { "$ne": true },
            };
            let scheduled = self.scheduled.clone();
            let found: Vec<Document> = call("running_without_permit", async move {
                scheduled.find(filter).projection(doc! { "group": 1 }).batch_size(10_000).await?.readable().await
            })
            .await?;
            for group in found.iter().filter_map(|job| job.get_str("group").ok()) {
                *counts.entry(group.to_owned()).or_default() += 1;
            }
        }
        Ok(counts)
    }
}

fn limit_in(document: &Document) -> Option<Limit> {
    let capacity = match document.get("capacity") {
        None | Some(Bson::Null) => None,
        some => Some(u32::try_from(integer(some)?).ok()?),
    };
    let rate = match document.get("rate") {
        None | Some(Bson::Null) => None,
        Some(rate) => {
            let rate = rate.as_document()?;
            let number = |field| u32::try_from(integer(rate.get(field))?).ok();
            let per = Duration::from_millis(u64::try_from(integer(rate.get("per_ms"))?).ok()?);
            let starts = number("starts")?;
            let burst = if rate.contains_key("burst") { number("burst")? } else { starts };
            Some(Rate::new(starts, per, burst).ok()?)
        }
    };
    Some(Limit { capacity, rate })
}

fn limit_to_document(limit: Limit) -> Document {
    let mut document = Document::new();
    document.extend(limit.capacity.map(|capacity| ("capacity".to_owned(), Bson::from(i64::from(capacity)))));
    document.extend(limit.rate.map(|rate| {
        let per_ms = i64::try_from(rate.per.as_millis()).unwrap_or(i64::MAX);
        let rate = doc! { "starts": i64::from(rate.starts), "per_ms": per_ms, "burst": i64::from(rate.burst) };
        ("rate".to_owned(), rate.into())
    }));
    document
}

fn group_in(document: &Document) -> Option<GroupSettings> {
    let weight = match document.get("weight") {
        None | Some(Bson::Null) => None,
        Some(weight) => {
            let weight = weight.as_f64().or(integer(Some(weight)).map(|whole| whole as f64))?;
            Some(Some(weight).filter(|weight| WEIGHTS.contains(weight))?)
        }
    };
    let ageing = match document.get("ageing_ms") {
        None | Some(Bson::Null) => None,
        some => Some(Duration::from_millis(u64::try_from(integer(some)?).ok()?)).filter(|ageing| AGEING.contains(ageing)).map(Some)?,
    };
    let maintenance = match document.get("maintenance") {
        None | Some(Bson::Null) => Vec::new(),
        Some(windows) => windows.as_array()?.iter().map(|window| window_in(window.as_document()?)).collect::<Option<Vec<_>>>()?,
    };
    Some(GroupSettings { limit: limit_in(document)?, weight, ageing, maintenance })
}

pub(super) fn window_to_document(window: &MaintenanceWindow) -> Document {
    let (from, until, zone) = window.texts();
    let mut document = doc! { "from": from, "until": until, "zone": zone };
    let days = window.days();
    if !days.is_empty() {
        document.insert("days", days);
    }
    document
}

fn window_in(document: &Document) -> Option<MaintenanceWindow> {
    let text = |field| document.get_str(field).ok();
    let days = match document.get("days") {
        None | Some(Bson::Null) => Vec::new(),
        Some(days) => days.as_array()?.iter().map(Bson::as_str).collect::<Option<Vec<_>>>()?,
    };
    let zone = if document.contains_key("zone") { text("zone")? } else { "UTC" };
    MaintenanceWindow::new(text("from")?, text("until")?, zone, days).ok()
}

/// The `_id` of the pause of a line.
pub(crate) fn id_of_pause(gate: &str) -> String {
    Paused::Line(line_of_gate(gate).unwrap_or_default().to_owned()).to_string()
}

pub(crate) fn pause_in(document: &Document) -> Pause {
    let text = |field| document.get_str(field).ok().map(str::to_owned);
    Pause { by: text("by").unwrap_or_default(), reason: text("reason"), at: document.get_datetime("at").ok().map(|at| at.to_chrono()) }
}
