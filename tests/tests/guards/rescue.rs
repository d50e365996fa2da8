//! What a cleaner finds: jobs of dead workers, locks without a holder, jobs that have expired.

use std::collections::BTreeSet;

use bson::{Bson, Document, doc};
use recruiter_common::{JobId, WorkerId, ids::StartId, store::LockedJobs};
use recruiter_tests::factory::{in_ms, insert_unvalidated, minimal_job};

use crate::setting::{Setting, date, set_of};

fn locked_ids(found: &LockedJobs) -> BTreeSet<JobId> {
    found.documents.iter().map(|document| document.get_object_id("_id").unwrap().into()).collect()
}

#[tokio::test]
async fn a_dead_worker_held_what_is_named_and_locked_by_it() {
    let setting = Setting::new().await;
    let (worker, another) = (WorkerId::new(), WorkerId::new());
    let [held, not_named, of_another, waiting] = setting.jobs().await;
    setting.start(worker, [held, not_named]).await;
    setting.start(another, [of_another]).await;
    let found = setting.store.held_by(worker, &[held, of_another, waiting]).await.unwrap();
    assert_eq!(found.iter().map(|held| held.claim.job()).collect::<Vec<_>>(), [held]);
}

#[tokio::test]
async fn the_sweep_finds_what_is_locked_step_by_step() {
    let setting = Setting::new().await;
    let documents: Vec<Document> = (0..5_100).map(|_| minimal_job("x")).collect();
    let [first, last] = [0, 5_099].map(|index: usize| documents[index].get_object_id("_id").unwrap());
    setting.database.raw("scheduled").insert_many(&documents).await.unwrap();
    for job in [first, last] {
        setting.set("scheduled", job, doc! { "locked": true }).await;
    }
    let worker = setting.worker(1).await;
    let found = setting.store.locked_jobs(None).await.unwrap();
    assert_eq!((locked_ids(&found), found.registered), (set_of([first.into()]), [worker].into()));
    let found = setting.store.locked_jobs(Some(found.next.expect("there are more"))).await.unwrap();
    assert_eq!((locked_ids(&found), found.next), (set_of([last.into()]), None));
}

/// I8, I5: an incomplete lock has no holder, a complete one has.
#[tokio::test]
async fn a_lock_is_taken_off_only_without_a_holder() {
    let setting = Setting::new().await;
    let [bare, no_start, no_worker, held] = setting.jobs().await;
    setting.set("scheduled", bare, doc! { "locked": true }).await;
    setting.set("scheduled", no_start, doc! { "locked": true, "last_execution": { "worker": WorkerId::new() } }).await;
    let start = StartId::new();
    setting.set("scheduled", no_worker, doc! { "locked": true, "last_execution": { "start": start } }).await;
    setting.start(WorkerId::new(), [held]).await;
    let mut without = minimal_job("x");
    without.remove("locked");
    let without_lock: JobId = without.get_object_id("_id").unwrap().into();
    insert_unvalidated(&setting.database, vec![without]).await;
    for (job, nobodys) in [(bare, true), (no_start, true), (no_worker, true), (held, false), (without_lock, false)] {
        let before = setting.scheduled(job).await;
        assert_eq!(setting.store.unlock_if_unheld(job).await.unwrap(), nobodys, "{before}");
        let after = setting.scheduled(job).await;
        assert!(if nobodys { !after.get_bool("locked").unwrap() } else { after == before }, "{after}");
    }
}

#[tokio::test]
async fn expired_jobs_are_unlocked_and_their_time_is_over() {
    let setting = Setting::new().await;
    setting.store.prepare_expiring_jobs().await.unwrap();
    let [expired, locked, later, never] = setting.jobs().await;
    let over = date(in_ms(&setting.store, -1_000));
    for id in [expired, locked] {
        setting.set("scheduled", id, doc! { "expires_at": over }).await;
    }
    setting.set("scheduled", locked, doc! { "locked": true }).await;
    setting.set("scheduled", later, doc! { "expires_at": date(in_ms(&setting.store, 60_000)) }).await;
    setting.set("scheduled", never, doc! { "expires_at": Bson::Null }).await;
    let found = setting.store.expired_jobs(setting.store.now(), 10).await.unwrap();
    assert_eq!(found.iter().map(|found| found.job).collect::<Vec<_>>(), [expired]);
}
