//! A worker with shared state, hooks, a class that blocks its thread, and a retry policy of its own.
//!
//! ```sh
//! MONGODB_URI='mongodb://127.0.0.1:27017/shop?replicaSet=rs0' cargo run -p recruiter-worker --example worker
//! ```

mod shop;

use std::{
    collections::HashSet,
    env,
    error::Error,
    io::IsTerminal as _,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use recruiter_worker::{
    BlockingExecutable, Context, Decision, Executable, Failure, FinishReason, History, Instant, NotDone, OrNotDone as _, RetryPolicy,
    Shutdown, Worker, WorkerConfig, WorkerEvent, bson::Document,
};
use shop::{CountPrimes, SendInvoice};

/// What all executions of [`SendInvoice`] share: usually a pool of connections to something.
#[derive(Debug, Default)]
struct Mailer {
    refused_once: Mutex<HashSet<String>>,
    sent: AtomicU64,
}

impl Mailer {
    /// The first attempt for each order fails, as mail servers do.
    fn send(&self, order: &str) -> Result<u64, std::io::Error> {
        let mut refused = self.refused_once.lock().unwrap_or_else(PoisonError::into_inner);
        if refused.insert(order.to_owned()) {
            return Err(std::io::Error::other("the mail server is busy"));
        }
        Ok(self.sent.fetch_add(1, Ordering::Relaxed) + 1)
    }
}

impl Executable for SendInvoice {
    type State = Mailer;

    async fn execute(&self, mailer: &Mailer, job: &Context) -> Result<String, NotDone> {
        if self.cents <= 0 {
            // Regardless of the retry policy: it would fail again.
            return Err(NotDone::give_up("NothingToPay", format!("order {} costs {} cents", self.order, self.cents)));
        }
        tracing::info!(order = self.order, attempt = job.attempt(), "sending an invoice");
        let number = mailer.send(&self.order).or_failed("SmtpDown")?;
        Ok(format!("invoice {number} of order {}", self.order))
    }

    async fn after_success(&self, mailer: &Mailer, _job: &Context) {
        tracing::info!(order = self.order, sent = mailer.sent.load(Ordering::Relaxed), "an invoice was sent");
    }

    async fn after_last_failure(&self, _mailer: &Mailer, _job: &Context, failure: &Failure) {
        tracing::warn!(order = self.order, class = failure.class, "a customer gets no invoice");
    }
}

impl BlockingExecutable for CountPrimes {
    type State = ();

    fn execute(&self, (): &(), job: &Context) -> Result<u32, NotDone> {
        let mut count = 0;
        for number in 2..self.below {
            if job.is_cancelled() {
                return Err(NotDone::stopped(format!("counted {count} primes below {number}")));
            }
            count += u32::from((2..=number.isqrt()).all(|divisor| number % divisor != 0));
        }
        Ok(count)
    }
}

/// Retries for as long as the failure names the network, and not for more than a day.
#[derive(Debug)]
struct WhileTheNetworkIsDown;

impl RetryPolicy for WhileTheNetworkIsDown {
    fn class(&self) -> &str {
        "WhileTheNetworkIsDown"
    }

    fn parameters(&self) -> Document {
        Document::new()
    }

    fn decide(&self, job: &History<'_>, failure: &Failure, failed_at: Instant) -> Decision {
        let is_young = (failed_at - job.created_at).num_days() < 1;
        if failure.class == "SmtpDown" && is_young {
            Decision::RetryAfter(Duration::from_secs(1))
        } else {
            Decision::Archive(FinishReason::NOT_SCHEDULED_BY_RETRY_POLICY)
        }
    }

    fn is_last_attempt(&self, _job: &History<'_>, _now: Instant) -> bool {
        false
    }
}

/// The worker of the shop, without a connection, so that a test can register the same classes.
fn worker() -> Result<Worker, Box<dyn Error>> {
    let worker = Worker::new().register::<SendInvoice>(Mailer::default())?.register_blocking::<CountPrimes>(())?;
    Ok(worker.register_policy("WhileTheNetworkIsDown", |_, _| Ok(WhileTheNetworkIsDown))?.listen(|event| {
        if let WorkerEvent::Failed { job, failure, last } = event {
            tracing::warn!(job = %job.job_id(), class = failure.class, last, "a job failed");
        }
    }))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal()).init();
    let (stop, shutdown) = Shutdown::manual();
    tokio::spawn(async move {
        let _ = tokio::signal::ctrl_c().await;
        stop.drain();
    });
    let config = WorkerConfig::default().groups(["mail", "generic"]).concurrency(4);
    worker()?.run(env::var("MONGODB_URI")?, config, shutdown).await?;
    Ok(())
}

/// The jobs can be tested without MongoDB.
#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_invoice_is_sent_at_the_second_attempt() {
        let (mailer, invoice) = (Mailer::default(), SendInvoice { order: "7".into(), cents: 100 });
        let refused = invoice.execute(&mailer, &Context::for_tests().build()).await.unwrap_err();
        assert_eq!(refused.failure().class, "SmtpDown");
        let sent = invoice.execute(&mailer, &Context::for_tests().attempt(2).build()).await;
        assert_eq!(sent.unwrap(), "invoice 1 of order 7");
        let free = SendInvoice { order: "8".into(), cents: 0 };
        assert!(matches!(free.execute(&mailer, &Context::for_tests().build()).await, Err(NotDone::GiveUp(_))));
    }

    #[test]
    fn primes_are_counted_until_the_job_is_cancelled() {
        let primes = CountPrimes { below: 100 };
        assert_eq!(primes.execute(&(), &Context::for_tests().build()).unwrap(), 25);
        let cancelled = Context::for_tests().cancelled(recruiter_worker::Cancellation::Requested).build();
        assert!(primes.execute(&(), &cancelled).is_err());
    }
}
