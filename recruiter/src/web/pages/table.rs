//! A page of tables.

use askama::Template;

use super::frame::{Answer, Frame, page};
use crate::views::tone::Tone;

/// A page of tables.
#[derive(Template)]
#[template(path = "tables.html")]
pub(super) struct Tables {
    pub(super) frame: Frame,
    /// What is to be known first, and how bad it is.
    pub(super) notices: Vec<(Tone, String)>,
    pub(super) tables: Vec<Table>,
    /// Where the events are after which the page is read again; empty if there are none.
    pub(super) live: String,
    /// How often the page is read again besides, in seconds; zero: never.
    pub(super) again: u32,
    /// The next page.
    pub(super) next: Option<String>,
}

impl Tables {
    pub(super) fn new(frame: Frame, tables: Vec<Table>) -> Self {
        Self { frame, tables, notices: Vec::new(), live: String::new(), again: 0, next: None }
    }

    pub(super) fn shown(&self) -> Answer {
        page(self)
    }
}

/// A table.
pub(super) struct Table {
    /// Its place on the page.
    pub(super) id: &'static str,
    pub(super) title: String,
    /// What is there in place of an empty table.
    pub(super) none: &'static str,
    /// The names of the columns; those of numbers begin with `#`.
    pub(super) columns: &'static [&'static str],
    pub(super) rows: Vec<Vec<Cell>>,
}

impl Table {
    /// The columns: name, and whether it is of numbers.
    fn heads(&self) -> impl Iterator<Item = (&'static str, bool)> {
        self.columns.iter().map(|column| column.strip_prefix('#').map_or((*column, false), |name| (name, true)))
    }
}

/// A cell of a table.
#[derive(Default)]
pub(super) struct Cell {
    pub(super) text: String,
    pub(super) path: Option<String>,
    pub(super) tone: Option<&'static str>,
    pub(super) is_number: bool,
    /// Further links: what can be done.
    pub(super) acts: Vec<(&'static str, String)>,
}

impl Cell {
    pub(super) fn text(text: impl ToString) -> Self {
        Self { text: text.to_string(), ..Self::default() }
    }

    pub(super) fn number(number: impl ToString) -> Self {
        Self { is_number: true, ..Self::text(number) }
    }

    pub(super) fn state(word: impl ToString, tone: Tone) -> Self {
        Self { tone: Some(tone.word()), ..Self::text(word) }
    }

    pub(super) fn acts(acts: Vec<(&'static str, String)>) -> Self {
        Self { acts, ..Self::default() }
    }

    pub(super) fn to(self, path: String) -> Self {
        Self { path: Some(path), ..self }
    }
}
