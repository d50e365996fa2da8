//! The repository's descriptions of itself are true.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

pub(super) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

pub(super) fn sources() -> Vec<(PathBuf, String)> {
    let mut directories: Vec<PathBuf> =
        ["common", "worker", "recruiter", "cleaner", "tests"].iter().map(|name| root().join(name)).collect();
    let mut found = Vec::new();
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                found.push((path, text));
            }
        }
    }
    assert!(found.len() > 40);
    found
}

#[test]
fn every_source_file_says_what_it_is_for() {
    for (path, text) in sources() {
        assert!(
            text.starts_with("//! ") && text.lines().next().unwrap().len() > 20,
            "{} does not begin with what it is for",
            path.display()
        );
    }
}

/// rustfmt puts the end of a function below its beginning.
#[test]
fn no_function_is_longer_than_seventy_lines() {
    let is_shipped = |path: &Path| !path.starts_with(root().join("tests")) && !path.to_string_lossy().contains("/model/");
    for (path, text) in sources().into_iter().filter(|(path, _)| is_shipped(path)) {
        let lines: Vec<&str> = text.lines().collect();
        for (at, line) in lines.iter().enumerate().filter(|(_, line)| line.contains("fn ") && !line.trim_start().starts_with("//")) {
            let end = format!("{}}}", &line[..line.len() - line.trim_start().len()]);
            let ends = |line: &&str| **line == end || (line.ends_with(';') && line.len() - line.trim_start().len() < end.len());
            let length = lines[at..].iter().position(ends).map_or(0, |more| more + 1);
            assert!(length <= 70, "{}:{}: {length} lines", path.display(), at + 1);
        }
    }
}

#[test]
fn no_documented_example_is_left_uncompiled_and_nothing_is_left_undone() {
    for (path, text) in sources() {
        let forbidden =
            ["rust,ignore", "```ignore", concat!("FIX", "ME"), concat!("TO", "DO"), concat!("todo", "!("), concat!("#[ignore", "]")];
        let found = forbidden.iter().find(|word| text.contains(**word));
        assert_eq!(found.filter(|_| !path.ends_with("tidy.rs")), None, "{}", path.display());
    }
}

/// A table of modules at the top of a file has each module that the file declares, and no other.
#[test]
fn the_tables_of_modules_are_true() {
    let mut tables = 0;
    for (path, text) in sources() {
        let table_of = |what| text.split_once(&format!("\n//! | {what} |"));
        let Some((_, table)) = ["file", "module", "room"].into_iter().find_map(table_of) else { continue };
        let rows = table.lines().skip(2).map_while(|line| line.strip_prefix("//! | ")).filter_map(|row| row.split(" |").next());
        let listed: BTreeSet<&str> = rows.flat_map(|names| names.split('`').skip(1).step_by(2)).collect();
        let declared = text.lines().filter_map(|line| {
            let (visibility, name) = line.strip_suffix(';')?.split_once("mod ")?;
            (visibility.is_empty() || visibility.starts_with("pub")).then_some(name)
        });
        assert_eq!(listed, declared.collect(), "the table in {} on the left, its modules on the right", path.display());
        tables += 1;
    }
    assert!(tables > 15, "only {tables} tables were looked at");
}

/// The documentation of every operation on MongoDB names its index and its invariant.
#[test]
fn every_store_operation_names_its_index_and_its_invariant() {
    const ASKS: [&str; 7] =
        ["call(\"", "call_within(", ".indexed(\"", ".write(\"", ".write_repeatable(\"", ".values(\"", ".transaction(\""];
    let mut operations = 0;
    let rooms = root().join("common/src");
    // A connection asks nothing of the documents.
    let files = sources().into_iter().filter(|(path, _)| path.starts_with(&rooms) && !path.starts_with(rooms.join("mongo")));
    for (path, text) in files {
        for (before, function) in text
            .split("\n    }\n")
            .filter_map(|function| function.split_once("pub async fn ").or(function.split_once("pub(crate) async fn ")))
        {
            let docs: String = before.lines().filter_map(|line| line.trim().strip_prefix("///")).collect();
            if ASKS.iter().any(|asks| function.split_whitespace().collect::<String>().contains(asks)) {
                let name = function.split('(').next().unwrap_or_default();
                assert!(docs.contains("Index:") && docs.contains("Invariant:"), "{}: {name}: {docs}", path.display());
                operations += 1;
            }
        }
    }
    assert!(operations > 100, "only {operations} operations were looked at");
}

/// The driver decodes a document, or a whole batch, and fails for one whose bytes are no UTF-8 (I9).
#[test]
fn every_read_takes_documents_as_they_are_stored() {
    // These read ids only, which are ObjectIds; the last three an error of MongoDB, one file that is asked for, and nothing (a `$merge`).
    const OTHERS: [&str; 6] =
        ["known_in", "problem_with_parents", "has_ended_without_start", "is_transaction_aborted", "begin_to_read_file", "copy_files"];
    // These read twice from one collection.
    const TWICE: [&str; 3] = ["step", "retire_if_silent_since", "locked_jobs"];
    const RAW: [&str; 5] = [
        "clone_with_type::<RawDocumentBuf>()",
        ".with_type::<RawDocumentBuf>()",
        "Collection<RawDocumentBuf>",
        ".readable()",
        "roster_as_it_is()",
    ];
    let rooms = root().join("common/src");
    let mut reads = 0;
    for (path, text) in sources().into_iter().filter(|(path, _)| path.starts_with(&rooms)) {
        let code = text.split("#[cfg(test)]").next().unwrap();
        for function in code.split("fn ").skip(1) {
            let name = function.split(['(', '<']).next().unwrap_or_default();
            let dense: String = function.split_whitespace().collect();
            // A read has a filter; a search in memory has a closure or a pattern.
            let is_read = |at: usize| {
                let begin: String = dense[at..].chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect();
                dense[at..].starts_with("doc!") || (!begin.is_empty() && !["is_", "has_"].iter().any(|closure| begin.starts_with(closure)))
            };
            let asks = [".find(", ".find_one(", ".aggregate(", ".find_one_and_update("]
                .iter()
                .flat_map(|call| dense.match_indices(call).map(move |(at, _)| at + call.len()));
            let count = asks.filter(|at| is_read(*at)).count();
            reads += count;
            let raw = RAW.iter().map(|raw| dense.matches(raw).count()).sum::<usize>() + usize::from(TWICE.contains(&name));
            assert!(count <= raw || OTHERS.contains(&name), "{}: {name} lets the driver decode what it reads", path.display());
        }
    }
    assert!(reads > 80, "only {reads} reads were looked at");
}

/// The action that is needed, on the collection: the role would give rights on everything in the database.
#[test]
fn no_message_advises_a_wide_role() {
    // The doctor warns of wide roles.
    let is_examined = |path: &Path| !path.starts_with(root().join("tests")) && !path.ends_with("doctor/server.rs");
    for (path, text) in sources().into_iter().filter(|(path, _)| is_examined(path)) {
        assert!(!text.contains("dbAdmin"), "{}", path.display());
    }
}

/// A conversion of its own would round large integers: see `recruiter_common::json`.
#[test]
fn json_becomes_bson_in_one_place() {
    for (path, text) in sources() {
        let is_program = path.components().any(|part| part.as_os_str() == "src") && !path.starts_with(root().join("tests"));
        let code = text.split("#[cfg(test)]").next().unwrap();
        // The log of mongod, and numbers and texts of programs, do not become BSON.
        let others = ["base/json.rs", "embedded/server.rs", "programs/said.rs"];
        if is_program && !others.iter().any(|other| path.ends_with(other)) {
            for own in ["serde_json::from_str", "serialize_to_bson(", " Bson::try_from(json", " Bson::try_from(value"] {
                let found = code.lines().find(|line| line.contains(own) && !line.trim_start().starts_with("//"));
                assert_eq!(found, None, "{}: use recruiter_common::json", path.display());
            }
        }
    }
}

/// The programs of the README are those that the tests start.
#[test]
fn the_readmes_programs_are_those_that_are_tested() {
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<String>().replace(",}", "}");
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    for example in ["tests/examples/website.rs", "tests/examples/mailer.rs"] {
        let tested = fs::read_to_string(root().join(example)).unwrap();
        let (_, code) = tested.split_once("\n\n").unwrap();
        assert!(words(&readme).contains(&words(code)), "{example} is not in the README");
    }
}

/// Durations that stand in two places agree: the workers' grace is shorter than what systemd waits.
#[test]
fn systemd_waits_longer_than_the_grace() {
    let unit = fs::read_to_string(root().join("systemd/recruiter-worker@.service")).unwrap();
    let stop = unit.lines().find_map(|line| line.strip_prefix("TimeoutStopSec=")).expect("TimeoutStopSec is set");
    let stop: u64 = stop.trim_end_matches('s').parse().unwrap();
    let grace = recruiter_worker::DEFAULT_GRACE.as_secs();
    assert!(stop > grace + 10, "TimeoutStopSec={stop} leaves no room after a grace of {grace} s");
    assert!(grace + 10 <= 30, "Kubernetes kills a container 30 s after TERM");
}
