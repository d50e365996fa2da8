//! Files of jobs: the GridFS bucket `payloads`. The name of a file is the id of its job, `/`, and its name in the job.
//!
//! The cleaner deletes a file whose job is neither in `scheduled` nor in `archived`: the job was never enqueued,
//! was not kept, or its period of retention has passed. The same goes for chunks without a file, which an upload leaves behind that was
//! killed. Both are deleted only when they are older than a day, because a file is written before its job.

use std::collections::{HashMap, HashSet};

use bson::{Bson, Document, RawDocumentBuf, doc, oid::ObjectId};
use futures_util::TryStreamExt;
use mongodb::gridfs::{FilesCollectionDocument, GridFsDownloadStream, GridFsUploadStream};

use crate::{
    base::{Instant, JobId, of_bson},
    mongo::{Feature, Readable, Store, StoreError, WalkStep, call, id_of, lossy},
};

/// Number of chunks that one command copies: a copy of a large file takes longer than a call may.
const CHUNKS_OF_COPY: i64 = 256;

/// The name of a file in the bucket.
fn stored_name(job: JobId, name: &str) -> String {
    format!("{job}/{name}")
}

/// The job of a file, and its name there; `None` for a file that an application has put into the bucket.
fn job_and_name(stored: &str) -> Option<(JobId, &str)> {
    let (job, name) = stored.split_once('/')?;
    Some((job.parse().ok()?, name))
}

impl Store {
    /// Begins to write a file. It is visible when the stream is closed.
    ///
    /// Filter: none, an insert. Index: `_id`. Invariant: none.
    pub(crate) async fn begin_file(&self, job: JobId, name: &str) -> Result<GridFsUploadStream, StoreError> {
        let (payloads, name) = (self.payloads.clone(), stored_name(job, name));
        call("begin_file", async move { payloads.open_upload_stream(name).await }).await
    }

    /// Notes the use of files before the first one is written: without the note a bucket is an application's. Returns whether that is new.
    ///
    /// Index: `_id`. Invariant: none.
    pub(crate) async fn prepare_files(&self) -> Result<bool, StoreError> {
        let is_new = !self.is_in_use(Feature::Files).await?;
        self.prepare(Feature::Files).await.map(|()| is_new)
    }

    /// Begins to read the last file of this name; `None` if there is none.
    ///
    /// Filter: job and name. Index: GridFS's by name and date. Invariant: none.
    pub(crate) async fn begin_to_read_file(&self, job: JobId, name: &str) -> Result<Option<GridFsDownloadStream>, StoreError> {
        let (payloads, named) = (self.payloads.clone(), doc! { "filename": stored_name(job, name) });
        call("begin_to_read_file", async move {
            let last = payloads.find_one(named).sort(doc! { "uploadDate": -1 }).await?;
            match last {
                Some(file) => payloads.open_download_stream(file.id).await.map(Some),
                None => Ok(None),
            }
        })
        .await
    }

    /// The files of some jobs, by name and date; those of an earlier date may have been replaced. None, if files are not in use: the bucket is
    /// an application's then.
    ///
    /// Filter: jobs. Index: GridFS's by name and date. Invariant: none.
    pub(crate) async fn files_of(&self, jobs: &[JobId]) -> Result<Vec<(JobId, String, FilesCollectionDocument)>, StoreError> {
        if jobs.is_empty() || !self.is_in_use(Feature::Files).await? {
            return Ok(Vec::new());
        }
        let (payloads, theirs) = (self.payloads.clone(), doc! { "$or": jobs.iter().map(|job| of_job(*job)).collect::<Vec<_>>() });
        let found: Vec<RawDocumentBuf> = call("files_of", async move {
            let found = payloads.find(theirs).sort(doc! { "filename": 1, "uploadDate": 1 }).await?;
            found.with_type::<RawDocumentBuf>().try_collect().await
        })
        .await?;
        let named = |stored: RawDocumentBuf| {
            let decoded = bson::deserialize_from_slice(stored.as_bytes());
            let undecodable = |error: &bson::error::Error| {
                let (id, error) = (lossy(&stored).get("_id").map(ToString::to_string), of_bson(error));
                tracing::warn!(id, error, "a file of a job cannot be decoded and is left out: delete its document in `payloads.files`");
            };
            let file: FilesCollectionDocument = decoded.inspect_err(undecodable).ok()?;
            let (job, name) = job_and_name(file.filename.as_deref()?)?;
            Some((job, name.to_owned(), file))
        };
        Ok(found.into_iter().filter_map(named).collect())
    }

    /// Deletes a file and its chunks. Harmless to repeat.
    ///
    /// Filter: id. Index: `_id`, GridFS's of the chunks. Invariant: none.
    pub(crate) async fn delete_stored_file(&self, id: Bson) -> Result<(), StoreError> {
        let (files, chunks) = (self.payload_files.clone(), self.payload_chunks.clone());
        call("delete_stored_file", async move {
            files.delete_one(doc! { "_id": id.clone() }).await?;
            chunks.delete_many(doc! { "files_id": id }).await
        })
        .await
        .map(drop)
    }

    /// Copies the files of jobs that are about to be enqueued again to their new ids. MongoDB copies the chunks.
    ///
    /// Filter: file. Index: GridFS's of the chunks. Invariant: none. A repetition makes further copies, which go with their job.
    pub(crate) async fn copy_files(&self, new_of: &HashMap<JobId, JobId>) -> Result<(), StoreError> {
        let jobs: Vec<JobId> = new_of.keys().copied().collect();
        for (job, name, file) in self.files_of(&jobs).await? {
            let Some(new) = new_of.get(&job) else { continue };
            let (files, chunks, id) = (self.payload_files.clone(), self.payload_chunks.clone(), ObjectId::new());
            let parts = file.length.div_ceil(u64::from(file.chunk_size_bytes).max(1) * CHUNKS_OF_COPY.unsigned_abs());
            for part in 0..i64::try_from(parts).unwrap_or(i64::MAX) {
                let (chunks, from) = (chunks.clone(), part * CHUNKS_OF_COPY);
                let copies = [
                    doc! { "$match": { "files_id": file.id.clone(), "n": { "$gte": from, "$lt": from + CHUNKS_OF_COPY } } },
                    doc! { "$set": { "files_id": id } },
                    doc! { "$unset": "_id" },
                    doc! { "$merge": { "into": chunks.name() } },
                ];
                call("copy_chunks", async move { chunks.aggregate(copies).await.map(drop) }).await?;
            }
            let copy = doc! {
                "_id": id,
                "length": i64::try_from(file.length).unwrap_or(i64::MAX),
                "chunkSize": i32::try_from(file.chunk_size_bytes).unwrap_or(i32::MAX),
                "uploadDate": file.upload_date,
                "filename": stored_name(*new, &name),
            };
            call("copy_files", async move { files.insert_one(copy).await }).await?;
        }
        Ok(())
    }

    /// Deletes those of the next `most` files, by their ids, that are older than `before` and have no job.
    ///
    /// Filter: id after the position and before the instant, if files are in use: otherwise the bucket is an application's. Index: `_id`.
    /// Invariant: none, a file is written before its job, and the instant is long ago. The archive is read after the waiting jobs, because that
    /// is the way of a job.
    pub async fn prune_files(&self, position: Option<ObjectId>, before: Instant, most: i64) -> Result<WalkStep<ObjectId>, StoreError> {
        if !self.is_in_use(Feature::Files).await? {
            return Ok(WalkStep { deleted: 0, next: None });
        }
        let (files, examined) = (self.payload_files.clone(), doc! { "_id": between(position, before) });
        let found: Vec<Document> = call("prune_files", async move {
            files.find(examined).sort(doc! { "_id": 1 }).projection(doc! { "filename": 1 }).limit(most).await?.readable().await
        })
        .await?;
        let next = next_of(&found, "_id", most);
        let job_of = |file: &Document| job_and_name(file.get_str("filename").ok()?).map(|(job, _)| job);
        let mut jobs: HashSet<JobId> = found.iter().filter_map(job_of).collect();
        for collection in [&self.scheduled, &self.archived] {
            if jobs.is_empty() {
                break;
            }
            let (collection, jobs_of_files) = (collection.clone(), jobs.iter().copied().collect::<Vec<_>>());
            let these = doc! { "_id": { "$in": jobs_of_files } };
            let present: Vec<Document> =
                call("jobs_of_files", async move { collection.find(these).projection(doc! { "_id": 1 }).await?.readable().await }).await?;
            present.iter().filter_map(id_of).for_each(|job| _ = jobs.remove(&job));
        }
        let mut deleted = 0;
        for file in found.iter().filter(|file| job_of(file).is_some_and(|job| jobs.contains(&job))) {
            self.delete_stored_file(file.get("_id").cloned().unwrap_or_default()).await?;
            deleted += 1;
        }
        Ok(WalkStep { deleted, next })
    }

    /// Deletes the chunks of those of the next `most` uploads, by the ids of their files, that began before `before` and were never finished.
    ///
    /// Filter: file after the position and before the instant, the first chunk. Index: GridFS's of the chunks. Invariant: none, no upload
    /// takes a day.
    pub async fn prune_chunks(&self, position: Option<ObjectId>, before: Instant, most: i64) -> Result<WalkStep<ObjectId>, StoreError> {
        if !self.is_in_use(Feature::Files).await? {
            return Ok(WalkStep { deleted: 0, next: None });
        }
        let chunks = self.payload_chunks.clone();
        let first = doc! { "files_id": between(position, before), "n": 0 };
        let found: Vec<Document> = call("prune_chunks", async move {
            let ids = doc! { "files_id": 1, "_id": 0 };
            chunks.find(first).sort(doc! { "files_id": 1 }).projection(ids).limit(most).await?.readable().await
        })
        .await?;
        let mut ids: HashSet<ObjectId> = found.iter().filter_map(|chunk| chunk.get_object_id("files_id").ok()).collect();
        if !ids.is_empty() {
            let (files, these) = (self.payload_files.clone(), doc! { "_id": { "$in": ids.iter().copied().collect::<Vec<_>>() } });
            let present: Vec<Document> =
                call("files_of_chunks", async move { files.find(these).projection(doc! { "_id": 1 }).await?.readable().await }).await?;
            present.iter().filter_map(|file| file.get_object_id("_id").ok()).for_each(|file| _ = ids.remove(&file));
        }
        for id in &ids {
            self.delete_stored_file((*id).into()).await?;
        }
        Ok(WalkStep { deleted: ids.len() as u64, next: next_of(&found, "files_id", most) })
    }
}

/// The files of a job. `0` follows `/`.
fn of_job(job: JobId) -> Document {
    doc! { "filename": { "$gte": format!("{job}/"), "$lt": format!("{job}0") } }
}

/// Where the step after this one begins: `None` if it has found fewer than it has asked for.
fn next_of(found: &[Document], field: &str, most: i64) -> Option<ObjectId> {
    let is_full = i64::try_from(found.len()).is_ok_and(|count| count >= most);
    found.last().filter(|_| is_full)?.get_object_id(field).ok()
}

/// Ids that were made after another one and before an instant.
fn between(position: Option<ObjectId>, before: Instant) -> Document {
    let seconds = u32::try_from(before.timestamp()).unwrap_or(0);
    let ids = doc! { "$lt": ObjectId::from_parts(seconds, [0; 5], [0; 3]) };
    match position {
        Some(position) => [ids, doc! { "$gt": position }].into_iter().flatten().collect(),
        None => [ids, doc! { "$gte": ObjectId::from_bytes([0; 12]) }].into_iter().flatten().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_named_after_its_job() {
        let job = JobId::new();
        for name in ["a.csv", "dir/a b", "ünï", "/"] {
            assert_eq!(job_and_name(&stored_name(job, name)), Some((job, name)));
        }
        assert_eq!((job_and_name("a.csv"), job_and_name("x/a.csv"), job_and_name("")), (None, None, None));
    }
}
