//! Writes that stand still while reads are answered: MongoDB is locked for a backup, as it is in effect when its disk hangs.

use std::time::{Duration, Instant};

use bson::doc;
use recruiter_common::{
    WorkerId,
    shutdown::pause,
    store::{HeartbeatReply, Registration, Store},
};
use recruiter_tests::{
    factory::announcement,
    ledger::Entry,
    mongo::TestDatabase,
    oracle::Policy,
    wait::{SOON, wait_until},
    world::{Role, World},
};

/// How long writes stand still: longer than a death takes here, and shorter than the limit of a call.
const STALL: Duration = Duration::from_secs(9);
const DEAD_AFTER: Duration = Duration::from_secs(5);
const CLEANER: [&str; 4] = ["--dead-after", "5s", "--every", "100ms"];
const HEARTBEAT: Duration = Duration::from_millis(200);
const WORKERS: usize = 3;

async fn beat(store: &Store, worker: WorkerId) {
    assert!(matches!(store.heartbeat(worker, &[], 0).await.unwrap(), HeartbeatReply::Seen { .. }), "it was declared dead, and it lives");
}

async fn beat_for(store: &Store, worker: WorkerId, time: Duration) {
    let until = Instant::now() + time;
    while Instant::now() < until {
        beat(store, worker).await;
        pause(HEARTBEAT).await;
    }
}

/// I10: reads show heartbeats that do not change, and all processes live. When writes go on, heartbeats that waited in MongoDB and
/// what a cleaner has sent meanwhile are carried out in any order; one worker sends its heartbeat only then, which is the worst case.
#[tokio::test(flavor = "multi_thread")]
async fn no_worker_is_declared_dead_while_writes_stand_still() {
    let mut world = World::on(TestDatabase::of_its_own().await).await;
    let late = Registration { lease_ms: 600, ..announcement(1) };
    // For a retirement in the middle; no cleaner would send it so soon.
    let patient = Registration { lease_ms: 600_000, ..announcement(1) };
    for worker in [&late, &patient] {
        world.store.register(worker).await.unwrap();
    }
    world.start(Role::Recruiter, &[], &[]);
    let cleaners = [(); 2].map(|()| world.start(Role::Cleaner, &CLEANER, &[]));
    for _ in 0..WORKERS {
        world.start(Role::Worker, &[], &[]);
    }
    // Until after the stall.
    for _ in 0..WORKERS {
        world.enqueue(Entry::lasting(12_000), Policy::Never).await.unwrap();
    }
    // One worker may start the jobs of another that is not ready yet: its registration would stand still, and it would register again.
    let before = WORKERS as u64 + 2;
    let are_ready = || world.logs().matches("ready for work").count() == WORKERS;
    while world.started().await < WORKERS as u64 || !are_ready() {
        beat_for(&world.store, late.id, HEARTBEAT).await;
    }
    assert_eq!(world.count("roster", doc! {}).await, before);
    let admin = world.database.database().client().database("admin");
    admin.run_command(doc! { "fsync": 1, "lock": true }).await.unwrap();
    let stalled = Instant::now();
    let registered = world.store.registered_workers().await.unwrap();
    let seen = registered.iter().find(|worker| worker.id == patient.id).unwrap().last_seen_at;
    let given_up = world.store.retire_if_silent_since(patient.id, seen).await.unwrap_err();
    assert!(given_up.is_too_slow(), "{given_up:?}");
    let has_noticed = |cleaner: usize| world.members[cleaner].process.stderr().contains("does not acknowledge a write");
    wait_until(SOON, "both cleaners have noticed it", async || cleaners.iter().all(|cleaner| has_noticed(*cleaner))).await;
    pause(STALL.saturating_sub(stalled.elapsed())).await;
    admin.run_command(doc! { "fsyncUnlock": 1 }).await.unwrap();
    pause(HEARTBEAT).await;
    beat_for(&world.store, late.id, Duration::from_secs(3)).await;
    assert_eq!(world.count("metadata", doc! { "_id": "cleaners" }).await, 1, "one document for all cleaners");

    // Who really dies is found as before, by a cleaner that suspects it in the meantime.
    let silent = Instant::now();
    beat(&world.store, late.id).await;
    world.wait_for("it is declared dead", async || world.count("roster", doc! { "_id": late.id }).await == 0).await;
    assert!(silent.elapsed() > DEAD_AFTER / 2, "{:?}", silent.elapsed());
    // Nobody else, also of the commands that were aborted.
    assert_eq!(world.logs().matches("a worker is dead").count(), 1, "{}", world.logs());
    assert_eq!(world.count("roster", doc! { "retired": { "$ne": true } }).await, before - 1);
    world.store.leave_if_alive(patient.id).await.unwrap();
    assert!(world.until_quiet(SOON).await, "{}", world.logs());
    let findings = world.judge().await;
    assert_eq!((findings.deaths, findings.all()), (0, Vec::new()), "{}", world.logs());
}
