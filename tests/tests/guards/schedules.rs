//! Schedules are advanced and changed as they were read.

use std::collections::BTreeSet;

use bson::{Document, RawDocumentBuf, doc};
use recruiter_common::{
    JobId,
    instant::Instant,
    store::{Advance, CommitSession},
};
use recruiter_tests::factory::in_ms;

use crate::setting::{Setting, date, set_of};

impl Setting {
    async fn schedule(&self, name: &str, fields: Document) {
        let mut document = doc! { "every_ms": 60_000, "job": { "class": "x" } };
        document.extend(fields);
        assert!(self.store.insert_schedule(name, document).await.unwrap());
    }
}

fn advance(name: &str, from: Option<Instant>, to: Instant) -> Advance {
    let run = doc! { "slot": date(to), "job": JobId::new(), "at": date(to) };
    Advance { name: name.into(), last_slot: from, through: to, next_run: None, runs: vec![run], overlap: 1, missed: 0 }
}

/// A leader that was frozen, or that has read the schedule before its times were changed, advances nothing and enqueues nothing.
#[tokio::test]
async fn a_schedule_is_advanced_from_the_slot_that_was_read() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let [first, second, third] = [1_000, 2_000, 3_000].map(|ms| in_ms(store, ms));
    setting.schedule("a", doc! { "last_slot": date(first) }).await;
    setting.schedule("b", doc! { "last_slot": date(first) }).await;
    setting.schedule("new", doc! {}).await;
    let last_slot =
        async |name: &str| setting.found("schedulers", name).await.unwrap().get_datetime("last_slot").ok().map(|at| at.to_chrono());
    assert!(store.advance_schedules(&[advance("a", Some(first), second)]).await.unwrap());
    assert!(store.advance_schedules(&[advance("new", None, second)]).await.unwrap());
    let b = setting.found("schedulers", "b").await;
    assert!(!store.advance_schedules(&[advance("a", Some(first), third), advance("new", None, third)]).await.unwrap());
    assert_eq!((last_slot("a").await, last_slot("new").await), (Some(second), Some(second)));
    assert_eq!(setting.found("schedulers", "b").await, b);

    let mut session = CommitSession::default();
    let job = async || doc! { "_id": JobId::new(), "workable": { "class": "x" }, "locked": false, "group": "g", "priority": 5, "scheduled_at": date(first) };
    assert!(!store.advance_with_jobs(&mut session, &[advance("a", Some(first), third)], vec![job().await]).await.unwrap());
    assert_eq!((setting.count("scheduled", doc! {}).await, last_slot("a").await), (0, Some(second)));
    // All or none.
    let both = [advance("a", Some(second), third), advance("b", Some(second), third)];
    assert!(!store.advance_with_jobs(&mut session, &both, vec![job().await]).await.unwrap());
    assert_eq!((setting.count("scheduled", doc! {}).await, last_slot("a").await), (0, Some(second)));
    let kept = job().await;
    assert!(store.advance_with_jobs(&mut session, &[advance("a", Some(second), third)], vec![kept.clone()]).await.unwrap());
    assert_eq!((setting.count("scheduled", doc! {}).await, last_slot("a").await), (1, Some(third)));
    assert_eq!(setting.found("schedulers", "b").await, b);
    // A slot that was put back by hand, and whose job waits.
    assert!(store.advance_with_jobs(&mut session, &[advance("b", Some(first), third)], vec![kept]).await.unwrap());
    assert_eq!((setting.count("scheduled", doc! {}).await, last_slot("b").await), (1, Some(third)));
}

#[tokio::test]
async fn a_schedule_is_changed_as_it_was_read() {
    let setting = Setting::new().await;
    let store = &setting.store;
    setting.schedule("a", doc! { "revision": 1_i64 }).await;
    setting.schedule("b", doc! { "revision": 1_i64, "source": "shop" }).await;
    assert!(!store.insert_schedule("a", doc! { "every_ms": 1_000, "job": { "class": "y" } }).await.unwrap());
    let b = setting.found("schedulers", "b").await;
    let change =
        async |revision: i64| store.change_schedule_if_unchanged("a", Some(revision.into()), doc! { "every_ms": 5_000 }).await.unwrap();
    assert!(change(1).await && !change(1).await && change(2).await);
    let pause = async |by: &str| store.pause_schedule_if_running("a", doc! { "by": by }).await.unwrap();
    assert!(pause("one").await && !pause("two").await);
    let paused = setting.found("schedulers", "a").await.unwrap();
    assert_eq!(paused.get_document("paused").unwrap(), &doc! { "by": "one" });
    let resume = async || store.resume_schedule_if_paused("a", doc! { "last_slot": date(store.now()) }).await.unwrap();
    assert!(resume().await);
    let resumed = setting.found("schedulers", "a").await;
    assert!(!resume().await);
    assert_eq!(setting.found("schedulers", "a").await, resumed);
    store.add_run("a", doc! { "job": JobId::new(), "at": date(store.now()) }).await.unwrap();
    assert_eq!(setting.found("schedulers", "b").await, b, "it is another one");
    assert!(!store.remove_schedule("b", Some("other")).await.unwrap() && !store.remove_schedule("a", Some("shop")).await.unwrap());
    assert!(store.remove_schedule("b", Some("shop")).await.unwrap() && store.remove_schedule("a", None).await.unwrap());
}

/// Null, and the largest numbers, are valid. What was written past the validator is no reason either not to advance it.
#[tokio::test]
async fn a_schedule_with_odd_counts_is_advanced_and_changed() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let [first, second, third] = [1_000, 2_000, 3_000].map(|ms| in_ms(store, ms));
    for (odd, overlap, revision) in [
        (doc! { "runs": null, "skipped": null, "revision": null }, 2_i64, 3_i64),
        (doc! { "skipped": { "overlap": i64::MAX, "missed": "many" }, "revision": i64::MAX }, i64::MAX, i64::MAX),
        (doc! { "runs": "none", "skipped": "none", "paused": "$no", "revision": "none" }, 2, 3),
    ] {
        setting.schedule("odd", doc! { "last_slot": date(first) }).await;
        setting.set("schedulers", "odd", odd.clone()).await;
        let mut missed = advance("odd", Some(second), third);
        missed.missed = 5;
        assert!(store.advance_schedules(&[advance("odd", Some(first), second)]).await.unwrap(), "{odd}");
        assert!(store.advance_schedules(&[missed]).await.unwrap(), "{odd}");
        store.add_run("odd", doc! { "job": JobId::new(), "at": date(store.now()) }).await.unwrap();
        let advanced = setting.found("schedulers", "odd").await.unwrap();
        assert_eq!(advanced.get_array("runs").unwrap().len(), 3, "{advanced}");
        assert_eq!(advanced.get_document("skipped").unwrap(), &doc! { "overlap": overlap, "missed": 5_i64 });
        if odd.contains_key("paused") {
            assert!(store.resume_schedule_if_paused("odd", doc! {}).await.unwrap());
        }
        let job = doc! { "class": "$x", "parameters": { "$a.b": "$c" } };
        let change = doc! { "job": job.clone(), "every_ms": null, "cron": "@daily" };
        let read = setting.found("schedulers", "odd").await.unwrap().get("revision").cloned();
        assert!(store.change_schedule_if_unchanged("odd", read, change).await.unwrap(), "{odd}");
        assert!(store.pause_schedule_if_running("odd", doc! { "by": "$me" }).await.unwrap(), "{odd}");
        assert!(store.resume_schedule_if_paused("odd", doc! { "last_slot": date(third) }).await.unwrap(), "{odd}");
        let changed = setting.found("schedulers", "odd").await.unwrap();
        assert!(!["every_ms", "paused", "next_run"].iter().any(|field| changed.contains_key(*field)), "{changed}");
        assert_eq!((changed.get_document("job").unwrap(), changed.get_str("cron").unwrap()), (&job, "@daily"));
        assert_eq!(changed.get_i64("revision").unwrap(), revision + i64::from(odd.contains_key("paused")), "{odd}");
        assert!(store.remove_schedule("odd", None).await.unwrap());
    }
}

#[tokio::test]
async fn schedules_are_found_by_name_and_unfinished_jobs_by_id() {
    let setting = Setting::new().await;
    for name in ["a", "b", "c"] {
        setting.schedule(name, doc! { "revision": 1_i64 }).await;
    }
    let names =
        |documents: Vec<RawDocumentBuf>| documents.iter().map(|found| found.get_str("_id").unwrap().to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(
        names(setting.store.schedules_by_name(&["a".into(), "c".into(), "d".into()]).await.unwrap()),
        set_of(["a", "c"].map(str::to_owned))
    );
    assert_eq!(setting.store.schedule_revisions().await.unwrap().len(), 3);
    let [asked, other] = setting.jobs().await;
    assert_eq!(setting.store.unfinished_among(&[asked, JobId::new()]).await.unwrap(), [asked].into());
    assert_ne!(asked, other);
}
