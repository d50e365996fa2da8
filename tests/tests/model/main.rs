//! The protocol as a model that is checked exhaustively: every order of every step, with every fault in every place.
//!
//! Two recruiters, two workers, a cleaner and two jobs, one of which must not run again. A call to MongoDB is two steps, and its
//! request or its reply can be late or lost; a process can die between any two steps; silence is always possible, so that the
//! living are declared dead; hints and assignments are told again. Small worlds are looked at whole, each with more of one thing
//! and less of another, since all of everything at once is more than can be looked at.
//!
//! Guards are the conditions in `common::store` that safety relies on, by the names of its operations. Without any one of them a promise is
//! broken, and the steps that lead there are printed; those that are redundant are said to be, with the reason, and shown to be.

mod guards;
mod leadership;
mod protocol;
mod store;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
    fs,
    hash::Hash,
    path::Path,
    time::Instant,
};

use guards::{Guard, Guards, Promise, World, leadership, protocol};
use leadership::Leadership;
use protocol::Protocol;
use stateright::{Checker, Expectation, HasDiscoveries, Model};

/// The worlds that are looked at whole.
const WORLDS: [World; 5] = [protocol(3, 1, 1, 2), protocol(3, 1, 2, 1), protocol(1, 3, 1, 1), protocol(2, 2, 1, 1), leadership(2)];
/// How many faults may happen, in place of what is said above, for a long run by hand.
const FAULTS: &str = "RECRUITER_MODEL_FAULTS";

/// What was found in a world.
struct Found {
    states: usize,
    /// Promises that are broken, each with the steps that lead there.
    broken: BTreeMap<&'static str, String>,
    /// What can happen, and does.
    examples: BTreeSet<&'static str>,
    /// What can happen, and does not.
    missing: BTreeSet<&'static str>,
}

/// Looks at a world, whole or until a promise is broken.
fn explore(world: World, removed: &[Guard], whole: bool) -> Found {
    let guards = Guards { removed: removed.to_vec() };
    match world {
        World::Protocol { jobs, faults, places, terms } => check(Protocol { jobs, faults, places, terms, guards }, whole),
        World::Leadership { faults } => check(Leadership { faults, guards }, whole),
    }
}

fn check<M>(model: M, whole: bool) -> Found
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq,
{
    let properties = model.properties();
    // Breadth first to a short way to a broken promise, depth first with little memory.
    if whole {
        let checker = model.checker().threads(2).spawn_dfs().join();
        assert!(checker.is_done());
        found(&checker, properties)
    } else {
        let checker = model.checker().threads(2).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
        found(&checker, properties)
    }
}

fn found<M>(checker: &impl Checker<M>, properties: Vec<stateright::Property<M>>) -> Found
where
    M: Model,
    M::State: Clone + Debug + Hash + PartialEq,
    M::Action: Clone + Debug + PartialEq,
{
    let mut found =
        Found { states: checker.unique_state_count(), broken: BTreeMap::new(), examples: BTreeSet::new(), missing: BTreeSet::new() };
    let mut discoveries = checker.discoveries();
    for property in properties {
        match (property.expectation, discoveries.remove(property.name)) {
            (Expectation::Sometimes, Some(_)) => drop(found.examples.insert(property.name)),
            (Expectation::Sometimes, None) => drop(found.missing.insert(property.name)),
            (Expectation::Always | Expectation::Eventually, Some(path)) => {
                let steps: Vec<String> = path.into_actions().iter().map(|action| format!("  {action:?}")).collect();
                found.broken.insert(property.name, steps.join("\n"));
            }
            (Expectation::Always | Expectation::Eventually, None) => {}
        }
    }
    found
}

#[test]
fn every_promise_is_kept_whatever_happens_in_whatever_order() {
    let faults = std::env::var(FAULTS).ok().map(|faults| faults.parse().expect("a number of faults"));
    let (mut examples, mut missing) = (BTreeSet::new(), BTreeSet::new());
    for mut world in WORLDS {
        if let (World::Protocol { faults, .. } | World::Leadership { faults }, Some(more)) = (&mut world, faults) {
            *faults = more;
        }
        let begun = Instant::now();
        let found = explore(world, &[], true);
        println!("{world:?}: {} states in {:?}", found.states, begun.elapsed());
        assert_eq!(found.broken, BTreeMap::new(), "{world:?}");
        examples.extend(found.examples);
        missing.extend(found.missing);
    }
    assert_eq!(missing.difference(&examples).collect::<Vec<_>>(), Vec::<&&str>::new(), "what is never reached proves nothing");
}

#[test]
fn without_any_one_guard_a_promise_is_broken() {
    for guard in Guard::ALL.iter().filter(|guard| guard.keeps() != Promise::Nothing) {
        let found = explore(guard.shown_in(), &[*guard], false);
        let steps = found.broken.get(guard.keeps().text());
        println!("{}: {} states\n{}", guard.name(), found.states, steps.map_or("", String::as_str));
        assert!(steps.is_some(), "without `{}`, this holds all the same: {}", guard.name(), guard.keeps().text());
    }
}

#[test]
fn redundant_guards_are_redundant_even_all_together() {
    let redundant: Vec<Guard> = Guard::ALL.iter().copied().filter(|guard| guard.keeps() == Promise::Nothing).collect();
    for guard in &redundant {
        let found = explore(guard.shown_in(), &redundant, true);
        assert_eq!(found.broken, BTreeMap::new(), "without `{}` and the others", guard.name());
    }
}

#[test]
fn guards_bear_the_names_of_the_operations_of_the_store() {
    let store = Path::new(env!("CARGO_MANIFEST_DIR")).join("../common/src/store");
    let text: String =
        ["jobs", "roster", "lease"].map(|file| fs::read_to_string(store.join(format!("{file}.rs"))).expect("it is there")).concat();
    for guard in Guard::ALL {
        let operation = guard.name().split('/').next().expect("a first part");
        assert!(text.contains(&format!("async fn {operation}(")), "{}", guard.name());
    }
}
