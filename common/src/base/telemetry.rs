//! Contents of log lines: errors with their causes in plain words, durations as numbers.
//!
//! Used by every process. A message is complete without its fields, and has fields as well (`job.id job.class
//! job.attempt worker.id lease.term count duration_ms`). Job parameters are never logged.

use std::time::Duration;

use mongodb::error::{Error, ErrorKind, WriteConcernError, WriteFailure};

/// A duration for a log field, in milliseconds. It is a `u64`, because JSON output would write a `u128` as text.
pub fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// An error and its causes in one line, for a log field.
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    causes(error).join(": ")
}

/// An error and its causes in plain words, without repetitions.
pub fn causes(error: &(dyn std::error::Error + 'static)) -> Vec<String> {
    let mut said: Vec<String> = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next {
        next = error.source();
        let text = if let Some(error) = error.downcast_ref::<mongodb::error::Error>() {
            // The sources of a MongoDB error repeat it.
            next = None;
            of_mongodb(error)
        } else if let Some(error) = error.downcast_ref::<bson::error::Error>() {
            of_bson(error)
        } else {
            error.to_string()
        };
        // A wrapping error may contain the text of its source already.
        if !said.last().is_some_and(|before| before.ends_with(&text)) {
            said.push(text);
        }
    }
    said
}

/// What precedes the values of a document that a unique index refuses.
const KEY_OF_INDEX: &str = "dup key";

/// A driver error in short: the problem and MongoDB's name for it, without the state of the driver.
pub fn of_mongodb(error: &Error) -> String {
    let named = |message: &str, name: &str, code: i32| {
        let name = if name.is_empty() { format!("code {code}") } else { format!("{name}, code {code}") };
        if let Some(missing) = missing_right(message) {
            return format!("{missing} ({name})");
        }
        // The text before the last cause is long: it can contain a whole query.
        let cause = message.rsplit(" :: caused by :: ").next().unwrap_or(message);
        // The key of a unique job can be made of its parameters.
        let cause = cause.split_inclusive(KEY_OF_INDEX).next().unwrap_or(cause);
        format!("{} ({name})", cause.trim_end_matches('.'))
    };
    let concern = |concern: &WriteConcernError| named(&concern.message, &concern.code_name, concern.code);
    #[expect(clippy::wildcard_enum_match_arm, reason = "the others have a sentence of the driver's")]
    let text = match error.kind.as_ref() {
        ErrorKind::Command(refusal) => named(&refusal.message, &refusal.code_name, refusal.code),
        ErrorKind::Write(WriteFailure::WriteError(refusal)) => {
            named(&refusal.message, refusal.code_name.as_deref().unwrap_or_default(), refusal.code)
        }
        ErrorKind::Write(WriteFailure::WriteConcernError(lasting)) => concern(lasting),
        ErrorKind::InsertMany(refused) => match (refused.write_errors.as_deref(), &refused.write_concern_error) {
            (Some([first, others @ ..]), _) => {
                let others = if others.is_empty() { String::new() } else { format!("; and {} more", others.len()) };
                named(&first.message, first.code_name.as_deref().unwrap_or_default(), first.code) + &others
            }
            (_, Some(lasting)) => concern(lasting),
            _ => "not all documents were inserted".into(),
        },
        ErrorKind::InvalidArgument { message, .. } => message.clone(),
        ErrorKind::Io(error) => error.to_string(),
        ErrorKind::Bson(error) => of_bson(error),
        other => other.to_string(),
    };
    without_dump(&text)
}

/// What a MongoDB user may not do, without the command itself, which can contain parameters of jobs.
fn missing_right(message: &str) -> Option<String> {
    let (_, denied) = message.split_once("not authorized on ")?;
    let (database, command) = denied.split_once(" to execute command { ")?;
    let (name, rest) = command.split_once(": ")?;
    let quoted = |text: &str| text.strip_prefix('"')?.split('"').next().map(str::to_owned);
    let on = quoted(rest).or_else(|| quoted(rest.split_once(", collection: ")?.1));
    let on = on.map_or_else(|| format!("`{database}`"), |collection| format!("`{database}.{collection}`"));
    Some(format!(
        "the MongoDB user has no right to `{name}` on {on}: give it the role of this program, which the script roles.js makes (docs/operating.md)"
    ))
}

/// Reduces the driver's description of all servers to the error in it.
fn without_dump(text: &str) -> String {
    const LONGEST: usize = 300;
    let short = match text.rsplit_once("Kind: ") {
        Some((_, about)) => about.split(", labels:").next().unwrap_or(about).trim_end_matches([']', ' ', '}', ',']),
        None if text.contains(". Topology: ") => "no server can be used that is the primary of a replica set",
        None => text,
    };
    short.trim_start_matches("I/O error: ").chars().take(LONGEST).collect()
}

/// A BSON error: the problem and its path.
pub fn of_bson(error: &bson::error::Error) -> String {
    let what = error.message.clone().unwrap_or_else(|| error.kind.to_string());
    match (&error.key, error.index) {
        (Some(key), _) => format!("`{key}`: {what}"),
        (None, Some(index)) => format!("index {index}: {what}"),
        (None, None) => what,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_right_is_named_without_the_parameters_of_jobs() {
        let said = |message: &str| missing_right(message).unwrap_or_default();
        let insert = said(r#"not authorized on my jobs to execute command { insert: "x.scheduled", documents: [ { secret: 5 } ] }"#);
        assert!(insert.contains("`insert` on `my jobs.x.scheduled`: ") && !insert.contains("secret"), "{insert}");
        assert!(said(r#"not authorized on a to execute command { getMore: 5, collection: "roster" }"#).contains("`getMore` on `a.roster`"));
        assert!(said("not authorized on admin to execute command { replSetGetStatus: 1 }").contains("`replSetGetStatus` on `admin`"));
        assert_eq!(missing_right("not master"), None);
    }

    #[test]
    fn nothing_is_said_twice_and_nothing_is_dumped() {
        #[derive(Debug, thiserror::Error)]
        #[error("it did not work: {0}")]
        struct Wrapper(#[source] std::io::Error);
        let broken = || std::io::Error::other("the line is cut");
        assert_eq!(chain(&Wrapper(broken())), "it did not work: the line is cut");
        assert_eq!(chain(&Error::from(broken())), "the line is cut");
        let refused = bson::doc! { "code": 121, "codeName": "DocumentValidationFailure", "errmsg": "Document failed validation" };
        let refused: mongodb::error::CommandError = bson::deserialize_from_document(refused).expect("a refusal");
        let refused = Error::from(ErrorKind::Command(refused));
        assert_eq!(of_mongodb(&refused), "Document failed validation (DocumentValidationFailure, code 121)");
        let taken = r#"E11000 duplicate key error collection: db.scheduled index: unique dup key: { unique: "Invoice secret" }"#;
        let taken: mongodb::error::CommandError =
            bson::deserialize_from_document(bson::doc! { "code": 11000, "codeName": "DuplicateKey", "errmsg": taken }).expect("a refusal");
        let of_index = "E11000 duplicate key error collection: db.scheduled index: unique dup key (DuplicateKey, code 11000)";
        assert_eq!(of_mongodb(&Error::from(ErrorKind::Command(taken))), of_index, "the key of a job can have its parameters");
        let of_pool = format!("Connection pool for db:27017 cleared because another operation failed with: {}", Error::from(broken()));
        assert_eq!(without_dump(&of_pool), "the line is cut");
        let selection =
            "Server selection timeout: None of the available servers suitable. Topology: { Type: Unknown, Servers: [ { Address: db } ] }";
        assert!(!without_dump(selection).contains("Topology"));
        let undecodable = bson::deserialize_from_document::<Vec<i32>>(bson::doc! {}).expect_err("no list");
        assert!(!of_bson(&undecodable).contains("Kind"), "{}", of_bson(&undecodable));
    }
}
