//! A world of its own for each failure: a database, a ledger, and a supervised fleet of processes that break. The supervisor
//! starts again what died, as systemd would, and lets what froze go on after a while.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::ExitStatus,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use bson::doc;
use recruiter_common::{
    enqueue::{EnqueueError, NewJob},
    ids::JobId,
    shutdown::pause,
    store::Store,
};
use tempfile::TempDir;

use crate::{
    faults::{FAULT, Fault, NOTES},
    ledger::{self, LEDGER, Line},
    local,
    mongo::TestDatabase,
    oracle::{self, Acknowledged, Findings, Policy, Watch},
    processes::{Process, binary},
};

/// Which of the three processes.
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
    /// All.
    pub const ALL: [Role; 3] = [Role::Recruiter, Role::Cleaner, Role::Worker];

    fn name(self) -> &'static str {
        match self {
            Self::Recruiter => "recruiter",
            Self::Cleaner => "cleaner",
            Self::Worker => "worker",
        }
    }

    /// Flags with which a bad day takes seconds instead of minutes.
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

/// How long a frozen process stands still: longer than it takes to be declared dead and for its lease to be taken over.
pub const FROZEN_FOR: Duration = Duration::from_millis(3_000);
/// Between two looks of the supervisor.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// What a stop may take.
const STOP_WITHIN: Duration = Duration::from_secs(60);

/// One supervised process.
#[derive(Debug)]
pub struct Member {
    /// What it is.
    pub role: Role,
    /// The process as it runs now.
    pub process: Process,
    launch: Launch,
    notes: PathBuf,
    /// Faults of whoever comes after it: all but the first.
    later: Vec<Fault>,
    frozen: Option<Instant>,
    ended: bool,
}

/// How a process is started.
#[derive(Clone, Debug)]
struct Launch {
    role: Role,
    /// Its way to the database.
    uri: String,
    /// The program that starts it or becomes it, with its arguments, if there is one.
    by: Vec<String>,
    args: Vec<String>,
    /// What it has in its environment besides ours.
    environment: Vec<(String, String)>,
}

/// A process that has ended: what it was, how it ended, what it had logged.
#[derive(Clone, Debug)]
pub struct Ended {
    /// What it was.
    pub role: Role,
    /// How it ended.
    pub status: ExitStatus,
    /// What it had logged.
    pub log: String,
}

/// A database and everything that works on it.
#[derive(Debug)]
pub struct World {
    /// The database.
    pub database: TestDatabase,
    /// A store on it, for enqueues and looks.
    pub store: Store,
    /// What was acknowledged.
    pub acknowledged: Acknowledged,
    /// The supervised processes; a substitute comes after the one it stands in for.
    pub members: Vec<Member>,
    /// Those that have ended.
    pub ended: Arc<Mutex<Vec<Ended>>>,
    directory: TempDir,
    /// Whether what dies is started again.
    supervised: bool,
    /// Whether somebody stands in for what is frozen.
    substitutes: bool,
    watch: Option<Watch>,
}

impl World {
    /// An empty world on a database of the shared MongoDB.
    pub async fn new() -> Self {
        Self::on(TestDatabase::new().await).await
    }

    /// An empty world on this database.
    pub async fn on(database: TestDatabase) -> Self {
        // Built now, while nothing else of this world waits for an answer.
        binary("faulty");
        let store = local::store(&database).await;
        let directory = tempfile::Builder::new().prefix("recruiter-world-").tempdir().expect("the temporary directory is writable");
        fs::create_dir(directory.path().join("ledger")).expect("the directory is new");
        let acknowledged = Acknowledged::default();
        let watch = Some(Watch::begin(&database, &acknowledged));
        Self {
            database,
            store,
            acknowledged,
            members: Vec::new(),
            ended: Arc::default(),
            directory,
            supervised: true,
            substitutes: true,
            watch,
        }
    }

    /// The same where nobody stands in for who stands still.
    #[must_use]
    pub fn without_substitutes(mut self) -> Self {
        self.substitutes = false;
        self
    }

    /// Starts a process with these flags and those of its quick ones that they do not name; returns its place among the members.
    pub fn start(&mut self, role: Role, args: &[&str], faults: &[Fault]) -> usize {
        let uri = self.database.uri().to_owned();
        self.start_at(&uri, role, args, faults)
    }

    /// The same by another way to the database.
    pub fn start_at(&mut self, uri: &str, role: Role, args: &[&str], faults: &[Fault]) -> usize {
        let launch = Launch { uri: uri.to_owned(), ..self.launch(role, &[], args) };
        self.begin(launch, faults)
    }

    /// The same with this in its environment, that of a [`Clock`](crate::clocks::Clock) for instance.
    pub fn start_with(&mut self, role: Role, args: &[&str], environment: &[(&str, &str)]) -> usize {
        let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let launch = Launch { environment, ..self.launch(role, &[], args) };
        self.begin(launch, &[])
    }

    /// The same by a program that becomes it, such as `prlimit --as=…`.
    pub fn start_by(&mut self, by: &[&str], role: Role, args: &[&str]) -> usize {
        self.begin(self.launch(role, by, args), &[])
    }

    /// Starts a process that nobody supervises, by a program that starts it or becomes it.
    pub fn beside(&self, by: &[&str], role: Role, args: &[&str]) -> Process {
        let notes = self.directory.path().join("notes-beside");
        fs::create_dir_all(&notes).expect("the world's directory is writable");
        self.process(&self.launch(role, by, args), &notes, &[])
    }

    fn launch(&self, role: Role, by: &[&str], args: &[&str]) -> Launch {
        let quick = role.quick().chunks(2).filter(|flag| !args.contains(&flag[0])).flatten();
        let args = quick.chain(args).map(|arg| (*arg).to_owned()).collect();
        let by = by.iter().map(|word| (*word).to_owned()).collect();
        Launch { role, uri: self.database.uri().to_owned(), by, args, environment: Vec::new() }
    }

    fn begin(&mut self, launch: Launch, faults: &[Fault]) -> usize {
        let notes = self.directory.path().join(format!("notes-{}", self.members.len()));
        fs::create_dir_all(&notes).expect("the world's directory is writable");
        let process = self.process(&launch, &notes, faults);
        let later = faults.get(1..).unwrap_or_default().to_vec();
        self.members.push(Member { role: launch.role, process, launch, notes, later, frozen: None, ended: false });
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
        if launch.by.is_empty() {
            return Process::start("faulty", &[launch.role.name()].into_iter().chain(args).collect::<Vec<_>>(), &env);
        }
        let faulty = binary("faulty").display().to_string();
        let words = launch.by.iter().map(String::as_str).chain([faulty.as_str(), launch.role.name()]).chain(args);
        Process::start("/usr/bin/env", &words.collect::<Vec<_>>(), &env)
    }

    fn ledger_directory(&self) -> PathBuf {
        self.directory.path().join("ledger")
    }

    /// What the jobs wrote down themselves.
    pub fn ledger(&self) -> Vec<Line> {
        ledger::read(&self.ledger_directory())
    }

    /// Enqueues a job, and notes it once that is acknowledged.
    ///
    /// # Errors
    /// As [`NewJob::enqueue`].
    pub async fn enqueue(&self, job: NewJob, policy: Policy) -> Result<JobId, EnqueueError> {
        oracle::enqueue(&self.store, &self.acknowledged, job, policy).await
    }

    /// How many acknowledged jobs are not in the archive yet, about.
    pub async fn unfinished(&self) -> usize {
        let waiting = self.count("scheduled", doc! {}).await;
        if waiting > 100 {
            return usize::try_from(waiting).unwrap_or(usize::MAX);
        }
        let ids: Vec<JobId> = self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner).keys().copied().collect();
        let archived = self.database.raw("archived").count_documents(doc! { "_id": { "$in": ids.clone() } }).await;
        ids.len() - archived.map_or(0, |count| usize::try_from(count).unwrap_or(0))
    }

    /// Documents in a collection that match.
    pub async fn count(&self, collection: &str, filter: bson::Document) -> u64 {
        self.database.raw(collection).count_documents(filter).await.unwrap_or(0)
    }

    /// Whether this fault has struck a process of this role.
    pub fn struck(&self, role: Role, fault: &Fault) -> bool {
        let notes = self.members.iter().filter(|member| member.role == role).map(|member| member.notes.join("struck"));
        let fault = fault.to_string();
        notes.into_iter().any(|notes| fs::read_to_string(notes).unwrap_or_default().lines().any(|struck| struck == fault))
    }

    /// Every step that each role took, and how often its busiest process did, as far as that is noted.
    pub fn steps(&self) -> BTreeMap<(Role, String), u32> {
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

    /// One look of the supervisor.
    pub fn tend(&mut self) {
        let mut substitutes = Vec::new();
        for index in 0..self.members.len() {
            let member = &mut self.members[index];
            if member.ended {
                continue;
            }
            if let Some(status) = member.process.try_exit() {
                let ended = Ended { role: member.role, status, log: member.process.stderr() };
                self.ended.lock().unwrap_or_else(PoisonError::into_inner).push(ended);
                if self.supervised {
                    let (launch, notes) = (member.launch.clone(), member.notes.clone());
                    let later = std::mem::take(&mut member.later);
                    self.members[index].process = self.process(&launch, &notes, &later);
                } else {
                    member.ended = true;
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
        // In a world that is being stopped nobody stands in.
        if self.supervised && self.substitutes {
            for (launch, later) in substitutes {
                self.begin(launch, &later);
            }
        }
    }

    /// Tends the processes until `condition` is true; says whether it came true in time.
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

    /// Tends the processes until every acknowledged job is archived.
    pub async fn until_quiet(&mut self, deadline: Duration) -> bool {
        self.until(deadline, async |world| world.unfinished().await == 0).await
    }

    /// Stops everything, workers first, and looks at what is left.
    pub async fn judge(&mut self) -> Findings {
        let mut findings = Findings::default();
        self.supervised = false;
        self.tend();
        for roles in [&[Role::Worker][..], &[Role::Recruiter, Role::Cleaner]] {
            let stops = |member: &Member| roles.contains(&member.role) && !member.ended;
            self.members.iter().filter(|member| stops(member)).for_each(|member| member.process.terminate());
            let stopped = self.until(STOP_WITHIN, async |world| !world.members.iter().any(stops)).await;
            if !stopped {
                findings.broken.push(format!("I8: {roles:?} did not stop:\n{}", self.logs()));
            }
            if roles == [Role::Worker] {
                // Whoever died while it stopped is buried by a cleaner.
                self.revive(Role::Cleaner);
                if !self.until(STOP_WITHIN, async |world| world.count("roster", doc! {}).await == 0).await {
                    findings.broken.push(format!("I8: the roster is not empty:\n{}", self.logs()));
                }
                if !self.until_quiet(Duration::from_secs(1)).await {
                    // What its worker left at the very end: somebody must still do it.
                    self.supervised = true;
                    self.start(Role::Worker, &[], &[]);
                    self.until_quiet(STOP_WITHIN).await;
                    self.supervised = false;
                    let last = self.members.last().expect("it was just started");
                    last.process.terminate();
                    self.until(STOP_WITHIN, async |world| world.count("roster", doc! {}).await == 0).await;
                }
            }
        }
        findings.add(oracle::examine(&self.database, &self.ledger(), &self.acknowledged).await);
        findings.add(self.watch.take().expect("it is ended once").end());
        findings
    }

    fn revive(&mut self, role: Role) {
        if !self.members.iter().any(|member| member.role == role && !member.ended && member.frozen.is_none()) {
            self.start(role, &[], &[]);
        }
    }

    /// What all processes have logged, the ended ones first.
    pub fn logs(&self) -> String {
        let ended = |ended: &Ended| format!("--- {:?}, {}:\n{}\n", ended.role, ended.status, ended.log);
        let log = |member: &Member| format!("--- {:?} {}:\n{}\n", member.role, member.process.pid(), member.process.stderr());
        let before = self.ended.lock().unwrap_or_else(PoisonError::into_inner).iter().map(ended).collect::<String>();
        before + &self.members.iter().filter(|member| !member.ended).map(log).collect::<String>()
    }
}
