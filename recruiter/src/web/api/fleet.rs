//! Quiets, resumes and stops workers; cancels and retries graphs.

use axum::{Json, extract::State};
use bson::{Document, doc};
use recruiter_common::{
    GraphId, JobId, WorkerId,
    control::Changed,
    text::printable,
    workers::{Chosen, WorkerChange},
};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::super::{
    Shared,
    audit::{Actor, counted, worker_action},
    problem::{Problem, ProblemDocument},
    requests::{Graph, JsonText, Parameters},
};
use crate::views::{
    graph::{nothing_changed, unknown},
    outcome::Outcome,
    workers,
};

/// Maximum number of workers that a request names by their ids.
const MOST_IDS: usize = 1_000;

/// The workers that a request is for: `ids`, `host` or `all`.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct ChosenWorkers {
    /// Ids of workers.
    ids: Vec<String>,
    /// All workers on the machine with this name.
    host: Option<String>,
    /// All workers.
    all: bool,
}

impl ChosenWorkers {
    fn checked(self) -> Result<(Chosen, Document), Problem> {
        let Self { ids, host, all } = self;
        if ids.len() > MOST_IDS {
            return Err(Problem::impossible(format!("{} ids are too many: {MOST_IDS} is the limit", ids.len())));
        }
        match (ids.is_empty(), host, all) {
            (false, None, false) => {
                let parsed = ids.iter().map(|text| worker_of_text(text)).collect::<Result<Vec<_>, _>>()?;
                Ok((Chosen::Ids(parsed), doc! { "ids": ids }))
            }
            (true, Some(host), false) => Ok((Chosen::Host(host.clone()), doc! { "host": printable(&host, 256) })),
            (true, None, true) => Ok((Chosen::All, doc! { "all": true })),
            (true, None, false) => Err(Problem::impossible("name the workers: by `ids`, by `host`, or by `all`")),
            _ => Err(Problem::impossible("`ids`, `host` and `all` cannot be combined; use one of them")),
        }
    }
}

fn worker_of_text(text: &str) -> Result<WorkerId, Problem> {
    let problem = || Problem::impossible(format!("`{text:.80}` is not the id of a worker (24 hexadecimal digits)"));
    text.parse().map_err(|_| problem())
}

/// Lets workers take no more jobs until a resume: running jobs continue.
#[utoipa::path(
    post,
    path = "/api/v1/workers/quiet",
    params(("dry_run" = Option<bool>, Query, description = "Change nothing")),
    request_body(content = ChosenWorkers),
    responses((status = 200, description = "`outcomes`, one for each worker"), (status = 404, body = ProblemDocument))
)]
pub(super) async fn quiet_workers(shared: Shared, actor: Actor, given: Parameters, body: JsonText) -> Result<Json<Value>, Problem> {
    change_workers(shared, actor, given, body, WorkerChange::Quiet).await
}

/// Lets quiet workers take jobs again.
#[utoipa::path(
    post,
    path = "/api/v1/workers/resume",
    params(("dry_run" = Option<bool>, Query, description = "Change nothing")),
    request_body(content = ChosenWorkers),
    responses((status = 200, description = "`outcomes`, one for each worker"), (status = 404, body = ProblemDocument))
)]
pub(super) async fn resume_workers(shared: Shared, actor: Actor, given: Parameters, body: JsonText) -> Result<Json<Value>, Problem> {
    change_workers(shared, actor, given, body, WorkerChange::Resume).await
}

/// Lets workers drain as after TERM, and end.
#[utoipa::path(
    post,
    path = "/api/v1/workers/stop",
    params(("dry_run" = Option<bool>, Query, description = "Change nothing")),
    request_body(content = ChosenWorkers),
    responses((status = 200, description = "`outcomes`, one for each worker"), (status = 404, body = ProblemDocument))
)]
pub(super) async fn stop_workers(shared: Shared, actor: Actor, given: Parameters, body: JsonText) -> Result<Json<Value>, Problem> {
    change_workers(shared, actor, given, body, WorkerChange::Stop).await
}

async fn change_workers(
    State(web): Shared,
    actor: Actor,
    mut given: Parameters,
    body: JsonText,
    change: WorkerChange,
) -> Result<Json<Value>, Problem> {
    let dry_run = given.flag("dry_run")?;
    given.end()?;
    let (chosen, target) = body.value::<ChosenWorkers>()?.checked()?;
    let (store, by) = (web.store.clone(), actor.name());
    let changing = async move {
        let answers = store.workers().change(change, &chosen, &by, dry_run).await?;
        if let (true, Chosen::Host(host)) = (answers.is_empty(), &chosen) {
            return Err(Problem::not_found(format!("the roster has no worker on the host `{}`", printable(host, 80))));
        }
        let noted = counted(answers.iter().map(|answer| answer.asked.word()));
        let outcomes: Vec<Outcome> = answers.iter().map(|answer| workers::outcome(change, answer, dry_run)).collect();
        Ok((Json(json!({ "outcomes": outcomes, "dry_run": dry_run })), noted))
    };
    actor.wants(worker_action(change), target, dry_run).by(&web, changing).await
}

/// Cancels all jobs of a graph that are not finished.
#[utoipa::path(
    post,
    path = "/api/v1/graphs/{id}/cancel",
    params(("id" = String, Path, description = "Id of the graph"), ("dry_run" = Option<bool>, Query, description = "Change nothing")),
    responses((status = 200, description = "`jobs` with the outcome of each"), (status = 404, body = ProblemDocument))
)]
pub(super) async fn cancel_graph(shared: Shared, actor: Actor, id: Graph, given: Parameters) -> Result<Json<Value>, Problem> {
    change_graph(shared, actor, id, given, true).await
}

/// Enqueues again the jobs of a graph that failed or were cancelled, with edges between the new jobs.
#[utoipa::path(
    post,
    path = "/api/v1/graphs/{id}/retry",
    params(("id" = String, Path, description = "Id of the graph"), ("dry_run" = Option<bool>, Query, description = "Change nothing")),
    responses((status = 200, description = "`jobs` with the outcome and the `new_id` of each"), (status = 404, body = ProblemDocument))
)]
pub(super) async fn retry_graph(shared: Shared, actor: Actor, id: Graph, given: Parameters) -> Result<Json<Value>, Problem> {
    change_graph(shared, actor, id, given, false).await
}

async fn change_graph(
    State(web): Shared,
    actor: Actor,
    Graph(id): Graph,
    mut given: Parameters,
    is_cancel: bool,
) -> Result<Json<Value>, Problem> {
    let dry_run = given.flag("dry_run")?;
    given.end()?;
    let store = web.store.clone();
    let changing = async move {
        let jobs = store.graph(id).await?;
        if jobs.is_empty() {
            return Err(Problem::not_found(unknown(id)));
        }
        let is_retrying = jobs.iter().any(|job| job.is_retrying);
        let mut control = store.control(dry_run);
        let changed = if is_cancel { control.cancel_graph(id).await? } else { control.retry_graph(id).await? };
        let noted = counted(changed.iter().map(|(_, changed)| changed.word()));
        let nothing = changed.is_empty().then(|| nothing_changed(is_cancel, is_retrying, dry_run));
        Ok((Json(graph_answer(id, &changed, nothing, dry_run)), noted))
    };
    let action = if is_cancel { "graphs.cancel" } else { "graphs.retry" };
    actor.wants(action, doc! { "graph": id.to_string() }, dry_run).by(&web, changing).await
}

fn graph_answer(id: GraphId, changed: &[(JobId, Changed)], nothing: Option<&str>, dry_run: bool) -> Value {
    let jobs: Vec<Outcome> = changed.iter().map(|(job, changed)| Outcome::of(*job, changed, dry_run)).collect();
    json!({ "id": id.to_string(), "jobs": jobs, "message": nothing, "dry_run": dry_run })
}
