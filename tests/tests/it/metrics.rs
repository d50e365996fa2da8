//! Metrics and probes: real programs through a life, hostile requests, addresses, and what documents, alerts and the dashboard say.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::ErrorKind,
    net::{SocketAddr, TcpListener as Blocked},
    process::Command,
    time::{Duration, Instant},
};

use bson::doc;
use chrono::TimeDelta;
use recruiter_common::{
    Limit, NewJob,
    control::Change,
    meters::{self, Kind, Meter},
    schedules::Schedule,
    store::{GroupSample, Lane},
};
use recruiter_tests::{
    factory::again,
    local::store,
    mongo::TestDatabase,
    processes::{Process, mentioning, skipped},
    proxy::Proxy,
    wait::{SOON, in_a_few_tries, wait_for, wait_until},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use yaml_rust2::{Yaml, YamlLoader};

use super::{
    tidy::{root, sources},
    usual_settings::run,
};

/// A port that is free, which the log names.
const ANYWHERE: &str = "--metrics=127.0.0.1:0";

/// Where a process serves its metrics.
async fn address(process: &Process) -> SocketAddr {
    let named = async || {
        let log = process.stderr();
        let line = log.lines().find(|line| line.contains("serving metrics"))?;
        line.split_once("address=")?.1.split_whitespace().next()?.parse().ok()
    };
    wait_for(SOON, "it serves metrics", named).await
}

/// Sends these bytes and reads all of the answer. `None`: the server has closed the connection without one.
async fn sent(at: SocketAddr, request: &[u8]) -> Option<String> {
    let mut stream = TcpStream::connect(at).await.unwrap();
    // The server may have answered and closed before it has read all.
    let _ = stream.write_all(request).await;
    let mut answer = Vec::new();
    let read = stream.read_to_end(&mut answer).await;
    assert!(read.is_ok() || read.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset));
    (!answer.is_empty()).then(|| String::from_utf8(answer).unwrap())
}

/// The status and the body of a page. The server ends a connection that has stood still with the machine.
async fn page(at: SocketAddr, path: &str) -> (u16, String) {
    let request = format!("GET {path} HTTP/1.1\r\nHost: {at}\r\n\r\n");
    let answer = in_a_few_tries("an answer", async || sent(at, request.as_bytes()).await).await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (status(head), body.to_owned())
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).unwrap().parse().unwrap()
}

/// A sample of a scrape: its name, its labels and its value.
type Sample = (String, BTreeMap<String, String>, f64);

fn samples(scrape: &str) -> Vec<Sample> {
    let sample = |line: &str| {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let labels = labels.trim_end_matches('}').split("\",").filter_map(|label| label.split_once("=\""));
        let labels = labels.map(|(name, value)| (name.to_owned(), value.trim_end_matches('"').to_owned())).collect();
        (name.to_owned(), labels, value.parse().unwrap())
    };
    scrape.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).map(sample).collect()
}

/// The metric that a series belongs to.
fn meter_of(series: &str) -> Option<&'static Meter> {
    let stems = ["_bucket", "_sum", "_count"].iter().filter_map(|end| series.strip_suffix(end));
    let is_exact = |meter: &&Meter| meter.name == series && meter.kind.buckets().is_none();
    let is_histogram = |meter: &&Meter| meter.kind.buckets().is_some() && stems.clone().any(|stem| stem == meter.name);
    meters::ALL.iter().find(|meter| is_exact(meter) || is_histogram(meter))
}

/// The names of all operations of MongoDB, found in the source: the first text that is given to a function with a parameter `operation`.
fn operations() -> BTreeSet<String> {
    let rooms = root().join("common/src");
    let code: Vec<String> = sources()
        .into_iter()
        .filter(|(path, _)| path.starts_with(&rooms))
        .map(|(_, text)| text.split("#[cfg(test)]").next().unwrap().split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    let takes_it = |function: &str| {
        let (name, rest) = (function.split(['(', '<']).next()?, function.split_once('(')?.1);
        let depth = |depth: &mut i32, c: char| {
            *depth += i32::from(c == '(') - i32::from(c == ')');
            (*depth >= 0).then_some(c)
        };
        let parameters: String = rest.chars().scan(0, depth).collect();
        parameters.contains("operation: &'static str").then(|| name.to_owned())
    };
    let mut functions: BTreeSet<String> = code.iter().flat_map(|text| text.split("fn ").skip(1).filter_map(takes_it)).collect();
    // These send nothing.
    functions.retain(|function| !["of", "require_transaction"].contains(&function.as_str()));
    assert!(functions.contains("call") && functions.contains("measured"), "{functions:?}");
    let mut found = BTreeSet::new();
    for text in &code {
        for (at, mark) in text.match_indices('"') {
            let before = text[..at].trim_end();
            // `call(`, or `call_within(LIMIT,`.
            let second = || before.strip_suffix(',')?.rsplit_once('(').filter(|(_, first)| !first.contains('"')).map(|(before, _)| before);
            let called = before.strip_suffix('(').or_else(second);
            let called = called.map(|called| called.rsplit(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap());
            let (name, after) = text[at + mark.len()..].split_once('"').unwrap_or_default();
            let is_name =
                after.starts_with([',', ')']) && !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
            if is_name && called.is_some_and(|called| functions.contains(called)) {
                found.insert(name.to_owned());
            }
        }
    }
    found
}

/// The programs of a life, and what their metrics have been.
struct Life {
    processes: Vec<Process>,
    seen: BTreeMap<&'static str, f64>,
    operations: BTreeSet<String>,
}

impl Life {
    /// Reads the metrics of all programs. Each has a known name and the labels of the table.
    async fn scrape(&mut self) -> Vec<Sample> {
        let mut all = Vec::new();
        for process in &self.processes {
            let (status, text) = page(address(process).await, "/metrics").await;
            assert_eq!(status, 200);
            for (series, labels, value) in samples(&text) {
                let meter = meter_of(&series).unwrap_or_else(|| panic!("{series} is not in the table"));
                let of_table: BTreeSet<&str> = meter.labels.iter().copied().chain(series.ends_with("_bucket").then_some("le")).collect();
                assert_eq!(labels.keys().map(String::as_str).collect::<BTreeSet<_>>(), of_table, "{series}");
                self.operations.extend(labels.get("operation").cloned());
                let best = self.seen.entry(meter.name).or_default();
                *best = best.max(value);
                all.push((series, labels, value));
            }
            for meter in meters::ALL.iter().filter(|meter| text.contains(&format!("\n# TYPE {} ", meter.name))) {
                assert!(text.contains(&format!("# HELP {} {}", meter.name, meter.help)), "{}", meter.name);
                assert!(text.contains(&format!("# TYPE {} {}", meter.name, meter.kind.word())), "{}", meter.name);
            }
        }
        all
    }

    /// Waits until the sum of the samples of this series with these labels is as wanted.
    async fn until(&mut self, series: &str, labels: &[(&str, &str)], is_wanted: impl Fn(f64) -> bool) {
        let what = format!("{series} {labels:?}");
        let reached = async || {
            let all = self.scrape().await;
            let has = |of: &BTreeMap<String, String>| labels.iter().all(|(name, value)| of.get(*name).is_some_and(|other| other == value));
            is_wanted(all.iter().filter(|(name, of, _)| name == series && has(of)).map(|(.., value)| value).sum())
        };
        wait_until(SOON, &what, reached).await;
    }
}

/// Metrics that need not have a value above zero in the life below, each with the reason.
const RARE: [(&str, &str); 5] = [
    ("recruiter_events_dropped_total", "10,000 events would have to wait"),
    ("recruiter_files_pruned_total", "a file without a job is kept for a day"),
    ("recruiter_rescues_failed_total", "MongoDB would have to fail in a rescue"),
    ("recruiter_duties_failed_total", "MongoDB would have to fail"),
    ("recruiter_database_errors_total", "MongoDB would have to fail; `a_process_is_ready_while_mongodb_answers` sees it"),
];

#[tokio::test(flavor = "multi_thread")]
async fn every_metric_has_a_value_in_the_life_of_a_system() {
    let database = TestDatabase::new().await;
    let store = store(&database).await;
    store.limits().set("printer", Limit::capacity(3)).await.unwrap();
    let schedule = Schedule::every(Duration::from_secs(1)).unwrap().job(NewJob::of_class("noop", doc! {}).in_group("periodic"));
    store.schedules().declare("each-second", &schedule).await.unwrap();
    let cleaner = ["--every=300ms", "--sweep-every=1s", "--prune-every=1s", "--keep-archived=1s", ANYWHERE];
    let mut life = Life {
        processes: vec![
            Process::on(&database, "recruiter", &["run", ANYWHERE]),
            Process::on(&database, "recruiter-worker", &["--builtins", "--heartbeat=1s", ANYWHERE]),
            Process::on(&database, "recruiter-cleaner", &[&cleaner[..], &["--dead-after=2s"]].concat()),
        ],
        seen: BTreeMap::new(),
        operations: BTreeSet::new(),
    };
    let job = |class: &str, ms: i64| NewJob::of_class(class, doc! { "ms": ms });
    for _ in 0..5 {
        job("noop", 0).in_group("mail").enqueue(&store).await.unwrap();
    }
    job("fail", 0).enqueue(&store).await.unwrap();
    job("fail", 0).retry(&again(1)).enqueue(&store).await.unwrap();
    let long = job("sleep", 600_000).limit("printer").enqueue(&store).await.unwrap().id;
    let waits = job("noop", 0).in_group("mail").waits_for(long).enqueue(&store).await.unwrap().id;
    job("noop", 0).in_group("mail").after(Duration::from_secs(3_600)).enqueue(&store).await.unwrap();
    job("of-nobody", 0).in_group("lost").enqueue(&store).await.unwrap();
    job("of-nobody", 0).in_group("lost").expires_after(Duration::from_millis(1)).enqueue(&store).await.unwrap();

    let ended = |class: &'static str, outcome: &'static str| [("class", class), ("outcome", outcome)];
    life.until("recruiter_jobs_ended_total", &ended("noop", "done"), |count| count >= 6.0).await;
    life.until("recruiter_jobs_ended_total", &ended("fail", "failed"), |count| (count - 2.0).abs() < 0.5).await;
    life.until("recruiter_jobs_ended_total", &ended("fail", "retried"), |count| (count - 1.0).abs() < 0.5).await;
    life.until("recruiter_job_execution_seconds_count", &[("class", "fail")], |count| (count - 3.0).abs() < 0.5).await;
    life.until("recruiter_jobs_assigned_total", &[("group", "mail")], |count| (count - 5.0).abs() < 0.5).await;
    life.until("recruiter_slots", &[("state", "busy")], |slots| slots >= 1.0).await;
    life.until("recruiter_slots", &[], |slots| (slots - 10.0).abs() < 0.5).await;
    life.until("recruiter_leader", &[], |leaders| leaders > 0.5).await;
    // As the leader samples it.
    let waiting = |group: &'static str, reason: &'static str| [("group", group), ("reason", reason)];
    for (group, reason) in [("lost", "no-worker"), ("mail", "waits-for-jobs"), ("mail", "not-due")] {
        life.until("recruiter_jobs_waiting", &waiting(group, reason), |jobs| (jobs - 1.0).abs() < 0.5).await;
    }
    life.until("recruiter_oldest_waiting_seconds", &[("group", "lost")], |age| age > 0.1).await;
    life.until("recruiter_permits_in_use", &[("resource", "printer")], |permits| (permits - 1.0).abs() < 0.5).await;
    life.until("recruiter_permits", &[("resource", "printer")], |permits| (permits - 3.0).abs() < 0.5).await;
    life.until("recruiter_schedule_slots_total", &[("outcome", "run")], |slots| slots >= 2.0).await;

    // The death of a worker, and its rescue.
    life.processes.remove(1).kill();
    life.until("recruiter_workers_retired_total", &[("cause", "gone")], |workers| (workers - 1.0).abs() < 0.5).await;
    // The schedule's jobs may have run there, too.
    life.until("recruiter_jobs_rescued_total", &[("outcome", "archived")], |jobs| jobs >= 1.0).await;
    life.until("recruiter_jobs_expired_total", &[], |jobs| (jobs - 1.0).abs() < 0.5).await;
    life.until("recruiter_jobs_pruned_total", &[], |jobs| jobs >= 1.0).await;
    life.until("recruiter_duty_seconds_count", &[("duty", "sweep")], |passes| passes >= 1.0).await;
    store.control(false).change(&Change::Cancel, &[waits]).await.unwrap();

    let (known, rare): (BTreeSet<String>, BTreeSet<&str>) = (operations(), RARE.iter().map(|(name, _)| *name).collect());
    let unknown: Vec<&String> = life.operations.difference(&known).collect();
    assert!(life.operations.len() > 20 && unknown.is_empty(), "{unknown:?} of {:?}", life.operations);
    let is_missing = |meter: &&Meter| life.seen.get(meter.name).is_none_or(|value| *value <= 0.0) && !rare.contains(meter.name);
    let missing: Vec<&str> = meters::ALL.iter().filter(is_missing).map(|meter| meter.name).collect();
    assert!(missing.is_empty(), "never seen with a value: {missing:?}");
    let unseen: Vec<&&str> = rare.iter().filter(|name| !life.seen.contains_key(**name)).collect();
    assert!(unseen.is_empty() || unseen == [&"recruiter_events_dropped_total"], "not even zero: {unseen:?}");
    for mut process in life.processes {
        process.stop().await;
    }
}

#[tokio::test]
async fn a_sample_counts_each_waiting_job_of_its_group_once_and_reads_no_other_group() {
    let database = TestDatabase::new().await;
    let store = store(&database).await;
    let now = store.now();
    let due = |class: &str, seconds: i64| NewJob::of_class(class, doc! {}).in_group("a").at(now - TimeDelta::seconds(seconds));
    let first = due("x", 30).enqueue(&store).await.unwrap().id;
    due("x", 10).enqueue(&store).await.unwrap();
    due("y", 20).limit("printer").enqueue(&store).await.unwrap();
    due("x", -3_600).enqueue(&store).await.unwrap();
    due("x", 0).waits_for(first).enqueue(&store).await.unwrap();
    for _ in 0..20 {
        due("x", 50).in_group("b").enqueue(&store).await.unwrap();
    }
    let gated = NewJob::of_class("y", doc! {}).limit("printer").to_job(now).unwrap().gate;
    let profile = async |level: i32| database.database().run_command(doc! { "profile": level }).await.unwrap();
    profile(2).await;
    let sample = store.sample_group("a", now, 1_000).await.unwrap();
    profile(0).await;
    let lanes = [(Lane::new("a", "x"), 2), (Lane { gate: gated, ..Lane::new("a", "y") }, 1)];
    let expected = GroupSample { due: 3, later: 1, for_jobs: 1, oldest: Some(now - TimeDelta::seconds(30)), lanes: lanes.to_vec() };
    assert_eq!(sample, expected);
    let reads = database.all("system.profile", doc! { "command.aggregate": "scheduled" }).await;
    let examined: Vec<i32> = reads.iter().map(|read| read.get_i32("keysExamined").unwrap()).collect();
    // One entry more can be read to find the end.
    assert!(examined.len() == 2 && examined[0] <= 5 && examined[1] <= 2, "{reads:?}");
    let some = store.sample_group("a", now, 1).await.unwrap();
    assert_eq!(some.due + some.later + some.for_jobs, 2, "one without a gate, and one with");
    assert_eq!(store.sample_group("of nobody", now, 1_000).await.unwrap(), GroupSample::default());
}

/// A leader that steps down knows nothing about waiting jobs any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_recruiter_that_stands_by_shows_no_numbers_of_the_leader() {
    let database = TestDatabase::new().await;
    let store = store(&database).await;
    let recruiter = Process::on(&database, "recruiter", &["run", ANYWHERE, "--lease=1s", "--poll=300ms"]);
    NewJob::of_class("of-nobody", doc! {}).in_group("lost").enqueue(&store).await.unwrap();
    let at = address(&recruiter).await;
    let value = async |wanted: &str| {
        let all = samples(&page(at, "/metrics").await.1);
        all.iter().filter(|(name, ..)| name == wanted).map(|(.., value)| value).sum::<f64>()
    };
    wait_until(SOON, "it samples", async || value("recruiter_jobs_waiting").await > 0.5).await;
    assert!(value("recruiter_leader").await > 0.5 && value("recruiter_lease_term").await > 0.5);
    // Another one leads, and renews its lease while this one is frozen.
    recruiter.pause();
    let other = Process::on(&database, "recruiter", &["run", "--lease=5s"]);
    wait_until(SOON, "the other leads", async || other.stderr().contains("leading")).await;
    recruiter.resume();
    wait_until(SOON, "it stands by", async || page(at, "/readyz").await == (200, "standing by\n".into())).await;
    for gauge in ["recruiter_leader", "recruiter_lease_term", "recruiter_jobs_waiting", "recruiter_oldest_waiting_seconds"] {
        let left = value(gauge).await;
        assert!(left.abs() < f64::EPSILON, "{gauge} is still {left}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_is_ready_while_mongodb_answers() {
    let database = TestDatabase::new().await;
    let line = Proxy::before(database.uri()).await;
    let uri = line.uri(database.name());
    let start = |name: &str, args: &[&str]| Process::start(name, args, &[("MONGODB_URI", uri.as_str())]);
    line.sever();
    let processes = [
        ("leading", start("recruiter", &["run", ANYWHERE])),
        ("waiting for jobs", start("recruiter-worker", &["--builtins", ANYWHERE])),
        ("watching", start("recruiter-cleaner", &[ANYWHERE])),
    ];
    for (_, process) in &processes {
        // Before it has reached MongoDB.
        let at = address(process).await;
        assert_eq!(page(at, "/readyz").await, (503, "starting\n".into()));
        assert_eq!(page(at, "/livez").await.0, 200);
    }
    for _ in 0..2 {
        line.heal();
        for (status, process) in &processes {
            let at = address(process).await;
            wait_until(SOON, "it is ready", async || page(at, "/readyz").await == (200, format!("{status}\n"))).await;
        }
        line.sever();
        for (_, process) in &processes {
            let at = address(process).await;
            wait_until(SOON, "it is not ready", async || page(at, "/readyz").await == (503, "MongoDB does not answer\n".into())).await;
            assert_eq!(page(at, "/livez").await.0, 200, "its main loop makes progress");
            let scrape = samples(&page(at, "/metrics").await.1);
            let errors = scrape.iter().filter(|(name, ..)| name == "recruiter_database_errors_total");
            assert!(errors.clone().any(|(_, labels, count)| *count > 0.0 && labels["problem"] != "refused"), "{scrape:?}");
            assert!(scrape.iter().any(|(name, _, ready)| name == "recruiter_ready" && *ready < 0.5));
        }
    }
    line.heal();
    for (_, mut process) in processes {
        process.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_drains_is_alive_and_not_ready() {
    let database = TestDatabase::new().await;
    let store = store(&database).await;
    let _recruiter = Process::on(&database, "recruiter", &["run"]);
    let mut worker = Process::on(&database, "recruiter-worker", &["--builtins", "--grace=1h", ANYWHERE]);
    let job = NewJob::of_class("sleep", doc! { "ms": 600_000 }).enqueue(&store).await.unwrap().id;
    database.until("scheduled", doc! { "_id": job, "locked": true }, 1, "it runs").await;
    worker.terminate();
    let at = address(&worker).await;
    wait_until(SOON, "it stops", async || page(at, "/readyz").await == (503, "stopping\n".into())).await;
    assert_eq!(page(at, "/livez").await.0, 200);
    store.control(false).change(&Change::Cancel, &[job]).await.unwrap();
    assert!(worker.wait_exit(SOON).await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_requests_are_bounded() {
    let database = TestDatabase::new().await;
    let mut cleaner = Process::on(&database, "recruiter-cleaner", &[ANYWHERE]);
    let at = address(&cleaner).await;
    let head = |first: &str, rest: &str| format!("{first}\r\nHost: {at}\r\n{rest}\r\n").into_bytes();
    let check = async |request: Vec<u8>| sent(at, &request).await.map(|answer| status(&answer));
    assert_eq!(check(head("POST /metrics HTTP/1.1", "Content-Length: 5\r\n")).await, Some(405));
    assert_eq!(check(head("DELETE /livez HTTP/1.1", "")).await, Some(405));
    assert_eq!(check(head("GET / HTTP/1.1", "")).await, Some(404));
    assert_eq!(check(head("GET /../../etc/passwd HTTP/1.1", "")).await, Some(404));
    assert_eq!(check(head("GET /metrics?x=1 HTTP/1.0", "")).await, Some(200));
    let without_body = sent(at, &head("HEAD /metrics HTTP/1.1", "")).await.unwrap();
    assert!(status(&without_body) == 200 && without_body.ends_with("\r\n\r\n"), "{without_body}");
    // A head that is too large, too many headers, and no HTTP at all.
    assert_eq!(check(head("GET /metrics HTTP/1.1", &format!("A: {}\r\n", "x".repeat(100_000)))).await, Some(431));
    assert_eq!(check(head("GET /metrics HTTP/1.1", &"A: b\r\n".repeat(1_000))).await, Some(431));
    assert!(check(b"\x16\x03\x01\x02\x00 no HTTP\r\n\r\n".to_vec()).await.is_none_or(|status| status == 400));
    // Clients that send nothing, or stop in the middle: more of them than there are places.
    let begun = Instant::now();
    let mut slow = Vec::new();
    for number in 0..40 {
        let mut stream = TcpStream::connect(at).await.unwrap();
        stream.write_all(if number % 2 == 0 { b"GET /met" } else { b"" }).await.unwrap();
        slow.push(stream);
    }
    assert_eq!(page(at, "/livez").await.0, 200, "after {:?}", begun.elapsed());
    // One that sends an endless body is answered, and cut off.
    let mut endless = TcpStream::connect(at).await.unwrap();
    endless.write_all(&head("POST /metrics HTTP/1.1", "Transfer-Encoding: chunked\r\n")).await.unwrap();
    let cut_off = async || endless.write_all(b"5\r\nhello\r\n").await.is_err();
    wait_until(SOON, "the connection is closed", cut_off).await;
    drop(slow);
    cleaner.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_cannot_be_used_is_an_error_that_says_what_to_do() {
    let database = TestDatabase::new().await;
    let taken = Blocked::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let programs: [(&str, &[&str]); 3] = [("recruiter", &["run"]), ("recruiter-worker", &["--builtins"]), ("recruiter-cleaner", &[])];
    for (name, args) in programs {
        let said = run(name, &[args, &["--metrics", &taken]].concat(), &[("MONGODB_URI", database.uri())]);
        assert_eq!(said.code, 1, "{name}: {}", said.err);
        let expected = format!("cannot serve metrics at {taken} (--metrics, RECRUITER_METRICS): another process listens there; give each");
        assert!(said.err.contains(&expected), "{name}: {}", said.err);
        let said = run(name, args, &[("MONGODB_URI", database.uri()), ("RECRUITER_METRICS", "9464")]);
        assert_eq!(said.code, 2, "{name}: {}", said.err);
        assert!(said.err.contains("\"9464\" is not a host and a port such as 127.0.0.1:9464"), "{name}: {}", said.err);
    }
    for (elsewhere, advice) in
        [("192.0.2.1:9464", "it is no address of this machine"), ("no-such-host.invalid:9464", "use an address of this")]
    {
        let said = run("recruiter-cleaner", &["--metrics", elsewhere], &[("MONGODB_URI", database.uri())]);
        assert!(said.code == 1 && said.err.contains(elsewhere) && said.err.contains(advice), "{}", said.err);
    }
    // An address that others reach is allowed, with a warning.
    let open = Process::on(&database, "recruiter-cleaner", &["--metrics=0.0.0.0:0"]);
    let warning = "metrics are served to everyone who reaches this address";
    wait_until(SOON, "it warns", async || open.stderr().contains(warning)).await;
    let closed = Process::on(&database, "recruiter-cleaner", &[ANYWHERE]);
    wait_until(SOON, "it is ready", async || closed.stderr().contains("watching the heartbeats")).await;
    assert!(!closed.stderr().contains(warning));
}

/// Without the flag nothing listens, and a command that ends by itself has no such flag.
#[tokio::test(flavor = "multi_thread")]
async fn only_processes_that_keep_running_serve_metrics_and_only_if_asked() {
    let database = TestDatabase::new().await;
    let cleaner = Process::on(&database, "recruiter-cleaner", &[]);
    wait_until(SOON, "it is ready", async || cleaner.stderr().contains("watching the heartbeats")).await;
    assert!(!cleaner.stderr().contains("serving metrics"));
    for command in [&["stats"][..], &["jobs", "list"], &["dev"]] {
        let help = run("recruiter", &[command, &["--help"]].concat(), &[]).out;
        assert!(!help.contains("--metrics"), "{command:?}");
    }
}

/// `recruiter dev` passes its settings to several processes, of which one only could listen at the address.
#[tokio::test]
async fn dev_leaves_the_address_to_no_process() {
    let directory = tempfile::tempdir().unwrap();
    let (data, mongod) = (directory.path().to_str().unwrap(), recruiter_tests::mongo::mongod());
    let env = [("RECRUITER_DATA_DIR", data), ("RECRUITER_MONGOD", mongod.to_str().unwrap()), ("RECRUITER_METRICS", "127.0.0.1:0")];
    let mut dev = Process::start("recruiter", &["dev", "--json"], &env);
    wait_until(SOON, "it is ready", async || dev.stdout().contains("uri")).await;
    assert!(!dev.stderr().contains("serving metrics"), "{}", dev.stderr());
    dev.stop().await;
    wait_until(SOON, "all processes are gone", async || mentioning(data).is_empty()).await;
}

/// The cells of the rows after this heading.
fn rows(heading: &str) -> Vec<Vec<String>> {
    let page = fs::read_to_string(root().join("docs/metrics.md")).unwrap();
    let (_, section) = page.split_once(&format!("\n## {heading}\n")).unwrap();
    let lines = section.lines().take_while(|line| !line.starts_with("## ")).filter(|line| line.starts_with("| `"));
    lines.map(|line| line.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect()).collect()
}

/// Each row has the name, the kind, the labels and what it is.
#[test]
fn the_page_about_metrics_has_the_table_of_the_source() {
    let listed: Vec<[String; 4]> = rows("Metrics").into_iter().map(|row| row.try_into().unwrap()).collect();
    let expected: Vec<[String; 4]> = meters::ALL
        .iter()
        .map(|Meter { name, kind, labels, help }| {
            let labels = labels.iter().map(|label| format!("`{label}`")).collect::<Vec<_>>().join(", ");
            [format!("`{name}`"), kind.word().to_owned(), labels, (*help).to_owned()]
        })
        .collect();
    let wrong: Vec<_> = expected.iter().filter(|row| !listed.contains(row)).collect();
    assert!(wrong.is_empty() && listed.len() == expected.len(), "{} rows; not on the page: {wrong:#?}", listed.len());
}

/// The number of values of `operation` is the number of names in the source.
#[test]
fn the_number_of_operations_is_that_of_the_page() {
    let (page, count) = (fs::read_to_string(root().join("docs/metrics.md")).unwrap(), operations().len());
    assert!(count > 150 && count < meters::MOST_OPERATIONS, "{count}: {:?}", operations());
    assert!(page.contains(&format!("{count} operations")), "there are {count} operations: {:?}", operations());
    assert!(page.contains(&format!("first {} names", meters::MOST_NAMES)));
}

/// Checks a query: its metrics and their labels are those of the table, and operations those of the source. Returns the metrics.
fn check_query(query: &str, operations: &BTreeSet<String>) -> BTreeSet<&'static str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut named = BTreeSet::new();
    let mut labels = BTreeSet::from(["le", "instance", "job"]);
    for (at, _) in query.match_indices("recruiter_") {
        let series = query[at..].split(|c| !is_part(c)).next().unwrap();
        let meter = meter_of(series).unwrap_or_else(|| panic!("{series} is no metric: {query}"));
        labels.extend(meter.labels);
        named.insert(meter.name);
        let selected = query[at + series.len()..].strip_prefix('{').map_or("", |rest| rest.split('}').next().unwrap());
        for matcher in selected.split(',').filter(|matcher| !matcher.is_empty()) {
            let (label, value) = matcher.split_once(['=', '!']).unwrap();
            assert!(meter.labels.contains(&label), "{series} has no label {label}: {query}");
            for name in value.trim_matches(['=', '~', '"']).split('|').filter(|_| label == "operation") {
                assert!(operations.contains(name), "there is no operation {name}: {query}");
            }
        }
    }
    for by in query.split("by (").skip(1) {
        let unknown = by.split(')').next().unwrap().split(", ").find(|label| !labels.contains(label));
        assert_eq!(unknown, None, "{query}");
    }
    assert!(!named.is_empty(), "{query}");
    named
}

fn alerts() -> Vec<Yaml> {
    let text = fs::read_to_string(root().join("monitoring/alerts.yml")).unwrap();
    let [rules] = YamlLoader::load_from_str(&text).unwrap().try_into().unwrap();
    rules["groups"].as_vec().unwrap().iter().flat_map(|group| group["rules"].as_vec().unwrap().clone()).collect()
}

#[test]
fn the_alerts_are_about_metrics_that_exist_and_the_page_says_what_to_do() {
    let (mut names, operations) = (BTreeSet::new(), operations());
    for alert in alerts() {
        let text = |yaml: &Yaml| yaml.as_str().map(str::to_owned).unwrap_or_else(|| panic!("{alert:?}"));
        check_query(&text(&alert["expr"]), &operations);
        assert!(["critical", "warning", "info"].contains(&text(&alert["labels"]["severity"]).as_str()), "{alert:?}");
        assert!(text(&alert["annotations"]["summary"]).ends_with('.') && text(&alert["annotations"]["action"]).ends_with('.'));
        assert!(names.insert(text(&alert["alert"])), "{alert:?} is there twice");
    }
    let listed: BTreeSet<String> = rows("Alerts").iter().map(|row| row[0].trim_matches('`').to_owned()).collect();
    assert_eq!(listed, names);
}

#[test]
fn promtool_accepts_the_alerts() {
    let checked = Command::new("promtool").args(["check", "rules"]).arg(root().join("monitoring/alerts.yml")).output();
    let Ok(checked) = checked else { return skipped("promtool (of the package prometheus) is not installed") };
    let said = [checked.stdout, checked.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(checked.status.success() && said.contains(&format!("{} rules found", alerts().len())), "{said}");
}

#[test]
fn the_dashboard_shows_every_metric() {
    let text = fs::read_to_string(root().join("monitoring/dashboard.json")).unwrap();
    let dashboard: serde_json::Value = serde_json::from_str(&text).unwrap();
    let (operations, mut shown, mut ids) = (operations(), BTreeSet::new(), BTreeSet::new());
    for panel in dashboard["panels"].as_array().unwrap() {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "two panels have one id: {panel}");
        let place = |name: &str| panel["gridPos"][name].as_u64().unwrap();
        assert!(place("x") + place("w") <= 24 && place("h") > 0, "{panel}");
        for target in panel["targets"].as_array().into_iter().flatten() {
            shown.extend(check_query(target["expr"].as_str().unwrap(), &operations));
        }
    }
    let missing: Vec<&str> = meters::ALL.iter().map(|meter| meter.name).filter(|name| !shown.contains(name)).collect();
    assert!(missing.is_empty(), "no panel shows {missing:?}");
    assert!(meters::ALL.iter().any(|meter| meter.kind == Kind::Sizes));
}
