//! A graph of jobs: drawn, and as a table.

use std::collections::BTreeMap;

use askama::Template;
use axum::{Extension, extract::State};
use recruiter_common::{graphs::GraphJob, ids::JobId, job::Stage, store::Redaction, text::printable};

use super::{
    super::{
        Shared,
        problem::Problem,
        requests::{Graph, Parameters},
    },
    frame::{Answer, Frame, page},
    live::{FOLLOWED, live_jobs},
    visitor::Visitor,
};
use crate::views::{graph::unknown, tone::Tone};

/// The most jobs that are drawn.
const DRAWN: usize = 200;
/// The most jobs in the table.
const LISTED: usize = 500;
/// The most parents of a job that the table names.
const PARENTS: usize = 20;
/// Size of a job and the space around it, in the units of the drawing.
const WIDTH: usize = 150;
const HEIGHT: usize = 34;
const ACROSS: usize = 60;
const BELOW: usize = 16;
/// How much of a class is in a drawing, in characters.
const SHORT: usize = 20;

#[derive(Template)]
#[template(path = "graph.html")]
struct GraphPage {
    frame: Frame,
    id: String,
    summary: String,
    drawing: Option<Drawing>,
    rows: Vec<Row>,
    /// How many jobs are not in the table.
    more: usize,
    /// Where its events are.
    live: String,
    is_operator: bool,
}

struct Row {
    id: JobId,
    class: String,
    group: String,
    word: &'static str,
    tone: &'static str,
    /// Some of those that it waits for.
    waits_for: Vec<JobId>,
    more_parents: usize,
    more: String,
}

/// The jobs, in columns: each is to the right of those that it waits for.
struct Drawing {
    width: usize,
    height: usize,
    node_width: usize,
    node_height: usize,
    nodes: Vec<Node>,
    edges: Vec<String>,
}

struct Node {
    id: JobId,
    x: usize,
    y: usize,
    text: String,
    word: &'static str,
    tone: &'static str,
}

/// Shows a graph.
pub(super) async fn show(State(web): Shared, Extension(visitor): Extension<Visitor>, graph: Graph, given: Parameters) -> Answer {
    let Graph(id) = graph;
    given.end()?;
    let (mut jobs, redaction) = tokio::try_join!(web.store.graph(id), web.store.redaction())?;
    if jobs.is_empty() {
        return Err(Problem::not_found(unknown(id)));
    }
    let mut states: BTreeMap<&str, usize> = BTreeMap::new();
    jobs.iter().for_each(|job| *states.entry(job.state.word()).or_default() += 1);
    let states: Vec<String> = states.iter().map(|(word, count)| format!("{count} {word}")).collect();
    let drawing = (jobs.len() <= DRAWN).then(|| Drawing::of(&jobs));
    // A page follows open jobs one by one, up to so many.
    let open: Vec<JobId> = jobs.iter().filter(|job| !job.state.is_finished()).map(|job| job.id).collect();
    let is_followed = !open.is_empty() && open.len() <= FOLLOWED;
    let more = jobs.len().saturating_sub(LISTED);
    // What failed is in the table in any case.
    jobs.sort_by_key(|job| job.state != Stage::Failed);
    jobs.truncate(LISTED);
    page(&GraphPage {
        is_operator: visitor.is_operator(),
        frame: Frame::new(visitor, "/jobs", format!("Graph {id}")),
        id: id.to_string(),
        summary: format!("{} jobs: {}", jobs.len() + more, states.join(", ")),
        drawing,
        more,
        live: if is_followed { live_jobs(open) } else { String::new() },
        rows: jobs.into_iter().map(|job| Row::of(job, &redaction)).collect(),
    })
}

impl Row {
    fn of(job: GraphJob, redaction: &Redaction) -> Self {
        let failure = job.failure.map(|(class, message)| {
            let message = redaction.text(&job.class, &message);
            format!("{}: {}", printable(&class, 80), printable(message, 200))
        });
        let retried = job.retried_as.map(|new| format!("retried as {new}"));
        let more: Vec<String> = failure.into_iter().chain(retried).collect();
        Self {
            id: job.id,
            class: printable(&job.class, 80),
            group: printable(&job.group, 80),
            word: job.state.word(),
            tone: Tone::of_stage(Some(job.state)).word(),
            waits_for: job.waits_for.iter().map(|edge| edge.job).take(PARENTS).collect(),
            more_parents: job.waits_for.len().saturating_sub(PARENTS),
            more: more.join("; "),
        }
    }
}

impl Drawing {
    fn of(jobs: &[GraphJob]) -> Self {
        let places = places(jobs);
        let at = |(column, row): (usize, usize)| (column * (WIDTH + ACROSS) + 1, row * (HEIGHT + BELOW) + 1);
        let mut drawing = Self { width: 0, height: 0, node_width: WIDTH, node_height: HEIGHT, nodes: Vec::new(), edges: Vec::new() };
        for job in jobs {
            let (x, y) = at(places[&job.id]);
            drawing.width = drawing.width.max(x + WIDTH + 1);
            drawing.height = drawing.height.max(y + HEIGHT + 1);
            for parent in job.waits_for.iter().filter_map(|edge| places.get(&edge.job)) {
                let (from, from_y) = at(*parent);
                let (from, from_y, to_y, half) = (from + WIDTH, from_y + HEIGHT / 2, y + HEIGHT / 2, ACROSS / 2);
                drawing.edges.push(format!("M{from} {from_y}C{} {from_y} {} {to_y} {x} {to_y}", from + half, x.saturating_sub(half)));
            }
            let text = printable(&job.class, SHORT);
            let tone = Tone::of_stage(Some(job.state)).word();
            drawing.nodes.push(Node { id: job.id, x, y, text, word: job.state.word(), tone });
        }
        drawing
    }
}

/// Column and row of each job: the column is the length of the longest way to it, and the rows follow those of its parents.
fn places(jobs: &[GraphJob]) -> BTreeMap<JobId, (usize, usize)> {
    let mut columns: BTreeMap<JobId, usize> = jobs.iter().map(|job| (job.id, 0)).collect();
    // A circle, which only a document that was written by hand can have, ends with the passes.
    for _ in 0..jobs.len() {
        let mut is_final = true;
        for job in jobs {
            let parents = job.waits_for.iter().filter_map(|edge| columns.get(&edge.job));
            let column = parents.max().map_or(0, |column| (column + 1).min(jobs.len()));
            is_final &= columns.insert(job.id, column) == Some(column);
        }
        if is_final {
            break;
        }
    }
    let mut by_column: BTreeMap<usize, Vec<&GraphJob>> = BTreeMap::new();
    jobs.iter().for_each(|job| by_column.entry(columns[&job.id]).or_default().push(job));
    let mut places: BTreeMap<JobId, (usize, usize)> = BTreeMap::new();
    for (column, mut jobs) in by_column {
        jobs.sort_by_key(|job| {
            let rows: Vec<usize> = job.waits_for.iter().filter_map(|edge| places.get(&edge.job)).map(|(_, row)| *row).collect();
            rows.iter().sum::<usize>() * 100 / rows.len().max(1)
        });
        places.extend(jobs.iter().enumerate().map(|(row, job)| (job.id, (column, row))));
    }
    places
}
