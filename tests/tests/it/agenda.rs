//! `recruiter import agenda`, on what the real Agenda has written: jobs run with their ids and parameters, and repeated ones are schedules.

use std::collections::BTreeMap;

use bson::doc;
use recruiter_common::{JobId, instant::Instant};
use recruiter_tests::{
    local::prepared,
    mongo::TestDatabase,
    mongosh::run_with_package,
    processes::{Process, Setup, System},
    wait::SOON,
};
use serde_json::Value;

use super::bad_input::why;

/// One job of each kind. The one of the class `hang` stays locked, since the process ends while it runs.
const AGENDA: &str = r#"
(async () => {
  const agenda = await started();
  agenda.define("finished", async () => {});
  agenda.define("hang", () => new Promise(() => {}));
  const finished = new Promise(resolve => agenda.on("success:finished", resolve));
  const hangs = new Promise(resolve => agenda.on("start:hang", resolve));
  await agenda.start();
  const later = new Date(Date.now() + 3600e3);
  await agenda.now("finished");
  await agenda.now("hang");
  await agenda.now("sleep", { ms: 1 });
  await agenda.create("list", [1, 2]).priority("high").schedule(later).save();
  await agenda.every("5 minutes", "ping");
  await agenda.every("0 3 * * *", "nightly", { kind: "daily" }, { timezone: "Europe/Berlin", skipImmediate: true });
  await agenda.create("tea", {}).repeatAt("3:30pm").save();
  await agenda.create("off", {}).schedule(later).disable().save();
  const bounded = agenda.create("bounded", {}).repeatEvery("1 day", { skipDays: "1 day" });
  await (bounded.startDate ? bounded.startDate(later) : bounded).save();
  await Promise.all([finished, hangs]);
  setTimeout(() => process.exit(0), 500);
})();
"#;

/// Of Agenda 5, and of Agenda 6, which is a module, has the part for MongoDB in a package of its own, and writes `null` for what is not set.
const STARTED: [(&str, &str, &str); 2] = [
    (
        "agenda",
        "5.0.0",
        r#"const started = () => new (require("agenda").Agenda)({ db: { address: process.argv[1], collection: "agendaJobs" }, processEvery: "1 second" });"#,
    ),
    (
        "@agendajs/mongo-backend",
        "4.0.3",
        r#"const started = async () => {
  const of = name => import(`${process.env.NODE_PATH}/${name}/dist/index.js`);
  const [{ Agenda }, { MongoBackend }] = [await of("agenda"), await of("@agendajs/mongo-backend")];
  return new Agenda({ backend: new MongoBackend({ address: process.argv[1], collection: "agendaJobs" }), processEvery: "1 second" });
};"#,
    ),
];

/// The exit code, and the outcome of each job of Agenda by its name.
async fn import(database: &TestDatabase, more: &[&str]) -> (i32, BTreeMap<String, String>, String) {
    let mut process = Process::on(database, "recruiter", &[&["import", "agenda", "--json", "--zone", "Europe/Berlin"], more].concat());
    let code = process.wait_exit(SOON).await.code().unwrap();
    let line = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        (line["name"].as_str().unwrap().to_owned(), line["outcome"].as_str().unwrap().to_owned())
    };
    (code, process.stdout().lines().map(line).collect(), process.stderr())
}

#[tokio::test]
async fn what_agenda_5_has_left_waiting_is_taken_over_once() {
    what_is_left_waiting_is_taken_over_once(STARTED[0]).await;
}

#[tokio::test]
async fn what_agenda_6_has_left_waiting_is_taken_over_once() {
    what_is_left_waiting_is_taken_over_once(STARTED[1]).await;
}

async fn what_is_left_waiting_is_taken_over_once((package, version, started): (&str, &str, &str)) {
    let (database, store) = prepared().await;
    run_with_package(package, version, &format!("{started}{AGENDA}"), &[database.uri()]);
    let of_agenda = database.raw("agendaJobs");
    let before = database.all("agendaJobs", doc! {}).await;
    let id = async |name: &str| of_agenda.find_one(doc! { "name": name }).await.unwrap().unwrap().get_object_id("_id").unwrap();

    let (code, planned, said) = import(&database, &["--dry-run"]).await;
    let of = |outcome: &str| planned.iter().filter(|(_, other)| *other == outcome).map(|(name, _)| name.as_str()).collect::<Vec<_>>();
    assert_eq!((of("enqueued"), of("declared")), (vec!["list", "sleep"], vec!["nightly", "ping", "tea"]), "{said}");
    assert_eq!((code, of("finished"), of("left")), (1, vec!["finished"], vec!["bounded", "hang", "off"]));
    assert!(database.count("scheduled", doc! {}).await == 0 && store.schedules().list().await.unwrap().is_empty(), "a dry run");

    let (code, done, said) = import(&database, &[]).await;
    assert_eq!((code, &done), (1, &planned), "{said}");
    assert!(said.contains("3 jobs of Agenda were left alone"), "{said}");
    assert_eq!(database.all("agendaJobs", doc! {}).await, before, "they are only read");
    let list = database.only("scheduled", doc! { "workable.class": "list" }).await;
    assert_eq!((list.get_object_id("_id").unwrap(), list.get_i32("priority").unwrap()), (id("list").await, 7));
    assert_eq!(list.get_document("workable").unwrap().get_document("parameters").unwrap(), &doc! { "data": [1, 2] });

    let schedules = store.schedules().list().await.unwrap();
    let next = |begin: &str| {
        let (_, schedule) = schedules.iter().find(|(name, _)| name.starts_with(begin)).unwrap();
        schedule.as_ref().unwrap().schedule.timing().next_after("2026-01-01T00:00:00Z".parse::<Instant>().unwrap()).unwrap().to_rfc3339()
    };
    assert_eq!(next("nightly"), "2026-01-01T02:00:00+00:00", "three o'clock in Berlin");
    assert_eq!(next("ping"), "2026-01-01T00:05:00+00:00");
    assert_eq!(next("tea:"), "2026-01-01T14:30:00+00:00");

    let system = System::start(&database, Setup::default());
    let sleep = JobId::from(id("sleep").await);
    assert_eq!(why(&database.archived(sleep).await), "done");
    let (_, again, _) = import(&database, &["--lock-lifetime", "1ms"]).await;
    assert_eq!([&again["sleep"], &again["list"], &again["nightly"], &again["hang"]], ["known", "known", "declared", "enqueued"]);
    assert_eq!(database.count("archived", doc! { "workable.class": "sleep" }).await, 1, "it ran once");
    assert_eq!(database.count("scheduled", doc! { "workable.class": "sleep" }).await, 0);
    system.stop().await;
}

#[tokio::test]
async fn a_wrong_place_or_zone_is_named_and_odd_documents_are_left_alone_one_by_one() {
    let (database, _store) = prepared().await;
    let (code, _, said) = import(&database, &["--collection", "nothing"]).await;
    assert!(code == 1 && said.contains(".nothing has no documents; --database and --collection name"), "{said}");
    let mut process = Process::on(&database, "recruiter", &["import", "agenda", "--zone", "Europe/Nowhere"]);
    assert_eq!(process.wait_exit(SOON).await.code(), Some(2));
    assert!(process.stderr().contains("--zone: ") && process.stderr().contains("Europe/Nowhere"), "{}", process.stderr());

    let due = bson::DateTime::now();
    let odd = [
        doc! { "name": "good", "nextRunAt": due },
        doc! { "name": "x".repeat(5_000), "nextRunAt": due },
        doc! { "name": "large", "data": { "text": "x".repeat(15 << 20) }, "nextRunAt": due },
        doc! { "name": "no\u{1b}[2J", "nextRunAt": "soon" },
        doc! { "nextRunAt": due },
        doc! { "_id": 7, "name": "number", "nextRunAt": due },
    ];
    for document in odd {
        database.raw("agendaJobs").insert_one(document).await.unwrap();
    }
    let (code, done, said) = import(&database, &[]).await;
    assert_eq!(
        (code, done.values().filter(|outcome| *outcome == "left").count(), done["good"].as_str()),
        (1, 5, "enqueued"),
        "{done:?} {said}"
    );
    assert_eq!(database.count("scheduled", doc! {}).await, 1);
    let mut process = Process::on(&database, "recruiter", &["import", "agenda"]);
    process.wait_exit(SOON).await;
    assert_eq!(process.stdout(), "1 known, 5 left (3 malformed, 2 refused)\n");
    assert!(process.stderr().contains("no\\u{1b}[2J") && !process.stderr().contains('\u{1b}'), "{}", process.stderr());
}
