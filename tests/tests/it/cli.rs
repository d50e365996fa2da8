//! What people type: `recruiter enqueue`, `jobs`, `roster` and `stats`, as the real binary on a real MongoDB.
//!
//! A test blocks while a command runs, so that its client of MongoDB needs another thread to live on.

use std::{
    io::Write as _,
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use bson::{doc, oid::ObjectId};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use recruiter_common::{JobId, NewJob, RetryForever, store::Store};
use recruiter_tests::{
    factory::{announcement, insert_unvalidated, minimal_job, started},
    fail_points::FailPoint,
    local::{prepared, store},
    mongo::TestDatabase,
    oracle::number,
    processes::{Setup, System, binary},
    wait::{SOON, wait_until},
};
use serde_json::{Value, json};

pub(super) fn spawn(database: &TestDatabase, args: &[&str]) -> Child {
    let mut command = Command::new(binary("recruiter"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("RECRUITER_")) {
        command.env_remove(name);
    }
    // A busy machine may not answer within the five seconds that a command of a person waits.
    command.args(args).env("MONGODB_URI", database.uri()).env("RECRUITER_CONNECT_TIMEOUT", "1m");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The output and the exit code of a command with this standard input.
pub(super) struct Said {
    pub(super) code: i32,
    pub(super) out: String,
    pub(super) err: String,
}

impl Said {
    pub(super) fn of(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self { code: output.status.code().unwrap(), out: text(output.stdout), err: text(output.stderr) }
    }

    /// The command has succeeded.
    #[track_caller]
    pub(super) fn succeeded(self) -> Self {
        assert_eq!(self.code, 0, "{}", self.err);
        self
    }

    /// Standard output as the objects it consists of.
    pub(super) fn objects(&self) -> Vec<Value> {
        assert_eq!(self.code, 0, "{}", self.err);
        self.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn with_input(database: &TestDatabase, args: &[&str], input: &[u8]) -> Said {
    let mut child = spawn(database, args);
    let mut stdin = child.stdin.take().unwrap();
    std::thread::scope(|scope| {
        // A reader that has read enough closes the pipe.
        scope.spawn(move || stdin.write_all(input).unwrap_or_default());
        Said::of(child.wait_with_output().unwrap())
    })
}

pub(super) fn recruiter(database: &TestDatabase, args: &[&str]) -> Said {
    with_input(database, args, b"")
}

/// Lines of jobs that carry their number.
fn lines(numbers: impl IntoIterator<Item = i32>) -> Vec<String> {
    numbers.into_iter().map(|n| format!("{}\n", json!({ "class": "c", "parameters": { "n": n } }))).collect()
}

async fn numbers(database: &TestDatabase) -> usize {
    database.raw("scheduled").distinct("workable.parameters.n", doc! {}).await.unwrap().len()
}

/// A waiting, a running and a malformed job, and the worker of the running one.
async fn three_jobs(database: &TestDatabase, store: &Store) -> [ObjectId; 3] {
    let [waiting, running, malformed] = ["waiting", "running", "malformed"].map(minimal_job);
    let ids = [&waiting, &running, &malformed].map(|job| job.get_object_id("_id").unwrap());
    insert_unvalidated(database, vec![waiting, running]).await;
    let worker = announcement(4);
    store.register(&worker).await.unwrap();
    assert_eq!(started(store, worker.id, &[ids[1].into()]).await.len(), 1);
    store.heartbeat(worker.id, &[JobId::from(ids[1])], 0).await.unwrap();
    let mut malformed = malformed;
    malformed.extend(doc! { "priority": "high", "last_execution": { "class": "\u{1b}[2J" } });
    insert_unvalidated(database, vec![malformed]).await;
    ids
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn one_job_is_stored_as_its_flags_say() {
    let database = TestDatabase::new().await;
    let policy = r#"{"class": "RetryManyTimes", "parameters": {"retry_how_many_times": 3, "seconds_to_wait_before_retry": 10}}"#;
    let parameters = r#"{"z": "ü", "a": {"$numberLong": "5"}, "at": {"$date": "2030-01-31T18:00:00Z"}}"#;
    let id = "65a1b2c3d4e5f60718293a4b";
    let args = ["enqueue", "--class", "$c.d", "--parameters", parameters, "--group", "a.$b", "--priority", "7", "--id", id];
    let more = ["--at", "2030-01-31T19:00:00+01:00", "--tag", "t1", "--tag", "t2", "--urn", "u", "--retry", policy, "--json"];
    // The second time it is left alone.
    for outcome in ["new", "known-id"] {
        assert_eq!(recruiter(&database, &[args.as_slice(), &more].concat()).objects(), [json!({ "id": id, "outcome": outcome })]);
    }
    let mut job = database.only("scheduled", doc! {}).await;
    job.remove("created_at").unwrap();
    let at = bson::DateTime::parse_rfc3339_str("2030-01-31T18:00:00Z").unwrap();
    assert_eq!(
        job,
        doc! {
            "_id": ObjectId::parse_str(id).unwrap(), "done": false, "locked": false, "attempts": 0, "group": "a.$b", "priority": 7,
            "workable": { "class": "$c.d", "parameters": { "z": "ü", "a": 5_i64, "at": at }, "method": "execute" },
            "scheduled_at": at,
            "retry_policy": { "class": "RetryManyTimes", "parameters": { "retry_how_many_times": 3, "seconds_to_wait_before_retry": 10 } },
            "tags": ["t1", "t2"], "urn": "u",
        }
    );
    let said = recruiter(&database, &["enqueue", "--class", "later", "--after", "5m"]);
    assert_eq!((said.code, said.out.trim().len()), (0, 24));
    assert!(said.err.ends_with("warning: no worker is running; the job waits until there is one\n"), "{}", said.err);
    let job = database.only("scheduled", doc! { "workable.class": "later" }).await;
    let [created, due] = ["created_at", "scheduled_at"].map(|field| job.get_datetime(field).unwrap().timestamp_millis());
    assert_eq!(due - created, 300_000);
    recruiter(&database, &["enqueue", "--class", "bundle", "--items", r#"[{"n": 1}, {}]"#]).succeeded();
    let job = database.only("scheduled", doc! { "workable.class": "bundle" }).await;
    assert_eq!(job.get_document("workable").unwrap(), &doc! { "class": "bundle", "items": [{ "n": 1 }, {}], "method": "execute" });
    assert!(job.get_array("item_outcomes").unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_bad_job_is_refused_with_what_is_wrong() {
    let database = TestDatabase::new().await;
    let long = "x".repeat(10_000);
    let large = format!(r#"{{"d": "{}"}}"#, "x".repeat(100_000));
    let check = |args: &[&str], code: i32, expected: &str| {
        let said = recruiter(&database, &[&["enqueue", "--class", "c"], args].concat());
        assert_eq!(said.code, code, "{args:?}: {}", said.err);
        assert!(said.err.contains(expected), "{args:?}: {}", said.err);
    };
    check(&["--parameters", &large], 0, "");
    let misspelt = r#"{"class": "ExponentialBackoff", "parameters": {"retry_how_many_times": 3, "seconds_to_initially_wait_before_retry": 1, "jiter": 0.5}}"#;
    check(&["--retry", misspelt], 2, "ExponentialBackoff: `jiter` is unknown; did you mean `jitter`?");
    check(&["--at", "2001-01-01T00:00:00Z"], 0, "");
    check(&["--group", &long], 2, "the group of a job has 10000 bytes");
    check(&["--group", ""], 2, "the group of a job is empty");
    check(&["--items", "[]"], 2, "has no items");
    check(&["--tag", "", "--urn", "u"], 2, "the tag of a job is empty");
    check(&["--priority", "12"], 2, "12 is not in 0..=9");
    check(&["--keep", "nothing"], 2, "`nothing` is neither `all` nor `failures`");
    check(&["--priority", "-1"], 2, "-1 is not in 0..=9");
    check(&["--parameters", "[1]"], 2, "must be a JSON object");
    check(&["--parameters", r#"{"a\u0000b": 1}"#], 2, "cannot be stored");
    check(&["--at", "tomorrow"], 2, "write it like 2030-01-31T18:00:00Z");
    check(&["--after", "5"], 2, "write it like 90s, 5m or 1h 30m");
    check(&["--retry", r#"{"class": "Mine"}"#], 2, "add --custom-policy");
    check(&["--retry", r#"{"class": "Mine"}"#, "--custom-policy"], 0, "");
    check(&["--retry", r#"{"class": "RetryForever"}"#, "--custom-policy"], 2, "`seconds_to_wait_before_retry` is missing");
    check(&["--id", "x"], 2, "24 hexadecimal digits");
    assert_eq!(database.count("scheduled", doc! {}).await, 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_file_is_enqueued_up_to_its_bad_line_and_goes_on_from_there() {
    let (database, directory) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
    let path = directory.path().join("jobs.ndjson");
    let file = path.display().to_string();
    let mut content = lines(0..2_500);
    content.insert(1_000, "\r\n".into());
    content.insert(1_700, "{\"class\": \"c\", \"parametrs\": {}}\n".into());
    std::fs::write(&path, content.concat()).unwrap();
    let said = recruiter(&database, &["enqueue", "--from", &file]);
    assert_eq!((said.code, said.out.lines().count()), (1, 1_699));
    for expected in
        [format!("{file}:1701: unknown field `parametrs`"), "1699 jobs were enqueued".into(), "continue with --skip 1700".into()]
    {
        assert!(said.err.contains(&expected), "{expected:?} is not in {}", said.err);
    }
    assert_eq!(numbers(&database).await, 1_699);

    content[1_700] = lines([9_999]).concat();
    std::fs::write(&path, content.concat()).unwrap();
    let said = recruiter(&database, &["enqueue", "--from", &file, "--skip", "1700", "--json"]).objects();
    assert_eq!(said.last(), Some(&json!({ "enqueued": 802 })));
    assert_eq!((numbers(&database).await, database.count("scheduled", doc! {}).await), (2_501, 2_501));
}

/// One line is bad in each: everything before it is enqueued, nothing after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_bad_line_is_named_and_stops_nothing_before_it() {
    let check = async |bad: &[u8], expected: &str| {
        let database = TestDatabase::new().await;
        let input = [b"{\"class\": \"c\"}\n".as_slice(), bad, b"\n{\"class\": \"c\"}\n"].concat();
        let said = with_input(&database, &["enqueue", "--from", "-", "--custom-policy"], &input);
        assert_eq!((said.code, said.out.lines().count()), (1, 1), "{}", said.err);
        assert!(said.err.contains("standard input:2: ") && said.err.contains(expected), "{}", said.err);
        assert_eq!(database.count("scheduled", doc! {}).await, 1);
    };
    check(b"nonsense", "a job is one JSON object on one line").await;
    check(b"{\"class\": \"\xff\"}", "not UTF-8").await;
    check(format!("{{\"class\": \"{}\"}}", "x".repeat(20_000_000)).as_bytes(), "longer than 16777216 bytes").await;
    check(format!("{{\"class\": \"c\", \"parameters\": {{\"d\": \"{}\"}}}}", "x".repeat(5_000_000)).as_bytes(), "store the data elsewhere")
        .await;
    // No process sees these before the batch is sent.
    check(br#"{"class": "a\u0000b"}"#, "contains a NUL").await;
    check(br#"{"class": "c", "retry_policy": {"class": "Mine", "parameters": {"a\u0000": 1}}}"#, "null").await;
    let tags = vec!["\"t\""; 2_000_000].join(",");
    check(format!("{{\"class\": \"c\", \"tags\": [{tags}]}}").as_bytes(), "store the data elsewhere").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn nothing_in_a_file_is_nothing_to_do() {
    let database = TestDatabase::new().await;
    for input in ["", "\n \r\n", "\u{feff}"] {
        assert_eq!(with_input(&database, &["enqueue", "--from", "-", "--json"], input.as_bytes()).objects(), [json!({ "enqueued": 0 })]);
    }
    let said = recruiter(&database, &["enqueue", "--from", "/no/such/file"]);
    assert_eq!(said.code, 78);
    assert!(said.err.contains("cannot read /no/such/file: No such file"), "{}", said.err);
}

/// The replies to some inserts are lost after they were carried out.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_lost_reply_enqueues_nothing_twice() {
    let database = TestDatabase::of_its_own().await;
    recruiter(&database, &["stats"]);
    let fault = FailPoint::new("recruiter enqueue", &["insert"]).namespace(database.name(), "scheduled").times(3).write_concern_error(64);
    let fault = fault.arm(database.uri()).await;
    let said = with_input(&database, &["enqueue", "--from", "-"], lines(0..100).concat().as_bytes());
    assert_eq!((said.code, said.out.lines().count()), (0, 100), "{}", said.err);
    assert_eq!(fault.struck().await, 3);
    assert_eq!((numbers(&database).await, database.count("scheduled", doc! {}).await), (100, 100));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_slow_pipe_delays_no_job_and_a_signal_says_where_to_go_on() {
    let database = TestDatabase::new().await;
    let mut child = spawn(&database, &["enqueue", "--from", "-"]);
    let mut stdin = child.stdin.take().unwrap();
    for n in 1..=2 {
        stdin.write_all(lines([n]).concat().as_bytes()).unwrap();
        wait_until(SOON, "the line is enqueued while the pipe is open", async || numbers(&database).await == usize::try_from(n).unwrap())
            .await;
    }
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGINT).unwrap();
    let said = Said::of(child.wait_with_output().unwrap());
    assert_eq!((said.code, said.out.lines().count()), (130, 2));
    assert!(said.err.contains("continue with --skip 2"), "{}", said.err);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_reader_that_leaves_does_not_stop_an_import() {
    let database = TestDatabase::new().await;
    let mut child = spawn(&database, &["enqueue", "--from", "-"]);
    drop(child.stdout.take());
    child.stdin.take().unwrap().write_all(lines(0..3_000).concat().as_bytes()).unwrap();
    assert_eq!(Said::of(child.wait_with_output().unwrap()).code, 0);
    assert_eq!(numbers(&database).await, 3_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn jobs_are_listed_by_what_is_asked_for() {
    let database = TestDatabase::new().await;
    let [waiting, running, malformed] = three_jobs(&database, &store(&database).await).await;
    let mut archived = minimal_job("archived");
    let finished = archived.get_object_id("_id").unwrap();
    archived.remove("scheduled_at");
    let ended = doc! { "scheduled_at": bson::DateTime::now(), "ended_at": bson::DateTime::now() };
    archived.extend(doc! { "why": "tried-too-many-times", "tags": ["a", "b"], "urn": "$u.v", "group": "g", "last_execution": ended });
    database.raw("archived").insert_one(archived).await.unwrap();

    let check = |args: &[&str], expected: &[ObjectId]| {
        let listed = recruiter(&database, &[&["jobs", "list", "--json"], args].concat()).objects();
        let mut ids: Vec<_> = listed.iter().map(|job| job["id"].as_str().unwrap().to_owned()).collect();
        let mut expected: Vec<_> = expected.iter().map(|id| id.to_hex()).collect();
        ids.sort();
        expected.sort();
        assert_eq!(ids, expected, "{args:?}");
    };
    check(&[], &[waiting, running, malformed, finished]);
    check(&["--state", "waiting"], &[waiting, malformed]);
    check(&["--state", "running"], &[running]);
    check(&["--state", "archived"], &[finished]);
    check(&["--why", "tried-too-many-times"], &[finished]);
    check(&["--group", "g"], &[finished]);
    check(&["--group", "$g"], &[]);
    check(&["--class", "running"], &[running]);
    check(&["--tag", "b"], &[finished]);
    check(&["--urn", "$u.v"], &[finished]);
    check(&["--state", "waiting", "--tag", "b"], &[]);
    assert_eq!(recruiter(&database, &["jobs", "list", "--limit", "2", "--json"]).objects().len(), 2);

    let table = recruiter(&database, &["jobs", "list"]).out;
    for (id, expected) in [
        (waiting, ["queued", "waiting"]),
        (running, ["running", "generic"]),
        (malformed, ["malformed", "generic"]),
        (finished, ["failed", "archived"]),
    ] {
        let line = table.lines().find(|line| line.starts_with(&id.to_hex())).unwrap_or_else(|| panic!("{id} is not in {table}"));
        assert!(expected.iter().all(|word| line.contains(word)), "{table}");
    }
    assert!(table.contains("\n    tried-too-many-times\n"), "{table}");
    assert!(table.lines().all(|line| line.chars().count() <= 80) && !table.contains('\u{1b}'), "{table:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_job_is_shown_with_its_history() {
    let database = TestDatabase::new().await;
    let [waiting, running, malformed] = three_jobs(&database, &store(&database).await).await.map(ObjectId::to_hex);
    let check = |id: &str, expected: &[&str]| {
        let said = recruiter(&database, &["jobs", "show", id]);
        for expected in expected {
            assert!(said.code == 0 && said.out.contains(expected), "{expected:?} is not in {}{}", said.out, said.err);
        }
        assert!(!said.out.contains('\u{1b}'), "{:?}", said.out);
        assert_eq!(recruiter(&database, &["jobs", "show", id, "--json"]).objects()[0]["id"], json!(id));
    };
    check(&waiting, &["queued, due for ", "class        waiting", "DoNotDoItAgain", "never started"]);
    check(&running, &["running, for", " on test:1, running for", "not ended"]);
    check(&malformed, &["is malformed", "\"priority\":\"high\""]);
    let said = recruiter(&database, &["jobs", "show", &ObjectId::new().to_hex()]);
    assert!(said.code == 1 && said.err.contains("no job has the id"), "{}", said.err);
    for verb in ["show", "retry", "cancel", "delete"] {
        assert_eq!(recruiter(&database, &["jobs", verb, "x"]).code, 2);
        assert_eq!(recruiter(&database, &["jobs", verb, &ObjectId::new().to_hex()]).code, 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn retry_makes_waiting_jobs_due_and_enqueues_finished_ones_anew() {
    let database = TestDatabase::new().await;
    let [waiting, running, _] = three_jobs(&database, &store(&database).await).await.map(ObjectId::to_hex);
    let args = ["enqueue", "--class", "c", "--parameters", r#"{"n": 1}"#, "--group", "g", "--priority", "9", "--tag", "t", "--urn", "u"];
    let more = ["--retry", r#"{"class": "Mine"}"#, "--custom-policy", "--after", "1h"];
    let later = recruiter(&database, &[args.as_slice(), &more].concat()).out.trim().to_owned();
    let id = ObjectId::parse_str(&later).unwrap();
    let due_in = async || {
        database.only("scheduled", doc! { "_id": id }).await.get_datetime("scheduled_at").unwrap().timestamp_millis()
            - bson::DateTime::now().timestamp_millis()
    };

    let said = recruiter(&database, &["jobs", "retry", "--dry-run", &later]);
    assert!(said.code == 0 && said.out.contains("(dry run)") && due_in().await > 3_000_000, "{}", said.out);
    // The problems of some jobs do not stop the others.
    let unknown = ObjectId::new().to_hex();
    let said = recruiter(&database, &["jobs", "retry", &running, &unknown, &later, &waiting]);
    assert_eq!(said.code, 1);
    assert!(due_in().await <= 0);
    for (expected, text) in [(&running, "it is running in worker"), (&later, "due now instead of"), (&waiting, "already")] {
        let both = format!("{}{}", said.out, said.err);
        assert!(both.lines().any(|line| line.starts_with(expected.as_str()) && line.contains(text)), "{both}");
    }
    assert!(said.err.contains("no job has this id") && said.err.contains("2 of 4 jobs could not be retried"), "{}", said.err);

    assert_eq!(recruiter(&database, &["jobs", "cancel", &later]).code, 0);
    let objects = recruiter(&database, &["jobs", "retry", "--json", &later]).objects();
    assert_eq!((&objects[0]["id"], &objects[0]["outcome"]), (&json!(later), &json!("enqueued-again")));
    let new = ObjectId::parse_str(objects[0]["new_id"].as_str().unwrap()).unwrap();
    let (new, old) = (database.only("scheduled", doc! { "_id": new }).await, database.only("archived", doc! { "_id": id }).await);
    assert_eq!(new.get_object_id("recovered_from").unwrap(), id);
    assert_eq!(old.get_object_id("retried_as").unwrap(), new.get_object_id("_id").unwrap());
    for field in ["workable", "group", "priority", "tags", "urn", "retry_policy"] {
        assert_eq!(new.get(field), old.get(field), "{field}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn cancel_archives_what_waits_and_asks_who_runs() {
    let database = TestDatabase::new().await;
    let ids = three_jobs(&database, &store(&database).await).await;
    let [waiting, running, malformed] = ids.map(ObjectId::to_hex);
    let cancel = |more: &[&str]| recruiter(&database, &[&["jobs", "cancel", &waiting, &running, &malformed], more].concat());
    let outcomes = |said: Said| said.objects().iter().map(|one| one["outcome"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
    assert_eq!(outcomes(cancel(&["--dry-run", "--json"])), ["cancelled", "asked", "cancelled"]);
    assert_eq!(database.count("scheduled", doc! { "cancel_requested_at": null }).await, 3);

    assert_eq!(outcomes(cancel(&["--json"])), ["cancelled", "asked", "cancelled"]);
    assert!(database.only("scheduled", doc! {}).await.get_datetime("cancel_requested_at").is_ok());
    for id in [ids[0], ids[2]] {
        let archived = database.only("archived", doc! { "_id": id }).await;
        assert_eq!((archived.get_str("why").unwrap(), archived.get_bool("done").unwrap()), ("cancelled", false));
    }
    let said = cancel(&[]);
    assert!(
        said.code == 1 && said.out.contains("cancellation requested") && said.err.contains("2 of 3 jobs could not be cancelled"),
        "{}",
        said.err
    );
    assert_eq!(said.err.matches("it is archived already, as cancelled").count(), 2, "{}", said.err);
}

/// A program that would run for ten minutes, from the command to its end.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_job_can_be_cancelled_while_it_runs() {
    let (database, directory) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
    let [config, entered] = ["workables.toml", "entered"].map(|name| directory.path().join(name));
    std::fs::write(&config, "[workables.long]\ncommand = ['sh', '-c', 'touch \"$0\"; sleep 600', '{file}']\n").unwrap();
    let system = System::start(&database, Setup { worker: &["--config", config.to_str().unwrap()], ..Setup::default() });
    let again = RetryForever::new(Duration::from_millis(1)).unwrap();
    let job = NewJob::of_class("long", doc! { "file": entered.to_str().unwrap() }).retry(&again);
    let id = job.enqueue(&*store(&database).await).await.unwrap().id;
    wait_until(SOON, "it was entered", async || entered.exists()).await;
    let said = recruiter(&database, &["jobs", "cancel", &id.to_string()]);
    assert!(said.out.contains("cancellation requested"), "{}{}", said.out, said.err);
    database.until("archived", doc! { "_id": id, "why": "cancelled" }, 1, "it is cancelled").await;
    assert_eq!(number(&database.only("archived", doc! {}).await, "attempts"), 1);
    system.stop().await;
}

/// By the hint, and by the next heartbeat when the hint is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_job_can_be_cancelled_while_its_worker_drains() {
    let (database, store) = prepared().await;
    let flags = ["--builtins", "--grace", "10m", "--heartbeat", "1s"];
    let mut system = System::start(&database, Setup { worker: &flags, ..Setup::default() });
    let again = RetryForever::new(Duration::from_millis(1)).unwrap();
    let long = || NewJob::of_class("sleep", doc! { "ms": 600_000 });
    let hinted = long().retry(&again).enqueue(&store).await.unwrap().id;
    let unheard = long().enqueue(&store).await.unwrap().id;
    database.until("scheduled", doc! { "locked": true }, 2, "they run").await;
    let mut worker = system.workers.pop().unwrap();
    worker.terminate();
    wait_until(SOON, "it drains", async || worker.stderr().contains("taking no more jobs")).await;
    let said = recruiter(&database, &["jobs", "cancel", &hinted.to_string()]);
    assert!(said.out.contains("cancellation requested"), "{}{}", said.out, said.err);
    let asked = doc! { "$set": { "cancel_requested_at": bson::DateTime::now() } };
    database.raw("scheduled").update_one(doc! { "_id": unheard }, asked).await.unwrap();
    assert!(worker.wait_exit(SOON).await.success());
    for id in [hinted, unheard] {
        assert_eq!(database.count("archived", doc! { "_id": id, "why": "cancelled" }).await, 1, "{}", worker.stderr());
    }
    system.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_roster_says_who_works() {
    let (database, store) = prepared().await;
    assert_eq!(recruiter(&database, &["roster", "--json"]).objects(), [] as [Value; 0]);
    let [_, running, _] = three_jobs(&database, &store).await;
    database.raw("roster").insert_one(doc! { "odd": "document" }).await.unwrap();
    let said = recruiter(&database, &["roster"]);
    assert_eq!((said.code, said.out.lines().count()), (0, 6), "{}", said.out);
    assert!(
        said.out.contains("0/4") && said.out.contains(concat!("on all groups; ", env!("CARGO_PKG_VERSION"), "; classes x")),
        "{}",
        said.out
    );
    assert!(said.out.contains("malformed") && said.out.contains("no recruiter leads"), "{}", said.out);
    let objects = recruiter(&database, &["roster", "--json"]).objects();
    assert!(objects.iter().any(|worker| worker["working_on"][0]["$oid"] == json!(running.to_hex())), "{objects:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn statistics_count_what_is_there() {
    let (database, store) = prepared().await;
    three_jobs(&database, &store).await;
    assert_eq!(recruiter(&database, &["enqueue", "--class", "c", "--group", "later", "--after", "1h"]).code, 0);
    let now = bson::DateTime::now().timestamp_millis();
    let at = |ms: i64| bson::DateTime::from_millis(now - 10_000 + ms);
    let ended = (1..=100).map(|n| {
        let execution = doc! { "scheduled_at": at(0), "started_at": at(n), "ended_at": at(n + 50) };
        doc! { "group": "generic", "why": "done", "last_execution": execution }
    });
    database.raw("archived").insert_many(ended).await.unwrap();
    let before = doc! { "group": "old", "why": "done", "last_execution": { "ended_at": at(-100_000) } };
    database.raw("archived").insert_one(before).await.unwrap();

    let stats = &recruiter(&database, &["stats", "--json", "--overdue-after", "10s"]).objects()[0];
    let generic = json!({
        "name": "generic", "queued": 2, "overdue": 2, "postponed": 0, "waits": 0, "running": 1, "done": 100, "failed": 0, "cancelled": 0, "not_kept": 0, "done_per_second": 1.67,
        "latency_ms": { "avg": 50.5, "p50": 50, "p99": 99 }, "execution_ms": { "avg": 50.0, "p50": 50, "p99": 50 },
    });
    // The malformed job is one of those that wait.
    assert_eq!(stats["groups"][0], generic);
    assert_eq!((&stats["groups"][1]["name"], &stats["groups"][1]["postponed"]), (&json!("later"), &json!(1)));
    assert_eq!(
        (&stats["total"]["queued"], &stats["total"]["postponed"], stats["groups"].as_array().unwrap().len()),
        (&json!(2), &json!(1), 2)
    );
    assert_eq!(recruiter(&database, &["stats", "--json", "--overdue-after", "1h"]).objects()[0]["total"]["overdue"], json!(0));
    let table = recruiter(&database, &["stats"]).out;
    assert!(table.contains("(all)") && table.contains("last 60.0 s"), "{table}");
}
