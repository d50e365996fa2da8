//! A relay in front of mongod that delays every byte, as a network does.

use std::{io, time::Duration};

use recruiter_common::shutdown::pause;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::mpsc,
    task::JoinHandle,
    time::Instant,
};

/// Maximum number of pieces in flight in one direction of one connection.
const ON_THE_WAY: usize = 4_096;
const PIECE: usize = 64 * 1024;

/// A relay that ends when this value is dropped.
pub(super) struct SlowLine {
    port: u16,
    relay: JoinHandle<()>,
}

impl SlowLine {
    /// Starts a relay to a server on this machine.
    pub(super) async fn to(server: u16, latency: Duration) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let port = listener.local_addr()?.port();
        let relay = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(connect(client, server, latency));
            }
        });
        Ok(Self { port, relay })
    }

    pub(super) fn uri(&self, database: &str) -> String {
        format!("mongodb://127.0.0.1:{}/{database}?directConnection=true", self.port)
    }
}

impl Drop for SlowLine {
    fn drop(&mut self) {
        self.relay.abort();
    }
}

async fn connect(client: TcpStream, server: u16, latency: Duration) -> io::Result<()> {
    let server = TcpStream::connect(("127.0.0.1", server)).await?;
    for end in [&client, &server] {
        end.set_nodelay(true)?;
    }
    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
    tokio::spawn(carry(from_client, to_server, latency));
    tokio::spawn(carry(from_server, to_client, latency));
    Ok(())
}

/// Relays one direction of a connection until it ends.
async fn carry(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, latency: Duration) {
    let (sender, mut pieces) = mpsc::channel::<(Instant, Vec<u8>)>(ON_THE_WAY);
    tokio::spawn(async move {
        while let Some((arrives, piece)) = pieces.recv().await {
            pause(arrives.saturating_duration_since(Instant::now())).await;
            if to.write_all(&piece).await.is_err() {
                return;
            }
        }
    });
    let mut buffer = vec![0; PIECE];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        if sender.send((Instant::now() + latency, buffer[..read].to_vec())).await.is_err() {
            return;
        }
    }
}
