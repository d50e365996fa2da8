//! The harness of the tests: real MongoDB, real processes, real faults.
//!
//! - [`mongo`]: one embedded mongod per test process, one database per test; further servers where a test needs its own
//! - [`processes`]: the three binaries, started, signalled and listened to
//! - [`fail_points`]: errors, lost connections and slow replies, by `appName`
//! - [`wait`]: waiting for a condition, never for time
//! - [`factory`]: documents of any age and shape
//! - [`local`]: recruiter and workers inside the test's own process
//! - [`steps`], [`faults`]: what a process asks of MongoDB, and the blows that it can suffer at each of these steps
//! - [`ledger`]: jobs that write down their executions themselves
//! - [`oracle`]: compares ledger, documents and what was asked for
//! - [`report`]: what the failure tests found, as one table
//! - [`cycle`]: every step of the protocol in a few seconds, to be broken one by one
//! - [`world`]: a supervised fleet of processes that break, on a database of its own
//! - [`proxy`]: a network that breaks, for one process alone
//! - [`replica_set`]: three real members, elections, and the network between them
//! - [`clocks`]: wall clocks that are wrong, and jump
//! - [`endurance`]: random bad days from a seed
//! - [`mongosh`]: the real shell, to show that the documents read well in it
//! - [`cache`]: what is fetched once from elsewhere
//!
//! Everything here panics with a reason when it cannot do its work: a test that did not take place has not passed.

pub mod cache;
pub mod clocks;
pub mod cycle;
pub mod endurance;
pub mod factory;
pub mod fail_points;
pub mod faults;
pub mod ledger;
pub mod local;
pub mod mongo;
pub mod mongosh;
pub mod oracle;
pub mod processes;
pub mod proxy;
pub mod replica_set;
pub mod report;
pub mod steps;
pub mod wait;
pub mod world;

/// The examples of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
mod readme {}

/// The examples of the library guide, compiled.
#[cfg(doctest)]
#[doc = include_str!("../../docs/library.md")]
mod library_guide {}
