//! Every call of every process, with an outcome that its caller does not learn: the reply is lost after the server has done
//! it, the connection is cut before, there is never an answer, or the answer says that the write may not last.

use std::{collections::BTreeSet, ops::RangeInclusive, sync::Arc};

use futures_util::{StreamExt, stream};
use recruiter_tests::{
    fail_points::FailPoint,
    mongo::{self, TestDatabase},
    proxy::{Action, Proxy},
    report::Row,
    steps::step,
    world::{Role, World},
};

use crate::cycle::{self, AT_A_TIME, Breaks};

const ONCE: RangeInclusive<u32> = 1..=1;

#[tokio::test(flavor = "multi_thread")]
async fn a_call_whose_outcome_is_unknown_is_neither_lost_nor_done_twice() {
    let whole = cycle::run(World::new().await, None).await;
    assert!(whole.findings.all().is_empty(), "{:#?}", whole.findings);
    let mut missed = Vec::new();
    for (action, fault) in [
        (Action::LoseReply, "a reply is lost after the server has done it"),
        (Action::Cut, "a connection is cut before the server sees the call"),
        (Action::Stall, "a call is done and never answered"),
    ] {
        let mut row = Row::new(fault);
        let mut runs = stream::iter(whole.steps.keys().cloned())
            .map(async |(role, asked)| (struck(role, &asked, action).await, role, asked))
            .buffer_unordered(AT_A_TIME);
        while let Some((run, role, asked)) = runs.next().await {
            println!("{role:?} {action:?} {asked}: recovered in {:?}, wrong: {:?}", run.recovery, run.findings.all());
            match run.recovery {
                Some(recovery) => row.add(run.findings.of(&format!("{role:?} {action:?} {asked}")), recovery),
                None => missed.push(format!("{role:?} {action:?} {asked}")),
            }
        }
        row.close();
    }
    assert!(missed.is_empty(), "these never struck: {missed:#?}");
}

/// A run in which the first such call of a process, the first of its role, is struck on its way.
async fn struck(role: Role, asked: &str, action: Action) -> cycle::Run {
    let world = World::new().await;
    let proxy = Proxy::before(world.database.uri()).await;
    let asked = asked.to_owned();
    let armed = Arc::new(proxy.arm(action, ONCE, move |request| step(&request.body).as_ref() == Some(&asked)));
    let breaks = Breaks {
        role,
        faults: Vec::new(),
        uri: Some(proxy.uri(world.database.name())),
        struck: Arc::new(move || armed.count() > 0),
    };
    cycle::run_beside_others(world, breaks).await
}

/// The write is done, and its answer says that a failover can still take it back (`failCommand`).
#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_may_not_last_is_neither_lost_nor_done_twice() {
    let mongod = mongo::own_mongod().await;
    let new_world = async || World::on(TestDatabase::on(&mongod.uri()).await).await;
    let whole = cycle::run(new_world().await, None).await;
    let writes: BTreeSet<(Role, String, String)> = whole
        .steps
        .into_keys()
        .filter_map(|(role, step)| {
            let mut words = step.split(' ').map(ToOwned::to_owned);
            let command = words.next().filter(|command| ["insert", "update", "delete", "findAndModify"].contains(&command.as_str()))?;
            Some((role, command, words.next()?))
        })
        .collect();
    let mut row = Row::new("a write is done and may not last (writeConcernError)");
    let mut missed = Vec::new();
    for (role, command, collection) in writes {
        let world = new_world().await;
        let app = match role {
            Role::Recruiter => "recruiter",
            Role::Cleaner => "recruiter-cleaner",
            Role::Worker if command == "findAndModify" => "recruiter-worker-heartbeat",
            Role::Worker => "recruiter-worker",
        };
        let fault = FailPoint::new(app, &[&command]).namespace(world.database.name(), &collection).times(1).write_concern_error(91);
        let armed = fault.arm(&mongod.uri()).await;
        let run = cycle::run(world, None).await;
        println!("{role:?} {command} {collection}: struck {}, wrong: {:?}", armed.struck().await, run.findings.all());
        if armed.struck().await > 0 {
            row.add(run.findings.of(&format!("{role:?} {command} {collection}")), std::time::Duration::ZERO);
        } else {
            missed.push((role, command, collection));
        }
    }
    row.close();
    assert!(missed.is_empty(), "these never struck: {missed:?}");
    mongod.stop().await.unwrap();
}
