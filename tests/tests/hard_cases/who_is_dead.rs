//! Life and death: who only looks dead, asleep, far away, long at work or with another's pid, and is not; and who looks alive and is not.

use std::{
    collections::BTreeSet,
    fs,
    process::{Child, Command},
    sync::Mutex,
    time::{Duration, Instant},
};

use bson::{Document, doc};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use procfs::process::Process as Proc;
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom};
use recruiter_common::{
    DoNotDoItAgain, JobId, NewJob, RetryManyTimes, Workable,
    job::StoredPolicy,
    retry_policy::{Parameters, RetryPolicies},
    shutdown::pause,
    store::{ProcessIdentity, Registration},
};
use recruiter_tests::{
    factory::{self, again},
    full_length,
    ledger::{BlockingPoison, Entry, Harm, Poison},
    local::{self, Local},
    mongo::{TestDatabase, own_mongod},
    oracle::Policy,
    processes::{Process, can_run},
    report::Row,
    wait::wait_until,
    world::{Role, World},
};
use recruiter_worker::Worker;

use crate::{PATIENT, SOON, close, end_of, roster, until_available, wait};

/// Every process of a host stands still for longer than a death takes and goes on, all in any order; in every other round the
/// MongoDB as well.
#[tokio::test]
async fn when_a_host_wakes_up_no_living_worker_is_declared_dead() {
    let seed = rand::random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut mongo = own_mongod().await;
    let mut world = World::on(TestDatabase::on(&mongo.uri()).await).await;
    world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Cleaner, &["--dead-after", "12s"], &[]);
    world.start(Role::Cleaner, &["--dead-after", "12s"], &[]);
    for _ in 0..3 {
        world.start(Role::Worker, &[], &[]);
    }
    until_available(&world, 3).await;
    let ids = async |world: &World| roster(world).await.iter().map(|worker| worker.get_object_id("_id").unwrap()).collect::<BTreeSet<_>>();
    let before = ids(&world).await;
    let mut order: Vec<usize> = (0..world.members.len()).collect();
    let mut recovery = Duration::ZERO;
    let nights = if full_length() { 6 } else { 2 };
    for night in 0..nights {
        for _ in 0..6 {
            world.enqueue(Entry::lasting(random.random_range(0..6_000)), Policy::Never).await.unwrap();
        }
        pause(Duration::from_millis(random.random_range(0..500))).await;
        order.shuffle(&mut random);
        order.iter().for_each(|member| world.members[*member].process.pause());
        if night % 2 == 1 {
            mongo.pause().unwrap();
        }
        pause(Duration::from_millis(13_500)).await;
        if night % 2 == 1 {
            mongo.resume().unwrap();
        }
        order.shuffle(&mut random);
        for member in &order {
            world.members[*member].process.resume();
            pause(Duration::from_millis(random.random_range(0..20))).await;
        }
        let awake = Instant::now();
        wait(&world, "all is done", async || world.unfinished().await == 0).await;
        recovery = recovery.max(awake.elapsed());
        assert_eq!(ids(&world).await, before, "night {night}\n{}", world.logs());
    }
    let mut row = Row::new("a host is suspended and resumes");
    row.add(world.judge().await, recovery);
    row.injected = nights;
    assert_eq!(row.findings.deaths, 0, "{}", world.logs());
    assert!(!world.logs().contains("a worker is dead"), "{}", world.logs());
    row.close();
}

/// As a container does: a pid namespace of its own, in which it is process 1, and the hostname of the machine. The user namespace
/// is what makes that possible without root; see user.max_user_namespaces in sysctl where it is not.
const CONTAINER: [&str; 7] = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"];

/// The process in a container, by its id out here.
fn inside(container: &Process) -> Pid {
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", container.pid())).unwrap_or_default();
    Pid::from_raw(children.split_whitespace().next().expect("a process is in the container").parse().unwrap())
}

async fn stop(container: &mut Process) {
    kill(inside(container), Signal::SIGTERM).unwrap();
    assert!(container.wait_exit(SOON).await.success());
}

/// Three workers of one hostname, two of them process 1 of containers of their own, another one out here; a cleaner out here that
/// finds something else at process 1, and one in a container that finds no process.
#[tokio::test]
async fn no_worker_is_gone_for_a_cleaner_that_cannot_see_its_process() {
    if !can_run(&[&CONTAINER[..], &["true"]].concat()) {
        return;
    }
    let mut world = World::new().await;
    world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Cleaner, &["--dead-after", "8s"], &[]);
    let mut cleaner = world.beside(&CONTAINER, Role::Cleaner, &["--dead-after", "8s"]);
    let mut containers = [(); 2].map(|()| world.beside(&CONTAINER, Role::Worker, &[]));
    let worker = world.start(Role::Worker, &[], &[]);
    until_available(&world, 3).await;
    let workers = roster(&world).await;
    let different = |field: &str| workers.iter().map(|worker| worker.get(field).unwrap().to_string()).collect::<BTreeSet<_>>().len();
    assert_eq!((different("hostname"), different("pid_namespace"), different("pid")), (1, 3, 2), "{workers:?}");
    let long = RetryManyTimes::new(9, Duration::ZERO).unwrap();
    // Many times as long as a process may be gone before it is noticed.
    for _ in 0..9 {
        world.enqueue(Entry::lasting(1_500), Policy::Never).await.unwrap();
    }
    wait(&world, "all is done", async || world.unfinished().await == 0).await;
    assert_eq!(roster(&world).await.iter().map(|worker| worker.get_object_id("_id").unwrap()).collect::<BTreeSet<_>>().len(), 3);
    assert!(!(world.logs() + cleaner.stderr().as_str()).contains("a worker is dead"), "{}", world.logs());

    // Who really dies in a container is found by its silence; the other one, with the same hostname and the same pid, lives on.
    world.members[worker].process.terminate();
    world.members[worker].process.wait_exit(SOON).await;
    for _ in 0..6 {
        world.enqueue(Entry::lasting(300).retry(&long), Policy::Again(9)).await.unwrap();
        world.enqueue(Entry::lasting(5_000), Policy::Never).await.unwrap();
    }
    wait(&world, "they are running", async || world.started().await >= 6).await;
    kill(inside(&containers[0]), Signal::SIGKILL).unwrap();
    let killed = Instant::now();
    wait(&world, "all is done", async || world.unfinished().await == 0).await;
    // Perhaps it had no job, or has ended all of its jobs before.
    wait(&world, "the dead one has left", async || roster(&world).await.len() == 1).await;
    let recovery = killed.elapsed();
    // Both cleaners may have seen it, and one of them retires it.
    let said = world.logs() + cleaner.stderr().as_str();
    let dead: Vec<&str> = said.lines().filter_map(|line| line.split_once("a worker is dead: retiring it ")).map(|(_, who)| who).collect();
    assert!(dead.len() == 1 && dead[0].ends_with("its heartbeat did not change\""), "{dead:?}\n{said}");
    stop(&mut containers[1]).await;
    stop(&mut cleaner).await;
    close(world, "containers that share a hostname", 1, recovery).await;
}

/// The same by what the documents say: the hostname is no identity, and half of one is none.
#[tokio::test]
async fn a_place_that_is_elsewhere_or_unknown_is_never_gone() {
    let mut world = World::new().await;
    world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Cleaner, &["--dead-after", PATIENT], &[]);
    let nobody = i32::MAX;
    let places = [
        doc! { "$set": { "pid_namespace": "pid:[1]", "pid": nobody } },
        doc! { "$set": { "boot_id": "another machine's", "pid": nobody } },
        doc! { "$set": { "pid_namespace": "", "pid": nobody } },
        doc! { "$set": { "boot_id": "", "pid": nobody } },
        doc! { "$set": { "pid": nobody }, "$unset": { "process_start_ticks": "" } },
        doc! { "$set": { "pid": 0 } },
    ];
    for _ in &places {
        world.start(Role::Worker, &["--concurrency", "1"], &[]);
    }
    until_available(&world, places.len() as u64).await;
    let before = roster(&world).await;
    for _ in 0..places.len() {
        world.enqueue(Entry::lasting(2_500), Policy::Never).await.unwrap();
    }
    for (worker, place) in before.iter().zip(&places) {
        world.database.raw("roster").update_one(doc! { "_id": worker.get_object_id("_id").unwrap() }, place.clone()).await.unwrap();
    }
    let begin = Instant::now();
    wait(&world, "all is done", async || world.unfinished().await == 0).await;
    let recovery = begin.elapsed();
    assert!(!world.logs().contains("a worker is dead"), "{}", world.logs());
    assert_eq!(roster(&world).await.len(), places.len());
    close(world, "workers whose process no cleaner can inspect", places.len(), recovery).await;
}

/// A process that does nothing, and is killed when dropped.
struct Idle(Child);

impl Idle {
    fn start() -> Self {
        Self(Command::new("sleep").arg("600").spawn().unwrap())
    }

    fn identity(&self) -> ProcessIdentity {
        let pid = i32::try_from(self.0.id()).unwrap();
        let ticks = Proc::new(pid).and_then(|process| process.stat()).unwrap().starttime;
        ProcessIdentity { pid, process_start_ticks: ticks.try_into().unwrap(), ..ProcessIdentity::of_this_process().unwrap() }
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A worker of which there is only a document, with two jobs that it has started.
async fn phantom(world: &World, identity: ProcessIdentity) -> [JobId; 2] {
    let announcement = Registration { process: identity, ..factory::announcement(2) };
    world.store.register(&announcement).await.unwrap();
    let never = world.enqueue(Entry::lasting(0).in_group("phantoms"), Policy::Never).await.unwrap();
    let again = world.enqueue(Entry::lasting(0).in_group("phantoms").retry(&again(1)), Policy::Again(1)).await.unwrap();
    world.store.heartbeat(announcement.id, &[never, again], 0).await.unwrap();
    assert_eq!(factory::started(&world.store, announcement.id, &[never, again]).await.len(), 2);
    [never, again]
}

/// I10: a pid that belongs to another process by now proves a death, the same process a life, however long it is silent.
#[tokio::test]
async fn a_pid_is_a_worker_only_together_with_its_start() {
    let mut world = World::new().await;
    world.start(Role::Cleaner, &["--dead-after", PATIENT], &[]);
    let mut idle = Idle::start();
    let identity = idle.identity();
    let alive = phantom(&world, identity.clone()).await;
    let another = ProcessIdentity { process_start_ticks: identity.process_start_ticks - 1, ..identity };
    let (begin, mut ended) = (Instant::now(), Vec::new());
    // The polls that find these see the first one too.
    for _ in 0..3 {
        let reused = phantom(&world, another.clone()).await;
        wait(&world, "it is gone", async || end_seen(&world, reused).await).await;
        ended.push(reused);
    }
    let reuse = begin.elapsed() / 3;
    assert_eq!(world.count("scheduled", doc! { "_id": { "$in": alive.to_vec() }, "locked": true }).await, 2, "{}", world.logs());
    wait(&world, "only the dead have left the roster", async || roster(&world).await.len() == 1).await;
    idle.0.kill().unwrap();
    wait(&world, "it is gone, though its parent has not waited for it", async || end_seen(&world, alive).await).await;
    ended.push(alive);
    for [never, _] in ended {
        // A phantom's policy, as the factory stores it, wants nothing again.
        assert_eq!(end_of(&world, never).await, ("worker-died".into(), 1, vec!["worker-died".into()]));
    }
    close(world, "a pid that belongs to another process", 4, reuse).await;
}

async fn end_seen(world: &World, jobs: [JobId; 2]) -> bool {
    world.count("archived", doc! { "_id": { "$in": jobs.to_vec() } }).await == 2
}

/// I5: jobs that take longer than a death, one on the runtime and one on a thread of its own.
#[tokio::test]
async fn a_long_job_of_a_healthy_worker_is_left_alone() {
    let mut world = World::new().await;
    world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Cleaner, &["--dead-after", "5s"], &[]);
    world.start(Role::Worker, &["--lease", "3s"], &[]);
    let long = if full_length() { 30_000 } else { 11_000 };
    let jobs = [
        world.enqueue(Entry::lasting(long), Policy::Never).await.unwrap(),
        world.enqueue(Entry::lasting(long).retry(&again(3)), Policy::Again(3)).await.unwrap(),
        world.enqueue(BlockingPoison(Poison::new(Harm::Spin(long))).as_job(), Policy::Never).await.unwrap(),
    ];
    wait(&world, "all is done", async || world.unfinished().await == 0).await;
    for id in jobs {
        assert_eq!(end_of(&world, id).await, ("done".into(), 1, vec!["none".into()]));
    }
    assert!(!world.logs().contains("a worker is dead"), "{}", world.logs());
    close(world, "jobs that run longer than --dead-after", jobs.len(), Duration::ZERO).await;
}

/// A worker whose main loop hangs runs no job to its end: it sends no heartbeats, although that task goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_worker_whose_main_loop_hangs_is_taken_for_dead() {
    let (database, store) = local::prepared().await;
    let cleaner = Process::on(&database, "recruiter-cleaner", &["--dead-after", "3s", "--every", "500ms"]);
    let recruiter = Local::recruiter(&database, &[]);
    let (let_go, hangs) = std::sync::mpsc::channel::<()>();
    let hangs = Mutex::new(hangs);
    // Policies are decoded in the main loop.
    let decode = move |_: &Parameters<'_>, _: &RetryPolicies| {
        let _ = hangs.lock().unwrap().recv();
        Ok(DoNotDoItAgain)
    };
    let worker = Worker::new().register_builtins().unwrap().register_policy("Hangs", decode).unwrap();
    let worker = Local::worker(&database, worker, &["--heartbeat", "300ms", "--lease", "1s"]);
    let runs = NewJob::of_class("sleep", doc! { "ms": 600_000 }).retry(&again(1)).enqueue(&store).await.unwrap().id;
    let count = async |filter: Document| database.count("scheduled", filter).await;
    wait_until(SOON, "a job runs", async || count(doc! { "_id": runs, "locked": true }).await == 1).await;
    let policy = StoredPolicy { class: "Hangs".into(), parameters: bson::Bson::Null };
    NewJob::of_class("noop", doc! {}).retry_stored(policy).enqueue(&store).await.unwrap();
    wait_until(SOON, "the job of the worker that hangs is rescued", async || count(doc! { "_id": runs, "deaths": 1 }).await == 1).await;
    assert!(cleaner.stderr().contains("a worker is dead"), "{}", cleaner.stderr());
    drop(let_go);
    drop(store);
    worker.crash().await;
    recruiter.stop().await;
}
