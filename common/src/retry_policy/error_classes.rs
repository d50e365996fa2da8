//! A list of error classes and prefixes of error classes.
//!
//! Used by the two policies that select by error class.

use bson::Bson;

use super::InvalidPolicy;
use crate::base::failure::LONGEST_CLASS;

/// At least one class. A class that ends in `*` matches all classes that begin with the text before the `*`.
#[derive(Clone, Debug)]
pub(super) struct ErrorClasses(Vec<String>);

impl ErrorClasses {
    /// Creates a list. Refuses an empty list, and classes that no failure can have.
    pub(super) fn new(parameter: &str, classes: impl IntoIterator<Item = impl Into<String>>) -> Result<Self, InvalidPolicy> {
        let classes: Vec<String> = classes.into_iter().map(Into::into).collect();
        let refused = |problem: String| Err(InvalidPolicy::parameter(parameter, problem));
        if classes.is_empty() {
            return refused("is empty; list at least one error class, such as `timeout` or `exit:*`".into());
        }
        match classes.iter().find(|class| class.is_empty() || class.len() > LONGEST_CLASS) {
            Some(class) if class.is_empty() => refused("lists an empty text; remove it, or write `*` for every error class".into()),
            Some(class) => refused(format!("lists `{class:.40}…`, which is longer than {LONGEST_CLASS} bytes; error classes are shorter")),
            None => Ok(Self(classes)),
        }
    }

    /// Whether the list matches this class. `class` may also be an entry of another list: then whether this list matches all classes that
    /// the entry matches.
    pub(super) fn contain(&self, class: &str) -> bool {
        self.0.iter().any(|listed| listed == class || listed.strip_suffix('*').is_some_and(|prefix| class.starts_with(prefix)))
    }

    /// The first class in this list that `earlier` already covers.
    pub(super) fn covered_by(&self, earlier: &ErrorClasses) -> Option<&str> {
        self.0.iter().map(String::as_str).find(|class| earlier.contain(class))
    }
}

impl From<&ErrorClasses> for Bson {
    fn from(classes: &ErrorClasses) -> Self {
        classes.0.as_slice().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_listed_whole_or_by_prefix() {
        #[track_caller]
        fn check(listed: &[&str], class: &str, expected: bool) {
            assert_eq!(
                ErrorClasses::new("classes", listed.iter().copied()).expect("valid").contain(class),
                expected,
                "{class} in {listed:?}"
            );
        }
        check(&["timeout"], "timeout", true);
        check(&["timeout"], "timeouts", false);
        check(&["timeout"], "Timeout", false);
        check(&["exit:*"], "exit:1", true);
        check(&["exit:*"], "exit:", true);
        check(&["exit:*"], "exit", false);
        check(&["exit:1", "signal:*"], "exit:10", false);
        check(&["exit:1", "signal:*"], "signal:9", true);
        check(&["Box<*const u8>"], "Box<*const u8>", true);
        check(&["Box<*const u8>"], "Box<u8>", false);
        check(&["*"], "", true);
        check(&["*"], "whatever", true);
    }

    #[test]
    fn lists_that_match_nothing_are_refused() {
        #[track_caller]
        fn check(classes: &[&str], message: &str) {
            let refused = ErrorClasses::new("classes", classes.iter().copied()).expect_err("nonsense").to_string();
            assert!(refused.starts_with("`classes` ") && refused.contains(message), "{refused}");
        }
        check(&[], "is empty; list at least one");
        check(&["timeout", ""], "lists an empty text");
        check(&[&"ü".repeat(129)], "longer than 256 bytes");
        assert!(ErrorClasses::new("classes", ["ü".repeat(128)]).is_ok());
    }
}
