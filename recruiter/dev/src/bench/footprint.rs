//! Measures processor time, memory and database commands, of an idle system and of a fully loaded one.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant as Monotonic},
};

use bson::{Document, doc};
use clap::Args;
use nix::sys::signal::Signal;
use recruiter_common::{enqueue::NewJob, shutdown::pause};

use super::{
    Setting,
    stage::Stage,
    usage::{computed, memory, percent_of_a_core},
};
use crate::fleet::Fleet;

/// Time from when all processes are ready until the measurement begins.
const SETTLE: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Far longer than it takes to start all jobs.
const RUNNING_WITHIN: Duration = Duration::from_secs(120);

/// Commands that read, by MongoDB's names.
const READS: [&str; 4] = ["find", "aggregate", "count", "distinct"];
const WRITES: [&str; 4] = ["insert", "update", "delete", "findAndModify"];
/// Commands that are never counted: the driver's monitoring, replication, and the measurement.
pub(super) const MONITORING: [&str; 7] =
    ["hello", "isMaster", "ismaster", "ping", "serverStatus", "replSetHeartbeat", "replSetUpdatePosition"];
/// Reads that wait for hints.
const WAITING: &str = "getMore";

/// The arguments of `idle`: recruiter, cleaner and workers without jobs, ready for 5 s.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct Idle {
    /// Duration of the measurement
    #[arg(long, env = "RECRUITER_BENCH_DURATION", value_name = "DURATION", default_value = "30s", value_parser = humantime::parse_duration)]
    duration: Duration,
    /// Number of worker processes
    #[arg(long, env = "RECRUITER_WORKERS", value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=100))]
    workers: u32,
    /// Slots of each worker process: jobs that it runs at a time
    #[arg(long, env = "RECRUITER_CONCURRENCY", value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    concurrency: u32,
}

impl Idle {
    pub(super) async fn measure(self, stage: &Stage, setting: &Setting) -> anyhow::Result<Document> {
        let setting = &Setting { workers: self.workers, concurrency: self.concurrency, ..setting.clone() };
        let mut fleet = stage.ready_fleet(setting).await?;
        let processes: Vec<(&str, u32)> = fleet.processes().chain(stage.mongod().map(|pid| ("mongod", pid))).collect();
        let all_computed = || processes.iter().map(|(_, pid)| computed(*pid)).collect::<anyhow::Result<Vec<_>>>();
        stage.wait("milliseconds until the system is idle", SETTLE).await?;
        let (commands, before, begun) = (stage.commands().await?, all_computed()?, Monotonic::now());
        stage.wait("milliseconds measured while idle", self.duration).await?;
        let (after, time) = (all_computed()?, begun.elapsed());
        let commands = per_second(&commands, &stage.commands().await?, time);

        let mut by_program: BTreeMap<&str, f64> = BTreeMap::new();
        let mut each = Vec::new();
        for ((program, pid), (before, after)) in processes.iter().zip(before.into_iter().zip(after)) {
            let percent = percent_of_a_core(after.saturating_sub(before), time);
            *by_program.entry(program).or_default() += percent;
            each.push(doc! { "program": *program, "percent_of_a_core": percent, "memory": memory(*pid)? });
        }
        if let Some(ended) = fleet.tend()?.first() {
            anyhow::bail!("{ended}");
        }
        fleet.stop().await;
        let ours: f64 = by_program.iter().filter(|(program, _)| **program != "mongod").map(|(_, percent)| percent).sum();
        let sum = |names: &[&str]| names.iter().filter_map(|name| commands.get(*name)).sum::<f64>();
        let (not_work, work): (BTreeMap<_, _>, BTreeMap<_, _>) = commands
            .iter()
            .map(|(name, rate)| (name.clone(), *rate))
            .partition(|(name, _)| name == WAITING || MONITORING.contains(&name.as_str()));
        Ok(doc! {
            "benchmark": "idle",
            "seconds": time.as_secs_f64(),
            "ours_percent_of_a_core": ours,
            "percent_of_a_core": by_program.into_iter().map(|(name, percent)| (name.to_owned(), percent.into())).collect::<Document>(),
            "reads_per_second": sum(&READS),
            "writes_per_second": sum(&WRITES),
            "commands_per_second": document(work),
            "not_counted_per_second": document(not_work),
            "processes": each,
            "conditions": stage.conditions(setting).await?,
        })
    }
}

fn document(rates: BTreeMap<String, f64>) -> Document {
    rates.into_iter().map(|(name, rate)| (name, rate.into())).collect()
}

/// Number of commands per second by name. Commands that did not occur are left out.
fn per_second(before: &BTreeMap<String, i64>, after: &BTreeMap<String, i64>, time: Duration) -> BTreeMap<String, f64> {
    let more = after.iter().map(|(name, count)| (name, count - before.get(name).unwrap_or(&0)));
    #[expect(clippy::cast_precision_loss, reason = "a count of commands is far below 2^52")]
    more.filter(|(_, count)| *count > 0).map(|(name, count)| (name.clone(), count as f64 / time.as_secs_f64())).collect()
}

/// The arguments of `memory`: of a worker that runs many jobs, and of a recruiter that assigns jobs to many slots.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct Memory {
    /// Slots of the worker: jobs that it runs at a time
    #[arg(long, env = "RECRUITER_CONCURRENCY", value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    concurrency: u32,
    /// Total number of slots in the recruiter's roster; as many workers as needed are started
    #[arg(long, env = "RECRUITER_BENCH_SLOTS", value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    slots: u32,
}

impl Memory {
    pub(super) async fn measure(self, stage: &Stage, setting: &Setting) -> anyhow::Result<Document> {
        let workers = self.slots.div_ceil(self.concurrency);
        let setting = &Setting { workers, concurrency: self.concurrency, ..setting.clone() };
        let worker = self.of_worker(stage, setting).await?;
        stage.empty().await?;
        let recruiter = self.of_recruiter(stage, setting).await?;
        Ok(doc! { "benchmark": "memory", "worker": worker, "recruiter": recruiter, "conditions": stage.conditions(setting).await? })
    }

    async fn of_worker(self, stage: &Stage, setting: &Setting) -> anyhow::Result<Document> {
        let mut fleet = stage.fleet(setting).await?;
        fleet.add_workers(1)?;
        fleet.ready(&stage.store).await?;
        let idle = of(&fleet, "recruiter-worker")?;
        let jobs = u64::from(self.concurrency);
        stage.enqueue(jobs, |_| NewJob::of_class("sleep", doc! { "ms": 3_600_000 })).await?;
        stage.progress("running", jobs);
        let begun = Monotonic::now();
        loop {
            stage.go_on()?;
            let running: u64 = stage.store.running().await?.values().sum();
            if running == jobs {
                break;
            }
            anyhow::ensure!(begun.elapsed() < RUNNING_WITHIN, "{running} of {jobs} jobs are running, and no more start");
            pause(LOOK_EVERY).await;
        }
        let busy = of(&fleet, "recruiter-worker")?;
        // Ends the fleet by force: its jobs sleep for an hour.
        drop(fleet);
        Ok(doc! { "running_jobs": self.concurrency, "idle": idle, "busy": busy })
    }

    async fn of_recruiter(self, stage: &Stage, setting: &Setting) -> anyhow::Result<Document> {
        let mut fleet = stage.fleet(setting).await?;
        let small = of(&fleet, "recruiter")?;
        for _ in 0..setting.workers {
            stage.go_on()?;
            fleet.add_workers(1)?;
            fleet.ready(&stage.store).await?;
        }
        let idle = of(&fleet, "recruiter")?;
        let slots = setting.workers * self.concurrency;
        let jobs = u64::from(slots) * 2;
        let mut signal = |signal: Signal| fleet.recruiter().map_or(Ok(()), |recruiter| recruiter.signal(signal));
        // The recruiter is stopped during the enqueue, so that one round fills all slots.
        signal(Signal::SIGSTOP)?;
        let enqueued = stage.enqueue(jobs, |_| NewJob::of_class("noop", doc! {})).await;
        signal(Signal::SIGCONT)?;
        enqueued?;
        stage.until_archived(&mut fleet, jobs).await?;
        let busy = of(&fleet, "recruiter")?;
        fleet.stop().await;
        Ok(
            doc! { "slots": slots, "assigned_jobs": i64::try_from(jobs)?, "without_workers": small, "idle": idle, "after_all_were_assigned": busy },
        )
    }
}

/// The memory of the first process of a program.
fn of(fleet: &Fleet, program: &str) -> anyhow::Result<Document> {
    let process = fleet.processes().find(|(name, _)| *name == program);
    memory(process.ok_or_else(|| anyhow::anyhow!("{program} is not running"))?.1)
}
