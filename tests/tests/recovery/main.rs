//! How long it takes until things go on, with the default flags. One test at a time, so that the machine is theirs;
//! every limit here is a promise of the README.

use std::time::{Duration, Instant};

use bson::doc;
use recruiter_common::{
    enqueue::Workable,
    retry_policy::{RetryForever, RetryManyTimes},
    shutdown::pause,
};
use recruiter_tests::{
    ledger::Entry,
    mongo::{TestDatabase, own_mongod},
    oracle::{Findings, Policy},
    report::Row,
    wait::wait_until,
    world::{Role, World},
};
use tokio::sync::{Mutex, MutexGuard};

/// The default flags.
const RECRUITER: &[&str] = &["--lease", "15s", "--poll", "1s"];
const CLEANER: &[&str] = &["--dead-after", "30s", "--every", "1s", "--sweep-every", "1m", "--prune-every", "1m", "--keep-archived", "5d"];
const WORKER: &[&str] = &["--heartbeat", "5s", "--lease", "20s", "--grace", "30s", "--poll", "1s"];
/// As short as deaths should be made.
const DEAD_AFTER_5S: [&[&str]; 2] =
    [&["--dead-after", "5s", "--every", "1s"], &["--heartbeat", "1s", "--lease", "3s", "--poll", "1s", "--grace", "30s"]];
const SOON: Duration = Duration::from_secs(30);

async fn one_at_a_time() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::const_new(());
    TURN.lock().await
}

async fn until_started(world: &mut World, jobs: u64) {
    assert!(world.until(SOON, async |world| world.started().await == jobs).await, "{}", world.logs());
}

/// The time from now until every start of a job has ended.
async fn until_rescued(world: &mut World) -> Duration {
    let begin = Instant::now();
    wait_until(SOON, "the jobs are ended by their policies", async || world.started().await == 0).await;
    begin.elapsed()
}

#[tokio::test]
async fn the_jobs_of_a_worker_killed_on_a_host_with_a_cleaner_are_ended_by_their_policies_within_a_second() {
    let _turn = one_at_a_time().await;
    let mut row = Row::new("a worker is killed (SIGKILL), with a cleaner on its host", Duration::from_secs(1));
    let mut world = World::new().await;
    world.start(Role::Recruiter, RECRUITER, &[]);
    world.start(Role::Cleaner, CLEANER, &[]);
    let worker = world.start(Role::Worker, WORKER, &[]);
    // Not before half a minute, so that nothing is locked again at once.
    let later = RetryManyTimes::new(50, SOON).unwrap();
    for _ in 0..10 {
        world.enqueue(Entry::lasting(600_000), Policy::Never).await.unwrap();
        world.enqueue(Entry::lasting(600_000).retry(&later), Policy::Again(50)).await.unwrap();
        until_started(&mut world, 2).await;
        world.members[worker].process.kill();
        let recovery = until_rescued(&mut world).await;
        row.add(Findings::default(), recovery);
        assert!(recovery < Duration::from_secs(1), "after {recovery:?}:\n{}", world.logs());
    }
    world
        .database
        .raw("scheduled")
        .update_many(doc! {}, doc! { "$set": { "workable.parameters.ms": 0, "scheduled_at": bson::DateTime::now() } })
        .await
        .unwrap();
    assert!(world.until_quiet(SOON).await);
    row.findings.add(world.judge().await);
    row.close();
}

/// The worker's document names another machine, so only its silence shows its death.
#[tokio::test]
async fn the_jobs_of_a_host_that_vanished_are_ended_within_two_seconds_of_dead_after() {
    let _turn = one_at_a_time().await;
    let mut row = Row::new("a host disappears, --dead-after 5s", Duration::from_secs(7));
    let [cleaner, worker] = DEAD_AFTER_5S;
    for _ in 0..3 {
        let mut world = World::new().await;
        world.start(Role::Recruiter, RECRUITER, &[]);
        world.start(Role::Cleaner, cleaner, &[]);
        let worker = world.start(Role::Worker, worker, &[]);
        world.enqueue(Entry::lasting(600_000), Policy::Never).await.unwrap();
        until_started(&mut world, 1).await;
        world.database.raw("roster").update_many(doc! {}, doc! { "$set": { "boot_id": "another machine" } }).await.unwrap();
        world.members[worker].process.kill();
        let recovery = until_rescued(&mut world).await;
        assert!((Duration::from_millis(3_900)..Duration::from_secs(7)).contains(&recovery), "after {recovery:?}:\n{}", world.logs());
        row.add(world.judge().await, recovery);
    }
    row.close();
}

/// Both cores are busy with something else as well, and the workers with more than they can do.
#[tokio::test]
async fn under_full_load_nobody_alive_is_declared_dead() {
    let _turn = one_at_a_time().await;
    let [cleaner, worker] = DEAD_AFTER_5S;
    let mut world = World::new().await;
    world.start(Role::Recruiter, RECRUITER, &[]);
    world.start(Role::Cleaner, cleaner, &[]);
    for _ in 0..3 {
        world.start(Role::Worker, &[worker, &["--concurrency", "200"]].concat(), &[]);
    }
    let over = Instant::now() + Duration::from_secs(20);
    let spinning: Vec<_> = (0..4)
        .map(|_| {
            std::thread::spawn(move || {
                while Instant::now() < over {
                    std::hint::spin_loop();
                }
            })
        })
        .collect();
    while Instant::now() < over {
        for _ in 0..100 {
            world.enqueue(Entry::lasting(5), Policy::Never).await.unwrap();
        }
    }
    spinning.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(world.until_quiet(SOON * 4).await, "{}", world.logs());
    assert!(!world.logs().contains("a worker is dead"), "{}", world.logs());
    let findings = world.judge().await;
    assert_eq!(findings.deaths, 0);
    let mut row = Row::new("both cores are busy, --dead-after 5s (no live worker is declared dead)", Duration::ZERO);
    row.add(findings, Duration::ZERO);
    row.close();
}

#[tokio::test]
async fn a_standby_leads_within_a_second_of_a_stop_and_of_the_lease_after_a_kill() {
    let _turn = one_at_a_time().await;
    let mut stopped = Row::new("the leading recruiter is stopped (TERM)", Duration::from_secs(1));
    let mut killed = Row::new("the leading recruiter is killed, --lease 5s", Duration::from_secs(6));
    let mut world = World::new().await;
    let begin = async |says: &str| {
        let recruiter = world.beside(&[], Role::Recruiter, &["--lease", "5s", "--poll", "1s"]);
        wait_until(SOON, says, async || recruiter.stderr().contains(says)).await;
        recruiter
    };
    let mut leader = begin("leading").await;
    for round in 0..8 {
        let standby = begin("standing by").await;
        // At any time of the lease.
        pause(Duration::from_millis(300 * round)).await;
        let (row, limit) = if round % 2 == 0 {
            leader.terminate();
            (&mut stopped, Duration::ZERO)
        } else {
            leader.kill();
            (&mut killed, Duration::from_secs(5))
        };
        let begin = Instant::now();
        wait_until(SOON, "the standby leads", async || standby.stderr().contains("leading")).await;
        assert!(begin.elapsed() < limit + Duration::from_secs(1), "after {:?}", begin.elapsed());
        row.add(Findings::default(), begin.elapsed());
        leader = standby;
    }
    drop(leader);
    stopped.findings.add(world.judge().await);
    stopped.close();
    killed.close();
}

/// Longer than every limit on a call, every lease and every death.
#[tokio::test]
async fn after_a_minute_without_mongodb_everything_flows_within_five_seconds() {
    let _turn = one_at_a_time().await;
    let mut mongod = own_mongod().await;
    let mut world = World::on(TestDatabase::on(&mongod.uri()).await).await;
    world.start(Role::Recruiter, RECRUITER, &[]);
    world.start(Role::Cleaner, CLEANER, &[]);
    for _ in 0..2 {
        world.start(Role::Worker, WORKER, &[]);
    }
    // Some of them end while MongoDB is away, some after it is back.
    let again = RetryForever::new(Duration::from_millis(100)).unwrap();
    for ms in [5_000, 20_000, 62_000] {
        world.enqueue(Entry::lasting(ms), Policy::Never).await.unwrap();
        world.enqueue(Entry { ms, failures: 1, deaf: false }.as_job().retry(&again), Policy::Any).await.unwrap();
    }
    until_started(&mut world, 6).await;
    mongod.kill().await.unwrap();
    pause(Duration::from_secs(60)).await;
    mongod.restart().await.unwrap();
    let begin = Instant::now();
    world.enqueue(Entry::lasting(0), Policy::Never).await.unwrap();
    let new_job = async |world: &World| world.count("archived", doc! { "workable.parameters.ms": 0 }).await == 1;
    assert!(world.until(SOON, new_job).await, "{}", world.logs());
    let recovery = begin.elapsed();
    assert!(recovery < Duration::from_secs(5), "after {recovery:?}:\n{}", world.logs());
    assert!(world.until_quiet(SOON * 4).await, "{}", world.logs());
    assert!(!world.logs().contains("a worker is dead"), "{}", world.logs());
    let mut row = Row::new("MongoDB is unreachable for 60 s", Duration::from_secs(5));
    row.add(world.judge().await, recovery);
    row.close();
    mongod.stop().await.unwrap();
}
