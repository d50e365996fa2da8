//! Numbers of waiting, running and ended jobs by group and in total, and the reasons why jobs keep waiting.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use bson::doc;
use chrono::TimeDelta;
use hdrhistogram::Histogram;
use recruiter_common::{
    Reason, StoreError,
    instant::Instant,
    job::Stage,
    store::{COUNTED, Due, Finished, Lane, NotKept, SAMPLED, ScheduledJob, Situation, Store, Waiting},
    why::Why,
    workers::{Leader, Presence},
};
use serde::{Serialize, Serializer};
use serde_json::json;

use super::{date, extended, job::why_to_document};

/// Period for which archived jobs are read.
pub(crate) const PERIOD: TimeDelta = TimeDelta::minutes(1);
/// Maximum number of (group, class) pairs of waiting jobs that are compared with the workers.
pub(crate) const LANES: usize = 1_000;
/// Maximum number of due jobs whose retry policies are compared with those that the workers know.
const SAMPLE: usize = 1_000;

/// A lane whose due jobs cannot start, and why.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Blocked {
    pub(crate) lane: Lane,
    pub(crate) why: Why,
}

impl Blocked {
    fn of(lane: &Lane, why: Why) -> Self {
        Self { lane: lane.clone(), why }
    }
}

impl Serialize for Blocked {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut blocked = doc! { "group": &self.lane.group, "class": &self.lane.class, "gate": &self.lane.gate };
        blocked.extend(why_to_document(&self.why));
        extended(blocked).serialize(to)
    }
}

/// Why the due jobs of these lanes do not start: each kind of jobs, those with the same lane and the same retry policies, is judged by its
/// first job. What is about to start is left out, and those whose class or group no worker takes are listed elsewhere.
fn held(situation: &Situation, lanes: &[Lane], due: &[(ScheduledJob, BTreeSet<String>)], untaken: &[Blocked]) -> Vec<Blocked> {
    let mut held: Vec<Blocked> = lanes.iter().filter_map(|lane| Some(Blocked::of(lane, situation.why_refused(lane)?))).collect();
    let mut kinds: BTreeMap<(Lane, &BTreeSet<String>), Vec<&ScheduledJob>> = BTreeMap::new();
    for (job, policies) in due {
        kinds.entry((job.lane(), policies)).or_default().push(job);
    }
    let refused: BTreeSet<Lane> = held.iter().map(|blocked| blocked.lane.clone()).collect();
    let is_untaken = |lane: &Lane| untaken.iter().any(|other| other.lane.group == lane.group && other.lane.class == lane.class);
    for ((lane, policies), jobs) in &kinds {
        let not_yet = || {
            let mut jobs = jobs.iter();
            let (behind, first) = match situation.head_of(lane) {
                Some(head) => (0, jobs.find(|job| job.id == head.job.id)),
                None => (jobs.len() as u64 - 1, jobs.next()),
            };
            let first = first.filter(|_| !refused.contains(lane) && !is_untaken(lane))?;
            let why = situation.why_not_yet(lane, policies, &Due::first(Some(first.id), first.scheduled_at, behind));
            (![Reason::Assigned, Reason::Assignable].contains(&why.reason)).then_some(why)
        };
        let why = situation.why_unknown(lane, policies).or_else(not_yet);
        for why in [situation.why_no_leader(), why].into_iter().flatten() {
            let one = Blocked::of(lane, why);
            if !held.contains(&one) {
                held.push(one);
            }
        }
    }
    held
}

/// Which due jobs do not start.
pub(crate) struct Reasons {
    /// Of the classes and groups that no worker takes.
    pub(crate) untaken: Vec<Blocked>,
    /// Of the others.
    pub(crate) held: Vec<Blocked>,
    /// Whether all lanes were compared, and not only the first ones.
    pub(crate) are_all: bool,
    pub(crate) leader: Leader,
    pub(crate) workers: Presence,
}

impl Reasons {
    /// Examines the first lanes of these groups.
    pub(crate) async fn read(store: &Store, groups: impl IntoIterator<Item = String>, most: usize) -> Result<Self, StoreError> {
        let lanes = store.first_lanes(groups, most).await?;
        let situation = Situation::read(store, &lanes).await?;
        let pairs: BTreeSet<(&str, &str)> = lanes.iter().map(|lane| (lane.group.as_str(), lane.class.as_str())).collect();
        let untaken = pairs.into_iter().map(|(group, class)| Lane::new(group, class));
        let untaken: Vec<Blocked> = untaken.filter_map(|lane| Some(Blocked::of(&lane, situation.why_not_taken(&lane)?))).collect();
        let held = held(&situation, &lanes, &store.policies_of_due_jobs(&lanes, SAMPLE).await?, &untaken);
        let (leader, workers) = (situation.leader().clone(), situation.workers().clone());
        Ok(Self { untaken, held, are_all: lanes.len() < most, leader, workers })
    }
}

/// Statistics of one group, or of all.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct GroupStatistics {
    /// `None`: of all groups.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    #[serde(flatten)]
    pub(crate) waiting: Waiting,
    pub(crate) running: u64,
    pub(crate) done: u64,
    /// Ended, but neither done nor cancelled.
    pub(crate) failed: u64,
    pub(crate) cancelled: u64,
    /// Done, and nothing of it was kept.
    pub(crate) not_kept: u64,
    /// Done jobs per second, also those of which nothing was kept.
    pub(crate) done_per_second: f64,
    /// Time from due to started.
    pub(crate) latency_ms: Times,
    /// Time from started to ended.
    pub(crate) execution_ms: Times,
}

impl GroupStatistics {
    fn add(&mut self, job: &Finished) {
        let stage = Stage::of_end(&job.why);
        let count = if stage == Stage::Done {
            &mut self.done
        } else if stage == Stage::Cancelled {
            &mut self.cancelled
        } else {
            &mut self.failed
        };
        *count += 1;
        let Some(started_at) = job.started_at else { return };
        self.execution_ms.add(job.ended_at - started_at);
        if let Some(scheduled_at) = job.scheduled_at {
            self.latency_ms.add(started_at - scheduled_at);
        }
    }
}

/// A histogram of durations in milliseconds, with three significant digits.
#[derive(Clone, Debug)]
pub(crate) struct Times(Histogram<u64>);

impl Default for Times {
    fn default() -> Self {
        Self(Histogram::new(3).expect("three digits are between one and five"))
    }
}

impl Times {
    fn add(&mut self, time: TimeDelta) {
        // Never fails: the histogram grows on demand and accepts every 64-bit value.
        let _ = self.0.record(u64::try_from(time.num_milliseconds()).unwrap_or(0));
    }

    /// Average, median and 99th percentile, if a value was recorded.
    pub(crate) fn summary(&self) -> Option<(f64, u64, u64)> {
        (!self.0.is_empty()).then(|| (self.0.mean(), self.0.value_at_quantile(0.5), self.0.value_at_quantile(0.99)))
    }
}

impl Serialize for Times {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let summary = self.summary().map(|(avg, p50, p99)| json!({ "avg": (avg * 10.0).round() / 10.0, "p50": p50, "p99": p99 }));
        summary.serialize(to)
    }
}

/// The statistics that are shown.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Statistics {
    #[serde(serialize_with = "date")]
    pub(crate) at: Instant,
    /// Period in which the archived jobs ended.
    pub(crate) window_ms: i64,
    /// Whether the period was shortened, because too many jobs finished within a minute.
    pub(crate) newest_only: bool,
    /// Period in which the jobs ended of which nothing was kept.
    pub(crate) not_kept_window_ms: i64,
    pub(crate) counted_up_to: u64,
    pub(crate) total: GroupStatistics,
    pub(crate) groups: Vec<GroupStatistics>,
    pub(crate) leader: Option<String>,
    pub(crate) unrescued_workers: usize,
    pub(crate) untaken: Vec<Blocked>,
    pub(crate) held: Vec<Blocked>,
    /// Who leads, for people.
    #[serde(skip)]
    pub(crate) leader_line: String,
    /// Whether all lanes with waiting jobs were compared with the workers.
    #[serde(skip)]
    pub(crate) are_all: bool,
}

impl Statistics {
    /// Reads them. A due job that has not started for this long is overdue.
    pub(crate) async fn read(store: &Store, overdue_after: Duration) -> Result<Self, StoreError> {
        let now = store.now();
        let overdue = TimeDelta::from_std(overdue_after).ok().and_then(|after| now.checked_sub_signed(after)).unwrap_or_default();
        let waiting = store.waiting(now, overdue).await?;
        let running = store.running().await?;
        let finished = store.finished(now - PERIOD).await?;
        let not_kept = store.not_kept(now - PERIOD).await?;
        let Reasons { untaken, held, are_all, leader, workers } = Reasons::read(store, waiting.keys().cloned(), LANES).await?;
        Ok(Self {
            leader: leader.holder().map(str::to_owned),
            leader_line: leader.line(),
            unrescued_workers: workers.0.iter().filter(|worker| worker.is_overdue()).count(),
            untaken,
            held,
            are_all,
            ..Self::of(now, &waiting, &running, &finished, &not_kept)
        })
    }

    pub(crate) fn of(
        at: Instant,
        waiting: &BTreeMap<String, Waiting>,
        running: &BTreeMap<String, u64>,
        finished: &[Finished],
        not_kept: &NotKept,
    ) -> Self {
        let newest_only = finished.len() >= SAMPLED;
        let oldest = finished.iter().map(|job| job.ended_at).min().filter(|_| newest_only);
        let period = oldest.map_or(PERIOD, |oldest| (at - oldest).clamp(TimeDelta::milliseconds(1), PERIOD));
        let not_kept_period = (at - not_kept.since).max(PERIOD);
        let (mut groups, mut total): (BTreeMap<&String, GroupStatistics>, GroupStatistics) = Default::default();
        for (name, counts) in waiting {
            let Waiting { queued, overdue, postponed, waits } = *counts;
            groups.entry(name).or_default().waiting = *counts;
            total.waiting.queued += queued;
            total.waiting.overdue += overdue;
            total.waiting.postponed += postponed;
            total.waiting.waits += waits;
        }
        for (name, count) in running {
            groups.entry(name).or_default().running = *count;
            total.running += count;
        }
        for job in finished {
            groups.entry(&job.group).or_default().add(job);
            total.add(job);
        }
        for (name, count) in &not_kept.groups {
            groups.entry(name).or_default().not_kept += count;
            total.not_kept += count;
        }
        let rate = |count: u64, period: TimeDelta| {
            let milliseconds = u32::try_from(period.num_milliseconds()).unwrap_or(u32::MAX);
            f64::from(u32::try_from(count).unwrap_or(u32::MAX)) * 100_000.0 / f64::from(milliseconds)
        };
        let per_second = |group: &GroupStatistics| (rate(group.done, period) + rate(group.not_kept, not_kept_period)).round() / 100.0;
        let with_rate = |name, group| GroupStatistics { name, done_per_second: per_second(&group), ..group };
        Self {
            at,
            window_ms: period.num_milliseconds(),
            newest_only,
            not_kept_window_ms: not_kept_period.num_milliseconds(),
            counted_up_to: COUNTED,
            total: with_rate(None, total),
            groups: groups.into_iter().map(|(name, group)| with_rate(Some(name.clone()), group)).collect(),
            ..Self::default()
        }
    }
}
