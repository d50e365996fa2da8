//! The table of the jobs that a session holds: one entry for each job, with its phase.
//!
//! The session reserves a slot before it locks a job. The slot is free for another job as soon as the first has been executed. Its entry
//! stays until its end is recorded and its hooks have returned. The number of such entries is limited. Reports and heartbeats write the
//! jobs of the table into the roster, where a cleaner finds them.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant as Monotonic,
};

use recruiter_common::ids::JobId;
use tokio::sync::Notify;

use super::shortage::Shortage;
use crate::cancellation::Cancel;

/// Maximum number of jobs without a slot whose ends are not recorded yet or whose hooks still run; with more slots than this, their number.
const UNRECORDED: u32 = 64;

/// The table. The session, its heartbeat and its running jobs share it.
#[derive(Debug, Default)]
pub(crate) struct Table {
    jobs: Mutex<HashMap<JobId, Phase>>,
    /// Jobs of unconfirmed starts. They have no slot.
    unconfirmed: Mutex<HashSet<JobId>>,
    /// Queued jobs, which are not started yet. They have no slot.
    prefetched: Mutex<HashSet<JobId>>,
    /// Number of executions that have ended since [`Table::take_ended`] was called.
    ended: AtomicUsize,
    pub(crate) has_ended: Notify,
    /// The permits of jobs that have ended since [`Table::take_released`] was called.
    released: Mutex<Vec<String>>,
    shortage: Mutex<Shortage>,
}

/// The phase of a job. The first two phases use a slot.
#[derive(Debug)]
pub(crate) enum Phase {
    /// The start of the job is on its way. The job can already be cancelled.
    Reserved(Arc<Cancel>),
    /// The job runs.
    Running(Arc<Cancel>),
    /// The job was executed, and its end is being recorded.
    Ended(Arc<Cancel>),
    /// The end of the job is recorded, and its hooks run.
    Recorded(Arc<Cancel>),
}

impl Phase {
    pub(crate) fn cancel(&self) -> &Arc<Cancel> {
        match self {
            Self::Reserved(cancel) | Self::Running(cancel) | Self::Ended(cancel) | Self::Recorded(cancel) => cancel,
        }
    }
}

impl Table {
    /// The jobs that this worker may have locked before its next report, for the roster.
    pub(crate) fn working_on(&self) -> Vec<JobId> {
        // In the order in which a job moves, so that a job that moves meanwhile is not missed.
        let mut jobs: HashSet<JobId> = self.prefetched.lock().unwrap_or_else(PoisonError::into_inner).clone();
        jobs.extend(self.jobs());
        jobs.extend(self.unconfirmed().iter());
        jobs.into_iter().collect()
    }

    /// Sets the jobs of unconfirmed starts. Returns whether they have changed.
    pub(crate) fn set_unconfirmed(&self, jobs: HashSet<JobId>) -> bool {
        let mut unconfirmed = self.unconfirmed();
        let has_changed = *unconfirmed != jobs;
        *unconfirmed = jobs;
        has_changed
    }

    /// Sets the queued jobs.
    pub(crate) fn set_prefetched(&self, jobs: impl Iterator<Item = JobId>) {
        *self.prefetched.lock().unwrap_or_else(PoisonError::into_inner) = jobs.collect();
    }

    /// The jobs with an entry, without those whose end is recorded.
    pub(crate) fn jobs(&self) -> Vec<JobId> {
        self.entries().iter().filter(|(_, phase)| !matches!(phase, Phase::Recorded(_))).map(|(job, _)| *job).collect()
    }

    /// The jobs whose start is on its way.
    pub(crate) fn reserved(&self) -> Vec<JobId> {
        self.entries().iter().filter(|(_, phase)| matches!(phase, Phase::Reserved(_))).map(|(job, _)| *job).collect()
    }

    /// Notes that a job runs, in the slot that was reserved for it. Returns its cancellation.
    pub(crate) fn fill(&self, job: JobId) -> Arc<Cancel> {
        let mut entries = self.entries();
        let cancel = entries.get(&job).map(Phase::cancel).cloned().unwrap_or_default();
        entries.insert(job, Phase::Running(cancel.clone()));
        cancel
    }

    /// Notes that a job was executed: its slot is free for another job.
    pub(crate) fn note_ended(&self, job: JobId) {
        if let Some(phase) = self.entries().get_mut(&job) {
            *phase = Phase::Ended(phase.cancel().clone());
            self.ended.fetch_add(1, Ordering::Relaxed);
            self.has_ended.notify_one();
        }
    }

    /// Notes that a limited job has ended, so that its permits are free.
    pub(crate) fn note_released(&self, permits: &[String]) {
        if !permits.is_empty() {
            self.released.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(permits);
            self.has_ended.notify_one();
        }
    }

    /// Returns the permits that have become free since the last call.
    pub(crate) fn take_released(&self) -> Vec<String> {
        std::mem::take(&mut self.released.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the number of executions that have ended since the last call.
    pub(crate) fn take_ended(&self) -> usize {
        self.ended.swap(0, Ordering::Relaxed)
    }

    /// Notes that the end of a job is recorded: the worker no longer holds the job, but its hooks still run.
    pub(crate) fn note_recorded(&self, job: JobId) {
        if let Some(phase) = self.entries().get_mut(&job) {
            *phase = Phase::Recorded(phase.cancel().clone());
        }
    }

    /// The number of jobs of which only the hooks still run.
    pub(crate) fn count_recorded(&self) -> usize {
        self.entries().values().filter(|phase| matches!(phase, Phase::Recorded(_))).count()
    }

    /// Notes that the machine lacked a resource to start a job.
    pub(crate) fn note_shortage(&self, reason: &str) {
        let is_new = self.shortage().observe(self.count(), Monotonic::now());
        if is_new {
            tracing::warn!(
                reason,
                "the machine cannot start more jobs: they are released without counting, and this worker runs fewer jobs for a while"
            );
        }
    }

    /// The number of slots in use.
    pub(crate) fn count(&self) -> u32 {
        let in_use = self.entries().values().filter(|phase| matches!(phase, Phase::Reserved(_) | Phase::Running(_))).count();
        u32::try_from(in_use).unwrap_or(u32::MAX)
    }

    /// How many more jobs may be started if the worker has `slots` slots.
    pub(crate) fn count_free(&self, slots: u32) -> u32 {
        let held = u32::try_from(self.entries().len()).unwrap_or(u32::MAX);
        let unrecorded = slots.max(UNRECORDED);
        slots.saturating_sub(self.count()).min(slots.saturating_add(unrecorded).saturating_sub(held))
    }

    pub(crate) fn entries(&self) -> MutexGuard<'_, HashMap<JobId, Phase>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unconfirmed(&self) -> MutexGuard<'_, HashSet<JobId>> {
        self.unconfirmed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn shortage(&self) -> MutexGuard<'_, Shortage> {
        self.shortage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
