//! The limits of resources and groups, and what is paused: also halted lines.

use std::collections::BTreeSet;

use axum::{Extension, extract::State};
use recruiter_common::{
    flags::name_of_text,
    ids::JobId,
    instant::Instant,
    limits::{Pause, Paused},
    store::{PermitHolder, Store, StoreError, group_of_resource, paused_by},
    text::printable,
};

use super::{
    super::{Shared, problem::Problem, requests::Parameters},
    frame::{Answer, Frame},
    groups::not_valid,
    live::{AGAIN, live},
    table::{Cell, Table, Tables},
    visitor::Visitor,
    words::{at_least, link},
};
use crate::views::{
    limits::{COUNTED, HOLDERS, LINES, ListedLimit, ShownLimit, described, pauses},
    or_dash,
    tone::Tone,
};

/// What all who look at the limits share.
pub(super) struct Reading {
    at: Instant,
    limits: Vec<ListedLimit>,
    /// The ids of documents that are no limits.
    invalid: BTreeSet<String>,
    paused: Vec<(Paused, Pause)>,
}

impl Reading {
    async fn read(store: &Store) -> Result<Self, StoreError> {
        let ((limits, invalid), (paused, _)) = tokio::try_join!(ListedLimit::all(store), pauses(store))?;
        Ok(Self { at: store.now(), limits, invalid, paused })
    }
}

/// Lists limits, pauses and halted lines.
pub(super) async fn list(State(web): Shared, Extension(visitor): Extension<Visitor>, given: Parameters) -> Answer {
    given.end()?;
    let store = web.store.clone();
    let read = async move { Ok(Reading::read(&store).await?) };
    let read = web.kept.limits.after(&web.tasks, web.changed(), read).await?;
    let Reading { at: now, limits, invalid, paused } = &*read;
    let (lines, pauses): (Vec<_>, Vec<_>) = paused.iter().partition(|(paused, _)| matches!(paused, Paused::Line(_)));
    let (now, is_operator) = (*now, visitor.is_operator());
    let limit = |limit: &ListedLimit| {
        let ListedLimit { name, capacity, rate, in_use, most_waiting, .. } = limit;
        let is_full = capacity.is_some_and(|capacity| *in_use >= usize::try_from(capacity).unwrap_or(usize::MAX));
        let used = if is_full { Cell::state("full", Tone::Warning) } else { Cell::state("free", Tone::Plain) };
        let numbers = [or_dash(*capacity), in_use.to_string(), or_dash(rate.as_ref()), or_dash(*most_waiting)];
        let named = Cell::text(printable(name, 120)).to(link("/limits/of", [("name", &**name)]));
        [named, used].into_iter().chain(numbers.map(Cell::number)).collect()
    };
    let limits = Table {
        id: "limits",
        title: "Limits".into(),
        none: "No resource has a limit.",
        columns: &["Name", "State", "#Capacity", "#In use", "#Rate", "#Most waiting"],
        rows: limits.iter().map(limit).collect(),
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
    Tables { notices, live, again: AGAIN, ..Tables::new(frame, vec![limits, pauses, lines]) }.shown()
}

/// Shows who holds the permits of a limit, and how many jobs wait for it.
pub(super) async fn show(State(web): Shared, Extension(visitor): Extension<Visitor>, mut given: Parameters) -> Answer {
    let name = given.take("name", name_of_text)?.ok_or_else(|| Problem::bad("The address names no limit."))?;
    given.end()?;
    let (store, asked) = (web.store.clone(), name.clone());
    let read = async move { Ok(ShownLimit::read(&store, &asked).await?) };
    let shown = web.kept.limit.of(&name).after(&web.tasks, web.changed(), read).await?;
    let ShownLimit { limit, most_waiting, holders, waiting, .. } = &*shown;
    let at_most = or_dash(limit.map(described).filter(|limit| !limit.is_empty()));
    let waiting = or_dash(waiting.map(|jobs| at_least(jobs, jobs >= COUNTED)));
    let numbers = Table {
        id: "limit",
        title: printable(&name, 256),
        none: "",
        columns: &["Limit", "#Waiting", "#Most waiting"],
        rows: vec![vec![Cell::text(at_most), Cell::number(waiting), Cell::number(or_dash(most_waiting.as_ref()))]],
    };
    let row = |holder: &PermitHolder, job: &JobId| {
        let permits = printable(&holder.permits.join(", "), 400);
        vec![Cell::text(job).to(format!("/jobs/{job}")), Cell::text(holder.worker), Cell::text(permits)]
    };
    let running = Table {
        id: "holders",
        title: "Jobs that use it".into(),
        none: "No job uses it.",
        columns: &["Job", "Worker", "Permits of the worker"],
        rows: holders.iter().flat_map(|holder| holder.jobs.iter().map(move |job| row(holder, job))).take(HOLDERS).collect(),
    };
    let (frame, live) = (Frame::new(visitor, "/limits", "Limit"), live(["limit.*", "pause.*"]));
    Tables { live, again: AGAIN, ..Tables::new(frame, vec![numbers, running]) }.shown()
}

fn row(paused: &Paused, pause: &Pause, now: Instant, is_operator: bool) -> Vec<Cell> {
    let what = paused.to_string();
    let resume = is_operator.then(|| ("Resume", link("/pauses/resume", [("what", &*what)])));
    vec![Cell::text(printable(&what, 256)), Cell::text(paused_by(pause, now)), Cell::acts(resume.into_iter().collect())]
}
