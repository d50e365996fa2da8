//! How many jobs a second.

use std::time::Instant as Monotonic;

use bson::{Document, doc};
use clap::Args;
use recruiter_common::enqueue::NewJob;

use super::{Setting, rate, stage::Stage};

/// All jobs are there before the first worker is, as River measures it.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct BurnDown {
    /// How many jobs
    #[arg(long, short = 'n', env = "RECRUITER_BENCH_JOBS", value_name = "N", default_value_t = 50_000, value_parser = clap::value_parser!(u64).range(1..=50_000_000))]
    jobs: u64,
    /// In how many groups
    #[arg(long, env = "RECRUITER_BENCH_GROUPS", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    groups: u64,
}

impl BurnDown {
    pub(super) async fn measure(self, stage: &Stage, setting: &Setting) -> anyhow::Result<Document> {
        let mut fleet = stage.fleet(setting).await?;
        let job = |number: u64| NewJob::of_class("noop", doc! {}).in_group(format!("group-{}", number % self.groups));
        let enqueued = stage.enqueue(self.jobs, job).await?;
        let begun = Monotonic::now();
        fleet.add_workers(setting.workers)?;
        let time = stage.until_archived(&mut fleet, self.jobs).await? - begun;
        fleet.stop().await;
        Ok(doc! {
            "benchmark": "burn-down",
            "jobs": i64::try_from(self.jobs)?,
            "groups": i64::try_from(self.groups)?,
            "jobs_per_second": rate(self.jobs, time),
            "seconds": time.as_secs_f64(),
            "enqueued_per_second": rate(self.jobs, enqueued),
            "conditions": stage.conditions(setting).await?,
        })
    }
}
