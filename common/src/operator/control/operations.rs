//! The changes of operators: cancellation requests, due dates, retries of archived jobs, deletion, retention.
//!
//! [`control`](crate::operator::control) decides the changes. This file writes them. The filter of each write repeats the conditions of the
//! decision.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use bson::{Bson, Document, RawDocumentBuf, doc, oid::ObjectId};
use futures_util::{FutureExt as _, TryStreamExt};

use crate::{
    base::{Instant, JobId},
    cycle::finish::Attempted,
    job::Recorded,
    mongo::{ARCHIVED_BY_END, CommitSession, Readable, Store, StoreError, call, commit, id_of, never_started, readable, write_in},
};

/// An archived job that is to be enqueued again.
#[derive(Clone, Debug)]
pub struct Retrial {
    /// The archived job.
    pub job: JobId,
    /// Its `retried_as` when it was read.
    pub retried_as: Option<Bson>,
    /// The id of the new job.
    pub new: JobId,
    /// The new job. Shared, because a batch is kept until its write is acknowledged.
    pub document: Arc<Document>,
}

/// The note that the retry of a graph has begun, at the archived job that it will enqueue again last.
#[derive(Clone, Copy, Debug)]
pub struct RetryNote {
    /// That job.
    pub last: JobId,
    /// The retry: each call has its own.
    pub retry: ObjectId,
}

impl Store {
    /// Those of these started jobs whose cancellation was requested.
    ///
    /// Filter: id, cancellation requested. Index: `_id`. Invariant: none, it only reads.
    pub async fn cancel_requests(&self, jobs: &[JobId]) -> Result<Vec<JobId>, StoreError> {
        let scheduled = self.scheduled.clone();
        let filter = doc! { "_id": { "$in": jobs.to_vec() }, "cancel_requested_at": { "$exists": true } };
        let found: Vec<Document> =
            call("cancel_requests", async move { scheduled.find(filter).projection(doc! { "_id": 1 }).await?.readable().await }).await?;
        Ok(found.iter().filter_map(id_of).collect())
    }

    /// Requests the cancellation of started jobs. Returns the jobs whose documents have the request.
    ///
    /// Filter: ids, locked. Index: `_id`. Invariant: none, the holder ends it.
    /// Loses for jobs that are not running.
    pub async fn request_cancel_if_started(&self, jobs: &[JobId]) -> Result<HashSet<JobId>, StoreError> {
        let (scheduled, now) = (self.scheduled.clone(), self.now());
        let filter = doc! { "_id": { "$in": jobs.to_vec() }, "locked": true };
        let asked = call("request_cancel_if_started", async move {
            scheduled.update_many(filter, doc! { "$set": { "cancel_requested_at": now } }).await
        })
        .await?;
        if asked.matched_count == jobs.len() as u64 {
            return Ok(jobs.iter().copied().collect());
        }
        Ok(self.cancel_requests(jobs).await?.into_iter().collect())
    }

    /// Makes waiting jobs due at `at`, unless they are due earlier. Returns the jobs that are waiting.
    ///
    /// Filter: ids, unlocked, due later. Index: `_id`. Invariant: none, a date changes.
    /// Loses for jobs that are running or archived.
    pub async fn hasten_if_unlocked(&self, jobs: &[JobId], at: Instant) -> Result<HashSet<JobId>, StoreError> {
        let scheduled = self.scheduled.clone();
        let later = doc! { "_id": { "$in": jobs.to_vec() }, "locked": false, "scheduled_at": { "$gt": at } };
        let moved =
            call("hasten_if_unlocked", async move { scheduled.update_many(later, doc! { "$set": { "scheduled_at": at } }).await }).await?;
        if moved.matched_count == jobs.len() as u64 {
            return Ok(jobs.iter().copied().collect());
        }
        self.waiting_with(jobs, Document::new()).await
    }

    /// Makes a job that was enqueued for `due` due at `at`. Returns whether it is now.
    ///
    /// Filter: id, unlocked, that date, never started. Index: `_id`. Invariant: none, a date changes.
    /// Loses if the job was started or has got another date since.
    pub async fn hasten_if_never_started(&self, job: JobId, due: Instant, at: Instant) -> Result<bool, StoreError> {
        let scheduled = self.scheduled.clone();
        let kept = doc! { "_id": job, "locked": false, "scheduled_at": due, "attempts": never_started() };
        let moved = async move { scheduled.update_one(kept, doc! { "$set": { "scheduled_at": at } }).await };
        Ok(call("hasten_if_never_started", moved).await?.matched_count == 1)
    }

    /// Changes waiting jobs: sets these fields. Returns the jobs that are waiting and have the new values.
    ///
    /// Filter: ids, unlocked. Index: `_id`. Invariant: I3, a started job is left to its holder; the start of a job that was read before
    /// the change is refused if its date or its group has changed.
    /// Loses for jobs that are running or archived.
    pub async fn alter_if_unlocked(&self, jobs: &[JobId], set: Document) -> Result<HashSet<JobId>, StoreError> {
        let scheduled = self.scheduled.clone();
        let (unlocked, update) = (doc! { "_id": { "$in": jobs.to_vec() }, "locked": false }, doc! { "$set": set.clone() });
        let altered = call("alter_if_unlocked", async move { scheduled.update_many(unlocked, update).await }).await?;
        if altered.matched_count == jobs.len() as u64 {
            return Ok(jobs.iter().copied().collect());
        }
        self.waiting_with(jobs, set).await
    }

    /// Those of these jobs that are waiting and have these values.
    ///
    /// Filter: ids, unlocked, the values. Index: `_id`. Invariant: none.
    async fn waiting_with(&self, jobs: &[JobId], values: impl IntoIterator<Item = (String, Bson)>) -> Result<HashSet<JobId>, StoreError> {
        let scheduled = self.scheduled.clone();
        let mut unlocked = doc! { "_id": { "$in": jobs.to_vec() }, "locked": false };
        unlocked.extend(values);
        let found: Vec<Document> =
            call("waiting_with", async move { scheduled.find(unlocked).projection(doc! { "_id": 1 }).await?.readable().await }).await?;
        Ok(found.iter().filter_map(id_of).collect())
    }

    /// Enqueues archived jobs again, each under a new id, in one transaction. The archived document gets the new id as
    /// `retried_as`. Returns for each job, in order, whether it was recorded.
    ///
    /// Filter: id, and `retried_as` as it was when the job was read. The archived documents are changed first. If one of them has changed
    /// since, the transaction is aborted before the insert, and repeated without that job. Index: `_id`.
    /// Invariant: I1, and a job that two people retry at the same time is enqueued once. Harmless to repeat with the same new ids
    /// after an unknown outcome: an archived document that already has the new id was changed by the earlier call. Loses when another
    /// caller retried the job, or when retention deleted it.
    pub async fn retry_if_archived(&self, session: &mut CommitSession, batch: &[Retrial]) -> Result<Vec<Recorded>, StoreError> {
        let mut enqueued: HashSet<JobId> = HashSet::new();
        let mut left = batch.to_vec();
        self.copy_files(&batch.iter().map(|retrial| (retrial.job, retrial.new)).collect()).await?;
        while !left.is_empty() {
            match self.retry_all_or_none(session, &left, None).await? {
                Attempted::All => {
                    self.tell_inserted(left.iter().map(|retrial| &*retrial.document));
                    enqueued.extend(left.drain(..).map(|retrial| retrial.job));
                }
                Attempted::NothingChanged { still_valid, done_before } => {
                    let before = left.len();
                    left.retain(|retrial| still_valid.contains(&retrial.job));
                    if left.len() == before {
                        // The transaction found a changed document, and the majority read after it found none. So an earlier commit of
                        // this batch, whose reply was lost, has not reached a majority yet. The caller repeats the call after a timeout.
                        return Err(StoreError::TimedOut { operation: "retry_if_archived" });
                    }
                    enqueued.extend(done_before);
                }
            }
        }
        let recorded = |retrial: &Retrial| if enqueued.contains(&retrial.job) { Recorded::Yes } else { Recorded::ClaimLost };
        Ok(batch.iter().map(recorded).collect())
    }

    /// The same for jobs that belong together: all of them, or none, while the retry has its note. Returns those that are enqueued, by this
    /// call or by an earlier one whose reply was lost; `None` if the retry was given up.
    ///
    /// Filter: id, not retried; the note. Index: `_id`. Invariant: I1, as above. Harmless to repeat with the same new ids. The note is
    /// changed, so that of this and its removal one comes first.
    /// Loses, and enqueues none, when another caller has retried one of the jobs, when retention has deleted it, or when the note is removed.
    pub async fn retry_all_if_archived(
        &self,
        session: &mut CommitSession,
        batch: &[Retrial],
        note: Option<RetryNote>,
    ) -> Result<Option<HashSet<JobId>>, StoreError> {
        self.copy_files(&batch.iter().map(|retrial| (retrial.job, retrial.new)).collect()).await?;
        match self.retry_all_or_none(session, batch, note).await? {
            Attempted::All => {
                self.tell_inserted(batch.iter().map(|retrial| &*retrial.document));
                Ok(Some(batch.iter().map(|retrial| retrial.job).collect()))
            }
            Attempted::NothingChanged { done_before, .. } if done_before.len() == batch.len() => Ok(Some(done_before)),
            Attempted::NothingChanged { .. } if self.is_given_up(note).await? => Ok(None),
            Attempted::NothingChanged { still_valid, .. } if still_valid.len() == batch.len() => {
                Err(StoreError::TimedOut { operation: "retry_if_archived" })
            }
            Attempted::NothingChanged { done_before, .. } => Ok(Some(done_before)),
        }
    }

    /// Whether the job has neither this note nor a repetition.
    ///
    /// Filter: id, not retried, without the note. Index: `_id`. Invariant: none.
    async fn is_given_up(&self, note: Option<RetryNote>) -> Result<bool, StoreError> {
        let Some(RetryNote { last, retry }) = note else { return Ok(false) };
        let (archived, without) = (self.archived.clone(), doc! { "_id": last, "retried_as": null, "retrying.id": { "$ne": retry } });
        Ok(call("is_given_up", async move { archived.count_documents(without).await }).await? > 0)
    }

    /// Notes at an archived job that the retry of its graph has begun and will enqueue it again last. The transaction that does so removes the
    /// note. Returns whether the job is there and not retried. The note of an earlier retry is replaced, which gives that one up.
    ///
    /// Filter: id, not retried. Index: `_id`. Invariant: none, the graph does not end while a job that is not retried has the note.
    pub async fn begin_retry(&self, note: RetryNote) -> Result<bool, StoreError> {
        let archived = self.archived.clone();
        let not_retried = doc! { "_id": note.last, "retried_as": null };
        let set = doc! { "$set": { "retrying": { "id": note.retry, "began_at": self.now() } } };
        Ok(call("begin_retry", async move { archived.update_one(not_retried, set).await }).await?.matched_count == 1)
    }

    /// Removes the notes at these jobs, of this retry or of any: the retry of the graph is complete, or given up.
    ///
    /// Filter: ids, the retry. Index: `_id`. Invariant: none.
    pub async fn end_retry(&self, jobs: &[JobId], retry: Option<ObjectId>) -> Result<(), StoreError> {
        let (archived, mut these) = (self.archived.clone(), doc! { "_id": { "$in": jobs.to_vec() } });
        these.extend(retry.map(|retry| ("retrying.id".to_owned(), Bson::from(retry))));
        call("end_retry", async move { archived.update_many(these, doc! { "$unset": { "retrying": "" } }).await }).await.map(drop)
    }

    /// Runs the transaction. If a condition does not hold, nothing is changed. The result then names the jobs whose condition holds, and
    /// the jobs that were enqueued under these ids before, in a transaction whose reply was lost.
    async fn retry_all_or_none(
        &self,
        session: &mut CommitSession,
        batch: &[Retrial],
        note: Option<RetryNote>,
    ) -> Result<Attempted, StoreError> {
        let with = (self.clone(), Arc::<[Retrial]>::from(batch), note);
        self.transaction("retry_if_archived", session, with, |open, (store, batch, note)| {
            async move {
                let statement = |retrial: &Retrial| {
                    let as_read = doc! { "_id": retrial.job, "retried_as": retrial.retried_as.clone() };
                    doc! { "q": as_read, "u": { "$set": { "retried_as": retrial.new }, "$unset": { "retrying": "" } } }
                };
                let touch = |note: RetryNote| {
                    doc! { "q": { "_id": note.last, "retrying.id": note.retry }, "u": { "$inc": { "retrying.portions": 1 } } }
                };
                // The last portion removes the note.
                let updates: Vec<Document> = note.map(touch).into_iter().chain(batch.iter().map(statement)).collect();
                let expected = updates.len();
                let command = doc! { "update": store.archived.name(), "updates": updates };
                if write_in(open, &store.database, command).await? == expected {
                    store.scheduled.insert_many(batch.iter().map(|retrial| &*retrial.document)).session(&mut *open).await?;
                    return commit(open).await.map(|()| Attempted::All);
                }
                open.abort_transaction().await?;
                let ids: Vec<JobId> = batch.iter().map(|retrial| retrial.job).collect();
                let mut found = store
                    .archived
                    .clone_with_type::<RawDocumentBuf>()
                    .find(doc! { "_id": { "$in": ids } })
                    .projection(doc! { "retried_as": 1 })
                    .session(&mut *open)
                    .await?;
                let found: Vec<RawDocumentBuf> = found.stream(open).try_collect().await?;
                let found: Vec<Document> = found.iter().map(|job| readable(job)).collect();
                let now: HashMap<JobId, Option<&Bson>> =
                    found.iter().filter_map(|job| Some((id_of(job)?, job.get("retried_as")))).collect();
                let (mut still_valid, mut done_before) = (HashSet::new(), HashSet::new());
                for retrial in batch.iter() {
                    let Some(retried_as) = now.get(&retrial.job) else { continue };
                    if *retried_as == Some(&retrial.new.into()) {
                        done_before.insert(retrial.job);
                    } else if *retried_as == retrial.retried_as.as_ref() {
                        still_valid.insert(retrial.job);
                    }
                }
                Ok(Attempted::NothingChanged { still_valid, done_before })
            }
            .boxed()
        })
        .await
    }

    /// Deletes archived jobs permanently. Returns their number.
    ///
    /// Filter: these ids. Index: `_id`. Invariant: none, the operator requested the deletion; an archived job never runs again.
    pub async fn delete_archived(&self, jobs: &[JobId]) -> Result<u64, StoreError> {
        let (archived, these) = (self.archived.clone(), doc! { "_id": { "$in": jobs.to_vec() } });
        Ok(call("delete_archived", async move { archived.delete_many(these).await }).await?.deleted_count)
    }

    /// Deletes up to `limit` archived documents that ended before `before`, with ids of any type. Returns their number.
    ///
    /// Filter: ended before. Index: `archived_by_end`. Invariant: none, the operator configured the retention.
    pub async fn prune_archived(&self, before: Instant, limit: i64) -> Result<u64, StoreError> {
        let (archived, index) = (self.archived.clone_with_type::<RawDocumentBuf>(), self.index(ARCHIVED_BY_END));
        self.indexed("prune_archived", async move {
            let old = archived
                .find(doc! { "last_execution.ended_at": { "$lt": before } })
                .projection(doc! { "_id": 1 })
                .hint(index)
                .limit(limit)
                .await?
                .try_collect::<Vec<RawDocumentBuf>>()
                .await?;
            let id = |document: &RawDocumentBuf| Bson::try_from(document.get("_id").ok()??).ok();
            let ids: Vec<Bson> = old.iter().filter_map(id).collect();
            if ids.is_empty() {
                return Ok(0);
            }
            Ok(archived.delete_many(doc! { "_id": { "$in": ids } }).await?.deleted_count)
        })
        .await
    }
}
