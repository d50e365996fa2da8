//! Capped collections in which hints are published, and their tailing readers.
//!
//! An insert into a capped collection wakes every reader that tails it. Therefore only the recruiter reads `signals`,
//! and the workers are spread over channels, `signals_0` and so on, with a few dozen workers on each. The recruiter's
//! keep-alive there means that all earlier hints were sent, so an idle worker need not poll.
//!
//! A process with a connection to the recruiter ([`relay`](super::relay)) uses that one in place of the capped collections.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bson::{Document, RawDocumentBuf, Timestamp, doc};
use futures_util::TryStreamExt;
use mongodb::{
    Collection, Cursor,
    options::{CursorType, ReadConcern},
};
use tokio::sync::mpsc;

use super::{
    Hint, Hints, Listener,
    relay::{Link, Linking},
};
use crate::{
    base::{WorkerId, chain, pause},
    mongo::{Channel, Store, StoreError, call, schema},
};

/// How long the server holds a tailing read open before it returns an empty reply. Only that reply reports that the
/// collection was dropped.
const AWAIT: Duration = Duration::from_secs(10);
/// After this time without a hint the cursor is opened again, because a dead connection cannot be distinguished from a
/// quiet one.
const REOPEN_AFTER: Duration = Duration::from_secs(60);
/// Pause before a cursor is opened again.
const REOPEN_PAUSE: Duration = Duration::from_millis(200);
/// A worker that begins to listen waits this long for its connection to the recruiter. Then it tails until it is connected.
const LINKS_WITHIN: Duration = Duration::from_millis(100);
/// How long to wait for the acknowledgement of a hint. The hint may arrive even without it.
const HINT_LIMIT: Duration = Duration::from_secs(1);
/// Maximum number of hints in the queue. Further hints stay in the collection.
const QUEUE: usize = 1_024;

/// The reason why a cursor is no longer read.
enum Ended {
    /// MongoDB has closed it.
    Closed,
    /// No hint has arrived for a long time.
    Silent,
    /// The worker is connected to the leader.
    Linked(Link),
}

impl Store {
    /// Publishes a hint. The caller may ignore a failure: a recipient that misses a hint finds the change with its next
    /// poll.
    ///
    /// Index: none. Invariant: none.
    pub async fn publish(&self, hint: &Hint) -> Result<(), StoreError> {
        match hint {
            Hint::Seed
            | Hint::Jobs { .. }
            | Hint::NotStarted
            | Hint::Free
            | Hint::Returned { .. }
            | Hint::Left { .. }
            | Hint::Ended { .. }
            | Hint::Waiting { .. }
            | Hint::Settings => self.publish_to_leader(hint).await,
            Hint::Assigned { .. } | Hint::Recall | Hint::Control | Hint::Cancel { .. } | Hint::KeepAlive { .. } => {
                if matches!(hint, Hint::Cancel { .. } | Hint::Control) {
                    // The leader passes it on to the workers that are connected to it. It must come from the database: who can only read
                    // the secret must not cancel jobs.
                    self.publish_in(self.signals.name(), hint).await?;
                }
                for channel in self.channels().await? {
                    self.publish_to(channel, hint).await?;
                }
                Ok(())
            }
        }
    }

    /// Publishes a hint to the workers on one channel.
    ///
    /// Index: none. Invariant: none.
    pub async fn publish_to(&self, channel: Channel, hint: &Hint) -> Result<(), StoreError> {
        self.publish_in(&self.named(&channel.collection()), hint).await
    }

    /// Sends a hint to the leader: over the connection if there is one, otherwise through the database.
    async fn publish_to_leader(&self, hint: &Hint) -> Result<(), StoreError> {
        if self.relay().send(hint) {
            return Ok(());
        }
        self.link_later();
        self.publish_in(self.signals.name(), hint).await
    }

    /// Nothing is published where Recruiter is not set up: the collection may be an application's, and a missing one would become ordinary.
    async fn publish_in(&self, signals: &str, hint: &Hint) -> Result<(), StoreError> {
        if !self.is_set_up().await? {
            return Ok(());
        }
        for part in hint.parts() {
            let command = || doc! { "insert": signals, "documents": [part.to_document()], "writeConcern": { "w": 1 } };
            self.write_repeatable("publish", command).await?;
        }
        Ok(())
    }

    /// Publishes a hint, and waits a second at most. A failure is only logged.
    pub async fn announce_hint(&self, hint: Hint) {
        let _ = within_a_second(self.publish(&hint)).await;
    }

    /// Publishes these hints on their channels at the same time, and waits a second at most. Returns whether all of them were acknowledged.
    ///
    /// Index: none. Invariant: none.
    pub async fn announce_hints_to(&self, hints: Vec<(Channel, Hint)>) -> bool {
        let hints = self.relay().send_to_workers(hints);
        let sent = hints.iter().map(|(channel, hint)| within_a_second(self.publish_to(*channel, hint)));
        futures_util::future::join_all(sent).await.into_iter().all(|is_sent| is_sent)
    }

    /// Whether this worker is connected to this leader: it listens on no channel.
    pub fn is_linked(&self, worker: WorkerId) -> bool {
        self.relay().is_linked(worker)
    }

    /// Reads hints from now on. Reconnects automatically.
    ///
    /// Index: none, a capped collection is read in its own order. Invariant: none.
    pub fn hints(&self, listener: Listener) -> Hints {
        let (sender, queue) = mpsc::channel(QUEUE);
        let own = sender.clone();
        let (store, is_listening) = (self.clone(), Arc::new(AtomicBool::new(false)));
        let listening = is_listening.clone();
        let tail = tokio::spawn(async move {
            let (mut seen, mut linking) = (None, store.link_worker(listener));
            let mut link = tokio::time::timeout(LINKS_WITHIN, linking.done()).await.ok().flatten();
            while !sender.is_closed() {
                if let Some(link) = link.take() {
                    listening.store(true, Ordering::Relaxed);
                    // Hints may have been missed before the connection was open.
                    let _ = sender.send(Hint::Seed).await;
                    link.run(&Arc::downgrade(store.relay()), Some(&sender)).await;
                    tracing::debug!("the connection to the recruiter has ended; listening for hints in MongoDB");
                    listening.store(false, Ordering::Relaxed);
                    seen = None;
                }
                let mut ended = store.tail(listener, &mut seen, &mut linking, &sender, &listening).await;
                listening.store(false, Ordering::Relaxed);
                if let Ok(Ended::Linked(linked)) = ended {
                    link = Some(linked);
                    continue;
                }
                if !matches!(ended, Ok(Ended::Silent)) {
                    // The collection may have been dropped. The next insert would then create an ordinary one, which
                    // cannot be tailed.
                    ended = schema::mend(&store, listener.channel()).await.and(ended);
                }
                match ended {
                    Ok(_) => {}
                    Err(error) if error.is_unauthorized() => {
                        tracing::warn!(
                            error = chain(&error),
                            "cannot listen for hints; the MongoDB user needs the role readWrite, or that of this program (roles.js)"
                        );
                        pause(REOPEN_AFTER).await;
                    }
                    Err(error) => tracing::debug!(error = chain(&error), "cannot listen for hints; trying again"),
                }
                pause(REOPEN_PAUSE).await;
            }
        });
        Hints { queue, sender: own, is_listening, tail }
    }

    /// Passes hints on until the cursor ends. Skips hints that are older than the first read, and hints that were read
    /// before.
    async fn tail(
        &self,
        listener: Listener,
        seen: &mut Option<Timestamp>,
        linking: &mut Linking,
        to: &mpsc::Sender<Hint>,
        listening: &AtomicBool,
    ) -> Result<Ended, StoreError> {
        let mut cursor = self.open_tail(listener, seen).await?;
        listening.store(true, Ordering::Relaxed);
        // Hints may have been missed before the cursor was open.
        let _ = to.send(Hint::Seed).await;
        loop {
            let next = tokio::select! {
                next = tokio::time::timeout(REOPEN_AFTER, cursor.try_next()) => next,
                Some(link) = linking.done() => return Ok(Ended::Linked(link)),
            };
            match next {
                Ok(Ok(Some(document))) => {
                    // Converted here, because the driver's own conversion to a document goes through text.
                    let document = Document::try_from(&*document).unwrap_or_default();
                    *seen = document.get_timestamp("at").ok().or(*seen);
                    if let Some(hint) = Hint::from_document(&document) {
                        if matches!((listener, &hint), (Listener::Recruiter, Hint::Cancel { .. } | Hint::Control)) {
                            self.relay().pass_on(&hint);
                            continue;
                        }
                        let is_keep_alive = matches!(hint, Hint::KeepAlive { .. });
                        // Without a receiver the task ends soon.
                        let _ = to.send(hint).await;
                        if is_keep_alive {
                            self.link_worker_again(listener, linking);
                        }
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
        self.database.collection(&self.named(&channel.collection()))
    }

    async fn open_tail(&self, listener: Listener, seen: &mut Option<Timestamp>) -> Result<Cursor<RawDocumentBuf>, StoreError> {
        let signals = match listener {
            Listener::Recruiter => self.signals.clone(),
            Listener::Worker(_, channel) => self.channel(channel),
        };
        if seen.is_none() {
            let newest = signals.clone_with_type::<RawDocumentBuf>();
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

/// Returns whether the hint was acknowledged within a second. Logs a failure.
async fn within_a_second(sent: impl Future<Output = Result<(), StoreError>>) -> bool {
    match tokio::time::timeout(HINT_LIMIT, sent).await {
        Ok(Ok(())) => return true,
        Ok(Err(error)) => {
            tracing::debug!(error = chain(&error), "a hint was not sent; its recipients find the change with their next poll")
        }
        Err(_) => tracing::debug!("a hint was not acknowledged in time; its recipients find the change with their next poll"),
    }
    false
}
