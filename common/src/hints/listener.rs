//! The readers of hints, and the stream that each reads.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use bson::{Document, doc};
use tokio::sync::mpsc;

use super::Hint;
use crate::{base::WorkerId, mongo::Channel};

/// The reader of hints, which decides the collection and the kinds of hints.
#[derive(Clone, Copy, Debug)]
pub enum Listener {
    /// The recruiter reads hints about jobs and free slots.
    Recruiter,
    /// A worker reads its assignments and cancellations.
    Worker(WorkerId, Channel),
}

impl Listener {
    /// The channel that is read; `None` for the recruiter.
    pub(crate) fn channel(self) -> Option<Channel> {
        match self {
            Self::Recruiter => None,
            Self::Worker(_, channel) => Some(channel),
        }
    }

    pub(crate) fn filter(self) -> Document {
        match self {
            Self::Recruiter => doc! {},
            Self::Worker(worker, _) => {
                doc! { "$or": [{ format!("pairs.{worker}"): { "$exists": true } }, { "kind": { "$in": ["cancel", "control", "recall", "keep-alive"] } }] }
            }
        }
    }

    pub(crate) fn projection(self) -> Document {
        match self {
            Self::Recruiter => doc! { "_id": 0 },
            Self::Worker(worker, _) => {
                doc! { "_id": 0, "at": 1, "kind": 1, "round": 1, "job": 1, "grants": 1, "again_in_ms": 1, format!("pairs.{worker}"): 1 }
            }
        }
    }
}

/// A stream of hints. Dropping it ends its tailing task.
#[derive(Debug)]
pub struct Hints {
    pub(crate) queue: mpsc::Receiver<Hint>,
    pub(crate) sender: mpsc::Sender<Hint>,
    pub(crate) is_listening: Arc<AtomicBool>,
    pub(crate) tail: tokio::task::JoinHandle<()>,
}

impl Hints {
    /// Waits for the next hint. The wait can be cancelled safely.
    pub async fn next(&mut self) -> Hint {
        match self.queue.recv().await {
            Some(hint) => hint,
            None => std::future::pending().await,
        }
    }

    /// Whether a cursor is open, as far as this process can detect.
    pub fn is_listening(&self) -> bool {
        self.is_listening.load(Ordering::Relaxed)
    }

    /// Where further hints can be put.
    #[cfg(unix)]
    pub(crate) fn sender(&self) -> mpsc::Sender<Hint> {
        self.sender.clone()
    }

    /// A hint that has already arrived.
    pub fn try_next(&mut self) -> Option<Hint> {
        self.queue.try_recv().ok()
    }
}

impl Drop for Hints {
    fn drop(&mut self) {
        self.tail.abort();
    }
}
