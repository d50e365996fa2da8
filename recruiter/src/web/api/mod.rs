//! The API, for programs: `/api/v1`.
//!
//! | file | content |
//! |---|---|
//! | `jobs` | read jobs, and wait for them |
//! | `enqueue` | enqueue one job, or many as lines |
//! | `changes` | retry, change, cancel and delete jobs |
//! | `reads` | read numbers, settings, workers and graphs |
//! | `settings` | change limits, pauses and groups |
//! | `schedules` | put, pause, run and remove schedules |
//! | `fleet` | quiet, resume and stop workers; cancel and retry graphs |
//! | `streams` | events and messages as server-sent events; publish messages |
//! | `audit` | what was done through the API |
//! | `work` | reserve jobs, and end them |
//! | `openapi` | the description of all this |

mod audit;
mod changes;
mod enqueue;
mod fleet;
mod jobs;
mod openapi;
mod reads;
mod schedules;
mod settings;
mod streams;
mod work;

use std::sync::Arc;

use axum::{
    Json, Router,
    routing::{get, patch, post, put},
};

pub(super) use self::streams::events;
use super::{
    Web,
    access::{Role, for_role},
};

/// What is below `/api/v1`.
pub(super) fn router(web: &Arc<Web>) -> Router<Arc<Web>> {
    let viewer = Router::new()
        .route("/jobs", get(jobs::list))
        .route("/jobs/{id}", get(jobs::show))
        .route("/jobs/{id}/why", get(jobs::why))
        .route("/jobs/{id}/end", get(jobs::end))
        .route("/stats", get(reads::stats))
        .route("/groups", get(reads::groups))
        .route("/limits", get(reads::limits))
        .route("/limits/{name}", get(reads::limit))
        .route("/pauses", get(reads::paused))
        .route("/schedules", get(reads::list_schedules))
        .route("/schedules/{name}", get(reads::schedule))
        .route("/workers", get(reads::list_workers))
        .route("/graphs/{id}", get(reads::graph))
        .route("/events", get(streams::events))
        .route("/messages", get(streams::messages))
        .route("/openapi.json", get(async || Json(openapi::description())));
    let client = Router::new()
        .route("/jobs", post(enqueue::one))
        .route("/jobs/lines", post(enqueue::lines))
        .route("/messages", post(streams::publish))
        .route("/work/reserve", post(work::reserve))
        .route("/work/{reservation}/extend", post(work::extend))
        .route("/work/{reservation}/notes", post(work::notes))
        .route("/work/{reservation}/commit", post(work::commit))
        .route("/work/{reservation}/rollback", post(work::rollback));
    let operator = Router::new()
        .route("/jobs/{id}/retry", post(changes::retry))
        .route("/jobs/{id}/cancel", post(changes::cancel))
        .route("/jobs/{id}", patch(changes::alter).delete(changes::delete))
        .route("/jobs/retry", post(changes::retry_all))
        .route("/jobs/cancel", post(changes::cancel_all))
        .route("/jobs/delete", post(changes::delete_all))
        .route("/limits/{name}", put(settings::set_limit).delete(settings::remove_limit))
        .route("/pauses/{what}", put(settings::add_pause).delete(settings::remove_pause))
        .route("/groups/{name}", patch(settings::set_group))
        .route("/schedules/{name}", put(schedules::put_schedule).delete(schedules::remove_schedule))
        .route("/schedules/{name}/pause", post(schedules::pause_schedule))
        .route("/schedules/{name}/resume", post(schedules::resume_schedule))
        .route("/schedules/{name}/run", post(schedules::run_schedule))
        .route("/workers/quiet", post(fleet::quiet_workers))
        .route("/workers/resume", post(fleet::resume_workers))
        .route("/workers/stop", post(fleet::stop_workers))
        .route("/graphs/{id}/cancel", post(fleet::cancel_graph))
        .route("/graphs/{id}/retry", post(fleet::retry_graph))
        .route("/audit", get(audit::list_audit));
    for_role(Role::Viewer, web, viewer).merge(for_role(Role::Client, web, client)).merge(for_role(Role::Operator, web, operator))
}
