//! Files of jobs: payloads and results that are too large for a document. They are in GridFS, in the bucket `payloads`.
//!
//! A file belongs to a job and has a name there. The id of the job is enough to write and read it: for the enqueuer before the job is
//! enqueued, for the workable, and later for the reader of the result.
//!
//! ```no_run
//! use recruiter_common::{Client, JobId, NewJob, bson::doc};
//!
//! # async fn example(client: &Client) -> Result<(), Box<dyn std::error::Error>> {
//! let job = JobId::new();
//! client.put_file(job, "scan.tiff", tokio::fs::File::open("scan.tiff").await?).await?;
//! NewJob::of_class("ReadText", doc! { "file": "scan.tiff" }).with_id(job).enqueue(client).await?;
//! // In the workable: `job.client().open_file(job.job_id(), "scan.tiff")`.
//! let text: Vec<u8> = client.read_file(job, "text.txt").await?;
//! # Ok(())
//! # }
//! ```
//!
//! A file stays as long as its job is in `scheduled` or in `archived`. The cleaner deletes it afterwards, and a file whose job was never
//! enqueued after a day. A job that is retried from the archive has copies of the files. Other programs find them with every driver, and
//! with `mongofiles --prefix payloads`, under the name `JOB/NAME`.

pub(crate) mod bucket;

use std::{io, time::Duration};

use bson::Bson;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    time::timeout,
};
use tokio_util::compat::{FuturesAsyncReadCompatExt, FuturesAsyncWriteCompatExt};

use crate::{
    base::{Instant, JobId, check_name},
    mongo::{Client, Store, StoreError, schema},
};

/// Maximum time without progress of a transfer.
const STALLS_AFTER: Duration = Duration::from_secs(30);
/// Size of the parts in which content is read and written.
const PART: usize = 255 * 1024;

/// A file of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobFile {
    /// Its name in the job.
    pub name: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// When it was written, by the clock of the writer.
    pub written_at: Instant,
}

/// A file was not written, read or deleted.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
#[non_exhaustive]
pub enum FileError {
    /// The name cannot be stored.
    #[error("the name of a file {problem}")]
    Name { problem: String },
    /// The job has no such file.
    #[error("the job {job} has no file {name:.80?}")]
    NotFound { job: JobId, name: String },
    /// The content could not be read, so nothing was stored.
    #[error("the content of the file {name:.80?} cannot be read")]
    Content { name: String, source: io::Error },
    /// MongoDB failed in a transfer, or parts of the file are missing. An unfinished file is not visible.
    #[error("the transfer of the file {name:.80?} failed")]
    Transfer { name: String, source: io::Error },
    /// A MongoDB operation failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Client {
    /// Writes a file of a job, which need not be enqueued yet. It replaces an earlier file of this name once it is complete.
    ///
    /// Without its job it is deleted after a day.
    ///
    /// # Errors
    /// When the name is empty, longer than 256 bytes or has a NUL; when the content cannot be read; when MongoDB fails, or does not reply for
    /// 30 seconds. Then the earlier file stays.
    pub async fn put_file(&self, job: JobId, name: &str, mut content: impl AsyncRead + Unpin + Send) -> Result<JobFile, FileError> {
        let store = self.store();
        check_name(name).map_err(|problem| FileError::Name { problem })?;
        let failed = |source| FileError::Transfer { name: name.into(), source };
        let is_first = store.prepare_files().await?;
        let mut upload = store.begin_file(job, name).await?.compat_write();
        let (mut bytes, mut part) = (0, vec![0; PART]);
        loop {
            let read = content.read(&mut part).await.map_err(|source| FileError::Content { name: name.into(), source })?;
            if read == 0 {
                break;
            }
            unless_it_stalls(upload.write_all(&part[..read])).await.map_err(failed)?;
            bytes += read as u64;
        }
        unless_it_stalls(upload.shutdown()).await.map_err(failed)?;
        let id = upload.get_ref().id().clone();
        store.delete_files_of(job, |stored, older| stored == name && *older != id).await?;
        if is_first {
            // Lists the bucket's collections as ours. The next start lists them as well.
            schema::note(&store).await?;
        }
        Ok(JobFile { name: name.into(), bytes, written_at: self.now() })
    }

    /// Opens a file of a job.
    ///
    /// # Errors
    /// When there is none of this name, or MongoDB fails. The stream ends with an error if parts of the file are missing.
    pub async fn open_file(&self, job: JobId, name: &str) -> Result<impl AsyncRead + Unpin + Send + 'static, FileError> {
        let found = self.store().begin_to_read_file(job, name).await?;
        found.map(FuturesAsyncReadCompatExt::compat).ok_or_else(|| FileError::NotFound { job, name: name.into() })
    }

    /// Reads a whole file of a job into memory.
    ///
    /// # Errors
    /// As [`open_file`](Self::open_file); when parts of the file are missing; when MongoDB does not reply for 30 seconds.
    pub async fn read_file(&self, job: JobId, name: &str) -> Result<Vec<u8>, FileError> {
        let failed = |source| FileError::Transfer { name: name.into(), source };
        let (mut content, mut part, mut whole) = (self.open_file(job, name).await?, vec![0; PART], Vec::new());
        loop {
            match unless_it_stalls(content.read(&mut part)).await.map_err(failed)? {
                0 => return Ok(whole),
                read => whole.extend_from_slice(&part[..read]),
            }
        }
    }

    /// The files of a job, by name.
    ///
    /// # Errors
    /// When MongoDB fails.
    pub async fn files(&self, job: JobId) -> Result<Vec<JobFile>, FileError> {
        let mut files: Vec<JobFile> = Vec::new();
        for (_, name, stored) in self.store().files_of(&[job]).await? {
            // The last one of a name counts.
            files.pop_if(|file| file.name == name);
            files.push(JobFile { name, bytes: stored.length, written_at: stored.upload_date.to_chrono() });
        }
        Ok(files)
    }

    /// Deletes a file of a job. Returns false if there is none of this name.
    ///
    /// # Errors
    /// When MongoDB fails.
    pub async fn delete_file(&self, job: JobId, name: &str) -> Result<bool, FileError> {
        let store = self.store();
        Ok(self.if_set_up(store.delete_files_of(job, |stored, _| stored == name)).await? > 0)
    }
}

impl Store {
    /// Deletes the files of a job for which this is true. Returns their number.
    async fn delete_files_of(&self, job: JobId, which: impl Fn(&str, &Bson) -> bool) -> Result<usize, StoreError> {
        let mut count = 0;
        for (_, name, stored) in self.files_of(&[job]).await? {
            if which(&name, &stored.id) {
                self.delete_stored_file(stored.id).await?;
                count += 1;
            }
        }
        Ok(count)
    }
}

async fn unless_it_stalls<T>(transfer: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let stalled = || io::Error::new(io::ErrorKind::TimedOut, format!("no reply within {} s", STALLS_AFTER.as_secs()));
    timeout(STALLS_AFTER, transfer).await.unwrap_or_else(|_| Err(stalled()))
}
