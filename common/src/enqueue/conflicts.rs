//! Enqueues jobs with unique keys: inserts them, and decides for each one whose key is taken.
//!
//! MongoDB decides whether a key is free. The job that has it is looked up afterwards, and may have ended by then. Therefore the insert is
//! repeated, a limited number of times. In the caller's transaction the order is the other way round, because a refused insert would abort
//! the transaction. A job that takes the key in between causes a write conflict there, which has the driver's label for a repetition.

use std::collections::{HashMap, HashSet};

use backon::{ConstantBuilder, RetryableWithContext as _};
use bson::Document;
use chrono::TimeDelta;
use mongodb::{ClientSession, error::Error};

use super::{
    EnqueueError, Enqueued, Outcome,
    insert::{ANNOUNCED_EARLY, Prepared},
};
use crate::{
    base::{Instant, JobId, at_once},
    cycle::Duplicate,
    hints::Hint,
    job::ScheduledJob,
    mongo::{Feature, IDS_PER_QUERY, Store, StoreError, UNIQUE_AFTER, require_transaction},
    unique::{Holder, Keyed, OnConflict, Taken, UniqueScope, successor},
};

/// The immediate repetitions of the insert of a job whose key is taken by a job that has ended when it is looked up.
const AGAIN: ConstantBuilder = ConstantBuilder::new().with_max_times(9);

impl Keyed {
    fn taken(&self) -> Taken {
        Taken { field: self.scope.field(), key: self.key.clone() }
    }
}

/// A time as MongoDB counts it. Validated before, so it is in range.
fn delta(time: std::time::Duration) -> TimeDelta {
    TimeDelta::from_std(time).unwrap_or(TimeDelta::MAX)
}

fn mongo(source: Error) -> StoreError {
    StoreError::Mongo { operation: "enqueue_in", source: source.into() }
}

impl Store {
    /// Enqueues jobs of which some have unique keys.
    pub(super) async fn enqueue_keyed(&self, prepared: Prepared) -> Result<Vec<Enqueued>, EnqueueError> {
        self.prepare_unique_jobs().await?;
        let resent: HashSet<JobId> = prepared.resent.iter().copied().collect();
        let mut outcomes: Vec<Option<Enqueued>> = vec![None; prepared.ids.len()];
        self.note_known(&prepared.ids, &resent, &mut outcomes).await?;
        let insert = |mut outcomes: Vec<Option<Enqueued>>| async {
            let inserted = self.insert_open(&prepared, &resent, &mut outcomes).await;
            (outcomes, inserted)
        };
        let is_open = |error: &EnqueueError| matches!(error, EnqueueError::KeyKeepsChanging { .. });
        let (outcomes, inserted) = insert.retry(AGAIN).sleep(at_once).context(outcomes).when(is_open).await;
        inserted?;
        let Prepared { documents, groups, at, .. } = prepared;
        let enqueued: Vec<Enqueued> = outcomes.into_iter().flatten().collect();
        let is_changed = |enqueued: &Enqueued| matches!(enqueued.outcome, Outcome::New | Outcome::Replaced | Outcome::Postponed);
        if enqueued.iter().any(is_changed) {
            let new = documents.iter().zip(&enqueued).filter(|(_, enqueued)| enqueued.outcome == Outcome::New);
            let jobs: Vec<ScheduledJob> = match at {
                None if documents.len() <= ANNOUNCED_EARLY => new.filter_map(|(document, _)| ScheduledJob::of_document(document)).collect(),
                _ => Vec::new(),
            };
            self.announce_hint(Hint::Jobs { groups: groups.into_keys().collect(), at, jobs }).await;
        }
        Ok(enqueued)
    }

    /// Notes the jobs whose ids are archived, or which an earlier call has enqueued for a period.
    async fn note_known(&self, ids: &[JobId], resent: &HashSet<JobId>, outcomes: &mut [Option<Enqueued>]) -> Result<(), StoreError> {
        let given: Vec<JobId> = resent.iter().copied().collect();
        let mut known = HashSet::new();
        for some in given.chunks(IDS_PER_QUERY) {
            known.extend(self.known_among(some).await?);
        }
        for (id, outcome) in ids.iter().zip(outcomes).filter(|(id, _)| known.contains(id)) {
            *outcome = Some(Enqueued::new(*id, Outcome::KnownId));
        }
        Ok(())
    }

    /// Inserts the jobs without an outcome. An error if the outcome of one stays open.
    async fn insert_open(
        &self,
        prepared: &Prepared,
        resent: &HashSet<JobId>,
        outcomes: &mut [Option<Enqueued>],
    ) -> Result<(), EnqueueError> {
        let Prepared { ids, documents, keyed, .. } = prepared;
        let mut plain = Vec::new();
        for index in (0..ids.len()).filter(|index| outcomes[*index].is_none()).collect::<Vec<_>>() {
            match keyed.get(&index) {
                Some(Keyed { key, scope: UniqueScope::For(period), on_conflict }) => {
                    outcomes[index] = self.enqueue_for_period(key, delta(*period), *on_conflict, ids[index], &documents[index]).await?;
                }
                Some(_) | None => plain.push(index),
            }
        }
        let refused = self.insert_keyed_jobs(plain.iter().map(|index| documents[*index].clone()).collect()).await?;
        let conflicts: HashMap<usize, Duplicate> = refused.into_iter().map(|(at, duplicate)| (plain[at], duplicate)).collect();
        for index in plain {
            if !conflicts.contains_key(&index) {
                outcomes[index] = Some(Enqueued::new(ids[index], Outcome::New));
            }
        }
        self.resolve(&conflicts, prepared, resent, outcomes).await?;
        let Some(open) = outcomes.iter().position(Option::is_none) else { return Ok(()) };
        Err(EnqueueError::KeyKeepsChanging { key: keyed.get(&open).map(|keyed| keyed.key.clone()).unwrap_or_default() })
    }

    /// Decides for the jobs that were refused. The outcome of a job whose key is free by now stays open.
    async fn resolve(
        &self,
        conflicts: &HashMap<usize, Duplicate>,
        Prepared { ids, documents, keyed, .. }: &Prepared,
        resent: &HashSet<JobId>,
        outcomes: &mut [Option<Enqueued>],
    ) -> Result<(), StoreError> {
        let taken: Vec<Taken> = conflicts.keys().filter_map(|index| keyed.get(index)).map(Keyed::taken).collect();
        if conflicts.is_empty() {
            return Ok(());
        }
        let holders = self.holders_of(&taken).await?;
        let mut indexes: Vec<usize> = conflicts.keys().copied().collect();
        indexes.sort_unstable();
        for index in indexes {
            let (id, document) = (ids[index], &documents[index]);
            let conflict = keyed.get(&index).and_then(|keyed| Some((keyed, holders.get(&keyed.taken())?)));
            outcomes[index] = match (conflicts[&index], conflict) {
                (Duplicate::Id, _) => Some(Enqueued::new(id, Outcome::KnownId)),
                // Sent before, by a call whose reply was lost.
                (Duplicate::Key, Some((_, holder))) if holder.job == id => {
                    Some(Enqueued::new(id, if resent.contains(&id) { Outcome::KnownId } else { Outcome::New }))
                }
                (Duplicate::Key, Some((keyed, holder))) => self.settle(keyed, *holder, document).await?,
                (Duplicate::Key, None) => None,
            };
        }
        Ok(())
    }

    /// Handles a conflict as the job's reaction says. `None` if the holder of the key has ended, so that the key is free.
    async fn settle(&self, keyed: &Keyed, holder: Holder, new: &Document) -> Result<Option<Enqueued>, StoreError> {
        let taken = keyed.taken();
        match keyed.on_conflict {
            OnConflict::Ignore => Ok(Some(Enqueued::new(holder.job, Outcome::Duplicate))),
            OnConflict::RunOnceMore if holder.is_locked => self.enqueue_successor(&keyed.key, new).await,
            OnConflict::RunOnceMore => Ok(Some(Enqueued::new(holder.job, Outcome::Duplicate))),
            OnConflict::Replace | OnConflict::Postpone { .. } => {
                let is_waiting = !holder.is_locked && !holder.has_started;
                if is_waiting && let Some(changed) = self.change(None, holder.job, keyed, new).await? {
                    return Ok(Some(changed));
                }
                // It has started, or has ended, or another caller has it now.
                let holder_now =
                    if is_waiting { self.holders_of(std::slice::from_ref(&taken)).await?.remove(&taken) } else { Some(holder) };
                let is_same = |now: &Holder| now.job == holder.job && (now.is_locked || now.has_started);
                Ok(holder_now.filter(is_same).map(|holder| Enqueued::new(holder.job, Outcome::AlreadyStarted)))
            }
        }
    }

    /// Replaces or postpones a waiting job. `None` if it does not wait any more.
    async fn change(
        &self,
        session: Option<&mut ClientSession>,
        job: JobId,
        keyed: &Keyed,
        new: &Document,
    ) -> Result<Option<Enqueued>, StoreError> {
        let (changed, outcome) = match keyed.on_conflict {
            OnConflict::Replace => (self.replace_if_unstarted(session, job, new).await?, Outcome::Replaced),
            OnConflict::Postpone { at_most } => (self.postpone_if_unstarted(session, job, new, delta(at_most)).await?, Outcome::Postponed),
            OnConflict::Ignore | OnConflict::RunOnceMore => (false, Outcome::Duplicate),
        };
        Ok(changed.then(|| Enqueued::new(job, outcome)))
    }

    /// Enqueues a job that waits for the end of the running job with this key, unless one waits already.
    async fn enqueue_successor(&self, key: &str, new: &Document) -> Result<Option<Enqueued>, StoreError> {
        let after = Taken { field: UNIQUE_AFTER, key: key.to_owned() };
        let Some(id) = crate::mongo::id_of(new) else { return Ok(None) };
        let refused = self.insert_keyed_jobs(vec![successor(new.clone(), self.now())]).await?;
        match refused.first() {
            None => {
                // The other job may have ended before the insert.
                self.release_if_free(key).await?;
                Ok(Some(Enqueued::new(id, Outcome::RunsOnceMore)))
            }
            Some((_, Duplicate::Id)) => Ok(Some(Enqueued::new(id, Outcome::KnownId))),
            Some((_, Duplicate::Key)) => Ok(self
                .holders_of(std::slice::from_ref(&after))
                .await?
                .remove(&after)
                .map(|holder| Enqueued::new(holder.job, Outcome::Duplicate))),
        }
    }

    async fn release_if_free(&self, key: &str) -> Result<(), StoreError> {
        let taken = Taken { field: UniqueScope::UntilFinished.field(), key: key.to_owned() };
        if !self.holders_of(std::slice::from_ref(&taken)).await?.contains_key(&taken) {
            self.release_successors(&[key.to_owned()]).await?;
        }
        Ok(())
    }

    /// Enqueues a job whose key is taken for a period. `None` if the job that has the key has ended meanwhile.
    async fn enqueue_for_period(
        &self,
        key: &str,
        period: TimeDelta,
        on_conflict: OnConflict,
        id: JobId,
        new: &Document,
    ) -> Result<Option<Enqueued>, StoreError> {
        let keyed = Keyed { key: key.to_owned(), scope: UniqueScope::For(period.to_std().unwrap_or_default()), on_conflict };
        let Some(holder) = self.insert_for_period(key, self.end_of(period), new.clone()).await? else {
            return Ok(Some(Enqueued::new(id, Outcome::New)));
        };
        Ok(Some(match on_conflict {
            _ if holder == id => Enqueued::new(id, Outcome::KnownId),
            OnConflict::Ignore | OnConflict::RunOnceMore => Enqueued::new(holder, Outcome::Duplicate),
            OnConflict::Replace | OnConflict::Postpone { .. } => {
                let changed = self.change(None, holder, &keyed, new).await?;
                changed.unwrap_or(Enqueued::new(holder, Outcome::AlreadyStarted))
            }
        }))
    }

    /// The end of a period that begins now.
    fn end_of(&self, period: TimeDelta) -> Instant {
        self.now().checked_add_signed(period).unwrap_or(Instant::MAX_UTC)
    }

    /// Enqueues jobs of which some have unique keys, in the caller's transaction.
    pub(super) async fn enqueue_keyed_in(&self, session: &mut ClientSession, prepared: Prepared) -> Result<Vec<Enqueued>, EnqueueError> {
        // The indexes cannot be made while the caller's transaction is open.
        if !self.is_in_use(Feature::Unique).await? {
            return Err(EnqueueError::NotSetUpForUnique { database: self.database().name().into() });
        }
        require_transaction(session, "enqueue_in").await?;
        let Prepared { ids, documents, resent, mut keyed, .. } = prepared;
        let known = self.known_in(session, &resent).await.map_err(mongo)?;
        let mut enqueued = Vec::with_capacity(ids.len());
        for (index, (id, document)) in ids.into_iter().zip(documents).enumerate() {
            enqueued.push(match keyed.remove(&index) {
                _ if known.contains(&id) => Enqueued::new(id, Outcome::KnownId),
                Some(keyed) => self.enqueue_one_in(session, id, document, &keyed).await?,
                None => {
                    self.insert_jobs_in(session, vec![document], &[]).await?;
                    Enqueued::new(id, Outcome::New)
                }
            });
        }
        Ok(enqueued)
    }

    async fn enqueue_one_in(&self, session: &mut ClientSession, id: JobId, new: Document, keyed: &Keyed) -> Result<Enqueued, StoreError> {
        let holder = if let UniqueScope::For(period) = keyed.scope {
            let end = self.end_of(delta(period));
            let holder = self.insert_for_period_in(session, &keyed.key, end, new.clone()).await.map_err(mongo)?;
            // Whether it waits is decided by the guard of the change.
            holder.map(|job| Holder { job, is_locked: false, has_started: false })
        } else {
            let holder = self.holder_in(session, &keyed.taken()).await.map_err(mongo)?;
            if holder.is_none() {
                self.insert_jobs_in(session, vec![new.clone()], &[]).await?;
            }
            holder
        };
        let Some(holder) = holder else { return Ok(Enqueued::new(id, Outcome::New)) };
        match keyed.on_conflict {
            OnConflict::RunOnceMore if holder.is_locked => {
                let after = Taken { field: UNIQUE_AFTER, key: keyed.key.clone() };
                if let Some(waiting) = self.holder_in(session, &after).await.map_err(mongo)? {
                    return Ok(Enqueued::new(waiting.job, Outcome::Duplicate));
                }
                self.insert_jobs_in(session, vec![successor(new, self.now())], &[]).await?;
                Ok(Enqueued::new(id, Outcome::RunsOnceMore))
            }
            OnConflict::Ignore | OnConflict::RunOnceMore => Ok(Enqueued::new(holder.job, Outcome::Duplicate)),
            OnConflict::Replace | OnConflict::Postpone { .. } => {
                let changed = self.change(Some(session), holder.job, keyed, &new).await?;
                Ok(changed.unwrap_or(Enqueued::new(holder.job, Outcome::AlreadyStarted)))
            }
        }
    }
}
