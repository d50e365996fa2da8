//! `recruiter enqueue --from FILE`: one job for each line of JSON.
//!
//! A file is read as a stream. A batch contains the lines that can be read without waiting. Therefore a large file
//! needs little memory, and a slow pipe does not delay its jobs. Each job gets its id before the first attempt to send
//! it, so a repetition after a lost reply does not enqueue it twice.

use std::{io::Write, os::fd::AsFd, path::Path, time::Duration};

use anyhow::{Context, anyhow};
use backon::{ConstantBuilder, Retryable as _};
use indicatif::ProgressBar;
use recruiter_common::{
    enqueue::{EnqueueError, Enqueued, NewJob, Outcome},
    exit::Exit,
    ids::JobId,
    shutdown::{Shutdown, pause},
    spec::{Classes, JobSpec, LONGEST_LINE},
    store::Store,
    telemetry::chain,
};
use serde_json::json;
use tokio::{
    fs::File,
    io::{AsyncBufReadExt, AsyncReadExt, BufReader},
};

use super::{
    exit::{problem_of, unreadable},
    output::{Format, progress},
    presence::Needs,
    retries::unknown_policies,
    view::{json_line, line},
};

/// Maximum number of jobs sent together.
const BATCH: usize = 1_000;
/// Size of the read buffer in bytes. A batch has at most this many bytes plus one line.
const READ_AHEAD: usize = 1024 * 1024;
/// When a batch is sent again that MongoDB does not answer. Enough for a failover.
const AGAIN: ConstantBuilder = ConstantBuilder::new().with_delay(Duration::from_secs(1)).with_max_times(10);

/// A reader of a file, line by line.
pub(super) struct Lines {
    name: String,
    reader: BufReader<File>,
    /// Size of the file in bytes, if known.
    size: Option<u64>,
    /// Number of the current line.
    number: u64,
    line: Vec<u8>,
}

impl Lines {
    pub(super) async fn open(path: &Path) -> anyhow::Result<Self> {
        let (name, file) = if path == Path::new("-") {
            let stdin = std::io::stdin().as_fd().try_clone_to_owned().context("cannot read standard input")?;
            ("standard input".to_owned(), File::from_std(stdin.into()))
        } else {
            let name = path.display().to_string();
            let file = File::open(path).await.map_err(|error| unreadable(path, error))?;
            (name, file)
        };
        let size = file.metadata().await.ok().filter(std::fs::Metadata::is_file).map(|file| file.len());
        Ok(Self { name, reader: BufReader::with_capacity(READ_AHEAD, file), size, number: 0, line: Vec::new() })
    }

    /// Reads the next line, cut after [`LONGEST_LINE`] bytes. Returns whether there was one.
    async fn advance(&mut self) -> Result<bool, String> {
        self.line.clear();
        self.number += 1;
        let limit = LONGEST_LINE as u64 + 1;
        let read = (&mut self.reader).take(limit).read_until(b'\n', &mut self.line).await;
        read.map(|bytes| bytes > 0).map_err(|error| format!("cannot be read: {error}"))
    }

    /// Whether the next line is in the buffer already, so that reading it does not wait.
    fn has_next(&self) -> bool {
        self.reader.buffer().contains(&b'\n')
    }

    fn progress(&self) -> ProgressBar {
        let bar = match self.size {
            Some(size) => progress(ProgressBar::new(size), "{bar:40} {percent:>3} %  {msg} enqueued  {eta} left"),
            None => progress(ProgressBar::no_length(), "{spinner} {msg} enqueued  {elapsed}"),
        };
        bar.with_message("0")
    }
}

/// A file that is being enqueued.
pub(super) struct Import<'a, W> {
    store: &'a Store,
    format: Format,
    wait_for_room: Duration,
    out: &'a mut W,
    /// Number of jobs enqueued so far.
    enqueued: u64,
    /// All lines up to this number are enqueued.
    done: u64,
    shown: ProgressBar,
    /// What the jobs enqueued so far need.
    pub(super) needs: Needs,
}

/// Line number, id and job.
type Numbered = (u64, JobId, NewJob);

impl<'a, W: Write> Import<'a, W> {
    pub(super) fn new(store: &'a Store, lines: &Lines, skip: u64, wait_for_room: Duration, format: Format, out: &'a mut W) -> Self {
        Self { store, format, wait_for_room, out, enqueued: 0, done: skip, shown: lines.progress(), needs: Needs::default() }
    }

    /// Enqueues the jobs of these lines. If a line is not a job, or after a stop, no job after it is enqueued, and the error says where to
    /// continue.
    pub(super) async fn run(
        &mut self,
        lines: &mut Lines,
        classes: &Classes,
        custom_policy: bool,
        shutdown: &mut Shutdown,
    ) -> anyhow::Result<()> {
        let skip = self.done;
        let mut batch: Vec<Numbered> = Vec::new();
        loop {
            // Cancelling this read is safe: after a stop no more lines are read.
            let advanced = tokio::select! {
                advanced = lines.advance() => advanced,
                () = shutdown.requested() => return Err(self.stopped(Exit::Aborted, "stopped by a signal")),
            };
            self.shown.inc(lines.line.len() as u64);
            let ended = advanced == Ok(false);
            let job = match advanced {
                Ok(true) if lines.number <= skip => continue,
                Ok(true) => job_of_line(&lines.line, classes, custom_policy),
                Ok(false) => Ok(None),
                Err(problem) => Err(problem),
            };
            let (job, bad) = match job {
                Ok(job) => (job, None),
                Err(problem) => (None, Some(problem)),
            };
            batch.extend(job.map(|(id, job)| (lines.number, id, job)));
            if ended || bad.is_some() || batch.len() >= BATCH || !lines.has_next() {
                self.send(std::mem::take(&mut batch), &lines.name).await?;
            }
            match bad {
                Some(problem) => return Err(self.stopped(Exit::Failure, &format!("{}:{}: {problem}", lines.name, lines.number))),
                None if ended => return self.finish(),
                None => {}
            }
        }
    }

    /// Sends the jobs together. If one is refused, sends them one by one to find out which.
    async fn send(&mut self, batch: Vec<Numbered>, name: &str) -> anyhow::Result<()> {
        let refused = self.deliver(&batch).await?;
        if refused.is_some() {
            for one in &batch {
                if let Some(refused) = self.deliver(std::slice::from_ref(one)).await? {
                    return Err(self.stopped(Exit::Failure, &format!("{name}:{}: {refused}", one.0)));
                }
            }
        }
        Ok(())
    }

    /// Enqueues all of these jobs and writes their ids. Returns the reason if MongoDB or the library refuses one of
    /// them.
    async fn deliver(&mut self, batch: &[Numbered]) -> anyhow::Result<Option<String>> {
        let ([(first, ..), ..], [.., (last, ..)]) = (batch, batch) else { return Ok(None) };
        let sent = (|| self.store.enqueue_when_room(batch.iter().map(|(.., job)| job.clone()), self.wait_for_room))
            .retry(AGAIN)
            .sleep(pause)
            .when(|error| matches!(error, EnqueueError::Store(error) if error.may_pass()))
            .notify(|error, _| tracing::warn!(error = chain(error), "a batch may not have arrived; sending it again"));
        let enqueued = match sent.await {
            Ok(enqueued) => enqueued,
            Err(EnqueueError::Store(error)) if error.is_transient() => {
                return Err(self.stopped(
                    Exit::Unavailable,
                    &format!("lines {first} to {last} may have been enqueued; --skip {last} skips them: {}", chain(&error)),
                ));
            }
            Err(refused) => return Ok(Some(chain(&refused))),
        };
        self.done = *last;
        // A known id may be of an earlier attempt to send this batch.
        self.enqueued += enqueued.iter().filter(|job| job.is_new || job.outcome == Outcome::KnownId).count() as u64;
        batch.iter().for_each(|(.., job)| self.needs.add(job));
        self.shown.set_message(self.enqueued.to_string());
        let written = write_ids(self.out, self.format, &enqueued).and_then(|()| self.out.flush());
        written.map(|()| None).map_err(|error| self.stopped(Exit::Failure, &format!("cannot write the ids: {error}")))
    }

    /// The error of an import that stopped, with the line to continue at.
    fn stopped(&self, exit: Exit, why: &str) -> anyhow::Error {
        self.shown.finish_and_clear();
        let (enqueued, done) = (self.enqueued, self.done);
        let so_far = match enqueued {
            0 => "nothing was enqueued".to_owned(),
            _ => format!("{enqueued} jobs were enqueued, up to line {done}; continue with --skip {done}"),
        };
        anyhow!("{why}; {so_far}").context(exit)
    }

    fn finish(&mut self) -> anyhow::Result<()> {
        self.shown.finish_and_clear();
        if self.format.json {
            json_line(self.out, &json!({ "enqueued": self.enqueued }))?;
        } else {
            writeln!(std::io::stderr(), "enqueued: {}", self.enqueued)?;
        }
        Ok(())
    }
}

/// The job and its id, validated as far as this program can.
pub(super) fn job_of(spec: JobSpec, classes: &Classes, custom_policy: bool) -> Result<(JobId, NewJob), String> {
    let mut spec = spec.with_defaults(classes);
    let id = *spec.id.get_or_insert_with(JobId::new);
    Ok((id, spec.into_job(unknown_policies(custom_policy)).map_err(|problem| problem_of(&problem))?))
}

/// The job on one line of a file; `None` for a blank line.
fn job_of_line(line: &[u8], classes: &Classes, custom_policy: bool) -> Result<Option<(JobId, NewJob)>, String> {
    JobSpec::of_line(line).map_err(|problem| problem.to_string())?.map(|spec| job_of(spec, classes, custom_policy)).transpose()
}

/// Writes the ids of the jobs: of a job that was not enqueued, the id of the existing one.
pub(super) fn write_ids(out: &mut impl Write, format: Format, enqueued: &[Enqueued]) -> std::io::Result<()> {
    enqueued
        .iter()
        .try_for_each(|Enqueued { id, outcome, .. }| line(out, format, &json!({ "id": id.to_string(), "outcome": outcome.word() }), id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_that_this_program_does_not_know_needs_a_flag() {
        let line = br#"{"class": "c", "retry_policy": {"class": "Mine"}}"#;
        assert!(
            job_of_line(line, &Classes::new(), false)
                .is_err_and(|problem| problem.ends_with("if your workers know it, add --custom-policy"))
        );
        assert!(job_of_line(line, &Classes::new(), true).is_ok_and(|job| job.is_some()));
        let same_id = br#"{"class": "c", "id": "65a1b2c3d4e5f60718293a4b"}"#;
        let (id, job) = job_of_line(same_id, &Classes::new(), false).expect("a job").expect("a job");
        assert!(id.to_string() == "65a1b2c3d4e5f60718293a4b" && format!("{job:?}").contains("65a1b2c3d4e5f60718293a4b"));
    }
}
