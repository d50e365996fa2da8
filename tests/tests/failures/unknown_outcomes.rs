//! Every call of every process, with an outcome that its caller does not learn: the reply is lost after the server has done
//! it, the connection is cut before, there is never an answer, or the answer says that the write may not last.

use std::{
    collections::BTreeSet,
    ops::RangeInclusive,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bson::Document;
use futures_util::{StreamExt, stream};
use recruiter_common::shutdown::pause;
use recruiter_dev::embedded::EmbeddedMongo;
use recruiter_tests::{
    coverage::{self, Coverage, Forced, Suite},
    cycle::{self, AT_A_TIME, Breaks, Run},
    fail_points::FailPoint,
    faults::{Blow, Fault, Moment},
    mongo::{self, TestDatabase},
    proxy::{Action, Proxy},
    report::Row,
    steps::step,
    world::{Role, Step, World},
};
use tokio::select;

const ONCE: RangeInclusive<u32> = 1..=1;
const TWICE: RangeInclusive<u32> = 1..=2;
/// How often a call is waited for that not every run makes.
const TRIES: usize = 2;
/// The same for calls that every run makes. Only a stalled machine needs more than a few.
const MOST_TRIES: usize = 24;

/// `WriteConcernFailed`: of all errors that say so, the one that the driver does not try again.
const MAY_NOT_LAST: i32 = 64;

/// A call to be struck, with what leads to it if it is not made on a good day.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Call {
    made: Step,
    lead: Option<(Role, Fault)>,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_whose_outcome_is_unknown_is_neither_lost_nor_done_twice() {
    let mut rows = [
        (Action::LoseReply, "the replies of an executed call and of its repetition are lost"),
        (Action::Cut, "the connection is cut before a call and before its repetition"),
        (Action::Stall, "a call is executed and gets no reply"),
    ]
    .map(|(action, fault)| (action, Row::new(fault)));
    let (calls, forced) = all_calls(&mut rows[0].1).await;
    let mut coverage = Coverage::default();
    // The gate strikes each call in at most one of the three ways.
    let mine = |Call { made, .. }: &Call, index: usize| {
        recruiter_tests::full_length() || coverage::strikes(Suite::UnknownOutcomes, made) && coverage::kind(made) % 3 == index
    };
    for (index, (action, row)) in rows.iter_mut().enumerate() {
        let action = *action;
        let way = format!("{action:?}");
        let mut left: Vec<Call> = calls.iter().filter(|call| mine(call, index)).cloned().collect();
        for turn in 0..MOST_TRIES {
            left.retain(|call| turn < TRIES || coverage.lacks(&call.made, &way, &forced));
            let mut runs = stream::iter(together(std::mem::take(&mut left)))
                .map(async |calls| struck(calls, action).await)
                .buffer_unordered(AT_A_TIME);
            while let Some(Struck { run, calls, times }) = runs.next().await {
                let what = format!("{action:?} {calls:?}");
                println!("{what}: struck {times:?} times, recovered in {:?}, wrong: {:?}", run.recovery, run.findings.all());
                coverage.add_run(run.steps.keys());
                row.add_run(run.findings.of(&what), times.iter().filter(|(struck, _)| *struck > 0).count(), run.recovery);
                for (call, (struck, must)) in calls.into_iter().zip(times) {
                    coverage.add(&call.made, &way, struck >= must);
                    if struck < must {
                        left.push(call);
                    }
                }
            }
        }
    }
    rows.into_iter().for_each(|(_, row)| row.close());
    coverage.close("calls of unknown outcome", &forced);
}

/// One call of each role for a run, as the three have lines of their own; a call with a lead is alone.
fn together(calls: Vec<Call>) -> Vec<Vec<Call>> {
    let mut runs: Vec<Vec<Call>> = Vec::new();
    for call in calls {
        let takes = |other: &Call| call.lead.is_none() && other.lead.is_none() && other.made.0 != call.made.0;
        match runs.iter_mut().find(|run| run.iter().all(takes)) {
            Some(run) => run.push(call),
            None => runs.push(vec![call]),
        }
    }
    runs
}

/// The calls of runs without faults, and those that a fault leads to; and the calls that each run must have. What is found in these runs goes into the row.
async fn all_calls(row: &mut Row) -> (Vec<Call>, Forced) {
    let (good_days, forced) = coverage::good_days().await;
    let steps: BTreeSet<&Step> = forced.values().flatten().collect();
    let mut calls: Vec<Call> = steps.into_iter().map(|made| Call { made: made.clone(), lead: None }).collect();
    let mut add = |made: Step, lead: Option<(Role, Fault)>| {
        if calls.iter().all(|call| call.made != made) {
            calls.push(Call { made, lead });
        }
    };
    // A process that was frozen while others took over learns of it by calls of its own, and an assignment that no worker reads is
    // looked for by its recruiter.
    let leads = [
        (Role::Worker, Moment::Before, "find roster _id,available"),
        (Role::Worker, Moment::Before, "insert archived"),
        (Role::Worker, Moment::Before, "commitTransaction"),
        (Role::Cleaner, Moment::Before, "insert archived"),
        (Role::Cleaner, Moment::Before, "commitTransaction"),
        (Role::Cleaner, Moment::After, "find scheduled _id,locked,last_execution.worker"),
        (Role::Recruiter, Moment::After, "find scheduled group,workable.class,gate,scheduled_at,locked"),
    ]
    .map(|(role, moment, step)| (role, Fault { step: step.to_owned(), moment, blow: Blow::Freeze, nth: 1 }));
    let mut runs = stream::iter(leads)
        .map(async |lead| {
            let breaks = Breaks { faults: vec![lead.clone()], ..Breaks::default() };
            (cycle::run_beside_others(World::new().await, breaks).await, lead)
        })
        .buffered(AT_A_TIME);
    while let Some((run, lead)) = runs.next().await {
        row.add_run(run.findings.of(&format!("{lead:?}")), 0, None);
        run.steps.into_keys().for_each(|made| add(made, Some(lead.clone())));
    }
    for run in good_days {
        run.steps.into_keys().for_each(|made| add(made, None));
        row.add_run(run.findings.of("a run without faults"), 0, None);
    }
    (calls, forced)
}

/// What came of calls that were to be struck.
struct Struck {
    run: Run,
    calls: Vec<Call>,
    /// How often each was, and how often it must be.
    times: Vec<(u32, u32)>,
}

/// A run in which the first such call of a process, the first of its role, is struck on its way. What the driver makes again by
/// itself is struck again: its first retry would hide that anything had happened.
async fn struck(calls: Vec<Call>, action: Action) -> Struck {
    let world = World::new().await;
    let times = if action == Action::Stall { ONCE } else { TWICE };
    let (mut proxies, mut lines, mut armed, mut first) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for Call { made: (role, asked), .. } in calls.clone() {
        let proxy = Proxy::before(world.database.uri()).await;
        let seen: Arc<OnceLock<Document>> = Arc::default();
        first.push(Arc::clone(&seen));
        let is_it = move |body: &Document| {
            step(body).as_ref() == Some(&asked) && what_is_repeated(seen.get_or_init(|| body.clone())) == what_is_repeated(body)
        };
        armed.push(proxy.arm(action, times.clone(), move |request| is_it(&request.body)));
        lines.push((role, proxy.uri(world.database.name())));
        proxies.push(proxy);
    }
    let armed = Arc::new(armed);
    let counted = Arc::clone(&armed);
    let breaks = Breaks {
        faults: calls.iter().flat_map(|call| call.lead.clone()).collect(),
        lines,
        on_the_way: Some(Arc::new(move || counted.iter().filter(|armed| armed.count() > 0).count())),
    };
    let run = cycle::run_beside_others(world, breaks).await;
    let must = |first: &OnceLock<Document>| if action != Action::Stall && first.get().is_some_and(is_retried) { 2 } else { 1 };
    let times = armed.iter().zip(&first).map(|(armed, first)| (armed.count(), must(first))).collect();
    Struck { run, calls, times }
}

/// What a call and its retry have in common: the number of a write, and everything that a read asks for.
fn what_is_repeated(body: &Document) -> Document {
    let number = |key: &str| ["lsid", "txnNumber"].contains(&key);
    let of_the_moment = |key: &str| ["lsid", "$clusterTime", "readConcern", "maxTimeMS"].contains(&key);
    let is_write = body.contains_key("txnNumber");
    body.clone().into_iter().filter(|(key, _)| if is_write { number(key) } else { !of_the_moment(key) }).collect()
}

/// Whether the driver makes this call again by itself: reads and numbered writes, but in a transaction only its end. Not the rest of
/// a cursor, no command that is sent as it is, and no write to many documents.
fn is_retried(body: &Document) -> bool {
    let name = body.keys().next().map_or("", String::as_str);
    match name {
        "commitTransaction" | "abortTransaction" => true,
        _ if body.contains_key("autocommit") => false,
        "find" | "aggregate" | "listCollections" | "listIndexes" => true,
        _ => body.contains_key("txnNumber"),
    }
}

/// The write is done, and its answer says that a failover can still take it back (`failCommand`).
#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_may_not_last_is_neither_lost_nor_done_twice() {
    let mongod = mongo::own_mongod().await;
    let mut row = Row::new("a write is executed and its majority is not confirmed (writeConcernError)");
    let (good_days, forced) = coverage::good_days().await;
    // What a step does, in which collection.
    let write = |made: &Step| {
        let words: Vec<&str> = made.1.split(' ').take(2).collect();
        coverage::writes(made).then(|| (made.0, words.join(" ")))
    };
    let forced: Forced = forced.into_iter().map(|(name, steps)| (name, steps.iter().filter_map(write).collect())).collect();
    let writes: BTreeSet<Step> = good_days.iter().flat_map(|run| run.steps.keys()).filter_map(write).collect();
    let (mut coverage, way) = (Coverage::default(), "writeConcernError");
    // One fault at a time, because MongoDB has one fail point of this kind. The gate has every other write.
    let every = if recruiter_tests::full_length() { 1 } else { 2 };
    let mut left: Vec<Step> = writes.into_iter().step_by(every).collect();
    for turn in 0..MOST_TRIES {
        left.retain(|made| turn == 0 || coverage.lacks(made, way, &forced));
        for made in std::mem::take(&mut left) {
            let run = unconfirmed(&mongod, &made).await;
            println!("{made:?}: recovered in {:?}, wrong: {:?}", run.recovery, run.findings.all());
            coverage.add_run(&run.steps.keys().filter_map(write).collect::<BTreeSet<_>>());
            coverage.add(&made, way, run.recovery.is_some());
            row.add_run(run.findings.of(&format!("{made:?}")), usize::from(run.recovery.is_some()), run.recovery);
            if run.recovery.is_none() {
                left.push(made);
            }
        }
    }
    row.close();
    coverage.close("writes that may not last", &forced);
}

/// A run in which the first such write gets an answer that says so.
async fn unconfirmed(mongod: &EmbeddedMongo, (role, step): &Step) -> Run {
    let (command, collection) = step.split_once(' ').map_or((step.as_str(), None), |(command, of)| (command, Some(of)));
    let world = World::on(TestDatabase::on(&mongod.uri()).await).await;
    let app = match *role {
        Role::Recruiter => "recruiter",
        Role::Cleaner => "recruiter-cleaner",
        Role::Worker if command == "findAndModify" && collection == Some("roster") => "recruiter-worker-heartbeat",
        Role::Worker => "recruiter-worker",
    };
    let fault = FailPoint::new(app, &[command]).times(1).write_concern_error(MAY_NOT_LAST);
    let fault = match collection {
        // There are too few workers for another channel than the first.
        Some(collection) => fault.namespace(world.database.name(), &collection.replace("signals_n", "signals_0")),
        None => fault,
    };
    let armed = fault.arm(&mongod.uri()).await;
    let struck = Arc::new(AtomicBool::new(false));
    let (looks, seen) = (async || armed.struck().await > 0, Arc::clone(&struck));
    let breaks = Breaks { on_the_way: Some(Arc::new(move || usize::from(seen.load(Ordering::Relaxed)))), ..Breaks::default() };
    let watch = async {
        while !looks().await {
            pause(LOOK_EVERY).await;
        }
        struck.store(true, Ordering::Relaxed);
        std::future::pending::<Run>().await
    };
    select! {
        run = cycle::run(world, breaks) => run,
        run = watch => run,
    }
}

/// Between two looks at what a fail point has struck.
const LOOK_EVERY: Duration = Duration::from_millis(100);
