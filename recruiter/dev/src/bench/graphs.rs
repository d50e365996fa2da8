//! Measures jobs that wait for others: the throughput of pipelines, or of wide graphs, beside that of independent jobs, and how fast a job follows another one.

use std::time::{Duration, Instant as Monotonic};

use bson::{Document, doc};
use clap::Args;
use recruiter_common::{Graph, JobId, enqueue::NewJob, shutdown::pause};

use super::{Setting, Times, rate, stage::Stage};

/// Maximum number of jobs in one enqueueing call.
const BATCH: u64 = 3_000;

/// The arguments of `graphs`.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct Graphs {
    /// Number of jobs
    #[arg(long, short = 'n', env = "RECRUITER_BENCH_JOBS", value_name = "N", default_value_t = 30_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    jobs: u64,
    /// Number of stages of each pipeline
    #[arg(long, env = "RECRUITER_BENCH_STAGES", value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(2..=1_000))]
    stages: u64,
    /// Wide graphs instead of pipelines: so many jobs wait for one, and one for all of them
    #[arg(long, env = "RECRUITER_BENCH_WIDTH", value_name = "N", conflicts_with = "stages", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    width: Option<u64>,
    /// Number of pipelines that run alone, one at a time
    #[arg(long, env = "RECRUITER_BENCH_ALONE", value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    alone: u64,
}

impl Graphs {
    pub(super) async fn measure(self, stage: &Stage, setting: &Setting) -> anyhow::Result<Document> {
        let of_one = self.of_one();
        let jobs = (self.jobs / of_one).max(1) * of_one;
        let independent = self.burn_down(stage, setting, jobs, false).await?;
        stage.empty().await?;
        let in_graphs = self.burn_down(stage, setting, jobs, true).await?;
        stage.empty().await?;
        let advance = self.alone(stage, setting).await?;
        Ok(doc! {
            "benchmark": "graphs",
            "jobs": i64::try_from(jobs)?,
            "stages": self.width.is_none().then_some(i64::try_from(self.stages)?),
            "width": self.width.map(i64::try_from).transpose()?,
            "independent_jobs_per_second": independent,
            "jobs_per_second": in_graphs,
            "ratio": in_graphs / independent,
            "entered_to_next_entered_ms": advance.percentiles(),
            "conditions": stage.conditions(setting).await?,
        })
    }

    /// Number of jobs that belong together.
    fn of_one(self) -> u64 {
        self.width.map_or(self.stages, |width| width + 2)
    }

    fn add(self, graph: &mut Graph) {
        let noop = || NewJob::of_class("noop", doc! {});
        let Some(width) = self.width else {
            graph.pipeline((0..self.stages).map(|_| noop()));
            return;
        };
        let first = graph.add(noop());
        let wide = graph.group((0..width).map(|_| noop().waits_for(first)));
        graph.when_all(wide, noop());
    }

    async fn burn_down(self, stage: &Stage, setting: &Setting, jobs: u64, in_graphs: bool) -> anyhow::Result<f64> {
        let mut fleet = stage.fleet(setting).await?;
        if in_graphs {
            let batch = (BATCH / self.of_one()).max(1);
            let mut left = jobs / self.of_one();
            while left > 0 {
                stage.go_on()?;
                let mut graph = Graph::new();
                for _ in 0..batch.min(left) {
                    self.add(&mut graph);
                }
                graph.enqueue(&stage.store).await?;
                left -= batch.min(left);
            }
        } else {
            stage.enqueue(jobs, |_| NewJob::of_class("noop", doc! {})).await?;
        }
        let begun = Monotonic::now();
        fleet.add_workers(setting.workers)?;
        let time = stage.until_archived(&mut fleet, jobs).await? - begun;
        fleet.stop().await;
        Ok(rate(jobs, time))
    }

    /// The time from the entry of a job that does nothing to the entry of the one that waits for it, on an idle system.
    async fn alone(self, stage: &Stage, setting: &Setting) -> anyhow::Result<Times> {
        let mut fleet = stage.ready_fleet(setting).await?;
        stage.progress("pipelines", self.alone);
        let mut times = Times::new();
        for _ in 0..self.alone {
            stage.go_on()?;
            let mut graph = Graph::new();
            let ids = graph.pipeline((0..2).map(|_| NewJob::of_class("noop", doc! { "tell": true })));
            graph.enqueue(&stage.store).await?;
            let [first, second] = entered(stage, &ids).await?;
            times.record_between(first, second);
            stage.advance(1);
            pause(Duration::from_millis(20)).await;
        }
        fleet.stop().await;
        Ok(times)
    }
}

/// When both jobs were entered, once both are archived.
async fn entered(stage: &Stage, ids: &[JobId]) -> anyhow::Result<[i64; 2]> {
    loop {
        let archived = stage.store.archived_jobs(ids).await?;
        if archived.len() == ids.len() {
            let of = |id: &JobId| {
                let job = archived.iter().find(|job| job.get_object_id("_id").is_ok_and(|found| JobId::from(found) == *id));
                job.and_then(|job| job.get_i64("result").ok()).ok_or_else(|| anyhow::anyhow!("job {id} did not report when it was entered"))
            };
            return Ok([of(&ids[0])?, of(&ids[1])?]);
        }
        pause(Duration::from_millis(1)).await;
    }
}
