//! Every step of every process, before and after, with an abort and with a freeze that is longer than a death.
//!
//! Which steps there are is not written down anywhere: the processes note what they ask MongoDB for, and a step that any of
//! them took and that nobody broke fails the test.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::{StreamExt, stream};
use recruiter_tests::{
    faults::{Blow, Fault, Moment},
    report::Row,
    world::Role,
};

use crate::cycle::{self, AT_A_TIME, Breaks};

#[tokio::test]
async fn nothing_is_lost_or_done_twice_when_a_process_breaks_at_any_step() {
    let whole = cycle::run(None).await;
    assert!(whole.findings.all().is_empty(), "{:#?}", whole.findings);
    let mut rows: BTreeMap<Blow, Row> =
        [(Blow::Abort, Row::new("process aborts at a step")), (Blow::Freeze, Row::new("process freezes at a step, past its death"))].into();
    let mut broken: BTreeSet<(Role, String)> = BTreeSet::new();
    let mut wrong = Vec::new();
    let mut new = whole.steps;
    // Breaking one step can lead to another that nobody takes on a good day; those are broken next.
    while !new.is_empty() {
        broken.extend(new.keys().cloned());
        let faults = new.iter().flat_map(|((role, step), times)| faults_at(step, *times).map(|fault| (*role, fault)));
        let runs = faults.map(async |(role, fault)| (cycle::run(Some(Breaks::by_itself(role, &fault))).await, role, fault.clone()));
        let mut runs = stream::iter(runs.collect::<Vec<_>>()).buffer_unordered(AT_A_TIME);
        let mut seen = BTreeMap::new();
        while let Some((run, role, fault)) = runs.next().await {
            eprintln!("{role:?} {fault}: {:?}, {} wrong", run.recovery, run.findings.all().len());
            match run.recovery {
                Some(recovery) => rows.get_mut(&fault.blow).unwrap().add(run.findings.of(&format!("{role:?} {fault}")), recovery),
                None => wrong.push(format!("did not strike: {role:?} {fault}")),
            }
            seen.extend(run.steps);
        }
        seen.retain(|step, _| !broken.contains(step));
        new = seen;
    }
    rows.into_values().for_each(Row::close);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Before and after, by abort and by freeze; where the step is taken often, also in a later one than the first.
fn faults_at(step: &str, times: u32) -> impl Iterator<Item = Fault> {
    let later = if times >= 4 { 2 } else { 1 };
    [(Blow::Abort, Moment::Before, 1), (Blow::Abort, Moment::After, later), (Blow::Freeze, Moment::Before, later), (Blow::Freeze, Moment::After, 1)]
        .map(|(blow, moment, nth)| Fault { step: step.to_owned(), moment, blow, nth })
        .into_iter()
}
