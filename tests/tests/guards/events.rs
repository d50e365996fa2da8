//! Which events a subscriber receives.

use bson::doc;
use recruiter_common::{events::Received, topics::Pattern};
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
