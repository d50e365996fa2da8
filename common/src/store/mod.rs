//! Every MongoDB call of the system: one file per collection, operations in the order of a job's life.
//!
//! Used by all processes and by enqueuers. An invariant is a property of *all* writers to a collection, so all
//! of them are here; each operation's filter repeats what its caller's decision relied on.

mod bundles;
mod connect;
pub mod indexes;
mod jobs;
mod lease;
mod outcome;
mod roster;
mod search;
mod select;
mod signals;
mod views;

use std::{
    future::Future,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use bson::{Document, doc};
use mongodb::{
    Client, Collection, Database,
    error::{Error, ErrorKind},
    options::ClientOptions,
};

pub(crate) use self::jobs::id_of;
pub use self::{
    bundles::Progress,
    connect::{ConnectArgs, ConnectError, DEFAULT_DATABASE},
    jobs::{CommitSession, LockedJobs, Retrial, Start, ToStart},
    lease::{Lease, Observed},
    outcome::{Archival, BATCH_BYTES, End, Recorded, Rescheduling},
    roster::{Announcement, Assignment, Beat, Free},
    search::{DueJob, DueJobs, Lane, Position},
    select::{JobFilter, JobPlace, LOOK_LIMIT, Listed, Match, Page, Walk, lossy},
    signals::{Channel, EVERY_GROUP, Hint, Hints, Listener},
    views::{COUNTED, Finished, SAMPLED, StoredJob, Waiting},
};
use crate::{
    clock::{ServerClock, Uptime},
    instant::Instant,
    job::CorruptJob,
    telemetry::of_mongodb,
};

/// Longest time that one call may take before it counts as lost. Longer than a failover needs, shorter than a lease.
const CALL_LIMIT: Duration = Duration::from_secs(10);
/// How long MongoDB itself waits for a majority: it gives the call up before we do, so that no connection waits on.
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
    /// How its connections were made, for further ones of the same kind; nothing when the application has made them.
    options: Option<Arc<ClientOptions>>,
    /// Whether a missing index is created again: not by a store that only reads, or that is on the application's own client.
    may_mend: bool,
    /// Whether the schema is known to exist.
    is_set_up: Arc<AtomicBool>,
}

/// What the driver says, in plain words: its own are a dump of everything that it knows.
#[derive(Clone, Debug)]
pub struct DriverError(Error);

impl std::fmt::Display for DriverError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&of_mongodb(&self.0))
    }
}

impl std::error::Error for DriverError {}

impl From<Error> for DriverError {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

/// For whoever wants to know more.
impl std::ops::Deref for DriverError {
    type Target = Error;

    fn deref(&self) -> &Error {
        &self.0
    }
}

/// A call that did not do what it should. Losing a race is no error: operations say that in what they return.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// MongoDB refused, or could not be reached.
    #[error("MongoDB did not carry out `{operation}`")]
    Mongo {
        /// Which operation.
        operation: &'static str,
        /// What the driver says.
        source: DriverError,
    },
    /// No answer in time. Whether the operation was carried out is not known.
    #[error("MongoDB gave no answer to `{operation}` within {} s", CALL_LIMIT.as_secs())]
    TimedOut {
        /// Which operation.
        operation: &'static str,
    },
    /// A document is not what its collection should hold.
    #[error("`{operation}` found a document it cannot use")]
    Corrupt {
        /// Which operation.
        operation: &'static str,
        /// What is wrong with it.
        source: CorruptJob,
    },
}

/// The reply says that the document, not the connection or the server, is at fault: bad values, types, names and keys,
/// nesting, sizes, the validator, a key that is there already.
const DOCUMENT_FAULTS: [i32; 21] =
    [2, 9, 14, 15, 16, 20, 22, 28, 52, 56, 57, 121, 257, 388, 10334, DUPLICATE_KEY, 15947, 17280, 17419, 17420, 51108];
/// A read took longer than it was given.
const TOO_SLOW: i32 = 50;
/// A unique index has this key already.
const DUPLICATE_KEY: i32 = 11_000;

impl StoreError {
    /// Whether the same call can succeed later without anything else being changed: the connection or the server
    /// is at fault, not what was asked.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::TimedOut { .. } => true,
            Self::Corrupt { .. } => false,
            Self::Mongo { source, .. } => !is_document_fault(source),
        }
    }

    /// Whether a unique index has a key of it already.
    fn is_duplicate(&self) -> bool {
        matches!(self, Self::Mongo { source, .. } if code_of(source) == Some(DUPLICATE_KEY))
    }

    /// Whether MongoDB gave a read up because it took too long.
    pub fn is_too_slow(&self) -> bool {
        matches!(self, Self::Mongo { source, .. } if code_of(source) == Some(TOO_SLOW))
    }

    /// Whether MongoDB said that the user may not do this.
    pub fn is_unauthorized(&self) -> bool {
        matches!(self, Self::Mongo { source, .. } if code_of(source) == Some(13))
    }
}

fn is_document_fault(error: &Error) -> bool {
    matches!(error.kind.as_ref(), ErrorKind::Bson(_) | ErrorKind::BsonSerialization(_) | ErrorKind::InvalidArgument { .. })
        || code_of(error).is_some_and(|code| DOCUMENT_FAULTS.contains(&code))
}

/// The code of the first refusal in an error, wherever the driver puts it.
fn code_of(error: &Error) -> Option<i32> {
    if let ErrorKind::Command(command) = error.kind.as_ref() {
        Some(command.code)
    } else if let ErrorKind::InsertMany(many) = error.kind.as_ref() {
        // Whether what was written lasts comes first: it is asked again whatever else was wrong.
        if let Some(concern) = &many.write_concern_error {
            return Some(concern.code);
        }
        many.write_errors.as_ref().and_then(|errors| errors.first()).map(|error| error.code)
    } else if let ErrorKind::Write(mongodb::error::WriteFailure::WriteError(error)) = error.kind.as_ref() {
        Some(error.code)
    } else {
        None
    }
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

    /// Carries out a read that names its index. One that is not there is made again, and the next such read is served.
    async fn indexed<T: Send + 'static>(
        &self,
        operation: &'static str,
        future: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, StoreError> {
        let result = call(operation, future).await;
        if let Err(error) = &result
            && indexes::is_index_missing(error)
            && self.may_mend
        {
            tracing::warn!(error = crate::telemetry::chain(error), "an index is missing; making it again");
            indexes::mend(self, None).await?;
        }
        result
    }

    /// Drops the indexes of an earlier release that this one has replaced. For the recruiter that leads: until then one of the earlier
    /// release may lead, which needs them.
    ///
    /// # Errors
    /// When MongoDB refuses or cannot be reached.
    pub async fn drop_outdated_indexes(&self) -> Result<(), StoreError> {
        indexes::drop_outdated_indexes(self).await
    }

    /// Carries out one command that writes; returns how many documents it met. Whoever asks must know how to go on when its outcome
    /// is unknown: the driver, which repeats writes of its own making, does not repeat this one, and MongoDB need not remember it.
    async fn write(&self, operation: &'static str, command: Document) -> Result<usize, StoreError> {
        let database = self.database.clone();
        call(operation, async move {
            let reply = database.run_command(command).await?;
            write_errors(&reply)?;
            Ok(reply.get_i32("n").ok().and_then(|met| usize::try_from(met).ok()).unwrap_or(0))
        })
        .await
    }

    /// The same for what may be carried out twice: once more, at once, if it failed.
    async fn write_repeatable(&self, operation: &'static str, command: impl Fn() -> Document) -> Result<usize, StoreError> {
        match self.write(operation, command()).await {
            Err(StoreError::Mongo { .. }) => self.write(operation, command()).await,
            other => other,
        }
    }
}

/// Carries out one operation within [`CALL_LIMIT`].
///
/// In a task of its own, because the driver's futures should not be dropped half-way: a call that takes too long is
/// left to end by itself, and the caller goes on not knowing its outcome.
async fn call<T: Send + 'static>(
    operation: &'static str,
    future: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Result<T, StoreError> {
    match tokio::time::timeout(CALL_LIMIT, tokio::spawn(future)).await {
        Ok(Ok(Ok(value))) => Ok(value),
        Ok(Ok(Err(source))) => Err(StoreError::Mongo { operation, source: source.into() }),
        Ok(Err(died)) => match died.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is shutting down; nobody waits for this answer any more.
            Err(_) => Err(StoreError::TimedOut { operation }),
        },
        Err(_) => Err(StoreError::TimedOut { operation }),
    }
}

/// A refusal that a command reported inside an otherwise successful reply.
fn write_errors(reply: &Document) -> Result<(), Error> {
    let failed = |key: &str| reply.get_array(key).is_ok_and(|errors| !errors.is_empty());
    if failed("writeErrors") || reply.contains_key("writeConcernError") {
        let first = reply.get_array("writeErrors").ok().and_then(|errors| errors.first()).and_then(bson::Bson::as_document);
        let refusal = first.or_else(|| reply.get_document("writeConcernError").ok()).cloned().unwrap_or_default();
        let command: mongodb::error::CommandError = bson::deserialize_from_document(doc! {
            "code": refusal.get_i32("code").unwrap_or(0),
            "codeName": refusal.get_str("codeName").unwrap_or("WriteError"),
            "errmsg": refusal.get_str("errmsg").unwrap_or("the write was refused"),
        })
        .map_err(Error::custom)?;
        return Err(ErrorKind::Command(command).into());
    }
    Ok(())
}

/// Cuts what is to be sent into batches of at most so many, and so many bytes unless a single one has more.
pub(crate) fn cut<T>(items: Vec<T>, most: usize, most_bytes: usize, size: impl Fn(&T) -> usize) -> Vec<Vec<T>> {
    let mut batches: Vec<Vec<T>> = Vec::new();
    let mut bytes = 0;
    for item in items {
        let more = size(&item);
        match batches.last_mut() {
            Some(batch) if batch.len() < most && bytes + more <= most_bytes => {
                bytes += more;
                batch.push(item);
            }
            _ => {
                bytes = more;
                batches.push(vec![item]);
            }
        }
    }
    batches
}
