//! Work by HTTP: reserve jobs, extend and note, and commit or roll back.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant as Monotonic},
};

use axum::{
    Json,
    extract::{Path, State},
};
use recruiter_common::{failure::Failure, instant::later, json, spec::duration_of_text};
use recruiter_worker::{Cancellation, Context, HandedJob, JobProgress, NotDone, bson::Bson};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::super::{
    Shared,
    problem::{Problem, ProblemDocument},
    requests::JsonText,
    work::{Contract, Ended, Reserved},
};
use crate::views::extended;

/// The most jobs of one request.
const MOST: u32 = 100;
/// The shortest wait of one request: a job is assigned only while a client waits.
const SHORTEST_WAIT: Duration = Duration::from_secs(1);
/// The longest wait of one request. Proxies end longer ones.
const LONGEST_WAIT: Duration = Duration::from_secs(50);
const WAIT: Duration = Duration::from_secs(20);
const LEASE: Duration = Duration::from_secs(60);
const LONGEST_LEASE: Duration = Duration::from_secs(24 * 3600);

/// Which jobs a client takes.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Wanted {
    /// Jobs of these classes: at least one.
    classes: BTreeSet<String>,
    /// In these groups; in all groups if none is named.
    groups: BTreeSet<String>,
    /// At most so many jobs, from 1 to 100; 1 if it is not given. Several come if they are there at the same time.
    most: Option<u32>,
    /// How long to wait for a job, for example `30s`, from `1s` to `50s`; `20s` if it is not given.
    wait: Option<String>,
    /// How long the jobs are the client's, for example `5m`, from `1s` to `1d`; `60s` if it is not given.
    lease: Option<String>,
}

/// For how long a job is the client's from now on.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct NewLease {
    /// For example `5m`, from `1s` to `1d`; `60s` if it is not given.
    lease: Option<String>,
}

/// What a client notes about a job that it has.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Notes {
    /// From 0 to 100.
    percent: Option<f64>,
    /// How many are done, together with `of`.
    done: Option<u64>,
    /// Of how many.
    of: Option<u64>,
    /// One sentence about the progress, for people.
    text: Option<String>,
    /// Lines for the log of the job.
    log: Option<String>,
    /// Kept for the next attempt; `null` removes it.
    #[serde(deserialize_with = "also_null")]
    checkpoint: Option<Value>,
}

/// What is given, if it is only null.
fn also_null<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(from).map(Some)
}

/// The result of a job that is done.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Commit {
    /// Kept in the archive.
    result: Value,
}

/// Why a job is not done.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Rollback {
    /// The class of the error, by which retry policies select; `error` if it is not given.
    class: Option<String>,
    /// One sentence for people.
    message: String,
    /// Details for finding the cause.
    trace: Option<String>,
    /// The time until the next attempt, in place of that of the retry policy, for example `10m`.
    delay: Option<String>,
    /// Another attempt is pointless.
    give_up: bool,
    /// In place of a failure: the job runs again after this time, and no attempt is counted.
    snooze: Option<String>,
    /// With `snooze`: how often the job may be snoozed with this class; the next time is a failure.
    at_most: Option<u32>,
}

/// Waits for jobs, and reserves them for the client until the end of their leases. An empty list says that none came in time.
#[utoipa::path(
    post,
    path = "/api/v1/work/reserve",
    request_body(content = Wanted),
    responses((status = 200, description = "`jobs`, each with `reservation`, `id`, `class`, `parameters`, `attempt` and more"), (status = 422, body = ProblemDocument))
)]
pub(super) async fn reserve(State(web): Shared, body: JsonText) -> Result<Json<Value>, Problem> {
    let Wanted { classes, groups, most, wait, lease } = body.value()?;
    if classes.is_empty() {
        return Err(Problem::impossible("`classes` must name at least one class"));
    }
    let most = most.unwrap_or(1);
    if !(1..=MOST).contains(&most) {
        return Err(Problem::impossible(format!("`most` is from 1 to {MOST}")));
    }
    let wait = duration("wait", wait.as_deref())?.unwrap_or(WAIT).clamp(SHORTEST_WAIT, LONGEST_WAIT);
    let lease = lease_of(lease.as_deref())?;
    let reserved = web.work.reserve(Contract { classes, groups }, most, wait, lease).await?;
    let mut jobs = Vec::with_capacity(reserved.len());
    for Reserved { id, until, inputs } in reserved {
        let until = later(web.store.now(), until.saturating_duration_since(Monotonic::now()));
        // Unless its lease is over.
        if let Ok(mut job) = web.work.reservations.with(&id, |job, _| describe(job)) {
            job["inputs"] = inputs.into_iter().map(extended).collect();
            job["reservation"] = json!(id);
            job["lease_until"] = extended(Bson::DateTime(bson::DateTime::from_chrono(until)));
            jobs.push(job);
        }
    }
    Ok(Json(json!({ "jobs": jobs })))
}

/// What a client gets of a job. Parameters are not redacted: it executes the job.
fn describe(job: &HandedJob) -> Value {
    let context = job.context();
    let checkpoint = context.last_checkpoint::<Bson>().ok().flatten();
    json!({
        "id": context.job_id().to_string(),
        "class": context.class(),
        "group": context.group(),
        "parameters": extended(job.parameters().clone()),
        "attempt": context.attempt(),
        "is_last_attempt": context.is_last_attempt(),
        "tags": context.tags(),
        "urn": context.urn(),
        "traceparent": context.traceparent(),
        "checkpoint": checkpoint.map_or(Value::Null, extended),
        "item": context.item().map(|item| json!({ "index": item.index, "of": item.of })),
    })
}

/// Extends the lease of a job, and tells whether the client should stop: a job is cancelled, or the worker stops.
#[utoipa::path(
    post,
    path = "/api/v1/work/{reservation}/extend",
    params(("reservation" = String, Path, description = "As `reserve` has answered it")),
    request_body(content = Option<NewLease>),
    responses((status = 200, description = "`lease_until`, and `stop` with a reason, or null"), (status = 410, description = "The job is no longer the client's", body = ProblemDocument))
)]
pub(super) async fn extend(State(web): Shared, Path(id): Path<String>, body: JsonText) -> Result<Json<Value>, Problem> {
    let NewLease { lease } = body.value()?;
    let lease = lease_of(lease.as_deref())?;
    let stop = web.work.reservations.with(&id, |job, until| {
        *until = Monotonic::now() + lease;
        reason_to_stop(job.context())
    })?;
    let until = extended(Bson::DateTime(bson::DateTime::from_chrono(later(web.store.now(), lease))));
    Ok(Json(json!({ "lease_until": until, "stop": stop })))
}

/// Notes progress, lines of the log, or a checkpoint. Does not extend the lease.
#[utoipa::path(
    post,
    path = "/api/v1/work/{reservation}/notes",
    params(("reservation" = String, Path, description = "As `reserve` has answered it")),
    request_body(content = Notes),
    responses((status = 200, description = "`stop` with a reason, or null"), (status = 410, description = "The job is no longer the client's", body = ProblemDocument))
)]
pub(super) async fn notes(State(web): Shared, Path(id): Path<String>, body: JsonText) -> Result<Json<Value>, Problem> {
    let Notes { percent, done, of, text, log, checkpoint } = body.value()?;
    let progress = match (done, of, percent) {
        (Some(done), Some(of), None) => Some(JobProgress::from((done, of))),
        (None, None, Some(percent)) => Some(JobProgress::from(percent)),
        (None, None, None) => text.is_some().then(JobProgress::default),
        _ => return Err(Problem::impossible("give `percent`, or `done` and `of`")),
    };
    let progress = progress.map(|progress| text.iter().fold(progress, |progress, text| progress.text(text)));
    let checkpoint = checkpoint.map(json::to_bson).transpose().map_err(Problem::impossible)?;
    let stop = web.work.reservations.note(&id, |job| {
        progress.into_iter().for_each(|progress| job.progress(progress));
        log.iter().for_each(|log| job.log(log));
        checkpoint.map_or(Ok(()), |checkpoint| job.checkpoint(checkpoint)).map(|()| reason_to_stop(job))
    })?;
    Ok(Json(json!({ "stop": stop.map_err(Problem::impossible)? })))
}

/// Ends a job as done. Answers when the end is recorded. The request may be repeated.
#[utoipa::path(
    post,
    path = "/api/v1/work/{reservation}/commit",
    params(("reservation" = String, Path, description = "As `reserve` has answered it")),
    request_body(content = Option<Commit>),
    responses((status = 200, description = "`recorded` is true"), (status = 410, description = "The job is no longer the client's", body = ProblemDocument))
)]
pub(super) async fn commit(State(web): Shared, Path(id): Path<String>, body: JsonText) -> Result<Json<Value>, Problem> {
    let Commit { result } = body.value()?;
    let result = json::to_bson(result).map_err(Problem::impossible)?;
    web.work.reservations.end(&id, Ended::Committed, Ok(result)).await?;
    Ok(Json(json!({ "recorded": true })))
}

/// Ends a job as not done: its retry policy decides what follows. Answers when the end is recorded. The request may be repeated.
#[utoipa::path(
    post,
    path = "/api/v1/work/{reservation}/rollback",
    params(("reservation" = String, Path, description = "As `reserve` has answered it")),
    request_body(content = Option<Rollback>),
    responses((status = 200, description = "`recorded` is true"), (status = 410, description = "The job is no longer the client's", body = ProblemDocument))
)]
pub(super) async fn rollback(State(web): Shared, Path(id): Path<String>, body: JsonText) -> Result<Json<Value>, Problem> {
    let Rollback { class, message, trace, delay, give_up, snooze, at_most } = body.value()?;
    let (delay, snooze) = (duration("delay", delay.as_deref())?, duration("snooze", snooze.as_deref())?);
    if snooze.is_some() && (give_up || delay.is_some()) {
        return Err(Problem::impossible("`snooze` excludes `give_up` and `delay`"));
    }
    if at_most.is_some() && snooze.is_none() {
        return Err(Problem::impossible("`at_most` is for `snooze`"));
    }
    let failure = Failure { trace, ..Failure::new(class.unwrap_or_else(|| "error".into()), message) };
    let not_done = match snooze {
        Some(after) => NotDone::Snooze { after: Some(after), reason: failure, at_most },
        None if give_up => NotDone::GiveUp(failure),
        None => NotDone::Failed(failure),
    };
    if let Some(delay) = delay {
        // Of a job that has been ended, the end decides whether this is the same request again.
        let _ = web.work.reservations.note(&id, |job| job.retry_after(delay));
    }
    web.work.reservations.end(&id, Ended::RolledBack, Err(not_done)).await?;
    Ok(Json(json!({ "recorded": true })))
}

/// Why a client should stop, in a word.
fn reason_to_stop(job: &Context) -> Option<&'static str> {
    job.cancellation().map(|why| match why {
        Cancellation::Requested => "cancelled",
        Cancellation::TimeLimit => "time-limit",
        Cancellation::WorkerStopping | Cancellation::MemoryLimit => "worker-stopping",
        Cancellation::ClaimLost | _ => "lost",
    })
}

fn lease_of(text: Option<&str>) -> Result<Duration, Problem> {
    let lease = duration("lease", text)?.unwrap_or(LEASE);
    if lease < Duration::from_secs(1) || lease > LONGEST_LEASE {
        return Err(Problem::impossible("`lease` is from 1s to 1d"));
    }
    Ok(lease)
}

fn duration(field: &str, text: Option<&str>) -> Result<Option<Duration>, Problem> {
    text.map(duration_of_text).transpose().map_err(|problem| Problem::impossible(format!("`{field}`: {problem}")))
}
