//! Own jobs: jobs that this process has enqueued and executes itself.
//!
//! A session with own jobs gets no assignments from the recruiter. It reads, starts, runs and records its jobs as every session does: the
//! roster names them, a heartbeat proves that they are running, and a cleaner rescues them if the process dies.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use recruiter_common::{
    ids::JobId,
    job::Job,
    limits::{Limit, Settings},
};
use tokio::sync::{Notify, mpsc, oneshot};

use super::ran::Ran;

/// Maximum number of own jobs that one start locks.
const AT_ONCE: usize = 100;

/// The end of an own job: `None` if this process has executed it and could not record its end.
pub(crate) type OwnEnd = Option<Ran>;

/// The own jobs of a process: a queue from its callers to the present session, and the callers that wait.
pub(crate) struct OwnJobs {
    classes: HashSet<String>,
    sender: mpsc::UnboundedSender<JobId>,
    queue: tokio::sync::Mutex<mpsc::UnboundedReceiver<JobId>>,
    state: Mutex<State>,
    has_opened: Notify,
}

#[derive(Default)]
struct State {
    /// The settings of groups and the pauses at the last heartbeat. `None` while no session takes own jobs.
    settings: Option<Settings>,
    waiting: HashMap<JobId, oneshot::Sender<OwnEnd>>,
}

impl OwnJobs {
    pub(crate) fn new<'a>(classes: impl Iterator<Item = &'a str>) -> Arc<Self> {
        let (sender, queue) = mpsc::unbounded_channel();
        let (classes, queue) = (classes.map(str::to_owned).collect(), tokio::sync::Mutex::new(queue));
        Arc::new(Self { classes, sender, queue, state: Mutex::default(), has_opened: Notify::new() })
    }

    /// Whether this process may execute the job. The others are for the workers: a recruiter observes their limits, pauses and dates.
    pub(crate) fn may_take(&self, job: &Job) -> bool {
        let is_plain = job.gate.is_none() && job.replaced.is_none() && !job.is_waiting && job.graph.is_none() && job.expires_at.is_none();
        let state = self.state();
        let Some(settings) = state.settings.as_ref().filter(|_| is_plain && self.classes.contains(&job.class)) else { return false };
        let is_free = settings.groups.get(&job.group).is_none_or(|group| group.limit == Limit::default() && group.maintenance.is_empty());
        is_free && settings.invalid.is_empty() && settings.pause_of(&job.group, &job.class).is_none()
    }

    /// Gives an enqueued job to the session. The answer is dropped if the session does not execute it. `None` if no session takes jobs.
    pub(crate) fn submit(&self, job: JobId) -> Option<oneshot::Receiver<OwnEnd>> {
        let mut state = self.state();
        state.settings.as_ref()?;
        let (sender, answer) = oneshot::channel();
        state.waiting.insert(job, sender);
        self.sender.send(job).ok()?;
        Some(answer)
    }

    /// Waits for jobs of callers that still expect an answer from this session.
    pub(crate) async fn next(&self) -> Vec<JobId> {
        let mut queue = self.queue.lock().await;
        let mut jobs = Vec::new();
        while jobs.is_empty() {
            // This value has a sender itself, so the queue stays open.
            queue.recv_many(&mut jobs, AT_ONCE).await;
            let state = self.state();
            jobs.retain(|job| state.waiting.contains_key(job));
        }
        jobs
    }

    /// Answers the caller: its job was executed.
    pub(crate) fn note_ended(&self, job: JobId, end: OwnEnd) {
        if let Some(answer) = self.state().waiting.remove(&job) {
            // The caller may have gone.
            let _ = answer.send(end);
        }
    }

    /// Answers the callers: these jobs are not executed here.
    pub(crate) fn give_up<'a>(&self, jobs: impl IntoIterator<Item = &'a JobId>) {
        let mut state = self.state();
        jobs.into_iter().for_each(|job| drop(state.waiting.remove(job)));
    }

    /// A session takes jobs from now on, under these settings.
    pub(crate) fn open(&self, settings: Settings) {
        self.state().settings = Some(settings);
        self.has_opened.notify_one();
    }

    /// Waits until a session takes jobs for the first time.
    pub(crate) async fn opened(&self) {
        self.has_opened.notified().await;
    }

    /// No further job is taken. Answers the callers whose jobs the session has not got yet.
    pub(crate) fn close(&self) {
        self.state().settings = None;
        // The session that calls this does not wait for jobs meanwhile.
        let Ok(mut queue) = self.queue.try_lock() else { return };
        while let Ok(job) = queue.try_recv() {
            self.give_up(&[job]);
        }
    }

    /// The session has ended: no job that has no end yet is executed here.
    pub(crate) fn clear(&self) {
        let mut state = self.state();
        state.settings = None;
        state.waiting.clear();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_caller_is_answered_whatever_becomes_of_the_session() {
        let own = OwnJobs::new(["x"].into_iter());
        let [first, second, third] = [JobId::new(), JobId::new(), JobId::new()];
        assert!(own.submit(first).is_none(), "no session takes jobs");
        own.open(Settings::default());
        own.opened().await;
        let [mut executed, skipped] = [first, second].map(|job| own.submit(job).expect("it is open"));
        assert_eq!(own.next().await, [first, second]);
        own.give_up(&[second]);
        assert!(skipped.await.is_err());
        // A job that the session has not got is not executed, one that it has got may still end.
        let left = own.submit(third).expect("it is open");
        own.close();
        assert!(left.await.is_err() && own.submit(third).is_none());
        assert!(executed.try_recv().is_err());
        own.note_ended(first, Some(Ran::Done { result: None }));
        assert_eq!(executed.await, Ok(Some(Ran::Done { result: None })));
        // A later session does not execute a job of a caller that was answered.
        own.open(Settings::default());
        let lost = own.submit(second).expect("it is open");
        own.clear();
        assert!(lost.await.is_err());
        own.open(Settings::default());
        let next = own.submit(third).expect("it is open");
        assert_eq!(own.next().await, [third]);
        drop(own);
        assert!(next.await.is_err());
    }
}
