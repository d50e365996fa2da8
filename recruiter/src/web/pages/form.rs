//! What a form sends.

use axum::{
    Extension,
    body::Bytes,
    extract::{FromRequest, FromRequestParts as _, Request},
    http::{
        StatusCode,
        header::{CONTENT_TYPE, HeaderValue},
    },
};
use sha2::{Digest as _, Sha256};
use tokio::time::timeout;

use super::{
    super::{
        problem::Problem,
        requests::{BODY_WITHIN, too_slow},
    },
    visitor::Visitor,
};

/// The fields of a form.
pub(super) struct Fields(Vec<(String, String)>);

impl Fields {
    /// The text of a field, empty if it is not there.
    pub(super) fn text(&self, name: &str) -> &str {
        self.given(name).unwrap_or_default()
    }

    /// The text of a field.
    pub(super) fn given(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(field, _)| field == name).map(|(_, text)| &**text)
    }
}

impl<S: Send + Sync> FromRequest<S> for Fields {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let is_form = |content: &HeaderValue| content.as_bytes().starts_with(b"application/x-www-form-urlencoded");
        if !request.headers().get(CONTENT_TYPE).is_some_and(is_form) {
            return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "This takes a form."));
        }
        let read = timeout(BODY_WITHIN, Bytes::from_request(request, state)).await;
        let read = read.map_err(|_| Problem::new(StatusCode::REQUEST_TIMEOUT, too_slow()))?;
        let bytes = read.map_err(|error| Problem::new(error.status(), error.body_text()))?;
        serde_urlencoded::from_bytes(&bytes).map(Self).map_err(Problem::bad)
    }
}

/// A form that somebody has sent from a page of this program, and not one of another.
pub(super) struct Sent {
    pub(super) visitor: Visitor,
    pub(super) fields: Fields,
}

impl<S: Send + Sync> FromRequest<S> for Sent {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let (mut parts, body) = request.into_parts();
        let visitor = Extension::<Visitor>::from_request_parts(&mut parts, state).await;
        let Extension(visitor) = visitor.map_err(|error| Problem::new(error.status(), error.body_text()))?;
        let fields = Fields::from_request(Request::from_parts(parts, body), state).await?;
        // By hashes: how long the comparison takes says nothing about the secret.
        if Sha256::digest(fields.text("csrf")) != Sha256::digest(&*visitor.csrf) {
            let problem =
                "The form is too old: the program was started again, or you logged in again. Go back, load the page again, and repeat.";
            return Err(Problem::forbidden(problem));
        }
        Ok(Self { visitor, fields })
    }
}
