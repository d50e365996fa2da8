//! Words that every room uses: ids, instants, names, texts, the clock.

mod address;
pub mod clock;
pub mod failure;
#[cfg(feature = "process")]
pub mod flags;
pub mod ids;
pub mod instant;
pub mod json;
pub(crate) mod names;
pub(crate) mod numbers;
mod patience;
pub mod shutdown;
pub mod task;
pub mod telemetry;
pub mod text;
pub mod topics;
#[cfg(feature = "opentelemetry")]
pub mod traces;
mod words;

pub(crate) use self::{
    address::Address,
    clock::Uptime,
    failure::Failure,
    ids::{GraphId, JobId, LeaseTerm, RoundId, StartId, WorkerId},
    instant::{DUE_MS, Instant, never_due},
    names::{LONGEST_NAME, check_name, check_traceparent, check_trimmed_name},
    numbers::integer,
    patience::{Patience, at_once, within},
    shutdown::pause,
    telemetry::{causes, chain, of_bson},
    text::{apart, briefly_apart, in_words, moment, printable},
    topics::{InvalidTopic, Pattern},
    words::words,
};
