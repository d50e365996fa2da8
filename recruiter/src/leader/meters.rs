//! What the leader measures: its rounds, its hints, its schedules, and its lease.
//!
//! The handles are made once for a process, because a group keeps its own over all terms.

use std::time::Duration;

use chrono::TimeDelta;
use recruiter_common::{
    ids::LeaseTerm,
    meters::{
        ACCEPTED_JOBS, ByName, Counter, Gauge, HINTS, Histogram, JOBS_ASSIGNED, LEADER, LEASE_TERM, ROUND_SECONDS, ROUNDS,
        SCHEDULE_LATENESS, SCHEDULE_SLOTS, number,
    },
    store::Hint,
};

use super::sampling::Samples;

/// The handles of a recruiter, one part for each duty.
pub(crate) struct Meters {
    lease: LeaseMeters,
    pub(super) rounds: RoundMeters,
    pub(super) schedules: ScheduleMeters,
    /// `None`: metrics are not read, so nothing is sampled.
    pub(super) samples: Option<Samples>,
}

struct LeaseMeters {
    leader: Gauge,
    term: Gauge,
}

/// The handles of the rounds.
pub(crate) struct RoundMeters {
    assigned: Counter,
    empty: Counter,
    failed: Counter,
    seconds: Histogram,
    by_group: ByName<Counter>,
    accepted: Gauge,
    hints: [Counter; HINT_WORDS.len()],
}

/// The handles of the schedules.
pub(crate) struct ScheduleMeters {
    lateness: Histogram,
    run: Counter,
    missed: Counter,
    skipped: Counter,
}

/// The hints that a leader receives, in words.
const HINT_WORDS: [&str; 10] = ["jobs", "free", "not-started", "returned", "left", "ended", "waiting", "settings", "seed", "other"];

fn place_of(hint: &Hint) -> usize {
    match hint {
        Hint::Jobs { .. } => 0,
        Hint::Free => 1,
        Hint::NotStarted => 2,
        Hint::Returned { .. } => 3,
        Hint::Left { .. } => 4,
        Hint::Ended { .. } => 5,
        Hint::Waiting { .. } => 6,
        Hint::Settings => 7,
        Hint::Seed => 8,
        Hint::Assigned { .. } | Hint::Recall | Hint::Control | Hint::Cancel { .. } | Hint::KeepAlive { .. } => 9,
    }
}

impl Meters {
    /// The handles of this process, in which metrics are read, or are not.
    pub(crate) fn new(are_read: bool) -> Self {
        Self {
            lease: LeaseMeters { leader: LEADER.gauge(&[]), term: LEASE_TERM.gauge(&[]) },
            rounds: RoundMeters {
                assigned: ROUNDS.counter(&["assigned"]),
                empty: ROUNDS.counter(&["empty"]),
                failed: ROUNDS.counter(&["failed"]),
                seconds: ROUND_SECONDS.histogram(&[]),
                by_group: ByName::new(|group| JOBS_ASSIGNED.counter(&[group])),
                accepted: ACCEPTED_JOBS.gauge(&[]),
                hints: HINT_WORDS.map(|word| HINTS.counter(&[word])),
            },
            schedules: ScheduleMeters {
                lateness: SCHEDULE_LATENESS.histogram(&[]),
                run: SCHEDULE_SLOTS.counter(&["run"]),
                missed: SCHEDULE_SLOTS.counter(&["missed"]),
                skipped: SCHEDULE_SLOTS.counter(&["skipped"]),
            },
            samples: are_read.then(Samples::new),
        }
    }

    /// Notes that this recruiter leads.
    pub(super) fn begin(&self, term: LeaseTerm) {
        self.lease.leader.set(1.0);
        self.lease.term.set(number(term.0));
    }

    /// Notes that this recruiter does not lead any more. What it does not know any more is zero.
    pub(super) fn end(&mut self) {
        self.lease.leader.set(0.0);
        self.lease.term.set(0.0);
        self.rounds.accepted.set(0.0);
        self.samples.iter_mut().for_each(Samples::reset);
    }
}

impl RoundMeters {
    /// Notes a round that has succeeded: how many jobs of which group it has assigned, and how many the workers accepted before.
    pub(super) fn succeeded(&mut self, assigned: &[(String, usize)], accepted: usize, took: Duration) {
        if assigned.is_empty() { &self.empty } else { &self.assigned }.increment(1);
        self.seconds.record(took);
        self.accepted.set(number(accepted));
        for (group, jobs) in assigned {
            self.by_group.of(group).increment(u64::try_from(*jobs).unwrap_or(u64::MAX));
        }
    }

    pub(super) fn failed(&self) {
        self.failed.increment(1);
    }

    pub(super) fn hint(&self, hint: &Hint) {
        self.hints[place_of(hint)].increment(1);
    }
}

impl ScheduleMeters {
    /// Notes a slot whose job was inserted so long after it was due.
    pub(super) fn ran(&self, late: TimeDelta) {
        self.run.increment(1);
        self.lateness.record(late.to_std().unwrap_or_default());
    }

    /// Notes slots that do not run: those that were missed, and those that are skipped because an earlier run is not finished.
    pub(super) fn left_out(&self, missed: i64, skipped: i64) {
        self.missed.increment(u64::try_from(missed).unwrap_or_default());
        self.skipped.increment(u64::try_from(skipped).unwrap_or_default());
    }
}
