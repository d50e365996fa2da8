//! A worker for tests that kill it: its jobs become other jobs.

use std::time::Duration;

use recruiter_common::shutdown::pause as sleep;
use recruiter_worker::{Context, Executable, NotDone, RetryManyTimes, Workable, Worker};
use serde::{Deserialize, Serialize};

/// Becomes the next job of a chain, until none is left.
#[derive(Serialize, Deserialize)]
struct Chain {
    left: i32,
}

impl Workable for Chain {
    const CLASS: &'static str = "Chain";
    type Output = i32;
}

impl Executable for Chain {
    type State = ();

    async fn execute(&self, (): &(), job: &Context) -> Result<i32, NotDone> {
        sleep(Duration::from_millis(2)).await;
        match self.left {
            0 => Ok(i32::try_from(job.inputs::<Option<i32>>().await?.len()).unwrap_or(i32::MAX)),
            left => {
                let retry = RetryManyTimes::new(1_000_000, Duration::ZERO);
                Err(NotDone::continue_as([Chain { left: left - 1 }.as_job().retry(retry)]))
            }
        }
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    Worker::new().about("Becomes other jobs.").register::<Chain>(())?.main().await
}
