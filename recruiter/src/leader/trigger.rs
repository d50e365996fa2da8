//! What makes a round necessary: hints, dates, and the full scan that finds whatever no hint has said.

use std::collections::{BTreeMap, BTreeSet};

use recruiter_common::{
    ids::WorkerId,
    instant::Instant,
    store::{DueJob, Hint},
};

/// Dates that are remembered, at most. The full scan finds the others.
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

    /// Takes in a hint; dates go to the alarms.
    pub(crate) fn hear(&mut self, hint: Hint, alarms: &mut Alarms) {
        match hint {
            Hint::Jobs { groups, at: Some(at), .. } => alarms.set(at, groups),
            Hint::Jobs { groups, at: None, jobs } if jobs.is_empty() => {
                self.refused |= groups.is_empty();
                self.groups.extend(groups);
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
pub(crate) struct Alarms(BTreeMap<Instant, BTreeSet<String>>);

impl Alarms {
    /// Remembers a date.
    pub(crate) fn set(&mut self, at: Instant, groups: Vec<String>) {
        self.0.entry(at).or_default().extend(groups);
        if self.0.len() > ALARMS {
            self.0.pop_last();
        }
    }

    /// The first date.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.0.first_key_value().map(|(at, _)| *at)
    }

    /// The groups whose date has come.
    pub(crate) fn ring(&mut self, now: Instant) -> BTreeSet<String> {
        let mut groups = BTreeSet::new();
        while let Some(entry) = self.0.first_entry().filter(|entry| *entry.key() <= now) {
            groups.extend(entry.remove());
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
            alarms.set(date(100 + ms), vec![]);
        }
        assert_eq!((alarms.0.len(), alarms.next()), (ALARMS, Some(date(30))), "the nearest are kept");
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
        let announced = hear(Hint::Jobs { groups: vec!["g".into()], at: None, jobs: vec![job.clone()] }).0;
        assert!(announced.announced == [job] && announced.groups.is_empty(), "it need not be searched for");
        let (later, alarms) = hear(Hint::Jobs { groups: vec!["g".into()], at: Some(date(9)), jobs: vec![] });
        assert!(later.is_empty() && alarms.next() == Some(date(9)));
        assert!(hear(Hint::Beat { again_in: std::time::Duration::ZERO }).0.is_empty());
    }
}
