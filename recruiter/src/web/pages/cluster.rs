//! Who leads and who cleans, and what the doctor finds: problems of MongoDB, the schema, the processes and the waiting jobs.

use std::cmp::Reverse;

use axum::{Extension, extract::State};
use chrono::TimeDelta;
use recruiter_common::{
    store::{Cleaner, Finding, State as Health, Store, StoreError},
    text::{briefly_apart, moment, printable},
};

use super::{
    super::{Shared, requests::Parameters},
    frame::{Answer, Frame},
    live::AGAIN,
    table::{Cell, Table, Tables},
    visitor::Visitor,
};
use crate::views::{or_dash, tone::Tone};

/// Lists the processes, and the findings, the worst first.
pub(super) async fn show(State(web): Shared, Extension(visitor): Extension<Visitor>, given: Parameters) -> Answer {
    given.end()?;
    let store = web.store.clone();
    let examine = async move { Ok((store.now(), store.findings().await)) };
    let (processes, found) = tokio::join!(processes(&web.store), web.kept.findings.get(&web.tasks, examine));
    let (at, findings) = &*found?;
    let mut sorted: Vec<&Finding> = findings.iter().collect();
    sorted.sort_by_key(|finding| Reverse(finding.state));
    let findings = Table {
        id: "findings",
        title: format!("What the doctor has found, {}", moment(*at)),
        none: "Nothing was examined.",
        columns: &["State", "Check", "Finding"],
        rows: sorted.into_iter().map(finding).collect(),
    };
    // The findings say why.
    let tables = processes.into_iter().chain([findings]).collect();
    Tables { again: AGAIN, ..Tables::new(Frame::new(visitor, "/cluster", "Cluster"), tables) }.shown()
}

/// The recruiter that leads, and the cleaners.
async fn processes(store: &Store) -> Result<Table, StoreError> {
    let (leader, lease, cleaners) = tokio::try_join!(store.leader(), store.observe_lease(), store.cleaners())?;
    let now = store.now();
    let led = lease.map(|lease| {
        let (state, tone) = if leader.is_missing() { ("silent", Tone::Bad) } else { ("leads", Tone::Good) };
        let seen = or_dash(lease.renewed_at.map(|at| format!("{} ago", briefly_apart(at, now))));
        vec![
            Cell::text("Recruiter"),
            Cell::state(if lease.released { "stopped" } else { state }, tone),
            Cell::text(printable(&lease.holder_at, 80)),
            Cell::number(seen),
            Cell::text("-"),
            Cell::text(format!("term {}", lease.term)),
        ]
    });
    let cleaner = |cleaner: &Cleaner| {
        let seen = format!("{} ago", briefly_apart(now - cleaner.seen_before.max(TimeDelta::zero()), now));
        vec![
            Cell::text("Cleaner"),
            if cleaner.is_silent() { Cell::state("silent", Tone::Warning) } else { Cell::state("cleans", Tone::Good) },
            Cell::text(&cleaner.name),
            Cell::number(seen),
            Cell::text(&cleaner.version),
            Cell::text(format!("keeps archived jobs: {}", cleaner.keeps)),
        ]
    };
    Ok(Table {
        id: "processes",
        title: "Processes".into(),
        none: "No recruiter has led yet, and no cleaner has run.",
        columns: &["Program", "State", "Process", "#Seen", "Version", "More"],
        rows: led.into_iter().chain(cleaners.iter().map(cleaner)).collect(),
    })
}

fn finding(finding: &Finding) -> Vec<Cell> {
    let tone = match finding.state {
        Health::Good => Tone::Good,
        Health::Unknown => Tone::Plain,
        Health::Warning => Tone::Warning,
        Health::Error => Tone::Bad,
    };
    vec![Cell::state(finding.state.name(), tone), Cell::text(finding.check.name()), Cell::text(&finding.text)]
}
