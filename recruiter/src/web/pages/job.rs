//! A job: its story, why it waits, its executions, its content.

use askama::Template;
use axum::{
    Extension, Json,
    extract::State,
    response::{IntoResponse as _, Response},
};
use bson::Bson;
use recruiter_common::{
    Why,
    ids::JobId,
    instant::Instant,
    job::{
        Execution, Job, JobProgress, Stage,
        notes::{CHECKPOINT, Log},
    },
    store::lossy,
    text::{apart, moment, printable},
};
use serde_json::Value;

use super::{
    super::{
        Shared,
        problem::Problem,
        requests::{Id, Parameters},
    },
    frame::{Answer, Frame, page},
    live::live_jobs,
    visitor::Visitor,
    words::{Block, link},
};
use crate::views::{
    extended,
    job::{Read, to_json, why_to_document},
    story::{ended, items, log_line, ran, settings, state},
    tone::Tone,
};

#[derive(Template)]
#[template(path = "job.html")]
struct JobPage {
    frame: Frame,
    id: String,
    class: String,
    word: &'static str,
    tone: &'static str,
    /// What it is, in sentences.
    story: Vec<String>,
    /// Why it waits.
    why: Option<Why>,
    progress: Option<Progress>,
    facts: Vec<Fact>,
    executions: Vec<Told>,
    dropped: u32,
    content: Vec<(&'static str, Block)>,
    log: Vec<String>,
    /// Where its events are.
    live: String,
    /// What the visitor may do: the word, and where.
    acts: Vec<(&'static str, &'static str)>,
}

struct Progress {
    text: String,
    percent: Option<f64>,
}

/// A field of the job, and where there is more about it.
struct Fact {
    name: String,
    text: String,
    path: Option<String>,
}

/// An execution, in words.
struct Told {
    number: usize,
    ran: String,
    ended: &'static str,
    tone: &'static str,
    error: Option<String>,
    trace: Option<Block>,
}

/// Shows a job.
pub(super) async fn show(State(web): Shared, Extension(visitor): Extension<Visitor>, Id(id): Id, given: Parameters) -> Answer {
    given.end()?;
    let (stored, why, redaction) = tokio::try_join!(web.store.job(id), web.store.why(id), web.store.redaction())?;
    let stored = stored.ok_or_else(|| unknown(id))?;
    let why = why.filter(Why::is_waiting);
    let (job, now) = (Job::try_from(redaction.job(stored.document)), web.store.now());
    let frame = Frame::new(visitor, "/jobs", format!("Job {id}"));
    page(&match job {
        Ok(job) => described(frame, &job, why, now),
        Err((document, error)) => JobPage {
            frame,
            id: id.to_string(),
            class: "a document that is no job".into(),
            word: "malformed",
            tone: Tone::Bad.word(),
            story: vec![printable(&error.to_string(), 400)],
            why,
            progress: None,
            facts: Vec::new(),
            executions: Vec::new(),
            dropped: 0,
            content: vec![("Document", Block::of_json(&extended(lossy(&document))))],
            log: Vec::new(),
            live: String::new(),
            acts: Vec::new(),
        },
    })
}

/// The whole job as JSON.
pub(super) async fn json(State(web): Shared, Id(id): Id, given: Parameters) -> Result<Response, Problem> {
    given.end()?;
    let (stored, why, redaction) = tokio::try_join!(web.store.job(id), web.store.why(id), web.store.redaction())?;
    let job: Read = Job::try_from(redaction.job(stored.ok_or_else(|| unknown(id))?.document));
    let mut shown = to_json(&job, web.store.now());
    shown["held"] = why.filter(Why::is_waiting).as_ref().map(why_to_document).map_or(Value::Null, extended);
    Ok(Json(shown).into_response())
}

fn unknown(id: JobId) -> Problem {
    Problem::not_found(format!("No job has the id {id}. It was never enqueued, or it was deleted."))
}

fn described(frame: Frame, job: &Job, why: Option<Why>, now: Instant) -> JobPage {
    let stage = Stage::of(job, now);
    let is_operator = frame.visitor.as_ref().is_some_and(Visitor::is_operator);
    let executions = job.every_execution().enumerate().map(|(at, execution)| told(at, execution, job.executions_dropped, now));
    let mut executions: Vec<Told> = executions.collect();
    executions.reverse();
    JobPage {
        frame,
        id: job.id.to_string(),
        class: printable(&job.class, 256),
        word: stage.word(),
        tone: Tone::of_stage(Some(stage)).word(),
        story: story(job, now),
        why,
        progress: JobProgress::of_job(job)
            .map(|progress| Progress { text: printable(&progress.to_string(), 400), percent: progress.percent }),
        facts: facts(job),
        executions,
        dropped: job.executions_dropped,
        content: content(job),
        log: Log::of_job(job).lines().map(log_line).collect(),
        live: if stage.is_finished() { String::new() } else { live_jobs([job.id]) },
        acts: match stage {
            _ if !is_operator => Vec::new(),
            Stage::Done | Stage::Failed | Stage::Cancelled => vec![("Retry", "retry"), ("Delete", "delete")],
            Stage::Running | Stage::Cancelling => vec![("Cancel", "cancel")],
            Stage::Waits => vec![("Change", "change"), ("Cancel", "cancel")],
            Stage::Postponed | Stage::Queued => vec![("Retry now", "retry"), ("Change", "change"), ("Cancel", "cancel")],
        },
    }
}

fn story(job: &Job, now: Instant) -> Vec<String> {
    let mut story = vec![
        format!("It was enqueued {} ago, at {}.", apart(job.created_at, now), moment(job.created_at)),
        format!("It is {}.", state(job, now)),
    ];
    story.push(match job.attempts {
        0 => "It was never started.".into(),
        1 => "It was started once.".into(),
        starts => format!("It was started {starts} times."),
    });
    if job.interruptions > 0 {
        story.push(format!("Its retry policy does not count {} of the starts: interrupted, released or snoozed.", job.interruptions));
    }
    if job.deaths > 0 {
        story.push(format!("{} of the starts ended with the death of the worker.", job.deaths));
    }
    story.extend(job.expires_at.map(|at| format!("It is not started after {}.", moment(at))));
    story.extend(job.bundle.as_ref().map(|bundle| format!("Of its items {}.", items(&bundle.outcomes))));
    story
}

fn facts(job: &Job) -> Vec<Fact> {
    let group = job.settings.group();
    let plain = |(name, text): (String, String)| {
        let path = match &*name {
            "group" => Some(link("/jobs", [("group", group)])),
            "urn" => job.settings.urn.as_deref().map(|urn| link("/jobs", [("urn", urn)])),
            "limits" => Some("/limits".to_owned()),
            "line" => Some("/limits#lines".to_owned()),
            _ => None,
        };
        Fact { name, text, path }
    };
    let of_job =
        |name: &str, id: Option<JobId>| id.map(|id| Fact { name: name.into(), text: id.to_string(), path: Some(format!("/jobs/{id}")) });
    let stored = |field: &str| job.field(field).and_then(|id| id.as_object_id()).map(JobId::from);
    let class = Fact { name: "class".into(), text: printable(&job.class, 256), path: Some(link("/jobs", [("class", &*job.class)])) };
    let graph = job.graph.map(|graph| Fact { name: "graph".into(), text: graph.to_string(), path: Some(format!("/graphs/{graph}")) });
    let known = settings(&job.settings).into_iter().map(plain);
    let parents = job.parents().into_iter().take(20).filter_map(|parent| of_job("waits for", Some(parent)));
    let relatives = [of_job("retry of", stored("recovered_from")), of_job("retried as", stored("retried_as"))];
    [class].into_iter().chain(known).chain(graph).chain(parents).chain(relatives.into_iter().flatten()).collect()
}

fn told(at: usize, execution: &Execution, dropped: u32, now: Instant) -> Told {
    let message = execution.message.as_deref().unwrap_or_default();
    let tone = match (&execution.class, execution.ended_at) {
        (Some(_), _) => Tone::Bad,
        (None, Some(_)) => Tone::Good,
        (None, None) => Tone::Active,
    };
    Told {
        // The first one is kept when others are dropped.
        number: at + 1 + if at > 0 { usize::try_from(dropped).unwrap_or_default() } else { 0 },
        ran: ran(execution, now),
        ended: ended(execution),
        tone: tone.word(),
        error: execution.class.as_ref().map(|class| format!("{}: {}", printable(class, 256), printable(message, 4_096))),
        trace: execution.trace.as_deref().map(Block::of),
    }
}

/// Parameters or items, checkpoint and result.
fn content(job: &Job) -> Vec<(&'static str, Block)> {
    let block = |value: Bson| Block::of_json(&value.into_relaxed_extjson());
    let own = match &job.bundle {
        None => ("Parameters", block(job.parameters.clone())),
        Some(_) => ("Items", block(Bson::Array(job.items()))),
    };
    let stored = |name, field| Some((name, block(job.field(field)?)));
    [Some(own), stored("Checkpoint", CHECKPOINT), stored("Result", "result")].into_iter().flatten().collect()
}
