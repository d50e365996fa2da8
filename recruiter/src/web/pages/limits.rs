//! The limits of resources and groups, and what is paused: also halted lines.

use axum::{Extension, extract::State};
use recruiter_common::{
    instant::Instant,
    limits::{Pause, Paused},
    store::{group_of_resource, paused_by},
    text::printable,
};

use super::{
    super::{Shared, requests::Parameters},
    frame::{Answer, Frame},
    groups::not_valid,
    live::live,
    table::{Cell, Table, Tables},
    visitor::Visitor,
    words::link,
};
use crate::views::{
    limits::{LINES, ListedLimit, pauses},
    or_dash,
    tone::Tone,
};

/// Lists limits, pauses and halted lines.
pub(super) async fn list(State(web): Shared, Extension(visitor): Extension<Visitor>, given: Parameters) -> Answer {
    given.end()?;
    let store = &web.store;
    let ((limits, invalid), (paused, _)) = tokio::try_join!(ListedLimit::all(store), pauses(store))?;
    let (lines, pauses): (Vec<_>, Vec<_>) = paused.into_iter().partition(|(paused, _)| matches!(paused, Paused::Line(_)));
    let (now, is_operator) = (store.now(), visitor.is_operator());
    let limit = |limit: ListedLimit| {
        let ListedLimit { name, capacity, rate, in_use, most_waiting, .. } = limit;
        let is_full = capacity.is_some_and(|capacity| in_use >= usize::try_from(capacity).unwrap_or(usize::MAX));
        let used = if is_full { Cell::state("full", Tone::Warning) } else { Cell::state("free", Tone::Plain) };
        let numbers = [or_dash(capacity), in_use.to_string(), or_dash(rate), or_dash(most_waiting)];
        [Cell::text(printable(&name, 120)), used].into_iter().chain(numbers.map(Cell::number)).collect()
    };
    let limits = Table {
        id: "limits",
        title: "Limits".into(),
        none: "No resource has a limit.",
        columns: &["Name", "State", "#Capacity", "#In use", "#Rate", "#Most waiting"],
        rows: limits.into_iter().map(limit).collect(),
    };
    let pauses = Table {
        id: "pauses",
        title: "Pauses".into(),
        none: "Nothing is paused.",
        columns: &["What", "Who and why", "More"],
        rows: pauses.iter().map(|(paused, pause)| row(paused, pause, now, is_operator)).collect(),
    };
    let lines = Table {
        id: "lines",
        title: if lines.len() >= usize::try_from(LINES).unwrap_or(usize::MAX) {
            format!("Halted lines, the first {LINES}")
        } else {
            "Halted lines".into()
        },
        none: "No line is halted.",
        columns: &["Line", "Who and why", "More"],
        rows: lines.iter().map(|(paused, pause)| row(paused, pause, now, is_operator)).collect(),
    };
    let of_resources = invalid.iter().filter(|name| group_of_resource(name).is_none());
    let notices = of_resources.map(|name| not_valid(name)).collect();
    let (frame, live) = (Frame::new(visitor, "/limits", "Limits and lines"), live(["limit.*", "pause.*"]));
    Tables { notices, live, ..Tables::new(frame, vec![limits, pauses, lines]) }.shown()
}

fn row(paused: &Paused, pause: &Pause, now: Instant, is_operator: bool) -> Vec<Cell> {
    let what = paused.to_string();
    let resume = is_operator.then(|| ("Resume", link("/pauses/resume", [("what", &*what)])));
    vec![Cell::text(printable(&what, 256)), Cell::text(paused_by(pause, now)), Cell::acts(resume.into_iter().collect())]
}
