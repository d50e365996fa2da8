//! The waits for jobs in this process, and when a poll is due. Pure.

use crate::{base::JobId, mongo::Store};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant as Monotonic},
};

use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
};

/// How long after the subscription the other processes may not know of it: the time that they cache, and some more for a slow machine.
const UNKNOWN_FOR: Duration = Duration::from_millis(1_500);
/// The first interval after a subscription. Each further one is twice as long.
const FIRST_LOOK: Duration = Duration::from_millis(10);
/// The time between polls while hints arrive.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(2);
/// The same while they do not, because the events cannot be read.
const LOOK_BLINDLY_EVERY: Duration = Duration::from_millis(500);

/// The waits for jobs in this process.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    state: Mutex<State>,
    /// Notified when a wait begins.
    pub(super) arrived: Notify,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) waiting: HashMap<JobId, watch::Sender<()>>,
    pub(super) is_listening: bool,
    /// The task of the last listener.
    pub(super) listener: Option<JoinHandle<()>>,
    /// Since when the other processes can know of a wait.
    pub(super) subscribed_at: Option<Monotonic>,
    /// Whether the ids of ended jobs are read at the moment.
    pub(super) hears: bool,
}

/// A wait for a job. Dropping it ends the wait.
pub(super) struct Place {
    waiters: Arc<Waiters>,
    job: JobId,
    ended: Option<watch::Receiver<()>>,
}

impl Place {
    /// Waits until the job should be read.
    pub(super) async fn changed(&mut self) {
        // The sender is there as long as this place is.
        if let Some(ended) = &mut self.ended
            && ended.changed().await.is_ok()
        {
            return;
        }
        std::future::pending().await
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.waiters.state();
        self.ended = None;
        if state.waiting.get(&self.job).is_some_and(|sender| sender.receiver_count() == 0) {
            state.waiting.remove(&self.job);
        }
    }
}

impl Store {
    /// The waits for jobs in this process.
    pub(crate) fn waiters(&self) -> &Arc<Waiters> {
        self.part()
    }
}

impl Waiters {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place. Returns whether the caller must start the listener.
    pub(super) fn place(self: &Arc<Self>, job: JobId) -> (Place, bool) {
        let mut state = self.state();
        let ended = state.waiting.entry(job).or_insert_with(|| watch::channel(()).0).subscribe();
        let must_start = !std::mem::replace(&mut state.is_listening, true);
        drop(state);
        self.arrived.notify_one();
        (Place { waiters: self.clone(), job, ended: Some(ended) }, must_start)
    }

    /// Ends the listener. The next wait starts another one.
    pub(super) fn end_listener(&self) -> Option<JoinHandle<()>> {
        let mut state = self.state();
        let listener = state.listener.take().inspect(JoinHandle::abort);
        (state.is_listening, state.subscribed_at, state.hears) = (false, None, false);
        listener
    }

    /// Lets the waits for this job read it.
    pub(super) fn wake(&self, job: JobId) {
        if let Some(ended) = self.state().waiting.get(&job) {
            ended.send_replace(());
        }
    }

    pub(super) fn jobs(&self) -> Vec<JobId> {
        self.state().waiting.keys().copied().collect()
    }

    /// When the next poll is due, after a poll that was this long ago.
    pub(super) fn look_after(&self, last: Duration) -> Duration {
        let state = self.state();
        match state.subscribed_at {
            Some(at) if state.hears && at.elapsed() >= UNKNOWN_FOR => LOOK_EVERY,
            None | Some(_) => (last * 2).clamp(FIRST_LOOK, LOOK_BLINDLY_EVERY),
        }
    }
}
