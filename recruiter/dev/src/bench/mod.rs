//! `recruiter bench`: measures the speed of Recruiter and of the database below it.
//!
//! Real processes use a real MongoDB with the default settings: journaled majority writes, all validators and indexes,
//! and jobs that must not run twice. Each result contains the conditions of its measurement.

mod fleets;
mod footprint;
mod graphs;
mod herd;
mod http;
mod limit;
mod observer;
mod ordinary;
mod pubsub;
mod rounds;
mod scale;
mod slow_line;
mod stage;
mod throughput;
mod timing;
mod usage;
mod wait;

use std::{io::Write, path::PathBuf, time::Duration};

use bson::{Bson, Document};
use clap::{Args, Subcommand, builder::BoolishValueParser};
use hdrhistogram::Histogram;
use recruiter_common::shutdown::Shutdown;

use self::stage::Stage;
use recruiter::cli::view::{Row, Screen, document_line, left, right, table};

/// The arguments of `bench`.
#[derive(Args, Clone, Debug)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
    #[command(flatten)]
    setting: Setting,
    /// Write the result as one JSON object, for programs
    #[arg(long, global = true, env = "RECRUITER_JSON", value_parser = BoolishValueParser::new())]
    json: bool,
}

/// The MongoDB and the processes of every benchmark.
#[derive(Args, Clone, Debug)]
pub(crate) struct Setting {
    /// MongoDB to measure on, in a temporary database [default: an embedded MongoDB with temporary data]
    #[arg(long, global = true, env = "RECRUITER_BENCH_ON", hide_env_values = true, value_name = "URI")]
    pub(crate) on: Option<String>,
    /// Path of the mongod program [default: mongod on PATH, otherwise downloaded once]
    #[arg(long, global = true, env = "RECRUITER_MONGOD", value_name = "FILE")]
    pub(crate) mongod: Option<PathBuf>,
    /// Number of worker processes
    #[arg(long, global = true, env = "RECRUITER_WORKERS", value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) workers: u32,
    /// Slots of each worker process: jobs that it runs at a time
    #[arg(long, global = true, env = "RECRUITER_CONCURRENCY", value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) concurrency: u32,
    /// Simulated network latency between the processes and MongoDB, in each direction
    #[arg(long, global = true, env = "RECRUITER_BENCH_NETWORK_LATENCY", value_name = "DURATION", value_parser = humantime::parse_duration)]
    pub(crate) network_latency: Option<Duration>,
    /// Let each process record and serve its metrics, to measure what that costs
    #[arg(long, global = true, env = "RECRUITER_BENCH_METRICS", value_parser = BoolishValueParser::new())]
    pub(crate) metrics: bool,
}

#[derive(Subcommand, Clone, Debug)]
enum What {
    /// Measure throughput: enqueue empty jobs, start workers, wait until all are archived
    BurnDown(throughput::BurnDown),
    /// Measure few slots and jobs of some milliseconds
    ///
    /// One row for each number of slots and each duration. All jobs of a row are due at one instant at which the workers are idle and
    /// ready. Commands to MongoDB are counted for each job, without the driver's monitoring. In the mixed row one job in a hundred is
    /// long, and the time is that until as many jobs are archived as there are short ones.
    Ordinary(ordinary::Ordinary),
    /// Measure latency on an idle system: one job at a time, from its acknowledged enqueue, or from its date, until it is entered
    Latency(timing::Latency),
    /// Measure pipelines: throughput beside that of independent jobs, and how fast a job follows the one before it
    ///
    /// The last figure is the time from the entry of a job that does nothing to the entry of the next one. Most of it is the write of
    /// the first job's end.
    Graphs(graphs::Graphs),
    /// Measure latency at a constant rate of enqueueing
    ///
    /// A job counts as archived when a change stream reports it. The delay of the change stream is measured in advance on an
    /// idle system, and reported as archived_is_seen_late_by_ms.
    Steady(timing::Steady),
    /// Measure a burst: many jobs due at the same instant, and how late each one starts
    ///
    /// All jobs are enqueued in advance. The workers are idle and ready at the due instant. The result has the jobs per second
    /// from the due instant until the last job is archived, and the time from the due instant until each job is entered. The
    /// due instant has an error of 1 to 2 ms, the time to read the server's clock.
    Herd(herd::Herd),
    /// Measure how much long jobs delay the short jobs beside them
    ///
    /// All jobs are enqueued in advance, with the long ones evenly distributed. They become due at one instant, when the
    /// workers are idle and ready. The delay of a job is the time from that instant until it is entered. It waits mostly for
    /// the jobs before it, and for slots that long jobs occupy. For free slots beside the long jobs, choose more slots
    /// (--workers times --concurrency) than long jobs.
    Mixed(herd::Mixed),
    /// Measure rounds and runs with growing numbers of slots, workers and processes
    ///
    /// With 10 to 10,000 simulated slots: the time of the recruiter's round that assigns a job to each slot. With 1 to
    /// --processes real processes, all idle at first: the time from the call that enqueues a job for each slot until the last
    /// job is archived, and the time of the round alone. With 200 idle processes: the processor time of mongod, as a percentage
    /// of one core, for 100 hints per second for a group without workers. 500 processes take minutes and about 10 GB of memory.
    /// If the machine cannot run that many, the result names the failure and keeps the earlier measurements. --workers is
    /// ignored.
    ScaleWorkers(fleets::Fleets),
    /// Measure the recruiter alone, with simulated workers and a database in memory
    ///
    /// One row for each size: the processor time of a round in which a tenth of the workers has ended all its jobs, that of one with a
    /// full scan, and how many jobs a recruiter could assign per second if MongoDB took no time. The memory includes that of MongoDB's answers,
    /// which the allocator keeps. Other settings of benchmarks are ignored.
    ScaleRounds(rounds::ScaleRounds),
    /// Measure search time and throughput with a growing backlog
    ScaleBacklog(scale::Backlog),
    /// Measure throughput with a large archive
    ScaleArchive(scale::Archive),
    /// Measure processor time, memory and database commands of an idle system
    ///
    /// The measurement begins when all processes have been ready for 5 s.
    ///
    /// The result has the processor time as a percentage of one core, the memory, and the commands to MongoDB by name. Reads
    /// are find, aggregate, count and distinct; writes are insert, update, delete and findAndModify. Not counted are getMore,
    /// which only reads that wait for hints use here, and the driver's monitoring of the server. With --on, commands of other
    /// clients of that MongoDB are counted too, and the processor time of mongod is unknown.
    Idle(footprint::Idle),
    /// Measure the memory of a busy worker, and of a recruiter with many slots to fill
    ///
    /// The worker runs --concurrency jobs that sleep. The recruiter's roster has --slots free slots of real workers. It assigns
    /// two jobs to each slot, the first jobs to all slots in one round. --workers is ignored.
    Memory(footprint::Memory),
    /// Measure a wait for the result of a job, on an idle system
    ///
    /// returned_ms is the time from the acknowledged enqueue until the wait returns, after_archive_ms the time from the moment at which a
    /// reader finds the job in the archive.
    Wait(wait::Wait),
    /// Measure messages of applications: from the call of the publisher until a subscriber has them
    ///
    /// First one by one, each after the acknowledgement of the one before, then in batches. Every message is checked: none is missing, none
    /// is repeated, and all are in order.
    #[command(name = "pubsub")]
    PubSub(pubsub::PubSub),
    /// Measure the HTTP API: enqueueing beside the library, lines in one request, and jobs that clients reserve and commit
    ///
    /// Over HTTP and by the library, jobs are enqueued in turn. Each client has a connection of its own, and one job at a time. The jobs do
    /// nothing and run at most once. --workers and --concurrency are ignored.
    Http(http::Http),
    /// Measure the raw database operations alone: the upper limit of throughput
    Limit(limit::Limit),
}

/// Runs a benchmark and writes its result.
pub async fn run(args: BenchArgs, shutdown: Shutdown, out: &mut impl Write) -> anyhow::Result<()> {
    let stage = Stage::set(&args.setting, shutdown).await?;
    let setting = &args.setting;
    let measured = match args.what {
        What::BurnDown(what) => what.measure(&stage, setting).await,
        What::Ordinary(what) => what.measure(&stage, setting).await,
        What::Latency(what) => what.measure(&stage, setting).await,
        What::Graphs(what) => what.measure(&stage, setting).await,
        What::Steady(what) => what.measure(&stage, setting).await,
        What::Herd(what) => what.measure(&stage, setting).await,
        What::Mixed(what) => what.measure(&stage, setting).await,
        What::ScaleWorkers(what) => what.measure(&stage, setting).await,
        What::ScaleRounds(what) => what.measure(&stage, setting).await,
        What::ScaleBacklog(what) => what.measure(&stage, setting).await,
        What::ScaleArchive(what) => what.measure(&stage, setting).await,
        What::Idle(what) => what.measure(&stage, setting).await,
        What::Memory(what) => what.measure(&stage, setting).await,
        What::Wait(what) => what.measure(&stage, setting).await,
        What::PubSub(what) => what.measure(&stage, setting).await,
        What::Http(what) => what.measure(&stage, setting).await,
        What::Limit(what) => what.measure(&stage, setting).await,
    };
    // Also after an error.
    stage.clear().await?;
    let measured = measured?;
    if args.json {
        document_line(out, measured)?;
    } else {
        let mut rows = Vec::new();
        flatten("", &measured, &mut rows);
        table(out, Screen::of_stdout(), &rows)?;
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
        } else {
            let text = value.as_f64().map(|number| format!("{number:.2}"));
            let text = text.or_else(|| value.as_str().map(str::to_owned)).unwrap_or_else(|| value.to_string());
            rows.push([left("MEASURED", name), right("", text)].into());
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

    /// Records the time between two readings of the monotonic clock, in nanoseconds. What began before the acknowledgement of its
    /// cause took no time.
    fn record_between(&mut self, from: i64, to: i64) {
        self.record(Duration::from_nanos(u64::try_from(to - from).unwrap_or(0)));
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
