//! The reader of messages, and its position.

use std::{
    fmt,
    pin::Pin,
    str::FromStr,
    task::{Context, Poll},
    time::Duration,
};

use bson::{Bson, Document, RawBsonRef, RawDocument, Timestamp, doc, oid::ObjectId};
use futures_util::Stream;
use mongodb::change_stream::event::ResumeToken;
use sha2::{Digest as _, Sha256};
use tokio::{sync::mpsc, task::JoinHandle};

use super::{
    Message,
    log::{MessageStart, MessageStream},
};
use crate::{
    base::{Instant, Pattern, chain, json::bson_of, pause},
    mongo::{Client, Store, StoreError},
};

/// Messages that wait for the application. Further ones stay in MongoDB.
const QUEUE: usize = 256;
/// Maximum length of a position in MongoDB's history, in bytes.
const LONGEST_TOKEN: usize = 16 * 1024;
/// Interval of the positions while no message arrives.
const IDLE_EVERY: Duration = Duration::from_secs(5);
/// After this time without a reply the change stream is opened again, because a dead connection cannot be distinguished from a slow one. The
/// server replies every second.
const REOPEN_AFTER: Duration = Duration::from_secs(60);
/// Pause before the change stream is opened again.
const AGAIN_AFTER: Duration = Duration::from_millis(100);

/// A place in the order of all messages: after one message and before the next. Its text form can be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Position {
    /// The change stream continues after this event.
    token: String,
    /// Of the next envelope, if it has this id, so many messages were received already.
    within: Option<(ObjectId, usize)>,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.token)?;
        match &self.within {
            Some((envelope, received)) => write!(f, "-{envelope}-{received}"),
            None => Ok(()),
        }
    }
}

/// A text that is not a position.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0:.80}` is not the position of a message")]
pub struct InvalidPosition(String);

impl FromStr for Position {
    type Err = InvalidPosition;

    fn from_str(text: &str) -> Result<Self, InvalidPosition> {
        let invalid = || InvalidPosition(text.chars().take(80).collect());
        let mut parts = text.split('-');
        let token = parts.next().filter(|token| !token.is_empty() && token.chars().all(|c| c.is_ascii_hexdigit())).ok_or_else(invalid)?;
        let within = match (parts.next(), parts.next(), parts.next()) {
            (None, None, None) => None,
            (Some(envelope), Some(received), None) => {
                Some((ObjectId::parse_str(envelope).map_err(|_| invalid())?, received.parse().map_err(|_| invalid())?))
            }
            _ => return Err(invalid()),
        };
        Ok(Self { token: token.to_owned(), within })
    }
}

impl Position {
    fn token_of(token: &ResumeToken) -> Option<String> {
        let token = bson_of(token).ok()?;
        Some(token.as_document()?.get_str("_data").ok()?.to_owned())
    }

    fn resume_token(&self) -> Result<ResumeToken, SubscribeError> {
        let token = Bson::Document(doc! { "_data": &self.token });
        bson::deserialize_from_bson(token).map_err(|_| SubscribeError::NoPosition)
    }
}

/// Where a subscriber begins.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum From {
    /// With the messages that are published from now on.
    Now,
    /// With the messages since this instant.
    Since(Instant),
    /// After a message that was received before, by this subscriber or another one.
    After(Position),
}

/// Why there are no more messages.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubscribeError {
    /// MongoDB no longer holds the messages after the position. Some may be lost for this subscriber.
    #[error(
        "MongoDB no longer holds the messages after this position: subscribe from now or from a later instant, and enlarge the oplog if subscribers are away for so long"
    )]
    HistoryLost,
    /// No topic was given.
    #[error("no topic was given: name at least one pattern, `*` for all messages")]
    NoTopic,
    /// The position is not one of this MongoDB.
    #[error("the position is not one that this MongoDB has given")]
    NoPosition,
    /// An error of MongoDB.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// What a subscriber receives.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub enum Arrival {
    /// A message.
    Message(Message),
    /// There was no message for some seconds: where to continue. A subscriber that stores this position now and then can be away for as long as
    /// the oplog reaches back, however long ago its last message was.
    Idle(Position),
}

/// A stream of messages. It ends after an error, or when it is dropped.
#[derive(Debug)]
pub struct Messages {
    queue: mpsc::Receiver<Result<Arrival, SubscribeError>>,
    reader: JoinHandle<()>,
}

impl Messages {
    /// Waits for the next message. The wait can be cancelled safely.
    ///
    /// # Errors
    /// [`SubscribeError`]. Connections and failovers are no errors: the stream continues where it was. After an error there are no more
    /// messages.
    pub async fn next(&mut self) -> Result<Message, SubscribeError> {
        loop {
            if let Arrival::Message(message) = self.next_arrival().await? {
                return Ok(message);
            }
        }
    }

    /// Like [`next`](Self::next), and also the position while no message arrives.
    ///
    /// # Errors
    /// As [`next`](Self::next).
    pub async fn next_arrival(&mut self) -> Result<Arrival, SubscribeError> {
        match self.queue.recv().await {
            Some(received) => received,
            None => std::future::pending().await,
        }
    }
}

impl Stream for Messages {
    type Item = Result<Message, SubscribeError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            return Poll::Ready(match std::task::ready!(self.queue.poll_recv(context)) {
                Some(Ok(Arrival::Message(message))) => Some(Ok(message)),
                Some(Ok(Arrival::Idle(_))) => continue,
                Some(Err(error)) => Some(Err(error)),
                None => None,
            });
        }
    }
}

impl Drop for Messages {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Client {
    /// Subscribes to the messages whose topics match one of these patterns. Each subscriber has a change stream of its own.
    ///
    /// Nothing is stored about a subscriber. To continue after a restart without a gap and without a repetition, store the
    /// [`position`](Message::position) of the last message that was handled, and begin with [`From::After`].
    ///
    /// # Errors
    /// [`SubscribeError`].
    pub async fn subscribe_to(&self, patterns: impl IntoIterator<Item = Pattern>, from: From) -> Result<Messages, SubscribeError> {
        let patterns: Vec<Pattern> = patterns.into_iter().collect();
        if patterns.is_empty() {
            return Err(SubscribeError::NoTopic);
        }
        let Opened { stream, start, within } = self.store().open_messages(&patterns, from).await?;
        let (sender, queue) = mpsc::channel(QUEUE);
        let reader = Reader { store: self.store(), patterns, start, within, to: sender, told_at: Instant::UNIX_EPOCH };
        Ok(Messages { queue, reader: tokio::spawn(reader.run(stream)) })
    }
}

impl Store {
    /// The position of a subscriber that begins there, before it has received a message.
    pub(crate) async fn position_of_messages(&self, from: From) -> Result<Position, SubscribeError> {
        let Opened { start, within, .. } = self.open_messages(&[Pattern::everything()], from).await?;
        let token = match &start {
            MessageStart::After(token) | MessageStart::AfterDrop(token) => Position::token_of(token),
            MessageStart::Now | MessageStart::At(_) => None,
        };
        Ok(Position { token: token.ok_or(SubscribeError::NoPosition)?, within })
    }

    async fn open_messages(&self, patterns: &[Pattern], from: From) -> Result<Opened, SubscribeError> {
        self.prepare_messages().await?;
        let is_after = matches!(from, From::After(_));
        let (start, within) = match from {
            From::Now => (MessageStart::Now, None),
            From::Since(at) => {
                let at = Timestamp { time: u32::try_from(at.timestamp()).unwrap_or_default(), increment: 0 };
                let position = self.message_position_at(at).await.map_err(understood)?;
                (position.map_or(MessageStart::At(at), MessageStart::After), None)
            }
            From::After(position) => (MessageStart::After(position.resume_token()?), position.within),
        };
        let stream = match self.watch_messages(patterns, start.clone()).await.map_err(understood) {
            Err(SubscribeError::Store(error)) if is_after && error.is_refusal() && !error.is_unauthorized() && !error.is_temporary() => {
                tracing::debug!(error = chain(&error), "MongoDB refuses the position of a message");
                return Err(SubscribeError::NoPosition);
            }
            other => other?,
        };
        // From here on nothing is missed.
        let start = stream.resume_token().map_or(start, MessageStart::After);
        Ok(Opened { stream, start, within })
    }
}

/// A change stream, and what a reader of it has received so far.
struct Opened {
    stream: MessageStream,
    start: MessageStart,
    within: Option<(ObjectId, usize)>,
}

/// The error of a change stream, for the application.
fn understood(error: StoreError) -> SubscribeError {
    if error.is_history_lost() { SubscribeError::HistoryLost } else { SubscribeError::Store(error) }
}

struct Reader {
    store: Store,
    patterns: Vec<Pattern>,
    /// After the last envelope that was passed on as a whole.
    start: MessageStart,
    within: Option<(ObjectId, usize)>,
    to: mpsc::Sender<Result<Arrival, SubscribeError>>,
    /// When it has passed something on.
    told_at: Instant,
}

impl Reader {
    async fn run(mut self, first: MessageStream) {
        let mut stream = Some(first);
        while !self.to.is_closed() {
            let opened = match stream.take() {
                Some(stream) => Ok(stream),
                None => self.store.watch_messages(&self.patterns, self.start.clone()).await,
            };
            let read = match opened {
                Ok(stream) => self.read(stream).await,
                Err(error) => Err(error),
            };
            match read.map_err(understood) {
                Ok(()) => {}
                Err(SubscribeError::Store(error)) if error.may_pass() => {
                    tracing::debug!(error = chain(&error), "cannot read messages; trying again");
                }
                Err(error) => {
                    let _ = self.to.send(Err(error)).await;
                    return;
                }
            }
            pause(AGAIN_AFTER).await;
        }
    }

    /// Passes messages on until the stream ends.
    async fn read(&mut self, mut stream: MessageStream) -> Result<(), StoreError> {
        while stream.is_alive() && !self.to.is_closed() {
            let Ok(read) = tokio::time::timeout(REOPEN_AFTER, stream.next_if_any()).await else {
                tracing::debug!("MongoDB has not replied for a minute; reading the messages with a new cursor");
                return Ok(());
            };
            let Some(event) = read.map_err(StoreError::of("read_messages"))? else {
                // The position follows the oplog while there are no messages.
                if let Some(token) = stream.resume_token() {
                    self.tell_idle(&token);
                    self.advance(token);
                }
                continue;
            };
            let Some(token) = token_of(&event).or_else(|| stream.resume_token()) else { continue };
            if event.get_str("operationType").is_ok_and(|operation| operation == "invalidate") {
                // The collection was dropped. The stream continues with the next one of that name.
                self.start = MessageStart::AfterDrop(token);
                return Ok(());
            }
            match event.get_document("fullDocument") {
                Ok(envelope) => self.pass_on(envelope, &token).await,
                Err(_) => tracing::warn!(
                    operation_time = ?event.get_timestamp("clusterTime").ok(),
                    "an envelope in `messages` was skipped: its `_id` is larger than 4 KiB; leave the `_id` to the driver"
                ),
            }
            self.advance(token);
            self.within = None;
        }
        Ok(())
    }

    /// Passes the position on, if nothing was for a while and the application does not lag behind.
    fn tell_idle(&mut self, token: &ResumeToken) {
        let now = self.store.now();
        if (now - self.told_at).to_std().is_ok_and(|since| since >= IDLE_EVERY)
            && let Some(token) = Position::token_of(token).filter(|token| token.len() <= LONGEST_TOKEN)
            && self.to.try_send(Ok(Arrival::Idle(Position { token, within: self.within }))).is_ok()
        {
            self.told_at = now;
        }
    }

    /// Between two envelopes. The position after one with a very large `_id` is too large for a command; the next one is not.
    fn advance(&mut self, token: ResumeToken) {
        if Position::token_of(&token).is_some_and(|token| token.len() <= LONGEST_TOKEN) {
            self.start = MessageStart::After(token);
        }
    }

    async fn pass_on(&mut self, envelope: &RawDocument, token: &ResumeToken) {
        let id = key_of(envelope);
        let at = envelope.get_datetime("at").ok().map(|at| at.to_chrono());
        let Ok(messages) = envelope.get_array("messages") else { return };
        let messages: Vec<Option<Document>> = messages.into_iter().map(decoded).collect();
        let received = self.within.filter(|(envelope, _)| *envelope == id).map_or(0, |(_, received)| received);
        let before = match &self.start {
            MessageStart::After(token) => Position::token_of(token),
            MessageStart::Now | MessageStart::At(_) | MessageStart::AfterDrop(_) => None,
        };
        let (after, last) = (Position::token_of(token).unwrap_or_default(), messages.len().saturating_sub(1));
        for (index, message) in messages.into_iter().enumerate().skip(received) {
            let Some(mut message) = message else {
                tracing::warn!(envelope = %id, index, "a message cannot be decoded and was skipped");
                continue;
            };
            let (Some(Bson::String(topic)), Some(Bson::Document(body))) = (message.remove("topic"), message.remove("body")) else {
                continue;
            };
            if !self.patterns.iter().any(|pattern| pattern.matches(&topic)) {
                continue;
            }
            let position = match &before {
                Some(before) if index < last => Position { token: before.clone(), within: Some((id, index + 1)) },
                _ => Position { token: after.clone(), within: None },
            };
            // Without a receiver the task ends soon.
            let _ = self.to.send(Ok(Arrival::Message(Message { topic, body, at, position }))).await;
            self.told_at = self.store.now();
        }
    }
}

/// Names an envelope in a position: its id, or, if another language has given it an id of another type, a hash of the whole envelope.
fn key_of(envelope: &RawDocument) -> ObjectId {
    envelope.get_object_id("_id").unwrap_or_else(|_| {
        let hash = Sha256::digest(envelope.as_bytes());
        let mut key = [0; 12];
        key.copy_from_slice(&hash[..12]);
        ObjectId::from_bytes(key)
    })
}

/// The position after an event.
fn token_of(event: &RawDocument) -> Option<ResumeToken> {
    let token = Document::try_from(event.get_document("_id").ok()?).ok()?;
    bson::deserialize_from_document(token).ok()
}

/// A message, unless it has invalid bytes or is no document.
fn decoded(message: Result<RawBsonRef<'_>, bson::error::Error>) -> Option<Document> {
    Document::try_from(message.ok()?.as_document()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_is_a_text() {
        for text in ["8265A1", "8265A1-65a1b2c3d4e5f60718293a4b-7"] {
            assert_eq!(text.parse::<Position>().expect("a position").to_string(), text);
        }
        for text in ["", "x", "82-", "82-65a1b2c3d4e5f60718293a4b", "82-65a1b2c3d4e5f60718293a4b--1", "82-65a1b2c3d4e5f60718293a4b-1-2"] {
            assert!(text.parse::<Position>().is_err(), "{text}");
        }
    }
}
