//! A world of its own for each failure: a database, a ledger, and a supervised fleet of processes that break. The supervisor
//! starts again what died, as systemd would, and lets what froze go on after a while.

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    sync::PoisonError,
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
    processes::Process,
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
    args: Vec<String>,
    uri: String,
    notes: PathBuf,
    frozen: Option<Instant>,
    ended: bool,
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
    directory: TempDir,
    /// Whether what dies is started again.
    supervised: bool,
    watch: Option<Watch>,
}

impl World {
    /// An empty world on a database of the shared MongoDB.
    pub async fn new() -> Self {
        Self::on(TestDatabase::new().await).await
    }

    /// An empty world on this database.
    pub async fn on(database: TestDatabase) -> Self {
        let store = local::store(&database).await;
        let directory = tempfile::Builder::new().prefix("recruiter-world-").tempdir().expect("the temporary directory is writable");
        fs::create_dir(directory.path().join("ledger")).expect("the directory is new");
        let acknowledged = Acknowledged::default();
        let watch = Some(Watch::begin(&database, &acknowledged));
        Self { database, store, acknowledged, members: Vec::new(), directory, supervised: true, watch }
    }

    /// Starts a process with its quick flags and these; returns its place among the members.
    pub fn start(&mut self, role: Role, args: &[&str], fault: Option<&Fault>) -> usize {
        let uri = self.database.uri().to_owned();
        self.start_at(&uri, role, args, fault)
    }

    /// The same by another way to the database.
    pub fn start_at(&mut self, uri: &str, role: Role, args: &[&str], fault: Option<&Fault>) -> usize {
        let args = [role.quick(), args].concat().into_iter().map(ToOwned::to_owned).collect();
        self.launch(uri.to_owned(), role, args, fault)
    }

    fn launch(&mut self, uri: String, role: Role, args: Vec<String>, fault: Option<&Fault>) -> usize {
        let notes = self.directory.path().join(format!("notes-{}", self.members.len()));
        fs::create_dir_all(&notes).expect("the world's directory is writable");
        let process = self.process(&uri, role, &args, &notes, fault);
        self.members.push(Member { role, process, args, uri, notes, frozen: None, ended: false });
        self.members.len() - 1
    }

    fn process(&self, uri: &str, role: Role, args: &[String], notes: &std::path::Path, fault: Option<&Fault>) -> Process {
        let (ledger, fault) = (self.ledger_directory(), fault.map(ToString::to_string));
        let mut env = vec![
            ("MONGODB_URI", uri),
            (NOTES, notes.to_str().expect("a temporary directory has a plain name")),
            (LEDGER, ledger.to_str().expect("a temporary directory has a plain name")),
        ];
        env.extend(fault.as_deref().map(|fault| (FAULT, fault)));
        let args: Vec<&str> = [role.name()].into_iter().chain(args.iter().map(String::as_str)).collect();
        Process::start("faulty", &args, &env)
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

    /// How many acknowledged jobs are not in the archive yet.
    pub async fn unfinished(&self) -> usize {
        let ids: Vec<JobId> = self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner).keys().copied().collect();
        let archived = self.database.raw("archived").count_documents(doc! { "_id": { "$in": ids.clone() } }).await;
        ids.len() - archived.map_or(0, |count| usize::try_from(count).unwrap_or(0))
    }

    /// Documents in a collection that match.
    pub async fn count(&self, collection: &str, filter: bson::Document) -> u64 {
        self.database.raw(collection).count_documents(filter).await.unwrap_or(0)
    }

    /// Whether the fault of this member has struck.
    pub fn struck(&self, member: usize) -> bool {
        self.members[member].notes.join("struck").exists()
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
            if member.process.try_exit().is_some() {
                if self.supervised {
                    let (uri, role, args, notes) = (member.uri.clone(), member.role, member.args.clone(), member.notes.clone());
                    self.members[index].process = self.process(&uri, role, &args, &notes, None);
                } else {
                    member.ended = true;
                }
                continue;
            }
            match member.frozen {
                None if member.process.is_stopped() => {
                    member.frozen = Some(Instant::now());
                    substitutes.push((member.uri.clone(), member.role, member.args.clone()));
                }
                Some(since) if since.elapsed() >= FROZEN_FOR => {
                    member.frozen = None;
                    member.process.resume();
                }
                _ => {}
            }
        }
        // In a world that is being stopped nobody stands in.
        if self.supervised {
            for (uri, role, args) in substitutes {
                self.launch(uri, role, args, None);
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
                    self.start(Role::Worker, &[], None);
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
            self.start(role, &[], None);
        }
    }

    /// What all processes have logged.
    pub fn logs(&self) -> String {
        let log = |member: &Member| format!("--- {:?} {}:\n{}\n", member.role, member.process.pid(), member.process.stderr());
        self.members.iter().map(log).collect()
    }
}
