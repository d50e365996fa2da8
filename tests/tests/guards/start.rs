//! A start locks a job only if the job is as it was read.

use std::collections::{BTreeSet, HashMap};

use bson::doc;
use recruiter_common::{
    JobId, NewJob, Unique, WorkerId,
    job::{Claim, Job},
    store::{Permit, Recorded, Start, ToStart},
};
use recruiter_tests::{
    factory::{in_ms, read, start, to_start},
    local,
};

use crate::setting::{HOUR, Setting, date, keyed, set_of};

#[tokio::test]
async fn a_decision_to_start_is_made_on_those_that_are_meant_and_wait() {
    let setting = Setting::new().await;
    let [meant, running, _other] = setting.jobs().await;
    setting.start(WorkerId::new(), [running]).await;
    let found: Vec<JobId> = read(&setting.store, &[meant, running]).await.iter().map(|job| job.id).collect();
    assert_eq!(found, [meant]);
}

/// I3, I5.
#[tokio::test]
async fn a_start_is_refused_when_anything_it_relied_on_has_changed() {
    let setting = Setting::new().await;
    let worker = WorkerId::new();
    let [good, locked, attempted, postponed, moved, gone, regrouped, not_meant] = setting.jobs().await;
    setting.set("scheduled", postponed, doc! { "scheduled_at": date(in_ms(&setting.store, 60_000)) }).await;
    let jobs = read(&setting.store, &[good, locked, attempted, postponed, moved, gone, regrouped]).await;
    setting.set("scheduled", locked, doc! { "locked": true }).await;
    setting.set("scheduled", attempted, doc! { "attempts": 1 }).await;
    setting.set("scheduled", moved, doc! { "scheduled_at": date(in_ms(&setting.store, -60_000)) }).await;
    setting.set("scheduled", regrouped, doc! { "group": "other" }).await;
    setting.database.raw("scheduled").delete_one(doc! { "_id": gone }).await.unwrap();
    let claims = setting.store.start_if_unlocked(&start(&setting.store, worker), &to_start(&jobs)).await.unwrap();
    assert_eq!(claimed(&claims), set_of([good]));
    assert!(!setting.scheduled(not_meant).await.get_bool("locked").unwrap());
    assert_eq!(setting.count("scheduled", doc! { "last_execution.worker": worker }).await, 1);
}

/// A start repeats what it has read of an expiry and of a content.
#[tokio::test]
async fn a_start_has_the_conditions_of_the_job() {
    let setting = Setting::new().await;
    let expiring = || NewJob::of_class("x", doc! {}).expires_after(HOUR);
    let mut jobs = local::ids(setting.store.enqueue_many([expiring(), expiring()]).await.unwrap());
    for key in ["a", "b", "c"] {
        jobs.push(keyed(Unique::by_key(key)).enqueue(&setting.store).await.unwrap().id);
    }
    setting.set("scheduled", jobs[4], doc! { "replaced": 1 }).await;
    let read = read(&setting.store, &jobs).await;
    setting.set("scheduled", jobs[0], doc! { "expires_at": date(setting.store.now()) }).await;
    setting.set("scheduled", jobs[2], doc! { "replaced": 1 }).await;
    setting.set("scheduled", jobs[4], doc! { "replaced": 2 }).await;
    let claims = setting.store.start_if_unlocked(&start(&setting.store, WorkerId::new()), &to_start(&read)).await.unwrap();
    let started: BTreeSet<JobId> = claims.iter().map(|claim| claim.job()).collect();
    assert_eq!(started, BTreeSet::from([jobs[1], jobs[3]]));
}

/// The interval of a rate.
#[tokio::test]
async fn a_start_with_a_permit_is_refused_before_and_after_its_interval() {
    let setting = Setting::new().await;
    let jobs = read(&setting.store, &setting.jobs::<3>().await).await;
    let at = |ms| in_ms(&setting.store, ms);
    let intervals = [(at(-60_000), at(60_000)), (at(60_000), at(120_000)), (at(-120_000), at(-60_000))];
    let permit = |between| Some(Permit { between: Some(between), ..Permit::default() });
    let to_start: Vec<ToStart> =
        to_start(&jobs).into_iter().zip(intervals).map(|(job, between)| ToStart { permit: permit(between), ..job }).collect();
    let claims = setting.store.start_if_unlocked(&start(&setting.store, WorkerId::new()), &to_start).await.unwrap();
    assert_eq!(claimed(&claims), set_of([jobs[0].id]));
}

/// More dates than there are statements for: each job keeps its own, and the same conditions hold.
#[tokio::test]
async fn jobs_of_many_dates_are_started_together_each_with_its_own() {
    let setting = Setting::new().await;
    let worker = WorkerId::new();
    let jobs: [JobId; 20] = setting.jobs().await;
    for (job, seconds) in jobs.iter().zip(1..) {
        setting.set("scheduled", *job, doc! { "scheduled_at": date(in_ms(&setting.store, -1_000 * seconds)) }).await;
    }
    setting.set("scheduled", jobs[0], doc! { "scheduled_at": date(in_ms(&setting.store, 60_000)) }).await;
    setting.set("scheduled", jobs[1], doc! { "unique": "key" }).await;
    let waiting = read(&setting.store, &jobs).await;
    setting.set("scheduled", jobs[1], doc! { "replaced": 1 }).await;
    let late = Start { lease_until: in_ms(&setting.store, -1_000), ..start(&setting.store, worker) };
    assert_eq!(setting.store.start_if_unlocked(&late, &to_start(&waiting)).await.unwrap(), []);
    let claims = setting.store.start_if_unlocked(&start(&setting.store, worker), &to_start(&waiting)).await.unwrap();
    assert_eq!(claimed(&claims), set_of(jobs[2..].iter().copied()));
    for job in &jobs[2..] {
        let job = setting.scheduled(*job).await;
        let execution = job.get_document("last_execution").unwrap();
        assert_eq!(execution.get("scheduled_at"), job.get("scheduled_at"));
        assert_eq!(execution.get_document("if_worker_dies").unwrap(), &doc! { "archive": "worker-died" });
    }
}

fn claimed(claims: &[Claim]) -> BTreeSet<JobId> {
    claims.iter().map(|claim| claim.job()).collect()
}

/// A job that its enqueuer executes: its date must still be the one that was read, even among many jobs.
#[tokio::test]
async fn a_start_before_the_date_repeats_the_date() {
    let setting = Setting::new().await;
    let jobs: [JobId; 20] = setting.jobs().await;
    for (job, seconds) in jobs.iter().zip(1..) {
        setting.set("scheduled", *job, doc! { "scheduled_at": date(in_ms(&setting.store, 60_000 * seconds)) }).await;
    }
    let waiting = read(&setting.store, &jobs).await;
    let [moved, hastened, locked, attempted] = [jobs[0], jobs[1], jobs[2], jobs[3]];
    setting.set("scheduled", moved, doc! { "scheduled_at": date(in_ms(&setting.store, 600_000_000)) }).await;
    setting.set("scheduled", hastened, doc! { "scheduled_at": date(in_ms(&setting.store, -1_000)) }).await;
    setting.set("scheduled", locked, doc! { "locked": true }).await;
    setting.set("scheduled", attempted, doc! { "attempts": 1 }).await;
    let early =
        |jobs: &[Job]| to_start(jobs).into_iter().map(|job| ToStart { conditions: job.conditions.early(), ..job }).collect::<Vec<_>>();
    let mine = start(&setting.store, WorkerId::new());
    let late = Start { lease_until: in_ms(&setting.store, -1_000), ..mine.clone() };
    assert_eq!(setting.store.start_if_unlocked(&late, &early(&waiting)).await.unwrap(), []);
    assert_eq!(setting.store.start_if_unlocked(&mine, &to_start(&waiting[4..])).await.unwrap(), []);
    let first = setting.store.start_if_unlocked(&mine, &early(&waiting[4..5])).await.unwrap();
    assert_eq!(claimed(&first), set_of([waiting[4].id]));
    let others: Vec<Job> = waiting.iter().filter(|job| job.id != waiting[4].id).cloned().collect();
    let claims = setting.store.start_if_unlocked(&mine, &early(&others)).await.unwrap();
    let refused = [moved, hastened, locked, attempted];
    assert_eq!(claimed(&claims), others.iter().map(|job| job.id).filter(|job| !refused.contains(job)).collect());
    for claim in claims {
        let job = setting.scheduled(claim.job()).await;
        let execution = job.get_document("last_execution").unwrap();
        assert_eq!(execution.get("started_at"), Some(&date(mine.now).into()));
        assert_eq!(execution.get("scheduled_at"), execution.get("started_at"), "it was due when it started");
    }
}

#[tokio::test]
async fn a_start_is_refused_when_the_lease_is_over() {
    let setting = Setting::new().await;
    let [job] = setting.jobs().await;
    let jobs = to_start(&read(&setting.store, &[job]).await);
    let late = Start { lease_until: in_ms(&setting.store, -1_000), ..start(&setting.store, WorkerId::new()) };
    assert_eq!(setting.store.start_if_unlocked(&late, &jobs).await.unwrap(), []);
    assert!(!setting.scheduled(job).await.get_bool("locked").unwrap());
}

/// The sizes of jobs, the smallest first: of those that can still be started.
#[tokio::test]
async fn the_sizes_of_unlocked_jobs_are_told() {
    let setting = Setting::new().await;
    let [large, small, locked, _not_asked] = setting.jobs().await;
    setting.set("scheduled", large, doc! { "workable.parameters": { "pad": "x".repeat(10_000) } }).await;
    setting.start(WorkerId::new(), [locked]).await;
    let sizes = setting.store.sizes_of_unlocked(&[large, locked, small]).await.unwrap();
    assert_eq!(sizes.iter().map(|(job, _)| *job).collect::<Vec<_>>(), [small, large]);
    assert!(sizes[0].1 < 10_000 && sizes[1].1 > 10_000, "{sizes:?}");
}

/// I3: an unlocked job may still carry the start that it was retried after.
#[tokio::test]
async fn a_start_claims_what_it_has_locked_and_still_holds() {
    let setting = Setting::new().await;
    let [held, retried, not_asked, of_another] = setting.jobs().await;
    let mine = setting.start(WorkerId::new(), [held, retried, not_asked]).await;
    let another = setting.start(WorkerId::new(), [of_another]).await;
    assert_eq!(setting.reschedule(&[setting.retry(&mine[1], setting.store.now())]).await, [Recorded::Yes]);
    let asked = HashMap::from([(mine[0].1.start(), vec![held, retried, of_another])]);
    assert_eq!(setting.store.claims_of_starts_at_majority(&asked).await.unwrap(), [mine[0].1]);
    // A job that was requested under one start, and is held by another requested start.
    let asked = HashMap::from([(mine[0].1.start(), vec![held, of_another]), (another[0].1.start(), vec![retried])]);
    assert_eq!(setting.store.claims_of_starts_at_majority(&asked).await.unwrap(), [mine[0].1]);
}
