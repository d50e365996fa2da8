//! Triggers of a round: hints, due dates, and full scans, which find the jobs and workers of lost hints.

use std::collections::{BTreeMap, BTreeSet};

use recruiter_common::{
    ids::{JobId, WorkerId},
    instant::Instant,
    store::{EVERY_GROUP, Hint, ScheduledJob},
};

/// Maximum number of groups in all alarms. The latest alarms are dropped, and a full scan finds their jobs.
const ALARMS: usize = 10_000;

/// The changes since the last round, as far as hints and alarms report them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Trigger {
    /// Hints may have been missed, or a full scan is due.
    pub(crate) full_scan: bool,
    /// Jobs may have arrived without a hint: list the lanes that have jobs.
    pub(crate) unannounced: bool,
    /// A worker may accept jobs again: read the roster.
    pub(crate) workers: bool,
    /// A worker did not start all of its jobs: search the lanes in which jobs were assigned recently.
    pub(crate) refused: bool,
    /// Groups with due jobs.
    pub(crate) groups: BTreeSet<String>,
    /// Due jobs. Their inserts may not be visible yet. A worker that does not find one reports it.
    pub(crate) announced: Vec<ScheduledJob>,
    /// Workers that take no more jobs, or have left the roster. They may still run jobs.
    pub(crate) left: Vec<WorkerId>,
    /// Workers, and the jobs that they have returned. These jobs were assigned ahead.
    pub(crate) returned: Vec<(WorkerId, Vec<JobId>)>,
    /// An operator has changed a limit, a group or a pause: read the settings.
    pub(crate) settings: bool,
}

impl Trigger {
    /// Whether no change was reported.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Adds groups with due jobs.
    pub(crate) fn add_groups(&mut self, groups: impl IntoIterator<Item = String>) {
        self.groups.extend(groups);
        self.full_scan |= self.groups.remove(EVERY_GROUP);
    }

    /// Adds a hint. A date in the future sets an alarm.
    pub(crate) fn add(&mut self, hint: Hint, alarms: &mut Alarms) {
        match hint {
            Hint::Jobs { groups, at: Some(at), .. } => alarms.set(at, groups),
            Hint::Jobs { groups, at: None, jobs } if jobs.is_empty() => self.add_groups(groups),
            Hint::Jobs { jobs, .. } => self.announced.extend(jobs),
            Hint::Left { worker } => self.left.push(worker),
            Hint::NotStarted => self.refused = true,
            Hint::Returned { worker, jobs } => {
                self.returned.push((worker, jobs));
                self.workers = true;
            }
            Hint::Free => self.workers = true,
            // The tail was opened or reopened: hints may have been missed.
            Hint::Seed => self.full_scan = true,
            Hint::Settings => self.settings = true,
            // The duty of dependencies gets these.
            Hint::Ended { .. } | Hint::Waiting { .. } => {}
            Hint::Assigned { .. } | Hint::Recall | Hint::Control | Hint::Cancel { .. } | Hint::KeepAlive { .. } => {}
        }
    }
}

/// Alarms: dates at which jobs of some groups become due, from hints.
#[derive(Clone, Debug, Default)]
pub(crate) struct Alarms {
    groups: BTreeMap<Instant, BTreeSet<String>>,
    /// Number of groups in all alarms.
    count: usize,
}

impl Alarms {
    /// Sets an alarm for these groups.
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

    /// Removes the alarms up to `now` and returns their groups.
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
    fn each_hint_requests_the_reads_that_it_makes_necessary() {
        let add = |hint: Hint| {
            let (mut trigger, mut alarms) = (Trigger::default(), Alarms::default());
            trigger.add(hint, &mut alarms);
            (trigger, alarms)
        };
        let job = ScheduledJob { id: JobId::new(), group: "g".into(), class: "c".into(), gate: None, priority: 5, scheduled_at: date(1) };
        assert!(add(Hint::Seed).0.full_scan);
        assert!(add(Hint::Free).0.workers);
        assert!(add(Hint::NotStarted).0.refused);
        assert_eq!(add(Hint::jobs_in(["g"])).0.groups, ["g".to_owned()].into());
        assert!(add(Hint::jobs_in(["*"])).0.full_scan, "it stands for more groups than fit");
        let announced = add(Hint::Jobs { groups: vec!["g".into()], at: None, jobs: vec![job.clone()] }).0;
        assert!(announced.announced == [job] && announced.groups.is_empty(), "it need not be searched for");
        let (later, alarms) = add(Hint::Jobs { groups: vec!["g".into()], at: Some(date(9)), jobs: vec![] });
        assert!(later.is_empty() && alarms.next() == Some(date(9)));
        assert!(add(Hint::KeepAlive { again_in: std::time::Duration::ZERO }).0.is_empty());
    }
}
