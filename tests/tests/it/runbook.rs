//! The runbook is true: its backup is taken under load and restored elsewhere by its own commands, and what it promises of jobs, workers,
//! the leader and schedules holds; each alert has its line, whose commands work.

use std::{
    collections::BTreeSet,
    fs,
    process::Command,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bson::doc;
use recruiter_common::{Client, JobId, NewJob, RetryManyTimes, limits::Paused};
use recruiter_dev::embedded::{EmbeddedMongo, Options};
use recruiter_tests::{
    mongo::{TestDatabase, temporary},
    mongosh,
    processes::{Setup, System, binary},
    promise,
    wait::{SOON, wait_until},
};

use super::{cli::Said, tidy::root};

fn page() -> String {
    fs::read_to_string(root().join("docs/runbook.md")).unwrap()
}

/// The lines of the page's blocks of commands, in their order.
fn commands() -> Vec<String> {
    let page = page();
    let blocks = page.split("```").skip(1).step_by(2).map(|block| block.strip_prefix("sh\n").unwrap());
    blocks.flat_map(str::lines).map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect()
}

/// Runs a line as a shell does, with our programs.
fn shell(line: &str, uri: &str) -> Said {
    let (programs, path) = (binary("recruiter").parent().unwrap().to_owned(), std::env::var("PATH").unwrap());
    let output = Command::new("sh")
        .args(["-c", line])
        .env("PATH", format!("{}:{path}", programs.display()))
        .env("MONGODB_URI", uri)
        .env("RECRUITER_CONNECT_TIMEOUT", "1m")
        .output();
    Said::of(output.unwrap())
}

/// Where the page's directories are here.
struct Place {
    data: String,
    backup: String,
    restored: String,
}

impl Place {
    fn here(&self, line: &str) -> String {
        let line = line.replace("/var/lib/mongodb-restored", &self.restored).replace("/backup/mongodb", &self.backup);
        line.replace("/var/lib/mongodb", &self.data)
    }

    /// Runs `mongosh "…" --eval '…'`.
    fn mongosh(&self, line: &str, uri: &str) -> String {
        let script = line.split('\'').nth(1).unwrap_or_else(|| panic!("{line}"));
        mongosh::run_with(uri, &["--eval", &self.here(script)])
    }
}

/// Jobs that have a part in the test.
struct Jobs {
    /// Done before the backup.
    done: JobId,
    /// They run at the backup, without a retry policy and with one.
    once: JobId,
    again: JobId,
    /// They wait at the backup, and run before the restore.
    payment: JobId,
    mail: JobId,
}

async fn prepare(database: &TestDatabase, client: &Client) -> Jobs {
    for name in ["nightly_report", "ticks"] {
        let schedule = doc! { "_id": name, "every_ms": 1_000_i64, "job": { "class": "noop" } };
        database.raw("schedulers").insert_one(schedule).await.unwrap();
    }
    for group in ["payments", "mail"] {
        client.pauses().pause(&Paused::Group(group.into()), "ada", None).await.unwrap();
    }
    let enqueue = async |job: NewJob| job.enqueue(client).await.unwrap().id;
    let noop = || NewJob::of_class("noop", doc! {});
    let sleep = || NewJob::of_class("sleep", doc! { "ms": 3_600_000 });
    let jobs = Jobs {
        done: enqueue(noop()).await,
        once: enqueue(sleep()).await,
        again: enqueue(sleep().retry(&RetryManyTimes::new(3, Duration::ZERO).unwrap())).await,
        payment: enqueue(noop().in_group("payments")).await,
        mail: enqueue(noop().in_group("mail")).await,
    };
    database.archived(jobs.done).await;
    let running = doc! { "_id": { "$in": [jobs.once, jobs.again] }, "locked": true };
    database.until("scheduled", running, 2, "both sleep").await;
    database.until("archived", doc! { "schedule.name": { "$exists": true } }, 2, "schedules run").await;
    jobs
}

/// Enqueues until it is told to stop. Returns the jobs that were acknowledged before the backup.
async fn backed_up_under_load(client: &Client, back_up: impl FnOnce() + Send) -> BTreeSet<JobId> {
    let (acknowledged, is_over) = (Mutex::new(BTreeSet::new()), AtomicBool::new(false));
    let load = async {
        while !is_over.load(Ordering::Relaxed) {
            let job = NewJob::of_class("noop", doc! {}).in_group("load").enqueue(client).await.unwrap();
            acknowledged.lock().unwrap().insert(job.id);
        }
    };
    let backup = async {
        wait_until(SOON, "there is load", async || acknowledged.lock().unwrap().len() > 50).await;
        let before = acknowledged.lock().unwrap().clone();
        tokio::task::block_in_place(back_up);
        is_over.store(true, Ordering::Relaxed);
        before
    };
    tokio::join!(load, backup).1
}

/// All jobs of a database, once each.
async fn all_jobs(database: &TestDatabase) -> BTreeSet<JobId> {
    let mut found = BTreeSet::new();
    for collection in ["scheduled", "archived"] {
        for job in database.all(collection, doc! {}).await {
            let id = job.get_object_id("_id").unwrap();
            promise!(found.insert(JobId::from(id)), "{id} is in the backup twice");
        }
    }
    found
}

/// Starts a mongod on the copy, as the page says but on a free port and without `--fork`, and gives it its own name.
async fn restored(place: &Place, mongod: &str, reconfigure: &str) -> EmbeddedMongo {
    assert!(mongod.starts_with("mongod --replSet rs0 --dbpath /var/lib/mongodb-restored --port 27018 "), "{mongod}");
    let options = Options { data_dir: place.restored.clone().into(), member: true, ..temporary() };
    let mongo = EmbeddedMongo::start(options).await.unwrap();
    let at = |line: &str| line.replace("127.0.0.1:27018", &format!("127.0.0.1:{}", mongo.port()));
    let direct = format!("mongodb://127.0.0.1:{}/?directConnection=true", mongo.port());
    let admin = mongodb::Client::with_uri_str(&direct).await.unwrap().database("admin");
    let is_loaded = async || admin.run_command(doc! { "replSetGetConfig": 1 }).await.is_ok();
    wait_until(SOON, "it has read its configuration", is_loaded).await;
    place.mongosh(&at(reconfigure), &direct);
    mongo
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_under_load_is_restored_and_the_page_says_what_runs_twice() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let options = temporary();
    let data = fs::canonicalize(&options.data_dir).unwrap().display().to_string();
    let place = Place { data, backup: path("backup"), restored: path("restored") };
    let old_server = EmbeddedMongo::start(options).await.unwrap();
    let old = TestDatabase::named(&old_server.uri(), "jobs").await;
    let client = Client::connect(old.uri(), "application").await.unwrap();
    let setup = Setup { worker: &["--builtins", "--grace", "1s"], ..Setup::default() };
    let old_system = System::start(&old, setup);
    let jobs = prepare(&old, &client).await;
    let mut lines = commands().into_iter();
    let mut next = || lines.next().unwrap();

    let copy = next();
    let before = backed_up_under_load(&client, || drop(place.mongosh(&copy, old.uri()))).await;
    // What happens after the backup, and the old processes go on.
    for group in ["payments", "mail"] {
        client.pauses().resume(&Paused::Group(group.into())).await.unwrap();
    }
    for job in [jobs.payment, jobs.mail] {
        assert_eq!(old.archived(job).await.get_str("why").unwrap(), "done");
    }
    let late = NewJob::of_class("noop", doc! {}).enqueue(&client).await.unwrap().id;
    old.archived(late).await;

    assert_eq!(shell(&place.here(&next()), "").succeeded().err, "");
    let server = restored(&place, &next(), &next()).await;
    let new = TestDatabase::named(&server.uri(), "jobs").await;
    new.until("metadata", doc! { "_id": "recruiter" }, 1, "it is primary").await;
    let there = all_jobs(&new).await;
    let lost: Vec<_> = before.iter().filter(|job| !there.contains(job)).collect();
    promise!(lost.is_empty(), "acknowledged before the backup, and not in it: {lost:?}");
    assert!(there.contains(&jobs.once) && there.contains(&jobs.payment) && !there.contains(&late));
    let workers = new.all("roster", doc! {}).await;
    assert_eq!(workers.len(), 1, "of the old worker");
    let last_slot = new.only("schedulers", doc! { "_id": "ticks" }).await.get_datetime("last_slot").unwrap().to_owned();

    // Pause, decide, start. The groups were paused at the backup; with `everything` they need not be.
    assert!(shell(&next(), new.uri()).succeeded().out.contains("everything"));
    assert_eq!(new.raw("pauses").delete_many(doc! { "_id": { "$ne": "everything" } }).await.unwrap().deleted_count, 2);
    assert!(shell(&next(), new.uri()).succeeded().out.contains("nightly_report"));
    assert!(shell(&next(), new.uri()).succeeded().out.contains(&jobs.payment.to_string()));
    for _ in 0..3 {
        shell(&next(), new.uri()).succeeded();
    }
    assert_eq!(next(), "systemctl start recruiter.target");
    let begun = bson::DateTime::now();
    let system = System::start(&new, setup);
    new.until("roster", doc! { "_id": { "$ne": workers[0].get("_id") } }, 1, "the new worker is there").await;
    // The pid of the old worker is that of a running process, so only its silence tells.
    new.until("roster", doc! {}, 1, "the old worker is retired").await;
    let [doctor, resume] = [next(), next()];
    let examined = shell(&doctor, new.uri());
    assert!(examined.out.contains("leader") && !examined.out.contains("error    workers"), "{}", examined.out);
    assert_eq!(new.archived(jobs.once).await.get_str("why").unwrap(), "worker-died");
    assert_eq!(new.count("scheduled", doc! { "_id": { "$in": [jobs.mail, jobs.again] }, "locked": false }).await, 2, "paused");
    shell(&resume, new.uri()).succeeded();
    assert_eq!(lines.next(), None, "each command was run");

    let done = new.archived(jobs.mail).await;
    assert_eq!(done.get_str("why").unwrap(), "done", "it runs again, as the page says");
    assert_eq!(new.archived(jobs.payment).await.get_str("why").unwrap(), "cancelled", "it does not");
    new.until("scheduled", doc! { "_id": jobs.again, "locked": true }, 1, "a job with a retry policy runs again").await;
    new.until("scheduled", doc! { "group": "load" }, 0, "what waited is done").await;
    let missed = |name: &str| doc! { "schedule.name": name, "schedule.slot": { "$gt": last_slot, "$lt": begun } };
    let slots = async |name: &str| new.count("archived", missed(name)).await + new.count("scheduled", missed(name)).await;
    let new_slots = doc! { "schedule.name": "ticks", "schedule.slot": { "$gt": begun } };
    wait_until(SOON, "new slots run", async || new.count("archived", new_slots.clone()).await > 0).await;
    assert!(begun.timestamp_millis() - last_slot.timestamp_millis() > 3_000, "slots were missed");
    let found = [slots("ticks").await, slots("nightly_report").await];
    assert!(found[0] <= 1 && found[1] == 0, "missed slots that have run: {found:?}");
    commands_of_alerts_work(&new);
    let sizes = new.database().run_command(doc! { "collStats": "archived" }).await.unwrap();
    let [archived, indexes] = ["size", "totalIndexSize"].map(|part| recruiter_tests::oracle::number(&sizes, part));
    let each = archived / recruiter_tests::oracle::number(&sizes, "count");
    assert!((300..=1_000).contains(&each) && indexes > 0, "the page says 0.5 to 1 kB: {each}");
    system.stop().await;
    drop(old_system);
}

/// The rows of the alerts: the name, and the commands of `recruiter`.
fn alerts() -> Vec<(String, Vec<String>)> {
    let page = page();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `Recruiter"));
    let row = |row: &str| {
        let (name, rest) = row.split_once('`').unwrap();
        assert!(rest.trim_matches(['|', ' ']).split(" | ").all(|cell| cell.len() > 8), "{name} has nothing to look at or to do");
        let quoted = rest.split('`').skip(1).step_by(2).filter(|text| text.starts_with("recruiter ") && *text != "recruiter run");
        (format!("Recruiter{name}"), quoted.map(str::to_owned).collect())
    };
    rows.map(row).collect()
}

fn commands_of_alerts_work(database: &TestDatabase) {
    for command in alerts().into_iter().flat_map(|(_, commands)| commands).collect::<BTreeSet<_>>() {
        let said = shell(&command, database.uri());
        assert!(said.code == 0 || (command == "recruiter doctor" && said.code == 1), "{command}: {} {}", said.out, said.err);
    }
}

#[test]
fn each_alert_says_where_to_look_and_what_to_do() {
    let rules = fs::read_to_string(root().join("monitoring/alerts.yml")).unwrap();
    let rules: Vec<_> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).map(str::to_owned).collect();
    assert_eq!(alerts().into_iter().map(|(name, _)| name).collect::<Vec<_>>(), rules);
}
