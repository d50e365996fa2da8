//! The duty of consumer groups: makes each message of their topics a job. It runs beside the rounds, and never delays them.
//!
//! Each group has a reader of its own, which begins at the group's position. When the group is changed, or another leader has moved its
//! position, the reader ends, and the next search begins another one. A reader gets the messages of all topics and leaves out those of
//! others, because a change stream can only continue with the filter that it had before: the topics of a group may change.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use futures_util::{FutureExt as _, StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use recruiter_common::{
    consumers::{self, ConsumerError, ConsumerGroup},
    messages::{From, SubscribeError},
    shutdown::Shutdown,
    store::{CommitSession, Store, StoreError},
    telemetry::chain,
    topics::Pattern,
};
use tokio_util::sync::CancellationToken;

use super::lease::Leadership;

/// Interval between two searches for new, changed and removed groups.
const SEARCH_EVERY: Duration = Duration::from_secs(3);
/// Maximum number of messages that are handled together.
const BATCH: usize = 1_000;

/// The name and the revision of a group.
type Version = (String, i64);

/// The readers of all consumer groups.
pub(crate) struct Consumers<'a> {
    store: &'a Store,
    leadership: &'a Leadership,
    readers: FuturesUnordered<BoxFuture<'a, (Version, Result<(), ConsumerError>)>>,
    /// What ends each reader.
    running: BTreeMap<Version, CancellationToken>,
    /// Groups that cannot continue until somebody changes them, and invalid documents.
    stopped: BTreeSet<Version>,
}

impl<'a> Consumers<'a> {
    pub(crate) fn new(store: &'a Store, leadership: &'a Leadership) -> Self {
        Self { store, leadership, readers: FuturesUnordered::new(), running: BTreeMap::new(), stopped: BTreeSet::new() }
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
                Some((version, ended)) = self.readers.next() => self.ended(version, ended).await,
            }
        }
        self.running.values().for_each(CancellationToken::cancel);
        while self.readers.next().await.is_some() {}
    }

    /// Begins the readers of new and changed groups, and ends those of removed and changed ones.
    async fn search(&mut self) -> Result<(), StoreError> {
        let (mut found, mut invalid) = (BTreeMap::new(), BTreeSet::new());
        for (name, group) in consumers::list(self.store).await? {
            match group {
                Ok(group) => _ = found.insert((name, group.revision), group),
                Err(problem) => {
                    let version = (name, i64::MIN);
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
            let reader = Reader { store: self.store, leadership: self.leadership, group, end };
            self.readers.push(reader.run().map(|ended| (version, ended)).boxed());
        }
        Ok(())
    }

    /// A reader has ended: the next search begins another one, unless the group cannot continue.
    async fn ended(&mut self, version: Version, ended: Result<(), ConsumerError>) {
        self.running.remove(&version);
        let error = match ended {
            Ok(()) => return,
            Err(ConsumerError::Store(error) | ConsumerError::Subscribe(SubscribeError::Store(error))) if error.is_transient() => {
                tracing::warn!(consumer = version.0, error = chain(&error), "cannot make messages jobs; retrying");
                return;
            }
            Err(error) => error,
        };
        tracing::error!(
            consumer = version.0,
            error = chain(&error),
            "a consumer group has stopped; `recruiter consumers reset` continues from now on, and with --since from an earlier instant"
        );
        if let Err(error) = self.store.note_consumer_problem(&version.0, version.1, &chain(&error)).await {
            tracing::debug!(error = chain(&error), "the problem of a consumer group is not noted");
        }
        self.stopped.insert(version);
    }
}

struct Reader<'a> {
    store: &'a Store,
    leadership: &'a Leadership,
    group: ConsumerGroup,
    end: CancellationToken,
}

impl Reader<'_> {
    /// Makes messages jobs until the group has changed.
    async fn run(mut self) -> Result<(), ConsumerError> {
        let from = From::After(self.group.position.clone());
        let mut messages = self.store.subscribe_to([Pattern::everything()], from).await?.ready_chunks(BATCH);
        let mut session = CommitSession::default();
        loop {
            let batch = tokio::select! {
                () = self.end.cancelled() => return Ok(()),
                batch = messages.next() => batch.unwrap_or_default(),
            };
            let (mut readable, mut problem) = (Vec::with_capacity(batch.len()), None);
            for received in batch {
                match received {
                    Ok(message) if self.group.patterns.iter().any(|pattern| pattern.matches(&message.topic)) => readable.push(message),
                    Ok(_) => {}
                    Err(error) => problem = Some(error),
                }
            }
            if !self.leadership.is_trusted() || !consumers::forward(self.store, &mut session, &mut self.group, readable).await? {
                return Ok(());
            }
            if let Some(problem) = problem {
                return Err(problem.into());
            }
        }
    }
}
