//! Every step of every process, before and after, with an abort and with a freeze that is longer than a death.
//!
//! Which steps there are is not written down anywhere: the processes note what they ask MongoDB for, and a step that any of
//! them took and that nobody broke fails the test. Breaking one step can lead to another that nobody takes on a good day;
//! that one is broken by a second fault after the first.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::Duration,
};

use bson::doc;
use futures_util::{StreamExt, stream};
use recruiter_tests::{
    faults::{Blow, FAULT, Fault, Moment, NOTES},
    ledger::Entry,
    mongo::TestDatabase,
    oracle::Policy,
    processes::Process,
    report::Row,
    wait::wait_until,
    world::{Role, World},
};

use crate::cycle::{self, AT_A_TIME, Breaks};

/// How often a fault that did not strike is tried again: a step after a first fault is not taken every time.
const WAVES: usize = 4;

/// Faults of one process, each after the other.
#[derive(Clone, Debug)]
struct Plan {
    role: Role,
    faults: Vec<Fault>,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let faults: Vec<String> = self.faults.iter().map(ToString::to_string).collect();
        write!(f, "{:?}: {}", self.role, faults.join(", then "))
    }
}

type Step = (Role, String);

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_or_done_twice_when_a_process_breaks_at_any_step() {
    let mut whole = cycle::run(World::new().await, None).await;
    assert!(whole.findings.all().is_empty(), "{:#?}", whole.findings);
    // What happens on one good day and not on the next is left to the second faults.
    let another = cycle::run(World::new().await, None).await.steps;
    whole.steps.retain(|step, _| another.contains_key(step));
    let mut rows: BTreeMap<Blow, Row> =
        [(Blow::Abort, Row::new("a process aborts at a step")), (Blow::Freeze, Row::new("a process freezes at a step, past its death"))]
            .into();
    let usual: BTreeSet<Step> = whole.steps.keys().cloned().collect();
    let mut plans: Vec<Plan> = whole
        .steps
        .iter()
        .flat_map(|(step, times)| faults_at(&step.1, *times).map(|fault| Plan { role: step.0, faults: vec![fault] }))
        .collect();
    let mut unusual: BTreeMap<Step, Vec<Fault>> = BTreeMap::new();
    let mut broken: BTreeSet<Step> = BTreeSet::new();
    let mut missed = Vec::new();
    for wave in 0..WAVES {
        let mut runs = stream::iter(std::mem::take(&mut plans))
            .map(async |plan| {
                let run = cycle::run_beside_others(World::new().await, Breaks::by_itself(plan.role, &plan.faults)).await;
                (plan, run)
            })
            .buffer_unordered(AT_A_TIME);
        while let Some((plan, run)) = runs.next().await {
            let fault = plan.faults.last().expect("a plan has a fault");
            println!("{plan}: recovered in {:?}, wrong: {:?}", run.recovery, run.findings.all());
            for step in run.steps.into_keys().filter(|step| step.0 == plan.role && !usual.contains(step)) {
                unusual.entry(step).or_default().push(plan.faults[0].clone());
            }
            match run.recovery {
                Some(recovery) => {
                    broken.insert((plan.role, fault.step.clone()));
                    rows.get_mut(&fault.blow).unwrap().add(run.findings.of(&plan.to_string()), recovery);
                }
                None => missed.push(plan),
            }
        }
        drop(runs);
        // What is usual must be broken in every way; of what is not, the way there is found by trying.
        missed.retain(|plan: &Plan| plan.faults.len() == 1);
        plans = std::mem::take(&mut missed);
        for ((role, step), leads) in unusual.iter_mut().filter(|(step, _)| !broken.contains(*step)) {
            // Whoever stood still finds the world changed most often.
            leads.sort_by_key(|lead| lead.blow != Blow::Freeze);
            let leads = leads.iter().cycle().skip(wave * WAYS.len());
            plans.extend(faults_at(step, 1).zip(leads).map(|(fault, lead)| Plan { role: *role, faults: vec![lead.clone(), fault] }));
        }
    }
    rows.into_values().for_each(Row::close);
    let left: Vec<String> = plans.iter().map(ToString::to_string).collect();
    assert!(left.is_empty(), "these were seen and never broken: {left:#?}");
}

/// Before and after, by abort and by freeze.
const WAYS: [(Blow, Moment); 4] =
    [(Blow::Abort, Moment::Before), (Blow::Abort, Moment::After), (Blow::Freeze, Moment::Before), (Blow::Freeze, Moment::After)];

/// A step in each way; where it is taken often, in half of them a later one than the first.
fn faults_at(step: &str, times: u32) -> impl Iterator<Item = Fault> {
    let later = if times >= 4 { 2 } else { 1 };
    WAYS.into_iter().zip([1, later, later, 1]).map(|((blow, moment), nth)| Fault { step: step.to_owned(), moment, blow, nth })
}

/// The first process on a new database makes its collections and indexes; whoever comes after its death makes the rest.
#[tokio::test(flavor = "multi_thread")]
async fn a_new_database_is_set_up_whole_whoever_dies_in_the_middle() {
    let whole = first_on_a_new_database(None).await.1;
    assert!(whole.contains("createIndexes"), "{whole}");
    let steps: BTreeSet<&str> = whole.lines().collect();
    let faults = steps.iter().flat_map(|step| {
        [Moment::Before, Moment::After].map(|moment| Fault { step: (*step).to_owned(), moment, blow: Blow::Abort, nth: 1 })
    });
    let mut row = Row::new("a process aborts while it sets the database up");
    let mut runs = stream::iter(faults)
        .map(async |fault| {
            let (database, _) = first_on_a_new_database(Some(&fault)).await;
            let mut world = World::on(database).await;
            let index = async |name: &str| world.database.raw(name).list_index_names().await.unwrap();
            assert!(index("scheduled").await.contains(&"due_jobs".to_owned()), "{fault}");
            assert!(index("archived").await.contains(&"archived_by_end".to_owned()), "{fault}");
            assert!(world.database.raw("scheduled").insert_one(doc! { "group": "no job" }).await.is_err(), "{fault}: no validator");
            for role in Role::ALL {
                world.start(role, &[], &[]);
            }
            world.enqueue(Entry::lasting(0), Policy::Never).await.unwrap();
            assert!(world.until_quiet(Duration::from_secs(60)).await, "{fault}: {}", world.logs());
            world.judge().await.of(&fault.to_string())
        })
        .buffer_unordered(AT_A_TIME);
    while let Some(findings) = runs.next().await {
        row.add(findings, Duration::ZERO);
    }
    row.close();
}

/// Runs a recruiter on a database that nobody has used yet, until it leads or its fault has struck; with the steps it took.
async fn first_on_a_new_database(fault: Option<&Fault>) -> (TestDatabase, String) {
    let database = TestDatabase::new().await;
    let notes = tempfile::tempdir().unwrap();
    let faults = fault.map(ToString::to_string).unwrap_or_default();
    let environment = [("MONGODB_URI", database.uri()), (NOTES, notes.path().to_str().unwrap()), (FAULT, &faults)];
    let mut first = Process::start("faulty", &["recruiter"], &environment);
    let noted = |file: &str| std::fs::read_to_string(notes.path().join(file)).unwrap_or_default();
    let over = async || if fault.is_some() { first.try_exit().is_some() } else { noted("steps").contains("find signals") };
    wait_until(Duration::from_secs(60), "it has set the database up or died", over).await;
    assert_eq!(noted("struck").trim_end(), faults);
    (database, noted("steps"))
}
