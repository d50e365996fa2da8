//! Puts, pauses, resumes, runs and removes schedules of periodic jobs.

use axum::{Json, extract::State};
use bson::{Document, doc};
use recruiter_common::{
    NewJob,
    schedules::{InvalidSchedule, Missed, Schedule},
    spec::{Classes, JobSpec, UnknownPolicies, duration_of_text},
    text::printable,
};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::{
    super::{
        Shared,
        audit::Actor,
        problem::{Problem, ProblemDocument},
        requests::{JsonText, Name, Parameters},
    },
    enqueue::{job_in, policies},
    settings::done,
};

/// A schedule, as in a file of `recruiter schedules apply`.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct NewSchedule {
    /// Minute, hour, day of month, month and day of week, for example `0 3 * * *`.
    cron: Option<String>,
    /// The time zone of `cron`, for example `Europe/Berlin`; UTC if it is not given.
    zone: Option<String>,
    /// In place of `cron`: the time between two runs, for example `30s`.
    every: Option<String>,
    /// Each run is late by up to this time.
    jitter: Option<String>,
    /// `allow`, or `skip`: no run while the last one is unfinished.
    overlap: Option<String>,
    /// What follows missed runs: `one`, `skip` or `all`.
    missed: Option<String>,
    /// With `all`: how many at most.
    missed_limit: Option<u16>,
    /// The namespace that may change the schedule.
    namespace: Option<String>,
    /// What each run enqueues: `class`, `parameters`, and its settings.
    #[schema(value_type = Object)]
    job: Option<JobSpec>,
}

impl NewSchedule {
    fn checked(self, name: &str, classes: &Classes, unknown: UnknownPolicies) -> Result<Schedule, Problem> {
        let duration = |text: &str| duration_of_text(text).map_err(Problem::impossible);
        let mut schedule = match (&self.cron, &self.every, &self.zone) {
            (Some(cron), None, zone) => Schedule::cron(cron, zone.as_deref().unwrap_or("UTC"))?,
            (None, Some(_), Some(_)) => {
                return Err(Problem::impossible("an interval has no `zone`: its runs are at its multiples in UTC"));
            }
            (None, Some(every), None) => Schedule::every(duration(every)?)?,
            (None, None, _) | (Some(_), Some(_), _) => return Err(InvalidSchedule::NoTiming.into()),
        };
        if let Some(jitter) = &self.jitter {
            schedule = schedule.jitter(duration(jitter)?);
        }
        if let Some(overlap) = &self.overlap {
            schedule = schedule.overlap(overlap.parse()?);
        }
        schedule = match (&self.missed, self.missed_limit) {
            (Some(word), limit) => schedule.missed(Missed::of_word(word, limit)?),
            (None, Some(_)) => return Err(InvalidSchedule::LimitWithoutAll.into()),
            (None, None) => schedule,
        };
        if let Some(namespace) = self.namespace {
            schedule = schedule.in_namespace(namespace);
        }
        let job = self.job.ok_or(InvalidSchedule::NoJob)?;
        // With an id of its own it is refused.
        let schedule = schedule.job(job_in(job.with_defaults(classes), unknown)?);
        schedule.check(name)?;
        Ok(schedule)
    }
}

/// Creates a schedule, or changes what is different. A paused one stays paused.
#[utoipa::path(
    put,
    path = "/api/v1/schedules/{name}",
    params(
        ("name" = String, Path, description = "Name of the schedule"),
        ("custom_policy" = Option<bool>, Query, description = "Accept a retry policy that only workers know"),
        ("dry_run" = Option<bool>, Query, description = "Change nothing")
    ),
    request_body(content = NewSchedule),
    responses(
        (status = 200, description = "`name` and `outcome`: `created`, `changed` or `unchanged`"),
        (status = 409, description = "It belongs to another namespace", body = ProblemDocument),
        (status = 422, body = ProblemDocument)
    )
)]
pub(super) async fn put_schedule(
    State(web): Shared,
    actor: Actor,
    Name(name): Name,
    mut given: Parameters,
    body: JsonText,
) -> Result<Json<Value>, Problem> {
    let (dry_run, unknown) = (given.flag("dry_run")?, policies(&mut given)?);
    given.end()?;
    let schedule = body.value::<NewSchedule>()?.checked(&name, &web.store.class_defaults().await?, unknown)?;
    let (class, _) = schedule.enqueues().map(NewJob::class_and_group).unwrap_or_default();
    let target = doc! { "schedule": &name, "timing": schedule.to_string(), "class": printable(class, 256) };
    let store = web.store.clone();
    let changing = async move {
        let schedules = store.schedules();
        let declared = if dry_run { schedules.compare(&name, &schedule).await? } else { schedules.declare(&name, &schedule).await? };
        Ok(done(&name, declared.word(), dry_run))
    };
    actor.wants("schedules.put", target, dry_run).by(&web, changing).await
}

/// Why a schedule is paused.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct NewSchedulePause {
    /// For the people who list it.
    reason: String,
}

/// Pauses a schedule: its runs are left out until it is resumed.
#[utoipa::path(
    post,
    path = "/api/v1/schedules/{name}/pause",
    params(("name" = String, Path, description = "Name of the schedule")),
    request_body(content = Option<NewSchedulePause>),
    responses((status = 200, description = "`name` and `outcome`: `paused` or `paused-before`"), (status = 404, body = ProblemDocument))
)]
pub(super) async fn pause_schedule(
    State(web): Shared,
    actor: Actor,
    Name(name): Name,
    given: Parameters,
    body: JsonText,
) -> Result<Json<Value>, Problem> {
    given.end()?;
    let NewSchedulePause { reason } = body.value()?;
    let (store, by) = (web.store.clone(), actor.name());
    let mut target = of(&name);
    target.insert("reason", printable(&reason, 4_000));
    let changing = async move {
        let is_new = store.schedules().pause(&name, &by, &reason).await?;
        Ok(done(&name, if is_new { "paused" } else { "paused-before" }, false))
    };
    actor.wants("schedules.pause", target, false).by(&web, changing).await
}

/// Resumes a paused schedule with its next run.
#[utoipa::path(
    post,
    path = "/api/v1/schedules/{name}/resume",
    params(("name" = String, Path, description = "Name of the schedule")),
    responses((status = 200, description = "`name` and `outcome`: `resumed` or `not-paused`"), (status = 404, body = ProblemDocument))
)]
pub(super) async fn resume_schedule(State(web): Shared, actor: Actor, Name(name): Name, given: Parameters) -> Result<Json<Value>, Problem> {
    given.end()?;
    let (store, target) = (web.store.clone(), of(&name));
    let changing = async move {
        let was_paused = store.schedules().resume(&name).await?;
        Ok(done(&name, if was_paused { "resumed" } else { "not-paused" }, false))
    };
    actor.wants("schedules.resume", target, false).by(&web, changing).await
}

/// Runs a schedule once, now.
#[utoipa::path(
    post,
    path = "/api/v1/schedules/{name}/run",
    params(("name" = String, Path, description = "Name of the schedule")),
    responses((status = 200, description = "`id` of the job"), (status = 404, body = ProblemDocument))
)]
pub(super) async fn run_schedule(State(web): Shared, actor: Actor, Name(name): Name, given: Parameters) -> Result<Json<Value>, Problem> {
    given.end()?;
    let (store, target) = (web.store.clone(), of(&name));
    let changing = async move {
        let id = store.schedules().run_now(&name).await?.to_string();
        Ok((Json(json!({ "id": id })), doc! { "outcome": "enqueued", "new_id": &id }))
    };
    actor.wants("schedules.run", target, false).by(&web, changing).await
}

/// Removes a schedule; jobs that it has enqueued stay.
#[utoipa::path(
    delete,
    path = "/api/v1/schedules/{name}",
    params(("name" = String, Path, description = "Name of the schedule"), ("dry_run" = Option<bool>, Query, description = "Change nothing")),
    responses((status = 200, description = "`name` and `outcome`"), (status = 404, body = ProblemDocument))
)]
pub(super) async fn remove_schedule(
    State(web): Shared,
    actor: Actor,
    Name(name): Name,
    mut given: Parameters,
) -> Result<Json<Value>, Problem> {
    let dry_run = given.flag("dry_run")?;
    given.end()?;
    let (store, target) = (web.store.clone(), of(&name));
    let changing = async move {
        let schedules = store.schedules();
        let is_there = schedules.list().await?.iter().any(|(other, _)| *other == name);
        if !is_there || !(dry_run || schedules.remove(&name, None).await?) {
            return Err(Problem::not_found(format!("there is no schedule `{}`", printable(&name, 256))));
        }
        Ok(done(&name, "removed", dry_run))
    };
    actor.wants("schedules.remove", target, dry_run).by(&web, changing).await
}

fn of(name: &str) -> Document {
    doc! { "schedule": name }
}

impl From<InvalidSchedule> for Problem {
    fn from(error: InvalidSchedule) -> Self {
        Self::impossible(error)
    }
}
