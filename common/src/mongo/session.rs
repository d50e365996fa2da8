//! Transactions: their sessions, and the only code that repeats a transaction.

use backon::{ConstantBuilder, RetryableWithContext as _};
use bson::Document;
use futures_util::future::BoxFuture;
use mongodb::{
    ClientSession, Database,
    error::{Error, ErrorKind, TRANSIENT_TRANSACTION_ERROR, UNKNOWN_TRANSACTION_COMMIT_RESULT, WriteFailure},
};

use super::{
    Store, StoreError, call,
    error::{code_of, is_transaction_open},
    measured, met_by,
};
use crate::base::at_once;

/// The immediate repetitions of a transaction after a transient error, and of its commit.
const AGAIN: ConstantBuilder = ConstantBuilder::new().with_max_times(5);

/// A session for transactions that move jobs. A worker writes its id into the roster before it uses the session, so that a cleaner can end
/// the transaction of a killed worker. After a call without a reply the next transaction uses another session.
#[derive(Debug, Default)]
pub struct CommitSession {
    session: Session,
    /// Whether the last transaction failed. It may be open in MongoDB until the next one begins, and keep its jobs locked until then.
    may_hold_jobs: bool,
}

#[derive(Debug, Default)]
enum Session {
    #[default]
    Closed,
    Open(Box<ClientSession>),
    /// A call got no reply: the transaction may keep its jobs locked until MongoDB ends it, a minute later.
    GivenUp(Document),
}

impl CommitSession {
    /// Whether the next transaction needs another session, which must first be opened and written into the roster.
    pub fn is_closed(&self) -> bool {
        !matches!(self.session, Session::Open(_))
    }

    /// The id of a session that was given up: [`Store::open_session`] ends it and opens another one.
    pub fn given_up(&self) -> Option<Document> {
        if let Session::GivenUp(id) = &self.session { Some(id.clone()) } else { None }
    }

    /// Whether a write outside of a transaction may have to wait for the last transaction of this session.
    pub(crate) fn may_hold_jobs(&self) -> bool {
        self.may_hold_jobs
    }
}

/// The writes of a transaction, and its end.
type Body<T, W> = for<'s> fn(&'s mut ClientSession, W) -> BoxFuture<'s, Result<T, Error>>;

impl Store {
    /// Opens a session for [`Store::finish`], unless one is open. Returns its id, which the caller must write into the roster.
    pub async fn open_session(&self, session: &mut CommitSession) -> Result<Document, StoreError> {
        let open = self.take_session(session).await?;
        let id = open.id().clone();
        session.session = Session::Open(open);
        Ok(id)
    }

    /// The open session, or a new one. A session that was given up is ended first, so that its transaction keeps no job locked.
    async fn take_session(&self, session: &mut CommitSession) -> Result<Box<ClientSession>, StoreError> {
        if let Session::GivenUp(id) = &session.session {
            self.kill_sessions(std::slice::from_ref(id)).await?;
            session.may_hold_jobs = false;
        }
        match std::mem::take(&mut session.session) {
            Session::Open(open) => Ok(open),
            Session::Closed | Session::GivenUp(_) => {
                let store = self.clone();
                call("open_session", async move { store.start_session().await.map(Box::new) }).await
            }
        }
    }

    /// Runs one transaction. `body` gets a clone of `with`, makes its writes and ends it, by [`commit`] or by an abort. After an abort it may
    /// continue to read in the same session, causally consistent.
    ///
    /// The transaction is repeated a few times while MongoDB labels its error as transient. Therefore `body` must be harmless to repeat.
    /// When a call gets no reply, the session is not used again.
    pub(crate) async fn transaction<'c, T: Send + 'static, W: Clone + Send + 'static>(
        &self,
        operation: &'static str,
        session: &'c mut CommitSession,
        with: W,
        body: Body<T, W>,
    ) -> Result<T, StoreError> {
        let once = |session: &'c mut CommitSession| {
            let with = with.clone();
            async move {
                let done = self.transaction_once(operation, session, with, body).await;
                (session, done)
            }
        };
        let is_transient = |error: &StoreError| error.has_label(TRANSIENT_TRANSACTION_ERROR);
        once.retry(AGAIN).sleep(at_once).context(session).when(is_transient).await.1
    }

    async fn transaction_once<T: Send + 'static, W: Send + 'static>(
        &self,
        operation: &'static str,
        session: &mut CommitSession,
        with: W,
        body: Body<T, W>,
    ) -> Result<T, StoreError> {
        let mut open = self.take_session(session).await?;
        *session = CommitSession { session: Session::GivenUp(open.id().clone()), may_hold_jobs: true };
        let (open, outcome) = call(operation, async move {
            let outcome = match open.start_transaction().await {
                Ok(()) => body(&mut open, with).await,
                Err(error) => Err(error),
            };
            if outcome.is_err() {
                // The server may have aborted it already.
                let _ = open.abort_transaction().await;
            }
            Ok((open, outcome))
        })
        .await?;
        *session = CommitSession { session: Session::Open(open), may_hold_jobs: outcome.is_err() };
        outcome.map_err(StoreError::of(operation))
    }
}

impl Store {
    /// Whether MongoDB has aborted the transaction that is open in this session, for example after a write conflict. An error that says so may
    /// be hidden in an error of the application.
    ///
    /// Index: `_id`. Invariant: none, it reads one document in the transaction.
    pub async fn is_transaction_aborted(&self, session: &mut ClientSession) -> bool {
        let asked = self.metadata.find_one(bson::doc! { "_id": "schema" }).session(session).await;
        asked.is_err_and(|error| error.contains_label(TRANSIENT_TRANSACTION_ERROR))
    }
}

/// Runs a raw write command in a transaction. Returns the number of matching documents.
pub(crate) async fn write_in(session: &mut ClientSession, database: &Database, command: Document) -> Result<usize, Error> {
    met_by(&database.run_command(command).session(session).await?)
}

/// The code of an operation that was interrupted, for example because its session was ended.
const INTERRUPTED: i32 = 11_601;

/// Whether the outcome of a commit with this error is unknown, so that the commit must be sent again, which is safe. A cleaner ends the
/// sessions of a worker that it believes dead: that interrupts a commit, perhaps after it has happened, and has no label.
pub fn is_commit_unknown(error: &Error) -> bool {
    let of_concern =
        || if let ErrorKind::Write(WriteFailure::WriteConcernError(concern)) = error.kind.as_ref() { Some(concern.code) } else { None };
    error.contains_label(UNKNOWN_TRANSACTION_COMMIT_RESULT) || code_of(error).or_else(of_concern) == Some(INTERRUPTED)
}

/// Commits, again while the outcome is unknown.
pub(crate) async fn commit<'s>(session: &'s mut ClientSession) -> Result<(), Error> {
    let once = |session: &'s mut ClientSession| async {
        let done = measured("commit_transaction", session.commit_transaction()).await;
        (session, done)
    };
    once.retry(AGAIN).sleep(at_once).context(session).when(is_commit_unknown).await.1
}

/// Checks that the caller has started a transaction: without one, writes that belong together could be made in part.
///
/// Index: none. Invariant: none, it sends nothing.
pub(crate) async fn require_transaction(session: &mut ClientSession, operation: &'static str) -> Result<(), StoreError> {
    match session.start_transaction().await {
        Err(error) if is_transaction_open(&error) => Ok(()),
        Err(source) => Err(StoreError::Mongo { operation, source: source.into() }),
        Ok(()) => {
            // The driver has not sent anything yet.
            let _ = session.abort_transaction().await;
            Err(StoreError::NoTransaction { operation })
        }
    }
}
