//! Runs fewer jobs while the machine is short of files, processes or memory.
//!
//! A job that could not be started is released. Without a pause the worker would start and release it again and again. Therefore the worker
//! starts no job for a second. Then it runs half as many jobs as before, and doubles this number every 30 seconds.

use std::time::{Duration, Instant as Monotonic};

/// How long no job is started after the machine lacked a resource.
const PAUSE: Duration = Duration::from_secs(1);
/// How often the number of jobs doubles.
const DOUBLE_EVERY: Duration = Duration::from_secs(30);
/// Time after which another shortage is logged again.
const OVER_AFTER: Duration = Duration::from_secs(300);

/// The last shortage of this machine, if there was one.
#[derive(Debug, Default)]
pub(super) struct Shortage(Option<Observed>);

#[derive(Clone, Copy, Debug)]
struct Observed {
    /// Jobs that may run at a time, right after the pause.
    allowed: u32,
    at: Monotonic,
}

impl Shortage {
    /// Notes that a job could not be started while `running` jobs used slots, this job included. Returns whether the shortage must be
    /// logged.
    pub(super) fn observe(&mut self, running: u32, now: Monotonic) -> bool {
        let allowed = match &self.0 {
            // Jobs that were started together fail together: this is one shortage.
            Some(last) if now < last.at + PAUSE => last.allowed,
            _ => self.allowed(running, now) / 2,
        };
        let is_new = self.0.is_none_or(|last| now >= last.at + OVER_AFTER);
        self.0 = Some(Observed { allowed: allowed.max(1), at: now });
        is_new
    }

    /// How many jobs the worker may hold now, of the configured `concurrency`.
    pub(super) fn allowed(&self, concurrency: u32, now: Monotonic) -> u32 {
        let Some(last) = &self.0 else { return concurrency };
        let quiet = now.saturating_duration_since(last.at);
        if quiet < PAUSE {
            return 0;
        }
        let doublings = u32::try_from(quiet.as_secs() / DOUBLE_EVERY.as_secs()).unwrap_or(u32::MAX);
        1_u32.checked_shl(doublings).map_or(concurrency, |factor| last.allowed.saturating_mul(factor)).min(concurrency)
    }

    /// When the worker may hold more jobs again, if it may not hold all of `concurrency` now.
    pub(super) fn eases_at(&self, concurrency: u32, now: Monotonic) -> Option<Monotonic> {
        let last = self.0.as_ref().filter(|_| self.allowed(concurrency, now) < concurrency)?;
        let doublings = u32::try_from(now.saturating_duration_since(last.at).as_secs() / DOUBLE_EVERY.as_secs()).unwrap_or(u32::MAX);
        Some(if now < last.at + PAUSE { last.at + PAUSE } else { last.at + DOUBLE_EVERY * (doublings + 1) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_halves_and_quiet_doubles() {
        let (start, mut shortage) = (Monotonic::now(), Shortage::default());
        let at = |milliseconds: u64| start + Duration::from_millis(milliseconds);
        assert_eq!(shortage.allowed(500, at(0)), 500);
        assert!(shortage.observe(500, at(0)), "a new one");
        for burst in 1..200 {
            assert!(!shortage.observe(500 - burst, at(u64::from(burst))), "the same one");
        }
        assert_eq!(shortage.allowed(500, at(300)), 0, "a pause");
        let eases_at = |milliseconds| shortage.eases_at(500, at(milliseconds));
        assert_eq!(
            [300, 1_198, 1_199, 30_198, 30_199].map(eases_at),
            [Some(at(1_199)), Some(at(1_199)), Some(at(30_199)), Some(at(30_199)), None]
        );
        assert_eq!(shortage.allowed(500, at(2_000)), 250);
        assert!(!shortage.observe(250, at(2_000)));
        assert_eq!(shortage.allowed(500, at(4_000)), 125);
        assert_eq!(shortage.allowed(500, at(33_000)), 250);
        assert_eq!(shortage.allowed(500, at(63_000)), 500);
        assert_eq!(shortage.allowed(u32::MAX, at(10_000_000)), u32::MAX);
        assert!(shortage.observe(3, at(10_000_000)), "new again");
        assert_eq!(shortage.allowed(500, at(10_002_000)), 1);
        assert!(!shortage.observe(1, at(10_003_000)));
        assert_eq!(shortage.allowed(500, at(10_005_000)), 1, "never none at all");
    }
}
