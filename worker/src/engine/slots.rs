//! The slots of a session: the one table of the jobs that it holds, and the tasks that run them.
//!
//! The session reserves a slot before it locks a job, fills it when the job starts, and frees it when the job's task ends. The heartbeat
//! writes the jobs of the table into the roster, where the cleaner finds them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant as Monotonic,
};

use recruiter_common::{ids::JobId, store::Free};
use tokio::task::{JoinError, JoinSet};

use super::shortage::Shortage;
use crate::context::{Cancel, Cancellation};

/// The slots of a session.
pub(crate) struct Slots {
    capacity: u32,
    table: Arc<Table>,
    tasks: JoinSet<JobId>,
}

/// The table, as the heartbeat and the running jobs see it.
#[derive(Debug, Default)]
pub(crate) struct Table {
    jobs: Mutex<HashMap<JobId, Slot>>,
    shortage: Mutex<Shortage>,
}

#[derive(Debug)]
enum Slot {
    /// For a job that is about to be started.
    Reserved,
    /// The job runs.
    Running(Arc<Cancel>),
}

impl Slots {
    pub(crate) fn new(capacity: u32) -> Self {
        Self { capacity, table: Arc::default(), tasks: JoinSet::new() }
    }

    pub(crate) fn table(&self) -> Arc<Table> {
        self.table.clone()
    }

    /// Reserves slots for jobs that are about to be started.
    pub(crate) fn reserve(&self, jobs: impl IntoIterator<Item = JobId>) {
        self.table.slots().extend(jobs.into_iter().map(|job| (job, Slot::Reserved)));
    }

    /// Frees the slots of jobs that were not started.
    pub(crate) fn release(&self, jobs: impl IntoIterator<Item = JobId>) {
        let mut slots = self.table.slots();
        jobs.into_iter().for_each(|job| drop(slots.remove(&job)));
    }

    /// Runs a job in a task of its own.
    pub(crate) fn run(&mut self, job: JobId, cancel: Arc<Cancel>, attempt: impl Future<Output = JobId> + Send + 'static) {
        self.table.slots().insert(job, Slot::Running(cancel));
        self.tasks.spawn(attempt);
    }

    /// Waits for the end of a job's task and frees its slot, with those of all other tasks that have ended by then. `None` when no task runs.
    pub(crate) async fn ended(&mut self) -> Option<()> {
        let mut ended = Some(self.tasks.join_next().await?);
        while let Some(task) = ended {
            self.table.slots().remove(&job_of(task));
            ended = self.tasks.try_join_next();
        }
        Some(())
    }

    /// The number of running tasks.
    pub(crate) fn running(&self) -> usize {
        self.tasks.len()
    }

    /// Whether the job has a slot.
    pub(crate) fn holds(&self, job: JobId) -> bool {
        self.table.slots().contains_key(&job)
    }

    pub(crate) fn is_running(&self, job: JobId) -> bool {
        matches!(self.table.slots().get(&job), Some(Slot::Running(_)))
    }

    /// The jobs that have a slot.
    pub(crate) fn jobs(&self) -> Vec<JobId> {
        self.table.jobs()
    }

    /// The number of free slots. While the machine is short of a resource, it is below what the capacity leaves.
    pub(crate) fn count_free(&self) -> u32 {
        self.table.shortage().allowed(self.capacity, Monotonic::now()).saturating_sub(self.table.count())
    }

    /// The free slots and the held jobs, as the roster shows them.
    pub(crate) fn free(&self) -> Free {
        Free { places: self.count_free(), working_on: self.jobs() }
    }

    /// Cancels a job; whether it was running.
    pub(crate) fn cancel(&self, job: JobId, why: Cancellation) -> bool {
        let cancel = match self.table.slots().get(&job) {
            Some(Slot::Running(cancel)) => cancel.clone(),
            Some(Slot::Reserved) | None => return false,
        };
        cancel.cancel(why);
        true
    }

    /// Applies `ask` to the cancellation of every running job.
    pub(crate) fn ask_all(&self, ask: impl Fn(&Cancel)) {
        let running: Vec<Arc<Cancel>> = self.table.slots().values().filter_map(Slot::cancel).cloned().collect();
        running.iter().for_each(|cancel| ask(cancel));
    }
}

impl Slot {
    fn cancel(&self) -> Option<&Arc<Cancel>> {
        match self {
            Self::Running(cancel) => Some(cancel),
            Self::Reserved => None,
        }
    }
}

impl Table {
    /// The jobs that have a slot.
    pub(crate) fn jobs(&self) -> Vec<JobId> {
        self.slots().keys().copied().collect()
    }

    /// Notes that the machine lacked a resource to start a job.
    pub(crate) fn note_shortage(&self, reason: &str) {
        let is_new = self.shortage().observe(self.count(), Monotonic::now());
        if is_new {
            tracing::warn!(
                reason,
                "the machine cannot start more programs: their jobs are released uncounted, and this worker runs fewer jobs for a while"
            );
        }
    }

    fn count(&self) -> u32 {
        u32::try_from(self.slots().len()).unwrap_or(u32::MAX)
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<JobId, Slot>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shortage(&self) -> MutexGuard<'_, Shortage> {
        self.shortage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The job of a task that has ended. A panic of such a task is an error of this crate, since code of users is guarded: it ends the session's
/// task as well.
fn job_of(joined: Result<JobId, JoinError>) -> JobId {
    joined.unwrap_or_else(|error| match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(_) => unreachable!("tasks are aborted only when the slots are dropped"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_slot_is_reserved_filled_and_freed() {
        let mut slots = Slots::new(3);
        let (first, second) = (JobId::new(), JobId::new());
        slots.reserve([first, second]);
        assert_eq!((slots.count_free(), slots.is_running(first)), (1, false));
        assert!(!slots.cancel(first, Cancellation::Requested), "it does not run yet");
        let cancel = Arc::new(Cancel::default());
        let ends = cancel.clone();
        slots.run(first, cancel, async move {
            ends.cancelled().await;
            first
        });
        slots.release([second]);
        assert_eq!((slots.count_free(), slots.jobs(), slots.running()), (2, vec![first], 1));
        assert!(slots.cancel(first, Cancellation::Requested));
        assert_eq!(slots.ended().await, Some(()));
        assert_eq!((slots.count_free(), slots.jobs(), slots.ended().await), (3, vec![], None));
    }
}
