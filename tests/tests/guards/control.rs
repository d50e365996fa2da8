//! What operators change: jobs are cancelled, hastened, altered, retried and deleted; workers are asked to be quiet or to stop.

use bson::{doc, oid::ObjectId};
use recruiter_common::{
    JobId, WorkerId,
    store::{CommitSession, HeartbeatReply, Recorded, Retrial, RetryNote},
    workers::Wanted,
};
use recruiter_tests::factory::in_ms;

use crate::setting::{Setting, date};

#[tokio::test]
async fn what_runs_can_be_asked_to_stop_and_what_waits_be_due_at_once() {
    let setting = Setting::new().await;
    let [running, waiting, other, other_running] = setting.jobs().await;
    setting.start(WorkerId::new(), [running, other_running]).await;
    let (later, now) = (in_ms(&setting.store, 60_000), in_ms(&setting.store, 1_000));
    for job in [running, waiting, other] {
        setting.set("scheduled", job, doc! { "scheduled_at": date(later) }).await;
    }
    let untouched = async || (setting.scheduled(other).await, setting.scheduled(other_running).await);
    let before = (untouched().await, setting.scheduled(waiting).await);
    assert_eq!(setting.store.request_cancel_if_started(&[running, waiting]).await.unwrap(), [running].into());
    assert_eq!((untouched().await, setting.scheduled(waiting).await), before);
    let before = (untouched().await, setting.scheduled(running).await);
    assert_eq!(setting.store.hasten_if_unlocked(&[running, waiting], now).await.unwrap(), [waiting].into());
    assert_eq!((untouched().await, setting.scheduled(running).await), before);
    // What is due earlier stays so, and only what was asked about and waits is told.
    let due = setting.scheduled(waiting).await;
    assert_eq!(setting.store.hasten_if_unlocked(&[running, waiting], later).await.unwrap(), [waiting].into());
    assert_eq!(setting.scheduled(waiting).await, due);
    setting.set("scheduled", running, doc! { "scheduled_at": date(now) }).await;
    setting.set("scheduled", waiting, doc! { "scheduled_at": date(in_ms(&setting.store, -1_000)) }).await;
    setting.start(WorkerId::new(), [waiting]).await;
    assert_eq!(setting.store.hasten_if_unlocked(&[running, waiting], now).await.unwrap(), [].into());
}

#[tokio::test]
async fn a_wish_to_cancel_is_heard_for_the_jobs_that_are_asked_about() {
    let setting = Setting::new().await;
    let jobs @ [unwanted, wanted, not_asked] = setting.jobs().await;
    setting.start(WorkerId::new(), jobs).await;
    for job in [unwanted, not_asked] {
        assert_eq!(setting.store.request_cancel_if_started(&[job]).await.unwrap(), [job].into());
    }
    assert_eq!(setting.store.cancel_requests(&[unwanted, wanted]).await.unwrap(), [unwanted]);
}

/// A job that its process does not execute becomes due, unless it was started or changed since.
#[tokio::test]
async fn a_job_is_handed_to_the_workers_only_as_it_was_enqueued() {
    let setting = Setting::new().await;
    let [kept, locked, moved, retried] = setting.jobs().await;
    let (due, now) = (in_ms(&setting.store, 60_000), setting.store.now());
    for job in [kept, locked, moved, retried] {
        setting.set("scheduled", job, doc! { "scheduled_at": date(due) }).await;
    }
    setting.set("scheduled", locked, doc! { "locked": true }).await;
    setting.set("scheduled", moved, doc! { "scheduled_at": date(in_ms(&setting.store, 90_000)) }).await;
    setting.set("scheduled", retried, doc! { "attempts": 1 }).await;
    for (job, expected) in [(kept, true), (locked, false), (moved, false), (retried, false), (JobId::new(), false)] {
        assert_eq!(setting.store.hasten_if_never_started(job, due, now).await.unwrap(), expected);
    }
}

#[tokio::test]
async fn what_waits_gets_other_values_and_what_runs_keeps_its_own() {
    let setting = Setting::new().await;
    let [running, waiting, other] = setting.jobs().await;
    setting.start(WorkerId::new(), [running]).await;
    let before = (setting.scheduled(running).await, setting.scheduled(other).await);
    let set = doc! { "priority": 9, "group": "g", "scheduled_at": date(in_ms(&setting.store, 60_000)) };
    assert_eq!(setting.store.alter_if_unlocked(&[running, waiting], set.clone()).await.unwrap(), [waiting].into());
    assert_eq!((setting.scheduled(running).await, setting.scheduled(other).await), before);
    let altered = setting.scheduled(waiting).await;
    assert!(set.iter().all(|(field, value)| altered.get(field) == Some(value)), "{altered}");
    // The answer names neither a job that has the values and was started meanwhile, nor one that the caller did not ask about.
    for job in [running, other] {
        setting.set("scheduled", job, set.clone()).await;
    }
    assert_eq!(setting.store.alter_if_unlocked(&[running, waiting], set).await.unwrap(), [waiting].into());
}

fn retrial(setting: &Setting, job: JobId, retried_as: Option<JobId>) -> Retrial {
    let new = JobId::new();
    let document = doc! { "_id": new, "locked": false, "group": "g", "priority": 5, "scheduled_at": date(setting.store.now()), "workable": { "class": "x" } };
    Retrial { job, retried_as: retried_as.map(Into::into), new, document: document.into() }
}

/// I1.
#[tokio::test]
async fn a_finished_job_is_enqueued_again_once_by_whoever_has_read_it_as_it_is() {
    let setting = Setting::new().await;
    let [meant, other, gone] = setting.jobs().await;
    let held = setting.start(WorkerId::new(), [meant, other]).await;
    assert_eq!(setting.archive(&held.each_ref().map(|one| setting.done(one))).await, [Recorded::Yes; 2]);
    let retrial = |job, retried_as| retrial(&setting, job, retried_as);
    let mut session = CommitSession::default();
    let mut retry = async |batch: &[Retrial]| setting.store.retry_if_archived(&mut session, batch).await.unwrap();
    let (first, lost) = (retrial(meant, None), retrial(gone, None));
    assert_eq!(retry(&[first.clone(), lost]).await, [Recorded::Yes, Recorded::ClaimLost]);
    assert_eq!(setting.found("archived", meant).await.unwrap().get_object_id("retried_as").unwrap(), first.new.into());
    // The same call again, as after a lost reply, and another caller that has read the job before.
    assert_eq!(retry(std::slice::from_ref(&first)).await, [Recorded::Yes]);
    assert_eq!(retry(&[retrial(meant, None)]).await, [Recorded::ClaimLost]);
    assert_eq!(setting.count("scheduled", doc! { "group": "g" }).await, 1);
    let again = retrial(meant, Some(first.new));
    assert_eq!(retry(std::slice::from_ref(&again)).await, [Recorded::Yes]);
    assert_eq!(setting.found("archived", meant).await.unwrap().get_object_id("retried_as").unwrap(), again.new.into());
    assert!(!setting.found("archived", other).await.unwrap().contains_key("retried_as"));
    assert_eq!(setting.count("scheduled", doc! { "group": "g" }).await, 2);
}

/// Its note is at the job that is enqueued again last. A later retry replaces the note, and the earlier one enqueues no more.
#[tokio::test]
async fn of_two_retries_of_a_graph_the_later_one_goes_on() {
    let setting = Setting::new().await;
    let (store, jobs) = (&setting.store, setting.jobs().await);
    let [part, last, other, again] = jobs;
    let held = setting.start(WorkerId::new(), jobs).await;
    assert_eq!(setting.archive(&held.each_ref().map(|one| setting.done(one))).await, [Recorded::Yes; 4]);
    let [earlier, later] = [(); 2].map(|()| RetryNote { last, retry: ObjectId::new() });
    let mut session = CommitSession::default();
    let mut retry = async |jobs: &[JobId], note| {
        let batch: Vec<Retrial> = jobs.iter().map(|job| retrial(&setting, *job, None)).collect();
        store.retry_all_if_archived(&mut session, &batch, Some(note)).await.unwrap()
    };
    let noted = async |job| setting.found("archived", job).await.unwrap().contains_key("retrying");
    assert!(store.begin_retry(earlier).await.unwrap());
    assert!(store.begin_retry(RetryNote { last: other, ..earlier }).await.unwrap());
    assert_eq!(retry(&[part], earlier).await, Some([part].into()));
    assert!(store.begin_retry(later).await.unwrap());
    assert_eq!(retry(&[again], earlier).await, None, "the earlier one is given up");
    assert_eq!(setting.count("scheduled", doc! { "group": "g" }).await, 1);
    // Another process has retried this job, and the note is there: the retry goes on with the others.
    assert_eq!(retry(&[part], later).await, Some([].into()));
    store.end_retry(&[last], Some(earlier.retry)).await.unwrap();
    assert_eq!((noted(last).await, noted(other).await), (true, true), "the note of the later one, and that at another job");
    assert_eq!(retry(&[last], later).await, Some([last].into()));
    assert_eq!((noted(last).await, noted(other).await), (false, true));
    assert!(!store.begin_retry(later).await.unwrap(), "it is retried");
    assert!(!noted(last).await);
    // Nor is it given up: another process has ended it.
    assert_eq!(retry(&[part, again], later).await, Some([].into()));
    store.end_retry(&[last], None).await.unwrap();
    assert!(noted(other).await);
}

#[tokio::test]
async fn only_archived_jobs_that_are_named_are_deleted() {
    let setting = Setting::new().await;
    let [meant, other, waiting] = setting.jobs().await;
    let held = setting.start(WorkerId::new(), [meant, other]).await;
    assert_eq!(setting.archive(&held.each_ref().map(|one| setting.done(one))).await, [Recorded::Yes; 2]);
    assert_eq!(setting.store.delete_archived(&[meant, waiting]).await.unwrap(), 1);
    assert_eq!((setting.count("archived", doc! { "_id": other }).await, setting.count("scheduled", doc! {}).await), (1, 1));
}

#[tokio::test]
async fn workers_are_asked_while_they_live_and_not_after_a_stop() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let [worker, other, dead] = [setting.worker(1).await, setting.worker(1).await, setting.worker(1).await];
    setting.set("roster", dead, doc! { "retired": true }).await;
    let untouched = setting.found("roster", other).await;
    let quiet = async |worker| store.ask_worker(worker, Wanted::Quiet, "ada").await.unwrap();
    let stop = async |worker| store.ask_worker(worker, Wanted::Stop, "bob").await.unwrap();
    let resume = async |worker| store.resume_if_quiet(worker).await.unwrap();
    let wanted = async |worker| store.wanted(worker).await.unwrap().map(|request| (request.wanted, request.by));
    assert!(!resume(worker).await, "it is not quiet");
    assert!(quiet(worker).await && !quiet(worker).await, "once");
    assert_eq!(wanted(worker).await, Some((Wanted::Quiet, "ada".into())));
    assert!(resume(worker).await && wanted(worker).await.is_none());
    assert!(quiet(worker).await && stop(worker).await && !stop(worker).await);
    assert!(!resume(worker).await && !quiet(worker).await, "a stop is final");
    let seen = store.heartbeat(worker, &[], 0).await.unwrap();
    assert!(matches!(seen, HeartbeatReply::Seen { request: Some(request), .. } if request.wanted == Wanted::Stop && request.by == "bob"));
    assert!(!quiet(dead).await && !stop(dead).await);
    setting.set("roster", dead, doc! { "wanted": "quiet" }).await;
    assert!(!resume(dead).await);
    // A document of an application.
    let stranger = WorkerId::new();
    setting.database.raw("roster").insert_one(doc! { "_id": stranger, "work_on": "the roof" }).await.unwrap();
    assert!(!quiet(stranger).await && !stop(stranger).await);
    setting.set("roster", stranger, doc! { "wanted": "quiet" }).await;
    assert!(!resume(stranger).await);
    assert_eq!((setting.found("roster", other).await, wanted(other).await), (untouched, None));
}
