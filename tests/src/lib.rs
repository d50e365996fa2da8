//! The harness of the tests in `tests/it`: real MongoDB, real processes, real faults.
//!
//! - [`mongo`]: one embedded mongod per test process, one database per test; further servers where a test needs its own
//! - [`processes`]: the three binaries, started, signalled and listened to
//! - [`fail_points`]: errors, lost connections and slow replies, by `appName`
//! - [`wait`]: waiting for a condition, never for time
//! - [`factory`]: documents of any age and shape
//! - [`local`]: recruiter and workers inside the test's own process
//! - [`mongosh`]: the real shell, to show that the documents read well in it
//!
//! Everything here panics with a reason when it cannot do its work: a test that did not take place has not passed.

pub mod factory;
pub mod fail_points;
pub mod local;
pub mod mongo;
pub mod mongosh;
pub mod processes;
pub mod wait;

/// The examples of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
mod readme {}
