//! The `recruiter` command: matches available workers to scheduled jobs, and is what people enqueue, look and change
//! with. Used by its binary and by the tests, never by applications (they use `recruiter-common`).
//!
//! | module | what it is |
//! |---|---|
//! | [`config`] | the command line |
//! | [`run`] | `run`: wait for the lease, lead, stand by |
//! | `leadership` | who may assign, and for how long |
//! | `leader` | a term: which job for which worker, round after round |
//! | [`enqueue`] | `enqueue`: one job, or a file of them |
//! | [`jobs`] | `jobs`: list, show |
//! | `change` | `jobs retry`, `cancel`, `delete` |
//! | [`roster`] | `roster`: who works |
//! | [`stats`] | `stats`: how much and how fast |
//! | [`dev`] | `dev`: a Recruiter with a MongoDB of its own, to develop on |
//! | [`demo`] | `demo`: real work on the user's own files, and a killed worker |
//! | [`bench`](mod@bench) | `bench`: how fast it is |
//! | `fleet` | the programs as child processes, for these three |
//! | `presence` | who leads, and what the workers can do |
//! | [`output`] | how the commands write |
//! | [`embedded`] | a MongoDB for development and tests |
//! | `watchdog` | lets no child process outlive us |

pub mod bench;
mod change;
pub mod config;
pub mod demo;
pub mod dev;
pub mod embedded;
pub mod enqueue;
mod fleet;
pub mod jobs;
mod leader;
mod leadership;
pub mod output;
mod presence;
pub mod roster;
pub mod run;
pub mod stats;
mod watchdog;
