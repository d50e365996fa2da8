//! Every call of every process, with an outcome that its caller does not learn: the reply is lost after the server has done
//! it, the connection is cut before, there is never an answer, or the answer says that the write may not last.

use std::{collections::BTreeSet, ops::RangeInclusive, sync::Arc};

use futures_util::{StreamExt, stream};
use recruiter_tests::{
    fail_points::FailPoint,
    faults::{Blow, Fault, Moment},
    mongo::{self, TestDatabase},
    proxy::{Action, Proxy},
    report::Row,
    steps::step,
    world::{Role, World},
};

use crate::cycle::{self, AT_A_TIME, Breaks};

const ONCE: RangeInclusive<u32> = 1..=1;
/// How often a call is waited for that is not made on every day.
const TRIES: usize = 4;

/// A call to be struck, with what leads to it if it is not made on a good day.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Call {
    role: Role,
    step: String,
    lead: Option<Fault>,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_whose_outcome_is_unknown_is_neither_lost_nor_done_twice() {
    let calls = all_calls().await;
    for (action, fault) in [
        (Action::LoseReply, "a reply is lost after the server has done it"),
        (Action::Cut, "a connection is cut before the server sees the call"),
        (Action::Stall, "a call is done and never answered"),
    ] {
        let mut row = Row::new(fault);
        let mut left = calls.clone();
        for _ in 0..TRIES {
            let mut runs =
                stream::iter(std::mem::take(&mut left)).map(async |call| (struck(&call, action).await, call)).buffer_unordered(AT_A_TIME);
            while let Some((run, call)) = runs.next().await {
                println!("{action:?} {call:?}: recovered in {:?}, wrong: {:?}", run.recovery, run.findings.all());
                match run.recovery {
                    Some(recovery) => row.add(run.findings.of(&format!("{action:?} {call:?}")), recovery),
                    None => left.push(call),
                }
            }
        }
        row.close();
        assert!(left.is_empty(), "these were made and never struck: {left:#?}");
    }
}

/// The calls of a good day, and those of bad days that no good day has.
async fn all_calls() -> Vec<Call> {
    let whole = cycle::run(World::new().await, None).await;
    assert!(whole.findings.all().is_empty(), "{:#?}", whole.findings);
    let mut calls: Vec<Call> = Vec::new();
    let usual = cycle::run(World::new().await, None).await.steps;
    calls.extend(whole.steps.into_keys().filter(|step| usual.contains_key(step)).map(|(role, step)| Call { role, step, lead: None }));
    // Who stood still while others took over finds out by calls of their own.
    for (role, moment, step) in [
        (Role::Recruiter, Moment::After, "find scheduled group,priority,scheduled_at,locked,workable.class"),
        (Role::Cleaner, Moment::Before, "commitTransaction"),
        (Role::Cleaner, Moment::After, "find scheduled _id,locked,last_execution.worker"),
        (Role::Worker, Moment::Before, "commitTransaction"),
    ] {
        let lead = Fault { step: step.to_owned(), moment, blow: Blow::Freeze, nth: 1 };
        let run = cycle::run_beside_others(World::new().await, Breaks::by_itself(role, std::slice::from_ref(&lead))).await;
        let unusual = run.steps.into_keys().filter(|step| step.0 == role && !usual.contains_key(step));
        calls.extend(unusual.map(|(role, step)| Call { role, step, lead: Some(lead.clone()) }));
    }
    calls
}

/// A run in which the first such call of a process, the first of its role, is struck on its way.
async fn struck(call: &Call, action: Action) -> cycle::Run {
    let world = World::new().await;
    let proxy = Proxy::before(world.database.uri()).await;
    let asked = call.step.clone();
    let armed = Arc::new(proxy.arm(action, ONCE, move |request| step(&request.body).as_ref() == Some(&asked)));
    let breaks = Breaks {
        role: call.role,
        faults: call.lead.iter().cloned().collect(),
        uri: Some(proxy.uri(world.database.name())),
        struck: Some(Arc::new(move || armed.count() > 0)),
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
