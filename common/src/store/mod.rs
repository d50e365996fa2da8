//! Every MongoDB call of the system.
//!
//! Used by all processes and by enqueuers. An invariant is a property of *all* writers to a collection, so all writers are here. The filter
//! of each write repeats the conditions of its caller's decision. The files:
//!
//! | file | operations |
//! |---|---|
//! | `connect` | checks of the server; read and write concerns |
//! | `schema` | collections, validator, indexes |
//! | `insert` | new jobs |
//! | `uri` | the connection string: blanks, options of other drivers |
//! | `unique` | jobs with a unique key: who has a key; replace, postpone, run once more, periods |
//! | `groups` | how many jobs wait in a group, and may wait |
//! | `lanes`, `due` | lanes that have jobs; due jobs, lane by lane |
//! | `lines` | the heads of lines, and their halts |
//! | `rates` | the cells of slow rates, for the next leader |
//! | `start` | read and lock jobs; the jobs that a start has locked |
//! | `items`, `notes` | outcomes of the items of a running bundle; progress, checkpoint and log of a running job |
//! | `finish` | the outcomes of starts: archive, delete or reschedule |
//! | `graphs` | jobs that wait for others: their insert, the ends of those, their release |
//! | `not_kept` | the number of jobs that were deleted after their success |
//! | `rescue` | jobs of dead workers; the sweep |
//! | `expiry` | jobs that were not started in time |
//! | `control` | cancel, hasten, change, retry, delete, prune |
//! | `retention` | prune by class and outcome |
//! | `select`, `views` | lists, walks and statistics for people |
//! | `schedulers` | schedules of periodic jobs |
//! | `roster`, `lease` | one document for each worker; the recruiter's lease |
//! | `assignments` | jobs and permits of workers, in their documents |
//! | `wanted` | what operators want of workers |
//! | `classes` | the defaults of classes, which workers declare |
//! | `events` | the ring of events, and who subscribes to them |
//! | `files` | files of jobs, in GridFS |
//! | `messages`, `consumers` | messages of applications; consumer groups, whose messages become jobs |
//! | `hints`, `listener`, `ring` | the contents of hints; who reads them; their publication and reading |
//! | `relay` | hints past the database |
//! | `readable` | documents whatever texts they have |
//! | `session`, `batch`, `error` | transactions; batches; errors |
//!
//! Writers of a job: every enqueuer inserts. An unlocked job is written by a start, a change of its due date, priority or group, a
//! cancellation, its expiry, an enqueuer that replaces it, or the archiving of an invalid document. Each of these has `locked: false` in
//! the filter. A locked job is written only by the holder of the
//! start, or by a cleaner after the holder's death.
//!
//! Repetition of failed calls:
//!
//! | layer | repeats |
//! |---|---|
//! | the driver | a read, or a write by its own methods, once, after a failover or a lost connection |
//! | `write_repeatable` | a hint, or a worker's turn in the roster, once: the driver does not retry raw commands |
//! | `transaction` | a transaction with a transient error, and a commit with an unknown outcome, a few times |
//! | the caller | everything else: a worker until its outcomes are written, `control` for 75 s, the cleaner with its next poll |
//!
//! A batch that MongoDB *refuses* is never sent again unchanged: it is halved (`batch`), and a single refused end is stored in a reduced
//! form (`finish`).

mod assignments;
pub(crate) mod batch;
mod classes;
mod connect;
mod consumers;
mod control;
mod due;
mod error;
mod events;
mod expiry;
mod files;
mod finish;
mod graphs;
mod groups;
mod hints;
mod insert;
mod items;
mod lanes;
mod lease;
mod lines;
mod listener;
mod messages;
mod not_kept;
mod notes;
mod rates;
mod readable;
mod relay;
mod rescue;
mod retention;
mod ring;
mod roster;
mod schedulers;
pub mod schema;
mod select;
mod session;
mod settings;
mod start;
mod unique;
mod uri;
mod views;
mod wanted;

use std::{
    collections::{HashMap, HashSet},
    future::Future,
    sync::{Arc, Mutex, PoisonError, atomic::AtomicBool},
    time::Duration,
};

use bson::{Document, RawDocument, doc};
use mongodb::{
    Client, Collection, Database,
    error::Error,
    gridfs::GridFsBucket,
    options::{ClientOptions, Hint as IndexHint},
};

#[doc(hidden)]
pub use self::error::DOCUMENT_FAULTS;
use self::error::{code_of, write_errors};
use self::relay::Relay;
pub use self::relay::{HintsAddress, HintsAt, Hub, InvalidHintsAddress};
pub use self::{
    assignments::Planned,
    batch::cut,
    connect::{ConnectArgs, ConnectError, DEFAULT_DATABASE},
    consumers::MOST_CONSUMERS,
    control::Retrial,
    due::{DueJobs, Position, ScheduledJob},
    error::{DriverError, StoreError},
    events::RingPart,
    files::FilesStep,
    finish::{BATCH_BYTES, GuardedWrite, Recorded},
    groups::{GroupBacklog, InvalidSetting, LARGEST_CAP},
    hints::{AssignedJobs, EVERY_GROUP, Hint},
    lanes::Lane,
    lease::{LeaderLease, Observed},
    lines::Head,
    listener::{Hints, Listener},
    not_kept::NotKept,
    rates::{FastLimits, KeptCells, RateCell},
    rescue::LockedJobs,
    retention::{Covered, OtherClasses, Reasons, RetentionPosition, RetentionStep},
    roster::{HeartbeatReply, Offer, Registration},
    schedulers::Advance,
    select::{JobFilter, LOOK_LIMIT, Listed, Match, Page, StateFilter, Walk, lossy},
    session::CommitSession,
    start::{Conditions, Start, ToStart},
    views::{COUNTED, Finished, LaneCounts, SAMPLED, StoredJob, Unfinished, Waiting},
};
pub(crate) use self::{
    control::RetryNote,
    graphs::{Inserted, StoredResult},
    insert::Duplicate,
    messages::{MessageStart, MessageStream},
    readable::readable,
    session::require_transaction,
    unique::{Holder, Taken, successor},
    views::policies_in,
};
use crate::{
    backlog::Caps,
    clock::{ServerClock, Uptime},
    events::Publisher,
    ids::{JobId, StartId},
    instant::Instant,
    wait::Waiters,
};
pub use crate::{
    job::ending::{Archival, Progress, Rescheduling},
    roster::Channel,
};

/// A call without a reply after this time has an unknown outcome. It is longer than most failovers, and shorter than a worker's default
/// lease.
const CALL_LIMIT: Duration = Duration::from_secs(10);
/// Maximum time for MongoDB to wait for a majority. It is shorter than [`CALL_LIMIT`], so that no connection stays occupied.
const MAJORITY_LIMIT: Duration = Duration::from_secs(9);

/// The database of one job system.
#[derive(Clone, Debug)]
pub struct Store {
    client: Client,
    database: Database,
    scheduled: Collection<Document>,
    archived: Collection<Document>,
    roster: Collection<Document>,
    metadata: Collection<Document>,
    limits: Collection<Document>,
    groups: Collection<Document>,
    pauses: Collection<Document>,
    schedulers: Collection<Document>,
    signals: Collection<Document>,
    unique_periods: Collection<Document>,
    events: Collection<Document>,
    messages: Collection<Document>,
    consumers: Collection<Document>,
    payloads: GridFsBucket,
    payload_files: Collection<Document>,
    payload_chunks: Collection<Document>,
    pub(crate) clock: Arc<ServerClock>,
    /// The options of its client, for further clients with the same options; `None` if the application has created the client.
    options: Option<Arc<ClientOptions>>,
    /// Whether a missing index is created again. It is not for a read-only store, and for a store on the application's own client.
    may_mend: bool,
    /// Whether the schema is known to exist.
    is_set_up: Arc<AtomicBool>,
    /// The begin of the names of all collections.
    prefix: Arc<str>,
    /// What takes the place of those of our indexes that cannot be used, by their names.
    stand_ins: Arc<Mutex<StandIns>>,
    /// The features whose indexes are known to exist.
    features: Arc<Mutex<HashSet<schema::Feature>>>,
    /// The settings of groups that limit how many jobs wait.
    pub(crate) caps: Arc<Caps>,
    /// Hints past the database.
    relay: Arc<Relay>,
    /// Events that are not written yet.
    pub(crate) publisher: Arc<Publisher>,
    /// Those who wait for jobs in this process.
    pub(crate) waiters: Arc<Waiters>,
}

impl Store {
    /// The client, for sessions and transactions of the application's own.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The database, for views and tools; writes to its collections go through this module only.
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
        let database = self.database.clone();
        let asked = Uptime::now();
        let reply = call("refresh_clock", async move { database.run_command(doc! { "hello": 1 }).await }).await?;
        if let Ok(now) = reply.get_datetime("localTime") {
            self.clock.observe(now.to_chrono(), asked);
        }
        Ok(())
    }

    /// The name of a collection in the database.
    fn named(&self, collection: &str) -> String {
        format!("{}{collection}", self.prefix)
    }

    #[expect(clippy::disallowed_methods, reason = "a collection that is found by its name")]
    fn collection(&self, name: &str) -> Collection<Document> {
        self.database.collection(&self.named(name))
    }

    /// The hint for a read that needs this index.
    fn index(&self, name: &'static str) -> IndexHint {
        match self.stand_ins.lock().unwrap_or_else(PoisonError::into_inner).by_index.get(name) {
            None => IndexHint::Name(name.into()),
            Some(StandIn::Index(other)) => IndexHint::Name(other.clone()),
            Some(StandIn::Scan) => IndexHint::Keys(doc! { "$natural": 1 }),
        }
    }

    /// Whether a read that needs this index has to scan the collection.
    fn must_scan(&self, index: &str) -> bool {
        self.stand_ins.lock().unwrap_or_else(PoisonError::into_inner).by_index.get(index) == Some(&StandIn::Scan)
    }

    /// Runs a read that names its index. If the index is missing, it is created again for the next read.
    async fn indexed<T: Send + 'static>(
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
                tracing::warn!(error = crate::telemetry::chain(error), "an index is missing; creating it again");
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
        schema::drop_outdated_indexes(self).await
    }

    /// Runs a raw write command. Returns the number of matching documents. The driver does not retry the command, so the caller must
    /// handle an unknown outcome.
    async fn write(&self, operation: &'static str, command: Document) -> Result<usize, StoreError> {
        let database = self.database.clone();
        call(operation, async move {
            let reply = database.run_command(command).await?;
            write_errors(&reply)?;
            Ok(reply.get_i32("n").ok().and_then(|met| usize::try_from(met).ok()).unwrap_or(0))
        })
        .await
    }

    /// Like `write`, for an idempotent command: it is sent once more, at once, if it failed.
    async fn write_repeatable(&self, operation: &'static str, command: impl Fn() -> Document) -> Result<usize, StoreError> {
        match self.write(operation, command()).await {
            Err(StoreError::Mongo { .. }) => self.write(operation, command()).await,
            other => other,
        }
    }
}

/// How long stand-ins are used before the indexes are listed again: an operator may have brought one back.
const STAND_INS_FOR: Duration = Duration::from_secs(60);

/// What reads use in place of indexes.
#[derive(Debug, Default)]
struct StandIns {
    by_index: HashMap<&'static str, StandIn>,
    learned: Option<std::time::Instant>,
}

impl StandIns {
    fn is_outdated(&self) -> bool {
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

/// Runs one operation within [`CALL_LIMIT`].
///
/// It runs in a separate task, because the driver's futures should not be dropped before they complete. A call that takes too long
/// continues in its task, and the caller gets an error: the outcome is unknown.
async fn call<T: Send + 'static>(
    operation: &'static str,
    future: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Result<T, StoreError> {
    call_within(CALL_LIMIT, operation, future).await
}

/// Like [`call`], for an operation that may take longer.
async fn call_within<T: Send + 'static>(
    limit: Duration,
    operation: &'static str,
    future: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Result<T, StoreError> {
    match tokio::time::timeout(limit, tokio::spawn(OPERATION.scope(operation, future))).await {
        Ok(Ok(Ok(value))) => Ok(value),
        Ok(Ok(Err(source))) => Err(StoreError::Mongo { operation, source: source.into() }),
        Ok(Err(died)) => match died.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is shutting down.
            Err(_) => Err(StoreError::TimedOut { operation }),
        },
        Err(_) => Err(StoreError::TimedOut { operation }),
    }
}

pub(crate) fn id_of(document: &Document) -> Option<JobId> {
    document.get_object_id("_id").ok().map(JobId::from)
}

fn raw_id_of(document: &RawDocument) -> Option<JobId> {
    document.get_object_id("_id").ok().map(JobId::from)
}

fn start_of(document: &Document) -> Option<StartId> {
    document.get_document("last_execution").ok()?.get_object_id("start").ok().map(StartId::from)
}
