//! Retries, cancels and deletes many jobs: those that are chosen, or all that match.

use std::time::Duration;

use axum::{
    Extension,
    extract::{Path, State},
    http::StatusCode,
};
use recruiter_common::{control::Report, store::LOOK_LIMIT};
use tokio::time::timeout;

use super::{
    super::{
        super::{
            Shared,
            audit::Actor,
            changes::{Many, change_many},
            problem::Problem,
            requests::Parameters,
        },
        form::Sent,
        frame::{Answer, Frame},
        table::Tables,
        visitor::Visitor,
        words::{at_least, link},
    },
    Question, check,
    job::JobAct,
};
use crate::views::tone::Tone;

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
    check(&visitor)?;
    let path = link(&format!("/jobs/many/{word}"), given.pairs());
    let wanted = act.wanted();
    let many = Many::of(given, &wanted.change, web.store.now())?;
    let report = change_many(&web, actor, many, wanted, true, Some(LOOK_LIMIT)).await?;
    let matched = at_least(report.matched(), report.is_stopped);
    let mut question = Question::new(visitor, "/jobs", act.word(), &format!("{matched} jobs"), path);
    question.would = format!("Of the jobs that match now: {}.", outcomes(&report));
    question.is_dangerous = act != JobAct::Retry;
    question.asked()
}

/// Changes jobs.
pub(in super::super) async fn act(State(web): Shared, actor: Actor, Path(word): Path<String>, given: Parameters, sent: Sent) -> Answer {
    let act = JobAct::of_word(&word)?;
    check(&sent.visitor)?;
    let wanted = act.wanted();
    let many = Many::of(given, &wanted.change, web.store.now())?;
    let Ok(report) = timeout(ANSWERED_WITHIN, change_many(&web, actor, many, wanted, false, None)).await else {
        return Err(Problem::new(StatusCode::ACCEPTED, "The change takes longer, and goes on. The audit will say what came out."));
    };
    let report = report?;
    let notice = format!("{}: {} jobs matched: {}.", act.word(), report.matched(), outcomes(&report));
    let frame = Frame::new(sent.visitor, "/jobs", "Jobs were changed");
    Tables { notices: vec![(Tone::Good, notice)], ..Tables::new(frame, Vec::new()) }.shown()
}

fn outcomes(report: &Report) -> String {
    let each: Vec<String> = report.outcomes.iter().map(|(word, count)| format!("{count} {word}")).collect();
    if each.is_empty() { "none".into() } else { each.join(", ") }
}
