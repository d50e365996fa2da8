//! Limits: full groups, gates, the pauses of lines, and the cells of slow rates.

use std::time::Duration;

use bson::doc;
use recruiter_common::{
    enqueue::NewJob,
    ids::{LeaseTerm, StartId, WorkerId},
    instant::Instant,
    store::KeptCells,
};

use crate::setting::Setting;

#[tokio::test]
async fn the_waiting_jobs_of_a_group_are_counted() {
    let setting = Setting::new().await;
    let [_, gated, locked, locked_gated, _] = setting.jobs().await;
    setting.set("scheduled", gated, doc! { "gate": "g" }).await;
    setting.set("scheduled", locked, doc! { "locked": true }).await;
    setting.set("scheduled", locked_gated, doc! { "locked": true, "gate": "g" }).await;
    NewJob::of_class("x", doc! {}).in_group("other").enqueue(&setting.store).await.unwrap();
    let counted = async |most| setting.store.waiting_in("generic", most).await.unwrap();
    assert_eq!((counted(10).await, counted(3).await, counted(2).await, counted(1).await), (3, 3, 2, 1));
}

#[tokio::test]
async fn the_waiting_jobs_with_a_gate_are_counted() {
    let setting = Setting::new().await;
    let [_, gated, other, locked, _] = setting.jobs().await;
    setting.set("scheduled", gated, doc! { "gate": "g" }).await;
    setting.set("scheduled", other, doc! { "gate": "h" }).await;
    setting.set("scheduled", locked, doc! { "locked": true, "gate": "g" }).await;
    assert_eq!(setting.store.waiting_at("g", 10).await.unwrap(), 1);
}

#[tokio::test]
async fn the_pause_of_a_line_is_read_with_the_head_of_this_line() {
    let setting = Setting::new().await;
    let in_line = |key: &str| NewJob::of_class("x", doc! {}).in_line(key);
    let heads = [in_line("a").enqueue(&setting.store).await.unwrap().id, in_line("b").enqueue(&setting.store).await.unwrap().id];
    in_line("a").enqueue(&setting.store).await.unwrap();
    let pauses = ["line:a", "line:c", "group:a", "everything"].map(|id| doc! { "_id": id, "by": "ada" });
    setting.database.raw("pauses").insert_many(pauses).await.unwrap();
    let found = setting.store.heads_of_lines(&[">a", ">b"]).await.unwrap();
    let head = |gate: &str| (found[gate].job.id, found[gate].halt.is_some());
    assert_eq!((head(">a"), head(">b"), found.len()), ((heads[0], true), (heads[1], false), 2));
    let halted = setting.store.halted_lines(&[">a", ">b"]).await.unwrap();
    assert_eq!(halted.into_keys().collect::<Vec<_>>(), [">a"]);
    let lines: Vec<String> = setting.store.pauses_of_lines(9).await.unwrap().iter().map(|(paused, _)| paused.to_string()).collect();
    assert_eq!(lines, ["line:a", "line:c"]);
    let others: Vec<String> = setting.store.settings().await.unwrap().pauses.keys().map(ToString::to_string).collect();
    assert_eq!(others, ["everything", "group:a"]);
}

#[tokio::test]
async fn the_holders_of_a_resource_are_running_jobs_with_its_permits() {
    let setting = Setting::new().await;
    setting.store.prepare_limited_jobs().await.unwrap();
    let [plain, other, ended, holder] = setting.jobs().await;
    let execution = |permits: &[&str]| doc! { "worker": WorkerId::new(), "start": StartId::new(), "permits": permits.to_vec() };
    setting.set("scheduled", plain, doc! { "locked": true }).await;
    setting.set("scheduled", other, doc! { "locked": true, "last_execution": execution(&["print#0", "printer2#0"]) }).await;
    setting.set("scheduled", ended, doc! { "last_execution": execution(&["printer#1"]) }).await;
    setting.set("scheduled", holder, doc! { "locked": true, "last_execution": execution(&["a#0", "printer#7"]) }).await;
    let holders = [("printer#7".to_owned(), holder)];
    assert_eq!(setting.store.permit_holders("printer", 9).await.unwrap(), holders);
    assert_eq!(setting.store.permit_holders("printer", 1).await.unwrap(), holders, "others take no room");
}

#[tokio::test]
async fn running_jobs_of_a_group_without_its_permit_are_counted() {
    let setting = Setting::new().await;
    let [counted, permitted, elsewhere, ended, not_listed] = setting.jobs().await;
    let worker = setting.worker(5).await;
    setting.set("roster", worker, doc! { "working_on": [counted, permitted, elsewhere, ended] }).await;
    for (job, group) in [(counted, "mail"), (permitted, "mail"), (elsewhere, "other"), (ended, "mail"), (not_listed, "mail")] {
        setting.set("scheduled", job, doc! { "group": group, "locked": job != ended }).await;
    }
    setting.set("scheduled", permitted, doc! { "last_execution.permits": ["@mail#0"] }).await;
    assert_eq!(setting.store.running_without_permit("mail").await.unwrap(), 1);
}

#[tokio::test]
async fn the_cells_of_slow_rates_outlive_their_leader_and_only_grow() {
    let setting = Setting::new().await;
    let (now, hour) = (setting.store.now(), Duration::from_secs(3_600));
    assert_eq!(setting.store.kept_cells(LeaseTerm(1)).await.unwrap(), KeptCells::default());
    let keep = async |name: &str, at: Instant| setting.store.keep_cells(&[(name.to_owned(), at)]).await.unwrap();
    keep("api", now + hour).await;
    keep("api", now).await;
    keep("@mail", now - hour).await;
    let long_ago = doc! { "_id": "not a cell", "cell": bson::DateTime::from_millis(0) };
    setting.database.raw("metadata").insert_one(long_ago).await.unwrap();
    let kept = setting.store.kept_cells(LeaseTerm(2)).await.unwrap();
    assert_eq!(setting.count("metadata", doc! { "_id": "not a cell" }).await, 1);
    assert_eq!(kept.cells.keys().collect::<Vec<_>>(), ["api"]);
    assert!(kept.cells["api"] >= now + hour - Duration::from_millis(1) && kept.since.is_none(), "{kept:?}");
    assert_eq!(setting.count("metadata", doc! { "_id": { "$regex": "^rate:" } }).await, 1, "the other has passed");
    setting.store.prune_not_kept(now + hour).await.unwrap();
    assert_eq!(setting.store.kept_cells(LeaseTerm(2)).await.unwrap(), kept, "counts are deleted, and not cells");
    setting.set("metadata", "rates", doc! { "term": 7_i64 }).await;
    assert!(setting.store.kept_cells(LeaseTerm(8)).await.unwrap().since.is_some(), "others have led before");
}
