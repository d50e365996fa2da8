//! Wall clocks that are an hour off, and jump while their owners run: those of the processes, of enqueuers, and of a member of
//! the replica set. No death is early or late, no lease is lost, no job is early or late.

use std::{
    fs::File,
    io::Write as _,
    time::{Duration, Instant},
};

use bson::{Document, doc};
use futures_util::{StreamExt, future::join_all};
use nix::{sys::stat::Mode, unistd::mkfifo};
use recruiter_common::{JobId, RetryManyTimes, Workable, shutdown::pause};
use recruiter_tests::{
    clocks::Clock,
    full_length,
    ledger::{Entry, Event, monotonic_ms},
    mongo::TestDatabase,
    oracle::{Policy, executions_before_the_last},
    processes::Process,
    proxy::{Action, Proxy},
    replica_set::ReplicaSet,
    report::Row,
    wait::{SOON, wait_for, wait_until},
    world::{Role, World},
};

use crate::server::{SETS, whole};

// The clocks are wrong by an hour: a process that trusted one would be wrong by far more than these times, which no busy machine exceeds.
const RECRUITER: &[&str] = &["--lease", "10s", "--poll", "400ms"];
/// An archive that is pruned by a clock that is an hour ahead is empty.
const CLEANER: &[&str] =
    &["--dead-after", "10s", "--every", "150ms", "--keep-archived", "30m", "--prune-every", "500ms", "--sweep-every", "500ms"];
const WORKER: &[&str] = &["--heartbeat", "250ms", "--lease", "5s", "--poll", "400ms", "--grace", "2s"];
const LEASE: Duration = Duration::from_secs(10);
const DEAD_AFTER: Duration = Duration::from_secs(10);
/// How long jobs are put off, for the first time and after a failure.
const DELAY: Duration = Duration::from_secs(2);
/// Less than a wrong clock is wrong by, more than anything takes.
const HALF_AN_HOUR_MS: i64 = 30 * 60 * 1_000;

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_clock_kills_no_worker_loses_no_lease_and_starts_nothing_early() {
    let cases =
        [Role::Recruiter, Role::Cleaner, Role::Worker].into_iter().flat_map(|role| [(role, ["+1h", "-1h"]), (role, ["-1h", "+1h"])]);
    join_all(cases.map(|(role, steps)| wrong_process(role, steps))).await;
}

/// One process with a clock that is off by the first step, jumps by two hours, is right, and is wrong again.
async fn wrong_process(wrong: Role, [first, second]: [&str; 2]) {
    let case = format!("the clock of a {wrong:?} is wrong by {first}, then by {second}").to_lowercase();
    let clock = Clock::offset(first);
    let mut world = World::new().await;
    let environment = clock.environment();
    let start = |world: &mut World, role: Role, args: &[&str], right: bool| {
        world.start_with(role, args, if role == wrong && !right { &environment } else { &[] })
    };
    start(&mut world, Role::Recruiter, RECRUITER, false);
    wait_until(SOON, "it leads", async || lease(&world).await.is_some()).await;
    start(&mut world, Role::Recruiter, RECRUITER, false);
    start(&mut world, Role::Cleaner, CLEANER, false);
    start(&mut world, Role::Worker, WORKER, false);
    start(&mut world, Role::Worker, WORKER, true);
    let term = lease(&world).await.unwrap().get_i64("term").unwrap();
    until(&mut world, "both work", async |world| world.count("roster", doc! { "available": true }).await == 2).await;
    for _ in 0..6 {
        world.enqueue(Entry { ms: 8_000, failures: 0, deaf: true }.as_job(), Policy::Never).await.unwrap();
    }
    let again = RetryManyTimes::new(1, DELAY).unwrap();
    for offset in [first, second, "+0", first] {
        clock.step(offset);
        let end = Instant::now() + DELAY;
        while Instant::now() < end {
            world.enqueue(Entry::lasting(10).after(DELAY), Policy::Never).await.unwrap();
            let failing = Entry { ms: 10, failures: 1, deaf: false }.as_job();
            world.enqueue(failing.retry(&again), Policy::Again(1)).await.unwrap();
            until_passed(&mut world, Duration::from_millis(250)).await;
        }
    }
    assert!(world.until_quiet(SOON).await, "{case}:\n{}", world.logs());
    let mut wrongs = not_in_time(&world).await;
    let mut expect = |holds: bool, what: &str| {
        if !holds {
            wrongs.push(format!("{case}: {what}"));
        }
    };
    expect(!world.logs().contains("a worker is dead"), "I10: a live worker was declared dead");
    expect(lease(&world).await.unwrap().get_i64("term").unwrap() == term, "the lease was lost");

    // Its host vanishes, and the leader is killed. The one is declared dead neither early nor late, and the standby waits for the lease,
    // no matter what the clock does in the meantime.
    let vanished = world.enqueue(Entry::lasting(600_000), Policy::Never).await.unwrap();
    let worker = holder(&mut world, vanished).await;
    world.database.raw("roster").update_one(doc! { "pid": worker }, doc! { "$set": { "boot_id": "another machine" } }).await.unwrap();
    let leader = lease(&world).await.unwrap().get_str("holder_at").unwrap().rsplit_once(':').unwrap().1.parse().unwrap();
    kill(&world, worker);
    // A standby that stalled would have seen this renewal for long.
    let renewals = lease(&world).await.unwrap().get("renewals").cloned();
    until(&mut world, "it is renewed", async |world| lease(world).await.unwrap().get("renewals") != renewals.as_ref()).await;
    kill(&world, leader);
    let begin = Instant::now();
    clock.step(second);
    let (mut died, mut led) = (None, None);
    until(&mut world, "it is declared dead, and a standby leads", async |world| {
        if died.is_none() && world.count("archived", doc! { "_id": vanished }).await == 1 {
            died = Some(begin.elapsed());
        }
        if led.is_none() && lease(world).await.is_some_and(|lease| lease.get_i64("term").unwrap() > term) {
            led = Some(begin.elapsed());
        }
        died.is_some() && led.is_some()
    })
    .await;
    let mut recovery = vec![died.unwrap(), led.unwrap()];
    // The last heartbeat was a moment ago, and the lease was renewed a third of it ago at most; a busy machine is late with either.
    expect(recovery[0] > DEAD_AFTER / 3, &format!("I10: a death after {:?} of silence", recovery[0]));
    expect(recovery[1] > LEASE / 3, &format!("a standby took over after {:?}", recovery[1]));

    // Its process is killed, on the host of the cleaner.
    let killed = world.enqueue(Entry::lasting(600_000), Policy::Never).await.unwrap();
    let worker = holder(&mut world, killed).await;
    kill(&world, worker);
    let begin = Instant::now();
    clock.step(first);
    until(&mut world, "it is declared dead", async |world| world.count("archived", doc! { "_id": killed }).await == 1).await;
    recovery.push(begin.elapsed());
    // Not by its silence. What a process says is read by a thread, which may be late.
    until(&mut world, "the cleaner has said why", async |world| world.logs().contains("its process is gone")).await;

    let mut findings = world.judge().await;
    if findings.deaths != 2 {
        wrongs.push(format!("{case}: I10: {} deaths, and two died", findings.deaths));
    }
    findings.broken.extend(wrongs);
    let mut row = Row::new(case);
    for recovery in recovery {
        row.add(std::mem::take(&mut findings), recovery);
    }
    row.close();
}

async fn until(world: &mut World, what: &str, condition: impl AsyncFnMut(&World) -> bool) {
    assert!(world.until(SOON, condition).await, "not within {SOON:?}: {what}:\n{}", world.logs());
}

async fn until_passed(world: &mut World, time: Duration) {
    let end = Instant::now() + time;
    world.until(time, async |_| Instant::now() >= end).await;
}

async fn lease(world: &World) -> Option<Document> {
    world.database.raw("metadata").find_one(doc! { "_id": "recruiter" }).await.unwrap()
}

/// The process that runs a job.
async fn holder(world: &mut World, job: JobId) -> i32 {
    until(world, "it is started", async |world| world.count("scheduled", doc! { "_id": job, "locked": true }).await == 1).await;
    let job = world.database.raw("scheduled").find_one(doc! { "_id": job }).await.unwrap().unwrap();
    job.get_document("last_execution").unwrap().get_i32("pid").unwrap()
}

fn kill(world: &World, pid: i32) {
    world.members.iter().find(|member| member.process.pid().cast_signed() == pid).unwrap().process.kill();
}

/// Every execution of an archived job that began before it was due by the server's clock, which is right; and every retry that was put
/// off for another time than its policy says, by far. Jobs that are late by an hour are not archived in time.
async fn not_in_time(world: &World) -> Vec<String> {
    let mut wrong = Vec::new();
    let ledger = world.ledger();
    // This process may stall between the two readings, which makes the difference too small.
    let by_the_server = (0..10).map(|_| now_ms() - monotonic_ms()).max().unwrap();
    // Whole milliseconds of two clocks.
    let rounded = 3;
    let mut jobs = world.database.raw("archived").find(doc! {}).await.unwrap();
    while let Some(job) = jobs.next().await {
        let job = job.unwrap();
        let history = executions_before_the_last(&job).into_iter().chain([job.get_document("last_execution").unwrap()]);
        let mut failed = None;
        for execution in history {
            let start = execution.get_object_id("start").unwrap().to_hex();
            let at =
                |event: Event| ledger.iter().find(|line| line.start == start && line.event == event).map(|line| line.at_ms + by_the_server);
            let due = execution.get_datetime("scheduled_at").unwrap().timestamp_millis();
            let begun = at(Event::Begin).unwrap();
            if begun < due - rounded {
                wrong.push(format!("I7: begun {} ms after it was due: {job}", begun - due));
            }
            // The worker's estimate of the server's clock is behind by as much as an answer takes.
            if let Some(failed) = failed
                && !(0..HALF_AN_HOUR_MS).contains(&(due - failed))
            {
                wrong.push(format!("I7: put off by {} ms: {job}", due - failed));
            }
            failed = at(Event::Failed);
        }
    }
    wrong
}

#[tokio::test(flavor = "multi_thread")]
async fn the_clock_of_an_enqueuer_makes_no_job_early_or_late() {
    let mut world = World::new().await;
    world.start(Role::Recruiter, RECRUITER, &[]);
    world.start(Role::Cleaner, CLEANER, &[]);
    world.start(Role::Worker, WORKER, &[]);
    let mut row = Row::new("the clock of an enqueuer is wrong by 1 h, and jumps");
    let asked = join_all(["+1h", "-1h"].map(|offset| enqueue_by_a_wrong_clock(&world, offset))).await.concat();
    for (job, ..) in &asked {
        world.asked.will_send(*job, Policy::Never);
        world.asked.was_acknowledged(*job);
    }
    assert!(world.until_quiet(SOON).await, "{}", world.logs());
    let mut wrong = not_in_time(&world).await;
    for (job, asked, delay) in &asked {
        let archived = world.database.raw("archived").find_one(doc! { "_id": *job }).await.unwrap().unwrap();
        let due = archived.get_document("last_execution").unwrap().get_datetime("scheduled_at").unwrap().timestamp_millis();
        let right = match delay {
            -1 => due == *asked,
            // From when it was enqueued, which is after the program had started.
            delay => (due - delay - asked).abs() < HALF_AN_HOUR_MS,
        };
        if !right {
            wrong.push(format!("I10: due {} ms after it was asked for, and not {delay}: {archived}", due - asked));
        }
    }
    let mut findings = world.judge().await;
    findings.broken.extend(wrong);
    row.add(findings, Duration::ZERO);
    row.close();
}

/// Enqueues by programs with this clock. Returns each job with the time at which it was asked for, and its delay: none is -1 if that
/// time is its date.
async fn enqueue_by_a_wrong_clock(world: &World, offset: &str) -> Vec<(JobId, i64, i64)> {
    let mut asked = Vec::new();
    let clock = Clock::offset(offset);
    let enqueue = async |when: &[&str]| {
        let args = [&["enqueue", "--class", Entry::CLASS, "--parameters", r#"{"ms": 10}"#], when].concat();
        let env = [&[("MONGODB_URI", world.database.uri())], &clock.environment()[..]].concat();
        let mut process = Process::start("recruiter", &args, &env);
        assert!(process.wait_exit(SOON).await.success());
        process.stdout().trim().parse::<JobId>().unwrap()
    };
    let before = now_ms();
    asked.push((enqueue(&[]).await, before, 0));
    let before = now_ms();
    asked.push((enqueue(&["--after", "2s"]).await, before, 2_000));
    let instant = bson::DateTime::from_millis(now_ms() + 4_000);
    let job = enqueue(&["--at", &instant.try_to_rfc3339_string().unwrap()]).await;
    asked.push((job, instant.timestamp_millis(), -1));

    // One that runs on while its clock jumps.
    let directory = tempfile::tempdir().unwrap();
    let pipe = directory.path().join("jobs");
    mkfifo(&pipe, Mode::S_IRWXU).unwrap();
    let env = [&[("MONGODB_URI", world.database.uri())], &clock.environment()[..]].concat();
    let mut process = Process::start("recruiter", &["enqueue", "--from", pipe.to_str().unwrap()], &env);
    // Waits for its reader.
    let mut jobs = tokio::task::spawn_blocking(move || File::options().write(true).open(pipe).unwrap()).await.unwrap();
    for step in [offset, "+0", "-1h", "+1h"] {
        clock.step(step);
        pause(Duration::from_millis(1_200)).await;
        let (job, before) = (JobId::new(), now_ms());
        writeln!(jobs, r#"{{"class": "entry", "parameters": {{"ms": 10}}, "after": "2s", "id": "{job}"}}"#).unwrap();
        wait_until(SOON, "it is enqueued", async || process.stdout().contains(&job.to_string())).await;
        asked.push((job, before, 2_000));
    }
    drop(jobs);
    assert!(process.wait_exit(SOON).await.success(), "{}", process.stderr());
    asked
}

/// The reply to a heartbeat, which has the server's time, takes three seconds to arrive.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_answer_makes_no_retry_early() {
    let mut world = World::new().await;
    let line = Proxy::before(world.database.uri()).await;
    world.start(Role::Recruiter, RECRUITER, &[]);
    let beats = line.arm(Action::Stall, 0..0, |request| request.is("findAndModify", "roster"));
    let flags = ["--heartbeat", "4s", "--lease", "12s", "--poll", "400ms", "--grace", "2s"];
    world.start_at(&line.uri(world.database.name()), Role::Worker, &flags, &[]);
    // Fails when the answer has come, and long before the next one.
    let failing = Entry { ms: 5_500, failures: 1, deaf: true }.as_job().retry(&RetryManyTimes::new(1, DELAY).unwrap());
    wait_until(SOON, "it beats", async || beats.matched() > 0).await;
    let beats_before = beats.matched();
    pause(Duration::from_millis(2_500)).await;
    let job = world.enqueue(failing, Policy::Again(1)).await.unwrap();
    holder(&mut world, job).await;
    line.blackhole_replies();
    wait_until(SOON, "it beats again", async || beats.matched() > beats_before).await;
    pause(Duration::from_secs(3)).await;
    line.heal();
    let begin = Instant::now();
    assert!(world.until_quiet(SOON).await, "{}", world.logs());
    let wrong = not_in_time(&world).await;
    let mut findings = world.judge().await;
    findings.broken.extend(wrong);
    let mut row = Row::new("a reply with the server's time is delayed by 3 s");
    row.add(findings, begin.elapsed());
    row.close();
}

/// Jobs whose date has passed by the clock of every member. A job that is due now by a clock that is ahead is not by the next one.
async fn enqueue_due_by_any_clock(world: &World, entry: &Entry, count: usize) -> Vec<JobId> {
    let long_ago = bson::DateTime::from_millis(now_ms() - 3 * 3_600_000).to_chrono();
    let mut jobs = Vec::new();
    for _ in 0..count {
        let job = entry.as_job().at(long_ago).with_id(JobId::new());
        // There may be no primary for a moment.
        let enqueue = async || world.enqueue(job.clone(), Policy::SentAgain).await.ok();
        jobs.push(wait_for(SOON, "it is enqueued", enqueue).await);
    }
    jobs
}

/// By the clock of this machine, which is the server's and right.
fn now_ms() -> i64 {
    bson::DateTime::now().timestamp_millis()
}

/// Heartbeats jump by an hour, forward and back; so do the starts of leases, the dates of jobs, everything that the server stamps.
#[tokio::test(flavor = "multi_thread")]
async fn a_failover_to_a_member_whose_clock_is_wrong_kills_no_worker() {
    let _turn = SETS.acquire().await.unwrap();
    let clock = Clock::offset("+1h");
    let mut set = ReplicaSet::start_with(&[&[], &[], &clock.environment()]).await;
    set.elect(0).await;
    let mut world = World::on(TestDatabase::on(&set.uri()).await).await;
    let uri = set.uri_for(world.database.name());
    world.start_at(&uri, Role::Recruiter, RECRUITER, &[]);
    world.start_at(&uri, Role::Recruiter, RECRUITER, &[]);
    world.start_at(&uri, Role::Cleaner, &["--dead-after", "8s", "--every", "300ms", "--keep-archived", "1d"], &[]);
    for _ in 0..2 {
        world.start_at(&uri, Role::Worker, &["--heartbeat", "500ms", "--lease", "2s", "--poll", "400ms", "--grace", "5s"], &[]);
    }
    let mut recoveries = Vec::new();
    // The first one is a jump forward and one back as well.
    let offsets = [("+1h", 1), ("-1h", -1)];
    for (offset, hours) in offsets.into_iter().take(if full_length() { 2 } else { 1 }) {
        // While it does not run: after a jump back by two hours it could not read its oplog any more (6.0.5 with libfaketime), as if
        // one of its threads waited for an instant of the old time.
        set.elect(0).await;
        set.kill(2).await;
        clock.step(offset);
        set.restart(2).await;
        let hours_ahead = async || {
            let local_time = *set.command(2, doc! { "hello": 1 }).await.ok()?.get_datetime("localTime").unwrap();
            Some((local_time.timestamp_millis() - now_ms() + HALF_AN_HOUR_MS).div_euclid(2 * HALF_AN_HOUR_MS))
        };
        wait_until(SOON, "its clock is wrong", async || hours_ahead().await == Some(hours)).await;
        for member in [2, 0] {
            let long = enqueue_due_by_any_clock(&world, &Entry { ms: 12_000, failures: 0, deaf: true }, 4).await;
            let they_run = doc! { "_id": { "$in": long }, "locked": true };
            until(&mut world, "they run", async |world| world.count("scheduled", they_run.clone()).await == 4).await;
            whole(&set).await;
            set.elect(member).await;
            let begin = Instant::now();
            let job = enqueue_due_by_any_clock(&world, &Entry::default(), 1).await[0];
            until(&mut world, "a new one is done", async |world| world.count("archived", doc! { "_id": job }).await == 1).await;
            recoveries.push(begin.elapsed());
            // Now is now by its clock, not by that of the last one.
            let enqueue = async || world.enqueue(Entry::default().as_job(), Policy::SentAgain).await.ok();
            let job = wait_for(SOON, "it is enqueued", enqueue).await;
            until(&mut world, "one is done that is due at once", async |world| world.count("archived", doc! { "_id": job }).await == 1)
                .await;
            // For longer than a death takes.
            until_passed(&mut world, Duration::from_secs(9)).await;
            assert!(!world.logs().contains("a worker is dead"), "{}", world.logs());
        }
    }
    assert!(world.until_quiet(SOON).await, "{}", world.logs());
    let mut findings = world.judge().await;
    if findings.deaths > 0 {
        findings.broken.push(format!("I10: {} deaths, but no process died", findings.deaths));
    }
    println!("{recoveries:?}: {:?}", findings.all());
    let mut row = Row::new("failovers between members whose clocks differ by 1 h");
    for recovery in recoveries {
        row.add(std::mem::take(&mut findings), recovery);
    }
    row.close();
}
