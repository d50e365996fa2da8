//! What makes a round necessary: hints, dates, and the full scan that finds whatever no hint has said.

use std::collections::{BTreeMap, BTreeSet};

use recruiter_common::{
    ids::WorkerId,
    instant::Instant,
    store::{DueJob, EVERY_GROUP, Hint},
};

/// Groups whose dates are remembered, at most. The full scan finds the jobs of the others.
const ALARMS: usize = 10_000;

/// What a round has to look at.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trigger {
    /// Everything.
    pub(crate) full_scan: bool,
    /// The roster: a worker may have free slots.
    pub(crate) workers: bool,
    /// Lanes in which jobs were assigned lately: a worker did not start all of its jobs.
    pub(crate) refused: bool,
    /// These groups: they have jobs that are due.
    pub(crate) groups: BTreeSet<String>,
    /// These jobs are due. They need not be visible yet: a worker that does not find one says so.
    pub(crate) announced: Vec<DueJob>,
    /// These workers left the roster.
    pub(crate) left: Vec<WorkerId>,
}

impl Trigger {
    /// Whether there is nothing to look at.
    pub(crate) fn is_empty(&self) -> bool {
        !self.full_scan && !self.workers && !self.refused && self.groups.is_empty() && self.announced.is_empty() && self.left.is_empty()
    }

    /// Jobs of these groups are due.
    pub(crate) fn look_in(&mut self, groups: impl IntoIterator<Item = String>) {
        self.groups.extend(groups);
        self.full_scan |= self.groups.remove(EVERY_GROUP);
    }

    /// Takes in a hint; dates go to the alarms.
    pub(crate) fn hear(&mut self, hint: Hint, alarms: &mut Alarms) {
        match hint {
            Hint::Jobs { groups, at: Some(at), .. } => alarms.set(at, groups),
            Hint::Jobs { groups, at: None, jobs } if jobs.is_empty() => {
                self.refused |= groups.is_empty();
                self.look_in(groups);
            }
            Hint::Jobs { jobs, .. } => self.announced.extend(jobs),
            Hint::Left { worker } => self.left.push(worker),
            Hint::Free => self.workers = true,
            // The tail was opened (again): hints may have been missed.
            Hint::Seed => self.full_scan = true,
            Hint::Assigned { .. } | Hint::Cancel { .. } | Hint::Beat { .. } => {}
        }
    }
}

/// Dates at which jobs of some groups become due, as hints have said.
#[derive(Debug, Default)]
pub(crate) struct Alarms {
    groups: BTreeMap<Instant, BTreeSet<String>>,
    /// Groups in all.
    count: usize,
}

impl Alarms {
    /// Remembers a date.
    pub(crate) fn set(&mut self, at: Instant, groups: Vec<String>) {
        let set = self.groups.entry(at).or_default();
        let before = set.len();
        set.extend(groups);
        self.count += set.len() - before;
        while self.count > ALARMS
            && let Some((_, forgotten)) = self.groups.pop_last()
        {
            self.count -= forgotten.len();
        }
    }

    /// The first date.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.groups.first_key_value().map(|(at, _)| *at)
    }

    /// The groups whose date has come.
    pub(crate) fn ring(&mut self, now: Instant) -> BTreeSet<String> {
        let mut groups = BTreeSet::new();
        while let Some(entry) = self.groups.first_entry().filter(|entry| *entry.key() <= now) {
            let due = entry.remove();
            self.count -= due.len();
            groups.extend(due);
        }
        groups
    }
}

#[cfg(test)]
mod tests {
    use recruiter_common::ids::JobId;

    use super::*;

    fn date(ms: i64) -> Instant {
        Instant::from_timestamp_millis(ms).expect("a date")
    }

    #[test]
    fn alarms_ring_once_and_in_order() {
        let mut alarms = Alarms::default();
        alarms.set(date(30), vec!["c".into()]);
        alarms.set(date(10), vec!["a".into()]);
        alarms.set(date(10), vec!["b".into()]);
        assert_eq!(alarms.next(), Some(date(10)));
        assert!(alarms.ring(date(9)).is_empty());
        assert_eq!(alarms.ring(date(10)), ["a".to_owned(), "b".to_owned()].into());
        assert_eq!(alarms.ring(date(29)), BTreeSet::new());
        for ms in 0..20_000 {
            alarms.set(date(100 + ms), vec!["a".into(), "b".into()]);
        }
        assert_eq!((alarms.count, alarms.next()), (ALARMS - 1, Some(date(30))), "the nearest are kept");
        alarms.set(date(20), (0..1_000_000).map(|number| number.to_string()).collect());
        assert!(alarms.count <= ALARMS && alarms.groups.values().map(BTreeSet::len).sum::<usize>() == alarms.count);
    }

    #[test]
    fn each_hint_asks_for_what_it_makes_doubtful() {
        let hear = |hint: Hint| {
            let (mut trigger, mut alarms) = (Trigger::default(), Alarms::default());
            trigger.hear(hint, &mut alarms);
            (trigger, alarms)
        };
        let job = DueJob { id: JobId::new(), group: "g".into(), class: "c".into(), priority: 5, scheduled_at: date(1) };
        assert!(hear(Hint::Seed).0.full_scan);
        assert!(hear(Hint::Free).0.workers);
        assert!(hear(Hint::jobs_in([] as [&str; 0])).0.refused);
        assert_eq!(hear(Hint::jobs_in(["g"])).0.groups, ["g".to_owned()].into());
        assert!(hear(Hint::jobs_in(["*"])).0.full_scan, "more groups than fit");
        let announced = hear(Hint::Jobs { groups: vec!["g".into()], at: None, jobs: vec![job.clone()] }).0;
        assert!(announced.announced == [job] && announced.groups.is_empty(), "it need not be searched for");
        let (later, alarms) = hear(Hint::Jobs { groups: vec!["g".into()], at: Some(date(9)), jobs: vec![] });
        assert!(later.is_empty() && alarms.next() == Some(date(9)));
        assert!(hear(Hint::Beat { again_in: std::time::Duration::ZERO }).0.is_empty());
    }
}
