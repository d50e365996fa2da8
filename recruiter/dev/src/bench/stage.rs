//! The environment of a benchmark: a MongoDB, a database of its own, and the processes.

use std::{
    collections::BTreeMap,
    env,
    fs::OpenOptions,
    thread::available_parallelism,
    time::{Duration, Instant as Monotonic},
};

use anyhow::Context as _;
use bson::{Bson, Document, doc, oid::ObjectId};
use indicatif::{ProgressBar, ProgressStyle};
use mongodb::{Collection, change_stream::ChangeStream};
use recruiter_common::{
    Keep,
    enqueue::NewJob,
    exit::Exit,
    ids::{JobId, WorkerId},
    shutdown::{Shutdown, pause},
    store::{Channel, ConnectArgs, ProcessIdentity, Registration, Store, WorkOn},
};
use tempfile::TempDir;

use super::{Setting, slow_line::SlowLine};
use crate::{
    embedded::{EmbeddedMongo, Options, find_or_fetch},
    fleet::{Fleet, Plan, Programs, tell},
};

/// Number of jobs in one call.
const BATCH: usize = 1_000;
/// Interval between two checks of the number of archived jobs.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// A benchmark without progress for this time has failed.
const STALLED_AFTER: Duration = Duration::from_secs(60);
/// Arguments of the embedded MongoDB. Its cache is smaller than five million archived jobs. It keeps no history for
/// snapshot reads, which nothing uses and which MongoDB otherwise keeps for five minutes.
const FOR_MANY_WRITES: [&str; 4] = ["--wiredTigerCacheSizeGB", "1", "--setParameter", "minSnapshotHistoryWindowInSeconds=0"];
const LOG: &str = "processes.log";
/// Metrics of each process are served at a port of its own.
const METRICS: &str = "--metrics=127.0.0.1:0";
/// A collection that only benchmarks write.
const PROBES: &str = "probes";
/// How long the server waits for a change before it returns an empty reply.
const AWAIT: Duration = Duration::from_secs(1);

/// What becomes of the jobs of a benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ends {
    /// They are archived.
    Archived,
    /// They are deleted, and these were all jobs.
    Deleted { of: u64 },
}

impl Ends {
    /// Those of `jobs` jobs, if nothing is kept of a success or all is.
    pub(super) fn of(jobs: u64, keep_failures: bool) -> Self {
        if keep_failures { Self::Deleted { of: jobs } } else { Self::Archived }
    }

    /// What such a job keeps.
    pub(super) fn keep(self) -> Keep {
        match self {
            Self::Archived => Keep::All,
            Self::Deleted { .. } => Keep::Failures,
        }
    }
}

/// Registers a worker without a process, which has free slots for empty jobs of this group.
pub(super) async fn register(store: &Store, group: &str, slots: u32) -> anyhow::Result<WorkerId> {
    let worker = Registration {
        id: WorkerId::new(),
        work_on: WorkOn::Groups([group.to_owned()].into()),
        classes: vec!["noop".into()],
        policies: Vec::new(),
        class_slots: Vec::new(),
        capacity: slots,
        lease_ms: 3_600_000,
        channel: Channel::default(),
        session: None,
        process: ProcessIdentity::of_this_process()?,
    };
    store.register(&worker).await?;
    store.make_available(worker.id, slots).await?;
    Ok(worker.id)
}

/// A MongoDB with a database of its own, on which processes can be started.
pub(super) struct Stage {
    pub(super) store: Store,
    /// The connection string for the processes.
    uri: String,
    _line: Option<SlowLine>,
    home: TempDir,
    mongo: Option<EmbeddedMongo>,
    shown: ProgressBar,
    shutdown: Shutdown,
}

impl Stage {
    /// Prepares a MongoDB with an empty database.
    pub(super) async fn set(setting: &Setting, shutdown: Shutdown) -> anyhow::Result<Self> {
        let home = tempfile::Builder::new().prefix("recruiter-bench-").tempdir().context("cannot create a temporary directory")?;
        let shown = ProgressBar::new_spinner();
        shown.set_message("starting MongoDB");
        let name = format!("recruiter_bench_{}", ObjectId::new());
        let (uri, mongo) = match &setting.on {
            Some(uri) => (ConnectArgs::to(uri).database(&name).uri, None),
            None => {
                let given = setting.mongod.clone();
                let mongod = tokio::task::spawn_blocking(move || find_or_fetch(given.as_deref(), &tell)).await??;
                let options = Options {
                    temporary: true,
                    arguments: FOR_MANY_WRITES.map(str::to_owned).into(),
                    ..Options::new(mongod, home.path().join("mongod"))
                };
                let mongo = EmbeddedMongo::start(options).await?;
                (mongo.uri_for(&name), Some(mongo))
            }
        };
        let (uri, line) = match setting.network_latency {
            None => (uri, None),
            Some(latency) => {
                let port = mongo.as_ref().context("--network-latency works only with the embedded MongoDB, not with --on")?.port();
                let line = SlowLine::to(port, latency).await?;
                (line.uri(&name), Some(line))
            }
        };
        let store = Store::connect(&ConnectArgs::to(uri.clone()), "recruiter bench").await?;
        Ok(Self { store, uri, _line: line, home, mongo, shown, shutdown })
    }

    /// Starts the processes of a benchmark, without workers.
    pub(super) async fn fleet(&self, setting: &Setting) -> anyhow::Result<Fleet> {
        self.fleet_with(setting, &[]).await
    }

    /// Starts the processes of a benchmark, with the workers, and waits until they are ready.
    pub(super) async fn ready_fleet(&self, setting: &Setting) -> anyhow::Result<Fleet> {
        let mut fleet = self.fleet(setting).await?;
        fleet.add_workers(setting.workers)?;
        fleet.ready(&self.store).await?;
        Ok(fleet)
    }

    /// Like [`fleet`](Self::fleet), with further arguments for each worker.
    pub(super) async fn fleet_with(&self, setting: &Setting, worker_arguments: &[&str]) -> anyhow::Result<Fleet> {
        self.started(setting, worker_arguments, None).await
    }

    /// Like [`fleet`](Self::fleet), with the HTTP API at this port.
    pub(super) async fn fleet_with_web(&self, setting: &Setting, port: u16) -> anyhow::Result<Fleet> {
        self.started(setting, &[], Some(port)).await
    }

    async fn started(&self, setting: &Setting, worker_arguments: &[&str], web: Option<u16>) -> anyhow::Result<Fleet> {
        let arguments = ["--builtins".into(), format!("--concurrency={}", setting.concurrency).into()];
        let plan = Plan {
            web,
            programs: Programs::find()?,
            workers: 0,
            recruiter_arguments: Vec::new(),
            worker_arguments: arguments.into_iter().chain(worker_arguments.iter().map(Into::into)).collect(),
            log_arguments: ["--log=warn"].into_iter().chain(setting.metrics.then_some(METRICS)).map(Into::into).collect(),
            log: Some(OpenOptions::new().append(true).create(true).open(self.home.path().join(LOG))?),
            pass_settings: false,
        };
        self.shown.set_message("starting the processes");
        let mut fleet = Fleet::start(plan, self.uri.clone())?;
        fleet.ready(&self.store).await?;
        Ok(fleet)
    }

    /// Enqueues these jobs. Returns the duration.
    pub(super) async fn enqueue(&self, jobs: u64, job: impl Fn(u64) -> NewJob) -> anyhow::Result<Duration> {
        self.progress("enqueued", jobs);
        let begun = Monotonic::now();
        let numbers: Vec<u64> = (0..jobs).collect();
        for batch in numbers.chunks(BATCH) {
            self.go_on()?;
            self.store.enqueue_many(batch.iter().map(|number| job(*number))).await?;
            self.shown.inc(batch.len() as u64);
        }
        Ok(begun.elapsed())
    }

    /// Waits until a majority has at least `jobs` archived jobs. Returns the time.
    pub(super) async fn until_archived(&self, fleet: &mut Fleet, jobs: u64) -> anyhow::Result<Monotonic> {
        self.until_ended(fleet, jobs, Ends::Archived).await
    }

    /// Waits until at least `jobs` jobs have ended, and a majority knows it. Returns the time.
    pub(super) async fn until_ended(&self, fleet: &mut Fleet, jobs: u64, ends: Ends) -> anyhow::Result<Monotonic> {
        self.progress("ended", jobs);
        let mut moved = (0, Monotonic::now());
        loop {
            self.go_on()?;
            let ended = self.estimated(ends).await?;
            self.shown.set_position(ended);
            if ended >= jobs {
                // When a majority has this write, it has all earlier writes as well. The time of counting must not be
                // included.
                self.insert_probe().await?;
                let at = Monotonic::now();
                if self.ended_by_majority(ends).await? >= jobs {
                    return Ok(at);
                }
            }
            if ended != moved.0 {
                moved = (ended, Monotonic::now());
            }
            if let Some(ended) = fleet.tend()?.first() {
                anyhow::bail!("{ended}\n{}", self.log());
            }
            anyhow::ensure!(moved.1.elapsed() < STALLED_AFTER, "{ended} of {jobs} jobs have ended, and no more follow\n{}", self.log());
            pause(LOOK_EVERY).await;
        }
    }

    /// The number of ended jobs by the counts that MongoDB keeps.
    async fn estimated(&self, ends: Ends) -> anyhow::Result<u64> {
        Ok(match ends {
            Ends::Archived => self.store.archived_count().await?,
            Ends::Deleted { of } => of.saturating_sub(self.collection("scheduled").estimated_document_count().await?),
        })
    }

    async fn ended_by_majority(&self, ends: Ends) -> anyhow::Result<u64> {
        Ok(match ends {
            Ends::Archived => self.collection("archived").count_documents(doc! {}).await?,
            Ends::Deleted { of } => of.saturating_sub(self.collection("scheduled").count_documents(doc! {}).await?),
        })
    }

    #[expect(clippy::disallowed_methods, reason = "a benchmark's operations on its own database are not operations of a process")]
    fn collection(&self, name: &str) -> Collection<Document> {
        self.store.database().collection(name)
    }

    /// Deletes every job.
    pub(super) async fn empty(&self) -> anyhow::Result<()> {
        for name in ["scheduled", "archived"] {
            self.collection(name).delete_many(doc! {}).await?;
        }
        Ok(())
    }

    /// Makes MongoDB write its cache to disk, so that this does not disturb the next measurement.
    pub(super) async fn settle(&self) -> anyhow::Result<()> {
        self.store.database().client().database("admin").run_command(doc! { "fsync": 1 }).await?;
        Ok(())
    }

    /// Any job of the archive, as stored.
    pub(super) async fn any_archived(&self) -> anyhow::Result<Document> {
        self.collection("archived").find_one(doc! {}).await?.context("nothing was archived")
    }

    /// Inserts a job that no library has written. Returns its id once a majority has it.
    pub(super) async fn insert_scheduled(&self, job: Document) -> anyhow::Result<JobId> {
        let id = JobId::from(job.get_object_id("_id")?);
        self.collection("scheduled").insert_one(job).await?;
        Ok(id)
    }

    /// Inserts documents into the archive that no worker has written.
    pub(super) async fn insert_archived(&self, documents: Vec<Document>) -> anyhow::Result<()> {
        self.collection("archived").insert_many(documents).ordered(false).await?;
        Ok(())
    }

    /// A stream of the next inserts into the archive and the probes, reported once a majority has them.
    pub(super) async fn watch(&self) -> anyhow::Result<ChangeStream<Document>> {
        let inserted = doc! { "operationType": "insert", "ns.coll": { "$in": ["archived", PROBES] } };
        let pipeline = [doc! { "$match": inserted }, doc! { "$project": { "documentKey": 1 } }];
        Ok(self.store.database().watch().pipeline(pipeline).max_await_time(AWAIT).await?.with_type())
    }

    /// The results of the archived jobs that have one: the times when they were entered.
    pub(super) async fn told(&self) -> anyhow::Result<Vec<i64>> {
        let mut found =
            self.collection("archived").find(doc! { "result": { "$type": "long" } }).projection(doc! { "_id": 0, "result": 1 }).await?;
        let mut told = Vec::new();
        while found.advance().await? {
            told.push(found.deserialize_current()?.get_i64("result")?);
        }
        Ok(told)
    }

    /// Whether, by a majority read, no job of this class is left to run.
    pub(super) async fn none_left_of(&self, class: &str) -> anyhow::Result<bool> {
        Ok(self.collection("scheduled").find_one(doc! { "workable.class": class }).projection(doc! { "_id": 1 }).await?.is_none())
    }

    /// Inserts a document that no process reads.
    pub(super) async fn insert_probe(&self) -> anyhow::Result<()> {
        self.collection(PROBES).insert_one(doc! { "_id": ObjectId::new() }).await?;
        Ok(())
    }

    /// Number of commands that MongoDB has executed since its start, by name.
    pub(super) async fn commands(&self) -> anyhow::Result<BTreeMap<String, i64>> {
        let server = self.store.database().client().database("admin").run_command(doc! { "serverStatus": 1 }).await?;
        let commands = server.get_document("metrics")?.get_document("commands")?;
        let total = |count: &Bson| count.as_document()?.get_i64("total").ok();
        Ok(commands.iter().filter_map(|(name, count)| Some((name.clone(), total(count)?))).collect())
    }

    /// The process id of mongod, if it is embedded.
    pub(super) fn mongod(&self) -> Option<u32> {
        self.mongo.as_ref().map(EmbeddedMongo::pid)
    }

    /// The type of the file system with mongod's data, if it is embedded. On some types fsync costs nothing.
    fn file_system(&self) -> Option<String> {
        self.mongo.as_ref()?;
        let home = self.home.path().canonicalize().ok()?;
        let mounts = procfs::process::Process::myself().and_then(|this| this.mountinfo()).ok()?;
        let holds = mounts.into_iter().filter(|mount| home.starts_with(&mount.mount_point));
        holds.max_by_key(|mount| mount.mount_point.components().count()).map(|mount| mount.fs_type)
    }

    /// Size of the archive and of MongoDB's cache, in bytes.
    pub(super) async fn archive_size(&self) -> anyhow::Result<Document> {
        let database = self.store.database();
        let archive = database.run_command(doc! { "collStats": "archived" }).await?;
        let server = database.run_command(doc! { "serverStatus": 1 }).await?;
        let cache = server.get_document("wiredTiger").and_then(|engine| engine.get_document("cache"));
        Ok(doc! {
            "bytes": archive.get("size").cloned(),
            "cache_bytes": cache.ok().and_then(|cache| cache.get("maximum bytes configured").cloned()),
        })
    }

    /// Returns an error if a stop of the benchmark was requested.
    pub(super) fn go_on(&self) -> anyhow::Result<()> {
        if self.shutdown.is_requested() {
            return Err(anyhow::anyhow!("stopped by a signal before the end").context(Exit::Aborted));
        }
        Ok(())
    }

    pub(super) fn progress(&self, what: &str, of: u64) {
        let template = format!("{{wide_bar}} {{pos}}/{{len}} {what}  {{elapsed}}");
        self.shown.set_style(ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar()));
        self.shown.set_length(of);
        self.shown.set_position(0);
    }

    pub(super) fn advance(&self, count: u64) {
        self.shown.inc(count);
    }

    /// Waits for this time, and shows the milliseconds that have passed.
    pub(super) async fn wait(&self, what: &str, time: Duration) -> anyhow::Result<()> {
        self.progress(what, u64::try_from(time.as_millis())?);
        let begun = Monotonic::now();
        while let Some(left) = time.checked_sub(begun.elapsed()).filter(|left| !left.is_zero()) {
            self.go_on()?;
            let some = left.min(LOOK_EVERY);
            pause(some).await;
            self.advance(u64::try_from(some.as_millis())?);
        }
        Ok(())
    }

    /// The log of the processes.
    fn log(&self) -> String {
        std::fs::read_to_string(self.home.path().join(LOG)).unwrap_or_default()
    }

    /// The conditions of the measurement.
    pub(super) async fn conditions(&self, setting: &Setting) -> anyhow::Result<Document> {
        let build = self.store.database().run_command(doc! { "buildInfo": 1 }).await?;
        let embedded = || format!("embedded, one member, on loopback, {}", FOR_MANY_WRITES.join(" "));
        let server = if self.mongo.is_some() { embedded() } else { "given".into() };
        Ok(doc! {
            "recruiter": env!("CARGO_PKG_VERSION"),
            "mongodb": build.get_str("version").unwrap_or("unknown"),
            "server": server,
            "durability": "majority, journaled",
            "write_concern": "jobs w: majority, j: true; hints, assignments and free slots w: 1",
            "file_system": self.file_system(),
            "network_latency_ms": setting.network_latency.unwrap_or_default().as_secs_f64() * 1_000.0,
            "cores": i64::try_from(available_parallelism()?.get())?,
            "processes": format!("1 recruiter, 1 cleaner, {} workers of {} slots", setting.workers, setting.concurrency),
            "build": if cfg!(debug_assertions) { "debug: build with --release to measure" } else { "release" },
        })
    }

    /// Ends an embedded MongoDB; otherwise drops the database.
    pub(super) async fn clear(self) -> anyhow::Result<()> {
        self.shown.finish_and_clear();
        match self.mongo {
            // Its data is deleted with it.
            Some(mongo) => mongo.stop().await?,
            None => self.store.database().drop().await?,
        }
        Ok(())
    }
}
