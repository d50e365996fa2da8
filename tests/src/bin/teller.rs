//! A worker for tests that kill it: its jobs move money in transactions of their own, or become other jobs.

use std::time::Duration;

use bson::{Document, doc};
use recruiter_common::shutdown::pause as sleep;
use recruiter_worker::{Context, Executable, NewJob, NotDone, RetryManyTimes, Workable, Worker, mongodb::Collection};
use serde::{Deserialize, Serialize};

/// Moves a cent from one account to another, and enqueues a receipt.
#[derive(Serialize, Deserialize)]
struct Transfer {
    from: i32,
    to: i32,
    ms: u64,
}

impl Workable for Transfer {
    const CLASS: &'static str = "Transfer";
    type Output = String;
}

impl Executable for Transfer {
    type State = ();

    async fn execute(&self, (): &(), job: &Context) -> Result<String, NotDone> {
        let [accounts, effects] = &["accounts", "effects"].map(|name| collection(job, name));
        let pause = &|| sleep(Duration::from_millis(self.ms));
        job.transaction(|mut session| async move {
            effects.insert_one(doc! { "job": job.job_id(), "start": job.start_id().to_string() }).session(&mut *session).await?;
            pause().await;
            for (account, cents) in [(self.from, -1), (self.to, 1)] {
                accounts.update_one(doc! { "_id": account }, doc! { "$inc": { "cents": cents } }).session(&mut *session).await?;
            }
            NewJob::of_class("Receipt", doc! { "of": job.job_id() }).enqueue_in(job.store(), &mut session).await?;
            pause().await;
            Ok(format!("moved by {}", job.start_id()))
        })
        .await
    }
}

#[expect(clippy::disallowed_methods, reason = "collections of the application")]
fn collection(job: &Context, name: &str) -> Collection<Document> {
    job.store().database().collection(name)
}

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

/// Written once for each transfer.
#[derive(Serialize, Deserialize)]
struct Receipt {
    of: bson::oid::ObjectId,
}

impl Workable for Receipt {
    const CLASS: &'static str = "Receipt";
    type Output = ();
}

impl Executable for Receipt {
    type State = ();

    async fn execute(&self, (): &(), _job: &Context) -> Result<(), NotDone> {
        Ok(())
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    Worker::new().about("Moves money.").register::<Transfer>(())?.register::<Receipt>(())?.register::<Chain>(())?.main().await
}
