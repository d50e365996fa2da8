//! Which jobs are due, lane by lane, and which lanes have jobs.

use std::{collections::BTreeSet, time::Duration};

use bson::{Document, doc, oid::ObjectId};
use recruiter_common::{
    JobId, NewJob, Priority, WorkerId,
    job::StoredPolicy,
    store::{Lane, LaneCounts, ScheduledJob, Store, Waiting},
};
use recruiter_tests::{
    factory::{in_ms, minimal_job},
    local,
};
use tokio::time::timeout;

use crate::setting::{SOON, Setting, date, set_of};

#[tokio::test]
async fn groups_are_named_once_and_while_jobs_wait_in_them() {
    let setting = Setting::new().await;
    let jobs = ["a", "a", "b", "c"].map(|group| NewJob::of_class("x", doc! {}).in_group(group));
    let jobs = local::ids(setting.store.enqueue_many(jobs).await.unwrap());
    setting.start(WorkerId::new(), [jobs[3]]).await;
    let groups = timeout(SOON, setting.store.ungated_groups()).await.expect("there is an end to them");
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
        lanes.unwrap().into_iter().map(|lane| lane.group + lane.class.as_str()).collect::<Vec<_>>()
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

/// As an operator does. A store that connects afterwards reads more than the index has.
async fn hide_due_jobs(setting: &Setting) {
    let hide = doc! { "collMod": "scheduled", "index": { "name": "due_jobs", "hidden": true } };
    setting.database.database().run_command(hide).await.unwrap();
}

/// One walk over the index answers for them.
#[tokio::test]
async fn due_in_very_many_lanes_is_what_waits_there_since_now() {
    let setting = Setting::new().await;
    let groups: Vec<String> = (0..700).map(|number| format!("group-{number:03}")).collect();
    let job = |group: &str| NewJob::of_class("x", doc! {}).in_group(group);
    let mut jobs: Vec<NewJob> = groups.iter().map(|group| job(group)).collect();
    let urgent = job(&groups[600]).priority(Priority::new(9).unwrap());
    let elsewhere = [job("other"), NewJob::of_class("y", doc! {}).in_group(&groups[0]), job(&groups[0]).limit("printer")];
    jobs.extend([urgent, job(&groups[1]).at(in_ms(&setting.store, 60_000)), job(&groups[2])].into_iter().chain(elsewhere));
    let ids = local::ids(setting.store.enqueue_many(jobs).await.unwrap());
    setting.start(WorkerId::new(), [ids[702]]).await;
    let lanes: Vec<Lane> = groups.iter().map(|group| Lane::new(group, "x")).collect();
    let now = setting.store.now();
    let finds_all = async |store: &Store| {
        let found = store.due_jobs(&lanes, now, 1_000).await.unwrap();
        assert_eq!((set_of(found.jobs.iter().map(|job| job.id)), found.end), (set_of(ids[..=700].iter().copied()), None));
    };
    finds_all(&setting.store).await;
    let first = setting.store.due_jobs(&lanes, now, 3).await.unwrap();
    let asked = [ids[700], ids[0], ids[1]];
    assert!(first.jobs.iter().map(|job| job.id).eq(asked) && first.end == Some(first.jobs[2].position()), "{first:?}");
    hide_due_jobs(&setting).await;
    finds_all(&local::store(&setting.database).await).await;
}

#[tokio::test]
async fn the_policies_of_due_jobs_are_named_and_no_others() {
    let setting = Setting::new().await;
    let job = |class: &str, policy: &str| {
        NewJob::of_class(class, doc! {}).in_group("a").retry_stored(StoredPolicy { class: policy.into(), parameters: doc! {}.into() })
    };
    setting.store.enqueue_many([job("x", "Mine"), job("y", "Theirs")]).await.unwrap();
    let policies = setting.store.policies_of_due_jobs(&[Lane::new("a", "x")], 9).await.unwrap();
    let policies: Vec<_> = policies.into_iter().map(|(job, policies)| (job.lane(), policies)).collect();
    assert_eq!(policies, [(Lane::new("a", "x"), set_of(["Mine".to_owned()]))]);
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
    let now = setting.store.now();
    let job = |group: &str, class: &str, gate: Option<&str>, due: i64| {
        let mut job = minimal_job(class);
        job.extend(doc! { "group": group, "gate": gate, "scheduled_at": date(now + chrono::TimeDelta::seconds(due)) });
        job
    };
    let jobs = [
        job("a", "x", None, -9),
        job("a", "x", Some("one"), -8),
        job("a", "x", Some("two"), -7),
        job("a", "x", Some("two"), 3_600),
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
    let groups = (setting.store.ungated_groups().await.unwrap(), setting.store.gated_groups().await.unwrap());
    assert_eq!(groups, (set_of(["a", "c"].map(str::to_owned)), set_of(["a", "b"].map(str::to_owned))));
    assert_eq!(setting.store.gated_lanes_of("a").await.unwrap(), [one.clone(), two.clone(), gated("a", "y", "one")]);
    assert_eq!(setting.store.gated_lanes_of("c").await.unwrap(), []);
    assert_eq!(setting.store.lanes_of("a", 9).await.unwrap(), (vec![none], true));
    setting.start(WorkerId::new(), [ids[1], ids[5]]).await;
    assert_eq!(setting.store.gated_lanes_of("a").await.unwrap(), [two, gated("a", "y", "one")]);
    assert_eq!(setting.store.gated_groups().await.unwrap(), set_of(["a".to_owned()]));
    let counts = setting.store.waiting(now, now - Duration::from_millis(6_500)).await.unwrap();
    assert_eq!(counts["a"], Waiting { queued: 3, overdue: 2, postponed: 1, waits: 0 });
    assert_eq!((counts["c"], counts.len()), (Waiting { queued: 1, ..Waiting::default() }, 2));
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

/// However long the backlogs of the others are.
#[tokio::test]
async fn each_of_many_gates_has_its_first_jobs() {
    let setting = Setting::new().await;
    let scheduled = setting.database.raw("scheduled");
    let lanes: Vec<(Lane, usize)> =
        (0..30).rev().map(|gate| (Lane { gate: Some(format!("g{gate:02}")), ..Lane::new("a", "x") }, 2)).collect();
    let job = |gate: Option<&String>, priority: i64, ms: i64, other: Document| {
        let date = bson::DateTime::from_chrono(in_ms(&setting.store, ms));
        let mut job = minimal_job("x");
        job.extend(doc! { "group": "a", "gate": gate, "priority": priority, "scheduled_at": date });
        job.extend(other);
        job
    };
    for long in [3, 5, 9, 100] {
        let (mut jobs, mut expected) = (Vec::new(), Vec::new());
        for (number, (lane, _)) in lanes.iter().enumerate() {
            let gate = lane.gate.as_ref();
            let backlog = if number % 3 == 0 { long } else { i64::try_from(number % 5).unwrap() };
            let mut due: Vec<Document> = (0..backlog).map(|n| job(gate, n % 2, -1_000 - n, doc! {})).collect();
            due.sort_by_key(|job| (-job.get_i64("priority").unwrap(), *job.get_datetime("scheduled_at").unwrap()));
            expected.push(due.iter().map(|job| job.get_object_id("_id").unwrap().into()).collect::<Vec<JobId>>());
            let runs = doc! { "locked": true, "last_execution": { "start": ObjectId::new(), "worker": ObjectId::new() } };
            let others = [doc! { "group": "b" }, doc! { "workable": { "class": "y" } }, doc! { "gate": "other" }, runs];
            jobs.extend(due.into_iter().chain(others.map(|other| job(gate, 9, -9_000, other))).chain([job(gate, 9, 60_000, doc! {})]));
        }
        scheduled.delete_many(doc! {}).await.unwrap();
        scheduled.insert_many(&jobs).await.unwrap();
        let answers = setting.store.due_jobs_of_each(&lanes, setting.store.now()).await.unwrap();
        let has_more = answers.iter().zip(&lanes).any(|(answer, (_, limit))| answer.jobs.len() > *limit);
        assert!(has_more, "the walk reads the whole of short backlogs");
        for ((answer, expected), (lane, limit)) in answers.into_iter().zip(expected).zip(&lanes) {
            let (found, end) = (answer.jobs.iter().map(|job| job.id).collect::<Vec<_>>(), answer.end);
            let wanted = expected.len().min(if end.is_some() { *limit } else { usize::MAX });
            assert!(
                (wanted..=limit * 2).contains(&found.len()) && expected.starts_with(&found),
                "{lane:?} {long}: {found:?} of {expected:?}"
            );
            assert_eq!(end, answer.jobs.last().filter(|_| end.is_some()).map(ScheduledJob::position));
        }
    }
}

#[tokio::test]
async fn the_waiting_jobs_of_a_lane_are_counted() {
    let setting = Setting::new().await;
    let now = setting.store.now();
    setting.store.prepare_expiring_jobs().await.unwrap();
    let [due, later, locked, gated, of_class, for_jobs, once_more, at_last, expired] = setting.jobs().await;
    let ended = doc! { "expires_at": bson::DateTime::from_chrono(now - Duration::from_secs(1)) };
    for job in [later, locked, gated, of_class, expired] {
        setting.set("scheduled", job, ended.clone()).await;
    }
    let latest = bson::DateTime::from_millis(253_402_300_799_999);
    setting.set("scheduled", for_jobs, doc! { "scheduled_at": latest, "waiting": true }).await;
    setting.set("scheduled", once_more, doc! { "scheduled_at": latest, "unique_after": "k" }).await;
    setting.set("scheduled", at_last, doc! { "scheduled_at": latest }).await;
    setting.set("scheduled", later, doc! { "scheduled_at": bson::DateTime::from_chrono(now + Duration::from_secs(60)) }).await;
    setting.set("scheduled", locked, doc! { "locked": true }).await;
    setting.set("scheduled", gated, doc! { "gate": "g" }).await;
    setting.set("scheduled", of_class, doc! { "workable.class": "y" }).await;
    let not_over = doc! { "scheduled_at": bson::DateTime::from_chrono(now - Duration::from_secs(1)), "expires_at": latest };
    setting.set("scheduled", due, not_over).await;
    NewJob::of_class("x", doc! {}).in_group("other").enqueue(&setting.store).await.unwrap();
    NewJob::of_class("x", doc! {}).limit("printer").enqueue(&setting.store).await.unwrap();
    let lane = Lane::new("generic", "x");
    let gated = Lane { gate: Some("g".into()), ..lane.clone() };
    let are_counted = async |store: &Store| {
        let counts = store.waiting_in_lane(&lane, setting.store.now()).await.unwrap();
        assert_eq!(counts, LaneCounts { due: 2, later: 2, for_jobs: 1, for_predecessors: 1 });
        let counts = store.waiting_in_lane(&gated, setting.store.now()).await.unwrap();
        assert_eq!(counts, LaneCounts { due: 1, ..LaneCounts::default() });
    };
    are_counted(&setting.store).await;
    let before = async |priority, seconds_ago| {
        let at = now - Duration::from_secs(seconds_ago);
        setting.store.count_due_before(&lane, Priority::new(priority).unwrap(), at).await.unwrap()
    };
    assert_eq!([before(5, 0).await, before(5, 2).await, before(4, 2).await, before(6, 0).await], [1, 0, 2, 0]);
    let of_class = Lane::new("generic", "y");
    let expired = setting.store.expired_in_group("generic", setting.store.now()).await.unwrap();
    assert_eq!(expired, [(lane.clone(), 1), (of_class, 1), (gated.clone(), 1)].into(), "neither what runs nor what is due later");
    assert!(setting.store.expired_in_group("other", setting.store.now()).await.unwrap().is_empty());
    hide_due_jobs(&setting).await;
    are_counted(&local::store(&setting.database).await).await;
}
