//! What was done through `recruiter web`, newest first.

use axum::{Extension, extract::State};
use bson::{Bson, Document, oid::ObjectId};
use recruiter_common::{
    instant::Instant,
    text::{briefly_apart, moment, printable},
};

use super::{
    super::{Shared, requests::Parameters},
    frame::{Answer, Frame},
    table::{Cell, Table, Tables},
    visitor::Visitor,
    words::link,
};
use crate::views::{or_dash, tone::Tone};

/// The most entries of a page.
const LONGEST_PAGE: u16 = 50;

/// Lists the entries.
pub(super) async fn list(State(web): Shared, Extension(visitor): Extension<Visitor>, mut given: Parameters) -> Answer {
    let of_text = |text: &str| ObjectId::parse_str(text).map_err(|_| format!("`{text:.80}` is not an id (24 hexadecimal digits)"));
    let after = given.take("after", of_text)?;
    given.end()?;
    let (entries, now) = (web.store.audited(LONGEST_PAGE, after).await?, web.store.now());
    let last = entries.last().filter(|_| entries.len() >= usize::from(LONGEST_PAGE)).and_then(|entry| entry.get_object_id("_id").ok());
    let table = Table {
        id: "audit",
        title: "What was done".into(),
        none: "Nothing was done through this program.",
        columns: &["When", "#Ago", "Who", "From", "What", "To what", "Outcome"],
        rows: entries.iter().map(|entry| row(entry, now)).collect(),
    };
    let next = last.map(|last| link("/audit", [("after", &*last.to_hex())]));
    Tables { next, ..Tables::new(Frame::new(visitor, "/audit", "Audit"), vec![table]) }.shown()
}

fn row(entry: &Document, now: Instant) -> Vec<Cell> {
    let text = |field, width| or_dash(entry.get_str(field).ok().map(|text| printable(text, width)));
    let at = entry.get_datetime("at").ok().map(|at| at.to_chrono());
    let values = |field| entry.get_document(field).map(|values| printable(&in_words(values), 400)).ok();
    let has_failed = entry.get_document("outcome").is_ok_and(|outcome| outcome.contains_key("status"));
    let (outcome, tone) = match values("outcome") {
        Some(outcome) if has_failed => (outcome, Tone::Bad),
        Some(outcome) => (outcome, Tone::Plain),
        None => ("not known".into(), Tone::Warning),
    };
    let job =
        entry.get_document("target").ok().and_then(|target| target.get_str("job").ok()).filter(|job| ObjectId::parse_str(job).is_ok());
    let target = Cell::text(values("target").unwrap_or_default());
    vec![
        Cell::text(or_dash(at.map(moment))),
        Cell::number(or_dash(at.map(|at| briefly_apart(at, now)))),
        Cell::text(text("caller", 80)),
        Cell::text(text("address", 64)),
        Cell::text(text("action", 40)),
        match job {
            Some(job) => target.to(format!("/jobs/{job}")),
            None => target,
        },
        if tone == Tone::Plain { Cell::text(outcome) } else { Cell::state(outcome, tone) },
    ]
}

/// The fields that say something: name and value.
fn in_words(values: &Document) -> String {
    let is_given =
        |value: &Bson| !matches!(value, Bson::Null | Bson::Boolean(false)) && value.as_document().is_none_or(|values| !values.is_empty());
    let word = |(name, value): (&String, &Bson)| match (value.as_str(), value.as_document()) {
        (Some(text), _) if name == "outcome" => text.to_owned(),
        (Some(text), _) => format!("{name} {text}"),
        (None, Some(values)) => format!("{name} {}", in_words(values)),
        (None, None) => format!("{name} {value}"),
    };
    values.iter().filter(|(_, value)| is_given(value)).map(word).collect::<Vec<_>>().join(", ")
}
