//! Measures a wait for the result of a job: from the moment at which the job is in the archive until the wait returns.

use std::time::Duration;

use bson::{Document, doc};
use clap::Args;
use recruiter_common::{enqueue::NewJob, instant::monotonic_ns, shutdown::pause};

use super::{Setting, Times, stage::Stage};

/// Jobs before the measurement. After the first one, all processes know within two seconds of the wait.
const WARM_UP: Duration = Duration::from_secs(3);
/// How often the archive is read.
const LOOK_EVERY: Duration = Duration::from_micros(500);

/// The arguments of `wait`: one job at a time.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct Wait {
    /// Number of jobs
    #[arg(long, short = 'n', env = "RECRUITER_BENCH_JOBS", value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    jobs: u64,
}

impl Wait {
    pub(super) async fn measure(self, stage: &Stage, setting: &Setting) -> anyhow::Result<Document> {
        let store = &stage.store;
        let mut fleet = stage.ready_fleet(setting).await?;
        stage.progress("jobs", self.jobs);
        let job = || NewJob::of_class("noop", doc! {});
        let warm = job().enqueue(store).await?.id;
        store.wait_for_end(warm, Duration::from_secs(60)).await?;
        pause(WARM_UP).await;
        let (mut returned, mut after_archive) = (Times::new(), Times::new());
        for _ in 0..self.jobs {
            stage.go_on()?;
            let id = job().enqueue(store).await?.id;
            let acknowledged = monotonic_ns();
            let waits = async {
                store.wait_for_end(id, Duration::from_secs(60)).await?;
                anyhow::Ok(monotonic_ns())
            };
            let looks = async {
                while store.archived_jobs(&[id]).await?.is_empty() {
                    pause(LOOK_EVERY).await;
                }
                anyhow::Ok(monotonic_ns())
            };
            let (waited, archived) = tokio::try_join!(waits, looks)?;
            returned.record_between(acknowledged, waited);
            after_archive.record_between(archived, waited);
            stage.advance(1);
            pause(Duration::from_millis(20)).await;
        }
        fleet.stop().await;
        Ok(doc! {
            "benchmark": "wait",
            "jobs": i64::try_from(self.jobs)?,
            "returned_ms": returned.percentiles(),
            "after_archive_ms": after_archive.percentiles(),
            "conditions": stage.conditions(setting).await?,
        })
    }
}
