//! Poison: jobs that end their process, take all its memory, fill its stack, hold its threads, or print without end. Each ends in
//! the archive, for a reason and after as many attempts as its policy allows; the jobs beside it are done.

use std::{
    fs,
    time::{Duration, Instant},
};

use bson::{Bson, Document, doc};
use recruiter_common::{JobId, NewJob, RetriableExceptionFilter, RetryManyTimes, Workable};
use recruiter_tests::{
    factory::again,
    ledger::{BlockingPoison, Entry, Harm, Longer, Poison},
    oracle::{Findings, Policy, number},
    processes::Process,
    report::Row,
    world::{Role, World},
};

use crate::{SOON, close, end_of, excuse, tended, until_available, wait, world, world_with};

/// How often innocent jobs may be done again: more often than anything here kills a worker.
const AGAIN: u32 = 20;

/// Jobs that work beside the poison, and may be done again.
async fn innocents(world: &World) -> Vec<JobId> {
    let mut innocents = Vec::new();
    for ms in [0, 50, 300, 800] {
        for _ in 0..4 {
            innocents.push(world.enqueue(Entry::lasting(ms).retry(&again(AGAIN)), Policy::Again(AGAIN)).await.unwrap());
        }
    }
    innocents
}

/// Each is done, and was done again at most as often as the poison struck.
async fn unharmed(world: &World, innocents: &[JobId], strikes: i64) {
    for id in innocents {
        let (why, starts, classes) = end_of(world, *id).await;
        assert_eq!(why, "done", "{id}: {classes:?}");
        assert!(starts <= strikes + 1, "more often than the poison struck: {id}: {classes:?}");
    }
}

#[tokio::test]
async fn a_job_that_kills_its_process_ends_by_its_policy_and_those_beside_it_are_done() {
    let harms = [
        ("jobs that abort the process", Poison::new(Harm::Abort).as_job(), Poison::new(Harm::Abort).as_job(), &[][..]),
        ("jobs that overflow the stack", Poison::new(Harm::Overflow).as_job(), BlockingPoison(Poison::new(Harm::Overflow)).as_job(), &[]),
        (
            "jobs that exhaust the memory",
            Poison::new(Harm::Exhaust).as_job(),
            BlockingPoison(Poison::new(Harm::Exhaust)).as_job(),
            &["prlimit", "--as=768000000"],
        ),
    ];
    let rows = futures_util::future::join_all(harms.map(async |(fault, poison, threaded, by)| {
        let mut row = Row::new(fault);
        let (findings, recovery) = killed(poison, threaded, by).await;
        row.add(findings, recovery);
        row.injected = 4;
        row
    }));
    rows.await.into_iter().for_each(Row::close);
}

async fn killed(poison: NewJob, threaded: NewJob, by: &[&str]) -> (Findings, Duration) {
    let mut world = world().await;
    world.start_by(by, Role::Worker, &[]);
    let begin = Instant::now();
    let innocents = innocents(&world).await;
    let thrice = world.enqueue(poison.retry(&again(2)), Policy::Again(2)).await.unwrap();
    let once = world.enqueue(threaded, Policy::Never).await.unwrap();
    tended(&mut world, "all is done", async |world| world.unfinished().await == 0).await;
    let recovery = begin.elapsed();
    assert_eq!(end_of(&world, thrice).await, ("worker-died".into(), 3, vec!["worker-died".into(); 3]));
    assert_eq!(end_of(&world, once).await, ("worker-died".into(), 1, vec!["worker-died".into()]));
    let job = world.archived(thrice).await.unwrap();
    assert_eq!(number(&job, "deaths"), 3, "{job}");
    let execution = job.get_document("last_execution").unwrap();
    assert!(execution.get_bool("crashed").unwrap(), "{execution}");
    assert!(execution.get_str("message").unwrap().contains("died while it ran the job"), "{execution}");
    unharmed(&world, &innocents, 4).await;
    (world.judge().await, recovery)
}

/// A worker stops at its own memory limit, with any limit of the machine. A job that takes it there every time has no better claim to
/// be done again than one that kills it.
#[tokio::test]
async fn a_job_that_always_takes_its_worker_to_the_memory_limit_ends_by_its_policy() {
    let mut world = world().await;
    world.start(Role::Worker, &["--memory-limit", "150MiB"], &[]);
    let begin = Instant::now();
    let innocents = innocents(&world).await;
    let leak = BlockingPoison(Poison::new(Harm::Leak(100_000)));
    let thrice = world.enqueue(leak.as_job().retry(&again(2)), Policy::Again(2)).await.unwrap();
    let once = world.enqueue(leak.as_job(), Policy::Never).await.unwrap();
    tended(&mut world, "all is done", async |world| world.unfinished().await == 0).await;
    let recovery = begin.elapsed();
    let limit = || "memory-limit".to_owned();
    assert_eq!(end_of(&world, thrice).await, ("tried-too-many-times".into(), 3, vec![limit(); 3]));
    assert_eq!(end_of(&world, once).await, ("not-scheduled-by-retry-policy".into(), 1, vec![limit()]));
    assert!(world.ended.lock().unwrap().iter().all(|ended| ended.status.code() == Some(75)), "{}", world.logs());
    unharmed(&world, &innocents, 4).await;
    close(world, "jobs that leak memory up to the worker's memory limit", 4, recovery).await;
}

/// With all threads of its runtime held a worker cannot send heartbeats: it is declared dead, and its outcomes are refused when its threads
/// are free again.
#[tokio::test]
async fn a_job_that_holds_the_runtime_ends_by_its_policy_and_those_beside_it_are_done() {
    let (for_a_while, for_good) = tokio::join!(held_for_a_while(), held_for_good());
    let mut row = Row::new("jobs that block the threads of their worker");
    [for_a_while, for_good].into_iter().for_each(|(findings, recovery)| row.add(findings, recovery));
    row.close();
}

const ONE_THREAD: [&str; 2] = ["env", "TOKIO_WORKER_THREADS=1"];

/// How many workers were declared dead: on a busy machine also one whose threads were free.
fn deaths(world: &World) -> i64 {
    world.logs().matches("a worker is dead").count() as i64
}

async fn held_for_a_while() -> (Findings, Duration) {
    // Its threads must be held for longer than a death takes, and that depends on the machine.
    for ms in [4_000, 12_000, 36_000] {
        if let Some(held) = held_for(ms).await {
            return held;
        }
    }
    panic!("a worker whose threads are held for half a minute is not declared dead")
}

async fn held_for(ms: i64) -> Option<(Findings, Duration)> {
    let mut world = world_with("2500ms").await;
    world.start_by(&ONE_THREAD, Role::Worker, &[]);
    world.start_by(&ONE_THREAD, Role::Worker, &[]);
    let begin = Instant::now();
    let innocents = innocents(&world).await;
    let spin = Poison::new(Harm::Spin(ms)).as_job();
    let thrice = world.enqueue(spin.retry(&again(2)), Policy::Again(2)).await.unwrap();
    tended(&mut world, "all is done", async |world| world.unfinished().await == 0).await;
    let recovery = begin.elapsed();
    let end = end_of(&world, thrice).await;
    if end.0 == "done" {
        excuse(world).await;
        return None;
    }
    assert_eq!(end, ("worker-died".into(), 3, vec!["worker-died".into(); 3]));
    unharmed(&world, &innocents, deaths(&world)).await;
    Some((world.judge().await, recovery))
}

/// A process that hangs for ever is killed by the service manager, or by a person.
async fn held_for_good() -> (Findings, Duration) {
    let mut world = world_with("2500ms").await;
    let workers = [world.start_by(&ONE_THREAD, Role::Worker, &[]), world.start_by(&ONE_THREAD, Role::Worker, &[])];
    let begin = Instant::now();
    let once = world.enqueue(Poison::new(Harm::Spin(i64::MAX)).as_job(), Policy::Never).await.unwrap();
    let innocents = innocents(&world).await;
    tended(&mut world, "all is done", async |world| world.unfinished().await == 0).await;
    let recovery = begin.elapsed();
    assert_eq!(end_of(&world, once).await, ("worker-died".into(), 1, vec!["worker-died".into()]));
    unharmed(&world, &innocents, deaths(&world)).await;
    let hangs = world.ledger().into_iter().find(|line| line.execution().0 == once).unwrap().worker;
    let hangs = workers.into_iter().find(|worker| world.members[*worker].process.pid() == hangs).unwrap();
    world.members[hangs].process.kill();
    (world.judge().await, recovery)
}

/// Most memory that a process has ever had, in bytes.
fn peak(process: &Process) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", process.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}

/// How much a worker may grow: by what it keeps of each output, and not by one whole output. How much it has without any is up to the
/// build, whose mapped pages count too.
const GROWTH: u64 = 80 * 1024 * 1024;

fn size(document: &Document) -> usize {
    bson::serialize_to_vec(document).unwrap().len()
}

#[tokio::test]
async fn a_job_that_prints_a_hundred_megabytes_takes_neither_memory_nor_database() {
    let mut world = world().await;
    let rust = world.start_by(&["sh", "-c", "exec \"$@\" >/dev/null 2>&1", "sh"], Role::Worker, &[]);
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("workables.toml");
    let print = r"head -c 100000000 /dev/zero | tr '\0' x";
    let program = |class: &str, script: String| format!("[workables.{class}]\ncommand = [\"sh\", \"-c\", '''{script}''']\n");
    let programs = [
        program("out", print.to_owned()),
        program("error", format!("{{{{ {print}; }}}} >&2; exit 3")),
        program("both", format!("{{{{ {print}; }}}} >&2 & {print}; wait")),
        program("lines", "yes a line of it | head -c 100000000 >&2; exit 4".to_owned()),
    ];
    fs::write(&config, programs.concat()).unwrap();
    let mut stock = Process::on(&world.database, "recruiter-worker", &["--config", config.to_str().unwrap()]);
    let begin = Instant::now();
    let innocents = innocents(&world).await;
    until_available(&world, 2).await;
    let idle = [&world.members[rust].process, &stock].map(peak);
    let print = Poison::new(Harm::Print(100));
    let printed = [
        world.enqueue(print.as_job(), Policy::Never).await.unwrap(),
        world.enqueue(BlockingPoison(print).as_job(), Policy::Never).await.unwrap(),
    ];
    let mut programs = Vec::new();
    for class in ["out", "error", "both", "lines"] {
        programs.push(NewJob::of_class(class, doc! {}).enqueue(&world.store).await.unwrap().id);
    }
    wait(&world, "the programs have ended", async || world.count("archived", doc! { "_id": { "$in": programs.clone() } }).await == 4).await;
    wait(&world, "all is done", async || world.unfinished().await == 0).await;
    let recovery = begin.elapsed();
    for id in printed {
        assert_eq!(end_of(&world, id).await, ("done".into(), 1, vec!["none".into()]));
        assert!(size(&world.archived(id).await.unwrap()) < 2_000);
    }
    let ends = ["none", "exit:3", "none", "exit:4"];
    for (id, end) in programs.iter().zip(ends) {
        let job = world.archived(*id).await.unwrap();
        assert_eq!(end_of(&world, *id).await.2, [end]);
        let result = job.get("result").and_then(Bson::as_str);
        assert_eq!(result.is_some_and(|result| result.ends_with("… [cut after 1048576 bytes]")), end == "none");
        // A failure stands in the history and as the last execution, each time with its trace.
        let most = if end == "none" { 1_060_000 } else { 32_000 };
        assert!(size(&job) < most, "{} bytes", size(&job));
    }
    unharmed(&world, &innocents, 0).await;
    for (worker, idle) in [&world.members[rust].process, &stock].into_iter().zip(idle) {
        assert!(peak(worker) < idle + GROWTH, "{} bytes, {idle} of them without a job", peak(worker));
    }
    stock.stop().await;
    close(world, "jobs that print 100 MB", 6, recovery).await;
}

/// Deaths and failures are distinguished: in the history, in the output, and for policies that select by class.
#[tokio::test]
async fn a_death_is_no_failure() {
    let mut world = world().await;
    let worker = world.start(Role::Worker, &[], &[]);
    let first = Entry { ms: 600_000, failures: 2, ..Entry::default() };
    let both = world.enqueue(Longer { first, again_ms: 0 }.as_job().retry(&again(5)), Policy::Again(5)).await.unwrap();
    wait(&world, "it is running", async || !world.ledger().is_empty()).await;
    world.members[worker].process.kill();
    let begin = Instant::now();
    tended(&mut world, "it is done", async |world| world.unfinished().await == 0).await;
    // Failures of this class only are retried, and a death is none.
    let only = RetriableExceptionFilter::new(RetryManyTimes::new(5, Duration::ZERO).unwrap(), ["not-yet"]).unwrap();
    let picky = world.enqueue(Poison::new(Harm::Abort).as_job().retry(&only), Policy::Again(5)).await.unwrap();
    tended(&mut world, "all is done", async |world| world.unfinished().await == 0).await;
    let recovery = begin.elapsed();
    assert_eq!(end_of(&world, picky).await, ("worker-died".into(), 1, vec!["worker-died".into()]));
    let classes = ["worker-died", "not-yet", "none"].map(str::to_owned);
    assert_eq!(end_of(&world, both).await, ("done".into(), 3, classes.into()));
    let mut show = Process::on(&world.database, "recruiter", &["jobs", "show", &both.to_string()]);
    assert!(show.wait_exit(SOON).await.success());
    wait(&world, "it is shown", async || show.stdout().contains(": succeeded")).await;
    let shown = show.stdout();
    assert_eq!((shown.matches(": its worker died").count(), shown.matches(": failed").count()), (1, 1), "{shown}");
    assert!(shown.contains("starts       3; 1 ended with the death of the worker\n"), "{shown}");
    assert_eq!(number(&world.archived(both).await.unwrap(), "deaths"), 1);
    close(world, "jobs that fail, and whose worker dies", 2, recovery).await;
}
