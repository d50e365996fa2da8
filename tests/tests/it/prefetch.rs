//! Jobs that are assigned ahead, beyond the free slots: none is lost, none counts before it is started, and none waits behind a long job.

use std::{collections::BTreeSet, time::Duration};

use bson::doc;
use recruiter_common::{JobId, NewJob, Priority, shutdown::pause};
use recruiter_tests::{
    ledger::{Entry, Event},
    local::{self, Local},
    oracle::Policy,
    promise,
    wait::{SOON, Stopwatch, best_of_three, in_a_few_tries, wait_until},
    world::{Role, World},
};
use recruiter_worker::Worker;

const PATIENT: &str = "10m";
const SHORT_MS: i64 = 10;
/// So many jobs wait at least when jobs are ahead: enough for some seconds.
const BACKLOG: usize = 600;

/// A worker that takes no job too late, and interrupts none at its end, because the machine stalls.
fn worker(world: &mut World, slots: &str) -> usize {
    world.start(Role::Worker, &["--lease", PATIENT, "--grace", PATIENT, "--concurrency", slots], &[])
}

fn short(_number: usize) -> NewJob {
    Entry::lasting(SHORT_MS)
}

/// Waits until a worker holds jobs ahead, and enqueues more jobs when few are left.
async fn until_jobs_are_ahead(world: &World, jobs: &mut Vec<JobId>) {
    let are_ahead = async || {
        let waiting = usize::try_from(world.count("scheduled", doc! {}).await).unwrap();
        jobs.extend(world.enqueue_many(BACKLOG.saturating_sub(waiting), Policy::Never, short).await);
        world.count("roster", doc! { "prefetched.1": { "$exists": true } }).await == 1
    };
    world.wait_for("jobs are assigned ahead", are_ahead).await;
}

/// I5: jobs that are not to be done again. Only those that had begun, and at most the two that were to begin in the slots, are lost to the
/// kill.
#[tokio::test]
async fn a_killed_worker_costs_none_of_the_jobs_that_it_held_ahead() {
    let mut world = World::new().await.patient(&[]);
    let mut jobs = world.enqueue_many(BACKLOG, Policy::Never, short).await;
    let killed = worker(&mut world, "2");
    until_jobs_are_ahead(&world, &mut jobs).await;
    world.members[killed].process.kill();
    worker(&mut world, "10");
    world.wait_for("all are archived", async || world.count("archived", doc! {}).await == jobs.len() as u64).await;
    promise!(world.count("archived", doc! { "attempts": { "$ne": 1 } }).await == 0, "a start of a job that had not begun counts");
    let begun: BTreeSet<String> = world.ledger().into_iter().filter(|line| line.event == Event::Begin).map(|line| line.job).collect();
    let died = world.database.all("archived", doc! { "why": "worker-died" }).await;
    let unbegun = died.iter().filter(|job| !begun.contains(&job.get_object_id("_id").unwrap().to_hex())).count();
    assert!(unbegun <= 2, "{unbegun} of {} had not begun", died.len());
    world.close().await;
}

#[tokio::test]
async fn a_worker_that_stops_returns_the_jobs_that_it_holds_ahead() {
    let mut world = World::new().await.patient(&[]);
    let mut jobs = world.enqueue_many(BACKLOG, Policy::Never, short).await;
    // One that is slow to hear of its stop may have started all of them.
    while world.count("signals", doc! { "kind": "returned" }).await == 0 {
        let stopped = worker(&mut world, "2");
        until_jobs_are_ahead(&world, &mut jobs).await;
        world.members[stopped].process.terminate();
        world.members[stopped].process.wait_exit(SOON).await;
    }
    worker(&mut world, "10");
    world
        .wait_for("all are done", async || world.count("archived", doc! { "why": "done", "attempts": 1 }).await == jobs.len() as u64)
        .await;
    world.close().await;
}

#[tokio::test]
async fn no_job_ahead_waits_for_a_long_job_while_another_worker_is_idle() {
    let urgent = |ms: i64| Entry::lasting(ms).priority(Priority::new(9).unwrap());
    let until_done = async || {
        let mut world = World::new().await.patient(&[]);
        let mut shorts = world.enqueue_many(60, Policy::Never, |_| urgent(SHORT_MS)).await;
        // Both slots are occupied for long once the worker has learnt that its jobs are short.
        let long = world.enqueue_many(2, Policy::Never, |_| Entry::lasting(600_000).priority(Priority::new(8).unwrap())).await;
        shorts.extend(world.enqueue_many(40, Policy::Never, short).await);
        worker(&mut world, "2");
        world
            .wait_for("the long jobs run", async || world.count("scheduled", doc! { "_id": { "$in": &long }, "locked": true }).await == 2)
            .await;
        let none_is_ahead = async || {
            let ahead = world.count("roster", doc! { "prefetched.0": { "$exists": true } }).await;
            ahead == 0 || world.count("signals", doc! { "kind": "returned" }).await > 0
        };
        world.wait_for("jobs are returned, if any were ahead", none_is_ahead).await;
        worker(&mut world, "10");
        let is_there = async || world.count("roster", doc! { "capacity": 10, "term": { "$gt": 0 } }).await == 1;
        world.wait_for("the other worker is there", is_there).await;
        let idle = Stopwatch::start();
        world.wait_for("the short ones are done", async || world.count("archived", doc! {}).await == shorts.len() as u64).await;
        let took = idle.elapsed();
        let has_left = async || world.count("roster", doc! { "prefetched": { "$exists": true } }).await == 0;
        world.wait_for("no job is ahead", has_left).await;
        world.members.iter().for_each(|member| member.process.kill());
        took
    };
    // The jobs that were returned are free at once, and not only when they have been in flight for too long.
    best_of_three(Duration::from_millis(3_500), "the short jobs", until_done).await;
}

/// It overtakes the jobs that are ahead, and waits for the running one alone.
#[tokio::test]
async fn an_urgent_job_overtakes_the_jobs_ahead() {
    let mut world = World::new().await.patient(&[]);
    let mut jobs = world.enqueue_many(BACKLOG, Policy::Never, short).await;
    worker(&mut world, "1");
    let overtakes = async || {
        until_jobs_are_ahead(&world, &mut jobs).await;
        let urgent = world.enqueue(short(0).priority(Priority::new(9).unwrap()), Policy::Never).await.unwrap();
        world.wait_for("the urgent one is done", async || world.archived(urgent).await.is_some()).await;
        let most_still_wait = world.count("scheduled", doc! {}).await > BACKLOG as u64 / 2;
        let job = world.archived(urgent).await.unwrap();
        let at = |field: &str| job.get_document("last_execution").unwrap().get_datetime(field).unwrap().timestamp_millis();
        most_still_wait && at("started_at") - at("scheduled_at") < 500
    };
    wait_until(SOON, "an urgent job starts at once, before most others", overtakes).await;
    worker(&mut world, "20");
    world.close().await;
}

#[tokio::test]
async fn long_jobs_are_not_assigned_ahead() {
    // Jobs that end together, of which a machine that stalls records some a moment later, look like short ones.
    in_a_few_tries("no job is assigned ahead", long_jobs_are_not_ahead).await;
}

async fn long_jobs_are_not_ahead() -> Option<()> {
    let mut world = World::new().await.patient(&[]);
    world.enqueue_many(12, Policy::Never, |_| Entry::lasting(1_000)).await;
    worker(&mut world, "3");
    let mut ahead = 0;
    while world.count("archived", doc! {}).await < 9 {
        ahead += world.count("roster", doc! { "prefetched": { "$exists": true } }).await;
        pause(Duration::from_millis(20)).await;
    }
    world.close().await;
    (ahead == 0).then_some(())
}

/// The limit of memory for jobs ahead is none for the jobs of free slots.
#[tokio::test]
async fn large_jobs_are_started_in_all_free_slots_at_once() {
    // A machine that stalls leaves an assignment without an answer for so long that it is made again.
    in_a_few_tries("every assigned job is started", large_jobs_are_all_started).await;
}

async fn large_jobs_are_all_started() -> Option<()> {
    let (database, store) = local::prepared().await;
    let padding = "x".repeat(3 * 1024 * 1024);
    let large = |_| NewJob::of_class("sleep", doc! { "ms": 600_000, "padding": &padding });
    store.enqueue_many((0..10).map(large)).await.unwrap();
    let processes = Local::pair(&database, &[], Worker::new().register_builtins().unwrap(), &["--concurrency", "10", "--grace", "100ms"]);
    database.until("scheduled", doc! { "locked": true }, 10, "all slots are in use").await;
    let refused = database.count("signals", doc! { "kind": { "$in": ["not_started", "returned"] } }).await;
    local::stop(processes).await;
    (refused == 0).then_some(())
}
