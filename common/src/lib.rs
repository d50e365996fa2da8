//! What the three processes of Recruiter and every enqueuer share.
//!
//! | module | what it is | who uses it |
//! |---|---|---|
//! | [`enqueue`] | describe a job and enqueue it | applications, `recruiter enqueue` |
//! | [`spec`] | a job as JSON, in and out | `recruiter enqueue`, other programs |
//! | [`control`] | retry, cancel and delete jobs | `recruiter jobs`, applications |
//! | [`retry_policy`] | when a failed job is done again | applications, worker |
//! | [`job`] | one job, its items and its history | all |
//! | [`roster`] | one worker process | all |
//! | [`failure`] | what went wrong in one execution | worker, cleaner, policies |
//! | [`ids`] | identities | all |
//! | [`instant`] | instants as stored | all |
//! | [`store`] | every MongoDB call | all |
//! | [`clock`] | the server's clock, and this machine's | store, worker |
//! | [`shutdown`] | being asked to stop, and sleeping | the three processes |
//! | [`service`] | telling the service manager | the three processes |
//! | [`task`] | working where the network is heard | recruiter, worker |
//! | [`telemetry`] | logs | the three processes |
//! | [`exit`] | exit codes | the three processes |
//! | [`secrets`] | what other processes of the user cannot read | the three processes |

pub mod clock;
pub mod control;
pub mod enqueue;
pub mod exit;
pub mod failure;
pub mod ids;
pub mod instant;
pub mod job;
pub mod retry_policy;
pub mod roster;
pub mod secrets;
pub mod service;
pub mod shutdown;
pub mod spec;
pub mod store;
pub mod task;
pub mod telemetry;
