//! The harness does what the other tests rely on.

use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use bson::{Document, doc, oid::ObjectId};
use mongodb::Client;
use recruiter_common::Workable as _;
use recruiter_tests::{
    effects::{self, EFFECTS, Settle},
    fail_points::FailPoint,
    mongo::{PASSWORD, TestDatabase, mongod_with_access_control},
    oracle::Policy,
    promise,
    wait::{SOON, wait_for, wait_until},
    world::{Role, World},
};

async fn client(uri: &str, app_name: &str) -> mongodb::Database {
    Client::with_uri_str(format!("{uri}&appName={app_name}")).await.unwrap().default_database().unwrap()
}

fn insert() -> Document {
    doc! { "insert": "things", "documents": [{}] }
}

#[tokio::test]
async fn each_test_has_a_database_that_goes_with_it() {
    let (one, other) = (TestDatabase::new().await, TestDatabase::new().await);
    one.raw("things").insert_one(doc! {}).await.unwrap();
    assert_eq!(other.count("things", doc! {}).await, 0);

    let name = one.name().to_owned();
    drop(one);
    let client = other.database().client();
    // MongoDB is asked to drop it and not waited for.
    wait_until(SOON, "it is gone", async || !client.list_database_names().await.unwrap().contains(&name)).await;
}

#[tokio::test]
async fn fail_points_strike_whom_they_name_until_dropped() {
    let database = TestDatabase::new().await;
    let (struck, spared) = (client(database.uri(), "harness-struck").await, client(database.uri(), "harness-spared").await);
    let insert_is = || FailPoint::new("harness-struck", &["insert"]).namespace(database.name(), "things");

    let armed = insert_is().error_code(11000).arm(database.uri()).await;
    struck.run_command(insert()).await.unwrap_err();
    spared.run_command(insert()).await.unwrap();
    struck.run_command(doc! { "insert": "others", "documents": [{}] }).await.unwrap();
    assert_eq!(armed.struck().await, 1);
    drop(armed);
    struck.run_command(insert()).await.unwrap();

    let armed = insert_is().close_connection().times(1).arm(database.uri()).await;
    struck.run_command(insert()).await.unwrap_err();
    struck.run_command(insert()).await.unwrap();
    assert_eq!(armed.struck().await, 1);
    drop(armed);

    let armed = insert_is().write_concern_error(64).arm(database.uri()).await;
    assert!(struck.run_command(insert()).await.unwrap().contains_key("writeConcernError"));
    drop(armed);

    let armed = insert_is().block(Duration::from_millis(300)).arm(database.uri()).await;
    let asked = Instant::now();
    struck.run_command(insert()).await.unwrap();
    assert!(asked.elapsed() >= Duration::from_millis(300));
    drop(armed);
    assert_eq!(database.count("things", doc! {}).await, 5);
}

#[tokio::test]
async fn access_control_keeps_strangers_out() {
    let (mut mongo, uri) = mongod_with_access_control().await;
    assert!(uri.contains(PASSWORD));
    mongo.restart().await.unwrap();
    let database = TestDatabase::on(&uri).await;
    database.raw("things").insert_one(doc! {}).await.unwrap();
    let stranger = Client::with_uri_str(mongo.uri()).await.unwrap().database(database.name());
    stranger.run_command(insert()).await.unwrap_err();
}

/// This test is also the one that fails: `tests/run` runs it by itself.
#[test]
fn a_broken_promise_gets_no_second_chance_and_bad_luck_does() {
    const FAILS: &str = "RECRUITER_TEST_FAILS";
    if let Ok(how) = std::env::var(FAILS) {
        promise!(how != "promise", "a job ran twice");
        panic!("a job took long");
    }
    for (how, retried) in [("promise", 0), ("luck", 1)] {
        let mut run = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("run"));
        run.arg(std::env::current_exe().unwrap()).args(["--exact", "harness::a_broken_promise_gets_no_second_chance_and_bad_luck_does"]);
        let ended = run.env(FAILS, how).env_remove("RECRUITER_TEST_CHANCES").env_remove("RECRUITER_TEST_RETRIED").output().unwrap();
        let said = String::from_utf8(ended.stdout).unwrap();
        assert!(ended.status.code() == Some(101) && said.contains(&format!("\nretried: {retried}\n")), "{said}");
    }
}

#[tokio::test]
#[should_panic(expected = "waited 50ms in vain: pigs fly")]
async fn waiting_ends_and_says_for_what() {
    wait_for(Duration::from_millis(50), "pigs fly", async || None::<()>).await;
}

/// Of four jobs with one effect each, one gets a second effect, one loses its own, and one loses the job that it has enqueued.
#[tokio::test(flavor = "multi_thread")]
async fn the_oracle_finds_a_double_and_a_missing_effect() {
    let mut world = World::new().await;
    effects::prepare(&world.database).await;
    world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Cleaner, &["--dead-after", "10m"], &[]);
    world.start(Role::Worker, &["--lease", "10m"], &[]);
    let mut jobs = Vec::new();
    for _ in 0..4 {
        jobs.push(world.enqueue(Settle { ms: 1 }.as_job(), Policy::Never).await.unwrap());
    }
    assert!(world.until_quiet(SOON).await, "{}", world.logs());
    let all = world.database.raw(EFFECTS);
    let of = async |job: usize| all.find_one(doc! { "job": jobs[job] }).await.unwrap().unwrap();
    let mut double = of(0).await;
    double.insert("_id", ObjectId::new());
    all.insert_one(double).await.unwrap();
    all.delete_one(doc! { "job": jobs[1] }).await.unwrap();
    let child = of(2).await.get_object_id("child").unwrap();
    world.database.raw("archived").delete_one(doc! { "_id": child }).await.unwrap();

    let findings = world.judge().await;
    let has = |all: &[String], words: [&str; 2]| all.iter().any(|finding| words.iter().all(|word| finding.contains(word)));
    assert!(has(&findings.unexplained, ["effects of the starts", &jobs[0].to_string()]), "a double effect: {findings:?}");
    assert!(has(&findings.lost, ["no effect", &jobs[1].to_string()]), "a missing effect: {findings:?}");
    assert!(has(&findings.lost, ["I1: lost", &child.to_hex()]), "a missing child: {findings:?}");
    assert!(has(&findings.unexplained, ["executed, but never enqueued", ""]), "a child without an effect: {findings:?}");
    assert!(findings.all().iter().all(|finding| !finding.contains(&jobs[3].to_string())), "a job without a fault: {findings:?}");
}
