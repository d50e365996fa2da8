//! Nothing lost, nothing twice, in the hard cases: processes that come back from the dead, processes that are stopped, jobs that
//! harm their workers. The jobs keep a ledger of their own, and the oracle judges every world when it is quiet.

#![expect(clippy::unwrap_used, reason = "in a test it says where it failed")]

mod ahead;
mod clients;
mod poison;
mod stops;
mod who_is_dead;
mod zombies;

use std::time::{Duration, Instant};

use bson::{Document, doc};
use recruiter_common::JobId;
use recruiter_tests::{
    faults::{Blow, Fault, Moment},
    oracle::{executions_before_the_last, number},
    report::Row,
    wait::SOON,
    world::{Role, World},
};

/// A blow in the `nth` time that a step is taken.
fn fault(blow: Blow, moment: Moment, nth: u32, step: &str) -> Fault {
    Fault { step: step.to_owned(), moment, blow, nth }
}

/// A world with one recruiter, and one cleaner that declares no running process dead, however busy the machine is.
async fn world() -> World {
    world_with(PATIENT).await
}

/// One whose cleaner takes who is silent for so long for dead.
async fn world_with(dead_after: &str) -> World {
    let mut world = World::new().await;
    world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Cleaner, &["--dead-after", dead_after], &[]);
    world
}

/// Longer than any test waits.
const PATIENT: &str = "10m";

/// Waits for something in a world that is not supervised meanwhile; panics with all that was logged at the deadline.
async fn wait(world: &World, what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !condition().await {
        assert!(Instant::now() < end, "waited in vain: {what}\n{}", world.logs());
        recruiter_common::shutdown::pause(Duration::from_millis(20)).await;
    }
}

/// The same in a world that is supervised.
async fn tended(world: &mut World, what: &str, condition: impl AsyncFnMut(&World) -> bool) {
    assert!(world.until(SOON, condition).await, "waited in vain: {what}\n{}", world.logs());
}

/// Why a job is in the archive, its starts, and the error classes of all its executions. A start that was released before its execution
/// began does not count: its reply came too late, for example because the machine was busy.
async fn end_of(world: &World, id: JobId) -> (String, i64, Vec<String>) {
    let job = world.archived(id).await.unwrap();
    let all = executions_before_the_last(&job).into_iter().chain(job.get_document("last_execution").ok());
    let classes: Vec<String> = all.map(|execution| execution.get_str("class").unwrap_or("none").to_owned()).collect();
    let interrupted = classes.iter().rev().skip(1).filter(|class| *class == "interrupted").count() as i64;
    let released = number(&job, "interruptions") - interrupted;
    (job.get_str("why").unwrap().to_owned(), number(&job, "attempts") - released, classes)
}

/// Ends a run that proves nothing because the machine was too slow for it. Nothing may be lost or done twice in it either.
async fn excuse(mut world: World) {
    let findings = world.judge().await;
    assert!(findings.lost.is_empty() && findings.unexplained.is_empty(), "{findings:#?}\n{}", world.logs());
}

/// The documents of the roster.
async fn roster(world: &World) -> Vec<Document> {
    world.database.all("roster", doc! {}).await
}

async fn until_available(world: &World, workers: u64) {
    let there = doc! { "available": true, "term": { "$gt": 0 } };
    wait(world, "the workers are there", async || world.count("roster", there.clone()).await == workers).await;
}

/// Stops a world and writes down what came of it.
async fn close(mut world: World, fault: &str, injected: usize, recovery: Duration) {
    let mut row = Row::new(fault);
    row.add(world.judge().await, recovery);
    row.injected = injected;
    if !row.findings.all().is_empty() {
        row.findings.broken.push(world.logs());
    }
    row.close();
}
