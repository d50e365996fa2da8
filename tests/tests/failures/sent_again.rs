//! An application that does not know whether its enqueue arrived sends the job again, under the same id, whenever it likes.

use std::time::Instant;

use bson::doc;
use recruiter_tests::{
    factory::minimal_job,
    ledger::Entry,
    oracle::Policy,
    proxy::{Action, Proxy},
    report::Row,
    steps::step,
    wait::{SOON, wait_until},
    world::{Role, World},
};

/// The job that a worker has read is done by another, archived and sent again before the first one's start arrives: what it
/// then locks is the copy.
#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_meets_a_copy_of_what_was_read_does_not_run_it() {
    let mut world = World::new().await;
    world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Cleaner, &[], &[]);
    let line = Proxy::before(world.database.uri()).await;
    let start = line.arm(Action::Hold, 1..=1, |request| {
        step(&request.body).is_some_and(|step| step.starts_with("update scheduled") && step.contains("$expr"))
    });
    world.start_at(&line.uri(world.database.name()), Role::Worker, &["--lease", "40s"], &[]);
    let job = world.enqueue(Entry::lasting(0), Policy::SentAgain).await.unwrap();
    wait_until(SOON, "the start is on its way", async || start.matched() == 1).await;
    let other = world.beside(&[], Role::Worker, &["--lease", "40s"]);
    wait_until(SOON, "another has done it", async || world.count("archived", doc! { "_id": job }).await == 1).await;
    drop(other);
    let mut copy = minimal_job("entry");
    copy.insert("_id", job);
    let sent_again = Instant::now();
    world.database.raw("scheduled").insert_one(copy).await.unwrap();
    start.release();
    wait_until(SOON, "the copy is gone", async || world.count("scheduled", doc! { "_id": job }).await == 0).await;
    let recovery = sent_again.elapsed();
    assert_eq!(start.count(), 1);
    let begun = world.ledger().len();
    assert_eq!(begun, 2, "one begin and one end: {:?}", world.ledger());
    let mut row = Row::new("a finished job is enqueued again under the same id");
    row.add(world.judge().await, recovery);
    row.close();
}
