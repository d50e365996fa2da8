//! The tests of the whole system: one binary, one module per promise of the README.

#![expect(clippy::unwrap_used, reason = "in a test it says where it failed")]

mod embedded;
mod faults;
mod harness;
mod library;
mod store;
