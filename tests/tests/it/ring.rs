//! Events: who gets which, what a late or slow reader is told, and that they cost nothing without a subscriber.

use std::time::Duration;

use bson::{Document, Timestamp, doc, oid::ObjectId};
use recruiter_common::{
    JobId, NewJob, Pattern, Unique,
    events::{Event, Events, EventsError, Received},
    limits::Paused,
    shutdown::pause,
};
use recruiter_tests::{
    local::{Local, prepared},
    processes::Process,
    wait::{SOON, in_a_few_tries, wait_until},
    workable,
};
use recruiter_worker::{Context, Executable, NotDone, Workable, Worker};
use serde::{Deserialize, Serialize};

use super::cli::recruiter as command;

#[derive(Serialize, Deserialize)]
struct Act {
    fails: bool,
    #[serde(default)]
    becomes: bool,
}
workable!(Act);

impl Executable for Act {
    type State = ();

    async fn execute(&self, (): &(), job: &Context) -> Result<(), NotDone> {
        if self.fails {
            return Err(NotDone::failed("planned", "as planned"));
        }
        if self.becomes {
            return Err(NotDone::continue_as([NewJob::of_class("next", doc! {})]));
        }
        job.progress(50);
        // The progress is written with it.
        job.save_checkpoint(1).await?;
        Ok(())
    }
}

fn patterns(of: &[&str]) -> Vec<Pattern> {
    of.iter().map(|pattern| Pattern::new(*pattern).unwrap()).collect()
}

/// The next events until one has this topic. None if some are lost: a publisher that stalls gives up.
async fn until(events: &mut Events, topic: &str) -> Option<Vec<Event>> {
    let mut seen = Vec::new();
    let read = async {
        loop {
            match events.next().await {
                Received::Event(event) => seen.push(event),
                Received::Missed(_) | _ => return false,
            }
            if seen.last().is_some_and(|event| event.topic == topic) {
                return true;
            }
        }
    };
    let is_read = tokio::time::timeout(SOON, read).await;
    is_read.unwrap_or_else(|_| panic!("no {topic} in {seen:?}")).then_some(seen)
}

fn topics(events: &[Event], job: JobId) -> Vec<&str> {
    let of_job = events.iter().filter(|event| event.details.get_object_id("job").is_ok_and(|id| JobId::from(id) == job));
    of_job.map(|event| event.topic.as_str()).collect()
}

#[tokio::test]
async fn the_life_of_jobs_and_workers_can_be_followed() {
    in_a_few_tries("no event is lost", follow_the_life_of_jobs_and_workers).await;
}

async fn follow_the_life_of_jobs_and_workers() -> Option<()> {
    let (database, store) = prepared().await;
    let mut events = store.events([Pattern::everything()], None).await.unwrap();
    let recruiter = Local::recruiter(&database, &[]);
    until(&mut events, "leader.changed").await?;
    let worker = Local::worker(&database, Worker::new().register::<Act>(()).unwrap(), &[]);
    until(&mut events, "worker.joined").await?;
    let done = Act { fails: false, becomes: false }.as_job().enqueue(&store).await.unwrap().id;
    let seen = until(&mut events, "job.done.Act").await?;
    assert_eq!(topics(&seen, done).last(), Some(&"job.done.Act"));
    let progress = seen.iter().find(|event| event.topic == "job.progress.Act").expect("it has reported progress");
    assert_eq!(progress.details.get_document("progress").unwrap().get_f64("percent").unwrap(), 50.0);
    let retry = recruiter_common::RetryManyTimes::new(1, Duration::from_millis(100)).unwrap();
    let failed = Act { fails: true, becomes: false }.as_job().retry(&retry).enqueue(&store).await.unwrap().id;
    let seen = until(&mut events, "job.failed.Act").await?;
    let of_job = topics(&seen, failed);
    for topic in ["job.enqueued.Act", "job.started.Act", "job.retried.Act"] {
        assert!(of_job.contains(&topic), "{topic} is not in {of_job:?}");
    }
    let last = seen.last().unwrap();
    assert_eq!((last.details.get_str("error").unwrap(), last.details.get_str("why").unwrap()), ("planned", "tried-too-many-times"));
    // Each job that is enqueued, however.
    Act { fails: false, becomes: true }.as_job().enqueue(&store).await.unwrap();
    until(&mut events, "job.enqueued.next").await?;
    let once = Unique::by_key("k").for_period(Duration::from_secs(3_600));
    NewJob::of_class("once", doc! {}).unique(once).enqueue(&store).await.unwrap();
    until(&mut events, "job.enqueued.once").await?;
    store.pauses().pause(&"group:x".parse::<Paused>().unwrap(), "ada", None).await.unwrap();
    let seen = until(&mut events, "pause.added").await?;
    assert_eq!(seen.last().unwrap().details.get_str("name").unwrap(), "group:x");
    worker.stop().await;
    until(&mut events, "worker.left").await?;
    recruiter.stop().await;
    // A late reader may read what is still held.
    let past = store.past_events(patterns(&["job.*.Act"]), None).await.unwrap();
    assert!(topics(&past, failed).len() >= 4 && past.iter().all(|event| event.topic.starts_with("job.")));
    let mut again = store.events(patterns(&["pause.*"]), Some(store.now() - chrono::TimeDelta::minutes(5))).await.unwrap();
    until(&mut again, "pause.added").await?;
    assert!(matches!(store.events([], None).await, Err(EventsError::NoTopic)));
    Some(())
}

#[tokio::test]
async fn only_topics_that_are_asked_for_are_published() {
    let (database, store) = prepared().await;
    let mut events = store.events(patterns(&["job.enqueued.wanted"]), None).await.unwrap();
    pause(Duration::from_millis(1_200)).await;
    for class in ["other", "wanted", "another"] {
        NewJob::of_class(class, doc! {}).enqueue(&store).await.unwrap();
    }
    assert_eq!(until(&mut events, "job.enqueued.wanted").await.unwrap().len(), 1);
    store.flush_events().await;
    let others = doc! { "events.topic": { "$exists": true, "$ne": "job.enqueued.wanted" } };
    assert_eq!(database.count("events", others).await, 0);
    events.close().await;
    pause(Duration::from_millis(1_200)).await;
    NewJob::of_class("wanted", doc! {}).enqueue(&store).await.unwrap();
    store.flush_events().await;
    assert_eq!(database.count("events", doc! { "events": { "$exists": true } }).await, 1, "no process asks any more");
}

fn document(by: ObjectId, first: i64, topics: &[&str]) -> Document {
    let now = bson::DateTime::now();
    let events: Vec<Document> = topics.iter().map(|topic| doc! { "topic": *topic, "at": now }).collect();
    doc! { "at": Timestamp { time: 0, increment: 0 }, "by": by, "first": first, "events": events }
}

#[tokio::test]
async fn a_reader_is_told_how_many_events_it_missed() {
    let (database, store) = prepared().await;
    let mut events = store.events(patterns(&["a", "c"]), None).await.unwrap();
    let (by, other, raw) = (ObjectId::new(), ObjectId::new(), database.raw("events"));
    for (by, first, topics) in
        [(by, 10, &["a", "a"][..]), (other, 0, &["b"]), (by, 17, &["b", "a"]), (by, 17, &["b", "a"]), (other, 1, &["c"])]
    {
        raw.insert_one(document(by, first, topics)).await.unwrap();
    }
    let mut seen = Vec::new();
    for _ in 0..5 {
        let received = tokio::time::timeout(SOON, events.next()).await.expect("there is more");
        seen.push(match received {
            Received::Event(event) => event.topic,
            Received::Missed(missed) => format!("{missed:?}"),
            _ => String::new(),
        });
    }
    assert_eq!(seen, ["a", "a", "Some(5)", "a", "c"], "the repeated document is recognised");
}

/// The ring overtakes a reader that does not read.
#[tokio::test]
async fn a_slow_reader_is_told_that_it_is_too_slow() {
    let (database, store) = prepared().await;
    store.prepare_events(Some(65_536)).await.unwrap();
    let mut events = store.events(patterns(&["a"]), None).await.unwrap();
    let (by, raw) = (ObjectId::new(), database.raw("events"));
    for round in 0..400_i64 {
        raw.insert_one(document(by, round * 100, &["a"; 100])).await.unwrap();
    }
    let mut missed = false;
    let mut read = 0;
    while !missed {
        match tokio::time::timeout(SOON, events.next()).await.expect("it is told") {
            Received::Missed(_) => missed = true,
            Received::Event(_) | _ => read += 1,
        }
    }
    assert!(read < 40_000, "{read}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_follows_events() {
    let (database, store) = prepared().await;
    let mut follower = Process::on(&database, "recruiter", &["events", "--follow", "--topic", "job.enqueued.*", "--json"]);
    database.until("metadata", doc! { "_id": "subscribers", "by": { "$nin": [null, {}] } }, 1, "it has subscribed").await;
    let id = NewJob::of_class("shown", doc! {}).enqueue(&store).await.unwrap().id;
    wait_until(SOON, "it shows the first", async || follower.stdout().contains("job.enqueued.shown")).await;
    assert_eq!(command(&database, &["enqueue", "--class", "typed"]).code, 0);
    wait_until(SOON, "it shows the second", async || follower.stdout().lines().count() >= 2).await;
    follower.signal(nix::sys::signal::Signal::SIGINT);
    assert_eq!(follower.wait_exit(SOON).await.code(), Some(0), "{}", follower.stderr());
    let shown = follower.stdout();
    let lines: Vec<serde_json::Value> = shown.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2, "{shown}");
    assert!(
        lines[0]["topic"] == "job.enqueued.shown" && lines[0]["job"]["$oid"] == id.to_string() && lines[1]["topic"] == "job.enqueued.typed"
    );
    let past = command(&database, &["events", "--since", "10m"]);
    assert!(past.code == 0 && past.out.contains("job.enqueued.shown"), "{} {}", past.out, past.err);
    assert_eq!(command(&database, &["events", "--topic", "a..b"]).code, 2);
}
