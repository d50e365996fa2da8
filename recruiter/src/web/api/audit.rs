//! Shows what was done through this API.

use axum::{Json, extract::State};
use bson::oid::ObjectId;
use serde_json::{Value, json};

use super::super::{
    Shared,
    problem::{Problem, ProblemDocument},
    requests::Parameters,
};
use crate::views::audit::to_json;

/// What was done through this API, newest first.
#[utoipa::path(
    get,
    path = "/api/v1/audit",
    params(
        ("limit" = Option<u16>, Query, description = "Maximum number of entries, from 1 to 1000; 20 if it is not given"),
        ("after" = Option<String>, Query, description = "Continue after this entry: `next` of the page before"),
    ),
    responses((status = 200, description = "`entries`, and `next` if there may be more"), (status = 400, body = ProblemDocument))
)]
pub(super) async fn list_audit(State(web): Shared, mut given: Parameters) -> Result<Json<Value>, Problem> {
    let limit = given.page_limit()?;
    let of_text = |text: &str| ObjectId::parse_str(text).map_err(|_| format!("`{text:.80}` is not an id (24 hexadecimal digits)"));
    let after = given.take("after", of_text)?;
    given.end()?;
    let found = web.store.audited(limit, after).await?;
    let last = found.last().filter(|_| found.len() == usize::from(limit)).and_then(|entry| entry.get_object_id("_id").ok());
    let next = last.map(|id| id.to_hex());
    Ok(Json(json!({ "entries": found.into_iter().map(to_json).collect::<Vec<_>>(), "next": next })))
}
