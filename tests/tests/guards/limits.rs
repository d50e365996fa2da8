//! Limits: full groups, gates, the pauses of lines, and the cells of slow rates.

use std::time::Duration;

use bson::{Bson, doc};
use recruiter_common::{
    JobId, NewJob, Rate, WorkerId,
    ids::{LeaseTerm, RoundId},
    instant::Instant,
    store::{AssignedJobs, FastLimits, KeptCells, Permit, PermitHolder, Planned, RateCell},
};

use crate::setting::{Setting, TERM};

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
async fn the_holders_of_a_resource_are_workers_with_its_permits_and_their_running_jobs_that_need_it() {
    let setting = Setting::new().await;
    let [plain, other, ended, running, not_listed] = setting.jobs().await;
    for (job, gate) in [(other, "printer2"), (ended, "printer"), (running, "a,printer"), (not_listed, "printer")] {
        setting.set("scheduled", job, doc! { "locked": job != ended, "gate": gate }).await;
    }
    setting.set("scheduled", plain, doc! { "locked": true }).await;
    let (holder, elsewhere) = (setting.worker(5).await, setting.worker(5).await);
    setting.worker(5).await;
    let working_on = [plain, other, ended, running];
    setting.set("roster", holder, doc! { "held_permits": ["a#0", "printer#7", "printer2#0"], "working_on": working_on }).await;
    setting.set("roster", elsewhere, doc! { "held_permits": ["print#0"], "working_on": [not_listed] }).await;
    let permits = async |resource| setting.store.holders_of_resource(resource, 9).await.unwrap();
    let expected = |name: &str, jobs: Vec<JobId>| PermitHolder { worker: holder, permits: vec![name.to_owned()], jobs };
    assert_eq!(permits("printer").await, [expected("printer#7", vec![running])]);
    assert_eq!(permits("printer2").await, [expected("printer2#0", vec![other])]);
    assert_eq!(setting.store.holders_of_resource("printer", 0).await.unwrap(), [expected("printer#7", vec![])]);
    assert_eq!(setting.store.permit_holders().await.unwrap().len(), 2);
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
    setting.set("scheduled", permitted, doc! { "last_execution.group_permit": true }).await;
    let counts = async |groups: &[&str]| {
        setting.store.running_without_permit(&groups.iter().map(|group| (*group).to_owned()).collect::<Vec<_>>()).await.unwrap()
    };
    assert_eq!(counts(&["mail", "none"]).await, [("mail".to_owned(), 1)].into());
    assert_eq!(counts(&["mail", "other"]).await, [("mail".to_owned(), 1), ("other".to_owned(), 1)].into());
}

/// Two leaders that both believe to lead may grant one permit twice. A worker that ends returns permits without a report.
#[tokio::test]
async fn a_permit_that_is_held_is_not_granted_again() {
    let setting = Setting::new().await;
    setting.store.prepare_limited_jobs().await.unwrap();
    let (first, second, other) = (setting.worker(5).await, setting.worker(5).await, setting.worker(5).await);
    let round = RoundId::new();
    let grant = |worker: WorkerId, names: &[&str]| {
        let mut assignment = AssignedJobs::new(worker, vec![JobId::new()]);
        let permit = Permit { names: names.iter().map(|name| (*name).to_owned()).collect(), ..Permit::default() };
        assignment.permits.insert(assignment.jobs[0], permit);
        Planned::for_slots(assignment)
    };
    let assign = async |planned: &[Planned]| setting.store.assign_if_available(TERM, round, planned).await.unwrap();
    assert_eq!(assign(&[grant(first, &["printer#0"])]).await, [first]);
    setting.set("roster", first, doc! { "available": true }).await;
    let late = setting.store.assign_if_available(TERM, RoundId::new(), &[grant(first, &["printer#0"])]).await.unwrap();
    assert_eq!(late, [], "no second job of the worker gets it either");
    setting.set("roster", first, doc! { "available": false }).await;
    let refused = grant(second, &["scanner#0", "printer#0"]);
    let won = setting.store.assign_if_available(TERM, RoundId::new(), &[refused.clone(), grant(other, &["printer#1"])]).await.unwrap();
    assert_eq!(won, [other], "a refused permit stops no other worker");
    assert!(setting.found("roster", second).await.unwrap().get_bool("available").unwrap());
    let assignment = setting.store.assignment(first).await.unwrap().expect("a majority has it");
    assert_eq!((assignment.permits.len(), assignment.permits.values().next().unwrap().names.clone()), (1, vec!["printer#0".to_owned()]));
    setting.store.hold_permits(first, &[]).await.unwrap();
    assert_eq!(setting.store.assign_if_available(TERM, RoundId::new(), &[refused]).await.unwrap(), [second]);
    assert_eq!(setting.store.permit_holders().await.unwrap().len(), 2);
}

#[tokio::test]
async fn a_busy_worker_that_holds_permits_is_read_with_those_that_accept_jobs() {
    let setting = Setting::new().await;
    let (good, holder, elsewhere) = (setting.worker(2).await, setting.worker(2).await, setting.worker(2).await);
    setting.set("roster", holder, doc! { "available": false, "prefetch": 3, "held_permits": ["printer#0"] }).await;
    setting.set("roster", elsewhere, doc! { "available": false, "held_permits": ["printer#1"], "term": 7_i64 }).await;
    let busy = setting.worker(2).await;
    setting.set("roster", busy, doc! { "available": false, "free": 0, "prefetch": 3, "held_permits": [] }).await;
    let read = setting.store.available_workers(TERM).await.unwrap();
    let read = read.into_iter().map(|worker| (worker.id, worker.free, worker.prefetch, worker.held_permits.unwrap_or_default()));
    assert_eq!(read.collect::<Vec<_>>(), [(good, 2, 0, vec![]), (holder, 0, 0, vec!["printer#0".to_owned()])]);
}

#[tokio::test]
async fn the_cells_of_slow_rates_outlive_their_leader_and_those_of_a_later_one_stay() {
    let setting = Setting::new().await;
    let (now, hour) = (setting.store.now(), Duration::from_secs(3_600));
    assert_eq!(setting.store.kept_cells(LeaseTerm(1)).await.unwrap(), KeptCells::default());
    let rate = Some(Rate::new(100, hour, 100).unwrap());
    let keep = async |term: i64, name: &str, at: Instant| {
        let cell = RateCell { at, until: at - hour / 2, rate };
        setting.store.keep_cells(LeaseTerm(term), &[(name.to_owned(), cell)], None).await
    };
    assert!(keep(2, "api", now + 2 * hour).await.unwrap());
    assert!(keep(2, "api", now + hour).await.unwrap());
    assert!(!keep(1, "api", now).await.unwrap(), "a later leader has kept it");
    assert_eq!(setting.store.highest_term().await.unwrap(), LeaseTerm(2));
    for nonsense in [Bson::from("x"), i64::MAX.into(), 9.0.into(), vec![9].into(), doc! { "a": 9 }.into()] {
        setting.set("metadata", "rate:api", doc! { "term": &nonsense }).await;
        assert_eq!(setting.store.highest_term().await.unwrap(), LeaseTerm(1), "that of `rates`: {nonsense}");
        assert!(keep(1, "api", now + hour).await.unwrap(), "{nonsense} is no term");
    }
    assert!(keep(1, "@mail", now - hour).await.unwrap());
    let long_ago = doc! { "_id": "not a cell", "cell": bson::DateTime::from_millis(0), "term": 99_i64 };
    setting.database.raw("metadata").insert_one(long_ago).await.unwrap();
    let kept = setting.store.kept_cells(LeaseTerm(2)).await.unwrap();
    assert_eq!(setting.count("metadata", doc! { "_id": "not a cell" }).await, 1);
    assert_eq!(kept.cells.keys().collect::<Vec<_>>(), ["api"]);
    let cell = kept.cells["api"];
    let is_soon_after = |at: Instant, before: Instant| (before..before + Duration::from_millis(2)).contains(&at);
    assert!(is_soon_after(cell.at, now + hour) && is_soon_after(cell.until, now + hour / 2) && cell.rate == rate, "{kept:?}");
    assert!(kept.since.is_none() && kept.fast.is_empty(), "{kept:?}");
    assert_eq!(setting.count("metadata", doc! { "_id": { "$regex": "^rate:" } }).await, 1, "the other has passed");
    setting.store.prune_not_kept(now + hour).await.unwrap();
    assert_eq!(setting.store.kept_cells(LeaseTerm(2)).await.unwrap(), kept, "counts are deleted, and not cells");
    setting.set("metadata", "rates", doc! { "term": 7_i64 }).await;
    assert!(setting.store.kept_cells(LeaseTerm(8)).await.unwrap().since.is_some(), "others have led before");

    // A leader of an earlier release writes the cell only.
    setting.set("metadata", "rate:api", doc! { "cell": bson::DateTime::from_chrono(now + 3 * hour) }).await;
    assert_eq!(setting.store.kept_cells(LeaseTerm(8)).await.unwrap().cells["api"].rate, None);

    // Just used up, at any rate.
    setting.set("metadata", "rate:api", doc! { "cell": "x" }).await;
    let unreadable = setting.store.kept_cells(LeaseTerm(8)).await.unwrap().cells["api"];
    assert!(unreadable.at > now + chrono::TimeDelta::days(366) && unreadable.rate.is_none(), "{unreadable:?}");

    let fast: FastLimits = [("api".to_owned(), None), ("customer:*".to_owned(), Some(kept.cells["api"].at))].into();
    assert!(setting.store.keep_cells(LeaseTerm(8), &[], Some(&fast)).await.unwrap());
    assert!(!setting.store.keep_cells(LeaseTerm(7), &[], Some(&FastLimits::new())).await.unwrap());
    assert_eq!(setting.store.highest_term().await.unwrap(), LeaseTerm(8));
    assert_eq!(setting.store.kept_cells(LeaseTerm(8)).await.unwrap().fast, fast, "those of the later leader");
}
