//! Reads numbers, settings, workers and graphs, as the commands do.

use std::time::Duration;

use axum::{Json, extract::State};
use recruiter_common::{schedules::ScheduleError, spec::duration_of_text, telemetry::chain};
use serde_json::{Value, json};

use super::super::{
    Shared,
    problem::{Problem, ProblemDocument},
    requests::{Graph, Name, Parameters},
};
use crate::views::{
    graph::{Listed, unknown},
    groups::Group,
    limits::{ListedLimit, ListedPause, ShownLimit, pauses},
    schedules,
    stats::Statistics,
    workers,
};

/// A due job that has not started for this long is overdue.
const OVERDUE_AFTER: Duration = Duration::from_secs(60);

/// Numbers of jobs by group and in total, throughput, latency, and why jobs wait.
#[utoipa::path(
    get,
    path = "/api/v1/stats",
    params(("overdue_after" = Option<String>, Query, description = "Time after which a due job that has not started counts as overdue; `1m` if it is not given")),
    responses((status = 200, description = "As `recruiter stats --json`"), (status = 400, body = ProblemDocument))
)]
pub(super) async fn stats(State(web): Shared, mut given: Parameters) -> Result<Json<Statistics>, Problem> {
    let overdue_after = given.take("overdue_after", |text| duration_of_text(text).map_err(|problem| problem.to_string()))?;
    given.end()?;
    Ok(Json(Statistics::read(&web.store, overdue_after.unwrap_or(OVERDUE_AFTER)).await?))
}

/// The groups that have settings, with the number of waiting jobs.
#[utoipa::path(
    get,
    path = "/api/v1/groups",
    responses((status = 200, description = "`groups`, and `invalid` with the ids of documents that are no settings"))
)]
pub(super) async fn groups(State(web): Shared, given: Parameters) -> Result<Json<Value>, Problem> {
    given.end()?;
    let (groups, invalid) = Group::all_counted(&web.store).await?;
    Ok(Json(json!({ "groups": groups, "invalid": invalid })))
}

/// The limits of resources and groups, with the number of permits in use.
#[utoipa::path(
    get,
    path = "/api/v1/limits",
    responses((status = 200, description = "`limits`, and `invalid` with the ids of documents that are no limits"))
)]
pub(super) async fn limits(State(web): Shared, given: Parameters) -> Result<Json<Value>, Problem> {
    given.end()?;
    let (limits, invalid) = ListedLimit::all(&web.store).await?;
    Ok(Json(json!({ "limits": limits, "invalid": invalid })))
}

/// A limit, with the workers and jobs that hold its permits, and the number of jobs that wait. A resource may have none: `is_defined`.
#[utoipa::path(
    get,
    path = "/api/v1/limits/{name}",
    params(("name" = String, Path, description = "Name of the resource, or `@` and a group")),
    responses((status = 200, description = "As `recruiter limits show --json`"))
)]
pub(super) async fn limit(State(web): Shared, Name(name): Name, given: Parameters) -> Result<Json<ListedLimit>, Problem> {
    given.end()?;
    Ok(Json(ShownLimit::read(&web.store, &name).await?.to_view(&web.store).await?))
}

/// What is paused, by whom and why.
#[utoipa::path(
    get,
    path = "/api/v1/pauses",
    responses((status = 200, description = "`pauses`, and `invalid` with the ids of documents that pause nothing"))
)]
pub(super) async fn paused(State(web): Shared, given: Parameters) -> Result<Json<Value>, Problem> {
    given.end()?;
    let (pauses, invalid) = pauses(&web.store).await?;
    Ok(Json(json!({ "pauses": pauses.into_iter().map(ListedPause::of).collect::<Vec<_>>(), "invalid": invalid })))
}

/// The schedules of periodic jobs, with their next and last runs.
#[utoipa::path(get, path = "/api/v1/schedules", responses((status = 200, description = "`schedules`")))]
pub(super) async fn list_schedules(State(web): Shared, given: Parameters) -> Result<Json<Value>, Problem> {
    given.end()?;
    let (redaction, now) = (web.store.redaction().await?, web.store.now());
    let mut shown = Vec::new();
    for (name, mut schedule) in web.store.schedules().list().await? {
        if let Ok(schedule) = &mut schedule {
            schedules::redact(schedule, &redaction);
        }
        shown.push(schedules::to_json(&name, schedule.as_ref(), now));
    }
    Ok(Json(json!({ "schedules": shown })))
}

/// A schedule, its next runs and its last ones.
#[utoipa::path(
    get,
    path = "/api/v1/schedules/{name}",
    params(("name" = String, Path, description = "Name of the schedule")),
    responses((status = 200, description = "As `recruiter schedules show --json`"), (status = 404, body = ProblemDocument))
)]
pub(super) async fn schedule(State(web): Shared, Name(name): Name, given: Parameters) -> Result<Json<Value>, Problem> {
    given.end()?;
    let redaction = web.store.redaction().await?;
    let shown = match web.store.schedules().find(&name).await {
        Ok(mut found) => {
            schedules::redact(&mut found, &redaction);
            schedules::to_json(&name, Ok(&found), web.store.now())
        }
        Err(ScheduleError::Corrupt { problem, .. }) => schedules::to_json(&name, Err(&problem), web.store.now()),
        Err(error) => return Err(error.into()),
    };
    Ok(Json(shown))
}

/// The workers in the roster, and the leading recruiter.
#[utoipa::path(
    get,
    path = "/api/v1/workers",
    responses((status = 200, description = "`workers` as `recruiter roster --json`, and `leader`: where it runs, or null"))
)]
pub(super) async fn list_workers(State(web): Shared, given: Parameters) -> Result<Json<Value>, Problem> {
    given.end()?;
    let (found, leader) = (web.store.workers().list().await?, web.store.leader().await?);
    let shown: Vec<Value> = found.0.iter().map(workers::to_json).collect();
    Ok(Json(json!({ "workers": shown, "leader": leader.holder() })))
}

/// The jobs of a graph with their states.
#[utoipa::path(
    get,
    path = "/api/v1/graphs/{id}",
    params(("id" = String, Path, description = "Id of the graph")),
    responses((status = 200, description = "`id`, and `jobs` as `recruiter graph show --json`"), (status = 404, body = ProblemDocument))
)]
pub(super) async fn graph(State(web): Shared, Graph(id): Graph, given: Parameters) -> Result<Json<Value>, Problem> {
    given.end()?;
    let (jobs, redaction) = (web.store.graph(id).await?, web.store.redaction().await?);
    if jobs.is_empty() {
        return Err(Problem::not_found(unknown(id)));
    }
    let jobs: Vec<Listed> = jobs.into_iter().map(|job| Listed::of(job, &redaction)).collect();
    Ok(Json(json!({ "id": id.to_string(), "jobs": jobs })))
}

impl From<ScheduleError> for Problem {
    fn from(error: ScheduleError) -> Self {
        match error {
            ScheduleError::Store(error) => error.into(),
            ScheduleError::Unknown { .. } => Self::not_found(error),
            ScheduleError::Owned { .. } | ScheduleError::KeepsChanging { .. } => Self::conflict(error),
            ScheduleError::Enqueue { source, .. } => source.into(),
            other @ (ScheduleError::Invalid(_) | ScheduleError::Corrupt { .. } | ScheduleError::NotSetUp { .. } | _) => {
                Self::impossible(chain(&other))
            }
        }
    }
}
