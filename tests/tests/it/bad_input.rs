//! Bad input and odd connections of the real binaries, and documents that a foreign program has changed: the exit code, the message, and
//! the neighbours unharmed.

use std::time::Duration;

use bson::{Bson, Document, doc, oid::ObjectId};
use futures_util::future::join_all;
use recruiter_common::{NewJob, RetryForever, RetryManyTimes, WorkerId, ids::StartId};
use recruiter_dev::embedded::{EmbeddedMongo, Options};
use recruiter_tests::{
    factory::{insert_unvalidated, minimal_job},
    fail_points::FailPoint,
    local::{ids, prepared, store},
    mongo::{PASSWORD, TestDatabase, USER, own_mongod, standalone_mongod, temporary},
    oracle::number,
    processes::{Process, Setup, System},
    replica_set::ReplicaSet,
    wait::{SOON, Stopwatch, best_of_three, wait_until, within},
};

use super::usual_settings::run;

const BINARIES: [(&str, &[&str]); 3] = [("recruiter", &["run"]), ("recruiter-cleaner", &[]), ("recruiter-worker", &["--builtins"])];

/// Runs a process to its end; returns its exit code and what it said. Without a flag for that, it waits long for MongoDB.
async fn ended(name: &str, args: &[&str], env: &[(&str, &str)]) -> (Option<i32>, String) {
    let mut process = Process::start(name, args, &[&[("RECRUITER_CONNECT_TIMEOUT", "1m")], env].concat());
    let status = process.wait_exit(SOON).await;
    (status.code(), process.stderr())
}

pub(super) fn why(document: &Document) -> &str {
    document.get_str("why").unwrap()
}

fn sleep(ms: i64) -> NewJob {
    NewJob::of_class("sleep", doc! { "ms": ms })
}

async fn until_started(database: &TestDatabase, jobs: u64) {
    database.until("scheduled", doc! { "locked": true }, jobs, "the jobs are running").await;
}

fn last<'a>(document: &'a Document, field: &str) -> &'a str {
    document.get_document("last_execution").unwrap().get_str(field).unwrap()
}

#[tokio::test]
async fn wrong_flags_are_named() {
    for (name, args) in BINARIES {
        let (code, said) = ended(name, &[args, &["--no-such-flag"]].concat(), &[]).await;
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains("--no-such-flag"), "{said}");
    }
    for (name, args, expected) in [
        ("recruiter-worker", ["--builtins", "--concurrency", "0"].as_slice(), "concurrency"),
        ("recruiter-worker", &["--builtins", "--lease", "5s"], "at least three heartbeats"),
        ("recruiter-worker", &["--builtins", "--work-on", "a\u{7f}", "--grace", "soon"], "grace"),
        ("recruiter-worker", &[], "needs --config or --builtins"),
        ("recruiter-cleaner", &["--dead-after", "1s"], "at least three polls"),
        ("recruiter", &["run", "--lease", "10ms"], "at least 1s"),
        ("recruiter", &["run", "--uri", "postgres://x"], "mongodb://"),
        ("recruiter", &["run", "--log", "nonsense=x=y"], "not a valid log filter"),
    ] {
        let (code, said) = ended(name, args, &[]).await;
        assert_eq!(code, Some(2), "{name} {args:?}: {said}");
        assert!(said.contains(expected), "{name} {args:?}: {said}");
    }
}

#[tokio::test]
async fn a_configuration_file_that_cannot_be_used_is_named_with_line_and_column() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("workables.toml");
    let path = file.display().to_string();
    for (text, place, expected) in [
        (Some("[workables.a]\ncommand = [\"true\"\n"), ":", "array"),
        (Some("[workables.a]\ncomand = [\"true\"]\n"), ":2:1:", "comand"),
        // What could change a terminal is escaped.
        (Some("[workables.a]\n\"\\u001b[31mcomand\" = 5\n"), ":2:1:", "\\u{1b}[31mcomand"),
        (Some("[workables.a]\ncommand = [\"no-such-program-at-all\"]\n"), ":2:", "no-such-program-at-all"),
        (Some("[workables.sleep]\ncommand = [\"true\"]\n"), "", "`sleep` is registered twice"),
        (None, "", "cannot read the workables file"),
    ] {
        match text {
            Some(text) => std::fs::write(&file, text).unwrap(),
            None => std::fs::remove_file(&file).unwrap(),
        }
        let (code, said) = ended("recruiter-worker", &["--builtins", "--config", &path], &[]).await;
        assert_eq!(code, Some(78), "{said}");
        assert!(said.contains(expected) && (place.is_empty() || said.contains(&format!("workables.toml{place}"))), "{said}");
    }
}

#[tokio::test]
async fn a_mongodb_that_will_not_do_is_refused_with_what_to_do() {
    let standalone = standalone_mongod().await;
    for (name, args) in BINARIES {
        let (code, said) = ended(name, args, &[("MONGODB_URI", &standalone.uri())]).await;
        assert_eq!(code, Some(77), "{said}");
        assert!(said.contains("rs.initiate()"), "{said}");
    }

    let database = TestDatabase::with_access_control().await;
    let reader = doc! { "createUser": "reader", "pwd": "pw", "roles": [{ "role": "read", "db": database.name() }] };
    database.database().client().database("admin").run_command(reader).await.unwrap();
    let as_reader = database.uri().replace(&format!("{USER}:{PASSWORD}@"), "reader:pw@");
    let as_stranger = database.uri().replace(&format!("{USER}:{PASSWORD}@"), &format!("{USER}:hunter2@"));
    let as_nobody = database.uri().replace(&format!("{USER}:{PASSWORD}@"), "").replace("&authSource=admin", "");
    for (name, args) in BINARIES {
        let (code, said) = ended(name, args, &[("MONGODB_URI", &as_stranger)]).await;
        assert_eq!(code, Some(77), "{said}");
        assert!(said.contains("does not accept the credentials") && !said.contains("hunter2"), "{said}");
        let (code, said) = ended(name, args, &[("MONGODB_URI", &as_reader)]).await;
        assert_eq!(code, Some(77), "{said}");
        assert!(said.contains("readWrite") && !said.contains(":pw@"), "{said}");
        let json: &[(&str, &str)] = &[("MONGODB_URI", &as_nobody), ("RECRUITER_LOG_FORMAT", "json")];
        let (code, said) = ended(name, args, json).await;
        assert_eq!(code, Some(77), "{said}");
        assert!(said.contains("MONGODB_URI names none"), "{said}");
        assert!(said.lines().all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()), "{said}");
    }
    // An ordinary user is enough, whose rights end with its own database.
    let writer = doc! { "createUser": "writer", "pwd": "pw", "roles": [{ "role": "readWrite", "db": database.name() }] };
    database.database().client().database("admin").run_command(writer).await.unwrap();
    let as_writer = database.uri().replace(&format!("{USER}:{PASSWORD}@"), "writer:pw@");
    let env: &[(&str, &str)] = &[("MONGODB_URI", &as_writer)];
    let running: Vec<Process> = BINARIES.iter().map(|(name, args)| Process::start(name, args, env)).collect();
    let (code, said) = ended("recruiter", &["enqueue", "--class", "sleep"], env).await;
    assert_eq!(code, Some(0), "{said}");
    database.until("archived", doc! { "why": "done" }, 1, "the job is done").await;
    drop(running);
}

/// The most common first mistakes: each error message names the remedy, and none is the driver's text.
#[tokio::test]
async fn a_replica_set_that_is_not_what_was_named_is_told_apart_from_a_server_that_is_away() {
    // A server that is there may not answer a busy machine within the timeout: then it is asked again.
    let check = async |uri: &str, code: i32, expected: &str| {
        let mut said = String::new();
        let told = async || {
            let (ended, text) = ended("recruiter", &["run", "--connect-timeout", "1s"], &[("MONGODB_URI", uri)]).await;
            said = text;
            ended == Some(code) && said.contains(expected)
        };
        assert!(within(SOON, told).await, "{said}");
        for noise in ["Kind:", "labels:", "Topology", "source: None"] {
            assert!(!said.contains(noise), "{said}");
        }
    };
    let not_initiated = EmbeddedMongo::start(Options { member: true, ..temporary() }).await.unwrap();
    let at = |mongo: &EmbeddedMongo, query: &str| format!("mongodb://127.0.0.1:{}/jobs?{query}", mongo.port());
    check(&at(&not_initiated, ""), 77, "run rs.initiate() once in mongosh").await;
    check(&at(&not_initiated, "replicaSet=rs0"), 77, "run rs.initiate() once in mongosh").await;
    let mongo = own_mongod().await;
    check(&at(&mongo, "replicaSet=wrong"), 77, "is a member of the replica set `rs0`, and MONGODB_URI has replicaSet=wrong").await;
    let standalone = standalone_mongod().await;
    check(&at(&standalone, "replicaSet=rs0"), 77, "is a standalone server").await;
    check("mongodb://127.0.0.1:1/jobs?replicaSet=rs0", 69, "(Connection refused").await;
    check("mongodb://", 2, "it looks like mongodb://user").await;
    check("mongodb://127.0.0.1:27017/jobs?w=-1", 2, "it looks like mongodb://user").await;
}

/// A look at jobs from a laptop, with a user that may do nothing else.
#[tokio::test]
async fn asking_needs_the_right_to_read_and_no_other() {
    let database = TestDatabase::with_access_control().await;
    let id = NewJob::of_class("sleep", doc! {}).enqueue(&*store(&database).await).await.unwrap().id.to_string();
    let admin = database.database().client().database("admin");
    for (user, roles) in [("reader", vec![doc! { "role": "read", "db": database.name() }]), ("nobody", vec![])] {
        admin.run_command(doc! { "createUser": user, "pwd": "pw", "roles": roles }).await.unwrap();
    }
    let as_user = |name: &str| database.uri().replace(&format!("{USER}:{PASSWORD}@"), &format!("{name}:pw@"));
    for args in [
        &["jobs", "list"][..],
        &["jobs", "show", &id],
        &["jobs", "cancel", &id, "--dry-run"],
        &["jobs", "retry", &id, "--dry-run"],
        &["roster"],
        &["stats"],
    ] {
        let (code, said) = ended("recruiter", args, &[("MONGODB_URI", &as_user("reader"))]).await;
        // A busy machine may have to wait for the connection.
        assert!(code == Some(0) && said.lines().all(|line| line.contains("waiting for it")), "{args:?}: {said}");
        let (code, said) = ended("recruiter", args, &[("MONGODB_URI", &as_user("nobody"))]).await;
        assert_eq!(code, Some(77), "{args:?}: {said}");
        assert!(said.contains("give it the role read"), "{args:?}: {said}");
    }
    let (code, said) = ended("recruiter", &["jobs", "cancel", &id], &[("MONGODB_URI", &as_user("reader"))]).await;
    assert_eq!(code, Some(77), "{said}");
    assert!(said.contains("give it the role readWrite"), "{said}");
}

#[tokio::test]
async fn asking_says_where_there_is_no_recruiter_and_makes_none() {
    let database = TestDatabase::new().await;
    let id = ObjectId::new().to_hex();
    for args in [&["jobs", "list"][..], &["jobs", "show", &id], &["jobs", "retry", &id, "--dry-run"], &["roster"], &["stats"]] {
        let (code, said) = ended("recruiter", args, &[("MONGODB_URI", database.uri())]).await;
        assert_eq!(code, Some(1), "{args:?}: {said}");
        assert!(said.contains(&format!("database `{}` of MongoDB", database.name())), "{args:?}: {said}");
    }
    assert!(database.database().list_collection_names().await.unwrap().is_empty());
}

#[tokio::test]
async fn asking_gives_up_sooner_than_working_and_in_two_lines() {
    let gives_up = async || {
        let began = Stopwatch::start();
        let defaults = [("MONGODB_URI", "mongodb://127.0.0.1:1/x"), ("RECRUITER_CONNECT_TIMEOUT", "")];
        let mut process = Process::start("recruiter", &["jobs", "list"], &defaults);
        let (code, said) = (process.wait_exit(SOON).await.code(), process.stderr());
        assert!(code == Some(69) && said.contains("within 5s") && said.lines().count() <= 2, "{code:?} {said}");
        began.elapsed()
    };
    best_of_three(Duration::from_secs(15), "giving up", gives_up).await;
}

/// At boot the resolver may come later than we do.
#[tokio::test]
async fn a_name_that_cannot_be_looked_up_yet_is_waited_for() {
    let uri = "mongodb+srv://user:hunter2@cluster0.does-not-resolve.invalid/jobs";
    let all = BINARIES.map(|(name, args)| async move {
        let (code, said) = ended(name, &[args, &["--connect-timeout", "3s"]].concat(), &[("MONGODB_URI", uri)]).await;
        assert_eq!(code, Some(69), "{said}");
        let waited = said.contains("waiting for it") && said.contains("its SRV record could not be found in DNS");
        // The machine may have no resolver that answers.
        assert!(waited || said.contains("the DNS resolver does not answer"), "{said}");
        assert!(said.contains("MongoDB at cluster0.does-not-resolve.invalid") && !said.contains("query_class"), "{said}");
        assert!(!said.contains("hunter2"), "{said}");
        // No resolver has anything to do with these.
        for malformed in ["mongodb+srv://a.example.org:27017/jobs", "mongodb+srv://a.example.org,b.example.org/jobs"] {
            let (code, said) = ended(name, args, &[("MONGODB_URI", malformed)]).await;
            assert_eq!(code, Some(2), "{said}");
        }
    });
    join_all(all).await;
}

#[tokio::test]
async fn a_mongodb_that_is_not_there_yet_is_waited_for() {
    let nowhere = "mongodb://127.0.0.1:1/x";
    join_all(BINARIES.map(|(name, args)| async move {
        let (code, said) = ended(name, &[args, &["--connect-timeout", "3s"]].concat(), &[("MONGODB_URI", nowhere)]).await;
        assert_eq!(code, Some(69), "{said}");
        assert!(said.contains("waiting for it") && said.contains("127.0.0.1:1") && said.contains("check that it runs"), "{said}");
    }))
    .await;
    let mut mongo = own_mongod().await;
    let database = TestDatabase::on(&mongo.uri()).await;
    mongo.kill().await.unwrap();
    let (recruiter, wait) = (&["--connect-timeout", "2m"], ["--builtins", "--connect-timeout", "2m"]);
    let system = System::start(&database, Setup { recruiter, cleaner: recruiter, worker: &wait, ..Setup::default() });
    wait_until(SOON, "it waits", async || system.workers[0].stderr().contains("waiting for it")).await;
    mongo.restart().await.unwrap();
    let store = store(&database).await;
    let id = NewJob::of_class("sleep", doc! {}).enqueue(&store).await.unwrap().id;
    assert_eq!(why(&database.archived(id).await), "done");
    system.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_string_of_another_driver_is_used_with_a_warning() {
    let database = TestDatabase::new().await;
    let join = if database.uri().contains('?') { "&" } else { "?" };
    let others = "compressors=snappy,zlib&zlibCompressionLevel=6&uuidRepresentation=standard&timeoutMS=5000&socketTimeoutMS=0&j=true\
                  &wtimeout=5000&tlsDisableOCSPEndpointCheck=true&tlsDisableCertificateRevocationCheck=true&maxPoolSize=0&noSuchOption=1";
    let uri = format!(" {}{join}{others}\r\n", database.uri());
    let said = run("recruiter", &["enqueue", "--class", "a"], &[("MONGODB_URI", &uri), ("RECRUITER_CONNECT_TIMEOUT", "1m")]).succeeded();
    assert_eq!(database.count("scheduled", doc! {}).await, 1, "in the database of that name");
    for option in others.split('&').map(|option| option.split('=').next().unwrap()) {
        assert!(said.err.contains(option), "{option}: {}", said.err);
    }
    for (options, problem, code) in
        [("ssl_ca_certs=/x", "write tlsCAFile", 2), ("tlsCAFile=/no/such/file&tls=true", "/no/such/file: it cannot be read", 78)]
    {
        let said = run("recruiter", &["jobs", "list"], &[("MONGODB_URI", &format!("{}{join}{options}", database.uri()))]);
        assert_eq!(said.code, code, "{}", said.err);
        assert!(said.err.contains(problem) && !said.err.contains("similar"), "{}", said.err);
    }
    let without = format!("{}{join}tls=true&connectTimeoutMS=1000", database.uri());
    let said = run("recruiter", &["jobs", "list"], &[("MONGODB_URI", &without), ("RECRUITER_CONNECT_TIMEOUT", "4s")]);
    assert_eq!(said.code, 69, "{}", said.err);
    assert!(said.err.contains("the server does not use TLS: remove tls=true"), "{}", said.err);
}

/// As with a container whose MongoDB names itself by its port inside: its names can be resolved, and do not answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_set_that_names_other_addresses_is_reached_directly() {
    let set = ReplicaSet::start(1).await;
    set.isolate(0);
    let enqueued = |options: &str| {
        let uri = format!("mongodb://{}/jobs?{options}", set.address(0));
        run("recruiter", &["enqueue", "--class", "a"], &[("MONGODB_URI", &uri), ("RECRUITER_CONNECT_TIMEOUT", "4s")])
    };
    let said = enqueued("replicaSet=rs0");
    let named = format!("names its members {}", set.uri().split(['/', '?']).nth(2).unwrap());
    assert_eq!(said.code, 69, "{}", said.err);
    assert!(said.err.matches(&named).count() >= 2 && said.err.contains("directConnection=true"), "{named}: {}", said.err);
    enqueued("directConnection=true").succeeded();
}

/// I9: each invalid document fails alone, with a reason in its own history; documents with few fields are valid.
#[tokio::test]
async fn documents_inserted_by_hand_are_done_or_fail_alone() {
    let (database, store) = prepared().await;
    let change = |set: Document| {
        let mut document = minimal_job("sleep");
        document.extend(set);
        document
    };
    let good = vec![
        minimal_job("sleep"),
        change(doc! { "colour": "blue", "workable": { "class": "sleep", "parameters": [], "colour": "blue" } }),
        change(doc! { "attempts": 0_i64, "tags": null, "urn": null, "last_execution": null, "executions": null, "retry_policy": null }),
        change(doc! { "group": "$where", "workable": { "class": "sleep", "parameters": { "$set": { "a.b": 1 }, "x.y": "$ref" } } }),
    ];
    let malformed = vec![
        change(doc! { "attempts": "three" }),
        change(doc! { "attempts": -3 }),
        change(doc! { "tags": 5 }),
        change(doc! { "retry_policy": "never" }),
        change(doc! { "executions": [5] }),
        change(doc! { "last_execution": "yesterday" }),
    ];
    let undecodable = vec![change(doc! { "workable": { "class": "sleep", "parameters": { "ms": "long" } } })];
    insert_unvalidated(&database, [good.clone(), malformed.clone(), undecodable.clone()].concat()).await;
    // Neighbours in the same rounds.
    let neighbours = ids(store.enqueue_many((0..20).map(|_| NewJob::of_class("sleep", doc! {}))).await.unwrap());
    let system = System::start(&database, Setup::default());
    for document in &good {
        let done = database.archived(document.get_object_id("_id").unwrap()).await;
        assert_eq!(why(&done), "done");
        assert_eq!(done.get("colour"), document.get("colour"), "fields of others are kept");
        assert_eq!(done.get("workable"), document.get("workable"));
    }
    for document in &malformed {
        let ended = database.archived(document.get_object_id("_id").unwrap()).await;
        assert_eq!((why(&ended), last(&ended, "class")), ("malformed", "malformed"), "{ended}");
        assert!(!last(&ended, "message").is_empty());
        assert_eq!(ended.get("attempts"), document.get("attempts").or(Some(&Bson::Int32(0))), "it was never started");
    }
    let ended = database.archived(undecodable[0].get_object_id("_id").unwrap()).await;
    assert_eq!((why(&ended), last(&ended, "class")), ("not-scheduled-by-retry-policy", "parameters"));
    assert!(last(&ended, "message").contains("ms") || last(&ended, "message").contains("u64"), "{ended}");
    for id in neighbours {
        assert_eq!(why(&database.archived(id).await), "done");
    }
    system.stop().await;
}

/// Jobs that no worker can take wait, and do not delay other jobs.
#[tokio::test]
async fn jobs_without_a_worker_wait_without_stopping_the_others() {
    let (database, store) = prepared().await;
    let priority = recruiter_common::job::Priority::MAX;
    let hostile = ["$where", "a.b", "*", "ünï", "-x", "x".repeat(256).leak()];
    let jobs = hostile.iter().flat_map(|name| {
        let class = NewJob::of_class(*name, doc! {}).in_group("mine").priority(priority);
        let group = NewJob::of_class("sleep", doc! {}).in_group(*name).priority(priority);
        std::iter::repeat_n([class, group], 30).flatten()
    });
    let waiting = ids(store.enqueue_many(jobs).await.unwrap());
    let system = System::start(&database, Setup { worker: &["--builtins", "--work-on", "mine,other"], ..Setup::default() });
    for n in 0..20 {
        let group = if n % 2 == 0 { "mine" } else { "other" };
        let id = NewJob::of_class("sleep", doc! {}).in_group(group).enqueue(&store).await.unwrap().id;
        assert_eq!(why(&database.archived(id).await), "done");
    }
    assert_eq!(database.count("scheduled", doc! { "locked": false, "attempts": 0 }).await, waiting.len() as u64);
    let all = Process::on(&database, "recruiter-worker", &["--builtins"]);
    database.until("scheduled", doc! { "group": { "$ne": "mine" } }, 0, "the groups are served").await;
    drop(all);
    system.stop().await;
}

/// A result too large for a document is dropped, and the job records that; a large one within the limits is kept.
#[tokio::test]
async fn an_outcome_that_does_not_fit_is_stored_without_its_result() {
    let ((database, store), directory) = (prepared().await, tempfile::tempdir().unwrap());
    let config = directory.path().join("workables.toml");
    let text = "[workables.big]\ncommand = [\"head\", \"-c\", \"{bytes}\", \"/dev/zero\"]\nresult_limit = \"8MiB\"\n";
    std::fs::write(&config, text).unwrap();
    let system = System::start(&database, Setup { worker: &["--builtins", "--config", &config.display().to_string()], ..Setup::default() });
    let pad = "x".repeat(4 * 1024 * 1024 - 1000);
    let big = |bytes: i64| NewJob::of_class("big", doc! { "bytes": bytes, "pad": &pad });
    let policy = RetryManyTimes::new(1, Duration::ZERO).unwrap();
    let fits = big(7 * 1024 * 1024).retry(&policy).enqueue(&store).await.unwrap().id;
    let mut small = Vec::new();
    for _ in 0..5 {
        small.push(NewJob::of_class("sleep", doc! {}).enqueue(&store).await.unwrap().id);
    }
    assert_eq!(database.archived(fits).await.get_str("result").unwrap().len(), 7 * 1024 * 1024);
    // A document that an older release let grow.
    let mut document = minimal_job("big");
    document.extend(doc! { "workable": { "class": "big", "parameters": { "bytes": 8_000_000 } }, "note": "x".repeat(10_000_000) });
    let id = document.get_object_id("_id").unwrap();
    insert_unvalidated(&database, vec![document]).await;
    let done = database.archived(id).await;
    assert_eq!(why(&done), "done");
    assert!(!done.contains_key("result") && done.contains_key("result_dropped"));
    for id in small {
        assert_eq!(why(&database.archived(id).await), "done");
    }
    system.stop().await;
}

/// I9: a date that BSON has and nothing else is no reason to search without a pause.
#[tokio::test]
async fn a_date_beyond_all_dates_and_counts_that_cannot_be_end_alone() {
    let (database, store) = prepared().await;
    let with = |field: &str, value: Bson| {
        let mut document = minimal_job("noop");
        document.insert(field, value);
        document
    };
    let date = |ms: i64| Bson::DateTime(bson::DateTime::from_millis(ms));
    let malformed = [
        with("scheduled_at", date(i64::MIN)),
        with("scheduled_at", date(-8_640_000_000_000_000)),
        with("attempts", i64::from(u32::MAX).into()),
        with("deaths", i64::from(u32::MAX).into()),
    ];
    let again = RetryManyTimes::new(2, Duration::from_millis(50)).unwrap();
    let mut interrupted = with("interruptions", 1_000.into());
    let policy = doc! { "class": "RetryManyTimes", "parameters": recruiter_common::retry_policy::RetryPolicy::parameters(&again) };
    interrupted.extend(doc! { "workable": { "class": "fail" }, "retry_policy": policy });
    insert_unvalidated(&database, [malformed.as_slice(), &[interrupted.clone()]].concat()).await;
    let neighbour = NewJob::of_class("noop", doc! {}).enqueue(&store).await.unwrap().id;
    let system = System::start(&database, Setup::default());
    for document in &malformed {
        let ended = database.archived(document.get_object_id("_id").unwrap()).await;
        assert_eq!((why(&ended), last(&ended, "class")), ("malformed", "malformed"), "{ended}");
    }
    assert_eq!(why(&database.archived(neighbour).await), "done");
    let ended = database.archived(interrupted.get_object_id("_id").unwrap()).await;
    assert_eq!((why(&ended), number(&ended, "attempts")), ("tried-too-many-times", 3), "interruptions without starts change nothing");
    system.stop().await;
}

/// I9: the validator refuses the update that would unlock a document which is older than it: the job ends, with its history.
#[tokio::test]
async fn a_job_that_is_older_than_the_validator_is_archived_when_it_cannot_be_unlocked() {
    let (database, _) = prepared().await;
    let again = doc! { "class": "RetryManyTimes", "parameters": { "retry_how_many_times": 3, "seconds_to_wait_before_retry": 0.05 } };
    let old = |class: &str, group: &str| {
        let mut document = minimal_job(class);
        document.extend(doc! { "group": group, "retry_policy": again.clone() });
        document
    };
    let mut killed = old("sleep", &"g".repeat(300));
    killed.insert("workable", doc! { "class": "sleep", "parameters": { "ms": 600_000 } });
    let failing = [old("fail", ""), old("fail", &"h".repeat(300))];
    insert_unvalidated(&database, [failing.as_slice(), &[killed.clone()]].concat()).await;
    let mut system = System::start(&database, Setup::default());
    for document in &failing {
        let ended = database.archived(document.get_object_id("_id").unwrap()).await;
        assert_eq!((why(&ended), last(&ended, "class"), number(&ended, "attempts")), ("malformed", "malformed", 1), "{ended}");
        let history = ended.get_array("executions").unwrap();
        let first = history[0].as_document().unwrap();
        assert_eq!(first.get_str("class").unwrap(), "fail", "its history is kept");
        assert!(first.contains_key("ended_at") && last(&ended, "message").contains("validation"), "{ended}");
    }
    until_started(&database, 1).await;
    system.workers.pop().unwrap().kill();
    let ended = database.archived(killed.get_object_id("_id").unwrap()).await;
    assert_eq!((why(&ended), number(&ended, "deaths")), ("malformed", 1), "{ended}");
    system.stop().await;
}

/// I9: an outcome that the archive refuses is kept by its worker, which goes on working and writes it once it can.
#[tokio::test]
async fn an_outcome_that_cannot_be_archived_waits_in_its_worker() {
    let (database, store) = prepared().await;
    let unique = doc! { "key": { "workable.class": 1 }, "name": "one_sleep", "unique": true,
    "partialFilterExpression": { "workable.class": "sleep" } };
    database.database().run_command(doc! { "createIndexes": "archived", "indexes": [unique] }).await.unwrap();
    let first = sleep(0).enqueue(&store).await.unwrap().id;
    let system = System::start(&database, Setup { worker: &["--builtins", "--heartbeat", "300ms"], ..Setup::default() });
    assert_eq!(why(&database.archived(first).await), "done");
    let refused = sleep(0).enqueue(&store).await.unwrap().id;
    let log = || system.workers[0].stderr();
    wait_until(SOON, "the worker names the job and the index", async || {
        log().lines().any(|line| line.contains(&refused.to_string()) && line.contains("one_sleep") && line.contains("stays locked"))
    })
    .await;
    for _ in 0..3 {
        let id = NewJob::of_class("noop", doc! {}).enqueue(&store).await.unwrap().id;
        assert_eq!(why(&database.archived(id).await), "done", "others are not held up");
    }
    let holds = doc! { "working_on": refused };
    assert_eq!(database.count("roster", holds).await, 1, "its worker still holds it");
    assert_eq!(database.count("scheduled", doc! { "_id": refused, "locked": true }).await, 1);
    assert!(!log().contains("no longer holds the job"), "{}", log());
    database.raw("archived").drop_index("one_sleep").await.unwrap();
    let ended = database.archived(refused).await;
    assert_eq!((why(&ended), number(&ended, "attempts")), ("done", 1));
    system.stop().await;
}

/// I9: an outcome that cannot be stored stops neither the cleaner nor the rescue of the other jobs.
#[tokio::test]
async fn one_job_that_cannot_be_archived_does_not_stop_the_cleaner() {
    // Beside the large documents of other tests its storage might have no room for one of this size.
    let database = TestDatabase::of_its_own().await;
    let store = store(&database).await;
    let mut system = System::start(&database, Setup::default());
    let large = sleep(600_000).enqueue(&store).await.unwrap().id;
    let others = ids(store.enqueue_many((0..5).map(|_| sleep(600_000))).await.unwrap());
    until_started(&database, 6).await;
    // Just below what a document may have: the end of its history does not fit any more.
    let grow = doc! { "$set": { "note": "x".repeat(16 * 1024 * 1024 - 900) } };
    // Refused while MongoDB's small cache is busy (388, too large a transaction).
    let grow = async || database.raw("scheduled").update_one(doc! { "_id": large }, grow.clone()).await.is_ok();
    wait_until(SOON, "it has grown", grow).await;
    system.workers.pop().unwrap().kill();
    for id in others {
        assert_eq!(why(&database.archived(id).await), "worker-died");
    }
    let ended = database.archived(large).await;
    assert_eq!(why(&ended), "worker-died");
    assert!(ended.contains_key("reduced") || ended.contains_key("note"));
    database.until("roster", doc! {}, 0, "the dead worker is buried").await;
    system.stop().await;
}

/// Hand-deleted roster documents and half-written locks are found by the slow sweep.
#[tokio::test]
async fn jobs_that_no_worker_in_the_roster_has_locked_are_found() {
    let (database, store) = prepared().await;
    let system = System::start(&database, Setup { workers: 0, cleaner: &["--sweep-every", "200ms"], ..Setup::default() });
    let worker = Process::on(&database, "recruiter-worker", &["--builtins"]);
    let again = RetryForever::new(Duration::from_millis(1)).unwrap();
    let orphan = sleep(600_000).retry(&again).enqueue(&store).await.unwrap().id;
    until_started(&database, 1).await;
    worker.pause();
    database.raw("roster").delete_many(doc! {}).await.unwrap();
    let half = sleep(0).enqueue(&store).await.unwrap().id;
    let lock = doc! { "$set": { "locked": true } };
    database.raw("scheduled").update_one(doc! { "_id": half }, lock).bypass_document_validation(true).await.unwrap();
    database.until("scheduled", doc! { "locked": false }, 2, "both are unlocked").await;
    let document = database.raw("scheduled").find_one(doc! { "_id": half }).await.unwrap().unwrap();
    assert!(!document.contains_key("last_execution"), "no worker had started it, so no execution crashed");
    let document = database.raw("scheduled").find_one(doc! { "_id": orphan }).await.unwrap().unwrap();
    let executions = document.get_array("executions").unwrap();
    assert_eq!(executions.len(), 1);
    assert_eq!(executions[0].as_document().unwrap().get_str("class").unwrap(), "worker-died");
    drop(worker);
    system.stop().await;
}

/// I9: a document that is damaged while its job runs is ended with its worker; its history has the problem.
#[tokio::test]
async fn a_running_job_that_is_damaged_is_archived_when_its_worker_is_dead() {
    let (database, store) = prepared().await;
    let mut system = System::start(&database, Setup { cleaner: &["--sweep-every", "200ms"], ..Setup::default() });
    let [with_roster, without] = [sleep(600_000), sleep(600_000)];
    let (with_roster, without) = (with_roster.enqueue(&store).await.unwrap().id, without.enqueue(&store).await.unwrap().id);
    until_started(&database, 2).await;
    let scheduled = database.raw("scheduled");
    let damage = scheduled.update_one(doc! { "_id": with_roster }, doc! { "$set": { "attempts": "many" } });
    damage.bypass_document_validation(true).await.unwrap();
    system.workers.pop().unwrap().kill();
    database.until("roster", doc! {}, 0, "its worker is buried").await;
    // The holder of the other is not in the roster.
    let mut copy = database.raw("archived").find_one_and_delete(doc! { "_id": without }).await.unwrap().unwrap();
    copy.extend(doc! { "attempts": "many", "locked": true, "last_execution": { "worker": WorkerId::new(), "start": StartId::new() } });
    insert_unvalidated(&database, vec![copy]).await;
    for job in [with_roster, without] {
        let job = database.archived(job).await;
        let execution = job.get_document("last_execution").unwrap();
        assert_eq!((job.get_str("why").unwrap(), execution.get_str("class").unwrap()), ("malformed", "malformed"), "{job}");
        assert!(execution.get_str("message").unwrap().contains("not a job") && execution.get_bool("crashed").unwrap(), "{job}");
    }
    assert_eq!(database.count("scheduled", doc! {}).await, 0);
    system.stop().await;
}

/// I9: an outcome that cannot be written for a while holds up no other of its worker.
#[tokio::test]
async fn a_job_that_somebody_elses_transaction_holds_delays_no_other() {
    let (database, directory) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
    let [config, lasts] = ["workables.toml", "lasts"].map(|name| directory.path().join(name).display().to_string());
    std::fs::write(&config, "[workables.held]\ncommand = ['sh', '-c', 'while [ -e \"$0\" ]; do sleep 0.1; done', '{file}']\n").unwrap();
    std::fs::write(&lasts, "").unwrap();
    let system = System::start(&database, Setup { worker: &["--builtins", "--config", &config], ..Setup::default() });
    let store = store(&database).await;
    let held = NewJob::of_class("held", doc! { "file": &lasts }).enqueue(&store).await.unwrap().id;
    until_started(&database, 1).await;
    let mut session = database.database().client().start_session().await.unwrap();
    session.start_transaction().await.unwrap();
    let scheduled = database.raw("scheduled");
    scheduled.update_one(doc! { "_id": held }, doc! { "$set": { "note": "mine" } }).session(&mut session).await.unwrap();
    std::fs::remove_file(&lasts).unwrap();
    for _ in 0..3 {
        let other = sleep(300).enqueue(&store).await.unwrap().id;
        assert_eq!(why(&database.archived(other).await), "done");
    }
    assert_eq!(database.count("archived", doc! { "_id": held }).await, 0, "it is held");
    session.abort_transaction().await.unwrap();
    assert_eq!(why(&database.archived(held).await), "done");
    system.stop().await;
}

/// A worker whose document is damaged still works: no other worker runs its jobs.
#[tokio::test]
async fn the_jobs_of_a_worker_with_a_strange_document_are_left_to_it() {
    let (database, store) = prepared().await;
    let system = System::start(&database, Setup { cleaner: &["--sweep-every", "100ms"], ..Setup::default() });
    let again = RetryForever::new(Duration::from_millis(1)).unwrap();
    let id = sleep(3_000).retry(&again).enqueue(&store).await.unwrap().id;
    until_started(&database, 1).await;
    database.raw("roster").update_many(doc! {}, doc! { "$set": { "lease_ms": "long", "classes": 5 } }).await.unwrap();
    let done = database.archived(id).await;
    assert_eq!((why(&done), number(&done, "attempts")), ("done", 1));
    system.stop().await;
}

/// A document that is no job holds no slot, and is assigned again while its way to the archive takes long. It is recorded once: two copies in
/// one batch would fail the ends of other jobs with them.
#[tokio::test]
async fn a_document_that_is_no_job_is_recorded_once() {
    let database = TestDatabase::of_its_own().await;
    let system = System::start(&database, Setup::default());
    let first = NewJob::of_class("noop", doc! {}).enqueue(&*store(&database).await).await.unwrap().id;
    database.archived(first).await;
    let slow = FailPoint::new("recruiter-worker", &["commitTransaction"]).times(1).block(Duration::from_millis(1_500));
    let slow = slow.arm(database.uri()).await;
    let mut malformed = minimal_job("noop");
    malformed.insert("tags", "no array");
    let id = malformed.get_object_id("_id").unwrap();
    insert_unvalidated(&database, vec![malformed]).await;
    wait_until(SOON, "its archive waits", async || slow.struck().await == 1).await;
    assert_eq!(why(&database.archived(id).await), "malformed");
    let logged = system.workers[0].stderr();
    assert_eq!(logged.matches("is not a job; archiving it as malformed").count(), 1, "{logged}");
    drop(slow);
    system.stop().await;
}
