//! The jobs of a shop, which the web service enqueues and the worker runs. Usually a module or a crate that both depend on.

use std::time::Duration;

use recruiter_worker::{Defaults, ExponentialBackoff, Workable};
use serde::{Deserialize, Serialize};

/// Writes the invoice of an order and returns its number.
#[derive(Serialize, Deserialize)]
pub(crate) struct SendInvoice {
    pub(crate) order: String,
    pub(crate) cents: i64,
}

impl Workable for SendInvoice {
    const CLASS: &'static str = "SendInvoice";
    type Output = String;

    fn defaults() -> Defaults {
        Defaults::default().group("mail").retry(ExponentialBackoff::new(5, Duration::from_millis(100))).time_limit(Duration::from_secs(10))
    }
}

/// Counts the primes below a number: work that computes, and so blocks its thread.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct CountPrimes {
    pub(crate) below: u32,
}

impl Workable for CountPrimes {
    const CLASS: &'static str = "CountPrimes";
    type Output = u32;
}
