//! Every step of every process, before and after, with an abort and with a freeze that is longer than a death.
//!
//! The steps are not listed: the processes record the commands that they send to MongoDB. Breaking one step can lead to another that no
//! run without faults has; that one is broken by a further fault after those that led there. The whole length breaks each step in all four
//! ways; the gate each that writes in one of them, and half of the others.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::Instant,
};

use bson::doc;
use futures_util::{StreamExt, stream};
use recruiter_tests::{
    coverage::{self, Coverage, Forced, Suite},
    cycle::{self, AT_A_TIME, Breaks},
    faults::{Blow, FAULT, Fault, Moment, NOTES},
    ledger::Entry,
    mongo::TestDatabase,
    oracle::Policy,
    processes::Process,
    report::Row,
    wait::{SOON, wait_until},
    world::{Role, Step, World},
};

/// How often a step is tried to be broken in a way: one after other faults is not taken every time.
const TRIES: usize = 3;
/// The same for steps that every run takes. Only a stalled machine needs more than a few.
const MOST_TRIES: usize = 24;
/// How often of these together with steps of the other processes.
const TOGETHER: usize = 2;
/// Different faults that are remembered to lead to a step.
const LEADS: usize = 6;

/// A step, and a way to break it.
type Target = (Step, Blow, Moment);

/// What struck before a step was taken.
type Lead = Vec<(Role, Fault)>;

/// The faults of a run: first those that lead to a step, then the intended one, at most one per role.
#[derive(Clone, Debug)]
struct Plan {
    lead: Lead,
    meant: Vec<(Target, Fault)>,
}

impl Plan {
    fn faults(&self) -> Vec<(Role, Fault)> {
        self.lead.iter().cloned().chain(self.meant.iter().map(|(target, fault)| (target.0.0, fault.clone()))).collect()
    }

    fn blow(&self) -> Blow {
        self.meant[0].0.1
    }

    /// Whether this can be broken in the same run. The three processes break independently of each other.
    fn takes(&self, (step, blow, moment): &Target) -> bool {
        self.lead.is_empty() && self.meant.iter().all(|((other, by, at), _)| other.0 != step.0 && (by, at) == (blow, moment))
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let faults: Vec<String> = self.faults().iter().map(|(role, fault)| format!("{role:?}: {fault}")).collect();
        write!(f, "{}", faults.join(", "))
    }
}

/// The known steps.
#[derive(Debug, Default)]
struct Survey {
    forced: Forced,
    /// How often one process took each step, and what had struck then: nothing on a good day.
    seen: BTreeMap<Step, (u32, Vec<Lead>)>,
    tried: BTreeMap<Target, usize>,
    coverage: Coverage,
}

impl Survey {
    fn note(&mut self, steps: BTreeMap<Step, u32>, struck: &[(Role, Fault)]) {
        self.coverage.add_run(steps.keys());
        for (step, times) in steps {
            for (blow, moment) in ways(&step) {
                self.coverage.add(&step, &way(blow, moment), false);
            }
            let (most, leads) = self.seen.entry(step).or_default();
            *most = times.max(*most);
            if leads.len() < LEADS && leads.iter().all(|lead| lead != struck) {
                leads.push(struck.to_vec());
            }
        }
    }

    fn targets(&self) -> impl Iterator<Item = Target> {
        self.seen.keys().flat_map(|step| ways(step).into_iter().map(|(blow, moment)| (step.clone(), blow, moment)))
    }

    /// The steps that no fault has struck yet.
    fn left(&self) -> Vec<Target> {
        self.targets().filter(|(step, blow, moment)| !self.coverage.is_struck(step, &way(*blow, *moment))).collect()
    }

    /// Plans for what is left and has not been tried too often, by another lead each time.
    fn plans(&mut self) -> Vec<Plan> {
        let mut plans: Vec<Plan> = Vec::new();
        for target in self.left() {
            let ((role, step), blow, moment) = &target;
            let most = if self.coverage.lacks(&target.0, &way(*blow, *moment), &self.forced) { MOST_TRIES } else { TRIES };
            let tried = self.tried.entry(target.clone()).or_default();
            if *tried == most {
                continue;
            }
            let (times, leads) = &self.seen[&target.0];
            let lead = &leads[*tried % leads.len()];
            // Two of four ways strike a step that is taken often when it is taken again.
            let later = *tried == 0 && *times >= 4 && (*blow == Blow::Abort) == (*moment == Moment::After);
            let fault = Fault { step: step.clone(), moment: *moment, blow: *blow, nth: if later { 2 } else { 1 } };
            let same_run = plans.iter_mut().find(|plan| lead.is_empty() && *tried < TOGETHER && plan.takes(&target));
            *tried += 1;
            // Faults are distinguished by their kind.
            if lead.contains(&(*role, fault.clone())) {
                continue;
            }
            match same_run {
                Some(plan) => plan.meant.push((target, fault)),
                None => plans.push(Plan { lead: lead.clone(), meant: vec![(target, fault)] }),
            }
        }
        plans
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_or_done_twice_when_a_process_breaks_at_any_step() {
    let mut rows: BTreeMap<Blow, Row> = [
        (Blow::Abort, "a process aborts before or after a MongoDB call"),
        (Blow::Freeze, "a process freezes before or after a MongoDB call, and resumes after it was declared dead"),
    ]
    .map(|(blow, fault)| (blow, Row::new(fault)))
    .into();
    let mut survey = Survey::default();
    let (good_days, forced) = coverage::good_days().await;
    survey.forced = forced;
    for run in good_days {
        rows.get_mut(&Blow::Abort).unwrap().add_run(run.findings.of("a good day"), 0, None);
        survey.note(run.steps, &[]);
    }
    let begin = Instant::now();
    loop {
        let plans = survey.plans();
        if plans.is_empty() {
            break;
        }
        println!("after {:?}: {} runs", begin.elapsed(), plans.len());
        let mut runs = stream::iter(plans)
            .map(async |plan| {
                let breaks = Breaks { faults: plan.faults(), ..Breaks::default() };
                (cycle::run_beside_others(World::new().await, breaks).await, plan)
            })
            .buffer_unordered(AT_A_TIME);
        while let Some((run, plan)) = runs.next().await {
            // Of hundreds of runs those that show something, so that a shortened log has them.
            if !run.findings.all().is_empty() {
                println!("{plan}: {} struck, recovered in {:?}, wrong: {:?}", run.struck.len(), run.recovery, run.findings.all());
            }
            let struck = plan.meant.iter().filter(|(target, fault)| run.struck.contains(&(target.0.0, fault.clone())));
            let struck: Vec<Target> = struck.map(|(target, _)| target.clone()).collect();
            rows.get_mut(&plan.blow()).unwrap().add_run(run.findings.of(&plan.to_string()), struck.len(), run.recovery);
            for (step, blow, moment) in struck {
                survey.coverage.add(&step, &way(blow, moment), true);
            }
            survey.note(run.steps, &run.struck);
        }
    }
    rows.into_values().for_each(Row::close);
    survey.coverage.close("aborts and freezes", &survey.forced);
}

/// The ways to break a step: all of them, or in the gate at most one.
fn ways(step: &Step) -> Vec<(Blow, Moment)> {
    let all = [(Blow::Abort, Moment::Before), (Blow::Freeze, Moment::After), (Blow::Abort, Moment::After), (Blow::Freeze, Moment::Before)];
    let mine = all[coverage::kind(step) % all.len()];
    let is_mine = |way: &_| recruiter_tests::full_length() || *way == mine && coverage::strikes(Suite::CrashPoints, step);
    all.into_iter().filter(is_mine).collect()
}

fn way(blow: Blow, moment: Moment) -> String {
    format!("{blow:?} {moment:?}")
}

/// The first process on a new database makes its collections and indexes; the next process after its death creates the rest.
#[tokio::test(flavor = "multi_thread")]
async fn a_new_database_is_set_up_whole_whoever_dies_in_the_middle() {
    let whole = first_on_a_new_database(None).await.1;
    assert!(whole.contains("createIndexes"), "{whole}");
    let steps: BTreeSet<&str> = whole.lines().collect();
    // The gate has one of the two moments for each step.
    let both = [Moment::Before, Moment::After];
    let moments = |index: usize| if recruiter_tests::full_length() { &both[..] } else { &both[index % 2..][..1] };
    let faults = steps.iter().enumerate().flat_map(|(index, step)| {
        moments(index).iter().map(|moment| Fault { step: (*step).to_owned(), moment: *moment, blow: Blow::Abort, nth: 1 })
    });
    let mut row = Row::new("a process aborts while it creates the collections and indexes");
    let mut runs = stream::iter(faults)
        .map(async |fault| {
            let (database, _) = first_on_a_new_database(Some(&fault)).await;
            let mut world = World::on(database).await;
            let index = async |name: &str| world.database.raw(name).list_index_names().await.unwrap();
            assert!(index("scheduled").await.contains(&"due_jobs".to_owned()), "{fault}");
            assert!(index("archived").await.contains(&"archived_by_end".to_owned()), "{fault}");
            assert!(world.database.raw("scheduled").insert_one(doc! { "group": "no job" }).await.is_err(), "{fault}: no validator");
            let begin = Instant::now();
            for role in Role::ALL {
                world.start(role, &[], &[]);
            }
            world.enqueue(Entry::lasting(0), Policy::Never).await.unwrap();
            assert!(world.until_quiet(SOON).await, "{fault}: {}", world.logs());
            let recovery = begin.elapsed();
            (world.judge().await.of(&fault.to_string()), recovery)
        })
        .buffer_unordered(AT_A_TIME);
    while let Some((findings, recovery)) = runs.next().await {
        row.add(findings, recovery);
    }
    row.close();
}

/// Runs a recruiter on a new database until it leads or its fault has struck. Returns the steps that it took.
async fn first_on_a_new_database(fault: Option<&Fault>) -> (TestDatabase, String) {
    let (database, notes) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
    let faults = fault.map(ToString::to_string).unwrap_or_default();
    let environment = [("MONGODB_URI", database.uri()), (NOTES, notes.path().to_str().unwrap()), (FAULT, &faults)];
    let mut first = Process::start("examples/faulty", &["recruiter"], &environment);
    let noted = |file: &str| std::fs::read_to_string(notes.path().join(file)).unwrap_or_default();
    let over = async || if fault.is_some() { first.try_exit().is_some() } else { noted("steps").contains("find signals") };
    wait_until(SOON, "it has set the database up or died", over).await;
    assert_eq!(noted("struck").trim_end(), faults);
    (database, noted("steps"))
}
