//! The listener of a process: reads the ids of ended jobs, and polls the jobs in case an id was lost.

use std::time::{Duration, Instant as Monotonic};

use bson::{Timestamp, oid::ObjectId};
use futures_util::TryStreamExt;

use super::waiters::{LOOK_EVERY, Waiters};
use crate::{
    base::{chain, pause},
    events::{RENEW_EVERY, RingPart, Wanted},
    mongo::{Store, StoreError},
};

/// The listener ends this long after the last wait.
const LINGER: Duration = Duration::from_secs(60);
/// Pause after a failed call.
pub(super) const AGAIN_AFTER: Duration = Duration::from_millis(200);

/// The listener of a process. It ends some time after the last wait.
pub(super) async fn listen(store: Store) {
    let id = ObjectId::new();
    loop {
        tokio::select! {
            () = subscribe(&store, id) => {}
            () = hear(&store) => {}
            () = look(&store) => {}
            () = until_idle(store.waiters()) => {}
        }
        let mut state = store.waiters().state();
        if state.waiting.is_empty() {
            state.is_listening = false;
            (state.subscribed_at, state.hears) = (None, false);
            break;
        }
    }
    let _ = store.unsubscribe(id).await;
}

/// Keeps the subscription.
async fn subscribe(store: &Store, id: ObjectId) {
    let wanted = Wanted { ends: true, ..Wanted::default() };
    loop {
        // Without a ring no process may publish: `events` may be a collection of the application.
        let asked = async {
            store.prepare_events(None).await?;
            store.subscribe(id, &wanted, RENEW_EVERY * 3).await
        };
        match asked.await {
            Ok(()) => {
                store.waiters().state().subscribed_at.get_or_insert_with(Monotonic::now);
                pause(RENEW_EVERY).await;
            }
            Err(error) => {
                tracing::debug!(error = chain(&error), "cannot ask for the ends of jobs; looking at the jobs instead");
                store.waiters().state().subscribed_at = None;
                pause(if is_lasting(&error) { LINGER } else { AGAIN_AFTER }).await;
            }
        }
    }
}

/// Whether the same call is useless for a while: a user who may only read cannot create the ring, and polls are enough.
fn is_lasting(error: &StoreError) -> bool {
    error.is_unauthorized() || !error.is_transient()
}

/// Reads the ids of ended jobs.
async fn hear(store: &Store) {
    loop {
        let heard = hear_once(store).await;
        store.waiters().state().hears = false;
        // Hints may have been missed.
        store.waiters().arrived.notify_one();
        if let Err(error) = heard {
            if matches!(error, StoreError::Foreign { .. } | StoreError::NewerSchema { .. }) {
                tracing::warn!(error = chain(&error), "cannot read the ends of jobs; looking at the jobs instead");
            } else {
                tracing::debug!(error = chain(&error), "cannot read the ends of jobs; trying again");
            }
            pause(if is_lasting(&error) { RENEW_EVERY } else { AGAIN_AFTER }).await;
        } else {
            pause(AGAIN_AFTER).await;
        }
    }
}

async fn hear_once(store: &Store) -> Result<(), StoreError> {
    store.prepare_events(None).await?;
    let from = store.newest_event().await?.unwrap_or(Timestamp { time: 0, increment: 0 });
    let mut cursor = store.tail_events(from, RingPart::Ends).await?;
    store.waiters().state().hears = true;
    // Jobs may have ended before the cursor was open.
    store.waiters().arrived.notify_one();
    while let Some(document) = cursor.try_next().await.map_err(StoreError::of("tail"))? {
        let Ok(ended) = document.get_array("ended") else { continue };
        for job in ended.into_iter().flatten().filter_map(|id| id.as_object_id()) {
            store.waiters().wake(job.into());
        }
    }
    Ok(())
}

/// Looks at the jobs, in case a hint was lost.
async fn look(store: &Store) {
    let mut wait = Duration::ZERO;
    let mut looked_at = Monotonic::now();
    loop {
        wait = store.waiters().look_after(wait);
        tokio::select! {
            () = pause((looked_at + wait).saturating_duration_since(Monotonic::now())) => {}
            () = store.waiters().arrived.notified() => {
                // While hints arrive, a new wait needs no look. It has read its job.
                if store.waiters().look_after(wait) != LOOK_EVERY {
                    wait = Duration::ZERO;
                }
                continue;
            }
        }
        looked_at = Monotonic::now();
        let jobs = store.waiters().jobs();
        if jobs.is_empty() {
            continue;
        }
        match store.unfinished_among(&jobs).await {
            // A job that is not scheduled has ended or is unknown.
            Ok(unfinished) => jobs.into_iter().filter(|job| !unfinished.contains(job)).for_each(|job| store.waiters().wake(job)),
            Err(error) => tracing::debug!(error = chain(&error), "cannot look at the jobs that are waited for; trying again"),
        }
    }
}

/// Returns some time after the last wait.
async fn until_idle(waiters: &Waiters) {
    let mut idle = 0;
    while idle < 10 {
        pause(LINGER / 10).await;
        idle = if waiters.state().waiting.is_empty() { idle + 1 } else { 0 };
    }
}
