//! An upgrade under load: the programs of the previous release and of this one side by side on one database, in every combination, and the
//! way back. The ledger that the jobs write themselves shows that none is lost, and none is done twice.
//!
//! Run only when it is named (`--test upgrade`): it builds the previous release (`tests/previous-version`) once, which takes minutes.

#![expect(clippy::unwrap_used, reason = "in a test it says where it failed")]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Output,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bson::{Document, doc};
use recruiter_common::{
    Client, Edge, JobId, Limit, NewJob, Rate, RetryManyTimes, Workable as _,
    schedules::{Missed, Schedule},
    shutdown::pause,
    store::Store,
};
use recruiter_tests::{
    ledger::{Entry, Event},
    mongo::TestDatabase,
    oracle::{Asked, Policy},
    previous::Previous,
    processes::{binary, directory_for_sockets, say},
    wait::SOON,
    world::{Role, World},
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{process::Command, task::JoinHandle};

/// Jobs that are done in each step of the upgrade.
const PER_STEP: u64 = 150;
/// More than the most deaths of one job.
const AGAIN: u32 = 30;
/// Number of jobs that a client enqueues together.
const BATCH: usize = 10;
/// Clients pause while more jobs than these wait.
const MOST_WAITING: u64 = 200;
/// Most tries to see a change of the lead from each release to the other: which standby is the first is luck.
const MOST_CHANGES: usize = 40;
const SCHEDULE: &str = "tick";

#[tokio::test(flavor = "multi_thread")]
async fn two_releases_work_side_by_side_in_every_combination_and_back() {
    let Some(previous) = Previous::built() else { return };
    let mut upgrade = Upgrade::begin(previous).await;
    let old = upgrade.only_the_previous_release().await;
    let new = upgrade.beside_each_other(&old).await;
    upgrade.each_takes_the_lead_of_the_other(&old, &new).await;
    upgrade.workers_die(&old, &new).await;
    upgrade.only_this_release(&old, &new).await;
    upgrade.back(&new).await;
    upgrade.end().await;
}

/// The processes of a release, as members of the world.
struct Fleet {
    recruiter: usize,
    cleaner: usize,
    workers: [usize; 2],
}

struct Upgrade {
    previous: Previous,
    world: World,
    load: Load,
    /// Where leaders of both releases listen for workers of both.
    hints: TempDir,
    /// The workers that have run, by their process ids: whether they are of this release.
    workers: BTreeMap<u32, bool>,
}

impl Upgrade {
    /// The previous release makes the database. An application uses the library of this release already, and makes no schema.
    async fn begin(previous: Previous) -> Self {
        let database = TestDatabase::new().await;
        succeeded(&cli(&previous.recruiter(), database.uri(), &["limits", "set", "printer", "--capacity", "2"]).await);
        assert_eq!(schema_of(&database).await, previous.schema);
        let store = Store::from(Client::from_database(database.database().clone()));
        let mut world = World::with_store(database, store);
        world.limit("printer", Limit::capacity(2)).await;
        world.limit("customer:*", Limit::capacity(1)).await;
        world.limit("api", Limit::rate(Rate::new(20, Duration::from_secs(1), 10).unwrap())).await;
        let tick = Schedule::every(Duration::from_secs(1)).unwrap().job(Entry::lasting(5)).missed(Missed::All(1_000));
        world.store.schedules().declare(SCHEDULE, &tick).await.unwrap();
        assert_eq!(schema_of(&world.database).await, previous.schema);
        let load = Load::begin(&world, previous.recruiter());
        Self { previous, world, load, hints: directory_for_sockets(), workers: BTreeMap::new() }
    }

    fn start(&mut self, is_new: bool) -> Fleet {
        let roles = self.previous.roles();
        let mut start = |role, args: &[&str]| {
            if is_new { self.world.start(role, args, &[]) } else { self.world.start_program(&roles, role, args) }
        };
        let hints = ["--hints-directory", self.hints.path().to_str().unwrap()];
        let (recruiter, cleaner) = (start(Role::Recruiter, &hints), start(Role::Cleaner, &[]));
        let fleet = Fleet { recruiter, cleaner, workers: [(); 2].map(|()| start(Role::Worker, &["--concurrency", "4"])) };
        self.note_workers(&fleet, is_new);
        fleet
    }

    fn note_workers(&mut self, fleet: &Fleet, is_new: bool) {
        self.workers.extend(fleet.workers.map(|worker| (self.world.members[worker].process.pid(), is_new)));
    }

    /// Waits until so many more jobs are done.
    async fn step(&mut self, what: &str) {
        let before = self.world.count("archived", doc! {}).await;
        let done = self.world.until(SOON, async |world| world.count("archived", doc! {}).await >= before + PER_STEP).await;
        assert!(done, "{what}: no jobs are done\n{}", self.world.logs());
        assert!(!self.load.is_over(), "{what}: a client cannot enqueue");
        say(&format!("{what}: {} jobs are done", self.world.count("archived", doc! {}).await));
    }

    async fn only_the_previous_release(&mut self) -> Fleet {
        let old = self.start(false);
        self.step("the previous release alone").await;
        old
    }

    /// As the page about operating says: `recruiter migrate`, while the previous release works; then a program after the other.
    async fn beside_each_other(&mut self, old: &Fleet) -> Fleet {
        let uri = self.world.database.uri().to_owned();
        let recruiter = binary("recruiter");
        let would = changes(&cli(&recruiter, &uri, &["migrate", "--dry-run", "--json"]).await);
        assert_eq!(schema_of(&self.world.database).await, self.previous.schema, "a dry run changes nothing");
        let made = changes(&cli(&recruiter, &uri, &["migrate", "--json"]).await);
        assert!(made.iter().all(|change| change["done"] == json!(true) || change["action"] == "drop"), "{made:?}");
        let (has_newer, says_so) =
            (schema_of(&self.world.database).await > self.previous.schema, would.iter().any(|change| change["part"] == "version"));
        assert_eq!(has_newer, says_so, "{would:?}");
        say(&format!("recruiter migrate has made {} changes", made.len()));
        self.step("the previous release on the schema of this one").await;
        // A program that is restarted in the middle of an upgrade.
        self.world.members[old.workers[1]].process.kill();
        let new = self.start(true);
        self.step("both releases").await;
        self.note_workers(old, false);
        new
    }

    /// Kills the leader again and again, until each release has taken over from the other.
    async fn each_takes_the_lead_of_the_other(&mut self, old: &Fleet, new: &Fleet) {
        let (mut to_new, mut to_old) = (0, 0);
        for _ in 0..MOST_CHANGES {
            let pids = [old.recruiter, new.recruiter].map(|member| self.world.members[member].process.pid());
            let led = async |world: &World| pids.contains(&leader(&world.database).await);
            assert!(self.world.until(SOON, led).await, "nobody leads\n{}", self.world.logs());
            let was_new = leader(&self.world.database).await == pids[1];
            let (killed, standby) = if was_new { (new.recruiter, pids[0]) } else { (old.recruiter, pids[1]) };
            self.world.members[killed].process.kill();
            let taken = async |world: &World| ![0, pids[usize::from(was_new)]].contains(&leader(&world.database).await);
            assert!(self.world.until(SOON, taken).await, "nobody takes over\n{}", self.world.logs());
            if leader(&self.world.database).await == standby {
                *(if was_new { &mut to_old } else { &mut to_new }) += 1;
                self.step(if was_new { "the previous release leads" } else { "this release leads" }).await;
            }
            if to_new > 0 && to_old > 0 {
                return;
            }
        }
        panic!("to this release: {to_new}, to the previous one: {to_old}\n{}", self.world.logs());
    }

    /// Cleaners of both releases rescue the jobs of both.
    async fn workers_die(&mut self, old: &Fleet, new: &Fleet) {
        for worker in [old.workers[0], new.workers[0], old.workers[1], new.workers[1]] {
            self.world.members[worker].process.kill();
            self.step("a worker was killed").await;
            self.note_workers(old, false);
            self.note_workers(new, true);
        }
        self.world.retire(old.cleaner).await;
        self.world.members[old.workers[0]].process.kill();
        self.step("a cleaner of this release alone").await;
        self.note_workers(old, false);
    }

    async fn only_this_release(&mut self, old: &Fleet, new: &Fleet) {
        for member in [old.recruiter, old.workers[0], old.workers[1]] {
            self.world.retire(member).await;
        }
        self.note_workers(new, true);
        self.step("this release alone").await;
    }

    /// The previous release works on the schema of this one.
    async fn back(&mut self, new: &Fleet) {
        let old = self.start(false);
        self.step("on the way back").await;
        for member in [new.workers[0], new.workers[1], new.cleaner, new.recruiter] {
            self.world.retire(member).await;
        }
        self.step("the previous release alone again").await;
        self.note_workers(&old, false);
    }

    async fn end(mut self) {
        let enqueued = self.load.end().await;
        self.world.store.schedules().remove(SCHEDULE, None).await.unwrap();
        assert!(self.world.until_quiet(SOON).await, "not quiet\n{}", self.world.logs());
        let findings = self.world.judge().await;
        let begun = self.world.ledger().into_iter().filter(|line| line.event == Event::Begin);
        let mut executions = BTreeMap::from([(false, 0), (true, 0)]);
        begun.filter_map(|line| self.workers.get(&line.worker)).for_each(|is_new| *executions.entry(*is_new).or_default() += 1);
        say(&format!(
            "enqueued by the previous release: {}, by this one: {}; executions by the previous release: {}, by this one: {}, in all: {}; \
             ended by the death of a worker: {}; lost: {}, unexplained: {}, other promises broken: {}",
            enqueued[0],
            enqueued[1],
            executions[&false],
            executions[&true],
            findings.executions,
            findings.deaths,
            findings.lost.len(),
            findings.unexplained.len(),
            findings.broken.len(),
        ));
        let wrong = findings.all();
        assert!(wrong.is_empty(), "{wrong:#?}\n{}", self.world.logs());
        assert!(enqueued.iter().chain(executions.values()).all(|count| *count > 0));
    }
}

/// Two applications that enqueue all the time: one with the command line of the previous release, one with the library of this one.
struct Load {
    is_over: Arc<AtomicBool>,
    clients: [JoinHandle<usize>; 2],
}

impl Load {
    fn begin(world: &World, recruiter: PathBuf) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let (asked, store, uri) = (world.asked.clone(), world.store.clone(), world.database.uri().to_owned());
        let waiting = world.database.raw("scheduled");
        let goes_on = {
            let is_over = Arc::clone(&is_over);
            async move || {
                while !is_over.load(Ordering::Relaxed) && waiting.count_documents(doc! {}).await.unwrap_or(0) > MOST_WAITING {
                    pause(Duration::from_millis(100)).await;
                }
                pause(Duration::from_millis(100)).await;
                !is_over.load(Ordering::Relaxed)
            }
        };
        let (of_old, of_new) = (goes_on.clone(), goes_on);
        let known = asked.clone();
        let old = tokio::spawn(async move {
            let file = tempfile::NamedTempFile::with_prefix("recruiter-jobs-").unwrap();
            let mut count = 0;
            while of_old().await {
                enqueue_by_command(&recruiter, &uri, file.path(), &known, count).await;
                count += BATCH;
            }
            count
        });
        let new = tokio::spawn(async move {
            let (mut count, mut before) = (0, None);
            while of_new().await {
                for number in count..count + BATCH {
                    let (job, policy) = job(number, before);
                    before = Some(asked.enqueue(&store, job, policy).await.unwrap());
                }
                count += BATCH;
            }
            count
        });
        Self { is_over, clients: [old, new] }
    }

    /// Whether a client has ended, which it does only if it cannot enqueue.
    fn is_over(&self) -> bool {
        self.clients.iter().any(JoinHandle::is_finished)
    }

    /// Ends it. Returns the jobs that each has enqueued.
    async fn end(&mut self) -> [usize; 2] {
        self.is_over.store(true, Ordering::Relaxed);
        let [old, new] = &mut self.clients;
        [old.await.unwrap(), new.await.unwrap()]
    }
}

/// A job of each kind in turns.
fn job(number: usize, before: Option<JobId>) -> (NewJob, Policy) {
    let again = |failures: u32| RetryManyTimes::new(AGAIN + failures, Duration::from_millis(50)).unwrap();
    let often = |job: NewJob| (job.retry(&again(0)), Policy::Again(AGAIN));
    let plain = Entry::lasting(i64::try_from(number % 20).unwrap());
    match (number % 8, before) {
        (0, _) => (Entry { failures: 2, ..Entry::default() }.as_job().retry(&again(2)), Policy::Again(AGAIN + 2)),
        (1, _) => (plain.limit("printer"), Policy::Never),
        (2, _) => often(plain.limit(format!("customer:{}", number % 3)).limit("printer")),
        (3, _) => often(plain.in_line(format!("order-{}", number % 5))),
        (4, Some(parent)) => often(plain.waits_for_all([Edge::ended(parent)])),
        (5, _) => often(plain.after(Duration::from_millis(300))),
        (6, _) => (plain.limit("api"), Policy::Never),
        _ => (plain, Policy::Never),
    }
}

/// The same by the command line.
async fn enqueue_by_command(recruiter: &Path, uri: &str, file: &Path, asked: &Asked, count: usize) {
    let mut lines = String::new();
    let mut ids = Vec::new();
    for number in count..count + BATCH {
        let id = JobId::new();
        let retry =
            json!({ "class": "RetryManyTimes", "parameters": { "retry_how_many_times": AGAIN, "seconds_to_wait_before_retry": 0.05 } });
        let mut line = json!({ "id": id.to_string(), "class": "entry", "parameters": { "ms": number % 20 } });
        let policy = if number.is_multiple_of(2) { Policy::Again(AGAIN) } else { Policy::Never };
        if policy != Policy::Never {
            line["retry_policy"] = retry;
        }
        match number % 5 {
            0 => line["limits"] = json!(["printer"]),
            1 => line["line"] = json!(format!("delivery-{}", number % 3)),
            2 => line["after"] = json!("300ms"),
            _ => {}
        }
        lines += &format!("{line}\n");
        asked.will_send(id, policy);
        ids.push(id);
    }
    fs::write(file, lines).unwrap();
    let said = cli(recruiter, uri, &["enqueue", "--from", file.to_str().unwrap(), "--json"]).await;
    succeeded(&said);
    ids.into_iter().for_each(|id| asked.was_acknowledged(id));
}

async fn cli(recruiter: &Path, uri: &str, args: &[&str]) -> Output {
    // A busy machine may not answer within the five seconds that a command of a person waits.
    let env = [("MONGODB_URI", uri), ("RECRUITER_CONNECT_TIMEOUT", "1m"), ("RECRUITER_SETTINGS", "/dev/null")];
    Command::new(recruiter).args(args).envs(env).output().await.unwrap()
}

fn succeeded(said: &Output) {
    assert!(said.status.success(), "{}{}", String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
}

/// What `recruiter migrate --json` says.
fn changes(said: &Output) -> Vec<Value> {
    succeeded(said);
    String::from_utf8_lossy(&said.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

async fn schema_of(database: &TestDatabase) -> i32 {
    let schema: Document = database.only("metadata", doc! { "_id": "schema" }).await;
    schema.get_i32("version").unwrap()
}

/// The process id of the leader; 0 if none holds the lease.
async fn leader(database: &TestDatabase) -> u32 {
    let lease = database.raw("metadata").find_one(doc! { "_id": "recruiter", "released": false }).await.unwrap().unwrap_or_default();
    let pid = lease.get_str("holder_at").ok().and_then(|holder| holder.rsplit_once(':')?.1.parse().ok());
    pid.unwrap_or(0)
}
