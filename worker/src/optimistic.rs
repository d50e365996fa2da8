//! Optimistic execution: the process that enqueues a job executes it at once, and workers run it only if that fails.

use std::{sync::Arc, time::Duration};

use recruiter_common::{
    Client, Enqueued, NewJob,
    enqueue::EnqueueError,
    ids::JobId,
    instant::Instant,
    job::Job,
    service::Notifier,
    shutdown::{Shutdown, Trigger, pause},
    store::{Hint, Store},
    telemetry::chain,
};
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    task::JoinHandle,
};

use crate::{
    Ended, Ran, Worker, WorkerConfig, WorkerError,
    engine::source::{Source, own::OwnJobs},
};

/// How long an enqueued job is kept from the workers until this process starts it. A start takes a few milliseconds.
const KEPT_FOR: chrono::TimeDelta = chrono::TimeDelta::seconds(10);
/// How long [`Worker::optimistic`] waits for the first heartbeat. Later, until then, jobs are enqueued for the workers.
const OPENS_WITHIN: Duration = Duration::from_secs(5);

/// Executes jobs in this process as soon as they are enqueued ([`Worker::optimistic`]).
///
/// A job is enqueued, started, executed and recorded as by every worker, but without a recruiter. So it has the guarantees of every job.
/// This process is in the roster and sends heartbeats. If it dies during an execution, a cleaner ends the attempt, and the retry policy
/// decides whether workers run the job again. A failure is recorded, and workers run the next attempts. Nothing else starts the job while
/// this process lives, however long the execution takes. If it dies before the start, workers get the job ten seconds after the insert.
///
/// A recruiter never assigns jobs to this process. Jobs that only a recruiter can admit are enqueued for the workers: jobs with limits or in
/// a line, in a group with a limit or maintenance windows, or in a paused group or class; with a later date, an expiry, a unique key or a
/// graph. So are jobs of other classes and groups than those of the worker, and jobs above its
/// [`concurrency`](WorkerConfig::concurrency). While an operator wants this process to be quiet, all jobs are. A new pause counts from the
/// next heartbeat on.
///
/// ```no_run
/// # use recruiter_worker::{Attempted, Client, Context, Executable, NotDone, Ran, Workable, Worker, WorkerConfig};
/// # #[derive(serde::Serialize, serde::Deserialize)]
/// # struct Greet { name: String }
/// # impl Workable for Greet { const CLASS: &'static str = "Greet"; type Output = (); }
/// # impl Executable for Greet {
/// #     type State = ();
/// #     async fn execute(&self, (): &(), _: &Context) -> Result<(), NotDone> { Ok(()) }
/// # }
/// # async fn example(client: &Client) -> Result<(), Box<dyn std::error::Error>> {
/// let here = Worker::new().register::<Greet>(())?.optimistic(client, WorkerConfig::default()).await?;
/// match here.execute(Greet { name: "Ada".into() }.as_job()).await? {
///     Attempted::Here { ran: Ran::Done { .. }, .. } => println!("done"),
///     Attempted::Here { ran, .. } => println!("not done: {ran:?}"),
///     Attempted::Queued(queued) => println!("{} is for the workers", queued.id),
///     Attempted::NotRecorded { id } => println!("it ran, and its end is not known here: look up {id}"),
///     other => println!("{other:?}"),
/// }
/// here.stop().await?;
/// # Ok(())
/// # }
/// ```
pub struct Optimistic {
    store: Store,
    own: Arc<OwnJobs>,
    /// As many as jobs may run at a time.
    slots: Semaphore,
    trigger: Trigger,
    task: Option<JoinHandle<Result<Ended, WorkerError>>>,
}

/// What has become of a job that was to be executed optimistically.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Attempted {
    /// It was executed in this process, and its end is recorded.
    Here {
        /// The id of the job.
        id: JobId,
        /// Its end.
        ran: Ran,
    },
    /// It was not executed in this process: it is for the workers, or a job with its id exists.
    Queued(Enqueued),
    /// It was executed in this process, which does not know its recorded end: the process was declared dead or has stopped meanwhile, or the
    /// reply to the record was lost. The job shows its end ([`Client::job`]). The retry policy decides whether workers run it again.
    NotRecorded {
        /// The id of the job.
        id: JobId,
    },
}

impl Worker {
    /// Executes jobs in this process as soon as [`Optimistic::execute`] enqueues them, with the classes, policies and layers of this
    /// worker. The recruiter assigns none to it.
    ///
    /// If MongoDB does not answer within a few seconds, this returns all the same, and jobs are enqueued for the workers until it does.
    ///
    /// # Errors
    /// When the settings contradict each other, no class is registered, or the client was made from the driver of the application
    /// ([`Client::from_database`]): heartbeats need connections of their own.
    pub async fn optimistic(self, client: &Client, config: impl Into<WorkerConfig>) -> Result<Optimistic, WorkerError> {
        let store = Store::from(client.clone());
        let config = config.into();
        let own = OwnJobs::new(self.registry.classes());
        let slots = Semaphore::new(config.concurrency as usize);
        let (trigger, shutdown) = Shutdown::manual();
        let (running, ending) =
            (self.run_over(Arc::new(store.clone()), config, shutdown, Notifier::Silent, Source::Own(own.clone())), Ending(own.clone()));
        let task = tokio::spawn(async move {
            let _ending = ending;
            running.await
        });
        // From here on, a caller that drops this future stops the task.
        let mut here = Optimistic { store: store.clone(), own: own.clone(), slots, trigger, task: Some(task) };
        tokio::select! {
            ended = here.ended() => ended?,
            () = own.opened() => {}
            () = pause(OPENS_WITHIN) => tracing::warn!("MongoDB does not answer: jobs are enqueued for the workers until it does"),
        }
        Ok(here)
    }
}

impl Optimistic {
    /// Enqueues the job, executes it in this process, and returns once its end is recorded; or enqueues it for the workers.
    ///
    /// While MongoDB is away, this waits. A caller that drops this future does not end the execution. [`Self::stop`] does.
    ///
    /// # Errors
    /// When the job cannot be enqueued. It is not executed here then.
    pub async fn execute(&self, job: NewJob) -> Result<Attempted, EnqueueError> {
        let now = self.store.now();
        let given = job.to_job(now)?;
        let Some(_slot) = self.reserve_slot(&given, now) else { return Ok(Attempted::Queued(job.enqueue(&self.store).await?)) };
        let due = now + KEPT_FOR;
        let enqueued = job.at(due).enqueue(&self.store).await?;
        if !enqueued.is_new {
            return Ok(Attempted::Queued(enqueued));
        }
        let ended = match self.own.submit(enqueued.id, due) {
            Some(answer) => answer.await.ok(),
            None => None,
        };
        Ok(match ended {
            Some(Some(ran)) => Attempted::Here { id: enqueued.id, ran },
            Some(None) => Attempted::NotRecorded { id: enqueued.id },
            None => {
                self.hand_over(enqueued.id, due, given.settings.group().to_owned()).await;
                Attempted::Queued(enqueued)
            }
        })
    }

    /// Takes no more jobs, and waits for those that run, as a worker that is stopped. Jobs are enqueued for the workers from now on.
    ///
    /// # Errors
    /// When a task of the worker has panicked. Its jobs are rescued as after the death of a process.
    pub async fn stop(mut self) -> Result<(), WorkerError> {
        self.trigger.drain();
        self.ended().await
    }

    /// Waits until the task of the worker has ended.
    async fn ended(&mut self) -> Result<(), WorkerError> {
        let Some(task) = &mut self.task else { return Ok(()) };
        let ended = task.await;
        self.task = None;
        ended.unwrap_or(Err(WorkerError::Panicked("the worker"))).map(drop)
    }

    /// A slot for this job; `None` if it is for the workers.
    fn reserve_slot(&self, job: &Job, now: Instant) -> Option<SemaphorePermit<'_>> {
        let is_due = job.due().is_some_and(|due| due <= now);
        self.slots.try_acquire().ok().filter(|_| is_due && self.own.may_take(job))
    }

    /// Makes a job due that this process does not execute. If that fails, it is due a few seconds later.
    async fn hand_over(&self, job: JobId, due: Instant, group: String) {
        let now = self.store.now();
        match self.store.hasten_if_never_started(job, due, now).await {
            Ok(false) => {}
            Ok(true) => self.store.announce_hint(Hint::Jobs { groups: vec![group], at: Some(now), jobs: Vec::new() }).await,
            Err(error) => tracing::debug!(job.id = %job, error = chain(&error), "a job for the workers is due in a few seconds"),
        }
    }
}

impl Drop for Optimistic {
    fn drop(&mut self) {
        self.trigger.drain();
    }
}

impl std::fmt::Debug for Optimistic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Optimistic").field("free", &self.slots.available_permits()).finish_non_exhaustive()
    }
}

/// Answers the callers that wait when the task of the worker ends, however it ends.
struct Ending(Arc<OwnJobs>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.clear();
    }
}
