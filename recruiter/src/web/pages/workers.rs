//! The workers, and which recruiter leads.

use axum::{Extension, extract::State};
use recruiter_common::{
    instant::Instant,
    store::{Store, StoreError},
    text::{briefly_apart, printable},
    workers::{Leader, Presence, Wanted, Worker},
};

use super::{
    super::{Shared, requests::Parameters},
    frame::{Answer, Frame},
    live::{AGAIN, live},
    table::{Cell, Table, Tables},
    visitor::Visitor,
};
use crate::views::{
    or_dash,
    story::id_in,
    tone::Tone,
    workers::{jobs_of, memory, no_cleaner, state, wanted, works_on},
};

/// What all who look at the workers share.
pub(super) struct Roster {
    at: Instant,
    workers: Presence,
    leader: Leader,
}

impl Roster {
    async fn read(store: &Store) -> Result<Self, StoreError> {
        let workers = store.workers();
        let (workers, leader) = tokio::try_join!(workers.list(), store.leader())?;
        Ok(Self { at: store.now(), workers, leader })
    }
}

/// Lists the workers.
pub(super) async fn list(State(web): Shared, Extension(visitor): Extension<Visitor>, given: Parameters) -> Answer {
    given.end()?;
    let store = web.store.clone();
    let read = async move { Ok(Roster::read(&store).await?) };
    let read = web.kept.roster.after(&web.tasks, web.changed(), read).await?;
    let Roster { at: now, workers, leader } = &*read;
    let mut notices = vec![(if leader.is_missing() { Tone::Bad } else { Tone::Plain }, leader.line())];
    let overdue = workers.0.iter().filter(|worker| worker.is_overdue()).count();
    notices.extend(no_cleaner(overdue).map(|text| (Tone::Bad, text)));
    let is_operator = visitor.is_operator();
    let tables = vec![Table {
        id: "workers",
        title: "Roster".into(),
        none: "No worker is registered.",
        columns: &["Worker", "State", "Process", "#Free slots", "#Jobs", "#Memory", "#Seen", "Groups", "Classes", "Version", "More"],
        rows: workers.0.iter().map(|worker| row(worker, *now, is_operator)).collect(),
    }];
    let live = live(["worker.*", "leader.*"]);
    Tables { notices, live, again: AGAIN, ..Tables::new(Frame::new(visitor, "/workers", "Workers"), tables) }.shown()
}

fn row(worker: &Worker, now: Instant, is_operator: bool) -> Vec<Cell> {
    let document = &worker.document;
    let text = |field, width| or_dash(document.get_str(field).ok().map(|text| printable(text, width)));
    let number = |field| or_dash(document.get(field).map(|number| printable(&number.to_string(), 12)));
    let (word, tone) = state(worker);
    let seen = document.get_datetime("last_seen_at").map(|at| format!("{} ago", briefly_apart(at.to_chrono(), now)));
    let acts = worker.id().filter(|_| is_operator && !worker.is_retired).map(|id| {
        let act = |name, path: &str| (name, format!("/workers/{id}/{path}"));
        match worker.request.as_ref().map(|request| request.wanted) {
            None => vec![act("Quiet", "quiet"), act("Stop", "stop")],
            Some(Wanted::Quiet) => vec![act("Resume", "resume"), act("Stop", "stop")],
            Some(Wanted::Stop) => Vec::new(),
        }
    });
    vec![
        Cell::text(or_dash(document.get("_id").map(id_in))),
        Cell::state(word, tone),
        Cell::text(format!("{}:{}", text("hostname", 64), number("pid"))),
        Cell::number(format!("{}/{}", number("free"), number("capacity"))),
        Cell::number(jobs_of(worker)),
        Cell::number(or_dash(memory(worker))),
        Cell::number(seen.unwrap_or_else(|_| "never".into())),
        Cell::text(printable(&works_on(worker), 200)),
        Cell::text(printable(&worker.classes.join(", "), 300)),
        Cell::text(text("version", 16)),
        Cell { text: wanted(worker, now).unwrap_or_default(), ..Cell::acts(acts.unwrap_or_default()) },
    ]
}
