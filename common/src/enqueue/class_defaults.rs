//! What a worker declares about the jobs of a class, and how a job gets it.

use std::collections::HashMap;

use bson::{Bson, Document};
use serde::{Deserialize, Serialize};

use super::spec::{InvalidSpec, JobSpec, UnknownPolicies};
use crate::{
    base::{Instant, json},
    job::{Keep, Priority, StoredPolicy, settings::or_default, stored_policy::in_json},
};

/// The defaults that workers have declared, by class: see [`Store::class_defaults`](crate::mongo::Store::class_defaults).
pub type Classes = HashMap<String, ClassDefaults>;

/// What a worker declares about a class in its workables file: the values of fields that a job does not have itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ClassDefaults {
    /// Group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Priority from 0 to 9.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<Priority>,
    /// Retry policy.
    #[serde(default, with = "in_json", skip_serializing_if = "Option::is_none")]
    pub retry_policy: Option<StoredPolicy>,
    /// What is kept of a finished job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<Keep>,
    /// Resources that each job of the class needs. A job that names others, or is in a line, does not get these.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub limits: Vec<String>,
}

impl ClassDefaults {
    /// Checks that a job of this class can have these defaults.
    ///
    /// # Errors
    /// When it cannot.
    pub fn check(&self, class: &str) -> Result<(), InvalidSpec> {
        let job = JobSpec { class: class.to_owned(), ..JobSpec::default() }.or(self).into_job(UnknownPolicies::Refuse)?;
        job.into_document(Instant::default()).map(drop).map_err(|problem| InvalidSpec::new(problem.to_string()))
    }

    /// The stored form.
    pub(crate) fn to_document(&self) -> Document {
        let json = serde_json::to_value(self).ok().and_then(|json| json::to_bson(json).ok());
        json.and_then(|bson| bson.as_document().cloned()).unwrap_or_default()
    }

    /// Reads the stored form.
    pub(crate) fn of_document(document: Document) -> Result<Self, serde_json::Error> {
        serde_json::from_value(Bson::Document(document).into_relaxed_extjson())
    }
}

impl JobSpec {
    /// The same, with the defaults of its class in place of missing fields.
    #[must_use]
    pub fn or(mut self, defaults: &ClassDefaults) -> Self {
        let own = &mut self.settings;
        own.group = own.group.take().or_else(|| defaults.group.clone());
        own.priority = own.priority.or(defaults.priority);
        own.retry_policy = own.retry_policy.take().or_else(|| defaults.retry_policy.clone());
        own.keep = own.keep.or(defaults.keep);
        if own.limits.is_empty() && own.line.is_none() {
            own.limits.clone_from(&defaults.limits);
        }
        self
    }

    /// The same, with the defaults that workers have declared for its class.
    #[must_use]
    pub fn with_defaults(self, classes: &Classes) -> Self {
        match classes.get(&self.class) {
            Some(defaults) => self.or(defaults),
            None => self,
        }
    }
}
