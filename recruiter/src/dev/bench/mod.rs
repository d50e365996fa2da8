//! `recruiter bench`: measures the speed of Recruiter and of the database below it.
//!
//! Real processes use a real MongoDB with the default settings: journaled majority writes, all validators and indexes,
//! and jobs that must not run twice. Each result contains the conditions of its measurement.

mod fleets;
mod footprint;
mod herd;
mod limit;
mod observer;
mod ordinary;
mod scale;
mod slow_line;
mod stage;
mod throughput;
mod timing;
mod usage;

use std::{io::Write, path::PathBuf, time::Duration};

use bson::{Bson, Document};
use clap::{Args, Subcommand, builder::BoolishValueParser};
use hdrhistogram::Histogram;
use recruiter_common::shutdown::Shutdown;

use self::stage::Stage;
use crate::cli::output::{Column, Row, Screen, json_line, table};

/// What is measured, and on what.
#[derive(Args, Clone, Debug)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
    #[command(flatten)]
    setting: Setting,
    /// Write one JSON object, for programs
    #[arg(long, global = true, env = "RECRUITER_JSON", value_parser = BoolishValueParser::new())]
    json: bool,
}

/// What all benchmarks run on.
#[derive(Args, Clone, Debug)]
pub(crate) struct Setting {
    /// MongoDB to measure on; a database of its own there is dropped afterwards [default: an embedded MongoDB with temporary
    /// data]
    #[arg(long, global = true, env = "RECRUITER_BENCH_ON", hide_env_values = true, value_name = "URI")]
    pub(crate) on: Option<String>,
    /// MongoDB's server program [default: mongod on PATH, else one that is fetched once]
    #[arg(long, global = true, env = "RECRUITER_MONGOD", value_name = "FILE")]
    pub(crate) mongod: Option<PathBuf>,
    /// Worker processes
    #[arg(long, global = true, env = "RECRUITER_WORKERS", value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) workers: u32,
    /// Jobs that each of them runs at a time
    #[arg(long, global = true, env = "RECRUITER_CONCURRENCY", value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) concurrency: u32,
    /// Time that every message between the processes and MongoDB takes each way, as on a network
    #[arg(long, global = true, env = "RECRUITER_BENCH_NETWORK_LATENCY", value_name = "DURATION", value_parser = humantime::parse_duration)]
    pub(crate) network_latency: Option<Duration>,
}

#[derive(Subcommand, Clone, Debug)]
enum What {
    /// Enqueue many jobs that do nothing, then start the workers and measure until the last is in the archive
    BurnDown(throughput::BurnDown),
    /// Measure few slots and jobs of some milliseconds
    ///
    /// One row for each number of slots and each duration. All jobs of a row are due at one instant at which the workers are idle and
    /// ready. Commands to MongoDB are counted for each job, without the driver's monitoring. In the mixed row one job in a hundred is
    /// long, and the time is that until as many jobs are archived as there are short ones.
    Ordinary(ordinary::Ordinary),
    /// Enqueue one job at a time on an idle system and measure until it is entered
    Latency(timing::Latency),
    /// Enqueue at a constant rate and measure how long each job waits
    ///
    /// A job counts as archived when a change stream tells of it. What the stream adds to that is measured before, on an idle
    /// system, and told: archived_is_seen_late_by_ms.
    Steady(timing::Steady),
    /// Let many jobs become due in the same instant and measure how late each is started
    ///
    /// All are enqueued beforehand; the workers are idle and ready at that instant. Measured are the jobs a second from that
    /// instant until the last is archived, and from the instant until each job is entered; the instant is known to a
    /// millisecond or two, the time of a question to the server's clock.
    Herd(herd::Herd),
    /// Mix long jobs into short ones and measure what the short ones lose by it
    ///
    /// All are enqueued beforehand, the long ones evenly among them, for one instant at which the workers are idle and ready.
    /// A job starts late by the time from that instant until it is entered: above all that of the jobs before it, and of the
    /// places that long jobs keep. It takes places (--workers times --concurrency) for all long jobs at a time to leave some
    /// for the short.
    Mixed(herd::Mixed),
    /// Measure rounds, and whole runs, for more and more places, workers and processes
    ///
    /// Made up, 10 to 10,000 places: the time of the recruiter's round that gives a job to each. Real processes, 1 to
    /// --processes, all idle at first: from the call that enqueues a job for each place until the last is archived, and the
    /// time of the round alone. And, with 200 processes idle, what 100 hints a second for a group that nobody works on cost
    /// mongod, as part of one core. 500 processes take minutes and some ten gigabytes of memory. Where the machine
    /// cannot do with so many, that is told, and what was measured before. --workers has no say in it.
    ScaleWorkers(fleets::Fleets),
    /// Measure how long a search takes, and what gets done, with more and more jobs behind
    ScaleBacklog(scale::Backlog),
    /// Measure what gets done beside a large archive
    ScaleArchive(scale::Archive),
    /// Measure what all processes need of processors, memory and MongoDB while there is nothing to do
    ///
    /// All are ready and have settled for 5 s before it begins.
    ///
    /// Processor time as part of one core, memory, and commands to MongoDB by name. Reads are find, aggregate, count and
    /// distinct; writes are insert, update, delete and findAndModify. getMore is left out, as only reads that wait for hints
    /// need it here, and so is how the driver watches the server. With --on the commands of everybody else on that MongoDB are
    /// counted as well, and the processor time of mongod is unknown.
    Idle(footprint::Idle),
    /// Measure the memory of a worker that runs many jobs, and of a recruiter that has many places to fill
    ///
    /// The worker runs --concurrency jobs that sleep. The recruiter has --places places of real workers in its roster, all
    /// free, and gives them two jobs each, the first to all at once. --workers has no say in it.
    Memory(footprint::Memory),
    /// Carry out the same operations on the database without any process around them: the ceiling
    Limit(limit::Limit),
}

/// Runs a benchmark and writes its result.
///
/// # Errors
/// When something cannot be started, MongoDB cannot be used, or a job is missing.
pub async fn run(args: BenchArgs, shutdown: Shutdown, out: &mut impl Write) -> anyhow::Result<()> {
    let stage = Stage::set(&args.setting, shutdown).await?;
    let setting = &args.setting;
    let measured = match args.what {
        What::BurnDown(what) => what.measure(&stage, setting).await,
        What::Ordinary(what) => what.measure(&stage, setting).await,
        What::Latency(what) => what.measure(&stage, setting).await,
        What::Steady(what) => what.measure(&stage, setting).await,
        What::Herd(what) => what.measure(&stage, setting).await,
        What::Mixed(what) => what.measure(&stage, setting).await,
        What::ScaleWorkers(what) => what.measure(&stage, setting).await,
        What::ScaleBacklog(what) => what.measure(&stage, setting).await,
        What::ScaleArchive(what) => what.measure(&stage, setting).await,
        What::Idle(what) => what.measure(&stage, setting).await,
        What::Memory(what) => what.measure(&stage, setting).await,
        What::Limit(what) => what.measure(&stage, setting).await,
    };
    // Also after an error.
    stage.clear().await?;
    let measured = measured?;
    if args.json {
        json_line(out, measured)?;
    } else {
        let mut rows = Vec::new();
        flatten("", &measured, &mut rows);
        table(out, Screen::of_stdout(), &[Column::left("MEASURED"), Column::right("")], &rows)?;
    }
    Ok(())
}

/// Adds a row for each value of a nested document.
fn flatten(above: &str, document: &Document, rows: &mut Vec<Row>) {
    for (name, value) in document {
        let name = format!("{above}{}", name.replace('_', " "));
        if let Bson::Document(inner) = value {
            flatten(&format!("{name}: "), inner, rows);
        } else if let Bson::Array(items) = value {
            for (number, inner) in items.iter().enumerate() {
                flatten(&format!("{name} {}: ", number + 1), inner.as_document().unwrap_or(&Document::new()), rows);
            }
        } else if let Some(number) = value.as_f64() {
            rows.push(vec![name, format!("{number:.2}")].into());
        } else {
            rows.push(vec![name, value.as_str().map_or_else(|| value.to_string(), str::to_owned)].into());
        }
    }
}

/// Maximum of a histogram, in microseconds: one hour.
const LONGEST_US: u64 = 3_600_000_000;

/// A histogram of durations, reported as percentiles in milliseconds.
#[derive(Clone, Debug)]
struct Times(Histogram<u64>);

impl Times {
    fn new() -> Self {
        Self(Histogram::new_with_bounds(1, LONGEST_US, 3).expect("these bounds are allowed"))
    }

    fn record(&mut self, time: Duration) {
        self.0.saturating_record(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }

    #[expect(clippy::cast_precision_loss, reason = "microseconds of a benchmark")]
    fn at_ms(&self, quantile: f64) -> f64 {
        self.0.value_at_quantile(quantile) as f64 / 1_000.0
    }

    fn percentiles(&self) -> Document {
        let at = |quantile: f64| Bson::from(self.at_ms(quantile));
        [("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("p99_9", 0.999), ("max", 1.0)]
            .into_iter()
            .map(|(name, quantile)| (name.to_owned(), at(quantile)))
            .collect()
    }
}

/// Number of events per second.
#[expect(clippy::cast_precision_loss, reason = "a count of jobs is far below 2^52")]
fn rate(count: u64, time: Duration) -> f64 {
    (count as f64 / time.as_secs_f64()).round()
}
