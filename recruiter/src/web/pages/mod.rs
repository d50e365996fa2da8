//! The pages, for people: HTML that works without a script. What is shown is what the commands show.
//!
//! | file | content |
//! |---|---|
//! | `acts` | what an operator does |
//! | `assets` | the stylesheet, the script and the icon |
//! | `attempts` | how often somebody tries to log in |
//! | `chart` | small charts |
//! | `door` | who may read, and requests of other sites |
//! | `form` | what a form sends |
//! | `frame` | the frame around the content, the headers, errors as pages |
//! | `groups`, `limits`, `schedules`, `workers` | tables of these |
//! | `job` | a job |
//! | `jobs` | the list of jobs |
//! | `latest` | a reading of MongoDB that all share |
//! | `login` | log in and out |
//! | `overview` | throughput, failures and latency, and what waits |
//! | `sessions` | who is logged in |
//! | `table` | a page of tables |
//! | `visitor` | who reads a page |
//! | `words` | text of the database, cut |

mod acts;
mod assets;
mod attempts;
mod chart;
mod door;
mod form;
mod frame;
mod groups;
mod job;
mod jobs;
mod latest;
mod limits;
mod login;
mod overview;
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
    middleware::{from_fn_with_state, map_response},
    routing::{get, post},
};

use self::{attempts::Attempts, latest::Latest, overview::Overview, sessions::Sessions};
use super::{Web, problem::Problem};

/// The largest form, in bytes.
const LONGEST_FORM: usize = 64 * 1024;

/// What the pages keep.
#[derive(Default)]
pub(super) struct Kept {
    attempts: Attempts,
    overview: Latest<Overview>,
    sessions: Sessions,
}

/// All pages.
pub(super) fn router(web: &Arc<Web>) -> Router<Arc<Web>> {
    let pages = Router::new()
        .route("/", get(overview::show))
        .route("/jobs", get(jobs::list))
        .route("/jobs/{id}", get(job::show))
        .route("/jobs/{id}/json", get(job::json))
        .route("/groups", get(groups::list))
        .route("/groups/why", get(groups::why))
        .route("/workers", get(workers::list))
        .route("/limits", get(limits::list))
        .route("/schedules", get(schedules::list))
        .route("/jobs/{id}/{act}", get(acts::ask_job).post(acts::do_job))
        .route("/groups/{act}", get(acts::ask_group).post(acts::do_group))
        .route("/workers/{id}/{act}", get(acts::ask_worker).post(acts::do_worker))
        .route("/logout", post(login::log_out))
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
