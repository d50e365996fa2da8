//! Keep-alives for idle workers. A worker that receives one need not poll its roster document before the next one is due.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::store::{Channel, Hint};

use crate::leader::database::Database;

/// Interval between two reads of the channels of all workers. In between, each read of the roster adds the channels of workers that accept
/// jobs.
const CHANNELS_EVERY: Duration = Duration::from_secs(5);

/// The channels that get keep-alives, and the last failure of a hint.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeepAlive {
    /// Channels that workers listen on.
    pub(crate) channels: BTreeSet<Channel>,
    read_at: Option<Monotonic>,
    /// When a hint to a worker may have been lost.
    failed_at: Option<Monotonic>,
}

impl KeepAlive {
    /// Reads the channels of all workers, unless the last read was less than [`CHANNELS_EVERY`] ago.
    pub(crate) async fn read_channels(&mut self, store: &impl Database, at: Monotonic) {
        if self.read_at.is_none_or(|read| at.duration_since(read) >= CHANNELS_EVERY)
            && let Ok(channels) = store.channels().await
        {
            (self.channels, self.read_at) = (channels, Some(at));
        }
    }

    /// Records that the hint of an assignment may be lost. The workers must then poll.
    pub(crate) fn failed(&mut self, at: Monotonic) {
        self.failed_at = Some(at);
    }

    /// The keep-alives after a full scan. The next scan is due after `every`. Returns no keep-alives for two scan intervals after a
    /// failure.
    pub(crate) fn hints(&self, every: Duration, at: Monotonic) -> Vec<(Channel, Hint)> {
        if self.failed_at.is_some_and(|failed| at.duration_since(failed) <= every * 2) {
            return Vec::new();
        }
        self.channels.iter().map(|channel| (*channel, Hint::KeepAlive { again_in: every })).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: Duration = Duration::from_secs(1);

    #[test]
    fn every_channel_gets_the_time_of_the_next_keep_alive() {
        let keep_alive = KeepAlive { channels: (0..3).map(Channel).collect(), ..KeepAlive::default() };
        let hints = keep_alive.hints(EVERY, Monotonic::now());
        assert_eq!(hints, (0..3).map(|channel| (Channel(channel), Hint::KeepAlive { again_in: EVERY })).collect::<Vec<_>>());
    }

    #[test]
    fn after_a_lost_hint_there_are_no_keep_alives_for_two_intervals() {
        let mut keep_alive = KeepAlive { channels: [Channel(0)].into(), ..KeepAlive::default() };
        let at = Monotonic::now();
        keep_alive.failed(at);
        assert!(keep_alive.hints(EVERY, at + EVERY).is_empty());
        assert_eq!(keep_alive.hints(EVERY, at + EVERY * 3).len(), 1, "a while ago");
    }
}
