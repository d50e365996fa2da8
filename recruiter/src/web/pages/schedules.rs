//! The schedules: when they run next, and when they have run.

use axum::{Extension, extract::State};
use recruiter_common::{
    NewJob,
    instant::Instant,
    schedules::{InvalidSchedule, StoredSchedule},
    text::{briefly_apart, moment, printable},
};

use super::{
    super::{Shared, requests::Parameters},
    frame::{Answer, Frame},
    live::AGAIN,
    table::{Cell, Table, Tables},
    visitor::Visitor,
    words::link,
};
use crate::views::{
    or_dash,
    schedules::{pause_of, skipped_of, state},
    tone::Tone,
};

/// What all who look at the schedules share.
pub(super) struct Reading {
    at: Instant,
    listed: Vec<(String, Result<StoredSchedule, InvalidSchedule>)>,
}

/// Lists the schedules.
pub(super) async fn list(State(web): Shared, Extension(visitor): Extension<Visitor>, given: Parameters) -> Answer {
    given.end()?;
    let store = web.store.clone();
    let read = async move { Ok(Reading { listed: store.schedules().list().await?, at: store.now() }) };
    let read = web.kept.schedules.after(&web.tasks, web.changed(), read).await?;
    let (Reading { listed, at: now }, is_operator) = (&*read, visitor.is_operator());
    let tables = vec![Table {
        id: "schedules",
        title: "Periodic jobs".into(),
        none: "There are no schedules.",
        columns: &["Name", "State", "Schedule", "Next run", "#Last run", "Last job", "Class", "Group", "More"],
        rows: listed.iter().map(|(name, schedule)| row(name, schedule.as_ref(), *now, is_operator)).collect(),
    }];
    Tables { again: AGAIN, ..Tables::new(Frame::new(visitor, "/schedules", "Schedules"), tables) }.shown()
}

fn row(name: &str, schedule: Result<&StoredSchedule, &InvalidSchedule>, now: Instant, is_operator: bool) -> Vec<Cell> {
    let (named, word) = (Cell::text(printable(name, 256)), state(schedule));
    let schedule = match schedule {
        Ok(schedule) => schedule,
        Err(problem) => {
            let dashes = (0..6).map(|_| Cell::text("-"));
            let problem = Cell::text(printable(&problem.to_string(), 1_000));
            return [named, Cell::state(word, Tone::Bad)].into_iter().chain(dashes).chain([problem]).collect();
        }
    };
    let (class, group) = schedule.schedule.enqueues().map(NewJob::class_and_group).unwrap_or_default();
    let last = schedule.runs.last();
    let job = last.map_or_else(|| Cell::text("-"), |run| Cell::text(run.job).to(format!("/jobs/{}", run.job)));
    let namespace = schedule.namespace.as_ref().map(|namespace| format!("namespace {}", printable(namespace, 80)));
    let more: Vec<String> = [namespace, pause_of(schedule), skipped_of(schedule)].into_iter().flatten().collect();
    let act = |word: &'static str, act: &str| (word, link(&format!("/schedules/{act}"), [("name", name)]));
    let pause = if schedule.paused.is_some() { act("Resume", "resume") } else { act("Pause", "pause") };
    let acts = if is_operator { vec![act("Run now", "run"), pause] } else { Vec::new() };
    vec![
        named,
        Cell::state(word, if schedule.paused.is_some() { Tone::Warning } else { Tone::Good }),
        Cell::text(printable(&schedule.schedule.to_string(), 256)),
        Cell::text(or_dash(schedule.next_runs(now, 1).first().map(|next| moment(*next)))),
        Cell::number(last.map_or_else(|| "never".into(), |run| format!("{} ago", briefly_apart(run.at, now)))),
        job,
        Cell::text(printable(class, 80)).to(link("/jobs", [("class", class)])),
        Cell::text(printable(group, 80)).to(link("/jobs", [("group", group)])),
        Cell { text: more.join("; "), ..Cell::acts(acts) },
    ]
}
