//! Everything that can be said about how a job is treated: the one list.
//!
//! Used by every crate. Each description of a job holds these settings as one value, and copies them as one value:
//!
//! | form | |
//! |---|---|
//! | [`NewJob`](crate::enqueue::NewJob) | the builder of the library |
//! | [`JobSpec`](crate::enqueue::spec::JobSpec) | a job in JSON |
//! | `recruiter enqueue` | each setting is a flag; its comment here is the help |
//! | [`Job`](super::Job) | a stored job: to and from the fields of its document |
//! | the job of a schedule, a retry, a job that runs once more, a job that another one becomes | the settings of the described job |
//! | the defaults of a class, the new values of changed and retried jobs | the settings that are given |
//!
//! A new setting is a field here, with its lines in [`every`](Settings::every) and `or`; a method of `NewJob`; a row in `docs/protocol.md`; a new
//! `SCHEMA_VERSION`, because the validator of MongoDB follows; and the room that reads it. All other forms above follow.
//!
//! What is said of one enqueueing only is no setting: its class and parameters, id, dates, unique key, and the jobs that it waits for.

use std::{ops::Not, sync::LazyLock};

use bson::{Bson, Document, RawDocument, RawDocumentBuf, doc};
use serde::{Deserialize, Deserializer, Serialize};

use super::{
    DEFAULT_GROUP, Keep, Priority, StoredPolicy,
    gate::{gate_of, gate_of_line},
    line_of_gate, resources_in, stored_policy,
    stored_policy::NO_RETRY,
};

/// Every setting as in the job of a schedule: the names and types.
pub(crate) static IN_TEMPLATES: LazyLock<Document> = LazyLock::new(|| Settings::every().complete().expect("documents"));
/// Every setting as in the document of a job.
pub(crate) static IN_JOBS: LazyLock<Document> = LazyLock::new(|| Settings::every().stored().expect("documents"));

/// The settings of a job. A missing one is that of the class, where classes have it, and then the default of all jobs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "process", derive(clap::Args))]
#[serde(default)]
#[non_exhaustive]
pub struct Settings {
    /// Group: only workers that work on this group get the job [default: of the workables file, or generic]
    #[cfg_attr(feature = "process", arg(long, env = "RECRUITER_ENQUEUE_GROUP", value_name = "GROUP"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,

    /// Priority from 0 to 9, higher first [default: of the workables file, or 5]
    #[cfg_attr(
        feature = "process",
        arg(long, env = "RECRUITER_ENQUEUE_PRIORITY", value_name = "0-9", allow_negative_numbers = true, value_parser = Priority::flag())
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<Priority>,

    /// Label of the job, for filters; may be given several times
    #[cfg_attr(feature = "process", arg(long = "tag", env = "RECRUITER_ENQUEUE_TAG", value_name = "TAG"))]
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,

    /// Name of the job in your own terms; need not be unique
    #[cfg_attr(feature = "process", arg(long, env = "RECRUITER_ENQUEUE_URN", value_name = "URN"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub urn: Option<String>,

    /// Trace that the job belongs to: a traceparent of the W3C Trace Context
    #[cfg_attr(feature = "process", arg(long, env = "RECRUITER_ENQUEUE_TRACEPARENT", value_name = "TRACEPARENT"))]
    #[serde(deserialize_with = "trace", skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,

    /// Retry policy. Default: that of the class, or no retry. The command line has `--retry`, which describes one.
    #[cfg_attr(feature = "process", arg(skip))]
    #[serde(with = "stored_policy::in_json", skip_serializing_if = "Option::is_none")]
    pub retry_policy: Option<StoredPolicy>,

    /// What is kept of the finished job: `all`, or `failures`: a job that succeeded is deleted, with its result, and its id is free again [default: all]
    #[cfg_attr(feature = "process", arg(long, env = "RECRUITER_ENQUEUE_KEEP", value_name = "all|failures"))]
    #[serde(deserialize_with = "keep", skip_serializing_if = "Option::is_none")]
    pub keep: Option<Keep>,

    /// Resource that the job needs, for example printer or customer:17; may be given several times
    #[cfg_attr(
        feature = "process",
        arg(long = "limit", env = "RECRUITER_ENQUEUE_LIMIT", value_name = "RESOURCE", value_parser = crate::base::flags::name_of_text)
    )]
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub limits: Vec<String>,

    /// Key of a line: jobs with the same key run one after the other, in the order of enqueueing
    #[cfg_attr(feature = "process", arg(long, env = "RECRUITER_ENQUEUE_LINE", value_name = "KEY", conflicts_with = "limits"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<String>,

    /// Halt the line if the job fails for the last time, until `recruiter resume line:KEY`
    #[cfg_attr(
        feature = "process",
        arg(long, env = "RECRUITER_ENQUEUE_HALT_ON_FAILURE", requires = "line", value_parser = clap::builder::BoolishValueParser::new())
    )]
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Not::not")]
    pub halt_on_failure: bool,
}

impl Settings {
    /// Each setting with another value than its default, for the lists that are made of the names and types of all settings, and for tests.
    /// (No job has a line and limits.)
    #[doc(hidden)]
    pub fn every() -> Self {
        // Without `..Default::default()`: the compiler asks for a new setting here.
        Self {
            group: Some("mail".into()),
            priority: Some(Priority::MAX),
            tags: vec!["urgent".into(), "tenant:17".into()],
            urn: Some("urn:order:17".into()),
            traceparent: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into()),
            retry_policy: Some(StoredPolicy {
                class: "RetryForever".into(),
                parameters: doc! { "seconds_to_wait_before_retry": 17_i64 }.into(),
            }),
            keep: Some(Keep::Failures),
            limits: vec!["customer:17".into(), "printer".into()],
            line: Some("order-17".into()),
            halt_on_failure: true,
        }
    }

    /// The group, or that of a job without one.
    pub fn group(&self) -> &str {
        self.group.as_deref().unwrap_or(DEFAULT_GROUP)
    }

    /// The priority, or that of a job without one.
    pub fn priority(&self) -> Priority {
        self.priority.unwrap_or_default()
    }

    /// The retry policy, or that of a job without one.
    pub fn retry_policy(&self) -> &StoredPolicy {
        self.retry_policy.as_ref().unwrap_or(&NO_RETRY)
    }

    /// What is kept of the job after its end.
    pub fn keep(&self) -> Keep {
        self.keep.unwrap_or_default()
    }

    /// The gate of the job: its line, or the resources that it needs.
    pub fn gate(&self) -> Option<String> {
        self.line.as_deref().map(gate_of_line).or_else(|| gate_of(self.limits.iter().map(String::as_str)))
    }

    /// These settings, and those of `others` in place of missing ones. Limits, a line and what halts it belong together.
    pub(crate) fn or(self, others: &Self) -> Self {
        let list = |own: Vec<String>, other: &[String]| if own.is_empty() { other.to_vec() } else { own };
        let gate = if self.limits.is_empty() && self.line.is_none() { others } else { &Self::default() };
        // Without `..self`: the compiler asks for a new setting here.
        Self {
            group: self.group.or_else(|| others.group.clone()),
            priority: self.priority.or(others.priority),
            tags: list(self.tags, &others.tags),
            urn: self.urn.or_else(|| others.urn.clone()),
            traceparent: self.traceparent.or_else(|| others.traceparent.clone()),
            retry_policy: self.retry_policy.or_else(|| others.retry_policy.clone()),
            keep: self.keep.or(others.keep),
            limits: list(self.limits, &gate.limits),
            line: self.line.or_else(|| gate.line.clone()),
            halt_on_failure: self.halt_on_failure || gate.halt_on_failure,
        }
    }

    /// The settings that are not missing, as the fields of a document.
    pub(crate) fn fields(&self) -> bson::error::Result<Document> {
        bson::serialize_to_raw_document_buf(self)?.try_into()
    }

    /// These settings with the defaults of all jobs, as a document that has no missing group, priority and retry policy.
    pub(crate) fn complete(&self) -> bson::error::Result<Document> {
        let mut limits = self.limits.clone();
        limits.sort_unstable();
        limits.dedup();
        Self {
            group: Some(self.group().to_owned()),
            priority: Some(self.priority()),
            retry_policy: Some(self.retry_policy().clone()),
            keep: self.keep.filter(|keep| *keep != Keep::default()),
            limits,
            ..self.clone()
        }
        .fields()
    }

    /// The fields that the document of a job has of them. It names a line and limits in one field, `gate`.
    pub(crate) fn stored(&self) -> bson::error::Result<Document> {
        let mut stored = self.complete()?;
        stored.remove("limits");
        stored.remove("line");
        stored.extend(self.gate().map(|gate| ("gate".to_owned(), gate.into())));
        Ok(stored)
    }

    /// The settings in the document of a job. Its other fields are not read: an application may have its own, also `limits` or `line`.
    pub(crate) fn of_stored(job: &RawDocument) -> bson::error::Result<Self> {
        let mut fields = RawDocumentBuf::new();
        for element in job.iter_elements() {
            let element = element?;
            if IN_JOBS.contains_key(element.key().as_str()) {
                fields.append(element.key(), element.value()?);
            }
        }
        let mut settings = Self::of_fields(&fields)?;
        settings.priority.get_or_insert_default();
        settings.retry_policy.get_or_insert_with(|| NO_RETRY.clone());
        match fields.get_str("gate").ok().map(|gate| (gate, line_of_gate(gate))) {
            Some((_, Some(line))) => settings.line = Some(line.to_owned()),
            Some((gate, None)) => settings.limits = resources_in(gate).map(str::to_owned).collect(),
            None => {}
        }
        Ok(settings)
    }

    /// The settings in the job of a schedule, those that a worker has declared for a class, and those in the fields above.
    pub(crate) fn of_fields(fields: &RawDocument) -> bson::error::Result<Self> {
        bson::deserialize_from_slice(fields.as_bytes())
    }
}

/// Null means the same as a missing field.
pub(crate) fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// In a document, a value of a later release keeps everything. In JSON, a person has written it.
fn keep<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Keep>, D::Error> {
    if from.is_human_readable() {
        return Option::deserialize(from);
    }
    Ok(Option::<String>::deserialize(from)?.map(|stored| Keep::of_stored(Some(&stored))))
}

/// In a document, what is no text is no trace: no job is lost for it. In JSON, a person has written it.
fn trace<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    if from.is_human_readable() {
        return Option::deserialize(from);
    }
    Ok(match Option::deserialize(from)? {
        Some(Bson::String(trace)) => Some(trace),
        Some(_) | None => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::{Instant, JobId},
        enqueue::{
            NewJob,
            spec::{JobSpec, UnknownPolicies},
        },
        graphs::continuation::continuation,
        job::Job,
        operator::control::{Revision, again::again},
        schedules::template::{job_of as job_of_template, template_of as template_of_job},
        unique::successor,
    };

    /// All settings, in two values: with a line, and with limits.
    fn all() -> [Settings; 2] {
        [Settings { limits: Vec::new(), ..Settings::every() }, Settings { line: None, halt_on_failure: false, ..Settings::every() }]
    }

    #[test]
    fn every_setting_survives_every_path() {
        let now = Instant::UNIX_EPOCH;
        for settings in all() {
            let new = || NewJob::of_class("c", doc! {}).with_settings(settings.clone());
            let check = |path: &str, found: &Settings| assert_eq!(*found, settings, "{path}");
            let read = |document: Document| Job::try_from(document).expect("a job");
            let document = new().into_document(now).expect("a job").1;
            let job = read(document.clone());
            check("a document", &job.settings);
            let spec = JobSpec::of_job(&job).expect("a specification");
            let line: JobSpec = spec.to_string().parse().expect("a line");
            check("a line of JSON", &line.settings);
            check("the job of a line", line.into_job(UnknownPolicies::Refuse).expect("a job").settings());
            let template = template_of_job(new()).expect("a template");
            check("the job of a schedule", job_of_template(&template).expect("a job").settings());
            check("a retry", again(job.clone(), &Revision::default()).expect("a job").settings());
            check("a job that runs once more", &read(successor(document, now)).settings);
            let declared = RawDocumentBuf::try_from(&settings.fields().expect("fields")).expect("a document");
            let classes = [(String::new(), Settings::of_fields(&declared).expect("settings"))].into();
            check("the defaults of a class", &JobSpec::default().with_defaults(&classes).settings);
            let becomes = continuation(vec![new()], &job, now).expect("a job");
            check("a job that another one becomes", &read(becomes[0].clone()).settings);
        }
    }

    #[test]
    fn no_setting_is_the_default_in_the_list_of_all() {
        let names = |settings: &Settings| serde_json::to_value(settings).expect("JSON").as_object().expect("an object").len();
        // The names that the derived code knows.
        let fields = format!("{:?}", Settings::default()).matches(": ").count();
        assert_eq!((names(&Settings::default()), names(&Settings::every())), (0, fields), "and each is written");
    }

    #[test]
    fn null_and_a_missing_setting_are_the_same() {
        let nulls: serde_json::Map<_, _> = serde_json::to_value(Settings::every())
            .expect("JSON")
            .as_object()
            .expect("an object")
            .keys()
            .map(|name| (name.clone(), ().into()))
            .collect();
        assert_eq!(serde_json::from_value::<Settings>(nulls.into()).expect("settings"), Settings::default());
    }

    #[test]
    fn what_an_application_adds_to_a_document_is_no_setting() {
        let document = |more: Document| {
            let mut document = doc! { "_id": JobId::new(), "locked": false, "group": "g", "workable": { "class": "c" } };
            document.extend(doc! { "scheduled_at": bson::DateTime::from_millis(0), "keep": "for ever" });
            document.extend(more);
            Job::try_from(document).expect("a job").settings
        };
        let plain = document(doc! {});
        assert_eq!((plain.group(), plain.keep(), plain.gate()), ("g", Keep::All, None));
        assert_eq!(document(doc! { "limits": 5, "line": 7, "traceparent": { "version": "00" } }), plain);
        assert_eq!(document(doc! { "gate": "b,a", "limits": ["x"] }).limits, ["b", "a"]);
    }
}
