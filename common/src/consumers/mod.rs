//! Consumer groups: messages become jobs.
//!
//! The workers of a consumer group share the messages of some topics: each message becomes a job, which one worker runs. So a message is
//! acknowledged by the end of its job, and is delivered again if the retry policy says so.
//!
//! The document of a group in `consumers` has the position up to which messages have become jobs. The leading recruiter reads the messages
//! after it, and inserts their jobs and moves the position in one transaction, if the position is still the one that it has read. So each
//! message becomes exactly one job, also if a recruiter dies or two of them lead. The history is MongoDB's oplog: a group whose position it
//! no longer holds stops with a problem, and goes on after [`Consumers::reset`]. The leader moves the position also while there is no message, so that
//! a group falls behind only while no recruiter leads.

pub(crate) mod operations;

pub use self::operations::MOST_CONSUMERS;
use bson::{Bson, Document, RawDocument, doc};

use crate::{
    base::{Instant, InvalidTopic, Pattern, chain, check_trimmed_name},
    enqueue::NewJob,
    messages::{From, Message, Position, SubscribeError},
    mongo::{Client, CommitSession, Store, StoreError, cut, readable},
    schedules::template::{job_of as job_of_template, template_of as template_of_job},
};

/// Maximum number of jobs in one transaction, and of bytes of their messages.
const TOGETHER: (usize, usize) = (1_000, 4 * 1024 * 1024);

/// A consumer group, as it is stored.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ConsumerGroup {
    /// Its name.
    pub name: String,
    /// The topics of its messages.
    pub patterns: Vec<Pattern>,
    /// The job of a message. Its parameters also get `topic` and `body`.
    pub job: NewJob,
    /// The messages up to here have become jobs.
    pub position: Position,
    /// How many messages have become jobs.
    pub forwarded: i64,
    /// How many messages could not become jobs, because they are too large.
    pub skipped: i64,
    /// Why it has stopped.
    pub problem: Option<String>,
    /// Changes with each change of the definition.
    pub revision: i64,
    /// When it was declared for the first time.
    pub created_at: Option<Instant>,
}

/// Why a consumer group was not declared or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConsumerError {
    /// The name is not valid.
    #[error("the name of a consumer group {0}")]
    Name(String),
    /// The job cannot be the job of each message.
    #[error("not the job of a consumer group: {0}")]
    Job(String),
    /// There are as many groups as there may be.
    #[error("there are {MOST_CONSUMERS} consumer groups already: remove one, or let one group have more topics")]
    TooMany,
    /// There is no such group.
    #[error("there is no consumer group `{0}`")]
    Unknown(String),
    /// The messages cannot be read from there.
    #[error(transparent)]
    Subscribe(#[from] SubscribeError),
    /// An error of MongoDB.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A document that is not a consumer group. One sentence, for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidConsumer(String);

impl Client {
    /// The consumer groups: declare, list, reset and remove them.
    pub fn consumers(&self) -> Consumers {
        Consumers(self.store())
    }
}

/// The consumer groups: [`Client::consumers`].
#[derive(Clone, Debug)]
pub struct Consumers(Store);

impl Consumers {
    /// Declares a consumer group, or changes its topics and its job. A new group gets the messages from `from` on. A known group continues where
    /// it is: [`reset`](Self::reset) moves it.
    ///
    /// ```no_run
    /// # use recruiter_common::{Client, NewJob, Pattern, messages::From};
    /// # async fn example(client: Client) -> Result<(), Box<dyn std::error::Error>> {
    /// let bill = NewJob::of_class("Bill", bson::doc! {}).in_group("billing");
    /// client.consumers().declare("billing", [Pattern::new("orders.*")?], bill, From::Now).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ConsumerError`]. The job must not have an id, a date, a unique key or items.
    pub async fn declare(
        &self,
        name: &str,
        patterns: impl IntoIterator<Item = Pattern>,
        job: NewJob,
        from: From,
    ) -> Result<(), ConsumerError> {
        check_trimmed_name(name).map_err(ConsumerError::Name)?;
        let topics: Vec<Bson> = patterns.into_iter().map(|pattern| pattern.to_string().into()).collect();
        if topics.is_empty() {
            return Err(SubscribeError::NoTopic.into());
        }
        let template = template_of_job(job).map_err(|problem| ConsumerError::Job(problem.to_string()))?;
        if template.contains_key("items") {
            return Err(ConsumerError::Job("a bundle has items of its own".into()));
        }
        self.0.fresh_clock().await?;
        let position = self.0.position_of_messages(from).await?.to_string();
        let known = self.0.stored_consumers().await?;
        if known.len() >= MOST_CONSUMERS as usize && known.iter().all(|group| name_of(group) != name) {
            return Err(ConsumerError::TooMany);
        }
        Ok(self.0.put_consumer(name, doc! { "topics": topics, "job": template }, &position).await?)
    }

    /// All consumer groups, by name. Invalid ones are listed with their problem.
    ///
    /// # Errors
    /// When MongoDB cannot be used.
    pub async fn list(&self) -> Result<Vec<(String, Result<ConsumerGroup, InvalidConsumer>)>, StoreError> {
        let found = self.0.stored_consumers().await?;
        Ok(found.iter().map(|stored| (name_of(stored), decoded(stored))).collect())
    }

    /// Moves a consumer group to another position: it gets the messages from there on, also those that it has had before. A group that has
    /// stopped goes on.
    ///
    /// # Errors
    /// When there is no such group, or the messages cannot be read from there.
    pub async fn reset(&self, name: &str, from: From) -> Result<(), ConsumerError> {
        let position = self.0.position_of_messages(from).await?.to_string();
        if self.0.move_consumer(name, &position).await? { Ok(()) } else { Err(ConsumerError::Unknown(name.into())) }
    }

    /// Removes a consumer group. Its jobs stay. Returns whether there was one.
    ///
    /// # Errors
    /// When MongoDB cannot be used.
    pub async fn remove(&self, name: &str) -> Result<bool, StoreError> {
        self.0.if_set_up(self.0.remove_consumer(name)).await
    }
}

impl Store {
    /// Makes these messages, which follow the group's position, jobs: those that fit into one transaction together. Moves the position of
    /// `group`. Returns false if the group is no longer as it was read; nothing more is enqueued then.
    ///
    /// # Errors
    /// When a job is invalid, or MongoDB cannot be used. After a transient error the outcome is unknown: read the group again.
    pub async fn forward_to_consumer(
        &self,
        session: &mut CommitSession,
        group: &mut ConsumerGroup,
        messages: Vec<Message>,
    ) -> Result<bool, ConsumerError> {
        // In the order of the messages, so that jobs in a line keep it.
        let now = self.clock.now_in_order();
        let jobs = messages.into_iter().map(|message| forwarded(group, message, now)).collect();
        for some in cut(jobs, TOGETHER.0, TOGETHER.1, |forwarded: &Forwarded| forwarded.bytes) {
            let Some(position) = some.last().map(|forwarded| forwarded.position.clone()) else { continue };
            let all = some.len();
            let jobs: Vec<Document> = some.into_iter().filter_map(|forwarded| forwarded.job).collect();
            let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
            let (forwarded, skipped) = (count(jobs.len()), count(all - jobs.len()));
            if !self.forward_messages(session, &group.name, group.as_read(), &position.to_string(), jobs, skipped).await? {
                return Ok(false);
            }
            group.position = position;
            group.forwarded += forwarded;
            group.skipped += skipped;
            self.announce_jobs([group.job.class_and_group().1]).await;
            // Documents of some MiB were made and sent.
            tokio::task::yield_now().await;
        }
        Ok(true)
    }

    /// Moves the position past messages of other topics, and past an idle time. Moves the position of `group`. Returns false if the group is no
    /// longer as it was read.
    pub async fn pass_consumer(&self, group: &mut ConsumerGroup, to: Position) -> Result<bool, StoreError> {
        let is_passed = self.pass_messages(&group.name, group.as_read(), &to.to_string()).await?;
        if is_passed {
            group.position = to;
        }
        Ok(is_passed)
    }
}

/// A message, and its job.
struct Forwarded {
    /// The position after the message.
    position: Position,
    /// `None` if there can be no such job.
    job: Option<Document>,
    /// The size of the job.
    bytes: usize,
}

fn forwarded(group: &ConsumerGroup, message: Message, now: Instant) -> Forwarded {
    let Message { topic, body, position, .. } = message;
    let job = group.job.clone().with_parameters(doc! { "topic": &topic, "body": body });
    match job.into_document(now) {
        Ok((_, job)) => Forwarded { position, bytes: job.to_vec().map_or(0, |job| job.len()), job: Some(job) },
        Err(problem) => {
            // One message must not stop the others.
            tracing::error!(consumer = group.name, topic, %position, error = chain(&problem), "a message cannot become a job; skipping it");
            Forwarded { position, bytes: 0, job: None }
        }
    }
}

impl ConsumerGroup {
    fn as_read(&self) -> (String, i64) {
        (self.position.to_string(), self.revision)
    }
}

fn name_of(stored: &RawDocument) -> String {
    readable(stored).get_str("_id").unwrap_or("(no text)").to_owned()
}

/// A text that is not UTF-8 makes a group invalid, because its jobs would get another text.
fn decoded(stored: &RawDocument) -> Result<ConsumerGroup, InvalidConsumer> {
    let document = Document::try_from(stored).map_err(|error| InvalidConsumer(format!("it cannot be decoded ({error})")))?;
    ConsumerGroup::try_from(&document)
}

impl TryFrom<&Document> for ConsumerGroup {
    type Error = InvalidConsumer;

    fn try_from(document: &Document) -> Result<Self, InvalidConsumer> {
        let invalid = |problem: &str| InvalidConsumer(problem.to_owned());
        let topics = document.get_array("topics").map_err(|_| invalid("`topics` is not an array"))?;
        let pattern = |topic: &Bson| Pattern::new(topic.as_str().unwrap_or_default());
        let patterns: Result<Vec<Pattern>, InvalidTopic> = topics.iter().map(pattern).collect();
        let job = document.get_document("job").map_err(|_| invalid("`job` is not a document"))?;
        let position = document.get_str("position").map_err(|_| invalid("`position` is not a text"))?;
        Ok(Self {
            name: document.get_str("_id").map_err(|_| invalid("the name is not a text"))?.to_owned(),
            patterns: patterns.map_err(|problem| InvalidConsumer(problem.to_string()))?,
            job: job_of_template(job).map_err(|problem| InvalidConsumer(problem.to_string()))?,
            position: position.parse().map_err(|_| invalid("`position` is not the position of a message"))?,
            forwarded: document.get_i64("forwarded").unwrap_or_default(),
            skipped: document.get_i64("skipped").unwrap_or_default(),
            created_at: document.get_datetime("created_at").ok().map(|at| at.to_chrono()),
            problem: document.get_document("problem").ok().and_then(|problem| Some(problem.get_str("text").ok()?.to_owned())),
            revision: document.get_i64("revision").map_err(|_| invalid("`revision` is not an integer of 64 bits"))?,
        })
    }
}
