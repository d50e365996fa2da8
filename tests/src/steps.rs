//! Steps: the commands that a process sends to MongoDB, grouped by command, collection and the keys of the first
//! filter, so that a test can break each of them: `update roster _id,available,round`.

use bson::{Bson, Document};

/// The step of a command. `None` for commands outside of the protocol (handshakes, and the driver's own clean-up).
pub fn step(command: &Document) -> Option<String> {
    let (name, value) = command.iter().next()?;
    let first = |list: &str, of: &str| {
        let first = command.get_array(list).ok()?.first()?.as_document()?;
        first.get_document(of).ok().map(keys)
    };
    let shape = match name.as_str() {
        "hello" | "isMaster" | "ismaster" | "ping" | "endSessions" | "killCursors" | "saslStart" | "saslContinue" => return None,
        "find" => command.get_document("filter").ok().map(keys),
        "update" => first("updates", "q"),
        "delete" => first("deletes", "q"),
        "findAndModify" => command.get_document("query").ok().map(keys),
        // Hints are distinguished by their kind.
        "insert" => command.get_array("documents").ok().and_then(|documents| {
            let kind = documents.first()?.as_document()?.get_str("kind").ok()?;
            Some(kind.to_owned())
        }),
        _ => None,
    };
    let collection = value.as_str().or_else(|| command.get_str("collection").ok());
    // All channels of workers count as one collection.
    let collection = collection.map(|name| if name.starts_with("signals_") { "signals_n" } else { name });
    Some(
        [Some(name.as_str()), collection, shape.as_deref()]
            .into_iter()
            .flatten()
            .filter(|word| !word.is_empty())
            .collect::<Vec<_>>()
            .join(" "),
    )
}

/// The keys of a filter. `$or` is replaced by the keys of its first alternative.
fn keys(filter: &Document) -> String {
    let key = |(key, value): (&String, &Bson)| match value.as_array().and_then(|any| any.first()).and_then(Bson::as_document) {
        Some(first) if key == "$or" => keys(first),
        // In the filter of a hint the worker's id is not part of the step.
        _ => key
            .split_once('.')
            .filter(|(_, id)| bson::oid::ObjectId::parse_str(id).is_ok())
            .map_or(key.as_str(), |(name, _)| name)
            .to_owned(),
    };
    filter.iter().map(key).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    #[test]
    fn steps_are_told_apart_by_what_they_ask_for() {
        let check = |command: Document, expected: &str| assert_eq!(step(&command).as_deref().unwrap_or("none"), expected);
        check(doc! { "find": "scheduled", "filter": { "_id": 1, "locked": false } }, "find scheduled _id,locked");
        check(doc! { "update": "roster", "updates": [{ "q": { "_id": 1, "round": 2 }, "u": {} }] }, "update roster _id,round");
        check(
            doc! { "delete": "scheduled", "deletes": [{ "q": { "$or": [{ "_id": 1, "locked": true }] } }] },
            "delete scheduled _id,locked",
        );
        check(doc! { "insert": "signals", "documents": [{ "kind": "free" }] }, "insert signals free");
        check(doc! { "getMore": 5_i64, "collection": "signals" }, "getMore signals");
        check(doc! { "insert": "signals_31", "documents": [{ "kind": "keep-alive" }] }, "insert signals_n keep-alive");
        check(doc! { "commitTransaction": 1 }, "commitTransaction");
        check(doc! { "find": "signals", "filter": { "$or": [{ "pairs.65a1b2c3d4e5f60718293a4b": 1 }] } }, "find signals pairs");
        check(doc! { "hello": 1 }, "none");
    }
}
