//! The standard streams of a program.

use std::{io, pin::Pin, sync::Arc};

use futures_util::future::{Either, FusedFuture, select};
use recruiter_common::{job::notes, store::Store};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _},
    process::ChildStdin,
};

use super::{
    messages::{Lines, Obeyed},
    output::Errors,
    settings::{MessagesOn, Settings},
};
use crate::context::Context;

/// Bytes in one read from a pipe.
const CHUNK: usize = 16 * 1024;

/// The standard error of one execution.
pub(super) struct StandardError<'a> {
    pub(super) errors: Errors,
    lines: Lines,
    settings: &'a Settings,
    job: &'a Context,
}

impl<'a> StandardError<'a> {
    pub(super) fn of(settings: &'a Settings, job: &'a Context) -> Self {
        let errors = Errors::with_messages(settings.messages == MessagesOn::StandardError);
        Self { errors, lines: Lines::default(), settings, job }
    }

    pub(super) fn push(&mut self, chunk: &[u8], obeyed: &mut Obeyed) {
        self.errors.push(chunk);
        if self.errors.has_messages || self.settings.log_stderr {
            let mut lines = std::mem::take(&mut self.lines);
            lines.push(chunk, |line, _| self.take(line, obeyed));
            self.lines = lines;
        }
    }

    pub(super) fn finish(&mut self, obeyed: &mut Obeyed) {
        let mut lines = std::mem::take(&mut self.lines);
        lines.finish(|line, _| self.take(line, obeyed));
    }

    fn take(&self, line: &[u8], obeyed: &mut Obeyed) {
        let is_message = self.errors.has_messages && obeyed.obey(line, self.job);
        if self.settings.log_stderr && !is_message {
            log_line(line, Some(self.job), &Loggable::of(self.job));
        }
    }
}

/// Which lines of the program of a class may be logged, also when it runs no job.
pub(super) struct Loggable {
    store: Option<Arc<Store>>,
    class: String,
}

impl Loggable {
    pub(super) fn of(job: &Context) -> Self {
        Self { store: job.store.clone(), class: job.class().into() }
    }

    fn shown<'a>(&self, line: &'a str) -> &'a str {
        self.store.as_ref().map_or(line, |store| store.may_log(&self.class, line))
    }
}

/// Puts a line of standard error into the logs of the worker and of the job.
pub(super) fn log_line(line: &[u8], job: Option<&Context>, loggable: &Loggable) {
    let line = String::from_utf8_lossy(&line[..line.len().min(notes::LONGEST_LINE)]);
    let line = line.trim_end();
    if line.is_empty() {
        return;
    }
    tracing::info!(
        job.id = job.map(|job| tracing::field::display(job.job_id())),
        job.class = job.map(Context::class),
        line = loggable.shown(line),
        "standard error"
    );
    if let Some(job) = job {
        job.log(line);
    }
}

/// Waits for the end of the leader and serves its streams meanwhile.
pub(super) async fn with_streams(
    ended: Pin<&mut impl Future<Output = io::Result<()>>>,
    streams: Pin<&mut impl FusedFuture>,
) -> io::Result<()> {
    match select(ended, streams).await {
        Either::Left((ended, _)) => ended,
        Either::Right((_, ended)) => ended.await,
    }
}

pub(super) async fn feed(to: Option<ChildStdin>, input: &[u8]) {
    if let Some(mut to) = to {
        // A program need not read its input.
        let _ = to.write_all(input).await;
    }
}

pub(super) async fn drain(from: Option<impl AsyncRead + Unpin>, mut keep: impl FnMut(&[u8])) {
    let Some(mut from) = from else { return };
    let mut chunk = vec![0; CHUNK];
    while let Ok(length @ 1..) = from.read(&mut chunk).await {
        keep(&chunk[..length]);
    }
}
