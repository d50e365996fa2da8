//! New content for archived jobs that are retried: changed parameters, another retry policy, another group or priority.

use bson::{Bson, Document};

use super::{InvalidAlteration, alteration::check_group};
use crate::{
    enqueue::spec::{InvalidSpec, UnknownPolicies, check_policy},
    job::{Priority, Settings, StoredPolicy},
};

/// What a retried job has in place of the content of the job that it retries. The default changes nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Revision {
    parameters: Document,
    /// Applied after `parameters`: paths, and the values there.
    put: Vec<(Vec<String>, Option<Bson>)>,
    settings: Settings,
}

impl Revision {
    /// Merges these fields into the parameters, as a JSON merge patch (RFC 7396): an object is merged field by field, `null` removes a field,
    /// and any other value replaces the former one. For a bundle, they are merged into the parameters of each item.
    #[must_use]
    pub fn set(mut self, fields: Document) -> Self {
        self.parameters = fields;
        self
    }

    /// Puts a value at this path of the parameters as it is, also `null`; `None` removes what is there. It counts more than what is merged.
    #[must_use]
    pub fn put(mut self, path: Vec<String>, value: Option<Bson>) -> Self {
        self.put.push((path, value));
        self
    }

    /// Sets another retry policy.
    ///
    /// # Errors
    /// When its parameters are not valid. The caller decides about a policy that this program does not know.
    pub fn retry_policy(mut self, policy: StoredPolicy, unknown: UnknownPolicies) -> Result<Self, InvalidSpec> {
        check_policy(&policy, unknown)?;
        self.settings.retry_policy = Some(policy);
        Ok(self)
    }

    /// Sets another group.
    ///
    /// # Errors
    /// When its name is not valid.
    pub fn group(mut self, group: impl Into<String>) -> Result<Self, InvalidAlteration> {
        let group = group.into();
        check_group(&group)?;
        self.settings.group = Some(group);
        Ok(self)
    }

    /// Sets another priority.
    #[must_use]
    pub fn priority(mut self, priority: Priority) -> Self {
        self.settings.priority = Some(priority);
        self
    }

    /// Whether a retried job has the content of the job that it retries.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The parameters of the new job.
    pub(crate) fn parameters(&self, former: Document) -> Document {
        let mut parameters = merged(former, &self.parameters);
        for (path, value) in &self.put {
            put(&mut parameters, path, value.as_ref());
        }
        parameters
    }

    /// The settings of the new job.
    pub(crate) fn settings(&self, former: &Settings) -> Settings {
        self.settings.clone().or(former)
    }
}

fn put(into: &mut Document, path: &[String], value: Option<&Bson>) {
    match (path, value) {
        ([], _) => {}
        ([field], Some(value)) => drop(into.insert(field, value.clone())),
        ([field], None) => drop(into.remove(field)),
        ([field, path @ ..], _) => {
            if into.get_document(field).is_err() {
                into.insert(field, Document::new());
            }
            if let Ok(inner) = into.get_document_mut(field) {
                put(inner, path, value);
            }
        }
    }
}

fn merged(mut into: Document, patch: &Document) -> Document {
    for (key, value) in patch {
        if let Bson::Document(patch) = value {
            let former = match into.get_mut(key) {
                Some(Bson::Document(former)) => std::mem::take(former),
                _ => Document::new(),
            };
            into.insert(key, merged(former, patch));
        } else if *value == Bson::Null {
            into.remove(key);
        } else {
            into.insert(key, value.clone());
        }
    }
    into
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    #[test]
    fn fields_are_merged_as_by_a_json_merge_patch() {
        let check = |former: Document, patch: Document, expected: Document| {
            assert_eq!(Revision::default().set(patch.clone()).parameters(former.clone()), expected, "{former} {patch}");
        };
        let former = || doc! { "to": "a", "mail": { "subject": "s", "lines": [1, 2] } };
        check(former(), doc! {}, former());
        check(former(), doc! { "to": "b" }, doc! { "to": "b", "mail": { "subject": "s", "lines": [1, 2] } });
        check(former(), doc! { "to": null, "absent": null }, doc! { "mail": { "subject": "s", "lines": [1, 2] } });
        check(former(), doc! { "mail": { "subject": "t", "lines": null } }, doc! { "to": "a", "mail": { "subject": "t" } });
        check(former(), doc! { "mail": { "lines": [3] } }, doc! { "to": "a", "mail": { "subject": "s", "lines": [3] } });
        check(doc! { "to": 1 }, doc! { "to": { "a": { "b": null } } }, doc! { "to": { "a": {} } });
        check(former(), doc! { "mail": 5 }, doc! { "to": "a", "mail": 5 });
    }

    #[test]
    fn new_content_is_checked_before_a_job_is_read() {
        assert!(Revision::default().group("").is_err_and(|problem| problem.to_string() == "the name of the new group is empty"));
        let policy = |json: &str| crate::enqueue::spec::policy_of_text(json).expect("a policy");
        let mine = || Revision::default().retry_policy(policy(r#"{"class": "Mine"}"#), UnknownPolicies::Refuse);
        assert!(mine().is_err_and(|problem| problem.is_unknown_policy()));
        let incomplete = Revision::default().retry_policy(policy(r#"{"class": "RetryForever"}"#), UnknownPolicies::Accept);
        assert!(incomplete.is_err_and(|problem| problem.to_string().contains("seconds_to_wait_before_retry")));
        assert!(Revision::default().set(doc! {}).is_empty() && !Revision::default().set(doc! { "a": 1 }).is_empty());
    }
}
