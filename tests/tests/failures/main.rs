//! Nothing lost, nothing twice: the promises I1 to I10, under every fault that we know how to make. One binary, one module
//! for each kind of fault; the jobs keep a ledger of their own, and executions are counted in it, never in the archive.

#![expect(clippy::unwrap_used, reason = "in a test it says where it failed")]

mod crash_points;
mod effects;
mod endurance;
mod sent_again;
mod unknown_outcomes;

use recruiter_tests::{cycle::Step, world::Role};
use tokio::sync::RwLock;

/// The processor. Each test has a fleet of processes. A test that times how long a backlog takes runs alone.
static PROCESSOR: RwLock<()> = RwLock::const_new(());

/// Who asks for what of which collection, whatever the conditions: the kind of a step.
///
/// A transaction ends in one of two ways: both are of one kind.
///
/// Some steps are taken only when several things come together, and luck decides whether a day has them. Of such a step it is enough
/// that another of its kind was broken in the same way.
fn kind((role, step): &Step) -> (Role, String) {
    let kind = step.split(' ').take(2).collect::<Vec<_>>().join(" ");
    (*role, if kind == "abortTransaction" { "commitTransaction".into() } else { kind })
}
