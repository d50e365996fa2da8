//! The heartbeat: renews the lease of a session, on connections that job traffic cannot exhaust. Its reply shows whether a cleaner has
//! declared the worker dead.
//!
//! A worker whose session loop hangs sends no heartbeats, so that a cleaner rescues its jobs.

use std::{sync::Arc, time::Duration};

use recruiter_common::{
    clock::Uptime,
    ids::WorkerId,
    instant::Instant,
    service::Watchdog,
    shutdown::pause,
    store::{HeartbeatReply, Store},
    telemetry::chain,
};
use tokio::sync::mpsc;

use super::Lease;
use crate::engine::{held::Held, memory, meters::HeartbeatMeters};

/// Heartbeats are sent at multiples of this time, by MongoDB's clock. Heartbeats at the same instant share one journal write of MongoDB.
const TOGETHER: Duration = Duration::from_millis(250);
/// How long a worker whose session loop makes no progress sends heartbeats, in addition to its lease. Longer than one call to MongoDB: the
/// session loop notes progress after each call.
const HANGS_AFTER: Duration = Duration::from_secs(20);
/// The time between attempts after a heartbeat that was not acknowledged.
const RETRY: Duration = Duration::from_millis(500);

/// The heartbeat of one session.
pub(crate) struct Heartbeat {
    pub(crate) store: Store,
    pub(crate) worker: WorkerId,
    /// The held jobs, which each heartbeat writes into the roster.
    pub(crate) held: Arc<Held>,
    pub(crate) lease: Arc<Lease>,
    pub(crate) every: Duration,
    pub(crate) lease_for: Duration,
    /// The session loop notes its progress here.
    pub(crate) watchdog: Watchdog,
    pub(crate) meters: HeartbeatMeters,
}

impl Heartbeat {
    /// Sends heartbeats until the worker is declared dead or the session is gone. Gives the replies to the session.
    pub(crate) async fn run(self, news: mpsc::Sender<HeartbeatReply>) {
        let (mut is_failing, mut hanging) = (false, 0_u32);
        let mut acknowledged = Uptime::now();
        while !news.is_closed() {
            let stalled = self.watchdog.stalled_for();
            if stalled > self.lease_for + HANGS_AFTER {
                hanging = hanging.saturating_add(1);
                if hanging == 2 {
                    tracing::error!(
                        worker.id = %self.worker,
                        seconds = stalled.as_secs(),
                        "the main loop of this worker hangs: no heartbeats are sent, so that a cleaner rescues its jobs"
                    );
                }
                // After a freeze of the process, the session loop needs a moment to continue.
                pause(if hanging == 1 { RETRY / 10 } else { RETRY }).await;
                continue;
            }
            hanging = 0;
            let sent = Uptime::now();
            let next = match self.store.heartbeat(self.worker, &self.held.working_on(), memory::resident()).await {
                Ok(reply @ HeartbeatReply::Seen { at, .. }) => {
                    self.lease.renew(sent, at, self.lease_for);
                    self.meters.acknowledged(sent, std::mem::replace(&mut acknowledged, sent), at);
                    if std::mem::take(&mut is_failing) {
                        tracing::info!(worker.id = %self.worker, "heartbeats are acknowledged again");
                    }
                    // If the channel is full, this news is dropped. The next heartbeat brings the current state.
                    let _ = news.try_send(reply);
                    with_others(self.every, self.store.now())
                }
                Ok(HeartbeatReply::Retired) => {
                    let _ = news.send(HeartbeatReply::Retired).await;
                    return;
                }
                Err(error) => {
                    self.meters.failed();
                    if !std::mem::replace(&mut is_failing, true) {
                        tracing::warn!(worker.id = %self.worker, error = chain(&error), "a heartbeat was not acknowledged; trying again");
                    }
                    RETRY
                }
            };
            // A requested heartbeat is sent early, but not at once: each refused start requests one.
            let early = async {
                tokio::join!(pause(RETRY), self.lease.heartbeat_requested());
            };
            tokio::select! { () = pause(next) => {} () = early => {} }
        }
    }
}

/// The wait from `now`: `every`, or a little less, so that all workers send heartbeats at the same instants.
fn with_others(every: Duration, now: Instant) -> Duration {
    if every < TOGETHER * 2 {
        return every;
    }
    let past = (now + every).timestamp_subsec_millis() % TOGETHER.subsec_millis();
    every - Duration::from_millis(past.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heartbeats_meet_and_are_never_late() {
        let check = |every: u64, now: i64| {
            let now = Instant::from_timestamp_millis(1_700_000_000_000 + now).expect("a date");
            with_others(Duration::from_millis(every), now).as_millis()
        };
        assert_eq!(check(5_000, 0), 5_000);
        assert_eq!(check(5_000, 1), 4_999);
        assert_eq!(check(5_000, 249), 4_751);
        assert_eq!(check(5_000, 251), 4_999);
        assert_eq!(check(500, 30), 470);
        assert_eq!(check(50, 10), 50, "too often to meet");
    }
}
