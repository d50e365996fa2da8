//! Messages of applications: each subscriber gets every message once and in order.

use std::{collections::BTreeMap, time::Duration};

use bson::doc;
use nix::sys::signal::Signal;
use recruiter_common::{
    Pattern,
    messages::{From, Message, Messages, Position, PublishError, SubscribeError},
    shutdown::pause,
    store::Store,
};
use recruiter_dev::embedded::{EmbeddedMongo, Options};
use recruiter_tests::{
    local::{connect_args, prepared, store},
    mongo::{TestDatabase, temporary},
    processes::Process,
    promise,
    replica_set::ReplicaSet,
    wait::{SOON, wait_until},
};
use serde_json::Value;

use super::cli::recruiter as command;

fn pattern(text: &str) -> Pattern {
    Pattern::new(text).unwrap()
}

/// A moment ago: MongoDB holds what the other tests write only for some minutes.
fn begin(store: &Store) -> From {
    From::Since(store.now() - chrono::TimeDelta::seconds(5))
}

async fn next(messages: &mut Messages) -> Message {
    tokio::time::timeout(SOON, messages.next()).await.expect("a message arrives").unwrap()
}

async fn numbers(messages: &mut Messages, count: usize) -> Vec<i64> {
    let mut found = Vec::new();
    for _ in 0..count {
        found.push(next(messages).await.body.get_i64("n").unwrap());
    }
    found
}

async fn publish(store: &Store, topic: &str, n: i64) {
    store.publish_message(topic, &doc! { "n": n }).await.unwrap();
}

#[tokio::test]
async fn each_subscriber_gets_what_matches_once_and_in_order() {
    let (_database, store) = prepared().await;
    let begun = begin(&store);
    publish(&store, "news.sports.ski", 0).await;
    let mut sports = store.subscribe_to([pattern("news.sports.*")], From::Now).await.unwrap();
    let mut everything = store.subscribe_to([pattern("*")], From::Now).await.unwrap();
    for n in 1..=3 {
        publish(&store, if n == 2 { "news.arts" } else { "news.sports.ski" }, n).await;
    }
    let mixed = (4..=9_i64).map(|n| (if n % 2 == 0 { "news.sports.ski.jump" } else { r"strange \E[ topic" }, doc! { "n": n }));
    store.publish_messages(mixed).await.unwrap();
    assert_eq!(numbers(&mut sports, 5).await, [1, 3, 4, 6, 8]);
    assert_eq!(numbers(&mut everything, 9).await, [1, 2, 3, 4, 5, 6, 7, 8, 9]);
    let mut strange = store.subscribe_to([pattern(r"strange \E[ topic")], begun).await.unwrap();
    assert_eq!(numbers(&mut strange, 3).await, [5, 7, 9], "a replay");
}

/// Positions between envelopes and within them, through their text form.
#[tokio::test]
async fn a_subscriber_continues_after_any_message() {
    let (_database, store) = prepared().await;
    let begun = begin(&store);
    let mut first = store.subscribe_to([pattern("a.*")], From::Now).await.unwrap();
    store.publish_messages((0..5).map(|n: i64| ("a.b", doc! { "n": n }))).await.unwrap();
    publish(&store, "a.c", 5).await;
    store.publish_messages((6..9).map(|n: i64| ("a.b", doc! { "n": n }))).await.unwrap();
    let mut positions = Vec::new();
    for n in 0..9 {
        let message = next(&mut first).await;
        assert_eq!(message.body.get_i64("n").unwrap(), n);
        positions.push(message.position.to_string().parse::<Position>().unwrap());
    }
    publish(&store, "a.b", 9).await;
    // Positions within the first envelope of a stream that begins with a time.
    for received in 1..5 {
        let mut since = store.subscribe_to([pattern("a.*")], begun.clone()).await.unwrap();
        for _ in 1..received {
            next(&mut since).await;
        }
        let position = next(&mut since).await.position;
        let mut again = store.subscribe_to([pattern("a.*")], From::After(position)).await.unwrap();
        assert_eq!(numbers(&mut again, 1).await, [received], "the rest of the envelope");
    }
    for (received, position) in positions.into_iter().enumerate() {
        let mut again = store.subscribe_to([pattern("a.*")], From::After(position)).await.unwrap();
        let expected: Vec<i64> = (i64::try_from(received).unwrap() + 1..10).collect();
        assert_eq!(numbers(&mut again, expected.len()).await, expected, "after message {received}");
    }
}

#[tokio::test]
async fn what_is_not_possible_is_refused() {
    let (database, store) = prepared().await;
    for topic in ["", "a..b", "a.*", "a\0b", "x".repeat(257).as_str()] {
        assert!(matches!(store.publish_message(topic, &doc! {}).await, Err(PublishError::Topic(_))), "{topic:?}");
    }
    assert!(matches!(store.publish_message("a", &7).await, Err(PublishError::Body { .. })));
    assert!(matches!(store.publish_message("a", &BTreeMap::from([("n", u64::MAX)])).await, Err(PublishError::Body { .. })));
    let large = doc! { "x": "x".repeat(1024 * 1024) };
    assert!(matches!(store.publish_messages([("a", doc! {}), ("a", large)]).await, Err(PublishError::TooLarge { .. })));
    assert_eq!(database.count("messages", doc! {}).await, 0, "nothing was published");
    assert!(matches!(store.subscribe_to([], From::Now).await, Err(SubscribeError::NoTopic)));
    let nonsense = "00".parse::<Position>().unwrap();
    let refused = store.subscribe_to([pattern("a")], From::After(nonsense)).await.unwrap_err();
    assert!(matches!(refused, SubscribeError::NoPosition), "{refused:?}");
    // Documents that others have inserted stop no reader.
    let mut messages = store.subscribe_to([pattern("*")], From::Now).await.unwrap();
    for strange in [
        doc! { "messages": [{ "topic": "a" }] },
        doc! { "messages": [{ "topic": 7, "body": {} }, 5] },
        doc! {},
        doc! { "messages": { "topic": "a" } },
    ] {
        database.raw("messages").insert_one(strange).await.unwrap();
    }
    // A text that is no UTF-8.
    let invalid = doc! { "messages": [{ "topic": "a", "body": { "x": "QQQQ" } }] }.to_vec().unwrap();
    let invalid = invalid.into_iter().map(|byte| if byte == b'Q' { 0xff } else { byte }).collect();
    let invalid = bson::RawDocumentBuf::from_bytes(invalid).unwrap();
    database.raw("messages").clone_with_type::<bson::RawDocumentBuf>().insert_one(invalid).await.unwrap();
    database.raw("messages").insert_one(doc! { "messages": [{ "topic": "a.plain", "body": { "n": 1_i64 } }] }).await.unwrap();
    assert_eq!(numbers(&mut messages, 1).await, [1]);
    database.raw("messages").drop().await.unwrap();
    pause(Duration::from_millis(300)).await;
    publish(&store, "a", 2).await;
    assert_eq!(numbers(&mut messages, 1).await, [2], "the collection was dropped");
}

/// Other languages give envelopes ids of any type. A position within one is as exact.
#[tokio::test]
async fn a_subscriber_continues_within_an_envelope_whatever_its_id_is() {
    let (database, store) = prepared().await;
    let mut first = store.subscribe_to([pattern("a")], From::Now).await.unwrap();
    for id in [bson::Bson::from("order-2027-01"), 17.into(), doc! { "year": 2027 }.into()] {
        let messages: Vec<_> = (0..5).map(|n: i64| doc! { "topic": "a", "body": { "n": n } }).collect();
        database.raw("messages").insert_one(doc! { "_id": id, "messages": messages }).await.unwrap();
        for n in 0..5 {
            let message = next(&mut first).await;
            assert_eq!(message.body.get_i64("n").unwrap(), n);
            let position = message.position.to_string().parse::<Position>().unwrap();
            if n < 4 {
                let mut after = store.subscribe_to([pattern("a")], From::After(position)).await.unwrap();
                assert_eq!(next(&mut after).await.body.get_i64("n").unwrap(), n + 1);
            }
        }
    }
}

/// The validator refuses it, also in a database of an earlier release, in which the collection has none.
#[tokio::test]
async fn an_id_that_no_subscriber_could_read_is_refused() {
    let database = TestDatabase::new().await;
    store(&database).await.publish_message("a", &doc! {}).await.unwrap();
    let listed = doc! { "_id": "collections", "messages": { "$exists": true } };
    assert_eq!(database.count("metadata", listed).await, 1, "an earlier release would not take the validator for ours");
    let envelope = |size: usize| doc! { "_id": "i".repeat(size), "messages": [{ "topic": "a", "body": {} }] };
    for _ in 0..2 {
        for size in [4_096, 5 << 20] {
            let refused = database.raw("messages").insert_one(envelope(size)).await.unwrap_err();
            assert!(refused.to_string().contains("Document failed validation"), "{refused}");
        }
        database.database().run_command(doc! { "collMod": "messages", "validator": {} }).await.unwrap();
        drop(store(&database).await);
    }
    database.raw("messages").insert_one(envelope(4_000)).await.unwrap();
}

/// MongoDB refuses an event above 16 MB, and its event has three copies of the id. Without the validator.
#[tokio::test]
async fn an_envelope_whose_event_is_too_large_stops_no_subscriber() {
    let (database, store) = prepared().await;
    let mut first = store.subscribe_to([pattern("a")], From::Now).await.unwrap();
    let large = |id: usize, body: usize| {
        doc! { "_id": "i".repeat(id), "messages": [{ "topic": "a", "body": { "n": 0_i64, "x": "x".repeat(body) } }] }
    };
    for (id, body) in [(1 << 20, 14 << 20), (5_000, 1), (5 << 20, 1)] {
        database.raw("messages").insert_one(large(id, body)).bypass_document_validation(true).await.unwrap();
    }
    database
        .raw("messages")
        .insert_one(doc! { "_id": "x".repeat(4_000), "messages": [{ "topic": "a", "body": { "n": 1_i64 } }] })
        .await
        .unwrap();
    let message = next(&mut first).await;
    assert_eq!(message.body.get_i64("n").unwrap(), 1);
    publish(&store, "a", 2).await;
    assert_eq!(numbers(&mut first, 1).await, [2]);
    let mut after = store.subscribe_to([pattern("a")], From::After(message.position)).await.unwrap();
    assert_eq!(numbers(&mut after, 1).await, [2]);
}

/// MongoDB would delete the documents of an application that has a collection of this name.
#[tokio::test]
async fn a_collection_of_the_application_gets_no_expiry() {
    let (database, first) = prepared().await;
    let messages = database.raw("messages");
    messages.insert_one(doc! { "text": "hello", "expires_at": bson::DateTime::now() }).await.unwrap();
    let refused = first.publish_message("a", &doc! {}).await.unwrap_err();
    assert!(refused.to_string().contains("`messages`"), "{refused}");
    assert!(first.subscribe_to([pattern("a")], From::Now).await.is_err());
    database.raw("metadata").insert_one(doc! { "_id": "features", "messages": true }).await.unwrap();
    let refused = Store::connect(&connect_args(&database), "test").await.unwrap_err();
    assert!(recruiter_common::telemetry::chain(&refused).contains("`messages`"), "{refused}");
    assert_eq!(messages.list_index_names().await.unwrap(), ["_id_"], "also after another start");
    assert_eq!(messages.count_documents(doc! {}).await.unwrap(), 1);
}

/// The oplog has overtaken a subscriber that was away.
#[tokio::test]
async fn a_lost_history_is_an_error() {
    // The oplog is kept from the last checkpoint on, and there is one each minute otherwise.
    let options = Options { arguments: ["--oplogSize=1", "--syncdelay=1"].map(str::to_owned).into(), ..temporary() };
    let Ok(mongo) = EmbeddedMongo::start(options).await else { panic!("mongod starts") };
    let database = TestDatabase::on(&mongo.uri()).await;
    let store = store(&database).await;
    let mut messages = store.subscribe_to([pattern("a")], From::Now).await.unwrap();
    publish(&store, "a", 1).await;
    let position = next(&mut messages).await.position;
    drop(messages);
    let filler = doc! { "x": "x".repeat(1024 * 1024) };
    let lost = async || {
        for _ in 0..30 {
            database.raw("filler").insert_one(filler.clone()).await.unwrap();
        }
        matches!(store.subscribe_to([pattern("a")], From::After(position.clone())).await, Err(SubscribeError::HistoryLost))
    };
    wait_until(SOON, "the history is lost", lost).await;
    let since = store.now() - chrono::TimeDelta::hours(1);
    assert!(matches!(store.subscribe_to([pattern("a")], From::Since(since)).await, Err(SubscribeError::HistoryLost)));
    publish(&store, "a", 2).await;
}

/// Many publishers at a time: one order for all subscribers, and the order of each publisher in it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_subscribers_see_one_order() {
    const PUBLISHERS: i64 = 16;
    const EACH: i64 = 60;
    let (_database, store) = prepared().await;
    store.prepare_messages().await.unwrap();
    let mut subscribers = Vec::new();
    for _ in 0..2 {
        subscribers.push(store.subscribe_to([pattern("p.*")], From::Now).await.unwrap());
    }
    let publishers = (0..PUBLISHERS).map(|publisher| {
        let store = store.clone();
        tokio::spawn(async move {
            for n in 0..EACH {
                publish(&store, &format!("p.{publisher}"), n).await;
            }
        })
    });
    let publishers: Vec<_> = publishers.collect();
    let mut orders = Vec::new();
    for subscriber in &mut subscribers {
        let mut order = Vec::new();
        for _ in 0..PUBLISHERS * EACH {
            let message = next(subscriber).await;
            order.push((message.topic, message.body.get_i64("n").unwrap()));
        }
        orders.push(order);
    }
    for publisher in publishers {
        publisher.await.unwrap();
    }
    assert_eq!(orders[0], orders[1]);
    assert!(in_order(orders.remove(0)).values().all(|count| *count == EACH));
}

/// The number of messages of each publisher, all of which were received once and in order.
fn in_order(received: Vec<(String, i64)>) -> BTreeMap<String, i64> {
    let mut expected: BTreeMap<String, i64> = BTreeMap::new();
    let mut wrong = 0;
    for (topic, n) in received {
        let next = expected.entry(topic).or_default();
        wrong += u32::from(*next != n);
        *next = n + 1;
    }
    promise!(wrong == 0, "lost, repeated or out of order: {expected:?}");
    expected
}

/// Step-downs, and a primary that is killed, while messages are published and read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_failover_loses_repeats_or_reorders_a_message() {
    // On a busy machine an election may take longer than a publisher waits for it: then nothing is known about its messages.
    wait_until(SOON, "no publisher gives up", messages_through_failovers).await;
}

/// Whether every publisher was told of the fate of its messages.
async fn messages_through_failovers() -> bool {
    const PUBLISHERS: i64 = 4;
    let mut set = ReplicaSet::start(3).await;
    let database = TestDatabase::on(&set.uri()).await;
    let store = store(&database).await;
    let mut messages = store.subscribe_to([pattern("p.*")], From::Now).await.unwrap();
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let publishers: Vec<_> = (0..PUBLISHERS)
        .map(|publisher| {
            let (store, stopped) = (store.clone(), stopped.clone());
            tokio::spawn(async move {
                let (topic, mut n) = (format!("p.{publisher}"), 0);
                while !*stopped.borrow() {
                    let (more, published) = if n % 10 == 9 {
                        (5, store.publish_messages((n..n + 5).map(|n| (topic.clone(), doc! { "n": n }))).await.map(drop))
                    } else {
                        (1, store.publish_message(&topic, &doc! { "n": n }).await.map(drop))
                    };
                    if published.is_err() {
                        return None;
                    }
                    n += more;
                }
                Some(n)
            })
        })
        .collect();
    let (counted, count) = tokio::sync::watch::channel(0);
    let reader = tokio::spawn(async move {
        let mut received = Vec::new();
        loop {
            let message = next(&mut messages).await;
            if message.topic == "p.end" {
                return received;
            }
            received.push((message.topic, message.body.get_i64("n").unwrap()));
            counted.send_replace(received.len());
        }
    });
    let more = async || {
        let enough = *count.borrow() + 50;
        wait_until(SOON, "more messages arrive", async || *count.borrow() >= enough).await;
    };
    more().await;
    set.step_down().await;
    more().await;
    let primary = set.primary().await;
    set.kill(primary).await;
    set.primary_other_than(primary).await;
    more().await;
    stop.send_replace(true);
    let mut sent = BTreeMap::new();
    for (number, publisher) in publishers.into_iter().enumerate() {
        sent.insert(format!("p.{number}"), publisher.await.unwrap());
    }
    let Some(sent) = sent.into_iter().map(|(topic, n)| n.map(|n| (topic, n))).collect::<Option<BTreeMap<_, _>>>() else { return false };
    publish(&store, "p.end", 0).await;
    assert_eq!(in_order(reader.await.unwrap()), sent);
    true
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_commands_publish_and_subscribe() {
    let (database, _) = prepared().await;
    let mut subscriber = Process::on(&database, "recruiter", &["subscribe", "news.*", "--json"]);
    let publish = |topic: &str, body: &str| assert_eq!(command(&database, &["publish", topic, body]).code, 0);
    wait_until(SOON, "it listens", async || {
        publish("news.first", "{}");
        subscriber.stdout().contains("news.first")
    })
    .await;
    publish("news.ski", r#"{"title": "Snow"}"#);
    publish("other", "{}");
    for bad in [["publish", "news.*", "{}"], ["publish", "news", "7"]] {
        assert_eq!(command(&database, &bad).code, 2);
    }
    publish("news.last", "{}");
    wait_until(SOON, "the last one arrives", async || subscriber.stdout().contains("news.last")).await;
    subscriber.signal(Signal::SIGINT);
    assert!(subscriber.wait_exit(SOON).await.success());
    let said = subscriber.stdout();
    let mut lines: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    lines.retain(|line| line["topic"] != "news.first");
    assert!(lines.len() == 2 && lines[0]["topic"] == "news.ski" && lines[0]["body"]["title"] == "Snow", "{said}");
    assert!(lines[0]["position"].as_str().unwrap().parse::<Position>().is_ok());
}
