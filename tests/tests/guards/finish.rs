//! The end of an attempt: its job is archived, deleted or rescheduled by the start that holds it.

use std::collections::BTreeSet;

use bson::{Document, doc};
use recruiter_common::{
    Failure, FinishReason, JobId, NewJob, WorkerId,
    job::{Claim, Execution, Job},
    store::{Archival, CommitSession, Ending, Recorded, Rescheduling},
    telemetry::chain,
};
use recruiter_tests::factory::{in_ms, read};

use crate::setting::{Setting, date, set_of};

fn ids(documents: &[Document]) -> BTreeSet<JobId> {
    documents.iter().map(|document| document.get_object_id("_id").unwrap().into()).collect()
}

/// I2.
#[tokio::test]
async fn only_what_this_start_holds_is_discarded() {
    let setting = Setting::new().await;
    let jobs @ [held, retried, started_anew, _waiting] = setting.jobs().await;
    let mine = setting.start(WorkerId::new(), [held, retried, started_anew]).await;
    let now = setting.store.now();
    assert_eq!(setting.reschedule(&[setting.retry(&mine[1], now), setting.retry(&mine[2], now)]).await, [Recorded::Yes; 2]);
    setting.start(WorkerId::new(), [started_anew]).await;
    setting.store.discard_if_claimed(&mine.map(|(_, claim)| claim)).await.unwrap();
    for job in jobs {
        assert_eq!(setting.found("scheduled", job).await.is_some(), job != held);
    }
}

/// I3: the second attempt at a write whose answer was lost changes nothing that happened since.
#[tokio::test]
async fn a_job_is_rescheduled_by_the_start_that_holds_it() {
    let setting = Setting::new().await;
    let [held, retried, started_anew] = setting.jobs().await;
    let mine = setting.start(WorkerId::new(), [held, retried, started_anew]).await;
    let batch = mine.each_ref().map(|one| setting.retry(one, setting.store.now()));
    assert_eq!(setting.reschedule(&batch[1..]).await, [Recorded::Yes; 2]);
    setting.set("scheduled", retried, doc! { "scheduled_at": date(in_ms(&setting.store, 60_000)) }).await;
    setting.start(WorkerId::new(), [started_anew]).await;
    let before = (setting.scheduled(retried).await, setting.scheduled(started_anew).await);
    assert_eq!(setting.reschedule(&batch).await, [Recorded::Yes, Recorded::Yes, Recorded::ClaimLost]);
    assert!(!setting.scheduled(held).await.get_bool("locked").unwrap());
    assert_eq!((setting.scheduled(retried).await, setting.scheduled(started_anew).await), before);
}

/// I2, I3.
#[tokio::test]
async fn a_job_is_archived_by_the_start_that_holds_it() {
    let setting = Setting::new().await;
    let [held, retried, started_anew, not_ended] = setting.jobs().await;
    let mine = setting.start(WorkerId::new(), [held, retried, started_anew, not_ended]).await;
    let now = setting.store.now();
    assert_eq!(setting.reschedule(&[setting.retry(&mine[1], now), setting.retry(&mine[2], now)]).await, [Recorded::Yes; 2]);
    setting.start(WorkerId::new(), [started_anew]).await;
    let batch: Vec<Archival> = mine[..3].iter().map(|one| setting.done(one)).collect();
    assert_eq!(setting.archive(&batch).await, [Recorded::Yes, Recorded::ClaimLost, Recorded::ClaimLost]);
    assert_eq!(setting.count("archived", doc! {}).await, 1);
    for job in [retried, started_anew, not_ended] {
        setting.scheduled(job).await;
    }
}

/// I3: each recognises its own write, whose reply may be lost. The end that a cleaner has written after the worker's death is not the one that
/// the worker writes late.
#[tokio::test]
async fn the_end_that_a_cleaner_has_written_is_not_that_of_the_late_worker() {
    let setting = Setting::new().await;
    let jobs: [JobId; 2] = setting.jobs().await;
    let [archived, retried] = setting.start(WorkerId::new(), jobs).await;
    let died = |(job, _): &(Job, Claim)| {
        let execution = job.last_execution.clone().unwrap().ended(setting.store.now(), None);
        Execution { crashed: Some(true), ..execution }
    };
    let end = Archival::ended(&archived.0, archived.1, Ending::new(died(&archived), FinishReason::WORKER_DIED));
    let again = Rescheduling::retry(&retried.0, retried.1, &died(&retried), setting.store.now(), true);
    for _ in 0..2 {
        assert_eq!(setting.archive(std::slice::from_ref(&end)).await, [Recorded::Yes]);
        assert_eq!(setting.reschedule(std::slice::from_ref(&again)).await, [Recorded::Yes]);
    }
    assert_eq!(setting.archive(&[setting.done(&archived)]).await, [Recorded::ClaimLost]);
    assert_eq!(setting.reschedule(&[setting.retry(&retried, setting.store.now())]).await, [Recorded::ClaimLost]);
}

/// I3: a job of which nothing is kept is deleted by the start that holds it, alone and in one transaction with others.
#[tokio::test]
async fn a_job_of_which_nothing_is_kept_is_deleted_by_the_start_that_holds_it() {
    for with_another in [false, true] {
        let setting = Setting::new().await;
        let worker = setting.worker(10).await;
        let [held, retried, started_anew, not_ended] = setting.fleeting().await;
        let mine = setting.start(worker, [held, retried, started_anew, not_ended]).await;
        let now = setting.store.now();
        assert_eq!(setting.reschedule(&[setting.retry(&mine[1], now), setting.retry(&mine[2], now)]).await, [Recorded::Yes; 2]);
        setting.start(WorkerId::new(), [started_anew]).await;
        let mut batch: Vec<Archival> = mine[..3].iter().map(|one| setting.done(one)).collect();
        let mut expected = vec![Recorded::Yes, Recorded::ClaimLost, Recorded::ClaimLost];
        if with_another {
            let [another] = setting.jobs().await;
            batch.push(setting.done(&setting.start(worker, [another]).await[0]));
            expected.push(Recorded::Yes);
        }
        assert_eq!(setting.archive(&batch).await, expected);
        assert_eq!((setting.found("scheduled", held).await, setting.count("archived", doc! {}).await), (None, with_another.into()));
        for job in [retried, started_anew, not_ended] {
            setting.scheduled(job).await;
        }
    }
}

/// I3: after a lost reply the deletion is sent again and finds nothing. It was made by the holder of the start, if the holder lives; after its
/// death another start may have succeeded in the meantime.
#[tokio::test]
async fn a_deletion_is_recognised_while_the_holder_lives() {
    let setting = Setting::new().await;
    let (living, retired, gone) = (setting.worker(10).await, setting.worker(10).await, WorkerId::new());
    for (worker, recorded) in [(living, Recorded::Yes), (retired, Recorded::ClaimLost), (gone, Recorded::ClaimLost)] {
        let jobs: [JobId; 2] = setting.fleeting().await;
        let ends = setting.start(worker, jobs).await.each_ref().map(|one| setting.done(one));
        assert_eq!(setting.archive(&ends).await, [Recorded::Yes; 2]);
        if worker == retired {
            setting.set("roster", retired, doc! { "retired": true }).await;
        }
        assert_eq!(setting.archive(&ends).await, [recorded; 2]);
        // With a job whose document is kept, in a transaction.
        let [kept] = setting.jobs().await;
        let kept = setting.done(&setting.start(worker, [kept]).await[0]);
        assert_eq!(setting.archive(&[ends[0].clone(), kept]).await, [recorded, Recorded::Yes]);
    }
    // An operator has moved it to the archive.
    let [moved] = setting.fleeting().await;
    let end = setting.done(&setting.start(living, [moved]).await[0]);
    setting.database.raw("archived").insert_one(setting.scheduled(moved).await).await.unwrap();
    setting.database.raw("scheduled").delete_one(doc! { "_id": moved }).await.unwrap();
    assert_eq!(setting.archive(&[end]).await, [Recorded::ClaimLost]);
}

/// The counts of this period and of later ones are read, those of earlier ones are pruned.
#[tokio::test]
async fn successes_of_which_nothing_is_kept_are_counted_by_period() {
    let setting = Setting::new().await;
    let jobs: [JobId; 3] = setting.fleeting().await;
    let worker = setting.worker(10).await;
    let ends = setting.start(worker, jobs).await.each_ref().map(|one| setting.done(one));
    assert_eq!(setting.archive(&ends).await, [Recorded::Yes; 3]);
    let now = setting.store.now();
    let at = |seconds: i64| now - chrono::TimeDelta::seconds(seconds);
    let old = doc! { "_id": { "not_kept_since": date(at(100)), "group": "generic" }, "count": 5 };
    setting.database.raw("metadata").insert_one(old).await.unwrap();
    let counted = async |seconds: i64| setting.store.not_kept(at(seconds)).await.unwrap().groups.get("generic").copied();
    assert_eq!((counted(60).await, counted(200).await), (Some(3), Some(8)));
    setting.database.raw("metadata").insert_one(doc! { "_id": { "another": 1 } }).await.unwrap();
    let others = setting.count("metadata", doc! { "count": { "$exists": false } }).await;
    setting.store.prune_not_kept(at(60)).await.unwrap();
    assert_eq!((counted(60).await, counted(200).await), (Some(3), Some(3)));
    assert_eq!(setting.count("metadata", doc! { "count": { "$exists": false } }).await, others);
}

/// A cancellation, or the end of a document that is no job.
#[tokio::test]
async fn a_document_without_holder_is_archived_as_it_was_read() {
    let setting = Setting::new().await;
    let [untouched, locked, handed_back] = setting.jobs().await;
    let jobs = read(&setting.store, &[untouched, locked, handed_back]).await;
    let batch: Vec<Archival> = jobs
        .iter()
        .map(|job| Archival::unstarted(job.id, &job.document, &FinishReason::CANCELLED, &Failure::new("x", ""), setting.store.now()))
        .collect();
    setting.set("scheduled", locked, doc! { "locked": true }).await;
    let [(job, claim)] = setting.start(WorkerId::new(), [handed_back]).await;
    assert_eq!(setting.reschedule(&[Rescheduling::release(&job, claim)]).await, [Recorded::Yes]);
    let recorded = setting.archive(&batch).await;
    for (job, recorded) in jobs.iter().zip(recorded) {
        assert_eq!(recorded, if job.id == untouched { Recorded::Yes } else { Recorded::ClaimLost });
        assert_eq!(setting.found("scheduled", job.id).await.is_some(), job.id != untouched);
    }
}

#[tokio::test]
async fn an_unstarted_job_is_archived_with_the_content_and_expiry_that_were_read() {
    let setting = Setting::new().await;
    let [same, replaced, later] = setting.jobs().await;
    let end = async |id: JobId| {
        let job = read(&setting.store, &[id]).await.remove(0);
        Archival::unstarted(id, &job.document, &FinishReason::EXPIRED, &Failure::expired(), setting.store.now())
    };
    let batch = [end(same).await, end(replaced).await, end(later).await];
    setting.set("scheduled", replaced, doc! { "replaced": 1 }).await;
    setting.set("scheduled", later, doc! { "expires_at": date(in_ms(&setting.store, 60_000)) }).await;
    assert_eq!(setting.archive(&batch).await, [Recorded::Yes, Recorded::ClaimLost, Recorded::ClaimLost]);
}

/// I2: an archived job is recognised as archived by this start or by another one.
#[tokio::test]
async fn an_outcome_in_the_archive_is_recognised_by_its_start() {
    let setting = Setting::new().await;
    let [job, other] = setting.jobs().await;
    let early = setting.start(WorkerId::new(), [job]).await;
    assert_eq!(setting.reschedule(&[setting.retry(&early[0], setting.store.now())]).await, [Recorded::Yes]);
    let late = setting.start(WorkerId::new(), [job, other]).await;
    assert_eq!(setting.archive(&[setting.done(&late[0])]).await, [Recorded::Yes]);
    for _ in 0..2 {
        assert_eq!(setting.archive(&late.each_ref().map(|one| setting.done(one))).await, [Recorded::Yes; 2]);
    }
    assert_eq!(setting.archive(&[setting.done(&early[0])]).await, [Recorded::ClaimLost]);
}

#[tokio::test]
async fn only_jobs_that_are_asked_about_are_known_from_the_archive() {
    let setting = Setting::new().await;
    let [asked, other, waiting] = setting.jobs().await;
    let held = setting.start(WorkerId::new(), [asked, other]).await;
    assert_eq!(setting.archive(&held.each_ref().map(|one| setting.done(one))).await, [Recorded::Yes; 2]);
    assert_eq!(set_of(setting.store.already_archived(&[asked, waiting]).await.unwrap()), set_of([asked]));
    assert_eq!(ids(&setting.store.archived_jobs(&[asked, waiting]).await.unwrap()), set_of([asked]));
}

/// A job is deleted only if it is in the archive, and known only if it is there under its id. The refusal of a unique index of an application
/// proves neither.
#[tokio::test]
async fn a_unique_index_of_somebody_elses_loses_no_job() {
    let setting = Setting::new().await;
    let unique = doc! { "key": { "urn": 1 }, "name": "urn", "unique": true, "partialFilterExpression": { "urn": { "$exists": true } } };
    for collection in ["scheduled", "archived"] {
        setting.database.database().run_command(doc! { "createIndexes": collection, "indexes": [unique.clone()] }).await.unwrap();
    }
    let job = || NewJob::of_class("x", doc! {}).urn("the same");
    let first = job().enqueue(&setting.store).await.unwrap().id;
    assert!(job().enqueue(&setting.store).await.is_err_and(|error| chain(&error).contains("dup key")), "it was not stored");
    setting.jobs::<1>().await;
    let again = job().with_id(first).enqueue(&setting.store).await.unwrap();
    assert!(again.id == first && !again.is_new, "it is there under its id");
    let [started] = setting.start(WorkerId::new(), [first]).await;
    assert_eq!(setting.archive(&[setting.done(&started)]).await, [Recorded::Yes]);
    let second = job().enqueue(&setting.store).await.unwrap().id;
    let [started] = setting.start(WorkerId::new(), [second]).await;
    let mut session = CommitSession::default();
    assert_eq!(setting.store.finish(&mut session, &[setting.done(&started)]).await.unwrap(), [Recorded::Yes]);
    let archived = setting.found("archived", second).await.unwrap();
    assert!(archived.contains_key("reduced") && !archived.contains_key("urn"), "{archived}");
}
