//! Frequent scans for unannounced jobs: when the next one is due.
//!
//! A program in another language may insert jobs without a hint. A full scan finds them once per poll interval. After an unannounced job,
//! more of them probably follow. So for some seconds the lanes are listed and searched much more often, without the other work of a full
//! scan.
//!
//! Pure: the caller passes the instants.

use std::time::{Duration, Instant as Monotonic};

/// Minimum pause between two frequent scans.
const EVERY: Duration = Duration::from_millis(50);
/// The pause after a scan is at least this many times its duration, so scans take at most a tenth of the time.
const REST: u32 = 9;
/// Frequent scans end this long after the last scan that found an unannounced job.
const FOR: Duration = Duration::from_secs(5);

/// When the next frequent scan is due.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct UnannouncedScans {
    /// `None` if no recent scan found an unannounced job.
    state: Option<Frequent>,
}

#[derive(Clone, Copy, Debug)]
struct Frequent {
    /// When the next scan is due.
    next: Monotonic,
    /// When frequent scans end.
    until: Monotonic,
}

impl UnannouncedScans {
    /// Records a scan, full or frequent, that ended at `at` and took `took`. `has_found`: an unannounced job was found and assigned.
    pub(crate) fn scanned(&mut self, has_found: bool, took: Duration, at: Monotonic) {
        let until = if has_found { Some(at + FOR) } else { self.state.map(|state| state.until) };
        let next = at + EVERY.max(took * REST);
        self.state = until.filter(|until| next <= *until).map(|until| Frequent { next, until });
    }

    /// When the next frequent scan is due. `None`: there are no frequent scans now.
    pub(crate) fn next(&self) -> Option<Monotonic> {
        self.state.map(|state| state.next)
    }

    /// Whether a frequent scan is due.
    pub(crate) fn is_due(&self, at: Monotonic) -> bool {
        self.next().is_some_and(|next| next <= at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(2);

    #[test]
    fn scans_follow_a_find_until_there_is_none_for_a_while() {
        let (mut scans, start) = (UnannouncedScans::default(), Monotonic::now());
        scans.scanned(false, SHORT, start);
        assert_eq!(scans.next(), None, "an idle system has none");
        scans.scanned(true, SHORT, start);
        let (mut at, mut count) = (start, 0);
        while let Some(next) = scans.next() {
            assert!(!scans.is_due(at) && scans.is_due(next));
            assert_eq!(next - at, EVERY);
            (at, count) = (next, count + 1);
            // The tenth scan finds another one.
            scans.scanned(count == 10, SHORT, at);
        }
        assert_eq!((count, at), (110, start + EVERY * 10 + FOR));
    }

    #[test]
    fn scans_take_a_small_share_of_the_time() {
        let (mut scans, start) = (UnannouncedScans::default(), Monotonic::now());
        let mut pause = |took: u64| {
            scans.scanned(true, Duration::from_millis(took), start);
            scans.next().map(|next| (next - start).as_millis())
        };
        assert_eq!([5, 20, 500].map(&mut pause), [Some(50), Some(180), Some(4_500)]);
        assert_eq!(pause(600), None, "the full scans are as frequent");
    }
}
