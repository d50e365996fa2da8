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

use super::startable::PermitLane;

/// How long permits that no job needs are kept: about the time of a report and its answer.
const KEPT_FOR: Duration = Duration::from_millis(5);

/// The permits of one job.
#[derive(Debug)]
pub(super) struct Permits {
    pub(super) lane: PermitLane,
    pub(super) names: Vec<String>,
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
