//! Retries, changes, cancels and deletes jobs: one by its id, some, or all that match.

use axum::{Json, extract::State};
use recruiter_common::control::Change;
use serde_json::{Value, json};

use super::super::{
    Shared,
    audit::Actor,
    changes::{self, Many, NewContent, NewValues, Wanted, change_many},
    problem::{Problem, ProblemDocument},
    requests::{Id, JsonText, Parameters},
};
use crate::views::{filter::FilterArgs, outcome::Outcome};

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
    let changed = changes::change(&web, actor, id, wanted, dry_run).await?;
    Ok(Json(Outcome::of(id, &changed, dry_run)))
}

/// Retries all jobs that match, or some. Without `why` and `state`: all failed ones.
#[utoipa::path(
    post,
    path = "/api/v1/jobs/retry",
    params(
        FilterArgs,
        ("id" = Option<Vec<String>>, Query, description = "These jobs, in place of a filter"),
        ("all" = Option<bool>, Query, description = "All jobs, in place of a filter"),
        ("dry_run" = Option<bool>, Query, description = "Only count them")
    ),
    request_body(content = Option<NewContent>),
    responses((status = 200, description = "`matched`, and `outcomes` with the number of each"), (status = 400, body = ProblemDocument))
)]
pub(super) async fn retry_all(shared: Shared, actor: Actor, given: Parameters, body: JsonText) -> Result<Json<Value>, Problem> {
    change_all(shared, actor, given, body.value::<NewContent>()?.wanted()?).await
}

/// Cancels all jobs that match, or some.
#[utoipa::path(
    post,
    path = "/api/v1/jobs/cancel",
    params(
        FilterArgs,
        ("id" = Option<Vec<String>>, Query, description = "These jobs, in place of a filter"),
        ("all" = Option<bool>, Query, description = "All jobs, in place of a filter"),
        ("dry_run" = Option<bool>, Query, description = "Only count them")
    ),
    responses((status = 200, description = "`matched`, and `outcomes` with the number of each"), (status = 400, body = ProblemDocument))
)]
pub(super) async fn cancel_all(shared: Shared, actor: Actor, given: Parameters) -> Result<Json<Value>, Problem> {
    change_all(shared, actor, given, Wanted::of(Change::Cancel)).await
}

/// Deletes all archived jobs that match, or some, permanently.
#[utoipa::path(
    post,
    path = "/api/v1/jobs/delete",
    params(
        FilterArgs,
        ("id" = Option<Vec<String>>, Query, description = "These jobs, in place of a filter"),
        ("all" = Option<bool>, Query, description = "All jobs, in place of a filter"),
        ("dry_run" = Option<bool>, Query, description = "Only count them")
    ),
    responses((status = 200, description = "`matched`, and `outcomes` with the number of each"), (status = 400, body = ProblemDocument))
)]
pub(super) async fn delete_all(shared: Shared, actor: Actor, given: Parameters) -> Result<Json<Value>, Problem> {
    change_all(shared, actor, given, Wanted::of(Change::Delete)).await
}

async fn change_all(State(web): Shared, actor: Actor, mut given: Parameters, wanted: Wanted) -> Result<Json<Value>, Problem> {
    let dry_run = given.flag("dry_run")?;
    let many = Many::of(given, &wanted.change, web.store.now())?;
    let report = change_many(&web, actor, many, wanted, dry_run, None).await?;
    Ok(Json(json!({ "matched": report.matched(), "outcomes": report.outcomes, "dry_run": dry_run })))
}
