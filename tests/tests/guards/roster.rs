//! The roster: turns, assignments, heartbeats, retirement.

use bson::{Bson, doc};
use recruiter_common::{
    JobId, WorkerId,
    ids::{LeaseTerm, RoundId},
    store::{CommitSession, HeartbeatReply, Planned},
};
use recruiter_tests::{factory::announcement, wait::wait_until};

use crate::setting::{SOON, Setting, TERM, free, give, set_of};

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
    let (text, beyond) = (setting.worker(1).await, setting.worker(1).await);
    for (worker, term) in [(higher, Bson::Int64(5)), (text, "x".into()), (beyond, Bson::Int64(i64::MAX))] {
        setting.set("roster", worker, doc! { "term": term }).await;
    }
    setting.store.register(&none).await.unwrap();
    assert_eq!(setting.store.stamp_term(LeaseTerm(3)).await.unwrap(), 4);
    for (worker, term) in [(lower, 3), (none.id, 3), (higher, 5), (text, 3), (beyond, 3)] {
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
    let is_untaken = async || setting.found("roster", worker).await.unwrap().contains_key("assigned_since");
    assert!(is_untaken().await);
    assert!(report(Some(first)).await);
    assert!(!is_untaken().await, "but the assignment stays while its jobs run");
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
    let beats = async || matches!(store.heartbeat(worker, &[], 0).await.unwrap(), HeartbeatReply::Seen { .. });
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
        setting.store.record_rescue_session(worker, session.clone(), None).await.unwrap();
        assert!(setting.found("roster", worker).await.unwrap().get_array("sessions").unwrap().contains(&session.into()));
    }
    let worker = setting.worker(1).await;
    setting.set("roster", worker, doc! { "last_seen_at": "now" }).await;
    assert!(matches!(setting.store.heartbeat(worker, &[], 0).await.unwrap(), HeartbeatReply::Seen { .. }));
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
        assert!(setting.store.record_transaction_session(living, doc! { "id": session }).await.unwrap());
        assert!(!setting.store.record_transaction_session(retired, doc! { "id": session }).await.unwrap());
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
        let before = doc! { "id": "given up" };
        setting.store.record_rescue_session(worker, before.clone(), None).await.unwrap();
        setting.store.record_rescue_session(worker, session.clone(), Some(before)).await.unwrap();
        let listed = vec![Bson::from(session.clone()); sessions];
        assert_eq!(setting.found("roster", worker).await.unwrap().get_array("sessions").unwrap(), &listed);
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
    // The clock of the process that has numbered this round was ahead.
    setting.set("roster", other, doc! { "assigned_since": bson::DateTime::from_millis(0) }).await;
    let found = setting.store.assigned_and_not_taken().await.unwrap();
    assert_eq!(found.into_iter().map(|(_, given)| given.worker).collect::<Vec<_>>(), [other, asked]);
}
