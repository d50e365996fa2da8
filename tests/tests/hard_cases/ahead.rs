//! Jobs that workers hold ahead, and connections for hints: what becomes of them when a worker dies, a leader changes, or the network is cut.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use bson::{Document, doc};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use recruiter_common::{JobId, shutdown::pause};
use recruiter_tests::{
    factory::again,
    full_length,
    ledger::Entry,
    oracle::{Findings, Policy},
    promise,
    report::Row,
    world::{Role, World},
};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::watch,
};

use crate::{PATIENT, SOON, close, end_of, roster, tended, until_available, wait, world};

/// Short enough that workers ask for jobs ahead.
const SHORT_MS: i64 = 3;

/// Many short jobs: of every two, one that may be done again.
async fn enqueue_short(world: &World, pairs: usize) {
    let pair = || {
        [(Entry::lasting(SHORT_MS), Policy::Never), (Entry::lasting(SHORT_MS).retry(&again(50)), Policy::Again(50))]
            .map(|(job, policy)| world.enqueue(job, policy))
    };
    // Few at a time, so that each is in time on a busy machine too.
    stream::iter((0..pairs).flat_map(|_| pair())).buffer_unordered(10).try_for_each(async |_| Ok(())).await.unwrap();
}

fn ids(worker: &Document, field: &str) -> Vec<JobId> {
    worker.get_array(field).into_iter().flatten().filter_map(|id| id.as_object_id()).map(JobId::from).collect()
}

/// Those among these jobs that were never started.
async fn unlocked(world: &World, jobs: &[JobId]) -> Vec<JobId> {
    let filter = doc! { "_id": { "$in": jobs.to_vec() }, "locked": false, "last_execution": { "$exists": false } };
    let found = world.database.all("scheduled", filter).await;
    found.iter().filter_map(|job| job.get_object_id("_id").ok()).map(JobId::from).collect()
}

/// A worker is killed while it holds jobs ahead. Those that it had not locked have lost nothing, and no attempt.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_ahead_of_a_worker_that_is_killed_are_neither_lost_nor_counted() {
    let mut row = Row::new("a worker is killed (SIGKILL) with jobs ahead");
    let kills = if full_length() { 3 } else { 1 };
    for _ in 0..kills {
        let mut world = world().await;
        enqueue_short(&world, 500).await;
        // It is killed and not restarted: another worker runs its jobs then.
        let worker = world.start(Role::Worker, &["--concurrency", "2"], &[]);
        let process = &world.members[worker].process;
        let mut held = Vec::new();
        wait(&world, "the worker stands still with jobs ahead that it has not locked", async || {
            if world.count("scheduled", doc! {}).await < 200 {
                enqueue_short(&world, 100).await;
            }
            held = roster(&world).await.iter().flat_map(|worker| ids(worker, "prefetched")).collect();
            if held.len() < 4 {
                return false;
            }
            process.pause();
            // What it has sent may still arrive.
            pause(Duration::from_millis(200)).await;
            held = unlocked(&world, &held).await;
            if held.is_empty() {
                process.resume();
            }
            !held.is_empty()
        })
        .await;
        process.kill();
        let killed = Instant::now();
        drop(world.members.pop());
        wait(&world, "it is buried", async || roster(&world).await.is_empty()).await;
        let ahead = unlocked(&world, &held).await;
        assert!(!ahead.is_empty(), "it locked all of them while it stood still");
        world.start(Role::Worker, &[], &[]);
        assert!(world.until_quiet(SOON).await, "{}", world.logs());
        let recovery = killed.elapsed();
        for job in ahead {
            let (why, attempts, classes) = end_of(&world, job).await;
            promise!((why.as_str(), attempts, &classes[..]) == ("done", 1, &["none".to_owned()]), "{job}: {why} {attempts} {classes:?}");
        }
        row.add(world.judge().await, recovery);
    }
    row.close();
}

/// The next jobs turn out to be long, while another worker is idle. Each long job blocks a slot, and none of them waits behind another.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_ahead_are_returned_when_the_others_turn_out_to_be_long() {
    let mut world = World::new().await;
    world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Cleaner, &["--dead-after", PATIENT], &[]);
    for _ in 0..2 {
        world.start_with(Role::Worker, &["--concurrency", "2"], &[("RECRUITER_LOG", "info,recruiter_worker=debug")]);
    }
    until_available(&world, 2).await;
    let begun = Instant::now();
    let mut returned = 0;
    while returned == 0 {
        assert!(begun.elapsed() < SOON, "no job was returned:\n{}", world.logs());
        for _ in 0..2 {
            enqueue_short(&world, 100).await;
            for _ in 0..6 {
                world.enqueue(Entry::lasting(700), Policy::Never).await.unwrap();
            }
        }
        assert!(world.until_quiet(SOON).await, "{}", world.logs());
        returned = world.logs().matches("returning jobs that were assigned ahead").count();
    }
    close(world, "jobs ahead are returned, because others turn out to be long", returned, begun.elapsed()).await;
}

/// Each leader dies while workers are connected to its socket.
#[tokio::test(flavor = "multi_thread")]
async fn leaders_are_killed_while_workers_are_connected() {
    let mut row = Row::new("a leader is killed while workers are connected to its socket");
    let sockets = tempfile::tempdir().unwrap();
    let mut world = World::new().await;
    for _ in 0..2 {
        world.start_with(Role::Recruiter, &[], &[("RECRUITER_HINTS_DIRECTORY", sockets.path().to_str().unwrap())]);
    }
    world.start(Role::Cleaner, &["--dead-after", PATIENT], &[]);
    for _ in 0..2 {
        world.start(Role::Worker, &["--concurrency", "4"], &[]);
    }
    let kills = if full_length() { 4 } else { 2 };
    for _ in 0..kills {
        let mut leader = None;
        tended(&mut world, "both workers are connected to a leader that runs", async |world| {
            let lease = world.database.raw("metadata").find_one(doc! { "_id": "recruiter" }).await.unwrap().unwrap_or_default();
            let holder = lease.get_str("holder_at").unwrap_or_default();
            leader = world.members.iter().position(|member| holder.ends_with(&format!(":{}", member.process.pid())));
            leader.is_some()
                && world.count("metadata", doc! { "_id": "relay" }).await == 1
                && world.count("roster", doc! {}).await == 2
                && world.database.tails().await == 0
        })
        .await;
        enqueue_short(&world, 100).await;
        world.members[leader.unwrap()].process.kill();
        let killed = Instant::now();
        assert!(world.until_quiet(SOON).await, "{}", world.logs());
        row.add(Findings::default(), killed.elapsed());
    }
    row.findings.add(world.judge().await);
    row.close();
}

/// A wire to the recruiter's address for hints, which can be cut.
struct Wire {
    address: String,
    cut: watch::Sender<()>,
    connections: Arc<AtomicUsize>,
}

impl Wire {
    async fn to(address: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let own = listener.local_addr().unwrap().to_string();
        let (cut, cuts) = watch::channel(());
        let connections = Arc::new(AtomicUsize::new(0));
        let open = connections.clone();
        tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                let (mut cuts, address, open) = (cuts.clone(), address.clone(), open.clone());
                cuts.mark_unchanged();
                tokio::spawn(async move {
                    let Ok(mut far) = TcpStream::connect(address).await else { return };
                    open.fetch_add(1, Ordering::SeqCst);
                    tokio::select! { _ = cuts.changed() => {} _ = copy_bidirectional(&mut near, &mut far) => {} }
                    open.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Self { address: own, cut, connections }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_for_hints_are_cut() {
    let mut row = Row::new("all TCP connections for hints are cut");
    let mut world = World::new().await;
    // A recruiter that loses its lease, and leads again, announces its own address instead of the wire's.
    world.start(Role::Recruiter, &["--hints-address", "127.0.0.1:0", "--lease", "10m"], &[]);
    world.start(Role::Cleaner, &["--dead-after", PATIENT], &[]);
    let relay = world.database.raw("metadata");
    let find = async || relay.find_one(doc! { "_id": "relay" }).await.unwrap();
    wait(&world, "the recruiter listens", async || find().await.is_some()).await;
    let wire = Wire::to(find().await.unwrap().get_str("address").unwrap().to_owned()).await;
    relay.update_one(doc! { "_id": "relay" }, doc! { "$set": { "address": &wire.address } }).await.unwrap();
    for _ in 0..2 {
        world.start(Role::Worker, &["--concurrency", "4"], &[]);
    }
    let cuts = if full_length() { 5 } else { 2 };
    for _ in 0..cuts {
        tended(&mut world, "both workers are connected", async |world| {
            wire.connections.load(Ordering::SeqCst) >= 2 && world.database.tails().await == 0
        })
        .await;
        enqueue_short(&world, 100).await;
        wire.cut.send(()).unwrap();
        let cut = Instant::now();
        assert!(world.until_quiet(SOON).await, "{}", world.logs());
        row.add(Findings::default(), cut.elapsed());
    }
    row.findings.add(world.judge().await);
    row.close();
}
