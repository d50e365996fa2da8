//! Consumer groups: each message becomes exactly one job, also if recruiters die.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bson::{Document, doc};
use rand::RngExt as _;
use recruiter_common::{NewJob, Pattern, Unique, Workable, consumers::ConsumerError, messages::From, shutdown::pause, store::Store};
use recruiter_tests::{
    local::{Local, prepared, store},
    mongo::{TestDatabase, own_mongod},
    processes::Recruiters,
    promise,
    wait::{SOON, wait_until},
    workable,
};
use recruiter_worker::{Context, Executable, NotDone, Worker};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::cli::recruiter;

/// Counts the executions for each message.
#[derive(Serialize, Deserialize)]
struct Handle {
    topic: String,
    body: Numbered,
}

#[derive(Serialize, Deserialize)]
struct Numbered {
    n: i32,
}
workable!(Handle);

type Handled = Arc<Mutex<HashMap<(String, i32), u32>>>;

impl Executable for Handle {
    type State = Handled;

    async fn execute(&self, handled: &Handled, _: &Context) -> Result<(), NotDone> {
        *handled.lock().unwrap().entry((self.topic.clone(), self.body.n)).or_default() += 1;
        Ok(())
    }
}

fn handle() -> NewJob {
    NewJob::of_class(Handle::CLASS, doc! {})
}

fn patterns<const N: usize>(patterns: [&str; N]) -> [Pattern; N] {
    patterns.map(|pattern| Pattern::new(pattern).unwrap())
}

fn worker(database: &TestDatabase) -> (Handled, Local) {
    let handled = Handled::default();
    let worker = Worker::new().register::<Handle>(handled.clone()).unwrap();
    (handled, Local::worker(database, worker, &[]))
}

async fn publish(store: &Store, topic: &str, numbers: impl IntoIterator<Item = i32>) {
    store.publish_messages(numbers.into_iter().map(|n| (topic, doc! { "n": n }))).await.unwrap();
}

/// Messages are published one by one and in batches while the leader is killed again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_message_becomes_one_job_whoever_leads() {
    let database = TestDatabase::of_its_own().await;
    let store = store(&database).await;
    database.limit_transactions(3).await;
    store.consumers().declare("all", patterns(["orders.*"]), handle(), From::Now).await.unwrap();
    let (handled, worker) = worker(&database);
    let mut recruiters = Recruiters::start(&database);
    let enough = Arc::new(AtomicBool::new(false));
    let publishing = {
        let (store, enough) = (store.clone(), enough.clone());
        tokio::spawn(async move {
            let mut n = 0;
            while n <= 500 || !enough.load(Ordering::Relaxed) {
                let together = if n % 3 == 0 { 1 } else { 40 };
                publish(&store, "orders.placed", n..n + together).await;
                publish(&store, "elsewhere", [n]).await;
                n += together;
                pause(Duration::from_millis(20)).await;
            }
            n
        })
    };
    database.until("metadata", doc! { "_id": "recruiter" }, 1, "a recruiter leads").await;
    for _ in 0..6 {
        pause(Duration::from_millis(rand::rng().random_range(900..2_200))).await;
        wait_until(SOON, "another recruiter leads", async || recruiters.kill_leader().await).await;
    }
    enough.store(true, Ordering::Relaxed);
    let published = publishing.await.unwrap();
    let all = usize::try_from(published).unwrap();
    wait_until(SOON, "every message was handled", async || handled.lock().unwrap().len() >= all).await;
    database.until("scheduled", doc! {}, 0, "no job waits").await;
    let handled = handled.lock().unwrap().clone();
    promise!(handled.len() == all && handled.values().all(|times| *times == 1), "a message became several jobs");
    promise!((0..published).all(|n| handled.contains_key(&("orders.placed".to_owned(), n))), "a message became no job");
    assert_eq!(database.only("consumers", doc! {}).await.get_i64("forwarded").unwrap(), i64::from(published));
    drop(recruiters);
    worker.stop().await;
}

/// An envelope of another program: its `_id` is a text, and one transaction cannot make jobs of all its messages.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_message_of_a_large_envelope_becomes_one_job() {
    let mongod = own_mongod().await;
    for is_killed in [false, true] {
        let database = TestDatabase::on(&mongod.uri()).await;
        let store = store(&database).await;
        database.limit_transactions(3).await;
        let declare = async || store.consumers().declare("g", patterns(["a"]), handle(), From::Now).await.unwrap();
        declare().await;
        let mut recruiters = Recruiters::start(&database);
        database.until("metadata", doc! { "_id": "recruiter" }, 1, "a recruiter leads").await;
        let messages: Vec<Document> = (0..4_000).map(|n| doc! { "topic": "a", "body": { "n": n } }).collect();
        let envelope = doc! { "_id": "a text", "at": bson::DateTime::now(), "messages": messages };
        database.raw("messages").insert_one(envelope).await.unwrap();
        wait_until(SOON, "the first are jobs", async || database.count("scheduled", doc! {}).await > 0).await;
        if is_killed {
            wait_until(SOON, "the leader is killed", async || recruiters.kill_leader().await).await;
        } else {
            declare().await;
        }
        publish(&store, "a", [4_000]).await;
        database.until("scheduled", doc! { "workable.parameters.body.n": 4_000 }, 1, "the message after them is a job").await;
        let mut all = numbers(&database, "generic").await;
        all.sort_unstable();
        assert!(all.iter().copied().eq(0..=4_000), "{} jobs", all.len());
        assert_eq!(database.only("consumers", doc! {}).await.get_i64("forwarded").unwrap(), 4_001);
    }
}

/// Each group gets every message of its topics, also those that were published before a recruiter ran; a change keeps the position.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn groups_are_independent_and_continue_where_they_were() {
    let (database, store) = prepared().await;
    publish(&store, "a.x", [0]).await;
    store.consumers().declare("one", patterns(["a.*"]), handle().in_group("one"), From::Now).await.unwrap();
    store.consumers().declare("two", patterns(["*.x", "c"]), handle().in_group("two").tag("t"), From::Now).await.unwrap();
    publish(&store, "a.x", [1, 2]).await;
    publish(&store, "b.x", [3]).await;
    let running = Local::recruiter(&database, &[]);
    let jobs = async |group: &str| database.count("scheduled", doc! { "group": group }).await;
    wait_until(SOON, "all have become jobs", async || (jobs("one").await, jobs("two").await) == (2, 3)).await;
    let job = database.only("scheduled", doc! { "workable.parameters.topic": "b.x" }).await;
    assert_eq!(job.get_document("workable").unwrap().get_document("parameters").unwrap(), &doc! { "topic": "b.x", "body": { "n": 3 } });
    assert_eq!(job.get_array("tags").unwrap().len(), 1);
    // A change of the job and of the topics holds for later messages, and no message comes twice.
    store.consumers().declare("one", patterns(["c"]), handle().in_group("changed"), From::Now).await.unwrap();
    wait_until(SOON, "the change is known", async || {
        publish(&store, "c", [4]).await;
        jobs("changed").await > 0
    })
    .await;
    assert_eq!(jobs("one").await, 2);
    running.stop().await;
    // A graceful stop and a new leader: nothing twice, nothing lost.
    publish(&store, "z.x", [5]).await;
    let running = Local::recruiter(&database, &[]);
    publish(&store, "z.x", [6]).await;
    wait_until(SOON, "it continues", async || numbers(&database, "two").await.contains(&6)).await;
    let all: Vec<i32> = numbers(&database, "two").await;
    assert_eq!(all.iter().filter(|n| **n == 5).count(), 1, "{all:?}");
    running.stop().await;
}

async fn numbers(database: &TestDatabase, group: &str) -> Vec<i32> {
    let found = database.all("scheduled", doc! { "group": group }).await;
    let number = |job: &Document| job.get_document("workable")?.get_document("parameters")?.get_document("body")?.get_i32("n");
    found.iter().map(|job| number(job).unwrap()).collect()
}

/// The command line: set, list, reset with the messages of before, and remove.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_set_list_reset_and_remove_groups() {
    let (database, store) = prepared().await;
    publish(&store, "orders.placed", [1]).await;
    let set = ["consumers", "set", "billing", "--topic", "orders.*", "--job", r#"{"class": "Handle", "group": "billing"}"#];
    assert_eq!(recruiter(&database, &set).code, 0);
    let running = Local::recruiter(&database, &[]);
    let listed = || serde_json::from_str::<Value>(&recruiter(&database, &["consumers", "list", "--json"]).out).unwrap();
    assert_eq!(
        (listed()["name"].as_str(), listed()["messages"].as_i64(), listed()["topics"][0].as_str()),
        (Some("billing"), Some(0), Some("orders.*"))
    );
    publish(&store, "orders.placed", [2]).await;
    wait_until(SOON, "it has become a job", async || listed()["messages"] == 1).await;
    let dry = recruiter(&database, &["consumers", "reset", "billing", "--since", "1h", "--dry-run"]);
    assert!(dry.code == 0 && dry.out.contains("would continue"), "{}{}", dry.out, dry.err);
    assert_eq!(listed()["messages"], 1);
    assert_eq!(recruiter(&database, &["consumers", "reset", "billing", "--since", "1h"]).code, 0);
    wait_until(SOON, "both are there again", async || listed()["messages"] == 3).await;
    assert_eq!(numbers(&database, "billing").await.len(), 3);
    assert!(recruiter(&database, &["consumers", "list"]).out.contains("orders.*"));
    assert!(recruiter(&database, &["consumers", "remove", "billing", "--dry-run"]).out.contains("would remove"));
    assert_eq!(recruiter(&database, &["consumers", "remove", "billing"]).code, 0);
    for args in [["consumers", "remove", "billing"], ["consumers", "reset", "billing"]] {
        let said = recruiter(&database, &args);
        assert!(said.code == 1 && said.err.contains("there is no consumer group"), "{}", said.err);
    }
    assert!(recruiter(&database, &["consumers", "list"]).out.contains("there is no consumer group"));
    running.stop().await;
}

/// A group that cannot continue says why, and the others go on; so do they beside documents that are not groups.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_that_cannot_continue_says_why_and_stops_no_other() {
    let (database, store) = prepared().await;
    store.consumers().declare("good", patterns(["a"]), handle(), From::Now).await.unwrap();
    store.consumers().declare("gone", patterns(["a"]), handle(), From::Now).await.unwrap();
    let position = database.only("consumers", doc! { "_id": "gone" }).await.get_str("position").unwrap().to_owned();
    // A position that no MongoDB has given.
    database.raw("consumers").update_one(doc! { "_id": "gone" }, doc! { "$set": { "position": "8265" } }).await.unwrap();
    for wrong in [
        doc! { "_id": "empty" },
        doc! { "_id": "topics", "topics": ["a..b"], "job": { "class": "x" }, "position": &position, "revision": 1_i64 },
        doc! { "_id": "job", "topics": ["a"], "job": { "class": "x", "colour": 1 }, "position": &position, "revision": 1_i64 },
        doc! { "_id": "position", "topics": ["a"], "job": { "class": "x" }, "position": "here", "revision": 1_i64 },
        doc! { "_id": 7 },
    ] {
        database.raw("consumers").insert_one(wrong).await.unwrap();
    }
    let running = Local::recruiter(&database, &[]);
    publish(&store, "a", [1]).await;
    database.until("scheduled", doc! {}, 1, "the good one goes on").await;
    let problem = async || database.only("consumers", doc! { "_id": "gone" }).await.get_document("problem").cloned();
    wait_until(SOON, "the problem is noted", async || problem().await.is_ok()).await;
    let listed = recruiter(&database, &["consumers", "list"]).out;
    assert!(listed.contains("has stopped") && listed.contains("not valid"), "{listed}");
    store.consumers().reset("gone", From::Now).await.unwrap();
    wait_until(SOON, "it goes on", async || {
        publish(&store, "a", [2]).await;
        database.only("consumers", doc! { "_id": "gone" }).await.get_i64("forwarded").unwrap() > 0
    })
    .await;
    assert!(problem().await.is_err());
    running.stop().await;
}

/// A message that is too large for a job stops nothing; and the position follows the oplog while there is no message.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_cannot_be_a_job_is_skipped_and_an_idle_group_keeps_up() {
    let (database, store) = prepared().await;
    store.consumers().declare("g", patterns(["a"]), handle(), From::Now).await.unwrap();
    let running = Local::recruiter(&database, &[]);
    let body = doc! { "text": "x".repeat(4_500_000) };
    let messages = [doc! { "topic": "a", "body": body }, doc! { "topic": "a", "body": { "n": 1 } }];
    database.raw("messages").insert_one(doc! { "at": bson::DateTime::now(), "messages": messages.to_vec() }).await.unwrap();
    database.until("scheduled", doc! {}, 1, "the next message is a job").await;
    let group = async || store.consumers().list().await.unwrap().remove(0).1.unwrap();
    assert_eq!((group().await.forwarded, group().await.skipped), (1, 1));
    let before = group().await.position;
    wait_until(SOON * 2, "the position moves without a message", async || {
        database.raw("elsewhere").insert_one(doc! {}).await.unwrap();
        group().await.position != before
    })
    .await;
    publish(&store, "a", [2]).await;
    wait_until(SOON, "the message after that", async || numbers(&database, "generic").await.len() == 2).await;
    // Removed and declared again: another group, with any revision.
    assert!(store.consumers().remove("g").await.unwrap());
    store.consumers().declare("g", patterns(["a"]), handle(), From::Now).await.unwrap();
    publish(&store, "a", [3]).await;
    wait_until(SOON, "the message of the new group", async || numbers(&database, "generic").await.contains(&3)).await;
    running.stop().await;
}

#[tokio::test]
async fn wrong_groups_are_refused_with_the_reason() {
    let (database, store) = prepared().await;
    let wrong: [(&str, NewJob, &str); 5] = [
        ("", handle(), "is empty"),
        ("a\0b", handle(), "NUL"),
        ("a", handle().unique(Unique::by_key("k")), "not the job"),
        ("a", handle().after(Duration::from_secs(1)), "not the job"),
        ("a", NewJob::bundle_of_class("x", [doc! {}]), "bundle"),
    ];
    for (name, job, said) in wrong {
        let problem = store.consumers().declare(name, patterns(["a"]), job, From::Now).await.unwrap_err().to_string();
        assert!(problem.contains(said), "{problem}");
    }
    let no_topic = store.consumers().declare("a", [], handle(), From::Now).await;
    assert!(no_topic.unwrap_err().to_string().contains("no topic"));
    assert!(matches!(store.consumers().reset("nobody", From::Now).await, Err(ConsumerError::Unknown(_))));
    for (args, said) in [
        (["consumers", "set", "a", "--topic", "a..b", "--job", r#"{"class": "x"}"#], "topic"),
        (["consumers", "set", "a", "--topic", "a", "--job", "{}"], "class"),
        (["consumers", "set", "a", "--topic", "a", "--job", "nonsense"], "--job"),
        (["consumers", "set", "a", "--topic", "a", "--job", r#"{"class": "x", "colour": 1}"#], "colour"),
        (["consumers", "set", "", "--topic", "a", "--job", r#"{"class": "x"}"#], "is empty"),
        (["consumers", "set", "a", "--topic", "a", "--job", r#"{"class": "x", "after": "5m"}"#], "not the job"),
    ] {
        let refused = recruiter(&database, &args);
        assert!(refused.code == 2 && refused.err.contains(said), "{args:?}: {}", refused.err);
    }
    assert_eq!(database.count("consumers", doc! {}).await, 0);
}
