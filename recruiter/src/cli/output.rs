//! Standard output, and its format.
//!
//! Text from the database is untrusted. Before it reaches a terminal, control characters are escaped and it is cut to a
//! width.

use std::{
    io::{self, BufWriter, ErrorKind, IsTerminal as _, Write},
    os::fd::AsFd as _,
    sync::atomic::{AtomicBool, Ordering},
};

use clap::{Args, builder::BoolishValueParser};
use indicatif::{ProgressBar, ProgressStyle};
pub use recruiter_common::text::printable;
pub(crate) use recruiter_common::text::{apart, briefly_apart, moment};
use tokio::{io::Interest, net::unix::pipe::Sender};

/// The output format: text, or JSON for programs.
#[derive(Args, Clone, Copy, Debug)]
pub struct Format {
    /// Write one JSON object per line, for programs
    #[arg(long, env = "RECRUITER_JSON", value_parser = BoolishValueParser::new())]
    pub json: bool,
}

/// Standard output. Its reader may close it at any time (`… | head`). Then the rest of the output is dropped, and the
/// command completes its work.
pub fn stdout() -> impl Write {
    BufWriter::new(UntilClosed { inner: io::stdout().lock(), closed: false })
}

/// Whether the reader of standard output has closed it.
static IS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Whether a write has found that the reader of standard output has closed it.
pub(crate) fn is_closed() -> bool {
    IS_CLOSED.load(Ordering::Relaxed)
}

/// Resolves when the reader of standard output closes it, also while nothing is written. Never if standard output is a file.
pub(crate) async fn reader_gone() {
    // Only watched, not written to, so that it need not be non-blocking.
    let watched = io::stdout().as_fd().try_clone_to_owned().and_then(Sender::from_owned_fd_unchecked);
    if let Ok(out) = watched
        && out.ready(Interest::ERROR).await.is_ok_and(|ready| ready.is_error())
    {
        return;
    }
    std::future::pending().await
}

/// A progress bar of this style, on a terminal only.
pub(super) fn progress(bar: ProgressBar, style: &str) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    bar.with_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()))
}

struct UntilClosed<W> {
    inner: W,
    closed: bool,
}

impl<W> UntilClosed<W> {
    fn tolerate<T>(&mut self, written: io::Result<T>, instead: T) -> io::Result<T> {
        match written {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                self.closed = true;
                IS_CLOSED.store(true, Ordering::Relaxed);
                Ok(instead)
            }
            other => other,
        }
    }
}

impl<W: Write> Write for UntilClosed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.closed {
            return Ok(bytes.len());
        }
        let written = self.inner.write(bytes);
        self.tolerate(written, bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.closed {
            return Ok(());
        }
        let flushed = self.inner.flush();
        self.tolerate(flushed, ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_leaves_stops_nothing() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Err(ErrorKind::BrokenPipe.into())
            }
        }
        let mut out = UntilClosed { inner: Closed, closed: false };
        assert!(writeln!(out, "lost").is_ok() && out.flush().is_ok() && out.closed);
    }
}
