//! Ageing: a job of some groups counts as more urgent the longer it waits, so no stream of urgent jobs keeps it waiting for ever.
//!
//! A job that has been due for N times the ageing of its group counts as N priorities higher, up to the highest one. The lanes of such a
//! group are divided by priority: each is one range of the same index as before, in the order of dates. The head of a range is the oldest
//! job of its priority, and so the most urgent one. The plan compares the heads at their present urgency, and reads nothing else.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use recruiter_common::{
    instant::Instant,
    job::Priority,
    limits::Settings,
    store::{Lane, Position, ScheduledJob},
};

/// The ageing of the groups that have one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ageing(BTreeMap<String, Duration>);

impl Ageing {
    pub(crate) fn of(settings: &Settings) -> Self {
        Self(settings.groups.iter().filter_map(|(name, group)| Some((name.clone(), group.ageing?))).collect())
    }

    /// The groups whose jobs age.
    pub(crate) fn groups(&self) -> BTreeSet<String> {
        self.0.keys().cloned().collect()
    }

    /// By how many priorities the job counts as higher at `now`.
    pub(crate) fn bonus(&self, job: &ScheduledJob, now: Instant) -> i64 {
        if self.0.is_empty() {
            return 0;
        }
        let Some(step) = self.0.get(&job.group) else { return 0 };
        let waited = (now - job.scheduled_at).num_milliseconds().max(0);
        let steps = waited / i64::try_from(step.as_millis()).unwrap_or(i64::MAX).max(1);
        steps.min(highest() - job.priority).max(0)
    }

    /// The position of the job in the order of starts at `now`.
    pub(crate) fn position(&self, job: &ScheduledJob, now: Instant) -> Position {
        let (Reverse(priority), at, id) = job.position();
        (Reverse(priority + self.bonus(job, now)), at, id)
    }
}

fn highest() -> i64 {
    i64::from(Priority::MAX.get())
}

/// The lanes of this lane, one for each priority.
pub(crate) fn by_priority(lane: &Lane) -> impl Iterator<Item = Lane> {
    let lane = lane.clone();
    (0..=highest()).map(move |priority| Lane { priority: Some(priority), ..lane.clone() })
}

#[cfg(test)]
mod tests {
    use recruiter_common::{ids::JobId, limits::GroupSettings};

    use super::*;

    #[test]
    fn a_job_counts_as_one_priority_higher_for_each_time_that_it_has_waited() {
        let group = GroupSettings { ageing: Some(Duration::from_secs(60)), ..GroupSettings::default() };
        let ageing = Ageing::of(&Settings { groups: [("mail".into(), group)].into(), ..Settings::default() });
        let now = Instant::from_timestamp_millis(1_700_000_000_000).unwrap();
        let job = |group: &str, priority: i64, waited: u64| ScheduledJob {
            id: JobId::new(),
            group: group.into(),
            class: "c".into(),
            gate: None,
            priority,
            scheduled_at: now - Duration::from_secs(waited),
        };
        let bonus = |group, priority, waited| ageing.bonus(&job(group, priority, waited), now);
        assert_eq!([bonus("mail", 0, 59), bonus("mail", 0, 60), bonus("mail", 0, 300), bonus("post", 0, 300)], [0, 1, 5, 0]);
        assert_eq!([bonus("mail", 0, 1_000_000), bonus("mail", 7, 1_000_000), bonus("mail", 9, 1_000_000)], [9, 2, 0]);
        let (old, urgent) = (job("mail", 0, 600), job("mail", 9, 599));
        assert!(ageing.position(&old, now) < ageing.position(&urgent, now), "among equals the older one comes first");
        let later = ScheduledJob { scheduled_at: now + Duration::from_secs(5), ..job("mail", 3, 0) };
        assert_eq!(ageing.bonus(&later, now), 0);
        assert_eq!(by_priority(&Lane::new("mail", "c")).count(), 10);
    }
}
