//! Jobs that are assigned ahead, beyond the free slots: none is lost, none counts before it is started, and none waits behind a long job.

use std::time::{Duration, Instant};

use bson::doc;
use recruiter_common::{enqueue::NewJob, ids::JobId, job::Priority, shutdown::pause};
use recruiter_tests::{
    ledger::Entry,
    local::{self, Local},
    mongo::TestDatabase,
    oracle::Policy,
    wait::wait_until,
    world::{Role, World},
};
use recruiter_worker::Worker;

const SOON: Duration = Duration::from_secs(30);
const PATIENT: &str = "10m";
const SHORT_MS: i64 = 10;

async fn world() -> World {
    let mut world = World::new().await;
    world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Cleaner, &["--dead-after", PATIENT], &[]);
    world
}

async fn enqueue(world: &mut World, count: usize, entry: impl Fn() -> NewJob) -> Vec<JobId> {
    let mut jobs = Vec::new();
    for _ in 0..count {
        jobs.push(world.enqueue(entry(), Policy::Never).await.unwrap());
    }
    jobs
}

fn short() -> NewJob {
    Entry::lasting(SHORT_MS)
}

async fn until_jobs_are_ahead(world: &World) {
    world
        .wait_for("jobs are assigned ahead", async || world.count("roster", doc! { "prefetched.1": { "$exists": true } }).await == 1)
        .await;
}

/// I5: jobs that are not to be done again. At most the two in the slots, and those whose ends were on their way, are lost to the kill.
#[tokio::test]
async fn a_killed_worker_costs_none_of_the_jobs_that_it_held_ahead() {
    let mut world = world().await;
    let jobs = enqueue(&mut world, 300, short).await;
    let worker = world.start(Role::Worker, &["--concurrency", "2"], &[]);
    until_jobs_are_ahead(&world).await;
    let ahead = world.database.raw("roster").find_one(doc! {}).await.unwrap().unwrap().get_array("prefetched").unwrap().len();
    world.members[worker].process.kill();
    world.start(Role::Worker, &[], &[]);
    world.wait_for("all are archived", async || world.count("archived", doc! {}).await == jobs.len() as u64).await;
    assert_eq!(world.count("archived", doc! { "attempts": { "$ne": 1 } }).await, 0, "{ahead} were ahead");
    let died = world.count("archived", doc! { "why": "worker-died" }).await;
    assert!(died <= 10, "{died} died, {ahead} were ahead");
    world.close().await;
}

#[tokio::test]
async fn a_worker_that_stops_returns_the_jobs_that_it_holds_ahead() {
    let mut world = world().await;
    let jobs = enqueue(&mut world, 300, short).await;
    let worker = world.start(Role::Worker, &["--concurrency", "2"], &[]);
    until_jobs_are_ahead(&world).await;
    world.members[worker].process.terminate();
    world.wait_for("they are returned", async || world.count("signals", doc! { "kind": "returned" }).await > 0).await;
    world.start(Role::Worker, &[], &[]);
    world
        .wait_for("all are done", async || world.count("archived", doc! { "why": "done", "attempts": 1 }).await == jobs.len() as u64)
        .await;
    world.close().await;
}

#[tokio::test]
async fn no_job_ahead_waits_for_a_long_job_while_another_worker_is_idle() {
    let mut world = world().await;
    let urgent = |ms: i64| Entry::lasting(ms).priority(Priority::new(9).unwrap());
    let mut shorts = enqueue(&mut world, 60, || urgent(SHORT_MS)).await;
    // Both slots are occupied for long once the worker has learnt that its jobs are short.
    let long = enqueue(&mut world, 2, || Entry::lasting(20_000).priority(Priority::new(8).unwrap())).await;
    shorts.extend(enqueue(&mut world, 40, short).await);
    world.start(Role::Worker, &["--concurrency", "2"], &[]);
    world
        .wait_for("the long jobs run", async || world.count("scheduled", doc! { "_id": { "$in": &long }, "locked": true }).await == 2)
        .await;
    world.wait_for("jobs are returned", async || world.count("signals", doc! { "kind": "returned" }).await > 0).await;
    let idle = Instant::now();
    world.start(Role::Worker, &[], &[]);
    world.wait_for("the short ones are done", async || world.count("archived", doc! {}).await == shorts.len() as u64).await;
    // The jobs that were returned are free at once, and not only when they have been in flight for too long.
    assert!(idle.elapsed() < Duration::from_millis(3_500), "{:?}", idle.elapsed());
    assert_eq!(world.count("roster", doc! { "prefetched": { "$exists": true } }).await, 0);
    for worker in &world.members {
        worker.process.kill();
    }
}

/// It overtakes the jobs that are ahead, and waits for the running one alone.
#[tokio::test]
async fn an_urgent_job_overtakes_the_jobs_ahead() {
    let mut world = world().await;
    enqueue(&mut world, 400, short).await;
    world.start(Role::Worker, &["--concurrency", "1"], &[]);
    until_jobs_are_ahead(&world).await;
    let urgent = world.enqueue(short().priority(Priority::new(9).unwrap()), Policy::Never).await.unwrap();
    world.wait_for("the urgent one is done", async || world.archived(urgent).await.is_some()).await;
    let job = world.archived(urgent).await.unwrap();
    let execution = job.get_document("last_execution").unwrap();
    let at = |field: &str| execution.get_datetime(field).unwrap().timestamp_millis();
    assert!(at("started_at") - at("scheduled_at") < 500, "{execution}");
    assert!(world.count("archived", doc! {}).await < 390, "most of the others still wait");
    world.close().await;
}

#[tokio::test]
async fn long_jobs_are_not_assigned_ahead() {
    let mut world = world().await;
    enqueue(&mut world, 12, || Entry::lasting(1_000)).await;
    world.start(Role::Worker, &["--concurrency", "3"], &[]);
    while world.count("archived", doc! {}).await < 9 {
        assert_eq!(world.count("roster", doc! { "prefetched": { "$exists": true } }).await, 0, "{}", world.logs());
        pause(Duration::from_millis(20)).await;
    }
    world.close().await;
}

/// The limit of memory for jobs ahead is none for the jobs of free slots.
#[tokio::test]
async fn large_jobs_are_started_in_all_free_slots_at_once() {
    let database = TestDatabase::new().await;
    let store = local::store(&database).await;
    let padding = "x".repeat(3 * 1024 * 1024);
    let large = |_| NewJob::of_class("sleep", doc! { "ms": 5_000, "padding": &padding });
    store.enqueue_many((0..10).map(large)).await.unwrap();
    let recruiter = Local::recruiter(&database, &[]);
    let worker = Local::worker(&database, Worker::new().register_builtins().unwrap(), &["--concurrency", "10"]);
    let running = async || database.raw("scheduled").count_documents(doc! { "locked": true }).await.unwrap() == 10;
    wait_until(SOON, "all slots are in use", running).await;
    assert_eq!(database.raw("signals").count_documents(doc! { "kind": { "$in": ["not_started", "returned"] } }).await.unwrap(), 0);
    worker.stop().await;
    recruiter.stop().await;
}
