//! People log in and out.

use std::sync::LazyLock;

use askama::Template;
use axum::{
    Extension,
    extract::State,
    http::{
        HeaderMap, StatusCode,
        header::{RETRY_AFTER, SET_COOKIE},
    },
    response::{IntoResponse as _, Redirect, Response},
};
use recruiter_common::http::Peer;
use tokio::{sync::Semaphore, task::spawn_blocking};

use super::{
    super::{Shared, Web, access::address, password::Hash, problem::Problem, requests::Parameters},
    form::{Fields, Sent},
    frame::{Answer, Frame, page},
    sessions::cookie,
};

/// How many passwords are compared at a time: each needs 19 MiB and a core.
static COMPARED: Semaphore = Semaphore::const_new(2);
/// With which the password of an unknown person is compared, so that it takes as long.
static NOBODY: LazyLock<Option<Hash>> = LazyLock::new(|| Hash::of(&hex::encode(rand::random::<[u8; 16]>())).ok());

#[derive(Template)]
#[template(path = "login.html")]
struct LoginPage {
    frame: Frame,
    name: String,
    to: String,
    is_wrong: bool,
    /// The reader followed a link on a page of others, with which browsers send no cookie.
    is_from_elsewhere: bool,
}

/// Shows the form.
pub(super) async fn show(State(web): Shared, headers: HeaderMap, mut given: Parameters) -> Answer {
    let to = given.take("to", |to| Ok(to.to_owned()))?.unwrap_or_default();
    given.end()?;
    if !web.access.has_people() {
        return Err(Problem::not_found("Nobody can log in: the file of --tokens has no people. `recruiter web password` makes one."));
    }
    let is_from_elsewhere = headers.get("sec-fetch-site").is_some_and(|site| site != "same-origin" && site != "none");
    form(StatusCode::OK, String::new(), &to, is_from_elsewhere)
}

fn form(status: StatusCode, name: String, to: &str, is_from_elsewhere: bool) -> Answer {
    let is_wrong = status != StatusCode::OK;
    let login = LoginPage { frame: Frame::outside("", "Log in"), name, to: own(to).into(), is_wrong, is_from_elsewhere };
    Ok((status, page(&login)?).into_response())
}

/// A path of this program; that of the overview in place of anything else.
fn own(to: &str) -> &str {
    let is_own = to.starts_with('/') && !to.starts_with("//") && to.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\');
    if is_own { to } else { "/" }
}

/// Compares name and password, and begins a session.
pub(super) async fn log_in(State(web): Shared, Extension(Peer(peer)): Extension<Peer>, headers: HeaderMap, fields: Fields) -> Answer {
    let (name, from) = (fields.text("name").trim(), address(&web, peer.ip(), &headers));
    if !web.kept.attempts.begin(from, name) {
        tracing::warn!(client = %from, "too many attempts to log in");
        let problem = "There were too many attempts to log in. Wait five minutes.";
        let mut response = Problem::new(StatusCode::TOO_MANY_REQUESTS, problem).into_response();
        response.headers_mut().insert(RETRY_AFTER, 300.into());
        return Ok(response);
    }
    let person = web.access.person(name);
    let hash = person.map_or_else(|| NOBODY.clone(), |(_, _, hash)| Some(hash.clone()));
    let password = fields.text("password").to_owned();
    let place = COMPARED.acquire().await;
    // With its place, which a client that hangs up does not give back before the end.
    let compared = spawn_blocking(move || {
        let _held = place;
        hash.is_some_and(|hash| hash.is_of(&password))
    });
    let is_right = compared.await.unwrap_or(false);
    let Some((person, role, _)) = person.filter(|_| is_right) else {
        tracing::warn!(client = %from, "a wrong name or password");
        return form(StatusCode::FORBIDDEN, name.to_owned(), fields.text("to"), false);
    };
    web.kept.attempts.succeed(from, name);
    web.kept.sessions.end(&headers, web.is_behind_proxy);
    let secret = web.kept.sessions.begin(person.into(), role);
    tracing::info!(person, client = %from, "logged in");
    Ok(with_cookie(&web, Some(&secret), own(fields.text("to"))))
}

/// Ends the session.
pub(super) async fn log_out(State(web): Shared, headers: HeaderMap, sent: Sent) -> Answer {
    web.kept.sessions.end(&headers, web.is_behind_proxy);
    tracing::info!(person = sent.visitor.name.as_deref(), "logged out");
    Ok(with_cookie(&web, None, "/"))
}

fn with_cookie(web: &Web, secret: Option<&str>, to: &str) -> Response {
    let mut response = Redirect::to(to).into_response();
    response.headers_mut().extend(cookie(secret, web.is_behind_proxy).map(|cookie| (SET_COOKIE, cookie)));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_leads_to_a_page_of_this_program() {
        for (to, expected) in [
            ("/jobs?class=a", "/jobs?class=a"),
            ("//example.org", "/"),
            ("/\\example.org", "/"),
            ("https://example.org", "/"),
            ("javascript:alert(1)", "/"),
            ("/a\r\nb: c", "/"),
            ("/ä", "/"),
            ("", "/"),
        ] {
            assert_eq!(own(to), expected, "{to}");
        }
    }
}
