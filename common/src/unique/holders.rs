//! Jobs with a unique key.
//!
//! Three unique indexes on `scheduled` enforce the keys for every enqueuer: `unique` until the job is finished, `unique_while_waiting`
//! until its first start, and `unique_after` for the one job that waits for the end of the job with that `unique` key. A period is a
//! document in `unique_periods`, written in the transaction that inserts the job.
//!
//! The content of a waiting unique job can be replaced. Each replacement counts in `replaced`, and a start, a cancellation and an expiry
//! repeat the count that they have read. So no worker runs a content that was replaced before the start.
//!
//! A job with `unique_after` is due in the year 9999. The process that archives the job with the key gives the key to its successor and makes
//! it due, with one update. While the other job exists, the unique index refuses this update. A cleaner repeats it for successors whose
//! predecessor is gone.

use std::collections::HashMap;

use bson::{Bson, Document, RawDocumentBuf, doc};
use chrono::TimeDelta;
use futures_util::FutureExt as _;
use mongodb::{ClientSession, error::Result as DriverResult, options::ReadConcern};

use super::UniqueScope;
use crate::{
    base::{DUE_MS, Instant, JobId, chain, integer},
    hints::{EVERY_GROUP, Hint},
    job::settings::IN_JOBS,
    mongo::{
        CommitSession, Feature, Readable, Store, StoreError, UNIQUE, UNIQUE_AFTER, UNIQUE_WHILE_WAITING, call, commit,
        error::code,
        id_of, met_by, never_started, readable,
        readable::is_first,
        update::{increased, literally},
        write_in,
    },
};

/// Maximum number of keys in one query.
const KEYS_PER_QUERY: usize = 1_000;
/// Maximum number of waiting successors that one call of the sweep examines.
const SUCCESSORS: i64 = 10_000;
/// The fields that a replacement leaves as they are: what identifies the job, and what has happened to it.
const KEPT: [&str; 8] = ["_id", "done", "created_at", "locked", "attempts", "once", "recovered_from", "replaced"];
/// The fields, besides settings, that a replacement removes if the new job does not have them.
const OPTIONAL: [&str; 2] = ["item_outcomes", "expires_at"];

/// A job that has a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) job: JobId,
    pub(crate) is_locked: bool,
    pub(crate) has_started: bool,
}

/// A key, and the field that has it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Taken {
    pub(crate) field: &'static str,
    pub(crate) key: String,
}

impl UniqueScope {
    /// The field of a job that has the key.
    pub(crate) fn field(self) -> &'static str {
        match self {
            Self::UntilFinished => UNIQUE,
            Self::WhileWaiting => UNIQUE_WHILE_WAITING,
            Self::For(_) => "unique_for_period",
        }
    }
}

fn holder_of(job: &Document) -> Option<Holder> {
    let attempts = integer(job.get("attempts")).unwrap_or(0);
    Some(Holder { job: id_of(job)?, is_locked: job.get_bool("locked").unwrap_or(false), has_started: attempts > 0 })
}

/// The new date of a postponed job: that of the new job, but at most this time after the existing one was enqueued, and never earlier than
/// before.
fn postponed(new: &Document, at_most: TimeDelta) -> Document {
    let enqueued = doc! { "$ifNull": ["$created_at", { "$toDate": "$_id" }] };
    let latest = doc! { "$add": [enqueued, at_most.num_milliseconds()] };
    doc! { "$max": ["$scheduled_at", { "$min": [new.get("scheduled_at").cloned().unwrap_or_default(), latest] }] }
}

/// The update that gives a waiting job the content of a new one.
fn replacement(new: &Document) -> Vec<Document> {
    let fields = OPTIONAL.into_iter().chain(IN_JOBS.keys().map(String::as_str));
    let mut content: Document = fields.map(|field| (field.to_owned(), Bson::Null)).collect();
    content.extend(new.clone());
    KEPT.iter().for_each(|field| drop(content.remove(field)));
    let mut set = literally(content);
    set.insert("replaced", increased("replaced", 1));
    vec![doc! { "$set": set }]
}

/// The update that gives a waiting job the later date of a new one, and the expiry that belongs to the date.
fn postponement(new: &Document, at_most: TimeDelta) -> Vec<Document> {
    let expiry = match new.get("expires_at") {
        Some(expires_at) => doc! { "$set": { "expires_at": expires_at } },
        None => doc! { "$unset": "expires_at" },
    };
    vec![doc! { "$set": { "scheduled_at": postponed(new, at_most) } }, expiry]
}

impl Store {
    /// The jobs that have these keys. A key whose job has left the index is not in the result.
    ///
    /// Filter: the keys; while waiting, also unlocked and never started. Index: `unique`, `unique_while_waiting`, `unique_after`.
    /// Invariant: none, the index decides; each write that follows has a guard.
    pub(crate) async fn holders_of(&self, taken: &[Taken]) -> Result<HashMap<Taken, Holder>, StoreError> {
        let mut holders = HashMap::new();
        for field in [UNIQUE, UNIQUE_WHILE_WAITING, UNIQUE_AFTER] {
            let keys: Vec<&str> = taken.iter().filter(|taken| taken.field == field).map(|taken| taken.key.as_str()).collect();
            for keys in keys.chunks(KEYS_PER_QUERY) {
                let (scheduled, filter) = (self.scheduled.clone(), filter_of_keys(field, keys));
                let index = self.index(field);
                let found = self.indexed("holders_of", async move {
                    let found = scheduled.find(filter).projection(doc! { "attempts": 1, "locked": 1, field: 1 });
                    let found = found.hint(index).read_concern(ReadConcern::local()).await?;
                    found.readable().await
                });
                holders.extend(found.await?.iter().filter_map(|job| {
                    let key = job.get_str(field).ok()?.to_owned();
                    Some((Taken { field, key }, holder_of(job)?))
                }));
            }
        }
        Ok(holders)
    }

    /// The unfinished job that has this key until it is finished.
    ///
    /// Filter: the key. Index: `unique`, without a hint: it may not exist yet when a job is inserted by another program. Invariant: none, for
    /// people.
    pub(crate) async fn holder_of_key(&self, key: &str) -> Result<Option<JobId>, StoreError> {
        let (scheduled, filter) = (self.scheduled.clone_with_type::<RawDocumentBuf>(), filter_of_keys(UNIQUE, &[key]));
        let found = call("holder_of_key", async move { scheduled.find_one(filter).projection(doc! { "_id": 1 }).await }).await?;
        Ok(found.and_then(|job| id_of(&readable(&job))))
    }

    /// The job that has this key, in the caller's transaction.
    ///
    /// Filter: as above. Index: as above. Invariant: none, as above.
    pub(crate) async fn holder_in(&self, session: &mut ClientSession, taken: &Taken) -> DriverResult<Option<Holder>> {
        let filter = filter_of_keys(taken.field, &[&taken.key]);
        let scheduled = self.scheduled.clone_with_type::<RawDocumentBuf>();
        let found = scheduled.find_one(filter).projection(doc! { "attempts": 1, "locked": 1 }).session(session).await?;
        Ok(found.and_then(|job| holder_of(&readable(&job))))
    }

    /// Gives a waiting job the content of a new one. Returns whether it has never started.
    ///
    /// Filter: id, unlocked, never started. A job keeps its key. Update: the content, and one more in `replaced`. Index: `_id`.
    /// Invariant: no start runs the old content, because a start repeats `replaced` as it was read.
    /// Loses when the job was started or archived.
    pub(crate) async fn replace_if_unstarted(
        &self,
        session: Option<&mut ClientSession>,
        holder: JobId,
        new: &Document,
    ) -> Result<bool, StoreError> {
        self.change_if_unstarted("replace_if_unstarted", session, holder, replacement(new)).await
    }

    /// Gives a waiting job the later date of a new one, and its expiry. Returns whether it has never started.
    ///
    /// Filter: id, unlocked, never started. A job keeps its key. Index: `_id`. Invariant: none, a date changes.
    /// Loses when the job was started or archived.
    pub(crate) async fn postpone_if_unstarted(
        &self,
        session: Option<&mut ClientSession>,
        holder: JobId,
        new: &Document,
        at_most: TimeDelta,
    ) -> Result<bool, StoreError> {
        self.change_if_unstarted("postpone_if_unstarted", session, holder, postponement(new, at_most)).await
    }

    async fn change_if_unstarted(
        &self,
        operation: &'static str,
        session: Option<&mut ClientSession>,
        holder: JobId,
        update: Vec<Document>,
    ) -> Result<bool, StoreError> {
        let unstarted = doc! { "_id": holder, "locked": false, "attempts": never_started() };
        let mut command = doc! { "update": self.scheduled.name(), "updates": [{ "q": unstarted, "u": update }] };
        let Some(session) = session else {
            command.insert("writeConcern", doc! { "w": "majority", "j": true });
            return Ok(self.write(operation, command).await? == 1);
        };
        let met = write_in(session, &self.database, command).await;
        Ok(met.map_err(StoreError::of(operation))? == 1)
    }

    /// Inserts a job whose key is taken for a period. Returns the job that has the key, if that is another one; nothing is inserted then.
    ///
    /// One transaction with the key and the job. Index: `_id`. Invariant: I1; of the jobs with one key only one is inserted in a period.
    pub(crate) async fn insert_for_period(&self, key: &str, until: Instant, job: Document) -> Result<Option<JobId>, StoreError> {
        let (with, mut session) = ((self.clone(), key.to_owned(), until, job.clone()), CommitSession::default());
        let holder = self.transaction("insert_for_period", &mut session, with, |open, (store, key, until, job)| {
            async move {
                if let Some(holder) = store.insert_for_period_in(&mut *open, &key, until, job).await? {
                    open.abort_transaction().await?;
                    return Ok(Some(holder));
                }
                commit(open).await.map(|()| None)
            }
            .boxed()
        });
        let holder = holder.await?;
        if holder.is_none() {
            self.tell_inserted([&job]);
        }
        Ok(holder)
    }

    /// The same as part of the caller's own transaction.
    ///
    /// Filter: the key. Index: `_id`. Invariant: as above. Another call that writes the same key is a write conflict. A document whose period
    /// is over counts as missing: MongoDB deletes it up to a minute later.
    pub(crate) async fn insert_for_period_in(
        &self,
        session: &mut ClientSession,
        key: &str,
        until: Instant,
        job: Document,
    ) -> DriverResult<Option<JobId>> {
        let id = id_of(&job);
        let periods = self.unique_periods.clone_with_type::<RawDocumentBuf>();
        match periods.find_one(doc! { "_id": key }).session(&mut *session).await?.map(|period| readable(&period)) {
            None => drop(self.unique_periods.insert_one(doc! { "_id": key, "job": id, "expires_at": until }).session(&mut *session).await?),
            Some(period) => {
                let (holder, ends) = (period.get_object_id("job").ok().map(JobId::from), period.get_datetime("expires_at").ok());
                let is_over = ends.is_none_or(|ends| ends.to_chrono() <= self.now());
                if let Some(holder) = holder
                    && !is_over
                    && !self.has_ended_without_start(session, holder).await?
                {
                    return Ok(Some(holder));
                }
                let change = doc! { "$set": { "job": id, "expires_at": until } };
                self.unique_periods.update_one(doc! { "_id": key }, change).session(&mut *session).await?;
            }
        }
        self.scheduled.insert_one(job).session(&mut *session).await?;
        Ok(None)
    }

    /// Whether a job was archived before its first start: it was cancelled, or has expired, or its document was malformed. It does not keep
    /// its key for the rest of the period.
    ///
    /// Filter: id, never started. Index: `_id`. Invariant: none, it only reads.
    async fn has_ended_without_start(&self, session: &mut ClientSession, job: JobId) -> DriverResult<bool> {
        let unstarted = doc! { "_id": job, "attempts": never_started() };
        Ok(self.archived.find_one(unstarted).projection(doc! { "_id": 1 }).session(session).await?.is_some())
    }

    /// Makes jobs due that wait for the end of the jobs with these keys, if these have ended. Returns their number.
    ///
    /// Filter: the key, unlocked. Update: the successor gets the key itself. So while the other job is in `scheduled`, the unique index
    /// refuses the update, and the successor goes on waiting. Index: `unique_after`. Invariant: the two never have the same key.
    /// Harmless to repeat.
    pub async fn release_successors(&self, keys: &[String]) -> Result<usize, StoreError> {
        let statement = |key: &String| doc! { "q": { "unique_after": key, "locked": false }, "u": release() };
        let mut released = 0;
        for keys in keys.chunks(KEYS_PER_QUERY) {
            let (database, updates) = (self.database.clone(), keys.iter().map(statement).collect::<Vec<_>>());
            let concern = doc! { "w": "majority", "j": true };
            let command = doc! { "update": self.scheduled.name(), "updates": updates, "ordered": false, "writeConcern": concern };
            let mut reply = call("release_successors", async move { database.run_command(command).await }).await?;
            let errors = reply.remove("writeErrors").and_then(|errors| errors.as_array().cloned()).unwrap_or_default();
            for error in errors.iter().filter_map(Bson::as_document) {
                // The other job has not ended.
                let key = error.get_i32("index").ok().and_then(|index| keys.get(usize::try_from(index).ok()?));
                if error.get_i32("code").ok() != Some(code::DUPLICATE_KEY)
                    && is_first(Some("release_successors"), key.map_or("", String::as_str))
                {
                    tracing::error!(
                        key,
                        error = error.get_str("errmsg").unwrap_or_default(),
                        "MongoDB refuses to make the job due that waits for the end of the job with this key: correct or delete its document"
                    );
                }
            }
            met_by(&reply).map_err(StoreError::of("release_successors"))?;
            released += reply.get_i32("nModified").ok().and_then(|count| usize::try_from(count).ok()).unwrap_or(0);
        }
        if released > 0 {
            self.announce_hint(Hint::jobs_in([EVERY_GROUP])).await;
        }
        Ok(released)
    }

    /// The same after the end of jobs. A failure is only logged, because the sweep repeats it.
    pub(crate) async fn release_successors_soon(&self, keys: Vec<String>) {
        if !keys.is_empty()
            && let Err(error) = self.release_successors(&keys).await
        {
            tracing::warn!(error = chain(&error), "jobs that wait for the end of another one were not released; the sweep releases them");
        }
    }

    /// Makes jobs due that wait for the end of another one, if that one has ended without making them due: its process died, or its document
    /// was deleted by hand. Returns their number.
    ///
    /// Filter: a job with `unique_after`. Index: `unique_after`, then `unique`. Invariant: as above, so a wrong decision does
    /// nothing.
    pub async fn release_orphaned_successors(&self) -> Result<usize, StoreError> {
        if !self.is_in_use(Feature::Unique).await? {
            return Ok(0);
        }
        let (scheduled, index) = (self.scheduled.clone(), self.index(UNIQUE_AFTER));
        let successors = doc! { "unique_after": { "$gte": "" } };
        let waiting = self.indexed("release_orphaned_successors", async move {
            let found = scheduled.find(successors).projection(doc! { UNIQUE_AFTER: 1 }).limit(SUCCESSORS);
            found.hint(index).await?.readable().await
        });
        let keys: Vec<String> = waiting.await?.iter().filter_map(|job| job.get_str(UNIQUE_AFTER).ok().map(str::to_owned)).collect();
        if keys.is_empty() {
            return Ok(0);
        }
        let taken: Vec<Taken> = keys.into_iter().map(|key| Taken { field: UNIQUE, key }).collect();
        let holders = self.holders_of(&taken).await?;
        let free: Vec<String> = taken.into_iter().filter(|taken| !holders.contains_key(taken)).map(|taken| taken.key).collect();
        self.release_successors(&free).await
    }
}

fn filter_of_keys(field: &str, keys: &[&str]) -> Document {
    let keys = doc! { "$in": keys.to_vec() };
    match field {
        UNIQUE_WHILE_WAITING => doc! { "unique_while_waiting": keys, "locked": false, "attempts": never_started() },
        UNIQUE_AFTER => doc! { "unique_after": keys },
        _ => doc! { "unique": keys },
    }
}

/// The successor is due at once, or at the date that it was enqueued with. The validator accepts every `due_after` that is a date, but no
/// `scheduled_at` beyond the latest one.
fn release() -> Vec<Document> {
    let latest = bson::DateTime::from_millis(*DUE_MS.end());
    let due = doc! { "$min": [{ "$max": ["$due_after", "$$NOW"] }, latest] };
    vec![doc! { "$set": { UNIQUE: format!("${UNIQUE_AFTER}"), "scheduled_at": due } }, doc! { "$unset": [UNIQUE_AFTER, "due_after"] }]
}

/// The document of a job that waits for the end of the job with its key. It is due in the year 9999, so no search finds it.
pub(crate) fn successor(mut job: Document, now: Instant) -> Document {
    let due = job.get_datetime("scheduled_at").ok().copied();
    if let Some(due) = due.filter(|due| due.to_chrono() > now) {
        job.insert("due_after", due);
    }
    if let Some(key) = job.remove(UNIQUE) {
        job.insert(UNIQUE_AFTER, key);
    }
    job.insert("scheduled_at", bson::DateTime::from_millis(*DUE_MS.end()));
    job
}
