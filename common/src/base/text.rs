//! Texts for people: durations and instants in words, and the text of others on one line.
//!
//! Text from the database is untrusted. Before it reaches a terminal, control characters are escaped and it is cut to a width.

use std::time::Duration;

use super::Instant;

/// Untrusted text on one line, cut to `width` characters. Control characters and those that reverse the writing
/// direction are escaped.
pub fn printable(text: &str, width: usize) -> String {
    let hidden = |c: char| c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let mut shown = String::new();
    let mut room = width;
    for c in text.chars() {
        if room == 0 {
            shown.pop();
            shown.push('…');
            break;
        }
        if hidden(c) {
            shown.extend(c.escape_default())
        } else {
            shown.push(c)
        }
        room -= 1;
    }
    shown
}

/// An instant in UTC, to the millisecond.
pub fn moment(at: Instant) -> String {
    at.format("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}

/// The time between two instants, in one unit: `2h`.
pub fn briefly_apart(one: Instant, other: Instant) -> String {
    let seconds = (one - other).abs().num_seconds();
    let (size, unit) = [(86_400, "d"), (3_600, "h"), (60, "m")].into_iter().find(|(size, _)| seconds >= 2 * size).unwrap_or((1, "s"));
    format!("{}{unit}", seconds / size)
}

/// The time between two instants, in two units: `2days 3h`.
pub fn apart(one: Instant, other: Instant) -> String {
    let seconds = (one - other).abs().num_seconds().unsigned_abs();
    in_words(Duration::from_secs(seconds))
}

/// A duration in at most two units, rounded to milliseconds: `3s`, `1s 250ms`, `2days 3h`.
pub fn in_words(duration: Duration) -> String {
    let milliseconds = duration.saturating_add(Duration::from_micros(500)).as_millis();
    let rounded = Duration::from_millis(u64::try_from(milliseconds).unwrap_or(u64::MAX));
    humantime::format_duration(rounded).to_string().split(' ').take(2).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;

    use super::*;

    #[test]
    fn text_of_others_cannot_steer_the_terminal() {
        let check = |text: &str, width: usize, expected: &str| assert_eq!(printable(text, width), expected, "{text:?}");
        check("plain ünï", 40, "plain ünï");
        check("\u{1b}[2J\r\n\0", 40, "\\u{1b}[2J\\r\\n\\u{0}");
        check("\u{202e}evil", 40, "\\u{202e}evil");
        check("abcdef", 6, "abcdef");
        check("abcdefg", 6, "abcde…");
        check(&"x".repeat(10_000), 3, "xx…");
    }

    #[test]
    fn the_largest_unit_says_how_far_apart() {
        let check = |seconds: i64, expected: &str| {
            let then = Instant::default() + TimeDelta::seconds(seconds);
            assert_eq!(
                (briefly_apart(then, Instant::default()), briefly_apart(Instant::default(), then)),
                (expected.into(), expected.into())
            );
        };
        check(0, "0s");
        check(119, "119s");
        check(120, "2m");
        check(3 * 3_600 + 59, "3h");
        check(400 * 86_400, "400d");
    }

    #[test]
    fn distances_are_said_in_two_words() {
        let check = |seconds: i64, expected: &str| {
            let then = Instant::default() + TimeDelta::seconds(seconds);
            assert_eq!((apart(then, Instant::default()), apart(Instant::default(), then)), (expected.into(), expected.into()));
        };
        check(0, "0s");
        check(61, "1m 1s");
        check(2 * 86_400 + 3 * 3_600 + 4, "2days 3h");
    }

    #[test]
    fn a_duration_is_rounded() {
        let check = |nanoseconds: u64, expected: &str| assert_eq!(in_words(Duration::from_nanos(nanoseconds)), expected);
        check(2_999_999_970, "3s");
        check(1_250_000_001, "1s 250ms");
        check(93_784_000_000_000, "1day 2h");
        assert!(!in_words(Duration::MAX).is_empty());
    }
}
