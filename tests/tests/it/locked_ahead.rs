//! Jobs that are locked before a slot is free: they are run in their order, cost at most one attempt, and wait for nothing long.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use bson::doc;
use recruiter_common::{JobId, NewJob, Priority, control::Change, limits::Limit, shutdown::pause};
use recruiter_tests::{
    factory::again,
    ledger::{Entry, Event},
    oracle::Policy,
    wait::{SOON, in_a_few_tries, within},
    world::{Role, World},
};

use super::limits::{cli, why};

const RETRIES: u32 = 3;
const POLICY: Policy = Policy::Again(RETRIES);
/// Its lease and its grace last longer than a stall.
const WORKER: [&str; 6] = ["--concurrency", "2", "--lease", "20s", "--grace", "60s"];

/// A job that a death of its worker reschedules at once.
fn repeatable(ms: i64) -> NewJob {
    Entry::lasting(ms).retry(&again(RETRIES))
}

async fn until_done(world: &World, jobs: &[JobId]) {
    let filter = doc! { "_id": { "$in": jobs }, "why": "done" };
    world.wait_for("all are done", async || world.count("archived", filter.clone()).await == jobs.len() as u64).await;
}

/// The starts of these jobs that count, beyond the first of each.
async fn further_starts(world: &World, jobs: &[JobId]) -> u64 {
    let counted = doc! { "$subtract": ["$attempts", { "$ifNull": ["$interruptions", 0] }] };
    world.count("archived", doc! { "_id": { "$in": jobs }, "$expr": { "$gt": [counted, 1] } }).await
}

/// Enqueues short jobs until the only worker holds more than those in its two slots: the others are locked ahead or on their way to the
/// archive. A worker on a busy machine may have run a fixed number of jobs before this is seen.
async fn until_some_are_locked_ahead(world: &World, jobs: &mut Vec<JobId>) {
    let are_locked_ahead = async || {
        if world.count("scheduled", doc! {}).await < 300 {
            jobs.extend(world.enqueue_many(500, POLICY, |_| repeatable(1)).await);
        }
        world.started().await > 6
    };
    world.wait_for("jobs are locked ahead", are_locked_ahead).await;
}

/// Freezes the worker while it holds more than `least` jobs that are locked ahead, and returns how many.
async fn freeze_with_more_than(world: &World, worker: usize, least: usize, jobs: &mut Vec<JobId>) -> usize {
    let process = &world.members[worker].process;
    loop {
        until_some_are_locked_ahead(world, jobs).await;
        process.pause(); // or it enters them while they are counted
        let mut held = Vec::new();
        let is_settled = async || {
            let before = std::mem::replace(&mut held, locked(world).await);
            pause(Duration::from_millis(200)).await;
            process.is_stopped() && held == before
        };
        world.wait_for("it is frozen, and MongoDB has executed what it has sent", is_settled).await;
        let entered: HashSet<JobId> = world.begun().into_iter().collect();
        let not_entered = held.iter().filter(|id| !entered.contains(id)).count();
        if not_entered > least {
            return not_entered;
        }
        process.resume();
    }
}

async fn locked(world: &World) -> Vec<JobId> {
    let locked = world.database.raw("scheduled").distinct("_id", doc! { "locked": true }).await.unwrap();
    locked.iter().map(|id| id.as_object_id().unwrap().into()).collect()
}

#[tokio::test]
async fn a_death_costs_a_job_that_was_locked_ahead_one_attempt() {
    let mut world = World::new().await.patient(&[]);
    let mut jobs = Vec::new();
    let worker = world.start(Role::Worker, &WORKER, &[]);
    let not_entered = freeze_with_more_than(&world, worker, 0, &mut jobs).await;
    let released = world.database.raw("scheduled").distinct("_id", doc! { "interruptions": { "$gt": 0 } }).await.unwrap();
    world.members[worker].process.kill();
    world.start(Role::Worker, &["--lease", "20s"], &[]);
    until_done(&world, &jobs).await;
    assert!(further_starts(&world, &jobs).await >= not_entered as u64);
    let again = doc! { "attempts": { "$gt": 2 }, "_id": { "$nin": released } };
    assert_eq!(world.count("archived", again).await, 0, "none is locked ahead again");
    world.close().await;
}

/// As many as there are permits are locked in slots, and others wait for the permits of these.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_are_locked_ahead_of_permits_keep_their_limit_also_after_a_death() {
    let mut world = World::new().await.patient(&[]);
    world.limit("printer", Limit::capacity(8)).await;
    let jobs = world.enqueue_many(600, POLICY, |_| repeatable(1).limit("printer")).await;
    let slots = ["--concurrency", "20", "--lease", "20s", "--grace", "60s"];
    let killed = world.start(Role::Worker, &slots, &[]);
    world.wait_for("many have begun", async || world.begun().len() > 100).await;
    world.members[killed].process.kill();
    for _ in 0..2 {
        world.start(Role::Worker, &slots, &[]);
    }
    until_done(&world, &jobs).await;
    let most = world.most_at_once(&jobs).await;
    assert!(most <= 8, "limits: {most} at a time");
    world.close().await;
}

#[tokio::test]
async fn a_stop_releases_the_jobs_that_are_locked_ahead() {
    let mut world = World::new().await.patient(&[]);
    let mut jobs = Vec::new();
    // On a busy machine it may enter them all before its task of signals runs.
    in_a_few_tries("jobs that were locked ahead are released", async || {
        let worker = world.start(Role::Worker, &WORKER, &[]);
        freeze_with_more_than(&world, worker, 6, &mut jobs).await;
        let process = &mut world.members[worker].process;
        process.terminate();
        process.resume();
        process.wait_exit(SOON).await;
        assert_eq!(world.started().await, 0);
        (world.count("scheduled", doc! { "interruptions": 1 }).await > 0).then_some(())
    })
    .await;
    world.start(Role::Worker, &["--lease", "20s", "--grace", "60s"], &[]);
    until_done(&world, &jobs).await;
    assert_eq!((further_starts(&world, &jobs).await, world.begun().len()), (0, jobs.len()));
    world.close().await;
}

#[tokio::test]
async fn no_job_that_is_locked_ahead_waits_for_a_long_job_while_another_worker_is_idle() {
    let mut world = World::new().await.patient(&[]);
    let of = |priority: u8, ms: i64| move |_| repeatable(ms).priority(Priority::new(priority).unwrap());
    let (mut shorts, end) = (Vec::new(), Instant::now() + SOON * 3);
    let released = doc! { "interruptions": 1, "priority": 5 };
    world.start(Role::Worker, &WORKER, &[]);
    loop {
        shorts.extend(world.enqueue_many(200, POLICY, of(9, 1)).await);
        // Both slots are occupied for long once the worker has learnt that its jobs are short.
        let longs = world.enqueue_many(2, POLICY, of(8, 600_000)).await;
        shorts.extend(world.enqueue_many(100, POLICY, of(5, 1)).await);
        world.wait_for("both slots are occupied", async || longs.iter().all(|long| world.begun().contains(long))).await;
        if within(Duration::from_secs(2), async || world.count("scheduled", released.clone()).await > 0).await {
            break;
        }
        // On a busy machine no job may have been locked ahead.
        assert!(Instant::now() < end, "{}", world.logs());
        world.store.control(false).change(&Change::Cancel, &longs).await.unwrap();
    }
    world.start(Role::Worker, &["--lease", "20s"], &[]);
    until_done(&world, &shorts).await;
    assert_eq!(further_starts(&world, &shorts).await, 0);
    for worker in &world.members {
        worker.process.kill();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_releases_the_jobs_that_are_locked_ahead_and_holds_all_back_until_it_ends() {
    let mut world = World::new().await.patient(&[]);
    let (mut jobs, mut before, end) = (Vec::new(), 0, Instant::now() + SOON);
    world.start(Role::Worker, &WORKER, &[]);
    let paused = "group:generic".parse().unwrap();
    let reason = "the mail server is down";
    // On a busy machine all may have been entered before the worker knows the pause.
    while before == jobs.len() {
        assert!(Instant::now() < end, "{}", world.logs());
        world.store.pauses().resume(&paused).await.unwrap();
        until_some_are_locked_ahead(&world, &mut jobs).await;
        world.store.pauses().pause(&paused, "ada", Some(reason)).await.unwrap();
        let is_quiet = async || {
            before = world.begun().len();
            pause(Duration::from_millis(500)).await;
            world.started().await == 0 && world.begun().len() == before
        };
        world.wait_for("nothing is locked or entered in the pause", is_quiet).await;
    }
    let begun = world.begun();
    let said = why(&world, *jobs.iter().find(|job| !begun.contains(job)).unwrap()).await;
    let text = said["text"].as_str().unwrap();
    assert!(said["reason"] == "paused" && text.contains("ada") && text.contains(reason), "{said}");
    assert!(cli(&world.database, &["resume", "group:generic"]).1.contains("resumed"));
    until_done(&world, &jobs).await;
    assert_eq!(further_starts(&world, &jobs).await, 0);
    let (code, out, err) = cli(&world.database, &["pause", "group:generic", "--reason", reason, "--by", "bob"]);
    assert!(code == 0 && out.contains("running jobs continue"), "{out}{err}");
    assert!(!world.store.pauses().pause(&paused, "ada", None).await.unwrap(), "the first pause stays");
    let (_, out, _) = cli(&world.database, &["pauses", "--json"]);
    assert!([r#""name":"group:generic""#, r#""by":"bob""#, reason].iter().all(|part| out.contains(part)), "{out}");
    world.store.pauses().resume(&paused).await.unwrap();
    world.close().await;
}

/// Its lease is over when it resumes, so others have the jobs. A job of each slot may have been about to write its first line when it was frozen.
#[tokio::test]
async fn a_worker_that_was_declared_dead_enters_none_of_them() {
    let mut world = World::new().await;
    world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Cleaner, &["--dead-after", "2s"], &[]);
    let mut jobs = Vec::new();
    let frozen = world.start(Role::Worker, &["--concurrency", "2"], &[]);
    until_some_are_locked_ahead(&world, &mut jobs).await;
    world.members[frozen].process.pause();
    world.start(Role::Worker, &["--lease", "20s"], &[]);
    until_done(&world, &jobs).await;
    let pid = world.members[frozen].process.pid();
    let entered_there = || world.ledger().iter().filter(|line| line.worker == pid && line.event == Event::Begin).count();
    let before = entered_there();
    world.members[frozen].process.resume();
    world.wait_for("it registers again", async || world.count("roster", doc! { "pid": pid }).await == 1).await;
    assert!(entered_there() <= before + 2, "{} after {before}", entered_there());
    world.close().await;
}

/// A job that has waited too long, as on a busy machine, loses its place.
#[tokio::test]
async fn one_slot_runs_them_in_their_order() {
    in_a_few_tries("more than 20 jobs keep their places", one_slot_runs_many_in_their_order).await;
}

async fn one_slot_runs_many_in_their_order() -> Option<()> {
    let mut world = World::new().await.patient(&[]);
    let jobs = world.enqueue_many(120, POLICY, |_| repeatable(0)).await;
    world.start(Role::Worker, &["--concurrency", "1", "--lease", "20s"], &[]);
    until_done(&world, &jobs).await;
    let mut released = world.database.raw("archived").distinct("_id", doc! { "interruptions": { "$gt": 0 } }).await.unwrap();
    released.extend(world.database.raw("signals").distinct("jobs", doc! { "kind": "returned" }).await.unwrap());
    let kept = |ids: Vec<JobId>| ids.into_iter().filter(|job| !released.contains(&(*job).into())).collect::<Vec<_>>();
    let (asked, ran) = (kept(jobs), kept(world.begun()));
    assert_eq!(asked, ran, "{released:?} have lost their places");
    world.close().await;
    (asked.len() > 20).then_some(())
}

/// They are locked only in slots: at most those in the slots, and those whose ends were on their way, are lost.
#[tokio::test]
async fn jobs_that_are_not_to_be_done_again_are_not_locked_ahead() {
    let mut world = World::new().await.patient(&[]);
    world.enqueue_many(500, Policy::Never, |_| Entry::lasting(1)).await;
    let worker = world.start(Role::Worker, &WORKER, &[]);
    world.wait_for("it is busy", async || world.begun().len() > 200).await;
    world.members[worker].process.kill();
    let entered: HashSet<JobId> = world.begun().into_iter().collect();
    let locked = locked(&world).await;
    let not_entered = locked.iter().filter(|id| !entered.contains(id)).count();
    assert!(not_entered <= 2, "{not_entered} of {} locked jobs were not entered", locked.len());
    for member in &world.members {
        member.process.kill();
    }
}
