//! Words that every room uses: ids, instants, names, texts, the clock.

pub mod clock;
pub mod failure;
#[cfg(feature = "process")]
pub mod flags;
pub mod ids;
pub mod instant;
pub mod json;
pub(crate) mod names;
pub(crate) mod numbers;
pub mod shutdown;
pub mod task;
pub mod telemetry;
pub mod text;
pub mod topics;
#[cfg(feature = "opentelemetry")]
pub mod traces;
