//! The events after which the script of a page reads it again.

use std::fmt::Display;

use super::words::link;

/// Where the events are.
pub(super) const STREAM: &str = "/events/stream";
/// The most jobs whose events a page follows.
pub(super) const FOLLOWED: usize = 100;

/// How often pages are read again whose numbers change without an event, in seconds.
pub(super) const AGAIN: u32 = 15;

/// The path of the events with these topics.
pub(super) fn live<'a>(topics: impl IntoIterator<Item = &'a str>) -> String {
    link(STREAM, topics.into_iter().map(|topic| ("topic", topic)))
}

/// The path of the events of these jobs.
pub(super) fn live_jobs(jobs: impl IntoIterator<Item = impl Display>) -> String {
    let jobs: Vec<String> = jobs.into_iter().take(FOLLOWED).map(|job| job.to_string()).collect();
    link(STREAM, jobs.iter().map(|job| ("job", &**job)))
}
