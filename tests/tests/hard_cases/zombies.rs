//! Zombies and doubles: who comes back after having been declared dead, who believes to be what another is by now, what arrives
//! late or twice, and who only looks dead.

use std::{
    collections::BTreeSet,
    fs,
    process::{Child, Command},
    time::{Duration, Instant},
};

use bson::{Bson, Document, Timestamp, doc, oid::ObjectId};
use futures_util::{StreamExt, TryStreamExt, future::join_all, stream};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use procfs::process::Process as Proc;
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom};
use recruiter_common::{
    enqueue::Workable,
    ids::{JobId, WorkerId},
    retry_policy::RetryManyTimes,
    roster::Place,
    shutdown::pause,
    store::Announcement,
};
use recruiter_tests::{
    factory,
    faults::{Blow, Moment},
    ledger::{BlockingPoison, Entry, Event, Harm, Longer, Poison},
    mongo::{TestDatabase, own_mongod},
    oracle::{Findings, Policy},
    processes::Process,
    proxy::{Action, Proxy},
    report::Row,
    steps::step,
    world::{Role, World},
};

use crate::{PATIENT, SOON, again, archived, close, end_of, fault, number, tended, wait, world, world_with};

/// A start, an outcome that goes to the archive, one that is to be retried, and an assignment, as steps.
const START: &str = "update scheduled _id,locked,attempts,$expr";
const ARCHIVE: &str = "delete scheduled _id,locked,last_execution.start";
const RESCHEDULE: &str = "update scheduled _id,locked,last_execution.start";
const ASSIGN: &str = "update roster available,term,retired,_id,free";

/// Far less than the minute after which MongoDB itself ends a transaction that nobody goes on with.
const AT_ONCE: Duration = Duration::from_secs(15);

/// The documents of the roster.
async fn roster(world: &World) -> Vec<Document> {
    world.database.raw("roster").find(doc! {}).await.unwrap().try_collect().await.unwrap()
}

async fn until_available(world: &World, workers: u64) {
    let there = doc! { "available": true, "term": { "$gt": 0 } };
    wait(world, "the workers are there", async || world.count("roster", there.clone()).await == workers).await;
}

fn log(world: &World, member: usize) -> String {
    world.members[member].process.stderr()
}

/// A worker is declared dead while it stands still, and its jobs are done by another. Then it goes on: right before it writes an
/// outcome, in the middle of that, right before it puts a job back, or while its jobs still run.
#[tokio::test]
async fn what_a_worker_says_after_its_death_is_refused_and_it_comes_back_as_another() {
    let mut world = world_with("3s").await;
    let steps = [
        ("outcome", Some(ARCHIVE)),
        ("insert", Some("insert archived")),
        ("commit", Some("commitTransaction")),
        ("retry", Some(RESCHEDULE)),
        ("running", None),
    ];
    let (mut done_again, mut ended) = (Vec::new(), Vec::new());
    for (group, step) in &steps {
        // Done again it takes so long that it is running when its first worker comes back.
        let ms = if step.is_some() { 200 } else { 8_000 };
        let first = Entry { ms, failures: u32::from(*group == "retry"), ..Entry::default() };
        let job = Longer { first, again_ms: 6_000 }.as_job().in_group(*group);
        done_again.push(world.enqueue(job.clone().retry(&again(3)), Policy::Again(3)).await.unwrap());
        let other = if *group == "retry" { &mut done_again } else { &mut ended };
        let (job, policy) = if *group == "retry" { (job.retry(&again(4)), Policy::Again(4)) } else { (job, Policy::Never) };
        other.push(world.enqueue(job, policy).await.unwrap());
    }
    let zombies = steps.map(|(group, step)| {
        let freeze = step.map(|step| fault(Blow::Freeze, Moment::Before, 1, step));
        (group, world.start(Role::Worker, &["--work-on", group], freeze.as_slice()))
    });
    let sleeper = &world.members[zombies[4].1].process;
    let begun = || world.ledger().iter().filter(|line| line.event == Event::Begin && line.worker == sleeper.pid()).count();
    wait(&world, "the long jobs are running", async || begun() == 2).await;
    sleeper.pause();
    wait(&world, "they stand still", async || zombies.iter().all(|(_, zombie)| world.members[*zombie].process.is_stopped())).await;

    let heir = world.start(Role::Worker, &[], &[]);
    wait(&world, "their jobs have ended or are running again", async || {
        let again = doc! { "_id": { "$in": done_again.clone() }, "locked": true, "attempts": 2 };
        world.count("archived", doc! { "why": "worker-died" }).await == 4 && world.count("scheduled", again).await == 6
    })
    .await;
    let documents = async |name: &str| world.database.raw(name).find(doc! {}).await.unwrap().try_collect::<Vec<Document>>().await.unwrap();
    let before = [documents("archived").await, documents("scheduled").await];
    let continued = Instant::now();
    zombies.iter().for_each(|(_, zombie)| world.members[*zombie].process.resume());
    for (group, zombie) in &zombies {
        let pid = world.members[*zombie].process.pid();
        wait(&world, "it is back", async || world.count("roster", doc! { "pid": pid, "available": true }).await == 1).await;
        assert!(log(&world, *zombie).contains("declared dead"), "{group}");
        wait(&world, "its outcome is refused", async || log(&world, *zombie).contains("its outcome is dropped")).await;
    }
    let recovery = continued.elapsed();
    if recovery < Duration::from_secs(3) {
        assert_eq!([documents("archived").await, documents("scheduled").await], before, "what a dead worker says changes nothing");
    }
    wait(&world, "all is done", async || world.unfinished().await == 0).await;
    for id in done_again {
        assert_eq!(end_of(&world, id).await, ("done".into(), 2, vec!["worker-died".into(), "none".into()]));
    }
    for id in ended {
        assert_eq!(end_of(&world, id).await, ("worker-died".into(), 1, vec!["worker-died".into()]));
    }
    world.members[heir].process.terminate();
    world.members[heir].process.wait_exit(SOON).await;
    for (group, zombie) in &zombies {
        let id = world.enqueue(Entry::lasting(0).in_group(*group), Policy::Never).await.unwrap();
        wait(&world, "it works again", async || archived(&world, id).await.is_some()).await;
        let line = world.ledger().into_iter().find(|line| line.execution().0 == id).unwrap();
        assert_eq!(line.worker, world.members[*zombie].process.pid());
    }
    close(world, "a worker goes on after its death", zombies.len(), recovery).await;
}

/// A leader freezes in the middle of a round and is followed; when it goes on, it finishes that round.
#[tokio::test]
async fn a_leader_that_missed_the_end_of_its_term_assigns_nothing() {
    let mut row = Row::new("two recruiters that both believe they lead: one frozen in a round");
    for (findings, recovery) in join_all([Moment::Before, Moment::After].map(frozen_in_a_round)).await {
        row.add(findings, recovery);
    }
    row.close();
}

async fn frozen_in_a_round(moment: Moment) -> (Findings, Duration) {
    let mut world = World::new().await;
    let old = world.start(Role::Recruiter, &[], &[fault(Blow::Freeze, moment, 2, ASSIGN)]);
    wait(&world, "it leads", async || log(&world, old).contains("leading")).await;
    let new = world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Cleaner, &[], &[]);
    world.start(Role::Worker, &[], &[]);
    world.start(Role::Worker, &[], &[]);
    until_available(&world, 2).await;
    while !world.members[old].process.is_stopped() {
        world.enqueue(Entry::lasting(20), Policy::Never).await.unwrap();
        pause(Duration::from_millis(100)).await;
    }
    wait(&world, "the other leads", async || log(&world, new).contains("leading")).await;
    // So that there is much to assign, and somebody to assign it to, when the old leader goes on.
    for _ in 0..100 {
        world.enqueue(Entry::lasting(20), Policy::Never).await.unwrap();
    }
    let continued = Instant::now();
    world.members[old].process.resume();
    wait(&world, "it notices", async || log(&world, old).contains("another recruiter leads")).await;
    wait(&world, "all is done", async || world.unfinished().await == 0).await;
    (world.judge().await, continued.elapsed())
}

/// The lease is deleted again and again under two recruiters, so that both lead. It is not the first lease.
#[tokio::test]
async fn when_two_recruiters_lead_at_once_nothing_runs_twice_and_nothing_stops() {
    let mut world = World::new().await;
    let first = world.start(Role::Recruiter, &[], &[]);
    wait(&world, "it leads", async || log(&world, first).contains("leading")).await;
    world.members[first].process.terminate();
    world.members[first].process.wait_exit(SOON).await;
    let both = [(); 2].map(|()| world.start(Role::Recruiter, &[], &[]));
    world.start(Role::Cleaner, &[], &[]);
    world.start(Role::Worker, &[], &[]);
    world.start(Role::Worker, &[], &[]);
    until_available(&world, 2).await;
    let led = |world: &World| both.map(|recruiter| log(world, recruiter).matches("leading").count());
    let mut deleted = 0;
    while led(&world).iter().any(|times| *times < 3) && deleted < 100 {
        world.database.raw("metadata").delete_one(doc! { "_id": "recruiter" }).await.unwrap();
        deleted += 1;
        for ms in 0..10 {
            world.enqueue(Entry::lasting(ms), Policy::Never).await.unwrap();
            pause(Duration::from_millis(20)).await;
        }
    }
    assert!(led(&world).iter().all(|times| *times >= 3), "both led: {:?}\n{}", led(&world), world.logs());
    let deleted_last = Instant::now();
    wait(&world, "all is done", async || world.unfinished().await == 0).await;
    close(world, "two recruiters that both lead: their lease deleted", deleted, deleted_last.elapsed()).await;
}

/// Every process of a host stands still for longer than a death takes and goes on, all in any order; in every other round the
/// MongoDB as well.
#[tokio::test]
async fn when_a_host_wakes_up_nobody_alive_is_declared_dead() {
    let seed = rand::random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut mongo = own_mongod().await;
    let mut world = World::on(TestDatabase::on(&mongo.uri()).await).await;
    world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Cleaner, &["--dead-after", "4s"], &[]);
    world.start(Role::Cleaner, &["--dead-after", "4s"], &[]);
    for _ in 0..3 {
        world.start(Role::Worker, &[], &[]);
    }
    until_available(&world, 3).await;
    let ids = async |world: &World| roster(world).await.iter().map(|worker| worker.get_object_id("_id").unwrap()).collect::<BTreeSet<_>>();
    let before = ids(&world).await;
    let mut order: Vec<usize> = (0..world.members.len()).collect();
    let mut recovery = Duration::ZERO;
    const NIGHTS: usize = 4;
    for night in 0..NIGHTS {
        for _ in 0..6 {
            world.enqueue(Entry::lasting(random.random_range(0..5_000)), Policy::Never).await.unwrap();
        }
        pause(Duration::from_millis(random.random_range(0..500))).await;
        order.shuffle(&mut random);
        order.iter().for_each(|member| world.members[*member].process.pause());
        if night % 2 == 1 {
            mongo.pause().unwrap();
        }
        pause(Duration::from_millis(5_500)).await;
        if night % 2 == 1 {
            mongo.resume().unwrap();
        }
        order.shuffle(&mut random);
        for member in &order {
            world.members[*member].process.resume();
            pause(Duration::from_millis(random.random_range(0..20))).await;
        }
        let awake = Instant::now();
        wait(&world, "all is done", async || world.unfinished().await == 0).await;
        recovery = recovery.max(awake.elapsed());
        assert_eq!(ids(&world).await, before, "night {night}\n{}", world.logs());
    }
    let mut row = Row::new("a whole host asleep and awake again");
    row.add(world.judge().await, recovery);
    row.injected = NIGHTS;
    assert_eq!(row.findings.deaths, 0, "{}", world.logs());
    assert!(!world.logs().contains("a worker is dead"), "{}", world.logs());
    row.close();
    mongo.stop().await.unwrap();
}

/// A command that locks a job is on its way for longer than its worker waits for the reply.
#[tokio::test]
async fn a_start_that_arrives_late_is_handed_back_or_refused_and_no_job_runs_twice() {
    let (handed_back, overtaken, refused) = tokio::join!(late_start_wins(), late_start_is_overtaken(), late_start_is_past_its_lease());
    let mut row = Row::new("a start arrives after its reply timed out");
    [handed_back, overtaken, refused].into_iter().for_each(|(findings, recovery)| row.add(findings, recovery));
    row.close();
}

/// Longer than a call may take.
const LATE: Duration = Duration::from_secs(12);

/// The first start of a worker behind a proxy is late.
async fn late_start(world: &mut World, lease: &str, late: Duration) -> (Proxy, recruiter_tests::proxy::Armed, JobId) {
    let proxy = Proxy::before(world.database.uri()).await;
    let armed = proxy.arm(Action::StallRequest(late), 1..=1, |request| step(&request.body).as_deref() == Some(START));
    world.start_at(&proxy.uri(world.database.name()), Role::Worker, &["--lease", lease], &[]);
    let id = world.enqueue(Entry::lasting(50), Policy::Never).await.unwrap();
    wait(world, "it is being started", async || armed.matched() > 0).await;
    (proxy, armed, id)
}

/// Nobody else starts the job meanwhile: it is locked by a start that nobody waits for any more.
async fn late_start_wins() -> (Findings, Duration) {
    let mut world = world().await;
    let (_proxy, _armed, id) = late_start(&mut world, "40s", LATE).await;
    // Not supervised for now: nobody assigns.
    world.members[0].process.kill();
    wait(&world, "it is handed back", async || {
        let back = doc! { "_id": id, "locked": false, "attempts": 1, "interruptions": 1, "last_execution": { "$exists": false } };
        world.count("scheduled", back).await == 1
    })
    .await;
    let back = Instant::now();
    tended(&mut world, "it is done", async |world| world.unfinished().await == 0).await;
    let job = archived(&world, id).await.unwrap();
    assert_eq!((number(&job, "attempts"), number(&job, "interruptions")), (2, 1), "{job}");
    (world.judge().await, back.elapsed())
}

/// Somebody else has done the job by then.
async fn late_start_is_overtaken() -> (Findings, Duration) {
    let mut world = world().await;
    let (_proxy, _armed, id) = late_start(&mut world, "40s", LATE).await;
    let late = Instant::now();
    world.start(Role::Worker, &[], &[]);
    wait(&world, "it is done", async || archived(&world, id).await.is_some()).await;
    let recovery = late.elapsed();
    assert!(recovery < LATE, "it was done after the late start had arrived: {recovery:?}");
    // Until that has arrived and its worker has had a few heartbeats since.
    pause((LATE + Duration::from_secs(1)).saturating_sub(recovery)).await;
    assert_eq!(end_of(&world, id).await, ("done".into(), 1, vec!["none".into()]));
    (world.judge().await, recovery)
}

/// Its worker has been declared dead by then: carried out, it would lock a job that nobody runs.
async fn late_start_is_past_its_lease() -> (Findings, Duration) {
    let mut world = world().await;
    let late = Duration::from_secs(5);
    let (_proxy, armed, id) = late_start(&mut world, "900ms", late).await;
    let begin = Instant::now();
    // Not supervised for now: nobody else starts it.
    let dead = world.members.pop().unwrap();
    dead.process.kill();
    wait(&world, "it is buried", async || roster(&world).await.is_empty()).await;
    assert!(armed.count() == 1 && begin.elapsed() < late, "it is on its way");
    pause(late + Duration::from_secs(1)).await;
    world.start(Role::Worker, &[], &[]);
    let started = Instant::now();
    wait(&world, "it is done", async || archived(&world, id).await.is_some()).await;
    assert_eq!(end_of(&world, id).await, ("done".into(), 1, vec!["none".into()]), "the late one was not carried out");
    (world.judge().await, started.elapsed())
}

/// Hints of rounds that were taken long ago and of rounds that never were, for jobs that are archived, running here or there, waiting
/// for a retry or not due yet; hints of all other kinds again, and some that are none.
#[tokio::test]
async fn a_hint_that_is_told_again_makes_nothing_run_twice() {
    let mut world = world().await;
    world.start(Role::Worker, &[], &[]);
    world.start(Role::Worker, &[], &[]);
    until_available(&world, 2).await;
    let mut jobs = Vec::new();
    for _ in 0..20 {
        jobs.push(world.enqueue(Entry::lasting(0), Policy::Never).await.unwrap());
    }
    wait(&world, "they are done", async || world.unfinished().await == 0).await;
    let later = RetryManyTimes::new(1, Duration::from_secs(4)).unwrap();
    let failing = Entry { failures: 1, ..Entry::default() };
    let retried = world.enqueue(failing.as_job().retry(&later), Policy::Again(1)).await.unwrap();
    wait(&world, "it has failed", async || world.count("scheduled", doc! { "_id": retried, "attempts": 1, "locked": false }).await == 1)
        .await;
    for _ in 0..8 {
        jobs.push(world.enqueue(Entry::lasting(5_000), Policy::Never).await.unwrap());
    }
    wait(&world, "some are running", async || world.count("scheduled", doc! { "locked": true }).await >= 4).await;
    jobs.push(world.enqueue(Entry::lasting(0).after(Duration::from_secs(3)), Policy::Never).await.unwrap());
    let all: Vec<JobId> = jobs.iter().copied().chain([retried]).collect();

    let signals = world.database.raw("signals");
    let told: Vec<Document> = signals.find(doc! {}).await.unwrap().try_collect().await.unwrap();
    let rounds = told.iter().filter(|hint| hint.get_str("kind").is_ok_and(|kind| kind == "assigned")).count();
    assert!(rounds >= 2, "{told:?}");
    let workers: Vec<WorkerId> = roster(&world).await.iter().map(|worker| worker.get_object_id("_id").unwrap().into()).collect();
    let pairs = || workers.iter().map(|worker| (worker.to_string(), Bson::from(all.clone()))).collect::<Document>();
    let mut hints = Vec::new();
    for _ in 0..5 {
        hints.extend(told.iter().cloned());
        hints.extend(told.iter().filter(|hint| hint.contains_key("round")).cloned().map(|mut hint| {
            hint.insert("pairs", pairs());
            hint
        }));
        hints.extend((0..20).map(|_| doc! { "kind": "assigned", "round": ObjectId::new(), "pairs": pairs() }));
        hints.extend(workers.iter().map(|worker| doc! { "kind": "left", "worker": worker }));
        hints.extend(jobs[..20].iter().map(|job| doc! { "kind": "cancel", "job": job }));
        hints.extend([doc! {}, doc! { "kind": 7 }, doc! { "kind": "assigned", "pairs": "all" }, doc! { "kind": "cancel", "job": "this" }]);
    }
    let replayed = hints.len();
    for hint in &mut hints {
        hint.insert("_id", ObjectId::new());
        // The server fills it in: a hint of just now.
        hint.insert("at", Timestamp { time: 0, increment: 0 });
    }
    // With the time of long ago as well.
    hints.extend(told);
    for hint in &mut hints[replayed..] {
        hint.insert("_id", ObjectId::new());
    }
    for hints in hints.chunks(100) {
        signals.insert_many(hints).await.unwrap();
    }
    let begin = Instant::now();
    let next = world.enqueue(Entry::lasting(0), Policy::Never).await.unwrap();
    wait(&world, "work goes on", async || archived(&world, next).await.is_some()).await;
    let recovery = begin.elapsed();
    wait(&world, "all is done", async || world.unfinished().await == 0).await;
    for id in jobs.into_iter().chain([next]) {
        let job = archived(&world, id).await.unwrap();
        assert_eq!(end_of(&world, id).await, ("done".into(), 1, vec!["none".into()]), "{job}");
        assert!(number(&job, "interruptions") == 0, "{job}");
    }
    assert_eq!(end_of(&world, retried).await, ("done".into(), 2, vec!["not-yet".into(), "none".into()]));
    close(world, "hints told again", hints.len(), recovery).await;
}

/// I2: the transaction of a killed process would keep its jobs for a minute if nobody ended it.
#[tokio::test]
async fn a_kill_in_the_middle_of_a_group_commit_frees_its_jobs_at_once() {
    let moments = [
        (Role::Worker, Moment::After, ARCHIVE),
        (Role::Worker, Moment::After, "insert archived"),
        (Role::Worker, Moment::After, "commitTransaction"),
        (Role::Cleaner, Moment::After, ARCHIVE),
        (Role::Cleaner, Moment::After, "insert archived"),
        (Role::Cleaner, Moment::After, "commitTransaction"),
    ];
    let mut rows =
        [Role::Worker, Role::Cleaner].map(|role| (role, Row::new(format!("kill -9 of a {role:?} in its transaction").to_lowercase())));
    let runs = moments.map(async |(role, moment, step)| (role, killed_in_a_commit(role, moment, step).await));
    let mut runs = stream::iter(runs).buffer_unordered(3);
    while let Some((role, (findings, recovery))) = runs.next().await {
        rows.iter_mut().find(|row| row.0 == role).unwrap().1.add(findings, recovery);
    }
    rows.into_iter().for_each(|(_, row)| row.close());
}

async fn killed_in_a_commit(role: Role, moment: Moment, step: &str) -> (Findings, Duration) {
    let mut world = World::new().await;
    // A worker's second transaction has what has gathered during the first.
    let freeze = fault(Blow::Freeze, moment, if role == Role::Worker { 2 } else { 1 }, step);
    let faults = |of| if of == role { std::slice::from_ref(&freeze) } else { &[] };
    world.start(Role::Recruiter, &[], &[]);
    let cleaner = world.start(Role::Cleaner, &["--dead-after", PATIENT], faults(Role::Cleaner));
    let worker = world.start(Role::Worker, &["--concurrency", "50"], faults(Role::Worker));
    until_available(&world, 1).await;
    let first = Entry { ms: if role == Role::Worker { 300 } else { 600_000 }, ..Entry::default() };
    for _ in 0..20 {
        world.enqueue(first.as_job(), Policy::Never).await.unwrap();
        let again_ms = first.ms.min(300);
        world.enqueue(Longer { first: first.clone(), again_ms }.as_job().retry(&again(5)), Policy::Again(5)).await.unwrap();
    }
    let victim = if role == Role::Worker { worker } else { cleaner };
    let dead = world.members[worker].process.pid();
    if role == Role::Cleaner {
        wait(&world, "the jobs are running", async || world.count("scheduled", doc! { "locked": true }).await == 40).await;
        world.members[worker].process.kill();
    }
    // It may be that all outcomes were in the first transaction: then there are more.
    let begin = Instant::now();
    while !world.members[victim].process.is_stopped() {
        assert!(begin.elapsed() < SOON, "it did not strike: {step}\n{}", world.logs());
        if role == Role::Worker {
            world.enqueue(Entry::lasting(100), Policy::Never).await.unwrap();
        }
        pause(Duration::from_millis(100)).await;
    }
    world.members[victim].process.kill();
    let killed = Instant::now();
    let held = doc! { "locked": true, "last_execution.pid": dead };
    tended(&mut world, "its jobs are free", async |world| world.count("scheduled", held.clone()).await == 0).await;
    let recovery = killed.elapsed();
    assert!(recovery < AT_ONCE, "{role:?}, {step}: its jobs were free after {recovery:?}\n{}", world.logs());
    tended(&mut world, "all is done", async |world| world.unfinished().await == 0).await;
    (world.judge().await, recovery)
}

/// Whether this user may make pid namespaces.
fn may_contain() -> bool {
    Command::new("unshare").args(["--pid", "--fork", "--mount-proc", "true"]).status().is_ok_and(|status| status.success())
}

/// As a container does: a pid namespace of its own, in which it is process 1, and the hostname of everybody.
const CONTAINER: [&str; 5] = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"];

/// The process in a container, by its id out here.
fn inside(container: &Process) -> Pid {
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", container.pid())).unwrap_or_default();
    Pid::from_raw(children.split_whitespace().next().expect("somebody is in the container").parse().unwrap())
}

async fn stop(container: &mut Process) {
    kill(inside(container), Signal::SIGTERM).unwrap();
    assert!(container.wait_exit(SOON).await.success());
}

/// Three workers of one hostname, two of them process 1 of containers of their own, another one out here; a cleaner out here that
/// finds something else at process 1, and one in a container that finds nobody.
#[tokio::test]
async fn nobody_is_gone_for_a_cleaner_that_cannot_see_its_process() {
    if !may_contain() {
        println!("this user may make no pid namespaces: only documents are changed");
        return;
    }
    let mut world = World::new().await;
    world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Cleaner, &["--dead-after", "4s"], &[]);
    let mut cleaner = world.beside(&CONTAINER, Role::Cleaner, &["--dead-after", "4s"]);
    let mut containers = [(); 2].map(|()| world.beside(&CONTAINER, Role::Worker, &[]));
    let worker = world.start(Role::Worker, &[], &[]);
    until_available(&world, 3).await;
    let workers = roster(&world).await;
    let different = |field: &str| workers.iter().map(|worker| worker.get(field).unwrap().to_string()).collect::<BTreeSet<_>>().len();
    assert_eq!((different("hostname"), different("pid_namespace"), different("pid")), (1, 3, 2), "{workers:?}");
    let long = RetryManyTimes::new(9, Duration::ZERO).unwrap();
    for _ in 0..9 {
        world.enqueue(Entry::lasting(5_000), Policy::Never).await.unwrap();
    }
    wait(&world, "all is done", async || world.unfinished().await == 0).await;
    assert_eq!(roster(&world).await.iter().map(|worker| worker.get_object_id("_id").unwrap()).collect::<BTreeSet<_>>().len(), 3);
    assert!(!(world.logs() + &cleaner.stderr()).contains("a worker is dead"), "{}", world.logs());

    // Who really dies in a container is found by its silence; the other one, with the same hostname and the same pid, lives on.
    world.members[worker].process.terminate();
    world.members[worker].process.wait_exit(SOON).await;
    for _ in 0..6 {
        world.enqueue(Entry::lasting(300).retry(&long), Policy::Again(9)).await.unwrap();
        world.enqueue(Entry::lasting(5_000), Policy::Never).await.unwrap();
    }
    wait(&world, "they are running", async || world.count("scheduled", doc! { "locked": true }).await >= 6).await;
    kill(inside(&containers[0]), Signal::SIGKILL).unwrap();
    let killed = Instant::now();
    wait(&world, "all is done", async || world.unfinished().await == 0).await;
    let recovery = killed.elapsed();
    assert_eq!(roster(&world).await.len(), 1);
    // Both cleaners may have seen it.
    let said = world.logs() + &cleaner.stderr();
    let dead: BTreeSet<&str> =
        said.lines().filter_map(|line| line.split_once("a worker is dead: retiring it ")).map(|(_, who)| who).collect();
    assert!(dead.len() == 1 && dead.iter().all(|who| who.ends_with("death=Silent")), "{dead:?}\n{said}");
    stop(&mut containers[1]).await;
    stop(&mut cleaner).await;
    close(world, "containers that share a hostname", 1, recovery).await;
}

/// The same by what the documents say: the hostname is no identity, and half of one is none.
#[tokio::test]
async fn a_place_that_is_elsewhere_or_unknown_is_never_gone() {
    let mut world = World::new().await;
    world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Cleaner, &["--dead-after", PATIENT], &[]);
    let nobody = i32::MAX;
    let places = [
        doc! { "$set": { "pid_namespace": "pid:[1]", "pid": nobody } },
        doc! { "$set": { "boot_id": "another machine's", "pid": nobody } },
        doc! { "$set": { "pid_namespace": "", "pid": nobody } },
        doc! { "$set": { "boot_id": "", "pid": nobody } },
        doc! { "$set": { "pid": nobody }, "$unset": { "process_start_ticks": "" } },
        doc! { "$set": { "pid": 0 } },
    ];
    for _ in &places {
        world.start(Role::Worker, &["--concurrency", "1"], &[]);
    }
    until_available(&world, places.len() as u64).await;
    let before = roster(&world).await;
    for _ in 0..places.len() {
        world.enqueue(Entry::lasting(4_000), Policy::Never).await.unwrap();
    }
    for (worker, place) in before.iter().zip(&places) {
        world.database.raw("roster").update_one(doc! { "_id": worker.get_object_id("_id").unwrap() }, place.clone()).await.unwrap();
    }
    let begin = Instant::now();
    wait(&world, "all is done", async || world.unfinished().await == 0).await;
    let recovery = begin.elapsed();
    assert!(!world.logs().contains("a worker is dead"), "{}", world.logs());
    assert_eq!(roster(&world).await.len(), places.len());
    close(world, "workers at places that nobody can see", places.len(), recovery).await;
}

/// A process that does nothing, and is killed when dropped.
struct Idle(Child);

impl Idle {
    fn start() -> Self {
        Self(Command::new("sleep").arg("600").spawn().unwrap())
    }

    fn place(&self) -> Place {
        let pid = i32::try_from(self.0.id()).unwrap();
        let ticks = Proc::new(pid).and_then(|process| process.stat()).unwrap().starttime;
        Place { pid, process_start_ticks: ticks.try_into().unwrap(), ..Place::of_this_process().unwrap() }
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A worker of which there is only a document, with two jobs that it has started.
async fn phantom(world: &World, place: Place) -> [JobId; 2] {
    let announcement = Announcement { place, ..factory::announcement(2) };
    world.store.register(&announcement).await.unwrap();
    let never = world.enqueue(Entry::lasting(0).in_group("phantoms"), Policy::Never).await.unwrap();
    let again = world.enqueue(Entry::lasting(0).in_group("phantoms").retry(&again(1)), Policy::Again(1)).await.unwrap();
    world.store.heartbeat(announcement.id, &[never, again]).await.unwrap();
    assert_eq!(factory::started(&world.store, announcement.id, &[never, again]).await.len(), 2);
    [never, again]
}

/// I10: a pid that belongs to another process by now proves a death, the same process a life, however long it is silent.
#[tokio::test]
async fn a_pid_is_a_worker_only_together_with_its_start() {
    let mut world = World::new().await;
    world.start(Role::Cleaner, &["--dead-after", PATIENT], &[]);
    let mut idle = Idle::start();
    let place = idle.place();
    let alive = phantom(&world, place.clone()).await;
    let reused = phantom(&world, Place { process_start_ticks: place.process_start_ticks - 1, ..place.clone() }).await;
    let begin = Instant::now();
    wait(&world, "it is gone", async || end_seen(&world, reused).await).await;
    let reuse = begin.elapsed();
    assert!(reuse < AT_ONCE, "{reuse:?}");
    pause(Duration::from_secs(3)).await;
    assert_eq!(world.count("scheduled", doc! { "_id": { "$in": alive.to_vec() }, "locked": true }).await, 2, "{}", world.logs());
    assert_eq!(roster(&world).await.len(), 1);
    idle.0.kill().unwrap();
    let begin = Instant::now();
    wait(&world, "it is gone, though nobody has waited for it", async || end_seen(&world, alive).await).await;
    assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
    for [never, _] in [alive, reused] {
        // A phantom's policy, as the factory stores it, wants nothing again.
        assert_eq!(end_of(&world, never).await, ("worker-died".into(), 1, vec!["worker-died".into()]));
    }
    close(world, "a pid that belongs to another process", 2, reuse).await;
}

async fn end_seen(world: &World, jobs: [JobId; 2]) -> bool {
    world.count("archived", doc! { "_id": { "$in": jobs.to_vec() } }).await == 2
}

/// I5: jobs that take many times as long as a death, one on the runtime and one on a thread of its own.
#[tokio::test]
async fn a_long_job_of_a_healthy_worker_is_left_alone() {
    let mut world = World::new().await;
    world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Cleaner, &["--dead-after", "3s"], &[]);
    world.start(Role::Worker, &[], &[]);
    let long = 18_000;
    let jobs = [
        world.enqueue(Entry::lasting(long), Policy::Never).await.unwrap(),
        world.enqueue(Entry::lasting(long).retry(&again(3)), Policy::Again(3)).await.unwrap(),
        world.enqueue(BlockingPoison(Poison::new(Harm::Spin(long))).as_job(), Policy::Never).await.unwrap(),
    ];
    wait(&world, "all is done", async || world.unfinished().await == 0).await;
    for id in jobs {
        assert_eq!(end_of(&world, id).await, ("done".into(), 1, vec!["none".into()]));
    }
    assert!(!world.logs().contains("a worker is dead"), "{}", world.logs());
    close(world, "jobs six times as long as a death", jobs.len(), Duration::ZERO).await;
}
