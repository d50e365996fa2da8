//! A workable's own transaction: its writes, the jobs that it enqueues, and the end of its job are committed as one.
//!
//! If a process dies at any point, either all of it is there or nothing. A worker that was declared dead cannot commit, because its job
//! is not locked by its start any more. So the effects of a job inside the database happen exactly once for each job that is done.
//!
//! The end and the commit run in a task of their own. So a time limit or a cancellation that aborts the execution does not abort them. The
//! attempt waits for them before it decides how the job has ended.
//!
//! The notes of the job are held back until the outcome is known, because the transaction would conflict with each write of them.
//!
//! The delete of the started job is the last write of the transaction, so MongoDB keeps the job locked for the time of the commit only. The
//! sessions are written into the roster before they are used: a cleaner ends them together with the other sessions of a dead worker.

mod abort;
mod session;

use std::{
    sync::Arc,
    time::{Duration, Instant as Monotonic},
};

use backon::{BackoffBuilder as _, ExponentialBuilder, RetryableWithContext as _};
use bson::Bson;
use recruiter_common::{
    failure::{self, Failure},
    job::{Claim, FinishReason},
    mongodb::{ClientSession, error::Error as MongoError},
    shutdown::pause,
    store::{Archival, Ending, Recorded, Store, StoreError, is_commit_unknown},
    telemetry::chain,
};
use serde::Serialize;

pub use self::{abort::Abort, session::TransactionSession};
use crate::{
    cancellation::Cancellation,
    context::Context,
    notes,
    outcome::{Done, NotDone},
};

/// The pauses before the repetitions of a transaction, or of its commit.
const PAUSES: ExponentialBuilder = ExponentialBuilder::new()
    .with_min_delay(Duration::from_millis(5))
    .with_max_delay(Duration::from_millis(250))
    .with_jitter()
    .without_max_times();
/// A transaction is not repeated after this time, like the driver's own: MongoDB ends each attempt after a minute.
const REPEATED_FOR: Duration = Duration::from_secs(120);
/// The error class of a transaction that cannot be used here.
const TRANSACTION: &str = "transaction";

impl Context {
    /// Runs a transaction that also ends the job. These are committed as one, or not at all: the writes of `body` in its session, the jobs that
    /// it enqueues there, and the end of the job as done, with the result of `body`. So the effects happen exactly once, also if the worker is
    /// killed at any point, or resumes after it was declared dead.
    ///
    /// The collections must be on the client of the worker's store: `job.client().database().client()`. `body` runs again after a write conflict or a
    /// failover, so it should have no effects outside of the session. Its future owns the session (`async move`), must not keep it, and must not
    /// end the transaction. Progress, checkpoints and log lines of `body` are written after it; it cannot
    /// [wait](Context::save_checkpoint) for them. Return the value of this call from `execute`: after the commit the job has ended, and nothing that follows
    /// changes its end. [`Client::announce_jobs`](recruiter_common::Client::announce_jobs) after this call notifies the recruiter of the jobs that `body` has enqueued.
    ///
    /// ```no_run
    /// # use recruiter_worker::{bson::doc, Context, Executable, NotDone, Workable};
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct Transfer { from: String, to: String, cents: i64 }
    /// # impl Workable for Transfer { const CLASS: &'static str = "Transfer"; type Output = (); }
    /// impl Executable for Transfer {
    ///     type State = ();
    ///
    ///     async fn execute(&self, (): &(), job: &Context) -> Result<(), NotDone> {
    ///         let accounts = &job.client().database().client().database("bank").collection::<recruiter_worker::bson::Document>("accounts");
    ///         job.transaction(|mut session| async move {
    ///             for (account, cents) in [(&self.from, -self.cents), (&self.to, self.cents)] {
    ///                 let change = doc! { "$inc": { "cents": cents } };
    ///                 accounts.update_one(doc! { "_id": account }, change).session(&mut *session).await?;
    ///             }
    ///             Ok(())
    ///         })
    ///         .await
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// The error of `body`; nothing is written then, and the retry policy decides as usual. [`NotDone::Stopped`] if the execution was cancelled
    /// or its worker has lost the job. For an item of a bundle, and after a commit, [`NotDone::GiveUp`].
    ///
    /// # Panics
    /// In a unit test without [`ForTests::client`](crate::context::ForTests::client). With it, the writes of `body` are committed, and there is no job
    /// to end.
    pub async fn transaction<T, F>(&self, mut body: impl FnMut(TransactionSession) -> F) -> Result<T, NotDone>
    where
        T: Serialize,
        F: Future<Output = Result<T, Abort>>,
    {
        if self.item.is_some() || self.own_end.done.get().is_some() {
            return Err(NotDone::give_up(TRANSACTION, "a job can end in one transaction only, and an item of a bundle in none"));
        }
        let (mut pauses, begun) = (PAUSES.build(), Monotonic::now());
        loop {
            if let Some(why) = self.cancellation() {
                return Err(NotDone::stopped(format!("the transaction was not begun: {why:?}")));
            }
            let held = tokio::select! {
                held = self.notes().hold() => Arc::new(held),
                () = self.cancelled() => continue,
            };
            let mut session = self.take_session().await?;
            session.start_transaction().await?;
            let (lent, owner) = TransactionSession::new(session);
            let ended = body(lent).await;
            let back = owner.lock().take();
            let Some(mut session) = back else {
                return Err(NotDone::give_up(TRANSACTION, "the body of a transaction has kept its session"));
            };
            let ended = match ended {
                Ok(value) => {
                    let committed = self.end_in(session, &value, held.clone()).await?;
                    session = committed.0;
                    committed.1.map(|()| value)
                }
                // The error may be wrapped, so MongoDB is asked.
                Err(abort) if abort.is_transient => Err(abort),
                Err(abort) => Err(Abort { is_transient: self.store().is_transaction_aborted(&mut session).await, ..abort }),
            };
            if ended.is_err() {
                // MongoDB may have aborted it already.
                let _ = session.abort_transaction().await;
            }
            self.give_back(session);
            drop(held);
            match ended {
                Ok(value) => return Ok(value),
                Err(Abort { is_transient: true, not_done }) if begun.elapsed() < REPEATED_FOR => {
                    tracing::debug!(job.id = %self.job.id, error = not_done.failure().message, "a transaction is repeated");
                    pause(pauses.next().unwrap_or_default()).await;
                }
                Err(Abort { not_done, .. }) => return Err(not_done),
            }
        }
    }

    async fn take_session(&self) -> Result<ClientSession, NotDone> {
        match &self.ends {
            Some((_, transactions)) => transactions.take().await?.ok_or_else(|| self.lost()),
            None => Ok(self.store().start_session().await?),
        }
    }

    fn give_back(&self, session: ClientSession) {
        if let Some((_, transactions)) = &self.ends {
            transactions.give_back(session);
        }
    }

    /// The job is not locked by this start any more.
    fn lost(&self) -> NotDone {
        self.cancel.cancel(Cancellation::ClaimLost);
        NotDone::Stopped(Failure::new(failure::INTERRUPTED, "the worker has lost the job; the transaction was aborted"))
    }

    /// Ends the job in the open transaction, and commits it, in a task of its own. Returns the session.
    async fn end_in(
        &self,
        mut session: ClientSession,
        value: &impl Serialize,
        held: Arc<crate::context::Held>,
    ) -> Result<(ClientSession, Result<(), Abort>), NotDone> {
        let Some((claim, _)) = &self.ends else {
            let committed = commit(&mut session).await;
            return Ok((session, committed.map_err(Abort::from)));
        };
        let done = match Done::with(value) {
            Ok(done) => done,
            Err(not_done) => return Ok((session, Err(not_done.into()))),
        };
        let store = self.store().clone();
        let _ = store.fresh_clock().await;
        let archival = self.archival(*claim, done.result.clone());
        let (own_end, on_its_way) = (self.own_end.clone(), self.own_end.commit.clone().lock_owned().await);
        let task = tokio::spawn(async move {
            let ended = end_and_commit(&store, &mut session, &archival).await;
            if let Ok(recorded @ Recorded::Yes) = ended {
                let _ = own_end.done.set(done);
                held.close();
                store.follow(&[archival], &[recorded]).await;
            }
            drop((on_its_way, held));
            (session, ended)
        });
        let (session, ended) = task.await.map_err(|error| NotDone::failed(TRANSACTION, format!("the commit was broken off: {error}")))?;
        Ok((
            session,
            match ended {
                Ok(Recorded::Yes) => Ok(()),
                Ok(Recorded::ClaimLost | Recorded::Refused) => Err(self.lost().into()),
                Err(abort) => Err(abort),
            },
        ))
    }

    fn archival(&self, claim: Claim, result: Option<Bson>) -> Archival {
        let execution = self.job.last_execution.clone().unwrap_or_default().ended(self.store().now(), None);
        let notes = notes::in_a_transaction(self);
        Archival::ended(&self.job, claim, Ending { result, notes, ..Ending::new(execution, FinishReason::DONE) })
    }
}

async fn end_and_commit(store: &Store, session: &mut ClientSession, archival: &Archival) -> Result<Recorded, Abort> {
    match store.finish_in(session, archival).await {
        Ok(Recorded::Yes) => commit(session).await.map(|()| Recorded::Yes).map_err(Abort::from),
        Ok(lost) => Ok(lost),
        Err(StoreError::NoTransaction { .. }) => Err(NotDone::give_up(
            TRANSACTION,
            "the body has ended the transaction itself, so its writes may be there without the end of the job",
        )
        .into()),
        Err(error) => Err(error.into()),
    }
}

/// Commits, and sends the commit again while its outcome is unknown: MongoDB then answers with the first outcome. If the job is broken off
/// meanwhile, the guards of all later writes find out what happened.
async fn commit<'s>(session: &'s mut ClientSession) -> Result<(), MongoError> {
    let once = |session: &'s mut ClientSession| async {
        let done = session.commit_transaction().await;
        (session, done)
    };
    let committed = once.retry(PAUSES).sleep(pause).context(session).when(is_commit_unknown);
    committed.notify(|error, _| tracing::debug!(error = chain(error), "the outcome of a commit is unknown; asking again")).await.1
}
