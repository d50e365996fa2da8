//! The permits of limited jobs that this worker holds.
//!
//! The recruiter grants permits with the assignment of a job. When the job returns, another job of the same group and gate gets them at once,
//! if one was assigned ahead. Permits that no job needs are kept for a moment, because the next assignment may have such a job, and are
//! returned with the next report. The job of a line keeps its permit until its end is recorded: until then no other job is the first of the
//! line.
//!
//! The roster names every permit that is held here. Only a report makes a permit free for other workers, so a permit is dropped here
//! before the report is sent, also if the report then fails.

use std::time::{Duration, Instant as Monotonic};

use super::{pace::smoothed_time, startable::PermitLane};

/// How long permits that no job needs are kept: about the time of a report and its answer.
const KEPT_FOR: Duration = Duration::from_millis(5);

/// The permits of one job.
#[derive(Debug)]
pub(super) struct Permits {
    pub(super) lane: PermitLane,
    pub(super) names: Vec<String>,
    /// Since when a job runs with them.
    running_since: Option<Monotonic>,
    /// How long jobs have run with them; zero until the first has.
    took: Duration,
}

impl Permits {
    pub(super) fn new(lane: PermitLane, names: Vec<String>) -> Self {
        Self { lane, names, running_since: None, took: Duration::ZERO }
    }

    /// A job that has them runs.
    pub(super) fn note_running(&mut self) {
        self.running_since = Some(Monotonic::now());
    }

    /// The job that has them has returned.
    pub(super) fn note_returned(&mut self) {
        self.took = self.running_since.take().map_or(self.took, |since| smoothed_time(self.took, since.elapsed()));
    }

    /// How many jobs per second can run with them, one after the other: none until the first has returned. A job that runs for longer than
    /// those before it counts with the time so far.
    pub(super) fn per_second(&self) -> f64 {
        let so_far = self.running_since.map_or(Duration::ZERO, |since| since.elapsed());
        if self.took.is_zero() { 0.0 } else { self.took.max(so_far).as_secs_f64().recip() }
    }
}

/// The permits that no job uses, and since when. They are few.
#[derive(Debug, Default)]
pub(super) struct FreePermits(pub(super) Vec<(Permits, Monotonic)>);

impl FreePermits {
    /// Removes permits of this lane, if there are any.
    pub(super) fn take(&mut self, lane: &PermitLane) -> Option<Permits> {
        let index = self.0.iter().rposition(|(permits, _)| permits.lane == *lane)?;
        Some(self.0.remove(index).0)
    }

    /// Drops the permits that no job has needed for [`KEPT_FOR`], or all of them. Returns whether there were any: a report must return them.
    pub(super) fn drop_old(&mut self, all: bool, now: Monotonic) -> bool {
        let before = self.0.len();
        self.0.retain(|(_, since)| !all && now.saturating_duration_since(*since) < KEPT_FOR);
        self.0.len() < before
    }

    /// When the first of them must be returned.
    pub(super) fn return_at(&self) -> Option<Monotonic> {
        self.0.first().map(|(_, since)| *since + KEPT_FOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_runs_for_long_makes_its_permits_slow_before_it_returns() {
        let mut permits = Permits::new(("group".to_owned(), None), vec!["a#0".to_owned()]);
        let ran = |permits: &mut Permits, ms: u64| permits.running_since = Monotonic::now().checked_sub(Duration::from_millis(ms));
        ran(&mut permits, 10);
        assert!(permits.per_second() < f64::EPSILON, "nothing is known yet");
        permits.note_returned();
        assert!((1.0..=100.0).contains(&permits.per_second()), "{permits:?}");
        ran(&mut permits, 5_000);
        assert!(permits.per_second() < 0.3, "{permits:?}");
    }
}
