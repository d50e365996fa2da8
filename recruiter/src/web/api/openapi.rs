//! The description of the API, which `/api/v1/openapi.json` answers. It is made from the functions that answer.

use utoipa::{
    Modify, OpenApi,
    openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme},
};

use super::{
    super::{
        changes::{NewContent, NewValues},
        problem::ProblemDocument,
    },
    audit, changes, enqueue,
    fleet::{self, ChosenWorkers},
    jobs, reads,
    schedules::{self, NewSchedule, NewSchedulePause},
    settings::{self, NewGroup, NewLimit, NewPause},
    streams::{self, NewMessage},
    work::{self, Commit, NewLease, Notes, Rollback, Wanted},
};

/// Background jobs on MongoDB. Documents are MongoDB's relaxed extended JSON, as the commands write them with `--json`.
#[derive(OpenApi)]
#[openapi(
    info(title = "Recruiter"),
    paths(
        jobs::list,
        jobs::show,
        jobs::why,
        jobs::end,
        enqueue::one,
        enqueue::lines,
        changes::retry,
        changes::cancel,
        changes::alter,
        changes::delete,
        changes::retry_all,
        changes::cancel_all,
        changes::delete_all,
        work::reserve,
        work::extend,
        work::notes,
        work::commit,
        work::rollback,
        reads::stats,
        reads::groups,
        reads::limits,
        reads::limit,
        reads::paused,
        reads::list_schedules,
        reads::schedule,
        reads::list_workers,
        reads::graph,
        settings::set_limit,
        settings::remove_limit,
        settings::add_pause,
        settings::remove_pause,
        settings::set_group,
        schedules::put_schedule,
        schedules::pause_schedule,
        schedules::resume_schedule,
        schedules::run_schedule,
        schedules::remove_schedule,
        fleet::quiet_workers,
        fleet::resume_workers,
        fleet::stop_workers,
        fleet::cancel_graph,
        fleet::retry_graph,
        streams::events,
        streams::messages,
        streams::publish,
        audit::list_audit,
    ),
    components(schemas(ProblemDocument, NewContent, NewValues, NewLimit, NewPause, NewGroup, NewSchedule, NewSchedulePause, ChosenWorkers, NewMessage, Wanted, NewLease, Notes, Commit, Rollback)),
    modifiers(&Tokens),
    security((), ("token" = []))
)]
struct Api;

/// How a token is sent.
struct Tokens;

impl Modify for Tokens {
    fn modify(&self, api: &mut utoipa::openapi::OpenApi) {
        let bearer = SecurityScheme::Http(HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build());
        api.components.get_or_insert_default().add_security_scheme("token", bearer);
    }
}

pub(super) fn description() -> utoipa::openapi::OpenApi {
    Api::openapi()
}
