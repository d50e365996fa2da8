//! Pauses, resumes and runs a schedule.

use axum::{
    Extension,
    extract::{Path, State},
    response::{IntoResponse as _, Redirect},
};
use bson::doc;
use recruiter_common::{flags::name_of_text, text::printable};

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

#[derive(Clone, Copy)]
enum ScheduleAct {
    Pause,
    Resume,
    Run,
}

impl ScheduleAct {
    fn of_word(word: &str) -> Result<Self, Problem> {
        match word {
            "pause" => Ok(Self::Pause),
            "resume" => Ok(Self::Resume),
            "run" => Ok(Self::Run),
            _ => Err(no_such_page()),
        }
    }
}

fn name_of(mut given: Parameters) -> Result<String, Problem> {
    let name = given.take("name", name_of_text)?.ok_or_else(|| Problem::bad("The address names no schedule."))?;
    given.end()?;
    Ok(name)
}

/// Asks before a schedule is paused, resumed or run.
pub(in super::super) async fn ask(Extension(visitor): Extension<Visitor>, Path(word): Path<String>, given: Parameters) -> Answer {
    let (act, name) = (ScheduleAct::of_word(&word)?, name_of(given)?);
    let (title, would) = match act {
        ScheduleAct::Pause => ("Pause", "Its runs would be left out until it is resumed."),
        ScheduleAct::Resume => ("Resume", "It would go on with its next run."),
        ScheduleAct::Run => ("Run once, now", "One job would be enqueued, besides the runs of the schedule."),
    };
    let path = link(&format!("/schedules/{word}"), [("name", &*name)]);
    let mut question = Question::new(visitor, "/schedules", title, &printable(&name, 256), path);
    question.would = would.into();
    question.fields.extend(matches!(act, ScheduleAct::Pause).then(Field::reason));
    question.asked()
}

/// Pauses, resumes or runs a schedule.
pub(in super::super) async fn act(State(web): Shared, actor: Actor, Path(word): Path<String>, given: Parameters, sent: Sent) -> Answer {
    let (act, name) = (ScheduleAct::of_word(&word)?, name_of(given)?);
    let (store, by, reason) = (web.store.clone(), actor.name(), sent.fields.text("reason").trim().to_owned());
    let mut target = doc! { "schedule": &name };
    let action = match act {
        ScheduleAct::Pause => {
            target.insert("reason", printable(&reason, 4_000));
            "schedules.pause"
        }
        ScheduleAct::Resume => "schedules.resume",
        ScheduleAct::Run => "schedules.run",
    };
    let changing = async move {
        let schedules = store.schedules();
        let (outcome, to) = match act {
            ScheduleAct::Pause if schedules.pause(&name, &by, &reason).await? => ("paused", None),
            ScheduleAct::Pause => ("paused-before", None),
            ScheduleAct::Resume if schedules.resume(&name).await? => ("resumed", None),
            ScheduleAct::Resume => ("not-paused", None),
            ScheduleAct::Run => ("enqueued", Some(schedules.run_now(&name).await?.to_string())),
        };
        let noted = doc! { "outcome": outcome, "new_id": &to };
        Ok((to.map_or_else(|| "/schedules".to_owned(), |id| format!("/jobs/{id}")), noted))
    };
    let to = actor.wants(action, target, false).by(&web, changing).await?;
    Ok(Redirect::to(&to).into_response())
}
