//! The harness does what the other tests rely on.

use std::time::{Duration, Instant};

use bson::{Document, doc};
use mongodb::Client;
use recruiter_tests::{
    fail_points::FailPoint,
    mongo::{PASSWORD, TestDatabase, mongod_with_access_control},
    mongosh,
    processes::Process,
    wait::wait_for,
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
    assert_eq!(other.raw("things").count_documents(doc! {}).await.unwrap(), 0);

    let name = one.name().to_owned();
    drop(one);
    assert!(!other.database().client().list_database_names().await.unwrap().contains(&name));
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
    assert_eq!(database.raw("things").count_documents(doc! {}).await.unwrap(), 5);
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

#[tokio::test]
async fn the_real_shell_reads_documents() {
    let database = TestDatabase::new().await;
    database.raw("things").insert_one(doc! { "name": "hammer" }).await.unwrap();
    assert_eq!(mongosh::eval(database.uri(), "db.things.findOne().name").trim(), "hammer");
}

#[tokio::test]
#[should_panic(expected = "waited 50ms in vain: pigs fly")]
async fn waiting_ends_and_says_for_what() {
    wait_for(Duration::from_millis(50), "pigs fly", async || None::<()>).await;
}

#[tokio::test]
async fn the_binaries_are_built_and_heard() {
    for name in ["recruiter", "recruiter-cleaner", "recruiter-worker"] {
        let mut process = Process::start(name, &["--help"], &[]);
        assert!(process.wait_exit(Duration::from_secs(10)).await.success(), "{}", process.stderr());
        assert!(process.stdout().contains("--uri"), "{}", process.stdout());
    }
}
