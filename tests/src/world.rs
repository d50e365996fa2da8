//! A separate environment for each failure test: a database, a ledger, and a supervised fleet of faulty processes. The
//! supervisor restarts processes that died, as systemd would, and resumes frozen ones after a while.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    ops::Range,
    path::{Path, PathBuf},
    process::ExitStatus,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use bson::{Document, doc};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use recruiter_common::{EnqueueError, JobId, Limit, NewJob, limits::Settings, shutdown::pause, store::Store};
use tempfile::TempDir;

use crate::{
    constraints::Finished,
    faults::{FAULT, Fault, NOTES},
    ledger::{self, Event, LEDGER, Ledger, Line},
    local,
    mongo::TestDatabase,
    oracle::{self, Asked, Findings, Policy, Watch},
    processes::{Process, binary, handles_term},
    wait::SOON,
};

/// One of the three programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// `recruiter run`.
    Recruiter,
    /// `recruiter-cleaner`.
    Cleaner,
    /// A worker that keeps the ledger.
    Worker,
}

impl Role {
    /// All roles.
    pub const ALL: [Role; 3] = [Role::Recruiter, Role::Cleaner, Role::Worker];

    fn name(self) -> &'static str {
        match self {
            Self::Recruiter => "recruiter",
            Self::Cleaner => "cleaner",
            Self::Worker => "worker",
        }
    }

    /// Flags that shorten the intervals, so that a test takes seconds instead of minutes.
    pub fn quick(self) -> &'static [&'static str] {
        match self {
            Self::Recruiter => &["--lease", "1500ms", "--poll", "400ms"],
            Self::Cleaner => {
                &["--dead-after", "1500ms", "--every", "150ms", "--sweep-every", "500ms", "--prune-every", "500ms", "--keep-archived", "1d"]
            }
            Self::Worker => &["--heartbeat", "250ms", "--lease", "900ms", "--grace", "1s", "--poll", "400ms"],
        }
    }
}

/// How long a frozen process stays frozen: longer than it takes to declare it dead and to take over its lease.
pub const FROZEN_FOR: Duration = Duration::from_millis(3_000);
/// Interval between two checks of the supervisor.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Log messages of a worker that leaves work to the cleaner: a thread of a job did not end, MongoDB did not delete its
/// document, or it had been declared dead before.
const EXCUSES: [&str; 3] = ["not everything ended in time", "could not leave the roster", "declared dead"];
/// Maximum duration of a stop.
const STOP_WITHIN: Duration = SOON;

/// The three programs of this release, below `main`.
const FAULTY: &str = "examples/faulty";

/// A step of the protocol in a process of this role.
pub type Step = (Role, String);

/// One supervised process.
#[derive(Debug)]
pub struct Member {
    /// Its role.
    pub role: Role,
    /// The current process.
    pub process: Process,
    launch: Launch,
    notes: PathBuf,
    /// Faults of its substitutes: all but the first.
    later: Vec<Fault>,
    frozen: Option<Instant>,
    /// Its exit status, if it ended and is not restarted.
    ended: Option<ExitStatus>,
    /// Whether it is not restarted.
    is_retired: bool,
}

impl Member {
    /// Whether it was neither killed nor frozen since it was started.
    fn is_well(&self) -> bool {
        let struck = fs::read_to_string(self.notes.join("struck")).unwrap_or_default();
        !self.process.was_harmed() && !self.process.is_stopped() && !struck.contains("Freeze")
    }
}

/// The parameters for starting a process.
#[derive(Clone, Debug)]
struct Launch {
    role: Role,
    /// The program with the three roles.
    program: PathBuf,
    /// Its connection string.
    uri: String,
    /// The program that starts it or executes it, with its arguments, if there is one.
    by: Vec<String>,
    args: Vec<String>,
    /// Additional environment variables.
    environment: Vec<(String, String)>,
}

/// A process that has ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Its role.
    pub role: Role,
    /// Its exit status.
    pub status: ExitStatus,
    /// Its log.
    pub log: String,
}

/// A database and all processes that use it.
#[derive(Debug)]
pub struct World {
    /// The database.
    pub database: TestDatabase,
    /// A store on the database, for enqueueing and reading.
    pub store: Store,
    /// The jobs that were enqueued.
    pub asked: Asked,
    /// The supervised processes. A substitute follows the process that it substitutes.
    pub members: Vec<Member>,
    /// The processes that have ended.
    pub ended: Arc<Mutex<Vec<Ended>>>,
    directory: TempDir,
    /// Whether processes that died are restarted.
    supervised: bool,
    /// Whether frozen processes get a substitute.
    substitutes: bool,
    watch: Option<Watch>,
    /// The limits that hold all the time.
    settings: Settings,
}

impl World {
    /// A world without processes, on a database of the shared MongoDB.
    pub async fn new() -> Self {
        Self::on(TestDatabase::new().await).await
    }

    /// A world without processes, on this database.
    pub async fn on(database: TestDatabase) -> Self {
        let store = local::store(&database).await;
        Self::with_store(database, store)
    }

    /// A world without processes, on this database, where this store enqueues.
    pub fn with_store(database: TestDatabase, store: Store) -> Self {
        // Built now, while no other process of this world waits for a reply.
        binary(FAULTY);
        let directory = tempfile::Builder::new().prefix("recruiter-world-").tempdir().expect("the temporary directory is writable");
        fs::create_dir(directory.path().join("ledger")).expect("the directory is new");
        let asked = Asked::default();
        let watch = Some(Watch::begin(&database, &asked));
        Self {
            database,
            store,
            asked,
            members: Vec::new(),
            ended: Arc::default(),
            directory,
            supervised: true,
            substitutes: true,
            watch,
            settings: Settings::default(),
        }
    }

    /// The same world without substitutes for frozen processes.
    #[must_use]
    pub fn without_substitutes(mut self) -> Self {
        self.substitutes = false;
        self
    }

    /// Starts a recruiter, a cleaner that declares no living process dead, and workers with so many slots each.
    #[must_use]
    pub fn patient(mut self, slots: &[&str]) -> Self {
        self.start(Role::Recruiter, &[], &[]);
        self.start(Role::Cleaner, &["--dead-after", "10m"], &[]);
        for slots in slots {
            self.start(Role::Worker, &["--concurrency", slots, "--lease", "20s"], &[]);
        }
        self
    }

    /// Starts a process with these flags, plus the quick ones that they do not override. Returns its index among the
    /// members.
    pub fn start(&mut self, role: Role, args: &[&str], faults: &[Fault]) -> usize {
        let uri = self.database.uri().to_owned();
        self.start_at(&uri, role, args, faults)
    }

    /// Like [`start`](Self::start), with another connection string.
    pub fn start_at(&mut self, uri: &str, role: Role, args: &[&str], faults: &[Fault]) -> usize {
        let launch = Launch { uri: uri.to_owned(), ..self.launch(role, &[], args) };
        self.begin(launch, faults)
    }

    /// Like [`start`](Self::start), with this environment, for example of a [`Clock`](crate::clocks::Clock).
    pub fn start_with(&mut self, role: Role, args: &[&str], environment: &[(&str, &str)]) -> usize {
        let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let launch = Launch { environment, ..self.launch(role, &[], args) };
        self.begin(launch, &[])
    }

    /// Like [`start`](Self::start), by a program that executes it, such as `prlimit --as=…`.
    pub fn start_by(&mut self, by: &[&str], role: Role, args: &[&str]) -> usize {
        self.begin(self.launch(role, by, args), &[])
    }

    /// Like [`start`](Self::start), of another release: the path of its program with the three roles.
    pub fn start_program(&mut self, program: &Path, role: Role, args: &[&str]) -> usize {
        let launch = Launch { program: program.to_owned(), ..self.launch(role, &[], args) };
        self.begin(launch, &[])
    }

    /// Requests a stop of a process, and waits for its end. It is not restarted.
    ///
    /// # Panics
    /// When it does not end, or not cleanly.
    pub async fn retire(&mut self, index: usize) {
        self.members[index].is_retired = true;
        self.until(STOP_WITHIN, async |world| handles_term(world.members[index].process.pid())).await;
        self.members[index].process.terminate();
        assert!(self.until(STOP_WITHIN, async |world| world.members[index].ended.is_some()).await, "it does not stop\n{}", self.logs());
        assert!(self.members[index].ended.is_some_and(|status| status.success()), "{}", self.logs());
    }

    /// Starts a process without supervision, by a program that starts it or executes it.
    pub fn beside(&self, by: &[&str], role: Role, args: &[&str]) -> Process {
        let notes = self.directory.path().join("notes-beside");
        fs::create_dir_all(&notes).expect("the world's directory is writable");
        self.process(&self.launch(role, by, args), &notes, &[])
    }

    fn launch(&self, role: Role, by: &[&str], args: &[&str]) -> Launch {
        let quick = role.quick().chunks(2).filter(|flag| !args.contains(&flag[0])).flatten();
        let args = quick.chain(args).map(|arg| (*arg).to_owned()).collect();
        let by = by.iter().map(|word| (*word).to_owned()).collect();
        Launch { role, program: FAULTY.into(), uri: self.database.uri().to_owned(), by, args, environment: Vec::new() }
    }

    fn begin(&mut self, launch: Launch, faults: &[Fault]) -> usize {
        let notes = self.directory.path().join(format!("notes-{}", self.members.len()));
        fs::create_dir_all(&notes).expect("the world's directory is writable");
        let process = self.process(&launch, &notes, faults);
        let later = faults.get(1..).unwrap_or_default().to_vec();
        self.members.push(Member { role: launch.role, process, launch, notes, later, frozen: None, ended: None, is_retired: false });
        self.members.len() - 1
    }

    fn process(&self, launch: &Launch, notes: &Path, faults: &[Fault]) -> Process {
        let ledger = self.ledger_directory();
        let faults = faults.iter().map(|fault| format!("{fault}\n")).collect::<String>();
        let own = [
            ("MONGODB_URI", launch.uri.as_str()),
            (NOTES, notes.to_str().expect("a temporary directory has a plain name")),
            (LEDGER, ledger.to_str().expect("a temporary directory has a plain name")),
            (FAULT, &faults),
        ];
        let given = launch.environment.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let env: Vec<(&str, &str)> = own.into_iter().chain(given).collect();
        let args = launch.args.iter().map(String::as_str);
        let program = launch.program.to_str().expect("the path is text");
        if launch.by.is_empty() {
            return Process::start(program, &[launch.role.name()].into_iter().chain(args).collect::<Vec<_>>(), &env);
        }
        let faulty = binary(program).display().to_string();
        let words = launch.by.iter().map(String::as_str).chain([faulty.as_str(), launch.role.name()]).chain(args);
        Process::start("/usr/bin/env", &words.collect::<Vec<_>>(), &env)
    }

    fn ledger_directory(&self) -> PathBuf {
        self.directory.path().join("ledger")
    }

    /// The ledger of this process, which executes jobs itself.
    pub fn own_ledger(&self) -> Ledger {
        Ledger::within(&self.ledger_directory())
    }

    /// The ledger that the jobs have written.
    pub fn ledger(&self) -> Vec<Line> {
        ledger::read(&self.ledger_directory())
    }

    /// The jobs whose executions have begun, in this order, once for each execution.
    pub fn begun(&self) -> Vec<JobId> {
        let ledger = self.ledger();
        ledger.iter().filter(|line| line.event == Event::Begin).map(|line| line.execution().0).collect()
    }

    /// Enqueues a job. Records it before it is sent, and again when it is acknowledged.
    ///
    /// # Errors
    /// As [`NewJob::enqueue`].
    pub async fn enqueue(&self, job: NewJob, policy: Policy) -> Result<JobId, EnqueueError> {
        self.asked.enqueue(&self.store, job, policy).await
    }

    /// Enqueues so many jobs in one call. `job` gets the number of each.
    ///
    /// # Panics
    /// When MongoDB cannot be reached.
    pub async fn enqueue_many(&self, count: usize, policy: Policy, job: impl Fn(usize) -> NewJob) -> Vec<JobId> {
        let jobs: Vec<JobId> = (0..count).map(|_| JobId::new()).collect();
        jobs.iter().for_each(|id| self.asked.will_send(*id, policy));
        let all = jobs.iter().enumerate().map(|(number, id)| job(number).with_id(*id));
        self.store.enqueue_many(all).await.expect("MongoDB is there");
        jobs.iter().for_each(|id| self.asked.was_acknowledged(*id));
        jobs
    }

    /// Sets a limit that does not change any more: in the end no execution may have violated it.
    pub async fn limit(&mut self, resource: &str, limit: Limit) {
        self.store.limits().set(resource, limit).await.expect("MongoDB is there");
        self.settings.limits.insert(resource.to_owned(), limit);
    }

    /// The server's clock minus the clock of the ledger, in milliseconds: of several replies the one that took the shortest time.
    async fn clock(&self) -> i64 {
        let mut best = (i64::MAX, 0);
        // On a busy machine each reply may be slow.
        for _ in 0..100 {
            if best.0 < 20 {
                break;
            }
            let asked = ledger::monotonic_ms();
            let hello = self.database.database().run_command(doc! { "hello": 1 }).await.expect("MongoDB is there");
            let by_the_server = hello.get_datetime("localTime").expect("MongoDB says what time it is").timestamp_millis();
            best = best.min((ledger::monotonic_ms() - asked, by_the_server - asked));
        }
        best.1
    }

    /// Estimated number of jobs that are scheduled, or acknowledged and not in the archive yet.
    pub async fn unfinished(&self) -> usize {
        let waiting = usize::try_from(self.count("scheduled", doc! {}).await).unwrap_or(usize::MAX);
        if waiting > 100 {
            return waiting;
        }
        let ids = self.asked.acknowledged();
        let archived = self.database.raw("archived").count_documents(doc! { "_id": { "$in": ids.clone() } }).await;
        waiting.max(ids.len() - archived.map_or(0, |count| usize::try_from(count).unwrap_or(0)))
    }

    /// The most executions of these jobs, which have ended, at one instant.
    pub async fn most_at_once(&self, jobs: &[JobId]) -> usize {
        let archived = oracle::archived(&self.database).await;
        Finished::new(&archived, &self.ledger(), self.clock().await).most_at_once(jobs.iter().copied())
    }

    /// Kills processes at random until no job is left, or so many are killed. Between two there are so many milliseconds.
    pub async fn kill_at_random(&mut self, seed: u64, most: usize, apart_ms: Range<u64>) {
        let mut random = StdRng::seed_from_u64(seed);
        for _ in 0..most {
            self.tend();
            pause(Duration::from_millis(random.random_range(apart_ms.clone()))).await;
            if self.unfinished().await == 0 {
                return;
            }
            self.members[random.random_range(0..self.members.len())].process.kill();
        }
    }

    /// Number of jobs that are started and have not ended.
    pub async fn started(&self) -> u64 {
        self.count("scheduled", doc! { "locked": true }).await
    }

    /// A job in the archive.
    pub async fn archived(&self, job: JobId) -> Option<Document> {
        self.database.raw("archived").find_one(doc! { "_id": job }).await.expect("MongoDB is there")
    }

    /// Waits for the end of a job that is enqueued now: what could be done before it has been, or is not done.
    pub async fn later_job(&self, job: NewJob) {
        let later = self.enqueue(job, Policy::Never).await.expect("MongoDB is there");
        self.wait_for("a later job is done", async || self.archived(later).await.is_some()).await;
    }

    /// Number of documents in a collection that match.
    pub async fn count(&self, collection: &str, filter: Document) -> u64 {
        self.database.raw(collection).count_documents(filter).await.unwrap_or(0)
    }

    /// Whether this fault has struck a process of this role.
    pub fn struck(&self, role: Role, fault: &Fault) -> bool {
        let notes = self.members.iter().filter(|member| member.role == role).map(|member| member.notes.join("struck"));
        let fault = fault.to_string();
        notes.into_iter().any(|notes| fs::read_to_string(notes).unwrap_or_default().lines().any(|struck| struck == fault))
    }

    /// Every step that each role took, with the highest number of occurrences in one process, as far as they are
    /// recorded.
    pub fn steps(&self) -> BTreeMap<Step, u32> {
        let mut steps = BTreeMap::new();
        for member in &self.members {
            let mut taken: BTreeMap<&str, u32> = BTreeMap::new();
            let noted = fs::read_to_string(member.notes.join("steps")).unwrap_or_default();
            noted.lines().for_each(|step| *taken.entry(step).or_default() += 1);
            for (step, times) in taken {
                let most = steps.entry((member.role, step.to_owned())).or_default();
                *most = times.max(*most);
            }
        }
        steps
    }

    /// The operations of the store that sent commands, each with a step.
    pub fn operations(&self) -> BTreeSet<(String, Step)> {
        let noted = |member: &Member| {
            let noted = fs::read_to_string(member.notes.join("operations")).unwrap_or_default();
            let pairs = noted.lines().filter_map(|line| line.split_once(' '));
            pairs.map(|(operation, step)| (operation.to_owned(), (member.role, step.to_owned()))).collect::<Vec<_>>()
        };
        self.members.iter().flat_map(noted).collect()
    }

    /// One check by the supervisor.
    pub fn tend(&mut self) {
        let mut substitutes = Vec::new();
        for index in 0..self.members.len() {
            let member = &mut self.members[index];
            if member.ended.is_some() {
                continue;
            }
            if let Some(status) = member.process.try_exit() {
                let ended = Ended { role: member.role, status, log: member.process.stderr() };
                self.ended.lock().unwrap_or_else(PoisonError::into_inner).push(ended);
                if self.supervised && !member.is_retired {
                    let (launch, notes) = (member.launch.clone(), member.notes.clone());
                    let later = std::mem::take(&mut member.later);
                    self.members[index].process = self.process(&launch, &notes, &later);
                } else {
                    member.ended = Some(status);
                }
                continue;
            }
            match member.frozen {
                None if member.process.is_stopped() => {
                    member.frozen = Some(Instant::now());
                    substitutes.push((member.launch.clone(), member.later.clone()));
                }
                Some(since) if since.elapsed() >= FROZEN_FOR => {
                    member.frozen = None;
                    member.process.resume();
                }
                _ => {}
            }
        }
        // A world that is being stopped gets no substitutes.
        if self.supervised && self.substitutes {
            for (launch, later) in substitutes {
                self.begin(launch, &later);
            }
        }
    }

    /// Supervises the processes until `condition` is true. Returns whether it became true before the deadline.
    pub async fn until(&mut self, deadline: Duration, mut condition: impl AsyncFnMut(&Self) -> bool) -> bool {
        let end = Instant::now() + deadline;
        loop {
            self.tend();
            if condition(self).await {
                return true;
            }
            if Instant::now() >= end {
                return false;
            }
            pause(LOOK_EVERY).await;
        }
    }

    /// Supervises the processes until every acknowledged job is archived. Returns false when no job has ended for `patience`.
    pub async fn until_quiet(&mut self, patience: Duration) -> bool {
        let mut left = usize::MAX;
        while left > 0 {
            let before = left;
            let has_ended = async |world: &World| {
                left = world.unfinished().await;
                left < before
            };
            if !self.until(patience, has_ended).await {
                return false;
            }
        }
        true
    }

    /// Waits for a condition, until [`SOON`].
    ///
    /// # Panics
    /// When the condition does not become true.
    pub async fn wait_for(&self, what: &str, mut condition: impl AsyncFnMut() -> bool) {
        let end = Instant::now() + SOON;
        while !condition().await {
            assert!(Instant::now() < end, "waited in vain: {what}\n{}", self.logs());
            pause(LOOK_EVERY).await;
        }
    }

    /// Waits until every job is finished, stops everything and checks the rest.
    ///
    /// # Panics
    /// When a job is not finished after [`SOON`], or something is wrong.
    pub async fn close(mut self) {
        assert!(self.until_quiet(SOON).await, "not quiet\n{}", self.logs());
        let wrong = self.judge().await.all();
        assert!(wrong.is_empty(), "{wrong:#?}\n{}", self.logs());
    }

    /// Stops everything and checks the rest. Cleaners stop first, so that they do not clean up after workers that stop.
    pub async fn judge(&mut self) -> Findings {
        let mut findings = Findings::default();
        self.supervised = false;
        self.tend();
        let mut stop = async |world: &mut Self, role: Role| {
            let stops = |member: &Member| member.role == role && member.ended.is_none();
            // One that has just been started would be killed by the signal.
            let listens = |member: &Member| member.frozen.is_some() || handles_term(member.process.pid());
            world.until(STOP_WITHIN, async |world| world.members.iter().filter(|member| stops(member)).all(listens)).await;
            world.members.iter().filter(|member| stops(member)).for_each(|member| member.process.terminate());
            if !world.until(STOP_WITHIN, async |world| !world.members.iter().any(stops)).await {
                findings.broken.push(format!("I8: a {role:?} did not stop:\n{}", world.logs()));
            }
        };
        stop(self, Role::Cleaner).await;
        let running: Vec<usize> = (0..self.members.len()).filter(|index| self.members[*index].is_well()).collect();
        stop(self, Role::Worker).await;
        let left = self.left_by(&running).await;
        if self.count("roster", doc! {}).await > 0 || self.unfinished().await > 0 {
            // A new cleaner retires workers that died during the stop.
            self.start(Role::Cleaner, &[], &[]);
        }
        let buried = async |world: &mut Self| world.until(STOP_WITHIN, async |world| world.count("roster", doc! {}).await == 0).await;
        let mut empty = buried(self).await;
        if !self.until_quiet(Duration::from_secs(1)).await {
            // Jobs that a worker released at its end must still be run.
            self.revive(Role::Recruiter);
            self.supervised = true;
            // With a lease that no cleaner declares over, however busy the machine is.
            self.start(Role::Worker, &["--lease", "10m"], &[]);
            self.until_quiet(STOP_WITHIN).await;
            self.supervised = false;
            stop(self, Role::Worker).await;
            empty &= buried(self).await;
        }
        stop(self, Role::Recruiter).await;
        stop(self, Role::Cleaner).await;
        findings.broken.extend(left);
        if !empty {
            findings.broken.push(format!("I8: the roster is not empty:\n{}", self.logs()));
        }
        let clock = self.clock().await;
        findings.add(oracle::examine(&self.database, &self.ledger(), &self.asked, &self.settings, clock).await);
        findings.add(self.watch.take().expect("it is ended once").end().await);
        findings
    }

    /// Locks and roster documents left by workers that were not harmed and that stopped in time.
    async fn left_by(&self, workers: &[usize]) -> Vec<String> {
        let graceful = |member: &&Member| {
            let log = member.process.stderr();
            let in_time = member.ended.is_some_and(|status| status.success()) && !EXCUSES.iter().any(|excuse| log.contains(excuse));
            // A worker with a network of its own may have received no reply.
            member.role == Role::Worker && member.is_well() && in_time && member.launch.uri == self.database.uri()
        };
        let workers = workers.iter().map(|index| &self.members[*index]).filter(graceful);
        let pids: Vec<i64> = workers.map(|member| member.process.pid().into()).collect();
        let mut left = Vec::new();
        for (collection, filter) in [
            ("scheduled", doc! { "locked": true, "last_execution.pid": { "$in": pids.clone() } }),
            ("roster", doc! { "pid": { "$in": pids } }),
        ] {
            let found = self.database.all(collection, filter).await;
            left.extend(found.into_iter().map(|document| format!("I8: left in {collection} by a worker that stopped: {document}")));
        }
        left
    }

    fn revive(&mut self, role: Role) {
        if !self.members.iter().any(|member| member.role == role && member.ended.is_none() && member.frozen.is_none()) {
            self.start(role, &[], &[]);
        }
    }

    /// The logs of all processes, the ended ones first.
    pub fn logs(&self) -> String {
        let ended = |ended: &Ended| format!("--- {:?}, {}:\n{}\n", ended.role, ended.status, ended.log);
        let log = |member: &Member| format!("--- {:?} {}:\n{}\n", member.role, member.process.pid(), member.process.stderr());
        let before = self.ended.lock().unwrap_or_else(PoisonError::into_inner).iter().map(ended).collect::<String>();
        before + self.members.iter().filter(|member| member.ended.is_none()).map(log).collect::<String>().as_str()
    }
}
