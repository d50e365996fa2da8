//! `recruiter bench`: every benchmark runs, counts what it says, and leaves nothing behind. Figures of a debug build say nothing.

use std::time::Duration;

use recruiter_tests::{mongo::TestDatabase, processes::Process};
use serde_json::Value;

const SOON: Duration = Duration::from_secs(120);

/// What a benchmark says; without the conditions, which it must say as well.
async fn bench(args: &[&str]) -> Value {
    let mut process = Process::start("recruiter", &[&["bench"], args, &["--json"]].concat(), &[]);
    let status = process.wait_exit(SOON).await;
    assert!(status.success(), "{args:?}: {}", process.stderr());
    let measured: Value = serde_json::from_str(&process.stdout()).unwrap();
    for condition in ["recruiter", "mongodb", "server", "durability", "cores", "processes", "build"] {
        assert!(!measured["conditions"][condition].is_null(), "{condition}: {measured}");
    }
    assert!(process.stderr().is_empty(), "{}", process.stderr());
    measured
}

#[tokio::test]
async fn a_backlog_is_burnt_down_and_counted() {
    let measured = bench(&["burn-down", "-n", "1200", "--groups", "7", "--workers", "2", "--concurrency", "50"]).await;
    assert_eq!((&measured["jobs"], &measured["groups"]), (&1_200.into(), &7.into()));
    assert!(measured["jobs_per_second"].as_f64().unwrap() > 1.0 && measured["enqueued_per_second"].as_f64().unwrap() > 1.0, "{measured}");
}

#[tokio::test]
async fn items_of_bundles_are_counted() {
    let measured = bench(&["burn-down", "-n", "30", "--items", "1000", "--concurrency", "10"]).await;
    assert_eq!((&measured["jobs"], &measured["items_per_job"]), (&30.into(), &1_000.into()));
    assert!(measured["items_per_second"].as_f64() > measured["jobs_per_second"].as_f64(), "{measured}");
}

#[tokio::test]
async fn on_a_given_mongodb_nothing_is_left_behind() {
    let database = TestDatabase::new().await;
    let before = database.database().client().list_database_names().await.unwrap();
    bench(&["limit", "-n", "700", "--lanes", "2", "--on", database.uri()]).await;
    bench(&["burn-down", "-n", "300", "--on", database.uri()]).await;
    let after = database.database().client().list_database_names().await.unwrap();
    assert!(after.iter().all(|name| before.contains(name) || !name.starts_with("recruiter_bench_")), "{after:?}");
}

#[tokio::test]
async fn times_are_from_the_acknowledgement_to_the_entry() {
    let latency = bench(&["latency", "-n", "20"]).await;
    let far = bench(&["latency", "-n", "5", "--network-latency", "20ms"]).await;
    let p50 = |measured: &Value, what: &str| measured[what]["p50"].as_f64().unwrap();
    assert!(p50(&latency, "started_ms") > 0.1 && p50(&latency, "archived_ms") > p50(&latency, "started_ms"), "{latency}");
    assert!(p50(&far, "hint_ms") >= 40.0 && p50(&far, "archived_ms") >= 100.0, "a round trip takes 40 ms: {far}");
    let steady = bench(&["steady", "--rate", "100", "--duration", "2s"]).await;
    assert_eq!(steady["jobs"], 200);
    assert!(p50(&steady, "started_ms") > 0.1, "{steady}");
}

#[tokio::test]
async fn what_grows_is_there_and_the_jobs_are_done_beside_it() {
    let measured = bench(&["scale-backlog", "--backlog", "2000", "-n", "1000"]).await;
    let behind: Vec<(&str, u64)> = measured["backlogs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (one["behind"].as_str().unwrap(), one["jobs"].as_u64().unwrap()))
        .collect();
    assert_eq!(behind[..4], [("due later", 0), ("due later", 200), ("due later", 2_000), ("due but queued", 0)]);
    let measured = bench(&["scale-archive", "--archived", "3000", "-n", "400"]).await;
    assert!(measured["archive"]["bytes"].as_u64().unwrap() > 500_000, "{measured}");
}

#[tokio::test]
async fn a_benchmark_that_is_stopped_says_so_and_cleans_up() {
    let database = TestDatabase::new().await;
    let mut process = Process::start("recruiter", &["bench", "burn-down", "-n", "2000000", "--on", database.uri()], &[]);
    let bench_databases = async || {
        let names = database.database().client().list_database_names().await.unwrap();
        names.into_iter().filter(|name| name.starts_with("recruiter_bench_")).count()
    };
    recruiter_tests::wait::wait_until(SOON, "it enqueues", async || bench_databases().await > 0).await;
    process.terminate();
    assert_eq!(process.wait_exit(SOON).await.code(), Some(130), "{}", process.stderr());
    assert!(process.stdout().is_empty() && process.stderr().contains("stopped by a signal"), "{}", process.stderr());
}
