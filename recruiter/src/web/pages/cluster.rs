//! Who leads and who cleans, and what the doctor finds: problems of MongoDB, the schema, the processes and the waiting jobs.

use std::cmp::Reverse;

use axum::{Extension, extract::State};
use chrono::TimeDelta;
use recruiter_common::{
    instant::Instant,
    store::{Cleaner, Finding, Observed, State as Health, Store},
    telemetry::chain,
    text::{briefly_apart, moment, printable},
    workers::Leader,
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
    let examined = web.kept.examined.get(&web.tasks, async move { Ok(Examined::read(&store).await) }).await?;
    let Examined { at, processes, findings } = &*examined;
    let mut sorted: Vec<&Finding> = findings.iter().collect();
    sorted.sort_by_key(|finding| Reverse(finding.state));
    let findings = Table {
        id: "findings",
        title: format!("What the doctor has found, {}", moment(*at)),
        none: "Nothing was examined.",
        columns: &["State", "Check", "Finding"],
        rows: sorted.into_iter().map(finding).collect(),
    };
    let (notices, processes) = match processes {
        Ok(processes) => (Vec::new(), Some(processes.table(*at))),
        Err(problem) => (vec![(Tone::Bad, format!("The processes could not be read: {problem}"))], None),
    };
    let tables = processes.into_iter().chain([findings]).collect();
    Tables { notices, again: AGAIN, ..Tables::new(Frame::new(visitor, "/cluster", "Cluster"), tables) }.shown()
}

/// What all who look at the page share.
pub(super) struct Examined {
    at: Instant,
    processes: Result<Processes, String>,
    findings: Vec<Finding>,
}

struct Processes {
    leader: Leader,
    lease: Option<Observed>,
    cleaners: Vec<Cleaner>,
}

impl Examined {
    async fn read(store: &Store) -> Self {
        let processes = async { tokio::try_join!(store.leader(), store.observe_lease(), store.cleaners()) };
        let (processes, findings) = tokio::join!(processes, store.findings());
        let processes = processes.map(|(leader, lease, cleaners)| Processes { leader, lease, cleaners });
        Self { at: store.now(), processes: processes.map_err(|error| chain(&error)), findings }
    }
}

impl Processes {
    fn table(&self, now: Instant) -> Table {
        let led = self.lease.as_ref().map(|lease| {
            let (state, tone) = match self.leader.is_missing() {
                _ if lease.released => ("stopped", Tone::Warning),
                true => ("silent", Tone::Bad),
                false => ("leads", Tone::Good),
            };
            let seen = or_dash(lease.renewed_at.map(|at| format!("{} ago", briefly_apart(at, now))));
            vec![
                Cell::text("Recruiter"),
                Cell::state(state, tone),
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
        Table {
            id: "processes",
            title: "Processes".into(),
            none: "No recruiter has led yet, and no cleaner has run.",
            columns: &["Program", "State", "Process", "#Seen", "Version", "More"],
            rows: led.into_iter().chain(self.cleaners.iter().map(cleaner)).collect(),
        }
    }
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
