//! Effects that happen once: a job that ends in a transaction of its own, the comparison of such jobs with their effects, and a trial in
//! which processes are killed and frozen at random points.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fmt,
    ops::AddAssign,
    time::{Duration, Instant},
};

use bson::{Document, doc};
use futures_util::{TryStreamExt, future::try_join_all};
use mongodb::Collection;
use rand::{RngExt as _, SeedableRng, rngs::StdRng};
use recruiter_common::{JobId, Workable, ids::StartId, shutdown::pause};
use recruiter_worker::{Context, Executable, NotDone};
use serde::{Deserialize, Serialize};

use crate::{
    factory::again,
    ledger::{Entry, Event, Ledger},
    mongo::TestDatabase,
    oracle::{Findings, Policy, number, start_of},
    wait::SOON,
    world::{Role, World},
};

/// The collection of the effects, and of the totals.
pub const EFFECTS: &str = "effects";
/// Number of totals. Transactions that increment the same one conflict.
const TOTALS: i32 = 16;
/// Number of retries of a job: more than the deaths of its workers.
const AGAIN: u32 = 1_000;
/// The policy of the jobs that are enqueued in a transaction.
pub const POLICY: Policy = Policy::Again(AGAIN);

/// A job that ends in a transaction of its own. Its effects are a document, an increment of a total, and another job.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Settle {
    /// How long the transaction is open before its last writes, in milliseconds.
    pub ms: u64,
}

impl Workable for Settle {
    const CLASS: &'static str = "settle";
    type Output = String;
}

impl Executable for Settle {
    type State = Ledger;

    async fn execute(&self, ledger: &Ledger, job: &Context) -> Result<String, NotDone> {
        ledger.write(job, Event::Begin);
        let effects = &effects(job);
        let ended = job
            .transaction(|mut session| async move {
                let child = JobId::new();
                let effect = doc! { "job": job.job_id(), "start": job.start_id(), "child": child };
                effects.insert_one(effect).session(&mut *session).await?;
                pause(Duration::from_millis(self.ms)).await;
                Entry::lasting(0).with_id(child).retry(&again(AGAIN)).enqueue_in(job.client(), &mut session).await?;
                let total = doc! { "_id": rand::random_range(0..TOTALS) };
                effects.update_one(total, doc! { "$inc": { "jobs": 1 } }).session(&mut *session).await?;
                Ok(job.start_id().to_string())
            })
            .await;
        let event = match ended {
            Ok(_) => Event::Done,
            Err(NotDone::Stopped(_)) => Event::Stopped,
            Err(_) => Event::Failed,
        };
        ledger.write(job, event);
        ended
    }
}

#[expect(clippy::disallowed_methods, reason = "a collection of the application")]
fn effects(job: &Context) -> Collection<Document> {
    job.client().database().collection(EFFECTS)
}

/// Creates the totals, and the collection with them: a transaction that creates a collection blocks the others.
///
/// # Panics
/// When MongoDB does not answer.
pub async fn prepare(database: &TestDatabase) {
    let totals = (0..TOTALS).map(|total| doc! { "_id": total, "jobs": 0 });
    database.raw(EFFECTS).insert_many(totals).await.expect("MongoDB is there");
}

/// The job whose effect this is. `None` for a total.
pub fn job_of(effect: &Document) -> Option<JobId> {
    effect.get_object_id("job").ok().map(JobId::from)
}

/// Compares archived jobs with the effects: each job that is done has one effect, of the start that ended it, and no other job has any.
pub fn compare(archived: &HashMap<JobId, Document>, effects: &[Document], findings: &mut Findings) {
    let mut starts: HashMap<JobId, Vec<StartId>> = HashMap::new();
    for effect in effects {
        if let Some(job) = job_of(effect) {
            starts.entry(job).or_default().push(start_of(effect));
        }
    }
    let totals: i64 = effects.iter().map(|total| number(total, "jobs")).sum();
    let count: usize = starts.values().map(Vec::len).sum();
    if usize::try_from(totals) != Ok(count) {
        findings.unexplained.push(format!("{count} effects, and the totals have {totals}"));
    }
    for (id, job) in archived.iter().filter(|(_, job)| is_settled(job)) {
        let last = start_of(job.get_document("last_execution").expect("a job that is done was executed"));
        let result = job.get_str("result").unwrap_or_default();
        match starts.remove(id).as_deref() {
            None => findings.lost.push(format!("no effect: {job}")),
            Some([start]) if *start == last && result == start.to_string() => {}
            Some(others) => findings.unexplained.push(format!("effects of the starts {others:?}: {job}")),
        }
    }
    findings
        .unexplained
        .extend(starts.into_iter().map(|(id, starts)| format!("{id} is not done and has effects of the starts {starts:?}")));
}

/// Whether a job has ended in a transaction of its own.
fn is_settled(job: &Document) -> bool {
    is_settle(job) && job.get_str("why").is_ok_and(|why| why == "done")
}

/// Whether a job ends in a transaction of its own.
pub fn is_settle(job: &Document) -> bool {
    job.get_document("workable").and_then(|workable| workable.get_str("class")).is_ok_and(|class| class == Settle::CLASS)
}

/// The parameters of a trial.
#[derive(Clone, Copy, Debug)]
pub struct Trial {
    /// The seed of all random values.
    pub seed: u64,
    /// Number of kills and freezes of workers with open transactions.
    pub blows: usize,
    /// Whether some of these workers are frozen instead, until they were declared dead.
    pub freezes: bool,
}

/// The effects of all jobs of some trials, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Workers that were killed or frozen while they had transactions open in MongoDB.
    pub blows: usize,
    /// Jobs that were enqueued.
    pub jobs: usize,
    /// Jobs with exactly one effect.
    pub once: usize,
    /// Jobs without an effect.
    pub lost: usize,
    /// Jobs with several effects.
    pub doubled: usize,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        let Self { blows, jobs, once, lost, doubled } = other;
        *self = Self {
            blows: self.blows + blows,
            jobs: self.jobs + jobs,
            once: self.once + once,
            lost: self.lost + lost,
            doubled: self.doubled + doubled,
        };
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { blows, jobs, once, lost, doubled } = self;
        write!(f, "{blows} blows in open transactions, {jobs} jobs: {once} effects exactly once, {lost} lost, {doubled} doubled")
    }
}

/// The result of a trial.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The violations found.
    pub findings: Findings,
    /// Number of injected faults of each kind.
    pub done: BTreeMap<&'static str, usize>,
    /// Kills and freezes of workers that held jobs.
    pub held_jobs: usize,
    /// Number of transactions that were open in MongoDB when their worker was killed or frozen.
    pub interrupted: usize,
    /// Transactions that were committed, and whose worker did not live to record the reply.
    pub replies_missed: usize,
    /// Workers that resumed after they were declared dead.
    pub zombies: usize,
    /// The effects, counted.
    pub tally: Tally,
    /// Number of jobs that are archived as done.
    pub settled: usize,
    /// Number of effects.
    pub effects: usize,
    /// Number of jobs that were enqueued in these transactions, and are archived as done.
    pub children: usize,
    /// Number of attempts of all these jobs.
    pub attempts: i64,
    /// Time from the last fault until the last job was in the archive.
    pub recovery: Duration,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tally, done, held_jobs, interrupted, replies_missed, zombies, recovery, .. } = self;
        writeln!(f, "{tally}")?;
        writeln!(f, "{done:?}: {held_jobs} held jobs, {interrupted} transactions were open;")?;
        writeln!(
            f,
            "{replies_missed} commits whose worker did not record the reply; {zombies} workers resumed after they were declared dead;"
        )?;
        let Self { settled, effects, children, attempts, findings, .. } = self;
        writeln!(f, "{attempts} attempts, {settled} jobs done, {effects} effects, {children} jobs enqueued in transactions;")?;
        let (lost, unexplained, wrong) = (findings.lost.len(), findings.unexplained.len(), findings.all().len());
        write!(f, "quiet {recovery:?} after the last blow; {lost} lost, {unexplained} unexplained, {wrong} wrong in all")
    }
}

/// The places of the first processes among the members. All others are workers.
const RECRUITER: usize = 0;
const CLEANER: usize = 1;
/// Number of cleaners. One rescues a dead worker after the other, and here several die in each second.
const CLEANERS: usize = 3;
/// Number of workers.
const WORKERS: usize = 10;
/// The longest pause between two faults, in milliseconds.
const PAUSE: u64 = 20;
/// Number of jobs that wait or run.
const BACKLOG: usize = 100;
/// The longest time for which a transaction is open before its last writes, in milliseconds. Half of them are not kept open.
const OPEN: u64 = 500;
/// Interval between two reports of the counts.
const SAY_EVERY: Duration = Duration::from_secs(10);

/// Kills workers at random points, sometimes the recruiter and the cleaner as well, and compares jobs and effects in the end.
pub async fn endure(trial: Trial, say: impl Fn(&str)) -> Outcome {
    let mut random = StdRng::seed_from_u64(trial.seed);
    let mut world = World::new().await.without_substitutes();
    prepare(&world.database).await;
    world.start(Role::Recruiter, &[], &[]);
    for _ in 0..CLEANERS {
        world.start(Role::Cleaner, &[], &[]);
    }
    for _ in 0..WORKERS {
        world.start(Role::Worker, &["--concurrency", "4"], &[]);
    }
    let mut outcome = Outcome::default();
    let (begin, mut said) = (Instant::now(), Instant::now());
    let deadline = SOON + Duration::from_secs(20) * u32::try_from(trial.blows).unwrap_or(u32::MAX);
    while outcome.tally.blows < trial.blows && begin.elapsed() < deadline {
        world.tend();
        let open = usize::try_from(world.count("scheduled", doc! {}).await).unwrap_or(BACKLOG);
        let jobs =
            (open..BACKLOG).map(|_| Settle { ms: random.random_range(0..OPEN * 2).saturating_sub(OPEN) }.as_job().retry(&again(AGAIN)));
        let enqueued = try_join_all(jobs.collect::<Vec<_>>().into_iter().map(|job| world.enqueue(job, POLICY))).await;
        outcome.tally.jobs += enqueued.expect("MongoDB is there").len();
        pause(Duration::from_millis(random.random_range(0..PAUSE))).await;
        let busy = busy_workers(&world).await;
        let Some(worker) = busy.get(random.random_range(0..busy.len().max(1))) else { continue };
        let (victim, freeze) = match random.random_range(0..200) {
            0 => (RECRUITER, false),
            1 => (CLEANER, false),
            _ => (*worker, trial.freezes && random.random_bool(0.1)),
        };
        let has_struck = strike(&mut world, victim, freeze, &mut outcome).await;
        outcome.tally.blows += usize::from(has_struck);
        if said.elapsed() > SAY_EVERY {
            said = Instant::now();
            say(&format!("{:?}: {} blows in open transactions, {} jobs", begin.elapsed(), outcome.tally.blows, outcome.tally.jobs));
        }
    }
    assert!(outcome.tally.blows == trial.blows, "only {} blows struck open transactions\n{}", outcome.tally.blows, world.logs());
    let last = Instant::now();
    let quiet = world.until_quiet(SOON).await;
    outcome.recovery = last.elapsed();
    outcome.findings = world.judge().await;
    let logs = world.logs();
    outcome.zombies = logs.matches("this worker was declared dead").count();
    if !quiet {
        outcome.findings.broken.push(format!("I7: not quiet after the last blow:\n{logs}"));
    }
    count(&world, &mut outcome).await;
    outcome
}

/// The places of the workers with started jobs.
async fn busy_workers(world: &World) -> Vec<usize> {
    let locked = world.database.all("scheduled", doc! { "locked": true }).await;
    let pids: HashSet<i64> = locked.iter().filter_map(|job| Some(number(job.get_document("last_execution").ok()?, "pid"))).collect();
    (CLEANER + 1..world.members.len()).filter(|index| pids.contains(&world.members[*index].process.pid().into())).collect()
}

/// Kills or freezes a process that runs. Returns whether it was a worker with an open transaction.
async fn strike(world: &mut World, victim: usize, freeze: bool, outcome: &mut Outcome) -> bool {
    let member = &mut world.members[victim];
    if member.process.is_stopped() || member.process.try_exit().is_some() {
        return false;
    }
    let (fault, is_worker) = match (victim, freeze) {
        (RECRUITER, _) => ("recruiter killed", false),
        (CLEANER, _) => ("cleaner killed", false),
        (_, false) => ("killed", true),
        (_, true) => ("frozen", true),
    };
    if is_worker && freeze {
        member.process.pause()
    } else {
        member.process.kill()
    }
    *outcome.done.entry(fault).or_default() += 1;
    let mut open = 0;
    if is_worker {
        let pid = world.members[victim].process.pid();
        open = open_transactions(world, pid).await;
        outcome.held_jobs += usize::from(world.count("scheduled", doc! { "locked": true, "last_execution.pid": pid }).await > 0);
        outcome.interrupted += open;
    }
    open > 0
}

/// Number of transactions of a worker process that are open in MongoDB.
async fn open_transactions(world: &World, pid: u32) -> usize {
    let workers = world.database.all("roster", doc! { "pid": pid }).await;
    let sessions = workers.iter().filter_map(|worker| worker.get_array("transaction_sessions").ok()).flatten();
    let ids: Vec<_> = sessions.filter_map(|session| session.as_document()?.get("id").cloned()).collect();
    let pipeline = [
        doc! { "$currentOp": { "allUsers": true, "idleSessions": true } },
        doc! { "$match": { "lsid.id": { "$in": ids }, "transaction": { "$exists": true } } },
    ];
    let open = world.database.database().client().database("admin").aggregate(pipeline).await.expect("MongoDB is there");
    open.try_collect::<Vec<Document>>().await.expect("MongoDB is there").len()
}

/// Counts the jobs and effects of a world that is stopped.
async fn count(world: &World, outcome: &mut Outcome) {
    let seen: HashSet<StartId> = world.ledger().iter().filter(|line| line.event == Event::Done).map(|line| line.execution().1).collect();
    let effects = world.database.all(EFFECTS, doc! { "job": { "$exists": true } }).await;
    outcome.effects = effects.len();
    let mut of_job: HashMap<JobId, usize> = HashMap::new();
    effects.iter().filter_map(job_of).for_each(|job| *of_job.entry(job).or_default() += 1);
    let tally = &mut outcome.tally;
    tally.once = of_job.values().filter(|effects| **effects == 1).count();
    tally.doubled = of_job.len() - tally.once;
    tally.lost = tally.jobs.saturating_sub(of_job.len());
    outcome.replies_missed = effects.iter().filter(|effect| !seen.contains(&start_of(effect))).count();
    let jobs = world.database.all("archived", doc! { "workable.class": Settle::CLASS }).await;
    outcome.settled = jobs.iter().filter(|job| is_settled(job)).count();
    outcome.attempts = jobs.iter().map(|job| number(job, "attempts")).sum();
    outcome.children = world.database.all("archived", doc! { "workable.class": Entry::CLASS, "why": "done" }).await.len();
    if [outcome.settled, outcome.effects, outcome.children, outcome.tally.once] != [outcome.tally.jobs; 4] {
        outcome
            .findings
            .broken
            .push("the numbers of jobs, jobs that are done, effects and jobs enqueued in transactions differ".to_owned());
    }
}
