//! Writes the ends of jobs: moves jobs to the archive, deletes those of which nothing is kept, or unlocks started jobs. Most ends are those
//! of starts; a cancelled or malformed job can be archived without a start. `items.rs` writes the outcomes of a bundle's items before its
//! end, and `notes.rs` the notes of a running job.
//!
//! [`Store::finish`] is the group commit: it writes many ends together, in batches of limited size. A batch that MongoDB refuses is halved
//! until the refused end is alone. That end is stored in a reduced form ([`GuardedWrite::reduced`]). If MongoDB refuses this form too,
//! the end is reported as [`Recorded::Refused`]. [`Store::finish_in`] archives one job inside a transaction of the caller.
//!
//! This file does not repeat calls while MongoDB is unreachable: the caller does. A repetition is harmless, because an end that is already
//! written has the same start id.

use crate::{
    base::{JobId, StartId, WorkerId, chain},
    job::{Archival, Claim, Execution, Recorded, ending::Guard, raw::LARGEST_DOCUMENT, rescheduling::Rescheduling},
    mongo::{Batches, CommitSession, Readable, Store, StoreError, call, commit, cut, id_of, raw_id_of, require_transaction, start_of},
};
use std::{
    collections::{HashMap, HashSet},
    future::ready,
    sync::Arc,
};

use bson::{Bson, Document, RawDocumentBuf, doc};
use futures_util::{FutureExt as _, TryStreamExt};
use mongodb::{
    ClientSession, Collection,
    error::{Error, Result as DriverResult},
    options::ReadConcern,
};

/// Maximum number of ends in one command or transaction. The cost of the round trip is then negligible.
const BATCH: usize = 1_000;
/// Approximate size of a deletion in a command, in bytes.
const DELETION_BYTES: usize = 64;
/// Maximum size of one command or transaction, in bytes. MongoDB accepts 48 MB, but a large command delays all others.
pub const BATCH_BYTES: usize = 8 * 1024 * 1024;

/// An entry of the batches of [`Store::finish`]: the end of a job, or outcomes of a bundle's items before its end. The write of each entry
/// has a guard.
pub trait GuardedWrite: Clone + Send + Sync {
    /// Whether the batch is written in a transaction.
    const NEEDS_SESSION: bool = false;
    /// Whether it ends a start. Without such an entry the job stays locked.
    const IS_END: bool = true;

    /// Writes a batch of allowed size. Returns for each entry, in order, whether it was recorded.
    fn write(store: &Store, session: &mut CommitSession, batch: &[Self]) -> impl Future<Output = Result<Vec<Recorded>, StoreError>> + Send;

    /// A reduced form, for an end that MongoDB refuses; `None` if nothing can be left out.
    fn reduced(self) -> Option<Self>;

    /// Handles an entry that MongoDB refuses even in its reduced form, for this reason. By default does nothing: the end of the bundle
    /// contains all outcomes of its items, and the caller gives up notes.
    fn refused(
        self,
        _store: &Store,
        _session: &mut CommitSession,
        _reason: &StoreError,
    ) -> impl Future<Output = Result<Recorded, StoreError>> + Send {
        ready(Ok(Recorded::Refused))
    }

    /// The job.
    fn job(&self) -> JobId;

    /// Approximate size in a command, in bytes.
    fn size(&self) -> usize;
}

impl GuardedWrite for Archival {
    const NEEDS_SESSION: bool = true;

    async fn write(store: &Store, session: &mut CommitSession, batch: &[Self]) -> Result<Vec<Recorded>, StoreError> {
        store.archive(session, batch).await
    }

    fn reduced(self) -> Option<Self> {
        self.without_details()
    }

    /// Ends the job without the pause of its line, if it has one: MongoDB may refuse that. Otherwise does nothing: the caller keeps the end.
    async fn refused(mut self, store: &Store, session: &mut CommitSession, _reason: &StoreError) -> Result<Recorded, StoreError> {
        let Some(line) = Arc::make_mut(&mut self.effects).halts.take() else { return Ok(Recorded::Refused) };
        let job = self.job();
        for end in [Some(self.clone()), self.without_details()].into_iter().flatten() {
            match store.archive(session, &[end]).await {
                Ok(recorded) => {
                    tracing::error!(
                        job.id = %job,
                        line,
                        "MongoDB refuses the pause of a line whose job has failed, so the line goes on: the start of a process \
                         corrects the validator, if its MongoDB user has the action collMod on `pauses`"
                    );
                    return Ok(recorded.first().copied().unwrap_or(Recorded::Refused));
                }
                Err(error) if error.is_transient() => return Err(error),
                Err(_) => {}
            }
        }
        Ok(Recorded::Refused)
    }

    fn job(&self) -> JobId {
        self.guard.job()
    }

    fn size(&self) -> usize {
        let becomes: usize = self.effects.becomes.iter().map(size_of).sum();
        becomes + self.document().map_or(DELETION_BYTES, |document| document.as_bytes().len())
    }
}

impl GuardedWrite for Rescheduling {
    async fn write(store: &Store, _session: &mut CommitSession, batch: &[Self]) -> Result<Vec<Recorded>, StoreError> {
        store.reschedule_if_claimed(batch).await
    }

    fn reduced(self) -> Option<Self> {
        Some(self.without_history())
    }

    /// Archives the job as malformed, with its history, because no process can unlock it.
    async fn refused(self, store: &Store, session: &mut CommitSession, reason: &StoreError) -> Result<Recorded, StoreError> {
        let Some(document) = store.document_of(self.claim.job).await? else { return Ok(Recorded::ClaimLost) };
        let archival = Archival::not_unlockable(self, &document, &chain(reason), store.now());
        // Boxed, because this is a recursion. It has one level: an archival has no other form.
        let mut recorded = Box::pin(store.finish(session, &[archival])).await?;
        Ok(recorded.pop().unwrap_or(Recorded::Refused))
    }

    fn job(&self) -> JobId {
        self.claim.job
    }

    fn size(&self) -> usize {
        size_of(&self.update())
    }
}

/// Size of a document, in bytes; the maximum size if it cannot be encoded.
pub(crate) fn size_of(document: &Document) -> usize {
    document.to_vec().map_or(LARGEST_DOCUMENT, |bytes| bytes.len())
}

impl Store {
    /// Records the ends of started jobs. Returns for each end, in order, whether it was recorded. Harmless to repeat.
    ///
    /// Index: `_id`. Invariant: I9, a refused end does not stop the others.
    ///
    /// # Errors
    /// When MongoDB is unreachable or its reply is lost. A part of the batch may have been recorded. A repeated call with the same batch
    /// recognises that part.
    pub async fn finish<T: GuardedWrite>(&self, session: &mut CommitSession, batch: &[T]) -> Result<Vec<Recorded>, StoreError> {
        self.finish_in_portions(session, batch, BATCH_BYTES).await
    }

    /// Like [`finish`](Self::finish), with at most `most_bytes` in one command or transaction, for a slow connection.
    ///
    /// Index: `_id`. Invariant: I9, as above.
    pub async fn finish_in_portions<T: GuardedWrite>(
        &self,
        session: &mut CommitSession,
        batch: &[T],
        most_bytes: usize,
    ) -> Result<Vec<Recorded>, StoreError> {
        let mut recorded = Vec::with_capacity(batch.len());
        let mut batches = Batches::new(cut(batch.to_vec(), BATCH, most_bytes, T::size));
        while let Some(batch) = batches.next() {
            match T::write(self, session, &batch).await {
                Ok(done) => recorded.extend(done),
                Err(error) if error.is_transient() => return Err(error),
                Err(error) => {
                    if let Some(one) = batches.halve(batch) {
                        recorded.push(self.finish_reduced(session, one, error).await?);
                    }
                }
            }
        }
        Ok(recorded)
    }

    /// Stores a refused end in its reduced form.
    async fn finish_reduced<T: GuardedWrite>(
        &self,
        session: &mut CommitSession,
        whole: T,
        refusal: StoreError,
    ) -> Result<Recorded, StoreError> {
        let job = whole.job();
        tracing::error!(job.id = %job, error = chain(&refusal), "MongoDB refuses an outcome; storing it in a reduced form");
        let mut reason = refusal;
        if let Some(reduced) = whole.clone().reduced() {
            match T::write(self, session, &[reduced]).await {
                Ok(recorded) => return Ok(recorded.first().copied().unwrap_or(Recorded::Refused)),
                Err(error) if error.is_transient() => return Err(error),
                Err(error) => reason = error,
            }
        }
        let recorded = whole.refused(self, session, &reason).await?;
        if T::IS_END && recorded == Recorded::Refused {
            tracing::error!(
                job.id = %job,
                error = chain(&reason),
                "MongoDB refuses the outcome of a job even without its details: the job stays locked, and the write is repeated at growing \
                 intervals. Remove the cause, for example a unique index on `archived`"
            );
        }
        Ok(recorded)
    }

    /// Archives one started job, or deletes it if nothing of it is kept, as part of a transaction that the caller has started in `session`.
    /// If the caller commits, the job is finished together with the caller's own writes. If the caller aborts, the job stays locked by its
    /// start. After the commit, the caller calls [`Store::follow`].
    ///
    /// This call does not repeat or reduce anything. After [`Recorded::ClaimLost`] nothing was written, and the caller must abort: the job
    /// was rescued, and another execution writes its outcome.
    ///
    /// Filter: the guard (the job's start). The delete comes first. Index: `_id`.
    /// Invariant: I2 and I3, once the caller's commit is acknowledged by a majority.
    /// Loses when the job was rescued in the meantime.
    ///
    /// # Errors
    /// The caller must then abort the transaction. If the error has the label `TransientTransactionError`, the caller may repeat the
    /// whole transaction. [`StoreError::NoTransaction`] if the caller has not started a transaction.
    pub async fn finish_in(&self, session: &mut ClientSession, end: &Archival) -> Result<Recorded, StoreError> {
        let operation = "finish_in";
        require_transaction(session, operation).await?;
        let written: DriverResult<Recorded> = async {
            let claimed = filter_of(std::slice::from_ref(end));
            if self.scheduled.delete_one(claimed).session(&mut *session).await?.deleted_count == 0 {
                return Ok(Recorded::ClaimLost);
            }
            self.write_effects_in(&mut *session, std::slice::from_ref(end)).await?;
            if end.document().is_none() {
                self.count_not_kept_in(&mut *session, end.job(), &end.effects.group).await?;
            }
            Ok(Recorded::Yes)
        }
        .await;
        written.map_err(StoreError::of(operation))
    }

    /// Moves jobs from `scheduled` to `archived`, and deletes those of which nothing is kept. Returns for each job, in order, whether it
    /// was recorded. Counts the deleted jobs.
    ///
    /// Uses one transaction for all jobs. A batch of deletions alone uses one command instead, unless an earlier transaction of the session
    /// may keep the jobs locked.
    /// Filter: each job's guard (its start, or that it is unlocked). The delete comes first: a job whose guard no longer holds is found
    /// before the insert, and left out. Index: `_id`.
    /// Invariant: I2, archived exactly once and never in both collections; I3. Harmless to repeat after an unknown outcome, because a job
    /// that was archived by an earlier call has the same start id in the archive, and a job counts as deleted by an earlier call if its
    /// holder lives.
    /// Loses when the job was rescued in the meantime.
    pub async fn archive(&self, session: &mut CommitSession, batch: &[Archival]) -> Result<Vec<Recorded>, StoreError> {
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let needs_transaction = session.may_hold_jobs() || batch.iter().any(|end| end.effects.needs_transaction());
        let recorded =
            if needs_transaction { self.archive_or_delete(session, batch).await? } else { self.delete_if_claimed(batch).await? };
        let ended = batch.iter().zip(&recorded).filter(|(_, recorded)| **recorded == Recorded::Yes).map(|(end, _)| end);
        self.count_not_kept(ended.filter(|end| end.document().is_none()).map(|end| end.effects.group.as_str())).await;
        self.follow(batch, &recorded).await;
        Ok(recorded)
    }

    /// Deletes jobs of which nothing is kept, with one command, acknowledged by a majority.
    async fn delete_if_claimed(&self, batch: &[Archival]) -> Result<Vec<Recorded>, StoreError> {
        let (scheduled, claimed) = (self.scheduled.clone(), filter_of(batch));
        let deleted = call("delete_if_claimed", async move { scheduled.delete_many(claimed).await }).await?.deleted_count;
        if usize::try_from(deleted) == Ok(batch.len()) {
            return Ok(vec![Recorded::Yes; batch.len()]);
        }
        let ours = self.deleted_by_us(batch).await?;
        Ok(batch.iter().map(|end| if ours.contains(&end.job()) { Recorded::Yes } else { Recorded::ClaimLost }).collect())
    }

    /// None of these jobs is locked by its start any more. Returns those that this end has deleted: in this call, or in an earlier call
    /// whose reply was lost.
    ///
    /// Only the holder of the start and, after the holder's death, a cleaner write a locked job. So if a job is in neither collection, and
    /// its holder is found alive *afterwards*, the holder has deleted the job. If the holder was declared dead, the claim counts as lost:
    /// the job may have been rescued, and another start may have succeeded.
    async fn deleted_by_us(&self, gone: &[Archival]) -> Result<HashSet<JobId>, StoreError> {
        let mut held_by: HashMap<WorkerId, Vec<JobId>> = HashMap::new();
        for end in gone {
            if let (None, Some(holder)) = (end.document(), end.holder) {
                held_by.entry(holder).or_default().push(end.job());
            }
        }
        let mut ours = HashSet::new();
        for (holder, jobs) in held_by {
            let elsewhere = self.known_among(&jobs).await?;
            if self.is_alive(holder).await? {
                ours.extend(jobs.into_iter().filter(|job| !elsewhere.contains(job)));
            }
        }
        Ok(ours)
    }

    /// Archives and deletes jobs in one transaction, without those whose guard does not hold.
    async fn archive_or_delete(&self, session: &mut CommitSession, batch: &[Archival]) -> Result<Vec<Recorded>, StoreError> {
        let mut recorded: HashMap<JobId, Recorded> = HashMap::new();
        let mut left = batch.to_vec();
        while !left.is_empty() {
            match self.archive_all_or_none(session, &left).await {
                Ok(Attempted::All) => recorded.extend(left.drain(..).map(|archival| (archival.job(), Recorded::Yes))),
                Ok(Attempted::NothingChanged { still_valid, mut done_before }) => {
                    let (keep, gone): (Vec<_>, Vec<_>) = left.into_iter().partition(|archival| still_valid.contains(&archival.job()));
                    if gone.is_empty() {
                        // The transaction found a job missing, and the majority read after it found every job. So an earlier commit of
                        // this batch, whose reply was lost, has not reached a majority yet. The caller repeats the call after a timeout.
                        return Err(StoreError::TimedOut { operation: "archive" });
                    }
                    done_before.extend(self.deleted_by_us(&gone).await?);
                    let outcome = |job| if done_before.contains(&job) { Recorded::Yes } else { Recorded::ClaimLost };
                    recorded.extend(gone.iter().map(|archival| (archival.job(), outcome(archival.job()))));
                    left = keep;
                }
                Err(failed) if left.len() == 1 && failed.is_duplicate() => {
                    let archival = &left[0];
                    if !self.already_archived(&[archival.job()]).await?.contains(&archival.job()) {
                        // The duplicate key may be of a foreign unique index: a job is deleted only if it is in the archive.
                        return Err(failed);
                    }
                    // Archived by another execution: the application sent this copy again late.
                    self.discard(filter_of(std::slice::from_ref(archival))).await?;
                    recorded.insert(archival.job(), Recorded::ClaimLost);
                    left.clear();
                }
                Err(failed) => return Err(failed),
            }
        }
        Ok(batch.iter().map(|archival| recorded.get(&archival.job()).copied().unwrap_or(Recorded::ClaimLost)).collect())
    }

    /// Runs the transaction. If a guard does not hold, nothing is changed. The result then names the jobs whose guard holds, and the jobs
    /// that the same start has archived before, in a transaction whose reply was lost.
    ///
    /// All reads are in the same causally consistent session: they see at least the state that the transaction saw, even after a
    /// failover.
    async fn archive_all_or_none(&self, session: &mut CommitSession, batch: &[Archival]) -> Result<Attempted, StoreError> {
        let with = (self.clone(), Arc::<[Archival]>::from(batch));
        self.transaction("archive", session, with, |open, (store, ends)| {
            async move {
                let (guarded, earlier) = (filter_of(&ends), archived_before(&ends));
                let deleted = store.scheduled.delete_many(guarded.clone()).session(&mut *open).await?.deleted_count;
                if usize::try_from(deleted) == Ok(ends.len()) {
                    store.write_effects_in(open, &ends).await?;
                    return commit(open).await.map(|()| Attempted::All);
                }
                open.abort_transaction().await?;
                let still_valid = ids_matching(&store.scheduled, guarded, open).await?;
                let done_before = match earlier {
                    Some(earlier) => ids_matching(&store.archived, earlier, open).await?,
                    None => HashSet::new(),
                };
                Ok(Attempted::NothingChanged { still_valid, done_before })
            }
            .boxed()
        })
        .await
    }

    /// Unlocks started jobs, for another attempt or as before the start. Returns for each job, in order, whether it was recorded.
    ///
    /// Filter: id, locked, this start. Update: one command for all, acknowledged by a majority.
    /// Index: `_id`. Invariant: I3, only the latest start writes the outcome; harmless to repeat.
    /// Loses when the job was rescued in the meantime.
    pub async fn reschedule_if_claimed(&self, batch: &[Rescheduling]) -> Result<Vec<Recorded>, StoreError> {
        let statement = |job: &Rescheduling| {
            let filter = doc! { "_id": job.claim.job, "locked": true, "last_execution.start": job.claim.start };
            doc! { "q": filter, "u": job.update() }
        };
        let command = doc! {
            "update": self.scheduled.name(),
            "updates": batch.iter().map(statement).collect::<Vec<_>>(),
            "ordered": false,
            "writeConcern": { "w": "majority", "j": true },
        };
        if self.write("reschedule_if_claimed", command).await? == batch.len() {
            self.follow_rescheduled(batch.iter()).await;
            return Ok(vec![Recorded::Yes; batch.len()]);
        }
        let scheduled = self.scheduled.clone();
        let jobs: Vec<JobId> = batch.iter().map(|job| job.claim.job).collect();
        let filter = doc! { "_id": { "$in": jobs }, "locked": false };
        let found: Vec<Document> = call("reschedule_if_claimed", async move {
            scheduled.find(filter).projection(doc! { "last_execution.start": 1, "last_execution.crashed": 1 }).await?.readable().await
        })
        .await?;
        let unlocked: HashSet<(JobId, StartId, bool)> =
            found.iter().filter_map(|job| Some((id_of(job)?, start_of(job)?, is_of_rescue(job)))).collect();
        let is_unlocked = |job: &Rescheduling| {
            let is_of_rescue = job.last.as_ref().is_some_and(Execution::is_of_rescue);
            unlocked.contains(&(job.claim.job, job.claim.start, is_of_rescue))
        };
        // A release leaves no trace of its start, so it may have been written. A hint too many is harmless.
        self.follow_rescheduled(batch.iter().filter(|job| job.history.is_none() || is_unlocked(job))).await;
        Ok(batch.iter().map(|job| if is_unlocked(job) { Recorded::Yes } else { Recorded::ClaimLost }).collect())
    }

    /// Deletes started jobs that are already in the archive.
    ///
    /// Filter: id, locked, this start. Index: `_id`. Invariant: I2, if an application sends a job again late.
    pub async fn discard_if_claimed(&self, claims: &[Claim]) -> Result<(), StoreError> {
        let this = |claim: &Claim| doc! { "_id": claim.job, "locked": true, "last_execution.start": claim.start };
        self.discard(doc! { "$or": claims.iter().map(this).collect::<Vec<_>>() }).await
    }

    async fn discard(&self, guarded: Document) -> Result<(), StoreError> {
        let scheduled = self.scheduled.clone();
        call("discard_if_claimed", async move { scheduled.delete_many(guarded).await }).await.map(drop)
    }

    /// The current document of a job, locked or not.
    ///
    /// Filter: id. Index: `_id`. Invariant: none, the write that follows has a guard of its own.
    async fn document_of(&self, job: JobId) -> Result<Option<RawDocumentBuf>, StoreError> {
        let scheduled = self.scheduled.clone_with_type::<RawDocumentBuf>();
        call("document_of", async move { scheduled.find_one(doc! { "_id": job }).read_concern(ReadConcern::local()).await }).await
    }
}

/// The outcome of a transaction on many jobs.
pub(crate) enum Attempted {
    /// The transaction was committed.
    All,
    /// A condition did not hold, and nothing was changed.
    NothingChanged {
        /// The jobs whose condition holds.
        still_valid: HashSet<JobId>,
        /// The jobs that an earlier transaction with the same content has changed.
        done_before: HashSet<JobId>,
    },
}

/// A filter for the jobs whose guards still hold.
fn filter_of(batch: &[Archival]) -> Document {
    let mut claimed: HashMap<StartId, Vec<JobId>> = HashMap::new();
    let mut any = Vec::new();
    for archival in batch {
        match &archival.guard {
            Guard::Claimed(claim) => claimed.entry(claim.start).or_default().push(claim.job),
            Guard::Unlocked(read) => any.push(doc! {
                "_id": read.job,
                "locked": false,
                "attempts": read.attempts.clone(),
                "replaced": read.replaced.clone(),
                "expires_at": read.expires_at.clone(),
                "waiting": read.waiting.clone(),
            }),
        }
    }
    any.extend(claimed.into_iter().map(|(start, jobs)| doc! { "_id": { "$in": jobs }, "locked": true, "last_execution.start": start }));
    doc! { "$or": any }
}

/// A filter for those of these jobs that the same process has archived: the holder of the start, or a cleaner after the holder's death. What
/// a cleaner has written of a start is not the end that the holder writes late.
fn archived_before(batch: &[Archival]) -> Option<Document> {
    let same = |archival: &Archival| match (&archival.guard, archival.document()) {
        (Guard::Claimed(claim), Some(_)) => {
            let crashed = if archival.is_of_rescue { Bson::from(true) } else { doc! { "$ne": true }.into() };
            Some(doc! { "_id": claim.job, "last_execution.start": claim.start, "last_execution.crashed": crashed })
        }
        _ => None,
    };
    let any: Vec<Document> = batch.iter().filter_map(same).collect();
    (!any.is_empty()).then(|| doc! { "$or": any })
}

/// Whether a cleaner has written the last execution of this job.
fn is_of_rescue(job: &Document) -> bool {
    job.get_document("last_execution").is_ok_and(|execution| execution.get_bool("crashed").unwrap_or(false))
}

async fn ids_matching(collection: &Collection<Document>, filter: Document, session: &mut ClientSession) -> Result<HashSet<JobId>, Error> {
    let mut cursor =
        collection.clone_with_type::<RawDocumentBuf>().find(filter).projection(doc! { "_id": 1 }).session(&mut *session).await?;
    let found: Vec<RawDocumentBuf> = cursor.stream(session).try_collect().await?;
    Ok(found.iter().filter_map(|job| raw_id_of(job)).collect())
}
