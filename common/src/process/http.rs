//! Connections of an HTTP server, each with bounds: for metrics, and for the API of `recruiter web`.

use std::{convert::Infallible, error::Error, net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use hyper::{
    Request, Response,
    body::{Body, Incoming},
    server::conn::http1,
    service::{Service, service_fn},
};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::sockopt::set_tcp_user_timeout;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use crate::base::pause;

/// Wait after a connection that could not be accepted: there may be no file descriptor left.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// What clients may take.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Maximum number of connections at a time. Further ones wait.
    pub connections: usize,
    /// How long a client may take for the head of a request.
    pub head_within: Duration,
    /// Maximum size of the head of a request, in bytes: at least 8,192.
    pub head_bytes: usize,
    /// How long a connection may take if it has one request only. `None`: it may have many, and the service bounds each.
    pub one_request_within: Option<Duration>,
    /// How long what was sent may wait for a client that reads nothing, or is gone.
    pub read_within: Duration,
}

/// The address of a client, among the extensions of its requests.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub SocketAddr);

/// Serves until `stop`, and then until the requests that have begun are answered.
pub async fn serve<S, B>(listener: TcpListener, bounds: Bounds, service: S, stop: CancellationToken)
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible, Future: Send> + Clone + Send + Sync + 'static,
    B: Body<Data: Send, Error: Into<Box<dyn Error + Send + Sync>>> + Send + 'static,
{
    let (free, mut connections) = (Arc::new(Semaphore::new(bounds.connections)), JoinSet::new());
    loop {
        let next = async {
            let place = free.clone().acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            next = next => next,
            () = stop.cancelled() => break,
        };
        while connections.try_join_next().is_some() {}
        match accepted {
            Ok((stream, peer)) => {
                let (service, stop) = (service.clone(), stop.clone());
                connections.spawn(async move {
                    connection(stream, Peer(peer), bounds, service, stop).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                pause(AGAIN_AFTER).await;
            }
        }
    }
    while connections.join_next().await.is_some() {}
}

async fn connection<S, B>(stream: TcpStream, peer: Peer, bounds: Bounds, service: S, stop: CancellationToken)
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible>,
    B: Body<Error: Into<Box<dyn Error + Send + Sync>>> + 'static,
{
    // The end of an answer is not kept back until the client has acknowledged its beginning.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, client = %peer.0, "answers may be late");
    }
    // A write that does not end would keep the connection for ever.
    let read_within = u32::try_from(bounds.read_within.as_millis()).unwrap_or(u32::MAX);
    if let Err(error) = set_tcp_user_timeout(&stream, read_within) {
        tracing::debug!(%error, client = %peer.0, "a client that reads nothing will not be noticed");
    }
    let answers = service_fn(|mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer);
        service.call(request)
    });
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(bounds.head_within)
        .max_buf_size(bounds.head_bytes)
        .keep_alive(bounds.one_request_within.is_none())
        .serve_connection(TokioIo::new(stream), answers);
    let mut serving = pin!(serving);
    let until_stopped = async {
        tokio::select! {
            done = serving.as_mut() => done,
            () = stop.cancelled() => {
                serving.as_mut().graceful_shutdown();
                serving.await
            }
        }
    };
    let done = match bounds.one_request_within {
        Some(limit) => timeout(limit, until_stopped).await,
        None => Ok(until_stopped.await),
    };
    match done {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, client = %peer.0, "a connection failed"),
        Err(_) => tracing::debug!(client = %peer.0, "a client was too slow"),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn a_client_that_sends_no_whole_head_is_disconnected_and_makes_room() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let bounds = Bounds {
            connections: 1,
            head_within: Duration::from_millis(50),
            head_bytes: 8_192,
            one_request_within: None,
            read_within: Duration::from_secs(30),
        };
        let answers = service_fn(async |_| Ok::<_, Infallible>(Response::new("answered".to_owned())));
        tokio::spawn(serve(listener, bounds, answers, CancellationToken::new()));
        let mut slow = TcpStream::connect(at).await.unwrap();
        slow.write_all(b"GET / HTTP/1.1\r\nHost: ").await.unwrap();
        let mut next = TcpStream::connect(at).await.unwrap();
        next.write_all(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").await.unwrap();
        let mut answered = String::new();
        next.read_to_string(&mut answered).await.unwrap();
        assert!(answered.starts_with("HTTP/1.1 200") && answered.ends_with("answered"), "{answered}");
        let mut rest = Vec::new();
        slow.read_to_end(&mut rest).await.unwrap_or_default();
        assert!(!rest.starts_with(b"HTTP/1.1 200"));
    }
}
