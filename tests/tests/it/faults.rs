//! A few bad days, in seconds: a worker that is killed, frozen or stopped, a MongoDB that goes away or does not say what it did, hints
//! that are lost. The failure suites have all the others. The jobs keep a ledger of their executions, and the
//! oracle compares it with what is in the database when all is quiet.

use std::time::{Duration, Instant};

use bson::{Document, doc};
use recruiter_common::{
    JobId, NewJob, RetryManyTimes, Workable,
    ids::{LeaseTerm, RoundId},
    shutdown::pause,
    store::{AssignedJobs, Hint, Planned, ScheduledJob},
};
use recruiter_tests::{
    factory::again,
    fail_points::FailPoint,
    ledger::{Entry, Longer},
    mongo::{TestDatabase, own_mongod},
    oracle::{Policy, executions_before_the_last, number},
    processes::Process,
    promise,
    wait::{SOON, best_of_three, in_a_few_tries, wait_until},
    world::{Role, World},
};

/// Longer than any of these jobs is waited for.
const ENDLESS_MS: i64 = 600_000;
/// Waits for a worker that the recruiter may assign to.
async fn until_there(world: &World) {
    let there = doc! { "available": true, "term": { "$gt": 0 } };
    world.wait_for("the worker is there", async || world.count("roster", there.clone()).await == 1).await;
}

/// Waits until so many executions have begun.
async fn until_begun(world: &World, executions: usize) {
    world.wait_for("the jobs are running", async || world.begun().len() == executions).await;
}

/// Why a job is in the archive, its starts, and the error classes of its executions but the last, oldest first.
async fn end_of(world: &World, id: JobId) -> (String, i64, Vec<String>) {
    let job = world.archived(id).await.unwrap();
    let class = |execution: &Document| execution.get_str("class").unwrap_or("none").to_owned();
    let earlier = executions_before_the_last(&job).into_iter().map(class).collect();
    (job.get_str("why").unwrap().to_owned(), number(&job, "attempts"), earlier)
}

/// I5: if processes die, a job that is not to be done again is entered at most once; the others are done again.
#[tokio::test]
async fn the_jobs_of_a_killed_worker_are_ended_by_their_policies() {
    let mut world = World::new().await.patient(&[]);
    let worker = world.start(Role::Worker, &["--lease", "10m"], &[]);
    let never = world.enqueue(Entry::lasting(ENDLESS_MS), Policy::Never).await.unwrap();
    let retried = Longer { first: Entry { ms: ENDLESS_MS, ..Entry::default() }, again_ms: 0 };
    let retried = world.enqueue(retried.as_job().retry(&again(1)), Policy::Again(1)).await.unwrap();
    until_begun(&world, 2).await;
    world.members[worker].process.kill();
    world.wait_for("they are ended", async || world.started().await == 0).await;
    let execution = world.archived(never).await.unwrap().get_document("last_execution").unwrap().clone();
    assert!(execution.get_bool("crashed").unwrap() && execution.contains_key("ended_at"), "{execution}");
    assert!(world.until_quiet(SOON).await, "not quiet\n{}", world.logs());
    assert_eq!(end_of(&world, never).await, ("worker-died".into(), 1, vec![]));
    assert_eq!(end_of(&world, retried).await, ("done".into(), 2, vec!["worker-died".into()]));
    world.close().await;
}

/// I3: declared dead while it was frozen, it finds its claim lost and comes back as another worker.
#[tokio::test]
async fn a_worker_frozen_past_its_death_drops_its_outcome_and_comes_back() {
    let mut world = World::new().await.patient(&[]);
    let frozen = world.start(Role::Worker, &["--lease", "3s"], &[]);
    let job = Longer { first: Entry { ms: ENDLESS_MS, ..Entry::default() }, again_ms: 0 };
    let id = world.enqueue(job.as_job().retry(&again(3)), Policy::Again(3)).await.unwrap();
    until_begun(&world, 1).await;
    world.members[frozen].process.pause();
    // Only while no worker runs: on a busy machine it might take one that runs for dead.
    let impatient = world.start(Role::Cleaner, &[], &[]);
    world.wait_for("it is retired", async || world.count("roster", doc! {}).await == 0).await;
    world.members[impatient].process.terminate();
    world.members[impatient].process.wait_exit(SOON).await;
    world.start(Role::Worker, &["--lease", "10m"], &[]);
    world.wait_for("another has done its job", async || world.archived(id).await.is_some()).await;
    let first = world.archived(id).await;
    world.members[frozen].process.resume();
    world.wait_for("it is back", async || world.count("roster", doc! { "available": true }).await == 2).await;
    let log = || world.members[frozen].process.stderr();
    let dropped = || ["declared dead", "no longer holds the job"].iter().all(|said| log().contains(said));
    world.wait_for("its late outcome is dropped", async || dropped()).await;
    assert_eq!(world.archived(id).await, first, "it changed nothing");
    assert_eq!(end_of(&world, id).await, ("done".into(), 2, vec!["worker-died".into()]));
    world.close().await;
}

/// I8: TERM costs no counted attempt and leaves no lock. An interrupted job does not wait for a retry.
#[tokio::test]
async fn a_stopping_worker_interrupts_what_does_not_end_in_its_grace() {
    in_a_few_tries("the short job ends in the grace", interrupts_what_does_not_end_in_its_grace).await;
}

async fn interrupts_what_does_not_end_in_its_grace() -> Option<()> {
    let mut world = World::new().await.patient(&[]);
    let worker = world.start(Role::Worker, &["--grace", "8s", "--lease", "10m"], &[]);
    let short = world.enqueue(Entry::lasting(500), Policy::Never).await.unwrap();
    let never = world.enqueue(Entry::lasting(ENDLESS_MS), Policy::Never).await.unwrap();
    let much_later = RetryManyTimes::new(1, SOON * 10).unwrap();
    let long = Longer { first: Entry { ms: ENDLESS_MS, ..Entry::default() }, again_ms: 0 };
    let long = world.enqueue(long.as_job().retry(&much_later), Policy::Again(1)).await.unwrap();
    until_begun(&world, 3).await;
    world.members[worker].process.terminate();
    assert_eq!(world.members[worker].process.wait_exit(SOON).await.code(), Some(0));
    assert_eq!((world.started().await, world.count("roster", doc! {}).await), (0, 0));
    // A machine may stall for the whole grace.
    let in_time = end_of(&world, short).await == ("done".into(), 1, vec![]);
    assert_eq!(end_of(&world, never).await, ("interrupted".into(), 1, vec![]));
    assert!(world.until_quiet(SOON).await, "not quiet\n{}", world.logs());
    assert_eq!(end_of(&world, long).await, ("done".into(), 2, vec!["interrupted".into()]));
    assert_eq!(number(&world.archived(long).await.unwrap(), "interruptions"), 1);
    world.close().await;
    in_time.then_some(())
}

/// A worker that drains goes on saying that it lives.
#[tokio::test]
async fn a_draining_worker_is_not_taken_for_dead() {
    let mut world = World::new().await.patient(&[]);
    let worker = world.start(Role::Worker, &["--grace", "10m", "--lease", "10m"], &[]);
    let id = world.enqueue(Entry::lasting(ENDLESS_MS), Policy::Never).await.unwrap();
    until_begun(&world, 1).await;
    world.members[worker].process.terminate();
    world.wait_for("it drains", async || world.members[worker].process.stderr().contains("taking no more jobs")).await;
    let last_seen = async || world.database.raw("roster").find_one(doc! {}).await.unwrap().unwrap().get("last_seen_at").cloned();
    for _ in 0..3 {
        let before = last_seen().await;
        world.wait_for("it sends a heartbeat", async || last_seen().await != before).await;
    }
    assert_eq!(world.store.request_cancel_if_started(&[id]).await.unwrap().len(), 1);
    assert_eq!(world.members[worker].process.wait_exit(SOON).await.code(), Some(0));
    assert_eq!(end_of(&world, id).await, ("cancelled".into(), 1, vec![]));
    world.close().await;
}

/// I1: `kill -9` of MongoDB itself, in the middle of work, for longer than any process trusts a lease.
#[tokio::test]
async fn when_mongodb_goes_away_for_a_while_everything_resumes_and_nothing_is_lost() {
    let mut mongod = own_mongod().await;
    let mut world = World::on(TestDatabase::on(&mongod.uri()).await).await.patient(&[]);
    for _ in 0..2 {
        world.start(Role::Worker, &["--concurrency", "5"], &[]);
    }
    let mut jobs = 0;
    // It goes away in the middle.
    while world.count("archived", doc! {}).await == jobs {
        for _ in 0..100 {
            world.enqueue(Entry::lasting(200), Policy::Never).await.unwrap();
        }
        jobs += 100;
        world.wait_for("some are done", async || world.count("archived", doc! {}).await > jobs - 80).await;
    }
    mongod.kill().await.unwrap();
    pause(Duration::from_secs(3)).await;
    mongod.restart().await.unwrap();
    assert!(world.until_quiet(SOON).await, "not quiet\n{}", world.logs());
    assert_eq!(world.count("archived", doc! { "why": "done" }).await, jobs);
    world.close().await;
}

/// I2, I3: the reply to a start or to a commit is lost or says that it may not last, also when it is asked for again; a transaction
/// is aborted behind our back.
#[tokio::test]
async fn a_start_or_a_commit_of_unknown_outcome_is_done_once() {
    let mut world = World::on(TestDatabase::of_its_own().await).await.patient(&[]);
    world.start(Role::Worker, &["--lease", "10m"], &[]);
    let fault = |command: &str| FailPoint::new("recruiter-worker", &[command]);
    let on = |collection: &str, command: &str| fault(command).namespace(world.database.name(), collection);
    let faults = [
        ("starts", on("scheduled", "update").times(2).write_concern_error(91)),
        ("starts", on("scheduled", "update").times(1).close_connection()),
        ("commits", fault("commitTransaction").times(2).close_connection()),
        ("commits", fault("commitTransaction").times(3).write_concern_error(64)),
        ("commits", fault("commitTransaction").times(1).error_code(251).error_labels(&["TransientTransactionError"])),
        ("commits", on("archived", "insert").times(1).close_connection()),
        ("commits", on("scheduled", "delete").times(1).error_code(189)),
    ];
    const JOBS: u64 = 10;
    for (group, fault) in faults {
        let armed = fault.arm(world.database.uri()).await;
        for _ in 0..JOBS {
            world.enqueue(Entry::lasting(0).in_group(group), Policy::Never).await.unwrap();
        }
        assert!(world.until_quiet(SOON).await, "not quiet\n{}", world.logs());
        assert!(armed.struck().await >= 1);
    }
    // A job that was locked and not entered is released, and its start counts as an interruption.
    assert_eq!(world.count("archived", doc! { "group": "starts", "why": "done" }).await, 2 * JOBS);
    let once = world.count("archived", doc! { "group": "commits", "why": "done", "attempts": 1 }).await;
    promise!(once == 5 * JOBS, "{once} jobs were started once");
    world.close().await;
}

/// I7: with a collection of hints that cannot be listened to, every hint is lost.
#[tokio::test]
async fn without_any_hint_a_job_starts_within_the_poll_fallback() {
    let mut world = World::new().await;
    for name in ["signals", "signals_0"] {
        world.database.raw(name).drop().await.unwrap();
        world.database.database().create_collection(name).await.unwrap();
    }
    world.start(Role::Recruiter, &["--lease", "3s", "--poll", "1s"], &[]);
    world.start(Role::Cleaner, &["--dead-after", "10m"], &[]);
    world.start(Role::Worker, &["--poll", "1s", "--lease", "10m"], &[]);
    until_there(&world).await;
    for _ in 0..5 {
        let waited = async || {
            let id = world.enqueue(Entry::lasting(0), Policy::Never).await.unwrap();
            assert!(world.until_quiet(SOON).await, "not quiet\n{}", world.logs());
            let execution = world.archived(id).await.unwrap().get_document("last_execution").unwrap().clone();
            let at = |field: &str| execution.get_datetime(field).unwrap().timestamp_millis();
            Duration::from_millis(u64::try_from(at("started_at") - at("scheduled_at")).unwrap_or(0))
        };
        best_of_three(Duration::from_secs(2), "the start of a job without hints", waited).await;
    }
    let failing = Entry { failures: 1, ..Entry::default() }.as_job();
    let id = world.enqueue(failing.retry(&again(1)), Policy::Again(1)).await.unwrap();
    assert!(world.until_quiet(SOON).await, "not quiet\n{}", world.logs());
    assert_eq!(end_of(&world, id).await, ("done".into(), 2, vec!["not-yet".into()]));
    world.close().await;
}

/// A hint is never the truth: its recipient reads the job first.
#[tokio::test]
async fn a_worker_starts_nothing_that_is_not_for_it_whatever_a_hint_says() {
    let mut world = World::new().await;
    world.start(Role::Worker, &["--work-on", "ours", "--lease", "10m"], &[]);
    world.wait_for("the worker is there", async || world.count("roster", doc! { "available": true }).await == 1).await;
    let worker = world.database.raw("roster").find_one(doc! {}).await.unwrap().unwrap().get_object_id("_id").unwrap().into();
    let theirs = world.enqueue(Entry::lasting(0).in_group("theirs"), Policy::Never).await.unwrap();
    let unknown = world.enqueue(NewJob::of_class("unknown", doc! {}).in_group("ours"), Policy::Never).await.unwrap();
    let ours = world.enqueue(Entry::lasting(0).in_group("ours"), Policy::Never).await.unwrap();
    let jobs = vec![JobId::new(), theirs, unknown, ours];
    world.store.publish(&Hint::Assigned { round: RoundId::new(), assignments: vec![AssignedJobs::new(worker, jobs)] }).await.unwrap();
    world.wait_for("the job for it is done", async || world.archived(ours).await.is_some()).await;
    for left in [theirs, unknown] {
        promise!(world.count("scheduled", doc! { "_id": left, "locked": false, "attempts": 0 }).await == 1, "it is not for this worker");
    }
}

/// A round between the two would give the worker's unlocked jobs to another.
#[tokio::test]
async fn a_worker_is_available_again_only_after_its_jobs_are_locked() {
    let mut world = World::new().await.patient(&[]);
    world.start(Role::Worker, &["--concurrency", "10", "--lease", "10m"], &[]);
    until_there(&world).await;
    let slow =
        FailPoint::new("recruiter-worker", &["update"]).namespace(world.database.name(), "scheduled").block(Duration::from_millis(400));
    let armed = slow.arm(world.database.uri()).await;
    let id = world.enqueue(Entry::lasting(0), Policy::Never).await.unwrap();
    // A start that takes long is listed.
    let again = doc! { "available": true, "round": { "$exists": true }, "prefetched": { "$ne": id }, "working_on": { "$ne": id } };
    world.wait_for("it is assigned", async || world.count("roster", doc! { "round": { "$exists": true } }).await == 1).await;
    loop {
        let is_available = world.count("roster", again.clone()).await == 1;
        if world.count("scheduled", doc! { "_id": id, "locked": false }).await == 0 {
            break;
        }
        promise!(!is_available, "its job is not locked yet\n{}", world.logs());
    }
    drop(armed);
    assert!(world.until_quiet(SOON).await, "not quiet\n{}", world.logs());
    world.close().await;
}

/// I9: the recruiter assigns a job again that a worker cannot start; there must be a pause between two assignments.
#[tokio::test]
async fn a_job_that_is_left_again_and_again_is_announced_once_and_warned_about() {
    let mut world = World::new().await;
    world.start(Role::Worker, &["--work-on", "ours", "--lease", "10m"], &[]);
    world.wait_for("the worker is there", async || world.count("roster", doc! { "available": true }).await == 1).await;
    let worker = world.database.raw("roster").find_one(doc! {}).await.unwrap().unwrap().get_object_id("_id").unwrap().into();
    let theirs = world.enqueue(Entry::lasting(0).in_group("theirs"), Policy::Never).await.unwrap();
    for _ in 0..20 {
        world.wait_for("it is available", async || world.count("roster", doc! { "available": true }).await == 1).await;
        let (round, planned) = (RoundId::new(), Planned::for_slots(AssignedJobs::new(worker, vec![theirs])));
        assert_eq!(world.store.assign_if_available(LeaseTerm(0), round, std::slice::from_ref(&planned)).await.unwrap(), [worker]);
        world.store.publish(&Hint::Assigned { round, assignments: vec![planned.assignment] }).await.unwrap();
    }
    world.wait_for("it is warned about", async || world.logs().contains("again and again")).await;
    assert_eq!(world.count("signals", doc! { "kind": "not_started" }).await, 1);
    promise!(world.count("scheduled", doc! { "_id": theirs, "locked": false, "attempts": 0 }).await == 1, "it is not for this worker");
}

/// MongoDB refuses a start when the worker's lease seems over by its clock, as after a jump of that clock: the worker does not wait for its
/// next heartbeat, ten minutes away. Here the start is refused because the job is not due.
#[tokio::test]
async fn a_start_that_locks_nothing_renews_the_lease_early() {
    let mut world = World::new().await;
    world.start(Role::Worker, &["--heartbeat", "10m", "--lease", "30m"], &[]);
    let roster = async || world.database.raw("roster").find_one(doc! { "available": true }).await.unwrap();
    world.wait_for("the worker is there", async || roster().await.is_some()).await;
    let before = roster().await.unwrap();
    let worker = before.get_object_id("_id").unwrap().into();
    let job = NewJob::of_class("noop", doc! {}).after(Duration::from_secs(3_600)).enqueue(&world.store).await.unwrap().id;
    world.database.raw("scheduled").update_one(doc! { "_id": job }, doc! { "$set": { "workable.class": Entry::CLASS } }).await.unwrap();
    let (round, planned) = (RoundId::new(), Planned::for_slots(AssignedJobs::new(worker, vec![job])));
    assert_eq!(world.store.assign_if_available(LeaseTerm(0), round, std::slice::from_ref(&planned)).await.unwrap(), [worker]);
    world.store.publish(&Hint::Assigned { round, assignments: vec![planned.assignment] }).await.unwrap();
    let seen = |worker: &Document| worker.get_datetime("last_seen_at").copied().ok();
    world.wait_for("it sends a heartbeat", async || roster().await.is_some_and(|worker| seen(&worker) != seen(&before))).await;
}

/// A start without an answer may lock its job later. If the worker is killed then, the cleaner finds the job in the roster, and not only with
/// its next sweep.
#[tokio::test]
async fn the_roster_lists_jobs_whose_start_has_no_answer() {
    let mut world = World::new().await.patient(&[]);
    world.start(Role::Worker, &["--heartbeat", "300ms", "--lease", "2s"], &[]);
    let lost = FailPoint::new("recruiter-worker", &["update"]).namespace(world.database.name(), "scheduled").close_connection();
    let armed = lost.arm(world.database.uri()).await;
    let id = world.enqueue(Entry::lasting(0), Policy::Never).await.unwrap();
    let listed = doc! { "available": true, "working_on": id };
    world.wait_for("it is listed, and its slot is free", async || world.count("roster", listed.clone()).await == 1).await;
    assert_eq!(world.count("scheduled", doc! { "_id": id, "locked": false }).await, 1, "the start was lost");
    drop(armed);
}

/// An announced job may never be inserted: no process waits for it.
#[tokio::test]
async fn jobs_that_were_announced_and_are_not_there_cost_nothing() {
    let mut world = World::new().await.patient(&[]);
    world.start(Role::Worker, &["--concurrency", "2"], &[]);
    until_there(&world).await;
    let announced = |_| ScheduledJob {
        id: JobId::new(),
        group: "generic".into(),
        class: "entry".into(),
        gate: None,
        priority: 9,
        scheduled_at: world.store.now(),
    };
    for _ in 0..10 {
        let hint = Hint::Jobs { groups: vec!["generic".into()], at: None, jobs: (0..2).map(announced).collect() };
        world.store.publish(&hint).await.unwrap();
        let id = world.enqueue(Entry::lasting(0), Policy::Never).await.unwrap();
        world.wait_for("a job that is there is done", async || world.archived(id).await.is_some()).await;
    }
    world.close().await;
}

/// The holder renews by its own length of a lease: who would be less patient goes by that.
#[tokio::test]
async fn a_standby_with_a_shorter_lease_leaves_a_leader_that_lives_alone() {
    let database = TestDatabase::new().await;
    let leader = Process::on(&database, "recruiter", &["run", "--lease", "10s"]);
    wait_until(SOON, "it leads", async || leader.stderr().contains("leading")).await;
    let standby = Process::on(&database, "recruiter", &["run", "--lease", "1s", "--poll", "300ms"]);
    wait_until(SOON, "the other stands by", async || standby.stderr().contains("standing by")).await;
    let lease = async || database.raw("metadata").find_one(doc! { "_id": "recruiter" }).await.unwrap().unwrap();
    let (began, first) = (Instant::now(), lease().await);
    wait_until(SOON, "it is renewed", async || lease().await.get("renewals") != first.get("renewals")).await;
    leader.kill();
    wait_until(SOON, "the other leads", async || standby.stderr().contains("lease.term=2")).await;
    // The last renewal came after the begin, and holds for ten seconds.
    assert!(began.elapsed() >= Duration::from_secs(10), "after {:?}", began.elapsed());
}
