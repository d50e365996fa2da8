//! Skipped jobs: jobs that were assigned to this worker, and that it does not run.

use std::{
    collections::HashMap,
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::ids::JobId;

/// Maximum number of jobs in memory.
const MOST: usize = 1_000;
/// After this time without a skip, the count of a job begins again. The job stays in memory until the map is full.
const COUNTED_FOR: Duration = Duration::from_secs(60);
/// Number of skips of a job after which a warning is logged, and again each time the number has doubled.
const WARN_AFTER: u32 = 16;

/// The jobs that this worker has skipped.
#[derive(Default)]
pub(crate) struct SkippedJobs(HashMap<JobId, Skipped>);

struct Skipped {
    times: u32,
    at: Monotonic,
}

impl SkippedJobs {
    /// Notes skipped jobs. Returns whether one of them is not in memory yet: only then is the recruiter notified at once. Its next full
    /// scan finds the others, so no job is assigned again and again without a pause.
    pub(crate) fn note(&mut self, jobs: &[JobId], now: Monotonic) -> bool {
        let mut is_new = false;
        if self.0.len() + jobs.len() > MOST {
            self.0.retain(|_, skipped| now.duration_since(skipped.at) < COUNTED_FOR);
        }
        for job in jobs {
            let is_known = self.0.contains_key(job);
            is_new |= !is_known;
            if !is_known && self.0.len() >= MOST {
                continue;
            }
            let skipped = self.0.entry(*job).or_insert(Skipped { times: 0, at: now });
            skipped.times = if now.duration_since(skipped.at) < COUNTED_FOR { skipped.times.saturating_add(1) } else { 1 };
            skipped.at = now;
            if skipped.times >= WARN_AFTER && skipped.times.is_power_of_two() {
                tracing::warn!(
                    job.id = %job,
                    times = skipped.times,
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
    fn a_job_that_was_skipped_before_is_not_new_and_the_map_has_a_bound() {
        let (mut skipped, start) = (SkippedJobs::default(), Monotonic::now());
        let job = JobId::new();
        assert!(skipped.note(&[job], start));
        assert!(!skipped.note(&[job], start + COUNTED_FOR / 2));
        assert_eq!(skipped.0[&job].times, 2);
        assert!(!skipped.note(&[job], start + COUNTED_FOR * 2));
        assert_eq!(skipped.0[&job].times, 1, "the earlier times are too long ago");
        let many: Vec<JobId> = (0..MOST).map(|_| JobId::new()).collect();
        assert!(skipped.note(&many, start + COUNTED_FOR * 2));
        assert_eq!(skipped.0.len(), MOST);
        assert!(skipped.note(&[JobId::new()], start + COUNTED_FOR * 4));
        assert_eq!(skipped.0.len(), 1);
    }
}
