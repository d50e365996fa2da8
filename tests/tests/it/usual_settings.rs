//! What people have around the programs: empty variables, pipes that close, blanks, large integers.

use std::{
    collections::BTreeSet,
    fs,
    process::{Command, Output, Stdio},
};

use bson::{Document, doc};
use recruiter_common::{Limit, NewJob, limits::Paused, store::Store};
use recruiter_tests::{
    local::{prepared, store},
    mongo::TestDatabase,
    oracle::number,
    processes::{Process, binary},
    promise,
    wait::{SOON, wait_for, wait_until},
};

use super::{
    cli::{Said, recruiter},
    long_lived::LATEST_MS,
};

/// Runs a program of its own with these variables.
pub(super) fn run(name: &str, args: &[&str], env: &[(&str, &str)]) -> Said {
    let mut command = Command::new(binary(name));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("RECRUITER_")) {
        command.env_remove(name);
    }
    let output = command.args(args).env_remove("MONGODB_URI").envs(env.iter().copied()).stdin(Stdio::null()).output();
    Said::of(output.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_integer_of_more_than_64_bits_is_refused_with_its_path_and_nothing_is_stored() {
    let (database, directory) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
    let file = |name: &str, text: &str| {
        let path = directory.path().join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let lines = file("lines", "{\"class\": \"a\", \"parameters\": {\"customer\": {\"id\": 9223372036854775808}}}\n");
    let graph = file("graph", r#"{"jobs": {"x": {"class": "a", "parameters": {"ids": [1, 18446744073709551616]}}}}"#);
    let consumer = r#"{"class": "a", "parameters": {"id": 18446744073709551615}}"#;
    for (args, path) in [
        (vec!["enqueue", "--class", "a", "--parameters", r#"{"customer": {"id": 18446744073709551615}}"#], "customer.id"),
        (vec!["enqueue", "--class", "a", "--parameters", r#"{"id": -9223372036854775809}"#], "id"),
        (vec!["enqueue", "--class", "a", "--items", r#"[{}, {"id": 18446744073709551614}]"#], "1.id"),
        (vec!["enqueue", "--from", &lines], "parameters.customer.id"),
        (vec!["graph", "enqueue", &graph], "jobs.x.parameters.ids.1"),
        (vec!["publish", "orders.new", r#"{"id": 18446744073709551615}"#], "id"),
        (vec!["consumers", "set", "a", "--topic", "a.*", "--job", consumer], "parameters.id"),
        (vec!["jobs", "retry", "--class", "a", "--set", r#"{"id": 18446744073709551615}"#, "--yes"], "id"),
    ] {
        let said = recruiter(&database, &args);
        assert_ne!(said.code, 0, "{args:?}");
        assert!(said.err.contains(&format!("`{path}`: ")) && said.err.contains("$numberDecimal"), "{args:?}: {}", said.err);
    }
    assert_eq!(database.count("scheduled", doc! {}).await, 0);
    // What the message advises keeps two jobs apart.
    for id in ["18446744073709551614", "18446744073709551615"] {
        for written in [format!(r#"{{"id": "{id}"}}"#), format!(r#"{{"id": {{"$numberDecimal": "{id}"}}}}"#)] {
            assert_eq!(recruiter(&database, &["enqueue", "--class", "b", "--unique-by", "id", "--parameters", &written]).code, 0);
        }
    }
    assert_eq!(database.count("scheduled", doc! { "workable.class": "b" }).await, 4);
}

/// A program without a client that answers what the parameters say.
const PROGRAM: &str = r#"
import json, sys
for line in sys.stdin:
    job = json.loads(line)
    if "job" not in job:
        continue
    if job["attempt"] == 1:
        for said in job["parameters"]["says"]:
            print('{"id": %d, %s}' % (job["id"], said), flush=True)
    else:
        print(json.dumps({"id": job["id"], "result": job["attempt"]}), flush=True)
"#;

async fn by_program(says: &[&str]) -> (TestDatabase, Store, Process, Process, tempfile::TempDir) {
    let (database, directory) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
    fs::write(directory.path().join("app.py"), PROGRAM).unwrap();
    let config = directory.path().join("workables.toml");
    fs::write(&config, "[workables.a]\ncommand = [\"python3\", \"app.py\"]\nmode = \"long-lived\"\ntimeout = \"1h\"\n").unwrap();
    let recruiter = Process::on(&database, "recruiter", &["run"]);
    let worker = Process::on(&database, "recruiter-worker", &["--config", config.to_str().unwrap()]);
    let store = store(&database).await;
    for says in says {
        NewJob::of_class("a", doc! { "says": [*says] }).urn(*says).enqueue(&store).await.unwrap();
    }
    (database, store, recruiter, worker, directory)
}

#[tokio::test]
async fn a_result_of_a_program_that_cannot_be_stored_exactly_is_refused_after_one_run() {
    let says = [r#""result": {"id": 18446744073709551615}"#, r#""result": [18446744073709551616]"#, r#""result": 9223372036854775807"#];
    let (database, _store, _recruiter, _worker, _directory) = by_program(&says).await;
    for (says, path) in says.iter().zip([Some("`id`: 18446744073709551615"), Some("`0`: 18446744073709551616"), None]) {
        let archived = async || database.raw("archived").find_one(doc! { "urn": *says }).await.unwrap();
        let ended = wait_for(SOON, "it ended", archived).await;
        let last = ended.get_document("last_execution").unwrap();
        promise!(number(&ended, "attempts") == 1, "it ran again: {ended}");
        match path {
            Some(path) => {
                assert_eq!((ended.get_str("why").unwrap(), last.get_str("class").unwrap()), ("gave-up", "result"));
                assert!(last.get_str("message").unwrap().contains(path), "{last}");
            }
            None => assert_eq!(ended.get_i64("result").unwrap(), i64::MAX),
        }
    }
}

#[tokio::test]
async fn a_negative_or_endless_delay_of_a_program_costs_nothing() {
    let soon = [r#""snooze": {"after_ms": -500}"#, r#""snooze": {"after_ms": -0.5}"#, r#""extend_ms": -5000, "snooze": {"after_ms": 0}"#];
    let never = [
        r#""snooze": {"after_ms": 1700000000000000}"#,
        r#""snooze": {"after_ms": 1e300}"#,
        r#""extend_ms": 1e300, "snooze": {"after_ms": 99999999999999999999999}"#,
    ];
    let (database, _store, _recruiter, _worker, _directory) = by_program(&[soon, never].concat()).await;
    for says in soon {
        let archived = async || database.raw("archived").find_one(doc! { "urn": says }).await.unwrap();
        let ended = wait_for(SOON, "it ended", archived).await;
        assert_eq!((ended.get_str("why").unwrap(), number(&ended, "interruptions")), ("done", 1), "{ended}");
    }
    for says in never {
        let due = doc! { "urn": says, "locked": false, "interruptions": 1 };
        let waits = async || database.raw("scheduled").find_one(due.clone()).await.unwrap();
        let waits: Document = wait_for(SOON, "it waits", waits).await;
        assert_eq!(waits.get_datetime("scheduled_at").unwrap().timestamp_millis(), LATEST_MS, "{waits}");
    }
}

/// All variables that a help names, and all commands below it.
fn variables_and_commands(name: &str, path: &[&str]) -> (BTreeSet<String>, Vec<String>) {
    let help = run(name, &[path, &["--help"]].concat(), &[]).out;
    let variables = help.split("[env: ").skip(1).filter_map(|rest| rest.split(['=', ']']).next()).map(str::to_owned).collect();
    let commands = help.split_once("\nCommands:\n").map(|(_, rest)| rest.split("\n\n").next().unwrap()).unwrap_or_default();
    let commands = commands.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    (variables, commands.filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect())
}

/// Without these arguments, the command would end before it reads its variables.
fn needed<'a>(path: &[&str], file: &'a str) -> Vec<&'a str> {
    const ID: &str = "000000000000000000000001";
    match path {
        ["recruiter-worker"] => vec!["--builtins"],
        ["recruiter", "enqueue"] => vec!["--class", "a"],
        // They start a MongoDB, which they do not find.
        ["recruiter", "dev" | "demo" | "bench", ..] => vec!["--mongod", "/nowhere"],
        ["recruiter", "completions"] => vec!["bash"],
        ["recruiter", "web", "token"] => vec!["a"],
        // Or it would install them here.
        ["recruiter", "units", _] => vec!["--root", "/nowhere"],
        ["recruiter", "import", "php-recruiter"] => vec!["--database", "php"],
        ["recruiter", "jobs", "list" | "export"] => vec![],
        ["recruiter", "jobs", "change"] => vec![ID, "--priority", "5"],
        ["recruiter", "files", "list"] | ["recruiter", "jobs", _] | ["recruiter", "graph", "show" | "wait" | "cancel" | "retry"] => {
            vec![ID]
        }
        ["recruiter", _, "list"] => vec![],
        ["recruiter", "files", _] => vec![ID, "a.txt"],
        ["recruiter", "graph", "enqueue"] | ["recruiter", "schedules", "apply"] => vec![file],
        ["recruiter", "limits", "set"] => vec!["a", "--capacity", "1"],
        ["recruiter", "groups", "set"] => vec!["a", "--weight", "2"],
        ["recruiter", "consumers", "set"] => vec!["a", "--topic", "a", "--job", r#"{"class": "a"}"#],
        ["recruiter", "workers", _] => vec!["--all"],
        ["recruiter", "publish"] => vec!["a", "{}"],
        ["recruiter", "pause" | "resume"] => vec!["group:a"],
        ["recruiter", "web", _] => vec!["a"],
        ["recruiter", "subscribe"] | ["recruiter", "limits" | "schedules" | "groups" | "consumers" | "redaction", _] => vec!["a"],
        _ => vec![],
    }
}

/// With empty variables each command gets as far as without them, to a MongoDB that does not answer. Returns the number of variables.
fn check_empty(path: &[&str]) -> usize {
    let (name, below) = path.split_first().unwrap();
    let (variables, commands) = variables_and_commands(name, below);
    let commands = commands.iter().filter(|command| command.as_str() != "help");
    let of_commands: usize = commands.clone().map(|command| check_empty(&[path, &[command.as_str()]].concat())).sum();
    if commands.count() == 0 {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(&file, if path.contains(&"apply") { "namespace = \"a\"\n" } else { r#"{"jobs": {"a": {"class": "a"}}}"# }).unwrap();
        let needed = needed(path, file.path().to_str().unwrap());
        let (nowhere, code) = match needed[..] {
            ["--mongod", _] => (&[][..], 1),
            // They need no MongoDB.
            ["bash"] => (&[][..], 0),
            ["--root", _] => (&[][..], 2),
            // It needs a terminal.
            _ if path == ["recruiter", "top"] => (&[][..], 2),
            _ if path == ["recruiter", "web", "token"] => (&[][..], 0),
            // Standard input has no password.
            _ if path == ["recruiter", "web", "password"] => (&[][..], 2),
            _ if path.iter().any(|command| command.contains("config")) => (&[][..], 0),
            _ => (&["--uri", "mongodb://127.0.0.1:1/x", "--connect-timeout", "1ms"][..], 69),
        };
        let args = [below, &needed, nowhere].concat();
        let empty: Vec<(&str, &str)> = variables.iter().map(|variable| (variable.as_str(), "")).collect();
        for variables in [&[][..], &empty] {
            let said = run(name, &args, variables);
            assert_eq!(said.code, code, "{path:?} {variables:?}: {}", said.err);
        }
    }
    of_commands + variables.len()
}

#[test]
fn an_empty_variable_is_as_if_it_were_not_set() {
    let checked = ["recruiter", "recruiter-cleaner", "recruiter-worker", "examples/mailer"].map(|name| check_empty(&[name]));
    assert!(checked[0] > 150 && checked[1..].iter().all(|count| *count > 8), "{checked:?}");
    let said = run("recruiter", &["jobs", "list", "--connect-timeout", "1ms"], &[("MONGODB_URI", "")]);
    assert_ne!(said.code, 2, "the default address: {}", said.err);
}

#[tokio::test(flavor = "multi_thread")]
async fn blanks_around_names_are_removed_or_refused() {
    let database = TestDatabase::new().await;
    let worker = Process::on(&database, "recruiter-worker", &["--builtins", "--work-on", "mail, reports\n"]);
    let entry = async || database.raw("roster").find_one(doc! {}).await.unwrap();
    let entry: Document = wait_for(SOON, "it registers", entry).await;
    assert_eq!(entry.get_array("work_on").unwrap(), &["mail".into(), "reports".into()]);
    drop(worker);
    recruiter(&database, &["consumers", "set", "a", "--topic", "orders.*, refunds.*", "--job", r#"{"class": "a"}"#]).succeeded();
    let patterns = database.only("consumers", doc! {}).await.to_string();
    assert!(patterns.contains("\"refunds.*\""), "{patterns}");
    assert_eq!(recruiter(&database, &["limits", "set", " printer\n", "--capacity", "1"]).code, 0);
    assert_eq!(database.count("limits", doc! { "_id": "printer" }).await, 1);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("schedules.toml");
    fs::write(&file, "namespace = \"n\"\n[schedules.s]\nevery = \"1d\"\njob = { class = \"mail\" }\n").unwrap();
    // Commands about one thing find the same one.
    for (args, said) in [
        (&["pause", "group:mail\n"][..], "paused group:mail"),
        (&["resume", "group:mail\n"], "resumed group:mail"),
        (&["pause", "line:a \n"], "paused line:a :"),
        (&["resume", "line:a \n"], "resumed line:a \n"),
        (&["groups", "why", " mail"], "no job waits in mail\n"),
        (&["limits", "show", "printer\n"], "printer: at most 1 at a time"),
        (&["limits", "remove", " printer"], "removed the limit of printer"),
        (&["consumers", "reset", "a\n"], "a continues"),
        (&["consumers", "remove", " a"], "removed the consumer group a"),
        (&["schedules", "apply", file.to_str().unwrap()], ""),
        (&["schedules", "show", "s\n"], "s"),
        (&["schedules", "pause", " s"], "s"),
        (&["schedules", "resume", "s "], "s"),
        (&["schedules", "run", "s\n"], ""),
        (&["schedules", "remove", " s"], "s"),
        (&["jobs", "list", "--class", "mail\n", "--group", " generic"], "mail"),
        (&["jobs", "cancel", "--class", "mail\n", "--yes"], "1 cancelled"),
        (&["jobs", "retry", "--why", " cancelled\n", "--yes"], "1 enqueued again"),
        (&["enqueue", "--class", "mail", "--tag", "a b ", "--urn", "u"], ""),
        (&["jobs", "list", "--tag", "a b \n", "--urn", "u\n"], "mail"),
    ] {
        let done = recruiter(&database, args);
        assert!(done.code == 0 && done.out.contains(said), "{args:?}: {}{}", done.out, done.err);
    }
    let store = store(&database).await;
    // A line is resumed whatever its key ends in.
    for key in ["b", "b\n"] {
        store.pauses().pause(&Paused::Line(key.into()), "ada", None).await.unwrap();
    }
    for (what, left) in [("line:b\n", 1), ("line:b\n", 0)] {
        recruiter(&database, &["resume", what]).succeeded();
        assert_eq!(database.count("pauses", doc! { "_id": { "$ne": "line:b\n" } }).await, left);
    }
    assert!(store.limits().set("printer ", Limit::capacity(1)).await.is_err());
    assert!(NewJob::of_class("a", doc! {}).limit("printer ").enqueue(&store).await.is_err());
    assert!(store.pauses().pause(&Paused::Group("mail ".into()), "ada", None).await.is_err());
    for args in [
        &["enqueue", "--class", "mail\n"][..],
        &["enqueue", "--class", "mail", "--group", " mail"],
        &["pause", "group: mail"],
        &["jobs", "list", "--log", "warning"],
        &["publish", " orders.new", "{}"],
        &["enqueue", "--class", "a", "--unique-for", "1h"],
    ] {
        let said = recruiter(&database, args);
        assert_eq!(said.code, 2, "{args:?}: {}", said.err);
        let named = ["blank", "`warning` is not a level", "--unique-for is about a unique job"];
        assert!(named.iter().any(|named| said.err.contains(named)), "{args:?}: {}", said.err);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_are_told_what_a_change_has_done() {
    let (database, store) = prepared().await;
    let job = NewJob::of_class("a", doc! {}).enqueue(&store).await.unwrap().id.to_string();
    let orders = ["consumers", "set", "orders", "--topic", "orders.*", "--job", r#"{"class": "a"}"#];
    for (args, name, outcome) in [
        (&["limits", "set", "printer", "--capacity", "1"][..], "printer", "set"),
        (&["limits", "remove", "printer"], "printer", "removed"),
        (&["pause", "group:mail"], "group:mail", "paused"),
        (&["pause", "group:mail"], "group:mail", "paused-before"),
        (&["resume", "group:mail"], "group:mail", "resumed"),
        (&["resume", "group:mail"], "group:mail", "not-paused"),
        (&orders, "orders", "set"),
        (&["consumers", "reset", "orders"], "orders", "reset"),
        (&["consumers", "remove", "orders"], "orders", "removed"),
        (&["files", "put", &job, "notes"], "notes", "stored"),
        (&["files", "delete", &job, "notes"], "notes", "deleted"),
        (&["publish", "orders.new", "{}"], "orders.new", "published"),
    ] {
        let said = recruiter(&database, &[args, &["--json"]].concat()).objects().remove(0);
        let named = said.get("name").unwrap_or(&said["topic"]);
        assert_eq!((named.as_str(), said["outcome"].as_str()), (Some(name), Some(outcome)), "{args:?}");
    }
}

/// The output of this program of the shell, in which `$0` is `recruiter`.
async fn shell(database: &TestDatabase, text: &str, meanwhile: impl AsyncFn()) -> Output {
    let mut child = Command::new("sh");
    child.args(["-c", text]).arg(binary("recruiter")).env("MONGODB_URI", database.uri()).env("RECRUITER_CONNECT_TIMEOUT", "1m");
    let mut child = child.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let ended = async || {
        meanwhile().await;
        child.try_wait().unwrap().is_some()
    };
    wait_until(SOON, "the pipe ends", ended).await;
    child.wait_with_output().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_pipe_ends_what_follows() {
    let (database, store) = prepared().await;
    store.publish_message("a.b", &doc! { "n": 1 }).await.unwrap();
    // There is no second message.
    let said = shell(&database, "\"$0\" subscribe 'a.*' --since 1m | head -n 1", async || {}).await;
    assert!(String::from_utf8_lossy(&said.stdout).contains("a.b") && said.stderr.is_empty(), "{said:?}");
    let enqueue = async || {
        NewJob::of_class("a", doc! {}).enqueue(&store).await.unwrap();
    };
    let said = shell(&database, "\"$0\" events --follow | head -n 1", enqueue).await;
    assert!(!said.stdout.is_empty() && said.stderr.is_empty(), "{said:?}");
    let many = (0..2_000).map(|n| NewJob::of_class("a", doc! { "n": n, "text": "x".repeat(200) }));
    store.enqueue_many(many).await.unwrap();
    let said = shell(&database, "\"$0\" jobs export --state waiting | head -n 1", async || {}).await;
    assert_eq!(String::from_utf8_lossy(&said.stdout).lines().count(), 1);
    assert!(said.stderr.is_empty(), "{said:?}");
    // The end of the file is missing, and nobody reads so far.
    let job = NewJob::of_class("a", doc! {}).enqueue(&store).await.unwrap().id;
    store.put_file(job, "large", "x".repeat(4_000_000).as_bytes()).await.unwrap();
    assert_eq!(database.raw("payloads.chunks").delete_many(doc! { "n": { "$gte": 8 } }).await.unwrap().deleted_count, 8);
    let said = shell(&database, &format!("\"$0\" files get {job} large | head -c 1"), async || {}).await;
    assert!(said.stdout.len() == 1 && said.stderr.is_empty(), "{said:?}");
    database.until("metadata", doc! { "_id": "subscribers", "by": { "$nin": [{}, null] } }, 0, "no subscription is left").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_graph_that_was_cancelled_has_not_succeeded() {
    let (database, directory) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
    let file = directory.path().join("graph.json");
    let elsewhere = NewJob::of_class("b", doc! {}).enqueue(&*store(&database).await).await.unwrap().id;
    for jobs in [
        r#"{"x": {"class": "a"}, "y": {"class": "a", "waits_for": ["x"]}}"#.to_owned(),
        format!(r#"{{"x": {{"class": "a", "waits_for": ["{elsewhere}"]}}}}"#),
    ] {
        fs::write(&file, format!(r#"{{"jobs": {jobs}}}"#)).unwrap();
        let said = recruiter(&database, &["graph", "enqueue", file.to_str().unwrap()]).succeeded();
        let graph = said.out.trim();
        recruiter(&database, &["jobs", "cancel", "--class", "a", "--state", "waiting", "--yes"]).succeeded();
        let _recruiter = Process::on(&database, "recruiter", &["run"]);
        let said = recruiter(&database, &["graph", "wait", graph, "--timeout", "2m"]);
        assert_eq!(said.code, 3, "{} {}", said.out, said.err);
    }
}
