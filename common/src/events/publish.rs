//! Writes the events of this process.
//!
//! A task writes what waits, as one document, and ends when nothing waits. So a process without events has no task, and a busy one writes
//! large documents.

use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};

use tokio::sync::watch;

use super::Event;
use crate::{
    base::{JobId, chain},
    mongo::Store,
};

/// How long to wait for the acknowledgement of a document. Events are not worth more.
const WITHIN: Duration = Duration::from_secs(1);

/// The number of tasks in this process that write events.
static WRITING: LazyLock<watch::Sender<usize>> = LazyLock::new(watch::Sender::default);

/// Counts a task until it ends or is dropped.
struct Writing;

impl Writing {
    fn begin() -> Self {
        WRITING.send_modify(|tasks| *tasks += 1);
        Self
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        WRITING.send_modify(|tasks| *tasks -= 1);
    }
}

/// Waits until the events of all stores of this process are written or dropped, for a second at most. A process that ends calls it.
pub async fn flush() {
    let _ = tokio::time::timeout(WITHIN, WRITING.subscribe().wait_for(|tasks| *tasks == 0)).await;
}

impl Store {
    /// Hands events and ids of ended jobs to the publisher.
    pub(super) fn tell(&self, events: Vec<Event>, ends: Vec<JobId>) {
        if (!events.is_empty() || !ends.is_empty()) && self.publisher().add(events, ends) {
            let (store, writing) = (self.clone(), Writing::begin());
            tokio::spawn(async move {
                publish(store).await;
                drop(writing);
            });
        }
    }

    /// Waits until the events of this store are written or dropped, for a second at most. [`flush`] waits for those
    /// of all stores.
    pub async fn flush_events(&self) {
        let _ = tokio::time::timeout(WITHIN, self.publisher().flushed()).await;
    }
}

async fn publish(store: Store) {
    loop {
        let wanted = match store.publisher().fresh() {
            Some(wanted) => wanted,
            None => match store.wanted_events().await {
                Ok(wanted) => {
                    let wanted = Arc::new(wanted);
                    store.publisher().know(wanted.clone());
                    wanted
                }
                Err(error) => {
                    tracing::debug!(error = chain(&error), "events were dropped");
                    return store.publisher().give_up();
                }
            },
        };
        let Some(document) = store.publisher().next_document(&wanted) else { return };
        let count = document.get_array("events").map_or(0, Vec::len);
        let written = tokio::time::timeout(WITHIN, store.insert_events(document)).await;
        if let Ok(Err(error)) = &written {
            tracing::debug!(error = chain(error), "events were dropped");
        }
        if !matches!(written, Ok(Ok(_))) {
            store.publisher().note_dropped(count);
        }
    }
}
