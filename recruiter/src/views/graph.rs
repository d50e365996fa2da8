//! The jobs of a graph, as they are shown.

use std::ops::Not;

use recruiter_common::{GraphId, graphs::GraphJob, store::Redaction};
use serde::Serialize;

use super::texts;

/// What there is of a graph that does not exist.
pub(crate) fn unknown(id: GraphId) -> String {
    format!("no job is part of the graph {id}, neither in `scheduled` nor in `archived`")
}

/// Why a change of a graph has changed no job. `is_retrying`: a retry of it was not complete.
pub(crate) fn nothing_changed(is_cancel: bool, is_retrying: bool, dry_run: bool) -> &'static str {
    match (is_cancel, is_retrying, dry_run) {
        (true, true, false) => "the rest of its retry is given up; all its jobs are finished",
        (true, true, true) => "the rest of its retry would be given up; all its jobs are finished",
        (true, false, _) => "nothing to cancel: all jobs are finished",
        (false, ..) => "nothing to retry: no job has failed, or it was retried before",
    }
}

/// A job of a graph.
#[derive(Serialize)]
pub(crate) struct Listed {
    pub(crate) id: String,
    pub(crate) class: String,
    pub(crate) group: String,
    pub(crate) state: &'static str,
    pub(crate) waits_for: Vec<Parent>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) why: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) continued_as: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) recovered_from: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) retried_as: Option<String>,
    #[serde(skip_serializing_if = "Not::not")]
    pub(crate) retrying: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<Failure>,
}

/// A job that another one waits for.
#[derive(Serialize)]
pub(crate) struct Parent {
    pub(crate) job: String,
    pub(crate) when: &'static str,
}

#[derive(Serialize)]
pub(crate) struct Failure {
    pub(crate) class: String,
    pub(crate) message: String,
}

impl Listed {
    pub(crate) fn of(job: GraphJob, redaction: &Redaction) -> Self {
        let shown = |message: String| redaction.text(&job.class, &message).to_owned();
        let error = job.failure.map(|(class, message)| Failure { class, message: shown(message) });
        Self {
            id: job.id.to_string(),
            class: job.class,
            group: job.group,
            state: job.state.word(),
            waits_for: job.waits_for.iter().map(|edge| Parent { job: edge.job.to_string(), when: edge.when.word() }).collect(),
            why: job.why,
            continued_as: texts(&job.continued_as),
            recovered_from: job.recovered_from.map(|old| old.to_string()),
            retried_as: job.retried_as.map(|new| new.to_string()),
            retrying: job.is_retrying,
            error,
        }
    }
}
