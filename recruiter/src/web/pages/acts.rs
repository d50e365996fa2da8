//! What an operator does: a page says what would be done, its form does it, and the browser is sent to the page of what was changed.

use askama::Template;
use axum::{
    Extension,
    extract::{Path, State},
    response::{IntoResponse as _, Redirect},
};
use bson::doc;
use recruiter_common::{
    control::{Change, Changed, Refusal, Revision},
    ids::{JobId, WorkerId},
    limits::Paused,
    text::printable,
    workers::{Answer as Told, Chosen, WorkerChange},
};

use super::{
    super::{
        Shared, Web,
        access::Role,
        audit::{Actor, counted, job_action, noted, worker_action},
        problem::Problem,
        requests::{Id, Parameters},
    },
    form::Sent,
    frame::{Answer, Frame, page},
    groups::group_of,
    visitor::Visitor,
    words::link,
};
use crate::views::{
    outcome::{Outcome, message},
    workers,
};

#[derive(Template)]
#[template(path = "act.html")]
struct ActPage {
    frame: Frame,
    csrf: String,
    /// What is asked.
    question: String,
    /// What would be done.
    would: String,
    /// Where the form goes.
    path: String,
    /// What the form has.
    fields: Vec<(&'static str, String)>,
    /// Whether a reason is asked for.
    has_reason: bool,
    /// The button.
    word: &'static str,
    is_dangerous: bool,
    back: String,
}

/// What is done with a job.
#[derive(Clone, Copy)]
enum JobAct {
    Retry,
    Cancel,
    Delete,
}

impl JobAct {
    fn of_word(word: &str) -> Result<Self, Problem> {
        match word {
            "retry" => Ok(Self::Retry),
            "cancel" => Ok(Self::Cancel),
            "delete" => Ok(Self::Delete),
            _ => Err(Problem::not_found("There is no page at this address.")),
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::Retry => "Retry",
            Self::Cancel => "Cancel the job",
            Self::Delete => "Delete",
        }
    }

    /// `again`: also a job that was retried before.
    fn change(self, again: bool) -> Change {
        match self {
            Self::Retry => Change::Retry { again, with: Box::new(Revision::default()) },
            Self::Cancel => Change::Cancel,
            Self::Delete => Change::Delete,
        }
    }
}

/// # Errors
/// When the visitor is no operator.
fn check(visitor: &Visitor) -> Result<(), Problem> {
    if visitor.is_operator() {
        return Ok(());
    }
    Err(Problem::forbidden(format!("This needs the role {}, and you have the role {}.", Role::Operator, visitor.role)))
}

/// Answers refusals as they are.
async fn change_job(web: &Web, change: &Change, id: JobId, dry_run: bool) -> Result<Changed, Problem> {
    let changed = web.store.control(dry_run).change(change, &[id]).await?;
    match changed.into_iter().next() {
        None | Some((_, Changed::Refused(Refusal::Unknown))) => Err(Problem::not_found(format!("No job has the id {id}."))),
        Some((_, changed)) => Ok(changed),
    }
}

fn conflict(changed: &Changed) -> Problem {
    let problem = if let Changed::Refused(refusal) = changed { printable(&refusal.to_string(), 400) } else { String::new() };
    Problem::conflict(format!("The job was not changed: {problem}."))
}

/// Asks before a job is changed.
pub(super) async fn ask_job(
    State(web): Shared,
    Extension(visitor): Extension<Visitor>,
    Path((id, word)): Path<(String, String)>,
    given: Parameters,
) -> Answer {
    let (Id(id), act) = (Id::of_text(&id)?, JobAct::of_word(&word)?);
    given.end()?;
    check(&visitor)?;
    let (mut changed, mut before, mut fields) = (change_job(&web, &act.change(false), id, true).await?, String::new(), Vec::new());
    if let Changed::Refused(refusal @ Refusal::RetriedBefore { .. }) = &changed {
        before = format!("Attention: {refusal}. ");
        fields.push(("again", "true".to_owned()));
        changed = change_job(&web, &act.change(true), id, true).await?;
    }
    if let refused @ Changed::Refused(_) = &changed {
        return Err(conflict(refused));
    }
    let asked = ActPage {
        csrf: visitor.csrf.to_string(),
        frame: Frame::new(visitor, "/jobs", format!("{} {id}", act.word())),
        question: format!("{}: job {id}?", act.word()),
        would: format!("{before}The job {}.", message(&changed, true)),
        path: format!("/jobs/{id}/{word}"),
        fields,
        has_reason: false,
        word: act.word(),
        is_dangerous: !matches!(act, JobAct::Retry),
        back: format!("/jobs/{id}"),
    };
    page(&asked)
}

/// Changes a job.
pub(super) async fn do_job(State(web): Shared, actor: Actor, Path((id, word)): Path<(String, String)>, sent: Sent) -> Answer {
    let (Id(id), act) = (Id::of_text(&id)?, JobAct::of_word(&word)?);
    check(&sent.visitor)?;
    let (on, change) = (web.clone(), act.change(sent.fields.text("again") == "true"));
    let action = job_action(&change);
    let changing = async move {
        let changed = change_job(&on, &change, id, false).await?;
        if let refused @ Changed::Refused(_) = &changed {
            return Err(conflict(refused));
        }
        let noted = noted(&Outcome::of(id, &changed, false));
        Ok((changed, noted))
    };
    let changed = actor.wants(action, doc! { "job": id.to_string() }, false).by(&web, changing).await?;
    let to = if let Changed::EnqueuedAgain { new: Some(new), .. } = changed {
        format!("/jobs/{new}")
    } else if changed == Changed::Deleted {
        "/jobs".into()
    } else {
        format!("/jobs/{id}")
    };
    Ok(Redirect::to(&to).into_response())
}

/// Asks before a group is paused or resumed.
pub(super) async fn ask_group(Extension(visitor): Extension<Visitor>, Path(word): Path<String>, given: Parameters) -> Answer {
    let (is_pause, group) = (is_pause(&word)?, group_of(given)?);
    check(&visitor)?;
    let (shown, title) = (printable(&group, 80), if is_pause { "Pause" } else { "Resume" });
    let would = if is_pause { "Its jobs would wait, and running jobs would continue." } else { "Its jobs would be started again." };
    let asked = ActPage {
        csrf: visitor.csrf.to_string(),
        frame: Frame::new(visitor, "/groups", format!("{title} {shown}")),
        question: format!("{title} the group {shown}?"),
        would: would.into(),
        path: link(&format!("/groups/{word}"), [("group", &*group)]),
        fields: Vec::new(),
        has_reason: is_pause,
        word: title,
        is_dangerous: false,
        back: "/groups".into(),
    };
    page(&asked)
}

fn is_pause(word: &str) -> Result<bool, Problem> {
    match word {
        "pause" => Ok(true),
        "resume" => Ok(false),
        _ => Err(Problem::not_found("There is no page at this address.")),
    }
}

/// Pauses or resumes a group.
pub(super) async fn do_group(State(web): Shared, actor: Actor, Path(word): Path<String>, given: Parameters, sent: Sent) -> Answer {
    let (is_pause, group) = (is_pause(&word)?, group_of(given)?);
    check(&sent.visitor)?;
    let (paused, by, store) = (Paused::Group(group), actor.name(), web.store.clone());
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
    Ok(Redirect::to("/groups").into_response())
}

fn worker_change(word: &str) -> Result<(WorkerChange, &'static str), Problem> {
    match word {
        "quiet" => Ok((WorkerChange::Quiet, "Quiet")),
        "resume" => Ok((WorkerChange::Resume, "Resume")),
        "stop" => Ok((WorkerChange::Stop, "Stop")),
        _ => Err(Problem::not_found("There is no page at this address.")),
    }
}

async fn change_worker(web: &Web, change: WorkerChange, id: WorkerId, by: &str, dry_run: bool) -> Result<Told, Problem> {
    let answers = web.store.workers().change(change, &Chosen::Ids(vec![id]), by, dry_run).await?;
    let answer = answers.into_iter().next().ok_or_else(|| Problem::not_found(format!("No worker has the id {id}.")))?;
    if answer.asked.is_refused() {
        let problem = format!("The worker was not changed: {}.", workers::message(change, &answer, dry_run));
        return Err(Problem::conflict(problem));
    }
    Ok(answer)
}

fn worker_id(text: &str) -> Result<WorkerId, Problem> {
    text.parse().map_err(|_| Problem::bad("A worker has an id of 24 hexadecimal digits."))
}

/// Asks before a worker is quieted, resumed or stopped.
pub(super) async fn ask_worker(
    State(web): Shared,
    actor: Actor,
    Extension(visitor): Extension<Visitor>,
    Path((id, word)): Path<(String, String)>,
    given: Parameters,
) -> Answer {
    let (id, (change, title)) = (worker_id(&id)?, worker_change(&word)?);
    given.end()?;
    check(&visitor)?;
    let answer = change_worker(&web, change, id, &actor.name(), true).await?;
    let asked = ActPage {
        csrf: visitor.csrf.to_string(),
        frame: Frame::new(visitor, "/workers", format!("{title} {id}")),
        question: format!("{title} the worker {id} on {}?", printable(&answer.hostname, 80)),
        would: format!("The worker {}.", workers::message(change, &answer, true)),
        path: format!("/workers/{id}/{word}"),
        fields: Vec::new(),
        has_reason: false,
        word: title,
        is_dangerous: change == WorkerChange::Stop,
        back: "/workers".into(),
    };
    page(&asked)
}

/// Quiets, resumes or stops a worker.
pub(super) async fn do_worker(State(web): Shared, actor: Actor, Path((id, word)): Path<(String, String)>, sent: Sent) -> Answer {
    let (id, (change, _)) = (worker_id(&id)?, worker_change(&word)?);
    check(&sent.visitor)?;
    let (on, by) = (web.clone(), actor.name());
    let changing = async move {
        let answer = change_worker(&on, change, id, &by, false).await?;
        Ok(((), counted([answer.asked.word()].into_iter())))
    };
    actor.wants(worker_action(change), doc! { "ids": [id.to_string()] }, false).by(&web, changing).await?;
    Ok(Redirect::to("/workers").into_response())
}
