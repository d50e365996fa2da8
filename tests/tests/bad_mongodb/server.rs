//! A replica set of three that loses its primary, in every way that a primary can be lost.

use std::time::Duration;

use bson::doc;
use recruiter_common::shutdown::pause;
use recruiter_tests::{
    full_length,
    replica_set::ReplicaSet,
    wait::{SOON, wait_until},
    world::Role,
};
use tokio::sync::Semaphore;

use crate::stage::{PATIENT, Stage};

/// Replica sets at a time: each has three mongods.
pub(crate) static SETS: Semaphore = Semaphore::const_new(3);
/// How long what stands still or is cut off stays so: longer than any call waits.
const OUTAGE: Duration = Duration::from_secs(12);
/// All programs, with a recruiter that stands by.
const ALL: [Role; 5] = [Role::Recruiter, Role::Recruiter, Role::Cleaner, Role::Worker, Role::Worker];
/// Longer than most faults.
const LASTING_MS: i64 = 8_000;

/// Strikes a set while a fleet works on it, and enqueuers go on: in the full length so many times, otherwise once. No process dies of it.
async fn strike(fault: &str, times: usize, blow: impl AsyncFn(&mut ReplicaSet)) {
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
    let times = if full_length() { times } else { 1 };
    for _ in 0..times {
        let whole_again = async {
            blow(&mut set).await;
            whole(&set).await;
        };
        blows.push(stage.blow(whole_again).await);
    }
    stage.close(fault, &blows).await.without_deaths().end();
}

/// Waits until every member has all that the primary has. Until then a set that loses its primary once more has no majority
/// to write to: a member may be rolling back, from another one that is away now.
pub(crate) async fn whole(set: &ReplicaSet) {
    set.whole().await;
    let everywhere = doc! { "appendOplogNote": 1, "data": {}, "writeConcern": { "w": 3, "wtimeout": 400 } };
    let noted =
        async || set.command(set.primary().await, everywhere.clone()).await.is_ok_and(|reply| !reply.contains_key("writeConcernError"));
    wait_until(SOON, "all members have caught up", noted).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_steps_down_costs_nothing() {
    strike("the primary steps down", 3, async |set| {
        set.step_down().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_primary_costs_nothing() {
    strike("the primary is killed (SIGKILL)", 2, async |set| {
        let primary = set.primary().await;
        set.kill(primary).await;
        set.primary_other_than(primary).await;
        pause(Duration::from_secs(2)).await;
        set.restart(primary).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_primary_costs_nothing() {
    strike("the primary is frozen with open sockets (SIGSTOP)", 2, async |set| {
        let primary = set.primary().await;
        set.pause(primary);
        pause(OUTAGE).await;
        set.resume(primary);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_is_cut_off_costs_nothing() {
    strike("the network of the primary is cut", 2, async |set| {
        set.isolate(set.primary().await);
        pause(OUTAGE).await;
        set.heal();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_costs_nothing() {
    strike("all members are restarted, one after the other", 1, async |set| set.restart_all().await).await;
}
