//! The MongoDB roles of `shell/roles.js`: each is enough for the whole life of its program, has no right that nothing in that life uses, and
//! everything else is refused.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    sync::LazyLock,
    time::Duration,
};

use bson::{Bson, Document, doc, oid::ObjectId};
use mongodb::{Database, IndexModel, options::IndexOptions};
use recruiter_common::{
    Client, ConnectArgs, JobId, Keep, NewJob, Unique,
    control::{Change, Changed},
    messages::From,
    store::schema,
    topics::Pattern,
    unique::OnConflict,
};
use recruiter_tests::{
    factory::{again, insert_unvalidated, minimal_job},
    http::Api,
    mongo::{PASSWORD, TestDatabase, USER, in_uri},
    mongosh,
    processes::Process,
    wait::{SOON, wait_until},
};
use serde_json::Value;

use super::{cli::Said, tidy::root, usual_settings::run};

const ROLES: [&str; 6] =
    ["recruiterCleaner", "recruiterEnqueuer", "recruiterLeader", "recruiterOperator", "recruiterReader", "recruiterWorker"];

/// `Unauthorized`.
const DENIED: i32 = 13;

/// Collections, and actions on them. The empty name is the database itself, and all channels count as one.
type Rights = BTreeSet<(String, String)>;

/// A database whose server asks for a user, with the prefix of Recruiter's collections in it.
struct Place {
    database: TestDatabase,
    prefix: &'static str,
}

impl Place {
    fn named(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// What the script says.
    fn script(&self) -> String {
        let script = format!("recruiterPrefix = {:?}; load({:?})", self.prefix, root().join("shell/roles.js").display().to_string());
        mongosh::eval(self.database.uri(), &script)
    }

    /// Runs the script, and makes a user of each role, who has its name.
    async fn with_users(database: TestDatabase, prefix: &'static str) -> Self {
        let place = Self { database, prefix };
        let said = place.script();
        for role in ROLES {
            let role = place.named(role);
            assert!(said.contains(&format!("- {role} made. It is for ")), "{said}");
            place.user(&role, &[&role]).await;
        }
        place
    }

    async fn user(&self, name: &str, roles: &[&str]) {
        let made = doc! { "createUser": name, "pwd": "pw", "roles": roles };
        self.database.database().run_command(made).await.unwrap();
    }

    /// The connection string of a user of this database.
    fn uri(&self, user: &str) -> String {
        let of_user = self.database.uri().replace(&format!("{USER}:{PASSWORD}@"), &format!("{}:pw@", self.named(user)));
        of_user.replace("authSource=admin", &format!("authSource={}", in_uri(self.database.name())))
    }

    fn of(&self, user: &str) -> ConnectArgs {
        ConnectArgs::to(self.uri(user)).collection_prefix(self.prefix).timeout(SOON)
    }

    /// The database as a user sees it.
    async fn database_of(&self, user: &str) -> Database {
        mongodb::Client::with_uri_str(self.uri(user)).await.unwrap().database(self.database.name())
    }

    fn start(&self, user: &str, name: &str, args: &[&str]) -> Process {
        Process::start(name, args, &[("MONGODB_URI", &self.uri(user)), ("RECRUITER_COLLECTION_PREFIX", self.prefix)])
    }

    /// Runs a command as a user.
    fn run(&self, user: &str, args: &[&str]) -> Said {
        let env = [
            ("MONGODB_URI", self.uri(user)),
            ("RECRUITER_COLLECTION_PREFIX", self.prefix.to_owned()),
            ("RECRUITER_CONNECT_TIMEOUT", "1m".to_owned()),
        ];
        run("recruiter", args, &env.iter().map(|(name, value)| (*name, value.as_str())).collect::<Vec<_>>())
    }

    /// Runs commands that must succeed.
    #[track_caller]
    fn ran(&self, user: &str, args: &[&str]) -> String {
        let said = self.run(user, args);
        assert!(said.code == 0 && !said.err.contains("no right"), "{user} {args:?}: {} {}", said.out, said.err);
        said.out
    }

    /// The rights of a role, as MongoDB has them.
    async fn granted(&self, role: &str) -> Rights {
        let asked = doc! { "rolesInfo": self.named(role), "showPrivileges": true };
        let reply = self.database.database().run_command(asked).await.unwrap();
        let role = reply.get_array("roles").unwrap()[0].as_document().unwrap();
        assert!(role.get_array("inheritedRoles").unwrap().is_empty());
        let mut rights = Rights::new();
        for privilege in role.get_array("privileges").unwrap().iter().filter_map(Bson::as_document) {
            let resource = privilege.get_document("resource").unwrap();
            assert_eq!(resource.get_str("db").unwrap(), self.database.name(), "{resource}");
            let collection = self.without_prefix(resource.get_str("collection").unwrap());
            for action in privilege.get_array("actions").unwrap() {
                rights.insert((collection.clone(), action.as_str().unwrap().to_owned()));
            }
        }
        rights
    }

    fn without_prefix(&self, collection: &str) -> String {
        let name = collection.strip_prefix(self.prefix).unwrap_or(collection);
        let is_channel = name.strip_prefix("signals_").is_some_and(|number| number.parse::<u32>().is_ok());
        if is_channel { "signals_N".into() } else { name.into() }
    }

    /// The profiler notes each command with its user.
    async fn begin_to_observe(&self) {
        let database = self.database.database();
        database.run_command(doc! { "create": "system.profile", "capped": true, "size": 1_i64 << 30 }).await.unwrap();
        database.run_command(doc! { "profile": 2 }).await.unwrap();
    }

    /// The rights that each user has used.
    async fn observed(&self) -> BTreeMap<String, Rights> {
        self.database.database().run_command(doc! { "profile": 0 }).await.unwrap();
        let fields = doc! { "op": 1, "ns": 1, "command": 1, "user": 1, "errCode": 1 };
        let mut cursor = self.database.raw("system.profile").find(doc! {}).projection(fields).await.unwrap();
        let mut observed: BTreeMap<String, Rights> = BTreeMap::new();
        while cursor.advance().await.unwrap() {
            let entry = cursor.deserialize_current().unwrap();
            let user = entry.get_str("user").unwrap_or_default().split('@').next().unwrap_or_default();
            if entry.get_i32("errCode").ok() != Some(DENIED) {
                let role = user.strip_prefix(self.prefix).unwrap_or(user).to_owned();
                let used = used_by(&entry, self.database.name());
                let used = used.into_iter().map(|(collection, action)| (self.without_prefix(&collection), action.to_owned()));
                observed.entry(role).or_default().extend(used);
            }
        }
        observed
    }
}

/// The rights that a command needs: its collection, and the actions.
fn used_by(entry: &Document, database: &str) -> Vec<(String, &'static str)> {
    let (op, ns) = (entry.get_str("op").unwrap_or_default(), entry.get_str("ns").unwrap_or_default());
    let on = ns.strip_prefix(database).and_then(|rest| rest.strip_prefix('.')).unwrap_or_default().to_owned();
    let command = entry.get_document("command").cloned().unwrap_or_default();
    let upserts = command.get_bool("upsert").unwrap_or(false);
    let of = |actions: &[&'static str]| actions.iter().map(|action| (on.clone(), *action)).collect::<Vec<_>>();
    match op {
        "insert" => of(&["insert"]),
        "update" if upserts => of(&["update", "insert"]),
        "update" => of(&["update"]),
        "remove" => of(&["remove"]),
        "query" => of(&["find"]),
        "command" => used_by_command(&command, &on),
        _ => Vec::new(),
    }
}

fn used_by_command(command: &Document, on: &str) -> Vec<(String, &'static str)> {
    let Some((name, value)) = command.iter().next() else { return Vec::new() };
    // A long one is cut.
    let cut = value.as_str().filter(|_| name == "$truncated").and_then(|text| Some(text.trim_start_matches("{ ").split_once(": ")?.0));
    let collection = value.as_str().filter(|_| cut.is_none()).unwrap_or(on).to_owned();
    let of = |actions: &[&'static str]| actions.iter().map(|action| (collection.clone(), *action)).collect::<Vec<_>>();
    match cut.unwrap_or(name) {
        "findAndModify" | "findandmodify" => {
            let upserts = command.get_bool("upsert").unwrap_or(false);
            if upserts { of(&["find", "update", "insert"]) } else { of(&["find", "update"]) }
        }
        "aggregate" => {
            let stages = command.get_array("pipeline").cloned().unwrap_or_default();
            let mut used = of(&["find"]);
            let has = |stage: &str| stages.iter().filter_map(Bson::as_document).any(|stages| stages.contains_key(stage));
            if has("$changeStream") {
                used.extend(of(&["changeStream"]));
            }
            if has("$merge") {
                used.extend(of(&["insert", "update"]));
            }
            used
        }
        "count" | "distinct" => of(&["find"]),
        "create" => of(&["createCollection"]),
        "createIndexes" => of(&["createIndex"]),
        "dropIndexes" => of(&["dropIndex"]),
        "collMod" => of(&["collMod"]),
        "convertToCapped" => of(&["convertToCapped"]),
        "listIndexes" => of(&["listIndexes"]),
        "collStats" => of(&["collStats"]),
        "listCollections" => vec![(String::new(), "listCollections")],
        "dbStats" | "dbstats" => vec![(String::new(), "dbStats")],
        _ => Vec::new(),
    }
}

/// What a person or a restore may have done: rings that are ordinary collections, other indexes under our names, no validators, and no list of
/// Recruiter's collections.
async fn spoil(place: &Place) {
    forget(place).await;
    for ring in ["signals", "signals_0", "events"] {
        let ring_collection = place.database.raw(&place.named(ring));
        ring_collection.drop().await.unwrap();
        ring_collection.insert_one(doc! { "kind": if ring == "events" { "seed" } else { "free" } }).await.unwrap();
    }
    for (collection, index) in [
        ("scheduled", "due_jobs"),
        ("archived", "archived_by_end"),
        ("roster", "held_permits"),
        ("schedulers", "schedule_revisions"),
        ("unique_periods", "expired_periods"),
        ("audit", "expired_audit"),
        ("messages", "expired_messages"),
    ] {
        let collection = place.database.raw(&place.named(collection));
        let _ = collection.drop_index(index).await;
        let other = IndexOptions::builder().name(index.to_owned()).build();
        collection.create_index(IndexModel::builder().keys(doc! { "other": 1 }).options(other).build()).await.unwrap();
    }
}

/// Removes the validators, and the list of Recruiter's collections: a start examines all of them.
async fn forget(place: &Place) {
    for name in ["scheduled", "limits", "groups", "pauses", "schedulers", "messages"] {
        place.database.database().run_command(doc! { "collMod": place.named(name), "validator": {} }).await.unwrap();
    }
    place.database.raw(&place.named("metadata")).delete_one(doc! { "_id": "collections" }).await.unwrap();
}

/// Whether the doctor finds the schema in order, as this user.
fn is_mended(place: &Place, user: &str) -> bool {
    let said = place.run(user, &["doctor"]).out;
    ["schema", "validators", "indexes", "rings"].iter().all(|check| {
        let mut lines = said.lines().filter(|line| line.split_whitespace().nth(1) == Some(check)).peekable();
        lines.peek().is_some() && lines.all(|line| line.starts_with("ok"))
    })
}

/// More than one chunk of a file: with the first one the driver makes the indexes of the bucket.
static LARGE: LazyLock<String> = LazyLock::new(|| "b".repeat(600_000));

async fn drop_files(place: &Place) {
    for name in ["payloads.files", "payloads.chunks"] {
        place.database.raw(&place.named(name)).drop().await.unwrap();
    }
}

/// Everything that an application does, and a workable with the client of its worker.
async fn client_life(place: &Place, user: &str) {
    let client = Client::connect(place.of(user), "application").await.unwrap();
    let archived = async |job: JobId| {
        place.database.until(&place.named("archived"), doc! { "_id": job }, 1, &format!("{user}: the job {job} has ended")).await;
    };
    let noop = || NewJob::of_class("noop", doc! {});
    let mut events = client.events([Pattern::new("job.*").unwrap()], None).await.unwrap();
    let first = noop().enqueue(&client).await.unwrap().id;
    assert!(client.wait_for_end(first, SOON).await.is_ok());
    drop(events.next().await);
    // Unique jobs: postponed, replaced, and once more in a period.
    let at_most = Duration::from_secs(7_200);
    let unique = || Unique::by_key(format!("{user}-waiting")).on_conflict(OnConflict::Postpone { at_most });
    let postponed = noop().unique(unique()).after(SOON).enqueue(&client).await.unwrap().id;
    noop().unique(unique()).after(SOON * 2).enqueue(&client).await.unwrap();
    // Twice, because MongoDB may delete a period that is over before it is used again.
    for key in ["period", "another"] {
        let of_period = || noop().unique(Unique::by_key(format!("{user}-{key}")).for_period(Duration::from_secs(1)));
        let in_period = of_period().enqueue(&client).await.unwrap().id;
        archived(in_period).await;
        wait_until(SOON, "the period is over", async || of_period().enqueue(&client).await.unwrap().id != in_period).await;
    }
    // Jobs that wait for others, that expire, and in a line.
    let parent = noop().after(Duration::from_secs(1)).enqueue(&client).await.unwrap().id;
    let child = noop().waits_for(parent).expires_after(SOON).enqueue(&client).await.unwrap().id;
    archived(noop().in_line(user).enqueue(&client).await.unwrap().id).await;
    archived(noop().limit("printer").enqueue(&client).await.unwrap().id).await;
    archived(child).await;
    // Cancellations: of a waiting job, and of a running one.
    let mut control = client.control(false);
    assert_eq!(control.change(&Change::Cancel, &[postponed]).await.unwrap()[0].1, Changed::Cancelled);
    let long = NewJob::of_class("sleep", doc! { "ms": 600_000 }).enqueue(&client).await.unwrap().id;
    place.database.until(&place.named("scheduled"), doc! { "_id": long, "locked": true }, 1, "it runs").await;
    assert_eq!(control.change(&Change::Cancel, &[long]).await.unwrap()[0].1, Changed::CancelRequested);
    archived(long).await;
    // Files and messages. The first file makes the bucket.
    drop_files(place).await;
    client.put_file(first, "a", LARGE.as_bytes()).await.unwrap();
    assert!(client.delete_file(first, "a").await.unwrap());
    let mut messages = client.subscribe_to([Pattern::new("news.*").unwrap()], From::Now).await.unwrap();
    client.publish_message("news.a", &doc! { "n": 1 }).await.unwrap();
    messages.next().await.unwrap();
    events.close().await;
}

/// Everything that a person does.
async fn operator_life(place: &Place, directory: &std::path::Path) {
    let user = "recruiterOperator";
    let file = |name: &str, content: &str| {
        let path = directory.join(name);
        std::fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let ran = |args: &[&str]| place.ran(user, args).trim().to_owned();
    ran(&["limits", "set", "other", "--capacity", "2", "--most-waiting", "1000"]);
    ran(&["limits", "set", "@other", "--capacity", "2"]);
    ran(&["limits", "remove", "@other"]);
    ran(&["limits", "remove", "other"]);
    ran(&["redaction", "set", "other"]);
    ran(&["redaction", "remove", "other"]);
    // The audit of a change.
    let env = [("MONGODB_URI", place.uri(user)), ("RECRUITER_COLLECTION_PREFIX", place.prefix.to_owned())];
    let env: Vec<(&str, &str)> = env.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let mut api = Api::serve_with(&["--anonymous", "operator"], &env).await;
    assert_eq!(api.post("/jobs/cancel?class=nothing", &Value::Null).await.0, 200);
    api.process.stop().await;
    ran(&["groups", "set", "other", "--weight", "2"]);
    ran(&["pause", "group:other"]);
    ran(&["resume", "group:other"]);
    let schedules = file("schedules.toml", "namespace = \"n\"\n[schedules.often]\nevery = \"1s\"\njob = { class = \"noop\" }\n");
    ran(&["schedules", "apply", &schedules]);
    ran(&["schedules", "pause", "often"]);
    ran(&["schedules", "resume", "often"]);
    ran(&["schedules", "run", "often"]);
    place.database.until(&place.named("archived"), doc! { "schedule.name": "often" }, 3, "it runs often").await;
    ran(&["schedules", "remove", "often"]);
    ran(&["consumers", "set", "group", "--topic", "news.*", "--job", r#"{"class": "noop", "tags": ["consumed"]}"#]);
    wait_until(SOON, "messages become jobs", async || {
        place.ran(user, &["publish", "news.b", r#"{"n": 2}"#]);
        place.database.count(&place.named("archived"), doc! { "tags": "consumed" }).await > 0
    })
    .await;
    ran(&["consumers", "reset", "group"]);
    ran(&["consumers", "remove", "group"]);
    ran(&["consumers", "set", "stays", "--topic", "stays", "--job", r#"{"class": "noop"}"#]);
    // A failed job with a file, retried; another one deleted.
    let failed = ran(&["enqueue", "--class", "fail"]);
    place.database.until(&place.named("archived"), doc! { "_id": ObjectId::parse_str(&failed).unwrap() }, 1, "it has failed").await;
    drop_files(place).await;
    ran(&["files", "put", &failed, "a.txt", &file("a.txt", &LARGE)]);
    ran(&["jobs", "retry", &failed]);
    ran(&["files", "delete", &failed, "a.txt"]);
    ran(&["jobs", "delete", &failed]);
    let later = ran(&["enqueue", "--class", "noop", "--after", "1h", "--unique", "operators", "--expires-after", "2h"]);
    // Twice, as above.
    for key in ["period", "another"] {
        let of_period = || ran(&["enqueue", "--class", "noop", "--unique", key, "--unique-for", "1s"]);
        let first = of_period();
        wait_until(SOON, "the period is over", async || of_period() != first).await;
    }
    ran(&["jobs", "change", &later, "--priority", "9"]);
    ran(&["jobs", "cancel", &later]);
    let graph = file("graph.json", r#"{"jobs": {"a": {"class": "noop"}, "b": {"class": "noop", "after": "1h", "waits_for": ["a"]}}}"#);
    let id = ran(&["graph", "enqueue", &graph]).lines().next().unwrap().to_owned();
    ran(&["graph", "cancel", &id]);
    ran(&["graph", "retry", &id]);
    let long = ran(&["enqueue", "--class", "sleep", "--parameters", r#"{"ms": 600000}"#]);
    let long_id = ObjectId::parse_str(&long).unwrap();
    place.database.until(&place.named("scheduled"), doc! { "_id": long_id, "locked": true }, 1, "it runs").await;
    ran(&["workers", "quiet", "--all"]);
    ran(&["workers", "resume", "--all"]);
    ran(&["jobs", "cancel", &long]);
    place.database.until(&place.named("archived"), doc! { "_id": long_id }, 1, "it is cancelled").await;
}

/// Everything that a person sees.
async fn reader_life(place: &Place, user: &str) {
    let id = place.database.raw(&place.named("archived")).find_one(doc! {}).await.unwrap().unwrap().get_object_id("_id").unwrap().to_hex();
    let graph = place.database.raw(&place.named("archived")).find_one(doc! { "graph": { "$exists": true } }).await.unwrap().unwrap();
    let graph = graph.get_object_id("graph").unwrap().to_hex();
    for args in [
        &["jobs", "list"][..],
        &["jobs", "show", &id],
        &["jobs", "why", &id],
        &["jobs", "export"],
        &["jobs", "retry", &id, "--again", "--dry-run"],
        &["files", "list", &id],
        &["limits", "list"],
        &["limits", "show", "printer"],
        &["pauses"],
        &["redaction", "list"],
        &["audit"],
        &["schedules", "list"],
        &["graph", "show", &graph],
        &["groups", "list"],
        &["groups", "why", "generic"],
        &["roster"],
        &["stats"],
        &["events"],
        &["consumers", "list"],
    ] {
        place.ran(user, args);
    }
    let said = place.run(user, &["doctor"]).out;
    let of_roles = said.lines().find(|line| line.split_whitespace().nth(1) == Some("roles")).unwrap();
    assert!(of_roles.starts_with("ok"), "{said}");
}

async fn drop_all(place: &Place) {
    for name in place.database.database().list_collection_names().await.unwrap() {
        if !name.starts_with("system.") {
            place.database.raw(&name).drop().await.unwrap();
        }
    }
}

/// The rights that the profiler does not note.
const NOT_NOTED: [(&str, &str); 2] = [("", "listCollections"), ("messages", "changeStream")];

/// Whether the program of a role fails without a right.
async fn is_needed(place: &Place, role: &str, (collection, action): (&str, &str)) -> bool {
    let database = place.database.database();
    let privilege = doc! { "resource": { "db": database.name(), "collection": collection }, "actions": [action] };
    let change = |command: &str| doc! { command: role, "privileges": [privilege.clone()] };
    database.run_command(change("revokePrivilegesFromRole")).await.unwrap();
    let fails = if action == "changeStream" {
        let client = Client::from_database(place.database_of(role).await);
        client.subscribe_to([Pattern::new("news.*").unwrap()], From::Now).await.is_err()
    } else {
        let (name, args): (&str, &[&str]) = match role {
            "recruiterCleaner" => ("recruiter-cleaner", &CLEANER),
            "recruiterLeader" => ("recruiter", &["run"]),
            "recruiterWorker" => ("recruiter-worker", &WORKER),
            "recruiterReader" => ("recruiter", &["stats"]),
            _ => ("recruiter", &["enqueue", "--class", "noop"]),
        };
        place.start(role, name, args).wait_exit(SOON).await.code() == Some(77)
    };
    database.run_command(change("grantPrivilegesToRole")).await.unwrap();
    fails
}

const CLEANER: [&str; 8] = ["--every", "200ms", "--sweep-every", "1s", "--prune-every", "1s", "--keep-archived", "1d"];
const WORKER: [&str; 5] = ["--builtins", "--concurrency", "6", "--heartbeat", "500ms"];

/// What leaders and workers do beside the life of clients: failures, halts, successes that are not kept, jobs that can never start.
async fn failures(place: &Place) {
    let client = Client::connect(place.of("recruiterEnqueuer"), "application").await.unwrap();
    let fail = || NewJob::of_class("fail", doc! {});
    let ids = [
        fail().retry(&again(1)).enqueue(&client).await.unwrap().id,
        fail().in_line("halts").halt_on_failure().enqueue(&client).await.unwrap().id,
    ];
    let parent = fail().after(Duration::from_secs(1)).enqueue(&client).await.unwrap().id;
    let child = NewJob::of_class("noop", doc! {}).waits_for(parent).enqueue(&client).await.unwrap().id;
    NewJob::of_class("noop", doc! {}).keep(Keep::Failures).enqueue(&client).await.unwrap();
    for id in ids.into_iter().chain([child]) {
        place.database.until("archived", doc! { "_id": id }, 1, "it has ended").await;
    }
    let mut malformed = minimal_job("noop");
    let later = bson::DateTime::from_millis(bson::DateTime::now().timestamp_millis() + 36_000_000);
    malformed.extend(doc! { "scheduled_at": later, "waiting": true, "waits_for": [5], "gate": ">malformed", "halt_on_failure": true });
    insert_unvalidated(&place.database, vec![malformed]).await;
    place.database.until("pauses", doc! { "_id": { "$in": ["line:halts", "line:malformed"] } }, 2, "the lines halt").await;
}

/// A worker is killed, and old documents are deleted.
async fn cleaning(place: &Place) {
    let client = Client::connect(place.of("recruiterEnqueuer"), "application").await.unwrap();
    let mut victim = place.start("recruiterWorker", "recruiter-worker", &WORKER);
    let sleep = || NewJob::of_class("sleep", doc! { "ms": 600_000 });
    let again = sleep().retry(&again(3)).enqueue(&client).await.unwrap().id;
    let lost = sleep().in_line("lost").halt_on_failure().enqueue(&client).await.unwrap().id;
    place.database.until("scheduled", doc! { "_id": { "$in": [again, lost] }, "locked": true }, 2, "both run").await;
    victim.kill();
    victim.wait_exit(SOON).await;
    place.database.until("archived", doc! { "_id": lost }, 1, "it died with its worker").await;
    place.database.until("pauses", doc! { "_id": "line:lost" }, 1, "its line halts").await;
    place.database.until("scheduled", doc! { "_id": again, "deaths": 1 }, 1, "it waits again").await;
    let past = bson::DateTime::from_millis(1_000_000_000_000);
    let ended = doc! { "_id": ObjectId::new(), "done": true, "workable": { "class": "old" }, "last_execution": { "ended_at": past } };
    place.database.raw("archived").insert_one(ended).await.unwrap();
    let id = ObjectId::from_parts(1_000_000_000, [0; 5], [0; 3]);
    let file = doc! { "_id": id, "filename": format!("{}/a", JobId::new()), "length": 1_i64, "chunkSize": 5, "uploadDate": past };
    place.database.raw("payloads.files").insert_one(file).await.unwrap();
    let data = bson::Binary { subtype: 0.into(), bytes: vec![1] };
    place.database.raw("payloads.chunks").insert_one(doc! { "files_id": id, "n": 0, "data": data }).await.unwrap();
    // The cleaner looks for them at its start.
    let mut cleaner = place.start("recruiterCleaner", "recruiter-cleaner", &CLEANER);
    place.database.until("archived", doc! { "workable.class": "old" }, 0, "it is deleted").await;
    place.database.until("payloads.files", doc! { "_id": id }, 0, "its file is deleted").await;
    cleaner.stop().await;
}

/// A start of each program alone examines all collections, and the leader mends them.
async fn starts(place: &Place) {
    // One that is missing is made again, and one that is wrong is mended.
    place.database.raw("messages").drop().await.unwrap();
    let mut leader = place.start("recruiterLeader", "recruiter", &["run", "--poll", "400ms"]);
    wait_until(SOON, "the messages are back", async || is_mended(place, "recruiterReader")).await;
    leader.stop().await;
    spoil(place).await;
    let mut leader = place.start("recruiterLeader", "recruiter", &["run", "--poll", "400ms"]);
    place.database.until("metadata", doc! { "_id": "collections" }, 1, "the leader has examined all").await;
    let client = Client::connect(place.of("recruiterEnqueuer"), "application").await.unwrap();
    client.events([Pattern::new("job.*").unwrap()], None).await.unwrap().close().await;
    wait_until(SOON, "the schema is mended", async || is_mended(place, "recruiterReader")).await;
    leader.stop().await;
    let programs: [(&str, &str, &[&str]); 2] =
        [("recruiterCleaner", "recruiter-cleaner", &CLEANER), ("recruiterWorker", "recruiter-worker", &WORKER)];
    for (user, name, args) in programs {
        forget(place).await;
        place.ran("recruiterReader", &["stats"]);
        let mut process = place.start(user, name, args);
        place.database.until("metadata", doc! { "_id": "collections" }, 1, "it has examined all").await;
        process.stop().await;
    }
    forget(place).await;
    Client::connect(place.of("recruiterEnqueuer"), "application").await.unwrap();
    forget(place).await;
    place.ran("recruiterOperator", &["enqueue", "--class", "noop"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn each_role_is_enough_for_its_program_and_has_no_right_that_nothing_uses() {
    let place = Place::with_users(TestDatabase::with_access_control().await, "").await;
    let said = place.script();
    assert_eq!(said.matches("was already as it should be").count(), 7, "{said}");
    let directory = tempfile::tempdir().unwrap();
    place.begin_to_observe().await;
    // An operator is the first.
    place.ran("recruiterOperator", &["enqueue", "--class", "noop"]);
    let used = doc! { "unique": true, "expiry": true, "limits": true, "lines": true, "graphs": true, "messages": true };
    place.database.raw("metadata").update_one(doc! { "_id": "features" }, doc! { "$set": used }).upsert(true).await.unwrap();
    place.ran("recruiterOperator", &["publish", "news.a", r#"{"n": 1}"#]);
    let has_events = async || place.database.database().list_collection_names().await.unwrap().contains(&"events".to_owned());
    let follow = || place.start("recruiterOperator", "recruiter", &["events", "--follow"]);
    let mut follower = follow();
    wait_until(SOON, "the ring is there", has_events).await;
    follower.stop().await;
    spoil(&place).await;
    place.ran("recruiterOperator", &["enqueue", "--class", "noop"]);
    let mut follower = follow();
    wait_until(SOON, "an operator has mended the schema", async || is_mended(&place, "recruiterOperator")).await;
    follower.stop().await;

    // Where nothing is, a leader makes it, and the others wait for one.
    drop_all(&place).await;
    let mut leader = place.start("recruiterLeader", "recruiter", &["run"]);
    wait_until(SOON, "a leader has made the schema", async || is_mended(&place, "recruiterReader")).await;
    place.database.until("metadata", doc! { "_id": "recruiter" }, 1, "it leads").await;
    leader.stop().await;
    drop_all(&place).await;
    let mut cleaner = place.start("recruiterCleaner", "recruiter-cleaner", &CLEANER);
    let mut worker = place.start("recruiterWorker", "recruiter-worker", &WORKER);
    wait_until(SOON, "both wait", async || [&cleaner, &worker].iter().all(|process| process.stderr().contains("may not make it"))).await;
    let mut leader = place.start("recruiterLeader", "recruiter", &["run", "--poll", "400ms"]);
    place.database.until("roster", doc! { "available": true }, 1, "the worker is there").await;
    place.ran("recruiterOperator", &["limits", "set", "printer", "--capacity", "2"]);
    client_life(&place, "recruiterEnqueuer").await;
    client_life(&place, "recruiterWorker").await;
    let mut follower = follow();
    operator_life(&place, directory.path()).await;
    failures(&place).await;
    for user in ["recruiterReader", "recruiterOperator"] {
        reader_life(&place, user).await;
    }
    worker.stop().await;
    cleaning(&place).await;
    for process in [&mut follower, &mut cleaner, &mut leader] {
        process.stop().await;
    }
    starts(&place).await;

    let observed = place.observed().await;
    let (mut unused, mut more) = (Vec::new(), Vec::new());
    for role in ROLES {
        let (granted, used) = (place.granted(role).await, &observed[role]);
        println!("{role}: {granted:?}");
        for right @ (collection, action) in granted.difference(used) {
            let named = (collection.as_str(), action.as_str());
            if !NOT_NOTED.contains(&named) || !is_needed(&place, role, named).await {
                unused.push(format!("{role}: {right:?}"));
            }
        }
        // Who may insert may create an ordinary collection.
        let is_implied =
            |(on, action): &&(String, String)| action == "createCollection" && granted.contains(&(on.clone(), "insert".into()));
        more.extend(used.difference(&granted).filter(|right| !is_implied(right)).map(|right| format!("{role}: {right:?}")));
    }
    assert!(unused.is_empty() && more.is_empty(), "nothing has used these rights: {unused:#?}; done without a right: {more:#?}");
    for process in [&cleaner, &worker, &leader] {
        let refused: Vec<String> = process.stderr().lines().filter(|line| line.contains("no right")).map(str::to_owned).collect();
        let of_start =
            |line: &String| line.contains("a part of the schema is missing") || line.contains("the validator belongs to another");
        assert!(refused.iter().all(of_start), "{refused:#?}");
    }
}

/// What a probe asks for, without any effect if it is granted: only the code of the answer counts.
fn probes(collection: &str) -> Vec<(&'static str, Document)> {
    let nothing = || doc! { "_id": "nothing" };
    vec![
        ("find", doc! { "find": collection, "filter": nothing(), "limit": 1 }),
        ("insert", doc! { "insert": collection, "documents": [nothing(), nothing()] }),
        ("update", doc! { "update": collection, "updates": [{ "q": { "_id": "nobody" }, "u": { "$set": { "a": 1 } } }] }),
        ("remove", doc! { "delete": collection, "deletes": [{ "q": { "_id": "nobody" }, "limit": 1 }] }),
        ("createCollection", doc! { "create": collection }),
        ("createIndex", doc! { "createIndexes": collection, "indexes": [{ "key": { "_id": 1 }, "name": "_id_" }] }),
        ("dropIndex", doc! { "dropIndexes": collection, "index": "nothing" }),
        ("collMod", doc! { "collMod": collection }),
        ("listIndexes", doc! { "listIndexes": collection }),
        ("collStats", doc! { "collStats": collection }),
        ("changeStream", doc! { "aggregate": collection, "pipeline": [{ "$changeStream": {} }], "cursor": { "batchSize": 0 } }),
        ("convertToCapped", doc! { "convertToCapped": collection, "size": 16 << 20 }),
        // Granted to nobody.
        ("dropCollection", doc! { "drop": collection }),
        ("validate", doc! { "validate": collection }),
        ("compact", doc! { "compact": collection }),
        ("bypassDocumentValidation", doc! { "insert": collection, "documents": [nothing()], "bypassDocumentValidation": true }),
        ("planCacheRead", doc! { "aggregate": collection, "pipeline": [{ "$planCacheStats": {} }], "cursor": {} }),
    ]
}

/// The collection of an action that MongoDB checks together with another one.
fn needs_also(action: &str) -> Option<&'static str> {
    match action {
        "changeStream" => Some("find"),
        "bypassDocumentValidation" => Some("insert"),
        _ => None,
    }
}

async fn is_denied(database: &Database, command: Document) -> bool {
    match database.run_command(command).await {
        Ok(reply) => {
            let errors = reply.get_array("writeErrors").into_iter().flatten().filter_map(Bson::as_document);
            errors.filter_map(|error| error.get_i32("code").ok()).any(|code| code == DENIED)
        }
        Err(error) => {
            let mongodb::error::ErrorKind::Command(refusal) = error.kind.as_ref() else { panic!("{error}") };
            refusal.code == DENIED
        }
    }
}

/// Each role, each collection, each action: exactly what the role grants is not refused. In a database that an application uses as well.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn everything_else_is_refused() {
    let place = Place::with_users(TestDatabase::with_access_control().await, "jobs_").await;
    let database = place.database.database();
    Client::connect(ConnectArgs::to(place.database.uri()).collection_prefix("jobs_"), "test").await.unwrap();
    let ours: Vec<String> =
        schema::collection_names().map(str::to_owned).chain((1..32).map(|number| format!("signals_{number}"))).collect();
    let of_application = ["orders", "scheduled", "jobs_", "jobs_other", "jobs_signals_32", "other_scheduled"];
    for name in ours.iter().map(|name| place.named(name)).chain(of_application.map(str::to_owned)) {
        let is_ring = name.contains("signals") || name.ends_with("events");
        let create = if is_ring {
            doc! { "create": &name, "capped": true, "size": 4096 }
        } else {
            doc! { "create": &name }
        };
        let _ = database.run_command(create).await;
    }
    let mut asked = 0;
    for role in ROLES {
        let (granted, as_user) = (place.granted(role).await, place.database_of(role).await);
        let may = |name: &str, action: &str| granted.contains(&(place.without_prefix(name), action.to_owned()));
        for name in &ours {
            for (action, command) in probes(&place.named(name)) {
                // MongoDB lets whoever may insert create the collection, unless it is capped: an insert would create it as well.
                let is_implied = action == "createCollection" && may(name, "insert");
                let is_granted = is_implied || (may(name, action) && needs_also(action).is_none_or(|other| may(name, other)));
                assert_eq!(is_denied(&as_user, command).await, !is_granted, "{role} {name} {action}");
                asked += 1;
            }
        }
        for name in of_application {
            for (action, command) in probes(name) {
                assert!(is_denied(&as_user, command).await, "{role} {name} {action}");
                asked += 1;
            }
        }
        let renamed = doc! {
            "renameCollection": format!("{}.jobs_archived", database.name()), "to": format!("{}.jobs_gone", database.name()), "dropTarget": true,
        };
        let in_admin = [
            renamed,
            doc! { "replSetGetStatus": 1 },
            doc! { "serverStatus": 1 },
            doc! { "killAllSessions": [] },
            doc! { "getParameter": "*" },
            doc! { "currentOp": 1 },
            doc! { "shutdown": 1 },
            doc! { "createUser": "more", "pwd": "pw", "roles": ["root"] },
        ];
        for command in in_admin {
            assert!(is_denied(&as_user.client().database("admin"), command.clone()).await, "{role} {command}");
        }
        let in_database = [
            doc! { "createUser": "more", "pwd": "pw", "roles": [] },
            doc! { "createRole": "more", "privileges": [], "roles": [] },
            doc! { "updateRole": place.named(role), "privileges": [], "roles": ["readWrite"] },
            doc! { "grantRolesToUser": place.named(role), "roles": ["readWrite"] },
            doc! { "dropRole": place.named(role) },
            doc! { "usersInfo": 1 },
            doc! { "rolesInfo": 1, "showPrivileges": true },
            doc! { "updateUser": place.named(role), "pwd": "other" },
            doc! { "profile": 2 },
            doc! { "dropDatabase": 1 },
            doc! { "create": "a_view", "viewOn": "orders", "pipeline": [] },
            doc! { "find": "system.profile" },
        ];
        for command in in_database {
            assert!(is_denied(&as_user, command.clone()).await, "{role} {command}");
        }
        for (action, command) in [("listCollections", doc! { "listCollections": 1 }), ("dbStats", doc! { "dbStats": 1 })] {
            assert_eq!(is_denied(&as_user, command).await, !may("", action), "{role} {action}");
        }
        for other in ["another", "local", "config", "admin"] {
            let other = as_user.client().database(other);
            for (action, command) in probes("jobs_scheduled").into_iter().chain(probes("oplog.rs")) {
                assert!(is_denied(&other, command.clone()).await, "{role} {} {action} {command}", other.name());
            }
        }
    }
    println!("{asked} answers of 6 roles were as their rights say");
}

/// The table of the documents says what MongoDB has.
#[tokio::test]
async fn the_table_of_the_documents_is_that_of_the_script() {
    let place = Place::with_users(TestDatabase::with_access_control().await, "").await;
    let text = std::fs::read_to_string(root().join("docs/operating.md")).unwrap();
    let (_, section) = text.split_once("\n### What each role may write\n").unwrap();
    let mut rows = section.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    let cells = |row: &str| row.trim_matches('|').split('|').map(|cell| cell.trim().replace('`', "")).collect::<Vec<_>>();
    let head = cells(rows.next().unwrap());
    let mut written: BTreeMap<String, Rights> = BTreeMap::new();
    for row in rows.skip(1).map(cells) {
        for (role, actions) in head.iter().zip(&row).skip(1) {
            let collections = row[0].split(", ");
            let rights = collections.flat_map(|name| actions.split(", ").map(move |action| (name.to_owned(), action.to_owned())));
            written.entry(role.clone()).or_default().extend(rights.filter(|(_, action)| !action.is_empty()));
        }
    }
    let is_write = |(_, action): &(String, String)| ["insert", "update", "remove"].contains(&action.as_str());
    for role in ROLES {
        let granted: Rights = place.granted(role).await.into_iter().filter(is_write).collect();
        assert_eq!(written.remove(role).unwrap_or_default(), granted, "{role}: the documents on the left");
    }
    assert!(written.is_empty(), "{written:?}");
}

/// A job is done by processes with their own users, in the database of an application, under any name.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn roles_serve_a_shared_database_under_any_name() {
    let place = Place::with_users(TestDatabase::with_access_control_named("jöb's-db(1)%20&=;").await, "jobs_").await;
    let orders = place.database.raw("orders");
    orders.insert_one(doc! { "_id": 1 }).await.unwrap();
    place.database.raw("scheduled").insert_one(doc! { "_id": "of the application" }).await.unwrap();
    // Another job system in the same database has roles of its own.
    let other = format!("recruiterPrefix = 'b.'; load({:?})", root().join("shell/roles.js").display().to_string());
    assert!(mongosh::eval(place.database.uri(), &other).contains("b.recruiterWorker made"));
    assert!(place.granted("recruiterWorker").await.contains(&("scheduled".into(), "insert".into())));
    let mut cleaner = place.start("recruiterCleaner", "recruiter-cleaner", &CLEANER);
    let mut worker = place.start("recruiterWorker", "recruiter-worker", &WORKER);
    let mut leader = place.start("recruiterLeader", "recruiter", &["run", "--poll", "400ms"]);
    place.database.until("jobs_roster", doc! { "available": true }, 1, "the worker is there").await;
    place.ran("recruiterOperator", &["limits", "set", "printer", "--capacity", "2"]);
    client_life(&place, "recruiterEnqueuer").await;
    for process in [&mut worker, &mut cleaner, &mut leader] {
        process.stop().await;
    }
    assert_eq!((place.database.count("orders", doc! {}).await, place.database.count("scheduled", doc! {}).await), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_script_reduces_roles_and_says_why_it_cannot() {
    let place = Place { database: TestDatabase::with_access_control().await, prefix: "" };
    let database = place.database.database();
    let wide = doc! { "db": database.name(), "collection": "" };
    let privileges = vec![doc! { "resource": wide, "actions": ["find", "insert", "dropCollection"] }];
    database.run_command(doc! { "createRole": "recruiterWorker", "privileges": privileges, "roles": ["readWrite"] }).await.unwrap();
    database.run_command(doc! { "createRole": "mine", "privileges": [], "roles": ["read"] }).await.unwrap();
    let path = root().join("shell/roles.js").display().to_string();
    let said = mongosh::run_with(place.database.uri(), &["--file", &path]);
    assert!(said.contains("recruiterWorker was there with other rights, and is changed"), "{said}");
    assert!(said.contains("recruiterLeader made") && said.contains("db.createUser({ user: \"workers\""), "{said}");
    let granted = place.granted("recruiterWorker").await;
    assert!(
        granted.iter().all(|(collection, action)| action != "dropCollection" && (!collection.is_empty() || action == "listCollections"))
    );
    assert!(place.script().contains("recruiterWorker was already as it should be"));

    // Who may make roles in this database, but not in `admin`; and who may not.
    place.user("local-admin", &["userAdmin"]).await;
    place.user("nobody", &["readWrite"]).await;
    database.run_command(doc! { "dropRole": "recruiterWorker" }).await.unwrap();
    database.client().database("admin").run_command(doc! { "dropRole": "recruiterServerReader" }).await.unwrap();
    let load = format!("load({path:?})");
    let said = mongosh::fails(&place.uri("nobody"), &load);
    assert!(said.contains("may not create or change the role") && said.contains("userAdmin") && !said.contains("lsid"), "{said}");
    let more = vec![doc! { "resource": { "db": database.name(), "collection": "orders" }, "actions": ["find"] }];
    database.run_command(doc! { "updateRole": "recruiterLeader", "privileges": more, "roles": ["readWrite"] }).await.unwrap();
    let said = mongosh::eval(&place.uri("local-admin"), &load);
    assert!(said.contains("recruiterLeader was there with other rights"), "{said}");
    assert!(!place.granted("recruiterLeader").await.iter().any(|(collection, _)| collection == "orders"));
    assert!(said.contains("recruiterWorker made") && said.contains("recruiterServerReader in the database `admin` was not made"), "{said}");
    let said = mongosh::fails(place.database.uri(), &format!("recruiterPrefix = 'system.'; {load}"));
    assert!(said.contains("is not valid"), "{said}");
    let admin = place.database.uri().replace(&format!("/{}?", database.name()), "/admin?");
    assert!(mongosh::fails(&admin, &load).contains("is not the database of a job system"));
    mongosh::eval(place.database.uri(), &load);

    // With the role for the server the doctor knows everything.
    let roles = vec![Bson::from("recruiterReader"), Bson::from(doc! { "role": "recruiterServerReader", "db": "admin" })];
    database.run_command(doc! { "createUser": "monitoring", "pwd": "pw", "roles": roles }).await.unwrap();
    Client::connect(place.database.uri(), "test").await.unwrap();
    let said = place.run("monitoring", &["doctor"]).out;
    assert!(!said.contains("unknown") && said.contains("the oplog reaches"), "{said}");
}

/// With a prefix as well. What the script prints makes the users, and the page shows the same.
#[tokio::test(flavor = "multi_thread")]
async fn the_commands_of_the_page_make_roles_and_users() {
    let mut place = Place { database: TestDatabase::with_access_control().await, prefix: "" };
    let page = fs::read_to_string(root().join("docs/operating.md")).unwrap();
    let script = root().join("shell/roles.js").display().to_string();
    let commands: Vec<&str> = page.lines().filter(|line| line.starts_with("mongosh") && line.ends_with("roles.js")).collect();
    assert_eq!(commands.len(), 2);
    for (command, prefix) in commands.into_iter().zip(["", "jobs_"]) {
        let words = command.strip_prefix("mongosh \"$MONGODB_URI\" ").unwrap().replace("roles.js", &script);
        // Quoted ones are every second piece.
        let words = words
            .split('\'')
            .enumerate()
            .flat_map(|(piece, text)| if piece % 2 == 1 { vec![text] } else { text.split_whitespace().collect() });
        let said = mongosh::run_with(place.database.uri(), &words.collect::<Vec<_>>());
        let printed: Vec<&str> = said.lines().map(str::trim).filter(|line| line.starts_with("db.createUser(")).collect();
        assert_eq!(printed.len(), 5, "{said}");
        for line in printed {
            let shown = if prefix.is_empty() { line.to_owned() } else { line.replace(prefix, "") };
            assert!(page.lines().any(|of_page| of_page == shown), "{line}");
            mongosh::eval(place.database.uri(), &line.replace("passwordPrompt()", "\"pw\""));
        }
        place.prefix = prefix;
        assert!(place.granted("recruiterWorker").await.contains(&("roster".into(), "insert".into())));
        assert!(mongosh::eval(&place.uri("workers"), &format!("db.{prefix}roster.countDocuments({{}})")).contains('0'));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_lacks_a_right_is_told_which_and_what_to_do() {
    let place = Place::with_users(TestDatabase::with_access_control().await, "").await;
    let name = place.database.name();
    // Without a schema.
    for (user, program, args) in [
        ("recruiterWorker", "recruiter-worker", &["--builtins", "--connect-timeout", "1s"][..]),
        ("recruiterCleaner", "recruiter-cleaner", &["--connect-timeout", "1s"]),
        ("recruiterEnqueuer", "recruiter", &["enqueue", "--class", "noop", "--connect-timeout", "1s"]),
    ] {
        let mut process = place.start(user, program, args);
        assert_eq!(process.wait_exit(SOON).await.code(), Some(77), "{}", process.stderr());
        let said = process.stderr();
        assert!(said.contains("start `recruiter run`") && said.contains(&format!("`create` on `{name}.")), "{said}");
    }
    // Who may insert may create an ordinary collection as well: what they have begun, another start goes on with.
    assert!(!place.database.database().list_collection_names().await.unwrap().contains(&"roster".to_owned()));
    Client::connect(place.database.uri(), "test").await.unwrap();
    let said = place.run("recruiterReader", &["run"]);
    assert!(said.code == 77 && said.err.contains(&format!("`update` on `{name}.metadata`")), "{}", said.err);
    assert!(said.err.contains("roles.js"), "{}", said.err);
    let said = place.run("recruiterEnqueuer", &["limits", "set", "api", "--capacity", "1"]);
    assert!(said.code != 0 && said.err.contains(&format!("`update` on `{name}.limits`")), "{}", said.err);
    let said = place.run("recruiterCleaner", &["enqueue", "--class", "noop", "--parameters", r#"{"secret": "hunter2"}"#]);
    assert!(said.code != 0 && said.err.contains(&format!("`insert` on `{name}.scheduled`")), "{}", said.err);
    assert!(!said.err.contains("hunter2"), "{}", said.err);
    // The index of a feature, without a leader that could make it.
    let said = place.run("recruiterEnqueuer", &["enqueue", "--class", "noop", "--unique", "k"]);
    assert!(said.code != 0 && said.err.contains(&format!("`createIndexes` on `{name}.scheduled`")), "{}", said.err);
    let asked = place.database.only("metadata", doc! { "_id": "features" }).await;
    assert_eq!(asked.get_array("asked").unwrap(), &["unique".into()]);
}
