//! Enqueueing: new jobs into `scheduled`.

use std::collections::HashSet;

use bson::{Document, doc};
use mongodb::{
    ClientSession,
    error::{Error, ErrorKind, IndexedWriteError},
    options::ReadConcern,
};

use crate::{
    base::JobId,
    events::ToldJob,
    mongo::{Readable, Store, StoreError, UNIQUE, UNIQUE_AFTER, UNIQUE_WHILE_WAITING, call, cut, error::code, id_of, require_transaction},
};

/// Maximum number of documents in one `insert` command. It is below MongoDB's limit, so that a large import shows progress.
const BATCH: usize = 1_000;
/// Maximum size of one `insert` command, in bytes.
const BATCH_BYTES: usize = 16 * 1024 * 1024;

impl Store {
    /// Inserts new jobs. Returns the ids of those that already exist in `scheduled` or `archived` and are not inserted.
    ///
    /// Acknowledged by a majority, unordered: an invalid document does not stop the others.
    /// Index: `_id`. Invariant: I1, an acknowledged job is never lost.
    pub(crate) async fn insert_jobs(&self, jobs: Vec<Document>) -> Result<Vec<JobId>, StoreError> {
        let mut already_there = Vec::new();
        for batch in batches(jobs) {
            let (scheduled, sent) = (self.scheduled.clone(), batch.clone());
            let mut told = self.to_tell(&batch);
            match call("insert_jobs", async move { scheduled.insert_many(sent).ordered(false).await }).await {
                Ok(_) => {}
                Err(error) => {
                    let StoreError::Mongo { source, .. } = &error else { return Err(error) };
                    let Some(duplicates) = only_duplicates(source) else { return Err(error) };
                    let ids: Vec<JobId> = duplicates.iter().filter_map(|at| id_of(batch.get(*at)?)).collect();
                    // A foreign unique index may have refused a job that does not exist yet.
                    if ids.len() != duplicates.len() || self.known_among(&ids).await? != ids.iter().copied().collect() {
                        return Err(error);
                    }
                    told = without(told, duplicates);
                    already_there.extend(ids);
                }
            }
            self.tell_enqueued(&told);
        }
        Ok(already_there)
    }

    /// Inserts new jobs, of which some have unique keys. Returns those that were not inserted, by their index in `jobs`, each with the key
    /// that exists already.
    ///
    /// Acknowledged by a majority, unordered. Index: `_id` and the unique indexes. Invariant: I1; of the jobs with one key only one is
    /// inserted.
    pub(crate) async fn insert_keyed_jobs(&self, jobs: Vec<Document>) -> Result<Vec<(usize, Duplicate)>, StoreError> {
        let (mut refused, mut before) = (Vec::new(), 0);
        for batch in batches(jobs) {
            let (scheduled, count) = (self.scheduled.clone(), batch.len());
            let mut told = self.to_tell(&batch);
            match call("insert_keyed_jobs", async move { scheduled.insert_many(batch).ordered(false).await }).await {
                Ok(_) => {}
                Err(error) => {
                    let StoreError::Mongo { source, .. } = &error else { return Err(error) };
                    let Some(duplicates) = known_duplicates(source) else { return Err(error) };
                    told = without(told, duplicates.iter().map(|(at, _)| *at));
                    refused.extend(duplicates.into_iter().map(|(at, duplicate)| (before + at, duplicate)));
                }
            }
            self.tell_enqueued(&told);
            before += count;
        }
        Ok(refused)
    }

    /// Tells that a transaction of Recruiter has enqueued these jobs.
    pub(crate) fn tell_inserted<'a>(&self, jobs: impl IntoIterator<Item = &'a Document>) {
        self.tell_enqueued(&self.to_tell(jobs));
    }

    /// What the events of these jobs need, if there may be subscribers.
    fn to_tell<'a>(&self, jobs: impl IntoIterator<Item = &'a Document>) -> Vec<ToldJob> {
        if self.publisher().wanted().is_none() {
            return Vec::new();
        }
        jobs.into_iter().filter_map(ToldJob::of).collect()
    }

    /// Inserts new jobs as part of the caller's own transaction. Those of `resent` that exist already are not inserted; returns their ids.
    ///
    /// Index: `_id`. Invariant: I1, once the caller's commit is acknowledged by a majority; I2, an archived job is not inserted again.
    ///
    /// # Errors
    /// The caller must then abort the transaction. [`StoreError::NoTransaction`] if the caller has not started one.
    pub(crate) async fn insert_jobs_in(
        &self,
        session: &mut ClientSession,
        mut jobs: Vec<Document>,
        resent: &[JobId],
    ) -> Result<HashSet<JobId>, StoreError> {
        let operation = "insert_jobs_in";
        require_transaction(session, operation).await?;
        let inserted: Result<HashSet<JobId>, Error> = async {
            let known = self.known_in(session, resent).await?;
            jobs.retain(|job| id_of(job).is_none_or(|id| !known.contains(&id)));
            for batch in batches(jobs) {
                self.scheduled.insert_many(batch).session(&mut *session).await?;
            }
            Ok(known)
        }
        .await;
        inserted.map_err(StoreError::of(operation))
    }

    /// Those of these ids that are scheduled or archived, in the caller's transaction.
    ///
    /// Index: `_id`. Invariant: I2, an archived job is not inserted again.
    pub(crate) async fn known_in(&self, session: &mut ClientSession, ids: &[JobId]) -> Result<HashSet<JobId>, Error> {
        let mut known = HashSet::new();
        for some in ids.chunks(BATCH) {
            for collection in [&self.scheduled, &self.archived] {
                let these = doc! { "_id": { "$in": some.to_vec() } };
                let mut found = collection.find(these).projection(doc! { "_id": 1 }).session(&mut *session).await?;
                while let Some(job) = found.next(&mut *session).await.transpose()? {
                    known.extend(id_of(&job));
                }
            }
        }
        Ok(known)
    }

    /// Those of these ids that are scheduled or archived. `scheduled` is read first, because jobs move from there to the archive.
    ///
    /// Filter: these ids. Index: `_id`. Invariant: I2, a job that an application sends again late does not run again.
    pub(crate) async fn known_among(&self, jobs: &[JobId]) -> Result<HashSet<JobId>, StoreError> {
        let scheduled = self.scheduled.clone();
        let filter = doc! { "_id": { "$in": jobs.to_vec() } };
        let found: Vec<Document> = call("known_among", async move {
            scheduled.find(filter).projection(doc! { "_id": 1 }).read_concern(ReadConcern::local()).await?.readable().await
        })
        .await?;
        let mut known: HashSet<JobId> = found.iter().filter_map(id_of).collect();
        let others: Vec<JobId> = jobs.iter().copied().filter(|job| !known.contains(job)).collect();
        if !others.is_empty() {
            known.extend(self.already_archived(&others).await?);
        }
        Ok(known)
    }

    /// Those of these ids that are in the archive, from the primary. A local read is enough: a failover that undoes the archiving also
    /// undoes every copy that was inserted after it.
    ///
    /// Filter: these ids. Index: `_id`. Invariant: I2, a job that an application sends again late does not run again.
    pub async fn already_archived(&self, jobs: &[JobId]) -> Result<HashSet<JobId>, StoreError> {
        let archived = self.archived.clone();
        let filter = doc! { "_id": { "$in": jobs.to_vec() } };
        let found: Vec<Document> = call("already_archived", async move {
            archived.find(filter).projection(doc! { "_id": 1 }).read_concern(ReadConcern::local()).await?.readable().await
        })
        .await?;
        Ok(found.iter().filter_map(id_of).collect())
    }
}

/// The jobs without those with these indexes.
fn without(jobs: Vec<ToldJob>, indexes: impl IntoIterator<Item = usize>) -> Vec<ToldJob> {
    let indexes: HashSet<usize> = indexes.into_iter().collect();
    jobs.into_iter().enumerate().filter(|(at, _)| !indexes.contains(at)).map(|(_, job)| job).collect()
}

fn batches(jobs: Vec<Document>) -> Vec<Vec<Document>> {
    cut(jobs, BATCH, BATCH_BYTES, |job| job.to_vec().map_or(BATCH_BYTES, |bytes| bytes.len()))
}

/// Indexes in the batch of the refused documents, if all were refused because of a duplicate key.
fn only_duplicates(error: &Error) -> Option<Vec<usize>> {
    let ErrorKind::InsertMany(many) = error.kind.as_ref() else { return None };
    let errors = many.write_errors.as_ref().filter(|_| many.write_concern_error.is_none())?;
    errors.iter().map(|error| (error.code == code::DUPLICATE_KEY).then_some(error.index)).collect()
}

/// The key that a refused job has in common with an existing one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Duplicate {
    Id,
    /// The key of one of the unique indexes.
    Key,
}

impl Duplicate {
    /// `None` for an index that is none of ours.
    fn of_index(name: &str) -> Option<Self> {
        match name {
            "_id_" => Some(Self::Id),
            UNIQUE | UNIQUE_WHILE_WAITING | UNIQUE_AFTER => Some(Self::Key),
            _ => None,
        }
    }
}

/// The refused documents, by their index in the batch, if all were refused because of a key of a known index.
fn known_duplicates(error: &Error) -> Option<Vec<(usize, Duplicate)>> {
    let ErrorKind::InsertMany(many) = error.kind.as_ref() else { return None };
    let errors = many.write_errors.as_ref().filter(|_| many.write_concern_error.is_none())?;
    let known = |error: &IndexedWriteError| {
        let index = (error.code == code::DUPLICATE_KEY).then(|| index_in(&error.message)).flatten()?;
        Some((error.index, Duplicate::of_index(index)?))
    };
    errors.iter().map(known).collect()
}

/// The name of the index in the message of a duplicate key: the driver drops the field that has it. No text of a user precedes it.
fn index_in(message: &str) -> Option<&str> {
    let (_, rest) = message.split_once(" index: ")?;
    rest.split_once(" dup key: ").map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_index_of_a_duplicate_key_is_in_the_message() {
        let of = |message: &str| index_in(message).and_then(Duplicate::of_index);
        let message = |index: &str| {
            format!("E11000 duplicate key error collection: db.scheduled index: {index} dup key: {{ unique: \" index: _id_ dup key: \" }}")
        };
        assert_eq!(of(&message("_id_")), Some(Duplicate::Id));
        for ours in ["unique", "unique_while_waiting", "unique_after"] {
            assert_eq!(of(&message(ours)), Some(Duplicate::Key));
        }
        assert_eq!(of(&message("urn_1")), None);
        assert_eq!(of("E11000 duplicate key error"), None);
    }
}
