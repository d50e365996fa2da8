//! What all pages have: the frame around the content, their headers, and errors as pages.

use askama::Template;
use axum::{
    http::{
        HeaderName, HeaderValue, StatusCode,
        header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, RETRY_AFTER, X_CONTENT_TYPE_OPTIONS},
    },
    response::{IntoResponse, Response},
};
use recruiter_common::text::printable;

use super::{super::problem::Problem, assets::PATHS, visitor::Visitor};

/// Only what this program serves is loaded and run, nothing within a page itself; and no page of others shows one of these.
const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'";

const HTML: HeaderValue = HeaderValue::from_static("text/html; charset=utf-8");

/// How much is said about what is wrong, in characters.
const LONGEST_DETAIL: usize = 2_000;

/// The parts of the navigation: path and name.
const SECTIONS: [(&str, &str); 9] = [
    ("/", "Overview"),
    ("/jobs", "Jobs"),
    ("/groups", "Groups"),
    ("/workers", "Workers"),
    ("/limits", "Limits"),
    ("/schedules", "Schedules"),
    ("/events", "Events"),
    ("/audit", "Audit"),
    ("/cluster", "Cluster"),
];

/// The frame around the content of a page.
pub(super) struct Frame {
    pub(super) title: String,
    pub(super) sections: Vec<Section>,
    pub(super) visitor: Option<Visitor>,
    pub(super) style: &'static str,
    pub(super) script: &'static str,
    pub(super) icon: &'static str,
}

/// A part of the navigation.
pub(super) struct Section {
    pub(super) path: &'static str,
    pub(super) name: &'static str,
    pub(super) is_here: bool,
}

impl Frame {
    /// The frame of a page of the section with this path.
    pub(super) fn new(visitor: Visitor, section: &str, title: impl Into<String>) -> Self {
        let mut frame = Self::outside(section, title);
        frame.sections.retain(|section| section.path != "/audit" || visitor.is_operator());
        Self { visitor: Some(visitor), ..frame }
    }

    /// The frame of a page that no one has logged in for.
    pub(super) fn outside(section: &str, title: impl Into<String>) -> Self {
        let sections = SECTIONS.map(|(path, name)| Section { path, name, is_here: path == section });
        let [style, script, icon] = &*PATHS;
        Self { title: title.into(), sections: sections.into(), visitor: None, style, script, icon }
    }
}

/// A page.
pub(super) type Answer = Result<Response, Problem>;

/// Writes a page.
pub(super) fn page(content: &impl Template) -> Answer {
    let text = content.render().map_err(|error| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error))?;
    Ok(([(CONTENT_TYPE, HTML)], text).into_response())
}

#[derive(Template)]
#[template(path = "failed.html")]
struct FailedPage {
    frame: Frame,
    detail: String,
    is_bad: bool,
    may_pass: bool,
}

/// Tells on a page why there is no other one.
pub(super) async fn problem_page(mut response: Response) -> Response {
    let Some(problem) = response.extensions_mut().remove::<Problem>() else { return response };
    let status = response.status();
    let title = match status {
        StatusCode::NOT_FOUND => "Not found",
        StatusCode::ACCEPTED => "The change goes on",
        StatusCode::SERVICE_UNAVAILABLE => "Not available now",
        StatusCode::FORBIDDEN => "Not allowed",
        StatusCode::TOO_MANY_REQUESTS => "Too many requests",
        _ if status.is_server_error() => "Something is wrong here",
        _ => "This request cannot be answered",
    };
    let (detail, may_pass) =
        (printable(&problem.into_detail(), LONGEST_DETAIL), response.headers().get(RETRY_AFTER).is_some_and(|after| after == "1"));
    let visitor = response.extensions_mut().remove::<Visitor>();
    let frame = visitor.map_or_else(|| Frame::outside("", title), |visitor| Frame::new(visitor, "", title));
    let told = FailedPage { frame, detail, is_bad: status != StatusCode::ACCEPTED, may_pass };
    let body = told.render().unwrap_or_else(|_| title.into());
    *response.body_mut() = body.into();
    response.headers_mut().insert(CONTENT_TYPE, HTML);
    response
}

/// Adds the headers of every page. Files that name their contents are kept by browsers, nothing else is.
pub(super) async fn with_headers(mut response: Response) -> Response {
    let headers = response.headers_mut();
    let fixed = [
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        // Not `no-referrer`: a form would then be sent without its origin.
        (REFERRER_POLICY, "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ];
    headers.extend(fixed.map(|(name, value)| (name, HeaderValue::from_static(value))));
    headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    response
}
