//! Runs started jobs: in a session, an attempt executes a unit, records its end and calls its hooks. A unit is a job with all that its
//! execution needs. One function executes each unit to its verdict, also outside of a session.

mod attempt;
mod bundle;
mod continuation;
mod events;
pub(super) mod locked_ahead;
mod place;
mod snooze;
#[cfg(feature = "testing")]
pub mod solo;
pub(super) mod tasks;
#[cfg(feature = "opentelemetry")]
mod traces;
mod unit;
mod within_limits;
