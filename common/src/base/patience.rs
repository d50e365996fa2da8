//! How long a call is waited for and repeated, and the pauses between.
//!
//! The repetitions themselves are those of the crate `backon`.

use std::{
    future::{Ready, ready},
    time::{Duration, Instant as Monotonic},
};

use tokio::time::{Instant, timeout};

/// A wait is divided into parts of this length.
const PART: Duration = Duration::from_secs(1);
/// A timer is later than this only if the process or its machine stood still.
const LATE: Duration = Duration::from_secs(1);

/// What comes of a future within a time in which this process runs: while it is stopped, or its machine is suspended, no answer can reach it.
/// `None` if the time is over.
pub(crate) async fn within<T>(mut left: Duration, mut future: impl Future<Output = T> + Unpin) -> Option<T> {
    while !left.is_zero() {
        let begun = Instant::now();
        if let Ok(done) = timeout(left.min(PART), &mut future).await {
            return Some(done);
        }
        let part = left.min(PART);
        if begun.elapsed() < part + LATE {
            left -= part;
        }
    }
    None
}

/// A time in which a call is repeated. It begins when this is made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    limit: Duration,
    since: Monotonic,
}

impl Patience {
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit, since: Monotonic::now() }
    }

    pub(crate) fn left(&self) -> Duration {
        self.limit.saturating_sub(self.since.elapsed())
    }

    pub(crate) fn is_over(&self) -> bool {
        self.left().is_zero()
    }

    /// The next pause, shortened to what is left of the time. `None` if nothing is left.
    pub(crate) fn shorten(&self, pause: Option<Duration>) -> Option<Duration> {
        if self.is_over() { None } else { pause.map(|pause| pause.min(self.left())) }
    }
}

/// In place of a pause between repetitions that follow at once.
pub(crate) fn at_once(_: Duration) -> Ready<()> {
    ready(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::pause;

    #[tokio::test]
    async fn a_wait_does_not_count_the_time_in_which_the_process_stands_still() {
        let limit = Duration::from_millis(500);
        let answered_after_a_stop = async {
            std::thread::sleep(limit + LATE * 2);
            pause(limit / 5).await;
        };
        assert_eq!(within(limit, Box::pin(answered_after_a_stop)).await, Some(()));
        assert_eq!(within(limit, std::future::pending::<()>()).await, None);
    }
}
