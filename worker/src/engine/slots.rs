//! The slots of a session: the tasks that run its jobs, and the number of free slots.

use std::{sync::Arc, time::Instant as Monotonic};

use recruiter_common::{ids::JobId, limits::line_of_gate, shutdown::pause, store::Position};
use tokio::{
    sync::oneshot,
    task::{JoinError, JoinSet},
};

use super::{phases::Phase, startable::PermitLane, table::Table};
use crate::{
    cancellation::{Cancel, Cancellation},
    panics::failure_of,
    threads::Threads,
};

/// The slots of a session.
pub(crate) struct Slots {
    capacity: u32,
    table: Arc<Table>,
    tasks: JoinSet<JobId>,
    /// The threads of the worker's blocking jobs.
    threads: Threads,
}

/// A task of the session has panicked. Panics in code of users are caught, so this is an error of this crate or of a policy's destructor.
/// The job keeps its entry in the table.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub(crate) struct TaskPanicked;

impl From<JoinError> for TaskPanicked {
    fn from(error: JoinError) -> Self {
        match error.try_into_panic() {
            Ok(panic) => tracing::error!(error = failure_of(panic.as_ref()).message, "a task of the session failed"),
            Err(_) => unreachable!("tasks are aborted only when their set is dropped"),
        }
        Self
    }
}

impl Slots {
    pub(crate) fn new(capacity: u32, threads: Threads) -> Self {
        Self { capacity, table: Arc::new(Table::new(capacity, threads.clone())), tasks: JoinSet::new(), threads }
    }

    pub(crate) fn table(&self) -> Arc<Table> {
        self.table.clone()
    }

    /// Reserves slots for jobs that are about to be started.
    pub(crate) fn reserve(&self, jobs: impl IntoIterator<Item = JobId>) {
        let mut phases = self.table.phases();
        jobs.into_iter().for_each(|job| drop(phases.set(job, Phase::Reserved)));
    }

    /// Adds jobs that are about to be started before slots are free.
    pub(crate) fn lock_ahead(&self, positions: impl IntoIterator<Item = Position>) {
        let mut phases = self.table.phases();
        positions.into_iter().for_each(|position| drop(phases.set(position.2, Phase::LockedAhead(position))));
    }

    /// Frees the slots of jobs that are not run.
    pub(crate) fn release(&self, jobs: impl IntoIterator<Item = JobId>) {
        let mut phases = self.table.phases();
        jobs.into_iter().for_each(|job| drop(phases.remove(job)));
    }

    /// Runs a started job in a task of its own: in the slot that is reserved for it, or as soon as the job gets a slot if it is locked
    /// ahead.
    pub(crate) fn run<A: Future<Output = JobId> + Send + 'static>(
        &mut self,
        job: JobId,
        attempt: impl FnOnce(Arc<Cancel>, Option<oneshot::Receiver<()>>) -> A,
    ) {
        let (cancel, slot) = self.table.fill(job);
        self.tasks.spawn(attempt(cancel, slot));
    }

    /// Waits until the number of free slots may have changed: jobs have ended, a shortage eases, or a thread of an earlier session has
    /// ended.
    pub(crate) async fn changed(&mut self) -> Result<(), TaskPanicked> {
        let now = Monotonic::now();
        let eases_at = self.table.shortage().eases_at(self.capacity, now);
        let (threads, table) = (self.threads.clone(), self.table.clone());
        let eases = async {
            match eases_at {
                Some(at) => pause(at.saturating_duration_since(now)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            Some(ended) = self.ended() => ended,
            () = eases => Ok(()),
            () = threads.changed() => Ok(()),
            () = table.has_ended.notified() => Ok(()),
        }
    }

    /// Waits for the end of a job's task, and removes the entries of all tasks that have ended by then. `None` if no task runs.
    pub(crate) async fn ended(&mut self) -> Option<Result<(), TaskPanicked>> {
        let mut ended = Some(self.tasks.join_next().await?);
        while let Some(task) = ended {
            match task {
                Ok(job) => drop(self.table.phases().remove(job)),
                Err(error) => return Some(Err(error.into())),
            }
            ended = self.tasks.try_join_next();
        }
        Some(Ok(()))
    }

    /// The number of running tasks.
    pub(crate) fn running(&self) -> usize {
        self.tasks.len()
    }

    /// Whether the job has an entry in the table.
    pub(crate) fn holds(&self, job: JobId) -> bool {
        self.table.phases().get(job).is_some()
    }

    /// Whether the job is about to be started, waits for its slot, or runs.
    pub(crate) fn is_open(&self, job: JobId) -> bool {
        match self.table.phases().get(job) {
            Some((Phase::Reserved | Phase::LockedAhead(_) | Phase::Running, _)) => true,
            Some((Phase::Recalled | Phase::Ended | Phase::Recorded, _)) | None => false,
        }
    }

    /// Whether the job needs its permits: until it has returned; in a line, until its end is recorded.
    pub(crate) fn needs_permit(&self, job: JobId, (_, gate): &PermitLane) -> bool {
        let is_in_line = || gate.as_deref().is_some_and(|gate| line_of_gate(gate).is_some());
        match self.table.phases().get(job) {
            Some((Phase::Reserved | Phase::LockedAhead(_) | Phase::Running, _)) => true,
            Some((Phase::Recalled | Phase::Ended, _)) => is_in_line(),
            Some((Phase::Recorded, _)) | None => false,
        }
    }

    /// The jobs with an entry in the table, without those whose end is recorded.
    pub(crate) fn jobs(&self) -> Vec<JobId> {
        self.table.jobs()
    }

    /// The number of free slots.
    pub(crate) fn count_free(&self) -> u32 {
        self.table.count_free()
    }

    /// The number of jobs that are locked ahead. They get free slots before other jobs.
    pub(crate) fn locked_ahead(&self) -> u32 {
        self.table.phases().locked_ahead()
    }

    /// Cancels a job that runs, waits for its slot, or whose start is on its way. Returns whether there is such a job.
    pub(crate) fn cancel(&self, job: JobId, why: Cancellation) -> bool {
        let cancel = match self.table.phases().get(job) {
            Some((Phase::Reserved | Phase::LockedAhead(_) | Phase::Recalled | Phase::Running, cancel)) => cancel.clone(),
            Some((Phase::Ended | Phase::Recorded, _)) | None => return false,
        };
        cancel.cancel(why);
        true
    }

    /// Calls `apply` with the cancellation of every job in the table.
    pub(crate) fn for_each_job(&self, apply: impl Fn(&Cancel)) {
        let jobs: Vec<Arc<Cancel>> = self.table.phases().iter().map(|(.., cancel)| cancel.clone()).collect();
        jobs.iter().for_each(|cancel| apply(cancel));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_slot_is_reserved_filled_and_freed() {
        let mut slots = Slots::new(3, Threads::default());
        let (first, second) = (JobId::new(), JobId::new());
        slots.reserve([first, second]);
        assert_eq!((slots.count_free(), slots.holds(first), slots.running()), (1, true, 0));
        assert!(slots.cancel(first, Cancellation::Requested), "it is about to run");
        slots.run(first, |cancel, _| async move {
            cancel.cancelled().await;
            first
        });
        slots.release([second]);
        assert_eq!((slots.count_free(), slots.jobs(), slots.running()), (2, vec![first], 1));
        assert_eq!(slots.changed().await, Ok(()));
        assert_eq!((slots.count_free(), slots.jobs(), slots.ended().await), (3, vec![], None));
    }

    #[tokio::test]
    async fn a_task_that_panics_is_an_answer() {
        let mut slots = Slots::new(1, Threads::default());
        let job = JobId::new();
        slots.run(job, |_, _| async { panic!("a panic that this test wants") });
        assert_eq!((slots.changed().await, slots.holds(job)), (Err(TaskPanicked), true));
    }

    /// Not with the next heartbeat, which may be far away.
    #[tokio::test]
    async fn slots_return_when_a_shortage_eases() {
        let mut slots = Slots::new(4, Threads::default());
        let job = JobId::new();
        slots.reserve([job]);
        slots.table().note_shortage("no memory");
        slots.release([job]);
        assert_eq!(slots.count_free(), 0);
        tokio::time::timeout(std::time::Duration::from_secs(3), slots.changed()).await.expect("it is quiet for a second").unwrap();
        assert_eq!(slots.count_free(), 1);
    }
}
