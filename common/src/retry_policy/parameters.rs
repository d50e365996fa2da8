//! Reads and validates the stored parameters of a policy, and reports errors in them.
//!
//! Used by every policy, including those that users register. Nothing here panics on any stored value.

use std::{cell::RefCell, collections::BTreeSet, time::Duration};

use bson::{Bson, Document};

/// The longest wait and the longest age of any policy: a hundred years. A longer computed wait is cut to it.
pub const LONGEST_WAIT: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
/// The shortest wait above zero: dates are stored in milliseconds.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

/// Maximum depth of policies within policies, so that no document can overflow the stack.
pub(super) const DEEPEST: usize = 16;

/// Why a retry policy cannot be created. The message names the class (if it was decoded) and the parameter, and
/// suggests a valid value. It is complete: there is no `source`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
#[non_exhaustive]
pub enum InvalidPolicy {
    /// A parameter is missing or invalid.
    #[error("`{parameter}` {problem}")]
    Parameter { parameter: String, problem: String },
    /// No policy of this class is registered.
    #[error("there is no retry policy `{class:.80}`; the known ones are {known}")]
    UnknownClass { class: String, known: String },
    /// A policy of this class is already registered.
    #[error("a retry policy `{0}` is already registered; choose another name")]
    AlreadyRegistered(String),
    /// Policies are nested deeper than [`RetryPolicies::DEEPEST`](super::registry::RetryPolicies::DEEPEST).
    #[error("retry policies are nested deeper than {}; combine them in fewer steps", DEEPEST)]
    NestedTooDeep,
    /// The problem is inside a policy, a parameter or a row.
    #[error("{place}: {problem}")]
    Within { place: String, problem: Box<InvalidPolicy> },
}

impl InvalidPolicy {
    /// An error in the parameter with this stored name. `problem` continues the sentence: "is 0; it must be …".
    pub fn parameter(parameter: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Parameter { parameter: parameter.into(), problem: problem.into() }
    }

    /// The class of an unregistered policy, here or in a nested policy. Another program may know it.
    pub fn unknown_class(&self) -> Option<&str> {
        match self {
            Self::UnknownClass { class, .. } => Some(class),
            Self::Within { problem, .. } => problem.unknown_class(),
            Self::Parameter { .. } | Self::AlreadyRegistered(_) | Self::NestedTooDeep => None,
        }
    }

    pub(super) fn within(self, place: impl Into<String>) -> Self {
        if self == Self::NestedTooDeep { self } else { Self::Within { place: place.into(), problem: Box::new(self) } }
    }
}

/// Minimum similarity of two names to suggest one as the correct spelling of the other. It is clap's value for flags.
const ALIKE: f64 = 0.7;

/// Stored parameters, read by name. A parameter with the value null counts as missing. A parameter that the policy does
/// not read is ignored when a stored job is decoded, because a newer program may have written it. It is refused when a
/// job is enqueued ([`RetryPolicies::check`](super::registry::RetryPolicies::check)).
#[derive(Debug)]
pub struct Parameters<'a> {
    stored: Option<&'a Document>,
    /// The names that the policy has read. They are the names that it knows.
    asked: RefCell<BTreeSet<String>>,
    /// Whether unknown parameters are refused.
    strict: bool,
}

impl<'a> Parameters<'a> {
    /// Parameters from a stored document. A missing value, null and an empty array have no fields. (PHP stores an empty
    /// document as an empty array.)
    fn of(stored: Option<&'a Bson>) -> Result<Self, InvalidPolicy> {
        match stored {
            None | Some(Bson::Null) => Ok(Self::within(None)),
            Some(Bson::Array(empty)) if empty.is_empty() => Ok(Self::within(None)),
            Some(stored) => stored
                .as_document()
                .map(|document| Self::within(Some(document)))
                .ok_or_else(|| unusable("parameters", stored, "a document")),
        }
    }

    /// Reads all parameters with `decode`. If `strict`, other parameters are refused.
    pub(super) fn read_all<T>(
        stored: Option<&'a Bson>,
        strict: bool,
        decode: impl FnOnce(&Self) -> Result<T, InvalidPolicy>,
    ) -> Result<T, InvalidPolicy> {
        let parameters = Self { strict, ..Self::of(stored)? };
        let decoded = decode(&parameters)?;
        parameters.no_others().map(|()| decoded)
    }

    fn within(stored: Option<&'a Document>) -> Self {
        Self { stored, asked: RefCell::default(), strict: false }
    }

    /// The parameters in a nested document.
    pub(super) fn part(&self, stored: &'a Document) -> Self {
        Self { strict: self.strict, ..Self::within(Some(stored)) }
    }

    /// If `strict`, refuses parameters that the policy has not read. Otherwise a misspelt name would be ignored.
    pub(super) fn no_others(&self) -> Result<(), InvalidPolicy> {
        if !self.strict {
            return Ok(());
        }
        let asked = self.asked.borrow();
        let Some(other) = self.stored.and_then(|stored| stored.keys().find(|name| !asked.contains(*name))) else { return Ok(()) };
        let problem = match most_alike(other, asked.iter()) {
            Some(meant) => format!("is unknown; did you mean `{meant}`?"),
            None if asked.is_empty() => "is unknown: there are no parameters".into(),
            None => format!("is unknown; the known parameters are {}", asked.iter().map(String::as_str).collect::<Vec<_>>().join(", ")),
        };
        Err(InvalidPolicy::parameter(shown(&Bson::String(other.clone())).trim_matches('"'), problem))
    }

    /// The stored value, if there is one.
    pub fn get(&self, name: &str) -> Option<&'a Bson> {
        if !self.asked.borrow().contains(name) {
            self.asked.borrow_mut().insert(name.to_owned());
        }
        self.stored?.get(name).filter(|value| **value != Bson::Null)
    }

    /// A number of any BSON type.
    pub fn number(&self, name: &str) -> Result<f64, InvalidPolicy> {
        self.read(name, "a number", number)
    }

    /// A count: a whole number of any BSON type.
    pub fn count(&self, name: &str) -> Result<u32, InvalidPolicy> {
        self.read(name, "a whole number from 0 to 4294967295", |value| {
            let count = number(value).filter(|count| count.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(count))?;
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is whole and within the bounds of u32")]
            Some(count as u32)
        })
    }

    /// A duration, stored as seconds or fractions of seconds. The policy's constructor checks its limits.
    pub fn seconds(&self, name: &str) -> Result<Duration, InvalidPolicy> {
        self.read(name, "a number of seconds from 0 to 3153600000", |value| Duration::try_from_secs_f64(number(value)?).ok())
    }

    /// A list of strings. A single string is a list of one.
    pub fn texts(&self, name: &str) -> Result<Vec<&'a str>, InvalidPolicy> {
        self.read(name, "a list of texts", |value| match value.as_str() {
            Some(text) => Some(vec![text]),
            None => value.as_array()?.iter().map(Bson::as_str).collect(),
        })
    }

    /// A list of documents. `read_row` reads each of them and all its fields.
    pub fn rows<T>(
        &self,
        name: &str,
        mut read_row: impl FnMut(&Parameters<'a>) -> Result<T, InvalidPolicy>,
    ) -> Result<Vec<T>, InvalidPolicy> {
        let rows: Vec<_> =
            self.read(name, "a list of documents", |value| value.as_array()?.iter().map(Bson::as_document).collect::<Option<_>>())?;
        let read_row = |(at, row)| {
            let row = self.part(row);
            read_row(&row).and_then(|read| row.no_others().map(|()| read)).map_err(|problem| problem.within(format!("{name}[{at}]")))
        };
        rows.into_iter().enumerate().map(read_row).collect()
    }

    /// The value that `read` returns, or `None` if nothing is stored: `parameters.optional("jitter",
    /// Parameters::number)`.
    pub fn optional<T>(&self, name: &str, read: impl FnOnce(&Self, &str) -> Result<T, InvalidPolicy>) -> Result<Option<T>, InvalidPolicy> {
        self.get(name).map(|_| read(self, name)).transpose()
    }

    pub(super) fn read<T>(&self, name: &str, expected: &str, read: impl FnOnce(&'a Bson) -> Option<T>) -> Result<T, InvalidPolicy> {
        let missing = || {
            let misspelt = self.stored.and_then(|stored| most_alike(name, stored.keys().filter(|key| !self.asked.borrow().contains(*key))));
            let misspelt = misspelt.map(|key| format!("; did you misspell it as `{key}`?")).unwrap_or_default();
            InvalidPolicy::parameter(name, format!("is missing; it must be {expected}{misspelt}"))
        };
        let value = self.get(name).ok_or_else(missing)?;
        read(value).ok_or_else(|| unusable(name, value, expected))
    }
}

fn most_alike<'n>(name: &str, names: impl Iterator<Item = &'n String>) -> Option<&'n str> {
    let alike = names.map(|other| (strsim::jaro(name, other), other.as_str())).filter(|(alike, _)| *alike > ALIKE);
    alike.max_by(|one, other| one.0.total_cmp(&other.0)).map(|(_, name)| name)
}

fn unusable(name: &str, value: &Bson, expected: &str) -> InvalidPolicy {
    InvalidPolicy::parameter(name, format!("is {}; it must be {expected}", shown(value)))
}

/// A value for a message, cut if it is long.
pub(super) fn shown(value: &Bson) -> String {
    let mut text = value.to_string();
    if let Some((end, _)) = text.char_indices().nth(80) {
        text.truncate(end);
        text.push('…');
    }
    text
}

fn number(value: &Bson) -> Option<f64> {
    value.as_i32().map(f64::from).or_else(|| value.as_i64().map(|number| number as f64)).or_else(|| value.as_f64())
}

/// Validates a wait and rounds it to milliseconds: at least a millisecond, at most [`LONGEST_WAIT`].
pub(super) fn checked_wait(parameter: &str, wait: Duration) -> Result<Duration, InvalidPolicy> {
    let rounded_up = wait.saturating_add(Duration::from_micros(500));
    let whole = rounded_up - Duration::from_nanos((rounded_up.subsec_nanos() % 1_000_000).into());
    if (SHORTEST_WAIT..=LONGEST_WAIT).contains(&whole) {
        return Ok(whole);
    }
    let longest = LONGEST_WAIT.as_secs();
    Err(InvalidPolicy::parameter(
        parameter,
        format!("is {} seconds; it must be from 0.001 to {longest} (a hundred years)", wait.as_secs_f64()),
    ))
}

/// A validated wait in its stored form: seconds, as a double only when they are not whole.
pub(super) fn stored_seconds(wait: Duration) -> Bson {
    match u32::try_from(wait.as_secs()) {
        Ok(whole) if wait.subsec_nanos() == 0 => whole.into(),
        _ => wait.as_secs_f64().into(),
    }
}

#[cfg(test)]
mod tests {
    use bson::{bson, doc};

    use super::*;

    #[test]
    fn seconds_survive_storage_in_the_narrowest_type() {
        #[track_caller]
        fn check(wait: Duration, stored: impl Into<Bson>) {
            let document = doc! { "wait": stored_seconds(wait) };
            assert_eq!(document.get("wait"), Some(&stored.into()));
            let read = Parameters::within(Some(&document)).seconds("wait").and_then(|wait| checked_wait("wait", wait));
            assert_eq!(read, Ok(wait));
        }
        check(Duration::from_secs(60), 60);
        check(Duration::from_millis(1), 0.001);
        check(Duration::from_millis(1_500), 1.5);
        check(Duration::from_secs(3_000_000_000), 3_000_000_000_i64);
        check(LONGEST_WAIT, 3_153_600_000_i64);
        check(LONGEST_WAIT - Duration::from_millis(1), 3_153_599_999.999);
    }

    #[test]
    fn waits_are_bounded_and_whole_milliseconds() {
        #[track_caller]
        fn check(wait: Duration, expected: Option<Duration>) {
            assert_eq!(checked_wait("wait", wait).ok(), expected);
        }
        check(Duration::ZERO, None);
        check(Duration::from_micros(499), None);
        check(Duration::from_micros(500), Some(SHORTEST_WAIT));
        check(Duration::from_micros(1_499), Some(SHORTEST_WAIT));
        check(LONGEST_WAIT + Duration::from_micros(499), Some(LONGEST_WAIT));
        check(LONGEST_WAIT + Duration::from_micros(500), None);
        check(Duration::MAX, None);
    }

    #[test]
    fn values_are_read_from_every_type_that_can_hold_them() {
        #[track_caller]
        fn check(value: Bson, count: Option<u32>, seconds: Option<Duration>, texts: Option<Vec<&str>>) {
            let document = doc! { "value": &value };
            let parameters = Parameters::within(Some(&document));
            assert_eq!(parameters.count("value").ok(), count, "{value}");
            assert_eq!(parameters.seconds("value").ok(), seconds, "{value}");
            assert_eq!(parameters.texts("value").ok(), texts, "{value}");
        }
        let second = Duration::from_secs(1);
        check(bson!(1), Some(1), Some(second), None);
        check(bson!(1_i64), Some(1), Some(second), None);
        check(bson!(1.0), Some(1), Some(second), None);
        check(bson!(0.5), None, Some(second / 2), None);
        check(bson!(-0.0), Some(0), Some(Duration::ZERO), None);
        check(bson!(4_294_967_295_i64), Some(u32::MAX), Some(Duration::from_secs(4_294_967_295)), None);
        check(bson!(4_294_967_296_i64), None, Some(Duration::from_secs(4_294_967_296)), None);
        check(bson!(i64::MAX), None, Some(Duration::from_secs(1 << 63)), None);
        for nonsense in [
            bson!(-1),
            bson!(i64::MIN),
            bson!(f64::NAN),
            bson!(f64::INFINITY),
            bson!(-f64::INFINITY),
            bson!(1e300),
            bson!(null),
            bson!(true),
        ] {
            check(nonsense, None, None, None);
        }
        check(bson!("timeout"), None, None, Some(vec!["timeout"]));
        check(bson!(["timeout", "panic"]), None, None, Some(vec!["timeout", "panic"]));
        check(bson!([]), None, None, Some(vec![]));
        check(bson!(["timeout", 1]), None, None, None);
    }

    #[test]
    fn messages_say_what_is_there_and_what_must_be() {
        #[track_caller]
        fn check(document: Document, message: &str) {
            assert_eq!(Parameters::within(Some(&document)).seconds("wait").expect_err("nonsense").to_string(), message);
        }
        check(doc! {}, "`wait` is missing; it must be a number of seconds from 0 to 3153600000");
        check(doc! { "wait": null }, "`wait` is missing; it must be a number of seconds from 0 to 3153600000");
        check(doc! { "wait": "1m" }, "`wait` is \"1m\"; it must be a number of seconds from 0 to 3153600000");
        check(doc! { "wait": f64::NAN }, "`wait` is NaN; it must be a number of seconds from 0 to 3153600000");
        let long = format!("`wait` is \"{}…; it must be a number of seconds from 0 to 3153600000", "ü".repeat(79));
        check(doc! { "wait": "ü".repeat(1_000_000) }, &long);
        let refused = checked_wait("wait", Duration::ZERO).expect_err("no wait").to_string();
        assert_eq!(refused, "`wait` is 0 seconds; it must be from 0.001 to 3153600000 (a hundred years)");
    }

    #[test]
    fn what_php_stores_for_nothing_is_nothing() {
        #[track_caller]
        fn check(stored: Option<Bson>, empty: bool) {
            assert_eq!(Parameters::of(stored.as_ref()).is_ok_and(|parameters| parameters.stored.is_none()), empty, "{stored:?}");
        }
        check(None, true);
        check(Some(Bson::Null), true);
        check(Some(bson!([])), true);
        check(Some(bson!([1])), false);
        check(Some(bson!("")), false);
        check(Some(bson!({ "wait": 1 })), false);
    }
}
