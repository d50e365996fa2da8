//! The protocol as a model that is explored exhaustively: two recruiters, two workers, a cleaner and two jobs, one of which must
//! not run again and the other may once. Every step of every process in every order, with calls that are cut or whose answers are
//! lost, processes that stand still or die, and requests that arrive when their senders do not wait for them any more.
//!
//! With all guards in place every promise holds in every state; with any one of them removed one does not. Guards that make no
//! difference by themselves say why, and are shown to make none.
//!
//! What is in a state: the documents ([`store`]); the requests under way; what each process keeps in mind ([`protocol`]). The
//! leases of recruiters are looked at step by step in a model of their own ([`leadership`]), and so are permits ([`limit`]); in the large one a recruiter takes over
//! whenever it likes, and the one before goes on for as long as it likes.
//!
//! How it stays small, and still leaves nothing out:
//!
//! - A bulk write is as many writes: MongoDB applies it document by document, and every guard asks for a job and its start.
//! - A process that freezes or dies is one that takes no more steps: no order needs it to. Only what another process makes of a
//!   death is a step. What it had sent by then is the next step it would have taken.
//! - Recruiters remember and know nothing: they assign anything unfinished to anybody at any time, as if every plan were
//!   old and all that is in flight forgotten. So a late assignment is one that is made later.
//! - The cleaner may overlook any job that a roster document names (the sweep finds it), so that `working_on`, which is an index,
//!   is left out. Both its finds take two reads each, of which the second decides: they are one step.
//! - There is no clock. A worker's lease ends when the cleaner finds it silent for so long, which may be at any time, and a
//!   heartbeat may always undo that.
//! - What the guards will refuse for ever is dropped, and an id that is named nowhere any more is given out again. There is no limit to
//!   rounds, retries or heartbeats: they lead back to states that were seen.
//! - A fault is a cut, a lost answer, a process seen to be gone, a hint heard again, a job sent again. They alone are limited.
//!
//! Left out: stopping, cancelling, documents that are no jobs, sessions, groups, priorities, and failovers that take back what
//! a majority has not acknowledged; such a failover is in the model of a limit of one ([`limit`]).

mod guards;
mod leadership;
mod limit;
mod protocol;
mod store;

use std::{collections::BTreeMap, fmt::Debug, hash::Hash, time::Instant};

use guards::{Guard, Guarded, Guards, KEPT, Promise, World, leadership, limit, protocol};
use leadership::Leadership;
use limit::Limit;
use protocol::Protocol;
use stateright::{Checker, HasDiscoveries};

/// The worlds that are looked at whole. The first two have everything in them; in the others a single job meets with more.
const WORLDS: [World; 6] =
    [protocol(3, 1, 1, 2), protocol(3, 1, 2, 1), protocol(1, 3, 1, 1), protocol(2, 2, 1, 1), leadership(2), limit(3)];
/// How many faults may happen instead, for a long run by hand.
const FAULTS: &str = "RECRUITER_MODEL_FAULTS";

/// What was found in a world.
struct Found {
    states: usize,
    /// The promise that is broken, and the steps that lead there.
    broken: Option<(Promise, String)>,
    /// What is to be seen once at least, and whether it was.
    examples: BTreeMap<&'static str, bool>,
}

/// Looks at a world: at all of it, unless a promise is broken.
fn explore(world: World, removed: &[Guard]) -> Found {
    let guards = Guards { removed: removed.to_vec() };
    match world {
        World::Protocol { jobs, faults, slots, terms } => check(Protocol { jobs, faults, slots, terms, guards }),
        World::Leadership { faults } => check(Leadership { faults, guards }),
        World::Limit { faults } => check(Limit { faults, guards }),
    }
}

fn check<M>(model: M) -> Found
where
    M: Guarded + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq,
{
    if model.guards().removed.is_empty() {
        found(&model.checker().threads(2).spawn_dfs().join())
    } else {
        // In order, so that the way to a broken promise is short and always the same.
        found(&model.checker().finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join())
    }
}

fn found<M>(checker: &impl Checker<M>) -> Found
where
    M: Guarded,
    M::State: Clone + Debug + Hash + PartialEq,
    M::Action: Clone + Debug + PartialEq,
{
    assert!(checker.is_done());
    let mut discoveries = checker.discoveries();
    let broken = discoveries.remove(KEPT).map(|path| {
        let promise = M::broken(path.last_state()).expect("it was found broken");
        (promise, path.into_actions().iter().map(|action| format!("  {action:?}\n")).collect())
    });
    let examples = checker.model().properties().into_iter().map(|property| property.name).filter(|name| *name != KEPT);
    Found { states: checker.unique_state_count(), broken, examples: examples.map(|name| (name, discoveries.contains_key(name))).collect() }
}

#[test]
fn every_promise_is_kept_whatever_happens_in_whatever_order() {
    let faults = std::env::var(FAULTS).ok().map(|faults| faults.parse().expect("a number of faults"));
    let mut examples = BTreeMap::new();
    for mut world in WORLDS {
        let (World::Protocol { faults: of_it, .. } | World::Leadership { faults: of_it } | World::Limit { faults: of_it }) = &mut world;
        if let Some(more) = faults {
            *of_it = more;
        }
        let begun = Instant::now();
        let found = explore(world, &[]);
        println!("{world:?}: {} states in {:?}", found.states, begun.elapsed());
        assert_eq!(found.broken, None, "{world:?}");
        for (example, seen) in found.examples {
            *examples.entry(example).or_default() |= seen;
        }
    }
    assert!(examples.values().all(|seen| *seen), "what never happens proves nothing: {examples:?}");
}

#[test]
fn without_any_one_guard_a_promise_is_broken() {
    for guard in Guard::ALL.iter().filter(|guard| guard.keeps() != Promise::Nothing) {
        let (promise, steps) = explore(guard.shown_in(), &[*guard]).broken.unwrap_or_else(|| panic!("nothing needs `{}`", guard.name()));
        println!("without `{}` this is broken: {}\n{steps}", guard.name(), promise.text());
        assert_eq!(promise, guard.keeps(), "{}", guard.name());
    }
}

#[test]
fn redundant_guards_are_redundant_even_all_together() {
    let redundant: Vec<Guard> = Guard::ALL.iter().copied().filter(|guard| guard.keeps() == Promise::Nothing).collect();
    let mut worlds: Vec<World> = Vec::new();
    for world in redundant.iter().map(|guard| guard.shown_in()) {
        if !worlds.contains(&world) {
            assert_eq!(explore(world, &redundant).broken, None, "{world:?}");
            worlds.push(world);
        }
    }
}

#[test]
fn guards_bear_the_names_of_the_operations_of_the_store() {
    let text = recruiter_tests::coverage::of_the_store();
    for guard in Guard::ALL {
        let operation = guard.name().split('/').next().expect("a first part");
        assert!(text.contains(&format!("async fn {operation}(")), "{}", guard.name());
    }
}
