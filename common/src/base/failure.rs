//! The failure of one execution, as it is stored and as retry policies get it.
//!
//! Used by workables (they return it), retry policies (they select by its class), the worker and the cleaner (they
//! store it). The length of every text is limited here, so that a failure can always be stored.

/// Maximum length of a stored error class, in bytes.
pub const LONGEST_CLASS: usize = 256;
/// Maximum length of a stored message, in bytes.
pub const LONGEST_MESSAGE: usize = 4 * 1024;
/// Maximum length of a stored trace, in bytes. The end of a trace is kept, because programs print the error there.
pub const LONGEST_TRACE: usize = 8 * 1024;

/// The error class of an execution that reached its time limit.
pub const TIMEOUT: &str = "timeout";
/// The error class of an execution whose worker died.
pub const WORKER_DIED: &str = "worker-died";
/// The error class of a workable that panicked.
pub const PANIC: &str = "panic";
/// The error class of parameters that the workable cannot decode.
pub const PARAMETERS: &str = "parameters";
/// The error class of a job whose class the worker does not have.
pub const UNKNOWN_CLASS: &str = "unknown-class";
/// The error class of an execution that was interrupted because its worker stopped.
pub const INTERRUPTED: &str = "interrupted";
/// The error class of an execution that was interrupted because its worker reached its memory limit.
pub const MEMORY_LIMIT: &str = "memory-limit";
/// The error class of a document that is not a valid job.
pub const MALFORMED: &str = "malformed";
/// The error class of an execution that a person cancelled.
pub const CANCELLED: &str = "cancelled";
/// The error class of a job that was not started before its `expires_at`.
pub const EXPIRED: &str = "expired";

/// Why an execution did not succeed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub struct Failure {
    /// The error class, by which retry policies select: `exit:1`, `timeout`, a Rust type name, or a name chosen by the
    /// workable.
    pub class: String,
    /// One sentence for people.
    pub message: String,
    /// Details for finding the cause: the end of standard error, or a chain of sources.
    pub trace: Option<String>,
}

impl Failure {
    /// A failure of this class. Texts that are too long are cut and marked with an ellipsis.
    pub fn new(class: impl Into<String>, message: impl Into<String>) -> Self {
        Self { class: keep_start(class.into(), LONGEST_CLASS), message: keep_start(message.into(), LONGEST_MESSAGE), trace: None }
    }

    /// A job that was not started before its `expires_at`.
    pub fn expired() -> Self {
        Self::new(EXPIRED, "it was not started before it expired")
    }

    /// Adds a trace, of which the last [`LONGEST_TRACE`] bytes are kept.
    #[must_use]
    pub fn with_trace(mut self, trace: impl Into<String>) -> Self {
        self.trace = Some(keep_end(trace.into(), LONGEST_TRACE));
        self
    }

    /// The same failure with a shorter message and trace; the limits are in bytes.
    #[must_use]
    pub(crate) fn shortened(self, message: usize, trace: usize) -> Self {
        Self { message: keep_start(self.message, message), trace: self.trace.map(|text| keep_end(text, trace)), ..self }
    }
}

pub(crate) fn keep_start(mut text: String, bytes: usize) -> String {
    if text.len() > bytes {
        let end = text.floor_char_boundary(bytes - '…'.len_utf8());
        text.truncate(end);
        text.push('…');
    }
    text
}

fn keep_end(text: String, bytes: usize) -> String {
    if text.len() <= bytes {
        return text;
    }
    let start = text.ceil_char_boundary(text.len() - bytes + '…'.len_utf8());
    format!("…{}", &text[start..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlong_texts_are_cut_at_a_character() {
        let failure = Failure::new("ü".repeat(300), "ü".repeat(9_000)).with_trace("ü".repeat(9_000));
        assert!(failure.class.len() <= LONGEST_CLASS && failure.class.ends_with('…'));
        assert!(failure.message.len() <= LONGEST_MESSAGE && failure.message.ends_with('…'));
        let trace = failure.trace.expect("just set");
        assert!(trace.len() <= LONGEST_TRACE && trace.starts_with('…') && trace.ends_with('ü'));
    }

    #[test]
    fn short_texts_are_kept() {
        let failure = Failure::new("exit:1", "no such file").with_trace("line 1");
        assert_eq!(
            (failure.class.as_str(), failure.message.as_str(), failure.trace.as_deref()),
            ("exit:1", "no such file", Some("line 1"))
        );
    }
}
