//! What is recorded of a running job: the outcomes of its items, its notes.

use bson::{Bson, doc};
use recruiter_common::{
    JobId, NewJob, WorkerId,
    job::notes::Notes,
    store::{Progress, Recorded},
};
use recruiter_tests::local;

use crate::setting::Setting;

/// I3: item outcomes of a lost claim change nothing, neither while the job waits nor after its next start.
#[tokio::test]
async fn items_are_recorded_by_the_start_that_holds_their_bundle() {
    let setting = Setting::new().await;
    let bundles = [0; 3].map(|_| NewJob::bundle_of_class("x", [doc! {}, doc! {}]));
    let jobs: [JobId; 3] = local::ids(setting.store.enqueue_many(bundles).await.unwrap()).try_into().unwrap();
    let mine = setting.start(WorkerId::new(), jobs).await;
    let [held, retried, started_anew] = mine.each_ref().map(|(_, claim)| *claim);
    let before = [Bson::from("done"), Bson::Null];
    let all = [held, retried, started_anew];
    let whole = all.map(|claim| Progress::whole(claim, &before));
    assert_eq!(setting.store.record_items_if_claimed(&whole).await.unwrap(), [Recorded::Yes; 3]);
    let now = setting.store.now();
    assert_eq!(setting.reschedule(&[setting.retry(&mine[1], now), setting.retry(&mine[2], now)]).await, [Recorded::Yes; 2]);
    setting.start(WorkerId::new(), [started_anew.job()]).await;
    let late = all.map(|claim| Progress::of_items(claim, [(1, Bson::from("done"))]));
    for _ in 0..2 {
        let recorded = setting.store.record_items_if_claimed(&late).await.unwrap();
        assert_eq!(recorded, [Recorded::Yes, Recorded::ClaimLost, Recorded::ClaimLost]);
    }
    for (claim, expected) in [(held, ["done".into(), "done".into()]), (retried, before.clone()), (started_anew, before)] {
        assert_eq!(setting.scheduled(claim.job()).await.get_array("item_outcomes").unwrap()[..], expected);
    }
}

/// I3: notes of a lost claim change nothing, and neither does a write that arrives after a later one.
#[tokio::test]
async fn notes_are_recorded_by_the_start_that_holds_their_job_in_their_order() {
    let setting = Setting::new().await;
    let [held, retried, started_anew] = setting.jobs().await;
    let mine = setting.start(WorkerId::new(), [held, retried, started_anew]).await;
    let notes = |number: i64| mine.each_ref().map(|(_, claim)| Notes::new(*claim, number, doc! { "checkpoint": number }));
    assert_eq!(setting.store.record_notes_if_claimed(&notes(2)).await.unwrap(), [Recorded::Yes; 3]);
    let now = setting.store.now();
    assert_eq!(setting.reschedule(&[setting.retry(&mine[1], now), setting.retry(&mine[2], now)]).await, [Recorded::Yes; 2]);
    setting.start(WorkerId::new(), [started_anew]).await;
    for (number, expected) in [(1, 2), (2, 2), (3, 3), (2, 3)] {
        let recorded = setting.store.record_notes_if_claimed(&notes(number)).await.unwrap();
        assert_eq!(recorded, [Recorded::Yes, Recorded::ClaimLost, Recorded::ClaimLost]);
        for (job, expected) in [(held, expected), (retried, 2), (started_anew, 2)] {
            assert_eq!(setting.scheduled(job).await.get_i64("checkpoint").ok(), Some(expected), "after write {number}");
        }
    }
}
