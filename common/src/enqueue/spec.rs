//! The JSON form of a job, in and out: for the command line, files with one job on each line, and other programs.
//!
//! ```
//! use recruiter_common::spec::JobSpec;
//!
//! let spec: JobSpec = r#"{"class": "checksum", "parameters": {"path": "/etc/hostname"}, "after": "5m"}"#.parse()?;
//! assert_eq!(spec.settings.group(), "generic", "the default");
//! assert_eq!(spec.to_string(), r#"{"class":"checksum","parameters":{"path":"/etc/hostname"},"after":"5m"}"#);
//! let job = spec.into_job(UnknownPolicies::Refuse)?;
//! # use recruiter_common::spec::{InvalidSpec, UnknownPolicies};
//! # Ok::<(), InvalidSpec>(())
//! ```

use std::{fmt, str::FromStr, time::Duration};

use bson::{Bson, Document};
use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::{Value, json};

use super::NewJob;
use crate::{
    base::{
        Instant, JobId, check_traceparent, json,
        json::{JsonError, relaxed},
    },
    job::{Edge, Job, Settings, StoredPolicy, When},
    retry_policy::RetryPolicies,
    unique::{OnConflict, Unique},
};

/// Maximum length of a line of JSON, in bytes. A job of the maximum size fits, even if JSON needs four bytes for one byte of BSON.
pub const LONGEST_LINE: usize = 16 * 1024 * 1024;

/// A job as a JSON object. Values that JSON does not have (dates, ids, binary data) are written in MongoDB's extended JSON. `null` means the
/// same as a missing field. A field that is not listed here is refused.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct JobSpec {
    /// Class of the workable. The only required field.
    #[serde(default)]
    pub class: String,
    /// Parameters of the workable: a JSON object.
    #[serde(default, deserialize_with = "parameters", serialize_with = "document", skip_serializing_if = "Option::is_none")]
    pub parameters: Option<Document>,
    /// Only for a bundle, and in place of `parameters`: an array with the parameters of each item.
    #[serde(default, deserialize_with = "items", serialize_with = "documents", skip_serializing_if = "Option::is_none")]
    pub items: Option<Vec<Document>>,
    /// How the job is treated.
    #[serde(flatten)]
    pub settings: Settings,
    /// Instant at which the job is due, for example `2030-01-31T18:00:00Z`. Default: now, unless `after` is given.
    #[serde(default, deserialize_with = "instant", serialize_with = "rfc3339", skip_serializing_if = "Option::is_none")]
    pub scheduled_at: Option<Instant>,
    /// Delay from the enqueueing until the job is due, for example `1h 30m`.
    #[serde(default, deserialize_with = "duration", serialize_with = "humane", skip_serializing_if = "Option::is_none")]
    pub after: Option<Duration>,
    /// Instant at which the job expires if it has not started.
    #[serde(default, deserialize_with = "instant", serialize_with = "rfc3339", skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Instant>,
    /// Time from the enqueueing until the job expires if it has not started, for example `2h`.
    #[serde(default, deserialize_with = "duration", serialize_with = "humane", skip_serializing_if = "Option::is_none")]
    pub expires_after: Option<Duration>,
    /// What makes the job unique.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unique: Option<UniqueSpec>,
    /// The jobs that it waits for: ids, or objects `{"job": "…", "when": "ended"}` with `done` (the default), `ended` or `failed`
    /// ([`graphs`](crate::graphs)).
    #[serde(default, deserialize_with = "edges", serialize_with = "edges_to_json", skip_serializing_if = "Vec::is_empty")]
    pub waits_for: Vec<Edge>,
    /// Id of the job, 24 hexadecimal digits. If a job with this id exists, nothing is enqueued.
    #[serde(default, deserialize_with = "id", serialize_with = "hex", skip_serializing_if = "Option::is_none")]
    pub id: Option<JobId>,
}

/// What makes a job unique, as a JSON object: `{"key": "invoice-17"}`, `{"parameters": ["customer", "month"], "period": "1h"}`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct UniqueSpec {
    /// The key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// In place of `key`: the names of the parameters that make the key together with the class. An empty array stands for all parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameters: Option<Vec<String>>,
    /// How long the key is taken: `finished` (the default) or `started`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<Until>,
    /// In place of `until`: the key is taken for this time, for example `1h`.
    #[serde(default, deserialize_with = "duration", serialize_with = "humane", skip_serializing_if = "Option::is_none")]
    pub period: Option<Duration>,
    /// What happens if the key is taken: `ignore` (the default), `replace`, `postpone` or `run-once-more`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_conflict: Option<Reaction>,
    /// With `postpone`: the job is not postponed beyond this time after it was enqueued.
    #[serde(default, deserialize_with = "duration", serialize_with = "humane", skip_serializing_if = "Option::is_none")]
    pub at_most: Option<Duration>,
}

/// How long a key is taken, in [`UniqueSpec`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "process", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum Until {
    /// Until the first start of the job.
    Started,
    /// Until the job is finished.
    Finished,
}

/// What happens if a key is taken, in [`UniqueSpec`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "process", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum Reaction {
    /// Nothing is enqueued.
    Ignore,
    /// The waiting job gets the content of the new one.
    Replace,
    /// The waiting job gets the later date of the new one.
    Postpone,
    /// One further job runs after the running one.
    RunOnceMore,
}

impl UniqueSpec {
    fn into_unique(self) -> Result<Unique, InvalidSpec> {
        let refused = |problem: &str| Err(InvalidSpec::new(problem));
        let unique = match (self.key, self.parameters) {
            (Some(_), Some(_)) => return refused("`key` and `parameters` of `unique` exclude each other; give only one of them"),
            (None, None) => return refused("`unique` needs a `key` or `parameters`"),
            (Some(key), None) => Unique::by_key(key),
            (None, Some(names)) if names.is_empty() => Unique::by_all_parameters(),
            (None, Some(names)) => Unique::by_parameters(names),
        };
        let unique = match (self.until, self.period) {
            (Some(_), Some(_)) => return refused("`until` and `period` of `unique` exclude each other; give only one of them"),
            (_, Some(period)) => unique.for_period(period),
            (Some(Until::Started), None) => unique.while_waiting(),
            (Some(Until::Finished) | None, None) => unique.until_finished(),
        };
        Ok(unique.on_conflict(match (self.on_conflict, self.at_most) {
            (Some(Reaction::Postpone), Some(at_most)) => OnConflict::Postpone { at_most },
            (Some(Reaction::Postpone), None) => return refused("`postpone` needs `at_most`, the maximum wait, for example `10m`"),
            (_, Some(_)) => return refused("`at_most` is for `postpone` only"),
            (Some(Reaction::Ignore) | None, None) => OnConflict::Ignore,
            (Some(Reaction::Replace), None) => OnConflict::Replace,
            (Some(Reaction::RunOnceMore), None) => OnConflict::RunOnceMore,
        }))
    }

    /// The key of a stored job, and how long it is taken. A period is left out: it began when that job was enqueued.
    fn of_job(job: &Job) -> Option<Self> {
        let key_in = |field| job.field(field).and_then(|key| key.as_str().map(str::to_owned));
        let spec = |key, until| Self { key: Some(key), until, ..Self::default() };
        let until_finished = key_in("unique").or_else(|| key_in("unique_after"));
        until_finished.map(|key| spec(key, None)).or_else(|| Some(spec(key_in("unique_while_waiting")?, Some(Until::Started))))
    }
}

/// The key of a job that repeats this one.
pub(crate) fn unique_again(job: &Job) -> Option<Unique> {
    UniqueSpec::of_job(job).and_then(|spec| spec.into_unique().ok())
}

/// Why a text or a job cannot become a [`JobSpec`], or a `JobSpec` cannot become a job. One sentence, for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub struct InvalidSpec {
    problem: String,
    is_unknown_policy: bool,
}

impl InvalidSpec {
    pub(crate) fn new(problem: impl Into<String>) -> Self {
        Self { problem: problem.into(), is_unknown_policy: false }
    }

    /// A problem that the reader of a text with specifications has found.
    pub fn of_text(problem: impl Into<String>) -> Self {
        Self::new(problem)
    }

    /// Whether the only problem is a retry policy that this program does not know: see [`UnknownPolicies::Accept`].
    pub fn is_unknown_policy(&self) -> bool {
        self.is_unknown_policy
    }
}

/// The treatment of a job whose retry policy this program does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub enum UnknownPolicies {
    /// The job is refused.
    Refuse,
    /// The job is accepted, because workers may know the policy.
    Accept,
}

impl JobSpec {
    /// The job on one line of a file; `None` for a blank line.
    ///
    /// # Errors
    /// When the line is not a valid job. The message does not contain the line number.
    pub fn of_line(line: &[u8]) -> Result<Option<Self>, InvalidSpec> {
        if line.len() > LONGEST_LINE {
            let problem = format!("the line is longer than {LONGEST_LINE} bytes: store the data elsewhere and enqueue a reference to it");
            return Err(InvalidSpec::new(problem));
        }
        let text = std::str::from_utf8(line).map_err(|error| InvalidSpec::new(format!("the line is not UTF-8: {error}")))?;
        let text = text.trim_start_matches('\u{feff}').trim();
        if text.is_empty() { Ok(None) } else { text.parse().map(Some) }
    }

    /// A specification that enqueues this job once more under another id: without its id, its dates and its history. Of a bundle: with the
    /// items that are not done, or with all items if all are done.
    ///
    /// # Errors
    /// When its parameters are not a document: the JSON form allows only documents.
    pub fn of_job(job: &Job) -> Result<Self, InvalidSpec> {
        let document = |parameters: Bson| {
            let Bson::Document(parameters) = parameters else {
                return Err(InvalidSpec::new(format!("its parameters are not a document, but {:?}", parameters.element_type())));
            };
            Ok(parameters)
        };
        let (parameters, items) = match job.bundle {
            None => (Some(document(job.parameters.clone())?), None),
            Some(_) => (None, Some(job.items_to_repeat().into_iter().map(document).collect::<Result<_, _>>()?)),
        };
        let mut settings = job.settings.clone();
        settings.traceparent.take_if(|traceparent| check_traceparent(traceparent).is_err());
        Ok(Self { class: job.class.clone(), parameters, items, settings, unique: UniqueSpec::of_job(job), ..Self::default() })
    }

    /// The job, ready to be enqueued.
    ///
    /// # Errors
    /// When fields exclude each other, or the retry policy is invalid. The enqueueing call checks names and sizes.
    pub fn into_job(self, unknown_policies: UnknownPolicies) -> Result<NewJob, InvalidSpec> {
        let refused = |problem: &str| Err(InvalidSpec::new(problem));
        if self.class.is_empty() {
            return refused("`class` is missing");
        }
        let mut job = match (self.items, self.parameters) {
            (Some(_), Some(_)) => return refused("`items` and `parameters` exclude each other; give only one of them"),
            (Some(items), None) => NewJob::bundle_of_class(self.class, items),
            (None, parameters) => NewJob::of_class(self.class, parameters.unwrap_or_default()),
        };
        job = match (self.scheduled_at, self.after) {
            (Some(_), Some(_)) => return refused("`scheduled_at` and `after` exclude each other; give only one of them"),
            (Some(at), None) => job.at(at),
            (None, Some(delay)) => job.after(delay),
            (None, None) => job,
        };
        job = match (self.expires_at, self.expires_after) {
            (Some(_), Some(_)) => return refused("`expires_at` and `expires_after` exclude each other; give only one of them"),
            (Some(at), None) => job.expires_at(at),
            (None, Some(time)) => job.expires_after(time),
            (None, None) => job,
        };
        if let Some(unique) = self.unique {
            job = job.unique(unique.into_unique()?);
        }
        if let Some(policy) = &self.settings.retry_policy {
            check_policy(policy, unknown_policies)?;
        }
        job = job.with_settings(self.settings).waits_for_all(self.waits_for);
        if let Some(id) = self.id {
            job = job.with_id(id);
        }
        Ok(job)
    }
}

impl FromStr for JobSpec {
    type Err = InvalidSpec;

    fn from_str(text: &str) -> Result<Self, InvalidSpec> {
        if !text.starts_with('{') {
            let example = r#"a job is one JSON object on one line, like {"class": "checksum", "parameters": {"path": "/tmp/x"}}"#;
            return Err(InvalidSpec::new(example));
        }
        json::parse(text).map_err(|error| {
            let message = error.to_string();
            let JsonError::Invalid(error) = error else { return InvalidSpec::new(message) };
            if let Some(problem) = problem_of_a_setting(text) {
                return InvalidSpec::new(problem);
            }
            // serde's own position has a line number, which is always 1.
            let problem = message.rsplit_once(" at line ").map_or(message.as_str(), |(problem, _)| problem);
            InvalidSpec::new(format!("{problem} (column {})", error.column()))
        })
    }
}

/// serde reads the settings when it has seen the whole object, and its error does not say in which of them it is.
fn problem_of_a_setting(text: &str) -> Option<String> {
    let fields: serde_json::Map<String, Value> = json::parse(text).ok()?;
    fields.into_iter().find_map(|(field, value)| {
        let error = Settings::deserialize(Value::Object([(field.clone(), value)].into_iter().collect())).err()?;
        Some(format!("`{field}`: {error}"))
    })
}

/// One line of JSON.
impl fmt::Display for JobSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

pub(crate) fn check_policy(policy: &StoredPolicy, unknown: UnknownPolicies) -> Result<(), InvalidSpec> {
    match RetryPolicies::default().check(policy) {
        Err(problem) if problem.unknown_class().is_some() => match unknown {
            UnknownPolicies::Accept => Ok(()),
            UnknownPolicies::Refuse => Err(InvalidSpec { problem: problem.to_string(), is_unknown_policy: true }),
        },
        checked => checked.map_err(|problem| InvalidSpec::new(problem.to_string())),
    }
}

// From text, for flags.

/// The parameters of a job: a JSON object.
pub fn parameters_of_text(text: &str) -> Result<Document, InvalidSpec> {
    json_of_text(text).and_then(parameters_of_json)
}

/// The content of a message: a JSON object.
pub fn message_of_text(text: &str) -> Result<Document, InvalidSpec> {
    let Bson::Document(content) = json_of_text(text).and_then(extended)? else {
        return Err(InvalidSpec::new(r#"the content of a message must be a JSON object, like {"order": 17}"#));
    };
    Ok(content)
}

/// The parameters of the items of a bundle: a JSON array of objects.
pub fn items_of_text(text: &str) -> Result<Vec<Document>, InvalidSpec> {
    json_of_text(text).and_then(items_of_json)
}

/// A retry policy: a JSON object with `class` and `parameters`.
pub fn policy_of_text(text: &str) -> Result<StoredPolicy, InvalidSpec> {
    json_of_text(text).and_then(|policy| StoredPolicy::of_json(policy).map_err(InvalidSpec::new))
}

/// An instant, as RFC 3339 writes it.
pub fn instant_of_text(text: &str) -> Result<Instant, InvalidSpec> {
    let at = DateTime::parse_from_rfc3339(text).map(|at| at.with_timezone(&Utc));
    at.map_err(|error| {
        InvalidSpec::new(format!(
            "`{text:.80}` is not an instant ({error}); write it like 2030-01-31T18:00:00Z or 2030-01-31T19:00:00+01:00"
        ))
    })
}

/// A duration, as people write it.
pub fn duration_of_text(text: &str) -> Result<Duration, InvalidSpec> {
    let duration = humantime::parse_duration(text);
    duration.map_err(|error| InvalidSpec::new(format!("`{text:.80}` is not a duration ({error}); write it like 90s, 5m or 1h 30m")))
}

/// The id of a job, in hexadecimal digits.
pub fn id_of_text(text: &str) -> Result<JobId, InvalidSpec> {
    text.parse().map_err(|_| InvalidSpec::new(format!("`{text:.80}` is not a job id (24 hexadecimal digits)")))
}

// From JSON.

fn json_of_text(text: &str) -> Result<Value, InvalidSpec> {
    json::parse(text).map_err(|error| match error {
        JsonError::Invalid(error) => InvalidSpec::new(format!("invalid JSON: {error}")),
        problem @ (JsonError::TooLarge { .. } | JsonError::Unstorable(_)) => InvalidSpec::new(problem.to_string()),
    })
}

fn extended(value: Value) -> Result<Bson, InvalidSpec> {
    json::extended(value).map_err(InvalidSpec::new)
}

fn parameters_of_json(value: Value) -> Result<Document, InvalidSpec> {
    let Bson::Document(parameters) = extended(value)? else {
        return Err(InvalidSpec::new(r#"parameters must be a JSON object, like {"path": "/tmp/x"}"#));
    };
    Ok(parameters)
}

fn items_of_json(value: Value) -> Result<Vec<Document>, InvalidSpec> {
    let Value::Array(items) = value else {
        let example = r#"items must be a JSON array of parameters, like [{"path": "/tmp/x"}, {"path": "/tmp/y"}]"#;
        return Err(InvalidSpec::new(example));
    };
    let item = |(index, item)| parameters_of_json(item).map_err(|problem| InvalidSpec::new(format!("item {index}: {problem}")));
    items.into_iter().enumerate().map(item).collect()
}

fn instant_of_json(value: Value) -> Result<Instant, InvalidSpec> {
    let value = extended(value)?;
    value.as_datetime().map_or_else(|| instant_of_text(&text_in(&value)), |at| Ok(at.to_chrono()))
}

fn id_of_json(value: Value) -> Result<JobId, InvalidSpec> {
    let value = extended(value)?;
    value.as_object_id().map_or_else(|| id_of_text(&text_in(&value)), |id| Ok(id.into()))
}

fn edge_of_json(value: Value) -> Result<Edge, InvalidSpec> {
    let Value::Object(mut edge) = value else { return id_of_json(value).map(Edge::done) };
    if edge.contains_key("$oid") {
        return id_of_json(Value::Object(edge)).map(Edge::done);
    }
    let example = r#"an edge is the id of a job, or {"job": "…", "when": "done"} with `done`, `ended` or `failed`"#;
    let when = edge.remove("when").map_or(Some(When::Done), |when| When::of_word(when.as_str()?));
    match (edge.remove("job"), when, edge.is_empty()) {
        (Some(job), Some(when), true) => Ok(Edge { job: id_of_json(job)?, when }),
        _ => Err(InvalidSpec::new(example)),
    }
}

fn text_in(value: &Bson) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn duration_of_json(value: Value) -> Result<Duration, InvalidSpec> {
    duration_of_text(value.as_str().unwrap_or(&value.to_string()))
}

/// Decodes by way of a JSON value, so that flags and lines have the same messages.
fn optional<'de, D: Deserializer<'de>, T>(from: D, read: fn(Value) -> Result<T, InvalidSpec>) -> Result<Option<T>, D::Error> {
    let value = Value::deserialize(from)?;
    if value.is_null() { Ok(None) } else { read(value).map(Some).map_err(D::Error::custom) }
}

fn parameters<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Document>, D::Error> {
    optional(from, parameters_of_json)
}

fn items<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<Document>>, D::Error> {
    optional(from, items_of_json)
}

fn instant<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Instant>, D::Error> {
    optional(from, instant_of_json)
}

fn duration<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    optional(from, duration_of_json)
}

fn id<'de, D: Deserializer<'de>>(from: D) -> Result<Option<JobId>, D::Error> {
    optional(from, id_of_json)
}

fn edges<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Edge>, D::Error> {
    let edges: Vec<Value> = Option::deserialize(from)?.unwrap_or_default();
    edges.into_iter().map(|edge| edge_of_json(edge).map_err(D::Error::custom)).collect()
}

// To JSON.

fn document<S: Serializer>(document: &Option<Document>, to: S) -> Result<S::Ok, S::Error> {
    document.clone().map(|document| relaxed(document.into())).serialize(to)
}

fn documents<S: Serializer>(documents: &Option<Vec<Document>>, to: S) -> Result<S::Ok, S::Error> {
    let all = |documents: Vec<Document>| documents.into_iter().map(|document| relaxed(document.into())).collect::<Vec<_>>();
    documents.clone().map(all).serialize(to)
}

fn rfc3339<S: Serializer>(at: &Option<Instant>, to: S) -> Result<S::Ok, S::Error> {
    at.map(|at| at.to_rfc3339_opts(SecondsFormat::AutoSi, true)).serialize(to)
}

fn humane<S: Serializer>(duration: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    duration.map(|duration| humantime::format_duration(duration).to_string()).serialize(to)
}

fn edges_to_json<S: Serializer>(edges: &[Edge], to: S) -> Result<S::Ok, S::Error> {
    let json = |edge: &Edge| match edge.when {
        When::Done => json!(edge.job.to_string()),
        When::Ended | When::Failed => json!({ "job": edge.job.to_string(), "when": edge.when.word() }),
    };
    edges.iter().map(json).collect::<Vec<_>>().serialize(to)
}

fn hex<S: Serializer>(id: &Option<JobId>, to: S) -> Result<S::Ok, S::Error> {
    id.map(|id| id.to_string()).serialize(to)
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;
    use crate::job::{Keep, Priority};

    /// A line is this job, and this job is written as a line that is the same job again; or the line is refused with this.
    #[track_caller]
    fn check(line: impl AsRef<[u8]>, expected: Result<JobSpec, &str>) {
        let shown: String = String::from_utf8_lossy(line.as_ref()).chars().take(200).collect();
        let read = JobSpec::of_line(line.as_ref()).and_then(|spec| {
            let spec = spec.expect("a line that is not blank");
            spec.clone().into_job(UnknownPolicies::Refuse).map(|_| spec)
        });
        match (read, expected) {
            (Ok(spec), Ok(expected)) => {
                assert_eq!(spec, expected, "{shown}");
                assert_eq!(spec.to_string().parse(), Ok(spec), "{shown}");
            }
            (Err(problem), Err(part)) => {
                assert!(problem.to_string().contains(part), "{problem:?} of {shown} does not contain {part:?}");
            }
            (read, expected) => panic!("{shown} is read as {read:?}, not {expected:?}"),
        }
    }

    fn spec(change: impl FnOnce(&mut JobSpec)) -> Result<JobSpec, &'static str> {
        let mut spec = JobSpec { class: "c".into(), ..JobSpec::default() };
        change(&mut spec);
        Ok(spec)
    }

    #[test]
    fn a_line_says_all_that_a_job_has_and_is_written_again() {
        check(r#"{"class": "c"}"#, spec(|_| {}));
        check("\u{feff} {\"class\": \"c\"}\r\n", spec(|_| {}));
        check(r#"{"class": "c", "parameters": null, "tags": null, "priority": null}"#, spec(|_| {}));
        check(r#"{"class": "c", "group": "$where.a", "tags": ["t", "u"], "urn": "u"}"#, {
            spec(|spec| {
                let Settings { group, tags, urn, .. } = &mut spec.settings;
                (*group, *tags, *urn) = (Some("$where.a".into()), vec!["t".into(), "u".into()], Some("u".into()));
            })
        });
        check(r#"{"class": "c", "priority": 9}"#, spec(|spec| spec.settings.priority = Some(Priority::MAX)));
        check(r#"{"class": "c", "keep": "failures"}"#, spec(|spec| spec.settings.keep = Some(Keep::Failures)));
        check(r#"{"class": "c", "expires_after": "2h"}"#, spec(|spec| spec.expires_after = Some(Duration::from_secs(7_200))));
        let unique = |change: fn(&mut UniqueSpec)| {
            let mut unique = UniqueSpec::default();
            change(&mut unique);
            spec(|spec| spec.unique = Some(unique))
        };
        check(r#"{"class": "c", "unique": {"key": "k"}}"#, unique(|unique| unique.key = Some("k".into())));
        check(r#"{"class": "c", "unique": {"parameters": [], "until": "started", "on_conflict": "replace"}}"#, {
            unique(|unique| {
                (unique.parameters, unique.until, unique.on_conflict) = (Some(Vec::new()), Some(Until::Started), Some(Reaction::Replace));
            })
        });
        check(r#"{"class": "c", "unique": {"key": "k", "period": "1h", "on_conflict": "postpone", "at_most": "5m"}}"#, {
            unique(|unique| {
                (unique.key, unique.on_conflict) = (Some("k".into()), Some(Reaction::Postpone));
                (unique.period, unique.at_most) = (Some(Duration::from_secs(3_600)), Some(Duration::from_secs(300)));
            })
        });
        check(r#"{"class": "c", "keep": "all"}"#, spec(|spec| spec.settings.keep = Some(Keep::All)));
        check(r#"{"class": "c", "keep": "nothing"}"#, Err("unknown variant `nothing`, expected `all` or `failures`"));
        check(r#"{"class": "c", "items": [{"a": 1}, {}]}"#, spec(|spec| spec.items = Some(vec![doc! { "a": 1 }, doc! {}])));
        check(r#"{"class": "c", "after": "1h 30m"}"#, spec(|spec| spec.after = Some(Duration::from_secs(5_400))));
        let at = Instant::from_timestamp_millis(1_896_112_800_000);
        check(r#"{"class": "c", "scheduled_at": "2030-01-31T19:00:00+01:00"}"#, spec(|spec| spec.scheduled_at = at));
        check(r#"{"class": "c", "scheduled_at": {"$date": "2030-01-31T18:00:00Z"}}"#, spec(|spec| spec.scheduled_at = at));
        let id = "65a1b2c3d4e5f60718293a4b".parse().ok();
        check(r#"{"class": "c", "id": "65a1b2c3d4e5f60718293a4b"}"#, spec(|spec| spec.id = id));
        check(r#"{"class": "c", "id": {"$oid": "65a1b2c3d4e5f60718293a4b"}}"#, spec(|spec| spec.id = id));
        let policy = StoredPolicy { class: "RetryForever".into(), parameters: doc! { "seconds_to_wait_before_retry": 1 }.into() };
        check(
            r#"{"class": "c", "retry_policy": {"class": "RetryForever", "parameters": {"seconds_to_wait_before_retry": 1}}}"#,
            spec(|spec| spec.settings.retry_policy = Some(policy)),
        );
    }

    #[test]
    fn values_keep_their_type() {
        let parameters = doc! {
            "z": 1, "a": 2_i64, "large": i64::MAX, "whole": 3.0, "date": bson::DateTime::from_millis(3), "old": bson::DateTime::from_millis(-1),
            "id": bson::oid::ObjectId::from_bytes([7; 12]), "bytes": bson::Binary { subtype: bson::spec::BinarySubtype::Generic, bytes: vec![1, 2] },
            "nothing": null, "list": [1, 2_i64, { "x": "ü" }], "a.b": 1, "$where": "x",
        };
        let written = spec(|spec| spec.parameters = Some(parameters)).map(|spec| spec.to_string());
        let written = written.expect("a job");
        let read = JobSpec::of_line(written.as_bytes()).expect("a job").expect("a job");
        assert_eq!(read.to_string(), written);
        let read = read.parameters.expect("parameters");
        assert_eq!(read.get("a"), Some(&Bson::Int64(2)));
        assert_eq!(read.get("whole"), Some(&Bson::Double(3.0)));
        assert_eq!(read.get("old"), Some(&Bson::DateTime(bson::DateTime::from_millis(-1))));
        assert_eq!(read.keys().next().map(String::as_str), Some("z"), "in their order");
    }

    #[test]
    fn what_is_wrong_with_a_line_is_said() {
        check(r#"{"group": "g"}"#, Err("`class` is missing"));
        check(r#"{"class": "c", "klass": "c"}"#, Err("unknown field `klass`"));
        check(r#"{"class": "c""#, Err("EOF while parsing an object (column 13)"));
        check(r#"["c"]"#, Err("a job is one JSON object on one line"));
        check(b"{\"class\": \"\xff\"}", Err("the line is not UTF-8"));
        check(vec![b'x'; LONGEST_LINE + 1], Err("the line is longer than 16777216 bytes"));
        check(r#"{"class": "c", "priority": 12}"#, Err("`priority` is 12; it must be from 0 to 9"));
        check(r#"{"class": "c", "priority": "high"}"#, Err("`priority`: invalid type: string \"high\", expected i64"));
        check(r#"{"class": "c", "group": 5, "after": "1s"}"#, Err("`group`: invalid type: integer `5`, expected a string"));
        check(r#"{"class": "c", "parameters": [1]}"#, Err("parameters must be a JSON object"));
        check(r#"{"class": "c", "scheduled_at": "tomorrow"}"#, Err("`tomorrow` is not an instant"));
        check(r#"{"class": "c", "scheduled_at": "tomorrow"}"#, Err("write it like 2030-01-31T18:00:00Z"));
        check(r#"{"class": "c", "items": {}}"#, Err("items must be a JSON array"));
        check(r#"{"class": "c", "items": [{}, 1]}"#, Err("item 1: parameters must be a JSON object"));
        check(r#"{"class": "c", "items": [{}], "parameters": {}}"#, Err("exclude each other"));
        check(r#"{"class": "c", "scheduled_at": 5}"#, Err("`5` is not an instant"));
        check(r#"{"class": "c", "after": 5}"#, Err("`5` is not a duration"));
        check(r#"{"class": "c", "after": "5m", "scheduled_at": "2030-01-31T18:00:00Z"}"#, Err("exclude each other"));
        check(r#"{"class": "c", "expires_at": "2030-01-31T18:00:00Z", "expires_after": "5m"}"#, Err("exclude each other"));
        for (unique, problem) in [
            (r#"{}"#, "needs a `key` or `parameters`"),
            (r#"{"key": "k", "parameters": ["a"]}"#, "exclude each other"),
            (r#"{"key": "k", "until": "finished", "period": "1h"}"#, "exclude each other"),
            (r#"{"key": "k", "until": "done"}"#, "unknown variant `done`"),
            (r#"{"key": 5}"#, "invalid type: integer `5`, expected a string"),
            (r#"{"key": "k", "on_conflict": "postpone"}"#, "needs `at_most`"),
            (r#"{"key": "k", "at_most": "1m"}"#, "is for `postpone` only"),
            (r#"{"key": "k", "scope": "x"}"#, "unknown field `scope`"),
        ] {
            check(format!(r#"{{"class": "c", "unique": {unique}}}"#), Err(problem));
        }
        check(r#"{"class": "c", "id": "x"}"#, Err("`x` is not a job id"));
    }

    #[test]
    fn blank_lines_are_no_jobs() {
        for line in ["", "\n", " \t\r\n"] {
            assert_eq!(JobSpec::of_line(line.as_bytes()), Ok(None), "{line:?}");
        }
    }

    #[test]
    fn parameters_are_extended_json() {
        let check = |json: &str, expected: Result<Document, &str>| match (parameters_of_text(json), expected) {
            (Ok(parameters), Ok(expected)) => assert_eq!(parameters, expected),
            (Err(problem), Err(part)) => assert!(problem.to_string().contains(part), "{problem:?} of {json} does not contain {part:?}"),
            (read, expected) => panic!("{json} is read as {read:?}, not {expected:?}"),
        };
        check(
            r#"{"z": 1, "a": {"$numberLong": "2"}, "d": {"$date": {"$numberLong": "3"}}}"#,
            Ok(doc! { "z": 1, "a": 2_i64, "d": bson::DateTime::from_millis(3) }),
        );
        check(r#"{"$where": "x", "a.b": 1}"#, Ok(doc! { "$where": "x", "a.b": 1 }));
        check(r#"[1]"#, Err("must be a JSON object"));
        check(r#"{"$oid": "65a1b2c3d4e5f60718293a4b"}"#, Err("must be a JSON object"));
        check(r#"{"a": {"$oid": "short"}}"#, Err("invalid extended JSON"));
        check(r#"{"path": x}"#, Err("invalid JSON"));
        check(&format!("{{\"a\": {}{}}}", "[".repeat(200), "]".repeat(200)), Err("invalid JSON: recursion limit exceeded"));
    }

    #[test]
    fn a_policy_that_workers_will_not_know_is_refused_unless_said() {
        let check = |json: &str, unknown: UnknownPolicies, expected: Result<(), &str>| {
            let policy = policy_of_text(json).expect("a policy");
            match (check_policy(&policy, unknown), expected) {
                (Ok(()), Ok(())) => {}
                (Err(problem), Err(part)) => assert!(problem.to_string().contains(part), "{problem:?} of {json} does not contain {part:?}"),
                (checked, expected) => panic!("{json}: {checked:?}, not {expected:?}"),
            }
        };
        let nested = r#"{"class": "RetriableExceptionFilter", "parameters": {"retriable_exceptions": ["*"], "filtered_retry_policy": {"class": "Mine"}}}"#;
        for unknown in [r#"{"class": "Mine"}"#, nested] {
            check(unknown, UnknownPolicies::Refuse, Err("there is no retry policy `Mine`"));
            let refused = check_policy(&policy_of_text(unknown).expect("a policy"), UnknownPolicies::Refuse);
            assert!(refused.is_err_and(|problem| problem.is_unknown_policy()));
            check(unknown, UnknownPolicies::Accept, Ok(()));
        }
        check(r#"{"class": "RetryForever"}"#, UnknownPolicies::Accept, Err("`seconds_to_wait_before_retry` is missing"));
        assert!(
            policy_of_text(r#"{"class": "RetryForever", "paramters": {}}"#)
                .is_err_and(|problem| problem.to_string().contains("unknown field `paramters`"))
        );
    }

    #[test]
    fn a_stored_job_has_a_form_that_enqueues_it_again() {
        let job = |workable: Document| {
            let document = doc! {
                "_id": bson::oid::ObjectId::from_bytes([7; 12]), "locked": false, "group": "g", "priority": 3, "tags": ["t"], "urn": "u",
                "scheduled_at": bson::DateTime::from_millis(0), "workable": workable, "retry_policy": { "class": "Mine", "parameters": {} },
            };
            JobSpec::of_job(&Job::try_from(document).expect("a job")).map(|spec| spec.to_string())
        };
        let rest = r#""group":"g","priority":3,"tags":["t"],"urn":"u","retry_policy":{"class":"Mine","parameters":{}}}"#;
        let single = format!(r#"{{"class":"c","parameters":{{"a":1}},{rest}"#);
        assert_eq!(job(doc! { "class": "c", "parameters": { "a": 1 } }), Ok(single));
        let bundle = format!(r#"{{"class":"c","items":[{{"a":1}},{{}}],{rest}"#);
        assert_eq!(job(doc! { "class": "c", "items": [{ "a": 1 }, {}] }), Ok(bundle));
        let key_of = |more: Document| {
            let mut document = doc! {
                "_id": bson::oid::ObjectId::from_bytes([7; 12]), "locked": false, "group": "g", "workable": { "class": "c" }, "why": "gave-up",
                "expires_at": bson::DateTime::from_millis(0),
            };
            document.extend(more);
            let spec = JobSpec::of_job(&Job::try_from(document).expect("a job")).expect("a specification");
            assert_eq!(spec.expires_at, None, "it would have expired");
            spec.unique.map(|unique| (unique.key.expect("a key"), unique.until))
        };
        assert_eq!(key_of(doc! { "unique": "k" }), Some(("k".into(), None)));
        assert_eq!(key_of(doc! { "unique_after": "k" }), Some(("k".into(), None)));
        assert_eq!(key_of(doc! { "unique_while_waiting": "k" }), Some(("k".into(), Some(Until::Started))));
        assert_eq!(key_of(doc! { "unique_for_period": "k" }), None);
        assert!(job(doc! { "class": "c", "parameters": 5 }).is_err_and(|problem| problem.to_string().contains("not a document")));
    }
}
