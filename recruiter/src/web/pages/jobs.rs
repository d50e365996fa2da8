//! The list of jobs: a page of it, newest first, of those that match.

use std::sync::Arc;

use askama::Template;
use axum::{Extension, extract::State};
use recruiter_common::{JobFilter, Page, job::Stage, spec::id_of_text, store::Store};

use super::{
    super::{Shared, problem::Problem, requests::Parameters},
    frame::{Answer, Frame, page},
    live::live_jobs,
    visitor::Visitor,
    words::link,
};
use crate::views::{filter::FilterArgs, story::Line, tone::Tone};

/// The most jobs of a page.
const LONGEST_PAGE: u16 = 50;
/// The parameters of the filter besides the state, and their labels.
const FIELDS: [(&str, &str, &str); 9] = [
    ("class", "Class", ""),
    ("group", "Group", ""),
    ("tag", "Tag", ""),
    ("urn", "URN", ""),
    ("why", "Finish reason", "tried-too-many-times"),
    ("error_class", "Error class", "exit:1"),
    ("message", "Error text", ""),
    ("since", "Since", "2h, or 2030-01-31T18:00:00Z"),
    ("until", "Until", "1h"),
];
/// The states that have a tab, and their names.
const TABS: [(&str, &str); 8] = [
    ("", "All"),
    ("waiting", "Waiting"),
    ("postponed", "Postponed"),
    ("running", "Running"),
    ("failed", "Failed"),
    ("done", "Done"),
    ("cancelled", "Cancelled"),
    ("archived", "Archived"),
];

#[derive(Template)]
#[template(path = "jobs.html")]
struct JobsPage {
    frame: Frame,
    /// Where the events of those that run are; empty if none does.
    live: String,
    tabs: Vec<Tab>,
    state: String,
    fields: Vec<Field>,
    is_filtered: bool,
    listed: Arc<Listed>,
    is_operator: bool,
    /// What can be done with those that are chosen: the word, and the last part of the path.
    acts: Vec<(&'static str, &'static str)>,
    /// What can be done with all that match: the word, and the path.
    all_acts: Vec<(&'static str, String)>,
    first: Option<String>,
    next: Option<String>,
}

/// A state, and where its jobs are.
struct Tab {
    name: &'static str,
    path: String,
    is_here: bool,
    count: Option<String>,
}

/// A field of the filter.
struct Field {
    name: &'static str,
    label: &'static str,
    hint: &'static str,
    value: String,
}

/// What all who look at the same list share.
pub(super) struct Listed {
    rows: Vec<Row>,
    /// The last one, if there are more.
    last: Option<String>,
}

struct Row {
    line: Line,
    tone: &'static str,
    /// A document without an id that a path can have has no page.
    has_page: bool,
}

/// Lists jobs.
pub(super) async fn list(State(web): Shared, Extension(visitor): Extension<Visitor>, mut given: Parameters) -> Answer {
    let address = link("", given.pairs());
    let state = given.text("state").to_owned();
    let fields: Vec<Field> = FIELDS.map(|(name, label, hint)| Field { name, label, hint, value: given.text(name).to_owned() }).into();
    let mut asked = Page::first(LONGEST_PAGE);
    asked.after = given.take("after", |text| id_of_text(text).map_err(|problem| problem.to_string()))?;
    let kept: Vec<(String, String)> =
        given.pairs().filter(|(name, _)| *name != "state").map(|(name, text)| (name.into(), text.into())).collect();
    let now = web.store.now();
    let filter = given.rest::<FilterArgs>()?.at(now);
    filter.check().map_err(Problem::bad)?;
    let store = web.store.clone();
    let numbers = web.kept.numbers.get(&web.tasks, async move {
        let (running, archived) = tokio::try_join!(store.running(), store.archived_count())?;
        Ok((running.values().sum(), archived))
    });
    let latest = web.kept.lists.of(&address);
    let listed = latest.after(&web.tasks, web.changed(), Listed::read(web.store.clone(), filter, asked));
    let (listed, numbers) = tokio::try_join!(listed, numbers)?;
    let (running, archived) = *numbers;
    let with = |path: &str, state: &str, after: &str| {
        let own = [("state", state), ("after", after)];
        link(path, own.into_iter().chain(kept.iter().map(|(name, text)| (&**name, &**text))))
    };
    let count = |tab: &str| match tab {
        "running" => Some(running.to_string()),
        "archived" => Some(format!("about {archived}")),
        _ => None,
    };
    let tabs = TABS.map(|(tab, name)| Tab { name, path: with("/jobs", tab, ""), is_here: tab == state, count: count(tab) });
    let run: Vec<&str> = listed.rows.iter().filter(|row| row.line.stage == Some(Stage::Running)).map(|row| &*row.line.id).collect();
    let live = if run.is_empty() { String::new() } else { live_jobs(run) };
    let acts = acts(&state);
    let is_filtered = fields.iter().any(|field| !field.value.is_empty());
    // All jobs there are: with the commands only.
    let all_acts = acts.iter().filter(|_| is_filtered || !state.is_empty());
    let all_acts = all_acts.map(|(name, act)| (*name, with(&format!("/jobs/many/{act}"), &state, ""))).collect();
    page(&JobsPage {
        live,
        is_operator: visitor.is_operator(),
        acts,
        all_acts,
        frame: Frame::new(visitor, "/jobs", "Jobs"),
        tabs: tabs.into(),
        is_filtered,
        first: asked.after.map(|_| with("/jobs", &state, "")),
        next: listed.last.as_ref().map(|last| with("/jobs", &state, last)),
        listed,
        state,
        fields,
    })
}

impl Listed {
    async fn read(store: Store, filter: JobFilter, asked: Page) -> Result<Self, Problem> {
        let listed = async { store.jobs(&filter, asked).await.map_err(Problem::of_search) };
        let (listed, redaction) = tokio::try_join!(listed, async { Ok(store.redaction().await?) })?;
        let last = listed.jobs.last().and_then(|job| job.get_object_id("_id").ok()).filter(|_| listed.more).map(|id| id.to_hex());
        let row = |job| {
            let line = Line::of(&redaction.job(job).try_into(), store.now());
            Row { tone: Tone::of_stage(line.stage).word(), has_page: id_of_text(&line.id).is_ok(), line }
        };
        Ok(Self { rows: listed.jobs.into_iter().map(row).collect(), last })
    }
}

/// What can be done with jobs in this state: the word, and the last part of the path.
fn acts(state: &str) -> Vec<(&'static str, &'static str)> {
    let [retry, change, cancel, delete] = [("Retry", "retry"), ("Change", "change"), ("Cancel", "cancel"), ("Delete", "delete")];
    match state {
        "failed" | "archived" => vec![retry, delete],
        "done" | "cancelled" => vec![delete],
        "running" => vec![cancel],
        "" => vec![retry, change, cancel, delete],
        _ => vec![retry, change, cancel],
    }
}
