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
//! use recruiter_common::{Client, Defaults, ExponentialBackoff, NewJob, Workable};
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
//! let client = Client::connect("mongodb://127.0.0.1:27017/shop?replicaSet=rs0", "website").await?;
//! let enqueued = SendMail { to: "ada@example.org".into() }.as_job().after(Duration::from_secs(60)).enqueue(&client).await?;
//! println!("{} is enqueued", enqueued.id);
//!
//! // Many small items in one job; see `NewJob::bundle`.
//! NewJob::bundle((1..=1_000).map(|n| SendMail { to: format!("subscriber-{n}@example.org") })).enqueue(&client).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # In your own transaction, on your own driver
//!
//! A job that is enqueued with [`NewJob::enqueue_in`] exists if, and only if, the transaction is committed. [`Client::from_database`] makes
//! a client on the application's own driver. Its documentation has an example, and lists the driver's settings that matter.
//!
//! # Results
//!
//! [`Client::result_of`] returns the result in the type that its class declares, or the reason why there is none.
//!
//! # Two faces
//!
//! [`Client`] is for applications. Its verbs enqueue, wait, read results, subscribe and publish; [`limits`](Client::limits),
//! [`groups`](Client::groups), [`pauses`](Client::pauses), [`schedules`](Client::schedules), [`consumers`](Client::consumers),
//! [`workers`](Client::workers) and [`control`](Client::control) change what operators change. What an application sees may get further
//! fields and variants.
//!
//! With the feature `protocol` there are also the operations of the three programs, in `store`. They belong together with the programs of
//! the same release, so they change with each of them, and match every variant.
//!
//! Without the feature `process`, which is for programs on Linux, this crate is portable. With the feature `opentelemetry`, a job that is
//! enqueued in a span of OpenTelemetry belongs to the trace of that span.
//!
//! # Rooms
//!
//! The source is in rooms. A room uses only those above it in this list.
//!
//! | room | content |
//! |---|---|
//! | `base` | ids, instants, names, topics, texts, JSON, the clock |
//! | `health` | whether this process is alive and ready |
//! | `meters` | what is measured: the table of all metrics, and their handles |
//! | `job` | one job: its document, its items, its gate, its history, its end |
//! | `retry_policy` | when a failed job is retried |
//! | `mongo` | connections, calls, errors, transactions, batches, collections with their validators and indexes |
//! | `roster` | the document of a worker process |
//! | `hints` | hints between processes, through MongoDB and past it |
//! | `limits` | limits of resources and groups, and pauses |
//! | `lines` | jobs in order: the heads of lines, and their halts |
//! | `events` | what happens to jobs and workers, as a stream |
//! | `cycle` | the life of a job and of a worker: insert, assign, start, end, rescue |
//! | `unique` | the key of a unique job |
//! | `enqueue` | describe a job and enqueue it; a job as JSON |
//! | `wait` | the result of a job, and waiting for it |
//! | `files` | payloads and results that are too large for a document |
//! | `graphs` | jobs that wait for other jobs |
//! | `schedules` | periodic jobs |
//! | `messages` | messages of applications: publish and subscribe |
//! | `consumers` | messages that become jobs |
//! | `operator` | what people do with many jobs and workers: find, explain, change, prune |
//! | `process` | what the three programs are besides Recruiter: settings, logs, metrics over HTTP, exit codes, the service manager |
//! | `store` | the operations of the three programs: what the rooms export for them |

#![cfg_attr(
    not(feature = "protocol"),
    allow(dead_code, unfulfilled_lint_expectations, unreachable_pub, unused_imports, reason = "the programs use it")
)]

mod base;
pub mod consumers;
mod cycle;
pub mod enqueue;
pub mod events;
pub mod files;
pub mod graphs;
#[cfg_attr(not(feature = "process"), expect(dead_code, reason = "nothing serves its answers"))]
mod health;
mod hints;
pub mod job;
pub mod limits;
mod lines;
pub mod messages;
#[cfg(feature = "protocol")]
pub mod meters;
#[cfg(not(feature = "protocol"))]
mod meters;
mod mongo;
mod operator;
mod process;
pub mod retry_policy;
mod roster;
pub mod schedules;
#[cfg(feature = "protocol")]
pub mod store;
pub mod unique;
pub mod wait;

#[cfg(all(feature = "opentelemetry", feature = "protocol"))]
pub use self::base::traces;
pub use self::{
    base::failure,
    operator::{control, why, workers},
};
#[cfg(feature = "process")]
pub use self::{
    base::flags,
    process::{exit, http, logging, monitoring, secrets, settings, toml_file},
};
#[cfg(feature = "protocol")]
pub use self::{
    base::{clock, ids, instant, json, shutdown, task, telemetry, text, topics},
    process::service,
};

/// A job as JSON, read and written, and what workers declare about classes.
#[cfg(feature = "protocol")]
pub mod spec {
    pub use crate::enqueue::{
        classes::{Classes, check_defaults},
        spec::*,
    };
}

pub use bson;
pub use mongodb;

pub use self::{
    base::{
        failure::Failure,
        ids::{GraphId, JobId, WorkerId},
        instant::Instant,
        topics::{InvalidTopic, Pattern},
    },
    enqueue::{Defaults, EnqueueError, Enqueued, NewJob, Outcome, Retry, Workable},
    events::{Event, Events, EventsError, Received},
    graphs::{Edge, Graph, When},
    job::{FinishReason, Keep, Priority},
    limits::{Limit, Rate},
    mongo::{Client, ConnectArgs, ConnectError, StoreError},
    operator::{
        select::{JobFilter, Listed, Page, StateFilter},
        why::{Reason, Why},
    },
    retry_policy::{
        Decision, DoNotDoItAgain, ExponentialBackoff, History, InvalidPolicy, RetriableExceptionFilter, RetryForever, RetryManyTimes,
        RetryPolicy, SelectByException, TimeTable,
    },
    unique::{InvalidUnique, OnConflict, Unique, UniqueScope},
    wait::{JobResult, ResultError, WaitError},
};
