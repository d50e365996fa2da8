//! The maximum number of bytes that one call reads or writes. It is halved after a call that timed out, and doubled each minute without
//! one.

use std::time::{Duration, Instant as Monotonic};

/// Time without a call that timed out, after which the portion is doubled.
const DOUBLED_AFTER: Duration = Duration::from_secs(60);

/// The size of one call, in bytes.
#[derive(Debug)]
pub(crate) struct Portion {
    most: usize,
    bytes: usize,
    changed: Monotonic,
}

impl Portion {
    /// Starts with `most` bytes, which is also the maximum.
    pub(crate) fn new(most: usize) -> Self {
        Self { most, bytes: most, changed: Monotonic::now() }
    }

    /// The bytes of the next call.
    pub(crate) fn bytes(&mut self) -> usize {
        self.bytes_at(Monotonic::now())
    }

    /// Whether the portion has its maximum size.
    pub(crate) fn is_whole(&mut self) -> bool {
        self.bytes() == self.most
    }

    /// Notes that a call timed out.
    pub(crate) fn halve(&mut self) {
        self.halve_at(Monotonic::now());
    }

    fn bytes_at(&mut self, now: Monotonic) -> usize {
        if self.bytes < self.most && now.saturating_duration_since(self.changed) >= DOUBLED_AFTER {
            (self.bytes, self.changed) = (self.most.min(self.bytes.saturating_mul(2)), now);
        }
        self.bytes
    }

    fn halve_at(&mut self, now: Monotonic) {
        (self.bytes, self.changed) = ((self.bytes / 2).max(1), now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_halved_at_once_and_doubled_slowly() {
        let start = Monotonic::now();
        let after = |seconds: u64| start + Duration::from_secs(seconds);
        let mut portion = Portion { most: 8_000, bytes: 8_000, changed: start };
        for seconds in [0, 10] {
            portion.halve_at(after(seconds));
        }
        let seen: Vec<usize> = [10, 69, 70, 71, 129, 130, 1_000].into_iter().map(|seconds| portion.bytes_at(after(seconds))).collect();
        assert_eq!(seen, [2_000, 2_000, 4_000, 4_000, 4_000, 8_000, 8_000]);
        let mut smallest = Portion { most: 3, bytes: 3, changed: start };
        (0..9).for_each(|_| smallest.halve_at(start));
        assert_eq!(smallest.bytes_at(start), 1, "one end or job is always tried");
    }
}
