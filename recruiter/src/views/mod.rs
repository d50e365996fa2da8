//! What programs read: the JSON that the commands write with `--json`, and the HTTP API answers. MongoDB's relaxed extended JSON. And what
//! people read, in the terminal and in the pages.
//!
//! | file | content |
//! |---|---|
//! | `audit` | an entry of the audit |
//! | `counts` | how many jobs wait and run in each group |
//! | `graph` | the jobs of a graph |
//! | `groups` | groups, with their settings |
//! | `job` | a job, why it waits, and how it has ended |
//! | `limits` | limits, who holds their permits, and pauses |
//! | `filter` | which jobs, in words |
//! | `outcome` | what a change has done to a job or a worker |
//! | `schedules` | a schedule, also in words |
//! | `stats` | numbers of jobs, and why they wait |
//! | `story` | a job in words |
//! | `tone` | how good or bad a state is |
//! | `workers` | a worker, also in words, and what a request to it has done |

pub(crate) mod audit;
pub(crate) mod counts;
pub(crate) mod filter;
pub(crate) mod graph;
pub(crate) mod groups;
pub(crate) mod job;
pub(crate) mod limits;
pub(crate) mod outcome;
pub(crate) mod schedules;
pub(crate) mod stats;
pub(crate) mod story;
pub(crate) mod tone;
pub(crate) mod workers;

use bson::{Bson, Document, doc};
use recruiter_common::instant::Instant;
use serde::{Serialize as _, Serializer};
use serde_json::{Value, json};

/// What is in the database, as JSON.
pub(crate) fn extended(value: impl Into<Bson>) -> Value {
    value.into().into_relaxed_extjson()
}

/// A stored document as programs get it: its id as `id`, in hex like everywhere, and its state in one word.
pub(crate) fn with_state(document: Document, state: &str) -> Value {
    let id = document.get("_id").map(|id| id.as_object_id().map_or_else(|| id.clone(), |id| id.to_hex().into()));
    let mut line = doc! { "id": id, "state": state };
    line.extend(document.into_iter().filter(|(field, _)| field != "_id"));
    extended(line)
}

/// What a change of something that has a name has done.
pub(crate) fn outcome_of(name: &str, outcome: &str, dry_run: bool) -> Value {
    json!({ "name": name, "outcome": outcome, "dry_run": dry_run })
}

/// Serializes a date as the database has it.
pub(crate) fn date<S: Serializer>(at: &(impl Into<Option<Instant>> + Copy), to: S) -> Result<S::Ok, S::Error> {
    extended((*at).into().map(bson::DateTime::from_chrono)).serialize(to)
}

/// The texts of these things.
pub(crate) fn texts<'a, T: ToString + 'a>(things: impl IntoIterator<Item = &'a T>) -> Vec<String> {
    things.into_iter().map(ToString::to_string).collect()
}

/// A text for people, `-` if there is none.
pub(crate) fn or_dash(text: Option<impl ToString>) -> String {
    text.map_or_else(|| "-".into(), |text| text.to_string())
}
