//! The duty of consumer groups: makes each message of their topics a job. It runs beside the rounds, in batches that are small enough not to delay them.
//!
//! Each group has a reader of its own, which begins at the group's position. When the group is changed, or another leader has moved its
//! position, the reader ends, and the next search begins another one. A reader gets the messages of all topics and leaves out those of
//! others, because a change stream can only continue with the filter that it had before: the topics of a group may change.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::{Duration, Instant as Monotonic},
};

use futures_util::{FutureExt as _, StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use recruiter_common::{
    consumers::{ConsumerError, ConsumerGroup},
    instant::Instant,
    messages::{Arrival, From, Message, Position, SubscribeError},
    shutdown::Shutdown,
    store::{CommitSession, MOST_CONSUMERS, Store, StoreError},
    telemetry::chain,
    topics::Pattern,
};
use tokio_util::sync::CancellationToken;

use super::lease::Leadership;

/// Interval between two searches for new, changed and removed groups.
const SEARCH_EVERY: Duration = Duration::from_secs(3);
/// Maximum number of messages that are handled together.
const BATCH: usize = 256;
/// While no message becomes a job, the position is moved after this time.
const PASS_EVERY: Duration = Duration::from_secs(10);
/// Each group has a cursor and a transaction.
const CONNECTIONS: u32 = 2 * MOST_CONSUMERS + 8;

/// The name and the revision of a group, and when it was declared: one that was removed and declared again is another one.
type Version = (String, i64, Option<Instant>);
/// The end of a reader.
type Ended = (Version, CommitSession, Result<(), ConsumerError>);

/// The readers of all consumer groups.
pub(crate) struct Consumers<'a> {
    store: &'a Store,
    leadership: &'a Leadership,
    /// The same database with connections of its own, because each group occupies some.
    own: Option<Store>,
    readers: FuturesUnordered<BoxFuture<'a, Ended>>,
    /// Ends each reader.
    running: BTreeMap<Version, CancellationToken>,
    /// The sessions of groups without a reader. The next transaction of a group ends one that is still open.
    sessions: HashMap<String, CommitSession>,
    /// Groups that cannot continue until an operator changes them, and invalid documents.
    stopped: BTreeSet<Version>,
}

impl<'a> Consumers<'a> {
    pub(crate) fn new(store: &'a Store, leadership: &'a Leadership) -> Self {
        let (readers, running, sessions) = (FuturesUnordered::new(), BTreeMap::new(), HashMap::new());
        Self { store, leadership, own: None, readers, running, sessions, stopped: BTreeSet::new() }
    }

    /// Makes messages jobs until a stop is requested. The stop waits for the transactions. If the lease is lost, this is dropped: the next
    /// leader continues at the stored positions.
    pub(crate) async fn run(&mut self, shutdown: &mut Shutdown) {
        let mut search = tokio::time::interval(SEARCH_EVERY);
        search.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = shutdown.requested() => break,
                _ = search.tick() => {
                    if let Err(error) = self.search().await {
                        tracing::warn!(error = chain(&error), "cannot read the consumer groups; retrying");
                    }
                }
                Some((version, session, ended)) = self.readers.next() => {
                    self.sessions.insert(version.0.clone(), session);
                    self.ended(version, ended).await;
                }
            }
        }
        self.running.values().for_each(CancellationToken::cancel);
        while self.readers.next().await.is_some() {}
    }

    /// Begins the readers of new and changed groups, and ends those of removed and changed ones.
    async fn search(&mut self) -> Result<(), StoreError> {
        let (mut found, mut invalid) = (BTreeMap::new(), BTreeSet::new());
        for (name, group) in self.store.consumers().list().await? {
            match group {
                Ok(group) => _ = found.insert((name, group.revision, group.created_at), group),
                Err(problem) => {
                    let version = (name, i64::MIN, None);
                    if !self.stopped.contains(&version) {
                        tracing::warn!(consumer = version.0, %problem, "a consumer group is not valid; declare it again");
                    }
                    invalid.insert(version);
                }
            }
        }
        self.stopped.retain(|version| found.contains_key(version));
        self.stopped.extend(invalid);
        self.running.iter().filter(|(version, _)| !found.contains_key(*version)).for_each(|(_, end)| end.cancel());
        if !self.leadership.is_trusted() {
            return Ok(());
        }
        for (version, group) in found {
            if self.running.contains_key(&version) || self.stopped.contains(&version) {
                continue;
            }
            let end = CancellationToken::new();
            self.running.insert(version.clone(), end.clone());
            let session = self.sessions.remove(&version.0).unwrap_or_default();
            let reader = Reader { store: self.own_store(), leadership: self.leadership, group, end, moved_at: Monotonic::now() };
            self.readers.push(reader.run(session).map(|(session, ended)| (version, session, ended)).boxed());
        }
        Ok(())
    }

    /// The store of all readers. It is made for the first group.
    fn own_store(&mut self) -> Store {
        if self.own.is_none() {
            match self.store.with_connections("recruiter-consumers", CONNECTIONS) {
                Ok(own) => self.own = Some(own),
                Err(error) => tracing::warn!(error = chain(&error), "consumer groups share the connections of the recruiter"),
            }
        }
        self.own.clone().unwrap_or_else(|| self.store.clone())
    }

    /// A reader has ended: the next search begins another one, unless the group cannot continue.
    async fn ended(&mut self, version: Version, ended: Result<(), ConsumerError>) {
        self.running.remove(&version);
        let error = match ended {
            Ok(()) => return,
            Err(ConsumerError::Store(error) | ConsumerError::Subscribe(SubscribeError::Store(error)))
                if error.is_transient() || error.is_temporary() =>
            {
                tracing::warn!(consumer = version.0, error = chain(&error), "cannot make messages jobs; retrying");
                return;
            }
            Err(error) => error,
        };
        tracing::error!(
            consumer = version.0,
            error = chain(&error),
            "a consumer group has stopped: mend its job with `recruiter consumers set`, or continue without the messages that are lost with `recruiter consumers reset`"
        );
        if let Err(error) = self.store.note_consumer_problem(&version.0, version.1, &chain(&error)).await {
            tracing::debug!(error = chain(&error), "the problem of a consumer group is not noted");
        }
        self.stopped.insert(version);
    }
}

struct Reader<'a> {
    store: Store,
    leadership: &'a Leadership,
    group: ConsumerGroup,
    end: CancellationToken,
    /// When the position was moved.
    moved_at: Monotonic,
}

impl Reader<'_> {
    async fn run(mut self, mut session: CommitSession) -> (CommitSession, Result<(), ConsumerError>) {
        let ended = self.read(&mut session).await;
        (session, ended)
    }

    /// Makes messages jobs until the group has changed.
    async fn read(&mut self, session: &mut CommitSession) -> Result<(), ConsumerError> {
        let from = From::After(self.group.position.clone());
        let mut messages = self.store.subscribe_to([Pattern::everything()], from).await?;
        loop {
            let mut arrived = vec![tokio::select! {
                () = self.end.cancelled() => return Ok(()),
                arrival = messages.next_arrival() => arrival,
            }];
            while arrived.len() < BATCH
                && let Some(more) = messages.next_arrival().now_or_never()
            {
                arrived.push(more);
            }
            let (mut readable, mut last, mut problem) = (Vec::with_capacity(arrived.len()), None, None);
            for arrival in arrived {
                match arrival {
                    Ok(Arrival::Message(message)) => {
                        last = Some(message.position.clone());
                        if self.group.patterns.iter().any(|pattern| pattern.matches(&message.topic)) {
                            readable.push(message);
                        }
                    }
                    Ok(Arrival::Idle(position)) => last = Some(position),
                    Err(error) => problem = Some(error),
                }
            }
            if !self.leadership.is_trusted() || !self.handle(session, readable, last).await? {
                return Ok(());
            }
            if let Some(problem) = problem {
                return Err(problem.into());
            }
        }
    }

    /// Makes these messages jobs, or moves the position now and then if there are none. Returns whether the group was as it was read.
    async fn handle(&mut self, session: &mut CommitSession, messages: Vec<Message>, last: Option<Position>) -> Result<bool, ConsumerError> {
        if !messages.is_empty() {
            self.moved_at = Monotonic::now();
            return self.store.forward_to_consumer(session, &mut self.group, messages).await;
        }
        match last {
            Some(last) if self.moved_at.elapsed() >= PASS_EVERY => {
                self.moved_at = Monotonic::now();
                Ok(self.store.pass_consumer(&mut self.group, last).await?)
            }
            Some(_) | None => Ok(true),
        }
    }
}
