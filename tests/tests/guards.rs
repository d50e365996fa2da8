//! The guards of the store: every condition of every filter, by the one case that it is there for.
//!
//! Each test puts the document that is meant next to documents that differ from it in one thing each, and then calls the
//! operation itself. `tests/guards.py` drops the conditions one by one and expects a test here to fail for each.

#![expect(clippy::unwrap_used, reason = "in a test it says where it failed")]

#[path = "guards/graphs.rs"]
mod graphs;

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use bson::{Bson, Document, RawDocumentBuf, doc};
use futures_util::TryStreamExt;
use recruiter_common::{
    consumers::{self, ConsumerGroup},
    enqueue::{NewJob, Outcome},
    events::Received,
    failure::Failure,
    ids::{JobId, LeaseTerm, RoundId, WorkerId},
    instant::Instant,
    job::{Claim, FinishReason, Job, Keep, StoredPolicy, notes::Notes},
    messages::{From, Message, Position},
    store::{
        Advance, Archival, AssignedJobs, Channel, CommitSession, Covered, HeartbeatReply, Hint, JobFilter, KeptCells, Lane, Listener,
        LockedJobs, Offer, OtherClasses, Page, Planned, Progress, Recorded, Rescheduling, RetentionStep, Retrial, Start, StateFilter,
        Store, ToStart, Waiting, Walk,
    },
    telemetry::chain,
    topics::Pattern,
    unique::{OnConflict, Unique},
    workers::Wanted,
};
use recruiter_tests::{
    factory::{announcement, in_ms, insert_unvalidated, minimal_job, read, start, started, to_start},
    local::{self, store},
    mongo::TestDatabase,
    wait::wait_until,
};
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(10);
/// The term in which workers become available while no recruiter leads.
const TERM: LeaseTerm = LeaseTerm(0);
const LEASE: Duration = Duration::from_secs(15);

struct Setting {
    database: TestDatabase,
    store: Store,
}

impl Setting {
    async fn new() -> Self {
        let database = TestDatabase::new().await;
        Self { store: store(&database).await, database }
    }

    /// Due jobs.
    async fn jobs<const COUNT: usize>(&self) -> [JobId; COUNT] {
        let jobs = (0..COUNT).map(|_| NewJob::of_class("x", doc! {}));
        local::ids(self.store.enqueue_many(jobs).await.unwrap()).try_into().unwrap()
    }

    /// Due jobs of which nothing is kept if they succeed.
    async fn fleeting<const COUNT: usize>(&self) -> [JobId; COUNT] {
        let jobs = (0..COUNT).map(|_| NewJob::of_class("x", doc! {}).keep(Keep::Failures));
        local::ids(self.store.enqueue_many(jobs).await.unwrap()).try_into().unwrap()
    }

    /// Starts these jobs together; in their order.
    async fn start<const COUNT: usize>(&self, worker: WorkerId, jobs: [JobId; COUNT]) -> [(Job, Claim); COUNT] {
        let held = started(&self.store, worker, &jobs).await;
        jobs.map(|id| held.iter().find(|(job, _)| job.id == id).cloned().unwrap())
    }

    /// Changes a document as no operation would.
    async fn set(&self, collection: &str, id: impl Into<Bson>, set: Document) {
        let changed = self
            .database
            .raw(collection)
            .update_one(doc! { "_id": id.into() }, doc! { "$set": set })
            .bypass_document_validation(true)
            .await
            .unwrap();
        assert_eq!(changed.matched_count, 1);
    }

    async fn found(&self, collection: &str, id: impl Into<Bson>) -> Option<Document> {
        self.database.raw(collection).find_one(doc! { "_id": id.into() }).await.unwrap()
    }

    /// A job that is there.
    async fn scheduled(&self, id: JobId) -> Document {
        self.found("scheduled", id).await.unwrap()
    }

    async fn count(&self, collection: &str, filter: Document) -> u64 {
        self.database.raw(collection).count_documents(filter).await.unwrap()
    }

    /// A worker with free slots.
    async fn worker(&self, slots: u32) -> WorkerId {
        let announcement = announcement(10);
        self.store.register(&announcement).await.unwrap();
        assert!(self.store.make_available(announcement.id, slots).await.unwrap());
        announcement.id
    }

    /// One of the worker's own jobs for it, in a round that it is told.
    async fn assign(&self, worker: WorkerId) -> (RoundId, Vec<JobId>) {
        let (round, given) = (RoundId::new(), give(worker, 1));
        assert_eq!(self.store.assign_if_available(TERM, round, std::slice::from_ref(&given)).await.unwrap(), [worker]);
        (round, given.assignment.jobs)
    }

    async fn archive(&self, batch: &[Archival]) -> Vec<Recorded> {
        let mut session = CommitSession::default();
        self.store.archive(&mut session, batch).await.unwrap()
    }

    fn done(&self, (job, claim): &(Job, Claim)) -> Archival {
        let execution = job.last_execution.clone().unwrap().ended(self.store.now(), None);
        Archival::ended(job, *claim, execution, &FinishReason::DONE, None)
    }

    fn retry(&self, (job, claim): &(Job, Claim), at: Instant) -> Rescheduling {
        let execution = job.last_execution.clone().unwrap().ended(self.store.now(), Some(&Failure::new("x", "")));
        Rescheduling::retry(job, *claim, &execution, at, true)
    }

    async fn reschedule(&self, batch: &[Rescheduling]) -> Vec<Recorded> {
        self.store.reschedule_if_claimed(batch).await.unwrap()
    }
}

fn give(worker: WorkerId, count: usize) -> Planned {
    Planned::for_slots(AssignedJobs::new(worker, (0..count).map(|_| JobId::new()).collect()))
}

fn free(slots: u32, working_on: &[JobId]) -> Offer {
    Offer { slots, working_on: working_on.to_vec(), ..Offer::default() }
}

fn set_of<T: Ord>(all: impl IntoIterator<Item = T>) -> BTreeSet<T> {
    all.into_iter().collect()
}

fn ids(documents: &[Document]) -> BTreeSet<JobId> {
    documents.iter().map(|document| document.get_object_id("_id").unwrap().into()).collect()
}

fn locked_ids(found: &LockedJobs) -> BTreeSet<JobId> {
    found.documents.iter().map(|document| document.get_object_id("_id").unwrap().into()).collect()
}

fn claimed(claims: &[Claim]) -> BTreeSet<JobId> {
    claims.iter().map(|claim| claim.job()).collect()
}

fn date(at: Instant) -> bson::DateTime {
    bson::DateTime::from_chrono(at)
}

// Reads before a decision.

#[tokio::test]
async fn only_jobs_that_are_asked_about_are_known_from_the_archive() {
    let setting = Setting::new().await;
    let [asked, other, waiting] = setting.jobs().await;
    let held = setting.start(WorkerId::new(), [asked, other]).await;
    assert_eq!(setting.archive(&held.each_ref().map(|one| setting.done(one))).await, [Recorded::Yes; 2]);
    assert_eq!(set_of(setting.store.already_archived(&[asked, waiting]).await.unwrap()), set_of([asked]));
    assert_eq!(ids(&setting.store.archived_jobs(&[asked, waiting]).await.unwrap()), set_of([asked]));
}

#[tokio::test]
async fn groups_are_named_once_and_while_jobs_wait_in_them() {
    let setting = Setting::new().await;
    let jobs = ["a", "a", "b", "c"].map(|group| NewJob::of_class("x", doc! {}).in_group(group));
    let jobs = local::ids(setting.store.enqueue_many(jobs).await.unwrap());
    setting.start(WorkerId::new(), [jobs[3]]).await;
    let groups = timeout(SOON, setting.store.groups()).await.expect("there is an end to them");
    assert_eq!(groups.unwrap(), set_of(["a", "b"].map(str::to_owned)));
}

#[tokio::test]
async fn lanes_are_named_once_while_jobs_wait_in_them() {
    let setting = Setting::new().await;
    let job = |group: &str, class: &str| NewJob::of_class(class, doc! {}).in_group(group);
    let jobs = [job("a", "x"), job("a", "x"), job("a", "y"), job("b", "x"), job("b", "z"), job("c", "w")];
    let jobs = local::ids(setting.store.enqueue_many(jobs).await.unwrap());
    setting.start(WorkerId::new(), [jobs[4]]).await;
    let lanes = async |most| {
        let lanes = timeout(SOON, setting.store.first_lanes(["a".into(), "b".into()], most)).await.expect("there is an end to them");
        lanes.unwrap().into_iter().map(|lane| lane.group + &lane.class).collect::<Vec<_>>()
    };
    assert_eq!(lanes(9).await, ["ax", "ay", "bx"]);
    assert_eq!(lanes(2).await, ["ax", "ay"]);
}

#[tokio::test]
async fn due_is_what_waits_in_the_group_for_one_of_the_classes_since_now() {
    let setting = Setting::new().await;
    let (later, sooner) = (in_ms(&setting.store, 60_000), in_ms(&setting.store, 30_000));
    let job = |class: &str| NewJob::of_class(class, doc! {}).in_group("a");
    let elsewhere = [job("x").in_group("other").at(sooner), job("x").in_group("other"), job("other").at(sooner)];
    let jobs = [job("x"), job("other"), job("x").at(later), job("x")].into_iter().chain(elsewhere);
    let jobs = local::ids(setting.store.enqueue_many(jobs).await.unwrap());
    setting.start(WorkerId::new(), [jobs[3]]).await;
    let now = setting.store.now();
    let due = async |group: &str, classes: &[&str]| -> BTreeSet<JobId> {
        let lanes: Vec<Lane> = classes.iter().map(|class| Lane::new(group, *class)).collect();
        setting.store.due_jobs(&lanes, now, 10).await.unwrap().jobs.into_iter().map(|job| job.id).collect()
    };
    assert_eq!(due("a", &["x"]).await, set_of([jobs[0]]));
    assert_eq!(due("a", &["x", "other"]).await, set_of([jobs[0], jobs[1]]));
}

#[tokio::test]
async fn the_policies_of_due_jobs_are_named_and_no_others() {
    let setting = Setting::new().await;
    let job = |class: &str, policy: &str| {
        NewJob::of_class(class, doc! {}).in_group("a").retry_stored(StoredPolicy { class: policy.into(), parameters: doc! {}.into() })
    };
    setting.store.enqueue_many([job("x", "Mine"), job("y", "Theirs")]).await.unwrap();
    let policies = setting.store.policies_of_due_jobs(&[Lane::new("a", "x")], 9).await.unwrap();
    assert_eq!(policies, set_of(["Mine".to_owned()]));
}

#[tokio::test]
async fn a_lane_is_listed_while_jobs_wait_in_it_with_the_date_of_the_first() {
    let setting = Setting::new().await;
    let (later, sooner) = (in_ms(&setting.store, 60_000), in_ms(&setting.store, 30_000));
    let job = |group: &str, class: &str| NewJob::of_class(class, doc! {}).in_group(group);
    let jobs = [job("a", "x").at(later), job("a", "x").at(sooner), job("a", "y").at(later), job("b", "x").at(later), job("b", "z")];
    let jobs = local::ids(setting.store.enqueue_many(jobs).await.unwrap());
    setting.start(WorkerId::new(), [jobs[4]]).await;
    let lane = |group: &str, class: &str| Lane::new(group, class);
    let all = [(lane("a", "x"), sooner), (lane("a", "y"), later), (lane("b", "x"), later)];
    assert_eq!(setting.store.waiting_lanes().await.unwrap(), all.into());
    let of = async |group: &str, most: usize| timeout(SOON, setting.store.lanes_of(group, most)).await.expect("an end").unwrap();
    assert_eq!(of("a", 2).await, (vec![lane("a", "x"), lane("a", "y")], true));
    assert_eq!(of("a", 1).await, (vec![lane("a", "x")], false));
    assert_eq!(of("b", 2).await, (vec![lane("b", "x")], true));
    assert_eq!(of("c", 2).await, (vec![], true));
}

/// A gate makes a lane of its own: its jobs are found there and nowhere else.
#[tokio::test]
async fn jobs_with_a_gate_are_in_lanes_of_their_own() {
    let setting = Setting::new().await;
    let at = |seconds| date(in_ms(&setting.store, seconds * 1_000));
    let job = |group: &str, class: &str, gate: Option<&str>, due: i64| {
        let mut job = minimal_job(class);
        job.extend(doc! { "group": group, "gate": gate, "scheduled_at": at(due) });
        job
    };
    let jobs = [
        job("a", "x", None, -9),
        job("a", "x", Some("one"), -8),
        job("a", "x", Some("two"), -7),
        job("a", "x", Some("two"), 60),
        job("a", "y", Some("one"), -6),
        job("b", "x", Some("one"), -5),
    ];
    let ids: Vec<JobId> = jobs.iter().map(|job| job.get_object_id("_id").unwrap().into()).collect();
    setting.database.raw("scheduled").insert_many(&jobs).await.unwrap();
    setting.database.raw("scheduled").insert_one(job("c", "x", None, -5)).await.unwrap();
    let gated = |group: &str, class: &str, gate: &str| Lane { gate: Some(gate.into()), ..Lane::new(group, class) };
    let due = async |lanes: &[Lane]| -> Vec<(JobId, Lane)> {
        let found = setting.store.due_jobs(lanes, setting.store.now(), 10).await.unwrap();
        found.jobs.into_iter().map(|job| (job.id, job.lane())).collect()
    };
    let (none, one, two) = (Lane::new("a", "x"), gated("a", "x", "one"), gated("a", "x", "two"));
    assert_eq!(due(std::slice::from_ref(&none)).await, [(ids[0], none.clone())]);
    assert_eq!(due(std::slice::from_ref(&two)).await, [(ids[2], two.clone())]);
    let all = [two.clone(), none.clone(), one.clone()];
    assert_eq!(due(&all).await, [(ids[0], none.clone()), (ids[1], one.clone()), (ids[2], two.clone())], "in their order");
    let groups = (setting.store.groups().await.unwrap(), setting.store.gated_groups().await.unwrap());
    assert_eq!(groups, (set_of(["a", "c"].map(str::to_owned)), set_of(["a", "b"].map(str::to_owned))));
    assert_eq!(setting.store.gated_lanes_of("a").await.unwrap(), [one.clone(), two.clone(), gated("a", "y", "one")]);
    assert_eq!(setting.store.gated_lanes_of("c").await.unwrap(), []);
    assert_eq!(setting.store.lanes_of("a", 9).await.unwrap(), (vec![none], true));
    setting.start(WorkerId::new(), [ids[1], ids[5]]).await;
    assert_eq!(setting.store.gated_lanes_of("a").await.unwrap(), [two, gated("a", "y", "one")]);
    assert_eq!(setting.store.gated_groups().await.unwrap(), set_of(["a".to_owned()]));
    let now = setting.store.now();
    let counts = setting.store.waiting(now, now - Duration::from_millis(6_500)).await.unwrap();
    assert_eq!(counts["a"], Waiting { queued: 3, overdue: 2, postponed: 1 });
    assert_eq!((counts["c"], counts.len()), (Waiting { queued: 1, ..Waiting::default() }, 2));
}

#[tokio::test]
async fn a_decision_to_start_is_made_on_those_that_are_meant_and_wait() {
    let setting = Setting::new().await;
    let [meant, running, _other] = setting.jobs().await;
    setting.start(WorkerId::new(), [running]).await;
    let found: Vec<JobId> = read(&setting.store, &[meant, running]).await.iter().map(|job| job.id).collect();
    assert_eq!(found, [meant]);
}

// A start, and what follows from it.

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
    let waiting = read(&setting.store, &jobs).await;
    let late = Start { lease_until: in_ms(&setting.store, -1_000), ..start(&setting.store, worker) };
    assert_eq!(setting.store.start_if_unlocked(&late, &to_start(&waiting)).await.unwrap(), []);
    let claims = setting.store.start_if_unlocked(&start(&setting.store, worker), &to_start(&waiting)).await.unwrap();
    assert_eq!(claimed(&claims), set_of(jobs[1..].iter().copied()));
    for job in &jobs[1..] {
        let job = setting.scheduled(*job).await;
        let execution = job.get_document("last_execution").unwrap();
        assert_eq!(execution.get("scheduled_at"), job.get("scheduled_at"));
        assert_eq!(execution.get_document("if_worker_dies").unwrap(), &doc! { "archive": "worker-died" });
    }
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

/// I3: item outcomes of a lost claim change nothing, neither while the job waits nor after its next start.
#[tokio::test]
async fn items_are_recorded_by_the_start_that_holds_their_bundle() {
    let setting = Setting::new().await;
    let bundles = [0; 3].map(|_| NewJob::bundle_of_class("x", [doc! {}, doc! {}]));
    let jobs: [JobId; 3] = local::ids(setting.store.enqueue_many(bundles).await.unwrap()).try_into().unwrap();
    let mine = setting.start(WorkerId::new(), jobs).await;
    let [held, retried, started_anew] = mine.each_ref().map(|(_, claim)| *claim);
    let before = [Bson::from("done"), Bson::Null];
    let all = [held, retried, started_anew];
    let whole = all.map(|claim| Progress::whole(claim, &before));
    assert_eq!(setting.store.record_items_if_claimed(&whole).await.unwrap(), [Recorded::Yes; 3]);
    let now = setting.store.now();
    assert_eq!(setting.reschedule(&[setting.retry(&mine[1], now), setting.retry(&mine[2], now)]).await, [Recorded::Yes; 2]);
    setting.start(WorkerId::new(), [started_anew.job()]).await;
    let late = all.map(|claim| Progress::of_items(claim, [(1, Bson::from("done"))]));
    for _ in 0..2 {
        let recorded = setting.store.record_items_if_claimed(&late).await.unwrap();
        assert_eq!(recorded, [Recorded::Yes, Recorded::ClaimLost, Recorded::ClaimLost]);
    }
    for (claim, expected) in [(held, ["done".into(), "done".into()]), (retried, before.clone()), (started_anew, before)] {
        assert_eq!(setting.scheduled(claim.job()).await.get_array("item_outcomes").unwrap()[..], expected);
    }
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

/// I3: notes of a lost claim change nothing, and neither does a write that arrives after a later one.
#[tokio::test]
async fn notes_are_recorded_by_the_start_that_holds_their_job_in_their_order() {
    let setting = Setting::new().await;
    let [held, retried, started_anew] = setting.jobs().await;
    let mine = setting.start(WorkerId::new(), [held, retried, started_anew]).await;
    let notes = |number: i64| mine.each_ref().map(|(_, claim)| Notes::new(*claim, number, doc! { "checkpoint": number }));
    assert_eq!(setting.store.record_notes_if_claimed(&notes(2)).await.unwrap(), [Recorded::Yes; 3]);
    let now = setting.store.now();
    assert_eq!(setting.reschedule(&[setting.retry(&mine[1], now), setting.retry(&mine[2], now)]).await, [Recorded::Yes; 2]);
    setting.start(WorkerId::new(), [started_anew]).await;
    for (number, expected) in [(1, 2), (2, 2), (3, 3), (2, 3)] {
        let recorded = setting.store.record_notes_if_claimed(&notes(number)).await.unwrap();
        assert_eq!(recorded, [Recorded::Yes, Recorded::ClaimLost, Recorded::ClaimLost]);
        for (job, expected) in [(held, expected), (retried, 2), (started_anew, 2)] {
            assert_eq!(setting.scheduled(job).await.get_i64("checkpoint").ok(), Some(expected), "after write {number}");
        }
    }
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
    let others = setting.count("metadata", doc! { "count": { "$exists": false } }).await;
    setting.store.prune_not_kept(at(60)).await.unwrap();
    assert_eq!((counted(60).await, counted(200).await), (Some(3), Some(3)));
    assert_eq!(setting.count("metadata", doc! { "count": { "$exists": false } }).await, others);
}

/// A cancellation, or the end of a document that is no job.
#[tokio::test]
async fn what_is_nobodys_is_archived_as_it_was_read() {
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

/// I2: an archived job is recognised as archived by this start or by another one.
#[tokio::test]
async fn an_outcome_in_the_archive_is_recognised_by_its_start() {
    let setting = Setting::new().await;
    let [job, other] = setting.jobs().await;
    let early = setting.start(WorkerId::new(), [job]).await;
    assert_eq!(setting.reschedule(&[setting.retry(&early[0], setting.store.now())]).await, [Recorded::Yes]);
    let late = setting.start(WorkerId::new(), [job, other]).await;
    for _ in 0..2 {
        assert_eq!(setting.archive(&late.each_ref().map(|one| setting.done(one))).await, [Recorded::Yes; 2]);
    }
    assert_eq!(setting.archive(&[setting.done(&early[0])]).await, [Recorded::ClaimLost]);
}

/// A job is deleted only if it is in the archive, and known only if it is there under its id: a unique index of somebody
/// else's says neither.
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

// Changes of jobs by other processes.

#[tokio::test]
async fn a_dead_worker_held_what_is_named_and_locked_by_it() {
    let setting = Setting::new().await;
    let (worker, another) = (WorkerId::new(), WorkerId::new());
    let [held, not_named, of_another, waiting] = setting.jobs().await;
    setting.start(worker, [held, not_named]).await;
    setting.start(another, [of_another]).await;
    let found = setting.store.held_by(worker, &[held, of_another, waiting]).await.unwrap();
    assert_eq!(found.iter().map(|held| held.claim.job()).collect::<Vec<_>>(), [held]);
}

#[tokio::test]
async fn the_sweep_finds_what_is_locked_step_by_step() {
    let setting = Setting::new().await;
    let documents: Vec<Document> = (0..5_100).map(|_| minimal_job("x")).collect();
    let [first, last] = [0, 5_099].map(|index: usize| documents[index].get_object_id("_id").unwrap());
    setting.database.raw("scheduled").insert_many(&documents).await.unwrap();
    for job in [first, last] {
        setting.set("scheduled", job, doc! { "locked": true }).await;
    }
    let worker = setting.worker(1).await;
    let found = setting.store.locked_jobs(None).await.unwrap();
    assert_eq!((locked_ids(&found), found.registered), (set_of([first.into()]), [worker].into()));
    let found = setting.store.locked_jobs(Some(found.next.expect("there are more"))).await.unwrap();
    assert_eq!((locked_ids(&found), found.next), (set_of([last.into()]), None));
}

/// I8, I5: an incomplete lock has no holder, a complete one has.
#[tokio::test]
async fn a_lock_is_taken_off_only_when_nobody_holds_it() {
    let setting = Setting::new().await;
    let [bare, no_start, no_worker, held] = setting.jobs().await;
    setting.set("scheduled", bare, doc! { "locked": true }).await;
    setting.set("scheduled", no_start, doc! { "locked": true, "last_execution": { "worker": WorkerId::new() } }).await;
    let start = recruiter_common::ids::StartId::new();
    setting.set("scheduled", no_worker, doc! { "locked": true, "last_execution": { "start": start } }).await;
    setting.start(WorkerId::new(), [held]).await;
    let mut without = minimal_job("x");
    without.remove("locked");
    let without_lock: JobId = without.get_object_id("_id").unwrap().into();
    insert_unvalidated(&setting.database, vec![without]).await;
    for (job, nobodys) in [(bare, true), (no_start, true), (no_worker, true), (held, false), (without_lock, false)] {
        let before = setting.scheduled(job).await;
        assert_eq!(setting.store.unlock_if_held_by_nobody(job).await.unwrap(), nobodys, "{before}");
        let after = setting.scheduled(job).await;
        assert!(if nobodys { !after.get_bool("locked").unwrap() } else { after == before }, "{after}");
    }
}

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
    // What has the values but was started meanwhile is not told, and neither is what waits without them.
    setting.set("scheduled", running, set.clone()).await;
    assert_eq!(setting.store.alter_if_unlocked(&[running, waiting], set).await.unwrap(), [waiting].into());
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
    let seen = store.heartbeat(worker, &[]).await.unwrap();
    assert!(matches!(seen, HeartbeatReply::Seen { request: Some(request), .. } if request.wanted == Wanted::Stop && request.by == "bob"));
    assert!(!quiet(dead).await && !stop(dead).await);
    setting.set("roster", dead, doc! { "wanted": "quiet" }).await;
    assert!(!resume(dead).await);
    assert_eq!((setting.found("roster", other).await, wanted(other).await), (untouched, None));
}

/// I1.
#[tokio::test]
async fn a_finished_job_is_enqueued_again_once_by_whoever_has_read_it_as_it_is() {
    let setting = Setting::new().await;
    let [meant, other, gone] = setting.jobs().await;
    let held = setting.start(WorkerId::new(), [meant, other]).await;
    assert_eq!(setting.archive(&held.each_ref().map(|one| setting.done(one))).await, [Recorded::Yes; 2]);
    let retrial = |job: JobId, retried_as: Option<JobId>| {
        let new = JobId::new();
        let document = doc! { "_id": new, "locked": false, "group": "g", "priority": 5, "scheduled_at": date(setting.store.now()), "workable": { "class": "x" } };
        Retrial { job, retried_as: retried_as.map(Into::into), new, document: document.into() }
    };
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
async fn retention_deletes_what_ended_before_and_no_more_than_it_may() {
    let setting = Setting::new().await;
    let archived = |ms: i64| doc! { "last_execution": { "ended_at": date(in_ms(&setting.store, ms)) } };
    let documents = [archived(-3_000), archived(-2_000), archived(-1_000), archived(0)];
    setting.database.raw("archived").insert_many(documents).await.unwrap();
    let before = in_ms(&setting.store, -500);
    assert_eq!(setting.store.prune_archived(before, 2).await.unwrap(), 2);
    assert_eq!(setting.store.prune_archived(before, 2).await.unwrap(), 1);
    assert_eq!(setting.store.prune_archived(before, 2).await.unwrap(), 0);
    assert_eq!(setting.count("archived", doc! {}).await, 1);
}

#[tokio::test]
async fn retention_by_class_deletes_what_it_covers_and_examines_nothing_twice() {
    let setting = Setting::new().await;
    let job = |id: i32, class: &str, why: &str, ms: i64| {
        let ended = date(in_ms(&setting.store, ms));
        doc! { "_id": id, "workable": { "class": class }, "why": why, "last_execution": { "ended_at": ended } }
    };
    let documents = [
        job(1, "mail", "done", -9_000),
        job(2, "mail", "gave-up", -8_000),
        job(3, "other", "done", -7_000),
        job(4, "other", "cancelled", -6_000),
        job(5, "other", "gave-up", -5_000),
        job(6, "mail", "done", 60_000),
        doc! { "_id": 7, "last_execution": { "ended_at": date(in_ms(&setting.store, -4_000)) } },
        doc! { "_id": 8, "workable": { "class": "mail" } },
    ];
    setting.database.raw("archived").insert_many(documents).await.unwrap();
    let before = in_ms(&setting.store, -500);
    let prune = async |covered: &Covered, position, most| setting.store.prune_covered(covered, position, before, most).await.unwrap();
    let left = async || setting.database.raw("archived").distinct("_id", doc! {}).await.unwrap();
    let mail = Covered { classes: vec!["mail".into()], others: None };
    let first = prune(&mail, None, 1).await;
    assert!(first.deleted == 1 && first.next.is_some(), "{first:?}");
    assert_eq!(prune(&mail, first.next, 100).await, RetentionStep { deleted: 1, next: None });
    let ids = |ids: &[i32]| ids.iter().map(|id| bson::Bson::from(*id)).collect::<Vec<_>>();
    assert_eq!(left().await, ids(&[3, 4, 5, 6, 7, 8]));
    let others = |successes, failures| {
        let others = OtherClasses { except: vec!["mail".into()], successes, failures };
        Covered { classes: Vec::new(), others: Some(others) }
    };
    // Behind the position.
    let behind = Some(bson::DateTime::from_chrono(in_ms(&setting.store, -5_500)));
    assert_eq!(prune(&others(true, false), behind, 100).await.deleted, 0);
    assert_eq!(prune(&others(true, false), None, 100).await.deleted, 2);
    assert_eq!(left().await, ids(&[5, 6, 7, 8]), "a document without a reason is no success");
    assert_eq!(prune(&others(false, true), None, 100).await.deleted, 2);
    assert_eq!(left().await, ids(&[6, 8]));
}

// Schedules.

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
    let change = async |revision: i64| {
        let update = doc! { "$set": { "every_ms": 5_000 }, "$inc": { "revision": 1_i64 } };
        store.change_schedule_if_unchanged("a", Some(revision.into()), update).await.unwrap()
    };
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

#[tokio::test]
async fn schedules_are_found_by_name_and_unfinished_jobs_by_id() {
    let setting = Setting::new().await;
    for name in ["a", "b", "c"] {
        setting.schedule(name, doc! { "revision": 1_i64 }).await;
    }
    let names = |documents: Vec<Document>| documents.iter().map(|found| found.get_str("_id").unwrap().to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(
        names(setting.store.schedules_by_name(&["a".into(), "c".into(), "d".into()]).await.unwrap()),
        set_of(["a", "c"].map(str::to_owned))
    );
    assert_eq!(setting.store.schedule_revisions().await.unwrap().len(), 3);
    let [asked, other] = setting.jobs().await;
    assert_eq!(setting.store.unfinished_among(&[asked, JobId::new()]).await.unwrap(), [asked].into());
    assert_ne!(asked, other);
}

// The recruiter's lease.

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

// The roster.

#[tokio::test]
async fn a_worker_is_announced_before_its_first_round_and_while_it_lives() {
    let setting = Setting::new().await;
    let (assigned, retired) = (setting.worker(2).await, setting.worker(2).await);
    setting.assign(assigned).await;
    setting.set("roster", retired, doc! { "retired": true }).await;
    for worker in [assigned, retired] {
        let before = setting.found("roster", worker).await;
        assert!(!setting.store.make_available(worker, 7).await.unwrap());
        assert_eq!(setting.found("roster", worker).await, before);
    }
}

#[tokio::test]
async fn a_term_is_given_to_who_has_none_raised_and_never_lowered() {
    let setting = Setting::new().await;
    let (lower, higher, none) = (setting.worker(1).await, setting.worker(1).await, announcement(1));
    setting.set("roster", higher, doc! { "term": 5_i64 }).await;
    setting.store.register(&none).await.unwrap();
    assert_eq!(setting.store.stamp_term(LeaseTerm(3)).await.unwrap(), 2);
    for (worker, term) in [(lower, 3), (none.id, 3), (higher, 5)] {
        assert_eq!(setting.found("roster", worker).await.unwrap().get_i64("term").unwrap(), term);
    }
}

/// The conditions of the recruiter's read, which its assignment repeats.
#[tokio::test]
async fn jobs_are_assigned_to_living_workers_of_this_term_that_have_the_slots_and_the_turn() {
    let setting = Setting::new().await;
    let good = setting.worker(2).await;
    let mut others = Vec::new();
    for change in [doc! { "available": false }, doc! { "free": 0 }, doc! { "term": 7_i64 }, doc! { "retired": true }] {
        let other = setting.worker(2).await;
        setting.set("roster", other, change).await;
        others.push(other);
    }
    let busy = setting.worker(2).await;
    let ahead = JobId::new();
    setting.set("roster", busy, doc! { "free": 0, "prefetch": 2, "prefetched": [ahead] }).await;
    let available = setting.store.available_workers(TERM).await.unwrap();
    let offers = available.iter().map(|worker| (worker.id, worker.free, worker.prefetch, worker.prefetched.clone()));
    assert_eq!(offers.collect::<Vec<_>>(), [(good, 2, 0, vec![]), (busy, 0, 2, vec![ahead])]);

    let (not_given, one_slot, full) = (setting.worker(2).await, setting.worker(1).await, setting.worker(1).await);
    setting.set("roster", full, doc! { "prefetch": 1 }).await;
    let mut given: Vec<Planned> = others.iter().chain([&good, &one_slot]).map(|worker| give(*worker, 2)).collect();
    given.extend([Planned { for_slots: 0, ..give(busy, 2) }, Planned { for_slots: 1, ..give(full, 3) }]);
    let round = RoundId::new();
    assert_eq!(setting.store.assign_if_available(TERM, round, &given).await.unwrap(), [good, busy]);
    assert_eq!(setting.count("roster", doc! { "round": { "$exists": true } }).await, 2);
    assert!(setting.found("roster", not_given).await.unwrap().get_bool("available").unwrap());
    let assignment = setting.store.assignment(good).await.unwrap().unwrap();
    assert_eq!(
        Some((assignment.round, assignment.jobs)),
        given.iter().find(|given| given.assignment.worker == good).map(|given| (round, given.assignment.jobs.clone()))
    );
}

#[tokio::test]
async fn a_living_worker_reports_only_after_the_last_round() {
    let setting = Setting::new().await;
    let worker = setting.worker(3).await;
    let (first, jobs) = setting.assign(worker).await;
    let report = async |round| setting.store.report_if_unassigned_since(worker, round, &free(2, &jobs)).await.unwrap();
    assert!(!report(None).await, "jobs were assigned since");
    assert!(!report(Some(RoundId::new())).await, "another round");
    assert!(report(Some(first)).await);
    assert_eq!(setting.store.available_workers(TERM).await.unwrap()[0].free, 2);
    let (second, given) = setting.assign(worker).await;
    assert!(!report(Some(first)).await && !setting.store.withdraw_if_unassigned_since(worker, Some(first)).await.unwrap());
    let registered = setting.store.registered_workers().await.unwrap();
    assert_eq!(set_of(registered[0].jobs.clone()), set_of([&jobs[..], &given].concat()), "all that it can have locked");
    assert!(setting.store.withdraw_if_unassigned_since(worker, Some(second)).await.unwrap());
    assert!(setting.store.available_workers(TERM).await.unwrap().is_empty());
    setting.set("roster", worker, doc! { "retired": true }).await;
    assert!(!report(Some(second)).await, "it was declared dead");
}

/// I10: only silence that was seen is death, and the dead do not come back under the same name.
#[tokio::test]
async fn a_sign_of_life_prevents_retirement_and_retirement_every_other_sign() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let worker = setting.worker(1).await;
    let beats = async || matches!(store.heartbeat(worker, &[]).await.unwrap(), HeartbeatReply::Seen { .. });
    let seen = async || store.registered_workers().await.unwrap()[0].last_seen_at;
    let before = seen().await;
    wait_until(SOON, "the clock has moved on", async || beats().await && seen().await != before).await;
    let retires = async |seen| store.retire_if_silent_since(worker, seen).await.unwrap().map(|worker| worker.retired);
    assert_eq!(retires(before).await, None);
    assert_eq!(retires(None).await, None, "a date is a heartbeat");
    assert_eq!(retires(seen().await).await, Some(true));
    assert_eq!(retires(seen().await).await, None, "another cleaner was faster, and rescues its jobs");
    assert!(!beats().await);
    assert!(!store.make_available(worker, 1).await.unwrap());
    store.delete_if_retired(worker).await.unwrap();
    assert!(!beats().await, "a heartbeat does not bring a retired worker back");
    assert!(store.registered_workers().await.unwrap().is_empty());
}

/// I9: a worker whose heartbeat field is damaged is dead if the field stays so.
#[tokio::test]
async fn a_worker_without_a_readable_heartbeat_is_retired_until_it_gives_one() {
    let setting = Setting::new().await;
    for strange in [Bson::Null, "now".into(), 5.into(), vec![Bson::from(5)].into()] {
        let worker = setting.worker(1).await;
        setting.set("roster", worker, doc! { "last_seen_at": strange.clone(), "sessions": strange }).await;
        let registered = setting.store.registered_workers().await.unwrap();
        assert_eq!(registered.iter().find(|found| found.id == worker).unwrap().last_seen_at, None);
        assert!(setting.store.retire_if_silent_since(worker, None).await.unwrap().is_some_and(|worker| worker.retired));
        let session = setting.store.open_session(&mut CommitSession::default()).await.unwrap();
        setting.store.record_rescue_session(worker, session.clone()).await.unwrap();
        assert!(setting.found("roster", worker).await.unwrap().get_array("sessions").unwrap().contains(&session.into()));
    }
    let worker = setting.worker(1).await;
    setting.set("roster", worker, doc! { "last_seen_at": "now" }).await;
    assert!(matches!(setting.store.heartbeat(worker, &[]).await.unwrap(), HeartbeatReply::Seen { .. }));
    assert!(setting.store.retire_if_silent_since(worker, None).await.unwrap().is_none());
}

/// A call that was given up may still arrive: the sessions before the present one stay named, a few of them.
#[tokio::test]
async fn the_living_say_which_session_they_commit_in_and_the_retired_do_not() {
    let setting = Setting::new().await;
    let (living, retired) = (setting.worker(1).await, setting.worker(1).await);
    setting.set("roster", retired, doc! { "retired": true }).await;
    for session in 0..6 {
        assert!(setting.store.record_commit_session(living, doc! { "id": session }).await.unwrap());
        assert!(!setting.store.record_commit_session(retired, doc! { "id": session }).await.unwrap());
    }
    let sessions = async |worker: WorkerId| setting.found("roster", worker).await.unwrap().get_array("sessions").unwrap().clone();
    let last: Vec<Bson> = (2..6).map(|session| doc! { "id": session }.into()).collect();
    assert_eq!((sessions(living).await, sessions(retired).await), (last, Vec::new()));
}

/// The jobs that a retired worker's document names must still be rescued.
#[tokio::test]
async fn only_the_living_leave() {
    let setting = Setting::new().await;
    let (living, retired, other) = (setting.worker(1).await, setting.worker(1).await, setting.worker(1).await);
    setting.set("roster", retired, doc! { "retired": true }).await;
    for worker in [living, retired] {
        setting.store.leave_if_alive(worker).await.unwrap();
    }
    for (worker, is_there) in [(living, false), (retired, true), (other, true)] {
        assert_eq!(setting.found("roster", worker).await.is_some(), is_there);
    }
}

#[tokio::test]
async fn only_the_retired_are_buried() {
    let setting = Setting::new().await;
    let (living, retired) = (setting.worker(1).await, setting.worker(1).await);
    setting.set("roster", retired, doc! { "retired": true }).await;
    let session = setting.store.open_session(&mut CommitSession::default()).await.unwrap();
    for (worker, sessions) in [(living, 0), (retired, 1)] {
        setting.store.record_rescue_session(worker, session.clone()).await.unwrap();
        assert_eq!(setting.found("roster", worker).await.unwrap().get_array("sessions").unwrap().len(), sessions);
        setting.store.delete_if_retired(worker).await.unwrap();
        assert_eq!(setting.found("roster", worker).await.is_some(), worker == living);
    }
}

#[tokio::test]
async fn what_is_in_flight_is_known_of_the_living_that_are_asked_about() {
    let setting = Setting::new().await;
    let (asked, retired, other) = (setting.worker(1).await, setting.worker(1).await, setting.worker(1).await);
    let mut rounds = Vec::new();
    for worker in [asked, retired, other] {
        rounds.push(setting.assign(worker).await.0);
    }
    setting.set("roster", retired, doc! { "retired": true }).await;
    let found = setting.store.rounds_of(&[asked, retired]).await.unwrap();
    assert_eq!(found.into_iter().collect::<Vec<_>>(), [(asked, Some(rounds[0]))]);
    let found = setting.store.assigned_and_not_taken().await.unwrap();
    assert_eq!(set_of(found.into_iter().map(|(_, given)| given.worker)), set_of([asked, other]));
}

// Hints.

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
    let (setting, directory) = (Setting::new().await, tempfile::tempdir().unwrap());
    let leader = &setting.store;
    let hints = leader.hints(Listener::Recruiter);
    let _hub = leader.serve_hints(directory.path(), LeaseTerm(2), &hints).await.unwrap();
    let earlier = store(&setting.database).await;
    let _earlier_hub = earlier.serve_hints(directory.path(), LeaseTerm(1), &hints).await.unwrap();
    let metadata = setting.database.raw("metadata");
    let announced = metadata.find_one(doc! { "_id": "relay" }).await.unwrap().unwrap();
    assert_eq!(announced.get_i64("term").unwrap(), 2, "an earlier leader does not overwrite it");
    let is_connected = async || {
        let (worker, other) = (WorkerId::new(), store(&setting.database).await);
        let listening = other.hints(Listener::Worker(worker, Channel::default()));
        wait_until(SOON, "it listens", async || listening.is_listening()).await;
        leader.is_linked(worker)
    };
    assert!(is_connected().await);
    metadata.update_one(doc! { "_id": "relay" }, doc! { "$set": { "boot_id": "another machine" } }).await.unwrap();
    assert!(!is_connected().await);
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

// What people are shown, and what reading costs.

#[tokio::test]
async fn a_job_is_shown_where_it_is() {
    let setting = Setting::new().await;
    let worker = setting.worker(9).await;
    let [waiting, assigned, running, orphaned, archived] = setting.jobs().await;
    let held = setting.start(worker, [running, orphaned, archived]).await;
    assert_eq!(setting.archive(&[setting.done(&held[2])]).await, [Recorded::Yes]);
    setting.set("roster", worker, doc! { "working_on": [running, assigned] }).await;
    let page = |limit| Page { limit, ..Page::default() };
    let found = |jobs: Vec<RawDocumentBuf>| set_of(jobs.iter().map(|job| JobId::from(job.get_object_id("_id").unwrap())));
    let listed = async |state| found(setting.store.jobs(&JobFilter { state, ..JobFilter::default() }, page(9)).await.unwrap().jobs);
    let walked = async |state| {
        let mut walk = Walk::new(JobFilter { state, ..JobFilter::default() });
        let found = setting.store.next_matches(&mut walk).await.unwrap().unwrap();
        assert_eq!(setting.store.next_matches(&mut walk).await.unwrap(), None);
        set_of(found.into_iter().map(|found| found.job))
    };
    for state in [StateFilter::Scheduled, StateFilter::Running, StateFilter::Archived] {
        let expected = match state {
            StateFilter::Scheduled => set_of([waiting, assigned]),
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
    let newest = *[waiting, assigned, running, orphaned, archived].iter().max().unwrap();
    let behind = Page { after: Some(newest), ..page(9) };
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
    let reads: Vec<Document> = setting.database.raw("system.profile").find(reads).await.unwrap().try_collect().await.unwrap();
    let returned: Vec<i32> = reads.iter().map(|read| read.get_i32("nreturned").unwrap()).collect();
    assert_eq!(returned, [1, 0, 0, 1, 0, 0, 0], "{reads:?}");
}

fn keyed(unique: Unique) -> NewJob {
    NewJob::of_class("x", doc! {}).unique(unique)
}

const HOUR: Duration = Duration::from_secs(3_600);

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
        (doc! { "attempts": Bson::Null }, Outcome::Replaced),
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
    let mut ids = Vec::new();
    for change in [doc! { "attempts": 1 }, doc! { "locked": true }, doc! {}] {
        let id = keyed(waiting()).enqueue(&setting.store).await.unwrap().id;
        if !change.is_empty() {
            setting.set("scheduled", id, change).await;
        }
        ids.push(id);
    }
    keyed(Unique::by_key("other").while_waiting()).enqueue(&setting.store).await.unwrap();
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

#[tokio::test]
async fn expired_jobs_are_unlocked_and_their_time_is_over() {
    let setting = Setting::new().await;
    setting.store.prepare_expiring_jobs().await.unwrap();
    let [expired, locked, later, never] = setting.jobs().await;
    let over = date(in_ms(&setting.store, -1_000));
    for id in [expired, locked] {
        setting.set("scheduled", id, doc! { "expires_at": over }).await;
    }
    setting.set("scheduled", locked, doc! { "locked": true }).await;
    setting.set("scheduled", later, doc! { "expires_at": date(in_ms(&setting.store, 60_000)) }).await;
    setting.set("scheduled", never, doc! { "expires_at": Bson::Null }).await;
    let found = setting.store.expired_jobs(setting.store.now(), 10).await.unwrap();
    assert_eq!(found.iter().map(|found| found.job).collect::<Vec<_>>(), [expired]);
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
    // In a caller's transaction.
    let [mine, locked] = setting.jobs().await;
    for id in [mine, locked] {
        setting.set("scheduled", id, doc! { "scheduled_at": end_of_time }).await;
    }
    setting.set("scheduled", mine, doc! { "unique_after": "m" }).await;
    setting.set("scheduled", locked, doc! { "unique_after": "l", "locked": true }).await;
    for key in ["l", "m"] {
        let [id] = setting.jobs().await;
        setting.set("scheduled", id, doc! { "unique": key }).await;
        let [held] = setting.start(WorkerId::new(), [id]).await;
        let mut session = setting.store.start_session().await.unwrap();
        session.start_transaction().await.unwrap();
        assert_eq!(setting.store.finish_in(&mut session, &setting.done(&held)).await.unwrap(), Recorded::Yes);
        session.commit_transaction().await.unwrap();
        assert_eq!((due(mine).await, due(locked).await), (key == "m", false));
    }
    assert!(setting.found("scheduled", held).await.is_some());
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
async fn messages_become_jobs_only_if_their_group_is_as_it_was_read() {
    let setting = Setting::new().await;
    let declare = async || {
        let topics = [Pattern::new("a").unwrap()];
        consumers::declare(&setting.store, "g", topics, NewJob::of_class("x", doc! {}), From::Now).await.unwrap();
    };
    declare().await;
    let read = async || consumers::list(&setting.store).await.unwrap().remove(0).1.unwrap();
    let stale = read().await;
    let position = |text: &str| text.parse::<Position>().unwrap();
    let message = |at: &str| Message { topic: "a".into(), body: doc! {}, at: None, position: position(at) };
    let mut session = CommitSession::default();
    let mut forward = async |mut group: ConsumerGroup, at: &str| {
        consumers::forward(&setting.store, &mut session, &mut group, vec![message(at)]).await.unwrap()
    };
    assert!(forward(stale.clone(), "82aa").await);
    assert!(!forward(stale, "82bb").await, "another leader has moved its position");
    let changed = read().await;
    declare().await;
    assert!(!forward(changed.clone(), "82bb").await, "its job was changed");
    let pass = async |mut group: ConsumerGroup| consumers::pass(&setting.store, &mut group, position("82dd")).await.unwrap();
    assert!(!pass(changed.clone()).await);
    setting.store.note_consumer_problem("g", changed.revision, "old").await.unwrap();
    let now = read().await;
    assert_eq!((now.problem.clone(), now.forwarded, &now.position), (None, 1, &position("82aa")));
    assert_eq!(setting.database.raw("scheduled").count_documents(doc! {}).await.unwrap(), 1);
    setting.store.note_consumer_problem("g", now.revision, "new").await.unwrap();
    assert_eq!(read().await.problem.as_deref(), Some("new"));
    assert!(forward(now.clone(), "82cc").await);
    assert!(!pass(now).await, "messages have become jobs");
    let now = read().await;
    assert_eq!(now.problem, None, "it goes on");
    assert!(pass(now).await);
    assert_eq!((read().await.position, read().await.forwarded), (position("82dd"), 2));
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
async fn the_waiting_jobs_of_a_lane_are_counted() {
    let setting = Setting::new().await;
    let now = setting.store.now();
    let [due, later, locked, gated, of_class] = setting.jobs().await;
    setting.set("scheduled", later, doc! { "scheduled_at": bson::DateTime::from_chrono(now + Duration::from_secs(60)) }).await;
    setting.set("scheduled", locked, doc! { "locked": true }).await;
    setting.set("scheduled", gated, doc! { "gate": "g" }).await;
    setting.set("scheduled", of_class, doc! { "workable.class": "y" }).await;
    setting.set("scheduled", due, doc! { "scheduled_at": bson::DateTime::from_chrono(now - Duration::from_secs(1)) }).await;
    NewJob::of_class("x", doc! {}).in_group("other").enqueue(&setting.store).await.unwrap();
    let lane = Lane::new("generic", "x");
    assert_eq!(setting.store.waiting_in_lane(&lane, setting.store.now()).await.unwrap(), (1, 1));
    let gated = Lane { gate: Some("g".into()), ..lane };
    assert_eq!(setting.store.waiting_in_lane(&gated, setting.store.now()).await.unwrap(), (1, 0));
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
    let kept = setting.store.kept_cells(LeaseTerm(2)).await.unwrap();
    assert_eq!(kept.cells.keys().collect::<Vec<_>>(), ["api"]);
    assert!(kept.cells["api"] >= now + hour - Duration::from_millis(1) && kept.since.is_none(), "{kept:?}");
    assert_eq!(setting.count("metadata", doc! { "_id": { "$regex": "^rate:" } }).await, 1, "the other has passed");
    setting.store.prune_not_kept(now + hour).await.unwrap();
    assert_eq!(setting.store.kept_cells(LeaseTerm(2)).await.unwrap(), kept, "counts are deleted, and not cells");
    setting.set("metadata", "rates", doc! { "term": 7_i64 }).await;
    assert!(setting.store.kept_cells(LeaseTerm(8)).await.unwrap().since.is_some(), "others have led before");
}

#[tokio::test]
async fn the_jobs_of_one_priority_are_found_alone() {
    let setting = Setting::new().await;
    let [low, high] = setting.jobs().await;
    setting.set("scheduled", high, doc! { "priority": 9 }).await;
    let of = |priority| Lane { priority: Some(priority), ..Lane::new("generic", "x") };
    for (lane, expected) in [(of(5), vec![low]), (of(9), vec![high]), (of(1), vec![]), (Lane::new("generic", "x"), vec![high, low])] {
        let found = setting.store.due_jobs_of_each(&[(lane.clone(), 9)], setting.store.now()).await.unwrap();
        assert_eq!(found[0].jobs.iter().map(|job| job.id).collect::<Vec<_>>(), expected, "{lane:?}");
    }
}

#[tokio::test]
async fn events_are_read_from_a_time_on() {
    let setting = Setting::new().await;
    setting.store.prepare_events(None).await.unwrap();
    let ring = setting.database.raw("events");
    let publish = async |topic: &str| {
        let event = doc! { "topic": topic, "at": bson::DateTime::now() };
        let by = bson::oid::ObjectId::new();
        let document = doc! { "at": bson::Timestamp { time: 0, increment: 0 }, "by": by, "first": 0_i64, "events": [event] };
        ring.insert_one(document).await.unwrap();
    };
    publish("before").await;
    let mut events = setting.store.events([Pattern::everything()], None).await.unwrap();
    publish("after").await;
    let Ok(Received::Event(event)) = timeout(SOON, events.next()).await else { panic!("an event was published") };
    assert_eq!(event.topic, "after");
    let of = |at: bson::DateTime| bson::Timestamp { time: u32::try_from(at.timestamp_millis() / 1_000 - 60).unwrap(), increment: 0 };
    ring.insert_one(doc! { "at": of(bson::DateTime::now()), "by": bson::oid::ObjectId::new(), "first": 0_i64, "events": [{ "topic": "old", "at": bson::DateTime::now() }] })
        .await
        .unwrap();
    let since = setting.store.now() - chrono::TimeDelta::seconds(30);
    let past: Vec<String> =
        setting.store.past_events([Pattern::everything()], Some(since)).await.unwrap().into_iter().map(|event| event.topic).collect();
    assert_eq!(past, ["before", "after"]);
}
