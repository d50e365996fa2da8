//! The handshake: both ends prove that they know the secret of the relay, and neither sends it.
//!
//! 1. The leader sends a challenge: random bytes.
//! 2. The client sends a challenge of its own and a code over both. A worker names itself.
//! 3. The leader sends another code over both.
//!
//! The codes are HMAC-SHA-256 (RFC 2104). Each has the word of its end in it, so that none can be sent back. What follows is neither
//! encrypted nor signed.

use std::io::{Error, ErrorKind};

use bson::{Binary, Document, doc, spec::BinarySubtype};
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use super::{Stream, receive, send};
use crate::base::WorkerId;

/// Maximum size in bytes of the documents of a handshake.
const LARGEST: usize = 1_024;

/// One of the two ends.
#[derive(Clone, Copy)]
enum End {
    Leader,
    Client,
}

/// A client that knows the secret.
pub(crate) struct Client {
    /// Its id, if it is a worker.
    pub(crate) worker: Option<WorkerId>,
    /// The leader's answer.
    pub(crate) answer: Vec<u8>,
}

/// The leader's part, up to its answer.
///
/// # Errors
/// `PermissionDenied` if the client does not know the secret; other kinds if it does not follow the handshake.
pub(crate) async fn challenge(stream: &mut dyn Stream, secret: &str) -> Result<Client, Error> {
    let ours = random();
    send(stream, &encoded(&doc! { "challenge": bytes(&ours) })).await?;
    let hello = receive(stream, LARGEST).await?;
    let theirs = of(&hello, "challenge")?;
    verify(secret, End::Client, &ours, &theirs, &hello)?;
    let worker = hello.get_object_id("worker").ok().map(WorkerId::from);
    Ok(Client { worker, answer: encoded(&doc! { "code": bytes(&code(secret, End::Leader, &ours, &theirs).finalize().into_bytes()) }) })
}

/// The client's part.
///
/// # Errors
/// `PermissionDenied` if the other end does not know the secret; other kinds if it does not follow the handshake.
pub(crate) async fn answer(stream: &mut dyn Stream, secret: &str, worker: Option<WorkerId>) -> Result<(), Error> {
    let theirs = of(&receive(stream, LARGEST).await?, "challenge")?;
    let ours = random();
    let proof = code(secret, End::Client, &theirs, &ours).finalize().into_bytes();
    let mut hello = doc! { "challenge": bytes(&ours), "code": bytes(&proof) };
    hello.extend(worker.map(|worker| ("worker".to_owned(), worker.into())));
    send(stream, &encoded(&hello)).await?;
    verify(secret, End::Leader, &theirs, &ours, &receive(stream, LARGEST).await?)
}

fn verify(secret: &str, end: End, leader: &[u8], client: &[u8], document: &Document) -> Result<(), Error> {
    let given = of(document, "code")?;
    code(secret, end, leader, client).verify_slice(&given).map_err(|_| ErrorKind::PermissionDenied.into())
}

/// The code of one end over the challenges of both.
fn code(secret: &str, end: End, leader: &[u8], client: &[u8]) -> Hmac<Sha256> {
    let mut code = Hmac::new_from_slice(secret.as_bytes()).expect("a key may have any length");
    code.update(match end {
        End::Leader => b"leader",
        End::Client => b"client",
    });
    code.update(leader);
    code.update(client);
    code
}

fn random() -> [u8; 32] {
    rand::random()
}

fn bytes(of: &[u8]) -> Binary {
    Binary { subtype: BinarySubtype::Generic, bytes: of.to_vec() }
}

/// 32 bytes in this field.
fn of(document: &Document, field: &str) -> Result<Vec<u8>, Error> {
    let bytes = document.get_binary_generic(field).ok().filter(|bytes| bytes.len() == 32);
    bytes.cloned().ok_or_else(|| Error::new(ErrorKind::InvalidData, "not a handshake"))
}

fn encoded(document: &Document) -> Vec<u8> {
    document.to_vec().expect("it has bytes and an id only")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the leader and the client say of each other.
    async fn meet(leader: &str, client: &str, worker: Option<WorkerId>) -> (Result<Option<WorkerId>, ErrorKind>, Result<(), ErrorKind>) {
        let (mut here, mut there) = tokio::io::duplex(4_096);
        let leads = async move {
            let client = challenge(&mut here, leader).await.map_err(|error| error.kind())?;
            send(&mut here, &client.answer).await.map_err(|error| error.kind())?;
            Ok(client.worker)
        };
        let connects = async { answer(&mut there, client, worker).await.map_err(|error| error.kind()) };
        tokio::join!(leads, connects)
    }

    #[tokio::test]
    async fn both_ends_must_know_the_secret() {
        let worker = WorkerId::new();
        assert_eq!(meet("s", "s", Some(worker)).await, (Ok(Some(worker)), Ok(())));
        assert_eq!(meet("s", "s", None).await, (Ok(None), Ok(())));
        let (refused, closed) = meet("s", "t", Some(worker)).await;
        assert_eq!((refused, closed), (Err(ErrorKind::PermissionDenied), Err(ErrorKind::UnexpectedEof)));
    }

    /// Someone who does not know the secret sends back what it received.
    #[tokio::test]
    async fn an_echo_is_no_proof() {
        let (mut here, mut there) = tokio::io::duplex(4_096);
        let echo = async {
            let challenge = random();
            send(&mut there, &encoded(&doc! { "challenge": bytes(&challenge) })).await?;
            let hello = receive(&mut there, LARGEST).await?;
            send(&mut there, &encoded(&hello)).await
        };
        let (echoed, answered) = tokio::join!(echo, answer(&mut here, "s", None));
        assert!(echoed.is_ok());
        assert_eq!(answered.map_err(|error| error.kind()), Err(ErrorKind::PermissionDenied));
    }

    #[tokio::test]
    async fn other_documents_are_no_handshake() {
        for document in [doc! {}, doc! { "challenge": "x" }, doc! { "challenge": bytes(&[1; 31]) }, doc! { "secret": "s" }] {
            let (mut here, mut there) = tokio::io::duplex(4_096);
            let stranger = async {
                receive(&mut there, LARGEST).await?;
                send(&mut there, &encoded(&document)).await
            };
            let (sent, refused) = tokio::join!(stranger, challenge(&mut here, "s"));
            assert!(sent.is_ok());
            assert_eq!(refused.map(|client| client.worker).map_err(|error| error.kind()), Err(ErrorKind::InvalidData), "{document}");
        }
    }
}
