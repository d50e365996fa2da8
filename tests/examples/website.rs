//! The program from the README that enqueues, so that tests can start the code that a reader copies.

use std::time::Duration;

use recruiter_common::{Client, Defaults, ExponentialBackoff, NewJob, Workable};
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

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    // The name of this program in the logs of MongoDB. The connection string names the database.
    let client = Client::connect(std::env::var("MONGODB_URI")?, "shop-website").await?;
    SendMail { to: "ada@example.org".into() }.as_job().enqueue(&client).await?;
    let subscribers = (1..=1_000).map(|n| SendMail { to: format!("subscriber-{n}@example.org") });
    NewJob::bundle(subscribers).enqueue(&client).await?;
    Ok(())
}
