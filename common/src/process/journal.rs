//! Entries in the journal of systemd: fields of events become fields of entries, so that `journalctl JOB_ID=…` finds all lines about a job, and
//! `journalctl -p warning` the warnings.
//!
//! The formatter of JSON writes each event as one line, which becomes an entry here. Its message is the text of the event and its fields, as
//! in other logs.

use std::io;

use log::{Level, Record};
use serde::Deserialize;
use serde_json::{Map, Value};
use systemd_journal_logger::{JournalLog, connected_to_journal, current_exe_identifier};

/// Writes lines of JSON to the journal.
pub(super) struct Journal(JournalLog);

/// An event as the formatter writes it.
#[derive(Deserialize)]
struct Event {
    level: Level,
    fields: Map<String, Value>,
    #[serde(default)]
    spans: Vec<Map<String, Value>>,
}

impl Journal {
    /// The journal, if standard error goes there and it can be reached.
    pub(super) fn connected() -> Option<Self> {
        let journal = connected_to_journal().then(JournalLog::empty)?.ok()?;
        Some(Self(journal.with_syslog_identifier(current_exe_identifier().unwrap_or_else(|| "recruiter".into()))))
    }
}

impl io::Write for &Journal {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let (level, message, fields) = entry(serde_json::from_slice(line)?);
        let fields: Vec<_> = fields.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let sent =
            self.0.journal_send(&Record::builder().level(level).args(format_args!("{message}")).key_values(&fields.as_slice()).build());
        // The journal may be starting again: it reads standard error then.
        sent.or_else(|_| io::stderr().write_all(format!("{level} {message}\n").as_bytes()))?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The level, the message and the fields of an event: its own before those of the spans around it, the innermost first.
fn entry(Event { level, fields, spans }: Event) -> (Level, String, Vec<(String, String)>) {
    // The formatter adds the name of each span.
    let of_spans = spans.into_iter().rev().flat_map(|span| span.into_iter().filter(|(name, _)| name != "name"));
    let (mut text, mut all) = (String::new(), Vec::<(String, String)>::new());
    let mut message = String::new();
    for (name, value) in fields.into_iter().chain(of_spans) {
        let plain = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        if name == "message" {
            message = plain;
        } else if all.iter().all(|(known, _)| *known != name) {
            let is_word = !plain.is_empty() && plain.chars().all(|char| !char.is_whitespace() && !char.is_control() && char != '"');
            text += &format!(" {name}={}", if is_word { plain.clone() } else { value.to_string() });
            all.push((name, plain));
        }
    }
    (level, message + &text, all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_has_the_fields_of_the_event_and_of_its_spans() {
        let line = r#"{"timestamp":"x","level":"WARN","fields":{"message":"job\nfailed","job.id":"1","error":"a \"b\"\n","count":2},
            "spans":[{"job.id":"0","worker.id":"w","name":"job"},{"job.class":"","name":"job"}]}"#;
        let (level, message, fields) = entry(serde_json::from_str(line).expect("an event"));
        assert_eq!(level, Level::Warn);
        assert_eq!(message, "job\nfailed job.id=1 error=\"a \\\"b\\\"\\n\" count=2 job.class=\"\" worker.id=w");
        let expected = [("job.id", "1"), ("error", "a \"b\"\n"), ("count", "2"), ("job.class", ""), ("worker.id", "w")];
        assert_eq!(fields, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }
}
