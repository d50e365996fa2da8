//! Which archived jobs are pruned.

use bson::{Bson, doc};
use recruiter_common::store::{Covered, OtherClasses, Reasons, WalkStep};
use recruiter_tests::factory::in_ms;

use crate::setting::{Setting, date};

#[tokio::test]
async fn retention_deletes_what_ended_before_and_no_more_than_it_may() {
    let setting = Setting::new().await;
    let archived = |ms: i64| doc! { "last_execution": { "ended_at": date(in_ms(&setting.store, ms)) } };
    let documents = [archived(-3_000), archived(-2_000), archived(-1_000), archived(0)];
    setting.database.raw("archived").insert_many(documents).await.unwrap();
    let before = in_ms(&setting.store, -500);
    assert_eq!(setting.store.prune_archived(before, 2).await.unwrap(), 2);
    assert_eq!(setting.store.prune_archived(before, 2).await.unwrap(), 1);
    assert_eq!(setting.store.prune_archived(before, 2).await.unwrap(), 0);
    assert_eq!(setting.count("archived", doc! {}).await, 1);
}

#[tokio::test]
async fn retention_by_class_deletes_what_it_covers_and_examines_nothing_twice() {
    let setting = Setting::new().await;
    let job = |id: i32, class: &str, why: &str, ms: i64| {
        let ended = date(in_ms(&setting.store, ms));
        doc! { "_id": id, "workable": { "class": class }, "why": why, "last_execution": { "ended_at": ended } }
    };
    let documents = [
        job(1, "mail", "done", -9_000),
        job(2, "mail", "gave-up", -8_000),
        job(3, "other", "done", -7_000),
        job(4, "other", "cancelled", -6_000),
        job(5, "other", "gave-up", -5_000),
        job(6, "mail", "done", 60_000),
        doc! { "_id": 7, "last_execution": { "ended_at": date(in_ms(&setting.store, -4_000)) } },
        doc! { "_id": 8, "workable": { "class": "mail" } },
    ];
    setting.database.raw("archived").insert_many(documents).await.unwrap();
    let before = in_ms(&setting.store, -500);
    let prune = async |covered: &Covered, position, most| setting.store.prune_covered(covered, position, before, most).await.unwrap();
    let left = async || setting.database.raw("archived").distinct("_id", doc! {}).await.unwrap();
    let mail = Covered { classes: vec!["mail".into()], others: None };
    let first = prune(&mail, None, 1).await;
    assert!(first.deleted == 1 && first.next.is_some(), "{first:?}");
    assert_eq!(prune(&mail, first.next, 100).await, WalkStep { deleted: 1, next: None });
    let ids = |ids: &[i32]| ids.iter().map(|id| Bson::from(*id)).collect::<Vec<_>>();
    assert_eq!(left().await, ids(&[3, 4, 5, 6, 7, 8]));
    let others = |reasons: fn(Vec<String>) -> Reasons| {
        let others = OtherClasses { except: vec!["mail".into()], reasons: reasons(["cancelled", "done"].map(str::to_owned).to_vec()) };
        Covered { classes: Vec::new(), others: Some(others) }
    };
    // Behind the position.
    let behind = Some(bson::DateTime::from_chrono(in_ms(&setting.store, -5_500)));
    assert_eq!(prune(&others(Reasons::Only), behind, 100).await.deleted, 0);
    assert_eq!(prune(&others(Reasons::Only), None, 100).await.deleted, 2);
    assert_eq!(left().await, ids(&[5, 6, 7, 8]), "a document without a reason is no success");
    assert_eq!(prune(&others(Reasons::AllBut), None, 100).await.deleted, 2);
    assert_eq!(left().await, ids(&[6, 8]));
}
