//! The faults that the failure tests rely on happen, and nothing else does.

use std::{
    io::ErrorKind,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use bson::{Document, doc};
use futures_util::StreamExt;
use mongodb::{
    Client, Database,
    error::Result,
    event::{EventHandler, sdam::SdamEvent},
    options::ClientOptions,
};
use recruiter_common::{NewJob, shutdown::pause};
use recruiter_tests::{
    clocks::Clock,
    local,
    mongo::TestDatabase,
    mongosh,
    processes::Process,
    proxy::{Action, Proxy},
    replica_set::ReplicaSet,
    wait::{SOON, Stopwatch, best_of_three, wait_for, wait_until},
};
use tokio::{io::AsyncReadExt as _, net::TcpStream, time::timeout};

/// In this time anything on loopback that nothing holds up is done.
const MOMENT: Duration = Duration::from_millis(500);

async fn through(proxy: &Proxy, database: &str, options: &str) -> Database {
    Client::with_uri_str(proxy.uri(database) + options).await.unwrap().default_database().unwrap()
}

/// A database, a proxy in front of it, and the way through it for a driver that repeats nothing by itself.
async fn behind_a_proxy() -> (TestDatabase, Proxy, Database) {
    let database = TestDatabase::new().await;
    let proxy = Proxy::before(database.uri()).await;
    let way = through(&proxy, database.name(), "&retryWrites=false&retryReads=false&serverSelectionTimeoutMS=60000").await;
    insert(&way, "warm").await.unwrap();
    (database, proxy, way)
}

async fn insert(way: &Database, marker: &str) -> Result<Document> {
    way.run_command(doc! { "insert": "things", "documents": [{ "marker": marker }] }).await
}

async fn there(database: &TestDatabase, marker: &str) -> u64 {
    database.count("things", doc! { "marker": marker }).await
}

#[tokio::test]
async fn without_a_fault_everything_passes() {
    let (database, _proxy, way) = behind_a_proxy().await;
    let mut changes = way.watch().await.unwrap();
    let documents: Vec<Document> = (0..2_000).map(|number| doc! { "number": number, "text": "x".repeat(1_000) }).collect();
    #[expect(clippy::disallowed_methods, reason = "a collection by way of the proxy")]
    let things = way.collection::<Document>("others");
    things.insert_many(documents).await.unwrap();
    assert_eq!(things.find(doc! {}).batch_size(100).await.unwrap().count().await, 2_000);
    let change = timeout(SOON, changes.next()).await.unwrap().unwrap().unwrap();
    assert_eq!(change.full_document.unwrap().get_i32("number").unwrap(), 0);

    let mut session = way.client().start_session().await.unwrap();
    session.start_transaction().await.unwrap();
    things.insert_one(doc! { "in": "a transaction" }).session(&mut session).await.unwrap();
    session.commit_transaction().await.unwrap();
    assert_eq!(database.count("others", doc! {}).await, 2_001);
}

#[tokio::test]
async fn monitors_stream_through_it() {
    let (_database, proxy, _) = behind_a_proxy().await;
    let beats = Arc::new(Mutex::new(Vec::new()));
    let note = Arc::clone(&beats);
    let mut options = ClientOptions::parse(proxy.uri("")).await.unwrap();
    options.heartbeat_freq = Some(Duration::from_millis(500));
    options.sdam_event_handler = Some(EventHandler::callback(move |event| {
        if let SdamEvent::ServerHeartbeatSucceeded(beat) = &event {
            note.lock().unwrap().push(if beat.awaited { "streamed" } else { "asked" });
        }
        if matches!(event, SdamEvent::ServerHeartbeatFailed(_)) {
            note.lock().unwrap().push("failed");
        }
    }));
    let client = Client::with_options(options).unwrap();
    wait_until(SOON, "heartbeats come", async || beats.lock().unwrap().len() >= 4).await;
    assert_eq!(beats.lock().unwrap()[..4], ["asked", "streamed", "streamed", "streamed"]);
    drop(client);
}

#[tokio::test]
async fn the_shell_with_its_older_handshake_stays_on_it() {
    let (database, proxy, _) = behind_a_proxy().await;
    let seen = proxy.arm(Action::LoseReply, 0..0, |request| request.is("insert", "things"));
    let hosts =
        mongosh::eval(&proxy.uri(database.name()), "db.things.insertOne({marker: 'shell'}); print(db.hello().hosts, db.hello().me)");
    assert_eq!(hosts.trim(), format!("[ '{0}' ] {0}", proxy.listeners()[0]));
    assert_eq!((seen.matched(), seen.count(), there(&database, "shell").await), (1, 0, 1));
}

#[tokio::test]
async fn a_lost_reply_leaves_the_work_done() {
    let (database, proxy, way) = behind_a_proxy().await;
    let lost = proxy.arm(Action::LoseReply, 1..=1, |request| request.is("insert", "things"));
    insert(&way, "lost").await.unwrap_err();
    lost.fired().await;
    assert_eq!(there(&database, "lost").await, 1);
    insert(&way, "kept").await.unwrap();
    assert_eq!((lost.matched(), lost.count()), (2, 1));
    drop(lost);

    // A driver that does repeat notices nothing, and the server takes the second time for the first.
    let patient = through(&proxy, database.name(), "").await;
    let lost = proxy.arm(Action::LoseReply, 1..=1, |request| request.is("insert", "things"));
    #[expect(clippy::disallowed_methods, reason = "a collection by way of the proxy")]
    patient.collection("things").insert_one(doc! { "marker": "repeated" }).await.unwrap();
    assert_eq!((lost.matched(), lost.count(), there(&database, "repeated").await), (2, 1, 1));
}

#[tokio::test]
async fn a_cut_request_never_arrives() {
    let (database, proxy, way) = behind_a_proxy().await;
    let cut = proxy.arm(Action::Cut, 2.., |request| request.is("insert", "things"));
    insert(&way, "first").await.unwrap();
    insert(&way, "second").await.unwrap_err();
    insert(&way, "third").await.unwrap_err();
    assert_eq!((cut.matched(), cut.count()), (3, 2));
    drop(cut);
    insert(&way, "fourth").await.unwrap();
    assert_eq!((there(&database, "first").await, there(&database, "second").await, there(&database, "third").await), (1, 0, 0));
}

#[tokio::test]
async fn a_rule_sees_the_whole_request() {
    let (database, proxy, way) = behind_a_proxy().await;
    let name = database.name().to_owned();
    let three = proxy.arm(Action::Cut, .., move |request| {
        let documents = request.body.get_array("documents").map_or(0, Vec::len);
        request.command == "insert" && request.database == name && documents == 3
    });
    // The driver sends the documents apart from the command.
    #[expect(clippy::disallowed_methods, reason = "a collection by way of the proxy")]
    let others = way.collection::<Document>("others");
    others.insert_many(vec![doc! {}; 2]).await.unwrap();
    others.insert_many(vec![doc! {}; 3]).await.unwrap_err();
    assert_eq!((three.count(), others.count_documents(doc! {}).await.unwrap()), (1, 2));
    drop(three);

    others.insert_many(vec![doc! {}; 200]).await.unwrap();
    let more = proxy.arm(Action::Cut, .., |request| request.is("getMore", "others"));
    assert!(others.find(doc! {}).batch_size(50).await.unwrap().any(async |document| document.is_err()).await);
    assert_eq!(more.count(), 1);
}

#[tokio::test]
async fn a_stalled_reply_never_comes_and_the_work_is_done() {
    let (database, proxy, way) = behind_a_proxy().await;
    let stalled = proxy.arm(Action::Stall, 1..=1, |request| request.is("insert", "things"));
    let waiting = tokio::spawn({
        let way = way.clone();
        async move { insert(&way, "stalled").await }
    });
    stalled.fired().await;
    insert(&way, "next").await.unwrap();
    assert!(!waiting.is_finished());
    assert_eq!(there(&database, "stalled").await, 1);
}

#[tokio::test]
async fn a_stalled_request_arrives_after_its_client_has_gone() {
    let (database, proxy, way) = behind_a_proxy().await;
    let late = proxy.arm(Action::Hold, 1..=1, |request| request.is("insert", "things"));
    let client = way.client().clone();
    let asking = tokio::spawn(async move { insert(&way, "late").await });
    late.fired().await;
    asking.abort();
    client.shutdown().immediate(true).await;
    assert_eq!(there(&database, "late").await, 0);
    late.release();
    wait_until(SOON, "it arrives", async || there(&database, "late").await == 1).await;
}

#[tokio::test]
async fn a_severed_line_refuses_everybody_until_it_is_healed() {
    let (database, proxy, way) = behind_a_proxy().await;
    let connect = async || TcpStream::connect(&proxy.listeners()[0]).await;
    // An end or an error, and no more bytes.
    let closed = async |mut open: TcpStream| assert_eq!(timeout(SOON, open.read(&mut [0])).await.unwrap().unwrap_or(0), 0);
    let open = connect().await.unwrap();
    proxy.sever();
    closed(open).await;
    assert_eq!(connect().await.unwrap_err().kind(), ErrorKind::ConnectionRefused);
    let impatient = through(&proxy, database.name(), "&retryWrites=false&serverSelectionTimeoutMS=2000").await;
    insert(&impatient, "severed").await.unwrap_err();
    proxy.heal();
    wait_until(SOON, "it is healed", async || insert(&way, "healed").await.is_ok()).await;
    assert_eq!((there(&database, "severed").await, there(&database, "healed").await), (0, 1));

    // Connections break even if the line is restored before the next check.
    let open = connect().await.unwrap();
    proxy.sever();
    proxy.heal();
    closed(open).await;
    wait_until(SOON, "it is healed", async || insert(&way, "again").await.is_ok()).await;
}

/// As the insert before it, and later: that is done, if nothing holds it up.
async fn insert_on_another_line() {
    let (_database, _proxy, way) = behind_a_proxy().await;
    insert(&way, "later").await.unwrap();
}

#[tokio::test]
async fn a_black_hole_holds_everything_back_until_it_is_healed() {
    let (database, proxy, way) = behind_a_proxy().await;
    proxy.blackhole();
    let (given, late) = (way.clone(), tokio::spawn(async move { insert(&way, "held").await }));
    TcpStream::connect(&proxy.listeners()[0]).await.unwrap();
    insert_on_another_line().await;
    assert!(!late.is_finished());
    assert_eq!(there(&database, "held").await, 0);
    proxy.heal();
    timeout(SOON, late).await.unwrap().unwrap().unwrap();
    assert_eq!(there(&database, "held").await, 1);
    insert(&given, "next").await.unwrap();
}

#[tokio::test]
async fn a_one_way_line_delivers_requests_only() {
    let (database, proxy, way) = behind_a_proxy().await;
    proxy.blackhole_replies();
    let late = tokio::spawn(async move { insert(&way, "unanswered").await });
    wait_until(SOON, "it arrives", async || there(&database, "unanswered").await == 1).await;
    insert_on_another_line().await;
    assert!(!late.is_finished());
    proxy.heal();
    timeout(SOON, late).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn a_slow_line_is_slow() {
    let (_database, proxy, way) = behind_a_proxy().await;
    proxy.slow(Duration::from_millis(50), 32_000);
    let asked = Instant::now();
    way.run_command(doc! { "ping": 1 }).await.unwrap();
    assert!(asked.elapsed() >= Duration::from_millis(100), "{:?}", asked.elapsed());
    let (asked, large) = (Instant::now(), "x".repeat(64_000));
    insert(&way, &large).await.unwrap();
    assert!(asked.elapsed() >= Duration::from_millis(2_100), "{:?}", asked.elapsed());
    proxy.heal();
    let healed = async || {
        let asked = Stopwatch::start();
        insert(&way, &large).await.unwrap();
        asked.elapsed()
    };
    best_of_three(Duration::from_millis(2_000), "an insert on the healed line", healed).await;
}

#[tokio::test]
async fn one_proxy_leaves_the_others_alone() {
    let (database, one, way) = behind_a_proxy().await;
    let other = Proxy::before(database.uri()).await;
    let free = through(&other, database.name(), "").await;
    one.blackhole();
    insert(&free, "free").await.unwrap();
    timeout(MOMENT, insert(&way, "held")).await.unwrap_err();
    drop(one);
    assert_eq!(there(&database, "free").await, 1);
}

async fn majority_insert(way: &Database, marker: &str) -> Result<Document> {
    let majority = doc! { "w": "majority", "wtimeout": 20_000 };
    way.run_command(doc! { "insert": "things", "documents": [{ "marker": marker }], "writeConcern": majority }).await
}

/// A driver that gives up soon what it has sent to a server that is silent: by default that takes twenty seconds.
async fn on_the_network_of(set: &ReplicaSet) -> Database {
    let uri = set.uri_for("test") + "&connectTimeoutMS=1000&heartbeatFrequencyMS=1000";
    Client::with_uri_str(uri).await.unwrap().default_database().unwrap()
}

async fn until_inserted(way: &Database, marker: &str) {
    wait_until(SOON * 2, "it is inserted", async || majority_insert(way, marker).await.is_ok()).await;
}

#[tokio::test]
async fn a_driver_stays_on_its_proxy_when_the_primary_changes() {
    let set = ReplicaSet::start(3).await;
    let proxy = set.proxy();
    let way = through(&proxy, "test", "&retryWrites=false").await;
    majority_insert(&way, "before").await.unwrap();
    set.step_down().await;
    until_inserted(&way, "after").await;
    let hello = way.run_command(doc! { "hello": 1 }).await.unwrap();
    let hosts: Vec<&str> = hello.get_array("hosts").unwrap().iter().filter_map(|host| host.as_str()).collect();
    assert_eq!(hosts, proxy.listeners());
    for field in ["me", "primary"] {
        assert!(hosts.contains(&hello.get_str(field).unwrap()), "{hello}");
    }

    // There is no other way to the set for it.
    proxy.blackhole();
    timeout(MOMENT, majority_insert(&way, "held")).await.unwrap_err();
    let beside = on_the_network_of(&set).await;
    until_inserted(&beside, "beside").await;
}

#[tokio::test]
async fn a_set_that_loses_its_primary_has_another() {
    let mut set = ReplicaSet::start(3).await;
    let way = on_the_network_of(&set).await;
    until_inserted(&way, "first").await;

    let primary = set.primary().await;
    set.kill(primary).await;
    let next = set.primary_other_than(primary).await;
    until_inserted(&way, "after a kill").await;
    set.restart(primary).await;
    set.whole().await;

    set.pause(next);
    set.primary_other_than(next).await;
    until_inserted(&way, "after a freeze").await;
    set.resume(next);
    set.whole().await;

    set.restart_all().await;
    until_inserted(&way, "after a rolling restart").await;
}

#[tokio::test]
async fn an_isolated_primary_is_replaced_and_what_it_took_alone_is_rolled_back() {
    let set = ReplicaSet::start(3).await;
    let alone = set.primary().await;
    let proxy = set.proxy();
    let beside = on_the_network_of(&set).await;
    let with_it = through(&proxy, "test", "&retryWrites=false").await;
    until_inserted(&beside, "before").await;
    insert(&with_it, "warm").await.unwrap();

    set.isolate(alone);
    insert(&with_it, "alone").await.unwrap();
    set.primary_other_than(alone).await;
    until_inserted(&beside, "by the others").await;
    let knows_a_primary = async || set.command(alone, doc! { "hello": 1 }).await.unwrap().contains_key("primary");
    wait_until(SOON, "it notices", async || !knows_a_primary().await).await;
    until_inserted(&beside, "later").await;
    assert!(!knows_a_primary().await, "it does not learn of the other members either");
    set.heal();
    set.whole().await;
    until_inserted(&with_it, "after").await;
    let count = async |marker: &str| {
        let reply = with_it.run_command(doc! { "count": "things", "query": { "marker": marker } }).await.unwrap();
        reply.get_i32("n").unwrap()
    };
    // The insert was repeated if its reply was lost.
    assert!(count("alone").await == 0 && count("by the others").await > 0);
}

/// Seconds of processor time that a process has taken so far.
fn worked(pid: u32) -> f64 {
    let stat = procfs::process::Process::new(pid.cast_signed()).unwrap().stat().unwrap();
    (stat.utime + stat.stime) as f64 / procfs::ticks_per_second() as f64
}

/// A process that waits on a clock that is always late, or never due, would use all processor time.
async fn assert_idle(pid: u32) {
    let is_idle = async || {
        let (before, since) = (worked(pid), Instant::now());
        pause(MOMENT * 4).await;
        worked(pid) - before < 0.3 * since.elapsed().as_secs_f64()
    };
    wait_until(SOON, "it works for less than a third of the time", is_idle).await;
}

/// How far the times that a process logs are ahead, in minutes: of its newest line.
fn minutes_ahead(process: &Process) -> Option<i64> {
    let log = process.stderr();
    let stamp = log.lines().next_back()?.split_whitespace().next()?;
    let logged = bson::DateTime::parse_rfc3339_str(stamp).ok()?;
    Some((logged.timestamp_millis() - bson::DateTime::now().timestamp_millis() + 30_000).div_euclid(60_000))
}

#[tokio::test]
async fn processes_with_wrong_clocks_show_them_and_work() {
    let database = TestDatabase::new().await;
    let (ahead, behind) = (Clock::offset("+1h"), Clock::offset("-1h"));
    let start = |clock: &Clock, name: &str, args: &[&str]| {
        Process::start(name, args, &[&[("MONGODB_URI", database.uri())], &clock.environment()[..]].concat())
    };
    let mut worker = start(&ahead, "recruiter-worker", &["--builtins", "--heartbeat", "200ms", "--lease", "2s"]);
    let others = [start(&behind, "recruiter", &["run"]), start(&ahead, "recruiter-cleaner", &[])];
    wait_until(SOON, "they are ahead", async || minutes_ahead(&worker) == Some(60) && minutes_ahead(&others[1]) == Some(60)).await;
    wait_until(SOON, "it is behind", async || minutes_ahead(&others[0]) == Some(-60)).await;

    let store = local::store(&database).await;
    let started = Instant::now();
    let id = NewJob::of_class("sleep", doc! { "ms": 500 }).enqueue(&store).await.unwrap().id;
    let done = async || database.raw("archived").find_one(doc! { "_id": id }).await.unwrap();
    assert_eq!(wait_for(SOON, "it is done", done).await.get_str("why").unwrap(), "done");
    assert!(started.elapsed() >= Duration::from_millis(500), "timers are right: {:?}", started.elapsed());
    for process in others.iter().chain([&worker]) {
        assert_idle(process.pid()).await;
    }

    ahead.step("-2h");
    let seen = async || database.raw("roster").find_one(doc! {}).await.unwrap().unwrap().get_datetime("last_seen_at").copied().unwrap();
    // The clock jumps within a second.
    pause(MOMENT * 4).await;
    let before = seen().await;
    wait_until(SOON, "it goes on beating", async || seen().await > before).await;
    worker.stop().await;
    assert_eq!(minutes_ahead(&worker), Some(-120), "{}", worker.stderr());
}

#[tokio::test]
async fn a_member_may_have_a_wrong_clock() {
    let clock = Clock::offset("+1h");
    let set = ReplicaSet::start_with(&[&[], &[], &clock.environment()]).await;
    let minutes_ahead = async |member| {
        let local = *set.command(member, doc! { "hello": 1 }).await.unwrap().get_datetime("localTime").unwrap();
        (local.timestamp_millis() - bson::DateTime::now().timestamp_millis() + 30_000).div_euclid(60_000)
    };
    assert_eq!((minutes_ahead(0).await, minutes_ahead(1).await, minutes_ahead(2).await), (0, 0, 60));
    set.elect(2).await;
    let way = on_the_network_of(&set).await;
    until_inserted(&way, "by a clock that is ahead").await;
    assert_idle(set.pid(2)).await;
    clock.step("-1h");
    wait_until(SOON, "its clock has jumped", async || minutes_ahead(2).await == -60).await;
    set.elect(2).await;
    until_inserted(&way, "by a clock that is behind").await;
    assert_idle(set.pid(2)).await;
    set.step_down().await;
    until_inserted(&way, "by a clock that is right").await;
}
