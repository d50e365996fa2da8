//! What the commands that ask and tell have in common: how they write to standard output.
//!
//! Text that comes out of the database is somebody else's: it reaches a terminal without control characters and cut
//! to a width. JSON is MongoDB's relaxed extended JSON, one object a line.

use std::{
    fmt::Write as _,
    io::{self, BufWriter, ErrorKind, Write},
    time::Duration,
};

use bson::{Bson, Document};
use clap::{Args, builder::BoolishValueParser};
use recruiter_common::instant::Instant;

/// For people, or for programs.
#[derive(Args, Clone, Copy, Debug)]
pub struct Format {
    /// Write one JSON object a line, for programs
    #[arg(long, env = "RECRUITER_JSON", value_parser = BoolishValueParser::new())]
    pub json: bool,
}

/// Standard output. Whoever reads it may stop reading at any time (`… | head`): the rest is then dropped, and the
/// command does its work to the end.
pub fn stdout() -> impl Write {
    BufWriter::new(UntilClosed { inner: io::stdout().lock(), closed: false })
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

/// One document as one line of JSON.
pub(crate) fn json_line(out: &mut impl Write, document: Document) -> io::Result<()> {
    writeln!(out, "{}", Bson::Document(document).into_relaxed_extjson())
}

/// A column: its title, and the side its cells are set to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Column {
    Left(&'static str),
    Right(&'static str),
}

/// Rows under their titles, each column as wide as its widest cell.
pub(crate) fn table<const N: usize>(out: &mut impl Write, columns: [Column; N], rows: &[[String; N]]) -> io::Result<()> {
    let titles = columns.map(|column| match column {
        Column::Left(title) | Column::Right(title) => title.to_owned(),
    });
    let lines = || std::iter::once(&titles).chain(rows);
    let widths: [usize; N] = std::array::from_fn(|at| lines().map(|line| line[at].chars().count()).max().unwrap_or(0));
    for line in lines() {
        let mut text = String::new();
        for ((cell, column), width) in line.iter().zip(columns).zip(widths) {
            let written = match column {
                Column::Left(_) => write!(text, "{cell:<width$}  "),
                Column::Right(_) => write!(text, "{cell:>width$}  "),
            };
            written.map_err(io::Error::other)?;
        }
        writeln!(out, "{}", text.trim_end())?;
    }
    Ok(())
}

/// Somebody else's text on one line: control characters (and those that reverse the direction of writing) escaped,
/// cut to `width` characters.
pub(crate) fn printable(text: &str, width: usize) -> String {
    let hidden = |c: char| c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let mut shown = String::new();
    let mut room = width;
    for c in text.chars() {
        if room == 0 {
            shown.pop();
            shown.push('…');
            break;
        }
        if hidden(c) {
            shown.extend(c.escape_default())
        } else {
            shown.push(c)
        }
        room -= 1;
    }
    shown
}

/// An instant in UTC, to the millisecond.
pub(crate) fn moment(at: Instant) -> String {
    at.format("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}

/// How far apart two instants are, as people say it: `2days 3h`.
pub(crate) fn apart(one: Instant, other: Instant) -> String {
    let seconds = (one - other).abs().num_seconds().unsigned_abs();
    let exact = humantime::format_duration(Duration::from_secs(seconds)).to_string();
    exact.split(' ').take(2).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_others_cannot_steer_the_terminal() {
        let check = |text: &str, width: usize, expected: &str| assert_eq!(printable(text, width), expected, "{text:?}");
        check("plain ünï", 40, "plain ünï");
        check("\u{1b}[2J\r\n\0", 40, "\\u{1b}[2J\\r\\n\\u{0}");
        check("\u{202e}evil", 40, "\\u{202e}evil");
        check("abcdef", 6, "abcdef");
        check("abcdefg", 6, "abcde…");
        check(&"x".repeat(10_000), 3, "xx…");
    }

    #[test]
    fn a_table_is_as_wide_as_its_widest_cells() {
        let mut out = Vec::new();
        let rows = [["ä".into(), "1".into()], ["long name".into(), "1000".into()]];
        table(&mut out, [Column::Left("GROUP"), Column::Right("N")], &rows).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "GROUP         N\nä             1\nlong name  1000\n");
    }

    #[test]
    fn distances_are_said_in_two_words() {
        let check = |seconds: i64, expected: &str| {
            let then = Instant::default() + chrono::TimeDelta::seconds(seconds);
            assert_eq!((apart(then, Instant::default()), apart(Instant::default(), then)), (expected.into(), expected.into()));
        };
        check(0, "0s");
        check(61, "1m 1s");
        check(2 * 86_400 + 3 * 3_600 + 4, "2days 3h");
    }

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
