//! The pace of a worker: how many jobs it accepts ahead of free slots, and how many of them it locks.
//!
//! A slot that becomes free need not wait for the recruiter. A worker accepts as many jobs ahead as it will start before the next assignment
//! can arrive: the rate at which its jobs end, times a horizon of 80 to 250 ms that follows the round trip to MongoDB. So a worker of long
//! jobs accepts none, and one of very short jobs accepts hundreds. It accepts more only when two thirds of them are started, so that one
//! round assigns many. Jobs ahead stay unlocked and due. A job that has waited for two horizons is returned, and the recruiter assigns it
//! again. Message brokers use the same term (AMQP's prefetch count).

use std::time::{Duration, Instant as Monotonic};

/// Maximum number of jobs ahead.
const MOST: u32 = 1_000;
/// Maximum size of the queued jobs, in bytes. Jobs for free slots are queued even above it.
pub(super) const BYTES: usize = 16 * 1024 * 1024;
/// The bounds of the horizon, and the round trips in it: a report, its hint, a round, and a reserve.
const SHORTEST: Duration = Duration::from_millis(80);
const LONGEST: Duration = Duration::from_millis(250);
const ROUND_TRIPS: u32 = 12;
/// The same for jobs that are locked ahead, in starts; and the maximum number of these jobs.
const SHORTEST_LOCK: Duration = Duration::from_millis(5);
const LONGEST_LOCK: Duration = Duration::from_millis(50);
const STARTS: u32 = 3;
const MOST_LOCKED: u32 = 250;
/// A job is returned when it has waited for this number of horizons.
const RETURN_AFTER: u32 = 2;
/// Busy time after which an ended job has 37 % of its weight in the rate, in seconds.
const FORGET_AFTER: f64 = 0.2;
/// A new measurement has this share of the mean: one eighth.
const SMOOTHING: u32 = 8;

/// How fast the jobs of a session end, and how long MongoDB takes to answer.
pub(super) struct Pace {
    /// The mean size of a job.
    mean_bytes: usize,
    rate: Rate,
    /// When the ended jobs were last counted, or when the worker became busy after that.
    busy_since: Monotonic,
    round_trip: Duration,
    start_took: Duration,
    /// No job has ended since jobs were returned: the worker accepts none ahead.
    is_stalled: bool,
}

impl Default for Pace {
    fn default() -> Self {
        let (round_trip, start_took) = (Duration::ZERO, Duration::ZERO);
        Self { mean_bytes: 0, rate: Rate::default(), busy_since: Monotonic::now(), round_trip, start_took, is_stalled: false }
    }
}

impl Pace {
    /// How many more jobs are accepted ahead, if there are `count` and `startable` of them get free slots.
    pub(super) fn room(&self, count: u32, startable: u32) -> u32 {
        if self.is_low(count) { self.wanted().saturating_sub(count.saturating_sub(startable)) } else { 0 }
    }

    /// Whether two thirds of the jobs ahead are started, if there are `count`: then more are accepted.
    pub(super) fn is_low(&self, count: u32) -> bool {
        count <= self.wanted() / 3
    }

    /// How many jobs this worker would start within the horizon.
    fn wanted(&self) -> u32 {
        self.rate_within(self.horizon()).min(MOST).min(self.most_of_this_size())
    }

    /// How many jobs of the mean size are at most in memory.
    fn most_of_this_size(&self) -> u32 {
        u32::try_from(BYTES / self.mean_bytes.max(1)).unwrap_or(u32::MAX)
    }

    /// How many jobs end within this time.
    fn rate_within(&self, time: Duration) -> u32 {
        self.ends_within(time, self.rate.per_second())
    }

    /// How many jobs end within this time if so many end per second, once a job has ended.
    fn ends_within(&self, time: Duration, per_second: f64) -> u32 {
        let ends = per_second * time.as_secs_f64();
        if self.is_stalled || ends < 1.0 {
            return 0;
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a float becomes the nearest integer of the type")]
        let ends = ends.round() as u32;
        ends
    }

    /// How many jobs are locked ahead: as many as end while the answer of a start is awaited, with a reserve.
    pub(super) fn to_lock_ahead(&self) -> u32 {
        self.rate_within(self.during_starts()).min(MOST_LOCKED).min(self.most_of_this_size())
    }

    /// The same, of jobs of a kind of which so many end per second.
    pub(super) fn to_lock_of(&self, per_second: f64) -> u32 {
        self.ends_within(self.during_starts(), per_second)
    }

    fn during_starts(&self) -> Duration {
        (self.start_took * STARTS).clamp(SHORTEST_LOCK, LONGEST_LOCK)
    }

    /// How long a job waits until it is returned.
    pub(super) fn patience(&self) -> Duration {
        self.horizon() * RETURN_AFTER
    }

    fn horizon(&self) -> Duration {
        (self.round_trip * ROUND_TRIPS).clamp(SHORTEST, LONGEST)
    }

    /// Notes the size of a job.
    pub(super) fn size(&mut self, bytes: usize) {
        self.mean_bytes = smoothed(self.mean_bytes, bytes);
    }

    /// The worker was idle, and is busy from now on.
    pub(super) fn begin(&mut self, now: Monotonic) {
        self.busy_since = now;
    }

    /// Notes that `count` jobs have ended until `now`.
    pub(super) fn ended(&mut self, count: usize, now: Monotonic) {
        self.is_stalled &= count == 0;
        self.rate.ended(count, now.saturating_duration_since(self.busy_since));
        self.busy_since = now;
    }

    /// No jobs are accepted or locked ahead until one ends.
    pub(super) fn stall(&mut self) {
        self.is_stalled = true;
    }

    /// Notes the duration of a start.
    pub(super) fn start_took(&mut self, took: Duration) {
        self.start_took = smoothed_time(self.start_took, took);
    }

    /// Notes the duration of a report to MongoDB.
    pub(super) fn round_trip(&mut self, took: Duration) {
        self.round_trip = smoothed_time(self.round_trip, took);
    }
}

pub(super) fn smoothed_time(mean: Duration, value: Duration) -> Duration {
    if mean.is_zero() { value } else { mean - mean / SMOOTHING + value / SMOOTHING }
}

fn smoothed(mean: usize, value: usize) -> usize {
    if mean == 0 { value } else { mean - mean / SMOOTHING as usize + value / SMOOTHING as usize }
}

/// The rate at which jobs end while the worker is busy. Older ends have less weight.
#[derive(Debug, Default)]
struct Rate {
    ends: f64,
    seconds: f64,
}

impl Rate {
    fn ended(&mut self, count: usize, after: Duration) {
        let weight = (-after.as_secs_f64() / FORGET_AFTER).exp();
        #[expect(clippy::cast_precision_loss, reason = "a count of jobs")]
        let count = count as f64;
        (self.ends, self.seconds) = (self.ends * weight + count, self.seconds * weight + after.as_secs_f64());
    }

    fn per_second(&self) -> f64 {
        if self.seconds > 0.0 { self.ends / self.seconds } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pace of a worker of whose jobs `count` end every `every` milliseconds.
    fn pace(count: usize, every: u64) -> Pace {
        let mut pace = Pace::default();
        (0..100).for_each(|_| pace.ended(count, pace.busy_since + Duration::from_millis(every)));
        pace
    }

    #[test]
    fn short_jobs_are_accepted_ahead_and_long_ones_are_not() {
        let wanted = |count: usize, every: u64, round_trip_us: u64| {
            let mut pace = pace(count, every);
            pace.round_trip(Duration::from_micros(round_trip_us));
            pace.wanted()
        };
        assert_eq!(Pace::default().wanted(), 0, "nothing is known yet");
        assert_eq!([wanted(10, 5, 300), wanted(10, 100, 300), wanted(10, 2_000, 300)], [160, 8, 0]);
        assert_eq!(wanted(1_000, 5, 300), MOST);
        assert_eq!([wanted(10, 100, 10_000), wanted(10, 100, 1_000_000)], [12, 25], "a slow connection");
    }

    #[test]
    fn as_many_are_locked_ahead_as_end_while_a_start_is_answered() {
        let to_lock = |count: usize, every: u64, start_ms: u64| {
            let mut pace = pace(count, every);
            pace.start_took(Duration::from_millis(start_ms));
            let locked = pace.to_lock_ahead();
            pace.stall();
            assert_eq!((pace.to_lock_ahead(), pace.wanted()), (0, 0));
            pace.ended(1, pace.busy_since);
            assert_eq!(pace.to_lock_ahead(), locked, "one has ended");
            locked
        };
        assert_eq!([to_lock(10, 5, 0), to_lock(10, 5, 4), to_lock(10, 5, 100)], [10, 24, 100]);
        assert_eq!([to_lock(10, 20, 4), to_lock(10, 100, 4), to_lock(10, 1_000, 4)], [6, 1, 0]);
        assert_eq!(to_lock(1_000, 5, 4), MOST_LOCKED);
    }

    #[test]
    fn large_jobs_are_few_in_memory() {
        let mut pace = Pace { mean_bytes: BYTES / 3, ..Pace::default() };
        pace.ended(1_000, pace.busy_since + Duration::from_millis(100));
        assert_eq!((pace.wanted(), pace.to_lock_ahead()), (3, 3));
    }

    #[test]
    fn time_without_a_job_does_not_count_and_a_change_is_learnt() {
        let mut pace = Pace::default();
        let start = pace.busy_since;
        pace.ended(10, start + Duration::from_millis(10));
        let learnt = pace.wanted();
        assert_eq!(learnt, 80);
        let later = start + Duration::from_secs(3_600);
        pace.begin(later);
        pace.ended(10, later + Duration::from_millis(10));
        assert_eq!(pace.wanted(), learnt);
        pace.begin(later);
        pace.ended(1, later + Duration::from_secs(2));
        assert_eq!(pace.wanted(), 0);
    }
}
