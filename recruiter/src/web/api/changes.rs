//! Retries, changes, cancels and deletes jobs: one by its id, or all that match.

use std::ops::ControlFlow;

use axum::{Json, extract::State};
use bson::{Bson, Document, doc};
use recruiter_common::{
    control::{Alteration, Change, Changed, Refusal, Revision},
    instant::{Instant, later},
    job::Priority,
    json,
    spec::{duration_of_text, instant_of_text},
    text::printable,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::{
    super::{
        Shared,
        audit::{Actor, job_action, noted},
        problem::{Problem, ProblemDocument},
        requests::{Id, JsonText, Parameters},
    },
    jobs::unknown,
};
use crate::views::{filter::FilterArgs, outcome::Outcome};

/// Maximum number of parameters that the audit names.
const NAMED: usize = 100;

/// A change, and what the audit says about its values.
struct Wanted {
    change: Change,
    with: Document,
}

impl Wanted {
    fn of(change: Change) -> Self {
        Self { change, with: Document::new() }
    }
}

/// The values that were given.
fn given(values: Document) -> Document {
    let is_given = |value: &Bson| *value != Bson::Null && value.as_array().is_none_or(|list| !list.is_empty());
    values.into_iter().filter(|(_, value)| is_given(value)).collect()
}

/// What a retried job has in place of the content of the job that it repeats.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct NewContent {
    /// Merged into the parameters (of each item of a bundle); `null` removes a field.
    #[schema(value_type = Object)]
    set: Map<String, Value>,
    /// The new group.
    group: Option<String>,
    /// The new priority, from 0 to 9, higher first.
    #[schema(value_type = Option<u8>)]
    priority: Option<Priority>,
    /// Also if the job was retried before.
    again: bool,
}

impl NewContent {
    fn wanted(self) -> Result<Wanted, Problem> {
        // Without the values, which may be secret.
        let names: Vec<String> = self.set.keys().take(NAMED).map(|name| printable(name, 80)).collect();
        let with = doc! { "set": names, "group": self.group.clone(), "priority": self.priority.map(|priority| priority.to_string()) };
        let set = json::to_bson(Value::Object(self.set)).map_err(Problem::impossible)?;
        let mut revision = Revision::default().set(set.as_document().cloned().unwrap_or_default());
        if let Some(group) = self.group {
            revision = revision.group(group).map_err(Problem::impossible)?;
        }
        if let Some(priority) = self.priority {
            revision = revision.priority(priority);
        }
        Ok(Wanted { change: Change::Retry { again: self.again, with: revision.into() }, with: given(with) })
    }
}

/// The new values of a waiting job.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct NewValues {
    /// The new priority, from 0 to 9, higher first.
    #[schema(value_type = Option<u8>)]
    priority: Option<Priority>,
    /// The new group.
    group: Option<String>,
    /// The new instant at which it is due, for example `2030-01-31T18:00:00Z`.
    scheduled_at: Option<String>,
    /// In place of `scheduled_at`: the delay from now on, for example `1h 30m`.
    after: Option<String>,
}

impl NewValues {
    fn wanted(self, now: Instant) -> Result<Wanted, Problem> {
        let at = match (self.scheduled_at, self.after) {
            (Some(_), Some(_)) => return Err(Problem::impossible("`scheduled_at` and `after` exclude each other; give only one of them")),
            (Some(at), None) => Some(instant_of_text(&at).map_err(Problem::impossible)?),
            (None, Some(delay)) => Some(later(now, duration_of_text(&delay).map_err(Problem::impossible)?)),
            (None, None) => None,
        };
        let at_date = at.map(bson::DateTime::from_chrono);
        let with =
            doc! { "priority": self.priority.map(|priority| priority.to_string()), "group": self.group.clone(), "scheduled_at": at_date };
        let change = Alteration::new(self.priority, self.group, at).map(Change::Alter).map_err(Problem::impossible)?;
        Ok(Wanted { change, with: given(with) })
    }
}

/// Retries a job: makes a waiting one due now, or enqueues an archived one again under a new id.
#[utoipa::path(
    post,
    path = "/api/v1/jobs/{id}/retry",
    params(("id" = String, Path, description = "Id of the job"), ("dry_run" = Option<bool>, Query, description = "Change nothing")),
    request_body(content = Option<NewContent>),
    responses((status = 200, description = "`outcome`, `message`, and `new_id`"), (status = 404, body = ProblemDocument), (status = 409, body = ProblemDocument))
)]
pub(super) async fn retry(shared: Shared, actor: Actor, id: Id, given: Parameters, body: JsonText) -> Result<Json<Outcome>, Problem> {
    change(shared, actor, id, given, body.value::<NewContent>()?.wanted()?).await
}

/// Cancels a job: archives a waiting one without running it, or asks the worker of a running one.
#[utoipa::path(
    post,
    path = "/api/v1/jobs/{id}/cancel",
    params(("id" = String, Path, description = "Id of the job"), ("dry_run" = Option<bool>, Query, description = "Change nothing")),
    responses((status = 200, description = "`outcome` and `message`"), (status = 404, body = ProblemDocument), (status = 409, body = ProblemDocument))
)]
pub(super) async fn cancel(shared: Shared, actor: Actor, id: Id, given: Parameters) -> Result<Json<Outcome>, Problem> {
    change(shared, actor, id, given, Wanted::of(Change::Cancel)).await
}

/// Changes a waiting job.
#[utoipa::path(
    patch,
    path = "/api/v1/jobs/{id}",
    params(("id" = String, Path, description = "Id of the job"), ("dry_run" = Option<bool>, Query, description = "Change nothing")),
    request_body(content = NewValues),
    responses((status = 200, description = "`outcome` and `message`"), (status = 404, body = ProblemDocument), (status = 409, body = ProblemDocument))
)]
pub(super) async fn alter(shared: Shared, actor: Actor, id: Id, given: Parameters, body: JsonText) -> Result<Json<Outcome>, Problem> {
    let wanted = body.value::<NewValues>()?.wanted(shared.store.now())?;
    change(shared, actor, id, given, wanted).await
}

/// Deletes an archived job permanently.
#[utoipa::path(
    delete,
    path = "/api/v1/jobs/{id}",
    params(("id" = String, Path, description = "Id of the job"), ("dry_run" = Option<bool>, Query, description = "Change nothing")),
    responses((status = 200, description = "`outcome` and `message`"), (status = 404, body = ProblemDocument), (status = 409, body = ProblemDocument))
)]
pub(super) async fn delete(shared: Shared, actor: Actor, id: Id, given: Parameters) -> Result<Json<Outcome>, Problem> {
    change(shared, actor, id, given, Wanted::of(Change::Delete)).await
}

async fn change(State(web): Shared, actor: Actor, Id(id): Id, mut given: Parameters, wanted: Wanted) -> Result<Json<Outcome>, Problem> {
    let dry_run = given.flag("dry_run")?;
    given.end()?;
    let mut target = doc! { "job": id.to_string() };
    let (action, Wanted { change, with }) = (job_action(&wanted.change), wanted);
    target.extend(with);
    let store = web.store.clone();
    let changing = async move {
        let changed = store.control(dry_run).change(&change, &[id]).await?;
        let Some((job, changed)) = changed.into_iter().next() else { return Err(unknown(id)) };
        if let Changed::Refused(refusal) = &changed {
            return Err(if *refusal == Refusal::Unknown { unknown(id) } else { Problem::conflict(refusal) });
        }
        let outcome = Outcome::of(job, &changed, dry_run);
        let noted = noted(&outcome);
        Ok((Json(outcome), noted))
    };
    actor.wants(action, target, dry_run).by(&web, changing).await
}

/// Retries all jobs that match. Without `why` and `state`: all failed ones.
#[utoipa::path(
    post,
    path = "/api/v1/jobs/retry",
    params(
        FilterArgs,
        ("all" = Option<bool>, Query, description = "All jobs, in place of a filter"),
        ("dry_run" = Option<bool>, Query, description = "Only count them")
    ),
    request_body(content = Option<NewContent>),
    responses((status = 200, description = "`matched`, and `outcomes` with the number of each"), (status = 400, body = ProblemDocument))
)]
pub(super) async fn retry_all(shared: Shared, actor: Actor, given: Parameters, body: JsonText) -> Result<Json<Value>, Problem> {
    change_all(shared, actor, given, body.value::<NewContent>()?.wanted()?).await
}

/// Cancels all jobs that match.
#[utoipa::path(
    post,
    path = "/api/v1/jobs/cancel",
    params(
        FilterArgs,
        ("all" = Option<bool>, Query, description = "All jobs, in place of a filter"),
        ("dry_run" = Option<bool>, Query, description = "Only count them")
    ),
    responses((status = 200, description = "`matched`, and `outcomes` with the number of each"), (status = 400, body = ProblemDocument))
)]
pub(super) async fn cancel_all(shared: Shared, actor: Actor, given: Parameters) -> Result<Json<Value>, Problem> {
    change_all(shared, actor, given, Wanted::of(Change::Cancel)).await
}

/// Deletes all archived jobs that match, permanently.
#[utoipa::path(
    post,
    path = "/api/v1/jobs/delete",
    params(
        FilterArgs,
        ("all" = Option<bool>, Query, description = "All jobs, in place of a filter"),
        ("dry_run" = Option<bool>, Query, description = "Only count them")
    ),
    responses((status = 200, description = "`matched`, and `outcomes` with the number of each"), (status = 400, body = ProblemDocument))
)]
pub(super) async fn delete_all(shared: Shared, actor: Actor, given: Parameters) -> Result<Json<Value>, Problem> {
    change_all(shared, actor, given, Wanted::of(Change::Delete)).await
}

async fn change_all(State(web): Shared, actor: Actor, mut given: Parameters, wanted: Wanted) -> Result<Json<Value>, Problem> {
    let (dry_run, all) = (given.flag("dry_run")?, given.flag("all")?);
    let named = given.to_document();
    let filter = given.rest::<FilterArgs>()?.at(web.store.now());
    if all && !filter.is_empty() {
        return Err(Problem::bad("`all` cannot be combined with a filter, except `state`"));
    }
    if !all && filter.is_empty() && filter.state.is_none() {
        return Err(Problem::bad("name the jobs: by a filter, or with all=true"));
    }
    let (action, Wanted { change, with }) = (job_action(&wanted.change), wanted);
    let filter = filter.narrowed_to(&change).map_err(Problem::bad)?;
    let target = doc! { "filter": named, "all": all, "with": with };
    let store = web.store.clone();
    let changing = async move {
        let report = store.control(dry_run).change_all(&change, &filter, |_, _| ControlFlow::Continue(())).await?;
        let (matched, outcomes) = (report.matched(), json!(report.outcomes));
        let noted =
            doc! { "matched": i64::try_from(matched).unwrap_or(i64::MAX), "outcomes": json::to_bson(outcomes.clone()).unwrap_or_default() };
        Ok((Json(json!({ "matched": matched, "outcomes": outcomes, "dry_run": dry_run })), noted))
    };
    actor.wants(action, target, dry_run).by(&web, changing).await
}
