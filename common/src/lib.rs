//! Background jobs on MongoDB: enqueue them, in your own transactions too, and read what became of them.
//!
//! This is the crate of an application that enqueues. One that also runs jobs depends on `recruiter-worker` alone, which re-exports it.
//!
//! # bson
//!
//! This crate needs bson 3, and the MongoDB driver has one `mongodb::bson` for all crates of a program: where an application has used the
//! driver's default, bson 2, that becomes bson 3. Depend on `mongodb` with `default-features = false, features = ["bson-3", …]` and on
//! `bson = "3"`, or use [`bson`] and [`mongodb`] of this crate. In application code `to_bson`, `from_bson`, `to_document`
//! and `from_document` become `serialize_to_bson`, `deserialize_from_bson`, `serialize_to_document` and `deserialize_from_document`.
//!
//! # Enqueue
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use recruiter_common::{Defaults, ExponentialBackoff, NewJob, Store, Workable};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Serialize, Deserialize)]
//! struct SendMail {
//!     to: String,
//! }
//!
//! impl Workable for SendMail {
//!     const CLASS: &'static str = "SendMail";
//!     type Output = ();
//!
//!     // Of every job of this class, unless a job says otherwise.
//!     fn defaults() -> Defaults {
//!         Defaults::default().group("mail").retry(ExponentialBackoff::new(5, Duration::from_secs(10)))
//!     }
//! }
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let store = Store::connect("mongodb://127.0.0.1:27017/shop?replicaSet=rs0", "shop").await?;
//! let enqueued = SendMail { to: "ada@example.org".into() }.as_job().after(Duration::from_secs(60)).enqueue(&store).await?;
//! println!("{} is enqueued", enqueued.id);
//!
//! // Many small ones as one job; see `NewJob::bundle`.
//! NewJob::bundle((1..=1_000).map(|n| SendMail { to: format!("subscriber-{n}@example.org") })).enqueue(&store).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # In your own transaction, on your own client
//!
//! A job that is enqueued with [`NewJob::enqueue_in`] exists if, and only if, the transaction is committed. A store is made of the application's own
//! client with [`Store::from_database`], whose documentation has an example and says what is taken from the client.
//!
//! # What became of it
//!
//! [`Store::result_of`] returns the result in the type that its class declares, or why there is none.
//!
//! # Modules
//!
//! What applications use is at the root as well. Without the feature `process`, which is for programs on Linux, this crate is portable.
//!
//! | module | what it is | who uses it |
//! |---|---|---|
//! | [`enqueue`] | describe a job and enqueue it | applications, `recruiter enqueue` |
//! | [`spec`] | a job as JSON, in and out | `recruiter enqueue`, other programs |
//! | [`finished`] | what became of a job, and its result | applications |
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
//! | [`telemetry`] | what log lines say | all |
//! | [`logging`] | where logs go | the three programs |
//! | [`exit`] | exit codes | the three processes |
//! | [`secrets`] | what other processes of the user cannot read | the three processes |

pub mod clock;
pub mod control;
pub mod enqueue;
#[cfg(feature = "process")]
pub mod exit;
pub mod failure;
pub mod finished;
pub mod ids;
pub mod instant;
pub mod job;
#[cfg(feature = "process")]
pub mod logging;
pub mod retry_policy;
pub mod roster;
#[cfg(feature = "process")]
pub mod secrets;
pub mod service;
pub mod shutdown;
pub mod spec;
pub mod store;
pub mod task;
pub mod telemetry;

pub use bson;
pub use mongodb;

pub use crate::{
    enqueue::{Defaults, EnqueueError, Enqueued, NewJob, Retry, Workable},
    failure::Failure,
    finished::{JobResult, ResultError},
    ids::JobId,
    instant::Instant,
    job::{Priority, Why},
    retry_policy::{
        Decision, DoNotDoItAgain, ExponentialBackoff, History, InvalidPolicy, RetriableExceptionFilter, RetryForever, RetryManyTimes,
        RetryPolicy, SelectByException, TimeTable,
    },
    store::{ConnectArgs, ConnectError, Store, StoreError},
};
