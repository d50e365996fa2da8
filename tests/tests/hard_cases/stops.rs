//! Stops: TERM to every process at every moment, TERM twice, rolling restarts under load, jobs that do not hear it. None of that
//! costs a counted attempt or leaves a lock.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::{Duration, Instant},
};

use bson::{Document, doc};
use futures_util::{StreamExt, stream};
use recruiter_common::{Workable, shutdown::pause, store::Hint};
use recruiter_tests::{
    coverage::{self, Coverage},
    cycle::{AT_A_TIME, Story, prepare},
    factory::again,
    fail_points::FailPoint,
    faults::{Blow, Fault, Moment},
    full_length,
    ledger::{BlockingPoison, Entry, Harm, Longer, Poison},
    mongo::{TestDatabase, own_mongod},
    oracle::{Findings, Policy, number},
    promise,
    report::Row,
    wait::{Stopwatch, best_of_three, in_a_few_tries},
    world::{Ended, Role, Step, World},
};
use tokio::{runtime::Handle, task::spawn_blocking};

use crate::{PATIENT, SOON, end_of, excuse, fault, tended, until_available, wait, world};

/// Of `systemd/recruiter-worker@.service`.
const TIMEOUT_STOP_SEC: Duration = Duration::from_secs(75);
/// Of `systemd/recruiter-cleaner.service`.
const CLEANER_TIMEOUT_STOP_SEC: Duration = Duration::from_secs(15);
/// Deaths in the cycle without a stop request: one worker, with two jobs.
const DEATHS: usize = 2;
/// How often faults that proved nothing are tried at most, and how often those of steps that are not taken in every run.
const WAVES: usize = 24;
const SOME_WAVES: usize = 2;

/// A fault of each process, or of some.
type Faults = BTreeMap<Role, Fault>;

struct Shown<'a>(&'a Faults);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|(role, fault)| write!(f, "{role:?}: {fault}; "))
    }
}

struct Run {
    findings: Findings,
    recovery: Duration,
    steps: BTreeMap<Step, u32>,
    struck: Faults,
    /// Whether the machine was too slow for a stop in time: then a cleaner ends the jobs, and nothing is proved.
    too_slow: bool,
}

/// TERM at each step of each process, before it is asked for and when its answer is there: in the full length at both moments, otherwise
/// at one of the two. The three stop independently of each other, so that one run stops one of each.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_at_any_step_costs_no_attempt_and_leaves_no_lock() {
    let (good_days, forced) = coverage::good_days().await;
    let mut row = Row::new("TERM before or after a MongoDB call");
    let mut steps = BTreeSet::new();
    for run in good_days {
        row.findings.add(run.findings.of("a run without faults"));
        steps.extend(run.steps.into_keys());
    }
    let stop = |step: &str, moment| fault(Blow::Terminate, moment, 1, step);
    let mut left: Vec<(Role, Fault)> =
        steps.iter().flat_map(|(role, step)| [Moment::Before, Moment::After].map(|moment| (*role, stop(step, moment)))).collect();
    if !full_length() {
        left = left.chunks(2).enumerate().map(|(index, both)| both[index % 2].clone()).collect();
    }
    let mut coverage = Coverage::default();
    for wave in 0..WAVES {
        let mut plans: Vec<Faults> = Vec::new();
        for (role, fault) in left.drain(..) {
            match plans.iter_mut().find(|plan| !plan.contains_key(&role)) {
                Some(plan) => drop(plan.insert(role, fault)),
                None => plans.push([(role, fault)].into()),
            }
        }
        let mut runs = stream::iter(plans).map(async |plan| (cycle(plan.clone()).await, plan)).buffer_unordered(AT_A_TIME);
        while let Some((run, plan)) = runs.next().await {
            println!("{}done after {:?}, struck {}, wrong: {:?}", Shown(&plan), run.recovery, run.struck.len(), run.findings.all());
            row.injected += run.struck.len();
            row.findings.add(run.findings.of(&Shown(&plan).to_string()));
            row.recovery.push(run.recovery);
            coverage.add_run(run.steps.keys());
            for (role, fault) in plan {
                let is_struck = run.struck.contains_key(&role);
                coverage.add(&(role, fault.step.clone()), &format!("{:?}", fault.moment), is_struck);
                if run.too_slow || !is_struck {
                    left.push((role, fault));
                }
            }
        }
        // Steps that are not taken every time are left to chance.
        let lacks = |role, fault: &Fault| coverage.lacks(&(role, fault.step.clone()), &format!("{:?}", fault.moment), &forced);
        left.retain(|(role, fault)| wave + 1 < SOME_WAVES || lacks(*role, fault));
    }
    row.close();
    coverage.close("stops", &forced);
}

/// A run of the cycle, on a thread of its own.
async fn cycle(faults: Faults) -> Run {
    let here = Handle::current();
    spawn_blocking(move || here.block_on(cycle_here(faults))).await.unwrap()
}

async fn cycle_here(faults: Faults) -> Run {
    let mut world = World::new().await;
    prepare(&mut world).await;
    let of = |role| faults.get(&role).map_or(&[][..], std::slice::from_ref);
    world.start(Role::Recruiter, &[], of(Role::Recruiter));
    world.start(Role::Cleaner, &["--dead-after", PATIENT], of(Role::Cleaner));
    world.start(Role::Worker, &[], &[]);
    let mut story = Story::begin(&world).await;
    tended(&mut world, "two jobs are running", async |world| world.started().await == 2).await;
    // It is not restarted: the only worker from here on is the one that stops.
    drop(world.members.pop());
    let begin = Instant::now();
    world.start(Role::Worker, &[], of(Role::Worker));
    story.enqueue(&world).await;
    while !story.goes_on(&world).await {
        assert!(begin.elapsed() < SOON, "{}not done: {story:?}\n{}", Shown(&faults), world.logs());
        world.tend();
        pause(Duration::from_millis(50)).await;
    }
    let recovery = begin.elapsed();
    let mut findings = world.judge().await;
    let ended = world.ended.lock().unwrap().clone();
    let too_slow = ended.iter().any(was_too_slow);
    if findings.deaths > DEATHS && !too_slow {
        findings.broken.push(format!("I8: {} starts ended with a death", findings.deaths));
    }
    findings.broken.extend(ended.iter().filter_map(unclean));
    let retired: usize = ended.iter().map(|ended| ended.log.matches("a worker is dead").count()).sum();
    if retired > 1 && !too_slow {
        findings.broken.push(format!("I8: {retired} workers were found dead\n{}", world.logs()));
    }
    let struck = faults.into_iter().filter(|(role, fault)| world.struck(*role, fault)).collect();
    Run { findings, recovery, steps: world.steps(), struck, too_slow }
}

/// The problem with the end of a process after a stop request.
fn unclean(ended: &Ended) -> Option<String> {
    let twice = ended.log.contains("second stop request");
    let clean = ended.status.success() || twice && ended.status.code() == Some(130);
    (!clean).then(|| format!("I8: {:?} ended with {}:\n{}", ended.role, ended.status, ended.log))
}

/// Whether a process left jobs or its document behind, because they did not end in the seconds that it gives them.
fn was_too_slow(ended: &Ended) -> bool {
    let left = ["not everything ended in time", "could not leave the roster"].iter().any(|words| ended.log.contains(words));
    left && !ended.log.contains("second stop request")
}

/// The jobs that hear it are interrupted and the one that does not is left to the cleaner, however soon the second TERM comes.
#[tokio::test]
async fn a_second_term_ends_a_process_at_once_and_costs_no_attempt_of_a_job_that_hears_it() {
    let mut row = Row::new("a second TERM during the stop");
    let (at_once, soon, later) = tokio::join!(twice(Duration::ZERO), twice(Duration::from_millis(50)), twice(Duration::from_millis(700)));
    [at_once, soon, later].into_iter().for_each(|(findings, recovery)| row.add(findings, recovery));
    row.close();
}

async fn twice(between: Duration) -> (Findings, Duration) {
    // After the second signal the process has two seconds, and that may be too little on a busy machine.
    in_a_few_tries("no job that hears a second TERM is left to the cleaner", async || twice_in_time(between).await).await
}

async fn twice_in_time(between: Duration) -> Option<(Findings, Duration)> {
    let mut world = world().await;
    world.start(Role::Worker, &["--grace", "10m", "--concurrency", "20"], &[]);
    let (mut heard, mut never) = (Vec::new(), Vec::new());
    let long = |deaf| Longer { first: Entry { ms: 600_000, deaf, ..Entry::default() }, again_ms: 0 }.as_job();
    // Few: each of them writes to the disk.
    for _ in 0..2 {
        heard.push(world.enqueue(long(false).retry(&again(1)), Policy::Again(1)).await.unwrap());
        never.push(world.enqueue(long(false), Policy::Never).await.unwrap());
    }
    let deaf = world.enqueue(long(true).retry(&again(1)), Policy::Again(1)).await.unwrap();
    wait(&world, "they are running", async || world.begun().len() == 5).await;
    world.members.iter().for_each(|member| member.process.terminate());
    // Two signals of which the first is not yet taken are one to the kernel.
    let heard_it = |world: &World| world.members.iter().all(|member| member.process.stderr().contains("stop requested"));
    wait(&world, "the first signal is received", async || heard_it(&world)).await;
    pause(between).await;
    world.members.iter().for_each(|member| member.process.terminate());
    for member in 0..3 {
        let status = world.members[member].process.wait_exit(SOON).await;
        assert!(matches!(status.code(), Some(0 | 130)), "{status}");
    }
    // Started again by the supervisor.
    let begin = Instant::now();
    tended(&mut world, "all is done", async |world| world.unfinished().await == 0).await;
    let recovery = begin.elapsed();
    for id in heard.iter().chain(&never) {
        if end_of(&world, *id).await.2.contains(&"worker-died".to_owned()) {
            excuse(world).await;
            return None;
        }
    }
    for id in heard {
        let (job, end) = (world.archived(id).await.unwrap(), end_of(&world, id).await);
        assert_eq!(end, ("done".into(), 2, vec!["interrupted".into(), "none".into()]), "{job}");
        assert!(number(&job, "interruptions") >= 1, "{job}");
    }
    for id in never {
        assert_eq!(end_of(&world, id).await, ("interrupted".into(), 1, vec!["interrupted".into()]));
    }
    assert_eq!(end_of(&world, deaf).await, ("done".into(), 2, vec!["worker-died".into(), "none".into()]));
    Some((world.judge().await, recovery))
}

/// Longer than the grace of a rolling restart.
const LONG_MS: i64 = 4_000;

/// Each process of a fleet is stopped and started again while jobs come in, some of them longer than the grace.
#[tokio::test]
async fn a_rolling_restart_under_load_costs_no_attempt() {
    in_a_few_tries("every process stops in time", rolling_restart).await.close();
}

async fn rolling_restart() -> Option<Row> {
    let mut world = World::new().await;
    for _ in 0..2 {
        world.start(Role::Recruiter, &[], &[]);
        world.start(Role::Cleaner, &["--dead-after", PATIENT], &[]);
    }
    for _ in 0..3 {
        world.start(Role::Worker, &["--grace", "1s"], &[]);
    }
    let fleet = world.members.len();
    let mut stops = Vec::new();
    let rounds = if full_length() { 2 } else { 1 };
    for _ in 0..rounds {
        for member in 0..fleet {
            for ms in 0..20 {
                world.enqueue(Entry::lasting(ms * 10), Policy::Never).await.unwrap();
            }
            let of_it =
                doc! { "locked": true, "last_execution.pid": world.members[member].process.pid(), "workable.parameters.ms": LONG_MS };
            tended(&mut world, "work goes on, and a worker has a long job", async |world| {
                let goes_on = if world.members[member].role == Role::Worker {
                    world.count("scheduled", of_it.clone()).await > 0
                } else {
                    world.started().await > 0
                };
                if !goes_on {
                    world.enqueue(Entry::lasting(LONG_MS).retry(&again(1)), Policy::Again(1)).await.unwrap();
                }
                goes_on
            })
            .await;
            // A signal that arrives before a process listens for signals kills it.
            let is_up = async |world: &World| world.members[member].process.stderr().contains("connected to MongoDB");
            tended(&mut world, "it listens for signals", is_up).await;
            let ended = world.ended.lock().unwrap().len();
            world.members[member].process.terminate();
            let asked = Instant::now();
            tended(&mut world, "it stops and is started again", async |world| world.ended.lock().unwrap().len() > ended).await;
            stops.push(asked.elapsed());
        }
    }
    tended(&mut world, "all is done", async |world| world.unfinished().await == 0).await;
    let mut row = Row::new("a rolling restart of every process under load");
    row.findings = world.judge().await;
    if world.ended.lock().unwrap().iter().any(was_too_slow) {
        excuse(world).await;
        return None;
    }
    row.findings.broken.extend(world.ended.lock().unwrap().iter().filter_map(unclean));
    row.injected = stops.len();
    row.recovery = stops;
    assert_eq!(row.findings.deaths, 0, "{}", world.logs());
    let jobs = world.database.all("archived", doc! {}).await;
    for job in &jobs {
        promise!(job.get_str("why").unwrap() == "done" && number(job, "attempts") - number(job, "interruptions") == 1, "done once: {job}");
    }
    assert!(jobs.iter().any(|job| number(job, "interruptions") > 0), "some were longer than the grace");
    Some(row)
}

/// A job that continues after its cancellation: at its deadline, when a person cancels it, when its worker stops.
#[tokio::test]
async fn a_job_that_ignores_cancellation_is_cut_and_told_so_in_its_history() {
    let (deadline, cancelled, stopped) = tokio::join!(cut_at_the_deadline(), cut_when_cancelled(), cut_at_a_stop());
    let mut row = Row::new("a job that ignores its cancellation is aborted");
    [deadline, cancelled, stopped].into_iter().for_each(|(findings, recovery)| row.add(findings, recovery));
    row.close();
}

fn deaf() -> Entry {
    Entry { ms: 600_000, deaf: true, ..Entry::default() }
}

fn message(job: &Document) -> &str {
    job.get_document("last_execution").unwrap().get_str("message").unwrap()
}

async fn cut_at_the_deadline() -> (Findings, Duration) {
    let mut world = world().await;
    world.start(Role::Worker, &["--time-limit", "700ms"], &[]);
    let begin = Instant::now();
    let never = world.enqueue(deaf().as_job(), Policy::Never).await.unwrap();
    let twice = world.enqueue(deaf().as_job().retry(&again(1)), Policy::Again(1)).await.unwrap();
    wait(&world, "both are cut", async || world.unfinished().await == 0).await;
    let recovery = begin.elapsed();
    assert_eq!(end_of(&world, never).await, ("not-scheduled-by-retry-policy".into(), 1, vec!["timeout".into()]));
    assert_eq!(end_of(&world, twice).await, ("tried-too-many-times".into(), 2, vec!["timeout".into(); 2]));
    let job = world.archived(never).await.unwrap();
    assert_eq!(message(&job), "it took longer than its time limit of 700ms");
    (world.judge().await, recovery)
}

async fn cut_when_cancelled() -> (Findings, Duration) {
    let mut world = world().await;
    world.start(Role::Worker, &[], &[]);
    let id = world.enqueue(deaf().as_job().retry(&again(3)), Policy::Again(3)).await.unwrap();
    wait(&world, "it is running", async || world.ledger().len() == 1).await;
    let begin = Instant::now();
    assert_eq!(world.store.request_cancel_if_started(&[id]).await.unwrap(), [id].into());
    world.store.announce_hint(Hint::Cancel { job: id }).await;
    wait(&world, "it is cut", async || world.unfinished().await == 0).await;
    let recovery = begin.elapsed();
    assert_eq!(end_of(&world, id).await, ("cancelled".into(), 1, vec!["cancelled".into()]));
    assert!(message(&world.archived(id).await.unwrap()).contains("did not stop when asked and was broken off"));
    (world.judge().await, recovery)
}

/// A future can be dropped. A thread cannot be killed: it ends with its process, and the cleaner records that.
async fn cut_at_a_stop() -> (Findings, Duration) {
    let mut world = world().await;
    let worker = world.start(Role::Worker, &["--grace", "500ms"], &[]);
    let never = world.enqueue(deaf().as_job(), Policy::Never).await.unwrap();
    let thread = world.enqueue(BlockingPoison(Poison::new(Harm::Spin(600_000))).as_job(), Policy::Never).await.unwrap();
    wait(&world, "they are running", async || world.ledger().len() == 2).await;
    world.members[worker].process.terminate();
    let asked = Instant::now();
    wait(&world, "both are cut", async || world.unfinished().await == 0).await;
    let recovery = asked.elapsed();
    assert!(world.members[worker].process.wait_exit(SOON).await.success());
    assert_eq!(end_of(&world, never).await, ("interrupted".into(), 1, vec!["interrupted".into()]));
    assert!(message(&world.archived(never).await.unwrap()).contains("did not stop when asked and was broken off"));
    assert_eq!(end_of(&world, thread).await, ("worker-died".into(), 1, vec!["worker-died".into()]));
    (world.judge().await, recovery)
}

/// A thread that ignores its deadline ends later, or with its process; its job never runs twice at the same time.
#[tokio::test]
async fn a_thread_that_outlives_its_deadline_is_late_and_never_doubled() {
    let (late, endless) = tokio::join!(late_thread(), endless_thread());
    let mut row = Row::new("a job whose thread does not end at its time limit");
    [late, endless].into_iter().for_each(|(findings, recovery)| row.add(findings, recovery));
    row.close();
}

async fn late_thread() -> (Findings, Duration) {
    let mut world = world().await;
    world.start(Role::Worker, &[], &[]);
    let late = BlockingPoison(Poison { harm: Harm::Spin(3_000), limit_ms: Some(500) });
    let never = world.enqueue(late.as_job(), Policy::Never).await.unwrap();
    let twice = world.enqueue(late.as_job().retry(&again(1)), Policy::Again(1)).await.unwrap();
    let begin = Instant::now();
    wait(&world, "both have ended", async || world.unfinished().await == 0).await;
    let recovery = begin.elapsed();
    assert_eq!(end_of(&world, never).await, ("not-scheduled-by-retry-policy".into(), 1, vec!["timeout".into()]));
    assert_eq!(end_of(&world, twice).await, ("tried-too-many-times".into(), 2, vec!["timeout".into(); 2]));
    (world.judge().await, recovery)
}

/// One that never ends keeps its place, and no other, until its worker is restarted: once for each attempt.
async fn endless_thread() -> (Findings, Duration) {
    let mut world = world().await;
    let worker = world.start(Role::Worker, &["--grace", "500ms"], &[]);
    let endless = BlockingPoison(Poison { harm: Harm::Spin(i64::MAX), limit_ms: Some(500) });
    let twice = world.enqueue(endless.as_job().retry(&again(1)), Policy::Again(1)).await.unwrap();
    let begin = Instant::now();
    for attempt in 1..=2 {
        let deaths = if attempt == 1 {
            doc! { "$in": [0, null] }
        } else {
            doc! { "$eq": 1 }
        };
        let held = doc! { "_id": twice, "locked": true, "deaths": deaths };
        tended(&mut world, "it is running", async |world| world.count("scheduled", held.clone()).await == 1).await;
        pause(Duration::from_millis(1_500)).await;
        let other = world.enqueue(Entry::lasting(0), Policy::Never).await.unwrap();
        tended(&mut world, "another job is done", async |world| world.archived(other).await.is_some()).await;
        assert_eq!(world.count("scheduled", held).await, 1, "it is past its deadline and runs");
        world.members[worker].process.terminate();
    }
    tended(&mut world, "it has ended", async |world| world.unfinished().await == 0).await;
    let recovery = begin.elapsed();
    assert_eq!(end_of(&world, twice).await, ("worker-died".into(), 2, vec!["worker-died".into(); 2]));
    (world.judge().await, recovery)
}

/// I8: the last calls of a worker to an unreachable MongoDB do not add up: it ends within the unit's `TimeoutStopSec=`.
#[tokio::test]
async fn a_stop_without_mongodb_ends_in_time_however_many_starts_are_unconfirmed() {
    best_of_three(TIMEOUT_STOP_SEC, "a stop without MongoDB", stop_without_mongodb).await;
}

async fn stop_without_mongodb() -> Duration {
    let mut mongo = own_mongod().await;
    let mut world = World::on(TestDatabase::on(&mongo.uri()).await).await;
    world.start(Role::Recruiter, &[], &[]);
    let worker = world.start(Role::Worker, &[], &[]);
    until_available(&world, 1).await;
    let lost = FailPoint::new("recruiter-worker", &["update"]).namespace(world.database.name(), "scheduled").close_connection();
    let armed = lost.arm(&mongo.uri()).await;
    let unconfirmed = |world: &World| world.logs().matches("the outcome of a start is unknown").count();
    for starts in 1..=8 {
        world.enqueue(Entry::lasting(0), Policy::Never).await.unwrap();
        wait(&world, "a start has no answer", async || unconfirmed(&world) >= starts).await;
    }
    drop(armed);
    mongo.pause().unwrap();
    let begin = Stopwatch::start();
    world.members[worker].process.terminate();
    let status = world.members[worker].process.wait_exit(SOON).await;
    let took = begin.elapsed();
    assert!(status.success(), "after {took:?}: {status}\n{}", world.logs());
    mongo.resume().unwrap();
    took
}

/// The calls of its duties do not add up.
#[tokio::test]
async fn a_cleaner_without_mongodb_stops_in_time() {
    best_of_three(CLEANER_TIMEOUT_STOP_SEC, "a stop of a cleaner without MongoDB", stop_of_a_cleaner_without_mongodb).await;
}

async fn stop_of_a_cleaner_without_mongodb() -> Duration {
    let mut mongo = own_mongod().await;
    let mut world = World::on(TestDatabase::on(&mongo.uri()).await).await;
    let cleaner = world.start(Role::Cleaner, &["--every", "100ms", "--sweep-every", "100ms", "--prune-every", "100ms"], &[]);
    wait(&world, "it polls", async || world.logs().contains("watching the heartbeats")).await;
    mongo.pause().unwrap();
    // So that a poll waits for MongoDB.
    pause(Duration::from_millis(500)).await;
    let begin = Stopwatch::start();
    world.members[cleaner].process.terminate();
    let status = world.members[cleaner].process.wait_exit(SOON).await;
    let took = begin.elapsed();
    assert!(status.success(), "after {took:?}: {status}\n{}", world.logs());
    mongo.resume().unwrap();
    took
}
