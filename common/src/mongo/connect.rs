//! Connects to MongoDB: sets the connection's options, and checks that the server can run the protocol.
//!
//! Every configuration that could lose or block jobs later is refused here. Each error message contains the remedy.

use super::{
    Client, ConnectError, MAJORITY_LIMIT, Store, StoreError, call, code_of,
    connect_error::{OLDEST_SERVER, invalid},
    schema,
    schema::BUCKET,
    tls, uri,
};
use crate::base::{Patience, Uptime, causes, clock::ServerClock, pause};
use std::{
    sync::{
        Arc, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use backon::{ConstantBuilder, Retryable as _};
use bson::{Document, doc};
use futures_util::future::join_all;
use mongodb::{
    ClientSession, Database, ServerType,
    error::{Error, ErrorKind},
    event::{EventHandler, command::CommandEvent, sdam::SdamEvent},
    options::{
        Acknowledgment, ClientOptions, ConnectionString, DatabaseOptions, GridFsBucketOptions, HostInfo, ReadConcern, ReadPreference,
        SelectionCriteria, ServerAddress, Tls, TlsOptions, TransactionOptions, WriteConcern,
    },
};
use tokio::time::timeout;

/// The database if the connection string names none.
pub const DEFAULT_DATABASE: &str = "recruiter";
/// How long an operation waits for a primary. Most failovers are shorter, so they cause no errors.
const SELECTION_LIMIT: Duration = Duration::from_secs(8);
/// Maximum duration of one connection attempt at the start, before its failure is logged.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(2);
/// How often the driver checks each member. A member that hangs with open sockets is detected after this time plus
/// [`ATTEMPT_LIMIT`], which is less than the limit of one call. The driver's default of 10 seconds is too long.
const MONITOR_EVERY: Duration = Duration::from_secs(5);
/// Maximum number of connections, also if the connection string has no limit (`maxPoolSize=0`, see `uri`). However many jobs a process
/// runs, it has only a few calls in flight at any time.
const MAX_POOL_SIZE: u32 = 20;
/// Minimum that the protocol needs: one connection always listens for hints, and one carries a transaction.
const LEAST_POOL_SIZE: u32 = 3;
/// Time after which an unused connection is closed. An outage opens many at once.
const MAX_IDLE: Duration = Duration::from_secs(60);

/// The connection to MongoDB.
#[derive(Clone)]
#[cfg_attr(feature = "process", derive(clap::Args), command(next_help_heading = "MongoDB", about = None, long_about = None, mut_args = crate::base::flags::unless_empty))]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub struct ConnectArgs {
    /// Connection string; its path names the database. Prefer the environment variable: flags are visible to every
    /// user of the machine
    #[cfg_attr(
        feature = "process",
        arg(
            long,
            global = true,
            env = "MONGODB_URI",
            hide_env_values = true,
            value_name = "URI",
            default_value = "mongodb://127.0.0.1:27017/recruiter"
        )
    )]
    pub uri: String,
    /// Begin of the names of all collections, for a database that an application uses as well, for example `jobs_`. The same for every
    /// process
    #[cfg_attr(
        feature = "process",
        arg(
            long,
            global = true,
            env = "RECRUITER_COLLECTION_PREFIX",
            value_name = "PREFIX",
            default_value = "",
            hide_default_value = true
        )
    )]
    pub collection_prefix: String,
    /// Maximum wait for MongoDB at the start [default: 30s; 5s for read-only commands]
    #[cfg_attr(
        feature = "process",
        arg(long, global = true, env = "RECRUITER_CONNECT_TIMEOUT", value_name = "DURATION", value_parser = humantime::parse_duration)
    )]
    pub connect_timeout: Option<Duration>,
    /// Called with each command that is sent and each reply that arrives, for tracing and for tests that inject faults.
    /// The driver waits for the call, so it must not block
    #[cfg_attr(feature = "process", arg(skip))]
    pub commands: Option<EventHandler<CommandEvent>>,
}

/// Default of the time that a start waits for MongoDB.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// The same for a read-only command, whose user is waiting.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);

impl ConnectArgs {
    /// Connects with this connection string, and defaults for the rest.
    pub fn to(uri: impl Into<String>) -> Self {
        Self { uri: uri.into(), collection_prefix: String::new(), connect_timeout: None, commands: None }
    }

    /// Sets how long a start waits for MongoDB; the default is 30 s.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = Some(timeout);
        self
    }

    /// Sets the begin of the names of all collections, for a database that an application uses as well, for example `jobs_`. Every process
    /// must have the same. At most 64 letters, digits, `_`, `-` and `.`, of which the first is a letter or `_`.
    #[must_use]
    pub fn collection_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.collection_prefix = prefix.into();
        self
    }

    /// Checks the connection string and the prefix. Nothing is connected.
    ///
    /// # Errors
    /// [`ConnectError`], whose message contains the remedy.
    pub fn check(&self) -> Result<(), ConnectError> {
        let (uri, _) = uri::without_foreign_options(&self.uri)?;
        ConnectionString::parse(&uri).map_err(invalid)?;
        checked_prefix(&self.collection_prefix).map(drop)
    }

    /// Sets the database, in place of the one that the connection string names. The database of the user stays the same.
    #[must_use]
    pub fn database(mut self, name: &str) -> Self {
        self.uri = with_database(&self.uri, name);
        self
    }
}

impl From<&str> for ConnectArgs {
    fn from(uri: &str) -> Self {
        Self::to(uri)
    }
}

impl From<String> for ConnectArgs {
    fn from(uri: String) -> Self {
        Self::to(uri)
    }
}

impl From<&ConnectArgs> for ConnectArgs {
    fn from(args: &ConnectArgs) -> Self {
        args.clone()
    }
}

impl std::fmt::Debug for ConnectArgs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConnectArgs").field("connect_timeout", &self.connect_timeout).finish_non_exhaustive()
    }
}

/// The connection string with another database, and with the same authentication database.
fn with_database(uri: &str, name: &str) -> String {
    let (address, options) = uri.trim().split_once('?').unwrap_or((uri.trim(), ""));
    let (scheme, address) = address.split_once("://").unwrap_or(("", address));
    let (hosts, database) = address.split_once('/').unwrap_or((address, ""));
    let mut options: Vec<String> = options.split('&').filter(|option| !option.is_empty()).map(str::to_owned).collect();
    if !database.is_empty() && hosts.contains('@') && !options.iter().any(|option| option.to_lowercase().starts_with("authsource=")) {
        options.push(format!("authSource={database}"));
    }
    let options = if options.is_empty() { String::new() } else { format!("?{}", options.join("&")) };
    format!("{scheme}://{hosts}/{name}{options}")
}

impl Client {
    /// Connects, waits for a primary, checks that it can run the protocol, and creates missing
    /// collections, validators and indexes.
    ///
    /// The connection string names the database (`recruiter` if it names none). `app_name` is the name of this program, which MongoDB shows
    /// in its logs and in `currentOp`.
    ///
    /// # Errors
    /// [`ConnectError`], whose message contains the remedy.
    pub async fn connect(to: impl Into<ConnectArgs>, app_name: &str) -> Result<Self, ConnectError> {
        let to = to.into();
        let (store, hosts) = Self::reach(&to, app_name, CONNECT_TIMEOUT).await?;
        store.set_up(hosts, to.connect_timeout.unwrap_or(CONNECT_TIMEOUT)).await?;
        Ok(store)
    }

    /// A client on the application's own driver, for enqueueing in the application's own transactions
    /// ([`NewJob::enqueue_in`](crate::enqueue::NewJob::enqueue_in)). Nothing is sent before the first call.
    ///
    /// The driver's settings do not matter: write concern, read concern and read preference are set for each operation.
    /// Three settings exist only per driver, and the client works without them:
    ///
    /// - *Retryable writes* are on unless the connection string says `retryWrites=false`. Then an enqueueing call can fail in a failover
    ///   with an unknown outcome; repeat it under [`NewJob::with_id`](crate::enqueue::NewJob::with_id). Transactions do not depend on it.
    /// - *Connections*: an enqueueing call uses at most two at a time, and works with one. No connection is kept
    ///   between calls.
    /// - *Notice of failovers*: without it the server's clock is read every 5 seconds instead of every 30.
    ///
    /// The schema (collections, validators, indexes) is not created automatically. Without it an enqueueing call fails
    /// with [`EnqueueError::NotSetUp`](crate::enqueue::EnqueueError::NotSetUp). [`Client::ensure_schema`] creates it,
    /// and so does the start of a recruiter, cleaner or worker, and the first limit, file or message. What changes or removes something finds
    /// nothing without it.
    ///
    /// ```no_run
    /// use recruiter_common::{Client, enqueue::NewJob};
    ///
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// let driver = mongodb::Client::with_uri_str("mongodb://127.0.0.1:27017/?replicaSet=rs0").await?;
    /// let client = Client::from_database(driver.database("jobs"));
    /// client.ensure_schema().await?;
    ///
    /// let orders = driver.database("shop").collection("orders");
    /// let invoice = NewJob::of_class("SendInvoice", bson::doc! { "order": 17 }).in_group("mail");
    /// let jobs = client.clone();
    /// let order = async move |session: &mut mongodb::ClientSession| {
    ///     orders.insert_one(bson::doc! { "_id": 17 }).session(&mut *session).await?;
    ///     Ok(invoice.clone().enqueue_in(&jobs, session).await?)
    /// };
    /// // Runs it again when MongoDB asks for that, after a conflict or in a failover.
    /// driver.start_session().await?.start_transaction().and_run2(order).await?;
    /// client.announce_jobs(["mail"]).await;
    /// # Ok(())
    /// # }
    /// ```
    pub fn from_database(database: Database) -> Self {
        let clock = Arc::new(ServerClock::without_notice_of_failovers());
        Self { may_mend: false, ..Self::over(database.client().clone(), database.name(), Arc::default(), clock, None) }
    }

    /// The same client with another begin of the names of all collections ([`ConnectArgs::collection_prefix`]), so that jobs live beside
    /// the application's own collections. Every process of the job system must have the same.
    ///
    /// # Errors
    /// [`ConnectError::InvalidPrefix`].
    ///
    /// ```no_run
    /// # async fn example(driver: mongodb::Client) -> Result<(), Box<dyn std::error::Error>> {
    /// use recruiter_common::Client;
    ///
    /// let client = Client::from_database(driver.database("shop")).with_collection_prefix("jobs_")?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_collection_prefix(self, prefix: &str) -> Result<Self, ConnectError> {
        let prefix = checked_prefix(prefix)?;
        let (driver, clock, options) = (self.driver, self.clock, self.options);
        Ok(Self { may_mend: self.may_mend, ..Self::over(driver, self.database.name(), prefix, clock, options) })
    }

    /// The begin of the names of all collections; empty by default.
    pub fn collection_prefix(&self) -> &str {
        &self.prefix
    }

    /// Checks that the server can run the protocol, and creates missing collections, validators and indexes. For a
    /// client on the application's own driver ([`Client::from_database`]); [`Client::connect`] does the same by itself.
    /// Needs the role `readWrite`, or one of those that `shell/roles.js` makes: without the right to create it waits for a while until a
    /// recruiter has.
    ///
    /// # Errors
    /// [`ConnectError`], whose message contains the remedy.
    pub async fn ensure_schema(&self) -> Result<(), ConnectError> {
        let ask = |command: &'static str| {
            let database = self.database.clone();
            call(command, async move { database.run_command(doc! { command: 1 }).await })
        };
        let (hello, build) = (ask("hello").await?, ask("buildInfo").await?);
        let members = hello.get_array("hosts").map(|hosts| hosts.iter().filter_map(bson::Bson::as_str).collect::<Vec<_>>().join(","));
        let hosts = members.unwrap_or_else(|_| "the address of the application's client".into());
        check_server(&hello, &build, &hosts)?;
        self.set_up(hosts, schema::MADE_WITHIN).await
    }

    /// A user who may not create the schema waits for it: the processes of a machine start together.
    async fn set_up(&self, hosts: String, limit: Duration) -> Result<(), ConnectError> {
        let database = || self.database.name().to_owned();
        match schema::made_or_asked(self, schema::WHOLE, limit, || schema::ensure(self)).await {
            Err(error) if error.is_unauthorized() && self.has_no_user() => Err(ConnectError::NoUser { hosts }),
            Err(error) if error.lacks_right_of_schema() => Err(ConnectError::NoSchema { database: database(), refused: cause(&error) }),
            Err(error) if error.is_unauthorized() => Err(ConnectError::ReadOnly { database: database(), refused: cause(&error) }),
            Err(error) => Err(error.into()),
            Ok(()) => {
                self.is_set_up.store(true, Ordering::Relaxed);
                Ok(())
            }
        }
    }

    /// Called before a write that may be the first one: makes the schema if there is none.
    ///
    /// # Errors
    /// [`StoreError::Foreign`] if a collection of an application has one of our names.
    pub(crate) async fn ensure_set_up(&self) -> Result<(), StoreError> {
        if self.is_set_up().await? { Ok(()) } else { schema::ensure_made(self).await }
    }

    /// Whether the schema exists. Once it does, the answer is cached.
    pub(crate) async fn is_set_up(&self) -> Result<bool, StoreError> {
        if !self.is_set_up.load(Ordering::Relaxed) && schema::is_made(self).await? {
            self.is_set_up.store(true, Ordering::Relaxed);
        }
        Ok(self.is_set_up.load(Ordering::Relaxed))
    }

    /// Every change of what is there goes through this, while a write that may be the first one calls `ensure_set_up`. Where the schema does
    /// not exist there is nothing of Recruiter: the answer is the empty one, no document of an application is touched, and no hint makes a
    /// collection.
    ///
    /// # Errors
    /// [`StoreError::Foreign`] if a collection of an application has one of our names.
    pub(crate) async fn if_set_up<T: Default>(&self, change: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        if self.is_set_up().await? { change.await } else { Ok(T::default()) }
    }

    /// Makes the indexes of unique jobs, unless they exist. An enqueueing call does it by itself, but not in a transaction of the caller
    /// ([`NewJob::enqueue_in`](crate::enqueue::NewJob::enqueue_in)), and other languages do not. The indexes are not there from the
    /// beginning, because they cost every job some microseconds.
    ///
    /// # Errors
    /// When MongoDB refuses or cannot be reached.
    pub async fn prepare_unique_jobs(&self) -> Result<(), StoreError> {
        self.prepare(schema::Feature::Unique).await
    }

    /// Makes the index by which a cleaner finds expired jobs, unless it exists. An enqueueing call does it by itself, but not in a
    /// transaction of the caller. Without it, an expired job is archived when a worker gets it.
    ///
    /// # Errors
    /// When MongoDB refuses or cannot be reached.
    pub async fn prepare_expiring_jobs(&self) -> Result<(), StoreError> {
        self.prepare(schema::Feature::Expiry).await
    }

    pub(crate) async fn prepare(&self, feature: schema::Feature) -> Result<(), StoreError> {
        // What `metadata` says of features may be an application's.
        self.ensure_set_up().await?;
        if !self.is_in_use(feature).await? {
            schema::begin_to_use(self, feature).await?;
            self.note_in_use(feature);
        }
        Ok(())
    }

    /// Whether this database has the indexes of the feature. Once it does, the answer is cached.
    pub(crate) async fn is_in_use(&self, feature: schema::Feature) -> Result<bool, StoreError> {
        if !self.features.lock().unwrap_or_else(PoisonError::into_inner).contains(&feature) {
            for feature in schema::features_in_use(self).await? {
                self.note_in_use(feature);
            }
        }
        Ok(self.features.lock().unwrap_or_else(PoisonError::into_inner).contains(&feature))
    }

    fn note_in_use(&self, feature: schema::Feature) {
        self.features.lock().unwrap_or_else(PoisonError::into_inner).insert(feature);
    }

    fn has_no_user(&self) -> bool {
        self.options.as_ref().is_some_and(|options| options.credential.is_none())
    }

    /// A session for a transaction of the application: it commits at majority, journaled, and reads from the primary. The settings of the
    /// driver do not matter.
    ///
    /// A session that the driver itself starts uses the driver's settings. With `w: 1` a commit, and a job in it, can be rolled back by a
    /// failover.
    ///
    /// # Errors
    /// When MongoDB cannot be reached, or has no sessions. The error is the driver's, so that `?` works in a transaction as well.
    pub async fn start_session(&self) -> Result<ClientSession, Error> {
        let concerns = TransactionOptions::builder().read_concern(ReadConcern::majority()).write_concern(our_write_concern());
        let concerns = concerns.selection_criteria(primary()).build();
        self.driver.start_session().default_transaction_options(concerns).await
    }

    /// Connects and checks the server. Also returns its hosts. Writes nothing.
    async fn reach(args: &ConnectArgs, app_name: &str, usual: Duration) -> Result<(Self, String), ConnectError> {
        let clock = Arc::new(ServerClock::default());
        let (uri, ignored) = uri::without_foreign_options(&args.uri)?;
        for uri::Ignored { option, why } in ignored {
            tracing::warn!(option, "ignoring an option of the MongoDB connection string: {why}");
        }
        let uri = ConnectionString::parse(&uri).map_err(invalid)?;
        let prefix = checked_prefix(&args.collection_prefix)?;
        let limit = args.connect_timeout.unwrap_or(usual);
        let mut start = Start { hosts: named_hosts(&uri), limit, patience: Patience::new(limit) };
        let options = start.wait(|| resolve(&uri, &start)).await?;
        let options = with_our_settings(options, args, app_name, &clock);
        tls::check_files(&options)?;
        warn_of_visible_password(&options, &args.uri);
        let hosts = listed(&options.hosts);
        start.hosts.clone_from(&hosts);
        let name = options.default_database.clone().unwrap_or_else(|| DEFAULT_DATABASE.into());
        let mut asking = options.clone();
        asking.server_selection_timeout = Some(ATTEMPT_LIMIT.min(limit / 4));
        let admin = mongodb::Client::with_options(asking.clone()).map_err(|error| tls::refused_options(error, &asking))?.database("admin");
        let hello = start.wait(|| hello(&admin, &asking, &start)).await?;
        let driver = mongodb::Client::with_options(options.clone()).map_err(invalid)?;
        let database = driver.database(&name);
        let build = start.wait(|| build_info(&database)).await?;
        check_server(&hello, &build, &hosts)?;
        let store = Self::over(driver, &name, prefix, clock, Some(Arc::new(options)));
        if let Ok(now) = hello.get_datetime("localTime") {
            store.clock.observe(now.to_chrono(), Uptime::now());
        }
        tracing::info!(mongodb.hosts = hosts, mongodb.database = name, "connected to MongoDB");
        Ok((store, hosts))
    }

    #[expect(clippy::disallowed_methods, reason = "the one place where collections are opened")]
    fn over(driver: mongodb::Client, name: &str, prefix: Arc<str>, clock: Arc<ServerClock>, options: Option<Arc<ClientOptions>>) -> Self {
        let concerns = DatabaseOptions::builder().read_concern(ReadConcern::majority()).write_concern(our_write_concern());
        let database = driver.database_with_options(name, concerns.selection_criteria(primary()).build());
        let collection = |name: &str| database.collection(&format!("{prefix}{name}"));
        Self {
            scheduled: collection("scheduled"),
            archived: collection("archived"),
            roster: collection("roster"),
            metadata: collection("metadata"),
            limits: collection("limits"),
            groups: collection("groups"),
            pauses: collection("pauses"),
            schedulers: collection("schedulers"),
            signals: collection("signals"),
            unique_periods: collection("unique_periods"),
            events: collection("events"),
            messages: collection("messages"),
            consumers: collection("consumers"),
            audit: collection("audit"),
            payloads: database.gridfs_bucket(GridFsBucketOptions::builder().bucket_name(format!("{prefix}{BUCKET}")).build()),
            payload_files: collection("payloads.files"),
            payload_chunks: collection("payloads.chunks"),
            clock,
            options,
            may_mend: true,
            is_set_up: Arc::new(AtomicBool::new(false)),
            has_audit: Arc::new(AtomicBool::new(false)),
            features: Arc::default(),
            stand_ins: Arc::default(),
            prefix,
            parts: Arc::default(),
            driver,
            database,
        }
    }
}

impl Store {
    /// As [`Client::connect`].
    pub async fn connect(to: impl Into<ConnectArgs>, app_name: &str) -> Result<Self, ConnectError> {
        Client::connect(to, app_name).await.map(Self::from)
    }

    /// Connects for reading only: needs only the role `read`, waits for a shorter time, and creates nothing.
    ///
    /// # Errors
    /// [`ConnectError`], whose message contains the remedy. [`ConnectError::NoRecruiter`] when the database has none of
    /// the collections.
    pub async fn connect_to_ask(args: &ConnectArgs, app_name: &str) -> Result<Self, ConnectError> {
        let (store, hosts) = Client::reach(args, app_name, ASK_TIMEOUT).await?;
        let database = || store.database.name().to_owned();
        match schema::is_set_up(&store).await {
            Ok(true) => {
                schema::learn_stand_ins(&store).await?;
                Ok(Client { may_mend: false, ..store }.into())
            }
            Ok(false) => Err(ConnectError::NoRecruiter { database: database(), hosts }),
            Err(error) if error.is_unauthorized() && store.has_no_user() => Err(ConnectError::NoUser { hosts }),
            Err(error) if error.is_unauthorized() => Err(ConnectError::Unreadable { database: database(), refused: cause(&error) }),
            Err(error) => Err(error.into()),
        }
    }

    /// Connects to a database that may have no schema yet. Creates nothing.
    ///
    /// # Errors
    /// [`ConnectError`], whose message contains the remedy.
    pub async fn connect_to_compare(args: &ConnectArgs, app_name: &str) -> Result<Self, ConnectError> {
        let (store, _) = Client::reach(args, app_name, ASK_TIMEOUT).await?;
        Ok(Client { may_mend: false, ..store }.into())
    }

    /// What a start of this release would change in the schema of the database, or has left. Needs the role `read`.
    ///
    /// # Errors
    /// [`ConnectError`], whose message contains the remedy.
    pub async fn schema_changes(&self) -> Result<Vec<schema::Change>, ConnectError> {
        let hosts = || self.options.as_deref().map(|options| listed(&options.hosts)).unwrap_or_default();
        match schema::changes(self).await {
            Err(error) if error.is_unauthorized() && self.has_no_user() => Err(ConnectError::NoUser { hosts: hosts() }),
            Err(error) if error.is_unauthorized() => {
                Err(ConnectError::Unreadable { database: self.database.name().to_owned(), refused: cause(&error) })
            }
            other => Ok(other?),
        }
    }

    /// The same database with its own connections, so that other traffic cannot delay it. For operations that are
    /// repeated in a loop: the driver does not retry a failed write, because the next turn repeats it.
    ///
    /// # Errors
    /// When the driver refuses its options, and for a client on the application's own driver.
    pub fn with_own_connections(&self, app_name: &str) -> Result<Self, ConnectError> {
        self.with_connections(app_name, 2)
    }

    /// Like [`with_own_connections`](Self::with_own_connections), with at most so many of them.
    ///
    /// # Errors
    /// As [`with_own_connections`](Self::with_own_connections).
    pub fn with_connections(&self, app_name: &str, most: u32) -> Result<Self, ConnectError> {
        let mut options = self.options.as_deref().cloned().ok_or(ConnectError::ForeignClient)?;
        options.app_name = Some(app_name.into());
        options.max_pool_size = Some(most);
        options.retry_writes = Some(false);
        let driver = mongodb::Client::with_options(options).map_err(invalid)?;
        let is_set_up = self.is_set_up.clone();
        let stand_ins = self.stand_ins.clone();
        Ok(Client {
            is_set_up,
            stand_ins,
            ..Client::over(driver, self.database.name(), self.prefix.clone(), self.clock.clone(), self.options.clone())
        }
        .into())
    }

    /// Makes the index that refuses a permit to a second worker, unless it exists. The leading recruiter does it before it gives the first
    /// permit.
    pub async fn prepare_limited_jobs(&self) -> Result<(), StoreError> {
        self.prepare(schema::Feature::Limits).await
    }
}

/// What MongoDB says of a refusal.
fn cause(error: &StoreError) -> String {
    causes(error).pop().unwrap_or_default()
}

/// A prefix that MongoDB accepts in the name of a collection, and that does not make it a collection of MongoDB's own.
fn checked_prefix(prefix: &str) -> Result<Arc<str>, ConnectError> {
    let is_fit = |letter: char| letter.is_ascii_alphanumeric() || "_-.".contains(letter);
    let begins_well = prefix.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_');
    let is_valid = prefix.is_empty() || (prefix.len() <= 64 && begins_well && prefix.chars().all(is_fit) && !prefix.starts_with("system."));
    if is_valid { Ok(prefix.into()) } else { Err(ConnectError::InvalidPrefix(prefix.into())) }
}

/// An acknowledged job survives a failover and a loss of power.
fn our_write_concern() -> WriteConcern {
    WriteConcern::builder().w(Acknowledgment::Majority).journal(true).w_timeout(MAJORITY_LIMIT).build()
}

/// Reads go to the primary, because a secondary may not have the process's last writes yet.
fn primary() -> SelectionCriteria {
    SelectionCriteria::ReadPreference(ReadPreference::Primary)
}

/// The hosts of a connection string, without its user.
fn named_hosts(uri: &ConnectionString) -> String {
    match &uri.host_info {
        HostInfo::HostIdentifiers(hosts) => listed(hosts),
        HostInfo::DnsRecord(name) => name.clone(),
        _ => "an unknown kind of address".into(),
    }
}

fn listed(hosts: &[ServerAddress]) -> String {
    hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// Parses a connection string. A `mongodb+srv://` string needs DNS: a resolver that does not answer is waited for like
/// a server.
async fn resolve(uri: &ConnectionString, start: &Start) -> Result<ClientOptions, ConnectError> {
    let limit = start.patience.left().max(ATTEMPT_LIMIT);
    match timeout(limit, ClientOptions::parse(uri.clone())).await {
        Ok(Ok(options)) => Ok(options),
        Ok(Err(error)) if !is_resolver_fault(&error) => Err(invalid(error)),
        // The resolver's own message does not help users.
        Ok(Err(_)) => Err(start.unreachable("its SRV record could not be found in DNS".into())),
        Err(_) => Err(start.unreachable("the DNS resolver does not answer".into())),
    }
}

/// Whether DNS itself failed, not the name that was looked up. Includes a resolver that cannot be set up, as during
/// boot.
fn is_resolver_fault(error: &Error) -> bool {
    matches!(error.kind.as_ref(), ErrorKind::DnsResolve { .. } | ErrorKind::Io(_))
}

/// The options of the connection string, and mandatory ones. Majority writes: an acknowledged job survives a failover.
/// Majority reads: no decision depends on data that a failover can roll back. Single operations may override them.
fn with_our_settings(mut options: ClientOptions, args: &ConnectArgs, app_name: &str, clock: &Arc<ServerClock>) -> ClientOptions {
    options.app_name = Some(app_name.into());
    options.command_event_handler.clone_from(&args.commands);
    let clock = Arc::clone(clock);
    options.sdam_event_handler = Some(EventHandler::callback(move |event| {
        if let SdamEvent::ServerDescriptionChanged(server) = event
            && server.new_description.server_type() == ServerType::RsPrimary
            && server.previous_description.server_type() != ServerType::RsPrimary
        {
            clock.primary_changed();
        }
    }));
    options.write_concern = Some(our_write_concern());
    options.read_concern = Some(ReadConcern::majority());
    // Overrides the connection string: a secondary may not have the process's last writes yet.
    options.selection_criteria = None;
    options.server_selection_timeout.get_or_insert(SELECTION_LIMIT);
    options.connect_timeout.get_or_insert(ATTEMPT_LIMIT);
    options.heartbeat_freq.get_or_insert(MONITOR_EVERY);
    let most = options.max_pool_size.get_or_insert(MAX_POOL_SIZE);
    if *most < LEAST_POOL_SIZE {
        tracing::warn!(
            maxPoolSize = *most,
            raised_to = LEAST_POOL_SIZE,
            "MONGODB_URI allows too few connections: one is always taken by listening for hints"
        );
        *most = LEAST_POOL_SIZE;
    }
    options.max_idle_time.get_or_insert(MAX_IDLE);
    options
}

fn warn_of_visible_password(options: &ClientOptions, uri: &str) {
    let flagged = std::env::args().any(|argument| argument.contains(uri));
    if flagged && options.credential.as_ref().is_some_and(|credential| credential.password.is_some()) {
        tracing::warn!("the password in --uri is visible to every user of this machine; pass the URI in MONGODB_URI");
    }
}

/// What a start waits for, and how long.
struct Start {
    hosts: String,
    limit: Duration,
    patience: Patience,
}

/// The pauses between the attempts of a start.
const AGAIN: ConstantBuilder = ConstantBuilder::new().with_delay(Duration::from_millis(500)).without_max_times();

impl Start {
    /// Repeats a call while its error may pass, until the time is over. Each reason is logged once.
    async fn wait<T, F: Future<Output = Result<T, ConnectError>>>(&self, call: impl FnMut() -> F) -> Result<T, ConnectError> {
        let mut logged = String::new();
        let call = call.retry(AGAIN).sleep(pause).when(|error| error.passing_reason().is_some());
        let call = call.adjust(|_, next| self.patience.shorten(next));
        call.notify(|error, _| {
            let reason = error.passing_reason().unwrap_or_default();
            if reason != logged {
                let left = humantime::format_duration(Duration::from_secs(self.patience.left().as_secs() + 1)).to_string();
                tracing::warn!(mongodb.hosts = self.hosts, left, reason, "MongoDB cannot be reached yet; waiting for it");
                logged = reason.into();
            }
        })
        .await
    }

    fn unreachable(&self, reason: String) -> ConnectError {
        ConnectError::Unreachable { hosts: self.hosts.clone(), waited: self.limit, reason }
    }
}

/// Asks a server for its state, and finds out why none answers.
async fn hello(admin: &Database, options: &ClientOptions, start: &Start) -> Result<Document, ConnectError> {
    let database = admin.clone();
    // Runs at the same time. Its result is used only if the connection fails.
    let alone = tokio::spawn(hello_alone(options.clone()));
    let hosts = start.hosts.clone();
    let failure = match call("hello", async move { database.run_command(doc! { "hello": 1 }).await }).await {
        Ok(hello) => return Ok(hello),
        Err(StoreError::Mongo { source, .. }) if refuses_credentials(&source) => return Err(refused_credentials(hosts, options)),
        Err(failure) => failure,
    };
    let alone = alone.await.ok().flatten().unwrap_or_default();
    Err(match (alone.get_str("setName"), &options.repl_set_name) {
        (Ok(found), Some(named)) if found != named => ConnectError::WrongSetName { hosts, named: named.clone(), found: found.into() },
        _ if alone.get_bool("isreplicaset").unwrap_or(false) => ConnectError::NotInitiated { hosts },
        (Err(_), Some(_)) if alone.contains_key("maxWireVersion") && !alone.contains_key("msg") => ConnectError::Standalone { hosts },
        _ => {
            let problem = match problem_of_members(&alone, options).await {
                Some(problem) => Some(problem),
                None => {
                    let answers_otherwise = hello_alone(tls::the_other_way(options)).await.is_some();
                    tls::problem(options, answers_otherwise, &failure).map(str::to_owned)
                }
            };
            match problem {
                Some(problem) => ConnectError::Unusable { hosts, problem },
                None => start.unreachable(causes(&failure).pop().unwrap_or_default()),
            }
        }
    })
}

/// Why the driver, which connects to the members that a replica set names, finds no primary although a server answers: this machine
/// cannot resolve some of these names, or none of them is the address that was asked.
async fn problem_of_members(alone: &Document, options: &ClientOptions) -> Option<String> {
    let members: Vec<&str> = alone.get_array("hosts").ok()?.iter().filter_map(bson::Bson::as_str).collect();
    let found = members.iter().map(|member| timeout(ATTEMPT_LIMIT, tokio::net::lookup_host(*member)));
    let found = join_all(found).await.into_iter().map(|found| found.is_ok_and(|found| found.is_ok()));
    let unknown: Vec<&str> = members.iter().zip(found).filter(|(_, is_found)| !is_found).map(|(member, _)| *member).collect();
    let asked = options.hosts.first()?.to_string();
    let (members, remedy) = if !unknown.is_empty() {
        (unknown, "which this machine cannot resolve; make these names known to this machine (DNS, /etc/hosts)")
    } else if options.direct_connection != Some(true) && !members.iter().any(|member| member.eq_ignore_ascii_case(&asked)) {
        (members, "where no primary answers this machine; make these addresses reachable from this machine")
    } else {
        return None;
    };
    Some(format!(
        "the server answers, but its replica set names its members {}, {remedy}, or write directConnection=true in MONGODB_URI to use only the server that it names",
        members.join(",")
    ))
}

async fn build_info(database: &Database) -> Result<Document, ConnectError> {
    let database = database.clone();
    Ok(call("buildInfo", async move { database.run_command(doc! { "buildInfo": 1 }).await }).await?)
}

/// The `hello` reply of the first host, without regard to its replica set. `None` when it does not answer.
async fn hello_alone(mut options: ClientOptions) -> Option<Document> {
    options.hosts.truncate(1);
    options.repl_set_name = None;
    options.direct_connection = Some(true);
    options.load_balanced = None;
    // A server without a replica set may have no users yet.
    options.credential = None;
    options.sdam_event_handler = None;
    options.command_event_handler = None;
    mongodb::Client::with_options(options).ok()?.database("admin").run_command(doc! { "hello": 1 }).await.ok()
}

fn refuses_credentials(error: &Error) -> bool {
    matches!(error.kind.as_ref(), ErrorKind::Authentication { .. }) || code_of(error) == Some(18)
}

fn refused_credentials(hosts: String, options: &ClientOptions) -> ConnectError {
    match &options.tls {
        Some(Tls::Enabled(TlsOptions { cert_key_file_path: Some(file), .. })) if tls::uses_x509(options) => {
            ConnectError::UnknownCertificate { hosts, file: file.clone() }
        }
        _ => ConnectError::WrongCredentials { hosts },
    }
}

/// Checks from these replies that the server can run the protocol.
fn check_server(hello: &Document, build: &Document, hosts: &str) -> Result<(), ConnectError> {
    let sharded = hello.get_str("msg").is_ok_and(|msg| msg == "isdbgrid");
    if !sharded && !hello.contains_key("setName") {
        return Err(ConnectError::Standalone { hosts: hosts.into() });
    }
    let version: Vec<i32> =
        build.get_array("versionArray").map(|parts| parts.iter().filter_map(bson::Bson::as_i32).collect()).unwrap_or_default();
    match version.as_slice() {
        [major, minor, ..] if (*major, *minor) >= OLDEST_SERVER => Ok(()),
        _ => Err(ConnectError::TooOld { hosts: hosts.into(), found: build.get_str("version").unwrap_or("unknown").into() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where the `@` is missing, the driver takes the password for a port, and its error has it.
    #[test]
    fn a_connection_string_that_is_wrong_is_not_repeated() {
        for uri in ["mongodb://ada:secret/jobs", "mongodb://ada:secreth:1,i:2/jobs", "mongodb://[secret/jobs"] {
            let said = ConnectArgs::to(uri).check().expect_err(uri).to_string();
            assert!(said.contains("the address of a server") && !said.contains("sec"), "{uri}: {said}");
        }
    }

    #[test]
    fn the_database_is_another_one_and_the_user_the_same() {
        let check = |uri: &str, expected: &str| assert_eq!(ConnectArgs::to(uri).database("b").uri, expected);
        check("mongodb://h:1", "mongodb://h:1/b");
        check("mongodb://h:1/", "mongodb://h:1/b");
        check("mongodb://h:1/a?replicaSet=rs0", "mongodb://h:1/b?replicaSet=rs0");
        check("mongodb://u:p@h:1,i:2/a?tls=true", "mongodb://u:p@h:1,i:2/b?tls=true&authSource=a");
        check("mongodb://u:p@h/a?authSource=admin", "mongodb://u:p@h/b?authSource=admin");
        check("mongodb://u:p@h", "mongodb://u:p@h/b");
        check(" mongodb://u:p@h/a\r\n", "mongodb://u:p@h/b?authSource=a");
    }

    #[tokio::test]
    async fn members_that_this_machine_cannot_reach_are_named() {
        let asked = async |uri: &str, alone: Document| problem_of_members(&alone, &ClientOptions::parse(uri).await.expect("a URI")).await;
        let hosts = |hosts: &[&str]| doc! { "hosts": hosts };
        let said = asked("mongodb://127.0.0.1:1", hosts(&["127.0.0.1:1", "no-such-host.invalid:27017"])).await.unwrap_or_default();
        assert!(
            said.contains("no-such-host.invalid:27017") && said.contains("directConnection=true") && !said.contains("127.0.0.1"),
            "{said}"
        );
        let said = asked("mongodb://127.0.0.1:2", hosts(&["127.0.0.1:1"])).await.unwrap_or_default();
        assert!(said.contains("127.0.0.1:1") && said.contains("directConnection=true"), "{said}");
        assert_eq!(asked("mongodb://LOCALHOST:1", hosts(&["127.0.0.1:3", "localhost:1"])).await, None);
        assert_eq!(asked("mongodb://127.0.0.1:2/?directConnection=true", hosts(&["127.0.0.1:1"])).await, None);
        assert_eq!(asked("mongodb://127.0.0.1:1", doc! {}).await, None);
    }

    #[test]
    fn servers_that_cannot_run_the_protocol_are_refused() {
        let check = |hello: Document, version: [i32; 3]| {
            let build = doc! { "version": format!("{}.{}.{}", version[0], version[1], version[2]), "versionArray": version.to_vec() };
            check_server(&hello, &build, "db:27017").map_err(|error| error.to_string())
        };
        assert_eq!(check(doc! { "setName": "rs0" }, [6, 0, 5]), Ok(()));
        assert_eq!(check(doc! { "msg": "isdbgrid" }, [8, 0, 0]), Ok(()));
        assert!(check(doc! {}, [6, 0, 5]).is_err_and(|text| text.contains("standalone") && text.contains("rs.initiate()")));
        assert!(check(doc! { "setName": "rs0" }, [5, 0, 31]).is_err_and(|text| text.contains("5.0.31") && text.contains("6.0 or newer")));
    }
}
