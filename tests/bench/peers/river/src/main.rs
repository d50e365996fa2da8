//! One River process: enqueues jobs, or works them.
//!
//! Called by `tests/bench/compare` as `river ROLE CONFIG`. The roles, the fields of CONFIG and the lines that it speaks are those of
//! `../harness.mjs`. The throughput of jobs that do nothing is not measured with it: River's own `riverqueue bench` does that.

use std::{
    convert::Infallible,
    error::Error,
    io::Write as _,
    num::NonZeroUsize,
    sync::{LazyLock, OnceLock},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use riverqueue::{
    Client, EventKind, Job, JobArgs, QueueConfig, SubscribeConfig, WorkContext, WorkOutcome, Workers, migrate::PostgresMigrator,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sqlx::postgres::{PgPool, PgPoolOptions};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines, Stdin, stdin};

/// Jobs in one insert command.
const BATCH: i64 = 1_000;
/// Between two reports of progress, as in `../harness.mjs`.
const REPORT_EVERY: Duration = Duration::from_millis(20);
/// More completions than are ever waiting for the loop that counts them.
const EVENTS: NonZeroUsize = NonZeroUsize::new(100_000).expect("not zero");

/// Whether handlers announce that they were entered.
static TRACE: OnceLock<bool> = OnceLock::new();
/// When the first handler was entered.
static FIRST: OnceLock<f64> = OnceLock::new();

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Config {
    url: String,
    concurrency: usize,
    /// These two are shorter than River's defaults, as in its own benchmark.
    fetch_cooldown_ms: u64,
    fetch_poll_interval_ms: u64,
    connections: u32,
    #[serde(default)]
    jobs: i64,
    #[serde(default)]
    ms: u64,
    /// One job in a hundred takes this long instead.
    long_ms: Option<u64>,
    #[serde(default)]
    trace: bool,
}

impl Config {
    fn job(&self, n: i64) -> Task {
        Task { n, ms: self.long_ms.filter(|_| n % 100 == 99).unwrap_or(self.ms) }
    }
}

#[derive(Clone, Debug, Deserialize, JobArgs, Serialize)]
#[river(kind = "task")]
struct Task {
    n: i64,
    ms: u64,
}

async fn work(_context: WorkContext, job: Job<Task>) -> Result<WorkOutcome, Infallible> {
    FIRST.get_or_init(now);
    if TRACE.get() == Some(&true) {
        say(&json!({ "entered": job.args.n, "at": now() }));
    }
    if job.args.ms > 0 {
        tokio::time::sleep(Duration::from_millis(job.args.ms)).await;
    }
    Ok(WorkOutcome::Complete)
}

/// Milliseconds of the wall clock, at the resolution of the monotonic one: all processes read the same machine's
/// clock once, at their start, so an instant of one can be subtracted from one of the other.
fn now() -> f64 {
    static START: LazyLock<(Duration, Instant)> = LazyLock::new(|| {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is after 1970");
        (wall, Instant::now())
    });
    (START.0 + START.1.elapsed()).as_secs_f64() * 1_000.0
}

fn say(message: &Value) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{message}").and_then(|()| out.flush()).expect("compare reads what is written");
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    now();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [role, config] = arguments.as_slice() else {
        return Err("usage: river fill|work|drip CONFIG".into());
    };
    let config: Config = serde_json::from_str(config)?;
    let pool = PgPoolOptions::new().max_connections(config.connections).connect(&config.url).await?;
    let lines = BufReader::new(stdin()).lines();
    match role.as_str() {
        "fill" => fill(pool, &config).await,
        "work" => work_all(pool, &config, lines).await,
        "drip" => drip(pool, &config, lines).await,
        _ => Err(format!("there is no role `{role}`").into()),
    }
}

async fn fill(pool: PgPool, config: &Config) -> Result<(), Box<dyn Error>> {
    PostgresMigrator::new(pool.clone()).migrate_up().await?;
    let client = Client::builder(pool).build()?;
    let start = Instant::now();
    for first in (0..config.jobs).step_by(usize::try_from(BATCH)?) {
        client.insert_many((first..config.jobs.min(first + BATCH)).map(|n| config.job(n))).await?;
    }
    say(&json!({ "filled": config.jobs, "seconds": start.elapsed().as_secs_f64() }));
    Ok(())
}

async fn work_all(pool: PgPool, config: &Config, mut lines: Lines<BufReader<Stdin>>) -> Result<(), Box<dyn Error>> {
    TRACE.set(config.trace).expect("set once");
    let mut workers = Workers::new();
    workers.add_fn(work)?;
    let queue = QueueConfig::new(config.concurrency)
        .with_fetch_cooldown(Duration::from_millis(config.fetch_cooldown_ms))
        .with_fetch_poll_interval(Duration::from_millis(config.fetch_poll_interval_ms));
    let client = Client::builder(pool).workers(workers).queue("default", queue).build()?;
    // An event comes after the write of the completion.
    let mut completions = client.subscribe_config(SubscribeConfig::new([EventKind::JobCompleted])?.with_buffer_capacity(EVENTS))?;
    say(&json!({ "ready": true }));
    if lines.next_line().await?.is_none() {
        return Ok(());
    }
    say(&json!({ "started": now() }));
    let mut run = client.start()?;
    let (mut completed, mut last, mut reported) = (0_u64, None, None);
    let mut report = tokio::time::interval(REPORT_EVERY);
    loop {
        tokio::select! {
            line = lines.next_line() => match line? {
                None => break,
                Some(_) => say(&json!({ "settled": null })),
            },
            event = completions.recv() => {
                event?;
                completed += 1;
                last = Some(now());
            }
            _ = report.tick() => if reported != Some(completed) {
                reported = Some(completed);
                say(&json!({ "completed": completed, "first": FIRST.get(), "last": last }));
            },
        }
    }
    run.stop().await?;
    Ok(())
}

async fn drip(pool: PgPool, config: &Config, mut lines: Lines<BufReader<Stdin>>) -> Result<(), Box<dyn Error>> {
    PostgresMigrator::new(pool.clone()).migrate_up().await?;
    // Who inserts tells the workers, and no more often than this.
    let client = Client::builder(pool).fetch_cooldown(Duration::from_millis(config.fetch_cooldown_ms)).build()?;
    say(&json!({ "ready": true }));
    while let Some(line) = lines.next_line().await? {
        let n = serde_json::from_str::<Value>(&line)?["next"].as_i64().ok_or("no number of the job")?;
        let called = now();
        client.insert(config.job(n)).await?;
        say(&json!({ "acknowledged": n, "called": called, "at": now() }));
    }
    Ok(())
}
