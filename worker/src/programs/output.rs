//! The output of a program: the beginning of its standard output is the job's result, the end of its standard error the failure's trace.
//! An output that is an object or an array of JSON is stored as such, so that queries see its fields.

use std::{os::unix::process::ExitStatusExt, path::Path, process::ExitStatus};

use bson::{Binary, Bson, spec::BinarySubtype};
use nix::sys::signal::Signal;
use recruiter_common::failure::{self, Failure};

use super::messages::{self, Message};

/// The exit code by which a program snoozes its job: `EX_TEMPFAIL` of sysexits.
pub(super) const TRY_AGAIN: i32 = 75;
/// A program writes this to standard error, at the start of a line, to name its error class.
const ERROR_CLASS: &[u8] = b"error-class: ";

/// The beginning of standard output.
pub(super) struct Output {
    kept: Vec<u8>,
    limit: usize,
    is_cut: bool,
}

impl Output {
    pub(super) fn up_to(limit: usize) -> Self {
        Self { kept: Vec::new(), limit, is_cut: false }
    }

    pub(super) fn push(&mut self, chunk: &[u8]) {
        let room = self.limit - self.kept.len();
        self.is_cut |= chunk.len() > room;
        self.kept.extend_from_slice(&chunk[..chunk.len().min(room)]);
    }

    /// The result. With `as_text`, JSON stays text.
    pub(super) fn into_result(self, as_text: bool) -> Option<Bson> {
        let json = if as_text || self.is_cut { None } else { json(&self.kept) };
        json.or_else(|| self.into_text())
    }

    fn into_text(mut self) -> Option<Bson> {
        if self.is_cut {
            if let Err(error) = str::from_utf8(&self.kept)
                && error.error_len().is_none()
            {
                self.kept.truncate(error.valid_up_to());
            }
            self.kept.extend_from_slice(format!("… [cut after {} bytes]", self.limit).as_bytes());
        }
        match String::from_utf8(self.kept) {
            Ok(mut text) => {
                if text.ends_with('\n') {
                    text.pop();
                }
                (!text.is_empty()).then_some(Bson::String(text))
            }
            Err(error) => Some(Bson::Binary(Binary { subtype: BinarySubtype::Generic, bytes: error.into_bytes() })),
        }
    }
}

/// An object or an array. Other values would make the type of a result depend on its content: `007` is no number.
fn json(output: &[u8]) -> Option<Bson> {
    let text = str::from_utf8(output).ok()?.trim();
    let is_compound = (text.starts_with('{') && text.ends_with('}')) || (text.starts_with('[') && text.ends_with(']'));
    is_compound.then(|| messages::json(&messages::mended(text.as_bytes())).ok()).flatten()
}

/// The end of standard error, and the error class that the program named anywhere in it.
#[derive(Default)]
pub(super) struct Errors {
    end: Vec<u8>,
    line: Vec<u8>,
    class: Option<String>,
    /// Whether some lines are messages, which are no description of an error.
    pub(super) has_messages: bool,
}

impl Errors {
    /// Enough of a line to hold the longest error class.
    const LONGEST_LINE: usize = 2 * failure::LONGEST_CLASS;
    /// Enough for the trace in every encoding.
    const KEPT: usize = 2 * failure::LONGEST_TRACE;

    pub(super) fn with_messages(has_messages: bool) -> Self {
        Self { has_messages, ..Self::default() }
    }

    pub(super) fn push(&mut self, chunk: &[u8]) {
        self.end.extend_from_slice(chunk);
        if self.end.len() > 2 * Self::KEPT {
            self.end.drain(..self.end.len() - Self::KEPT);
        }
        for part in chunk.split_inclusive(|byte| *byte == b'\n') {
            let room = Self::LONGEST_LINE - self.line.len();
            self.line.extend_from_slice(&part[..part.len().min(room)]);
            if part.ends_with(b"\n") {
                self.end_line();
            }
        }
    }

    fn end_line(&mut self) {
        self.class = error_class(&self.line).or(self.class.take());
        self.line.clear();
    }

    pub(super) fn into_failure(mut self, program: &Path, status: ExitStatus) -> Failure {
        self.end_line();
        let (class, what) = match (status.code(), status.signal()) {
            (Some(code), _) => (format!("exit:{code}"), format!("exited with {code}")),
            (None, number) => {
                let number = number.unwrap_or_default();
                let name = Signal::try_from(number).map_or_else(|_| number.to_string(), |signal| signal.as_str().into());
                (format!("signal:{name}"), format!("was killed by {name}"))
            }
        };
        let class = self.class.filter(|_| status.code() != Some(TRY_AGAIN)).unwrap_or(class);
        let program = program.display();
        let trace = String::from_utf8_lossy(&self.end);
        let is_message =
            |line: &str| error_class(line.as_bytes()).is_some() || (self.has_messages && Message::parse(line.as_bytes()).is_some());
        let last = error_of_node(&trace).or_else(|| trace.lines().map(str::trim).rfind(|line| !line.is_empty() && !is_message(line)));
        let message = match last {
            Some(line) => format!("`{program}` {what}: {line}"),
            None => format!("`{program}` {what} without output on standard error"),
        };
        let failure = Failure::new(class, message);
        if trace.trim().is_empty() { failure } else { failure.with_trace(trace) }
    }
}

/// The error that Node.js describes when it crashes: the line after the one that marks the place in the source, or before the stack. Its
/// last line is the version of Node.js.
fn error_of_node(trace: &str) -> Option<&str> {
    let lines: Vec<&str> = trace.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines.last().filter(|last| last.starts_with("Node.js v"))?;
    let (is_mark, is_frame) = (|line: &&str| line.bytes().all(|byte| byte == b'^'), |line: &str| line.starts_with("at "));
    let after_mark = lines.iter().rposition(is_mark).and_then(|mark| lines.get(mark + 1));
    let before_stack = || lines.windows(2).rfind(|pair| is_frame(pair[1]) && !is_frame(pair[0])).map(|pair| &pair[0]);
    after_mark.or_else(before_stack).copied()
}

/// The error class that a line of standard error names.
fn error_class(line: &[u8]) -> Option<String> {
    let class = String::from_utf8_lossy(line.strip_prefix(ERROR_CLASS)?).trim().to_owned();
    (!class.is_empty() && class.len() <= failure::LONGEST_CLASS && !class.contains(char::is_control)).then_some(class)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_of_node_is_described_by_its_error() {
        let described = |trace: &str| {
            let mut errors = Errors::default();
            errors.push(trace.as_bytes());
            errors.into_failure(Path::new("node"), ExitStatus::from_raw(256)).message
        };
        for (trace, error) in [
            (
                "Error: earlier\n    at x\n/app.js:1\n  throw e\n  ^\n\nTypeError: a: b\n    at x (y:1:2) {\n  code: 5\n}\n\nNode.js v20.20.2\n",
                "TypeError: a: b",
            ),
            ("/app.js:1\nthrow 5\n^\n5\n(Use `node --trace-uncaught ...` to show it)\n\nNode.js v24.1.0\n", "5"),
            (
                "/app.js:2\n\n\nSyntaxError: Unexpected end of input\n    at x\n    at y\n\nNode.js v20.20.2\n",
                "SyntaxError: Unexpected end of input",
            ),
            ("warning\nthe last line\n", "the last line"),
            ("Node.js v20.20.2\n", "Node.js v20.20.2"),
        ] {
            assert_eq!(described(trace), format!("`node` exited with 1: {error}"));
        }
    }
}
