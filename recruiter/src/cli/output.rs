//! Output to standard output, shared by the read-only commands and by the commands that report changes.
//!
//! Text from the database is untrusted. Before it reaches a terminal, control characters are escaped and it is cut to a
//! width. JSON is MongoDB's relaxed extended JSON, one object per line.

use std::{
    io::{self, BufWriter, ErrorKind, Write},
    os::fd::AsFd as _,
    sync::atomic::{AtomicBool, Ordering},
};

use anstyle::{AnsiColor, Reset};
use bson::{Bson, Document, doc};
use clap::{Args, builder::BoolishValueParser};
pub use recruiter_common::text::printable;
pub(crate) use recruiter_common::text::{apart, briefly_apart, moment};
use tabled::{
    builder::Builder,
    settings::{
        Alignment, Color, Padding, Style, Width,
        object::{Cell, Columns},
        peaker::Peaker,
    },
};
use tokio::{io::Interest, net::unix::pipe::Sender};

/// Width in characters when the output is not a terminal.
const PLAIN_WIDTH: usize = 80;
/// Minimum width of a table in characters.
const NARROWEST: usize = 40;
/// Space between two columns, in characters.
const GAP: usize = 2;
/// Indentation of the second line of a row.
const INDENT: &str = "    ";

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

/// A stored document as programs get it: its id as `id`, in hex like everywhere, and its state in one word.
pub(crate) fn with_state(document: Document, state: &str) -> Document {
    let id = document.get("_id").map(|id| id.as_object_id().map_or_else(|| id.clone(), |id| id.to_hex().into()));
    let mut line = doc! { "id": id, "state": state };
    line.extend(document.into_iter().filter(|(field, _)| field != "_id"));
    line
}

/// Writes one document as one line of JSON.
///
/// # Errors
/// When it cannot be written.
pub fn json_line(out: &mut impl Write, document: Document) -> io::Result<()> {
    writeln!(out, "{}", Bson::Document(document).into_relaxed_extjson())
}

/// Width and colours of the output.
#[derive(Clone, Copy, Debug)]
pub struct Screen {
    /// Width in characters.
    pub width: usize,
    /// Whether colours are written.
    pub colours: bool,
}

impl Screen {
    /// Standard output: the width of the terminal (or `COLUMNS`), 80 characters if it is not a terminal. Colours only
    /// on a terminal, and not if `NO_COLOR` is set.
    pub fn of_stdout() -> Self {
        let asked = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok()).filter(|columns| *columns > 0);
        let found = terminal_size::terminal_size_of(io::stdout()).map(|(width, _)| usize::from(width.0)).filter(|columns| *columns > 0);
        let colours = anstream::AutoStream::choice(&io::stdout()) != anstream::ColorChoice::Never;
        Self { width: found.or(asked).unwrap_or(PLAIN_WIDTH).max(NARROWEST), colours }
    }
}

/// A column: its title, its alignment, and the width to which it may be cut.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    title: &'static str,
    right: bool,
    least: usize,
}

impl Column {
    /// A column of texts.
    pub const fn left(title: &'static str) -> Self {
        Self { title, right: false, least: usize::MAX }
    }

    /// A column of numbers.
    pub const fn right(title: &'static str) -> Self {
        Self { title, right: true, least: usize::MAX }
    }

    /// Allows cells to be cut to `least` characters on a narrow screen.
    pub const fn cut_to(self, least: usize) -> Self {
        Self { least, ..self }
    }
}

/// One row: its cells, and optionally a second line.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// A text for each column.
    pub cells: Vec<String>,
    /// Index of the coloured cell, and its colour.
    pub colour: Option<(usize, AnsiColor)>,
    /// Text on a second line.
    pub below: Option<String>,
}

impl From<Vec<String>> for Row {
    fn from(cells: Vec<String>) -> Self {
        Self { cells, ..Self::default() }
    }
}

/// Writes rows under the titles of their columns. Each column is as wide as its widest cell. If the table is wider than
/// the screen, the widest columns that may be cut are cut.
///
/// # Errors
/// When it cannot be written.
pub fn table(out: &mut impl Write, screen: Screen, columns: &[Column], rows: &[Row]) -> io::Result<()> {
    let mut table = Builder::from_iter(rows.iter().map(|row| &row.cells));
    table.insert_record(0, columns.iter().map(|column| column.title));
    let mut table = table.build();
    table.with(Style::empty()).with(Padding::zero()).modify(Columns::new(1..), Padding::new(GAP, 0, 0, 0));
    for (at, _) in columns.iter().enumerate().filter(|(_, column)| column.right) {
        table.modify(Columns::one(at), Alignment::right());
    }
    for (row, (at, colour)) in rows.iter().enumerate().filter_map(|(row, shown)| Some((row, shown.colour?))).filter(|_| screen.colours) {
        table.modify(Cell::new(row + 1, at), Color::new(colour.on_default().to_string(), Reset.to_string()));
    }
    table.with(Width::truncate(screen.width).suffix("…").priority(Widest(columns)));
    // A cell has no line break, so each row is one line.
    let below = std::iter::once(None).chain(rows.iter().map(|row| row.below.as_ref()));
    for (line, below) in table.to_string().lines().zip(below) {
        writeln!(out, "{}", line.trim_end())?;
        if let Some(below) = below {
            writeln!(out, "{INDENT}{}", shortened(below, screen.width - INDENT.len()))?;
        }
    }
    Ok(())
}

/// Cuts the widest of the columns that may be cut.
struct Widest<'a>(&'a [Column]);

impl Peaker for Widest<'_> {
    fn peak(&mut self, _: &[usize], widths: &[usize]) -> Option<usize> {
        let may_be_cut = |at: &usize| widths[*at] > self.0[*at].least.saturating_add(if *at == 0 { 0 } else { GAP });
        (0..widths.len()).filter(may_be_cut).max_by_key(|at| widths[*at])
    }
}

/// Cuts text to `width` characters and marks the cut with an ellipsis.
fn shortened(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(width: usize, columns: &[Column], rows: &[Row]) -> String {
        let mut out = Vec::new();
        table(&mut out, Screen { width, colours: false }, columns, rows).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn row(cells: &[&str]) -> Row {
        Row::from(cells.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn a_table_is_as_wide_as_its_widest_cells() {
        let rows = [row(&["ä", "1"]), row(&["日本", ""]), row(&["long name", "1000"])];
        let columns = [Column::left("GROUP"), Column::right("N")];
        assert_eq!(written(80, &columns, &rows), "GROUP         N\nä             1\n日本\nlong name  1000\n");
    }

    #[test]
    fn a_table_is_no_wider_than_the_screen_where_its_columns_may_be_cut() {
        let columns = [Column::left("ID"), Column::left("CLASS").cut_to(4), Column::left("GROUP").cut_to(4)];
        let mut rows = [row(&["0123456789", "abcdefghijklmnopqrst", "uvwxyzuvwxyz"])];
        assert_eq!(written(40, &columns, &rows), "ID          CLASS           GROUP\n0123456789  abcdefghijklm…  uvwxyzuvwxyz\n");
        rows[0].below = Some("x".repeat(99));
        let narrow = written(24, &columns, &rows);
        assert!(narrow.lines().all(|line| line.chars().count() <= 24), "{narrow}");
        assert!(
            narrow.starts_with("ID          CLASS  GROUP\n0123456789  abcd…  uvwx…\n")
                && narrow.ends_with(&format!("    {}…\n", "x".repeat(19))),
            "{narrow}"
        );
    }

    #[test]
    fn colours_are_seen_only_where_they_can_be() {
        let show = |colours| {
            let row = Row { colour: Some((0, AnsiColor::Red)), ..row(&["failed"]) };
            let mut out = Vec::new();
            table(&mut out, Screen { width: 80, colours }, &[Column::left("STATE")], &[row]).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!((show(false).as_str(), show(true).as_str()), ("STATE\nfailed\n", "STATE\n\u{1b}[31mfailed\u{1b}[0m\n"));
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
