//! Nothing lost, nothing twice: the promises I1 to I10, under every fault that we know how to make. One binary, one module
//! for each kind of fault; the jobs keep a ledger of their own, and executions are counted in it, never in the archive.

#![expect(clippy::unwrap_used, reason = "in a test it says where it failed")]

mod crash_points;
mod effects;
mod endurance;
mod sent_again;
mod unknown_outcomes;
