//! Waits for the result of a job.
//!
//! All waits of a process share one listener. It asks the other processes to publish the ids of the jobs that end
//! ([`events`](crate::events)), and reads them. Each process publishes one small document for a batch of jobs that it has archived, and only
//! while a process waits. A job needs no mark for this, so any job can be waited for, also one that runs already.
//!
//! A change stream over `archived` would need no other process. But for each stream MongoDB unwinds every transaction of up to 1,000 jobs:
//! one stream cost it a fifth more processor time, the ring a twentieth at most (docs/performance.md). The ring is written once for all
//! processes that wait.
//!
//! An id that is published is a hint. After it, and at the beginning, the job itself is read. If a hint is lost, a poll finds the job: one
//! query for all jobs that this process waits for, every 2 s. In the first second after the first wait, when other processes may not know of
//! it yet, the polls begin with 10 ms, and each interval is twice the one before. The listener ends a minute after the last wait, so an application
//! that waits again and again does not begin anew.
//!
//! | file | content |
//! |---|---|
//! | `waiters` | the waits of this process |
//! | `finished` | the outcome of a job, with its result |
//! | `listener` | reads the ids of ended jobs, and polls jobs |
//! | `error` | why a wait has no result |

mod error;
pub(crate) mod finished;
mod listener;
mod waiters;

use std::time::Duration;

use backon::{ConstantBuilder, Retryable as _};
use futures_util::{FutureExt as _, future::BoxFuture};
use tokio::task::JoinHandle;

pub use self::{
    error::WaitError,
    finished::{JobResult, ResultError},
};
use self::{
    finished::result_in,
    listener::{AGAIN_AFTER, listen},
};
use crate::{
    base::{JobId, chain, pause},
    enqueue::{Enqueued, Workable},
    job::{Keep, StoredJob},
    mongo::{Client, Store},
};

impl Enqueued {
    /// Waits for the result of the job.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use recruiter_common::{Client, WaitError, Workable};
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct Sum { numbers: Vec<i64> }
    /// impl Workable for Sum {
    ///     const CLASS: &'static str = "Sum";
    ///     type Output = i64;
    /// }
    ///
    /// # async fn example(client: Client) -> Result<(), Box<dyn std::error::Error>> {
    /// let enqueued = Sum { numbers: vec![1, 2, 3] }.as_job().enqueue(&client).await?;
    /// match enqueued.wait::<Sum>(&client, Duration::from_secs(30)).await {
    ///     Ok(sum) => println!("it is {sum}"),
    ///     Err(WaitError::TimedOut { job, .. }) => println!("{job} still runs"),
    ///     Err(other) => return Err(other.into()),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`WaitError`].
    pub async fn wait<W: Workable>(&self, client: &Client, timeout: Duration) -> Result<W::Output, WaitError> {
        client.wait_for::<W>(self.id, timeout).await
    }
}

impl Client {
    /// Waits for the result of a job of this class, by its id. Through retries, failovers and restarts of all processes: only the timeout
    /// and the end of the job end the wait. Dropping the future ends it as well.
    ///
    /// # Errors
    /// [`WaitError`]. An unknown id is an error, so a job of a transaction can be waited for after the commit.
    pub async fn wait_for<W: Workable>(&self, job: JobId, timeout: Duration) -> Result<W::Output, WaitError> {
        let read = async move || {
            let Some(stored) = self.job(job).await.map_err(ResultError::from)? else { return Ok(Seen::Nowhere) };
            match result_in::<W>(&stored)? {
                JobResult::Unknown => Ok(Seen::Nowhere),
                JobResult::Unfinished => Ok(Seen::unfinished(&stored)),
                JobResult::Done(result) => Ok(Seen::Ended(result)),
                JobResult::ContinuedAs(jobs) => Err(WaitError::ContinuedAs { job, jobs }),
                JobResult::Failed { why, failure } => Err(WaitError::Failed { job, why, failure }),
            }
        };
        self.store().wait_until(job, timeout, || read().boxed()).await
    }

    /// Waits until a job of any class is archived, and returns its document. For programs that know no Rust type of its class.
    ///
    /// # Errors
    /// [`WaitError`], but not [`WaitError::Failed`]: the document says how the job has ended.
    pub async fn wait_for_end(&self, job: JobId, timeout: Duration) -> Result<StoredJob, WaitError> {
        let read = async move || match self.job(job).await.map_err(ResultError::from)? {
            None => Ok(Seen::Nowhere),
            Some(stored) if stored.is_archived => Ok(Seen::Ended(stored)),
            Some(stored) => Ok(Seen::unfinished(&stored)),
        };
        self.store().wait_until(job, timeout, || read().boxed()).await
    }
}

impl Store {
    /// Ends the task that listens for the ends of jobs, and returns it. It would go on for a minute after the last wait, and restore what it
    /// needs in a database that is removed. For tests.
    #[doc(hidden)]
    pub fn end_listener(&self) -> Option<JoinHandle<()>> {
        self.waiters().end_listener()
    }

    async fn wait_until<'a, T>(
        &'a self,
        job: JobId,
        timeout: Duration,
        read: impl Fn() -> BoxFuture<'a, Result<Seen<T>, WaitError>>,
    ) -> Result<T, WaitError> {
        let may_pass = |error: &WaitError| matches!(error, WaitError::Result(ResultError::Store(error)) if error.may_pass());
        let waited = async {
            // Before the first read, so that no end is missed.
            let (mut place, must_start) = self.waiters().place(job);
            if must_start {
                let listener = tokio::spawn(listen(self.clone()));
                self.waiters().state().listener = Some(listener);
            }
            let mut last_seen = None;
            loop {
                let read = (&read).retry(ConstantBuilder::new().with_delay(AGAIN_AFTER).without_max_times()).sleep(pause).when(may_pass);
                let read = read.notify(|error, _| {
                    tracing::debug!(job.id = %job, error = chain(error), "cannot read the job that is waited for; trying again");
                });
                match read.await? {
                    Seen::Ended(result) => return Ok(result),
                    Seen::Unfinished { is_deleted_after_success } => last_seen = Some(is_deleted_after_success),
                    Seen::Nowhere => {
                        return Err(match last_seen {
                            Some(true) => WaitError::NotKept { job },
                            Some(false) => WaitError::Gone { job },
                            None => WaitError::Unknown { job },
                        });
                    }
                }
                place.changed().await;
            }
        };
        tokio::time::timeout(timeout, waited).await.unwrap_or(Err(WaitError::TimedOut { job, waited: timeout }))
    }
}

/// Where a job was seen.
enum Seen<T> {
    Nowhere,
    Unfinished { is_deleted_after_success: bool },
    Ended(T),
}

impl<T> Seen<T> {
    /// With `keep: failures` a job that succeeds is deleted, unless another job waits for it.
    fn unfinished(stored: &StoredJob) -> Self {
        let keep = Keep::of_stored(stored.document.get_str("keep").ok());
        let is_followed = stored.document.get_bool("followed").unwrap_or(false);
        Self::Unfinished { is_deleted_after_success: keep == Keep::Failures && !is_followed }
    }
}
