//! Topics and patterns, of events and of messages.
//!
//! A topic is one or more words with dots between them: `job.failed.SendMail`, `news.sports.ski`. A pattern is a topic in which a word may
//! be `*`. In the middle, `*` stands for exactly one word. At the end, it stands for one or more words, so `news.*` matches
//! `news.sports.ski`, and `*` matches every topic. A `*` cannot be a part of a word.

use std::fmt;

/// Maximum length of a topic or a pattern, in bytes.
pub const LONGEST_TOPIC: usize = 256;
/// The word that stands for other words.
const ANY: &str = "*";

/// A topic or pattern that is not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the {what} {text:?} {problem}")]
pub struct InvalidTopic {
    what: &'static str,
    /// Its beginning.
    text: String,
    problem: String,
}

/// Topics to listen to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pattern(String);

impl Pattern {
    /// Reads a pattern, without the blanks around it.
    ///
    /// # Errors
    /// When a word is empty, or has a control character or a `*` in it, or when the pattern is too long.
    pub fn new(text: impl Into<String>) -> Result<Self, InvalidTopic> {
        let text = text.into().trim().to_owned();
        check("pattern", &text, |word| word == ANY).map(|()| Self(text))
    }

    /// The pattern that matches every topic.
    pub fn everything() -> Self {
        Self(ANY.into())
    }

    /// Whether a topic matches.
    pub fn matches(&self, topic: &str) -> bool {
        let (mut wanted, mut words) = (self.0.split('.').peekable(), topic.split('.'));
        while let Some(word) = wanted.next() {
            match words.next() {
                Some(_) if word == ANY && wanted.peek().is_none() => return true,
                Some(found) if word == ANY || word == found => {}
                Some(_) | None => return false,
            }
        }
        words.next().is_none()
    }

    /// The same as a regular expression, for a filter of MongoDB.
    pub(crate) fn to_regex(&self) -> String {
        let last = self.0.split('.').count() - 1;
        let words = self.0.split('.').enumerate().map(|(index, word)| match word {
            ANY if index == last => ".+".to_owned(),
            ANY => r"[^.]+".to_owned(),
            word => literally(word),
        });
        format!(r"\A{}\z", words.collect::<Vec<_>>().join(r"\."))
    }

    /// The pattern as it was written.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::str::FromStr for Pattern {
    type Err = InvalidTopic;

    fn from_str(text: &str) -> Result<Self, InvalidTopic> {
        Self::new(text)
    }
}

/// A regular expression that matches only this text.
pub(crate) fn literally(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        if letter.is_ascii_punctuation() {
            escaped.push('\\');
        }
        escaped.push(letter);
    }
    escaped
}

/// Checks the topic of a message.
pub(crate) fn check_topic(text: &str) -> Result<(), InvalidTopic> {
    check("topic", text, |_| false)
}

fn check(what: &'static str, text: &str, is_allowed: impl Fn(&str) -> bool) -> Result<(), InvalidTopic> {
    let refuse = |problem: String| Err(InvalidTopic { what, text: text.chars().take(80).collect(), problem });
    if text.len() > LONGEST_TOPIC {
        return refuse(format!("has {} bytes, and {LONGEST_TOPIC} is the limit", text.len()));
    }
    if text.trim() != text {
        return refuse("begins or ends with a blank or a line break: remove it".into());
    }
    for word in text.split('.') {
        if word.is_empty() {
            return refuse("has an empty word: write words with single dots between them, such as `news.sports`".into());
        }
        if word.chars().any(char::is_control) {
            return refuse("has a control character".into());
        }
        if word.contains('*') && !is_allowed(word) {
            let advice = if what == "topic" { "which only patterns may have" } else { "which must be a whole word" };
            return refuse(format!("has a `*` in the word {word:?}, {advice}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_one_word_and_at_the_end_for_more() {
        let check = |pattern: &str, topic: &str, expected: bool| {
            assert_eq!(Pattern::new(pattern).expect("a pattern").matches(topic), expected, "{pattern} {topic}");
        };
        for (pattern, topic) in [
            ("a", "a"),
            ("a.b", "a.b"),
            ("*", "a"),
            ("*", "a.b.c"),
            ("a.*", "a.b"),
            ("a.*", "a.b.c"),
            ("*.b", "a.b"),
            ("a.*.c", "a.b.c"),
            ("a.*.*", "a.b.c.d"),
        ] {
            check(pattern, topic, true);
        }
        for (pattern, topic) in
            [("a", "b"), ("a", "a.b"), ("a.b", "a"), ("a.*", "a"), ("*.b", "x.a.b"), ("a.*.c", "a.b.b.c"), ("a.*.*", "a.b"), ("a", "A")]
        {
            check(pattern, topic, false);
        }
    }

    #[test]
    fn hostile_names_are_refused() {
        for (text, problem) in [
            ("", "empty word"),
            (".", "empty word"),
            ("a..b", "empty word"),
            ("a.", "empty word"),
            ("a\0b", "control character"),
            ("a\nb", "control character"),
            ("a*", "must be a whole word"),
            ("**", "must be a whole word"),
            ("x".repeat(257).as_str(), "has 257 bytes"),
        ] {
            assert!(Pattern::new(text).is_err_and(|error| error.to_string().contains(problem)), "{text:?}");
            assert!(check_topic(text).is_err(), "{text:?}");
        }
        assert_eq!(Pattern::new(" a.*\r\n").map(|pattern| pattern.to_string()), Ok("a.*".into()));
        assert!(check_topic("a.b\n").is_err_and(|error| error.to_string().contains("begins or ends with a blank")));
        assert!(check_topic("a.*").is_err_and(|error| error.to_string().contains("only patterns may have")));
        for strange in ["$where", "ünï.ço∂e", "a b.c", "'; drop", "\\E.*+", "\u{202e}x"] {
            assert!(check_topic(strange.trim_end_matches("*+").trim_end_matches('.')).is_ok(), "{strange}");
        }
    }

    #[test]
    fn a_regular_expression_is_not_injected() {
        let regex = |pattern: &str| Pattern::new(pattern).expect("a pattern").to_regex();
        assert_eq!(regex("a.*"), r"\Aa\..+\z");
        assert_eq!(regex("*.b"), r"\A[^.]+\.b\z");
        assert_eq!(regex(r"a\E(b"), r"\Aa\\E\(b\z");
    }
}
