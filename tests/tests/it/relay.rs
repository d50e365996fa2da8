//! The relay: hints over the recruiter's socket, or over TCP. Connected processes neither tail nor insert, and a lost connection costs a poll at most.
//!
//! Polls and heartbeats are so rare here that only hints can be as quick as the tests demand.

use std::{
    io::{ErrorKind, Read, Write as _},
    net::{TcpListener, TcpStream},
    os::unix::{fs::PermissionsExt as _, net::UnixStream},
    path::Path,
    time::Duration,
};

use bson::{Binary, Document, Timestamp, doc, spec::BinarySubtype};
use hmac::{Hmac, KeyInit as _, Mac as _};
use recruiter_common::{
    JobId, NewJob, WorkerId,
    store::{Hint, Store},
};
use recruiter_tests::{
    local::store,
    mongo::TestDatabase,
    processes::{self, Process, is_alive},
    wait::{SOON, Stopwatch, best_of_three, wait_until},
};
use sha2::Sha256;
use tempfile::TempDir;

/// Less than any scan of these tests. Workers neither poll nor send heartbeats. The scans are there for workers whose connection a machine
/// breaks that stalls for some seconds: they connect again after the next keep-alive.
const AT_ONCE: Duration = Duration::from_secs(15);
const WORKER: [&str; 6] = ["--builtins", "--log=debug", "--poll=10m", "--heartbeat=10m", "--lease=1h", "--work-on"];

const CONNECTED: &str = "connected to the recruiter";
/// The size of the leader's challenge, the only thing that a stranger receives.
const CHALLENGE: usize = 53;

struct Setting {
    database: TestDatabase,
    store: Store,
    directory: TempDir,
}

impl Setting {
    async fn new() -> Self {
        let database = TestDatabase::new().await;
        Self { store: store(&database).await, database, directory: processes::directory_for_sockets() }
    }

    fn recruiter(&self, flags: &[&str]) -> Process {
        let environment = [("MONGODB_URI", self.database.uri()), ("RUNTIME_DIRECTORY", self.directory.path().to_str().unwrap())];
        Process::start("recruiter", &[&["run"], flags].concat(), &environment)
    }

    /// A recruiter that leads, has no socket and listens at a TCP address.
    async fn remote_leader(&self, address: &str, flags: &[&str]) -> Process {
        let address = format!("--hints-address={address}");
        // An empty variable is as if it were not set.
        let environment = [("MONGODB_URI", self.database.uri()), ("RUNTIME_DIRECTORY", "")];
        let recruiter = Process::start("recruiter", &[&["run", &address], flags].concat(), &environment);
        wait_until(SOON, "the recruiter listens", async || self.relay().await.is_some_and(|at| at.get_str("address").is_ok())).await;
        assert!(!recruiter.stderr().contains("cannot listen for hints"), "{}", recruiter.stderr());
        recruiter
    }

    /// A recruiter that leads and listens.
    async fn leader(&self, flags: &[&str]) -> Process {
        let recruiter = self.recruiter(flags);
        wait_until(SOON, "the recruiter listens", async || self.relay().await.is_some_and(|at| Path::new(socket(&at)).exists())).await;
        recruiter
    }

    /// A worker for this group.
    async fn worker(&self, group: &str) -> Process {
        let worker = Process::on(&self.database, "recruiter-worker", &[&WORKER[..], &[group]].concat());
        wait_until(SOON, "the worker is ready", async || worker.stderr().contains("ready for work")).await;
        worker
    }

    /// A worker for this group that is connected to the recruiter.
    async fn connected_worker(&self, group: &str) -> Process {
        let worker = self.worker(group).await;
        wait_until(SOON, "the worker is connected", async || worker.stderr().contains(CONNECTED)).await;
        self.until_tails(0).await;
        worker
    }

    async fn relay(&self) -> Option<Document> {
        self.database.raw("metadata").find_one(doc! { "_id": "relay" }).await.unwrap()
    }

    async fn until_tails(&self, count: usize) {
        wait_until(SOON, &format!("{count} workers tail"), async || self.database.tails().await == count).await;
    }

    async fn enqueue(&self, class: &str, parameters: Document, group: &str) -> JobId {
        NewJob::of_class(class, parameters).in_group(group).enqueue(&self.store).await.unwrap().id
    }

    async fn archived(&self, job: JobId) -> String {
        self.database.archived(job).await.get_str("why").unwrap().to_owned()
    }

    /// Does a few jobs, one after the other.
    async fn does_jobs(&self, group: &str) {
        let a_few = async || {
            let begun = Stopwatch::start();
            for _ in 0..5 {
                let job = self.enqueue("noop", doc! {}, group).await;
                assert_eq!(self.archived(job).await, "done");
            }
            begun.elapsed()
        };
        best_of_three(AT_ONCE, group, a_few).await;
    }

    /// Does jobs until those of a round have left no hint in MongoDB.
    async fn until_hints_go_past_the_database(&self, group: &str) {
        let hints = async || self.database.count("signals", doc! {}).await;
        let enqueued_unseen = async || {
            let before = hints().await;
            self.does_jobs(group).await;
            hints().await == before
        };
        wait_until(SOON, "hints go past the database", enqueued_unseen).await;
    }
}

fn socket(relay: &Document) -> &str {
    relay.get_str("socket").unwrap()
}

fn binary(bytes: &[u8]) -> Binary {
    Binary { subtype: BinarySubtype::Generic, bytes: bytes.to_vec() }
}

/// What a client that knows the secret answers to the leader's challenge.
fn hello(peer: &mut UnixStream, secret: &str) -> Document {
    let mut challenge = [0; CHALLENGE];
    peer.read_exact(&mut challenge).unwrap();
    let challenge = Document::from_reader(&challenge[..]).unwrap();
    let (theirs, ours) = (challenge.get_binary_generic("challenge").unwrap(), [7; 32]);
    let mut code = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).unwrap();
    [&b"client"[..], theirs, &ours].iter().for_each(|part| code.update(part));
    doc! { "challenge": binary(&ours), "code": binary(&code.finalize().into_bytes()) }
}

/// Waits until the other end closes this connection. Returns how much it has sent before.
fn closed(mut peer: impl Read) -> usize {
    let mut sent = 0;
    loop {
        match peer.read(&mut [0; 4096]) {
            Ok(0) => return sent,
            Ok(bytes) => sent += bytes,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return sent,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => panic!("the connection was not closed: {error}"),
        }
    }
}

#[tokio::test]
async fn a_connected_worker_gets_jobs_and_cancellations_without_tailing_and_others_beside_it() {
    let setting = Setting::new().await;
    let recruiter = setting.leader(&["--poll=20s", "--lease=60s"]).await;
    let at = setting.relay().await.unwrap();
    assert_eq!(std::fs::metadata(socket(&at)).unwrap().permissions().mode() & 0o777, 0o660);
    let near = setting.connected_worker("near").await;
    // Later processes do not find the socket. Open connections stay.
    std::fs::remove_file(socket(&at)).unwrap();
    let far = setting.worker("far").await;
    setting.until_tails(1).await;
    setting.does_jobs("near").await;
    setting.does_jobs("far").await;
    setting.until_tails(1).await;
    for group in ["near", "far"] {
        let job = setting.enqueue("sleep", doc! { "ms": 600_000 }, group).await;
        setting.database.until("scheduled", doc! { "_id": job, "locked": true }, 1, "the job runs").await;
        let mut cancel = Process::on(&setting.database, "recruiter", &["jobs", "cancel", "--yes", &job.to_string()]);
        assert!(cancel.wait_exit(SOON).await.success(), "{}", cancel.stderr());
        assert_eq!(setting.archived(job).await, "cancelled");
    }
    processes::stop([near, far, recruiter]).await;
}

#[tokio::test]
async fn a_process_that_enqueues_again_and_again_inserts_no_hints() {
    let setting = Setting::new().await;
    let recruiter = setting.leader(&["--poll=20s", "--lease=60s"]).await;
    let worker = setting.connected_worker("g").await;
    setting.until_hints_go_past_the_database("g").await;
    processes::stop([worker, recruiter]).await;
    assert!(std::fs::read_dir(setting.directory.path()).unwrap().next().is_none(), "the socket is removed");
}

#[tokio::test]
async fn after_the_death_of_the_leader_workers_tail_until_the_next_one_listens() {
    let setting = Setting::new().await;
    let flags = ["--poll=500ms", "--lease=4s"];
    let mut leader = setting.leader(&flags).await;
    let worker = setting.connected_worker("g").await;
    let dead_socket = socket(&setting.relay().await.unwrap()).to_owned();
    leader.kill();
    leader.wait_exit(SOON).await;
    setting.until_tails(1).await;
    // Its socket file is still there. The next leader removes it.
    assert!(Path::new(&dead_socket).exists());
    let job = setting.enqueue("noop", doc! {}, "g").await;
    let standby = setting.recruiter(&flags);
    assert_eq!(setting.archived(job).await, "done");
    setting.until_tails(0).await;
    assert!(!Path::new(&dead_socket).exists());
    setting.does_jobs("g").await;
    processes::stop([worker, standby]).await;
}

#[tokio::test]
async fn a_frozen_leader_does_not_make_a_worker_deaf() {
    let setting = Setting::new().await;
    let flags = ["--poll=500ms", "--lease=2s"];
    let leader = setting.leader(&flags).await;
    let worker = setting.connected_worker("g").await;
    let standby = setting.recruiter(&flags);
    wait_until(SOON, "it stands by", async || standby.stderr().contains("standing by")).await;
    leader.pause();
    let job = setting.enqueue("noop", doc! {}, "g").await;
    assert_eq!(setting.archived(job).await, "done");
    let is_connected = async || setting.database.tails().await == 0 && worker.stderr().matches(CONNECTED).count() >= 2;
    wait_until(SOON, "the worker is connected to the standby", is_connected).await;
    setting.does_jobs("g").await;
    leader.resume();
    setting.does_jobs("g").await;
    setting.until_tails(0).await;
    processes::stop([worker, standby, leader]).await;
}

#[tokio::test]
async fn hostile_peers_are_disconnected_and_delay_no_other() {
    let setting = Setting::new().await;
    let recruiter = setting.leader(&["--poll=20s", "--lease=60s"]).await;
    let worker = setting.connected_worker("g").await;
    let at = setting.relay().await.unwrap();
    let connect = || {
        let peer = UnixStream::connect(socket(&at)).unwrap();
        peer.set_read_timeout(Some(SOON)).unwrap();
        peer
    };
    let peer = |document: Document| {
        let mut peer = connect();
        peer.write_all(&document.to_vec().unwrap()).unwrap();
        peer
    };
    let client = |more: Document| {
        let mut peer = connect();
        let mut hello = hello(&mut peer, at.get_str("secret").unwrap());
        hello.extend(more);
        // The leader closes a connection that proves nothing within two seconds, also if the machine stalls.
        peer.write_all(&hello.to_vec().unwrap()).unwrap_or_default();
        peer
    };
    // Strangers: nothing at all, no proof, the secret itself, no document.
    let wrong = || peer(doc! { "challenge": binary(&[1; 32]), "code": binary(&[1; 32]) });
    let mut strangers = vec![connect(), wrong(), peer(doc! { "secret": at.get_str("secret").unwrap() }), peer(doc! {}), connect()];
    strangers.last_mut().unwrap().write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    for stranger in strangers {
        assert_eq!(closed(stranger), CHALLENGE, "a stranger learns nothing");
    }
    // A large document, although the proof in it is right.
    assert_eq!(closed(client(doc! { "more": "x".repeat(10_000) })), 0);
    let is_logged = async || closed(wrong()) == CHALLENGE && recruiter.stderr().contains("without the secret");
    wait_until(SOON, "it is logged", is_logged).await;
    assert_eq!(recruiter.stderr().matches("without the secret").count(), 1, "{}", recruiter.stderr());
    // Clients that send garbage.
    for garbage in [&[0xff; 64][..], &[0; 64]] {
        let mut client = client(doc! {});
        client.write_all(garbage).unwrap_or_default();
        closed(client);
    }
    // A worker that does not read.
    let slow = client(doc! { "worker": WorkerId::new() });
    // The server fills it in.
    let now = Timestamp { time: 0, increment: 0 };
    for _ in 0..10 {
        let cancellations: Vec<Document> = (0..500).map(|_| doc! { "at": now, "kind": "cancel", "job": JobId::new() }).collect();
        setting.database.raw("signals").insert_many(cancellations).await.unwrap();
        // Its worker has read them all by then.
        let job = setting.enqueue("noop", doc! {}, "g").await;
        assert_eq!(setting.archived(job).await, "done");
    }
    assert!(closed(slow) < 1_000_000, "its hints did not pile up");
    setting.does_jobs("g").await;
    setting.until_tails(0).await;
    assert!(is_alive(recruiter.pid()));
    processes::stop([worker, recruiter]).await;
}

#[tokio::test]
async fn processes_without_the_socket_connect_over_tcp() {
    let setting = Setting::new().await;
    let recruiter = setting.remote_leader("127.0.0.1:0", &["--poll=20s", "--lease=60s"]).await;
    let worker = setting.connected_worker("g").await;
    setting.until_hints_go_past_the_database("g").await;
    let relay = setting.relay().await.unwrap();
    let mut stranger = TcpStream::connect(relay.get_str("address").unwrap()).unwrap();
    stranger.set_read_timeout(Some(SOON)).unwrap();
    stranger.write_all(&doc! { "secret": relay.get_str("secret").unwrap() }.to_vec().unwrap()).unwrap();
    assert_eq!(closed(stranger), CHALLENGE);
    setting.until_tails(0).await;
    processes::stop([worker, recruiter]).await;
}

/// Behind a firewall that drops packets, a connection neither opens nor fails.
#[tokio::test]
async fn an_address_that_does_not_answer_delays_no_hint() {
    let setting = Setting::new().await;
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let recruiter = setting.remote_leader("127.0.0.1:0", &["--poll=1s", "--lease=60s"]).await;
    let address = silent.local_addr().unwrap().to_string();
    setting.database.raw("metadata").update_one(doc! { "_id": "relay" }, doc! { "$set": { "address": address } }).await.unwrap();
    let worker = setting.worker("g").await;
    setting.until_tails(1).await;
    for _ in 0..4 {
        setting.does_jobs("g").await;
    }
    assert!(!worker.stderr().contains(CONNECTED));
    processes::stop([worker, recruiter]).await;
}

#[tokio::test]
async fn an_address_in_use_is_reported_and_hints_go_through_the_database() {
    let setting = Setting::new().await;
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("--hints-address={}", taken.local_addr().unwrap());
    let recruiter = Process::on(&setting.database, "recruiter", &["run", &address]);
    wait_until(SOON, "it says so", async || recruiter.stderr().contains("cannot listen for hints at this address")).await;
    let worker = setting.worker("g").await;
    setting.does_jobs("g").await;
    processes::stop([worker, recruiter]).await;
    let mut refused = Process::on(&setting.database, "recruiter", &["run", "--hints-address=nowhere"]);
    assert_eq!(refused.wait_exit(SOON).await.code(), Some(2));
    assert!(refused.stderr().contains("is not a host and a port such as"), "{}", refused.stderr());
}

/// Without the directory, or where it cannot be used, nothing changes.
#[tokio::test]
async fn without_a_socket_hints_go_through_the_database() {
    let setting = Setting::new().await;
    let recruiter = setting.recruiter(&["--hints-directory=/proc/nowhere"]);
    wait_until(SOON, "it says so", async || recruiter.stderr().contains("cannot listen for hints")).await;
    let worker = setting.worker("g").await;
    setting.until_tails(1).await;
    setting.does_jobs("g").await;
    setting.store.publish(&Hint::Free).await.unwrap();
    processes::stop([worker, recruiter]).await;
}
