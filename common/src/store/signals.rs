//! Hints: what happened just now, through a capped collection that is tailed. Never truth: a lost hint costs the poll
//! fallback, a wrong or old one is made harmless by the guards of what it leads to.

use std::time::Duration;

use bson::{Bson, Document, Timestamp, doc};
use futures_util::TryStreamExt;
use mongodb::{
    Cursor,
    options::{Acknowledgment, CursorType, ReadConcern, WriteConcern},
};
use tokio::sync::mpsc;

use super::{Store, StoreError, call, jobs::DueJob, roster::Assignment};
use crate::{
    ids::{JobId, RoundId, WorkerId},
    instant::Instant,
    roster::ids_in,
    shutdown::pause,
};

/// How long the server holds a tailing read open before it answers that there is nothing.
const AWAIT: Duration = Duration::from_secs(5);
/// After this long without a hint the cursor is opened again: a connection that died without a word looks like silence.
const REOPEN_AFTER: Duration = Duration::from_secs(60);
/// Between attempts to open a cursor.
const REOPEN_PAUSE: Duration = Duration::from_millis(200);
/// How long it is waited for that a hint is acknowledged. It is on its way even so, and the caller has better things to do.
const HINT_LIMIT: Duration = Duration::from_secs(1);
/// Hints that wait to be read; when there are more, the reader is late and will look for itself anyway.
const QUEUE: usize = 1_024;

/// Something happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hint {
    /// Nothing: keeps the collection from being empty.
    Seed,
    /// Jobs of these groups are due at once or at `at`.
    Jobs {
        /// Their groups.
        groups: Vec<String>,
        /// When the first is due, if later.
        at: Option<Instant>,
        /// All of them, when they are few: they can be matched without a search. The hint may be there before they are.
        jobs: Vec<DueJob>,
    },
    /// A worker has free places (again).
    Free,
    /// A worker left; what was assigned to it and not started is free.
    Left {
        /// Which.
        worker: WorkerId,
    },
    /// A round assigned jobs.
    Assigned {
        /// Which round.
        round: RoundId,
        /// What it assigned.
        assignments: Vec<Assignment>,
    },
    /// A running job shall be cancelled.
    Cancel {
        /// Which.
        job: JobId,
    },
}

/// Who listens, hence to what.
#[derive(Clone, Copy, Debug)]
pub enum Listener {
    /// The recruiter: jobs and places.
    Recruiter,
    /// A worker: what is assigned to it, and cancellations.
    Worker(WorkerId),
}

impl Listener {
    fn filter(self) -> Document {
        match self {
            Self::Recruiter => doc! { "kind": { "$in": ["jobs", "free", "left"] } },
            Self::Worker(worker) => doc! { "$or": [{ format!("pairs.{worker}"): { "$exists": true } }, { "kind": "cancel" }] },
        }
    }

    fn projection(self) -> Document {
        match self {
            Self::Recruiter => doc! { "_id": 0 },
            Self::Worker(worker) => doc! { "_id": 0, "at": 1, "kind": 1, "round": 1, "job": 1, format!("pairs.{worker}"): 1 },
        }
    }
}

impl Hint {
    /// Jobs of these groups are due.
    pub fn jobs_in(groups: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self::Jobs { groups: groups.into_iter().map(Into::into).collect(), at: None, jobs: Vec::new() }
    }

    fn to_document(&self) -> Document {
        // An empty timestamp is filled in by the server, in the order of insertion.
        let mut document = doc! { "at": Timestamp { time: 0, increment: 0 } };
        document.extend(match self {
            Self::Seed => doc! { "kind": "seed" },
            Self::Jobs { groups, at, jobs } => {
                let jobs: Vec<Document> = jobs.iter().map(due_job_to_document).collect();
                doc! { "kind": "jobs", "groups": groups.clone(), "due": at.map(bson::DateTime::from_chrono), "jobs": jobs }
            }
            Self::Free => doc! { "kind": "free" },
            Self::Left { worker } => doc! { "kind": "left", "worker": worker },
            Self::Assigned { round, assignments } => {
                let pairs: Document = assignments.iter().map(|given| (given.worker.to_string(), Bson::from(given.jobs.clone()))).collect();
                doc! { "kind": "assigned", "round": round, "pairs": pairs }
            }
            Self::Cancel { job } => doc! { "kind": "cancel", "job": job },
        });
        document
    }

    fn from_document(document: &Document) -> Option<Self> {
        Some(match document.get_str("kind").ok()? {
            "jobs" => Self::Jobs {
                groups: document.get_array("groups").ok()?.iter().filter_map(Bson::as_str).map(str::to_owned).collect(),
                at: document.get_datetime("due").ok().map(|at| at.to_chrono()),
                jobs: document
                    .get_array("jobs")
                    .into_iter()
                    .flatten()
                    .filter_map(|job| DueJob::from_document(job.as_document()?))
                    .collect(),
            },
            "free" => Self::Free,
            "left" => Self::Left { worker: document.get_object_id("worker").ok()?.into() },
            "assigned" => {
                let pairs = document.get_document("pairs").ok()?;
                let given = |(worker, jobs): (&String, &Bson)| Some(Assignment { worker: worker.parse().ok()?, jobs: ids_in(Some(jobs)) });
                Self::Assigned {
                    round: document.get_object_id("round").ok()?.into(),
                    assignments: pairs.iter().filter_map(given).collect(),
                }
            }
            "cancel" => Self::Cancel { job: document.get_object_id("job").ok()?.into() },
            _ => return None,
        })
    }
}

fn due_job_to_document(job: &DueJob) -> Document {
    doc! {
        "_id": job.id,
        "group": &job.group,
        "workable": { "class": &job.class },
        "priority": job.priority,
        "scheduled_at": bson::DateTime::from_chrono(job.scheduled_at),
    }
}

/// Hints as they arrive. Ends its tailing task when dropped.
#[derive(Debug)]
pub struct Hints {
    queue: mpsc::Receiver<Hint>,
    tail: tokio::task::JoinHandle<()>,
}

impl Hints {
    /// The next hint. Safe to drop while waiting.
    pub async fn next(&mut self) -> Hint {
        match self.queue.recv().await {
            Some(hint) => hint,
            None => std::future::pending().await,
        }
    }

    /// A hint that is here already.
    pub fn try_next(&mut self) -> Option<Hint> {
        self.queue.try_recv().ok()
    }
}

impl Drop for Hints {
    fn drop(&mut self) {
        self.tail.abort();
    }
}

impl Store {
    /// Tells whoever listens. A failure is for the caller to ignore or log: whoever misses a hint finds out by itself.
    ///
    /// Index: none. Invariant: none.
    pub async fn publish(&self, hint: &Hint) -> Result<(), StoreError> {
        let (signals, document) = (self.signals.clone(), hint.to_document());
        let acknowledged = WriteConcern::builder().w(Acknowledgment::Nodes(1)).build();
        call("publish", async move { signals.insert_one(document).write_concern(acknowledged).await }).await.map(drop)
    }

    /// Tells within a second, and only notes in the log when that failed.
    pub async fn announce_hint(&self, hint: Hint) {
        match tokio::time::timeout(HINT_LIMIT, self.publish(&hint)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(error = crate::telemetry::chain(&error), "a hint was not sent; the poll fallback will do"),
            Err(_) => tracing::debug!("a hint was not acknowledged in time; the poll fallback will do"),
        }
    }

    /// Listens from now on; reconnects by itself.
    ///
    /// Index: none, a capped collection is read in its own order. Invariant: none.
    pub fn hints(&self, listener: Listener) -> Hints {
        let (sender, queue) = mpsc::channel(QUEUE);
        let store = self.clone();
        let tail = tokio::spawn(async move {
            let mut seen = None;
            while !sender.is_closed() {
                if let Err(error) = store.tail(listener, &mut seen, &sender).await {
                    tracing::debug!(error = crate::telemetry::chain(&error), "not listening for hints; trying again");
                }
                pause(REOPEN_PAUSE).await;
            }
        });
        Hints { queue, tail }
    }

    /// Passes hints on until the cursor ends. What is older than the first look, or was seen before, is skipped.
    async fn tail(&self, listener: Listener, seen: &mut Option<Timestamp>, to: &mpsc::Sender<Hint>) -> Result<(), StoreError> {
        let mut cursor = self.open_tail(listener, seen).await?;
        loop {
            match tokio::time::timeout(REOPEN_AFTER, cursor.try_next()).await {
                Ok(Ok(Some(document))) => {
                    *seen = document.get_timestamp("at").ok().or(*seen);
                    if let Some(hint) = Hint::from_document(&document) {
                        // A full queue: its reader is busy and looks for itself when it has read it.
                        let _ = to.try_send(hint);
                    }
                }
                Ok(Err(source)) => return Err(StoreError::Mongo { operation: "tail", source }),
                Ok(Ok(None)) | Err(_) => return Ok(()),
            }
        }
    }

    async fn open_tail(&self, listener: Listener, seen: &mut Option<Timestamp>) -> Result<Cursor<Document>, StoreError> {
        let signals = self.signals.clone();
        if seen.is_none() {
            let newest = signals.clone();
            let last = call("newest_hint", async move {
                newest.find_one(doc! {}).sort(doc! { "$natural": -1 }).read_concern(ReadConcern::local()).await
            })
            .await?;
            *seen = last.and_then(|hint| hint.get_timestamp("at").ok());
        }
        let mut filter = listener.filter();
        if let Some(seen) = seen {
            filter.insert("at", doc! { "$gt": *seen });
        }
        call("open_tail", async move {
            signals
                .find(filter)
                .projection(listener.projection())
                .cursor_type(CursorType::TailableAwait)
                .max_await_time(AWAIT)
                .read_concern(ReadConcern::local())
                .await
        })
        .await
    }
}
