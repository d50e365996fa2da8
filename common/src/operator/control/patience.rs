//! How long a call is repeated.

use std::time::{Duration, Instant as Monotonic};

use crate::{
    base::{shutdown::pause, telemetry::chain},
    mongo::StoreError,
};

/// How long a batch is repeated after transient errors. It is longer than MongoDB keeps the open transaction of a
/// killed process, which is one minute.
const TRY_FOR: Duration = Duration::from_secs(75);
/// Pause between two of these attempts.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Repeats a call after transient errors, for as long as [`Patience`] allows.
pub(crate) async fn patiently<T>(mut call: impl AsyncFnMut() -> Result<T, StoreError>) -> Result<T, StoreError> {
    let patience = Patience::new();
    loop {
        match call().await {
            Err(error) if patience.allows(&error).await => {}
            outcome => return outcome,
        }
    }
}

/// The time limit for repeating a call after transient errors.
pub(crate) struct Patience {
    since: Monotonic,
}

impl Patience {
    pub(crate) fn new() -> Self {
        Self { since: Monotonic::now() }
    }

    /// Whether the same call should be repeated. Waits for [`TRY_AGAIN_AFTER`] before it returns true.
    pub(crate) async fn allows(&self, error: &StoreError) -> bool {
        let repeat = error.is_transient() && !error.is_unauthorized() && self.since.elapsed() < TRY_FOR;
        if repeat {
            tracing::warn!(error = chain(error), "a batch of changes failed; trying again");
            pause(TRY_AGAIN_AFTER).await;
        }
        repeat
    }
}
