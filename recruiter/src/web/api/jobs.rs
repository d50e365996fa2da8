//! Reads jobs, and waits for them. What is redacted stays so.

use std::time::Duration;

use axum::{
    Json,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use recruiter_common::{
    JobId, Page, ResultError, Why,
    job::Job,
    spec::{duration_of_text, id_of_text},
    store::lossy,
    wait::WaitError,
};
use serde_json::{Value, json};

use super::super::{
    Shared,
    changes::unknown,
    problem::{Problem, ProblemDocument},
    requests::{Id, Parameters},
};
use crate::views::{
    extended,
    filter::FilterArgs,
    job::{End, Read, last_of_chain, to_json, why_to_document},
};

/// The shortest and the longest wait of one request. Proxies end longer ones.
const SHORTEST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(50);

/// Lists jobs, newest first.
#[utoipa::path(
    get,
    path = "/api/v1/jobs",
    params(
        FilterArgs,
        ("limit" = Option<u16>, Query, description = "Maximum number of jobs, from 1 to 1000; 20 if it is not given"),
        ("after" = Option<String>, Query, description = "Continue after this job: `next` of the page before"),
    ),
    responses((status = 200, description = "`jobs`, and `next` if more jobs match"), (status = 400, body = ProblemDocument))
)]
pub(super) async fn list(State(web): Shared, mut given: Parameters) -> Result<Json<Value>, Problem> {
    let mut page = Page::first(given.page_limit()?);
    page.after = given.take("after", |text| id_of_text(text).map_err(|problem| problem.to_string()))?;
    page.whole = true;
    let now = web.store.now();
    let filter = given.rest::<FilterArgs>()?.at(now);
    filter.check().map_err(Problem::bad)?;
    let listed = web.store.jobs(&filter, page).await.map_err(Problem::of_search)?;
    let redaction = web.store.redaction().await?;
    let last = listed.jobs.last().and_then(|job| job.get_object_id("_id").ok());
    let next = last.filter(|_| listed.more).map(|id| id.to_hex());
    let jobs: Vec<Value> = listed.jobs.into_iter().map(|job| to_json(&redaction.job(job).try_into(), now)).collect();
    Ok(Json(json!({ "jobs": jobs, "next": next })))
}

/// A job with its history. `held` says why a waiting job is not started.
#[utoipa::path(
    get,
    path = "/api/v1/jobs/{id}",
    params(("id" = String, Path, description = "Id of the job")),
    responses((status = 200, description = "The job"), (status = 404, body = ProblemDocument))
)]
pub(super) async fn show(State(web): Shared, Id(id): Id, given: Parameters) -> Result<Json<Value>, Problem> {
    given.end()?;
    let stored = web.store.job(id).await?.ok_or_else(|| unknown(id))?;
    let held = web.store.why(id).await?.filter(Why::is_waiting);
    let job: Read = Job::try_from(web.store.redaction().await?.job(stored.document));
    let mut shown = to_json(&job, web.store.now());
    shown["held"] = held.as_ref().map(why_to_document).map_or(Value::Null, extended);
    Ok(Json(shown))
}

/// Why a job is not running, and what to do about it.
#[utoipa::path(
    get,
    path = "/api/v1/jobs/{id}/why",
    params(("id" = String, Path, description = "Id of the job")),
    responses((status = 200, description = "`reason`, `text` and `until`"), (status = 404, body = ProblemDocument))
)]
pub(super) async fn why(State(web): Shared, Id(id): Id, given: Parameters) -> Result<Json<Value>, Problem> {
    given.end()?;
    let why = web.store.why(id).await?.ok_or_else(|| unknown(id))?;
    Ok(Json(extended(why_to_document(&why))))
}

/// Waits until a job has ended, and answers its result or its failure. Of a job that continued as another one: those of the last.
#[utoipa::path(
    get,
    path = "/api/v1/jobs/{id}/end",
    params(
        ("id" = String, Path, description = "Id of the job"),
        ("timeout" = Option<String>, Query, description = "How long to wait, for example `20s`, from `1s` to `50s`; `1s` if it is not given"),
    ),
    responses(
        (status = 200, description = "It has ended: `state`, `why`, and `result` or `failure`"),
        (status = 202, description = "It has not ended yet: repeat the request"),
        (status = 404, body = ProblemDocument)
    )
)]
pub(super) async fn end(State(web): Shared, Id(id): Id, mut given: Parameters) -> Result<Response, Problem> {
    let timeout = given.take("timeout", |text| duration_of_text(text).map_err(|problem| problem.to_string()))?.unwrap_or_default();
    given.end()?;
    let ended = tokio::select! {
        ended = last_of_chain(&web.store, id, timeout.clamp(SHORTEST_WAIT, LONGEST_WAIT)) => ended,
        // The client repeats the request, to the next process.
        () = web.stop.cancelled() => return Ok(not_ended(id)),
    };
    match ended {
        Ok((id, stored)) => {
            let shown = web.store.redaction().await?.job(stored.document);
            Ok(Json(extended(End::of(id, &lossy(&shown)).to_document())).into_response())
        }
        Err(WaitError::NotKept { .. }) => Ok(Json(extended(End::not_kept(id))).into_response()),
        Err(WaitError::TimedOut { job, .. }) => Ok(not_ended(job)),
        Err(gone @ WaitError::Unknown { .. }) => Err(Problem::not_found(gone)),
        Err(WaitError::Result(ResultError::Store(error))) => Err(error.into()),
        Err(other) => Err(Problem::new(StatusCode::INTERNAL_SERVER_ERROR, other)),
    }
}

fn not_ended(job: JobId) -> Response {
    (StatusCode::ACCEPTED, Json(json!({ "id": job.to_string(), "state": Value::Null }))).into_response()
}
