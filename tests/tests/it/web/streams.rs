//! Events and messages as server-sent events.

use std::time::Duration;

use bson::{Document, doc};
use recruiter_common::{NewJob, limits::Paused};
use recruiter_tests::{
    http::{Api, Stream, answer},
    local::prepared,
    mongo::TestDatabase,
    wait::{SOON, wait_until},
};
use reqwest::Method;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use super::{super::cli::recruiter, OPEN};

/// The topics of the next events.
async fn topics(stream: &mut Stream, count: usize) -> Vec<String> {
    let mut topics = Vec::new();
    for _ in 0..count {
        topics.push(stream.data().await.unwrap().data["topic"].as_str().unwrap().to_owned());
    }
    topics
}

/// Processes notice within a second that there is a subscriber.
async fn is_subscribed(database: &TestDatabase) {
    database.until("metadata", doc! { "_id": "subscribers" }, 1, "there is a subscription").await;
    recruiter_common::shutdown::pause(Duration::from_millis(1_500)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_come_to_all_readers_from_one_subscription_and_again_after_a_lost_connection() {
    let (database, store) = prepared().await;
    let api = Api::serve(&database, &OPEN).await;
    let mut all = api.open("/events", None).await;
    let begin = all.next().await.unwrap();
    assert!(!begin.id.is_empty() && begin.data == Value::Null, "the place comes at once: {begin:?}");
    let mut others = Vec::new();
    for _ in 0..50 {
        others.push(api.open("/events?topic=job.enqueued.a&topic=pause.*", None).await);
    }
    is_subscribed(&database).await;
    let subscribers = database.only("metadata", doc! { "_id": "subscribers" }).await;
    assert_eq!(subscribers.get_document("by").unwrap().len(), 1, "one for all readers: {subscribers}");
    for class in ["a", "b", "a"] {
        NewJob::of_class(class, doc! {}).enqueue(&store).await.unwrap();
    }
    store.pauses().pause(&Paused::Everything, "ada", None).await.unwrap();
    let expected = ["job.enqueued.a", "job.enqueued.b", "job.enqueued.a", "pause.added"];
    assert_eq!(topics(&mut all, 4).await, expected);
    for other in &mut others {
        assert_eq!(topics(other, 3).await, [expected[0], expected[2], expected[3]]);
    }
    drop((all, others));
    // Behind the begin, and behind an event.
    let mut again = api.open("/events", Some(&begin.id)).await;
    let mut sent = Vec::new();
    for _ in 0..4 {
        sent.push(again.data().await.unwrap());
    }
    assert_eq!(sent.iter().map(|sent| sent.data["topic"].as_str().unwrap()).collect::<Vec<_>>(), expected);
    assert!(sent.iter().all(|sent| sent.event.is_empty() && sent.data["at"]["$date"].is_string()), "{sent:?}");
    let mut third = api.open("/events", Some(&sent[1].id)).await;
    assert_eq!(third.next().await.unwrap().id, sent[1].id);
    assert_eq!([third.data().await.unwrap(), third.data().await.unwrap()], sent[2..]);
    // Another process knows nothing of these.
    let other = Api::serve(&database, &[]).await;
    let mut late = other.open("/events", Some(&sent[1].id)).await;
    let missed = late.data().await.unwrap();
    assert_eq!((missed.event.as_str(), missed.data), ("missed", json!({ "missed": null })));
    for (path, last, said) in
        [("/events?topic=a..b", None, "topic"), ("/events?x=1", None, "no parameter"), ("/events", Some("x"), "Last-Event-ID")]
    {
        let request = api.request(Method::GET, path);
        let (status, problem) = answer(if let Some(last) = last { request.header("Last-Event-ID", last) } else { request }).await;
        assert!(status == 400 && problem["detail"].as_str().unwrap().contains(said), "{problem}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_redacted_is_not_in_events_and_a_stop_ends_the_streams() {
    let (database, store) = prepared().await;
    recruiter(&database, &["redaction", "set", "secret"]).succeeded();
    let mut api = Api::serve(&database, &OPEN).await;
    let (mut events, mut messages) = (api.open("/events", None).await, api.open("/messages?topic=*", None).await);
    is_subscribed(&database).await;
    NewJob::of_class("secret", doc! {}).enqueue(&store).await.unwrap();
    assert_eq!(topics(&mut events, 1).await, ["job.enqueued.secret"]);
    api.process.terminate();
    while events.next().await.is_some() {}
    while messages.next().await.is_some() {}
    assert_eq!(api.process.wait_exit(SOON).await.code(), Some(0));
    let ended = async || {
        let subscribers = database.only("metadata", doc! { "_id": "subscribers" }).await;
        subscribers.get_document("by").map_or(true, Document::is_empty)
    };
    wait_until(SOON, "the subscription has ended", ended).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_message_comes_once_and_in_order_whatever_connection_is_lost() {
    let (database, store) = prepared().await;
    // No longer ago: a small oplog holds little.
    let begin = (store.now() - chrono::TimeDelta::seconds(1)).to_rfc3339_opts(chrono::SecondsFormat::Secs, true);
    let api = Api::serve(&database, &OPEN).await;
    let publish = async |topic: &str, n: i32| api.post("/messages", &json!({ "topic": topic, "body": { "n": n } })).await;
    let mut first = api.open("/messages?topic=news.*", None).await;
    assert_eq!(publish("news.a", 1).await, (200, json!({ "topic": "news.a", "outcome": "published" })));
    publish("other", 2).await;
    publish("news.b", 3).await;
    let one = first.data().await.unwrap();
    assert_eq!((&one.data["topic"], &one.data["body"]), (&json!("news.a"), &json!({ "n": 1 })));
    drop(first);
    publish("news.c", 4).await;
    let mut again = api.open("/messages?topic=news.*", Some(&one.id)).await;
    let [two, three] = [again.data().await.unwrap(), again.data().await.unwrap()];
    assert_eq!([&two.data["body"]["n"], &three.data["body"]["n"]], [&json!(3), &json!(4)]);
    let mut since = api.open(&format!("/messages?topic=news.c&since={begin}"), None).await;
    assert_eq!(since.data().await.unwrap().data["topic"], "news.c");
    // A quiet stream goes on as well.
    let idle = loop {
        let sent = again.next().await.unwrap();
        if !sent.id.is_empty() {
            break sent;
        }
    };
    assert_eq!(idle.data, Value::Null);
    publish("news.d", 5).await;
    assert_eq!(again.data().await.unwrap().data["body"]["n"], 5);
    for (path, last, said) in [
        ("/messages", None, "no topic"),
        ("/messages?topic=a..b", None, "topic"),
        ("/messages?topic=a&since=noon", None, "neither an instant"),
        ("/messages?topic=a", Some("x"), "not the position"),
        ("/messages?topic=a", Some("82AB"), "position"),
    ] {
        let request = api.request(Method::GET, path);
        let (status, problem) = answer(if let Some(last) = last { request.header("Last-Event-ID", last) } else { request }).await;
        assert!(status == 400 && problem["detail"].as_str().unwrap().contains(said), "{path}: {problem}");
    }
    let large = "x".repeat(2 << 20);
    for (body, said) in [
        (json!({}), "`topic` and a `body`"),
        (json!({ "topic": "a" }), "`topic` and a `body`"),
        (json!({ "topic": "", "body": {} }), "topic"),
        (json!({ "topic": "a.*", "body": {} }), "topic"),
        (json!({ "topic": "a", "body": [1] }), "expected a map"),
        (json!({ "topic": "a", "body": {}, "key": 1 }), "unknown field `key`"),
        (json!({ "topic": "a", "body": { "x": large } }), "more than the maximum"),
    ] {
        let (status, problem) = api.post("/messages", &body).await;
        assert!(status == 422 && problem["detail"].as_str().unwrap().contains(said), "{problem}");
    }
}

/// Its connection would otherwise be kept for ever, with what it does not read.
#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_reads_nothing_is_disconnected() {
    let (database, _store) = prepared().await;
    let api = Api::serve(&database, &OPEN).await;
    let at = api.at.strip_prefix("http://").unwrap();
    let mut stuck = TcpStream::connect(at).await.unwrap();
    stuck.write_all(format!("GET /api/v1/messages?topic=a HTTP/1.1\r\nHost: {at}\r\n\r\n").as_bytes()).await.unwrap();
    let mut begin = [0; 12];
    stuck.read_exact(&mut begin).await.unwrap();
    assert_eq!(&begin, b"HTTP/1.1 200");
    let body = json!({ "topic": "a", "body": { "x": "x".repeat(900_000) } });
    // More than the buffers of a socket have.
    for _ in 0..20 {
        assert_eq!(api.post("/messages", &body).await.0, 200);
    }
    let port = stuck.local_addr().unwrap().port();
    // The connections of this machine: number, local address, remote address, state (01: established).
    let is_its = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        matches!(words[..], [_, _, remote, "01", ..] if remote.ends_with(&format!(":{port:04X}")))
    };
    let is_open = || std::fs::read_to_string("/proc/net/tcp").unwrap().lines().any(is_its);
    assert!(is_open(), "it is there");
    let is_closed = async || !is_open();
    wait_until(SOON, "it is disconnected", is_closed).await;
    assert_eq!(api.get("/jobs").await.0, 200);
}
