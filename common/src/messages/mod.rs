//! Messages for applications: publish to topics, subscribe with patterns.
//!
//! Each subscriber gets every message once, in one order that is the same for all subscribers: the order in which MongoDB commits. A reader
//! of numbers or of a capped collection can overlook a message: one process takes a number, another one takes the next number and inserts
//! first, and a reader that has seen the second never looks for the first again. The times that MongoDB fills in at an insert have the same
//! gap, and for a capped collection with concurrent writers MongoDB does not promise any order. So a subscriber reads a change stream over
//! the ordinary collection `messages`: it has what a majority has, in the order of the oplog, and continues after a lost connection or a
//! failover exactly where it was.
//!
//! The history of the messages is the oplog. A position that it no longer holds is a typed error ([`SubscribeError::HistoryLost`]). The
//! documents themselves are only for people to look at. MongoDB deletes them after [`KEPT_FOR`].
//!
//! Messages that are published together are one document, an envelope. So a change stream handles hundreds of messages as fast as one.

pub(crate) mod log;
mod stream;

use std::time::Duration;

use backon::{ConstantBuilder, Retryable as _};
use bson::{Bson, Document, doc, oid::ObjectId};
use chrono::TimeDelta;
use serde::{Serialize, de::DeserializeOwned};

pub use self::stream::{Arrival, From, Messages, Position, SubscribeError};
use crate::{
    base::{Instant, InvalidTopic, Patience, chain, json::bson_of, of_bson, pause, topics::check_topic},
    mongo::{Client, Store, StoreError, cut},
};

/// Maximum size of the body of a message, in bytes of BSON.
pub const LARGEST_MESSAGE: usize = 1024 * 1024;
/// Maximum number of messages in one envelope.
const ENVELOPE: usize = 1_000;
/// Maximum size of an envelope with more than one message. A change stream cannot deliver more than 16 MiB.
const ENVELOPE_BYTES: usize = 4 * 1024 * 1024;
/// How long MongoDB keeps the documents.
pub const KEPT_FOR: Duration = Duration::from_secs(3_600);
/// How long a message is sent again while MongoDB does not acknowledge it: longer than most failovers.
const REPEATED_FOR: Duration = Duration::from_secs(60);
/// The repetitions until then.
const AGAIN: ConstantBuilder = ConstantBuilder::new().with_delay(Duration::from_millis(100)).without_max_times();

/// A message that a subscriber has received.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub struct Message {
    /// Its topic.
    pub topic: String,
    /// Its content.
    pub body: Document,
    /// When it was published, by the estimated clock of the server.
    pub at: Option<Instant>,
    /// Where to continue after this message.
    pub position: Position,
}

impl Message {
    /// The content as a Rust type.
    ///
    /// # Errors
    /// When the content does not match the type.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T, bson::error::Error> {
        bson::deserialize_from_document(self.body.clone())
    }
}

/// Why a message was not published.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
#[non_exhaustive]
pub enum PublishError {
    /// The topic is not valid.
    #[error(transparent)]
    Topic(#[from] InvalidTopic),
    /// The content is not a document.
    #[error("a message for `{topic}` cannot be stored: {reason}")]
    Body { topic: String, reason: String },
    /// The content is too large.
    #[error(
        "a message for `{topic}` has {bytes} bytes, more than the maximum of {LARGEST_MESSAGE}: store the data elsewhere and publish a reference to it"
    )]
    TooLarge {
        topic: String,
        /// Its size in bytes of BSON.
        bytes: usize,
    },
    /// An error of MongoDB. If it is transient, it is unknown whether the message was published.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Client {
    /// Publishes a message. Returns when a majority of the replica set has it.
    ///
    /// While MongoDB is away the message is sent again for up to a minute, under the same id, so it is published once. A topic needs no
    /// preparation, and later subscribers get a message as long as the history has it.
    ///
    /// ```no_run
    /// # use recruiter_common::{Client, Pattern, messages::From};
    /// # async fn example(client: Client) -> Result<(), Box<dyn std::error::Error>> {
    /// let mut news = client.subscribe_to([Pattern::new("news.sports.*")?], From::Now).await?;
    /// client.publish_message("news.sports.ski", &bson::doc! { "title": "Snow" }).await?;
    /// let message = news.next().await?;
    /// println!("{}: {}", message.topic, message.body);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`PublishError`].
    pub async fn publish_message(&self, topic: &str, body: &impl Serialize) -> Result<(), PublishError> {
        self.publish_messages([(topic, body)]).await
    }

    /// Publishes messages in this order. All of them are checked before the first is sent. Those that fit into one document (1,000 messages
    /// and 4 MiB) are published all or none.
    ///
    /// # Errors
    /// [`PublishError`]. The messages of earlier documents are published.
    pub async fn publish_messages<T: AsRef<str>, B: Serialize>(
        &self,
        messages: impl IntoIterator<Item = (T, B)>,
    ) -> Result<(), PublishError> {
        let store = self.store();
        let messages = messages.into_iter().map(|(topic, body)| stored(topic.as_ref(), &body)).collect::<Result<Vec<_>, _>>()?;
        if messages.is_empty() {
            return Ok(());
        }
        store.prepare_messages().await?;
        self.fresh_clock().await?;
        for envelope in cut(messages, ENVELOPE, ENVELOPE_BYTES, |(_, bytes)| *bytes) {
            let now = self.now();
            let messages: Vec<Document> = envelope.into_iter().map(|(message, _)| message).collect();
            let document = doc! {
                "_id": ObjectId::new(),
                "at": now,
                "expires_at": now + TimeDelta::from_std(KEPT_FOR).unwrap_or_default(),
                "messages": messages,
            };
            store.publish_envelope(document).await?;
        }
        Ok(())
    }
}

impl Store {
    async fn publish_envelope(&self, document: Document) -> Result<(), StoreError> {
        let patience = Patience::new(REPEATED_FOR);
        let inserted = (|| self.insert_envelope(document.clone()))
            .retry(AGAIN)
            .sleep(pause)
            .when(|error| error.may_pass() && !patience.is_over())
            .notify(|error, _| tracing::debug!(error = chain(error), "a message may not have arrived; sending it again"));
        match inserted.await {
            // An earlier attempt, whose reply was lost, has inserted it.
            Err(error) if error.is_duplicate() => Ok(()),
            other => other,
        }
    }
}

/// A checked message in its stored form, and its size.
fn stored(topic: &str, body: &impl Serialize) -> Result<(Document, usize), PublishError> {
    check_topic(topic)?;
    let refused = |reason: String| PublishError::Body { topic: topic.into(), reason };
    let body = bson_of(body).map_err(|error| refused(error.to_string()))?;
    let kind = body.element_type();
    let Bson::Document(body) = body else { return Err(refused(format!("it must be a struct or a map, not {kind:?}"))) };
    let bytes = body.to_vec().map_err(|error| refused(of_bson(&error)))?.len();
    if bytes > LARGEST_MESSAGE {
        return Err(PublishError::TooLarge { topic: topic.into(), bytes });
    }
    Ok((doc! { "topic": topic, "body": body }, bytes + topic.len() + 64))
}
