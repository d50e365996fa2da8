//! The worker from the README, so that tests can start the code that a reader copies.

use std::time::Duration;

use recruiter_worker::{Context, Defaults, Executable, ExponentialBackoff, NotDone, Workable, Worker};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct SendMail {
    to: String,
}

impl Workable for SendMail {
    const CLASS: &'static str = "SendMail";
    type Output = ();

    fn defaults() -> Defaults {
        Defaults::default().group("mail").retry(ExponentialBackoff::new(5, Duration::from_secs(10)))
    }
}

impl Executable for SendMail {
    type State = Mailer;

    async fn execute(&self, mailer: &Mailer, job: &Context) -> Result<(), NotDone> {
        mailer.send(&self.to, job.attempt()).await?;
        Ok(())
    }
}

struct Mailer;

impl Mailer {
    async fn send(&self, _to: &str, _attempt: u32) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    Worker::new().about("Sends the mail of the shop.").register::<SendMail>(Mailer)?.main().await
}
