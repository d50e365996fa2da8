//! Consumer groups: messages become jobs.
//!
//! The workers of a consumer group share the messages of some topics: each message becomes a job, which one worker runs. So a message is
//! acknowledged by the end of its job, is redelivered by the retry policy or after the death of a worker, and ends in the archive.
//!
//! The document of a group in `consumers` has the position up to which messages have become jobs. The leading recruiter reads the messages
//! after it, and inserts their jobs and moves the position in one transaction, if the position is still the one that it has read. So each
//! message becomes exactly one job, whoever leads and whatever dies. The history is MongoDB's oplog: a group whose position it no longer
//! holds stops with a problem, and goes on after [`reset`].

use bson::{Bson, Document, doc};

use crate::{
    enqueue::NewJob,
    instant::Instant,
    messages::{From, Message, Position, SubscribeError},
    names::check_name,
    schedules::{job_of_template, template_of_job},
    store::{CommitSession, Store, StoreError, cut},
    topics::{InvalidTopic, Pattern},
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
    /// How many have.
    pub forwarded: i64,
    /// Why it has stopped.
    pub problem: Option<String>,
    /// Changes with each change of the definition.
    pub revision: i64,
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

/// Declares a consumer group, or changes its topics and its job. A new group gets the messages from `from` on, which is now by default. A
/// known group continues where it is, unless `from` is given.
///
/// ```no_run
/// # use recruiter_common::{NewJob, Pattern, Store, consumers};
/// # async fn example(store: Store) -> Result<(), Box<dyn std::error::Error>> {
/// let bill = NewJob::of_class("Bill", bson::doc! {}).in_group("billing");
/// consumers::declare(&store, "billing", [Pattern::new("orders.*")?], bill, None).await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`ConsumerError`]. The job must not have an id, a date, a unique key or items.
pub async fn declare(
    store: &Store,
    name: &str,
    patterns: impl IntoIterator<Item = Pattern>,
    job: NewJob,
    from: Option<From>,
) -> Result<(), ConsumerError> {
    check_name(name).map_err(ConsumerError::Name)?;
    let topics: Vec<Bson> = patterns.into_iter().map(|pattern| pattern.to_string().into()).collect();
    if topics.is_empty() {
        return Err(SubscribeError::NoTopic.into());
    }
    let template = template_of_job(job).map_err(|problem| ConsumerError::Job(problem.to_string()))?;
    if template.contains_key("items") {
        return Err(ConsumerError::Job("a bundle has items of its own".into()));
    }
    store.fresh_clock().await?;
    let is_moved = from.is_some();
    let position = store.position_of_messages(from.unwrap_or(From::Now)).await?.to_string();
    Ok(store.put_consumer(name, doc! { "topics": topics, "job": template }, &position, is_moved).await?)
}

/// All consumer groups, by name. Invalid ones are listed with their problem.
///
/// # Errors
/// When MongoDB cannot be used.
pub async fn list(store: &Store) -> Result<Vec<(String, Result<ConsumerGroup, InvalidConsumer>)>, StoreError> {
    let found = store.consumers().await?;
    Ok(found.iter().map(|document| (name_of(document), ConsumerGroup::try_from(document))).collect())
}

/// Moves a consumer group to another position: it gets the messages from there on, also those that it has had before. A group that has
/// stopped goes on.
///
/// # Errors
/// When there is no such group, or the messages cannot be read from there.
pub async fn reset(store: &Store, name: &str, from: From) -> Result<(), ConsumerError> {
    let position = store.position_of_messages(from).await?.to_string();
    if store.move_consumer(name, &position).await? { Ok(()) } else { Err(ConsumerError::Unknown(name.into())) }
}

/// Removes a consumer group. Its jobs stay. Returns whether there was one.
///
/// # Errors
/// When MongoDB cannot be used.
pub async fn remove(store: &Store, name: &str) -> Result<bool, StoreError> {
    store.remove_consumer(name).await
}

/// Makes these messages, which follow the group's position, jobs: those that fit into one transaction together. Moves the position of
/// `group`. Returns false if the group is no longer as it was read; nothing more is enqueued then.
///
/// # Errors
/// When a job is invalid, or MongoDB cannot be used. After a transient error the outcome is unknown: read the group again.
pub async fn forward(
    store: &Store,
    session: &mut CommitSession,
    group: &mut ConsumerGroup,
    messages: Vec<Message>,
) -> Result<bool, ConsumerError> {
    let now = store.now();
    let jobs = messages.into_iter().map(|message| forwarded(&group.job, message, now)).collect::<Result<Vec<_>, _>>()?;
    for some in cut(jobs, TOGETHER.0, TOGETHER.1, |(_, _, bytes)| *bytes) {
        let Some(position) = some.last().map(|(position, _, _)| position.clone()) else { continue };
        let jobs: Vec<Document> = some.into_iter().map(|(_, job, _)| job).collect();
        let count = i64::try_from(jobs.len()).unwrap_or(i64::MAX);
        let (as_read, to) = ((group.position.to_string(), group.revision), position.to_string());
        if !store.forward_messages(session, &group.name, as_read, &to, jobs).await? {
            return Ok(false);
        }
        group.position = position;
        group.forwarded += count;
        store.announce_jobs([group.job.class_and_group().1]).await;
    }
    Ok(true)
}

/// The position after a message, the document of its job, and the size of its content.
fn forwarded(template: &NewJob, message: Message, now: Instant) -> Result<(Position, Document, usize), ConsumerError> {
    let bytes = message.body.to_vec().map_or(0, |body| body.len()) + message.topic.len();
    let job = template.clone().with_parameters(doc! { "topic": message.topic, "body": message.body });
    let (_, document) = job.into_document(now).map_err(|problem| ConsumerError::Job(problem.to_string()))?;
    Ok((message.position, document, bytes))
}

fn name_of(document: &Document) -> String {
    document.get_str("_id").unwrap_or("(no text)").to_owned()
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
            problem: document.get_document("problem").ok().and_then(|problem| Some(problem.get_str("text").ok()?.to_owned())),
            revision: document.get_i64("revision").map_err(|_| invalid("`revision` is not an integer of 64 bits"))?,
        })
    }
}
