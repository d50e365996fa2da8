//! Pauses everything, groups, classes and lines, and resumes them.

use axum::{
    Extension,
    extract::{Path, State},
    response::{IntoResponse as _, Redirect},
};
use bson::doc;
use recruiter_common::{limits::Paused, text::printable};

use super::{
    super::{
        super::{Shared, audit::Actor, problem::Problem, requests::Parameters},
        form::Sent,
        frame::Answer,
        visitor::Visitor,
        words::link,
    },
    Field, Question, no_such_page,
};
use crate::views::limits::paused_of_text;

/// Asks before something is paused or resumed.
pub(in super::super) async fn ask(Extension(visitor): Extension<Visitor>, Path(word): Path<String>, given: Parameters) -> Answer {
    let (is_pause, paused) = (is_pause(&word)?, paused_of(given)?);
    let what = paused.to_string();
    let path = link(&format!("/pauses/{word}"), [("what", &*what)]);
    let title = if is_pause { "Pause" } else { "Resume" };
    let mut question = Question::new(visitor, section(&paused), title, &printable(&what, 256), path);
    question.would = if is_pause {
        question.fields.push(Field::reason());
        "Its jobs would wait, and running jobs would continue.".into()
    } else {
        "Its jobs would be started again.".into()
    };
    question.asked()
}

/// Pauses or resumes.
pub(in super::super) async fn act(State(web): Shared, actor: Actor, Path(word): Path<String>, given: Parameters, sent: Sent) -> Answer {
    let (is_pause, paused) = (is_pause(&word)?, paused_of(given)?);
    let (to, by, store) = (section(&paused), actor.name(), web.store.clone());
    let reason = Some(sent.fields.text("reason").trim().to_owned()).filter(|reason| is_pause && !reason.is_empty());
    let mut target = doc! { "paused": paused.to_string() };
    target.extend(reason.as_deref().map(|reason| ("reason".to_owned(), printable(reason, 4_000).into())));
    let changing = async move {
        let pauses = store.pauses();
        let outcome = match is_pause {
            true if pauses.pause(&paused, &by, reason.as_deref()).await? => "paused",
            true => "paused-before",
            false if pauses.resume(&paused).await? => "resumed",
            false => "not-paused",
        };
        Ok(((), doc! { "outcome": outcome }))
    };
    actor.wants(if is_pause { "pauses.add" } else { "pauses.remove" }, target, false).by(&web, changing).await?;
    Ok(Redirect::to(to).into_response())
}

fn is_pause(word: &str) -> Result<bool, Problem> {
    match word {
        "pause" => Ok(true),
        "resume" => Ok(false),
        _ => Err(no_such_page()),
    }
}

fn paused_of(mut given: Parameters) -> Result<Paused, Problem> {
    let paused = given.take("what", paused_of_text)?.ok_or_else(|| Problem::bad("The address does not say what is paused."))?;
    given.end()?;
    Ok(paused)
}

/// The page that shows it.
fn section(paused: &Paused) -> &'static str {
    if matches!(paused, Paused::Group(_)) { "/groups" } else { "/limits" }
}
