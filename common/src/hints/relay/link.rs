//! A client's end of the relay.

use std::{
    io::{Error, ErrorKind},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant as Monotonic},
};

use bson::Document;
use tokio::{sync::mpsc, time::timeout};
use tokio_util::task::AbortOnDropHandle;

use super::{HANDSHAKE, LARGEST, Rendezvous, SILENT_FOR, Stream, handshake::answer, hub::Connected, receive, send};
use crate::{
    base::WorkerId,
    hints::{Hint, listener::Listener},
    mongo::{Channel, Store},
};

/// Maximum number of hints that wait for the leader. Further hints go through the database.
const QUEUE: usize = 1_024;
/// After an attempt that failed, a process that sends hints waits this long before the next.
const SENDER_RETRIES_AFTER: Duration = Duration::from_secs(10);
/// The same for a worker that receives keep-alives. They may come from a leader that it cannot reach.
const LISTENER_RETRIES_AFTER: Duration = Duration::from_mins(1);

/// The part of a store that knows the relay: its own connection to the leader, and, in the leader, the connected workers.
#[derive(Debug, Default)]
pub(crate) struct Relay {
    link: Mutex<Outgoing>,
    /// Whether a worker listens with this store. Its connection is used for its own hints as well.
    is_worker: AtomicBool,
    connected: Mutex<Option<Arc<Connected>>>,
}

#[derive(Debug, Default)]
struct Outgoing {
    queue: Option<mpsc::Sender<Document>>,
    has_sent: bool,
    /// When this process last tried to connect, after its last connection.
    tried_at: Option<Monotonic>,
}

/// A connection to the leader.
#[derive(Debug)]
pub(crate) struct Link(Box<dyn Stream>);

/// A worker's attempt to connect, if there is one.
#[derive(Debug, Default)]
pub(crate) struct Linking(Option<AbortOnDropHandle<Option<Link>>>);

impl Store {
    /// Hints past the database.
    pub(crate) fn relay(&self) -> &Arc<Relay> {
        self.part()
    }
}

impl Relay {
    /// Sends a hint to the leader. Returns false if there is no connection, or too many hints wait for it.
    pub(crate) fn send(&self, hint: &Hint) -> bool {
        let link = self.link();
        link.queue.as_ref().is_some_and(|queue| hint.parts().iter().all(|part| queue.try_send(part.to_document()).is_ok()))
    }

    /// Sends what concerns connected workers to them, and returns the hints for the others.
    pub(crate) fn send_to_workers(&self, hints: Vec<(Channel, Hint)>) -> Vec<(Channel, Hint)> {
        match self.connected() {
            Some(connected) => connected.send_all(hints),
            None => hints,
        }
    }

    /// Passes a hint from the database on to all connected workers.
    pub(crate) fn pass_on(&self, hint: &Hint) {
        if let Some(connected) = self.connected() {
            connected.broadcast(hint);
        }
    }

    /// The workers that are connected to this leader.
    pub(crate) fn workers(&self) -> Vec<WorkerId> {
        self.connected().map(|connected| connected.workers().keys().copied().collect()).unwrap_or_default()
    }

    /// Whether this worker is connected to this leader.
    pub(crate) fn is_linked(&self, worker: WorkerId) -> bool {
        self.connected().is_some_and(|connected| connected.workers().contains_key(&worker))
    }

    /// Sets the workers that are connected to this leader; `None` when it does not lead any more.
    pub(crate) fn serve(&self, connected: Option<Arc<Connected>>) {
        *self.connected.lock().unwrap_or_else(PoisonError::into_inner) = connected;
    }

    fn connected(&self) -> Option<Arc<Connected>> {
        self.connected.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether to try to connect now. The time of the last attempt is then now.
    fn is_due(&self, retry_after: Duration) -> bool {
        let mut link = self.link();
        let is_open = link.queue.as_ref().is_some_and(|queue| !queue.is_closed());
        let is_due = !is_open && link.tried_at.is_none_or(|tried| tried.elapsed() >= retry_after);
        if is_due {
            link.tried_at = Some(Monotonic::now());
        }
        is_due
    }

    fn link(&self) -> MutexGuard<'_, Outgoing> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Linking {
    /// The connection; `None` when the attempt has failed, or if there is none.
    pub(crate) async fn done(&mut self) -> Option<Link> {
        let link = self.0.as_mut()?.await;
        self.0 = None;
        link.ok().flatten()
    }
}

impl Store {
    /// Begins to connect a worker that begins to listen.
    pub(crate) fn link_worker(&self, listener: Listener) -> Linking {
        let Listener::Worker(worker, _) = listener else { return Linking::default() };
        self.relay().is_worker.store(true, Ordering::Relaxed);
        let store = self.clone();
        Linking(Some(AbortOnDropHandle::new(tokio::spawn(async move { store.link(Some(worker)).await }))))
    }

    /// Begins to connect a worker that has received a keep-alive from the database, unless the last attempt was recently.
    pub(crate) fn link_worker_again(&self, listener: Listener, linking: &mut Linking) {
        if linking.0.is_none() && self.relay().is_due(LISTENER_RETRIES_AFTER) {
            *linking = self.link_worker(listener);
        }
    }

    /// Connects in the background, if this process sends hints and has no connection. Not after its first hint: a process that sends only
    /// one need not connect.
    pub(crate) fn link_later(&self) {
        let has_sent = std::mem::replace(&mut self.relay().link().has_sent, true);
        if !has_sent || self.relay().is_worker.load(Ordering::Relaxed) || !self.relay().is_due(SENDER_RETRIES_AFTER) {
            return;
        }
        let (store, relay) = (self.clone(), Arc::downgrade(self.relay()));
        tokio::spawn(async move {
            let link = store.link(None).await;
            // The connection ends with the last clone of the store.
            drop(store);
            if let Some(link) = link {
                link.run(&relay, None).await;
            }
        });
    }

    /// Connects as a worker, or as a process that only sends hints.
    async fn link(&self, worker: Option<WorkerId>) -> Option<Link> {
        let at = self.rendezvous().await.ok()??;
        let linked = timeout(HANDSHAKE, connect(&at, worker)).await.unwrap_or_else(|limit| Err(limit.into()));
        let address = at.address.map(|address| address.to_string());
        match linked {
            Ok(link) => {
                tracing::debug!(socket = ?at.socket, address, "connected to the recruiter");
                Some(link)
            }
            Err(error) => {
                tracing::debug!(%error, socket = ?at.socket, address, "cannot reach the recruiter; hints go through MongoDB");
                None
            }
        }
    }
}

/// Connects to the socket, and if that fails, to the address: a container has the boot id of its machine, but not every directory.
async fn connect(at: &Rendezvous, worker: Option<WorkerId>) -> Result<Link, Error> {
    let mut stream = match open_socket(at).await {
        Ok(stream) => stream,
        Err(error) => match &at.address {
            Some(address) => Box::new(address.connect().await?),
            None => return Err(error),
        },
    };
    answer(&mut *stream, &at.secret, worker).await?;
    Ok(Link(stream))
}

#[cfg(unix)]
async fn open_socket(at: &Rendezvous) -> Result<Box<dyn Stream>, Error> {
    let socket = at.socket.as_ref().ok_or(ErrorKind::AddrNotAvailable)?;
    Ok(Box::new(tokio::net::UnixStream::connect(socket).await?))
}

#[cfg(not(unix))]
async fn open_socket(_: &Rendezvous) -> Result<Box<dyn Stream>, Error> {
    Err(ErrorKind::Unsupported.into())
}

impl Link {
    /// Exchanges hints until the connection ends, the leader is silent for [`SILENT_FOR`], or the store is dropped.
    pub(crate) async fn run(self, relay: &Weak<Relay>, heard: Option<&mpsc::Sender<Hint>>) {
        let (mut from, mut to) = tokio::io::split(self.0);
        let (sender, mut queue) = mpsc::channel::<Document>(QUEUE);
        if let Some(relay) = relay.upgrade() {
            *relay.link() = Outgoing { queue: Some(sender), has_sent: true, tried_at: None };
        }
        let reads = async {
            while let Ok(Ok(document)) = timeout(SILENT_FOR, receive(&mut from, LARGEST)).await {
                if let (Some(hint), Some(heard)) = (Hint::from_document(&document), heard) {
                    // Without a receiver the task ends soon.
                    let _ = heard.send(hint).await;
                }
            }
        };
        let writes = async {
            while let Some(document) = queue.recv().await {
                let Ok(bytes) = document.to_vec() else { continue };
                if send(&mut to, &bytes).await.is_err() {
                    break;
                }
            }
        };
        tokio::select! { () = reads => {} () = writes => {} }
    }
}
