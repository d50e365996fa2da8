//! Why a request is refused: a problem document (RFC 9457).

use axum::{
    Json,
    http::{
        HeaderValue, StatusCode,
        header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE},
    },
    response::{IntoResponse, Response},
};
use bson::{Document, doc};
use recruiter_common::{EnqueueError, StoreError, store::LOOK_LIMIT, telemetry::chain, text::printable};
use serde::Serialize;
use utoipa::ToSchema;

/// Why a request is refused.
#[derive(Clone, Debug)]
pub(super) struct Problem {
    status: StatusCode,
    detail: String,
}

/// What is answered about it, as `application/problem+json`.
#[derive(Serialize, ToSchema)]
#[schema(as = Problem)]
pub(super) struct ProblemDocument {
    /// The kind of problem, as the status of HTTP has it.
    title: &'static str,
    /// The status of HTTP.
    status: u16,
    /// What is wrong, and what to do, in a sentence.
    detail: String,
}

impl Problem {
    pub(super) fn new(status: StatusCode, detail: impl ToString) -> Self {
        Self { status, detail: detail.to_string() }
    }

    /// The request cannot be read.
    pub(super) fn bad(detail: impl ToString) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }

    /// The request can be read, and what it wants is not possible.
    pub(super) fn impossible(detail: impl ToString) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, detail)
    }

    pub(super) fn not_found(detail: impl ToString) -> Self {
        Self::new(StatusCode::NOT_FOUND, detail)
    }

    /// What there is does not allow it.
    pub(super) fn conflict(detail: impl ToString) -> Self {
        Self::new(StatusCode::CONFLICT, detail)
    }

    pub(super) fn unauthorized(detail: impl ToString) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, detail)
    }

    pub(super) fn forbidden(detail: impl ToString) -> Self {
        Self::new(StatusCode::FORBIDDEN, detail)
    }

    /// Why a search has found nothing: it was stopped, or MongoDB has a problem.
    pub(super) fn of_search(error: StoreError) -> Self {
        if !error.is_too_slow() {
            return error.into();
        }
        let seconds = LOOK_LIMIT.as_secs();
        Self::impossible(format!("the search was stopped after {seconds} s, because no index serves it; narrow it with state and since"))
    }

    pub(super) fn status(&self) -> StatusCode {
        self.status
    }

    pub(super) fn into_detail(self) -> String {
        self.detail
    }

    /// What the audit says about a change that was refused, or that failed.
    pub(super) fn outcome(&self) -> Document {
        doc! { "status": i32::from(self.status.as_u16()), "problem": printable(&self.detail, 4_000) }
    }

    pub(super) fn wrong_method() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "this path has other methods; /api/v1/openapi.json lists them")
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let Self { status, ref detail } = self;
        if status.is_server_error() {
            tracing::warn!(status = status.as_u16(), detail, "a request failed");
        }
        let title = status.canonical_reason().unwrap_or_default();
        let document = ProblemDocument { title, status: status.as_u16(), detail: detail.clone() };
        let mut response = (status, Json(document)).into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // For a page that tells it.
        response.extensions_mut().insert(self);
        response
    }
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        let status = if error.may_pass() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::INTERNAL_SERVER_ERROR };
        Self::new(status, chain(&error))
    }
}

impl From<EnqueueError> for Problem {
    fn from(error: EnqueueError) -> Self {
        if let EnqueueError::Store(error) = error {
            return error.into();
        }
        let is_full = matches!(error, EnqueueError::BacklogFull { .. } | EnqueueError::GateFull { .. });
        let status = if is_full {
            StatusCode::TOO_MANY_REQUESTS
        } else if matches!(error, EnqueueError::KeyKeepsChanging { .. }) {
            StatusCode::CONFLICT
        } else {
            StatusCode::UNPROCESSABLE_ENTITY
        };
        Self::new(status, chain(&error))
    }
}
