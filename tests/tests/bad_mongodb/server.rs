//! A replica set of three that loses its primary, in every way that a primary can be lost.

use std::time::Duration;

use recruiter_common::shutdown::pause;
use recruiter_tests::{replica_set::ReplicaSet, world::Role};
use tokio::sync::Semaphore;

use crate::stage::{PATIENT, Stage};

/// Replica sets at a time: each has three mongods.
pub(crate) static SETS: Semaphore = Semaphore::const_new(2);
/// How long what stands still or is cut off stays so: longer than any call waits.
const OUTAGE: Duration = Duration::from_secs(12);
/// Everybody, with somebody who stands by.
const ALL: [Role; 5] = [Role::Recruiter, Role::Recruiter, Role::Cleaner, Role::Worker, Role::Worker];
/// Longer than most faults.
const LASTING_MS: i64 = 8_000;

/// Strikes a set so many times while a fleet works on it, and enqueuers go on. Nobody dies of it, and no job waits longer than
/// `within`.
async fn strike(fault: &str, times: usize, within: Duration, blow: impl AsyncFn(&mut ReplicaSet)) {
    let _turn = SETS.acquire().await.unwrap();
    let mut set = ReplicaSet::start(3).await;
    let mut stage = Stage::on(&set.uri()).await;
    let uri = set.uri_for(stage.world.database.name());
    stage.start(&uri, PATIENT, &ALL);
    stage.enqueue_by(&uri).await;
    let bad_line = set.proxy();
    stage.enqueue_on_a_bad_line(&bad_line).await;
    stage.enqueue_some_that_last(LASTING_MS).await;
    let mut blows = Vec::new();
    for _ in 0..times {
        blows.push(stage.blow(blow(&mut set)).await);
    }
    stage.close(fault, &blows).await.without_deaths().end(within);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_steps_down_costs_nothing() {
    strike("the primary steps down", 3, Duration::from_secs(12), async |set| {
        set.step_down().await;
        set.whole().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_primary_costs_nothing() {
    strike("the primary is killed (SIGKILL)", 2, Duration::from_secs(12), async |set| {
        let primary = set.primary().await;
        set.kill(primary).await;
        set.primary_other_than(primary).await;
        pause(Duration::from_secs(2)).await;
        set.restart(primary).await;
        set.whole().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_primary_costs_nothing() {
    strike("the primary is frozen, its sockets open (SIGSTOP)", 2, Duration::from_secs(20), async |set| {
        let primary = set.primary().await;
        set.pause(primary);
        pause(OUTAGE).await;
        set.resume(primary);
        set.whole().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_is_cut_off_costs_nothing() {
    strike("the primary is cut off from everybody", 2, Duration::from_secs(20), async |set| {
        let p = set.primary().await;
        set.isolate(p);
        let t = std::time::Instant::now();
        let next = set.primary_other_than(p).await;
        println!("YY {p} isolated, {next} after {:?}", t.elapsed());
        while t.elapsed() < OUTAGE {
            for m in 0..3 {
                if let Ok(s) = set.command(m, bson::doc! {"replSetGetStatus": 1}).await {
                    let o = s.get_document("optimes").unwrap();
                    println!(
                        "YY {:?} {m}: state {:?} term {:?} committed {:?} applied {:?} sync {:?}",
                        t.elapsed(),
                        s.get("myState"),
                        s.get("term"),
                        o.get_document("lastCommittedOpTime").unwrap(),
                        o.get_document("appliedOpTime").unwrap(),
                        s.get("syncSourceHost")
                    );
                }
            }
            pause(Duration::from_secs(1)).await;
        }
        set.heal();
        set.whole().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_costs_nothing() {
    strike("every member is restarted, one after the other", 1, Duration::from_secs(12), async |set| set.restart_all().await).await;
}
