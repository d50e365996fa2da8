//! The duty of sampling: how many jobs of which group wait, why, and how long the oldest has waited; which permits are in use. Only for
//! metrics, and only if they are read. It runs beside the rounds, and never delays them.
//!
//! A sample is a look from outside, as by `recruiter stats`, and bounded: [`MOST_NAMES`](recruiter_common::meters::MOST_NAMES) groups, each
//! with a share of [`JOBS`] jobs. The next one follows when [`RARER`] times the time that it took has passed, so sampling takes MongoDB half a
//! per cent of one core at most.

use std::{
    collections::HashMap,
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    Reason,
    instant::Instant,
    meters::{ByName, Gauge, Histogram, JOBS_WAITING, MOST_NAMES, OLDEST_WAITING, OTHER, PERMITS, PERMITS_IN_USE, SAMPLE_SECONDS, number},
    shutdown::Shutdown,
    store::{GroupSample, Lane, Situation, Store, StoreError},
    telemetry::chain,
};

use super::lease::Leadership;

/// Minimum time between two samples.
const EVERY: Duration = Duration::from_secs(10);
/// The next sample follows after this many times the time of the last one.
const RARER: u32 = 200;
/// Maximum number of jobs without a gate, and of as many with one, that a sample reads, shared by the groups.
const JOBS: u32 = 500_000;
/// Maximum number of jobs of one group, in the same way.
const JOBS_OF_GROUP: u32 = 100_000;
/// Maximum number of lanes whose reasons are looked for: those with the most due jobs. The due jobs of the others have the reason `other`.
const LANES: usize = 200;

/// The handles, for each group and resource.
pub(crate) struct Samples {
    groups: ByName<GroupMeters>,
    resources: ByName<ResourceMeters>,
    seconds: Histogram,
}

/// The gauges of one group.
struct GroupMeters {
    group: String,
    oldest: Gauge,
    /// Made with the first job that waits for the reason.
    by_reason: HashMap<&'static str, Gauge>,
}

struct ResourceMeters {
    in_use: Gauge,
    all: Gauge,
}

impl GroupMeters {
    fn new(group: &str) -> Self {
        Self { group: group.to_owned(), oldest: OLDEST_WAITING.gauge(&[group]), by_reason: HashMap::new() }
    }

    fn set(&mut self, reason: &'static str, jobs: u64) {
        let group = self.group.as_str();
        self.by_reason.entry(reason).or_insert_with(|| JOBS_WAITING.gauge(&[group, reason])).set(number(jobs));
    }

    fn reset(&mut self) {
        self.oldest.set(0.0);
        self.by_reason.values().for_each(|gauge| gauge.set(0.0));
    }
}

/// What is known about one group, or about all groups without gauges of their own.
#[derive(Debug, Default, PartialEq)]
struct Seen {
    by_reason: HashMap<&'static str, u64>,
    oldest: Option<Instant>,
}

impl Seen {
    fn add(&mut self, reason: &'static str, jobs: u64) {
        if jobs > 0 {
            *self.by_reason.entry(reason).or_default() += jobs;
        }
    }

    /// Adds a group. `reasons` are those of the lanes that were looked at.
    fn add_group(&mut self, sample: &GroupSample, reasons: &HashMap<&Lane, Reason>) {
        let mut others = sample.due;
        for (lane, due) in &sample.lanes {
            if let Some(reason) = reasons.get(lane) {
                self.add(reason.name(), *due);
                others = others.saturating_sub(*due);
            }
        }
        self.add(OTHER, others);
        self.add(Reason::NotDue.name(), sample.later);
        self.add(Reason::WaitsForJobs.name(), sample.for_jobs);
        self.oldest = self.oldest.into_iter().chain(sample.oldest).min();
    }
}

impl Samples {
    pub(crate) fn new() -> Self {
        Self {
            groups: ByName::new(GroupMeters::new),
            resources: ByName::new(|name| ResourceMeters { in_use: PERMITS_IN_USE.gauge(&[name]), all: PERMITS.gauge(&[name]) }),
            seconds: SAMPLE_SECONDS.histogram(&[]),
        }
    }

    /// Samples until a stop is requested, or until it is dropped at the end of the term.
    pub(super) async fn run(&mut self, store: &Store, leadership: &Leadership, shutdown: &mut Shutdown) {
        while !shutdown.is_requested() {
            let began = Monotonic::now();
            if leadership.is_trusted() {
                if let Err(error) = self.sample(store).await {
                    tracing::debug!(error = chain(&error), "cannot sample the waiting jobs; trying again");
                }
                self.seconds.record(began.elapsed());
            }
            shutdown.sleep(EVERY.max(began.elapsed() * RARER)).await;
        }
    }

    async fn sample(&mut self, store: &Store) -> Result<(), StoreError> {
        let now = store.now();
        let mut groups = store.ungated_groups().await?;
        groups.extend(store.gated_groups().await?);
        let most = (JOBS / u32::try_from(groups.len().clamp(1, MOST_NAMES)).unwrap_or(u32::MAX)).min(JOBS_OF_GROUP);
        let (known, unknown): (Vec<String>, Vec<String>) = groups.into_iter().partition(|group| self.groups.has_room_for(group));
        let mut samples = Vec::new();
        // Groups without gauges of their own are sampled as far as others have left room.
        for group in known.into_iter().chain(unknown).take(MOST_NAMES) {
            let sample = store.sample_group(&group, now, most).await?;
            samples.push((group, sample));
        }
        let mut lanes: Vec<&(Lane, u64)> = samples.iter().flat_map(|(_, sample)| &sample.lanes).collect();
        lanes.sort_by_key(|(_, due)| std::cmp::Reverse(*due));
        lanes.truncate(LANES);
        let lanes: Vec<Lane> = lanes.into_iter().map(|(lane, _)| lane.clone()).collect();
        let situation = Situation::read(store, &lanes).await?;
        let reasons: HashMap<&Lane, Reason> = lanes.iter().map(|lane| (lane, situation.reason_in_lane(lane))).collect();
        self.show(&samples, &reasons, now);
        self.show_permits(&situation);
        Ok(())
    }

    fn show(&mut self, samples: &[(String, GroupSample)], reasons: &HashMap<&Lane, Reason>, now: Instant) {
        let mut seen: HashMap<&str, Seen> = HashMap::new();
        for (group, sample) in samples {
            let name = if self.groups.has_room_for(group) { group } else { OTHER };
            // Takes the room.
            self.groups.of(group);
            seen.entry(name).or_default().add_group(sample, reasons);
        }
        // Before the new values: a group of which nothing waits is not among them.
        self.groups.all().for_each(GroupMeters::reset);
        for (name, Seen { by_reason, oldest }) in seen {
            let gauges = self.groups.of(name);
            by_reason.into_iter().for_each(|(reason, jobs)| gauges.set(reason, jobs));
            let age = oldest.map(|oldest| (now - oldest).to_std().unwrap_or_default());
            gauges.oldest.set(age.unwrap_or_default().as_secs_f64());
        }
    }

    fn show_permits(&mut self, situation: &Situation) {
        let mut seen: HashMap<String, (usize, u32)> = HashMap::new();
        for (resource, in_use, all) in situation.permits() {
            let name = if self.resources.has_room_for(&resource) { resource } else { OTHER.into() };
            self.resources.of(&name);
            let sum = seen.entry(name).or_default();
            *sum = (sum.0 + in_use, sum.1.saturating_add(all));
        }
        self.reset_permits();
        for (name, (in_use, all)) in seen {
            let gauges = self.resources.of(&name);
            gauges.in_use.set(number(in_use));
            gauges.all.set(all);
        }
    }

    /// Sets everything to zero, because this recruiter does not lead.
    pub(super) fn reset(&mut self) {
        self.groups.all().for_each(GroupMeters::reset);
        self.reset_permits();
    }

    fn reset_permits(&mut self) {
        for ResourceMeters { in_use, all } in self.resources.all() {
            in_use.set(0.0);
            all.set(0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_waiting_job_has_one_reason() {
        let (a, b) = (Lane::new("mail", "a"), Lane::new("mail", "b"));
        let at = Instant::UNIX_EPOCH;
        let sample = GroupSample { due: 12, later: 3, for_jobs: 2, oldest: Some(at), lanes: vec![(a.clone(), 7), (b, 4)] };
        let mut seen = Seen::default();
        seen.add_group(&sample, &HashMap::from([(&a, Reason::Paused)]));
        let expected = HashMap::from([("paused", 7), (OTHER, 5), ("not-due", 3), ("waits-for-jobs", 2)]);
        assert_eq!(seen, Seen { by_reason: expected, oldest: Some(at) });
        seen.add_group(&GroupSample::default(), &HashMap::new());
        assert_eq!((seen.by_reason.values().sum::<u64>(), seen.oldest), (17, Some(at)), "a group without jobs changes nothing");
    }
}
