//! Enqueues one job, or many as lines of JSON.

use axum::{
    Json,
    body::{Body, Bytes},
    extract::State,
    http::{
        HeaderMap, StatusCode,
        header::{CONTENT_TYPE, LOCATION},
    },
    response::{IntoResponse, Response},
};
use futures_util::{StreamExt as _, stream};
use recruiter_common::{
    EnqueueError, NewJob,
    ids::JobId,
    spec::{Classes, JobSpec, LONGEST_LINE, UnknownPolicies},
    telemetry::chain,
};
use serde_json::{Value, json};
use tokio::{sync::mpsc, time::timeout};

use super::super::{
    Shared, Web,
    problem::{Problem, ProblemDocument},
    requests::{BODY_WITHIN, JsonText, Parameters, too_slow},
};

/// The most jobs that are sent to MongoDB together.
const BATCH: usize = 1_000;

/// Enqueues a job: one JSON object, as a line of `recruiter enqueue --from`. With an `id`, the request may be repeated.
#[utoipa::path(
    post,
    path = "/api/v1/jobs",
    params(("custom_policy" = Option<bool>, Query, description = "Accept a retry policy that only workers know")),
    request_body(content = Object, description = "The job: `class`, `parameters`, and its settings"),
    responses(
        (status = 201, description = "It is enqueued: `id` and `outcome`"),
        (status = 200, description = "A job with this id or unique key is there: its `id`, and `outcome`"),
        (status = 422, body = ProblemDocument),
        (status = 429, description = "Its group or limit has as many waiting jobs as it may have", body = ProblemDocument)
    )
)]
pub(super) async fn one(State(web): Shared, mut given: Parameters, JsonText(text): JsonText) -> Result<Response, Problem> {
    let unknown = policies(&mut given)?;
    given.end()?;
    let spec: JobSpec = text.trim().parse().map_err(Problem::impossible)?;
    let (id, job) = job_of(spec, &*web.classes().await?, unknown)?;
    let enqueued = job.enqueue(&web.store).await.map_err(|error| {
        if !matches!(&error, EnqueueError::Store(failed) if failed.is_transient()) {
            return error.into();
        }
        let problem = format!("the job may have been enqueued; repeat the request with the id {id}: {}", chain(&error));
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, problem)
    })?;
    let status = if enqueued.is_new { StatusCode::CREATED } else { StatusCode::OK };
    let at = format!("/api/v1/jobs/{}", enqueued.id);
    let answer = json!({ "id": enqueued.id.to_string(), "outcome": enqueued.outcome.word() });
    Ok((status, [(LOCATION, at)], Json(answer)).into_response())
}

/// Enqueues many jobs, one for each line of JSON. Answers with a line of JSON after each batch, and with the last one when all are enqueued, or
/// when a line is refused: the lines before it are enqueued.
#[utoipa::path(
    post,
    path = "/api/v1/jobs/lines",
    params(
        ("skip" = Option<u64>, Query, description = "Number of lines that are passed over: `line` of an answer, to continue there"),
        ("custom_policy" = Option<bool>, Query, description = "Accept retry policies that only workers know"),
    ),
    request_body(content = String, content_type = "application/x-ndjson"),
    responses((status = 200, description = "Lines `{\"line\": …, \"enqueued\": …}`; the last one has `done`, or `error` with the line that it is about"))
)]
pub(super) async fn lines(State(web): Shared, mut given: Parameters, headers: HeaderMap, body: Body) -> Result<Response, Problem> {
    let unknown = policies(&mut given)?;
    let skip = given.take("skip", |text| text.parse().map_err(|_| "it is a number of lines".to_owned()))?.unwrap_or(0);
    given.end()?;
    let content = headers.get(CONTENT_TYPE).and_then(|content| content.to_str().ok()).unwrap_or_default();
    if content.split(';').next().is_none_or(|kind| kind.trim() != "application/x-ndjson") {
        return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "send the lines with `Content-Type: application/x-ndjson`"));
    }
    let classes = web.classes().await?;
    let (said, answers) = mpsc::channel(16);
    tokio::spawn(async move {
        let mut import = Import { web: &web, classes: &classes, unknown, done: 0, enqueued: 0, batch: Vec::new(), said };
        let last = match import.run(body, skip).await {
            Ok(()) => json!({ "line": import.done, "enqueued": import.enqueued, "done": true }),
            Err((line, problem)) => {
                let error = json!({ "line": line, "status": problem.status().as_u16(), "detail": problem.into_detail() });
                json!({ "line": import.done, "enqueued": import.enqueued, "error": error })
            }
        };
        import.say(&last).await;
    });
    let answers = stream::unfold(answers, async |mut answers| Some((answers.recv().await?, answers)));
    Ok(([(CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(answers.map(Ok::<Bytes, std::convert::Infallible>))).into_response())
}

/// Lines that are being enqueued.
struct Import<'a> {
    web: &'a Web,
    classes: &'a Classes,
    unknown: UnknownPolicies,
    /// All lines up to this number are enqueued.
    done: u64,
    enqueued: u64,
    /// Each with the number of its line.
    batch: Vec<(u64, NewJob)>,
    said: mpsc::Sender<Bytes>,
}

/// The line that it is about, and the problem.
type Refused = (u64, Problem);

impl Import<'_> {
    async fn run(&mut self, body: Body, skip: u64) -> Result<(), Refused> {
        let (mut chunks, mut rest, mut number) = (body.into_data_stream(), Vec::new(), 0);
        loop {
            let chunk =
                timeout(BODY_WITHIN, chunks.next()).await.map_err(|_| (number, Problem::new(StatusCode::REQUEST_TIMEOUT, too_slow())))?;
            let Some(chunk) = chunk else { break };
            let chunk = chunk.map_err(|error| (number, Problem::bad(format!("the body ended early: {error}"))))?;
            rest.extend_from_slice(&chunk);
            let mut begin = 0;
            while let Some(length) = rest[begin..].iter().position(|byte| *byte == b'\n') {
                number += 1;
                self.add(number, &rest[begin..begin + length], skip).await?;
                begin += length + 1;
            }
            rest.drain(..begin);
            if rest.len() > LONGEST_LINE {
                let problem = Problem::impossible(format!("the line is longer than {LONGEST_LINE} bytes"));
                return self.refuse(number + 1, problem).await;
            }
        }
        self.add(number + 1, &rest, skip).await?;
        self.send().await
    }

    async fn add(&mut self, number: u64, line: &[u8], skip: u64) -> Result<(), Refused> {
        if number <= skip {
            self.done = number;
            return Ok(());
        }
        let read = JobSpec::of_line(line).map_err(Problem::impossible);
        let job = read.and_then(|spec| spec.map(|spec| job_of(spec, self.classes, self.unknown)).transpose());
        match job {
            Ok(Some((_, job))) => self.batch.push((number, job)),
            Ok(None) => {}
            Err(problem) => return self.refuse(number, problem).await,
        }
        if self.batch.len() < BATCH { Ok(()) } else { self.send().await }
    }

    /// The lines before one that is refused are enqueued.
    async fn refuse(&mut self, number: u64, problem: Problem) -> Result<(), Refused> {
        self.send().await?;
        Err((number, problem))
    }

    /// Sends what there is together. If a job is refused, one by one, to find out which.
    async fn send(&mut self) -> Result<(), Refused> {
        let batch = std::mem::take(&mut self.batch);
        let Some((last, _)) = batch.last() else { return Ok(()) };
        let all = self.web.store.enqueue_many(batch.iter().map(|(_, job)| job.clone())).await;
        match all {
            Ok(enqueued) => (self.done, self.enqueued) = (*last, self.enqueued + enqueued.iter().filter(|job| job.is_new).count() as u64),
            Err(EnqueueError::Store(error)) => {
                let detail = format!("the lines up to {last} may have been enqueued: {}", chain(&error));
                return Err((self.done + 1, Problem::new(Problem::from(error).status(), detail)));
            }
            Err(_) => {
                for (number, job) in batch {
                    let enqueued = job.enqueue(&self.web.store).await.map_err(|error| (number, error.into()))?;
                    (self.done, self.enqueued) = (number, self.enqueued + u64::from(enqueued.is_new));
                }
            }
        }
        self.say(&json!({ "line": self.done, "enqueued": self.enqueued })).await;
        Ok(())
    }

    /// A client that has gone gets no answers; its lines are enqueued as far as they came.
    async fn say(&self, answer: &Value) {
        let _ = self.said.send(Bytes::from(format!("{answer}\n"))).await;
    }
}

pub(super) fn policies(given: &mut Parameters) -> Result<UnknownPolicies, Problem> {
    Ok(if given.flag("custom_policy")? { UnknownPolicies::Accept } else { UnknownPolicies::Refuse })
}

/// The job and its id, checked as far as this program can.
fn job_of(spec: JobSpec, classes: &Classes, unknown: UnknownPolicies) -> Result<(JobId, NewJob), Problem> {
    let mut spec = spec.with_defaults(classes);
    let id = *spec.id.get_or_insert_with(JobId::new);
    Ok((id, job_in(spec, unknown)?))
}

/// The job, checked as far as this program can.
pub(super) fn job_in(spec: JobSpec, unknown: UnknownPolicies) -> Result<NewJob, Problem> {
    spec.into_job(unknown).map_err(|problem| {
        let hint = if problem.is_unknown_policy() { "; if your workers know it, add custom_policy=true" } else { "" };
        Problem::impossible(format!("{problem}{hint}"))
    })
}
