//! The reader of events.

use std::{
    collections::HashMap,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bson::{Document, Timestamp, oid::ObjectId};
use futures_util::{Stream, TryStreamExt};
use tokio::{sync::mpsc, task::JoinHandle};

use super::{Event, RingPart, Wanted};
use crate::{
    base::{Instant, Pattern, chain, pause},
    mongo::{Client, Store, StoreError},
};

/// How often a subscription is renewed. It expires after three times as long.
pub(crate) const RENEW_EVERY: Duration = Duration::from_secs(20);
/// After this time without an event the cursor is opened again, because a dead connection cannot be distinguished from a quiet one.
const REOPEN_AFTER: Duration = Duration::from_secs(60);
/// Pause before the events are read again after an error.
const AGAIN_AFTER: Duration = Duration::from_millis(200);
/// After an error the reader begins this long before the last event that it has read. The server gives the times before it orders the
/// documents. An event that was read before is recognised by its number.
const OVERLAP_S: u32 = 10;
/// Events that wait for the application. Further ones stay in the collection.
const QUEUE: usize = 1_024;

/// What a reader gets.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Received {
    /// An event.
    Event(Event),
    /// Events were missed: the reader was too slow, or a process had to drop some. `None` is an unknown number. They may have had other
    /// topics.
    Missed(Option<u64>),
}

/// Why events cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EventsError {
    /// No topic was given.
    #[error("no topic was given: name at least one pattern, `*` for all events")]
    NoTopic,
    /// An error of MongoDB.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A stream of events. It ends only when it is dropped.
#[derive(Debug)]
pub struct Events {
    queue: mpsc::Receiver<Received>,
    reader: JoinHandle<()>,
    renewal: JoinHandle<()>,
    subscription: Option<(Store, ObjectId)>,
}

impl Events {
    /// Waits for the next event. The wait can be cancelled safely.
    pub async fn next(&mut self) -> Received {
        match self.queue.recv().await {
            Some(received) => received,
            None => std::future::pending().await,
        }
    }

    /// Ends the subscription at once. After a drop it expires within a minute, or the drop ends it in the background.
    pub async fn close(mut self) {
        if let Some((store, id)) = self.subscription.take() {
            self.renewal.abort();
            let _ = store.unsubscribe(id).await;
        }
    }
}

impl Stream for Events {
    type Item = Received;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Received>> {
        self.queue.poll_recv(context)
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.reader.abort();
        self.renewal.abort();
        if let (Some((store, id)), Ok(runtime)) = (self.subscription.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(async move { store.unsubscribe(id).await });
        }
    }
}

impl Client {
    /// Subscribes to events whose topics match one of these patterns. With `since` it begins with the events since then that the ring still
    /// holds. Other subscribers may have asked for other topics, so older events are there only if a subscriber had asked for them.
    ///
    /// The processes publish the events from about a second after the call.
    ///
    /// # Errors
    /// When there is no pattern, and when MongoDB refuses or cannot be reached.
    pub async fn events(&self, patterns: impl IntoIterator<Item = Pattern>, since: Option<Instant>) -> Result<Events, EventsError> {
        let store = self.store();
        let wanted = Wanted { patterns: patterns.into_iter().collect(), ends: false };
        if wanted.patterns.is_empty() {
            return Err(EventsError::NoTopic);
        }
        store.prepare_events(None).await?;
        let newest = store.newest_event().await?;
        let from = match since {
            Some(since) => Timestamp { time: u32::try_from(since.timestamp()).unwrap_or_default(), increment: 0 },
            None => newest.map_or(Timestamp { time: 0, increment: 0 }, |at| Timestamp { increment: at.increment + 1, ..at }),
        };
        let id = ObjectId::new();
        store.subscribe(id, &wanted, RENEW_EVERY * 3).await?;
        let (sender, queue) = mpsc::channel(QUEUE);
        let reader = Reader { store: self.store(), wanted: wanted.clone(), since, from, next: HashMap::new(), to: sender };
        let renewal = tokio::spawn(renew(self.store(), id, wanted));
        Ok(Events { queue, reader: tokio::spawn(reader.run()), renewal, subscription: Some((store, id)) })
    }

    /// The events since then that the ring still holds. Subscribes to nothing.
    ///
    /// # Errors
    /// When MongoDB refuses or cannot be reached.
    pub async fn past_events(
        &self,
        patterns: impl IntoIterator<Item = Pattern>,
        since: Option<Instant>,
    ) -> Result<Vec<Event>, EventsError> {
        let wanted = Wanted { patterns: patterns.into_iter().collect(), ends: false };
        let from = since.map_or(0, |since| u32::try_from(since.timestamp()).unwrap_or_default());
        let documents = self.store().events_since(Timestamp { time: from, increment: 0 }).await?;
        let events = documents.into_iter().flat_map(|document| numbered(document).map_or_else(Vec::new, |(.., events)| events));
        Ok(events.filter(|event| wanted.has(&event.topic) && since.is_none_or(|since| event.at >= since)).collect())
    }
}

/// Renews a subscription until the task is aborted.
pub(crate) async fn renew(store: Store, id: ObjectId, wanted: Wanted) {
    loop {
        pause(RENEW_EVERY).await;
        if let Err(error) = store.subscribe(id, &wanted, RENEW_EVERY * 3).await {
            tracing::debug!(error = chain(&error), "a subscription was not renewed; trying again");
        }
    }
}

struct Reader {
    store: Store,
    wanted: Wanted,
    since: Option<Instant>,
    /// Where to begin.
    from: Timestamp,
    /// The number of the next event of each publisher.
    next: HashMap<ObjectId, i64>,
    to: mpsc::Sender<Received>,
}

impl Reader {
    async fn run(mut self) {
        while !self.to.is_closed() {
            match self.read().await {
                Ok(()) => {}
                Err(error) if error.is_position_lost() => {
                    self.next.clear();
                    let _ = self.to.send(Received::Missed(None)).await;
                }
                Err(error) => {
                    tracing::debug!(error = chain(&error), "cannot read events; trying again");
                    // The collection may have been dropped, and then be an ordinary one.
                    let _ = self.store.prepare_events(None).await;
                }
            }
            pause(AGAIN_AFTER).await;
        }
    }

    /// Reads until the cursor ends, or is silent for a long time.
    async fn read(&mut self) -> Result<(), StoreError> {
        let mut cursor = self.store.tail_events(self.from, RingPart::Events).await?;
        while let Ok(read) = tokio::time::timeout(REOPEN_AFTER, cursor.try_next()).await {
            let Some(document) = read.map_err(StoreError::of("tail"))? else { break };
            let document = Document::try_from(&*document).unwrap_or_default();
            let at = document.get_timestamp("at").ok();
            for received in self.understood(document) {
                // Without a receiver the task ends soon.
                let _ = self.to.send(received).await;
            }
            if let Some(at) = at.filter(|at| at.time > self.from.time.saturating_add(OVERLAP_S)) {
                self.from = Timestamp { time: at.time - OVERLAP_S, increment: 0 };
            }
        }
        Ok(())
    }

    /// The events of a document that are new and wanted, and how many were missed before.
    fn understood(&mut self, document: Document) -> Vec<Received> {
        let Some((by, first, events)) = numbered(document) else { return Vec::new() };
        let count = i64::try_from(events.len()).unwrap_or(i64::MAX);
        let expected = self.next.get(&by).copied().unwrap_or(first);
        self.next.insert(by, expected.max(first.saturating_add(count)));
        let missed = u64::try_from(first.saturating_sub(expected)).ok().filter(|missed| *missed > 0);
        let known = usize::try_from(expected.saturating_sub(first)).unwrap_or(0);
        let is_wanted = |event: &Event| self.wanted.has(&event.topic) && self.since.is_none_or(|since| event.at >= since);
        let new = events.into_iter().skip(known).filter(is_wanted).map(Received::Event);
        missed.map(|missed| Received::Missed(Some(missed))).into_iter().chain(new).collect()
    }
}

/// The publisher of a document, the number of its first event, and its events.
fn numbered(mut document: Document) -> Option<(ObjectId, i64, Vec<Event>)> {
    let (by, first) = (document.get_object_id("by").ok()?, document.get_i64("first").ok()?);
    let Some(bson::Bson::Array(events)) = document.remove("events") else { return None };
    // An event that cannot be understood is counted.
    let events = events.into_iter().map(|event| if let bson::Bson::Document(event) = event { Event::from_document(event) } else { None });
    let unknown = || Event { topic: String::new(), at: Instant::default(), details: Document::new() };
    Some((by, first, events.map(|event| event.unwrap_or_else(unknown)).collect()))
}
