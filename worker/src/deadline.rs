//! When the time limit of an execution passes.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use recruiter_common::shutdown::pause;

/// The longest time until a deadline that was extended: an instant plus the longest duration would overflow.
pub(crate) const LONGEST_EXTENSION: Duration = Duration::from_secs(365 * 24 * 3_600);

/// When the time limit of an execution passes. Once it has passed, it cannot be extended.
#[derive(Debug, Default)]
pub(crate) struct Deadline(Mutex<Option<Limit>>);

#[derive(Clone, Copy, Debug)]
struct Limit {
    at: Instant,
    /// The time limit with all extensions.
    time: Duration,
}

impl Deadline {
    /// Begins a time limit, unless it is too long to ever pass.
    pub(crate) fn begin(&self, time: Duration) {
        *self.0.lock() = Instant::now().checked_add(time).map(|at| Limit { at, time });
    }

    pub(crate) fn at(&self) -> Option<Instant> {
        self.0.lock().map(|limit| limit.at)
    }

    /// The time limit with all extensions, if it has passed.
    pub(crate) fn passed(&self) -> Option<Duration> {
        self.0.lock().filter(|limit| Instant::now() >= limit.at).map(|limit| limit.time)
    }

    /// Resolves when the time limit has passed.
    pub(crate) async fn pass(&self) {
        loop {
            match self.at() {
                Some(at) if Instant::now() >= at => return,
                // An extension during this wait is noticed after it.
                Some(at) => pause(at.saturating_duration_since(Instant::now())).await,
                None => std::future::pending().await,
            }
        }
    }

    pub(crate) fn extend(&self, by: Duration) -> Option<Instant> {
        let (mut limit, now) = (self.0.lock(), Instant::now());
        let limit = limit.as_mut().filter(|limit| now < limit.at)?;
        let longest = now + LONGEST_EXTENSION;
        let at = limit.at.checked_add(by).map_or(longest, |at| at.min(longest)).max(limit.at);
        limit.time = limit.time.saturating_add(at - limit.at);
        limit.at = at;
        Some(at)
    }
}
