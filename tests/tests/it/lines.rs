//! Lines: the jobs of one key run one after the other, in the order of enqueueing, also if processes die. A job that fails may halt its line.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use bson::doc;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use recruiter_common::{
    FinishReason, JobId, NewJob, OnConflict, Outcome, Priority, Reason, RetryManyTimes, Unique, Workable as _, WorkerId,
    control::Change,
    limits::Paused,
    shutdown::pause,
    store::{Archival, CommitSession, Ending, Lane, Recorded, Situation, gate_of_line},
};
use recruiter_tests::{
    factory::{read, started},
    ledger::{Entry, monotonic_ms},
    local::prepared,
    oracle::Policy,
    processes::{Setup, System},
    promise,
    wait::SOON,
    world::{Role, World},
};
use serde_json::Value;

use super::limits::{cli, why};

/// Delays, failures that are retried, and killed workers: the order of each line is that of enqueueing, and one job runs at a time.
#[tokio::test(flavor = "multi_thread")]
async fn a_line_keeps_its_order_through_delays_retries_and_kills() {
    let mut world = World::new().await.patient(&["10", "10"]);
    world.start(Role::Recruiter, &[], &[]);
    let policy = RetryManyTimes::new(30, Duration::from_millis(50)).unwrap();
    for number in 0..60_u32 {
        let entry = Entry { ms: 5, failures: u32::from(number % 7 == 0), ..Entry::default() };
        let job =
            entry.as_job().in_line(format!("line-{}", number % 4)).retry(&policy).priority(Priority::new((number % 10) as u8).unwrap());
        let job = if number % 11 == 0 { job.after(Duration::from_millis(300)) } else { job };
        world.enqueue(job, Policy::Again(30)).await.unwrap();
    }
    // The oracle compares the executions with the order of the jobs.
    world.kill_at_random(11, 20, 300..900).await;
    world.close().await;
}

/// Its permit is in use, but `why` says of each of them that it is behind.
#[tokio::test(flavor = "multi_thread")]
async fn the_jobs_of_a_line_are_behind_its_head_while_that_runs() {
    let (database, store) = prepared().await;
    let system = System::start(&database, Setup::default());
    let in_line = |ms: i64| NewJob::of_class("sleep", doc! { "ms": ms }).in_line("a");
    let head = in_line(600_000).enqueue(&store).await.unwrap().id;
    let second = in_line(0).enqueue(&store).await.unwrap().id;
    database.until("roster", doc! { "working_on": head }, 1, "the head runs").await;
    let lane = Lane { gate: Some(gate_of_line("a")), ..Lane::new("generic", "sleep") };
    let situation = Situation::read(&store, std::slice::from_ref(&lane)).await.unwrap();
    assert_eq!(situation.reason_in_lane(&lane), Reason::Behind);
    assert_eq!(store.why(second).await.unwrap().unwrap().reason, Reason::Behind);
    store.control(false).change(&Change::Cancel, &[head]).await.unwrap();
    database.archived(second).await;
    system.stop().await;
}

/// A recruiter knows the jobs of a thousand lines at a time. The others take turns.
#[tokio::test(flavor = "multi_thread")]
async fn of_very_many_lines_each_has_its_turn() {
    let mut world = World::new().await;
    let job = |number: usize| Entry::lasting(0).in_line(format!("line-{number}"));
    let firsts = world.enqueue_many(1_100, Policy::Never, job).await;
    let seconds = world.enqueue_many(50, Policy::Never, |number| job(number * 22)).await;
    let alone = world.enqueue(Entry::lasting(0).priority(Priority::new(6).unwrap()), Policy::Never).await.unwrap();
    world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Worker, &["--concurrency", "20"], &[]);
    assert!(world.until_quiet(SOON).await, "not quiet\n{}", world.logs());
    let place: HashMap<JobId, usize> = world.begun().into_iter().enumerate().map(|(at, job)| (job, at)).collect();
    assert!(seconds.iter().enumerate().all(|(number, second)| place[&firsts[number * 22]] < place[second]));
    assert!(firsts.iter().filter(|job| place[*job] < place[&alone]).count() < 250, "a job without a line is known at once");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_in_a_line_says_what_it_is_behind_and_others_pass() {
    let world = World::new().await.patient(&["5"]);
    let head = world.enqueue(Entry::lasting(0).in_line("invoice").after(Duration::from_secs(3_600)), Policy::Never).await.unwrap();
    let second = world.enqueue(Entry::lasting(0).in_line("invoice").priority(Priority::new(9).unwrap()), Policy::Never).await.unwrap();
    let other = world.enqueue(Entry::lasting(0).in_line("order"), Policy::Never).await.unwrap();
    world.wait_for("another line goes on", async || world.archived(other).await.is_some()).await;
    let said = why(&world, second).await;
    assert!(said["reason"] == "behind" && said["text"].as_str().unwrap().contains(&head.to_string()), "{said}");
    assert!(world.archived(second).await.is_none());
    assert!(cli(&world.database, &["jobs", "cancel", &head.to_string()]).0 == 0);
    world.wait_for("the second is the head", async || world.archived(second).await.is_some()).await;
    let problem = Entry::lasting(0).in_line("a").limit("b").enqueue(&world.store).await.unwrap_err();
    assert!(problem.to_string().contains("cannot name resources as well"), "{problem}");
    let (code, _, err) = cli(&world.database, &["enqueue", "--class", "entry", "--line", "a,b"]);
    assert!(code == 2 && err.contains("must not contain"), "{code:?} {err}");
    let mut without_date = recruiter_tests::factory::minimal_job("entry");
    without_date.extend(doc! { "gate": ">invoice" });
    assert!(world.database.raw("scheduled").insert_one(without_date).await.is_err(), "a job in a line has a place");
    world.close().await;
}

/// A job that fails in each of its attempts.
fn failing() -> Entry {
    Entry { ms: 5, failures: 99, ..Entry::default() }
}

async fn halts(world: &World) -> Vec<Paused> {
    world.store.pauses_of_lines(100).await.unwrap().into_iter().map(|(paused, _)| paused).collect()
}

/// Failures and deaths halt a line at once and once each, also if processes are killed: no later job enters before the line is resumed.
#[tokio::test(flavor = "multi_thread")]
async fn a_failed_job_halts_its_line_until_it_is_resumed_whoever_dies() {
    let mut world = World::new().await.patient(&["10", "10"]);
    world.start(Role::Recruiter, &[], &[]);
    let mut lines: Vec<Vec<JobId>> = vec![Vec::new(); 4];
    for number in 0..48_usize {
        let line = number % lines.len();
        let entry = if number % 7 == 3 { failing() } else { Entry { ms: 5, ..Entry::default() } };
        let job = entry.as_job().in_line(format!("line-{line}")).halt_on_failure();
        lines[line].push(world.enqueue(job, Policy::Never).await.unwrap());
    }
    let (mut random, mut resumed) = (StdRng::seed_from_u64(5), vec![Vec::new(); lines.len()]);
    let end = Instant::now() + SOON * 2;
    let (mut next_kill, mut kills) = (Instant::now(), 0);
    while world.unfinished().await > 0 || !halts(&world).await.is_empty() {
        assert!(Instant::now() < end, "not finished\n{}", world.logs());
        world.tend();
        pause(Duration::from_millis(150)).await;
        for halt in halts(&world).await {
            let Paused::Line(key) = &halt else { panic!("{halt}") };
            let line: usize = key.trim_start_matches("line-").parse().unwrap();
            resumed[line].push(monotonic_ms());
            assert!(world.store.pauses().resume(&halt).await.unwrap());
        }
        if kills < 20 && Instant::now() >= next_kill {
            kills += 1;
            world.members[random.random_range(0..world.members.len())].process.kill();
            next_kill = Instant::now() + Duration::from_millis(random.random_range(400..1_200));
        }
    }
    let ledger = world.ledger();
    for (line, resumed) in lines.iter().zip(&resumed) {
        let mut failed = 0;
        for (place, job) in line.iter().enumerate() {
            if world.archived(*job).await.unwrap().get_bool("done").unwrap() {
                continue;
            }
            failed += 1;
            let of = |job: &JobId| ledger.iter().filter(|event| event.execution().0 == *job).map(|event| event.at_ms).collect::<Vec<_>>();
            let ended = of(job).into_iter().max().unwrap_or(0);
            let next = line[place + 1..].iter().flat_map(of).min();
            let is_after_resumption = |next: i64| resumed.iter().any(|at| (ended..=next).contains(at));
            assert!(next.is_none_or(is_after_resumption), "place {place}: ended {ended}, next {next:?}, resumed {resumed:?}");
        }
        assert_eq!(resumed.len(), failed, "each failure halts the line once");
    }
    world.close().await;
}

/// The pause is a part of the transaction that archives, also of the caller's own one.
#[tokio::test]
async fn the_halt_and_the_end_of_the_job_are_one_transaction() {
    let (_database, store) = prepared().await;
    store.prepare_limited_jobs().await.unwrap();
    let mut ids = Vec::new();
    for _ in 0..2 {
        ids.push(failing().as_job().in_line("a").halt_on_failure().enqueue(&store).await.unwrap().id);
    }
    let (job, claim) = started(&store, WorkerId::new(), &ids[..1]).await.remove(0);
    let execution = job.last_execution.clone().unwrap();
    let end = |why: &FinishReason| Archival::ended(&job, claim, Ending::new(execution.clone(), why.clone()));
    let gate = gate_of_line("a");
    let head = async || {
        let head = store.heads_of_lines(&[&gate]).await.unwrap().remove(&gate).unwrap();
        (head.job.id, head.is_locked, head.halt.is_some())
    };
    // This makes the index, which must not wait for the transaction.
    assert_eq!(head().await, (ids[0], true, false));
    let mut session = store.start_session().await.unwrap();
    session.start_transaction().await.unwrap();
    assert_eq!(store.finish_in(&mut session, &end(&FinishReason::GAVE_UP)).await.unwrap(), Recorded::Yes);
    assert_eq!(head().await, (ids[0], true, false), "not committed");
    session.abort_transaction().await.unwrap();
    assert_eq!(head().await, (ids[0], true, false));
    let mut session = CommitSession::default();
    assert_eq!(store.finish(&mut session, &[end(&FinishReason::GAVE_UP)]).await.unwrap(), [Recorded::Yes]);
    assert_eq!(head().await, (ids[1], false, true));
    assert!(store.pauses().resume(&Paused::Line("a".into())).await.unwrap());
    assert_eq!(store.finish(&mut session, &[end(&FinishReason::GAVE_UP)]).await.unwrap(), [Recorded::Yes], "repeated");
    assert_eq!(head().await, (ids[1], false, false), "it halts the line once");
    let cancelled = Archival::unstarted(
        ids[1],
        &read(&store, &ids[1..]).await[0].document,
        &FinishReason::CANCELLED,
        &recruiter_common::failure::Failure::new("cancelled", ""),
        store.now(),
    );
    assert_eq!(store.finish(&mut session, &[cancelled]).await.unwrap(), [Recorded::Yes]);
    assert!(store.pauses_of_lines(9).await.unwrap().is_empty(), "a cancellation is no failure");
}

/// The command line: a job says that its line is halted; the failed job is retried in its place, and then the line is resumed.
#[tokio::test(flavor = "multi_thread")]
async fn a_failed_job_is_retried_in_its_place_before_its_line_goes_on() {
    let world = World::new().await.patient(&["5"]);
    let said = cli(
        &world.database,
        &["enqueue", "--class", "entry", "--parameters", r#"{"failures": 1}"#, "--line", "a", "--halt-on-failure", "--json"],
    );
    let enqueued: Value = serde_json::from_str(&said.1).unwrap_or_else(|_| panic!("{said:?}"));
    let first: JobId = enqueued["id"].as_str().unwrap().parse().unwrap();
    world.asked.will_send(first, Policy::Never);
    let second = world.enqueue(Entry::lasting(0).in_line("a"), Policy::Never).await.unwrap();
    world.wait_for("the first fails", async || world.archived(first).await.is_some()).await;
    let said = why(&world, second).await;
    let text = said["text"].as_str().unwrap();
    assert!(said["reason"] == "paused" && text.contains(&first.to_string()) && text.contains("recruiter resume line:a"), "{said}");
    let listed = cli(&world.database, &["pauses", "--json"]).1;
    assert!(listed.contains(r#""name":"line:a""#), "{listed}");
    assert!(cli(&world.database, &["pauses"]).1.contains("line:a: paused by halt_on_failure"));
    world.later_job(Entry::lasting(0)).await;
    promise!(world.archived(second).await.is_none(), "the line is halted");
    let (code, out, err) = cli(&world.database, &["jobs", "retry", &first.to_string()]);
    assert_eq!(code, 0, "{out}{err}");
    let again: JobId = world.archived(first).await.unwrap().get_object_id("retried_as").unwrap().into();
    world.asked.will_send(again, Policy::Never);
    assert_eq!(why(&world, second).await["reason"], "behind");
    assert!(cli(&world.database, &["resume", "line:a"]).1.contains("resumed"));
    world.wait_for("it fails again", async || world.archived(again).await.is_some()).await;
    world.later_job(Entry::lasting(0)).await;
    promise!(world.archived(second).await.is_none(), "halted again");
    assert!(cli(&world.database, &["resume", "line:a"]).1.contains("resumed"));
    world.wait_for("the line goes on", async || world.archived(second).await.is_some()).await;
    let (code, _, err) = cli(&world.database, &["enqueue", "--class", "entry", "--halt-on-failure"]);
    assert!(code == 2 && err.contains("--line"), "{err}");
    let problem = Entry::lasting(0).halt_on_failure().enqueue(&world.store).await.unwrap_err();
    assert!(problem.to_string().contains("only a job in a line"), "{problem}");
    world.close().await;
}

/// A unique key and a line do not disturb each other: a duplicate takes no place, and a replacement keeps its place.
#[tokio::test(flavor = "multi_thread")]
async fn unique_jobs_can_be_in_a_line() {
    let world = World::new().await;
    let unique = |job: NewJob| job.in_line("a").unique(Unique::by_key("k").while_waiting().on_conflict(OnConflict::Replace));
    let first = world.enqueue(Entry::lasting(300).in_line("a"), Policy::Never).await.unwrap();
    let second = unique(Entry::lasting(5_000)).enqueue(&world.store).await.unwrap();
    world.asked.will_send(second.id, Policy::Never);
    let third = world.enqueue(Entry::lasting(0).in_line("a"), Policy::Never).await.unwrap();
    let again = unique(Entry::lasting(1)).enqueue(&world.store).await.unwrap();
    assert_eq!((again.id, again.outcome), (second.id, Outcome::Replaced));
    let world = world.patient(&["5"]);
    world.wait_for("all are done", async || world.unfinished().await == 0).await;
    promise!(world.begun() == [first, second.id, third], "out of order: {:?}", world.begun());
    world.close().await;
}
