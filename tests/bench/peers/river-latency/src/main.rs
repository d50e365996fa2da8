//! One River process of the latency measurement: enqueues single jobs, or works them.
//!
//! Called by `tests/bench/compare` as `river-latency drip URL` or `river-latency work URL`; speaks the lines that
//! `../harness.mjs` describes. Throughput is not measured here: River's own `riverqueue bench` does that.

use std::{
    convert::Infallible,
    error::Error,
    io::Write as _,
    sync::LazyLock,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use riverqueue::{Client, Job, JobArgs, QueueConfig, WorkContext, WorkOutcome, Workers};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sqlx::postgres::PgPoolOptions;
use tokio::io::{AsyncBufReadExt as _, BufReader, stdin};

/// As in River's own benchmark, and so is the poll interval below; the defaults are longer.
const COOLDOWN: Duration = Duration::from_millis(2);

#[derive(Clone, Debug, Deserialize, JobArgs, Serialize)]
#[river(kind = "noop")]
struct Noop {
    n: i64,
}

async fn work(_context: WorkContext, job: Job<Noop>) -> Result<WorkOutcome, Infallible> {
    let at = now();
    say(&json!({ "entered": job.args.n, "at": at }));
    Ok(WorkOutcome::Complete)
}

/// Milliseconds of the wall clock, at the resolution of the monotonic one: both processes read the same machine's
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
    let [role, url] = arguments.as_slice() else {
        return Err("usage: river-latency drip|work URL".into());
    };
    let pool = PgPoolOptions::new().max_connections(10).connect(url).await?;
    let mut lines = BufReader::new(stdin()).lines();

    if role == "work" {
        let mut workers = Workers::new();
        workers.add_fn(work)?;
        let queue = QueueConfig::new(10).with_fetch_cooldown(COOLDOWN).with_fetch_poll_interval(Duration::from_millis(20));
        let client = Client::builder(pool).workers(workers).queue("default", queue).build()?;
        let mut run = client.start()?;
        run.wait_ready().await?;
        say(&json!({ "ready": true }));
        while lines.next_line().await?.is_some() {}
        run.stop().await?;
    } else {
        // Who inserts tells the workers, and no more often than this.
        let client = Client::builder(pool).fetch_cooldown(COOLDOWN).build()?;
        say(&json!({ "ready": true }));
        while let Some(line) = lines.next_line().await? {
            let n = serde_json::from_str::<Value>(&line)?["next"].as_i64().ok_or("no number of the job")?;
            let called = now();
            client.insert(Noop { n }).await?;
            say(&json!({ "acknowledged": n, "called": called, "at": now() }));
        }
    }
    Ok(())
}
