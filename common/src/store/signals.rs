//! Hints: what happened just now, through capped collections that are tailed. Never truth: a lost hint costs the poll
//! fallback, a wrong or old one is made harmless by the guards of what it leads to.
//!
//! What is inserted into such a collection wakes everybody who tails it. Hence `signals` is the recruiter's alone, and workers are
//! spread over channels, `signals_0` and so on, a few dozen on each. What the recruiter says there at its leisure, that it
//! is there, saves an idle worker from asking whether it has said anything.

use std::{
    borrow::Cow,
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bson::{Bson, Document, RawDocumentBuf, Timestamp, doc};
use futures_util::TryStreamExt;
use mongodb::{
    Collection, Cursor,
    options::{CursorType, ReadConcern, ReturnDocument},
};
use tokio::sync::mpsc;

use super::{Store, StoreError, call, cut, indexes, roster::Assignment, search::DueJob};
use crate::{
    ids::{JobId, RoundId, WorkerId},
    instant::Instant,
    roster::ids_in,
    shutdown::pause,
};

/// How long the server holds a tailing read open before it answers that there is nothing. Only then does it say that the collection was
/// dropped.
const AWAIT: Duration = Duration::from_secs(10);
/// After this long without a hint the cursor is opened again: a connection that died without a word looks like silence.
const REOPEN_AFTER: Duration = Duration::from_secs(60);
/// Between attempts to open a cursor.
const REOPEN_PAUSE: Duration = Duration::from_millis(200);
/// How long it is waited for that a hint is acknowledged. It is on its way even so, and the caller has better things to do.
const HINT_LIMIT: Duration = Duration::from_secs(1);
/// Hints that wait to be read; the others wait in the collection.
const QUEUE: usize = 1_024;

/// Bytes of groups that one hint names, at most.
const GROUPS_BYTES: usize = 256 * 1024;
/// Stands in a hint for more groups than fit, as it stands for every group in a worker's `work_on`.
pub const EVERY_GROUP: &str = "*";
/// Jobs that one hint assigns, about: a megabyte.
const ASSIGNED: usize = 50_000;

/// Workers that tail one collection, about.
const WORKERS_PER_CHANNEL: i64 = 32;
/// Channels at most.
const CHANNELS: i64 = 32;

/// What the names of their collections begin with.
const CHANNEL: &str = "signals_";

/// One of the collections through which workers hear of what concerns them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Channel(pub u32);

impl Channel {
    pub(super) fn collection(self) -> String {
        format!("{CHANNEL}{}", self.0)
    }

    /// Whether a collection of this name is a channel's.
    pub(super) fn is_collection(name: &str) -> bool {
        name.strip_prefix(CHANNEL).is_some_and(|number| number.parse::<u32>().is_ok())
    }
}

/// Something happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hint {
    /// Nothing: keeps the collection from being empty. Whoever listens hears it each time that it begins to, and should look
    /// for itself: hints may have been missed.
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
    /// The recruiter is there, and has said all that it had to say before.
    Beat {
        /// When it will say so again, at the latest.
        again_in: Duration,
    },
}

/// Who listens, hence to what.
#[derive(Clone, Copy, Debug)]
pub enum Listener {
    /// The recruiter: jobs and places.
    Recruiter,
    /// A worker: what is assigned to it, and cancellations.
    Worker(WorkerId, Channel),
}

/// Why a cursor is not read any more.
enum Ended {
    /// MongoDB has closed it.
    Closed,
    /// Nothing was heard for long.
    Silent,
}

impl Listener {
    /// The channel that is listened to, if it is not the recruiter's.
    fn channel(self) -> Option<Channel> {
        match self {
            Self::Recruiter => None,
            Self::Worker(_, channel) => Some(channel),
        }
    }

    fn filter(self) -> Document {
        match self {
            Self::Recruiter => doc! {},
            Self::Worker(worker, _) => {
                doc! { "$or": [{ format!("pairs.{worker}"): { "$exists": true } }, { "kind": { "$in": ["cancel", "beat"] } }] }
            }
        }
    }

    fn projection(self) -> Document {
        match self {
            Self::Recruiter => doc! { "_id": 0 },
            Self::Worker(worker, _) => {
                doc! { "_id": 0, "at": 1, "kind": 1, "round": 1, "job": 1, "again_in_ms": 1, format!("pairs.{worker}"): 1 }
            }
        }
    }
}

impl Hint {
    /// Jobs of these groups are due.
    pub fn jobs_in(groups: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self::Jobs { groups: groups.into_iter().map(Into::into).collect(), at: None, jobs: Vec::new() }
    }

    /// The same in parts that fit: a hint is small beside the collection that it is in.
    fn parts(&self) -> Vec<Cow<'_, Self>> {
        match self {
            // Which groups they are is not worth so much: that something is due somewhere is enough.
            Self::Jobs { groups, at, .. } if groups.iter().map(String::len).sum::<usize>() > GROUPS_BYTES => {
                vec![Cow::Owned(Self::Jobs { groups: vec![EVERY_GROUP.into()], at: *at, jobs: Vec::new() })]
            }
            Self::Assigned { round, assignments } if assignments.iter().map(|given| given.jobs.len()).sum::<usize>() > ASSIGNED => {
                // A worker takes what one hint gives it for all that it was given.
                let parts = cut(assignments.clone(), usize::MAX, ASSIGNED, |given| given.jobs.len());
                parts.into_iter().map(|assignments| Cow::Owned(Self::Assigned { round: *round, assignments })).collect()
            }
            Self::Seed
            | Self::Jobs { .. }
            | Self::Free
            | Self::Left { .. }
            | Self::Assigned { .. }
            | Self::Cancel { .. }
            | Self::Beat { .. } => {
                vec![Cow::Borrowed(self)]
            }
        }
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
            Self::Beat { again_in } => doc! { "kind": "beat", "again_in_ms": i64::try_from(again_in.as_millis()).unwrap_or(i64::MAX) },
        });
        document
    }

    fn from_document(document: &Document) -> Option<Self> {
        Some(match document.get_str("kind").ok()? {
            "jobs" => Self::Jobs {
                groups: document.get_array("groups").ok()?.iter().filter_map(Bson::as_str).map(str::to_owned).collect(),
                at: document.get_datetime("due").ok().map(|at| at.to_chrono()),
                jobs: document.get_array("jobs").into_iter().flatten().filter_map(|job| DueJob::of_document(job.as_document()?)).collect(),
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
            "beat" => Self::Beat { again_in: Duration::from_millis(u64::try_from(document.get_i64("again_in_ms").ok()?).ok()?) },
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
    is_listening: Arc<AtomicBool>,
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

    /// Whether the collection is being tailed, as far as is known.
    pub fn is_listening(&self) -> bool {
        self.is_listening.load(Ordering::Relaxed)
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
        match hint {
            Hint::Seed | Hint::Jobs { .. } | Hint::Free | Hint::Left { .. } => self.publish_in("signals", hint).await,
            Hint::Assigned { .. } | Hint::Cancel { .. } | Hint::Beat { .. } => {
                for channel in self.channels().await? {
                    self.publish_to(channel, hint).await?;
                }
                Ok(())
            }
        }
    }

    /// Tells the workers on one channel.
    ///
    /// Index: none. Invariant: none.
    pub async fn publish_to(&self, channel: Channel, hint: &Hint) -> Result<(), StoreError> {
        self.publish_in(&channel.collection(), hint).await
    }

    pub(super) async fn publish_in(&self, signals: &str, hint: &Hint) -> Result<(), StoreError> {
        for part in hint.parts() {
            let command = || doc! { "insert": signals, "documents": [part.to_document()], "writeConcern": { "w": 1 } };
            self.write_repeatable("publish", command).await?;
        }
        Ok(())
    }

    /// Tells within a second, and only notes in the log when that failed.
    pub async fn announce_hint(&self, hint: Hint) {
        let _ = within_a_second(self.publish(&hint)).await;
    }

    /// The same on these channels; says whether all were told.
    ///
    /// Index: none. Invariant: none.
    pub async fn announce_hints_to(&self, hints: Vec<(Channel, Hint)>) -> bool {
        let told = hints.iter().map(|(channel, hint)| within_a_second(self.publish_to(*channel, hint)));
        futures_util::future::join_all(told).await.into_iter().all(|told| told)
    }

    /// The channel of a worker that registers: in turns one of as many as the roster needs. Makes the collection, unless it is there.
    ///
    /// Index: `_id`. Invariant: none.
    pub async fn join_channel(&self) -> Result<Channel, StoreError> {
        let (metadata, roster) = (self.metadata.clone(), self.roster.clone());
        let registered = call("join_channel", async move { roster.estimated_document_count().await }).await?;
        let channels = (i64::try_from(registered).unwrap_or(i64::MAX) / WORKERS_PER_CHANNEL + 1).min(CHANNELS);
        let counted = call("join_channel", async move {
            metadata
                .find_one_and_update(doc! { "_id": "channels" }, doc! { "$inc": { "workers": 1_i64 } })
                .upsert(true)
                .return_document(ReturnDocument::Before)
                .await
        })
        .await?;
        let before = counted.and_then(|counted| counted.get_i64("workers").ok()).unwrap_or(0);
        let channel = Channel(u32::try_from(before.rem_euclid(channels)).unwrap_or(0));
        indexes::ensure_channel(self, channel).await?;
        Ok(channel)
    }

    /// The channels that somebody in the roster listens on, and the first.
    ///
    /// Filter: none. Index: none, the roster is small. Invariant: none.
    pub async fn channels(&self) -> Result<BTreeSet<Channel>, StoreError> {
        let roster = self.roster.clone();
        let found = call("channels", async move { roster.distinct("channel", doc! {}).await }).await?;
        let number = |found: &Bson| found.as_i64().or(found.as_i32().map(i64::from)).and_then(|number| u32::try_from(number).ok());
        Ok(found.iter().filter_map(number).map(Channel).chain([Channel::default()]).collect())
    }

    /// Listens from now on; reconnects by itself.
    ///
    /// Index: none, a capped collection is read in its own order. Invariant: none.
    pub fn hints(&self, listener: Listener) -> Hints {
        let (sender, queue) = mpsc::channel(QUEUE);
        let (store, is_listening) = (self.clone(), Arc::new(AtomicBool::new(false)));
        let listening = is_listening.clone();
        let tail = tokio::spawn(async move {
            let mut seen = None;
            while !sender.is_closed() {
                let mut ended = store.tail(listener, &mut seen, &sender, &listening).await;
                listening.store(false, Ordering::Relaxed);
                if !matches!(ended, Ok(Ended::Silent)) {
                    // Perhaps the collection was dropped: the next hint would make it again, as one that nobody can listen to.
                    ended = indexes::mend(&store, listener.channel()).await.and(ended);
                }
                match ended {
                    Ok(_) => {}
                    Err(error) if error.is_unauthorized() => {
                        tracing::warn!(
                            error = crate::telemetry::chain(&error),
                            "not listening for hints; the MongoDB user needs the role readWrite"
                        );
                        pause(REOPEN_AFTER).await;
                    }
                    Err(error) => tracing::debug!(error = crate::telemetry::chain(&error), "not listening for hints; trying again"),
                }
                pause(REOPEN_PAUSE).await;
            }
        });
        Hints { queue, is_listening, tail }
    }

    /// Passes hints on until the cursor ends. What is older than the first look, or was seen before, is skipped.
    async fn tail(
        &self,
        listener: Listener,
        seen: &mut Option<Timestamp>,
        to: &mpsc::Sender<Hint>,
        listening: &AtomicBool,
    ) -> Result<Ended, StoreError> {
        let mut cursor = self.open_tail(listener, seen).await?;
        listening.store(true, Ordering::Relaxed);
        // Before it was open, anything may have been said.
        let _ = to.send(Hint::Seed).await;
        loop {
            match tokio::time::timeout(REOPEN_AFTER, cursor.try_next()).await {
                Ok(Ok(Some(document))) => {
                    // Converted here: the driver's way to a document leads through text.
                    let document = Document::try_from(&*document).unwrap_or_default();
                    *seen = document.get_timestamp("at").ok().or(*seen);
                    if let Some(hint) = Hint::from_document(&document) {
                        // Nobody listens any more: the task ends.
                        let _ = to.send(hint).await;
                    }
                }
                Ok(Err(source)) => return Err(StoreError::Mongo { operation: "tail", source: source.into() }),
                Ok(Ok(None)) => return Ok(Ended::Closed),
                Err(_) => return Ok(Ended::Silent),
            }
        }
    }

    #[expect(clippy::disallowed_methods, reason = "a channel is a collection like the others, opened by its number")]
    fn channel(&self, channel: Channel) -> Collection<Document> {
        self.database.collection(&channel.collection())
    }

    async fn open_tail(&self, listener: Listener, seen: &mut Option<Timestamp>) -> Result<Cursor<RawDocumentBuf>, StoreError> {
        let signals = match listener {
            Listener::Recruiter => self.signals.clone(),
            Listener::Worker(_, channel) => self.channel(channel),
        };
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
        let signals = signals.clone_with_type::<RawDocumentBuf>();
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

/// Whether it was told; otherwise there is a line in the log.
async fn within_a_second(told: impl Future<Output = Result<(), StoreError>>) -> bool {
    match tokio::time::timeout(HINT_LIMIT, told).await {
        Ok(Ok(())) => return true,
        Ok(Err(error)) => tracing::debug!(error = crate::telemetry::chain(&error), "a hint was not sent; the poll fallback will do"),
        Err(_) => tracing::debug!("a hint was not acknowledged in time; the poll fallback will do"),
    }
    false
}
