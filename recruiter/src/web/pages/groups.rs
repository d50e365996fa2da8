//! The groups: how many jobs wait and run in each, and their settings. One group: why its jobs wait.

use std::collections::BTreeMap;

use axum::{Extension, extract::State, http::StatusCode};
use recruiter_common::{
    flags::name_of_text,
    limits::{GroupSettings, Pause, Paused, Settings},
    store::{COUNTED, LOOK_LIMIT, Store, StoreError, group_of_resource, paused_by},
    text::{briefly_apart, printable},
    why::WhyGroup,
};
use tokio::time::timeout;

use super::{
    super::{Shared, problem::Problem, requests::Parameters},
    frame::{Answer, Frame},
    live::{AGAIN, live},
    overview::Overview,
    table::{Cell, Table, Tables},
    visitor::Visitor,
    words::{at_least, link},
};
use crate::views::{counts::GroupCounts, limits::described, or_dash, tone::Tone};

/// Maximum number of groups that are shown.
const MOST: usize = 500;

/// What is declared of groups, which all who look at them share.
pub(super) struct Declared {
    settings: Settings,
    /// How many jobs may wait, by group.
    most: BTreeMap<String, u64>,
}

impl Declared {
    async fn read(store: &Store) -> Result<Self, StoreError> {
        let (settings, backlogs) = tokio::try_join!(store.settings(), store.group_backlogs())?;
        let most = backlogs.into_iter().filter_map(|backlog| Some((backlog.group, backlog.most_waiting?))).collect();
        Ok(Self { settings, most })
    }
}

/// Lists the groups.
pub(super) async fn list(State(web): Shared, Extension(visitor): Extension<Visitor>, given: Parameters) -> Answer {
    given.end()?;
    let store = web.store.clone();
    let declared = async move { Ok(Declared::read(&store).await?) };
    let (read, declared) = tokio::try_join!(Overview::of(&web), web.kept.groups.after(&web.tasks, web.changed(), declared))?;
    let Declared { settings, most } = &*declared;
    let mut groups: BTreeMap<String, GroupCounts> = read.groups.iter().map(|group| (group.name.clone(), group.clone())).collect();
    // Those behind the last one were not counted.
    let last = groups.keys().next_back().cloned().filter(|_| read.more_groups > 0);
    let is_counted = |name: &&String| last.as_ref().is_none_or(|last| *name <= last);
    // Also those of this moment: an own act is seen at once.
    let paused = settings.pauses.keys().filter_map(|paused| if let Paused::Group(name) = paused { Some(name) } else { None });
    for name in settings.groups.keys().chain(most.keys()).chain(paused).filter(is_counted) {
        groups.entry(name.clone()).or_insert_with(|| GroupCounts { name: name.clone(), ..GroupCounts::default() });
    }
    let usual = GroupSettings::default();
    let more_groups = read.more_groups + groups.len().saturating_sub(MOST);
    let rows = groups.values().take(MOST).map(|group| {
        let own = settings.groups.get(&group.name).unwrap_or(&usual);
        let pause = settings.pauses.get(&Paused::Group(group.name.clone()));
        let by = pause.map(|pause| paused_by(pause, read.at));
        let maintenance: Vec<String> = own.maintenance.iter().map(ToString::to_string).collect();
        let ageing = own.ageing.map(|ageing| format!("ageing {}", humantime::format_duration(ageing)));
        let limit = Some(described(own.limit)).filter(|limit| !limit.is_empty());
        let more = by.into_iter().chain(limit).chain(ageing).chain(maintenance.into_iter().map(|window| format!("no start {window}")));
        let name = &*group.name;
        let mut acts = vec![("Why", link("/groups/why", [("group", name)]))];
        if visitor.is_operator() {
            acts.push(act(name, pause));
        }
        vec![
            Cell::text(printable(name, 80)).to(link("/jobs", [("group", name)])),
            if pause.is_some() { Cell::state("paused", Tone::Warning) } else { Cell::state("open", Tone::Plain) },
            Cell::number(at_least(group.due, group.has_more)),
            Cell::number(at_least(group.later, group.has_more)),
            Cell::number(or_dash(group.oldest.map(|at| briefly_apart(at, read.at)))),
            Cell::number(group.running),
            Cell::number(format!("{:.2}", group.done_per_second)),
            Cell::number(or_dash(most.get(name))),
            Cell::number(or_dash(own.weight)),
            Cell::text(more.collect::<Vec<_>>().join("; ")),
            Cell::acts(acts),
        ]
    });
    let invalid = settings.invalid.iter().filter(|name| group_of_resource(name).is_some());
    let tables = vec![Table {
        id: "groups",
        title: match more_groups {
            0 => "All groups".into(),
            more => format!("The first {} groups, without the {more} behind them in the alphabet", groups.len().min(MOST)),
        },
        none: "No group has jobs or settings.",
        columns: &["Group", "State", "#Due", "#Later", "#Oldest", "#Running", "#Done/s", "#Most waiting", "#Weight", "Settings", "More"],
        rows: rows.collect(),
    }];
    let (notices, live) = (invalid.map(|name| not_valid(name)).collect(), live(["group.*", "pause.*", "limit.*"]));
    Tables { notices, live, again: AGAIN, ..Tables::new(Frame::new(visitor, "/groups", "Groups"), tables) }.shown()
}

fn act(group: &str, pause: Option<&Pause>) -> (&'static str, String) {
    let (name, path) = if pause.is_some() { ("Resume", "/pauses/resume") } else { ("Pause", "/pauses/pause") };
    (name, link(path, [("what", &*Paused::Group(group.into()).to_string())]))
}

/// What is said about a document of a limit or a group that is not valid.
pub(super) fn not_valid(name: &str) -> (Tone, String) {
    let name = printable(name, 256);
    (Tone::Bad, format!("The setting {name} is not valid: what it would limit waits. Correct or delete its document."))
}

/// Shows why the waiting jobs of a group do not run.
pub(super) async fn why(State(web): Shared, Extension(visitor): Extension<Visitor>, mut given: Parameters) -> Answer {
    let group = given.take("group", name_of_text)?.ok_or_else(|| Problem::bad("The address names no group."))?;
    given.end()?;
    let Ok(read) = timeout(LOOK_LIMIT, web.store.why_group(&group)).await else {
        let problem =
            format!("This was stopped after {} s: too many jobs wait. `recruiter groups why` has more time.", LOOK_LIMIT.as_secs());
        return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, problem));
    };
    let WhyGroup { reasons, is_complete, .. } = read?;
    let rows = reasons.into_iter().map(|(why, jobs)| {
        vec![Cell::state(why.reason, Tone::Warning), Cell::number(at_least(jobs, jobs >= COUNTED)), Cell::text(why.text)]
    });
    let incomplete = (!is_complete).then(|| (Tone::Warning, "Only the first kinds of jobs were examined.".to_owned()));
    let tables = vec![Table {
        id: "reasons",
        title: format!("Why jobs of {} wait", printable(&group, 80)),
        none: "No job waits in this group.",
        columns: &["Reason", "#Jobs", "What to do"],
        rows: rows.collect(),
    }];
    Tables { notices: incomplete.into_iter().collect(), ..Tables::new(Frame::new(visitor, "/groups", "Group"), tables) }.shown()
}
