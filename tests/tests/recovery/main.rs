//! How long it takes until things go on, mostly with the default flags. One test at a time, so that the machine is theirs;
//! every limit here is a promise of the documentation.

#![expect(clippy::unwrap_used, reason = "in a test it says where it failed")]

use std::time::{Duration, Instant};

use bson::doc;
use recruiter_common::{RetryForever, RetryManyTimes, Workable, shutdown::pause};
use recruiter_tests::{
    full_length,
    ledger::{Entry, Longer},
    mongo::{TestDatabase, own_mongod},
    oracle::{Findings, Policy},
    processes::Process,
    report::Row,
    wait::{SOON, Stopwatch, best_of_three, wait_until},
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
/// No death on a busy machine, and shorter than an outage.
const DEAD_AFTER_10S: [&[&str]; 2] =
    [&["--dead-after", "10s", "--every", "1s"], &["--heartbeat", "1s", "--lease", "5s", "--poll", "1s", "--grace", "30s"]];

async fn one_at_a_time() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::const_new(());
    TURN.lock().await
}

async fn until_started(world: &mut World, jobs: u64) {
    assert!(world.until(SOON, async |world| world.started().await == jobs).await, "{}", world.logs());
}

/// The time from now until every start of a job has ended.
async fn until_rescued(world: &mut World) -> Duration {
    let begin = Stopwatch::start();
    wait_until(SOON, "the jobs are ended by their policies", async || world.started().await == 0).await;
    begin.elapsed()
}

#[tokio::test]
async fn the_jobs_of_a_worker_killed_on_a_host_with_a_cleaner_are_ended_by_their_policies_within_two_seconds() {
    const WITHIN: Duration = Duration::from_secs(2);
    let _turn = one_at_a_time().await;
    let mut row = Row::new("a worker is killed (SIGKILL), with a cleaner on its host");
    let mut world = World::new().await;
    world.start(Role::Recruiter, RECRUITER, &[]);
    world.start(Role::Cleaner, CLEANER, &[]);
    let worker = world.start(Role::Worker, WORKER, &[]);
    // Nothing is locked again at once.
    let later = RetryManyTimes::new(50, SOON).unwrap();
    let kills = if full_length() { 10 } else { 3 };
    for _ in 0..kills {
        let rescue = async || {
            world.enqueue(Entry::lasting(600_000), Policy::Never).await.unwrap();
            world.enqueue(Entry::lasting(600_000).retry(&later), Policy::Again(50)).await.unwrap();
            until_started(&mut world, 2).await;
            world.members[worker].process.kill();
            until_rescued(&mut world).await
        };
        row.add(Findings::default(), best_of_three(WITHIN, "the rescue of the jobs of a killed worker", rescue).await);
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
    const WITHIN: Duration = Duration::from_secs(7);
    let _turn = one_at_a_time().await;
    let mut row = Row::new("a host disappears, --dead-after 5s");
    let [cleaner, worker] = DEAD_AFTER_5S;
    let hosts = if full_length() { 3 } else { 1 };
    for _ in 0..hosts {
        let vanish = async || {
            let mut world = World::new().await;
            world.start(Role::Recruiter, RECRUITER, &[]);
            world.start(Role::Cleaner, cleaner, &[]);
            let worker = world.start(Role::Worker, worker, &[]);
            world.enqueue(Entry::lasting(600_000), Policy::Never).await.unwrap();
            until_started(&mut world, 1).await;
            world.database.raw("roster").update_many(doc! {}, doc! { "$set": { "boot_id": "another machine" } }).await.unwrap();
            world.members[worker].process.kill();
            let recovery = until_rescued(&mut world).await;
            assert!(world.logs().contains("its heartbeat did not change"), "{}", world.logs());
            row.findings.add(world.judge().await);
            recovery
        };
        let recovery = best_of_three(WITHIN, "the rescue of the jobs of a host that vanished", vanish).await;
        row.add(Findings::default(), recovery);
    }
    row.close();
}

/// Both cores are busy with something else as well, and the workers with more than they can do.
#[tokio::test]
async fn under_full_load_no_living_worker_is_declared_dead() {
    let _turn = one_at_a_time().await;
    // Other programs may have stopped everything here for longer than a death takes: not three times in a row.
    let mut row = Row::new("both cores are busy, --dead-after 5s (no live worker is declared dead)");
    for _ in 0..3 {
        let (findings, logs) = under_full_load().await;
        let deaths = findings.deaths;
        row.add(findings, Duration::ZERO);
        if deaths == 0 && !logs.contains("a worker is dead") {
            return row.close();
        }
        println!("{logs}");
    }
    panic!("workers that are alive are declared dead under full load");
}

async fn under_full_load() -> (Findings, String) {
    let [cleaner, worker] = DEAD_AFTER_5S;
    let mut world = World::new().await;
    world.start(Role::Recruiter, RECRUITER, &[]);
    world.start(Role::Cleaner, cleaner, &[]);
    for _ in 0..3 {
        world.start(Role::Worker, &[worker, &["--concurrency", "200"]].concat(), &[]);
    }
    let over = Instant::now() + Duration::from_secs(if full_length() { 20 } else { 8 });
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
    let logs = world.logs();
    (world.judge().await, logs)
}

#[tokio::test]
async fn a_standby_leads_within_a_second_of_a_stop_and_of_the_lease_after_a_kill() {
    const AFTER_A_STOP: Duration = Duration::from_secs(1);
    const AFTER_A_KILL: Duration = Duration::from_secs(6);
    let _turn = one_at_a_time().await;
    let mut stopped = Row::new("the leading recruiter is stopped (TERM)");
    let mut killed = Row::new("the leading recruiter is killed, --lease 5s");
    let mut world = World::new().await;
    let begin = async |says: &str| {
        let recruiter = world.beside(&[], Role::Recruiter, &["--lease", "5s", "--poll", "1s"]);
        wait_until(SOON, says, async || recruiter.stderr().contains(says)).await;
        recruiter
    };
    let mut leader = begin("leading").await;
    let rounds = if full_length() { 4 } else { 1 };
    for round in 0..rounds {
        let ends: [fn(&Process); 2] = [Process::terminate, Process::kill];
        for (end, (row, within)) in ends.into_iter().zip([(&mut stopped, AFTER_A_STOP), (&mut killed, AFTER_A_KILL)]) {
            let takeover = async || {
                let standby = begin("standing by").await;
                // At any time of the lease.
                pause(Duration::from_millis(600 * (round + 1))).await;
                end(&leader);
                let begin = Stopwatch::start();
                wait_until(SOON, "the standby leads", async || standby.stderr().contains("leading")).await;
                leader = standby;
                begin.elapsed()
            };
            row.add(Findings::default(), best_of_three(within, "the takeover by a standby", takeover).await);
        }
    }
    drop(leader);
    stopped.findings.add(world.judge().await);
    stopped.close();
    killed.close();
}

/// Longer than every limit on a call, every lease and every death; in the full length with the default flags.
#[tokio::test]
async fn after_an_outage_of_mongodb_everything_flows_within_five_seconds() {
    const WITHIN: Duration = Duration::from_secs(5);
    let _turn = one_at_a_time().await;
    let seconds = if full_length() { 60 } else { 13 };
    let mut row = Row::new(format!("MongoDB is unreachable for {seconds} s"));
    let new_job = async || {
        let (findings, recovery) = outage(seconds).await;
        row.findings.add(findings);
        recovery
    };
    let recovery = best_of_three(WITHIN, "a new job after an outage of MongoDB", new_job).await;
    row.add(Findings::default(), recovery);
    row.close();
}

async fn outage(seconds: u16) -> (Findings, Duration) {
    let [cleaner, worker] = if full_length() { [CLEANER, WORKER] } else { DEAD_AFTER_10S };
    let mut mongod = own_mongod().await;
    let mut world = World::on(TestDatabase::on(&mongod.uri()).await).await;
    world.start(Role::Recruiter, RECRUITER, &[]);
    world.start(Role::Cleaner, cleaner, &[]);
    for _ in 0..2 {
        world.start(Role::Worker, worker, &[]);
    }
    // Some of them end while MongoDB is away, some after it is back.
    let again = RetryForever::new(Duration::from_millis(100)).unwrap();
    let ms = i64::from(seconds) * 1_000;
    for ms in [ms / 4, ms / 2, ms + 2_000] {
        world.enqueue(Entry::lasting(ms), Policy::Never).await.unwrap();
        let fails = Longer { first: Entry { ms, failures: 1, deaf: false }, again_ms: 0 }.as_job();
        world.enqueue(fails.retry(&again), Policy::Any).await.unwrap();
    }
    assert!(world.until(SOON, async |world| world.begun().len() >= 6).await, "{}", world.logs());
    mongod.kill().await.unwrap();
    pause(Duration::from_secs(seconds.into())).await;
    mongod.restart().await.unwrap();
    let begin = Stopwatch::start();
    world.enqueue(Entry::lasting(0), Policy::Never).await.unwrap();
    let new_job = async |world: &World| world.count("archived", doc! { "workable.parameters.ms": 0 }).await == 1;
    assert!(world.until(SOON, new_job).await, "{}", world.logs());
    let recovery = begin.elapsed();
    assert!(world.until_quiet(SOON * 4).await, "{}", world.logs());
    assert!(!world.logs().contains("a worker is dead"), "{}", world.logs());
    let findings = world.judge().await;
    (findings, recovery)
}
