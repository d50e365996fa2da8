//! Who may read, and who may change: sessions, roles, and requests that a browser makes for the page of another site.

use std::sync::Arc;

use axum::{
    Extension,
    extract::{Request, State},
    http::Method,
    middleware::Next,
    response::{IntoResponse as _, Redirect, Response},
};

use super::{
    super::{Web, access::Role, problem::Problem},
    visitor::Visitor,
    words::link,
};

/// Lets those pass who may read, and says who they are. The others may log in, if anybody can.
pub(super) async fn enter(State(web): State<Arc<Web>>, mut request: Request, next: Next) -> Result<Response, Problem> {
    let visitor = match web.kept.sessions.of(request.headers(), web.is_behind_proxy) {
        Some((visitor, until)) => {
            request.extensions_mut().insert(until);
            visitor
        }
        None => match web.access.caller(request.headers()) {
            Ok(caller) => Visitor::without_session(caller, web.csrf.clone()),
            Err(problem) if !web.access.has_people() => return Err(problem),
            Err(_) => {
                let to = request.uri().path_and_query().map_or("/", |path| path.as_str());
                let to = if request.method() == Method::GET { to } else { "" };
                return Ok(Redirect::to(&link("/login", [("to", to)])).into_response());
            }
        },
    };
    request.extensions_mut().insert(visitor.caller());
    request.extensions_mut().insert(visitor.clone());
    let mut response = next.run(request).await;
    // For the page that tells a problem.
    response.extensions_mut().insert(visitor);
    Ok(response)
}

/// Refuses what a browser sends for the page of another site, except that its reader follows a link.
pub(super) async fn refuse_other_sites(State(web): State<Arc<Web>>, request: Request, next: Next) -> Result<Response, Problem> {
    web.access.check_page(request.headers(), request.method() == Method::GET)?;
    Ok(next.run(request).await)
}

/// Lets operators pass.
pub(super) async fn only_operators(Extension(visitor): Extension<Visitor>, request: Request, next: Next) -> Result<Response, Problem> {
    if !visitor.is_operator() {
        let problem = format!("This needs the role {}, and you have the role {}.", Role::Operator, visitor.role);
        return Err(Problem::forbidden(problem));
    }
    Ok(next.run(request).await)
}
