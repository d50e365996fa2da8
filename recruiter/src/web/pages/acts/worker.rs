//! Quiets, resumes and stops a worker.

use axum::{
    Extension,
    extract::{Path, State},
    response::{IntoResponse as _, Redirect},
};
use bson::doc;
use recruiter_common::{
    ids::WorkerId,
    text::printable,
    workers::{Answer as Told, Chosen, WorkerChange},
};

use super::{
    super::{
        super::{
            Shared, Web,
            audit::{Actor, counted, worker_action},
            problem::Problem,
            requests::Parameters,
        },
        form::Sent,
        frame::Answer,
        visitor::Visitor,
    },
    Question, no_such_page,
};
use crate::views::workers::message;

fn worker_change(word: &str) -> Result<(WorkerChange, &'static str), Problem> {
    match word {
        "quiet" => Ok((WorkerChange::Quiet, "Quiet")),
        "resume" => Ok((WorkerChange::Resume, "Resume")),
        "stop" => Ok((WorkerChange::Stop, "Stop")),
        _ => Err(no_such_page()),
    }
}

async fn change(web: &Web, change: WorkerChange, id: WorkerId, by: &str, dry_run: bool) -> Result<Told, Problem> {
    let answers = web.store.workers().change(change, &Chosen::Ids(vec![id]), by, dry_run).await?;
    let answer = answers.into_iter().next().ok_or_else(|| Problem::not_found(format!("No worker has the id {id}.")))?;
    if answer.asked.is_refused() {
        let problem = format!("The worker was not changed: {}.", message(change, &answer, dry_run));
        return Err(Problem::conflict(problem));
    }
    Ok(answer)
}

fn worker_id(text: &str) -> Result<WorkerId, Problem> {
    text.parse().map_err(|_| Problem::bad("A worker has an id of 24 hexadecimal digits."))
}

/// Asks before a worker is quieted, resumed or stopped.
pub(in super::super) async fn ask(
    State(web): Shared,
    actor: Actor,
    Extension(visitor): Extension<Visitor>,
    Path((id, word)): Path<(String, String)>,
    given: Parameters,
) -> Answer {
    let (id, (wanted, title)) = (worker_id(&id)?, worker_change(&word)?);
    given.end()?;
    let answer = change(&web, wanted, id, &actor.name(), true).await?;
    let of = format!("worker {id} on {}", printable(&answer.hostname, 80));
    let mut question = Question::new(visitor, "/workers", title, &of, format!("/workers/{id}/{word}"));
    question.would = format!("The worker {}.", message(wanted, &answer, true));
    question.is_dangerous = wanted == WorkerChange::Stop;
    question.asked()
}

/// Quiets, resumes or stops a worker.
pub(in super::super) async fn act(State(web): Shared, actor: Actor, Path((id, word)): Path<(String, String)>, _: Sent) -> Answer {
    let (id, (wanted, _)) = (worker_id(&id)?, worker_change(&word)?);
    let (on, by) = (web.clone(), actor.name());
    let changing = async move {
        let answer = change(&on, wanted, id, &by, false).await?;
        Ok(((), counted([answer.asked.word()].into_iter())))
    };
    actor.wants(worker_action(wanted), doc! { "ids": [id.to_string()] }, false).by(&web, changing).await?;
    Ok(Redirect::to("/workers").into_response())
}
