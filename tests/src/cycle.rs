//! The whole cycle in a few seconds: a run that takes every step of the protocol at least once, so that each step can
//! be broken. It has jobs that succeed, fail, are retried, are due later, are cancelled, and were done before; jobs with a
//! capacity and a rate, in a line, in a pipeline and of a schedule; a document that is not a job; a worker that dies, a
//! lock without a holder, and an archive to prune.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use bson::{doc, oid::ObjectId};
use recruiter_common::{
    JobId, Limit, Rate, Workable,
    schedules::{Missed, Schedule},
    shutdown::pause,
    store::gate_of_line,
};
use tokio::{runtime::Handle, sync::Semaphore, task::spawn_blocking};

use crate::{
    factory::{again, insert_unvalidated, minimal_job},
    faults::Fault,
    ledger::Entry,
    oracle::{Findings, Policy},
    wait::SOON,
    world::{Role, Step, World},
};

/// Interval between two checks of a run.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Maximum number of runs at a time, each with four processes. Twelve saturate two cores, so that leases end and retries make more work.
pub const AT_A_TIME: usize = 6;
/// Number of retries of a job that may be retried: more than the rescues in a run.
const AGAIN: u32 = 12;

/// The faults of a run.
#[derive(Clone, Default)]
pub struct Breaks {
    /// Faults inside the processes, of the first process of each role. The second and later faults of a role also apply
    /// to its substitute.
    pub faults: Vec<(Role, Fault)>,
    /// Connection strings for the first processes of these roles.
    pub lines: Vec<(Role, String)>,
    /// The number of network faults that have struck so far.
    pub on_the_way: Option<Arc<dyn Fn() -> usize + Send + Sync>>,
}

impl Breaks {
    fn faults_of(&self, role: Role) -> Vec<Fault> {
        self.faults.iter().filter(|(of, _)| *of == role).map(|(_, fault)| fault.clone()).collect()
    }
}

impl fmt::Debug for Breaks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Breaks").field("faults", &self.faults).field("lines", &self.lines).finish_non_exhaustive()
    }
}

/// The result of a run.
#[derive(Debug)]
pub struct Run {
    /// The violations found.
    pub findings: Findings,
    /// The faults of the processes that have struck.
    pub struck: Vec<(Role, Fault)>,
    /// Time from the last fault, as observed in a process or on the network, until everything was done. `None` when no
    /// fault struck.
    pub recovery: Option<Duration>,
    /// The steps that were taken, and how often.
    pub steps: BTreeMap<Step, u32>,
    /// The operations of the store that took them.
    pub operations: BTreeSet<(String, Step)>,
}

/// One run of the cycle on a thread of its own, so that a blocking call does not block other runs. At most
/// [`AT_A_TIME`] run at a time.
pub async fn run_beside_others(world: World, breaks: Breaks) -> Run {
    static TURNS: Semaphore = Semaphore::const_new(AT_A_TIME);
    let _turn = TURNS.acquire().await.expect("it is never closed");
    let here = Handle::current();
    spawn_blocking(move || here.block_on(run(world, breaks))).await.expect("a run does not panic")
}

/// One run of the cycle in a new world.
pub async fn run(mut world: World, breaks: Breaks) -> Run {
    prepare(&mut world).await;
    let start = |world: &mut World, role: Role| {
        let uri = breaks.lines.iter().find(|(of, _)| *of == role).map_or(world.database.uri(), |(_, uri)| uri).to_owned();
        world.start_at(&uri, role, &[], &breaks.faults_of(role))
    };
    start(&mut world, Role::Recruiter);
    start(&mut world, Role::Cleaner);
    let victim = world.start(Role::Worker, &[], &[]);
    let mut story = Story::begin(&world).await;
    world.until(SOON, async |world| world.started().await == 2 || world.unfinished().await == 0).await;
    world.members[victim].process.kill();
    start(&mut world, Role::Worker);
    story.enqueue(&world).await;

    let struck = |world: &World| -> Vec<(Role, Fault)> {
        breaks.faults.iter().filter(|(role, fault)| world.struck(*role, fault)).cloned().collect()
    };
    let on_the_way = || breaks.on_the_way.as_ref().map_or(0, |count| count());
    let (mut last_strike, mut strikes, begin) = (None, 0, Instant::now());
    let mut quiet = false;
    while !quiet && begin.elapsed() < SOON {
        world.tend();
        let now = struck(&world).len() + on_the_way();
        if now > strikes {
            (last_strike, strikes) = (Some(Instant::now()), now);
        }
        quiet = story.goes_on(&world).await;
        pause(LOOK_EVERY).await;
    }
    let logs = if quiet { String::new() } else { world.logs() };
    let recovery = last_strike.map(|at| at.elapsed());
    let mut findings = world.judge().await;
    if !quiet {
        findings.broken.push(format!("I7: not quiet after {SOON:?}: {story:?}\n{logs}"));
    }
    // Includes faults that struck during the stop. They delayed nothing.
    let struck = struck(&world);
    let recovery = recovery.or_else(|| (struck.len() + on_the_way() > 0).then_some(Duration::ZERO));
    Run { findings, struck, recovery, steps: world.steps(), operations: world.operations() }
}

/// Sets the limits, and makes the indexes of features: MongoDB builds an index only between transactions, and a fault may leave one open.
pub async fn prepare(world: &mut World) {
    let rate = Rate::new(5, Duration::from_secs(1), 1).expect("a valid rate");
    world.limit("printer", Limit::new(Some(1), Some(rate))).await;
    world.store.prepare_limited_jobs().await.expect("MongoDB is there");
    world.store.prepare_graphs().await.expect("MongoDB is there");
    world.store.put_file(JobId::new(), "of-a-job-that-is-not-there-yet", &b"content"[..]).await.expect("MongoDB is there");
    world.store.heads_of_lines(&[&gate_of_line(LINE)]).await.expect("MongoDB is there");
}

/// The planned events in the jobs of a run, in addition to its faults.
#[derive(Debug, Default)]
pub struct Story {
    /// A job that is done, and that the application then sends again.
    first: Option<JobId>,
    sent_again: bool,
    /// A job that is cancelled while it runs.
    cancelled: Option<JobId>,
    asked_to_cancel: bool,
    schedule_removed: bool,
}

/// A schedule whose second run ends it.
const SCHEDULE: &str = "tick";
/// The key of the line.
const LINE: &str = "order";

impl Story {
    /// Creates the jobs for the worker that dies, and the documents from earlier runs.
    pub async fn begin(world: &World) -> Self {
        let long_ago = bson::DateTime::from_millis(1_000_000);
        let old = doc! { "_id": ObjectId::new(), "done": true, "last_execution": { "ended_at": long_ago } };
        world.database.raw("archived").insert_one(old).await.expect("MongoDB is there");
        world.enqueue(Entry::lasting(2_000), Policy::Never).await.expect("MongoDB is there");
        world.enqueue(Entry::lasting(2_000).retry(&again(AGAIN)), Policy::Again(AGAIN)).await.expect("MongoDB is there");
        Self::default()
    }

    /// Creates all other jobs, after that worker has died.
    pub async fn enqueue(&mut self, world: &World) {
        let tick = Schedule::every(Duration::from_secs(1)).expect("a second is allowed").job(Entry::lasting(0)).missed(Missed::All(100));
        world.store.schedules().declare(SCHEDULE, &tick).await.expect("MongoDB is there");
        self.first = Some(world.enqueue(Entry::lasting(0), Policy::Never).await.expect("MongoDB is there"));
        self.cancelled =
            Some(world.enqueue(Entry::lasting(20_000).retry(&again(AGAIN)), Policy::Again(AGAIN)).await.expect("MongoDB is there"));
        for ms in [0, 1, 10, 50, 600] {
            world.enqueue(Entry::lasting(ms), Policy::Never).await.expect("MongoDB is there");
        }
        for (failures, times) in [(1, AGAIN), (2, AGAIN), (u32::MAX, 1)] {
            let job = Entry { failures, ..Entry::default() }.as_job().retry(&again(times));
            world.enqueue(job, Policy::Again(times)).await.expect("MongoDB is there");
        }
        world
            .enqueue(Entry::lasting(0).in_group("later").after(Duration::from_millis(700)), Policy::Never)
            .await
            .expect("MongoDB is there");
        let again = (again(AGAIN), Policy::Again(AGAIN));
        for constrained in [Entry::lasting(10).limit("printer"), Entry::lasting(10).in_line(LINE)] {
            for _ in 0..2 {
                world.enqueue(constrained.clone().retry(&again.0), again.1).await.expect("MongoDB is there");
            }
        }
        let first = world.enqueue(Entry::lasting(0).retry(&again.0), again.1).await.expect("MongoDB is there");
        world.enqueue(Entry::lasting(0).waits_for(first).retry(&again.0), again.1).await.expect("MongoDB is there");
        let mut no_job = minimal_job("entry");
        no_job.insert("retry_policy", "whatever");
        let id = JobId::from(no_job.get_object_id("_id").expect("a minimal job has an id"));
        world.asked.will_send(id, Policy::Any);
        insert_unvalidated(&world.database, vec![no_job]).await;
        world.asked.was_acknowledged(id);
        // Locked without a holder, before any worker can start it.
        let half = world.enqueue(Entry::lasting(0).after(Duration::from_secs(3_600)), Policy::Never).await.expect("MongoDB is there");
        let lock = doc! { "$set": { "locked": true, "scheduled_at": bson::DateTime::from_chrono(world.store.now()) } };
        world
            .database
            .raw("scheduled")
            .update_one(doc! { "_id": half }, lock)
            .bypass_document_validation(true)
            .await
            .expect("MongoDB is there");
    }

    /// Does the next planned events. Returns whether all have happened and no work is left.
    pub async fn goes_on(&mut self, world: &World) -> bool {
        if let Some(job) = self.cancelled.filter(|_| !self.asked_to_cancel) {
            let asked = world.store.request_cancel_if_started(&[job]).await.expect("MongoDB is there");
            self.asked_to_cancel = asked.contains(&job);
        }
        if let Some(first) = self.first.filter(|_| !self.sent_again)
            && world.count("archived", doc! { "_id": first }).await == 1
        {
            let mut copy = minimal_job("entry");
            copy.insert("_id", first);
            world.asked.will_send(first, Policy::SentAgain);
            world.database.raw("scheduled").insert_one(copy).await.expect("MongoDB is there");
            self.sent_again = true;
        }
        let of_schedule = doc! { "schedule.name": SCHEDULE };
        if !self.schedule_removed && world.count("archived", of_schedule).await >= 2 {
            self.schedule_removed = world.store.schedules().remove(SCHEDULE, None).await.expect("MongoDB is there");
        }
        self.asked_to_cancel
            && self.sent_again
            && self.schedule_removed
            && world.unfinished().await == 0
            && world.count("scheduled", doc! {}).await == 0
            && world.count("archived", doc! { "created_at": { "$exists": false }, "group": { "$exists": false } }).await == 0
    }
}
