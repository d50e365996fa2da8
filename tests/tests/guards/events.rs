//! Which events a subscriber receives.

use bson::doc;
use recruiter_common::{Pattern, events::Received};
use tokio::time::timeout;

use crate::setting::{SOON, Setting};

#[tokio::test]
async fn events_are_read_from_a_time_on() {
    let setting = Setting::new().await;
    setting.store.prepare_events(None).await.unwrap();
    let ring = setting.database.raw("events");
    let publish = async |topic: &str| {
        let event = doc! { "topic": topic, "at": bson::DateTime::now() };
        let by = bson::oid::ObjectId::new();
        let document = doc! { "at": bson::Timestamp { time: 0, increment: 0 }, "by": by, "first": 0_i64, "events": [event] };
        ring.insert_one(document).await.unwrap();
    };
    publish("before").await;
    let mut events = setting.store.events([Pattern::everything()], None).await.unwrap();
    publish("after").await;
    let Ok(Received::Event(event)) = timeout(SOON, events.next()).await else { panic!("an event was published") };
    assert_eq!(event.topic, "after");
    let of = |at: bson::DateTime| bson::Timestamp { time: u32::try_from(at.timestamp_millis() / 1_000 - 60).unwrap(), increment: 0 };
    ring.insert_one(doc! { "at": of(bson::DateTime::now()), "by": bson::oid::ObjectId::new(), "first": 0_i64, "events": [{ "topic": "old", "at": bson::DateTime::now() }] })
        .await
        .unwrap();
    let since = setting.store.now() - chrono::TimeDelta::seconds(30);
    let past: Vec<String> =
        setting.store.past_events([Pattern::everything()], Some(since)).await.unwrap().into_iter().map(|event| event.topic).collect();
    assert_eq!(past, ["before", "after"]);
}

#[tokio::test]
async fn whoever_subscribes_removes_the_subscriptions_that_are_over() {
    let setting = Setting::new().await;
    setting.store.prepare_events(None).await.unwrap();
    let metadata = setting.database.raw("metadata");
    let until = |seconds: i64| bson::DateTime::from_chrono(setting.store.now() + chrono::TimeDelta::seconds(seconds));
    let by = doc! { "lasts": { "until": until(60) }, "is over": { "until": until(-60) }, "has.dots": { "until": until(-60) }, "odd": 5 };
    metadata.update_one(doc! { "_id": "subscribers" }, doc! { "$set": { "by": by } }).upsert(true).await.unwrap();
    let _events = setting.store.events([Pattern::new("job.*").unwrap()], None).await.unwrap();
    let found = metadata.find_one(doc! { "_id": "subscribers" }).await.unwrap().unwrap();
    let by = found.get_document("by").unwrap();
    assert_eq!(by.len(), 2, "{by}");
    assert!(by.contains_key("lasts"));
    let (_, mine) = by.iter().find(|(name, _)| *name != "lasts").unwrap();
    assert_eq!(mine.as_document().unwrap().get_array("topics").unwrap(), &[bson::Bson::from("job.*")]);
}
