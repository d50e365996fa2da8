//! The harness of the tests: real MongoDB, real processes, real faults.
//!
//! - [`mongo`]: one embedded mongod per test process, one database per test; further servers where a test needs its own
//! - [`processes`]: the three binaries: start, signals and output; recruiters whose leader is killed
//! - [`fail_points`]: errors, lost connections and slow replies, by `appName`
//! - [`wait`]: waits for a condition, never for a fixed time
//! - [`factory`]: documents of any age and shape
//! - [`local`]: a recruiter and workers inside the test's own process
//! - [`steps`], [`faults`]: the commands that a process sends to MongoDB, and the faults at each of these steps
//! - [`ledger`]: jobs that record their own executions
//! - [`diary`]: the executions and hooks of workables in the test's own process
//! - [`constraints`]: limits, lines, edges and schedules, checked from the ledger
//! - [`oracle`]: compares the ledger, the documents and the enqueued jobs
//! - [`report`]: the results of the failure tests, as one table
//! - [`coverage`]: which steps the faults have struck
//! - [`cycle`]: every step of the protocol in a few seconds, so that each can be broken
//! - [`world`]: a supervised fleet of faulty processes, on a database of its own
//! - [`http`]: `recruiter web`, and a client of it
//! - [`proxy`]: a faulty network for a single process
//! - [`replica_set`]: three real members, elections, and the network between them
//! - [`tls`]: certificates, and a MongoDB that demands TLS
//! - [`clocks`]: wall clocks that are wrong or jump
//! - [`endurance`]: random faults from a seed
//! - [`effects`]: jobs that end in transactions of their own, compared with their effects
//! - [`mongosh`]: the real shell, to show that the documents are readable in it
//! - [`machine`]: a systemd of its own, where units and packages are installed
//! - [`previous`]: the programs of the previous release
//! - [`browser`]: Chromium, and what axe finds in a page
//! - [`cache`]: what is downloaded or built once
//!
//! Everything here panics with a reason when it cannot do its work: a test that did not run has not passed.

pub mod browser;
pub mod cache;
pub mod clocks;
pub mod constraints;
pub mod coverage;
pub mod cycle;
pub mod diary;
pub mod effects;
pub mod endurance;
pub mod factory;
pub mod fail_points;
pub mod faults;
pub mod http;
pub mod ledger;
pub mod local;
pub mod machine;
pub mod mongo;
pub mod mongosh;
pub mod oracle;
pub mod previous;
pub mod processes;
pub mod proxy;
pub mod replica_set;
pub mod report;
pub mod steps;
pub mod tls;
pub mod wait;
pub mod world;

/// Makes a type a workable whose class has the name of the type: `workable!(Greet)`, or with an output `workable!(Double -> i64)`.
#[macro_export]
macro_rules! workable {
    ($name:ident) => {
        $crate::workable!($name -> ());
    };
    ($name:ident -> $output:ty) => {
        impl recruiter_common::Workable for $name {
            const CLASS: &'static str = stringify!($name);
            type Output = $output;
        }
    };
}

/// Asserts what no disturbance excuses: that a job was not lost and not done twice, that an attempt counts or does not, a limit, an order.
/// `tests/run` gives such a failure no second chance.
#[macro_export]
macro_rules! promise {
    ($kept:expr, $($broken:tt)+) => {
        assert!($kept, "broken promise: {}", format_args!($($broken)+))
    };
}

/// Whether `RECRUITER_TEST_LENGTH=full` is set: then the failure suites repeat faults more often, and keep up outages for longer.
pub fn full_length() -> bool {
    std::env::var_os("RECRUITER_TEST_LENGTH").is_some_and(|length| length == "full")
}

/// The examples of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
mod readme {}

/// The examples of the library guide, compiled.
#[cfg(doctest)]
#[doc = include_str!("../../docs/library.md")]
mod library_guide {}

/// The examples of the page about limits, compiled.
#[cfg(doctest)]
#[doc = include_str!("../../docs/limits.md")]
mod limits_page {}

/// The examples of the page on graphs, compiled.
#[cfg(doctest)]
#[doc = include_str!("../../docs/graphs.md")]
mod graphs {}

/// The example of the page on schedules, compiled.
#[cfg(doctest)]
#[doc = include_str!("../../docs/schedules.md")]
mod schedules {}

/// The example of the page on events, compiled.
#[cfg(doctest)]
#[doc = include_str!("../../docs/events.md")]
mod events_page {}

/// The example of the page on messages, compiled.
#[cfg(doctest)]
#[doc = include_str!("../../docs/pubsub.md")]
mod messages_page {}
