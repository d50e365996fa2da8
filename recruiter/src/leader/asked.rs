//! The duty of the schema: makes the parts that other processes ask for, because their MongoDB users may not make collections and indexes. It
//! runs beside the rounds.

use std::time::Duration;

use recruiter_common::{shutdown::Shutdown, store::Store, telemetry::chain};

/// Interval between two looks. A process that has asked waits for ten seconds.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Makes what is asked for until a stop is requested.
pub(super) async fn run(store: &Store, shutdown: &mut Shutdown) {
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut logged = String::new();
    loop {
        tokio::select! {
            () = shutdown.requested() => break,
            _ = looks.tick() => match store.make_asked().await {
                Ok(()) => logged.clear(),
                Err(error) => {
                    let error = chain(&error).to_string();
                    if logged != error {
                        tracing::warn!(error, "cannot make the parts of the schema that processes ask for; retrying");
                        logged = error;
                    }
                }
            },
        }
    }
}
