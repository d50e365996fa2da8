//! Events for many readers, from one subscription: a hundred open pages cost MongoDB what one does.
//!
//! The subscription begins with the first reader, and ends a minute after the last one. A reader that comes back begins behind the event that
//! it has had last, as far as the memory here reaches. One that is too slow, or whose last event is not here any more, is told so.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex as Guarded, PoisonError},
    time::{Duration, Instant as Monotonic},
};

use futures_util::{Stream, stream};
use recruiter_common::{
    EventsError, JobId, Received,
    events::Events,
    store::{FollowedRedaction, Redaction, Store},
    topics::Pattern,
};
use tokio::sync::{Mutex, broadcast};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::views::extended;

/// Maximum number of events that are kept for readers that are slow or come back.
const KEPT: usize = 4_096;
/// Maximum size of these events, in bytes.
const KEPT_BYTES: usize = 16 << 20;
/// After so many events of other topics a reader gets its place.
const PASSED: usize = 1_000;
/// How long the subscription stays without readers.
const LINGER: Duration = Duration::from_secs(60);

/// What readers get.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Told {
    /// An event: its topic, its job, and its document as JSON.
    Event { topic: String, job: Option<JobId>, json: String },
    /// So many events were missed; an unknown number, if `None`.
    Missed(Option<u64>),
}

/// The place of something told: the subscription that has told it, and its number there. In text: `SUBSCRIPTION-NUMBER`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    hub: u64,
    number: u64,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}-{}", self.hub, self.number)
    }
}

impl std::str::FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let read = || {
            let (hub, number) = text.split_once('-')?;
            Some(Self { hub: u64::from_str_radix(hub, 16).ok()?, number: number.parse().ok()? })
        };
        read().ok_or_else(|| format!("`{text:.80}` is not the id of an event of this stream"))
    }
}

/// One thing told, with its number.
type Numbered = (u64, Arc<Told>);

/// What a subscription has told.
#[derive(Debug)]
struct Hub {
    id: u64,
    kept: Guarded<Kept>,
}

/// `to` is `None` when the subscription has ended.
#[derive(Debug)]
struct Kept {
    told: VecDeque<Numbered>,
    bytes: usize,
    next: u64,
    to: Option<broadcast::Sender<Numbered>>,
}

impl Kept {
    fn tell(&mut self, told: Told) {
        let (number, told) = (self.next, Arc::new(told));
        self.next += 1;
        self.bytes += size(&told);
        self.told.push_back((number, told.clone()));
        while self.told.len() > KEPT || self.bytes > KEPT_BYTES {
            self.bytes -= self.told.pop_front().map_or(0, |(_, told)| size(&told));
        }
        if let Some(to) = &self.to {
            // Without readers it is kept.
            let _ = to.send((number, told));
        }
    }

    /// What was told behind this number. `None`: some of it is not here any more.
    fn behind(&self, last: u64) -> Option<VecDeque<Numbered>> {
        let first = self.told.front().map_or(self.next, |(number, _)| *number);
        let is_here = last < self.next && last + 1 >= first;
        is_here.then(|| self.told.iter().filter(|(number, _)| *number > last).cloned().collect())
    }
}

fn size(told: &Told) -> usize {
    match told {
        Told::Event { topic, json, .. } => topic.len() + json.len(),
        Told::Missed(_) => 0,
    }
}

impl Hub {
    fn kept(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new reader, unless the subscription has ended.
    fn join(&self, last: Option<Place>) -> Option<Reader> {
        let kept = self.kept();
        let live = kept.to.as_ref()?.subscribe();
        let behind = last.map(|last| (last.hub == self.id).then(|| kept.behind(last.number)).flatten());
        let replay = match behind {
            None => VecDeque::new(),
            Some(Some(replay)) => replay,
            Some(None) => VecDeque::from([(kept.next.saturating_sub(1), Arc::new(Told::Missed(None)))]),
        };
        let at = last.filter(|last| last.hub == self.id && last.number < kept.next).map(|last| last.number);
        Some(Reader { hub: self.id, at: at.unwrap_or(kept.next.saturating_sub(1)), replay, live })
    }

    /// Ends the subscription, if it has no readers.
    fn end_if_unread(&self) -> bool {
        let mut kept = self.kept();
        let is_unread = kept.to.as_ref().is_none_or(|to| to.receiver_count() == 0);
        if is_unread {
            kept.to = None;
        }
        is_unread
    }
}

/// Tells what comes, until there are no readers for a while, or the process stops.
async fn run(hub: Arc<Hub>, mut events: Events, mut redaction: FollowedRedaction, stop: CancellationToken) {
    let mut unread_since = None;
    loop {
        let received = tokio::select! {
            received = events.next() => Some(received),
            () = recruiter_common::shutdown::pause(Duration::from_secs(1)) => None,
            () = stop.cancelled() => break,
        };
        if let Some(received) = received {
            let told = told(received, redaction.current().await);
            hub.kept().tell(told);
        }
        let is_read = hub.kept().to.as_ref().is_some_and(|to| to.receiver_count() > 0);
        unread_since = if is_read { None } else { unread_since.or_else(|| Some(Monotonic::now())) };
        if unread_since.is_some_and(|since: Monotonic| since.elapsed() >= LINGER) && hub.end_if_unread() {
            break;
        }
    }
    hub.kept().to = None;
    events.close().await;
}

fn told(received: Received, redaction: &Redaction) -> Told {
    match received {
        Received::Event(mut event) => {
            redaction.event(&mut event.details);
            let job = event.details.get_object_id("job").ok().map(JobId::from);
            Told::Event { topic: event.topic.clone(), job, json: extended(event.into_document()).to_string() }
        }
        Received::Missed(count) => Told::Missed(count),
        _ => Told::Missed(None),
    }
}

/// The events of this process.
#[derive(Debug, Default)]
pub(super) struct Live(Mutex<Option<Arc<Hub>>>);

impl Live {
    /// A reader that begins now, or behind the place that it has read last.
    ///
    /// # Errors
    /// When there is no subscription yet, and MongoDB refuses one or cannot be reached.
    pub(super) async fn read(
        &self,
        store: &Store,
        last: Option<Place>,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) -> Result<Reader, EventsError> {
        let mut present = self.0.lock().await;
        if let Some(reader) = present.as_ref().and_then(|hub| hub.join(last)) {
            return Ok(reader);
        }
        let redaction = store.followed_redaction().await?;
        let events = store.events([Pattern::everything()], None).await?;
        let (to, live) = broadcast::channel(KEPT);
        let kept = Kept { told: VecDeque::new(), bytes: 0, next: 1, to: Some(to) };
        let hub = Arc::new(Hub { id: rand::random(), kept: Guarded::new(kept) });
        // What an earlier subscription has told is not here.
        let replay = last.map(|_| (0, Arc::new(Told::Missed(None)))).into_iter().collect();
        let reader = hub.join(None).unwrap_or(Reader { hub: hub.id, at: 0, replay: VecDeque::new(), live });
        tasks.spawn(run(hub.clone(), events, redaction, stop.clone()));
        *present = Some(hub);
        Ok(Reader { replay, ..reader })
    }
}

/// A reader of events.
#[derive(Debug)]
pub(super) struct Reader {
    hub: u64,
    /// The number of what it has had last.
    at: u64,
    replay: VecDeque<Numbered>,
    live: broadcast::Receiver<Numbered>,
}

impl Reader {
    /// Where it is.
    pub(super) fn place(&self) -> Place {
        Place { hub: self.hub, number: self.at }
    }

    /// The next event. `None` when the subscription has ended. The wait can be cancelled safely.
    pub(super) async fn next(&mut self) -> Option<(Place, Arc<Told>)> {
        let (number, told) = match self.replay.pop_front() {
            Some(replayed) => replayed,
            None => match self.live.recv().await {
                Ok(received) => received,
                Err(broadcast::error::RecvError::Lagged(missed)) => (self.at.saturating_add(missed), Arc::new(Told::Missed(Some(missed)))),
                Err(broadcast::error::RecvError::Closed) => return None,
            },
        };
        self.at = number;
        Some((self.place(), told))
    }

    /// What comes for these patterns, of these jobs, if any are given; `None` now and then, for the place, while nothing does.
    pub(super) fn matching(self, patterns: Vec<Pattern>, jobs: Vec<JobId>) -> impl Stream<Item = (Place, Option<Arc<Told>>)> {
        stream::unfold((self, patterns, jobs), async |(mut reader, patterns, jobs)| {
            let mut passed = 0;
            loop {
                let (place, told) = reader.next().await?;
                let is_wanted = match &*told {
                    Told::Event { topic, job, .. } => {
                        let is_of_job = jobs.is_empty() || job.is_some_and(|job| jobs.contains(&job));
                        is_of_job && patterns.iter().any(|pattern| pattern.matches(topic))
                    }
                    Told::Missed(_) => true,
                };
                passed += 1;
                if is_wanted || passed >= PASSED {
                    return Some(((place, is_wanted.then_some(told)), (reader, patterns, jobs)));
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub() -> (Hub, broadcast::Receiver<Numbered>) {
        let (to, live) = broadcast::channel(KEPT);
        (Hub { id: 7, kept: Guarded::new(Kept { told: VecDeque::new(), bytes: 0, next: 1, to: Some(to) }) }, live)
    }

    fn event(number: u64) -> Told {
        Told::Event { topic: "a".into(), job: None, json: number.to_string() }
    }

    async fn read(reader: &mut Reader, count: usize) -> Vec<Told> {
        let mut read = Vec::new();
        for _ in 0..count {
            read.push(reader.next().await.map(|(_, told)| (*told).clone()).expect("more"));
        }
        read
    }

    #[tokio::test]
    async fn a_reader_that_comes_back_gets_what_it_has_not_had() {
        let (hub, _live) = hub();
        let mut first = hub.join(None).expect("a reader");
        (1..=3).for_each(|number| hub.kept().tell(event(number)));
        assert_eq!(read(&mut first, 2).await, [event(1), event(2)]);
        let place = first.place();
        assert_eq!(place.to_string().parse(), Ok(place));
        let mut again = hub.join(Some(place)).expect("a reader");
        hub.kept().tell(event(4));
        assert_eq!(read(&mut again, 2).await, [event(3), event(4)]);
        // At its start, and at the end.
        let mut all = hub.join(Some(Place { hub: 7, number: 0 })).expect("a reader");
        assert_eq!(read(&mut all, 4).await.len(), 4);
        let mut none = hub.join(Some(all.place())).expect("a reader");
        hub.kept().tell(event(5));
        assert_eq!(read(&mut none, 1).await, [event(5)]);
    }

    #[tokio::test]
    async fn a_reader_is_told_what_it_has_missed() {
        let (hub, _live) = hub();
        let mut slow = hub.join(None).expect("a reader");
        let kept = u64::try_from(KEPT).expect("a small number");
        (1..=kept + 10).for_each(|number| hub.kept().tell(event(number)));
        assert_eq!(read(&mut slow, 2).await, [Told::Missed(Some(10)), event(11)]);
        assert_eq!(slow.place().number, 11);
        // Overtaken, of another subscription, and of one that has told less.
        for place in [Place { hub: 7, number: 9 }, Place { hub: 8, number: 20 }, Place { hub: 7, number: 9_999_999 }] {
            let mut late = hub.join(Some(place)).expect("a reader");
            hub.kept().tell(event(0));
            assert_eq!(read(&mut late, 2).await, [Told::Missed(None), event(0)], "{place}");
        }
        let mut early = hub.join(Some(Place { hub: 7, number: 14 })).expect("a reader");
        assert_eq!(read(&mut early, 1).await, [event(15)]);
        // What is kept is bounded in bytes as well.
        hub.kept().tell(Told::Event { topic: "a".into(), job: None, json: "x".repeat(KEPT_BYTES) });
        assert!(hub.kept().told.is_empty() && hub.kept().bytes == 0);
        hub.kept().tell(event(1));
        assert_eq!(hub.kept().told.len(), 1);
    }

    #[tokio::test]
    async fn a_subscription_ends_only_without_readers() {
        let (hub, live) = hub();
        drop(live);
        let mut reader = hub.join(None).expect("a reader");
        assert!(!hub.end_if_unread());
        drop(hub.kept().to.take());
        assert!(reader.next().await.is_none() && hub.join(None).is_none());
        drop(reader);
        assert!(hub.end_if_unread());
    }

    #[test]
    fn a_place_is_a_text() {
        for wrong in ["", "7", "x-1", "7-", "7--1", "7-x", "-"] {
            assert!(wrong.parse::<Place>().is_err_and(|problem| problem.contains("not the id of an event")), "{wrong}");
        }
    }
}
