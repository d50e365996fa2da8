//! Measures many jobs that become due at the same instant, while idle workers wait for them.

use std::time::{Duration, Instant as Monotonic};

use bson::{Document, doc};
use clap::Args;
use recruiter_common::{enqueue::NewJob, instant::monotonic_ns, shutdown::pause};

use super::{Setting, Times, rate, stage::Stage};
use crate::fleet::Fleet;

/// Number of jobs enqueued to measure the rate of enqueueing.
const TRIAL: u64 = 3_000;
/// Time between the last enqueue and the due instant, in which all processes become idle.
const CALM: Duration = Duration::from_secs(3);
const LOOK_EVERY: Duration = Duration::from_millis(5);
const SHORT: &str = "noop";

/// The arguments of `herd`: all jobs are enqueued in advance and become due at one instant, when the workers are idle.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct Herd {
    /// Number of jobs
    #[arg(long, short = 'n', env = "RECRUITER_BENCH_JOBS", value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..=50_000_000))]
    jobs: u64,
    /// Time from the first enqueue to the due instant [default: twice the measured time of enqueueing, plus 3s]
    #[arg(long, env = "RECRUITER_BENCH_AHEAD", value_name = "DURATION", value_parser = humantime::parse_duration)]
    ahead: Option<Duration>,
}

impl Herd {
    pub(super) async fn measure(self, stage: &Stage, setting: &Setting) -> anyhow::Result<Document> {
        let ahead = ahead(stage, self.ahead, self.jobs).await?;
        let measured = at_once(stage, setting, ahead, [self.jobs, 0], |_| short()).await?;
        Ok(doc! {
            "benchmark": "herd",
            "jobs": i64::try_from(self.jobs)?,
            "jobs_per_second": rate(self.jobs, measured.short),
            "seconds": measured.short.as_secs_f64(),
            "first_started_ms": measured.started.at_ms(0.0),
            "started_ms": measured.started.percentiles(),
            "enqueued_per_second": rate(self.jobs, measured.enqueued),
            "conditions": stage.conditions(setting).await?,
        })
    }
}

/// The arguments of `mixed`: short jobs beside long ones, compared with the same number of short jobs alone.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct Mixed {
    /// Number of jobs, including the long ones
    #[arg(long, short = 'n', env = "RECRUITER_BENCH_JOBS", value_name = "N", default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(100..=50_000_000))]
    jobs: u64,
    /// Duration of a long job, which sleeps; a short job does nothing
    #[arg(long, env = "RECRUITER_BENCH_LONG", value_name = "DURATION", default_value = "2s", value_parser = humantime::parse_duration)]
    long: Duration,
    /// One job in N is long
    #[arg(long, env = "RECRUITER_BENCH_ONE_IN", value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(2..=100))]
    one_in: u64,
    /// Time from the first enqueue to the due instant [default: twice the measured time of enqueueing, plus 3s]
    #[arg(long, env = "RECRUITER_BENCH_AHEAD", value_name = "DURATION", value_parser = humantime::parse_duration)]
    ahead: Option<Duration>,
}

impl Mixed {
    pub(super) async fn measure(self, stage: &Stage, setting: &Setting) -> anyhow::Result<Document> {
        let (long_ms, long) = (i64::try_from(self.long.as_millis())?, self.jobs / self.one_in);
        let short_ones = self.jobs - long;
        let ahead = ahead(stage, self.ahead, self.jobs).await?;
        let alone = at_once(stage, setting, ahead, [short_ones, 0], |_| short()).await?;
        stage.empty().await?;
        let job = |number: u64| match number % self.one_in {
            // The last job of each `one_in` is long, so that there are not more long jobs than that.
            last if last == self.one_in - 1 => NewJob::of_class("sleep", doc! { "ms": long_ms }),
            _ => short(),
        };
        let mixed = at_once(stage, setting, ahead, [short_ones, long], job).await?;
        let quotient = |quantile: f64| mixed.started.at_ms(quantile) / alone.started.at_ms(quantile);
        Ok(doc! {
            "benchmark": "mixed",
            "short_jobs": i64::try_from(short_ones)?,
            "long_jobs": i64::try_from(long)?,
            "long_ms": long_ms,
            "alone": alone.of_short_ones(short_ones),
            "mixed": mixed.of_short_ones(short_ones),
            "all_seconds": mixed.all.as_secs_f64(),
            "mixed_over_alone": {
                "jobs_per_second": alone.short.as_secs_f64() / mixed.short.as_secs_f64(),
                "started_p50": quotient(0.5),
                "started_p99": quotient(0.99),
            },
            "conditions": stage.conditions(setting).await?,
        })
    }
}

/// A job whose result is the time when it was entered.
fn short() -> NewJob {
    NewJob::of_class(SHORT, doc! { "tell": true })
}

/// The result for jobs that were due at the same instant.
struct AtOnce {
    enqueued: Duration,
    /// Time from the due instant until the last short job was archived.
    short: Duration,
    /// Time from the due instant until the last job was archived.
    all: Duration,
    /// Time from the due instant until each short job was entered.
    started: Times,
}

impl AtOnce {
    fn of_short_ones(&self, short: u64) -> Document {
        doc! { "jobs_per_second": rate(short, self.short), "seconds": self.short.as_secs_f64(), "started_ms": self.started.percentiles() }
    }
}

/// How long before the due instant to begin, unless it is given. Enqueues some jobs to measure the rate.
async fn ahead(stage: &Stage, given: Option<Duration>, jobs: u64) -> anyhow::Result<Duration> {
    if let Some(given) = given {
        return Ok(given);
    }
    let later = stage.store.now() + Duration::from_secs(3_600);
    let trial = jobs.min(TRIAL);
    let time = stage.enqueue(trial, |_| short().at(later)).await?;
    stage.empty().await?;
    Ok(time.mul_f64(2.0 / as_float(trial) * as_float(jobs)) + CALM)
}

#[expect(clippy::cast_precision_loss, reason = "a count of jobs is far below 2^52")]
fn as_float(count: u64) -> f64 {
    count as f64
}

/// Enqueues short and long jobs for an instant in the future, and waits until all are archived.
async fn at_once(
    stage: &Stage,
    setting: &Setting,
    ahead: Duration,
    [short, long]: [u64; 2],
    job: impl Fn(u64) -> NewJob,
) -> anyhow::Result<AtOnce> {
    let mut fleet = stage.ready_fleet(setting).await?;
    stage.store.refresh_clock().await?;
    let (due, due_ns) = (stage.store.now() + ahead, monotonic_ns() + i64::try_from(ahead.as_nanos())?);
    let begun = Monotonic::now() + ahead;
    let enqueued = stage.enqueue(short + long, |number| job(number).at(due)).await?;
    anyhow::ensure!(begun > Monotonic::now(), "the jobs became due before all were enqueued: increase --ahead");
    stage.wait("milliseconds until the jobs are due", begun.saturating_duration_since(Monotonic::now())).await?;
    let short_over = until_short_archived(stage, &mut fleet, short).await?;
    let all_over = stage.until_archived(&mut fleet, short + long).await?;
    fleet.stop().await;
    let mut started = Times::new();
    let told = stage.told().await?;
    anyhow::ensure!(told.len() as u64 == short, "{} of {short} jobs reported when they were entered", told.len());
    told.into_iter().for_each(|entered| started.record_between(due_ns, entered));
    Ok(AtOnce { enqueued, short: short_over - begun, all: all_over - begun, started })
}

/// Waits until no short job is left. Returns the time.
async fn until_short_archived(stage: &Stage, fleet: &mut Fleet, short: u64) -> anyhow::Result<Monotonic> {
    // The cheaper count comes first: until it reaches `short`, the short jobs cannot be done.
    let mut over = stage.until_archived(fleet, short).await?;
    while !stage.none_left_of(SHORT).await? {
        stage.go_on()?;
        pause(LOOK_EVERY).await;
        over = Monotonic::now();
    }
    Ok(over)
}
