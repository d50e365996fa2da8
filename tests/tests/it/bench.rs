//! `recruiter bench`: every benchmark runs, reports correct counts, and leaves no data. Figures of a debug build have no meaning.

use recruiter_tests::{
    mongo::TestDatabase,
    processes::{Process, handles_term},
    wait::{SOON, wait_for, wait_until},
};
use serde_json::Value;

/// The result of a benchmark without its conditions, which it must contain as well.
async fn bench(args: &[&str]) -> Value {
    let run = async || {
        let mut process = Process::start("recruiter", &[&["bench"], args, &["--json"]].concat(), &[]);
        let status = process.wait_exit(SOON).await;
        // A busy machine may not have enqueued all in time.
        assert!(status.success() || process.stderr().contains("increase --ahead"), "{args:?}: {}", process.stderr());
        status.success().then_some(process)
    };
    let process = wait_for(SOON, "a measurement", run).await;
    let measured: Value = serde_json::from_str(&process.stdout()).unwrap();
    for condition in ["recruiter", "mongodb", "server", "durability", "write_concern", "cores", "processes", "build"] {
        assert!(!measured["conditions"][condition].is_null(), "{condition}: {measured}");
    }
    // A busy machine may cause warnings.
    assert!(process.stderr().lines().all(|line| line.contains("WARN")), "{}", process.stderr());
    measured
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn p50(measured: &Value, what: &str) -> f64 {
    number(&measured[what]["p50"])
}

#[tokio::test]
async fn a_backlog_is_burnt_down_and_counted() {
    let measured = bench(&["burn-down", "-n", "1200", "--groups", "7", "--workers", "2", "--concurrency", "50"]).await;
    assert_eq!((&measured["jobs"], &measured["groups"]), (&1_200.into(), &7.into()));
    assert!(measured["jobs_per_second"].as_f64().unwrap() > 1.0 && measured["enqueued_per_second"].as_f64().unwrap() > 1.0, "{measured}");
    let lines = bench(&["burn-down", "-n", "300", "--lines", "100", "--workers", "1", "--concurrency", "10"]).await;
    assert!(lines["lines"] == 100 && number(&lines["jobs_per_second"]) > 1.0, "{lines}");
}

#[tokio::test]
async fn jobs_of_which_nothing_is_kept_are_counted() {
    let all = bench(&["burn-down", "-n", "700", "--keep-failures", "--concurrency", "50"]).await;
    assert!(all["keep_failures"] == true && number(&all["jobs_per_second"]) > 1.0, "{all}");
    let flags = ["--keep-failures", "--durations", "5", "--slots", "5", "-n", "300", "--long", "0"];
    let few = bench(&[&["ordinary"], &flags[..]].concat()).await;
    assert!(few["keep_failures"] == true && number(&few["rows"][0]["jobs_per_second"]) > 1.0, "{few}");
}

#[tokio::test]
async fn pipelines_are_compared_with_independent_jobs() {
    let measured = bench(&["graphs", "-n", "300", "--stages", "3", "--alone", "5", "--concurrency", "50"]).await;
    assert_eq!((&measured["jobs"], &measured["stages"]), (&300.into(), &3.into()));
    assert!(number(&measured["ratio"]) > 0.0 && p50(&measured, "entered_to_next_entered_ms") > 0.1, "{measured}");
    let wide = bench(&["graphs", "-n", "220", "--width", "20", "--alone", "1", "--concurrency", "50"]).await;
    assert_eq!((&wide["jobs"], &wide["width"], &wide["stages"]), (&220.into(), &20.into(), &Value::Null));
}

#[tokio::test]
async fn items_of_bundles_are_counted() {
    let measured = bench(&["burn-down", "-n", "30", "--items", "1000", "--concurrency", "10"]).await;
    assert_eq!((&measured["jobs"], &measured["items_per_job"]), (&30.into(), &1_000.into()));
    assert!(measured["items_per_second"].as_f64() > measured["jobs_per_second"].as_f64(), "{measured}");
}

#[tokio::test]
async fn on_a_given_mongodb_nothing_is_left_behind() {
    // Other benchmarks run on the shared one.
    let database = TestDatabase::of_its_own().await;
    bench(&["limit", "-n", "700", "--lanes", "2", "--on", database.uri()]).await;
    bench(&["burn-down", "-n", "300", "--on", database.uri()]).await;
    let left = database.database().client().list_database_names().await.unwrap();
    assert!(left.iter().all(|name| !name.starts_with("recruiter_bench_")), "{left:?}");
}

#[tokio::test]
async fn times_are_from_the_acknowledgement_to_the_entry() {
    let latency = bench(&["latency", "-n", "20"]).await;
    let far = bench(&["latency", "-n", "5", "--network-latency", "20ms"]).await;
    let other = bench(&["latency", "-n", "5", "--later", "50ms", "--without-hint"]).await;
    assert!(other["with_hint"] == false && number(&other["later_ms"]) >= 50.0 && p50(&other, "started_ms") > 0.1, "{other}");
    assert!(p50(&latency, "started_ms") > 0.1 && p50(&latency, "archived_ms") > p50(&latency, "started_ms"), "{latency}");
    assert!(p50(&far, "hint_ms") >= 40.0 && p50(&far, "archived_ms") >= 100.0, "a round trip takes 40 ms: {far}");
    let steady = bench(&["steady", "--rate", "100", "--duration", "2s"]).await;
    assert_eq!(steady["jobs"], 200);
    assert!(p50(&steady, "started_ms") > 0.1 && p50(&steady, "archived_ms") > p50(&steady, "started_ms"), "{steady}");
    assert!(p50(&steady, "archived_is_seen_late_by_ms") >= 0.0, "{steady}");
}

#[tokio::test]
async fn a_herd_is_not_started_before_it_is_due() {
    let herd = bench(&["herd", "-n", "700", "--workers", "2", "--concurrency", "50"]).await;
    let first = number(&herd["first_started_ms"]);
    assert_eq!(herd["jobs"], 700);
    assert!(first >= 0.0 && first <= p50(&herd, "started_ms") && number(&herd["seconds"]) * 1_000.0 > first, "{herd}");
}

#[tokio::test]
async fn short_jobs_wait_for_places_that_long_ones_keep() {
    // Two of four places, for most of the time.
    let mixed = bench(&["mixed", "-n", "200", "--one-in", "50", "--long", "1s", "--workers", "2", "--concurrency", "2"]).await;
    assert_eq!((&mixed["short_jobs"], &mixed["long_jobs"], &mixed["long_ms"]), (&196.into(), &4.into(), &1_000.into()));
    let over = &mixed["mixed_over_alone"];
    assert!(number(&over["started_p50"]) > 0.0 && number(&over["started_p99"]) > 0.0 && number(&over["jobs_per_second"]) > 0.0, "{mixed}");
    assert!(number(&mixed["all_seconds"]) >= 1.0 && number(&mixed["alone"]["jobs_per_second"]) > 1.0, "{mixed}");
}

#[tokio::test]
async fn rounds_of_simulated_workers_are_measured() {
    let measured = bench(&["scale-rounds", "--fleet", "100", "--keys", "1000", "--rounds", "100", "--slots-each", "4"]).await;
    let sizes = measured["sizes"].as_array().unwrap();
    let size = |one: &Value| ["workers", "keys", "assigned_in_each"].map(|field| one[field].as_u64().unwrap());
    assert_eq!(
        sizes.iter().map(size).map(|[workers, keys, _]| [workers, keys]).collect::<Vec<_>>(),
        [[1, 0], [10, 0], [100, 0], [10, 1], [10, 10], [10, 100], [10, 1_000], [100, 1_000]]
    );
    assert_eq!([&sizes[1], &sizes[2]].map(|one| size(one)[2]), [4, 40], "a tenth of the workers: {measured}");
    assert!(sizes.iter().all(|one| p50(one, "round_ms") > 0.0 && p50(one, "full_scan_ms") > 0.0), "{measured}");
    assert!(sizes.iter().all(|one| number(&one["assigned_per_second"]) > 1.0), "{measured}");
}

#[tokio::test]
async fn rounds_are_measured_on_rosters_and_on_processes() {
    let measured = bench(&["scale-workers", "--slots", "10", "--processes", "2", "--concurrency", "3"]).await;
    let sizes = |what: &str, of: &str| {
        let all = measured[what].as_array().unwrap();
        assert!(all.iter().all(|one| number(&one["us_per_place"]) > 0.0), "{measured}");
        all.iter().map(|one| one[of].as_u64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(
        (sizes("fleets", "slots"), sizes("processes", "processes"), sizes("processes", "slots")),
        (vec![10], vec![1, 2], vec![3, 6])
    );
    assert!(measured["processes"].as_array().unwrap().iter().all(|one| p50(one, "archived_ms") > 1.0), "{measured}");
    assert_eq!(measured["cost_per_place_at_10000_over_100"], Value::Null);
    let cost = &measured["hints"]["mongod_percent_of_a_core"];
    assert!(number(&cost["with_hints"]) > 0.0 && number(&cost["with_hints"]) < 200.0, "{measured}");
}

#[tokio::test]
async fn the_idle_system_is_weighed_whole() {
    let database = TestDatabase::new().await;
    let embedded = bench(&["idle", "--duration", "2s"]).await;
    let given = bench(&["idle", "--duration", "1s", "--workers", "1", "--on", database.uri()]).await;
    let programs = |measured: &Value| {
        let all = measured["processes"].as_array().unwrap();
        assert!(all.iter().all(|one| number(&one["memory"]["now_mb"]) > 1.0), "{measured}");
        all.iter().map(|one| one["program"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(programs(&embedded), [&["recruiter", "recruiter-cleaner"][..], &["recruiter-worker"; 4], &["mongod"]].concat());
    assert_eq!(programs(&given), ["recruiter", "recruiter-cleaner", "recruiter-worker"]);
    assert!(number(&embedded["ours_percent_of_a_core"]) < 100.0, "{embedded}");
    assert!(number(&embedded["reads_per_second"]) > 0.0 && number(&embedded["writes_per_second"]) > 0.0, "{embedded}");
    let commands = embedded["commands_per_second"].as_object().unwrap();
    assert!(commands.contains_key("find") && !commands.contains_key("hello") && !commands.contains_key("getMore"), "{embedded}");
}

#[tokio::test]
async fn memory_is_that_of_processes_that_have_something_to_remember() {
    let measured = bench(&["memory", "--concurrency", "50", "--slots", "100"]).await;
    let (worker, recruiter) = (&measured["worker"], &measured["recruiter"]);
    assert_eq!((&worker["running_jobs"], &recruiter["slots"], &recruiter["assigned_jobs"]), (&50.into(), &100.into(), &200.into()));
    for state in
        [&worker["idle"], &worker["busy"], &recruiter["without_workers"], &recruiter["idle"], &recruiter["after_all_were_assigned"]]
    {
        assert!(number(&state["now_mb"]) > 1.0 && number(&state["peak_mb"]) >= number(&state["now_mb"]), "{measured}");
    }
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
    let database = TestDatabase::of_its_own().await;
    let mut process = Process::start("recruiter", &["bench", "burn-down", "-n", "2000000", "--on", database.uri()], &[]);
    let bench_databases = async || {
        let names = database.database().client().list_database_names().await.unwrap();
        names.into_iter().filter(|name| name.starts_with("recruiter_bench_")).count()
    };
    wait_until(SOON, "it enqueues", async || bench_databases().await > 0 && handles_term(process.pid())).await;
    process.terminate();
    assert_eq!(process.wait_exit(SOON).await.code(), Some(130), "{}", process.stderr());
    assert!(process.stdout().is_empty() && process.stderr().contains("stopped by a signal"), "{}", process.stderr());
}

#[tokio::test]
async fn jobs_are_enqueued_and_done_over_http() {
    let http = bench(&["http", "-n", "10", "--lines", "1500", "--reserved", "50", "--clients", "3"]).await;
    assert!(p50(&http["one_by_one"], "over_http_ms") > 0.0 && p50(&http["one_by_one"], "by_library_ms") > 0.0, "{http}");
    assert!(http["lines"]["over_http_per_second"].as_f64() > Some(0.0), "{http}");
    for work in [&http["work"], &http["repeatable_work"]] {
        assert_eq!((&work["jobs"], &work["clients"]), (&50.into(), &3.into()));
        assert!(p50(work, "reserved_and_committed_ms") > 0.0, "{http}");
    }
}

#[tokio::test]
async fn messages_arrive_and_waits_return() {
    let messages = bench(&["pubsub", "-n", "30", "--batches", "4", "--batch", "10", "--subscribers", "2"]).await;
    assert_eq!((&messages["one_by_one"]["messages"], &messages["in_batches"]["messages"]), (&30.into(), &40.into()));
    assert!(p50(&messages["in_batches"], "received_ms") > 0.0, "{messages}");
    let wait = bench(&["wait", "-n", "5", "--workers", "1"]).await;
    assert!(p50(&wait, "returned_ms") > p50(&wait, "after_archive_ms"), "{wait}");
    for watcher in ["waiter", "events", "change-stream"] {
        let watched = bench(&["burn-down", "-n", "300", "--watcher", watcher]).await;
        assert_eq!(watched["jobs"], 300);
    }
}
