//! The reasons, and their names.

use std::fmt;

use crate::{base::Instant, roster::PermitHolder};

/// Why a job does not run. The names are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// It has ended.
    Finished,
    /// It runs.
    Running,
    /// Its worker seems to be dead. A cleaner ends the execution.
    DeadWorker,
    /// A dead worker has the job, or a permit that it needs, and no cleaner ends that.
    NoCleaner,
    /// Its document is not a job.
    Malformed,
    /// It can no longer be started.
    Expired,
    /// It waits for the ends of other jobs.
    WaitsForJobs,
    /// It runs once more after the job that has its unique key.
    WaitsForPredecessor,
    /// What it waited for has ended. It is due within seconds.
    ReleasedSoon,
    /// Its date is in the future.
    NotDue,
    /// No recruiter leads.
    NoRecruiter,
    /// No running worker takes it.
    NoWorker,
    /// The workers that take it do not answer.
    WorkerSilent,
    /// An earlier job of its line is not finished.
    Behind,
    /// A pause covers it.
    Paused,
    /// Its group is in a maintenance window.
    Maintenance,
    /// All permits of a resource are held.
    LimitFull,
    /// A resource has no limit.
    LimitUndefined,
    /// The document of a limit is not valid.
    LimitInvalid,
    /// It waits for a rate.
    Rate,
    /// No running worker that takes it knows its retry policy.
    UnknownPolicy,
    /// All slots are in use.
    NoFreeSlot,
    /// A worker has it and starts it next.
    Assigned,
    /// Nothing keeps it from being assigned.
    Assignable,
}

impl Reason {
    /// All reasons.
    pub const ALL: [Self; 24] = [
        Self::Finished,
        Self::Running,
        Self::DeadWorker,
        Self::NoCleaner,
        Self::Malformed,
        Self::Expired,
        Self::WaitsForJobs,
        Self::WaitsForPredecessor,
        Self::ReleasedSoon,
        Self::NotDue,
        Self::NoRecruiter,
        Self::NoWorker,
        Self::WorkerSilent,
        Self::Behind,
        Self::Paused,
        Self::Maintenance,
        Self::LimitFull,
        Self::LimitUndefined,
        Self::LimitInvalid,
        Self::Rate,
        Self::UnknownPolicy,
        Self::NoFreeSlot,
        Self::Assigned,
        Self::Assignable,
    ];

    /// The name, for programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Running => "running",
            Self::DeadWorker => "dead-worker",
            Self::NoCleaner => "no-cleaner",
            Self::Malformed => "malformed",
            Self::Expired => "expired",
            Self::WaitsForJobs => "waits-for-jobs",
            Self::WaitsForPredecessor => "waits-for-predecessor",
            Self::ReleasedSoon => "released-soon",
            Self::NotDue => "not-due",
            Self::NoRecruiter => "no-recruiter",
            Self::NoWorker => "no-worker",
            Self::WorkerSilent => "worker-silent",
            Self::Behind => "behind",
            Self::Paused => "paused",
            Self::Maintenance => "maintenance",
            Self::LimitFull => "limit-full",
            Self::LimitUndefined => "limit-undefined",
            Self::LimitInvalid => "limit-invalid",
            Self::Rate => "rate",
            Self::UnknownPolicy => "unknown-policy",
            Self::NoFreeSlot => "no-free-slot",
            Self::Assigned => "assigned",
            Self::Assignable => "assignable",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Why a job does not run, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Why {
    /// The first reason.
    pub reason: Reason,
    /// One or two sentences for people: the reason, and what to do. Safe for a terminal.
    pub text: String,
    /// When the reason ends, as far as that is known. An estimate if the job waits for a rate behind others.
    pub until: Option<Instant>,
    /// The workers that hold the permits of a full resource, and their jobs.
    pub holders: Vec<PermitHolder>,
}

impl Why {
    pub(crate) fn new(reason: Reason, text: impl Into<String>) -> Self {
        Self { reason, text: text.into(), until: None, holders: Vec::new() }
    }

    pub(crate) fn until(self, until: Instant) -> Self {
        Self { until: Some(until), ..self }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_reason_has_a_name_of_its_own() {
        let (reasons, names): (BTreeSet<Reason>, BTreeSet<&str>) = Reason::ALL.into_iter().map(|reason| (reason, reason.name())).unzip();
        assert_eq!((reasons.len(), names.len()), (Reason::ALL.len(), Reason::ALL.len()));
        // The last variant: the list ends with it, so none is missing.
        assert_eq!(Reason::ALL.len(), Reason::Assignable as usize + 1);
    }
}
