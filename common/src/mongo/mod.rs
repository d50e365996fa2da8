//! A connection to the database of one job system, and how it is called. Nothing of jobs is here: each room has its own operations.
//!
//! An invariant is a property of *all* writers to a collection. Therefore the filter of each write repeats the conditions of its caller's
//! decision, and its documentation names the index and the invariant.
//!
//! | file | content |
//! |---|---|
//! | `connect`, `uri` | checks of the server, read and write concerns; the connection string: blanks, options of other drivers |
//! | `tls` | the files for TLS; what a fault of a certificate means |
//! | `schema` | collections, validators, indexes, and which collections are ours |
//! | `session`, `batch` | transactions; batches |
//! | `readable` | documents with invalid texts |
//! | `update` | updates of fields that may have any type |
//! | `channel` | the capped collections of hints |
//! | `parts` | what other rooms keep with a connection |
//! | `error` | errors |
//! | `connect_error` | why a process cannot work with a MongoDB, and what to do |
//!
//! Repetition of failed calls:
//!
//! | layer | repeats |
//! |---|---|
//! | the driver | a read, or a write by its own methods, once, after a failover or a lost connection |
//! | `write_repeatable` | a hint, or a worker's report, once. The driver does not retry raw commands, which saves 20–25 % of their cost |
//! | `transaction` | a transaction with a transient error, and a commit with an unknown outcome, a few times |
//! | the caller | everything else: a worker until its outcomes are written, `control` for 75 s, the cleaner with its next poll |
//!
//! A majority acknowledges each write that a promise rests on. Hints, reports, and assignments without permits are acknowledged by the
//! primary only.
//!
//! A batch that MongoDB *refuses* is never sent again unchanged: it is halved (`batch`), and a single refused end is stored in a reduced
//! form (`finish`).

pub(crate) mod batch;
pub(crate) mod channel;
pub(crate) mod connect;
pub(crate) mod connect_error;
pub(crate) mod error;
pub(crate) mod parts;
pub(crate) mod readable;
pub mod schema;
pub(crate) mod session;
mod tls;
pub(crate) mod update;
pub(crate) mod uri;

use std::{
    collections::{HashMap, HashSet},
    future::Future,
    ops::Deref,
    sync::{Arc, Mutex, PoisonError, atomic::AtomicBool},
    time::{Duration, Instant as Monotonic},
};

use bson::{Document, RawDocument, doc};
use mongodb::{
    Collection, Database,
    error::Error,
    gridfs::GridFsBucket,
    options::{ClientOptions, Hint as IndexHint},
};

pub use self::channel::Channel;
#[doc(hidden)]
pub use self::error::DOCUMENT_FAULTS;
pub(crate) use self::{
    batch::{Batches, IDS_PER_QUERY},
    error::met_by,
    readable::{Readable, readable},
    schema::{
        ARCHIVED_BY_END, DUE_JOBS, EXPIRING_JOBS, Feature, GATED_JOBS, GRAPH_JOBS, LARGEST_WORKABLE, SCHEDULE_REVISIONS, UNIQUE,
        UNIQUE_AFTER, UNIQUE_WHILE_WAITING, WAITING_JOBS, any_date, any_gate, any_worker, never_started,
    },
    session::{commit, require_transaction, write_in},
};
pub use self::{
    batch::{WalkStep, cut},
    connect::{ConnectArgs, DEFAULT_DATABASE},
    connect_error::ConnectError,
    error::{DriverError, StoreError},
    readable::lossy,
    session::{CommitSession, is_commit_unknown},
};
use self::{error::code_of, parts::Parts};
use crate::{
    base::{Instant, JobId, StartId, Uptime, clock::ServerClock, within},
    meters::operations,
};

/// A call without a reply after this time has an unknown outcome. It is longer than most failovers, and shorter than a worker's default
/// lease. The time in which this process is stopped does not count.
pub(crate) const CALL_LIMIT: Duration = Duration::from_secs(10);
/// Maximum time for MongoDB to wait for a majority. It is shorter than [`CALL_LIMIT`], so that no connection stays occupied.
pub(crate) const MAJORITY_LIMIT: Duration = Duration::from_secs(9);

/// A connection to the database of one job system, with everything that an application does: enqueue, wait, read results, subscribe, and
/// change settings.
///
/// A clone is cheap, and shares the connections.
#[derive(Clone, Debug)]
pub struct Client {
    pub(crate) driver: mongodb::Client,
    pub(crate) database: Database,
    pub(crate) scheduled: Collection<Document>,
    pub(crate) archived: Collection<Document>,
    pub(crate) roster: Collection<Document>,
    pub(crate) metadata: Collection<Document>,
    pub(crate) limits: Collection<Document>,
    pub(crate) groups: Collection<Document>,
    pub(crate) pauses: Collection<Document>,
    pub(crate) schedulers: Collection<Document>,
    pub(crate) signals: Collection<Document>,
    pub(crate) unique_periods: Collection<Document>,
    pub(crate) events: Collection<Document>,
    pub(crate) messages: Collection<Document>,
    pub(crate) consumers: Collection<Document>,
    pub(crate) audit: Collection<Document>,
    pub(crate) payloads: GridFsBucket,
    pub(crate) payload_files: Collection<Document>,
    pub(crate) payload_chunks: Collection<Document>,
    pub(crate) clock: Arc<ServerClock>,
    /// The options of its client, for further clients with the same options; `None` if the application has created the client.
    pub(crate) options: Option<Arc<ClientOptions>>,
    /// Whether a missing index is created again. It is not for a read-only store, and for one on the application's own driver.
    pub(crate) may_mend: bool,
    /// Whether the schema is known to exist.
    pub(crate) is_set_up: Arc<AtomicBool>,
    /// Whether the collection of the audit is known to be Recruiter's.
    pub(crate) has_audit: Arc<AtomicBool>,
    /// The begin of the names of all collections.
    pub(crate) prefix: Arc<str>,
    /// What takes the place of those of our indexes that cannot be used, by their names.
    pub(crate) stand_ins: Arc<Mutex<StandIns>>,
    /// The features whose indexes are known to exist.
    pub(crate) features: Arc<Mutex<HashSet<schema::Feature>>>,
    /// What other rooms keep with a connection.
    pub(crate) parts: Arc<Parts>,
}

/// The same connection with the operations of the three programs. It dereferences to the [`Client`].
#[derive(Clone, Debug)]
pub struct Store(Client);

impl Deref for Store {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.0
    }
}

impl From<Client> for Store {
    fn from(client: Client) -> Self {
        Self(client)
    }
}

impl Client {
    /// The operations of the programs, from which the verbs of the application are made.
    pub(crate) fn store(&self) -> Store {
        Store(self.clone())
    }

    /// What a room keeps with this connection: one value of each type, made when it is first asked for.
    pub(crate) fn part<T: Default + Send + Sync + 'static>(&self) -> &T {
        self.parts.get()
    }

    /// The database, for your own reads, and for its client. Writes to the collections of the job system go through this crate only.
    pub fn database(&self) -> &Database {
        &self.database
    }

    /// The estimated time of the server's clock, never ahead of it, in whole milliseconds.
    pub fn now(&self) -> Instant {
        self.clock.now()
    }

    /// Reads the server's clock if the last reading is too old, or if the primary may have changed.
    ///
    /// # Errors
    /// When MongoDB cannot be reached.
    pub async fn fresh_clock(&self) -> Result<(), StoreError> {
        if self.clock.is_stale() { self.refresh_clock().await } else { Ok(()) }
    }

    /// Reads the server's clock.
    ///
    /// # Errors
    /// When MongoDB cannot be reached.
    pub async fn refresh_clock(&self) -> Result<(), StoreError> {
        // The driver repeats a read whose connection is lost, but no command that it does not know as one.
        match self.ask_for_time().await {
            Err(error) if error.is_transient() => self.ask_for_time().await,
            asked => asked,
        }
    }

    async fn ask_for_time(&self) -> Result<(), StoreError> {
        let database = self.database.clone();
        let asked = Uptime::now();
        let reply = call("refresh_clock", async move { database.run_command(doc! { "hello": 1 }).await }).await?;
        if let Ok(now) = reply.get_datetime("localTime") {
            self.clock.observe(now.to_chrono(), asked);
        }
        Ok(())
    }

    /// The name of a collection in the database.
    pub(crate) fn named(&self, collection: &str) -> String {
        format!("{}{collection}", self.prefix)
    }

    #[expect(clippy::disallowed_methods, reason = "a collection that is found by its name")]
    pub(crate) fn collection(&self, name: &str) -> Collection<Document> {
        self.database.collection(&self.named(name))
    }

    /// The hint for a read that needs this index.
    pub(crate) fn index(&self, name: &'static str) -> IndexHint {
        match self.stand_ins.lock().unwrap_or_else(PoisonError::into_inner).by_index.get(name) {
            None => IndexHint::Name(name.into()),
            Some(StandIn::Index(other)) => IndexHint::Name(other.clone()),
            Some(StandIn::Scan) => IndexHint::Keys(doc! { "$natural": 1 }),
        }
    }

    /// Whether a read that needs this index has to scan the collection.
    pub(crate) fn must_scan(&self, index: &str) -> bool {
        self.stand_ins.lock().unwrap_or_else(PoisonError::into_inner).by_index.get(index) == Some(&StandIn::Scan)
    }

    /// Runs a read that names its index. If the index is missing, it is created again for the next read.
    pub(crate) async fn indexed<T: Send + 'static>(
        &self,
        operation: &'static str,
        future: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, StoreError> {
        if self.stand_ins.lock().unwrap_or_else(PoisonError::into_inner).is_outdated() {
            schema::learn_stand_ins(self).await?;
        }
        let result = call(operation, future).await;
        if let Err(error) = &result
            && error.is_index_missing()
        {
            if self.may_mend {
                tracing::warn!(error = crate::base::telemetry::chain(error), "an index is missing; creating it again");
                schema::mend(self, None).await?;
            } else {
                schema::learn_stand_ins(self).await?;
            }
        }
        result
    }

    /// Drops the indexes of an earlier release that this release has replaced. Called by the leading recruiter: before it leads, a
    /// recruiter of the earlier release may lead and need them.
    ///
    /// # Errors
    /// When MongoDB refuses or cannot be reached.
    pub async fn drop_outdated_indexes(&self) -> Result<(), StoreError> {
        self.if_set_up(schema::drop_outdated_indexes(self)).await
    }

    /// Makes the parts of the schema that processes have asked for, whose MongoDB user may not make them. Called by the leading recruiter.
    ///
    /// # Errors
    /// When MongoDB refuses or cannot be reached.
    pub async fn make_asked(&self) -> Result<(), StoreError> {
        self.if_set_up(schema::make_asked(self)).await
    }

    /// Runs a raw write command. Returns the number of matching documents. The driver does not retry the command, so the caller must
    /// handle an unknown outcome.
    pub(crate) async fn write(&self, operation: &'static str, command: Document) -> Result<usize, StoreError> {
        let database = self.database.clone();
        call(operation, async move { met_by(&database.run_command(command).await?) }).await
    }

    /// Like `write`, for an idempotent command: it is sent once more, at once, if it failed.
    pub(crate) async fn write_repeatable(&self, operation: &'static str, command: impl Fn() -> Document) -> Result<usize, StoreError> {
        match self.write(operation, command()).await {
            Err(StoreError::Mongo { .. }) => self.write(operation, command()).await,
            other => other,
        }
    }
}

/// How long stand-ins are used before the indexes are listed again: an operator may have brought one back.
pub(crate) const STAND_INS_FOR: Duration = Duration::from_secs(60);

/// What reads use in place of indexes.
#[derive(Debug, Default)]
pub(crate) struct StandIns {
    by_index: HashMap<&'static str, StandIn>,
    learned: Option<std::time::Instant>,
}

impl StandIns {
    pub(crate) fn is_outdated(&self) -> bool {
        !self.by_index.is_empty() && self.learned.is_none_or(|learned| learned.elapsed() > STAND_INS_FOR)
    }
}

/// What a read uses in place of an index.
#[derive(Clone, Debug, PartialEq, Eq)]
enum StandIn {
    /// An index of another name with the same keys and the same documents.
    Index(String),
    /// No index.
    Scan,
}

tokio::task_local! {
    static OPERATION: &'static str;
}

/// The operation of the store that sends the command of this task, for a handler of the driver's command events.
pub fn current_operation() -> Option<&'static str> {
    OPERATION.try_with(|operation| *operation).ok()
}

/// Runs one operation within [`CALL_LIMIT`], and measures it.
///
/// It runs in a separate task, because the driver's futures should not be dropped before they complete. A call that takes too long
/// continues in its task, and the caller gets an error: the outcome is unknown.
pub(crate) async fn call<T: Send + 'static>(
    operation: &'static str,
    future: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Result<T, StoreError> {
    call_within(CALL_LIMIT, operation, future).await
}

/// Like [`call`], for an operation that may take longer.
pub(crate) async fn call_within<T: Send + 'static>(
    limit: Duration,
    operation: &'static str,
    future: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Result<T, StoreError> {
    let began = Monotonic::now();
    // Boxed: else its timer is a part of every future that makes a call.
    let result = match Box::pin(within(limit, tokio::spawn(OPERATION.scope(operation, future)))).await {
        Some(Ok(Ok(value))) => Ok(value),
        Some(Ok(Err(source))) => Err(StoreError::Mongo { operation, source: source.into() }),
        Some(Err(died)) => match died.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is shutting down.
            Err(_) => Err(StoreError::TimedOut { operation }),
        },
        None => Err(StoreError::TimedOut { operation }),
    };
    operations::ended(operation, began.elapsed(), result.as_ref().err().map(StoreError::problem));
    result
}

/// Measures a step of an operation like an operation.
pub(crate) async fn measured<T>(operation: &'static str, step: impl IntoFuture<Output = Result<T, Error>>) -> Result<T, Error> {
    let began = Monotonic::now();
    let result = step.await;
    operations::ended(operation, began.elapsed(), result.as_ref().err().map(error::problem));
    result
}

pub(crate) fn id_of(document: &Document) -> Option<JobId> {
    document.get_object_id("_id").ok().map(JobId::from)
}

pub(crate) fn raw_id_of(document: &RawDocument) -> Option<JobId> {
    document.get_object_id("_id").ok().map(JobId::from)
}

pub(crate) fn start_of(document: &Document) -> Option<StartId> {
    document.get_document("last_execution").ok()?.get_object_id("start").ok().map(StartId::from)
}
