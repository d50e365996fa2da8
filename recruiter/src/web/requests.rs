//! The parts of a request, read with the messages of the command line.

use std::{str::FromStr, time::Duration};

use axum::{
    body::Body,
    extract::{FromRequest, FromRequestParts, Path, Query, Request},
    http::{StatusCode, header::CONTENT_TYPE, request::Parts},
};
use bson::{Bson, Document};
use futures_util::StreamExt as _;
use recruiter_common::{
    flags::name_of_text,
    ids::{GraphId, JobId},
    json,
    spec::{LONGEST_LINE, id_of_text},
};
use serde::de::{DeserializeOwned, value};
use tokio::time::timeout;

use super::problem::Problem;

/// How long a client may take for a body.
pub(super) const BODY_WITHIN: Duration = Duration::from_secs(30);

/// How much is read of a body that is too large, in bytes.
const LONGEST_READ: usize = 64 * 1024 * 1024;

/// The most elements of a page.
const LONGEST_PAGE: u16 = 1_000;

/// The id of a job, in the path.
pub(super) struct Id(pub(super) JobId);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let Path(id) = Path::<String>::from_request_parts(parts, state).await.map_err(|error| Problem::bad(error.body_text()))?;
        Self::of_text(&id)
    }
}

impl Id {
    pub(super) fn of_text(id: &str) -> Result<Self, Problem> {
        id_of_text(id).map(Self).map_err(Problem::bad)
    }
}

/// A name of something, in the path.
pub(super) struct Name(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for Name {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let Path(name) = Path::<String>::from_request_parts(parts, state).await.map_err(|error| Problem::bad(error.body_text()))?;
        name_of_text(&name).map(Self).map_err(Problem::bad)
    }
}

/// The id of a graph, in the path.
pub(super) struct Graph(pub(super) GraphId);

impl<S: Send + Sync> FromRequestParts<S> for Graph {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let Path(id) = Path::<String>::from_request_parts(parts, state).await.map_err(|error| Problem::bad(error.body_text()))?;
        Self::of_text(&id)
    }
}

impl Graph {
    pub(super) fn of_text(id: &str) -> Result<Self, Problem> {
        let problem = || Problem::bad(format!("`{id:.80}` is not the id of a graph (24 hexadecimal digits)"));
        id.parse().map(Self).map_err(|_| problem())
    }
}

/// The parameters of the query, which are taken by their names.
pub(super) struct Parameters(Vec<(String, String)>);

impl<S: Send + Sync> FromRequestParts<S> for Parameters {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let query = Query::<Vec<(String, String)>>::try_from_uri(&parts.uri);
        query.map(|Query(pairs)| Self(pairs)).map_err(|error| Problem::bad(error.body_text()))
    }
}

impl Parameters {
    /// The text of this parameter, empty if it is not given.
    pub(super) fn text(&self, name: &str) -> &str {
        self.0.iter().find(|(given, _)| given == name).map_or("", |(_, text)| text)
    }

    /// All names and texts.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, text)| (&**name, &**text))
    }

    /// The value of this parameter; an empty one is as none.
    pub(super) fn take<T>(&mut self, name: &str, read: impl FnOnce(&str) -> Result<T, String>) -> Result<Option<T>, Problem> {
        let Some(at) = self.0.iter().position(|(given, _)| given == name) else { return Ok(None) };
        let (_, text) = self.0.remove(at);
        if text.is_empty() {
            return Ok(None);
        }
        read(&text).map(Some).map_err(|problem| Problem::bad(format!("the parameter `{name}`: {problem}")))
    }

    /// The most elements of a page: `limit`.
    pub(super) fn page_limit(&mut self) -> Result<u16, Problem> {
        let of_text = |text: &str| {
            text.parse().ok().filter(|limit| (1..=LONGEST_PAGE).contains(limit)).ok_or(format!("it is from 1 to {LONGEST_PAGE}"))
        };
        Ok(self.take("limit", of_text)?.unwrap_or(20))
    }

    /// Those that were not taken, for the audit.
    pub(super) fn to_document(&self) -> Document {
        self.0.iter().map(|(name, text)| (name.clone(), Bson::from(text.as_str()))).collect()
    }

    /// All values of this parameter, which may be given several times. Empty ones are as none.
    pub(super) fn take_all<T>(&mut self, name: &str, read: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, Problem> {
        let (taken, left) = std::mem::take(&mut self.0).into_iter().partition(|(given, _)| given == name);
        self.0 = left;
        let texts: Vec<(String, String)> = taken;
        let given = texts.iter().filter(|(_, text)| !text.is_empty());
        given.map(|(_, text)| read(text).map_err(|problem| Problem::bad(format!("the parameter `{name}`: {problem}")))).collect()
    }

    /// Whether this parameter is `true`.
    pub(super) fn flag(&mut self, name: &str) -> Result<bool, Problem> {
        let read = |text: &str| bool::from_str(text).map_err(|_| format!("`{text:.80}` is neither `true` nor `false`"));
        Ok(self.take(name, read)?.unwrap_or_default())
    }

    /// All that were not taken. One that the type does not have is refused.
    pub(super) fn rest<T: DeserializeOwned>(self) -> Result<T, Problem> {
        let pairs = value::MapDeserializer::<_, value::Error>::new(self.0.into_iter());
        T::deserialize(pairs).map_err(|error| Problem::bad(format!("the query: {error}")))
    }

    /// # Errors
    /// When there is one that was not taken.
    pub(super) fn end(self) -> Result<(), Problem> {
        match self.0.first() {
            Some((name, _)) => Err(Problem::bad(format!("there is no parameter `{name:.80}` here"))),
            None => Ok(()),
        }
    }
}

/// A body of JSON, as text; empty if there is none.
pub(super) struct JsonText(pub(super) String);

impl<S: Send + Sync> FromRequest<S> for JsonText {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let content = request.headers().get(CONTENT_TYPE).map(|content| content.to_str().unwrap_or_default().to_owned());
        let read = timeout(BODY_WITHIN, whole(request.into_body())).await;
        let bytes = read.map_err(|_| Problem::new(StatusCode::REQUEST_TIMEOUT, too_slow()))??;
        // A browser sends only some other types for the page of another site.
        if !bytes.is_empty() && !content.as_deref().is_some_and(is_json) {
            return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "send the body with `Content-Type: application/json`"));
        }
        let text = String::from_utf8(bytes).map_err(|error| Problem::bad(format!("the body is not UTF-8: {error}")))?;
        Ok(Self(text))
    }
}

/// Reads a body. Of one that is too large, some more is read and not kept: a client that still sends would not see the answer.
async fn whole(body: Body) -> Result<Vec<u8>, Problem> {
    let (mut chunks, mut bytes, mut length) = (body.into_data_stream(), Vec::new(), 0);
    while let Some(chunk) = chunks.next().await
        && length <= LONGEST_READ
    {
        let chunk = chunk.map_err(|error| Problem::bad(format!("the body ended early: {error}")))?;
        length += chunk.len();
        if length <= LONGEST_LINE {
            bytes.extend_from_slice(&chunk);
        }
    }
    if length > LONGEST_LINE {
        let problem = format!("the body is larger than {LONGEST_LINE} bytes: store the data elsewhere and enqueue a reference to it");
        return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, problem));
    }
    Ok(bytes)
}

impl JsonText {
    /// The value; its default if there is no body.
    pub(super) fn value<T: DeserializeOwned + Default>(&self) -> Result<T, Problem> {
        let text = self.0.trim();
        if text.is_empty() {
            return Ok(T::default());
        }
        // serde would take an array as the fields in their order.
        if !text.starts_with('{') {
            return Err(Problem::impossible("the body must be a JSON object"));
        }
        json::parse(text).map_err(Problem::impossible)
    }
}

pub(super) fn too_slow() -> String {
    format!("the body did not come within {} s", BODY_WITHIN.as_secs())
}

fn is_json(content: &str) -> bool {
    let kind = content.split(';').next().unwrap_or_default().trim();
    kind.eq_ignore_ascii_case("application/json")
}
