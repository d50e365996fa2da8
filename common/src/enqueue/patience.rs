//! The waits of a caller until a group has room.

use std::time::{Duration, Instant as Monotonic};

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};

use crate::base::pause;

/// The pauses between attempts to enqueue in a full group. With jitter, because callers that began together must not ask together.
const PAUSES: ExponentialBuilder = ExponentialBuilder::new()
    .with_min_delay(Duration::from_millis(50))
    .with_max_delay(Duration::from_millis(500))
    .with_jitter()
    .without_max_times();

/// The waits of a caller that waits for room.
pub(crate) struct Patience {
    until: Monotonic,
    pauses: ExponentialBackoff,
}

impl Patience {
    pub(crate) fn new(timeout: Duration) -> Self {
        let now = Monotonic::now();
        // A timeout that is longer than the clock can express is as good as none.
        let until = now.checked_add(timeout).unwrap_or(now + Duration::from_secs(365 * 24 * 60 * 60));
        Self { until, pauses: PAUSES.build() }
    }

    /// Waits before the next attempt. Returns false if the time is over.
    pub(crate) async fn wait(&mut self) -> bool {
        let left = self.until.saturating_duration_since(Monotonic::now());
        match self.pauses.next() {
            Some(next) if !left.is_zero() => pause(next.min(left)).await,
            _ => return false,
        }
        true
    }
}
