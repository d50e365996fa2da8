//! What an operator has redacted is in no output of any program, while the jobs themselves keep their true values.

use std::{fs, path::Path};

use bson::{Document, doc};
use recruiter_common::{
    JobId, NewJob,
    store::{FollowedRedaction, REDACTED, Redaction, RedactionRule},
};
use recruiter_tests::{
    local::{prepared, store},
    mongo::TestDatabase,
    mongosh,
    processes::{Process, Setup, System},
    wait::{SOON, wait_until},
};

use super::{
    cli::{Said, recruiter},
    tidy::root,
};

const SECRET: &str = "s3cr3t-of-ada";

/// Programs that repeat their parameters wherever they can.
const WORKABLES: &str = r#"
[workables."shop.pay"]
command = ["sh", "-c", 'read line; for what in "" "progress: 40%" "checkpoint:" "log:" "extend:"; do echo "$what $line" >&2; done; exit 7']
messages = "stderr"
log_stderr = true

[workables."shop.echo"]
command = ["cat"]

[workables."shop.bot"]
command = ["python3", "bot.py"]
mode = "long-lived"
log_stderr = true
"#;

const BOT: &str = r#"
import json, os, sys, time
for line in sys.stdin:
    job = json.loads(line)
    if "job" not in job:
        continue
    secret = job["parameters"]["card"]
    print(json.dumps({"id": job["id"], "extend_ms": secret, "progress": {"percent": 10, "text": secret}}), flush=True)
    while not os.path.exists("told"):
        time.sleep(0.02)
    print(json.dumps({"id": job["id"], "error": {"class": "Refused", "message": secret, "trace": secret}}), flush=True)
    time.sleep(0.3)
    print("between jobs: " + secret, file=sys.stderr, flush=True)
"#;

/// What programs have written, and where.
#[derive(Default)]
struct Heard(Vec<(String, String)>);

impl Heard {
    fn run(&mut self, database: &TestDatabase, args: &[&str]) -> Said {
        let said = recruiter(database, args);
        self.0.push((args.join(" "), format!("{}{}", said.out, said.err)));
        said
    }

    /// Runs a command, for people and for programs.
    fn ask(&mut self, database: &TestDatabase, args: &[&str]) {
        self.run(database, args);
        self.run(database, &[args, &["--json"]].concat());
    }

    #[track_caller]
    fn has_no_secret(&self) {
        let leaks: Vec<String> = self.0.iter().filter(|(_, text)| text.contains(SECRET)).map(|(place, _)| place.clone()).collect();
        let shown: Vec<&str> = self.0.iter().flat_map(|(_, text)| text.lines()).filter(|line| line.contains(SECRET)).collect();
        assert!(leaks.is_empty(), "it is shown by {leaks:#?}\n{shown:#?}");
    }
}

fn enqueue(database: &TestDatabase, class: &str, more: &[&str]) -> String {
    let said = recruiter(database, &[&["enqueue", "--class", class], more].concat()).succeeded();
    said.out.trim().to_owned()
}

fn files(directory: &Path) -> [String; 3] {
    fs::write(directory.join("bot.py"), BOT).unwrap();
    let graph = format!(r#"{{"jobs": {{"a": {{"class": "sleep", "parameters": {{"ms": "{SECRET}"}}}}}}}}"#);
    let job = format!("{{ class = \"sleep\", parameters = {{ ms = \"{SECRET}\" }} }}");
    let schedules = format!("namespace = \"n\"\n[schedules.nightly]\nevery = \"1d\"\njob = {job}\n");
    [("workables.toml", WORKABLES), ("graph.json", &graph), ("schedules.toml", &schedules)].map(|(name, text)| {
        fs::write(directory.join(name), text).unwrap();
        directory.join(name).to_str().unwrap().to_owned()
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_is_in_no_output_of_any_program_and_stays_in_the_jobs() {
    let (database, directory) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
    let [workables, graph, schedules] = files(directory.path());
    let mut heard = Heard::default();
    drop(store(&database).await);
    heard.run(&database, &["redaction", "set", "sleep", "ms"]).succeeded();
    heard.run(&database, &["redaction", "set", "shop.*"]).succeeded();
    let follower = ["--json", "--log=debug"].map(|more| Process::on(&database, "recruiter", &["events", "--follow", more]));
    database.until("metadata", doc! { "_id": "subscribers" }, 1, "events are asked for").await;
    let log = ["--log", "debug"];
    let worker = [&["--builtins", "--config", &workables][..], &log].concat();
    let system = System::start(&database, Setup { workers: 1, recruiter: &log, cleaner: &log, worker: &worker });
    database.until("roster", doc! { "available": true }, 1, "the worker is there").await;

    let (ms, card) = (format!(r#"{{"ms": "{SECRET}", "note": "plain"}}"#), format!(r#"{{"card": "{SECRET}"}}"#));
    let wrong = enqueue(&database, "sleep", &["--parameters", &ms, "--unique-by", "ms", "--retry", "1", "--retry-delay", "1ms"]);
    let items = enqueue(&database, "sleep", &["--items", &format!("[{ms}]")]);
    let programs = ["shop.pay", "shop.echo", "shop.bot"].map(|class| enqueue(&database, class, &["--parameters", &card]));
    database.until("events", doc! { "events.progress.text": SECRET }, 1, "an event has the progress").await;
    fs::write(directory.path().join("told"), "").unwrap();
    let postponed = enqueue(&database, "sleep", &["--parameters", &ms, "--after", "1h", "--unique-by", "ms", "--unique-for", "1h"]);
    let of_graph = recruiter(&database, &["graph", "enqueue", &graph]).succeeded().out.trim().to_owned();
    heard.ask(&database, &["schedules", "apply", &schedules]);
    heard.ask(&database, &["enqueue", "--class", "shop.echo", "--parameters", &card, "--wait"]);
    heard.ask(&database, &["graph", "wait", &of_graph]);
    database.until("archived", doc! {}, 8, "all but one have ended").await;

    // A retry has the true values.
    let archived = database.all("archived", doc! { "_id": wrong.parse::<JobId>().unwrap() }).await;
    let retried = heard.run(&database, &["jobs", "retry", &wrong, "--json", "--set", r#"{"note": "edited"}"#]).succeeded();
    assert!(retried.out.contains("new_id"), "{}", retried.out);
    let again = doc! { "workable.parameters": { "ms": SECRET, "note": "edited" }, "attempts": { "$gte": 1 } };
    database.until("archived", again, 1, "it was retried with its parameters").await;
    let before = archived[0].get_document("last_execution").unwrap().get_str("message").unwrap();
    assert!(before.contains(SECRET), "the stored error quotes it: {before}");

    let ids = [&[wrong.clone(), items, postponed][..], &programs].concat();
    look(&mut heard, &database, &ids, &of_graph);
    heard.0.push(("mongosh".into(), mongosh::eval(database.uri(), &in_shell(&wrong, false))));
    let logs: Vec<&Process> = system.workers.iter().chain([&system.recruiter, &system.cleaner]).chain(&follower).collect();
    wait_until(SOON, "the program has written between jobs", async || logs[0].stderr().contains("INFO standard error line=\"[redacted]\""))
        .await;
    for log in logs {
        heard.0.push((format!("process {}", log.pid()), format!("{}{}", log.stdout(), log.stderr())));
    }
    heard.has_no_secret();
    assert!(heard.0.iter().all(|(_, text)| !text.contains("not implemented")), "an unknown command");
    shown_with_reveal(&database, &wrong, &programs[1], &of_graph);
    assert!(mongosh::eval(database.uri(), &in_shell(&wrong, true)).contains(SECRET), "revealed in mongosh");
    system.stop().await;
}

/// Runs every command that shows something of jobs.
fn look(heard: &mut Heard, database: &TestDatabase, ids: &[String], graph: &str) {
    for args in [
        &["jobs", "list", "--limit", "100"][..],
        &["jobs", "list", "--state", "archived"],
        &["jobs", "retry", "--all", "--dry-run"],
        &["jobs", "cancel", "--all", "--dry-run"],
        &["schedules", "list"],
        &["schedules", "show", "nightly"],
        &["graph", "show", graph],
        &["graph", "retry", graph, "--dry-run"],
        &["events", "--since", "1h"],
        &["groups", "list"],
        &["groups", "why", "generic"],
        &["limits", "list"],
        &["consumers", "list"],
        &["audit"],
        &["pauses"],
        &["roster"],
        &["stats"],
        &["doctor"],
        &["redaction", "list"],
    ] {
        heard.ask(database, args);
    }
    for id in ids {
        for command in ["show", "why"] {
            heard.ask(database, &["jobs", command, id]);
        }
        heard.ask(database, &["jobs", "wait", id, "--timeout", "1ms"]);
        heard.ask(database, &["files", "list", id]);
    }
    let export = heard.run(database, &["jobs", "export", "--state", "archived"]);
    assert!(
        export.code == 1 && export.out.is_empty() && export.err.contains("with --reveal, its line has the true values"),
        "{}",
        export.err
    );
}

fn in_shell(id: &str, reveal: bool) -> String {
    let load = format!("load({:?})", root().join("shell/recruiter.js").display().to_string());
    format!(
        "recruiterReveal = {reveal}; {load}; print(EJSON.stringify([jobs.failed(), jobs.story('{id}'), jobs.why('{id}'), jobs.running()]))"
    )
}

/// Names and what is not redacted stay visible; with `--reveal` everything is.
fn shown_with_reveal(database: &TestDatabase, wrong: &str, echo: &str, graph: &str) {
    let shown = recruiter(database, &["jobs", "show", wrong]).succeeded().out;
    assert!(shown.contains(r#"{"ms":"[redacted]","note":"plain"}"#), "{shown}");
    assert!(shown.contains("    parameters: [redacted]\n"), "the class of the error is shown: {shown}");
    for args in [
        &["jobs", "show", wrong][..],
        &["jobs", "show", wrong, "--json"],
        &["jobs", "list"],
        &["jobs", "list", "--json"],
        &["jobs", "wait", echo],
        &["jobs", "export", "--state", "archived"],
        &["graph", "show", graph],
        &["graph", "wait", graph],
        &["schedules", "list", "--json"],
        &["schedules", "show", "nightly"],
        &["events", "--since", "1h"],
    ] {
        let said = recruiter(database, &[args, &["--reveal"]].concat());
        assert!(said.out.contains(SECRET), "{args:?}: {}{}", said.out, said.err);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_are_replaced_removed_and_checked() {
    let (database, store) = prepared().await;
    let long = "x".repeat(257);
    for (args, problem) in [
        (&["*.mail"][..], "has a `*` that is not at its end"),
        (&["a**"], "has a `*` that is not at its end"),
        (&[""], "a name is empty"),
        (&[&long], "has 257 bytes, and 256 is the limit"),
        (&["mail", &long], "the name of a parameter has 257 bytes"),
    ] {
        let said = recruiter(&database, &[&["redaction", "set"], args].concat());
        assert!(said.code == 2 && said.err.contains(problem), "{args:?}: {} {}", said.code, said.err);
    }
    assert_eq!(store.redaction().await.unwrap(), Redaction::default());
    assert_eq!(recruiter(&database, &["redaction", "list"]).succeeded().out, "nothing is redacted\n");
    let hostile = ["a.$b", "", "$where", "ünï.ço∂e", "a\u{1b}[2J"];
    recruiter(&database, &[&["redaction", "set", "$c.d"], &hostile[..]].concat()).succeeded();
    recruiter(&database, &["redaction", "set", "[?].*", "to"]).succeeded();
    recruiter(&database, &["redaction", "set", "[?].*", "token"]).succeeded();
    let rules = store.redaction().await.unwrap().rules().to_vec();
    let texts = |keys: &[&str]| keys.iter().map(ToString::to_string).collect::<Vec<_>>();
    let expected = [("$c.d", &hostile[..]), ("[?].*", &["token"])].map(|(class, keys)| RedactionRule::new(class, texts(keys)).unwrap());
    assert_eq!(rules, expected);
    let listed = recruiter(&database, &["redaction", "list", "--json"]).objects();
    assert_eq!((&listed[1]["name"], &listed[1]["parameters"]), (&"[?].*".into(), &serde_json::json!(["token"])));

    let parameters = doc! { "a.$b": 1, "": [1], "$where": { "b": SECRET }, "ünï.ço∂e": null, "plain": "p" };
    let jobs = ["$c.d", "$c.dd", "[?].x"].map(|class| NewJob::of_class(class, parameters.clone()));
    store.enqueue_many(jobs).await.unwrap();
    let shown = recruiter(&database, &["jobs", "list", "--json"]).objects();
    let of = |class: &str| shown.iter().find(|job| job["workable"]["class"] == class).unwrap()["workable"]["parameters"].clone();
    let hidden = serde_json::json!({ "a.$b": REDACTED, "": REDACTED, "$where": REDACTED, "ünï.ço∂e": REDACTED, "plain": "p" });
    assert_eq!(of("$c.d"), hidden);
    assert!(of("$c.dd").to_string().contains(SECRET) && of("[?].x")["plain"] == "p", "{shown:?}");

    let removed = recruiter(&database, &["redaction", "remove", "$c.d", "--json"]).objects();
    assert_eq!(removed[0]["outcome"], "removed");
    assert!(recruiter(&database, &["redaction", "remove", "$c.d"]).succeeded().out.contains("there is no rule for $c.d"));
    assert_eq!(store.redaction().await.unwrap().rules(), &expected[1..]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_that_are_not_valid_redact_everything() {
    let (database, store) = prepared().await;
    let job = NewJob::of_class("mail", doc! { "to": SECRET }).enqueue(&store).await.unwrap().id.to_string();
    for rules in [
        doc! {},
        doc! { "rules": "mail" },
        doc! { "rules": [{ "class": 5 }] },
        doc! { "rules": [{ "class": "other", "key": ["to"] }] },
        doc! { "rules": [{ "class": "*.other" }] },
    ] {
        let metadata = database.raw("metadata");
        metadata.replace_one(doc! { "_id": "redaction" }, rules.clone()).upsert(true).await.unwrap();
        for args in [&["jobs", "show", &job][..], &["jobs", "show", &job, "--json"]] {
            let said = recruiter(&database, args).succeeded();
            assert!(said.out.contains(REDACTED) && !said.out.contains(SECRET), "{rules}: {}", said.out);
            assert!(
                said.err.contains("the rules of redaction are not valid") && said.err.contains("`redaction` in `metadata`"),
                "{}",
                said.err
            );
        }
    }
}

/// Documents that are no jobs, written past the validator, are not shown either; a class that cannot be read could be any.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_document_shows_no_secret() {
    let (database, store) = prepared().await;
    store.set_redaction(&RedactionRule::new("sleep", []).unwrap()).await.unwrap();
    let workables: [bson::Bson; 6] = [
        doc! { "class": "sleep", "parameters": SECRET }.into(),
        doc! { "class": "sleep", "parameters": [SECRET] }.into(),
        doc! { "class": "sleep", "items": SECRET }.into(),
        doc! { "class": 5, "parameters": { "to": SECRET } }.into(),
        doc! { "parameters": { "to": SECRET } }.into(),
        SECRET.into(),
    ];
    let mut ids = Vec::new();
    for workable in workables {
        let mut job: Document = recruiter_tests::factory::minimal_job("sleep");
        job.insert("workable", workable);
        ids.push(job.get_object_id("_id").unwrap().to_hex());
        recruiter_tests::factory::insert_unvalidated(&database, vec![job]).await;
    }
    let mut heard = Heard::default();
    heard.ask(&database, &["jobs", "list"]);
    for id in &ids {
        heard.ask(&database, &["jobs", "show", id]);
    }
    assert!(heard.0.iter().skip(2).all(|(_, text)| text.contains(REDACTED)), "{:?}", heard.0);
    for id in &ids {
        heard.ask(&database, &["jobs", "why", id]);
    }
    let log = ["--log", "debug"];
    let system = System::start(&database, Setup { worker: &["--builtins", "--log", "debug"], recruiter: &log, ..Setup::default() });
    // Their classes can be read, so a worker gets them.
    for id in &ids[..3] {
        database.archived(id.parse::<JobId>().unwrap()).await;
    }
    heard.0.push(("the worker".into(), system.workers[0].stderr()));
    heard.has_no_secret();
    system.stop().await;
}

/// A worker that runs, and programs that show jobs for a long time.
#[tokio::test(flavor = "multi_thread")]
async fn running_programs_follow_the_rules() {
    let (database, store) = prepared().await;
    let system = System::start(&database, Setup::default());
    let (mut followed, mut reveals) = (store.followed_redaction().await.unwrap(), FollowedRedaction::nothing());
    let fail = || NewJob::of_class("fail", doc! { "class": "Down", "message": SECRET });
    let first = fail().enqueue(&store).await.unwrap().id;
    database.archived(first).await;
    let worker = &system.workers[0];
    wait_until(SOON, "the failure is logged", async || worker.stderr().contains(SECRET)).await;
    assert!(!followed.current().await.concerns("fail"));
    store.set_redaction(&RedactionRule::new("fail", []).unwrap()).await.unwrap();
    wait_until(SOON, "a failure is redacted", async || {
        let job = fail().enqueue(&store).await.unwrap().id;
        database.archived(job).await;
        worker.stderr().contains(REDACTED)
    })
    .await;
    wait_until(SOON, "a reader has the rule", async || followed.current().await.concerns("fail")).await;
    assert!(!reveals.current().await.concerns("fail"), "with --reveal");
    system.stop().await;
}

/// As after a restore of `metadata` alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_document_with_rules_belongs_to_recruiter() {
    let (database, store) = prepared().await;
    store.set_redaction(&RedactionRule::new("mail", []).unwrap()).await.unwrap();
    database.raw("scheduled").drop().await.unwrap();
    database.raw("metadata").delete_one(doc! { "_id": "collections" }).await.unwrap();
    recruiter(&database, &["enqueue", "--class", "mail"]).succeeded();
    assert!(recruiter(&database, &["redaction", "list"]).succeeded().out.contains("all parameters"));
}
