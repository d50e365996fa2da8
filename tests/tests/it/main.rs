//! The tests of the whole system: one binary, one module per promise of the README.

#![expect(clippy::unwrap_used, reason = "in a test it says where it failed")]

mod backlog;
mod bad_input;
mod bench;
mod builtins;
mod bundles;
mod cleaner;
mod cli;
mod control;
mod demo;
mod dev;
mod distribution;
mod documents;
mod embedded;
mod events;
mod examples;
mod expiry;
mod faults;
mod graphs;
mod groups;
mod harness;
mod keep;
mod library;
mod library_own_client;
mod limits;
mod lines;
mod long_lived;
mod messages;
mod mongo_shell;
mod notes;
mod operator;
mod prefetch;
mod programs;
mod relay;
mod ring;
mod rounds;
mod schedules;
mod schema;
mod service;
mod signals;
mod store;
mod tidy;
mod transactions;
mod unique;
mod waits;
