//! A small HTTP server for metrics and probes. Everything that a client can cause has a bound.

use std::{convert::Infallible, sync::Arc, time::Duration};

use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::{ALLOW, CONTENT_TYPE, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
};

use crate::base::pause;

/// Maximum number of connections at a time. Further ones wait.
const CONNECTIONS: usize = 16;
/// How long a client may take for the head of its request.
const HEAD_WITHIN: Duration = Duration::from_secs(3);
/// How long a connection may take, until the answer is read.
const CONNECTION_WITHIN: Duration = Duration::from_secs(10);
/// Maximum size of the head of a request, in bytes. The smallest that hyper has.
const HEAD_BYTES: usize = 8_192;
/// Wait after a connection that could not be accepted: there may be no file descriptor left.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Whether a probe succeeds, in words.
pub(super) type Answer = Result<String, String>;

/// What is served.
pub(super) trait Pages: Send + Sync + 'static {
    /// In the text format of Prometheus.
    fn metrics(&self) -> String;
    fn live(&self) -> Answer;
    fn ready(&self) -> Answer;
}

/// Serves until it is dropped.
pub(super) async fn run(listener: TcpListener, pages: impl Pages) {
    let (pages, free) = (Arc::new(pages), Arc::new(Semaphore::new(CONNECTIONS)));
    let mut connections = JoinSet::new();
    loop {
        let place = free.clone().acquire_owned().await;
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, _)) => {
                let pages = pages.clone();
                connections.spawn(async move {
                    connection(stream, pages.as_ref()).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a connection for metrics could not be accepted");
                pause(AGAIN_AFTER).await;
            }
        }
    }
}

/// One request and its answer.
async fn connection(stream: TcpStream, pages: &impl Pages) {
    let answers = service_fn(async |request: Request<Incoming>| Ok::<_, Infallible>(answer(request.method(), request.uri().path(), pages)));
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WITHIN)
        .max_buf_size(HEAD_BYTES)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), answers);
    match tokio::time::timeout(CONNECTION_WITHIN, serving).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a request for metrics failed"),
        Err(_) => tracing::debug!("a client for metrics was too slow"),
    }
}

fn answer(method: &Method, path: &str, pages: &impl Pages) -> Response<Full<Bytes>> {
    if !matches!(*method, Method::GET | Method::HEAD) {
        let mut refused = text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are answered");
        refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refused;
    }
    let probe = |answer: Answer| match answer {
        Ok(said) => text(StatusCode::OK, &said),
        Err(said) => text(StatusCode::SERVICE_UNAVAILABLE, &said),
    };
    match path {
        "/metrics" => page(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", pages.metrics()),
        "/livez" => probe(pages.live()),
        "/readyz" => probe(pages.ready()),
        _ => text(StatusCode::NOT_FOUND, "there are /metrics, /livez and /readyz"),
    }
}

fn text(status: StatusCode, said: &str) -> Response<Full<Bytes>> {
    page(status, "text/plain; charset=utf-8", format!("{said}\n"))
}

fn page(status: StatusCode, content: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Test;

    impl Pages for Test {
        fn metrics(&self) -> String {
            "a_metric 1\n".into()
        }

        fn live(&self) -> Answer {
            Ok("alive".into())
        }

        fn ready(&self) -> Answer {
            Err("starting".into())
        }
    }

    #[test]
    fn each_path_has_its_answer() {
        let check = |method: Method, path: &str| answer(&method, path, &Test).status().as_u16();
        assert_eq!(["/metrics", "/livez", "/readyz", "/", "/metrics/"].map(|path| check(Method::GET, path)), [200, 200, 503, 404, 404]);
        assert_eq!(
            [Method::HEAD, Method::POST, Method::DELETE, Method::OPTIONS].map(|method| check(method, "/metrics")),
            [200, 405, 405, 405]
        );
        assert_eq!(answer(&Method::POST, "/metrics", &Test).headers()[ALLOW], "GET, HEAD");
        let content = |path| answer(&Method::GET, path, &Test).headers()[CONTENT_TYPE].clone();
        assert_eq!(content("/metrics"), "text/plain; version=0.0.4; charset=utf-8");
        assert_eq!(content("/livez"), "text/plain; charset=utf-8");
    }
}
