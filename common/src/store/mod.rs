//! Every MongoDB call of the system.
//!
//! Used by all processes and by enqueuers. An invariant is a property of *all* writers to a collection, so all of them are here; each
//! operation's filter repeats what its caller's decision relied on. The files stand in the order of a job's life:
//!
//! | file | what MongoDB is asked |
//! |---|---|
//! | `connect` | is this server fit; the concerns of every call |
//! | `schema` | collections, validator, indexes |
//! | `insert` | new jobs |
//! | `lanes`, `due` | which lanes have jobs; which jobs of a lane are due |
//! | `start` | read, lock, find out what a start has locked |
//! | `items` | outcomes of the items of a running bundle |
//! | `finish` | the end of a start: the one gate to the archive and back to `scheduled` |
//! | `rescue` | what the dead hold; the sweep |
//! | `control` | cancel, hasten, retry, delete, prune |
//! | `select`, `views` | lists, walks and statistics for people |
//! | `roster`, `lease` | one document for each worker; who leads |
//! | `hints`, `ring` | what hints say; how they are published and heard |
//! | `session`, `batch`, `error` | transactions; batches and their halves; refusals |
//!
//! Who may write a job: everyone inserts it. While it is unlocked, only a start, a change of its date, a cancellation, or the archiving of a
//! document that is not a job (each under `locked: false`). While it is locked, only the holder of the start, or a cleaner after its death.
//!
//! Who repeats what:
//!
//! | layer | repeats |
//! |---|---|
//! | the driver | a read or a write of its own making, once, after a failover or a lost connection |
//! | `write_repeatable` | a hint, or a worker's turn in the roster, once: the driver does not know these commands |
//! | `transaction` | a transaction that MongoDB calls transient, and a commit of unknown outcome, a few times |
//! | the caller | everything else: a worker until its outcomes are written, `control` for 75 s, the cleaner with its next round |
//!
//! A batch that MongoDB *refuses* is never sent again as it was: it is halved (`batch`), and one refused end is stored in a reduced form (`finish`).

pub(crate) mod batch;
mod connect;
mod control;
mod due;
mod error;
mod finish;
mod hints;
mod insert;
mod items;
mod lanes;
mod lease;
mod rescue;
mod ring;
mod roster;
pub mod schema;
mod select;
mod session;
mod start;
mod views;

use std::{
    future::Future,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use bson::{Document, RawDocument, doc};
use mongodb::{Client, Collection, Database, error::Error, options::ClientOptions};

#[doc(hidden)]
pub use self::error::DOCUMENT_FAULTS;
use self::error::{code_of, write_errors};
pub use self::{
    connect::{ConnectArgs, ConnectError, DEFAULT_DATABASE},
    control::Retrial,
    due::{DueJob, DueJobs, Position},
    error::{DriverError, StoreError},
    finish::{BATCH_BYTES, End, Recorded},
    hints::{Assignment, EVERY_GROUP, Hint},
    lanes::Lane,
    lease::{Lease, Observed},
    rescue::LockedJobs,
    ring::{Hints, Listener},
    roster::{Announcement, Beat, Free},
    select::{JobFilter, JobPlace, LOOK_LIMIT, Listed, Match, Page, Walk, lossy},
    session::CommitSession,
    start::{Start, ToStart},
    views::{COUNTED, Finished, SAMPLED, StoredJob, Waiting},
};
use crate::{
    clock::{ServerClock, Uptime},
    ids::{JobId, StartId},
    instant::Instant,
};
pub use crate::{
    job::ending::{Archival, Progress, Rescheduling},
    roster::Channel,
};

/// A call without an answer after this time counts as lost. Longer than a failover, shorter than a lease.
const CALL_LIMIT: Duration = Duration::from_secs(10);
/// How long MongoDB itself waits for a majority. It gives up before we do, so that no connection stays occupied.
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
    signals: Collection<Document>,
    pub(crate) clock: Arc<ServerClock>,
    /// The options of its client, for further clients of the same kind; none when the application has made the client.
    options: Option<Arc<ClientOptions>>,
    /// Whether a missing index is created again: not by a store that only reads, or that is on the application's own client.
    may_mend: bool,
    /// Whether the schema is known to exist.
    is_set_up: Arc<AtomicBool>,
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

    /// An estimate of the server's clock, never ahead of it, in whole milliseconds.
    pub fn now(&self) -> Instant {
        self.clock.now()
    }

    /// Reads the server's clock if the last reading is old, or perhaps another server's.
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

    /// Runs a read that names its index. A missing index is made again, and the next such read is served.
    async fn indexed<T: Send + 'static>(
        &self,
        operation: &'static str,
        future: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, StoreError> {
        let result = call(operation, future).await;
        if let Err(error) = &result
            && error.is_index_missing()
            && self.may_mend
        {
            tracing::warn!(error = crate::telemetry::chain(error), "an index is missing; making it again");
            schema::mend(self, None).await?;
        }
        result
    }

    /// Drops the indexes of an earlier release that this one has replaced. For the recruiter that leads: until then one of the earlier
    /// release may lead, which needs them.
    ///
    /// # Errors
    /// When MongoDB refuses or cannot be reached.
    pub async fn drop_outdated_indexes(&self) -> Result<(), StoreError> {
        schema::drop_outdated_indexes(self).await
    }

    /// Runs a raw write command; returns how many documents it met. The driver does not retry it, and MongoDB keeps no record of it: the
    /// caller must handle an unknown outcome.
    async fn write(&self, operation: &'static str, command: Document) -> Result<usize, StoreError> {
        let database = self.database.clone();
        call(operation, async move {
            let reply = database.run_command(command).await?;
            write_errors(&reply)?;
            Ok(reply.get_i32("n").ok().and_then(|met| usize::try_from(met).ok()).unwrap_or(0))
        })
        .await
    }

    /// The same for a command that may run twice: it is sent once more, at once, if it failed.
    async fn write_repeatable(&self, operation: &'static str, command: impl Fn() -> Document) -> Result<usize, StoreError> {
        match self.write(operation, command()).await {
            Err(StoreError::Mongo { .. }) => self.write(operation, command()).await,
            other => other,
        }
    }
}

/// Runs one operation within [`CALL_LIMIT`].
///
/// It runs in a task of its own, because the driver's futures should not be dropped half-way: a call that takes too long ends by itself,
/// and the caller goes on without knowing its outcome.
async fn call<T: Send + 'static>(
    operation: &'static str,
    future: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Result<T, StoreError> {
    match tokio::time::timeout(CALL_LIMIT, tokio::spawn(future)).await {
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
