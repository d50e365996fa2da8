//! Unique jobs: the key of a job, how long the key excludes other jobs, and what happens to a job whose key is taken.
//!
//! Used by [`NewJob::unique`](crate::enqueue::NewJob::unique). MongoDB enforces the keys, by unique indexes on `scheduled`
//! and by the documents of `unique_periods`: all database calls are in `holders`.

pub(crate) mod holders;

pub(crate) use self::holders::{Holder, Taken, successor};
use std::time::Duration;

use bson::{Bson, Document};
use sha2::{Digest as _, Sha256};

use crate::base::{check_name, integer};

/// A key that is made of parameters and is longer than this is replaced by its hash, in bytes.
const LONGEST_TEXT: usize = 256;
/// Longest period of a key, and longest time for which a job is postponed: ten years of 366 days.
pub const LONGEST_PERIOD: Duration = Duration::from_secs(10 * 366 * 24 * 60 * 60);

/// Makes a job unique: while a job with the same key exists, another one is not enqueued.
///
/// Without a further call the key is taken until the job is finished, and a job whose key is taken is ignored.
///
/// ```
/// use std::time::Duration;
///
/// use recruiter_common::{OnConflict, Unique};
///
/// Unique::by_key("invoice-17");
/// Unique::by_parameters(["customer", "month"]).while_waiting().on_conflict(OnConflict::Replace);
/// Unique::by_all_parameters().for_period(Duration::from_secs(3_600));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a key does nothing until it is given to `NewJob::unique`"]
pub struct Unique {
    by: By,
    scope: UniqueScope,
    on_conflict: OnConflict,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum By {
    Key(String),
    Parameters(Vec<String>),
    AllParameters,
}

/// How long the key of a job is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum UniqueScope {
    /// Until the first start of the job. While it runs or waits for a retry, another job may wait.
    WhileWaiting,
    /// Until the job is in the archive, or deleted.
    UntilFinished,
    /// For this time after the job is enqueued, whether it is finished or not.
    For(Duration),
}

/// What an enqueueing call does with a job whose key is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnConflict {
    /// Nothing: the existing job stays as it is.
    #[default]
    Ignore,
    /// The existing job gets the class, parameters, group, priority, date and other settings of the new one, if it has never started.
    Replace,
    /// The existing job gets the later date of the new one, if it has never started.
    Postpone {
        /// The job is not postponed beyond this time after it was enqueued.
        at_most: Duration,
    },
    /// If the existing job runs, one further job is enqueued, which waits until the existing one is finished. If the existing job
    /// waits, or a further one waits already, nothing is enqueued. Only for keys that are taken until the job is finished.
    RunOnceMore,
}

/// Why a job cannot be unique in this way.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidUnique {
    /// The key is empty, too long, or contains a NUL character.
    #[error("the unique key {0}")]
    Key(String),
    /// No parameters were named.
    #[error("a job cannot be unique by no parameters: name at least one, or use all parameters or a key")]
    NoParameters,
    /// A named parameter does not exist.
    #[error("the job has no parameter `{0}` to be unique by: correct the name, or store the parameter also if it is empty")]
    NoSuchParameter(String),
    /// The items of a bundle have parameters, and the bundle itself has none.
    #[error("a bundle cannot be unique by named parameters, because each item has its own: use all parameters or a key")]
    ParametersOfBundle,
    /// The period is too short or too long.
    #[error("the period of a unique key must be from 1 ms to 10 years")]
    Period,
    /// The maximum wait is too short or too long.
    #[error("the maximum wait of a postponed job must be from 1 ms to 10 years")]
    AtMost,
    /// The first wait is longer than the maximum.
    #[error("the job would wait longer than the maximum wait of a postponed job: shorten its delay, or raise the maximum")]
    WaitsTooLong,
    /// A job that is due now cannot postpone another one.
    #[error("a job that postpones another one needs a later date: give a delay or an instant")]
    PostponeWithoutDelay,
    /// To run once more is possible only after the end of the existing job.
    #[error(
        "a job can run once more only if its key is taken until the job is finished: choose that scope, or another reaction to a conflict"
    )]
    OnceMoreNeedsFinished,
}

/// A validated key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Keyed {
    pub(crate) key: String,
    pub(crate) scope: UniqueScope,
    pub(crate) on_conflict: OnConflict,
}

/// What a key is made of.
pub(crate) enum Content<'a> {
    Parameters(&'a Bson),
    Items(&'a [Bson]),
}

impl Unique {
    fn by(by: By) -> Self {
        Self { by, scope: UniqueScope::UntilFinished, on_conflict: OnConflict::Ignore }
    }

    /// By this key. All classes share the keys.
    pub fn by_key(key: impl Into<String>) -> Self {
        Self::by(By::Key(key.into()))
    }

    /// By the class and these parameters. The order of the names does not matter. Numbers of equal value are equal.
    pub fn by_parameters(names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self::by(By::Parameters(names.into_iter().map(Into::into).collect()))
    }

    /// By the class and all parameters; of a bundle, by all items.
    pub fn by_all_parameters() -> Self {
        Self::by(By::AllParameters)
    }

    /// The key is taken until the first start of the job.
    pub fn while_waiting(self) -> Self {
        self.scope(UniqueScope::WhileWaiting)
    }

    /// The key is taken until the job is finished. This is the default.
    pub fn until_finished(self) -> Self {
        self.scope(UniqueScope::UntilFinished)
    }

    /// The key is taken for this time after the job is enqueued.
    pub fn for_period(self, period: Duration) -> Self {
        self.scope(UniqueScope::For(period))
    }

    /// Sets how long the key is taken.
    pub fn scope(self, scope: UniqueScope) -> Self {
        Self { scope, ..self }
    }

    /// Sets what happens to a job whose key is taken. Default: [`OnConflict::Ignore`].
    pub fn on_conflict(self, on_conflict: OnConflict) -> Self {
        Self { on_conflict, ..self }
    }

    /// The key of a job with this class and content. `waits` is the time until the job is due.
    pub(crate) fn validated(self, class: &str, content: &Content<'_>, waits: Duration) -> Result<Keyed, InvalidUnique> {
        let Self { by, scope, on_conflict } = self;
        let key = match (by, content) {
            (By::Key(key), _) => {
                check_name(&key).map_err(InvalidUnique::Key)?;
                key
            }
            (By::Parameters(_), Content::Items(_)) => return Err(InvalidUnique::ParametersOfBundle),
            (By::Parameters(mut names), Content::Parameters(parameters)) => {
                names.sort_unstable();
                names.dedup();
                key_of_parameters(class, parameters, &names)?
            }
            (By::AllParameters, Content::Parameters(parameters)) => text_or_hash(class, &canonical(parameters)),
            (By::AllParameters, Content::Items(items)) => text_or_hash(class, &canonical(&Bson::Array(items.to_vec()))),
        };
        if let UniqueScope::For(period) = scope
            && !is_possible(period)
        {
            return Err(InvalidUnique::Period);
        }
        match on_conflict {
            OnConflict::Postpone { at_most } if !is_possible(at_most) => Err(InvalidUnique::AtMost),
            OnConflict::Postpone { .. } if waits.is_zero() => Err(InvalidUnique::PostponeWithoutDelay),
            OnConflict::Postpone { at_most } if waits > at_most => Err(InvalidUnique::WaitsTooLong),
            OnConflict::RunOnceMore if scope != UniqueScope::UntilFinished => Err(InvalidUnique::OnceMoreNeedsFinished),
            OnConflict::Ignore | OnConflict::Replace | OnConflict::Postpone { .. } | OnConflict::RunOnceMore => {
                Ok(Keyed { key, scope, on_conflict })
            }
        }
    }
}

fn is_possible(time: Duration) -> bool {
    (Duration::from_millis(1)..=LONGEST_PERIOD).contains(&time)
}

fn key_of_parameters(class: &str, parameters: &Bson, names: &[String]) -> Result<String, InvalidUnique> {
    if names.is_empty() {
        return Err(InvalidUnique::NoParameters);
    }
    let mut chosen = Document::new();
    for name in names {
        let value = parameters.as_document().and_then(|parameters| parameters.get(name));
        chosen.insert(name, value.ok_or_else(|| InvalidUnique::NoSuchParameter(name.clone()))?.clone());
    }
    Ok(text_or_hash(class, &canonical(&Bson::Document(chosen))))
}

/// The class with the text, readable in mongosh; with a hash if the text is long.
fn text_or_hash(class: &str, text: &str) -> String {
    if class.len() + text.len() <= LONGEST_TEXT {
        return format!("{class}{text}");
    }
    let hash: String = Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{class}#{hash}")
}

/// JSON with sorted keys. Integers of 32 and 64 bits and whole floating-point numbers of equal value have the same text, because languages
/// store numbers in different types.
fn canonical(value: &Bson) -> String {
    let joined = |parts: Vec<String>| parts.join(",");
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    /// Every whole number up to this one has an exact floating-point form.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    if let Some(document) = value.as_document() {
        let mut fields: Vec<(&String, &Bson)> = document.iter().collect();
        fields.sort_unstable_by_key(|(name, _)| *name);
        let fields = fields.into_iter().map(|(name, value)| format!("{}:{}", quoted(name), canonical(value))).collect();
        format!("{{{}}}", joined(fields))
    } else if let Some(list) = value.as_array() {
        format!("[{}]", joined(list.iter().map(canonical).collect()))
    } else if let Some(whole) = integer(Some(value)) {
        whole.to_string()
    } else if let Some(number) = value.as_f64().filter(|number| number.fract() == 0.0 && number.abs() <= EXACT) {
        // Without the sign of a negative zero.
        format!("{:.0}", number + 0.0)
    } else if let Some(text) = value.as_str() {
        quoted(text)
    } else {
        value.clone().into_relaxed_extjson().to_string()
    }
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    fn key(unique: Unique, parameters: Document) -> Result<String, InvalidUnique> {
        let parameters = Bson::Document(parameters);
        unique.validated("Invoice", &Content::Parameters(&parameters), Duration::ZERO).map(|keyed| keyed.key)
    }

    #[test]
    fn the_key_does_not_depend_on_orders_and_types_of_numbers() {
        let by = || Unique::by_parameters(["month", "customer"]);
        let expected = r#"Invoice{"customer":17,"month":{"a":1,"b":[2,"x"]}}"#;
        for parameters in [
            doc! { "customer": 17, "month": { "a": 1, "b": [2, "x"] }, "note": "other" },
            doc! { "month": { "b": [2.0, "x"], "a": 1_i64 }, "customer": 17_i64 },
        ] {
            assert_eq!(key(by(), parameters.clone()), Ok(expected.into()));
            assert_eq!(key(Unique::by_parameters(["customer", "month", "customer"]), parameters), Ok(expected.into()));
        }
        let all = |parameters| key(Unique::by_all_parameters(), parameters);
        assert_eq!(all(doc! { "b": -0.0, "a": "1" }), Ok(r#"Invoice{"a":"1","b":0}"#.into()));
        for (one, other) in [
            (doc! { "a": "1" }, doc! { "a": 1 }),
            (doc! { "a": 1.5 }, doc! { "a": 1 }),
            (doc! { "a": [1, 2] }, doc! { "a": [2, 1] }),
            (doc! { "a": Bson::Null }, doc! {}),
            (doc! { "a": i64::MAX }, doc! { "a": i64::MAX - 1 }),
            (doc! { "a": bson::DateTime::from_millis(1) }, doc! { "a": bson::DateTime::from_millis(2) }),
            (doc! { "a": "x\",\"b\":\"y" }, doc! { "a": "x", "b": "y" }),
        ] {
            assert_ne!(all(one), all(other));
        }
    }

    #[test]
    fn a_long_key_is_a_hash_with_the_class() {
        let long = |letter: &str| key(Unique::by_all_parameters(), doc! { "a": letter.repeat(1_000) }).expect("a key");
        assert!(long("x").starts_with("Invoice#") && long("x").len() == "Invoice#".len() + 64 && long("x") != long("y"));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let check = |unique: Unique, expected: InvalidUnique| assert_eq!(key(unique, doc! { "a": 1 }), Err(expected));
        check(Unique::by_key(""), InvalidUnique::Key("is empty".into()));
        check(Unique::by_key("x".repeat(257)), InvalidUnique::Key("has 257 bytes, and 256 is the limit".into()));
        assert!(key(Unique::by_key("a\0b"), doc! {}).is_err());
        check(Unique::by_parameters([""; 0]), InvalidUnique::NoParameters);
        check(Unique::by_parameters(["a", "b"]), InvalidUnique::NoSuchParameter("b".into()));
        for period in [Duration::ZERO, Duration::from_nanos(999_999), LONGEST_PERIOD + Duration::from_nanos(1), Duration::MAX] {
            check(Unique::by_key("k").for_period(period), InvalidUnique::Period);
            check(Unique::by_key("k").on_conflict(OnConflict::Postpone { at_most: period }), InvalidUnique::AtMost);
        }
        let postpone = || Unique::by_key("k").on_conflict(OnConflict::Postpone { at_most: Duration::from_secs(10) });
        check(postpone(), InvalidUnique::PostponeWithoutDelay);
        let nothing = Bson::Document(doc! {});
        let waits = |seconds| postpone().validated("c", &Content::Parameters(&nothing), Duration::from_secs(seconds));
        assert_eq!(waits(11), Err(InvalidUnique::WaitsTooLong));
        assert!(waits(10).is_ok());
        for unique in [Unique::by_key("k").while_waiting(), Unique::by_key("k").for_period(LONGEST_PERIOD)] {
            check(unique.on_conflict(OnConflict::RunOnceMore), InvalidUnique::OnceMoreNeedsFinished);
        }
        let items = [Bson::Document(doc! { "a": 1 })];
        let bundle = |unique: Unique| unique.validated("c", &Content::Items(&items), Duration::ZERO).map(|keyed| keyed.key);
        assert_eq!(bundle(Unique::by_parameters(["a"])), Err(InvalidUnique::ParametersOfBundle));
        assert_eq!(bundle(Unique::by_all_parameters()), Ok(r#"c[{"a":1}]"#.into()));
        for hostile in ["$where", "a.b", "ünï", "'; drop", "{\"$gt\": \"\"}"] {
            assert_eq!(key(Unique::by_key(hostile), doc! {}), Ok(hostile.into()));
        }
    }
}
