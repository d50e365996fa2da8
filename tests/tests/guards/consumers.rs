//! Consumer groups are forwarded and moved only as they were read.

use bson::doc;
use recruiter_common::{
    NewJob, Pattern,
    consumers::ConsumerGroup,
    messages::{From, Message, Position},
    store::CommitSession,
};

use crate::setting::Setting;

#[tokio::test]
async fn messages_become_jobs_only_if_their_group_is_as_it_was_read() {
    let setting = Setting::new().await;
    let declare = async || {
        let topics = [Pattern::new("a").unwrap()];
        setting.store.consumers().declare("g", topics, NewJob::of_class("x", doc! {}), From::Now).await.unwrap();
    };
    declare().await;
    let read = async || setting.store.consumers().list().await.unwrap().remove(0).1.unwrap();
    let stale = read().await;
    let position = |text: &str| text.parse::<Position>().unwrap();
    let message = |at: &str| Message { topic: "a".into(), body: doc! {}, at: None, position: position(at) };
    let mut session = CommitSession::default();
    let mut forward = async |mut group: ConsumerGroup, at: &str| {
        setting.store.forward_to_consumer(&mut session, &mut group, vec![message(at)]).await.unwrap()
    };
    assert!(forward(stale.clone(), "82aa").await);
    assert!(!forward(stale, "82bb").await, "another leader has moved its position");
    let changed = read().await;
    declare().await;
    assert!(!forward(changed.clone(), "82bb").await, "its job was changed");
    let pass = async |mut group: ConsumerGroup| setting.store.pass_consumer(&mut group, position("82dd")).await.unwrap();
    assert!(!pass(changed.clone()).await);
    setting.store.note_consumer_problem("g", changed.revision, "old").await.unwrap();
    let now = read().await;
    assert_eq!((now.problem.clone(), now.forwarded, &now.position), (None, 1, &position("82aa")));
    assert_eq!(setting.database.count("scheduled", doc! {}).await, 1);
    setting.store.note_consumer_problem("g", now.revision, "new").await.unwrap();
    assert_eq!(read().await.problem.as_deref(), Some("new"));
    assert!(forward(now.clone(), "82cc").await);
    assert!(!pass(now).await, "messages have become jobs");
    let now = read().await;
    assert_eq!(now.problem, None, "it goes on");
    assert!(pass(now).await);
    assert_eq!((read().await.position, read().await.forwarded), (position("82dd"), 2));
    // As the warning of such a group advises.
    let (stale, damaged) = (read().await, doc! { "revision": "x", "forwarded": "x", "skipped": ["x"] });
    setting.set("consumers", "g", damaged).await;
    declare().await;
    let now = read().await;
    assert_eq!((now.position.clone(), now.forwarded), (position("82dd"), 0));
    assert!(!forward(stale, "82ee").await && forward(now, "82ee").await);
    setting.set("consumers", "g", doc! { "revision": "x" }).await;
    setting.store.consumers().reset("g", From::Now).await.unwrap();
    read().await;
    setting.database.raw("consumers").insert_one(doc! { "_id": 5 }).bypass_document_validation(true).await.unwrap();
    assert_eq!(setting.store.stored_consumers().await.unwrap().len(), 1, "a group has a text as its name");
}
