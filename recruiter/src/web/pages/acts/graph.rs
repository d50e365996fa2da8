//! Cancels a graph, or retries what failed of it.

use axum::{
    Extension,
    extract::{Path, State},
    response::{IntoResponse as _, Redirect},
};
use bson::doc;
use recruiter_common::{control::Changed, ids::JobId, store::StoreError};

use super::{
    super::{
        super::{
            Shared, Web,
            audit::{Actor, counted},
            problem::Problem,
            requests::{Graph, Parameters},
        },
        form::Sent,
        frame::Answer,
        visitor::Visitor,
    },
    Question, no_such_page,
};
use crate::views::graph::nothing_changed;

fn is_cancel(word: &str) -> Result<bool, Problem> {
    match word {
        "cancel" => Ok(true),
        "retry" => Ok(false),
        _ => Err(no_such_page()),
    }
}

async fn change(web: &Web, Graph(id): Graph, is_cancel: bool, dry_run: bool) -> Result<Vec<(JobId, Changed)>, StoreError> {
    let mut control = web.store.control(dry_run);
    if is_cancel { control.cancel_graph(id).await } else { control.retry_graph(id).await }
}

/// Asks before a graph is changed.
pub(in super::super) async fn ask(
    State(web): Shared,
    Extension(visitor): Extension<Visitor>,
    Path((id, word)): Path<(String, String)>,
    given: Parameters,
) -> Answer {
    let (graph, is_cancel) = (Graph::of_text(&id)?, is_cancel(&word)?);
    given.end()?;
    let changed = change(&web, graph, is_cancel, true).await?;
    if changed.is_empty() {
        return Err(Problem::conflict(nothing_changed(is_cancel, false, true)));
    }
    let title = if is_cancel { "Cancel" } else { "Retry" };
    let mut question = Question::new(visitor, "/jobs", title, &format!("graph {id}"), format!("/graphs/{id}/{word}"));
    question.would = match (is_cancel, changed.len()) {
        (true, jobs) => format!("{jobs} jobs that are not finished would be cancelled."),
        (false, jobs) => format!("{jobs} jobs that failed or were cancelled would be enqueued again, with edges between them."),
    };
    question.is_dangerous = is_cancel;
    question.back = format!("/graphs/{id}");
    question.asked()
}

/// Changes a graph.
pub(in super::super) async fn act(State(web): Shared, actor: Actor, Path((id, word)): Path<(String, String)>, _: Sent) -> Answer {
    let (graph, is_cancel) = (Graph::of_text(&id)?, is_cancel(&word)?);
    let on = web.clone();
    let changing = async move {
        let changed = change(&on, graph, is_cancel, false).await?;
        Ok(((), counted(changed.iter().map(|(_, changed)| changed.word()))))
    };
    let action = if is_cancel { "graphs.cancel" } else { "graphs.retry" };
    actor.wants(action, doc! { "graph": &id }, false).by(&web, changing).await?;
    Ok(Redirect::to(&format!("/graphs/{id}")).into_response())
}
