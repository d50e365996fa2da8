//! The tasks of a session that run its jobs.

use std::{sync::Arc, time::Instant as Monotonic};

use recruiter_common::{ids::JobId, shutdown::pause};
use tokio::{
    sync::oneshot,
    task::{JoinError, JoinSet},
};

use crate::{cancellation::Cancel, engine::held::Held, panics::failure_of, threads::Threads};

/// The tasks of a session, one for each started job.
pub(crate) struct Tasks {
    held: Arc<Held>,
    tasks: JoinSet<JobId>,
    /// The threads of the worker's blocking jobs.
    threads: Threads,
    /// Jobs that were locked ahead and are released, since they were last taken.
    unlocked: Vec<JobId>,
}

/// A task of the session has panicked. Panics in code of users are caught, so this is an error of this crate or of a policy's destructor.
/// The session still holds the job.
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

impl Tasks {
    pub(crate) fn new(held: Arc<Held>, threads: Threads) -> Self {
        Self { held, tasks: JoinSet::new(), threads, unlocked: Vec::new() }
    }

    /// Runs a started job in a task of its own: in the slot that is reserved for it, or as soon as the job gets a slot if it is locked
    /// ahead.
    pub(crate) fn run<A: Future<Output = JobId> + Send + 'static>(
        &mut self,
        job: JobId,
        attempt: impl FnOnce((Arc<Cancel>, Option<oneshot::Receiver<()>>)) -> A,
    ) {
        let filled = self.held.fill(job);
        self.tasks.spawn(attempt(filled));
    }

    /// Waits until the number of free slots may have changed: jobs have ended, a shortage eases, or a thread of an earlier session has
    /// ended.
    pub(crate) async fn changed(&mut self) -> Result<(), TaskPanicked> {
        let now = Monotonic::now();
        let eases_at = self.held.eases_at(now);
        let (threads, held) = (self.threads.clone(), self.held.clone());
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
            () = held.has_ended.notified() => Ok(()),
        }
    }

    /// Waits for the end of a job's task. The session holds the jobs of all tasks that have ended by then no longer. `None` if no task runs.
    pub(crate) async fn ended(&mut self) -> Option<Result<(), TaskPanicked>> {
        let mut ended = Some(self.tasks.join_next().await?);
        while let Some(task) = ended {
            match task {
                Ok(job) => self.unlocked.extend(self.held.remove_ended(job).then_some(job)),
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

    /// Returns the jobs that were locked ahead and have been released since the last call.
    pub(crate) fn take_unlocked(&mut self) -> Vec<JobId> {
        std::mem::take(&mut self.unlocked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cancellation::Cancellation;

    fn tasks(slots: u32) -> (Tasks, Arc<Held>) {
        let held = Arc::new(Held::new(slots, Threads::default(), Vec::new()));
        (Tasks::new(held.clone(), Threads::default()), held)
    }

    #[tokio::test]
    async fn a_slot_is_reserved_filled_and_freed() {
        let (mut tasks, held) = tasks(3);
        let [first, second] = held.start_for_tests();
        let free = || held.offer(true).slots;
        assert_eq!((free(), held.holds(first), tasks.running()), (1, true, 0));
        assert!(held.cancel(first, Cancellation::Requested), "it is about to run");
        tasks.run(first, |(cancel, _)| async move {
            cancel.cancelled().await;
            first
        });
        held.remove(&[second]);
        assert_eq!((free(), held.started(), tasks.running()), (2, vec![first], 1));
        assert_eq!(tasks.changed().await, Ok(()));
        assert_eq!((free(), held.started(), tasks.ended().await), (3, vec![], None));
    }

    #[tokio::test]
    async fn a_task_that_panics_is_an_answer() {
        let (mut tasks, held) = tasks(1);
        let [job] = held.start_for_tests();
        tasks.run(job, |_| async { panic!("a panic that this test wants") });
        assert_eq!((tasks.changed().await, held.holds(job)), (Err(TaskPanicked), true));
    }

    /// Not with the next heartbeat, which may be far away.
    #[tokio::test]
    async fn slots_return_when_a_shortage_eases() {
        let (mut tasks, held) = tasks(4);
        let [job] = held.start_for_tests();
        held.note_shortage("no memory");
        held.remove(&[job]);
        assert_eq!(held.offer(true).slots, 0);
        tokio::time::timeout(std::time::Duration::from_secs(300), tasks.changed()).await.expect("it is quiet for a second").unwrap();
        assert_eq!(held.offer(true).slots, 1);
    }
}
