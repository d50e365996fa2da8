//! Changes limits, pauses and the settings of groups.

use std::time::Duration;

use axum::{Json, extract::State};
use bson::{Document, doc};
use recruiter_common::{
    limits::{
        AGEING, InvalidSetting, LARGEST_CAP, Limit, MOST_WINDOWS, MaintenanceWindow, Paused, Rate, SettingError, WEIGHTS, check_limit_name,
    },
    spec::duration_of_text,
    store::group_of_resource,
    text::printable,
};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::super::{
    Shared,
    audit::Actor,
    problem::{Problem, ProblemDocument},
    requests::{JsonText, Name, Parameters},
};
use crate::views::{
    groups::Group,
    limits::{all, no_limit, paused_of_text},
    outcome_of,
};

/// The new limit of a resource or group: a capacity, a rate, or both.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct NewLimit {
    /// How many jobs may run at a time.
    capacity: Option<u32>,
    /// How often jobs may start, for example `100/1s`, or `100/1s burst 20`.
    rate: Option<String>,
    /// How many jobs that need the same resources may wait; any number if it is not given. Not for a group.
    most_waiting: Option<u64>,
}

impl NewLimit {
    fn checked(&self, name: &str) -> Result<Limit, Problem> {
        check_limit_name(name)?;
        if self.most_waiting.is_some() && group_of_resource(name).is_some() {
            return Err(Problem::impossible("`most_waiting` of a group is set with `PATCH /api/v1/groups/NAME`"));
        }
        check_most_waiting(self.most_waiting)?;
        let rate = self.rate.as_deref().map(|text| text.parse::<Rate>().map_err(Problem::impossible)).transpose()?;
        Ok(Limit::new(self.capacity, rate))
    }
}

fn check_most_waiting(most: Option<u64>) -> Result<(), Problem> {
    let is_possible = most.is_none_or(|most| (1..=LARGEST_CAP).contains(&most));
    if is_possible { Ok(()) } else { Err(Problem::impossible(format!("`most_waiting` is from 1 to {LARGEST_CAP}"))) }
}

/// Sets the limit of a resource, new or changed; it holds at once, and ends no running job.
#[utoipa::path(
    put,
    path = "/api/v1/limits/{name}",
    params(("name" = String, Path, description = "Name of the resource; a prefix that ends in `*`; or `@` and a group")),
    request_body(content = NewLimit),
    responses((status = 200, description = "`name` and `outcome`"), (status = 422, body = ProblemDocument))
)]
pub(super) async fn set_limit(
    State(web): Shared,
    actor: Actor,
    Name(name): Name,
    given: Parameters,
    body: JsonText,
) -> Result<Json<Value>, Problem> {
    given.end()?;
    let new = body.value::<NewLimit>()?;
    let limit = new.checked(&name)?;
    let most = new.most_waiting;
    let target =
        doc! { "limit": &name, "capacity": limit.capacity, "rate": limit.rate.map(|rate| rate.to_string()), "most_waiting": number(most) };
    let store = web.store.clone();
    let changing = async move {
        store.limits().set(&name, limit).await?;
        if group_of_resource(&name).is_none() {
            store.limits().set_most_waiting(&name, most).await?;
        }
        Ok(done(&name, "set", false))
    };
    actor.wants("limits.set", target, false).by(&web, changing).await
}

/// Removes a limit: jobs that name the resource wait until it has one again; a group has none then.
#[utoipa::path(
    delete,
    path = "/api/v1/limits/{name}",
    params(("name" = String, Path, description = "Name or prefix of the limit"), ("dry_run" = Option<bool>, Query, description = "Change nothing")),
    responses((status = 200, description = "`name` and `outcome`"), (status = 404, body = ProblemDocument))
)]
pub(super) async fn remove_limit(
    State(web): Shared,
    actor: Actor,
    Name(name): Name,
    mut given: Parameters,
) -> Result<Json<Value>, Problem> {
    let dry_run = given.flag("dry_run")?;
    given.end()?;
    let (store, target) = (web.store.clone(), doc! { "limit": &name });
    let changing = async move {
        let is_there = all(&store.settings().await?).any(|(other, _)| other == name);
        if !is_there || !(dry_run || store.limits().remove(&name).await?) {
            return Err(Problem::not_found(no_limit(printable(&name, 256))));
        }
        Ok(done(&name, "removed", dry_run))
    };
    actor.wants("limits.remove", target, dry_run).by(&web, changing).await
}

/// Why something is paused.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct NewPause {
    /// For the people who see the pause.
    reason: Option<String>,
}

/// Pauses everything, a group, a class or a line: its jobs wait, and running jobs continue.
#[utoipa::path(
    put,
    path = "/api/v1/pauses/{what}",
    params(("what" = String, Path, description = "`everything`, `group:NAME`, `class:NAME` or `line:KEY`")),
    request_body(content = Option<NewPause>),
    responses((status = 200, description = "`name` and `outcome`: `paused` or `paused-before`"), (status = 422, body = ProblemDocument))
)]
pub(super) async fn add_pause(
    State(web): Shared,
    actor: Actor,
    Name(what): Name,
    given: Parameters,
    body: JsonText,
) -> Result<Json<Value>, Problem> {
    given.end()?;
    let NewPause { reason } = body.value()?;
    let paused = paused_of_text(&what).map_err(Problem::impossible)?;
    let (store, by) = (web.store.clone(), actor.name());
    let target = doc! { "paused": paused.to_string(), "reason": reason.as_deref().map(|reason| printable(reason, 4_000)) };
    let changing = async move {
        let is_new = store.pauses().pause(&paused, &by, reason.as_deref()).await?;
        Ok(done(&paused.to_string(), if is_new { "paused" } else { "paused-before" }, false))
    };
    actor.wants("pauses.add", target, false).by(&web, changing).await
}

/// Ends a pause.
#[utoipa::path(
    delete,
    path = "/api/v1/pauses/{what}",
    params(("what" = String, Path, description = "`everything`, `group:NAME`, `class:NAME` or `line:KEY`")),
    responses((status = 200, description = "`name` and `outcome`: `resumed` or `not-paused`"), (status = 422, body = ProblemDocument))
)]
pub(super) async fn remove_pause(State(web): Shared, actor: Actor, Name(what): Name, given: Parameters) -> Result<Json<Value>, Problem> {
    given.end()?;
    let paused: Paused = what.parse().map_err(Problem::impossible)?;
    let (store, target) = (web.store.clone(), doc! { "paused": paused.to_string() });
    let changing = async move {
        let was_paused = store.pauses().resume(&paused).await?;
        Ok(done(&paused.to_string(), if was_paused { "resumed" } else { "not-paused" }, false))
    };
    actor.wants("pauses.remove", target, false).by(&web, changing).await
}

/// New settings of a group. `null` removes a setting, and one that is not given stays.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct NewGroup {
    /// With this many waiting jobs the group accepts no further ones.
    #[serde(deserialize_with = "or_null")]
    #[schema(value_type = Option<u64>)]
    most_waiting: Option<Option<u64>>,
    /// Share of the group in the starts.
    #[serde(deserialize_with = "or_null")]
    #[schema(value_type = Option<f64>)]
    weight: Option<Option<f64>>,
    /// A job counts as one priority higher for each of these times that it has waited, for example `10m`.
    #[serde(deserialize_with = "or_null")]
    #[schema(value_type = Option<String>)]
    ageing: Option<Option<String>>,
    /// Times in which no job starts, for example `02:00-03:00 Europe/Berlin`, in place of those that there are.
    #[serde(deserialize_with = "or_null")]
    #[schema(value_type = Option<Vec<String>>)]
    maintenance: Option<Option<Vec<String>>>,
}

/// What is given, if it is only null: no setting.
fn or_null<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(from).map(Some)
}

/// Checked settings, so that all of them are written, or none.
struct GroupChange {
    most_waiting: Option<Option<u64>>,
    weight: Option<Option<f64>>,
    ageing: Option<Option<Duration>>,
    maintenance: Option<Vec<MaintenanceWindow>>,
}

impl NewGroup {
    fn checked(self) -> Result<GroupChange, Problem> {
        let Self { most_waiting, weight, ageing, maintenance } = self;
        if let (None, None, None, None) = (&most_waiting, &weight, &ageing, &maintenance) {
            return Err(Problem::impossible("give at least one of `most_waiting`, `weight`, `ageing` and `maintenance`"));
        }
        check_most_waiting(most_waiting.flatten())?;
        if weight.flatten().is_some_and(|weight| !WEIGHTS.contains(&weight)) {
            return Err(Problem::impossible(format!("`weight` is from {} to {}", WEIGHTS.start(), WEIGHTS.end())));
        }
        let duration = |text: String| {
            let ageing = duration_of_text(&text).map_err(Problem::impossible)?;
            let is_possible = AGEING.contains(&ageing);
            if is_possible { Ok(ageing) } else { Err(Problem::impossible("`ageing` is from 10ms to 366days, for example `10m`")) }
        };
        let window = |text: String| text.parse::<MaintenanceWindow>().map_err(Problem::impossible);
        let windows = |texts: Option<Vec<String>>| texts.unwrap_or_default().into_iter().map(window).collect::<Result<Vec<_>, _>>();
        let maintenance = maintenance.map(windows).transpose()?;
        if maintenance.as_ref().is_some_and(|windows| windows.len() > MOST_WINDOWS) {
            return Err(Problem::impossible(format!("a group has at most {MOST_WINDOWS} maintenance windows")));
        }
        let ageing = ageing.map(|ageing| ageing.map(duration).transpose()).transpose()?;
        Ok(GroupChange { most_waiting, weight, ageing, maintenance })
    }
}

impl GroupChange {
    /// For the audit: `null` is a setting that is removed.
    fn to_document(&self, group: &str) -> Document {
        let mut given = doc! { "group": group };
        if let Some(most) = self.most_waiting {
            given.insert("most_waiting", number(most));
        }
        if let Some(weight) = self.weight {
            given.insert("weight", weight);
        }
        if let Some(ageing) = self.ageing {
            given.insert("ageing", ageing.map(|ageing| humantime::format_duration(ageing).to_string()));
        }
        if let Some(windows) = &self.maintenance {
            given.insert("maintenance", crate::views::texts(windows));
        }
        given
    }
}

/// Changes the settings of a group.
#[utoipa::path(
    patch,
    path = "/api/v1/groups/{name}",
    params(("name" = String, Path, description = "Name of the group")),
    request_body(content = NewGroup),
    responses((status = 200, description = "The group with all its settings"), (status = 422, body = ProblemDocument))
)]
pub(super) async fn set_group(
    State(web): Shared,
    actor: Actor,
    Name(name): Name,
    given: Parameters,
    body: JsonText,
) -> Result<Json<Value>, Problem> {
    given.end()?;
    let new = body.value::<NewGroup>()?.checked()?;
    let (store, target) = (web.store.clone(), new.to_document(&name));
    let changing = async move {
        let (groups, GroupChange { most_waiting, weight, ageing, maintenance }) = (store.groups(), new);
        if let Some(most) = most_waiting {
            groups.set_most_waiting(&name, most).await?;
        }
        if let Some(weight) = weight {
            groups.set_weight(&name, weight).await?;
        }
        if let Some(ageing) = ageing {
            groups.set_ageing(&name, ageing).await?;
        }
        if let Some(windows) = maintenance {
            groups.set_maintenance(&name, &windows).await?;
        }
        let group = Group::find(&store, &name).await?.map_or_else(|| json!({ "name": name }), |group| json!(group));
        Ok((Json(group), doc! { "outcome": "set" }))
    };
    actor.wants("groups.set", target, false).by(&web, changing).await
}

/// The answer to a change of something that has a name, and what the audit says about it.
pub(super) fn done(name: &str, outcome: &str, dry_run: bool) -> (Json<Value>, Document) {
    (Json(outcome_of(name, outcome, dry_run)), doc! { "outcome": outcome })
}

fn number(number: Option<u64>) -> Option<i64> {
    number.and_then(|number| i64::try_from(number).ok())
}

impl From<InvalidSetting> for Problem {
    fn from(error: InvalidSetting) -> Self {
        Self::impossible(error)
    }
}

impl From<SettingError> for Problem {
    fn from(error: SettingError) -> Self {
        if let SettingError::Store(error) = error { error.into() } else { Self::impossible(error) }
    }
}
