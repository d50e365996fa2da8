//! The recruiter's lease, and the term that it gives to the roster.

use std::time::Duration;

use bson::doc;
use recruiter_common::ids::{LeaseTerm, RoundId};
use recruiter_tests::factory::announcement;

use crate::setting::{Setting, give};

const LEASE: Duration = Duration::from_secs(15);

#[tokio::test]
async fn a_lease_is_taken_as_it_was_observed() {
    let Setting { store, database: _database } = &Setting::new().await;
    let acquire = async |observed: &Option<_>| store.acquire_if_unchanged(observed.as_ref(), "a:1", LEASE).await.unwrap();
    let first = acquire(&None).await.expect("no recruiter leads");
    assert_eq!(first.term, LeaseTerm(1));
    assert!(acquire(&None).await.is_none(), "another recruiter leads");
    let unrenewed = store.observe_lease().await.unwrap();
    assert!(store.renew_if_held(&first).await.unwrap());
    assert!(acquire(&unrenewed).await.is_none(), "it was renewed");
    let first_term = store.observe_lease().await.unwrap();
    let second = acquire(&first_term).await.expect("nothing has changed");
    assert!(store.renew_if_held(&second).await.unwrap());
    assert!(acquire(&first_term).await.is_none(), "it is another's, as often renewed");
    let unreleased = store.observe_lease().await.unwrap();
    store.release_if_held(&second).await.unwrap();
    assert!(acquire(&unreleased).await.is_none(), "it was released: any process that has read that may take it");
    let released = store.observe_lease().await.unwrap();
    assert_eq!(acquire(&released).await.unwrap().term, LeaseTerm(3));
}

#[tokio::test]
async fn a_lease_is_renewed_and_released_by_its_holder_in_its_term() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let held = async |lease: &_| {
        let before = setting.found("metadata", "recruiter").await;
        let renewed = store.renew_if_held(lease).await.unwrap();
        if !renewed {
            store.release_if_held(lease).await.unwrap();
            assert_eq!(setting.found("metadata", "recruiter").await, before, "it does not change a lease that it does not hold");
        }
        renewed
    };
    let first = store.acquire_if_unchanged(None, "a:1", LEASE).await.unwrap().unwrap();
    assert!(held(&first).await);
    setting.database.raw("metadata").delete_one(doc! { "_id": "recruiter" }).await.unwrap();
    let second = store.acquire_if_unchanged(None, "b:1", LEASE).await.unwrap().unwrap();
    assert_eq!(first.term, second.term);
    assert!(!held(&first).await, "the same term of another holder");
    assert!(held(&second).await);
    setting.set("metadata", "recruiter", doc! { "term": 9_i64 }).await;
    assert!(!held(&second).await, "another term");
    setting.set("metadata", "recruiter", doc! { "term": second.term }).await;
    store.release_if_held(&second).await.unwrap();
    assert!(!held(&second).await, "it was released");
}

#[tokio::test]
async fn a_new_term_shuts_the_old_leader_out() {
    let Setting { store, database: _database } = &Setting::new().await;
    let first = store.acquire_if_unchanged(None, "a:1", LEASE).await.unwrap().unwrap();
    let setting_worker = announcement(1);
    store.register(&setting_worker).await.unwrap();
    assert!(store.make_available(setting_worker.id, 1).await.unwrap());
    let observed = store.observe_lease().await.unwrap();
    let second = store.acquire_if_unchanged(observed.as_ref(), "b:1", LEASE).await.unwrap().unwrap();
    assert_eq!(store.stamp_term(second.term).await.unwrap(), 1);
    assert!(store.available_workers(first.term).await.unwrap().is_empty());
    let given = [give(setting_worker.id, 1)];
    assert_eq!(store.assign_if_available(first.term, RoundId::new(), &given).await.unwrap(), []);
    assert_eq!(store.assign_if_available(second.term, RoundId::new(), &given).await.unwrap(), [setting_worker.id]);
    // A worker that registers now has the second term.
    let late = announcement(1);
    store.register(&late).await.unwrap();
    assert!(store.make_available(late.id, 1).await.unwrap());
    assert_eq!(store.available_workers(second.term).await.unwrap().len(), 1);
}
