//! Own jobs: jobs that this process has enqueued and executes itself.
//!
//! A session with own jobs gets no assignments from the recruiter. It reads, starts, runs and records its jobs as every session does: the
//! roster names them, a heartbeat proves that they are running, and a cleaner rescues them if the process dies.
//!
//! The job is enqueued with a date ten seconds ahead, so that no recruiter assigns it meanwhile. The start repeats that date instead of a
//! comparison with the server's clock, so it loses if an operator changes the date. A job that is not started here is made due by a write that
//! names the date and `attempts: 0`. If that write is lost, or the process dies before it, the job is due at its date.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use parking_lot::Mutex;
use recruiter_common::{
    ids::JobId,
    instant::Instant,
    job::Job,
    limits::{Limit, Settings},
};
use tokio::sync::{Notify, mpsc, oneshot};

use crate::engine::record::ran::Ran;

/// Maximum number of own jobs that one start locks.
const AT_ONCE: usize = 100;

/// The end of an own job: `None` if this process has executed it and does not know its recorded end.
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
    waiting: HashMap<JobId, Caller>,
}

/// A caller that waits for the end of its job.
struct Caller {
    answer: oneshot::Sender<OwnEnd>,
    /// The date under which the job was enqueued.
    due: Instant,
    /// Whether the job is executed here. Then it is not for the workers, also after the end of the session.
    is_entered: bool,
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
        let state = self.state.lock();
        let Some(settings) = state.settings.as_ref().filter(|_| is_plain && self.classes.contains(&job.class)) else { return false };
        let is_free =
            settings.groups.get(job.settings.group()).is_none_or(|group| group.limit == Limit::default() && group.maintenance.is_empty());
        is_free && settings.invalid.is_empty() && settings.pause_of(job.settings.group(), &job.class).is_none()
    }

    /// Gives an enqueued job to the session. The answer is dropped if the session does not execute it. `None` if no session takes jobs.
    pub(crate) fn submit(&self, job: JobId, due: Instant) -> Option<oneshot::Receiver<OwnEnd>> {
        let mut state = self.state.lock();
        state.settings.as_ref()?;
        let (sender, answer) = oneshot::channel();
        state.waiting.insert(job, Caller { answer: sender, due, is_entered: false });
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
            let state = self.state.lock();
            jobs.retain(|job| state.waiting.contains_key(job));
        }
        jobs
    }

    /// Whether the job is as its caller has enqueued it: neither started nor given another date since.
    pub(crate) fn is_unchanged(&self, job: &Job) -> bool {
        job.attempts == 0 && self.state.lock().waiting.get(&job.id).is_some_and(|caller| job.due() == Some(caller.due))
    }

    /// Notes that the job is executed now.
    pub(crate) fn note_entered(&self, job: JobId) {
        if let Some(caller) = self.state.lock().waiting.get_mut(&job) {
            caller.is_entered = true;
        }
    }

    /// Answers the caller: its job was executed.
    pub(crate) fn note_ended(&self, job: JobId, end: OwnEnd) {
        if let Some(caller) = self.state.lock().waiting.remove(&job) {
            // The caller may have gone.
            let _ = caller.answer.send(end);
        }
    }

    /// Answers the callers: these jobs are not executed here.
    pub(crate) fn give_up<'a>(&self, jobs: impl IntoIterator<Item = &'a JobId>) {
        let mut state = self.state.lock();
        jobs.into_iter().for_each(|job| drop(state.waiting.remove(job)));
    }

    /// A session takes jobs from now on, under these settings.
    pub(crate) fn open(&self, settings: Settings) {
        self.state.lock().settings = Some(settings);
        self.has_opened.notify_one();
    }

    /// Waits until a session takes jobs for the first time.
    pub(crate) async fn opened(&self) {
        self.has_opened.notified().await;
    }

    /// No further job is taken. Answers the callers whose jobs the session has not got yet.
    pub(crate) fn close(&self) {
        self.state.lock().settings = None;
        // The session that calls this does not wait for jobs meanwhile.
        let Ok(mut queue) = self.queue.try_lock() else { return };
        while let Ok(job) = queue.try_recv() {
            self.give_up(&[job]);
        }
    }

    /// The session has ended. The ends of jobs that were executed are not known here, and the others are for the workers.
    pub(crate) fn clear(&self) {
        let mut state = self.state.lock();
        state.settings = None;
        for (_, caller) in state.waiting.drain().filter(|(_, caller)| caller.is_entered) {
            let _ = caller.answer.send(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use bson::{Document, doc};

    use super::*;

    #[tokio::test]
    async fn every_caller_is_answered_whatever_becomes_of_the_session() {
        let own = OwnJobs::new(["x"].into_iter());
        let [first, second, third] = [JobId::new(), JobId::new(), JobId::new()];
        assert!(own.submit(first, Instant::default()).is_none(), "no session takes jobs");
        own.open(Settings::default());
        own.opened().await;
        let [mut executed, skipped] = [first, second].map(|job| own.submit(job, Instant::default()).expect("it is open"));
        assert_eq!(own.next().await, [first, second]);
        own.give_up(&[second]);
        assert!(skipped.await.is_err());
        // A job that the session has not got is not executed, one that it has got may still end.
        let left = own.submit(third, Instant::default()).expect("it is open");
        own.close();
        assert!(left.await.is_err() && own.submit(third, Instant::default()).is_none());
        assert!(executed.try_recv().is_err());
        own.note_ended(first, Some(Ran::Done { result: None }));
        assert_eq!(executed.await, Ok(Some(Ran::Done { result: None })));
        // A later session does not execute a job of a caller that was answered.
        own.open(Settings::default());
        let running = JobId::new();
        let entered = own.submit(running, Instant::default()).expect("it is open");
        assert_eq!(own.next().await, [running]);
        own.note_entered(running);
        let lost = own.submit(second, Instant::default()).expect("it is open");
        own.clear();
        assert!(lost.await.is_err(), "it is for the workers");
        assert_eq!(entered.await, Ok(None), "it is not");
        own.open(Settings::default());
        let next = own.submit(third, Instant::default()).expect("it is open");
        assert_eq!(own.next().await, [third]);
        drop(own);
        assert!(next.await.is_err());
    }

    /// A process takes only what no recruiter must admit, under its own classes, and as it was enqueued.
    #[test]
    fn a_job_that_only_a_recruiter_can_admit_is_not_taken() {
        let own = OwnJobs::new(["x"].into_iter());
        let job = |more: Document| {
            let mut document = doc! { "_id": JobId::new(), "locked": false, "group": "g", "workable": { "class": "x" },
            "scheduled_at": bson::DateTime::from_millis(5_000) };
            document.extend(more);
            Job::try_from(document).expect("a job")
        };
        assert!(!own.may_take(&job(doc! {})), "no session takes jobs");
        own.open(Settings::default());
        assert!(own.may_take(&job(doc! {})));
        let date = bson::DateTime::from_millis(9_000);
        for more in [
            doc! { "workable": { "class": "y" } },
            doc! { "gate": "printer" },
            doc! { "gate": ">line" },
            doc! { "expires_at": date },
            doc! { "graph": bson::oid::ObjectId::new() },
            doc! { "waiting": true, "waits_for": [bson::oid::ObjectId::new()] },
        ] {
            assert!(!own.may_take(&job(more.clone())), "{more}");
        }
        let (enqueued, due) = (job(doc! {}), Instant::from_timestamp_millis(5_000).expect("a date"));
        let _answer = own.submit(enqueued.id, due).expect("it is open");
        assert!(own.is_unchanged(&enqueued));
        for more in [doc! { "scheduled_at": date }, doc! { "attempts": 1 }] {
            let mut changed = job(more.clone());
            changed.id = enqueued.id;
            assert!(!own.is_unchanged(&changed), "{more}");
        }
        assert!(!own.is_unchanged(&job(doc! {})), "no caller waits for it");
    }
}
