//! The pages, for people: HTML that works without a script. What is shown is what the commands show.
//!
//! | file | content |
//! |---|---|
//! | `acts` | what an operator does |
//! | `assets` | the stylesheet, the script and the icon |
//! | `attempts` | how often somebody tries to log in |
//! | `audit` | what was done |
//! | `chart` | small charts |
//! | `cluster` | who leads, who cleans, and what the doctor finds |
//! | `door` | who may read, and who may change; requests of other sites |
//! | `events` | what happens, as it happens |
//! | `form` | what a form sends |
//! | `frame` | the frame around the content, the headers, errors as pages |
//! | `graph` | a graph of jobs, drawn |
//! | `groups`, `limits`, `schedules`, `workers` | tables of these |
//! | `job` | a job |
//! | `jobs` | the list of jobs |
//! | `latest` | a reading of MongoDB that all share |
//! | `live` | the events after which a page is read again |
//! | `login` | log in and out |
//! | `overview` | throughput, failures and latency, and what waits |
//! | `recent` | the newest jobs that have ended |
//! | `sessions` | who is logged in |
//! | `table` | a page of tables |
//! | `visitor` | who reads a page |
//! | `words` | text of the database, cut |

mod acts;
mod assets;
mod attempts;
mod audit;
mod chart;
mod cluster;
mod door;
mod events;
mod form;
mod frame;
mod graph;
mod groups;
mod job;
mod jobs;
mod latest;
mod limits;
mod live;
mod login;
mod overview;
mod recent;
mod schedules;
mod sessions;
mod table;
mod visitor;
mod words;
mod workers;

use std::sync::Arc;

use axum::{
    Router,
    extract::DefaultBodyLimit,
    middleware::{from_fn, from_fn_with_state, map_response},
    routing::{get, post},
};
use tokio::sync::Mutex;

use self::{
    attempts::Attempts,
    chart::Charts,
    cluster::Examined,
    latest::{Latest, LatestOf},
    overview::Overview,
    recent::Recent,
    sessions::Sessions,
};
use super::{Web, problem::Problem};
use crate::views::limits::ShownLimit;

/// The largest form, in bytes.
const LONGEST_FORM: usize = 64 * 1024;

/// What the pages keep.
#[derive(Default)]
pub(super) struct Kept {
    attempts: Attempts,
    day: Latest<Charts>,
    ended_in_hour: Arc<Mutex<Recent>>,
    ended_in_day: Arc<Mutex<Recent>>,
    examined: Latest<Examined>,
    groups: Latest<groups::Declared>,
    limit: LatestOf<ShownLimit>,
    limits: Latest<limits::Reading>,
    lists: LatestOf<jobs::Listed>,
    roster: Latest<workers::Roster>,
    schedules: Latest<schedules::Reading>,
    overview: Latest<Overview>,
    /// Jobs that run, and about how many are archived.
    numbers: Latest<(u64, u64)>,
    sessions: Sessions,
}

/// Begins to read what the first page shows: later readings cost little.
pub(super) fn begin(web: &Arc<Web>) {
    let web = web.clone();
    web.tasks.clone().spawn(async move { Overview::of(&web).await.map(drop) });
}

/// All pages.
pub(super) fn router(web: &Arc<Web>) -> Router<Arc<Web>> {
    let for_operators = Router::new()
        .route("/audit", get(audit::list))
        .route("/jobs/{id}/{act}", get(acts::job::ask).post(acts::job::act))
        .route("/jobs/many/{act}", get(acts::jobs::ask).post(acts::jobs::act))
        .route("/graphs/{id}/{act}", get(acts::graph::ask).post(acts::graph::act))
        .route("/pauses/{act}", get(acts::pause::ask).post(acts::pause::act))
        .route("/schedules/{act}", get(acts::schedule::ask).post(acts::schedule::act))
        .route("/workers/{id}/{act}", get(acts::worker::ask).post(acts::worker::act))
        .route_layer(from_fn(door::only_operators));
    let pages = Router::new()
        .route("/", get(overview::show))
        .route("/jobs", get(jobs::list))
        .route("/jobs/{id}", get(job::show))
        .route("/jobs/{id}/json", get(job::json))
        .route("/groups", get(groups::list))
        .route("/groups/why", get(groups::why))
        .route("/workers", get(workers::list))
        .route("/limits", get(limits::list))
        .route("/limits/of", get(limits::show))
        .route("/schedules", get(schedules::list))
        .route("/graphs/{id}", get(graph::show))
        .route("/events", get(events::show))
        .route("/events/stream", get(super::api::events))
        .route("/cluster", get(cluster::show))
        .route("/logout", post(login::log_out))
        .merge(for_operators)
        .route_layer(from_fn_with_state(web.clone(), door::enter));
    Router::new()
        .route("/assets/{hash}/{name}", get(assets::serve))
        .route("/login", get(login::show).post(login::log_in))
        .merge(pages)
        .fallback(async || Problem::not_found("There is no page at this address."))
        .method_not_allowed_fallback(async || Problem::wrong_method())
        .layer(DefaultBodyLimit::max(LONGEST_FORM))
        .layer(from_fn_with_state(web.clone(), door::refuse_other_sites))
        .layer(map_response(frame::problem_page))
        .layer(map_response(frame::with_headers))
}
