//! Measures the HTTP API: enqueueing beside the library, lines in one request, and jobs that clients reserve and commit, with and
//! without a retry policy.

use std::{
    net::{Ipv4Addr, TcpListener},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant as Monotonic},
};

use anyhow::Context as _;
use bson::{Document, doc};
use clap::Args;
use recruiter_common::{RetryManyTimes, enqueue::NewJob, json, shutdown::pause};
use reqwest::{Client, header::CONTENT_TYPE};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::{Setting, Times, rate, stage::Stage};

/// How often the lines are enqueued by each of the two ways, in turn.
const ROUNDS: u32 = 3;
/// How long the server may take to start.
const READY_WITHIN: Duration = Duration::from_secs(60);

/// The arguments of `http`.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct Http {
    /// Number of jobs that are enqueued one by one, over HTTP and by the library in turn
    #[arg(long, short = 'n', env = "RECRUITER_BENCH_JOBS", value_name = "N", default_value_t = 2_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    jobs: u64,
    /// Number of jobs that are enqueued as the lines of one request, and by the library in batches
    #[arg(long, env = "RECRUITER_BENCH_LINES", value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    lines: u64,
    /// Number of jobs that clients reserve and commit, one by one
    #[arg(long, env = "RECRUITER_BENCH_RESERVED", value_name = "N", default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    reserved: u64,
    /// Number of these clients
    #[arg(long, env = "RECRUITER_BENCH_CLIENTS", value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=500))]
    clients: u64,
}

impl Http {
    pub(super) async fn measure(self, stage: &Stage, setting: &Setting) -> anyhow::Result<Document> {
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let mut fleet = stage.fleet_with_web(setting, port).await?;
        let server = Server::at(port).await?;
        let one_by_one = self.one_by_one(stage, &server).await?;
        stage.empty().await?;
        let lines = self.in_lines(stage, &server).await?;
        stage.empty().await?;
        let work = self.work(stage, &server, None).await?;
        stage.empty().await?;
        let policy = RetryManyTimes::new(25, Duration::from_secs(1))?;
        let repeatable = self.work(stage, &server, Some(&policy)).await?;
        fleet.stop().await;
        let mut conditions = stage.conditions(setting).await?;
        conditions.insert("processes", "1 recruiter, 1 cleaner, 1 web");
        Ok(
            doc! { "benchmark": "http", "one_by_one": one_by_one, "lines": lines, "work": work, "repeatable_work": repeatable, "conditions": conditions },
        )
    }

    async fn one_by_one(self, stage: &Stage, server: &Server) -> anyhow::Result<Document> {
        stage.progress("enqueued", self.jobs);
        let (mut over_http, mut by_library) = (Times::new(), Times::new());
        for _ in 0..self.jobs {
            stage.go_on()?;
            let begun = Monotonic::now();
            server.post("jobs", &json!({ "class": "noop" })).await?;
            over_http.record(begun.elapsed());
            let begun = Monotonic::now();
            NewJob::of_class("noop", doc! {}).enqueue(&stage.store).await?;
            by_library.record(begun.elapsed());
            stage.advance(1);
        }
        Ok(doc! {
            "jobs": i64::try_from(self.jobs)?,
            "over_http_ms": over_http.percentiles(),
            "by_library_ms": by_library.percentiles(),
        })
    }

    async fn in_lines(self, stage: &Stage, server: &Server) -> anyhow::Result<Document> {
        let (mut over_http, mut by_library) = (Duration::ZERO, Duration::ZERO);
        let body: String =
            (0..self.lines).map(|number| format!("{{\"class\":\"noop\",\"parameters\":{{\"number\":{number}}}}}\n")).collect();
        for _ in 0..ROUNDS {
            by_library += stage.enqueue(self.lines, |number| NewJob::of_class("noop", doc! { "number": number.cast_signed() })).await?;
            let begun = Monotonic::now();
            let answer = server.lines(body.clone()).await?;
            over_http += begun.elapsed();
            anyhow::ensure!(answer["done"] == true && answer["enqueued"] == self.lines, "the lines were not enqueued: {answer}");
            stage.empty().await?;
        }
        let all = self.lines * u64::from(ROUNDS);
        Ok(doc! {
            "jobs": i64::try_from(self.lines)?,
            "rounds": i64::from(ROUNDS),
            "over_http_per_second": rate(all, over_http),
            "by_library_per_second": rate(all, by_library),
        })
    }

    /// The jobs run at most once, or are repeated as this policy says.
    async fn work(self, stage: &Stage, server: &Server, retry: Option<&RetryManyTimes>) -> anyhow::Result<Document> {
        // The worker of this class registers with the first request.
        server.post("work/reserve", &json!({ "classes": ["noop"], "wait": "1s" })).await?;
        let job = NewJob::of_class("noop", doc! {});
        let job = retry.map_or(job.clone(), |policy| job.retry(policy));
        stage.enqueue(self.reserved, |_| job.clone()).await?;
        stage.progress("committed", self.reserved);
        let (begun, done, mut clients) = (Monotonic::now(), Arc::new(AtomicU64::default()), JoinSet::new());
        for _ in 0..self.clients {
            clients.spawn(client(server.clone(), done.clone(), self.reserved));
        }
        let mut cycles = Times::new();
        while let Some(ended) = clients.join_next().await {
            cycles.0.add(ended??.0)?;
        }
        Ok(doc! {
            "jobs": i64::try_from(self.reserved)?,
            "clients": i64::try_from(self.clients)?,
            "per_second": rate(self.reserved, begun.elapsed()),
            "reserved_and_committed_ms": cycles.percentiles(),
        })
    }
}

/// Reserves and commits jobs until all are done. Returns the time of each.
async fn client(server: Server, done: Arc<AtomicU64>, all: u64) -> anyhow::Result<Times> {
    let mut times = Times::new();
    while done.load(Ordering::Relaxed) < all {
        let begun = Monotonic::now();
        let reserved = server.post("work/reserve", &json!({ "classes": ["noop"], "wait": "1s" })).await?;
        for job in reserved["jobs"].as_array().into_iter().flatten() {
            let reservation = job["reservation"].as_str().context("a job without its reservation")?;
            server.post(&format!("work/{reservation}/commit"), &json!({})).await?;
            times.record(begun.elapsed());
            done.fetch_add(1, Ordering::Relaxed);
        }
    }
    Ok(times)
}

/// The server that is measured.
#[derive(Clone)]
struct Server {
    client: Client,
    at: String,
}

impl Server {
    /// Waits until it answers.
    async fn at(port: u16) -> anyhow::Result<Self> {
        let server = Self { client: Client::builder().no_proxy().build()?, at: format!("http://127.0.0.1:{port}/api/v1") };
        let begun = Monotonic::now();
        while let Err(error) = server.client.get(format!("{}/openapi.json", server.at)).send().await {
            anyhow::ensure!(begun.elapsed() < READY_WITHIN, "the server does not answer: {error}");
            pause(Duration::from_millis(20)).await;
        }
        Ok(server)
    }

    async fn post(&self, path: &str, body: &Value) -> anyhow::Result<Value> {
        let answered = self.client.post(format!("{}/{path}", self.at)).json(body).send().await?;
        let (status, answer) = (answered.status(), answered.json().await?);
        anyhow::ensure!(status.is_success(), "{path}: {status}: {answer}");
        Ok(answer)
    }

    /// The last line of the answer.
    async fn lines(&self, body: String) -> anyhow::Result<Value> {
        let request = self.client.post(format!("{}/jobs/lines", self.at)).header(CONTENT_TYPE, "application/x-ndjson").body(body);
        let text = request.send().await?.text().await?;
        Ok(json::parse(text.lines().next_back().unwrap_or_default())?)
    }
}
