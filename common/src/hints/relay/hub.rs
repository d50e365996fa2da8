//! The leader's end of the relay.

use std::{
    collections::HashMap,
    future::pending,
    io::{Error, ErrorKind},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bson::doc;
#[cfg(unix)]
use bson::oid::ObjectId;
#[cfg(unix)]
use tokio::net::{UnixListener, UnixStream};
use tokio::{
    net::TcpListener,
    sync::mpsc,
    task::{AbortHandle, JoinSet},
    time::timeout,
};

use super::{
    HANDSHAKE, LARGEST, Rendezvous, SIGN_OF_LIFE_EVERY, Stream,
    address::HintsAddress,
    handshake::{Client, challenge},
    receive, send,
};
use crate::{
    base::{LeaseTerm, WorkerId, pause},
    hints::{Hint, listener::Hints},
    mongo::{Channel, Store, StoreError},
};

/// Maximum number of connections: half of the files that a process may usually open. Further processes use the capped collections.
const CONNECTIONS: usize = 500;
/// Maximum number of hints that wait for a slow worker. With more, its connection is closed.
const QUEUE: usize = 1_024;
/// Pause after a connection could not be accepted, for example because the process has too many open files.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Where a leader listens for hints. Without either all hints go through the database.
#[derive(Clone, Debug, Default)]
pub struct HintsAt {
    /// The directory of a Unix socket, for the processes of this machine.
    pub directory: Option<PathBuf>,
    /// A TCP address, for those that cannot reach the socket.
    pub address: Option<HintsAddress>,
}

/// The relay of one term. Dropping it closes all connections.
#[derive(Debug)]
pub struct Hub {
    socket: Option<PathBuf>,
    accepting: AbortHandle,
    store: Store,
}

/// The connected workers, and the queue of each.
#[derive(Debug, Default)]
pub(crate) struct Connected(Mutex<HashMap<WorkerId, Outgoing>>);

type Outgoing = mpsc::Sender<Arc<[u8]>>;

/// The shared state of all connections.
struct Gate {
    secret: String,
    connected: Arc<Connected>,
    hints: mpsc::Sender<Hint>,
    /// Whether a refused client was logged.
    has_warned: AtomicBool,
}

impl Store {
    /// Listens for hints, for the leader of this term. What arrives joins `hints`. From now on this store sends hints to connected workers
    /// directly. Where it cannot listen, it logs a warning. `None` if it listens nowhere.
    ///
    /// Index: `_id`. Invariant: none.
    ///
    /// # Errors
    /// When it cannot be announced where the leader listens. Hints then go through the database.
    pub async fn serve_hints(&self, at: &HintsAt, term: LeaseTerm, hints: &Hints) -> Result<Option<Hub>, StoreError> {
        let mut listeners = Listeners::default();
        let socket = listeners.listen_in(at.directory.as_deref()).await;
        let address = listeners.listen_at(at.address.as_ref()).await;
        if socket.is_none() && address.is_none() {
            return Ok(None);
        }
        let secret = format!("{:032x}{:032x}", rand::random::<u128>(), rand::random::<u128>());
        let gate = Gate { secret: secret.clone(), connected: Arc::default(), hints: hints.sender(), has_warned: AtomicBool::new(false) };
        self.relay().serve(Some(gate.connected.clone()));
        let accepting = tokio::spawn(accept(listeners, Arc::new(gate))).abort_handle();
        let hub = Hub { socket: socket.clone(), accepting, store: self.clone() };
        self.announce_relay(term, &Rendezvous { socket, address, secret }).await?;
        Ok(Some(hub))
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.store.relay().serve(None);
        self.accepting.abort();
        if let Some(socket) = &self.socket {
            let _ = std::fs::remove_file(socket);
        }
    }
}

/// The open ends at which clients connect.
#[derive(Default)]
struct Listeners {
    #[cfg(unix)]
    socket: Option<UnixListener>,
    tcp: Option<TcpListener>,
}

impl Listeners {
    /// Opens a new socket in this directory and returns its path.
    async fn listen_in(&mut self, directory: Option<&Path>) -> Option<PathBuf> {
        let directory = directory?;
        match self.open_socket(directory).await {
            Ok(socket) => Some(socket),
            Err(error) => {
                tracing::warn!(directory = %directory.display(), %error, "cannot listen for hints on a socket; other ways remain");
                None
            }
        }
    }

    #[cfg(unix)]
    async fn open_socket(&mut self, directory: &Path) -> Result<PathBuf, Error> {
        use std::{fs::Permissions, os::unix::fs::PermissionsExt as _};

        // Clients tell by it that the socket is on their machine.
        super::this_boot().ok_or(ErrorKind::Unsupported)?;
        std::fs::create_dir_all(directory)?;
        remove_dead_sockets(directory).await;
        let socket = std::path::absolute(directory)?.join(format!("hints-{}.sock", ObjectId::new()));
        let listener = UnixListener::bind(&socket)?;
        // The directory and the secret decide who of the group may connect.
        std::fs::set_permissions(&socket, Permissions::from_mode(0o660))?;
        self.socket = Some(listener);
        Ok(socket)
    }

    #[cfg(not(unix))]
    async fn open_socket(&mut self, _: &Path) -> Result<PathBuf, Error> {
        Err(ErrorKind::Unsupported.into())
    }

    /// Listens at this address. Returns the one at which clients connect.
    async fn listen_at(&mut self, address: Option<&HintsAddress>) -> Option<HintsAddress> {
        let address = address?;
        match address.listen().await {
            Ok((listener, reached_at)) => {
                tracing::info!(address = %reached_at, "listening for hints");
                self.tcp = Some(listener);
                Some(reached_at)
            }
            Err(error) => {
                tracing::warn!(%address, %error, "cannot listen for hints at this address; other ways remain");
                None
            }
        }
    }

    /// The next connection, and who has made it.
    async fn accept(&self) -> Result<(Box<dyn Stream>, String), Error> {
        #[cfg(unix)]
        let local = async {
            let Some(socket) = &self.socket else { return pending().await };
            let (stream, _) = socket.accept().await?;
            let pid = stream.peer_cred()?.pid().map_or_else(|| "a process".into(), |pid| format!("process {pid}"));
            Ok::<_, Error>((Box::new(stream) as Box<dyn Stream>, pid))
        };
        #[cfg(not(unix))]
        let local = pending::<Result<_, Error>>();
        let remote = async {
            let Some(tcp) = &self.tcp else { return pending().await };
            let (stream, from) = tcp.accept().await?;
            stream.set_nodelay(true)?;
            Ok::<_, Error>((Box::new(stream) as Box<dyn Stream>, from.to_string()))
        };
        tokio::select! { accepted = local => accepted, accepted = remote => accepted }
    }
}

impl Connected {
    /// Sends what concerns connected workers to them, and returns the hints for the others.
    pub(crate) fn send_all(&self, hints: Vec<(Channel, Hint)>) -> Vec<(Channel, Hint)> {
        // These are the same on every channel.
        if let Some((_, for_all)) = hints.iter().find(|(_, hint)| matches!(hint, Hint::Recall | Hint::KeepAlive { .. })) {
            self.broadcast(for_all);
        }
        let for_others = |(channel, hint)| {
            let Hint::Assigned { round, mut assignments } = hint else { return Some((channel, hint)) };
            assignments.retain(|given| !self.send(given.worker, &Hint::Assigned { round, assignments: vec![given.clone()] }));
            (!assignments.is_empty()).then_some((channel, Hint::Assigned { round, assignments }))
        };
        hints.into_iter().filter_map(for_others).collect()
    }

    /// Sends a hint to a worker. Returns false if the worker is not connected. If it reads too slowly, its connection is closed, and the
    /// worker then reads its assignment.
    fn send(&self, worker: WorkerId, hint: &Hint) -> bool {
        let mut workers = self.workers();
        let Some(outgoing) = workers.get(&worker) else { return false };
        let is_sent = hint.parts().iter().all(|part| outgoing.try_send(encoded(part)).is_ok());
        if !is_sent {
            workers.remove(&worker);
        }
        is_sent
    }

    /// Sends a hint to every connected worker.
    pub(crate) fn broadcast(&self, hint: &Hint) {
        let bytes = encoded(hint);
        self.workers().retain(|_, outgoing| outgoing.try_send(bytes.clone()).is_ok());
    }

    /// The connected workers, and the queue of each.
    pub(crate) fn workers(&self) -> MutexGuard<'_, HashMap<WorkerId, Outgoing>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn encoded(hint: &Hint) -> Arc<[u8]> {
    hint.to_document().to_vec().expect("hints are made of ids, texts, numbers and dates").into()
}

/// Removes the sockets of processes that were killed.
#[cfg(unix)]
async fn remove_dead_sockets(directory: &Path) {
    let paths = std::fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_ours = |name: &str| name.starts_with("hints-") && name.ends_with(".sock");
    for path in paths.filter(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(is_ours)) {
        let answer = timeout(HANDSHAKE, UnixStream::connect(&path)).await;
        if matches!(answer, Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused) {
            let _ = std::fs::remove_file(&path);
        }
    }
}

async fn accept(listeners: Listeners, gate: Arc<Gate>) {
    let mut connections = JoinSet::new();
    loop {
        match listeners.accept().await {
            Ok((stream, peer)) if connections.len() < CONNECTIONS => _ = connections.spawn(serve(stream, peer, gate.clone())),
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(%error, "a process could not connect; its hints go through MongoDB");
                pause(ACCEPT_AGAIN_AFTER).await;
            }
        }
        while connections.try_join_next().is_some() {}
    }
}

/// Serves one connection until one side ends it.
async fn serve(mut stream: Box<dyn Stream>, peer: String, gate: Arc<Gate>) {
    let Client { worker, answer } = match timeout(HANDSHAKE, challenge(&mut *stream, &gate.secret)).await {
        Ok(Ok(client)) => client,
        Ok(Err(error)) if error.kind() == ErrorKind::PermissionDenied && !gate.has_warned.swap(true, Ordering::Relaxed) => {
            tracing::warn!(peer, "a process connected for hints without the secret in this database and was refused");
            return;
        }
        Ok(Err(_)) | Err(_) => return,
    };
    let (outgoing, mut queue) = mpsc::channel(QUEUE);
    // Only a worker is sent hints. It is entered before the answer, because it stops tailing when it has the answer.
    let _never_used = match worker {
        Some(worker) => {
            gate.connected.workers().insert(worker, outgoing);
            None
        }
        None => Some(outgoing),
    };
    // A kind of hint that no process knows.
    let sign_of_life: Arc<[u8]> = doc! { "kind": "alive" }.to_vec().expect("a document").into();
    let (mut from, mut to) = tokio::io::split(stream);
    let reads = async {
        while let Ok(document) = receive(&mut from, LARGEST).await {
            if let Some(hint) = Hint::from_document(&document)
                && gate.hints.send(hint).await.is_err()
            {
                break;
            }
        }
    };
    let writes = async {
        let mut next: Option<Arc<[u8]>> = Some(answer.into());
        // Without a next hint the worker was removed, because it reads too slowly or has connected again.
        while let Some(bytes) = next
            && send(&mut to, &bytes).await.is_ok()
        {
            next = timeout(SIGN_OF_LIFE_EVERY, queue.recv()).await.unwrap_or_else(|_| Some(sign_of_life.clone()));
        }
    };
    tokio::select! { () = reads => {} () = writes => {} }
    drop(queue);
    if let Some(worker) = worker {
        // The worker may have connected again in the meantime.
        gate.connected.workers().retain(|id, outgoing| *id != worker || !outgoing.is_closed());
    }
}
