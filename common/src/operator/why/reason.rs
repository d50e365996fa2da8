//! The reasons, and their names.

use std::fmt;

use crate::{
    base::{Instant, words},
    roster::PermitHolder,
};

words! {
    /// Why a job does not run. The names are stable.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    #[non_exhaustive]
    pub enum Reason {
        /// It has ended.
        Finished = "finished",
        /// It runs.
        Running = "running",
        /// Its worker seems to be dead. A cleaner ends the execution.
        DeadWorker = "dead-worker",
        /// A dead worker has the job, or a permit that it needs, and no cleaner ends that.
        NoCleaner = "no-cleaner",
        /// Its document is not a job.
        Malformed = "malformed",
        /// It can no longer be started.
        Expired = "expired",
        /// It waits for the ends of other jobs.
        WaitsForJobs = "waits-for-jobs",
        /// It runs once more after the job that has its unique key.
        WaitsForPredecessor = "waits-for-predecessor",
        /// What it waited for has ended. It is due within seconds.
        ReleasedSoon = "released-soon",
        /// Its date is in the future.
        NotDue = "not-due",
        /// No recruiter leads.
        NoRecruiter = "no-recruiter",
        /// No running worker takes it.
        NoWorker = "no-worker",
        /// The workers that take it do not answer.
        WorkerSilent = "worker-silent",
        /// An earlier job of its line is not finished.
        Behind = "behind",
        /// A pause covers it.
        Paused = "paused",
        /// Its group is in a maintenance window.
        Maintenance = "maintenance",
        /// All permits of a resource are held.
        LimitFull = "limit-full",
        /// A resource has no limit.
        LimitUndefined = "limit-undefined",
        /// The document of a limit is not valid.
        LimitInvalid = "limit-invalid",
        /// It waits for a rate.
        Rate = "rate",
        /// No running worker that takes it knows its retry policy.
        UnknownPolicy = "unknown-policy",
        /// All slots are in use.
        NoFreeSlot = "no-free-slot",
        /// A worker has it and starts it next.
        Assigned = "assigned",
        /// Nothing keeps it from being assigned.
        Assignable = "assignable",
    }

    /// The name, for programs.
    fn name;
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

    /// Whether something keeps the job from running: it has not ended, does not run, and does not start at once.
    pub fn is_waiting(&self) -> bool {
        ![Reason::Finished, Reason::Running, Reason::Assignable].contains(&self.reason)
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
