//! Measures throughput: jobs per second.

use std::time::{Duration, Instant as Monotonic};

use bson::{Document, doc};
use clap::{Args, ValueEnum, builder::BoolishValueParser};
use recruiter_common::{RetryManyTimes, enqueue::NewJob, job::bundle::MOST_ITEMS, limits::Limit, topics::Pattern};
use tokio::task::JoinSet;

use super::{
    Setting, rate,
    stage::{Ends, Stage},
};

/// The arguments of `burn-down`: all jobs are enqueued before the first worker starts, as in River's benchmark.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct BurnDown {
    /// Number of jobs
    #[arg(long, short = 'n', env = "RECRUITER_BENCH_JOBS", value_name = "N", default_value_t = 50_000, value_parser = clap::value_parser!(u64).range(1..=50_000_000))]
    jobs: u64,
    /// Number of groups
    #[arg(long, env = "RECRUITER_BENCH_GROUPS", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    groups: u64,
    /// Make each job a bundle of N empty items
    #[arg(long, env = "RECRUITER_BENCH_ITEMS", value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MOST_ITEMS as u64))]
    items: Option<u64>,
    /// Limit all jobs together: at most N run at a time
    #[arg(long, env = "RECRUITER_BENCH_CAPACITY", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    capacity: Option<u32>,
    /// Give each job one of N keys, and run one job of each key at a time
    #[arg(long, env = "RECRUITER_BENCH_KEYS", value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    keys: Option<u64>,
    /// Give each job one of N lines, each of which runs one job after the other
    #[arg(long, env = "RECRUITER_BENCH_LINES", value_name = "N", conflicts_with_all = ["capacity", "keys"], value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    lines: Option<u64>,
    /// Duration of each job, in milliseconds; 0 for jobs that do nothing
    #[arg(long, env = "RECRUITER_BENCH_DURATION", value_name = "MS", default_value_t = 0, conflicts_with = "items", value_parser = clap::value_parser!(u32).range(0..=60_000))]
    duration: u32,
    /// Jobs that may be repeated: retried after a failure and after the death of their worker, as in most other systems
    #[arg(long, env = "RECRUITER_BENCH_REPEATABLE", value_parser = BoolishValueParser::new())]
    repeatable: bool,
    /// Keep failures only: a job that succeeds is deleted, and not archived
    #[arg(long, env = "RECRUITER_BENCH_KEEP_FAILURES", value_parser = BoolishValueParser::new())]
    keep_failures: bool,
    /// A reader that is told of each job that ends, during the measurement
    #[arg(long, env = "RECRUITER_BENCH_WATCHER", value_name = "WATCHER")]
    watcher: Option<Watcher>,
}

/// A reader that is told of ended jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Watcher {
    /// Waits for one job that never ends: the ids of all jobs are published.
    Waiter,
    /// Subscribes to all events.
    Events,
    /// Reads a change stream over the archive.
    ChangeStream,
}

impl Watcher {
    /// Watches until it is dropped.
    async fn start(self, stage: &Stage) -> anyhow::Result<JoinSet<()>> {
        let (mut watching, store) = (JoinSet::new(), stage.store.clone());
        match self {
            Self::Waiter => {
                let never = NewJob::of_class("never", doc! {}).in_group("never").enqueue(&store).await?;
                watching.spawn(async move { drop(store.wait_for_end(never.id, Duration::MAX).await) });
            }
            Self::Events => {
                let mut events = store.events([Pattern::everything()], None).await?;
                watching.spawn(async move {
                    loop {
                        events.next().await;
                    }
                });
            }
            Self::ChangeStream => {
                let mut stream = stage.watch().await?;
                watching.spawn(async move { while stream.next_if_any().await.is_ok() {} });
            }
        }
        Ok(watching)
    }
}

impl BurnDown {
    pub(super) async fn measure(self, stage: &Stage, setting: &Setting) -> anyhow::Result<Document> {
        let mut fleet = stage.fleet(setting).await?;
        let policy = RetryManyTimes::new(25, Duration::from_secs(1))?;
        let unlimited = || {
            let job = match (self.items, self.duration) {
                (Some(items), _) => NewJob::bundle_of_class("noop", (0..items).map(|_| doc! {})),
                (None, 0) => NewJob::of_class("noop", doc! {}),
                (None, ms) => NewJob::of_class("sleep", doc! { "ms": ms }),
            };
            if self.repeatable { job.retry(&policy) } else { job }
        };
        for (name, capacity) in [("all", self.capacity), ("key:*", self.keys.map(|_| 1))] {
            if capacity.is_some() {
                stage.store.limits().set(name, Limit::new(capacity, None)).await?;
            }
        }
        let ends = Ends::of(self.jobs, self.keep_failures);
        let job = |number: u64| {
            let resources = [self.capacity.map(|_| "all".to_owned()), self.keys.map(|keys| format!("key:{}", number % keys))];
            let job = unlimited().in_group(format!("group-{}", number % self.groups)).keep(ends.keep());
            match self.lines {
                Some(lines) => job.in_line(format!("line-{}", number % lines)),
                None => resources.into_iter().flatten().fold(job, NewJob::limit),
            }
        };
        let enqueued = stage.enqueue(self.jobs, job).await?;
        let watching = match self.watcher {
            Some(watcher) => Some(watcher.start(stage).await?),
            None => None,
        };
        let begun = Monotonic::now();
        fleet.add_workers(setting.workers)?;
        let time = stage.until_ended(&mut fleet, self.jobs, ends).await? - begun;
        drop(watching);
        fleet.stop().await;
        let mut measured = doc! {
            "benchmark": "burn-down",
            "jobs": i64::try_from(self.jobs)?,
            "groups": i64::try_from(self.groups)?,
            "duration_ms": self.duration,
            "repeatable": self.repeatable,
            "keep_failures": self.keep_failures,
            "jobs_per_second": rate(self.jobs, time),
            "seconds": time.as_secs_f64(),
            "enqueued_per_second": rate(self.jobs, enqueued),
        };
        measured.extend(self.capacity.map(|capacity| ("capacity".to_owned(), i64::from(capacity).into())));
        for (name, count) in [("keys", self.keys), ("lines", self.lines)] {
            measured.extend(count.map(|count| (name.to_owned(), count.cast_signed().into())));
        }
        if let Some(items) = self.items {
            measured.extend(doc! { "items_per_job": i64::try_from(items)?, "items_per_second": rate(self.jobs * items, time) });
        }
        measured.insert("conditions", stage.conditions(setting).await?);
        Ok(measured)
    }
}
