//! The whole cycle in a few seconds: a world in which every step of the protocol is taken at least once, so that each can be
//! broken: jobs that succeed, fail, are retried, come later, are cancelled, were done before; a document that is no job; a
//! worker that dies, a lock without a holder, an archive to prune.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use bson::{Document, doc, oid::ObjectId};
use recruiter_common::{enqueue::Workable, ids::JobId, retry_policy::RetryManyTimes, shutdown::pause};
use tokio::{runtime::Handle, sync::Semaphore, task::spawn_blocking};

use recruiter_tests::{
    factory::{insert_unvalidated, minimal_job},
    faults::Fault,
    ledger::Entry,
    oracle::{Findings, Policy},
    world::{Role, World},
};

/// Longer than any scenario needs on a busy machine.
const QUIET_WITHIN: Duration = Duration::from_secs(120);
/// Runs at a time: most of each is waiting.
pub(crate) const AT_A_TIME: usize = 8;
/// How often a job that is done again at all may be done again here: more often than it can be rescued.
const AGAIN: u32 = 12;

/// What is broken in a run.
#[derive(Clone)]
pub(crate) struct Breaks {
    /// In which process: the first of its role.
    pub(crate) role: Role,
    /// By itself, when it takes a step; the second fault and those after it are also those of whoever stands in for it.
    pub(crate) faults: Vec<Fault>,
    /// On its way to MongoDB.
    pub(crate) uri: Option<String>,
    /// Whether what is on the way has struck; the last fault of the process itself when there is nothing.
    pub(crate) struck: Option<Arc<dyn Fn() -> bool + Send + Sync>>,
}

impl Breaks {
    /// A process that breaks when it takes a step.
    pub(crate) fn by_itself(role: Role, faults: &[Fault]) -> Self {
        Self { role, faults: faults.to_vec(), uri: None, struck: None }
    }
}

/// What came of a run.
pub(crate) struct Run {
    pub(crate) findings: Findings,
    /// From the moment when it was seen that the fault had struck until everything was done; nothing when it never struck.
    pub(crate) recovery: Option<Duration>,
    /// The steps that were taken, and how often.
    pub(crate) steps: BTreeMap<(Role, String), u32>,
}

/// One run of the cycle, on a thread of its own: what blocks it, blocks no other. A few at a time, however many tests want one.
pub(crate) async fn run_beside_others(world: World, breaks: Breaks) -> Run {
    static TURNS: Semaphore = Semaphore::const_new(AT_A_TIME);
    let _turn = TURNS.acquire().await.unwrap();
    let here = Handle::current();
    spawn_blocking(move || here.block_on(run(world, Some(breaks)))).await.unwrap()
}

/// One run of the cycle in a new world.
pub(crate) async fn run(mut world: World, breaks: Option<Breaks>) -> Run {
    let start = |world: &mut World, role: Role| {
        let broken = breaks.as_ref().filter(|breaks| breaks.role == role);
        let uri = broken.and_then(|breaks| breaks.uri.clone()).unwrap_or(world.database.uri().to_owned());
        world.start_at(&uri, role, &[], broken.map_or(&[], |breaks| &breaks.faults))
    };
    start(&mut world, Role::Recruiter);
    start(&mut world, Role::Cleaner);
    let victim = world.start(Role::Worker, &[], &[]);
    let mut story = Story::begin(&world).await;
    world
        .until(QUIET_WITHIN, async |world| world.count("scheduled", doc! { "locked": true }).await == 2 || world.unfinished().await == 0)
        .await;
    world.members[victim].process.kill();
    start(&mut world, Role::Worker);
    story.enqueue(&world).await;

    let struck = |world: &World| {
        breaks.as_ref().is_some_and(|breaks| match &breaks.struck {
            Some(struck) => struck(),
            None => breaks.faults.last().is_some_and(|fault| world.struck(breaks.role, fault)),
        })
    };
    let (mut struck_at, begin) = (None, Instant::now());
    let mut quiet = false;
    while !quiet && begin.elapsed() < QUIET_WITHIN {
        world.tend();
        if struck_at.is_none() && struck(&world) {
            struck_at = Some(Instant::now());
        }
        quiet = story.goes_on(&world).await;
        pause(Duration::from_millis(50)).await;
    }
    let logs = if quiet { String::new() } else { world.logs() };
    let recovery = struck_at.map(|at| at.elapsed());
    let mut findings = world.judge().await;
    if !quiet {
        findings.broken.push(format!("I7: not quiet after {QUIET_WITHIN:?}: {story:?}\n{logs}"));
    }
    let recovery = recovery.or_else(|| struck(&world).then_some(Duration::ZERO));
    Run { findings, recovery, steps: world.steps() }
}

/// What happens to the jobs of a run, apart from what is broken on purpose.
#[derive(Debug, Default)]
pub(crate) struct Story {
    /// Done, then sent again by the application.
    first: Option<JobId>,
    sent_again: bool,
    /// Cancelled while it runs.
    cancelled: Option<JobId>,
    asked_to_cancel: bool,
}

impl Story {
    /// What the worker that dies is given, and what is there from before.
    pub(crate) async fn begin(world: &World) -> Self {
        let long_ago = bson::DateTime::from_millis(1_000_000);
        let old = doc! { "_id": ObjectId::new(), "done": true, "last_execution": { "ended_at": long_ago } };
        world.database.raw("archived").insert_one(old).await.unwrap();
        world.enqueue(Entry::lasting(2_000), Policy::Never).await.unwrap();
        world.enqueue(Entry::lasting(2_000).retry(&again(AGAIN)), Policy::Again(AGAIN)).await.unwrap();
        Self::default()
    }

    pub(crate) async fn enqueue(&mut self, world: &World) {
        self.first = Some(world.enqueue(Entry::lasting(0), Policy::Never).await.unwrap());
        self.cancelled = Some(world.enqueue(Entry::lasting(20_000).retry(&again(AGAIN)), Policy::Again(AGAIN)).await.unwrap());
        for ms in [0, 1, 10, 50, 600] {
            world.enqueue(Entry::lasting(ms), Policy::Never).await.unwrap();
        }
        for (failures, times) in [(1, AGAIN), (2, AGAIN), (u32::MAX, 1)] {
            let job = Entry { failures, ..Entry::default() }.as_job().retry(&again(times));
            world.enqueue(job, Policy::Again(times)).await.unwrap();
        }
        world.enqueue(Entry::lasting(0).in_group("later").after(Duration::from_millis(700)), Policy::Never).await.unwrap();
        let mut no_job = minimal_job("entry");
        no_job.insert("retry_policy", "whatever");
        insert_unvalidated(&world.database, vec![no_job.clone()]).await;
        self.acknowledge(world, &no_job, Policy::Any);
        // Locked by nobody before anybody can start it.
        let half = world.enqueue(Entry::lasting(0).after(Duration::from_secs(3_600)), Policy::Never).await.unwrap();
        let lock = doc! { "$set": { "locked": true, "scheduled_at": bson::DateTime::from_chrono(world.store.now()) } };
        world.database.raw("scheduled").update_one(doc! { "_id": half }, lock).await.unwrap();
    }

    fn acknowledge(&self, world: &World, job: &Document, policy: Policy) {
        let id = JobId::from(job.get_object_id("_id").unwrap());
        world.acknowledged.lock().unwrap().insert(id, policy);
    }

    /// Does what it is time for; says whether all has happened and nothing is left to do.
    pub(crate) async fn goes_on(&mut self, world: &World) -> bool {
        if let Some(job) = self.cancelled.filter(|_| !self.asked_to_cancel) {
            self.asked_to_cancel = world.store.request_cancel_if_started(job).await.unwrap();
        }
        if let Some(first) = self.first.filter(|_| !self.sent_again)
            && world.count("archived", doc! { "_id": first }).await == 1
        {
            let mut copy = minimal_job("entry");
            copy.insert("_id", first);
            self.acknowledge(world, &copy, Policy::SentAgain);
            world.database.raw("scheduled").insert_one(copy).await.unwrap();
            self.sent_again = true;
        }
        self.asked_to_cancel
            && self.sent_again
            && world.unfinished().await == 0
            && world.count("scheduled", doc! {}).await == 0
            && world.count("archived", doc! { "created_at": { "$exists": false }, "group": { "$exists": false } }).await == 0
    }
}

fn again(times: u32) -> RetryManyTimes {
    RetryManyTimes::new(times, Duration::from_millis(50)).unwrap()
}
