//! Redaction: what is not shown of the jobs of some classes. An operator names the classes, and the programs show [`REDACTED`] in place of
//! parameters, and in place of every text that the code of such a class has written, because it may quote them.
//!
//! The rules are in `metadata`, in the document `redaction`: the programs that show jobs have no code of their classes. Stored jobs stay as they
//! are, so what copies a job has the true values. Rules that cannot be read redact everything.

use std::{
    collections::BTreeSet,
    sync::{PoisonError, RwLock},
    time::{Duration, Instant as Monotonic},
};

use bson::{Bson, Document, RawDocument, RawDocumentBuf, doc};
use serde::{Deserialize, Serialize};

use crate::{
    base::{LONGEST_NAME, chain, names::check_trimmed_name, of_bson, printable},
    job::{bundle::OUTCOMES, notes::CHECKPOINT},
    mongo::{Store, StoreError, call, lossy},
};

/// What is shown in place of a value.
pub const REDACTED: &str = "[redacted]";
/// When [`FollowedRedaction`] reads the rules again.
const READ_AGAIN_AFTER: Duration = Duration::from_secs(10);
/// Maximum number of parameters that a rule names.
const MOST_KEYS: usize = 100;
/// The document in `metadata` with the rules.
const REDACTION: &str = "redaction";
/// The fields with the key of a unique job, which may be made of its parameters.
const UNIQUE_KEYS: [&str; 4] = ["unique", "unique_while_waiting", "unique_for_period", "unique_after"];

/// What is redacted of the jobs of some classes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RedactionRule {
    /// A class, or with a `*` at the end the begin of classes.
    class: String,
    /// The names of parameters; none for all of them.
    #[serde(default)]
    keys: BTreeSet<String>,
}

/// Why a rule is not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidRedaction {
    /// The pattern is not valid.
    #[error("the class {0}")]
    Class(String),
    /// A star in the middle would be taken as a letter.
    #[error("the class `{0}` has a `*` that is not at its end: write a whole class, or the begin of classes and one `*`, such as `mail.*`")]
    Star(String),
    /// The name of a parameter is not valid.
    #[error("the name of a parameter {0}")]
    Key(String),
    /// There are too many names.
    #[error("{0} names of parameters are too many: {MOST_KEYS} is the limit; name none to redact all parameters")]
    TooManyKeys(usize),
}

impl RedactionRule {
    /// A rule for the jobs of a class, or of all classes that begin with the text before a `*`.
    ///
    /// # Errors
    /// When the class or a name is not valid.
    pub fn new(class: impl Into<String>, keys: impl IntoIterator<Item = String>) -> Result<Self, InvalidRedaction> {
        Self { class: class.into(), keys: keys.into_iter().collect() }.checked()
    }

    fn checked(self) -> Result<Self, InvalidRedaction> {
        check_trimmed_name(&self.class).map_err(InvalidRedaction::Class)?;
        if self.class.strip_suffix('*').unwrap_or(&self.class).contains('*') {
            return Err(InvalidRedaction::Star(printable(&self.class, 80)));
        }
        if self.keys.len() > MOST_KEYS {
            return Err(InvalidRedaction::TooManyKeys(self.keys.len()));
        }
        // MongoDB allows any name of a parameter but one with a NUL character, also an empty one.
        let problem = |key: &String| {
            let is_long = key.len() > LONGEST_NAME;
            let long = is_long.then(|| format!("has {} bytes, and {LONGEST_NAME} is the limit", key.len()));
            long.or_else(|| key.contains('\0').then(|| format!("contains a NUL character: {key:?}")))
        };
        self.keys.iter().find_map(problem).map_or(Ok(()), |problem| Err(InvalidRedaction::Key(problem)))?;
        Ok(self)
    }

    /// The class, or the begin of classes with a `*` behind it.
    pub fn class(&self) -> &str {
        &self.class
    }

    /// The names of the parameters that are redacted; none for all.
    pub fn keys(&self) -> &BTreeSet<String> {
        &self.keys
    }

    fn matches(&self, class: &str) -> bool {
        self.class.strip_suffix('*').map_or(self.class == class, |begin| class.starts_with(begin))
    }
}

/// What is redacted. The default is nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Redaction {
    rules: Vec<RedactionRule>,
}

/// The parameters of one class that are redacted; `None` for all.
type Hidden<'a> = Option<BTreeSet<&'a str>>;

impl Redaction {
    /// Everything is redacted.
    fn everything() -> Self {
        Self { rules: vec![RedactionRule { class: "*".into(), keys: BTreeSet::new() }] }
    }

    fn of_document(stored: &RawDocument) -> Result<Self, String> {
        let Self { rules } = bson::deserialize_from_slice(stored.as_bytes()).map_err(|error| of_bson(&error))?;
        let rules = rules.into_iter().map(RedactionRule::checked).collect::<Result<_, _>>().map_err(|problem| problem.to_string())?;
        Ok(Self { rules })
    }

    /// The rules.
    pub fn rules(&self) -> &[RedactionRule] {
        &self.rules
    }

    /// Whether something of the jobs of this class is redacted, and so every text of their code. A class that cannot be read could be any.
    pub fn concerns(&self, class: &str) -> bool {
        let is_unknown = class.is_empty() || class.contains(char::REPLACEMENT_CHARACTER);
        self.rules.iter().any(|rule| is_unknown || rule.matches(class))
    }

    /// A text that the code of this class has written, as it may be shown.
    pub fn text<'a>(&self, class: &str, text: &'a str) -> &'a str {
        if self.concerns(class) { REDACTED } else { text }
    }

    /// The document of a job of either collection, as it may be shown.
    #[must_use]
    pub fn job(&self, stored: RawDocumentBuf) -> RawDocumentBuf {
        let class = stored.get_document("workable").and_then(|workable| workable.get_str("class")).unwrap_or_default();
        let Some(hidden) = self.hidden(class) else { return stored };
        let mut job = lossy(&stored);
        if let Some(workable) = job.get_mut("workable") {
            match workable.as_document_mut() {
                Some(workable) => hide_content(workable, &hidden),
                None => *workable = REDACTED.into(),
            }
        }
        hide_texts(&mut job);
        RawDocumentBuf::try_from(&job).unwrap_or_default()
    }

    /// The job of a schedule, as it may be shown.
    pub fn template(&self, job: &mut Document) {
        let class = job.get_str("class").unwrap_or_default();
        if let Some(hidden) = self.hidden(class) {
            hide_content(job, &hidden);
        }
    }

    /// The details of an event, as they may be shown.
    pub fn event(&self, details: &mut Document) {
        // An event of a worker or of a setting has no class.
        if details.get("class").is_some_and(|class| self.concerns(class.as_str().unwrap_or_default())) {
            hide_texts(details);
        }
    }

    fn hidden(&self, class: &str) -> Option<Hidden<'_>> {
        if !self.concerns(class) {
            return None;
        }
        let mut keys = BTreeSet::new();
        let matching: Vec<&RedactionRule> = self.rules.iter().filter(|rule| rule.matches(class)).collect();
        // Without a rule of its own, the class could not be read.
        if matching.is_empty() || matching.iter().any(|rule| rule.keys.is_empty()) {
            return Some(None);
        }
        matching.iter().for_each(|rule| keys.extend(rule.keys.iter().map(String::as_str)));
        Some(Some(keys))
    }
}

/// Hides parameters, also those of the items of a bundle.
fn hide_content(workable: &mut Document, hidden: &Hidden<'_>) {
    if let Some(parameters) = workable.get_mut("parameters") {
        hide_fields(parameters, hidden);
    }
    match workable.get_mut("items") {
        Some(Bson::Array(items)) => items.iter_mut().for_each(|item| hide_fields(item, hidden)),
        Some(other) => hide(other),
        None => {}
    }
}

/// Hides the values of a document; its names stay. What is no document is hidden as a whole.
fn hide_fields(value: &mut Bson, hidden: &Hidden<'_>) {
    let Some(fields) = value.as_document_mut() else { return hide(value) };
    let is_hidden = |name: &str| hidden.as_ref().is_none_or(|keys| keys.contains(name));
    for (_, value) in fields.iter_mut().filter(|(name, _)| is_hidden(name)) {
        *value = REDACTED.into();
    }
}

/// Hides a value. Nothing and an empty list, which PHP stores for an empty document, stay.
fn hide(value: &mut Bson) {
    if *value != Bson::Null && value.as_array().is_none_or(|list| !list.is_empty()) {
        *value = REDACTED.into();
    }
}

/// Hides these fields of a value that is a document.
fn hide_in(value: Option<&mut Bson>, names: &[&str]) {
    if let Some(fields) = value.and_then(Bson::as_document_mut) {
        names.iter().filter_map(|name| fields.get_mut(*name).map(hide)).for_each(drop);
    }
}

/// Hides all that the code of a job has written, and keys that may be made of its parameters.
fn hide_texts(job: &mut Document) {
    for field in UNIQUE_KEYS.into_iter().chain(["result", CHECKPOINT]) {
        if let Some(value) = job.get_mut(field) {
            hide(value);
        }
    }
    hide_in(job.get_mut("progress"), &["text"]);
    hide_in(job.get_mut("last_execution"), &["message", "trace"]);
    for (list, names) in [("executions", &["message", "trace"][..]), ("log", &["line"]), (OUTCOMES, &["message", "trace", "result"])] {
        let entries = job.get_array_mut(list).map(|entries| entries.iter_mut()).into_iter().flatten();
        entries.for_each(|entry| hide_in(Some(entry), names));
    }
}

/// What is redacted, for a reader that shows jobs for a long time.
#[derive(Clone, Debug, Default)]
pub struct FollowedRedaction {
    redaction: Redaction,
    /// Where the rules are read again, and when they were read last. `None`: never.
    from: Option<(Store, Monotonic)>,
}

impl FollowedRedaction {
    /// Nothing is redacted. The rules are not read.
    pub fn nothing() -> Self {
        Self::default()
    }

    /// What is redacted. The rules are read again after ten seconds. If that fails, the last ones hold.
    pub async fn current(&mut self) -> &Redaction {
        if let Some((store, read_at)) = &mut self.from
            && read_at.elapsed() >= READ_AGAIN_AFTER
        {
            *read_at = Monotonic::now();
            match store.redaction().await {
                Ok(read) => self.redaction = read,
                Err(error) => tracing::debug!(error = chain(&error), "the rules of redaction were not read; trying again"),
            }
        }
        &self.redaction
    }
}

/// The rules as this process has read them last.
#[derive(Debug, Default)]
struct Known(RwLock<Redaction>);

impl Store {
    /// What is redacted. Rules that are not valid redact everything, with a warning.
    ///
    /// Filter: id. Index: `_id`. Invariant: none; stored jobs are not changed.
    pub async fn redaction(&self) -> Result<Redaction, StoreError> {
        let (metadata, id) = (self.metadata.clone_with_type::<RawDocumentBuf>(), doc! { "_id": REDACTION });
        let stored: Option<RawDocumentBuf> = call("redaction", async move { metadata.find_one(id).await }).await?;
        let Some(stored) = stored else { return Ok(Redaction::default()) };
        Ok(Redaction::of_document(&stored).unwrap_or_else(|problem| {
            tracing::warn!(
                problem,
                "the rules of redaction are not valid, so everything is redacted: correct or delete the document `redaction` in `metadata`"
            );
            Redaction::everything()
        }))
    }

    /// What is redacted, now and later.
    ///
    /// Filter: id. Index: `_id`. Invariant: none.
    pub async fn followed_redaction(&self) -> Result<FollowedRedaction, StoreError> {
        Ok(FollowedRedaction { redaction: self.redaction().await?, from: Some((self.clone(), Monotonic::now())) })
    }

    /// Reads what is redacted for [`Store::may_log`].
    ///
    /// Filter: id. Index: `_id`. Invariant: none.
    pub async fn refresh_redaction(&self) -> Result<(), StoreError> {
        let read = self.redaction().await?;
        *self.part::<Known>().0.write().unwrap_or_else(PoisonError::into_inner) = read;
        Ok(())
    }

    /// A text that the code of this class has written, as it may be logged by the rules that were read last.
    pub fn may_log<'a>(&self, class: &str, text: &'a str) -> &'a str {
        self.part::<Known>().0.read().unwrap_or_else(PoisonError::into_inner).text(class, text)
    }

    /// Adds a rule, in place of the one for the same class.
    ///
    /// Filter: id. Index: `_id`. Invariant: none.
    pub async fn set_redaction(&self, rule: &RedactionRule) -> Result<(), StoreError> {
        self.ensure_set_up().await?;
        let new = doc! { "class": rule.class(), "keys": rule.keys().iter().cloned().collect::<Vec<_>>() };
        let update = vec![doc! { "$set": { "rules": { "$concatArrays": [others(rule.class()), [{ "$literal": new }]] } } }];
        let (metadata, id) = (self.metadata.clone(), doc! { "_id": REDACTION });
        call("set_redaction", async move { metadata.update_one(id, update).upsert(true).await }).await.map(drop)
    }

    /// Removes the rule for a class. Returns whether there was one.
    ///
    /// Filter: id, and that there is this rule. Index: `_id`. Invariant: none.
    pub async fn remove_redaction(&self, class: &str) -> Result<bool, StoreError> {
        let update = vec![doc! { "$set": { "rules": others(class) } }];
        let (metadata, with_it) = (self.metadata.clone(), doc! { "_id": REDACTION, "rules.class": class });
        let removed = call("remove_redaction", async move { metadata.update_one(with_it, update).await }).await?;
        Ok(removed.modified_count > 0)
    }
}

/// The rules that are not about this class, as an expression.
fn others(class: &str) -> Document {
    let rules = doc! { "$ifNull": ["$rules", []] };
    doc! { "$filter": { "input": rules, "cond": { "$ne": ["$$this.class", { "$literal": class }] } } }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redaction(rules: &[(&str, &[&str])]) -> Redaction {
        let rule = |(class, keys): &(&str, &[&str])| RedactionRule::new(*class, keys.iter().map(ToString::to_string)).expect("a rule");
        Redaction { rules: rules.iter().map(rule).collect() }
    }

    fn shown(rules: &Redaction, job: Document) -> Document {
        lossy(&rules.job(RawDocumentBuf::try_from(&job).expect("a document")))
    }

    #[test]
    fn a_class_or_the_begin_of_classes_is_concerned() {
        let rules = redaction(&[("mail", &["to"]), ("shop.*", &[])]);
        for (class, expected) in [("mail", true), ("mail2", false), ("Mail", false), ("shop.pay", true), ("shop.", true), ("shop", false)] {
            assert_eq!(rules.concerns(class), expected, "{class}");
        }
        assert!(rules.concerns("") && rules.concerns("sho\u{fffd}"), "a class that cannot be read could be any");
        assert!(!Redaction::default().concerns(""), "without rules nothing is redacted");
        assert!(redaction(&[("a*", &[])]).concerns("a*b"), "a star in the name of a class");
    }

    #[test]
    fn parameters_of_all_rules_for_a_class_are_hidden_and_names_stay() {
        let job = || doc! { "workable": { "class": "mail", "parameters": { "to": { "at": 1 }, "cc": null, "n": 2 } } };
        let parameters = |rules: &[(&str, &[&str])]| shown(&redaction(rules), job()).get_document("workable").cloned().expect("a workable");
        let of = |to: Bson, cc: Bson, n: Bson| doc! { "class": "mail", "parameters": { "to": to, "cc": cc, "n": n } };
        let hidden = || Bson::from(REDACTED);
        assert_eq!(parameters(&[("mail", &["to"]), ("m*", &["cc", "other"])]), of(hidden(), hidden(), 2.into()));
        assert_eq!(parameters(&[("mail", &["to"]), ("*", &[])]), of(hidden(), hidden(), hidden()));
        assert_eq!(parameters(&[("other", &[])]), of(doc! { "at": 1 }.into(), Bson::Null, 2.into()));
        let bundle = doc! { "workable": { "class": "mail", "items": [{ "to": 1, "n": 2 }, 3] } };
        let items = shown(&redaction(&[("mail", &["to"])]), bundle);
        assert_eq!(items, doc! { "workable": { "class": "mail", "items": [{ "to": REDACTED, "n": 2 }, REDACTED] } });
    }

    #[test]
    fn every_text_of_the_code_of_a_class_is_hidden() {
        let job = |text: &str| {
            let execution = doc! { "class": "c", "message": text, "trace": text, "hostname": "h" };
            doc! {
                "_id": 1, "group": "g", "workable": { "class": "mail" }, "unique": text, "unique_while_waiting": text, "unique_for_period": text,
                "unique_after": text, "result": text, "checkpoint": text, "progress": { "percent": 5, "text": text },
                "log": [{ "attempt": 1, "line": text }], "last_execution": execution.clone(), "executions": [execution.clone()],
                "item_outcomes": ["done", null, { "done": true, "result": text }, execution], "why": "gave-up",
            }
        };
        let rules = redaction(&[("mail", &["to"])]);
        assert_eq!(shown(&rules, job("secret")), job(REDACTED));
        let mut event = doc! { "class": "mail", "progress": { "text": "secret" }, "attempt": 1 };
        rules.event(&mut event);
        assert_eq!(event, doc! { "class": "mail", "progress": { "text": REDACTED }, "attempt": 1 });
        let mut template = doc! { "class": "mail", "parameters": { "to": "secret", "n": 1 }, "group": "g" };
        rules.template(&mut template);
        assert_eq!(template, doc! { "class": "mail", "parameters": { "to": REDACTED, "n": 1 }, "group": "g" });
    }

    #[test]
    fn wrong_rules_are_refused() {
        let check = |class: &str, keys: Vec<String>, problem: &str| {
            let refused = RedactionRule::new(class, keys).expect_err(class).to_string();
            assert!(refused.contains(problem), "{refused}");
        };
        check("", Vec::new(), "is empty");
        check(" a", Vec::new(), "begins or ends with a blank");
        check("a*b", Vec::new(), "not at its end");
        check("a", vec!["b\0".into()], "NUL");
        check("a", vec!["b".repeat(257)], "257 bytes");
        check("a", (0..101).map(|n| n.to_string()).collect(), "101 names");
    }
}
