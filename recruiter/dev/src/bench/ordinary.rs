//! Measures what most installations run: few slots, and jobs of some milliseconds.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant as Monotonic},
};

use bson::{Bson, Document, doc};
use clap::{Args, builder::BoolishValueParser};
use recruiter_common::{Keep, RetryManyTimes, enqueue::NewJob, shutdown::pause};

use super::{
    Setting,
    footprint::MONITORING,
    rate,
    stage::{Ends, Stage},
};
use crate::fleet::Fleet;

/// How long the jobs of one row take at least, if no slot is ever idle.
const IDEAL_RUN: Duration = Duration::from_secs(3);
/// Between the last enqueue and the due instant.
const CALM: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Jobs of each duration on each number of slots, all due at one instant at which the workers are idle and ready.
#[derive(Args, Clone, Debug)]
pub(super) struct Ordinary {
    /// Slots of each worker
    #[arg(long, env = "RECRUITER_BENCH_SLOTS", value_name = "N", value_delimiter = ',', default_values_t = [10, 100], value_parser = clap::value_parser!(u32).range(1..=10_000))]
    slots: Vec<u32>,
    /// Durations of the jobs, in milliseconds; 0 for jobs that do nothing
    #[arg(long, env = "RECRUITER_BENCH_DURATIONS", value_name = "MS", value_delimiter = ',', default_values_t = [0, 1, 5, 20, 100], value_parser = clap::value_parser!(u32).range(0..=60_000))]
    durations: Vec<u32>,
    /// Maximum number of jobs in one row
    #[arg(long, short = 'n', env = "RECRUITER_BENCH_JOBS", value_name = "N", default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(100..=50_000_000))]
    jobs: u64,
    /// Jobs that may be repeated: retried after a failure and after the death of their worker, as in most other systems
    #[arg(long, env = "RECRUITER_BENCH_REPEATABLE", value_parser = BoolishValueParser::new())]
    repeatable: bool,
    /// Keep failures only: a job that succeeds is deleted, and not archived
    #[arg(long, env = "RECRUITER_BENCH_KEEP_FAILURES", value_parser = BoolishValueParser::new())]
    keep_failures: bool,
    /// Duration of the long jobs in the mixed row, in milliseconds; 0 leaves the row out
    #[arg(long, env = "RECRUITER_BENCH_LONG_MS", value_name = "MS", default_value_t = 2_000)]
    long: u32,
}

/// The jobs of one row.
#[derive(Clone, Copy)]
struct Load<'a> {
    ms: u32,
    /// One job in a hundred takes this long instead.
    long_ms: Option<u32>,
    retry: Option<&'a RetryManyTimes>,
    keep_failures: bool,
}

impl Load<'_> {
    fn job(self, number: u64) -> NewJob {
        let job = match (self.long_ms, self.ms) {
            (Some(long), _) if number % 100 == 99 => NewJob::of_class("sleep", doc! { "ms": long }),
            (_, 0) => NewJob::of_class("noop", doc! {}),
            (_, ms) => NewJob::of_class("sleep", doc! { "ms": ms }),
        };
        let job = job.keep(if self.keep_failures { Keep::Failures } else { Keep::All });
        match self.retry {
            Some(policy) => job.retry(policy),
            None => job,
        }
    }

    fn mean(self) -> Duration {
        let short = Duration::from_millis(self.ms.into());
        self.long_ms.map_or(short, |long| short.mul_f64(0.99) + Duration::from_millis(long.into()).mul_f64(0.01))
    }
}

impl Ordinary {
    pub(super) async fn measure(self, stage: &Stage, setting: &Setting) -> anyhow::Result<Document> {
        let policy = RetryManyTimes::new(25, Duration::from_secs(1))?;
        let (retry, keep_failures) = (self.repeatable.then_some(&policy), self.keep_failures);
        let plain = self.durations.iter().map(|ms| Load { ms: *ms, long_ms: None, retry, keep_failures });
        let mixed = (self.long > 0).then_some(Load { ms: 5, long_ms: Some(self.long), retry, keep_failures });
        let loads: Vec<Load<'_>> = plain.chain(mixed).collect();
        let mut rows = Vec::new();
        for slots in &self.slots {
            let setting = &Setting { concurrency: *slots, ..setting.clone() };
            let mut fleet = stage.ready_fleet(setting).await?;
            for load in &loads {
                rows.push(Bson::Document(self.row(stage, &mut fleet, setting, *load).await?));
                stage.empty().await?;
            }
            fleet.stop().await;
        }
        Ok(
            doc! { "benchmark": "ordinary", "repeatable": self.repeatable, "keep_failures": self.keep_failures, "rows": rows, "conditions": stage.conditions(setting).await? },
        )
    }

    async fn row(&self, stage: &Stage, fleet: &mut Fleet, setting: &Setting, load: Load<'_>) -> anyhow::Result<Document> {
        let slots = f64::from(setting.workers * setting.concurrency);
        let ideal = (load.mean() > Duration::ZERO).then(|| slots / load.mean().as_secs_f64());
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of jobs")]
        let jobs = ideal.map_or(self.jobs, |ideal| self.jobs.min((ideal * IDEAL_RUN.as_secs_f64()) as u64)).max(100);
        // A trial: how long the enqueue takes.
        stage.store.refresh_clock().await?;
        let trial = Monotonic::now();
        let later = stage.store.now() + Duration::from_secs(3_600);
        stage.enqueue(jobs.min(2_000), |number| load.job(number).at(later)).await?;
        let ahead = trial.elapsed().mul_f64(2.0 * quotient(jobs, jobs.min(2_000))) + CALM;
        stage.empty().await?;
        let (due, begun) = (stage.store.now() + ahead, Monotonic::now() + ahead);
        stage.enqueue(jobs, |number| load.job(number).at(due)).await?;
        anyhow::ensure!(begun > Monotonic::now(), "the jobs were due before all were enqueued: the machine is too slow for this benchmark");
        while begun > Monotonic::now() {
            stage.go_on()?;
            pause(LOOK_EVERY.min(begun.saturating_duration_since(Monotonic::now()))).await;
        }
        let before = stage.commands().await?;
        let short = if load.long_ms.is_some() { jobs - jobs / 100 } else { jobs };
        let ends = Ends::of(jobs, load.keep_failures);
        let time = stage.until_ended(fleet, short, ends).await? - begun;
        let commands = per_job(&before, &stage.commands().await?, short);
        stage.until_ended(fleet, jobs, ends).await?;
        let total: f64 = commands.values().sum();
        let per_second = rate(short, time);
        Ok(doc! {
            "slots": format!("{} x {}", setting.workers, setting.concurrency),
            "job": load.long_ms.map_or(format!("{} ms", load.ms), |long| format!("{} ms, 1 in 100 of {long} ms", load.ms)),
            "jobs": i64::try_from(jobs)?,
            "jobs_per_second": per_second,
            "of_ideal": ideal.map(|ideal| per_second / ideal),
            "commands_per_job": total,
            "by_command": commands.into_iter().map(|(name, count)| (name, count.into())).collect::<Document>(),
        })
    }
}

/// Commands of all processes for each job, by name; without the driver's monitoring.
fn per_job(before: &BTreeMap<String, i64>, after: &BTreeMap<String, i64>, jobs: u64) -> BTreeMap<String, f64> {
    let more = after.iter().map(|(name, count)| (name, count - before.get(name).unwrap_or(&0)));
    let ours = more.filter(|(name, count)| *count > 0 && !MONITORING.contains(&name.as_str()));
    ours.map(|(name, count)| (name.clone(), quotient(count.unsigned_abs(), jobs))).collect()
}

#[expect(clippy::cast_precision_loss, reason = "counts of jobs and commands are far below 2^52")]
fn quotient(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}
