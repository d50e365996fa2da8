//! The faults that the failure tests rely on happen, and nothing else does.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
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
use recruiter_common::shutdown::pause;
use recruiter_tests::{
    mongo::TestDatabase,
    mongosh,
    proxy::{Action, Proxy},
    wait::wait_until,
};
use tokio::{net::TcpStream, time::timeout};

const SOON: Duration = Duration::from_secs(20);
/// In this time anything on loopback that nothing holds up is done.
const MOMENT: Duration = Duration::from_millis(500);

async fn through(proxy: &Proxy, database: &str, options: &str) -> Database {
    Client::with_uri_str(proxy.uri(database) + options).await.unwrap().default_database().unwrap()
}

/// A database, a proxy in front of it, and the way through it for a driver that repeats nothing by itself.
async fn behind_a_proxy() -> (TestDatabase, Proxy, Database) {
    let database = TestDatabase::new().await;
    let proxy = Proxy::before(database.uri()).await;
    let way = through(&proxy, database.name(), "&retryWrites=false&retryReads=false").await;
    insert(&way, "warm").await.unwrap();
    (database, proxy, way)
}

async fn insert(way: &Database, marker: &str) -> Result<Document> {
    way.run_command(doc! { "insert": "things", "documents": [{ "marker": marker }] }).await
}

async fn there(database: &TestDatabase, marker: &str) -> u64 {
    database.raw("things").count_documents(doc! { "marker": marker }).await.unwrap()
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
    assert_eq!(database.raw("others").count_documents(doc! {}).await.unwrap(), 2_001);
}

#[tokio::test]
async fn monitors_stream_through_it() {
    let (_database, proxy, _) = behind_a_proxy().await;
    let streamed = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&streamed);
    let mut options = ClientOptions::parse(proxy.uri("")).await.unwrap();
    options.heartbeat_freq = Some(Duration::from_millis(500));
    options.sdam_event_handler = Some(EventHandler::callback(move |event| match event {
        SdamEvent::ServerHeartbeatSucceeded(beat) if beat.awaited => drop(count.fetch_add(1, Ordering::Relaxed)),
        SdamEvent::ServerHeartbeatFailed(beat) => panic!("{beat:?}"),
        _ => {}
    }));
    let client = Client::with_options(options).unwrap();
    wait_until(SOON, "three awaited heartbeats", async || streamed.load(Ordering::Relaxed) >= 3).await;
    drop(client);
}

#[tokio::test]
async fn the_shell_with_its_older_handshake_stays_on_it() {
    let (database, proxy, _) = behind_a_proxy().await;
    let seen = proxy.arm(Action::LoseReply, 0..0, |request| request.is("insert", "things"));
    let hosts = mongosh::eval(&proxy.uri(database.name()), "db.things.insertOne({marker: 'shell'}); print(db.hello().hosts, db.hello().me)");
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
    let waiting = timeout(MOMENT, insert(&way, "stalled"));
    waiting.await.unwrap_err();
    stalled.fired().await;
    assert_eq!(there(&database, "stalled").await, 1);
    insert(&way, "next").await.unwrap();
}

#[tokio::test]
async fn a_stalled_request_arrives_after_its_client_has_gone() {
    let (database, proxy, way) = behind_a_proxy().await;
    let late = proxy.arm(Action::StallRequest(MOMENT), 1..=1, |request| request.is("insert", "things"));
    timeout(MOMENT / 5, insert(&way, "late")).await.unwrap_err();
    way.client().clone().shutdown().immediate(true).await;
    assert_eq!((late.count(), there(&database, "late").await), (1, 0));
    wait_until(SOON, "it arrives", async || there(&database, "late").await == 1).await;
}

#[tokio::test]
async fn a_severed_line_refuses_everybody_until_it_is_healed() {
    let (database, proxy, way) = behind_a_proxy().await;
    let mut open = TcpStream::connect(&proxy.listeners()[0]).await.unwrap();
    proxy.sever();
    let closed = timeout(SOON, tokio::io::AsyncReadExt::read(&mut open, &mut [0; 1])).await.unwrap();
    assert_eq!(closed.unwrap_or(0), 0);
    let refused = TcpStream::connect(&proxy.listeners()[0]).await.unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    let asked = Instant::now();
    timeout(SOON * 2, async { while insert(&way, "severed").await.is_ok() {} }).await.unwrap();
    assert!(asked.elapsed() < SOON * 2);

    proxy.heal();
    wait_until(SOON, "it is healed", async || insert(&way, "healed").await.is_ok()).await;
    assert_eq!((there(&database, "severed").await, there(&database, "healed").await), (0, 1));
    // Connections break even when the line is whole again before anybody looks.
    proxy.sever();
    proxy.heal();
    insert(&way, "broken").await.unwrap_err();
    wait_until(SOON, "it is healed", async || insert(&way, "again").await.is_ok()).await;
}

#[tokio::test]
async fn a_black_hole_holds_everything_back_until_it_is_healed() {
    let (database, proxy, way) = behind_a_proxy().await;
    proxy.blackhole();
    let (given, late) = (way.clone(), tokio::spawn(async move { insert(&way, "held").await }));
    TcpStream::connect(&proxy.listeners()[0]).await.unwrap();
    pause(MOMENT).await;
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
    pause(MOMENT).await;
    assert!(!late.is_finished());
    proxy.heal();
    timeout(SOON, late).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn a_slow_line_is_slow() {
    let (database, proxy, way) = behind_a_proxy().await;
    proxy.slow(Duration::from_millis(50), 64_000);
    let asked = Instant::now();
    way.run_command(doc! { "ping": 1 }).await.unwrap();
    assert!((100..1_000).contains(&asked.elapsed().as_millis()), "{:?}", asked.elapsed());
    insert(&way, &"x".repeat(64_000)).await.unwrap();
    assert!(asked.elapsed() >= Duration::from_millis(1_200), "{:?}", asked.elapsed());
    proxy.heal();
    let asked = Instant::now();
    insert(&way, "quick").await.unwrap();
    assert!(asked.elapsed() < MOMENT, "{:?}", asked.elapsed());
    assert_eq!(there(&database, "quick").await, 1);
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
