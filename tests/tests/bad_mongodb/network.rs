//! Lines to a healthy replica set that are cut, let through one way only, or are slow: for all processes, and for one worker alone.

use std::time::Duration;

use bson::{Document, doc};
use recruiter_common::{NewJob, Workable, shutdown::pause};
use recruiter_tests::{
    ledger::Entry,
    local::{self, Local},
    mongo::TestDatabase,
    oracle::Policy,
    processes::Process,
    proxy::Proxy,
    replica_set::ReplicaSet,
    wait::{SOON, wait_until},
    world::Role,
};
use tokio::join;

use crate::{
    server::SETS,
    stage::{Flags, PATIENT, Stage},
};

/// Longer than any call waits, and than the deaths of [`SHORT`] take.
const OUTAGE: Duration = Duration::from_secs(12);
const LATENCY: Duration = Duration::from_millis(50);
const BYTES_PER_SECOND: u64 = 64_000;
/// Longer than a death takes.
const LASTING_MS: i64 = 15_000;
/// More than a slow line carries at once.
const BURST: usize = 50;

/// Deaths are found in less than an outage.
const SHORT: Flags = Flags {
    cleaner: &["--dead-after", "9s", "--every", "300ms"],
    worker: &["--heartbeat", "500ms", "--lease", "2s", "--poll", "1s", "--grace", "5s"],
    ..PATIENT
};

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_network_costs_nothing_but_time() {
    let _turn = SETS.acquire().await.unwrap();
    let set = ReplicaSet::start(3).await;
    join!(
        for_everybody(&set, "the network of all processes is cut", Proxy::blackhole),
        for_everybody(&set, "all connections are closed, and new ones are refused", Proxy::sever),
        for_everybody(&set, "requests of all processes arrive, replies do not", Proxy::blackhole_replies),
        for_one_worker(&set, "the network of one worker is cut", Proxy::blackhole),
        for_one_worker(&set, "requests of one worker arrive, replies do not", Proxy::blackhole_replies),
        slow_lines(&set),
    );
}

async fn for_everybody(set: &ReplicaSet, fault: &str, breaks: fn(&Proxy)) {
    let mut stage = Stage::on(&set.uri()).await;
    let line = set.proxy();
    let uri = line.uri(stage.world.database.name());
    stage.start(&uri, SHORT, &[Role::Recruiter, Role::Cleaner, Role::Worker]);
    stage.enqueue_on_a_bad_line(&line).await;
    stage.enqueue_some_that_last(8_000).await;
    let blow = async {
        breaks(&line);
        pause(OUTAGE).await;
        line.heal();
    };
    let blow = stage.blow(blow).await;
    stage.close(fault, &[blow]).await.without_deaths().end();
}

/// It is declared dead, its jobs are ended by their policies, and it comes back.
async fn for_one_worker(set: &ReplicaSet, fault: &str, breaks: fn(&Proxy)) {
    let mut stage = Stage::on(&set.uri()).await;
    let line = set.proxy();
    let (name, roster) = (stage.world.database.name().to_owned(), stage.world.database.raw("roster"));
    stage.start(&set.uri_for(&name), SHORT, &[Role::Recruiter, Role::Cleaner, Role::Worker]);
    let alone = stage.start(&line.uri(&name), SHORT, &[Role::Worker])[0];
    stage.enqueue_by(&set.uri_for(&name)).await;
    let bad_line = set.proxy();
    stage.enqueue_on_a_bad_line(&bad_line).await;
    let pid = i64::from(stage.world.members[alone].process.pid());
    let of_it = async |more: Document| {
        let mut filter = doc! { "pid": pid };
        filter.extend(more);
        roster.count_documents(filter).await.unwrap()
    };
    stage.during(wait_until(SOON, "it is registered", async || of_it(doc! {}).await == 1)).await;
    let held = doc! { "locked": true, "last_execution.pid": pid, "workable.parameters.ms": LASTING_MS };
    while stage.world.count("scheduled", held.clone()).await == 0 {
        let lasting = Entry { ms: LASTING_MS, failures: 0, deaf: true };
        stage.world.enqueue(lasting.as_job(), Policy::Never).await.unwrap();
        stage.during(pause(Duration::from_millis(100))).await;
    }
    let before = roster.find_one(doc! { "pid": pid }).await.unwrap().unwrap().get_object_id("_id").unwrap();
    let blow = async {
        breaks(&line);
        wait_until(SOON, "it is declared dead", async || of_it(doc! { "_id": before }).await == 0).await;
        pause(OUTAGE / 2).await;
        line.heal();
        wait_until(SOON, "it comes back", async || of_it(doc! { "_id": { "$ne": before }, "available": true }).await == 1).await;
    };
    let blow = stage.blow(blow).await;
    let played = stage.close(fault, &[blow]).await;
    assert!(played.findings.deaths > 0, "it held nothing");
    played.end();
}

/// A round trip of a tenth of a second is what everything takes here, and a job takes a dozen of them.
async fn slow_lines(set: &ReplicaSet) {
    let mut stage = Stage::on(&set.uri()).await;
    let (line, bad_line) = (set.proxy(), set.proxy());
    let uri = line.uri(stage.world.database.name());
    stage.start(&uri, PATIENT, &[Role::Recruiter, Role::Cleaner, Role::Worker, Role::Worker]);
    stage.enqueue_by(&uri).await;
    line.slow(LATENCY, BYTES_PER_SECOND);
    bad_line.slow(LATENCY, BYTES_PER_SECOND);
    stage.enqueue_on_a_bad_line(&bad_line).await;
    stage.enqueue_some_that_last(8_000).await;
    let blow = stage.blow(pause(OUTAGE / 2)).await;
    for _ in 0..BURST {
        stage.world.enqueue(Entry::lasting(20), Policy::Never).await.unwrap();
    }
    let burst = stage.blow(pause(OUTAGE / 2)).await;
    stage.close("the network is slow (50 ms, 64 kB/s)", &[blow, burst]).await.without_deaths().end();
}

/// More than a line carries within the time of one call: it is read in portions, and a small job among the large ones does not wait for them.
#[tokio::test(flavor = "multi_thread")]
async fn large_jobs_come_through_a_slow_line() {
    const LARGE: usize = 6;
    let database = TestDatabase::of_its_own().await;
    let store = local::store(&database).await;
    let line = Proxy::before(database.uri()).await;
    line.slow(Duration::ZERO, 1_000_000);
    let recruiter = Local::recruiter(&database, &[]);
    let worker = Process::start("recruiter-worker", &["--builtins"], &[("MONGODB_URI", &line.uri(database.name()))]);
    let archived = async |filter: Document| database.count("archived", filter).await;
    let small = async || NewJob::of_class("noop", doc! {}).enqueue(&store).await.unwrap().id;
    let first = small().await;
    wait_until(SOON, "the line works", async || archived(doc! { "_id": first }).await == 1).await;
    let pad = "x".repeat(3_900_000);
    for _ in 0..LARGE {
        NewJob::of_class("noop", doc! { "pad": &pad }).enqueue(&store).await.unwrap();
    }
    database.until("roster", doc! { "available": false }, 1, "their worker reads them").await;
    let beside = small().await;
    wait_until(SOON, "the small job is done", async || archived(doc! { "_id": beside }).await == 1).await;
    wait_until(SOON * 4, "the large ones are done", async || archived(doc! { "why": "done", "attempts": 1 }).await == 2 + LARGE as u64)
        .await;
    drop(worker);
    recruiter.stop().await;
}
