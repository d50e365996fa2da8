//! Measures the effect of a larger and larger backlog or archive.

use std::time::{Duration, Instant as Monotonic};

use bson::{Document, doc};
use clap::Args;
use recruiter_common::{enqueue::NewJob, ids::JobId, job::Priority, store::Lane};

use super::{Setting, Times, rate, stage::Stage};

/// Number of searches measured at each size.
const TIMES: usize = 50;
const GROUP: &str = "measured";
const YEAR: Duration = Duration::from_secs(365 * 24 * 3_600);

fn noop() -> NewJob {
    NewJob::of_class("noop", doc! {}).in_group(GROUP)
}

/// The arguments of `scale-backlog`: jobs that must not slow down a search.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct Backlog {
    /// Maximum number of jobs in the backlog
    #[arg(long, env = "RECRUITER_BENCH_BACKLOG", value_name = "N", default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1..=50_000_000))]
    backlog: u64,
    /// Number of jobs run at each backlog size
    #[arg(long, short = 'n', env = "RECRUITER_BENCH_JOBS", value_name = "N", default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(1_000..=50_000_000))]
    jobs: u64,
}

/// The reason why a job of the backlog is not run now.
#[derive(Clone, Copy, Debug)]
enum Behind {
    DueLater,
    Queued,
    UnknownClass,
}

impl Behind {
    fn name(self) -> &'static str {
        match self {
            Self::DueLater => "due later",
            Self::Queued => "due but queued",
            Self::UnknownClass => "of a class that no worker has",
        }
    }

    fn job(self) -> NewJob {
        match self {
            Self::DueLater => noop().after(YEAR),
            Self::Queued => noop().priority(Priority::new(0).expect("the lowest")),
            Self::UnknownClass => NewJob::of_class("unknown", doc! {}).in_group(GROUP),
        }
    }
}

impl Backlog {
    pub(super) async fn measure(self, stage: &Stage, setting: &Setting) -> anyhow::Result<Document> {
        let mut measured = Vec::new();
        for behind in [Behind::DueLater, Behind::Queued, Behind::UnknownClass] {
            stage.empty().await?;
            let mut there = 0;
            for size in [0, self.backlog / 10, self.backlog] {
                stage.enqueue(size - there, |_| behind.job()).await?;
                there = size;
                let (pick, jobs_per_second) = self.pick_and_burn_down(stage, setting).await?;
                measured.push(doc! {
                    "behind": behind.name(),
                    "jobs": i64::try_from(size)?,
                    "pick_ms": pick.percentiles(),
                    "jobs_per_second": jobs_per_second,
                });
            }
        }
        Ok(doc! { "benchmark": "scale-backlog", "backlogs": measured, "conditions": stage.conditions(setting).await? })
    }

    /// Measures the search for a thousand jobs, then runs all jobs that were enqueued for it.
    async fn pick_and_burn_down(self, stage: &Stage, setting: &Setting) -> anyhow::Result<(Times, f64)> {
        stage.enqueue(self.jobs, |_| noop()).await?;
        let mut pick = Times::new();
        let lane = Lane::new(GROUP, "noop");
        for _ in 0..TIMES {
            let begun = Monotonic::now();
            let found = stage.store.due_jobs(std::slice::from_ref(&lane), stage.store.now(), 1_000).await?.jobs;
            pick.record(begun.elapsed());
            anyhow::ensure!(found.len() == 1_000, "the jobs that were just enqueued were not found");
        }
        Ok((pick, burn_down(stage, setting, self.jobs).await?))
    }
}

/// The arguments of `scale-archive`: an archive larger than MongoDB's cache.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct Archive {
    /// Number of archived jobs
    #[arg(long, env = "RECRUITER_BENCH_ARCHIVED", value_name = "N", default_value_t = 5_000_000, value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    archived: u64,
    /// Number of jobs run with this archive
    #[arg(long, short = 'n', env = "RECRUITER_BENCH_JOBS", value_name = "N", default_value_t = 50_000, value_parser = clap::value_parser!(u64).range(1..=50_000_000))]
    jobs: u64,
}

impl Archive {
    pub(super) async fn measure(self, stage: &Stage, setting: &Setting) -> anyhow::Result<Document> {
        stage.enqueue(self.jobs, |_| noop()).await?;
        let alone = burn_down(stage, setting, self.jobs).await?;
        // Copies of a job that Recruiter itself has archived, with other ids and dates.
        let sample = stage.any_archived().await?;
        stage.progress("archived", self.archived);
        let now = bson::DateTime::from_chrono(stage.store.now()).timestamp_millis();
        for first in (0..self.archived).step_by(1_000) {
            stage.go_on()?;
            let copies = (first..self.archived.min(first + 1_000)).map(|number| {
                let mut copy = sample.clone();
                copy.insert("_id", JobId::new());
                if let Ok(execution) = copy.get_document_mut("last_execution") {
                    execution.insert("ended_at", bson::DateTime::from_millis(now - i64::try_from(self.archived - number).unwrap_or(0)));
                }
                copy
            });
            stage.insert_archived(copies.collect()).await?;
            stage.advance(1_000);
        }
        stage.settle().await?;
        stage.enqueue(self.jobs, |_| noop()).await?;
        let beside = burn_down(stage, setting, self.jobs).await?;
        Ok(doc! {
            "benchmark": "scale-archive",
            "archived": i64::try_from(self.archived)?,
            "jobs": i64::try_from(self.jobs)?,
            "alone_jobs_per_second": alone,
            "beside_jobs_per_second": beside,
            "ratio": beside / alone,
            "archive": stage.archive_size().await?,
            "conditions": stage.conditions(setting).await?,
        })
    }
}

/// Runs `jobs` enqueued jobs. Returns their number per second.
async fn burn_down(stage: &Stage, setting: &Setting, jobs: u64) -> anyhow::Result<f64> {
    let before = stage.store.archived_count().await?;
    let mut fleet = stage.fleet(setting).await?;
    let begun = Monotonic::now();
    fleet.add_workers(setting.workers)?;
    let ended = stage.until_archived(&mut fleet, before + jobs).await;
    fleet.stop().await;
    Ok(rate(jobs, ended? - begun))
}
