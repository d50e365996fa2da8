//! Who receives which hints, and which leader they come from.

use std::time::Duration;

use bson::doc;
use recruiter_common::{
    JobId, WorkerId,
    ids::{LeaseTerm, RoundId},
    store::{Channel, Hint, HintsAt, Listener},
};
use recruiter_tests::{local::store, processes::directory_for_sockets, wait::wait_until};

use crate::setting::{SOON, Setting, give};

/// Publishes hints until a listener has received all that it should, then checks the received hints.
async fn hears(listener: Listener, concerning: &[Hint], others: &[Hint]) {
    let setting = Setting::new().await;
    let store = &setting.store;
    // Of the same kind, but from before it listened.
    let old = Hint::jobs_in(["old"]);
    store.publish(&old).await.unwrap();
    store.publish(&Hint::Cancel { job: JobId::new() }).await.unwrap();
    let mut hints = store.hints(listener);
    let mut heard = Vec::new();
    wait_until(SOON, "the hints arrive", async || {
        // The listener begins at an unknown time: publish until the hints arrive.
        for hint in others.iter().chain(concerning) {
            store.publish(hint).await.unwrap();
        }
        heard.extend(std::iter::from_fn(|| hints.try_next()));
        concerning.iter().all(|hint| heard.contains(hint))
    })
    .await;
    assert_eq!(heard.first(), Some(&Hint::Seed), "the first is the seed");
    assert!(heard[1..].iter().all(|hint| concerning.contains(hint)), "neither old hints nor those of others: {heard:?}");
}

#[tokio::test]
async fn a_worker_connects_to_the_latest_leader_if_that_is_on_its_machine() {
    let (setting, directory) = (Setting::new().await, directory_for_sockets());
    let leader = &setting.store;
    let hints = leader.hints(Listener::Recruiter);
    let at = HintsAt { directory: Some(directory.path().to_owned()), address: None };
    let _hub = leader.serve_hints(&at, LeaseTerm(2), &hints).await.unwrap();
    let earlier = store(&setting.database).await;
    let _earlier_hub = earlier.serve_hints(&at, LeaseTerm(1), &hints).await.unwrap();
    let metadata = setting.database.raw("metadata");
    let announced = metadata.find_one(doc! { "_id": "relay" }).await.unwrap().unwrap();
    assert_eq!(announced.get_i64("term").unwrap(), 2, "an earlier leader does not overwrite it");
    let is_connected = async || {
        let (worker, other) = (setting.worker(1).await, store(&setting.database).await);
        setting.set("roster", worker, doc! { "channel": 7 }).await;
        let listening = other.hints(Listener::Worker(worker, Channel::default()));
        wait_until(SOON, "it listens", async || listening.is_listening()).await;
        (leader.is_linked(worker), !leader.channels().await.unwrap().contains(&Channel(7)))
    };
    assert_eq!(is_connected().await, (true, true), "it needs no hints by MongoDB");
    metadata.update_one(doc! { "_id": "relay" }, doc! { "$set": { "boot_id": "another machine" } }).await.unwrap();
    assert_eq!(is_connected().await, (false, false));
}

#[tokio::test]
async fn a_worker_hears_of_its_jobs_from_now_on() {
    let worker = WorkerId::new();
    let assigned = |worker| Hint::Assigned { round: RoundId::new(), assignments: vec![give(worker, 1).assignment] };
    let concerning =
        [assigned(worker), Hint::Cancel { job: JobId::new() }, Hint::Control, Hint::KeepAlive { again_in: Duration::from_secs(1) }];
    hears(Listener::Worker(worker, Channel::default()), &concerning, &[Hint::Free, assigned(WorkerId::new())]).await;
}

#[tokio::test]
async fn the_recruiter_hears_of_jobs_and_places_from_now_on() {
    let jobs = Hint::jobs_in(["a"]);
    let assigned = Hint::Assigned { round: RoundId::new(), assignments: vec![give(WorkerId::new(), 1).assignment] };
    let others = [assigned, Hint::Cancel { job: JobId::new() }, Hint::KeepAlive { again_in: Duration::from_secs(1) }];
    hears(Listener::Recruiter, &[jobs, Hint::Free, Hint::Left { worker: WorkerId::new() }], &others).await;
}
