//! Retries, cancels and deletes many jobs: those that are chosen, or all that match.

use std::{sync::Arc, time::Duration};

use axum::{
    Extension,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse as _, Redirect},
};
use chrono::{DurationRound as _, SecondsFormat, TimeDelta};
use recruiter_common::{control::Report, spec::instant_of_text, store::LOOK_LIMIT};
use tokio::time::timeout;

use super::{
    super::{
        super::{
            Shared, Web,
            audit::Actor,
            changes::{Many, Wanted, change_many},
            problem::Problem,
            requests::Parameters,
        },
        form::Sent,
        frame::Answer,
        visitor::Visitor,
        words::{at_least, link},
    },
    Question,
    job::{JobAct, fields_of_change},
};

/// The parameter with the second in which the jobs were counted: what matches only since then is not changed.
const ASKED: &str = "asked";
/// How long a browser waits for a change. It goes on.
const ANSWERED_WITHIN: Duration = Duration::from_secs(20);

/// Asks before jobs are changed.
pub(in super::super) async fn ask(
    State(web): Shared,
    actor: Actor,
    Extension(visitor): Extension<Visitor>,
    Path(word): Path<String>,
    given: Parameters,
) -> Answer {
    let act = JobAct::of_word(&word)?;
    if given.pairs().next().is_none() {
        return Err(Problem::bad("Choose a job first."));
    }
    question(&web, actor, visitor, act, given).await?.asked()
}

async fn question(web: &Arc<Web>, actor: Actor, visitor: Visitor, act: JobAct, given: Parameters) -> Result<Question, Problem> {
    // Their ids have the second in which jobs that wait were enqueued.
    let asked = web.store.now().duration_trunc(TimeDelta::seconds(1)).map_err(Problem::bad)? + TimeDelta::seconds(1);
    let text = asked.to_rfc3339_opts(SecondsFormat::Secs, true);
    let path = link(&format!("/jobs/many/{}", act.word().to_lowercase()), given.pairs().chain([(ASKED, &*text)]));
    let change = act.asked(asked)?;
    let many = Many::of(given, &change, asked)?.before(asked);
    let report = change_many(web, actor, many, Wanted::of(change), true, Some(LOOK_LIMIT)).await?;
    let matched = at_least(report.matched(), report.is_stopped);
    let mut question =
        Question::new(visitor, "/jobs", act.word(), &if matched == "1" { "1 job".into() } else { format!("{matched} jobs") }, path);
    question.would = format!("Of the jobs that match now: {}.", outcomes(&report));
    question.is_dangerous = act.is_dangerous();
    if act == JobAct::Change {
        question.fields.extend(fields_of_change(String::new(), String::new()));
    }
    Ok(question)
}

/// Changes jobs.
pub(in super::super) async fn act(State(web): Shared, actor: Actor, Path(word): Path<String>, mut given: Parameters, sent: Sent) -> Answer {
    let act = JobAct::of_word(&word)?;
    let asked = given.take(ASKED, |text| instant_of_text(text).map_err(|problem| problem.to_string()))?;
    let asked = asked.ok_or_else(|| Problem::bad("The address does not say when the jobs were counted."))?;
    let wanted = match act.wanted(&sent.fields, web.store.now()) {
        Ok(wanted) => wanted,
        Err(problem) => return question(&web, actor, sent.visitor, act, given).await?.again(&sent.fields, problem),
    };
    let many = Many::of(given, &wanted.change, asked)?.before(asked);
    let Ok(report) = timeout(ANSWERED_WITHIN, change_many(&web, actor, many, wanted, false, None)).await else {
        return Err(Problem::new(StatusCode::ACCEPTED, "The change takes longer, and goes on. The audit will say what came out."));
    };
    report?;
    // Its newest entry says what came out, and loading the page again does not repeat the change.
    Ok(Redirect::to("/audit").into_response())
}

fn outcomes(report: &Report) -> String {
    let each: Vec<String> = report.outcomes.iter().map(|(word, count)| format!("{count} {word}")).collect();
    if each.is_empty() { "none".into() } else { each.join(", ") }
}
