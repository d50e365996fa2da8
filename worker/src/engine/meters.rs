//! What a worker measures: its jobs by class, its slots, its writes and its heartbeats.

use std::{
    collections::HashMap,
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    clock::Uptime,
    instant::Instant,
    job::Job,
    meters::{
        COMMIT_SECONDS, COMMIT_SIZE, Counter, Gauge, HEARTBEAT_AGE, HEARTBEAT_AT, HEARTBEATS, Histogram, JOB_EXECUTION, JOB_LATENCY,
        JOBS_ENDED, JOBS_STARTED, MOST_NAMES, OTHER, SLOTS, describe, number,
    },
    service::Notifier,
};

/// The handles of a worker process.
pub(crate) struct Meters {
    classes: HashMap<String, ClassMeters>,
    other: ClassMeters,
    notifier: Notifier,
    busy: Gauge,
    free: Gauge,
    pub(super) commits: CommitMeters,
    pub(super) heartbeats: HeartbeatMeters,
}

/// The handles of the jobs of one class.
pub(crate) struct ClassMeters {
    started: Counter,
    latency: Histogram,
    execution: Histogram,
    ended: [Counter; Outcome::ALL.len()],
}

/// The handles of the recorder.
#[derive(Clone)]
pub(crate) struct CommitMeters {
    size: Histogram,
    seconds: Histogram,
}

/// The handles of the heartbeat.
#[derive(Clone)]
pub(crate) struct HeartbeatMeters {
    acknowledged: Counter,
    failed: Counter,
    age: Histogram,
    at: Gauge,
}

/// How a started job has ended, or why it runs again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    Failed,
    Cancelled,
    Retried,
    Snoozed,
    Interrupted,
    Released,
    ClaimLost,
}

impl Outcome {
    const ALL: [Self; 8] =
        [Self::Done, Self::Failed, Self::Cancelled, Self::Retried, Self::Snoozed, Self::Interrupted, Self::Released, Self::ClaimLost];

    fn word(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::Retried => "retried",
            Self::Snoozed => "snoozed",
            Self::Interrupted => "interrupted",
            Self::Released => "released",
            Self::ClaimLost => "claim-lost",
        }
    }
}

impl Meters {
    /// The handles of a worker with these classes. Only the first [`MOST_NAMES`] have some of their own.
    pub(crate) fn new<'a>(classes: impl Iterator<Item = &'a str>, notifier: Notifier) -> Self {
        // The recorder of an application knows nothing of them yet.
        describe();
        Self {
            classes: classes.take(MOST_NAMES).map(|class| (class.to_owned(), ClassMeters::new(class))).collect(),
            other: ClassMeters::new(OTHER),
            notifier,
            busy: SLOTS.gauge(&["busy"]),
            free: SLOTS.gauge(&["free"]),
            commits: CommitMeters { size: COMMIT_SIZE.histogram(&[]), seconds: COMMIT_SECONDS.histogram(&[]) },
            heartbeats: HeartbeatMeters {
                acknowledged: HEARTBEATS.counter(&["acknowledged"]),
                failed: HEARTBEATS.counter(&["failed"]),
                age: HEARTBEAT_AGE.histogram(&[]),
                at: HEARTBEAT_AT.gauge(&[]),
            },
        }
    }

    /// The handles of the jobs of a class.
    pub(super) fn of(&self, class: &str) -> &ClassMeters {
        self.classes.get(class).unwrap_or(&self.other)
    }

    /// Notes the slots of the worker, if it is the one of the process with the newest settings.
    pub(super) fn slots(&self, (busy, free): (u32, u32)) {
        if !self.notifier.is_replaced() {
            self.busy.set(busy);
            self.free.set(free);
        }
    }

    /// Notes that the session is over.
    pub(super) fn left(&self) {
        self.slots((0, 0));
        if !self.notifier.is_replaced() {
            self.heartbeats.at.set(0.0);
        }
    }
}

impl ClassMeters {
    fn new(class: &str) -> Self {
        Self {
            started: JOBS_STARTED.counter(&[class]),
            latency: JOB_LATENCY.histogram(&[class]),
            execution: JOB_EXECUTION.histogram(&[class]),
            ended: Outcome::ALL.map(|outcome| JOBS_ENDED.counter(&[class, outcome.word()])),
        }
    }

    /// Notes that the workable of a job is called at `now`.
    pub(super) fn started(&self, job: &Job, now: Instant) {
        self.started.increment(1);
        if let Some(due) = job.last_execution.as_ref().and_then(|execution| execution.scheduled_at) {
            self.latency.record((now - due).to_std().unwrap_or_default());
        }
    }

    /// Notes that a job was executed.
    pub(super) fn executed(&self, took: Duration) {
        self.execution.record(took);
    }

    /// Notes the recorded end of a job.
    pub(super) fn ended(&self, outcome: Outcome) {
        self.ended[outcome as usize].increment(1);
    }
}

impl CommitMeters {
    /// Notes that entries of the recorder were written, as many of them for the first time.
    pub(super) fn written(&self, entries: usize, began: Monotonic) {
        if entries > 0 {
            self.size.record(number(entries));
        }
        self.seconds.record(began.elapsed());
    }
}

impl HeartbeatMeters {
    /// Notes that a heartbeat was acknowledged: when it was sent, and when the one before; and its instant by MongoDB's clock.
    pub(super) fn acknowledged(&self, sent: Uptime, before: Uptime, at: Instant) {
        self.acknowledged.increment(1);
        self.age.record(sent.since(before));
        self.at.set(number(at.timestamp_millis()) / 1_000.0);
    }

    pub(super) fn failed(&self) {
        self.failed.increment(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_outcome_has_its_counter() {
        for (index, outcome) in Outcome::ALL.into_iter().enumerate() {
            assert_eq!((outcome as usize, Outcome::ALL.iter().filter(|other| other.word() == outcome.word()).count()), (index, 1));
        }
    }

    #[test]
    fn classes_beyond_the_limit_share_their_handles() {
        let names: Vec<String> = (0..MOST_NAMES + 7).map(|class| format!("class-{class:03}")).collect();
        let meters = Meters::new(names.iter().map(String::as_str), Notifier::Silent);
        let shares = |class: &str| std::ptr::eq(meters.of(class), &meters.other);
        assert_eq!(names.iter().filter(|class| shares(class)).count(), 7);
        assert!(!shares("class-000") && shares("of another worker"));
    }
}
