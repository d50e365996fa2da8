//! The messages of a program: lines by which it reports about its job while it runs.
//!
//! A class chooses where its program writes them: to a file descriptor of its own, or to standard error. A line that is no message, or a
//! wrong one, changes nothing: it is ignored with a warning, on standard error without one.

use std::{borrow::Cow, time::Duration};

use bson::Bson;
use recruiter_common::{
    failure,
    instant::delay_of_text,
    job::JobProgress,
    json::{JsonError, bson_of_text},
};

use crate::context::Context;

/// Maximum length of a message, in bytes: enough for the largest checkpoint.
const LONGEST: usize = 128 * 1024;
/// Maximum length of a line that a warning quotes, in bytes.
const QUOTED: usize = 200;

/// Cuts a stream into lines of limited length.
#[derive(Default)]
pub(super) struct Lines {
    line: Vec<u8>,
    is_too_long: bool,
}

impl Lines {
    /// Calls `take` with each complete line, and whether its end is missing because it was too long.
    pub(super) fn push(&mut self, chunk: &[u8], mut take: impl FnMut(&[u8], bool)) {
        for part in chunk.split_inclusive(|byte| *byte == b'\n') {
            let (text, ends) = part.strip_suffix(b"\n").map_or((part, false), |text| (text, true));
            let room = LONGEST - self.line.len();
            self.is_too_long |= text.len() > room;
            self.line.extend_from_slice(&text[..text.len().min(room)]);
            if ends {
                self.end(&mut take);
            }
        }
    }

    /// The same for the last line, which has no newline.
    pub(super) fn finish(&mut self, mut take: impl FnMut(&[u8], bool)) {
        if !self.line.is_empty() {
            self.end(&mut take);
        }
    }

    fn end(&mut self, take: &mut impl FnMut(&[u8], bool)) {
        take(&self.line, std::mem::take(&mut self.is_too_long));
        self.line.clear();
    }
}

/// One message.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Message {
    Progress(JobProgress),
    Checkpoint(Bson),
    Log(String),
    Extend(Duration),
    RetryAfter(Duration),
    GiveUp(String),
    ErrorClass(String),
}

impl Message {
    /// `None` if the line is no message. The error says what is wrong with one.
    pub(super) fn parse(line: &[u8]) -> Option<Result<Self, String>> {
        let line = String::from_utf8_lossy(line);
        let (keyword, rest) = line.split_once(": ")?;
        let rest = rest.trim();
        Some(match keyword {
            "progress" => progress(rest).map(Self::Progress),
            "checkpoint" => json(&mended(rest.as_bytes())).map(Self::Checkpoint),
            "log" => Ok(Self::Log(rest.to_owned())),
            "extend" => duration(rest).map(Self::Extend),
            "retry-after" => duration(rest).map(Self::RetryAfter),
            "give-up" => Ok(Self::GiveUp(rest.to_owned())),
            "error-class" => class(rest).map(Self::ErrorClass),
            _ => return None,
        })
    }
}

/// `40%`, `40.5% text`, `3/10`, `3/10 text`. Of a fraction, the whole part counts.
fn progress(text: &str) -> Result<JobProgress, String> {
    let (number, text) = text.split_once(' ').map_or((text, ""), |(number, text)| (number, text.trim()));
    let number: Option<JobProgress> = match (number.strip_suffix('%'), number.split_once('/')) {
        (Some(percent), _) => percent.parse::<f64>().ok().filter(|percent| percent.is_finite()).map(JobProgress::from),
        (None, Some((done, of))) => done.parse().ok().and_then(count).zip(of.parse().ok().and_then(count)).map(JobProgress::from),
        (None, None) => None,
    };
    let progress = number.ok_or("a progress is written like `40%` or `3/10`, with a text after it")?;
    Ok(if text.is_empty() { progress } else { progress.text(text) })
}

/// The whole part of a number of things.
pub(super) fn count(number: f64) -> Option<u64> {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it is not negative, and the largest count stands for more"
    )]
    (number >= 0.0 && number.is_finite()).then_some(number as u64)
}

/// Text of JSON that serde can read: what is not UTF-8, or half of a surrogate pair, becomes U+FFFD. `NaN` and `Infinity`, which some
/// languages write, become a number that is out of range, so that only their own field is wrong.
pub(super) fn mended(text: &[u8]) -> Cow<'_, str> {
    let text = String::from_utf8_lossy(text);
    if !["\\u", "NaN", "Infinity"].iter().any(|odd| text.contains(odd)) {
        return text;
    }
    let (mut mended, mut rest, mut is_quoted) = (String::with_capacity(text.len()), &*text, false);
    while let Some(at) = rest.find(['"', '\\']) {
        let (before, from) = rest.split_at(at);
        mended.push_str(&if is_quoted { before.into() } else { finite(before) });
        let unit = |at: usize| from.get(at..at + 6)?.strip_prefix("\\u").and_then(|hex| u16::from_str_radix(hex, 16).ok());
        let (length, instead) = match (from.starts_with('"'), unit(0), unit(6)) {
            (true, ..) => (1, None),
            (_, Some(0xD800..=0xDBFF), Some(0xDC00..=0xDFFF)) => (12, None),
            (_, Some(0xD800..=0xDFFF), _) => (6, Some("\u{fffd}")),
            _ => (from.ceil_char_boundary(2), None),
        };
        is_quoted ^= from.starts_with('"');
        let (taken, left) = from.split_at(length);
        mended.push_str(instead.unwrap_or(taken));
        rest = left;
    }
    mended.push_str(&if is_quoted { rest.into() } else { finite(rest) });
    mended.into()
}

/// A part of JSON that is in no quotes.
fn finite(part: &str) -> Cow<'_, str> {
    if part.contains(['N', 'I']) { part.replace("NaN", "1e999").replace("Infinity", "1e999").into() } else { part.into() }
}

/// The beginning of a line, for a warning.
pub(super) fn quoted(line: &[u8]) -> String {
    String::from_utf8_lossy(&line[..line.len().min(QUOTED)]).into_owned()
}

/// A value in extended JSON.
pub(super) fn json(text: &str) -> Result<Bson, String> {
    bson_of_text(text).map_err(|problem| {
        let is_json = !matches!(problem, JsonError::Invalid(_));
        format!("it {}: {problem}", if is_json { "cannot be stored" } else { "is not JSON" })
    })
}

/// A delay below zero is none.
fn duration(text: &str) -> Result<Duration, String> {
    delay_of_text(text).map_err(|error| format!("not a duration ({error}): write it like `30s`"))
}

fn class(text: &str) -> Result<String, String> {
    if text.is_empty() || text.len() > failure::LONGEST_CLASS || text.contains(char::is_control) {
        return Err(format!("an error class has 1 to {} bytes without control characters", failure::LONGEST_CLASS));
    }
    Ok(text.to_owned())
}

/// Does what the messages of one execution say, and remembers what they say about its end.
#[derive(Default)]
pub(super) struct Obeyed {
    lines: Lines,
    pub(super) class: Option<String>,
    pub(super) give_up: Option<String>,
    pub(super) retry_after: Option<Duration>,
    has_warned: bool,
}

impl Obeyed {
    /// The next bytes of a stream that has nothing but messages.
    pub(super) fn push(&mut self, chunk: &[u8], job: &Context) {
        let mut lines = std::mem::take(&mut self.lines);
        lines.push(chunk, |line, is_cut| self.obey_only(line, is_cut, job));
        self.lines = lines;
    }

    /// The end of that stream.
    pub(super) fn finish(&mut self, job: &Context) {
        let mut lines = std::mem::take(&mut self.lines);
        lines.finish(|line, is_cut| self.obey_only(line, is_cut, job));
    }

    fn obey_only(&mut self, line: &[u8], is_cut: bool, job: &Context) {
        // The beginning of these is enough.
        let is_text = line.starts_with(b"log: ") || line.starts_with(b"give-up: ");
        if is_cut && !is_text {
            self.warn(line, &format!("it is longer than {LONGEST} bytes"), job);
        } else if !self.obey(line, job) && !line.trim_ascii().is_empty() {
            self.warn(line, "it is no message", job);
        }
    }

    /// Does what a line says. Returns whether it is a message.
    pub(super) fn obey(&mut self, line: &[u8], job: &Context) -> bool {
        let Some(message) = Message::parse(line) else { return false };
        let done = message.and_then(|message| self.do_as_told(message, job));
        if let Err(problem) = done {
            self.warn(line, &problem, job);
        }
        true
    }

    fn do_as_told(&mut self, message: Message, job: &Context) -> Result<(), String> {
        match message {
            Message::Progress(progress) => job.progress(progress),
            Message::Checkpoint(value) => job.checkpoint(value).map_err(|error| error.to_string())?,
            Message::Log(line) => job.log(line),
            Message::Extend(by) => drop(job.extend(by)),
            Message::RetryAfter(delay) => self.retry_after = Some(delay),
            Message::GiveUp(reason) => self.give_up = Some(reason),
            Message::ErrorClass(class) => self.class = Some(class),
        }
        Ok(())
    }

    /// Warns in the log of the worker about the first such line of the execution, and in the log of the job about each.
    fn warn(&mut self, line: &[u8], problem: &str, job: &Context) {
        let quoted = quoted(line);
        if !std::mem::replace(&mut self.has_warned, true) {
            let (line, why) = (job.may_log(&quoted), job.may_log(problem));
            tracing::warn!(job.id = %job.job_id(), job.class = job.class(), line, "ignoring a message of a program: {why}");
        }
        job.log(format!("ignored a message: {problem}: {quoted}"));
    }
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    /// All that a program may write, in parts of all lengths.
    #[test]
    fn no_bytes_are_too_odd_and_parts_do_not_matter() {
        const PIECES: [&[u8]; 24] = [
            b"progress: ",
            b"3/10",
            b"1e999%",
            b"-1/2",
            b" text",
            b"\n",
            b"\n\n",
            b"checkpoint: ",
            b"{\"a\":",
            b"\"\\ud83d",
            b"\\ude00\"",
            b"NaN",
            b"Infinity",
            b"}",
            b"[",
            b"]",
            b"\xff",
            b"extend: ",
            b"retry-after: ",
            b"99999999999999999999",
            b"h",
            b"give-up: ",
            b"error-class: ",
            b"\0",
        ];
        let lines_of = |parts: &mut dyn Iterator<Item = &[u8]>| {
            let (mut lines, mut found) = (Lines::default(), Vec::new());
            parts.for_each(|part| lines.push(part, |line, is_cut| found.push((line.to_vec(), is_cut))));
            lines.finish(|line, is_cut| found.push((line.to_vec(), is_cut)));
            found
        };
        bolero::check!().with_type::<(Vec<(u8, u8)>, u8)>().for_each(|(pieces, length)| {
            let piece = |(piece, byte): &(u8, u8)| PIECES.get(usize::from(*piece) % 48).map_or(vec![*byte], |piece| piece.to_vec());
            let bytes: Vec<u8> = pieces.iter().flat_map(piece).collect();
            let lines = lines_of(&mut std::iter::once(&bytes[..]));
            assert_eq!(lines_of(&mut bytes.chunks(usize::from(*length).max(1))), lines);
            for (line, _) in &lines {
                if let Some(Err(problem)) = Message::parse(line) {
                    assert!(problem.len() > 8, "{:?}: {problem:?}", String::from_utf8_lossy(line));
                }
            }
        });
    }

    #[test]
    fn a_message_is_understood_or_says_what_is_wrong() {
        let parse = |line: &str| Message::parse(line.as_bytes());
        let progress = |line: &str| match parse(line) {
            Some(Ok(Message::Progress(progress))) => progress.to_string(),
            other => panic!("{line}: {other:?}"),
        };
        assert_eq!(progress("progress: 40%"), "40 %");
        assert_eq!(progress("progress: 40.5% nearly  there "), "40.5 %, nearly  there");
        assert_eq!(progress("progress: 3/10 page 3"), "3 of 10 (30 %), page 3");
        assert_eq!(progress("progress: 140%"), "100 %");
        assert_eq!(parse(r#"checkpoint: {"row": 7}"#), Some(Ok(Message::Checkpoint(doc! { "row": 7 }.into()))));
        assert_eq!(parse("checkpoint: null"), Some(Ok(Message::Checkpoint(Bson::Null))));
        assert_eq!(parse("log: a: b"), Some(Ok(Message::Log("a: b".into()))));
        assert_eq!(parse("extend: 1m 30s"), Some(Ok(Message::Extend(Duration::from_secs(90)))));
        assert_eq!(parse("retry-after: 30s"), Some(Ok(Message::RetryAfter(Duration::from_secs(30)))));
        assert_eq!(parse("retry-after: -1s"), Some(Ok(Message::RetryAfter(Duration::ZERO))));
        assert_eq!(parse("retry-after: 99999999999999999999999s"), Some(Ok(Message::RetryAfter(Duration::MAX))));
        assert_eq!(parse("give-up: no such customer"), Some(Ok(Message::GiveUp("no such customer".into()))));
        assert_eq!(parse("error-class: SmtpDown"), Some(Ok(Message::ErrorClass("SmtpDown".into()))));
        for no_message in ["", "progress", "progress:40%", "Progress: 40%", " progress: 40%", "in progress: 40%", "warning: 40%"] {
            assert_eq!(parse(no_message), None, "{no_message}");
        }
        assert_eq!(Message::parse(b"give-up: caf\xe9"), Some(Ok(Message::GiveUp("caf\u{fffd}".into()))), "not UTF-8");
        assert_eq!(parse(r#"checkpoint: "\ud83d\ude00 \ud83d""#), Some(Ok(Message::Checkpoint("😀 \u{fffd}".into()))));
        assert_eq!(progress("progress: 3.7/10"), "3 of 10 (30 %)");
        assert_eq!(parse("retry-after: -1s"), Some(Ok(Message::RetryAfter(Duration::ZERO))));
        for wrong in [
            "progress: most",
            "progress: NaN%",
            "progress: -1/10",
            "progress: 1/",
            "checkpoint: {",
            "checkpoint: {\"$oid\": 5}",
            "checkpoint: 9223372036854775808",
            "extend: soon",
            "error-class: a\tb",
            "retry-after: -soon",
            "checkpoint: [NaN]",
        ] {
            assert!(matches!(parse(wrong), Some(Err(_))), "{wrong}: {:?}", parse(wrong));
        }
    }

    #[test]
    fn lines_of_any_length_and_content_are_cut() {
        let (mut lines, mut taken) = (Lines::default(), Vec::new());
        let endless = vec![b'x'; LONGEST];
        for chunk in [b"a\nb".as_slice(), b"c\n\n", &endless, b"yz", b"\nd\xff\ne"] {
            lines.push(chunk, |line, is_cut| taken.push((line.len(), is_cut)));
        }
        lines.finish(|line, is_cut| taken.push((line.len(), is_cut)));
        assert_eq!(taken, [(1, false), (2, false), (0, false), (LONGEST, true), (2, false), (1, false)]);
    }

    #[test]
    fn what_cannot_be_obeyed_is_logged_and_changes_nothing() {
        let (mut obeyed, job) = (Obeyed::default(), Context::for_tests().build());
        obeyed.push(b"progress: 1/2\nrubbish\n\xff\xfe\nprogress: much\n\n", &job);
        obeyed.push(&vec![b'x'; 3 * LONGEST], &job);
        obeyed.push(b"\ngive-up: because", &job);
        obeyed.push(&vec![b'x'; 3 * LONGEST], &job);
        obeyed.finish(&job);
        assert_eq!(job.last_progress(), Some((1, 2).into()));
        assert!(obeyed.give_up.unwrap().starts_with("becausexxx"));
        let log = job.log_lines();
        assert_eq!(log.len(), 4, "{log:?}");
        assert_eq!(log[0], "ignored a message: it is no message: rubbish");
        assert!(log[3].starts_with("ignored a message: it is longer than 131072 bytes: xxx"), "{}", log[3]);
    }
}
