//! Events and messages as server-sent events; publishes messages.
//!
//! A stream begins with an id, and each thing in it has one. A client that comes back with the last one (`Last-Event-ID`) gets what it has not
//! had. An event `missed` says that some cannot be had any more.

use std::{convert::Infallible, pin::pin, time::Duration};

use axum::{
    Extension, Json,
    extract::State,
    http::{HeaderMap, HeaderName, StatusCode},
    response::{IntoResponse, Response, Sse, sse},
};
use bson::doc;
use futures_util::{Stream, StreamExt as _, future::select, stream};
use recruiter_common::{
    EventsError,
    json::to_bson,
    messages::{Arrival, From as Begin, Message, Messages, Position, PublishError, SubscribeError},
    spec::id_of_text,
    telemetry::chain,
    topics::Pattern,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::{sync::OwnedSemaphorePermit, time::timeout};
use utoipa::ToSchema;

use super::super::{
    Shared, Web,
    access::Until,
    live::{Place, Told},
    problem::{Problem, ProblemDocument},
    requests::{JsonText, Parameters},
};
use crate::views::{extended, filter::when_of_text};

/// How often something is sent while nothing happens: proxies end silent connections.
const ALIVE_EVERY: Duration = Duration::from_secs(15);
/// Maximum number of patterns, and of jobs, in a request.
const MOST: usize = 100;
/// How long a message is tried to be published.
const PUBLISHED_WITHIN: Duration = Duration::from_secs(20);
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// What happens to jobs and workers, from now on or behind the event of `Last-Event-ID`, as server-sent events.
#[utoipa::path(
    get,
    path = "/api/v1/events",
    params(
        ("topic" = Option<Vec<String>>, Query, description = "Patterns of topics, for example `job.failed.*`; all if it is not given"),
        ("job" = Option<Vec<String>>, Query, description = "Ids of jobs: only their events"),
        ("Last-Event-ID" = Option<String>, Header, description = "The id of the last event that was received")
    ),
    responses(
        (status = 200, content_type = "text/event-stream", description = "Events; `missed` says how many were missed"),
        (status = 400, body = ProblemDocument)
    )
)]
pub(in super::super) async fn events(
    State(web): Shared,
    until: Option<Extension<Until>>,
    mut given: Parameters,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let mut patterns = topics(&mut given)?;
    let jobs = at_most("jobs", given.take_all("job", |text| id_of_text(text).map_err(|problem| problem.to_string()))?)?;
    given.end()?;
    if patterns.is_empty() {
        patterns.push(Pattern::everything());
    }
    let last = last_id::<Place>(&headers)?;
    let permit = permit(&web)?;
    let reader = web.live.read(&web.store, last, &web.tasks, &web.stop).await?;
    let begin = sse::Event::default().id(last.unwrap_or_else(|| reader.place()).to_string());
    let told = reader.matching(patterns, jobs).map(|(place, told)| {
        let event = sse::Event::default().id(place.to_string());
        match told.as_deref() {
            Some(Told::Event { json, .. }) => event.data(json),
            Some(Told::Missed(count)) => missed(event, *count),
            None => event,
        }
    });
    let until = until.map(|Extension(until)| until);
    Ok(answer(&web, permit, until, stream::iter([begin]).chain(told)))
}

/// Messages of applications, from now on or behind the message of `Last-Event-ID`, as server-sent events.
#[utoipa::path(
    get,
    path = "/api/v1/messages",
    params(
        ("topic" = Vec<String>, Query, description = "Patterns of topics, for example `news.*`"),
        ("since" = Option<String>, Query, description = "Begin with the messages since this instant; `2h` means two hours ago"),
        ("Last-Event-ID" = Option<String>, Header, description = "The position of the last message that was received")
    ),
    responses(
        (status = 200, content_type = "text/event-stream", description = "Messages; `missed` says that MongoDB's history does not reach back so far"),
        (status = 400, body = ProblemDocument)
    )
)]
pub(super) async fn messages(State(web): Shared, mut given: Parameters, headers: HeaderMap) -> Result<Response, Problem> {
    let patterns = topics(&mut given)?;
    let since = given.take("since", when_of_text)?;
    given.end()?;
    let from = match (last_id::<Position>(&headers)?, since) {
        (Some(position), _) => Begin::After(position),
        (None, Some(when)) => Begin::Since(when.by(web.store.now())),
        (None, None) => Begin::Now,
    };
    let permit = permit(&web)?;
    let (found, lost) = match web.store.subscribe_to(patterns.clone(), from).await {
        Err(SubscribeError::HistoryLost) => {
            (web.store.subscribe_to(patterns, Begin::Now).await?, Some(missed(sse::Event::default(), None)))
        }
        other => (other?, None),
    };
    let received = stream::unfold(Some(found), async |messages| {
        let mut messages = messages?;
        let (event, is_last) = arrived(&mut messages).await;
        Some((event, (!is_last).then_some(messages)))
    });
    // Its begin makes the answer come at once.
    let begin = lost.unwrap_or_else(|| sse::Event::default().comment("subscribed"));
    Ok(answer(&web, permit, None, stream::iter([begin]).chain(received)))
}

/// The next message, and whether it is the end.
async fn arrived(messages: &mut Messages) -> (sse::Event, bool) {
    match messages.next_arrival().await {
        Ok(Arrival::Message(Message { topic, body, at, position })) => {
            let message = doc! { "topic": topic, "body": body, "at": at.map(bson::DateTime::from_chrono) };
            (sse::Event::default().id(position.to_string()).data(extended(message).to_string()), false)
        }
        Ok(Arrival::Idle(position)) => (sse::Event::default().id(position.to_string()), false),
        Err(SubscribeError::HistoryLost) => (missed(sse::Event::default(), None), true),
        Err(error) => {
            tracing::warn!(error = chain(&error), "a stream of messages has ended");
            (sse::Event::default().event("error").data(json!({ "detail": chain(&error) }).to_string()), true)
        }
    }
}

/// A message of an application.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct NewMessage {
    /// Words with dots between them, for example `news.sports.ski`.
    topic: String,
    /// The content; MongoDB's extended JSON for dates, ids and binary data.
    #[schema(value_type = Object)]
    body: Option<Map<String, Value>>,
}

/// Publishes a message. After an answer of 503 it may have been published.
#[utoipa::path(
    post,
    path = "/api/v1/messages",
    request_body(content = NewMessage),
    responses((status = 200, description = "`topic` and `outcome`"), (status = 422, body = ProblemDocument))
)]
pub(super) async fn publish(State(web): Shared, given: Parameters, body: JsonText) -> Result<Json<Value>, Problem> {
    given.end()?;
    let NewMessage { topic, body } = body.value()?;
    let body = body.ok_or_else(|| Problem::impossible(r#"a message has a `topic` and a `body`, a JSON object, like {"order": 17}"#))?;
    let body = to_bson(Value::Object(body)).map_err(Problem::impossible)?;
    let published = timeout(PUBLISHED_WITHIN, web.store.publish_message(&topic, &body)).await;
    published.map_err(|_| {
        let seconds = PUBLISHED_WITHIN.as_secs();
        Problem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            format!("MongoDB has not answered within {seconds} s; the message may have been published"),
        )
    })??;
    Ok(Json(json!({ "topic": topic, "outcome": "published" })))
}

/// Ends when the process stops, or with the session of the reader. The permit is returned with it.
fn answer(
    web: &Web,
    permit: OwnedSemaphorePermit,
    until: Option<Until>,
    events: impl Stream<Item = sse::Event> + Send + 'static,
) -> Response {
    let stop = web.stop.clone();
    let over = async move {
        match until {
            Some(until) => select(pin!(stop.cancelled()), pin!(until.reached())).await.factor_first().0,
            None => stop.cancelled().await,
        }
    };
    let events = events.take_until(over).map(move |event| {
        let _held = &permit;
        Ok::<_, Infallible>(event)
    });
    Sse::new(events).keep_alive(sse::KeepAlive::new().interval(ALIVE_EVERY)).into_response()
}

fn permit(web: &Web) -> Result<OwnedSemaphorePermit, Problem> {
    let full = |_| Problem::new(StatusCode::SERVICE_UNAVAILABLE, "as many streams are open as may be; try again later");
    web.streams.clone().try_acquire_owned().map_err(full)
}

fn missed(event: sse::Event, count: Option<u64>) -> sse::Event {
    event.event("missed").data(json!({ "missed": count }).to_string())
}

fn topics(given: &mut Parameters) -> Result<Vec<Pattern>, Problem> {
    at_most("topics", given.take_all("topic", |text| Pattern::new(text).map_err(|problem| problem.to_string()))?)
}

fn at_most<T>(what: &str, given: Vec<T>) -> Result<Vec<T>, Problem> {
    if given.len() > MOST {
        return Err(Problem::bad(format!("{} {what} are too many: {MOST} is the limit", given.len())));
    }
    Ok(given)
}

/// The id of the last event that a client has had.
fn last_id<T: std::str::FromStr<Err: std::fmt::Display>>(headers: &HeaderMap) -> Result<Option<T>, Problem> {
    let Some(given) = headers.get(LAST_EVENT_ID).filter(|given| !given.is_empty()) else { return Ok(None) };
    let text = given.to_str().unwrap_or_default();
    text.parse().map(Some).map_err(|problem| Problem::bad(format!("the header Last-Event-ID: {problem}")))
}

impl From<EventsError> for Problem {
    fn from(error: EventsError) -> Self {
        if let EventsError::Store(error) = error { error.into() } else { Self::bad(error) }
    }
}

impl From<SubscribeError> for Problem {
    fn from(error: SubscribeError) -> Self {
        if let SubscribeError::Store(error) = error { error.into() } else { Self::bad(error) }
    }
}

impl From<PublishError> for Problem {
    fn from(error: PublishError) -> Self {
        if let PublishError::Store(error) = error { error.into() } else { Self::impossible(chain(&error)) }
    }
}
