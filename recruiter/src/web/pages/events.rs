//! What happens, as it happens. The script of the page adds the events to the list.

use askama::Template;
use axum::Extension;
use recruiter_common::{text::printable, topics::Pattern};

use super::{
    super::requests::Parameters,
    frame::{Answer, Frame, page},
    live::live,
    visitor::Visitor,
};

#[derive(Template)]
#[template(path = "events.html")]
struct EventsPage {
    frame: Frame,
    topic: String,
    live: String,
}

/// Shows events.
pub(super) async fn show(Extension(visitor): Extension<Visitor>, mut given: Parameters) -> Answer {
    let of_text = |text: &str| match Pattern::new(text) {
        Ok(_) if printable(text, 512) == text => Ok(text.to_owned()),
        Ok(_) => Err("it is too long, or has characters that cannot be seen".to_owned()),
        Err(problem) => Err(problem.to_string()),
    };
    let topic = given.take("topic", of_text)?;
    given.end()?;
    let topic = topic.unwrap_or_default();
    page(&EventsPage { frame: Frame::new(visitor, "/events", "Events"), live: live([&*topic]), topic })
}
