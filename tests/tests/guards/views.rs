//! What people are shown, and what reading costs.

use std::collections::BTreeSet;

use bson::{RawDocumentBuf, doc};
use recruiter_common::{
    JobFilter, JobId, NewJob, Page, StateFilter, WorkerId,
    job::Settings,
    store::{CommitSession, Recorded, Rescheduling, Retrial, Walk},
};
use recruiter_tests::factory::in_ms;

use crate::setting::{Setting, free, set_of};

/// The other documents of the collection are none of theirs.
#[tokio::test]
async fn the_defaults_of_a_class_are_declared_and_removed_by_its_name() {
    let setting = Setting::new().await;
    let metadata = setting.database.raw("metadata");
    metadata.insert_one(doc! { "_id": "class", "group": "other" }).await.unwrap();
    metadata.insert_one(doc! { "_id": "class:wrong", "group": 7 }).await.unwrap();
    let before = metadata.count_documents(doc! {}).await.unwrap();
    let of_group = |group: &str| {
        let mut defaults = Settings::default();
        defaults.group = Some(group.to_owned());
        defaults
    };
    for (class, group) in [("a", "first"), ("b", "second"), ("b", "third")] {
        setting.store.declare_class(class, &of_group(group)).await.unwrap();
    }
    let declared = async || setting.store.class_defaults().await.unwrap();
    assert_eq!(declared().await, [("a".to_owned(), of_group("first")), ("b".to_owned(), of_group("third"))].into());
    setting.store.declare_class("b", &Settings::default()).await.unwrap();
    assert_eq!(declared().await, [("a".to_owned(), of_group("first"))].into());
    assert_eq!(metadata.count_documents(doc! {}).await.unwrap(), before + 1);
}

#[tokio::test]
async fn a_job_is_shown_where_it_is() {
    let setting = Setting::new().await;
    let worker = setting.worker(9).await;
    let [waiting, assigned, running, orphaned, archived] = setting.jobs().await;
    let held = setting.start(worker, [running, orphaned, archived]).await;
    assert_eq!(setting.archive(&[setting.done(&held[2])]).await, [Recorded::Yes]);
    setting.set("roster", worker, doc! { "working_on": [running, assigned] }).await;
    let page = Page::first;
    let found = |jobs: Vec<RawDocumentBuf>| set_of(jobs.iter().map(|job| JobId::from(job.get_object_id("_id").unwrap())));
    let listed = async |state| found(setting.store.jobs(&JobFilter { state, ..JobFilter::default() }, page(9)).await.unwrap().jobs);
    let walked = async |state| {
        let mut walk = Walk::new(JobFilter { state, ..JobFilter::default() });
        let found = setting.store.next_matches(&mut walk).await.unwrap().unwrap();
        assert_eq!(setting.store.next_matches(&mut walk).await.unwrap(), None);
        set_of(found.into_iter().map(|found| found.job))
    };
    for state in [StateFilter::Waiting, StateFilter::Running, StateFilter::Archived] {
        let expected = match state {
            StateFilter::Waiting => set_of([waiting, assigned]),
            StateFilter::Running => set_of([running]),
            StateFilter::Archived => set_of([archived]),
        };
        assert_eq!(listed(Some(state)).await, expected, "{state:?}");
        // A walk does not ask the roster.
        let held_by_nobody = (state == StateFilter::Running).then_some(orphaned);
        assert_eq!(walked(Some(state)).await, expected.into_iter().chain(held_by_nobody).collect(), "{state:?}");
    }
    assert_eq!(listed(None).await, set_of([waiting, assigned, running, orphaned, archived]));
    assert_eq!(walked(None).await, set_of([waiting, assigned, running, orphaned]));
    let by_id = setting.store.jobs_by_id(&[waiting, archived]).await.unwrap();
    assert_eq!(set_of(by_id.iter().map(|(id, stored)| (*id, stored.is_archived))), set_of([(waiting, false), (archived, true)]));
    let sizes = setting.store.sizes_by_id(&[waiting, archived]).await.unwrap();
    assert_eq!(sizes.into_keys().collect::<BTreeSet<_>>(), set_of([waiting, archived]));
    let newest = *[waiting, assigned, running, orphaned, archived].iter().max().unwrap();
    let behind = page(9).after(newest);
    let behind = found(setting.store.jobs(&JobFilter::default(), behind).await.unwrap().jobs);
    assert_eq!((behind.len(), behind.contains(&newest)), (4, false));
    assert_eq!(setting.store.running().await.unwrap().into_iter().collect::<Vec<_>>(), [("generic".to_owned(), 1)]);
    assert_eq!(setting.store.finished(in_ms(&setting.store, -60_000)).await.unwrap().len(), 1);
    assert_eq!(setting.store.finished(in_ms(&setting.store, 60_000)).await.unwrap(), []);
}

/// These conditions are implied by what is done with the answer: they save reading it.
#[tokio::test]
async fn nothing_is_read_that_would_be_thrown_away() {
    let setting = Setting::new().await;
    let (database, store) = (setting.database.database(), &setting.store);
    let worker = WorkerId::new();
    let [held, retried, started_anew, handed_back] = setting.jobs().await;
    let mine = setting.start(worker, [held, retried, started_anew]).await;
    let batch = mine.each_ref().map(|one| setting.retry(one, setting.store.now()));
    assert_eq!(setting.reschedule(&batch[1..]).await, [Recorded::Yes; 2]);
    setting.start(WorkerId::new(), [started_anew]).await;
    let [(job, claim)] = setting.start(worker, [handed_back]).await;
    assert_eq!(setting.reschedule(&[Rescheduling::release(&job, claim)]).await, [Recorded::Yes]);
    let (assigned, available, idle) = (setting.worker(2).await, setting.worker(2).await, setting.worker(2).await);
    let (round, jobs) = setting.assign(available).await;
    assert!(store.report_if_unassigned_since(available, Some(round), &free(1, &jobs)).await.unwrap());
    setting.assign(assigned).await;
    assert!(store.withdraw_if_unassigned_since(idle, None).await.unwrap());

    let profile = async |level: i32| database.run_command(doc! { "profile": level }).await.unwrap();
    profile(2).await;
    assert_eq!(store.held_by(worker, &[held, retried]).await.unwrap().len(), 1);
    assert_eq!(setting.reschedule(&batch[2..]).await, [Recorded::ClaimLost]);
    assert_eq!(store.assignment(available).await.unwrap(), None);
    assert_eq!(store.assigned_and_not_taken().await.unwrap().len(), 1);
    setting.database.raw("archived").insert_one(doc! {}).await.unwrap();
    let gone = Retrial { job: JobId::new(), retried_as: None, new: JobId::new(), document: doc! {}.into() };
    assert_eq!(store.retry_if_archived(&mut CommitSession::default(), &[gone]).await.unwrap(), [Recorded::ClaimLost]);
    let mut session = store.start_session().await.unwrap();
    session.start_transaction().await.unwrap();
    NewJob::of_class("x", doc! {}).with_id(JobId::new()).enqueue_in(store, &mut session).await.unwrap();
    session.commit_transaction().await.unwrap();
    profile(0).await;
    let reads = doc! { "appName": "test", "op": "query", "ns": { "$regex": "scheduled|roster|archived" } };
    let reads = setting.database.all("system.profile", reads).await;
    let returned: Vec<i32> = reads.iter().map(|read| read.get_i32("nreturned").unwrap()).collect();
    assert_eq!(returned, [1, 0, 0, 1, 0, 0, 0], "{reads:?}");
}
