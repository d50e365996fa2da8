//! The waits of a caller until a group has room.

use std::time::{Duration, Instant as Monotonic};

use crate::base::shutdown::pause;

/// Pauses between two attempts to enqueue in a full group: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// The waits of a caller that waits for room.
pub(crate) struct Patience {
    until: Monotonic,
    pause: Duration,
}

impl Patience {
    pub(crate) fn new(timeout: Duration) -> Self {
        let now = Monotonic::now();
        // A timeout that is longer than the clock can express is as good as none.
        let until = now.checked_add(timeout).unwrap_or(now + Duration::from_secs(365 * 24 * 60 * 60));
        Self { until, pause: PAUSES.0 }
    }

    /// Waits before the next attempt. Returns false if the time is over.
    pub(crate) async fn wait(&mut self) -> bool {
        let left = self.until.saturating_duration_since(Monotonic::now());
        if left.is_zero() {
            return false;
        }
        // Callers that began together do not ask together.
        let jitter = rand::random_range(0.5..1.0);
        pause(self.pause.mul_f64(jitter).min(left)).await;
        self.pause = (self.pause * 2).min(PAUSES.1);
        true
    }
}
