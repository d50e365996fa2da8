//! Wall clocks that are an hour off, and jump while their owners run: those of the processes, of enqueuers, and of a member of
//! the replica set. Nobody dies early or late of it, no lease is lost, no job is early or late.

use std::{
    fs::File,
    io::Write as _,
    time::{Duration, Instant},
};

use bson::{Document, doc};
use futures_util::{StreamExt, stream};
use nix::{sys::stat::Mode, unistd::mkfifo};
use recruiter_common::{
    enqueue::Workable,
    ids::JobId,
    retry_policy::RetryManyTimes,
    shutdown::pause,
    store::{ConnectArgs, Store},
};
use recruiter_tests::{
    clocks::Clock,
    ledger::{Entry, Event, monotonic_ms},
    mongo::TestDatabase,
    oracle::Policy,
    processes::Process,
    replica_set::ReplicaSet,
    report::Row,
    wait::{wait_for, wait_until},
    world::{Role, World},
};

use crate::server::SETS;

const RECRUITER: &[&str] = &["--lease", "3s", "--poll", "400ms"];
/// An archive that is pruned by a clock that is an hour ahead is empty.
const CLEANER: &[&str] = &["--dead-after", "3s", "--every", "150ms", "--keep-archived", "30m", "--prune-every", "500ms", "--sweep-every", "500ms"];
const WORKER: &[&str] = &["--heartbeat", "250ms", "--lease", "1s", "--poll", "400ms", "--grace", "2s"];
const LEASE: Duration = Duration::from_secs(3);
const DEAD_AFTER: Duration = Duration::from_secs(3);
/// Between the last sign of life and a death, at most.
const LAST_SIGN: Duration = Duration::from_millis(1_000);
/// What is late, by the poll fallback and a busy machine.
const LATE: Duration = Duration::from_millis(1_500);
/// How long jobs are put off, for the first time and after a failure.
const DELAY: Duration = Duration::from_secs(2);
const SOON: Duration = Duration::from_secs(60);
/// Worlds at a time.
const AT_A_TIME: usize = 3;

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_clock_kills_nobody_loses_no_lease_and_starts_nothing_early() {
    let cases = [Role::Recruiter, Role::Cleaner, Role::Worker].into_iter().flat_map(|role| [(role, ["+1h", "-1h"]), (role, ["-1h", "+1h"])]);
    let runs = stream::iter(cases).map(|(role, steps)| wrong_process(role, steps)).buffer_unordered(AT_A_TIME);
    runs.for_each(async |()| {}).await;
}

/// One process with a clock that is off by the first step, jumps by two hours, is right, and is wrong again.
async fn wrong_process(wrong: Role, [first, second]: [&str; 2]) {
    let case = format!("the clock of a {wrong:?} is off by {first}, then {second}").to_lowercase();
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
    expect(!world.logs().contains("a worker is dead"), "I10: somebody alive was declared dead");
    expect(lease(&world).await.unwrap().get_i64("term").unwrap() == term, "the lease was lost");

    // Its host vanishes; nobody declares it dead early or late, whatever the clock does meanwhile.
    let mut recovery = Vec::new();
    let vanished = world.enqueue(Entry::lasting(600_000), Policy::Never).await.unwrap();
    let worker = holder(&mut world, vanished).await;
    world.database.raw("roster").update_one(doc! { "pid": worker }, doc! { "$set": { "boot_id": "another machine" } }).await.unwrap();
    kill(&world, worker);
    let begin = Instant::now();
    clock.step(second);
    until(&mut world, "it is declared dead", async |world| world.count("archived", doc! { "_id": vanished }).await == 1).await;
    recovery.push(begin.elapsed());
    expect(begin.elapsed() > DEAD_AFTER - LAST_SIGN, &format!("I10: a death after {:?} of silence", begin.elapsed()));
    expect(begin.elapsed() < DEAD_AFTER + LAST_SIGN * 2, &format!("a death was found after {:?} only", begin.elapsed()));

    // Its process is killed, on the host of the cleaner.
    let killed = world.enqueue(Entry::lasting(600_000), Policy::Never).await.unwrap();
    let worker = holder(&mut world, killed).await;
    kill(&world, worker);
    let begin = Instant::now();
    clock.step(first);
    until(&mut world, "it is declared dead", async |world| world.count("archived", doc! { "_id": killed }).await == 1).await;
    recovery.push(begin.elapsed());
    expect(begin.elapsed() < DEAD_AFTER - LAST_SIGN, &format!("a killed process was found after {:?} only", begin.elapsed()));

    // The leader is killed; the standby waits for the whole lease, and not longer.
    let leader = lease(&world).await.unwrap().get_str("holder_at").unwrap().rsplit_once(':').unwrap().1.parse().unwrap();
    kill(&world, leader);
    let begin = Instant::now();
    clock.step(second);
    until(&mut world, "a standby leads", async |world| lease(world).await.is_some_and(|lease| lease.get_i64("term").unwrap() > term)).await;
    recovery.push(begin.elapsed());
    // The lease was renewed a third of it ago at most.
    expect(begin.elapsed() > LEASE / 2, &format!("a standby took over after {:?}", begin.elapsed()));
    expect(begin.elapsed() < LEASE + LAST_SIGN * 2, &format!("a standby took over after {:?} only", begin.elapsed()));

    let mut findings = world.judge().await;
    if findings.deaths != 2 {
        wrongs.push(format!("{case}: I10: {} deaths, and two died", findings.deaths));
    }
    findings.broken.extend(wrongs);
    println!("{case}: {recovery:?}, {:?}", findings.all());
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

/// Every execution of an archived job that began before it was due by the server's clock, which is right, or long after; and
/// every retry that was put off for another time than its policy says.
async fn not_in_time(world: &World) -> Vec<String> {
    let mut wrong = Vec::new();
    let ledger = world.ledger();
    let by_the_server = bson::DateTime::now().timestamp_millis() - monotonic_ms();
    let ms = |time: Duration| i64::try_from(time.as_millis()).unwrap();
    // Whole milliseconds of two clocks; and an estimate of the server's, which is behind by as much as an answer takes.
    let (rounded, behind) = (3, 300);
    let mut jobs = world.database.raw("archived").find(doc! {}).await.unwrap();
    let (mut executions, mut latest) = (0, 0);
    while let Some(job) = jobs.next().await {
        let job = job.unwrap();
        let earlier = job.get_array("executions").map(|all| all.iter().filter_map(bson::Bson::as_document).cloned().collect::<Vec<_>>());
        let history = earlier.unwrap_or_default().into_iter().chain([job.get_document("last_execution").unwrap().clone()]);
        let mut failed = None;
        for execution in history {
            let start = execution.get_object_id("start").unwrap().to_hex();
            let at = |event: Event| ledger.iter().find(|line| line.start == start && line.event == event).map(|line| line.at_ms + by_the_server);
            let due = execution.get_datetime("scheduled_at").unwrap().timestamp_millis();
            let begun = at(Event::Begin).unwrap();
            executions += 1;
            latest = latest.max(begun - due);
            if begun < due - rounded || begun > due + ms(LATE) {
                wrong.push(format!("I7: begun {} ms after it was due: {job}", begun - due));
            }
            if let Some(failed) = failed
                && !(ms(DELAY) - behind..ms(DELAY + LATE)).contains(&(due - failed))
            {
                wrong.push(format!("I7: put off by {} ms: {job}", due - failed));
            }
            failed = at(Event::Failed);
        }
    }
    println!("{executions} executions, {latest} ms after they were due at most");
    wrong
}

#[tokio::test(flavor = "multi_thread")]
async fn the_clock_of_an_enqueuer_makes_no_job_early_or_late() {
    let mut world = World::new().await;
    world.start(Role::Recruiter, RECRUITER, &[]);
    world.start(Role::Cleaner, CLEANER, &[]);
    world.start(Role::Worker, WORKER, &[]);
    let mut row = Row::new("the clock of an enqueuer is off by an hour, and jumps");
    let mut asked = Vec::new();
    for offset in ["+1h", "-1h"] {
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
    }
    let enqueued = asked.iter().map(|(job, ..)| (*job, Policy::Never));
    world.acknowledged.lock().unwrap().extend(enqueued);
    assert!(world.until_quiet(SOON).await, "{}", world.logs());
    let mut wrong = not_in_time(&world).await;
    for (job, asked, delay) in &asked {
        let archived = world.database.raw("archived").find_one(doc! { "_id": *job }).await.unwrap().unwrap();
        let due = archived.get_document("last_execution").unwrap().get_datetime("scheduled_at").unwrap().timestamp_millis();
        let right = match delay {
            -1 => due == *asked,
            // From when it was enqueued, which is after the program had started.
            delay => (*asked - 50..asked + i64::try_from(SOON.as_millis()).unwrap() / 6).contains(&(due - delay)),
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

/// By the clock of this machine, which is the server's and right.
fn now_ms() -> i64 {
    bson::DateTime::now().timestamp_millis()
}

/// Heartbeats jump by an hour, forward and back; so do the starts of leases, the dates of jobs, everything that the server stamps.
#[tokio::test(flavor = "multi_thread")]
async fn a_failover_to_a_member_whose_clock_is_wrong_kills_nobody() {
    let _turn = SETS.acquire().await.unwrap();
    let clock = Clock::offset("+1h");
    let set = ReplicaSet::start_with(&[&[], &[], &clock.environment()]).await;
    set.elect(0).await;
    let mut world = World::on(TestDatabase::on(&set.uri()).await).await;
    let uri = set.uri_for(world.database.name());
    world.start_at(&uri, Role::Recruiter, RECRUITER, &[]);
    world.start_at(&uri, Role::Recruiter, RECRUITER, &[]);
    world.start_at(&uri, Role::Cleaner, &["--dead-after", "6s", "--every", "300ms", "--keep-archived", "1d"], &[]);
    for _ in 0..2 {
        world.start_at(&uri, Role::Worker, &["--heartbeat", "500ms", "--lease", "2s", "--poll", "400ms", "--grace", "5s"], &[]);
    }
    let mut rows = Vec::new();
    for (offset, wrong) in [("+1h", "an hour ahead"), ("-1h", "an hour behind")] {
        clock.step(offset);
        let local_time = async || *set.command(2, doc! { "hello": 1 }).await.unwrap().get_datetime("localTime").unwrap();
        wait_until(SOON, "its clock has jumped", async || (local_time().await.timestamp_millis() - now_ms()).abs() > 3_000_000).await;
        for member in [2, 0] {
            let long: Vec<JobId> = {
                let fresh = Store::connect(&ConnectArgs::to(&uri), "enqueuer").await.unwrap();
                let mut long = Vec::new();
                for _ in 0..4 {
                    let job = Entry { ms: 20_000, failures: 0, deaf: true }.as_job().enqueue(&fresh).await.unwrap();
                    world.acknowledged.lock().unwrap().insert(job, Policy::Never);
                    long.push(job);
                }
                long
            };
            until(&mut world, "they run", async |world| world.count("scheduled", doc! { "_id": { "$in": long.clone() }, "locked": true }).await == 4).await;
            let begin = Instant::now();
            set.elect(member).await;
            // An enqueuer that asks the new primary for its time.
            let fresh = wait_for(SOON, "it can be reached", async || {
                match Store::connect(&ConnectArgs::to(&uri), "enqueuer").await {
                    Ok(s) => Some(s),
                    Err(e) => {
                        println!("XX {member} {e:?}");
                        for m in 0..3 {
                            let s = set.command(m, doc! { "replSetGetStatus": 1 }).await;
                            if let Ok(s) = s {
                                println!("XX {m}: {:?} optimes {:?} ", s.get("myState"), s.get("optimes"));
                                for x in s.get_array("members").unwrap() { let x = x.as_document().unwrap(); println!("XX    {:?} {:?} {:?} sync {:?} {:?}", x.get("name"), x.get("stateStr"), x.get("optime"), x.get("syncSourceHost"), x.get("lastHeartbeatMessage")); }
                            } else { println!("XX {m}: {s:?}"); }
                            let c = set.command(m, doc! { "currentOp": 1, "active": true }).await.unwrap();
                            for op in c.get_array("inprog").unwrap() { let op = op.as_document().unwrap(); println!("XX op {m} {:?} {:?} {:?} wait {:?} {:?} {:?}", op.get("secs_running"), op.get("desc"), op.get("command"), op.get("waitingForLock"), op.get("waitingForLatch"), op.get("appName")); }
                        }
                        println!("XX {}", world.logs());
                        None
                    }
                }
            }).await;
            let job = wait_for(SOON, "it enqueues", async || Entry::lasting(0).enqueue(&fresh).await.ok()).await;
            world.acknowledged.lock().unwrap().insert(job, Policy::Never);
            if !world.until(Duration::from_secs(20), async |world| world.count("archived", doc! { "_id": job }).await == 1).await {
                println!("XX {member} {} {:?} now {}", set.primary().await, world.database.raw("scheduled").find_one(doc!{"_id": job}).await, bson::DateTime::now());
                let mut r = world.database.raw("roster").find(doc!{}).await.unwrap();
                while let Some(d) = r.next().await { println!("XX {d:?}"); }
                for m in 0..3 { println!("XX {:?}", set.command(m, doc! {"hello": 1}).await.unwrap().get("localTime")); }
            }
            rows.push((wrong, begin.elapsed()));
            // For longer than a death takes.
            until_passed(&mut world, Duration::from_secs(7)).await;
            assert!(!world.logs().contains("a worker is dead"), "{}", world.logs());
        }
    }
    assert!(world.until_quiet(SOON).await, "{}", world.logs());
    let mut findings = world.judge().await;
    if findings.deaths > 0 {
        findings.broken.push(format!("I10: {} deaths, and nobody died", findings.deaths));
    }
    println!("{rows:?}: {:?}", findings.all());
    for wrong in ["an hour ahead", "an hour behind"] {
        let mut row = Row::new(format!("failover to a member whose clock is {wrong}, and back"));
        for (_, recovery) in rows.iter().filter(|(row, _)| *row == wrong) {
            row.add(std::mem::take(&mut findings), *recovery);
        }
        row.close();
    }
}
