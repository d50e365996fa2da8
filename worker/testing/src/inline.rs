//! Executes a job without MongoDB.

use std::sync::Arc;

use recruiter_common::{Client, NewJob, enqueue::EnqueueError, instant::Instant};

use recruiter_worker::{
    Ran, Worker,
    solo::{NotAlone, Solo},
};

/// How a job is executed inline: [`Inline::new`] has the values of a first attempt.
#[must_use = "nothing happens until `run` is called"]
pub struct Inline<'a> {
    worker: &'a Worker,
    attempt: u32,
    now: Option<Instant>,
    client: Option<Client>,
}

/// Why a job was not executed inline.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InlineError {
    /// No database would accept the job.
    #[error(transparent)]
    Invalid(#[from] EnqueueError),
    /// This worker cannot execute the job alone.
    #[error(transparent)]
    NotAlone(#[from] NotAlone),
}

/// Executes a job as a worker would. Its parameters are encoded and decoded again. Its workable runs within the layers and the time limit of
/// the class. Its retry policy decides about a failure, and the hooks are called. Nothing is written, and no MongoDB is needed.
///
/// ```
/// use std::time::Duration;
///
/// use recruiter_testing::{Ran, run_inline};
/// use recruiter_worker::{Context, Defaults, Executable, NotDone, RetryManyTimes, Workable, Worker};
///
/// #[derive(serde::Serialize, serde::Deserialize)]
/// struct Divide {
///     by: i32,
/// }
///
/// impl Workable for Divide {
///     const CLASS: &'static str = "Divide";
///     type Output = i32;
///
///     fn defaults() -> Defaults {
///         Defaults::default().retry(RetryManyTimes::new(3, Duration::from_secs(60)))
///     }
/// }
///
/// impl Executable for Divide {
///     type State = ();
///
///     async fn execute(&self, (): &(), _: &Context) -> Result<i32, NotDone> {
///         Ok(84_i32.checked_div(self.by).ok_or("it cannot be divided")?)
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let worker = Worker::new().register::<Divide>(())?;
/// let ran = run_inline(&worker, Divide { by: 2 }.as_job()).await?;
/// assert_eq!(ran.result::<i32>(), Some(42));
/// let ran = run_inline(&worker, Divide { by: 0 }.as_job()).await?;
/// assert!(matches!(ran, Ran::Again { failure, .. } if failure.message == "it cannot be divided"));
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// When the job is invalid, or this worker cannot execute it.
pub async fn run_inline(worker: &Worker, job: NewJob) -> Result<Ran, InlineError> {
    Inline::new(worker).run(job).await
}

impl<'a> Inline<'a> {
    /// A first attempt now, without a client.
    pub fn new(worker: &'a Worker) -> Self {
        Self { worker, attempt: 1, now: None, client: None }
    }

    /// Sets the number of the attempt, from 1: the retry policy decides as after so many attempts.
    pub fn attempt(mut self, number: u32) -> Self {
        self.attempt = number.max(1);
        self
    }

    /// Sets the time of the execution.
    pub fn now(mut self, now: Instant) -> Self {
        self.now = Some(now);
        self
    }

    /// Sets the connection of the worker, for workables that enqueue jobs.
    pub fn client(mut self, client: &Client) -> Self {
        self.client = Some(client.clone());
        self
    }

    /// Executes the job, as [`run_inline`] does.
    ///
    /// # Errors
    /// When the job is invalid, or this worker cannot execute it.
    pub async fn run(self, job: NewJob) -> Result<Ran, InlineError> {
        let Self { worker, attempt, now: given, client } = self;
        let now = || given.unwrap_or_else(|| bson::DateTime::now().to_chrono());
        let mut job = job.to_job(now())?;
        job.attempts = attempt - 1;
        let solo = Solo::new(worker, client.map(|client| Arc::new(client.into())), Arc::new(job))?;
        let mut execution = solo.execute(now(), now).await;
        execution.hooks().await;
        Ok(execution.ran())
    }
}

impl std::fmt::Debug for Inline<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inline").field("attempt", &self.attempt).field("now", &self.now).finish_non_exhaustive()
    }
}
