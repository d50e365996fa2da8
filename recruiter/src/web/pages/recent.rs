//! The newest jobs that have ended in a period. What was read before is kept: a further reading costs as much as what has ended since.

use chrono::{SubsecRound as _, TimeDelta};
use recruiter_common::{
    instant::Instant,
    store::{Finished, SAMPLED, Store, StoreError},
};

/// An end is written within this time after its date, or is missing on the charts: longer than a failover.
const WRITTEN_WITHIN: TimeDelta = TimeDelta::seconds(60);

/// The newest jobs that have ended, at most [`SAMPLED`].
#[derive(Default)]
pub(super) struct Recent {
    jobs: Vec<Finished>,
    /// Those that ended until then are all known.
    until: Instant,
}

impl Recent {
    /// Those of the period before `now`, newest first.
    pub(super) async fn read(&mut self, store: &Store, now: Instant, period: TimeDelta) -> Result<&[Finished], StoreError> {
        let begin = now - period;
        let since = self.until.max(begin);
        self.add(store.finished(since).await?, since, begin);
        // MongoDB's dates have milliseconds.
        self.until = (now - WRITTEN_WITHIN).trunc_subsecs(3);
        Ok(&self.jobs)
    }

    /// Puts the newest jobs, which ended after `since`, before the known ones that ended until then.
    fn add(&mut self, newest: Vec<Finished>, since: Instant, begin: Instant) {
        let known = std::mem::replace(&mut self.jobs, newest);
        self.jobs.extend(known.into_iter().filter(|job| job.ended_at <= since && job.ended_at > begin));
        self.jobs.truncate(SAMPLED);
    }
}

#[cfg(test)]
mod tests {
    use recruiter_common::job::FinishReason;

    use super::*;

    #[test]
    fn what_is_known_is_kept_as_long_as_it_is_in_the_period_and_counted_once() {
        let at = |second: i64| Instant::UNIX_EPOCH + TimeDelta::seconds(second);
        let job =
            |second| Finished { group: "g".into(), why: FinishReason::DONE, scheduled_at: None, started_at: None, ended_at: at(second) };
        let mut recent = Recent { jobs: [9, 8, 5, 1].map(job).into(), until: at(0) };
        // Two that were written late are among the newest, and one was known already.
        recent.add([12, 9, 8, 7].map(job).into(), at(6), at(2));
        let seconds: Vec<i64> = recent.jobs.iter().map(|job| job.ended_at.timestamp()).collect();
        assert_eq!(seconds, [12, 9, 8, 7, 5]);
        recent.add(vec![job(20); SAMPLED], at(13), at(2));
        assert_eq!((recent.jobs.len(), recent.jobs[0].ended_at), (SAMPLED, at(20)));
    }
}
