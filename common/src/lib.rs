//! Background jobs on MongoDB: enqueue them, also in your own transactions, and read their results.
//!
//! An application that only enqueues depends on this crate. An application that also runs jobs depends on `recruiter-worker`, which
//! re-exports this crate.
//!
//! # bson
//!
//! This crate needs bson 3. The MongoDB driver has one `mongodb::bson` for all crates of a program, so an application that used the
//! driver's default, bson 2, changes to bson 3. Depend on `mongodb` with `default-features = false, features = ["bson-3", …]` and on
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
//!     // The settings of every job of this class. A job can override them.
//!     fn defaults() -> Defaults {
//!         Defaults::default().group("mail").retry(ExponentialBackoff::new(5, Duration::from_secs(10)))
//!     }
//! }
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! // The connection string names the database `shop`. The second argument is the name of this program in the logs of MongoDB.
//! let store = Store::connect("mongodb://127.0.0.1:27017/shop?replicaSet=rs0", "website").await?;
//! let enqueued = SendMail { to: "ada@example.org".into() }.as_job().after(Duration::from_secs(60)).enqueue(&store).await?;
//! println!("{} is enqueued", enqueued.id);
//!
//! // Many small items in one job; see `NewJob::bundle`.
//! NewJob::bundle((1..=1_000).map(|n| SendMail { to: format!("subscriber-{n}@example.org") })).enqueue(&store).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # In your own transaction, on your own client
//!
//! A job that is enqueued with [`NewJob::enqueue_in`] exists if, and only if, the transaction is committed. [`Store::from_database`] creates
//! a store on the application's own client. Its documentation has an example, and lists the client's settings that matter.
//!
//! # Results
//!
//! [`Store::result_of`] returns the result in the type that its class declares, or the reason why there is none.
//!
//! # Modules
//!
//! The items for applications are also exported at the root. Without the feature `process`, which is for programs on Linux, this crate is
//! portable. With the feature `opentelemetry`, a job that is enqueued in a span of OpenTelemetry belongs to the trace of that span.
//!
//! | module | content | used by |
//! |---|---|---|
//! | [`enqueue`] | describe a job and enqueue it | applications, `recruiter enqueue` |
//! | `traces` | the trace of a job, with the feature `opentelemetry` | applications, worker |
//! | [`unique`] | the key of a unique job | applications |
//! | [`graphs`] | jobs that wait for other jobs | applications, recruiter |
//! | [`spec`] | a job as JSON, read and written | `recruiter enqueue`, other programs |
//! | [`finished`] | the outcome of a job, and its result | applications |
//! | [`wait`] | wait for the result of a job | applications, `recruiter enqueue` |
//! | [`events`] | what happens to jobs and workers | all |
//! | [`messages`] | publish and subscribe to messages | applications, `recruiter publish` |
//! | [`consumers`] | messages that become jobs | applications, `recruiter consumers`, recruiter |
//! | [`topics`] | topics and patterns of events and messages | applications, `recruiter events` |
//! | [`control`] | retry, change, cancel and delete jobs | `recruiter jobs`, applications |
//! | [`schedules`] | periodic jobs | applications, `recruiter schedules`, recruiter |
//! | [`retry_policy`] | when a failed job is retried | applications, worker |
//! | [`files`] | payloads and results that are too large for a document | applications, `recruiter files` |
//! | [`job`] | one job, its items and its history | all |
//! | [`json`] | JSON and values of serde as BSON, exactly | enqueue, worker |
//! | [`limits`] | limits of resources and groups, and pauses | recruiter, operators |
//! | [`roster`] | one worker process | all |
//! | [`workers`] | quiet, resume and stop workers | worker, `recruiter workers`, applications |
//! | [`flags`] | empty environment variables, names with blanks | the three programs |
//! | [`failure`] | the failure of one execution | worker, cleaner, policies |
//! | [`ids`] | ids of jobs, workers, starts and rounds | all |
//! | [`instant`] | instants in documents | all |
//! | [`store`] | every MongoDB call | all |
//! | `backlog` | how many jobs may wait in a group | enqueue, store |
//! | `names` | names of classes, groups and keys | enqueue |
//! | [`clock`] | the server's clock, and this machine's | store, worker |
//! | [`shutdown`] | stop requests, and sleeping | the three processes |
//! | [`service`] | notifications to the service manager | the three processes |
//! | [`task`] | the main future as a task of the runtime | recruiter, worker |
//! | [`telemetry`] | the contents of log lines | all |
//! | [`text`] | texts for people: durations, instants, the text of others | all |
//! | [`why`] | why a job does not run | `recruiter jobs why`, applications |
//! | [`presence`] | the leading recruiter and the workers, for display | `recruiter roster`, why |
//! | [`logging`] | the destination and format of logs | the three programs |
//! | [`exit`] | exit codes | the three processes |
//! | [`secrets`] | hiding credentials from other processes of the user | the three processes |

mod backlog;
pub mod clock;
pub mod consumers;
pub mod control;
pub mod enqueue;
pub mod events;
#[cfg(feature = "process")]
pub mod exit;
pub mod failure;
pub mod files;
pub mod finished;
#[cfg(feature = "process")]
pub mod flags;
pub mod graphs;
pub mod ids;
pub mod instant;
pub mod job;
pub mod json;
pub mod limits;
#[cfg(feature = "process")]
pub mod logging;
pub mod messages;
mod names;
pub mod presence;
pub mod retry_policy;
pub mod roster;
pub mod schedules;
#[cfg(feature = "process")]
pub mod secrets;
pub mod service;
pub mod shutdown;
pub mod spec;
pub mod store;
pub mod task;
pub mod telemetry;
pub mod text;
pub mod topics;
#[cfg(feature = "opentelemetry")]
pub mod traces;
pub mod unique;
pub mod wait;
pub mod why;
pub mod workers;

pub use bson;
pub use mongodb;

pub use crate::{
    enqueue::{Defaults, EnqueueError, Enqueued, NewJob, Outcome, Retry, Workable},
    events::{Event, Events, EventsError, Received},
    failure::Failure,
    finished::{JobResult, ResultError},
    graphs::{Edge, Graph, When},
    ids::{GraphId, JobId},
    instant::Instant,
    job::{FinishReason, Keep, Priority},
    limits::{Limit, Rate},
    retry_policy::{
        Decision, DoNotDoItAgain, ExponentialBackoff, History, InvalidPolicy, RetriableExceptionFilter, RetryForever, RetryManyTimes,
        RetryPolicy, SelectByException, TimeTable,
    },
    store::{ConnectArgs, ConnectError, Store, StoreError},
    topics::{InvalidTopic, Pattern},
    unique::{InvalidUnique, OnConflict, Unique, UniqueScope},
    wait::WaitError,
    why::{Reason, Why},
};
