//! Bad days of MongoDB itself, and wrong clocks: members that step down, die, freeze, are cut off, are slow, are full;
//! and processes with clocks that are an hour off. Enqueuers go on all the time, and send again what was not acknowledged.

#![expect(clippy::unwrap_used, reason = "in a test it says where it failed")]

mod application;
mod clocks;
mod full_disk;
mod network;
mod server;
mod stage;
mod stalled_writes;
mod usage;
