//! Zombies and doubles: who comes back after having been declared dead, who believes to be what another is by now, and what arrives
//! late or twice.

use std::time::{Duration, Instant};

use bson::{Bson, Document, Timestamp, doc, oid::ObjectId};
use futures_util::{TryStreamExt, future::join_all};
use recruiter_common::{JobId, RetryManyTimes, Workable, WorkerId, shutdown::pause};
use recruiter_tests::{
    factory::again,
    faults::{Blow, Moment},
    ledger::{Entry, Event, Longer},
    mongo::{TestDatabase, own_mongod},
    oracle::{Findings, Policy, number},
    promise,
    proxy::{Action, Armed, Proxy},
    report::Row,
    steps::step,
    wait::in_a_few_tries,
    world::{Role, World},
};

use crate::{PATIENT, SOON, close, end_of, excuse, fault, roster, tended, until_available, wait, world};

/// A start, an outcome that goes to the archive, one that is to be retried, and an assignment, as steps.
const START: &str = "update scheduled _id,locked,attempts,group,$expr,scheduled_at";
const ARCHIVE: &str = "delete scheduled _id,locked,last_execution.start";
const RESCHEDULE: &str = "update scheduled _id,locked,last_execution.start";
const ASSIGN: &str = "update roster available,term,retired,_id,free";

fn log(world: &World, member: usize) -> String {
    world.members[member].process.stderr()
}

/// A worker is declared dead while it stands still, and its jobs are done by another. Then it goes on: right before it writes an
/// outcome, in the middle of that, right before it puts a job back, or while its jobs still run.
#[tokio::test]
async fn what_a_worker_says_after_its_death_is_refused_and_it_comes_back_as_another() {
    let mut world = World::new().await;
    world.start(Role::Recruiter, &[], &[]);
    let steps = [
        ("outcome", Some(ARCHIVE)),
        ("insert", Some("insert archived")),
        ("commit", Some("commitTransaction")),
        ("retry", Some(RESCHEDULE)),
        ("running", None),
    ];
    // Ended for good, put off, or running again when its first worker comes back: for longer than this test takes.
    let later = RetryManyTimes::new(3, Duration::from_secs(600)).unwrap();
    let (mut ended, mut put_off, mut again_at_once) = (Vec::new(), Vec::new(), Vec::new());
    for (group, step) in &steps {
        let ms = if step.is_some() { 200 } else { 600_000 };
        let first = Entry { ms, failures: u32::from(*group == "retry"), ..Entry::default() };
        let job = || Longer { first: first.clone(), again_ms: 600_000 }.as_job().in_group(*group);
        put_off.push(world.enqueue(job().retry(&later), Policy::Again(3)).await.unwrap());
        again_at_once.push(world.enqueue(job().retry(&again(3)), Policy::Again(3)).await.unwrap());
        // Jobs that are retried must have a policy that allows it.
        if *group == "retry" {
            again_at_once.push(world.enqueue(job().retry(&again(4)), Policy::Again(4)).await.unwrap());
        } else {
            ended.push(world.enqueue(job(), Policy::Never).await.unwrap());
        }
    }
    let zombies = steps.map(|(group, step)| {
        let freeze = step.map(|step| fault(Blow::Freeze, Moment::Before, 1, step));
        (group, world.start(Role::Worker, &["--work-on", group, "--lease", "3s"], freeze.as_slice()))
    });
    let sleeper = &world.members[zombies[4].1].process;
    let begun = || world.ledger().iter().filter(|line| line.event == Event::Begin && line.worker == sleeper.pid()).count();
    wait(&world, "the long jobs are running", async || begun() == 3).await;
    sleeper.pause();
    wait(&world, "they stand still", async || zombies.iter().all(|(_, zombie)| world.members[*zombie].process.is_stopped())).await;

    // Only from now on, so that no other worker dies on a busy machine; the heir has a long lease for the same reason.
    let cleaner = world.start(Role::Cleaner, &[], &[]);
    let heir = world.start(Role::Worker, &["--lease", "10m"], &[]);
    wait(&world, "their jobs have ended, are put off, or are running again", async || {
        let put_off = doc! { "_id": { "$in": put_off.clone() }, "locked": false, "deaths": 1 };
        let again = doc! { "_id": { "$in": again_at_once.clone() }, "locked": true, "deaths": 1 };
        world.count("archived", doc! { "why": "worker-died" }).await == ended.len() as u64
            && world.count("scheduled", put_off).await == 5
            && world.count("scheduled", again).await == 6
            && roster(&world).await.len() == 1
    })
    .await;
    world.members[cleaner].process.terminate();
    world.members[cleaner].process.wait_exit(SOON).await;
    let documents = async |name: &str| world.database.all(name, doc! {}).await;
    let before = [documents("archived").await, documents("scheduled").await];
    let continued = Instant::now();
    zombies.iter().for_each(|(_, zombie)| world.members[*zombie].process.resume());
    for (group, zombie) in &zombies {
        let pid = world.members[*zombie].process.pid();
        wait(&world, "it is back", async || world.count("roster", doc! { "pid": pid, "available": true }).await == 1).await;
        assert!(log(&world, *zombie).contains("declared dead"), "{group}");
        wait(&world, "its outcome is refused", async || log(&world, *zombie).contains("no longer holds the job")).await;
    }
    let recovery = continued.elapsed();
    assert_eq!([documents("archived").await, documents("scheduled").await], before, "writes of a dead worker change nothing");

    // The heir hands back what runs, and from now on nothing takes its time.
    let soon = doc! { "$set": { "workable.parameters.again_ms": 0 }, "$min": { "scheduled_at": bson::DateTime::now() } };
    world.database.raw("scheduled").update_many(doc! {}, soon).await.unwrap();
    world.members[heir].process.terminate();
    world.members[heir].process.wait_exit(SOON).await;
    wait(&world, "all is done", async || world.unfinished().await == 0).await;
    let classes = |classes: &[&str]| classes.iter().map(|class| (*class).to_owned()).collect::<Vec<_>>();
    for id in put_off {
        assert_eq!(end_of(&world, id).await, ("done".into(), 2, classes(&["worker-died", "none"])));
    }
    for id in again_at_once {
        assert_eq!(end_of(&world, id).await, ("done".into(), 3, classes(&["worker-died", "interrupted", "none"])));
    }
    for id in ended {
        assert_eq!(end_of(&world, id).await, ("worker-died".into(), 1, classes(&["worker-died"])));
    }
    for (group, zombie) in &zombies {
        let id = world.enqueue(Entry::lasting(0).in_group(*group), Policy::Never).await.unwrap();
        wait(&world, "it works again", async || world.archived(id).await.is_some()).await;
        let line = world.ledger().into_iter().find(|line| line.execution().0 == id).unwrap();
        assert_eq!(line.worker, world.members[*zombie].process.pid());
    }
    close(world, "a worker resumes after it was declared dead", zombies.len(), recovery).await;
}

/// A leader freezes in the middle of a round and is followed; when it goes on, it finishes that round.
#[tokio::test]
async fn a_leader_that_missed_the_end_of_its_term_assigns_nothing() {
    let mut row = Row::new("two leading recruiters: one was frozen in a round");
    for (findings, recovery) in join_all([Moment::Before, Moment::After].map(frozen_in_a_round)).await {
        row.add(findings, recovery);
    }
    row.close();
}

async fn frozen_in_a_round(moment: Moment) -> (Findings, Duration) {
    let mut world = World::new().await;
    let old = world.start(Role::Recruiter, &[], &[fault(Blow::Freeze, moment, 2, ASSIGN)]);
    wait(&world, "it leads", async || log(&world, old).contains("leading")).await;
    world.start(Role::Cleaner, &["--dead-after", PATIENT], &[]);
    world.start(Role::Worker, &[], &[]);
    world.start(Role::Worker, &[], &[]);
    until_available(&world, 2).await;
    wait(&world, "it stands still in a round", async || {
        world.enqueue(Entry::lasting(20), Policy::Never).await.unwrap();
        world.members[old].process.is_stopped()
    })
    .await;
    let new = world.start(Role::Recruiter, &[], &[]);
    wait(&world, "the other leads", async || log(&world, new).contains("leading")).await;
    // So that there are many jobs to assign, and free workers, when the old leader resumes.
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
    let begun = Instant::now();
    while led(&world).iter().any(|times| *times < 3) {
        assert!(begun.elapsed() < SOON, "one of them did not lead again: {:?}\n{}", led(&world), world.logs());
        world.database.raw("metadata").delete_one(doc! { "_id": "recruiter" }).await.unwrap();
        deleted += 1;
        for ms in 0..10 {
            world.enqueue(Entry::lasting(ms), Policy::Never).await.unwrap();
            pause(Duration::from_millis(20)).await;
        }
    }
    let deleted_last = Instant::now();
    wait(&world, "all is done", async || world.unfinished().await == 0).await;
    close(world, "two leading recruiters: the lease was deleted", deleted, deleted_last.elapsed()).await;
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
async fn late_start(world: &mut World, lease: &str, late: Duration) -> (Proxy, Armed, JobId) {
    let proxy = Proxy::before(world.database.uri()).await;
    let armed = proxy.arm(Action::StallRequest(late), 1..=1, |request| step(&request.body).as_deref() == Some(START));
    world.start_at(&proxy.uri(world.database.name()), Role::Worker, &["--lease", lease], &[]);
    let id = world.enqueue(Entry::lasting(50), Policy::Never).await.unwrap();
    wait(world, "it is being started", async || armed.matched() > 0).await;
    (proxy, armed, id)
}

/// No other worker starts the job in the meantime: it is locked by a start whose sender no longer waits for the reply.
async fn late_start_wins() -> (Findings, Duration) {
    // On a busy machine a reply may come before its worker notices that it waits no longer.
    for late in [LATE, LATE * 2, LATE * 3] {
        if let Some(ended) = late_start_wins_after(late).await {
            return ended;
        }
    }
    panic!("the replies came in time")
}

async fn late_start_wins_after(late: Duration) -> Option<(Findings, Duration)> {
    let mut world = world().await;
    let (_proxy, _armed, id) = late_start(&mut world, "10m", late).await;
    // Not supervised for now: no recruiter assigns.
    world.members[0].process.kill();
    let mut is_back = false;
    wait(&world, "it is handed back", async || {
        let back = doc! { "_id": id, "locked": false, "attempts": 1, "interruptions": 1, "last_execution": { "$exists": false } };
        is_back = world.count("scheduled", back).await == 1;
        is_back || world.archived(id).await.is_some()
    })
    .await;
    if !is_back {
        excuse(world).await;
        return None;
    }
    let back = Instant::now();
    tended(&mut world, "it is done", async |world| world.unfinished().await == 0).await;
    let job = world.archived(id).await.unwrap();
    promise!(number(&job, "attempts") - number(&job, "interruptions") == 1, "more than one start counts: {job}");
    Some((world.judge().await, back.elapsed()))
}

/// Another worker has done the job by then.
async fn late_start_is_overtaken() -> (Findings, Duration) {
    in_a_few_tries("the late start comes after the other worker's", late_start_is_overtaken_in_time).await
}

async fn late_start_is_overtaken_in_time() -> Option<(Findings, Duration)> {
    let mut world = world().await;
    let (_proxy, _armed, id) = late_start(&mut world, "10m", LATE).await;
    let late = Instant::now();
    world.start(Role::Worker, &[], &[]);
    wait(&world, "it is done", async || world.archived(id).await.is_some()).await;
    let recovery = late.elapsed();
    // Until that has arrived and its worker has had a few heartbeats since.
    pause((LATE + Duration::from_secs(1)).saturating_sub(recovery)).await;
    if number(&world.archived(id).await.unwrap(), "interruptions") > 0 {
        excuse(world).await;
        return None;
    }
    assert_eq!(end_of(&world, id).await, ("done".into(), 1, vec!["none".into()]));
    Some((world.judge().await, recovery))
}

/// Its worker has been declared dead by then. If it were executed, it would lock a job that no worker runs.
async fn late_start_is_past_its_lease() -> (Findings, Duration) {
    let mut world = world().await;
    let late = Duration::from_secs(4);
    let (_proxy, armed, id) = late_start(&mut world, "900ms", late).await;
    let begin = Instant::now();
    // Not supervised for now: no other worker starts it.
    let dead = world.members.pop().unwrap();
    dead.process.kill();
    wait(&world, "it is buried", async || roster(&world).await.is_empty()).await;
    assert_eq!(armed.count(), 1, "it is on its way");
    pause((late + Duration::from_secs(1)).saturating_sub(begin.elapsed())).await;
    world.start(Role::Worker, &[], &[]);
    let started = Instant::now();
    wait(&world, "it is done", async || world.archived(id).await.is_some()).await;
    assert_eq!(end_of(&world, id).await, ("done".into(), 1, vec!["none".into()]), "the late one was not carried out");
    (world.judge().await, started.elapsed())
}

/// Hints of rounds that were taken long ago and of rounds that never were, for jobs that are archived, running here or there, waiting
/// for a retry or not due yet; hints of all other kinds again, and some that are none.
#[tokio::test]
async fn a_hint_that_is_told_again_makes_nothing_run_twice() {
    let mut world = world().await;
    world.start(Role::Worker, &["--lease", "10m"], &[]);
    world.start(Role::Worker, &["--lease", "10m"], &[]);
    until_available(&world, 2).await;
    let mut jobs = Vec::new();
    for _ in 0..20 {
        jobs.push(world.enqueue(Entry::lasting(0), Policy::Never).await.unwrap());
    }
    wait(&world, "they are done", async || world.unfinished().await == 0).await;
    let later = RetryManyTimes::new(1, Duration::from_secs(3)).unwrap();
    let failing = Entry { failures: 1, ..Entry::default() };
    let retried = world.enqueue(failing.as_job().retry(&later), Policy::Again(1)).await.unwrap();
    wait(&world, "it has failed", async || world.count("scheduled", doc! { "_id": retried, "attempts": 1, "locked": false }).await == 1)
        .await;
    for _ in 0..8 {
        jobs.push(world.enqueue(Entry::lasting(4_000), Policy::Never).await.unwrap());
    }
    // After those that are done, and the one that has failed.
    wait(&world, "some are running", async || world.begun().len() >= 20 + 1 + 4).await;
    jobs.push(world.enqueue(Entry::lasting(0).after(Duration::from_secs(3)), Policy::Never).await.unwrap());
    let all: Vec<JobId> = jobs.iter().copied().chain([retried]).collect();

    let signals = ["signals", "signals_0"].map(|name| world.database.raw(name));
    let mut told: Vec<Document> = Vec::new();
    for signals in &signals {
        told.extend(signals.find(doc! {}).await.unwrap().try_collect::<Vec<_>>().await.unwrap());
    }
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
    for signals in &signals {
        for hints in hints.chunks(100) {
            signals.insert_many(hints).await.unwrap();
        }
    }
    let begin = Instant::now();
    let next = world.enqueue(Entry::lasting(0), Policy::Never).await.unwrap();
    wait(&world, "work goes on", async || world.archived(next).await.is_some()).await;
    let recovery = begin.elapsed();
    wait(&world, "all is done", async || world.unfinished().await == 0).await;
    for id in jobs.into_iter().chain([next]) {
        let job = world.archived(id).await.unwrap();
        assert_eq!(end_of(&world, id).await, ("done".into(), 1, vec!["none".into()]), "{job}");
        assert!(number(&job, "interruptions") == 0, "{job}");
    }
    assert_eq!(end_of(&world, retried).await, ("done".into(), 2, vec!["not-yet".into(), "none".into()]));
    close(world, "repeated, wrong and malformed hints", hints.len(), recovery).await;
}

/// I2: the transaction of a killed process would keep its jobs locked for ten minutes if the cleaner did not end it.
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
    let killed = |role: Role| format!("a {} is killed (SIGKILL) during its transaction", format!("{role:?}").to_lowercase());
    let mut rows = [Role::Worker, Role::Cleaner].map(|role| (role, Row::new(killed(role))));
    let mongod = own_mongod().await;
    let uri = mongod.uri();
    let runs = moments.map(async |(role, moment, step)| (role, killed_in_a_commit(&uri, role, moment, step).await));
    for (role, (findings, recovery)) in join_all(runs).await {
        rows.iter_mut().find(|row| row.0 == role).unwrap().1.add(findings, recovery);
    }
    rows.into_iter().for_each(|(_, row)| row.close());
}

async fn killed_in_a_commit(uri: &str, role: Role, moment: Moment, step: &str) -> (Findings, Duration) {
    let mut world = World::on(TestDatabase::on(uri).await).await;
    world.database.limit_transactions(600).await;
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
        wait(&world, "the jobs are running", async || world.started().await == 40).await;
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
    tended(&mut world, "all is done", async |world| world.unfinished().await == 0).await;
    (world.judge().await, recovery)
}
