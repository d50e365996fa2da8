//! How long a call is repeated, and the pauses between.
//!
//! The repetitions themselves are those of the crate `backon`.

use std::{
    future::{Ready, ready},
    time::{Duration, Instant as Monotonic},
};

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
