//! What the commands print about things: JSON for programs, tables for people.
//!
//! Each thing is a struct, a `View`. JSON is MongoDB's relaxed extended JSON, one object per line.

use std::{
    fmt::Display,
    io::{self, Write},
};

use anstyle::{AnsiColor, Reset};
use bson::Document;
use serde::Serialize;
use serde_json::Value;
use tabled::{
    builder::Builder,
    settings::{Alignment, Color, Padding, Style, Width, object::Columns, peaker::Peaker},
};

use super::output::Format;
pub(super) use crate::views::{date, or_dash, outcome_of as outcome, story::id_in, texts};
use crate::views::{extended, tone::Tone};

/// Width in characters when the output is not a terminal.
const PLAIN_WIDTH: usize = 80;
/// Minimum width of a table in characters.
const NARROWEST: usize = 40;
/// Minimum width, in characters, of a screen that shows every column.
const ROOMY: usize = 100;
/// Space between two columns, in characters.
const GAP: usize = 2;
/// Indentation of the second line of a row.
const INDENT: &str = "    ";

/// What a list prints about one thing: a line of JSON, and a row of a table.
pub(super) trait View: Serialize {
    fn row(self) -> Row;
}

/// A stored document as it is, and its row.
#[derive(Serialize)]
#[serde(transparent)]
pub(super) struct Stored {
    pub(super) document: Value,
    #[serde(skip)]
    pub(super) row: Row,
}

impl View for Stored {
    fn row(self) -> Row {
        self.row
    }
}

/// Prints a list. People read `none` in place of an empty table.
pub(super) fn print<V: View>(out: &mut impl Write, format: Format, none: &str, views: impl IntoIterator<Item = V>) -> io::Result<()> {
    let mut views = views.into_iter();
    if format.json {
        return views.try_for_each(|view| json_line(out, &view));
    }
    let rows: Vec<Row> = views.map(View::row).collect();
    if rows.is_empty() { writeln!(out, "{none}") } else { table(out, Screen::of_stdout(), &rows) }
}

/// Writes one thing as one line: of JSON, or this text.
pub(super) fn line(out: &mut impl Write, format: Format, view: &impl Serialize, text: impl Display) -> io::Result<()> {
    if format.json { json_line(out, view) } else { writeln!(out, "{text}") }
}

/// Writes the fields of one thing for people, each on a line: its name, with this width in characters, and its text. A field without a text is
/// left out.
pub(super) fn fields<N: Display>(out: &mut impl Write, width: usize, fields: impl IntoIterator<Item = (N, String)>) -> io::Result<()> {
    let mut known = fields.into_iter().filter(|(_, text)| !text.is_empty());
    known.try_for_each(|(name, text)| writeln!(out, "{name:<width$} {text}"))
}

/// Writes one line of JSON.
pub(super) fn json_line(out: &mut impl Write, view: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *out, view)?;
    writeln!(out)
}

/// Writes one document as one line of JSON.
pub fn document_line(out: &mut impl Write, document: Document) -> io::Result<()> {
    json_line(out, &extended(document))
}

/// The colour of a state.
pub(super) fn colour(tone: Tone) -> Option<AnsiColor> {
    match tone {
        Tone::Plain => None,
        Tone::Good => Some(AnsiColor::Green),
        Tone::Active => Some(AnsiColor::Cyan),
        Tone::Warning => Some(AnsiColor::Yellow),
        Tone::Bad => Some(AnsiColor::Red),
    }
}

/// What precedes the outcome of a dry run, for people.
pub(super) fn dry(dry_run: bool) -> &'static str {
    if dry_run { "(dry run) " } else { "" }
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

/// A cell: the title of its column, its text, and the width to which it may be cut.
#[derive(Clone, Debug)]
pub struct Cell {
    title: &'static str,
    pub(super) text: String,
    right: bool,
    least: usize,
    if_roomy: bool,
    colour: Option<AnsiColor>,
}

/// A cell in a column of texts.
pub fn left(title: &'static str, text: impl ToString) -> Cell {
    Cell { title, text: text.to_string(), right: false, least: usize::MAX, if_roomy: false, colour: None }
}

/// A cell in a column of numbers.
pub fn right(title: &'static str, text: impl ToString) -> Cell {
    Cell { right: true, ..left(title, text) }
}

impl Cell {
    /// Allows the column to be cut to `least` characters on a narrow screen.
    pub(super) fn cut_to(self, least: usize) -> Self {
        Self { least, ..self }
    }

    /// Leaves the column out on a narrow screen.
    pub(super) fn if_roomy(self) -> Self {
        Self { if_roomy: true, ..self }
    }

    pub(super) fn coloured(self, colour: Option<AnsiColor>) -> Self {
        Self { colour, ..self }
    }
}

/// One row: its cells, and optionally a second line. All rows of a table have the same columns.
#[derive(Clone, Debug)]
pub struct Row {
    pub(super) cells: Vec<Cell>,
    pub(super) below: Option<String>,
}

impl<const N: usize> From<[Cell; N]> for Row {
    fn from(cells: [Cell; N]) -> Self {
        Self { cells: cells.into(), below: None }
    }
}

impl Row {
    pub(super) fn below(self, below: Option<String>) -> Self {
        Self { below, ..self }
    }

    fn shown(&self, screen: Screen) -> impl Iterator<Item = &Cell> {
        self.cells.iter().filter(move |cell| !cell.if_roomy || screen.width >= ROOMY)
    }
}

/// Writes rows, at least one, under the titles of their columns. Each column is as wide as its widest cell. If the table is
/// wider than the screen, the widest columns that may be cut are cut.
pub fn table(out: &mut impl Write, screen: Screen, rows: &[Row]) -> io::Result<()> {
    let columns: Vec<&Cell> = rows.iter().take(1).flat_map(|row| row.shown(screen)).collect();
    let mut table = Builder::from_iter(rows.iter().map(|row| row.shown(screen).map(|cell| cell.text.as_str())));
    table.insert_record(0, columns.iter().map(|column| column.title));
    let mut table = table.build();
    table.with(Style::empty()).with(Padding::zero()).modify(Columns::new(1..), Padding::new(GAP, 0, 0, 0));
    for (at, _) in columns.iter().enumerate().filter(|(_, column)| column.right) {
        table.modify(Columns::one(at), Alignment::right());
    }
    for (number, row) in rows.iter().enumerate().filter(|_| screen.colours) {
        for (at, colour) in row.shown(screen).enumerate().filter_map(|(at, cell)| Some((at, cell.colour?))) {
            table.modify((number + 1, at), Color::new(colour.on_default().to_string(), Reset.to_string()));
        }
    }
    table.with(Width::truncate(screen.width).suffix("…").priority(Widest(&columns)));
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
struct Widest<'a>(&'a [&'a Cell]);

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

    fn written(screen: Screen, rows: &[Row]) -> String {
        let mut out = Vec::new();
        table(&mut out, screen, rows).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn wide(width: usize) -> Screen {
        Screen { width, colours: false }
    }

    #[test]
    fn a_table_is_as_wide_as_its_widest_cells() {
        let rows = [("ä", "1"), ("日本", ""), ("long name", "1000")].map(|(group, n)| [left("GROUP", group), right("N", n)].into());
        assert_eq!(written(wide(80), &rows), "GROUP         N\nä             1\n日本\nlong name  1000\n");
    }

    #[test]
    fn a_table_is_no_wider_than_the_screen_where_its_columns_may_be_cut() {
        let cells = [
            left("ID", "0123456789"),
            left("CLASS", "abcdefghijklmnopqrst").cut_to(4),
            left("GROUP", "uvwxyzuvwxyz").cut_to(4),
            right("N", 1).if_roomy(),
        ];
        let row = Row::from(cells);
        let cut = "ID          CLASS           GROUP\n0123456789  abcdefghijklm…  uvwxyzuvwxyz\n";
        assert_eq!(written(wide(40), std::slice::from_ref(&row)), cut);
        let narrow = written(wide(24), &[row.below(Some("x".repeat(99)))]);
        assert!(narrow.lines().all(|line| line.chars().count() <= 24), "{narrow}");
        assert!(
            narrow.starts_with("ID          CLASS  GROUP\n0123456789  abcd…  uvwx…\n")
                && narrow.ends_with(&format!("    {}…\n", "x".repeat(19))),
            "{narrow}"
        );
    }

    #[test]
    fn colours_are_seen_only_where_they_can_be() {
        let rows = [[left("STATE", "failed").coloured(Some(AnsiColor::Red))].into()];
        assert_eq!(written(wide(80), &rows), "STATE\nfailed\n");
        assert_eq!(written(Screen { width: 80, colours: true }, &rows), "STATE\n\u{1b}[31mfailed\u{1b}[0m\n");
    }
}
