//! The relay: hints past the database, between the leading recruiter and the processes that can reach it.
//!
//! The leader listens on a Unix socket, for the processes of its machine, and on a TCP address if it is told to. It writes both and a new
//! secret into `metadata` (the document `relay`). Workers and enqueuers connect, prove that they know the secret, and then exchange the hints
//! of [`Hint`](super::Hint) as BSON documents, which carry their own length. A connected worker does not tail a capped collection, and a
//! connected process does not insert its hints to the leader. So hundreds of idle processes cost MongoDB nothing.
//!
//! Hints stay hints: each may be lost, and no decision relies on one. A process without a connection uses the capped collections. A worker
//! that loses its connection tails its capped collection again, and first reads its assignment. A leader that is silent for [`SILENT_FOR`]
//! counts as gone. A new leader has a new socket, and a worker connects to it after the first keep-alive that it receives from it. A process
//! that only sends hints connects after its second one.
//!
//! Cancellations, and hints about requests to workers, always go through MongoDB, and the leader passes them on to connected workers. So a
//! process that may only read the database, and thereby knows the secret, cannot cancel a job. A wrong hint of it costs a round.
//!
//! | file | what it is |
//! |---|---|
//! | `address` | TCP addresses |
//! | `handshake` | how both ends prove that they know the secret |
//! | `hub` | the leader's end of all connections |
//! | `link` | a client's end of its connection |

pub(crate) mod address;
mod handshake;
pub(crate) mod hub;
mod link;

use std::{
    fmt::Debug,
    io::{Error, ErrorKind},
    path::PathBuf,
    time::Duration,
};

use bson::{Document, RawBsonRef, RawDocumentBuf, doc};
use mongodb::options::ReadConcern;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use self::address::HintsAddress;
pub(crate) use self::link::{Link, Linking};
use crate::{
    base::LeaseTerm,
    mongo::{Store, StoreError, call, readable},
    roster::ProcessIdentity,
};

/// The document in `metadata` that states where the leader listens.
const RELAY: &str = "relay";
/// The leader sends a sign of life on a connection that had no hint for this time.
const SIGN_OF_LIFE_EVERY: Duration = Duration::from_secs(2);
/// A connection is closed when it receives nothing, or accepts nothing, for this time: the other process is frozen or gone.
const SILENT_FOR: Duration = Duration::from_secs(6);
/// Maximum duration of a handshake.
const HANDSHAKE: Duration = Duration::from_secs(2);
/// Maximum size of a hint in bytes. An assignment of 50,000 jobs has about one million.
const LARGEST: usize = 2 * 1024 * 1024;
/// Maximum depth of a hint. Its conversion is recursive, and a deeper document could exhaust the stack.
const DEEPEST: u32 = 8;

/// Where the leader listens, and the secret that a client must know.
#[derive(Clone)]
struct Rendezvous {
    /// Its socket, for the processes of its machine.
    socket: Option<PathBuf>,
    /// Its TCP address.
    address: Option<HintsAddress>,
    secret: String,
}

/// A connection.
trait Stream: AsyncRead + AsyncWrite + Debug + Send + Sync + Unpin {}

impl<S: AsyncRead + AsyncWrite + Debug + Send + Sync + Unpin> Stream for S {}

impl Store {
    /// Where this process may reach the leader: a socket only if the leader is on this machine.
    ///
    /// Filter: the relay. Index: `_id`. Invariant: none.
    async fn rendezvous(&self) -> Result<Option<Rendezvous>, StoreError> {
        let metadata = self.metadata.clone_with_type::<RawDocumentBuf>();
        let read = async move { metadata.find_one(doc! { "_id": RELAY }).read_concern(ReadConcern::local()).await };
        let Some(found) = call("rendezvous", read).await?.map(|found| readable(&found)) else { return Ok(None) };
        let Ok(secret) = found.get_str("secret") else { return Ok(None) };
        let is_here = this_boot().is_some_and(|here| found.get_str("boot_id").is_ok_and(|there| there == here));
        let socket = found.get_str("socket").ok().filter(|_| is_here).map(PathBuf::from);
        let address = found.get_str("address").ok().and_then(|address| address.parse().ok());
        Ok(Some(Rendezvous { socket, address, secret: secret.to_owned() }))
    }

    /// Announces where the leader of this term listens, unless a later leader has done so.
    ///
    /// Filter: the relay, of no later term. Index: `_id`. Invariant: none.
    async fn announce_relay(&self, term: LeaseTerm, at: &Rendezvous) -> Result<(), StoreError> {
        let metadata = self.metadata.clone();
        let filter = doc! { "_id": RELAY, "$and": [term.no_later_in("term")] };
        let socket = at.socket.as_ref().map(|socket| socket.to_string_lossy().into_owned());
        let address = at.address.as_ref().map(ToString::to_string);
        let relay = doc! { "term": term, "boot_id": this_boot(), "socket": socket, "address": address, "secret": &at.secret };
        match call("announce_relay", async move { metadata.update_one(filter, doc! { "$set": relay }).upsert(true).await }).await {
            // A later leader listens.
            Err(error) if error.is_duplicate() => Ok(()),
            written => written.map(drop),
        }
    }
}

/// Identifies this boot of this machine; `None` where the system has no such id.
fn this_boot() -> Option<String> {
    Some(ProcessIdentity::of_this_process().ok()?.boot_id).filter(|boot_id| !boot_id.is_empty())
}

/// Sends one document.
async fn send(to: &mut (impl AsyncWrite + Unpin + ?Sized), document: &[u8]) -> Result<(), Error> {
    tokio::time::timeout(SILENT_FOR, to.write_all(document)).await?
}

/// Receives one document of at most `largest` bytes. Memory grows only as bytes arrive.
///
/// # Errors
/// When the other end is gone, or sends something else.
async fn receive(from: &mut (impl AsyncRead + Unpin + ?Sized), largest: usize) -> Result<Document, Error> {
    let invalid = || Error::new(ErrorKind::InvalidData, "not a hint");
    let mut head = [0; 4];
    from.read_exact(&mut head).await?;
    let length = u32::from_le_bytes(head) as usize;
    if length > largest {
        return Err(invalid());
    }
    let mut bytes = head.to_vec();
    from.take((length as u64).saturating_sub(4)).read_to_end(&mut bytes).await?;
    let document = RawDocumentBuf::from_bytes(bytes).map_err(|_| invalid())?;
    if !is_flat(RawBsonRef::Document(&document), DEEPEST) {
        return Err(invalid());
    }
    Document::try_from(&*document).map_err(|_| invalid())
}

/// Whether a document has no more than this many levels.
fn is_flat(value: RawBsonRef<'_>, levels: u32) -> bool {
    if let Some(document) = value.as_document() {
        levels > 0 && document.iter().all(|element| element.is_ok_and(|(_, inner)| is_flat(inner, levels - 1)))
    } else if let Some(array) = value.as_array() {
        levels > 0 && array.into_iter().all(|element| element.is_ok_and(|inner| is_flat(inner, levels - 1)))
    } else {
        // Code with a scope contains another document.
        value.as_javascript_with_scope().is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn received(bytes: &[u8]) -> Result<Document, ErrorKind> {
        receive(&mut &*bytes, LARGEST).await.map_err(|error| error.kind())
    }

    #[tokio::test]
    async fn documents_arrive_as_they_were_sent() {
        let documents =
            [doc! { "kind": "free", "text": "x".repeat(100_000) }, doc! { "jobs": [{ "workable": { "class": "c" } }] }, doc! {}];
        let (mut ours, mut theirs) = tokio::io::duplex(64);
        for document in documents {
            let bytes = document.to_vec().expect("a document");
            let (sent, received) = tokio::join!(send(&mut ours, &bytes), receive(&mut theirs, LARGEST));
            assert_eq!((sent.ok(), received.ok()), (Some(()), Some(document)));
        }
    }

    #[tokio::test]
    async fn everything_else_is_refused() {
        for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 8], &[0; 8], &[4, 0, 0, 0, 0], &[7, 0, 0, 0, 9, 9, 9]] {
            assert_eq!(received(garbage).await, Err(ErrorKind::InvalidData), "{garbage:?}");
        }
        assert_eq!(received(&[9, 0]).await, Err(ErrorKind::UnexpectedEof));
        let whole = doc! { "kind": "free" }.to_vec().expect("a document");
        assert_eq!(received(&whole[..whole.len() - 1]).await, Err(ErrorKind::InvalidData), "it ends too early");
        let large = doc! { "text": "x".repeat(LARGEST) }.to_vec().expect("a document");
        assert_eq!(received(&large[..4]).await, Err(ErrorKind::InvalidData), "refused before it arrives");
    }

    #[tokio::test]
    async fn a_deep_document_is_refused_and_does_not_exhaust_the_stack() {
        // The innermost levels first: each is a document with one element, named "".
        let mut bytes = vec![5, 0, 0, 0, 0];
        while bytes.len() < LARGEST / 64 {
            let length = u32::try_from(bytes.len() + 7).expect("it is small").to_le_bytes();
            bytes = [&length[..], &[3, 0], &bytes, &[0]].concat();
        }
        assert_eq!(received(&bytes).await, Err(ErrorKind::InvalidData));
    }
}
