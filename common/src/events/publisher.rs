//! The publisher: keeps events until they are written, and drops them when too many wait. Pure.

use super::{Event, Wanted};
use crate::{
    base::JobId,
    meters::{Counter, EVENTS_DROPPED},
    mongo::Store,
};
use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant as Monotonic},
};

use bson::{Document, Timestamp, doc, oid::ObjectId};
use tokio::sync::Notify;

/// How long the topics that subscribers ask for are cached.
pub(crate) const FRESH: Duration = Duration::from_secs(1);
/// Maximum number of events that wait. Further ones are dropped.
const WAITING: usize = 10_000;
/// Maximum number of ids of ended jobs that wait. Polls find the others.
const WAITING_ENDS: usize = 100_000;
/// Maximum number of events in one document.
const EVENTS: usize = 1_000;
/// Maximum number of ids in one document.
const ENDS: usize = 10_000;

/// The events of one process that are not written yet.
#[derive(Debug, Default)]
pub(crate) struct Publisher {
    state: Mutex<State>,
    /// Notified when nothing waits any more.
    idle: Notify,
    dropped: Dropped,
}

/// Counts dropped events.
#[derive(Debug)]
struct Dropped(Counter);

impl Default for Dropped {
    fn default() -> Self {
        Self(EVENTS_DROPPED.counter(&[]))
    }
}

#[derive(Debug, Default)]
struct State {
    known: Option<(Monotonic, Arc<Wanted>)>,
    waiting: VecDeque<Event>,
    ends: Vec<JobId>,
    /// The name of this publisher in the documents.
    id: Option<ObjectId>,
    /// The number of the next event. A dropped event has a number as well, so a reader finds out that it is missing.
    next: i64,
    is_running: bool,
}

impl Store {
    /// Events that are not written yet.
    pub(crate) fn publisher(&self) -> &Publisher {
        self.part()
    }
}

impl Publisher {
    /// What subscribers ask for; `None` if they ask for nothing. If this is not known at the moment: everything. The events then wait until
    /// it is known.
    pub(crate) fn wanted(&self) -> Option<Arc<Wanted>> {
        match &self.state().known {
            Some((read_at, wanted)) if read_at.elapsed() < FRESH => (!wanted.is_empty()).then(|| wanted.clone()),
            Some(_) | None => Some(Arc::new(Wanted::everything())),
        }
    }

    pub(super) fn fresh(&self) -> Option<Arc<Wanted>> {
        self.state().known.as_ref().filter(|(read_at, _)| read_at.elapsed() < FRESH).map(|(_, wanted)| wanted.clone())
    }

    /// Adds events. Returns whether the caller must start the task that writes them.
    pub(super) fn add(&self, events: Vec<Event>, mut ends: Vec<JobId>) -> bool {
        let mut state = self.state();
        for event in events {
            if state.waiting.len() < WAITING {
                state.waiting.push_back(event);
            } else {
                state.next += 1;
                self.note_dropped(1);
            }
        }
        ends.truncate(WAITING_ENDS.saturating_sub(state.ends.len()));
        state.ends.append(&mut ends);
        !std::mem::replace(&mut state.is_running, true)
    }

    /// The next document; `None` if nothing that is wanted waits. Then the task must end.
    pub(super) fn next_document(&self, wanted: &Wanted) -> Option<Document> {
        let mut state = self.state();
        state.waiting.retain(|event| wanted.has(&event.topic));
        if !wanted.ends {
            state.ends.clear();
        }
        if state.waiting.is_empty() && state.ends.is_empty() {
            self.end(&mut state);
            return None;
        }
        let by = *state.id.get_or_insert_with(ObjectId::new);
        // The server fills in the time.
        let mut document = doc! { "at": Timestamp { time: 0, increment: 0 }, "by": by };
        if !state.waiting.is_empty() {
            let count = state.waiting.len().min(EVENTS);
            let events: Vec<Document> = state.waiting.drain(..count).map(|event| event.to_document()).collect();
            document.insert("first", state.next);
            state.next += i64::try_from(events.len()).unwrap_or(i64::MAX);
            document.insert("events", events);
        }
        if !state.ends.is_empty() {
            let count = state.ends.len().min(ENDS);
            let ended: Vec<JobId> = state.ends.drain(..count).collect();
            document.insert("ended", ended);
        }
        Some(document)
    }

    /// Drops the events in the queue: the subscribers are not known.
    pub(super) fn give_up(&self) {
        let mut state = self.state();
        state.next += i64::try_from(state.waiting.len()).unwrap_or(i64::MAX);
        self.note_dropped(state.waiting.len());
        state.waiting.clear();
        state.ends.clear();
        self.end(&mut state);
    }

    /// Counts events without a receiver.
    pub(super) fn note_dropped(&self, events: usize) {
        self.dropped.0.increment(u64::try_from(events).unwrap_or(u64::MAX));
    }

    /// Waits until nothing waits any more.
    pub(super) async fn flushed(&self) {
        loop {
            let idle = self.idle.notified();
            tokio::pin!(idle);
            idle.as_mut().enable();
            if !self.state().is_running {
                return;
            }
            idle.await;
        }
    }

    fn end(&self, state: &mut State) {
        state.is_running = false;
        self.idle.notify_waiters();
    }

    pub(super) fn know(&self, wanted: Arc<Wanted>) {
        self.state().known = Some((Monotonic::now(), wanted));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{Instant, Pattern};

    fn event(topic: &str) -> Event {
        Event { topic: topic.into(), at: Instant::default(), details: doc! {} }
    }

    fn wanted(pattern: &str) -> Wanted {
        Wanted { patterns: [Pattern::new(pattern).expect("a pattern")].into(), ends: false }
    }

    #[test]
    fn only_what_is_asked_for_is_written_and_numbered() {
        let publisher = Publisher::default();
        assert!(publisher.add(vec![event("a.b"), event("c")], vec![JobId::new()]), "the caller starts the task");
        assert!(!publisher.add(vec![event("a.c")], Vec::new()), "it runs");
        let document = publisher.next_document(&wanted("a.*")).expect("events wait");
        assert_eq!(document.get_i64("first").ok(), Some(0));
        assert!(document.get_array("events").is_ok_and(|events| events.len() == 2) && !document.contains_key("ended"));
        assert_eq!(publisher.next_document(&wanted("a.*")), None);
        assert!(publisher.add(vec![event("a.d")], Vec::new()), "the task has ended");
        let document = publisher.next_document(&wanted("a.*")).expect("an event waits");
        assert_eq!(document.get_i64("first").ok(), Some(2));
    }

    #[test]
    fn events_beyond_the_limit_are_dropped_and_numbered() {
        let publisher = Publisher::default();
        publisher.add((0..WAITING + 7).map(|_| event("a")).collect(), Vec::new());
        let mut written = 0;
        let mut last = 0;
        while let Some(document) = publisher.next_document(&wanted("a")) {
            written += document.get_array("events").map_or(0, Vec::len);
            last = document.get_i64("first").unwrap_or_default();
        }
        assert_eq!(written, WAITING);
        assert!(last > 7, "the numbers of the dropped events are left out: {last}");
        assert_eq!(publisher.state().next, i64::try_from(WAITING + 7).expect("it is small"));
    }

    #[test]
    fn what_is_not_known_is_kept_until_it_is() {
        let publisher = Publisher::default();
        assert!(publisher.wanted().is_some_and(|wanted| wanted.has("a") && wanted.ends));
        publisher.know(Arc::default());
        assert_eq!(publisher.wanted(), None);
    }
}
