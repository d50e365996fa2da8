//! Prefetch: the queue of all jobs that were read and can be started, and how many jobs the worker accepts ahead.
//!
//! Every assigned job goes through this queue, also one for a free slot: the next start takes it out at once. The other queued jobs are the
//! jobs *ahead*. A slot that becomes free then need not wait for the recruiter.
//!
//! A worker accepts as many jobs ahead as it will start before the next assignment can arrive: the rate at which its jobs end, times a
//! horizon of 80 to 250 ms that follows the round trip to MongoDB. So a worker of long jobs accepts none, and one of very short jobs
//! accepts hundreds. It accepts more only when two thirds of them are started, so that one round assigns many. Jobs ahead stay unlocked and
//! due. They are started in their order as slots become free. A job that has waited for two horizons is returned, and the recruiter assigns
//! it again. Message brokers use the same term (AMQP's prefetch count).
//!
//! A limited job that was assigned ahead waits for the [permits](super::permits) of another job before it enters the queue.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{ids::JobId, store::Position};

use super::startable::{PermitLane, Startable};

/// Maximum number of jobs ahead.
const MOST: u32 = 1_000;
/// Maximum size of the queued jobs, in bytes. Jobs for free slots are queued even above it.
const BYTES: usize = 16 * 1024 * 1024;
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

/// The queue of jobs to start, and how many more are accepted ahead.
pub(crate) struct Prefetch {
    queue: BTreeMap<Position, Waiting>,
    /// Limited jobs that were assigned ahead. Each waits for the permits of another job, and then enters the queue.
    limited: HashMap<PermitLane, BTreeMap<Position, Waiting>>,
    jobs: HashSet<JobId>,
    bytes: usize,
    /// The mean size of a job.
    mean_bytes: usize,
    rate: Rate,
    round_trip: Duration,
    start_took: Duration,
    /// No job has ended since jobs were returned: the worker accepts none ahead.
    is_stalled: bool,
}

/// The jobs of the next start.
#[derive(Default)]
pub(crate) struct Next {
    /// Jobs for free slots.
    pub(crate) jobs: Vec<Startable>,
    /// Jobs to be locked ahead.
    pub(crate) ahead: Vec<Startable>,
}

struct Waiting {
    job: Startable,
    since: Monotonic,
}

impl Default for Prefetch {
    fn default() -> Self {
        let (queue, limited, jobs) = (BTreeMap::new(), HashMap::new(), HashSet::new());
        let (round_trip, start_took) = (Duration::ZERO, Duration::ZERO);
        Self { queue, limited, jobs, bytes: 0, mean_bytes: 0, rate: Rate::default(), round_trip, start_took, is_stalled: false }
    }
}

impl Prefetch {
    /// Adds jobs that can be started. The first `free` jobs are always added. Each further job is added if the queue stays within `BYTES`.
    /// Returns the ids of the others.
    pub(crate) fn add(&mut self, mut jobs: Vec<Startable>, free: u32, now: Monotonic) -> Vec<JobId> {
        jobs.sort_by_key(Startable::position);
        let mut without_room = Vec::new();
        for (index, job) in jobs.into_iter().enumerate() {
            self.mean_bytes = smoothed(self.mean_bytes, job.bytes());
            if index >= free as usize && self.bytes + job.bytes() > BYTES {
                without_room.push(job.id());
                continue;
            }
            self.bytes += job.bytes();
            self.jobs.insert(job.id());
            let queue = if job.waits_for_permits() { self.limited.entry(job.permit_lane()).or_default() } else { &mut self.queue };
            queue.insert(job.position(), Waiting { job, since: now });
        }
        without_room
    }

    /// Moves the first job that waits for permits of this lane into the queue, with these permits.
    pub(crate) fn give_permits(&mut self, lane: &PermitLane, names: &[String]) -> Option<JobId> {
        let limited = self.limited.get_mut(lane)?;
        let (position, mut waiting) = limited.pop_first()?;
        if limited.is_empty() {
            self.limited.remove(lane);
        }
        waiting.job.take_permits(names);
        let job = waiting.job.id();
        self.queue.insert(position, waiting);
        Some(job)
    }

    /// Removes the jobs that wait for permits of lanes of which the worker has none.
    pub(crate) fn without_permits(&mut self, has_permits: impl Fn(&PermitLane) -> bool) -> Vec<JobId> {
        let stranded: Vec<Startable> = self
            .limited
            .extract_if(|lane, _| !has_permits(lane))
            .flat_map(|(_, waiting)| waiting.into_values().map(|waiting| waiting.job))
            .collect();
        self.forget_all(&stranded)
    }

    /// Removes the first jobs in their order: `free` of them for free slots, and up to `ahead` more, as long as they may be locked ahead.
    pub(crate) fn next(&mut self, free: usize, ahead: usize) -> Next {
        let mut next = Next::default();
        while next.jobs.len() < free
            && let Some((_, Waiting { job, .. })) = self.queue.pop_first()
        {
            self.forget(&job);
            next.jobs.push(job);
        }
        while next.ahead.len() < ahead
            && let Some(first) = self.queue.first_entry().filter(|first| first.get().job.may_be_locked_ahead())
        {
            let Waiting { job, .. } = first.remove();
            self.forget(&job);
            next.ahead.push(job);
        }
        next
    }

    /// Removes all jobs. Returns their ids.
    pub(crate) fn clear(&mut self) -> Vec<JobId> {
        (self.bytes, self.queue, self.limited) = (0, BTreeMap::new(), HashMap::new());
        self.jobs.drain().collect()
    }

    /// Removes the jobs that have waited too long.
    pub(crate) fn overdue(&mut self, now: Monotonic) -> Vec<JobId> {
        let limit = self.horizon() * RETURN_AFTER;
        let mut overdue = Vec::new();
        for queue in std::iter::once(&mut self.queue).chain(self.limited.values_mut()) {
            overdue.extend(queue.extract_if(.., |_, waiting| now.duration_since(waiting.since) >= limit).map(|(_, waiting)| waiting.job));
        }
        self.limited.retain(|_, waiting| !waiting.is_empty());
        self.is_stalled |= !overdue.is_empty();
        self.forget_all(&overdue)
    }

    fn forget_all(&mut self, jobs: &[Startable]) -> Vec<JobId> {
        jobs.iter().for_each(|job| self.forget(job));
        jobs.iter().map(Startable::id).collect()
    }

    /// When the job that has waited longest must be returned.
    pub(crate) fn overdue_at(&self) -> Option<Monotonic> {
        let waiting = self.queue.values().chain(self.limited.values().flat_map(BTreeMap::values));
        waiting.map(|waiting| waiting.since).min().map(|since| since + self.horizon() * RETURN_AFTER)
    }

    fn forget(&mut self, job: &Startable) {
        self.bytes = self.bytes.saturating_sub(job.bytes());
        self.jobs.remove(&job.id());
    }

    pub(crate) fn jobs(&self) -> impl Iterator<Item = JobId> {
        self.jobs.iter().copied()
    }

    /// The number of jobs that can start as soon as slots are free.
    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.queue.len()).unwrap_or(u32::MAX)
    }

    /// The number of all jobs.
    pub(crate) fn count_all(&self) -> u32 {
        u32::try_from(self.jobs.len()).unwrap_or(u32::MAX)
    }

    pub(crate) fn holds(&self, job: JobId) -> bool {
        self.jobs.contains(&job)
    }

    /// How many more jobs are accepted ahead while `free` slots are free: none until two thirds of the jobs ahead are started.
    pub(crate) fn room(&self, free: u32) -> u32 {
        if !self.is_low() {
            return 0;
        }
        self.wanted().saturating_sub(self.count_all().saturating_sub(free.min(self.count())))
    }

    /// Whether two thirds of the jobs ahead are started, so that more are accepted.
    pub(crate) fn is_low(&self) -> bool {
        self.count_all() <= self.wanted() / 3
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
        let ends = self.rate.per_second() * time.as_secs_f64();
        if self.is_stalled || ends < 1.0 {
            return 0;
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a float becomes the nearest integer of the type")]
        let ends = ends.round() as u32;
        ends
    }

    /// How many jobs are locked ahead: as many as end while the answer of a start is awaited, with a reserve.
    pub(crate) fn to_lock_ahead(&self) -> u32 {
        let during = (self.start_took * STARTS).clamp(SHORTEST_LOCK, LONGEST_LOCK);
        self.rate_within(during).min(MOST_LOCKED).min(self.most_of_this_size())
    }

    fn horizon(&self) -> Duration {
        (self.round_trip * ROUND_TRIPS).clamp(SHORTEST, LONGEST)
    }

    /// Notes that `count` jobs have ended at `now`. The worker has been busy since `busy_since`.
    pub(crate) fn ended(&mut self, count: usize, busy_since: Monotonic, now: Monotonic) {
        self.is_stalled &= count == 0;
        self.rate.ended(count, now.saturating_duration_since(busy_since));
    }

    /// No jobs are accepted or locked ahead until one ends.
    pub(crate) fn stall(&mut self) {
        self.is_stalled = true;
    }

    /// Notes the duration of a start.
    pub(crate) fn start_took(&mut self, took: Duration) {
        self.start_took = smoothed_time(self.start_took, took);
    }

    /// Notes the duration of a report to MongoDB.
    pub(crate) fn round_trip(&mut self, took: Duration) {
        self.round_trip = smoothed_time(self.round_trip, took);
    }
}

fn smoothed_time(mean: Duration, value: Duration) -> Duration {
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

    /// How many jobs a worker wants ahead if `count` of its jobs end every `every` milliseconds.
    fn wanted(count: usize, every: u64, round_trip_us: u64) -> u32 {
        let (mut prefetch, start) = (Prefetch::default(), Monotonic::now());
        prefetch.round_trip(Duration::from_micros(round_trip_us));
        for turn in 0..100 {
            let at = |turn: u64| start + Duration::from_millis(every * turn);
            prefetch.ended(count, at(turn), at(turn + 1));
        }
        prefetch.wanted()
    }

    #[test]
    fn short_jobs_are_accepted_ahead_and_long_ones_are_not() {
        assert_eq!(Prefetch::default().wanted(), 0, "nothing is known yet");
        assert_eq!([wanted(10, 5, 300), wanted(10, 100, 300), wanted(10, 2_000, 300)], [160, 8, 0]);
        assert_eq!(wanted(1_000, 5, 300), MOST);
        assert_eq!([wanted(10, 100, 10_000), wanted(10, 100, 1_000_000)], [12, 25], "a slow connection");
    }

    #[test]
    fn as_many_are_locked_ahead_as_end_while_a_start_is_answered() {
        let to_lock = |count: usize, every: u64, start_ms: u64| {
            let (mut prefetch, start) = (Prefetch::default(), Monotonic::now());
            prefetch.start_took(Duration::from_millis(start_ms));
            for turn in 0..100 {
                let at = |turn: u64| start + Duration::from_millis(every * turn);
                prefetch.ended(count, at(turn), at(turn + 1));
            }
            let locked = prefetch.to_lock_ahead();
            prefetch.stall();
            assert_eq!((prefetch.to_lock_ahead(), prefetch.wanted()), (0, 0));
            prefetch.ended(1, start, start);
            assert_eq!(prefetch.to_lock_ahead(), locked, "one has ended");
            locked
        };
        assert_eq!([to_lock(10, 5, 0), to_lock(10, 5, 4), to_lock(10, 5, 100)], [10, 24, 100]);
        assert_eq!([to_lock(10, 20, 4), to_lock(10, 100, 4), to_lock(10, 1_000, 4)], [6, 1, 0]);
        assert_eq!(to_lock(1_000, 5, 4), MOST_LOCKED);
    }

    #[test]
    fn large_jobs_are_few_in_memory() {
        let (mut prefetch, start) = (Prefetch { mean_bytes: BYTES / 3, ..Prefetch::default() }, Monotonic::now());
        prefetch.ended(1_000, start, start + Duration::from_millis(100));
        assert_eq!((prefetch.wanted(), prefetch.to_lock_ahead()), (3, 3));
    }

    #[test]
    fn time_without_a_job_does_not_count_and_a_change_is_learnt() {
        let (mut prefetch, start) = (Prefetch::default(), Monotonic::now());
        prefetch.ended(10, start, start + Duration::from_millis(10));
        let learnt = prefetch.wanted();
        assert_eq!(learnt, 80);
        let later = start + Duration::from_secs(3_600);
        prefetch.ended(10, later, later + Duration::from_millis(10));
        assert_eq!(prefetch.wanted(), learnt);
        prefetch.ended(1, later, later + Duration::from_secs(2));
        assert_eq!(prefetch.wanted(), 0);
    }
}
