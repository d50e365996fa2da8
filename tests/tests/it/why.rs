//! Why a job does not run: the library, `jobs why`, `groups why`, `stats` and the lists say the same, and it is true.

use std::time::Duration;

use bson::{Document, doc, oid::ObjectId};
use chrono::TimeDelta;
use recruiter_common::{Graph, JobId, Limit, NewJob, Rate, Reason, Why, WorkerId, job, store::Store};
use recruiter_tests::{
    factory::{announcement, insert_unvalidated, minimal_job, started},
    ledger::Entry,
    local::prepared,
    mongo::TestDatabase,
    oracle::Policy,
    wait::{SOON, wait_until},
    world::{Role, World},
};

use super::{cli::recruiter, limits::why as said};

pub(super) struct Stage {
    pub(super) database: TestDatabase,
    pub(super) store: Store,
    pub(super) worker: WorkerId,
}

impl Stage {
    /// A recruiter that leads, and a worker with ten free slots for the class `x`. No process runs.
    pub(super) async fn new() -> Self {
        let (database, store) = prepared().await;
        let worker = announcement(10);
        store.register(&worker).await.unwrap();
        let lease = doc! {
            "_id": "recruiter", "term": 1_i64, "renewals": 1_i64, "released": false, "lease_ms": 3_600_000_i64, "holder_at": "h:1",
            "renewed_at": bson::DateTime::now(),
        };
        database.raw("metadata").insert_one(lease).await.unwrap();
        let stage = Self { database, store, worker: worker.id };
        let offer = doc! { "available": true, "free": 10, "lease_ms": 3_600_000_i64, "last_seen_at": bson::DateTime::now() };
        stage.set_worker(offer).await;
        stage
    }

    pub(super) async fn set_worker(&self, fields: Document) {
        self.database.raw("roster").update_one(doc! { "_id": self.worker }, doc! { "$set": fields }).await.unwrap();
    }

    /// The worker has not been seen for this many of its leases.
    async fn silent_for(&self, leases: f64) {
        #[expect(clippy::cast_possible_truncation, reason = "a few hours")]
        let at = bson::DateTime::now().timestamp_millis() - (leases * 3_600_000.0) as i64;
        self.set_worker(doc! { "last_seen_at": bson::DateTime::from_millis(at) }).await;
    }

    pub(super) async fn insert(&self, more: Document) -> JobId {
        let mut job = minimal_job("x");
        job.extend(more);
        let id = job.get_object_id("_id").unwrap().into();
        insert_unvalidated(&self.database, vec![job]).await;
        id
    }

    async fn why(&self, job: JobId) -> Why {
        let why = self.store.why(job).await.unwrap().unwrap();
        let line = recruiter(&self.database, &["jobs", "why", &job.to_string()]).out;
        assert!(line.starts_with(&format!("{}: ", why.reason)), "{line} {why:?}");
        why
    }

    async fn check(&self, job: JobId, expected: Reason, part: &str) -> Why {
        let why = self.why(job).await;
        assert!(why.reason == expected && why.text.contains(part), "{expected} with {part:?}: {why:?}");
        why
    }

    async fn group(&self) -> Vec<(Reason, u64)> {
        let group = self.store.why_group("generic").await.unwrap();
        assert!(group.is_complete);
        group.reasons.into_iter().map(|(why, jobs)| (why.reason, jobs)).collect()
    }

    fn stats(&self) -> serde_json::Value {
        recruiter(&self.database, &["stats", "--json"]).objects().remove(0)
    }

    /// Whether `stats` says that jobs of this gate, or without one, wait for this reason.
    fn holds(&self, gate: Option<&str>, reason: Reason) -> bool {
        self.stats()["held"].as_array().unwrap().iter().any(|held| held["gate"].as_str() == gate && held["reason"] == reason.name())
    }

    fn list(&self) -> String {
        recruiter(&self.database, &["jobs", "list"]).out
    }
}

fn policy(class: &str, parameters: Document) -> Document {
    doc! { "retry_policy": { "class": class, "parameters": parameters } }
}

fn latest() -> bson::DateTime {
    bson::DateTime::from_millis(253_402_300_799_999)
}

#[tokio::test]
async fn a_policy_that_no_worker_knows_keeps_a_job_from_running() {
    let stage = Stage::new().await;
    let known = stage.insert(policy("DoNotDoItAgain", doc! {})).await;
    let unknown = stage.insert(policy("Mine", doc! {})).await;
    let within = doc! { "filtered_retry_policy": { "class": "Mine", "parameters": {} }, "retriable_exceptions": ["*"] };
    let nested = stage.insert(policy("DoNotDoItAgain", within)).await;
    stage.check(known, Reason::Assignable, "nothing keeps it").await;
    for job in [unknown, nested] {
        stage.check(job, Reason::UnknownPolicy, "knows the retry policy `Mine`").await;
    }
    assert_eq!(stage.group().await, [(Reason::UnknownPolicy, 2), (Reason::Assignable, 1)]);
    // A worker that does not take the job does not help.
    let mut other = announcement(10);
    (other.classes, other.policies) = (vec!["y".into()], vec!["Mine".into(), "DoNotDoItAgain".into()]);
    stage.store.register(&other).await.unwrap();
    let offer = doc! { "available": true, "free": 10, "lease_ms": 3_600_000_i64, "last_seen_at": bson::DateTime::now() };
    stage.database.raw("roster").update_one(doc! { "_id": other.id }, doc! { "$set": offer }).await.unwrap();
    stage.check(unknown, Reason::UnknownPolicy, "`Mine`").await;
    let held = stage.stats()["held"].take();
    assert!(held.as_array().unwrap().len() == 1 && held[0]["class"] == "x" && held[0]["reason"] == "unknown-policy", "{held}");
    let within = r#"{"class": "RetriableExceptionFilter", "parameters":
        {"filtered_retry_policy": {"class": "Mine", "parameters": {}}, "retriable_exceptions": ["*"]}}"#;
    for policy in [r#"{"class": "Mine"}"#, within] {
        let said = recruiter(&stage.database, &["enqueue", "--class", "x", "--custom-policy", "--after", "1h", "--retry", policy]);
        assert!(said.code == 0 && said.err.contains("warning: ") && said.err.contains("`Mine`"), "{}", said.err);
    }
    // Nor do the free slots of a worker that does not know the policy.
    let takes_it = doc! { "$set": { "classes": ["x"], "policies": ["DoNotDoItAgain"] } };
    stage.database.raw("roster").update_one(doc! { "_id": other.id }, takes_it).await.unwrap();
    stage.set_worker(doc! { "policies": ["Mine", "DoNotDoItAgain"] }).await;
    stage.check(nested, Reason::Assignable, "").await;
    stage.set_worker(doc! { "available": false }).await;
    for job in [unknown, nested] {
        stage.check(job, Reason::NoFreeSlot, "").await;
    }
    stage.check(known, Reason::Assignable, "").await;
    assert!(stage.holds(None, Reason::NoFreeSlot), "{}", stage.stats());
    let mut group = stage.group().await;
    group.sort();
    assert_eq!(group, [(Reason::NotDue, 2), (Reason::NoFreeSlot, 2), (Reason::Assignable, 1)]);
    stage.set_worker(doc! { "available": true, "wanted": "quiet" }).await;
    stage.check(unknown, Reason::UnknownPolicy, "").await;
}

#[tokio::test]
async fn a_job_that_runs_once_more_waits_for_the_one_before_it() {
    let stage = Stage::new().await;
    let first = stage.insert(doc! { "unique": "k" }).await;
    assert_eq!(started(&stage.store, stage.worker, &[first]).await.len(), 1);
    let next = stage.insert(doc! { "unique_after": "k", "scheduled_at": latest() }).await;
    let why = stage.check(next, Reason::WaitsForPredecessor, &first.to_string()).await;
    assert!(why.until.is_none() && !why.text.contains("retry"), "{why:?}");
    assert_eq!(stage.group().await, [(Reason::WaitsForPredecessor, 1)]);
    assert_eq!(stage.stats()["total"]["waits"], 1);
    let (list, shown) = (stage.list(), recruiter(&stage.database, &["jobs", "show", &next.to_string()]).out);
    assert!(list.contains("for its predecessor") && !list.contains("in 29"), "{list}");
    assert!(shown.contains("state        waits, ") && shown.contains("waits-for-predecessor: ") && !shown.contains("years"), "{shown}");
    stage.database.raw("scheduled").delete_one(doc! { "_id": first }).await.unwrap();
    stage.check(next, Reason::ReleasedSoon, "has ended").await;
}

#[tokio::test]
async fn jobs_of_a_graph_wait_for_others_and_for_no_date() {
    let stage = Stage::new().await;
    let mut graph = Graph::new();
    let first = graph.add(NewJob::of_class("x", doc! {}));
    let second = graph.add(NewJob::of_class("x", doc! {}).waits_for(first));
    graph.enqueue(&stage.store).await.unwrap();
    let why = stage.check(second, Reason::WaitsForJobs, &first.to_string()).await;
    assert!(why.until.is_none(), "{why:?}");
    let mut group = stage.group().await;
    group.sort();
    assert_eq!(group, [(Reason::WaitsForJobs, 1), (Reason::Assignable, 1)]);
    assert!(stage.list().contains("for 1 job") && !stage.list().contains("in 29"), "{}", stage.list());
    let shown = recruiter(&stage.database, &["jobs", "show", &second.to_string()]).out;
    assert!(shown.contains("state        waits, for 1 job\n") && shown.contains("why          waits-for-jobs: "), "{shown}");
    let counted = || ["queued", "postponed", "waits"].map(|field| stage.stats()["total"][field].as_u64().unwrap());
    assert_eq!(counted(), [1, 0, 1]);
    // A date that is as far away is a date.
    stage.insert(doc! { "scheduled_at": latest() }).await;
    assert!(stage.group().await.contains(&(Reason::NotDue, 1)));
    assert_eq!(counted(), [1, 1, 1]);
}

#[tokio::test]
async fn a_rate_says_until_when() {
    let stage = Stage::new().await;
    let rate = |starts, per| Limit::rate(Rate::new(starts, Duration::from_secs(per), starts).unwrap());
    stage.store.limits().set("fast", rate(10, 1)).await.unwrap();
    stage.store.limits().set("slow", rate(2, 60)).await.unwrap();
    let minute_ago = stage.store.now() - TimeDelta::minutes(1);
    let mut last = JobId::new();
    for number in 0..50 {
        let due = bson::DateTime::from_chrono(minute_ago + TimeDelta::milliseconds(number));
        last = stage.insert(doc! { "gate": "fast", "scheduled_at": due }).await;
    }
    let why = stage.check(last, Reason::Rate, "49 due jobs of its kind come first: it may start within about 5s").await;
    let until = why.until.unwrap() - stage.store.now();
    assert!(until <= TimeDelta::seconds(5), "{until}");
    // A job that is the next one for much longer than the rate needs does not wait for it.
    stage.store.limits().set("free", rate(1, 60)).await.unwrap();
    let due = stage.insert(doc! { "gate": "free", "scheduled_at": bson::DateTime::from_chrono(minute_ago) }).await;
    stage.check(due, Reason::Rate, "it may start within about 1m").await;
    assert!(stage.holds(Some("free"), Reason::Rate), "{}", stage.stats());
    let ago = doc! { "$set": { "scheduled_at": bson::DateTime::from_chrono(minute_ago - TimeDelta::minutes(10)) } };
    stage.database.raw("scheduled").update_one(doc! { "_id": due }, ago).await.unwrap();
    stage.check(due, Reason::Assignable, "").await;
    assert!(!stage.holds(Some("free"), Reason::Rate), "{}", stage.stats());
    // The leader has kept when the slow one allows the next start: with a burst of two, 30 s before its cell.
    let slow = stage.insert(doc! { "gate": "slow" }).await;
    let cell = stage.store.now() + TimeDelta::minutes(10);
    let kept = doc! { "cell": bson::DateTime::from_chrono(cell), "until": bson::DateTime::from_chrono(cell), "starts": 2_i64, "per_ms": 60_000_i64, "burst": 2_i64 };
    let kept = doc! { "_id": "rate:slow", "cell": bson::DateTime::from_chrono(cell), "at_rate": kept };
    stage.database.raw("metadata").insert_one(kept).await.unwrap();
    let why = stage.check(slow, Reason::Rate, "the rate of `slow` allows the next start in 9m").await;
    assert_eq!(why.until.map(|at| at.timestamp_millis()), Some((cell - TimeDelta::seconds(30)).timestamp_millis()));
    assert!(stage.holds(Some("slow"), Reason::Rate), "{}", stage.stats());
    let shown = recruiter(&stage.database, &["jobs", "why", &slow.to_string(), "--json"]).objects().remove(0);
    assert!(shown["until"]["$date"].is_string(), "{shown}");
}

#[tokio::test]
async fn an_absent_cleaner_is_noticed() {
    let stage = Stage::new().await;
    let running = stage.insert(doc! {}).await;
    assert_eq!(started(&stage.store, stage.worker, &[running]).await.len(), 1);
    stage.check(running, Reason::Running, "").await;
    let shown = recruiter(&stage.database, &["jobs", "show", &running.to_string(), "--json"]).objects().remove(0);
    assert!(shown["held"].is_null(), "{shown}");
    stage.silent_for(1.5).await;
    stage.check(running, Reason::DeadWorker, "a cleaner ends").await;
    stage.silent_for(2.5).await;
    stage.check(running, Reason::NoCleaner, "start recruiter-cleaner").await;
    let show = |args: &[&str]| recruiter(&stage.database, &[&["jobs", "show", &running.to_string()], args].concat());
    assert!(show(&[]).out.contains("\nwhy          no-cleaner: "), "{}", show(&[]).out);
    assert_eq!(show(&["--json"]).objects()[0]["held"]["reason"], "no-cleaner");
    let shown = recruiter(&stage.database, &["stats"]).out;
    assert!(stage.stats()["unrescued_workers"] == 1 && shown.contains("no cleaner seems to run"), "{shown}");
    // A cleaner that died while it ended the jobs of the worker.
    stage.set_worker(doc! { "retired": true }).await;
    stage.check(running, Reason::NoCleaner, "start recruiter-cleaner").await;

    // The dead worker has a permit that another worker needs.
    let mut living = announcement(10);
    living.lease_ms = 3_600_000;
    stage.store.register(&living).await.unwrap();
    let offer = doc! { "$set": { "available": true, "free": 10, "last_seen_at": bson::DateTime::now() } };
    stage.database.raw("roster").update_one(doc! { "_id": living.id }, offer).await.unwrap();
    stage.store.limits().set("printer", Limit::capacity(1)).await.unwrap();
    stage.set_worker(doc! { "held_permits": ["printer#0"] }).await;
    let waits = stage.insert(doc! { "gate": "printer" }).await;
    let why = stage.check(waits, Reason::NoCleaner, "`printer` is full: at most 1 at a time").await;
    assert_eq!(why.holders.iter().map(|holder| holder.worker).collect::<Vec<_>>(), [stage.worker]);
    stage.silent_for(1.5).await;
    stage.check(waits, Reason::LimitFull, "at most 1 at a time").await;
    // And a job that was assigned to it.
    let assigned = stage.insert(doc! {}).await;
    let map = doc! { stage.worker.to_string(): [assigned] };
    let given = doc! { "available": false, "assigned_to": map, "assigned_since": bson::DateTime::now(), "round": ObjectId::new() };
    stage.set_worker(given).await;
    stage.check(assigned, Reason::WorkerSilent, "does not answer").await;
    assert!(stage.holds(None, Reason::WorkerSilent), "{}", stage.stats());
    stage.silent_for(2.5).await;
    stage.check(assigned, Reason::NoCleaner, "was assigned to worker").await;
    assert!(stage.holds(None, Reason::NoCleaner), "{}", stage.stats());
    // No cleaner archives the expired job.
    let expired = stage.insert(doc! { "expires_at": bson::DateTime::from_millis(1) }).await;
    stage.check(expired, Reason::Expired, "recruiter-cleaner").await;
    stage.store.prepare_expiring_jobs().await.unwrap();
    assert!(stage.group().await.contains(&(Reason::Expired, 1)));
}

/// It has free slots, and takes no jobs.
#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_idle_worker_does_not_answer() {
    let mut world = World::new().await;
    world.start(Role::Recruiter, &[], &[]);
    let worker = world.start(Role::Worker, &["--concurrency", "2", "--lease", "5s"], &[]);
    let first = world.enqueue(Entry::lasting(0), Policy::Never).await.unwrap();
    world.wait_for("it works", async || world.archived(first).await.is_some()).await;
    world.members[worker].process.pause();
    let mut jobs = Vec::new();
    for _ in 0..20 {
        jobs.push(world.enqueue(Entry::lasting(0), Policy::Never).await.unwrap());
    }
    for job in [jobs[0], jobs[19]] {
        let is_said = async || {
            let said = said(&world, job).await;
            said["reason"] == "worker-silent" && said["text"].as_str().unwrap().contains("frozen")
        };
        world.wait_for("the worker does not answer", is_said).await;
    }
    let stats = recruiter(&world.database, &["stats", "--json"]).objects().remove(0);
    let said = ["held", "untaken"].map(|kind| stats[kind].to_string());
    assert!(said.concat().contains("worker-silent"), "{stats}");
    world.members[worker].process.resume();
    world.wait_for("it goes on", async || world.count("scheduled", doc! {}).await == 0).await;
    world.close().await;
}

#[tokio::test]
async fn a_limit_with_room_is_not_full() {
    let stage = Stage::new().await;
    stage.database.raw("groups").insert_one(doc! { "_id": "generic", "capacity": 2 }).await.unwrap();
    let job = stage.insert(doc! {}).await;
    assert_eq!(stage.stats()["held"], serde_json::json!([]));
    stage.check(job, Reason::Assignable, "").await;
    // Two that were started before there was a limit have no permits, and count.
    let running = [stage.insert(doc! {}).await, stage.insert(doc! {}).await];
    assert_eq!(started(&stage.store, stage.worker, &running).await.len(), 2);
    stage.set_worker(doc! { "working_on": running.to_vec() }).await;
    stage.check(job, Reason::LimitFull, "`@generic` is full: at most 2 at a time").await;
    let held = stage.stats()["held"].take();
    assert!(held[0]["reason"] == "limit-full" && held.as_array().unwrap().len() == 1, "{held}");
}

#[tokio::test]
async fn a_pause_that_is_not_valid_makes_no_limit_invalid() {
    let stage = Stage::new().await;
    let pauses = stage.database.raw("pauses");
    pauses.insert_one(doc! { "_id": "printer" }).bypass_document_validation(true).await.unwrap();
    stage.store.limits().set("printer", Limit::capacity(1)).await.unwrap();
    let job = stage.insert(doc! { "gate": "printer" }).await;
    stage.check(job, Reason::Assignable, "").await;
    let settings = stage.store.settings().await.unwrap();
    assert!(settings.invalid.is_empty() && settings.invalid_pauses.contains("printer"), "{settings:?}");
    let shown = recruiter(&stage.database, &["pauses"]);
    assert!(shown.code == 0 && shown.err.contains("the document printer in `pauses` pauses nothing"), "{}{}", shown.out, shown.err);
    assert_eq!(recruiter(&stage.database, &["limits", "list"]).err, "");
    // A group or a limit that is not valid is named where the valid ones are listed.
    let name = doc! { "_id": "slow", "capacity": "one" };
    for (collection, list, named) in [("groups", "groups", "@slow"), ("limits", "limits", "slow")] {
        stage.database.raw(collection).insert_one(name.clone()).bypass_document_validation(true).await.unwrap();
        for args in [&[list, "list"][..], &[list, "list", "--json"]] {
            let shown = recruiter(&stage.database, args);
            assert!(shown.code == 0 && shown.err.contains(&format!("the setting {named} is not valid")), "{args:?}: {}", shown.err);
        }
    }
}

#[tokio::test]
async fn an_application_asks_without_the_command_line() {
    let (database, store) = prepared().await;
    assert!(store.why(JobId::new()).await.unwrap().is_none());
    let job = NewJob::of_class("x", doc! {}).enqueue(&store).await.unwrap().id;
    assert_eq!(store.why(job).await.unwrap().unwrap().reason, Reason::NoRecruiter);
    let later = NewJob::of_class("x", doc! {}).after(Duration::from_secs(600)).enqueue(&store).await.unwrap().id;
    let why = store.why(later).await.unwrap().unwrap();
    assert!(why.reason == Reason::NotDue && why.until.is_some_and(|at| at > store.now()), "{why:?}");
    wait_until(SOON, "it is gone", async || {
        database.raw("scheduled").delete_one(doc! { "_id": job }).await.unwrap();
        store.why(job).await.unwrap().is_none()
    })
    .await;
}

#[tokio::test]
async fn a_state_has_one_word_in_lists_and_filters() {
    let stage = Stage::new().await;
    let (at, failed) = (bson::DateTime::now(), doc! { "class": "x", "message": "y", "ended_at": bson::DateTime::now() });
    let soon = bson::DateTime::from_millis(at.timestamp_millis() + 3_600_000);
    let locked = doc! { "locked": true, "last_execution": { "worker": stage.worker, "start": ObjectId::new(), "started_at": at } };
    let mut cancelling = locked.clone();
    cancelling.insert("cancel_requested_at", at);
    let waiting = doc! { "scheduled_at": latest(), "waiting": true, "waits_for": [ObjectId::new()] };
    let once_more = doc! { "scheduled_at": latest(), "unique_after": "k" };
    let mut held = Vec::new();
    for more in [waiting, once_more, doc! { "scheduled_at": soon }, doc! {}, locked, cancelling] {
        held.push(stage.insert(more).await);
    }
    stage.set_worker(doc! { "working_on": held[4..].to_vec() }).await;
    for why in ["done", "cancelled", "gave-up"] {
        let mut job = minimal_job("x");
        job.remove("scheduled_at");
        job.extend(doc! { "why": why, "done": why == "done", "last_execution": failed.clone() });
        stage.database.raw("archived").insert_one(job).await.unwrap();
    }
    let listed = |state: &str| {
        let jobs = recruiter(&stage.database, &["jobs", "list", "--json", "--state", state]).objects();
        let mut words: Vec<String> = jobs.iter().map(|job| job["state"].as_str().unwrap().to_owned()).collect();
        words.sort();
        assert!(jobs.iter().all(|job| job["id"].as_str().is_some_and(|id| id.len() == 24)), "{jobs:?}");
        words.join(" ")
    };
    for (state, words) in [
        ("waits", "waits waits"),
        ("postponed", "postponed"),
        ("queued", "queued"),
        ("running", "cancelling running"),
        ("cancelling", "cancelling"),
        ("done", "done"),
        ("cancelled", "cancelled"),
        ("failed", "failed"),
        ("waiting", "postponed queued waits waits"),
        ("archived", "cancelled done failed"),
    ] {
        assert_eq!(listed(state), words, "{state}");
    }
    let table = stage.list();
    assert!(job::Stage::ALL.iter().all(|stage| table.contains(&format!("  {} ", stage.word()))), "{table}");
}
