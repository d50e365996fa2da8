//! What an operator does: a page says what would be done, its form does it, and the browser is sent to the page of what was changed.
//!
//! | file | content |
//! |---|---|
//! | `graph` | cancels a graph, or retries what failed |
//! | `job` | retries, changes, cancels and deletes a job |
//! | `jobs` | the same for many |
//! | `pause` | pauses groups, classes and lines, and resumes them |
//! | `schedule` | pauses, resumes and runs a schedule |
//! | `worker` | quiets, resumes and stops a worker |

pub(super) mod graph;
pub(super) mod job;
pub(super) mod jobs;
pub(super) mod pause;
pub(super) mod schedule;
pub(super) mod worker;

use askama::Template;
use axum::response::IntoResponse as _;
use recruiter_common::text::printable;

use super::{
    super::problem::Problem,
    form::Fields,
    frame::{Answer, Frame, page},
    visitor::Visitor,
};

/// How much is said about what cannot be used, in characters.
const LONGEST_PROBLEM: usize = 1_000;

/// The page that asks before something is done.
#[derive(Template)]
#[template(path = "act.html")]
struct Question {
    frame: Frame,
    csrf: String,
    /// What is asked.
    question: String,
    /// Why what was sent before cannot be used.
    problem: Option<String>,
    /// What would be done.
    would: String,
    /// Where the form goes.
    path: String,
    fields: Vec<Field>,
    /// The button.
    word: &'static str,
    is_dangerous: bool,
    /// The page from which one comes.
    back: String,
}

/// A field of the form.
struct Field {
    name: &'static str,
    value: String,
    kind: Kind,
}

enum Kind {
    /// Not seen.
    Hidden,
    /// With this label.
    Text(&'static str),
    /// Of many lines.
    Lines(&'static str),
}

impl Question {
    /// Asks for something of the section with this path. The form goes to `path`.
    fn new(visitor: Visitor, section: &str, word: &'static str, of: &str, path: String) -> Self {
        Self {
            csrf: visitor.csrf.to_string(),
            frame: Frame::new(visitor, section, format!("{word}: {of}")),
            question: format!("{word}: {of}?"),
            problem: None,
            would: String::new(),
            path,
            fields: Vec::new(),
            word,
            is_dangerous: false,
            back: section.to_owned(),
        }
    }

    fn asked(&self) -> Answer {
        page(self)
    }

    /// Asks again, with what was sent, if that cannot be used.
    fn again(mut self, sent: &Fields, problem: Problem) -> Answer {
        for field in &mut self.fields {
            if let Some(text) = sent.given(field.name) {
                text.clone_into(&mut field.value);
            }
        }
        let status = problem.status();
        self.problem = Some(printable(&problem.into_detail(), LONGEST_PROBLEM));
        Ok((status, self.asked()?).into_response())
    }
}

impl Field {
    fn hidden(name: &'static str, value: impl Into<String>) -> Self {
        Self { name, value: value.into(), kind: Kind::Hidden }
    }

    fn reason() -> Self {
        Self { name: "reason", value: String::new(), kind: Kind::Text("Reason, for others") }
    }
}

fn no_such_page() -> Problem {
    Problem::not_found("There is no page at this address.")
}
