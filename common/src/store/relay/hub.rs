//! The leader's end of the relay.

use std::{
    collections::HashMap,
    fs::Permissions,
    io::{Error, ErrorKind},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bson::{doc, oid::ObjectId};
use rand::RngExt as _;
use tokio::{
    net::{UnixListener, UnixStream},
    sync::mpsc,
    task::{AbortHandle, JoinSet},
    time::timeout,
};

use super::{HANDSHAKE, LARGEST, Rendezvous, SIGN_OF_LIFE_EVERY, receive, send, this_boot};
use crate::{
    ids::{LeaseTerm, WorkerId},
    shutdown::pause,
    store::{Channel, Hint, Hints, Store},
};

/// Maximum number of connections: half of the files that a process may usually open. Further processes use the capped collections.
const CONNECTIONS: usize = 500;
/// Maximum size of the first document of a client, which has not shown the secret yet.
const LARGEST_HELLO: usize = 1_024;
/// Maximum number of hints that wait for a slow worker. With more, its connection is closed.
const QUEUE: usize = 1_024;
/// Pause after a connection could not be accepted, for example because the process has too many open files.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// The relay of one term. Dropping it closes all connections.
#[derive(Debug)]
pub struct Hub {
    socket: PathBuf,
    accepting: AbortHandle,
    store: Store,
}

/// The connected workers, and the queue of each.
#[derive(Debug, Default)]
pub(super) struct Connected(Mutex<HashMap<WorkerId, Outgoing>>);

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
    /// Listens for hints on a new socket in `directory`, for the leader of this term. What arrives joins `hints`. From now on this store
    /// sends hints to connected workers directly.
    ///
    /// Index: `_id`. Invariant: none.
    ///
    /// # Errors
    /// When the socket cannot be created or announced. Hints then go through the database.
    pub async fn serve_hints(&self, directory: &Path, term: LeaseTerm, hints: &Hints) -> Result<Hub, Error> {
        let boot_id = this_boot().ok_or(ErrorKind::Unsupported)?;
        std::fs::create_dir_all(directory)?;
        remove_dead_sockets(directory).await;
        let socket = std::path::absolute(directory)?.join(format!("hints-{}.sock", ObjectId::new()));
        let listener = UnixListener::bind(&socket)?;
        let secret = format!("{:032x}{:032x}", rand::rng().random::<u128>(), rand::rng().random::<u128>());
        let gate = Gate { secret: secret.clone(), connected: Arc::default(), hints: hints.sender(), has_warned: AtomicBool::new(false) };
        self.relay.serve(Some(gate.connected.clone()));
        let accepting = tokio::spawn(accept(listener, Arc::new(gate))).abort_handle();
        let hub = Hub { socket: socket.clone(), accepting, store: self.clone() };
        // The directory and the secret decide who of the group may connect.
        std::fs::set_permissions(&socket, Permissions::from_mode(0o660))?;
        self.announce_relay(term, boot_id, &Rendezvous { socket, secret }).await.map_err(Error::other)?;
        Ok(hub)
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.store.relay.serve(None);
        self.accepting.abort();
        let _ = std::fs::remove_file(&self.socket);
    }
}

impl Connected {
    /// Sends what concerns connected workers to them, and returns the hints for the others.
    pub(super) fn send_all(&self, hints: Vec<(Channel, Hint)>) -> Vec<(Channel, Hint)> {
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
    pub(super) fn broadcast(&self, hint: &Hint) {
        let bytes = encoded(hint);
        self.workers().retain(|_, outgoing| outgoing.try_send(bytes.clone()).is_ok());
    }

    /// The connected workers, and the queue of each.
    pub(super) fn workers(&self) -> MutexGuard<'_, HashMap<WorkerId, Outgoing>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn encoded(hint: &Hint) -> Arc<[u8]> {
    hint.to_document().to_vec().expect("hints are made of ids, texts, numbers and dates").into()
}

/// Removes the sockets of processes that were killed.
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

async fn accept(listener: UnixListener, gate: Arc<Gate>) {
    let mut connections = JoinSet::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) if connections.len() < CONNECTIONS => _ = connections.spawn(serve(stream, gate.clone())),
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
async fn serve(mut stream: UnixStream, gate: Arc<Gate>) {
    let Ok(Ok(hello)) = timeout(HANDSHAKE, receive(&mut stream, LARGEST_HELLO)).await else { return };
    if !hello.get_str("secret").is_ok_and(|secret| is_same(secret, &gate.secret)) {
        if !gate.has_warned.swap(true, Ordering::Relaxed) {
            let pid = stream.peer_cred().ok().and_then(|peer| peer.pid());
            tracing::warn!(pid, "a process connected to the socket for hints without the secret in this database and was refused");
        }
        return;
    }
    let worker = hello.get_object_id("worker").ok().map(WorkerId::from);
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
    let (mut from, mut to) = stream.split();
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
        let mut next = Some(sign_of_life.clone());
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

/// Compares two secrets in a time that does not depend on how much of them is the same.
fn is_same(given: &str, secret: &str) -> bool {
    given.len() == secret.len() && given.bytes().zip(secret.bytes()).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}
