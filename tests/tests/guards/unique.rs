//! Unique keys: which job has a key, which job is replaced, which successor is released.

use bson::{Bson, RawDocumentBuf, doc};
use recruiter_common::{
    Failure, FinishReason, JobId, OnConflict, Outcome, Unique, WorkerId,
    store::{Archival, Recorded},
};
use recruiter_tests::factory::in_ms;

use crate::setting::{HOUR, Setting, keyed};

/// A job that is to be replaced: locked, or started before.
#[tokio::test]
async fn only_a_job_that_has_never_started_is_replaced() {
    let setting = Setting::new().await;
    let unique = || Unique::by_key("k").for_period(HOUR).on_conflict(OnConflict::Replace);
    let id = keyed(unique()).enqueue(&setting.store).await.unwrap().id;
    for (change, outcome) in [
        (doc! { "locked": true, "attempts": 0 }, Outcome::AlreadyStarted),
        (doc! { "locked": false, "attempts": 1 }, Outcome::AlreadyStarted),
        (doc! { "locked": false, "attempts": 0 }, Outcome::Replaced),
        (doc! { "attempts": Bson::Null, "replaced": Bson::Null }, Outcome::Replaced),
    ] {
        setting.set("scheduled", id, change.clone()).await;
        let enqueued = keyed(unique()).enqueue(&setting.store).await.unwrap();
        assert_eq!((enqueued.id, enqueued.outcome), (id, outcome), "{change}");
    }
}

/// Of several jobs with one key, the one that waits has it.
#[tokio::test]
async fn the_holder_of_a_key_is_the_job_that_excludes_others() {
    let setting = Setting::new().await;
    let waiting = || Unique::by_key("w").while_waiting();
    keyed(Unique::by_key("other").while_waiting()).enqueue(&setting.store).await.unwrap();
    let mut ids = Vec::new();
    for change in [doc! { "attempts": 1 }, doc! { "locked": true }, doc! {}] {
        let id = keyed(waiting()).enqueue(&setting.store).await.unwrap().id;
        if !change.is_empty() {
            setting.set("scheduled", id, change).await;
        }
        ids.push(id);
    }
    assert_eq!(keyed(waiting()).enqueue(&setting.store).await.unwrap().id, ids[2]);
    let in_transaction = async |unique: Unique| {
        let mut session = setting.store.start_session().await.unwrap();
        session.start_transaction().await.unwrap();
        let enqueued = keyed(unique).enqueue_in(&setting.store, &mut session).await.unwrap();
        session.abort_transaction().await.unwrap();
        enqueued
    };
    assert_eq!(in_transaction(waiting()).await.id, ids[2]);
    let finished = |key: &str| Unique::by_key(key).on_conflict(OnConflict::RunOnceMore);
    for key in ["f", "g"] {
        let id = keyed(finished(key)).enqueue(&setting.store).await.unwrap().id;
        assert_eq!(in_transaction(finished(key)).await.id, id);
        setting.set("scheduled", id, doc! { "locked": true }).await;
        let successor = keyed(finished(key)).enqueue(&setting.store).await.unwrap().id;
        assert_eq!(in_transaction(finished(key)).await.id, successor);
    }
}

/// A job that waits for the end of another one: for that of this key, and while it is not running itself.
#[tokio::test]
async fn a_successor_is_released_by_the_end_of_its_key() {
    let setting = Setting::new().await;
    // The store's clock may be behind the server's.
    let due = async |id: JobId| {
        let at = setting.scheduled(id).await.get_datetime("scheduled_at").unwrap().to_chrono();
        at <= in_ms(&setting.store, 60_000)
    };
    setting.store.prepare_unique_jobs().await.unwrap();
    let [ours, other, running] = setting.jobs().await;
    let end_of_time = bson::DateTime::from_millis(253_402_300_799_999);
    for (id, key) in [(ours, "ours"), (other, "other"), (running, "running")] {
        setting.set("scheduled", id, doc! { "unique_after": key, "scheduled_at": end_of_time }).await;
    }
    setting.set("scheduled", running, doc! { "locked": true }).await;
    let held = keyed(Unique::by_key("other")).enqueue(&setting.store).await.unwrap().id;
    assert_eq!(setting.store.release_successors(&["nobody".into(), "running".into(), "other".into()]).await.unwrap(), 0);
    assert!(!due(ours).await && !due(other).await && !due(running).await);
    assert_eq!(setting.store.release_orphaned_successors().await.unwrap(), 1);
    assert!(due(ours).await && !due(other).await && !due(running).await);
    assert_eq!(setting.scheduled(ours).await.get_str("unique").unwrap(), "ours");
    // In a caller's transaction. A `due_after` beyond the latest date, or that is no date, is no reason to refuse the end.
    let [mine, locked, beyond, no_date] = setting.jobs().await;
    for id in [mine, locked, beyond, no_date] {
        setting.set("scheduled", id, doc! { "scheduled_at": end_of_time }).await;
    }
    setting.set("scheduled", mine, doc! { "unique_after": "m" }).await;
    setting.set("scheduled", locked, doc! { "unique_after": "l", "locked": true }).await;
    setting.set("scheduled", beyond, doc! { "unique_after": "b", "due_after": bson::DateTime::MAX }).await;
    setting.set("scheduled", no_date, doc! { "unique_after": "n", "due_after": Bson::MaxKey }).await;
    for key in ["l", "b", "n", "m"] {
        let [id] = setting.jobs().await;
        setting.set("scheduled", id, doc! { "unique": key }).await;
        let [held] = setting.start(WorkerId::new(), [id]).await;
        let mut session = setting.store.start_session().await.unwrap();
        session.start_transaction().await.unwrap();
        let end = setting.done(&held);
        assert_eq!(setting.store.finish_in(&mut session, &end).await.unwrap(), Recorded::Yes);
        session.commit_transaction().await.unwrap();
        setting.store.follow(&[end], &[Recorded::Yes]).await;
        assert_eq!((due(mine).await, due(locked).await), (key == "m", false));
    }
    assert!(setting.found("scheduled", held).await.is_some());
    for (id, key) in [(beyond, "b"), (no_date, "n")] {
        let released = setting.scheduled(id).await;
        assert_eq!((released.get_str("unique").unwrap(), released.get_datetime("scheduled_at").unwrap()), (key, &end_of_time));
    }
}

/// A job that ended without a start gives back its key; a job that has run keeps it for the period.
#[tokio::test]
async fn a_period_is_given_back_only_without_a_start() {
    let setting = Setting::new().await;
    for (attempts, is_new) in [(1, false), (0, true)] {
        let unique = || keyed(Unique::by_key(format!("{attempts}")).for_period(HOUR));
        let id = unique().enqueue(&setting.store).await.unwrap().id;
        setting.set("scheduled", id, doc! { "attempts": attempts }).await;
        let job = setting.scheduled(id).await;
        let document = RawDocumentBuf::try_from(&job).unwrap();
        let end = Archival::unstarted(id, &document, &FinishReason::CANCELLED, &Failure::new("x", ""), setting.store.now());
        assert_eq!(setting.archive(&[end]).await, [Recorded::Yes]);
        assert_eq!(unique().enqueue(&setting.store).await.unwrap().is_new, is_new, "{attempts} starts");
    }
}
