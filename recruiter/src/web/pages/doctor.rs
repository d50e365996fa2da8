//! What the doctor finds: problems of MongoDB, the schema, the processes and the waiting jobs.

use std::{cmp::Reverse, sync::Arc};

use axum::{Extension, extract::State};
use recruiter_common::store::{Finding, State as Health};

use super::{
    super::{Shared, requests::Parameters},
    frame::{Answer, Frame},
    table::{Cell, Table, Tables},
    visitor::Visitor,
};
use crate::views::tone::Tone;

/// Lists the findings, the worst first.
pub(super) async fn show(State(web): Shared, Extension(visitor): Extension<Visitor>, given: Parameters) -> Answer {
    given.end()?;
    let store = web.store.clone();
    let findings: Arc<Vec<Finding>> = web.kept.findings.get(&web.tasks, async move { Ok(store.findings().await) }).await?;
    let mut sorted: Vec<&Finding> = findings.iter().collect();
    sorted.sort_by_key(|finding| Reverse(finding.state));
    let row = |finding: &Finding| {
        let tone = match finding.state {
            Health::Good => Tone::Good,
            Health::Unknown => Tone::Plain,
            Health::Warning => Tone::Warning,
            Health::Error => Tone::Bad,
        };
        vec![Cell::state(finding.state.name(), tone), Cell::text(finding.check.name()), Cell::text(&finding.text)]
    };
    let table = Table {
        id: "findings",
        title: "What was examined".into(),
        none: "Nothing was examined.",
        columns: &["State", "Check", "Finding"],
        rows: sorted.into_iter().map(row).collect(),
    };
    Tables::new(Frame::new(visitor, "/doctor", "Doctor"), vec![table]).shown()
}
