//! The finish reason: why a job is in the archive. The documents call it `why`.

use std::{borrow::Cow, fmt};

use bson::Bson;
use serde::Deserialize;

/// The finish reason of a job. Custom policies may add reasons.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Why(Cow<'static, str>);

impl Why {
    /// It succeeded.
    pub const DONE: Why = Why(Cow::Borrowed("done"));
    /// It failed, and its policy does not retry it.
    pub const NOT_SCHEDULED_BY_RETRY_POLICY: Why = Why(Cow::Borrowed("not-scheduled-by-retry-policy"));
    /// It failed as many times as its policy allows.
    pub const TRIED_TOO_MANY_TIMES: Why = Why(Cow::Borrowed("tried-too-many-times"));
    /// It failed with an error class that its policy does not retry.
    pub const NON_RETRIABLE_EXCEPTION: Why = Why(Cow::Borrowed("non-retriable-exception"));
    /// Its worker died while it ran, and its policy does not retry it.
    pub const WORKER_DIED: Why = Why(Cow::Borrowed("worker-died"));
    /// Its worker stopped while it ran, and its policy does not retry it.
    pub const INTERRUPTED: Why = Why(Cow::Borrowed("interrupted"));
    /// It was cancelled.
    pub const CANCELLED: Why = Why(Cow::Borrowed("cancelled"));
    /// Its workable gave up: it returned that another attempt is pointless.
    pub const GAVE_UP: Why = Why(Cow::Borrowed("gave-up"));
    /// Its document is not a valid job.
    pub const MALFORMED: Why = Why(Cow::Borrowed("malformed"));

    /// The built-in reasons.
    pub const BUILT_IN: [Why; 9] = [
        Why::DONE,
        Why::NOT_SCHEDULED_BY_RETRY_POLICY,
        Why::TRIED_TOO_MANY_TIMES,
        Why::NON_RETRIABLE_EXCEPTION,
        Why::WORKER_DIED,
        Why::INTERRUPTED,
        Why::CANCELLED,
        Why::GAVE_UP,
        Why::MALFORMED,
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

impl From<Why> for Bson {
    fn from(why: Why) -> Self {
        Bson::String(why.0.into_owned())
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
