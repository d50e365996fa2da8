//! What ended in each of the last seconds: how many jobs, of which group, and how long they had waited for their start.

use std::collections::{BTreeMap, VecDeque};

use chrono::TimeDelta;
use hdrhistogram::Histogram;
use recruiter_common::{
    instant::Instant,
    job::Stage,
    store::{Finished, NotKept, SAMPLED},
};

/// Maximum number of seconds that are kept: more than a terminal has columns.
const KEPT: usize = 300;
/// Period of the rates and of the latency, in seconds.
pub(super) const RECENT: usize = 10;
/// Period that is read at first, in seconds.
const AT_FIRST: i64 = 60;

/// What ended within one second.
#[derive(Clone, Debug, Default)]
struct Second {
    /// Successes of each group.
    done: BTreeMap<String, u64>,
    failed: u64,
    /// Milliseconds from due to started.
    latency: Option<Histogram<u32>>,
}

impl Second {
    fn of<'a>(jobs: impl IntoIterator<Item = &'a Finished>) -> Self {
        let mut second = Self::default();
        for job in jobs {
            let stage = Stage::of_end(&job.why);
            if stage == Stage::Done {
                *second.done.entry(job.group.clone()).or_default() += 1;
            }
            second.failed += u64::from(stage == Stage::Failed);
            if let (Some(due), Some(started)) = (job.scheduled_at, job.started_at) {
                let latency = second.latency.get_or_insert_with(|| Histogram::new(2).expect("two digits are between one and five"));
                // Never fails: the histogram grows on demand.
                let _ = latency.record(u64::try_from((started - due).num_milliseconds()).unwrap_or(0));
            }
        }
        second
    }

    /// What ended within this period, as the average of one second.
    fn averaged(mut self, period: TimeDelta) -> Self {
        self.done.values_mut().chain([&mut self.failed]).for_each(|jobs| *jobs = per_second(*jobs, period));
        self
    }
}

/// So many jobs within this period, rounded up.
fn per_second(jobs: u64, period: TimeDelta) -> u64 {
    (jobs * 1_000).div_ceil(u64::try_from(period.num_milliseconds()).unwrap_or_default().max(1))
}

/// One second in numbers, for a graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Point {
    pub(super) done: u64,
    pub(super) failed: u64,
    /// The 99th percentile of the latency in milliseconds.
    pub(super) p99: Option<u64>,
}

/// The last complete seconds, oldest first.
#[derive(Debug, Default)]
pub(super) struct History {
    seconds: VecDeque<Second>,
    /// The first second that is not counted yet.
    next: Option<i64>,
}

impl History {
    /// The begin of the time that is to be read.
    pub(super) fn since(&self, now: Instant) -> Instant {
        let next = self.next.unwrap_or(i64::MIN).max(now.timestamp() - AT_FIRST);
        // The filter of the read is exclusive.
        Instant::from_timestamp(next, 0).unwrap_or(now) - TimeDelta::milliseconds(1)
    }

    /// Adds the seconds that are complete at `now`. `ended` are the jobs that ended after [`History::since`], at most the newest [`SAMPLED`]: if
    /// they do not reach back far enough, earlier seconds are taken to be like their average. Jobs of which nothing was kept have no date, so
    /// they are spread over their period.
    pub(super) fn add(&mut self, now: Instant, ended: &[Finished], not_kept: &NotKept) {
        // The present second goes on. What ended shortly before its begin may not be written yet.
        let (first, last) = (self.since(now).timestamp() + 1, now.timestamp() - 2);
        let mut by_second: BTreeMap<i64, Vec<&Finished>> = BTreeMap::new();
        ended.iter().for_each(|job| by_second.entry(job.ended_at.timestamp()).or_default().push(job));
        let oldest = ended.iter().map(|job| job.ended_at).min().filter(|_| ended.len() >= SAMPLED);
        for second in first..=last {
            let mut counted = match oldest {
                Some(oldest) if second <= oldest.timestamp() => Second::of(ended).averaged(now - oldest),
                _ => Second::of(by_second.remove(&second).unwrap_or_default()),
            };
            for (group, jobs) in &not_kept.groups {
                *counted.done.entry(group.clone()).or_default() += per_second(*jobs, now - not_kept.since);
            }
            self.seconds.push_back(counted);
        }
        self.next = Some(self.next.unwrap_or(i64::MIN).max(last + 1));
        self.seconds.drain(..self.seconds.len().saturating_sub(KEPT));
    }

    /// The seconds in numbers, newest first.
    pub(super) fn points(&self) -> Vec<Point> {
        let p99 = |latency: &Histogram<u32>| latency.value_at_quantile(0.99);
        let point =
            |second: &Second| Point { done: second.done.values().sum(), failed: second.failed, p99: second.latency.as_ref().map(p99) };
        self.seconds.iter().rev().map(point).collect()
    }

    /// Successes per second of each group, in the last [`RECENT`] seconds.
    pub(super) fn rates(&self) -> BTreeMap<String, f64> {
        let mut rates: BTreeMap<String, f64> = BTreeMap::new();
        let recent = self.seconds.len().min(RECENT);
        for (group, jobs) in self.seconds.iter().rev().take(recent).flat_map(|second| &second.done) {
            *rates.entry(group.clone()).or_default() += mean(*jobs, recent);
        }
        rates
    }

    /// Median and 99th percentile of the latency in milliseconds, in the last [`RECENT`] seconds. `None`: no job was started.
    pub(super) fn latency(&self) -> Option<(u64, u64)> {
        let mut all = self.seconds.iter().rev().take(RECENT).filter_map(|second| second.latency.as_ref());
        let mut sum = all.next()?.clone();
        for latency in all {
            // Never fails: the histogram grows on demand.
            let _ = sum.add(latency);
        }
        Some((sum.value_at_quantile(0.5), sum.value_at_quantile(0.99)))
    }
}

/// The mean of a sum over so many seconds.
pub(super) fn mean(sum: u64, seconds: usize) -> f64 {
    let [sum, seconds] = [sum, seconds.max(1) as u64].map(|number| f64::from(u32::try_from(number).unwrap_or(u32::MAX)));
    sum / seconds
}

#[cfg(test)]
mod tests {
    use recruiter_common::job::FinishReason;

    use super::*;

    fn at(ms: i64) -> Instant {
        Instant::UNIX_EPOCH + TimeDelta::days(1) + TimeDelta::milliseconds(ms)
    }

    fn ended(why: FinishReason, due: i64, started: i64, ended: i64) -> Finished {
        Finished { group: "mail".into(), why, scheduled_at: Some(at(due)), started_at: Some(at(started)), ended_at: at(ended) }
    }

    fn none() -> NotKept {
        NotKept { groups: BTreeMap::new(), since: at(0) }
    }

    #[test]
    fn each_complete_second_is_counted_once() {
        let mut history = History::default();
        assert_eq!(history.since(at(100_500)), at(39_999), "the last minute, from the begin of a second");
        let done = |ended_at| ended(FinishReason::DONE, ended_at - 30, ended_at - 20, ended_at);
        let failed = ended(FinishReason::custom("timeout"), 97_000, 97_050, 97_100);
        let cancelled = ended(FinishReason::CANCELLED, 97_000, 97_000, 97_100);
        history.add(at(100_500), &[done(99_100), done(98_999), done(98_000), failed, cancelled], &none());
        let points = history.points();
        assert_eq!(points[..2].iter().map(|point| (point.done, point.failed)).collect::<Vec<_>>(), [(2, 0), (0, 1)]);
        assert_eq!((points.len(), points[0].p99, points[1].p99, points[2].p99), (59, Some(10), Some(50), None));
        assert_eq!(history.since(at(101_400)), at(98_999));
        history.add(at(101_400), &[done(99_100), done(99_200), done(100_100)], &none());
        assert_eq!(history.points()[..2].iter().map(|point| point.done).collect::<Vec<_>>(), [2, 2]);
        assert_eq!((history.rates()["mail"], history.latency()), (0.4, Some((10, 50))));
        history.add(at(101_450), &[], &none());
        assert_eq!(history.points().len(), 60, "no second has passed");
        history.add(at(3_600_000), &[], &none());
        assert_eq!((history.points().len(), history.latency()), (119, None), "an hour without a reading is a gap");
    }

    #[test]
    fn more_jobs_than_are_read_and_jobs_of_which_nothing_was_kept_are_estimated() {
        let mut history = History::default();
        let busy: Vec<Finished> = (0..SAMPLED).map(|n| ended(FinishReason::DONE, 0, 0, 99_500 + (n as i64 % 100))).collect();
        history.add(at(100_000), &busy, &none());
        assert!(history.points().iter().all(|point| point.done == 20_000), "10,000 in half a second");
        let not_kept = NotKept { groups: BTreeMap::from([("mail".into(), 600)]), since: at(95_000) };
        history.add(at(101_000), &[], &not_kept);
        assert_eq!(history.points()[0].done, 100, "600 in six seconds");
    }

    #[test]
    fn no_more_than_a_few_minutes_are_kept_and_a_clock_that_goes_back_adds_nothing() {
        let mut history = History::default();
        for second in 0..1_000 {
            history.add(at(second * 1_000), &[], &none());
        }
        assert_eq!(history.points().len(), KEPT);
        history.add(at(500_000), &[], &none());
        history.add(at(1_000_000), &[], &none());
        assert_eq!(history.points().len(), KEPT);
    }
}
