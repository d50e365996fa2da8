//! Jobs that were assigned to this worker and that it did not start.

use std::{
    collections::HashMap,
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::ids::JobId;

/// The most jobs that are remembered.
const MOST: usize = 1_000;
/// How long a job is remembered.
const REMEMBERED_FOR: Duration = Duration::from_secs(60);
/// A warning is logged when a job was left so many times, and each time that this number has doubled.
const WARN_AFTER: u32 = 16;

/// Jobs that were assigned lately and not started.
#[derive(Default)]
pub(crate) struct LeftJobs(HashMap<JobId, Left>);

struct Left {
    times: u32,
    at: Monotonic,
}

impl LeftJobs {
    /// Notes jobs that were not started. True if one of them was not left lately: only then is the recruiter notified at once. It finds the
    /// others with its next full scan, so that no job is assigned again and again without a pause.
    pub(crate) fn note(&mut self, jobs: &[JobId], now: Monotonic) -> bool {
        let mut is_new = false;
        if self.0.len() + jobs.len() > MOST {
            self.0.retain(|_, left| now.duration_since(left.at) < REMEMBERED_FOR);
        }
        for job in jobs {
            let is_known = self.0.contains_key(job);
            is_new |= !is_known;
            if !is_known && self.0.len() >= MOST {
                continue;
            }
            let left = self.0.entry(*job).or_insert(Left { times: 0, at: now });
            left.times = if now.duration_since(left.at) < REMEMBERED_FOR { left.times.saturating_add(1) } else { 1 };
            left.at = now;
            if left.times >= WARN_AFTER && left.times.is_power_of_two() {
                tracing::warn!(
                    job.id = %job,
                    times = left.times,
                    "a job is assigned to this worker again and again and cannot be started here: see `recruiter jobs show`"
                );
            }
        }
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_was_left_lately_is_no_news_and_memory_has_a_bound() {
        let (mut left, start) = (LeftJobs::default(), Monotonic::now());
        let job = JobId::new();
        assert!(left.note(&[job], start));
        assert!(!left.note(&[job], start + REMEMBERED_FOR / 2));
        assert_eq!(left.0[&job].times, 2);
        assert!(!left.note(&[job], start + REMEMBERED_FOR * 2));
        assert_eq!(left.0[&job].times, 1, "the earlier times are too long ago");
        let many: Vec<JobId> = (0..MOST).map(|_| JobId::new()).collect();
        assert!(left.note(&many, start + REMEMBERED_FOR * 2));
        assert_eq!(left.0.len(), MOST);
        assert!(left.note(&[JobId::new()], start + REMEMBERED_FOR * 4));
        assert_eq!(left.0.len(), 1);
    }
}
