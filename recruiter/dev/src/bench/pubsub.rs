//! Measures messages: one by one and in batches, from the call of the publisher until the subscriber has them, acknowledged by a majority.

use std::time::{Duration, Instant as Monotonic};

use bson::{Document, doc};
use clap::Args;
use recruiter_common::{
    instant::monotonic_ns,
    messages::{From, Messages},
    store::Store,
    topics::Pattern,
};
use tokio::task::JoinHandle;

use super::{Setting, Times, rate, stage::Stage};

const TOPIC: &str = "bench.messages";
/// How long to wait for a message that was published.
const ARRIVES_WITHIN: Duration = Duration::from_secs(60);

/// The arguments of `pubsub`.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct PubSub {
    /// Number of messages that are published one by one, each after the acknowledgement of the one before
    #[arg(long, short = 'n', env = "RECRUITER_BENCH_MESSAGES", value_name = "N", default_value_t = 5_000, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    messages: u64,
    /// Number of batches
    #[arg(long, env = "RECRUITER_BENCH_BATCHES", value_name = "N", default_value_t = 2_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    batches: u64,
    /// Number of messages in a batch
    #[arg(long, env = "RECRUITER_BENCH_BATCH", value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=1_000))]
    batch: u64,
    /// Number of subscribers
    #[arg(long, env = "RECRUITER_BENCH_SUBSCRIBERS", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=100))]
    subscribers: u64,
}

impl PubSub {
    pub(super) async fn measure(self, stage: &Stage, setting: &Setting) -> anyhow::Result<Document> {
        let single = self.one_way(stage, self.messages, 1).await?;
        let batches = self.one_way(stage, self.batches, self.batch).await?;
        Ok(doc! {
            "benchmark": "pubsub",
            "subscribers": i64::try_from(self.subscribers)?,
            "one_by_one": single,
            "in_batches": batches,
            "conditions": stage.conditions(setting).await?,
        })
    }

    /// Publishes `calls` batches, each after the acknowledgement of the one before.
    async fn one_way(self, stage: &Stage, calls: u64, batch: u64) -> anyhow::Result<Document> {
        stage.progress("published", calls);
        let mut subscribers = Vec::new();
        for _ in 0..self.subscribers {
            let messages = stage.store.subscribe_to([Pattern::new(TOPIC)?], From::Now).await?;
            subscribers.push(receive(messages, calls * batch));
        }
        let begun = Monotonic::now();
        let mut acknowledged = Times::new();
        for call in 0..calls {
            stage.go_on()?;
            let sent = Monotonic::now();
            publish(&stage.store, call * batch, batch).await?;
            acknowledged.record(sent.elapsed());
            stage.advance(1);
        }
        let published = begun.elapsed();
        let mut received = Times::new();
        for subscriber in subscribers {
            received.0.add(subscriber.await??.0)?;
        }
        Ok(doc! {
            "messages": i64::try_from(calls * batch)?,
            "batch": i64::try_from(batch)?,
            "published_per_second": rate(calls * batch, published),
            "received_per_second": rate(calls * batch, begun.elapsed()),
            "acknowledged_ms": acknowledged.percentiles(),
            "received_ms": received.percentiles(),
        })
    }
}

async fn publish(store: &Store, first: u64, count: u64) -> anyhow::Result<()> {
    let sent = monotonic_ns();
    let numbers = (first..first + count).map(|number| Ok((TOPIC, doc! { "number": i64::try_from(number)?, "sent": sent })));
    Ok(store.publish_messages(numbers.collect::<anyhow::Result<Vec<_>>>()?).await?)
}

/// Receives so many messages, and checks that each arrives once and in order. The times begin with the call of the publisher.
fn receive(mut messages: Messages, count: u64) -> JoinHandle<anyhow::Result<Times>> {
    tokio::spawn(async move {
        let mut times = Times::new();
        for number in 0..count {
            let message = tokio::time::timeout(ARRIVES_WITHIN, messages.next()).await??;
            let now = monotonic_ns();
            anyhow::ensure!(message.body.get_i64("number")? == i64::try_from(number)?, "message {number} is missing, or out of order");
            times.record_between(message.body.get_i64("sent")?, now);
        }
        Ok(times)
    })
}
