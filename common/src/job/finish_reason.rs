//! The finish reason: why a job is in the archive. The documents call it `why`.

use std::{borrow::Cow, fmt};

use bson::Bson;
use serde::Deserialize;

/// The finish reason of a job. Custom policies may add reasons.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct FinishReason(Cow<'static, str>);

impl FinishReason {
    /// It succeeded.
    pub const DONE: FinishReason = FinishReason(Cow::Borrowed("done"));
    /// It failed, and its policy does not retry it.
    pub const NOT_SCHEDULED_BY_RETRY_POLICY: FinishReason = FinishReason(Cow::Borrowed("not-scheduled-by-retry-policy"));
    /// It failed as many times as its policy allows.
    pub const TRIED_TOO_MANY_TIMES: FinishReason = FinishReason(Cow::Borrowed("tried-too-many-times"));
    /// It failed with an error class that its policy does not retry.
    pub const NON_RETRIABLE_EXCEPTION: FinishReason = FinishReason(Cow::Borrowed("non-retriable-exception"));
    /// Its worker died while it ran, and its policy does not retry it.
    pub const WORKER_DIED: FinishReason = FinishReason(Cow::Borrowed("worker-died"));
    /// Its worker stopped while it ran, and its policy does not retry it.
    pub const INTERRUPTED: FinishReason = FinishReason(Cow::Borrowed("interrupted"));
    /// It was cancelled.
    pub const CANCELLED: FinishReason = FinishReason(Cow::Borrowed("cancelled"));
    /// Its workable gave up: it returned that another attempt is pointless.
    pub const GAVE_UP: FinishReason = FinishReason(Cow::Borrowed("gave-up"));
    /// Its document is not a valid job.
    pub const MALFORMED: FinishReason = FinishReason(Cow::Borrowed("malformed"));

    /// It was not started before its `expires_at`.
    pub const EXPIRED: FinishReason = FinishReason(Cow::Borrowed("expired"));

    /// The built-in reasons.
    pub const BUILT_IN: [FinishReason; 10] = [
        FinishReason::DONE,
        FinishReason::NOT_SCHEDULED_BY_RETRY_POLICY,
        FinishReason::TRIED_TOO_MANY_TIMES,
        FinishReason::NON_RETRIABLE_EXCEPTION,
        FinishReason::WORKER_DIED,
        FinishReason::INTERRUPTED,
        FinishReason::CANCELLED,
        FinishReason::GAVE_UP,
        FinishReason::MALFORMED,
        FinishReason::EXPIRED,
    ];

    /// A reason of a custom policy.
    pub fn custom(why: impl Into<String>) -> Self {
        Self(Cow::Owned(why.into()))
    }

    /// The reason as stored.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<FinishReason> for Bson {
    fn from(why: FinishReason) -> Self {
        Bson::String(why.0.into_owned())
    }
}

impl fmt::Display for FinishReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
