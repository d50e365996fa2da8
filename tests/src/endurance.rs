//! Random faults from a seed: a whole fleet on a replica set of three, jobs of every policy and group, with limits, in lines, behind
//! other jobs and of a schedule, some with effects in transactions, and continuous faults. At the end every execution is accounted for.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use rand::{RngExt as _, SeedableRng, rngs::StdRng, seq::IndexedRandom as _};
use recruiter_common::{
    Edge, ExponentialBackoff, JobId, Limit, NewJob, Priority, Rate, RetriableExceptionFilter, RetryForever, RetryManyTimes, RetryPolicy,
    SelectByException, TimeTable, Workable as _,
    schedules::{Missed, Schedule},
    shutdown::pause,
    store::Store,
};

use crate::{
    effects::{self, Settle},
    ledger::Entry,
    mongo::TestDatabase,
    oracle::{Asked, Findings, Policy},
    replica_set::ReplicaSet,
    wait::SOON,
    world::{Role, World},
};

/// More than the most rescues of one job.
const AGAIN: u32 = 30;
/// Number of jobs that are enqueued together.
const BATCH: usize = 50;
/// A schedule that runs as long as faults are injected.
const SCHEDULE: &str = "tick";
/// Interval between two reports of the counts.
const SAY_EVERY: Duration = Duration::from_secs(10);

/// The parameters of an endurance test.
#[derive(Clone, Copy, Debug)]
pub struct BadDay {
    /// The seed of all random values.
    pub seed: u64,
    /// How long faults are injected.
    pub duration: Duration,
    /// Number of jobs that are enqueued in this time.
    pub jobs: usize,
}

/// The result of an endurance test.
#[derive(Debug)]
pub struct Outcome {
    /// The violations found.
    pub findings: Findings,
    /// Number of injected faults of each kind.
    pub done: BTreeMap<&'static str, usize>,
    /// Number of refused enqueues, which are allowed while there is no primary.
    pub refused: usize,
    /// Time from the last fault until the last job was in the archive.
    pub recovery: Duration,
}

/// Runs an endurance test.
pub async fn endure(day: BadDay, say: impl Fn(&str)) -> Outcome {
    let mut random = StdRng::seed_from_u64(day.seed);
    let mut mongo = ReplicaSet::start(3).await;
    let mut world = World::on(TestDatabase::on(&mongo.uri()).await).await.without_substitutes();
    for (role, count, flags) in [(Role::Recruiter, 2, &[][..]), (Role::Cleaner, 2, &[]), (Role::Worker, 3, &["--concurrency", "100"])] {
        for _ in 0..count {
            world.start(role, flags, &[]);
        }
    }
    effects::prepare(&world.database).await;
    let rate = Rate::new(20, Duration::from_secs(1), 10).expect("a valid rate");
    world.limit("printer", Limit::capacity(3)).await;
    world.limit("customer:*", Limit::capacity(1)).await;
    world.limit("api", Limit::rate(rate)).await;
    let tick = Schedule::every(Duration::from_secs(1)).expect("a second is allowed").job(Entry::lasting(5)).missed(Missed::All(1_000));
    world.store.schedules().declare(SCHEDULE, &tick).await.expect("MongoDB is there");
    let mut done: BTreeMap<&'static str, usize> = BTreeMap::new();
    let (begin, mut said) = (Instant::now(), Instant::now());
    let enqueuer = Enqueuer { store: world.store.clone(), asked: world.asked.clone(), random: StdRng::seed_from_u64(!day.seed) };
    let enqueuing = tokio::spawn(enqueuer.enqueue_all(day));
    while begin.elapsed() < day.duration || !enqueuing.is_finished() {
        world.tend();
        // Random values depend only on the seed, not on timing.
        let (blow, wait) = (random.random_range(0..1_000), Duration::from_millis(random.random_range(5..120)));
        *done.entry(strike(&mut world, &mut mongo, &mut random, blow).await).or_default() += 1;
        if said.elapsed() > SAY_EVERY {
            said = Instant::now();
            let acknowledged = world.asked.acknowledged().len();
            say(&format!(
                "{:?}: {acknowledged} of {} jobs acknowledged, {} unfinished, {done:?}",
                begin.elapsed(),
                day.jobs,
                world.unfinished().await
            ));
        }
        pause(wait).await;
    }
    let refused = enqueuing.await.expect("it does not panic");
    mongo.whole().await;
    world.store.schedules().remove(SCHEDULE, None).await.expect("all members are there");
    let last = Instant::now();
    let quiet = world.until_quiet(SOON.max(day.duration)).await;
    let recovery = last.elapsed();
    let mut findings = world.judge().await;
    if !quiet {
        findings.broken.push(format!("I7: not quiet after the last blow:\n{}", world.logs()));
    }
    done.remove("nothing");
    Outcome { findings, done, refused, recovery }
}

/// Injects one fault or none. Returns its name.
async fn strike(world: &mut World, mongo: &mut ReplicaSet, random: &mut StdRng, blow: u32) -> &'static str {
    let member = random.random_range(0..world.members.len());
    let process = &world.members[member].process;
    match blow {
        0..30 => {
            process.terminate();
            "stopped"
        }
        30..70 => {
            process.kill();
            "killed"
        }
        70..90 => {
            process.pause();
            "frozen"
        }
        90..96 => {
            mongo.step_down().await;
            "primary stepped down"
        }
        96..99 => {
            let primary = mongo.primary().await;
            mongo.kill(primary).await;
            mongo.restart(primary).await;
            "primary killed"
        }
        99 => {
            let primary = mongo.primary().await;
            mongo.pause(primary);
            mongo.primary_other_than(primary).await;
            mongo.resume(primary);
            "primary frozen"
        }
        _ => "nothing",
    }
}

/// The application, which enqueues jobs of every kind during the faults.
struct Enqueuer {
    store: Store,
    asked: Asked,
    random: StdRng,
}

impl Enqueuer {
    /// Spreads the jobs over the duration. Returns how many were refused, which is allowed while there is no primary.
    async fn enqueue_all(mut self, day: BadDay) -> usize {
        let begin = Instant::now();
        let (mut enqueued, mut refused) = (0, 0);
        let mut before = Vec::new();
        while enqueued < day.jobs {
            let random = &mut self.random;
            let jobs: Vec<(NewJob, Policy)> = (0..BATCH.min(day.jobs - enqueued))
                .map(|_| {
                    let (job, policy) = job(random);
                    (constrained(job, &before, random), policy)
                })
                .collect();
            enqueued += jobs.len();
            let (store, asked) = (&self.store, &self.asked);
            let done = join_all(jobs.into_iter().map(|(job, policy)| asked.enqueue(store, job, policy))).await;
            refused += done.iter().filter(|done| done.is_err()).count();
            before = done.into_iter().filter_map(Result::ok).collect();
            let share = u32::try_from(enqueued).unwrap_or(u32::MAX);
            let next = day.duration * share / u32::try_from(day.jobs).unwrap_or(u32::MAX);
            pause(next.saturating_sub(begin.elapsed())).await;
        }
        refused
    }
}

/// The same job, perhaps with limits, in a line, or after the end of one of the jobs `before`.
fn constrained(job: NewJob, before: &[JobId], random: &mut StdRng) -> NewJob {
    match (random.random_range(0..10), before.choose(random)) {
        (0, _) => job.limit("printer"),
        (1, _) => job.limit(format!("customer:{}", random.random_range(0..5))).limit("printer"),
        (2, _) => job.limit("api"),
        (3, _) => job.in_line(format!("order-{}", random.random_range(0..10))),
        (4, Some(parent)) => job.waits_for_all([Edge::ended(*parent)]),
        _ => job,
    }
}

fn job(random: &mut StdRng) -> (NewJob, Policy) {
    let short = Duration::from_millis(random.random_range(1..200));
    let times = |failures: u32| RetryManyTimes::new(AGAIN + failures, short).expect("a policy");
    let exponential =
        ExponentialBackoff::new(AGAIN, Duration::from_millis(1)).and_then(|policy| policy.waiting_at_most(short)).expect("a policy");
    let failures = if random.random_bool(0.2) { random.random_range(1..4) } else { 0 };
    let ms = if random.random_bool(0.02) { random.random_range(1_000..5_000) } else { random.random_range(0..30) };
    let deaf = random.random_bool(0.01);
    let policies: [(Option<Box<dyn RetryPolicy>>, Policy); 7] = [
        (None, Policy::Never),
        (Some(Box::new(times(failures))), Policy::Again(AGAIN + failures)),
        (Some(Box::new(RetryForever::new(short).expect("a policy"))), Policy::Any),
        (Some(Box::new(exponential)), Policy::Again(AGAIN)),
        (Some(Box::new(TimeTable::new([(Duration::from_secs(3_600), short)]).expect("a policy"))), Policy::Any),
        (Some(Box::new(RetriableExceptionFilter::new(times(0), ["not-yet", "worker-died"]).expect("a policy"))), Policy::Again(AGAIN)),
        (Some(Box::new(SelectByException::when(["not-yet"], times(0)).expect("a policy"))), Policy::Again(AGAIN)),
    ];
    let (policy, judged) = &policies[random.random_range(0..policies.len())];
    let group = ["generic", "mail", "reports", "fast-lane"].choose(random).expect("there are some");
    let mut job = Entry { ms, failures: if policy.is_some() { failures } else { 0 }, deaf }.as_job();
    if policy.is_some() && random.random_bool(0.1) {
        job = Settle { ms: random.random_range(0..30) }.as_job();
    }
    job = job.in_group(*group).priority(Priority::new(random.random_range(0..10)).expect("there are ten"));
    if random.random_bool(0.1) {
        job = job.after(Duration::from_millis(random.random_range(0..3_000)));
    }
    if let Some(policy) = policy {
        job = job.retry(policy.as_ref());
    }
    (job, *judged)
}
